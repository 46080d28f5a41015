"""The log and the metrics: their lines, and what a resumed run keeps of them."""

from __future__ import annotations

import json
import shutil

import pytest
from shard_helpers import file_size_limit

from support.cli import UserError
from support.console.log import MetricsLog, RunLog, read_metrics, read_values
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
    with pytest.raises(OSError, match="log.txt belongs to another run"):
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


# ---- metrics.jsonl


@pytest.mark.parametrize("name", ["step", "tokens"])
def test_a_line_with_a_number_that_no_run_has_is_malformed(tmp_path, name):
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 3, "lr": 0.5, "{name}": {10**400}}}\n{{"step": 4, "lr": 0.25}}\n')
    assert read_metrics(path) == {"step": {4: 4}, "lr": {4: 0.25}}


def write_steps(metrics: MetricsLog, steps) -> None:
    for step in steps:
        metrics.write(step, 2.0, 1e-3, 0.5, 0.25, 256 * (step + 1), False)


def test_a_line_of_the_metrics_is_json_whatever_the_numbers_are(tmp_path):
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsLog(path)
    metrics.write(0, 10.824905395507812, 9e-4, 0.1 + 0.2, 0.0650000001, 1024, False)
    metrics.write(1, float("nan"), 9e-4, float("inf"), 0.065, 2048, True)
    first, second = path.read_text().splitlines()
    assert first == '{"step": 0, "loss": 10.824905, "lr": 0.0009, "norm": 0.3, "seconds": 0.065, "tokens": 1024}'

    def fail(constant):
        raise AssertionError(f"{constant} is not JSON")

    assert json.loads(second, parse_constant=fail) == {
        "step": 1, "loss": None, "lr": 9e-4, "norm": None, "seconds": 0.065, "tokens": 2048, "skipped": True
    }  # fmt: skip
    assert read_metrics(path) == {
        "step": {0: 0, 1: 1}, "loss": {0: 10.824905}, "lr": {0: 9e-4, 1: 9e-4}, "norm": {0: 0.3},
        "seconds": {0: 0.065, 1: 0.065}, "tokens": {0: 1024, 1: 2048},
    }  # fmt: skip


def test_the_metrics_continue_from_a_step(tmp_path, capsys):
    path = tmp_path / "metrics.jsonl"
    write_steps(MetricsLog(path), range(6))
    complete = path.read_text()
    with open(path, "a") as file:
        file.write('{"step": 6, "lo')  # a crash cut it off
    write_steps(MetricsLog(path, 4), (4, 5))
    assert path.read_text() == complete and not capsys.readouterr().err
    with open(path, "a") as file:
        file.write("mine\n[1]\n{}\n" + '{"step": true}\n{"step": -1}\n{"step": 1e400}\n' + "[" * 100_000 + "\n")
    write_steps(MetricsLog(path, 5), [5])
    assert path.read_text() == complete
    assert capsys.readouterr().err == f"warning: {path} had malformed lines (7), which are dropped.\n"


def test_a_run_without_metrics_gets_them_from_the_first_resumed_step_on(tmp_path, capsys):
    path = tmp_path / "metrics.jsonl"
    write_steps(MetricsLog(path, 100), [100, 101])
    assert read_metrics(path)["tokens"] == {100: 25856, 101: 26112} and not capsys.readouterr().err
    write_steps(MetricsLog(path, 101), [101])
    assert read_metrics(path)["tokens"] == {100: 25856, 101: 26112} and not capsys.readouterr().err


@pytest.mark.parametrize("kind, name", [(RunLog, "log.txt"), (MetricsLog, "metrics.jsonl")])
def test_lines_wait_in_memory_while_the_disk_is_full(tmp_path, capsys, kind, name):
    def write(file, step):
        file.write(step, "train", 1.0) if kind is RunLog else write_steps(file, [step])

    expected, full = kind(tmp_path / "expected"), kind(tmp_path / name)
    for step in range(20):
        write(expected, step)
    with file_size_limit(250):
        for step in range(15):
            write(full, step)
        with pytest.raises(OSError):
            full.sync()
    assert (tmp_path / name).stat().st_size == 250  # a part of a line, too
    for step in range(15, 20):
        write(full, step)
    full.close()
    assert (tmp_path / name).read_text() == (tmp_path / "expected").read_text()
    assert capsys.readouterr().err.count("Its lines are kept in memory") == 1


def test_both_files_of_a_folder_that_was_removed_are_written_again(tmp_path, capsys):
    out = tmp_path / "run"
    out.mkdir()
    log, metrics = RunLog(out / "log.txt"), MetricsLog(out / "metrics.jsonl")
    log.write(0, "train", 2.0)
    write_steps(metrics, [0])
    before = (out / "metrics.jsonl").read_text()
    shutil.rmtree(out)
    for file in (log, metrics, log, metrics):
        file.sync()
    metrics.close()
    log.close()
    assert (out / "log.txt").read_text() == "0 train 2.000000\n" and (out / "metrics.jsonl").read_text() == before
    assert capsys.readouterr().err.count("was removed or replaced") == 2
