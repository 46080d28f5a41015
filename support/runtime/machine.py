"""Settings that a process chooses for its machine, as opposed to those that its flags ask for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from support.config import Options
from support.runtime import batch_size, devices

MAX_COMPILE_FRACTION = 0.1  # compiling may take this fraction of a run of --text or --demo


@dataclass(frozen=True)
class Machine:
    """Settings that the flags leave to the machine, such as precision, compilation and micro-batch size.

    They may change when a run resumes on another machine.
    """

    device: torch.device
    dtype: str  # precision of matrix products, a key of devices.DTYPES
    compiled: bool
    why_not_compiled: str | None  # None if it is compiled, or not meant to be
    batch_size: int  # rows of a micro-batch, at most: on CUDA, a trial shows how many fit
    hellaswag_every: int | None  # --hellaswag-every, or what suits the machine; None: at each quarter of --minutes
    cuda_graphs: bool = False  # whether the kernels of a micro-step are launched as a graph
    attention: str = ""  # the implementation that PyTorch chooses, once `configure_backends` was called

    @classmethod
    def find(cls, config: Options, device: torch.device, world_size: int) -> Machine:
        """Finds what suits the flags on `device`, one of `world_size` devices.

        Raises:
            UserError: no whole number of micro-batches makes up a step.
        """
        flags, on_gpu = config.to_dict(), device.type == "cuda"
        dtype = devices.pick_dtype(config.dtype, device)
        compiles = on_gpu and (not config.has_preset or is_worth_compiling(flags))
        asks = compiles if config.compile is None else config.compile
        reason = devices.why_not_compile(device) if asks else None
        rows = batch_size.rows_per_rank(flags["total_batch_size"], flags["block_size"], world_size)
        asks_for_scores = config.hellaswag_data is not None or config.hellaswag_limit is not None
        often = None if config.minutes else 250
        every = often if on_gpu or asks_for_scores else 0
        return cls(
            device,
            dtype,
            asks and reason is None,
            reason,
            batch_size.largest_divisor(rows, config.batch_size or (batch_size.LARGEST_MICRO_BATCH if on_gpu else 4)),
            every if config.hellaswag_every is None else config.hellaswag_every,
        )


def is_worth_compiling(flags: Mapping[str, Any]) -> bool:
    """Returns whether compiling takes only a small part of a run with these flags on a GPU."""
    if flags["minutes"]:
        seconds = 60 * flags["minutes"]
    else:  # launching the kernels of a layer takes 4 ms, measured on an H100; large steps run at about 100 TFLOP/s
        flops = 6 * 12 * flags["n_layer"] * flags["n_embd"] ** 2 * flags["total_batch_size"]
        seconds = flags["max_steps"] * (4e-3 * flags["n_layer"] + flops / 1e14)
    return compile_seconds(flags["n_layer"]) <= MAX_COMPILE_FRACTION * seconds


def compile_seconds(n_layer: int) -> float:
    """Returns how long it takes to compile a model for a GPU: 28 s for 12 layers, measured with 16 cores."""
    return 10 + 1.5 * n_layer
