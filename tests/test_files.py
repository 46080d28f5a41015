"""Files: atomic writes, folders for temporary files."""

from __future__ import annotations

import os

import pytest

from support import files


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
