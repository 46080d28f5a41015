"""Token shards on disk: one-dimensional uint16 `.npy` files with a `manifest.json` next to them."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import mmap
import os
import re
import textwrap
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from errno import EMFILE
from pathlib import Path
from typing import NotRequired, TypeAlias, TypedDict, TypeVar

import numpy as np
import numpy.typing as npt

from support import files
from support.cli import UserError, describe_error
from support.data.text_files import Setting, has_text_files
from support.data.tokenizer import (
    END_OF_TEXT,
    MALFORMED,
    MAX_VOCAB_SIZE,
    TOKENIZER_JSON,
    VOCAB_SIZES,
    Tokenizer,
    find_tokenizer,
    get_tokenizer,
)

T = TypeVar("T")

MANIFEST = "manifest.json"
ShardIdentity: TypeAlias = list[str | int]  # name, number of tokens, SHA-256 (without a manifest, of both ends only)

TOKEN = np.dtype("<u2")  # as stored in files
HASHED_TOKENS = 2**15  # at each end of a shard that no manifest lists
SEARCHED_TOKENS, LINE_LETTERS = 2**14, 20  # tokens searched for a line with this many letters, for samples to continue
_MAKE_AGAIN = "Rerun the command that made these shards."


class TokenFile(TypedDict):
    """The number of tokens and documents in a file, and its SHA-256."""

    tokens: int
    documents: int
    sha256: str


class ShardEntry(TypedDict):
    """A shard's entry in a manifest."""

    file: str
    split: str  # "train" or "val"
    tokens: int
    documents: NotRequired[int]
    sha256: NotRequired[str]


class Manifest(TypedDict):
    """The content of `manifest.json`, which describes a folder of shards."""

    tokenizer: str
    vocab_size: int
    tokenizer_sha256: NotRequired[str]  # SHA-256 of `tokenizer.json`; only for a trained tokenizer
    source: str | None
    revision: NotRequired[str | None]
    settings: NotRequired[dict[str, Setting]]
    complete: NotRequired[bool]
    cuts: NotRequired[str]  # SHA-256 of where the text is cut into parts
    parts: NotRequired[list[int]]  # number of tokens in each part, up to the last one that the shards needed
    shards: list[ShardEntry]


def shard_name(prefix: str, split: str, index: int) -> str:
    """Returns the file name of a shard, such as `edufineweb_train_000001.npy`."""
    return f"{prefix}_{split}_{index:06d}.npy"


def shard_paths(directory: str | os.PathLike[str], split: str) -> list[Path]:
    """Returns the shards of a split, "train" or "val", sorted by name; none if the directory does not exist."""
    paths = Path(directory).glob(f"*_{split}_*.npy")
    return sorted(p for p in paths if re.fullmatch(rf".+_{split}_[0-9]{{6,12}}\.npy", p.name) and p.is_file())


class DataIdentity(TypedDict):
    """The data that a run is trained on."""

    train: list[ShardIdentity]
    val: list[ShardIdentity]
    base: str | None  # SHA-256 of the weights that LoRA leaves unchanged
    source: str | None  # the text's name in the manifest, for display


