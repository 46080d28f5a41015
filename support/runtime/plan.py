"""--plan: what a run will take, computed before anything is paid for: time, cost, memory, traffic.

Each formula has its source; those of memory are in memory.py. W is the number of GPUs.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Protocol

import torch

from support.cli import UserError
from support.data import bpe, presets, shards
from support.data.tokenizer import VOCAB_SIZES
from support.files import format_bytes
from support.runtime import devices, fsdp, memory
from support.runtime.memory import Sizes, block_parameters, training_memory
from support.runtime.options import RunOptions

# Model FLOPs utilization that was reached with this architecture on 8 GPUs, by millions of parameters: tokens per
# second per GPU times FLOPs per token over the peak. All are llm.c's (github.com/karpathy/llm.c, discussions 481, 580,
# 677), which is C and CUDA: 218k, 80k and 38.6k tokens/s per A100; 468k and 46.8k per H100.
MEASURED_MFU = {
    "A100": {124: 0.60, 355: 0.62, 774: 0.64},
    "H100": {124: 0.40, 1558: 0.49},
    "H200": {124: 0.40, 1558: 0.49},  # the same chip as the H100's
}
ASSUMED_MFU = 0.4  # where nothing was measured
GPUS_PER_NODE = 8
SMALL = 60e6  # parameters: half of the smallest model in the table
WIDTH, LABEL = 80, 9  # columns of a line and of its label
DISK_BYTES_PER_SECOND = 1e9  # of a checkpoint's disk: a fast network file system, or a slow SSD

# Titles and widths of the table: TrainingMemory's fields, their sum, and the largest micro-batch.
COLUMNS = dict(weights=8, grads=7, optim=7, activ=7, logits=7, buffers=8, total=8, batch=6)


class Model(memory.Model, Protocol):
    """What is asked of the trainer's model."""

    def flops_per_token(self) -> int: ...


def largest_micro_batch(config: RunOptions, sizes: Sizes) -> int:
    """The largest divisor of the rows of a step whose micro-batch fits into a GPU; 0 if none does."""
    rows, device_memory = rows_per_gpu(config), memory_of_gpu(config)
    fitting = (
        B
        for B in range(min(rows, config.batch_size), 0, -1)
        if rows % B == 0 and training_memory(config, sizes, B, config.gpus, device_memory).total <= device_memory
    )
    return next(fitting, 0)


def rows_per_gpu(config: RunOptions) -> int:
    return config.total_batch_size // config.block_size // config.gpus


def memory_of_gpu(config: RunOptions) -> int:
    return int(devices.GPUS[config.gpu].gib * 2**30)


# -----------------------------------------------------------------------------
# Time and traffic


def mfu(gpu: str, parameters: int) -> tuple[float, str]:
    """Model FLOPs utilization to expect, and where it is from: that of the nearest size measured on this GPU."""
    family = gpu.split("-")[0]
    if family not in MEASURED_MFU:
        return ASSUMED_MFU, "assumed: none is published for this GPU"
    measured = MEASURED_MFU[family]
    nearest = min(measured, key=lambda millions: abs(math.log(parameters / 1e6 / millions)))
    return measured[nearest], f"llm.c's with {nearest}M parameters on {'H100' if family == 'H200' else family}"


def with_recomputing(config: RunOptions, flops_per_token: int, mfu: float) -> float:
    """The MFU that is left if the forward pass of the blocks is repeated, which MFU does not count as useful."""
    repeated = 2 * block_parameters(config) + 4 * config.n_layer * config.n_embd * config.block_size
    return mfu * flops_per_token / (flops_per_token + repeated)


def bytes_sent(
    config: RunOptions, parameters: int, gpus: int, micro_steps: int, reshard_after_forward: bool, itemsize: int = 2
) -> float:
    """Bytes that each GPU sends in a step, and receives.

    A ring sends (W - 1) / W of a tensor to gather or to reduce-scatter it, and twice that to all-reduce it (Patarasu
    and Yuan, doi:10.1016/j.jpdc.2008.09.002). Gradients are fp32, gathered blocks of `itemsize`, embeddings fp32; these
    stay gathered during a micro-step.
    """
    ring, blocks = (gpus - 1) / gpus, block_parameters(config)
    if config.parallel == "ddp":
        return ring * 2 * 4 * parameters
    gathers = 2 * micro_steps if reshard_after_forward else 1
    roots = micro_steps if reshard_after_forward else 1
    return ring * (4 * parameters + gathers * itemsize * blocks + roots * 4 * (parameters - blocks))


