"""Checkpoint directories: complete or absent, and corruption is found."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from support.checkpoints.directory import find_corruption, newest_checkpoint, write_checkpoint
from support.cli import UserError


def checkpoint_with(directory: Path, text: str = "x") -> Path:
    def write_files(folder: Path) -> None:
        (folder / "adapter").mkdir()
        for name in ("model.txt", "adapter/weights.txt"):
            (folder / name).write_text(text)
            (folder / name).chmod(0o600)  # as safetensors does

    write_checkpoint(directory, write_files)
    return directory


def test_who_may_read_one_file_may_read_all(tmp_path):
    paths = [path for path in checkpoint_with(tmp_path / "model_00001").rglob("*") if path.is_file()]
    assert len(paths) == 3 and len({path.stat().st_mode for path in paths}) == 1 and paths[0].stat().st_mode & 0o044


def test_a_checkpoint_is_complete_or_absent(tmp_path):
    good = checkpoint_with(tmp_path / "model_00005")

    def fail(folder):
        (folder / "model.txt").write_text("half")
        raise OSError("disk full")

    for directory in (tmp_path / "model_00010", good):
        with pytest.raises(OSError, match="disk full"):
            write_checkpoint(directory, fail)
    assert newest_checkpoint(tmp_path) == good and (good / "model.txt").read_text() == "x"
    checkpoint_with(tmp_path / "model_00010")  # nothing that the failure left is in the way
    checkpoint_with(good, "replaced")
    assert (good / "model.txt").read_text() == "replaced" and find_corruption(good) is None
    assert sorted(os.listdir(tmp_path)) == ["model_00005", "model_00010"]
    checkpoint_with(tmp_path / "model_99999")
    checkpoint_with(tmp_path / "model_100000")
    assert newest_checkpoint(tmp_path).name == "model_100000"  # by number, not by name


@pytest.mark.parametrize(
    "file, text, corruption",
    [
        ("model.txt", "five", "model.txt was altered"),
        ("model.txt", "fo", "model.txt was altered"),
        ("model.txt", None, "model.txt is missing"),
        ("adapter/weights.txt", "five", "adapter/weights.txt was altered"),
        ("adapter/weights.txt", None, "adapter/weights.txt is missing"),
        ("checkpoint.json", '{"files": 1}', "checkpoint.json is malformed"),
        ("checkpoint.json", None, "checkpoint.json is missing"),
    ],
)
def test_corruption_is_described_and_skipped(tmp_path, capsys, file, text, corruption):
    good, bad = checkpoint_with(tmp_path / "model_00001"), checkpoint_with(tmp_path / "model_00002", "four")
    assert find_corruption(bad) is None
    (bad / file).unlink() if text is None else (bad / file).write_text(text)
    assert corruption in find_corruption(bad)
    assert newest_checkpoint(tmp_path) == good
    assert capsys.readouterr().err.startswith(f"warning: cannot use {bad}: {corruption}")
    (good / "model.txt").unlink()
    with pytest.raises(UserError, match="no checkpoint in .* is usable"):
        newest_checkpoint(tmp_path)


def test_without_checkpoints_there_is_no_newest_one(tmp_path):
    assert newest_checkpoint(tmp_path / "nowhere") is newest_checkpoint(tmp_path) is None
