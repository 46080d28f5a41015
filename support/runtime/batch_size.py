"""The micro-batch: sizes that make up a step exactly, and the largest one that fits into the GPU's memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from support.cli import UserError, format_bytes
from support.config import TrainConfig
from support.runtime import devices
from support.runtime.distributed import Distributed
from support.runtime.memory import Layout, Sizes, bytes_needed, largest_micro_batch, optimizer_bytes

LARGEST_MICRO_BATCH = 64  # rows on a GPU, unless --batch-size sets another limit
TRIED = ("cuda",)  # device types on which micro-batches are tried; others swap


def rows_per_rank(config: TrainConfig, world_size: int) -> int:
    """Returns the rows that each rank contributes to a step.

    Raises:
        UserError: the tokens of a step are not a multiple of a row on each rank; the message names the nearest ones.
    """
    total_batch_size, T = config.total_batch_size, config.block_size
    unit = T * world_size
    if total_batch_size % unit:
        near = " or ".join(str(n * unit) for n in (total_batch_size // unit, total_batch_size // unit + 1) if n > 0)
        raise UserError(
            f"--total-batch-size {total_batch_size} is not a multiple of {unit}, the context of {T} tokens times "
            f"{world_size} processes. Use {near}" + (", or another number of processes." if world_size > 1 else ".")
        )
    return total_batch_size // unit


def largest_divisor(rows: int, most: int) -> int:
    """Returns the largest divisor of a step's rows, up to `most`."""
    return next(b for b in range(min(rows, most), 0, -1) if rows % b == 0)


def try_batch_sizes(
    config: TrainConfig, most: int, sizes: Sizes, layout: Layout, dist: Distributed, amp: torch.autocast,
    make_model: Callable[[], nn.Module],
) -> int:  # fmt: skip
    """Tries micro-batches of up to `most` rows; returns the largest with which a step fits into the memory of every rank.

    On CUDA, tries the largest that fits according to the formulas, and then smaller ones: runs forward and backward
    passes while as much memory is allocated as the optimizer takes. Other devices swap: for them, it returns
    `most`, so that a resumed run stays the same, bit for bit, or refuses it if the formulas say that it does not fit.

    Args:
        make_model: returns a model to try, whose weights do not change: the model to train (with DDP, which waits for no
            other rank while nothing is synchronized), or an FSDP model made with `alone`.

    Raises:
        UserError: not even one row fits, or not `most` of them on a device that swaps.
    """
    device, T, asked = dist.device, sizes.block_size, config.batch_size
    rows = rows_per_rank(config, dist.world_size)
    if asked is not None and most < min(asked, rows):
        dist.print0(
            f"note    --batch-size {asked} does not divide the {rows:,} rows of a step on each process; using {most}"
        )
    free, total = devices.free_and_total_memory(device)
    sharded, needed = layout.sharded, partial(bytes_needed, sizes, layout, device)
    no_row_fits = (
        f"not even one row of {T} tokens fits into the memory of {device} ({free / 2**30:.1f} GiB free). "
        "Use a smaller --model or --block-size."
    )
    if device.type not in TRIED:
        available = free + (0 if sharded else 4 * sizes.parameters)  # the weights are in memory already
        B = min(dist.all_gather(largest_micro_batch(rows, most, needed, available)))
        if B == 0:
            raise UserError(no_row_fits)
        if most > B:
            raise UserError(
                f"a micro-batch of {most} rows takes about {format_bytes(needed(most))}, but only "
                f"{format_bytes(available)} are available. Use --batch-size {B}."
            )
        return most

    def try_to_train(B: int) -> None:
        model = make_model()
        moments = optimizer_bytes(sizes, layout.optimizer) // (dist.world_size if sharded else 1)
        optimizer_state = torch.empty(moments, dtype=torch.uint8, device=device)
        tokens = torch.zeros((B, T + 1), dtype=torch.int64, device=device)
        x, y = tokens[:, :-1], tokens[:, 1:]  # sliced as the loader does: other strides would cause a recompilation
        micro_steps = min(2, rows // B)  # in a second one, gradients and activations exist together
        try:
            for i in range(micro_steps):
                model.require_backward_grad_sync = sharded and i == micro_steps - 1  # type: ignore[assignment]
                with amp:
                    _, loss = model(x, y)
                loss.backward()
            devices.synchronize(device)
        finally:
            model.zero_grad(set_to_none=True)
        del optimizer_state

    def fits(B: int) -> bool:
        try:
            try_to_train(B)
            answer = True
        except RuntimeError as error:
            if not devices.is_out_of_memory(error):
                raise
            answer = False  # what the failed attempt holds is freed with its traceback, after this block
        devices.free_memory(device)
        return answer

    B = min(dist.all_gather(largest_micro_batch(rows, most, needed, free) or 1))
    dist.print0(f"memory  about {needed(B) / 2**30:.1f} of {total / 2**30:.1f} GiB with {B} rows")
    while not all(dist.all_gather(has_fitted := fits(B))):
        if B == 1:
            with dist.failing_together():
                if not has_fitted:
                    raise UserError(no_row_fits)
        B = largest_divisor(rows, B - 1)
        torch.compiler.reset()  # the graphs of sizes that did not fit would count towards the recompilation limit
    if most > B:
        dist.print0(
            f"note    a micro-batch of {most} rows does not fit into memory; using {B}. A step keeps its number of tokens."
        )
    return B
