"""Where the time of an update goes: --profile."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule

SETTLING = 3  # updates before the first that is recorded: they compile, allocate and read for the first time
# What an operation or a kernel is for, by its name; the first that matches counts.
KINDS = {
    "attention": r"attention|flash|fmha|sdpa",
    "matrix products": r"gemm|\bmm|::mm|bmm|addmm|nvjet|cutlass|xmma",
    "communication": r"nccl|gloo|all_reduce|allreduce|c10d",
    "optimizer": r"adam",
    "loss": r"softmax|gpt2::",
    "copies": r"memcpy|copy_|_to_copy|::fill_|memset|::zero_|::cat",
}


class Profiler:
    """Records `updates` updates of rank 0 into `folder`/trace.json.gz, tells where their time went, and then costs nothing.

    `step()` is to be called after each update. With 0 updates nothing is recorded at all.
    """

    def __init__(self, updates: int, folder: str, device: torch.device, rank: int, notice: Callable[[str], None]):
        self.file, self.notice, self.device = Path(folder) / "trace.json.gz", notice, device
        self.profile = None
        if updates and rank == 0:
            activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
            when = schedule(skip_first=SETTLING - 1, wait=0, warmup=1, active=updates, repeat=1)
            self.profile = profile(activities=activities, schedule=when, on_trace_ready=self._report)

    def __enter__(self) -> Profiler:
        if self.profile:
            self.profile.start()
        return self

    def __exit__(self, *_: Any) -> None:
        if self.profile:
            self.profile.stop()

    def step(self) -> None:
        if self.profile:
            self.profile.step()

    def _report(self, recorded: profile) -> None:
        try:
            recorded.export_chrome_trace(str(self.file))
        except OSError as error:  # a full disk must not end a run
            self.notice(f"profile not written: {error}")
        on_gpu = self.device.type == "cuda"
        events = recorded.key_averages()
        times = {e.key: e.self_device_time_total if on_gpu else e.self_cpu_time_total for e in events}
        times = {name: us for name, us in times.items() if us > 0 and not name.startswith("ProfilerStep")}
        if not times:
            return
        total, kinds = sum(times.values()), dict.fromkeys([*KINDS, "the rest"], 0.0)
        for name, us in times.items():
            kinds[kind_of(name)] += us / total
        shares = ", ".join(f"{kind} {share:.1%}" for kind, share in sorted(kinds.items(), key=lambda k: -k[1]))
        self.notice(f"profile {self.file} (open it at ui.perfetto.dev); {'GPU' if on_gpu else 'CPU'} time: {shares}")
        for name, us in sorted(times.items(), key=lambda item: -item[1])[:8]:
            self.notice(f"profile {us / total:6.1%}  {name[:90]}")


def kind_of(name: str) -> str:
    """What an operation or kernel of this name is for, one of KINDS or "the rest"."""
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, name, re.IGNORECASE)), "the rest")
