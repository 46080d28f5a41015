"""Precision, memory, processor cores and random numbers, by device."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest
import torch
from helpers import ROOT
from training import NEW_RUN, ONE_PROCESS, config_of, configure, train, trained

from support.checkpoints.history import read_starts
from support.cli import UserError
from support.config import TrainConfig
from support.runtime import devices
from support.runtime.distributed import Distributed
from support.runtime.machine import Machine
from train_gpt2 import DataLoaderLite

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def machine_for(config: TrainConfig, device: torch.device) -> Machine:
    return Machine.find(config, device, 1)


# -----------------------------------------------------------------------------
# Precision and speed


def test_precision_follows_the_hardware(monkeypatch):
    for capability, expected in (("avx512_f", "fp32"), ("amx_bf16", "bf16"), ("avx512_bf16", "bf16")):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda capability=capability: {capability: True})
        assert devices.pick_dtype("auto", CPU) == expected
    for native, expected in ((True, "bf16"), (False, "fp16")):
        monkeypatch.setattr(
            torch.cuda, "is_bf16_supported", lambda including_emulation, native=native: native or including_emulation
        )
        assert devices.pick_dtype("auto", CUDA) == expected
    assert devices.pick_dtype("fp32", CPU) == "fp32"


@pytest.mark.parametrize(
    "build, capability, remedy",
    [
        ("sm_75 sm_80 sm_86 sm_90 sm_100 sm_120 compute_120", (7, 5), None),  # T4, torch 2.13 for CUDA 13
        ("sm_75 sm_80 sm_86 sm_90 sm_100 sm_120 compute_120", (8, 9), None),  # RTX 4090: sm_86 runs on it
        ("sm_75 sm_80 sm_86 sm_90 sm_100 sm_120 compute_120", (12, 1), None),
        ("sm_75 sm_80 sm_86 sm_90 sm_100 sm_120 compute_120", (6, 0), "its build for CUDA 12.6"),  # P100
        ("sm_75 sm_80 sm_86 sm_90 sm_100 sm_120 compute_120", (7, 0), "its build for CUDA 12.6"),  # V100
        ("sm_50 sm_60 sm_70 sm_75 sm_80 sm_86 sm_90a", (10, 0), "a newer one"),
        ("sm_50 sm_60 sm_70 sm_75 sm_80 sm_86 sm_90 compute_90", (10, 0), None),  # compiled when it is loaded
        ("gfx90a gfx942", (9, 4), None),  # AMD's
    ],
)
def test_gpus_for_which_a_build_has_no_kernels(monkeypatch, build, capability, remedy):
    """By CUDA's rules: machine code runs within its generation, PTX on all later ones."""
    monkeypatch.setattr(torch.cuda, "get_arch_list", build.split)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    if remedy is None:
        assert devices.pick_device("auto").type == "cuda"
        return
    with pytest.raises(UserError, match=rf"has no kernels for a GPU \(compute capability .*\)\. Install {remedy}"):
        devices.pick_device("auto")


def test_peak_flops_are_looked_up_by_the_full_name(monkeypatch):
    """They are those of bf16 and fp16, so a run in fp32 has no MFU."""
    for name, peak in (("NVIDIA A100-SXM4-80GB", 312e12), ("NVIDIA H200 NVL", None), ("Tesla V100", None)):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        assert devices.peak_flops(CUDA, "bf16") == devices.peak_flops(CUDA, "fp16") == peak
        assert devices.peak_flops(CUDA, "fp32") is None
    assert devices.peak_flops(CPU, "bf16") is None


def test_what_torch_compile_needs(monkeypatch, tmp_path):
    """A C++ compiler, and on CUDA a GPU for which Triton compiles, and Python's headers."""
    capability = [7, 0]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: tuple(capability))
    for name in ("g++", "Python.h"):
        (tmp_path / name).touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(devices.sysconfig, "get_config_var", lambda name: str(tmp_path))
    for device in (CPU, CUDA):
        assert not devices.why_not_compile(device)
    capability[:] = 6, 1  # of a GTX 1080
    assert "7.0" in devices.why_not_compile(CUDA)
    capability[:] = 7, 5
    (tmp_path / "Python.h").unlink()
    assert "Install Python's headers" in devices.why_not_compile(CUDA)
    assert not devices.why_not_compile(CPU)
    (tmp_path / "g++").unlink()
    assert "C++ compiler" in devices.why_not_compile(CPU)


@pytest.mark.parametrize(
    ("flags", "compiled"),
    [
        (["--data", "x"], True),
        (["--demo"], False),  # 22 of 120 s for 3 layers
        (["--demo", "--minutes", "4"], True),
        (["--demo", "--max-steps", "1000"], False),  # 6 s
        (["--demo", "--max-steps", "40000"], True),
        (["--demo", "--compile"], True),
        (["--data", "x", "--no-compile"], False),
    ],
)
def test_a_short_run_on_a_gpu_is_not_compiled(flags, compiled, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: True)
    config = configure(flags)[0]
    monkeypatch.setattr(devices, "why_not_compile", lambda device: None)
    assert machine_for(config, CUDA).compiled == compiled


def test_what_decides_the_speed_is_said(monkeypatch):
    """Whether a run is compiled or why not, and PyTorch's attention."""
    machine = machine_for(config_of(), CPU)
    assert (machine.compiled, machine.why_not_compiled) == (False, None)
    assert machine_for(config_of("--compile"), CPU).compiled
    monkeypatch.setattr(devices.shutil, "which", lambda name: None)
    machine = machine_for(config_of("--compile"), CPU)
    assert not machine.compiled and "C++ compiler" in machine.why_not_compiled


