"""The lines before the first step and after the demo, and progress bars."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from support.console.log import read_values
from support.data.presets import describe_text_flags
from support.files import format_bytes
from support.runtime import devices
from support.runtime.distributed import Distributed
from support.runtime.options import RunOptions

T = TypeVar("T")
HIGH_LR = 0.1


def progress_bar(items: Iterable[T], name: str, rank: int) -> Iterable[T]:
    """The items, with a progress bar that disappears at the end; on rank 0 and on a terminal only."""
    from tqdm import tqdm

    return tqdm(items, desc=name, leave=False, disable=True if rank or sys.stderr is None else None)


def print_header(
    options: RunOptions,
    dist: Distributed,
    model: nn.Module,
    sizes: Mapping[str, int],
    recipe: str,
    *,
    B: int,
    grad_accum: int,
    rows_per_epoch: int,
    bytes_per_token: float,
    resume_from: Path | None,
    first_step: int,
) -> None:
    """Prints the lines before the first step: the figures that people compare and ask each other for.

    Args:
        sizes: of the model, by field of GPTConfig.
        bytes_per_token: of the validation split, if there is one.
        recipe: optimizer and schedule in words.
    """
    T, world_size, flags, print0 = sizes["block_size"], dist.world_size, options.to_dict(), dist.print0
    max_steps = flags["max_steps"]
    step_rows = B * world_size * grad_accum
    parameters = sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    trained_text = f" ({trained:,} trained)" if trained < parameters else ""
    epochs = max_steps * step_rows / rows_per_epoch
    several = f" ({options.parallel})" if world_size > 1 else ""
    several += ", recomputing activations" if options.recompute else ""
    print0(
        f"device  {world_size} x {devices.describe(dist.device)}{several}, {options.dtype}, torch {torch.__version__}"
    )
    print0(
        f"model   {parameters:,} parameters{trained_text}: {sizes['n_layer']} layers, {sizes['n_head']} heads, "
        f"{sizes['n_embd']} channels, context {T}, "
        f"vocabulary {sizes['vocab_size']} (padded to {len(model.get_parameter('lm_head.weight'))})"
    )
    print0(
        f"step    {step_rows * T:,} tokens = {B} rows x {T} tokens x {world_size} processes x {grad_accum} micro-steps"
    )
    print0(
        f"data    {options.data}: {rows_per_epoch * T:,} tokens of {bytes_per_token:.2f} bytes, {rows_per_epoch / step_rows:,.1f} steps per epoch; "
        f"{max_steps:,} steps are {epochs:.2f} epochs{', so text is read again' if epochs > 1 else ''}"
    )
    print0(f"recipe  {recipe}")
    if options.text:
        print0(f"text    {options.text}: {describe_text_flags(flags)}")
    checkpoint_bytes = 3 * sum(p.nbytes for p in model.parameters())  # AdamW has two moments, Muon one
    if options.parallel == "fsdp" and world_size == 1:
        print0("note    --parallel fsdp has no effect on one process")
    if resume_from:
        print0(f"note    resuming from {resume_from}")
    for note in notes(options, flags, first_step, checkpoint_bytes if dist.rank == 0 else 0):
        print0(f"note    {note}")


def notes(options: RunOptions, flags: Mapping[str, Any], first_step: int, checkpoint_bytes: int) -> Iterator[str]:
    """Warnings before the first step, one line each. `flags` are all flags of the run."""
    max_steps, warmup_steps, decay_steps = flags["max_steps"], flags["warmup_steps"], flags["decay_steps"]
    if warmup_steps >= max_steps:
        yield f"all {max_steps:,} steps are in the warm-up, which takes {warmup_steps:,}; see --warmup-steps"
    elif warmup_steps >= decay_steps:
        yield (
            f"--decay-steps {decay_steps} is in the warm-up of {warmup_steps:,} steps: the learning rate falls to "
            "--min-lr right after it"
        )
    elif first_step < max_steps and max_steps > decay_steps:
        yield (
            f"from step {decay_steps:,} on, the learning rate stays at its lowest, {flags['min_lr']:.3g}; "
            "--decay-steps moves the end of the schedule, in a resumed run only before the cooldown of --schedule wsd"
        )
    if flags["max_lr"] > HIGH_LR:
        yield (
            f"--max-lr {flags['max_lr']:g} is very high: weights start near 0.02, and a step changes them by up to "
            "about that"
        )
    if os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0" and options.resume != "auto":
        yield "torchrun restarts a failed run, but only with --resume auto does that resume from a checkpoint"
    if checkpoint_bytes and options.checkpoint_every:
        free = shutil.disk_usage(options.out).free
        if free < checkpoint_bytes:
            size = format_bytes(checkpoint_bytes)
            yield f"a checkpoint takes {size}, and {options.out} has {format_bytes(free)} free"
    if first_step == max_steps:
        yield f"this run has finished its {max_steps:,} steps; raise --max-steps for more"


def demo_result(options: RunOptions, max_steps: int, bytes_per_token: float, text: str) -> None:
    """Prints the demo's sample, its validation loss and the path of its checkpoint."""
    print(f"\n{text}\n")
    if options.val_every:
        val = read_values(Path(options.out) / "log.txt", "val")
        loss = val[max_steps]
        print(f"validation loss {loss:.4f} nats per token, {loss / bytes_per_token:.4f} per byte")
    if options.checkpoint_every:
        directory = Path(options.out) / f"model_{max_steps:05d}"
        print(f'checkpoint in {directory}; for more text: python sample.py --model {directory} --prompt "The"')
