"""--minutes: the model, the step and the validation that suit this machine and the time."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from support import startup
from support.cli import UserError
from support.data import bpe, presets
from support.data.tokenizer import VOCAB_SIZES
from support.runtime import devices
from support.runtime.distributed import Distributed
from support.runtime.machine import Machine

if TYPE_CHECKING:
    from train_gpt2 import TrainConfig

MEASURED_SECONDS = 0.5  # for each model
TRAINING_FRACTION = 0.7  # of the time: the rest is for the optimizer, validations, and the start and end of the process
# Tokens of a validation, of those to train on: without a backward pass, five of them take 8% of the time.
VALIDATED_FRACTION = 1 / 20
LEAST_VALIDATED = 2**15  # tokens; the loss of fewer depends on which they are
FEW_STEPS = 100


def flags_for_minutes(
    config: TrainConfig, cli_flags: Mapping[str, Any], dist: Distributed, new_model: Callable[..., nn.Module]
) -> dict[str, Any]:
    """The flags for --minutes on this machine, the same on all ranks, except those on the command line.

    With --text and --demo, the model is the largest that suits the text and reads enough of it in time, see
    `presets.models_for_text`; tokens per step and learning rate follow. A pretrained model and a fork keep their sizes.

    Args:
        new_model: makes a model from fields of GPTConfig.

    Raises:
        UserError: not even a step of the smallest model is done in time.
    """
    tokenizer = "bpe" if config.demo else config.tokenizer
    has_text = config.demo or config.text is not None
    text_bytes = presets.text_bytes(config.text, config.text_field)
    machine = Machine.find(config, dist.device, dist.world_size)
    own_sizes = {name: getattr(config, name) for name in presets.MODEL_FLAGS} | {"batch_size": machine.batch_size}
    own_sizes["vocab_size"] = VOCAB_SIZES.get(tokenizer) or bpe.fitting_vocab_size(text_bytes)
    choose_sizes = has_text and config.recipe == "fast" and not (config.init_from or config.fork)

    def tokens_in_time(model: Mapping[str, int]) -> float:
        return 60 * (config.minutes or 0) * _tokens_per_second(machine, {**own_sizes, **model}, dist, new_model)

    def choose_model() -> tuple[dict[str, int], float]:
        """The model's sizes, and the tokens on which it trains in time."""
        if not choose_sizes or cli_flags.keys() & {*presets.MODEL_FLAGS, "model"}:
            return {}, tokens_in_time({})
        models = presets.models_for_text(text_bytes)
        if tokenizer != "bytes":  # with thousands of logits, the smallest is hardly faster than the next one, and worse
            models = models[1:] or models
        chosen, tokens = models[0], tokens_in_time(models[0])
        for model in models[1:]:
            weights = presets.block_weights({**own_sizes, **model})
            needed = presets.BYTES_PER_WEIGHT * weights / presets.BYTES_PER_TOKEN[tokenizer]
            if tokens < needed or (measured := tokens_in_time(model)) < needed:  # even the smaller model reads fewer
                break
            chosen, tokens = model, measured
        return chosen, tokens

    def choose_flags() -> dict[str, Any]:
        flags, tokens = choose_model()
        step = cli_flags.get("total_batch_size", presets.step_size(tokens) if choose_sizes else config.total_batch_size)
        if 0 < tokens < step:
            raise UserError(
                f"--minutes {config.minutes:g} is too short: on this machine, the {step:,} tokens of a step take this model "
                f"{60 * TRAINING_FRACTION * (config.minutes or 0) * step / tokens:.3g} s. Use more minutes, a smaller model, "
                "or a smaller --total-batch-size."
            )
        if tokens < FEW_STEPS * step:
            dist.print0(
                f"note    there is time for about {int(tokens / step)} steps only, and a model that learns something\n"
                "        needs hundreds. What helps: more --minutes, a smaller model or --total-batch-size"
            )
        chosen: dict[str, Any] = dict(flags)
        if choose_sizes:
            chosen |= {"total_batch_size": step} | presets.fast_rates(step, cli_flags)
        chosen["val_tokens"] = min(config.val_tokens, max(LEAST_VALIDATED, int(VALIDATED_FRACTION * tokens)))
        return chosen

    startup.show("measuring how fast this machine trains ...")
    flags = dist.once(choose_flags)
    startup.show("")
    return {name: value for name, value in flags.items() if name not in cli_flags}


def _tokens_per_second(
    machine: Machine, sizes: Mapping[str, int], dist: Distributed, new_model: Callable[..., nn.Module]
) -> float:
    """About the tokens that all ranks train on per second of --minutes, from the speed of this one; 0 if out of memory."""
    model_sizes = {name: size for name, size in sizes.items() if name != "batch_size"}
    devices.configure_backends(dist.device, True, devices.DTYPES[machine.dtype], sizes["block_size"])
    B = sizes["batch_size"]
    while B:
        try:
            seconds = _micro_step_seconds(machine, model_sizes, B, new_model)
        except RuntimeError as error:
            if not devices.is_out_of_memory(error):
                raise
            seconds = None
        devices.free_memory(dist.device)  # here, as the traceback holds the tensors of the failed attempt
        if seconds is not None:
            return TRAINING_FRACTION * B * sizes["block_size"] * dist.world_size / seconds
        B //= 2
    return 0.0  # a smaller model will do


def _micro_step_seconds(
    machine: Machine, model_sizes: Mapping[str, int], B: int, new_model: Callable[..., nn.Module]
) -> float:
    """Seconds of a forward and backward pass of B rows, not compiled."""
    device = machine.device
    model = new_model(**model_sizes).to(device)
    tokens = torch.randint(model_sizes["vocab_size"], (B, model_sizes["block_size"] + 1), device=device)

    def micro_step() -> None:
        with devices.autocast(device, devices.DTYPES[machine.dtype]):
            loss = model(tokens[:, :-1], tokens[:, 1:])[1]
        loss.backward()
        model.zero_grad(set_to_none=True)

    return _seconds(micro_step, device)


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    """The mean of the calls in about MEASURED_SECONDS, at least one, after a first one."""
    from torch.utils.benchmark import Timer

    def clock() -> float:
        devices.synchronize(device)
        return time.perf_counter()

    timer = Timer("work()", globals={"work": work}, timer=clock, num_threads=torch.get_num_threads())
    return timer.blocked_autorange(min_run_time=MEASURED_SECONDS).mean
