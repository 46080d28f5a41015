"""starts.jsonl: what it says about a process and its run, and what survives resumes and kills."""

from __future__ import annotations

import json
import math
import platform
import subprocess
import sys
from datetime import UTC, datetime

import numpy as np
import pytest
import torch
from helpers import ROOT
from safetensors.torch import load_file
from shard_helpers import file_size_limit
from training import ONE_PROCESS, resumed, run_info, trained, trainer_file

import train_gpt2
from support import __version__
from support.checkpoints import history
from support.checkpoints.directory import newest_checkpoint
from support.checkpoints.history import (
    append_lines,
    argmin_loss,
    comparable_values,
    describe_end,
    describe_start,
    read_starts,
    starts_in_log,
)
from support.cli import UserError
from support.console import run_logger


def test_a_line_is_there_before_the_first_step_and_says_what_is_trained(byte_shards, tmp_path, monkeypatch, capsys):
    seen, train_step = [], train_gpt2.train_step

    def step(*args):
        seen.append(read_starts(tmp_path / "run"))
        return train_step(*args)

    monkeypatch.setattr(train_gpt2, "train_step", step)
    trained(tmp_path / "run", "--data", byte_shards, "--max-steps", 6)
    [start] = seen[0]
    [ended] = read_starts(tmp_path / "run")
    assert ended.pop("ended").items() >= {"end": "finished", "step": 6}.items() and ended == start
    assert (start["first_step"], start["first_tokens"]) == (0, 0)
    assert abs((datetime.now(UTC) - datetime.fromisoformat(start["time"])).total_seconds()) < 60
    assert start["command"] == sys.argv

    weights = load_file(newest_checkpoint(tmp_path / "run") / "model.safetensors")
    assert start["parameters"] == sum(w.numel() for w in weights.values())
    assert f"model   {start['parameters']:,} parameters" in capsys.readouterr().out
    manifest, data = json.loads((byte_shards / "manifest.json").read_text()), start["data"]
    for split in ("train", "val"):
        shards = [s for s in manifest["shards"] if s["split"] == split]
        assert data[split] == [[s["file"], s["tokens"], s["sha256"]] for s in shards] and shards
    assert data["source"] == manifest["source"] == "sums"
    assert (data["tokenizer"], data["vocab_size"], data["bytes_per_token"]) == ("bytes", 257, 1)
    assert start["tokens_per_step"] == 256
    machine, flags = start["machine"], start["flags"]
    assert (machine["device"], machine["processes"], machine["compiled"]) == ("cpu", 1, False)
    assert (machine["dtype"], machine["batch_size"], machine["threads"]) == ("fp32", 4, torch.get_num_threads())
    assert machine["attention"] and flags["dtype"] == "fp32" and "gpus" not in flags
    assert flags["max_lr"] == 3e-3 and flags["n_layer"] == 2 and flags["decay_steps"] == 6
    assert flags["tokenizer"] == "bytes"  # that of the shards


def test_each_start_appends_a_line_and_changes_none(byte_shards, tmp_path, monkeypatch):
    path = tmp_path / "starts.jsonl"
    trained(tmp_path, "--data", byte_shards, "--max-steps", 2)
    first = path.read_bytes()
    monkeypatch.setattr(platform, "python_version", lambda: "9.9")
    resumed(tmp_path, "--keep", 2)
    assert path.read_bytes().startswith(first) and path.read_bytes().count(b"\n") == first.count(b"\n") + 2
    before, after = read_starts(tmp_path)
    assert (before["first_step"], after["first_step"]) == (0, 2) and after["versions"]["python"] == "9.9"
    changed = {"keep": 2, "resume": "newest"}
    assert after["flags"] == before["flags"] | changed and after["data"] == before["data"]


DATA = {"source": "x", "val": [], "tokenizer": "gpt2", "bytes_per_token": 4.5}
START = {"run": "a", "command": ["x"], "flags": {}, "data": DATA, "comparable": {}}
START |= {"parameters": 1, "tokens_per_step": 1, "first_step": 0, "first_tokens": 0}


