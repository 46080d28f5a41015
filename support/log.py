"""`log.txt`: one line per value, `{step} {name} {value}`."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TextIO

LINE = re.compile(r"(\d+) [a-z]+ \S+\n")
FORMATS = {"train": ".6f", "val": ".4f", "hella": ".4f"}


class RunLog:
    """The log of a run, written a line at a time; `first_step` > 0 goes on with a log from that step.

    Lines at or past `first_step` are dropped, for the steps will be made again, and so is what is no line of a log:
    one that was cut short, or what a power failure left.
    With `enabled` false, as on all ranks but one, nothing is read or written.
    """

    def __init__(self, path: Path, first_step: int, enabled: bool = True):
        self._file: TextIO | None = None
        if not enabled:
            return
        if first_step > 0 and path.exists():
            with open(path, encoding="utf-8", errors="replace", newline="\n") as file:
                lines = [(LINE.fullmatch(line), line) for line in file]
            beside = path.with_name(f"{path.name}.partial")
            with open(beside, "w", newline="\n") as file:
                file.writelines(line for match, line in lines if match and int(match[1]) < first_step)
                file.flush()
                os.fsync(file.fileno())
            os.replace(beside, path)
        # open as long as the run; each line is written at once
        self._file = open(path, "a", buffering=1, newline="\n")  # noqa: SIM115

    def write(self, step: int, name: str, value: float) -> None:
        if self._file:
            self._file.write(f"{step} {name} {value:{FORMATS[name]}}\n")

    def sync(self) -> None:
        """Waits until the lines are on the disk: a checkpoint must not outlive the log that led to it."""
        if self._file:
            os.fsync(self._file.fileno())
