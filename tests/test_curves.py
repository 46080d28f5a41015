"""Curves: what is read from a run's folder, what is drawn, and that training does not depend on it."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
from training import assert_same_run, trained

from support.cli import UserError
from support.console import curves
from support.console.curves import CurvesFile, draw_run, draw_runs, loss_limits, read_run, smooth
from train_gpt2 import MODELS

PNG = b"\x89PNG\r\n\x1a\n"


def write_run(
    folder: Path, losses: list[float], val: dict[int, float], hella: dict[int, float] | None = None, **start: object
) -> Path:  # fmt: skip
    """Writes the files of a run that did not take place, whose steps take 36 s, by hand; `start` is what differs in it."""
    folder.mkdir(parents=True)
    lines = [f"{i} train {loss:.6f}\n{i} lr {1e-3 / (i + 1):.8g}\n{i} seconds 36" for i, loss in enumerate(losses)]
    lines += [f"{step} val {loss:.4f}" for step, loss in val.items()]
    lines += [f"{step} hella {score:.4f}" for step, score in (hella or {}).items()]
    (folder / "log.txt").write_text("\n".join(lines) + "\n")
    start = {
        "flags": {"optimizer": "adamw", "schedule": "cosine", "max_lr": 1e-3, "data": "shards"},
        "run": "a", "first_step": 0, "first_tokens": 0, "parameters": 124439808, "tokens_per_step": 1000, "comparable": {},
    } | start | {
        "data": {"source": "text", "val": [], "tokenizer": "gpt2", "bytes_per_token": 4.5} | start.get("data", {})
    }  # fmt: skip
    (folder / "starts.jsonl").write_text(json.dumps(start) + "\n")
    return folder


def points(axes) -> list[list[list[float]]]:
    """Returns the points of all lines."""
    return [line.get_xydata().tolist() for line in axes.get_lines()]


def labels_of(figure) -> list[str]:
    """Returns the texts of all legends."""
    legends = [axes.get_legend() for axes in figure.axes if axes.get_legend()]
    return [text.get_text() for legend in legends for text in legend.get_texts()]


def test_a_run_is_read_from_its_log_and_its_last_start(tmp_path):
    folder = write_run(tmp_path / "run", [5.0, 4.0, 3.0], {0: 5.1, 3: 2.9}, {3: 0.26})
    first = json.loads((folder / "starts.jsonl").read_text())
    last = first | {"flags": first["flags"] | {"max_lr": 2e-3, "keep": 1}}
    with open(folder / "starts.jsonl", "a") as file:
        file.write(json.dumps(last) + '\n{"flags": {"max_lr": 9')  # cut off by a kill
    run = read_run(folder)
    assert run.train == {0: 5.0, 1: 4.0, 2: 3.0} and run.val == {0: 5.1, 3: 2.9} and run.hella == {3: 0.26}
    assert run.lr == {0: 1e-3, 1: 5e-4, 2: pytest.approx(1e-3 / 3)} and run.steps == 3
    assert run.flags["max_lr"] == 2e-3 and run.flags["keep"] == 1 and run.flags["optimizer"] == "adamw"
    assert run.bytes_per_token == 4.5 and run.positions([0, 3], "tokens").tolist() == [0, 3000]
    assert run.positions([0, 1, 3], "hours").tolist() == pytest.approx([0, 0.01, 0.03])
    assert run.positions([1], "steps").tolist() == [1]


@pytest.mark.parametrize("losses, hella", [([], {}), ([], {0: 0.25}), ([math.nan], {})])
def test_what_is_no_run_is_an_error(tmp_path, losses, hella):
    folder = write_run(tmp_path / "run", losses, {}, hella)
    with pytest.raises(UserError, match="run/log.txt has no loss yet"):
        read_run(folder)
    (folder / "starts.jsonl").write_text("{")
    with pytest.raises(
        UserError, match="run is not a run: log.txt or starts.jsonl is missing or unreadable. Pass a run's"
    ):
        read_run(folder)


def test_smoothing_is_the_mean_of_the_values_around():
    values = np.random.default_rng(0).normal(size=450)
    expected = [values[max(0, i - 4) : i + 5].mean() for i in range(450)]
    assert smooth(values) == pytest.approx(np.array(expected))
    assert smooth(values[:99]) == pytest.approx(values[:99]) and len(smooth(values[:0])) == 0


def test_neither_the_first_losses_nor_a_spike_flatten_the_others():
    x = np.arange(1000)
    losses = np.where(x < 50, 11.0, 4 - x / 1000)
    losses[500] = 1e4
    low, high = loss_limits([(x, losses), (np.array([0, 999]), np.array([11.0, 3.2]))])
    assert 2.9 < low < 3.001 and 3.95 < high < 4.05
    low, high = loss_limits([(np.array([0]), np.array([5.0])), (x[:0], np.zeros(0))])
    assert low < 5 < high


@pytest.mark.parametrize(
    "tokenizer, source, context, lines",
    [
        ("gpt2", "HuggingFaceFW/fineweb-edu sample-10BT", 1024, ["3.2924", "124M: 0.2955", "350M: 0.3752"]),
        ("gpt2", "book", 1024, ["124M: 0.2955", "350M: 0.3752"]),
        ("gpt2", "book", 32, []),
        ("gpt2", "HuggingFaceFW/fineweb-edu sample-10BT", 256, []),
        ("bpe", "HuggingFaceFW/fineweb-edu sample-10BT", 1024, []),
    ],
)
def test_openais_figures_are_drawn_where_they_can_be_compared(tmp_path, tokenizer, source, context, lines):
    flags = {"n_layer": 24, "n_embd": 1024, "max_lr": 1e-3, "block_size": context}
    start = dict(data={"source": source, "tokenizer": tokenizer}, flags=flags)
    run = write_run(tmp_path / "run", [5.0, 4.0, 3.5], {3: 3.4}, {0: 0.25, 3: 0.26}, **start)
    labels = [label for label in labels_of(draw_run(read_run(run))) if "OpenAI" in label]
    assert len(labels) == len(lines) and all(line in label for line, label in zip(lines, labels, strict=True))


def test_openais_sizes_are_those_of_the_flag_model():
    """They are written down twice, since drawing a run does not import the trainer."""
    assert list(curves.OPENAI_SIZES) == [(model["n_layer"], model["n_embd"]) for model in MODELS.values()]
    assert list(curves.OPENAI_SIZES.values()) == list(curves.OPENAI_HELLASWAG["tokens"])


@pytest.mark.parametrize("items", [10_042, 2_009])
def test_a_score_on_some_items_is_drawn_beside_one_that_says_it_is_on_all(tmp_path, items):
    data = {"source": "x", "val": [], "tokenizer": "gpt2", "bytes_per_token": 4.5}
    flags = {"n_layer": 12, "n_embd": 768, "block_size": 1024}
    folder = write_run(tmp_path / "run", [5.0], {1: 4.5}, {1: 0.25}, data=data, flags=flags, hellaswag_items=items)
    label = labels_of(draw_run(read_run(folder)))[-1]
    assert label == "OpenAI's GPT-2 124M: 0.2955" + " on all 10,042 items" * (items < 10_042)


def test_a_picture_shows_the_values_of_its_run(tmp_path):
    losses = [11 - i / 20 for i in range(200)]
    folder = write_run(tmp_path / "a$b$_\udcff", losses, {0: 11.0, 100: 6.0, 200: 6.5}, {200: 0.3})
    figure = draw_run(read_run(folder))
    loss, lr, hella = figure.axes
    raw, smoothed, line, val = points(loss)
    assert [y for _, y in raw] == pytest.approx(losses) and len(smoothed) == 200
    assert val == [[0, 11], *line] and line == [[100, 6], [200, 6.5]]  # without a line from step 0
    assert "best 6.0000, at step 100" in labels_of(figure)[2]
    assert len(points(lr)[0]) == 200 and points(hella)[0] == [[200, 0.3]]
    low, high = loss.get_ylim()
    assert low < min(losses) and 10 < high < 11
    curves.save(figure, tmp_path / "picture.png")
    width, height = np.frombuffer((tmp_path / "picture.png").read_bytes()[16:24], dtype=">u4")
    assert (tmp_path / "picture.png").read_bytes().startswith(PNG) and (width, height) == (1000, 700)


@pytest.mark.parametrize("source, named", [("a long " * 30, "a long " * 7 + "a"), (None, "data")])
def test_the_title_names_the_text_or_else_the_folder_of_the_shards(tmp_path, source, named):
    flags = {"optimizer": "adamw", "schedule": "cosine", "max_lr": 1e-3, "data": "cc/data"}
    run = write_run(tmp_path / "run", [5.0], {}, flags=flags, data={"source": source})
    title = draw_run(read_run(run)).axes[0].get_title()
    assert title.endswith(f"parameters, 1,000 tokens per step; adamw, cosine, learning rate 0.001; on {named}")


def test_runs_with_other_tokens_are_drawn_per_byte(tmp_path):
    lengths = {"_a": 4.0, "b$c$": 2.0}
    runs = [
        read_run(write_run(tmp_path / name, [8.0, 6.0], {2: 4.0}, data={"tokenizer": "bpe", "bytes_per_token": n}))
        for name, n in lengths.items()
    ]
    figure = draw_runs(list(lengths), runs, "tokens")
    axes, _ = figure.axes
    train, _, val, other_train, _, other_val = points(axes)
    assert (val, other_val) == ([[2000, 1]], [[2000, 2]])
    assert train == other_train == [], "a trained tokenizer has longer tokens on the text that it was trained on"
    assert "per byte" in axes.get_ylabel() and [label.replace("\\", "") for label in labels_of(figure)] == [*lengths]
    curves.save(figure, tmp_path / "picture.png")  # in which the names of runs are no formulas
    axes, _ = draw_runs(["a", "c"], [runs[0], runs[0]]).axes
    assert "per token" in axes.get_ylabel()


@pytest.mark.parametrize("other, per_byte", [("a", False), ("b", True)])
def test_the_tokenizer_decides_and_not_how_long_the_validated_tokens_are(tmp_path, other, per_byte):
    """Which depends on --val-tokens and --block-size, too."""
    runs = [
        read_run(write_run(tmp_path / name, [8.0], {1: 4.0}, data={"tokenizer": "bpe", "tokenizer_sha256": sha256, "bytes_per_token": n}))
        for name, sha256, n in (("one", "a", 4.0), ("two", other, 4.1))
    ]  # fmt: skip
    assert curves.compares_per_byte(runs) == per_byte


def test_a_curve_has_a_gap_where_the_values_are_not_comparable(tmp_path):
    """In a fork of a fork that returns to the first one's step size."""
    losses = [9.0 - step for step in range(6)]
    folder = write_run(tmp_path / "run", losses, {step: loss for step, loss in enumerate(losses)}, tokens_per_step=1000)
    for first_step, tokens_per_step in ((2, 2000), (4, 1000)):
        start = json.loads((folder / "starts.jsonl").read_text().splitlines()[0])
        start |= {"first_step": first_step, "tokens_per_step": tokens_per_step}
        with open(folder / "starts.jsonl", "a") as file:
            file.write(json.dumps(start) + "\n")
    run = read_run(folder)
    for axes in (draw_runs(["run"], [run]).axes[0], draw_run(run).axes[0]):
        own = [line for line in axes.get_lines() if line.get_color() != curves.NOT_COMPARABLE]
        for line in own:
            y = [*line.get_ydata()]
            gap = [i for i, value in enumerate(y) if math.isnan(value)]
            assert len(gap) == 1 and [*line.get_xdata()][gap[0] - 1 : gap[0] + 2 : 2] == [1, 4]


