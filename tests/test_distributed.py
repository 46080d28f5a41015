"""Processes of a run: how they find each other, and what they must agree on."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from datetime import timedelta

import pytest
import torch
from helpers import ROOT, finish_run, free_port, in_threads, on_ranks, run_to_the_end, start_run, steps_done, wait_for
from torch.distributed import HashStore

import train_gpt2
from support.checkpoints import start
from support.cli import UserError
from support.runtime import distributed
from support.runtime.distributed import Distributed, agree_on_attempt, connect, report_lost_processes


def two_nodes(rank, store):
    """One of four ranks, two on each node."""
    return Distributed(rank, rank % 2, 4, torch.device("cpu"), store)


TORCHRUN = {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    "changed",
    [
        dict.fromkeys(["RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"]),
        {"WORLD_SIZE": "abc"},
        {"RANK": "2"},
    ],
    ids=str,
)
def test_an_environment_that_is_not_torchruns_is_an_error(monkeypatch, changed):
    for name, value in (TORCHRUN | changed).items():
        monkeypatch.setenv(name, value) if value is not None else monkeypatch.delenv(name, raising=False)
    with pytest.raises(UserError, match="Start with torchrun, or unset WORLD_SIZE"):
        Distributed.from_environment()


def test_the_environment_of_torchrun_is_read(monkeypatch):
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(distributed, "connect", lambda rank, world_size: None)
    assert Distributed.from_environment() == Distributed(rank=1, local_rank=1, world_size=2)
    monkeypatch.setenv("WORLD_SIZE", "1")  # a variable that was left over does not make a rank that writes nothing
    assert Distributed.from_environment() == Distributed(rank=0, local_rank=0, world_size=1)


def test_what_runs_once_is_known_to_all():
    """On each node, or on rank 0 alone."""
    store, calls = HashStore(), []

    def call(rank, once):
        return once(two_nodes(rank, store), once.__name__, lambda: calls.append(rank) or f"by {rank}")

    for once, callers in ((Distributed.once_per_node, [0, 0, 2, 2]), (Distributed.once, [0, 0, 0, 0])):
        assert in_threads(range(4), lambda rank, once=once: call(rank, once)) == {
            rank: f"by {caller}" for rank, caller in enumerate(callers)
        }
        assert sorted(calls) == sorted(set(callers))
        calls.clear()


def test_the_first_rank_of_a_node_goes_before_the_others():
    """And all of them leave together."""
    store, order, left = HashStore(), [], []

    def run(rank):
        with two_nodes(rank, store).local_rank_zero_first():
            order.append(rank)
            assert not left
        left.append(rank)

    in_threads([3, 2, 1, 0], run)
    assert order.index(0) < order.index(1) and order.index(2) < order.index(3) and set(left) == {0, 1, 2, 3}


def run_once(dist, function):
    return dist.once("x", function)


def run_on_each(dist, function):
    with dist.local_rank_zero_first():
        return function() if dist.rank == 2 else None


@pytest.mark.parametrize("run, failing", [(run_once, 0), (run_on_each, 2)])  # rank 2 is the first of the second node
def test_no_rank_waits_for_one_that_could_not_prepare(run, failing):
    store = HashStore()

    def fail():
        raise UserError("first problem.", "second problem.")

    errors = in_threads(range(4), lambda rank: run(two_nodes(rank, store), fail))
    assert errors.pop(failing).problems == ("first problem.", "second problem.")
    assert all(f"rank {failing} could not prepare" in str(error) for error in errors.values())


def test_ranks_agree_on_an_attempt_whatever_earlier_attempts_left():
    """The second and third find the nonces and answers of the earlier ones, whoever comes first."""
    store, shared = HashStore(), set()
    for ranks in ([0, 1, 2], [2, 0, 1], [0, 1, 2]):
        [attempt] = set(in_threads(ranks, lambda rank: agree_on_attempt(store, rank, 3)).values())
        shared.add(attempt)
    assert len(shared) == 3


RESTARTED = """
import os
from torch import distributed
from support.runtime.distributed import Distributed

dist = Distributed.from_environment()
store = dist.store
while isinstance(store, distributed.PrefixStore):
    store = store.underlying_store
first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
with dist.local_rank_zero_first():
    if first:
        store.set("exception_dump", (1).to_bytes(4, "little"))  # as ProcessGroupNCCL does after a timeout
        os._exit(1)
with open(f"{dist.rank}.txt", "w") as file:
    file.write(str(store.check(["exception_dump"])))
