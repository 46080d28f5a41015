"""--plan: what a run will take, computed before anything is paid for: time, cost, memory, traffic.

Each formula has its source. Sizes: N parameters, of which V x C are the padded embedding; L layers, C channels, T tokens
of context, B rows of a micro-batch, W GPUs.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from support.cli import UserError
from support.data import bpe, presets, shards
from support.data.tokenizer import VOCAB_SIZES
from support.files import format_bytes
from support.optim import loss
from support.runtime import devices, fsdp, memory
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
# On a CPU: Python and PyTorch.
PROGRAM_BYTES = 2.5e8
GPUS_PER_NODE = 8
SMALL = 60e6  # parameters: half of the smallest model in the table
WIDTH, LABEL = 80, 9  # columns of a line and of its label
DISK_BYTES_PER_SECOND = 1e9  # of a checkpoint's disk: a fast network file system, or a slow SSD


# Titles and widths of the table: MemoryPlan's fields, their sum, and the largest micro-batch.
COLUMNS = dict(weights=8, grads=7, optim=7, activ=7, logits=7, buffers=8, total=8, batch=6)


@dataclass(frozen=True)
class Sizes:
    """The model of a plan; `parameters` with the padded vocabulary, as they are in memory."""

    n_layer: int
    n_head: int
    n_embd: int
    block_size: int
    padded_vocab_size: int
    parameters: int

    @property
    def flops_per_token(self) -> float:
        """6N + 12 L C T, N without the position embeddings (PaLM, arXiv:2204.02311, appendix B)."""
        N = self.parameters - self.block_size * self.n_embd
        return 6 * N + 12 * self.n_layer * self.n_embd * self.block_size

    @property
    def block_parameters(self) -> int:
        """Those that are matrices of the blocks: 12 C^2 per layer."""
        return 12 * self.n_layer * self.n_embd**2


class MemoryPlan(NamedTuple):
    """Bytes on each GPU, by what they are for."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    buffers: float

    @property
    def total(self) -> float:
        return sum(self)


# -----------------------------------------------------------------------------
# Memory


def plan_memory(
    sizes: Sizes, B: int, *, world_size: int, parallel: str, recompute: bool, micro_steps: int,
    optimizer: str = "adamw", itemsize: int = 2, device_memory: int | None = None,
) -> MemoryPlan:  # fmt: skip
    """Bytes on each of `world_size` devices at the peak of a step.

    Args:
        parallel: "ddp", or "fsdp" (ZeRO, arXiv:1910.02054, stage 3 or, where the weights stay gathered, 2).
        itemsize: of the dtype of the matrix products: 2 or 4.
        device_memory: of the GPU in bytes; None for a CPU. On a GPU, the loss is compiled.
    """
    L, C, T, V, N = sizes.n_layer, sizes.n_embd, sizes.block_size, sizes.padded_vocab_size, sizes.parameters
    on_gpu, tokens, embedding = device_memory is not None, B * T, V * C
    sharded = parallel == "fsdp" and world_size > 1
    parts = world_size if sharded else 1
    blocks = sizes.block_parameters
    moments: float = 8 * N if optimizer == "adamw" else 8 * (N - blocks) + 4 * blocks  # Muon has one of its matrices
    # What a layer saves of each token in bf16, by its inputs: ln_1 (fp32) 4C, c_attn 2C, attention 6C + 2C and a number
    # per head, c_proj (shared with attention), ln_2 (fp32) 4C, c_fc 2C, GELU 8C, c_proj 8C. In fp32, all of it is.
    layer = tokens * ((36 if itemsize == 2 else 64) * C + 4 * sizes.n_head + 16)
    saved = L * tokens * 4 * C + layer if recompute else L * layer  # checkpointing: arXiv:1604.06174
    saved += tokens * ((4 + itemsize) * C + 16)  # ln_f's input, the gradient that the loss saves, ids
    if itemsize == 2 and not (sharded and on_gpu):
        saved += itemsize * blocks  # autocast's copies, which the backward pass needs; FSDP gathers them in bf16
    numel = loss.chunk_numel("cuda" if on_gpu else "cpu", device_memory or 0)
    rows = min(loss.chunk_rows(numel, V), tokens)
    # Eager: logits and log-probabilities in fp32, too, and on a CPU about as much for copies inside matrix products.
    logits = rows * V * (itemsize if on_gpu else itemsize + 16)
    logits += (4 + 4) * embedding  # the gradient of the embedding, and of one chunk, in fp32
    logits += itemsize * embedding if itemsize == 2 else 0  # the embedding in bf16
    largest = 4 * max(N - blocks, blocks / L)  # what is sent at once: the gradients of the embeddings. gloo copies it
    if sharded:
        width = itemsize if on_gpu else 4
        keeps = fsdp.keeps_gathered(N, devices.DTYPES["bf16" if itemsize == 2 else "fp32"], device_memory)
        gathered = width * blocks if keeps else 2 * width * blocks / L  # two blocks: this one and the next
        buffers = gathered + 4 * (N - blocks) + (largest if on_gpu else 3 * largest)
        # complete until the last micro-step sends them
        gradients = 4 * N / parts + (4.0 * N if micro_steps > 1 else 0.0)
    else:
        gradients = 4.0 * N
        buffers = 4.0 * N + (0.0 if on_gpu else largest) if world_size > 1 else 0.0  # DDP's buckets
    weights, moments = 4 * N / parts, moments / parts
    if sharded:  # evaluations have all weights in fp32, but no gradients and activations
        buffers += max(0.0, 4 * N - (gradients + saved + buffers))
    buffers += memory.RESERVED_BYTES if on_gpu else PROGRAM_BYTES
    return MemoryPlan(weights, gradients, moments, saved, logits, buffers)


