"""Pre-trains GPT-2 from token shards. One file: the model, its data, the loop.

    python train_gpt2.py --demo                                  # everything once, small, without network
    python train_gpt2.py                                         # GPT-2 124M on one GPU, CPU or Apple GPU
    torchrun --standalone --nproc_per_node=8 train_gpt2.py       # the same run on a node of 8 GPUs
    python train_gpt2.py --resume                                # go on where it stopped

The shards come from `python fineweb.py`. `--help` lists all flags; their defaults are the recipe of GPT-2 124M.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
import torch.nn as nn
from torch.nn import functional as F

import hellaswag
from support import checkpoint, devices, fit, huggingface, lora, rendezvous, report, resume, run_folder, shards, speed
from support.cli import Parser, UserError, add_flags, flag, flag_name, out_of_range, run
from support.log import RunLog
from support.loss import chunked_cross_entropy
from support.muon import Muon
from support.presets import DEMO, make_shards, preset
from support.profiling import Profiler
from support.stop import Stop, Stopped, count_bad_steps
from support.tokenizer import Tokenizer, get_tokenizer
from support.track import Tracker, boards, check_boards

# -----------------------------------------------------------------------------
# The model. B is batch, T is time, C is channels (n_embd), nh is heads, hs is head size (C / nh), V is vocabulary.


@dataclass(frozen=True)
class GPTConfig:
    block_size: int = 1024  # the longest context, in tokens
    vocab_size: int = 50257  # 50,000 merges, 256 bytes, <|endoftext|>
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    bias: bool = True  # in the linear layers and norms
    dropout: float = 0.0  # GPT-2's was 0.1; text that is read once needs none

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding, a multiple of 64: odd sizes are slow on a GPU. 50,257 become 50,304."""
        return -(-self.vocab_size // 64) * 64


class CausalSelfAttention(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.n_head = config.n_head
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, config.bias)  # query, key and value of all heads
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, config.bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        B, T, C = x.shape
        q, k, v = self.c_attn(x).split(C, dim=2)  # (B, T, C) each
        q, k, v = (t.view(B, T, self.n_head, C // self.n_head).transpose(1, 2) for t in (q, k, v))  # (B, nh, T, hs)
        p = self.dropout.p if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)  # flash: no (T, T) matrix is kept
        y = y.transpose(1, 2).reshape(B, T, C)  # heads side by side again
        return self.dropout(self.c_proj(y))


class MLP(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd, config.bias)
        self.gelu = nn.GELU(approximate="tanh")  # GPT-2's; today nothing would be lost with the exact one
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd, config.bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(self.c_proj(self.gelu(self.c_fc(x))))


class Block(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.mlp = MLP(config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.ln_1(x))  # tokens exchange what they know
        x = x + self.mlp(self.ln_2(x))  # each thinks about it alone
        return x


class GPT(nn.Module):
    """GPT-2, with the names of Hugging Face's GPT2LMHeadModel."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        self.transformer = nn.ModuleDict(
            dict(
                wte=nn.Embedding(config.padded_vocab_size, config.n_embd),
                wpe=nn.Embedding(config.block_size, config.n_embd),
                drop=nn.Dropout(config.dropout),
                h=nn.ModuleList([Block(config) for _ in range(config.n_layer)]),
                ln_f=nn.LayerNorm(config.n_embd, bias=config.bias),
            )
        )
        self.lm_head = nn.Linear(config.n_embd, config.padded_vocab_size, bias=False)
        self.lm_head.weight = self.transformer.wte.weight  # one matrix reads tokens and predicts them
        self._init_weights()

    @torch.no_grad()
    def _init_weights(self) -> None:
        for name, parameter in self.named_parameters():
            if name.endswith(".bias"):
                parameter.zero_()
            elif parameter.dim() >= 2:
                std = 0.02
                if name.endswith("c_proj.weight"):  # 2 per layer add to the residual stream; keep its variance at 1
                    std /= math.sqrt(2 * self.config.n_layer)
                parameter.normal_(0.0, std)
        self.lm_head.weight[self.config.vocab_size :] = 0.0  # the padding; it never gets a gradient and stays zero

    def forward(
        self, idx: torch.Tensor, targets: torch.Tensor | None = None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Next-token logits, or the loss when `targets` are given.

        Args:
            idx: (B, T) token ids, T at most block_size.
            targets: (B, T) ids of the tokens that follow.

        Returns:
            `(logits, None)` with fp32 logits (B, T, V), or `(None, loss)` with the mean cross-entropy in nats.

        Raises:
            ValueError: the sequence is longer than the block.
        """
        x = self.hidden(idx)
        if targets is None:
            return self.logits(x), None
        # For speed: F.cross_entropy(self.lm_head(x), targets), some rows at a time. All logits at once, (B, T, V), would
        # take as much memory as all blocks of the 124M model. The padding gets no share and no gradient.
        x, targets, head = x.flatten(0, 1), targets.flatten(), self.lm_head.weight  # (B*T, C), (B*T), (V, C)
        return None, chunked_cross_entropy(x, head, targets, self.config.vocab_size)

    def hidden(self, idx: torch.Tensor) -> torch.Tensor:
        """What the blocks make of (B, T) token ids: (B, T, C), each row an idea of what follows its token."""
        T = idx.size(1)
        if self.config.block_size < T:
            raise ValueError(f"a sequence of {T} tokens is longer than the block of {self.config.block_size}")
        positions = torch.arange(T, device=idx.device)
        x = self.transformer.drop(self.transformer.wte(idx) + self.transformer.wpe(positions))  # (B, T, C)
        for block in self.transformer.h:
            x = block(x)
        return self.transformer.ln_f(x)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Next-token logits (..., V) of hidden rows (..., C), in fp32: bf16 rounds -35 and below to multiples of 0.25."""
        with torch.autocast(x.device.type, enabled=False):
            return self.lm_head(x.float())[..., : self.config.vocab_size]

    @classmethod
    def from_pretrained(cls, name_or_dir: str | os.PathLike, dropout: float = 0.0) -> GPT:
        """A model of the Hugging Face hub (`gpt2`, `gpt2-medium`, `gpt2-large`, `gpt2-xl`) or a checkpoint directory.

        Raises:
            UserError: it cannot be had, or is not a GPT-2 that this class computes; the field or tensor is named.
        """
        directory = huggingface.find(name_or_dir)
        config = GPTConfig(**huggingface.read_config(directory), dropout=dropout)
        model = cls(config)
        weights = huggingface.read_weights(directory)
        model.load_state_dict(huggingface.to_ours(weights, model.state_dict(), config.vocab_size))
        return model

    def save_pretrained(self, directory: str | os.PathLike) -> None:
        """Writes `config.json` and `model.safetensors`, which `from_pretrained` here and in Hugging Face reads."""
        weights = huggingface.to_theirs(self.state_dict(), self.config.vocab_size)
        huggingface.write(Path(directory), asdict(self.config), weights)

    def crop(self, block_size: int) -> None:
        """Forgets the positions from `block_size` on: a shorter context, to train faster and in less memory."""
        self.config = replace(self.config, block_size=block_size)
        positions = self.transformer.wpe.weight[:block_size].detach().clone()
        self.transformer.wpe = nn.Embedding.from_pretrained(positions, freeze=False)

    def configure_optimizers(
        self, weight_decay: float, learning_rate: float, betas: tuple[float, float], muon: torch.dtype | None = None
    ) -> torch.optim.AdamW:
        """AdamW that decays matrices and embeddings, but neither biases nor layer norms; fused, one kernel for all.

        With `muon`, the precision of its products, the matrices of the blocks get Muon instead: it makes a momentum
        orthogonal, so that an update moves all directions equally far.
        """
        matrices = {  # and how many each is: query, key and value are three
            p: 3 if name.endswith("c_attn.weight") else 1
            for name, p in self.transformer.h.named_parameters()
            if p.dim() >= 2 and muon
        }
        trained = [p for p in self.parameters() if p.requires_grad]  # all, but for LoRA's base
        decayed = [p for p in trained if p.dim() >= 2 and p not in matrices]
        groups = [
            {"params": decayed, "weight_decay": weight_decay},
            {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
        ]
        adamw = dict(lr=learning_rate, betas=betas, eps=1e-8)
        if muon is None:
            return torch.optim.AdamW(groups, fused=True, **adamw)
        by_muon = {"params": list(matrices), "parts": list(matrices.values()), "weight_decay": weight_decay}
        return Muon([by_muon, *groups], dtype=muon, **adamw)

    def flops_per_token(self) -> int:
        """FLOPs to train on one token of a full block: 6N + 12*L*H*Q*T (PaLM, arXiv:2204.02311, appendix B).

        N leaves out the position embeddings, which are only looked up.
        """
        c = self.config
        N = sum(p.numel() for p in self.parameters()) - self.transformer.wpe.weight.numel()
        return 6 * N + 12 * c.n_layer * c.n_embd * c.block_size

    @torch.no_grad()
    def generate(
        self,
        idx: torch.Tensor,
        max_new_tokens: int,
        temperature: float = 1.0,
        top_k: int | None = None,
        generator: torch.Generator | None = None,
    ) -> torch.Tensor:
        """Continues (B, T) token ids by sampling; returns (B, T + max_new_tokens).

        Only the last block_size tokens are looked at. Temperature 0 takes the likeliest token each time.
        """
        for _ in range(max_new_tokens):
            x = self.hidden(idx[:, -self.config.block_size :])[:, -1]  # (B, C)
            probs = next_token_probs(self.logits(x), temperature, top_k)  # (B, V)
            idx = torch.cat((idx, torch.multinomial(probs, 1, generator=generator)), dim=1)
        return idx


def next_token_probs(logits: torch.Tensor, temperature: float = 1.0, top_k: int | None = None) -> torch.Tensor:
    """(B, V) logits to the probabilities that are sampled from: sharpened by temperature, cut to the best `top_k`."""
    logits = logits / max(temperature, 1e-5)
    if top_k is not None:
        kth = torch.topk(logits, min(top_k, logits.size(-1))).values[:, -1:]  # (B, 1)
        logits = logits.masked_fill(logits < kth, -math.inf)
    return F.softmax(logits, dim=-1)


# -----------------------------------------------------------------------------
# The data


class DataLoaderLite:
    """Rows of T+1 tokens from memory-mapped shards, dealt so that a step's data depends on the step alone.

    A shard of n tokens has floor((n-1)/T) rows, at offsets 0, T, 2T, ...; an epoch is the rows of all shards. Rows
    are consumed in order, B at a time, by rank 0, 1, ... in turn: micro-batch j of rank r is the rows from
    (j * world + r) * B, modulo the epoch. So `grad_accum` micro-batches of all ranks together are one update's rows,
    the same rows in the same order for any number of ranks and any B.

    With `shuffle`, each epoch has another order of shards, and of rows within each.
    """

    def __init__(
        self,
        shards: Sequence[np.memmap],
        B: int,
        T: int,
        *,
        vocab_size: int,
        rank: int = 0,
        world: int = 1,
        grad_accum: int = 1,
        shuffle: bool = False,
        seed: int = 1337,
        device: torch.device | str = "cpu",
    ):
        self.B, self.T, self.vocab_size = B, T, vocab_size
        self.rank, self.world, self.grad_accum = rank, world, grad_accum
        self.shuffle, self.seed, self.device = shuffle, seed, torch.device(device)
        self.shards = shards
        self.shard_rows = np.array([max(0, (len(s) - 1) // T) for s in shards])
        self.rows_per_epoch = int(self.shard_rows.sum())
        self._epoch = -1  # the epoch that _order and _ends describe
        self._permuted: tuple[tuple[int, int], np.ndarray] | None = None
        self.reset()

    def resize(self, B: int) -> None:
        """Begins again with micro-batches of another size, the same rows to an update."""
        self.B, self.grad_accum = B, self.grad_accum * self.B // B
        self.reset()

    def reset(self, step: int = 0) -> None:
        """Goes to the first micro-batch of an optimizer step."""
        self.position = step * self.grad_accum
        self._ahead: list[tuple[torch.Tensor, torch.Tensor]] = []  # micro-batches that were read, the next one first

    def next_batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's next micro-batch: (B, T) tokens and the (B, T) tokens that follow them."""
        if not self._ahead:
            self.read_ahead(1)
        self.position += 1
        return self._ahead.pop(0)

    def read_ahead(self, n: int) -> None:
        """Reads this rank's next n micro-batches and begins to send them to the device; raises as `batch`.

        Done for a whole update while a GPU computes the one before, it costs nothing, and a broken row is met while
        there still is a good state to save.
        """
        numbers = range(self.position * self.world + self.rank, (self.position + n) * self.world, self.world)
        self._ahead = [self.batch(range(b * self.B, (b + 1) * self.B)) for b in numbers]

    def batch(self, rows: Iterable[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows of these numbers, counted through all epochs, on the device.

        Raises:
            UserError: a token id is not in the vocabulary; its shard and offset are named.
        """
        tokens = torch.from_numpy(np.stack([self._row(n) for n in rows]).astype(np.int64))  # (B, T+1)
        tokens = devices.send(tokens, self.device)
        return tokens[:, :-1], tokens[:, 1:]

    def _row(self, n: int) -> np.ndarray:
        epoch, n = divmod(n, self.rows_per_epoch)
        if epoch != self._epoch:
            self._start_epoch(epoch)
        place = int(np.searchsorted(self._ends, n, side="right"))
        shard = int(self._order[place])
        row = n - int(self._ends[place] - self.shard_rows[shard])
        if self.shuffle:
            row = int(self._permutation(epoch, shard)[row])
        tokens = self.shards[shard][row * self.T : row * self.T + self.T + 1]
        if tokens.max() >= self.vocab_size:
            where = row * self.T + int(tokens.argmax())
            raise UserError(
                f"{self.shards[shard].filename} has the id {tokens.max()} at offset {where}, beyond the vocabulary of "
                f"{self.vocab_size:,}. Make the shards again, with the tokenizer of the model.",
                this_rank_only=True,
            )
        return tokens

    def _start_epoch(self, epoch: int) -> None:
        self._epoch = epoch
        self._order = np.arange(len(self.shards))
        if self.shuffle:
            self._order = np.random.default_rng((self.seed, epoch)).permutation(self._order)
        self._ends = np.cumsum(self.shard_rows[self._order])

    def _permutation(self, epoch: int, shard: int) -> np.ndarray:
        if self._permuted is None or self._permuted[0] != (epoch, shard):
            generator = np.random.default_rng((self.seed, epoch, shard))
            self._permuted = (epoch, shard), generator.permutation(self.shard_rows[shard])
        return self._permuted[1]


# -----------------------------------------------------------------------------
# The recipe

MODELS = {
    "gpt2": dict(n_layer=12, n_head=12, n_embd=768),  # 124M parameters
    "gpt2-medium": dict(n_layer=24, n_head=16, n_embd=1024),  # 350M
    "gpt2-large": dict(n_layer=36, n_head=20, n_embd=1280),  # 774M
    "gpt2-xl": dict(n_layer=48, n_head=25, n_embd=1600),  # 1558M
}

# What --recipe sets: how GPT-2 was trained, or how to get there with fewer tokens (docs/recipes.md).
RECIPES = {
    "gpt2": dict(optimizer="adamw", schedule="cosine", max_lr=6e-4),
    "fast": dict(optimizer="muon", schedule="wsd", max_lr=3.6e-3),
}


@dataclass(frozen=True)
class TrainConfig:
    """Every choice of a run, each one a flag. The defaults are those of GPT-2 124M on 10 billion tokens."""

    data: str = flag("edu_fineweb10B", "folder of token shards", "files", metavar="DIR")
    text: str | None = flag(
        None, "train on a file of text, or on a folder of them, with flags that fit its amount", "files",
        auto="none, but the shards in --data", metavar="PATH",
    )  # fmt: skip
    tokenizer: str = flag("gpt2", "that of --text", "files", choices=("gpt2", "bytes"))
    out: str = flag("log", "folder for the log and the checkpoints", "files", metavar="DIR")
    resume: str | None = flag(
        None, "go on from the newest checkpoint in --out; with auto, start anew if there is none", "files",
        auto="a new run", choices=("newest", "auto"), nargs="?", const="newest", metavar="auto",
    )  # fmt: skip
    verify_data: bool = flag(False, "read all shards first and compare them with their checksums", "files")
    demo: bool = flag(False, "train a small model on Python's documentation, in demo_data/ and log_demo/", "files")

    model: str = flag("gpt2", "size of the model", "model", choices=tuple(MODELS))
    n_layer: int | None = flag(None, "layers", "model", auto="that of --model", least=1, below=2**31)
    n_head: int | None = flag(None, "attention heads", "model", auto="that of --model", least=1, below=2**31)
    n_embd: int | None = flag(None, "channels", "model", auto="that of --model", least=1, below=2**31)
    block_size: int | None = flag(
        None, "context, in tokens", "model", auto="1024; with --init-from its own, or less", least=1, below=2**31
    )
    bias: bool = flag(True, "biases in the linear layers and norms", "model")
    dropout: float = flag(0.0, "share of the activations that are dropped in training", "model", least=0, below=1)
    init_from: str | None = flag(None, "weights to start from, a hub name or a checkpoint", "model", auto="random ones")
    lora_rank: int | None = flag(
        None, "train LoRA's matrices of this rank beside c_attn and c_proj, and nothing else", "model", auto="train the weights",
        least=1, below=2**31,
    )  # fmt: skip
    lora_alpha: float = flag(16.0, "what LoRA's matrices add is multiplied by this over their rank", "model", least=0)
    merge: bool = flag(False, "in the end, add LoRA's matrices to the weights, as a whole model in OUT/merged", "model")

    batch_size: int | None = flag(
        None, "rows of a micro-batch on a device", "batch", auto="64 on CUDA, else 4", least=1, below=2**31
    )
    total_batch_size: int = flag(524288, "tokens of one update, over all micro-batches and devices", "batch", least=1)

    recipe: str = flag(
        "gpt2", "defaults of --optimizer, --schedule and the rates: GPT-2's, or fast for the same loss in fewer tokens",
        "schedule", choices=tuple(RECIPES),
    )  # fmt: skip
    max_steps: int = flag(19073, "updates in all", "schedule", least=1, below=2**31)
    warmup_steps: int = flag(715, "updates of linear warm-up", "schedule", least=0)
    schedule: str | None = flag(
        None, "after the warm-up a cosine, or wsd: the same rate until it cools down, linearly", "schedule",
        auto="cosine; with --recipe fast wsd", choices=("cosine", "wsd"),
    )  # fmt: skip
    decay_steps: int | None = flag(
        None, "update at which the cosine or the cooldown ends", "schedule", auto="--max-steps", least=1, below=2**31
    )
    cooldown_fraction: float = flag(0.4, "share of --decay-steps that is wsd's cooldown", "schedule", least=0, most=1)
    max_lr: float | None = flag(None, "peak learning rate", "schedule", auto="6e-4; with --recipe fast 3.6e-3", least=0)
    min_lr: float | None = flag(
        None, "rate in the end", "schedule", auto="a tenth of --max-lr; with wsd a fiftieth", least=0
    )

    optimizer: str | None = flag(
        None, "AdamW, or Muon for the matrices of the blocks and AdamW for the rest", "optimizer",
        auto="adamw; with --recipe fast muon", choices=("adamw", "muon"),
    )  # fmt: skip
    weight_decay: float = flag(0.1, "weight decay, on tensors of 2 and more dimensions", "optimizer", least=0)
    beta1: float = flag(0.9, "AdamW's first beta", "optimizer", least=0, below=1)
    beta2: float = flag(0.95, "AdamW's second beta", "optimizer", least=0, below=1)
    grad_clip: float = flag(1.0, "largest gradient norm; 0 clips nothing", "optimizer", least=0)

    seed: int = flag(1337, "seed of weights, shuffling and samples", "randomness", least=0, below=2**32)
    shuffle: bool = flag(False, "read shards, and rows within each, in a new random order every epoch", "randomness")

    val_every: int = flag(250, "updates between validations; 0 is never", "evaluation", least=0)
    val_tokens: int = flag(10485760, "tokens of a validation, or all there are", "evaluation", least=1)
    hellaswag_every: int | None = flag(
        None, "updates between HellaSwag scores; 0 is never", "evaluation",
        auto="250 on CUDA or with one of the next two flags, else 0", least=0,
    )  # fmt: skip
    hellaswag_data: str | None = flag(
        None, "items, a .jsonl file", "evaluation", auto="downloaded once", metavar="FILE"
    )
    hellaswag_limit: int | None = flag(None, "items that are scored, the first N", "evaluation", auto="all", least=1)
    sample_every: int = flag(250, "updates between samples; 0 is never", "evaluation", least=0)
    prompt: str = flag("Hello, I'm a language model,", "text that the samples go on from", "evaluation", metavar="TEXT")

    tensorboard: bool = flag(False, "write curves and samples for TensorBoard to --out", "tracking")
    wandb: str | None = flag(
        None, "send them to this project of Weights & Biases (gpt2, if none is named)", "tracking", auto="to none",
        metavar="PROJECT", nargs="?", const="gpt2",
    )  # fmt: skip

    checkpoint_every: int = flag(5000, "updates between checkpoints; 0 is never", "safety", least=0)
    keep: int = flag(0, "checkpoints that stay: the newest N, and the best validated; 0 is all", "safety", least=0)
    max_bad_steps: int = flag(
        3, "skipped updates in a row (loss or gradients not finite) that end the run", "safety", least=1
    )

    device: str = flag("auto", "where to train", "device", choices=("auto", "cuda", "cpu", "mps"))
    dtype: str = flag("auto", "precision of the matrix products", "device", choices=("auto", "fp32", "bf16", "fp16"))
    tf32: bool = flag(True, "TF32 on CUDA for the products that stay in fp32", "device")
    compile: bool | None = flag(None, "torch.compile the model", "device", auto="on CUDA")
    profile: int = flag(
        0, "record N updates, after the first 3, in trace.json.gz in --out and tell what took their time; 0 is none",
        "device", least=0,
    )  # fmt: skip

    def __post_init__(self) -> None:
        problems = out_of_range(self)
        sized = [flag_name(n) for n in ("n_layer", "n_head", "n_embd") if getattr(self, n) is not None]
        sized += ["--model"] * (self.model != "gpt2") + ["--no-bias"] * (not self.bias)
        if self.init_from is not None and sized:
            problems.append(f"--init-from brings its own sizes. Leave out {', '.join(sized)}.")
        problems += lora.problems(self)
        if self.init_from is not None and Path(self.init_from) == Path(self.out):
            problems.append(f"--out is {self.out}, as --init-from. Name another --out.")
        if not problems and self.architecture["n_embd"] % self.architecture["n_head"]:
            problems.append(
                "--n-embd {n_embd} is not a multiple of --n-head {n_head}. Change one.".format(**self.architecture)
            )
        if problems:
            raise UserError(*problems)
        # Settled here and kept in checkpoints, so that a resumed run with more --max-steps keeps its schedule.
        for name, value in RECIPES[self.recipe].items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        lowest = self.max_lr / (50 if self.schedule == "wsd" else 10)
        object.__setattr__(self, "min_lr", lowest if self.min_lr is None else self.min_lr)
        object.__setattr__(self, "decay_steps", self.decay_steps or self.max_steps)

    @property
    def replaces(self) -> str | None:
        """What a new run may take the place of in `out`: the demo of its last run, --resume auto of a mere log."""
        return "all" if self.demo and self.out == DEMO["out"] else "log" if self.resume == "auto" else None

    @property
    def cooldown(self) -> int:
        """Updates of the cooldown of a wsd schedule; it does not begin before the warm-up ends."""
        return max(0, min(round(self.cooldown_fraction * self.decay_steps), self.decay_steps - self.warmup_steps))

    @property
    def architecture(self) -> dict[str, int]:
        own = {name: getattr(self, name) for name in ("n_layer", "n_head", "n_embd")}
        return MODELS[self.model] | {name: value for name, value in own.items() if value is not None}


def get_lr(step: int, config: TrainConfig) -> float:
    """Learning rate of an update: linear warm-up, then a cosine from max_lr to min_lr, then min_lr.

    With the schedule "wsd" it stays at max_lr until the last cooldown_fraction of decay_steps, and falls on a line there.
    """
    if step < config.warmup_steps:
        return config.max_lr * (step + 1) / config.warmup_steps
    if step >= config.decay_steps:
        return config.min_lr
    if config.schedule == "wsd":
        to_come = (config.decay_steps - step) / config.cooldown if config.cooldown else 1.0
        return config.min_lr + min(1.0, to_come) * (config.max_lr - config.min_lr)
    progress = (step - config.warmup_steps) / (config.decay_steps - config.warmup_steps)
    return config.min_lr + 0.5 * (1.0 + math.cos(math.pi * progress)) * (config.max_lr - config.min_lr)


# -----------------------------------------------------------------------------
# One or many processes


@dataclass(frozen=True)
class Distributed:
    """This process among those that torchrun started: rank of `world`, local_rank on its node, and its device."""

    rank: int
    local_rank: int
    world: int
    device: torch.device
    stop: Stop = field(default_factory=Stop)

    @classmethod
    def from_environment(cls, device: str) -> Distributed:
        rank, local_rank, world = (
            int(os.environ.get(k, d)) for k, d in (("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", 1))
        )
        device_type = devices.pick_device_type(device)
        if device_type == "mps" and world > 1:
            raise UserError("an Apple GPU trains in one process. Run python train_gpt2.py, without torchrun.")
        if device_type == "cuda":
            if local_rank >= torch.cuda.device_count():
                raise UserError(
                    f"more processes on this node than its {torch.cuda.device_count()} GPUs. Lower --nproc_per_node."
                )
            torch.cuda.set_device(local_rank)
        else:
            speed.share_cores()
        place = torch.device(device_type, local_rank) if device_type == "cuda" else torch.device(device_type)
        return cls(rank, local_rank, world, place, Stop(alone=world == 1))

    def start(self, prepare: Callable[[], Any]) -> Any:
        """Calls `prepare` on every rank, the first of each node before its others, and connects the ranks."""
        if self.world == 1:
            return prepare()
        backend = "nccl" if self.device.type == "cuda" else "gloo"
        return rendezvous.prepare_and_connect(prepare, self.rank, self.local_rank, self.world, backend)

    def close(self) -> None:
        if self.world > 1 and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()

    def print0(self, text: str) -> None:
        if self.rank == 0:
            print(text + "\n", end="", flush=True)  # in one piece, for checkpoints are announced by another thread

    def mean(self, tensor: torch.Tensor) -> torch.Tensor:
        """The mean over ranks; in place."""
        if self.world > 1:
            torch.distributed.all_reduce(tensor)
            tensor /= self.world  # gloo knows no mean
        return tensor

    def sum(self, *values: float) -> list[float]:
        """The sum of each value over ranks, in float64.

        Raises:
            Stopped: on all ranks, if one was told to stop. Its values may be of a part of its work only.
        """
        if self.world > 1:
            tensor = torch.tensor([*values, bool(self.stop.told)], dtype=torch.float64, device=self.device)
            torch.distributed.all_reduce(tensor)
            *values, told = tensor.tolist()
            self.stop.agreed |= told > 0
        self.stop.check()
        return list(values)

    def least(self, value: int) -> int:
        """The minimum over ranks."""
        tensor = torch.tensor(int(value), device=self.device)
        if self.world > 1:
            torch.distributed.all_reduce(tensor, torch.distributed.ReduceOp.MIN)
        return int(tensor)


# -----------------------------------------------------------------------------
# Evaluation


@torch.no_grad()
def validation_loss(
    model: nn.Module, loader: DataLoaderLite, tokens: int, dist: Distributed, amp: AbstractContextManager
) -> float:
    """Mean loss over the first rows of a loader, `tokens` of them or all; the same for any ranks and micro-batch."""
    rows = min(tokens // loader.T, loader.rows_per_epoch)
    total = count = 0.0
    mine = range(dist.rank * loader.B, rows, dist.world * loader.B)
    for first in dist.stop.until(report.progress(mine, "validation", dist.rank)):
        x, y = loader.batch(range(first, min(first + loader.B, rows)))
        with amp:
            _, loss = model(x, y)
        total += loss.item() * len(x)
        count += len(x)
    total, count = dist.sum(total, count)
    return total / count


@torch.no_grad()
def hellaswag_score(
    model: GPT, examples: Sequence[hellaswag.Example], dist: Distributed, amp: AbstractContextManager
) -> tuple[float, float]:
    """acc_norm over all examples, dealt to the ranks by their cost, and its standard error."""
    to_score = hellaswag.Model(model.hidden, model.logits, model.config.block_size, dist.device)
    mine = hellaswag.share(examples, dist.rank, dist.world, model.config.block_size)
    with amp:
        _, means = hellaswag.completion_losses(
            to_score, mine, watch=lambda rows: dist.stop.until(report.progress(rows, "HellaSwag", dist.rank))
        )
    n, correct = dist.sum(len(mine), hellaswag.correct(means, mine))
    return hellaswag.accuracy(correct, n)


def sample(
    model: GPT,
    tokenizer: Tokenizer,
    prompt: str,
    n: int,
    max_new_tokens: int,
    generator: torch.Generator,
    **options: Any,
) -> list[str]:
    """`n` continuations of `prompt`, prompt included. `options` are those of `GPT.generate`."""
    idx = torch.tensor([tokenizer.encode(prompt) or [tokenizer.eot]], device=generator.device).repeat(n, 1)  # (n, T)
    return [
        tokenizer.decode(row) for row in model.generate(idx, max_new_tokens, generator=generator, **options).tolist()
    ]


# -----------------------------------------------------------------------------
# Before the first step


@dataclass
class Run:
    """All that the loop works with."""

    config: TrainConfig
    dist: Distributed
    tokenizer: Tokenizer
    raw_model: GPT
    model: nn.Module  # raw_model compiled, where that is on; the weights are the same
    ddp_model: nn.Module  # model with gradients averaged over ranks, where there are several
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    dtype: torch.dtype  # of the matrix products
    amp: AbstractContextManager
    loader: DataLoaderLite
    val_loader: DataLoaderLite | None
    data: dict[str, Any]  # what the shards of each split are, and the weights beside LoRA
    examples: list[hellaswag.Example]
    first_step: int
    saver: checkpoint.Saver
    bad_steps: int  # updates skipped since the last that was applied
    overflows: int  # updates that the scaler skipped, in all
    lock: AbstractContextManager = nullcontext()  # on the folder of the run, for rank 0
    tracker: Tracker | None = None
    log: RunLog | None = None
    last_val: float = math.nan


def build(config: TrainConfig, dist: Distributed, resume_from: Path | None = None) -> Run:
    """A run that is ready for its first step, or for the next one after the checkpoint `resume_from`."""
    run = dist.start(lambda: prepare(config, dist, resume_from))
    # On what each rank found for itself every rank must agree, or the others wait forever in the next all-reduce.
    if dist.least(run.first_step) != -dist.least(-run.first_step):
        raise UserError(
            f"the nodes found different checkpoints in {config.out}. It must be one folder that all of them see."
        )
    claim = partial(run_folder.claim, config.out, resume_from, config.replaces)
    run.lock = rendezvous.on_first(claim, dist.rank, dist.least) or run.lock
    tracked_by = rendezvous.on_first(partial(boards, config, run.first_step), dist.rank, dist.least)
    run.tracker = Tracker(run, tracked_by or [])
    run.log = RunLog(Path(config.out) / "log.txt" if dist.rank == 0 else None, run.first_step, run.tracker)
    if not dist.least(len(run.examples)):
        run.examples = []
    B = dist.least(run.loader.B)
    for loader in filter(None, (run.loader, run.val_loader)):
        loader.resize(B)
    run.loader.reset(run.first_step)
    if dist.world > 1:
        torch.compiler.reset()  # what the trial compiled is one graph; DDP wants it cut, to send while it computes
        run.ddp_model = nn.parallel.DistributedDataParallel(run.model, gradient_as_bucket_view=True)
    for line in report.header(run):
        dist.print0(line)
    return run


def prepare(config: TrainConfig, dist: Distributed, resume_from: Path | None) -> Run:
    """Finds, checks, downloads and allocates what this rank needs, so that nothing of it can fail hours later."""
    tokenizer, train_shards, val_shards = open_data(config, dist, resume_from is not None)
    data = {"train": shards.identity(config.data, train_shards), "val": shards.identity(config.data, val_shards)}
    if dist.rank == 0:
        run_folder.check(config.out, resume_from, config.replaces)
        check_boards(config)
    raw_model = first_model(config, tokenizer, resume_from).to(dist.device)
    data["base"] = lora.identity(raw_model)
    if resume_from:
        resume.check_data(resume_from, data)
    items, limit, notice = config.hellaswag_data, config.hellaswag_limit, dist.print0
    usual = items is not None or limit or dist.device.type == "cuda"
    wanted = usual if config.hellaswag_every is None else config.hellaswag_every
    examples = hellaswag.examples(items, tokenizer, notice, limit) if wanted else []

    T, device = raw_model.config.block_size, dist.device
    sizes = fit.micro_batches(config.total_batch_size, T, dist.world, config.batch_size, device.type)
    rows = config.total_batch_size // (T * dist.world)
    placed = dict(vocab_size=raw_model.config.vocab_size, rank=dist.rank, world=dist.world, device=device)
    loader = DataLoaderLite(
        train_shards, sizes[0], T, grad_accum=rows // sizes[0], shuffle=config.shuffle, seed=config.seed, **placed
    )
    val_loader = DataLoaderLite(val_shards, sizes[0], T, **placed) if val_shards else None
    fit.check_amount(config, loader, val_loader)

    dtype = devices.pick_dtype(config.dtype, device)
    amp = devices.autocast(device, dtype)
    speed.prepare(device, dtype, config.tf32, raw_model.config, notice)
    model = devices.compile(raw_model, device, config.compile, notice)
    B = fit.largest_micro_batch(sizes, T, model, raw_model, amp, dist.world, notice)
    for each in filter(None, (loader, val_loader)):
        each.resize(B)

    products = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
    muon, betas = products if config.optimizer == "muon" else None, (config.beta1, config.beta2)
    optimizer = raw_model.configure_optimizers(config.weight_decay, config.max_lr, betas, muon)
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
    first_step, *skipped = resume.restore(resume_from, optimizer, scaler) if resume_from else (0, 0, 0)
    saver = checkpoint.Saver(config.out, config.keep, dist.stop, newest=first_step)
    return Run(
        config, dist, tokenizer, raw_model, model, model, optimizer, scaler, dtype, amp, loader, val_loader, data,
        examples, first_step, saver, *skipped,
    )  # fmt: skip


def open_data(
    config: TrainConfig, dist: Distributed, resumed: bool
) -> tuple[Tokenizer, list[np.memmap], list[np.memmap]]:
    """The tokenizer and the shards of train and, where there is validation, val."""
    make_shards(config, dist.rank, resumed)
    if config.verify_data and dist.local_rank == 0:
        shards.verify(config.data)
    train_shards = shards.open_shards(config.data, "train")
    val_shards = shards.open_shards(config.data, "val") if config.val_every else []
    return get_tokenizer(shards.read_manifest(config.data)["tokenizer"]), train_shards, val_shards


def first_model(config: TrainConfig, tokenizer: Tokenizer, resume_from: Path | None) -> GPT:
    """The model that the run begins with, on the CPU: random, pretrained, or that of a checkpoint."""
    weights = config.init_from if config.lora_rank else resume_from or config.init_from
    if weights is None:
        torch.manual_seed(config.seed)  # drawn on the CPU, so every device starts from the same weights
        sizes = config.architecture | dict(bias=config.bias, dropout=config.dropout)
        return GPT(GPTConfig(config.block_size or 1024, tokenizer.vocab_size, **sizes))
    model = GPT.from_pretrained(weights, config.dropout)
    fit.check_model(model.config, config, tokenizer, weights, shorter=weights != resume_from)
    model.crop(config.block_size or model.config.block_size)
    if config.lora_rank:
        lora.add(model, config.lora_rank, config.lora_alpha, config.seed, resume_from)
    return model


# -----------------------------------------------------------------------------
# Training


def train_step(run: Run, lr: float) -> tuple[float, float]:
    """One update from `loader.grad_accum` micro-batches of each rank; its mean loss and its gradient norm.

    If one of them is not finite, the update is not applied, on no rank.

    Raises:
        Stopped: a signal came to a process without others; nothing was applied.
    """
    model, optimizer, scaler, loader, dist = run.ddp_model, run.optimizer, run.scaler, run.loader, run.dist
    optimizer.zero_grad(set_to_none=True)
    for group in optimizer.param_groups:
        group["lr"] = lr
    loss_sum = torch.zeros((), device=dist.device)
    for micro_step in range(loader.grad_accum):
        dist.stop.check()
        x, y = loader.next_batch()
        if dist.world > 1:  # average gradients once per update, in the last backward; DDP decides in the forward
            model.require_backward_grad_sync = micro_step == loader.grad_accum - 1
        with run.amp:
            _, loss = model(x, y)
        # Each loss is a mean over its micro-batch, and backward adds gradients up. Without the division the sum would
        # be grad_accum times the gradient of the one big batch that this stands for.
        loss = loss / loader.grad_accum
        loss_sum += loss.detach()
        scaler.scale(loss).backward()
    if loader.position < run.config.max_steps * loader.grad_accum:
        try:
            loader.read_ahead(loader.grad_accum)  # the next update's, while the device is at work
        except UserError as error:
            dist.stop.fail(error)
    scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_(model.parameters(), run.config.grad_clip or math.inf)
    # One all-reduce, and one wait for the device below. Every rank has the same norm, so its mean changes nothing.
    told = torch.full_like(loss_sum, bool(dist.stop.told))
    shared = dist.mean(torch.stack([loss_sum, norm, told]))
    if scaler.is_enabled():  # fp16: it skips an update whose gradients overflowed, and scales the next ones less
        scaler.step(optimizer)
        scaler.update()
    else:
        devices.step_if(optimizer, shared.isfinite().all())
    loss, norm, told = shared.tolist()
    dist.stop.agreed = told > 0
    return loss, norm


def evaluate(run: Run, step: int) -> None:
    """Whatever is due before the update of `step`: validation, HellaSwag, samples, a checkpoint."""
    config, dist = run.config, run.dist
    run.raw_model.train(not config.dropout)  # without dropout both modes are the same, and one less is compiled

    def due(every: int) -> bool:
        return every > 0 and (step % every == 0 or step == config.max_steps)

    if run.val_loader and due(config.val_every):
        run.last_val = validation_loss(run.model, run.val_loader, config.val_tokens, dist, run.amp)
        run.log.write(step, "val", run.last_val)
        dist.print0(f"step {step:5d} | val loss: {run.last_val:.4f}")
    if run.examples and due(config.hellaswag_every or 250):
        started = time.perf_counter()
        acc_norm, error = hellaswag_score(run.raw_model, run.examples, dist, run.amp)
        run.log.write(step, "hella", acc_norm)
        seconds, score = time.perf_counter() - started, f"{acc_norm:.4f} ± {error:.4f}"
        dist.print0(f"step {step:5d} | HellaSwag acc_norm: {score} of {len(run.examples):,} items | {seconds:.1f}s")
    if dist.rank == 0 and step > 0 and due(config.sample_every):
        generator = devices.seeded_generator(dist.device, config.seed, step, dist.rank)
        length = 32 if run.tokenizer.name == "gpt2" else 128  # a GPT-2 token is about four bytes
        with run.amp:
            texts = sample(run.raw_model, run.tokenizer, config.prompt, 4, length, generator, top_k=50)
        for i, text in enumerate(texts):
            print(f"step {step:5d} | sample {i}: {text}", flush=True)
        run.tracker.samples(step, texts)
    if dist.rank == 0 and due(config.checkpoint_every):
        save(run, step)
    if any(map(due, (config.val_every, config.hellaswag_every or 0, config.sample_every, config.checkpoint_every))):
        speed.trim_memory(dist.device)  # all this takes memory in other pieces than an update does
    run.raw_model.train()


def train(config: TrainConfig, dist: Distributed, resume_from: Path | None = None) -> Run:
    """Trains to `config.max_steps`, from the start or from the checkpoint `resume_from`.

    Raises:
        Stopped: SIGTERM or SIGINT came; the state was saved.
    """
    run = build(config, dist, resume_from)
    synchronize, pace = devices.synchronizer(dist.device), report.Pace(run)
    profiler = Profiler(config.profile, config.out, dist.device, dist.rank, dist.print0)
    with run.lock, dist.stop, run.tracker, run.saver, profiler:
        try:
            for step in range(run.first_step, config.max_steps + 1):
                dist.stop.check()  # all ranks agreed on it in the update before, or none
                evaluate(run, step)
                if step == config.max_steps:
                    break
                lr = get_lr(step, config)

                if config.dropout:  # its masks depend on the step alone, so a resumed run has the same
                    torch.manual_seed(devices.seed(config.seed, step, dist.rank))
                synchronize()  # the clock runs over the update alone; reading the loss waits for its end
                started = time.perf_counter()
                loss, norm = train_step(run, lr)
                dt = time.perf_counter() - started

                run.log.write(step, "train", loss)
                dist.print0(pace.lines(step, loss, lr, norm, dt))
                run.tracker.update(step, lr, norm, dt)
                count_bad_steps(run, step, loss, norm)
                profiler.step()
        except Stopped:
            halt(run, step)
    run.log.close()
    if config.merge and dist.rank == 0:
        huggingface.save_merged(run.raw_model, run.tokenizer, Path(config.out) / "merged")
    run.ddp_model = run.model  # DDP's must be gone before dist.close(), or gloo's threads and ours wait for each other
    return run


def halt(run: Run, step: int) -> NoReturn:
    """Saves the state before the update of `step` and ends all ranks alike."""
    if run.dist.rank == 0 and run.config.checkpoint_every:
        save(run, step)
    run.saver.finish()
    if not run.dist.stop.failure:
        run.dist.print0(f"step {step:5d} | stopped. {run.saver.newest_checkpoint()}")
    run.dist.stop.conclude(run.dist.least)


# -----------------------------------------------------------------------------
# Checkpoints


def save(run: Run, step: int) -> None:
    """Begins to save the state before the update of `step`, on rank 0; `--resume` goes on with that update.

    Training waits for a copy in the memory of the host; a thread writes it.
    """
    run.saver.wait()
    if step == run.saver.newest or run.saver.failed > 1:  # it is there already, or the run is ending because of it
        return
    if run.bad_steps and step < run.config.max_steps and not (run.dist.stop.told or run.dist.stop.agreed):
        print(f"step {step:5d} | no checkpoint while updates are skipped", flush=True)
        return
    sizes, config = asdict(run.raw_model.config), run.config
    weights = checkpoint.to_host({name: p for name, p in run.raw_model.named_parameters() if p.requires_grad})
    state = {
        "step": step,
        "bad_steps": run.bad_steps,
        "overflows": run.overflows,
        "config": asdict(config),
        "data": run.data,
        "optimizer": checkpoint.to_host(run.optimizer.state_dict()),
        "scaler": run.scaler.state_dict(),
    }

    def write(directory: Path) -> None:
        if not all(torch.isfinite(tensor).all() for tensor in weights.values()):
            raise ValueError("the weights are not finite")
        if config.lora_rank:
            lora.write(directory, weights, config)
        else:
            huggingface.write(directory, sizes, huggingface.to_theirs(weights, sizes["vocab_size"]))
        run.tokenizer.save_pretrained(directory, model_max_length=sizes["block_size"])
        torch.save(state, directory / "trainer.pt")
        run.log.sync()

    run.saver.start(step, write, checkpoint.bytes_of([weights, state["optimizer"]]))


# -----------------------------------------------------------------------------
# The command line


def configure(argv: Sequence[str] | None = None) -> tuple[TrainConfig, Path | None]:
    """The configuration that the flags ask for, and the checkpoint to resume from, if any."""
    parser = Parser(description="Pre-train GPT-2 from token shards.", epilog="Shards are made by fineweb.py.")
    add_flags(parser, TrainConfig)
    given = vars(parser.parse_args(argv))
    flags = preset(given) | given
    wanted, out = flags.get("resume"), flags.get("out", TrainConfig.out)
    directory = checkpoint.newest(out) if wanted else None
    if directory is not None:
        return resume.configuration(TrainConfig, given, out, directory), directory
    config = TrainConfig(**flags)
    if wanted == "newest":
        raise UserError(f"no checkpoint in {out} to resume from. Name its folder with --out, or leave out --resume.")
    return config, None


def main(argv: Sequence[str] | None = None) -> None:
    config, resume_from = configure(argv)
    dist = Distributed.from_environment(config.device)
    try:
        result, exit_code = train(config, dist, resume_from), 0
    except Stopped as stopped:
        result, exit_code = None, stopped.exit_code
    except torch.OutOfMemoryError as error:
        reason = str(error).split(". ")[0]
        raise UserError(f"{reason}. Lower --batch-size: the update stays the same.", this_rank_only=True) from error
    dist.close()
    if result and config.demo and dist.rank == 0:
        generator = devices.seeded_generator(dist.device, config.seed)
        result.raw_model.eval()
        with result.amp:
            [text] = sample(result.raw_model, result.tokenizer, "The ", 1, 500, generator, temperature=0.8, top_k=50)
        report.result(result, text)
    sys.exit(exit_code)


if __name__ == "__main__":
    run(main)
