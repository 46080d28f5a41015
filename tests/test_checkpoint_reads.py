"""A resume hashes each file of its checkpoint once on each node, and opens each once in every process."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import safetensors.torch
import torch
from helpers import run_to_the_end

from support import files


def record_reads(rank: int) -> None:
    """Appends what this rank hashes and opens to `reads{rank}.txt`."""

    def recorded(kind, function):
        def wrapper(path, *args, **kwargs):
            with open(f"reads{rank}.txt", "a") as file:
                file.write(json.dumps([kind, str(path)]) + "\n")
            return function(path, *args, **kwargs)

        return wrapper

    files.sha256_of = recorded("hashed", files.sha256_of)
    torch.load = recorded("opened", torch.load)
    safetensors.torch.load_file = recorded("opened", safetensors.torch.load_file)


def reads_of(rank: int, cwd: Path, directory: Path) -> dict[str, Counter]:
    """How often each file of a checkpoint was hashed, and how often opened."""
    reads = {"hashed": Counter(), "opened": Counter()}
    for line in (cwd / f"reads{rank}.txt").read_text().splitlines():
        kind, path = json.loads(line)
        if (cwd / path).parent == directory:
            reads[kind][Path(path).name] += 1
    return reads


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_resume_hashes_each_file_once_per_node_and_opens_it_once_per_process(byte_shards, tmp_path, world_size):
    run_to_the_end("--data", byte_shards, "--out", "run", "--max-steps", 2, "--val-every", 0, cwd=tmp_path)
    run_to_the_end(
        "--resume", "--out", "run", "--max-steps", 3, cwd=tmp_path, world_size=world_size, sabotage=record_reads
    )
    directory = tmp_path / "run" / "model_00002"
    listed = json.loads((directory / "checkpoint.json").read_text())["files"]
    assert {"trainer.pt", "model.safetensors", "config.json"} < listed.keys()
    for rank in range(world_size):
        reads = reads_of(rank, tmp_path, directory)
        assert reads["hashed"] == (dict.fromkeys(listed, 1) if rank == 0 else {})
        assert reads["opened"] == {"trainer.pt": 1, "model.safetensors": 1}


@pytest.mark.parametrize("world_size", [1, 2])
def test_pretrained_weights_are_read_as_often(byte_shards, tmp_path, world_size):
    run_to_the_end("--data", byte_shards, "--out", "base", "--max-steps", 2, "--val-every", 0, cwd=tmp_path)
    directory = tmp_path / "base" / "model_00002"
    flags = ["--data", byte_shards, "--init-from", directory, "--out", "run", "--max-steps", 1]
    run_to_the_end(*flags, cwd=tmp_path, world_size=world_size, sabotage=record_reads, tiny=False)
    listed = json.loads((directory / "checkpoint.json").read_text())["files"]
    for rank in range(world_size):
        reads = reads_of(rank, tmp_path, directory)
        assert reads["hashed"] == (dict.fromkeys(listed, 1) if rank == 0 else {})
        assert reads["opened"] == {"model.safetensors": 1}
