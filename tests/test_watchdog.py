"""Ranks that wait for one that does not arrive: the run ends, and names it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time

import pytest
from helpers import finish_run, run_to_the_end, start_run, steps_done, wait_for

import train_gpt2
from support.checkpoints import manager, start
from support.runtime import preflight, watchdog
from support.runtime.distributed import Distributed


def short_limits(rank):
    watchdog.STEP_SECONDS = watchdog.STEP_FACTOR = watchdog.WAIT_SECONDS = watchdog.EXIT_SECONDS = 1.0
    watchdog.SILENCE_SECONDS, watchdog.BEAT_SECONDS = 3.0, 0.1
    watchdog.ALIVE_SECONDS, watchdog.CONNECT_SECONDS = 1, 2


def one_rank_is_late_to_connect(rank):
    short_limits(rank)
    if rank == 1:
        train_gpt2.Distributed.init_process_group = lambda self: time.sleep(600)


def one_rank_does_not_compare(rank):
    short_limits(rank)
    if rank == 2:
        preflight.collect_facts = lambda *args: time.sleep(600)


def one_rank_is_stopped_while_it_prepares(rank):
    short_limits(rank)
    if rank == 1:
        start.check_training_fits = lambda *args: os.kill(os.getpid(), signal.SIGSTOP)


def one_rank_fails_while_it_prepares(rank):
    short_limits(rank)
    if rank == 1:
        start.check_training_fits = lambda *args: os._exit(2)


@pytest.mark.parametrize("sabotage", [one_rank_is_stopped_while_it_prepares, one_rank_fails_while_it_prepares])
def test_a_rank_that_does_not_finish_its_preparation_is_named(byte_shards, tmp_path, sabotage):
    ranks = start_run("--data", byte_shards, "--max-steps", 4, cwd=tmp_path, world_size=2, sabotage=sabotage)
    assert ended_by_the_watchdog(ranks, missing=1)
    expected = r"error: rank 1 \(\S+\) did not arrive in the preparation and gives no sign of life\."
    assert re.search(expected, (tmp_path / "0.txt").read_text())


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
        (one_rank_is_late_to_connect, 1, "the connection of all ranks"),
        (one_rank_does_not_compare, 2, "the connection of all ranks"),
    ],
)
def test_a_rank_that_does_not_connect_is_named(byte_shards, tmp_path, sabotage, missing, task):
    ranks = start_run("--data", byte_shards, "--max-steps", 4, cwd=tmp_path, world_size=4, sabotage=sabotage)
    began = time.monotonic()
    assert ended_by_the_watchdog(ranks, missing)
    assert time.monotonic() - began < 60
    output = "".join((tmp_path / f"{rank}.txt").read_text() for rank in range(4))
    # of one rank, whichever asked; others may lose the connection to rank 0, which has the store here
    errors = [line for line in output.splitlines() if line.startswith("error: rank")]
    expected = rf"error: rank {missing} \(\S+\) did not arrive in {task} within \d+ s. rank {missing} .* at tests/test_watchdog.py:\d+, most"
    assert len(errors) == 1 and re.match(expected, errors[0])


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_a_rank_that_is_stopped_in_a_step_is_named(byte_shards, tmp_path, parallel):
    flags = ["--data", byte_shards, "--max-steps", 100000, "--val-every", 0, "--out", "run", "--parallel", parallel]
    ranks = start_run(*flags, cwd=tmp_path, world_size=2, sabotage=short_limits)
    assert wait_for(lambda: steps_done(tmp_path / "run") >= 3)
    os.kill(ranks[1].pid, signal.SIGSTOP)
    assert ended_by_the_watchdog(ranks, missing=1)
    expected = r"error: rank 1 \(.+\) did not arrive in .*step \d+ and gives no sign of life\. Look there .+ rerun with --resume\.\n"
    assert re.search(expected, (tmp_path / "0.txt").read_text())


def test_a_store_that_does_not_answer_is_no_reason_to_wait(byte_shards, tmp_path):
    """Here it is in the process of rank 0, which is stopped; under torchrun, its node would have to be cut off."""
    flags = ["--data", byte_shards, "--max-steps", 100000, "--val-every", 0, "--out", "run"]
    ranks = start_run(*flags, cwd=tmp_path, world_size=2, sabotage=short_limits)
    assert wait_for(lambda: steps_done(tmp_path / "run") >= 3)
    os.kill(ranks[0].pid, signal.SIGSTOP)
    assert ended_by_the_watchdog(ranks, missing=0)
    assert re.search(
        r"error: step \d+ does not end, and the node of rank 0 does not answer", (tmp_path / "1.txt").read_text()
    )


def store_answers_nothing(rank):
    """From step 3 on; steps go on."""
    short_limits(rank)
    real = train_gpt2.train_step

    def step(state, *args):
        time.sleep(0.1)
        return real(state, *args)

    def look(self):
        if self._task.startswith("step") and int(self._task.split()[1]) >= 3:
            time.sleep(600)
        return "[]"

    train_gpt2.train_step, watchdog.Watchdog._sign_of_life = step, lambda self, beat: look(self)


def test_steps_that_go_on_need_no_store(byte_shards, tmp_path):
    flags = ["--data", byte_shards, "--max-steps", 60, "--val-every", 0]
    run_to_the_end(*flags, cwd=tmp_path, world_size=2, sabotage=store_answers_nothing)


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


def sleep_in_step(number, seconds):
    """Makes a step of this rank take so much longer; the first one of the process is number 1."""
    real, calls = train_gpt2.train_step, []

    def step(*args):
        calls.append(1)
        if len(calls) == number:
            time.sleep(seconds)
        return real(*args)

    train_gpt2.train_step = step


def rank_0_is_busy_between_steps(rank):
    """As with a checkpoint, a profile or a console that nobody reads; and all of them, with an evaluation."""
    short_limits(rank)
    real_step, real_val, calls = train_gpt2.RunLogger.step, train_gpt2.validation_loss, []

    def step(self, step, *args):
        if step == 4 and rank == 0:
            time.sleep(6)
        return real_step(self, step, *args)

    def validation_loss(*args):
        calls.append(1)
        if len(calls) == 2:
            time.sleep(6)
        return real_val(*args)

    train_gpt2.RunLogger.step, train_gpt2.validation_loss = step, validation_loss


def ranks_are_busy(rank):
    """The first step compiles, rank 0 arrives long after the other in one that takes several beats, and then saves."""
    rank_0_is_busy_between_steps(rank)
    sleep_in_step(1, 6)
    if rank == 0:
        sleep_in_step(6, 1.5)
    real = manager.write_checkpoint
    manager.write_checkpoint = lambda *args: (time.sleep(8), real(*args))


@pytest.mark.slow
def test_ranks_that_are_busy_are_waited_for(byte_shards, tmp_path):
    """The other one has left long before the checkpoint is written."""
    run_to_the_end("--data", byte_shards, "--max-steps", 12, cwd=tmp_path, world_size=2, sabotage=ranks_are_busy)


def all_ranks_wait_for_nothing(rank):
    short_limits(rank)
    sleep_in_step(3, 600)


def test_a_step_in_which_all_ranks_wait_is_reported(byte_shards, tmp_path):
    """They are alive, so only the collectives' own timeout would end the run."""
    flags = ["--data", byte_shards, "--max-steps", 12, "--val-every", 0]
    ranks = start_run(*flags, cwd=tmp_path, world_size=2, sabotage=all_ranks_wait_for_nothing)
    warning = (
        r"warning: step 2 takes longer than \d+ s\. All ranks are at tests/test_watchdog.py:\d+\. All ranks are alive"
    )
    try:
        assert wait_for(lambda: re.search(warning, "".join(path.read_text() for path in tmp_path.glob("?.txt"))))
        time.sleep(5)
        assert all(process.is_alive() for process in ranks)
        assert sum((tmp_path / f"{rank}.txt").read_text().count("warning:") for rank in range(2)) == 1
    finally:
        for process in ranks:
            process.kill()


