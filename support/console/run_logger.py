"""Reports a run: values to the log and the trackers, lines to the console."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from support import terminal
from support.checkpoints.history import (
    FILE,
    append_lines,
    argmin_loss,
    comparable_values,
    describe_end,
    describe_start,
    read_starts,
    starts_of_parent,
)
from support.checkpoints.run_info import RunInfo
from support.cli import describe_error, warn
from support.console.curves import CurvesFile
from support.console.log import FORMATS, LogFile, read_log
from support.console.trackers import Trackers, start_trackers
from support.runtime import devices
from support.runtime.distributed import Distributed
from support.runtime.profiler import WARM_UP_STEPS, make_profiler
from support.startup import STARTED

if TYPE_CHECKING:
    from support.checkpoints.state import TrainState

LINE_SECONDS = 10.0  # between step lines on a terminal, so that the header stays in view
PROGRESS_SECONDS = 60.0  # between the lines that say how far a run is, where no progress bar does


class RunLogger:
    """Reports validations, scores, samples and steps; on all ranks but 0 it does nothing.

    Values go to `log.txt` and `curves.png` in `--out` and to the trackers, until the `with` block ends; a line about
    this process goes to `starts.jsonl` at once. A resumed run continues the files and curves of the earlier process, and
    a fork those of its parent, if they are beside the checkpoint.

    On a terminal, a progress bar shows how far the run has got, and only some of the steps get a line of their own.
    Elsewhere, as in the output file of a Slurm job, `print_progress` does.

    Attributes:
        values: validation losses ("val") and HellaSwag scores ("hella") by step, as in the log. Those of earlier processes
            and of the parent are among them if they are comparable with this process'.

    Raises:
        UserError: on all ranks, if a tracker cannot start.
        OSError: at the end, if the last lines of the log cannot be written.
    """

    def __init__(self, run: RunInfo, dist: Distributed, progress: float = 0.0):
        """Continues the files of the run; `progress` says how far it is when this process starts."""
        self.run, self.config, self.print0, self.world_size = run, run.config, dist.print0, dist.world_size
        self.first_step = run.first_step
        self.peak_flops = devices.peak_flops(dist.device, run.machine.dtype)
        with dist.failing_together():
            self._trackers = Trackers(start_trackers(run.config, self.first_step) if dist.rank == 0 else [])
        self._folder = folder = Path(run.config.out) if dist.rank == 0 else None
        # in starts.jsonl: the run's so far or, in a fork, its parent's; and this one
        self._starts = list[dict[str, Any]]()
        self.log, self.evaluations = LogFile(), {"val": dict[int, float](), "hella": dict[int, float]()}
        if folder:
            self._continue_files(folder, dist)
        self._curves = CurvesFile(folder)
        self._next_step = self.first_step
        # of the checkpoint that this process starts from
        self._known_loss = run.checkpoint.validation_loss(run.comparable["val"]) if run.checkpoint else None
        self._profiler = make_profiler(run.config.profile, run.config.out, dist.device, dist.rank, dist.print0)
        self._bar = tqdm(
            total=1.0, initial=run.schedule.fraction_done(self.first_step, progress), file=sys.stdout, leave=False,
            disable=dist.rank > 0 or not terminal.is_terminal(), dynamic_ncols=True, miniters=0,
            smoothing=0,  # the time left counts evaluations to come as often as those so far
            bar_format="{desc} |{bar}| {percentage:.0f}% {elapsed}<{remaining}",
        )  # fmt: skip
        self._line_shown, self._progress_shown, self._first_step_ended = 0.0, time.perf_counter(), 0.0

    def _continue_files(self, folder: Path, dist: Distributed) -> None:
        run, path, first_step = self.run, folder / "log.txt", self.first_step
        earlier, source = read_starts(folder), path
        if not first_step and (dropped := len(read_log(path, finite=False)["train"])):
            warn(f"{folder} has no checkpoint, so the run starts over. Its log of {dropped:,} steps is replaced.")
        if run.checkpoint and run.forked:
            earlier, source = starts_of_parent(run.checkpoint), run.checkpoint.path.parent / "log.txt"
            if not earlier:
                first_step = 0  # begins a new log
                text = f"the log of the run that saved {run.checkpoint.path} is missing, so this log begins at step {run.first_step:,}"
                self.print0(terminal.labelled("note", text))
        elif run.checkpoint and not any(start["run"] == run.id for start in earlier):
            lacking = f"{folder / FILE} lacks the starts of this run before step {first_step:,}"
            warn(f"{lacking}, so the losses before it are not compared with the later ones.")
        self._starts = [*earlier, describe_start(run, dist)]
        try:  # before the log: a killed process leaves none without its start
            append_lines(folder, *self._starts)
        except OSError as error:
            warn(f"cannot write {folder / FILE} ({describe_error(error, folder)}).")
        self.log, logged = LogFile(path, first_step, source), read_log(path, finite=False)
        if missing := first_step - len(logged["train"]):
            warn(f"{path} lacks {missing:,} of the {first_step:,} steps before this one.")
        for name in self.evaluations:
            self.evaluations[name] = comparable_values(name, logged[name], self._starts)

    def log_known_loss(self) -> None:
        """Logs the validation loss of the checkpoint that this process starts from, if that is known."""
        if self._known_loss is not None:
            self._evaluation(self.first_step, "val", self._known_loss)

    def validation(self, step: int, loss: float | None) -> None:
        """Reports a validation loss. None means that the validation was interrupted, and nothing is reported."""
        if loss is None:
            return
        self._evaluation(step, "val", loss)
        if (best := argmin_loss(self.evaluations["val"])) is not None:
            self._trackers.log(step, {"loss/best_val": self.evaluations["val"][best]})
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
        result = f"{acc_norm:.4f} ± {stderr:.4f} on {self.run.hellaswag_items:,} items"
        line = f"step {step:5d} | HellaSwag acc_norm: {result} | {seconds:.1f}s"
        self.print0(terminal.styled(line, terminal.BOLD))

    def samples(self, step: int, texts: Sequence[str]) -> None:
        self._trackers.log_samples(step, texts)
        for i, text in enumerate(texts):
            line = f"step {step:5d} | sample {i}: {terminal.on_one_line(text)}"
            self.print0(terminal.styled(terminal.fit_lines(line, 2), terminal.CYAN))

    def step(
        self, state: TrainState, logged: Mapping[str, float], skip_reason: str | None, begins_cooldown: bool
    ) -> None:
        """Reports a step; `skip_reason` says why it was not applied.

        MFU is the fraction of the GPUs' peak FLOP/s that the model's arithmetic reaches, where that peak is known.

        Args:
            logged: the values that are written to log.txt, by name: train (the loss), lr, norm and seconds, and any others.
        """
        loss, lr, norm, dt = (logged[name] for name in ("train", "lr", "norm", "seconds"))
        step, now = state.step, time.perf_counter()
        self._next_step = step + 1
        speed = self.config.total_batch_size / dt
        mfu = speed * self.run.flops_per_token / (self.peak_flops * self.world_size) if self.peak_flops else None
        self._trackers.log_value(step, "train", loss)
        self.log.write(step, logged)
        if begins_cooldown:
            self.print0(terminal.styled(f"step {step:5d} | the cooldown begins", terminal.BOLD))
        self._bar.set_description_str(f"step {step} | loss {loss:.4f} | {speed:,.0f} tok/s", refresh=False)
        self._bar.update(self.run.schedule.fraction_done(step + 1, state.progress) - self._bar.n)
        if skip_reason or self._line_due(step, now):
            self._line_shown = now
            line = f"step {step:5d} | loss: {loss:.6f} | lr {lr:.4e} | norm: {norm:.4f} | dt: {dt * 1000:.2f}ms"
            line += f" | tok/sec: {speed:.2f}" + (f" | mfu: {mfu:.1%}" if mfu is not None else "")
            self.print0(terminal.fit_fields(line))
        if skip_reason:
            self.print0(terminal.styled(f"step {step:5d} | {skip_reason}", terminal.YELLOW))
        if step == self.first_step:
            self._first_step_ended = now
        if step == self.first_step and self.run.machine.compiled:
            self.print0(terminal.labelled("note", f"the first step ended {now - STARTED:.1f}s after the start"))
        # do not rename these: a resumed run continues its curves
        values = {"update/lr": lr, "update/norm": norm, "speed/tokens_per_second": speed}
        self._trackers.log(step, values | ({"speed/mfu": mfu} if mfu is not None else {}))
        if self._profiler:
            self._profiler.step()

    def print_progress(self, state: TrainState, evaluated: bool) -> None:
        """Prints how far the run is and when it ends, each minute and after an evaluation, unless a progress bar does."""
        if not self._bar.disable:
            return
        now, schedule = time.perf_counter(), self.run.schedule
        if not evaluated and now - self._progress_shown < PROGRESS_SECONDS:
            return
        self._progress_shown = now
        seconds = now - STARTED + (self.run.checkpoint.seconds if self.run.checkpoint else 0.0)
        steps = state.step - self.first_step - 1  # after the first one, which may have compiled
        left = schedule.seconds_left(
            state.step, state.progress, seconds, (now - self._first_step_ended) / steps if steps > 0 else None
        )
        position = schedule.describe_position(seconds)
        self.print0(describe_progress(position, state.step, now - STARTED, left, state.tokens, datetime.now()))

    def sync(self) -> None:
        """Waits until everything reported so far is on the disk and with the trackers: no checkpoint is ahead of them.

        Raises:
            OSError: something could not be written.
        """
        self.log.sync()
        if self._folder:
            append_lines(self._folder, *self._starts)  # again, if the first time failed or the file was removed
        self._trackers.flush()

    def __enter__(self) -> RunLogger:
        if self._profiler:
            self._profiler.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        if self._profiler:
            recorded = self._profiler.step_num - WARM_UP_STEPS
            if recorded < self.config.profile:
                last = "; the last one in the profile is the end of the run" if recorded > 0 else ""
                warn(
                    f"the run ended after {max(0, recorded)} of the {self.config.profile} recorded steps of --profile{last}."
                )
            if recorded <= 0:
                self._profiler.on_trace_ready = None
            self._profiler.stop()
        self._trackers.close(succeeded=kind is None)
        try:
            if self._folder:
                with contextlib.suppress(OSError):  # as if it had been killed
                    append_lines(self._folder, *self._starts, describe_end(self._next_step, value))
            if kind is None:
                self.log.close()
                self._curves.draw()
        finally:
            self._curves.wait()
            self._bar.close()  # last: drawing takes seconds on a busy machine

    def _evaluation(self, step: int, name: str, value: float) -> None:
        self._trackers.log_value(step, name, value)
        self.log.write(step, {name: value})
        self.evaluations[name][step] = float(f"{value:{FORMATS[name]}}")
        self._curves.update()

    def _line_due(self, step: int, now: float) -> bool:
        """Returns whether a step that was not skipped gets a line."""
        if not self._bar.disable and self.config.log_every is None:
            due = now - self._line_shown >= LINE_SECONDS
        else:
            due = step % (self.config.log_every or 1) == 0
        return due or step == self.first_step or self.run.schedule.is_last(step)


def describe_progress(position: str, step: int, elapsed: float, left: float | None, tokens: int, now: datetime) -> str:
    """Says how far a run is: `step   250 of 19,073 | 0:12:03 elapsed | ends about 2026-02-28 23:50 | 131,072,000 tokens`.

    Args:
        position: how far it is, as it follows the step.
        elapsed: seconds since the start of the process.
        left: seconds until the end, or None if that is not known yet.
        now: the local time.
    """
    ends = [] if left is None else [f"ends about {now + timedelta(seconds=left):%Y-%m-%d %H:%M}"]
    return " | ".join([f"step {step:5d}{position}", f"{format_duration(elapsed)} elapsed", *ends, f"{tokens:,} tokens"])


def format_duration(seconds: float) -> str:
    """Formats a duration: `1:02:03`, or `2 days, 1:02:03`."""
    return str(timedelta(seconds=round(seconds)))
