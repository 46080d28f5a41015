"""The console's lines about a run: speed and MFU, against figures computed by hand."""

from __future__ import annotations

import re
from contextlib import nullcontext
from dataclasses import replace
from datetime import datetime, timedelta
from types import SimpleNamespace

import pytest
import torch
from training import ONE_PROCESS, TINY, run_info, trained

from support.checkpoints import lora
from support.checkpoints.state import TrainState
from support.console import progress, run_logger
from support.console.progress import describe_doubts
from support.console.run_logger import RunLogger, describe_progress
from support.runtime import devices
from support.runtime.schedule import Schedule
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
        (dict(max_steps=210, text="book.txt"), 10, "21", "--max-steps 100 --warmup-steps 10"),
        (dict(max_steps=410, dropout=0.2), 10, None, None),  # on the user's own shards
        (dict(max_steps=320, text="book.txt", dropout=0.1), 10, None, None),
        (dict(max_steps=410, text="book.txt", dropout=0.1), 10, "41", "--max-steps 250 --warmup-steps 25"),
    ],
)
def test_a_run_that_reads_its_data_too_often_is_told_how_often(tmp_path, flags, steps_per_pass, passes, advised):
    run = run_info("--out", tmp_path)
    config = replace(run.config, **flags)
    run.model.config = replace(TINY, dropout=config.dropout)
    doubts = doubts_about(replace(run, config=config, schedule=Schedule(config)), steps_per_pass)
    assert len(doubts) == (passes is not None)
    if passes:
        advised += "." if "dropout" in flags else ", or --dropout 0.2."
        assert f"{passes} passes over the data" in doubts[0] and f"se {advised}" in doubts[0]
        assert ("--text" in doubts[0]) == ("text" not in flags)


def test_a_step_that_takes_minutes_on_a_cpu_is_announced(tmp_path, monkeypatch):
    """A step of 256 tokens, on two cores with 6e10 FLOP/s each in fp32, and 1.6e11 in bf16."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    run = run_info("--out", tmp_path, "--max-steps", 20)
    in_bf16 = replace(run, machine=replace(run.machine, dtype="bf16"))
    for seconds, described, minutes in ((59, run, None), (300, run, 5), (300, in_bf16, 2)):
        doubts = doubts_about(replace(described, flops_per_token=seconds * 2 * 60_000_000_000 // 256), 100)
        assert len(doubts) == (minutes is not None)
        assert minutes is None or f"about {minutes} minutes on this CPU" in doubts[0] and "--text" in doubts[0]


def test_mfu_counts_all_gpus(tmp_path, monkeypatch):
    """256 tokens in 0.5 s on two GPUs of 10^9 FLOP/s each."""
    assert GPT(TINY).flops_per_token() == FLOPS_PER_TOKEN
    lines = list[str]()
    monkeypatch.setattr(devices, "peak_flops", lambda *_: 1e9)
    calls = dict(print0=lines.append, failing_together=nullcontext)
    dist = SimpleNamespace(rank=0, world_size=2, device=torch.device("cpu"), **calls)
    logger = RunLogger(run_info("--out", tmp_path), dist)
    logger.step(
        TrainState(None, None, None, step=0), {"train": 1.0, "lr": 1e-3, "norm": 1.0, "seconds": 0.5}, None, False
    )
    assert lines[-1].endswith(f"| tok/sec: 512.00 | mfu: {256 / 0.5 * FLOPS_PER_TOKEN / 2e9:.1%}")


def test_mfu_counts_frozen_weights_without_their_gradients():
    """By hand: LoRA of rank 4 has 2,816 weights in two blocks. Each of the others takes part in the forward pass and in the
    gradients of the activations, two FLOPs each."""
    model = GPT(TINY)
    lora.add_adapter(model, rank=4, alpha=8.0, seed=0, checkpoint=None)
    gradients_of_frozen_weights = 2 * (FLOPS_PER_TOKEN - 12 * 2 * 32 * 16) // 6
    assert model.flops_per_token() == FLOPS_PER_TOKEN - gradients_of_frozen_weights + 6 * 2816


def test_the_length_is_given_in_passes_over_the_data(tmp_path):
    """A pass over 506,048 tokens takes 494.19 steps of 1,024, so 568 steps are 1.149 passes."""
    length = run_info("--out", tmp_path, "--max-steps", 568).schedule
    expected = "568 steps: 1.15 passes over the data, 494 steps each"
    assert length.describe_length(0, 0.0, 506_048 / 1024, 0.0) == expected


def test_a_line_says_how_far_a_run_is_and_when_it_ends():
    now = datetime(2026, 2, 27, 23, 50)
    line = describe_progress(" of 19,073", 250, 723.0, 86_400.0, 131_072_000, now)
    assert line == "step   250 of 19,073 | 0:12:03 elapsed | ends about 2026-02-28 23:50 | 131,072,000 tokens"
    line = describe_progress(", minute 3.2 of 10", 0, 192.0, None, 0, now)
    assert line == "step     0, minute 3.2 of 10 | 0:03:12 elapsed | 0 tokens"


def end_of(line: str) -> datetime:
    return datetime.strptime(re.search(r"ends about (\S+ \S+)", line)[1], "%Y-%m-%d %H:%M")


@pytest.fixture
def fake_time(monkeypatch):
    """The clock of the logger's process, which started at 0."""
    fake = SimpleNamespace(now=0.0)
    monkeypatch.setattr(run_logger, "time", SimpleNamespace(perf_counter=lambda: fake.now))
    monkeypatch.setattr(run_logger, "STARTED", 0.0)
    return fake


