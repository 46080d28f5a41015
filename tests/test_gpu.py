"""What only a CUDA GPU can show. Skipped without one."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import TINY_FLAGS, losses
from training import ONE_PROCESS, config_of

import train_gpt2
from support.cli import parse_flags
from support.runtime.distributed import Distributed
from train_gpt2 import GPT, GPTConfig, TrainConfig, resolve, train

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.fixture
def gpu() -> Distributed:
    return Distributed(rank=0, local_rank=0, world_size=1, device=torch.device("cuda", 0))


def config_on_gpu(data: Path, out: Path, *flags: object) -> TrainConfig:
    on_gpu = ["--data", data, "--out", out, "--device", "cuda", "--checkpoint-every", 0]
    given = parse_flags(TrainConfig, [*TINY_FLAGS, *map(str, [*on_gpu, *flags])], "")
    return resolve(given, torch.device("cuda", 0), 1)


def test_the_host_waits_for_the_device_once_in_a_step(byte_shards, tmp_path, gpu, monkeypatch):
    """For the loss that is logged; PyTorch warns of each wait."""
    train_step, waits = train_gpt2.train_step, []

    def watched_step(*args):
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("warn")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            result = train_step(*args)
        torch.cuda.set_sync_debug_mode("default")
        waits.append(sum("synchroniz" in str(w.message) for w in caught))
        return result

    monkeypatch.setattr(train_gpt2, "train_step", watched_step)
    flags = ["--max-steps", 6, "--val-every", 0, "--dtype", "bf16"]
    train(config_on_gpu(byte_shards, tmp_path / "run", *flags), gpu)
    assert waits[2:] == [1] * 4


def test_compiled_losses_on_the_gpu_are_those_of_the_cpu(byte_shards, tmp_path, gpu):
    found = {}
    for dtype, compiled in (("fp32", "--compile"), ("fp32", "--no-compile"), ("bf16", "--compile")):
        out = tmp_path / (dtype + compiled)
        train(config_on_gpu(byte_shards, out, "--max-steps", 20, "--dtype", dtype, compiled), gpu)
        found[dtype, compiled] = np.array(losses(out / "log.txt"))
    cpu = tmp_path / "cpu"
    train(config_of("--data", byte_shards, "--out", cpu, "--max-steps", 20, "--checkpoint-every", 0), ONE_PROCESS)
    reference = np.array(losses(cpu / "log.txt"))
    assert np.abs(found["fp32", "--compile"] - reference).max() < 2e-2  # TF32 products
    assert np.abs(found["fp32", "--no-compile"] - reference).max() < 2e-2
    assert np.abs(found["bf16", "--compile"] - reference).max() < 5e-2


def test_sixteen_rows_of_gpt2_fit_into_24_gb(gpu):
    torch.cuda.reset_peak_memory_stats()
    model = GPT(GPTConfig()).to(gpu.device)
    optimizer = model.configure_optimizers(0.1, 6e-4, (0.9, 0.95))
    tokens = torch.zeros((16, 1025), dtype=torch.int64, device=gpu.device)
    for _ in range(2):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            _, loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.step()
    assert torch.cuda.max_memory_reserved() < 22e9
