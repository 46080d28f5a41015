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
from harness import find_processes
from helpers import FORKS, ROOT, run_script, wait_for

# The others run whole scripts: "tests" is part of this suite.
CHECKS = "environment training large_model pairs loss_alone larger variants scoring".split()


@pytest.mark.slow
def test_the_checks_run_on_a_cpu(tmp_path):
    flags = ["--device", "cpu", "--small", "--only", *CHECKS]
    done = run_script("benchmarks/gpu_check.py", *flags, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    verdicts = re.findall(r"^\[[abc]\] (\w+), \d+ s: (.*)$", done.stdout, re.MULTILINE)
    assert [name for name, _ in verdicts] == CHECKS and {verdict[:2] for _, verdict in verdicts} == {"ok"}
    assert "FAILED" not in done.stdout and "\n8 ok, 0 failed, 0 skipped" in done.stdout
    assert done.stdout[done.stdout.index("| stage | figure | value |") :].count("\n| c | ") >= 1
    assert not list(tmp_path.iterdir())


def test_without_a_gpu_it_says_so(tmp_path):
    done = run_script("benchmarks/gpu_check.py", "--stage", "a", cwd=tmp_path, CUDA_VISIBLE_DEVICES="")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: no CUDA GPU on this machine. To try the script itself, use --device cpu --small.\n"


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


def raises(context):
    """has a bug"""
    raise ValueError


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
    raises: "FAILED: ValueError",
    failed_part: "FAILED: see above",
    skipped_part: "ok, 1 of 2 skipped",
    dies: "FAILED: its process ended with exit code 7",
}
ARGS = argparse.Namespace(only=None, device="cpu", small=True)


def test_a_stage_goes_on_after_checks_that_fail(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu_check, "CHECKS", {"a": list(EXPECTED)})
    monkeypatch.setattr(gpu_check, "PROCESSES", FORKS)
    assert gpu_check.run_stage("a", ARGS, tmp_path) == list(EXPECTED.values())
    printed = capsys.readouterr().out
    assert "\n    half: 0.5\n[a] fine, " in printed
    assert "\n    skipped_part, right: skipped: no reason\n[a] skipped_part, " in printed
    assert (tmp_path / "figures.md").read_text() == "| a | half | 0.5 |\n"
    assert (tmp_path / "fine.txt").read_text() == "its output\n" and not (tmp_path / "fine").exists()
    monkeypatch.setattr(gpu_check, "STAGE_SECONDS", gpu_check.LEAST_SECONDS - 1)
    assert gpu_check.run_stage("a", ARGS, tmp_path) == ["skipped: out of time"] * len(EXPECTED)


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