os._exit(0)
"""


@pytest.mark.slow
@pytest.mark.parametrize("rendezvous", ["--standalone", "--master_addr=localhost"])
def test_a_restart_does_not_find_the_timeout_before_it(tmp_path, rendezvous):
    """In torchrun's own store, which survives a restart: NCCL would abort the new processes 8 minutes later."""
    (tmp_path / "script.py").write_text(RESTARTED)
    port = [] if rendezvous == "--standalone" else [f"--master_port={free_port()}"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", rendezvous, *port, "--nproc_per_node=2"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run([*torchrun, "--max-restarts=1", "script.py"], cwd=tmp_path, env=environment, check=True, timeout=100)
    assert [(tmp_path / f"{rank}.txt").read_text() for rank in (0, 1)] == ["False", "False"]


def test_what_nccl_writes_after_a_timeout_is_named_after_the_start(monkeypatch):
    """By all ranks alike, and by a restarted run not as before."""
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda *args, **options: None)
    monkeypatch.setattr(Distributed, "all_reduce_min", lambda dist, value: value)
    times, names = ["20261125-100000", "20261125-100500"], []
    for now in times:
        monkeypatch.setattr(distributed.time, "strftime", lambda form, now=now: now)
        store = HashStore()
        for rank in (0, 1):
            monkeypatch.delenv("TORCH_FR_DUMP_TEMP_FILE", raising=False)
            Distributed(rank, rank, 2, store=store).init_process_group("log")
            names.append(os.environ.pop("TORCH_FR_DUMP_TEMP_FILE"))
            monkeypatch.setattr(distributed.time, "strftime", lambda form: "20991231-235959")  # its clock is wrong
    assert names == [f"log/nccl_trace_{time}_rank_" for time in times for _ in (0, 1)]


def fail_and_succeed(rank):
    dist, failure = Distributed(rank, rank, 2), None

    def fail():
        raise UserError("no folder.")

    try:
        dist.on_rank_zero(fail)
    except UserError as error:
        failure = str(error)
    return failure, dist.on_rank_zero(lambda: "result")


def test_a_failure_of_rank_zero_is_one_of_all(tmp_path):
    failed = "rank 0 failed. See its message."
    assert on_ranks(fail_and_succeed, 2, tmp_path) == {0: ("no folder.", "result"), 1: (failed, None)}


def no_checkpoint_on_node_1(rank):
    os.environ["LOCAL_RANK"] = "0"
    if rank == 1:
        real = start.gather_flags
        start.gather_flags = lambda *args: (real(*args)[0], None)


def test_nodes_that_see_different_checkpoints_do_not_train(byte_shards, tmp_path):
    flags = ["--data", byte_shards, "--out", "run", "--resume", "auto"]
    run_to_the_end(*flags, "--max-steps", 4, cwd=tmp_path)
    ranks = start_run(*flags, "--max-steps", 4, cwd=tmp_path, world_size=2, sabotage=no_checkpoint_on_node_1)
    assert finish_run(ranks) == [2, 2]
    expected = r"error: the nodes differ in the checkpoint: none on \S+ \(rank 1\), step 4 on \S+ \(rank 0\). All nodes"
    assert all(re.search(expected, (tmp_path / name).read_text()) for name in ("0.txt", "1.txt"))
    assert steps_done(tmp_path / "run") == 4


@pytest.mark.slow
def test_a_rank_whose_torchrun_is_dead_gives_up_and_says_so(monkeypatch):
    agent = {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_PORT": str(free_port())}
    for name, value in (TORCHRUN | agent).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(distributed, "TORCHRUN_TIMEOUT", timedelta(seconds=1))
    with pytest.raises(UserError, match="lost the connection to torchrun"), report_lost_processes():
        connect(1, 2)


def a_short_timeout_after_a_long_first_step(rank):
    train_gpt2.STEP_TIMEOUT = timedelta(seconds=3)
    real, steps = train_gpt2.train_step, []

    def step(*args):
        steps.append(rank)
        if len(steps) == 1 and rank == 1:
            time.sleep(4)  # as if it compiled
        return real(*args)

    train_gpt2.train_step = step


@pytest.mark.slow
@pytest.mark.parametrize(
    "parallel, sabotage, number, problem",
    [
        ("ddp", a_short_timeout_after_a_long_first_step, signal.SIGSTOP, "waited too long"),
        ("fsdp", None, signal.SIGKILL, "lost the connection"),
    ],
)
def test_a_lost_rank_ends_the_run(byte_shards, tmp_path, parallel, sabotage, number, problem):
    flags = ["--data", byte_shards, "--max-steps", 100000, "--val-every", 0, "--out", "run", "--parallel", parallel]
    ranks = start_run(*flags, cwd=tmp_path, world_size=2, sabotage=sabotage)
    assert wait_for(lambda: steps_done(tmp_path / "run") >= 3)
    os.kill(ranks[1].pid, number)
    try:
        assert finish_run(ranks[:1], timeout=60) == [2]
    finally:
        ranks[1].kill()
    assert re.search(rf"^error: rank 0 on \S+ {problem}", (tmp_path / "0.txt").read_text(), re.MULTILINE)


def test_other_errors_than_a_lost_connection_keep_their_traceback():
    with pytest.raises(RuntimeError, match="shapes"), report_lost_processes():
        raise RuntimeError("shapes do not match")
