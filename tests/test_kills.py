"""Kills at random moments: the run that is resumed after them is the one that was never killed, bit for bit."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest
from helpers import TINY_FLAGS, finish_run, run_to_the_end, start_run, start_torchrun, steps_done, wait_for
from torch.distributed import TCPStore
from training import assert_same_run

from support.checkpoints.directory import newest_checkpoint
from support.checkpoints.history import read_starts

SMALL = ["--n-layer", 1, "--batch-size", 16, "--shuffle"]  # one micro-batch per step with one process


def log_changed(out):
    """When the log was last written, in nanoseconds."""
    try:
        return (out / "log.txt").stat().st_ctime_ns
    except FileNotFoundError:
        return None


def wait_for_the_moment(kind, out, process, rng):
    """Returns at a random moment of a process that was just started: at its start, after some steps, or inside a save."""
    before = log_changed(out)  # a resumed run writes the log again

    def alive_until(condition):
        return wait_for(lambda: condition() or not process.is_alive(), every=0.0005)

    if kind == "start":
        wait_for(lambda: log_changed(out) != before, rng.uniform(0, 0.2), every=0.0005)
        return
    alive_until(lambda: log_changed(out) != before)
    if kind == "step":
        goal = steps_done(out) + rng.randint(1, 15)
        alive_until(lambda: steps_done(out) >= goal)
        time.sleep(rng.uniform(0, 0.02))
    else:
        alive_until(lambda: any(out.glob(".model_*.partial")))
        time.sleep(rng.uniform(0, 0.01))


@pytest.mark.slow
@pytest.mark.parametrize("world_size, kills", [(1, 12), (2, 4)])
def test_a_run_killed_at_random_moments_is_the_run_that_was_not(byte_shards, tmp_path, world_size, kills):
    flags = [*SMALL, "--data", byte_shards, "--max-steps", 8 * kills, "--val-every", 10, "--checkpoint-every", 4]
    run_to_the_end(*flags, "--out", "straight", cwd=tmp_path, world_size=world_size)
    rng, out, half_written = random.Random(world_size), tmp_path / "killed", 0
    for i in range(kills):
        ranks = start_run(*flags, "--out", "killed", "--resume", "auto", cwd=tmp_path, world_size=world_size)
        wait_for_the_moment(("step", "save", "start", "save")[i % 4], out, ranks[0], rng)
        assert ranks[0].is_alive(), f"ended before kill {i}: {(tmp_path / '0.txt').read_text()[-2000:]}"
        for process in rng.sample(ranks, world_size):
            process.kill()
        for process in ranks:
            process.join()
        half_written += any(out.glob(".model_*.partial"))
    assert half_written  # some were while a checkpoint was written
    run_to_the_end(*flags, "--out", "killed", "--resume", cwd=tmp_path, world_size=world_size)
    assert_same_run(out, tmp_path / "straight")
    assert not any(out.glob(".model_*"))


def ranks_of(torchrun, out):
    """The process ids of rank 0, which has locked the folder, and rank 1."""
    children = [int(pid) for pid in Path(f"/proc/{torchrun.pid}/task/{torchrun.pid}/children").read_text().split()]
    [first] = [int(word) for word in (out / ".gpt2.lock").read_text().split() if word.isdigit()]
    return first, sum(children) - first


def store_of(rank):
    """torchrun's store, which survives a restart."""
    environment = dict(entry.split("=", 1) for entry in Path(f"/proc/{rank}/environ").read_text().split("\0") if entry)
    return TCPStore("localhost", int(environment["MASTER_PORT"]), is_master=False)


@pytest.mark.slow
def test_torchrun_restarts_a_run_and_its_last_lines_say_how_to_go_on(byte_shards, tmp_path):
    """A killed rank 1 leads to a restart, which resumes, and a killed rank 0 to the end."""
    flags = ["--data", byte_shards, "--shuffle", "--max-steps", 100000, "--checkpoint-every", 5, "--resume", "auto"]
    flags += ["--val-every", 0, "--out", "run"]
    options, output, out = "--standalone --nproc_per_node=2 --max-restarts=1", tmp_path / "0.txt", tmp_path / "run"
    torchrun = start_torchrun(options, *TINY_FLAGS, *flags, cwd=tmp_path, output=output)
    assert wait_for(lambda: steps_done(out) >= 12, timeout=120)
    first, second = ranks_of(torchrun, out)
    store = store_of(first)
    store.set("exception_dump", "1")  # as NCCL does after a timeout; it would abort the next processes 8 minutes later
    os.kill(second, signal.SIGKILL)
    assert wait_for(lambda: len(read_starts(out)) == 2, timeout=120)
    goal = steps_done(out) + 8
    assert wait_for(lambda: steps_done(out) >= goal, timeout=60)
    assert not store.check(["exception_dump"])
    first, _ = ranks_of(torchrun, out)
    os.kill(first, signal.SIGKILL)
    assert finish_run([torchrun]) == [1]
    lines = output.read_text().splitlines()
    name, command = (
        newest_checkpoint(out).name,
        "torchrun --standalone --nproc_per_node=2 --max-restarts=1 train_gpt2.py --resume auto --out run",
    )
    hint = f' of this run. See the messages of all processes. The newest checkpoint is run/{name}. Continue with "{command}".'
    assert sum(line.startswith("error: rank 1") and line.endswith(hint) for line in lines) == 1
    assert any(line.endswith(hint) for line in lines[-20:])  # on the screen, under torchrun's own report
    starts = [start["first_step"] for start in read_starts(out)]
    assert starts[0] == 0 < starts[1] and starts[1] % 5 == 0
    steps = [int(line.split()[0]) for line in (out / "log.txt").read_text().splitlines() if " train " in line]
    assert steps == list(range(len(steps)))  # none twice
