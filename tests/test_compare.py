"""compare.py: the table, the flags that differ, and errors."""

from __future__ import annotations

import json
import math

import pytest
from test_curves import PNG, write_run

import compare
from support.cli import UserError


def flags(**changed: object) -> dict[str, object]:
    return {"max_lr": 6e-4, "optimizer": "adamw", "seed": 1337, "out": "x", "resume": None, "init_from": None} | changed


def compared(tmp_path, capsys, *argv: object) -> list[str]:
    """The lines that it prints."""
    compare.main([*map(str, argv), "-o", str(tmp_path / "picture.png")])
    assert (tmp_path / "picture.png").read_bytes().startswith(PNG)
    *lines, _, saved = capsys.readouterr().out.splitlines()
    assert saved == f"saved {tmp_path / 'picture.png'}"
    return lines


def test_two_runs_are_compared(tmp_path, capsys):
    one = write_run(tmp_path / "log", [5.0] * 100, {0: 6.0, 50: 3.5, 100: 3.6}, {100: 0.31}, flags=flags(out="log"))
    changed = flags(max_lr=3.6e-3, optimizer="muon", init_from="gpt2", resume="newest")
    two = write_run(tmp_path / "log_fast", [5.0] * 5, {5: 4.0}, parameters=7, tokens_per_step=5000, flags=changed)
    for axis in ("steps", "tokens", "hours"):
        assert compared(tmp_path, capsys, one, two, "--x", axis) == [
            "flag            log  log_fast",
            "--max-lr     0.0006    0.0036",
            "--optimizer   adamw      muon",
            "--init-from       -      gpt2",
            "",
            "run       params  steps  tokens  hours  val loss    best  at step  HellaSwag",
            "log         124M    100    100k  1.000    3.6000  3.5000       50     0.3100",
            "log_fast       7      5     25k  0.050    4.0000  4.0000        5          -",
        ]


def test_the_table_says_from_which_step_on_a_loss_is_not_finite(tmp_path, capsys):
    """A run that has skipped a step in between, and one that was stopped because it skipped too many."""
    healthy = write_run(tmp_path / "healthy", [5.0, math.nan, 4.0, 4.0], {0: 6.0, 4: 3.5})
    lost = write_run(tmp_path / "lost", [5.0, math.nan, 4.0, math.nan, math.inf], {0: 6.0, 5: 3.5})
    assert compared(tmp_path, capsys, healthy, lost)[2:] == [
        "run      params  steps  tokens  hours  val loss    best  at step  nan from",
        "healthy    124M      4      4k  0.040    3.5000  3.5000        4         -",
        "lost       124M      5      5k  0.050    3.5000  3.5000        5         3",
    ]


def test_flags_that_were_typed_come_first(tmp_path, capsys):
    """Muon and --max-lr are then seen to follow from --recipe; older runs and damaged files do not tell."""
    fast = flags(max_lr=3.6e-3, optimizer="muon", recipe="fast")
    sources = {"max_lr": "--recipe", "optimizer": "--recipe", "recipe": "command line", "seed": "default"}
    for name, value in (
        ("typed", sources),
        ("forked", sources | {"recipe": "command line of the fork"}),
        ("old", None),
        ("bad", [1]),
    ):
        one = write_run(tmp_path / name / "log", [5.0], {1: 4.0}, flags=flags(recipe="gpt2"), sources=None)
        two = write_run(tmp_path / name / "log_fast", [5.0], {1: 4.0}, flags=fast, sources=value)
        shown = [line.split()[0] for line in compared(tmp_path, capsys, one, two)[1:4]]
        first, others = ["--recipe"], ["--max-lr", "--optimizer"]
        assert shown == (first + others if isinstance(value, dict) else others + first)


def test_runs_with_other_tokens_are_compared_per_byte(tmp_path, capsys):
    runs = [
        write_run(tmp_path / name, [5.0], {0: 8.0, 1: loss}, data={"val": [name], "bytes_per_token": length} | other)
        for name, loss, length, other in (("a", 4.0, 4.0, {}), ("b", 3.0, 2.0, {"tokenizer": "bytes"}))
    ]
    assert compared(tmp_path, capsys, *runs) == [
        "The runs have the same flags.",
        "note: the runs have different validation data.",
        "",
        "run  params  steps  tokens  hours  val/byte    best  at step",
        "a      124M      1      1k  0.010    1.0000  1.0000        1",
        "b      124M      1      1k  0.010    1.5000  1.5000        1",
    ]


def test_where_a_run_has_changed_the_machine_is_noted(tmp_path, capsys):
    cpu = {"device": "cpu", "processes": 1, "dtype": "fp32", "batch_size": 4}
    runs = [write_run(tmp_path / name, [5.0] * 3, {3: 4.0}, machine=cpu) for name in "ab"]
    start = json.loads((runs[1] / "starts.jsonl").read_text())
    for machine in (cpu | {"batch_size": 8}, cpu | {"dtype": "bf16"}):
        start |= {"first_step": start["first_step"] + 1, "machine": machine}
        with open(runs[1] / "starts.jsonl", "a") as file:
            file.write(json.dumps(start) + "\n")
    assert compared(tmp_path, capsys, *runs)[1:3] == ["note: before step 2, b ran on 1 x cpu, fp32.", ""]


