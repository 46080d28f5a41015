"""Turns text into token shards for train_gpt2.py.

    python fineweb.py                                            # FineWeb-Edu, 10 billion tokens, into edu_fineweb10B/
    python fineweb.py --name sample-100BT                        # 100 billion, into edu_fineweb100B/
    python fineweb.py --input book.txt 'notes/*.jsonl' --output my_data
    python fineweb.py --dataset roneneldan/TinyStories --output tinystories
    python fineweb.py --shards-from NAME --output their_shards   # somebody's ready-made .npy shards
    python fineweb.py --demo                                     # Python's own documentation, into demo_data/

A shard is a one-dimensional uint16 .npy file. Every document is preceded by <|endoftext|>; shard 0 is for
validation, the others for training. `manifest.json` beside them says what they are. Whatever the number of workers,
the bytes are the same; killed and run again, it goes on behind the last shard.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import errno
import glob
import hashlib
import itertools
import json
import os
import signal
import sys
import sysconfig
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from decimal import Decimal, DecimalException
from pathlib import Path
from typing import Any

import numpy as np

from support import hub, shards
from support.cli import Parser, UserError, run
from support.corpus import COMPRESSED, KINDS, Batch, Corpus, Documents, Files, Place, kind_of, slug, texts_in
from support.encode import ENGINES, default_engine, encoded
from support.lock import LOCK, lock, sign
from support.tokenizer import VOCAB_SIZES, get_tokenizer

FINEWEB_EDU = "HuggingFaceFW/fineweb-edu"
SHARD_SIZE = 10**8  # tokens
MOST_OF_A_SHARD = 10**9
VAL_FRACTION = 0.1  # of a corpus that is smaller than a shard
SECONDS_BETWEEN_LINES = 10  # of progress, where it is no bar
CHARS_PER_TOKEN = 5  # of English as gpt2 tokens, rather more than there are: for estimates

# -----------------------------------------------------------------------------
# Where documents come from


def demo_source() -> Corpus:
    """The documentation that every CPython carries, about 2 MB of English: the language reference and the docstrings."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    return Documents("documentation of CPython", _python_documentation, version, "pydoc")


def _python_documentation() -> list[str]:
    from pydoc_data.topics import topics

    named = {f"topic {name}": text for name, text in topics.items()}
    library = Path(sysconfig.get_paths()["stdlib"])
    # Tests hold no prose, and the others are not in every CPython.
    skipped = set("site-packages dist-packages test tests idlelib lib2to3 distutils turtledemo ensurepip".split())
    for path in library.rglob("*.py"):
        place = path.relative_to(library)
        if not skipped.intersection(place.parts):
            docstrings = _docstrings(path)
            if docstrings:
                named[f"module {place.as_posix()}"] = "\n\n".join(docstrings)
    # In the order of a hash: then the last tenth, which is held out, is a fair sample of both kinds.
    return [named[name] for name in sorted(named, key=lambda name: hashlib.sha1(name.encode()).digest())]


def _docstrings(path: Path) -> list[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError, OSError):
            return []
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = (ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, kinds))
    return [docstring for docstring in found if docstring]


def file_source(patterns: list[str], text_field: str, separator: str | None = None) -> Corpus:
    """Local files in the order given: a .txt is one document, a line of .jsonl or a row of .parquet is one each.

    Of a folder, all such files anywhere in it, but for the folders of runs.

    Raises:
        UserError: a pattern matches nothing, or something that is no text.
    """
    paths = []
    for pattern in patterns:
        if os.path.isdir(pattern):
            paths += texts_in(pattern)
            continue
        matches = [pattern] if os.path.isfile(pattern) else sorted(glob.glob(pattern, recursive=True))
        paths += [Path(match) for match in map(os.path.normpath, matches) if os.path.isfile(match)]
        if not matches:
            raise UserError(f"no file matches {pattern}. Name .txt, .jsonl or .parquet files.")
    paths = list(dict.fromkeys(paths))  # a file that two patterns match is one document
    kinds = f"{', '.join(KINDS)} (the first two also with {' or '.join(COMPRESSED)})"
    problems = [f"{path} is none of {kinds}. Convert it, or leave it out." for path in paths if kind_of(path) is None]
    if problems or not paths:
        raise UserError(*problems or [f"there is no text in {' '.join(patterns)}. Name files or folders of {kinds}."])
    name = " ".join(path.name for path in (paths if len(paths) <= 9 else paths[:3]))
    name += f" ... ({len(paths)} files)" if len(paths) > 9 else ""
    return Files(name, paths, text_field, separator=separator)


