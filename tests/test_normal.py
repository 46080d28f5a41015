"""compare.py --normal: normal runs and each public fault, imitated in numbers, and logs that are no proper logs."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

import numpy as np
import pytest
from helpers import ROOT
from test_curves import PNG, labels_of, points
from training import config_with

import compare
from support.cli import UserError
from support.console import normal
from support.console.curves import draw_normal
from support.console.log import read_log

STEPS = np.arange(19073)
EVALUATED = np.array([*range(0, 19073, 250), 19072])
SPIKES = {2181: 0.33, 11370: 0.37, 17620: 0.28}  # of single steps, in all public runs
Log = dict[str, dict[int, float]]
Points = Mapping[int, float]  # values at some steps, with straight lines between them


def line(values: Points, steps: np.ndarray = STEPS) -> np.ndarray:
    return np.interp(steps, list(values), list(values.values()))


def make_log(
    train: Points | None = None, val: Points | None = None, *, jump: tuple[int, float] | None = None,
    validation: float = 1.0, norm: float = 15.3, cut: int = 19073, noise: float = 0.06, seed: int = 0,
) -> Log:  # fmt: skip
    """A run with the band's medians, noise, and what is added to the losses; `val` is as `train` if it is left out.

    Args:
        jump: the step and the size of a rise of the training loss that decays within some hundred steps.
        validation: factor of the validation loss.
        cut: the number of steps in the log.
    """
    rows = json.loads(normal.FILE.read_text())["steps"]
    medians = {name: {int(s): row[name][1] for s, row in rows.items() if name in row} for name in normal.NAMES}
    rng = np.random.default_rng(seed)
    losses = line(medians["train"]) + line(train or {0: 0.0}) + rng.normal(0, noise, len(STEPS))
    losses[list(SPIKES)] += list(SPIKES.values())
    if jump:
        losses += np.where(jump[0] <= STEPS, jump[1] * np.exp((jump[0] - STEPS) / 120), 0)
    added = line(val if val is not None else train or {0: 0.0}, EVALUATED) + rng.normal(0, 0.002, len(EVALUATED))
    log = {"train": dict(zip(STEPS[:cut].tolist(), losses.tolist(), strict=False)), "norm": {0: norm}}
    log["val"] = {s: validation * (medians["val"][s] + x) for s, x in zip(EVALUATED.tolist(), added, strict=True)}
    log["hella"] = {s: score + rng.normal(0, 0.003) for s, score in medians["hella"].items()}
    return log | {name: {s: x for s, x in log[name].items() if s <= cut} for name in ("val", "hella")}


def write_log(path, log: Log):
    lines = [f"{step} {name} {value:.6f}\n" for name, values in log.items() for step, value in values.items()]
    path.write_text("".join(lines))
    return path


# For each fault: what it adds, a word of its cause, and the length from which on the cause must be found.
FAULTS = {
    "synchronised late": (dict(train={0: 0, 50: 0.05, 1000: 0.35, 5000: 0.29, 19072: 0.2}), "too late", 5000),
    "synchronised late, more": (dict(train={0: 0, 50: 0.07, 1000: 0.73, 5000: 0.5, 19072: 0.35}), "too late", 19073),
    "not synchronised": (dict(train={0: 0, 1000: 0.156, 19072: 0.123}), "without any synchronisation", 19073),
    "residual, not scaled": (dict(train={0: 0, 10: 0.38, 1000: 0.13, 5000: 0.02, 19072: 0.01}), "not scaled", 100),
    "residual, 0.2": (
        dict(train={0: 0, 10: 0.6, 1000: 0.356, 19072: 0.138}, norm=4.7),
        "too large a standard deviation",
        100,
    ),
    "no warm-up": (dict(train={0: 0, 1000: 0.706, 5000: 0.3, 19072: 0.098}), "warm-up", 19073),
    "no warm-up, seen early": (dict(train={0: 0, 10: -1, 100: -0.5, 300: 0.7, 1000: 0.706, 5000: 0.3, 19072: 0.098}), "warm-up", 1000),
    "one rank": (dict(train={0: 0, 3000: -0.4, 19072: -0.382}, val={0: 0, 19072: 0.022}), "same batch", 5000),
    "first shard": (
        dict(
            train={0: 0, 2000: -0.05, 10500: -0.2, 19072: -0.22}, val={0: 0, 2000: 0.15, 10500: 0.61, 19072: 0.808}
        ),
        "first shard",
        19073,
    ),
    "resume": (dict(jump=(700, 0.4)), "resume", 1000),
    "sum": (dict(validation=20.0), "sum", 100),
    "rate 2x": (dict(train={0: 0, 1000: -0.1, 19072: -0.027}), "learning rate", 1000),
    "rate 3x": (dict(train={0: 0, 1000: -0.2, 19072: -0.075}), "learning rate", 1000),
}  # fmt: skip


@pytest.mark.parametrize("noise", [0.04, 0.09])
@pytest.mark.parametrize("cut", [1, 100, 1000, 5000, 19073])
def test_a_normal_run_is_normal(cut, noise):
    for seed in range(10):
        verdict = normal.judge(make_log(cut=cut, noise=noise, seed=seed))
        assert verdict and verdict.is_normal and str(verdict).startswith("normal"), str(verdict)


def test_each_public_value_is_normal():
    """A run with the lowest, and one with the highest value of each step."""
    for i in (0, 2):
        rows = {int(step): row for step, row in normal.load()["steps"].items()}
        log = {name: {step: row[name][i] for step, row in rows.items() if name in row} for name in normal.NAMES}
        verdict = normal.judge(log)
        assert verdict and verdict.is_normal, str(verdict)
        assert not any(point.widths for name in ("val", "hella") for point in verdict.points[name])


@pytest.mark.parametrize("more, is_normal", [(0.05, True), (-0.05, True), (0.15, False), (-0.15, False)])
def test_a_different_seed_changes_the_first_losses_but_not_by_much(more, is_normal):
    """In a log without noise, which would be allowed for, too. The band is 0.01 to 0.05 wide there."""
    verdict = normal.judge(make_log(train={0: more}, val={0: 0}, cut=200, noise=0))
    assert verdict and verdict.is_normal is is_normal, str(verdict)


@pytest.mark.parametrize("fewer", [-0.018, -0.037])
def test_validation_over_fewer_tokens_is_normal(fewer):
    verdict = normal.judge(make_log(val={0: fewer}))
    assert verdict and verdict.is_normal, str(verdict)


@pytest.mark.parametrize("noise", [0.04, 0.09])
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named_or_its_cause_is_unknown_but_never_wrong(name, noise):
    added, word, known_from = FAULTS[name]
    for cut in (100, 1000, 5000, 19073):
        for seed in range(3):
            verdict = normal.judge(make_log(**added, cut=cut, noise=noise, seed=seed))
            assert verdict.cause is None or word in verdict.cause or cut < 1000 and "residual" in verdict.cause, cut
            assert verdict.is_normal == str(verdict).startswith("normal")
            if cut >= known_from:
                assert str(verdict).startswith("not normal, ") and (verdict.cause or noise > 0.06), (cut, str(verdict))


def test_what_no_signature_fits_has_no_cause():
    for train in (
        {0: 0, 1000: 0.3, 2000: 0},
        {0: 0, 3000: 0, 3001: 1, 3050: 0},
        {0: 0, 3000: 0, 3001: 2, 19072: 3},
        {0: 0.4},
        {0: -0.5},
    ):
        verdict = normal.judge(make_log(train))
        assert str(verdict).startswith("not normal, cause unknown ("), str(verdict)


def test_what_is_still_possible_is_listed():
    verdict = normal.judge(make_log({0: 0, 1000: 0.73}, cut=1000))
    assert verdict.cause is None and [cause.split()[0] for cause in verdict.possible] == ["gradients", "no"]


def test_a_loss_that_is_lost_is_not_normal():
    log = make_log(cut=3000)
    log["train"] |= dict.fromkeys(range(2500, 3000), float("nan"))
    verdict = normal.judge(log)
    assert verdict.cause is None and "not finite from step 2,500 on" in str(verdict)
    assert "from step 0 on" in str(normal.judge({"train": {0: float("nan")}}))
    validated = make_log(cut=3000)
    validated["val"] |= {step: float("nan") for step in validated["val"] if step >= 2000}
    assert "(validation loss is not finite from step 2,000 on)" in str(normal.judge(validated))
    log["train"][2999] = 3.5  # a few skipped steps
    assert normal.judge(log).is_normal


def test_the_text_says_since_when_and_by_how_many_widths():
    text = str(normal.judge(make_log({0: 0.015, 1951: 0.015, 1952: 0.3, 19072: 0.3}, noise=0.01)))
    worst = max(range(2000, 19001, 250), key=lambda s: 0.3 / np.ptp(normal.load()["steps"][str(s)]["train"]))
    assert "training loss above the band since step 2,000, by" in text and f"at step {worst:,};" in text
    text = str(normal.judge(make_log({0: 0, 2000: 0, 2250: 0.3, 4000: 0.3, 4250: 0, 19072: 0}, noise=0.01)))
    assert "from step 2,250 to 4,000" in text
    # first below the band, then above it for longer: it is above since it left the other side
    text = str(normal.judge(make_log(**FAULTS["no warm-up, seen early"][0], noise=0.01)))
    assert "training loss above the band since step 250," in text


def test_the_recipe_is_the_trainers():
    used = config_with().used_flags() | {"tokenizer": "gpt2"}
    assert normal.other_flags(used) == []
    assert normal.other_flags(used | {"max_lr": 1e-3, "seed": 1}) == [("max_lr", 1e-3, 6e-4)]
    assert used["max_steps"] == normal.STEPS


def test_the_page_has_the_values_and_the_runs_of_the_file():
    page, content = (ROOT / "docs" / "normal.md").read_text(), normal.load()
    rows = [[cell.strip() for cell in row.split("|")[1:5]] for row in page.splitlines() if " to " in row and "|" in row]
    rows = [row for row in rows if row[0].replace(",", "") in content["steps"]]
    assert len(rows) >= 12
    for step, *cells in rows:
        values = content["steps"][step.replace(",", "")]
        for cell, name, digits in zip(cells, normal.NAMES, (3, 3, 4), strict=True):
            low, _, high = values.get(name, (None, None, None))
            assert cell == ("" if low is None else f"{low:.{digits}f} to {high:.{digits}f}"), (step, name)
    for run in content["runs"]:
        assert f"(https://github.com/{run.split()[0]})" in page
    assert "\n## What a fault looks like\n" in page  # where a verdict points to


# ---- logs


def answer(capsys, path, *argv: object) -> list[str]:
    compare.main([str(path), "--normal", *map(str, argv)])
    return capsys.readouterr().out.splitlines()


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def no_drawing(monkeypatch):
    """Drawing takes as long as all the rest: an empty file will do."""
    monkeypatch.setattr(compare, "draw", lambda make, path: path.touch())


def test_a_log_alone_is_judged_and_drawn(tmp_path, capsys):
    lines = answer(capsys, write_log(tmp_path / "their.txt", make_log(cut=3251)))
    assert lines[0] == "note: there is no starts.jsonl beside this log, so its flags and data are not compared."
    assert lines[1].split() == ["step", "training", "band", "widths", "validation", "band", "widths"]
    row = next(line.split() for line in lines if line.startswith("1,000"))
    assert row[2:5] == ["4.116", "to", "4.131"] and max(map(len, lines)) <= 100
    assert lines[-2:] == ["saved compare.png", "normal up to step 3,250"]
    assert (tmp_path / "compare.png").read_bytes().startswith(PNG)
    (tmp_path / "log").mkdir()
    write_log(tmp_path / "log" / "log.txt", make_log(cut=100))
    assert answer(capsys, "log")[-1] == "normal up to step 100"


def test_a_log_with_holes_in_any_order_or_twice_is_judged(tmp_path, capsys, no_drawing):
    log, rng = make_log(), np.random.default_rng(0)
    path = write_log(tmp_path / "log.txt", log)
    lines = path.read_text().splitlines()
    kept = [line for line in lines if not 3000 <= int(line.split()[0]) < 6100 and rng.random() < 0.7]
    rng.shuffle(kept)
    every_tenth = [line for line in lines if int(line.split()[0]) % 10 == 0]
    again = write_log(tmp_path / "again", make_log(cut=2500)).read_text()
    again += write_log(tmp_path / "again", make_log(seed=1)).read_text()
    for text in ("\n".join(every_tenth) + "\n", again, "\r\n".join([*lines, ""])):
        path.write_bytes(text.encode())
        assert answer(capsys, path)[-1] in ("normal, to the end", "normal up to step 19,000")
    path.write_text("\n".join(kept) + "\n")
    assert re.search(r"^normal.*, as far as it can be compared \(training loss at", answer(capsys, path)[-1])


def test_losses_that_a_log_lacks_are_named(tmp_path, capsys, no_drawing):
    log = make_log()
    of_val = len([step for step in normal.band("val").steps if step <= 3000])
    for val, words in (
        ({step: loss for step, loss in log["val"].items() if step <= 3000}, f"validation loss at {of_val} of"),
        ({}, "validation loss at 0 of"),
    ):
        said = answer(capsys, write_log(tmp_path / "log.txt", {"train": log["train"], "val": val}))[-1]
        assert said.startswith("normal, to the end, as far as it can be compared (") and words in said


def test_a_log_of_only_one_kind_is_judged(tmp_path, capsys, no_drawing):
    log = make_log({0: 0, 10: 0.6, 1000: 0.356, 19072: 0.138})
    for name in ("train", "val"):
        assert answer(capsys, write_log(tmp_path / "log.txt", {name: log[name]}))[-1].startswith("not normal, ")
    only_one = {"val": {1000: 4.9}}
    assert answer(capsys, write_log(tmp_path / "log.txt", only_one))[-1].startswith("not normal, cause unknown")


@pytest.mark.parametrize(
    "content",
    [b"", b"\n\n", bytes(range(256)) * 40, b"17 train 9.9\n", b"iter 10: loss 9.8, time 1ms\n", b"10 train 9.8"],
)
def test_what_has_no_value_to_compare_is_one_line(tmp_path, content):
    (tmp_path / "log.txt").write_bytes(content)
    with pytest.raises(UserError, match="log.txt has no value to compare") as error:
        compare.main(["log.txt", "--normal"])
    assert len(error.value.problems) == 1 and not (tmp_path / "compare.png").exists()


def test_bad_arguments(tmp_path):
    for argv, message in (
        (["nothing"], "there is no log at nothing. Pass"),
        (["."], "there is no log at log.txt. Pass"),
        (["a", "b"], "--normal is for one run"),
        (["a", "--x", "hours"], "--normal is for one run"),
    ):
        with pytest.raises(UserError, match=message):
            compare.main([*argv, "--normal"])


def write_start(folder, source="HuggingFaceFW/fineweb-edu sample-10BT", **flags: object) -> None:
    recipe = config_with().used_flags() | {"tokenizer": "gpt2"}
    start = {
        "run": "a", "first_step": 0, "first_tokens": 0, "tokens_per_step": 2**19, "parameters": 124439808,
        "flags": recipe | flags, "data": {"source": source, "val": [], "tokenizer": "gpt2", "bytes_per_token": 4.5}, "comparable": {"val": "x"},
        "hellaswag_items": 10042,
    }  # fmt: skip
    (folder / "starts.jsonl").write_text(json.dumps(start) + "\n")


@pytest.mark.parametrize(
    "name, key, sizes, note",
    [
        ("hella", "hellaswag_items", (10_042, 0, 25), "HellaSwag scores on 25 items are left out; the public runs have all 10,042."),
        ("val", "validation_tokens", (327_680, 0, 327_679), "losses over 327,679 tokens are left out; the public runs validate on 327,680 or more."),
    ],
)  # fmt: skip
def test_values_of_other_items_or_tokens_do_not_count(
    tmp_path, capsys, monkeypatch, no_drawing, name, key, sizes, note
):
    """A resume without HellaSwag leaves the scores before it as they were."""
    write_log(tmp_path / "log.txt", make_log(cut=1000))
    judged, judge = list[int](), normal.judge
    monkeypatch.setattr(normal, "judge", lambda log: judged.append(len(log[name])) or judge(log))
    noted = []
    for size in sizes:
        write_start(tmp_path)
        start = json.loads((tmp_path / "starts.jsonl").read_text()) | {"first_step": 500, key: size}
        with open(tmp_path / "starts.jsonl", "a") as file:
            file.write(json.dumps(start) + "\n")
        noted.append(f"note: {note}" in answer(capsys, "."))
    assert judged[0] == judged[1] > 0 == judged[2] and noted == [False, False, True]


def test_a_fork_of_another_recipe_has_no_verdict(tmp_path, capsys, no_drawing):
    """The losses before the fork were made with other flags."""
    write_log(tmp_path / "log.txt", make_log(cut=1000))
    write_start(tmp_path)
    fork = json.loads((tmp_path / "starts.jsonl").read_text()) | {"first_step": 500}
    write_start(tmp_path, max_lr=6e-3)
    with open(tmp_path / "starts.jsonl", "a") as file:
        file.write(json.dumps(fork) + "\n")
    lines = answer(capsys, ".")
    assert ["--max-lr", "0.006", "0.0006"] in [line.split() for line in lines] and lines[-1].startswith("no verdict: ")


def test_a_run_of_another_recipe_has_no_verdict_and_is_drawn_on_request(tmp_path, capsys, no_drawing):
    write_log(tmp_path / "log.txt", make_log(cut=1000))
    write_start(tmp_path)
    assert answer(capsys, ".")[-1] == "normal up to step 1,000"
    (tmp_path / "compare.png").unlink()
    write_start(tmp_path, max_lr=1.2e-3, seed=7, total_batch_size=2**18)
    lines = answer(capsys, "log.txt")
    assert [line.split() for line in lines[1:3]] == [
        ["--total-batch-size", "262144", "524288"],
        ["--max-lr", "0.0012", "0.0006"],
    ]
    assert lines[-1].startswith("no verdict: ") and not (tmp_path / "compare.png").exists()
    assert answer(capsys, ".", "-o", "mine.png")[-2] == "saved mine.png" and (tmp_path / "mine.png").exists()
    write_start(tmp_path, source="book")
    assert answer(capsys, ".")[1].split() == ["--data", "book", "FineWeb-Edu"]


def test_values_of_a_forks_parent_on_other_data_do_not_count(tmp_path, capsys, no_drawing):
    log = make_log(cut=3000)
    log["val"] |= {step: 9.0 for step in log["val"] if step < 2000}
    write_log(tmp_path / "log.txt", log)
    write_start(tmp_path)
    parent = json.loads((tmp_path / "starts.jsonl").read_text())
    fork = parent | {"run": "b", "first_step": 2000}
    for other in ({"val": "x"}, {"val": "y"}):
        lines = [json.dumps(parent | {"comparable": other}), json.dumps(fork)]
        (tmp_path / "starts.jsonl").write_text("\n".join(lines) + "\n")
        assert answer(capsys, ".")[-1].startswith("not normal" if other == {"val": "x"} else "normal up to step 3,000")


def test_the_picture_shows_the_run_over_the_band():
    log = make_log(cut=5000)
    figure = draw_normal("mine", log)
    assert labels_of(figure) == ["ten public runs", "this run"] * 4
    train, val, hella, difference = (points(axes)[1] for axes in figure.axes)
    assert val == [[step, pytest.approx(x)] for step, x in log["val"].items()] and len(hella) == len(val)
    [mean] = [y for x, y in train if x == 1000]
    assert mean == pytest.approx(np.mean([log["train"][s] for s in range(975, 1025)]))
    assert [y for x, y in difference if x == 1000] == [pytest.approx(mean - log["val"][1000])]
    assert labels_of(draw_normal("the band alone", {})) == ["ten public runs"] * 4


def test_a_log_keeps_what_is_not_finite_only_if_asked(tmp_path):
    (tmp_path / "log.txt").write_bytes(b"1 train nan\r\n2 train 3.5\r\n3 train NaN\n4 train -Infinity\n")
    assert read_log(tmp_path / "log.txt") == {"train": {2: 3.5}}
    assert list(read_log(tmp_path / "log.txt", finite=False)["train"]) == [1, 2, 3, 4]
