"""Shards equal those of the plain loop, whatever interrupts the run; which of them are for validation; full disks."""

import contextlib
import hashlib
import json
import random
import shutil
import time
import types

import numpy as np
import pytest
from helpers import FORKS
from shard_helpers import (
    ADVERSARIAL,
    LONG,
    corpus_of,
    file_size_limit,
    files_in,
    flip_bit,
    interrupt,
    plain_bytes,
    plain_loop,
    set_batch_chars,
    shards_in,
    split_sizes,
    tokens_in,
)

import fineweb
from support.cli import UserError
from support.data import corpus, shard_writer, shards
from support.data.corpus import Documents


@pytest.mark.parametrize("shard_size", [3, 255, 256, 700])
def test_shards_equal_the_plain_loop(tmp_path, shard_size):
    fineweb.make_shards(corpus_of(ADVERSARIAL), tmp_path, tokenizer="bytes", shard_size=shard_size)
    expected = plain_loop(ADVERSARIAL, plain_bytes, 256, shard_size)
    assert shards_in(tmp_path) == [("train" if i else "val", i, tokens) for i, tokens in enumerate(expected)]
    assert all(np.load(path).dtype == np.uint16 for path in tmp_path.glob("*.npy"))


def test_the_manifest_describes_the_shards(tmp_path):
    source = Documents("some texts", lambda: ADVERSARIAL, "abc123", "texts")
    fineweb.make_shards(source, tmp_path, tokenizer="bytes", shard_size=256)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    expected = dict(tokenizer="bytes", vocab_size=257, source="some texts", revision="abc123", complete=True)
    assert expected.items() <= manifest.items()
    for shard in manifest["shards"]:
        file = tmp_path / shard["file"]
        assert shard["sha256"] == hashlib.sha256(file.read_bytes()).hexdigest() and shard["split"] in shard["file"]
        assert (shard["tokens"], shard["documents"]) == (len(np.load(file)), np.count_nonzero(np.load(file) == 256))


# ---- the validation split


def test_the_last_documents_of_a_small_corpus_are_held_out(tmp_path):
    texts = ["a" * 9] * 20  # 200 tokens in documents of 10
    fineweb.make_shards(corpus_of(texts), tmp_path / "tenth", tokenizer="bytes")
    assert split_sizes(tmp_path / "tenth") == [("val", 20), ("train", 180)]
    fineweb.make_shards(corpus_of(texts), tmp_path / "third", tokenizer="bytes", val_fraction=1 / 3)
    assert split_sizes(tmp_path / "third") == [("val", 70), ("train", 130)]  # 7 documents are nearest to 66.7 tokens
    fineweb.make_shards(corpus_of(texts), tmp_path / "many", tokenizer="bytes", val_fraction=0.3, shard_size=50)
    assert [(split, index, len(tokens)) for split, index, tokens in shards_in(tmp_path / "many")] == [
        ("val", 0, 50), ("val", 1, 10), ("train", 2, 50), ("train", 3, 50), ("train", 4, 40),
    ]  # fmt: skip
    fineweb.make_shards(corpus_of(["b" * 999]), tmp_path / "one", tokenizer="bytes")
    assert tokens_in(tmp_path / "one") == [[98] * 100, [256] + [98] * 899]  # cut inside the only document


def test_only_a_corpus_of_one_shard_is_split(tmp_path):
    for max_tokens, expected in ((500, [("val", 50), ("train", 450)]), (501, [("val", 500), ("train", 1)])):
        out, texts = tmp_path / str(max_tokens), ["a" * 9] * 99
        fineweb.make_shards(corpus_of(texts), out, tokenizer="bytes", shard_size=500, max_tokens=max_tokens)
        assert split_sizes(out) == expected


