"""The micro-batch: sizes that make up a step exactly, and the largest one that fits into the GPU's memory."""

from __future__ import annotations

import torch

from support.cli import UserError
from support.runtime import devices
from support.runtime.distributed import Distributed
from support.runtime.memory import estimate_memory

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
    batch_size: int,
    rows: int,
    T: int,
    model: torch.nn.Module,
    dtype: torch.dtype,
    dist: Distributed,
    sharded: bool = False,
    optimizer: str = "adamw",
) -> int:
    """The largest micro-batch, up to `batch_size`, with which a run fits into the memory of this process's device.

    Tries those that may fit, by an estimate that it prints: allocates what a run needs at the same time, which is
    `spare_bytes`, the optimizer's two moments, gradients (and DDP's copy of them with several ranks), micro-batches of (B, T) tokens
    forward and backward, and validation. Weights are unchanged, and no other rank is waited for.

    Args:
        rows: rows of a step on this rank; the result divides them.
        model: compiled or not.
        dtype: precision of the matrix products.
        sharded: the model is to be sharded by FSDP. Then only the estimate decides: a trial would take all ranks.

    Raises:
        UserError: not even one row fits.
    """
    device, world_size, notice = dist.device, dist.world_size, dist.print0
    if device.type not in PROBED:
        return batch_size
    free, total = devices.free_and_total_memory(device)
    spare = spare_bytes(world_size, sharded, optimizer)
    for B in range(batch_size, 0, -1):
        if rows % B:
            continue
        estimate = estimate_memory(model, B, T, dtype, world_size, total, sharded)
        if batch_size == B:
            notice(f"memory  about {estimate.total / 2**30:.1f} of {total / 2**30:.1f} GiB with {B} rows")
        if estimate.minimum > free:
            continue
        if estimate.total + spare <= free if sharded else _fits(B, T, model, dtype, world_size, device, spare):
            if batch_size != B:
                notice(
                    f"note    a micro-batch of {batch_size} rows does not fit into memory; using {B}. "
                    "A step keeps its number of tokens."
                )
            return B
        torch.compiler.reset()  # the graphs of what did not fit would count towards the limit of recompilations
    raise UserError(
        f"not even one row of {T} tokens fits into the memory of {device}, of which {free / 2**30:.1f} GiB are free. "
        "Use a smaller --model or --block-size."
    )


def spare_bytes(world_size: int, sharded: bool, optimizer: str) -> int:
    """What is left free on each GPU."""
    if world_size == 1:
        return SPARE_BYTES
    return SPARE_BYTES_OF_SHARDED_MUON if sharded and optimizer == "muon" else SPARE_BYTES_OF_RANKS


def _fits(
    B: int, T: int, model: torch.nn.Module, dtype: torch.dtype, world_size: int, device: torch.device, spare: int
) -> bool:  # fmt: skip
    try:
        _try_batch_size(B, T, model, devices.autocast(device, dtype), world_size, device, spare)
        fits = True
    except RuntimeError as error:
        if not devices.is_out_of_memory(error):
            raise
        fits = False  # what the failed attempt holds is freed with its traceback, after this block
    model.zero_grad(set_to_none=True)
    devices.free_memory(device)
    return fits


def _try_batch_size(
    B: int,
    T: int,
    model: torch.nn.Module,
    amp: torch.autocast,
    world_size: int,
    device: torch.device,
    spare: int,
) -> None:
    reserved = [torch.empty(spare, dtype=torch.uint8, device=device)]
    copies = 2 if world_size == 1 else 3  # AdamW's moments, and the buckets in which DDP sends gradients
    reserved += [torch.empty_like(p) for p in model.parameters() if p.requires_grad for _ in range(copies)]
    tokens = torch.zeros((B, T + 1), dtype=torch.int64, device=device)
    x, y = tokens[:, :-1], tokens[:, 1:]  # sliced as the loader does: other strides would cause a recompilation
    # the same calls as in training and validation: others would be compiled, and then those again
    for _ in range(2):  # in the second pass, gradients and activations exist together
        with amp:
            _, loss = model(x, y)
        loss.backward()
    with torch.no_grad(), amp:
        model(x, y)
    devices.synchronizer(device)()
    del reserved