# -----------------------------------------------------------------------------
# The report


def print_report(config: RunOptions, new_model: Callable[[int], Model], rank: int = 0) -> None:
    """Prints, on rank 0, what --plan prints: for a run on `config.gpus` GPUs of the kind `config.gpu`.

    Args:
        new_model: makes the model from the size of its vocabulary; on the meta device, about 2 ms per layer.

    Raises:
        UserError: the run is of a kind that the formulas do not know.
    """
    if config.lora_rank:
        raise UserError("--plan knows training of all weights only. Leave out --lora-rank.")
    if config.dtype != "bf16":
        raise UserError(f"--plan knows bf16 only. Leave out --dtype {config.dtype}.")
    if rank > 0:
        return
    with torch.device("meta"):
        model = new_model(vocab_size_of(config))
    for line in report(config, Sizes.of(model), model.flops_per_token()):
        label, text = line[:LABEL], line[LABEL:]
        wraps = len(line) > WIDTH
        print(textwrap.fill(text, WIDTH, initial_indent=label, subsequent_indent=" " * LABEL) if wraps else line)


def vocab_size_of(config: RunOptions) -> int:
    """The vocabulary of the run's shards, if there are any yet, otherwise of its tokenizer."""
    if shards.shard_paths(config.data, "train"):
        return shards.read_manifest(config.data)["vocab_size"]
    tokenizer = "bpe" if config.demo else config.tokenizer
    return VOCAB_SIZES.get(tokenizer) or bpe.fitting_vocab_size(presets.text_bytes(config.text, config.text_field))


def report(config: RunOptions, sizes: Sizes, flops_per_token: int) -> Iterator[str]:
    """The lines of --plan."""
    gpus, gpu, steps, T = config.gpus, devices.GPUS[config.gpu], config.max_steps, config.block_size
    peak, rows, tokens = devices.PEAK_FLOPS[gpu.name], rows_per_gpu(config), steps * config.total_batch_size
    yield (
        f"model    {sizes.parameters:,} parameters: {config.n_layer} layers, {config.n_head} heads, "
        f"{config.n_embd} channels, context {T}"
    )
    yield (
        f"run      {steps:,} steps of {config.total_batch_size:,} tokens, {short_number(tokens)} tokens in total; "
        f"{tokens * flops_per_token:.2e} FLOPs, {short_number(flops_per_token)} per token"
    )
    yield (
        f"GPUs     {gpus:,} x {gpu.name}, {peak / 1e12:.0f} TFLOP/s in bf16 each; of each step, a GPU has "
        f"{rows:,} row{'s' if rows > 1 else ''} of {T:,} tokens"
    )
    if "gpu" not in config.explicit:
        yield f"note     planned for {'an' if config.gpu == 'A100' else 'a'} {config.gpu}; --gpu names another"
    if config.minutes:
        yield f"note     --minutes measures a machine at the start of a run; this plan is for {steps:,} steps"
    yield ""
    layouts = {
        (parallel, recompute): Layout(config, sizes, parallel, recompute)
        for parallel in (("ddp", "fsdp") if gpus > 1 else ("ddp",))
        for recompute in (False, True)
    }
    yield f"memory   GB on each GPU, which has {gpu.gib * 2**30 / 1e9:.1f}"
    yield f"{'':<19}" + "".join(f"{title:>{width}}" for title, width in COLUMNS.items())
    yield from (layout.row() for layout in layouts.values())
    yield (
        "columns  grads: gradients. optim: the optimizer's state. activ: activations. logits: what the loss takes, "
        "with the gradient of the embedding. buffers: weights and gradients on their way between GPUs, and what CUDA "
        f"takes for itself. batch: the largest --batch-size that fits, up to {config.batch_size}; none: not even one "
        "row fits."
    )
    yield ""
    chosen = layouts["fsdp" if config.parallel == "fsdp" and gpus > 1 else "ddp", config.recompute]
    if chosen.B == 0:
        fitting = next((layout for layout in layouts.values() if layout.B), None)
        advice = f"Add {fitting.flags}, as below." if fitting else "Use more or larger GPUs, or a smaller model."
        yield f"note     {chosen.name}: not even one row fits. {advice}"
        if not fitting:
            return
        chosen = fitting
    utilization, source = (config.mfu, "--mfu") if config.mfu else mfu(config.gpu, sizes.parameters)
    if chosen.recompute and not config.mfu:
        utilization = with_recomputing(config, flops_per_token, utilization)
        source += ", less what is recomputed"
    seconds = tokens * flops_per_token / (gpus * peak * utilization)
    yield (
        f"time     {chosen.name}: {duration(seconds)} at {utilization:.1%} MFU ({source}): "
        f"{tokens / seconds:,.0f} tokens/s, {tokens / seconds / gpus:,.0f} per GPU, {seconds / steps:.3g} s per step"
    )
    yield "         without evaluations, checkpoints and what the network adds" + (
        "; so small a model will not reach that MFU" if sizes.parameters < SMALL and not config.mfu else ""
    )
    gpu_hours = gpus * seconds / 3600
    cost = "" if config.price is None else f", {gpu_hours * config.price:,.2f} at {config.price:g} per GPU-hour"
    yield f"cost     {gpu_hours:,.1f} GPU-hours{cost}"
    yield f"data     {2 * tokens / seconds / 1e6:,.1f} MB/s of tokens are read, {format_bytes(2 * tokens)} in total"
    size = memory.checkpoint_bytes(config, sizes.trained)
    writing = f"{size / DISK_BYTES_PER_SECOND:,.1f} s at 1 GB/s, in the background"
    yield f"disk     {format_bytes(size)} per checkpoint, {writing}"
    for layout in (layouts.get((parallel, chosen.recompute)) for parallel in ("ddp", "fsdp")):
        if gpus > 1 and layout and layout.B:
            yield layout.network_line(seconds / steps)


