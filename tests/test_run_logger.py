"""The console's lines about a run: speed and MFU, against figures computed by hand."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from training import ONE_PROCESS, TINY, run_info

from support.checkpoints.state import TrainState
from support.console.progress import describe_doubts, describe_length
from support.console.run_logger import RunLogger
from support.runtime import devices
from train_gpt2 import GPT

FLOPS_PER_TOKEN = 6 * (257 * 32 + 63 * 32 + 2 * (12 * 32 * 32 + 13 * 32) + 2 * 32) + 12 * 2 * 32 * 16


def doubts_about(run, steps_per_pass):
    return list(describe_doubts(run, ONE_PROCESS, steps_per_pass))


@pytest.mark.parametrize(
    "flags, steps_per_pass, passes, advised",
    [
        (dict(max_steps=200), 10, None, None),
        (dict(max_steps=201), 10, "20", "--max-steps 100 --warmup-steps 10"),
        (dict(max_steps=19073), 258 / 16, "1,183", "--max-steps 161 --warmup-steps 16"),
        (dict(max_steps=210, text="book.txt"), 10, None, None),  # the preset has chosen
    ],
)
def test_a_run_that_reads_its_data_too_often_is_told_how_often(tmp_path, flags, steps_per_pass, passes, advised):
    run = run_info("--out", tmp_path)
    doubts = doubts_about(replace(run, config=replace(run.config, **flags)), steps_per_pass)
    assert len(doubts) == (passes is not None)
    if passes:
        assert f"{passes} passes over the data" in doubts[0] and f"use {advised}." in doubts[0]
        assert "--text" in doubts[0]


def test_a_step_that_takes_minutes_on_a_cpu_is_announced(tmp_path, monkeypatch):
    """A step of 256 tokens, on two cores with 6e10 FLOP/s each in fp32, and 1.6e11 in bf16."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    run = run_info("--out", tmp_path, "--max-steps", 20)
    in_bf16 = replace(run, machine=replace(run.machine, dtype="bf16"))
    for seconds, described, minutes in ((59, run, None), (300, run, 5), (300, in_bf16, 2)):
        monkeypatch.setattr(GPT, "flops_per_token", lambda self: seconds * 2 * 60_000_000_000 // 256)  # noqa: B023
        doubts = doubts_about(described, 100)
        assert len(doubts) == (minutes is not None)
        assert minutes is None or f"about {minutes} minutes on this CPU" in doubts[0] and "--text" in doubts[0]


def test_mfu_counts_all_gpus(tmp_path, monkeypatch):
    """256 tokens in 0.5 s on two GPUs of 10^9 FLOP/s each."""
    assert GPT(TINY).flops_per_token() == FLOPS_PER_TOKEN
    lines = list[str]()
    monkeypatch.setattr(devices, "peak_flops", lambda device: 1e9)
    calls = dict(print0=lines.append, on_rank_zero=lambda f: f())
    dist = SimpleNamespace(rank=0, world_size=2, device=torch.device("cpu"), **calls)
    logger = RunLogger(run_info("--out", tmp_path), dist)
    logger.step(TrainState(None, None, None, step=0), 1.0, 1e-3, 1.0, 0.5, None)
    assert lines[-1].endswith(f"| tok/sec: 512.00 | mfu: {256 / 0.5 * FLOPS_PER_TOKEN / 2e9:.1%}")


def test_the_length_is_given_in_passes_over_the_data(tmp_path):
    """A pass over 506,048 tokens takes 494.19 steps of 1,024, so 568 steps are 1.149 passes."""
    run = run_info("--out", tmp_path, "--max-steps", 568)
    assert describe_length(run, 506_048 / 1024) == "568 steps: 1.15 passes over the data, 494.2 steps each"
