"""--profile: a trace of some steps, and a table of the operations that took the most time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule

WARM_UP_STEPS = 3  # steps before the first that is recorded: they compile, allocate and read data for the first time
ROWS = 12  # of the table


class Profiler:
    """Records `steps` steps of rank 0 into `folder`/trace.json.gz and prints a table of them; off if `steps` is 0.

    Call `step()` after each step. Evaluations between the recorded steps are recorded with them.
    """

    def __init__(self, steps: int, folder: str, device: torch.device, rank: int, notice: Callable[[str], None]):
        self.steps, self.file, self.device, self.notice = steps, Path(folder) / "trace.json.gz", device, notice
        self.profile: profile | None = None
        if steps and rank == 0:
            activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
            when = schedule(skip_first=WARM_UP_STEPS - 1, wait=0, warmup=1, active=steps, repeat=1)
            self.profile = profile(activities=activities, schedule=when, on_trace_ready=self._report)

    def start(self) -> None:
        if self.profile:
            self.profile.start()

    def step(self) -> None:
        if self.profile:
            self.profile.step()

    def stop(self) -> None:
        if self.profile:
            self.profile.stop()
            if self.profile.step_num <= WARM_UP_STEPS:
                self.notice(f"profile nothing recorded: the first {WARM_UP_STEPS} steps are left out")

    def _report(self, recorded: profile) -> None:
        steps = min(recorded.step_num - WARM_UP_STEPS, self.steps)
        if steps <= 0:
            return
        try:
            recorded.export_chrome_trace(str(self.file))
        except (OSError, RuntimeError) as error:  # a full disk must not end a run
            return self.notice(f"profile not written: {error}")
        self.notice(f"profile recorded {steps} step{'s' if steps > 1 else ''}; open {self.file} in ui.perfetto.dev")
        key = "self_cuda_time_total" if self.device.type == "cuda" else "self_cpu_time_total"
        self.notice(recorded.key_averages().table(sort_by=key, row_limit=ROWS, max_name_column_width=50))
