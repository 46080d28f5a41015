"""The lines before the first step and after the last one, and progress bars."""

from __future__ import annotations

import shlex
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Protocol, TypeVar

import torch
from tqdm import tqdm

from support import __version__
from support.console.deadline import seconds_for_process
from support.console.log import read_metrics, read_values
from support.console.run_logger import clock
from support.console.terminal import BOLD, YELLOW, StatusLine, labelled, on_one_line, pluralize, styled
from support.data.presets import MAX_STEPS
from support.files import format_bytes
from support.runtime import devices, memory
from support.runtime.budget import FEW_STEPS
from support.runtime.distributed import Distributed
from support.runtime.options import Recipe, RunOptions, describe_speed
from support.runtime.run_info import RunInfo, checkpoint_path
from support.startup import STARTED

T = TypeVar("T")
TOLERANCE = 0.07  # of the time of --minutes, without a word


def progress_bar(items: Iterable[T], name: str, rank: int) -> Iterator[T]:
    """The items, counted in the status line; without one, a bar on stderr, if that is a terminal. Rank 0 only."""
    if StatusLine.current and StatusLine.current.enabled:
        yield from StatusLine.current.counting(items, name)
    else:
        yield from tqdm(items, desc=name, leave=False, delay=1, disable=True if rank else None)


class Loader(Protocol):
    """What is needed of a DataLoaderLite."""

    B: int
    grad_accum: int
    rows_per_epoch: int


def print_header(run: RunInfo, dist: Distributed, loader: Loader) -> None:
    """Prints the lines before the first step: the figures that people compare. The rest is in `run.json`."""
    if dist.rank > 0:
        return
    config, T, world_size = run.config, run.config.block_size, dist.world_size
    step_rows = loader.B * world_size * loader.grad_accum
    steps_per_epoch = loader.rows_per_epoch / step_rows
    speed = describe_speed(config, dist.device)
    device = [f"{world_size} x {devices.describe(dist.device)}" + (f" ({config.parallel})" if world_size > 1 else "")]
    device += ["recomputing activations"] if config.recompute else []
    device += [config.dtype, "compiled"] if speed["compiled"] == "yes" else [config.dtype]
    device += [f"{speed['attention']} attention"] if dist.device.type == "cuda" else []
    parameters = sum(p.numel() for p in run.model.parameters())
    trained = sum(p.numel() for p in run.model.parameters() if p.requires_grad)
    facts = [
        ("device", ", ".join([*device, f"torch {torch.__version__}; train_gpt2.py {__version__}"])),
        (
            "model",
            f"{parameters:,} parameters{f' ({trained:,} trained)' if trained < parameters else ''}: "
            f"{pluralize(config.n_layer, 'layer')}, {pluralize(config.n_head, 'head')}, "
            f"{pluralize(config.n_embd, 'channel')}, context {T}",
        ),
        (
            "data",
            f"{config.data}: {loader.rows_per_epoch * T:,} tokens of {run.data.bytes_per_token:.2f} bytes, "
            f"vocabulary {run.data.tokenizer.vocab_size:,}",
        ),
        (
            "step",
            f"{step_rows * T:,} tokens = {pluralize(loader.B, 'row')} x {T:,} tokens x {pluralize(world_size, 'process')} "
            f"x {pluralize(loader.grad_accum, 'micro-step')}",
        ),
        (
            "length",
            f"{describe_length(run)}: {config.max_steps / steps_per_epoch:.2f} epochs of {steps_per_epoch:,.1f} steps",
        ),
        ("recipe", describe_recipe(config)),
    ]
    facts += [("note", f"compiled: {speed['compiled']}")] if config.compile and speed["compiled"] != "yes" else []
    facts += [("note", f"resuming from {run.resumed_from.path}")] if run.resumed_from else []
    checkpoint_bytes = memory.checkpoint_bytes(config, parameters, trained)
    facts += [("note", note) for note in notes(config, run.first_step, checkpoint_bytes)]
    for label, text in facts:
        print(labelled(label, text), flush=True)
    if config.warmup_steps >= config.max_steps:
        advice = f"Set --warmup-steps {config.max_steps // 10}, or raise" if run.first_step == 0 else "Raise"
        warning = (
            f"the warm-up of {pluralize(config.warmup_steps, 'step')} takes the whole run of {config.max_steps:,}, and the "
            f"learning rate never falls. {advice} --max-steps."
        )
        print(styled(labelled("warning", warning), YELLOW), flush=True)


def describe_length(run: RunInfo) -> str:
    config = run.config
    if not config.open_ended:
        return pluralize(config.max_steps, "step")
    minutes = round(seconds_for_process(run) / 60, 1)
    more, plural = " more" if run.first_step else "", "" if minutes == 1 else "s"
    return f"{minutes:g}{more} minute{plural}, about {pluralize(config.max_steps, 'step')} in total"


def describe_recipe(recipe: Recipe) -> str:
    """Optimizer and schedule in words."""
    warmup = f" after {pluralize(recipe.warmup_steps, 'step')}" if recipe.warmup_steps else ""
    end = "at the end" if recipe.decay_steps == MAX_STEPS else f"at step {recipe.decay_steps:,}"
    constant = recipe.schedule == "wsd" and recipe.decay_steps < MAX_STEPS
    cooldown = f"from step {recipe.decay_steps - recipe.cooldown_steps:,} down to " if constant else ""
    adamw = f" ({recipe.adamw_lr:.3g} for AdamW)" if recipe.adamw_lr is not None else ""
    rates = f"learning rate {recipe.max_lr:.3g}{adamw}{warmup}, {cooldown}{recipe.min_lr:.3g} {end}"
    return f"{recipe.optimizer}, {recipe.schedule}; {rates}"