@dataclass(frozen=True)
class TokenData:
    """The data of a run: the opened shards of a folder, and the tokenizer they were made with."""

    folder: str
    train: list[np.memmap]
    val: list[np.memmap]  # may be empty
    tokenizer: Tokenizer

    @classmethod
    def open(cls, folder: str, needs_val: bool = True, model: Path | None = None) -> TokenData:
        """Opens the shards after a quick check. Without `needs_val`, there may be no val shards.

        Args:
            model: as in `read_tokenizer`.

        Raises:
            UserError: shards are missing or fail the check, or the tokenizer cannot be read.
        """
        train = open_shards(folder, "train")
        val = open_shards(folder, "val") if needs_val or shard_paths(folder, "val") else []
        return cls(folder, train, val, read_tokenizer(folder, model))

    def targets(self, T: int, val_tokens: int) -> list[npt.NDArray[np.uint16]]:
        """Returns the target tokens of a validation of `val_tokens` tokens: for each shard, the targets of its rows.

        Without a validation split, they come from the train split.
        """
        targets = list[npt.NDArray[np.uint16]]()
        left = max(1, val_tokens // T)  # rows; without validation, `val_tokens` may be too few for one
        for shard in self.val if any(rows_in_shard(len(shard), T) for shard in self.val) else self.train:
            rows = min(left, rows_in_shard(len(shard), T))
            targets.append(shard[1 : 1 + rows * T])
            left -= rows
        return targets

    @functools.cached_property
    def beginning(self) -> str:
        """The first words of a line, for samples to continue: from the validation split or, without one, the train split.

        The line is the first with at least LINE_LETTERS letters, or else the longest. The split may begin inside a line.
        """
        tokens = read_tokens((self.val or self.train)[0], 0, SEARCHED_TOKENS, self.tokenizer.vocab_size)
        text = self.tokenizer.decode(tokens.tolist()).replace(END_OF_TEXT, "\n").strip("\ufffd")
        printable = "".join(c if c.isprintable() or c == "\n" else " " for c in text)
        rest, *lines = [" ".join(line.split()) for line in printable.split("\n")]
        lines.append(rest.partition(" ")[2] or rest)  # its first word may be cut
        line = next((line for line in lines if sum(map(str.isalpha, line)) >= LINE_LETTERS), max(lines, key=len))
        columns = 40 if " " in line[:40] else 12  # six or seven words, or as much Chinese
        return next(iter(textwrap.wrap(line, columns, break_on_hyphens=False)), "")

    def check_rows(self, T: int, step_rows: int, val_tokens: int | None, shuffle: bool = False) -> None:
        """Checks that there are enough rows of T tokens for a step, and one to validate on.

        Args:
            val_tokens: tokens to validate on, at most; None without validation.

        Raises:
            UserError: there are too few.
        """
        train_rows = sum(rows_in_shard(len(shard), T, shuffle) for shard in self.train)
        val_rows = sum(rows_in_shard(len(shard), T) for shard in self.val)
        if train_rows < step_rows:
            raise UserError(
                f"{self.folder} has {train_rows} rows of {T} tokens to train on, and one step takes {step_rows}. "
                "Use more text, or lower --total-batch-size or --block-size."
            )
        if val_tokens is not None and (val_rows == 0 or val_tokens < T):
            raise UserError(
                f"no row of {T} tokens to validate on in {self.folder}. Use more text, a lower --block-size, or "
                "--val-every 0."
            )


# -----------------------------------------------------------------------------
# The manifest


def load_manifest(directory: str | os.PathLike[str]) -> Manifest | None:
    """Returns the manifest of a folder, whether its shards are complete or not; None if there is none.

    Raises:
        UserError: the file is not a manifest.
    """
    path = Path(directory) / MANIFEST
    if not path.exists():
        return None
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        for entry in manifest["shards"]:
            if Path(entry["file"]).name != entry["file"]:
                raise ValueError(f"shard {entry}")
            if min(entry["tokens"], entry.get("documents", 0)) < 0:
                raise ValueError(f"negative numbers in {entry}")
        if any(type(count) is not int or count < 0 for count in manifest.setdefault("parts", [])):
            raise ValueError(f"parts {manifest['parts']}")
        if not isinstance(manifest.setdefault("source", None), str | None):
            raise TypeError(f"source {manifest['source']!r}")
        manifest["complete"] = manifest["complete"] is True
        manifest.setdefault("settings", {}).items()
        tokenizer, vocab_size = manifest["tokenizer"], manifest["vocab_size"]  # 0 until the tokenizer is trained
        sizes = range(257, MAX_VOCAB_SIZE + 1) if tokenizer == "bpe" else [VOCAB_SIZES[tokenizer]]
        if manifest["complete"] and vocab_size not in sizes:
            raise ValueError(f"{tokenizer} with {vocab_size} tokens")
    except MALFORMED as error:
        problem = (
            f"{path} is not a manifest of shards ({error!r}). Restore it, or make the shards again in another folder."
        )
        raise UserError(problem) from error
    return manifest


def read_manifest(directory: str | os.PathLike[str]) -> Manifest:
    """Returns the manifest of a folder of shards. Shards without one, from another tool, are assumed to be GPT-2 tokens.

    Raises:
        UserError: the manifest cannot be read, or says that the shards are incomplete; or there is no manifest, but a
            `tokenizer.json` that is not GPT-2's.
    """
    manifest = load_manifest(directory)
    if manifest is None:
        tokenizer = find_tokenizer(Path(directory))
        if tokenizer and not tokenizer.is_gpt2:
            raise UserError(f"{directory} has a tokenizer of its own, but no {MANIFEST} to say so. {_MAKE_AGAIN}")
        return {"tokenizer": "gpt2", "vocab_size": VOCAB_SIZES["gpt2"], "source": None, "shards": []}
    if not manifest["complete"]:
        finished = len(manifest["shards"])
        raise UserError(
            f"the shards in {directory} are not complete ({finished} so far). Run the same fineweb.py command again, "
            "without --only-parts."
        )
    return manifest


def read_tokenizer(directory: str | os.PathLike[str], model: Path | None = None) -> Tokenizer:
    """Returns the tokenizer of a folder of shards.

    Args:
        model: the folder of a model, whose `tokenizer.json` has GPT-2's tokenizer if the shards' folder has none: version
            2.0 wrote only trained ones there.

    Raises:
        UserError: the manifest or the tokenizer cannot be read; or `tokenizer.json` was altered, or is missing and was
            trained.
    """
    manifest, path = read_manifest(directory), Path(directory) / TOKENIZER_JSON
    name, is_trained = manifest["tokenizer"], manifest["tokenizer"] == "bpe"
    if not path.exists() and not is_trained:
        return get_tokenizer(name, *filter(None, [model]))
    is_intact = path.is_file() and has_intact_tokenizer(directory, manifest)
    tokenizer = find_tokenizer(path.parent) if is_intact else None
    if tokenizer is None or tokenizer.name != name:
        raise UserError(f"{path} is missing, or was altered. {_MAKE_AGAIN}")
    return tokenizer


def has_intact_tokenizer(directory: str | os.PathLike[str], manifest: Manifest) -> bool:
    """Returns whether `tokenizer.json` is still the one that the shards were made with; True if none was trained."""
    path, sha256 = Path(directory) / TOKENIZER_JSON, manifest.get("tokenizer_sha256")
    return sha256 is None or path.is_file() and files.sha256_of(path) == sha256


def is_complete(directory: str | os.PathLike[str]) -> bool:
    """Returns whether the folder's manifest says that all shards were written, and they are still there."""
    try:
        manifest = read_manifest(directory)
    except UserError:
        return False
    return manifest.get("complete", False) and all(
        (Path(directory) / entry["file"]).is_file() for entry in manifest["shards"]
    )


# -----------------------------------------------------------------------------
# Shards


def load_shard(path: Path, entry: ShardEntry | None = None, verify: bool = False) -> np.memmap:
    """Returns a memory-mapped shard: one-dimensional uint16.

    Args:
        entry: the shard's entry in the manifest: the length and, with `verify`, the checksum must match.

    Raises:
        UserError: the file is not a shard, does not match the entry, or cannot be opened.
    """
    try:
        with warnings.catch_warnings(action="ignore"):  # numpy warns about headers in Python 2's format
            tokens = np.lib.format.open_memmap(path, mode="r")
    except Exception as error:  # numpy's header parser raises many kinds of them
        raise UserError(f"{path} is not a readable .npy file ({describe_error(error)}). {_MAKE_AGAIN}") from error
    if tokens.dtype != np.uint16 or tokens.ndim != 1 or len(tokens) == 0:
        content = f"{tokens.ndim}-dimensional {tokens.dtype}" if tokens.size else "nothing"
        raise UserError(f"{path} holds {content}, not 1-dimensional uint16 tokens. {_MAKE_AGAIN}")
    if path.stat().st_size != tokens.offset + tokens.nbytes:
        raise UserError(f"{path} is longer than the {len(tokens):,} tokens that its header says. {_MAKE_AGAIN}")
    if entry and entry["tokens"] != len(tokens):
        raise UserError(f"{path} does not match the manifest: it has {len(tokens):,} tokens. {_MAKE_AGAIN}")
    if entry and verify and entry.get("sha256") not in (None, files.sha256_of(path)):
        raise UserError(f"{path} was altered (wrong checksum). {_MAKE_AGAIN}")
    return tokens


def read_tokens(shard: np.memmap, start: int, count: int, vocab_size: int) -> npt.NDArray[np.uint16]:
    """Returns `count` tokens of a shard, from `start` on.

    Raises:
        UserError: the file was truncated since it was opened, or a token id is not in the vocabulary.
    """
    # reading a page that the file no longer has would kill the process (SIGBUS)
    if isinstance(shard.base, mmap.mmap) and shard.base.size() < shard.offset + shard.nbytes:
        raise UserError(f"{shard.filename} was truncated while it was in use. {_MAKE_AGAIN}", this_rank_only=True)
    tokens = shard[start : start + count]
    if tokens.max() >= vocab_size:
        raise UserError(
            f"{shard.filename} has the id {tokens.max()} at offset {start + int(tokens.argmax())}, beyond the "
            f"vocabulary of {vocab_size:,}. Make the shards again, with the model's tokenizer.",
            this_rank_only=True,
        )
    return tokens


def open_shards(directory: str | os.PathLike[str], *splits: str) -> list[np.memmap]:
    """Returns the memory-mapped shards of some splits. Checks types and dimensions, and compares lengths with the manifest.

    Raises:
        UserError: there are none, or some fail the check; one line for each.
    """
    return _for_each_shard(directory, splits, load_shard)


def read_shards(directory: str | os.PathLike[str]) -> list[int]:
    """Reads all shards, one at a time, and returns the number of tokens in each.

    Besides what `open_shards` checks, it compares their checksums with the manifest, and their ids with the vocabulary.

    Raises:
        UserError: as `open_shards`.
    """

    def read(path: Path, entry: ShardEntry | None) -> int:
        tokens = load_shard(path, entry, verify=True)
        return len(read_tokens(tokens, 0, len(tokens), vocab_size))

    vocab_size = read_manifest(directory)["vocab_size"]
    return _for_each_shard(directory, ("train", "val"), read, quiet=None)


def _for_each_shard(
    directory: str | os.PathLike[str], splits: Sequence[str], load: Callable[[Path, ShardEntry | None], T],
    quiet: bool | None = True,
) -> list[T]:  # fmt: skip
    """Returns what `load` returns for each shard of some splits, called with its path and its entry in the manifest.

    Args:
        quiet: None shows a progress bar on a terminal.

    Raises:
        UserError: there are none, or `load` raised for some; one line for each.
    """
    from tqdm import tqdm

    if Path(directory).is_file():
        raise UserError(f"{directory} is a file, not a folder of shards. To train on a text, pass it with --text.")
    manifest = read_manifest(directory)
    listed = {entry["file"]: entry for entry in manifest["shards"]}
    names = {path.name for split in splits for path in shard_paths(directory, split)}
    names |= {entry["file"] for entry in manifest["shards"] if entry.get("split") in splits}
    if not names and not Path(directory).exists():
        advice = 'Name one with shards, make them with "python fineweb.py", or try it all with "--demo".'
        raise UserError(f"there is no folder {directory}. {advice}")
    if not names and has_text_files(Path(directory)):
        raise UserError(f"{directory} has text, not shards. To train on a text, pass it with --text.")
    if not names:
        raise UserError(
            f'no {splits[0]} shards in {directory}. Make them with "python fineweb.py", or try it all with "--demo".'
        )
    _raise_open_file_limit(len(names))
    loaded, problems = list[T](), list[str]()
    for name in tqdm(sorted(names), "checking shards", unit=" shards", leave=False, delay=1, disable=quiet):
        path = Path(directory) / name
        try:
            if listed and name not in listed:
                raise UserError(f"{path} is not in the manifest. Move it out of the folder.")
            loaded.append(load(path, listed.get(name)))
        except UserError as error:
            if getattr(error.__cause__, "errno", None) == EMFILE:  # nothing is wrong with the shard
                raise UserError(
                    f"{directory} has {len(names):,} shards, more files than a process may open here. Raise the limit with "
                    f"ulimit -n {len(names) + 1024}, or make larger shards: fineweb.py --shard-size 1e9."
                ) from error
            problems += error.problems
    if problems:
        raise UserError(*problems)
    return loaded


def _raise_open_file_limit(num_shards: int) -> None:
    """Raises the limit on open files, often 1,024, if possible: a mapped file stays open."""
    with contextlib.suppress(ImportError, OSError, ValueError):  # Windows has no such limit
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft + num_shards, hard), hard))


