"""--minutes: as many steps as this machine makes in a given time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn

from support.data import presets
from support.runtime import devices
from support.runtime.distributed import Distributed
from support.runtime.options import RunOptions

MEASURED_SECONDS = 1.0  # for each of steps and validations
MEASURED_MICRO_STEPS = 4  # of a step; the rest takes as long
MAX_CALLS = 100
START_SECONDS = 3.0  # before `started`, and what the first step of a process takes more: PyTorch imports
END_SECONDS = 3.0  # for the last checkpoint, a sample, and the end of the process
BETWEEN_STEPS = 1.03  # a step with the loader and the log, to one without
VALIDATIONS = 5  # see presets.flags_for_steps


class Loader(Protocol):
    """What is needed of a DataLoaderLite."""

    B: int
    T: int
    grad_accum: int
    rows_per_epoch: int
    vocab_size: int


def flags_for_minutes(
    options: RunOptions,
    started: float,
    model: nn.Module,
    loader: Loader,
    val_loader: Loader | None,
    amp: torch.autocast,
    dist: Distributed,
    optimizer: torch.optim.Optimizer,
) -> dict[str, Any]:
    """The number of steps that end --minutes after the start, and what follows from it, the same on all ranks.

    Steps and validations on random tokens are timed on the model itself, which stays as it is.

    Args:
        started: when the process did, by `time.perf_counter`.
        optimizer: for this only, so that its moments are freed; its learning rates must be 0.
    """
    flags = options.to_dict()
    tokens = torch.randint(loader.vocab_size, (loader.B, loader.T + 1), device=dist.device)

    def loss() -> torch.Tensor:
        with amp:
            return model(tokens[:, :-1], tokens[:, 1:])[1]

    micro_steps = min(loader.grad_accum, MEASURED_MICRO_STEPS)

    def step() -> None:
        for _ in range(micro_steps):
            loss().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    step_seconds = BETWEEN_STEPS * _seconds(step, dist) * loader.grad_accum / micro_steps
    with torch.no_grad():
        forward = _seconds(loss, dist)
    val_rows = min(flags["val_tokens"] // loader.T, val_loader.rows_per_epoch) if val_loader else 0
    validation = forward * val_rows / (loader.B * dist.world_size)
    fixed = START_SECONDS + time.perf_counter() - started + END_SECONDS + VALIDATIONS * validation
    steps = dist.all_reduce_min(max(1, int((60 * flags["minutes"] - fixed) / step_seconds)))
    steps -= steps % 4 if steps > 4 else 0  # or two validations might come one after the other
    unmeasured = presets.flags_for_steps(flags["max_steps"], flags["demo"])
    measured = presets.flags_for_steps(steps, flags["demo"])
    return {name: measured[name] for name, value in unmeasured.items() if flags[name] == value}  # or it was given


def _seconds(work: Callable[[], object], dist: Distributed) -> float:
    """The median of some calls, after the first."""
    synchronize = devices.synchronizer(dist.device)

    def timed() -> float:
        synchronize()
        began = time.perf_counter()
        work()
        synchronize()
        return time.perf_counter() - began

    timed()
    calls = dist.all_reduce_min(min(max(3, int(MEASURED_SECONDS / timed())), MAX_CALLS))  # ranks must agree
    return statistics.median(timed() for _ in range(calls))
