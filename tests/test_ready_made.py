"""Ready-made shards of a data set, from a local server."""

import shutil
import types
from pathlib import Path

import numpy as np
import pytest
from hub_server import COMMIT, TEXTS, npy, running_hub
from shard_helpers import corpus_of, shards_in

import fineweb
from support.cli import UserError
from support.data import shards


@pytest.fixture
def server(monkeypatch, tmp_path):
    with running_hub(monkeypatch, tmp_path) as server:
        yield server


@pytest.fixture
def published(server):
    """The shards of the data set someone/shards."""
    files = {f"edufineweb_train_{i:06d}.npy": npy(range(50256 - i, 50257)) for i in (1, 2, 3)}
    files |= {"edufineweb_val_000000.npy": npy([50256, 5, 50256])}
    server.repositories["someone/shards"] = {"README.md": b"", **files}
    return files


def files_in(folder):
    return {path.name: path.read_bytes() for path in Path(folder).glob("*.npy")}


def test_ready_made_shards_are_downloaded(server, published):
    server.failures += ["cut off", 500]
    fineweb.main(["--shards-from", "someone/shards", "--output", "out"])
    assert files_in("out") == published
    manifest = shards.read_manifest("out")
    expected = ("gpt2", COMMIT, "shards of someone/shards")
    assert (manifest["tokenizer"], manifest["revision"], manifest["source"]) == expected
    assert [(s["file"][11:-4], s["tokens"], s["documents"]) for s in manifest["shards"]] == [
        ("val_000000", 3, 2), ("train_000001", 2, 1), ("train_000002", 3, 1), ("train_000003", 4, 1),
    ]  # fmt: skip
    assert len(shards.verify_shards("out")) == 4
    server.requests.clear()
    fineweb.main(["--shards-from", "someone/shards", "--output", "out"])
    assert not server.requests


def test_max_tokens_limits_the_ready_made_shards(server, published):
    fineweb.main(["--shards-from", "someone/shards", "--output", "out", "--max-tokens", "4"])
    assert [s["file"][11:-4] for s in shards.read_manifest("out")["shards"]] == ["val_000000", "train_000001"]


def test_an_interrupted_download_of_shards_resumes(server, published):
    server.failures += [None, None, "cut off"] + [404]
    with pytest.raises(UserError, match="answered 404"):
        fineweb.main(["--shards-from", "someone/shards", "--output", "out"])
    server.requests.clear()
    fineweb.main(["--shards-from", "someone/shards", "--output", "out"])
    assert files_in("out") == published
    assert [path for path, _ in server.requests] == ["edufineweb_train_000002.npy", "edufineweb_train_000003.npy"]
    assert server.requests[0][1]  # only the rest of it


def test_a_disk_that_is_too_small_for_the_shards(server, published, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: types.SimpleNamespace(free=300))
    with pytest.raises(UserError, match="out has 0.0 MB free, and about 0.0 MB are needed to download the shards"):
        fineweb.main(["--shards-from", "someone/shards", "--output", "out"])
    assert not server.requests and not Path("out").exists()


def test_shards_that_we_published_keep_their_tokenizer(server):
    fineweb.make_shards(corpus_of(TEXTS), "ours", tokenizer="bytes", shard_size=9000)
    files = {f"deep/er/{path.name}": path.read_bytes() for path in Path("ours").iterdir() if path.suffix}
    server.repositories["someone/ours"] = files
    fineweb.main(["--shards-from", "someone/ours", "--output", "out"])
    assert shards_in(Path("out")) == shards_in(Path("ours")) and shards.read_manifest("out")["tokenizer"] == "bytes"
    with pytest.raises(UserError, match="the manifest of someone/ours says bytes tokens. Leave out --tokenizer"):
        fineweb.main(["--shards-from", "someone/ours", "--output", "again", "--tokenizer", "gpt2"])
    half = {path: body for path, body in files.items() if not path.endswith("_000002.npy")}
    other = {path: body[:-1] + b"!" if path.endswith("_000002.npy") else body for path, body in files.items()}
    for name, wrong in (("someone/half", half), ("someone/other", other)):
        server.repositories[name] = wrong
        with pytest.raises(UserError, match=r"does not have texts_train_000002\.npy as its manifest lists it"):
            fineweb.main(["--shards-from", name, "--output", "wrong"])
        assert not Path("wrong").exists()


@pytest.mark.parametrize(
    "files, message",
    [
        (
            {"a.bin": b"", "b.txt": b""},
            r"has no shards such as name_train_000001.npy, but files of the types .bin, .txt",
        ),
        (
            {"a/x_train_000001.npy": b"", "b/x_train_000001.npy": b""},
            "in several folders. Choose one with --name: a, b",
        ),
        (
            {"x_train_000001.npy": npy([1, 2], np.uint32)},
            "holds 1-dimensional uint32, not .* someone/bad publishes it like this",
        ),
        ({"x_train_000001.npy": npy([1, 50257])}, "has the id 50257 at offset 1, beyond the vocabulary .* like this"),
        ({"x_train_000001.npy": b"text"}, "is not a readable .npy file .* like this"),
        ({"x_train_000001.npy": npy([1]), "manifest.json": b"[]"}, "is not a manifest of shards"),
    ],
)
def test_bad_ready_made_shards(server, files, message):
    server.repositories["someone/bad"] = files
    with pytest.raises(UserError, match=message):
        fineweb.main(["--shards-from", "someone/bad", "--output", "out"])
    assert not list(Path().glob("out/*.npy"))
