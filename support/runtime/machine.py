"""Settings that a process chooses for its machine, as opposed to those that its flags ask for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from support.data import presets
from support.runtime import batch_size, devices

if TYPE_CHECKING:
    from train_gpt2 import TrainConfig


@dataclass(frozen=True)
class Machine:
    """Settings that the flags leave to the machine, such as precision, compilation and micro-batch size.

    They may change when a run resumes on another machine.
    """

    device: torch.device
    dtype: str  # precision of matrix products, a key of devices.DTYPES
    compiled: bool
    why_not_compiled: str | None  # None if it is compiled, or not meant to be
    attention: str  # the implementation that PyTorch chooses
    batch_size: int  # rows of a micro-batch, at most: on CUDA, a trial shows how many fit
    hellaswag_every: int | None  # --hellaswag-every, or what suits the machine; None: at each quarter of --minutes

    @classmethod
    def find(cls, config: TrainConfig, device: torch.device, world_size: int) -> Machine:
        """Finds what suits the flags on `device`, one of `world_size` devices.

        Raises:
            UserError: no whole number of micro-batches makes up a step.
        """
        on_gpu = device.type == "cuda"
        dtype = devices.pick_dtype(config.dtype, device)
        asks = on_gpu and presets.is_worth_compiling(config) if config.compile is None else config.compile
        reason = devices.why_not_compile(device) if asks else None
        rows = batch_size.rows_per_rank(config.total_batch_size, config.block_size, world_size)
        asks_for_scores = config.hellaswag_data is not None or config.hellaswag_limit is not None
        often = None if config.minutes else 250
        every = often if on_gpu or asks_for_scores else 0
        return cls(
            device,
            dtype,
            asks and reason is None,
            reason,
            devices.describe_attention(device, devices.DTYPES[dtype], config.n_head, config.n_embd, config.block_size),
            batch_size.largest_divisor(rows, config.batch_size or (batch_size.LARGEST_MICRO_BATCH if on_gpu else 4)),
            every if config.hellaswag_every is None else config.hellaswag_every,
        )
