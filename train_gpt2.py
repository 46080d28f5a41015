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

import math
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from support import cli, startup
from support.config import CommandLine, TrainConfig

MODELS: dict[str, dict[str, Any]] = {
    "gpt2": dict(n_layer=12, n_head=12, n_embd=768),  # 124M parameters
    "gpt2-medium": dict(n_layer=24, n_head=16, n_embd=1024),  # 350M
    "gpt2-large": dict(n_layer=36, n_head=20, n_embd=1280),  # 774M
    "gpt2-xl": dict(n_layer=48, n_head=25, n_embd=1600),  # 1558M
}

# How GPT-2 was trained, as far as GPT-2's and GPT-3's papers tell.
GPT2_RECIPE: dict[str, Any] = dict(
    total_batch_size=2**19,  # tokens per optimizer step
    max_steps=19073,  # 10 billion tokens
    optimizer="adamw", beta1=0.9, beta2=0.95,  # 0.999 would react too slowly
    weight_decay=0.1,  # of matrices and embeddings
    grad_clip=1.0,
    schedule="cosine", warmup_steps=715,  # 375 million tokens
    max_lr=6e-4,  # falls to a tenth of it, or with "wsd" to a fiftieth
)  # fmt: skip
RECIPES = {
    "gpt2": GPT2_RECIPE,
    # the same loss with fewer tokens: Muon for the matrices of the blocks, a constant rate and a cooldown (docs/recipes.md)
    "fast": GPT2_RECIPE | dict(optimizer="muon", schedule="wsd", max_lr=3.6e-3),
}
TABLES = {"model": MODELS, "recipe": RECIPES}  # by the flag that chooses a row; support/config.py has all flags

if __name__ == "__main__":
    cli.check_command_line(CommandLine, __doc__, TABLES)  # a mistake, or --help, need not wait for the next import
    startup.prepare(imports_torch=True)  # sets how long idle threads wait, which PyTorch reads when it is imported

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import hellaswag
from support import torch_private
from support.checkpoints import huggingface, lora, run_folder
from support.checkpoints.manager import CheckpointManager
from support.checkpoints.run_info import RunInfo
from support.checkpoints.start import Start
from support.checkpoints.state import TrainState
from support.console.progress import print_finished, print_header, print_summary, progress_bar
from support.console.run_logger import RunLogger
from support.data.shards import TokenData, read_tokens, rows_in_shard, shard_paths
from support.data.tokenizer import Tokenizer
from support.optim.layers import Dropout, causal_attention
from support.optim.loss import chunked_cross_entropy
from support.optim.muon import Muon
from support.runtime import batch_size, cuda_graphs, devices, fsdp, memory, preflight
from support.runtime.clock import Clock
from support.runtime.distributed import ONE_PROCESS, Distributed, report_lost_processes
from support.runtime.kv_cache import KVCache
from support.runtime.machine import Machine
from support.runtime.schedule import Schedule
from support.runtime.signals import StopHandler
from support.sizing import budget, plan

