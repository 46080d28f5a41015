"""A step as CUDA graphs: what is recorded, without a GPU. tests/test_gpu.py records real ones."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import losses
from training import resumed, trained

from support.checkpoints.history import read_starts
from support.runtime import cuda_graphs
from support.runtime.memory import Layout, Sizes
from train_gpt2 import GPT, GPTConfig


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
def graphs_suit(monkeypatch):
    monkeypatch.setattr(cuda_graphs, "suit", lambda *args: True)


def used_graphs(out):
    return [start["machine"]["cuda_graphs"] for start in read_starts(out)]


FLAGS = ["--total-batch-size", 128, "--max-steps", 8, "--checkpoint-every", 5, "--sample-every", 4]


@pytest.mark.parametrize("flags", ["--recipe fast --dropout 0.1", "--grad-clip 0"])
def test_recorded_steps_are_the_same(byte_shards, tmp_path, monkeypatch, graphs_suit, flags):
    """Also after a resume, whose restored state is recorded, with dropout's masks, and with several micro-steps."""
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


def test_a_step_that_cannot_be_recorded_is_launched_and_said_so(
    byte_shards, tmp_path, monkeypatch, graphs_suit, capsys
):
    def fail(function, *arguments):
        function(*arguments)
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(cuda_graphs, "Graph", fail)
    found = trained(tmp_path / "failed", "--data", byte_shards, *FLAGS)
    printed = capsys.readouterr().out
    assert "note    no CUDA graphs, so steps take longer: operation not permitted when stream is capturing\n" in printed
    assert found == trained(tmp_path / "launches", "--data", byte_shards, *FLAGS, "--no-cuda-graphs")
    assert used_graphs(tmp_path / "failed") == [False]


def test_only_short_steps_of_one_gpu_are_recorded():
    """By hand: 124M with 8 rows of 1,024 tokens has 8 x 1,024 x 768 = 6.3 million values, with 16 twice as many: 2^23 are 8.4."""
    with torch.device("meta"):
        sizes = Sizes.of(GPT(GPTConfig()))
    layout, gpu = Layout(2**19, torch.bfloat16), torch.device("cuda")
    assert cuda_graphs.suit(sizes, layout, 8, gpu) and not cuda_graphs.suit(sizes, layout, 16, gpu)
    assert not cuda_graphs.suit(sizes, layout, 8, torch.device("cpu"))
    for other in (dict(world_size=2), dict(recompute=True), dict(dtype=torch.float16)):
        assert not cuda_graphs.suit(sizes, replace(layout, **other), 8, gpu)
