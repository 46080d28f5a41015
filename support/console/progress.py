"""The lines before the first step and after the last one, and progress bars."""

from __future__ import annotations

import shlex
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch
from tqdm import tqdm

from support import __version__
from support.cli import describe_free_space, flag_name, format_bytes, print_lines
from support.console.run_logger import PROGRESS_SECONDS, clock
from support.console.terminal import BOLD, YELLOW, labelled, on_one_line, pluralize, styled
from support.data import presets
from support.data.shards import find_difference
from support.files import first_free
from support.runtime import devices, memory
from support.runtime.distributed import Distributed
from support.runtime.options import changed_flags
from support.runtime.run_info import RunInfo, checkpoint_path, options_of
from support.startup import STARTED, is_terminal

if TYPE_CHECKING:
    from support.checkpoints.state import TrainState
    from train_gpt2 import DataLoaderLite, TrainConfig

T = TypeVar("T")
MANY_PASSES = 20  # over the data; beyond, a run is probably meant to be shorter
LONG_STEP = 60  # seconds


def progress_bar(items: Collection[T], name: str, rank: int, describe: Callable[[], str] = str) -> Iterator[T]:
    """Yields the items; rank 0 counts them in a bar on stderr, if that is a terminal; if stdout is none, in a line each minute.

    Args:
        describe: returns what such a line says besides.
    """
    started = printed = time.perf_counter()
    for n, item in enumerate(tqdm(items, desc=name, leave=False, delay=1, disable=True if rank else None)):
        now = time.perf_counter()
        if rank == 0 and now - printed >= PROGRESS_SECONDS and not is_terminal():
            printed = now
            print_lines(f"{name} | {n:,} of {len(items):,}{describe()} | {clock(now - started)}")
        yield item


def print_header(run: RunInfo, dist: Distributed, loader: DataLoaderLite) -> None:
    """Prints the lines before the first step: the figures that people compare. The rest is in `starts.jsonl`."""
    if dist.rank > 0:
        return
    config, T, world_size = run.config, run.config.block_size, dist.world_size
    step_rows = loader.B * world_size * loader.grad_accum
    steps_per_pass = loader.rows_per_epoch / step_rows
    machine = run.machine
    device = [f"{world_size} x {devices.describe(dist.device)}" + (f" ({config.parallel})" if world_size > 1 else "")]
    device += ["recomputing activations"] if config.recompute else []
    device += [machine.dtype, "compiled"] if machine.compiled else [machine.dtype]
    device += [f"{machine.attention} attention"] if dist.device.type == "cuda" else []
    parameters = sum(p.numel() for p in run.model.parameters())
    trained = sum(p.numel() for p in run.model.parameters() if p.requires_grad)
    options = "".join(f", {name} {value}" for name, value in options_of(run.model.config).items())
    validated = f"; validation on {run.validated_tokens:,} tokens of {run.bytes_per_token:.2f} bytes"
    validated = validated if config.val_every != 0 else ""
    facts = [
        ("device", ", ".join([*device, f"torch {torch.__version__}; train_gpt2.py {__version__}"])),
        (
            "model",
            f"{parameters:,} parameters{f' ({trained:,} trained)' if trained < parameters else ''}: "
            f"{pluralize(config.n_layer, 'layer')}, {pluralize(config.n_head, 'head')}, "
            f"{pluralize(config.n_embd, 'channel')}, context {T}{options}",
        ),
        (
            "data",
            f"{config.data}: {loader.rows_per_epoch * T:,} tokens, vocabulary {run.data.tokenizer.vocab_size:,}{validated}",
        ),
        (
            "step",
            f"{step_rows * T:,} tokens = {pluralize(loader.B, 'row')} x {T:,} tokens x {pluralize(world_size, 'process')} "
            f"x {pluralize(loader.grad_accum, 'micro-step')}",
        ),
        ("length", describe_length(run, steps_per_pass, loader.row / step_rows)),
        ("recipe", describe_recipe(config)),
    ]
    facts += [("note", f"not compiled: {machine.why_not_compiled}")] if machine.why_not_compiled else []
    text_bytes = loader.rows_per_epoch * T * run.bytes_per_token
    if config.text is not None and not config.init_from and text_bytes < presets.TINY_TEXT:
        text = "so little text teaches spelling and common words, hardly sentences. Use more text, or --init-from gpt2"
        facts.append(("note", text))
    if run.checkpoint:
        changes = changed_flags(type(config), run.checkpoint.config, config.to_dict())
        shown = [
            f"{flag_name(name)} {_shown(new)} (was {_shown(had)})"
            for name, had, new in changes
            if name not in ("out", "device")
        ]
        for split in ("train", "val"):
            if difference := find_difference(run.checkpoint.data[split], run.identity[split]):
                shown.append(
                    f"other {split} shards ({difference}){', read from the first row on' * (split == 'train')}"
                )
        what = "a fork of" if config.starts_fork else "resuming from"
        facts.append(("note", f"{what} {run.checkpoint.path}: {', '.join(shown) or 'the same flags'}"))
    checkpoint_bytes = memory.checkpoint_bytes(config, parameters, trained)
    free = shutil.disk_usage(config.out).free
    if config.checkpoint_every != 0 and free < checkpoint_bytes:
        note = f"a checkpoint takes {format_bytes(checkpoint_bytes)}, but {config.out} has {describe_free_space(config.out)}"
        facts.append(("note", note))
    for label, text in facts:
        print_lines(labelled(label, text))
    if config.minutes is None:
        for warning in describe_doubts(run, dist, steps_per_pass):
            print_lines(styled(labelled("warning", warning), YELLOW))


