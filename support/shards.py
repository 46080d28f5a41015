"""Token shards on disk: one-dimensional uint16 `.npy` files and the `manifest.json` beside them."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np

from support.cli import UserError
from support.tokenizer import VOCAB_SIZES

MANIFEST = "manifest.json"
_MEND = "Run the command that made these shards again."
_NAME = re.compile(r"(?P<prefix>.+)_(?P<split>train|val)_(?P<index>[0-9]{6,12})\.npy")


def name(prefix: str, split: str, index: int) -> str:
    return f"{prefix}_{split}_{index:06d}.npy"


def parse(file: str) -> re.Match[str] | None:
    """The prefix, split and index in the name of a shard; None if it is no such name."""
    return _NAME.fullmatch(file)


def paths(directory: str | os.PathLike, split: str) -> list[Path]:
    """The shards of "train" or "val" in a folder, in order of name. The split is that field of it."""
    directory = Path(directory)
    matches = [(parse(path.name), path) for path in (directory.iterdir() if directory.is_dir() else [])]
    found = [path for m, path in sorted(matches, key=lambda pair: pair[1].name) if m and m["split"] == split]
    return [path for path in found if path.is_file()]


def read_manifest(directory: str | os.PathLike) -> dict[str, Any]:
    """The manifest of a folder of shards; where another tool made them and wrote none, that of GPT-2 tokens.

    Raises:
        UserError: it is unreadable, or says that the shards were not all written.
    """
    path = Path(directory) / MANIFEST
    if not path.exists():
        return {"tokenizer": "gpt2", "vocab_size": VOCAB_SIZES["gpt2"], "source": None, "shards": []}
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        complete, tokenizer, vocab_size = manifest["complete"] is True, manifest["tokenizer"], manifest["vocab_size"]
        for shard in manifest["shards"]:
            if Path(shard["file"]).name != shard["file"] or shard["split"] not in ("train", "val"):
                raise ValueError(f"{shard['file']!r} is not a shard beside it")
            if type(shard["tokens"]) is not int:
                raise TypeError(f"tokens of {shard['file']}: {shard['tokens']!r}")
        known = VOCAB_SIZES.get(tokenizer) == vocab_size
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{path} is not a manifest of shards ({error!r}). Make the shards again.") from error
    if not complete:
        made = f"{len(manifest['shards'])} shards so far"
        raise UserError(f"the shards in {directory} are not complete ({made}). Run the same fineweb.py command again.")
    if not known:
        raise UserError(
            f"{path}: {tokenizer!r} with {vocab_size} tokens is not an encoding we know. Make the shards again."
        )
    return manifest


def complete(directory: str | os.PathLike) -> bool:
    """Whether the folder has a manifest that says that all shards were written."""
    try:
        return read_manifest(directory).get("complete", False)
    except UserError:
        return False


def write_manifest(directory: Path, manifest: dict[str, Any]) -> None:
    content = (json.dumps(manifest, indent=2) + "\n").encode()
    _write(directory / MANIFEST, content)


def write_shard(path: Path, tokens: np.ndarray) -> str:
    """Saves uint16 `tokens` under `path`, whole or not at all; returns the file's SHA-256 in hexadecimal."""
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, np.lib.format.header_data_from_array_1_0(tokens))
    return _write(path, header.getvalue(), memoryview(np.ascontiguousarray(tokens)).cast("B"))


def _write(path: Path, *parts: bytes | memoryview) -> str:
    """Puts a file in place as a whole; returns its SHA-256."""
    beside, sha256 = path.with_name(f"{path.name}.partial"), hashlib.sha256()
    beside.unlink(missing_ok=True)
    try:
        with open(beside, "xb") as file:
            for part in parts:
                file.write(part)
                sha256.update(part)
            file.flush()
            os.fsync(file.fileno())
    except OSError:  # a full disk keeps no half of a shard
        beside.unlink(missing_ok=True)
        raise
    os.replace(beside, path)
    return sha256.hexdigest()


def open_shards(directory: str | os.PathLike, split: str) -> list[np.memmap]:
    """The shards of a split, memory-mapped and checked: type, dimensions, length, and their number in the manifest.

    Raises:
        UserError: there are none, or some are not what they should be; one line for each.
    """
    found, problems = _open(directory, split)
    if not found and not problems:
        problems.append(
            f'no {split} shards in {directory}. Make them with "python fineweb.py", or try it all with "--demo".'
        )
    if problems:
        raise UserError(*problems)
    return found


