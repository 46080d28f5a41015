"""--minutes: how much of a run's time is over."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from support.startup import STARTED

END_SECONDS = 4.0  # after the last evaluation: the checkpoint, curves.png, a sample, the end of the process
MOST_EVALUATION = 0.1  # of the time, for the last evaluation: the first one may have compiled


class Clock:
    """The time of a run: what it has trained, in this process and before, and what it has left.

    Only rank 0's decides; the others learn the progress in each step.
    """

    def __init__(self, minutes: float | None, seconds_before: float = 0.0, progress: float = 0.0):
        """`seconds_before` and `progress`: what the processes before this one have trained, and how far the run is."""
        self.minutes, self._before, self._progress = minutes, seconds_before, progress
        self._began = time.perf_counter()
        self._evaluation = 0.0  # seconds of the longest one
        self._last_call, self._steps = self._began, (0.0, 0.0)  # seconds of the last two steps

    def seconds(self) -> float:
        """Seconds of training, evaluations and checkpoints included."""
        return self._before + time.perf_counter() - self._began

    def progress(self) -> float:
        """The fraction of the time that is over, from 0 to 1; to be called in each step. 0 without --minutes.

        The time begins with the process. Training has what is left of it between the start and the end of the process, less
        the time for a last evaluation and half a step. Progress never falls.
        """
        if self.minutes is None:
            return 0.0
        now = time.perf_counter()
        self._steps, self._last_call = (self._steps[1], now - self._last_call), now
        used, reserved = self._before + now - STARTED, END_SECONDS + self._evaluation + min(self._steps) / 2
        left, trained = 60 * self.minutes - used - reserved, self.seconds()
        self._progress = max(self._progress, trained / (trained + left) if left > 0 else 1.0)
        return self._progress

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Measures an evaluation: time for a last one is kept."""
        started = time.perf_counter()
        yield
        seconds = min(time.perf_counter() - started, MOST_EVALUATION * 60 * (self.minutes or 0.0))
        self._evaluation = max(self._evaluation, seconds)


def progress_after(seconds: float, minutes: float) -> float:
    """The progress of a run that continues another one, which was trained for this long; from 0 to 1."""
    return min(1.0, seconds / max(1.0, 60 * minutes - END_SECONDS))
