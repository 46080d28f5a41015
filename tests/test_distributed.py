"""Processes of a run: how they find each other, and what they must agree on."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import threading
import time
from dataclasses import replace
from datetime import timedelta
from itertools import combinations

import numpy as np
import pytest
import torch
from helpers import (
    STEP,
    Rank,
    finish_run,
    free_port,
    in_threads,
    on_ranks,
    run_to_the_end,
    start_run,
    steps_done,
    wait_for,
)
from torch.distributed import HashStore
from training import checkpoint_names

from hellaswag import Example
from support.cli import UserError
from support.optim.layers import Dropout
from support.runtime import distributed
from support.runtime.distributed import ONE_PROCESS, Distributed, agree_on_attempt, connect, report_lost_processes

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
        Distributed.from_environment("log")
    monkeypatch.setenv("WORLD_SIZE", "1")  # a variable that was left over does not make a rank that writes nothing
    assert Distributed.from_environment("log") == ONE_PROCESS


def prepare_together(rank):
    """Returns, on two nodes of two ranks, who ran what, when, with what result, and who was told about a failure."""
    dist, calls = Distributed(rank, rank % 2, 4), []
    results = [dist.once(lambda: calls.append(rank) or f"by {rank}", per_node=per_node) for per_node in (False, True)]
    with dist.local_rank_zero_first():
        entered = time.monotonic()
    left, failures = time.monotonic(), []

    def fail_on(failing):
        if rank == failing:
            raise UserError("first problem.", "second problem.")

    def fail_first(failing):
        with dist.local_rank_zero_first():
            fail_on(failing)

    def fail_everywhere():
        with dist.failing_together():
            fail_on(rank)

    # 2 is the first rank of its node, and 3 is not
    by_one = [lambda: dist.once(lambda: fail_on(0)), lambda: fail_first(2), lambda: fail_first(3)]
    for attempt in (*by_one, fail_everywhere):
        try:
            attempt()
        except UserError as error:
            failures.append((error.problems, error.this_rank_only))
    try:
        dist.once(lambda: os.listdir("/nowhere"))
    except (UserError, OSError) as error:
        failures.append(str(error))
    return calls, results, (entered, left), failures


@pytest.mark.slow
def test_ranks_prepare_together(tmp_path):
    returned = on_ranks(prepare_together, 4, tmp_path)
    calls, results, times, failures = ([values[i] for _, values in sorted(returned.items())] for i in range(4))
    assert calls == [[0, 0], [], [2], []]
    assert results == [["by 0", node] for node in ("by 0", "by 0", "by 2", "by 2")]
    entered, left = zip(*times, strict=True)
    assert max(entered[0], entered[2]) < min(entered[1], entered[3]) and max(entered) < min(left)
    for i, failing in enumerate((0, 2, 3)):
        message = f"rank {failing} could not prepare the run. See its message."
        expected = dict.fromkeys(range(4), ((message,), False))
        expected[failing] = (("first problem.", "second problem."), True)
        assert {rank: failures[rank][i] for rank in range(4)} == expected
    assert {str(failed[3]) for failed in failures} == {str((("first problem.", "second problem."), False))}
    told = "rank 0 could not prepare the run. See its message."
    assert [failed[4] for failed in failures] == ["[Errno 2] No such file or directory: '/nowhere'", *3 * [told]]


def test_ranks_agree_on_an_attempt_whatever_earlier_attempts_left():
    """The second and third find the nonces and answers of the earlier ones, whoever comes first."""
    store, shared = HashStore(), set()
    for ranks in ([0, 1, 2], [2, 0, 1], [0, 1, 2]):
        [attempt] = set(in_threads(ranks, lambda rank: agree_on_attempt(store, rank, 3)).values())
        shared.add(attempt)
    assert len(shared) == 3


def test_what_nccl_writes_after_a_timeout_is_named_after_the_start(monkeypatch):
    """By all ranks alike, and by a restarted run not as before."""
    store, names = HashStore(), []
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda *args, **options: None)
    monkeypatch.setattr(torch.distributed, "rendezvous", lambda *args, **options: iter([(store, 0, 0)]))

    class Environment(dict):
        def setdefault(self, name, value):
            names.append((name, value))

    monkeypatch.setattr(distributed.os, "environ", Environment())
    for _ in range(2):
        in_threads([0, 1], lambda rank: connect(rank, 2, "log"))
    assert {name for name, _ in names} == {"TORCH_FR_DUMP_TEMP_FILE"}
    (first, same), (second, also) = (names[i][1] for i in (0, 1)), (names[i][1] for i in (2, 3))
    assert first == same != second == also and re.fullmatch(r"log/nccl_trace_[0-9a-f]{8}_rank_", first)


ALONE = Rank(env={"LOCAL_RANK": "0"})  # on a node of its own


def test_nodes_that_see_different_checkpoints_do_not_train(byte_shards, tmp_path):
    flags = ["--data", byte_shards, "--max-steps", 4, "--resume", "auto", "--out", "run"]
    run_to_the_end(*flags, cwd=tmp_path)
    elsewhere = replace(ALONE, flags=["--out", "other_disk/run"])
    ranks = start_run(*flags, cwd=tmp_path, world_size=2, rank={0: ALONE, 1: elsewhere})
    assert finish_run(ranks) == [2, 2]
    expected = r"error: the nodes differ in the checkpoint: none on \S+ \(rank 1\), model_00004 on \S+ \(rank 0\)"
    assert all(re.search(expected, (tmp_path / name).read_text()) for name in ("0.txt", "1.txt"))
    assert steps_done(tmp_path / "run") == 4


def test_no_node_waits_for_shards_that_another_one_cannot_make(byte_shards, tmp_path):
    """Rank 0 checks the folder and makes the shards of --text for all."""
    (tmp_path / "text.txt").write_text("some words " * 1000)
    run_to_the_end("--data", byte_shards, "--out", "run", "--max-steps", 1, cwd=tmp_path)
    ranks = start_run("--text", "text.txt", "--out", "run", cwd=tmp_path, world_size=2, rank=ALONE)
    assert finish_run(ranks) == [2, 2]
    assert "error: run already contains a run." in (tmp_path / "0.txt").read_text()
    assert "error: rank 0 could not prepare the run." in (tmp_path / "1.txt").read_text()


def nothing(*args):
    pass


def yes():
    return True


def one():
    return 1


def gloo():
    return "gloo"


ONE_GPU = {
    "torch.cuda.is_available": yes, "torch.cuda.device_count": one, "torch.cuda.set_device": nothing,
    "torch.cuda.get_arch_list": list,
    "support.runtime.distributed.backend": gloo,
}  # fmt: skip


def test_more_processes_than_gpus_is_an_error(byte_shards, tmp_path):
    ranks = start_run(
        "--data", byte_shards, "--device", "cuda", cwd=tmp_path, world_size=2, rank=Rank(replaced=ONE_GPU)
    )
    assert finish_run(ranks) == [2, 2]
    assert (tmp_path / "1.txt").read_text().startswith("error: this node has more processes than GPUs (1).")


def test_ranks_with_other_flags_do_not_wait_for_each_other(byte_shards, tmp_path):
    """With --minutes, a rank would measure its speed first, and tell the others."""
    other = {1: Rank(flags=["--minutes", 1])}
    ranks = start_run("--data", byte_shards, "--out", "run", cwd=tmp_path, world_size=2, rank=other)
    assert finish_run(ranks) == [2, 2]
    assert "error: the nodes differ in --minutes: 1.0 on" in (tmp_path / "0.txt").read_text()


DROPOUT = Dropout.forward


def write_dropout_mask(self, x):
    out = DROPOUT(self, x)
    with open(f"masks_{os.environ['RANK']}", "ab") as file:
        file.write((out == 0).numpy().tobytes())
    return out


def test_each_rank_and_each_step_has_its_own_dropout_masks(byte_shards, tmp_path):
    """Of two that have nothing to do with each other, half of the values are the same."""
    flags = ["--data", byte_shards, "--out", "run", "--max-steps", 2, "--val-every", 0, "--dropout", 0.5]
    written = Rank(replaced={"support.optim.layers.Dropout.forward": write_dropout_mask})
    run_to_the_end(*flags, cwd=tmp_path, world_size=2, rank=written)
    masks = [np.fromfile(tmp_path / f"masks_{rank}", np.uint8).reshape(2, -1) for rank in (0, 1)]  # by rank and step
    for one, other in combinations(np.concatenate(masks), 2):
        assert np.mean(one == other) == pytest.approx(0.5, abs=0.02)


def test_ranks_with_other_shards_do_not_train(byte_shards, tmp_path):
    shutil.copytree(byte_shards, tmp_path / "other")
    manifest = tmp_path / "other" / "manifest.json"
    first = json.loads(manifest.read_text())["shards"][1]["sha256"]
    manifest.write_text(manifest.read_text().replace(first, first[::-1]))
    other = {1: Rank(flags=["--data", "other"])}
    ranks = start_run("--data", byte_shards, "--out", "run", cwd=tmp_path, world_size=2, rank=other)
    assert finish_run(ranks) == [2, 2]
    assert "error: the nodes differ in the shards: " in (tmp_path / "0.txt").read_text()
    assert not (tmp_path / "run").exists()


def easy_items(*args):
    return [Example([1], [[2], [3], [4], [5]], 0)]


def hard_items(*args):
    return [Example([1], [[2], [3], [4], [5]], 3)]


def test_ranks_with_other_hellaswag_items_do_not_train(byte_shards, tmp_path):
    """Their answers would be mixed into one score."""
    ranks = {n: Rank(replaced={"hellaswag.load_examples": items}) for n, items in enumerate((easy_items, hard_items))}
    ranks = start_run("--data", byte_shards, "--out", "run", "--max-steps", 1, cwd=tmp_path, world_size=2, rank=ranks)
    assert finish_run(ranks) == [2, 2]
    assert "error: the nodes differ in the HellaSwag items: " in (tmp_path / "0.txt").read_text()


@pytest.mark.slow
def test_a_rank_whose_torchrun_is_dead_gives_up_and_says_so(monkeypatch):
    agent = {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_PORT": str(free_port())}
    for name, value in (TORCHRUN | agent).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(distributed, "TORCHRUN_TIMEOUT", timedelta(seconds=1))
    with pytest.raises(UserError, match="lost the connection to torchrun"), report_lost_processes():
        connect(1, 2, "log")


def wait_long(*args, **facts):
    time.sleep(4)


SHORT_TIMEOUT = {"support.runtime.distributed.STEP_TIMEOUT": timedelta(seconds=3)}
LONG_FIRST_STEP = {
    0: Rank(replaced=SHORT_TIMEOUT),
    1: Rank(replaced=SHORT_TIMEOUT, before={(STEP, 0): wait_long}),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "parallel, special, number, problem",
    [
        ("ddp", LONG_FIRST_STEP, signal.SIGSTOP, "waited too long"),
        ("fsdp", {}, signal.SIGKILL, "lost the connection"),
    ],
)
def test_a_lost_rank_ends_the_run(byte_shards, tmp_path, parallel, special, number, problem):
    flags = ["--data", byte_shards, "--max-steps", 100000, "--val-every", 0, "--out", "run", "--parallel", parallel]
    ranks = start_run(*flags, cwd=tmp_path, world_size=2, rank=special)
    assert wait_for(lambda: steps_done(tmp_path / "run") >= 3)
    os.kill(ranks[1].pid, number)
    try:
        assert finish_run(ranks[:1], timeout=60) == [2]
    finally:
        ranks[1].kill()
    assert re.search(rf"^error: rank 0 on \S+ {problem}", (tmp_path / "0.txt").read_text(), re.MULTILINE)


SHORT_WAITS = SHORT_TIMEOUT | {"support.checkpoints.manager.WAIT_SECONDS": 0.5}
SLOW_DISK = Rank(replaced=SHORT_WAITS, before={("support.checkpoints.manager.write_checkpoint", 0): wait_long})


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_the_others_wait_while_rank_zero_writes_to_a_slow_disk(byte_shards, tmp_path, parallel):
    """The second save waits for the first, for longer than a rank waits in a step."""
    flags = ["--data", byte_shards, "--max-steps", 6, "--val-every", 0, "--checkpoint-every", 2, "--parallel", parallel]
    run_to_the_end(*flags, "--out", "run", cwd=tmp_path, world_size=2, rank=SLOW_DISK)
    assert checkpoint_names(tmp_path / "run") == ["model_00002", "model_00004", "model_00006"]


def test_gpus_that_cannot_connect_are_noticed_within_minutes(monkeypatch):
    """NCCL then waits without a word: for ten minutes, as in a step, and not for two hours."""
    events, zeros = [], torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *size, device: zeros(*size))
    monkeypatch.setattr(distributed.torch_private, "set_collective_timeout", events.append)
    monkeypatch.setattr(distributed.distributed, "all_reduce", lambda tensor: events.append("all-reduce"))
    for name in ("reduce_scatter", "all_gather"):
        monkeypatch.setattr(distributed.torch_private, name, lambda *tensors, name=name: events.append(name))
    monkeypatch.setattr(distributed.devices, "synchronize", lambda device: events.append("synchronize"))
    Distributed(0, 0, 2, torch.device("cuda")).connect_gpus()
    collectives = ["all-reduce", "reduce_scatter", "all_gather", "synchronize"]
    assert events == [timedelta(minutes=10), *collectives, timedelta(hours=2)]


def fail_as_nccl_does(*args):
    """An error that nobody expects; and what waits for the other ranks when Python shuts down."""
    threading.Thread(target=time.sleep, args=(60,)).start()
    raise RuntimeError("something unexpected")


def test_a_rank_with_an_unexpected_error_ends_at_once(byte_shards, tmp_path):
    """torchrun then stops the others; here, they lose the connection."""
    flags = ["--data", byte_shards, "--max-steps", 5, "--out", "run"]
    ranks = start_run(*flags, cwd=tmp_path, world_size=2, rank={1: Rank(before={(STEP, 2): fail_as_nccl_does})})
    assert finish_run(ranks, timeout=30) == [2, 1]
    assert "RuntimeError: something unexpected\n" in (tmp_path / "1.txt").read_text()
    assert "lost the connection" in (tmp_path / "0.txt").read_text()


def test_a_store_that_does_not_answer_is_a_lost_process():
    with pytest.raises(UserError, match="waited too long for another process"), report_lost_processes():
        raise torch.distributed.DistStoreError("wait timeout after 1800000ms")


def test_other_errors_than_a_lost_connection_keep_their_traceback():
    with pytest.raises(RuntimeError, match="shapes"), report_lost_processes():
        raise RuntimeError("shapes do not match")
