"""A step as CUDA graphs: what is recorded, without a GPU. tests/test_gpu.py records real ones."""

from __future__ import annotations

import copy
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from helpers import losses
from training import FP32, TINY, resumed, trained

from support.checkpoints.history import read_starts
from support.checkpoints.state import TrainState
from support.cli import UserError
from support.runtime import batch_size, cuda_graphs, devices
from support.runtime.memory import Layout, Sizes, bytes_needed
from train_gpt2 import GPT, MODELS, GPTConfig, forward_backward, step_if_finite


class Recorded:
    """Does what a graph does: warms up, then calls its function on its own tensors."""

    def __init__(self, function, *arguments):
        self.function, self.arguments = function, arguments
        for _ in range(cuda_graphs.WARM_UP_CALLS):
            function(*arguments)

    def __call__(self, *values):
        for argument, value in zip(self.arguments, values, strict=True):
            argument.copy_(value)
        return self.function(*self.arguments)


@pytest.fixture
def graphs_are_faster(monkeypatch):
    monkeypatch.setattr(cuda_graphs, "are_faster", lambda *args: True)


def used_graphs(out):
    return [start["machine"]["cuda_graphs"] for start in read_starts(out)]


FLAGS = ["--total-batch-size", 128, "--max-steps", 8, "--checkpoint-every", 5, "--sample-every", 4]


@pytest.mark.parametrize("flags", ["--recipe fast --dropout 0.1", "--grad-clip 0"])
def test_recorded_steps_are_the_same(byte_shards, tmp_path, monkeypatch, graphs_are_faster, flags):
    """They are so after a resume, whose restored state is recorded, with dropout's masks, and with several micro-steps."""
    monkeypatch.chdir(tmp_path)
    common = ["--data", byte_shards, *FLAGS, *flags.split()]
    monkeypatch.setattr(cuda_graphs, "Graph", Recorded)
    trained(Path("graphs"), *common)
    shutil.rmtree("graphs/model_00008")
    resumed(Path("graphs"))
    trained(Path("launches"), *common, "--no-cuda-graphs")
    assert used_graphs(Path("graphs")) == [True, True] and used_graphs(Path("launches")) == [False]
    found, expected = losses(Path("graphs/log.txt")), losses(Path("launches/log.txt"))
    assert len(found) == 8 and len(set(found)) == 8
    assert found == pytest.approx(expected, abs=2e-5)  # the rate is rounded to fp32


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_recording_changes_no_weight(monkeypatch, name):
    """Moments and counts stay, too, also in a recorded update whose gradients are not finite."""
    monkeypatch.setattr(cuda_graphs, "Graph", Recorded)
    torch.manual_seed(0)
    model = GPT(TINY)
    optimizer = model.configure_optimizers(0.1, 1e-3, (0.9, 0.95), name, dtype=torch.float32)
    state = TrainState(model, optimizer, torch.amp.GradScaler("cpu", enabled=False))
    x, y = torch.randint(257, (2, 4, TINY.block_size))  # targets need not be the tokens that follow
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()  # makes the state
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()["state"]))
    of_state = dict(grad_accum=2, scaler=state.scaler, amp=FP32)
    parts = partial(forward_backward, model, **of_state), partial(step_if_finite, optimizer)
    micro_step, update = cuda_graphs.record_step(*parts, optimizer, 4, TINY.block_size, x.device)
    assert all(not p.grad.any() for p in model.parameters())
    assert micro_step(x, y).item() == pytest.approx(model(x, y)[1].item() / 2)
    update(torch.tensor(False))
    assert_equal(before, (model.state_dict(), optimizer.state_dict()["state"]))
    update(torch.tensor(True))
    assert not torch.equal(model.lm_head.weight, before[0]["lm_head.weight"])