def verify(directory: str | os.PathLike) -> list[np.memmap]:
    """The shards of all splits, each read from end to end: SHA-256 as in the manifest, ids within the vocabulary.

    Raises:
        UserError: there are no train shards, or some are not what they should be; one line for each.
    """
    from tqdm import tqdm  # here and not above: most runs check only what is quickly checked

    manifest = read_manifest(directory)
    sha256_of = {shard["file"]: shard.get("sha256") for shard in manifest["shards"]}
    (train, problems), (val, val_problems) = _open(directory, "train"), _open(directory, "val")
    if not train and not problems:
        raise UserError(f"no train shards in {directory}. Name a folder of shards.")
    problems += val_problems
    for tokens in tqdm([*train, *val], desc="checking shards", unit=" shards", leave=False, disable=None):
        path = Path(tokens.filename)
        with open(path, "rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        try:
            if sha256 != (sha256_of.get(path.name) or sha256):
                raise UserError(f"{path} was altered (wrong checksum). {_MEND}")
            check_ids(tokens, manifest["vocab_size"])
        except UserError as error:
            problems += error.problems
    if problems:
        raise UserError(*problems)
    return [*train, *val]


def identity(directory: str | os.PathLike, shards: list[np.memmap]) -> list[list[Any]]:
    """File name, tokens and SHA-256 of each shard: which data this is. The SHA-256 is None without a manifest."""
    sha256_of = {shard["file"]: shard.get("sha256") for shard in read_manifest(directory)["shards"]}
    names = [Path(tokens.filename).name for tokens in shards]
    return [[name, len(tokens), sha256_of.get(name)] for name, tokens in zip(names, shards, strict=True)]


def _open(directory: str | os.PathLike, split: str) -> tuple[list[np.memmap], list[str]]:
    """The shards of a split that are what they should be, and a sentence about each of the others."""
    files = paths(directory, split)
    listed = read_manifest(directory)["shards"]
    tokens_of = {shard["file"]: shard["tokens"] for shard in listed}
    lost = {shard["file"] for shard in listed if shard["split"] == split} - {path.name for path in files}
    problems = [f"{Path(directory) / name} is missing. {_MEND}" for name in sorted(lost)]
    shards = []
    for path in files:
        try:
            tokens = load(path)
        except UserError as error:
            problems += error.problems
            continue
        if listed and len(tokens) != tokens_of.get(path.name):
            says = f"{tokens_of[path.name]:,}" if path.name in tokens_of else "nothing of it"
            problems.append(f"{path} holds {len(tokens):,} tokens, and the manifest says {says}. {_MEND}")
        else:
            shards.append(tokens)
    return shards, problems


def load(path: Path) -> np.memmap:
    """A shard, memory-mapped: one-dimensional uint16.

    Raises:
        UserError: the file is something else.
    """
    try:
        tokens = np.load(path, mmap_mode="r", allow_pickle=False)
    except Exception as error:  # a damaged header can be any of the parser's errors
        reason = "it is cut short" if "mmap length" in str(error) else error  # the words of numpy
        raise UserError(f"{path} is not a readable .npy file ({reason}). {_MEND}") from error
    if not isinstance(tokens, np.memmap) or tokens.dtype != np.uint16 or tokens.ndim != 1:
        kind = f"{tokens.ndim}-dimensional {tokens.dtype}" if isinstance(tokens, np.ndarray) else "several arrays"
        raise UserError(f"{path} holds {kind}, not 1-dimensional uint16 tokens. {_MEND}")
    if len(tokens) == 0:
        raise UserError(f"{path} is empty. {_MEND}")
    return tokens


def check_ids(tokens: np.memmap, vocab_size: int) -> None:
    """Raises a UserError if a shard has ids that the vocabulary has not."""
    if tokens.max() >= vocab_size:
        raise UserError(
            f"{tokens.filename} has the id {tokens.max()} at offset {tokens.argmax()}, beyond the vocabulary of "
            f"{vocab_size:,}. {_MEND}"
        )
