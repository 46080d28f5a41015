"""--plan: what a run will take, computed before anything is paid for: time, cost, memory, traffic.

Each formula has its source. Sizes: N parameters, of which V x C are the padded embedding; L layers, C channels, T tokens
of context, B rows of a micro-batch, W GPUs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from support.cli import UserError
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
DISK_BYTES_PER_SECOND = 1e9  # of a checkpoint's disk: a fast network file system, or a slow SSD


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
    buffers += memory.RESERVED_BYTES if on_gpu else PROGRAM_BYTES
    return MemoryPlan(weights, gradients, moments, saved, logits, buffers)


def largest_micro_batch(sizes: Sizes, rows: int, gib: float, **options: Any) -> int:
    """The largest divisor of the `rows` of a step, up to 64, whose micro-batch fits into a GPU; 0 if none does."""
    memory_bytes = int(gib * 2**30)
    fitting = (
        B
        for B in range(min(rows, 64), 0, -1)
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


def seconds_of_training(sizes: Sizes, tokens: float, peak: float, gpus: int, mfu: float, recompute: bool) -> float:
    """FLOPs over FLOP/s. Recomputing repeats the forward pass of the blocks, a third of their 6 FLOPs per weight."""
    repeated = 2 * sizes.block_parameters + 4 * sizes.n_layer * sizes.n_embd * sizes.block_size if recompute else 0
    return tokens * (sizes.flops_per_token + repeated) / (gpus * peak * mfu)


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


def print_report(options: RunOptions) -> None:
    """Prints what --plan prints, for the flags of a run on `options.gpus` GPUs of the kind `options.gpu`.

    Raises:
        UserError: the run is of a kind that the formulas do not know.
    """
    if options.to_dict()["lora_rank"]:
        raise UserError("--plan knows training of all weights only. Leave out --lora-rank.")
    for line in report(options, sizes_of(options)):
        print(line)


def sizes_of(options: RunOptions) -> Sizes:
    """The sizes of a run's model; its vocabulary is that of --tokenizer."""
    flags = options.to_dict()
    padded = -(-VOCAB_SIZES[options.tokenizer] // 64) * 64
    parameters = memory.count_parameters({**flags, "vocab_size": padded})
    return Sizes(flags["n_layer"], flags["n_head"], flags["n_embd"], flags["block_size"], padded, parameters)


def report(options: RunOptions, sizes: Sizes) -> Iterator[str]:
    """The lines of --plan."""
    flags = options.to_dict()
    gpus, gpu = options.gpus, devices.GPUS[options.gpu]
    peak, steps, T = devices.PEAK_FLOPS[gpu.name], flags["max_steps"], sizes.block_size
    step_tokens, rows = flags["total_batch_size"], flags["total_batch_size"] // T // gpus
    tokens = steps * step_tokens
    yield (
        f"model    {sizes.parameters:,} parameters: {sizes.n_layer} layers, {sizes.n_head} heads, {sizes.n_embd} channels, "
        f"context {T}"
    )
    yield (
        f"run      {steps:,} steps of {step_tokens:,} tokens, {tokens / 1e9:,.1f} billion: "
        f"{tokens * sizes.flops_per_token:.2e} FLOPs, {sizes.flops_per_token / 1e9:.2f} billion per token"
    )
    yield f"GPUs     {gpus} x {gpu.name}, {peak / 1e12:.0f} TFLOP/s in bf16 each; {rows} rows of a step on each"
    yield ""
    yield from memory_table(options, sizes, rows, gpu, gpus)
    yield ""
    utilization, source = (options.mfu, "--mfu") if options.mfu else mfu(options.gpu, sizes.parameters)
    seconds = seconds_of_training(sizes, tokens, peak, gpus, utilization, options.recompute)
    per_step = seconds / steps
    yield (
        f"time     {duration(seconds)} at {utilization:.0%} MFU ({source}): {tokens / seconds:,.0f} tokens/s, "
        f"{tokens / seconds / gpus:,.0f} per GPU, {per_step:.3g} s per step; without evaluations"
    )
    gpu_hours = gpus * seconds / 3600
    cost = f", {gpu_hours * options.price:,.2f} at {options.price:g} per GPU and hour" if options.price else ""
    yield f"cost     {gpu_hours:,.1f} GPU-hours{cost}"
    yield f"data     {2 * tokens / seconds / 1e6:,.1f} MB/s are read, {2 * tokens / 1e9:,.1f} GB of shards in all"
    checkpoint_bytes = (
        12 * sizes.parameters if flags["optimizer"] == "adamw" else 12 * sizes.parameters - 4 * sizes.block_parameters
    )
    yield (
        f"disk     {format_bytes(checkpoint_bytes)} per checkpoint, {checkpoint_bytes / DISK_BYTES_PER_SECOND:.0f} s at "
        "1 GB/s while training continues"
    )
    if gpus > 1:
        yield from network_lines(options, sizes, rows, gpu, per_step)


def memory_table(options: RunOptions, sizes: Sizes, rows: int, gpu: devices.Gpu, gpus: int) -> Iterator[str]:
    """Memory by part, with the micro-batch that fits, for each way to train."""
    optimizer = options.to_dict()["optimizer"]
    header = ("GB on each GPU", *MemoryPlan._fields, "total", "--batch-size")
    yield "  ".join(f"{title:>{max(11, len(title))}}" for title in header)
    for parallel in ("ddp", "fsdp") if gpus > 1 else ("ddp",):
        for recompute in (False, True):
            layout = dict(world_size=gpus, parallel=parallel, recompute=recompute, optimizer=optimizer)
            B = largest_micro_batch(sizes, rows, gpu.gib, **layout)
            if B and "batch_size" in options.given:
                B = min(B, options.batch_size)
            parts = plan_memory(
                sizes, B or 1, micro_steps=rows // (B or 1), device_memory=int(gpu.gib * 2**30), **layout
            )
            name = (parallel if gpus > 1 else "one GPU") + (" recompute" if recompute else "")
            fits = str(B) if B else "does not fit"
            yield (
                f"{name:>14}  " + "  ".join(f"{part / 1e9:>11.2f}" for part in (*parts, parts.total)) + f"  {fits:>12}"
            )


def network_lines(options: RunOptions, sizes: Sizes, rows: int, gpu: devices.Gpu, seconds: float) -> Iterator[str]:
    """What a step sends, and the bandwidth below which that takes longer than the step's arithmetic."""
    gib = int(gpu.gib * 2**30)
    for parallel in ("ddp", "fsdp"):
        layout = dict(world_size=options.gpus, parallel=parallel, recompute=options.recompute)
        B = largest_micro_batch(sizes, rows, gpu.gib, **layout)
        if B:
            keeps = fsdp.keeps_gathered(sizes.parameters, devices.DTYPES["bf16"], gib)
            sent = bytes_sent(sizes, options.gpus, parallel, rows // B, keeps)
            yield (
                f"network  {parallel} sends {format_bytes(sent)} per GPU and step: below {8 * sent / seconds / 1e9:,.1f} "
                "Gbit/s per GPU, it takes longer than computing"
            )


def duration(seconds: float) -> str:
    """In hours or days."""
    return f"{seconds / 3600:,.1f} hours" if seconds < 48 * 3600 else f"{seconds / 86400:,.1f} days"
