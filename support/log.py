"""`log.txt`: one line per value, `{step} {name} {value}`."""

from __future__ import annotations

import math
import os
import re
import sys
import threading
from pathlib import Path
from typing import BinaryIO

from support.cli import UserError
from support.track import Tracker

LINE = re.compile(r"(\d{1,12}) ([a-z]+) (nan|-?inf|-?\d+\.\d+)\n")
FORMATS = {"train": ".6f", "val": ".4f", "hella": ".4f"}


def read(path: Path, name: str) -> dict[int, float]:
    """The values of one name in a log, by step; without those that are not finite."""
    found = {}
    with open(path, encoding="utf-8", errors="replace", newline="\n") as file:
        for match in filter(None, map(LINE.fullmatch, file)):
            if match[2] == name and math.isfinite(value := float(match[3])):
                found[int(match[1])] = value
    return found


class RunLog:
    """The log of a run, written a line at a time; `first_step` > 0 goes on with a log from that step.

    Lines at or past `first_step` are dropped, for the steps will be made again, and so is what is no line of a log:
    one that was cut short, or what a power failure left. While the disk is full, lines wait in memory.
    Without a path, as on all ranks but one, nothing is read or written. A `tracker` is told every value, too.
    """

    def __init__(self, path: Path | None = None, first_step: int = 0, tracker: Tracker | None = None):
        self._tracker = tracker
        self._file: BinaryIO | None = None
        self._waiting, self._warned = b"", False
        self._lock = threading.Lock()  # a checkpoint is written by another thread
        if path is None:
            return
        if first_step > 0 and path.exists():
            with open(path, encoding="utf-8", errors="replace", newline="\n") as file:
                lines = [(LINE.fullmatch(line), line) for line in file]
            beside = path.with_name(f"{path.name}.partial")
            with open(beside, "w", newline="\n") as file:
                kept = [line for match, line in lines if match and int(match[1]) < first_step]
                file.writelines(kept)
                file.flush()
                os.fsync(file.fileno())
            os.replace(beside, path)
            if not any(line.startswith(f"{first_step - 1} train ") for line in kept):
                print(f"warning: {path} lacks lines of the steps before {first_step}.", file=sys.stderr, flush=True)
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115  open as long as the run

    def write(self, step: int, name: str, value: float) -> None:
        if self._tracker:
            self._tracker.add(step, name, value)
        if self._file is None:
            return
        try:
            with self._lock:
                self._waiting += f"{step} {name} {value:{FORMATS[name]}}\n".encode()
                self._write()
        except OSError as error:
            if not self._warned:
                print(f"warning: cannot write to {self._file.name} ({error.strerror}). Its lines wait in memory.", file=sys.stderr, flush=True)  # fmt: skip
            self._warned = True

    def sync(self) -> None:
        """Waits until the lines are on the disk: a checkpoint must not outlive the log that led to it.

        Raises:
            OSError: some could not be written.
        """
        if self._file:
            with self._lock:
                self._write()
            os.fsync(self._file.fileno())
        if self._tracker:
            self._tracker.flush()

    def close(self) -> None:
        """Writes what is left and closes the file.

        Raises:
            UserError: the last lines could not be written.
        """
        if self._file is None:
            return
        try:
            self.sync()
        except OSError as error:
            raise UserError(
                f"the last lines of {self._file.name} could not be written ({error.strerror}). Make room, and go on with --resume."
            ) from error
        finally:
            self._file.close()

    def _write(self) -> None:
        while self._waiting:
            self._waiting = self._waiting[self._file.write(self._waiting) :]
