"""Fifty steps of `train` against the loop in plain PyTorch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import losses
from torch.nn import functional as F
from training import FP32, NEW_RUN, ONE_PROCESS, TINY, config_of, train

from benchmarks.plain_loop import plain_losses
from support.config import TrainConfig
from support.data import shards
from support.optim import loss
from support.runtime.signals import StopHandler
from train_gpt2 import GPT, DataLoaderLite, validation_loss


def trained_losses(data: Path, out: Path, *flags: object) -> tuple[TrainConfig, np.ndarray]:
    """The configuration of fifty steps of `train`, and their losses."""
    config = config_of("--data", data, "--out", out, "--max-steps", 50, *flags)
    train(config, ONE_PROCESS, NEW_RUN)
    return config, np.array(losses(out / "log.txt"))


compile_flags = pytest.mark.parametrize("flags", [(), pytest.param(("--compile",), marks=pytest.mark.slow)])


@pytest.fixture(autouse=True)
def several_chunks_in_each_micro_batch(monkeypatch):
    monkeypatch.setattr(loss, "CPU_CHUNK_ROWS", 16)


@compile_flags
def test_fifty_steps_follow_a_plain_loop_with_huggingfaces_model(byte_shards, tmp_path, flags):
    """The reference has another model, one large batch per step, and rows cut by hand."""
    from transformers import GPT2LMHeadModel

    class WithLoss(GPT2LMHeadModel):
        def forward(self, idx, targets):
            return None, F.cross_entropy(super().forward(idx).logits.flatten(0, 1), targets.flatten())

    flags = ["--val-every", 50, "--beta2", 0.99, "--weight-decay", 0.2, *flags]
    config, found = trained_losses(byte_shards, tmp_path / "run", *flags)
    torch.manual_seed(config.seed)
    GPT(TINY).save_pretrained(tmp_path / "start")
    plain = plain_losses(config, 16, 50, WithLoss.from_pretrained(tmp_path / "start"))
    assert plain[-1] < plain[0] - 1  # it learns
    assert np.abs(found - plain).max() < 1e-4
    saved = GPT.from_pretrained(tmp_path / "run" / "model_00050")  # compiled or not, its weights have the same names
    loader = DataLoaderLite(shards.open_shards(byte_shards, "val"), 4, 16, vocab_size=257)
    expected = validation_loss(saved, loader, 512, StopHandler(), FP32)
    assert losses(tmp_path / "run" / "log.txt", "val")[-1] == pytest.approx(expected, abs=6e-5)


@pytest.mark.slow
@pytest.mark.parametrize("dtype, flags", [("bf16", ()), ("fp16", ()), ("bf16", ["--compile"])])
def test_lower_precision_stays_within_the_rounding_of_bf16(byte_shards, tmp_path, graphs_only, dtype, flags):
    """bf16 rounds by up to 2^-8 of a value; of 256 tokens, roundings of both signs mostly cancel in the mean."""
    config, found = trained_losses(byte_shards, tmp_path / "run", "--val-every", 0, "--dtype", dtype, *flags)
    exact = plain_losses(config, 4, 50)
    error = np.abs(found / exact - 1)
    assert error.max() > 1e-6 and error.max() < 2**-10
