"""The log file: its lines, and what a resumed run keeps of them."""

from __future__ import annotations

from support.console.log import RunLog, read_values


def test_the_log_continues_from_a_step(tmp_path):
    path = tmp_path / "log.txt"
    log = RunLog(path, 0)
    for step in range(4):
        log.write(step, "train", 1 / 3)
    log.write(4, "val", 1 / 3)
    log.write(4, "hella", 0.25)
    complete = "".join(f"{i} train 0.333333\n" for i in range(4)) + "4 val 0.3333\n4 hella 0.2500\n"
    assert path.read_text() == complete
    with open(path, "a") as file:
        file.write("\nmine\n\0\0\0\n")
    with open(path, "ab") as file:
        file.write(b"\xff\n1")  # the first digit of a 10, cut off
    RunLog(path, 4).write(4, "val", 2)
    assert path.read_text() == complete.replace("4 val 0.3333\n4 hella 0.2500\n", "4 val 2.0000\n")
    RunLog(None, 0).write(0, "train", 1.0)
    assert [p.name for p in tmp_path.iterdir()] == ["log.txt"]


def test_missing_lines_are_reported(tmp_path, capsys):
    path = tmp_path / "log.txt"
    path.write_text("0 train 1.000000\n")
    RunLog(path, 1)
    assert not capsys.readouterr().err
    RunLog(path, 3)
    assert capsys.readouterr().err == f"warning: {path} lacks lines of the steps before 3.\n"


def test_only_finite_values_are_read(tmp_path):
    path = tmp_path / "log.txt"
    log = RunLog(path)
    for step, value in enumerate((2.0, float("nan"), float("inf"), -1.5)):
        log.write(step, "val", value)
    log.write(4, "train", 3.0)
    assert read_values(path, "val") == {0: 2.0, 3: -1.5}
