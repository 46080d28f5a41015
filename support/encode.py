"""Batches of documents to arrays of tokens, in processes of their own."""

from __future__ import annotations

import base64
import functools
import importlib.util
import itertools
import os
import random
import signal
import tempfile
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import Any

import numpy as np

from support.cli import UserError
from support.corpus import Batch, safe_cut
from support.tokenizer import Tokenizer, get_tokenizer, utf8

ENGINES = ("gigatoken", "tiktoken")
CHECKED_SHARE = 128  # gigatoken: one character in so many is compared with tiktoken
CHECKED_CHARS = 1 << 14  # of one document at most
CACHE_CHARS = 1 << 28  # gigatoken remembers every word it has met; after so much text it starts anew
CACHE_BYTES = 100 << 20  # or, where the system tells how much memory this is, after so much


def default_engine() -> str:
    """gigatoken where it is installed."""
    return ENGINES[0] if importlib.util.find_spec("gigatoken") else ENGINES[1]


class Gigatoken:
    """GPT-2's encoding by gigatoken, compared with tiktoken in every batch.

    Raises:
        UserError: gigatoken is not there or does not work.
    """

    def __init__(self, reference: Tokenizer):
        self.reference = reference
        self._load()

    def _load(self) -> None:
        try:
            from gigatoken.gigatoken_rs import BPETokenizer
        except ImportError as error:
            raise UserError(f"gigatoken cannot be used ({error}). Choose --engine tiktoken.") from error

        # Its own loaders would make <|endoftext|> in a text special; here, nothing is.
        ranks = self.reference.ranks()
        descriptor, path = tempfile.mkstemp(suffix=".tiktoken")
        try:
            with open(descriptor, "wb") as file:
                file.writelines(b"%s %d\n" % (base64.b64encode(token), rank) for rank, token in enumerate(ranks))
            self._encoder = BPETokenizer.from_tiktoken(path, "gpt2")
        finally:
            os.unlink(path)
        self._chars, self._memory = 0, _resident_memory()

    def __call__(self, texts: list[str]) -> list[np.ndarray]:
        try:
            found = self._encode(texts)
        except (TypeError, UnicodeEncodeError):  # lone surrogates
            texts = [utf8(text).decode() for text in texts]
            found = self._encode(texts)
        self._compare(texts, found)
        self._chars += sum(map(len, texts))
        if self._chars > CACHE_CHARS or _resident_memory() - self._memory > CACHE_BYTES:
            self._load()
        return found

    def _encode(self, texts: list[str]) -> list[np.ndarray]:
        if not texts:
            return []
        layout = self._encoder.encode_batch(texts, parallel=False).layout
        ids, offsets = np.asarray(layout.content.data), np.asarray(layout.offsets)
        return [ids[start:end] for start, end in zip(offsets, offsets[1:], strict=False)]

    def _compare(self, texts: list[str], found: list[np.ndarray]) -> None:
        """Of two documents at least, and more in a large batch; chosen at random, the same ones in every run.

        Raises:
            UserError: gigatoken has encoded one of them otherwise than tiktoken.
        """
        budget = sum(map(len, texts)) / CHECKED_SHARE
        choice = random.Random(len(texts) + int(budget)).sample(range(len(texts)), min(len(texts), 64))
        for checked, i in enumerate(choice):
            if budget <= 0 and checked >= 2:
                return
            end = len(texts[i]) if len(texts[i]) <= CHECKED_CHARS else safe_cut(texts[i], 0, CHECKED_CHARS)
            end = end or len(texts[i])  # no blank to cut at
            budget -= end
            try:
                expected = self.reference.encode_array(texts[i][:end])
            except ValueError:  # tiktoken cannot, gigatoken can: a million tabs in a row, say
                continue
            if not np.array_equal(expected, found[i][: len(expected)] if end < len(texts[i]) else found[i]):
                raise UserError(
                    f"gigatoken and tiktoken disagree about the tokens of {texts[i][:60]!r}... Remove the "
                    "shards and make them with --engine tiktoken, and please report it to gigatoken."
                )


def _resident_memory() -> int:
    """Bytes of memory that this process has, where the system tells it easily; else 0."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return 0


@functools.cache
def _encoder(tokenizer: str, engine: str) -> Any:
    """A function of texts that returns their tokens, one array each."""
    reference = get_tokenizer(tokenizer)
    if tokenizer == "gpt2" and engine == "gigatoken":
        return Gigatoken(reference)
    return lambda texts: [reference.encode_array(text) for text in texts]


def encode(batch: Batch, tokenizer: str, engine: str) -> np.ndarray:
    """The tokens of a batch: uint16, each document after an end-of-text token.

    Raises:
        UserError: a document cannot be read or encoded.
    """
    texts = batch.texts()
    try:
        found = _encoder(tokenizer, engine)(texts)
    except BaseException as error:
        # A panic of Rust is no Exception here, and has no class that could be named.
        if not isinstance(error, ValueError) and type(error).__name__ != "PanicException":
            raise
        raise UserError(
            f"{engine} cannot encode a document of {batch}: {error}. Mend it (a million blanks in a row?) or leave it out."
        ) from None
    tokens = np.empty(sum(map(len, found)) + len(found), dtype=np.uint16)
    end, eot = 0, get_tokenizer(tokenizer).eot
    for ids in found:
        tokens[end] = eot
        tokens[end + 1 : end + 1 + len(ids)] = ids
        end += 1 + len(ids)
    return tokens[1:] if batch.continues else tokens


def _begin_worker() -> None:
    """Leaves Ctrl-C to the process that started this one, and ends when that is gone, even if it was killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def watch() -> None:
        parent_process().join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def encoded(batches: Iterable[Batch], tokenizer: str, engine: str, workers: int) -> Iterator[tuple[Batch, np.ndarray]]:
    """Each batch and its tokens, in order.

    More than one worker means that many processes; a single batch needs none. Only a few batches are under way at any
    time, so memory does not grow with the corpus.
    """
    batches = iter(batches)
    opening = list(itertools.islice(batches, 2))
    if workers == 1 or len(opening) < 2:
        for batch in itertools.chain(opening, batches):
            yield batch, encode(batch, tokenizer, engine)
        return
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=_begin_worker) as pool:
        under_way: deque = deque()

        def submit(batch: Batch) -> None:
            under_way.append((batch, pool.submit(encode, batch, tokenizer, engine)))

        def oldest() -> tuple[Batch, np.ndarray]:
            batch, future = under_way.popleft()
            return batch, future.result()

        try:
            for batch in itertools.chain(opening, batches):
                submit(batch)
                if len(under_way) > 2 * workers:
                    yield oldest()
            while under_way:
                yield oldest()
        except BrokenProcessPool as error:
            raise UserError(
                "a worker was killed, for its memory perhaps. Run it again with fewer --workers."
            ) from error
        finally:
            for _, future in under_way:
                future.cancel()