# -----------------------------------------------------------------------------
# The model. B is batch, T is time, C is channels (n_embd), nh is heads, hs is head size (C / nh), V is vocabulary.


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """The shape of a model. A new field needs a flag of the same name in support/config.py: docs/code.md has an example.

    Checkpoints then keep it, and sample.py, hellaswag.py and a resumed run have it. If it makes training different from
    evaluation, `differs_in_training` has to say so.
    """

    block_size: int = 1024  # the longest context, in tokens
    vocab_size: int = 50257  # 50,000 merges, 256 bytes, <|endoftext|>; in training, the tokenizer of the data decides
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    dropout: float = 0.0  # GPT-2 had 0.1; text that is seen only once needs none
    bias: bool = True  # in linear layers and layer norms

    @property
    def padded_vocab_size(self) -> int:
        """The vocabulary size, rounded up to a multiple of 64 (50,304 for GPT-2): other sizes slow GPU kernels down."""
        return -(-self.vocab_size // 64) * 64

    @property
    def differs_in_training(self) -> bool:
        """Whether the model computes something else in training than in evaluation. If not, one mode is compiled for both."""
        return self.dropout > 0


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
        if cache is not None:
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
        first = 0 if cache is None else cache.length
        pos = torch.arange(first, first + T, device=idx.device)  # (T)
        x = self.drop(self.wte(idx) + self.wpe(pos))  # (B, T, C)
        x = devices.to_bf16_in_autocast(x)  # half the traffic between blocks; the norms still compute in fp32
        for block in self.h:
            x = block(x, cache)
        return self.ln_f(x.to(self.ln_f.weight.dtype))


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
        # computed in chunks of rows, together with the gradients of x and of the weight, which depend only on
        # softmax(logits) - one_hot(targets). The padding is left out of the softmax.
        x, targets, weight = x.flatten(0, 1), targets.flatten(), self.lm_head.weight  # (B*T, C), (B*T), (V padded, C)
        return None, chunked_cross_entropy(x, weight, targets, self.config.vocab_size)

    def logits(self, x: Tensor) -> Tensor:
        """Returns next-token logits (..., V) for hidden states (..., C), in fp32 also under autocast.

        bf16 would be too coarse: many logits are near -35, where neighbouring bf16 numbers are 0.25 apart.
        """
        weight = self.lm_head.weight
        with torch.autocast(x.device.type, enabled=False):
            logits = (weight @ x.to(weight.dtype).mT).mT  # for few rows on a CPU, faster than self.lm_head(x)
            return logits[..., : self.config.vocab_size].to(torch.promote_types(logits.dtype, torch.float32))

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
        self, weight_decay: float, lr: float, betas: tuple[float, float], optimizer: str = "adamw",
        dtype: torch.dtype = torch.float32, adamw_lr: float | None = None,
    ) -> torch.optim.Optimizer:  # fmt: skip
        """Returns AdamW with weight decay on matrices and embeddings, but not on biases and layer norms.

        With "muon", Muon updates the matrices of the blocks instead: it orthogonalizes their momentum, so that a step moves a
        matrix equally far in all directions. It computes in `dtype`, and AdamW has its own learning rate if given.
        """
        num_splits: dict[nn.Parameter, int] = {}  # parameters for Muon, and how many matrices each one stacks
        if optimizer == "muon":
            matrices = ((name, p) for name, p in self.transformer.h.named_parameters() if p.dim() >= 2)
            num_splits = {p: 3 if name.endswith("c_attn.weight") else 1 for name, p in matrices}  # query, key, value
        trained = [p for p in self.parameters() if p.requires_grad]  # with LoRA, not all of them
        groups = [
            {"params": [p for p in trained if p.dim() >= 2 and p not in num_splits], "weight_decay": weight_decay},
            {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
        ]
        if optimizer == "adamw":
            return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=1e-8, fused=True)  # one kernel for all parameters
        if optimizer == "muon":
            stacked = {
                "params": list(num_splits),
                "num_splits": list(num_splits.values()),
                "weight_decay": weight_decay,
            }
            return Muon([stacked, *groups], lr=lr, betas=betas, eps=1e-8, dtype=dtype, adamw_lr=adamw_lr)
        raise ValueError(f"there is no --optimizer {optimizer}")

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
        self, idx: Tensor, max_new_tokens: int, temperature: float = 1.0, top_k: int | None = None, top_p: float = 1.0,
        generator: torch.Generator | None = None, cache: KVCache | None = None,
    ) -> Iterator[Tensor]:  # fmt: skip
        """Continues (B, T) token ids by sampling; yields the new tokens, (B, 1) at a time.

        Only the last block_size tokens are context. With a new `cache`, each token passes through the model once, until
        the context is full: then a new token moves all others to an earlier position, where they have other keys and values.

        Raises:
            UserError: the logits are not finite.
        """
        context = new = idx[:, -self.config.block_size :]  # (B, T)
        for _ in range(max_new_tokens):
            cached = cache is not None and cache.length + new.size(1) <= self.config.block_size
            with devices.attention_without_cudnn(idx.device):  # cuDNN would prepare a kernel for each new length
                x = self.transformer(new, cache) if cached else self.transformer(context)  # (B, T, C)
            logits = self.logits(x[:, -1])  # (B, V): the last position predicts
            if not logits.sum().isfinite():  # tells whether all are finite, in a third of the time
                raise cli.UserError(
                    "the logits are not finite numbers. Use another model or, if this is not fp32, --dtype fp32."
                )
            probs, ids = next_token_probs(logits, temperature, top_k, top_p)  # (B, K) each
            new = ids.gather(1, torch.multinomial(probs, 1, generator=generator))  # (B, 1)
            context = torch.cat((context, new), dim=1)[:, -self.config.block_size :]
            yield new