def dataset_source(name: str, config: str | None, split: str, text_field: str, output: Path, keep: bool) -> Corpus:
    """A text data set of the Hugging Face hub, or a local folder of its files.

    FineWeb's files are fetched one by one, others are streamed. A folder that an earlier run has begun goes on with
    the revision that it began with.

    Raises:
        UserError: there is no such data set, or the hub cannot be reached.
    """
    if os.path.isfile(name):
        raise UserError(f"{name} is a file. Name it with --input.")
    if os.path.isdir(name):
        return hub.Stream(name, config, split, text_field)
    if name in hub.FINEWEBS and split == "train":
        corpus = hub.HubParquet(name, config or "sample-10BT", text_field, output / "downloads", keep)
    else:
        corpus = hub.Stream(name, config, split, text_field)
    corpus.revision = begun(output, corpus.name).get("revision") or hub.revision_of(name)
    return corpus


def begun(output: Path, name: str) -> dict[str, Any]:
    """The manifest of a folder that has shards of this source, or is to have them; else nothing."""
    try:
        earlier = json.loads((output / shards.MANIFEST).read_text(encoding="utf-8"))
        return earlier if earlier["source"] == name else {}
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return {}


# -----------------------------------------------------------------------------
# Tokens to shards. A mark is a place in the corpus and a number of tokens from there.

Mark = tuple[Place | None, int]


@dataclass(frozen=True)
class Chunk:
    """So many tokens as a shard has, or the rest; `end` is where the next one begins."""

    tokens: np.ndarray
    end: Mark
    last: bool


def chunks(
    encoded_batches: Iterable[tuple[Batch, np.ndarray]], size: int, skip: int, limit: int | None
) -> Iterator[Chunk]:
    """Cuts a stream of tokens, without its first `skip` and up to `limit` of the others, every `size`."""
    buffer, filled, end = np.empty(size, dtype=np.uint16), 0, (None, 0)
    for batch, tokens in encoded_batches:
        at = min(skip, len(tokens))
        skip -= at
        until = len(tokens) if limit is None else min(len(tokens), at + limit)
        while at < until:
            if filled == size:  # known not to be the last one only now
                yield Chunk(buffer, end, last=False)
                buffer, filled = np.empty(size, dtype=np.uint16), 0
            part = tokens[at : min(until, at + size - filled)]
            buffer[filled : filled + len(part)] = part
            filled, at = filled + len(part), at + len(part)
            limit = limit and limit - len(part)
            end = (batch.place, at)
        if limit == 0:
            break
    if filled:
        yield Chunk(buffer[:filled], end, last=True)


@dataclass(frozen=True)
class Slot:
    """One shard to be: tokens [start, end) of the corpus."""

    split: str
    index: int
    start: int
    end: int


