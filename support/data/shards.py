"""Token shards on disk: one-dimensional uint16 `.npy` files with a `manifest.json` next to them."""

from __future__ import annotations

import errno
import functools
import hashlib
import json
import mmap
import os
import re
import textwrap
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import NotRequired, TypeAlias, TypedDict

import numpy as np
import numpy.typing as npt

from support import files
from support.cli import UserError
from support.data.tokenizer import (
    END_OF_TEXT,
    MAX_VOCAB_SIZE,
    TOKENIZER_JSON,
    VOCAB_SIZES,
    Tokenizer,
    find_tokenizer,
    get_tokenizer,
)

MANIFEST = "manifest.json"
Setting: TypeAlias = str | int | float | bool | None
ShardIdentity: TypeAlias = list[str | int | None]  # file name, tokens, SHA-256; without a manifest, that of both ends

TOKENS_OF_AN_END, ENDS_PREFIX = 2**15, "ends "  # of a shard without a manifest, which is known by its ends
OTHER_OPEN_FILES = 256  # that a process opens besides shards
TOKENS_WITH_A_LINE, LINE_LETTERS = 2**14, 20  # of a text whose beginning is to be continued
_MAKE_AGAIN = "Run the command that made these shards again."
_SHARD_NAME = re.compile(r"(?P<prefix>.+)_(?P<split>train|val)_(?P<index>[0-9]{6,12})\.npy")


class ShardEntry(TypedDict):
    """What a manifest says about a shard."""

    file: str
    split: str  # "train" or "val"; "unsplit" for a part of a corpus that is not split yet
    tokens: int
    documents: NotRequired[int]
    sha256: NotRequired[str]
    end: NotRequired[str]  # JSON: where the next shard begins, see `shard_writer.StreamPosition`


class Manifest(TypedDict):
    """What `manifest.json` says about a folder of shards. The last two keys exist only while the shards are made."""

    tokenizer: str
    vocab_size: int
    tokenizer_sha256: NotRequired[str]  # of the `tokenizer.json` of a trained one
    source: str | None
    revision: NotRequired[str | None]
    settings: NotRequired[dict[str, Setting]]
    complete: NotRequired[bool]
    shards: list[ShardEntry]
    unsplit: NotRequired[list[ShardEntry]]  # parts of a corpus, to be split into train and val when all are there
    unsplit_complete: NotRequired[bool]


@dataclass(frozen=True)
class ShardName:
    """The fields of a shard's file name."""

    prefix: str
    split: str
    index: int


def shard_name(prefix: str, split: str, index: int) -> str:
    """The file name of a shard, such as `edufineweb_train_000001.npy`."""
    return f"{prefix}_{split}_{index:06d}.npy"


def parse_shard_name(file: str) -> ShardName | None:
    """The fields of a file name, or None if it is not that of a shard."""
    match = _SHARD_NAME.fullmatch(file)
    return ShardName(match["prefix"], match["split"], int(match["index"])) if match else None


def shard_paths(directory: str | os.PathLike[str], split: str) -> list[Path]:
    """The shards of a split, "train" or "val", in order of their names; none if there is no such directory."""
    directory = Path(directory)
    paths = sorted(directory.iterdir()) if directory.is_dir() else []
    return [p for p in paths if (name := parse_shard_name(p.name)) and name.split == split and p.is_file()]


class DataIdentity(TypedDict):
    """Which data a run is trained on: file name, tokens and SHA-256 of each shard, and the frozen weights' SHA-256.

    `source` is the manifest's name of the text, for people; older checkpoints lack it.
    """

    train: list[ShardIdentity]
    val: list[ShardIdentity]
    base: str | None
    source: NotRequired[str | None]