def next_token_probs(
    logits: Tensor, temperature: float = 1.0, top_k: int | None = None, top_p: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Returns probabilities (B, K) and ids (B, K) of the `top_k` likeliest tokens, or of all, given logits (B, V).

    A temperature below 1 makes likely tokens likelier; 0 leaves only the likeliest. Of the K tokens, all have probability 0
    but the fewest likeliest that add up to at least `top_p` (nucleus sampling, arXiv:1904.09751).
    """
    ids = torch.arange(logits.size(-1), device=logits.device).expand_as(logits)
    if top_k is not None:
        logits, ids = torch.topk(logits, min(top_k, logits.size(-1)))
    probs = F.softmax(logits / max(temperature, 1e-10), dim=-1)
    if top_p < 1.0:
        ascending, order = probs.sort()
        dropped = ascending.cumsum(-1) <= 1 - top_p
        dropped[:, -1] = False  # one token always remains
        probs = torch.zeros_like(probs).scatter(-1, order, ascending.masked_fill(dropped, 0.0))
        probs = probs / probs.sum(-1, keepdim=True)
    return probs, ids


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

    @property
    def passes(self) -> float:
        """How often the data has been read."""
        return self.row / self.rows_per_epoch

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
        return read_tokens(self.shards[shard], start, self.T + 1, self.vocab_size)

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


TIMED_WARMUP = 1 / 30  # the warm-up of a --minutes run, as a fraction of its time


def get_lr(step: int, config: TrainConfig, progress: float | None = None) -> float:
    """Returns the learning rate of a step: linear warm-up, then a cosine from max_lr to min_lr, then min_lr.

    With schedule "wsd" (warm-up, stable, decay), it stays at max_lr until the cooldown, then falls linearly to min_lr.

    Args:
        progress: the fraction of the time that has passed; a --minutes run needs it instead of `step`.
    """
    if config.minutes:  # all are fractions of the time
        assert progress is not None
        now, warmup, end, cooldown = progress, TIMED_WARMUP, 1.0, 1 - cooldown_start(config)
        ramp = max(now, TIMED_WARMUP / 10)  # the first rate is not 0, which would waste a step
    else:  # all are steps
        now, warmup, end, cooldown = step, config.warmup_steps, config.decay_steps, cooldown_steps(config)
        ramp = step + 1
    decayed = min(1.0, max(0.0, (now - warmup) / max(1e-9, end - warmup)))  # from 0, in the warm-up, to 1 at the end
    if config.schedule == "cosine":
        height = 0.5 * (1.0 + math.cos(math.pi * decayed))  # from 1 to 0
    elif config.schedule == "wsd":
        height = min(1.0, (end - now) / cooldown) if cooldown else 1.0
    else:
        raise ValueError(f"get_lr has no formula for --schedule {config.schedule}")
    if now < warmup:
        return config.max_lr * ramp / warmup
    if now >= end:  # a run may be longer than its schedule
        return config.min_lr
    return config.min_lr + height * (config.max_lr - config.min_lr)


def cooldown_steps(config: TrainConfig) -> int:
    """Returns the steps of the cooldown, which does not start before the warm-up ends."""
    return max(0, min(round(config.cooldown_fraction * config.decay_steps), config.decay_steps - config.warmup_steps))


def cooldown_start(config: TrainConfig) -> float:
    """Returns the progress at which the cooldown begins."""
    if config.minutes:
        return 1 - min(config.cooldown_fraction, 1 - TIMED_WARMUP)
    return (config.decay_steps - cooldown_steps(config)) / config.decay_steps


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Sets the learning rate of the next step. (In its AdamW groups, Muon multiplies it by adamw_lr / max_lr.)"""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):  # a CUDA graph reads it from there
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr


