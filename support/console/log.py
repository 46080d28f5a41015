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
import sys
import threading
from collections.abc import Collection
from io import FileIO
from pathlib import Path
from typing import Any

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


def read_metrics(path: Path) -> dict[str, dict[int, float]]:
    """The finite numbers in a `metrics.jsonl`: by name, then by step."""
    numbers: dict[str, dict[int, float]] = {}
    with open(path, encoding="utf-8", errors="replace", newline="\n") as file:
        for metrics in filter(None, map(_parse_metrics, file)):
            for name, value in metrics.items():
                if type(value) in (int, float) and math.isfinite(value):
                    numbers.setdefault(name, {})[metrics["step"]] = value
    return numbers


def seconds_trained(out: str | os.PathLike[str], step: int) -> float:
    """The seconds of all steps before `step` of the run in `out`, without evaluations; 0 if it has no metrics."""
    replaced = (Path(out) / "log.replaced.txt").exists()  # the run there was not replaced in the end, see run_folder
    path = Path(out) / ("metrics.replaced.jsonl" if replaced else "metrics.jsonl")
    seconds = read_metrics(path).get("seconds", {}) if path.is_file() else {}
    return sum(taken for n, taken in seconds.items() if n < step)


class StepFile:
    """A file of lines about steps, written line by line; a `first_step` above 0 continues an existing one at that step.

    Lines at or past `first_step` are dropped, since those steps run again, and so are malformed lines, such as one that
    a crash cut off. While the disk is full, lines are kept in memory. Without a path, as on all ranks but 0, nothing is
    read or written.
    """

    def __init__(self, path: Path | None = None, first_step: int = 0):
        self._file: FileIO | None = None
        self._pending, self._warned = b"", False
        self._lock = threading.Lock()  # the thread that writes a checkpoint syncs the file
        if path is None:
            return
        if first_step > 0:
            self._drop_lines_from(path, first_step)
        self._file = open(path, "a+b", buffering=0)  # noqa: SIM115  open as long as the run

    def _is_earlier(self, line: str, first_step: int) -> bool:
        """Whether a complete line stays, since it is about a step before `first_step`; a ValueError if it is malformed."""
        raise NotImplementedError

    def _drop_lines_from(self, path: Path, first_step: int) -> None:
        lines = path.read_bytes().decode("utf-8", "replace").split("\n")[:-1] if path.exists() else []
        kept, malformed = [], 0
        for line in (line + "\n" for line in lines):
            try:
                if self._is_earlier(line, first_step):
                    kept.append(line)
            except ValueError:
                malformed += 1
        with atomic_write(path) as tmp:
            tmp.write_text("".join(kept), encoding="utf-8", newline="\n")
        if malformed:
            _warn(f"{path} had malformed lines ({malformed:,}), which are dropped.")

    def _append(self, line: str) -> None:
        if self._file is None:
            return
        try:
            with self._lock:
                self._pending += line.encode()
                self._write_pending(self._file)
        except OSError as error:
            if not self._warned:
                _warn(f"cannot write to {self._file.name!s} ({error.strerror}). Its lines are kept in memory.")
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


class RunLog(StepFile):
    """`log.txt`.

    Values of `first_step` whose names are in `kept_names` were measured before that step: they stay, and are in `kept`.
    """

    def __init__(self, path: Path | None = None, first_step: int = 0, kept_names: Collection[str] = ()):
        self.kept: dict[str, float] = {}
        self._kept_names, self._steps_with_loss = kept_names, set[int]()
        super().__init__(path, first_step)
        if path and (missing := sorted(set(range(first_step)) - self._steps_with_loss)):
            _warn(f"{path} lacks {len(missing):,} of the {first_step:,} steps so far, step {missing[0]} first.")

    def _is_earlier(self, line: str, first_step: int) -> bool:
        match = LINE.fullmatch(line)
        if match is None:
            raise ValueError(line)
        step, name = int(match[1]), match[2]
        if step == first_step and name in self._kept_names:
            self.kept[name] = float(match[3])
            return True
        if step < first_step and name == "train":
            self._steps_with_loss.add(step)
        return step < first_step

    def write(self, step: int, name: str, value: float) -> None:
        self._append(f"{step} {name} {value:{FORMATS[name]}}\n")


class MetricsLog(StepFile):
    """`metrics.jsonl`. Steps may be missing: runs of earlier versions have no such file."""

    def _is_earlier(self, line: str, first_step: int) -> bool:
        metrics = _parse_metrics(line)
        if metrics is None:
            raise ValueError(line)
        return metrics["step"] < first_step

    def write(
        self, step: int, loss: float, lr: float, norm: float, seconds: float, tokens: int, skipped: bool
    ) -> None:  # fmt: skip
        """A step that took `seconds`; `tokens` are all those of the run, up to and including this step."""
        values = {"loss": loss, "lr": lr, "norm": norm, "seconds": seconds}
        numbers = {name: float(f"{x:.8g}") if math.isfinite(x) else None for name, x in values.items()}
        line = {"step": step, **numbers, "tokens": tokens} | ({"skipped": True} if skipped else {})
        self._append(json.dumps(line) + "\n")


def _parse_metrics(line: str) -> dict[str, Any] | None:
    """The object in a line of `metrics.jsonl`; None if the line is malformed."""
    try:
        metrics = json.loads(line)
    except (ValueError, RecursionError):
        return None
    valid = isinstance(metrics, dict) and type(metrics.get("step")) is int and metrics["step"] >= 0
    return metrics if valid else None


def _warn(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr, flush=True)