def lines_about_progress(logger, fake, steps, seconds):
    """Takes the steps, of which the first takes 100 s more; an evaluation of 30 s is before every hundredth."""
    state, lines = TrainState(None, None, None, step=logger.first_step, tokens=256 * logger.first_step), []
    logger.print0 = lambda text: lines.append((state.step, fake.now, text)) if " elapsed" in text else None
    for step in range(logger.first_step, logger.first_step + steps):
        evaluated = step % 100 == 0
        fake.now += 30.0 * evaluated
        logger.print_progress(state, evaluated)
        fake.now += seconds + 100.0 * (step == logger.first_step)
        logger.step(state, {"train": 1.0, "lr": 1e-3, "norm": 1.0, "seconds": seconds}, None, False)
        state.advance(0.0, fake.now, 256, 0)
    return lines


def test_a_line_each_minute_and_with_each_evaluation(tmp_path, fake_time):
    """By hand: 20 s per step, 1,000 steps, and 30 s more after each hundred."""
    run = run_info("--out", tmp_path, "--max-steps", 1000)
    lines = lines_about_progress(RunLogger(run, ONE_PROCESS), fake_time, 201, 20.0)
    steps = [step for step, _, _ in lines]
    assert steps[:5] == [0, 1, 4, 7, 10] and {100, 200} < {*steps}
    assert all(b[1] - a[1] <= 60 + 50 for a, b in zip(lines[1:], lines[2:], strict=False))
    assert "ends" not in lines[0][2] and "ends" not in lines[1][2]  # no speed is known yet
    step, at, line = lines[-1]
    assert line.startswith("step   200 of 1,000 | 1:09:50 elapsed | ") and line.endswith(" | 51,200 tokens")
    left = 800 * (20 + 60 / 199)  # two evaluations since the first step
    assert abs(end_of(line) - datetime.now() - timedelta(seconds=left)) < timedelta(minutes=1.1)


def test_a_long_validation_has_a_line_each_minute(monkeypatch, capsys):
    """By hand: five batches of 40 s."""
    clock = iter([0, *range(0, 200, 40), *[0] * 6])
    monkeypatch.setattr(progress, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    assert list(progress.progress_bar(range(5), "validation", 0)) == [0, 1, 2, 3, 4]
    assert capsys.readouterr().out == "validation | 2 of 5 | 0:01:20\nvalidation | 4 of 5 | 0:02:40\n"
    assert list(progress.progress_bar(range(5), "validation", 1)) == [0, 1, 2, 3, 4]
    assert capsys.readouterr().out == ""


def test_a_timed_run_ends_when_its_minutes_are_over(tmp_path, fake_time):
    """By hand: of 90 minutes, an earlier process took 30; after 120 + 3 x 20 s, 57 are left."""
    run = run_info(
        "--out",
        tmp_path,
        checkpoint=SimpleNamespace(
            validation_loss=lambda key: None,
            run="a",
            step=7,
            tokens=1792,
            seconds=1800.0,
            progress=0.3,
            sources={},
            config={},
        ),
    )
    config = replace(run.config, minutes=90.0)
    run = replace(run, config=config, schedule=Schedule(config))
    run.__dict__["bytes_per_token"] = 1.0
    lines = lines_about_progress(RunLogger(run, ONE_PROCESS), fake_time, 7, 20.0)
    _, _, line = lines[-1]
    assert line.startswith("step    11, minute 33.0 of 90 | 0:03:00 elapsed | ") and line.endswith(" | 2,816 tokens")
    assert abs(end_of(line) - datetime.now() - timedelta(minutes=57)) < timedelta(minutes=1.1)


def test_the_line_is_in_a_run_whose_output_is_no_terminal(byte_shards, tmp_path, capsys):
    trained(tmp_path, "--data", byte_shards, "--max-steps", 12, "--val-every", 6, "--checkpoint-every", 6)
    found = re.findall(
        r"^step +(\d+) of 12 \| 0:\d\d:\d\d elapsed (.*)\| ([\d,]+) tokens$", capsys.readouterr().out, re.M
    )
    assert [(step, tokens) for step, _, tokens in found] == [("0", "0"), ("6", "1,536"), ("12", "3,072")]
    assert found[0][1] == "" and all(
        abs(end_of(end) - datetime.now()) < timedelta(minutes=2) for _, end, _ in found[1:]
    )
