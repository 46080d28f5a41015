"""Trains GPT-2 on token shards or on a text: the model, its data, its recipe and its training loop, in one file.

    python train_gpt2.py --demo                             # see it work, offline
    python train_gpt2.py --text book.txt --out mine         # train on your text
    python train_gpt2.py                                    # GPT-2 124M, one GPU
    torchrun --standalone --nproc_per_node=8 train_gpt2.py  # the same on 8 GPUs
    python train_gpt2.py --resume                           # continue in --out
    python train_gpt2.py --fork log/model_05000 --out new   # a new run from there

fineweb.py makes the shards. The defaults train GPT-2 124M on 10 billion tokens.
"""

from __future__ import annotations

from support import startup

if __name__ == "__main__":
    startup.prepare()  # comes first: PyTorch reads what this sets, how long idle threads wait, when it is imported

import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from support.cli import MAIN_GROUP, UserError, check_command_line, flag, flags_of, parse_flags, run_cli
from support.config import Options, PlanOptions
from support.sizing import presets

# -----------------------------------------------------------------------------
# What can be set: the model and the recipe. support/config.py has the rest: files, evaluation, checkpoints, device.

T = TypeVar("T")


def model_flag(default: T, help: str, **options: Any) -> T:
    """Returns a flag that a resumed run and a fork keep, and that pretrained weights bring."""
    return flag(default, help, "model", fork="keeps", init_from="brings", **options)


@dataclass(frozen=True, kw_only=True)
class ModelFlags:
    """The model's sizes and options."""

    # fmt: off
    n_layer: int = model_flag(12, "layers", default_help="set by --model", at_least=1, at_most=10_000)
    n_head: int = model_flag(12, "heads", default_help="set by --model", at_least=1, below=2**31)
    n_embd: int = model_flag(768, "channels", default_help="set by --model", at_least=1, below=2**31)
    block_size: int = flag(1024, "context length in tokens", "model", default_help="1024; the model's with --init-from",
                           at_least=1, below=2**31, fork="keeps")  # a shorter one is possible with pretrained weights
    bias: bool = model_flag(True, "biases in linear layers and layer norms")
    # GPT-2 had 0.1; text that is seen only once needs none
    dropout: float = flag(0.0, "dropout probability", "model", at_least=0, below=1)
    # fmt: on


