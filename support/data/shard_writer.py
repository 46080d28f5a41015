"""A stream of tokens to shards: where it is cut, which shards are for validation, how an interrupted run resumes."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from support.cli import UserError
from support.data.corpus import Corpus, Cursor
from support.data.encode import EncodedBatch
from support.data.output_folder import OutputFolder
from support.data.shards import ShardEntry, load_shard, shard_name, write_shard
from support.files import check_free_space

VAL_FRACTION = 0.1  # of a corpus that fits into one shard
MAX_CUT_ERROR = 0.1  # of the validation tokens, before --split-documents cuts inside a document
CHARS_PER_TOKEN = 5  # of English with gpt2, a high estimate
PROGRESS_INTERVAL = 10  # seconds between lines, where the output is not a terminal

Tokens: TypeAlias = npt.NDArray[np.uint16]
StreamPosition: TypeAlias = tuple[Cursor | None, int]  # the cursor of a batch, and a number of tokens from there
EncodeFrom: TypeAlias = Callable[[Cursor | None], Iterator[EncodedBatch]]  # the token stream from a cursor on


# -----------------------------------------------------------------------------
# Where a stream of tokens is cut


@dataclass(frozen=True)
class Chunk:
    """The tokens of one shard. The next chunk starts at `end`."""

    tokens: Tokens
    end: StreamPosition
    is_last: bool


def cut_into_chunks(batches: Iterable[EncodedBatch], size: int, skip: int, limit: int | None) -> Iterator[Chunk]:
    """Chunks of `size` tokens, the last one shorter, of a stream without its first `skip` tokens.

    With `limit`, only that many tokens are used.
    """
    end: StreamPosition = (None, 0)
    buffer, filled = np.empty(size, dtype=np.uint16), 0
    for batch, tokens in batches:
        start = min(skip, len(tokens))
        skip -= start
        stop = len(tokens) if limit is None else min(len(tokens), start + limit)
        while start < stop:
            if filled == size:  # more tokens follow, so this chunk is not the last
                yield Chunk(buffer, end, is_last=False)
                buffer, filled = np.empty(size, dtype=np.uint16), 0
            part = tokens[start : min(stop, start + size - filled)]
            buffer[filled : filled + len(part)] = part
            filled, start = filled + len(part), start + len(part)
            limit = limit and limit - len(part)
            end = (batch.cursor, start)
        if limit == 0:
            break
    if filled:
        yield Chunk(buffer[:filled], end, is_last=True)


@dataclass(frozen=True)
class ShardRange:
    """A shard that will have the tokens [start, end) of the corpus."""

    split: str
    index: int
    start: int
    end: int


def split_into_shards(split_point: int, total: int, shard_size: int) -> list[ShardRange]:
    """Shards for training up to a token of the corpus, for validation from there; the validation shards come first."""

    def cut(split: str, first_index: int, start: int, end: int) -> list[ShardRange]:
        starts = enumerate(range(start, end, shard_size), start=first_index)
        return [ShardRange(split, index, start, min(start + shard_size, end)) for index, start in starts]

    val = cut("val", 0, split_point, total)
    return [*cut("train", len(val), 0, split_point), *val]


def val_split_point(parts: Sequence[Tokens], eot: int, fraction: float, split_documents: bool = False) -> int:
    """The token at which the validation split starts, the last `fraction` of a corpus.

    It is the start of the nearest document. If there is no other document, or with `split_documents` none that starts
    near, it is inside a text.
    """
    total = sum(map(len, parts))
    ideal = total - max(1, round(fraction * total))
    candidates, offset = [], 0
    for part in parts:
        starts = offset + np.flatnonzero(part == eot)
        starts = starts[starts > 0]
        if len(starts):
            candidates.append(int(starts[np.abs(starts - ideal).argmin()]))
        offset += len(part)
    nearest = min(candidates, key=lambda start: abs(start - ideal), default=max(1, ideal))
    is_far = abs(nearest - ideal) > MAX_CUT_ERROR * (total - ideal)
    return max(1, ideal) if split_documents and is_far else nearest


# -----------------------------------------------------------------------------
# Writing shards


class ShardWriter:
    """Writes the shards of a corpus into a folder, each in a thread while the next one is filled."""

    def __init__(self, folder: OutputFolder, corpus: Corpus, shard_size: int):
        self.folder, self.corpus, self.shard_size = folder, corpus, shard_size
        self.eot = folder.manifest["vocab_size"] - 1
        self._pool = ThreadPoolExecutor(1)
        self._writing: Future[None] | None = None

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()

    def write_in_order(self, encode_from: EncodeFrom, max_tokens: int | None) -> None:
        """Writes shard 0 for validation and the others for training. A corpus of only one shard is split instead.

        Raises:
            UserError: the corpus has no text, or the shards cannot be written.
        """
        small_corpus = None
        finished = [entry for entry in self.folder.manifest["shards"] if "end" in entry]  # not those of a split
        with contextlib.closing(self._new_chunks(finished, encode_from, max_tokens)) as chunks:
            for index, chunk in chunks:
                if index == 0 and chunk.is_last:
                    small_corpus = chunk.tokens
                else:
                    self._write("train" if index else "val", index, chunk.tokens, chunk.end)
        if small_corpus is not None:
            self._write_split([small_corpus], VAL_FRACTION)
        self._wait()
        if not self.folder.manifest["shards"]:
            raise self._no_text()

    def write_with_split(self, encode_from: EncodeFrom, max_tokens: int | None, val_fraction: float) -> None:
        """Writes all tokens as parts, to count them, then the shards of the two splits.

        Raises:
            UserError: the corpus has too little text to be split, or the shards cannot be written.
        """
        manifest = self.folder.manifest
        if not manifest["unsplit_complete"]:
            with contextlib.closing(self._new_chunks(manifest["unsplit"], encode_from, max_tokens)) as chunks:
                for index, chunk in chunks:
                    self._write("unsplit", index, chunk.tokens, chunk.end)
            self._wait()
            self.folder.mark_unsplit_complete()
        parts = [load_shard(self.folder.directory / part["file"]) for part in manifest["unsplit"]]
        self._write_split(parts, val_fraction)
        self._wait()

    def _new_chunks(
        self, finished: list[ShardEntry], encode_from: EncodeFrom, max_tokens: int | None
    ) -> Generator[tuple[int, Chunk], None, None]:
        """The chunks after the finished shards, with their indices."""
        finished_tokens, number = sum(entry["tokens"] for entry in finished), len(finished)
        limit = None if max_tokens is None else max_tokens - finished_tokens
        if limit == 0:
            return
        cursor, skip = json.loads(finished[-1]["end"]) if finished else (None, 0)
        if finished:
            print(f"resuming after {number} finished shard{'s' if number > 1 else ''}, {finished_tokens:,} tokens")
        stream = show_progress(encode_from(cursor), finished_tokens, max_tokens)
        yield from enumerate(cut_into_chunks(stream, self.shard_size, skip, limit), start=number)

    def _write_split(self, parts: Sequence[Tokens], fraction: float) -> None:
        """Writes the shards of a corpus in parts of a shard's size, its last `fraction` for validation."""
        total = sum(map(len, parts))
        if total < 2:
            raise self._no_text()
        split_documents = bool(self.folder.manifest["settings"].get("split_documents"))
        split_point = val_split_point(parts, self.eot, fraction, split_documents)
        val_tokens = total - split_point
        print(f"the last {val_tokens / total:.1%} of the text, {val_tokens:,} tokens, is held out for validation")
        if val_tokens > 2 * max(1, fraction * total):
            print(
                f"note: that is more than {fraction:.0%} because the last document is long. Split it with "
                "--split-documents, or divide the text into more documents with --document-separator."
            )
        for shard in split_into_shards(split_point, total, self.shard_size)[len(self.folder.manifest["shards"]) :]:
            part, offset = divmod(shard.start, self.shard_size)
            size = shard.end - shard.start
            tokens = parts[part][offset : offset + size]
            if len(tokens) < size:  # the rest is in the next part
                tokens = np.concatenate([tokens, parts[part + 1][: size - len(tokens)]])
            self._write(shard.split, shard.index, tokens)

    def _write(self, split: str, index: int, tokens: Tokens, end: StreamPosition | None = None) -> None:
        """Starts to write a shard when the one before is written; `end` is where a later run resumes after it."""
        self._wait()
        self._writing = self._pool.submit(self._write_now, split, index, tokens, end)

    def _write_now(self, split: str, index: int, tokens: Tokens, end: StreamPosition | None) -> None:
        path = self.folder.directory / shard_name(self.corpus.prefix, split, index)
        entry: ShardEntry = {
            "file": path.name,
            "split": split,
            "tokens": len(tokens),
            "documents": int(np.count_nonzero(tokens == self.eot)),
            "sha256": write_shard(path, tokens),
        }
        if end is not None:
            entry["end"] = json.dumps(end)  # as a string it takes one line of the manifest, not ten
        self.folder.add(entry)
        if end is not None and end[0] is not None:
            self.corpus.release(end[0])

    def _wait(self) -> None:
        """Returns when the shard is written.

        Raises:
            UserError: it cannot be written.
        """
        if self._writing is None:
            return
        try:
            self._writing.result()
        except OSError as error:
            finished = len(self.folder.finished_shards)
            raise UserError(
                f"cannot write to {self.folder.directory} ({error.strerror}). {finished} {'shard is' if finished == 1 else 'shards are'} finished: "
                "fix this, then run the same command again to resume."
            ) from error

    def _no_text(self) -> UserError:
        return UserError(f"there is no text in {self.corpus.name}. Use other files, or another data set.")


