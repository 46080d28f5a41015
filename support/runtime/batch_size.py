"""The micro-batch: sizes that make up a step exactly, and the largest one that fits into the GPU's memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from support.cli import UserError
from support.runtime import devices
from support.runtime.distributed import Distributed
from support.runtime.memory import Sizes, training_memory

if TYPE_CHECKING:
    from support.runtime.machine import Machine
    from train_gpt2 import TrainConfig

PROBED = ("cuda",)  # device types whose memory is tried out; others swap
SPARE_BYTES = 512 * 2**20  # left free for fragmentation
# NCCL connects after the trial. It was seen to take 0.7 and 1.6 GB (NVIDIA/nccl#964, #864), and 3 GB more for the
# all-to-all (#1685) by which Muon collects what FSDP has divided.
SPARE_BYTES_OF_RANKS, SPARE_BYTES_OF_SHARDED_MUON = 2 * 2**30, 5 * 2**30


def rows_per_rank(total_batch_size: int, T: int, world_size: int) -> int:
    """Rows of T tokens that each rank contributes to a step of `total_batch_size` tokens.

    Raises:
        UserError: the sizes do not divide; the nearest that do are named.
    """
    unit = T * world_size
    if total_batch_size % unit:
        near = " or ".join(str(n * unit) for n in (total_batch_size // unit, total_batch_size // unit + 1) if n > 0)
        raise UserError(
            f"--total-batch-size {total_batch_size} is not a multiple of {unit}, the context of {T} tokens times "
            f"{world_size} processes. Use {near}."
        )
    return total_batch_size // unit


def pick_batch_size(batch_size: int | None, rows: int, device_type: str) -> int:
    """B, the rows of a micro-batch, a divisor of a step's `rows`: `batch_size`, or by default up to 64 on CUDA, else 4.

    Raises:
        UserError: micro-batches of `batch_size` rows do not make up a step; those that do are named.
    """
    divisors = [b for b in range(1, min(rows, 4096) + 1) if rows % b == 0]
    if batch_size is None:
        return max(b for b in divisors if b <= (64 if device_type == "cuda" else 4))
    if rows % min(batch_size, rows):
        raise UserError(
            f"--batch-size {batch_size} does not divide the {rows} rows that each process has of a step. "
            f"Use one of {', '.join(map(str, divisors))}."
        )
    return min(batch_size, rows)


def largest_batch_size(
    config: TrainConfig, machine: Machine, model: nn.Module, dist: Distributed, amp: torch.autocast
) -> int:
    """The largest micro-batch, up to the machine's, with which a run fits into the memory of this process's device.

    Tries those that may fit, by an estimate that it prints: allocates what a run needs at the same time, which is
    `spare_bytes`, AdamW's two moments, gradients (and DDP's copy of them with several ranks), micro-batches of (B, T)
    tokens forward and backward, and validation. Weights are unchanged, and no other rank is waited for.

    Under FSDP only the estimate decides: a trial would take all ranks.

    Args:
        model: compiled or not.

    Raises:
        UserError: not even one row fits.
    """
    device, world_size = dist.device, dist.world_size
    T, most = config.block_size, machine.batch_size
    if device.type not in PROBED:
        return most
    free, total = devices.free_and_total_memory(device)
    rows, sizes = rows_per_rank(config.total_batch_size, T, world_size), Sizes.of(model)
    sharded = config.parallel == "fsdp" and world_size > 1
    for B in range(most, 0, -1):
        if rows % B:
            continue
        needed = training_memory(config, sizes, B, world_size, total, devices.DTYPES[machine.dtype], machine.compiled)
        if most == B:
            dist.print0(f"memory  about {needed.total / 2**30:.1f} of {total / 2**30:.1f} GiB with {B} rows")
        if needed.minimum > free:
            continue
        if needed.total + spare_bytes(config, world_size) <= free if sharded else _fits(config, B, model, dist, amp):
            if most != B:
                dist.print0(
                    f"note    a micro-batch of {most} rows does not fit into memory; using {B}. "
                    "A step keeps its number of tokens."
                )
            return B
        torch.compiler.reset()  # the graphs of what did not fit would count towards the limit of recompilations
    raise UserError(
        f"not even one row of {T} tokens fits into the memory of {device}, of which {free / 2**30:.1f} GiB are free. "
        "Use a smaller --model or --block-size."
    )


def spare_bytes(config: TrainConfig, world_size: int) -> int:
    """What is left free on each GPU."""
    if world_size == 1:
        return SPARE_BYTES
    sharded_muon = config.parallel == "fsdp" and config.optimizer == "muon"
    return SPARE_BYTES_OF_SHARDED_MUON if sharded_muon else SPARE_BYTES_OF_RANKS


def _fits(config: TrainConfig, B: int, model: nn.Module, dist: Distributed, amp: torch.autocast) -> bool:
    try:
        _try_batch_size(config, B, model, dist, amp)
        fits = True
    except RuntimeError as error:
        if not devices.is_out_of_memory(error):
            raise
        fits = False  # what the failed attempt holds is freed with its traceback, after this block
    model.zero_grad(set_to_none=True)
    devices.free_memory(dist.device)
    return fits


def _try_batch_size(config: TrainConfig, B: int, model: nn.Module, dist: Distributed, amp: torch.autocast) -> None:
    device = dist.device
    reserved = [torch.empty(spare_bytes(config, dist.world_size), dtype=torch.uint8, device=device)]
    copies = 2 if dist.world_size == 1 else 3  # AdamW's moments, and the buckets in which DDP sends gradients
    reserved += [torch.empty_like(p) for p in model.parameters() if p.requires_grad for _ in range(copies)]
    tokens = torch.zeros((B, config.block_size + 1), dtype=torch.int64, device=device)
    x, y = tokens[:, :-1], tokens[:, 1:]  # sliced as the loader does: other strides would cause a recompilation
    # the same calls as in training and validation: others would be compiled, and then those again
    for _ in range(2):  # in the second pass, gradients and activations exist together
        with amp:
            _, loss = model(x, y)
        loss.backward()
    with torch.no_grad(), amp:
        model(x, y)
    devices.synchronize(device)
    del reserved