def test_the_curve_of_a_parent_is_not_hidden_by_its_forks(tmp_path):
    """There it is grey, because its steps were smaller."""
    parent = write_run(tmp_path / "parent", [8.0, 6.0], {0: 8.0, 1: 7.0, 2: 6.0})
    fork = write_run(tmp_path / "fork", [8.0, 6.0, 5.0], {0: 8.0, 1: 7.0, 2: 6.0, 3: 5.0})
    start = json.loads((fork / "starts.jsonl").read_text()) | {"first_step": 2, "tokens_per_step": 2000}
    with open(fork / "starts.jsonl", "a") as file:
        file.write(json.dumps(start) + "\n")
    axes, _ = draw_runs(["parent", "fork"], [read_run(parent), read_run(fork)]).axes
    order = {(line.get_color() == curves.NOT_COMPARABLE, line.get_zorder()) for line in axes.get_lines()}
    assert order == {(True, 1), (False, 2)}
    lines = [line.get_xydata().tolist() for line in axes.get_lines() if line.get_linestyle() == "-"]
    assert [[2, 6], [3, 5]] in lines and [[0, 8], [1, 7]] not in lines  # only a line from step 0 would be too steep


def test_losses_of_a_forks_parent_have_its_own_bytes_per_token(tmp_path):
    run = write_run(tmp_path / "run", [8.0] * 3, {0: 8.0, 2: 6.0}, data={"tokenizer": "bpe", "bytes_per_token": 4.0})
    fork = json.loads((run / "starts.jsonl").read_text())
    fork |= {"first_step": 1, "first_tokens": 1000, "comparable": {"val": "x"}}
    fork["data"] |= {"bytes_per_token": 2.0}
    with open(run / "starts.jsonl", "a") as file:
        file.write(json.dumps(fork) + "\n")
    other = write_run(tmp_path / "other", [8.0], {0: 8.0}, data={"tokenizer": "bpe", "bytes_per_token": 1.0})
    axes, _ = draw_runs(["a", "b"], [read_run(run), read_run(other)]).axes
    assert sorted(line for line in points(axes) if line) == [[[0, 2.0]], [[0, 8.0]], [[2, 3.0]], [[2, 3.0]]]


