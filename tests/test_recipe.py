"""The configuration that flags mean, and the learning rate of each step."""

from __future__ import annotations

import math
from dataclasses import fields, replace

import pytest
import torch
from training import TINY, config_with, configure

from support.cli import UserError
from support.runtime import devices
from support.runtime.machine import Machine
from train_gpt2 import GPT, MODELS, GPTConfig, get_lr

# ---- the learning rate

QUARTER = 0.1 + 0.9 * (1 + math.sqrt(0.5)) / 2  # of a cosine


@pytest.mark.parametrize(
    "options, expected",
    [
        (
            dict(schedule="cosine", decay_steps=110),
            {0: 0.1, 4: 0.5, 9: 1.0, 10: 1.0, 35: QUARTER, 60: 0.55, 85: 1.1 - QUARTER, 110: 0.1, 299: 0.1},
        ),
        ({}, {0: 0.1, 9: 1.0, 59: 1.0, 60: 1.0, 61: 0.9775, 80: 0.55, 99: 0.1225, 100: 0.1, 299: 0.1}),
        (dict(cooldown_fraction=0.0), {10: 1.0, 99: 1.0, 100: 0.1}),
        (dict(cooldown_fraction=1.0), {9: 1.0, 10: 1.0, 55: 0.55, 100: 0.1}),  # not before the warm-up ends
        (dict(warmup_steps=0, cooldown_fraction=1.0), {0: 1.0, 50: 0.55}),
        (dict(warmup_steps=300), {0: 1 / 300, 150: 151 / 300, 299: 1.0}),
    ],
)
def test_schedules_by_hand(options, expected):
    base = dict(schedule="wsd", max_lr=1.0, min_lr=0.1, warmup_steps=10, decay_steps=100, max_steps=300)
    for step, lr in expected.items():
        assert get_lr(step, config_with(**base | options)) == pytest.approx(lr), step


def test_a_choice_without_code_is_an_error_before_the_first_step():
    """Not when the warm-up ends, days later."""
    config = replace(config_with(), schedule="new")
    with pytest.raises(ValueError, match="no formula for --schedule new"):
        get_lr(0, config)
    with torch.device("meta"), pytest.raises(ValueError, match="no --optimizer new"):
        GPT(TINY).configure_optimizers(0.1, 1e-3, (0.9, 0.95), "new")


# ---- defaults


def test_the_defaults_are_gpt2s_recipe():
    config, _ = configure([])
    assert (config.max_lr, config.warmup_steps, config.decay_steps) == (6e-4, 715, 19073)
    assert config.min_lr == pytest.approx(6e-5)
    assert get_lr(0, config) == pytest.approx(6e-4 / 715) and get_lr(19073, config) == config.min_lr
    assert config.total_batch_size == 2**19 and (config.beta1, config.beta2, config.weight_decay) == (0.9, 0.95, 0.1)
    assert (config.n_layer, config.n_head, config.n_embd, config.block_size) == (12, 12, 768, 1024)
    # and those of the model are the same
    of_model = {field.name: field.default for field in fields(GPTConfig)}
    assert of_model.pop("vocab_size") == 50257
    assert of_model == {name: getattr(config, name) for name in of_model}


def machine_for(flags, device_type, world_size=1):
    config = config_with(**flags)
    return Machine.find(config, torch.device(device_type), world_size)


@pytest.fixture(autouse=True)
def a_gpu_to_ask(monkeypatch):
    monkeypatch.setattr(devices, "describe_attention", lambda *args: "flash")
    monkeypatch.setattr(devices, "why_not_compile", lambda device: None)


def test_defaults_follow_the_machine_and_are_not_of_the_run():
    for device_type, expected in (("cuda", (64, 250, True)), ("cpu", (4, 0, False)), ("mps", (4, 0, False))):
        machine = machine_for({"dtype": "fp32"}, device_type)
        assert (machine.batch_size, machine.hellaswag_every, machine.compiled) == expected
        assert (machine.device.type, machine.dtype) == (device_type, "fp32")
    left_open = dict(device="auto", dtype="auto", compile=None, batch_size=None, hellaswag_every=None)
    assert left_open.items() <= config_with().to_dict().items()
    asked = machine_for({"batch_size": 8, "compile": True, "hellaswag_every": 5, "dtype": "fp32"}, "cpu")
    assert (asked.batch_size, asked.compiled, asked.hellaswag_every) == (8, True, 5)
    for flag in ({"hellaswag_data": "items.jsonl"}, {"hellaswag_limit": 9}):  # asks for scores on a CPU
        assert machine_for(flag, "cpu").hellaswag_every == 250


@pytest.mark.parametrize(
    "rows, device_type, batch_size",
    [(512, "cuda", 64), (72, "cuda", 36), (3, "cuda", 3), (512, "cpu", 4), (9, "cpu", 3)],
)
def test_the_default_batch_size_divides_a_step(rows, device_type, batch_size):
    flags = {"total_batch_size": rows * 1024, "dtype": "fp32"}
    assert machine_for(flags, device_type).batch_size == batch_size
    assert machine_for(flags | {"batch_size": 4096}, device_type).batch_size == rows  # at most a step
    assert machine_for(flags | {"total_batch_size": rows * 1024 * 8}, device_type, 8).batch_size == batch_size


def test_the_demo_with_another_model():
    config, _ = configure(["--demo"])
    assert (config.n_layer, config.n_head, config.n_embd, config.block_size) == (3, 2, 128, 64)
    config, _ = configure(["--demo", "--model", "gpt2-medium", "--total-batch-size", "1024"])
    sizes = dict(n_layer=config.n_layer, n_head=config.n_head, n_embd=config.n_embd)
    assert (sizes, config.block_size) == (MODELS["gpt2-medium"], 1024)


@pytest.mark.parametrize(
    "flags, optimizer, schedule, max_lr, min_lr",
    [
        ([], "adamw", "cosine", 6e-4, 6e-5),
        (["--recipe", "fast"], "muon", "wsd", 3.6e-3, 7.2e-5),
        (["--recipe", "fast", "--optimizer", "adamw"], "adamw", "wsd", 3.6e-3, 7.2e-5),
        (["--recipe", "fast", "--schedule", "cosine"], "muon", "cosine", 3.6e-3, 3.6e-4),
        (["--recipe", "fast", "--max-lr", "1e-3", "--min-lr", "0"], "muon", "wsd", 1e-3, 0.0),
        (["--schedule", "wsd", "--max-lr", "1e-3"], "adamw", "wsd", 1e-3, 2e-5),
    ],
)
def test_a_recipe_sets_defaults_and_nothing_else(flags, optimizer, schedule, max_lr, min_lr):
    config, _ = configure(flags)
    resolved = (config.optimizer, config.schedule, config.max_lr, config.min_lr)
    assert resolved == (optimizer, schedule, max_lr, pytest.approx(min_lr))
    plain, _ = configure([])
    recipe = {"recipe", "optimizer", "schedule", "max_lr", "min_lr"}
    assert {k: v for k, v in config.to_dict().items() if k not in recipe} == {
        k: v for k, v in plain.to_dict().items() if k not in recipe
    }


# ---- errors


@pytest.mark.parametrize(
    "flags, problem",
    [
        (["--recipe", "fast", "--decay-steps", "1" + "0" * 400], "--decay-steps is 1000"),
        (["--init-from", "gpt2", "--no-bias"], "--init-from brings its own model. Leave out --no-bias."),
    ],
)
def test_bad_values(flags, problem):
    with pytest.raises(UserError, match=f"^{problem}") as error:
        configure(flags)
    assert len(error.value.problems) == 1
