"""The log file: its lines, and what a resumed run keeps of them."""

from __future__ import annotations

import shutil

import pytest

from support.cli import UserError
from support.console.log import RunLog, read_values
from support.files import lock_folder, write_lock_holder


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


def test_what_was_measured_before_the_first_step_stays(tmp_path):
    path = tmp_path / "log.txt"
    path.write_text("0 train 1.000000\n1 val 0.5000\n1 hella 0.2500\n1 train 0.900000\n2 val 0.4000\n")
    log = RunLog(path, 1, ["val"])
    assert log.kept == {"val": 0.5}
    assert path.read_text() == "0 train 1.000000\n1 val 0.5000\n"
    assert RunLog(path, 1).kept == {} and path.read_text() == "0 train 1.000000\n"


@pytest.mark.parametrize(
    "logged, first_step, lacking",
    [
        ([0], 1, None),
        ([0, 1, 2], 3, None),
        ([0], 3, "2 of the 3 steps so far, step 1 first"),
        ([0, 1, 4, 5], 6, "2 of the 6 steps so far, step 2 first"),
        ([1, 2], 3, "1 of the 3 steps so far, step 0 first"),
        (None, 3, "3 of the 3 steps so far, step 0 first"),
    ],
)
def test_missing_lines_are_reported_wherever_they_are(tmp_path, capsys, logged, first_step, lacking):
    path = tmp_path / "log.txt"
    if logged is not None:
        path.write_text("".join(f"{step} train 1.000000\n" for step in logged))
    RunLog(path, first_step)
    assert capsys.readouterr().err == (f"warning: {path} lacks {lacking}.\n" if lacking else "")


def test_a_log_that_was_removed_is_written_again(tmp_path, capsys):
    out, path = tmp_path / "run", tmp_path / "run" / "log.txt"
    out.mkdir()
    log = RunLog(path)
    log.write(0, "train", 2.0)
    shutil.rmtree(out)
    log.write(1, "train", 1.0)
    log.sync()
    log.write(2, "train", 0.5)
    log.close()
    assert path.read_text() == "0 train 2.000000\n1 train 1.000000\n2 train 0.500000\n"
    assert capsys.readouterr().err == f"warning: {path} was removed or replaced. It is written again.\n"


@pytest.mark.parametrize("replaced", [False, True])
def test_the_log_alone_may_be_removed_or_replaced(tmp_path, replaced):
    """The folder stays locked by this run. Editors replace a file when they save it."""
    path = tmp_path / "log.txt"
    log = RunLog(path)
    with lock_folder(tmp_path, "--out") as lock:
        write_lock_holder(lock)
        log.write(0, "train", 2.0)
        path.unlink()
        if replaced:
            path.write_text("edited")
        log.sync()
    assert path.read_text() == "0 train 2.000000\n"


def test_a_folder_that_was_removed_is_locked_again_or_left_to_another_run(tmp_path):
    out, path = tmp_path / "run", tmp_path / "run" / "log.txt"
    out.mkdir()
    log = RunLog(path)
    log.write(0, "train", 2.0)
    shutil.rmtree(out)
    log.sync()
    with pytest.raises(UserError, match="is in use"):
        lock_folder(out, "--out")
    shutil.rmtree(out)
    out.mkdir()
    with lock_folder(out, "--out"), pytest.raises(UserError, match="is in use"):
        log.sync()
    path.write_text("0 train 9.000000\n")
    with pytest.raises(OSError, match="log.txt is that of another run"):
        log.sync()
    assert path.read_text() == "0 train 9.000000\n"


def test_line_ends_of_windows_are_read(tmp_path, capsys):
    path = tmp_path / "log.txt"
    path.write_bytes(b"0 train 2.000000\r\n1 train 1.000000\r\n")
    RunLog(path, 2)
    assert path.read_bytes() == b"0 train 2.000000\n1 train 1.000000\n" and not capsys.readouterr().err


def test_malformed_lines_are_counted(tmp_path, capsys):
    path = tmp_path / "log.txt"
    path.write_text("0 train 1.000000\n0 vax 1.0000\nmine\n1 train 1.0000")
    RunLog(path, 1)
    assert capsys.readouterr().err == f"warning: {path} had malformed lines (1), which are dropped.\n"


def test_only_finite_values_are_read(tmp_path):
    path = tmp_path / "log.txt"
    log = RunLog(path)
    for step, value in enumerate((2.0, float("nan"), float("inf"), -1.5)):
        log.write(step, "val", value)
    log.write(4, "train", 3.0)
    assert read_values(path, "val") == {0: 2.0, 3: -1.5}