def stderr_is_blocked(rank):
    """From step 2 on, a pipe that nobody reads, and that is full."""
    all_ranks_wait_for_nothing(rank)
    step, calls = train_gpt2.train_step, []
    train_gpt2.train_step = lambda *args: (calls.append(1), len(calls) == 3 and block_stderr(), step(*args))[-1]


def block_stderr():
    _, write = os.pipe()
    os.set_blocking(write, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(write, bytes(4096))
    os.set_blocking(write, True)
    os.dup2(write, 2)


def test_a_blocked_console_does_not_keep_the_processes(byte_shards, tmp_path):
    flags = ["--data", byte_shards, "--max-steps", 12, "--val-every", 0]
    ranks = start_run(*flags, "--out", "run", cwd=tmp_path, world_size=2, sabotage=stderr_is_blocked)
    assert wait_for(lambda: steps_done(tmp_path / "run") >= 2)
    os.kill(ranks[1].pid, signal.SIGSTOP)
    assert ended_by_the_watchdog(ranks, missing=1)


def test_time_in_which_the_process_is_stopped_is_no_time_of_a_step(monkeypatch):
    """A long step must not move the limit beyond that of the collectives."""
    dog = watchdog.Watchdog(Distributed(0, 0, 1), "log")
    for seconds in (1.0, 1.0, 10_000.0):
        with dog.step(1):
            dog._seconds = seconds
    with dog.step(2):
        assert dog._warn_after == watchdog.LONGEST_LIMIT + watchdog.SILENCE_SECONDS < 3600
