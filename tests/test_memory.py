"""The memory of training, from formulas: against what PyTorch saves and keeps in a real step, and arithmetic."""

from __future__ import annotations

import math
import os
import re
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import TINY_SIZES
from torch.utils._pytree import tree_leaves
from training import config_with, saved_bytes, trained

from support.checkpoints import huggingface
from support.checkpoints.state import copy_to_host
from support.cli import UserError
from support.runtime import devices, fsdp, memory
from support.runtime.memory import Layout, Sizes, training_memory
from train_gpt2 import GPT, MODELS, GPTConfig, new_model

# Small, and with activations that are most of the memory.
SMALL = config_with(
    device="cpu", n_layer=4, n_head=2, n_embd=128, block_size=128, batch_size=8, total_batch_size=2 * 8 * 128
)


def model_of(config, vocab_size=257):
    """Returns the model that train() makes; LoRA's without pretrained weights."""
    model = new_model(config, vocab_size)
    memory.recompute_activations(model.transformer.h if config.recompute else [])
    return model


def saved_in_a_step(config, B=8):
    """Counts the bytes that autograd saves, with those of the block that the backward pass computes again."""
    dtype = devices.DTYPES[config.dtype]
    saved = saved_bytes(model_of(config), B, 128, dtype)
    if config.recompute:
        deep, shallow = (model_of(replace(config, n_layer=n, recompute=False)) for n in (4, 3))
        saved += saved_bytes(deep, B, 128, dtype) - saved_bytes(shallow, B, 128, dtype)
    return saved


# ---- what a step takes


def planned(config, model, B):
    dtype = devices.DTYPES[config.dtype]
    layout = Layout(config.total_batch_size, dtype, recompute=config.recompute, optimizer=config.optimizer)
    return training_memory(Sizes.of(model), layout, B, None)


@pytest.mark.parametrize(
    "dtype, B, changes, tolerance",
    [
        *[(dtype, B, {}, 0.01) for dtype in ("fp32", "bf16") for B in (2, 8)],
        *[(dtype, 8, {"lora_rank": 4}, 0.08) for dtype in ("fp32", "bf16")],
        *[(dtype, 8, {"dropout": 0.1}, 0.02) for dtype in ("fp32", "bf16")],
        ("fp32", 8, {"recompute": True}, 0.02),
    ],
)
def test_activations_are_those_that_autograd_saves(dtype, B, changes, tolerance):
    """The loss computes the gradient of the embedding in fp32: it is counted with the logits instead."""
    config = replace(SMALL, dtype=dtype, **changes)
    model = model_of(config)
    gradient = 4 * model.lm_head.weight.numel() if config.lora_rank is None else 0
    expected = saved_in_a_step(config, B) - gradient
    assert planned(config, model, B).activations == pytest.approx(expected, rel=tolerance)


@pytest.mark.parametrize("changes", [{}, {"optimizer": "muon"}, {"lora_rank": 4}], ids=["adamw", "muon", "lora"])
def test_weights_gradients_and_optimizer_are_those_after_a_step(changes):
    config = replace(SMALL, dtype="fp32", **changes)
    model = model_of(config)
    optimizer = model.configure_optimizers(0.1, 1e-3, (0.9, 0.95), config.optimizer, dtype=torch.float32)
    tokens = torch.zeros((1, 128), dtype=torch.int64)
    model(tokens, tokens)[1].backward()
    optimizer.step()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    moments = [t for state in optimizer.state.values() for t in state.values() if torch.is_tensor(t) and t.dim() > 0]
    expected = [sum(t.nbytes for t in tensors) for tensors in (model.parameters(), gradients, moments)]
    assert list(planned(config, model, 1)[:3]) == expected
    assert memory.checkpoint_bytes(Sizes.of(model), config.optimizer) == expected[0] + expected[2]


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_save_holds_a_copy_of_the_state_and_transposed_matrices(optimizer):
    model = model_of(SMALL)
    adam = model.configure_optimizers(0.1, 1e-3, (0.9, 0.95), optimizer, dtype=torch.float32)
    tokens = torch.zeros((1, 128), dtype=torch.int64)
    model(tokens, tokens)[1].backward()
    adam.step()
    weights, moments = copy_to_host(dict(model.named_parameters())), copy_to_host(adam.state_dict()["state"])
    held = tree_leaves((weights, moments, huggingface.to_hf(weights, 257)))
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in held}
    assert memory.saving_bytes(Sizes.of(model), optimizer) == pytest.approx(sum(storages.values()), rel=0.01)


