"""Files: atomic writes, folders for temporary files."""

from __future__ import annotations

import os

import pytest

from support import files
from support.cli import UserError


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

    def check(tmp, path):
        assert {path.name for path in synced} == {"file", "inner", "nested", ".folder.partial"} and not path.exists()
        tmp.rename(path)

    monkeypatch.setattr(files, "replace", check)
    with files.atomic_write(path) as tmp:
        (tmp / "nested").mkdir(parents=True)
        (tmp / "file").touch()
        (tmp / "nested" / "inner").touch()
    assert os.listdir(tmp_path) == ["folder"]


def test_an_output_file_may_be_a_link_or_a_pipe(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "file")
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    for name in ("link", "pipe"):
        files.check_output_file(tmp_path / name, "--json", "te")
        files.write_output_file(tmp_path / name, "text")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "file").read_text() == "text"
    assert os.read(reader, 9) == b"text" and sorted(os.listdir(tmp_path)) == ["file", "link", "pipe"]
    os.close(reader)


def test_an_output_file_of_other_content_is_refused(tmp_path):
    (tmp_path / "mine").write_text("my text")
    for path in (tmp_path / "mine", tmp_path, tmp_path / "missing" / "file"):
        with pytest.raises(UserError, match="--json"):
            files.check_output_file(path, "--json", "text")
    assert (tmp_path / "mine").read_text() == "my text"
    with pytest.raises(UserError, match=r"cannot write .*gone/file \(No such file or directory\)"):
        files.write_output_file(tmp_path / "gone" / "file", "text")