# -----------------------------------------------------------------------------
# The training step


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A run before its first step, on this rank."""

    run: RunInfo  # configuration, data, model: what the header, the log and checkpoints are written from
    dist: Distributed
    examples: Sequence[hellaswag.Example]  # of HellaSwag
    # One model, of which there may be three forms:
    model: GPT  # the modules whose weights are trained and saved
    # What evaluations call. It may be compiled: calls run the compiled graph, but methods such as generate() run uncompiled.
    # With FSDP, it is a copy of `model` without weights, which has them all within `full_weights`.
    eval_model: nn.Module
    train_model: nn.Module  # what a step calls: eval_model, DDP around it, or a model that shards the weights by FSDP
    graphs: cuda_graphs.StepGraphs | None = None  # the step of a small model, recorded

    @property
    def amp(self) -> torch.autocast:
        """Matrix products in bf16 or fp16; weights, norms and sums stay in fp32."""
        return devices.autocast(self.dist.device, self.dtype)

    @property
    def dtype(self) -> torch.dtype:
        return devices.DTYPES[self.run.machine.dtype]

    @property
    def layout(self) -> memory.Layout:
        return memory.Layout.of(self.run.config, self.dtype, self.dist.world_size, self.run.machine.compiled)

    def with_machine(self, **found: Any) -> Setup:
        """Returns the same setup with more of what was found out about this machine."""
        return replace(self, run=replace(self.run, machine=replace(self.run.machine, **found)))


class StepValues(NamedTuple):
    """What is measured in a step: tensors on the device of this rank, then means over the ranks, then numbers.

    To measure more, add a field, give it a value at the end of `train_step`, and log it in `train`. (What is measured inside
    the model has to be returned by its `forward` and by `forward_backward`, too.)
    """

    loss: Any  # before the update, the mean over the micro-steps, in nats
    norm: Any  # of the gradients before clipping; the same on all ranks already
    stop_requests: Any
    time_used: Any  # of --minutes, as a fraction: rank 0's clock decides for all
    overdue: Any  # above 0 if the newest checkpoint is too old, also by rank 0's clock

    def mean_over(self, dist: Distributed) -> StepValues:
        """Returns the means over the ranks, by a single all-reduce."""
        return StepValues(*dist.all_reduce_mean(torch.stack(self)))

    def to_host(self) -> StepValues:
        """Returns the numbers. With AdamW and Muon, this is the only time in a step that the host waits for the device."""
        return StepValues(*torch.stack(self).tolist())


def forward_backward(
    model: nn.Module, x: Tensor, y: Tensor, grad_accum: int, scaler: torch.amp.GradScaler, amp: torch.autocast
) -> Tensor:
    """Adds the gradients of a micro-batch, of (B, T) tokens and the tokens that follow; returns its part of the loss."""
    with amp:
        _, loss = model(x, y)
    # backward() adds to the gradients, and each loss is a mean over its micro-batch. Without this division the sum
    # would be grad_accum times the gradient of the full batch.
    loss = loss / grad_accum
    scaler.scale(loss).backward()  # scales only in fp16, where small gradients would underflow
    return loss.detach()


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


def train_step(
    setup: Setup, state: TrainState, loader: DataLoaderLite, stop: StopHandler, clock: Clock
) -> tuple[StepValues, float] | None:
    """Takes one optimizer step on `loader.grad_accum` micro-batches of each rank; if the loss or a gradient is not finite,
    the step is skipped, on all ranks.

    Returns:
        What was measured, and the progress of the run after the step, the same on every rank. None if a signal interrupted
        the step, which happens only with one process; nothing was applied then.
    """
    config, schedule, dist, graphs = setup.run.config, setup.run.schedule, setup.dist, setup.graphs
    train_model, optimizer, scaler = setup.train_model, state.optimizer, state.scaler
    if setup.model.config.differs_in_training:
        setup.model.train()  # after an evaluation
        # The masks depend on (seed, step, rank) alone, so a resumed run draws the same ones.
        torch.manual_seed(devices.derive_seed(config.seed, state.step, dist.rank))
    loss_accum = torch.zeros((), device=dist.device)  # on the device: reading it would make the host wait
    for i in range(loader.grad_accum):
        if stop.agreed:  # several ranks agree only at the end of a step
            return None
        x, y = loader.next_batch()  # (B, T) each
        # DDP and FSDP average gradients over the ranks in the backward pass. Once per step is enough, in the last
        # micro-step. The flag must be set before the forward pass, which prepares the reduction.
        if dist.world_size > 1:
            train_model.require_backward_grad_sync = i == loader.grad_accum - 1  # type: ignore[assignment]
        if graphs:
            loss_accum += graphs.forward_backward(x, y)
        else:
            loss_accum += forward_backward(train_model, x, y, loader.grad_accum, scaler, setup.amp)
    if not schedule.is_last(state.step):
        with stop.deferring_errors():  # a corrupt shard ends the run after this step, which is applied and saved
            loader.prefetch(loader.grad_accum)  # reads the next step's batches, while the device is still computing
    scaler.unscale_(optimizer)  # before clipping, which needs the true norm
    # Clipping keeps the direction: one batch with huge gradients must not undo the steps before it.
    norm = fsdp.full_tensor(nn.utils.clip_grad_norm_(train_model.parameters(), config.grad_clip or math.inf))
    # Rank 0's time is for all: with zeros from the others, the mean of world_size times that is the time itself.
    own_time = clock.time_used() * dist.world_size if dist.rank == 0 else 0.0
    own_overdue = dist.rank == 0 and clock.is_overdue(config.checkpoint_minutes)
    stop_requests, time_used, overdue = (torch.full_like(norm, x) for x in (stop.requested, own_time, own_overdue))
    own = StepValues(loss=loss_accum, norm=norm, stop_requests=stop_requests, time_used=time_used, overdue=overdue)
    means = own.mean_over(dist)
    finite = means.loss.isfinite() & means.norm.isfinite()
    if graphs:
        graphs.step_if_finite(finite)
    else:
        step_if_finite(optimizer, finite)
    # In fp16, lowers the scale of the gradients if they overflowed, on any rank: DDP has added them up, and with FSDP
    # unscale_() has asked all.
    scaler.update()
    # frees the gradients: the next backward pass writes new ones, the others add. A CUDA graph only adds
    optimizer.zero_grad(set_to_none=graphs is None)
    values = means.to_host()
    stop.agree(values.stop_requests)
    return values, schedule.progress(state.step + 1, values.time_used, loader.passes)


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
    new = model.generate(idx, max_new_tokens, temperature, top_k, generator=generator)
    return [tokenizer.decode(text) for text in torch.cat((idx, *new), dim=1).tolist()]


def evaluate(setup: Setup, due: set[str], step: int, stop: StopHandler, logger: RunLogger) -> bool:
    """Measures what is due before a step: "val", "hella", "samples". Returns False on all ranks if a signal interrupted it."""
    config, data, B, dist = setup.run.config, setup.run.data, setup.run.machine.batch_size, setup.dist
    with fsdp.full_weights(setup.eval_model, setup.model):  # without FSDP, both are the same model
        model: Any = setup.eval_model
        if setup.model.config.differs_in_training:
            model.eval()
        if "val" in due and data.val:
            loader = DataLoaderLite(data.val, B, config.block_size, data.tokenizer.vocab_size, dist)
            logger.validation(step, validation_loss(model, loader, config.val_tokens, stop, setup.amp))
        if "hella" in due and setup.examples and not stop.agreed:
            # calls the methods, which are not compiled: each new length would be compiled again
            scoring_model = hellaswag.ScoringModel(model.transformer, model.logits, config.block_size, dist.device)
            logger.hellaswag(step, hellaswag.score_with_ranks(scoring_model, setup.examples, dist, stop, setup.amp))
        if stop.agreed:
            return False
        if "samples" in due and dist.rank == 0:
            generator = devices.seeded_generator(dist.device, config.seed, step, dist.rank)
            with setup.amp:
                logger.samples(step, sample(model, data.tokenizer, setup.run.prompt, 32, generator))
        devices.synchronize(dist.device)  # what is left in a GPU's queue would count as time of the next step
        devices.trim_memory(dist.device)  # on a CPU, evaluations fragment the heap
    return True


# -----------------------------------------------------------------------------
# The training loop


def train(config: TrainConfig, dist: Distributed, start: Start) -> TrainState:
    """Trains for `config.max_steps` or `config.minutes`, from the beginning or from a checkpoint; returns the final state.

    `main` holds `run_folder.locked`, which keeps other processes out of the run's folder.

    Raises:
        UserError: the data, folder or model is unusable, too many steps in a row were not finite, or saving failed.
        SystemExit: a signal ended the run; its state is saved.
    """
    setup = distribute(load(config, dist, start))  # data and model; DDP or FSDP, and the micro-batch
    state, loader = initial_state(setup)  # optimizer and counters; training data
    setup = record_step(setup, state, loader.grad_accum)  # CUDA graphs, where they are faster
    run, schedule = setup.run, setup.run.schedule
    stop = StopHandler(dist.world_size)  # requested: a signal or an error on this rank. agreed: all ranks know and stop
    logger = RunLogger(run, dist, state.progress)  # log.txt, starts.jsonl, curves.png, trackers, and the console
    checkpoints = CheckpointManager(run, stop, logger.sync, logger.evaluations, dist)  # writes in a thread
    print_header(run, dist, loader.B, loader.rows_per_epoch, loader.row)
    clock = Clock(config.minutes, state.seconds, state.progress)
    finished = False
    with stop, logger, checkpoints, report_lost_processes(checkpoints.how_to_go_on):
        if "val" not in schedule.evaluations_due(state):
            logger.log_known_loss()  # of the checkpoint, which is not measured again
        while not stop.agreed:
            if due := schedule.evaluations_due(state):
                with clock.evaluating():
                    complete = evaluate(setup, due, state.step, stop, logger)
                if not complete:
                    break  # a signal, perhaps in the middle of it
            logger.print_progress(state, evaluated=bool(due))

            finished = schedule.is_over(state.step, state.progress)
            if schedule.is_checkpoint_due(state, checkpoints.last_step):
                state.seconds = clock.seconds()  # including the evaluation
                if checkpoints.save(state, final=finished):
                    clock.saved()
            if finished:
                dist.allow_long_waits()  # the others wait until rank 0 has written
                break

            lr = get_lr(state.step, config, state.progress)
            set_lr(state.optimizer, lr)
            started = time.perf_counter()
            result = train_step(setup, state, loader, stop, clock)
            if result is None:
                break  # a signal: nothing was applied

            values, progress = result
            seconds = time.perf_counter() - started  # of the step alone, without evaluation, logging and checkpoints
            logged = {"train": values.loss, "lr": lr, "norm": values.norm, "seconds": seconds}  # in log.txt, by name
            skip_reason = state.skip_reason(values.loss, values.norm)  # None if the step was applied
            logger.step(state, logged, skip_reason, schedule.is_cooldown_next(state))
            if state.step == run.first_step:
                dist.end_long_waits()  # everything is compiled: a rank that takes much longer now is lost
            state.advance(progress, clock.seconds(), config.total_batch_size, loader.row, values.overdue > 0)
            state.check_bad_steps(config.max_bad_steps)  # raises after too many skipped steps in a row
        if not finished:  # a signal, a corrupt shard or a failed save, on any rank
            checkpoints.save_and_exit(state)
    finish(setup, state, loader, checkpoints, clock)
    return state


def finish(
    setup: Setup, state: TrainState, loader: DataLoaderLite, checkpoints: CheckpointManager, clock: Clock
) -> None:
    """Prints the summary of a run that has finished: with --text and --demo, also a text by its best model."""
    run, config, dist, texts = setup.run, setup.run.config, setup.dist, list[str]()
    better = checkpoints.better_than(state.step) if dist.rank == 0 else None  # another checkpoint, known to be better
    if config.is_demo_or_text:
        with fsdp.full_weights(setup.eval_model, setup.model), setup.amp:
            if dist.rank == 0:
                writer: Any = setup.eval_model
                if better:
                    writer = GPT.from_pretrained(better, verify=False).to(dist.device)
                generator = devices.seeded_generator(dist.device, config.seed)
                tokens = clock.tokens_of_last_text(most=150, step_tokens=config.total_batch_size // dist.world_size)
                texts = sample(writer.eval(), run.data.tokenizer, run.prompt, tokens, generator, temperature=0.8, n=1)
    print_summary(run, dist, state, loader.passes, checkpoints.evaluations["val"], better, texts)


# -----------------------------------------------------------------------------
# What a run starts from


def resolve(start: Start) -> TrainConfig:
    """Returns the configuration that a run starts with. Flags that nothing sets are computed here, or have a default.

    Raises:
        UserError: some values contradict each other.
    """
    flags = start.merged_flags()
    flags.setdefault("decay_steps", flags["max_steps"])
    flags.setdefault("min_lr", flags["max_lr"] / (50 if flags["schedule"] == "wsd" else 10))
    if flags.get("minutes"):  # None: at each quarter of the time
        flags = dict.fromkeys(("val_every", "sample_every", "checkpoint_every")) | flags
    config = TrainConfig(**flags)
    config.check()
    return config


def new_model(config: TrainConfig, vocab_size: int) -> GPT:
    """Makes the model that the flags describe, with random weights."""
    sizes = {field.name: getattr(config, field.name) for field in fields(GPTConfig) if field.name != "vocab_size"}
    model = GPT(GPTConfig(vocab_size=vocab_size, **sizes))
    if config.lora_rank:
        lora.add_adapter(model, config.lora_rank, config.lora_alpha, config.seed)
    return model


def initial_model(config: TrainConfig, tokenizer: Tokenizer, start: Start) -> GPT:
    """Makes the model that this process starts from, on the CPU, with random, pretrained or a checkpoint's weights."""
    path = start.checkpoint.path if start.checkpoint else None
    # a LoRA checkpoint has merged weights: the frozen ones come from --init-from, LoRA's matrices from adapter/
    source = path if path and not config.lora_rank else config.init_from
    if source is None:
        torch.manual_seed(config.seed)  # on the CPU, so that every kind of device starts from the same weights
        model = new_model(config, tokenizer.vocab_size)
    else:
        model = GPT.from_pretrained(source, config.dropout, verify=False)  # its checksums were compared already
        huggingface.check_fits(source, model.config.vocab_size, model.config.block_size, tokenizer, config)
        if config.block_size < model.config.block_size:
            model.crop(config.block_size)
    if config.lora_rank:
        lora.add_adapter(model, config.lora_rank, config.lora_alpha, config.seed, path)
    return model


