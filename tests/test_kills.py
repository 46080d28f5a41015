"""Kills at random moments: the run that is resumed after them is the one that was never killed, bit by bit."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from helpers import ROOT, TINY_FLAGS, finish_run, run_to_the_end, start_run, steps_done, stop_before, wait_for
from training import assert_same_run

from support import files
from support.checkpoints.directory import newest_checkpoint, step_of
from support.cli import UserError

SMALL = ["--n-layer", 1, "--batch-size", 16, "--shuffle"]  # one micro-batch per step with one process


def log_changed(out):
    """When the log was last written, in nanoseconds."""
    try:
        return (out / "log.txt").stat().st_ctime_ns
    except FileNotFoundError:
        return None


def wait_for_the_moment(kind, out, process, rng):
    """Returns at a random moment of a process that was just started: at its start, after some steps, or inside a save."""
    before = log_changed(out)  # a resumed run writes the log anew

    def alive_until(condition):
        return wait_for(lambda: condition() or not process.is_alive())

    if kind == "start":
        wait_for(lambda: log_changed(out) != before, rng.uniform(0, 0.2))
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


def start_torchrun(*flags, cwd, restarts=0):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command = [*launcher, f"--max-restarts={restarts}", str(ROOT / "train_gpt2.py"), *TINY_FLAGS, *map(str, flags)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with open(cwd / "torchrun.txt", "w") as output:
        return subprocess.Popen(command, cwd=cwd, env=environment, stdout=output, stderr=subprocess.STDOUT)


@pytest.mark.slow
def test_torchrun_restarts_and_stops_a_run(byte_shards, tmp_path):
    """A killed worker leads to a restart that resumes; SIGTERM to torchrun then saves the current step."""
    flags = ["--data", byte_shards, "--shuffle", "--max-steps", 2000, "--checkpoint-every", 5, "--resume", "auto"]
    flags += ["--parallel", "fsdp", "--val-every", 0]
    process, out = start_torchrun(*flags, "--out", "run", cwd=tmp_path, restarts=1), tmp_path / "run"
    assert wait_for(lambda: steps_done(out) >= 12, timeout=120)
    [pid] = [word for word in (out / ".lock").read_text().split() if word.isdigit()]
    os.kill(int(pid), signal.SIGKILL)
    old = log_changed(out)
    assert wait_for(lambda: log_changed(out) != old, timeout=120)
    goal = steps_done(out) + 8
    assert wait_for(lambda: steps_done(out) >= goal, timeout=60)
    process.send_signal(signal.SIGTERM)
    output = tmp_path / "torchrun.txt"
    assert process.wait(60) == 1, output.read_text()  # torchrun's own
    step = step_of(newest_checkpoint(out))
    assert steps_done(out) == step and f"step {step:5d} | stopped. The newest checkpoint is" in output.read_text()
    # the same steps without a kill or a signal, and none of them twice
    for name in ("run", "straight"):
        stop = partial(stop_before, step + 5)
        ranks = start_run(*flags, "--out", name, cwd=tmp_path, world_size=2, sabotage=stop)
        assert finish_run(ranks) == [143, 143]
    assert_same_run(out, tmp_path / "straight")


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_the_last_lines_after_a_lost_process_say_how_to_go_on(byte_shards, tmp_path, rank):
    """Under torchrun's own report."""
    flags = ["--data", byte_shards, "--max-steps", 100000, "--checkpoint-every", 5, "--val-every", 0, "--out", "run"]
    process, out = start_torchrun(*flags, cwd=tmp_path), tmp_path / "run"
    assert wait_for(lambda: newest_checkpoint(out), timeout=120)
    ranks = [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
    [first] = [int(word) for word in (out / ".lock").read_text().split() if word.isdigit()]
    os.kill(first if rank == 0 else sum(ranks) - first, signal.SIGKILL)
    assert process.wait(60) == 1
    lines = (tmp_path / "torchrun.txt").read_text().splitlines()
    name, command = (
        newest_checkpoint(out).name,
        "torchrun --standalone --nproc_per_node=2 --max-restarts=0 train_gpt2.py --resume auto --out run",
    )
    hint = f' of this run. See the messages of all processes. The newest checkpoint is run/{name}. Continue with "{command}".'
    assert sum(line.startswith("error: rank") and line.endswith(hint) for line in lines) == 1
    assert any(line.endswith(hint) for line in lines[-20:])  # on the screen


@pytest.mark.slow
def test_a_run_whose_torchrun_was_killed_can_be_resumed_at_once(byte_shards, tmp_path):
    flags = ["--data", byte_shards, "--shuffle", "--max-steps", 100000, "--checkpoint-every", 1000, "--out", "run"]
    process, out = start_torchrun(*flags, cwd=tmp_path), tmp_path / "run"
    assert wait_for(lambda: steps_done(out) >= 3, timeout=120)
    process.kill()
    assert wait_for(lambda: newest_checkpoint(out), timeout=20)
    assert wait_for(lambda: is_unlocked(out), timeout=20)
    assert steps_done(out) == step_of(newest_checkpoint(out))


def is_unlocked(out):
    try:
        files.lock_folder(out, "--out").close()
    except UserError:
        return False
    return True
