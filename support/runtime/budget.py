"""--minutes: the sizes and the number of steps that suit this machine and the time."""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from support.cli import UserError
from support.data import bpe, presets
from support.data.tokenizer import VOCAB_SIZES
from support.runtime import devices
from support.runtime.distributed import Distributed
from support.runtime.options import MAX_STEPS, RunOptions

MEASURED_SECONDS = 1.5  # for each of steps and validations
MEASURED_MICRO_STEPS = 4  # of a step; the rest takes as long
MAX_CALLS, SLOW = 100, 10
START_SECONDS = 3.0  # before `started`, and what the first step of a process takes more: PyTorch imports
END_SECONDS = 5.0  # for the last checkpoint, a sample, curves.png, and the end of the process
TRAINING_FRACTION = 0.7  # of the time, before it is known better: the rest is for validations, optimizer and imports
BETWEEN_STEPS = 1.03  # a step with the loader and the log, to one without
VALIDATIONS = 5  # see presets.flags_for_steps
VALIDATION_FRACTION = 0.05  # of the time, for each of them at most: on a busy machine, they read fewer tokens


class Loader(Protocol):
    """What is needed of a DataLoaderLite."""

    B: int
    T: int
    grad_accum: int
    rows_per_epoch: int
    vocab_size: int


def sizes_for_minutes(
    options: RunOptions, given: Mapping[str, Any], dist: Distributed, new_model: Callable[..., nn.Module]
) -> dict[str, Any]:
    """The sizes of model and step for --minutes on this machine, the same on all ranks, except those that are given.

    The model is the largest that suits the text and reads enough of it in time, see `presets.models_for_text`.

    Args:
        given: the flags on the command line.
        new_model: makes a model from fields of GPTConfig.

    Raises:
        UserError: not even a micro-batch of the smallest model is trained on in time.
    """
    flags = options.to_dict()
    if flags["init_from"]:  # which brings its sizes and its rates
        return {}
    tokenizer, text_bytes = "bpe" if options.demo else options.tokenizer, presets.text_bytes(flags)
    vocab_size = VOCAB_SIZES.get(tokenizer) or bpe.fitting_vocab_size(text_bytes)
    bytes_per_token = presets.BYTES_PER_TOKEN[tokenizer]
    sized = given.keys() & {*presets.MODEL_FLAGS, "model"}
    own_sizes = {name: flags[name] for name in sorted(presets.MODEL_FLAGS)}
    models = [own_sizes] if sized else presets.models_for_text(text_bytes)

    def choose() -> str:
        chosen, tokens = models[0], math.inf
        for model in models:
            needed = presets.BYTES_PER_WEIGHT * presets.block_weights(model) / bytes_per_token
            if tokens < needed:  # even the smaller model reads fewer
                break
            sizes = {name: model[name] for name in own_sizes}
            measured = _tokens_in_time(replace(options, **model), sizes, vocab_size, dist, new_model)
            micro_batch = options.batch_size * sizes["block_size"] * dist.world_size
            if model is models[0] and 0 < measured < micro_batch:
                raise UserError(
                    f"--minutes {options.minutes:g} is too short: on this machine, {micro_batch:,} tokens take this model "
                    f"{60 * TRAINING_FRACTION * (options.minutes or 0) * micro_batch / measured:.3g} s. Use more minutes or "
                    "a smaller model."
                )
            if model is not models[0] and measured < needed:
                break
            chosen, tokens = model, measured
        step = given.get("total_batch_size", presets.step_size(tokens))
        return json.dumps({**chosen, "total_batch_size": step, "max_lr": presets.fast_lr(step)})

    chosen = json.loads(dist.once("sizes", choose))
    return {name: value for name, value in chosen.items() if name not in given}