def test_the_ends_of_many_runs_can_be_told_apart(tmp_path):
    """Ten runs fall from 11 to about 3, and end 0.02 apart."""
    ends = [3 + 0.02 * i / 9 for i in range(10)]
    runs = [
        read_run(write_run(tmp_path / str(i), [end + 8 * math.exp(-step / 100) for step in range(900)], {900: end}))
        for i, end in enumerate(ends)
    ]
    whole, last = draw_runs([run.name for run in runs], runs).axes
    assert whole.get_xlim()[0] == 0 and last.get_xlim()[0] == 600
    low, high = last.get_ylim()
    assert low < 3 and high > 3.02 and 0.02 / (high - low) > 0.3


# ---- while training


@pytest.mark.slow
@pytest.mark.curves
@pytest.mark.parametrize("problem", [None, "no matplotlib", "no disk"])
def test_training_draws_its_curves_and_goes_on_without_them(byte_shards, tmp_path, monkeypatch, capfd, problem):
    monkeypatch.setattr(curves, "DRAW_SECONDS", 0.0)
    out = tmp_path / "run"
    if problem == "no matplotlib":
        (tmp_path / "matplotlib.py").write_text("raise ImportError")
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    elif problem:
        (out / "curves.png").mkdir(parents=True)  # which no file replaces
    trained(out, "--data", byte_shards, "--max-steps", 6, "--val-every", 1)
    errors = capfd.readouterr().err
    if problem:
        assert errors.count("\n") == 1 and errors.startswith(f"warning: cannot draw {out / 'curves.png'} (")
    else:
        assert (out / "curves.png").read_bytes().startswith(PNG) and not errors
    monkeypatch.undo()
    monkeypatch.setattr(CurvesFile, "draw", lambda self: None)
    trained(tmp_path / "other", "--data", byte_shards, "--max-steps", 6, "--val-every", 1)
    assert_same_run(out, tmp_path / "other")