def largest_micro_batch(sizes: Sizes, rows: int, at_most: int, gib: float, **options: Any) -> int:
    """The largest divisor of the `rows` of a step whose micro-batch fits into a GPU; 0 if none does."""
    memory_bytes = int(gib * 2**30)
    fitting = (
        B
        for B in range(min(rows, at_most), 0, -1)
        if rows % B == 0
        and plan_memory(sizes, B, micro_steps=rows // B, device_memory=memory_bytes, **options).total <= memory_bytes
    )
    return next(fitting, 0)


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


def with_recomputing(sizes: Sizes, mfu: float) -> float:
    """The MFU that is left if the forward pass of the blocks is repeated, which MFU does not count as useful."""
    repeated = 2 * sizes.block_parameters + 4 * sizes.n_layer * sizes.n_embd * sizes.block_size
    return mfu * sizes.flops_per_token / (sizes.flops_per_token + repeated)


def seconds_of_training(sizes: Sizes, tokens: float, peak: float, gpus: int, mfu: float) -> float:
    """FLOPs over FLOP/s."""
    return tokens * sizes.flops_per_token / (gpus * peak * mfu)


def bytes_sent(
    sizes: Sizes, gpus: int, parallel: str, micro_steps: int, keeps_gathered: bool, itemsize: int = 2
) -> float:  # fmt: skip
    """Bytes that each GPU sends in a step, and receives.

    A ring sends (W - 1) / W of a tensor to gather or to reduce-scatter it, and twice that to all-reduce it (Patarasu and
    Yuan, doi:10.1016/j.jpdc.2008.09.002). Gradients are fp32, gathered blocks of `itemsize`, embeddings fp32; these stay
    gathered during a micro-step.
    """
    ring, blocks, N = (gpus - 1) / gpus, sizes.block_parameters, sizes.parameters
    if parallel == "ddp":
        return ring * 2 * 4 * N
    gathers = 1 if keeps_gathered else 2 * micro_steps
    roots = 1 if keeps_gathered else micro_steps
    return ring * (4 * N + gathers * itemsize * blocks + roots * 4 * (N - blocks))


# -----------------------------------------------------------------------------
# The report


def print_report(options: RunOptions, rank: int = 0) -> None:
    """Prints, on rank 0, what --plan prints: for a run on `options.gpus` GPUs of the kind `options.gpu`.

    Raises:
        UserError: the run is of a kind that the formulas do not know.
    """
    if options.to_dict()["lora_rank"]:
        raise UserError("--plan knows training of all weights only. Leave out --lora-rank.")
    if options.dtype != "bf16":
        raise UserError(f"--plan knows bf16 only. Leave out --dtype {options.dtype}.")
    for line in report(options, sizes_of(options)) if rank == 0 else ():
        label, text = line[:LABEL], line[LABEL:]
        wraps = len(line) > WIDTH
        print(textwrap.fill(text, WIDTH, initial_indent=label, subsequent_indent=" " * LABEL) if wraps else line)


def sizes_of(options: RunOptions) -> Sizes:
    """The sizes of a run's model. The vocabulary is that of its shards, if there are any yet."""
    flags, tokenizer = options.to_dict(), "bpe" if options.demo else options.tokenizer
    vocab_size = VOCAB_SIZES.get(tokenizer) or bpe.fitting_vocab_size(presets.text_bytes(flags))
    if shards.shard_paths(options.data, "train"):
        vocab_size = shards.read_manifest(options.data)["vocab_size"]
    padded = -(-vocab_size // 64) * 64
    parameters = memory.count_parameters({**flags, "vocab_size": padded})
    return Sizes(flags["n_layer"], flags["n_head"], flags["n_embd"], flags["block_size"], padded, parameters)


def report(options: RunOptions, sizes: Sizes) -> Iterator[str]:
    """The lines of --plan."""
    flags, gpus, gpu = options.to_dict(), options.gpus, devices.GPUS[options.gpu]
    peak, steps, T, step_tokens = (
        devices.PEAK_FLOPS[gpu.name],
        flags["max_steps"],
        sizes.block_size,
        flags["total_batch_size"],
    )
    rows, tokens = step_tokens // T // gpus, steps * step_tokens
    yield (
        f"model    {sizes.parameters:,} parameters: {sizes.n_layer} layers, {sizes.n_head} heads, {sizes.n_embd} channels, "
        f"context {T}"
    )
    yield (
        f"run      {steps:,} steps of {step_tokens:,} tokens, {short_number(tokens)} tokens in all; "
        f"{tokens * sizes.flops_per_token:.2e} FLOPs, {short_number(sizes.flops_per_token)} per token"
    )
    yield (
        f"GPUs     {gpus:,} x {gpu.name}, {peak / 1e12:.0f} TFLOP/s in bf16 each; of each step, a GPU has "
        f"{rows:,} row{'s' if rows > 1 else ''} of {T:,} tokens"
    )
    if "gpu" not in options.given:
        yield f"note     planned for {'an' if options.gpu == 'A100' else 'a'} {options.gpu}; --gpu names another"
    if options.minutes:
        yield f"note     --minutes measures a machine at the start of a run; this plan is for {steps:,} steps"
    yield ""
    layouts = {
        (parallel, recompute): Layout(options, sizes, rows, gpu, parallel, recompute)
        for parallel in (("ddp", "fsdp") if gpus > 1 else ("ddp",))
        for recompute in (False, True)
    }
    yield f"memory   GB on each GPU, which has {gpu.gib * 2**30 / 1e9:.1f}"
    yield f"{'':<19}" + "".join(f"{title:>{width}}" for title, width in COLUMNS.items())
    yield from (layout.row() for layout in layouts.values())
    yield (
        "columns  grads: gradients. optim: the optimizer's state. activ: activations. logits: what the loss takes, with "
        "the gradient of the embedding. buffers: weights and gradients on their way between GPUs, and what CUDA takes "
        f"for itself. batch: the largest --batch-size that fits, up to {options.batch_size}; none: not even one row fits."
    )
    yield ""
    chosen = layouts["fsdp" if options.parallel == "fsdp" and gpus > 1 else "ddp", options.recompute]
    if chosen.B == 0:
        fitting = next((layout for layout in layouts.values() if layout.B), None)
        advice = f"Add {fitting.flags}, as below." if fitting else "Use more or larger GPUs, or a smaller model."
        yield f"note     {chosen.name}: not even one row fits. {advice}"
        if not fitting:
            return
        chosen = fitting
    utilization, source = (options.mfu, "--mfu") if options.mfu else mfu(options.gpu, sizes.parameters)
    if chosen.recompute and not options.mfu:
        utilization, source = with_recomputing(sizes, utilization), f"{source}, less what is recomputed"
    seconds = seconds_of_training(sizes, tokens, peak, gpus, utilization)
    yield (
        f"time     {chosen.name}: {duration(seconds)} at {utilization:.1%} MFU ({source}): {tokens / seconds:,.0f} tokens/s, "
        f"{tokens / seconds / gpus:,.0f} per GPU, {seconds / steps:.3g} s per step"
    )
    yield "         without evaluations, checkpoints and what the network adds" + (
        "; so small a model will not reach that MFU" if sizes.parameters < SMALL and not options.mfu else ""
    )
    gpu_hours = gpus * seconds / 3600
    cost = "" if options.price is None else f", {gpu_hours * options.price:,.2f} at {options.price:g} per GPU-hour"
    yield f"cost     {gpu_hours:,.1f} GPU-hours{cost}"
    yield f"data     {2 * tokens / seconds / 1e6:,.1f} MB/s of tokens are read, {format_bytes(2 * tokens)} in all"
    moments = 8 * sizes.parameters - (4 * sizes.block_parameters if flags["optimizer"] == "muon" else 0)
    size = 4 * sizes.parameters + moments
    yield f"disk     {format_bytes(size)} per checkpoint, {size / DISK_BYTES_PER_SECOND:,.1f} s at 1 GB/s, in the background"
    for layout in (layouts.get((parallel, chosen.recompute)) for parallel in ("ddp", "fsdp")):
        if gpus > 1 and layout and layout.B:
            yield layout.network_line(seconds / steps)


class Layout:
    """A way to train, with the largest micro-batch that fits; `B` is 0 if none does."""

    def __init__(
        self, options: RunOptions, sizes: Sizes, rows: int, gpu: devices.Gpu, parallel: str, recompute: bool
    ):  # fmt: skip
        self.sizes, self.rows, self.gpus, self.parallel, self.recompute = sizes, rows, options.gpus, parallel, recompute
        self.memory = int(gpu.gib * 2**30)
        how = dict(
            world_size=options.gpus, parallel=parallel, recompute=recompute, optimizer=options.to_dict()["optimizer"]
        )
        self.B = largest_micro_batch(sizes, rows, options.batch_size, gpu.gib, **how)
        self.plan = plan_memory(
            sizes, self.B or 1, micro_steps=rows // (self.B or 1), device_memory=self.memory, **how
        )  # fmt: skip

    @property
    def flags(self) -> str:
        return " ".join(["--parallel fsdp"] * (self.parallel == "fsdp") + ["--recompute"] * self.recompute)

    @property
    def name(self) -> str:
        return ("one GPU" if self.gpus == 1 else self.parallel) + (" --recompute" if self.recompute else "")

    def row(self) -> str:
        sizes = (f"{part / 1e9:.2f}" if part < 1e12 else f"{part / 1e9:,.0f}" for part in (*self.plan, self.plan.total))
        cells = zip((*sizes, str(self.B or "none")), COLUMNS.values(), strict=True)
        return f"{self.name:<19}" + "".join(f"{cell:>{width}}" for cell, width in cells)

    def network_line(self, seconds: float) -> str:
        """What a step sends, and the bandwidth below which that takes longer than the step's arithmetic.

        A ring through all GPUs enters and leaves each node once, so a node sends as much as a GPU does.
        """
        keeps = fsdp.keeps_gathered(self.sizes.parameters, devices.DTYPES["bf16"], self.memory)
        sent = bytes_sent(self.sizes, self.gpus, self.parallel, self.rows // self.B, keeps)
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
