"""benchmarks/bench_throughput.py: its rows train alike."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import FORKS, ROOT, finish_run
from training import configure

from benchmarks.plain_loop import plain_losses

pytestmark = pytest.mark.slow
USED = {
    "model": "GPT", "head": 320, "chunks": True, "kept memory": True, "fused": True, "dtype": "torch.float32",
}  # fmt: skip
USED_BY_PLAIN = USED | {"model": "PlainGPT", "head": 257, "chunks": False, "kept memory": False, "fused": False}


def measured_rows(cwd: Path) -> dict[str, dict]:
    [result] = json.loads((cwd / "out.json").read_text())["results"]
    return {name: rounds[0] for name, rounds in result["rows"].items()}


def run_worker(job: dict, answer: Path) -> None:
    """One row, measured in this process; what it prints goes to the file `answer`."""
    import bench_throughput

    torch.set_num_threads(1)
    with open(answer, "w") as file, contextlib.redirect_stdout(file):
        bench_throughput.worker(job)


def test_every_row_of_the_ladder_trains_alike(byte_shards, tmp_path, monkeypatch, capsys):
    """From one row to the next a single feature changes, and no loss."""
    rows = benchmark_in_forks(tmp_path, monkeypatch, "--ladder", byte_shards)
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
    used: dict = {}
    assert list(rows) == list(changes)
    for name, row in rows.items():
        used |= changes[name]
        assert row["used"] == used, name
        assert row["tok_s"] * row["ms"] / 1e3 <= 4 * 16 * 4, "the loop takes no less time than its steps"
        assert row["peak_gb"] > 0.1 and row["mfu"] is None and table.count(f"| {name} |") == 1
    check_losses(rows, byte_shards)


def benchmark_in_forks(tmp_path: Path, monkeypatch, flag: str, data: Path) -> dict[str, dict]:
    """What was measured for each row, in processes that have imported torch already."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import bench_throughput

    def measure(job, processes):
        row = FORKS.Process(target=run_worker, args=(job, tmp_path / "row.json"))
        row.start()
        assert finish_run([row]) == [0]
        return json.loads((tmp_path / "row.json").read_text())

    monkeypatch.setattr(bench_throughput, "measure", measure)
    monkeypatch.chdir(tmp_path)
    flags = f"{flag} small:4x16x4 --steps 3 --warm-up 1 --dtype fp32 --json out.json --data".split()
    monkeypatch.setattr(sys, "argv", ["bench_throughput.py", *flags, str(data)])
    bench_throughput.main()
    return measured_rows(tmp_path)


def check_losses(rows: dict[str, dict], data: Path) -> None:
    """Compares them with those of the plain loop by itself, on rows cut by hand."""
    flags = "--n-layer 2 --n-head 2 --n-embd 32 --block-size 16 --total-batch-size 256 --max-steps 5 --warmup-steps 10"
    config, _ = configure([*flags.split(), "--data", data])
    expected = plain_losses(config, 4, 5)
    for name, row in rows.items():
        assert np.abs(np.array(row["losses"]) - expected).max() < 1e-5, name
