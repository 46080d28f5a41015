"""Cross-entropy in chunks of rows, so that the logits of a full micro-batch are never in memory all at once.

The gradient of the loss with respect to the logits is softmax - one_hot: it does not depend on the backward pass. So
the forward pass computes both gradients, of the hidden states and of the weight, while a chunk's logits exist, and the
backward pass only scales them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch.nn import functional as F

# On a CPU, chunks of 512 rows make the best use of the caches, whatever the vocabulary (docs/measurements/performance.md). A GPU is
# fastest with few, large matrix products, so its chunk size follows from its total memory, which stays the same when a
# run is resumed.
CPU_CHUNK_ROWS = 512
CUDA_BYTES_PER_LOGIT = 128  # a chunk in bf16 takes up to a 64th of the memory: 2^30 logits on an H200, 2^29 with 80 GB
MPS_CHUNK_LOGITS = 2**27
# In fp16, a gradient below 6e-8 would be 0: a sixth of the softmax's elements. So the gradients of the chunks are this
# many times as large, and the backward pass divides them. (They are of the summed loss, so they are not divided by its
# thousands of rows, as those that a gradient scaler lifts are.)
FP16_FACTOR = 2.0**8


def chunked_cross_entropy(
    x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, vocab_size: int
) -> torch.Tensor:
    """Returns `F.cross_entropy(x @ weight.T[:, :vocab_size], targets)`, in nats; works with autograd and torch.compile.

    Does the same matrix products as the plain version, each once, in autocast's precision; the loss and the gradient
    of the weight are summed in fp32.

    Args:
        x: (N, C) hidden states.
        weight: (W, C), at least `vocab_size` rows; further rows are ignored and get a gradient of zero.
        targets: (N,) ids below `vocab_size`.

    Returns:
        The mean loss, an fp32 scalar (fp64 for a model in fp64).
    """
    device = x.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
    weight_gradient = torch.is_grad_enabled() and weight.requires_grad  # with LoRA, the weight is frozen
    with_gradients = weight_gradient or (torch.is_grad_enabled() and x.requires_grad)
    # torch.compile cannot look into the custom operation below, so the operation compiles its own inner function
    compile_chunks = torch.compiler.is_compiling()
    loss, _, _ = _summed_cross_entropy(
        x, weight, targets, vocab_size, dtype, with_gradients, weight_gradient, compile_chunks
    )
    return loss / len(targets)


def chunk_rows(device_type: str, width: int, device_memory: float = 0) -> int:
    """Returns the number of rows of `width` logits in a chunk, a power of two; `device_memory` is in bytes, for CUDA."""
    if device_type == "cpu":
        return CPU_CHUNK_ROWS
    num_logits = int(device_memory // CUDA_BYTES_PER_LOGIT) if device_type == "cuda" else MPS_CHUNK_LOGITS
    return 2 ** max(0, (num_logits // width).bit_length() - 1)


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
    """Returns the summed loss and, if asked for, the gradients of x, in `dtype`, and of weight, in fp32 (or fp64).

    In fp16, both gradients are `FP16_FACTOR` times as large.
    """
    factor = FP16_FACTOR if dtype == torch.float16 else 1.0
    x, low_weight = x.to(dtype), weight.to(dtype)
    total = x.new_zeros((), dtype=_wide(dtype))
    grad_x = x.new_empty(x.shape if with_gradients else 0)
    grad_weight = torch.zeros_like(weight, dtype=_wide(dtype)) if weight_gradient else x.new_empty(0)
    memory = torch.cuda.get_device_properties(x.device).total_memory if x.is_cuda else 0
    rows = min(chunk_rows(x.device.type, len(weight), memory), len(x))
    logits_to_gradient_ = _fused_logits_to_gradient_ if compile_chunks else _logits_to_gradient_
    # torch.compile guards on properties such as requires_grad, which differ between callers. In inference mode they do
    # not, so nothing is recompiled.
    with torch.inference_mode(), torch.autocast(x.device.type, enabled=False):
        targets = targets.clone()  # makes it an inference tensor
        buffer = x.new_empty((rows, len(weight)))  # one for all chunks: otherwise two would be in memory at a time
        for first in range(0, len(x), rows):
            chunk = x[first : first + rows]  # (R, C)
            logits = torch.mm(chunk, low_weight.T, out=buffer[: len(chunk)])  # (R, W)
            chunk_targets = targets[first : first + rows]
            total += logits_to_gradient_(logits, chunk_targets, vocab_size, with_gradients, factor).sum()
            if with_gradients:
                torch.mm(logits, low_weight, out=grad_x[first : first + rows])
            if weight_gradient:
                _add_product_(grad_weight, logits.T, chunk)
    return total, grad_x, grad_weight


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Returns the precision of sums: fp32, or fp64 for a model in fp64."""
    return torch.promote_types(dtype, torch.float32)


