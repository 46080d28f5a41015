"""--minutes: picks the model, step size and validation size that suit this machine and the time."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from support import startup
from support.cli import UserError
from support.config import Options
from support.data.tokenizer import VOCAB_SIZES
from support.runtime import batch_size, cuda_graphs, devices, memory
from support.runtime.distributed import Distributed
from support.runtime.machine import Machine
from support.sizing import presets

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
    config: Options,
    flags: dict[str, Any],
    cli_flags: Mapping[str, Any],
    dist: Distributed,
    new_model: Callable[[Mapping[str, Any], int], nn.Module],
) -> dict[str, Any]:
    """Returns the flags that --minutes sets on this machine, the same on all ranks, without those on the command line.

    With --text or --demo, the model is the largest one that suits the text (see `presets.models_for_text`) and has
    time to train on enough of it; tokens per step, learning rate and dropout follow, and how often the text is read at
    most. A pretrained model keeps its size, and a fork its step, too.

    Args:
        flags: all flags of the run, those of `config` and of the recipe.
        new_model: makes a model of the sizes in such flags, with a vocabulary of this size.

    Raises:
        UserError: there is not even time for one step.
    """
    minutes, tokenizer = config.minutes or 0.0, "bpe" if config.demo else config.tokenizer or "gpt2"
    text_bytes = presets.text_bytes(config.text, config.text_field)
    machine = Machine.find(config, flags, dist.device, dist.world_size)
    is_new = not (flags["init_from"] or config.fork)
    tuned = config.has_preset and flags["init_from"] is not None and config.fork is None
    from_scratch, limits_passes = config.has_preset and is_new, config.has_preset and not flags["init_from"]
    choose_step = from_scratch and flags["recipe"] == "fast"
    choose_model = choose_step and not cli_flags.keys() & {*presets.MODEL_FLAGS, "model"}

    # A GPU takes as long for 64 rows of a small model as for 16, so a step gets more.
    on_gpu = choose_step and dist.device.type == "cuda"
    most_rows = cli_flags.get("batch_size", batch_size.LARGEST_MICRO_BATCH) if on_gpu else None
    train_tokens, bytes_per_token = (f(text_bytes, tokenizer) for f in (presets.train_tokens, presets.bytes_per_token))

    def tokens_in_time(model: dict[str, int]) -> float:
        of_model = flags | {"batch_size": machine.batch_size} | model
        vocab_size = VOCAB_SIZES.get(tokenizer) or presets.bpe_vocab_size(config.text, config.text_field, of_model)
        rows = most_rows
        while True:
            of_model |= {"batch_size": rows} if rows else {}
            tokens = 60 * minutes * _tokens_per_second(of_model, machine.dtype, vocab_size, dist, new_model)
            devices.free_memory(dist.device)
            devices.trim_memory(dist.device)
            rows_of_step = step_and_dropout(tokens, of_model)[0] // of_model["block_size"]
            if rows is None or rows_of_step >= rows:
                return tokens
            rows = rows_of_step  # a GPU hardly takes less time for fewer rows, so its speed has to be measured again

    def step_and_dropout(tokens: float, sizes: Mapping[str, Any]) -> tuple[int, float, float]:
        """Returns the tokens per step, the dropout and the most passes that suit so many tokens and a model."""
        dropout = flags["dropout"]
        if from_scratch:
            dropout = cli_flags.get("dropout", presets.dropout_for(tokens / train_tokens, sizes, text_bytes))
        limit = cli_flags.get("max_passes", presets.most_passes(dropout) if limits_passes else 0.0)
        step = presets.timed_step_size(min(tokens, limit * train_tokens) if limit else tokens)
        return cli_flags.get("total_batch_size", step if choose_step else flags["total_batch_size"]), dropout, limit

    def choose_flags() -> dict[str, Any]:
        models = presets.models_for_text(text_bytes, dropout=cli_flags.get("dropout") != 0)
        first, *larger = models if choose_model else [{}]
        # with thousands of logits, the smallest is hardly faster than the next one, and worse
        if tokenizer != "bytes" and larger:
            first, *larger = larger
        chosen, tokens = first, tokens_in_time(first)
        for model in larger:
            needed = presets.bytes_to_read(model, text_bytes) / bytes_per_token
            # On a CPU a larger model is never faster. On a GPU it can be, with more tokens in a micro-batch: launching
            # kernels takes most of a small model's time.
            if tokens < needed and dist.device.type == "cpu" or (measured := tokens_in_time(model)) < needed:
                break
            chosen, tokens = model, measured
        passes = tokens / train_tokens
        step, dropout, limit = step_and_dropout(tokens, flags | chosen)
        # as --text does for pretrained weights: 200 steps at least, of 1,024 tokens at least
        unit = 2 * flags["block_size"] * dist.world_size
        while tuned and 0 < tokens < 200 * step and step >= 2048 and step % unit == 0:
            step //= 2
        step = cli_flags.get("total_batch_size", step)
        if 0 < tokens < step:
            raise UserError(
                f"--minutes {minutes:g} is too short: on this machine, the {step:,} tokens of a step take this model "
                f"{60 * TRAINING_FRACTION * minutes * step / tokens:.3g} s. Use more minutes, a smaller model, or a smaller "
                "--total-batch-size."
            )
        if 0 < tokens < FEW_STEPS * step:
            dist.print0(
                f"note    there is time for only about {int(tokens / step)} steps, but a model needs hundreds to learn\n"
                "        anything. Use more --minutes, a smaller model, or a smaller --total-batch-size"
            )
        if config.has_preset and 0 < limit < passes:
            dist.print0(
                f"note    there is time to read the data {passes:,.0f} times. The run ends after {limit:g}: more would only\n"
                "        memorize it"
            )
        chosen_flags: dict[str, Any] = dict(chosen)
        if limits_passes:
            chosen_flags["max_passes"] = limit
        if from_scratch:
            chosen_flags["dropout"] = dropout
        if choose_step:
            chosen_flags |= {"total_batch_size": step} | presets.fast_rates(step, cli_flags)
        elif tuned:
            chosen_flags["total_batch_size"] = step
        if on_gpu:
            chosen_flags["batch_size"] = None  # the largest that divides a step
        if 0 < tokens < LEAST_SAMPLED:
            chosen_flags["sample_every"] = 0
        validated = max(VALIDATED_FRACTION * tokens, min(ENOUGH_VALIDATED, MOST_VALIDATED * tokens))
        block_size = chosen.get("block_size", flags["block_size"])  # at least one row
        return chosen_flags | {"val_tokens": min(config.val_tokens, max(block_size, int(validated)))}

    startup.show("measuring how fast this machine trains ...")
    chosen_flags = dist.once(choose_flags)
    startup.show("")
    return {name: value for name, value in chosen_flags.items() if name not in cli_flags}


def _tokens_per_second(
    flags: Mapping[str, Any],
    dtype_name: str,
    vocab_size: int,
    dist: Distributed,
    new_model: Callable[[Mapping[str, Any], int], nn.Module],
) -> float:
    """Estimates the tokens that all ranks train on per second of --minutes, from this rank's speed without compiling.

    Returns 0 if not even one row fits into memory according to the formulas.
    """
    device, T, dtype = dist.device, flags["block_size"], devices.DTYPES[dtype_name]
    amp = devices.autocast(device, dtype)
    devices.configure_backends(device, tf32=True)
    with torch.device("meta"):
        sizes = memory.Sizes.of(new_model(flags, vocab_size))
    most, recompute = flags["batch_size"] or 1, flags["recompute"]
    # one process, even with FSDP
    layout = memory.Layout(flags["total_batch_size"], dtype, recompute=recompute, optimizer=flags["optimizer"])
    needed = partial(memory.bytes_needed, sizes, layout, device)
    B = memory.largest_micro_batch(most, most, needed, devices.free_and_total_memory(device)[0])
    if B == 0:
        return 0.0
    if device.type != "cuda":  # a row of a large model is as fast per token as several
        B = max(1, min(B, int(MEASURED_FLOPS / (6 * sizes.parameters * T))))
    model: Any = new_model(flags, vocab_size).to(device)
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
    if flags["cuda_graphs"] and dist.world_size == 1 and cuda_graphs.suit(sizes, layout, B, device):
        # as a graph, a micro-step of a small model is so short that the optimizer counts
        optimizer = model.configure_optimizers(0.1, 1e-3, (0.9, 0.95), flags["optimizer"], dtype=dtype)
        for group in optimizer.param_groups:
            group["capturable"] = True
        work = cuda_graphs.Graph(step)
    return TRAINING_FRACTION * B * T * dist.world_size / _seconds(work, device)


def _seconds(work: Callable[[], object], device: torch.device) -> float:
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
