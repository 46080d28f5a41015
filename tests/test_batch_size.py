"""The micro-batch: the largest one that fits into memory, on all ranks, found by trying."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from helpers import TINY_MODEL_FLAGS, Rank, finish_run, losses, run_to_the_end, start_run
from training import FP32, NEW_RUN, ONE_PROCESS, assert_same_run, config_of, configure, train, trained

import train_gpt2
from support.checkpoints.history import read_starts
from support.cli import UserError
from support.runtime import batch_size, devices
from support.runtime.machine import Machine
from support.runtime.memory import Layout, Sizes, training_memory
from train_gpt2 import GPT


class OutOfMemoryBeyond:
    """A forward pass of GPT that has memory for so many rows."""

    forward = GPT.forward

    def __init__(self, rows: int):
        self.rows = rows

    def __get__(self, model: GPT, of: type) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
        return partial(self, model)

    def __call__(self, model: GPT, idx: torch.Tensor, *args: object) -> tuple[torch.Tensor, torch.Tensor]:
        if len(idx) > self.rows:
            raise torch.OutOfMemoryError("out of memory. Tried to allocate much.")
        return OutOfMemoryBeyond.forward(model, idx, *args)


def rank_with_memory_for(rows: int) -> Rank:
    """A CPU that is a device on which micro-batches are tried."""
    tried = {"support.runtime.batch_size.TRIED": ("cpu",)}
    return Rank(replaced=tried | {"train_gpt2.GPT.forward": OutOfMemoryBeyond(rows)})


@pytest.fixture
def tried(monkeypatch):
    """Micro-batches are tried on the CPU."""
    monkeypatch.setattr(batch_size, "TRIED", ("cpu",))


@pytest.mark.slow
def test_the_largest_micro_batch_that_fits_is_found(byte_shards, tmp_path, tried, monkeypatch, capsys):
    flags = ["--data", byte_shards, "--max-steps", 4, "--dropout", 0.1]
    trained(tmp_path / "four", *flags, "--batch-size", 4)
    monkeypatch.setattr(GPT, "forward", OutOfMemoryBeyond(5))
    trained(tmp_path / "sixteen", *flags, "--batch-size", 16)
    out = capsys.readouterr().out
    assert "a micro-batch of 16 rows does not fit into memory; using 4." in out
    assert out.count("256 tokens = 4 rows x 16 tokens x 1 process x 4 micro-steps") == 2
    assert_same_run(tmp_path / "sixteen", tmp_path / "four")  # the trial changed nothing
    assert read_starts(tmp_path / "sixteen")[0]["machine"]["batch_size"] == 4
    monkeypatch.setattr(GPT, "forward", OutOfMemoryBeyond(0))
    with pytest.raises(UserError, match="not even one row of 16 tokens fits into the memory of cpu"):
        train(config_of(*flags, "--out", tmp_path / "none"), ONE_PROCESS, NEW_RUN)
    assert not (tmp_path / "none").exists()


def bytes_of_tensors():
    tensors = (o for o in gc.get_objects() if type(o) in (torch.Tensor, torch.nn.Parameter))
    storages = (tensor.untyped_storage() for tensor in tensors if tensor.device.type == "cpu")
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def largest(config, model):
    most, layout = Machine.find(config, ONE_PROCESS.device, 1).batch_size, layout_of(config)
    make_model = lambda: model  # noqa: E731
    return batch_size.try_batch_sizes(config, most, Sizes.of(model), layout, ONE_PROCESS, FP32, make_model)


def layout_of(config):
    return Layout(config.total_batch_size, torch.float32)


@pytest.mark.parametrize("micro_steps", [1, 2])
def test_a_trial_takes_what_a_run_does(tiny_model, tried, monkeypatch, micro_steps):
    """Of 8, 4 and 2 rows: gradients exist next to activations from the second micro-step on, AdamW's moments always."""
    seen, taken, forward = [], [], tiny_model.forward
    before = {name: p.detach().clone() for name, p in tiny_model.named_parameters()}
    parameter_bytes = sum(p.nbytes for p in before.values())
    gc.collect()
    at_first = bytes_of_tensors()

    def spy(idx, targets):
        has_gradients = all(p.grad is not None for p in tiny_model.parameters())
        seen.append((len(idx), has_gradients))
        taken.append(bytes_of_tensors() - at_first - has_gradients * parameter_bytes)
        if len(idx) > 2:
            raise torch.OutOfMemoryError
        return forward(idx, targets)

    monkeypatch.setattr(tiny_model, "forward", spy)
    assert largest(config_of("--batch-size", 8, "--total-batch-size", 8 * 16 * micro_steps), tiny_model) == 2
    assert seen == [(8, False), (4, False), (2, False), (2, True)]
    assert taken == [pytest.approx(2 * parameter_bytes, abs=parameter_bytes / 4)] * 4
    assert largest(config_of("--batch-size", 2, "--total-batch-size", 2 * 16), tiny_model) == 2
    assert seen[4:] == [(2, False)]  # a single micro-step
    assert all(p.grad is None and torch.equal(p, before[name]) for name, p in tiny_model.named_parameters())