@dataclass(frozen=True)
class TokenData:
    """The data of a run: the opened shards of a folder, and the tokenizer that they were made with."""

    folder: str
    train: list[np.memmap]
    val: list[np.memmap]  # may be empty
    tokenizer: Tokenizer

    @classmethod
    def open(cls, folder: str, needs_val: bool = True) -> TokenData:
        """Opens the shards after a quick check; those of the validation split if there are any, or they are needed.

        Raises:
            UserError: shards are missing or fail the check, or the tokenizer cannot be read.
        """
        train = open_shards(folder, "train")
        val = open_shards(folder, "val") if needs_val or shard_paths(folder, "val") else []
        return cls(folder, train, val, read_tokenizer(folder))

    @functools.cached_property
    def bytes_per_token(self) -> float:
        """See the function of this name; of the validation split, if there is one."""
        return bytes_per_token((self.val or self.train)[0], self.tokenizer)

    @functools.cached_property
    def beginning(self) -> str:
        """The first words of a line of the validation split, for samples to continue; of the train split without one.

        It is the first line with LINE_LETTERS letters, or else the longest. The split may begin inside a line.
        """
        tokens = read_tokens((self.val or self.train)[0], 0, TOKENS_WITH_A_LINE, self.tokenizer.vocab_size)
        text = self.tokenizer.decode(tokens.tolist()).replace(END_OF_TEXT, "\n").strip("\ufffd")
        printable = "".join(c if c.isprintable() or c == "\n" else " " for c in text)
        rest, *lines = [" ".join(line.split()) for line in printable.split("\n")]
        lines.append(rest.partition(" ")[2] or rest)  # without what may be half a word
        line = next((line for line in lines if sum(map(str.isalpha, line)) >= LINE_LETTERS), max(lines, key=len))
        columns = 40 if " " in line[:40] else 12  # six or seven words, or what is as much in Chinese
        return next(iter(textwrap.wrap(line, columns, break_on_hyphens=False)), "")

    def check_rows(self, T: int, step_rows: int, val_tokens: int | None) -> None:
        """Checks that there are the rows of T tokens that a step takes, and one to validate on.

        Args:
            val_tokens: tokens to validate on at most; None without validation.

        Raises:
            UserError: there are fewer.
        """
        train_rows, val_rows = (sum(rows_in_shard(shard, T) for shard in split) for split in (self.train, self.val))
        if train_rows < step_rows:
            raise UserError(
                f"{self.folder} has {train_rows} train row{'' if train_rows == 1 else 's'} of {T} tokens, and one step "
                f"takes {step_rows}. Use more text, or lower --total-batch-size or --block-size."
            )
        if val_tokens is not None and (val_rows == 0 or val_tokens < T):
            raise UserError(
                f"no row of {T} tokens to validate on in {self.folder}. Use more text, a lower --block-size, or "
                "--val-every 0."
            )


# -----------------------------------------------------------------------------
# The manifest


def read_manifest(directory: str | os.PathLike[str]) -> Manifest:
    """The manifest of a folder of shards. Shards without one, made by another tool, are assumed to be GPT-2 tokens.

    Raises:
        UserError: the manifest cannot be read, or says that the shards are incomplete; or there is none, and a
            `tokenizer.json` which is not GPT-2's.
    """
    path = Path(directory) / MANIFEST
    if not path.exists():
        if find_tokenizer(Path(directory)) not in (None, "gpt2"):
            raise UserError(f"{directory} has a tokenizer of its own, but no {MANIFEST} to say so. {_MAKE_AGAIN}")
        return {"tokenizer": "gpt2", "vocab_size": VOCAB_SIZES["gpt2"], "source": None, "shards": []}
    try:
        manifest: Manifest = json.loads(path.read_text(encoding="utf-8"))
        complete, tokenizer, vocab_size = manifest["complete"] is True, manifest["tokenizer"], manifest["vocab_size"]
        for shard in manifest["shards"]:
            if Path(shard["file"]).name != shard["file"] or shard["split"] not in ("train", "val"):
                raise ValueError(f"{shard['file']!r} is not the name of a shard")
            if type(shard["tokens"]) is not int:
                raise TypeError(f"tokens of {shard['file']}: {shard['tokens']!r}")
        if not isinstance(manifest.setdefault("source", None), str | None):
            raise TypeError(f"source: {manifest['source']!r}")
        sizes = range(257, MAX_VOCAB_SIZE + 1) if tokenizer == "bpe" else [VOCAB_SIZES.get(tokenizer)]
        tokenizer_is_known = type(vocab_size) is int and vocab_size in sizes
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{path} is not a manifest of shards ({error!r}). Make the shards again.") from error
    if not complete:
        finished = len(manifest["shards"])
        raise UserError(
            f"the shards in {directory} are not complete ({finished} so far). Run the same fineweb.py command again."
        )
    if not tokenizer_is_known:
        raise UserError(
            f"{path} names an unknown tokenizer, {tokenizer!r} with {vocab_size} tokens. Make the shards again."
        )
    return manifest


def read_tokenizer(directory: str | os.PathLike[str]) -> Tokenizer:
    """The tokenizer of a folder of shards.

    Raises:
        UserError: the manifest, or a `tokenizer.json` next to it, cannot be read or was altered.
    """
    manifest = read_manifest(directory)
    if manifest["tokenizer"] != "bpe":
        return get_tokenizer(manifest["tokenizer"])
    path = Path(directory).absolute() / TOKENIZER_JSON
    if not path.is_file() or files.sha256_of(path) != manifest.get("tokenizer_sha256"):
        raise UserError(f"{path} is missing, or was altered. {_MAKE_AGAIN}")
    return get_tokenizer(str(path))


