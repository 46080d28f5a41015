"""The folder of a run: one process at a time, made by one run, and never replaced."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import ROOT, TINY_FLAGS, start_run, wait_for
from runs import log_without_seconds
from training import NEW_RUN, ONE_PROCESS, checkpoint_names, config_of, resumed, trained, trainer_file

import train_gpt2
from support.checkpoints import run_folder
from support.checkpoints.directory import newest_checkpoint, write_checkpoint
from support.checkpoints.history import read_starts
from support.checkpoints.state import Checkpoint
from support.cli import UserError
from support.files import first_free


@pytest.mark.slow
def test_a_second_run_in_the_same_folder_is_refused(byte_shards, tmp_path):
    flags = ["--data", byte_shards, "--max-steps", 100000, "--val-every", 0, "--checkpoint-every", 20]
    [first] = start_run(*flags, "--out", "run", cwd=tmp_path)
    out = tmp_path / "run"
    assert wait_for(lambda: out.exists() and checkpoint_names(out)[:1] == ["model_00020"])
    again = [*TINY_FLAGS, "--data", str(byte_shards), "--out", str(out), "--max-steps", "100000"]
    for more in (["--resume"], ["--resume", "auto"], []):
        with pytest.raises(UserError, match=rf"run is in use by process {first.pid} on .*another --out"):
            train_gpt2.main([*again, *more])
    assert first.is_alive()
    first.kill()
    first.join()
    lock(out, Checkpoint.open(newest_checkpoint(out)))
    with pytest.raises(UserError, match="already contains a run. Continue it with --resume"):
        lock(out)


def lock(folder: Path, checkpoint: Checkpoint | None = None) -> None:
    """Locks a folder and lets it go, for a new run or one that is resumed from a checkpoint."""
    with run_folder.locked(config_of("--out", folder), replace(NEW_RUN, checkpoint=checkpoint), ONE_PROCESS):
        pass


CHECKPOINT = Checkpoint(
    Path(),
    "a",
    0,
    0,
    0,
    0.0,
    0.0,
    0.0,
    0,
    0,
    {},
    {},
    {"train": [], "val": [], "base": None, "source": None},
    [],
    {},
    {},
)


def test_what_is_in_a_folder_stays(tmp_path):
    """But for what a killed process has left half-written."""
    for name in ("model_00001", "model_of_mine", ".model_00002.partial", ".model_00001.removed"):
        (tmp_path / name).mkdir()
    for name in ("log.txt", "notes.md"):
        (tmp_path / name).write_text("x")
    with pytest.raises(UserError, match="already contains a run"):
        lock(tmp_path)
    first = replace(CHECKPOINT, path=tmp_path / "model_00001", step=1)
    lock(tmp_path, first)
    assert sorted(os.listdir(tmp_path)) == [".gpt2.lock", "log.txt", "model_00001", "model_of_mine", "notes.md"]
    write_checkpoint(tmp_path / "model_00004", lambda folder: (folder / "x").write_text("x"))
    with pytest.raises(UserError, match="another run saved .*model_00004"):
        lock(tmp_path, first)
    (tmp_path / "model_00004" / "x").unlink()  # a corrupt checkpoint counts as none
    lock(tmp_path, first)


def test_a_log_without_checkpoints_is_started_over_by_the_same_command(byte_shards, tmp_path, monkeypatch):
    flags = ["--data", byte_shards, "--max-steps", 3, "--checkpoint-every", 0]
    out = tmp_path / "run"

    def kill() -> None:
        """Makes it look as if the process had been killed."""
        starts = (out / "starts.jsonl").read_text().splitlines(True)
        (out / "starts.jsonl").write_text("".join(starts[:-1]))

    log = trained(out, *flags)
    kill()
    assert trained(out, *flags) == log
    for seed in (2, 3):  # the same words with another content of the file are another command
        (tmp_path / "flags.txt").write_text(f"--seed {seed}")
        monkeypatch.setattr(sys, "argv", ["train_gpt2.py", f"@{tmp_path / 'flags.txt'}"])
        kill()
        with pytest.raises(UserError, match="has a log without checkpoints. Start that run over with --resume auto"):
            trained(out, *flags)
        assert trained(out, *flags, "--resume", "auto") == log
        kill()
        assert trained(out, *flags) == log
        start = read_starts(out)[-1]
        assert (start["command"], start["arguments"]) == (sys.argv, ["--seed", str(seed)])
    assert checkpoint_names(out) == []
    for again in ([], ["--resume", "auto"]):  # it has finished: nothing may empty its log
        with pytest.raises(UserError, match="already contains a run, which has finished. Use another --out"):
            trained(out, *flags, *again)
    assert log_without_seconds(out) == log


def test_a_run_of_another_version_says_so(byte_shards, tmp_path):
    """It cannot be resumed, so --resume is no advice."""
    out = tmp_path / "run"
    trained(out, "--data", byte_shards, "--max-steps", 3)
    content = trainer_file(out / "model_00003")
    old = {
        name: value
        for name, value in content.items()
        if name not in ("version", "run", "row", "tokens", "last_progress")
    }
    torch.save(old, out / "model_00003/trainer.pt")
    with pytest.raises(
        UserError, match="was written by another version of the trainer .1., .* Start from its weights with --init-from"
    ):
        trained(out, "--data", byte_shards, "--max-steps", 3)


def test_a_demo_takes_the_first_free_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert first_free("log_demo") == "log_demo"
    Path("log_demo").mkdir()
    write_checkpoint(Path("log_demo/model_00005"), lambda folder: (folder / "x").write_text("x"))
    Path("log_demo_2").mkdir()
    Path("log_demo_2/log.txt").write_text("0 train 1.0\n")
    Path("log_demo_3").mkdir()  # of a demo that is starting
    assert first_free("log_demo") == "log_demo_4"


def test_no_run_is_in_a_checkpoint(tmp_path):
    """It would be removed with it."""
    write_checkpoint(tmp_path / "model_00005", lambda folder: (folder / "x").write_text("x"))
    for out in ("model_00005", "model_00005/run"):
        with pytest.raises(UserError, match="--out is inside the checkpoint .*model_00005. Use another --out."):
            lock(tmp_path / out)


def test_a_run_that_fails_before_it_begins_leaves_nothing(byte_shards, tmp_path, monkeypatch):
    """A folder with a lock would be taken for a run's, and not be read as text."""
    monkeypatch.chdir(tmp_path)
    mine = Path("mine/runs")
    mine.mkdir(parents=True)
    for out in (Path("new"), mine, mine / "a/b", mine.absolute() / "c"):
        with pytest.raises(UserError, match="there is no folder"):
            trained(out, "--data", "none")
    assert list(tmp_path.rglob("*")) == [mine.parent.absolute(), mine.absolute()]