def test_split_documents_cuts_inside_a_document(tmp_path, capsys):
    """Of documents of 10, 30 and 60 tokens, a cut between documents holds out 60."""
    texts = ["a" * 9, "b" * 29, "c" * 59]
    fineweb.make_shards(corpus_of(texts), tmp_path / "between", tokenizer="bytes")
    assert split_sizes(tmp_path / "between") == [("val", 60), ("train", 40)]
    assert "note: that is more than 10%" in capsys.readouterr().out
    fineweb.make_shards(corpus_of(texts), tmp_path / "inside", tokenizer="bytes", split_documents=True)
    assert split_sizes(tmp_path / "inside") == [("val", 10), ("train", 90)]
    assert "note" not in capsys.readouterr().out
    texts = ["a" * 59, "b" * 29, "c" * 10]  # a document starts one token from the ideal cut: near enough
    fineweb.make_shards(corpus_of(texts), tmp_path / "near", tokenizer="bytes", split_documents=True)
    assert split_sizes(tmp_path / "near") == [("val", 11), ("train", 90)]


def test_the_split_point_is_the_start_of_the_nearest_document():
    """In parts of any sizes, compared with all starts at once."""
    rng = np.random.default_rng(0)
    for _ in range(300):
        tokens = (rng.random(rng.integers(2, 60)) < rng.choice([0.02, 0.2, 0.9])).astype(np.uint16)
        tokens[0] = 1  # the first document starts here
        parts = np.split(tokens, np.sort(rng.integers(0, len(tokens), rng.integers(0, 5))))
        fraction = rng.random()
        ideal = len(tokens) - max(1, round(fraction * len(tokens)))
        starts = np.flatnonzero(tokens)[1:]
        expected = starts[np.abs(starts - ideal).argmin()] if len(starts) else max(1, ideal)
        assert shard_writer.val_split_point(parts, 1, fraction) == expected


# ---- interrupted runs


def test_the_same_command_again_resumes_or_has_nothing_to_do(tmp_path, monkeypatch):
    set_batch_chars(monkeypatch, 3000)
    interrupt(LONG, tmp_path, monkeypatch, 4, shard_size=500)
    with pytest.raises(UserError, match="are not complete .* Run the same fineweb.py command again"):
        shards.open_shards(tmp_path, "train")
    set_batch_chars(monkeypatch, 70)  # other batches do not matter
    fineweb.make_shards(corpus_of(LONG), tmp_path, tokenizer="bytes", shard_size=500)
    assert tokens_in(tmp_path) == plain_loop(LONG, plain_bytes, 256, 500)
    stamps = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    fineweb.make_shards(corpus_of(LONG), tmp_path, tokenizer="bytes", shard_size=500)
    assert stamps == {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}


def make_shards_slowly(texts, out, options):
    """So that a kill can come at any moment of it."""
    corpus.BATCH_CHARS = 500
    atomic_write = shards.files.atomic_write
    shards.files.atomic_write = lambda *options: (time.sleep(0.003), atomic_write(*options))[1]
    fineweb.make_shards(corpus_of(texts), out, **options)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"val_fraction": 0.3}, {"max_tokens": 30_000}])
def test_killed_at_any_moment_the_same_command_makes_the_same_bytes(tmp_path, monkeypatch, options):
    set_batch_chars(monkeypatch, 500)
    rng = random.Random(0)
    texts = [" ".join(str(rng.random()) for _ in range(rng.randrange(60))) for _ in range(80)]
    options = options | {"tokenizer": "bytes", "shard_size": 700}
    fineweb.make_shards(corpus_of(texts), tmp_path / "expected", **options)
    stamps, kills = {}, 0
    while True:
        process = FORKS.Process(target=make_shards_slowly, args=(texts, tmp_path / "out", options))
        process.start()
        before = len(list(tmp_path.glob("out/*.npy")))
        deadline = time.monotonic() + 60
        while len(list(tmp_path.glob("out/*.npy"))) < before + rng.randrange(1, 9) and process.is_alive():
            assert time.monotonic() < deadline
            time.sleep(0.001)
        time.sleep(rng.random() * 0.01)
        if kills < 6:
            process.kill()
            kills += process.is_alive()
        process.join(60)
        for path, stamp in stamps.items():
            assert not path.exists() or path.stat().st_mtime_ns == stamp, f"{path.name} was written again"
        manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
        listed = [tmp_path / "out" / s["file"] for s in (*manifest["shards"], *manifest.get("unsplit", []))]
        stamps = {path: path.stat().st_mtime_ns for path in listed}
        if process.exitcode == 0:
            break
    assert kills >= 3
    assert files_in(tmp_path / "out") == files_in(tmp_path / "expected")


