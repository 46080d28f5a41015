"""Precision, memory, processor cores and random numbers, by device."""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import ROOT
from training import ONE_PROCESS, config_of

from support.checkpoints.start import gather_flags
from support.cli import parse_flags
from support.runtime import devices
from support.runtime.distributed import Distributed
from support.runtime.options import describe_speed
from train_gpt2 import DataLoaderLite, TrainConfig, resolve, train

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
on_linux = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")


# -----------------------------------------------------------------------------
# Precision and speed


def test_precision_follows_the_hardware(monkeypatch):
    for capabilities, expected in (
        ({"avx512_f": True}, "fp32"),
        ({"amx_bf16": True}, "bf16"),
        ({"avx512_bf16": True}, "bf16"),
    ):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda capabilities=capabilities: capabilities)
        assert devices.pick_dtype("auto", CPU) == expected
    for native, expected in ((True, "bf16"), (False, "fp16")):
        monkeypatch.setattr(
            torch.cuda, "is_bf16_supported", lambda including_emulation, native=native: native or including_emulation
        )
        assert devices.pick_dtype("auto", CUDA) == expected
    assert devices.pick_dtype("fp32", CPU) == "fp32"


def test_peak_flops_are_looked_up_by_the_full_name(monkeypatch):
    for name, peak in (
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA H200 NVL", None),
        ("Tesla V100", None),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        assert devices.peak_flops(CUDA) == peak
    assert devices.peak_flops(CPU) is None


def test_prepare_sets_the_precision_of_fp32_products(monkeypatch):
    monkeypatch.setattr(devices, "keep_memory", lambda device: None)
    before = torch.get_float32_matmul_precision()
    try:
        for tf32, precision in ((True, "high"), (False, "highest")):
            devices.configure_backends(CUDA, tf32)
            assert torch.get_float32_matmul_precision() == precision
        devices.configure_backends(CPU, True)
        assert torch.get_float32_matmul_precision() == "highest"  # as it was
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize(
    ("missing", "reason"),
    [
        ("c++ g++ clang++", "C++ compiler"),
        ("gcc clang", "C compiler for CUDA"),
        ("Python.h", "Install Python's headers"),
    ],
)
def test_what_torch_compile_needs(missing, reason, monkeypatch, tmp_path):
    """On CUDA: compilers and Python's headers. On a CPU: a C++ compiler. CC may name another C compiler."""
    for name in ("c++", "cc", "g++", "gcc", "include/Python.h"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(devices.sysconfig, "get_config_var", lambda name: str(tmp_path / "include"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    model = torch.nn.Linear(1, 1)
    for device in (CPU, CUDA):
        assert devices.compile(model, device) is not model and not devices.why_not_compile(device)
    for name in missing.split():
        (tmp_path / ("include/Python.h" if name == "Python.h" else name)).unlink(missing_ok=True)
    assert devices.compile(model, CUDA) is model and reason in str(devices.why_not_compile(CUDA))
    assert (devices.compile(model, CPU) is model) == (reason == "C++ compiler")
    monkeypatch.setenv("CC", "cc")
    assert (devices.compile(model, CUDA) is model) == (reason != "C compiler for CUDA")


def test_the_next_step_is_read_while_this_one_computes(byte_shards, tmp_path, monkeypatch):
    """Before the host waits for the device, the micro-batches of the next step have been read."""
    read, read_at_the_wait = [], []
    batch, all_reduce_mean = DataLoaderLite.batch, Distributed.all_reduce_mean
    monkeypatch.setattr(DataLoaderLite, "batch", lambda loader, rows: read.append(rows) or batch(loader, rows))
    monkeypatch.setattr(
        Distributed, "all_reduce_mean", lambda *args: read_at_the_wait.append(len(read)) or all_reduce_mean(*args)
    )
    flags = "--max-steps 3 --val-every 0 --checkpoint-every 0".split()
    train(config_of("--data", byte_shards, "--out", tmp_path / "run", *flags), ONE_PROCESS)
    assert read_at_the_wait == [4 + 4, 8 + 4, 12]


# -----------------------------------------------------------------------------
# Memory


def test_a_run_keeps_memory_and_trims_it_after_evaluations(byte_shards, tmp_path, monkeypatch):
    called = []
    for name in ("keep_memory", "trim_memory"):
        monkeypatch.setattr(devices, name, lambda device, name=name: called.append(name))
    flags = "--max-steps 3 --val-every 0 --sample-every 2 --checkpoint-every 0".split()
    train(config_of("--data", byte_shards, "--out", tmp_path / "run", *flags), ONE_PROCESS)
    assert called == ["keep_memory", "trim_memory", "trim_memory"]  # at 2 and the end


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
@pytest.mark.parametrize("kept", [False, True])
def test_kept_memory_is_given_back_only_when_trimmed(kept):
    """Page faults of five blocks of 36 MB that are freed and allocated again and again."""
    script = f"""
import resource, torch
from support.runtime import devices
cpu = torch.device("cpu")
if {kept}: devices.keep_memory(cpu)
def use(): blocks = [torch.ones(9_000_000) for _ in range(5)]
def faults(): return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def private(): return int(next(l for l in open("/proc/self/status") if l.startswith("RssAnon")).split()[1]) / 1024
for _ in range(10): use()
before = faults()
for _ in range(5): use()
print(faults() - before)
before = private()
devices.trim_memory(cpu)
print(before - private())
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    faults, trimmed = map(float, done.stdout.split())
    assert (faults < 50_000) == kept  # 5 times 44,000 pages of 4 KB
    assert trimmed > 60 or not kept  # MB


def test_host_memory_is_left_alone_on_a_gpu(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: pytest.fail("mallopt was called"))
    devices.keep_memory(CUDA)
    devices.trim_memory(CUDA)


# -----------------------------------------------------------------------------
# Processor cores


@pytest.mark.parametrize("user_set, expected", [(False, [4]), (True, [])])
def test_processes_share_the_cores_unless_the_user_set_threads(monkeypatch, user_set, expected):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(devices, "_physical_cores", lambda: 9)
    monkeypatch.setattr(devices, "_user_set_threads", lambda: user_set)
    threads = []
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    devices.share_cpu_cores()
    assert threads == expected


@pytest.mark.slow
@on_linux
@pytest.mark.parametrize("users", [None, "1"])
def test_torchruns_own_number_of_threads_is_not_taken_for_the_users(users, tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"} | {"PYTHONPATH": str(ROOT)}
    environment |= {"OMP_NUM_THREADS": users} if users else {}
    script = tmp_path / "script.py"
    script.write_text(
        "import os; from support.runtime import devices; "
        "os.write(1, f'{devices._user_set_threads()} {os.environ[\"OMP_NUM_THREADS\"]}\\n'.encode())"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(script)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [f"{users is not None} 1"] * 2


# -----------------------------------------------------------------------------
# Random numbers


def test_generators_depend_on_each_seed_and_their_order():
    drawn = [
        torch.rand(1, generator=devices.seeded_generator(CPU, *seeds)).item()
        for seeds in ((1, 2, 3), (1, 2, 3), (1, 3, 2), (1, 2))
    ]
    assert drawn[0] == drawn[1] and len(set(drawn)) == 3


def test_each_step_and_rank_has_its_own_seed():
    seeds = {devices.derive_seed(1337, step, rank) for step in range(20) for rank in range(4)}
    assert len(seeds) == 80


@pytest.mark.parametrize(
    ("dtype", "context", "fused"), [(torch.bfloat16, 64, False), (torch.bfloat16, 256, True), (torch.float32, 64, True)]
)
def test_short_rows_in_bf16_on_a_cpu_do_without_fused_attention(dtype, context, fused):
    try:
        devices.configure_backends(CPU, True, dtype, context)
        q = torch.randn(2, 2, context, 16, dtype=dtype, requires_grad=True)
        with torch.profiler.profile() as profile:
            torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward()
        assert any("flash" in event.key for event in profile.key_averages()) == fused
    finally:
        devices.configure_backends(CPU, True)


@pytest.mark.parametrize(("version", "fast"), [("2.13.0+cu130", False), ("2.14.0", True)])
def test_the_launcher_with_a_dangling_pointer_is_not_used(monkeypatch, version, fast):
    from torch._inductor import config

    if not hasattr(config, "use_fast_triton_launcher"):
        pytest.skip("this PyTorch has no such launcher")
    monkeypatch.setattr(config, "use_fast_triton_launcher", True)
    monkeypatch.setattr(torch, "__version__", version)
    devices.configure_backends(torch.device("cuda"), tf32=False)
    assert config.use_fast_triton_launcher == fast


def test_what_decides_the_speed_is_said(monkeypatch):
    """Of a run of the flags: compiled or why not, and PyTorch's attention."""

    def speed(*flags):
        return describe_speed(config_of(*flags), CPU)

    assert speed() == {"compiled": "no (the default without CUDA; --compile turns it on)", "attention": "flash"}
    assert speed("--compile")["compiled"] == "yes"
    monkeypatch.setattr(devices.shutil, "which", lambda name: None)
    assert "C++ compiler" in speed("--compile")["compiled"]
    torch.backends.cuda.enable_flash_sdp(False)
    assert speed()["attention"] == "not fused"


@pytest.mark.parametrize(
    ("flags", "compiled"),
    [
        (["--data", "x"], True),
        (["--demo"], False),  # 22 of 120 s for 3 layers
        (["--demo", "--minutes", "4"], True),
        (["--demo", "--minutes", "4", "--n-layer", "5"], False),
        (["--demo", "--max-steps", "1000"], False),  # 6 s
        (["--demo", "--max-steps", "40000"], True),
        (["--demo", "--compile"], True),
        (["--data", "x", "--no-compile"], False),
    ],
)
def test_a_short_run_on_a_gpu_is_not_compiled(flags, compiled, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: True)
    flags, _ = gather_flags(TrainConfig, parse_flags(TrainConfig, flags, ""), ONE_PROCESS)
    assert resolve(flags, CUDA, 1).compile == compiled
