"""Token shards on disk: one-dimensional uint16 `.npy` files and the `manifest.json` beside them."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from support.cli import UserError
from support.tokenizer import VOCAB_SIZES

MANIFEST = "manifest.json"
_MEND = "Run the command that made these shards again."
_NAME = re.compile(r"(?P<prefix>.+)_(?P<split>train|val)_(?P<index>\d{6,})\.npy")


def name(prefix: str, split: str, index: int) -> str:
    return f"{prefix}_{split}_{index:06d}.npy"


def paths(directory: str | os.PathLike, split: str) -> list[Path]:
    """The shards of "train" or "val" in a folder, in order of name. The split is that field of it."""
    directory = Path(directory)
    matches = [(_NAME.fullmatch(path.name), path) for path in (directory.iterdir() if directory.is_dir() else [])]
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
        raise UserError(f'the shards in {directory} are not complete ({made}). Run the same "python fineweb.py" again.')
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
    beside = directory / f"{MANIFEST}.partial"
    beside.write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    os.replace(beside, directory / MANIFEST)


def write_shard(path: Path, tokens: np.ndarray) -> str:
    """Saves uint16 `tokens` under `path`, whole or not at all; returns the file's SHA-256 in hexadecimal."""
    beside = path.with_name(f"{path.name}.partial")
    with open(beside, "wb") as file:
        np.save(file, tokens, allow_pickle=False)
        file.flush()
        os.fsync(file.fileno())
    with open(beside, "rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    os.replace(beside, path)
    return sha256


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


def make_demo(directory: str | os.PathLike) -> None:
    """Makes the shards of the demo with fineweb.py.

    Raises:
        UserError: it failed, and has said why.
    """
    fineweb = Path(__file__).parents[1] / "fineweb.py"
    if subprocess.run([sys.executable, fineweb, "--demo", "--output", directory]).returncode:
        raise UserError("the demo text could not be made, see above.", this_rank_only=True)


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
        if sha256 != (sha256_of.get(path.name) or sha256):
            problems.append(f"{path} was altered (wrong checksum). {_MEND}")
        elif tokens.max() >= manifest["vocab_size"]:
            problems.append(
                f"{path} has the id {tokens.max()} at offset {tokens.argmax()}, beyond the vocabulary of "
                f"{manifest['vocab_size']:,}. {_MEND}"
            )
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
            tokens = np.load(path, mmap_mode="r", allow_pickle=False)
        except Exception as error:  # a damaged header can be any of the parser's errors
            reason = "it is cut short" if "mmap length" in str(error) else error  # the words of numpy
            problems.append(f"{path} is not a readable .npy file ({reason}). {_MEND}")
            continue
        if not isinstance(tokens, np.memmap) or tokens.dtype != np.uint16 or tokens.ndim != 1:
            kind = f"{tokens.ndim}-dimensional {tokens.dtype}" if isinstance(tokens, np.ndarray) else "several arrays"
            problems.append(f"{path} holds {kind}, not 1-dimensional uint16 tokens. {_MEND}")
        elif len(tokens) == 0:
            problems.append(f"{path} is empty. {_MEND}")
        elif listed and len(tokens) != tokens_of.get(path.name):
            says = f"{tokens_of[path.name]:,}" if path.name in tokens_of else "nothing of it"
            problems.append(f"{path} holds {len(tokens):,} tokens, and the manifest says {says}. {_MEND}")
        else:
            shards.append(tokens)
    return shards, problems
