"""The micro-batch: the largest one that fits into memory, on all ranks."""

from __future__ import annotations

import gc
import re
from dataclasses import replace

import pytest
import torch
from helpers import finish_run, run_to_the_end, start_run
from training import FP32, ONE_PROCESS, assert_same_run, config_of, saved_bytes

from support.cli import UserError
from support.runtime import batch_size, devices
from support.runtime.fsdp import without_weights
from support.runtime.machine import Machine
from support.runtime.memory import Sizes, training_memory
from train_gpt2 import GPT, train


def largest(config, model, dist):
    machine = Machine.find(config, dist.device, dist.world_size)
    return batch_size.largest_batch_size(config, machine, model, dist, FP32)


def two_rows_fit_on_rank_1(rank):
    out_of_memory_beyond(4 if rank == 0 else 2)


def no_memory_on_rank_1(rank):
    out_of_memory_beyond(100 if rank == 0 else 0)


def out_of_memory_beyond(rows):
    real, batch_size.PROBED = GPT.forward, ("cpu",)
    devices.free_and_total_memory = lambda device: (10**11, 10**11)

    def forward(self, idx, *args):
        if len(idx) > rows:
            raise torch.OutOfMemoryError("out of memory. Tried to allocate much.")
        return real(self, idx, *args)

    GPT.forward = forward


@pytest.fixture
def set_memory(monkeypatch):
    """Sets what is free of a device's memory, and all of it; micro-batches are tried out on a CPU as on a GPU."""
    monkeypatch.setattr(GPT, "forward", GPT.forward)  # as `out_of_memory_beyond` changes it
    monkeypatch.setattr(batch_size, "PROBED", ("cpu",))
    monkeypatch.setattr(devices, "free_and_total_memory", lambda device: (10**11, 10**11))
    return lambda *memory: monkeypatch.setattr(devices, "free_and_total_memory", lambda device: memory)


def test_the_largest_micro_batch_that_fits_is_found(byte_shards, tmp_path, set_memory, capsys):
    flags = ["--data", byte_shards, "--max-steps", 4]
    train(config_of(*flags, "--out", tmp_path / "four", "--batch-size", 4), ONE_PROCESS)
    out_of_memory_beyond(5)
    train(config_of(*flags, "--out", tmp_path / "sixteen", "--batch-size", 16), ONE_PROCESS)
    out = capsys.readouterr().out
    assert "a micro-batch of 16 rows does not fit into memory; using 4." in out
    assert out.count("256 tokens = 4 rows x 16 tokens x 1 process x 4 micro-steps") == 2
    assert_same_run(tmp_path / "sixteen", tmp_path / "four")  # the trial changed nothing
    out_of_memory_beyond(0)
    with pytest.raises(UserError, match="not even one row of 16 tokens fits into the memory of cpu"):
        train(config_of(*flags, "--out", tmp_path / "none"), ONE_PROCESS)
    assert not (tmp_path / "none").exists()


def bytes_of_tensors():
    tensors = (o for o in gc.get_objects() if type(o) in (torch.Tensor, torch.nn.Parameter))
    storages = (tensor.untyped_storage() for tensor in tensors if tensor.device.type == "cpu")
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@pytest.mark.parametrize(
    "ranks, spare, copies",
    [(1, 2**29, 3), (2, 2**31, 4)],  # AdamW's moments and the gradients; DDP's buckets, and more is spared for NCCL
)
def test_a_trial_takes_what_a_run_does(tiny_model, set_memory, monkeypatch, ranks, spare, copies):
    """Of 8, 4 and 2 rows: two passes with gradients, the second while those of the first exist, and a validation."""
    seen, taken, forward = [], [], tiny_model.forward
    before = {name: p.detach().clone() for name, p in tiny_model.named_parameters()}
    parameter_bytes = sum(p.nbytes for p in before.values())
    gc.collect()
    at_first = bytes_of_tensors()

    def spy(idx, targets):
        has_gradients = all(p.grad is not None for p in tiny_model.parameters())
        seen.append((len(idx), torch.is_grad_enabled(), has_gradients))
        if has_gradients:
            taken.append(bytes_of_tensors() - at_first)
        if len(idx) > 2 and has_gradients:
            raise torch.OutOfMemoryError
        return forward(idx, targets)

    monkeypatch.setattr(tiny_model, "forward", spy)
    config = config_of("--batch-size", 8, "--total-batch-size", 8 * 16 * ranks)
    assert largest(config, tiny_model, replace(ONE_PROCESS, world_size=ranks)) == 2
    tried = [(B, True, has_gradients) for B in (8, 4, 2) for has_gradients in (False, True)]
    assert seen == [*tried, (2, False, True)]
    assert taken == [pytest.approx(spare + copies * parameter_bytes, abs=parameter_bytes / 4)] * 4
    assert all(p.grad is None and torch.equal(p, before[name]) for name, p in tiny_model.named_parameters())


