"""The micro-batch: the largest one that fits into memory, on all ranks."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from helpers import finish_run, run_to_the_end, start_run
from training import FP32, ONE_PROCESS, assert_same_run, config_of, saved_bytes

from support.cli import UserError
from support.runtime import batch_size, devices
from support.runtime.fsdp import without_weights
from support.runtime.memory import Sizes, training_memory
from train_gpt2 import GPT, train

EIGHT_ROWS = ["--batch-size", 8, "--total-batch-size", 8 * 16]


def two_rows_fit_on_rank_1(rank):
    out_of_memory_beyond(4 if rank == 0 else 2)


def out_of_memory_beyond(rows):
    real, batch_size.PROBED = GPT.forward, ("cpu",)
    devices.free_and_total_memory = lambda device: (10**11, 10**11)

    def forward(self, idx, *args):
        if len(idx) > rows:
            raise torch.OutOfMemoryError("out of memory. Tried to allocate much.")
        return real(self, idx, *args)

    GPT.forward = forward


@pytest.fixture
def little_memory(monkeypatch):
    monkeypatch.setattr(GPT, "forward", GPT.forward)
    monkeypatch.setattr(batch_size, "PROBED", batch_size.PROBED)
    monkeypatch.setattr(devices, "free_and_total_memory", devices.free_and_total_memory)
    return out_of_memory_beyond


def test_the_largest_micro_batch_that_fits_is_found(byte_shards, tmp_path, little_memory, capsys):
    flags = ["--data", byte_shards, "--max-steps", 4]
    train(config_of(*flags, "--out", tmp_path / "four", "--batch-size", 4), ONE_PROCESS)
    little_memory(5)
    train(config_of(*flags, "--out", tmp_path / "sixteen", "--batch-size", 16), ONE_PROCESS)
    out = capsys.readouterr().out
    assert "a micro-batch of 16 rows does not fit into memory; using 4." in out
    assert out.count("256 tokens = 4 rows x 16 tokens x 1 process x 4 micro-steps") == 2
    assert_same_run(tmp_path / "sixteen", tmp_path / "four")  # the trial changed nothing
    little_memory(0)
    with pytest.raises(UserError, match="not even one row of 16 tokens fits into the memory of cpu"):
        train(config_of(*flags, "--out", tmp_path / "none"), ONE_PROCESS)
    assert not (tmp_path / "none").exists()


def test_the_trial_includes_the_optimizer_and_validation(tiny_model, monkeypatch):
    """The sizes that are tried, and what exists during each trial."""
    monkeypatch.setattr(batch_size, "PROBED", ("cpu",))
    monkeypatch.setattr(devices, "free_and_total_memory", lambda device: (10**11, 10**11))
    seen, allocated, spared, real, empty = [], [], [], torch.empty_like, torch.empty

    def empty_like(tensor, **options):
        if type(tensor) is torch.nn.Parameter and not options:  # others are in the loss and in PyTorch
            allocated.append(tensor.numel())
        return real(tensor, **options)

    def spy_on_empty(*size, **options):
        if options.get("dtype") == torch.uint8:
            spared.append(size[0])
        return empty(*size, **options)

    monkeypatch.setattr(torch, "empty_like", empty_like)
    monkeypatch.setattr(torch, "empty", spy_on_empty)
    before = {name: p.clone() for name, p in tiny_model.named_parameters()}
    forward = tiny_model.forward

    def spy(idx, targets=None):
        gradients = all(p.grad is not None for p in tiny_model.parameters())
        seen.append((len(idx), torch.is_grad_enabled(), gradients))
        if len(idx) > 2 and len(seen) % 2 == 0:  # the second pass, while gradients exist, is too much
            raise torch.OutOfMemoryError
        return forward(idx, targets)

    monkeypatch.setattr(tiny_model, "forward", spy)
    assert batch_size.largest_batch_size(config_of(*EIGHT_ROWS), tiny_model, ONE_PROCESS, FP32) == 2
    tried = [(B, True, with_gradients) for B in (8, 4, 2) for with_gradients in (False, True)]
    assert seen == [*tried, (2, False, True)]
    assert sum(allocated) == 3 * 2 * sum(p.numel() for p in tiny_model.parameters())  # two moments, three trials
    allocated.clear()
    two = replace(ONE_PROCESS, world_size=2)
    one_row = config_of("--batch-size", 1, "--total-batch-size", 2 * 16)
    batch_size.largest_batch_size(one_row, tiny_model, two, FP32)  # DDP's buckets are one more
    assert sum(allocated) == 3 * sum(p.numel() for p in tiny_model.parameters())
    assert spared == [2**29] * 3 + [2**31]  # bytes: several ranks will be connected by NCCL
    assert all(p.grad is None and torch.equal(p, before[name]) for name, p in tiny_model.named_parameters())


def test_what_clearly_cannot_fit_is_not_tried(tiny_model, monkeypatch, capsys):
    """Of 64, 32, ... 1 rows, with the memory of model state, and of what autograd saves of 8."""
    monkeypatch.setattr(batch_size, "PROBED", ("cpu",))
    needed = 16 * sum(p.numel() for p in tiny_model.parameters()) + saved_bytes(tiny_model, 8, 16)
    monkeypatch.setattr(devices, "free_and_total_memory", lambda device: (needed, 2 * 10**9))
    tried, real = [], batch_size._try_batch_size

    def spy(config, B, *args):
        tried.append(B)
        real(config, B, *args)

    monkeypatch.setattr(batch_size, "_try_batch_size", spy)
    config = config_of("--batch-size", 64, "--total-batch-size", 64 * 16)
    assert batch_size.largest_batch_size(config, tiny_model, ONE_PROCESS, FP32) == 8
    assert tried == [8]
    lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"memory  about \d\.\d of 1\.9 GiB with 64 rows", lines[0])
    assert "a micro-batch of 64 rows does not fit into memory; using 8" in lines[1]


@pytest.mark.slow
def test_ranks_take_the_smallest_micro_batch(byte_shards, tmp_path):
    flags = ["--data", byte_shards, "--max-steps", 3, "--val-every", 0]
    run_to_the_end(
        *flags, "--out", "run", "--batch-size", 8, cwd=tmp_path, world_size=2, sabotage=two_rows_fit_on_rank_1
    )
    assert "= 2 rows x 16 tokens x 2 processes x 4 micro-steps" in (tmp_path / "0.txt").read_text()


def no_memory_on_rank_1(rank):
    out_of_memory_beyond(100 if rank == 0 else 0)


def test_a_failure_of_one_rank_before_the_first_step_is_reported(byte_shards, tmp_path):
    flags = ["--data", byte_shards, "--out", "run"]
    ranks = start_run(*flags, cwd=tmp_path, world_size=2, sabotage=no_memory_on_rank_1)
    assert finish_run(ranks) == [2, 2]
    assert (tmp_path / "1.txt").read_text().startswith("error: not even one row of 16 tokens fits into the memory")
    assert "error: rank 1 could not prepare the run." in (tmp_path / "0.txt").read_text()
    assert not (tmp_path / "run").exists()


def test_a_sharded_model_is_not_tried_but_estimated(tiny_model, monkeypatch, capsys):
    """A trial would take all ranks. Of 4, with the memory that 8 rows take by the formulas, and 2 GiB for NCCL."""
    monkeypatch.setattr(batch_size, "PROBED", ("cpu",))
    monkeypatch.setattr(batch_size, "_try_batch_size", lambda *args: pytest.fail("tried"))
    total, four = 2 * 10**9, replace(ONE_PROCESS, world_size=4)
    config = config_of("--batch-size", 64, "--total-batch-size", 4 * 64 * 16, "--parallel", "fsdp", "--no-compile")
    needed = training_memory(config, Sizes.of(tiny_model), 8, 4, total).total + 2 * 2**30
    monkeypatch.setattr(devices, "free_and_total_memory", lambda device: (needed, total))
    model = without_weights(tiny_model)
    assert batch_size.largest_batch_size(config, model, four, FP32) == 8
    with pytest.raises(UserError, match="not even one row"):  # Muon's all-to-all takes more
        batch_size.largest_batch_size(replace(config, optimizer="muon"), model, four, FP32)
    assert "does not fit into memory; using 8" in capsys.readouterr().out
