"""The flags that a resumed run may change: files, evaluation, tracking, checkpoints, device."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch

from support.cli import MAIN_GROUP, UserError, flag, flag_fields
from support.data import presets
from support.runtime import devices

if TYPE_CHECKING:
    from support.checkpoints.state import TrainState

QUARTERS = "four times with --text"  # in the help of intervals
DEFAULT_PROMPT = "Hello, I'm a language model,"
# Their defaults depend on the machine, so a resumed run chooses them anew unless they were explicit.
MACHINE_FLAGS = {"device", "dtype", "compile", "batch_size", "hellaswag_every"}
# What the shards were made from. A resumed run keeps these, so it must not name anything else.
SOURCE_FLAGS = {"text", "text_field", "tokenizer"}
START_FLAGS = {"resume", "fork", "profile"}  # of one start, not of the run
# Those of --plan, which ends before a run.
PLAN_FLAGS = {"plan", "gpus", "gpu", "price", "mfu"}


class Recipe(presets.PresetConfig):
    """The fields of TrainConfig that support reads, besides those of RunOptions; their defaults are there."""

    recipe: str
    n_head: int
    block_size: int
    bias: bool
    lora_rank: int | None
    lora_alpha: float
    warmup_steps: int
    cooldown_fraction: float
    decay_steps: int
    schedule: str
    max_lr: float
    adamw_lr: float | None
    min_lr: float
    optimizer: str

    @property
    def cooldown_start(self) -> float:
        raise NotImplementedError


@dataclass(frozen=True)
class RunOptions(Recipe):
    """Files, evaluation, tracking, checkpoints and device.

    A resumed run may change these, except SOURCE_FLAGS. Its shards are compared, wherever they are now.
    """

    demo: bool = flag(
        False, "train a small model on Python's documentation, offline, in demo_data/ and log_demo/", MAIN_GROUP
    )
    text: str | None = flag(
        None,
        "train on this text file or folder, with settings that suit its size",
        MAIN_GROUP,
        default_help="train on the shards in --data",
        metavar="PATH",
    )
    data: str = flag("edu_fineweb10B", "folder of token shards", MAIN_GROUP, metavar="DIR")
    out: str = flag("log", "folder for the log and the checkpoints", MAIN_GROUP, metavar="DIR")
    resume: str | None = flag(
        None,
        "resume from the newest checkpoint in --out; with auto, start a new run if there is none",
        MAIN_GROUP,
        default_help="a new run",
        hint="It takes no folder: it continues the run in --out, as python train_gpt2.py --resume --out DIR does.",
        choices=("newest", "auto"),
        nargs="?",
        const="newest",
        metavar="auto",
    )
    fork: str | None = flag(
        None,
        "start a run of its own, in --out, from the weights, optimizer and step of this checkpoint",
        MAIN_GROUP,
        default_help="no",
        metavar="CHECKPOINT",
    )
    minutes: float | None = flag(
        None,
        "train for M minutes, whatever the machine does meanwhile, instead of --max-steps",
        MAIN_GROUP,
        default_help="2 with --demo",
        at_least=0.1,
        below=1e6,
        metavar="M",
    )
    batch_size: int = flag(
        64,
        "sequences of a micro-batch on one device; fewer take less memory, and a step has the same tokens",
        MAIN_GROUP,
        default_help="64 on CUDA, otherwise 4",
        at_least=1,
        below=2**31,
    )
    text_field: str = flag("text", "JSON field or parquet column with the text, for --text", "text", metavar="FIELD")
    tokenizer: str = flag(
        "gpt2",
        "for --text: GPT-2's tokens, bytes, or bpe, which is trained on the text",
        "text",
        default_help="bpe up to 400 MB, then gpt2; that of --init-from",
        choices=("gpt2", "bytes", "bpe"),
    )

    # Where an interval is None, a run of --minutes does this at quarters of its time.
    val_every: int | None = flag(
        250, "steps between validations; 0: never", "evaluation", default_help=f"250; {QUARTERS}", at_least=0
    )
    val_tokens: int = flag(
        10485760, "tokens per validation, or the complete split if it has fewer", "evaluation", at_least=1
    )
    hellaswag_every: int = flag(
        250,
        "steps between HellaSwag scores; 0: never",
        "evaluation",
        default_help="250 on CUDA or with --hellaswag-data or --hellaswag-limit, otherwise 0",
        at_least=0,
    )
    hellaswag_data: str | None = flag(
        None, "HellaSwag items, a .jsonl file", "evaluation", default_help="download them once", metavar="FILE"
    )
    hellaswag_limit: int | None = flag(
        None, "score only the first N HellaSwag items", "evaluation", default_help="all", at_least=1
    )
    sample_every: int | None = flag(
        250, "steps between samples; 0: never", "evaluation", default_help=f"250; {QUARTERS}; 0 with --demo", at_least=0
    )
    prompt: str | None = flag(
        None,
        "text that samples continue",
        "evaluation",
        default_help=f'"{DEFAULT_PROMPT}"; with --text, the first words of a line of the held-out text',
        metavar="TEXT",
    )

    log_every: int | None = flag(
        None,
        "steps between lines on the console",
        "tracking",
        default_help="every step; on a terminal, about one in ten seconds",
        at_least=1,
        below=2**31,
    )
    tensorboard: bool = flag(False, "write curves and samples for TensorBoard to --out", "tracking")
    wandb: str | None = flag(
        None,
        "log to this Weights & Biases project; without a name, to gpt2",
        "tracking",
        default_help="off",
        metavar="PROJECT",
        nargs="?",
        const="gpt2",
    )

    checkpoint_every: int | None = flag(
        5000,
        "steps between checkpoints; 0: never, not even when the run is stopped",
        "checkpoints",
        default_help=f"5000; {QUARTERS}",
        at_least=0,
    )
    keep: int = flag(
        0,
        "keep the newest N checkpoints, the one with the best validation loss, and the one before a cooldown; 0: all",
        "checkpoints",
        at_least=0,
    )
    max_bad_steps: int = flag(
        3, "skipped steps in a row (loss or gradients not finite) that end the run", "checkpoints", at_least=1
    )

    device: str = flag(
        "cuda",
        "where to train",
        "device",
        default_help="auto, the best available",
        choices=("auto", "cuda", "cpu", "mps"),
    )
    dtype: str = flag(
        "bf16",
        "precision of matrix products",
        "device",
        default_help="auto, the fastest that the device has natively",
        choices=("auto", "fp32", "bf16", "fp16"),
    )
    parallel: str = flag(
        "ddp",
        "several processes: with ddp each has all weights, with fsdp a part of them",
        "device",
        choices=("ddp", "fsdp"),
    )
    recompute: bool = flag(
        False,
        "recompute the activations of the blocks in the backward pass: less memory, more time",
        "device",
        action=argparse.BooleanOptionalAction,
    )
    tf32: bool = flag(True, "TF32 on CUDA for the matrix products that stay in fp32", "device")
    compile: bool = flag(True, "torch.compile the model", "device", default_help="on with CUDA")
    profile: int = flag(
        0, "profile N steps, after the first 3, into trace.json.gz in --out; 0: none", "device", at_least=0
    )

    plan: bool = flag(False, "print what the run will take (memory, time, cost, network), and exit", "plan")
    gpus: int = flag(
        1,
        "number of GPUs to plan for",
        "plan",
        default_help="1; under torchrun, its processes",
        at_least=1,
        below=2**31,
    )
    gpu: str = flag("A100", "GPU to plan for; A100 and H100 have 80 GB", "plan", choices=tuple(devices.GPU_FLAGS))
    price: float | None = flag(
        None, "price of a GPU-hour to plan with, in any currency", "plan", default_help="none", at_least=0, at_most=1e6
    )
    mfu: float | None = flag(
        None,
        "model FLOPs utilization to plan with, such as 0.4",
        "plan",
        default_help="one published for this GPU, or 0.4",
        at_least=0.001,
        at_most=1,
    )

    explicit: frozenset[str] = frozenset()  # names of the flags set by the command line, a preset or the checkpoint

    def is_over(self, state: TrainState) -> bool:
        """Whether the run has done its last step, or its time is over."""
        return state.progress >= 1 if self.minutes else state.step >= self.max_steps

    def is_due(self, every: int | None, state: TrainState) -> bool:
        """Whether what happens every so often is due before a step: never with 0, and after the last step otherwise."""
        if every is None:
            return any(state.has_passed(n / 4) for n in range(4)) or self.is_over(state)
        return every > 0 and (state.step % every == 0 or self.is_over(state))

    def is_before_cooldown(self, state: TrainState) -> bool:
        """Whether no step of a wsd schedule's cooldown has been done: a longer run can start here."""
        last = state.last_progress if state.last_progress >= 0 else state.progress
        return self.schedule == "wsd" and last <= self.cooldown_start

    def checkpoint_due(self, state: TrainState) -> bool:
        """Whether a checkpoint is due before a step: every so often, after the last one, and before a cooldown."""
        before_cooldown = self.schedule == "wsd" and state.has_passed(self.cooldown_start)
        return self.is_due(self.checkpoint_every, state) or before_cooldown and self.checkpoint_every != 0

    def to_dict(self) -> dict[str, Any]:
        """The value of each flag."""
        return {field.name: getattr(self, field.name) for field in fields(self) if "group" in field.metadata}

    def to_save(self) -> dict[str, Any]:
        """What a checkpoint stores of them."""
        left_out = PLAN_FLAGS | MACHINE_FLAGS - self.explicit
        return {name: value for name, value in self.to_dict().items() if name not in left_out}


