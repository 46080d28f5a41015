"""What may happen to each flag of train_gpt2.py, against sets that are written down here by hand."""

from __future__ import annotations

from dataclasses import fields

import pytest
from training import configure

from support.cli import Flag, flags_of
from support.config import LAYERS, TRAIN_FLAGS, CommandLine, PlanOptions, changed_flags, merge, source
from support.sizing import presets
from train_gpt2 import RECIPES, GPTConfig

# What a resumed run may change: files, evaluation, tracking, checkpoints and device.
OPTIONS = (
    "data out resume batch_size val_every val_tokens hellaswag_every hellaswag_data hellaswag_limit sample_every prompt "
    "log_every tensorboard wandb checkpoint_every checkpoint_minutes keep max_bad_steps device dtype parallel recompute tf32 compile "
    "cuda_graphs profile"
)
SOURCE = "demo text text_field tokenizer"  # what the shards were made from: a resumed run keeps its shards


@pytest.mark.parametrize(
    ("rule", "names"),
    [
        (lambda flag: flag.resume == "changes", OPTIONS),
        (lambda flag: not flag.stored, "resume profile"),
        (lambda flag: flag.counts_steps, "max_steps decay_steps warmup_steps"),
        (lambda flag: flag.fork == "brings", "model init_from tokenizer demo"),
        (lambda flag: flag.fork == "keeps", "n_layer n_head n_embd block_size bias lora_rank lora_alpha"),
        (lambda flag: flag.init_from == "brings", "model n_layer n_head n_embd bias"),
        (lambda flag: flag.per_node, "text data out fork init_from hellaswag_data"),
    ],
    ids="resume stored counts_steps fork_brings fork_keeps init_from per_node".split(),
)
def test_the_flags_of_a_rule(rule, names):
    assert {name for name, flag in TRAIN_FLAGS.items() if rule(flag)} == {*names.split()}


def test_a_run_has_no_flag_of_a_plan():
    assert flags_of(PlanOptions).keys() == {*"plan gpus gpu peak price mfu".split()}
    assert flags_of(CommandLine).keys() == TRAIN_FLAGS.keys() | flags_of(PlanOptions).keys()
    assert len(flags_of(CommandLine)) == len(TRAIN_FLAGS) + len(flags_of(PlanOptions))


def test_an_option_of_the_model_is_a_field_and_a_flag():
    options = {field.name for field in fields(GPTConfig)} - {"vocab_size"}  # which the tokenizer decides
    assert {name for name, flag in TRAIN_FLAGS.items() if flag.group == "model"} == options | {
        "lora_rank",
        "lora_alpha",
    }


# ---- where a value comes from


@pytest.mark.parametrize("name", ["text", "demo"])
@pytest.mark.parametrize("length", [{}, {"max_steps": 9}, {"minutes": 3.0}])
def test_the_flags_that_say_that_a_preset_sets_them(tmp_path, name, length):
    """A preset sets no other flag, and sets each of them with some length."""
    (tmp_path / "text.txt").write_text("Some text. " * 1000)
    set_by = {flag for flag in TRAIN_FLAGS if name in TRAIN_FLAGS[flag].set_by.split()}
    preset = {"text": presets.text_flags, "demo": presets.demo_flags}[name]
    found = {"recipe": "fast"}  # which --demo sets by its table

    def flags(**above):
        return {*preset({name: str(tmp_path / "text.txt"), **above}, RECIPES["fast"])}

    others = {"decay_steps"} | ({"tokenizer"} if name == "text" else set())  # their defaults are given in words
    assert flags(**length) <= set_by | others
    assert set_by | others == flags() | flags(max_steps=9) | others, found


def test_the_strongest_layer_counts():
    layers = dict.fromkeys(LAYERS, {}) | {
        "command line": {"a": 1}, "--minutes": {"a": 2, "b": 2}, "--text": {"b": 3, "c": None}, "--recipe": {"c": 4, "d": 4},
    }  # fmt: skip
    assert merge(layers) == {"a": 1, "b": 2, "c": None, "d": 4}  # None is also a value
    sources = {"a": "command line", "b": "--minutes", "c": "--text", "d": "--recipe", "e": "default"}
    assert {name: source(layers, name) for name in sources} == sources


@pytest.mark.parametrize("change", ["missing", "moved", "unknown"])
def test_a_layer_that_is_not_in_its_place_is_an_error(change):
    layers = {name: {} for name in LAYERS if name != "--minutes"}
    if change == "moved":
        layers["--minutes"] = {}  # it would be the weakest
    elif change == "unknown":
        layers = dict.fromkeys(LAYERS, {}) | {"measured": {}}
    with pytest.raises(ValueError, match="the layers are command line, "):
        merge(layers)


def test_each_setting_of_a_run_on_a_text_knows_where_it_comes_from(tmp_path):
    (tmp_path / "text.txt").write_text("Some text. " * 1000)
    _, start = configure(["--text", tmp_path / "text.txt", "--max-steps", 9, "--weight-decay", 0.3, "--recipe", "fast"])
    expected = {
        "command line": "text max_steps weight_decay recipe", "--text": "n_layer dropout max_lr adamw_lr warmup_steps keep",
        "--recipe": "optimizer schedule beta1 grad_clip", "other flags": "min_lr", "default": "seed bias val_tokens",
    }  # fmt: skip
    for layer, names in expected.items():
        assert {start.sources[name] for name in names.split()} == {layer}


def test_changed_flags():
    """Not those of one start, nor the checkpoint that is forked; a flag that is newer than the checkpoint had its default."""
    flags = {"size": Flag(1, "", ""), "new": Flag(5, "", ""), "fork": Flag(None, "", "")}
    flags["profile"] = Flag(0, "", "", stored=False)
    after = {"size": 3, "new": 6, "fork": "x", "profile": 4, "unknown": 1}
    assert changed_flags(flags, {"size": 2, "fork": None, "profile": 0}, after) == [("size", 2, 3), ("new", 5, 6)]
    assert changed_flags(flags, {"size": 2}, {"size": 2, "new": 5}) == []


def test_a_run_of_minutes_had_no_steps_to_change():
    flags = {"max_steps": Flag(10, "", "", counts_steps=True), "minutes": Flag(None, "", "")}
    before, after = {"max_steps": 10, "minutes": 2.0}, {"max_steps": 24, "minutes": None}
    assert changed_flags(flags, before, after) == [("minutes", 2.0, None)]
    assert changed_flags(flags, before | {"minutes": None}, after) == [("max_steps", 10, 24)]
