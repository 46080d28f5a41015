"""What may happen to each flag of train_gpt2.py, against sets that are written down here by hand."""

from __future__ import annotations

import pytest

from support.cli import Flag, flags_of
from support.config import Options, PlanOptions, changed_flags
from train_gpt2 import TRAIN_FLAGS, CommandLine, ModelFlags, Recipe

# What a resumed run may change: files, evaluation, tracking, checkpoints and device.
OPTIONS = (
    "data out resume batch_size val_every val_tokens hellaswag_every hellaswag_data hellaswag_limit sample_every prompt "
    "log_every tensorboard wandb checkpoint_every keep max_bad_steps device dtype parallel recompute tf32 compile "
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


def test_the_flags_of_a_class():
    """Each flag is of one class; a run has no flag of --plan."""
    assert flags_of(Options).keys() == {*f"{OPTIONS} {SOURCE} fork minutes".split()}
    assert flags_of(PlanOptions).keys() == {*"plan gpus gpu peak price mfu".split()}
    assert flags_of(ModelFlags).keys() == {*"n_layer n_head n_embd block_size bias dropout".split()}
    classes = [flags_of(of_one) for of_one in (Options, ModelFlags, Recipe)]
    assert TRAIN_FLAGS.keys() == set().union(*classes) and len(TRAIN_FLAGS) == sum(map(len, classes))
    assert flags_of(CommandLine).keys() == TRAIN_FLAGS.keys() | flags_of(PlanOptions).keys()
    assert len(flags_of(CommandLine)) == len(TRAIN_FLAGS) + len(flags_of(PlanOptions))


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
