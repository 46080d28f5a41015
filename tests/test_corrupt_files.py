"""Corrupt files: found before the first step or without losing one, and never executed."""

from __future__ import annotations

import functools
import json
import os
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import TINY_FLAGS, TINY_TRAINING_FLAGS, finish_run, needs_gpt2_vocabulary, start_run, steps_done
from training import checkpoint_names, trained

import hellaswag
import sample
import train_gpt2
from support.checkpoints.directory import write_checkpoint
from support.cli import UserError
from train_gpt2 import GPT


@pytest.fixture
def data(byte_shards, tmp_path):
    """A copy of the shards that a test may corrupt, and the first of its train shards."""
    shutil.copytree(byte_shards, tmp_path / "data")
    return tmp_path / "data", sorted((tmp_path / "data").glob("*_train_*.npy"))[0]


@pytest.mark.parametrize("world_size", [1, 2])
def test_an_unknown_id_loses_no_finished_step(data, tmp_path, world_size):
    folder, _ = data
    shard = sorted(folder.glob("*_train_*.npy"))[1]
    tokens, before = np.load(shard), len(np.load(sorted(folder.glob("*_train_*.npy"))[0]))
    tokens[16 * 40] = 999
    np.save(shard, tokens)
    row = (before - 1) // 16 + 39  # the last token of this row, and the first of the next
    flags = ["--data", folder, "--out", "run", "--max-steps", 1000, "--val-every", 0]
    assert finish_run(start_run(*flags, cwd=tmp_path, world_size=world_size)) == [2] * world_size
    outputs = "".join((tmp_path / f"{rank}.txt").read_text() for rank in range(world_size))
    assert outputs.count(f"error: {shard} has the id 999 at offset 640, beyond the vocabulary of 257.") == 1
    assert (
        checkpoint_names(tmp_path / "run") == [f"model_{row // 16:05d}"] and steps_done(tmp_path / "run") == row // 16
    )


