"""Recipes: what --recipe sets, the schedule with a cooldown, and Muon against PyTorch's own and an SVD."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import sys
import time

import numpy as np
import pytest
import torch
from conftest import (
    FORKS,
    ONE_PROCESS,
    ROOT,
    TINY,
    config_of,
    finish_run,
    losses,
    run_script,
    run_to_the_end,
    start_run,
)
from torch.nn import functional as F

import train_gpt2
from support import checkpoint
from support.cli import UserError
from support.muon import Muon, orthogonalize
from train_gpt2 import GPT, TrainConfig, configure, get_lr, train

ADAMW = dict(lr=1e-2, betas=(0.9, 0.95), eps=1e-8)


def trained(out, *flags):
    train(config_of("--out", out, *flags), ONE_PROCESS)
    return (out / "log.txt").read_text()


def random_matrices(*shapes, seed=0):
    """Parameters with gradients, always the same ones."""
    generator = torch.Generator().manual_seed(seed)
    parameters = []
    for shape in shapes:
        parameters.append(torch.nn.Parameter(torch.randn(shape, generator=generator)))
        parameters[-1].grad = torch.randn(shape, generator=generator)
    return parameters


# ---- what the flags set


@pytest.mark.parametrize(
    "flags, optimizer, schedule, max_lr, min_lr",
    [
        ([], "adamw", "cosine", 6e-4, 6e-5),
        (["--recipe", "gpt2"], "adamw", "cosine", 6e-4, 6e-5),
        (["--recipe", "fast"], "muon", "wsd", 3.6e-3, 7.2e-5),
        (["--recipe", "fast", "--optimizer", "adamw"], "adamw", "wsd", 3.6e-3, 7.2e-5),
        (["--recipe", "fast", "--schedule", "cosine"], "muon", "cosine", 3.6e-3, 3.6e-4),
        (["--recipe", "fast", "--max-lr", "1e-3", "--min-lr", "0"], "muon", "wsd", 1e-3, 0.0),
        (["--optimizer", "muon"], "muon", "cosine", 6e-4, 6e-5),
        (["--schedule", "wsd", "--max-lr", "1e-3"], "adamw", "wsd", 1e-3, 2e-5),
    ],
)
def test_a_recipe_sets_defaults_and_nothing_else(flags, optimizer, schedule, max_lr, min_lr):
    config, _ = configure(flags)
    settled = (config.optimizer, config.schedule, config.max_lr, config.min_lr)
    assert settled == (optimizer, schedule, max_lr, pytest.approx(min_lr))
    plain, _ = configure([])
    recipe = {"recipe", "optimizer", "schedule", "max_lr", "min_lr"}
    assert all(getattr(config, name) == getattr(plain, name) for name in vars(plain).keys() - recipe)


def test_rates_with_a_cooldown_by_hand():
    config = TrainConfig(schedule="wsd", max_lr=1.0, min_lr=0.1, warmup_steps=10, decay_steps=100, max_steps=200)
    expected = {0: 0.1, 9: 1.0, 10: 1.0, 59: 1.0, 60: 1.0, 61: 0.9775, 80: 0.55, 99: 0.1225, 100: 0.1, 199: 0.1}
    for step, lr in expected.items():
        assert get_lr(step, config) == pytest.approx(lr), step


@pytest.mark.parametrize(
    "options, expected",
    [
        (dict(cooldown_fraction=0.0), {10: 1.0, 99: 1.0, 100: 0.1}),
        (dict(cooldown_fraction=1.0), {9: 1.0, 10: 1.0, 55: 0.55, 100: 0.1}),  # no sooner than the warm-up ends
        (dict(warmup_steps=0, cooldown_fraction=1.0), {0: 1.0, 50: 0.55}),
        (dict(warmup_steps=300), {0: 1 / 300, 150: 151 / 300, 299: 1.0}),
    ],
)
def test_cooldowns_at_their_limits(options, expected):
    base = dict(schedule="wsd", max_lr=1.0, min_lr=0.1, warmup_steps=10, decay_steps=100, max_steps=300)
    for step, lr in expected.items():
        assert get_lr(step, TrainConfig(**(base | options))) == pytest.approx(lr), step


@pytest.mark.parametrize(
    "flags, problem",
    [
        (["--cooldown-fraction", "1.1"], "--cooldown-fraction is 1.1. It must be 1 or less."),
        (["--cooldown-fraction", "-0.1"], "--cooldown-fraction is -0.1. It must be 0 or more."),
        (["--recipe", "fast", "--decay-steps", "1" + "0" * 400], "--decay-steps is 1000"),
        (["--cooldown-fraction", "nan"], "--cooldown-fraction is nan. It must be 0 or more."),
        (["--recipe", "slow"], "argument --recipe: invalid choice: 'slow'"),
        (["--optimizer", "sgd"], "argument --optimizer: invalid choice: 'sgd'"),
        (["--schedule", "linear"], "argument --schedule: invalid choice: 'linear'"),
    ],
)
def test_bad_recipes(flags, problem):
    with pytest.raises(UserError) as error:
        configure(flags)
    [said] = error.value.problems
    assert said.startswith(problem)


# ---- Muon


@pytest.mark.parametrize("dtype, off", [(torch.float32, 1e-4), (torch.bfloat16, 0.05)])
@pytest.mark.parametrize("n, m", [(64, 64), (32, 128)])
def test_directions_are_those_of_an_svd(n, m, dtype, off):
    """The same singular vectors; of the singular values, what five quintics make of numbers."""
    matrices = torch.randn(3, n, m, generator=torch.Generator().manual_seed(0))
    made = orthogonalize(matrices.to(dtype)).float()
    for matrix, result in zip(matrices, made, strict=True):
        u, s, vt = torch.linalg.svd(matrix.double(), full_matrices=False)
        values = relative = s / s.square().sum().sqrt()
        for _ in range(5):
            values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
        torch.testing.assert_close(u.T @ result.double() @ vt.T, values.diag(), rtol=0, atol=off)
        assert all(0.68 < value < 1.21 for value, of in zip(values, relative, strict=True) if of >= 0.002)


def test_updates_are_those_of_pytorchs_muon():
    """Five updates of matrices of three shapes, two of them together, tall ones too. PyTorch computes in bf16.

    Its scale is 0.2 sqrt(larger side) and ours 11 sqrt(larger side / smaller side), so its rate is another one.
    """
    shapes = [(32, 32), (64, 32), (32, 64), (32, 32), (32, 128)]
    ours, theirs = random_matrices(*shapes), random_matrices(*shapes)
    muon = Muon([{"params": ours, "parts": [1] * 5, "weight_decay": 0.1}], dtype=torch.bfloat16, **ADAMW)
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
    moved = ours[0] - random_matrices(*shapes)[0]
    assert moved.abs().max() > 0.005


def test_query_key_and_value_are_taken_apart():
    [whole], [start] = random_matrices((96, 32)), random_matrices((96, 32))
    sizes = torch.tensor([1.0, 100.0, 0.01]).repeat_interleave(32)  # a large one must not hide the others
    whole.grad *= sizes[:, None]
    apart = [torch.nn.Parameter(part.detach().clone()) for part in whole.chunk(3)]
    for part, gradient in zip(apart, whole.grad.chunk(3), strict=True):
        part.grad = gradient
    Muon([{"params": [whole], "parts": [3], "weight_decay": 0.1}], dtype=torch.float32, **ADAMW).step()
    Muon([{"params": apart, "parts": [1] * 3, "weight_decay": 0.1}], dtype=torch.float32, **ADAMW).step()
    assert torch.equal(whole, torch.cat(apart))
    update = (start * (1 - 1e-2 * 0.1) - whole).detach() / (1e-2 * 11)
    for part in update.chunk(3):
        assert 0.75 < torch.linalg.matrix_norm(part, ord=2) < 1.25


def test_what_muon_takes_of_gpt2():
    with torch.device("meta"):
        model = GPT(TINY)
    by_muon, decayed, others = model.configure_optimizers(0.1, 1e-3, (0.9, 0.95), torch.float32).param_groups
    names = {parameter: name for name, parameter in model.named_parameters()}
    matrices = [(f"transformer.h.{i}.{m}.weight", 3 if "attn.c_attn" in m else 1)
                for i in range(2) for m in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")]  # fmt: skip
    assert [(names[p], parts) for p, parts in zip(by_muon["params"], by_muon["parts"], strict=True)] == matrices
    assert [names[p] for p in decayed["params"]] == ["transformer.wte.weight", "transformer.wpe.weight"]
    assert [group["weight_decay"] for group in (by_muon, decayed, others)] == [0.1, 0.1, 0.0]
    assert len(by_muon["params"]) + len(decayed["params"]) + len(others["params"]) == len(names)


def test_the_rest_is_adamws():
    torch.manual_seed(0)
    tokens = torch.randint(257, (4, 16))
    models = [GPT(TINY), GPT(TINY)]
    models[1].load_state_dict(models[0].state_dict())
    both = [
        model.configure_optimizers(0.1, 1e-2, (0.9, 0.95), name)
        for model, name in zip(models, (torch.float32, None), strict=True)
    ]
    for model, optimizer in zip(models, both, strict=True):
        model(tokens, tokens)[1].backward()
        optimizer.step()
    for (name, a), b in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        assert torch.equal(a, b) == (".h." not in name or a.dim() == 1), name


@pytest.mark.parametrize("value", [torch.nan, torch.inf, 3e38])
def test_an_update_that_is_left_out_leaves_everything(value):
    parameters = random_matrices((32, 32), (96, 32), (7,))
    groups = [{"params": parameters[:2], "parts": [1, 3]}, {"params": parameters[2:]}]
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


def share_of_muon(rank, world, address, results):
    torch.distributed.init_process_group("gloo", init_method=address, rank=rank, world_size=world)
    results.put((rank, updated_weights()))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def updated_weights():
    torch.set_num_threads(1)
    parameters = random_matrices((32, 32), (96, 32), (64, 32), (32, 64), (16, 8))
    groups = [{"params": parameters, "parts": [1, 3, 1, 1, 1], "weight_decay": 0.1}]
    muon = Muon(groups, dtype=torch.bfloat16, **ADAMW)
    for _ in range(3):
        muon.step()
    return [p.detach().numpy() for p in parameters]


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_share_the_work_and_agree_bit_by_bit(tmp_path, world):
    """4 matrices of one shape, 2 of another and 1 of a third, among 2 and among 3: some have more, some nothing to do."""
    results = FORKS.Queue()
    address = f"file://{tmp_path}/meeting"
    ranks = [FORKS.Process(target=share_of_muon, args=(rank, world, address, results)) for rank in range(world)]
    for process in ranks:
        process.start()
    weights = dict(results.get(timeout=100) for _ in ranks)
    assert finish_run(ranks) == [0] * world
    for rank in range(world):
        for a, b in zip(weights[rank], updated_weights(), strict=True):
            np.testing.assert_array_equal(a, b)


def test_each_rank_orthogonalizes_its_share_only(monkeypatch):
    """Each of three ranks in turn, none of which hears from the others: 4 matrices are 2, 2 and none, in one go."""
    sizes = []
    monkeypatch.setattr("support.muon.AT_ONCE", 2 * 8 * 8)
    for rank in range(3):
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 3)
        monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
        for name in ("all_gather_into_tensor", "all_gather_single"):
            monkeypatch.setattr(torch.distributed, name, lambda result, own: result.zero_(), raising=False)
        seen = []
        monkeypatch.setattr("support.muon.orthogonalize", lambda x, seen=seen: seen.append(x.clone()) or x)
        parameters = random_matrices(*[(8, 8)] * 4)
        Muon([{"params": parameters, "parts": [1] * 4}], dtype=torch.float32, **ADAMW).step()
        sizes.append([[bool(matrix.any()) for matrix in batch] for batch in seen])
    assert sizes == [[[True, True]], [[True, True]], [[False, False]]]


def test_memory_is_bounded_by_pieces(monkeypatch):
    whole, pieces = random_matrices(*[(8, 16)] * 7), random_matrices(*[(8, 16)] * 7)
    Muon([{"params": whole, "parts": [1] * 7}], dtype=torch.float32, **ADAMW).step()
    batches = []
    monkeypatch.setattr("support.muon.orthogonalize", lambda x: batches.append(len(x)) or orthogonalize(x))
    monkeypatch.setattr("support.muon.AT_ONCE", 3 * 8 * 16)
    Muon([{"params": pieces, "parts": [1] * 7}], dtype=torch.float32, **ADAMW).step()
    assert batches == [3, 3, 1]
    for a, b in zip(whole, pieces, strict=True):
        torch.testing.assert_close(a, b)


# ---- runs


def test_the_recipe_of_gpt2_is_the_default_bit_by_bit(byte_shards, tmp_path):
    """What `--recipe gpt2` computes is compared with a plain loop elsewhere (`test_train.py`); this says it in flags."""
    flags = ["--data", byte_shards, "--max-steps", 8, "--checkpoint-every", 8]
    default = trained(tmp_path / "default", *flags)
    spelt_out = ["--recipe", "fast", "--optimizer", "adamw", "--schedule", "cosine"]
    assert trained(tmp_path / "gpt2", *flags, "--recipe", "gpt2") == default
    assert trained(tmp_path / "spelt_out", *flags, *spelt_out) == default
    weights = [(tmp_path / run / "model_00008" / "model.safetensors").read_bytes() for run in ("default", "spelt_out")]
    assert weights[0] == weights[1]
    assert trained(tmp_path / "fast", *flags, "--recipe", "fast") != default


def test_fast_does_not_depend_on_processes_and_micro_batch(byte_shards, tmp_path):
    flags = ["--data", byte_shards, "--recipe", "fast", "--shuffle", "--max-steps", 12, "--checkpoint-every", 6]
    logs = []
    for world, B in [(1, 16), (1, 2), (2, 4), (4, 1)]:
        out = f"{world}x{B}"
        run_to_the_end(*flags, "--out", out, "--batch-size", B, cwd=tmp_path, world=world)
        logs.append(tmp_path / out / "log.txt")
    for path in logs:
        np.testing.assert_allclose(losses(path), losses(logs[0]), rtol=0, atol=1e-4)
    assert losses(logs[0])[-1] < losses(logs[0])[0] - 0.5


def bad_gradient_at_step_3_on_rank_1(rank):
    real, calls = train_gpt2.train_step, []

    def step(run, lr):
        calls.append(1)
        poison = len(calls) == 4 and rank == 1
        weight = run.raw_model.transformer.h[0].attn.c_attn.weight
        hook = weight.register_hook(lambda grad: grad * torch.nan) if poison else None
        try:
            return real(run, lr)
        finally:
            if hook:
                hook.remove()

    train_gpt2.train_step = step


def no_update_at_step_3(rank):
    real, calls = Muon.step, []

    def step(self, *args):
        calls.append(1)
        return None if len(calls) == 4 else real(self, *args)

    Muon.step = step


def state_of(directory):
    return checkpoint.read_state(directory)["optimizer"]["state"]


def assert_same_run(a, b, name):
    assert (a / "log.txt").read_text() == (b / "log.txt").read_text()
    assert (a / name / "model.safetensors").read_bytes() == (b / name / "model.safetensors").read_bytes()
    states = state_of(a / name), state_of(b / name)
    assert states[0].keys() == states[1].keys()
    for key, state in states[0].items():
        assert state.keys() == states[1][key].keys()
        assert all(torch.equal(tensor, states[1][key][name]) for name, tensor in state.items())


def test_a_bad_update_is_left_out_on_all_ranks(byte_shards, tmp_path):
    flags = ["--data", byte_shards, "--recipe", "fast", "--max-steps", 8, "--val-every", 0, "--checkpoint-every", 8]
    run_to_the_end(*flags, "--out", "bad", cwd=tmp_path, world=2, sabotage=bad_gradient_at_step_3_on_rank_1)
    assert "step     3 | skipped" in (tmp_path / "0.txt").read_text()
    run_to_the_end(*flags, "--out", "skipped", cwd=tmp_path, world=2, sabotage=no_update_at_step_3)
    assert_same_run(tmp_path / "bad", tmp_path / "skipped", "model_00008")


def test_overflows_of_fp16_leave_muon_alone(byte_shards, tmp_path, monkeypatch):
    real = torch.amp.GradScaler
    monkeypatch.setattr(torch.amp, "GradScaler", lambda *args, **kwargs: real(*args, init_scale=2.0**60, **kwargs))
    flags = ["--data", byte_shards, "--recipe", "fast", "--max-steps", 60, "--dtype", "fp16", "--checkpoint-every", 60]
    log = trained(tmp_path / "run", *flags)
    state = checkpoint.read_state(tmp_path / "run" / "model_00060")
    skipped = 60 - int(next(s["step"] for s in state["optimizer"]["state"].values() if "step" in s))
    assert skipped > 3 and state["scaler"]["scale"] == 2.0 ** (60 - skipped)
    values = losses(tmp_path / "run" / "log.txt")
    assert "nan" not in log and values[-1] < values[0] - 1


@pytest.mark.parametrize("world", [1, 2])
def test_a_resumed_fast_run_is_the_uninterrupted_run(byte_shards, tmp_path, world):
    flags = ["--data", byte_shards, "--recipe", "fast", "--shuffle", "--checkpoint-every", 4]
    run_to_the_end(*flags, "--max-steps", 11, "--out", "straight", cwd=tmp_path, world=world)
    codes = finish_run(start_run(*flags, "--max-steps", 11, "--out", "resumed", cwd=tmp_path, world=world,
                                 sabotage=die_at_step_6))  # fmt: skip
    assert any(codes)
    # the flags of the recipe come from the checkpoint
    run_to_the_end("--resume", "--out", "resumed", cwd=tmp_path, world=world)
    assert_same_run(tmp_path / "straight", tmp_path / "resumed", "model_00011")


def die_at_step_6(rank):
    real, calls = train_gpt2.train_step, []

    def step(run, lr):
        calls.append(1)
        if len(calls) == 7:
            while not os.path.exists("resumed/model_00004"):
                time.sleep(0.05)
            os._exit(9)
        return real(run, lr)

    train_gpt2.train_step = step


def test_a_resume_keeps_its_recipe(byte_shards, tmp_path):
    out = tmp_path / "run"
    trained(out, "--data", byte_shards, "--recipe", "fast", "--max-steps", 6)
    config, _ = configure(["--resume", "--out", str(out)])
    assert (config.recipe, config.optimizer, config.schedule, config.max_lr) == ("fast", "muon", "wsd", 3e-3)
    with pytest.raises(UserError) as error:
        changed = "--recipe gpt2 --optimizer adamw --schedule cosine --cooldown-fraction 0.2".split()
        configure(["--resume", "--out", str(out), *changed])
    refused = {problem.split()[0] for problem in error.value.problems}
    assert refused == {"--recipe", "--optimizer", "--schedule", "--cooldown-fraction"}


def test_a_constant_rate_can_be_ended_sooner_or_later(byte_shards, tmp_path):
    """A run of 20 updates, left at 6, is cut to 10 and stretched to 30: each is the run of that length, bit by bit."""
    flags = ["--data", byte_shards, "--recipe", "fast", "--shuffle", "--checkpoint-every", 6]
    trained(tmp_path / "20", *flags, "--max-steps", 20)
    for steps in (10, 30):
        trained(tmp_path / f"{steps}", *flags, "--max-steps", steps)
        out = tmp_path / f"to_{steps}"
        shutil.copytree(tmp_path / "20" / "model_00006", out / "model_00006")
        shutil.copy(tmp_path / "20" / "log.txt", out)
        run_to_the_end("--resume", "--out", out, "--max-steps", steps, "--decay-steps", steps, cwd=tmp_path)
        assert_same_run(out, tmp_path / f"{steps}", f"model_{steps:05d}")
    assert losses(tmp_path / "10" / "log.txt") != losses(tmp_path / "30" / "log.txt")[:10]


@pytest.mark.parametrize(
    "checkpoint_at, flags",
    [
        (13, ["--decay-steps", "30"]),  # it cools down from 12 on
        (6, ["--decay-steps", "9"]),  # it would from 5.4 on
        (6, ["--cooldown-fraction", "0.8"]),
        (6, ["--schedule", "cosine"]),
    ],
)
def test_a_rate_that_fell_or_should_have_fallen_is_kept(byte_shards, tmp_path, checkpoint_at, flags):
    trained(
        tmp_path / "run", "--data", byte_shards, "--recipe", "fast", "--max-steps", checkpoint_at, "--decay-steps", 20
    )
    with pytest.raises(UserError, match=f"^{flags[0]} is {flags[1]}, but the run in .* Leave it out.$"):
        configure(["--resume", "--out", str(tmp_path / "run"), "--max-steps", "30", *flags])


def test_the_end_of_a_cosine_is_kept(byte_shards, tmp_path):
    trained(tmp_path / "run", "--data", byte_shards, "--max-steps", 6, "--decay-steps", 20)
    with pytest.raises(UserError, match=r"^--decay-steps is 30, but the run in .* has 20. Leave it out.$"):
        configure(["--resume", "--out", str(tmp_path / "run"), "--max-steps", "30", "--decay-steps", "30"])


@pytest.mark.parametrize("dtype, products", [("bf16", "bfloat16"), ("fp32", "float32"), ("fp16", "float32")])
def test_products_are_in_bf16_where_training_is(byte_shards, tmp_path, monkeypatch, dtype, products):
    seen = set()
    monkeypatch.setattr("support.muon.orthogonalize", lambda x: seen.add(x.dtype) or orthogonalize(x))
    trained(tmp_path / "run", "--data", byte_shards, "--recipe", "fast", "--max-steps", 2, "--dtype", dtype)
    assert seen == {getattr(torch, products)}


def test_a_checkpoint_from_before_there_were_recipes_resumes(byte_shards, tmp_path):
    flags = ["--data", byte_shards, "--max-steps", 6, "--checkpoint-every", 3]
    straight = trained(tmp_path / "straight", *flags)
    directory = tmp_path / "straight" / "model_00003"
    state = checkpoint.read_state(directory)
    for name in ("recipe", "optimizer", "schedule", "cooldown_fraction"):
        del state["config"][name]
    out = tmp_path / "run"
    copy_with_state(directory, out / "model_00003", state)
    (out / "log.txt").write_text(straight)
    config, found = configure(["--resume", "--out", str(out)])
    assert (config.recipe, config.optimizer, config.schedule) == ("gpt2", "adamw", "cosine")
    train(config, ONE_PROCESS, found)
    assert (out / "log.txt").read_text() == straight


def copy_with_state(source, target, state):
    shutil.copytree(source, target)
    torch.save(state, target / "trainer.pt")
    listed = json.loads((target / "checkpoint.json").read_text())
    content = (target / "trainer.pt").read_bytes()
    listed["files"]["trainer.pt"] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (target / "checkpoint.json").write_text(json.dumps(listed))


def test_a_fast_checkpoint_opens_in_huggingface(byte_shards, tmp_path):
    from transformers import AutoTokenizer, GPT2LMHeadModel

    trained(tmp_path / "run", "--data", byte_shards, "--recipe", "fast", "--max-steps", 5)
    directory = tmp_path / "run" / "model_00005"
    theirs, ours = GPT2LMHeadModel.from_pretrained(directory), GPT.from_pretrained(directory)
    tokens = torch.tensor([AutoTokenizer.from_pretrained(directory)("12 + 3 = 15.")["input_ids"]])
    torch.testing.assert_close(theirs(tokens).logits, ours(tokens)[0], rtol=1e-4, atol=1e-4)
    expected = F.cross_entropy(theirs(tokens).logits[0, :-1], tokens[0, 1:])
    torch.testing.assert_close(ours(tokens[:, :-1], tokens[:, 1:])[1], expected, rtol=1e-4, atol=1e-4)


# ---- the benchmark


def test_the_benchmark_compares_runs_of_their_own_length_and_makes_none_twice(byte_shards, tmp_path):
    small = "--n-layer 1 --n-head 1 --n-embd 16 --block-size 16 --batch-size 256 --warmup-steps 2 --val-every 2"
    command = ["benchmarks/bench_recipes.py", "--data", byte_shards, "--out", "runs", "--scale", "medium"]
    command += [
        "--updates",
        8,
        "--seeds",
        1,
        "--rates",
        "1e-3",
        "--fractions",
        0.5,
        "--flags",
        f"{small} --val-tokens 512 --dtype fp32 --device cpu",
    ]
    done = run_script(*command, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    logs = {path.parent.name: path for path in tmp_path.glob("runs/*/log.txt")}
    assert {name: len(losses(log)) for name, log in logs.items()} == {"gpt2-0.001-8-s1": 8, "gpt2-0.0006-8-s1": 8, "fast-4-s1": 4}  # fmt: skip
    [end] = losses(logs["fast-4-s1"], "val")[-1:]
    assert f"| fast, 0.5 of the tokens | 4 | 0.01M | {end:.3f} (1) | {end:.3f} |" in done.stdout
    assert (tmp_path / "runs" / "medium.svg").exists()
    again = run_script(*command, cwd=tmp_path)
    assert again.stdout == done.stdout and not again.stderr  # nothing was trained


def test_where_a_curve_meets_a_loss(bench):
    curve = {0: 5.0, 10: 4.0, 20: 4.5, 30: 3.5}
    assert bench.crossing(curve, 4.5) == 5.0 and bench.crossing(curve, 4.0) == 10.0
    assert bench.crossing(curve, 3.75) == 27.5 and bench.crossing(curve, 3.4) is None


@pytest.fixture
def bench():
    spec = importlib.util.spec_from_file_location("bench_recipes", ROOT / "benchmarks" / "bench_recipes.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
