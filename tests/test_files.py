"""Files: atomic writes, folders for temporary files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from support import files
from support.checkpoints.directory import write_checkpoint
from support.checkpoints.history import append_lines
from support.cli import UserError
from support.console.log import LogFile


def test_a_write_that_fails_names_the_file_and_leaves_the_old_one(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(OSError) as error, files.atomic_write(path) as tmp:
        tmp.write_text("new")
        with open("/dev/full", "w") as full:
            full.write("x")
    assert error.value.filename == str(path)
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["file"]


def test_before_it_is_renamed_all_is_on_the_disk(tmp_path, monkeypatch):
    path, synced = tmp_path / "folder", []
    monkeypatch.setattr(files, "sync", synced.append)

    rename = os.replace

    def check(tmp, path):
        assert {path.name for path in synced} == {"file", "inner", "nested", ".folder.partial"} and not path.exists()
        rename(tmp, path)

    monkeypatch.setattr(os, "replace", check)
    with files.atomic_write(path) as tmp:
        (tmp / "nested").mkdir(parents=True)
        (tmp / "file").touch()
        (tmp / "nested" / "inner").touch()
    assert os.listdir(tmp_path) == ["folder"]


def test_an_output_file_needs_a_folder(tmp_path):
    for path in (tmp_path / "file", Path("/dev/null")):
        files.check_output_file(path, "--json")
    for path in (tmp_path, tmp_path / "missing" / "file"):
        with pytest.raises(UserError, match="--json"):
            files.check_output_file(path, "--json")


def test_a_folder_that_another_process_has_now_is_not_written(tmp_path):
    """A run's folder is moved away while it trains, and another run makes it again."""
    folder = tmp_path / "log"
    folder.mkdir()
    with files.lock_folder(folder, "--out"):
        log = LogFile(folder / "log.txt")
        folder.rename(tmp_path / "moved")
        folder.mkdir()
        (folder / files.LOCK).write_text("process 1 on another-node\n")
        log.write(0, {"train": 5.0})
        for write in (
            log.sync,
            lambda: append_lines(folder, {"x": 1}),
            lambda: write_checkpoint(folder / "model_00001", lambda path: None),
        ):
            with pytest.raises(OSError, match="it was moved or removed, and now belongs to process 1 on another-node"):
                write()
        assert [path.name for path in folder.iterdir()] == [files.LOCK]
    with files.lock_folder(tmp_path / "moved", "--out"):
        files.check_lock(tmp_path / "moved")
