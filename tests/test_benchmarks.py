"""benchmarks/bench_throughput.py: its rows train alike."""

from __future__ import annotations

import json
import sys

import bench_throughput
import numpy as np
import pytest
import torch
from bench_throughput import Job
from helpers import FORKS
from training import configure

from benchmarks.plain_loop import plain_losses
from support.console.curves import CurvesFile

USED = {"model": "GPT", "head": 320, "chunks": True, "kept memory": True, "fused": True, "dtype": "fp32"}
USED_BY_PLAIN = USED | {"model": "PlainGPT", "head": 257, "chunks": False, "kept memory": False, "fused": False}


def run_worker(job: Job) -> dict:
    torch.set_num_threads(1)
    CurvesFile.draw = lambda self: None  # which takes longer than a row
    return bench_throughput.worker(job)


def measure_in_fork(job: Job, processes: int = 1) -> dict:
    """A row, measured in a process that has imported torch already."""
    with FORKS.Pool(1) as pool:
        return pool.apply(run_worker, (job,))


@pytest.mark.slow
def test_every_row_of_the_ladder_trains_alike(byte_shards, tmp_path, monkeypatch, capsys):
    """A single feature changes from one row to the next, and no loss."""
    monkeypatch.setattr(bench_throughput, "measure", measure_in_fork)
    flags = f"--ladder small:4x16x4 --steps 3 --warm-up 1 --dtype fp32 --json {tmp_path}/out.json --data {byte_shards}"
    monkeypatch.setattr(sys, "argv", ["bench_throughput.py", *flags.split()])
    bench_throughput.main()
    [result] = json.loads((tmp_path / "out.json").read_text())["results"]
    table = capsys.readouterr().out
    changes = {
        "plain": USED_BY_PLAIN,
        "+ flash": {},
        "+ padded vocabulary": {"head": 320},
        "+ fused AdamW": {"fused": True},
        "+ chunked loss": {"chunks": True},
        "+ kept memory": {"kept memory": True},
        "train_gpt2.py": {"model": "GPT"},
    }
    # Compared with the plain loop by itself, on rows cut by hand.
    flags = "--n-layer 2 --n-head 2 --n-embd 32 --block-size 16 --total-batch-size 256 --max-steps 5 --warmup-steps 10"
    expected = plain_losses(configure([*flags.split(), "--data", byte_shards])[0], 4, 5)
    used: dict = {}
    assert list(result["rows"]) == list(changes)
    for name, [row] in result["rows"].items():
        used |= changes[name]
        assert row["used"] == used, name
        assert row["tok_s"] * row["ms"] / 1e3 <= 4 * 16 * 4, "the loop takes no less time than its steps"
        assert row["peak_gb"] > 0.1 and row["mfu"] is None and table.count(f"| {name} |") == 1
        assert np.abs(np.array(row["losses"]) - expected).max() < 1e-5, name
