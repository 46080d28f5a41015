"""Checkpoint directories: written beside and renamed, so that whoever looks sees a whole one or none.

A run's folder holds `model_{step:05d}/`. What is in such a directory is listed, with sizes and SHA-256, in its
`checkpoint.json`, which is written last.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import pickle
import re
import shutil
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from support import log
from support.cli import UserError
from support.stop import Stop

_NAME = re.compile(r"model_(\d{5,})")
_LEFTOVER = re.compile(r"\.model_\d{5,}\.(partial|removed)")
CONTENTS = "checkpoint.json"
STATE = {"step", "bad_steps", "config", "data", "optimizer", "scaler"}  # of trainer.pt
_AFTER_FAILURE = "Mend that, and go on with --resume."


def path_of(out: str | os.PathLike, step: int) -> Path:
    """The directory of the checkpoint of `step` in the run's folder `out`."""
    return Path(out) / f"model_{step:05d}"


def step_of(directory: str | os.PathLike) -> int | None:
    """The step that a checkpoint directory is named after; None for any other name."""
    match = _NAME.fullmatch(Path(directory).name)
    return int(match[1]) if match else None


def by_step(out: str | os.PathLike) -> list[Path]:
    """The checkpoint directories in `out`, lowest step first."""
    out = Path(out)
    found = [path for path in out.iterdir() if step_of(path) is not None and path.is_dir()] if out.is_dir() else []
    return sorted(found, key=step_of)


def save(directory: str | os.PathLike, write: Callable[[Path], None]) -> Path:
    """Makes the checkpoint `directory` with the files that `write(folder)` puts into a folder.

    An earlier checkpoint of that name is replaced, but only once the new one is on the disk. If it fails, nothing of the
    new one stays.
    """
    directory = Path(directory)
    beside, removed = _beside(directory, "partial"), _beside(directory, "removed")
    for path in (beside, removed):
        _remove_now(path)
    try:
        beside.mkdir(parents=True)
        write(beside)
        files = {path.name: _size_and_sha256(path) for path in sorted(beside.iterdir())}
        (beside / CONTENTS).write_text(json.dumps({"files": files}, indent=2) + "\n", encoding="utf-8")
        for path in beside.iterdir():
            path.chmod((beside / CONTENTS).stat().st_mode)  # safetensors makes files that only their owner reads
            _sync(path)
        _sync(beside)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise
    if directory.exists():
        os.rename(directory, removed)  # renaming onto a directory that is not empty fails
    os.rename(beside, directory)
    with contextlib.suppress(OSError):  # it is in place, whatever else happens
        _sync(directory.parent)
        _remove_now(removed)
    return directory


def remove(directory: Path) -> None:
    """Removes a checkpoint. Whoever looks sees the whole of it, or nothing."""
    removed = _beside(directory, "removed")
    _remove_now(removed)
    os.rename(directory, removed)
    _remove_now(removed)


def remove_leftovers(out: str | os.PathLike) -> None:
    """Removes what a process that was killed has left half-written or half-removed in a run's folder."""
    for path in Path(out).iterdir():
        if _LEFTOVER.fullmatch(path.name):
            _remove_now(path)


def damage(directory: str | os.PathLike) -> str | None:
    """What is wrong with a checkpoint, in words: a file that is missing, cut short or altered. None if it is whole."""
    try:
        return _damage(Path(directory))
    except OSError as error:
        return f"it is not readable ({error.strerror})"


def _damage(directory: Path) -> str | None:
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
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return f"{CONTENTS} is not readable"
    return None


def newest(out: str | os.PathLike) -> Path | None:
    """The whole checkpoint of the highest step in `out`; damaged ones are named on stderr and passed over.

    None if there is none at all.

    Raises:
        UserError: there are checkpoints, and all of them are damaged.
    """
    damaged = []
    for directory in reversed(by_step(out)):
        problem = damage(directory)
        if problem is None:
            return directory
        damaged.append(f"{directory} is damaged: {problem}")
        if os.environ.get("RANK", "0") == "0":
            print(f"warning: {damaged[-1]}. Passing over it.", file=sys.stderr, flush=True)
    if damaged:
        raise UserError(f"no checkpoint in {out} is whole. Restore one, or start anew with another --out.")
    return None