def show_progress(
    stream: Iterable[EncodedBatch], finished_tokens: int, max_tokens: int | None
) -> Iterator[EncodedBatch]:
    """Yields the batches of a stream, and shows tokens, tokens per second and the time left.

    That is a bar on a terminal, otherwise a line now and then.
    """
    from tqdm import tqdm

    style: dict[str, Any] = {"unit": " tokens", "unit_scale": True, "initial": finished_tokens}
    so_far, total = finished_tokens, max_tokens
    start = last_line = time.monotonic()
    # At first there would only be zeros and question marks.
    with tqdm(desc="tokenising", total=total, smoothing=0.05, leave=False, delay=1, disable=None, **style) as bar:
        for batch, tokens in stream:
            so_far += len(tokens)
            if batch.fraction_read:
                bar.total = total = int(min(so_far / batch.fraction_read, max_tokens or float("inf")))
            bar.update(len(tokens))
            now = time.monotonic()
            if bar.disable and now - last_line > PROGRESS_INTERVAL:
                last_line = now
                print(bar.format_meter(so_far, total or 0, now - start, prefix="tokenising", **style), flush=True)
            yield batch, tokens


# -----------------------------------------------------------------------------
# Free space and interrupts


def check_space_for_shards(folder: OutputFolder, corpus: Corpus, max_tokens: int | None, copies: int) -> None:
    """Compares the free space with an estimate of what the shards still need, if there is one.

    Args:
        copies: how often each token is on the disk, 2 while a corpus in parts is split.

    Raises:
        UserError: there is clearly not enough.
    """
    text_bytes = corpus.estimate_text_bytes()
    total_tokens = float("inf") if max_tokens is None else max_tokens
    if text_bytes is not None:
        bytes_per_token = {"bytes": 1, "bpe": 2}.get(folder.manifest["tokenizer"], CHARS_PER_TOKEN)
        total_tokens = min(total_tokens, text_bytes / bytes_per_token)
    if total_tokens < float("inf"):
        finished_tokens = sum(entry["tokens"] for entry in folder.finished_shards)
        check_free_space(folder.directory, 2 * (copies * total_tokens - finished_tokens), "make the shards")


@contextlib.contextmanager
def report_interrupt(folder: OutputFolder) -> Iterator[None]:
    """Says on Ctrl-C how to resume."""
    try:
        yield
    except KeyboardInterrupt:
        finished = len(folder.finished_shards)
        print(f"\nstopped: the same command resumes after {finished} finished shards", file=sys.stderr, end="")
        raise
