"""Attention and dropout on a CPU: against PyTorch's attention, and against probabilities."""

import math

import pytest
import torch
from torch.nn import functional as F

from support.optim.layers import Dropout, causal_attention, drop, is_fused


def heads(T, dtype):
    """Returns q, k and v with the strides that they have in the model."""
    qkv = torch.randn(2, T, 3 * 4 * 16).to(dtype).requires_grad_()
    return qkv, [t.view(2, T, 4, 16).transpose(1, 2) for t in qkv.split(4 * 16, dim=2)]


@pytest.mark.parametrize(
    ("dtype", "T", "fused"),
    [(torch.bfloat16, 64, False), (torch.bfloat16, 256, False), (torch.bfloat16, 512, True), (torch.float32, 64, True)],
)
def test_attention_is_pytorchs(dtype, T, fused):
    """Its values and gradients, computed in fp32; without the fused kernel for short rows in bf16."""
    torch.manual_seed(0)
    qkv, (q, k, v) = heads(T, dtype)
    exact = qkv.detach().float().requires_grad_()
    expected = F.scaled_dot_product_attention(
        *(t.view(2, T, 4, 16).transpose(1, 2) for t in exact.split(4 * 16, dim=2)), is_causal=True
    )
    upstream = torch.randn_like(expected)
    expected.backward(upstream)
    with torch.profiler.profile() as profile:
        y = causal_attention(q, k, v)
        y.backward(upstream.to(dtype))
    assert is_fused("cpu", dtype, T, 0.0) == fused == any("flash" in event.key for event in profile.key_averages())
    tolerance = 0.02 if dtype == torch.bfloat16 else 1e-5  # bf16 has 8 bits
    torch.testing.assert_close(y.float(), expected, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(qkv.grad.float(), exact.grad, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dropout_removes_weights_of_the_attention(dtype):
    """With an identity for v, the output is the weights."""
    torch.manual_seed(0)
    T = 64
    q, k = torch.randn(2, 8, 4, T, T).to(dtype)
    weights = causal_attention(q, k, torch.eye(T, dtype=dtype).expand(8, 4, T, T), 0.25).float()
    exact = (
        (q.float() @ k.float().mT / math.sqrt(T)).masked_fill(torch.ones(T, T).triu(1).bool(), -math.inf).softmax(-1)
    )
    kept, past = weights != 0, torch.ones(T, T).tril().bool().expand(8, 4, T, T)
    assert not kept[~past].any() and kept[past].float().mean() == pytest.approx(0.75, abs=0.01)
    torch.testing.assert_close(
        weights[kept], exact[kept] / 0.75, atol=1e-3, rtol=0.04 if dtype == torch.bfloat16 else 1e-5
    )


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_each_value_is_dropped_by_itself(p):
    """Four values share a random number: each combination of them is as frequent as if they did not."""
    torch.manual_seed(0)
    x = torch.randn(400_003, requires_grad=True)  # not a multiple of four
    y = drop(x, p)
    kept = y != 0
    torch.testing.assert_close(y[kept], x[kept] / (1 - p))
    y.backward(torch.ones_like(y))
    torch.testing.assert_close(x.grad, kept / (1 - p))
    patterns = (kept[:400_000].view(-1, 4) * torch.tensor([8, 4, 2, 1])).sum(1).bincount(minlength=16)
    for pattern, count in enumerate(patterns.tolist()):
        probability = (1 - p) ** pattern.bit_count() * p ** (4 - pattern.bit_count())
        assert abs(count - 1e5 * probability) < 5 * math.sqrt(1e5 * probability)
    assert not torch.equal(drop(x, p), y)
    torch.manual_seed(0)
    assert torch.equal(drop(torch.randn(400_003), p), y)


def test_only_training_drops():
    x = torch.ones(1000)
    assert torch.equal(Dropout(0.5).eval()(x), x) and torch.equal(Dropout(0.0)(x), x)
    assert not torch.equal(Dropout(0.5)(x), x)


@pytest.mark.slow
def test_compiled_dropout_drops():
    """torch.compile brings random numbers of its own."""
    torch.manual_seed(0)
    y = torch.compile(Dropout(0.25), backend="aot_eager", fullgraph=True)(torch.ones(100_000))
    assert (y != 0).float().mean() == pytest.approx(0.75, abs=0.01) and y.unique().tolist() == pytest.approx([0, 4 / 3])
