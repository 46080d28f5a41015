"""--profile: a trace of some steps, and a table of the operations that took the most time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from support.cli import describe_error, warn
from support.files import first_free

WARM_UP_STEPS = 3  # steps before the first recorded one: they compile, allocate and read data for the first time
ROWS = 12  # rows of the table


def make_profiler(
    steps: int, folder: str, device: torch.device, rank: int, notice: Callable[[str], None]
) -> profile | None:
    """Returns a profiler that records `steps` steps into `folder`/trace.json.gz, or trace_2.json.gz if that exists, and
    so on, and prints a table of them.

    Returns None if `steps` is 0, and on all ranks except 0. Call the profiler's `step()` after each step. Evaluations
    between the recorded steps are recorded with them.
    """
    if not steps or rank > 0:
        return None

    def report(recorded: profile) -> None:
        file = Path(first_free(f"{folder}/trace", ".json.gz"))
        try:
            recorded.export_chrome_trace(str(file))
            notice(f"profile written: open {file} in ui.perfetto.dev")
        except Exception as error:  # a full disk, for example; no run ends because of its profile
            warn(f"the profile could not be written to {file} ({describe_error(error, file)}).")
        key = "self_cuda_time_total" if device.type == "cuda" else "self_cpu_time_total"
        notice(recorded.key_averages().table(sort_by=key, row_limit=ROWS, max_name_column_width=50))

    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
    when = schedule(skip_first=WARM_UP_STEPS - 1, wait=0, warmup=1, active=steps, repeat=1)
    return profile(activities=activities, schedule=when, on_trace_ready=report)