@pytest.mark.parametrize("options, interrupted_after", [({}, 5), ({"val_fraction": 0.3}, 14)])
@pytest.mark.parametrize("harm", [lambda p: p.unlink(), lambda p: p.write_bytes(p.read_bytes()[:-50]), flip_bit])
def test_only_lost_shards_are_made_again(tmp_path, monkeypatch, options, interrupted_after, harm):
    """Those of a finished run, and of one that was interrupted, which compares only the sizes."""

    def make(folder):
        fineweb.make_shards(corpus_of(LONG), folder, tokenizer="bytes", shard_size=500, **options)
        return {path: path.stat().st_mtime_ns for path in sorted(folder.glob("*_train_*.npy"))}

    before = make(tmp_path / "expected")
    shutil.copytree(tmp_path / "expected", tmp_path / "finished", copy_function=shutil.copy2)
    harm(list(before)[2])
    after = make(tmp_path / "expected")
    assert files_in(tmp_path / "expected") == files_in(tmp_path / "finished")
    assert [before[path] == after[path] for path in before] == [True, True, *[False] * (len(before) - 2)]
    if harm is not flip_bit:
        interrupt(LONG, tmp_path / "out", monkeypatch, interrupted_after, shard_size=500, **options)
        harm(sorted((tmp_path / "out").glob("*00002.npy"))[0])
        make(tmp_path / "out")
        assert files_in(tmp_path / "out") == files_in(tmp_path / "finished")


def test_a_run_interrupted_while_a_small_corpus_is_split_resumes(tmp_path, monkeypatch):
    interrupt(["a" * 9] * 20, tmp_path, monkeypatch, 1)
    fineweb.make_shards(corpus_of(["a" * 9] * 20), tmp_path, tokenizer="bytes")
    assert split_sizes(tmp_path) == [("val", 20), ("train", 180)]


# ---- disks


def test_a_disk_that_is_too_small_is_reported_before_anything_is_written(tmp_path, monkeypatch):
    """A resumed run needs only the rest."""
    options = {"shard_size": 500, "val_fraction": 0.5}
    source, total = corpus_of(LONG), sum(len(text) + 1 for text in LONG)
    source.estimate_text_bytes = lambda: total

    def try_with(folder, free):
        monkeypatch.setattr(shutil, "disk_usage", lambda path: types.SimpleNamespace(free=free))
        fineweb.make_shards(source, folder, tokenizer="bytes", **options)

    with pytest.raises(UserError, match=r"new has 0\.0 MB free, and about 0\.0 MB are needed to make the shards"):
        try_with(tmp_path / "new", 2 * 2 * total - 1)
    assert not (tmp_path / "new").exists()
    interrupt(LONG, tmp_path / "out", monkeypatch, 12, **options)  # while the two splits are written
    needed = 2 * 2 * total - sum(2 * len(np.load(path)) for path in (tmp_path / "out").glob("*.npy"))
    with pytest.raises(UserError, match="are needed"):
        try_with(tmp_path / "out", needed - 1)
    try_with(tmp_path / "out", needed)


def test_after_a_full_disk_the_same_command_resumes(tmp_path, monkeypatch):
    texts, write, number = ["word " * 100] * 9, shard_writer.write_shard, 3

    def write_to_full_disk(path, *options):
        with file_size_limit(100) if f"_{number:06d}" in path.name else contextlib.nullcontext():
            return write(path, *options)

    with monkeypatch.context() as patch:
        patch.setattr(shard_writer, "write_shard", write_to_full_disk)
        with pytest.raises(UserError, match=r"cannot write to .* \(File too large\)\. .*same command again to resume"):
            fineweb.make_shards(corpus_of(texts), tmp_path, tokenizer="bytes", shard_size=500)
    assert not shards.is_complete(tmp_path) and not list(tmp_path.glob("*partial*"))
    fineweb.make_shards(corpus_of(texts), tmp_path, tokenizer="bytes", shard_size=500)
    assert tokens_in(tmp_path) == plain_loop(texts, plain_bytes, 256, 500)