def notes(config: RunOptions, first_step: int, checkpoint_bytes: int) -> Iterator[str]:
    """What is worth knowing before the first step."""
    max_steps, decay_steps = config.max_steps, config.decay_steps
    if config.warmup_steps < decay_steps < max_steps and first_step < max_steps:
        yield (
            f"from step {decay_steps:,} on, the learning rate stays at its lowest, {config.min_lr:.3g}; "
            "--decay-steps moves the end of the schedule, in a resumed run only before the cooldown of --schedule wsd"
        )
    if config.open_ended and first_step == 0 and max_steps < FEW_STEPS:
        yield (
            f"there is time for about {pluralize(max_steps, 'step')} only, and a model that learns something needs "
            "hundreds. What helps: more --minutes, a smaller model (--n-layer, --n-embd), a smaller --total-batch-size"
        )
    own_tokenizer = config.tokenizer != "gpt2" and not config.init_from  # which only --text can have
    if own_tokenizer and first_step == 0 and config.hellaswag_every == 0:  # otherwise there is a note from HellaSwag
        yield "only models made with --tokenizer gpt2 can be scored on HellaSwag"
    free = shutil.disk_usage(config.out).free
    if config.checkpoint_every and free < checkpoint_bytes:
        yield f"a checkpoint takes {format_bytes(checkpoint_bytes)}, and {config.out} has {format_bytes(free)} free"
    if first_step == max_steps:
        more = "--resume --minutes M, or a higher --max-steps," if config.minutes else "a higher --max-steps"
        yield f"this run has finished its {pluralize(max_steps, 'step')}; {more} makes it longer"


def print_summary(run: RunInfo, dist: Distributed, losses: Mapping[Path, float], texts: Sequence[str]) -> None:
    """Prints the end of a finished run: losses, time, tokens, the checkpoint, and the command to run next.

    Args:
        losses: validation losses of checkpoints, also of earlier ones that are better: the log does not have those.
        texts: samples, of which the first is shown.
    """
    if dist.rank > 0:
        return
    config, max_steps, out = run.config, run.config.max_steps, Path(run.config.out)
    since = f" since step {run.first_step:,}" if run.first_step else ""
    tokens, seconds = max_steps * config.total_batch_size, time.perf_counter() - STARTED
    timed = config.minutes and (run.resumed_from is None or run.resumed_from.replaces_later)
    planned = f" of {clock(seconds_for_process(run))}" if timed else ""
    lines = [
        labelled("done", f"{pluralize(max_steps, 'step')}, {tokens:,} tokens; {clock(seconds)}{planned} elapsed{since}")
    ]
    if timed and (reason := why_late(run, seconds)):
        lines.append(labelled("", reason))
    checkpoint, val = checkpoint_path(out, max_steps), dict[Path, float]()
    if config.val_every:
        logged = read_values(out / "log.txt", "val")
        val = {checkpoint_path(out, step): loss for step, loss in logged.items()} | dict(losses)
    best = min(val, key=lambda path: val[path], default=checkpoint)
    for path, name in {checkpoint: "last", best: "best"}.items():  # one line if they are the same
        if path in val:
            step, per_byte = int(path.stem.removeprefix("model_")), val[path] / run.data.bytes_per_token
            loss = f"{val[path]:.4f} nats per token, {per_byte:.4f} per byte, at step {step:,}"
            loss += f": {path}" if path != checkpoint and path.is_dir() else ""
            lines.append(styled(labelled(name, f"validation loss {loss}"), BOLD))
    lines += [labelled("sample", on_one_line(text)) for text in texts[:1]]
    if config.checkpoint_every and checkpoint.is_dir():  # without, it may be of an earlier run
        prompt = ' --prompt "The"' if config.demo else ""
        lines.append(f"saved   {checkpoint}")
        lines.append(f"next    python sample.py --model {shlex.quote(str(checkpoint))}{prompt}")  # in one line, to copy
    before_cooldown = checkpoint_path(out, config.cooldown_start)
    can_go_back = config.schedule == "wsd" and config.decay_steps == max_steps and before_cooldown != checkpoint
    if can_go_back and checkpoint.is_dir() and before_cooldown.is_dir():
        more = f"--minutes {max(1, round(config.minutes))}" if config.minutes else f"--max-steps {2 * max_steps}"
        lines.append(f"longer  python train_gpt2.py --resume --out {shlex.quote(str(out))} {more}")
        lines.append(f"        continues from {before_cooldown}, before the cooldown")
    print("\n" + "\n".join(lines), flush=True)


def why_late(run: RunInfo, seconds: float) -> str | None:
    """Why a run took other `seconds` than --minutes, if it did."""
    start, planned = run.config.cooldown_start, seconds_for_process(run)
    if abs(seconds - planned) < TOLERANCE * planned:
        return None
    taken = read_metrics(Path(run.config.out) / "metrics.jsonl").get("seconds", {})
    before = [taken[step] for step in range(start - max(1, start // 8), start) if step in taken]
    after = [taken[step] for step in range(start, run.config.max_steps) if step in taken]
    if not before or not after:
        return None
    slower = fmean(after) / fmean(before)
    if abs(slower - 1) < TOLERANCE:
        what = "less" if seconds < planned else "more"
        return (
            f"the steps took as long as expected; validations, checkpoints and the end of the process took {what} time"
        )
    return (
        f"after step {start:,}, where the number of steps was fixed, a step took {slower:.2f} times as long as before"
    )