class Saver:
    """Saves the checkpoints of a run in a thread, one at a time, and removes those that are not to be kept.

    A save that fails (a full disk, no permission) is told on stderr and leaves the earlier checkpoints as they are. When
    the next one fails too, `stop` is asked to end the run. `keep` is how many of the newest stay, 0 for all; the one with
    the best validation loss in the run's log stays as well.
    """

    def __init__(self, out: str | os.PathLike, keep: int, stop: Stop, newest: int = 0):
        self.out, self.keep, self.stop = Path(out), keep, stop
        self.newest = newest  # the step of the last whole checkpoint; 0 is none
        self.failed = 0  # saves in a row
        self._thread: threading.Thread | None = None

    def start(self, step: int, write: Callable[[Path], None], size: int) -> None:
        """Begins to save the checkpoint of `step`: `write(folder)` puts its files there, of about `size` bytes."""
        self.wait()
        self._thread = threading.Thread(target=self._save, args=(step, write, size), name=f"checkpoint {step}")
        self._thread.start()

    def wait(self) -> None:
        if self._thread:
            self._thread.join()

    def finish(self) -> None:
        """Waits for the last save. If that failed, `stop` has the error: nothing comes after it to make up for it."""
        self.wait()
        if self.failed and not self.stop.failure:
            self.stop.fail(
                UserError(f"the last checkpoint could not be saved in {self.out}, see above. {_AFTER_FAILURE}")
            )

    def newest_checkpoint(self) -> str:
        """A sentence on what a resumed run would start from."""
        if self.newest == 0:
            return "There is no checkpoint yet."
        return f"The newest checkpoint is {path_of(self.out, self.newest)}; --resume --out {self.out} goes on from it."

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, kind: type | None, *_: Any) -> None:
        self.finish()
        if kind is None and self.stop.failure:
            raise self.stop.failure

    def _save(self, step: int, write: Callable[[Path], None], size: int) -> None:
        try:
            free = shutil.disk_usage(self.out).free
            if free < size:
                raise OSError(errno.ENOSPC, f"it takes {size / 1e6:,.1f} MB, and {free / 1e6:,.1f} MB are free")
            directory = save(path_of(self.out, step), write)
        except Exception as error:  # the libraries that write have errors of their own
            self.failed += 1
            reason = getattr(error, "strerror", None) or str(error)
            if isinstance(error, RuntimeError):  # in the words of torch.save
                reason = "a file could not be written in whole"
            trouble = f"the checkpoint of step {step} could not be saved in {self.out}: {reason}"
            if self.failed == 1:
                print(
                    f"warning: {trouble}. Training goes on; should the next one fail too, the run ends.",
                    file=sys.stderr,
                    flush=True,
                )
            else:
                self.stop.fail(UserError(f"{trouble}; nor could the one before. {_AFTER_FAILURE}"))
            return
        self.failed, self.newest = 0, step
        print(f"step {step:5d} | saved {directory}\n", end="", flush=True)  # one write: the loop prints too
        try:
            self._remove_old(step)
        except OSError as error:
            print(
                f"warning: cannot remove old checkpoints in {self.out}: {error.strerror}.", file=sys.stderr, flush=True
            )

    def _remove_old(self, step: int) -> None:
        earlier = [directory for directory in by_step(self.out) if step_of(directory) < step]  # this one is whole
        if self.keep == 0 or len(earlier) < self.keep or self.stop.told:  # whoever stops us does not wait for long
            return
        val = log.read(self.out / "log.txt", "val")
        scored = [directory for directory in [*earlier, path_of(self.out, step)] if step_of(directory) in val]
        best = min(scored, key=lambda directory: val[step_of(directory)], default=None)
        kept = 1
        for directory in reversed(earlier):
            if kept < self.keep and _damage(directory) is None:  # what cannot be read now may be whole
                kept += 1
            elif directory != best:
                remove(directory)


def to_host(state: Any) -> Any:
    """A copy of a state dict with its tensors on the CPU, which training goes on without changing."""
    return tree_map(lambda x: x.detach().to("cpu", copy=True) if isinstance(x, torch.Tensor) else x, state)


def bytes_of(state: Any) -> int:
    """Bytes of all tensors in a state dict."""
    return sum(x.nbytes for x in tree_leaves(state) if isinstance(x, torch.Tensor))


def read_state(directory: str | os.PathLike, mmap: bool = False) -> dict[str, Any]:
    """The content of `trainer.pt`, of which nothing is executed. With `mmap`, tensors stay in the file until used.

    Raises:
        UserError: it is unreadable, or holds more than plain data.
    """
    try:
        state = torch.load(Path(directory) / "trainer.pt", map_location="cpu", weights_only=True, mmap=mmap)
    except pickle.UnpicklingError as error:
        raise UserError(
            f"cannot resume from {directory}: trainer.pt is not readable as plain tensors and containers."
        ) from error
    except (OSError, RuntimeError, EOFError) as error:
        reason = str(error).split("\n")[0]
        raise UserError(f"cannot resume from {directory}: trainer.pt is not readable ({reason}).") from error
    if not isinstance(state, dict) or not state.keys() >= STATE:
        raise UserError(f"cannot resume from {directory}: trainer.pt is no state of this trainer.")
    return state


def _beside(directory: Path, suffix: str) -> Path:
    return directory.with_name(f".{directory.name}.{suffix}")


def _remove_now(directory: Path) -> None:
    if directory.is_symlink() or directory.is_file():
        directory.unlink()
    elif directory.exists():
        shutil.rmtree(directory)


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
