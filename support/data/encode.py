"""Batches of documents to arrays of tokens, in worker processes."""

from __future__ import annotations

import base64
import bisect
import contextlib
import functools
import hashlib
import importlib.util
import itertools
import multiprocessing
import os
import random
import signal
import tempfile
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing import parent_process, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from queue import SimpleQueue
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from support import files
from support.cli import UserError
from support.data.corpus import Batch, Cursor, safe_cut
from support.data.tokenizer import Gpt2Tokenizer, TokenIds, get_tokenizer, to_utf8

ENGINES = ("gigatoken", "tiktoken")
COMPARED_FRACTION = 1 / 128  # of gigatoken's documents, encoded by tiktoken too
MAX_COMPARED_CHARS = 1 << 14  # of one document
# gigatoken caches every word that it has encoded. It is reloaded after this many characters or, on Linux, when the
# process has grown by this many bytes.
MAX_CACHED_CHARS = 1 << 28
MAX_CACHE_BYTES = 100 << 20
SPAWN = multiprocessing.get_context("spawn")

EncodedBatch: TypeAlias = tuple[Batch, npt.NDArray[np.uint16]]
Encoder: TypeAlias = Callable[[list[str]], list[TokenIds]]


def default_engine() -> str:
    """gigatoken if it is installed."""
    return "gigatoken" if importlib.util.find_spec("gigatoken") else "tiktoken"


class GigatokenEncoder:
    """GPT-2's encoding by gigatoken, of which samples of every batch are compared with tiktoken's.

    Raises:
        UserError: gigatoken is not installed or does not work.
    """

    def __init__(self, reference: Gpt2Tokenizer):
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
        self._cached_chars, self._memory_after_load = 0, _resident_memory()

    def __call__(self, texts: list[str]) -> list[TokenIds]:
        try:
            encoded = self._encode(texts)
        except (TypeError, UnicodeEncodeError):  # lone surrogates
            texts = [to_utf8(text).decode() for text in texts]
            encoded = self._encode(texts)
        self._compare_sample(texts, encoded)
        self._cached_chars += sum(map(len, texts))
        if self._cached_chars > MAX_CACHED_CHARS or _resident_memory() - self._memory_after_load > MAX_CACHE_BYTES:
            self._load()
        return encoded

    def _encode(self, texts: list[str]) -> list[TokenIds]:
        if not texts:
            return []
        layout = self._encoder.encode_batch(texts, parallel=False).layout
        ids, offsets = np.asarray(layout.content.data), np.asarray(layout.offsets)
        return [ids[start:end] for start, end in itertools.pairwise(offsets)]

    def _compare_sample(self, texts: list[str], encoded: list[TokenIds]) -> None:
        """Compares the beginnings of some documents, chosen at random, the same ones in every run.

        Raises:
            UserError: gigatoken's tokens differ from tiktoken's.
        """
        number = min(len(texts), max(2, int(len(texts) * COMPARED_FRACTION)))
        for i in random.Random(len(texts)).sample(range(len(texts)), number):
            length = len(texts[i])
            end = length if length <= MAX_COMPARED_CHARS else safe_cut(texts[i], 0, MAX_COMPARED_CHARS)
            end = end or length  # no space to cut at
            try:
                expected = self.reference.encode_array(texts[i][:end])
            except ValueError:  # tiktoken cannot encode a million tabs in a row; gigatoken can
                continue
            if not np.array_equal(expected, encoded[i] if end == length else encoded[i][: len(expected)]):
                raise UserError(
                    f"gigatoken and tiktoken disagree about the tokens of {texts[i][:60]!r}... Remove the "
                    "shards and make them with --engine tiktoken, and please report it to gigatoken."
                )


