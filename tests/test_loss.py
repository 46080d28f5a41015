"""The cross-entropy in chunks, against F.cross_entropy on all logits at once."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
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
    monkeypatch.setattr(loss, "CPU_CHUNK_ROWS", 8)
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


def test_the_weight_gradients_of_many_chunks_are_summed_in_fp32(head):
    """There are 250 of them in bf16, each rounded once; a bf16 sum would be rounded 250 times."""
    x, weight, targets, vocab_size = head
    x, targets = x.repeat(40, 1), targets.repeat(40)
    exact = loss_and_gradients(plain_loss, x, weight, targets, vocab_size)
    found = loss_and_gradients(chunked_cross_entropy, x, weight, targets, vocab_size, dtype=torch.bfloat16)
    assert relative_error(found[2], exact[2]) < 2**-7


@pytest.fixture
def products(monkeypatch):
    """The shapes of all matrix products, a list."""
    shapes, mm = [], torch.mm
    monkeypatch.setattr(torch, "mm", lambda a, b, **out: shapes.append((*a.shape, b.size(1))) or mm(a, b, **out))
    return shapes


def test_no_gradients_are_computed_under_no_grad(head, products):
    x, weight, targets, vocab_size = head
    with torch.no_grad():
        chunked_cross_entropy(x.clone().requires_grad_(), weight.clone().requires_grad_(), targets, vocab_size)
    assert products == [(8, 32, 320)] * 6 + [(2, 32, 320)]  # the logits


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_frozen_weight_gets_no_gradient_and_costs_none(head, products, compiled):
    """The gradient of the hidden states is the same."""
    function = torch.compile(chunked_cross_entropy, fullgraph=True) if compiled else chunked_cross_entropy
    x, weight, targets, vocab_size = head
    expected, expected_grad, _ = loss_and_gradients(chunked_cross_entropy, *head)
    products.clear()
    x = x.clone().requires_grad_()
    value = function(x, weight, targets, vocab_size)
    value.backward()
    torch.testing.assert_close((value.detach(), x.grad), (expected, expected_grad))
    assert weight.grad is None
    assert set(products) == {(8, 32, 320), (2, 32, 320), (8, 320, 32), (2, 320, 32)}  # logits and gradients of x


def fused(*args: Any) -> torch.Tensor:
    """Does what the compiled one does, without a compiler."""
    with patch.object(loss, "_compiled", lambda function: function):
        return loss._fused_logits_to_gradient_(*args)


FUNCTIONS = {
    "eager": loss._logits_to_gradient_,
    "fused": fused,
    "compiled": loss._fused_logits_to_gradient_,
}
functions = pytest.mark.parametrize("name", ["eager", "fused", pytest.param("compiled", marks=pytest.mark.slow)])


def logits_and_targets(vocab_size: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """40 rows of 320 logits, some of them far apart, the padding NaN; the first and the last id are targets, too."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(40, 320, generator=generator) * torch.tensor([1.0, 30.0]).repeat(20)[:, None]
    logits[:, vocab_size:] = torch.nan
    targets = torch.randint(0, vocab_size, (40,), generator=generator)
    targets[:4] = torch.tensor([0, 0, vocab_size - 1, vocab_size - 1])
    return logits.to(dtype), targets


