"""Files: atomic writes, folders for temporary files."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from support import files
from support.cli import UserError


def test_no_folder_for_temporary_files_is_an_error(monkeypatch, tmp_path):
    """As in a container whose file system is read-only."""
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: [str(tmp_path / "missing")])
    with pytest.raises(UserError, match=r"No usable temporary directory.* TMPDIR"), files.temporary_folder():
        pass


def test_a_full_folder_for_temporary_files_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(UserError) as error, files.temporary_folder() as folder:
        assert folder.parent == tmp_path
        Path("/dev/full").write_text("x")
    assert str(error.value) == (
        f"cannot write to {tmp_path} (No space left on device). "
        "Free some space there, or name another folder in TMPDIR."
    )
    assert not list(tmp_path.iterdir())


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

    def check():
        assert [path.name for path in synced] == ["file", ".folder.partial"] and not path.exists()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), files.atomic_write(path, before_rename=check) as tmp:
        tmp.mkdir()
        (tmp / "file").touch()
    assert os.listdir(tmp_path) == []