@dataclass(frozen=True, kw_only=True)
class GPTConfig(ModelFlags):
    vocab_size: int = 50257  # 50,000 merges, 256 bytes, <|endoftext|>; in training, the tokenizer of the data decides

    @property
    def padded_vocab_size(self) -> int:
        """The vocabulary size, rounded up to a multiple of 64 (50,304 for GPT-2): other sizes slow GPU kernels down."""
        return -(-self.vocab_size // 64) * 64


MODELS = {
    "gpt2": dict(n_layer=12, n_head=12, n_embd=768),  # 124M parameters
    "gpt2-medium": dict(n_layer=24, n_head=16, n_embd=1024),  # 350M
    "gpt2-large": dict(n_layer=36, n_head=20, n_embd=1280),  # 774M
    "gpt2-xl": dict(n_layer=48, n_head=25, n_embd=1600),  # 1558M
}

# --recipe: how GPT-2 was trained, or how to reach the same loss with fewer tokens (docs/recipes.md).
RECIPES: dict[str, dict[str, Any]] = {
    "gpt2": dict(optimizer="adamw", schedule="cosine", max_lr=6e-4),
    "fast": dict(optimizer="muon", schedule="wsd", max_lr=presets.FAST_LR),  # --text lowers it for small steps
}
GPT2_RECIPE, FAST_RECIPE = RECIPES["gpt2"], RECIPES["fast"]
COOLDOWN_SCHEDULES = ("wsd",)  # warm-up, stable, decay
TIMED_WARMUP = 1 / 30  # the warm-up of a --minutes run, as a fraction of its time


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How the model is trained: from which weights, in which steps, at which rates. A resumed run keeps all of it."""

    # fmt: off
    model: str = flag("gpt2", "model size", MAIN_GROUP, choices=tuple(MODELS), fork="brings", init_from="brings")
    init_from: str | None = flag(None, "pretrained weights to start from: a hub name or a checkpoint directory",
                                 MAIN_GROUP, default_help="random weights", metavar="NAME_OR_DIR", fork="brings",
                                 per_node=True)
    lora_rank: int | None = flag(None, "train only LoRA matrices of this rank, next to c_attn and c_proj", "model",
                                 default_help="train all weights", at_least=1, below=2**31, fork="keeps")
    lora_alpha: float = flag(16.0, "LoRA alpha (scale = alpha / rank)", "model", at_least=0, fork="keeps")
    total_batch_size: int = flag(2**19, "tokens per optimizer step, over all devices", "schedule", at_least=1)
    recipe: str = flag("gpt2", "defaults for --optimizer, --schedule and --max-lr: gpt2 is how GPT-2 was trained, "
                       "fast reaches the same loss with fewer tokens", MAIN_GROUP, choices=tuple(RECIPES))
    max_steps: int = flag(19073, "total steps", MAIN_GROUP, at_least=1, at_most=presets.MAX_STEPS,
                          counts_steps=True)  # 10 billion tokens
    max_passes: float = flag(0.0, "end a run of --minutes after P passes over the data, its cooldown included; 0: no limit",
                             "schedule", default_help="0; with --text, as many as help", at_least=0, below=1e6, metavar="P")
    warmup_steps: int = flag(715, "steps of linear warm-up", "schedule", at_least=0,
                             counts_steps=True)  # 375 million tokens, as in GPT-3
    schedule: str = flag(GPT2_RECIPE["schedule"], "after the warm-up: cosine decay, or a constant rate and a linear cooldown",
                         "schedule", default_help="cosine; wsd with --recipe fast", choices=("cosine", "wsd"))
    decay_steps: int = flag(19073, "step at which the cosine or the cooldown ends", "schedule",
                            default_help="--max-steps", at_least=1, at_most=presets.MAX_STEPS, counts_steps=True)
    cooldown_fraction: float = flag(0.4, "wsd's cooldown, as a fraction of the run", "schedule", at_least=0, at_most=1)
    max_lr: float = flag(GPT2_RECIPE["max_lr"], "peak learning rate", "schedule", at_least=0,
                         default_help=f"{GPT2_RECIPE['max_lr']:g}; {FAST_RECIPE['max_lr']:g} with --recipe fast")
    adamw_lr: float | None = flag(None, "AdamW's peak learning rate with --optimizer muon", "schedule", at_least=0,
                                  default_help="--max-lr")
    min_lr: float = flag(GPT2_RECIPE["max_lr"] / 10, "final learning rate", "schedule", at_least=0,
                         default_help="a tenth of --max-lr; a fiftieth with wsd")
    optimizer: str = flag(GPT2_RECIPE["optimizer"], "AdamW; or Muon for the blocks' matrices, and AdamW for the rest",
                          "optimizer", default_help="adamw; muon with --recipe fast", choices=("adamw", "muon"))
    weight_decay: float = flag(0.1, "weight decay of tensors with 2 or more dimensions", "optimizer", at_least=0)
    beta1: float = flag(0.9, "AdamW's beta1", "optimizer", at_least=0, below=1)
    beta2: float = flag(0.95, "AdamW's beta2", "optimizer", at_least=0, below=1)  # 0.999 reacts too slowly
    grad_clip: float = flag(1.0, "largest gradient norm; 0: no clipping", "optimizer", at_least=0)
    seed: int = flag(1337, "seed for weights, shuffling, dropout and samples", "randomness", at_least=0, below=2**32)
    shuffle: bool = flag(False, "in every epoch, read shards and their rows in a new random order, cut at new places",
                         "randomness", negatable=True)
    # fmt: on


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Recipe, ModelFlags, Options):
    """A run: everything that flags set, resolved. It never changes."""

    @property
    def lora(self) -> tuple[int, float] | None:
        """Rank and alpha of LoRA's matrices."""
        return (self.lora_rank, self.lora_alpha) if self.lora_rank else None

    @property
    def has_cooldown(self) -> bool:
        """Whether the rate stays up until a cooldown, so that a longer run can start before it."""
        return self.schedule in COOLDOWN_SCHEDULES

    @property
    def cooldown_steps(self) -> int:
        """Steps of the cooldown, which does not start before the warm-up ends."""
        return max(0, min(round(self.cooldown_fraction * self.decay_steps), self.decay_steps - self.warmup_steps))

    @property
    def cooldown_start(self) -> float:
        """The progress at which the cooldown begins."""
        if self.minutes:
            return 1 - min(self.cooldown_fraction, 1 - TIMED_WARMUP)
        return (self.decay_steps - self.cooldown_steps) / self.decay_steps


@dataclass(frozen=True, kw_only=True)
class CommandLine(PlanOptions, TrainConfig):
    """The flags of this script."""


FIRST_GROUPS = ("text", "model", "schedule", "optimizer", "randomness")  # in --help
TRAIN_FLAGS = flags_of(TrainConfig)


def resolve(flags: Mapping[str, Any]) -> TrainConfig:
    """Returns the configuration that the flags specify; what they leave open follows from other flags, or stays open.

    Raises:
        UserError: some values contradict each other.
    """
    defaults = MODELS[flags.get("model", "gpt2")] | RECIPES[flags.get("recipe", "gpt2")]
    defaults["decay_steps"] = flags.get("max_steps", TrainConfig.max_steps)
    if flags.get("minutes"):
        defaults |= dict.fromkeys(("val_every", "sample_every", "checkpoint_every"))  # None: each quarter of the time
    values = {**defaults, **flags}  # flags win
    values.setdefault("min_lr", values["max_lr"] / (50 if values["schedule"] in COOLDOWN_SCHEDULES else 10))
    config = TrainConfig(**values)
    if problems := list(describe_contradictions(config)):
        raise UserError(*problems)
    return config


def describe_contradictions(config: TrainConfig) -> Iterator[str]:
    """Yields a line for each pair of values that do not go together."""
    if config.n_embd % config.n_head:
        yield f"--n-embd {config.n_embd} is not a multiple of --n-head {config.n_head}. Change one."
    if config.max_passes and not config.minutes:
        yield "--max-passes is for runs of --minutes. Leave it out, and give the length with --max-steps."
    if config.min_lr > config.max_lr:
        yield f"--min-lr {config.min_lr:g} is above --max-lr {config.max_lr:g}. Lower it."
    if config.adamw_lr is not None and (config.optimizer != "muon" or config.max_lr == 0):
        yield "--adamw-lr is for --optimizer muon with a --max-lr above 0. Use --max-lr alone."
    if config.lora_rank is None and config.lora_alpha != TrainConfig.lora_alpha:
        yield "--lora-alpha is for LoRA. Add --lora-rank, or leave out --lora-alpha."
    if config.lora_rank is not None and config.optimizer == "muon":
        yield "Muon does not suit LoRA's small matrices. Use --optimizer adamw, and --recipe gpt2."
    if config.lora_rank is not None and config.lora_rank > config.n_embd:
        yield f"--lora-rank {config.lora_rank} is more than the model's {config.n_embd} channels. Lower it."


if __name__ == "__main__":
    check_command_line(CommandLine, __doc__, FIRST_GROUPS)  # a mistake, or --help, need not wait for the next import
    startup.show("importing PyTorch ...")

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import hellaswag
from support import torch_private
from support.checkpoints import huggingface, lora, resume, run_folder
from support.checkpoints.directory import newest_before_cooldown
from support.checkpoints.manager import CheckpointManager
from support.checkpoints.run_info import RunInfo
from support.checkpoints.start import (
    NEW_RUN,
    Start,
    check_folder_and_make_shards,
    check_pretrained,
    first_model,
    gather_flags,
)
from support.checkpoints.state import Checkpoint, TrainState
from support.console import trackers
from support.console.progress import print_finished, print_header, print_summary, progress_bar
from support.console.run_logger import RunLogger
from support.data import shards
from support.data.shards import TokenData, rows_in_shard
from support.data.tokenizer import Tokenizer
from support.optim.layers import Dropout, causal_attention
from support.optim.loss import chunked_cross_entropy
from support.optim.muon import Muon
from support.runtime import batch_size, cuda_graphs, devices, fsdp, memory, preflight
from support.runtime.clock import Clock
from support.runtime.cuda_graphs import Graph
from support.runtime.distributed import LONG_TIMEOUT, ONE_PROCESS, STEP_TIMEOUT, Distributed, report_lost_processes
from support.runtime.kv_cache import KVCache
from support.runtime.length import Length
from support.runtime.machine import Machine
from support.runtime.signals import StopHandler
from support.sizing import budget, plan
from support.terminal import pluralize

# -----------------------------------------------------------------------------
# The model. B is batch, T is time, C is channels (n_embd), nh is heads, hs is head size (C / nh), V is vocabulary.


class CausalSelfAttention(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.n_head = config.n_head
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, config.bias)  # query, key and value of all heads
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, config.bias)  # mixes what the heads have found
        self.dropout = Dropout(config.dropout)

    def forward(self, x: Tensor, cache: KVCache | None = None) -> Tensor:
        B, T, C = x.shape
        q, k, v = self.c_attn(x).split(C, dim=2)  # (B, T, C) each
        q, k, v = (t.view(B, T, self.n_head, C // self.n_head).transpose(1, 2) for t in (q, k, v))  # (B, nh, T, hs)
        if cache:
            k, v = cache.append(self, k, v)  # keys and values of all tokens so far; a single new one attends to all
        # softmax(q @ k.mT / sqrt(hs), with the future masked) @ v; on a GPU in one kernel that never stores the (T, T) matrix
        y = causal_attention(q, k, v, self.dropout.p if self.training else 0.0)  # (B, nh, T, hs)
        y = y.transpose(1, 2).reshape(B, T, C)  # concatenate the heads
        return self.dropout(self.c_proj(y))


class MLP(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd, config.bias)  # each token by itself
        self.gelu = nn.GELU(approximate="tanh")  # as in GPT-2; the exact GELU would be just as fast today
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd, config.bias)
        self.dropout = Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.c_proj(self.gelu(self.c_fc(x))))  # (B, T, 4C) inside, (B, T, C) outside


