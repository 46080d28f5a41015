"""--minutes: the sizes and the number of steps that suit this machine and the time."""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

from support.cli import UserError
from support.data import bpe, presets
from support.data.tokenizer import VOCAB_SIZES
from support.runtime import devices
from support.runtime.distributed import Distributed
from support.runtime.options import MAX_STEPS, RunOptions
from support.runtime.run_info import STARTED

Config = TypeVar("Config", bound=RunOptions)
MEASURED_SECONDS = 1.5  # for each of steps and validations
MEASURED_MICRO_STEPS = 4  # of a step; the rest takes as long
MAX_CALLS, SLOW = 100, 10
STARTUP_ESTIMATE = 3.0  # before STARTED, and what the first step of a process takes more: PyTorch imports
SHUTDOWN_ESTIMATE = 5.0  # for the last checkpoint, a sample, curves.png, and the end of the process
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
    config: RunOptions, cli_flags: Mapping[str, Any], dist: Distributed, new_model: Callable[..., nn.Module]
) -> dict[str, Any]:
    """The sizes of model and step for --minutes on this machine, the same on all ranks, except those on the command line.

    The model is the largest that suits the text and reads enough of it in time, see `presets.models_for_text`.

    Args:
        new_model: makes a model from fields of GPTConfig.

    Raises:
        UserError: not even a micro-batch of the smallest model is trained on in time.
    """
    if config.init_from:  # which brings its sizes and its rates
        return {}
    tokenizer = "bpe" if config.demo else config.tokenizer
    text_bytes = presets.text_bytes(config.text, config.text_field)
    vocab_size = VOCAB_SIZES.get(tokenizer) or bpe.fitting_vocab_size(text_bytes)
    bytes_per_token = presets.BYTES_PER_TOKEN[tokenizer]
    sized = cli_flags.keys() & {*presets.MODEL_FLAGS, "model"}
    own_sizes = {name: getattr(config, name) for name in sorted(presets.MODEL_FLAGS)}
    models = [own_sizes] if sized else presets.models_for_text(text_bytes)

    def choose() -> str:
        chosen, tokens = models[0], math.inf
        for model in models:
            needed = presets.BYTES_PER_WEIGHT * presets.block_weights(model) / bytes_per_token
            if tokens < needed:  # even the smaller model reads fewer
                break
            sizes = {name: model[name] for name in own_sizes}
            measured = _tokens_in_time(replace(config, **model), sizes, vocab_size, dist, new_model)
            micro_batch = config.batch_size * sizes["block_size"] * dist.world_size
            if model is models[0] and 0 < measured < micro_batch:
                raise UserError(
                    f"--minutes {config.minutes:g} is too short: on this machine, {micro_batch:,} tokens take this model "
                    f"{60 * TRAINING_FRACTION * (config.minutes or 0) * micro_batch / measured:.3g} s. Use more minutes or "
                    "a smaller model."
                )
            if model is not models[0] and measured < needed:
                break
            chosen, tokens = model, measured
        step = cli_flags.get("total_batch_size", presets.step_size(tokens))
        return json.dumps({**chosen, "total_batch_size": step, "max_lr": presets.fast_lr(step)})

    chosen = json.loads(dist.once("sizes", choose))
    return {name: value for name, value in chosen.items() if name not in cli_flags}


def _tokens_in_time(
    config: RunOptions,
    sizes: Mapping[str, int],
    vocab_size: int,
    dist: Distributed,
    new_model: Callable[..., nn.Module],
) -> float:
    """About the number of tokens that all ranks can train on in --minutes, from the speed of this one."""
    model = new_model(**sizes, vocab_size=vocab_size).to(dist.device)
    tokens = torch.randint(vocab_size, (config.batch_size, sizes["block_size"] + 1), device=dist.device)
    dtype = devices.DTYPES[config.dtype]
    devices.configure_backends(dist.device, config.tf32, dtype, sizes["block_size"])

    def micro_step() -> None:
        with devices.autocast(dist.device, dtype):
            loss = model(tokens[:, :-1], tokens[:, 1:])[1]
        loss.backward()
        model.zero_grad(set_to_none=True)

    assert config.minutes is not None
    try:
        seconds = _seconds(micro_step, dist.device, limit=0.5)
    except torch.OutOfMemoryError:  # a smaller model will do
        return 0.0
    return TRAINING_FRACTION * 60 * config.minutes / seconds * config.batch_size * sizes["block_size"] * dist.world_size


def set_steps_for_minutes(
    config: Config, model: nn.Module, optimizer: torch.optim.Optimizer, loader: Loader, val_loader: Loader | None,
    dist: Distributed,
) -> Config:  # fmt: skip
    """The configuration with the number of steps that end --minutes after the start, the same on all ranks.

    What follows from that number changes with it, unless it was chosen. Validations that would take too much of the time
    are shortened, too. Steps and validations on random tokens are timed on the model itself, with learning rate 0; then
    the optimizer's state is cleared.

    Raises:
        UserError: on all ranks, if there is no time for a single step.
    """
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    assert config.minutes is not None
    tokens = torch.randint(loader.vocab_size, (loader.B, loader.T + 1), device=dist.device)
    amp = devices.autocast(dist.device, devices.DTYPES[config.dtype])

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
    optimizer.state.clear()
    with torch.no_grad():
        forward = seconds(loss)
    val_rows = all_rows = 0
    if val_loader and config.val_every:
        val_rows = all_rows = min(config.val_tokens // loader.T, val_loader.rows_per_epoch)
    row_seconds = forward / (loader.B * dist.world_size)
    if val_rows and config.val_tokens in (presets.DEMO["val_tokens"], RunOptions.val_tokens):  # not chosen by the user
        val_rows = dist.all_reduce_min(min(val_rows, 1 + int(VALIDATION_FRACTION * 60 * config.minutes / row_seconds)))
    validation = row_seconds * val_rows
    fixed = STARTUP_ESTIMATE + time.perf_counter() - STARTED + SHUTDOWN_ESTIMATE + VALIDATIONS * validation
    steps = dist.all_reduce_min(min(int((60 * config.minutes - fixed) / step_seconds), MAX_STEPS))
    if steps < 1:
        enough = math.ceil((fixed + step_seconds) / 6) / 10
        raise UserError(
            f"--minutes {config.minutes:g} is too short: a step takes {step_seconds:.3g} s here, and everything else "
            f"{fixed:.3g} s. Use --minutes {enough:g} or more, a smaller model, or a machine that is less busy."
        )
    unmeasured, measured = (
        presets.flags_for_steps(n, config.demo, config.init_from is not None) for n in (config.max_steps, steps)
    )
    chosen = {name: measured[name] for name, value in unmeasured.items() if getattr(config, name) == value}
    return replace(config, **chosen, val_tokens=val_rows * loader.T if val_rows < all_rows else config.val_tokens)


def _seconds(
    work: Callable[[], object], device: torch.device, limit: float = MEASURED_SECONDS, agree: Callable[[int], int] = int
) -> float:
    """The mean of the calls that fit into `limit` seconds, after a first one. `agree` makes their number one for all."""

    def timed() -> float:
        devices.synchronize(device)
        began = time.perf_counter()
        work()
        devices.synchronize(device)
        return time.perf_counter() - began

    seconds = timed()
    if not agree(seconds < SLOW * limit):  # what the first call takes more is a small part of it
        return seconds
    seconds = timed()
    calls = agree(min(int(limit / seconds), MAX_CALLS))
    return statistics.fmean(timed() for _ in range(calls)) if calls > 1 else seconds
