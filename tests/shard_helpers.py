"""What the tests of shards share: the plain loop as their reference, texts that are hard to encode, interruptions."""

from __future__ import annotations

import contextlib
import random
import re
import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from helpers import needs_gpt2_vocabulary

import fineweb
from support import files
from support.cli import UserError
from support.data import encode, output_folder
from support.data.text_files import Corpus, Documents

# empty, longer than several shards, the text of a special token, a lone surrogate, many scripts
ADVERSARIAL = [
    "", "a", "x" * 700, "", "one <|endoftext|> two", "half \ud83d of a pair", "naïve 日本語 🙂", "tail\n\n", "",
]  # fmt: skip
LONG = [f"text {i} " * 9 for i in range(60)]
WORDS = [
    "", "a", "it's", "naïve", "日本語", "🙂", "\ud83d", "\udc4d\ud83d", "<|endoftext|>", "x" * 90, "1234", "!?", "\u00a0", "\x1c",
]  # fmt: skip
SPACES = [" ", "  ", "\n", "\n\n ", "\t", "\r\n", "\u2003", " " * 70, ""]
ENGINES = [
    ("bytes", "tiktoken"),
    pytest.param("gpt2", "tiktoken", marks=needs_gpt2_vocabulary),
    pytest.param("gpt2", "gigatoken", marks=needs_gpt2_vocabulary),
]


def adversarial_texts(seed: int, n: int = 40) -> list[str]:
    """Random documents of these words and spaces: empty ones, long ones, ones without spaces."""
    rng = random.Random(seed)

    def document() -> str:
        return "".join(rng.choice(WORDS) + rng.choice(SPACES) for _ in range(rng.choice((0, 1, 3, 30, 200))))

    return [document() for _ in range(n)]


def valid_unicode(texts: Iterable[str]) -> list[str]:
    """The texts with "?" for each surrogate, so that a file can hold them."""
    return [text.encode("utf-8", "replace").decode() for text in texts]


def plain_loop(
    texts: Iterable[str], encode: Callable[[str], Sequence[int]], eot: int, shard_size: int
) -> list[list[int]]:
    """The tokens of all documents, with an end-of-text token before each, cut every `shard_size`."""
    stream: list[int] = []
    for text in texts:
        stream += [eot, *encode(text)]
    return [stream[i : i + shard_size] for i in range(0, len(stream), shard_size)]


def plain_bytes(text: str) -> list[int]:
    """UTF-8. A pair of surrogates is the character that it stands for, a lone one is U+FFFD."""
    joined = lambda m: chr(0x10000 + (ord(m[0][0]) - 0xD800) * 0x400 + ord(m[0][1]) - 0xDC00)  # noqa: E731
    text = re.sub("[\ud800-\udbff][\udc00-\udfff]", joined, text)
    return list("".join("\ufffd" if 0xD800 <= ord(c) < 0xE000 else c for c in text).encode())


def plain_encoder(tokenizer: str) -> tuple[Callable[[str], list[int]], int]:
    """The reference encoder of a tokenizer, and its end-of-text token."""
    if tokenizer == "bytes":
        return plain_bytes, 256
    import tiktoken

    encoding = tiktoken.get_encoding("gpt2")
    return encoding.encode_ordinary, encoding.eot_token


def shards_in(folder: Path) -> list[tuple[str, int, list[int]]]:
    """Split, index and tokens of the shards in a folder, in order of their indices."""
    return [
        (path.name.split("_")[-2], int(path.stem.split("_")[-1]), np.load(path).tolist())
        for path in sorted(folder.glob("*.npy"), key=lambda path: path.name.split("_")[-1])
    ]


def files_in(folder: Path) -> dict[str, bytes]:
    """The content of all files in a folder, except its lock."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != files.LOCK}


def tokens_in(folder: str | Path) -> list[list[int]]:
    return [tokens for _, _, tokens in shards_in(Path(folder))]


def split_sizes(folder: Path) -> list[tuple[str, int]]:
    return [(split, len(tokens)) for split, _, tokens in shards_in(folder)]


def write_shard(path: Path, tokens: np.ndarray) -> str:
    """Writes a shard; returns its SHA-256."""
    return output_folder.write_tokens(path, [tokens], 0, shard_size=len(tokens))["sha256"]


def flip_bit(path: Path) -> None:
    """Makes the last token of a shard another one."""
    content = bytearray(path.read_bytes())
    content[-2] ^= 1
    path.write_bytes(content)


def corpus_of(texts: list[str]) -> Documents:
    return Documents("texts", texts)


def documents_of(corpus: Corpus) -> list[str]:
    """The documents of a corpus, with the pieces of long ones joined."""
    documents: list[str] = []
    for part in corpus.parts():
        for text, starts_document in corpus.read(part):
            if starts_document:
                documents.append(text)
            else:
                documents[-1] += text
    return documents


def set_batch_chars(monkeypatch: pytest.MonkeyPatch, chars: int) -> None:
    """Makes batches small."""
    monkeypatch.setattr(encode, "BATCH_CHARS", chars)


@contextlib.contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """No file may grow beyond this size; skips the test on Windows, which has no such limit."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextlib.contextmanager
def small_disk(folder: Path, size: int) -> Iterator[Path]:
    """A disk of this size, mounted at a folder; skips the test where that is not allowed."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    if not shutil.which("mount") or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("mounting a disk takes more rights")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def interrupt(texts: list[str], out: Path, monkeypatch: pytest.MonkeyPatch, after: int, **options: object) -> None:
    """Runs until `after` shards are written; the disk fails while the next one is."""
    atomic_write, written = files.atomic_write, []

    def fail_after(path, **options):
        written.extend([path] if path.suffix == ".npy" else [])
        if len(written) > after:
            raise OSError(5, "broken")
        return atomic_write(path, **options)

    with monkeypatch.context() as patch:
        patch.setattr(files, "atomic_write", fail_after)
        with pytest.raises(UserError, match="broken"):
            fineweb.make_shards(corpus_of(texts), out, tokenizer="bytes", **options)
