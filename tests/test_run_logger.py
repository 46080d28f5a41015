"""The console's lines about a run: speed and MFU, against figures computed by hand."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from training import TINY, run_info

from support.checkpoints import lora
from support.checkpoints.state import TrainState
from support.console.progress import describe_length
from support.console.run_logger import RunLogger
from support.runtime import devices
from train_gpt2 import GPT

FLOPS_PER_TOKEN = 6 * (257 * 32 + 63 * 32 + 2 * (12 * 32 * 32 + 13 * 32) + 2 * 32) + 12 * 2 * 32 * 16


def test_mfu_counts_all_gpus(tmp_path, monkeypatch):
    """256 tokens in 0.5 s on two GPUs of 10^9 FLOP/s each."""
    assert GPT(TINY).flops_per_token() == FLOPS_PER_TOKEN
    lines = list[str]()
    monkeypatch.setattr(devices, "peak_flops", lambda device: 1e9)
    calls = dict(print0=lines.append, on_rank_zero=lambda f: f())
    dist = SimpleNamespace(rank=0, world_size=2, device=torch.device("cpu"), **calls)
    logger = RunLogger(run_info("--out", tmp_path), dist)
    logger.step(TrainState(None, None, None, step=0), 1.0, 1e-3, 1.0, 0.5, None)
    assert lines[-1].endswith(f"| tok/sec: 512.00 | mfu: {256 / 0.5 * FLOPS_PER_TOKEN / 2e9:.1%}")


def test_mfu_counts_frozen_weights_without_their_gradients():
    """By hand: LoRA of rank 4 has 2,816 weights in two blocks. Each of the others takes part in the forward pass and in the
    gradients of the activations, two FLOPs each."""
    model = GPT(TINY)
    lora.add_adapter(model, rank=4, alpha=8.0, seed=0, checkpoint=None)
    gradients_of_frozen_weights = 2 * (FLOPS_PER_TOKEN - 12 * 2 * 32 * 16) // 6
    assert model.flops_per_token() == FLOPS_PER_TOKEN - gradients_of_frozen_weights + 6 * 2816


def test_the_length_is_given_in_passes_over_the_data(tmp_path):
    """A pass over 506,048 tokens takes 494.19 steps of 1,024, so 568 steps are 1.149 passes."""
    run = run_info("--out", tmp_path, "--max-steps", 568)
    assert describe_length(run, 506_048 / 1024) == "568 steps: 1.15 passes over the data, 494.2 steps each"
