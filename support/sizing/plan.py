"""--plan: the time, cost and memory that a run will take, computed before anything is paid for.

Each formula has its source; memory.py has the formulas for memory.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from support.cli import UserError, flag_name, flags_of, format_bytes
from support.config import PlanOptions, TrainConfig
from support.data import shards
from support.data.tokenizer import Tokenizer
from support.gpus import GPU_FLAGS, GPUS
from support.runtime import batch_size, devices, memory
from support.runtime.machine import compile_seconds, compiles_on_gpu, hellaswag_interval
from support.runtime.memory import Layout, Sizes, TrainingMemory, count_published, training_memory
from support.sizing import presets
from support.sizing.budget import NewModel


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
        Measured(0.475, 124, 1, "an H200 by this trainer"),
        *ON_8_H100,
    ],
    "RTX4090": [Measured(0.55, 124, 1, "an RTX 4090 by nanoGPT")],
    "B200": [Measured(0.30, 124, 1, "a B200 by GPT-3-Small-Pretraining-Experiments")],
    "L40S": [Measured(0.34, 124, 1, "an L40S by GPT-3-Small-Pretraining-Experiments")],
    "L4": [Measured(0.286, 124, 1, "an L4 by GPT-3-Small-Pretraining-Experiments")],
    "A6000": [Measured(0.51, 124, 1, "an RTX A6000 by GPT-3-Small-Pretraining-Experiments")],
    "RTXPRO6000": [Measured(0.49, 124, 1, "an RTX PRO 6000 by GPT-3-Small-Pretraining-Experiments")],
    # more than others reach: its clock is higher than that of the data sheet's peak
    "RTX5090": [Measured(0.80, 124, 1, "an RTX 5090 by GPT-3-Small-Pretraining-Experiments")],
}
SPREAD = 0.8  # a single measurement may be this much too high: 124M on H100s has 33% and 42%
DOWNLOAD_BYTES, ENCODE_MINUTES = 28.5e9, 8  # the text of 10 billion tokens, with two cores: docs/full-run.md
GIGABIT = 1e9 / 8  # bytes per second
TOKENS_PER_ITEM = 331  # of HellaSwag: four endings with their contexts and padding, counted on 2,009 items
SMALL = 60e6  # parameters: half of the smallest model in the table


@dataclass(frozen=True)
class Plan:
    """A run on a number of GPUs of one kind."""

    options: PlanOptions
    config: TrainConfig
    first_step: int  # of what is planned: a resumed run or a fork begins at that of its checkpoint
    sizes: Sizes
    parameters: int  # without the rows that pad the vocabulary in memory
    flops_per_token: int
    tokenizer: str  # gpt2, bytes or bpe
    validated_tokens: int  # in each validation
    hellaswag_items: int  # in each score
    layout: Layout

    @property
    def name(self) -> str:
        """A short label for the layout, such as `fsdp+recompute`."""
        parallel = "1 GPU" if self.options.gpus == 1 else "fsdp" if self.layout.sharded else "ddp"
        return parallel + ("+recompute" if self.layout.recompute else "")

    @property
    def rows_per_gpu(self) -> int:
        return self.config.step_rows // self.options.gpus

    @property
    def gpu_bytes(self) -> int:
        """The memory of a GPU."""
        return int(GPUS[GPU_FLAGS[self.options.gpu]].gib * 2**30)

    def memory_per_gpu(self, B: int) -> TrainingMemory:
        """Returns the bytes on each GPU with micro-batches of B rows."""
        return training_memory(self.sizes, self.layout, B, self.gpu_bytes)

    def largest_micro_batch(self) -> int:
        """Returns the largest micro-batch that divides a GPU's rows per step and fits into its memory; 0 if no row fits."""
        most = self.config.batch_size or batch_size.LARGEST_MICRO_BATCH
        needed = lambda B: self.memory_per_gpu(B).total  # noqa: E731
        return memory.largest_micro_batch(self.rows_per_gpu, most, needed, self.gpu_bytes)


# -----------------------------------------------------------------------------
# Time