def is_complete(directory: str | os.PathLike[str]) -> bool:
    """Whether the folder has a manifest that says that all shards were written."""
    try:
        return read_manifest(directory).get("complete", False)
    except UserError:
        return False


def write_manifest(directory: Path, manifest: Manifest) -> None:
    with files.atomic_write(directory / MANIFEST) as tmp:
        tmp.write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8", newline="\n")


# -----------------------------------------------------------------------------
# Shards


def write_shard(path: Path, tokens: npt.NDArray[np.uint16]) -> str:
    """Writes one-dimensional tokens to `path`; returns the SHA-256 of the file, in hexadecimal."""
    with files.atomic_write(path) as tmp:
        with open(tmp, "wb") as file:
            np.lib.format.write_array_header_1_0(file, np.lib.format.header_data_from_array_1_0(tokens))
            file.write(np.ascontiguousarray(tokens).data.cast("B"))  # np.save does not say that a disk is full
        return files.sha256_of(tmp)


def load_shard(path: Path) -> np.memmap:
    """A memory-mapped shard: one-dimensional uint16.

    Raises:
        UserError: the file is something else.
    """
    try:
        with warnings.catch_warnings(action="ignore"):  # numpy warns about headers in Python 2's format
            tokens = np.load(path, mmap_mode="r", allow_pickle=False)
    except Exception as error:  # numpy's parser of the header raises many kinds
        if isinstance(error, OSError) and error.errno == errno.EMFILE:
            raise UserError(f"too many shards to open them all, at {path}. Raise the limit with ulimit -n.") from error
        reason = "it is truncated" if "mmap length" in str(error) else error
        raise UserError(f"{path} is not a readable .npy file ({reason}). {_MAKE_AGAIN}") from error
    if not isinstance(tokens, np.memmap) or tokens.dtype != np.uint16 or tokens.ndim != 1:
        content = f"{tokens.ndim}-dimensional {tokens.dtype}" if isinstance(tokens, np.ndarray) else "several arrays"
        raise UserError(f"{path} holds {content}, not 1-dimensional uint16 tokens. {_MAKE_AGAIN}")
    if len(tokens) == 0:
        raise UserError(f"{path} is empty. {_MAKE_AGAIN}")
    return tokens


def read_tokens(shard: np.memmap, start: int, count: int, vocab_size: int) -> npt.NDArray[np.uint16]:
    """`count` tokens of a shard, from `start` on.

    Raises:
        UserError: the file was truncated since it was opened, or a token id is not in the vocabulary.
    """
    # Reading a page that the file no longer has would kill the process (SIGBUS).
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


def open_shards(directory: str | os.PathLike[str], split: str) -> list[np.memmap]:
    """The memory-mapped shards of a split, after a quick check: types, dimensions, and lengths as in the manifest.

    Raises:
        UserError: there are none, or some fail the check; one line for each.
    """
    shards, problems = _open_split(directory, split)
    if not shards and Path(directory).is_file():
        problems = [f"{directory} is a file, not a folder of shards. To train on a text, pass it with --text."]
    elif not shards and not problems:
        problems.append(
            f'no {split} shards in {directory}. Make them with "python fineweb.py", or try it all with "--demo".'
        )
    if problems:
        raise UserError(*problems)
    return shards


def verify_shards(directory: str | os.PathLike[str]) -> list[np.memmap]:
    """The shards of both splits, after reading all of them: SHA-256 as in the manifest, ids within the vocabulary.

    Raises:
        UserError: there are no train shards, or some shards fail the check; one line for each.
    """
    from tqdm import tqdm

    manifest = read_manifest(directory)
    if manifest["tokenizer"] == "bpe":
        read_tokenizer(directory)
    expected_sha256 = {shard["file"]: shard.get("sha256") for shard in manifest["shards"]}
    (train, problems), (val, val_problems) = _open_split(directory, "train"), _open_split(directory, "val")
    if not train and not problems:
        raise UserError(f"no train shards in {directory}. Use a folder of shards.")
    problems += val_problems
    for tokens in tqdm([*train, *val], desc="checking shards", unit=" shards", leave=False, delay=1, disable=None):
        path = _path_of(tokens)
        if expected_sha256.get(path.name) not in (None, files.sha256_of(path)):
            problems.append(f"{path} was altered (wrong checksum). {_MAKE_AGAIN}")
            continue
        try:
            check_ids(tokens, manifest["vocab_size"])
        except UserError as error:
            problems += error.problems
    if problems:
        raise UserError(*problems)
    return [*train, *val]


