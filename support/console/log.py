"""`log.txt`, the values of a run, one per line: `{step} {name} {value}`.

    250 val 3.9821          validation loss before the step; likewise `hella`, HellaSwag's acc_norm
    250 train 3.912345      the loss of the step's own batches, in nats per token
    250 lr 0.0005991        learning rate
    250 norm 0.51234567     gradient norm before clipping
    250 seconds 0.0653128   duration of the step alone, without evaluation

A resumed run has the same values as one that was never interrupted, except for `seconds`.
"""

from __future__ import annotations

import math
import os
import re
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping
from io import FileIO
from pathlib import Path

from support.cli import describe_error, warn
from support.files import atomic_write, check_lock

# a name may have any characters; others write NaN and Infinity
LINE = re.compile(r"(\d{1,12}) (.+) ((?i:[-+]?(?:nan|inf(?:inity)?))|-?\d+(?:\.\d+)?(?:e[+-]\d+)?)")
FORMATS = {"train": ".6f", "val": ".4f", "hella": ".4f"}  # of all others: ".8g"


def read_log(path: Path, finite: bool = True) -> dict[str, dict[int, float]]:
    """Reads the values in a log, by name and then by step; only the finite ones, if not told otherwise.

    A missing log counts as empty.
    """
    values: dict[str, dict[int, float]] = defaultdict(dict)
    for line in _read_lines(path):
        if math.isfinite(value := float(line[3])) or not finite:
            values[line[2]][int(line[1])] = value
    return values


def lost_from(values: Mapping[int, float]) -> int | None:
    """Returns the step from which on no value is finite; None if the last one is."""
    last = max((step for step, value in values.items() if math.isfinite(value)), default=-1)
    return min((step for step in values if step > last), default=None)


def _read_lines(path: Path) -> Iterator[re.Match[str]]:
    """Yields the well-formed lines of a log, without a last line that a crash cut off."""
    if path.is_file():
        with open(path, "rb") as file:
            for line in file:
                text = line.rstrip(b"\r\n").decode("utf-8", "replace")  # \r: from Windows
                if line.endswith(b"\n") and (match := LINE.fullmatch(text)):
                    yield match


class LogFile:
    """Writes `log.txt` line by line.

    While the disk is full, lines are kept in memory. Without a path, as on all ranks but 0, nothing is written.
    """

    def __init__(self, path: Path | None = None, first_step: int = 0, source: Path | None = None):
        """Continues a log at `first_step`; step 0 begins a new log.

        Lines from `first_step` on are dropped, since those steps run again, and so are malformed lines.

        Args:
            source: the log that a fork continues, in the folder of another run.
        """
        before = [line for line in _read_lines(source or path) if int(line[1]) < first_step] if path else []
        self._content = bytearray("".join(f"{line[0]}\n" for line in before).encode())  # all lines so far
        self._written, self._warned = len(self._content), False  # bytes on the disk
        if path:
            with atomic_write(path) as tmp:
                tmp.write_bytes(self._content)
        self._file: FileIO | None = open(path, "ab", buffering=0) if path else None  # noqa: SIM115
        self._lock = threading.Lock()  # the thread that writes a checkpoint syncs the file

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Writes a step's values, by name."""
        if self._file is None:
            return
        try:
            with self._lock:
                lines = (f"{step} {name} {x:{FORMATS.get(name, '.8g')}}\n" for name, x in values.items())
                self._content += "".join(lines).encode()
                self._write_pending(self._file)
        except OSError as error:
            if not self._warned:
                reason = describe_error(error, error.filename)
                warn(f"cannot write to {error.filename} ({reason}). Its lines are kept in memory.")
            self._warned = True

    def sync(self) -> None:
        """Waits until all lines are on the disk: a checkpoint must never be ahead of its run's log.

        If another program has changed, replaced or removed the log, such as an editor that saves, writes it again.

        Raises:
            OSError: some lines could not be written.
        """
        if self._file:
            with self._lock:
                self._write_pending(self._file)
                self._file = self._restored(self._file)
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Syncs and closes the file."""
        if self._file:
            try:
                self.sync()
            finally:
                self._file.close()

    def _restored(self, file: FileIO) -> FileIO:
        """Returns the open log, or a new one with all lines if another program has changed it or taken its place."""
        path = Path(os.fsdecode(file.name))
        if path.is_file() and path.stat().st_size == self._written:
            return file
        check_lock(path.parent)
        with atomic_write(path) as tmp:
            tmp.write_bytes(self._content)
        file.close()
        warn(f"another program has changed, replaced or removed {path}. It is written again.")
        return open(path, "ab", buffering=0)

    def _write_pending(self, file: FileIO) -> None:
        try:
            while self._written < len(self._content):
                self._written += file.write(self._content[self._written :])
        except OSError as error:
            error.filename = file.name
            raise