def test_the_shards_of_a_run_that_is_starting_stay(byte_shards, tmp_path, monkeypatch):
    """Whatever it does between making them and its first step, another command for the folder is refused at once."""
    monkeypatch.chdir(tmp_path)
    for name, text in (("x.txt", "x y z " * 300), ("y.txt", "other " * 300)):
        Path(name).write_text(text)
    flags = [*TINY_FLAGS, "--tokenizer", "bytes", "--out", "run", "--max-steps", "2"]
    real, refused = train_gpt2.initial_model, []

    def start_another(*args):
        before = {path: path.read_bytes() for path in Path("run/data").iterdir()}
        monkeypatch.setattr(train_gpt2, "initial_model", real)
        with pytest.raises(UserError, match="run is in use by process"):
            train_gpt2.main([*flags, "--text", "y.txt"])
        refused.append({path: path.read_bytes() for path in Path("run/data").iterdir()} == before)
        return real(*args)

    monkeypatch.setattr(train_gpt2, "initial_model", start_another)
    train_gpt2.main([*flags, "--text", "x.txt"])
    assert refused == [True] and checkpoint_names(Path("run")) == ["model_00002"]


@pytest.mark.slow
@pytest.mark.parametrize("command", [">> {}", "2>&1 | tee {}"])
def test_output_that_is_redirected_to_the_log_is_refused(byte_shards, tmp_path, command):
    """The log replaces the file, and what the run prints would be lost."""
    out = tmp_path / "run"
    out.mkdir()
    flags = shlex.join([*TINY_FLAGS, "--data", str(byte_shards), "--out", str(out), "--max-steps", "2"])
    for run in (flags, f"{flags} --resume auto"):
        shell = f"{sys.executable} {ROOT / 'train_gpt2.py'} {run} {command.format(out / 'log.txt')}"
        done = subprocess.run(["bash", "-o", "pipefail", "-c", shell], capture_output=True, text=True, timeout=60)
        assert done.returncode == 2 and re.search("log.txt is empty|output .* goes to", done.stdout + done.stderr)
    os.remove(out / "log.txt")
    trained(out, "--data", byte_shards, "--max-steps", 2)
    if ">>" in command:
        shell = f"{sys.executable} {ROOT / 'train_gpt2.py'} --resume --max-steps 2 --out {out} >> {out / 'log.txt'}"
        os.replace(out / "starts.jsonl", tmp_path / "starts.jsonl")  # which says that the run has finished
        done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, timeout=60)
        assert done.returncode == 2 and "goes to" in done.stderr
        os.replace(tmp_path / "starts.jsonl", out / "starts.jsonl")
    os.truncate(out / "log.txt", 0)  # as the shell would
    with pytest.raises(UserError, match="log.txt is empty. If the output"):
        resumed(out, "--max-steps", 2)


def test_a_log_of_another_program_stays(byte_shards, tmp_path):
    (tmp_path / "log.txt").write_text("my notes\n")
    for how in ([], ["--resume", "auto"]):
        with pytest.raises(UserError, match="log.txt is not the log of a run of this project"):
            trained(tmp_path, "--data", byte_shards, "--max-steps", 2, *how)
        assert os.listdir(tmp_path) == ["log.txt"], "with a lock file, texts beside it would be skipped"
    assert (tmp_path / "log.txt").read_text() == "my notes\n"


def test_a_run_that_starts_over_says_how_long_its_log_was(byte_shards, tmp_path, capsys):
    """Its checkpoints may have been moved away."""
    flags = ["--data", byte_shards, "--max-steps", 4, "--resume", "auto"]
    trained(tmp_path, *flags)
    shutil.rmtree(tmp_path / "model_00004")
    starts = (tmp_path / "starts.jsonl").read_text().splitlines(True)
    (tmp_path / "starts.jsonl").write_text("".join(starts[:-1]))
    assert "starts over" not in capsys.readouterr().err
    trained(tmp_path, *flags)
    assert f"{tmp_path} has no checkpoint, so the run starts over. Its log of 4 steps" in capsys.readouterr().err
