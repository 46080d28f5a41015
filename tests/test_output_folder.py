"""The folder that shards are written to: other shards are never mixed or lost, leftovers are removed."""

import json

import numpy as np
import pytest
from shard_helpers import LONG, corpus_of, files_in, interrupt, shards_in

import fineweb
from support import files
from support.cli import UserError


def test_other_shards_are_never_mixed_or_lost(tmp_path):
    def make(text, **settings):
        fineweb.make_shards(corpus_of([text * 250]), tmp_path, tokenizer="bytes", **settings)

    make("a", shard_size=100)
    before = shards_in(tmp_path)
    for settings in ({"shard_size": 50}, {"shard_size": 100, "max_tokens": 60}):
        with pytest.raises(UserError, match="another source or setting: --[-a-z]+ was .* and is now .*other --output"):
            make("b", **settings)
    assert shards_in(tmp_path) == before
    np.save(tmp_path / "foreign_train_000007.npy", np.zeros(9, dtype=np.uint16))
    manifest = tmp_path / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"complete": true', '"complete": false'))
    for _ in ("with a manifest", "without one"):
        with pytest.raises(UserError, match=r"shards of another tool, such as .*_train_00000\d\.npy\. Move them away"):
            make("a", shard_size=100)
        assert (tmp_path / "foreign_train_000007.npy").exists()
        manifest.unlink(missing_ok=True)


def test_the_tokenizer_of_something_else_stays(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")  # of a checkpoint
    with pytest.raises(UserError, match=r"tokenizer\.json of something else. Use another --output."):
        fineweb.make_shards(corpus_of(["a" * 250]), tmp_path, tokenizer="bytes")
    assert files_in(tmp_path) == {"tokenizer.json": b"{}"}


def test_leftovers_of_a_killed_run_are_removed(tmp_path, monkeypatch):
    options = {"shard_size": 500, "val_fraction": 0.3}
    leftovers = [f"texts_{split}_000099.npy" for split in ("train", "unsplit")]
    leftovers += [f".texts_{split}_000003.npy.partial" for split in ("train", "unsplit")]
    others = ["notes.txt", "other_unsplit_000001.npy", ".notes.npy.partial"]
    fineweb.make_shards(corpus_of(LONG), tmp_path / "expected", tokenizer="bytes", **options)
    expected = files_in(tmp_path / "expected") | dict.fromkeys(others, b"x")
    interrupt(LONG, tmp_path / "out", monkeypatch, 14, **options)
    for _ in range(2):  # the second time, there is nothing to do but this
        for name in (*leftovers, *others, ".manifest.json.partial"):
            (tmp_path / "out" / name).write_bytes(b"x")
        fineweb.make_shards(corpus_of(LONG), tmp_path / "out", tokenizer="bytes", **options)
        (tmp_path / "out" / ".manifest.json.partial").unlink(missing_ok=True)
        assert files_in(tmp_path / "out") == expected


ELSEWHERE = json.dumps(dict(tokenizer="bytes", vocab_size=257, shards=[], complete=False, in_parts="../elsewhere"))


@pytest.mark.parametrize("content", ["null", '"x"', "{", "[" * 100_000, '{"settings": {}}', ELSEWHERE])
def test_a_file_that_is_not_a_manifest_is_named(tmp_path, content):
    (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(UserError, match=r"manifest\.json is not a manifest of shards .*Remove the folder"):
        fineweb.make_shards(corpus_of(["a" * 250]), tmp_path, tokenizer="bytes")
    assert (tmp_path / "manifest.json").read_text() == content


def test_two_runs_do_not_share_a_folder(tmp_path):
    in_use = r"is in use by process \d+ .*another --output"
    with files.lock_folder(tmp_path, "--output"), pytest.raises(UserError, match=in_use):
        fineweb.make_shards(corpus_of(["x" * 99]), tmp_path, tokenizer="bytes")
    fineweb.make_shards(corpus_of(["x" * 99]), tmp_path, tokenizer="bytes")
