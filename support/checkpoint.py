"""Checkpoint directories: written beside and renamed, so that whoever looks sees a whole one or none.

A run's folder holds `model_{step:05d}/`. What is in such a directory is listed, with sizes and SHA-256, in its
`checkpoint.json`, which is written last.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from support.cli import UserError

_NAME = re.compile(r"model_(\d{5,})")
CONTENTS = "checkpoint.json"


def path_of(out: str | os.PathLike, step: int) -> Path:
    """The directory of the checkpoint of `step` in the run's folder `out`."""
    return Path(out) / f"model_{step:05d}"


def step_of(directory: str | os.PathLike) -> int | None:
    """The step that a checkpoint directory is named after; None for any other name."""
    match = _NAME.fullmatch(Path(directory).name)
    return int(match[1]) if match else None


def holds_a_run(out: str | os.PathLike) -> bool:
    """Whether a log with lines in it, or a checkpoint, is in `out`."""
    log = Path(out) / "log.txt"
    return (log.is_file() and log.stat().st_size > 0) or bool(_by_step(out))


def save(directory: str | os.PathLike, write: Callable[[Path], None]) -> Path:
    """Makes the checkpoint `directory` with the files that `write(folder)` puts into a folder.

    An earlier checkpoint of that name is replaced, but only once the new one is on the disk.
    """
    directory = Path(directory)
    beside = directory.with_name(f".{directory.name}.partial")
    _remove(beside)
    beside.mkdir(parents=True)
    write(beside)
    files = {path.name: _size_and_sha256(path) for path in sorted(beside.iterdir())}
    (beside / CONTENTS).write_text(json.dumps({"files": files}, indent=2) + "\n", encoding="utf-8")
    for path in [*beside.iterdir(), beside]:
        _sync(path)
    if directory.exists():
        replaced = directory.with_name(f".{directory.name}.replaced")
        _remove(replaced)
        os.rename(directory, replaced)  # renaming onto a directory that is not empty fails
        os.rename(beside, directory)
        _remove(replaced)
    else:
        os.rename(beside, directory)
    _sync(directory.parent)
    return directory


def damage(directory: str | os.PathLike) -> str | None:
    """What is wrong with a checkpoint, in words: a file that is missing, cut short or altered. None if it is whole."""
    directory = Path(directory)
    try:
        contents = json.loads((directory / CONTENTS).read_text(encoding="utf-8"))["files"]
        if not contents:
            return f"{CONTENTS} lists nothing"
        for name, recorded in contents.items():
            if Path(name).name != name:
                return f"{CONTENTS} names {name!r}, which is no file of this directory"
            if not (directory / name).is_file():
                return f"{name} is missing"
            if (directory / name).stat().st_size != recorded["bytes"]:
                return f"{name} has {(directory / name).stat().st_size} bytes, not {recorded['bytes']}"
            if _size_and_sha256(directory / name) != recorded:
                return f"{name} was altered (wrong checksum)"
    except FileNotFoundError:
        return f"{CONTENTS} is missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return f"{CONTENTS} is not readable"
    return None


def newest(out: str | os.PathLike) -> Path | None:
    """The whole checkpoint of the highest step in `out`; damaged ones are named on stderr and passed over.

    None if there is none at all.

    Raises:
        UserError: there are checkpoints, and all of them are damaged.
    """
    damaged = []
    for directory in reversed(_by_step(out)):
        problem = damage(directory)
        if problem is None:
            return directory
        damaged.append(f"{directory} is damaged: {problem}")
        if os.environ.get("RANK", "0") == "0":
            print(f"warning: {damaged[-1]}. Passing over it.", file=sys.stderr, flush=True)
    if damaged:
        raise UserError(f"no checkpoint in {out} is whole. Restore one, or start anew with another --out.")
    return None


def read_state(directory: str | os.PathLike, mmap: bool = False) -> dict[str, Any]:
    """The content of `trainer.pt`, of which nothing is executed. With `mmap`, tensors stay in the file until used.

    Raises:
        UserError: it is unreadable, or holds more than plain data.
    """
    try:
        return torch.load(Path(directory) / "trainer.pt", map_location="cpu", weights_only=True, mmap=mmap)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        reason = str(error).split("\n")[0]
        raise UserError(f"cannot resume from {directory}: trainer.pt is not readable ({reason}).") from error


def start_run(out: str | os.PathLike) -> None:
    """Makes the folder of a new run. An earlier one's log and checkpoints are removed, and nothing else.

    Raises:
        UserError: the folder cannot be made or cleared.
    """
    try:
        Path(out).mkdir(parents=True, exist_ok=True)
        (Path(out) / "log.txt").unlink(missing_ok=True)
        for directory in _by_step(out):
            shutil.rmtree(directory)
    except OSError as error:
        raise UserError(f"cannot write to {out} ({error.strerror}). Name another --out.") from error


def _by_step(out: str | os.PathLike) -> list[Path]:
    """The checkpoint directories in `out`, lowest step first."""
    out = Path(out)
    found = [path for path in out.iterdir() if step_of(path) is not None and path.is_dir()] if out.is_dir() else []
    return sorted(found, key=step_of)


def _size_and_sha256(path: Path) -> dict[str, int | str]:
    with open(path, "rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _sync(path: Path) -> None:
    """Waits until a file's content, or a directory's list of names, is on the disk."""
    if path.is_dir() and os.name == "nt":
        return  # Windows opens no directories
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(directory: Path) -> None:
    if directory.exists():
        shutil.rmtree(directory)
