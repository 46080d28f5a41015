"""A stream of tokens to shards: where it is cut, which shards are for validation, how an interrupted run resumes."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from support.cli import UserError
from support.data.corpus import Corpus, Cursor
from support.data.encode import EncodedBatch
from support.data.output_folder import OutputFolder
from support.data.shards import PARTS, Manifest, ShardEntry, load_shard, shard_name, write_shard
from support.files import check_free_space

VAL_FRACTION = 0.1  # of a corpus that fits into one shard
MAX_CUT_ERROR = 0.1  # of the validation tokens, before --split-documents cuts inside a document
CHARS_PER_TOKEN = 5  # of English with gpt2, a high estimate

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


def split_corpus(
    parts: Sequence[Tokens], size: int, fraction: float, manifest: Manifest
) -> list[tuple[str, int, int, int]]:
    """The shards of a corpus in parts, its last `fraction` for validation: (split, index, start, stop) in tokens.

    Empty for a corpus that is too short.
    """
    from tqdm import tqdm

    total = sum(map(len, parts))
    if total < 2:
        return []
    split_documents = bool(manifest["settings"].get("split_documents"))
    split_point = val_split_point(parts, manifest["vocab_size"] - 1, fraction, split_documents)
    val_tokens = total - split_point
    tqdm.write(f"the last {val_tokens / total:.1%} of the text, {val_tokens:,} tokens, is held out for validation")
    if val_tokens > 2 * max(1, fraction * total):
        tqdm.write(
            f"note: that is more than {fraction:.0%} because the last document is long. Split it with "
            "--split-documents, or divide the text into more documents with --document-separator."
        )
    train, val = range(0, split_point, size), range(split_point, total, size)
    shards = [("train", i, start, min(start + size, split_point)) for i, start in enumerate(train, start=len(val))]
    return shards + [("val", i, start, min(start + size, total)) for i, start in enumerate(val)]


def val_split_point(parts: Sequence[Tokens], eot: int, fraction: float, split_documents: bool = False) -> int:
    """The token at which the validation split starts, the last `fraction` of a corpus in parts.

    It is the start of the nearest document. If there is no other document, or with `split_documents` none that starts
    near, it is inside a text.
    """
    total = sum(map(len, parts))
    ideal = total - max(1, round(fraction * total))
    inside = max(1, ideal)
    starts = nearest_documents(parts, eot, inside)
    if not starts:
        return inside
    nearest = min(starts, key=lambda start: abs(start - ideal))
    is_far = abs(nearest - ideal) > MAX_CUT_ERROR * (total - ideal)
    return inside if split_documents and is_far else nearest


def nearest_documents(parts: Sequence[Tokens], eot: int, position: int) -> list[int]:
    """Where the last document before a position starts, unless it is the first of all, and the first one from it on."""
    offsets = [0, *itertools.accumulate(map(len, parts))]
    pairs = list(zip(offsets, parts, strict=False))
    before = (  # lazily, from the position outwards: a corpus may be larger than the memory
        offset + int(found[-1])
        for offset, part in reversed(pairs)
        if offset < position and len(found := np.flatnonzero(part[: position - offset] == eot))
    )
    after = (
        max(offset, position) + int(found[0])
        for offset, part in pairs
        if position < offset + len(part) and len(found := np.flatnonzero(part[max(0, position - offset) :] == eot))
    )
    return [start for start in (next(before, 0), next(after, 0)) if start]


# -----------------------------------------------------------------------------
# Writing shards


@dataclass(frozen=True)
class NewShard:
    """A shard to be written."""

    split: str
    index: int
    tokens: Tokens
    end: StreamPosition | None = None  # where a later run resumes after it


@dataclass(frozen=True)
class ShardWriter:
    """Writes the shards of a corpus into a folder.

    Attributes:
        encode_from: the tokens of the corpus from a cursor on.
        shard_size, max_tokens: numbers of tokens.
    """

    folder: OutputFolder
    corpus: Corpus
    encode_from: EncodeFrom
    shard_size: int
    max_tokens: int | None

    def write(self, val_fraction: float | None) -> None:
        """Writes shard 0 for validation and the others for training; a corpus of only one shard is split instead.

        With `val_fraction`, all tokens are written as parts first, to count them, then the shards of the two splits.

        Raises:
            UserError: the corpus has too little text to be split, or the shards cannot be written.
        """
        manifest = self.folder.manifest
        if val_fraction is None:
            self._write_all(self._in_order())
        else:
            if not manifest["unsplit_complete"]:
                chunks = self._chunks(manifest["unsplit"])
                self._write_all(NewShard("unsplit", index, chunk.tokens, chunk.end) for index, chunk in chunks)
                manifest["unsplit_complete"] = True
            parts = [load_shard(self.folder.directory / part["file"]) for part in manifest["unsplit"]]
            self._write_all(self._split(parts, val_fraction))
        if not manifest["shards"]:
            raise no_text(self.corpus)

    def _in_order(self) -> Generator[NewShard, None, None]:
        finished = [entry for entry in self.folder.manifest["shards"] if "end" in entry]  # not those of a split
        for index, chunk in self._chunks(finished):
            if index == 0 and chunk.is_last:
                yield from self._split([chunk.tokens], VAL_FRACTION)
            else:
                yield NewShard("train" if index else "val", index, chunk.tokens, chunk.end)

    def _chunks(self, finished: list[ShardEntry]) -> Iterator[tuple[int, Chunk]]:
        """The chunks after the finished shards, with their indices."""
        tokens, number = sum(entry["tokens"] for entry in finished), len(finished)
        cursor, skip = None, 0
        if finished:
            cursor, skip = json.loads(finished[-1]["end"])
            print(f"resuming after {number} finished shard{'s' if number > 1 else ''}, {tokens:,} tokens")
        limit = None if self.max_tokens is None else self.max_tokens - tokens
        stream = show_progress(self.encode_from(cursor), tokens, self.max_tokens)
        return enumerate(cut_into_chunks(stream, self.shard_size, skip, limit), start=number)

    def _split(self, parts: Sequence[Tokens], fraction: float) -> Generator[NewShard, None, None]:
        """The unfinished shards of a corpus in parts of a shard's size, its last `fraction` for validation."""
        manifest = self.folder.manifest
        shards = split_corpus(parts, self.shard_size, fraction, manifest)
        for split, index, start, stop in shards[len(manifest["shards"]) :]:
            part, offset = divmod(start, self.shard_size)
            tokens = parts[part][offset : offset + stop - start]
            if len(tokens) < stop - start:  # the rest is in the next part
                tokens = np.concatenate([tokens, parts[part + 1][: stop - start - len(tokens)]])
            yield NewShard(split, index, tokens)

    def _write_all(self, shards: Generator[NewShard, None, None]) -> None:
        """Writes shards, each in a thread while the next one is made."""
        writing: Future[None] | None = None
        with ThreadPoolExecutor(1) as thread, contextlib.closing(shards):
            for shard in shards:
                if writing is not None:
                    writing.result()
                writing = thread.submit(self._write, shard)
        if writing is not None:
            writing.result()

    def _write(self, shard: NewShard) -> None:
        from tqdm import tqdm

        eot = self.folder.manifest["vocab_size"] - 1
        with report_disk_errors(self.folder.directory):
            entry = write_new_shard(shard, self.folder.directory, self.corpus.prefix, eot)
            self.folder.add(entry)
        tqdm.write(f"{entry['file']}: {entry['tokens']:,} tokens")
        if shard.end is not None and shard.end[0] is not None:
            self.corpus.release(shard.end[0])