def describe_doubts(run: RunInfo, dist: Distributed, steps_per_pass: float) -> Iterator[str]:
    """Yields what is probably not meant in a run of --max-steps, and what to do."""
    config, from_text = run.config, run.config.demo or run.config.text is not None
    if config.warmup_steps >= config.max_steps:
        advice = f"Set --warmup-steps {config.max_steps // 10}, or raise" if run.first_step == 0 else "Raise"
        yield (
            f"the warm-up of {pluralize(config.warmup_steps, 'step')} takes up the whole run of {config.max_steps:,}, so "
            f"the learning rate never falls. {advice} --max-steps."
        )
    passes = config.max_steps / steps_per_pass
    if passes > MANY_PASSES and run.first_step == 0 and not config.dropout:
        steps = max(1, round(presets.MAX_EPOCHS * steps_per_pass))
        advice = "Train on the text itself with --text, which chooses a model and a length that suit it, or use"
        yield (
            f"a model that makes {passes:,.0f} passes over the data learns it by heart. {'Use' if from_text else advice} "
            f"--max-steps {steps} --warmup-steps {steps // 10}, or --dropout 0.2."
        )
    if dist.device.type == "cpu":
        flops = run.model.flops_per_token() * config.total_batch_size
        speed = devices.CPU_CORE_FLOPS[run.machine.dtype] * torch.get_num_threads() * dist.world_size
        if flops / speed > LONG_STEP:
            advice = "Add --minutes 30" if from_text else "Train on the text itself with --text FILE --minutes 30"
            yield (
                f"a step takes about {flops / speed / 60:,.0f} minutes on this CPU. {advice}, which chooses a model that suits "
                "this machine, or use a smaller model and a smaller --total-batch-size."
            )


def _shown(value: object) -> object:
    return f"{value:g}" if isinstance(value, float) else "unset" if value is None else value


def describe_length(run: RunInfo, steps_per_pass: float, steps_read: float = 0.0) -> str:
    """Describes the length of a run, and how many steps a pass over the data takes.

    Args:
        steps_read: how many such steps the data that was read already would have made.
    """
    config = run.config
    if config.minutes is None:
        total = (steps_read + config.max_steps - run.first_step) / steps_per_pass
        passes = f"{total:.2f} passes over the data, {steps_per_pass:,.1f} steps each"
        return f"{pluralize(config.max_steps, 'step')}: {passes}"
    before = run.checkpoint.seconds / 60 if run.checkpoint else 0
    since = f", of which {before:.1f} have passed" if before else ""
    minutes = f"{config.minutes:g} minute{'' if config.minutes == 1 else 's'}{since}"
    limit = f", but at most {config.max_passes:g} passes" if config.max_passes else ""
    return f"{minutes}{limit}; a pass over the data has {steps_per_pass:,.1f} steps"


def describe_recipe(config: TrainConfig) -> str:
    """Describes optimizer and schedule in words."""
    unit = "minute" if config.minutes else "step"
    warmup = f" after {pluralize(config.warmup_steps, 'step')}" if config.warmup_steps and not config.minutes else ""
    end = f"at minute {config.minutes:g}" if config.minutes else f"at step {config.decay_steps:,}"
    start = config.cooldown_start * (config.minutes or config.decay_steps)
    when = f"{unit} {start:,.{1 if config.minutes else 0}f}"
    if config.max_passes:  # whichever ends the run first
        when, end = f"{config.cooldown_start:.0%} of the run", "at its end"
    cooldown = f"from {when} on " if config.schedule == "wsd" else ""
    adamw = f" ({config.adamw_lr:.3g} for AdamW)" if config.adamw_lr is not None else ""
    rates = f"learning rate {config.max_lr:.3g}{adamw}{warmup}, {cooldown}falling to {config.min_lr:.3g} {end}"
    return f"{config.optimizer}, {config.schedule}; {rates}"