def open_data(config: TrainConfig, start: Start) -> TokenData:
    """Opens the shards of a run, and checks that they have enough tokens.

    Raises:
        UserError: they are missing or corrupt, or have too few.
    """
    validates = config.val_every != 0
    data = TokenData.open(config.data, validates, start.first_model(config))
    data.check_rows(config.block_size, config.step_rows, config.val_tokens if validates else None, config.shuffle)
    return data


def load(config: TrainConfig, dist: Distributed, start: Start) -> Setup:
    """Loads data and model, as `start` says: all that can fail or take long, before the run begins in its folder."""
    machine = Machine.find(config, dist.device, dist.world_size)
    use_fsdp = config.shards_weights(dist.world_size)
    dist.once(lambda: run_folder.make_own_shards(config, start))  # of --text and --demo
    # Local rank 0 runs this block before the others, which then find what it downloaded.
    with dist.local_rank_zero_first():
        data = open_data(config, start)
        memory.check_training_fits(config, data.tokenizer.vocab_size, dist.world_size, dist.device)
        with fsdp.weights_on_rank_zero(use_fsdp, dist.rank):  # the others get theirs from rank 0, in ShardedModel
            model = initial_model(config, data.tokenizer, start)
        identity = start.identify_data(data, model)
        examples = hellaswag.load_examples(
            config, machine.hellaswag_every, data.tokenizer, config.block_size, dist.print0
        )
        devices.configure_backends(dist.device, config.tf32)  # TF32, the allocator
        if config.recompute:  # activation checkpointing
            memory.recompute_activations(model.transformer.h)
        eval_model: nn.Module = model
        if use_fsdp:
            eval_model = fsdp.without_weights(model)
        else:
            model.to(dist.device)
        if machine.compiled:
            eval_model = devices.compile(eval_model)
    preflight.check_runs_agree(dist, config, machine, identity)  # or ranks would wait for each other forever
    dist.connect_gpus()  # before micro-batches are tried: NCCL takes memory, too
    if not all(dist.all_gather(bool(examples))):  # one node may have failed to download them
        examples = []
    hellaswag_sha256 = hellaswag.sha256_of(examples)
    preflight.check_facts_agree(dist, {"the HellaSwag items": hellaswag_sha256})
    cooldown = cooldown_start(config) if config.has_cooldown else None
    run = RunInfo(
        config=config, machine=machine, start=start, schedule=Schedule(config, machine.hellaswag_every, cooldown),
        data=data, identity=identity, model=model, flops_per_token=model.flops_per_token(),
        hellaswag_items=len(examples), hellaswag_sha256=hellaswag_sha256,
    )  # fmt: skip
    return Setup(run=run, dist=dist, examples=examples, model=model, eval_model=eval_model, train_model=eval_model)