def slots_held_out(cut: int, total: int, shard_size: int) -> Iterator[Slot]:
    """Training before the place `cut`, validation from there; numbered from 0, validation first."""
    for index, start in enumerate(range(0, cut, shard_size), start=-(-(total - cut) // shard_size)):
        yield Slot("train", index, start, min(start + shard_size, cut))
    for index, start in enumerate(range(cut, total, shard_size)):
        yield Slot("val", index, start, min(start + shard_size, total))


def held_out_from(parts: Sequence[np.ndarray], eot: int, fraction: float, whole: bool = True) -> int:
    """The token from which the last `fraction` of a corpus is held out: where a document starts, nearest to it.

    A corpus of one document is cut inside its text. So is one whose documents need not stay `whole`, where none starts near.
    """
    total = sum(map(len, parts))
    ideal = total - max(1, round(fraction * total))
    nearest, before = [], 0
    for part in parts:
        starts = before + np.flatnonzero(part == eot)
        starts = starts[starts > 0]
        nearest += [int(starts[np.abs(starts - ideal).argmin()])] if len(starts) else []
        before += len(part)
    cut = min(nearest, key=lambda start: abs(start - ideal), default=max(1, ideal))
    return cut if whole or abs(cut - ideal) <= 0.1 * (total - ideal) else max(1, ideal)


class Progress:
    """Tokens, tokens per second and the time left: a bar on a terminal, else a line now and then."""

    def __init__(self, before: int, most: int | None):
        from tqdm import tqdm

        self._before, self._tokens, self._most = before, before, most
        self._begin = self._said = time.monotonic()
        how = {"unit": " tokens", "unit_scale": True, "desc": "tokenising", "initial": before, "total": most}
        self.bar = tqdm(disable=None, smoothing=0.05, **how)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.close()

    def watch(self, stream: Iterable[tuple[Batch, np.ndarray]]) -> Iterator[tuple[Batch, np.ndarray]]:
        """Passes batches and their tokens on."""
        for batch, tokens in stream:
            self._tokens += len(tokens)
            if batch.share:
                self.bar.total = min(self._tokens / batch.share, self._most or float("inf"))
            self.bar.update(len(tokens))
            now = time.monotonic()
            if self.bar.disable and now - self._said > SECONDS_BETWEEN_LINES:
                self._said = now
                how = {"prefix": "tokenising", "unit": " tokens", "unit_scale": True, "initial": self._before}
                print(self.bar.format_meter(self._tokens, self.bar.total, now - self._begin, **how), flush=True)
            yield batch, tokens


class Folder:
    """A folder of shards that is being filled: what its manifest lists is whole, and never written again.

    Shards are written by a thread, while the next one is filled.
    """

    def __init__(self, directory: Path, manifest: dict[str, Any], corpus: Corpus, shard_size: int):
        self.directory, self.manifest, self.corpus, self.shard_size = directory, manifest, corpus, shard_size
        self.eot = manifest["vocab_size"] - 1
        self._pool, self._writing = ThreadPoolExecutor(1), Future()
        self._writing.set_result(None)

    def __enter__(self) -> Folder:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()

    def put(self, tokens: np.ndarray, split: str, index: int, end: Mark | None = None) -> None:
        """Writes a shard; one of the split "counted" is a part of a corpus that is cut in two when all is counted.

        Raises:
            UserError: the one before could not be written.
        """
        self.wait()
        self._writing = self._pool.submit(self._write, tokens, split, index, end)

    def wait(self) -> None:
        """Returns when all is written.

        Raises:
            UserError: the disk does not take it.
        """
        try:
            self._writing.result()
        except OSError as error:
            whole = len(self.manifest["counted"]) + len(self.manifest["shards"])
            raise UserError(
                f"cannot write to {self.directory} ({error.strerror}). {whole} shards are whole: mend that, and run the "
                "same command again."
            ) from error

    def _write(self, tokens: np.ndarray, split: str, index: int, end: Mark | None) -> None:
        path = self.directory / shards.name(self.corpus.prefix, split, index)
        entry = {"file": path.name, "split": split, "tokens": len(tokens)}
        entry |= {"documents": int(np.count_nonzero(tokens == self.eot)), "sha256": shards.write_shard(path, tokens)}
        if end is not None:
            entry["end"] = json.dumps(end)  # a line of the manifest, not ten
        self.manifest["counted" if split == "counted" else "shards"].append(entry)
        shards.write_manifest(self.directory, self.manifest)
        if end is not None:
            self.corpus.done_with(end[0])

    def fill(self, done: list[dict], max_tokens: int | None, counting: bool, tokens_from: Callable) -> None:
        """Writes the shards that follow those that are `done`.

        `tokens_from` gives batches and their tokens from a place on. A corpus that turns out to be no more than a shard
        is cut in two; with `counting`, its parts are only laid aside.
        """
        made = sum(entry["tokens"] for entry in done)
        place, skip = json.loads(done[-1]["end"]) if done else (None, 0)
        left = None if max_tokens is None else max_tokens - made
        if left == 0:
            return
        if done:
            print(f"going on behind {len(done)} shards, {made:,} tokens")
        small = None
        with Progress(made, max_tokens) as progress:
            stream = progress.watch(tokens_from(place))
            for index, chunk in enumerate(chunks(stream, self.shard_size, skip, left), start=len(done)):
                if counting:
                    self.put(chunk.tokens, "counted", index, chunk.end)
                elif index == 0 and chunk.last:
                    small = chunk.tokens
                else:
                    self.put(chunk.tokens, "train" if index else "val", index, chunk.end)
        if small is not None:
            self.hold_out([small], VAL_FRACTION)
        self.wait()

    def hold_out(self, parts: Sequence[np.ndarray], fraction: float) -> None:
        """Writes the shards of a corpus that is there in parts of a shard's size, its last `fraction` as validation."""
        total = sum(map(len, parts))
        if total < 2:
            raise self.no_text()
        whole = not self.manifest["settings"].get("split_documents")
        cut = held_out_from(parts, self.eot, fraction, whole)
        print(f"the last {(total - cut) / total:.1%} of the text, {total - cut:,} tokens, is held out for validation")
        if total - cut > 2 * max(1, fraction * total):
            print(
                f"note: that is more than {fraction:.0%}, for the last document is long. Cut inside it with "
                "--split-documents, or into more documents with --document-separator."
            )
        for slot in list(slots_held_out(cut, total, self.shard_size))[len(self.manifest["shards"]) :]:
            part, at = divmod(slot.start, self.shard_size)
            tokens = parts[part][at : at + slot.end - slot.start]
            if len(tokens) < slot.end - slot.start:  # the rest is in the next one
                tokens = np.concatenate([tokens, parts[part + 1][: slot.end - slot.start - len(tokens)]])
            self.put(tokens, slot.split, slot.index)

    def no_text(self) -> UserError:
        return UserError(f"there is no text in {self.corpus.name}. Name other files, or another data set.")


def make_shards(
    corpus: Corpus,
    output: str | os.PathLike,
    *,
    tokenizer: str = "gpt2",
    engine: str | None = None,
    shard_size: int = SHARD_SIZE,
    max_tokens: int | None = None,
    val_fraction: float | None = None,
    split_documents: bool = False,
    workers: int = 1,
) -> dict[str, Any]:
    """Writes the shards of a corpus and their manifest into the folder `output`; returns the manifest.

    Shard 0 is validation; with `val_fraction`, or where the corpus is no more than one shard, the last documents are,
    with `split_documents` also a part of one where none starts near.
    What an earlier call with the same arguments has finished is kept. The bytes depend neither on `engine`, "gigatoken"
    or "tiktoken" (default: the first one that is installed), nor on `workers`.

    Raises:
        UserError: the folder holds other shards, cannot be written or is in use, the disk is too small, or the corpus
            cannot be read or has too little text to be split.
    """
    asked = {"shard_size": shard_size, "max_tokens": max_tokens, "val_fraction": val_fraction}
    asked |= {"split_documents": split_documents or None, **corpus.settings}
    directory, manifest = Path(output), describe(corpus.name, corpus.revision, tokenizer, asked)

    def tokens_from(place: Place | None) -> Iterator[tuple[Batch, np.ndarray]]:
        return encoded(corpus.batches(place), tokenizer, engine or default_engine(), workers)

    with claimed(directory, manifest, corpus.prefix) as finished, told(manifest):
        if not finished:
            check_room(manifest, directory, corpus, max_tokens, copies=1 if val_fraction is None else 2)
            with Folder(directory, manifest, corpus, shard_size) as folder:
                if val_fraction is None:
                    folder.fill([s for s in manifest["shards"] if "end" in s], max_tokens, False, tokens_from)
                else:
                    parts = manifest["counted"]
                    if not manifest["all_counted"]:
                        folder.fill(parts, max_tokens, True, tokens_from)
                        manifest["all_counted"] = bool(parts)
                    folder.hold_out([shards.load(directory / part["file"]) for part in parts], val_fraction)
                folder.wait()
                if not manifest["shards"]:
                    raise folder.no_text()
            if corpus.changed():
                raise UserError(f"{corpus.name} was changed while it was read. Remove {directory} and run it again.")
            finish(directory, manifest)
        corpus.close()
    return manifest


@contextlib.contextmanager
def told(manifest: dict[str, Any]) -> Iterator[None]:
    """Says after Ctrl-C what becomes of the work."""
    try:
        yield
    except KeyboardInterrupt:
        whole = len(manifest["shards"]) + len(manifest.get("counted", []))
        print(f"\nstopped: the same command goes on behind the {whole} shards that are whole", file=sys.stderr, end="")
        raise


def describe(source: str, revision: str | None, tokenizer: str, settings: dict[str, Any]) -> dict[str, Any]:
    """The manifest of a folder in which nothing is made so far."""
    manifest = {"tokenizer": tokenizer, "vocab_size": VOCAB_SIZES[tokenizer], "source": source, "revision": revision}
    settings = {key: value for key, value in settings.items() if value is not None}
    return manifest | {"settings": settings, "complete": False, "shards": [], "counted": [], "all_counted": False}


def finish(directory: Path, manifest: dict[str, Any]) -> None:
    """Says in the manifest that all shards are there, and removes what only making them needed."""
    parts = manifest.pop("counted")
    manifest.pop("all_counted")
    manifest["complete"] = True
    shards.write_manifest(directory, manifest)
    for part in parts:
        (directory / part["file"]).unlink(missing_ok=True)


def check_room(manifest: dict[str, Any], directory: Path, corpus: Corpus, max_tokens: int | None, copies: int) -> None:
    """Compares the disk with an estimate of what the shards still need, where there is one.

    Raises:
        UserError: there is clearly not enough.
    """
    text, most = corpus.text_bytes(), float("inf") if max_tokens is None else max_tokens
    if text is not None:
        most = min(most, text / (1 if manifest["tokenizer"] == "bytes" else CHARS_PER_TOKEN))
    if most < float("inf"):
        made = sum(entry["tokens"] for entry in (*manifest["counted"], *manifest["shards"]))
        hub.check_room(directory, 2 * (copies * most - made), "make the shards")


@contextlib.contextmanager
def claimed(directory: Path, manifest: dict[str, Any], prefix: str | None) -> Iterator[bool]:
    """Takes from the manifest of a folder what an earlier run of the same command made; gives True if that is all.

    Else the folder is made and locked. Shards that are not listed there, or no longer whole, are to be made again, and
    those with this prefix are removed. Those behind them too: without a prefix, each shard stands on its own.

    Raises:
        UserError: shards of another source or setting are there, or the folder is in use or cannot be written.
    """
    path = directory / shards.MANIFEST
    with contextlib.ExitStack() as stack:
        try:
            earlier = _refuse_others(directory, manifest, prefix)
            finished = _is_finished(directory, manifest, earlier)
            if not finished:
                directory.mkdir(parents=True, exist_ok=True)
                if not os.access(directory, os.W_OK):
                    raise PermissionError(errno.EACCES, "no permission")
                sign(stack.enter_context(lock(directory, "--output")))
                earlier = _refuse_others(directory, manifest, prefix)  # again: now nobody else can change it
                if earlier:
                    _take_over(directory, manifest, earlier, in_order=prefix is not None)
                stack.callback(_leave_nothing, directory, manifest)
                shards.write_manifest(directory, manifest)
            if earlier:
                _remove_leftovers(directory, manifest, prefix)
        except OSError as error:
            raise UserError(f"cannot write to {directory} ({error.strerror}). Name another --output.") from error
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise UserError(
                f"{path} is not a manifest of shards ({error!r}). Remove it, or name another --output."
            ) from error
        yield finished


def _remove_leftovers(directory: Path, manifest: dict[str, Any], prefix: str | None) -> None:
    """Removes shards with this prefix, and what was on its way to be one, that the manifest does not list."""
    listed = {entry["file"] for entry in (*manifest["shards"], *manifest.get("counted", []))}
    for path in directory.iterdir() if prefix else ():
        found = shards.parse(path.name.removesuffix(".partial").replace("_counted_", "_train_"))
        if found and found["prefix"] == prefix and path.name not in listed:
            path.unlink()


def _leave_nothing(directory: Path, manifest: dict[str, Any]) -> None:
    """Frees a folder in which nothing was made, after an error."""
    if not manifest["shards"] and not manifest.get("counted"):
        with contextlib.suppress(OSError):
            (directory / shards.MANIFEST).unlink()
            (directory / LOCK).unlink()
            directory.rmdir()  # only if nothing else is in it


def _refuse_others(directory: Path, manifest: dict[str, Any], prefix: str | None) -> dict[str, Any] | None:
    """The manifest of an earlier run of the same command, if there is one."""
    path, earlier, differing = directory / shards.MANIFEST, None, ["source"]
    if path.exists():
        earlier = json.loads(path.read_text(encoding="utf-8"))
        ours, theirs = (m | m["settings"] for m in (manifest, earlier))
        same = ("tokenizer", "source", "revision", *manifest["settings"], *earlier["settings"])
        differing = [
            f"{key}: {theirs.get(key)}, not {ours.get(key)}" for key in same if theirs.get(key) != ours.get(key)
        ]
        if differing and (earlier["shards"] or earlier.get("counted")):
            raise UserError(
                f"{directory} holds shards of another source or setting ({'; '.join(dict.fromkeys(differing))}). "
                "Name another --output, or remove it."
            )
    names = [path.name for split in ("train", "val") for path in shards.paths(directory, split)]
    if strangers := [name for name in names if differing or (prefix and shards.parse(name)["prefix"] != prefix)]:
        raise UserError(
            f"{directory} holds shards of another tool, such as {strangers[0]}. Move them away, or name another --output."
        )
    return None if differing else earlier


def _is_finished(directory: Path, manifest: dict[str, Any], earlier: dict[str, Any] | None) -> bool:
    """Whether an earlier run has made all shards, and they are whole; then its manifest is taken over."""
    if not earlier or not earlier["complete"]:
        return False
    try:
        shards.verify(directory)
    except UserError as error:
        print(f"making shards again: {error.problems[0].rsplit('. ', 1)[0]}")
        return False
    print("nothing to do: these shards were made before, and are whole")
    manifest.update(earlier)
    return True


def _take_over(directory: Path, manifest: dict[str, Any], earlier: dict[str, Any], in_order: bool) -> None:
    """Lists in `manifest` what an earlier run has made, as far as it is whole."""
    thorough = earlier["complete"]  # and yet not finished: something is damaged
    counted = earlier.get("counted", [])
    manifest["counted"] = list(itertools.takewhile(lambda entry: _is_whole(directory, entry, thorough), counted))
    manifest["all_counted"] = bool(earlier.get("all_counted")) and len(manifest["counted"]) == len(counted)
    for entry in earlier["shards"]:
        if _is_whole(directory, entry, thorough):
            manifest["shards"].append(entry)
        elif in_order:
            break
    for entry in (*manifest["counted"], *manifest["shards"]):
        place, skip = json.loads(entry.get("end", "[null, 0]"))
        if not isinstance(place, list | None) or type(skip) is not int or skip < 0:
            raise ValueError(f"end of {entry['file']}: {entry['end']}")


def _is_whole(directory: Path, entry: dict[str, Any], thorough: bool) -> bool:
    path = directory / Path(entry["file"]).name
    try:
        if path.name != entry["file"] or len(shards.load(path)) != entry["tokens"]:
            return False
    except UserError:
        return False
    if not thorough:
        return True
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == entry["sha256"]


# -----------------------------------------------------------------------------
# Ready-made shards


def take_shards(
    repository: str, folder: str | None, output: str | os.PathLike, tokenizer: str | None, max_tokens: int | None
) -> dict[str, Any]:
    """Fetches and checks the `.npy` token shards that a data set of the hub has; returns their manifest.

    `tokenizer` is that of shards without a manifest beside them (default: gpt2). With `max_tokens`, only as many shards
    as have that many tokens together are fetched.

    Raises:
        UserError: the data set has none, or they are not what they should be, or cannot be had or written.
    """
    directory, name = Path(output), f"shards of {repository}" + (f"/{folder}" if folder else "")
    earlier = begun(directory, name)
    revision = earlier.get("revision") or hub.revision_of(repository)
    listing = None if earlier else hub.list_shards(repository, revision, folder)
    theirs = hub.manifest_of_shards(repository, revision, listing[1]) if listing and listing[1] else {}
    encoding = tokenizer or earlier.get("tokenizer") or theirs.get("tokenizer") or "gpt2"
    if encoding not in VOCAB_SIZES:
        raise UserError(f"{directory / shards.MANIFEST} names an unknown tokenizer, {encoding!r}. Remove {directory}.")
    if theirs and theirs["tokenizer"] != encoding:
        raise UserError(f"{repository} has {theirs['tokenizer']} tokens, its manifest says. Leave out --tokenizer.")
    _compare_with_theirs(repository, theirs, listing[0] if listing else [])
    manifest = describe(name, revision, encoding, {"max_tokens": max_tokens})
    with claimed(directory, manifest, prefix=None) as finished:
        if finished:
            return manifest
        there = {entry["file"] for entry in manifest["shards"]}
        wanted, tokens = [], 0
        for file in (listing or hub.list_shards(repository, revision, folder))[0]:
            if max_tokens is None or tokens < max_tokens:
                wanted.append(file)
                tokens += (file.size - 128) // 2  # 128 bytes of header
        missing = [file for file in wanted if Path(file.path).name not in there]
        hub.check_room(directory, sum(file.size for file in missing), "fetch the shards")
        for file in missing:
            manifest["shards"].append(_fetched_shard(repository, revision, file, directory, manifest))
            shards.write_manifest(directory, manifest)
        finish(directory, manifest)
    return manifest


def _compare_with_theirs(repository: str, theirs: dict[str, Any], files: Sequence[hub.HubFile]) -> None:
    """Raises a UserError if a data set does not have all the shards that the manifest beside them lists."""
    sha256_of = {Path(file.path).name: file.sha256 for file in files}
    for entry in theirs.get("shards", []):
        if sha256_of.get(entry["file"], "none") not in (None, entry.get("sha256")):
            raise UserError(
                f"{repository} has no {entry['file']} such as its manifest lists: its owner has not uploaded all of it. "
                "Name another data set."
            )


def _fetched_shard(repository: str, revision: str, file: hub.HubFile, directory: Path, manifest: dict) -> dict:
    path, problem = hub.fetch(repository, revision, file, directory / Path(file.path).name), None
    try:
        tokens = shards.load(path)
        shards.check_ids(tokens, manifest["vocab_size"])
        documents = int(np.count_nonzero(tokens == manifest["vocab_size"] - 1))
        entry = {"file": path.name, "split": shards.parse(path.name)["split"], "tokens": len(tokens)}
    except UserError as error:
        problem = error.problems[0].rsplit(". ", 1)[0]
    if problem:
        path.unlink()
        raise UserError(f"{problem}. That is how {repository} has it: name another data set.")
    with open(path, "rb") as content:
        return entry | {"documents": documents, "sha256": hashlib.file_digest(content, "sha256").hexdigest()}


# -----------------------------------------------------------------------------
# The command line


def arguments(argv: list[str] | None) -> argparse.Namespace:
    """The command line, parsed and checked."""
    parser = Parser(
        description="Turn text into token shards for train_gpt2.py. Without flags: FineWeb-Edu, 10 billion tokens. "
        "Interrupted, the same command goes on behind the last shard that it finished."
    )
    add_source_flags(parser)
    add_shard_flags(parser)
    args = parser.parse_args(argv)
    problems = bad_arguments(args)
    if problems:
        raise UserError(*problems)
    return args


def add_source_flags(parser: Parser) -> None:
    source = parser.add_argument_group("source")
    source.add_argument(
        "--input",
        nargs="+",
        metavar="FILE",
        help=".txt, .jsonl (these also .gz or .zst) or .parquet files, folders of them, or patterns such as 'texts/*.txt'",
    )
    source.add_argument(
        "--dataset", metavar="NAME", help=f"a Hugging Face data set, or a folder that is one (default: {FINEWEB_EDU})"
    )
    source.add_argument(
        "--name", metavar="CONFIG", help="configuration of the data set (default for FineWeb: sample-10BT)"
    )
    source.add_argument("--split", default="train", help="split of the data set (default: train)")
    source.add_argument(
        "--text-field", default="text", metavar="FIELD", help="field or column that has the text (default: text)"
    )
    source.add_argument(
        "--document-separator",
        metavar="TEXT",
        help=r"what parts the documents of a .txt file; \n in it is a line end (default: a file is one document)",
    )
    source.add_argument(
        "--shards-from", metavar="NAME", help="fetch the ready-made .npy shards of this Hugging Face data set instead"
    )
    source.add_argument(
        "--demo", action="store_true", help="the documentation in this Python, as bytes; needs no network"
    )
    source.add_argument(
        "--check", metavar="DIR", help="make nothing: read the shards in DIR and compare them with their manifest"
    )


def add_shard_flags(parser: Parser) -> None:
    shape = parser.add_argument_group("shards")
    shape.add_argument(
        "--output",
        metavar="DIR",
        help="folder for the shards (default: edu_fineweb10B or so for FineWeb, demo_data with --demo)",
    )
    shape.add_argument("--tokenizer", choices=tuple(VOCAB_SIZES), help="encoding (default: gpt2; with --demo bytes)")
    shape.add_argument("--shard-size", type=count, metavar="N", help=f"tokens of a shard (default: {SHARD_SIZE:,})")
    shape.add_argument(
        "--max-tokens", type=count, metavar="N", help="stop after so many tokens, such as 1e9 (default: all)"
    )
    shape.add_argument("--val-fraction", type=float, metavar="F", help="hold out this share for validation (default: shard 0; a tenth of less than a shard)")  # fmt: skip
    shape.add_argument("--split-documents", action="store_true", help="cut inside a document where none ends near that share")  # fmt: skip
    work = parser.add_argument_group("work; the bytes do not depend on it")
    work.add_argument(
        "--workers", type=int, default=cores(), metavar="N", help="processes that tokenise (default: one per core)"
    )
    work.add_argument(
        "--engine",
        choices=ENGINES,
        help="encoder of gpt2 tokens (default: gigatoken, compared with tiktoken all along)",
    )
    work.add_argument("--keep-downloads", action="store_true", help="keep FineWeb's files after they are tokenised")


def cores() -> int:
    """Those that this process may use; Windows can wait for no more processes than 61."""
    found = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(found, 61) if os.name == "nt" else found


def count(text: str) -> int:
    """A whole number, also as 1e9 or 10_000_000."""
    try:
        number = Decimal(text)
        if number == int(number):
            return int(number)
    except (DecimalException, OverflowError):
        pass
    raise ValueError(text)  # in argparse's words: an invalid count value


def bad_arguments(args: argparse.Namespace) -> list[str]:
    """A sentence about each flag that cannot be followed."""
    problems = [
        f"--{name} must be {least} or more."
        for name, least in (("shard-size", 2), ("max-tokens", 2), ("workers", 1))
        if (value := getattr(args, name.replace("-", "_"))) is not None and value < least
    ]
    if args.shard_size is not None and args.shard_size > MOST_OF_A_SHARD:
        problems.append(f"--shard-size must be {MOST_OF_A_SHARD:,} or less: two shards are in memory.")
    if args.output == "":
        problems.append("--output must not be empty.")
    if args.val_fraction is not None and not 0 < args.val_fraction < 1:
        problems.append("--val-fraction must be more than 0 and less than 1.")
    sources = {
        "--input": args.input,
        "--dataset": args.dataset,
        "--shards-from": args.shards_from,
        "--demo": args.demo or None,
        "--check": args.check,
    }
    if sum(value is not None for value in sources.values()) > 1:
        problems.append(f"{', '.join(sources)} exclude each other. Choose one.")
    ours = args.dataset in (None, *hub.FINEWEBS)
    if (args.input or args.shards_from or not ours) and args.output is None:
        problems.append("name a folder for the shards with --output.")
    if args.document_separator is not None and not args.input:
        problems.append("--document-separator is for --input.")
    if args.document_separator == "":
        problems.append("--document-separator must not be empty.")
    if args.name is not None and (args.input or args.demo):
        problems.append("--name is for data sets.")
    made = (args.shard_size, args.val_fraction, args.engine)
    if args.shards_from is not None and made != (None, None, None):
        problems.append("--shards-from takes shards as they are: leave out --shard-size, --val-fraction and --engine.")
    return problems


def default_output(args: argparse.Namespace) -> str:
    if args.demo:
        return "demo_data"
    size = (args.name or "sample-10BT").removeprefix("sample-").removesuffix("T")
    return ("fineweb" if args.dataset == "HuggingFaceFW/fineweb" else "edu_fineweb") + slug(size)


def check(directory: str) -> None:
    """Reads all shards of a folder and says that they are whole.

    Raises:
        UserError: some are not; one line for each.
    """
    found, manifest = shards.verify(directory), shards.read_manifest(directory)
    against = (
        "are as in the manifest" if manifest["shards"] else "are well-formed; there is no manifest to compare with"
    )
    print(f"{directory}: {len(found)} shards, {sum(map(len, found)):,} tokens ({manifest['tokenizer']}), {against}")


def main(argv: list[str] | None = None) -> None:
    args = arguments(argv)
    if args.check is not None:
        check(args.check)
        return
    output = Path(args.output or default_output(args))
    if args.shards_from is not None:
        manifest = take_shards(args.shards_from, args.name, output, args.tokenizer, args.max_tokens)
    else:
        tokenizer = args.tokenizer or ("bytes" if args.demo else "gpt2")
        if tokenizer == "gpt2" and args.engine is None and default_engine() == "tiktoken":
            print('gigatoken is not installed: tiktoken encodes, several times slower ("pip install gigatoken")')
        get_tokenizer(tokenizer)  # fetched here, once, and not by every worker
        manifest = make_shards(
            corpus_of(args, output),
            output,
            tokenizer=tokenizer,
            engine=args.engine,
            shard_size=args.shard_size or SHARD_SIZE,
            max_tokens=args.max_tokens,
            val_fraction=args.val_fraction,
            split_documents=args.split_documents,
            workers=1 if tokenizer == "bytes" else args.workers,  # bytes need no work
        )
    made = manifest["shards"]
    tokens, documents = (sum(shard.get(key, 0) for shard in made) for key in ("tokens", "documents"))
    print(f"{output}: {tokens:,} tokens ({manifest['tokenizer']}), documents: {documents:,}, shards: {len(made)}")


def corpus_of(args: argparse.Namespace, output: Path) -> Corpus:
    """The text that the command line names."""
    if args.demo:
        return demo_source()
    if args.input:
        separator = args.document_separator
        return file_source(args.input, args.text_field, separator and separator.replace("\\n", "\n"))
    dataset = args.dataset or FINEWEB_EDU
    return dataset_source(dataset, args.name, args.split, args.text_field, output, args.keep_downloads)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as Ctrl-C: the workers end first
    run(main)
