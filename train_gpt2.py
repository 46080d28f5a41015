"""Trains GPT-2 on token shards or on a text: the model, its data, its recipe and its training loop, in one file.

    python train_gpt2.py --demo                             # see it work, offline
    python train_gpt2.py --text book.txt --out mine         # train on your text
    python train_gpt2.py                                    # GPT-2 124M, one GPU
    torchrun --standalone --nproc_per_node=8 train_gpt2.py  # the same on 8 GPUs
    python train_gpt2.py --resume                           # continue in --out

fineweb.py makes the shards. The defaults are the recipe of GPT-2 124M on 10 billion tokens.
"""

from __future__ import annotations

import signal

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends the imports, which take seconds, without a traceback

import math
import os
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import hellaswag
from support.checkpoints import huggingface, lora, run_folder
from support.checkpoints.manager import CheckpointManager, RunInfo
from support.checkpoints.resume import check_same_data, data_identity
from support.checkpoints.start import check_pretrained, gather_flags
from support.checkpoints.state import Checkpoint, TrainState
from support.cli import MAIN_GROUP, UserError, flag, parse_flags, run_cli
from support.console import record, trackers
from support.console.progress import describe_recipe, print_header, print_summary, progress_bar
from support.console.run_logger import STARTED, RunLogger
from support.data import presets, shards
from support.data.tokenizer import Tokenizer
from support.optim.loss import chunked_cross_entropy
from support.optim.muon import Muon
from support.runtime import batch_size, budget, devices, fsdp, memory, plan, preflight
from support.runtime.distributed import Distributed, report_lost_processes
from support.runtime.options import MACHINE_FLAGS, MAX_STEPS, RunOptions
from support.runtime.profiler import Profiler
from support.runtime.signals import StopHandler
from support.runtime.watchdog import Watchdog

# -----------------------------------------------------------------------------
# The model. B is batch, T is time, C is channels (n_embd), nh is heads, hs is head size (C / nh), V is vocabulary.


@dataclass(frozen=True)
class GPTConfig:
    block_size: int = 1024  # context length, in tokens
    vocab_size: int = 50257  # 50,000 merges, 256 bytes, <|endoftext|>
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    bias: bool = True  # in the linear layers and layer norms
    dropout: float = 0.0  # GPT-2 had 0.1; text that is read only once needs none

    @property
    def padded_vocab_size(self) -> int:
        """The vocabulary rounded up to a multiple of 64, 50,304 for GPT-2: GPU kernels are slow on odd sizes."""
        return -(-self.vocab_size // 64) * 64


class CausalSelfAttention(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.n_head = config.n_head
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, config.bias)  # query, key and value of all heads
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, config.bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
        q, k, v = self.c_attn(x).split(C, dim=2)  # (B, T, C) each
        q, k, v = (t.view(B, T, self.n_head, C // self.n_head).transpose(1, 2) for t in (q, k, v))  # (B, nh, T, hs)
        # softmax(q @ k.mT / sqrt(hs) with the future masked) @ v, in one kernel that never stores the (T, T) matrix
        p = self.dropout.p if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)  # (B, nh, T, hs)
        y = y.transpose(1, 2).reshape(B, T, C)  # concatenate the heads
        return self.dropout(self.c_proj(y))


class MLP(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd, config.bias)
        self.gelu = nn.GELU(approximate="tanh")  # as in GPT-2; the exact GELU would be as fast today
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd, config.bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.c_proj(self.gelu(self.c_fc(x))))


class Block(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))  # the only place where tokens exchange information
        x = x + self.mlp(self.ln_2(x))
        return x


