"""The flags of train_gpt2.py: what each is, what may happen to it, and where its value comes from.

Importing this takes no time: it needs no torch. The numbers of models and recipes are in two tables in the script.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass
from typing import Any

from support.cli import MAIN_GROUP, Flag, UserError, flag, flags_of
from support.gpus import GPU_FLAGS

DEFAULT_PROMPT = "Hello, I'm a language model,"
DEVICES = ("auto", "cuda", "cpu", "mps")
QUARTERS = "each quarter of the run with --minutes or --text"  # in the help of intervals

# -----------------------------------------------------------------------------
# The flags. `Flag` in cli.py explains the rules; docs/training.md has a table of what may happen to which flag.


class Group:
    """A group of flags in --help, and the rules that most of its flags share. A call returns a field that is a flag."""

    def __init__(self, name: str, **rules: Any):
        self.name, self.rules = name, rules

    def __call__(self, default: Any, help: str, **rules: Any) -> Any:
        return flag(default, help, self.name, **self.rules | rules)


MAIN, TEXT = Group(MAIN_GROUP), Group("text")
MODEL = Group("model", fork="keeps", init_from="brings")
SCHEDULE, OPTIMIZER, RANDOMNESS = Group("schedule"), Group("optimizer"), Group("randomness")
EVALUATION, TRACKING = Group("evaluation", resume="changes"), Group("tracking", resume="changes")
CHECKPOINTS, DEVICE = Group("checkpoints", resume="changes"), Group("device", resume="changes")
PLAN = Group("plan")

IN_TABLE: Any = MISSING  # as a default: a table in train_gpt2.py has the value, or `resolve` computes it
COUNT = {"at_least": 1, "below": 2**31}
STEPS = {"at_least": 1, "at_most": 2**31 - 1, "counts_steps": True}
FRACTION, PROBABILITY = {"at_least": 0, "at_most": 1}, {"at_least": 0, "below": 1}


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A run: everything that flags set, resolved. It never changes.

    "auto" and None leave the choice to the machine and are stored unchanged; `Machine` has what was chosen.
    """

    # fmt: off
    demo: bool = MAIN(False, "train a small model on the documentation of Python and PyTorch, offline, in demo_data/ and log_demo/",
        fork="brings")
    text: str | None = MAIN(None, "train on this text file or folder, with settings that suit its size",
        default_help="train on the shards in --data", metavar="PATH", per_node=True)
    data: str = MAIN("edu_fineweb10B", "folder of token shards", resume="changes", metavar="DIR", per_node=True, set_by="text demo")
    out: str = MAIN("log", "folder for the log and the checkpoints", resume="changes", metavar="DIR", per_node=True, set_by="demo")
    resume: str | None = MAIN(None, "resume from the newest checkpoint in --out; with auto, start a new run if there is none",
        default_help="a new run", hint="It takes no folder. To continue the run in DIR: python train_gpt2.py --resume --out DIR",
        resume="changes", choices=("newest", "auto"), nargs="?", const="newest", metavar="auto", stored=False)
    fork: str | None = MAIN(None, "start a new run in --out from the weights, optimizer state and step of this checkpoint",
        default_help="no", metavar="CHECKPOINT", per_node=True)
    minutes: float | None = MAIN(None, "train for M minutes, however busy the machine is, instead of --max-steps; with --text or --demo, the model, the "
        "size of a step, rates and dropout suit that time",
        default_help="none", at_least=0.1, below=1e6, metavar="M", set_by="demo")
    batch_size: int | None = MAIN(None,
        "most sequences per micro-batch and device; fewer take less memory; the tokens per step stay the same",
        default_help="64 on CUDA, otherwise 4", resume="changes", set_by="text demo", **COUNT)
    model: str = MAIN("gpt2", "model size", fork="brings", init_from="brings")
    init_from: str | None = MAIN(None, "pretrained weights to start from: a hub name or a checkpoint directory",
        default_help="random weights", metavar="NAME_OR_DIR", fork="brings", per_node=True)
    recipe: str = MAIN("gpt2", "how to train: as GPT-2, or fast, with Muon and a constant rate with a cooldown, which took small models half of the tokens",
        set_by="text demo")
    max_steps: int = MAIN(IN_TABLE, "total steps", set_by="text demo", **STEPS)

    text_field: str = TEXT("text", "JSON field or parquet column with the text, for --text", metavar="FIELD")
    tokenizer: str | None = TEXT(None,
        "for --text: GPT-2's tokens, bytes, or bpe, which is trained on the text; for --init-from: the tokens of a model "
        "without tokenizer.json", default_help="bpe up to 400 MB, otherwise gpt2; with --init-from, the model's",
        choices=("gpt2", "bytes", "bpe"), fork="brings")

    n_layer: int = MODEL(IN_TABLE, "layers", at_least=1, at_most=10_000, set_by="model text demo")
    n_head: int = MODEL(IN_TABLE, "heads", set_by="model text demo", **COUNT)
    n_embd: int = MODEL(IN_TABLE, "channels", set_by="model text demo", **COUNT)
    block_size: int = MODEL(1024, "context length in tokens", init_from="changes",  # to a shorter one
        default_help="1024; the model's with --init-from", set_by="text demo", **COUNT)
    bias: bool = MODEL(True, "biases in linear layers and layer norms")
    # GPT-2 had 0.1; text that is seen only once needs none
    dropout: float = MODEL(0.0, "dropout probability", fork="changes", init_from="changes", set_by="text demo", **PROBABILITY)
    lora_rank: int | None = MODEL(None, "train only LoRA matrices of this rank, next to c_attn and c_proj",
        default_help="train all weights", init_from="changes", **COUNT)
    lora_alpha: float = MODEL(16.0, "LoRA alpha (scale = alpha / rank)", init_from="changes", at_least=0)

    total_batch_size: int = SCHEDULE(IN_TABLE, "tokens per optimizer step, over all devices", at_least=1, set_by="text demo")
    max_passes: float = SCHEDULE(0.0, "end a run of --minutes after P passes over the data, its cooldown included; 0: no limit",
        default_help="0; with --text, 10 without dropout, 25 with it", at_least=0, below=1e6, metavar="P")
    warmup_steps: int = SCHEDULE(IN_TABLE, "steps of linear warm-up", at_least=0, counts_steps=True, set_by="text demo")
    schedule: str = SCHEDULE(IN_TABLE, "after the warm-up: cosine decay, or a constant rate and a linear cooldown",
        choices=("cosine", "wsd"), follows="recipe")
    decay_steps: int = SCHEDULE(IN_TABLE, "step at which the cosine or the cooldown ends", default_help="--max-steps", **STEPS)
    cooldown_fraction: float = SCHEDULE(0.4, "wsd's cooldown, as a fraction of the run", set_by="text demo", **FRACTION)
    max_lr: float = SCHEDULE(IN_TABLE, "peak learning rate; of Muon alone if there is an --adamw-lr", at_least=0,
        set_by="text demo", follows="recipe")
    adamw_lr: float | None = SCHEDULE(None, "AdamW's peak learning rate with --optimizer muon", at_least=0,
        default_help="--max-lr", set_by="text demo", follows="recipe optimizer")
    min_lr: float = SCHEDULE(IN_TABLE, "final learning rate", default_help="a tenth of --max-lr; a fiftieth with wsd", at_least=0,
        follows="recipe optimizer schedule max_lr")

    optimizer: str = OPTIMIZER(IN_TABLE, "AdamW; or Muon for the blocks' matrices, and AdamW for the rest",
        choices=("adamw", "muon"), follows="recipe")
    weight_decay: float = OPTIMIZER(IN_TABLE, "weight decay of tensors with 2 or more dimensions", at_least=0,
        set_by="text demo", follows="recipe optimizer")
    beta1: float = OPTIMIZER(IN_TABLE, "AdamW's beta1", **PROBABILITY)
    beta2: float = OPTIMIZER(IN_TABLE, "AdamW's beta2", **PROBABILITY)
    grad_clip: float = OPTIMIZER(IN_TABLE, "largest gradient norm; 0: no clipping", at_least=0)
    seed: int = RANDOMNESS(1337, "seed for weights, shuffling, dropout and samples", at_least=0, below=2**32)
    shuffle: bool = RANDOMNESS(False, "in every epoch, read shards and their rows in a new random order, cut at new places",
        negatable=True, set_by="text demo")

    # None: at each quarter of the time, with --minutes
    val_every: int | None = EVALUATION(250, "steps between validations; 0: never", default_help=f"250; {QUARTERS}", at_least=0,
        set_by="text demo")
    val_tokens: int = EVALUATION(10485760, "tokens per validation, or the complete split if it has fewer", at_least=1,
        set_by="demo")
    hellaswag_every: int | None = EVALUATION(None, "steps between HellaSwag scores; 0: never",
        default_help="250 on CUDA or with --hellaswag-data or --hellaswag-limit, otherwise 0", at_least=0, set_by="demo")
    hellaswag_data: str | None = EVALUATION(None, "HellaSwag items, a .jsonl file", default_help="download them once",
        metavar="FILE", per_node=True)
    hellaswag_limit: int | None = EVALUATION(None, "score only the first N HellaSwag items", default_help="all", at_least=1)
    sample_every: int | None = EVALUATION(250, "steps between samples; 0: never", default_help=f"250; {QUARTERS}", at_least=0,
        set_by="text demo")
    prompt: str | None = EVALUATION(None, "text that samples continue", may_be_empty=True, metavar="TEXT",
        default_help=f'"{DEFAULT_PROMPT}"; with --text, the first words of a held-out line; with --demo, "The"')

    log_every: int | None = TRACKING(None, "steps between lines on the console",
        default_help="every step; on a terminal, about one in ten seconds", **COUNT)
    tensorboard: bool = TRACKING(False, "write curves and samples for TensorBoard to --out")
    wandb: str | None = TRACKING(None, "log to this Weights & Biases project; without a name, to gpt2", default_help="off",
        metavar="PROJECT", nargs="?", const="gpt2")

    checkpoint_every: int | None = CHECKPOINTS(5000, "steps between checkpoints; 0: never, not even when the run is stopped",
        default_help=f"5000; {QUARTERS}", at_least=0, set_by="text demo")
    checkpoint_minutes: float = CHECKPOINTS(30.0,
        "save, too, when the newest checkpoint is M minutes old; such a checkpoint is removed after the next one; 0: never",
        at_least=0, below=1e6, metavar="M")
    keep: int = CHECKPOINTS(0,
        "keep the newest N checkpoints, the one with the best validation loss, and the one before a cooldown; 0: all",
        at_least=0, set_by="text")
    max_bad_steps: int = CHECKPOINTS(3, "end the run after N skipped steps in a row (loss or gradients not finite)", at_least=1)

    device: str = DEVICE("auto", "where to train", default_help="auto, the best available", choices=DEVICES)
    dtype: str = DEVICE("auto", "precision of matrix products", choices=("auto", "fp32", "bf16", "fp16"),
        default_help="auto, the fastest that the device supports natively")
    parallel: str = DEVICE("ddp", "with several processes: ddp replicates the weights, fsdp shards them", choices=("ddp", "fsdp"))
    recompute: bool = DEVICE(False, "recompute the activations of the blocks in the backward pass: less memory, more time",
        negatable=True)
    tf32: bool = DEVICE(True, "use TF32 on CUDA for the matrix products that stay in fp32")
    compile: bool | None = DEVICE(None, "torch.compile the model", default_help="on with CUDA, but for short runs")
    cuda_graphs: bool = DEVICE(True, "launch the steps of a small model as CUDA graphs, on one GPU")
    profile: int = DEVICE(0, "profile N steps, after the first 3, into trace.json.gz in --out; 0: none", at_least=0, stored=False)
    # fmt: on

    @property
    def is_demo_or_text(self) -> bool:
        """Whether --demo or --text chooses what other flags leave open, and makes the shards."""
        return self.demo or self.text is not None

    @property
    def has_cooldown(self) -> bool:
        """Whether the rate stays up until a cooldown, so that a longer run can start before it."""
        return self.schedule in COOLDOWN_SCHEDULES

    @property
    def step_rows(self) -> int:
        """Rows of the training data in a step, over all devices."""
        return self.total_batch_size // self.block_size

    def shards_weights(self, world_size: int) -> bool:
        """Returns whether so many processes divide the weights among them, by FSDP."""
        return self.parallel == "fsdp" and world_size > 1

    def check(self) -> None:
        """Raises a UserError if values contradict each other, with a line for each pair."""
        if problems := list(_contradictions(self)):
            raise UserError(*problems)

    def to_dict(self) -> dict[str, Any]:
        """Returns the value of each flag."""
        return {name: getattr(self, name) for name in TRAIN_FLAGS}

    def used_flags(self) -> dict[str, Any]:
        """Returns the flags of `to_dict`. For a run of --minutes, the flags that count steps are left out."""
        values = self.to_dict().items()
        return {name: value for name, value in values if not (self.minutes and TRAIN_FLAGS[name].counts_steps)}


