"""Reports a run: values to the log and the trackers, lines to the console."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from support.console import terminal
from support.console.curves import CurvesFile
from support.console.log import MetricsLog, RunLog
from support.console.record import RunRecord, describe_run
from support.console.terminal import pluralize
from support.console.trackers import Trackers, start_trackers
from support.runtime import devices
from support.runtime.distributed import Distributed
from support.runtime.options import RunOptions
from support.runtime.profiler import Profiler
from support.runtime.run_info import RunInfo
from support.startup import STARTED

ETA_EVERY, ETA_WINDOW = 50, 250  # steps between two estimates of the remaining time, and steps that they are based on
# Lines of steps on a terminal: about one in LINE_SECONDS, so that the header stays in view, and at most MAX_LINES in a run.
LINE_SECONDS, MIN_LINES, MAX_LINES = 10.0, 5, 500
SLOW_START = 20.0  # seconds up to the end of the first step, that are worth a word
EVALUATION_FLAGS = {
    "val": ("val_tokens",),
    "hella": ("hellaswag_data", "hellaswag_limit"),
    "samples": ("sample_every", "prompt"),
}


class RunLogger:
    """Reports validations, scores, samples and steps; on all ranks but 0 it does nothing.

    Values go to `log.txt`, `metrics.jsonl` and `curves.png` in `--out` and to the trackers, until the end of a `with`;
    the record goes to `run.json` at once. A resumed run continues the files and the curves of the process before it.
    What that one has logged of the first step is not computed again, unless the flags for it have changed.

    On a terminal, a status line shows how far the run is, and only some of the steps get a line of their own.

    Raises:
        UserError: on all ranks, if a tracker cannot start; at the end, if the last lines of the log cannot be written.
    """

    def __init__(self, run: RunInfo, dist: Distributed):
        self.run, self.print0, self.world_size = run, dist.print0, dist.world_size
        self.first_step = run.first_step
        self._hellaswag_items = run.hellaswag_items
        self.flops_per_token, self.peak_flops = run.model.flops_per_token(), devices.peak_flops(dist.device)
        self._trackers = Trackers(dist.on_rank_zero(lambda: start_trackers(run.config, self.first_step)) or [])
        due = self._due(self.first_step)
        unchanged = _unchanged_evaluations(run)
        folder = Path(run.config.out) if dist.rank == 0 else None
        self._log = RunLog(folder and folder / "log.txt", self.first_step, due & unchanged)
        self._metrics = MetricsLog(folder and folder / "metrics.jsonl", self.first_step)
        self._record = RunRecord(folder, describe_run(run, dist), self.first_step) if folder else None
        if self._record and self._record.written_anew:
            self.print0("note    run.json was missing or damaged: a new one begins with this resume")
        self._curves = CurvesFile(folder)
        self._profiler = Profiler(run.config.profile, run.config.out, dist.device, dist.rank, dist.print0)
        for name, value in self._log.kept.items():  # trackers hide what they have of first_step and later
            self._trackers.log_value(self.first_step, name, value)
        # every rank must know, or the others wait forever in the next evaluation
        values = sorted(due - {"samples"})
        self._reported = {name for name in values if dist.all_reduce_min(dist.rank > 0 or name in self._log.kept)}
        tracked = run.config.tensorboard or run.config.wandb
        if values and self._reported == set(values) and "samples" in unchanged and not tracked:
            self._reported.add("samples")  # which come right after the values
        self._marks: deque[tuple[int, float]] = deque(maxlen=ETA_WINDOW // ETA_EVERY)  # steps, and when they ended
        self._status = terminal.StatusLine(dist.rank == 0 and terminal.is_terminal())
        self._line_every, self._log_every = 1, run.config.log_every

    @property
    def config(self) -> RunOptions:
        """That of the run, whose number of steps --minutes fixes late."""
        return self.run.config

    @property
    def max_steps(self) -> int:
        return self.run.config.max_steps

    def length_known(self, flags: Mapping[str, Any]) -> None:
        """Records the `flags` that changed when --minutes fixed the number of steps."""
        self._marks.clear()
        if self._record:
            self._record.change_flags(flags)

    def evaluations_due(self, step: int) -> set[str]:
        """What is due before a step: "val", "hella" and "samples"; but not what an earlier process has logged."""
        return self._due(step) - (self._reported if step == self.first_step else set())

    def _due(self, step: int) -> set[str]:
        c = self.config
        every = {"val": c.val_every, "hella": c.hellaswag_every, "samples": c.sample_every if step > 0 else 0}
        return {name for name, n in every.items() if c.is_due(n, step)}

    def validation(self, step: int, loss: float | None) -> None:
        """A validation loss, if it was not interrupted."""
        if loss is None:
            return
        self._value(step, "val", loss)
        self.print0(terminal.styled(f"step {step:5d} | val loss: {loss:.4f}", terminal.BOLD))

    def hellaswag(self, step: int, score: tuple[float, float, float] | None) -> None:
        """acc_norm, its standard error and the seconds that it took, if that was not interrupted."""
        if score is None:
            return
        acc_norm, stderr, seconds = score
        self._value(step, "hella", acc_norm)
        result = f"{acc_norm:.4f} ± {stderr:.4f} of {self._hellaswag_items:,} items"
        line = f"step {step:5d} | HellaSwag acc_norm: {result} | {seconds:.1f}s"
        self.print0(terminal.styled(line, terminal.BOLD))

    def samples(self, step: int, texts: Sequence[str]) -> None:
        self._trackers.log_samples(step, texts)
        for i, text in enumerate(texts):
            line = f"step {step:5d} | sample {i}: {terminal.on_one_line(text)}"
            self.print0(terminal.styled(terminal.fit_lines(line, 2), terminal.CYAN))

    def step(self, step: int, loss: float, lr: float, norm: float, dt: float, skipped: str | None) -> None:
        """A step that took `dt` seconds; `skipped` says why it was not applied.

        MFU is the fraction of the GPUs' peak FLOP/s that the model's arithmetic reaches, where that peak is known.
        """
        now = time.perf_counter()
        speed = self.config.total_batch_size / dt
        mfu = speed * self.flops_per_token / (self.peak_flops * self.world_size) if self.peak_flops else None
        self._value(step, "train", loss)
        self._metrics.write(step, loss, lr, norm, dt, (step + 1) * self.config.total_batch_size, skipped is not None)
        self._curves.update()
        if self.config.schedule == "wsd" and step == self.config.cooldown_start:
            cooldown = f"{pluralize(self.config.cooldown_steps, 'step')}, to step {self.config.decay_steps}"
            self.print0(terminal.styled(f"step {step:5d} | the cooldown begins: {cooldown}", terminal.BOLD))
        due = self._line_due(step, dt)
        eta = self._eta(step, now)
        starts = step == self.first_step and (self.config.compile or now - STARTED >= SLOW_START)
        notes = [f"the first step ended {now - STARTED:.1f}s after the start"] if starts else []
        self._status.show(self._describe_progress(step, loss, speed, now, eta))
        if due or skipped or notes:
            line = f"step {step:5d} | loss: {loss:.6f} | lr {lr:.4e} | norm: {norm:.4f} | dt: {dt * 1000:.2f}ms"
            line += f" | tok/sec: {speed:.2f}" + (f" | mfu: {mfu:.1%}" if mfu is not None else "")
            self.print0(terminal.fit_fields(line))
        if skipped:
            self.print0(terminal.styled(f"step {step:5d} | {skipped}", terminal.YELLOW))
        if eta is not None and due and not self._status.enabled and self._marks[-1][0] == step:
            done, total = ((n * self.config.total_batch_size) for n in (step + 1, self.max_steps))
            since = " since the resume" if self.first_step else ""
            notes.insert(0, f"{done:,} of {total:,} tokens; {clock(now - STARTED)} elapsed{since}, ETA {clock(eta)}")
        for note in notes:
            self.print0(terminal.labelled("note", note))
        # these names stay, so that a resumed run continues its curves
        values = {"update/lr": lr, "update/norm": norm, "speed/tokens_per_second": speed}
        self._trackers.log(step, values | ({"speed/mfu": mfu} if mfu is not None else {}))
        self._profiler.step()

    def sync(self) -> None:
        """Waits until everything reported is on the disk: a checkpoint must never be ahead of its log.

        Raises:
            OSError: some of it could not be written.
        """
        self._log.sync()
        self._metrics.sync()
        self._trackers.flush()

    def __enter__(self) -> RunLogger:
        self._profiler.start()
        self._status.open()
        self._status.show(f"step {self._count(self.first_step)}")
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self._profiler.stop()
        self._status.close()
        self._trackers.close(succeeded=kind is None)
        if kind is None:
            try:
                self._metrics.close()
            finally:
                self._log.close()
            self._curves.draw()

    def _value(self, step: int, name: str, value: float) -> None:
        self._trackers.log_value(step, name, value)
        self._log.write(step, name, value)
        self._curves.outdated |= name != "train"

    def _line_due(self, step: int, dt: float) -> bool:
        """Whether a step gets a line, without regard to what else there is to say about it.

        On a terminal, the lines are 1, 2, 5, 10, 20, ... steps apart, as the fastest step so far suggests.
        """
        every = self._log_every or self._line_every
        if self._status.enabled and self._log_every is None:
            steps = self.max_steps - self.first_step
            wanted = max(LINE_SECONDS / dt, steps / MAX_LINES)
            allowed = [n * 10**e for e in range(10) for n in (1, 2, 5) if n * 10**e <= max(1, steps / MIN_LINES)]
            self._line_every = max(self._line_every, next((n for n in allowed if n >= wanted), allowed[-1]))
        return step % every == 0 or step in (self.first_step, self.max_steps - 1)

    def _eta(self, step: int, now: float) -> float | None:
        """The remaining seconds, evaluations and checkpoints included. None at first: that step compiles."""
        if self.config.open_ended or step + 1 == self.max_steps:
            return None
        eta = None
        if self._marks:
            earlier, then = self._marks[0]
            eta = (now - then) / (step - earlier) * (self.max_steps - step - 1)
        if not self._marks or step % ETA_EVERY == 0:
            self._marks.append((step, now))
        return eta

    def _describe_progress(self, step: int, loss: float, speed: float, now: float, eta: float | None) -> str:
        tokens = f"{speed:,.0f}" if speed < 1e5 else f"{speed / 1e3:,.0f}k"
        remaining = "" if eta is None else f", ETA {clock(eta)}"
        if self.config.open_ended and self.config.minutes and not self.first_step:
            remaining = f" of {clock(60 * self.config.minutes)}"
        elapsed = f"{clock(now - STARTED)} elapsed{remaining}"
        return f"step {self._count(step + 1)} | loss {loss:.4f} | {tokens} tok/s | {elapsed}"

    def _count(self, step: int) -> str:
        """`12/1000`; as long as the number of steps is open, `12`."""
        return str(step) if self.config.open_ended else f"{step}/{self.max_steps}"


def _unchanged_evaluations(run: RunInfo) -> set[str]:
    """The evaluations whose flags are those of the process before this one."""
    earlier = run.resumed_from.config if run.resumed_from else {}
    return {
        name
        for name, needed in EVALUATION_FLAGS.items()
        if all(getattr(run.config, flag) == earlier.get(flag) for flag in needed)
    }


def clock(seconds: float) -> str:
    """`1:02:03`; hours are not limited to a day."""
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d}"
