"""Whether the parts of a run fit each other, and the micro-batch the memory of the GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from support import devices
from support.cli import UserError
from support.tokenizer import Tokenizer

PROBED = ("cuda",)  # where memory is the GPU's own; elsewhere the system pages
SPARE = 512 * 2**20  # bytes left for communication buffers and fragmentation


def micro_batches(total_batch_size: int, T: int, world: int, asked: int | None, device_type: str) -> list[int]:
    """Rows of a micro-batch: the number asked for (None: the usual one), then each smaller one that makes up an update exactly.

    Raises:
        UserError: the sizes do not divide; those that do are named.
    """
    unit = T * world
    if total_batch_size % unit:
        near = " or ".join(str(n * unit) for n in (total_batch_size // unit, total_batch_size // unit + 1) if n > 0)
        raise UserError(
            f"--total-batch-size {total_batch_size} is not a multiple of {unit}, the context of {T} times {world} processes. "
            f"Use {near}."
        )
    rows = total_batch_size // unit
    divisors = [b for b in range(1, min(rows, 4096) + 1) if rows % b == 0]
    usual = max(b for b in divisors if b <= (64 if device_type == "cuda" else 4))
    B = min(asked or usual, rows)
    if rows % B:
        raise UserError(
            f"--batch-size {B} does not divide the {rows} rows that each process has of an update. "
            f"Use one of {', '.join(map(str, divisors))}."
        )
    return [B, *(b for b in reversed(divisors) if b < B)]


def check_model(sizes: Any, config: Any, tokenizer: Tokenizer, weights: str | Path, shorter: bool) -> None:
    """Refuses pretrained weights of another vocabulary or context than the run's. `sizes` is their GPTConfig.

    With `shorter`, a part of their context will do.

    Raises:
        UserError: one of them differs.
    """
    if sizes.vocab_size != tokenizer.vocab_size:
        raise UserError(
            f"{weights} knows {sizes.vocab_size:,} tokens, and the shards in {config.data} are made of "
            f"{tokenizer.vocab_size:,} ({tokenizer.name}). Name shards made with its tokenizer with --data; "
            "with --text, name its --tokenizer, and another --out."
        )
    asked = config.block_size or sizes.block_size
    if asked > sizes.block_size or (asked < sizes.block_size and not shorter):
        lower = ", or lower it" if shorter else ""
        raise UserError(f"{weights} has a context of {sizes.block_size} tokens. Leave out --block-size{lower}.")


def check_amount(config: Any, train: Any, val: Any | None) -> None:
    """Refuses data that is too short for one update or for one row of validation. `train` and `val` are loaders.

    Raises:
        UserError: it is too short.
    """
    rows = config.total_batch_size // train.T
    if train.rows_per_epoch < rows:
        raise UserError(
            f"{config.data} has {train.rows_per_epoch} train rows of {train.T} tokens, and one update takes {rows}. "
            "Take more text, or lower --total-batch-size or --block-size."
        )
    if val and (val.rows_per_epoch == 0 or config.val_tokens < val.T):
        raise UserError(
            f"no row of {val.T} tokens to validate on in {config.data}. Take more text, or a lower --block-size, or --val-every 0."
        )


def largest_micro_batch(
    sizes: Sequence[int],
    T: int,
    model: torch.nn.Module,
    raw_model: torch.nn.Module,
    amp: AbstractContextManager,
    world: int,
    notice: Callable[[str], None],
) -> int:
    """The first of `sizes` (rows, largest first) with which a run fits into the memory of the model's device.

    For each, what a run needs at once is tried out: the optimizer's two moments, gradients (and their copy where there
    are other ranks), micro-batches of (B, T) tokens forward and backward, and validation. Weights and optimizer stay as
    they are, and no other rank is waited for.

    Raises:
        UserError: none of them fits.
    """
    device = next(raw_model.parameters()).device
    first = sizes[0]
    if device.type not in PROBED:
        return first
    for B in sizes:
        try:
            _try_out(B, T, model, raw_model, amp, world, device)
            fits = True
        except RuntimeError as error:
            if not devices.is_out_of_memory(error):
                raise
            fits = False  # what the failed attempt holds is freed with its traceback, after this block
        raw_model.zero_grad(set_to_none=True)
        devices.free_memory(device)
        if fits:
            if first != B:
                notice(f"a micro-batch of {first} rows does not fit into memory; {B} do. The update stays the same.")
            return B
        torch.compiler.reset()  # the graphs of what did not fit would count towards the limit of compilations
    raise UserError(
        f"not even one row of {T} tokens fits into the memory of {device}. Use a smaller --model or --block-size."
    )


def _try_out(
    B: int,
    T: int,
    model: torch.nn.Module,
    raw_model: torch.nn.Module,
    amp: AbstractContextManager,
    world: int,
    device: torch.device,
) -> None:
    reserved = [torch.empty(SPARE, dtype=torch.uint8, device=device)] if device.type == "cuda" else []
    copies = 2 if world == 1 else 3  # AdamW's moments, and the buckets that DDP sends gradients in
    trained = [p for p in raw_model.parameters() if p.requires_grad]
    reserved += [torch.empty_like(p) for p in trained for _ in range(copies)]
    tokens = torch.zeros((B, T + 1), dtype=torch.int64, device=device)
    x, y = tokens[:, :-1], tokens[:, 1:]  # as the loader cuts them: other strides would be compiled again
    for _ in range(2):  # from the second on, gradients are there while activations are made
        with amp:
            _, loss = model(x, y)
        loss.backward()
    with torch.no_grad(), amp:
        model(x, y)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    del reserved
