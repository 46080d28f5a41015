"""--profile: the recorded steps in a trace, and a table of them."""

from __future__ import annotations

import gzip
import json
import re

import pytest
import torch
from training import ONE_PROCESS, config_of, trained

from benchmarks.bench_chaos import log_without_seconds
from support.runtime.profiler import ROWS, make_profiler
from train_gpt2 import train


@pytest.mark.slow
def test_profile_records_the_steps_it_says(byte_shards, tmp_path, capsys):
    train(config_of("--data", byte_shards, "--out", tmp_path / "run", "--max-steps", 9, "--profile", 4), ONE_PROCESS)
    lines = capsys.readouterr().out.splitlines()
    events = json.loads(gzip.decompress((tmp_path / "run" / "trace.json.gz").read_bytes()))["traceEvents"]
    steps = {e["name"] for e in events if e.get("name", "").startswith("ProfilerStep#") and e.get("ph") == "X"}
    assert len(steps) == 4
    assert sum(e.get("name") == "aten::_fused_adamw_" and e.get("ph") == "X" for e in events) == 4 * 2  # two groups
    [summary] = [line for line in lines if line.startswith("profile")]
    assert "4 steps" in summary and f"{tmp_path}/run/trace.json.gz" in summary
    assert lines.index(summary) > next(i for i, line in enumerate(lines) if line.startswith("step     6"))
    table = lines[lines.index(summary) + 1 :]
    shares = [float(share) for row in table[3 : 3 + ROWS] for share in re.findall(r"([\d.]+)%", row)[:1]]
    assert len(shares) == ROWS and shares == sorted(shares, reverse=True) and sum(shares) <= 100
    plain = trained(tmp_path / "plain", "--data", byte_shards, "--max-steps", 9)
    assert plain == log_without_seconds(tmp_path / "run")


def test_a_run_may_end_before_all_steps_are_recorded(byte_shards, tmp_path, capsys):
    for steps in (3, 5):  # of which the first 3 are left out
        out = tmp_path / str(steps)
        trained(out, "--data", byte_shards, "--max-steps", steps, "--profile", 9)
        assert ("recorded 2 steps" in capsys.readouterr().out) == (steps == 5) == (out / "trace.json.gz").exists()


def test_a_trace_that_cannot_be_written_is_a_notice(tmp_path):
    notices = []
    profiler = make_profiler(1, str(tmp_path / "missing"), torch.device("cpu"), 0, notices.append)
    profiler.start()
    for _ in range(5):
        torch.zeros(1)
        profiler.step()
    profiler.stop()
    assert len(notices) == 1 and notices[0].startswith("profile not written: ")
    assert make_profiler(1, str(tmp_path), torch.device("cpu"), 1, pytest.fail) is None  # only the first rank records