def test_a_cpu_has_room_for_the_checkpoint_that_is_written_while_it_trains():
    layout, sizes = Layout(2048, torch.float32), Sizes.of(model_of(SMALL))
    with_none, of_two = replace(layout, saves=False), replace(layout, world_size=2)
    totals = [training_memory(sizes, of_run, 8, None).total for of_run in (layout, with_none)]
    assert totals[0] - totals[1] == memory.saving_bytes(sizes, "adamw")
    totals = [training_memory(sizes, of_run, 8, None).total for of_run in (of_two, replace(of_two, saves=False))]
    assert totals[0] - totals[1] == memory.saving_bytes(sizes, "adamw") / 2  # rank 0 saves, and they share the memory


def state(memory):
    return memory.weights + memory.gradients + memory.optimizer


def test_ddp_keeps_everything_and_fsdp_a_part():
    """A parameter takes 16 bytes, and 4 in DDP's buckets; gradients are complete until the last micro-step."""
    with torch.device("meta"):
        sizes = Sizes.of(GPT(GPTConfig(**MODELS["gpt2-xl"])))
    N, gpu, layout = sizes.parameters, 80 * 10**9, Layout(8 * 8 * 1024, torch.bfloat16, compiled=True)
    assert N == 1_557_611_200 + 47 * 1600
    one, ddp = (training_memory(sizes, replace(layout, world_size=ranks), 8, gpu) for ranks in (1, 8))
    assert state(one) == state(ddp) == 16 * N and ddp.buffers - one.buffers == 4 * N
    sharded = replace(layout, world_size=8, sharded=True)
    assert state(training_memory(sizes, sharded, 8, gpu)) == 2 * N
    assert state(training_memory(sizes, sharded, 4, gpu)) == 2 * N + 4 * N
    assert not fsdp.reshard_after_forward(1000, torch.bfloat16, 16_000)  # gathered, they take an eighth of the GPU
    assert fsdp.reshard_after_forward(1000, torch.bfloat16, 15_999)


# ---- before a model exists


NO_BIAS = GPTConfig(block_size=7, vocab_size=257, n_layer=3, n_head=2, n_embd=8, bias=False)


@pytest.mark.parametrize("config", [GPTConfig(), GPTConfig(**TINY_SIZES), NO_BIAS])
def test_parameters_are_counted(config):
    with torch.device("meta"):
        model = GPT(config)
    padding = (config.padded_vocab_size - config.vocab_size) * config.n_embd
    assert memory.count_parameters(vars(config)) == sum(p.numel() for p in model.parameters()) - padding


NOT_SAVED = {"checkpoint_every": 0}


@pytest.mark.parametrize(
    "changes, gigabytes, problem",
    [
        (NOT_SAVED, 2.0, None),
        (
            NOT_SAVED,
            1.9,
            "training 124,439,808 parameters takes at least 2.0 GB, but only 1.9 GB are available. Use a smaller",
        ),
        ({}, 3.9, None),
        ({}, 3.8, "takes at least 3.8 GB, but only 3.8 GB are available."),
        (NOT_SAVED | {"optimizer": "muon"}, 1.6, "takes at least 1.7 GB, but only 1.6 GB are available."),
        (NOT_SAVED | {"lora_rank": 8}, 0.5, None),
        ({}, 0.4, "the model has 124,439,808 parameters, which take 497.8 MB, but this machine has 400.0 MB"),
        ({}, math.inf, None),
    ],
)
def test_what_cannot_fit_is_refused(monkeypatch, changes, gigabytes, problem):
    """AdamW has 16 bytes for each of 124 million parameters; Muon 12 for the 85 million in matrices of the blocks.

    A save copies 12 of the 16, and has the 85 million once more, transposed.
    """
    monkeypatch.setattr(devices, "free_and_total_memory", lambda device: (gigabytes * 1e9, gigabytes * 1e9))
    with pytest.raises(UserError, match=problem) if problem else nullcontext():
        config = replace(config_with(), **changes)
        memory.check_training_fits(config, 50257, 1, torch.device("cpu"))


