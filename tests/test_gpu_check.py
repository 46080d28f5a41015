"""benchmarks/gpu_check.py: every stage on a CPU with a tiny model, and what it says of checks that fail."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from helpers import FORKS, ROOT, finish_run, run_script, wait_for

# The others run whole scripts: "tests" is part of this suite.
CHECKS = "environment training large_model pairs loss_alone attention_backends larger scoring".split()


@pytest.mark.slow
def test_the_checks_run_on_a_cpu(tmp_path):
    flags = ["--device", "cpu", "--small", "--only", *CHECKS]
    done = run_script("benchmarks/gpu_check.py", *flags, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    verdicts = re.findall(r"^\[[abc]\] (\w+), \d+ s: (.*)$", done.stdout, re.MULTILINE)
    assert [name for name, _ in verdicts] == CHECKS and dict(verdicts)["large_model"].startswith("skipped")
    assert "FAILED" not in done.stdout and "\n7 ok, 0 failed, 1 skipped" in done.stdout
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

    def left() -> list[Path]:
        found = []
        for file in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                found += [file] if f"TMPDIR={short_path}".encode() in file.read_bytes() else []
        return found

    assert wait_for(lambda: not left(), timeout=10) and not list(short_path.glob("gpu_check*"))


@pytest.fixture
def gpu_check(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import gpu_check

    monkeypatch.setattr(gpu_check, "CHECKS", {"a": [gpu_check.environment, gpu_check.tests]})
    monkeypatch.setattr(gpu_check, "LEAST_SECONDS", 0.5)
    monkeypatch.setattr(gpu_check, "PROCESSES", FORKS)
    return gpu_check


ARGS = argparse.Namespace(only=None, device="cpu", small=True)


def dies_in_the_first_check(name, context):
    if name == "environment":
        os._exit(7)
    (context.folder / "answer.json").write_text(json.dumps({"verdict": "ok", "figures": [("x", "1")], "parts": []}))


def hangs(name, context):
    context.figure("measured", 1)
    child = subprocess.Popen(["sleep", "600"], start_new_session=True)
    (context.folder.parent / "child").write_text(str(child.pid))
    time.sleep(600)


def test_a_check_that_dies_or_hangs_fails_and_the_stage_goes_on(gpu_check, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu_check, "run_check", dies_in_the_first_check)
    verdicts, figures = gpu_check.run_stage("a", ARGS, tmp_path)
    assert verdicts == ["FAILED: its process ended with exit code 7", "ok"] and figures == [("a", "x", "1")]
    (tmp_path / "late").mkdir()
    monkeypatch.setattr(gpu_check, "run_check", hangs)
    monkeypatch.setattr(gpu_check, "STAGE_SECONDS", 2)
    verdicts, figures = gpu_check.run_stage("a", ARGS, tmp_path / "late")
    assert verdicts == ["FAILED: not finished after 2 s", "skipped: out of time"] and figures == [
        ("a", "measured", "1")
    ]
    child = (tmp_path / "late/child").read_text()
    assert wait_for(lambda: not Path(f"/proc/{child}").exists() or " Z " in Path(f"/proc/{child}/stat").read_text())
    printed = capsys.readouterr().out
    assert "\n    measured: 1\n[a] environment, " in printed and "\n[a] tests, 0 s: skipped: out of time\n" in printed
    assert (tmp_path / "late/figures.md").read_text() == "| a | measured | 1 |\n"  # as it came, not at the end


def test_kernels_are_divided_into_classes(gpu_check):
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
    assert by_kernel[:2] == [
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop", 20),
        ("nvjet_sm90_tst_128x256_64x4", 17),
    ]


def run_a_check_that(how, folder):
    import gpu_check

    def check(context):
        context.figure("half", 0.5)
        print("its output")
        if how == "fails":
            gpu_check.expect(2 > 1, "not this")
            gpu_check.expect(1 > 2, "one is less than two")
        if how == "raises":
            raise ValueError
        if how == "is skipped":
            raise gpu_check.Skipped("no reason")
        if how == "has a part that failed":
            context.parts += [("left", "ok"), ("right", "FAILED: wrong")]
        if how == "has a part that was skipped":
            context.parts += [("left", "ok"), ("right", "skipped: no reason")]

    gpu_check.environment = check
    gpu_check.run_check("environment", gpu_check.Context("cpu", True, folder, time.monotonic() + 100))


@pytest.mark.parametrize(
    ("how", "verdict"),
    [
        ("is fine", "ok"),
        ("fails", "FAILED: one is less than two"),
        ("raises", "FAILED: ValueError"),
        ("is skipped", "skipped: no reason"),
        ("has a part that failed", "FAILED: see above"),
        ("has a part that was skipped", "ok, 1 of 2 skipped"),
    ],
)
def test_the_verdict_of_a_check(how, verdict, gpu_check, tmp_path):
    process = FORKS.Process(target=run_a_check_that, args=(how, tmp_path))
    process.start()
    assert finish_run([process]) == [0]
    answer = json.loads((tmp_path / "answer.json").read_text())
    assert answer["verdict"] == verdict and answer["figures"] == [["half", "0.5"]]
    assert (tmp_path / "output.txt").read_text().startswith("its output\n")
