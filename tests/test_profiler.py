"""--profile: the recorded steps in a trace, and a table of them."""

from __future__ import annotations

import errno
import gzip
import json
import os
import re
import shutil

import pytest
import torch
from helpers import steps_done
from runs import log_without_seconds
from training import NEW_RUN, ONE_PROCESS, checkpoint_names, config_of, resumed, train, trained

from support.runtime.profiler import ROWS


@pytest.mark.slow
def test_profile_records_the_steps_it_says(byte_shards, tmp_path, capsys):
    train(
        config_of("--data", byte_shards, "--out", tmp_path / "run", "--max-steps", 9, "--profile", 4),
        ONE_PROCESS,
        NEW_RUN,
    )
    lines = capsys.readouterr().out.splitlines()
    events = json.loads(gzip.decompress((tmp_path / "run" / "trace.json.gz").read_bytes()))["traceEvents"]
    steps = {e["name"] for e in events if e.get("name", "").startswith("ProfilerStep#") and e.get("ph") == "X"}
    assert len(steps) == 4
    assert sum(e.get("name") == "aten::_fused_adamw_" and e.get("ph") == "X" for e in events) == 4 * 2  # two groups
    [summary] = [line for line in lines if line.startswith("profile")]
    assert f"{tmp_path}/run/trace.json.gz" in summary
    assert lines.index(summary) > next(i for i, line in enumerate(lines) if line.startswith("step     6"))
    table = lines[lines.index(summary) + 1 :]
    shares = [float(share) for row in table[3 : 3 + ROWS] for share in re.findall(r"([\d.]+)%", row)[:1]]
    assert len(shares) == ROWS and shares == sorted(shares, reverse=True) and sum(shares) <= 100
    plain = trained(tmp_path / "plain", "--data", byte_shards, "--max-steps", 9)
    assert plain == log_without_seconds(tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize("steps, recorded", [(2, 0), (3, 0), (5, 2), (7, 4), (8, 5)])
def test_a_run_that_ends_before_the_last_recorded_step_says_so(byte_shards, tmp_path, capsys, steps, recorded):
    trained(tmp_path, "--data", byte_shards, "--max-steps", steps, "--profile", 5)
    said = re.findall(r"the run ended after (\d) of the 5 recorded steps of --profile", capsys.readouterr().err)
    assert said == [str(recorded)] * (recorded < 5) and (tmp_path / "trace.json.gz").exists() == (recorded > 0)


@pytest.mark.slow
@pytest.mark.parametrize("steps", [1, 99])  # the trace is written after the step, or at the end of the run
def test_a_trace_that_cannot_be_written_is_a_warning(byte_shards, tmp_path, capsys, monkeypatch, steps):
    def fail(recorded, path):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)

    monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", fail)
    trained(tmp_path, "--data", byte_shards, "--max-steps", 6, "--profile", steps)
    assert checkpoint_names(tmp_path) == ["model_00006"] and steps_done(tmp_path) == 6
    assert capsys.readouterr().err.count(f"warning: the profile could not be written to {tmp_path}/trace.json.gz") == 1


@pytest.mark.slow
def test_a_second_trace_of_a_run_does_not_replace_the_first(byte_shards, tmp_path):
    trained(tmp_path, "--data", byte_shards, "--max-steps", 8, "--checkpoint-every", 4, "--profile", 1)
    first = (tmp_path / "trace.json.gz").read_bytes()
    shutil.rmtree(tmp_path / "model_00008")
    resumed(tmp_path, "--profile", 1)
    assert (tmp_path / "trace.json.gz").read_bytes() == first and (tmp_path / "trace_2.json.gz").exists()
