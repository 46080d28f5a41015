"""--minutes: the cooldown begins when its share of the run is what there is time for."""

from __future__ import annotations

import statistics
import time
from bisect import bisect
from dataclasses import replace
from itertools import pairwise
from typing import Any, TypeVar

from support.console.log import seconds_trained
from support.data.presets import MAX_STEPS, flags_for_length
from support.runtime.distributed import Distributed
from support.runtime.options import RunOptions
from support.runtime.run_info import RunInfo
from support.startup import STARTED

Config = TypeVar("Config", bound=RunOptions)
END_SECONDS = 4.0  # after the last evaluation: the checkpoint, curves.png, a sample, the end of the process
# The next steps will be as fast as those in LONG of the time were, unless the last ones, in RECENT, are OTHER_PACE times
# slower or faster. The cooldown is due for WAIT before it begins, as it may be due because steps have just become slower:
# beside two busy programs on two cores they are twice as slow now and then, for up to ten seconds.
WAIT, RECENT, LONG, OTHER_PACE = 0.1, 0.05, 0.5, 1.3
MOST_EVALUATION = 0.1  # of the time, for all validations to come: the first one may have compiled


class Deadline:
    """Fixes the number of steps of a run of --minutes: late, so that it ends on time on a machine that became busier.

    Until then the learning rate is constant, so the number is not needed. The cooldown begins when it would be
    `cooldown_fraction` of all steps if it filled the time that is left. Rank 0's clock decides for all ranks. The number
    is part of the configuration from then on, so of every checkpoint, and a resumed run keeps it.
    """

    def __init__(self, run: RunInfo, dist: Distributed):
        self.run, self.dist = run, dist
        self.seconds = seconds_for_process(run) if dist.rank == 0 else 0.0
        self._last: tuple[int, float] | None = None  # the step that has just ended, and when it began
        self._ended, self._total = [0.0], [0.0]  # when each measured step ended, and the seconds of all up to it
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
            length["warmup_steps"] = min(config.warmup_steps, step)  # or there would be no cooldown
        elif step == config.max_steps:  # the estimate was too low
            length = {**flags_for_length(config, 2 * step), "decay_steps": MAX_STEPS}
        else:
            return config
        self.run.config = replace(config, **length)
        return self.run.config

    def cooldown_steps(self, step: int, config: RunOptions) -> int:
        """The steps of the cooldown, if it begins now; MAX_STEPS if it does not."""
        now, wait = time.perf_counter(), WAIT * self.seconds
        self._measure(step, config, now)
        if len(self._total) == 1:
            return MAX_STEPS
        step_seconds = self._step_seconds(now)
        steps_left = self._steps_left(step, config, now, step_seconds)
        if steps_left - wait / step_seconds > max(1.0, config.cooldown_fraction * (step + steps_left)):
            self._due_since = None
            return MAX_STEPS
        if self._due_since is None:
            self._due_since = now
        has_waited = now - self._due_since >= wait or step_seconds >= wait
        return steps_left if has_waited else MAX_STEPS

    def _measure(self, step: int, config: RunOptions, now: float) -> None:
        """Measures the step that has just ended, unless it was the first of this process, which takes longer."""
        if self._last and self._last[0] > self.run.first_step:
            last_step, began = self._last
            intervals = config.val_every, config.sample_every, config.checkpoint_every, config.hellaswag_every
            if any(every > 1 and config.is_due(every, last_step) for every in intervals):
                self._evaluation_seconds = now - began
            else:
                self._ended.append(now)
                self._total.append(self._total[-1] + now - began)
        self._last = step, now

    def _step_seconds(self, now: float) -> float:
        """How long the next steps will take."""

        def steps_in(fraction: float) -> int:
            return len(self._ended) - bisect(self._ended, now - fraction * self.seconds)

        recent = min(max(steps_in(RECENT), 3), len(self._ended) - 1)
        long = min(max(steps_in(LONG), recent), len(self._ended) - 1)
        pace = statistics.median(b - a for a, b in pairwise(self._total[-recent - 1 :]))  # one slow step is no pace
        mean = (self._total[-1] - self._total[-long - 1]) / long
        return mean if 1 / OTHER_PACE < pace / mean < OTHER_PACE else pace

    def _steps_left(self, step: int, config: RunOptions, now: float, step_seconds: float) -> int:
        """The steps that fit into the time that is left, at least one."""
        seconds = max(0.0, STARTED + self.seconds - END_SECONDS - now)
        last = step + int(seconds / step_seconds)
        every = flags_for_length(config, last).get("val_every", config.val_every)
        if every > 0:
            evaluations = last // every - (step - 1) // every + (last % every > 0)  # from this step to the last one
            evaluation_seconds = max(0.0, self._evaluation_seconds - step_seconds)
            seconds -= min(evaluations * evaluation_seconds, MOST_EVALUATION * self.seconds)
        return max(1, int(seconds / step_seconds))


def seconds_for_process(run: RunInfo) -> float:
    """The seconds of --minutes that are left for this process from its start, after those of the processes before it."""
    before = seconds_trained(run.config.out, run.first_step) if run.first_step else 0.0
    return 60 * (run.config.minutes or 0.0) - before