class Layout:
    """A way to train, with the largest micro-batch that fits; `B` is 0 if none does."""

    def __init__(self, config: RunOptions, sizes: Sizes, parallel: str, recompute: bool):
        self.config = replace(config, parallel=parallel, recompute=recompute, compile=True)
        self.sizes, self.gpus, self.parallel, self.recompute = sizes, config.gpus, parallel, recompute
        self.device_memory = memory_of_gpu(config)
        self.B = largest_micro_batch(self.config, sizes)
        self.memory = training_memory(self.config, sizes, self.B or 1, self.gpus, self.device_memory)

    @property
    def flags(self) -> str:
        return " ".join(["--parallel fsdp"] * (self.parallel == "fsdp") + ["--recompute"] * self.recompute)

    @property
    def name(self) -> str:
        return ("one GPU" if self.gpus == 1 else self.parallel) + (" --recompute" if self.recompute else "")

    def row(self) -> str:
        parts = (*self.memory, self.memory.total)
        gigabytes = (f"{part / 1e9:.2f}" if part < 1e12 else f"{part / 1e9:,.0f}" for part in parts)
        cells = zip((*gigabytes, str(self.B or "none")), COLUMNS.values(), strict=True)
        return f"{self.name:<19}" + "".join(f"{cell:>{width}}" for cell, width in cells)

    def network_line(self, seconds: float) -> str:
        """What a step sends, and the bandwidth below which that takes longer than the step's arithmetic.

        A ring through all GPUs enters and leaves each node once, so a node sends as much as a GPU does.
        """
        parameters, micro_steps = self.sizes.parameters, rows_per_gpu(self.config) // self.B
        reshards = fsdp.reshard_after_forward(parameters, torch.bfloat16, self.device_memory)
        sent = bytes_sent(self.config, parameters, self.gpus, micro_steps, reshards)
        where = "GPU" if self.gpus <= GPUS_PER_NODE else f"node of {GPUS_PER_NODE}"
        return (
            f"network  {self.parallel} sends {format_bytes(sent)} per step; with less than "
            f"{8 * sent / seconds / 1e9:,.0f} Gbit/s per {where}, that takes longer than computing"
        )


def short_number(number: float) -> str:
    for name, size in (("trillion", 1e12), ("billion", 1e9), ("million", 1e6)):
        if number >= size:
            return f"{number / size:,.1f} {name}"
    return f"{number:,.0f}"


def duration(seconds: float) -> str:
    """In seconds, minutes, hours or days."""
    for name, size in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size or (name == "hours" and seconds >= size):
            return f"{seconds / size:,.1f} {name}"
    return f"{seconds:,.1f} seconds"
