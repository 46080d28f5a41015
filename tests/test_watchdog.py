"""Ranks that wait for one that does not arrive: the run ends, and names it."""

from __future__ import annotations

import os
import re
import signal
import time

import pytest
from helpers import finish_run, run_to_the_end, start_run, steps_done, wait_for

import train_gpt2
from support.runtime import preflight, watchdog


def short_limits(rank):
    watchdog.STEP_SECONDS, watchdog.STEP_FACTOR, watchdog.REPORT_SECONDS, watchdog.STORE_SECONDS = 1.0, 1.0, 1.0, 2.0


def one_rank_is_late_to_connect(rank):
    short_limits(rank)
    preflight.CONNECT_SECONDS = 2
    if rank == 1:
        train_gpt2.Distributed.init_process_group = lambda self: time.sleep(600)


def one_rank_does_not_compare(rank):
    short_limits(rank)
    preflight.COMPARE_SECONDS = 2
    if rank == 2:
        preflight.collect_facts = lambda *args: time.sleep(600)


def ended_by_the_watchdog(ranks, missing):
    """Whether all but the missing rank end, which torchrun would then kill."""
    others = [process for rank, process in enumerate(ranks) if rank != missing]
    codes = finish_run(others, timeout=60)
    ranks[missing].kill()
    ranks[missing].join()
    return codes == [2] * len(others)


@pytest.mark.parametrize(
    "sabotage, missing, task",
    [
        (one_rank_is_late_to_connect, 1, "the first all-reduce"),
        (one_rank_does_not_compare, 2, "the comparison of versions and flags"),
    ],
)
def test_a_rank_that_does_not_connect_is_named(byte_shards, tmp_path, sabotage, missing, task):
    ranks = start_run("--data", byte_shards, "--max-steps", 4, cwd=tmp_path, world_size=4, sabotage=sabotage)
    began = time.monotonic()
    assert ended_by_the_watchdog(ranks, missing)
    assert time.monotonic() - began < 60
    errors = [line for line in (tmp_path / "0.txt").read_text().splitlines() if line.startswith("error:")]
    expected = rf"error: rank {missing} \(\S+\) did not arrive in {task} within \d+ s: at tests/test_watchdog.py:\d+, while most are at \w+"
    assert len(errors) == 1 and re.match(expected, errors[0])
    assert "error" not in (tmp_path / "3.txt").read_text()


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_a_rank_that_is_stopped_in_a_step_is_named(byte_shards, tmp_path, parallel):
    flags = ["--data", byte_shards, "--max-steps", 100000, "--val-every", 0, "--out", "run", "--parallel", parallel]
    ranks = start_run(*flags, cwd=tmp_path, world_size=2, sabotage=short_limits)
    assert wait_for(lambda: steps_done(tmp_path / "run") >= 3)
    os.kill(ranks[1].pid, signal.SIGSTOP)
    assert ended_by_the_watchdog(ranks, missing=1)
    expected = r"error: rank 1 \(.+\) did not arrive in step \d+ within \d+ s\. Look there .+ rerun with --resume\.\n"
    assert re.search(expected, (tmp_path / "0.txt").read_text())


def test_a_store_that_does_not_answer_is_no_reason_to_wait(byte_shards, tmp_path):
    """Here it is in the process of rank 0, which is stopped; under torchrun, its node would have to be cut off."""
    flags = ["--data", byte_shards, "--max-steps", 100000, "--val-every", 0, "--out", "run"]
    ranks = start_run(*flags, cwd=tmp_path, world_size=2, sabotage=short_limits)
    assert wait_for(lambda: steps_done(tmp_path / "run") >= 3)
    os.kill(ranks[0].pid, signal.SIGSTOP)
    assert ended_by_the_watchdog(ranks, missing=0)
    assert re.search(r"error: step \d+ has not ended in \d+ s, and .+ not answer", (tmp_path / "1.txt").read_text())


def test_a_short_pause_ends_nothing(byte_shards, tmp_path):
    """Time in which this process is stopped does not count, and a limit is longer than a step."""
    flags = ["--data", byte_shards, "--max-steps", 60, "--val-every", 0, "--out", "run"]
    ranks = start_run(*flags, cwd=tmp_path, world_size=2, sabotage=short_limits)
    assert wait_for(lambda: steps_done(tmp_path / "run") >= 3)
    for process in ranks:
        os.kill(process.pid, signal.SIGSTOP)
    time.sleep(3)
    for process in ranks:
        os.kill(process.pid, signal.SIGCONT)
    assert finish_run(ranks) == [0, 0]


def first_step_is_slow(rank):
    short_limits(rank)
    real, calls = train_gpt2.train_step, []

    def step(*args):
        calls.append(1)
        if len(calls) == 1:
            time.sleep(3)
        return real(*args)

    train_gpt2.train_step = step


@pytest.mark.slow
def test_the_first_step_may_take_long(byte_shards, tmp_path):
    run_to_the_end("--data", byte_shards, "--max-steps", 3, cwd=tmp_path, world_size=2, sabotage=first_step_is_slow)