def exact_losses(logits: torch.Tensor, targets: torch.Tensor, vocab_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """PyTorch's cross-entropy of each row in fp64, and the gradients of the logits, zero in the padding."""
    z = logits[:, :vocab_size].double().requires_grad_()
    losses = F.cross_entropy(z, targets, reduction="none")
    losses.sum().backward()
    return losses.detach(), F.pad(z.grad, (0, logits.size(1) - vocab_size))


@functions
@pytest.mark.parametrize(
    "dtype, vocab_size, factor",
    [(torch.float32, 257, 1.0), (torch.bfloat16, 257, 1.0), (torch.bfloat16, 320, 1.0), (torch.float16, 257, 256.0)],
)
def test_losses_and_gradients_of_logits(name, dtype, vocab_size, factor):
    logits, targets = logits_and_targets(vocab_size, dtype)
    expected, gradients = exact_losses(logits, targets, vocab_size)
    without = FUNCTIONS[name](logits.clone(), targets, vocab_size, False, factor)
    losses = FUNCTIONS[name](logits, targets, vocab_size, True, factor)
    assert losses.dtype == torch.float32 and torch.equal(losses, without)
    torch.testing.assert_close(losses.double(), expected, rtol=1e-6, atol=1e-5)  # fp32: logits near 100
    rounding = {torch.bfloat16: 2**-8, torch.float16: 2**-11}.get(dtype, 0.0)
    torch.testing.assert_close(logits.double(), factor * gradients, rtol=rounding + 1e-5, atol=1e-7)


@pytest.mark.parametrize("name", ["fused", pytest.param("compiled", marks=pytest.mark.slow)])
def test_the_gradient_of_a_target_that_is_almost_certain_is_exact(name):
    """Its probability less one is the sum of the other probabilities: 1e-8 here, below fp32's rounding of one."""
    logits, targets = logits_and_targets(257, torch.float32)
    logits[:, :257] /= logits[:, :257].abs().max()
    rows = torch.arange(40)
    logits[rows, targets] = 24.0
    expected, gradients = exact_losses(logits, targets, 257)
    losses = FUNCTIONS[name](logits, targets, 257, True, 1.0)
    torch.testing.assert_close(losses.double(), expected, rtol=1e-5, atol=0)
    torch.testing.assert_close(logits[rows, targets].double(), gradients[rows, targets], rtol=1e-5, atol=0)


@functions
def test_infinite_and_nan_logits(name):
    """A row with NaN has no loss, and no row changes another."""
    logits, targets = logits_and_targets(257, torch.float32)
    logits[4, :257:2] = -torch.inf  # some ids are impossible
    targets[4] = 1
    logits[5, :257] = -torch.inf  # all but the target
    logits[5, targets[5]] = 3.0
    logits[6, targets[6]] = -torch.inf  # the target: the loss is infinite
    logits[7, :257] = -torch.inf  # all of them
    logits[8, 100] = torch.nan
    logits[9, targets[9]] = torch.nan
    expected, gradients = exact_losses(logits, targets, 257)
    losses = FUNCTIONS[name](logits, targets, 257, True, 1.0)
    bad = torch.tensor([6, 7, 8, 9])
    assert expected[4:6].isfinite().all() and not expected[bad].isfinite().any()
    assert not losses[bad].isfinite().any() and logits[8:10, :257].isnan().all()
    good = [row for row in range(40) if row not in bad]
    torch.testing.assert_close(losses[good].double(), expected[good], rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(logits[good].double(), gradients[good], rtol=1e-5, atol=1e-7)


def test_a_second_derivative_is_an_error(head):
    """The gradients are computed in the forward pass, so nothing would depend on them."""
    x, weight, targets, vocab_size = head
    x = x.clone().requires_grad_()
    value = chunked_cross_entropy(x, weight, targets, vocab_size)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(value, x, create_graph=True)


@pytest.mark.parametrize("scale", [1 / 6, 2.0**16])  # a sixth, over 256 rows and the factor, has 6 bits in fp16
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_fp16_is_as_exact_as_its_rounding(compiled, scale):
    """With confident logits, up to 60, most elements of the softmax are below fp16's smallest number."""
    function = torch.compile(chunked_cross_entropy, fullgraph=True) if compiled else chunked_cross_entropy
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(256, 64, generator=generator), torch.randn(5056, 64, generator=generator)
    targets = (x @ weight[:5000].T).argmax(-1)
    x = (x * 60 / (x @ weight.T).max()).half().float()
    head = x, weight.half().float(), targets, 5000
    exact = loss_and_gradients(lambda *head: plain_loss(head[0].double(), head[1].double(), *head[2:]), *head)
    found = loss_and_gradients(function, *head, scale, torch.float16)
    plain = loss_and_gradients(plain_loss, *head, 2.0**14, torch.float16)  # as a gradient scaler does
    assert found[0] == pytest.approx(exact[0].item(), rel=0.02)  # logits near 60 are 0.03 apart
    for chunked, all_at_once, truth in zip(found[1:], plain[1:], exact[1:], strict=True):
        assert relative_error(chunked, truth) < 1.2 * relative_error(all_at_once, truth)


def test_fp16_sums_over_rows_do_not_overflow(head):
    """The gradient of the weight of an id that is the target of 1,000 rows is the sum of their hidden states."""
    x, weight, _, vocab_size = head
    x = x.abs().repeat(20, 1)
    rows = x, weight * 0.1, torch.full((1000,), 3), vocab_size
    exact = loss_and_gradients(plain_loss, *rows)
    with patch.object(loss, "CPU_CHUNK_ROWS", 1000):
        found = loss_and_gradients(chunked_cross_entropy, *rows, 2.0**16, torch.float16)
    assert (1000 * loss.FP16_FACTOR * exact[2]).abs().max() > torch.finfo(torch.float16).max
    assert relative_error(found[2], exact[2]) < 2**-10
