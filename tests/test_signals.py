"""Signals: the run saves its state and exits with the code of the signal, on all ranks."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
from helpers import finish_run, run_to_the_end, start_run, steps_done, wait_for
from training import assert_same_run, checkpoint_names

import train_gpt2
from support.checkpoints import manager
from support.checkpoints.directory import newest_checkpoint, step_of
from support.console.run_logger import RunLogger
from support.runtime import signals
from train_gpt2 import GPT


def slow_micro_steps(rank):
    real = GPT.forward

    def forward(self, *args):
        time.sleep(0.03)
        return real(self, *args)

    GPT.forward = forward


@pytest.mark.slow
@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_one_process_stops_within_a_step(byte_shards, tmp_path, number, code):
    flags = ["--data", byte_shards, "--shuffle", "--max-steps", 8, "--val-every", 4, "--batch-size", 1]
    run_to_the_end(*flags, "--out", "straight", cwd=tmp_path)
    [process] = start_run(*flags, "--out", "run", cwd=tmp_path, sabotage=slow_micro_steps)  # a second per step
    out = tmp_path / "run"
    assert wait_for(lambda: steps_done(out) == 2)
    time.sleep(0.2)
    os.kill(process.pid, number)
    assert finish_run([process]) == [code]
    assert steps_done(out) == 2 and newest_checkpoint(out).name == "model_00002"
    assert f"{signal.Signals(number).name} received: stopping" in (tmp_path / "0.txt").read_text()
    run_to_the_end(*flags, "--out", "run", "--resume", cwd=tmp_path)
    assert_same_run(out, tmp_path / "straight")


@pytest.mark.slow
def test_several_processes_stop_at_the_same_step(byte_shards, tmp_path):
    flags = ["--data", byte_shards, "--shuffle", "--max-steps", 300, "--val-every", 0]
    ranks, out = start_run(*flags, "--out", "run", cwd=tmp_path, world_size=2), tmp_path / "run"
    assert wait_for(lambda: steps_done(out) >= 3)
    os.kill(ranks[1].pid, signal.SIGTERM)  # the other rank learns of it with the next loss
    assert finish_run(ranks) == [143, 143]
    step = step_of(newest_checkpoint(out))
    assert steps_done(out) == step < 300
    flags += ["--max-steps", step + 3, "--decay-steps", 300]
    run_to_the_end(*flags, "--out", "run", "--resume", cwd=tmp_path, world_size=2)
    run_to_the_end(*flags, "--out", "straight", cwd=tmp_path, world_size=2)
    assert_same_run(out, tmp_path / "straight")


def slow_validation(rank):
    real = GPT.forward

    def forward(self, *args):
        if not torch.is_grad_enabled():
            time.sleep(0.1)
        return real(self, *args)

    GPT.forward = forward


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_signal_interrupts_a_validation(byte_shards, tmp_path, world_size):
    flags = ["--data", byte_shards, "--max-steps", 4, "--val-every", 2, "--batch-size", 1, "--val-tokens", 10**6]
    ranks, out = (
        start_run(*flags, "--out", "run", cwd=tmp_path, world_size=world_size, sabotage=slow_validation),
        tmp_path / "run",
    )
    output = tmp_path / "0.txt"
    assert wait_for(lambda: output.exists() and "data    " in output.read_text())
    time.sleep(0.3)  # into the first validation, of 80 rows
    for process in ranks:
        os.kill(process.pid, signal.SIGTERM)
    assert finish_run(ranks, timeout=20) == [143] * world_size
    assert (out / "log.txt").read_text() == "" and not list(out.glob("model_*"))
    assert "There is no checkpoint yet" in output.read_text()


def slow_save(rank):
    manager.write_checkpoint = lambda *args: time.sleep(60)


@pytest.mark.parametrize("first", [[signal.SIGINT], [signal.SIGTERM, signal.SIGINT]])
def test_a_second_interrupt_exits_immediately(byte_shards, tmp_path, first):
    flags = ["--data", byte_shards, "--max-steps", 100000, "--val-every", 0]
    [process] = start_run(*flags, "--out", "run", cwd=tmp_path, sabotage=slow_save)
    out = tmp_path / "run"
    assert wait_for(lambda: steps_done(out) >= 2)
    for number in first:
        os.kill(process.pid, number)
        time.sleep(0.3)
    assert process.is_alive()  # it saves
    os.kill(process.pid, signal.SIGINT)
    assert finish_run([process], timeout=10) == [130]


def reader_closes_after_step_3(rank):
    read, write = os.pipe()
    real = RunLogger.step

    def step(self, number, *figures):
        real(self, number, *figures)
        if number == 1:
            os.dup2(write, 1)
        if number == 3:
            os.close(read)

    RunLogger.step = step


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_state_is_saved_when_the_reader_of_the_output_closes_it(byte_shards, tmp_path, world_size):
    """As "| tee" does on Ctrl-C, which ends tee first."""
    flags = ["--data", byte_shards, "--max-steps", 8]
    run_to_the_end(*flags, "--out", "straight", cwd=tmp_path, world_size=world_size)
    ranks = start_run(*flags, "--out", "run", cwd=tmp_path, world_size=world_size, sabotage=reader_closes_after_step_3)
    assert finish_run(ranks) == [141] * world_size
    assert step_of(newest_checkpoint(tmp_path / "run")) == 5
    run_to_the_end(*flags, "--out", "run", "--resume", cwd=tmp_path, world_size=world_size)
    assert_same_run(tmp_path / "run", tmp_path / "straight")


def console_on_a_full_disk(rank):
    os.dup2(os.open("/dev/full", os.O_WRONLY), 1)


def test_a_console_that_cannot_be_written_does_not_end_the_run(byte_shards, tmp_path):
    flags = ["--data", byte_shards, "--max-steps", 4, "--out", "run"]
    run_to_the_end(*flags, cwd=tmp_path, sabotage=console_on_a_full_disk)
    assert steps_done(tmp_path / "run") == 4 and checkpoint_names(tmp_path / "run") == ["model_00004"]


def signalled_with_torchrun(rank):
    os.environ["TORCHELASTIC_RUN_ID"] = "x"
    signals.LAUNCHER = os.getppid()
    real = manager.write_checkpoint

    def save(*args):
        time.sleep(1)
        return real(*args)

    manager.write_checkpoint = save


def test_the_signal_that_torchrun_passes_on_is_no_second_interrupt(byte_shards, tmp_path):
    flags = ["--data", byte_shards, "--max-steps", 100000, "--val-every", 0]
    [process] = start_run(*flags, "--out", "run", cwd=tmp_path, sabotage=signalled_with_torchrun)
    assert wait_for(lambda: steps_done(tmp_path / "run") >= 2)
    for _ in range(2):
        os.kill(process.pid, signal.SIGINT)
        time.sleep(0.1)
    assert finish_run([process]) == [130]
    assert step_of(newest_checkpoint(tmp_path / "run")) == steps_done(tmp_path / "run")


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