def mfu(plan: Plan) -> tuple[float, float, str]:
    """Returns the lowest and highest model FLOPs utilization to expect, and whose they are.

    They are --mfu, or what was measured on such a GPU at the nearest size, or, of other GPUs, the extremes of all and less.
    """
    options, sizes, flops_per_token = plan.options, plan.sizes, plan.flops_per_token
    if options.mfu:
        return options.mfu, options.mfu, "--mfu"
    everything = [measured for gpu, of_gpu in MEASURED_MFU.items() if gpu != "RTX5090" for measured in of_gpu]
    if options.peak or options.gpu.split("-")[0] not in MEASURED_MFU:
        low, high = SPREAD * min(m.mfu for m in everything), max(m.mfu for m in everything)
        source = "assumed, as nothing is published for this GPU: from a fifth below the lowest of others to the highest"
    else:
        of_gpu = MEASURED_MFU[options.gpu.split("-")[0]]
        nearest = min(
            (m.millions for m in of_gpu), key=lambda millions: abs(math.log(sizes.parameters / 1e6 / millions))
        )
        of_size = [m for m in of_gpu if m.millions == nearest]
        if options.gpus == 1:
            of_size = [m for m in of_size if m.gpus == 1] or of_size
        first, last = min(of_size), max(of_size)
        low, high = first.mfu, last.mfu
        source = f"measured with {nearest}M parameters: {low:.0%} on {first.where}, {high:.0%} on {last.where}"
        if len(of_size) == 1:
            low, source = (
                SPREAD * high,
                f"measured with {nearest}M parameters: {high:.0%} on {last.where}; or a fifth less",
            )
    if plan.layout.recompute:  # the forward pass of the blocks is repeated, which MFU does not count as useful
        repeated = 2 * sizes.block_parameters + 4 * sizes.n_layer * sizes.n_embd * sizes.block_size
        useful = flops_per_token / (flops_per_token + repeated)
        low, high, source = low * useful, high * useful, f"{source}; less recomputation"
    return low, high, source