class Block(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cache: KVCache | None = None) -> Tensor:
        x = x + self.attn(self.ln_1(x), cache)  # the only place where tokens exchange information
        x = x + self.mlp(self.ln_2(x))  # only the branch is normalized: the residual stream x is passed on as it is
        return x


class Transformer(nn.Module):
    """Everything between token ids and the output layer: embeddings, blocks and the final layer norm."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.wte = nn.Embedding(config.padded_vocab_size, config.n_embd)  # token embeddings
        self.wpe = nn.Embedding(config.block_size, config.n_embd)  # position embeddings
        self.drop = Dropout(config.dropout)
        self.h = nn.ModuleList([Block(config) for _ in range(config.n_layer)])
        self.ln_f = nn.LayerNorm(config.n_embd, bias=config.bias)  # the residual stream has grown with each block

    def forward(self, idx: Tensor, cache: KVCache | None = None) -> Tensor:
        """Returns the final hidden states (B, T, C) for token ids (B, T). Raises a ValueError if T exceeds the context.

        With a `cache`, the ids continue the tokens that the cache has already seen.
        """
        T = idx.size(1)
        if self.wpe.num_embeddings < T:
            raise ValueError(f"a sequence of {T} tokens is longer than the context of {self.wpe.num_embeddings}")
        first = cache.length if cache else 0
        pos = torch.arange(first, first + T, device=idx.device)  # (T)
        x = self.drop(self.wte(idx) + self.wpe(pos))  # (B, T, C)
        x = devices.to_bf16_in_autocast(x)  # half the traffic between blocks; the norms still compute in fp32
        for block in self.h:
            x = block(x, cache)
        return self.ln_f(x.float())


class GPT(nn.Module):
    """GPT-2, with the parameter names of Hugging Face's GPT2LMHeadModel."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        self.transformer = Transformer(config)
        self.lm_head = nn.Linear(config.n_embd, config.padded_vocab_size, bias=False)
        self.lm_head.weight = self.transformer.wte.weight  # tied: one matrix embeds tokens and predicts them
        self._init_weights()

    @torch.no_grad()
    def _init_weights(self) -> None:
        for name, parameter in self.named_parameters():  # the tied matrix appears once, as wte
            if name.endswith(".bias"):
                parameter.zero_()
            elif parameter.dim() >= 2:
                std = 0.02  # logits near 0: the first loss is 10.98, close to a uniform guess, ln(V) = 10.82
                if name.endswith("c_proj.weight"):
                    # two per layer add to the residual stream: scaling keeps its variance from growing with depth
                    std /= math.sqrt(2 * self.config.n_layer)
                parameter.normal_(0.0, std)  # gains of the layer norms stay 1
        self.lm_head.weight[self.config.vocab_size :] = 0.0  # the padding gets no gradient, so it stays zero

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor | None, Tensor | None]:
        """Returns next-token logits, or the loss if `targets` are given.

        Args:
            idx: (B, T) token ids, T at most block_size.
            targets: (B, T) ids of the tokens that follow.

        Returns:
            `(logits, None)` with fp32 logits (B, T, V), or `(None, loss)` with the mean cross-entropy in nats.
        """
        x = self.transformer(idx)  # (B, T, C)
        if targets is None:
            return self.logits(x), None
        # Equivalent to F.cross_entropy(self.lm_head(x)[..., :V].flatten(0, 1), targets.flatten()). But the logits of a
        # full micro-batch, (B, T, V), would take as much memory as the activations of all blocks. So the loss is
        # computed in chunks of rows (in fp16, all at once), together with the gradients of x and of the weight, which
        # depend only on softmax(logits) - one_hot(targets). The padding is left out of the softmax.
        x, targets, weight = x.flatten(0, 1), targets.flatten(), self.lm_head.weight  # (B*T, C), (B*T), (V padded, C)
        return None, chunked_cross_entropy(x, weight, targets, self.config.vocab_size)

    def logits(self, x: Tensor) -> Tensor:
        """Returns next-token logits (..., V) for hidden states (..., C), in fp32.

        bf16 would be too coarse: many logits are near -35, where neighbouring bf16 numbers are 0.25 apart.
        """
        with torch.autocast(x.device.type, enabled=False):
            logits = (self.lm_head.weight @ x.float().mT).mT  # for few rows on a CPU, faster than self.lm_head(x)
            return logits[..., : self.config.vocab_size]

    @classmethod
    def from_pretrained(cls, name_or_dir: str | os.PathLike[str], dropout: float = 0.0, verify: bool = True) -> GPT:
        """Loads a hub model (`gpt2`, ...) or a checkpoint directory, onto the CPU; `verify` compares checksums first.

        Raises:
            UserError: files are missing or corrupt, or describe a model that this class does not implement.
        """
        directory = huggingface.find_model(name_or_dir, verify)
        names = {field.name for field in fields(GPTConfig)}
        config = GPTConfig(**huggingface.read_model_config(directory, names), dropout=dropout)
        model = cls(config)
        weights = huggingface.read_weights(directory / huggingface.WEIGHTS)  # without the padding of the vocabulary
        # keep_vars: the parameters themselves, so that the tied ones are seen to be one
        model.load_state_dict(huggingface.from_hf(weights, model.state_dict(keep_vars=True), config.vocab_size))
        return model

    def save_pretrained(self, directory: str | os.PathLike[str]) -> None:
        """Writes `config.json` and `model.safetensors`, which `from_pretrained` reads, here and in Hugging Face."""
        weights = huggingface.to_hf(dict(self.named_parameters()), self.config.vocab_size)  # has the tied matrix once
        huggingface.write_model(Path(directory), self.config, weights)

    def crop(self, block_size: int) -> None:
        """Drops the position embeddings from `block_size` on: a shorter context trains faster and in less memory."""
        self.config = replace(self.config, block_size=block_size)
        positions = self.transformer.wpe.weight[:block_size].detach().clone()
        self.transformer.wpe = nn.Embedding.from_pretrained(positions, freeze=False)

    def configure_optimizers(
        self, weight_decay: float, lr: float, betas: tuple[float, float], name: str = "adamw", **muon_options: Any
    ) -> torch.optim.Optimizer:
        """Returns AdamW with weight decay on matrices and embeddings, but not on biases and layer norms.

        With the name "muon", Muon updates the matrices of the blocks instead: it orthogonalizes their momentum, so that
        a step moves a matrix equally far in all directions.
        """
        num_splits: dict[nn.Parameter, int] = {}  # parameters for Muon, and how many matrices each one stacks
        if name == "muon":
            matrices = ((name, p) for name, p in self.transformer.h.named_parameters() if p.dim() >= 2)
            num_splits = {p: 3 if name.endswith("c_attn.weight") else 1 for name, p in matrices}  # query, key, value
        trained = [p for p in self.parameters() if p.requires_grad]  # with LoRA, not all of them
        groups = [
            {"params": [p for p in trained if p.dim() >= 2 and p not in num_splits], "weight_decay": weight_decay},
            {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
        ]
        if name == "adamw":
            return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=1e-8, fused=True)  # one kernel for all parameters
        muon_group = {"params": list(num_splits), "num_splits": list(num_splits.values()), "weight_decay": weight_decay}
        return Muon([muon_group, *groups], lr=lr, betas=betas, eps=1e-8, **muon_options)

    def flops_per_token(self) -> int:
        """FLOPs to train on one token of a full context: 6N + 12*L*C*T (PaLM, arXiv:2204.02311, appendix B).

        Of the 6 for each weight, 2 are the forward pass, 2 the gradients of the activations, and 2 the gradient of the
        weight itself, which frozen weights do not have. N leaves out the position embeddings, which are only looked up.
        """
        c = self.config
        parameters = [p for p in self.parameters() if p is not self.transformer.wpe.weight]
        weight_flops = sum((6 if p.requires_grad else 4) * p.numel() for p in parameters)
        return weight_flops + 12 * c.n_layer * c.n_embd * c.block_size

    @torch.no_grad()
    def generate(
        self, idx: Tensor, max_new_tokens: int, temperature: float = 1.0, top_k: int | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:  # fmt: skip
        """Continues (B, T) token ids by sampling; returns (B, T + max_new_tokens).

        Only the last block_size tokens are context. Temperature 0 always takes the most likely token.
        """
        for _ in range(max_new_tokens):
            with devices.attention_without_cudnn(idx.device):  # which plans each new shape, here each length
                x = self.transformer(idx[:, -self.config.block_size :])[:, -1]  # (B, C): the last position predicts
            probs, ids = next_token_probs(self.logits(x), temperature, top_k)  # (B, K) each
            new = ids.gather(1, torch.multinomial(probs, 1, generator=generator))  # (B, 1)
            idx = torch.cat((idx, new), dim=1)  # (B, T + 1)
        return idx


def next_token_probs(logits: Tensor, temperature: float = 1.0, top_k: int | None = None) -> tuple[Tensor, Tensor]:
    """Returns probabilities (B, K) and ids (B, K) of the `top_k` likeliest tokens, or of all, given logits (B, V).

    A temperature below 1 makes likely tokens likelier.
    """
    ids = torch.arange(logits.size(-1), device=logits.device).expand_as(logits)
    if top_k is not None:
        logits, ids = torch.topk(logits, min(top_k, logits.size(-1)))
    return F.softmax(logits / max(temperature, 1e-10), dim=-1), ids


# -----------------------------------------------------------------------------
# The data


class DataLoaderLite:
    """Batches from memory-mapped shards; the data of a step depends on the step alone.

    A shard of n tokens gives floor((n-1)/T) rows of T+1 tokens, at offsets 0, T, 2T, ...; an epoch is the rows of all
    shards. They are dealt in order, B at a time, to rank 0, 1, ... in turn: micro-batch m of rank r starts at row
    (m * world_size + r) * B, modulo the epoch. So a step, `grad_accum` micro-batches on each rank, has the same rows in
    the same order for any number of ranks and any B, and resuming takes only arithmetic.
    With `shuffle`, each epoch has its own order of shards and of the rows in each, and the rows start at o, o + T, ...
    with a new offset o below T: a text that is read again is cut elsewhere, which makes it harder to memorize. Each
    shard then has one row fewer.
    """

    def __init__(
        self, shards: Sequence[np.memmap], B: int, T: int, vocab_size: int, dist: Distributed = ONE_PROCESS,
        grad_accum: int = 1, shuffle: bool = False, seed: int = 1337,
    ):  # fmt: skip
        self.shards, self.B, self.T, self.vocab_size = shards, B, T, vocab_size
        self.dist, self.grad_accum, self.shuffle, self.seed = dist, grad_accum, shuffle, seed
        self.shard_rows = np.array([rows_in_shard(len(shard), T, shuffle) for shard in shards])
        self.rows_per_epoch = int(self.shard_rows.sum())
        self._epoch = -1  # the epoch that _order and _ends describe
        self._cached_starts: tuple[tuple[int, int], np.ndarray] | None = None
        self.seek(0)

    def seek(self, row: int) -> None:
        """Moves to the step that begins at a row, counted across epochs."""
        self.row = row  # the first row of the next micro-batches, one on each rank
        self._prefetched: list[tuple[Tensor, Tensor]] = []  # the next micro-batch first

    def fraction_read(self, passes: float) -> float:
        """Returns the fraction, up to 1, that has been read of this many passes over the data; 0 if `passes` is 0."""
        return min(1.0, self.row / (passes * self.rows_per_epoch)) if passes else 0.0

    def next_batch(self) -> tuple[Tensor, Tensor]:
        """Returns this rank's next micro-batch: (B, T) tokens, and the (B, T) tokens that follow them."""
        if not self._prefetched:
            self.prefetch(1)
        self.row += self.dist.world_size * self.B
        return self._prefetched.pop(0)

    def prefetch(self, n: int) -> None:
        """Reads this rank's next n micro-batches and starts copying them to the device; raises what `batch` raises.

        This costs nothing while a GPU is busy, and finds a corrupt row while the current state can still be saved.
        """
        rows_of_all = self.dist.world_size * self.B  # rank r takes the r-th B of them
        firsts = range(self.row + self.dist.rank * self.B, self.row + n * rows_of_all, rows_of_all)
        self._prefetched = [self.batch(range(first, first + self.B)) for first in firsts]

    def batch(self, rows: Iterable[int]) -> tuple[Tensor, Tensor]:
        """Returns the rows with these numbers, counted across epochs: (B, T) tokens and the tokens that follow them.

        Raises:
            UserError: a shard was truncated, or a token id is not in the vocabulary; the message names the shard.
        """
        tokens = torch.from_numpy(np.stack([self._row(n) for n in rows]).astype(np.int64))  # (B, T+1)
        tokens = devices.to_device(tokens, self.dist.device)
        return tokens[:, :-1], tokens[:, 1:]  # every position has a target: no padding, so no -100 to ignore

    def _row(self, n: int) -> np.ndarray:
        epoch, n = divmod(n, self.rows_per_epoch)  # nothing is skipped or repeated at epoch boundaries
        if epoch != self._epoch:
            self._start_epoch(epoch)
        i = int(np.searchsorted(self._ends, n, side="right"))  # the row is in the i-th shard of this epoch
        shard = int(self._order[i])
        row = n - int(self._ends[i] - self.shard_rows[shard])
        start = int(self._shuffled_starts(epoch, shard)[row]) if self.shuffle else row * self.T
        return shards.read_tokens(self.shards[shard], start, self.T + 1, self.vocab_size)

    def _start_epoch(self, epoch: int) -> None:
        self._epoch = epoch
        self._order = np.arange(len(self.shards))
        if self.shuffle:  # the same order on all ranks
            self._order = np.random.default_rng((self.seed, epoch)).permutation(self._order)
        self._ends = np.cumsum(self.shard_rows[self._order])  # the row after the last one of each shard, in this order

    def _shuffled_starts(self, epoch: int, shard: int) -> np.ndarray:
        """Returns where the rows of a shard start in an epoch, in the order in which they are read."""
        if self._cached_starts is None or self._cached_starts[0] != (epoch, shard):
            generator = np.random.default_rng((self.seed, epoch, shard))
            rows = generator.permutation(self.shard_rows[shard])
            self._cached_starts = (epoch, shard), rows * self.T + generator.integers(self.T)
        return self._cached_starts[1]


# -----------------------------------------------------------------------------
# The schedule


def get_lr(step: int, config: TrainConfig, progress: float = 0.0) -> float:
    """Returns the learning rate of a step: linear warm-up, then a cosine from max_lr to min_lr, then min_lr.

    With schedule "wsd" (warm-up, stable, decay), it stays at max_lr until the cooldown, then falls linearly to min_lr.

    Args:
        progress: the fraction of the time that has passed; a --minutes run uses it instead of `step`.
    """
    if config.minutes:
        now, warmup, end, cooldown = progress, TIMED_WARMUP, 1.0, 1 - config.cooldown_start
        ramp = max(now, TIMED_WARMUP / 10)
    else:
        now, warmup, end, cooldown = step, config.warmup_steps, config.decay_steps, config.cooldown_steps
        ramp = step + 1
    if now < warmup:
        return config.max_lr * ramp / warmup  # never 0, which would waste the first step
    if now >= end:
        return config.min_lr  # a run may be longer than its schedule
    if config.schedule == "wsd":
        left = (end - now) / cooldown if cooldown else 1.0
        return config.min_lr + min(1.0, left) * (config.max_lr - config.min_lr)
    decayed = (now - warmup) / (end - warmup)  # from 0 to 1
    if config.schedule == "cosine":
        return config.min_lr + 0.5 * (1.0 + math.cos(math.pi * decayed)) * (config.max_lr - config.min_lr)
    raise ValueError(f"get_lr has no formula for --schedule {config.schedule}")


@dataclass(frozen=True)
class Schedule:
    """What happens when in a run, as a function of its progress: rates, evaluations, checkpoints and the end."""

    config: TrainConfig
    hellaswag_every: int | None = 0  # --hellaswag-every, or what suits the machine

    @property
    def length(self) -> Length:
        c = self.config
        return Length(c.minutes, c.max_steps, c.warmup_steps, c.decay_steps, c.max_passes)

    def lr(self, state: TrainState) -> float:
        """Returns the learning rate of the next step."""
        return get_lr(state.step, self.config, state.progress)

    def progress(self, step: int, timed: float, read: float = 0.0) -> float:
        """Returns the progress of a run before a step, 1 where its decay ends.

        Args:
            timed, read: of a run of --minutes: the fractions of its time and of --max-passes. The larger one counts.
        """
        return max(timed, read) if self.config.minutes else step / self.config.decay_steps

    def is_over(self, state: TrainState) -> bool:
        """Returns whether the run has done its last step, or its time is up."""
        return self.length.is_over(state.step, state.progress)

    def evaluations_due(self, state: TrainState) -> set[str]:
        """Returns which of "val", "hella" and "samples" are due before the next step."""
        config = self.config
        every = {"val": config.val_every, "hella": self.hellaswag_every}
        every |= {"samples": config.sample_every} if state.step > 0 else {}
        return {name for name, interval in every.items() if self._is_due(interval, state)}

    def is_checkpoint_due(self, state: TrainState) -> bool:
        """Returns whether a checkpoint is due: at intervals, after the last step, and before a cooldown."""
        every = self.config.checkpoint_every
        return self._is_due(every, state) or every != 0 and self.is_cooldown_next(state)

    def is_cooldown_next(self, state: TrainState) -> bool:
        """Returns whether the cooldown begins with the next step; not for a fork that starts inside it."""
        start = self.config.cooldown_start
        # last_progress is that before the last step, and negative before the first one
        begins = state.progress == start if state.last_progress < 0 else state.has_passed(start)
        return self.config.has_cooldown and begins

    def is_before_cooldown(self, state: TrainState) -> bool:
        """Returns whether the cooldown has not begun yet, so that a longer run can start here."""
        last = state.last_progress if state.last_progress >= 0 else state.progress  # decided the rate of the last step
        return self.config.has_cooldown and last <= self.config.cooldown_start

    def _is_due(self, every: int | None, state: TrainState) -> bool:
        """Returns whether something is due that is done every few steps, and after the last one.

        Args:
            every: interval in steps; 0 means never, and None means at each quarter of --minutes.
        """
        if every == 0:
            return False
        regularly = any(state.has_passed(n / 4) for n in range(4)) if every is None else state.step % every == 0
        return regularly or self.is_over(state)

    def describe(self) -> str:
        """Describes optimizer and learning rates in words."""
        c = self.config
        unit, warmup = "minute" if c.minutes else "step", pluralize(c.warmup_steps, "step")
        after = f" after {warmup}" if c.warmup_steps and not c.minutes else ""
        end = f"at minute {c.minutes:g}" if c.minutes else f"at step {c.decay_steps:,}"
        start = c.cooldown_start * (c.minutes or c.decay_steps)
        when = f"{unit} {start:,.{1 if c.minutes else 0}f}"
        if c.max_passes:  # whichever ends the run first
            when, end = f"{c.cooldown_start:.0%} of the run", "at its end"
        cooldown = f"from {when} on " if c.has_cooldown else ""
        adamw = f" ({c.adamw_lr:.3g} for AdamW)" if c.adamw_lr is not None else ""
        rates = f"learning rate {c.max_lr:.3g}{adamw}{after}, {cooldown}falling to {c.min_lr:.3g} {end}"
        return f"{c.optimizer}, {c.schedule}; {rates}"


# -----------------------------------------------------------------------------
# The data and the model that a run starts from


def new_model(flags: Mapping[str, Any], vocab_size: int) -> GPT:
    """Makes the model that the flags describe, with random weights."""
    return GPT(GPTConfig(vocab_size=vocab_size, **{name: flags[name] for name in flags_of(ModelFlags)}))


def open_data(config: TrainConfig, checkpoint: Checkpoint | None, dist: Distributed) -> TokenData:
    """Opens the shards of a run. Checks that they have enough tokens, and that training fits into memory.

    Raises:
        UserError: a check failed.
    """
    T, validates = config.block_size, config.val_every != 0
    data = TokenData.open(config.data, validates, first_model(checkpoint, config.init_from))
    val_tokens = config.val_tokens if validates else None
    data.check_rows(T, config.total_batch_size // T, val_tokens, config.shuffle)
    sizes = config.to_dict() | {"vocab_size": data.tokenizer.vocab_size}
    parts = dist.world_size if config.parallel == "fsdp" else 1
    memory.check_training_fits(sizes, config.optimizer, config.lora_rank is not None, parts, dist.device)
    return data


def initial_model(config: TrainConfig, tokenizer: Tokenizer, checkpoint: Checkpoint | None) -> GPT:
    """Makes the model that this process starts from, on the CPU, with random, pretrained or a checkpoint's weights."""
    path = checkpoint.path if checkpoint else None
    # a LoRA checkpoint has merged weights: the frozen ones come from --init-from, LoRA's matrices from adapter/
    source = path if path and not config.lora_rank else config.init_from
    if source is None:
        torch.manual_seed(config.seed)  # on the CPU, so that every kind of device starts from the same weights
        model = new_model(config.to_dict(), tokenizer.vocab_size)
    else:
        model = GPT.from_pretrained(source, config.dropout, verify=False)  # its checksums were compared already
        sizes = model.config
        check_pretrained(source, sizes.vocab_size, sizes.block_size, tokenizer, config, config.block_size)
        if config.block_size < model.config.block_size:
            model.crop(config.block_size)
    if config.lora_rank:
        lora.add_adapter(model, config.lora_rank, config.lora_alpha, config.seed, path)
    return model


# -----------------------------------------------------------------------------
# Evaluation. Validation and HellaSwag return None if they were interrupted because the run should stop.


@torch.no_grad()
def validation_loss(
    model: nn.Module, loader: DataLoaderLite, tokens: int, stop: StopHandler, amp: torch.autocast
) -> float | None:
    """Returns the mean loss (nats) over a split's first `tokens` tokens, or all; the same for any number of ranks and any B."""
    dist, rows = loader.dist, min(tokens // loader.T, loader.rows_per_epoch)
    total = n = 0.0
    last: tuple[Tensor, int] | None = None  # the loss of the batch before, and its rows
    first_rows = range(dist.rank * loader.B, rows, dist.world_size * loader.B)  # ranks take turns
    for first in stop.interruptible(progress_bar(first_rows, "validation", dist.rank)):  # ends early after a signal
        with stop.deferring_errors(), amp:  # a corrupt shard ends the run, but only after a checkpoint
            x, y = loader.batch(range(first, min(first + loader.B, rows)))  # the last batch may be smaller
            # A sum over rows, so that smaller batches do not count more. It waits for the batch before, which the device
            # has computed while this one was read.
            total += last[0].item() * last[1] if last else 0.0
            _, loss = model(x, y)
            n, last = n + len(x), (loss, len(x))
    total += last[0].item() * last[1] if last else 0.0
    total, n, stop_requests = dist.all_reduce_sum(total, n, stop.requested)
    return None if stop.agree(stop_requests) else total / n


def sample(
    model: GPT, tokenizer: Tokenizer, prompt: str, max_new_tokens: int, generator: torch.Generator,
    temperature: float = 1.0, top_k: int | None = 50, n: int = 4,
) -> list[str]:  # fmt: skip
    """Returns `n` continuations of `prompt`, including it; with a byte tokenizer, four times as many tokens each."""
    if tokenizer.name == "bytes":
        max_new_tokens *= 4  # a GPT-2 token has about four bytes
    idx = torch.tensor([tokenizer.encode(prompt) or [tokenizer.eot]], device=generator.device).repeat(n, 1)  # (n, T)
    texts = model.generate(idx, max_new_tokens, temperature, top_k, generator)  # (n, T + max_new_tokens)
    return [tokenizer.decode(text) for text in texts.tolist()]


# -----------------------------------------------------------------------------
# Training


def train_step(
    train_model: nn.Module, state: TrainState, loader: DataLoaderLite, schedule: Schedule, stop: StopHandler,
    amp: torch.autocast, clock: Clock, graphs: tuple[Graph, Graph] | None = None,
) -> tuple[float, float, float] | None:  # fmt: skip
    """Takes one optimizer step on `loader.grad_accum` micro-batches of each rank; `train_model` may be compiled and wrapped.

    If the loss or a gradient is not finite, the step is skipped, on all ranks.

    Returns:
        The mean loss in nats, the gradient norm before clipping, and the progress of --minutes, all the same on every rank.
        None if a signal interrupted the step, which happens only with one process. Nothing was applied then.
    """
    config, optimizer, scaler, dist = schedule.config, state.optimizer, state.scaler, loader.dist
    if config.dropout:
        state.model.train()  # after an evaluation
        # The masks depend on (seed, step, rank) alone, so a resumed run draws the same ones.
        torch.manual_seed(devices.derive_seed(config.seed, state.step, dist.rank))
    # frees the gradients: the first backward pass writes new ones, the others add. A CUDA graph only adds
    optimizer.zero_grad(set_to_none=graphs is None)
    micro_step, update = graphs or step_functions(train_model, state, loader.grad_accum, amp)
    loss_accum = torch.zeros((), device=dist.device)  # on the device: reading it would make the host wait
    for i in range(loader.grad_accum):
        if stop.agreed:  # several ranks agree only at the end of a step
            return None
        x, y = loader.next_batch()  # (B, T) each
        # DDP and FSDP average gradients over the ranks in the backward pass. Once per step is enough, in the last
        # micro-step. The flag must be set before the forward pass, which prepares the reduction.
        if dist.world_size > 1:
            train_model.require_backward_grad_sync = i == loader.grad_accum - 1  # type: ignore[assignment]
        loss_accum += micro_step(x, y)
    if not schedule.length.is_last(state.step):
        with stop.deferring_errors():  # a corrupt shard ends the run after this step, which is applied and saved
            loader.prefetch(loader.grad_accum)  # reads the next step's batches, while the device is still computing
    scaler.unscale_(optimizer)  # before clipping, which needs the true norm
    # Clipping keeps the direction: one batch with huge gradients must not undo the steps before it.
    norm = fsdp.full_tensor(nn.utils.clip_grad_norm_(train_model.parameters(), config.grad_clip or math.inf))
    # One all-reduce carries all that the ranks must share. The norm is the same on all of them already; it rides along,
    # so that one transfer brings everything to the host. Rank 0's clock decides: the others contribute 0 to the mean.
    progress = clock.progress() * dist.world_size if dist.rank == 0 else 0.0
    host_values = [torch.full_like(norm, value) for value in (stop.requested, progress)]
    reduced = dist.all_reduce_mean(torch.stack([loss_accum, norm, *host_values]))
    update(reduced.isfinite().all())
    scaler.update()  # in fp16: lowers the scale of the gradients if they overflowed
    mean_loss, norm, stop_requests, progress = reduced.tolist()  # the only CPU-GPU sync point of a step
    stop.agree(stop_requests)
    return mean_loss, norm, progress


def step_functions(
    model: nn.Module, state: TrainState, grad_accum: int, amp: torch.autocast
) -> tuple[Callable[[Tensor, Tensor], Tensor], Callable[[Tensor], None]]:
    """Returns the two parts of a step: a micro-step, which returns its part of the mean loss, and the update."""

    def micro_step(x: Tensor, y: Tensor) -> Tensor:
        with amp:
            _, loss = model(x, y)
        # backward() adds to the gradients, and each loss is a mean over its micro-batch. Without this division the sum
        # would be grad_accum times the gradient of the full batch.
        loss = loss / grad_accum
        state.scaler.scale(loss).backward()  # scales only in fp16, where small gradients would underflow
        return loss.detach()

    return micro_step, partial(step_if_finite, state.optimizer)


def step_if_finite(optimizer: torch.optim.Optimizer, finite: Tensor) -> None:
    """Applies the gradients if `finite` is true.

    Fused AdamW and Muon skip the step if their `found_inf` is 1 (GradScaler's protocol). That happens on the device, so
    the host need not wait. For other optimizers, and on MPS, which ignores `found_inf`, the host checks.
    """
    if torch_private.skips_steps(optimizer) and finite.device.type != "mps":
        optimizer.grad_scale, optimizer.found_inf = None, 1.0 - finite.float()  # type: ignore[attr-defined]
        optimizer.step()
    elif finite:
        optimizer.step()


def train(config: TrainConfig, dist: Distributed, start: Start = NEW_RUN) -> TrainState:
    """Trains for `config.max_steps` or `config.minutes`, from the beginning or from a checkpoint; returns the final state.

    Raises:
        UserError: the data, folder or model is unusable, too many steps in a row were not finite, or saving failed.
        SystemExit: a signal ended the run; its state is saved.
    """
    device, rank, checkpoint, T = dist.device, dist.rank, start.checkpoint, config.block_size
    machine = Machine.find(config, device, dist.world_size)  # what the flags leave open
    schedule = Schedule(config, machine.hellaswag_every)
    dtype, use_fsdp = devices.DTYPES[machine.dtype], config.parallel == "fsdp" and dist.world_size > 1

    # Whatever can fail or take long comes first. Rank 0 makes the shards of --text and --demo for all ranks.
    dist.on_rank_zero(lambda: check_folder_and_make_shards(config, start, config.init_from))
    # Local rank 0 runs this block before the others, which then find what it downloaded.
    with dist.local_rank_zero_first():
        data = open_data(config, checkpoint, dist)
        with fsdp.weights_on_rank_zero(use_fsdp, rank):  # other ranks: on the meta device until ShardedModel sends them
            model = initial_model(config, data.tokenizer, checkpoint)
        # identity: checksums of the shards and of frozen weights, which a resumed run must have, too
        identity = resume.identify_data(data, model, checkpoint, start.forked)
        examples = hellaswag.load_examples(config, machine.hellaswag_every, data.tokenizer, T, dist.print0)
        devices.configure_backends(device, config.tf32)  # TF32, the allocator
        amp = devices.autocast(device, dtype)  # matrix products in bf16 or fp16; weights, norms and sums in fp32
        memory.recompute_activations(model.transformer.h if config.recompute else [])  # activation checkpointing
        # model has the weights that are trained. eval_model has all weights on each rank, and may be compiled: calls run
        # the compiled graph, but methods such as generate() run uncompiled. train_model is one of the two, maybe wrapped.
        eval_model = fsdp.without_weights(model) if use_fsdp else model.to(device)  # full_weights() fills the copy
        if machine.compiled:
            eval_model = devices.compile(eval_model)
    preflight.check_runs_agree(dist, config, machine, identity)  # or ranks would wait for each other forever
    examples = examples if all(dist.gather(bool(examples))) else []  # one node may have failed to download them

    train_model: nn.Module = eval_model
    if dist.world_size > 1 and not use_fsdp:
        # gradient_as_bucket_view: gradients live in the buffers that are sent, instead of being copied into them
        train_model = DistributedDataParallel(eval_model, gradient_as_bucket_view=True)
    shard_model = partial(fsdp.ShardedModel, device=device, dtype=dtype, compiled=machine.compiled)

    def make_trial_model() -> nn.Module:  # takes a step of each micro-batch size, to see what fits; its weights stay
        return shard_model(fsdp.without_weights(model), alone=True) if use_fsdp else train_model

    layout = memory.Layout(
        config.total_batch_size, dtype, dist.world_size, sharded=use_fsdp, recompute=config.recompute,
        compiled=machine.compiled, optimizer=config.optimizer,
    )  # fmt: skip
    sizes = memory.Sizes.of(model)
    B = batch_size.try_batch_sizes(config.batch_size, machine.batch_size, sizes, layout, dist, amp, make_trial_model)
    attention = devices.describe_attention(device, dtype, config.n_head, config.n_embd, T, config.dropout)
    machine = replace(machine, batch_size=B, attention=attention)
    if use_fsdp:  # each rank keeps a shard of every weight
        train_model = shard_model(model)
    optimizer = model.configure_optimizers(
        config.weight_decay, config.max_lr, (config.beta1, config.beta2), config.optimizer,
        dtype=dtype, adamw_lr=config.adamw_lr,
    )  # fmt: skip
    # In fp16, small gradients would underflow, so the scaler multiplies the loss and divides the gradients afterwards.
    state = TrainState(model, optimizer, torch.amp.GradScaler(device.type, enabled=dtype == torch.float16))
    if checkpoint:
        timed = schedule.length.progress_after(checkpoint.seconds)
        progress_of_fork = schedule.progress(checkpoint.step, timed) if start.forked else None  # by its own schedule
        state.restore(checkpoint, identity, config.optimizer, progress_of_fork)  # the model has its weights already
    vocab_size = data.tokenizer.vocab_size
    grad_accum = config.total_batch_size // (B * T * dist.world_size)  # micro-batches per step
    loader = DataLoaderLite(data.train, B, T, vocab_size, dist, grad_accum, config.shuffle, config.seed)
    loader.seek(state.row)
    state.progress = max(state.progress, loader.fraction_read(config.max_passes))  # a fork may have another limit
    val_loader = DataLoaderLite(data.val, B, T, vocab_size, dist) if data.val else None
    graphs = None
    # a small model's kernels take less time than their launches
    if config.cuda_graphs and torch_private.skips_steps(optimizer) and cuda_graphs.suit(sizes, layout, B, device):
        parts = step_functions(train_model, state, grad_accum, amp)
        graphs = cuda_graphs.capture_step(*parts, optimizer, B, T, device)
        machine = replace(machine, cuda_graphs=graphs is not None)
    run = RunInfo(
        config=config, machine=machine, data=data, identity=identity, model=model, base=config.init_from, lora=config.lora,
        length=schedule.length, recipe=schedule.describe(), optimizer=config.optimizer, step_tokens=config.total_batch_size,
        flops_per_token=model.flops_per_token(), checkpoint=checkpoint, forked=start.forked,
        hellaswag_items=len(examples), hellaswag_sha256=hellaswag.sha256_of(examples),
    )  # fmt: skip
    folder_lock = run_folder.lock_folder(run, dist)  # from here on, the run is written to --out
    stop = StopHandler(dist.world_size)  # requested: a signal or an error on this rank. agreed: all ranks know and stop
    logger = RunLogger(run, dist, state.progress)  # log.txt, starts.jsonl, curves.png, trackers, and the console
    checkpoints = CheckpointManager(run, stop, logger.sync, logger.values, rank)  # writes in a thread
    print_header(run, dist, B, loader.rows_per_epoch, loader.row)

    def evaluate(due: set[str]) -> bool:
        """Measures what is due before a step. Returns False on all ranks if a signal interrupted it."""
        if config.dropout:
            eval_model.eval()  # only with dropout: without it, both modes are the same, but would be compiled twice
        if "val" in due and val_loader:
            logger.validation(state.step, validation_loss(eval_model, val_loader, config.val_tokens, stop, amp))
        if "hella" in due and examples and not stop.agreed:
            # calls the methods, which are not compiled: each new length would be compiled again
            scoring_model = hellaswag.ScoringModel(eval_model.transformer, eval_model.logits, config.block_size, device)
            logger.hellaswag(state.step, hellaswag.score_with_ranks(scoring_model, examples, dist, stop, amp))
        if stop.agreed:
            return False
        if "samples" in due and rank == 0:
            generator = devices.seeded_generator(device, config.seed, state.step, rank)
            with amp:
                logger.samples(state.step, sample(eval_model, data.tokenizer, run.prompt, 32, generator))
        devices.trim_memory(device)  # on a CPU, evaluations fragment the heap
        return True

    clock = Clock(config.minutes, state.seconds, state.progress)
    finished = False
    lost = report_lost_processes(checkpoints.how_to_go_on)
    with folder_lock, stop, logger, checkpoints, lost:  # exited in reverse: the log closes before the folder unlocks
        if "val" not in schedule.evaluations_due(state):
            logger.log_known_loss()  # of the checkpoint, which is not measured again
        while not stop.agreed:
            if due := schedule.evaluations_due(state):
                with clock.evaluating(), fsdp.full_weights(eval_model, model):  # without FSDP, both are the same model
                    complete = evaluate(due)
                if not complete:
                    break
            logger.progress(state, evaluated=bool(due))
            finished = schedule.is_over(state)
            if schedule.is_checkpoint_due(state):
                state.seconds = clock.seconds()  # including the evaluation
                checkpoints.save(state, schedule.is_before_cooldown(state), final=finished)
            if finished:
                dist.set_timeout(LONG_TIMEOUT)  # the others wait until rank 0 has written
                break
            lr = schedule.lr(state)
            for group in optimizer.param_groups:
                # Muon multiplies it by adamw_lr / max_lr in its AdamW groups
                group["lr"] = group["lr"].fill_(lr) if graphs else lr
            devices.synchronize(device)  # so that dt does not count what an evaluation left in the GPU's queue
            started = time.perf_counter()  # dt is the step alone, without evaluation, logging and checkpoints
            result = train_step(train_model, state, loader, schedule, stop, amp, clock, graphs)
            if result is None:
                break  # a signal: nothing was applied
            dt = time.perf_counter() - started  # the step has ended with a sync
            loss, norm, timed_progress = result
            skipped = state.count_skipped(loss, norm)  # why the step was not applied, or None
            logger.step(state, loss, lr, norm, dt, skipped, schedule.is_cooldown_next(state))
            if state.step == run.first_step:
                dist.set_timeout(STEP_TIMEOUT)  # everything is compiled: a rank that takes longer now is lost
            progress = schedule.progress(state.step + 1, timed_progress, loader.fraction_read(config.max_passes))
            state.advance(progress, clock.seconds(), config.total_batch_size, loader.row)
            state.check_bad_steps(config.max_bad_steps)  # raises after too many skipped steps in a row
        if not finished:  # a signal, a corrupt shard or a failed save, on any rank
            checkpoints.save_and_exit(state, schedule.is_before_cooldown(state), dist)
    texts = list[str]()
    better = checkpoints.better_than(state.step) if rank == 0 else None  # None: no other model is known to be better
    if config.has_preset:
        with fsdp.full_weights(eval_model, model), amp:
            if rank == 0:
                writer = GPT.from_pretrained(better, verify=False).to(device) if better else eval_model
                generator = devices.seeded_generator(device, config.seed)
                length = clock.tokens_of_last_text(most=150, step_tokens=B * T * grad_accum)
                texts = sample(writer.eval(), data.tokenizer, run.prompt, length, generator, temperature=0.8, n=1)
    passes, longer_from = state.row / loader.rows_per_epoch, newest_before_cooldown(config.out)
    print_summary(run, dist, state, passes, logger.values["val"], better, longer_from, texts)
    return state


@report_lost_processes()
def main(argv: Sequence[str] | None = None) -> None:
    # command line -> all flags, including those of a preset or checkpoint -> configuration -> run
    cli_flags = parse_flags(CommandLine, argv, __doc__, FIRST_GROUPS)
    dist = Distributed.from_environment(cli_flags.get("out", "log"))
    plan_options, cli_flags = plan.split_flags(cli_flags, dist.world_size)
    preflight.check_starts_agree(dist, cli_flags, TRAIN_FLAGS)
    if not plan_options.plan:
        dist.on_rank_zero(lambda: trackers.check_installed(cli_flags))  # before anything is downloaded or made
    start = gather_flags(TRAIN_FLAGS, cli_flags, dist, plan_options.plan)
    if not plan_options.plan:
        dist.on_rank_zero(lambda: trackers.check_installed(start.flags))  # a checkpoint's flags are known only now
    config, checkpoint, resumed = resolve(start.flags), start.checkpoint, start.resumed
    if resumed and dist.once(partial(run_folder.has_finished, config.out, resumed.step)):
        length, longer_from = Schedule(config).length, newest_before_cooldown(config.out)
        return print_finished(config, length, resumed.path, resumed.passes, longer_from, dist.print0)
    if plan_options.plan:
        of_model = partial(new_model, config.to_dict())
        return plan.print_report(plan_options, config, of_model, dist.rank)
    with dist.failing_together():
        dist = dist.with_device(config.device)
    if config.minutes and not (checkpoint and checkpoint.config["minutes"]):
        # times models to find what suits the time; a resumed run, or a fork of a timed run, has already done so
        with devices.report_errors():
            fitting = budget.flags_for_minutes(config, cli_flags, dist, new_model)
        config = resolve(start.flags | fitting)
    exit_code: int | str | None = 0
    try:
        with devices.report_errors():
            train(config, dist, start)
    except SystemExit as stopped:
        exit_code = stopped.code
    dist.close()  # now that train() has returned: while DDP's model is alive, gloo could deadlock here
    if exit_code:
        raise SystemExit(exit_code)


if __name__ == "__main__":
    run_cli(main)