def print_summary(
    run: RunInfo, dist: Distributed, state: TrainState, passes: float, val: Mapping[int, float], best: Path | None,
    before_cooldown: Path | None, texts: Sequence[str],
) -> None:  # fmt: skip
    """Prints the end of a finished run: losses, time, tokens, the checkpoint, and the command to run next.

    Args:
        passes: over the data, so far.
        val: comparable validation losses by step.
        best: the best checkpoint.
        before_cooldown: the checkpoint from which a longer run can start.
        texts: samples that continue the run's prompt; the first one is shown.
    """
    if dist.rank > 0:
        return
    config, step, out = run.config, state.step, Path(run.config.out)
    since = f" since step {run.first_step:,}" if run.first_step else ""
    elapsed = clock(time.perf_counter() - STARTED)
    if config.minutes:
        earlier = run.checkpoint.seconds if run.checkpoint else 0.0
        elapsed += f" of {clock(60 * config.minutes - earlier)}"
    done = f"{pluralize(step, 'step')}, {state.tokens:,} tokens; {elapsed} elapsed{since}"
    lines, checkpoint = [labelled("done", done)], checkpoint_path(out, step)
    lines += [labelled("note", note)] if (note := presets.fewer_steps_note(config, step)) else []
    best_step = min(val, key=lambda step: val[step], default=step)
    for at, name in {step: "last", best_step: "best"}.items():  # one line if they are the same
        if at in val:
            loss = f"{val[at]:.4f} nats per token, {val[at] / run.bytes_per_token:.4f} per byte, at step {at:,}"
            loss += f": {checkpoint_path(out, at)}" if at != step and checkpoint_path(out, at).is_dir() else ""
            lines.append(styled(labelled(name, f"validation loss {loss}"), BOLD))
    if best and best != checkpoint:
        why = (
            f": it has read its data {passes:.0f} times, and learns it by heart" if passes > presets.MAX_EPOCHS else ""
        )
        advice = " Use --dropout 0.2, or more text." if why and not config.dropout else ""
        lines.append(labelled("note", f"the last model is worse than {best}{why}.{advice}"))
    if is_read_enough(config, passes):
        text = f"the data has been read {config.max_passes:g} times; more time would only memorize it. A larger text is what helps"
        lines.append(labelled("note", text))
    lines += [labelled("sample", on_one_line(text)) for text in texts[:1]]
    if checkpoint.is_dir():
        prompt = f" --prompt {shlex.quote(run.prompt)}" if texts else ""
        lines.append(f"saved   {checkpoint}")
        lines.append(f"next    python sample.py --model {shlex.quote(str(best or checkpoint))}{prompt}")  # to copy
        lines += describe_longer_run(config, passes, before_cooldown) if best in (None, checkpoint) else []
    print_lines("\n" + "\n".join(lines))


def print_finished(
    config: TrainConfig, checkpoint: Path, passes: float, before_cooldown: Path | None, print0: Callable[[str], None]
) -> None:
    """Prints that there is nothing to resume, because the run has finished, and how to make it longer."""
    done = labelled("done", f"this run has finished; its last checkpoint is {checkpoint}")
    print0("\n".join([done, *describe_longer_run(config, passes, before_cooldown)]))


def is_read_enough(config: TrainConfig, passes: float) -> bool:
    """Returns whether a run has ended because it has made --max-passes over its data."""
    return 0 < config.max_passes <= passes


def describe_longer_run(config: TrainConfig, passes: float, before_cooldown: Path | None) -> list[str]:
    """Returns a line with the command that makes a finished run longer; none if that gains nothing, or there is no
    checkpoint to fork."""
    # if the decay ended earlier, a longer run would have the same learning rates
    ends_together = config.minutes is not None or config.decay_steps == config.max_steps
    if before_cooldown is None or not ends_together or is_read_enough(config, passes):
        return []
    more = f"--minutes {2 * config.minutes:g}" if config.minutes else f"--max-steps {2 * config.max_steps}"
    command = f"python train_gpt2.py --fork {shlex.quote(str(before_cooldown))}"
    return [f"longer  {command} --out {shlex.quote(first_free(f'{config.out}_longer'))} {more}"]
