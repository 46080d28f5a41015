"""The lines before the first step and after the last one, and progress bars."""

from __future__ import annotations

import shlex
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import torch
from tqdm import tqdm

from support import __version__
from support.checkpoints.directory import newest_before_cooldown
from support.checkpoints.history import argmin_loss
from support.checkpoints.huggingface import options_of
from support.checkpoints.run_info import RunInfo, checkpoint_path
from support.checkpoints.start import Start
from support.checkpoints.state import TrainState
from support.cli import describe_free_space, flag_name, flag_words, format_bytes, print_lines
from support.config import TRAIN_FLAGS, TrainConfig, changed_flags
from support.console.run_logger import PROGRESS_SECONDS, format_duration
from support.data.shards import find_difference
from support.files import first_free
from support.runtime import devices, memory
from support.runtime.distributed import Distributed
from support.sizing import presets
from support.startup import STARTED, is_terminal
from support.terminal import BOLD, YELLOW, labelled, on_one_line, pluralize, styled

T = TypeVar("T")
MANY_PASSES, MANY_PASSES_WITH_DROPOUT = 20, 32  # over the data; beyond, a run is probably meant to be shorter
LONG_STEP = 60  # seconds
CHOOSING_LAYERS = ("--minutes", "--text", "--demo")


def progress_bar(items: Collection[T], name: str, rank: int, describe: Callable[[], str] = str) -> Iterator[T]:
    """Yields the items. Rank 0 counts them in a bar on stderr, if that is a terminal; if stdout is not one, it prints a line each minute.

    Args:
        describe: returns more text for that line.
    """
    started = printed = time.perf_counter()
    for n, item in enumerate(tqdm(items, desc=name, leave=False, delay=1, disable=True if rank else None)):
        now = time.perf_counter()
        if rank == 0 and now - printed >= PROGRESS_SECONDS and not is_terminal():
            printed = now
            print_lines(f"{name} | {n:,} of {len(items):,}{describe()} | {format_duration(now - started)}")
        yield item


def print_header(run: RunInfo, dist: Distributed, B: int, rows_per_epoch: int, row: int) -> None:
    """Prints the lines before the first step: the figures that people compare. The rest is in `starts.jsonl`.

    Args:
        B: rows of a micro-batch.
        rows_per_epoch, row: rows of the training data, and the one that comes next.
    """
    if dist.rank > 0:
        return
    config, model, world_size = run.config, run.model_config, dist.world_size
    T, sizes = model.block_size, memory.Sizes.of(run.model)
    step_rows = config.step_rows
    steps_per_pass = rows_per_epoch / step_rows
    machine, seconds = run.machine, run.checkpoint.seconds if run.checkpoint else 0.0
    device = [f"{world_size} x {devices.describe(dist.device)}" + (f" ({config.parallel})" if world_size > 1 else "")]
    device += ["recomputing activations"] if config.recompute else []
    device += [machine.dtype, "compiled"] if machine.compiled else [machine.dtype]
    device += ["CUDA graphs"] if machine.cuda_graphs else []
    device += [f"{machine.attention} attention"] if dist.device.type == "cuda" else []
    trained = f" (frozen; LoRA trains {sizes.trained:,} of its own)" if config.lora_rank else ""
    options = "".join(f", {name} {value}" for name, value in options_of(model).items())
    validated = f"; validation on {run.validated_tokens:,} tokens of {run.bytes_per_token:.2f} bytes"
    validated = validated if config.val_every != 0 else ""
    facts = [
        ("device", ", ".join([*device, f"torch {torch.__version__}; train_gpt2.py {__version__}"])),
        (
            "model",
            f"{run.parameters:,} parameters{trained}: {pluralize(model.n_layer, 'layer')}, "
            f"{pluralize(model.n_head, 'head')}, {pluralize(model.n_embd, 'channel')}, context {T}{options}",
        ),
        (
            "data",
            f"{config.data}: {rows_per_epoch * T:,} tokens, vocabulary {run.data.tokenizer.vocab_size:,}{validated}",
        ),
        (
            "step",
            f"{step_rows * T:,} tokens = {pluralize(B, 'row')} x {T:,} tokens x {pluralize(world_size, 'process')} "
            f"x {pluralize(step_rows // (B * world_size), 'micro-step')}",
        ),
        ("length", run.schedule.describe_length(run.first_step, seconds, steps_per_pass, row / step_rows)),
        ("recipe", run.schedule.describe_rates()),
    ]
    facts += [("chosen", chosen)] if (chosen := describe_choices(run)) else []
    facts += [("note", f"not compiled: {machine.why_not_compiled}")] if machine.why_not_compiled else []
    text_bytes = rows_per_epoch * T * run.bytes_per_token
    if config.text is not None and not config.init_from and text_bytes < presets.TINY_TEXT:
        text = "so little text teaches spelling and common words, hardly sentences. Use more text, or --init-from gpt2"
        facts.append(("note", text))
    if run.checkpoint:
        changes = changed_flags(TRAIN_FLAGS, run.checkpoint.config, config.used_flags())
        shown = [
            f"{flag_name(name)} {_shown(new)} (was {_shown(had)})"
            for name, had, new in changes
            if name not in ("out", "device")
        ]
        for split in ("train", "val"):
            if difference := find_difference(run.checkpoint.data[split], run.identity[split]):
                shown.append(
                    f"different {split} shards ({difference}){', read from the first row on' * (split == 'train')}"
                )
        what = "a fork of" if run.forked else "resuming from"
        facts.append(("note", f"{what} {run.checkpoint.path}: {', '.join(shown) or 'the same flags'}"))
    checkpoint_bytes = memory.checkpoint_bytes(sizes, config.optimizer)
    free = shutil.disk_usage(config.out).free
    if config.checkpoint_every != 0 and free < checkpoint_bytes:
        note = f"a checkpoint takes {format_bytes(checkpoint_bytes)}, but {config.out} has {describe_free_space(config.out)}"
        facts.append(("note", note))
    for label, text in facts:
        print_lines(labelled(label, text))
    if config.minutes is None:
        for warning in describe_doubts(run, dist, steps_per_pass):
            print_lines(styled(labelled("warning", warning), YELLOW))


