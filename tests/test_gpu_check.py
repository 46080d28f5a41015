"""benchmarks/gpu_check.py: its checks on a CPU with a tiny model, and what it says of checks that fail."""

from __future__ import annotations

import argparse
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import gpu_check
import pytest
import torch
from harness import find_processes
from helpers import FORKS, ROOT, wait_for
from test_benchmarks import measure_in_fork

from support.cli import UserError


@pytest.mark.slow
def test_the_checks_find_what_they_expect_on_a_cpu(tmp_path, monkeypatch):
    """Those that run no whole script, in this process; only these measure on a CPU with --small."""
    monkeypatch.setattr(gpu_check, "measure", measure_in_fork)
    figures = {}
    for name in "environment training large_model pairs loss_alone larger scoring".split():
        (tmp_path / name).mkdir()
        reports = []
        pipe = SimpleNamespace(send=reports.append)
        getattr(gpu_check, name)(gpu_check.Context("cpu", True, tmp_path / name, math.inf, pipe))
        figures[name] = sum(kind == "figure" for kind, *_ in reports)
    assert figures == dict(environment=2, training=1, large_model=0, pairs=3, loss_alone=2, larger=0, scoring=6)


def test_pairs_are_measured_when_all_is_compiled_and_end_in_time(tmp_path, monkeypatch):
    """A row takes 60 s if it has to be compiled, then 24: by hand, of 480 s that leaves time for one round of five."""
    clock, compiled, rounds = [0.0], set(), []

    def throughput(context, setting, steps, warm_up=2, **changes):
        if steps == 6:
            assert str(changes) in compiled
        clock[0] += 24 if str(changes) in compiled else 60
        compiled.add(str(changes))
        row = {"tok_s": 1.0, "mfu": None, "matmul": 0.5, "B": 64, "peak_gb": 1.0, "output": "", "losses": [1.0]}
        return row

    monkeypatch.setattr(gpu_check, "throughput", throughput)
    monkeypatch.setattr(gpu_check, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    pipe = SimpleNamespace(send=lambda report: rounds.append(report[1]))
    gpu_check.pairs(gpu_check.Context("cuda", False, tmp_path, gpu_check.STAGE_SECONDS, pipe))
    assert clock[0] == 5 * 60 + 5 * 24 <= gpu_check.STAGE_SECONDS
    assert "train_gpt2.py, round 1" in rounds and rounds.count("round 2") == 1  # which was skipped


def test_without_a_gpu_it_says_so(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--stage", "a"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="no CUDA GPU on this machine. To try the script itself, use --device cpu --sm"):
        gpu_check.main()


@pytest.fixture
def short_path():
    """A folder for TMPDIR: multiprocessing makes sockets there, whose paths have at most 107 bytes."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


@pytest.mark.slow
def test_nothing_is_left_of_an_interrupted_check(short_path):
    """Of `resume`, while it trains: no process with our temporary folder in its environment, and no file in it."""
    command = [sys.executable, ROOT / "benchmarks/gpu_check.py", "--device", "cpu", "--small", "--only", "resume"]
    process = subprocess.Popen(command, env=os.environ | {"TMPDIR": str(short_path)}, stdout=subprocess.DEVNULL)
    assert wait_for(lambda: list(short_path.glob("gpu_check*/resume/straight")))
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=30) in (130, -signal.SIGINT, 1)
    assert wait_for(lambda: not find_processes(f"TMPDIR={short_path}")) and not list(short_path.glob("gpu_check*"))


# ---- checks that fail


def fine(context):
    """prints and reports"""
    context.figure("half", 0.5)
    print("its output")


def fails(context):
    """does not get what it expects"""
    gpu_check.expect(2 > 1, "not this")
    gpu_check.expect(1 > 2, "one is less than two")


def failed_part(context):
    """goes on after a failure"""
    context.part("left", "FAILED: wrong")
    context.part("right", "ok")


def skipped_part(context):
    """does not do everything"""
    context.part("left", "ok")
    context.part("right", "skipped: no reason")


def dies(context):
    """ends without a verdict"""
    os._exit(7)


EXPECTED = {
    fine: "ok",
    fails: "FAILED: one is less than two",
    failed_part: "FAILED: see above",
    skipped_part: "ok, 1 of 2 skipped",
    dies: "FAILED: its process ended with exit code 7",
}
ARGS = argparse.Namespace(only=None, device="cpu", small=True)


@pytest.mark.slow
def test_it_goes_on_after_checks_that_fail(tmp_path, monkeypatch, capsys):
    """All of these, and one that trains: their verdicts, the table of figures, and what --keep keeps."""
    monkeypatch.setattr(gpu_check, "CHECKS", {"a": list(EXPECTED), "c": [gpu_check.variants]})
    monkeypatch.setattr(gpu_check, "PROCESSES", FORKS)
    monkeypatch.setattr(signal, "signal", lambda *handler: None)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # which --small sets
    kept = tmp_path / "kept"
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", *f"--device cpu --small --keep {kept}".split()])
    with pytest.raises(SystemExit, match="1"):
        gpu_check.main()
    printed = capsys.readouterr().out
    verdicts = re.findall(r"^\[[ac]\] (\w+), \d+ s: (.*)$", printed, re.MULTILINE)
    assert verdicts == [*((check.__name__, verdict) for check, verdict in EXPECTED.items()), ("variants", "ok")]
    assert printed.endswith("\n3 ok, 3 failed, 0 skipped\n")
    assert "\n    half: 0.5\n[a] fine, " in printed
    assert "\n    skipped_part, right: skipped: no reason\n[a] skipped_part, " in printed
    figures = (kept / "figures.md").read_text()
    assert re.fullmatch(r"\| a \| half \| 0.5 \|\n\| c \| --recipe fast .*: ms per step \| [\d.]+ \|\n", figures)
    assert f"\n| stage | figure | value |\n|---|---|---|\n{figures}" in printed
    assert (kept / "fine.txt").read_text() == "its output\n" and not (kept / "fine").exists()


def test_without_time_nothing_is_started(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_check, "CHECKS", {"a": [fine, dies]})
    monkeypatch.setattr(gpu_check, "STAGE_SECONDS", gpu_check.LEAST_SECONDS - 1)
    assert gpu_check.run_stage("a", ARGS, tmp_path) == ["skipped: out of time"] * 2


def hangs(context):
    subprocess.Popen(["sleep", "600"], start_new_session=True)
    context.figure("measured", 1)
    time.sleep(600)


def test_a_check_that_hangs_is_killed_with_its_children_and_keeps_its_figures(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_check, "PROCESSES", FORKS)
    (tmp_path / "hangs").mkdir()
    reports = gpu_check.reports_of(hangs, ARGS, tmp_path / "hangs", time.monotonic() + 600)
    assert next(reports) == ("figure", "measured", "1")
    assert find_processes(f"GPU_CHECK={tmp_path / 'hangs'}")
    monkeypatch.setattr(gpu_check, "time", SimpleNamespace(monotonic=lambda: math.inf))  # it is late
    [(kind, _, verdict)] = reports
    assert kind == "verdict" and verdict.startswith("FAILED: not finished after ")
    assert not find_processes(f"GPU_CHECK={tmp_path / 'hangs'}")


def test_kernels_are_divided_into_classes():
    """A step by hand, in microseconds: two kernels overlap, and nothing runs from 40 to 50."""
    kernels = [
        ("nvjet_sm90_tst_128x256_64x4", 0, 10),
        ("triton_poi_fused_add_native_layer_norm_backward_3", 10, 5),
        ("triton_red_fused__to_copy_mul_sum_7", 15, 5),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop", 20, 20),
        ("void at::native::reduce_kernel<512>", 30, 8),
        ("nvjet_sm90_tst_128x256_64x4", 50, 7),
    ]
    events = [{"cat": "kernel", "name": name, "ts": 1000 + ts, "dur": dur} for name, ts, dur in reversed(kernels)]
    events += [{"cat": "gpu_memcpy", "name": "Memcpy HtoD (Pinned -> Device)", "ts": 1057, "dur": 1}]
    events += [{"cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 9999}, {"name": "no category", "ts": 0}]
    classes, by_kernel = gpu_check.classify_kernels(events)
    assert classes == {"GEMM": 17, "attention": 20, "reductions": 13, "pointwise": 5, "copies": 1, "idle": 10}
    longest = ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop", 20), ("nvjet_sm90_tst_128x256_64x4", 17)
    assert tuple(by_kernel[:2]) == longest
