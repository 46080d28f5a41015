"""What a run prints about itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch


def header(config: Any, world: int, model: Any, loader: Any, dtype: torch.dtype) -> Iterator[str]:
    """The lines before the first step: the figures that people compare and ask each other for."""
    c, device, rows = model.config, loader.device, config.total_batch_size // loader.T
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    yield f"device  {world} x {name}, {str(dtype).removeprefix('torch.')}, torch {torch.__version__}"
    yield (
        f"model   {sum(p.numel() for p in model.parameters()):,} parameters: {c.n_layer} layers, {c.n_head} heads, "
        f"{c.n_embd} channels, context {c.block_size}, vocabulary {c.vocab_size} padded to {c.padded_vocab_size}"
    )
    yield (
        f"update  {config.total_batch_size:,} tokens = {loader.B} (rows) x {loader.T} (tokens) x {world} (processes) "
        f"x {loader.grad_accum} (micro-steps)"
    )
    epochs = config.max_steps * rows / loader.rows_per_epoch
    yield (
        f"data    {config.data}: {loader.rows_per_epoch * loader.T:,} tokens, {loader.rows_per_epoch / rows:,.1f} updates "
        f"an epoch; {config.max_steps:,} updates are {epochs:.2f} epochs{', so the text repeats' if epochs > 1 else ''}"
    )
    if config.warmup_steps >= config.max_steps:
        yield f"note    all updates are in the warm-up, which takes {config.warmup_steps:,}; see --warmup-steps"


def progress(items: Iterable, what: str, rank: int) -> Iterable:
    """The items, with a bar that is gone when they are; on rank 0 and a terminal only."""
    from tqdm import tqdm

    return tqdm(items, desc=what, leave=False, disable=True if rank else None)