def changed_flags(
    config_class: type[RunOptions], before: Mapping[str, Any], after: Mapping[str, Any]
) -> list[tuple[str, Any, Any]]:
    """Name, old value and new value of each flag of a run that is in `after` and has another value than `before`."""
    both = [(field.name, before.get(field.name, field.default)) for field in flag_fields(config_class)]
    changed = [(name, had, after[name]) for name, had in both if name in after and after[name] != had]
    return [change for change in changed if change[0] not in START_FLAGS]


def check_consistent(config: RunOptions) -> None:
    """Checks values that depend on each other.

    Raises:
        UserError: some contradict each other, one line each.
    """
    problems = []
    if config.n_embd % config.n_head:
        problems.append(f"--n-embd {config.n_embd} is not a multiple of --n-head {config.n_head}. Change one.")
    if config.min_lr > config.max_lr:
        problems.append(f"--min-lr {config.min_lr:g} is above --max-lr {config.max_lr:g}. Lower it.")
    if config.adamw_lr is not None and (config.optimizer != "muon" or config.max_lr == 0):
        problems.append("--adamw-lr is for --optimizer muon with a --max-lr above 0. Use --max-lr alone.")
    if config.lora_rank is not None and config.lora_rank > config.n_embd:
        problems.append(f"--lora-rank {config.lora_rank} is more than the model's {config.n_embd} channels. Lower it.")
    if problems:
        raise UserError(*problems)


def describe_speed(config: RunOptions, device: torch.device) -> dict[str, str]:
    """What decides the speed of a run: whether it is compiled or why not, and which attention it has."""
    off = "as by default on a CPU, and where a run is too short for it; --compile turns it on"
    reason = devices.why_not_compile(device) if config.compile else off
    dtype = devices.DTYPES[config.dtype]
    attention = devices.describe_attention(device, dtype, config.n_head, config.n_embd, config.block_size)
    return {"compiled": f"no ({reason})" if reason else "yes", "attention": attention}