def bytes_per_token(tokens: np.memmap, tokenizer: Tokenizer) -> float:
    """Bytes of text in a token, on average over the beginning of a shard: nats per token over this are nats per byte."""
    sample = tokens[: 1 << 20]
    return tokenizer.count_bytes(sample) / len(sample)


def rows_in_shard(shard: np.memmap, T: int) -> int:
    """Number of rows of T+1 tokens. Neighbours share a token: the last target of one is the first input of the next."""
    return max(0, (len(shard) - 1) // T)


def check_ids(tokens: np.memmap, vocab_size: int) -> None:
    """Raises a UserError if a shard has an id that is not in the vocabulary."""
    if tokens.max() >= vocab_size:
        raise UserError(
            f"{tokens.filename} has the id {tokens.max()} at offset {tokens.argmax()}, beyond the vocabulary of "
            f"{vocab_size:,}. {_MAKE_AGAIN}"
        )


def identify(data: TokenData) -> tuple[list[ShardIdentity], list[ShardIdentity], str | None]:
    """The train and val shards, to recognise them, and what their manifest says about the text."""
    manifest = read_manifest(data.folder)
    sha256_of = {shard["file"]: shard.get("sha256") for shard in manifest["shards"]}

    def identity(tokens: np.memmap) -> ShardIdentity:
        name = _path_of(tokens).name
        return [name, len(tokens), sha256_of.get(name) or _sha256_of_ends(tokens)]

    return [identity(shard) for shard in data.train], [identity(shard) for shard in data.val], manifest["source"]


def find_difference(before: list[ShardIdentity], now: list[ShardIdentity], folder: str) -> str | None:
    """In what the shards in `folder` are not those that a run had before; None if they are, or one list is empty."""
    if not before or not now:
        return None
    differ = [b[0] for b, n in zip(before, now, strict=False) if not _is_same_shard(b, n, folder)]
    if differ:
        return f"{differ[0]} differs"
    return f"{len(now)} instead of {len(before)}" if len(before) != len(now) else None


def _sha256_of_ends(tokens: np.memmap) -> str:
    ends = hashlib.sha256(tokens[:TOKENS_OF_AN_END].tobytes() + tokens[-TOKENS_OF_AN_END:].tobytes())
    return ENDS_PREFIX + ends.hexdigest()


def _is_same_shard(before: ShardIdentity, now: ShardIdentity, folder: str) -> bool:
    had, has = (None if entry[2] is None else str(entry[2]) for entry in (before, now))
    if had and has and had.startswith(ENDS_PREFIX) != has.startswith(ENDS_PREFIX):  # only one had a manifest
        path = Path(folder) / str(now[0])
        has = _sha256_of_ends(load_shard(path)) if had.startswith(ENDS_PREFIX) else files.sha256_of(path)
    return before[:2] == now[:2] and (had is None or has is None or had == has)


def _open_split(directory: str | os.PathLike[str], split: str) -> tuple[list[np.memmap], list[str]]:
    """The shards of a split that pass the quick check, and a sentence about each of the others."""
    paths = shard_paths(directory, split)
    _raise_open_file_limit(len(paths))
    listed = read_manifest(directory)["shards"]
    expected_tokens = {shard["file"]: shard["tokens"] for shard in listed}
    missing = {shard["file"] for shard in listed if shard["split"] == split} - {path.name for path in paths}
    problems = [f"{Path(directory) / name} is missing. {_MAKE_AGAIN}" for name in sorted(missing)]
    shards = []
    for path in paths:
        try:
            tokens = load_shard(path)
        except UserError as error:
            problems += error.problems
            continue
        if listed and path.name not in expected_tokens:
            problems.append(f"{path} is not in the manifest. {_MAKE_AGAIN}")
        elif listed and len(tokens) != expected_tokens[path.name]:
            expected = expected_tokens[path.name]
            problems.append(f"{path} has {len(tokens):,} tokens, not {expected:,} as in the manifest. {_MAKE_AGAIN}")
        else:
            shards.append(tokens)
    return shards, problems


def _raise_open_file_limit(num_shards: int) -> None:
    """Allows more open files, often only 1,024, as far as needed and possible: a mapped file stays open."""
    try:
        import resource
    except ImportError:  # on Windows, where there is no such limit
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = len(os.listdir("/dev/fd")) + num_shards + OTHER_OPEN_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        new_limit = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (new_limit, hard))


def _path_of(tokens: np.memmap) -> Path:
    assert tokens.filename is not None  # a shard is mapped from a file
    return Path(tokens.filename)
