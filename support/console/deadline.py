"""--minutes: the cooldown begins when its share of the run is what there is time for."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from support.console.log import seconds_trained
from support.data.presets import MAX_STEPS, flags_for_length
from support.runtime.distributed import Distributed
from support.runtime.options import RunOptions
from support.runtime.run_info import RunInfo
from support.startup import STARTED

Config = TypeVar("Config", bound=RunOptions)
END_SECONDS = 4.0  # after the last evaluation: the checkpoint, curves.png, a sample, the end of the process
WINDOW = 0.05  # of the time: how long steps are measured
MOST_EVALUATION = 0.1  # of the time, for all evaluations to come: the first one may have compiled


class Deadline:
    """Fixes the number of steps of a run of --minutes: late, so that it ends on time on a machine that became busier.

    Until then the learning rate is constant, so the number is not needed. The cooldown begins when it would be
    `cooldown_fraction` of all steps if it filled the time that is left. Rank 0's clock decides for all ranks. The number
    is part of the configuration from then on, so of every checkpoint, and a resumed run keeps it.
    """

    def __init__(self, run: RunInfo, dist: Distributed, report: Callable[[dict[str, Any]], None]):
        """`report` is called with the flags that change when the number of steps is fixed."""
        self.run, self.dist, self.report = run, dist, report
        self.seconds = seconds_for_process(run) if dist.rank == 0 else 0.0
        self._last: tuple[int, float] | None = None  # the step that has just ended, and when it began
        self._steps: deque[tuple[float, float]] = deque()  # when a step ended, and its seconds; those in WINDOW
        self._due_since: float | None = None
        self._evaluation_seconds = 0.0  # of the last step with an evaluation, samples, or a checkpoint

    def config_at(self, step: int, config: Config) -> Config:
        """The configuration from `step` on; to be called before each step."""
        if not config.open_ended:
            return config
        steps_left = self.dist.all_reduce_min(self.cooldown_steps(step, config) if self.dist.rank == 0 else MAX_STEPS)
        if steps_left < MAX_STEPS:
            total = min(step + steps_left, MAX_STEPS - 1)
            length: dict[str, Any] = {**flags_for_length(config, total), "cooldown_fraction": (total - step) / total}
        elif step == config.max_steps:  # the estimate was too low
            length = {**flags_for_length(config, 2 * step), "decay_steps": MAX_STEPS}
        else:
            return config
        self.run.config = config = replace(config, **length)
        if not config.open_ended:
            self.report(length)
        return config

    def cooldown_steps(self, step: int, config: RunOptions) -> int:
        """The steps of the cooldown, if it begins now; MAX_STEPS if it does not.

        When it is due, steps are measured anew for a moment: it may be due because they have just become slower.
        """
        now = time.perf_counter()
        self._measure(step, config, now)
        if not self._steps:
            return MAX_STEPS
        steps_left = self._steps_left(step, config, now)
        if self._due_since is None and steps_left <= config.cooldown_fraction * (step + steps_left):
            self._due_since = now
            self._steps.clear()
        is_measured = self._due_since is not None and now - self._due_since >= WINDOW * self.seconds
        return steps_left if is_measured else MAX_STEPS

    def _measure(self, step: int, config: RunOptions, now: float) -> None:
        """Measures the step that has just ended."""
        if self._last:
            last_step, began = self._last
            intervals = config.val_every, config.sample_every, config.checkpoint_every, config.hellaswag_every
            if any(every > 1 and config.is_due(every, last_step) for every in intervals):
                self._evaluation_seconds = now - began
            else:
                self._steps.append((now, now - began))
        self._last = step, now
        while len(self._steps) > 1 and self._steps[0][0] < now - WINDOW * self.seconds:
            self._steps.popleft()

    def _steps_left(self, step: int, config: RunOptions, now: float) -> int:
        """The steps that fit into the time that is left, at least one."""
        step_seconds = statistics.fmean(seconds for _, seconds in self._steps)
        seconds = max(0.0, STARTED + self.seconds - END_SECONDS - now)
        last = step + int(seconds / step_seconds)
        every = flags_for_length(config, last).get("val_every", config.val_every)
        if every > 0:
            evaluations = last // every - (step - 1) // every + (last % every > 0)  # from this step to the last one
            seconds -= min(evaluations * (self._evaluation_seconds - step_seconds), MOST_EVALUATION * self.seconds)
        return max(1, int(seconds / step_seconds))


def seconds_for_process(run: RunInfo) -> float:
    """The seconds of --minutes that are left for this process from its start, after those of the processes before it."""
    before = seconds_trained(run.config.out, run.first_step) if run.first_step else 0.0
    return 60 * (run.config.minutes or 0.0) - before
