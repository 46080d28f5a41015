"""torch.compile: how many graphs there are, and that none is compiled twice."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest
import torch
from helpers import STEP, Rank, losses, run_to_the_end
from torch._dynamo.backends.distributed import DDPOptimizer
from training import NEW_RUN, ONE_PROCESS, compile_graphs, config_of, train, trained

import train_gpt2

pytestmark = pytest.mark.slow


def test_one_graph_for_each_shape_and_no_recompilation(byte_shards, tmp_path, monkeypatch, graphs_only):
    """PyTorch's own counters say so, after the first step and the first validation with its smaller last batch."""
    counters = torch._dynamo.utils.counters
    torch.compiler.reset()
    counters.clear()
    train_step, seen = train_gpt2.train_step, []

    def counting_step(*args):
        result = train_step(*args)
        seen.append((counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())))
        torch.compiler.set_stance("fail_on_recompile")
        return result

    monkeypatch.setattr(train_gpt2, "train_step", counting_step)
    try:
        config = config_of(
            "--data", byte_shards, "--out", tmp_path / "run", "--max-steps", 8, "--val-every", 2, "--val-tokens", 16 * 18,
            "--sample-every", 4, "--compile",
        )  # fmt: skip
        train(config, ONE_PROCESS, NEW_RUN)
    finally:
        torch.compiler.set_stance("default")
    # the model with gradients, and without for 4 rows and for 2; the same three of the loss of a chunk
    assert seen == [(6, 0)] * 8
    assert len(losses(tmp_path / "run" / "log.txt", "val")) == 5


@pytest.mark.parametrize("more", ["", "--recompute"])
def test_under_ddp_each_bucket_has_its_graph(byte_shards, tmp_path, more):
    """0.51 million parameters are 2 MB: DDP's first bucket of 1 MB and one more. The trial compiles what is trained."""
    flags = ["--data", byte_shards, *"--n-layer 1 --n-embd 192 --max-steps 4 --val-every 2".split()]
    counted = Rank(
        replaced={
            "torch.compile": compile_graphs,
            "support.runtime.batch_size.TRIED": ("cpu",),
            "torch._dynamo.backends.distributed.DDPOptimizer.compile_fn": counting_compile,
            STEP: counting_step,
        }
    )
    run_to_the_end(*flags, "--out", "run", "--compile", *more.split(), cwd=tmp_path, world_size=2, rank=counted)
    trained(tmp_path / "eager", *flags)
    for rank in (0, 1):
        counts = [json.loads(line) for line in (tmp_path / f"graphs{rank}.txt").read_text().splitlines()]
        assert counts == [counts[0]] * 4, "compiled again after the first step"
        assert counts[0]["breaks"] == 0 and counts[0]["buckets"] == [2, 1]  # of the model, and of the loss of a chunk
    compiled, eager = (np.array(losses(tmp_path / name / "log.txt")) for name in ("run", "eager"))
    assert np.abs(compiled - eager).max() < 1e-4


COMPILE_FN, TRAIN_STEP = DDPOptimizer.compile_fn, train_gpt2.train_step
BUCKETS = []  # of each graph that DDP's backend has split


def counting_compile(self, *args):
    result = COMPILE_FN(self, *args)
    BUCKETS.append(len(self.buckets))
    return result


def counting_step(*args):
    """Writes after each step how many graphs there are, and into how many buckets each was split."""
    result, counters = TRAIN_STEP(*args), torch._dynamo.utils.counters
    breaks = sum(counters["graph_break"].values())
    line = {"graphs": counters["stats"]["unique_graphs"], "breaks": breaks, "buckets": BUCKETS}
    with open(f"graphs{os.environ['RANK']}.txt", "a") as file:
        file.write(json.dumps(line) + "\n")
    return result