def test_what_clearly_cannot_fit_is_not_tried(tiny_model, set_memory, monkeypatch, capsys):
    """Of 64, 32, ... 1 rows, with the memory of model state, and of what autograd saves of 8."""
    set_memory(16 * sum(p.numel() for p in tiny_model.parameters()) + saved_bytes(tiny_model, 8, 16), 2 * 10**9)
    tried, forward = set(), tiny_model.forward
    monkeypatch.setattr(tiny_model, "forward", lambda idx, targets: tried.add(len(idx)) or forward(idx, targets))
    config = config_of("--batch-size", 64, "--total-batch-size", 64 * 16)
    assert largest(config, tiny_model, ONE_PROCESS) == 8
    assert tried == {8}
    lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"memory  about \d\.\d of 1\.9 GiB with 64 rows", lines[0])
    assert "a micro-batch of 64 rows does not fit into memory; using 8" in lines[1]


def test_a_sharded_model_is_not_tried_but_estimated(tiny_model, set_memory, capsys):
    """A trial would take all ranks. Of 4, with the memory that 8 rows take by the formulas, and 2 GiB for NCCL."""
    total, four = 2 * 10**9, replace(ONE_PROCESS, world_size=4)
    config = config_of("--batch-size", 64, "--total-batch-size", 4 * 64 * 16, "--parallel", "fsdp", "--no-compile")
    set_memory(
        training_memory(config, Sizes.of(tiny_model), 8, 4, total, torch.float32, False).total + 2 * 2**30, total
    )
    model = without_weights(tiny_model)  # on the meta device, where a trial would fail
    assert largest(config, model, four) == 8
    with pytest.raises(UserError, match="not even one row"):  # Muon's all-to-all takes more
        largest(replace(config, optimizer="muon"), model, four)
    assert "does not fit into memory; using 8" in capsys.readouterr().out


@pytest.mark.slow
def test_ranks_take_the_smallest_micro_batch(byte_shards, tmp_path):
    flags = ["--data", byte_shards, "--max-steps", 1, "--val-every", 0, "--batch-size", 8, "--out", "run"]
    run_to_the_end(*flags, cwd=tmp_path, world_size=2, sabotage=two_rows_fit_on_rank_1)
    assert "= 2 rows x 16 tokens x 2 processes x 4 micro-steps" in (tmp_path / "0.txt").read_text()


def test_a_failure_of_one_rank_before_the_first_step_is_reported(byte_shards, tmp_path):
    flags = ["--data", byte_shards, "--out", "run"]
    ranks = start_run(*flags, cwd=tmp_path, world_size=2, sabotage=no_memory_on_rank_1)
    assert finish_run(ranks) == [2, 2]
    assert (tmp_path / "1.txt").read_text().startswith("error: not even one row of 16 tokens fits into the memory")
    assert "error: rank 1 could not prepare the run." in (tmp_path / "0.txt").read_text()
    assert not (tmp_path / "run").exists()
