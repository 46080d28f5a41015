"""Encodes text as tokens, with gigatoken or tiktoken."""

from __future__ import annotations

import base64
import importlib.util
import os
import random
import tempfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from support.cli import UserError
from support.data.shards import TOKEN
from support.data.text_files import Piece, find_last_safe_cut
from support.data.tokenizer import TokenIds, Tokenizer, to_utf8

ENGINES = ("gigatoken", "tiktoken")
BATCH_CHARS = 1 << 22  # characters that are encoded at a time
COMPARED_FRACTION = 1 / 128  # fraction of the documents that tiktoken also encodes, as a check
MAX_COMPARED_CHARS = 1 << 14  # characters of a document that are compared
# gigatoken caches every word that it encodes. It is reloaded after this many characters or, on Linux, when the process
# has grown by this many bytes.
MAX_CACHED_CHARS = 1 << 28
MAX_CACHE_BYTES = 200 << 20

Encoded: TypeAlias = tuple[TokenIds, npt.NDArray[np.integer]]
"""The ids of n texts in one array, and the n + 1 offsets at which the ids of each text begin and end."""
Encoder: TypeAlias = Callable[[list[str]], Encoded]


def default_engine() -> str:
    """Returns "gigatoken" if it is installed, otherwise "tiktoken"."""
    return "gigatoken" if importlib.util.find_spec("gigatoken") else "tiktoken"


def usable_cores() -> int:
    """Returns the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def get_encoder(tokenizer: Tokenizer, engine: str, threads: int) -> Encoder:
    """Returns the encoder of a tokenizer. The engine and the number of threads do not change the tokens.

    Raises:
        UserError: gigatoken is chosen, but is not installed or does not work.
    """
    if tokenizer.is_gpt2 and engine == "gigatoken":
        os.environ["RAYON_NUM_THREADS"] = str(threads)  # its threads start with its first batch
        return GigatokenEncoder(tokenizer)
    pool = ThreadPoolExecutor(threads) if tokenizer.name != "bytes" else None  # tiktoken releases the GIL

    def encode(texts: list[str]) -> Encoded:
        ids = list((pool.map if pool else map)(tokenizer.encode_array, texts))
        return np.concatenate([np.empty(0, np.uint16), *ids], dtype=np.uint16), np.cumsum([0, *map(len, ids)])

    return encode


class GigatokenEncoder:
    """Encodes with gigatoken, and checks a sample of every batch against tiktoken.

    Raises:
        UserError: gigatoken is not installed or does not work.
    """

    def __init__(self, reference: Tokenizer):
        self.reference = reference
        self._load()

    def _load(self) -> None:
        try:
            from gigatoken.gigatoken_rs import BPETokenizer
        except ImportError as error:
            raise UserError(f"gigatoken cannot be used ({error}). Choose --engine tiktoken.") from error

        # Its other loaders would treat <|endoftext|> in a document as the special token.
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            lines = [b"%s %d\n" % (base64.b64encode(t), rank) for rank, t in enumerate(self.reference.token_bytes())]
            (folder / "gpt2.tiktoken").write_bytes(b"".join(lines))
            self._encoder = BPETokenizer.from_tiktoken(str(folder / "gpt2.tiktoken"), "gpt2")
        self._cached_chars, self._memory_after_load = 0, _private_memory()

    def __call__(self, texts: list[str]) -> Encoded:
        if self._cached_chars > MAX_CACHED_CHARS or _private_memory() - self._memory_after_load > MAX_CACHE_BYTES:
            self._load()
        self._cached_chars += sum(map(len, texts))
        try:
            layout = self._encoder.encode_batch(texts, parallel=True).layout
        except (TypeError, UnicodeEncodeError):  # lone surrogates
            texts = [to_utf8(text).decode() for text in texts]
            layout = self._encoder.encode_batch(texts, parallel=True).layout
        ids, offsets = np.asarray(layout.content.data), np.asarray(layout.offsets)
        self._compare_sample(texts, ids, offsets)
        return ids, offsets

    def _compare_sample(self, texts: list[str], ids: TokenIds, offsets: npt.NDArray[np.integer]) -> None:
        """Compares the beginnings of some random documents with tiktoken's tokens. Every run chooses the same documents.

        Raises:
            UserError: gigatoken's tokens differ from tiktoken's.
        """
        number = min(len(texts), max(2, int(len(texts) * COMPARED_FRACTION)))
        for i in random.Random(len(texts)).sample(range(len(texts)), number):
            text, encoded = texts[i], ids[offsets[i] : offsets[i + 1]]
            if len(text) > MAX_COMPARED_CHARS:
                beginning = text[:MAX_COMPARED_CHARS].encode()
                text = beginning[: find_last_safe_cut(beginning)].decode() or text
            try:
                expected = self.reference.encode_array(text)
            except ValueError:  # tiktoken cannot encode a million tabs in a row; gigatoken can
                continue
            if text is not texts[i]:
                encoded = encoded[: len(expected)]
            if not np.array_equal(expected, encoded):
                raise UserError(
                    f"gigatoken and tiktoken disagree about the tokens of {texts[i][:60]!r}... Remove the "
                    "shards and make them again with --engine tiktoken, and please report this to gigatoken's authors."
                )


def _private_memory() -> int:
    """Returns the private memory of this process in bytes; 0 except on Linux."""
    try:
        _, resident, shared, *_ = map(int, Path("/proc/self/statm").read_text().split())
        return (resident - shared) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return 0


def batches_of(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Groups pieces into batches of about BATCH_CHARS characters."""
    batch: list[Piece] = []
    room = BATCH_CHARS
    for text, starts_document in pieces:
        batch.append((text, starts_document))
        room -= len(text)
        if room <= 0:
            yield batch
            batch, room = [], BATCH_CHARS
    if batch:
        yield batch


def encode_pieces(pieces: Iterable[Piece], encode: Encoder, eot: int) -> Iterator[npt.NDArray[np.uint16]]:
    """Yields the tokens of all documents, each after an end-of-text. A batch is encoded while the next one is read."""

    def encode_batch(batch: list[Piece]) -> npt.NDArray[np.uint16]:
        ids, offsets = encode([text for text, _ in batch])
        starts = offsets[:-1][[starts_document for _, starts_document in batch]]
        return np.insert(ids, starts, eot).astype(TOKEN)

    with ThreadPoolExecutor(1) as thread:
        encoding: Future[npt.NDArray[np.uint16]] | None = None
        for batch in batches_of(pieces):
            following = thread.submit(encode_batch, batch)
            if encoding:
                yield encoding.result()
            encoding = following
        if encoding:
            yield encoding.result()
