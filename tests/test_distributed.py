"""Processes of a run: how they find each other, and what they must agree on."""

from __future__ import annotations

import os
import re
import signal
import socket
import threading
import time
from datetime import timedelta

import pytest
import torch
from helpers import finish_run, run_to_the_end, start_run, steps_done, wait_for
from torch.distributed import HashStore

import train_gpt2
from support.checkpoints import start
from support.cli import UserError
from support.runtime import distributed
from support.runtime.distributed import Distributed, agree_on_attempt, connect, read_environment, report_lost_processes


def in_threads(world_size, function):
    """Calls `function(rank)` for all ranks at once and returns the results by rank; an exception is a result, too."""
    results = {}

    def call(rank):
        try:
            results[rank] = function(rank)
        except UserError as error:
            results[rank] = error

    threads = [threading.Thread(target=call, args=(rank,), daemon=True) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=20)  # one that waits forever has no result
    return results


def a_node(rank, world_size, store):
    return Distributed(rank, rank, world_size, torch.device("cpu"), store)


TORCHRUN = {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"RANK": None, "LOCAL_RANK": None, "MASTER_ADDR": None, "MASTER_PORT": None}, "RANK, LOCAL_RANK, MASTER_PORT, MASTER_ADDR: not set"),
        ({"WORLD_SIZE": "abc"}, "WORLD_SIZE is 'abc' in the environment, but WORLD_SIZE: not set, or not valid"),
        ({"WORLD_SIZE": "0"}, "RANK is 1, and LOCAL_RANK 1"),
        ({"RANK": "2"}, "RANK is 2, and LOCAL_RANK 1"),
        ({"MASTER_PORT": "-1"}, "MASTER_PORT: not set, or not valid. Start with torchrun, or unset WORLD_SIZE"),
    ],
)  # fmt: skip
def test_an_environment_that_is_not_torchruns_is_named(monkeypatch, changed, message):
    for name, value in (TORCHRUN | changed).items():
        monkeypatch.setenv(name, value) if value is not None else monkeypatch.delenv(name, raising=False)
    with pytest.raises(UserError, match=message):
        Distributed.from_environment()


def test_the_environment_of_torchrun_is_read(monkeypatch):
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    assert read_environment() == (1, 1, 2)
    monkeypatch.setenv("WORLD_SIZE", "1")  # a variable that was left over does not make a rank that writes nothing
    assert read_environment() == (0, 0, 1)


@pytest.mark.parametrize("value", ["found", None])
def test_what_runs_once_per_node_is_known_to_all_its_ranks(value):
    store, calls = HashStore(), []

    def find():
        calls.append(1)
        return value

    results = in_threads(3, lambda rank: a_node(rank, 3, store).once_per_node("x", find))
    assert results == {0: value, 1: value, 2: value} and len(calls) == 1


def test_a_failure_of_what_runs_once_per_node_is_one_of_all_its_ranks():
    store = HashStore()

    def fail():
        raise UserError("first problem.", "second problem.")

    results = in_threads(2, lambda rank: a_node(rank, 2, store).once_per_node("x", fail))
    assert results.keys() == {0, 1}
    assert all(error.problems == ("first problem.", "second problem.") for error in results.values())


def test_the_first_rank_of_a_node_goes_before_the_others():
    """Of two nodes with two ranks each, and all of them leave together."""
    store, order, left = HashStore(), [], []

    def run(rank):
        with Distributed(rank, rank % 2, 4, torch.device("cpu"), store).local_rank_zero_first():
            order.append(rank)
            assert not left
        left.append(rank)

    in_threads(4, run)
    assert order.index(0) < order.index(1) and order.index(2) < order.index(3) and set(left) == {0, 1, 2, 3}


def test_no_rank_waits_for_one_that_could_not_prepare():
    """Here rank 2, the first of the second node."""
    store = HashStore()

    def run(rank):
        with Distributed(rank, rank % 2, 4, torch.device("cpu"), store).local_rank_zero_first():
            if rank == 2:
                raise UserError("no shards.")

    errors = in_threads(4, run)
    assert errors[2].problems == ("no shards.",)
    assert all("rank 2" in errors[rank].problems[0] for rank in (0, 1, 3))


def test_ranks_agree_on_an_attempt_whatever_earlier_attempts_left():
    store, found = HashStore(), {}
    for attempt in range(3):  # the second and third find the words and answers of the earlier ones
        ranks = [2, 0, 1] if attempt % 2 else [0, 1, 2]
        threads = [
            threading.Thread(target=lambda r=r, a=attempt: found.__setitem__((a, r), agree_on_attempt(store, r, 3)))
            for r in ranks
        ]
        for thread in threads:
            thread.start()
            time.sleep(0.1)
        for thread in threads:
            thread.join(timeout=20)
    shared = [{found[attempt, rank] for rank in range(3)} for attempt in range(3)]
    assert [len(words) for words in shared] == [1, 1, 1] and len(set.union(*shared)) == 3


def no_checkpoint_on_rank_1(rank):
    if rank == 1:
        real = start.gather_flags
        start.gather_flags = lambda *args: (real(*args)[0], None)


def test_nodes_that_see_different_checkpoints_do_not_train(byte_shards, tmp_path):
    flags = ["--data", byte_shards, "--max-steps", 4, "--out", "run", "--resume", "auto"]
    run_to_the_end(*flags, cwd=tmp_path)
    codes = finish_run(start_run(*flags[:2], "--max-steps", 6, *flags[4:], cwd=tmp_path, world_size=2, sabotage=no_checkpoint_on_rank_1))  # fmt: skip
    assert codes == [2, 2]
    expected = r"error: the nodes differ in the checkpoint: none on \S+ \(rank 1\), step 4 on \S+ \(rank 0\). All nodes"
    assert re.search(expected, (tmp_path / "0.txt").read_text())
    assert (tmp_path / "1.txt").read_text() == ""


def test_a_rank_whose_torchrun_is_dead_gives_up_and_says_so(monkeypatch):
    with socket.socket() as unused:
        unused.bind(("localhost", 0))
        address = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(unused.getsockname()[1])}
    for name, value in (address | {"TORCHELASTIC_USE_AGENT_STORE": "True"}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(distributed, "TORCHRUN_TIMEOUT", timedelta(seconds=1))
    began = time.monotonic()
    with (
        pytest.raises(UserError, match="lost the connection to torchrun or to another process"),
        report_lost_processes(),
    ):
        connect(1, 2)
    assert time.monotonic() - began < 30


def a_short_timeout_after_a_long_first_step(rank):
    train_gpt2.STEP_TIMEOUT = timedelta(seconds=3)
    real, steps = train_gpt2.train_step, []

    def step(*args):
        steps.append(rank)
        if len(steps) == 1 and rank == 1:
            time.sleep(4)  # as if it compiled
        return real(*args)

    train_gpt2.train_step = step


@pytest.mark.parametrize(
    "parallel, number, problem",
    [("ddp", signal.SIGSTOP, "waited too long"), ("fsdp", signal.SIGKILL, "lost the connection")],
)
def test_a_lost_rank_ends_the_run(byte_shards, tmp_path, parallel, number, problem):
    flags = ["--data", byte_shards, "--max-steps", 100000, "--val-every", 0, "--out", "run", "--parallel", parallel]
    ranks = start_run(*flags, cwd=tmp_path, world_size=2, sabotage=a_short_timeout_after_a_long_first_step)
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
