"""Signals: the run saves its state and exits with the code of the signal, on all ranks."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from functools import partial

import pytest
from helpers import ROOT, STEP, TINY_FLAGS, Rank, finish_run, run_to_the_end, start_run, steps_done, terminate, wait_for
from training import assert_same_run, checkpoint_names

from support.checkpoints.directory import newest_checkpoint, step_of
from support.checkpoints.history import read_starts
from support.runtime.signals import StopHandler

FORWARD = "train_gpt2.GPT.forward"


def send(number: int, *args: object) -> None:
    signal.raise_signal(number)


@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_one_process_stops_within_a_step(byte_shards, tmp_path, number, code):
    flags = ["--data", byte_shards, "--shuffle", "--max-steps", 5, "--val-every", 0, "--batch-size", 1]
    run_to_the_end(*flags, "--out", "straight", cwd=tmp_path)
    in_step_2 = Rank(before={(FORWARD, 2 * 16 + 5): partial(send, number)})
    assert finish_run(start_run(*flags, "--out", "run", cwd=tmp_path, rank=in_step_2)) == [code]
    assert steps_done(tmp_path / "run") == 2 and checkpoint_names(tmp_path / "run") == ["model_00002"]
    assert f"{signal.Signals(number).name} received: stopping" in (tmp_path / "0.txt").read_text()
    run_to_the_end(*flags, "--out", "run", "--resume", cwd=tmp_path)
    assert_same_run(tmp_path / "run", tmp_path / "straight")


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_signal_interrupts_a_validation(byte_shards, tmp_path, world_size):
    flags = ["--data", byte_shards, "--max-steps", 4, "--val-every", 2, "--batch-size", 1, "--val-tokens", 10**6]
    early = Rank(before={(FORWARD, 3): terminate})
    ranks = start_run(*flags, "--out", "run", cwd=tmp_path, world_size=world_size, rank={0: early})
    assert finish_run(ranks) == [143] * world_size
    assert (tmp_path / "run" / "log.txt").read_text() == "" and checkpoint_names(tmp_path / "run") == []
    assert "There is no checkpoint yet" in (tmp_path / "0.txt").read_text()


@pytest.mark.parametrize(
    "torchrun, numbers, seconds, exits",
    [
        (False, [signal.SIGINT], 2, False),
        (False, [signal.SIGINT, signal.SIGINT], 2, True),
        (False, [signal.SIGINT, signal.SIGINT], 1.9, False),
        (False, [signal.SIGINT, signal.SIGINT, signal.SIGINT], 1, True),
        (False, [signal.SIGTERM, signal.SIGINT], 2, False),
        (False, [signal.SIGTERM, signal.SIGINT, signal.SIGINT], 2, True),
        (True, [signal.SIGINT, signal.SIGINT], 2, False),  # which passes on those that it gets
    ],
)
def test_a_second_interrupt_exits_immediately(monkeypatch, torchrun, numbers, seconds, exits):
    exit_codes, now = [], [100.0]
    monkeypatch.setattr(os, "_exit", exit_codes.append)
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    if torchrun:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    with StopHandler() as stop:
        for number in numbers:
            assert exit_codes == []
            signal.raise_signal(number)
            now[0] += seconds
    assert stop.agreed and exit_codes == [130] * exits


NOTEBOOK_CELL = """
from IPython.utils._process_posix import ProcessHandler
ProcessHandler().system({command!r})
"""


@pytest.mark.slow
def test_the_stop_button_of_a_notebook_loses_nothing(byte_shards, tmp_path):
    """IPython sends ^C, and within half a second SIGHUP, SIGINT and SIGKILL, which reach `timeout` instead of the run."""
    flags = ["--data", byte_shards, "--max-steps", 10**6, "--val-every", 0, "--batch-size", 1, "--out", "run"]
    words = [sys.executable, ROOT / "train_gpt2.py", *TINY_FLAGS, *flags]
    command = "timeout --foreground -s TERM 11h " + shlex.join(map(str, words))
    cell = subprocess.Popen([sys.executable, "-c", NOTEBOOK_CELL.format(command=command)], cwd=tmp_path)
    log = tmp_path / "run" / "log.txt"
    assert wait_for(lambda: log.exists() and "\n2 train" in log.read_text())
    cell.send_signal(signal.SIGINT)
    cell.wait(60)
    assert wait_for(lambda: checkpoint_names(tmp_path / "run")) and len(read_starts(tmp_path / "run")) == 1
    assert wait_for(lambda: "stopped by SIGINT" in (tmp_path / "run" / "starts.jsonl").read_text())


def test_a_hangup_that_is_ignored_stays_ignored():
    """nohup ignores it."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with StopHandler() as stop:
        signal.raise_signal(signal.SIGHUP)
    signal.signal(signal.SIGHUP, before)
    assert not stop.requested


