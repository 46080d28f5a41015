"""Curves: what is read from a run's folder, what is drawn, and that training does not depend on it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import run_script, run_to_the_end
from training import assert_same_run, trained

from support.cli import UserError
from support.console import curves
from support.console.curves import CurvesFile, draw_run, draw_runs, loss_limits, read_run, settled, smooth

PNG = b"\x89PNG\r\n\x1a\n"


def write_run(
    folder: Path, losses: list[float], val: dict[int, float], hella: dict[int, float] | None = None, **record: object
) -> Path:  # fmt: skip
    """The files of a run that did not take place; those besides the log only with a `record`."""
    folder.mkdir(parents=True)
    lines = [f"{step} train {loss:.6f}" for step, loss in enumerate(losses)]
    lines += [f"{step} val {loss:.4f}" for step, loss in val.items()]
    lines += [f"{step} hella {score:.4f}" for step, score in (hella or {}).items()]
    (folder / "log.txt").write_text("\n".join(lines) + "\n")
    if record:
        steps = [{"step": i, "lr": 1e-3 / (i + 1), "seconds": 36.0} for i in range(len(losses))]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
        run = {
            "flags": {"optimizer": "adamw", "schedule": "cosine", "max_lr": 1e-3, "data": "shards"}, "versions": {},
            "data": {"source": "text", "val": []}, "tokenizer": {"name": "gpt2"}, "bytes_per_token": 4.5,
            "parameters": 124475904, "tokens_per_step": 1000, "resumes": [],
        }  # fmt: skip
        (folder / "run.json").write_text(json.dumps(run | record))
    return folder


def labels_of(figure) -> list[str]:
    """The texts of all legends."""
    legends = [axes.get_legend() for axes in figure.axes if axes.get_legend()]
    return [text.get_text() for legend in legends for text in legend.get_texts()]


def test_a_run_is_read_from_its_three_files(tmp_path):
    changed = {"max_lr": 2e-3, "keep": 1}
    folder = write_run(tmp_path / "run", [5.0, 4.0, 3.0], {0: 5.1, 3: 2.9}, {3: 0.26}, resumes=[{"flags": changed}])
    run = read_run(folder)
    assert run.train == {0: 5.0, 1: 4.0, 2: 3.0} and run.val == {0: 5.1, 3: 2.9} and run.hella == {3: 0.26}
    assert run.lr == {0: 1e-3, 1: 5e-4, 2: pytest.approx(1e-3 / 3)} and run.steps == 3
    assert run.flags["max_lr"] == 2e-3 and run.flags["keep"] == 1 and run.flags["optimizer"] == "adamw"
    assert run.hours == pytest.approx(0.03) and run.bytes_per_token == 4.5
    assert run.positions([0, 3], "tokens").tolist() == [0, 3000]
    assert run.positions([0, 1, 3], "hours").tolist() == pytest.approx([0, 0.01, 0.03])
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text(lines[0] + lines[2])
    assert read_run(folder).hours is None and read_run(folder).positions([0], "hours") is None


def test_a_run_of_an_earlier_version_is_its_log(tmp_path):
    run = read_run(write_run(tmp_path / "run", [5.0, 4.0], {0: 5.1}))
    assert (run.steps, run.lr, run.record, run.flags, run.hours, run.bytes_per_token) == (2, {}, None, {}, None, None)
    assert run.positions([1], "tokens") is None and run.positions([1], "steps").tolist() == [1]
    assert len(draw_run(run).axes) == 1


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"flags": 1}', "\0"])
def test_damaged_files_count_as_missing(tmp_path, damage):
    folder = write_run(tmp_path / "run", [5.0, 4.0], {0: 5.1}, keep=1)
    for name in ("run.json", "metrics.jsonl"):
        (folder / name).write_text(damage)
    run = read_run(folder)
    assert run.record is None and run.lr == {} and len(draw_run(run).axes) == 1


@pytest.mark.parametrize(
    "log, message", [(None, "has no log.txt"), ("", "has no loss yet"), ("0 hella 0.2500\n", "has no loss yet")]
)
def test_what_is_no_run_is_an_error(tmp_path, log, message):
    with pytest.raises(UserError, match="nothing is not a folder. Pass the folder of a run"):
        read_run(tmp_path / "nothing")
    if log is not None:
        (tmp_path / "log.txt").write_text(log)
    with pytest.raises(UserError, match=message):
        read_run(tmp_path)


def test_smoothing_is_the_mean_of_the_values_around():
    values = np.random.default_rng(0).normal(size=450)
    expected = [values[max(0, i - 4) : i + 5].mean() for i in range(450)]
    assert smooth(values) == pytest.approx(np.array(expected))
    assert smooth(values[:99]) == pytest.approx(values[:99]) and len(smooth(values[:0])) == 0


def test_the_first_losses_do_not_flatten_the_others():
    x = np.arange(1000)
    losses, val = np.where(x < 50, 11.0, 4 - x / 1000), (np.array([0, 999]), np.array([11.0, 3.2]))
    run = SimpleNamespace(steps=1000)
    low, high = loss_limits([settled(run, x, losses), settled(run, *val)])
    assert 2.9 < low < 3.001 and 3.95 < high < 4.05
    low, high = loss_limits([settled(run, np.array([0]), np.array([5.0])), settled(run, x[:0], np.zeros(0))])
    assert low < 5 < high


def test_a_short_run_is_shown_from_its_first_loss_on(tmp_path):
    losses = [10.0, *(5 - i / 100 for i in range(148))]
    run = read_run(write_run(tmp_path / "run", losses, {0: 10.1, 149: 3.6}))
    for figure in (draw_run(run), draw_runs(["run"], [run])):
        assert figure.axes[0].get_ylim()[1] > 10.1 and figure.axes[0].get_xlim()[0] == 0


def test_the_validation_of_step_0_is_a_point_without_a_line(tmp_path):
    runs = [read_run(write_run(tmp_path / name, [9.0, 5.0, 4.0], {0: 9.5, 2: 4.5, 3: 4.2})) for name in ("one", "two")]
    figure = draw_runs(["one", "two"], runs)
    for axes, count in ((draw_run(runs[0]).axes[0], 1), (figure.axes[0], 2)):
        lines = [line.get_xydata().tolist() for line in axes.get_lines()]
        assert lines.count([[2, 4.5], [3, 4.2]]) == lines.count([[0, 9.5]]) == count
    assert figure.texts[0].get_text() == "one, two"


@pytest.mark.parametrize(
    "tokenizer, data, hella, lines",
    [
        ("gpt2", {"source": "HuggingFaceFW/fineweb-edu sample-10BT", "val": []}, True, ["3.2924", "124M: 0.2955", "350M: 0.3752"]),
        ("gpt2", {"source": None, "val": [["edufineweb_val_000000.npy", 9, None]]}, False, ["3.2924"]),
        ("gpt2", {"source": "book", "val": []}, True, ["124M: 0.2955", "350M: 0.3752"]),
        ("gpt2", {"source": "short contexts", "val": []}, True, []),
        ("bpe", {"source": "HuggingFaceFW/fineweb-edu sample-10BT", "val": []}, True, []),
    ],
)  # fmt: skip
def test_openais_figures_are_drawn_where_they_can_be_compared(tmp_path, tokenizer, data, hella, lines):
    flags = {"model": "gpt2-medium", "max_lr": 1e-3, "block_size": 32 if "short" in str(data) else 1024}
    scores = {0: 0.25, 3: 0.26} if hella else {}
    run = write_run(
        tmp_path / "run", [5.0, 4.0, 3.5], {3: 3.4}, scores, tokenizer={"name": tokenizer}, data=data, flags=flags
    )
    labels = [label for label in labels_of(draw_run(read_run(run))) if "OpenAI" in label]
    assert len(labels) == len(lines) and all(line in label for line, label in zip(lines, labels, strict=True))


def test_a_picture_shows_the_values_of_its_run(tmp_path):
    losses = [11 - i / 20 for i in range(200)]
    folder = write_run(tmp_path / "a$b$_\udcff", losses, {0: 11.0, 100: 6.0, 200: 6.5}, {200: 0.3}, bytes_per_token=4.0)
    figure = draw_run(read_run(folder))
    loss, lr, hella = figure.axes
    raw, smoothed, val, first_val = loss.get_lines()
    assert raw.get_ydata().tolist() == pytest.approx(losses) and val.get_ydata().tolist() == [6.0, 6.5]
    assert val.get_xdata().tolist() == [100, 200] and first_val.get_xydata().tolist() == [[0, 11.0]]
    assert "best 6.0000, at step 100" in labels_of(figure)[2]
    assert len(lr.get_lines()[0].get_ydata()) == 200 and hella.get_lines()[0].get_ydata().tolist() == [0.3]
    low, high = loss.get_ylim()
    assert low < min(losses) and 10 < high < 11
    texts = [text.get_text() for text in figure.texts]
    assert texts == [
        "a$b$_?",
        "124M parameters, 1,000 tokens per step; adamw, cosine, learning rate 0.001; data shards",
    ]
    curves.save(figure, tmp_path / "picture.png")
    width, height = np.frombuffer((tmp_path / "picture.png").read_bytes()[16:24], dtype=">u4")
    assert (tmp_path / "picture.png").read_bytes().startswith(PNG) and (width, height) == (1000, 700)


def test_runs_with_other_tokens_are_drawn_per_byte(tmp_path):
    folders = [
        write_run(tmp_path / name, [8.0, 6.0], {2: 4.0}, bytes_per_token=length)
        for name, length in (("_a", 4.0), ("b", 2.0))
    ]
    runs = [read_run(folder) for folder in folders]
    figure = draw_runs(["_a", "b"], runs, "tokens")
    [axes] = figure.axes
    vals = [line for line in axes.get_lines() if line.get_xdata().tolist() == [2000]]
    assert [line.get_ydata().tolist() for line in vals] == [[1.0], [2.0]] and "per byte" in axes.get_ylabel()
    assert labels_of(figure)[:2] == ["_a", "b"]
    [axes] = draw_runs(["a", "c"], [runs[0], runs[0]]).axes
    assert "per token" in axes.get_ylabel()


# ---- while training


@pytest.mark.curves
def test_training_draws_its_curves_at_the_end(byte_shards, tmp_path, capsys):
    trained(tmp_path / "run", "--data", byte_shards, "--max-steps", 3)
    assert (tmp_path / "run" / "curves.png").read_bytes().startswith(PNG) and not capsys.readouterr().err


@pytest.mark.curves
@pytest.mark.parametrize("problem", ["no matplotlib", "full disk"])
def test_training_goes_on_without_its_curves(byte_shards, tmp_path, monkeypatch, capsys, problem):
    monkeypatch.setattr(curves, "DRAW_SECONDS", 0.0)
    monkeypatch.setattr(curves, "MAX_DRAW_FRACTION", 1e9)
    if problem == "no matplotlib":
        monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    else:
        monkeypatch.setattr(curves, "save", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    out = tmp_path / "run"
    trained(out, "--data", byte_shards, "--max-steps", 6, "--val-every", 1)
    errors = capsys.readouterr().err
    assert errors.count("\n") == 1 and errors.startswith(f"warning: cannot draw {out / 'curves.png'} (")
    monkeypatch.undo()
    monkeypatch.setattr(CurvesFile, "draw", lambda self: None)
    trained(tmp_path / "other", "--data", byte_shards, "--max-steps", 6, "--val-every", 1)
    assert_same_run(out, tmp_path / "other")


@pytest.mark.curves
def test_curves_are_drawn_after_evaluations_but_not_too_often(tmp_path, monkeypatch):
    now, drawn = [100.0], []

    def draw(run):
        drawn.append(now[0])
        now[0] += 0.5

    monkeypatch.setattr(curves.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(curves, "read_run", lambda folder: None)
    monkeypatch.setattr(curves, "draw_run", draw)
    monkeypatch.setattr(curves, "save", lambda *_: None)
    file, nothing = CurvesFile(tmp_path), CurvesFile(None)
    while now[0] < 400:
        file.outdated |= now[0] % 7 == 0
        nothing.outdated = True
        file.update()
        nothing.update()
        now[0] = int(now[0]) + 1
    # those of 105 ten seconds after the start, then 100 times as long as a drawing takes, and 10 seconds, after the last
    assert drawn == [110, 161, 212, 263, 314, 365]


def curves_of_rank(rank: int) -> None:
    """Draws as outside of the tests, which leave that out (helpers.py)."""
    import importlib

    importlib.reload(curves)
    from support.console import run_logger

    run_logger.CurvesFile = curves.CurvesFile


@pytest.mark.slow
def test_one_of_two_processes_draws(byte_shards, tmp_path):
    flags = ["--data", byte_shards, "--max-steps", 4, "--out", "run"]
    run_to_the_end(*flags, cwd=tmp_path, world_size=2, sabotage=curves_of_rank)
    assert (tmp_path / "run" / "curves.png").read_bytes().startswith(PNG)
    assert "warning" not in (tmp_path / "0.txt").read_text() + (tmp_path / "1.txt").read_text()


@pytest.mark.slow
def test_matplotlib_says_nothing_and_leaves_nothing_when_it_is_new_to_a_machine(tmp_path):
    """It has a cache of fonts to build, and a folder for it that cannot be written."""
    write_run(tmp_path / "log", [5.0, 4.0], {2: 3.9}, keep=1)
    (tmp_path / "file").touch()
    done = run_script("compare.py", "log", cwd=tmp_path, MPLCONFIGDIR=str(tmp_path / "file" / "x"))
    assert (done.returncode, done.stderr) == (0, "") and (tmp_path / "compare.png").read_bytes().startswith(PNG)