@pytest.mark.curves
def test_a_picture_is_drawn_from_the_folder_by_another_process(tmp_path, monkeypatch):
    """What matplotlib keeps of a figure would otherwise add up in the process that trains."""
    folder = write_run(tmp_path / "run", [5.0, 4.0], {0: 5.1, 2: 3.9})
    monkeypatch.setattr(curves, "draw_run", None)
    picture = CurvesFile(folder)
    picture.draw()
    picture.wait()
    assert (folder / "curves.png").read_bytes().startswith(PNG)


@pytest.mark.curves
def test_training_waits_for_no_picture_and_has_one_at_a_time_drawn(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(curves, "DRAW_SECONDS", 0.0)
    slow = tmp_path / "python"  # notes each picture, and finishes none before it may
    slow.write_text(f'#!/bin/sh\ncd "{tmp_path}"\necho drawn >> notes\nuntil [ -e go ]; do sleep 0.01; done\n')
    slow.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(slow))
    picture = CurvesFile(tmp_path)
    for _ in range(3):
        picture.update()
    (tmp_path / "go").touch()
    picture.wait()
    assert (tmp_path / "notes").read_text().count("drawn") == 1
    picture.update()
    picture.wait()
    assert (tmp_path / "notes").read_text().count("drawn") == 2
    monkeypatch.setattr(sys, "executable", str(tmp_path / "nothing"))
    for _ in range(2):
        picture.update()  # best effort
    warning = f"warning: cannot draw {tmp_path / 'curves.png'} (No such file or directory).\n"
    assert capfd.readouterr().err == warning
