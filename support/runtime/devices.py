"""The differences between CUDA GPUs, CPUs and Apple GPUs, all handled here."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import math
import os
import platform
import re
import shutil
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar, cast

import numpy as np
import torch

from support import torch_private
from support.cli import UserError
from support.gpus import GPUS
from support.optim import layers

Model = TypeVar("Model", bound=torch.nn.Module)


# PyTorch's own variables: for all errors, and to make the traceback of a CUDA error meaningful
SHOWS_TRACEBACKS = ("TORCH_SHOW_CPP_STACKTRACES", "CUDA_LAUNCH_BLOCKING")
CUDA_ERRORS = "CUDA (driver )?error|cuDNN error|Triton Error"  # how the messages of CUDA and its libraries begin
# What a CPU's core reaches in training GPT-2 124M, roughly: measured with AVX-512, see docs/measurements/performance.md; fp16 was not.
CPU_CORE_FLOPS = {"fp32": 6e10, "bf16": 1.6e11, "fp16": 6e10}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def pick_device_type(name: str) -> str:
    """Returns the device type: `name` itself, or for "auto" the first of cuda, mps and cpu that this machine has.

    Raises:
        UserError: this machine has no such device.
    """
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        return next(kind for kind in available if available[kind])
    if not available[name]:
        raise UserError(f"no {name} device on this machine. Leave out --device, or use --device cpu.")
    return name


def pick_device(name: str) -> torch.device:
    """Returns the device of a script that uses one: as in `pick_device_type`, and checks that its kernels are there."""
    device_type = pick_device_type(name)
    if device_type == "cuda":
        check_kernels()
    return torch.device(device_type)


def check_kernels() -> None:
    """Checks that this build of PyTorch has kernels for this process' GPU.

    Raises:
        UserError: it has none. The builds for CUDA 13 begin with compute capability 7.5; those for CUDA 12.6 have older GPUs.
    """
    built = [re.fullmatch(r"(sm|compute)_(\d+)(\d)\D*", name) for name in torch.cuda.get_arch_list()]
    kernels = [(match[1], (int(match[2]), int(match[3]))) for match in built if match]
    if not kernels:  # AMD's have other names
        return
    own = torch.cuda.get_device_capability()
    # machine code runs on later GPUs of the same generation, PTX ("compute") on all later ones
    if any(of <= own and (of[0] == own[0] or kind == "compute") for kind, of in kernels):
        return
    is_old = own < min(of for _, of in kernels)
    remedy = "its build for CUDA 12.6, with the selector on pytorch.org" if is_old else "a newer one"
    raise UserError(
        f"PyTorch {torch.__version__} has no kernels for {torch.cuda.get_device_name()} (compute capability "
        f"{own[0]}.{own[1]}). Install {remedy}, or use --device cpu."
    )


def pick_dtype(name: str, device: torch.device) -> str:
    """Returns the precision of matrix products, a key of DTYPES: `name` itself, or the fastest native one for "auto".

    That is bf16 where the hardware has it (emulated, it is slower than fp32), otherwise fp16 on CUDA and fp32 elsewhere.
    """
    if name != "auto":
        return name
    if device.type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"
    capabilities = torch.cpu.get_capabilities() if device.type == "cpu" else {}
    return "bf16" if capabilities.get("amx_bf16") or capabilities.get("avx512_bf16") else "fp32"


def autocast(device: torch.device, dtype: torch.dtype) -> torch.autocast:
    """Returns a context that computes matrix products in this precision; weights, norms and sums stay in fp32."""
    lower = dtype != torch.float32
    return torch.autocast(device.type, dtype=dtype if lower else None, enabled=lower)


def to_bf16_in_autocast(x: torch.Tensor) -> torch.Tensor:
    """Returns x in bf16 if autocast computes in bf16, and unchanged otherwise: fp16 has too small a range for sums."""
    kind = x.device.type
    narrow = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) == torch.bfloat16
    return x.bfloat16() if narrow else x


def compile(model: Model) -> Model:
    """Returns the model, compiled by torch.compile."""
    # one graph per shape: faster, and there are few shapes
    return cast(Model, torch.compile(model, dynamic=False))


def why_not_compile(device: torch.device) -> str | None:
    """Returns why torch.compile cannot be used on this machine, or None if it can."""
    if platform.system() == "Windows":
        return "torch.compile is not used on Windows"
    if not any(shutil.which(compiler) for compiler in ("c++", "g++", "clang++")):
        return "torch.compile needs a C++ compiler, and there is none"
    if device.type != "cuda":
        return None
    if torch.cuda.get_device_capability(device) < (7, 0):
        return "torch.compile needs a GPU of compute capability 7.0 or higher"
    # Triton compiles C code that launches its kernels.
    if not Path(sysconfig.get_config_var("INCLUDEPY"), "Python.h").exists():
        return "torch.compile needs Python.h for CUDA. Install Python's headers (python3-dev on Debian and Ubuntu)"
    return None


def attention_without_cudnn(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Returns a context for attention on many shapes. On CUDA, it avoids cuDNN, which takes up to 0.4 s to plan each shape."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    # No set_priority: if this were the first attention call of the process, PyTorch would leave cuDNN out afterwards.
    order = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    return sdpa_kernel(order) if device.type == "cuda" else contextlib.nullcontext()


def describe_attention(
    device: torch.device, dtype: torch.dtype, n_head: int, n_embd: int, T: int, dropout: float = 0.0
) -> str:
    """Names the implementation of the model's attention in training."""
    if device.type == "mps":
        return "Metal"
    qkv = torch.zeros((1, T, 3 * n_embd), device=device, dtype=dtype, requires_grad=True)  # strides as in the model
    q, k, v = (t.view(1, T, n_head, n_embd // n_head).transpose(1, 2) for t in qkv.split(n_embd, dim=2))
    name = torch_private.fused_attention(q, k, v) if layers.is_fused(device.type, dtype, T, dropout) else "math"
    return f"cuDNN {torch.backends.cudnn.version()}" if name == "cudnn" else {"math": "not fused"}.get(name, name)


def synchronize(device: torch.device) -> None:
    """Waits until the device has finished its work; on a CPU there is nothing to wait for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copies a host tensor to the device; with CUDA, it does not wait for the copy."""
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def describe(device: torch.device) -> str:
    """Returns the name of the GPU, or "cpu" or "mps"."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def peak_flops(device: torch.device, dtype: str) -> float | None:
    """Returns this GPU's dense peak in FLOP/s, which is the same for bf16 and fp16; None for fp32, or if it is unknown."""
    if device.type != "cuda" or dtype == "fp32":
        return None
    gpu = GPUS.get(torch.cuda.get_device_name(device))
    return gpu.peak_flops if gpu else None


# -----------------------------------------------------------------------------
# Errors


@contextlib.contextmanager
def report_errors() -> Iterator[None]:
    """Turns errors of the device, such as running out of memory, into a UserError that says what to do.

    With one of the variables in SHOWS_TRACEBACKS, they stay as they are.
    """
    try:
        yield
    except RuntimeError as error:
        if any(os.environ.get(name) == "1" for name in SHOWS_TRACEBACKS):
            raise
        if is_out_of_memory(error):
            message = (
                "out of memory. Lower --batch-size (a step keeps its number of tokens), or use --recompute, or see where it "
                "happens with TORCH_SHOW_CPP_STACKTRACES=1."
            )
        elif re.match(CUDA_ERRORS, str(error)):
            message = (
                f"{str(error).splitlines()[0].rstrip('.')}. Continue with --resume auto. If it comes back, look at the GPU "
                "with nvidia-smi, try --no-compile, or see where it happens with CUDA_LAUNCH_BLOCKING=1."
            )
        else:
            raise
        raise UserError(message, this_rank_only=True) from error


def is_out_of_memory(error: RuntimeError) -> bool:
    """Returns whether an error means out of memory: torch.OutOfMemoryError, or one from cuBLAS, Triton, Metal or the CPU."""
    messages = "out of memory|ALLOC_FAILED|can't allocate memory|not enough memory|Invalid buffer size"
    return isinstance(error, torch.OutOfMemoryError) or re.search(messages, str(error)) is not None


# -----------------------------------------------------------------------------
# Random numbers


def derive_seed(*seeds: int) -> int:
    """Returns one seed that depends on all of the `seeds` and their order."""
    return int(np.random.SeedSequence(seeds).generate_state(1, np.uint64)[0])


def seeded_generator(device: torch.device, *seeds: int) -> torch.Generator:
    """Returns a random number generator on `device`, seeded by all of the `seeds` and their order."""
    return torch.Generator(device).manual_seed(derive_seed(*seeds))


# -----------------------------------------------------------------------------
# Memory


def free_and_total_memory(device: torch.device) -> tuple[float, float]:
    """Returns the bytes of device memory: free or already held by this process, and in total. Infinite where unknown.

    On a CPU both are this rank's equal share of the machine's `host_memory`.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device), total
    share = host_memory() / int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    return share, share


def host_memory() -> float:
    """Returns the bytes of available memory and swap, or of a container's limit if that is lower. Infinite where unknown."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        kilobytes = {name: int(rest.split()[0]) for name, rest in (line.split(":") for line in lines)}
        available = 1024.0 * (kilobytes["MemAvailable"] + kilobytes["SwapFree"])
    except (OSError, ValueError, LookupError):  # not Linux
        return math.inf
    with contextlib.suppress(OSError, ValueError):  # no container, or "max"
        available = min(available, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return available


def free_memory(device: torch.device) -> None:
    """Frees unreferenced memory of the device. After an out-of-memory error, call it only when the traceback is gone."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif device.type == "mps":
        torch.mps.empty_cache()


def keep_memory(device: torch.device) -> None:
    """On a CPU with glibc, keeps freed memory in this process, which allocates the same blocks in every step.

    By default glibc returns large blocks to the system, which zeroes them page by page when they are allocated again:
    filling such a block was measured at 3 GB/s, and one that was kept at 22 GB/s.
    """
    if _uses_glibc(device):
        glibc = ctypes.CDLL(None)
        glibc.mallopt(-4, 0)  # M_MMAP_MAX: no separate mapping for a block, as it would be unmapped when freed
        glibc.mallopt(-1, -1)  # M_TRIM_THRESHOLD: keep the end of the heap, however much of it is free


def trim_memory(device: torch.device) -> None:
    """Returns to the system the memory that `keep_memory` kept: an evaluation leaves holes of the wrong sizes for a step."""
    if _uses_glibc(device):
        ctypes.CDLL(None).malloc_trim(0)


def _uses_glibc(device: torch.device) -> bool:
    return device.type == "cpu" and platform.libc_ver()[0] == "glibc"


# -----------------------------------------------------------------------------
# Settings of the process


def configure_backends(device: torch.device, tf32: bool) -> None:
    """Sets TF32 and the CPU's allocator; call it before the first matrix product."""
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high" if tf32 else "highest")  # for products that stay in fp32
        torch_private.avoid_unloaded_kernels()
    keep_memory(device)


def share_cpu_cores() -> None:
    """Gives each of torchrun's processes on this node an equal number of cores.

    torchrun gives each of several processes one thread. An OMP_NUM_THREADS above 1 is the user's, and is respected.
    """
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if processes > 1 and os.environ.get("OMP_NUM_THREADS", "1") == "1":
        torch.set_num_threads(max(1, _physical_cores() // processes))


def _physical_cores() -> int:
    """Counts the physical cores that this process may use: two threads of one core share its arithmetic units."""
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    siblings = {
        n: Path(f"/sys/devices/system/cpu/cpu{n}/topology/thread_siblings_list") for n in os.sched_getaffinity(0)
    }
    return len({path.read_text() if path.exists() else n for n, path in siblings.items()})