def rows_in_shard(tokens: int, T: int, shuffle: bool = False) -> int:
    """Returns the number of rows of T+1 tokens in a shard. The last target of a row is also the first input of the next one.

    With `shuffle`, there is one row fewer: the first row may start at any of the first T tokens.
    """
    return max(0, (tokens - 1) // T - shuffle)


# -----------------------------------------------------------------------------
# Identity of the data that a run was trained on


def identify(data: TokenData) -> tuple[list[ShardIdentity], list[ShardIdentity], str | None]:
    """Returns identities of the train and val shards, and the source in their manifest."""
    manifest = read_manifest(data.folder)
    sha256_of = {entry["file"]: entry.get("sha256") for entry in manifest["shards"]}

    def identity(tokens: np.memmap) -> ShardIdentity:
        name = Path(str(tokens.filename)).name
        return [name, len(tokens), sha256_of.get(name) or sha256_of_ends(tokens)]

    def sha256_of_ends(tokens: np.memmap) -> str:  # reading all shards would take minutes
        ends = tokens[:HASHED_TOKENS].tobytes() + tokens[-HASHED_TOKENS:].tobytes()
        return f"ends {hashlib.sha256(ends).hexdigest()}"

    return [identity(shard) for shard in data.train], [identity(shard) for shard in data.val], manifest["source"]


def find_difference(before: list[ShardIdentity], now: list[ShardIdentity]) -> str | None:
    """Describes the first shard that differs from the run's own; None if all agree or one list is empty."""
    if not before or not now:
        return None
    for had, has in zip(before, now, strict=False):
        if had != has:
            return f"{had[0]} differs"
    return f"{len(now)} instead of {len(before)}" if len(before) != len(now) else None
