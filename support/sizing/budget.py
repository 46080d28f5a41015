"""--minutes: picks the model, step size and validation size that suit this machine and the time."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from support import startup
from support.cli import UserError
from support.config import TrainConfig
from support.data import shards
from support.data.tokenizer import Tokenizer
from support.runtime import batch_size, cuda_graphs, devices, memory
from support.runtime.distributed import Distributed
from support.runtime.machine import Machine
from support.sizing import presets

NewModel = Callable[[TrainConfig, int], nn.Module]  # takes a configuration and a vocabulary size

MEASURED_SECONDS = 0.5  # for each model
MEASURED_FLOPS = 1e12  # of a micro-step on a CPU, at most: three seconds on two cores. GPUs need their many rows
TRAINING_FRACTION = 0.7  # fraction of the time for micro-steps: the rest is the optimizer, validations, start and end
# Each of five validations has this fraction of the training tokens; together they take 8% of the time. A loss over few
# tokens depends too much on which they are, so where there are few, up to MOST_VALIDATED: 21% of the time.
VALIDATED_FRACTION, MOST_VALIDATED = 1 / 20, 1 / 8
ENOUGH_VALIDATED = 2**15  # tokens
# Four texts of 32 tokens, without a cache, take as long as training on 1,100 tokens. If the samples at four quarters would
# take more than an eighth of the time, there are none.
LEAST_SAMPLED = 4 * 1100 * 8  # training tokens
FEW_STEPS = 100


def flags_for_minutes(
    config: TrainConfig, cli_flags: Mapping[str, Any], recipe: Mapping[str, Any], dist: Distributed, new_model: NewModel,
    find_tokenizer: Callable[[], Tokenizer | None] = lambda: None,
) -> dict[str, Any]:  # fmt: skip
    """Returns the flags that --minutes sets on this machine unless the user does, the same on all ranks.

    With --text or --demo, the model is the largest one that suits the text (see `presets.models_for_text`) and has
    time to train on enough of it; tokens per step, learning rate and dropout follow, and how often the text is read at
    most. A pretrained model keeps its size, and a fork its step, too.

    Args:
        recipe: the numbers of --recipe fast.
        new_model: makes a model of a configuration's sizes, with a vocabulary of this size.
        find_tokenizer: returns the tokenizer, if it exists already.

    Raises:
        UserError: there is not even time for one step.
    """
    run = _TimedRun(config, cli_flags, recipe, dist, new_model, find_tokenizer)
    startup.show("measuring how fast this machine trains ...")
    chosen = dist.once(run.choose_flags)
    startup.show("")
    return chosen


class _TimedRun:
    """A run of --minutes before its start: what is known of it, and what suits its time."""

    def __init__(
        self, config: TrainConfig, cli_flags: Mapping[str, Any], recipe: Mapping[str, Any], dist: Distributed,
        new_model: NewModel, find_tokenizer: Callable[[], Tokenizer | None],
    ) -> None:  # fmt: skip
        self.config, self.cli_flags, self.recipe, self.dist, self.new_model = config, cli_flags, recipe, dist, new_model
        self.find_tokenizer = find_tokenizer
        self.minutes = config.minutes or 0.0
        self.machine = Machine.find(config, dist.device, dist.world_size)
        self.tokenizer = presets.tokenizer_name(config)

        is_pretrained = config.init_from is not None
        self.from_scratch = config.is_demo_or_text and not (is_pretrained or config.fork)
        self.fine_tunes = config.is_demo_or_text and is_pretrained and config.fork is None
        self.limits_passes = config.is_demo_or_text
        self.chooses_step = self.from_scratch and config.recipe == "fast"
        self.chooses_model = self.chooses_step and not cli_flags.keys() & {*presets.MODEL_FLAGS, "model"}
        # A GPU takes as long for 64 rows of a small model as for 16, so a step gets more.
        self.chooses_rows = self.chooses_step and dist.device.type == "cuda"

    @functools.cached_property
    def existing_tokenizer(self) -> Tokenizer | None:
        """The tokenizer, if it exists already."""
        return self.find_tokenizer()

    @functools.cached_property
    def text(self) -> presets.TextSize:
        return presets.measure_text(self.config.text, self.config.text_field, self.tokenizer, self.existing_tokenizer)

    @property
    def train_tokens(self) -> float:
        """The tokens of a pass over the data: of the text, or of the shards; infinite if there are none."""
        if self.config.is_demo_or_text:
            return self.text.train_tokens
        paths = shards.shard_paths(self.config.data, "train")
        return sum(path.stat().st_size for path in paths) / shards.TOKEN.itemsize or math.inf

    def choose_flags(self) -> dict[str, Any]:
        """Returns the flags that suit this machine and the time, whatever the command line says."""
        model, tokens = self.choose_model()
        block_size = model.get("block_size", self.config.block_size)
        step, dropout, most_passes = self.step_dropout_and_passes(tokens)
        self.check_time(tokens, step, most_passes)
        chosen: dict[str, Any] = dict(model)
        if self.limits_passes:
            chosen["max_passes"] = most_passes
        if self.from_scratch:
            chosen["dropout"] = dropout
        if self.chooses_step:
            passes = min(tokens / self.train_tokens, most_passes or math.inf)
            chosen |= {"total_batch_size": step} | presets.fast_rates(self.recipe, step, self.cli_flags, passes)
        elif self.fine_tunes:
            chosen["total_batch_size"] = step
        if self.chooses_rows:
            chosen["batch_size"] = None  # the largest that divides a step
        if 0 < tokens < LEAST_SAMPLED:
            chosen["sample_every"] = 0
        validated = max(VALIDATED_FRACTION * tokens, min(ENOUGH_VALIDATED, MOST_VALIDATED * tokens))
        chosen["val_tokens"] = min(self.config.val_tokens, max(block_size, int(validated)))  # at least one row
        return chosen

    def choose_model(self) -> tuple[dict[str, int], float]:
        """Returns the flags of the model, none if the user or a checkpoint chooses it, and the tokens it can train on."""
        if not self.chooses_model:
            return {}, self.tokens_in_time({})
        chosen, *larger = presets.models_for_text(self.text.bytes)
        # with thousands of logits, the smallest is hardly faster than the next one, and worse
        if self.tokenizer != "bytes" and larger:
            chosen, *larger = larger
        tokens = self.tokens_in_time(chosen)
        for model in larger:
            needed = (
                presets.BYTES_PER_WEIGHT
                * memory.block_weights(model["n_layer"], model["n_embd"])
                / self.text.bytes_per_token
            )
            # On a CPU a larger model is never faster. On a GPU it can be, with more tokens in a micro-batch: launching
            # kernels takes most of a small model's time.
            if tokens < needed and self.dist.device.type == "cpu" or (measured := self.tokens_in_time(model)) < needed:
                break
            chosen, tokens = model, measured
        return chosen, tokens

    def tokens_in_time(self, model: dict[str, int]) -> float:
        """Measures how many tokens a model can train on in time; `model` has its flags that differ from the run's."""
        config = TrainConfig(**self.config.to_dict() | model)
        vocab_size = presets.vocab_size_for(config, self.text, self.existing_tokenizer)
        B = model.get("batch_size", self.machine.batch_size)
        if self.chooses_rows:
            B = self.cli_flags.get("batch_size", batch_size.LARGEST_MICRO_BATCH)
        while True:
            per_second = _tokens_per_second(config, B, self.machine.dtype, vocab_size, self.dist, self.new_model)
            tokens = 60 * self.minutes * per_second
            devices.free_memory(self.dist.device)
            devices.trim_memory(self.dist.device)
            rows_of_step = self.step_dropout_and_passes(tokens)[0] // config.block_size
            if not self.chooses_rows or rows_of_step >= B:
                return tokens
            B = rows_of_step  # a GPU hardly takes less time for fewer rows, so measure again

    def step_dropout_and_passes(self, tokens: float) -> tuple[int, float, float]:
        """Returns the tokens per step, the dropout and the most passes that suit so many tokens."""
        dropout = self.config.dropout
        if self.from_scratch:
            passes = tokens / self.train_tokens
            dropout = self.cli_flags.get("dropout", presets.dropout_for(passes))
        most_passes = 0.0
        if self.limits_passes:
            most_passes = self.cli_flags.get("max_passes", presets.most_passes(dropout))
        step = self.config.total_batch_size
        if self.chooses_step:
            limit = most_passes * self.train_tokens or math.inf
            # a run that ends before its time need not be fast
            step = presets.timed_step_size(tokens) if tokens < limit else presets.step_size(limit)
        elif self.fine_tunes:  # as --text does for pretrained weights: 200 steps at least, of 1,024 tokens at least
            unit = 2 * self.config.block_size * self.dist.world_size
            while 0 < tokens < 200 * step and step >= 2048 and step % unit == 0:
                step //= 2
        return self.cli_flags.get("total_batch_size", step), dropout, most_passes

    def check_time(self, tokens: float, step: int, most_passes: float) -> None:
        """Refuses a time that is too short for a step, and says if it is short, or longer than the text is worth."""
        passes = tokens / self.train_tokens
        if 0 < tokens < step:
            raise UserError(
                f"--minutes {self.minutes:g} is too short: on this machine, the {step:,} tokens of a step take this model "
                f"{60 * TRAINING_FRACTION * self.minutes * step / tokens:.3g} s. Use more minutes, a smaller model, or a smaller "
                "--total-batch-size."
            )
        if 0 < tokens < FEW_STEPS * step:
            self.dist.print0(
                f"note    there is time for only about {int(tokens / step)} steps, but a model needs hundreds to learn\n"
                "        anything. Use more --minutes, a smaller model, or a smaller --total-batch-size"
            )
        if self.config.is_demo_or_text and 0 < most_passes < passes:
            why = "that is --max-passes" if "max_passes" in self.cli_flags else "more would\n        only memorize it"
            self.dist.print0(
                f"note    there is time to read the data {passes:,.0f} times. The run ends after {most_passes:g}: {why}"
            )
        worthwhile = presets.most_passes(self.config.dropout)
        if not self.config.is_demo_or_text and not self.config.max_passes and passes > 2 * worthwhile:
            self.dist.print0(
                f"note    there is time to read the data {passes:,.0f} times, but more than {worthwhile} passes only memorize it. Use\n"
                f"        --max-passes {worthwhile}, or fewer --minutes"
            )