def _resident_memory() -> int:
    """Resident memory of this process in bytes, on Linux; elsewhere 0."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return 0


@functools.cache
def _load_encoder(tokenizer: str, engine: str) -> Encoder:
    reference = get_tokenizer(tokenizer)
    if isinstance(reference, Gpt2Tokenizer) and engine == "gigatoken":
        return GigatokenEncoder(reference)
    return lambda texts: [reference.encode_array(text) for text in texts]


def encode_batch(batch: Batch, tokenizer: str, engine: str) -> npt.NDArray[np.uint16]:
    """The tokens of a batch, with an end-of-text token before each document that starts in it.

    Raises:
        UserError: a document cannot be read or encoded.
    """
    texts = batch.texts()
    try:
        encoded = _load_encoder(tokenizer, engine)(texts)
    except BaseException as error:
        # A panic in Rust code is not an Exception, and its class cannot be imported.
        if not isinstance(error, ValueError) and type(error).__name__ != "PanicException":
            raise
        raise UserError(
            f"{engine} cannot encode a document of {batch.where}: {error}. "
            "Fix it (does it have a million spaces in a row?) or leave it out."
        ) from None
    tokens = np.empty(sum(map(len, encoded)) + len(encoded), dtype=np.uint16)
    end, eot = 0, get_tokenizer(tokenizer).eot
    for ids in encoded:
        tokens[end] = eot
        tokens[end + 1 : end + 1 + len(ids)] = ids
        end += 1 + len(ids)
    return tokens[1:] if batch.continues else tokens


# -----------------------------------------------------------------------------
# Encoded batches in a file, with another one that has cursor, number of tokens and SHA-256 of each

TOKEN = np.dtype("<u2")  # in the file


def write_batches(path: Path, batches: Iterable[EncodedBatch]) -> None:
    """Writes the tokens of batches to `path`, and their records next to it."""
    records = []
    with files.atomic_write(path, unique=True) as tmp, open(tmp, "wb") as file:
        for batch, tokens in batches:
            content = tokens.astype(TOKEN).tobytes()
            file.write(content)
            records.append((batch.cursor, len(tokens), hashlib.sha256(content).hexdigest()))
    files.write_json(path.with_suffix(".json"), records)


def read_batches(path: Path, first: int = 0) -> Iterator[EncodedBatch]:
    """The batches in a file, from one on, without their texts.

    Raises:
        UserError: the file is missing, or is not as it was written.
    """
    records = _records(path)
    corrupt = UserError(f"{path} is missing or corrupt. Run the same command again.")
    if records is None:
        raise corrupt
    with open(path, "rb") as file:
        file.seek(TOKEN.itemsize * sum(count for _, count, _ in records[:first]))
        for cursor, count, sha256 in records[first:]:
            content = file.read(TOKEN.itemsize * count)
            if hashlib.sha256(content).hexdigest() != sha256:
                raise corrupt
            yield Batch(texts=list, cursor=cursor, where=str(path)), np.frombuffer(content, TOKEN)


def is_intact(path: Path) -> bool:
    """Whether all batches are as they were written."""
    try:
        return all(len(tokens) >= 0 for _, tokens in read_batches(path))
    except UserError:
        return False


def num_tokens(path: Path) -> int | None:
    """The number of tokens in a file of batches; None if it is missing."""
    records = _records(path)
    return None if records is None else sum(count for _, count, _ in records)


def find_token(path: Path, offset: int) -> tuple[int, int]:
    """In which batch a token of a file is, and how many tokens of that batch come before it."""
    ends = list(itertools.accumulate((count for _, count, _ in _records(path) or []), initial=0))
    batch = bisect.bisect_right(ends, offset) - 1
    return batch, offset - ends[batch]


def _records(path: Path) -> list[tuple[Cursor, int, str]] | None:
    return files.read_json(path.with_suffix(".json")) if path.exists() else None


# -----------------------------------------------------------------------------
# Worker processes


def encode_batches(batches: Iterable[Batch], tokenizer: str, engine: str, workers: int) -> Iterator[EncodedBatch]:
    """Each batch with its tokens, in order.

    With one worker, or a single batch, this process encodes. At most `2 * workers + 1` batches are under way at any
    time, so memory does not grow with the corpus.

    Each worker has a pipe of its own, so that each end notices when the other is gone: if a worker dies, a UserError
    is raised, and if this process dies, the workers exit after their batch. (`ProcessPoolExecutor` of Python 3.11
    hangs after every fifth kill of a worker.)

    Raises:
        UserError: a document cannot be read or encoded, or a worker was killed.
    """
    batches = iter(batches)
    first_batches = list(itertools.islice(batches, workers))
    workers = len(first_batches)
    batches = itertools.chain(first_batches, batches)
    del first_batches  # they may take much memory
    if workers < 2:
        for batch in batches:
            yield batch, encode_batch(batch, tokenizer, engine)
        return
    processes: list[BaseProcess] = []
    idle: SimpleQueue[Connection] = SimpleQueue()  # the pipes to workers that have no batch

    def encode(batch: Batch) -> npt.NDArray[np.uint16]:
        connection = idle.get()
        try:
            with _report_lost_worker():
                connection.send(batch)
                result = connection.recv()
        finally:
            idle.put(connection)
        if isinstance(result, Exception):
            raise result
        return result

    threads = ThreadPoolExecutor(workers)  # each waits for a worker
    pending: deque[tuple[Batch, Future[npt.NDArray[np.uint16]]]] = deque()
    try:
        with _block_interrupts(), _report_lost_worker():
            for _ in range(workers):
                connection, other_end = SPAWN.Pipe()
                process: BaseProcess = SPAWN.Process(target=_serve, args=(other_end, tokenizer, engine), daemon=True)
                process.start()
                processes.append(process)
                other_end.close()
                idle.put(connection)
        for batch in batches:
            pending.append((batch, threads.submit(encode, batch)))
            if len(pending) > 2 * workers:
                first, future = pending.popleft()
                yield first, future.result()
        for first, future in pending:
            yield first, future.result()
    finally:  # also if nobody wants the rest
        for process in processes:
            process.kill()
        threads.shutdown(cancel_futures=True)
        for process in processes:
            process.join()


def run_processes(function: Callable[[int], None], numbers: Iterable[int], at_once: int) -> list[int]:
    """Calls a function in a process of its own for each number, some at a time; returns the exit codes."""
    processes: list[BaseProcess] = []

    def run(number: int) -> int:
        process: BaseProcess = SPAWN.Process(target=_run_alone, args=(function, number))
        process.start()
        processes.append(process)
        process.join()
        return process.exitcode or 0

    threads = ThreadPoolExecutor(at_once)  # each waits for a process
    try:
        return list(threads.map(run, numbers))
    finally:  # also after Ctrl-C
        threads.shutdown(wait=False, cancel_futures=True)
        for process in processes:
            process.kill()


def _run_alone(function: Callable[[int], None], number: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that waits for this one ends it
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        function(number)
    except UserError as error:
        raise SystemExit("\n".join(f"error: {problem}" for problem in error.problems)) from None


def _end_with_parent() -> None:
    """A process that is killed cannot end those that it started."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _serve(connection: Connection, tokenizer: str, engine: str) -> None:
    """Answers each batch with its tokens, or with an exception, until the other end of the connection is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(EOFError, OSError):
        while True:
            batch = connection.recv()
            result: npt.NDArray[np.uint16] | Exception
            try:
                result = encode_batch(batch, tokenizer, engine)
            except Exception as error:
                error.add_note(traceback.format_exc())
                result = error
            connection.send(result)


@contextlib.contextmanager
def _report_lost_worker() -> Iterator[None]:
    """Turns the errors of a worker that is gone, or that cannot be started, into a UserError."""
    try:
        yield
    except (EOFError, OSError) as error:
        raise UserError(
            "a worker was killed or could not start, perhaps for lack of memory. "
            "Run the command again with fewer --workers."
        ) from error


@contextlib.contextmanager
def _block_interrupts() -> Iterator[None]:
    """Delays Ctrl-C. Processes that are started meanwhile inherit that: they never end in their imports."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    resource_tracker.ensure_running()  # otherwise the first process starts it, which unblocks the signal
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
