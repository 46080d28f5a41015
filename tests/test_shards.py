"""Shards and manifests on disk: which files they are, and which are rejected."""

import errno
import hashlib
import io
import os
import subprocess
import sys

import numpy as np
import pytest
from helpers import ROOT
from shard_helpers import file_size_limit, write_shard

import fineweb
from support.cli import UserError
from support.data import output_folder, shards
from support.data.tokenizer import BytesTokenizer, get_tokenizer


def write_shards(folder, lengths, split="train"):
    for index, n in enumerate(lengths):
        write_shard(folder / shards.shard_name("count", split, index), np.arange(n, dtype=np.uint16))


def test_which_files_are_shards_of_a_split(tmp_path):
    names = "a_train_000002 a_val_000000 train_b_val_000001 a_train_000001 train a_train_1"
    for name in names.split():
        (tmp_path / f"{name}.npy").touch()
    (tmp_path / "a_train_000003.npy").mkdir()
    assert [p.name for p in shards.shard_paths(tmp_path, "train")] == ["a_train_000001.npy", "a_train_000002.npy"]
    assert [p.name for p in shards.shard_paths(tmp_path, "val")] == ["a_val_000000.npy", "train_b_val_000001.npy"]
    assert shards.shard_paths(tmp_path / "nowhere", "val") == []


def test_a_shard_is_the_file_that_numpy_saves(tmp_path):
    """Of a contiguous array, a slice of one, and a slice of a memory-mapped shard."""
    array = np.arange(1000, dtype=np.uint16)
    np.save(tmp_path / "whole.npy", array)
    mapped = np.load(tmp_path / "whole.npy", mmap_mode="r")
    for tokens in (array, array[17:60], mapped[17:60]):
        expected = io.BytesIO()
        np.save(expected, np.array(tokens))
        sha256 = write_shard(tmp_path / "x_train_000000.npy", tokens)
        content = (tmp_path / "x_train_000000.npy").read_bytes()
        assert content == expected.getvalue() and sha256 == hashlib.sha256(content).hexdigest()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["whole.npy", "x_train_000000.npy"]


def test_a_failed_write_says_why_and_leaves_nothing(tmp_path):
    with file_size_limit(5000), pytest.raises(OSError) as error:
        write_shard(tmp_path / "x_train_000000.npy", np.zeros(10_000, dtype=np.uint16))
    assert (error.value.errno, error.value.strerror) == (errno.EFBIG, os.strerror(errno.EFBIG))
    assert not list(tmp_path.iterdir())


def saved(array):
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


GOOD = np.arange(100, dtype=np.uint16)
BAD_SHARDS = {
    "truncated": saved(GOOD)[:-20],
    "text": b"hello",
    "empty": b"",
    "bad header": saved(GOOD).replace(b"(100,)", b"(((((("),
    "no tokens": saved(GOOD[:0]),
    "pickle": saved(np.array([{"a": 1}], dtype=object)),
    "int64": saved(GOOD.astype(np.int64)),
    "2-dimensional": saved(GOOD.reshape(10, 10)),
}


@pytest.mark.parametrize("content", BAD_SHARDS.values(), ids=BAD_SHARDS)
def test_a_bad_shard_among_good_ones_is_named(tmp_path, content):
    write_shards(tmp_path, (100, 100))
    (tmp_path / "count_train_000002.npy").write_bytes(content)
    with pytest.raises(UserError) as error:
        shards.open_shards(tmp_path, "train")
    [problem] = error.value.problems
    assert "count_train_000002.npy" in problem and problem.endswith(".")


GOOD_MANIFEST = {
    "tokenizer": "bytes",
    "vocab_size": 257,
    "complete": True,
    "shards": [{"file": "count_train_000000.npy", "split": "train", "tokens": 100}],
}