def _add_product_(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """Adds a @ b to the fp32 `total`, without rounding the product if the device can multiply such matrices into fp32."""
    oldest = {torch.float16: (7, 0), torch.bfloat16: (8, 0)}.get(a.dtype)  # compute capability
    if a.is_cuda and oldest and torch.cuda.get_device_capability(a.device) >= oldest:
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    elif a.dtype == torch.float16:  # a sum over rows may exceed the range of fp16
        total += torch.mm(a.float(), b.float())
    else:
        total += torch.mm(a, b)


def _logits_to_gradient_(
    logits: torch.Tensor, targets: torch.Tensor, vocab_size: int, with_gradients: bool, factor: float
) -> torch.Tensor:
    """Returns the losses (R,), and overwrites the (R, W) logits with their gradient: softmax - one_hot(target).

    The gradient is multiplied by `factor`.
    """
    logits[:, vocab_size:] = -torch.inf  # probability 0, and so a gradient of 0
    log_probs = F.log_softmax(logits, dim=-1, dtype=_wide(logits.dtype))  # (R, W)
    targets = targets[:, None]  # (R, 1)
    target_log_probs = log_probs.gather(1, targets)
    if with_gradients:
        torch.exp(log_probs if factor == 1.0 else log_probs + math.log(factor), out=logits)
        logits.scatter_(1, targets, (factor * target_log_probs.expm1()).to(logits.dtype))
    return -target_log_probs[:, 0]


def _fused_logits_to_gradient_(
    logits: torch.Tensor, targets: torch.Tensor, vocab_size: int, with_gradients: bool, factor: float
) -> torch.Tensor:
    """Does the same with one large kernel, which reads a row for its sum, then again to write the gradient.

    With p the probability of the target and log_odds = log((1 - p) / p),

        loss = log(1 + exp(log_odds))
        gradient = (1 - p) * (softmax of the other ids - one_hot(target)), where 1 - p = sigmoid(log_odds)

    Both are accurate even if p is close to 1. Small kernels take the target and the padding out of the row before, so
    that the large one needs no masks.
    """
    targets = targets[:, None]  # (R, 1)
    target_logits = logits.gather(1, targets).to(_wide(logits.dtype))
    lowest = torch.finfo(logits.dtype).min  # not -inf: a maximum of -inf, minus itself, would be NaN
    logits.scatter_(1, targets, lowest)
    logits[:, vocab_size:] = lowest
    log_odds = _compiled(_softmax_of_others_)(logits, target_logits, with_gradients, factor)
    if with_gradients:
        logits.scatter_(1, targets, (-factor * log_odds.sigmoid()).to(logits.dtype))
    return F.softplus(log_odds)[:, 0]


def _softmax_of_others_(
    others: torch.Tensor, target_logits: torch.Tensor, with_gradients: bool, factor: float
) -> torch.Tensor:
    """Returns each row's log_odds (R, 1), and overwrites the (R, W) logits of the other ids with their gradient."""
    z = others.to(_wide(others.dtype))
    largest = z.amax(-1, keepdim=True)
    log_sum = (z - largest).exp().sum(-1, keepdim=True).log()  # (R, 1)
    log_odds = largest + log_sum - target_logits
    if with_gradients:
        others.copy_(factor * log_odds.sigmoid() * (z - largest - log_sum).exp())
    return log_odds


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
    grad_weight = torch.empty_like(weight, dtype=_wide(dtype)) if weight_gradient else x.new_empty(0, dtype=dtype)
    return x.new_empty((), dtype=_wide(dtype)), grad_x, grad_weight


def _save_gradients(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    _, grad_x, grad_weight = output
    ctx.save_for_backward(grad_x, grad_weight)
    ctx.set_materialize_grads(False)


def _scale_gradients(ctx: Any, grad: torch.Tensor, *_: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    if torch.is_grad_enabled():  # create_graph=True
        raise RuntimeError("the chunked cross-entropy has no second derivative. Compute the loss from GPT.logits.")
    grad_x, grad_weight = ctx.saved_tensors
    if grad_x.dtype == torch.float16:
        grad = grad / FP16_FACTOR
        grad_x = (grad_x.float() * grad).half()  # a product of fp16 would round the factor, which may be very small
    else:
        grad_x = grad_x * grad
    # a gradient or None for each argument of the operation; a frozen weight has no gradient
    return grad_x, grad_weight * grad if len(grad_weight) else None, *[None] * 6


_summed_cross_entropy.register_autograd(_scale_gradients, setup_context=_save_gradients)
