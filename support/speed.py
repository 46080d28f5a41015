"""What is only there for speed: memory that is kept, cores that are shared, the fastest of CUDA's attention kernels."""

from __future__ import annotations

import ctypes
import os
import platform
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from support import devices

KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "memory-efficient": SDPBackend.EFFICIENT_ATTENTION,
}
USUAL = "PyTorch's choice"
ROWS = 8  # of the trial: enough to fill a GPU
CLEARLY = 0.97  # of the time of PyTorch's own choice, for another one to be taken: less may be noise
_chosen = ExitStack()  # holds the choice for the life of the process


def prepare(device: torch.device, dtype: torch.dtype, tf32: bool, sizes: Any, notice: Callable[[str], None]) -> None:
    """All that is to be set before the first product. `sizes` is the model's GPTConfig."""
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high" if tf32 else "highest")  # of the products that stay in fp32
        choose_attention(device, dtype, sizes.n_head, sizes.block_size, sizes.n_embd, notice)
    keep_memory(device)


def keep_memory(device: torch.device) -> None:
    """On a CPU with glibc, memory that is freed stays with this process, which allocates the same blocks in every step.

    By default large blocks go back to the system at once, and come again as pages to be filled with zeros: filling such
    a block was measured at 3 GB/s, and one that stayed at 22 GB/s.
    """
    if _keeps_memory(device):
        glibc = ctypes.CDLL(None)
        glibc.mallopt(-4, 0)  # M_MMAP_MAX: no block is mapped for itself, to be unmapped when it is freed
        glibc.mallopt(-1, -1)  # M_TRIM_THRESHOLD: the end of the heap stays, however much of it is free


def trim_memory(device: torch.device) -> None:
    """Gives back what `keep_memory` kept: after other work than a step, the holes in the heap are of other sizes."""
    if _keeps_memory(device):
        ctypes.CDLL(None).malloc_trim(0)


def _keeps_memory(device: torch.device) -> bool:
    return device.type == "cpu" and platform.libc_ver()[0] == "glibc"


def share_cores() -> None:
    """Gives each process of torchrun its share of the cores, where nobody said how many threads it shall have.

    torchrun sets one thread for each of several processes. OMP_NUM_THREADS that was set before it is respected.
    """
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if processes > 1 and not _threads_were_set():
        torch.set_num_threads(max(1, _cores() // processes))


def _threads_were_set() -> bool:
    try:
        theirs = Path(f"/proc/{os.getppid()}/environ").read_bytes()  # what torchrun was started with
    except OSError:
        theirs = b""
    return b"OMP_NUM_THREADS=" in theirs or os.environ.get("OMP_NUM_THREADS", "1") != "1"


def _cores() -> int:
    """Physical cores that this process may use; two threads of one core share what multiplies."""
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    siblings = {
        n: Path(f"/sys/devices/system/cpu/cpu{n}/topology/thread_siblings_list") for n in os.sched_getaffinity(0)
    }
    return len({path.read_text() if path.exists() else n for n, path in siblings.items()})


def choose_attention(
    device: torch.device, dtype: torch.dtype, n_head: int, T: int, n_embd: int, notice: Callable[[str], None]
) -> None:
    """Has attention computed by the kernel that is the fastest there, for this shape, forward and backward.

    Which one wins depends on the GPU, the precision and the version of PyTorch. It takes a fraction of a second. What
    it cannot do (HellaSwag's shapes, say) is left to the memory-efficient one. Kernels differ in rounding.
    """
    times = time_attention(device, dtype, n_head, T, n_embd)
    best = min(times, key=times.get)
    if best != USUAL and times[best] < CLEARLY * times[USUAL]:
        in_order = [KERNELS[best], SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
        _chosen.enter_context(sdpa_kernel(in_order, set_priority=True))
        notice(f"attention by {best}: " + ", ".join(f"{name} {1e3 * s:.2f}ms" for name, s in times.items()))


def time_attention(
    device: torch.device, dtype: torch.dtype, n_head: int, T: int, n_embd: int, kernels: dict[str, SDPBackend] = KERNELS
) -> dict[str, float]:
    """Seconds of attention forward and backward with each of `kernels` that can do it, and with PyTorch's choice."""
    synchronize = devices.synchronizer(device)
    qkv = torch.randn(ROWS, T, 3 * n_embd, device=device, dtype=dtype, requires_grad=True)

    def seconds(n: int) -> float:
        synchronize()
        started = time.perf_counter()
        for _ in range(n):
            q, k, v = (t.view(ROWS, T, n_head, -1).transpose(1, 2) for t in qkv.split(n_embd, dim=2))
            y = scaled_dot_product_attention(q, k, v, is_causal=True)
            torch.autograd.grad(y, qkv, y.detach())
        synchronize()
        return (time.perf_counter() - started) / n

    seconds(3)  # wakes the GPU up
    times = {USUAL: min(seconds(5) for _ in range(3))}
    for name, kernel in kernels.items():
        try:
            with sdpa_kernel(kernel), warnings.catch_warnings(action="ignore"):  # PyTorch warns why it cannot
                seconds(1)
                times[name] = min(seconds(5) for _ in range(3))
        except RuntimeError:  # not on this GPU, or not in this precision
            continue
    return times
