"""train_gpt2.py on pretended GPUs: what happens only on CUDA, on every commit. See cuda_on_cpu.py for what that shows."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import ROOT, TINY_FLAGS, free_port, losses
from runs import log_without_seconds
from training import trained, trainer_file

PINNED = re.search(r"^torch==(\S+)", (ROOT / "requirements.txt").read_text(), re.MULTILINE)[1]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not shutil.which("c++"), reason="needs a C++ compiler"),
    pytest.mark.skipif(sys.platform != "linux", reason="needs Linux"),
    pytest.mark.skipif(
        torch.__version__.split("+")[0] != PINNED or torch.version.cuda is not None,
        reason=f"needs the CPU build of torch {PINNED}, whose private functions it replaces",
    ),
]


@pytest.fixture(scope="session")
def library(tmp_path_factory) -> Path:
    library, torch_folder = tmp_path_factory.mktemp("library") / "cuda_on_cpu.so", Path(torch.__file__).parent
    command = [*"c++ -std=c++20 -shared -fPIC".split(), f"-I{torch_folder}/include", f"{ROOT}/tests/cuda_on_cpu.cpp"]
    command += ["-o", str(library), f"-L{torch_folder}/lib", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{torch_folder}/lib"]
    subprocess.run(command, check=True)
    return library


@pytest.fixture(scope="session")
def gpus(library):
    """The process that runs what is written to it."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, ROOT / "tests/cuda_on_cpu.py", library]
    with subprocess.Popen(
        command, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        yield process
        process.stdin.close()


@pytest.fixture
def run(gpus, byte_shards, tmp_path):
    """A function that runs the trainer with TINY_FLAGS and more on pretended GPUs, checks its report and returns its output.

    Checked of each rank: exit code 0; one wait for the device in each step, for the loss that is logged; no CUDA in the thread
    that saves; no warning. With one rank, copies to the device are from pinned memory (gloo's are not).

    Args:
        waits: in the first steps, if they are others.
        gpu_bytes: of the memory of each rank's GPU.
        age: seconds since the process was started, which count in a run of `--minutes`.
    """

    def run_on_cuda(
        *flags: object, tiny: bool = True, waits: tuple[int, ...] = (),
        gpu_bytes: tuple[float, ...] = (80e9,), capability: str = "9.0", age: float = 0.0,
    ) -> str:  # fmt: skip
        all_flags = [*(TINY_FLAGS + ["--data", str(byte_shards)] if tiny else []), "--device", "cuda", "--no-compile"]
        all_flags += [str(flag) for flag in flags]
        options = dict(flags=all_flags, gpu_bytes=gpu_bytes, capability=capability, age=age)
        options |= dict(port=free_port(), folder=str(tmp_path))
        print(json.dumps(options), file=gpus.stdin, flush=True)
        assert gpus.stdout.readline() == "done\n"
        output, _, reports = (tmp_path / "output.txt").read_text().strip().rpartition("\n")
        print(output, reports)
        assert "Warning:" not in output
        reports = json.loads(reports)
        assert [report["exit code"] for report in reports] == [0] * len(gpu_bytes)
        for report in reports:
            found = [len(lines) for lines in report["waits"]]
            assert found == [*waits, *[1] * (len(found) - len(waits))] and len(found) > len(waits)
            assert not report["while saving"]
            assert len(gpu_bytes) > 1 or not report["not pinned"]
        return output

    return run_on_cuda


def assert_losses_of_cpu(out: Path, byte_shards: Path, *flags: object, within: float = 1e-6) -> None:
    """The losses are those of the same run on the CPU, in one process and in micro-batches of four rows."""
    trained(out.parent / "cpu", "--data", byte_shards, *flags)
    for name in ("train", "val"):
        found, expected = losses(out / "log.txt", name), losses(out.parent / "cpu/log.txt", name)
        assert found and found == pytest.approx(expected, rel=0, abs=within + 0.51e-6)  # written with six decimals


def test_bf16_is_resumed_exactly(run, tmp_path):
    flags = "--out log --dtype auto --max-steps 6 --checkpoint-every 3 --dropout 0.1".split()
    assert "bf16" in run(*flags)
    log = log_without_seconds(tmp_path / "log")
    shutil.rmtree(tmp_path / "log/model_00006")
    assert "step     4 | loss" in run("--resume", "--out", "log", tiny=False)
    assert log_without_seconds(tmp_path / "log") == log


def test_fp16_scales_its_gradients_where_bf16_is_not_native(run, byte_shards, tmp_path):
    flags = ["--max-steps", 8]
    assert "fp16" in run(*flags, "--dtype", "auto", "--out", "log", capability="7.5")
    assert trainer_file(tmp_path / "log/model_00008")["scaler"]["scale"] > 1
    assert_losses_of_cpu(tmp_path / "log", byte_shards, *flags, within=2**-9 * 6)  # fp16 rounds by 2^-11


@pytest.mark.parametrize(
    "flags, waits",
    [
        ("--parallel ddp", (1, 3)),  # DDP plans its buckets again in the second step, on the host
        ("--parallel fsdp --optimizer muon --recompute --sample-every 6", ()),
    ],
    ids=["DDP", "FSDP with Muon"],
)
def test_two_ranks_have_the_losses_of_one_cpu(run, byte_shards, tmp_path, flags, waits):
    flags = [*flags.split(), *"--max-steps 6 --checkpoint-every 3".split()]
    run(*flags, "--out", "log", gpu_bytes=(80e9, 80e9), waits=waits)
    assert_losses_of_cpu(tmp_path / "log", byte_shards, *flags)


@pytest.mark.parametrize(
    "gpu_bytes, parallel, tried, fits",
    [((20e6,), "ddp", 256, 128), ((80e9, 11e6), "fsdp", 128, 64)],
    ids=["one rank", "one of two ranks, FSDP"],
)
def test_a_micro_batch_that_does_not_fit_is_made_smaller(run, byte_shards, tmp_path, gpu_bytes, parallel, tried, fits):
    """Attention that is not fused takes more than by the formulas, which choose what is tried first, on all ranks."""
    flags = "--total-batch-size 8192 --max-steps 3 --val-every 0 --checkpoint-every 0".split()
    output = run(*flags, "--batch-size", 512, "--out", "log", "--parallel", parallel, gpu_bytes=gpu_bytes)
    assert f" GiB with {tried} rows" in output and re.search(rf"step +8,192 tokens = {fits} rows x 16 tokens", output)
    trained(tmp_path / "cpu", "--data", byte_shards, *flags)
    assert losses(tmp_path / "log/log.txt") == pytest.approx(losses(tmp_path / "cpu/log.txt"), rel=0, abs=1e-5)


def test_a_timed_run(run, tmp_path):
    """Its speed is measured, and it ends with a text."""
    (tmp_path / "text.txt").write_text("".join(f"{a} and {b} are {a + b}.\n" for a in range(60) for b in range(60)))
    flags = "--text text.txt --tokenizer bytes --minutes 0.1 --batch-size 16 --val-tokens 1024 --out log".split()
    output = run(*flags, *"--n-layer 1 --n-head 1 --n-embd 16 --block-size 16".split(), tiny=False, age=4.0)
    assert "saved   log/model_" in output and "\nsample  " in output
