"""The flags that a resumed run may change: files, evaluation, tracking, checkpoints, device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from support.cli import MAIN_GROUP, UserError, flag, flags_of
from support.runtime import devices

if TYPE_CHECKING:
    from train_gpt2 import TrainConfig

QUARTERS = "each quarter of the run with --minutes or --text"  # in the help of intervals
DEFAULT_PROMPT = "Hello, I'm a language model,"
# What the shards were made from. A resumed run keeps its shards, so it must not name a different source.
SOURCE_FLAGS = {"demo", "text", "text_field", "tokenizer"}
START_FLAGS = {"resume", "profile"}  # flags of one start, not of the run
STEP_FLAGS = ("max_steps", "decay_steps", "warmup_steps")  # a run of --minutes does not use them
# Flags of --plan, which exits before a run starts.
PLAN_FLAGS = {"plan", "gpus", "gpu", "peak", "price", "mfu"}


@dataclass(frozen=True)
class RunOptions:
    """Files, evaluation, tracking, checkpoints and device.

    A resumed run may change these, except SOURCE_FLAGS and --minutes. It may find its shards elsewhere, but they must be
    the same. "auto" and None leave the choice to the machine and are stored unchanged; `Machine` has what was chosen.
    """

    # fmt: off
    demo: bool = flag(False, "train a small model on Python's documentation, offline, in demo_data/ and log_demo/",
        MAIN_GROUP)
    text: str | None = flag(None, "train on this text file or folder, with settings that suit its size", MAIN_GROUP,
        default_help="train on the shards in --data", metavar="PATH")
    data: str = flag("edu_fineweb10B", "folder of token shards", MAIN_GROUP, metavar="DIR")
    out: str = flag("log", "folder for the log and the checkpoints", MAIN_GROUP, metavar="DIR")
    resume: str | None = flag(None,
        "resume from the newest checkpoint in --out; with auto, start a new run if there is none", MAIN_GROUP,
        default_help="a new run",
        hint="It takes no folder. To continue the run in DIR: python train_gpt2.py --resume --out DIR",
        choices=("newest", "auto"), nargs="?", const="newest", metavar="auto")
    fork: str | None = flag(None,
        "start a new run in --out from the weights, optimizer state and step of this checkpoint", MAIN_GROUP,
        default_help="no", metavar="CHECKPOINT")
    minutes: float | None = flag(None,
        "train for M minutes, however busy the machine is, instead of --max-steps", MAIN_GROUP,
        default_help="2 with --demo", at_least=0.1, below=1e6, metavar="M")
    batch_size: int | None = flag(None,
        "most sequences per micro-batch and device; fewer take less memory; the tokens per step stay the same", MAIN_GROUP,
        default_help="64 on CUDA, otherwise 4", at_least=1, below=2**31)
    text_field: str = flag("text", "JSON field or parquet column with the text, for --text", "text", metavar="FIELD")
    tokenizer: str | None = flag(None,
        "for --text: GPT-2's tokens, bytes, or bpe, which is trained on the text; for --init-from: the tokens of a model "
        "without tokenizer.json", "text",
        default_help="bpe up to 400 MB, otherwise gpt2; with --init-from, the model's", choices=("gpt2", "bytes", "bpe"))

    # None: at each quarter of the time, with --minutes
    val_every: int | None = flag(250, "steps between validations; 0: never", "evaluation",
        default_help=f"250; {QUARTERS}", at_least=0)
    val_tokens: int = flag(10485760, "tokens per validation, or the complete split if it has fewer", "evaluation",
        at_least=1)
    hellaswag_every: int | None = flag(None, "steps between HellaSwag scores; 0: never", "evaluation",
        default_help="250 on CUDA or with --hellaswag-data or --hellaswag-limit, otherwise 0", at_least=0)
    hellaswag_data: str | None = flag(None, "HellaSwag items, a .jsonl file", "evaluation",
        default_help="download them once", metavar="FILE")
    hellaswag_limit: int | None = flag(None, "score only the first N HellaSwag items", "evaluation", default_help="all",
        at_least=1)
    sample_every: int | None = flag(250, "steps between samples; 0: never", "evaluation",
        default_help=f"250; {QUARTERS}; 0 with --demo", at_least=0)
    prompt: str | None = flag(None, "text that samples continue", "evaluation", may_be_empty=True,
        default_help=f'"{DEFAULT_PROMPT}"; with --text, the first words of a held-out line; with --demo, "The"', metavar="TEXT")

    log_every: int | None = flag(None, "steps between lines on the console", "tracking",
        default_help="every step; on a terminal, about one in ten seconds", at_least=1, below=2**31)
    tensorboard: bool = flag(False, "write curves and samples for TensorBoard to --out", "tracking")
    wandb: str | None = flag(None, "log to this Weights & Biases project; without a name, to gpt2", "tracking",
        default_help="off", metavar="PROJECT", nargs="?", const="gpt2")

    checkpoint_every: int | None = flag(5000, "steps between checkpoints; 0: never, not even when the run is stopped",
        "checkpoints", default_help=f"5000; {QUARTERS}", at_least=0)
    keep: int = flag(0,
        "keep the newest N checkpoints, the one with the best validation loss, and the one before a cooldown; 0: all",
        "checkpoints", at_least=0)
    max_bad_steps: int = flag(3, "end the run after N skipped steps in a row (loss or gradients not finite)",
        "checkpoints", at_least=1)

    device: str = flag("auto", "where to train", "device", default_help="auto, the best available",
        choices=devices.DEVICES)
    dtype: str = flag("auto", "precision of matrix products", "device",
        default_help="auto, the fastest that the device supports natively", choices=("auto", "fp32", "bf16", "fp16"))
    parallel: str = flag("ddp", "with several processes: ddp replicates the weights, fsdp shards them", "device",
        choices=("ddp", "fsdp"))
    recompute: bool = flag(False,
        "recompute the activations of the blocks in the backward pass: less memory, more time", "device",
        negatable=True)
    tf32: bool = flag(True, "use TF32 on CUDA for the matrix products that stay in fp32", "device")
    compile: bool | None = flag(None, "torch.compile the model", "device", default_help="on with CUDA")
    profile: int = flag(0, "profile N steps, after the first 3, into trace.json.gz in --out; 0: none", "device",
        at_least=0)

    plan: bool = flag(False, "print what the run will take (memory, time, cost), and exit", "plan")
    gpus: int = flag(1, "number of GPUs to plan for", "plan", default_help="1; under torchrun, its number of processes",
        at_least=1, below=2**31)
    gpu: str = flag("A100", "GPU to plan for; A100 and H100 have 80 GB", "plan", choices=tuple(devices.GPU_FLAGS))
    peak: float | None = flag(None, "peak of a GPU that --gpu lacks, in TFLOP/s (bf16, not sparse); its memory is that of --gpu",
        "plan", default_help="that of --gpu", at_least=1, at_most=1e6)
    price: float | None = flag(None, "price of a GPU-hour to plan with, in any currency", "plan", default_help="none",
        at_least=0, at_most=1e6)
    mfu: float | None = flag(None, "model FLOPs utilization to plan with, such as 0.4", "plan",
        default_help="the range that was measured on such GPUs", at_least=0.001, at_most=1)
    # fmt: on

    @property
    def starts_fork(self) -> bool:
        """Whether this process starts the run from another run's checkpoint; a resumed fork is a run like any other."""
        return self.fork is not None and self.resume != "newest"

    def to_dict(self) -> dict[str, Any]:
        """Returns the value of each flag of a run, without --plan and its flags."""
        return {name: getattr(self, name) for name in flags_of(type(self)) if name not in PLAN_FLAGS}

    def used_flags(self) -> dict[str, Any]:
        """Returns the flags of `to_dict`. For a run of --minutes, the flags that count steps are left out."""
        unused = STEP_FLAGS if self.minutes else ()
        return {name: value for name, value in self.to_dict().items() if name not in unused}