@pytest.mark.parametrize("flags", ["--dropout 0.1", "--recipe fast", "--dtype fp16"])
def test_the_optimizer_has_its_memory_before_the_first_step(byte_shards, tmp_path, monkeypatch, flags):
    """As in the trial; AdamW's two moments and count, or Muon's momentum, are zero, so the run is the same."""
    train_step, states = train_gpt2.train_step, []

    def watched_step(setup, state, *args):
        states.append([tensor.clone() for of in state.optimizer.state.values() for tensor in of.values()])
        return train_step(setup, state, *args)

    common = ["--data", byte_shards, "--max-steps", 4, *flags.split()]
    expected = trained(tmp_path / "as_needed", *common)
    monkeypatch.setattr(batch_size, "TRIED", ("cpu",))
    monkeypatch.setattr(train_gpt2, "train_step", watched_step)
    found = trained(tmp_path / "before", *common)
    assert states[0] and len(states[0]) == len(states[1])
    assert not any(tensor.any() for tensor in states[0]) and any(tensor.any() for tensor in states[1])
    assert found == expected
    assert_same_run(tmp_path / "before", tmp_path / "as_needed")


def test_what_the_formulas_exclude_is_not_tried(tiny_model, tried, monkeypatch, capsys):
    """Of 64, 32, ... 1 rows, with the memory that 8 take by the formulas."""
    config, sizes = config_of("--batch-size", 64, "--total-batch-size", 64 * 16), Sizes.of(tiny_model)
    needed = training_memory(sizes, layout_of(config), 8, None)
    monkeypatch.setattr(devices, "free_and_total_memory", lambda device: (needed.total - needed.program, 2e9))
    rows, forward = [], tiny_model.forward
    monkeypatch.setattr(tiny_model, "forward", lambda idx, targets: rows.append(len(idx)) or forward(idx, targets))
    assert largest(config, tiny_model) == 8
    assert rows == [8, 8]
    out = capsys.readouterr().out
    assert "a micro-batch of 64 rows does not fit into memory; using 8" in out
    assert re.match(r"memory  about \d\.\d of 1\.9 GiB with 8 rows", out)


@pytest.mark.parametrize(
    "rows_that_fit, asked, message",
    [
        (8, 8, None),
        (
            8,
            64,
            r"^a micro-batch of 64 rows takes about 9\.0 MB, but only 2\.6 MB are available. Use --batch-size 8\.$",
        ),
        (
            0,
            2,
            r"^not even one row of 16 tokens fits into the memory of cpu \(0\.0 GiB free\)\. Use a smaller --model or",
        ),
    ],
)
def test_on_a_cpu_what_the_formulas_exclude_is_refused(tiny_model, monkeypatch, rows_that_fit, asked, message):
    """It would swap. The weights are in memory already; the rest must fit into what is free."""
    config, sizes = config_of("--batch-size", asked, "--total-batch-size", 64 * 16), Sizes.of(tiny_model)
    needed = training_memory(sizes, layout_of(config), rows_that_fit or 1, None)
    free = needed.total - needed.program - needed.weights - (rows_that_fit == 0)
    monkeypatch.setattr(devices, "free_and_total_memory", lambda device: (free, free))
    with pytest.raises(UserError, match=message) if message else nullcontext():
        assert largest(config, tiny_model) == asked


@pytest.mark.parametrize(
    "asked, rows, used",
    [(48, 64, 32), (8, 509, 1), (4, 6, 3), (32, 64, None), (64, 16, None), (None, 509, None)],  # a prime number of rows
)
def test_a_micro_batch_that_is_smaller_than_asked_is_named(tiny_model, capsys, asked, rows, used):
    flags = ["--batch-size", asked] if asked else []
    config = configure([*TINY_MODEL_FLAGS, "--device", "cpu", "--total-batch-size", rows * 16, *flags])[0]
    B = largest(config, tiny_model)
    out = capsys.readouterr().out
    if used:
        assert used == B
        assert out == (
            f"note    --batch-size {asked} does not divide the {rows} rows of a step on each process; using {used}\n"
        )
    else:
        assert not out


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_all_ranks_take_the_micro_batch_that_fits_on_each(byte_shards, tmp_path, parallel):
    """Rank 1 runs out of memory while rank 0 does not: neither waits for the other, and the run is as without a trial."""
    flags = ["--data", byte_shards, "--max-steps", 3, "--val-every", 0, "--parallel", parallel]
    run_to_the_end(*flags, "--batch-size", 2, "--out", "two", cwd=tmp_path, world_size=2)
    options = dict(cwd=tmp_path, world_size=2, rank={0: rank_with_memory_for(4), 1: rank_with_memory_for(2)})
    run_to_the_end(*flags, "--batch-size", 8, "--out", "eight", **options)
    assert "= 2 rows x 16 tokens x 2 processes x 4 micro-steps" in (tmp_path / "0.txt").read_text()
    assert losses(tmp_path / "eight/log.txt") == losses(tmp_path / "two/log.txt")


@pytest.mark.slow
def test_a_failure_of_one_rank_before_the_first_step_is_reported(byte_shards, tmp_path):
    memory = {0: rank_with_memory_for(100), 1: rank_with_memory_for(0)}
    ranks = start_run("--data", byte_shards, "--out", "run", cwd=tmp_path, world_size=2, rank=memory)
    assert finish_run(ranks) == [2, 2]
    assert "error: not even one row of 16 tokens fits into the memory" in (tmp_path / "1.txt").read_text()
    assert "error: rank 1 could not prepare the run." in (tmp_path / "0.txt").read_text()
    assert not (tmp_path / "run").exists()