def evaluations(plan: Plan) -> tuple[int, int, int]:
    """Returns how many validations and HellaSwag scores a run has, and how many tokens they read in total."""
    config = plan.config

    def times(every: int | None) -> int:
        if every is None:  # at each quarter of --minutes
            return 5
        return (
            -(-config.max_steps // every) - -(-plan.first_step // every) + 1 if every else 0
        )  # one after the last step

    validations, scores = times(config.val_every), times(hellaswag_interval(config, on_gpu=True))
    scores = scores if plan.tokenizer == "gpt2" else 0  # HellaSwag is scored only with GPT-2's tokens
    evaluated = validations * plan.validated_tokens + scores * plan.hellaswag_items * TOKENS_PER_ITEM
    return validations, scores, evaluated


# -----------------------------------------------------------------------------
# The report


def split_flags(cli_flags: Mapping[str, Any], world_size: int) -> tuple[PlanOptions, dict[str, Any]]:
    """Divides the flags on a command line into those of --plan and those of a run.

    Args:
        world_size: the number of processes, and so of GPUs unless --gpus is given.

    Raises:
        UserError: there are flags of --plan without --plan.
    """
    names = flags_of(PlanOptions)
    of_plan = {name: value for name, value in cli_flags.items() if name in names}
    if of_plan and not of_plan.get("plan"):
        given = " and ".join(map(flag_name, sorted(of_plan)))
        raise UserError(f"{given}: only for --plan. Add --plan, or leave it out.")
    own: dict[str, Any] = {"gpus": world_size} | ({"gpu": _own_gpu()} if of_plan else {})
    options = PlanOptions(**own | of_plan)
    return options, {name: value for name, value in cli_flags.items() if name not in names}


def _own_gpu() -> str:
    """Returns the name of this machine's GPU for --gpu, or the default if it has none that is known."""
    own = GPUS.get(torch.cuda.get_device_name()) if torch.cuda.is_available() else None
    return own.flag if own and own.flag else PlanOptions.gpu


def print_report(
    options: PlanOptions, config: TrainConfig, new_model: NewModel, data: shards.TokenData | None = None,
    existing_tokenizer: Tokenizer | None = None, hellaswag_items: int = 0, first_step: int = 0, rank: int = 0,
) -> None:  # fmt: skip
    """Prints the report of --plan on rank 0, for a run on `options.gpus` GPUs of the kind `options.gpu`.

    Args:
        data: None if the shards are not made yet.
        existing_tokenizer: the tokenizer, if it exists already.
        new_model: makes the model; on the meta device, that takes about 2 ms per layer.

    Raises:
        UserError: the formulas do not cover such a run, or its batch does not divide evenly among the GPUs.
    """
    if config.lora_rank:
        raise UserError("--plan can only plan the training of all weights. Leave out --lora-rank.")
    dtype = GPUS[GPU_FLAGS[options.gpu]].dtype
    if config.dtype not in ("auto", dtype):
        raise UserError(f"--plan knows the peak of such a GPU only in {dtype}. Leave out --dtype {config.dtype}.")
    batch_size.rows_per_rank(config, options.gpus)
    if rank > 0:
        return
    if data:
        tokenizer, vocab_size = data.tokenizer.name, data.tokenizer.vocab_size
        validated_tokens = sum(map(len, data.targets(config.block_size, config.val_tokens)))
    else:
        tokenizer = presets.tokenizer_name(config)
        text = presets.measure_text(config.text, config.text_field, tokenizer, existing_tokenizer)
        vocab_size, train_tokens = presets.vocab_size_for(config, text, existing_tokenizer), text.train_tokens
        validated_tokens = config.val_tokens
        if config.is_demo_or_text:
            validated_tokens = min(validated_tokens, int(train_tokens / 9))  # a tenth of the text is held out
            if train_tokens < config.total_batch_size:
                raise UserError(
                    f"{config.text} has about {train_tokens:,.0f} tokens to train on, and one step takes "
                    f"{config.total_batch_size:,}. Use more text, or lower --total-batch-size or --block-size."
                )
    if config.max_steps <= first_step:
        raise UserError(
            f"a run of {config.max_steps:,} steps has ended at step {first_step:,}, and --plan cannot know how many steps "
            "--minutes will be. Use --max-steps."
        )
    with torch.device("meta"):
        model: Any = new_model(config, vocab_size)
    layout = Layout.of(config, devices.DTYPES[dtype], options.gpus, compiled=compiles_on_gpu(config))
    plan = Plan(
        options, config, first_step, Sizes.of(model), count_published(model), model.flops_per_token(), tokenizer, validated_tokens,
        hellaswag_items, layout,
    )  # fmt: skip
    for line in report(plan):
        print(textwrap.fill(line, 80, subsequent_indent=" " * 9), flush=True)


def report(plan: Plan) -> Iterator[str]:
    """Yields the lines of the report."""
    options, config, sizes, flops_per_token = plan.options, plan.config, plan.sizes, plan.flops_per_token
    gpus, gpu, T = options.gpus, GPU_FLAGS[options.gpu], sizes.block_size
    steps, since = config.max_steps - plan.first_step, f" from step {plan.first_step:,} on" if plan.first_step else ""
    peak, dtype, step_tokens = GPUS[gpu].peak_flops, GPUS[gpu].dtype, plan.layout.step_tokens
    tokens = steps * step_tokens
    if options.peak:
        peak, gpu = options.peak * 1e12, f"GPU of --peak (memory: {options.gpu})"
    yield (
        f"model    {plan.parameters:,} parameters: {sizes.n_layer} layers, {sizes.n_head} heads, "
        f"{sizes.n_embd} channels, context {T}"
    )
    yield (
        f"run      {steps:,} steps{since} of {step_tokens:,} tokens, {tokens:,} in total; "
        f"{tokens * flops_per_token:.2e} FLOPs, {flops_per_token:.2e} per token"
    )
    yield (
        f"GPUs     {gpus:,} x {gpu}, {peak / 1e12:.0f} TFLOP/s in {dtype} each; each GPU gets "
        f"{plan.rows_per_gpu:,} x {T:,} tokens of a step"
    )
    if config.minutes:
        yield f"note     --minutes measures a machine at the start of a run; this plan is for {steps:,} steps"
    layouts = [
        replace(plan, layout=replace(plan.layout, sharded=sharded, recompute=recompute))
        for sharded in ((False, True) if gpus > 1 else (False,))
        for recompute in (False, True)
    ]
    yield ""
    yield f"memory   GB on each GPU, which has {plan.gpu_bytes / 1e9:.1f}"
    yield from memory_table(layouts)
    yield ""
    if not plan.largest_micro_batch():
        fitting = next((layout for layout in layouts if layout.largest_micro_batch()), None)
        if fitting is None:
            yield "note     not even one row fits. Use more or larger GPUs, or a smaller model."
            return
        yield f"note     {plan.name}: not even one row fits. The rest of the plan is for {fitting.name}."
        plan = fitting
    low, high, source = mfu(plan)
    fast, slow = (tokens * flops_per_token / (gpus * peak * utilization) for utilization in (high, low))
    per_gpu = f", {_range(tokens / slow / gpus, tokens / fast / gpus, ',.0f')} per GPU" if gpus > 1 else ""
    yield (
        f"time     {plan.name}: {_range(fast / 3600, slow / 3600, ',.2f')} hours; "
        f"{_range(tokens / slow, tokens / fast, ',.0f')} tokens/s{per_gpu}, {_range(fast / steps, slow / steps, '.3g')} s per step"
    )
    yield f"         at {_range(low, high, '.1%')} MFU ({source})" + (
        "; a model this small will not reach that" if sizes.parameters < SMALL and not options.mfu else ""
    )
    validations, scores, evaluated = evaluations(plan)
    # a forward pass is a third of a training step
    evaluation = evaluated / 3 / tokens
    yield (
        f"         another {_range(evaluation * fast / 3600, evaluation * slow / 3600, ',.2f')} hours for {validations:,} "
        f"validations and {scores:,} HellaSwag scores, at the same MFU; checkpoints, and a network between nodes, are not "
        "counted"
    )
    least, most = (gpus * (1 + evaluation) * seconds / 3600 for seconds in (fast, slow))
    price = options.price
    cost = "" if price is None else f", {_range(least * price, most * price, ',.2f')} at {price:g} per GPU-hour"
    yield f"cost     {_range(least, most, ',.1f')} GPU-hours{cost}"
    if plan.layout.compiled:
        yield f"start    {compile_seconds(sizes.n_layer):.0f} s to compile with 16 cores, less the next time"
    if not config.is_demo_or_text and not shards.shard_paths(config.data, "train"):
        yield (
            f"data     none in {config.data} yet. For FineWeb-Edu, fineweb.py downloads {format_bytes(DOWNLOAD_BYTES)}, "
            f"{DOWNLOAD_BYTES / GIGABIT / 60:.0f} minutes at 1 Gbit/s, and encodes it, {ENCODE_MINUTES} minutes with two cores. "
            "That needs no GPU"
        )
    saved, saving = (count(sizes, config.optimizer) for count in (memory.checkpoint_bytes, memory.saving_bytes))
    yield (
        f"disk     {format_bytes(2 * tokens)} of tokens are read, {format_bytes(saved)} per checkpoint; writing one takes "
        f"{format_bytes(saving)} of the host's memory"
    )


def _range(low: float, high: float, form: str) -> str:
    """Formats both values, or one if they look the same."""
    ends = format(low, form), format(high, form)
    return ends[0] if ends[0] == ends[1] else " to ".join(ends)


def memory_table(layouts: Sequence[Plan]) -> Iterator[str]:
    """Yields a table of each layout's memory with the largest micro-batch that fits or, if none does, with one row."""
    columns = []
    for layout in layouts:
        B = layout.largest_micro_batch()
        parts = layout.memory_per_gpu(B or 1)
        gigabytes = (f"{part / 1e9:,.2f}" for part in (*parts, parts.total))
        columns.append([layout.name, *gigabytes, str(B or "none")])
    titles = ["", *parts._fields, "total", "batch size"]
    for title, *cells in zip(titles, *columns, strict=True):
        yield f"{title:<12}" + "".join(f"{cell:>17}" for cell in cells)
