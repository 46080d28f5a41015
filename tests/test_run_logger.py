"""The console's lines about a run: speed, MFU and the remaining time, against figures computed by hand."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from training import TINY, run_info

from support.checkpoints.state import TrainState
from support.console import run_logger
from support.console.run_logger import RunLogger
from support.runtime import devices
from train_gpt2 import GPT

FLOPS_PER_TOKEN = 6 * (257 * 32 + 63 * 32 + 2 * (12 * 32 * 32 + 13 * 32) + 2 * 32) + 12 * 2 * 32 * 16


@pytest.fixture
def lines() -> list[str]:
    """What is printed."""
    return []


def state_at(step: int) -> TrainState:
    return TrainState(None, None, None, step=step)


def logger_of(
    out: Path, lines: list[str], monkeypatch: pytest.MonkeyPatch, *, max_steps: int, started: float,
    clock: Iterable[float], first_step: int = 0, world_size: int = 1,
) -> RunLogger:  # fmt: skip
    """The logger of rank 0, whose process started at a time of its `clock`."""
    times = iter(clock)
    monkeypatch.setattr(run_logger, "STARTED", started)
    monkeypatch.setattr(run_logger.time, "perf_counter", lambda: next(times))
    dist = SimpleNamespace(
        rank=0, world_size=world_size, device=torch.device("cpu"), print0=lines.append, on_rank_zero=lambda f: f(),
        once=lambda f: f(),
    )  # fmt: skip
    checkpoint = SimpleNamespace(step=first_step, path=out, config={}) if first_step else None
    run = run_info("--out", out, "--max-steps", max_steps, checkpoint=checkpoint)
    logger = RunLogger(run, dist, state_at(first_step))
    lines.clear()
    return logger


def test_mfu_counts_all_gpus_and_time_counts_from_the_resume(tmp_path, monkeypatch, lines):
    """256 tokens in 0.5 s on two GPUs of 10^9 FLOP/s each."""
    assert GPT(TINY).flops_per_token() == FLOPS_PER_TOKEN
    monkeypatch.setattr(devices, "peak_flops", lambda device: 1e9)
    logger = logger_of(
        tmp_path, lines, monkeypatch, max_steps=300, started=0.0, clock=[20.0, 30.0], first_step=100, world_size=2
    )
    logger.step(state_at(100), 1.0, 1e-3, 1.0, 0.5, None)
    assert lines[0].endswith(f"| mfu: {256 / 0.5 * FLOPS_PER_TOKEN / 2e9:.1%}")
    logger.step(state_at(150), 1.0, 1e-3, 1.0, 0.5, None)
    assert lines[-1] == (
        "note    38,656 of 76,800 tokens; 0:00:30 elapsed since the resume, ETA 0:00:30"  # 149 at 0.2 s
    )


def test_a_skipped_step_is_explained_below_its_line(tmp_path, monkeypatch, lines):
    logger = logger_of(tmp_path, lines, monkeypatch, max_steps=9, started=0.0, clock=[1.0])
    logger.step(state_at(0), float("nan"), 1e-3, 1.0, 0.5, "skipped: the loss or the gradient is not finite")
    assert lines[0].startswith("step     0 | loss: nan | ")
    assert lines[1] == "step     0 | skipped: the loss or the gradient is not finite"
    assert (tmp_path / "log.txt").read_text() == "0 train nan\n0 lr 0.001\n0 norm 1\n0 seconds 0.5\n"
