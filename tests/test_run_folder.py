"""The folder of a run: one process at a time, and nothing is lost by accident."""

from __future__ import annotations

import os

import pytest
from helpers import TINY_FLAGS, start_run, wait_for
from training import checkpoint_names, config_of, lock_and_replace

import train_gpt2
from support.checkpoints import run_folder
from support.checkpoints.directory import list_earlier, newest_checkpoint, write_checkpoint
from support.cli import UserError


@pytest.mark.slow
def test_a_second_run_in_the_same_folder_is_refused(byte_shards, tmp_path):
    flags = ["--data", byte_shards, "--max-steps", 100000, "--val-every", 0, "--checkpoint-every", 20]
    [first] = start_run(*flags, "--out", "run", cwd=tmp_path)
    out = tmp_path / "run"
    assert wait_for(lambda: out.exists() and checkpoint_names(out)[:1] == ["model_00020"])
    for again in (["--resume"], ["--resume", "auto"], [], ["--demo", "--data", byte_shards]):
        with pytest.raises(UserError, match=rf"run is in use by process {first.pid} on .*another --out"):
            train_gpt2.main([*TINY_FLAGS, "--data", str(byte_shards), "--out", str(out), *map(str, again)])
    assert first.is_alive()
    first.kill()
    first.join()
    run_folder.check_folder(config_of("--out", out), newest_checkpoint(out))
    with pytest.raises(UserError, match="already contains a run. Continue it with --resume"):
        run_folder.check_folder(config_of("--out", out), None)


def test_a_new_run_replaces_a_run_and_nothing_else(tmp_path):
    for name in ("model_00001", "model_of_mine", ".model_00002.partial", ".model_00001.removed"):
        (tmp_path / name).mkdir()
    for name in ("log.txt", "metrics.jsonl", "run.json", "curves.png", "notes.md"):
        (tmp_path / name).write_text("x")
    with pytest.raises(UserError, match="already contains a run"):
        lock_and_replace(tmp_path, "nothing")
    with pytest.raises(UserError, match="another run saved .*model_00001 while this one was starting"):
        lock_and_replace(tmp_path, "log")
    assert len(os.listdir(tmp_path)) == 10
    lock_and_replace(tmp_path, "run")
    kept = [
        "curves.earlier.png",
        "log.earlier.txt",
        "metrics.earlier.jsonl",
        "model_00001.earlier",
        "model_of_mine",
        "notes.md",
        "run.earlier.json",
    ]
    assert sorted(os.listdir(tmp_path)) == [".lock", *kept]
    (tmp_path / ".model_00002.partial").mkdir()
    (tmp_path / "model_00003").mkdir()
    lock_and_replace(tmp_path, "nothing", tmp_path / "model_00003")
    assert sorted(os.listdir(tmp_path)) == sorted([".lock", "model_00003", *kept])
    write_checkpoint(tmp_path / "model_00004", lambda folder: (folder / "x").write_text("x"))
    with pytest.raises(UserError, match="another run saved .*model_00004"):
        lock_and_replace(tmp_path, "nothing", tmp_path / "model_00003")
    (tmp_path / "model_00004" / "x").unlink()  # a corrupt checkpoint counts as none
    lock_and_replace(tmp_path, "nothing", tmp_path / "model_00003")


def start_over(folder, step=None, content=""):
    """A run that replaces the one in `folder`, and saves one checkpoint unless it ends before."""
    lock_and_replace(folder, "run")
    (folder / "log.txt").write_text(content)
    if step is not None:
        write_checkpoint(folder / f"model_{step:05d}", lambda directory: (directory / "x").write_text(content))


def test_a_model_is_removed_only_when_there_is_a_newer_one(tmp_path):
    """Runs that end before their first save leave the last model, and its log, as they are."""
    start_over(tmp_path, 60, "first")
    start_over(tmp_path, None, "crashed")
    for _ in range(2):
        assert (tmp_path / "model_00060.earlier" / "x").read_text() == "first"
        assert (tmp_path / "log.earlier.txt").read_text() == "first"
        start_over(tmp_path, None, "crashed again")
    start_over(tmp_path, 50, "second")  # no CheckpointManager here, which removes the first one's now
    start_over(tmp_path, None)
    assert [path.name for path in list_earlier(tmp_path)] == ["model_00050.earlier"]
    assert (tmp_path / "log.earlier.txt").read_text() == "second"


def test_an_occupied_folder_is_found_before_a_text_is_tokenised(tmp_path):
    (tmp_path / "log.txt").write_text("0 train 5.0\n")
    (tmp_path / "text.txt").write_text("some text. " * 1000)
    flags = ["--text", tmp_path / "text.txt", "--tokenizer", "bytes", "--out", tmp_path, "--device", "cpu"]
    with pytest.raises(UserError, match="already contains a run without checkpoints"):
        train_gpt2.main(list(map(str, flags)))
    assert not (tmp_path / "data").exists()