def save_forever(*args: object, **facts: object) -> None:
    while True:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)


def test_a_second_interrupt_does_not_wait_for_the_thread_that_saves(byte_shards, tmp_path):
    flags = ["--data", byte_shards, "--max-steps", 9, "--val-every", 0, "--out", "run"]
    interrupted_twice = Rank(
        before={(FORWARD, 2 * 4 + 1): partial(send, signal.SIGINT)},
        replaced={"support.checkpoints.manager.write_checkpoint": save_forever},
    )
    assert finish_run(start_run(*flags, cwd=tmp_path, rank=interrupted_twice)) == [130]
    assert steps_done(tmp_path / "run") == 2


PIPE = []  # its reading end


def print_to_a_pipe(*args: object) -> None:
    read, write = os.pipe()
    os.dup2(write, 1)
    PIPE.append(read)


def close_its_reader(*args: object) -> None:
    os.close(PIPE.pop())


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
def test_the_state_is_saved_when_the_reader_of_the_output_closes_it(byte_shards, tmp_path, world_size):
    """Ctrl-C with "| tee" ends tee first."""
    flags = ["--data", byte_shards, "--max-steps", 8]
    run_to_the_end(*flags, "--out", "straight", cwd=tmp_path, world_size=world_size)
    reader_closes = Rank(before={(STEP, 1): print_to_a_pipe, (STEP, 4): close_its_reader})
    ranks = start_run(*flags, "--out", "run", cwd=tmp_path, world_size=world_size, rank=reader_closes)
    assert finish_run(ranks) == [141] * world_size
    assert step_of(newest_checkpoint(tmp_path / "run")) == 5
    run_to_the_end(*flags, "--out", "run", "--resume", cwd=tmp_path, world_size=world_size)
    assert_same_run(tmp_path / "run", tmp_path / "straight")


def test_ranks_do_not_outlive_torchrun(byte_shards, tmp_path):
    """One of them notices that its parent is another process now; all save and exit."""
    flags = ["--data", byte_shards, "--max-steps", 100000, "--val-every", 0, "--out", "run"]
    launched = Rank(env={"TORCHELASTIC_RUN_ID": "x"}, replaced={"support.runtime.signals.LAUNCHER": -1})
    assert finish_run(start_run(*flags, cwd=tmp_path, world_size=2, rank={1: launched})) == [143, 143]
    assert step_of(newest_checkpoint(tmp_path / "run")) == steps_done(tmp_path / "run") == 1


def test_a_signal_after_the_last_step_does_not_turn_success_into_failure(byte_shards, tmp_path):
    flags = ["--data", byte_shards, "--max-steps", 3, "--sample-every", 3, "--out", "run"]
    run_to_the_end(*flags, cwd=tmp_path, rank=Rank(before={("train_gpt2.sample", 0): terminate}))  # exit code 0
    assert checkpoint_names(tmp_path / "run") == ["model_00003"]
    assert "stopped" not in (tmp_path / "0.txt").read_text().replace("SIGTERM received: stopping", "")
