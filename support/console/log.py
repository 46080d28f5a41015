"""The files of a run that grow with each step.

`log.txt` has one line per value, `{step} {name} {value}`. `metrics.jsonl` has one JSON object per step, for example

    {"step": 12, "loss": 3.21, "lr": 0.0009, "norm": 0.51, "seconds": 0.065, "tokens": 13312}

where `tokens` are all those that the run has read after the step, numbers that are not finite are null, and steps that
were not applied have `"skipped": true`.
"""

from __future__ import annotations

import json
import math
import os
import re
import threading
from collections.abc import Collection, Sequence
from io import FileIO
from pathlib import Path
from typing import Any

from support.cli import warn
from support.files import atomic_write

LINE = re.compile(r"(\d{1,12}) ([a-z]+) (nan|-?inf|-?\d+\.\d+)")
FORMATS = {"train": ".6f", "val": ".4f", "hella": ".4f"}


def read_values(path: Path, name: str) -> dict[int, float]:
    """The finite values of one name in a log, by step; none without a log."""
    matches = filter(None, map(LINE.fullmatch, _complete_lines(path)))
    return {int(m[1]): float(m[3]) for m in matches if m[2] == name and math.isfinite(float(m[3]))}


def read_metrics(path: Path) -> dict[str, dict[int, float]]:
    """The finite numbers in a `metrics.jsonl`: by name, then by step; none without a file."""
    numbers: dict[str, dict[int, float]] = {}
    for metrics in filter(None, map(_parse_metrics, _complete_lines(path))):
        for name, value in metrics.items():
            if type(value) in (int, float) and math.isfinite(value):
                numbers.setdefault(name, {})[metrics["step"]] = value
    return numbers


def seconds_trained(out: str | os.PathLike[str], step: int) -> float:
    """The seconds of all steps before `step` of the run in `out`, without evaluations; 0 if it has no metrics."""
    seconds = read_metrics(Path(out) / "metrics.jsonl").get("seconds", {})
    return sum(taken for n, taken in seconds.items() if n < step)


def _complete_lines(path: Path) -> list[str]:
    """The lines of a file, without a last one that a crash has cut off; none without a file."""
    return path.read_bytes().decode("utf-8", "replace").split("\n")[:-1] if path.is_file() else []


def _parse_metrics(line: str) -> dict[str, Any] | None:
    """The object in a line of `metrics.jsonl`; None if the line is malformed."""
    try:
        metrics = json.loads(line)
    except (ValueError, RecursionError):
        return None
    valid = isinstance(metrics, dict) and type(metrics.get("step")) is int and metrics["step"] >= 0
    return metrics if valid else None


class StepFile:
    """A file of lines about steps, written line by line.

    While the disk is full, lines are kept in memory. Without a path, as on all ranks but 0, nothing is written.
    """

    def __init__(self, path: Path | None):
        self._file: FileIO | None = open(path, "ab", buffering=0) if path else None  # noqa: SIM115
        self._pending, self._warned = b"", False
        self._lock = threading.Lock()  # the thread that writes a checkpoint syncs the file

    def append(self, line: str) -> None:
        if self._file is None:
            return
        try:
            with self._lock:
                self._pending += f"{line}\n".encode()
                self._write_pending(self._file)
        except OSError as error:
            if not self._warned:
                warn(f"cannot write to {error.filename} ({error.strerror}). Its lines are kept in memory.")
            self._warned = True

    def sync(self) -> None:
        """Waits until all lines are on the disk: a checkpoint must never be ahead of the files of its run.

        Raises:
            OSError: some lines could not be written.
        """
        if self._file:
            with self._lock:
                self._write_pending(self._file)
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """As `sync`, and closes the file."""
        if self._file:
            with self._file:
                self.sync()

    def _write_pending(self, file: FileIO) -> None:
        try:
            while self._pending:
                self._pending = self._pending[file.write(self._pending) :]
        except OSError as error:
            error.filename = file.name
            raise


class RunLog(StepFile):
    """`log.txt`; a `first_step` above 0 continues an existing one at that step.

    Lines at or past `first_step` are dropped, since those steps run again, and so are malformed ones. Values of
    `first_step` whose names are in `kept_names` were measured before that step: they stay, and are in `kept`.
    """

    def __init__(self, path: Path | None = None, first_step: int = 0, kept_names: Collection[str] = ()):
        self.kept: dict[str, float] = {}
        if path and first_step > 0:
            matches = list(filter(None, map(LINE.fullmatch, _complete_lines(path))))
            before = [m for m in matches if int(m[1]) < first_step]
            kept = [m for m in matches if int(m[1]) == first_step and m[2] in kept_names]
            _write_lines(path, [m[0] for m in before + kept])
            self.kept = {m[2]: float(m[3]) for m in kept}
        super().__init__(path)

    def write(self, step: int, name: str, value: float) -> None:
        self.append(f"{step} {name} {value:{FORMATS[name]}}")


class MetricsLog(StepFile):
    """`metrics.jsonl`, continued as `log.txt`. Steps may be missing: runs of earlier versions have no such file."""

    def __init__(self, path: Path | None = None, first_step: int = 0):
        if path and first_step > 0:
            parsed = [(line, _parse_metrics(line)) for line in _complete_lines(path)]
            _write_lines(path, [line for line, metrics in parsed if metrics and metrics["step"] < first_step])
        super().__init__(path)

    def write(
        self, step: int, loss: float, lr: float, norm: float, seconds: float, tokens: int, skipped: bool
    ) -> None:  # fmt: skip
        """A step that took `seconds`; `tokens` are all those of the run, up to and including this step."""
        values = {"loss": loss, "lr": lr, "norm": norm, "seconds": seconds}
        numbers = {name: float(f"{x:.8g}") if math.isfinite(x) else None for name, x in values.items()}
        line = {"step": step, **numbers, "tokens": tokens} | ({"skipped": True} if skipped else {})
        self.append(json.dumps(line))


def begin_log(path: Path, source: Path | None, step: int) -> None:
    """Begins a log: with the lines before `step` of another run's, or empty."""
    matches = filter(None, map(LINE.fullmatch, _complete_lines(source))) if source else ()
    _write_lines(path, [m[0] for m in matches if int(m[1]) < step])


def _write_lines(path: Path, lines: Sequence[str]) -> None:
    with atomic_write(path) as tmp:
        tmp.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8", newline="\n")