COOLDOWN_SCHEDULES = ("wsd",)  # warm-up, stable, decay
TRAIN_FLAGS = flags_of(TrainConfig)


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """What --plan plans for. It exits before a run starts."""

    # fmt: off
    plan: bool = PLAN(False, "print what the run will take (memory, time, cost), and exit")
    gpus: int = PLAN(1, "number of GPUs to plan for", default_help="1; under torchrun, its number of processes", **COUNT)
    gpu: str = PLAN("A100", "GPU to plan for, such as T4, RTX4090, A100 or H100 (both of 80 GB); any other word lists all",
        choices=tuple(GPU_FLAGS), metavar="GPU",
        default_help="this machine's, if it has one of them, or A100")
    peak: float | None = PLAN(None, "peak of a GPU that --gpu lacks, in TFLOP/s (bf16, not sparse); its memory is that of --gpu",
        default_help="that of --gpu", at_least=1, at_most=1e6)
    price: float | None = PLAN(None, "price of a GPU-hour to plan with, in any currency", default_help="none",
        at_least=0, at_most=1e6)
    mfu: float | None = PLAN(None, "model FLOPs utilization to plan with, such as 0.4",
        default_help="the range that was measured on such GPUs", at_least=0.001, at_most=1)
    # fmt: on


@dataclass(frozen=True, kw_only=True)
class CommandLine(PlanOptions, TrainConfig):
    """The flags of train_gpt2.py."""


