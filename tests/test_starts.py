"""starts.jsonl: what it says about a process and its run, and what survives resumes and kills."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from datetime import UTC, datetime

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from shard_helpers import file_size_limit
from training import ONE_PROCESS, resumed, run_info, trained

import train_gpt2
from support import __version__
from support.checkpoints.directory import newest_checkpoint
from support.console import starts
from support.console.starts import append_start, describe_start, read_starts


def test_a_line_is_there_before_the_first_step_and_says_what_is_trained(byte_shards, tmp_path, monkeypatch):
    seen, train_step = [], train_gpt2.train_step

    def step(*args):
        seen.append(read_starts(tmp_path / "run"))
        return train_step(*args)

    monkeypatch.setattr(train_gpt2, "train_step", step)
    trained(tmp_path / "run", "--data", byte_shards, "--max-steps", 6)
    [start] = seen[0]
    assert [start] == read_starts(tmp_path / "run") and start["first_step"] == 0
    assert abs((datetime.now(UTC) - datetime.fromisoformat(start["time"])).total_seconds()) < 60
    assert start["command"] == sys.argv

    weights = load_file(newest_checkpoint(tmp_path / "run") / "model.safetensors")
    padding = (320 - 257) * 32  # rows that files do not have
    assert start["parameters"] == sum(w.numel() for w in weights.values()) + padding
    manifest, data = json.loads((byte_shards / "manifest.json").read_text()), start["data"]
    for split in ("train", "val"):
        shards = [s for s in manifest["shards"] if s["split"] == split]
        assert data[split] == [[s["file"], s["tokens"], s["sha256"]] for s in shards] and shards
    assert data["source"] == manifest["source"] == "sums"
    assert (data["tokenizer"], data["vocab_size"], data["bytes_per_token"]) == ("bytes", 257, 1)
    assert start["tokens_per_step"] == 256
    machine, flags = start["machine"], start["flags"]
    assert (machine["device"], machine["processes"], machine["compiled"]) == ("cpu", 1, False)
    assert (machine["dtype"], machine["batch_size"]) == ("fp32", 4)
    assert machine["attention"] and flags["dtype"] == "fp32" and "gpus" not in flags
    assert flags["max_lr"] == 3e-3 and flags["n_layer"] == 2 and flags["decay_steps"] == 6
    assert flags["tokenizer"] == "bytes"  # that of the shards


def test_each_start_appends_a_line_and_changes_none(byte_shards, tmp_path, monkeypatch):
    path = tmp_path / "starts.jsonl"
    trained(tmp_path, "--data", byte_shards, "--max-steps", 2)
    first = path.read_bytes()
    monkeypatch.setattr(platform, "python_version", lambda: "9.9")
    resumed(tmp_path, "--keep", 2)
    assert path.read_bytes().startswith(first) and path.read_bytes().count(b"\n") == 2
    before, after = read_starts(tmp_path)
    assert (before["first_step"], after["first_step"]) == (0, 2) and after["versions"]["python"] == "9.9"
    changed = {"keep": 2, "resume": "newest"}
    assert after["flags"] == before["flags"] | changed and after["data"] == before["data"]


START = {"command": ["x"], "flags": {}, "data": {}, "parameters": 1, "tokens_per_step": 1, "first_step": 0}


@pytest.mark.parametrize("cut", [1, 5])
def test_a_line_that_a_kill_has_cut_off_takes_no_other_with_it(tmp_path, cut):
    """The last line lacks its last character, which is its end, or more."""
    for step in (0, 1):
        append_start(tmp_path, START | {"first_step": step})
    path = tmp_path / "starts.jsonl"
    path.write_bytes(path.read_bytes()[:-cut])
    left = [START | {"first_step": step} for step in ((0, 1) if cut == 1 else (0,))]
    assert read_starts(tmp_path) == left
    append_start(tmp_path, START | {"first_step": 2})
    assert read_starts(tmp_path) == [*left, START | {"first_step": 2}]


NO_STEP = START | {"first_step": {}}


@pytest.mark.parametrize(
    "line",
    ["3", "{}", "[" * 10_000, '{"command": "x"}', "\ud800".encode("utf-8", "replace").decode(), json.dumps(NO_STEP)],
)
def test_a_damaged_line_is_left_out(tmp_path, line):
    append_start(tmp_path, START)
    with open(tmp_path / "starts.jsonl", "a") as file:
        file.write(line + "\n")
    assert read_starts(tmp_path) == [START]


def test_a_full_disk_is_a_warning(tmp_path, capsys):
    start = START | {"command": ["x" * 100]}
    with file_size_limit(100):
        append_start(tmp_path, start)
    assert capsys.readouterr().err == f"warning: cannot write {tmp_path}/starts.jsonl (File too large).\n"
    assert read_starts(tmp_path) == [] == read_starts(tmp_path / "nothing")
    append_start(tmp_path, start)
    assert read_starts(tmp_path) == [start]


def test_versions_have_the_commit_of_git_in_this_folder_alone(tmp_path, monkeypatch):
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "x"]):
        subprocess.run([*git, *command], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    (tmp_path / "unpacked").mkdir()  # as a download without .git inside a repository
    expected = {"train_gpt2.py": __version__, "python": platform.python_version(), "torch": torch.__version__}
    expected |= {"numpy": np.__version__, "platform": platform.platform()}
    for folder, commit in ((tmp_path, {"commit": head}), (tmp_path / "unpacked", {})):
        monkeypatch.setattr(starts, "ROOT", folder)
        assert describe_start(run_info(), ONE_PROCESS)["versions"] == expected | commit