def describe_choices(run: RunInfo) -> str:
    """Says which settings that no other line shows were chosen, and by which flag; empty if there are none."""
    by_flag: dict[str, list[str]] = {}
    cooldown = ("cooldown_fraction",) if run.config.has_cooldown else ()
    for name in ("weight_decay", "dropout", *cooldown, "shuffle"):
        flag, value = run.start.sources[name], getattr(run.config, name)
        if flag in CHOOSING_LAYERS and value != TRAIN_FLAGS[name].default:
            words = name.replace("_", " ") + (f" {value:.3g}" if name != "shuffle" else "")
            by_flag.setdefault(flag, []).append(words)
    return "; ".join(f"{', '.join(words)}: {flag}" for flag, words in by_flag.items())


def describe_doubts(run: RunInfo, dist: Distributed, steps_per_pass: float) -> Iterator[str]:
    """Yields what is probably not meant in a run of --max-steps, and what to do."""
    config, from_text = run.config, run.config.is_demo_or_text
    if config.warmup_steps >= config.max_steps:
        advice = f"Set --warmup-steps {config.max_steps // 10}, or raise" if run.first_step == 0 else "Raise"
        yield (
            f"the warm-up of {pluralize(config.warmup_steps, 'step')} takes up the whole run of {config.max_steps:,}, so "
            f"the learning rate never falls. {advice} --max-steps."
        )
    passes = config.max_steps / steps_per_pass
    dropout = run.model_config.dropout
    if run.first_step == 0 and (passes > MANY_PASSES_WITH_DROPOUT and from_text if dropout else passes > MANY_PASSES):
        steps = max(1, round(presets.most_passes(dropout) * steps_per_pass))
        advice = "Train on the text itself with --text, which chooses a model and a length that suit it, or use"
        yield (
            f"a model that makes {passes:,.0f} passes over the data memorizes it. {'Use' if from_text else advice} "
            f"--max-steps {steps} --warmup-steps {steps // 10}{'' if dropout else ', or --dropout 0.2'}."
        )
    if dist.device.type == "cpu":
        flops = run.flops_per_token * config.total_batch_size
        speed = devices.CPU_CORE_FLOPS[run.machine.dtype] * torch.get_num_threads() * dist.world_size
        if flops / speed > LONG_STEP:
            advice = "Add --minutes 30" if from_text else "Train on the text itself with --text FILE --minutes 30"
            yield (
                f"a step takes about {flops / speed / 60:,.0f} minutes on this CPU. {advice}, which chooses a model that suits "
                "this machine, or use a smaller model and a smaller --total-batch-size."
            )


