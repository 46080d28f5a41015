"""--plan: the time, cost and memory that a run will take, computed before anything is paid for.

Each formula has its source; memory.py has the formulas for memory.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from support.cli import UserError, format_bytes
from support.data import bpe, presets, shards
from support.data.tokenizer import VOCAB_SIZES
from support.runtime import batch_size, devices, memory
from support.runtime.memory import Sizes, TrainingMemory, block_parameters, training_memory

if TYPE_CHECKING:
    from train_gpt2 import GPT, TrainConfig

# Model FLOPs utilization that PyTorch has reached with this architecture, by millions of parameters: tokens per second
# per GPU times FLOPs per token, divided by the peak. docs/normal.md has the sources: 182k tokens/s on an A100
# (build-nanogpt's video); 381k and 40k per GPU on 8 H100s (gollem).
MEASURED_MFU = {
    "A100": {124: 0.50},
    "H100": {124: 0.33, 1558: 0.42},
}
ASSUMED_MFU = 0.4  # where nothing was measured
HELLASWAG_ITEMS, TOKENS_PER_ITEM = 10_042, 331  # four endings with their contexts and padding, counted on 2,009 items
SMALL = 60e6  # parameters: half of the smallest model in the table


def largest_micro_batch(config: TrainConfig, sizes: Sizes) -> int:
    """Returns the largest micro-batch that divides a GPU's rows per step and fits into its memory; 0 if no row fits."""
    most, available = config.batch_size or batch_size.LARGEST_MICRO_BATCH, memory_of_gpu(config)
    return memory.largest_micro_batch(
        rows_per_gpu(config), most, lambda B: memory_per_gpu(config, sizes, B).total, available
    )


def memory_per_gpu(config: TrainConfig, sizes: Sizes, B: int) -> TrainingMemory:
    """Returns the bytes on each GPU with micro-batches of B rows, in bf16."""
    return training_memory(
        config, sizes, B, config.gpus, memory_of_gpu(config), torch.bfloat16, config.compile is not False
    )


def rows_per_gpu(config: TrainConfig) -> int:
    return config.total_batch_size // config.block_size // config.gpus


def memory_of_gpu(config: TrainConfig) -> int:
    return int(devices.GPUS[devices.GPU_FLAGS[config.gpu]].gib * 2**30)


# -----------------------------------------------------------------------------
# Time


def mfu(config: TrainConfig, parameters: int, flops_per_token: int) -> tuple[float, str]:
    """Returns the model FLOPs utilization to expect, and its source: --mfu, or what was measured at the nearest size."""
    if config.mfu:
        return config.mfu, "--mfu"
    utilization, source = ASSUMED_MFU, "assumed: no measurement is published for this GPU"
    chip = config.gpu.split("-")[0].replace("H200", "H100")  # the H200 has the H100's chip
    if measured := MEASURED_MFU.get(chip):
        nearest = min(measured, key=lambda millions: abs(math.log(parameters / 1e6 / millions)))
        utilization, source = measured[nearest], f"measured in PyTorch with {nearest}M parameters on {chip}"
    if config.recompute:  # the forward pass of the blocks is repeated, which MFU does not count as useful
        repeated = 2 * block_parameters(config) + 4 * config.n_layer * config.n_embd * config.block_size
        utilization *= flops_per_token / (flops_per_token + repeated)
        source += ", less recomputation"
    return utilization, source