def test_runs_with_other_tokens_and_no_validation_are_not_compared(tmp_path):
    runs = [write_run(tmp_path / name, [5.0], {}, data={"tokenizer": name}) for name in ("gpt2", "bytes")]
    with pytest.raises(UserError) as error:
        compare.main(list(map(str, runs)))
    assert [
        problem.startswith(f"{run} has no val") for run, problem in zip(runs, error.value.problems, strict=True)
    ] == [True] * 2


def test_runs_with_the_same_tokens_are_compared_per_token_whatever_they_validate(tmp_path, capsys):
    """Of some of the split or all of it, their tokens have other lengths."""
    for name, length in (("a", 4.5), ("b", 4.6)):
        write_run(tmp_path / name, [5.0], {1: 4.0}, data={"bytes_per_token": length})
    title, *rows = compared(tmp_path, capsys, tmp_path / "a", tmp_path / "b")[-3:]
    assert "val loss" in title and all(row.split()[5] == "4.0000" for row in rows)


def test_what_no_run_has_measured_is_left_out(tmp_path, capsys):
    without, one = write_run(tmp_path / "without", [5.0], {}), write_run(tmp_path / "with", [5.0], {1: 4.0})
    lines = [line.split() for line in compared(tmp_path, capsys, without, one)[-2:]]
    assert lines[0][5:] == ["-", "-", "-"] and lines[1][5:] == ["4.0000", "4.0000", "1"]
    assert compared(tmp_path, capsys, without)[-2].split() == ["run", "params", "steps", "tokens", "hours"]


def test_a_fork_without_a_value_of_its_own_is_compared(tmp_path, capsys):
    """Its log has its parent's values alone, on other data."""
    fork = write_run(tmp_path / "fork", [5.0, 4.0], {2: 4.5}, comparable={"train": "a", "val": "a"})
    line = json.loads((fork / "starts.jsonl").read_text()) | {
        "run": "b", "first_step": 2, "comparable": {"train": "b", "val": "b"}
    }  # fmt: skip
    with open(fork / "starts.jsonl", "a") as file:
        file.write(json.dumps(line) + "\n")
    assert compared(tmp_path, capsys, fork)[-1].split()[0] == "fork"


def test_a_line_that_cannot_be_read_is_no_nan_and_a_hole_has_no_hours(tmp_path, capsys):
    run = write_run(tmp_path / "run", [5.0, 4.0, 3.0], {3: 4.5})
    log = (run / "log.txt").read_text()
    (run / "log.txt").write_text(log.replace("2 train", "2 tr\0in"))
    title, row = compared(tmp_path, capsys, run)[-2:]
    assert "nan" not in title and row.split()[4] == "0.030"  # three steps of 36 s
    (run / "log.txt").write_text(log.replace("1 seconds 36\n", ""))
    assert compared(tmp_path, capsys, run)[-1].split()[4] == "-"
    with pytest.raises(UserError, match="run/log.txt lacks steps, so its hours are unknown. Use --x steps"):
        compare.main([str(run), "--x", "hours"])


def test_different_hellaswag_items_are_noted(tmp_path, capsys):
    runs = [
        write_run(tmp_path / str(items), [5.0], {1: 4.5}, {1: 0.25}, hellaswag_items=items, flags=flags(seed=items))
        for items in (25, 100)
    ]
    for key in "ab":  # as many items, but others
        other = {"hellaswag_items": 25, "hellaswag_sha256": key}
        runs.append(write_run(tmp_path / key, [5.0], {1: 4.5}, {1: 0.25}, flags=flags(seed=25), **other))
    note = "note: the runs have different HellaSwag items."
    assert all(compared(tmp_path, capsys, *pair).count(note) == 1 for pair in (runs[:2], runs[2:]))
    assert note not in compared(tmp_path, capsys, runs[0])
    later = json.loads((runs[0] / "starts.jsonl").read_text()) | {"first_step": 1, "hellaswag_items": 0}
    with open(runs[0] / "starts.jsonl", "a") as file:
        file.write(json.dumps(later) + "\n")  # a resume without scores
    same = write_run(tmp_path / "same", [5.0, 5.0], {2: 4.5}, {1: 0.25}, hellaswag_items=25, flags=flags(seed=25))
    lines = compared(tmp_path, capsys, runs[0], same)
    assert note not in lines and lines[-1].endswith("  0.2500 (step 1)") and lines[-2].endswith("  0.2500")


@pytest.mark.parametrize("flag", ["--normal", "--x=steps"])
def test_the_picture_is_there_if_the_reader_of_stdout_has_left(tmp_path, monkeypatch, flag):
    """As in `compare.py ... | head`."""
    run, picture = write_run(tmp_path / "run", [10.9] * 20, {0: 10.9}), tmp_path / "picture.png"

    def fail(*_, **__):
        raise BrokenPipeError

    monkeypatch.setattr("builtins.print", fail)
    with pytest.raises(BrokenPipeError):
        compare.main([str(run), flag, "-o", str(picture)])
    assert picture.read_bytes().startswith(PNG)


