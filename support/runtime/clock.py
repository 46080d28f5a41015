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

    def __init__(self, minutes: float | None, seconds_before: float = 0.0):
        """`seconds_before`: trained by the processes before this one."""
        self.minutes, self._before, self._began = minutes, seconds_before, time.perf_counter()
        self._last_evaluation = self._progress = 0.0

    def seconds(self) -> float:
        """Seconds of training, evaluations and checkpoints included."""
        return self._before + time.perf_counter() - self._began

    def progress(self) -> float:
        """The fraction of the time that is over, from 0 to 1; it never falls. 0 without --minutes.

        The time begins with the process; training has what is left of it between the start and the end of the process.
        """
        if self.minutes is None:
            return 0.0
        used = self._before + time.perf_counter() - STARTED
        left = 60 * self.minutes - used - END_SECONDS - self._last_evaluation
        self._progress = max(self._progress, self.seconds() / (self.seconds() + left) if left > 0 else 1.0)
        return self._progress

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Notes how long an evaluation takes: time for a last one is kept."""
        started = time.perf_counter()
        yield
        seconds = time.perf_counter() - started
        self._last_evaluation = min(seconds, MOST_EVALUATION * 60 * (self.minutes or 0.0))


def progress_after(seconds: float, minutes: float) -> float:
    """The progress of a run that continues another one, which was trained for this long; from 0 to 1."""
    return min(1.0, seconds / max(1.0, 60 * minutes - END_SECONDS))
