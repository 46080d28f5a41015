"""The lines before the first step and after the last one, and progress bars."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sized
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

from support.console.log import read_values
from support.console.run_logger import STARTED, clock
from support.console.terminal import BOLD, YELLOW, StatusLine, labelled, on_one_line, pluralize, styled
from support.data.presets import describe_text_flags
from support.files import format_bytes
from support.runtime import devices
from support.runtime.distributed import Distributed
from support.runtime.options import RunOptions, describe_speed

T = TypeVar("T")
HIGH_LR = 0.1
FEW_STEPS = 100


def progress_bar(items: Iterable[T], name: str, rank: int) -> Iterator[T]:
    """The items, counted in the status line; without one, a bar on stderr, if that is a terminal. Rank 0 only."""
    status: StatusLine | None = getattr(sys.stdout, "status_line", None)
    if status is None:
        from tqdm import tqdm

        yield from tqdm(items, desc=name, leave=False, disable=True if rank or sys.stderr is None else None)
        return
    total = f"/{len(items):,}" if isinstance(items, Sized) else ""
    try:
        for n, item in enumerate(items):
            status.show_activity(f"{name} {n:,}{total}")
            yield item
    finally:
        status.show_activity("")


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
    flags, T = options.to_dict(), sizes["block_size"]
    step_rows, max_steps = B * dist.world_size * grad_accum, flags["max_steps"]
    epochs = max_steps * step_rows / rows_per_epoch
    parallel = f" ({options.parallel})" if dist.world_size > 1 else ""
    parallel += ", recomputing activations" if options.recompute else ""
    device = f"{dist.world_size} x {devices.describe(dist.device)}{parallel}"
    facts = [
        ("device", f"{device}, {options.dtype}, torch {torch.__version__}"),
        ("speed", "; ".join(f"{name}: {text}" for name, text in describe_speed(options, dist.device, sizes).items())),
        ("model", describe_model(model, sizes)),
        (
            "step",
            f"{step_rows * T:,} tokens = {pluralize(B, 'row')} x {T:,} tokens x {pluralize(dist.world_size, 'process')} x "
            f"{pluralize(grad_accum, 'micro-step')}",
        ),
        ("data", f"{options.data}: {rows_per_epoch * T:,} tokens of {bytes_per_token:.2f} bytes"),
        ("epochs", f"{epochs:.2f} = {pluralize(max_steps, 'step')} / {rows_per_epoch / step_rows:,.1f} steps per epoch"),
        ("recipe", recipe),
    ]
    if options.text:
        facts.append(("text", f"{options.text}: {describe_text_flags(flags)}"))
    if options.parallel == "fsdp" and dist.world_size == 1:
        facts.append(("note", "--parallel fsdp has no effect on one process"))
    if resume_from:
        facts.append(("note", f"resuming from {resume_from}"))
    for label, text in facts:
        dist.print0(labelled(label, text))
    if warning := warmup_warning(flags, first_step):
        dist.print0(styled(labelled("warning", warning), YELLOW))
    checkpoint_bytes = 3 * sum(p.nbytes for p in model.parameters())  # AdamW has two moments, Muon one
    for note in notes(options, flags, first_step, checkpoint_bytes if dist.rank == 0 else 0):
        dist.print0(labelled("note", note))


class Recipe(Protocol):
    """The fields of TrainConfig that say how a run learns."""

    @property
    def optimizer(self) -> str: ...
    @property
    def schedule(self) -> str: ...
    @property
    def warmup_steps(self) -> int: ...
    @property
    def cooldown_steps(self) -> int: ...
    @property
    def decay_steps(self) -> int: ...
    @property
    def max_lr(self) -> float: ...
    @property
    def min_lr(self) -> float: ...


def describe_recipe(recipe: Recipe) -> str:
    """Optimizer and schedule in words."""
    cooldown = f"constant, and a cooldown of {pluralize(recipe.cooldown_steps, 'step')}"
    decay = "cosine decay" if recipe.schedule == "cosine" else cooldown
    warmup = f"warm-up in {pluralize(recipe.warmup_steps, 'step')} to " if recipe.warmup_steps else ""
    peak = f"{warmup}learning rate {recipe.max_lr:.3g}"
    return f"{recipe.optimizer}; {peak}, then {decay} to {recipe.min_lr:.3g} at step {recipe.decay_steps:,}"


def describe_model(model: nn.Module, sizes: Mapping[str, int]) -> str:
    parameters = sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    trained_text = f" ({trained:,} trained)" if trained < parameters else ""
    padded = len(model.get_parameter("lm_head.weight"))
    padding = f" (padded to {padded})" if padded > sizes["vocab_size"] else ""
    return (
        f"{parameters:,} parameters{trained_text}: {pluralize(sizes['n_layer'], 'layer')}, {pluralize(sizes['n_head'], 'head')}, "
        f"{pluralize(sizes['n_embd'], 'channel')}, context {sizes['block_size']}, vocabulary {sizes['vocab_size']}{padding}"
    )


def warmup_warning(flags: Mapping[str, Any], first_step: int) -> str | None:
    """What is wrong with a warm-up that is not shorter than the run, and what to do. `flags` are all flags of the run."""
    max_steps, warmup_steps = flags["max_steps"], flags["warmup_steps"]
    if warmup_steps < max_steps:
        return None
    advice = "Raise --max-steps." if first_step else f"Set --warmup-steps {max_steps // 10}, or raise --max-steps."
    return (
        f"the warm-up of {pluralize(warmup_steps, 'step')} takes the whole run of {max_steps:,}, and the learning rate "
        f"never falls. {advice}"
    )


def notes(options: RunOptions, flags: Mapping[str, Any], first_step: int, checkpoint_bytes: int) -> Iterator[str]:
    """What is worth knowing before the first step. `flags` are all flags of the run."""
    max_steps, warmup_steps, decay_steps = flags["max_steps"], flags["warmup_steps"], flags["decay_steps"]
    if decay_steps <= warmup_steps < max_steps:
        yield (
            f"--decay-steps {decay_steps} is in the warm-up of {pluralize(warmup_steps, 'step')}: the learning rate falls to "
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
    if options.minutes and max_steps < FEW_STEPS and first_step == 0:
        yield (
            f"--minutes {options.minutes:g} leaves time for {pluralize(max_steps, 'step')} only, next to start and validations: "
            "the model will hardly learn anything"
        )
    if os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0" and options.resume != "auto":
        yield "torchrun restarts a failed run, but only with --resume auto does that resume from a checkpoint"
    if checkpoint_bytes and options.checkpoint_every:
        free = shutil.disk_usage(options.out).free
        if free < checkpoint_bytes:
            size = format_bytes(checkpoint_bytes)
            yield f"a checkpoint takes {size}, and {options.out} has {format_bytes(free)} free"
    if first_step == max_steps:
        yield f"this run has finished its {pluralize(max_steps, 'step')}; raise --max-steps for more"


def print_summary(options: RunOptions, dist: Distributed, first_step: int, bytes_per_token: float, text: str) -> None:
    """Prints the end of a finished run: losses, time, tokens, the checkpoint, and the command to run next.

    Args:
        first_step: of this process; above 0 if it has resumed the run.
        bytes_per_token: of the validation split, if there is one.
        text: a sample, or "".
    """
    if dist.rank > 0:
        return
    flags, out = options.to_dict(), Path(options.out)
    max_steps, since = flags["max_steps"], f" since step {first_step:,}" if first_step else ""
    tokens, seconds = max_steps * flags["total_batch_size"], time.perf_counter() - STARTED
    lines = [labelled("done", f"{pluralize(max_steps, 'step')}, {tokens:,} tokens; {clock(seconds)} elapsed{since}")]
    val = read_values(out / "log.txt", "val") if options.val_every else {}
    best = min(val, key=lambda step: val[step], default=max_steps)
    for step, name in {max_steps: "last", best: "best"}.items():  # one line if they are the same
        if step in val:
            loss = f"{val[step]:.4f} nats per token, {val[step] / bytes_per_token:.4f} per byte, at step {step:,}"
            lines.append(styled(labelled(name, f"validation loss {loss}"), BOLD))
    if text:
        lines.append(labelled("sample", on_one_line(text)))
    checkpoint = out / f"model_{max_steps:05d}"
    if checkpoint.is_dir():
        prompt = ' --prompt "The"' if options.demo else ""
        lines.append(f"saved   {checkpoint}")
        lines.append(f"next    python sample.py --model {shlex.quote(str(checkpoint))}{prompt}")  # in one line, to copy
    print("\n" + "\n".join(lines), flush=True)
