"""Cross-entropy in chunks of rows, so that the logits of a full micro-batch are never in memory together.

The gradient of the loss with respect to the logits is softmax - one_hot: it does not depend on the backward pass. So
the forward pass computes both gradients, of the hidden states and of the weight, while a chunk's logits exist, and the
backward pass only scales them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch.nn import functional as F

# Logits that exist at once. Fewer stay closer to a CPU's caches (measured); a GPU wants matrix products that fill it.
CHUNK_NUMEL = {"cpu": 2**25, "cuda": 2**28}  # elsewhere 2**27


def chunked_cross_entropy(
    x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, vocab_size: int
) -> torch.Tensor:
    """`F.cross_entropy(x @ weight.T[:, :vocab_size], targets)`, in nats, for autograd and for torch.compile.

    Does the same matrix products as the plain version, none twice, in autocast's precision; the loss and the gradient
    of the weight are summed in fp32. In fp16 all logits are computed together: the factor of the gradient scaler is
    known only in the backward pass, and gradients without it would round to zero.

    Args:
        x: (N, C) hidden states.
        weight: (W, C), at least `vocab_size` rows; rows beyond them take no part and get a gradient of zero.
        targets: (N,) ids below `vocab_size`.

    Returns:
        The mean loss, an fp32 scalar.
    """
    device = x.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
    if dtype == torch.float16:
        logits = F.linear(x, weight)[:, :vocab_size]
        return F.cross_entropy(logits.float(), targets)
    weight_gradient = torch.is_grad_enabled() and weight.requires_grad  # with LoRA, the weight is frozen
    with_gradients = weight_gradient or (torch.is_grad_enabled() and x.requires_grad)
    # torch.compile cannot see into the operation below, which therefore compiles its own inner function.
    compile_chunks = torch.compiler.is_compiling()
    loss, _, _ = _summed_cross_entropy(
        x, weight, targets, vocab_size, dtype, with_gradients, weight_gradient, compile_chunks
    )
    return loss / len(targets)


def chunk_rows(device_type: str, width: int) -> int:
    """Rows of `width` logits in a chunk: the largest power of two within CHUNK_NUMEL."""
    return 2 ** max(0, (CHUNK_NUMEL.get(device_type, 2**27) // width).bit_length() - 1)


# One operation for autograd and torch.compile, which would otherwise unroll the loop into a graph many times as long.
@torch.library.custom_op("gpt2::summed_cross_entropy", mutates_args=())
def _summed_cross_entropy(
    x: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    vocab_size: int,
    dtype: torch.dtype,
    with_gradients: bool,
    weight_gradient: bool,
    compile_chunks: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The summed loss and, if asked for, the gradients: of x, in `dtype`, and of weight, in fp32."""
    x, low_weight = x.to(dtype), weight.to(dtype)
    total = x.new_zeros((), dtype=torch.float32)
    grad_x = x.new_empty(x.shape if with_gradients else 0)
    grad_weight = torch.zeros_like(weight, dtype=torch.float32) if weight_gradient else x.new_empty(0)
    rows = chunk_rows(x.device.type, len(weight))
    logits_to_gradient_ = _compiled(_logits_to_gradient_) if compile_chunks else _logits_to_gradient_
    # torch.compile guards on properties such as requires_grad, which differ between callers; in inference mode they do
    # not, so nothing is compiled again.
    with torch.inference_mode(), torch.autocast(x.device.type, enabled=False):
        targets = targets.clone()  # makes it an inference tensor
        for first in range(0, len(x), rows):
            chunk = x[first : first + rows]  # (R, C)
            logits = chunk @ low_weight.T  # (R, W)
            total += logits_to_gradient_(logits, targets[first : first + rows], vocab_size, with_gradients)
            if with_gradients:
                torch.mm(logits, low_weight, out=grad_x[first : first + rows])
            if weight_gradient:
                grad_weight += logits.T @ chunk
    return total, grad_x, grad_weight


def _logits_to_gradient_(
    logits: torch.Tensor, targets: torch.Tensor, vocab_size: int, with_gradients: bool
) -> torch.Tensor:
    """The summed loss of (R, W) logits, which are overwritten with its gradient: softmax - one_hot(target)."""
    log_probs = F.log_softmax(logits[:, :vocab_size], dim=-1, dtype=torch.float32)
    targets = targets[:, None]  # (R, 1)
    target_log_probs = log_probs.gather(1, targets)
    if with_gradients:
        if torch.compiler.is_compiling():  # one kernel with the softmax; a scatter would need another one, and a copy
            is_target = torch.arange(vocab_size, device=logits.device) == targets  # (R, V)
            logits[:, :vocab_size] = torch.where(is_target, log_probs.expm1(), log_probs.exp())
        else:
            logits[:, :vocab_size] = log_probs.exp_()
            logits.scatter_(1, targets, target_log_probs.expm1().to(logits.dtype))
        logits[:, vocab_size:] = 0.0
    return -target_log_probs.sum()


@cache
def _compiled(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return torch.compile(function, dynamic=False)  # not at import: it loads the compiler


@_summed_cross_entropy.register_fake
def _fake_summed_cross_entropy(
    x: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    vocab_size: int,
    dtype: torch.dtype,
    with_gradients: bool,
    weight_gradient: bool,
    compile_chunks: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    grad_x = x.new_empty(x.shape if with_gradients else 0, dtype=dtype)
    grad_weight = torch.empty_like(weight, dtype=torch.float32) if weight_gradient else x.new_empty(0, dtype=dtype)
    return x.new_empty((), dtype=torch.float32), grad_x, grad_weight


def _save_gradients(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    _, grad_x, grad_weight = output
    ctx.save_for_backward(grad_x, grad_weight)
    ctx.set_materialize_grads(False)


def _scale_gradients(ctx: Any, grad: torch.Tensor, *_: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    grad_x, grad_weight = ctx.saved_tensors
    # one for each argument of the operation; a weight that is frozen has no gradient
    return grad_x * grad, grad_weight * grad if len(grad_weight) else None, *[None] * 6


_summed_cross_entropy.register_autograd(_scale_gradients, setup_context=_save_gradients)