def write_new_shard(shard: NewShard, directory: Path, prefix: str, eot: int, unique: bool = False) -> ShardEntry:
    """Writes a shard into a folder; returns what its manifest says about it."""
    path = directory / shard_name(prefix, shard.split, shard.index)
    entry: ShardEntry = {
        "file": path.name,
        "split": shard.split,
        "tokens": len(shard.tokens),
        "documents": int(np.count_nonzero(shard.tokens == eot)),
        "sha256": write_shard(path, shard.tokens, unique),
    }
    if shard.end is not None:
        entry["end"] = json.dumps(shard.end)  # as a string it takes one line of the manifest, not ten
    return entry


@contextlib.contextmanager
def report_disk_errors(directory: Path) -> Iterator[None]:
    """Turns an error of the disk into a UserError."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"cannot write to {directory} ({error.strerror}). Fix this, then run the same command again to resume."
        ) from error


def check_unchanged(corpus: Corpus, directory: Path) -> None:
    """Raises a UserError if the files of a corpus are others than when it was opened."""
    if corpus.has_changed():
        raise UserError(f"{corpus.name} changed while it was read. Remove {directory} and run the command again.")


def no_text(corpus: Corpus) -> UserError:
    return UserError(f"there is no text in {corpus.name}. Use other files, or another data set.")


def show_progress(
    stream: Iterable[EncodedBatch], finished_tokens: int, max_tokens: int | None
) -> Iterator[EncodedBatch]:
    """Yields the batches of a stream, and shows tokens, tokens per second and the time left on a terminal."""
    from tqdm import tqdm

    style: dict[str, Any] = {"unit": " tokens", "unit_scale": True, "smoothing": 0.05, "leave": False, "disable": None}
    # At first there would only be zeros and question marks.
    with tqdm(desc="tokenising", total=max_tokens, initial=finished_tokens, delay=1, **style) as bar:
        for batch, tokens in stream:
            if batch.fraction_read:
                bar.total = min((bar.n + len(tokens)) / batch.fraction_read, max_tokens or math.inf)
            bar.update(len(tokens))
            yield batch, tokens


def check_space_for_shards(folder: OutputFolder, corpus: Corpus, max_tokens: int | None, copies: int) -> None:
    """Compares the free space with an estimate of what the shards still need, if there is one.

    Args:
        copies: how often each token is on the disk, 2 while a corpus in parts is split.

    Raises:
        UserError: there is clearly not enough.
    """
    bytes_per_token = {"bytes": 1, "bpe": 2}.get(folder.manifest["tokenizer"], CHARS_PER_TOKEN)
    total_tokens = min(max_tokens or math.inf, corpus.estimate_text_bytes() / bytes_per_token)
    finished_tokens = sum(entry["tokens"] for entry in folder.finished_shards)
    in_parts = sum(path.stat().st_size for path in folder.directory.glob(f"{PARTS}*/*"))
    check_free_space(folder.directory, 2 * (copies * total_tokens - finished_tokens) - in_parts, "make the shards")