@pytest.mark.parametrize(
    "change",
    [
        {"tokenizer": ["bytes"]},
        {"tokenizer": "gpt5"},
        {"vocab_size": 5},
        {"shards": None},
        {"shards": [{"file": "x_train_000001.npy", "split": "train", "tokens": "9"}]},
        {"shards": [{"file": "x_train_000001.npy", "tokens": 9}]},
        {"shards": [{"file": "count_train_000000.npy", "split": "train", "tokens": 100, "documents": [1]}]},
        {"shards": [{"file": None, "split": "train", "tokens": 9}]},
        {"shards": [{"file": "../count_train_000000.npy", "split": "train", "tokens": 100}]},
        {"complete": "no"},
        {"source": 7},
    ],
)
def test_a_bad_manifest_is_rejected(tmp_path, change):
    write_shards(tmp_path, (100,))
    output_folder.write_manifest(tmp_path, GOOD_MANIFEST)
    assert len(shards.open_shards(tmp_path, "train")) == 1
    output_folder.write_manifest(tmp_path, GOOD_MANIFEST | change)
    with pytest.raises(UserError, match="manifest|not complete"):
        shards.open_shards(tmp_path, "train")


def test_a_shard_without_a_manifest_is_known_by_its_ends(tmp_path):
    """Checkpoints have these checksums, so later versions must compute the same ones: of 2^15 tokens at each end."""
    tokens = (np.arange(100_000) % 60_000).astype(np.uint16)
    write_shard(tmp_path / "x_train_000000.npy", tokens)
    data = shards.TokenData(str(tmp_path), shards.open_shards(tmp_path, "train"), [], BytesTokenizer())
    ends = hashlib.sha256(tokens.tobytes()[: 2 * 32_768] + tokens.tobytes()[-2 * 32_768 :]).hexdigest()
    assert shards.identify(data) == ([["x_train_000000.npy", 100_000, f"ends {ends}"]], [], None)


def test_shards_that_are_not_as_in_the_manifest_are_named(tmp_path):
    write_shards(tmp_path, (90, 100))
    (tmp_path / "count_train_000002.npy").write_bytes((tmp_path / "count_train_000001.npy").read_bytes())
    entries = [{"file": f"count_train_00000{i}.npy", "split": "train", "tokens": 100} for i in (0, 1, 3)]
    output_folder.write_manifest(tmp_path, GOOD_MANIFEST | {"shards": entries})
    with pytest.raises(UserError) as error:
        shards.open_shards(tmp_path, "train")
    shorter, unlisted, missing = error.value.problems
    assert "count_train_000000.npy does not match the manifest: it has 90 tokens" in shorter
    assert "count_train_000002.npy is not in the manifest" in unlisted
    assert "count_train_000003.npy is not a readable .npy file (No such file or directory)" in missing


MANY_SHARDS = """
import resource, sys
from support.cli import run_cli
from support.data import shards
from support.data.tokenizer import get_tokenizer

resource.setrlimit(resource.RLIMIT_NOFILE, (64, int(sys.argv[2])))
run_cli(lambda: print(len(shards.open_shards(sys.argv[1], "train")), len(shards.open_shards(sys.argv[1], "val"))))
"""


TOO_MANY = (
    "error: {} has 100 shards, more files than a process may open here. Raise the limit with ulimit -n 1124, or make "
    "larger shards: fineweb.py --shard-size 1e9.\n"
)


@pytest.mark.parametrize("hard_limit, output, error", [(256, "100 50\n", ""), (96, "", TOO_MANY)])
def test_more_shards_than_files_may_be_open(tmp_path, hard_limit, output, error):
    """A thousand shards are 100 billion tokens, and 1,024 open files the limit of most shells."""
    for number in range(150):
        np.save(tmp_path / shards.shard_name("x", "val" if number < 50 else "train", number), np.zeros(9, np.uint16))
    command = [sys.executable, "-c", MANY_SHARDS, str(tmp_path), str(hard_limit)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.returncode) == (output, 2 if error else 0), done.stderr
    assert done.stderr == error.format(tmp_path)


CHECK = """
import resource, sys
import fineweb

resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
fineweb.main(["--check", sys.argv[1]])
"""


