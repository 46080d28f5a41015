"""The folder that shards are written to: other shards are never mixed or lost, leftovers are removed."""

import numpy as np
import pytest
from shard_helpers import LONG, corpus_of, files_in, interrupt, shards_in

import fineweb
from support import files
from support.cli import UserError


def test_other_shards_are_never_mixed_or_lost(tmp_path):
    ours, others = tmp_path / "ours", tmp_path / "others"
    fineweb.make_shards(corpus_of(["a" * 250]), ours, tokenizer="bytes", shard_size=100)
    before = shards_in(ours)
    for settings in ({"shard_size": 50}, {"shard_size": 100, "max_tokens": 60}):
        with pytest.raises(UserError, match="another source or setting: --[-a-z]+ was .* and is now .*other --output"):
            fineweb.make_shards(corpus_of(["b" * 250]), ours, tokenizer="bytes", **settings)
    assert shards_in(ours) == before
    np.save(ours / "foreign_train_000007.npy", np.zeros(9, dtype=np.uint16))
    manifest = (ours / "manifest.json").read_text()
    (ours / "manifest.json").write_text(manifest.replace('"complete": true', '"complete": false'))
    with pytest.raises(UserError, match=r"such as foreign_train_000007\.npy\. Move them away"):
        fineweb.make_shards(corpus_of(["a" * 250]), ours, tokenizer="bytes", shard_size=100)
    assert (ours / "foreign_train_000007.npy").exists()
    others.mkdir()
    np.save(others / "x_train_000001.npy", np.zeros(9, dtype=np.uint16))
    with pytest.raises(UserError, match=r"shards of another tool, such as x_train_000001\.npy"):
        fineweb.make_shards(corpus_of(["b" * 250]), others, tokenizer="bytes")


# names of earlier versions of this program, and of this one
@pytest.mark.parametrize("hidden, unsplit", [("", "counted"), (".", "unsplit")])
def test_leftovers_of_a_killed_run_are_removed(tmp_path, monkeypatch, hidden, unsplit):
    options = {"shard_size": 500, "val_fraction": 0.3}
    leftovers = [
        f"texts_{unsplit}_000099.npy",
        "texts_train_000099.npy",
        f"{hidden}texts_train_000003.npy.partial",
        f"{hidden}texts_{unsplit}_000003.npy.partial",
    ]
    others = ["notes.txt", f"other_{unsplit}_000001.npy", f"{hidden}notes.npy.partial"]
    fineweb.make_shards(corpus_of(LONG), tmp_path / "expected", tokenizer="bytes", **options)
    expected = files_in(tmp_path / "expected") | dict.fromkeys(others, b"x")
    interrupt(LONG, tmp_path / "out", monkeypatch, 14, **options)
    for _ in range(2):  # the second time, there is nothing to do but this
        for name in (*leftovers, *others, ".manifest.json.partial"):
            (tmp_path / "out" / name).write_bytes(b"x")
        fineweb.make_shards(corpus_of(LONG), tmp_path / "out", tokenizer="bytes", **options)
        (tmp_path / "out" / ".manifest.json.partial").unlink(missing_ok=True)
        assert files_in(tmp_path / "out") == expected


@pytest.mark.parametrize("content", ["null", '"x"', "{", "[" * 100_000, '{"settings": {}}'])
def test_a_file_that_is_not_a_manifest_is_named(tmp_path, content):
    (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(UserError, match=r"manifest\.json is not a manifest of shards .*Remove it"):
        fineweb.make_shards(corpus_of(["a" * 250]), tmp_path, tokenizer="bytes")
    assert (tmp_path / "manifest.json").read_text() == content


def test_two_runs_do_not_share_a_folder(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    in_use = r"out is in use by process \d+ .*another --output"
    with files.lock_folder(out, "--output"), pytest.raises(UserError, match=in_use):
        fineweb.make_shards(corpus_of(["x" * 99]), out, tokenizer="bytes")
    fineweb.make_shards(corpus_of(["x" * 99]), out, tokenizer="bytes")


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "out").write_text("a file")
    with pytest.raises(UserError, match=r"cannot write to .*out \(File exists\)\. Use another --output"):
        fineweb.make_shards(corpus_of(["x" * 99]), tmp_path / "out", tokenizer="bytes")
    assert (tmp_path / "out").read_text() == "a file"