def _tokens_per_second(
    config: TrainConfig, most: int, dtype_name: str, vocab_size: int, dist: Distributed, new_model: NewModel
) -> float:
    """Estimates the tokens that all ranks train on per second of --minutes, from this rank's speed without compiling.

    Args:
        most: rows of a micro-batch, at most.

    Returns 0 if not even one row fits into memory according to the formulas.
    """
    device, T, dtype = dist.device, config.block_size, devices.DTYPES[dtype_name]
    amp = devices.autocast(device, dtype)
    devices.configure_backends(device, tf32=True)
    with torch.device("meta"):
        sizes = memory.Sizes.of(new_model(config, vocab_size))
    layout = memory.Layout.of(config, dtype, world_size=1, compiled=False)
    needed = partial(memory.bytes_needed, sizes, layout, device)
    # most models are measured without an optimizer, whose state may have room only on several GPUs
    available = devices.free_and_total_memory(device)[0] + memory.optimizer_bytes(sizes, layout.optimizer)
    B = memory.largest_micro_batch(most, most, needed, available)
    if B == 0:
        return 0.0
    if device.type != "cuda":  # a row of a large model is as fast per token as several
        B = max(1, min(B, int(MEASURED_FLOPS / (6 * sizes.parameters * T))))
    model: Any = new_model(config, vocab_size).to(device)
    if config.recompute:
        memory.recompute_activations(model.transformer.h)
    tokens = torch.randint(vocab_size, (B, T + 1), device=device)
    optimizer = None

    def step() -> None:
        with amp:
            loss = model(tokens[:, :-1], tokens[:, 1:])[1]
        loss.backward()
        if optimizer:
            optimizer.step()
        model.zero_grad(set_to_none=True)

    work: Callable[[], object] = step
    if config.cuda_graphs and dist.world_size == 1 and cuda_graphs.are_faster(sizes, layout, B, device):
        # as a graph, a micro-step of a small model is so short that the optimizer counts
        optimizer = model.configure_optimizers(0.1, 1e-3, (0.9, 0.95), config.optimizer, dtype=dtype)
        for group in optimizer.param_groups:
            group["capturable"] = True
        work = cuda_graphs.record(step) or step
    return TRAINING_FRACTION * B * T * dist.world_size / _seconds_per_call(work, device)


def _seconds_per_call(work: Callable[[], object], device: torch.device) -> float:
    """Returns the mean seconds of a call, over at least MEASURED_SECONDS, after a warm-up call."""
    work()
    devices.synchronize(device)
    calls, started = 0, time.perf_counter()
    while True:
        work()
        devices.synchronize(device)
        calls, passed = calls + 1, time.perf_counter() - started
        if passed >= MEASURED_SECONDS:
            return passed / calls