def changed_flags(
    config_class: type[RunOptions], before: Mapping[str, Any], after: Mapping[str, Any]
) -> list[tuple[str, Any, Any]]:
    """Returns the name, old value and new value of each flag of a run whose value in `after` differs from `before`."""
    both = [(name, before.get(name, flag.default)) for name, flag in flags_of(config_class).items()]
    changed = [(name, had, after[name]) for name, had in both if name in after and after[name] != had]
    return [change for change in changed if change[0] not in START_FLAGS | {"fork"}]


def check_consistent(config: TrainConfig) -> None:
    """Checks values that depend on each other.

    Raises:
        UserError: some contradict each other; one line for each problem.
    """
    problems = []
    if config.n_embd % config.n_head:
        problems.append(f"--n-embd {config.n_embd} is not a multiple of --n-head {config.n_head}. Change one.")
    if config.max_passes and not config.minutes:
        problems.append("--max-passes is for runs of --minutes. Leave it out, and give the length with --max-steps.")
    if config.min_lr > config.max_lr:
        problems.append(f"--min-lr {config.min_lr:g} is above --max-lr {config.max_lr:g}. Lower it.")
    if config.adamw_lr is not None and (config.optimizer != "muon" or config.max_lr == 0):
        problems.append("--adamw-lr is for --optimizer muon with a --max-lr above 0. Use --max-lr alone.")
    if config.lora_rank is None and config.lora_alpha != type(config).lora_alpha:
        problems.append("--lora-alpha is for LoRA. Add --lora-rank, or leave out --lora-alpha.")
    if config.lora_rank is not None and config.optimizer == "muon":
        problems.append("Muon does not suit LoRA's small matrices. Use --optimizer adamw, and --recipe gpt2.")
    if config.lora_rank is not None and config.lora_rank > config.n_embd:
        problems.append(f"--lora-rank {config.lora_rank} is more than the model's {config.n_embd} channels. Lower it.")
    if problems:
        raise UserError(*problems)
