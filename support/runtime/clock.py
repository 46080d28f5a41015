"""How much of a run's time has passed, with --minutes, and how old its newest checkpoint is."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator

from support.startup import STARTED

END_SECONDS = 4.0  # after the last evaluation: the checkpoint, curves.png, a text, the exit of the process
TEXT_SECONDS = 2.0  # of these, for the text
# at most this fraction of the time is reserved for the last evaluation: the first one may have included compilation
MOST_EVALUATION = 0.1


class Clock:
    """How long a run has trained, in this process and earlier ones, and how much time it has left.

    Only rank 0's clock decides; the other ranks receive the progress in each step.
    """

    def __init__(self, minutes: float | None, seconds_before: float = 0.0, progress: float = 0.0):
        """`seconds_before` and `progress`: how long earlier processes have trained, and how far the run has got."""
        self.minutes, self._before, self._progress = minutes, seconds_before, progress
        self._began = time.perf_counter()
        self._evaluation = 0.0  # seconds of the longest evaluation
        self._last_call, self._steps = self._began, (0.0, 0.0)  # seconds of the last two steps
        self._saved = self._began

    def seconds(self) -> float:
        """Returns the seconds of training, evaluations and checkpoints included."""
        return self._before + time.perf_counter() - self._began

    def time_used(self) -> float:
        """Returns the fraction of the time that has passed, from 0 to 1; 0 without --minutes. Call it once per step.

        The time starts when the process does. Training gets what is left after start-up, a last evaluation, half a step
        and the exit. Progress never decreases.
        """
        if self.minutes is None:
            return 0.0
        now = time.perf_counter()
        self._steps, self._last_call = (self._steps[1], now - self._last_call), now
        used, reserved = self._before + now - STARTED, END_SECONDS + self._evaluation + min(self._steps) / 2
        left, trained = 60 * self.minutes - used - reserved, self.seconds()
        self._progress = max(self._progress, trained / (trained + left) if left > 0 else 1.0)
        return self._progress

    def saved(self) -> None:
        """Notes that a checkpoint was made."""
        self._saved = time.perf_counter()

    def is_overdue(self, minutes: float) -> bool:
        """Returns whether the last checkpoint, or the start of this process, was so many minutes ago; 0: never."""
        return minutes > 0 and time.perf_counter() - self._saved >= 60 * minutes

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Times an evaluation, so that `time_used` can reserve time for a last one."""
        started = time.perf_counter()
        yield
        seconds = min(time.perf_counter() - started, MOST_EVALUATION * 60 * (self.minutes or 0.0))
        self._evaluation = max(self._evaluation, seconds)

    def tokens_of_last_text(self, most: int, step_tokens: int) -> int:
        """Returns how many tokens, up to `most`, the text at the end may have: in a timed run of a large model, fewer.

        Each new token takes a forward pass over all tokens so far, and a forward pass takes a third of the time in which
        as many tokens are trained on.

        Args:
            step_tokens: tokens of a step on this rank.
        """
        seconds_per_token = min(filter(None, self._steps), default=0.0) / step_tokens
        if self.minutes is None or seconds_per_token == 0:
            return most
        return min(most, 1 + int(math.sqrt(2 * 3 * TEXT_SECONDS / seconds_per_token)))  # n tokens: n^2 / 2 in all
