"""Muon against PyTorch's own and against an SVD; what it does in a run."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
import torch
from helpers import on_ranks
from training import TINY, trained

from support.optim.muon import Muon, orthogonalize
from train_gpt2 import GPT

ADAMW = dict(lr=1e-2, betas=(0.9, 0.95), eps=1e-8)


def random_matrices(*shapes, seed=0):
    """Parameters with gradients, always the same ones."""
    generator = torch.Generator().manual_seed(seed)
    parameters = []
    for shape in shapes:
        parameters.append(torch.nn.Parameter(torch.randn(shape, generator=generator)))
        parameters[-1].grad = torch.randn(shape, generator=generator)
    return parameters


@pytest.mark.parametrize("dtype, off", [(torch.float32, 1e-4), (torch.bfloat16, 0.05)])
@pytest.mark.parametrize("n, m", [(64, 64), (32, 128)])
def test_orthogonalized_matrices_have_the_singular_vectors_of_an_svd(n, m, dtype, off):
    """Its singular values are what five quintic polynomials make of the original ones."""
    matrices = torch.randn(3, n, m, generator=torch.Generator().manual_seed(0))
    made = orthogonalize(matrices.to(dtype)).float()
    for matrix, result in zip(matrices, made, strict=True):
        u, s, vt = torch.linalg.svd(matrix.double(), full_matrices=False)
        values = relative = s / s.square().sum().sqrt()
        for _ in range(5):
            values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
        torch.testing.assert_close(u.T @ result.double() @ vt.T, values.diag(), rtol=0, atol=off)
        assert all(0.68 < value < 1.21 for value, of in zip(values, relative, strict=True) if of >= 0.002)


def test_steps_equal_those_of_pytorchs_muon():
    """Five steps on matrices of three shapes, two of them batched, tall ones too. PyTorch computes in bf16.

    Its scale is 0.2 sqrt(larger side) and ours 11 sqrt(larger side / smaller side), so the two have different rates.
    """
    shapes = [(32, 32), (64, 32), (32, 64), (32, 32), (32, 128)]
    ours, theirs = random_matrices(*shapes), random_matrices(*shapes)
    muon = Muon([{"params": ours, "num_splits": [1] * 5, "weight_decay": 0.1}], dtype=torch.bfloat16, **ADAMW)
    ratio = 11 / (0.2 * 32**0.5)
    reference = torch.optim.Muon(theirs, weight_decay=0.1 / ratio, adjust_lr_fn="match_rms_adamw")
    for step in range(5):
        muon.param_groups[0]["lr"] = 1e-3 / (step + 1)
        reference.param_groups[0]["lr"] = ratio * 1e-3 / (step + 1)
        muon.step()
        reference.step()
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-4)
            a.grad = torch.randn(a.shape, generator=torch.Generator().manual_seed(step))
            b.grad = a.grad.clone()
    change = ours[0] - random_matrices(*shapes)[0]
    assert change.abs().max() > 0.005


def test_query_key_and_value_are_separate_matrices():
    [stacked], [start] = random_matrices((96, 32)), random_matrices((96, 32))
    sizes = torch.tensor([1.0, 100.0, 0.01]).repeat_interleave(32)  # a large matrix must not hide the others
    stacked.grad *= sizes[:, None]
    separate = [torch.nn.Parameter(part.detach().clone()) for part in stacked.chunk(3)]
    for part, gradient in zip(separate, stacked.grad.chunk(3), strict=True):
        part.grad = gradient
    Muon([{"params": [stacked], "num_splits": [3], "weight_decay": 0.1}], dtype=torch.float32, **ADAMW).step()
    Muon([{"params": separate, "num_splits": [1] * 3, "weight_decay": 0.1}], dtype=torch.float32, **ADAMW).step()
    assert torch.equal(stacked, torch.cat(separate))
    update = (start * (1 - 1e-2 * 0.1) - stacked).detach() / (1e-2 * 11)
    for part in update.chunk(3):
        assert 0.75 < torch.linalg.matrix_norm(part, ord=2) < 1.25


def test_muon_gets_the_matrices_of_the_blocks():
    with torch.device("meta"):
        model = GPT(TINY)
    by_muon, decayed, others = model.configure_optimizers(
        0.1, 1e-3, (0.9, 0.95), "muon", dtype=torch.float32
    ).param_groups
    names = {parameter: name for name, parameter in model.named_parameters()}
    matrices = [(f"transformer.h.{i}.{m}.weight", 3 if "attn.c_attn" in m else 1)
                for i in range(2) for m in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")]  # fmt: skip
    assert [(names[p], n) for p, n in zip(by_muon["params"], by_muon["num_splits"], strict=True)] == matrices
    assert [names[p] for p in decayed["params"]] == ["transformer.wte.weight", "transformer.wpe.weight"]
    assert [group["weight_decay"] for group in (by_muon, decayed, others)] == [0.1, 0.1, 0.0]
    assert len(by_muon["params"]) + len(decayed["params"]) + len(others["params"]) == len(names)


def test_adamw_has_a_learning_rate_of_its_own():
    """It stays in proportion to Muon's through the schedule; Muon's matrices do not notice."""
    vectors, expected_vectors = random_matrices((7,), (5, 3), seed=1), random_matrices((7,), (5, 3), seed=1)
    matrices, expected_matrices = random_matrices((32, 32)), random_matrices((32, 32))
    group = {"num_splits": [1], "weight_decay": 0.1}
    muon = Muon([group | {"params": matrices}, {"params": vectors}], dtype=torch.float32, adamw_lr=4e-2, **ADAMW)
    alone = Muon([group | {"params": expected_matrices}], dtype=torch.float32, **ADAMW)
    adamw = torch.optim.AdamW(expected_vectors, fused=True, **ADAMW)
    for lr in (2e-3, 1e-2, 5e-3):
        for optimizer, rate in ((muon, lr), (alone, lr), (adamw, 4 * lr)):
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
    assert [group["lr"] for group in muon.param_groups] == [5e-3, 5e-3]
    for a, b in zip(matrices + vectors, expected_matrices + expected_vectors, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, 3e38])
def test_a_skipped_step_changes_nothing(value):
    parameters = random_matrices((32, 32), (96, 32), (7,))
    groups = [{"params": parameters[:2], "num_splits": [1, 3]}, {"params": parameters[2:]}]
    muon = Muon(groups, dtype=torch.float32, weight_decay=0.1, **ADAMW)
    muon.step()
    state = [p.detach().clone() for p in parameters], [muon.state[p]["momentum_buffer"].clone() for p in parameters[:2]]
    good = parameters[0].grad.clone()
    parameters[0].grad[3, 4] = value
    muon.found_inf = torch.tensor(1.0)
    muon.step()
    now = parameters, [muon.state[p]["momentum_buffer"] for p in parameters[:2]]
    assert all(
        torch.equal(a, b) for before, after in zip(state, now, strict=True) for a, b in zip(before, after, strict=True)
    )
    parameters[0].grad, muon.found_inf = good, torch.tensor(0.0)
    muon.step()
    assert not any(torch.equal(a, b) for a, b in zip(state[0], parameters, strict=True))


def weights_after_three_steps(rank=0):
    """Returns them, and how many matrices this rank has orthogonalized, by batch of one shape."""
    parameters = random_matrices((32, 32), (96, 32), (64, 32), (32, 64), (16, 8))
    groups = [{"params": parameters, "num_splits": [1, 3, 1, 1, 1], "weight_decay": 0.1}]
    optimizer, counts = Muon(groups, dtype=torch.bfloat16, **ADAMW), []

    def count(matrices):
        counts.append(sum(bool(matrix.any()) for matrix in matrices))
        return orthogonalize(matrices)

    with mock.patch("support.optim.muon.orthogonalize", count):
        for _ in range(3):
            optimizer.step()
    return [p.detach().numpy() for p in parameters], counts


@pytest.mark.slow
def test_ranks_divide_the_work_and_agree_bit_by_bit(tmp_path):
    """4 matrices of one shape, 2 of another and 1 of a third, on 3 ranks: some have more to do, some nothing."""
    expected, counts = weights_after_three_steps()
    assert counts == [4, 2, 1] * 3
    ranks = on_ranks(weights_after_three_steps, 3, tmp_path)
    assert [ranks[rank][1] for rank in range(3)] == [[2, 1, 1] * 3, [2, 1, 0] * 3, [0, 0, 0] * 3]
    for weights, _ in ranks.values():
        for a, b in zip(weights, expected, strict=True):
            np.testing.assert_array_equal(a, b)


def test_large_batches_are_split_to_bound_memory(monkeypatch):
    in_one, split = random_matrices(*[(8, 16)] * 7), random_matrices(*[(8, 16)] * 7)
    Muon([{"params": in_one, "num_splits": [1] * 7}], dtype=torch.float32, **ADAMW).step()
    batches = []
    monkeypatch.setattr("support.optim.muon.orthogonalize", lambda x: batches.append(len(x)) or orthogonalize(x))
    monkeypatch.setattr("support.optim.muon.MAX_BATCH_NUMEL", 3 * 8 * 16)
    Muon([{"params": split, "num_splits": [1] * 7}], dtype=torch.float32, **ADAMW).step()
    assert batches == [3, 3, 1]
    for a, b in zip(in_one, split, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("dtype, matmul_dtype", [("bf16", "bfloat16"), ("fp32", "float32"), ("fp16", "float32")])
def test_matrix_products_are_in_bf16_only_if_training_is(byte_shards, tmp_path, monkeypatch, dtype, matmul_dtype):
    seen = set()
    monkeypatch.setattr("support.optim.muon.orthogonalize", lambda x: seen.add(x.dtype) or orthogonalize(x))
    trained(tmp_path / "run", "--data", byte_shards, "--recipe", "fast", "--max-steps", 2, "--dtype", dtype)
    assert seen == {getattr(torch, matmul_dtype)}


def test_the_flag_is_for_what_adamw_updates(byte_shards, tmp_path):
    flags = ["--data", byte_shards, "--recipe", "fast", "--adamw-lr", 0, "--max-steps", 2, "--checkpoint-every", 1]
    trained(tmp_path, *flags)
    before, after = (GPT.from_pretrained(tmp_path / name).state_dict() for name in ("model_00001", "model_00002"))
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if name.startswith("transformer.h.") and before[name].dim() == 2}