def _tokens_in_time(
    options: RunOptions,
    sizes: Mapping[str, int],
    vocab_size: int,
    dist: Distributed,
    new_model: Callable[..., nn.Module],
) -> float:
    """About the number of tokens that all ranks can train on in --minutes, from the speed of this one."""
    model = new_model(**sizes, vocab_size=vocab_size).to(dist.device)
    tokens = torch.randint(vocab_size, (options.batch_size, sizes["block_size"] + 1), device=dist.device)
    dtype = devices.DTYPES[options.dtype]
    devices.prepare(dist.device, options.tf32, dtype, sizes["block_size"])

    def micro_step() -> None:
        with devices.autocast(dist.device, dtype):
            loss = model(tokens[:, :-1], tokens[:, 1:])[1]
        loss.backward()
        model.zero_grad(set_to_none=True)

    assert options.minutes is not None
    try:
        seconds = _seconds(micro_step, dist.device, limit=0.5)
    except torch.OutOfMemoryError:  # a smaller model will do
        return 0.0
    return (
        TRAINING_FRACTION * 60 * options.minutes / seconds * options.batch_size * sizes["block_size"] * dist.world_size
    )


def flags_for_minutes(
    options: RunOptions,
    started: float,
    model: nn.Module,
    loader: Loader,
    val_loader: Loader | None,
    amp: torch.autocast,
    dist: Distributed,
    optimizer: torch.optim.Optimizer,
) -> dict[str, Any]:
    """The number of steps that end --minutes after the start, and what follows from it, the same on all ranks.

    Validations that would take too much of the time are shortened, unless their length was chosen.

    Steps and validations on random tokens are timed on the model itself, which stays as it is.

    Args:
        started: when the process did, by `time.perf_counter`.
        optimizer: for this only, so that its moments are freed; its learning rates must be 0.

    Raises:
        UserError: on all ranks, if there is no time for a single step.
    """
    flags = options.to_dict()
    tokens = torch.randint(loader.vocab_size, (loader.B, loader.T + 1), device=dist.device)

    def loss() -> torch.Tensor:
        with amp:
            return model(tokens[:, :-1], tokens[:, 1:])[1]

    micro_steps = min(loader.grad_accum, MEASURED_MICRO_STEPS)

    def step() -> None:
        for _ in range(micro_steps):
            loss().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    seconds = partial(_seconds, device=dist.device, agree=dist.all_reduce_min)
    step_seconds = BETWEEN_STEPS * seconds(step) * loader.grad_accum / micro_steps
    with torch.no_grad():
        forward = seconds(loss)
    val_rows = all_rows = min(flags["val_tokens"] // loader.T, val_loader.rows_per_epoch) if val_loader else 0
    row_seconds = forward / (loader.B * dist.world_size)
    if val_rows and flags["val_tokens"] in (
        presets.DEMO["val_tokens"],
        RunOptions.val_tokens,
    ):  # not chosen by the user
        val_rows = dist.all_reduce_min(
            min(val_rows, 1 + int(VALIDATION_FRACTION * 60 * flags["minutes"] / row_seconds))
        )
    validation = row_seconds * val_rows
    fixed = START_SECONDS + time.perf_counter() - started + END_SECONDS + VALIDATIONS * validation
    steps = dist.all_reduce_min(min(int((60 * flags["minutes"] - fixed) / step_seconds), MAX_STEPS))
    if steps < 1:
        enough = math.ceil((fixed + step_seconds) / 6) / 10
        raise UserError(
            f"--minutes {flags['minutes']:g} is too short: a step takes {step_seconds:.3g} s here, and everything else "
            f"{fixed:.3g} s. Use --minutes {enough:g} or more, a smaller model, or a machine that is less busy."
        )
    unmeasured, measured = (
        presets.flags_for_steps(n, flags["demo"], flags["init_from"] is not None) for n in (flags["max_steps"], steps)
    )
    shortened = {"val_tokens": val_rows * loader.T} if val_rows < all_rows else {}
    return shortened | {name: measured[name] for name, value in unmeasured.items() if flags[name] == value}  # not given


def _seconds(
    work: Callable[[], object], device: torch.device, limit: float = MEASURED_SECONDS, agree: Callable[[int], int] = int
) -> float:
    """The mean of the calls that fit into `limit` seconds, after a first one. `agree` makes their number one for all."""
    synchronize = devices.synchronizer(device)

    def timed() -> float:
        synchronize()
        began = time.perf_counter()
        work()
        synchronize()
        return time.perf_counter() - began

    seconds = timed()
    if not agree(seconds < SLOW * limit):  # what the first call takes more is a small part of it
        return seconds
    seconds = timed()
    calls = agree(min(int(limit / seconds), MAX_CALLS))
    return statistics.fmean(timed() for _ in range(calls)) if calls > 1 else seconds
