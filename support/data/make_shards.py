"""Makes shards from text.

Each part of a corpus is encoded into a file, unless that file exists. Shards are cut from these files in order. Parts
and shards are either complete or absent, and depend only on the corpus and the settings. So a command that was killed
can be run again, and any number of processes can encode parts.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from support.cli import UserError, describe_error, print_lines
from support.data import bpe
from support.data.encode import Encoder, default_engine, encode_pieces, get_encoder
from support.data.output_folder import (
    ALL_PARTS,
    OutputFolder,
    new_manifest,
    open_output_folder,
    write_manifest,
    write_tokens,
)
from support.data.shards import TOKEN, Manifest, TokenFile, shard_name
from support.data.text_files import Corpus, Documents, Part, Piece, Setting
from support.data.tokenizer import END_OF_TEXT, TOKENIZER_JSON, Tokenizer, find_tokenizer, get_tokenizer
from support.files import atomic_write, check_free_space, read_json, sha256_of, write_json

SHARD_SIZE = 10**8  # tokens
VAL_FRACTION = 0.1  # held out from a corpus that fits into one shard
LARGE_VAL_FRACTION = 0.25  # from which on a note says that more could be trained on
MAX_CUT_ERROR = 0.1  # fraction of the validation tokens; beyond it, --split-documents cuts inside a document
MAX_BYTES_PER_TOKEN = {"gpt2": 5, "bpe": 5, "bytes": 1}  # upper bounds on the average bytes of text per token
BLOCK = 1 << 23  # tokens that are read at a time

Tokens: TypeAlias = npt.NDArray[np.uint16]
Slice: TypeAlias = tuple[Path, int, int]  # a part's file, the offset of the first token, and the number of tokens
Shard: TypeAlias = tuple[str, int, int, int]  # split, index, and where it starts and stops in the tokens of the corpus


def make_shards(
    corpus: Corpus,
    output: str | os.PathLike[str],
    *,
    tokenizer: str = "gpt2",
    vocab_size: int | None = None,
    largest_vocab_size: int | None = None,
    tokenizer_from: Path | None = None,
    engine: str | None = None,
    shard_size: int = SHARD_SIZE,
    max_tokens: int | None = None,
    val_fraction: float | None = None,
    split_documents: bool = False,
    threads: int = 1,
    only_parts: tuple[int, int] | None = None,
    flag: str = "--output",
    report: Callable[[str], None] = print_lines,
) -> Manifest:
    """Writes the shards of a corpus and their manifest into the folder `output`; returns the manifest.

    Parts and shards that an earlier call with the same arguments has finished are kept.

    Args:
        tokenizer: "gpt2", "bytes", or "bpe", which is trained on the corpus.
        vocab_size: the maximum vocabulary size of "bpe" (default: one that fits the amount of text).
        largest_vocab_size: the limit of that default.
        tokenizer_from: a folder with a `tokenizer.json`: for "bpe" to use instead of a new one, or for "gpt2" to read.
        engine: "gigatoken" or "tiktoken" (default: gigatoken if it is installed). The shards do not depend on it.
        shard_size, max_tokens: tokens per shard, and the maximum number of tokens in total.
        val_fraction: fraction of the corpus, at its end, for validation (default: shard 0, or a tenth of a corpus
            that fits into one shard).
        split_documents: let the validation split start inside a document if none starts nearby.
        threads: number of threads that encode. The shards do not depend on it.
        only_parts: (k, n) encodes only parts k, k + n, k + 2n, ..., counted from 1, and writes no shards; (0, n) encodes
            no part. Several processes may do that at once.
        flag: the flag that names the folder, for messages.
        report: is told what was done, line by line.

    Raises:
        OtherShardsError: the folder has shards from a different source or with different settings.
        UserError: it has shards from another tool, is in use or cannot be written; the disk is too small; or the corpus
            cannot be read, has changed, or has no text.
    """
    settings: dict[str, Setting] = {
        "shard_size": shard_size,
        "max_tokens": max_tokens,
        "val_fraction": val_fraction,
        "split_documents": split_documents or None,
        "vocab_size": vocab_size,
        "largest_vocab_size": largest_vocab_size if tokenizer == "bpe" else None,
        "tokenizer_from": sha256_of(tokenizer_from / TOKENIZER_JSON) if tokenizer_from and tokenizer == "bpe" else None,
        **corpus.settings,
    }
    manifest = new_manifest(corpus.name, corpus.revision, tokenizer, settings)
    with (
        report_disk_errors(Path(output)),
        open_output_folder(Path(output), manifest, corpus.prefix, only_parts is not None, flag, report) as folder,
    ):
        if not folder.is_complete:
            parts = corpus.parts()
            corpus = corpus.for_process(only_parts[0]) if only_parts else corpus
            in_order = val_fraction is None and not only_parts
            _check_space(folder, parts, max_tokens, shard_size if in_order else math.inf)
            written = _write_tokenizer(folder, corpus, vocab_size, largest_vocab_size, tokenizer_from)
            encode = get_encoder(written, engine or default_engine(), threads)
            folder.begin_parts(parts)
            with contextlib.closing(EncodedParts(folder, corpus, parts, encode, max_tokens)) as encoded:
                if only_parts:
                    encoded.encode_some(*only_parts)
                else:
                    _write_all(folder, corpus, encoded, shard_size, val_fraction)
        corpus.close()
    return folder.manifest


# -----------------------------------------------------------------------------
# Parts


def _write_tokenizer(
    folder: OutputFolder, corpus: Corpus, vocab_size: int | None, largest: int | None, copy_of: Path | None
) -> Tokenizer:
    """Writes the tokenizer that a folder's manifest names to its `tokenizer.json`, and returns it.

    "bpe" is trained on the corpus, and its checksum and vocabulary size are added to the manifest. A file whose checksum
    is there already is kept.

    Args:
        vocab_size: the largest size allowed for "bpe" (default: the corpus's, or `fitting_vocab_size` up to `largest`).
        copy_of: a folder with a `tokenizer.json` to use instead.

    Raises:
        UserError: the corpus, or `copy_of`, cannot be read; or GPT-2's vocabulary cannot be downloaded.
    """
    path, name = folder.directory / TOKENIZER_JSON, folder.manifest["tokenizer"]
    is_trained = "tokenizer_sha256" in folder.manifest
    if name == "bpe":
        source = folder.directory if is_trained else copy_of
        tokenizer = find_tokenizer(source) if source else None
    else:
        tokenizer = get_tokenizer(name, folder.directory, *filter(None, [copy_of]))
    if tokenizer is None:
        settings = folder.manifest["settings"]
        held_out, max_tokens = float(settings.get("val_fraction") or 0), settings.get("max_tokens")
        texts = bpe.training_texts(corpus, max(bpe.HELD_OUT, held_out), int(max_tokens) if max_tokens else None)
        folder.report(f"training a tokenizer on {sum(map(len, texts)):,} characters ...")
        fitting = min(bpe.fitting_vocab_size(sum(map(len, texts))), largest or sys.maxsize)
        tokenizer = bpe.train_bpe(texts, vocab_size or corpus.vocab_size or fitting)
    if not path.exists() or path.read_bytes() != tokenizer.json.encode():
        with atomic_write(path, unique=True) as tmp:
            tmp.write_text(tokenizer.json, encoding="utf-8", newline="\n")
    if name == "bpe" and not is_trained:
        folder.manifest |= {"tokenizer_sha256": sha256_of(path), "vocab_size": tokenizer.vocab_size}
        write_manifest(folder.directory, folder.manifest)
    return tokenizer


class EncodedParts:
    """The tokens of a corpus: one file for each encoded part, with a record beside it that is written last.

    Attributes:
        limit: the maximum number of tokens to use.
        lengths: the number of tokens in each part encoded so far, as in the manifest. Parts that are already in shards
            may be removed from the disk; they are encoded again if needed.
    """

    def __init__(
        self, folder: OutputFolder, corpus: Corpus, parts: list[Part], encode: Encoder, max_tokens: int | None
    ):
        self.folder, self.corpus, self.parts, self.encode = folder.parts, corpus, parts, encode
        self.flag, self.report = folder.flag, folder.report
        self.eot, self.limit = folder.manifest["vocab_size"] - 1, max_tokens or sys.maxsize
        self.lengths = folder.manifest["parts"]
        self._most_bytes_per_token = MAX_BYTES_PER_TOKEN[folder.manifest["tokenizer"]]
        self._looks_for_marker = not isinstance(corpus, Documents)
        self._ready: dict[int, int] = {}  # tokens of the parts whose files are on the disk and intact
        self._text_bytes = [*itertools.accumulate(part.text_bytes for part in self.parts)]
        style: dict[str, Any] = {"unit": " tokens", "unit_scale": True, "smoothing": 0.05, "leave": False}
        # without the delay, it would begin with zeros and question marks
        self._bar = tqdm(desc="tokenising", total=max_tokens, delay=1, disable=None, **style)

    def close(self) -> None:
        self._bar.close()

    def path(self, number: int) -> Path:
        return self.folder / f"part_{number:06d}.bin"

    def record(self, number: int) -> TokenFile | None:
        """Returns the record of a part, or None if it is not encoded."""
        return read_json(self.path(number).with_suffix(".json"))

    def ensure(self, number: int, following: int) -> int:
        """Encodes a part, unless its file is intact; returns its number of tokens. `following` is the part needed next.

        Raises:
            UserError: the part cannot be read or encoded, or differs from what was encoded before.
        """
        if number in self._ready:
            return self._ready[number]
        record, path = self.record(number), self.path(number)
        if record is None or not path.exists() or sha256_of(path) != record["sha256"]:
            record = self._encode(number, following)
        if number < len(self.lengths) and record["tokens"] != self.lengths[number]:
            raise UserError(
                f"{self.corpus.name} changed since its shards were begun, or is now encoded differently. Use another {self.flag}."
            )
        self._ready[number] = record["tokens"]
        return record["tokens"]

    def _encode(self, number: int, following: int) -> TokenFile:
        part = self.parts[number]
        self.corpus.prepare(part)
        if following < len(self.parts) and self.record(following) is None:
            self.corpus.prepare(self.parts[following])
        try:
            batches = self._show(encode_pieces(self._look_for_marker(part), self.encode, self.eot))
            record = write_tokens(self.path(number), batches, self.eot)
        except BaseException as error:
            # a panic in Rust code is not an Exception, and its class cannot be imported
            if not isinstance(error, ValueError) and type(error).__name__ != "PanicException":
                raise
            raise UserError(
                f"a document of {self.corpus.describe(part)} cannot be encoded: {error}. "
                "Fix it (does it have a million spaces in a row?) or leave it out."
            ) from None
        write_json(self.path(number).with_suffix(".json"), record)
        self.corpus.release(part)
        return record

    def _look_for_marker(self, part: Part) -> Iterator[Piece]:
        """Yields the pieces of a part, and notes once if one has the marker that other tools put between documents."""
        for text, begins in self.corpus.read(part):
            if self._looks_for_marker and END_OF_TEXT in text:
                self._looks_for_marker = False
                self.report(
                    f"note: the text has {END_OF_TEXT} in it, which is read as text. If it divides documents, divide the text "
                    f"there: for .txt files, fineweb.py --document-separator '{END_OF_TEXT}' does so."
                )
            yield text, begins

    def _show(self, batches: Iterator[Tokens]) -> Iterator[Tokens]:
        for tokens in batches:
            self._bar.update(len(tokens))
            yield tokens

    def encode_until(self, count: int) -> int:
        """Encodes parts until there are `count` tokens, or no more to use; returns the number of tokens, at most `count`."""
        count = min(count, self.limit)
        while sum(self.lengths) < count and len(self.lengths) < len(self.parts):
            number = len(self.lengths)
            least_tokens = sum(self.lengths) + self.parts[number].text_bytes / self._most_bytes_per_token
            # beyond the limit, nobody needs the next file, which may have gigabytes
            following = number + 1 if least_tokens < self.limit else len(self.parts)
            self.lengths.append(self.ensure(number, following))
            self._bar.n = total = sum(self.lengths)
            if self._text_bytes[number]:
                self._bar.total = min(self.limit, total * self._text_bytes[-1] / self._text_bytes[number])
        return min(count, sum(self.lengths))

    def encode_some(self, first: int, every: int) -> None:
        """Encodes parts `first` (counted from 1; 0: none), `first + every` and so on, until the limit is reached."""
        if first > len(self.parts):
            self.report(f"nothing to do: the text has only {len(self.parts)} parts")
        tokens_before, counted = 0, 0  # tokens of the encoded parts before this one
        for number in range(first - 1, len(self.parts), every) if first else ():
            for other in range(counted, number):
                tokens_before += (self.record(other) or {"tokens": 0})["tokens"]
            counted = number
            if tokens_before >= self.limit:
                break
            if number >= len(self.lengths):  # earlier ones are in shards already, or on the disk
                tokens = self.ensure(number, number + every)
                self.report(f"part {number + 1} of {len(self.parts)}: {tokens:,} tokens")

    def find(self, start: int, stop: int) -> list[Slice]:
        """Returns where the tokens from `start` to `stop` are; parts that were removed are encoded again."""
        slices, offset = [], 0
        for number, length in enumerate(self.lengths):
            first, last = max(start, offset) - offset, min(stop, offset + length) - offset
            if first < last:
                self.ensure(number, number + 1)
                slices.append((self.path(number), first, last - first))
            offset += length
        return slices

    def remove_before(self, position: int) -> None:
        """Removes the parts whose tokens all come before a position."""
        for number, stop in enumerate(itertools.accumulate(self.lengths)):
            if stop <= position and self._ready.pop(number, None) is not None:
                self.path(number).with_suffix(".json").unlink(missing_ok=True)
                self.path(number).unlink(missing_ok=True)


def read_slices(slices: Iterable[Slice]) -> Iterator[Tokens]:
    """Yields the tokens of slices, in blocks that fit into memory."""
    for path, first, count in slices:
        for start in range(first, first + count, BLOCK):
            yield np.fromfile(path, TOKEN, min(BLOCK, first + count - start), offset=start * TOKEN.itemsize)


# -----------------------------------------------------------------------------
# Shards


def _write_all(
    folder: OutputFolder, corpus: Corpus, parts: EncodedParts, shard_size: int, val_fraction: float | None
) -> None:
    """Writes shard 0 for validation and the others for training; a corpus of only one shard is split instead.

    With `val_fraction`, all parts are encoded first, to count their tokens.
    """
    manifest, first_tokens = folder.manifest, parts.encode_until(shard_size + 1)
    if first_tokens < 2:
        shutil.rmtree(folder.parts, ignore_errors=True)  # leave nothing behind
        raise UserError(f"there is no text in {corpus.name}. Use other files, or another data set.")
    in_order = val_fraction is None and first_tokens > shard_size
    shards = _in_order(parts, shard_size) if in_order else _split(folder, parts, shard_size, val_fraction)
    if in_order and manifest["tokenizer"] == "bpe" and not manifest["settings"].get("tokenizer_from"):
        folder.report("note: the tokenizer was trained on the beginning of the text, which is in the validation shard")
    listed = {entry["file"]: entry for entry in manifest["shards"]}
    if listed:
        tokens = sum(entry["tokens"] for entry in listed.values())
        folder.report(f"resuming after {len(listed)} finished shard{'s' * (len(listed) > 1)}, {tokens:,} tokens")

    def write(path: Path, split: str, slices: list[Slice], stop: int) -> None:
        size = sum(count for _, _, count in slices)
        written = write_tokens(path, read_slices(slices), parts.eot, shard_size=size)
        listed[path.name] = {"file": path.name, "split": split, **written}
        manifest["shards"] = sorted(listed.values(), key=lambda entry: entry["file"].rpartition("_")[2])
        write_manifest(folder.directory, manifest)
        folder.report(f"{path.name}: {size:,} tokens")
        if in_order:
            parts.remove_before(stop)

    with ThreadPoolExecutor(1) as thread:  # a shard is written while the parts of the next one are encoded
        writing: Future[None] | None = None
        for split, index, start, stop in shards:
            path = folder.directory / shard_name(corpus.prefix, split, index)
            if path.name not in listed:
                slices = parts.find(start, stop)
                if writing:
                    writing.result()
                writing = thread.submit(write, path, split, slices, stop)
        if writing:
            writing.result()
    folder.finish()
    total = sum(entry["tokens"] for entry in manifest["shards"])
    held_out = sum(entry["tokens"] for entry in manifest["shards"] if entry["split"] == "val")
    if in_order and (share := held_out / total) > LARGE_VAL_FRACTION:
        folder.report(
            f"note: the validation shard has {share:.0%} of the tokens. To train on more of them, use --val-fraction {VAL_FRACTION}."
        )


def _in_order(parts: EncodedParts, size: int) -> Iterator[Shard]:
    """Yields shards of `size` tokens; the last may be shorter. The parts of a shard are encoded before it is yielded."""
    for index in itertools.count():
        start = index * size
        stop = parts.encode_until(start + size)
        if stop <= start:
            return
        yield "train" if index else "val", index, start, stop


def _split(folder: OutputFolder, parts: EncodedParts, size: int, val_fraction: float | None) -> list[Shard]:
    """Returns the shards of a corpus whose last fraction is held out for validation."""
    total, fraction = parts.encode_until(sys.maxsize), val_fraction or VAL_FRACTION
    split_documents = bool(folder.manifest["settings"].get("split_documents"))
    split_point = val_split_point(read_slices(parts.find(0, total)), total, parts.eot, fraction, split_documents)
    val_tokens = total - split_point
    folder.report(f"the last {val_tokens / total:.1%} of the text, {val_tokens:,} tokens, is held out for validation")
    if not 0.5 * fraction * total <= val_tokens <= 2 * max(1, fraction * total):
        comparison = "more" if val_tokens > fraction * total else "less"
        folder.report(
            f"note: that is {comparison} than {fraction:.0%} because one of the last documents is long. Split it with "
            "--split-documents, or divide the text into more documents with --document-separator."
        )
    train, val = range(0, split_point, size), range(split_point, total, size)
    shards = [("train", i, start, min(start + size, split_point)) for i, start in enumerate(train, start=len(val))]
    return shards + [("val", i, start, min(start + size, total)) for i, start in enumerate(val)]


def val_split_point(
    blocks: Iterable[Tokens], total: int, eot: int, fraction: float, split_documents: bool = False
) -> int:
    """Returns where to split off the last `fraction` of `total` tokens, which come in blocks, for validation.

    The split is at the nearest start of a document. It is inside a document if there is only one or, with
    `split_documents`, if none starts nearby.
    """
    ideal = total - max(1, round(fraction * total))
    starts, offset = [], 0  # the nearest start in each block: a list of all might not fit into memory
    for block in blocks:
        found = offset + np.flatnonzero(block == eot)
        found = found[found > 0]
        if len(found):
            starts.append(int(found[np.abs(found - ideal).argmin()]))
        offset += len(block)
    nearest = min(starts, key=lambda start: abs(start - ideal), default=None)
    is_far = nearest is None or abs(nearest - ideal) > MAX_CUT_ERROR * (total - ideal)
    return max(1, ideal) if nearest is None or (split_documents and is_far) else nearest


# -----------------------------------------------------------------------------
# The disk


@contextlib.contextmanager
def report_disk_errors(directory: Path) -> Iterator[None]:
    """Turns a disk error into a UserError."""
    try:
        yield
    except BrokenPipeError:  # the console was closed
        raise
    except OSError as error:
        raise UserError(
            f"cannot write to {directory} ({describe_error(error, directory)}). Fix this, then run the same command "
            "again to resume."
        ) from error


def _check_space(folder: OutputFolder, parts: list[Part], max_tokens: int | None, kept: float) -> None:
    """Compares the free space with a low estimate of what the shards still need.

    Args:
        kept: a corpus of up to this many tokens is on the disk twice, because its parts are kept until it is split.

    Raises:
        UserError: there is clearly not enough.
    """
    text_bytes = sum(part.text_bytes for part in parts)
    total_tokens = min(max_tokens or math.inf, text_bytes / MAX_BYTES_PER_TOKEN[folder.manifest["tokenizer"]])
    finished_tokens = sum(entry["tokens"] for entry in folder.manifest["shards"])
    in_parts = sum(path.stat().st_size for path in folder.directory.glob(f"{ALL_PARTS}/*.bin"))
    copies = 2 if total_tokens <= kept else 1
    check_free_space(folder.directory, 2 * (copies * total_tokens - finished_tokens) - in_parts, "make the shards")