def test_the_host_of_a_gpu_needs_memory_for_a_checkpoint(monkeypatch):
    """By hand, as above: 12 bytes for each of 124 million parameters, and 4 for 85 million."""
    monkeypatch.setattr(devices, "free_and_total_memory", lambda device: (8e9, 8e9))
    for gigabytes, problem in (
        (1.8, "writing a checkpoint takes 1.8 GB of this machine's memory, .* 1.8 GB"),
        (1.9, None),
    ):
        monkeypatch.setattr(devices, "host_memory", lambda gigabytes=gigabytes: gigabytes * 1e9)
        with pytest.raises(UserError, match=problem) if problem else nullcontext():
            memory.check_training_fits(config_with(), 50257, 1, torch.device("cuda"))
        memory.check_training_fits(config_with(**NOT_SAVED), 50257, 1, torch.device("cuda"))


def test_fsdp_divides_what_must_fit_among_the_gpus(monkeypatch):
    """By hand: 16 bytes for each of 48 x (12 x 1600^2 + 13 x 1600) + (257 + 16) x 1600 + 2 x 1600 parameters."""
    sizes, gpu = {"cpu": 10**12, "cuda": 23 * 10**9}, torch.device("cuda")
    monkeypatch.setattr(devices, "free_and_total_memory", lambda device: (sizes[device.type],) * 2)
    monkeypatch.setattr(devices, "host_memory", lambda: 10**12)
    config = config_with(**MODELS["gpt2-xl"], block_size=16)
    for world_size in (1, 2):
        with pytest.raises(UserError, match=r"takes at least 23\.6 GB, but only 23\.0 GB are .+ --parallel fsdp\.$"):
            memory.check_training_fits(config, 257, world_size, gpu)
    memory.check_training_fits(replace(config, parallel="fsdp"), 257, 2, gpu)


def test_a_run_that_cannot_fit_is_refused_before_its_folder_is_made(monkeypatch, byte_shards, tmp_path):
    monkeypatch.setattr(devices, "free_and_total_memory", lambda device: (200_000, 200_000))
    with pytest.raises(UserError, match=r"training 34,208 parameters takes at least 1\.1 MB"):
        trained(tmp_path / "run", "--data", byte_shards)
    assert not (tmp_path / "run").exists()


def test_a_checkpoint_that_does_not_fit_is_refused_before_it_is_built(tiny_model, tmp_path, monkeypatch):
    tiny_model.save_pretrained(tmp_path)
    monkeypatch.setattr(devices, "free_and_total_memory", lambda device: (100_000, 100_000))
    with pytest.raises(UserError, match=r"the model has 34,208 parameters, which take 0.1 MB"):
        huggingface.read_config(tmp_path)


@pytest.mark.skipif(not Path("/proc/meminfo").exists(), reason="reads /proc")
def test_the_memory_of_a_cpu_is_shared_by_its_ranks(monkeypatch):
    swap = re.search(r"SwapTotal: +(\d+)", Path("/proc/meminfo").read_text())
    everything = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") + 1024 * int(swap[1])
    free, total = devices.free_and_total_memory(torch.device("cpu"))
    assert 0 < free == total < 1.01 * everything
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert devices.free_and_total_memory(torch.device("cpu"))[0] == pytest.approx(free / 4, rel=0.2)
