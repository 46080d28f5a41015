"""The cross-entropy in chunks, against F.cross_entropy on all logits at once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import ROOT
from torch.nn import functional as F

from support.optim import loss
from support.optim.loss import chunked_cross_entropy


def plain_loss(x, weight, targets, vocab_size):
    return F.cross_entropy(F.linear(x, weight)[:, :vocab_size].float(), targets)


def loss_and_gradients(function, x, weight, targets, vocab_size, factor=1.0, dtype=None):
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
        value = function(x, weight, targets, vocab_size)
    (factor * value).backward()
    return value.detach(), x.grad / factor, weight.grad / factor


@pytest.fixture
def head(monkeypatch):
    """50 rows, 257 ids of 320; chunks of 8 rows, the last one of 2."""
    monkeypatch.setitem(loss.CHUNK_NUMEL, "cpu", 8 * 320)
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(50, 32, generator=generator), torch.randn(320, 32, generator=generator)
    return x, weight, torch.randint(0, 257, (50,), generator=generator), 257


def relative_error(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_chunked_loss_is_the_cross_entropy(head, compiled):
    function = torch.compile(chunked_cross_entropy, fullgraph=True) if compiled else chunked_cross_entropy
    exact = loss_and_gradients(lambda x, w, y, V: F.cross_entropy((x @ w.T)[:, :V], y), *(
        t.double() if torch.is_tensor(t) and t.is_floating_point() else t for t in head
    ))  # fmt: skip
    chunked = loss_and_gradients(function, *head, factor=0.25)
    assert all(relative_error(a, b) < 1e-6 for a, b in zip(chunked, exact, strict=True))
    assert not chunked[2][257:].any()  # the padding

    plain_bf16 = loss_and_gradients(plain_loss, *head, dtype=torch.bfloat16)
    chunked_bf16 = loss_and_gradients(function, *head, dtype=torch.bfloat16)
    for a, b, truth in zip(chunked_bf16, plain_bf16, exact, strict=True):
        assert a.dtype == torch.float32
        assert relative_error(a, truth) < 1.2 * relative_error(b, truth) + 1e-6  # no worse than bf16 throughout
    with torch.no_grad():
        assert relative_error(function(*head), exact[0]) < 1e-6


def test_no_gradients_are_computed_under_no_grad(head, monkeypatch):
    calls = []
    mm = torch.mm
    monkeypatch.setattr(torch, "mm", lambda *args, **options: calls.append(args) or mm(*args, **options))
    with torch.no_grad():
        chunked_cross_entropy(*head)
    assert not calls
    loss_and_gradients(chunked_cross_entropy, *head)
    assert calls


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_frozen_weight_gets_no_gradient_and_costs_none(head, monkeypatch, compiled):
    """And the gradient of the hidden states is the same."""
    function = torch.compile(chunked_cross_entropy, fullgraph=True) if compiled else chunked_cross_entropy
    x, weight, targets, vocab_size = head
    expected, expected_grad, _ = loss_and_gradients(function, *head)
    products, matmul = [], torch.Tensor.__matmul__
    monkeypatch.setattr(torch.Tensor, "__matmul__", lambda a, b: products.append(a.shape) or matmul(a, b))
    x = x.clone().requires_grad_()
    value = function(x, weight, targets, vocab_size)
    value.backward()
    assert torch.equal(value.detach(), expected) and torch.equal(x.grad, expected_grad) and weight.grad is None
    assert products == [(8, 32)] * 6 + [(2, 32)]  # the logits of each chunk


def test_fp16_gradients_are_scaled_before_they_are_rounded(head):
    """Thousands of rows divide each gradient, and what a gradient scaler does not lift is zero in fp16."""
    x, weight, targets, vocab_size = (head[0] * 1e-3, *head[1:])
    exact = loss_and_gradients(plain_loss, x, weight, targets, vocab_size)
    scaled = loss_and_gradients(chunked_cross_entropy, x, weight, targets, vocab_size, 2.0**14, torch.float16)
    assert all(relative_error(a, b) < 0.01 for a, b in zip(scaled, exact, strict=True))


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_logits_never_exist_all_at_once():
    """8,192 rows of 16,384 logits are 537 MB in fp32."""
    script = """
import torch
from support.optim import loss
def peak(): return int(next(l for l in open("/proc/self/status") if l.startswith("VmHWM")).split()[1]) / 1024
x, w = torch.randn(8192, 8, requires_grad=True), torch.randn(16384, 8, requires_grad=True)
y = torch.randint(0, 16384, (8192,))
loss.CHUNK_NUMEL["cpu"] = 2**20
loss.chunked_cross_entropy(x[:64], w, y[:64], 16384).backward()
before = peak()
loss.chunked_cross_entropy(x, w, y, 16384).backward()
print(peak() - before)
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert float(done.stdout) < 64  # MB
