"""Reports a run: values to the log and the trackers, lines to the console."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from support.console import terminal
from support.console.curves import CurvesFile
from support.console.log import RunLog
from support.console.starts import append_start, describe_start
from support.console.trackers import Trackers, start_trackers
from support.runtime import devices
from support.runtime.distributed import Distributed
from support.runtime.profiler import make_profiler
from support.runtime.run_info import RunInfo
from support.startup import STARTED

if TYPE_CHECKING:
    from support.checkpoints.state import TrainState

LINE_SECONDS = 10.0  # between step lines on a terminal, so that the header stays in view
ETA_EVERY = 50  # steps between notes on the remaining time, if stdout is a file


class RunLogger:
    """Reports validations, scores, samples and steps; on all ranks but 0 it does nothing.

    Values go to `log.txt` and `curves.png` in `--out` and to the trackers, until the `with` block ends; a line about
    this process goes to `starts.jsonl` at once. A resumed run continues the files and curves of the earlier process.
    What that process logged for the first step is not measured again.

    On a terminal, a status line shows how far the run has got, and only some of the steps get a line of their own.

    Raises:
        UserError: on all ranks, if a tracker cannot start.
        OSError: at the end, if the last lines of the log cannot be written.
    """

    def __init__(self, run: RunInfo, dist: Distributed, state: TrainState):
        self.run, self.config, self.print0, self.world_size = run, run.config, dist.print0, dist.world_size
        self.first_step = run.first_step
        self.flops_per_token, self.peak_flops = run.model.flops_per_token(), devices.peak_flops(dist.device)
        self._trackers = Trackers(dist.on_rank_zero(lambda: start_trackers(run.config, self.first_step)) or [])
        due = self._due(state)
        folder = Path(run.config.out) if dist.rank == 0 else None
        source = run.checkpoint.path.parent / "log.txt" if run.checkpoint and run.config.starts_fork else None
        kept_names = due if run.checkpoint and not source else ()
        self._log = RunLog(folder and folder / "log.txt", self.first_step, kept_names, source)
        if folder:
            append_start(folder, describe_start(run, dist))
        self._curves = CurvesFile(folder)
        self._profiler = make_profiler(run.config.profile, run.config.out, dist.device, dist.rank, dist.print0)
        for name, value in self._log.kept.items():  # trackers hide their values from first_step on
            self._trackers.log_value(self.first_step, name, value)
        # every rank must know, or the others would wait forever in the next evaluation
        self._logged = dist.once(lambda: due & self._log.kept.keys())
        self._status = terminal.StatusLine(dist.rank == 0 and terminal.is_terminal())
        self._line_shown = self._first_step_ended = 0.0

    def evaluations_due(self, state: TrainState) -> set[str]:
        """Returns which of "val", "hella" and "samples" are due before a step and not logged by an earlier process."""
        return self._due(state) - (self._logged if state.step == self.first_step else set())

    def _due(self, state: TrainState) -> set[str]:
        samples_every = self.config.sample_every if state.step > 0 else 0
        every = {"val": self.config.val_every, "hella": self.run.machine.hellaswag_every, "samples": samples_every}
        return {name for name, interval in every.items() if self.config.is_due(interval, state)}

    def validation(self, step: int, loss: float | None) -> None:
        """Reports a validation loss. None means that the validation was interrupted, and nothing is reported."""
        if loss is None:
            return
        self._evaluation(step, "val", loss)
        self.print0(
            terminal.styled(
                f"step {step:5d} | val loss: {loss:.4f} over {self.run.validated_tokens:,} tokens", terminal.BOLD
            )
        )

    def hellaswag(self, step: int, score: tuple[float, float, float] | None) -> None:
        """Reports a `score`: acc_norm, its standard error and the seconds taken; None if scoring was interrupted."""
        if score is None:
            return
        acc_norm, stderr, seconds = score
        self._evaluation(step, "hella", acc_norm)
        result = f"{acc_norm:.4f} ± {stderr:.4f} of {self.run.hellaswag_items:,} items"
        line = f"step {step:5d} | HellaSwag acc_norm: {result} | {seconds:.1f}s"
        self.print0(terminal.styled(line, terminal.BOLD))

    def samples(self, step: int, texts: Sequence[str]) -> None:
        self._trackers.log_samples(step, texts)
        for i, text in enumerate(texts):
            line = f"step {step:5d} | sample {i}: {terminal.on_one_line(text)}"
            self.print0(terminal.styled(terminal.fit_lines(line, 2), terminal.CYAN))

    def step(self, state: TrainState, loss: float, lr: float, norm: float, dt: float, skipped: str | None) -> None:
        """Reports a step that took `dt` seconds; `skipped` says why it was not applied.

        MFU is the fraction of the GPUs' peak FLOP/s that the model's arithmetic reaches, where that peak is known.
        """
        step, now = state.step, time.perf_counter()
        speed = self.config.total_batch_size / dt
        mfu = speed * self.flops_per_token / (self.peak_flops * self.world_size) if self.peak_flops else None
        self._trackers.log_value(step, "train", loss)
        self._log.write(step, {"train": loss, "lr": lr, "norm": norm, "seconds": dt})
        if self.config.schedule == "wsd" and state.has_passed(self.config.cooldown_start):
            self.print0(terminal.styled(f"step {step:5d} | the cooldown begins", terminal.BOLD))
        eta = self._eta(step, now)
        self._status.show(self._describe_progress(step, loss, speed, now, eta))
        due = self._line_due(step, now)
        if due or skipped:
            self._line_shown = now
            line = f"step {step:5d} | loss: {loss:.6f} | lr {lr:.4e} | norm: {norm:.4f} | dt: {dt * 1000:.2f}ms"
            line += f" | tok/sec: {speed:.2f}" + (f" | mfu: {mfu:.1%}" if mfu is not None else "")
            self.print0(terminal.fit_fields(line))
        if skipped:
            self.print0(terminal.styled(f"step {step:5d} | {skipped}", terminal.YELLOW))
        if eta is not None and due and not self._status.enabled and step % ETA_EVERY == 0:
            done, total = ((n * self.config.total_batch_size) for n in (step + 1, self.config.max_steps))
            since = " since the resume" if self.first_step else ""
            note = f"{done:,} of {total:,} tokens; {clock(now - STARTED)} elapsed{since}, ETA {clock(eta)}"
            self.print0(terminal.labelled("note", note))
        if step == self.first_step and self.run.machine.compiled:
            self.print0(terminal.labelled("note", f"the first step ended {now - STARTED:.1f}s after the start"))
        # do not rename these: a resumed run continues its curves
        values = {"update/lr": lr, "update/norm": norm, "speed/tokens_per_second": speed}
        self._trackers.log(step, values | ({"speed/mfu": mfu} if mfu is not None else {}))
        if self._profiler:
            self._profiler.step()

    def sync(self) -> None:
        """Waits until everything reported is on the disk: a checkpoint must never be ahead of its log.

        Raises:
            OSError: some of it could not be written.
        """
        self._log.sync()
        self._trackers.flush()

    def __enter__(self) -> RunLogger:
        if self._profiler:
            self._profiler.start()
        self._status.show(f"step {self._count(self.first_step)}")
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        if self._profiler:
            self._profiler.stop()
        self._trackers.close(succeeded=kind is None)
        try:
            if kind is None:
                self._log.close()
                self._curves.draw()
        finally:
            self._status.close()  # last: drawing takes seconds on a busy machine

    def _evaluation(self, step: int, name: str, value: float) -> None:
        self._trackers.log_value(step, name, value)
        self._log.write(step, {name: value})
        self._curves.update()

    def _line_due(self, step: int, now: float) -> bool:
        """Returns whether a step that was not skipped gets a line."""
        if self._status.enabled and self.config.log_every is None:
            due = now - self._line_shown >= LINE_SECONDS
        else:
            due = step % (self.config.log_every or 1) == 0
        return due or step == self.first_step or self._is_last(step)

    def _is_last(self, step: int) -> bool:
        """Returns whether this is known to be the last step; with --minutes, it never is."""
        return self.config.minutes is None and step == self.config.max_steps - 1

    def _eta(self, step: int, now: float) -> float | None:
        """Returns the remaining seconds, with evaluations and checkpoints; None with --minutes, and after the first or last step."""
        if step == self.first_step:
            self._first_step_ended = now
        if self.config.minutes or step == self.first_step or self._is_last(step):
            return None
        return (now - self._first_step_ended) / (step - self.first_step) * (self.config.max_steps - step - 1)

    def _describe_progress(self, step: int, loss: float, speed: float, now: float, eta: float | None) -> str:
        tokens = f"{speed:,.0f}" if speed < 1e5 else f"{speed / 1e3:,.0f}k"
        remaining = "" if eta is None else f", ETA {clock(eta)}"
        if self.config.minutes:
            before = self.run.checkpoint.seconds if self.run.checkpoint else 0.0
            remaining = f" of {clock(60 * self.config.minutes - before)}"
        elapsed = f"{clock(now - STARTED)} elapsed{remaining}"
        return f"step {self._count(step + 1)} | loss {loss:.4f} | {tokens} tok/s | {elapsed}"

    def _count(self, step: int) -> str:
        """Formats a step: `12/1000`; with --minutes, `12`."""
        return str(step) if self.config.minutes else f"{step}/{self.config.max_steps}"


def clock(seconds: float) -> str:
    """Formats a duration: `1:02:03`, or `2 days, 1:02:03`."""
    return str(timedelta(seconds=round(seconds)))