def evaluations(config: TrainConfig, vocab_size: int) -> tuple[int, int, int]:
    """Returns how many validations and HellaSwag scores a run has, and how many tokens they read in total."""

    def times(every: int | None) -> int:
        if every is None:  # at each quarter of --minutes
            return 5
        return -(-config.max_steps // every) + 1 if every else 0  # plus the one after the last step

    often = None if config.minutes else 250
    hellaswag_every = often if config.hellaswag_every is None else config.hellaswag_every
    validations, scores = times(config.val_every), times(hellaswag_every)
    scores = scores if vocab_size == VOCAB_SIZES["gpt2"] else 0  # HellaSwag is scored only with GPT-2's tokens
    items = min(config.hellaswag_limit or HELLASWAG_ITEMS, HELLASWAG_ITEMS)
    return validations, scores, validations * config.val_tokens + scores * items * TOKENS_PER_ITEM


# -----------------------------------------------------------------------------
# The report


def print_report(config: TrainConfig, new_model: Callable[[int], GPT], rank: int = 0) -> None:
    """Prints the report of --plan on rank 0, for a run on `config.gpus` GPUs of the kind `config.gpu`.

    Args:
        new_model: makes the model from its vocabulary size; on the meta device, that takes about 2 ms per layer.

    Raises:
        UserError: the formulas do not cover such a run, or its batch does not divide evenly among the GPUs.
    """
    if config.lora_rank:
        raise UserError("--plan can only plan the training of all weights. Leave out --lora-rank.")
    if config.dtype not in ("auto", "bf16"):
        raise UserError(f"--plan can only plan runs in bf16. Leave out --dtype {config.dtype}.")
    batch_size.rows_per_rank(config.total_batch_size, config.block_size, config.gpus)
    if rank > 0:
        return
    vocab_size = vocab_size_of(config)
    with torch.device("meta"):
        model = new_model(vocab_size)
    for line in report(config, vocab_size, Sizes.of(model), model.flops_per_token()):
        print(textwrap.fill(line, 80, subsequent_indent=" " * 9), flush=True)


def vocab_size_of(config: TrainConfig) -> int:
    """Returns the vocabulary size of the run's shards or, if there are none yet, of its tokenizer."""
    if shards.shard_paths(config.data, "train"):
        return shards.read_manifest(config.data)["vocab_size"]
    tokenizer = "bpe" if config.demo else config.tokenizer or "gpt2"
    return VOCAB_SIZES.get(tokenizer) or bpe.fitting_vocab_size(presets.text_bytes(config.text, config.text_field))


def report(config: TrainConfig, vocab_size: int, sizes: Sizes, flops_per_token: int) -> Iterator[str]:
    """Yields the lines of the report."""
    config = replace(config, parallel=config.parallel if config.gpus > 1 else "ddp")
    gpus, gpu, steps, T = config.gpus, devices.GPU_FLAGS[config.gpu], config.max_steps, config.block_size
    peak, tokens = devices.GPUS[gpu].peak_flops, steps * config.total_batch_size
    yield (
        f"model    {sizes.parameters:,} parameters: {config.n_layer} layers, {config.n_head} heads, "
        f"{config.n_embd} channels, context {T}"
    )
    yield (
        f"run      {steps:,} steps of {config.total_batch_size:,} tokens, {tokens:,} in total; "
        f"{tokens * flops_per_token:.2e} FLOPs, {flops_per_token:.2e} per token"
    )
    yield (
        f"GPUs     {gpus:,} x {gpu}, {peak / 1e12:.0f} TFLOP/s in bf16 each; each GPU gets "
        f"{rows_per_gpu(config):,} x {T:,} tokens of a step"
    )
    if config.minutes:
        yield f"note     --minutes measures a machine at the start of a run; this plan is for {steps:,} steps"
    layouts = [
        replace(config, parallel=parallel, recompute=recompute)
        for parallel in (("ddp", "fsdp") if gpus > 1 else ("ddp",))
        for recompute in (False, True)
    ]
    yield ""
    yield f"memory   GB on each GPU, which has {memory_of_gpu(config) / 1e9:.1f}"
    yield from memory_table(layouts, sizes)
    yield ""
    if not largest_micro_batch(config, sizes):
        fitting = next((layout for layout in layouts if largest_micro_batch(layout, sizes)), None)
        if fitting is None:
            yield "note     not even one row fits. Use more or larger GPUs, or a smaller model."
            return
        yield f"note     {name_of(config)}: not even one row fits. The rest of the plan is for {name_of(fitting)}."
        config = fitting
    utilization, source = mfu(config, sizes.parameters, flops_per_token)
    seconds = tokens * flops_per_token / (gpus * peak * utilization)
    yield (
        f"time     {name_of(config)}: {seconds / 3600:,.2f} hours at {utilization:.1%} MFU ({source}): "
        f"{tokens / seconds:,.0f} tokens/s, {tokens / seconds / gpus:,.0f} per GPU, {seconds / steps:.3g} s per step"
    )
    yield "         excluding checkpoints and network overhead" + (
        "; a model this small will not reach that MFU" if sizes.parameters < SMALL and not config.mfu else ""
    )
    validations, scores, evaluated = evaluations(config, vocab_size)
    # a forward pass is a third of a training step
    evaluation_seconds = evaluated * flops_per_token / 3 / (gpus * peak * utilization)
    yield (
        f"         another {evaluation_seconds / 3600:,.2f} hours for {validations:,} validations and {scores:,} HellaSwag scores, "
        "at the same MFU"
    )
    gpu_hours = gpus * (seconds + evaluation_seconds) / 3600
    cost = "" if config.price is None else f", {gpu_hours * config.price:,.2f} at {config.price:g} per GPU-hour"
    yield f"cost     {gpu_hours:,.1f} GPU-hours{cost}"
    checkpoint_bytes = memory.checkpoint_bytes(config, sizes.parameters, sizes.trained)
    yield f"disk     {format_bytes(2 * tokens)} of tokens are read, {format_bytes(checkpoint_bytes)} per checkpoint"


def name_of(config: TrainConfig) -> str:
    """Returns a short label for a layout, such as `fsdp+recompute`."""
    return ("1 GPU" if config.gpus == 1 else config.parallel) + ("+recompute" if config.recompute else "")


def memory_table(layouts: Sequence[TrainConfig], sizes: Sizes) -> Iterator[str]:
    """Yields a table of each layout's memory with the largest micro-batch that fits or, if none does, with one row."""
    columns = []
    for layout in layouts:
        B = largest_micro_batch(layout, sizes)
        parts = memory_per_gpu(layout, sizes, B or 1)
        gigabytes = (f"{part / 1e9:,.2f}" for part in (*parts, parts.total))
        columns.append([name_of(layout), *gigabytes, str(B or "none")])
    titles = ["", *parts._fields, "total", "batch size"]
    for title, *cells in zip(titles, *columns, strict=True):
        yield f"{title:<12}" + "".join(f"{cell:>17}" for cell in cells)
