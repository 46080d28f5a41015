"""`log.txt`: one line per value, `{step} {name} {value}`."""

from __future__ import annotations

import math
import os
import re
import sys
import threading
from io import FileIO
from pathlib import Path

from support.cli import UserError
from support.files import atomic_write

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

    Lines at or past `first_step` are dropped, since those steps run again; so are malformed lines, such as one that a
    crash cut off. While the disk is full, lines are kept in memory. Without a path, as on all ranks but 0, nothing is
    read or written.
    """

    def __init__(self, path: Path | None = None, first_step: int = 0):
        self._file: FileIO | None = None
        self._pending, self._warned = b"", False
        self._lock = threading.Lock()  # the thread that writes a checkpoint syncs the log
        if path is None:
            return
        if first_step > 0 and path.exists():
            self._drop_lines_from(path, first_step)
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115  open as long as the run

    @staticmethod
    def _drop_lines_from(path: Path, first_step: int) -> None:
        with open(path, encoding="utf-8", errors="replace", newline="\n") as file:
            matches = [(LINE.fullmatch(line), line) for line in file]
        kept = [line for match, line in matches if match and int(match[1]) < first_step]
        with atomic_write(path) as tmp:
            tmp.write_text("".join(kept), encoding="utf-8", newline="\n")
        if not any(line.startswith(f"{first_step - 1} train ") for line in kept):
            print(f"warning: {path} lacks lines of the steps before {first_step}.", file=sys.stderr, flush=True)

    def write(self, step: int, name: str, value: float) -> None:
        if self._file is None:
            return
        try:
            with self._lock:
                self._pending += f"{step} {name} {value:{FORMATS[name]}}\n".encode()
                self._write_pending(self._file)
        except OSError as error:
            if not self._warned:
                message = f"cannot write to {self._file.name!s} ({error.strerror}). Its lines are kept in memory."
                print(f"warning: {message}", file=sys.stderr, flush=True)
            self._warned = True

    def sync(self) -> None:
        """Waits until all lines are on the disk: a checkpoint must never be ahead of the log of its run.

        Raises:
            OSError: some lines could not be written.
        """
        if self._file:
            with self._lock:
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

    def _write_pending(self, file: FileIO) -> None:
        while self._pending:
            self._pending = self._pending[file.write(self._pending) :]
