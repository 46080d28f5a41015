"""Checkpoint directories: complete or absent, and corruption is found."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from support.checkpoints.directory import find_corruption, newest_checkpoint, write_checkpoint
from support.cli import UserError


def checkpoint_with(directory: Path, text: str = "x") -> Path:
    write_checkpoint(directory, lambda folder: (folder / "model.txt").write_text(text))
    return directory


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
    "corruption", ["altered", "is missing", "bytes, not", "names '../x'", "is not readable", "lists no files"]
)
def test_corruption_is_described(tmp_path, corruption):
    directory = checkpoint_with(tmp_path / "model_00001", "four")
    file, contents = directory / "model.txt", directory / "checkpoint.json"
    if corruption == "altered":
        file.write_text("five")
    elif corruption == "is missing":
        file.unlink()
    elif corruption == "bytes, not":
        file.write_text("fo")
    elif corruption == "is not readable":
        contents.write_text('{"files": 1}')
    elif corruption == "lists no files":
        contents.write_text('{"files": {}}')
    else:
        contents.write_text(json.dumps({"files": {"../x": {"bytes": 0, "sha256": ""}}}))
    assert corruption in find_corruption(directory)


def test_only_intact_checkpoints_count(tmp_path, capsys):
    assert newest_checkpoint(tmp_path / "nowhere") is newest_checkpoint(tmp_path) is None
    good = checkpoint_with(tmp_path / "model_00001")
    (checkpoint_with(tmp_path / "model_00002") / "model.txt").unlink()
    assert newest_checkpoint(tmp_path) == good
    assert capsys.readouterr().err == (
        f"warning: {tmp_path}/model_00002 is corrupt: model.txt is missing. Skipping it.\n"
    )
    (good / "checkpoint.json").unlink()
    with pytest.raises(UserError, match="all checkpoints in .* are corrupt"):
        newest_checkpoint(tmp_path)