@pytest.mark.slow
def test_a_compiled_step_is_not_compiled_again(byte_shards, tmp_path, monkeypatch, graphs_are_faster, graphs_only):
    """The trial of a micro-batch has compiled it for the strides of the loader's rows, on which it is recorded."""
    monkeypatch.setattr(cuda_graphs, "Graph", Recorded)
    monkeypatch.setattr(batch_size, "TRIED", ("cpu",))
    counters, found = torch._dynamo.utils.counters, []
    for flags in (["--no-cuda-graphs"], []):
        torch.compiler.reset()
        counters.clear()
        trained(tmp_path / str(flags), "--data", byte_shards, "--compile", "--max-steps", 3, *flags)
        found.append((counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())))
    assert found[0] == found[1] and used_graphs(tmp_path / "[]") == [True]


def assert_equal(before, after):
    torch.testing.assert_close(after, before, rtol=0, atol=0)


def test_too_little_memory_for_graphs_is_said(byte_shards, tmp_path, monkeypatch, graphs_are_faster, capsys):
    def fail(function, *arguments):
        function(*arguments)
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(cuda_graphs, "Graph", fail)
    found = trained(tmp_path / "failed", "--data", byte_shards, *FLAGS)
    assert "note    too little memory for CUDA graphs, so a step takes longer\n" in capsys.readouterr().out
    assert found == trained(tmp_path / "launches", "--data", byte_shards, *FLAGS, "--no-cuda-graphs")
    assert used_graphs(tmp_path / "failed") == [False]


def test_a_step_that_cannot_be_recorded_is_an_error(byte_shards, tmp_path, monkeypatch, graphs_are_faster):
    """The first of two errors is named: the capture itself only says that it failed."""

    def fail(function, *arguments):
        try:
            raise RuntimeError("operation not permitted when stream is capturing\nmore")
        finally:
            raise RuntimeError("operation failed due to a previous error during capture")

    monkeypatch.setattr(cuda_graphs, "Graph", fail)
    message = r"cannot be recorded as a CUDA graph \(operation not permitted when stream is capturing\). Use --no-cuda"
    with pytest.raises(UserError, match=message):
        trained(tmp_path, "--data", byte_shards, *FLAGS)


def test_only_short_steps_of_one_gpu_are_recorded(monkeypatch):
    """By hand: 124M with 8 rows of 1,024 tokens has 8 x 1,024 x 768 = 6.3 million values, with 16 twice as many: 2^23 are 8.4."""
    with torch.device("meta"):
        sizes = Sizes.of(GPT(GPTConfig()))
    layout, gpu = Layout(2**19, torch.bfloat16), torch.device("cuda")
    monkeypatch.setattr(devices, "free_and_total_memory", lambda device: (24e9, 25e9))
    assert cuda_graphs.are_faster(sizes, layout, 8, gpu) and not cuda_graphs.are_faster(sizes, layout, 16, gpu)
    assert not cuda_graphs.are_faster(sizes, layout, 8, torch.device("cpu"))
    with torch.device("meta"):
        medium = Sizes.of(GPT(GPTConfig(**MODELS["gpt2-medium"])))
    assert not cuda_graphs.are_faster(medium, layout, 1, gpu)  # 355M
    for other in (dict(world_size=2), dict(recompute=True), dict(dtype=torch.float16)):
        assert not cuda_graphs.are_faster(sizes, replace(layout, **other), 8, gpu)


def test_a_graph_has_memory_that_evaluations_need(monkeypatch):
    """124M with 8 rows takes 5 GB, so a card of 6 GB launches its kernels one by one, and one of 24 GB does not."""
    with torch.device("meta"):
        sizes = Sizes.of(GPT(GPTConfig()))
    layout, gpu, found = Layout(2**19, torch.bfloat16, compiled=True), torch.device("cuda"), []
    for gigabytes in (6, 24):
        monkeypatch.setattr(devices, "free_and_total_memory", lambda device, n=gigabytes * 1e9: (n, n))
        assert 4e9 < bytes_needed(sizes, layout, gpu, 8) < 7e9
        found.append(cuda_graphs.are_faster(sizes, layout, 8, gpu))
    assert found == [False, True]