def _shown(value: object) -> object:
    return f"{value:g}" if isinstance(value, float) else "unset" if value is None else value


def print_summary(
    run: RunInfo, dist: Distributed, state: TrainState, passes: float, val: Mapping[int, float], better: Path | None,
    texts: Sequence[str],
) -> None:  # fmt: skip
    """Prints the end of a finished run: losses, time, tokens, the checkpoint, and the command to run next.

    Args:
        passes: over the data, so far.
        val: comparable validation losses by step.
        better: the best checkpoint, if it is better than the last model.
        texts: samples that continue the run's prompt; the first one is shown.
    """
    if dist.rank > 0:
        return
    config, step, out = run.config, state.step, Path(run.config.out)
    since = f" since step {run.first_step:,}" if run.first_step else ""
    elapsed = format_duration(time.perf_counter() - STARTED)
    if config.minutes:
        earlier = run.checkpoint.seconds if run.checkpoint else 0.0
        elapsed += f" of {format_duration(60 * config.minutes - earlier)}"
    done = f"{pluralize(step, 'step')}, {state.tokens:,} tokens; {elapsed} elapsed{since}"
    lines, checkpoint = [labelled("done", done)], checkpoint_path(out, step)
    for at, name in {step: "last", argmin_loss(val): "best"}.items():  # one line if they are the same
        if at is not None and at in val:
            loss = f"{val[at]:.4f} nats per token, {val[at] / run.bytes_per_token:.4f} per byte, at step {at:,}"
            loss += f": {checkpoint_path(out, at)}" if at != step and checkpoint_path(out, at).is_dir() else ""
            lines.append(styled(labelled(name, f"validation loss {loss}"), BOLD))
    if better:
        why = f": it has read its data {passes:.0f} times, and memorizes it" if passes > presets.MAX_PASSES else ""
        advice = " Use --dropout 0.2, or more text." if why and not run.model_config.dropout else ""
        lines.append(labelled("note", f"the last model is worse than {better}{why}.{advice}"))
    limit = config.max_passes
    if 0 < limit <= passes:
        if limit < presets.most_passes(run.model_config.dropout):
            why = "which is the limit of --max-passes"
        elif run.model_config.dropout:
            why = "and more would only memorize it. A larger text is what helps"
        else:
            why = "and without dropout, more would only memorize it"
        lines.append(labelled("note", f"the data has been read {limit:g} times, {why}"))
    lines += [labelled("sample", on_one_line(text)) for text in texts[:1]]
    if checkpoint.is_dir():
        prompt = f" --prompt {shlex.quote(run.prompt)}" if texts else ""
        lines.append(f"saved   {checkpoint}")
        lines.append(f"next    python sample.py --model {shlex.quote(str(better or checkpoint))}{prompt}")  # to copy
        if better is None:
            lines += describe_longer_run(config, run.start, passes)
    print_lines("\n" + "\n".join(lines))


def print_finished(config: TrainConfig, start: Start, print0: Callable[[str], None]) -> None:
    """Prints that there is nothing to resume, because the run has finished, and how to make it longer."""
    assert start.resumed
    done = labelled("done", f"this run has finished; its last checkpoint is {start.resumed.path}")
    print0("\n".join([done, *describe_longer_run(config, start, start.resumed.passes)]))


def describe_longer_run(config: TrainConfig, start: Start, passes: float) -> list[str]:
    """Returns a line with the command that makes a finished run longer; none if that gains nothing, or there is no
    checkpoint to fork.

    Args:
        passes: over its data, so far.
    """
    longer_from = newest_before_cooldown(config.out)
    longer = presets.longer_run(config, start.sources, passes, start.tables)
    if longer_from is None or not longer:
        return []
    out = config.out if Path(config.out).name else Path(config.out).absolute()  # the name of . is empty
    words = ["--fork", shlex.quote(str(longer_from)), "--out", shlex.quote(first_free(f"{out}_longer"))]
    words += [flag_words(name, value) for name, value in longer.items()]
    return [f"longer  python train_gpt2.py {' '.join(words)}"]