def truncate_at_step_3(rank, split):
    real = train_gpt2.get_lr

    def get_lr(step, config):
        if step == 3 and rank == 0:
            for shard in Path(config.data).glob(f"*_{split}_*.npy"):
                os.truncate(shard, shard.stat().st_size // 2)
        return real(step, config)

    train_gpt2.get_lr = get_lr


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("split, steps", [("train", 4), ("val", 5)])  # until the next step, or validation, needs them
def test_a_shard_truncated_in_use_loses_no_finished_step(data, tmp_path, split, steps, world_size):
    """Reading memory whose file is gone would be a bus error."""
    flags = ["--data", data[0], "--out", "run", "--max-steps", 1000]
    sabotage = functools.partial(truncate_at_step_3, split=split)
    assert finish_run(start_run(*flags, cwd=tmp_path, world_size=world_size, sabotage=sabotage)) == [2] * world_size
    outputs = "".join((tmp_path / f"{rank}.txt").read_text() for rank in range(world_size))
    assert outputs.count("was truncated while it was in use. Run the command that made these shards again.") >= 1
    assert checkpoint_names(tmp_path / "run") == [f"model_{steps:05d}"] and steps_done(tmp_path / "run") == steps


def test_the_last_step_reads_nothing_ahead(data, tmp_path):
    folder, _ = data
    tokens = np.load(shard := sorted(folder.glob("*_train_*.npy"))[0])
    tokens[16 * 16 * 3 + 8] = 999  # in the fourth step
    np.save(shard, tokens)
    trained(tmp_path / "run", "--data", folder, "--max-steps", 3)
    assert checkpoint_names(tmp_path / "run") == ["model_00003"]


def test_a_corrupt_shard_ends_the_run_before_the_first_step(data, tmp_path):
    folder, shard = data
    np.save(shard, np.load(shard).astype(np.int32))
    assert finish_run(start_run("--data", folder, "--out", "run", cwd=tmp_path)) == [2]
    output = (tmp_path / "0.txt").read_text()
    assert output.startswith(f"error: {shard} holds 1-dimensional int32, not 1-dimensional uint16 tokens.")
    assert output.count("\n") == 1 and not (tmp_path / "run").exists()


# ---- nothing in a file is executed


class Evil:
    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def poisoned(place, data, run, evil):
    """Puts a pickle in the place of a file, and returns a function that reads that file."""
    folder, shard = data
    resume = ["--resume", "--out", str(run), "--max-steps", "3", "--data", str(folder)]
    last = run / "model_00002"

    def rewritten(name, content):
        def write_files(folder):
            for path in before.iterdir():
                shutil.copy(path, folder)
            (folder / name).write_bytes(content)

        write_checkpoint(last, write_files)

    before = run.with_name("before")
    shutil.copytree(last, before, ignore=shutil.ignore_patterns("checkpoint.json"))
    if place == "trainer.pt":
        torch.save({"config": evil}, before / "trainer.pt")
        rewritten("trainer.pt", (before / "trainer.pt").read_bytes())
        return lambda: train_gpt2.main(resume)
    if place in ("trainer.pt, bare", "model.safetensors", "config.json", "checkpoint.json"):
        name = place.split(",")[0]
        if name == "checkpoint.json":
            (last / name).write_bytes(pickle.dumps(evil))
        else:
            rewritten(name, pickle.dumps(evil))
        return lambda: train_gpt2.main(resume)
    if place == "pytorch_model.bin":
        (before / "model.safetensors").unlink()
        torch.save({"transformer.wte.weight": evil}, before / "pytorch_model.bin")
        return lambda: train_gpt2.main([*TINY_TRAINING_FLAGS, "--data", str(folder), "--out", str(run / "new"), "--init-from", str(before)])  # fmt: skip
    if place == "pytorch_model.bin, scored":
        GPT(train_gpt2.GPTConfig(16, 50257, 1, 2, 8)).save_pretrained(before)
        (before / "tokenizer.json").unlink()
        (before / "model.safetensors").unlink()
        torch.save({"transformer.wte.weight": evil}, before / "pytorch_model.bin")
        items = run / "items.jsonl"
        items.write_text(json.dumps({"ctx": "a", "label": 0, "endings": ["b"] * 4}) + "\n")
        return lambda: hellaswag.load_model(before, torch.device("cpu"))
    if place == "pytorch_model.bin, sampled":
        (before / "model.safetensors").unlink()
        torch.save({"transformer.wte.weight": evil}, before / "pytorch_model.bin")
        return lambda: sample.main(["--model", str(before), "--prompt", "x"])
    if place == "shard":
        np.save(shard, np.array([evil], dtype=object), allow_pickle=True)
    elif place == "shard, bare":
        shard.write_bytes(pickle.dumps(evil))
    elif place == "manifest":
        (folder / "manifest.json").write_bytes(pickle.dumps(evil))
    elif place == "items":
        shard.with_name("items.jsonl").write_bytes(pickle.dumps(evil))
        return lambda: hellaswag.load(shard.with_name("items.jsonl"))
    return lambda: train_gpt2.main([*TINY_FLAGS, "--data", str(folder), "--out", str(run / "new")])


@pytest.mark.parametrize(
    "place, message",
    [
        ("trainer.pt", "trainer.pt is not readable"),
        ("trainer.pt, bare", "trainer.pt is truncated or corrupt"),
        ("model.safetensors", "cannot read .*model.safetensors"),
        ("config.json", "config.json is not a GPT-2 configuration"),
        ("checkpoint.json", "all checkpoints in .* are corrupt"),
        ("pytorch_model.bin", "model.safetensors"),
        pytest.param("pytorch_model.bin, scored", "cannot read .*model.safetensors", marks=needs_gpt2_vocabulary),
        ("pytorch_model.bin, sampled", "model.safetensors"),
        ("shard", "is not a readable .npy file"),
        ("shard, bare", "is not a readable .npy file"),
        ("manifest", "is not a manifest of shards"),
        ("items", "cannot read HellaSwag items|is not JSON"),
    ],
)  # fmt: skip
def test_no_pickle_is_executed(data, tmp_path, place, message, capsys):
    run, executed = tmp_path / "run", tmp_path / "executed"
    trained(run, "--data", data[0], "--max-steps", 2)
    read = poisoned(place, data, run, Evil(executed))
    with pytest.raises(UserError, match=message):
        read()
    assert not executed.exists()
    pickle.loads(pickle.dumps(Evil(executed)))
    assert executed.exists()  # it would have been seen