class Transformer(nn.Module):
    """Everything between token ids and the output layer: embeddings, blocks and the final layer norm."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.wte = nn.Embedding(config.padded_vocab_size, config.n_embd)  # token embeddings
        self.wpe = nn.Embedding(config.block_size, config.n_embd)  # position embeddings
        self.drop = nn.Dropout(config.dropout)
        self.h = nn.ModuleList([Block(config) for _ in range(config.n_layer)])
        self.ln_f = nn.LayerNorm(config.n_embd, bias=config.bias)

    def forward(self, idx: Tensor) -> Tensor:
        """Final hidden states (B, T, C) of token ids (B, T). A ValueError if T exceeds the context."""
        T = idx.size(1)
        if self.wpe.num_embeddings < T:
            raise ValueError(f"a sequence of {T} tokens is longer than the context of {self.wpe.num_embeddings}")
        pos = torch.arange(T, device=idx.device)  # (T)
        x = self.drop(self.wte(idx) + self.wpe(pos))  # (B, T, C)
        for block in self.h:
            x = block(x)
        return self.ln_f(x)


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
        for name, parameter in self.named_parameters():  # the tied matrix comes once, as wte
            if name.endswith(".bias"):
                parameter.zero_()
            elif parameter.dim() >= 2:
                std = 0.02
                if name.endswith("c_proj.weight"):
                    # 2 per layer add to the residual stream: scaled, so that its variance does not grow with depth
                    std /= math.sqrt(2 * self.config.n_layer)
                parameter.normal_(0.0, std)
        self.lm_head.weight[self.config.vocab_size :] = 0.0  # the padding gets no gradient, so it stays zero

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor | None, Tensor | None]:
        """Next-token logits, or the loss if `targets` are given.

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
        # full micro-batch, (B, T, V), would take as much memory as all blocks of the 124M model. So the loss is
        # computed some rows at a time (not in fp16), together with the gradients of x and of the weight, which depend
        # only on softmax(logits) - one_hot(targets). The padding is left out of the softmax.
        x, targets, weight = x.flatten(0, 1), targets.flatten(), self.lm_head.weight  # (B*T, C), (B*T), (V padded, C)
        return None, chunked_cross_entropy(x, weight, targets, self.config.vocab_size)

    def logits(self, x: Tensor) -> Tensor:
        """Next-token logits (..., V) of hidden states (..., C), in fp32: near -35, bf16 values are 0.25 apart."""
        with torch.autocast(x.device.type, enabled=False):
            return self.lm_head(x.float())[..., : self.config.vocab_size]

    @classmethod
    def from_pretrained(cls, name_or_dir: str | os.PathLike[str], dropout: float = 0.0, verify: bool = True) -> GPT:
        """Loads a model on the Hugging Face hub (`gpt2`, `gpt2-medium`, ...) or a checkpoint directory, onto the CPU.

        With `verify`, the files of a checkpoint are compared with their checksums.

        Raises:
            UserError: files are missing, corrupt, or of a model that this class does not implement; what differs is
            named.
        """
        directory = huggingface.find_model(name_or_dir, verify)
        config = GPTConfig(**huggingface.read_config(directory), dropout=dropout)
        model = cls(config)
        weights = huggingface.read_weights(directory)
        model.load_state_dict(huggingface.from_hf(weights, model.state_dict(), config.vocab_size))
        return model

    def save_pretrained(self, directory: str | os.PathLike[str]) -> None:
        """Writes `config.json` and `model.safetensors`, which `from_pretrained` reads, here and in Hugging Face."""
        weights = huggingface.to_hf(self.state_dict(), self.config.vocab_size)
        huggingface.write_model(Path(directory), asdict(self.config), weights)

    def crop(self, block_size: int) -> None:
        """Drops the position embeddings from `block_size` on: a shorter context trains faster and in less memory."""
        self.config = replace(self.config, block_size=block_size)
        positions = self.transformer.wpe.weight[:block_size].detach().clone()
        self.transformer.wpe = nn.Embedding.from_pretrained(positions, freeze=False)

    def configure_optimizers(
        self, weight_decay: float, lr: float, betas: tuple[float, float], muon_dtype: torch.dtype | None = None
    ) -> torch.optim.Optimizer:
        """AdamW with weight decay on matrices and embeddings, but not on biases and layer norms.

        With `muon_dtype`, Muon updates the matrices of the blocks instead, with matrix products in this precision: it
        orthogonalizes their momentum, so that a step moves all directions of a matrix equally far.
        """
        num_splits: dict[nn.Parameter, int] = {}  # parameters for Muon, and how many matrices each one stacks
        if muon_dtype is not None:
            matrices = ((name, p) for name, p in self.transformer.h.named_parameters() if p.dim() >= 2)
            num_splits = {p: 3 if name.endswith("c_attn.weight") else 1 for name, p in matrices}  # query, key, value
        trained = [p for p in self.parameters() if p.requires_grad]  # with LoRA, not all of them
        groups = [
            {"params": [p for p in trained if p.dim() >= 2 and p not in num_splits], "weight_decay": weight_decay},
            {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
        ]
        if muon_dtype is None:
            return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=1e-8, fused=True)  # one kernel for all parameters
        muon_group = {"params": list(num_splits), "num_splits": list(num_splits.values()), "weight_decay": weight_decay}
        return Muon([muon_group, *groups], lr=lr, betas=betas, eps=1e-8, dtype=muon_dtype)

    def flops_per_token(self) -> int:
        """FLOPs to train on one token of a full context: 6N + 12*L*H*Q*T (PaLM, arXiv:2204.02311, appendix B).

        N leaves out the position embeddings, which are only looked up.
        """
        c = self.config
        N = sum(p.numel() for p in self.parameters()) - self.transformer.wpe.weight.numel()
        return 6 * N + 12 * c.n_layer * c.n_embd * c.block_size

    @torch.no_grad()
    def generate(
        self, idx: Tensor, max_new_tokens: int, temperature: float = 1.0, top_k: int | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:  # fmt: skip
        """Continues (B, T) token ids by sampling; returns (B, T + max_new_tokens).

        Only the last block_size tokens are context. Temperature 0 always takes the most likely token.
        """
        for _ in range(max_new_tokens):
            with devices.attention_without_cudnn(idx.device):  # every length is another shape
                x = self.transformer(idx[:, -self.config.block_size :])[:, -1]  # (B, C): the last position predicts
            probs = next_token_probs(self.logits(x), temperature, top_k)  # (B, V)
            idx = torch.cat((idx, torch.multinomial(probs, 1, generator=generator)), dim=1)
        return idx


def next_token_probs(logits: Tensor, temperature: float = 1.0, top_k: int | None = None) -> Tensor:
    """Probabilities to sample from, for logits (B, V): divided by the temperature, limited to the `top_k` largest."""
    logits = logits / max(temperature, 1e-10)
    if top_k is not None:
        kth = torch.topk(logits, min(top_k, logits.size(-1))).values[:, -1:]  # (B, 1)
        logits = logits.masked_fill(logits < kth, -math.inf)
    return F.softmax(logits, dim=-1)


# -----------------------------------------------------------------------------
# The data


class DataLoaderLite:
    """Batches from memory-mapped shards; the data of a step depends on the step alone.

    A shard of n tokens gives floor((n-1)/T) rows of T+1 tokens, at offsets 0, T, 2T, ...; an epoch is the rows of all
    shards. They are dealt in order, B at a time, to rank 0, 1, ... in turn: micro-batch m of rank r starts at row
    (m * world_size + r) * B, modulo the epoch. So a step, `grad_accum` micro-batches of all ranks, has the same rows in
    the same order for any number of ranks and any B, and resuming is arithmetic.

    With `shuffle`, each epoch has its own order of shards, and of rows within each.
    """

    def __init__(
        self, shards: Sequence[np.memmap], B: int, T: int, *, vocab_size: int, rank: int = 0, world_size: int = 1,
        grad_accum: int = 1, shuffle: bool = False, seed: int = 1337, device: torch.device | str = "cpu",
    ):  # fmt: skip
        self.shards, self.B, self.T, self.vocab_size = shards, B, T, vocab_size
        self.rank, self.world_size, self.grad_accum = rank, world_size, grad_accum
        self.shuffle, self.seed, self.device = shuffle, seed, torch.device(device)
        self.shard_rows = np.array([rows_in_shard(shard, T) for shard in shards])
        self.rows_per_epoch = int(self.shard_rows.sum())
        self._epoch = -1  # the epoch that _order and _ends describe
        self._permuted: tuple[tuple[int, int], np.ndarray] | None = None
        self.seek(0)

    def seek(self, step: int) -> None:
        """Moves to the first micro-batch of a step."""
        self.position = step * self.grad_accum
        self._prefetched: list[tuple[Tensor, Tensor]] = []  # the next micro-batch first

    def next_batch(self) -> tuple[Tensor, Tensor]:
        """This rank's next micro-batch: (B, T) tokens, and the (B, T) tokens that follow them."""
        if not self._prefetched:
            self.prefetch(1)
        self.position += 1
        return self._prefetched.pop(0)

    def prefetch(self, n: int) -> None:
        """Reads this rank's next n micro-batches and starts copying them to the device; raises as `batch`.

        It takes no time while a GPU computes, and a corrupt row is found while the current state can still be saved.
        """
        first = self.position * self.world_size + self.rank  # micro-batches are numbered over all ranks
        batches = range(first, first + n * self.world_size, self.world_size)
        self._prefetched = [self.batch(range(b * self.B, (b + 1) * self.B)) for b in batches]

    def batch(self, rows: Iterable[int]) -> tuple[Tensor, Tensor]:
        """The rows with these numbers, which continue through all epochs: (B, T) tokens and the tokens after them.

        Raises:
            UserError: a shard was truncated, or a token id is not in the vocabulary; the message names the shard.
        """
        tokens = torch.from_numpy(np.stack([self._row(n) for n in rows]).astype(np.int64))  # (B, T+1)
        tokens = devices.send(tokens, self.device)
        return tokens[:, :-1], tokens[:, 1:]

    def _row(self, n: int) -> np.ndarray:
        epoch, n = divmod(n, self.rows_per_epoch)
        if epoch != self._epoch:
            self._start_epoch(epoch)
        i = int(np.searchsorted(self._ends, n, side="right"))  # the row is in the i-th shard of this epoch
        shard = int(self._order[i])
        row = n - int(self._ends[i] - self.shard_rows[shard])
        if self.shuffle:
            row = int(self._permutation(epoch, shard)[row])
        return shards.read_tokens(self.shards[shard], row * self.T, self.T + 1, self.vocab_size)

    def _start_epoch(self, epoch: int) -> None:
        self._epoch = epoch
        self._order = np.arange(len(self.shards))
        if self.shuffle:  # the same order on all ranks
            self._order = np.random.default_rng((self.seed, epoch)).permutation(self._order)
        self._ends = np.cumsum(self.shard_rows[self._order])

    def _permutation(self, epoch: int, shard: int) -> np.ndarray:
        if self._permuted is None or self._permuted[0] != (epoch, shard):
            generator = np.random.default_rng((self.seed, epoch, shard))
            self._permuted = (epoch, shard), generator.permutation(self.shard_rows[shard])
        return self._permuted[1]


def rows_in_shard(shard: np.memmap, T: int) -> int:
    """Number of rows of T+1 tokens. Neighbours share a token: the last target of one is the first input of the next."""
    return max(0, (len(shard) - 1) // T)


# -----------------------------------------------------------------------------
# The recipe

MODELS = {
    "gpt2": dict(n_layer=12, n_head=12, n_embd=768),  # 124M parameters
    "gpt2-medium": dict(n_layer=24, n_head=16, n_embd=1024),  # 350M
    "gpt2-large": dict(n_layer=36, n_head=20, n_embd=1280),  # 774M
    "gpt2-xl": dict(n_layer=48, n_head=25, n_embd=1600),  # 1558M
}

# --recipe: how GPT-2 was trained, or how to reach the same loss with fewer tokens (docs/recipes.md).
RECIPES: dict[str, dict[str, Any]] = {
    "gpt2": dict(optimizer="adamw", schedule="cosine", max_lr=6e-4),
    "fast": dict(optimizer="muon", schedule="wsd", max_lr=3.6e-3),
}


@dataclass(frozen=True)
class TrainConfig(RunOptions):
    """The flags of a run. A resumed run may change max_steps and those of RunOptions (its text excepted), no others."""

    # fmt: off
    model: str = flag("gpt2", "model size", MAIN_GROUP, choices=tuple(MODELS))
    n_layer: int = flag(12, "layers", "model", default_help="set by --model", at_least=1, at_most=10_000)
    n_head: int = flag(12, "attention heads", "model", default_help="set by --model", at_least=1, below=2**31)
    n_embd: int = flag(768, "channels", "model", default_help="set by --model", at_least=1, below=2**31)
    block_size: int = flag(1024, "context length in tokens", "model", default_help="1024, or that of --init-from",
                           at_least=1, below=2**31)
    bias: bool = flag(True, "biases in linear layers and layer norms", "model")
    dropout: float = flag(0.0, "dropout probability", "model", at_least=0, below=1)
    init_from: str | None = flag(None, "pretrained weights to start from: a hub name or a checkpoint directory",
                                 MAIN_GROUP, default_help="random weights", metavar="NAME_OR_DIR")
    lora_rank: int | None = flag(None, "train only LoRA matrices of this rank, next to c_attn and c_proj", "model",
                                 default_help="train all weights", at_least=1, below=2**31)
    lora_alpha: float = flag(16.0, "LoRA alpha (scale = alpha / rank)", "model", at_least=0)

    total_batch_size: int = flag(524288, "tokens of an optimizer step, over all micro-batches and devices", "schedule",
                                 at_least=1)

    recipe: str = flag("gpt2", "defaults of --optimizer, --schedule and --max-lr: GPT-2's, or fast, the same loss with "
                       "fewer tokens", MAIN_GROUP, choices=tuple(RECIPES))
    max_steps: int = flag(19073, "total steps", MAIN_GROUP, at_least=1, at_most=MAX_STEPS)
    warmup_steps: int = flag(715, "steps of linear warm-up", "schedule", at_least=0)
    schedule: str = flag("cosine", "after the warm-up: cosine decay, or wsd, constant with a linear cooldown",
                         "schedule", default_help="cosine; wsd with --recipe fast", choices=("cosine", "wsd"))
    decay_steps: int = flag(19073, "step at which the cosine or the cooldown ends", "schedule",
                            default_help="--max-steps", at_least=1, at_most=MAX_STEPS)
    cooldown_fraction: float = flag(0.4, "length of wsd's cooldown, as a fraction of --decay-steps", "schedule",
                                    at_least=0, at_most=1)
    max_lr: float = flag(6e-4, "peak learning rate", "schedule", default_help="6e-4; 3.6e-3 with --recipe fast",
                         at_least=0)
    min_lr: float = flag(6e-5, "final learning rate", "schedule", at_least=0,
                         default_help="a tenth of --max-lr; a fiftieth with wsd")

    optimizer: str = flag("adamw", "AdamW, or Muon for the matrices of the blocks and AdamW for the rest", "optimizer",
                          default_help="adamw; muon with --recipe fast", choices=("adamw", "muon"))
    weight_decay: float = flag(0.1, "weight decay of tensors with 2 or more dimensions", "optimizer", at_least=0)
    beta1: float = flag(0.9, "AdamW's beta1", "optimizer", at_least=0, below=1)
    beta2: float = flag(0.95, "AdamW's beta2", "optimizer", at_least=0, below=1)
    grad_clip: float = flag(1.0, "largest gradient norm; 0: no clipping", "optimizer", at_least=0)

    seed: int = flag(1337, "seed of weights, shuffling, dropout and samples", "randomness", at_least=0, below=2**32)
    shuffle: bool = flag(False, "read shards, and the rows of each, in a new random order every epoch", "randomness")
    # fmt: on

    @property
    def cooldown_steps(self) -> int:
        """Steps of the cooldown of a wsd schedule, which does not start before the warm-up ends."""
        return max(0, min(round(self.cooldown_fraction * self.decay_steps), self.decay_steps - self.warmup_steps))


def get_lr(step: int, config: TrainConfig) -> float:
    """Learning rate of a step: linear warm-up, then a cosine from max_lr to min_lr, then min_lr.

    With the schedule "wsd" (warm-up, stable, decay), max_lr until the cooldown, which falls linearly to min_lr.
    """
    if step < config.warmup_steps:
        return config.max_lr * (step + 1) / config.warmup_steps  # + 1: a step at learning rate 0 would be wasted
    if step >= config.decay_steps:
        return config.min_lr
    if config.schedule == "wsd":
        left = (config.decay_steps - step) / config.cooldown_steps if config.cooldown_steps else 1.0
        return config.min_lr + min(1.0, left) * (config.max_lr - config.min_lr)
    progress = (step - config.warmup_steps) / (config.decay_steps - config.warmup_steps)
    return config.min_lr + 0.5 * (1.0 + math.cos(math.pi * progress)) * (config.max_lr - config.min_lr)


def resolve(flags: Mapping[str, Any], device: torch.device, world_size: int) -> TrainConfig:
    """The configuration that the flags specify; what they leave open follows from other flags or from the machine.

    Raises:
        UserError: their values do not fit each other.
    """
    on_gpu = device.type == "cuda"
    flags = {name: value for name, value in flags.items() if name not in MACHINE_FLAGS or value != "auto"}
    values = MODELS[flags.get("model", "gpt2")] | RECIPES[flags.get("recipe", "gpt2")]
    values |= {"decay_steps": flags.get("max_steps", TrainConfig.max_steps), **flags}
    values.setdefault("compile", on_gpu and presets.is_worth_compiling(values))
    values.setdefault("min_lr", values["max_lr"] / (50 if values["schedule"] == "wsd" else 10))
    values.setdefault("hellaswag_every", 250 if on_gpu or flags.keys() & {"hellaswag_data", "hellaswag_limit"} else 0)
    values |= {"device": device.type, "dtype": devices.pick_dtype(flags.get("dtype", "auto"), device)}
    config = TrainConfig(**values, given=frozenset(flags))
    if config.n_embd % config.n_head:
        raise UserError(f"--n-embd {config.n_embd} is not a multiple of --n-head {config.n_head}. Change one.")
    if config.min_lr > config.max_lr:
        raise UserError(f"--min-lr {config.min_lr:g} is above --max-lr {config.max_lr:g}. Lower it.")
    rows = batch_size.rows_per_rank(config.total_batch_size, config.block_size, world_size)
    return replace(config, batch_size=batch_size.pick_batch_size(flags.get("batch_size"), rows, device.type))


def new_model(config: TrainConfig, vocab_size: int) -> GPT:
    """The model that the configuration describes, with random weights."""
    sizes = {field.name: getattr(config, field.name) for field in fields(GPTConfig) if field.name != "vocab_size"}
    return GPT(GPTConfig(vocab_size=vocab_size, **sizes))


def initial_model(config: TrainConfig, tokenizer: Tokenizer, resume_from: Path | None) -> GPT:
    """The model at the start of this process, on the CPU: random weights, pretrained ones, or those of a checkpoint."""
    source = resume_from if resume_from and not config.lora_rank else config.init_from
    if source is None:
        torch.manual_seed(config.seed)  # on the CPU, so that every device starts from the same weights
        return new_model(config, tokenizer.vocab_size)
    model = GPT.from_pretrained(source, config.dropout, verify=False)  # gather_flags has verified the checksums
    context = model.config.block_size
    check_pretrained(source, model.config.vocab_size, tokenizer, context, config.block_size, config.data)
    model.crop(config.block_size)
    if config.lora_rank:
        lora.add_adapter(model, config.n_embd, config.lora_rank, config.lora_alpha, config.seed, resume_from)
    return model


# -----------------------------------------------------------------------------
# Evaluation. Validation and HellaSwag return None if they were interrupted because the run should stop.


@torch.no_grad()
def validation_loss(
    model: nn.Module, loader: DataLoaderLite, tokens: int, dist: Distributed, stop: StopHandler, amp: torch.autocast
) -> float | None:
    """Mean loss in nats over the first `tokens` tokens of a split, or all. It depends neither on the ranks nor on B."""
    rows = min(tokens // loader.T, loader.rows_per_epoch)
    total = n = 0.0
    first_rows = range(dist.rank * loader.B, rows, dist.world_size * loader.B)
    for first in stop.interruptible(progress_bar(first_rows, "validation", dist.rank)):
        try:
            x, y = loader.batch(range(first, min(first + loader.B, rows)))  # the last batch may be smaller
        except UserError as error:
            stop.fail(error)  # the training state is good: save it first
            break
        with amp:
            _, loss = model(x, y)
        total += loss.item() * len(x)
        n += len(x)
    total, n, stop_requests = dist.all_reduce_sum(total, n, stop.requested)
    return None if stop.agree(stop_requests) else total / n


@torch.no_grad()
def hellaswag_score(
    model: GPT, examples: Sequence[hellaswag.Example], dist: Distributed, stop: StopHandler, amp: torch.autocast
) -> tuple[float, float] | None:
    """acc_norm over all examples, divided among the ranks, and its standard error."""
    scoring_model = hellaswag.ScoringModel(model.transformer, model.logits, model.config.block_size, dist.device)
    rank_examples = hellaswag.examples_for_rank(examples, dist.rank, dist.world_size, model.config.block_size)
    with amp:
        _, losses = hellaswag.completion_losses(
            scoring_model,
            rank_examples,
            progress=lambda rows: stop.interruptible(progress_bar(rows, "HellaSwag, texts", dist.rank)),
        )
    correct, total, stop_requests = dist.all_reduce_sum(
        hellaswag.count_correct(losses, rank_examples), len(rank_examples), stop.requested
    )
    return None if stop.agree(stop_requests) else hellaswag.accuracy(correct, total)


def sample(
    model: GPT, tokenizer: Tokenizer, prompt: str, n: int, max_new_tokens: int, generator: torch.Generator,
    temperature: float = 1.0, top_k: int | None = 50,
) -> list[str]:  # fmt: skip
    """`n` continuations of `prompt`, the prompt included."""
    idx = torch.tensor([tokenizer.encode(prompt) or [tokenizer.eot]], device=generator.device).repeat(n, 1)  # (n, T)
    texts = model.generate(idx, max_new_tokens, temperature, top_k, generator)
    return [tokenizer.decode(text) for text in texts.tolist()]


# -----------------------------------------------------------------------------
# Training


def train_step(
    model: nn.Module, state: TrainState, loader: DataLoaderLite, lr: float, config: TrainConfig, dist: Distributed,
    stop: StopHandler, amp: torch.autocast,
) -> tuple[float, float] | None:  # fmt: skip
    """One optimizer step on `loader.grad_accum` micro-batches of each rank; `model` may be compiled and wrapped by DDP.

    If the loss or a gradient is not finite, the step is skipped, on all ranks.

    Returns:
        The mean loss in nats and the gradient norm before clipping, the same on all ranks. None if a signal interrupted
        the step, which only happens with one process; then nothing was applied.
    """
    optimizer, scaler = state.optimizer, state.scaler
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.zero_grad(set_to_none=True)
    loss_sum = torch.zeros((), device=dist.device)
    for micro_step in range(loader.grad_accum):
        if stop.agreed:  # several ranks agree at the end of a step only
            return None
        x, y = loader.next_batch()  # (B, T) each
        # DDP, and FSDP, average gradients over the ranks during backward. Once per step is enough: in the last
        # micro-step. The flag must be set before the forward pass, which prepares the reduction.
        if isinstance(model, DistributedDataParallel | fsdp.ShardedModel):
            model.require_backward_grad_sync = micro_step == loader.grad_accum - 1
        with amp:
            _, loss = model(x, y)
        # backward() adds to the gradients, and each loss is a mean over its micro-batch. Without this division the sum
        # would be grad_accum times the gradient of the full batch.
        loss = loss / loader.grad_accum
        loss_sum += loss.detach()
        scaler.scale(loss).backward()  # scales only in fp16, where small gradients would become zero
    if state.step + 1 < config.max_steps:
        try:
            loader.prefetch(loader.grad_accum)  # of the next step, while the device is still computing
        except UserError as error:
            stop.fail(error)  # this step is good: apply and save it first
    scaler.unscale_(optimizer)
    norm = fsdp.full_tensor(nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip or math.inf))
    # One all-reduce for all that the ranks must agree on. They have the same norm already, so its mean is the norm.
    reduced = dist.all_reduce_mean(torch.stack([loss_sum, norm, torch.full_like(norm, stop.requested)]))
    finite = reduced.isfinite().all()
    if scaler.is_enabled():  # fp16: skips the step after an overflow of the gradients, and lowers their scale
        scaler.step(optimizer)
        scaler.update()
    else:
        # Fused AdamW and Muon skip the step if found_inf is 1. They read it on the device, so the host does not wait,
        # except on MPS, where they do not read it. grad_scale None: the gradients are not scaled.
        optimizer.grad_scale, optimizer.found_inf = None, 1.0 - finite.float()  # type: ignore[attr-defined]
        if dist.device.type != "mps" or finite:
            optimizer.step()
    mean_loss, norm, stop_requests = reduced.tolist()  # the only CPU-GPU sync point of a step
    stop.agree(stop_requests)
    return mean_loss, norm


def train(config: TrainConfig, dist: Distributed, checkpoint: Checkpoint | None = None) -> TrainState:
    """Trains to `config.max_steps`, from the beginning or from a checkpoint.

    Raises:
        UserError: data, folder or model are unusable, too many steps in a row were not finite, or saving failed.
        SystemExit: a signal ended the run; its state is saved.
    """
    device, rank, world_size, print0 = dist.device, dist.rank, dist.world_size, dist.print0
    dtype, T = devices.DTYPES[config.dtype], config.block_size
    sharded = config.parallel == "fsdp" and world_size > 1  # each rank keeps a part of every weight
    resume_from = checkpoint.path if checkpoint else None
    rank_rows = batch_size.rows_per_rank(config.total_batch_size, T, world_size)  # in each step
    watchdog = Watchdog(dist, config.out)

    # Everything that can fail or take long comes before the first step. The first rank of each node goes first, and
    # downloads for the others.
    with dist.local_rank_zero_first():
        if rank == 0:
            run_folder.check_folder(config.out, resume_from, config.overwrite_policy)
            trackers.check_installed(config)
        if config.demo or config.text is not None:
            presets.make_preset_shards(config.to_dict(), rank, resumed=checkpoint is not None)
        train_shards = shards.open_shards(config.data, "train")
        has_val = config.val_every or shards.shard_paths(config.data, "val")
        val_shards = shards.open_shards(config.data, "val") if has_val else []
        tokenizer = shards.read_tokenizer(config.data)
        bytes_per_token = shards.bytes_per_token([*val_shards, *train_shards][0], tokenizer)
        memory.check_training_fits(config, tokenizer.vocab_size, dist)
        with fsdp.weights_on_rank_zero(sharded, rank):
            model = initial_model(config, tokenizer, resume_from)
        memory.recompute_activations(model.transformer.h if config.recompute else [])
        full_model = fsdp.without_weights(model) if sharded else model.to(device)  # has all weights: for evaluation
        identity = data_identity(config.data, train_shards, val_shards, model)
        if checkpoint:
            check_same_data(checkpoint, identity, config.data)
        train_rows, val_rows = (sum(rows_in_shard(shard, T) for shard in split) for split in (train_shards, val_shards))
        val_tokens = config.val_tokens if config.val_every else None
        batch_size.check_enough_data(config.data, T, train_rows, rank_rows * world_size, val_rows, val_tokens)
        examples = hellaswag.load_examples(config, tokenizer, T, print0) if config.hellaswag_every else []
        devices.prepare(device, config.tf32, dtype, T)
        amp = devices.autocast(device, dtype)
        compiled = devices.compile(full_model, device) if config.compile else full_model
        B = batch_size.largest_batch_size(config, compiled, dist)

    # Ranks that differ would wait for each other forever. Connected, they exchange tensors: by NCCL on GPUs, else gloo.
    network_seconds = preflight.connect(dist, watchdog, config, identity, checkpoint.step if checkpoint else 0, model)
    parallel_model = compiled
    if sharded:
        parallel_model = fsdp.ShardedModel(model, model.transformer.h, device, dtype, compiled is not full_model)
    elif world_size > 1:
        # The graph compiled so far is one piece. DDP needs it cut at its buckets, to send gradients during backward.
        torch.compiler.reset()
        parallel_model = DistributedDataParallel(compiled, gradient_as_bucket_view=True)
    muon_dtype = None if config.optimizer != "muon" else torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
    optimizer = model.configure_optimizers(config.weight_decay, config.max_lr, (config.beta1, config.beta2), muon_dtype)
    state = TrainState(model, optimizer, torch.amp.GradScaler(device.type, enabled=dtype == torch.float16))
    if checkpoint:
        state.restore(checkpoint)  # the model has its weights already

    examples = examples if dist.all_reduce_min(len(examples)) else []
    B = dist.all_reduce_min(B)
    new_loader = partial(
        DataLoaderLite, B=B, T=T, vocab_size=tokenizer.vocab_size, rank=rank, world_size=world_size, device=device
    )
    loader = new_loader(train_shards, grad_accum=rank_rows // B, shuffle=config.shuffle, seed=config.seed)
    loader.seek(state.step)
    val_loader = new_loader(val_shards) if config.val_every else None
    if config.minutes and not checkpoint:
        config = replace(config, **budget.flags_for_minutes(
            config, STARTED, parallel_model, loader, val_loader, amp, dist,
            model.configure_optimizers(0.0, 0.0, (0.9, 0.95), muon_dtype),  # leaves the weights as they are
        ))  # fmt: skip

    # Locks --out. A new run replaces an earlier one here, if it may.
    lock = dist.on_rank_zero(lambda: run_folder.claim_folder(config.out, resume_from, config.overwrite_policy))
    stop = StopHandler(world_size)
    logger = RunLogger(
        config, dist, first_step=state.step, max_steps=config.max_steps, tokens_per_step=config.total_batch_size,
        flops_per_token=model.flops_per_token(), earlier_flags=checkpoint.config if checkpoint else {},
        network_seconds=network_seconds,
        record=record.describe_run(config, dist, model, asdict(model.config), identity, tokenizer, bytes_per_token),
    )  # fmt: skip
    run_info = RunInfo(config, identity, asdict(model.config), tokenizer, logger.sync, bytes_per_token, len(examples))
    checkpoints = CheckpointManager(config.out, config.keep, stop, run_info, rank, newest=state.step)
    profiler = Profiler(config.profile, config.out, device, rank, print0)
    synchronize = devices.synchronizer(device)
    print_header(
        config, dist, model, asdict(model.config), describe_recipe(config), B=B, grad_accum=loader.grad_accum,
        rows_per_epoch=train_rows, bytes_per_token=bytes_per_token, resume_from=resume_from, first_step=state.step,
    )  # fmt: skip

    def due(*intervals: int) -> bool:
        """Whether one of several things is due before the next step, or after the last one."""
        return any(every > 0 and (state.step % every == 0 or state.step == config.max_steps) for every in intervals)

    with lock or nullcontext(), stop, logger, checkpoints, profiler, watchdog:
        finished, text = False, ""
        while not stop.agreed:
            step, last = state.step, state.step == config.max_steps
            evaluates = due(config.val_every, config.hellaswag_every, config.sample_every)
            if evaluates or (last and config.demo):  # which ends with a text
                fsdp.gather_weights(full_model, model)
            if config.dropout:
                full_model.eval()  # otherwise both modes compute the same, and torch.compile would compile each
            if val_loader and due(config.val_every) and not logger.already_reported(step, "val"):
                val_loss = validation_loss(compiled, val_loader, config.val_tokens, dist, stop, amp)
                if val_loss is None:
                    break
                logger.validation(step, val_loss)
            if examples and due(config.hellaswag_every) and not logger.already_reported(step, "hella"):
                started = time.perf_counter()
                score = hellaswag_score(full_model, examples, dist, stop, amp)
                if score is None:
                    break
                logger.hellaswag(step, *score, len(examples), time.perf_counter() - started)
            if rank == 0 and step > 0 and due(config.sample_every) and not logger.already_reported(step, "samples"):
                generator = devices.seeded_generator(device, config.seed, step, rank)
                length = 128 if tokenizer.name == "bytes" else 32  # a GPT-2 token is about four bytes
                with amp:  # uncompiled: every length would be compiled again
                    logger.samples(step, sample(full_model, tokenizer, config.prompt, 4, length, generator))
            if due(config.checkpoint_every):
                checkpoints.save(state, final=last)
            if evaluates or due(config.checkpoint_every):
                devices.trim_memory(device)  # evaluations fragment the heap of a CPU
            if last:
                finished = True
                break
            fsdp.drop_weights(full_model, model)

            lr = get_lr(step, config)
            if config.dropout:
                model.train()
                # The masks depend on (seed, step, rank) alone, so a resumed run draws the same ones.
                torch.manual_seed(devices.derive_seed(config.seed, step, rank))
            synchronize()  # the clock must not count what an evaluation left in the GPU's queue
            started = time.perf_counter()
            with watchdog.step(step):
                result = train_step(parallel_model, state, loader, lr, config, dist, stop, amp)
            if result is None:
                break
            dt = time.perf_counter() - started  # without evaluation, logging and checkpoints
            loss, norm = result
            skipped = state.finish_step(loss, norm)
            logger.step(step, loss, lr, norm, dt, skipped)
            state.check_bad_steps(config.max_bad_steps)
            profiler.step()

        if not finished:  # a signal or a failure, on any rank: save, then exit on all ranks
            if config.checkpoint_every:
                checkpoints.save(state, final=True)
            checkpoints.finish()
            if not stop.failure:
                print0(f"step {state.step:5d} | stopped. {checkpoints.describe_newest()}")
            stop.exit_all_ranks(dist.all_reduce_min)
    if config.demo and rank == 0:
        with amp:
            generator, length = devices.seeded_generator(device, config.seed), 500 if tokenizer.name == "bytes" else 150
            [text] = sample(full_model.eval(), tokenizer, "The", 1, length, generator, 0.8)
    print_summary(config, dist, logger.first_step, bytes_per_token, text)
    return state


@report_lost_processes()
def main(argv: Sequence[str] | None = None) -> None:
    # command line -> all flags, with those of a preset or of the checkpoint to resume -> configuration -> run
    cli_flags = parse_flags(TrainConfig, argv, __doc__, ("text", "model", "schedule", "optimizer", "randomness"))
    dist = Distributed.from_environment()
    flags, checkpoint = gather_flags(TrainConfig, cli_flags, dist)
    if flags.get("plan"):
        gpus, dtype = flags.setdefault("gpus", dist.world_size), cli_flags.get("dtype", "auto").replace("auto", "bf16")
        config = resolve(flags | {"dtype": dtype}, torch.device("cuda"), gpus)
        return plan.print_report(config, partial(new_model, config), dist.rank)
    dist = dist.with_device(flags.get("device", "auto"))
    config = resolve(flags, dist.device, dist.world_size)
    if config.minutes and config.recipe == "fast" and not checkpoint:
        sizes = budget.sizes_for_minutes(config, cli_flags, dist, lambda **sizes: GPT(GPTConfig(**sizes)))
        config = resolve(flags | sizes, dist.device, dist.world_size)
    exit_code: int | str | None = 0
    try:
        with memory.report_out_of_memory():
            train(config, dist, checkpoint)
    except SystemExit as stopped:
        exit_code = stopped.code
    dist.close()  # train has returned, so DDP's model is gone: gloo's threads and ours would deadlock otherwise
    sys.exit(exit_code)


if __name__ == "__main__":
    run_cli(main)