@pytest.mark.parametrize(
    ("flags", "attention"),
    [(["--dtype", "fp32"], "flash"), (["--dtype", "bf16"], "not fused"), (["--dropout", 0.1], "not fused")],
)
def test_the_attention_that_a_run_names_is_the_one_that_it_uses(byte_shards, tmp_path, flags, attention):
    trained(tmp_path, "--data", byte_shards, "--max-steps", 1, *flags)
    assert read_starts(tmp_path)[0]["machine"]["attention"] == attention


def test_the_next_step_is_read_while_this_one_computes(byte_shards, tmp_path, monkeypatch):
    """Before the host waits for the device, the micro-batches of the next step have been read."""
    read, read_at_the_wait = [], []
    batch, all_reduce_mean = DataLoaderLite.batch, Distributed.all_reduce_mean
    monkeypatch.setattr(DataLoaderLite, "batch", lambda loader, rows: read.append(rows) or batch(loader, rows))
    monkeypatch.setattr(
        Distributed, "all_reduce_mean", lambda *args: read_at_the_wait.append(len(read)) or all_reduce_mean(*args)
    )
    flags = "--max-steps 3 --val-every 0 --checkpoint-every 0".split()
    train(config_of("--data", byte_shards, "--out", tmp_path / "run", *flags), ONE_PROCESS, NEW_RUN)
    assert read_at_the_wait == [4 + 4, 8 + 4, 12]


# -----------------------------------------------------------------------------
# Memory


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_kept_memory_is_given_back_only_when_trimmed():
    """Page faults of five blocks of 36 MB that are freed and allocated again and again."""
    script = """
import resource, torch
from support.runtime import devices
device = torch.device("cpu")
devices.keep_memory(device)
def use(): blocks = [torch.ones(9_000_000) for _ in range(5)]
def faults(): return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def private(): return int(next(l for l in open("/proc/self/status") if l.startswith("RssAnon")).split()[1]) / 1024
for _ in range(10): use()
before = faults()
for _ in range(5): use()
print(faults() - before)
before = private()
devices.trim_memory(device)
print(before - private())
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    faults, trimmed = map(float, done.stdout.split())
    assert faults < 50_000  # otherwise 5 times 44,000 pages of 4 KB
    assert trimmed > 60  # MB


# -----------------------------------------------------------------------------
# Processor cores


@pytest.mark.parametrize("of_environment, threads", [(None, 4), ("1", 4), ("3", 7)])
def test_processes_share_the_cores_unless_the_user_set_threads(monkeypatch, of_environment, threads):
    """torchrun itself sets one thread."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if of_environment:
        monkeypatch.setenv("OMP_NUM_THREADS", of_environment)
    monkeypatch.setattr(devices, "_physical_cores", lambda: 9)
    set_to = [7]
    monkeypatch.setattr(torch, "set_num_threads", set_to.append)
    devices.share_cpu_cores()
    assert set_to[-1] == threads


# -----------------------------------------------------------------------------
# Random numbers


def test_generators_depend_on_each_seed_and_their_order():
    seeds = (1, 2, 3), (1, 2, 3), (1, 3, 2), (1, 2)
    drawn = [torch.rand(1, generator=devices.seeded_generator(CPU, *each)).item() for each in seeds]
    assert drawn[0] == drawn[1] and len(set(drawn)) == 3
    assert len({devices.derive_seed(1337, step, rank) for step in range(20) for rank in range(4)}) == 80


# ---- errors


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of"),
        torch.AcceleratorError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_every_way_to_run_out_of_memory_is_one_line(error):
    with (
        pytest.raises(UserError, match="^out of memory. Lower --batch-size .*TORCH_SHOW_CPP_STACKTRACES=1"),
        devices.report_errors(),
    ):
        raise error


@pytest.mark.parametrize(
    "message, shown",
    [
        (
            "CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be",
            "an illegal memory access",
        ),
        (
            "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx(...)`",
            "CUBLAS_STATUS_EXECUTION_FAILED",
        ),
        ("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR", "CUDNN_STATUS_INTERNAL_ERROR"),
    ],
)
def test_an_error_of_cuda_is_one_line_that_says_what_to_try(message, shown):
    error = torch.AcceleratorError(message) if "access" in message else RuntimeError(message)
    with (
        pytest.raises(UserError, match=r"^CUDA error: .*\. Continue|^cuDNN error") as reported,
        devices.report_errors(),
    ):
        raise error
    [line] = reported.value.problems
    assert shown in line and "\n" not in line and "CUDA_LAUNCH_BLOCKING=1" in line and reported.value.this_rank_only


@pytest.mark.parametrize("variable", ["TORCH_SHOW_CPP_STACKTRACES", "CUDA_LAUNCH_BLOCKING"])
@pytest.mark.parametrize("message", ["CUDA out of memory. Tried to allocate", "CUDA error: an illegal memory access"])
def test_who_asks_for_a_traceback_gets_it(message, variable, monkeypatch):
    monkeypatch.setenv(variable, "1")
    with pytest.raises(RuntimeError, match=message), devices.report_errors():
        raise RuntimeError(message)


def test_another_error_keeps_its_traceback():
    with pytest.raises(RuntimeError, match="size mismatch"), devices.report_errors():
        raise RuntimeError("size mismatch")
