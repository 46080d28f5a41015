"""Attention and dropout: PyTorch's, with other steps on a CPU where PyTorch's are slow (docs/measurements/performance.md)."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

LONGEST_UNFUSED = 256  # tokens, in bf16 on a CPU; from 512 on, the fused kernel is as fast


def causal_attention(q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0) -> Tensor:
    """Returns softmax(q @ k.mT / sqrt(hs), with the future masked) @ v, of shape (B, nh, T, hs).

    Args:
        q, k, v: (B, nh, T, hs). A single query may have any number of keys: it attends to all of them.
        dropout: the probability with which a weight of the attention becomes 0.
    """
    B, nh, T, hs = q.shape
    if T == 1 or is_fused(q.device.type, q.dtype, T, dropout):
        # one token sees all keys: PyTorch's causal mask for T queries and more keys would show it only the first one
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=T > 1)
    q, k, v = (t.reshape(B * nh, T, hs) for t in (q, k, v))
    future = torch.full((T, T), -math.inf, dtype=q.dtype).triu(1)
    weights = torch.baddbmm(future, q, k.mT, alpha=1 / math.sqrt(hs)).softmax(dim=-1)  # (B * nh, T, T)
    return (drop(weights, dropout) @ v).view(B, nh, T, hs)


def is_fused(device: str, dtype: torch.dtype, T: int, dropout: float) -> bool:
    """Returns whether attention over T tokens is PyTorch's, which has a kernel that never stores the (T, T) weights.

    On a CPU, this kernel has no dropout, and in bf16 its backward pass is slow on short rows.
    """
    return device != "cpu" or not (dropout or (dtype == torch.bfloat16 and T <= LONGEST_UNFUSED))


class Dropout(nn.Dropout):
    """`nn.Dropout`; on a CPU with fewer random numbers."""

    def forward(self, x: Tensor) -> Tensor:
        return drop(x, self.p) if self.training else x


def drop(x: Tensor, p: float) -> Tensor:
    """Returns `F.dropout(x, p)`. On a CPU, p is rounded to a multiple of 2^-16."""
    if p == 0 or x.device.type != "cpu" or torch.compiler.is_compiling():
        return F.dropout(x, p)
    # A random number of 64 bits decides about four values. PyTorch draws one for each value, which takes longer than the
    # rest of a dropout together.
    numbers = torch.empty(-(-x.numel() // 4), dtype=torch.int64).random_(-(2**63), None)
    kept = numbers.view(torch.int16)[: x.numel()].view(x.shape) >= round(p * 2**16) - 2**15
    return x * kept.to(x.dtype) * (1 / (1 - p))
