"""The options of train_gpt2.py: files, evaluation, tracking, checkpoints, device and plan. Its recipe is in the script.

Importing this takes no time: it needs no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from support.cli import MAIN_GROUP, Flag, flag, flags_of
from support.gpus import GPU_FLAGS

T = TypeVar("T")

QUARTERS = "each quarter of the run with --minutes or --text"  # in the help of intervals
DEFAULT_PROMPT = "Hello, I'm a language model,"
DEVICES = ("auto", "cuda", "cpu", "mps")


def option(default: T, help: str, group: str, **rules: Any) -> T:
    """Returns a flag that a resumed run may change."""
    return flag(default, help, group, resume="changes", **rules)


@dataclass(frozen=True, kw_only=True)
class Options:
    """Files, evaluation, tracking, checkpoints and device.

    "auto" and None leave the choice to the machine and are stored unchanged; `Machine` has what was chosen.
    """

    # fmt: off
    demo: bool = flag(False, "train a small model on the documentation of Python and PyTorch, offline, in demo_data/ and log_demo/",
        MAIN_GROUP, fork="brings")
    text: str | None = flag(None, "train on this text file or folder, with settings that suit its size", MAIN_GROUP,
        default_help="train on the shards in --data", metavar="PATH", per_node=True)
    data: str = option("edu_fineweb10B", "folder of token shards", MAIN_GROUP, metavar="DIR", per_node=True)
    out: str = option("log", "folder for the log and the checkpoints", MAIN_GROUP, metavar="DIR", per_node=True)
    resume: str | None = option(None,
        "resume from the newest checkpoint in --out; with auto, start a new run if there is none", MAIN_GROUP,
        default_help="a new run",
        hint="It takes no folder. To continue the run in DIR: python train_gpt2.py --resume --out DIR",
        choices=("newest", "auto"), nargs="?", const="newest", metavar="auto", stored=False)
    fork: str | None = flag(None,
        "start a new run in --out from the weights, optimizer state and step of this checkpoint", MAIN_GROUP,
        default_help="no", metavar="CHECKPOINT", per_node=True)
    minutes: float | None = flag(None,
        "train for M minutes, however busy the machine is, instead of --max-steps", MAIN_GROUP,
        default_help="2 with --demo", at_least=0.1, below=1e6, metavar="M")
    batch_size: int | None = option(None,
        "most sequences per micro-batch and device; fewer take less memory; the tokens per step stay the same", MAIN_GROUP,
        default_help="64 on CUDA, otherwise 4", at_least=1, below=2**31)
    text_field: str = flag("text", "JSON field or parquet column with the text, for --text", "text", metavar="FIELD")
    tokenizer: str | None = flag(None,
        "for --text: GPT-2's tokens, bytes, or bpe, which is trained on the text; for --init-from: the tokens of a model "
        "without tokenizer.json", "text",
        default_help="bpe up to 400 MB, otherwise gpt2; with --init-from, the model's", choices=("gpt2", "bytes", "bpe"),
        fork="brings")

    # None: at each quarter of the time, with --minutes
    val_every: int | None = option(250, "steps between validations; 0: never", "evaluation",
        default_help=f"250; {QUARTERS}", at_least=0)
    val_tokens: int = option(10485760, "tokens per validation, or the complete split if it has fewer", "evaluation",
        at_least=1)
    hellaswag_every: int | None = option(None, "steps between HellaSwag scores; 0: never", "evaluation",
        default_help="250 on CUDA or with --hellaswag-data or --hellaswag-limit, otherwise 0", at_least=0)
    hellaswag_data: str | None = option(None, "HellaSwag items, a .jsonl file", "evaluation",
        default_help="download them once", metavar="FILE", per_node=True)
    hellaswag_limit: int | None = option(None, "score only the first N HellaSwag items", "evaluation", default_help="all",
        at_least=1)
    sample_every: int | None = option(250, "steps between samples; 0: never", "evaluation",
        default_help=f"250; {QUARTERS}; 0 with --demo", at_least=0)
    prompt: str | None = option(None, "text that samples continue", "evaluation", may_be_empty=True,
        default_help=f'"{DEFAULT_PROMPT}"; with --text, the first words of a held-out line; with --demo, "The"', metavar="TEXT")

    log_every: int | None = option(None, "steps between lines on the console", "tracking",
        default_help="every step; on a terminal, about one in ten seconds", at_least=1, below=2**31)
    tensorboard: bool = option(False, "write curves and samples for TensorBoard to --out", "tracking")
    wandb: str | None = option(None, "log to this Weights & Biases project; without a name, to gpt2", "tracking",
        default_help="off", metavar="PROJECT", nargs="?", const="gpt2")

    checkpoint_every: int | None = option(5000, "steps between checkpoints; 0: never, not even when the run is stopped",
        "checkpoints", default_help=f"5000; {QUARTERS}", at_least=0)
    keep: int = option(0,
        "keep the newest N checkpoints, the one with the best validation loss, and the one before a cooldown; 0: all",
        "checkpoints", at_least=0)
    max_bad_steps: int = option(3, "end the run after N skipped steps in a row (loss or gradients not finite)",
        "checkpoints", at_least=1)

    device: str = option("auto", "where to train", "device", default_help="auto, the best available",
        choices=DEVICES)
    dtype: str = option("auto", "precision of matrix products", "device",
        default_help="auto, the fastest that the device supports natively", choices=("auto", "fp32", "bf16", "fp16"))
    parallel: str = option("ddp", "with several processes: ddp replicates the weights, fsdp shards them", "device",
        choices=("ddp", "fsdp"))
    recompute: bool = option(False,
        "recompute the activations of the blocks in the backward pass: less memory, more time", "device",
        negatable=True)
    tf32: bool = option(True, "use TF32 on CUDA for the matrix products that stay in fp32", "device")
    compile: bool | None = option(None, "torch.compile the model", "device", default_help="on with CUDA")
    cuda_graphs: bool = option(True, "launch the steps of a small model as CUDA graphs, on one GPU", "device")
    profile: int = option(0, "profile N steps, after the first 3, into trace.json.gz in --out; 0: none", "device",
        at_least=0, stored=False)
    # fmt: on

    @property
    def has_preset(self) -> bool:
        """Whether --demo or --text chooses what other flags leave open, and makes the shards."""
        return self.demo or self.text is not None

    def to_dict(self) -> dict[str, Any]:
        """Returns the value of each flag, those of the recipe among them."""
        return {name: getattr(self, name) for name in flags_of(type(self))}

    def used_flags(self) -> dict[str, Any]:
        """Returns the flags of `to_dict`. For a run of --minutes, the flags that count steps are left out."""
        flags = flags_of(type(self))
        return {
            name: value for name, value in self.to_dict().items() if not (self.minutes and flags[name].counts_steps)
        }


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """What --plan plans for. It exits before a run starts."""

    # fmt: off
    plan: bool = flag(False, "print what the run will take (memory, time, cost), and exit", "plan")
    gpus: int = flag(1, "number of GPUs to plan for", "plan", default_help="1; under torchrun, its number of processes",
        at_least=1, below=2**31)
    gpu: str = flag("A100", "GPU to plan for; A100 and H100 have 80 GB", "plan", choices=tuple(GPU_FLAGS))
    peak: float | None = flag(None, "peak of a GPU that --gpu lacks, in TFLOP/s (bf16, not sparse); its memory is that of --gpu",
        "plan", default_help="that of --gpu", at_least=1, at_most=1e6)
    price: float | None = flag(None, "price of a GPU-hour to plan with, in any currency", "plan", default_help="none",
        at_least=0, at_most=1e6)
    mfu: float | None = flag(None, "model FLOPs utilization to plan with, such as 0.4", "plan",
        default_help="the range that was measured on such GPUs", at_least=0.001, at_most=1)
    # fmt: on


def changed_flags(
    flags: Mapping[str, Flag], before: Mapping[str, Any], after: Mapping[str, Any]
) -> list[tuple[str, Any, Any]]:
    """Returns the name, old value and new value of each flag of a run whose value in `after` differs from `before`."""
    of_run = {name: before.get(name, flag.default) for name, flag in flags.items() if flag.stored and name != "fork"}
    unused = {name for name, flag in flags.items() if flag.counts_steps and before.get("minutes")}
    return [
        (name, had, after[name])
        for name, had in of_run.items()
        if name in after and after[name] != had and name not in unused
    ]