def test_a_line_with_a_huge_step_takes_no_time(tmp_path, capsys):
    run = write_run(tmp_path / "run", [5.0, 4.0], {2: 4.5})
    with open(run / "log.txt", "a") as file:
        file.write("999999999999 seconds 36\n")
    row = compared(tmp_path, capsys, run, "--x", "tokens")[-1].split()
    assert row[2] == "1,000,000,000,000" and row[4] == "-"


def test_two_may_write_the_same_picture_at_once(tmp_path):
    class Figure:
        drawn = 0

        def savefig(self, path, format):
            path.write_bytes(PNG)
            Figure.drawn += 1
            if Figure.drawn == 1:  # another one begins and ends meanwhile
                compare.draw(Figure, tmp_path / "picture.png")

    compare.draw(Figure, tmp_path / "picture.png")
    assert [path.name for path in tmp_path.iterdir()] == ["picture.png"]


def test_a_loss_that_is_not_the_last_steps_says_so(tmp_path, capsys):
    write_run(tmp_path / "a", [5.0, 4.0, 3.0], {1: 4.5})
    assert "  4.5000 (step 1)  " in compared(tmp_path, capsys, tmp_path / "a")[-1]


def test_folders_of_the_same_name_are_told_apart(tmp_path, capsys, monkeypatch):
    runs = [write_run(tmp_path / parent / "log", [5.0], {1: 4.0}) for parent in ("a", "b\udcff\n")]
    lines = compared(tmp_path, capsys, *runs, write_run(tmp_path / "c", [5.0], {1: 4.0}))
    assert "".join(lines[: lines.index("")]).replace(" ", "") == f"1{runs[0]}2{tmp_path}/b/log3c"
    monkeypatch.chdir(runs[0])
    assert compared(tmp_path, capsys, ".")[-1].split()[0] == "log"


def test_runs_with_long_names_fit_into_80_columns(tmp_path, capsys):
    """Their tables have numbers for the names, which come first, complete; a long value is cut in its middle."""
    names, runs = [f"log_gpt2_fast_lr_3e-3_seed_{seed}_batch_52428" for seed in (1, 2, 3)], []
    for i, name in enumerate(names):
        changed = flags(seed=i, cooldown_fraction=i / 10, text=f"/home/someone/{'books/' * 9}{i}.txt")
        values = {0: 6.0, 19073: 3.5}
        runs.append(write_run(tmp_path / name, [5.0] * 19073, values, {9: 0.31}, tokens_per_step=2**19, flags=changed))
    lines = compared(tmp_path, capsys, *runs)
    assert all(len(name) == 40 for name in names) and max(map(len, lines)) <= 80
    assert lines[:4] == [*(f"{n}  {name}" for n, name in enumerate(names, 1)), ""]
    flags_shown = {line.split()[0]: line.split()[1:] for line in lines[4:8]}
    assert flags_shown["flag"] == ["1", "2", "3"] and flags_shown["--seed"] == ["0", "1", "2"]
    assert [(value[:5], value[-7:]) for value in flags_shown["--text"]] == [("/home", f"s/{i}.txt") for i in range(3)]
    assert [line.split()[:3] for line in lines[-3:]] == [[n, "124M", "19,073"] for n in "123"]
    assert compared(tmp_path, capsys, runs[0])[0] == f"1  {names[0]}"


def test_what_a_strangers_run_says_cannot_act_on_the_terminal(tmp_path, capsys):
    changed = {"evil\x1b[2J\nval loss  0.0001": "x\x1b]0;title\x07", "seed": "\r\nfake row"}
    runs = [
        write_run(tmp_path / name, [5.0], {1: 4.0}, flags=these)
        for name, these in (("a", flags()), ("b", flags(**changed)))
    ]
    lines = compared(tmp_path, capsys, *runs)
    assert all(line.isprintable() for line in lines)
    assert [line.split()[0] for line in lines[:4] if line] == ["flag", "--seed", "--evil"]


@pytest.mark.parametrize(
    "argv, message",
    [
        (
            ["nothing", "nor"],
            "nothing is not a run: log.txt or starts.jsonl is missing or unreadable. Pass a run's --out folder.\nnor is",
        ),
        (["log", "log/"], "log is named twice. Name each run once."),
        (["log", "-o", "picture.svg"], "-o picture.svg is not a .png file. Use another name."),
        (["log", "-o", "no/where.png"], "cannot write no/where.png"),
    ],
)
def test_errors_say_what_to_do(tmp_path, monkeypatch, argv, message):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "log", [5.0], {})
    (tmp_path / "other.png").write_text("a picture of mine")
    with pytest.raises(UserError) as error:
        compare.main(argv)
    assert message in str(error.value)
    assert not (tmp_path / "compare.png").exists() and (tmp_path / "other.png").read_text() == "a picture of mine"
