"""Settings that a process chooses for its machine, as opposed to those that its flags ask for."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from support.config import TrainConfig
from support.runtime import batch_size, devices, memory

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
    def find(cls, config: TrainConfig, device: torch.device, world_size: int) -> Machine:
        """Finds what suits the flags on `device`, one of `world_size` devices.

        Raises:
            UserError: no whole number of micro-batches makes up a step.
        """
        on_gpu = device.type == "cuda"
        dtype = devices.pick_dtype(config.dtype, device)
        asks = compiles_on_gpu(config) if on_gpu else bool(config.compile)
        reason = devices.why_not_compile(device) if asks else None
        rows = batch_size.rows_per_rank(config, world_size)
        return cls(
            device,
            dtype,
            asks and reason is None,
            reason,
            batch_size.largest_divisor(rows, config.batch_size or (batch_size.LARGEST_MICRO_BATCH if on_gpu else 4)),
            hellaswag_interval(config, on_gpu),
        )


def hellaswag_interval(config: TrainConfig, on_gpu: bool) -> int | None:
    """Returns --hellaswag-every or, without it, what suits the machine; None means at each quarter of --minutes."""
    if config.hellaswag_every is not None:
        return config.hellaswag_every
    if not on_gpu and config.hellaswag_data is None and config.hellaswag_limit is None:
        return 0  # a CPU would take an hour, and nobody has asked for scores
    return None if config.minutes else 250


def compiles_on_gpu(config: TrainConfig) -> bool:
    """Returns --compile or, without it, whether a run on a GPU is compiled: all but short ones with --demo or --text."""
    if config.compile is not None or not config.is_demo_or_text:
        return config.compile is not False
    if config.minutes:
        seconds = 60 * config.minutes
    else:  # launching the kernels of a layer takes 4 ms, measured on an H100; large steps run at about 100 TFLOP/s
        flops = 6 * memory.block_weights(config.n_layer, config.n_embd) * config.total_batch_size
        seconds = config.max_steps * (4e-3 * config.n_layer + flops / 1e14)
    return compile_seconds(config.n_layer) <= MAX_COMPILE_FRACTION * seconds


def compile_seconds(n_layer: int) -> float:
    """Returns how long it takes to compile a model for a GPU: 28 s for 12 layers, measured with 16 cores."""
    return 10 + 1.5 * n_layer
