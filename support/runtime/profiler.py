"""--profile: a trace of some steps, and a table of the operations that took the most time."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from support import files

WARM_UP_STEPS = 3  # steps before the first that is recorded: they compile, allocate and read data for the first time
ROWS = 12  # of the table


class Profiler:
    """Records `steps` steps of rank 0 into `folder`/trace.json.gz and prints a table of them; off if `steps` is 0.

    Call `step()` after each step. Evaluations between the recorded steps are recorded with them.
    """

    def __init__(self, steps: int, folder: str, device: torch.device, rank: int, notice: Callable[[str], None]):
        self.file, self.notice, self.device = Path(folder) / "trace.json.gz", notice, device
        self.steps = self.done = 0
        self.started = self.ended = 0.0
        self.profile: profile | None = None
        if steps and rank == 0:
            activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
            when = schedule(skip_first=WARM_UP_STEPS - 1, wait=0, warmup=1, active=steps, repeat=1)
            self.profile = profile(activities=activities, schedule=when, on_trace_ready=self._report)
            self.steps = steps

    def start(self) -> None:
        if self.profile:
            self.profile.start()

    def stop(self) -> None:
        if self.profile:
            self.profile.stop()
            if self.done <= WARM_UP_STEPS:
                self.notice(f"profile nothing recorded: the first {WARM_UP_STEPS} steps are left out")

    def step(self) -> None:
        if self.profile:
            self.done += 1
            self.ended = time.perf_counter()
            if self.done == WARM_UP_STEPS:
                self.started = self.ended
            self.profile.step()

    def _report(self, recorded: profile) -> None:
        steps = min(self.done - WARM_UP_STEPS, self.steps)
        if steps <= 0:
            return
        try:
            with files.atomic_write(self.file) as tmp:
                gz = tmp.with_name(tmp.name + ".gz")  # PyTorch compresses a file of this name
                recorded.export_chrome_trace(str(gz))
                gz.replace(tmp)
        except (OSError, RuntimeError) as error:  # a full disk must not end a run
            return self.notice(f"profile not written: {error}")
        ms = 1e3 * (self.ended - self.started) / steps
        self.notice(
            f"profile {steps} step{'s' if steps > 1 else ''} of {ms:.1f}ms; open {self.file} in ui.perfetto.dev"
        )
        key = "self_cuda_time_total" if self.device.type == "cuda" else "self_cpu_time_total"
        self.notice(recorded.key_averages().table(sort_by=key, row_limit=ROWS, max_name_column_width=50))
