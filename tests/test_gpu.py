"""What only a CUDA GPU can show. Skipped without one."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from conftest import config_of, losses

import train_gpt2
from train_gpt2 import Distributed

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.fixture
def gpu():
    return Distributed(rank=0, local_rank=0, world=1, device=torch.device("cuda", 0))


def on_gpu(byte_shards, out, *flags):
    return config_of("--data", byte_shards, "--out", out, "--device", "cuda", "--checkpoint-every", 0, *flags)


def test_the_host_waits_for_the_device_once_in_an_update(byte_shards, tmp_path, gpu, monkeypatch):
    """For the loss that is logged; PyTorch warns of each wait."""
    update, waits = train_gpt2.train_step, []

    def watched(run, lr):
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("warn")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            answer = update(run, lr)
        torch.cuda.set_sync_debug_mode("default")
        waits.append(sum("synchroniz" in str(w.message) for w in caught))
        return answer

    monkeypatch.setattr(train_gpt2, "train_step", watched)
    train_gpt2.train(on_gpu(byte_shards, tmp_path / "run", "--max-steps", 6, "--val-every", 0, "--dtype", "bf16"), gpu)
    assert waits[2:] == [1] * 4


def test_compiled_losses_on_the_gpu_are_those_of_the_cpu(byte_shards, tmp_path, gpu):
    found = {}
    for dtype, compiled in (("fp32", "--compile"), ("fp32", "--no-compile"), ("bf16", "--compile")):
        out = tmp_path / (dtype + compiled)
        train_gpt2.train(on_gpu(byte_shards, out, "--max-steps", 20, "--dtype", dtype, compiled), gpu)
        found[dtype, compiled] = np.array(losses(out / "log.txt"))
    cpu = tmp_path / "cpu"
    train_gpt2.train(config_of("--data", byte_shards, "--out", cpu, "--max-steps", 20, "--checkpoint-every", 0),
                     Distributed(rank=0, local_rank=0, world=1, device=torch.device("cpu")))  # fmt: skip
    reference = np.array(losses(cpu / "log.txt"))
    assert np.abs(found["fp32", "--compile"] - reference).max() < 2e-2  # TF32 products
    assert np.abs(found["fp32", "--no-compile"] - reference).max() < 2e-2
    assert np.abs(found["bf16", "--compile"] - reference).max() < 5e-2


def test_sixteen_rows_of_gpt2_fit_into_24_gb(gpu):
    torch.cuda.reset_peak_memory_stats()
    model = train_gpt2.GPT(train_gpt2.GPTConfig()).to(gpu.device)
    optimizer = model.configure_optimizers(0.1, 6e-4, (0.9, 0.95))
    tokens = torch.zeros((16, 1025), dtype=torch.int64, device=gpu.device)
    for _ in range(2):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            _, loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.step()
    assert torch.cuda.max_memory_reserved() < 22e9
