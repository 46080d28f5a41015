"""The log and the metrics: their lines, and what a resumed run keeps of them."""

from __future__ import annotations

import json

import pytest
from shard_helpers import file_size_limit

from support.console.log import MetricsLog, RunLog, read_metrics, read_values


def test_the_log_continues_from_a_step(tmp_path, capsys):
    path = tmp_path / "log.txt"
    log = RunLog(path, 0)
    for step in range(4):
        log.write(step, "train", 1 / 3)
    log.write(4, "val", 1 / 3)
    log.write(4, "hella", 0.25)
    complete = "".join(f"{i} train 0.333333\n" for i in range(4)) + "4 val 0.3333\n4 hella 0.2500\n"
    assert path.read_text() == complete
    with open(path, "ab") as file:
        file.write(b"\nmine\n\0\0\0\n0 vax 1.0000\n\xff\n1")  # the first digit of a 10, cut off
    log = RunLog(path, 4, ["hella"])
    assert log.kept == {"hella": 0.25}  # which was measured before step 4
    log.write(4, "val", 2)
    expected = complete.replace("4 val 0.3333\n", "0 vax 1.0000\n") + "4 val 2.0000\n"
    assert path.read_text() == expected
    assert RunLog(path, 4).kept == {} and "4 hella" not in path.read_text()
    RunLog(None, 4).write(4, "train", 1.0)
    assert [p.name for p in tmp_path.iterdir()] == ["log.txt"] and not capsys.readouterr().err


def test_only_finite_values_are_read(tmp_path):
    path = tmp_path / "log.txt"
    log = RunLog(path)
    for step, value in enumerate((2.0, float("nan"), float("inf"), -1.5)):
        log.write(step, "val", value)
    log.write(4, "train", 3.0)
    assert read_values(path, "val") == {0: 2.0, 3: -1.5} and read_values(tmp_path / "nothing", "val") == {}


# ---- metrics.jsonl


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


def test_the_metrics_continue_from_a_step(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_steps(MetricsLog(path), range(6))
    complete = path.read_text()
    with open(path, "a") as file:
        file.write('{"step": 6, "lo')  # a crash cut it off
    write_steps(MetricsLog(path, 4), (4, 5))
    assert path.read_text() == complete
    with open(path, "a") as file:
        file.write("mine\n[1]\n{}\n" + '{"step": true}\n{"step": -1}\n{"step": 1e400}\n' + "[" * 100_000 + "\n")
    write_steps(MetricsLog(path, 5), [5])
    assert path.read_text() == complete


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
