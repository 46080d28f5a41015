"""What is private in PyTorch 2.11 to 2.13, or has a different name in one of them, and what replaces it where that is known."""

from __future__ import annotations

from datetime import timedelta

import torch
from torch import distributed, nn
from torch.nn.attention import SDPBackend
from torch.utils._pytree import tree_map  # torch.utils.pytree.tree_map, once that is in the oldest version

__all__ = [
    "all_gather", "avoid_unloaded_kernels", "fused_attention", "reduce_scatter", "set_collective_timeout", "skips_steps",
    "tree_map", "uncompiled",
]  # fmt: skip


def all_gather(full: torch.Tensor, part: torch.Tensor) -> None:
    """Gathers each rank's `part` into `full`. The function has a different name from torch 2.13 on."""
    gather = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor
    gather(full, part)


def reduce_scatter(part: torch.Tensor, full: torch.Tensor) -> None:
    """Sums `full` over the ranks, and leaves each its `part`. The function has a different name from torch 2.13 on."""
    scatter = getattr(distributed, "reduce_scatter_single", None) or distributed.reduce_scatter_tensor
    scatter(part, full)


def set_collective_timeout(timeout: timedelta) -> None:
    """Sets how long collectives wait. As torchtitan does: the public `set_timeout` exists from torch 2.14 on."""
    distributed.distributed_c10d._set_pg_timeout(timeout)


def fused_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> str:
    """Names the implementation that causal `scaled_dot_product_attention` chooses. Nothing public tells."""
    return SDPBackend(torch._fused_sdp_choice(q, k, v, is_causal=True)).name.removesuffix("_ATTENTION").lower()


def avoid_unloaded_kernels() -> None:
    """On torch 2.13, replaces a launcher that may call a kernel which autotuning has unloaded (pytorch#188607).

    The other launcher takes 2 us longer.
    """
    if torch.__version__.startswith("2.13."):
        from torch._inductor import config

        config.use_fast_triton_launcher = False


def skips_steps(optimizer: torch.optim.Optimizer) -> bool:
    """Returns whether an optimizer skips a step if its `found_inf` is 1. GradScaler reads the same private attribute."""
    return getattr(optimizer, "_step_supports_amp_scaling", False)


def uncompiled(model: nn.Module) -> nn.Module:
    """Returns the module that `torch.compile` wraps, or the model itself. `nn.Module.compile` would not wrap it."""
    return getattr(model, "_orig_mod", model)
