"""--plan: the time, cost and memory that a run will take, computed before anything is paid for.

Each formula has its source; memory.py has the formulas for memory.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch

from support.cli import UserError, format_bytes
from support.data import bpe, presets, shards
from support.data.tokenizer import VOCAB_SIZES
from support.runtime import batch_size, devices, memory
from support.runtime.memory import Sizes, TrainingMemory, block_parameters, training_memory

if TYPE_CHECKING:
    from train_gpt2 import GPT, TrainConfig


class Measured(NamedTuple):
    """A model FLOPs utilization that PyTorch has reached with this architecture; docs/normal.md has the sources."""

    mfu: float  # tokens per second per GPU times FLOPs per token, divided by the peak
    millions: int  # parameters of the model
    gpus: int
    where: str


ON_8_H100 = [Measured(0.33, 124, 8, "8 H100 by gollem"), Measured(0.42, 1558, 8, "8 H100 by gollem")]
MEASURED_MFU = {
    "A100": [
        Measured(0.50, 124, 1, "an A100 by build-nanogpt"),
        Measured(0.57, 124, 1, "an A100 by GPT-3-Small-Pretraining-Experiments"),
        Measured(0.30, 124, 8, "8 A100 by nanoGPT"),
        Measured(0.55, 124, 8, "8 A100 by GPT-3-Small-Pretraining-Experiments"),
    ],
    "H100": [
        Measured(0.403, 124, 1, "an H100 by GPT-3-Small-Pretraining-Experiments"),
        Measured(0.417, 124, 1, "an H100 by this trainer"),
        *ON_8_H100,
    ],
    "H200": [  # which has the H100's chip
        Measured(0.43, 124, 1, "an H200 by GPT-3-Small-Pretraining-Experiments"),
        Measured(0.447, 124, 1, "an H200 by this trainer"),
        *ON_8_H100,
    ],
    "RTX4090": [Measured(0.55, 124, 1, "an RTX 4090 by nanoGPT")],
}
SPREAD = 0.8  # a single measurement may be this much too high: 124M on H100s has 33% and 42%
DOWNLOAD_BYTES, ENCODE_MINUTES = 28.5e9, 8  # the text of 10 billion tokens, with two cores: docs/eight-gpus.md
GIGABIT = 1e9 / 8  # bytes per second
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


def mfu(config: TrainConfig, parameters: int, flops_per_token: int) -> tuple[float, float, str]:
    """Returns the lowest and highest model FLOPs utilization to expect, and whose they are.

    They are --mfu, or what was measured on such a GPU at the nearest size, or, of other GPUs, the extremes of all.
    """
    if config.mfu:
        return config.mfu, config.mfu, "--mfu"
    everything = [measured for of_gpu in MEASURED_MFU.values() for measured in of_gpu]
    if config.peak or config.gpu.split("-")[0] not in MEASURED_MFU:
        low, high = min(m.mfu for m in everything), max(m.mfu for m in everything)
        source = "assumed, as nothing is published for this GPU: the lowest and highest of others"
    else:
        of_gpu = MEASURED_MFU[config.gpu.split("-")[0]]
        nearest = min((m.millions for m in of_gpu), key=lambda millions: abs(math.log(parameters / 1e6 / millions)))
        of_size = [m for m in of_gpu if m.millions == nearest]
        if config.gpus == 1:
            of_size = [m for m in of_size if m.gpus == 1] or of_size
        first, last = min(of_size), max(of_size)
        low, high = first.mfu, last.mfu
        source = f"measured with {nearest}M parameters: {low:.0%} on {first.where}, {high:.0%} on {last.where}"
        if len(of_size) == 1:
            low, source = (
                SPREAD * high,
                f"measured with {nearest}M parameters: {high:.0%} on {last.where}; or a fifth less",
            )
    if config.recompute:  # the forward pass of the blocks is repeated, which MFU does not count as useful
        repeated = 2 * block_parameters(config) + 4 * config.n_layer * config.n_embd * config.block_size
        useful = flops_per_token / (flops_per_token + repeated)
        low, high, source = low * useful, high * useful, f"{source}; less recomputation"
    return low, high, source


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
    if config.peak:
        peak, gpu = config.peak * 1e12, f"GPU of --peak (memory: {config.gpu})"
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
    low, high, source = mfu(config, sizes.parameters, flops_per_token)
    fast, slow = (tokens * flops_per_token / (gpus * peak * utilization) for utilization in (high, low))
    per_gpu = f", {_range(tokens / slow / gpus, tokens / fast / gpus, ',.0f')} per GPU" if gpus > 1 else ""
    yield (
        f"time     {name_of(config)}: {_range(fast / 3600, slow / 3600, ',.2f')} hours; "
        f"{_range(tokens / slow, tokens / fast, ',.0f')} tokens/s{per_gpu}, {_range(fast / steps, slow / steps, '.3g')} s per step"
    )
    yield f"         at {_range(low, high, '.1%')} MFU ({source})" + (
        "; a model this small will not reach that" if sizes.parameters < SMALL and not config.mfu else ""
    )
    validations, scores, evaluated = evaluations(config, vocab_size)
    # a forward pass is a third of a training step
    evaluation = evaluated / 3 / tokens
    yield (
        f"         another {_range(evaluation * fast / 3600, evaluation * slow / 3600, ',.2f')} hours for {validations:,} "
        f"validations and {scores:,} HellaSwag scores, at the same MFU; checkpoints, and a network between nodes, are not "
        "counted"
    )
    least, most = (gpus * (1 + evaluation) * seconds / 3600 for seconds in (fast, slow))
    price = config.price
    cost = "" if price is None else f", {_range(least * price, most * price, ',.2f')} at {price:g} per GPU-hour"
    yield f"cost     {_range(least, most, ',.1f')} GPU-hours{cost}"
    if config.compile is not False:
        yield f"start    {presets.compile_seconds(config.n_layer):.0f} s to compile with 16 cores, less the next time"
    if config.text is None and not config.demo and not shards.shard_paths(config.data, "train"):
        yield (
            f"data     none in {config.data} yet. For FineWeb-Edu, fineweb.py downloads {format_bytes(DOWNLOAD_BYTES)}, "
            f"{DOWNLOAD_BYTES / GIGABIT / 60:.0f} minutes at 1 Gbit/s, and encodes it, {ENCODE_MINUTES} minutes with two cores. "
            "That needs no GPU"
        )
    checkpoint_bytes = memory.checkpoint_bytes(config, sizes.parameters, sizes.trained)
    yield f"disk     {format_bytes(2 * tokens)} of tokens are read, {format_bytes(checkpoint_bytes)} per checkpoint"


def _range(low: float, high: float, form: str) -> str:
    """Formats both values, or one if they look the same."""
    ends = format(low, form), format(high, form)
    return ends[0] if ends[0] == ends[1] else " to ".join(ends)


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