def test_check_has_one_shard_open_at_a_time(tmp_path):
    """Those that stay mapped stay in memory, too."""
    for number in range(70):
        np.save(tmp_path / shards.shard_name("x", "train", number), np.zeros(9, np.uint16))
    command = [sys.executable, "-c", CHECK, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "70 shards, 630 tokens (gpt2), well-formed" in done.stdout, done.stderr


def test_check_names_a_shard_that_is_missing(tmp_path, capsys):
    """Shards of other tools have no manifest that lists them: a download may have been incomplete."""
    for number in (0, 1, 2, 4, 10**11):  # other tools may number as they like
        name = shards.shard_name("x", "train" if number else "val", number)
        np.save(tmp_path / name, np.zeros(9, np.uint16))
    fineweb.main(["--check", str(tmp_path)])
    assert "5 shards, 45 tokens (gpt2), well-formed, but number 000003 is missing" in capsys.readouterr().out


def test_tokens_are_read_while_the_file_has_them(tmp_path):
    path = tmp_path / "x_train_000001.npy"
    np.save(path, np.arange(10_000, dtype=np.uint16))
    shard = shards.load_shard(path)
    assert shards.read_tokens(shard, 9_990, 10, 10_000).tolist() == list(range(9_990, 10_000))
    with pytest.raises(UserError, match="has the id 9999 at offset 9999"):
        shards.read_tokens(shard, 9_990, 10, 9_999)
    os.truncate(path, 9_000)
    with pytest.raises(UserError, match="was truncated while it was in use"):
        shards.read_tokens(shard, 9_990, 10, 10_000)


@pytest.mark.parametrize(
    "files, message",
    [
        ([], r'no train shards in .*"python fineweb\.py".*"--demo"'),
        (["a.parquet", "b.md"], r"has text, not shards\. To train on a text, pass it with --text\."),
        (["deep/a.txt.gz"], "has text, not shards"),
        ([".gpt2.lock", "log.txt"], "no train shards in"),  # a run
        ([".hidden/a.txt", "a.csv"], "no train shards in"),
    ],
)
def test_without_shards_the_error_says_how_to_get_some(tmp_path, files, message):
    with pytest.raises(UserError, match=r'there is no folder .*"python fineweb\.py".*"--demo"'):
        shards.open_shards(tmp_path / "nowhere", "train")
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    with pytest.raises(UserError, match=message):
        shards.open_shards(tmp_path, "train")


# Of the bytes of a validation split, in which 256 begins a document, what its samples continue.
BEGINNINGS = {
    "a document": ("\0It was a dark and stormy night; the rain fell in torrents.", "It was a dark and stormy night; the rain"),
    "a line": ("f a sentence that began before.\n\nII\n\n  It  was a\tbright cold day in\r\nApril\n", "It was a bright cold day in"),
    "a word": ("f a sentence that goes on and on without a line break", "a sentence that goes on and on without a"),
    "an escape code": ("\0Many years later, \x1b[2Jas he faced\x07 the", "Many years later, [2Jas he faced the"),
    "Chinese": (b"\xb8\xad\n" + "\u3000\u3000很久很久以前,在一个遥远的地方住着一位年轻的国王和他的女儿。".encode(), "很久很久以前,在一个遥远"),
    "short lines": ("2 + 2 = 4\n3 + 13 = 16\n4 + 4 = 8\n", "3 + 13 = 16"),
    "no text": ("\0", ""),
}  # fmt: skip


@pytest.mark.parametrize("text, beginning", BEGINNINGS.values(), ids=BEGINNINGS)
def test_the_beginning_is_the_first_words_of_a_line_that_was_held_out(tmp_path, text, beginning):
    """A split may begin inside a line, a word or a character."""
    write_shards(tmp_path, [9])
    val = np.frombuffer(text if isinstance(text, bytes) else text.encode(), dtype=np.uint8).astype(np.uint16)
    np.save(tmp_path / "count_val_000000.npy", np.where(val == 0, 256, val).astype(np.uint16))
    train, val = shards.open_shards(tmp_path, "train"), shards.open_shards(tmp_path, "val")
    assert shards.TokenData(str(tmp_path), train, val, get_tokenizer("bytes")).beginning == beginning