def _contradictions(config: TrainConfig) -> Iterator[str]:
    """Yields a line for each pair of values that do not go together."""
    if config.n_embd % config.n_head:
        yield f"--n-embd {config.n_embd} is not a multiple of --n-head {config.n_head}. Change one."
    if config.max_passes and not config.minutes:
        yield "--max-passes is for runs of --minutes. Leave it out, and give the length with --max-steps."
    if config.min_lr > config.max_lr:
        yield f"--min-lr {config.min_lr:g} is above --max-lr {config.max_lr:g}. Lower it."
    if config.adamw_lr is not None and (config.optimizer != "muon" or config.max_lr == 0):
        yield f"--adamw-lr {config.adamw_lr:g} needs --optimizer muon and a --max-lr above 0. Change these, or leave it out."
    if config.lora_rank is None and config.lora_alpha != TrainConfig.lora_alpha:
        yield "--lora-alpha is for LoRA. Add --lora-rank, or leave out --lora-alpha."
    if config.lora_rank is not None and config.optimizer == "muon":
        yield "Muon does not suit LoRA's small matrices. Use --optimizer adamw, and --recipe gpt2."
    if config.lora_rank is not None and config.lora_rank > config.n_embd:
        yield f"--lora-rank {config.lora_rank} is more than the model's {config.n_embd} channels. Lower it."


# -----------------------------------------------------------------------------
# Where a value comes from

# Layers of values by flag, the strongest first; what none of them has is a default.
LAYERS = ("command line", "--minutes", "checkpoint", "--init-from", "--text", "--demo", "--model", "--recipe")
Layers = dict[str, Mapping[str, Any]]


def merge(layers: Layers) -> dict[str, Any]:
    """Returns each value from the strongest layer that has it.

    Raises:
        ValueError: a layer is missing or in a different place, so that its values would have the wrong strength.
    """
    if tuple(layers) != LAYERS:
        raise ValueError(f"the layers are {', '.join(layers)} instead of {', '.join(LAYERS)}")
    return {name: value for values in reversed(layers.values()) for name, value in values.items()}


def source(layers: Layers, name: str) -> str:
    """Returns the strongest layer that has a flag's value; without one, "default", or "other flags" if these decide."""
    without = "other flags" if name in TRAIN_FLAGS and TRAIN_FLAGS[name].default is MISSING else "default"
    return next((layer for layer, values in layers.items() if name in values), without)


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