def distribute(setup: Setup) -> Setup:
    """Divides training among the processes, by DDP or FSDP, and finds the largest micro-batch that fits."""
    config, machine, dist, model = setup.run.config, setup.run.machine, setup.dist, setup.model
    use_fsdp, train_model = config.shards_weights(dist.world_size), setup.eval_model
    shard_model = partial(fsdp.ShardedModel, device=dist.device, dtype=setup.dtype, compiled=machine.compiled)
    if dist.world_size > 1 and not use_fsdp:
        # gradient_as_bucket_view: gradients live in the buffers that are sent, instead of being copied into them
        train_model = DistributedDataParallel(setup.eval_model, gradient_as_bucket_view=True)

    def make_trial_model() -> nn.Module:  # to try micro-batches with; its weights do not change
        return shard_model(fsdp.without_weights(model), alone=True) if use_fsdp else train_model

    sizes = memory.Sizes.of(model)
    B = batch_size.try_batch_sizes(config, machine.batch_size, sizes, setup.layout, dist, setup.amp, make_trial_model)
    attention = devices.describe_attention(
        dist.device, setup.dtype, config.n_head, config.n_embd, config.block_size, config.dropout
    )
    if use_fsdp:  # each rank keeps a shard of every weight
        train_model = shard_model(model)
    return replace(setup.with_machine(batch_size=B, attention=attention), train_model=train_model)


