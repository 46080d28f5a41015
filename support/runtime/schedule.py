"""How long a run is, how far it has got, and what is due before its next step."""

from __future__ import annotations

from dataclasses import dataclass

from support.config import TrainConfig
from support.runtime.clock import END_SECONDS
from support.terminal import pluralize


@dataclass(kw_only=True)
class Position:
    """How far a run has got."""

    step: int = 0  # the step that comes next
    progress: float = 0.0  # the fraction of the schedule that is done, see `Schedule.progress`
    last_progress: float | None = None  # the same one step ago; None at the start of a run
    overdue: bool = False  # whether the newest checkpoint is --checkpoint-minutes old, by rank 0's clock

    def has_passed(self, progress: float) -> bool:
        """Returns whether the last step, or the start of the run, has reached this progress."""
        return progress <= self.progress and (self.last_progress is None or self.last_progress < progress)


@dataclass(frozen=True)
class Schedule:
    """The length of a run, --minutes or --max-steps, and when it evaluates, saves and ends."""

    config: TrainConfig
    hellaswag_every: int | None = 0  # --hellaswag-every, or what suits the machine
    cooldown_start: float | None = None  # the progress at which a cooldown begins; None without one

    # -------------------------------------------------------------------------
    # How far

    def progress(self, step: int, time_used: float, passes: float) -> float:
        """Returns the progress of a run before a step, 1 where its decay ends.

        Args:
            time_used, passes: of a run of --minutes: the fraction of its time, and how often it has read its data. The one
                that is nearer to its limit counts.
        """
        config = self.config
        if not config.minutes:
            return step / config.decay_steps
        return max(time_used, min(1.0, passes / config.max_passes) if config.max_passes else 0.0)

    def time_used(self, seconds: float) -> float:
        """Returns the fraction of --minutes that `seconds` of training have used, from 0 to 1; 0 without --minutes."""
        minutes = self.config.minutes
        return min(1.0, seconds / max(1.0, 60 * minutes - END_SECONDS)) if minutes else 0.0

    def is_over(self, step: int, progress: float) -> bool:
        """Returns whether the run has done its last step, or its time is up."""
        return progress >= 1 if self.config.minutes else step >= self.config.max_steps

    def is_last(self, step: int) -> bool:
        """Returns whether a step is known to be the last one. A timed run learns that only afterwards."""
        return not self.config.minutes and step == self.config.max_steps - 1

    # -------------------------------------------------------------------------
    # What is due

    def evaluations_due(self, at: Position) -> set[str]:
        """Returns which of "val", "hella" and "samples" are due before the next step."""
        every = {"val": self.config.val_every, "hella": self.hellaswag_every}
        if at.step > 0:
            every["samples"] = self.config.sample_every
        return {name for name, interval in every.items() if self._is_due(interval, at)}

    def is_checkpoint_due(self, at: Position, last_saved: int) -> bool:
        """Returns whether a checkpoint is due: a lasting one, or one because the newest is too old.

        Args:
            last_saved: the step that was saved last; 0: none.
        """
        return self.config.checkpoint_every != 0 and (at.overdue or self.is_lasting(at, last_saved))

    def is_lasting(self, at: Position, last_saved: int) -> bool:
        """Returns whether a checkpoint is more than a provision against a crash: at intervals, at the end, before a cooldown.

        If the step before was saved, which was before the cooldown, too, a longer run can start from that one.
        """
        every = self.config.checkpoint_every
        just_saved = last_saved > 0 and last_saved == at.step - 1
        return self._is_due(every, at) or (self.is_cooldown_next(at) and not just_saved)

    def is_cooldown_next(self, at: Position) -> bool:
        """Returns whether the cooldown begins with the next step; not for a fork that starts inside it."""
        if self.cooldown_start is None:
            return False
        if at.last_progress is None and at.progress > self.cooldown_start:
            return False  # it has begun in the parent
        return at.has_passed(self.cooldown_start)

    def is_before_cooldown(self, at: Position) -> bool:
        """Returns whether the cooldown has not begun yet, so that a longer run can start here."""
        if self.cooldown_start is None:
            return False
        decided = at.progress if at.last_progress is None else at.last_progress  # the rate of the last step
        return decided <= self.cooldown_start

    def _is_due(self, every: int | None, at: Position) -> bool:
        """Returns whether something is due that is done every few steps, and after the last one.

        Args:
            every: interval in steps; 0 means never, and None means at each quarter of --minutes.
        """
        if every == 0:
            return False
        regularly = any(at.has_passed(n / 4) for n in range(4)) if every is None else at.step % every == 0
        return regularly or self.is_over(at.step, at.progress)

    # -------------------------------------------------------------------------
    # In words

    def fraction_done(self, step: int, progress: float) -> float:
        """Returns the fraction of the steps or of the time that has passed."""
        return progress if self.config.minutes else step / self.config.max_steps

    def describe_position(self, seconds: float) -> str:
        """Says how far a run is, after its step: ` of 19,073`, or `, minute 3.2 of 10`."""
        minutes = self.config.minutes
        return f", minute {seconds / 60:.1f} of {minutes:g}" if minutes else f" of {self.config.max_steps:,}"

    def seconds_left(self, step: int, progress: float, seconds: float, per_step: float | None) -> float | None:
        """Estimates the seconds until the end; None if that is not known.

        Args:
            seconds: passed so far.
            per_step: seconds of a step; None if that is not known yet.
        """
        config = self.config
        if config.minutes:
            left = max(0.0, 60 * config.minutes - seconds)
            return min(left, seconds * (1 - progress) / progress) if config.max_passes and progress else left
        return None if per_step is None else (config.max_steps - step) * per_step

    def describe_length(self, first_step: int, seconds: float, steps_per_pass: float, steps_read: float) -> str:
        """Describes the length, and how many steps a pass over the data takes.

        Args:
            first_step: of this process.
            seconds: of training before it.
            steps_read: the data that was read before, in steps of this size.
        """
        minutes, max_steps, max_passes = self.config.minutes, self.config.max_steps, self.config.max_passes
        if minutes is None:
            passes = (steps_read + max_steps - first_step) / steps_per_pass
            return f"{pluralize(max_steps, 'step')}: {passes:.2f} passes over the data, {_steps(steps_per_pass)} steps each"
        since = f" ({seconds / 60:.1f} already done)" if seconds else ""
        limit = f", but at most {max_passes:g} passes" if max_passes else ""
        time = f"{minutes:g} minute{'' if minutes == 1 else 's'}{since}"
        return f"{time}{limit}; a pass over the data has {_steps(steps_per_pass)} steps"

    def describe_rates(self) -> str:
        """Describes optimizer and learning rates in words."""
        c = self.config
        unit, warmup = "minute" if c.minutes else "step", pluralize(c.warmup_steps, "step")
        after = f" after {warmup}" if c.warmup_steps and not c.minutes else ""
        end, cooldown = f"at minute {c.minutes:g}" if c.minutes else f"at step {c.decay_steps:,}", ""
        if self.cooldown_start is not None:
            start = self.cooldown_start * (c.minutes or c.decay_steps)
            cooldown = f"from {unit} {start:,.{1 if c.minutes else 0}f} on "
        if c.max_passes:  # whichever ends the run first
            end = "at its end"
            cooldown = f"from {self.cooldown_start:.0%} of the run on " if cooldown else ""
        adamw = f" ({c.adamw_lr:.3g} for AdamW)" if c.adamw_lr is not None else ""
        rates = f"learning rate {c.max_lr:.3g}{adamw}{after}, {cooldown}falling to {c.min_lr:.3g} {end}"
        return f"{c.optimizer}, {c.schedule}; {rates}"


def _steps(n: float) -> str:
    return f"{n:,.{1 if n < 100 else 0}f}"  # nobody needs tenths of many
