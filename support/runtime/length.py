"""How long a run is, in steps or in minutes, and how far it is."""

from __future__ import annotations

from dataclasses import dataclass

from support.runtime.clock import END_SECONDS
from support.terminal import pluralize


@dataclass(frozen=True)
class Length:
    """The length of a run: --minutes, or without them --max-steps."""

    minutes: float | None
    max_steps: int
    warmup_steps: int = 0
    decay_steps: int | None = None  # where the decay of the learning rate ends; None: at the end
    max_passes: float = 0.0  # over the data, after which a run of --minutes ends; 0: no limit

    def is_over(self, step: int, progress: float) -> bool:
        """Returns whether the run has done its last step, or its time is up."""
        return progress >= 1 if self.minutes else step >= self.max_steps

    def is_last(self, step: int) -> bool:
        """Returns whether a step is known to be the last one. A timed run learns that only afterwards."""
        return not self.minutes and step == self.max_steps - 1

    def fraction_done(self, step: int, progress: float) -> float:
        """Returns the fraction of the steps or of the time that has passed."""
        return progress if self.minutes else step / self.max_steps

    def progress_after(self, seconds: float) -> float:
        """Returns the progress, from 0 to 1, of a run of --minutes that continues after `seconds` of training; 0 without."""
        return min(1.0, seconds / max(1.0, 60 * self.minutes - END_SECONDS)) if self.minutes else 0.0

    def describe_position(self, seconds: float) -> str:
        """Says how far a run is, after its step: ` of 19,073`, or `, minute 3.2 of 10`."""
        return f", minute {seconds / 60:.1f} of {self.minutes:g}" if self.minutes else f" of {self.max_steps:,}"

    def is_read_enough(self, passes: float) -> bool:
        """Returns whether a run has ended because it has made so many passes over its data."""
        return 0 < self.max_passes <= passes

    def seconds_left(self, step: int, progress: float, seconds: float, per_step: float | None) -> float | None:
        """Estimates the seconds until the end; None if that is not known.

        Args:
            seconds: passed so far.
            per_step: seconds of a step; None if that is not known yet.
        """
        if self.minutes:
            left = max(0.0, 60 * self.minutes - seconds)
            return min(left, seconds * (1 - progress) / progress) if self.max_passes and progress else left
        return None if per_step is None else (self.max_steps - step) * per_step

    def describe(self, first_step: int, seconds: float, steps_per_pass: float, steps_read: float) -> str:
        """Describes the length, and how many steps a pass over the data takes.

        Args:
            first_step: of this process.
            seconds: of training before it.
            steps_read: the data that was read before, in steps of this size.
        """
        if self.minutes is None:
            passes = (steps_read + self.max_steps - first_step) / steps_per_pass
            return f"{pluralize(self.max_steps, 'step')}: {passes:.2f} passes over the data, {steps_per_pass:,.1f} steps each"
        since = f", of which {seconds / 60:.1f} have passed" if seconds else ""
        minutes = f"{self.minutes:g} minute{'' if self.minutes == 1 else 's'}{since}"
        limit = f", but at most {self.max_passes:g} passes" if self.max_passes else ""
        return f"{minutes}{limit}; a pass over the data has {steps_per_pass:,.1f} steps"

    def times(self, factor: float) -> str | None:
        """Returns the flag that makes a run `factor` times as long; None if its decay ends earlier, and nothing would change."""
        if self.minutes:
            return f"--minutes {round(factor * self.minutes, 1):g}"
        return f"--max-steps {round(factor * self.max_steps)}" if self.decay_steps in (None, self.max_steps) else None
