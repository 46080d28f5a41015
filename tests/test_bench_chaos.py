"""benchmarks/bench_chaos.py: its checks see what they should."""

from __future__ import annotations

import shutil
import sys

import pytest
from helpers import run_to_the_end

from benchmarks import bench_chaos
from benchmarks.bench_chaos import FAULTS, Run, Scenario, Setting, Violation, draw_faults, must_exit

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
TRAIN = Scenario("train")


def test_the_seed_determines_the_faults():
    assert draw_faults(15, "0") == draw_faults(15, "0") != draw_faults(15, "1")
    assert {fault.kind for fault in draw_faults(7, "0")} == FAULTS.keys()
    kill = next(fault for fault in draw_faults(15, "0") if fault.kind == "SIGKILL")
    assert must_exit(TRAIN, kill, "train_gpt2.py") and not must_exit(Scenario("restarts", 2, 3), kill, "rank 1")


@pytest.fixture
def run(tmp_path):
    """A run in tmp_path/run that was not started."""
    return Run(Setting(tmp_path, tmp_path, "bytes", steps=6), TRAIN, tmp_path / "run")


@pytest.mark.slow
def test_a_different_log_or_weight_is_a_violation(byte_shards, tmp_path, run):
    flags = ["--data", byte_shards, "--max-steps", 6, "--out", "run"]
    run_to_the_end(*flags, cwd=tmp_path)
    shutil.copytree(tmp_path / "run", tmp_path / "same")
    bench_chaos.check_results(run, tmp_path / "same")

    log = tmp_path / "run" / "log.txt"
    lines = log.read_text()
    log.write_text(lines.replace("3 train 5", "3 train 6"))
    with pytest.raises(Violation, match="log.txt$"):
        bench_chaos.check_results(run, tmp_path / "same")
    log.write_text(lines)
    (tmp_path / "run" / "starts.jsonl").write_text("{")
    with pytest.raises(Violation, match="same: starts.jsonl$"):
        bench_chaos.check_results(run, tmp_path / "same")
    run_to_the_end(*flags, "--seed", 2, "--out", "other", cwd=tmp_path)
    different = "log.txt, README.md, model.safetensors, optimizer in trainer.pt, starts.jsonl$"
    with pytest.raises(Violation, match=different):
        bench_chaos.check_results(run, tmp_path / "other")


def test_shards_that_differ_are_found(byte_shards, tmp_path):
    shutil.copytree(byte_shards, tmp_path / "shards")
    assert bench_chaos.find_corrupt_shards(tmp_path / "shards") == []
    assert bench_chaos.different_files(tmp_path / "shards", byte_shards) == []
    last = max((tmp_path / "shards").glob("*.npy"))
    last.write_bytes(last.read_bytes()[:-2])
    assert bench_chaos.find_corrupt_shards(tmp_path / "shards") == [(last, "not as listed")]
    assert bench_chaos.different_files(tmp_path / "shards", byte_shards) == [last.name]
