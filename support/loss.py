"""Cross-entropy in chunks of rows, so that never all logits of a model exist at once.

The gradient of the logits is softmax less one-hot: it needs nothing from above. So the forward pass makes both gradients,
of the hidden rows and of the weight, while a chunk's logits are there, and the backward pass only scales them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch.nn import functional as F

# Logits that exist at once. Fewer stay nearer to a CPU's caches (measured); a GPU wants products that fill it.
CHUNK = {"cpu": 2**25, "cuda": 2**28}  # elsewhere 2**27


def chunked_cross_entropy(
    x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, vocab_size: int
) -> torch.Tensor:
    """`F.cross_entropy(x @ weight.T[:, :vocab_size], targets)`, in nats, for autograd and for torch.compile.

    It takes the same matrix products as the plain way, none twice, in autocast's precision. The loss and the gradient
    of the weight are summed up in fp32. In fp16 all logits are made, for what the scaler of the gradients multiplies
    them by is known in the backward pass only, and without it they would round to zero.

    Args:
        x: (N, C) hidden rows.
        weight: (W, C), at least `vocab_size` rows of which the first ones count; the others get a gradient of zero.
        targets: (N,) ids below `vocab_size`.

    Returns:
        The loss, fp32, without dimensions.
    """
    device = x.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
    if dtype == torch.float16:
        logits = F.linear(x, weight)[:, :vocab_size]
        return F.cross_entropy(logits.float(), targets)
    with_gradients = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    compiled = torch.compiler.is_compiling()
    loss, _, _ = _summed(x, weight, targets, vocab_size, dtype, with_gradients, compiled)
    return loss / len(targets)


def rows_of_chunk(device_type: str, width: int) -> int:
    """How many rows of that many logits exist at once: the largest power of two within CHUNK."""
    return 2 ** max(0, (CHUNK.get(device_type, 2**27) // width).bit_length() - 1)


# One operation to autograd and to torch.compile, which would unroll the loop into a graph many times as long.
@torch.library.custom_op("gpt2::summed_cross_entropy", mutates_args=())
def _summed(
    x: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    vocab_size: int,
    dtype: torch.dtype,
    with_gradients: bool,
    compiled: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The summed loss, and, if wanted, its gradients of x, in `dtype`, and of weight, in fp32."""
    x, lower = x.to(dtype), weight.to(dtype)
    total = x.new_zeros((), dtype=torch.float32)
    grad_x = x.new_empty(x.shape if with_gradients else 0)
    grad_weight = torch.zeros_like(weight, dtype=torch.float32) if with_gradients else x.new_empty(0)
    rows = rows_of_chunk(x.device.type, len(weight))
    reduce = _compiled(_reduce_) if compiled else _reduce_
    # Tensors of inference mode look the same in every call; those of callers do not, and _reduce_ would be compiled again.
    with torch.inference_mode(), torch.autocast(x.device.type, enabled=False):
        targets = targets.clone()  # is such a tensor
        for first in range(0, len(x), rows):
            chunk = x[first : first + rows]  # (R, C)
            logits = chunk @ lower.T  # (R, W)
            total += reduce(logits, targets[first : first + rows], vocab_size, with_gradients)
            if with_gradients:
                torch.mm(logits, lower, out=grad_x[first : first + rows])
                grad_weight += logits.T @ chunk
    return total, grad_x, grad_weight


def _reduce_(logits: torch.Tensor, targets: torch.Tensor, vocab_size: int, with_gradients: bool) -> torch.Tensor:
    """The summed loss of (R, W) logits, which are overwritten with its gradient: softmax, less 1 at the target."""
    log_probs = F.log_softmax(logits[:, :vocab_size], dim=-1, dtype=torch.float32)
    targets = targets[:, None]  # (R, 1)
    of_targets = log_probs.gather(1, targets)
    if with_gradients:
        if torch.compiler.is_compiling():  # one kernel with the softmax; a scatter would need one more, and a copy
            is_target = torch.arange(vocab_size, device=logits.device) == targets  # (R, V)
            logits[:, :vocab_size] = torch.where(is_target, log_probs.expm1(), log_probs.exp())
        else:
            logits[:, :vocab_size] = log_probs.exp_()
            logits.scatter_(1, targets, of_targets.expm1().to(logits.dtype))
        logits[:, vocab_size:] = 0.0
    return -of_targets.sum()


@cache
def _compiled(function: Callable) -> Callable:
    return torch.compile(function, dynamic=False)  # when it is needed, for it loads the compiler


@_summed.register_fake
def _(x, weight, targets, vocab_size, dtype, with_gradients, compiled):  # noqa: ANN001, ANN202
    grad_x = x.new_empty(x.shape if with_gradients else 0, dtype=dtype)
    grad_weight = torch.empty_like(weight, dtype=torch.float32) if with_gradients else x.new_empty(0, dtype=dtype)
    return x.new_empty((), dtype=torch.float32), grad_x, grad_weight


def _keep(ctx, inputs, output) -> None:  # noqa: ANN001
    _, grad_x, grad_weight = output
    ctx.save_for_backward(grad_x, grad_weight)
    ctx.set_materialize_grads(False)


def _backward(ctx, grad, *_) -> tuple:  # noqa: ANN001
    grad_x, grad_weight = ctx.saved_tensors
    return grad_x * grad, grad_weight * grad, None, None, None, None, None


_summed.register_autograd(_backward, setup_context=_keep)
