"""Corrupt files: found before the first step or without losing one, and never executed."""

from __future__ import annotations

import functools
import os
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import STEP, TINY_FLAGS, TINY_TRAINING_FLAGS, Rank, finish_run, start_run, steps_done
from training import checkpoint_names, trained

import hellaswag
import sample
import train_gpt2
from support.checkpoints import huggingface
from support.checkpoints.directory import write_checkpoint
from support.cli import UserError


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


def truncate(folder: Path, split: str, *args: object) -> None:
    for shard in folder.glob(f"*_{split}_*.npy"):
        os.truncate(shard, shard.stat().st_size // 2)


# until the next step, or validation, needs them
@pytest.mark.parametrize("split, steps, world_size", [("train", 4, 1), ("train", 4, 2), ("val", 5, 2)])
def test_a_shard_truncated_in_use_loses_no_finished_step(data, tmp_path, split, steps, world_size):
    """Reading memory whose file is gone would be a bus error."""
    flags = ["--data", data[0], "--out", "run", "--max-steps", 1000]
    truncates = Rank(before={(STEP, 3): functools.partial(truncate, data[0], split)})
    ranks = start_run(*flags, cwd=tmp_path, world_size=world_size, rank={0: truncates})
    assert finish_run(ranks) == [2] * world_size
    outputs = "".join((tmp_path / f"{rank}.txt").read_text() for rank in range(world_size))
    assert outputs.count("was truncated while it was in use. Rerun the command that made these shards.") >= 1
    assert checkpoint_names(tmp_path / "run") == [f"model_{steps:05d}"] and steps_done(tmp_path / "run") == steps


def test_the_last_step_reads_nothing_ahead(data, tmp_path):
    folder, _ = data
    tokens = np.load(shard := sorted(folder.glob("*_train_*.npy"))[0])
    tokens[16 * 16 * 3 + 8] = 999  # in the fourth step
    np.save(shard, tokens)
    trained(tmp_path / "run", "--data", folder, "--max-steps", 3)
    assert checkpoint_names(tmp_path / "run") == ["model_00003"]


# ---- nothing in a file is executed


class Evil:
    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.fixture(scope="module")
def finished(byte_shards, tmp_path_factory):
    """The folder of a run of two steps."""
    out = tmp_path_factory.mktemp("finished") / "run"
    trained(out, "--data", byte_shards, "--max-steps", 2)
    return out


def write_pickle(path, evil, bare):
    """A pickle alone, or in the format of torch.save."""
    path.write_bytes(pickle.dumps(evil)) if bare else torch.save({"transformer.wte.weight": evil}, path)


@pytest.mark.parametrize("bare", [True, False])
@pytest.mark.parametrize(
    "name, use, message",
    [
        ("trainer.pt", "resume", "trainer.pt is corrupt"),
        ("model.safetensors", "resume", "cannot read .*model.safetensors"),
        ("config.json", "resume", "config.json is not a GPT-2 configuration"),
        ("checkpoint.json", "resume", "no checkpoint in .* is usable"),
        ("pytorch_model.bin", "init-from", "model.safetensors"),  # where other tools read weights
        ("pytorch_model.bin", "sample", "model.safetensors"),
        ("pytorch_model.bin", "score", "model.safetensors"),
    ],
)
def test_no_pickle_in_a_checkpoint_is_executed(finished, byte_shards, tmp_path, name, use, message, bare):
    evil, run = Evil(tmp_path / "executed"), tmp_path / "run"
    model = run / "model_00002"
    left_out = {"checkpoint.json"} | ({"model.safetensors"} if name == "pytorch_model.bin" else set())

    def write_files(folder):
        for path in (finished / "model_00002").iterdir():
            if path.name not in left_out:
                shutil.copy(path, folder)
        write_pickle(folder / name, evil, bare)

    run.mkdir()
    write_checkpoint(model, write_files)
    if name == "checkpoint.json":
        write_pickle(model / name, evil, bare)
    flags = ["--data", str(byte_shards), "--max-steps", "3"]
    new = [*TINY_TRAINING_FLAGS, *flags, "--out", str(tmp_path / "new"), "--init-from", str(model)]
    with pytest.raises(UserError, match=message):
        {
            "resume": lambda: train_gpt2.main(["--resume", "--out", str(run)]),
            "init-from": lambda: train_gpt2.main(new),
            "sample": lambda: sample.main(["--model", str(model), "--prompt", "x"]),
            "score": lambda: huggingface.load_hf_model(model),  # as hellaswag.py does
        }[use]()
    assert not (tmp_path / "executed").exists()
    pickle.loads(pickle.dumps(evil))
    assert (tmp_path / "executed").exists()  # it would have been seen


@pytest.mark.parametrize(
    "place, message",
    [
        ("shard", "is not a readable .npy file"),
        ("shard, bare", "is not a readable .npy file"),
        ("manifest", "is not a manifest of shards"),
        ("items", "cannot read HellaSwag items|is not JSON"),
    ],
)
def test_no_pickle_of_data_is_executed(data, tmp_path, place, message):
    folder, shard = data
    evil, items = Evil(tmp_path / "executed"), tmp_path / "items.jsonl"
    if place == "shard":
        np.save(shard, np.array([evil], dtype=object), allow_pickle=True)
    else:
        write_pickle({"manifest": folder / "manifest.json", "items": items}.get(place, shard), evil, bare=True)
    with pytest.raises(UserError, match=message):
        if place == "items":
            hellaswag.load(items)
        train_gpt2.main([*TINY_FLAGS, "--data", str(folder), "--out", str(tmp_path / "new")])
    assert not (tmp_path / "executed").exists() and not (tmp_path / "new").exists()
