"""Where the time of an update goes: --profile."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule

SETTLING = 3  # updates before the first that is recorded: they compile, allocate and read for the first time
REST = "norms, GELU and the rest"
# What an operation or a kernel is for, by its name; the first that matches counts.
KINDS = {
    "attention": r"attention|flash|fmha|sdpa",
    "matrix products": r"gemm|\bmm|::mm|bmm|addmm|linear|nvjet|cutlass|xmma",
    "communication": r"nccl|gloo|all_reduce|allreduce|c10d",
    "optimizer": r"adam",
    "softmax of the loss": r"softmax|gpt2::",
    "copies": r"memcpy|copy_|_to_copy|::fill_|memset|::zero_|::cat",
}


class Profiler:
    """Records `updates` updates of rank 0 into `folder`/trace.json.gz, tells where their time went, and then costs nothing.

    `step()` is to be called after each update. What is due between two updates (a validation, say) is recorded with them.
    """

    def __init__(self, updates: int, folder: str, device: torch.device, rank: int, notice: Callable[[str], None]):
        self.file, self.notice, self.device = Path(folder) / "trace.json.gz", notice, device
        self.updates = self.done = 0
        self.profile = None
        if updates and rank == 0:
            activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
            when = schedule(skip_first=SETTLING - 1, wait=0, warmup=1, active=updates, repeat=1)
            self.profile = profile(activities=activities, schedule=when, on_trace_ready=self._report)
            self.updates = updates

    def __enter__(self) -> Profiler:
        if self.profile:
            self.profile.start()
        return self

    def __exit__(self, *_: Any) -> None:
        if self.profile:
            self.profile.stop()
            if self.done <= SETTLING:
                self.notice(f"profile nothing was recorded: the first {SETTLING} updates are left out")

    def step(self) -> None:
        if self.profile:
            self.done += 1
            if self.done == SETTLING:
                self.started = time.perf_counter()
            self.ended = time.perf_counter()
            self.profile.step()

    def _report(self, recorded: profile) -> None:
        updates = min(self.done - SETTLING, self.updates)
        if updates <= 0:
            return
        part = self.file.with_name("part." + self.file.name)
        try:
            recorded.export_chrome_trace(str(part))
            part.replace(self.file)
        except (OSError, RuntimeError) as error:  # a full disk must not end a run, nor stay full
            part.unlink(missing_ok=True)
            return self.notice(f"profile not written: {error}")
        on_gpu = self.device.type == "cuda"
        events = recorded.key_averages()
        times = time_on_gpu(events) if on_gpu else {e.key: e.self_cpu_time_total for e in events}
        times = {name: us for name, us in times.items() if us > 0 and not name.startswith("ProfilerStep")}
        wall, busy = self.ended - self.started, sum(times.values()) or 1.0
        kinds = dict.fromkeys([*KINDS, REST], 0.0)
        for name, us in times.items():
            kinds[kind_of(name)] += us / busy
        self.notice(
            f"profile {updates} updates, {1e3 * wall / updates:.1f}ms each, {'GPU' if on_gpu else 'CPU'} at work "
            f"{busy / 1e6 / wall:.0%} of it; {self.file} is for ui.perfetto.dev"
        )
        shares = [
            f"{kind} {share:.1%}" for kind, share in sorted(kinds.items(), key=lambda k: -k[1]) if share >= 0.0005
        ]
        self.notice("profile " + ", ".join(shares))
        for name, us in sorted(times.items(), key=lambda item: -item[1])[:8]:
            self.notice(f"profile {us / busy:6.1%}  {name[:90]}")


def time_on_gpu(events: Any) -> dict[str, float]:
    """Microseconds of each kernel: not of the operations that launched it, nor of the regions that it lies in."""
    on_gpu = torch.autograd.DeviceType.CUDA
    return {e.key: e.self_device_time_total for e in events if e.device_type == on_gpu and not e.is_user_annotation}


def kind_of(name: str) -> str:
    """What an operation or kernel of this name is for, one of KINDS, or REST."""
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, name, re.IGNORECASE)), REST)