@pytest.mark.parametrize("cut", [1, 5])
def test_a_line_that_a_kill_has_cut_off_takes_no_other_with_it(tmp_path, cut):
    """The last line lacks its last character, which is its end, or more."""
    for step in (0, 1):
        append_lines(tmp_path, START | {"first_step": step})
    path = tmp_path / "starts.jsonl"
    path.write_bytes(path.read_bytes()[:-cut])
    left = [START | {"first_step": step} for step in ((0, 1) if cut == 1 else (0,))]
    assert read_starts(tmp_path) == left
    append_lines(tmp_path, START | {"first_step": 2})
    assert read_starts(tmp_path) == [*left, START | {"first_step": 2}]


def test_a_set_of_shards_is_listed_once(tmp_path):
    """A thousand shards take 120 kB. Versions before this one listed them with each start."""
    shards = [[f"x_train_{i:06d}.npy", 10**8, f"{i:064x}"] for i in range(1000)]
    others = [[name, tokens - 1, checksum] for name, tokens, checksum in shards]
    starts = [
        START | {"first_step": step, "data": DATA | {"train": train, "val": shards[:1]}}
        for step, train in enumerate((shards, shards, others, shards))
    ]
    path = tmp_path / "starts.jsonl"
    path.write_text(json.dumps(starts[0]) + "\n")
    sizes = [path.stat().st_size]
    for start in starts[1:]:
        append_lines(tmp_path, start)
        sizes.append(path.stat().st_size)
    assert read_starts(tmp_path) == starts
    append_lines(tmp_path, *starts)  # as a resumed run does
    assert read_starts(tmp_path) == starts
    grown = np.diff(sizes)
    assert min(grown[:2]) > 90_000 and grown[2] < 500
    (tmp_path / "fork").mkdir()
    append_lines(tmp_path / "fork", *read_starts(tmp_path))  # as a fork begins
    assert read_starts(tmp_path / "fork") == starts and (tmp_path / "fork/starts.jsonl").stat().st_size < sizes[2]
    path.write_bytes(path.read_bytes().replace(b"x_train_000007", b"x_train_00\x00"))  # damaged
    damaged = read_starts(tmp_path)
    assert [start["first_step"] for start in damaged] == [1, 2, 3] and damaged[0]["data"] == damaged[2]["data"]


@pytest.mark.parametrize(
    "error, end",
    [
        (None, "finished"),
        (SystemExit(143), "stopped by SIGTERM"),
        (SystemExit(2), "error: see the messages of the other processes"),
        (UserError("the disk is full."), "error: the disk is full."),
        (KeyError(), "error: KeyError"),
    ],
)
def test_how_a_start_ended_is_known(tmp_path, error, end):
    """Unless it was killed: then it has no second line."""
    append_lines(tmp_path, START)
    assert "ended" not in read_starts(tmp_path)[0]
    append_lines(tmp_path, describe_end(7, error), START | {"first_step": 7})
    ended, running = read_starts(tmp_path)
    assert (ended["ended"]["end"], ended["ended"]["step"]) == (end, 7) and "ended" not in running


def test_values_of_equal_keys_are_comparable():
    """By hand: the second start cut the log at step 4, the third at step 6; the first and the last validate alike."""
    keys = [(0, "a"), (4, "b"), (8, "x"), (6, "a")]
    starts = [START | {"first_step": step, "comparable": {"val": key}} for step, key in keys]
    values = {0: 9.0, 3: 8.0, 4: 1.0, 5: 1.0, 6: 7.0, 9: 6.0}
    assert comparable_values("val", values, starts) == {0: 9.0, 3: 8.0, 6: 7.0, 9: 6.0}
    assert comparable_values("val", values, starts[:2]) == {4: 1.0, 5: 1.0, 6: 7.0, 9: 6.0}
    without = START | {"first_step": 9, "comparable": {}}  # measures none
    assert comparable_values("val", values, [*starts, without]) == {0: 9.0, 3: 8.0, 6: 7.0}
    assert comparable_values("val", values, starts[1:2]) == {4: 1.0, 5: 1.0, 6: 7.0, 9: 6.0}  # the first is not known


@pytest.mark.parametrize("tokens_per_step, kept", [(1, {0: 0.25}), (2, {})])
def test_scores_of_a_parent_with_other_steps_are_not_those_of_a_fork_that_has_none(tokens_per_step, kept):
    parent = START | {"comparable": {"hella": "a"}}
    fork = START | {"first_step": 4, "tokens_per_step": tokens_per_step}
    assert comparable_values("hella", {0: 0.25}, [parent, fork]) == kept


