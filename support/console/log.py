"""`log.txt`: one line per value, `{step} {name} {value}`."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import re
import sys
import threading
from collections.abc import Collection
from io import FileIO
from pathlib import Path
from typing import TextIO

from support.cli import UserError
from support.files import atomic_write, is_lock_holder, lock_folder, write_lock_holder

LINE = re.compile(r"(\d{1,12}) ([a-z]+) (nan|-?inf|-?\d+\.\d+)\n")
FORMATS = {"train": ".6f", "val": ".4f", "hella": ".4f"}


def read_values(path: Path, name: str) -> dict[int, float]:
    """The finite values of one name in a log, by step."""
    values = {}
    with open(path, encoding="utf-8", errors="replace", newline="\n") as file:
        for match in filter(None, map(LINE.fullmatch, file)):
            if match[2] == name and math.isfinite(value := float(match[3])):
                values[int(match[1])] = value
    return values


class RunLog:
    """The log of a run, written line by line; a `first_step` above 0 continues an existing log at that step.

    Lines at or past `first_step` are dropped, since those steps run again, and so are malformed lines, such as one that
    a crash cut off. Values of `first_step` whose names are in `kept_names` were measured before that step: they stay,
    and are in `kept`. While the disk is full, lines are kept in memory. Without a path, as on all ranks but 0, nothing
    is read or written.
    """

    def __init__(self, path: Path | None = None, first_step: int = 0, kept_names: Collection[str] = ()):
        self.kept: dict[str, float] = {}
        self._file: FileIO | None = None
        self._folder_lock: TextIO | None = None  # only of a folder that was removed and made again
        self._pending, self._warned = b"", False
        self._lock = threading.Lock()  # the thread that writes a checkpoint syncs the log
        if path is None:
            return
        if first_step > 0:
            self._drop_lines_from(path, first_step, kept_names)
        self._file = open(path, "a+b", buffering=0)  # noqa: SIM115  open as long as the run

    def _drop_lines_from(self, path: Path, first_step: int, kept_names: Collection[str]) -> None:
        lines = path.read_bytes().decode("utf-8", "replace").split("\n")[:-1] if path.exists() else []
        matches = [LINE.fullmatch(line.removesuffix("\r") + "\n") for line in lines]
        steps_with_loss, kept = set(), []
        for match in filter(None, matches):
            step, name = int(match[1]), match[2]
            if step == first_step and name in kept_names:
                self.kept[name] = float(match[3])
            elif step >= first_step:
                continue
            kept.append(match[0])
            if name == "train":
                steps_with_loss.add(step)
        with atomic_write(path) as tmp:
            tmp.write_text("".join(kept), encoding="utf-8", newline="\n")
        if malformed := matches.count(None):
            _warn(f"{path} had malformed lines ({malformed:,}), which are dropped.")
        if missing := sorted(set(range(first_step)) - steps_with_loss):
            _warn(f"{path} lacks {len(missing):,} of the {first_step:,} steps so far, step {missing[0]} first.")

    def write(self, step: int, name: str, value: float) -> None:
        if self._file is None:
            return
        try:
            with self._lock:
                self._pending += f"{step} {name} {value:{FORMATS[name]}}\n".encode()
                self._write_pending(self._file)
        except OSError as error:
            if not self._warned:
                _warn(f"cannot write to {self._file.name!s} ({error.strerror}). Its lines are kept in memory.")
            self._warned = True

    def sync(self) -> None:
        """Waits until all lines are on the disk: a checkpoint must never be ahead of the log of its run.

        Raises:
            OSError: some lines could not be written.
        """
        if self._file:
            with self._lock:
                self._restore_if_removed()
                self._write_pending(self._file)
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Writes the pending lines and closes the file.

        Raises:
            UserError: they could not be written.
        """
        if self._file is None:
            return
        try:
            self.sync()
        except OSError as error:
            raise UserError(
                f"the last lines of {self._file.name!s} could not be written ({error.strerror}). Free some disk space, "
                "then rerun with --resume."
            ) from error
        finally:
            self._file.close()
            if self._folder_lock:
                self._folder_lock.close()

    def _restore_if_removed(self) -> None:
        """Writes the log again if somebody has removed or replaced it: the open file still has its lines.

        Raises:
            OSError, UserError: its folder was removed, and another run has used that path since.
        """
        assert self._file is not None
        path = Path(str(self._file.name))
        if path.exists() and os.path.samestat(path.stat(), os.fstat(self._file.fileno())):
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        if not is_lock_holder(path.parent):  # the folder was removed, and its lock with it
            with contextlib.ExitStack() as stack:
                lock = stack.enter_context(lock_folder(path.parent, "--out"))
                if path.exists():
                    raise FileExistsError(errno.EEXIST, f"{path} is that of another run")
                write_lock_holder(lock)
                self._folder_lock = lock
                stack.pop_all()
        self._file.seek(0)
        self._pending = self._file.read() + self._pending
        self._file.close()
        path.unlink(missing_ok=True)
        self._file = open(path, "a+b", buffering=0)  # noqa: SIM115
        _warn(f"{path} was removed or replaced. It is written again.")

    def _write_pending(self, file: FileIO) -> None:
        while self._pending:
            self._pending = self._pending[file.write(self._pending) :]


def _warn(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr, flush=True)
