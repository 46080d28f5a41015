"""Signals: the run saves its state and exits with the code of the signal, on all ranks."""

from __future__ import annotations

import itertools
import os
import signal
import time
from functools import partial

import pytest
from helpers import finish_run, run_to_the_end, start_run, steps_done
from training import assert_same_run, checkpoint_names

import train_gpt2
from support.checkpoints import manager
from support.checkpoints.directory import newest_checkpoint, step_of
from support.console.run_logger import RunLogger
from support.runtime import signals
from support.runtime.signals import StopHandler
from train_gpt2 import GPT


def signalled_in_forward(rank: int, number: int, call: int, receiver: int = 0) -> None:
    """The receiver gets a signal in one of its forward passes, which are numbered from 0."""
    real, calls = GPT.forward, itertools.count()

    def forward(self, *args):
        if next(calls) == call and rank == receiver:
            os.kill(os.getpid(), number)
        return real(self, *args)

    GPT.forward = forward


@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_one_process_stops_within_a_step(byte_shards, tmp_path, number, code):
    flags = ["--data", byte_shards, "--shuffle", "--max-steps", 5, "--val-every", 0, "--batch-size", 1]
    run_to_the_end(*flags, "--out", "straight", cwd=tmp_path)
    in_step_2 = partial(signalled_in_forward, number=number, call=2 * 16 + 5)
    assert finish_run(start_run(*flags, "--out", "run", cwd=tmp_path, sabotage=in_step_2)) == [code]
    assert steps_done(tmp_path / "run") == 2 and checkpoint_names(tmp_path / "run") == ["model_00002"]
    assert f"{signal.Signals(number).name} received: stopping" in (tmp_path / "0.txt").read_text()
    run_to_the_end(*flags, "--out", "run", "--resume", cwd=tmp_path)
    assert_same_run(tmp_path / "run", tmp_path / "straight")


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_signal_interrupts_a_validation(byte_shards, tmp_path, world_size):
    flags = ["--data", byte_shards, "--max-steps", 4, "--val-every", 2, "--batch-size", 1, "--val-tokens", 10**6]
    early = partial(signalled_in_forward, number=signal.SIGTERM, call=3)
    ranks = start_run(*flags, "--out", "run", cwd=tmp_path, world_size=world_size, sabotage=early)
    assert finish_run(ranks) == [143] * world_size
    assert (tmp_path / "run" / "log.txt").read_text() == "" and checkpoint_names(tmp_path / "run") == []
    assert "There is no checkpoint yet" in (tmp_path / "0.txt").read_text()


@pytest.mark.parametrize(
    "torchrun, numbers, exits",
    [
        (False, [signal.SIGINT], False),
        (False, [signal.SIGINT, signal.SIGINT], True),
        (False, [signal.SIGTERM, signal.SIGINT], False),
        (False, [signal.SIGTERM, signal.SIGINT, signal.SIGINT], True),
        (True, [signal.SIGINT, signal.SIGINT], False),  # which passes on those that it gets
    ],
)
def test_a_second_interrupt_exits_immediately(monkeypatch, torchrun, numbers, exits):
    exit_codes = []
    monkeypatch.setattr(os, "_exit", exit_codes.append)
    if torchrun:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    with StopHandler() as stop:
        for number in numbers:
            assert exit_codes == []
            signal.raise_signal(number)
    assert stop.agreed and exit_codes == [130] * exits


def test_a_hangup_that_is_ignored_stays_ignored():
    """nohup ignores it."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with StopHandler() as stop:
        signal.raise_signal(signal.SIGHUP)
    signal.signal(signal.SIGHUP, before)
    assert not stop.requested


def interrupted_while_saving(rank: int) -> None:
    signalled_in_forward(rank, signal.SIGINT, 9)

    def save(*args, **facts):
        while True:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.01)

    manager.write_checkpoint = save


def test_a_second_interrupt_does_not_wait_for_the_thread_that_saves(byte_shards, tmp_path):
    flags = ["--data", byte_shards, "--max-steps", 9, "--val-every", 0, "--out", "run"]
    assert finish_run(start_run(*flags, cwd=tmp_path, sabotage=interrupted_while_saving)) == [130]
    assert steps_done(tmp_path / "run") == 2


def reader_closes_after_step_3(rank):
    read, write = os.pipe()
    real = RunLogger.step

    def step(self, state, *figures):
        real(self, state, *figures)
        if state.step == 1:
            os.dup2(write, 1)
        if state.step == 3:
            os.close(read)

    RunLogger.step = step


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
def test_the_state_is_saved_when_the_reader_of_the_output_closes_it(byte_shards, tmp_path, world_size):
    """Ctrl-C with "| tee" ends tee first."""
    flags = ["--data", byte_shards, "--max-steps", 8]
    run_to_the_end(*flags, "--out", "straight", cwd=tmp_path, world_size=world_size)
    ranks = start_run(*flags, "--out", "run", cwd=tmp_path, world_size=world_size, sabotage=reader_closes_after_step_3)
    assert finish_run(ranks) == [141] * world_size
    assert step_of(newest_checkpoint(tmp_path / "run")) == 5
    run_to_the_end(*flags, "--out", "run", "--resume", cwd=tmp_path, world_size=world_size)
    assert_same_run(tmp_path / "run", tmp_path / "straight")


def launched_by_another_process(rank):
    os.environ["TORCHELASTIC_RUN_ID"] = "x"
    signals.LAUNCHER = -1 if rank == 1 else os.getppid()


def test_ranks_do_not_outlive_torchrun(byte_shards, tmp_path):
    """One of them notices that its parent is another process now; all save and exit."""
    flags = ["--data", byte_shards, "--max-steps", 100000, "--val-every", 0, "--out", "run"]
    ranks = start_run(*flags, cwd=tmp_path, world_size=2, sabotage=launched_by_another_process)
    assert finish_run(ranks) == [143, 143]
    assert step_of(newest_checkpoint(tmp_path / "run")) == steps_done(tmp_path / "run") == 1


def signal_during_the_last_sample(rank):
    real = train_gpt2.sample

    def sample(*args):
        os.kill(os.getpid(), signal.SIGTERM)
        return real(*args)

    train_gpt2.sample = sample


def test_a_signal_after_the_last_step_does_not_turn_success_into_failure(byte_shards, tmp_path):
    flags = ["--data", byte_shards, "--max-steps", 3, "--sample-every", 3, "--out", "run"]
    run_to_the_end(*flags, cwd=tmp_path, sabotage=signal_during_the_last_sample)  # exit code 0
    assert checkpoint_names(tmp_path / "run") == ["model_00003"]
    assert "stopped" not in (tmp_path / "0.txt").read_text().replace("SIGTERM received: stopping", "")