def initial_state(setup: Setup) -> tuple[TrainState, DataLoaderLite]:
    """Returns the state of training, new or a checkpoint's, and the loader of the rows that come next."""
    run, dist = setup.run, setup.dist
    config, start, data = run.config, run.start, run.data
    optimizer = setup.model.configure_optimizers(
        config.weight_decay, config.max_lr, (config.beta1, config.beta2), config.optimizer,
        dtype=setup.dtype, adamw_lr=config.adamw_lr,
    )  # fmt: skip
    # In fp16, small gradients would underflow, so the scaler multiplies the loss and divides the gradients afterwards.
    scaler = torch.amp.GradScaler(dist.device.type, enabled=setup.dtype == torch.float16)
    state = TrainState(setup.model, optimizer, scaler)
    if start.checkpoint:
        state.restore(start.checkpoint, run.identity, config.optimizer, start.forked)  # the model has its weights
    if not optimizer.state and dist.device.type in batch_size.TRIED:
        allocate_state(optimizer)
    B, T = run.machine.batch_size, config.block_size
    grad_accum = batch_size.rows_per_rank(config, dist.world_size) // B  # micro-batches per step
    loader = DataLoaderLite(data.train, B, T, data.tokenizer.vocab_size, dist, grad_accum, config.shuffle, config.seed)
    loader.seek(state.row)
    if start.forked:  # its schedule may be a different one
        state.progress = run.schedule.progress(state.step, run.schedule.time_used(state.seconds), loader.passes)
    return state, loader


