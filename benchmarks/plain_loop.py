"""GPT-2 and a straightforward training loop in plain PyTorch: the reference for tests and benchmarks.

Attention stores its (T, T) matrix, the logits of all tokens are computed at once, AdamW is PyTorch's default one, and
nothing is compiled. Only the configuration, learning rates and initial weights come from train_gpt2.py.
bench_throughput.py adds features to this loop one at a time; their names are in `bench_throughput.FEATURES`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from hellaswag import Example
from support.config import TrainConfig
from support.optim.loss import chunked_cross_entropy  # for the feature "chunked loss"
from train_gpt2 import GPT, GPTConfig, get_lr

Batch = tuple[Tensor, Tensor]  # (B, T) tokens and the (B, T) tokens that follow them


class PlainBlock(nn.Module):
    def __init__(self, config: GPTConfig, flash: bool):
        super().__init__()
        C, T = config.n_embd, config.block_size
        self.n_head, self.flash = config.n_head, flash
        self.ln_1 = nn.LayerNorm(C)
        self.attn = nn.ModuleDict({"c_attn": nn.Linear(C, 3 * C), "c_proj": nn.Linear(C, C)})
        self.ln_2 = nn.LayerNorm(C)
        self.mlp = nn.ModuleDict({"c_fc": nn.Linear(C, 4 * C), "c_proj": nn.Linear(4 * C, C)})
        self.register_buffer("past", torch.ones(T, T, dtype=torch.bool).tril(), persistent=False)

    def attention(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
        heads = (t.view(B, T, self.n_head, C // self.n_head) for t in self.attn["c_attn"](x).split(C, dim=2))
        q, k, v = (t.transpose(1, 2) for t in heads)  # (B, nh, T, hs)
        if self.flash:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = q @ k.transpose(-2, -1) / math.sqrt(C // self.n_head)  # (B, nh, T, T)
            y = F.softmax(scores.masked_fill(~self.past[:T, :T], -math.inf), dim=-1) @ v  # (B, nh, T, hs)
        return self.attn["c_proj"](y.transpose(1, 2).reshape(B, T, C))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.ln_1(x))
        return x + self.mlp["c_proj"](F.gelu(self.mlp["c_fc"](self.ln_2(x)), approximate="tanh"))


class PlainGPT(nn.Module):
    """GPT-2 with the parameter names of train_gpt2.GPT."""

    def __init__(self, config: GPTConfig, features: Collection[str] = ()):
        super().__init__()
        self.vocab_size, self.chunks = config.vocab_size, "chunked loss" in features
        rows = config.padded_vocab_size if "padded vocabulary" in features else config.vocab_size
        blocks = nn.ModuleList(PlainBlock(config, "flash" in features) for _ in range(config.n_layer))
        wte, wpe = nn.Embedding(rows, config.n_embd), nn.Embedding(config.block_size, config.n_embd)
        self.transformer = nn.ModuleDict(dict(wte=wte, wpe=wpe, h=blocks, ln_f=nn.LayerNorm(config.n_embd)))
        self.lm_head = nn.Linear(config.n_embd, rows, bias=False)
        self.lm_head.weight = wte.weight

    def forward(self, idx: Tensor, targets: Tensor) -> tuple[None, Tensor]:
        t = self.transformer
        x = t.wte(idx) + t.wpe(torch.arange(idx.size(1), device=idx.device))
        for block in t.h:
            x = block(x)
        x = t.ln_f(x)
        if self.chunks:
            x, targets = x.flatten(0, 1), targets.flatten()
            return None, chunked_cross_entropy(x, self.lm_head.weight, targets, self.vocab_size)
        logits = self.lm_head(x)[..., : self.vocab_size]  # (B, T, V)
        return None, F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    def copy_weights(self, model: nn.Module) -> PlainGPT:
        """Copies the weights of a train_gpt2.GPT, and returns this model."""
        weights = model.state_dict()
        self.load_state_dict({name: weights[name][: len(own)] for name, own in self.state_dict().items()})
        return self


class PlainAdamW(torch.optim.AdamW):
    def step(self) -> None:
        if not self.defaults["fused"]:
            self.grad_scale = self.found_inf = None  # train_gpt2.py sets them, but only fused AdamW reads them
        super().step()


def plain_optimizer(
    model: nn.Module, features: Collection[str], weight_decay: float, lr: float, betas: tuple[float, float], *_: object
) -> torch.optim.Optimizer:
    decayed, others = [p for p in model.parameters() if p.dim() >= 2], [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    return PlainAdamW(groups, lr=lr, betas=betas, eps=1e-8, fused=True if "fused AdamW" in features else None)


def plain_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Batch], amp: torch.autocast, lr: float
) -> tuple[float, float]:
    """Takes one step on these micro-batches; returns its mean loss and its gradient norm."""
    optimizer.zero_grad()
    for group in optimizer.param_groups:
        group["lr"] = lr
    mean = torch.zeros((), device=next(model.parameters()).device)
    for i, (x, y) in enumerate(batches):
        if hasattr(model, "require_backward_grad_sync"):
            model.require_backward_grad_sync = i == len(batches) - 1
        with amp:
            _, loss = model(x, y)
        loss = loss / len(batches)
        mean += loss.detach()
        loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return mean.item(), norm.item()


def plain_batches(folder: Path, B: int, T: int, rows_per_step: int, steps: int) -> Iterator[list[Batch]]:
    """Yields the micro-batches of each step, cut by hand from the train shards of a folder."""
    rows: list[Tensor] = []
    for file in sorted(folder.glob("*_train_*.npy")):
        tokens = torch.from_numpy(np.load(file).astype(np.int64))
        rows += [tokens[i * T : i * T + T + 1] for i in range((len(tokens) - 1) // T)]
    for step in range(steps):
        numbers = range(step * rows_per_step, (step + 1) * rows_per_step)
        batches = torch.stack([rows[n % len(rows)] for n in numbers]).split(B)  # (B, T+1) each
        yield [(batch[:, :-1], batch[:, 1:]) for batch in batches]


def plain_losses(config: TrainConfig, B: int, steps: int, model: nn.Module | None = None) -> np.ndarray:
    """Returns the losses of the first steps in fp32 on a CPU, with the bytes and learning rates that `train` uses.

    Args:
        model: `model(idx, targets)` returns a pair with the loss. None: PlainGPT with the initial weights of `train`.
    """
    if model is None:
        sizes = GPTConfig(
            block_size=config.block_size, vocab_size=257, n_layer=config.n_layer, n_head=config.n_head,
            n_embd=config.n_embd,
        )  # fmt: skip
        torch.manual_seed(config.seed)
        initial = GPT(sizes)
        model = PlainGPT(sizes).copy_weights(initial)
    optimizer = plain_optimizer(model, (), config.weight_decay, config.max_lr, (config.beta1, config.beta2))
    amp, rows = torch.autocast("cpu", enabled=False), config.total_batch_size // config.block_size
    batches = enumerate(plain_batches(Path(config.data), B, config.block_size, rows, steps))
    return np.array([plain_step(model, optimizer, batch, amp, get_lr(s, config))[0] for s, batch in batches])


@torch.no_grad()
def plain_completion_losses(
    compute_logits: Callable[[Tensor], Tensor], examples: list[Example], device: torch.device
) -> np.ndarray:
    """Returns summed and mean losses of HellaSwag's endings (2, items, 4), from all logits of one item at a time."""
    losses = []
    for example in examples:
        rows = [torch.tensor(example.context + completion) for completion in example.completions]
        tokens = pad_sequence(rows, batch_first=True).to(device)
        logits = compute_logits(tokens)[:, :-1].float()
        token_losses = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none").view(4, -1)
        endings = [row[len(example.context) - 1 : len(ids) - 1] for row, ids in zip(token_losses, rows, strict=True)]
        losses.append(torch.stack([torch.stack((ending.sum(), ending.mean())) for ending in endings]).tolist())
    return np.array(losses).transpose(2, 0, 1)
