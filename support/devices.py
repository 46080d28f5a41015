"""What differs between a CUDA GPU, a CPU and an Apple GPU, each thing decided in one place."""

from __future__ import annotations

import gc
import platform
import re
import shutil
from collections.abc import Callable

import numpy as np
import torch

from support.cli import UserError

# Dense bf16 peaks in FLOP/s, accumulated in fp32, by CUDA's name of the GPU. From NVIDIA's documents, named at the right;
# where they count sparsity, half of it. The names are whole ones: cards of the same chip differ (an H100 PCIe is slower
# than an SXM module), and a wrong peak is worse than none.
PEAK_FLOPS = {
    "NVIDIA A100-SXM4-40GB": 312e12,  # A100 data sheet
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA A100-PCIE-40GB": 312e12,
    "NVIDIA A100 80GB PCIe": 312e12,
    "NVIDIA H100 80GB HBM3": 989e12,  # H100 data sheet: SXM 1,979 sparse
    "NVIDIA H100 PCIe": 756e12,  # first H100 data sheet: 1,513 sparse
    "NVIDIA H100 NVL": 835e12,  # H100 data sheet: 1,671 sparse
    "NVIDIA H200": 989e12,  # H200 data sheet: SXM 1,979 sparse
    "NVIDIA L4": 121e12,  # L4 data sheet: 242 sparse
    "NVIDIA L40S": 362e12,  # L40S data sheet
    "NVIDIA A10": 125e12,  # A10 data sheet
    "NVIDIA A30": 165e12,  # A30 data sheet
    "NVIDIA A40": 149.7e12,  # A40 data sheet
    "NVIDIA GeForce RTX 3090": 71e12,  # GA102 white paper
    "NVIDIA GeForce RTX 4090": 165.2e12,  # Ada white paper
    "NVIDIA RTX 6000 Ada Generation": 364.2e12,  # Ada white paper for professional cards
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def pick_device_type(name: str) -> str:
    """ "cuda", "mps" or "cpu": what `name` says, or the first of them that is there for "auto"."""
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        return next(kind for kind in there if there[kind])
    if not there[name]:
        raise UserError(f"no {name} device on this machine. Leave out --device, or use --device cpu.")
    return name


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """The precision of matrix products. "auto" is bf16 where the hardware computes it, else fp16 on CUDA, else fp32."""
    if name != "auto":
        return DTYPES[name]
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
    if device.type == "cpu" and _cpu_computes_bf16():
        return torch.bfloat16
    return torch.float32


def autocast(device: torch.device, dtype: torch.dtype) -> torch.autocast:
    """Matrix products in that precision; weights and what is summed up stay in fp32."""
    lower = dtype != torch.float32
    return torch.autocast(device.type, dtype=dtype if lower else None, enabled=lower)


def _cpu_computes_bf16() -> bool:
    """Whether the processor has bf16 instructions; elsewhere bf16 is emulated and slower than fp32."""
    capabilities = getattr(torch.cpu, "get_capabilities", dict)()
    return any(capabilities.get(name) for name in ("amx_bf16", "avx512_bf16"))


def compile(
    model: torch.nn.Module, device: torch.device, wanted: bool | None, notice: Callable[[str], None]
) -> torch.nn.Module:
    """The model through torch.compile, if that is `wanted` (None: on CUDA) and can work here; else the model itself."""
    if not (device.type == "cuda" if wanted is None else wanted):
        return model
    reason = _why_not_compile(device)
    if reason is None:
        return torch.compile(model, dynamic=False)  # a graph for each shape: there are one or two, and it is faster
    notice(f"running eagerly: {reason}.")
    return model


def _why_not_compile(device: torch.device) -> str | None:
    if platform.system() == "Windows":
        return "torch.compile is not used on Windows"
    if not any(shutil.which(compiler) for compiler in ("c++", "g++", "clang++")):
        return "torch.compile needs a C++ compiler, and there is none"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (7, 0):
        return "torch.compile needs a GPU of compute capability 7.0 or more"
    return None


def synchronizer(device: torch.device) -> Callable[[], None]:
    """A function that waits until the device has done what it was given; on a CPU there is nothing to wait for."""
    if device.type == "cuda":
        return lambda: torch.cuda.synchronize(device)
    if device.type == "mps":
        return torch.mps.synchronize
    return lambda: None


def send(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the host on the device. A GPU fetches it while the host goes on."""
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether there was too little memory: torch.OutOfMemoryError, and what cuBLAS, Triton, Metal and the CPU say instead."""
    said = re.search(
        "out of memory|ALLOC_FAILED|can't allocate memory|not enough memory|Invalid buffer size", str(error)
    )
    return isinstance(error, torch.OutOfMemoryError) or said is not None


def free_memory(device: torch.device) -> None:
    """Gives back what nothing refers to any more. After a failure that is all, once its traceback is gone."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif device.type == "mps":
        torch.mps.empty_cache()


def step_if(optimizer: torch.optim.Optimizer, wanted: torch.Tensor) -> None:
    """`optimizer.step()` if the one-element tensor `wanted` is true. Decided on the device: nothing waits for it.

    The fused AdamW of CUDA and of the CPU looks at `found_inf`, which a gradient scaler sets otherwise. That of an Apple
    GPU does not, so there the host decides.
    """
    if wanted.device.type == "mps":
        if wanted.item():
            optimizer.step()
        return
    optimizer.grad_scale, optimizer.found_inf = None, 1.0 - wanted.float()
    optimizer.step()


def peak_flops(device: torch.device) -> float | None:
    """Dense bf16 peak of this GPU in FLOP/s, or None where it is not known."""
    return PEAK_FLOPS.get(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def seed(*seeds: int) -> int:
    """One seed that depends on all of the `seeds`, in their order."""
    return int(np.random.SeedSequence(seeds).generate_state(1, np.uint64)[0])


def seeded_generator(device: torch.device, *seeds: int) -> torch.Generator:
    """A generator of random numbers on `device` that depends on all of the `seeds`, in their order."""
    return torch.Generator(device).manual_seed(seed(*seeds))