def allocate_state(optimizer: torch.optim.Optimizer) -> None:
    """Makes an optimizer allocate its state, by an update that it skips.

    The micro-batch was tried with as much memory in one piece. After a first step, only gaps between activations would be left.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    step_if_finite(optimizer, torch.zeros((), dtype=torch.bool, device=parameter.device))
    optimizer.zero_grad()


def record_step(setup: Setup, state: TrainState, grad_accum: int) -> Setup:
    """Records the step of a small model as CUDA graphs, if its kernels take less time than the host needs to launch them."""
    run, device, optimizer = setup.run, setup.dist.device, state.optimizer
    config, B = run.config, run.machine.batch_size
    are_faster = cuda_graphs.are_faster(memory.Sizes.of(setup.model), setup.layout, B, device)
    if not (config.cuda_graphs and are_faster and torch_private.skips_steps(optimizer)):
        return setup
    micro_step = partial(forward_backward, setup.train_model, grad_accum=grad_accum, scaler=state.scaler, amp=setup.amp)
    update = partial(step_if_finite, optimizer)
    graphs = cuda_graphs.record_step(micro_step, update, optimizer, B, config.block_size, device)
    return replace(setup.with_machine(cuda_graphs=graphs is not None), graphs=graphs)


# -----------------------------------------------------------------------------
# The command line


@report_lost_processes()
def main(argv: Sequence[str] | None = None) -> None:
    # command line -> layers of flags, also of a preset or a checkpoint -> configuration -> run
    cli_flags = cli.parse_flags(CommandLine, argv, __doc__, TABLES)
    dist = Distributed.from_environment(cli_flags.get("out", TrainConfig.out))
    plan_options, cli_flags = plan.split_flags(cli_flags, dist.world_size)
    preflight.check_starts_agree(dist, cli_flags, plan_options.plan)
    start = Start.find(cli_flags, TABLES, dist, plan_options.plan)
    config = resolve(start)
    if start.resumed and dist.once(partial(run_folder.has_finished, config.out, start.resumed.step)):
        return print_finished(config, start, dist.print0)
    if plan_options.plan:
        data = open_data(config, start) if shard_paths(config.data, "train") else None  # None: not made yet
        first_step, items = start.checkpoint.step if start.checkpoint else 0, hellaswag.count_items(config)
        tokenizer = start.existing_tokenizer(config)
        return plan.print_report(plan_options, config, new_model, data, tokenizer, items, first_step, dist.rank)
    with dist.failing_together():
        dist = dist.with_device(config.device)
    exit_code: int | str | None = 0
    try:
        with run_folder.locked(config, start, dist), devices.report_errors():
            if start.needs_measurement(config):  # times models to find what suits the time
                find_tokenizer = partial(start.existing_tokenizer, config)
                measured = budget.flags_for_minutes(config, cli_flags, RECIPES["fast"], dist, new_model, find_tokenizer)
                start = start.with_layer("--minutes", measured)
                config = resolve(start)
            train(config, dist, start)
    except SystemExit as stopped:
        exit_code = stopped.code
    dist.close()  # now that train() has returned: while DDP's model is alive, gloo could deadlock here
    if exit_code:
        raise SystemExit(exit_code)


if __name__ == "__main__":
    cli.run_cli(main)