def test_a_start_at_the_step_of_an_earlier_one_replaces_it():
    """A process that was killed before its first checkpoint has left no value in the log."""
    starts = [START | {"run": run, "first_step": step} for run, step in (("a", 0), ("b", 0), ("c", 4), ("d", 4))]
    assert [start["run"] for start in starts_in_log(starts)] == ["b", "d"]


NO_STEP, NO_DATA = START | {"first_step": {}}, START | {"data": {"val": [], "tokenizer": "gpt2"}}


@pytest.mark.parametrize(
    "line",
    ["3", "{}", "[" * 10_000, '{"command": "x"}', "\ud800".encode("utf-8", "replace").decode(), json.dumps(NO_STEP),
     json.dumps(NO_DATA)],
)  # fmt: skip
def test_a_damaged_line_is_left_out(tmp_path, line):
    append_lines(tmp_path, START)
    with open(tmp_path / "starts.jsonl", "a") as file:
        file.write(line + "\n")
    assert read_starts(tmp_path) == [START]


def test_a_full_disk_is_a_warning_and_the_line_comes_with_the_next_checkpoint(
    byte_shards, tmp_path, capsys, monkeypatch
):
    """A checkpoint knows its run by the lines, so it must never be ahead of them."""
    real, calls = run_logger.append_lines, []

    def fail_once(folder, *lines):
        calls.append(lines)
        if len(calls) == 1:
            with file_size_limit(100):
                real(folder, *lines)
        real(folder, *lines)

    monkeypatch.setattr(run_logger, "append_lines", fail_once)
    trained(tmp_path / "run", "--data", byte_shards, "--max-steps", 2)
    assert f"warning: cannot write {tmp_path}/run/starts.jsonl (File too large)" in capsys.readouterr().err
    [start] = read_starts(tmp_path / "run")
    assert len(calls) == 3 and start["ended"]["end"] == "finished" and read_starts(tmp_path / "nothing") == []
    assert trainer_file(tmp_path / "run/model_00002")["run"] == start["run"]


def test_a_file_that_is_removed_during_a_run_is_written_again(byte_shards, tmp_path, monkeypatch):
    """With the flags and data that the curves and compare.py need."""
    file = tmp_path / "run/starts.jsonl"
    monkeypatch.setattr(run_logger.RunLogger, "print_progress", lambda *_, **__: file.unlink(missing_ok=True))
    trained(tmp_path / "run", "--data", byte_shards, "--max-steps", 2)
    [start] = read_starts(tmp_path / "run")
    assert start["flags"]["max_steps"] == 2 and start["ended"]["end"] == "finished"
    resumed(tmp_path / "run", "--keep", 2)
    first, second = read_starts(tmp_path / "run")
    assert first == start and second["first_step"] == 2


def test_versions_have_the_commit_of_git_in_this_folder_alone(tmp_path, monkeypatch):
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "x"]):
        subprocess.run([*git, *command], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    (tmp_path / "unpacked").mkdir()  # as a download without .git inside a repository
    expected = {"train_gpt2.py": __version__, "python": platform.python_version(), "torch": torch.__version__}
    expected |= {"numpy": np.__version__, "platform": platform.platform()}
    assert history.ROOT == ROOT
    for folder, commit in ((tmp_path, {"commit": head}), (tmp_path / "unpacked", {})):
        monkeypatch.setattr(history, "ROOT", folder)
        assert describe_start(run_info(), ONE_PROCESS)["versions"] == expected | commit


@pytest.mark.parametrize(
    "losses, best",
    [
        ({}, None),
        ({10: 3.5}, 10),
        ({0: 11.0, 10: 3.5, 20: 3.25, 30: 3.75}, 20),
        ({10: 3.5, 20: 3.5}, 10),
        ({0: math.nan, 10: 3.5, 20: math.nan, 30: 3.25, 40: -math.inf}, 30),
        ({0: math.nan, 10: math.inf}, None),
    ],
)
def test_the_best_loss_is_the_first_lowest_finite_one(losses, best):
    assert argmin_loss(losses) == best
