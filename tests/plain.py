"""The reference for training steps: GPT-2 and its loop as one writes them first, in plain PyTorch.

Attention with its explicit (T, T) matrix, the logits of all tokens at once, AdamW without fused kernels, nothing compiled.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from train_gpt2 import GPT, GPTConfig, TrainConfig, get_lr

Batch = tuple[Tensor, Tensor]  # (B, T) tokens and the (B, T) tokens that follow them


class PlainBlock(nn.Module):
    def __init__(self, T: int, C: int, n_head: int):
        super().__init__()
        self.n_head = n_head
        self.ln_1, self.ln_2 = nn.LayerNorm(C), nn.LayerNorm(C)
        self.attn = nn.ModuleDict({"c_attn": nn.Linear(C, 3 * C), "c_proj": nn.Linear(C, C)})
        self.mlp = nn.ModuleDict({"c_fc": nn.Linear(C, 4 * C), "c_proj": nn.Linear(4 * C, C)})
        self.register_buffer("past", torch.ones(T, T).tril() == 1, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
        hs = C // self.n_head
        q, k, v = self.attn["c_attn"](self.ln_1(x)).split(C, dim=2)
        q, k, v = (t.view(B, T, self.n_head, hs).transpose(1, 2) for t in (q, k, v))  # (B, nh, T, hs)
        scores = q @ k.transpose(2, 3) / math.sqrt(hs)  # (B, nh, T, T)
        y = F.softmax(scores.masked_fill(~self.past[:T, :T], -math.inf), dim=-1) @ v  # (B, nh, T, hs)
        x = x + self.attn["c_proj"](y.transpose(1, 2).reshape(B, T, C))
        return x + self.mlp["c_proj"](F.gelu(self.mlp["c_fc"](self.ln_2(x)), approximate="tanh"))


class PlainGPT(nn.Module):
    """GPT-2 without padding of the vocabulary. Its parameters have the names of train_gpt2.GPT."""

    def __init__(self, block_size: int, vocab_size: int, n_layer: int, n_head: int, n_embd: int):
        super().__init__()
        wte, wpe = nn.Embedding(vocab_size, n_embd), nn.Embedding(block_size, n_embd)
        blocks = nn.ModuleList(PlainBlock(block_size, n_embd, n_head) for _ in range(n_layer))
        self.transformer = nn.ModuleDict({"wte": wte, "wpe": wpe, "h": blocks, "ln_f": nn.LayerNorm(n_embd)})
        self.lm_head = nn.Linear(n_embd, vocab_size, bias=False)
        self.lm_head.weight = wte.weight

    def forward(self, idx: Tensor, targets: Tensor) -> Tensor:
        t = self.transformer
        x = t["wte"](idx) + t["wpe"](torch.arange(idx.size(1)))
        for block in t["h"]:
            x = block(x)
        logits = self.lm_head(t["ln_f"](x))  # (B, T, V)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    def copy_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Takes the weights of a train_gpt2.GPT, without its padding."""
        self.load_state_dict({name: weights[name][: len(own)] for name, own in self.state_dict().items()})


def plain_optimizer(model: nn.Module, lr: float) -> torch.optim.AdamW:
    matrices, others = ([p for p in model.parameters() if (p.dim() >= 2) == wanted] for wanted in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), eps=1e-8, fused=False, foreach=False)


def plain_step(
    model: PlainGPT, optimizer: torch.optim.Optimizer, batches: list[Batch], lr: float, amp: torch.autocast
) -> float:
    """One optimizer step on these micro-batches; returns its mean loss."""
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.zero_grad()
    mean_loss = 0.0
    for x, y in batches:
        with amp:
            loss = model(x, y) / len(batches)
        loss.backward()
        mean_loss += loss.item()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return mean_loss


def plain_batches(folder: Path, B: int, T: int, rows_per_step: int, steps: int) -> Iterator[list[Batch]]:
    """The micro-batches of each step, cut by hand from the train shards of a folder."""
    rows: list[Tensor] = []
    for file in sorted(folder.glob("*_train_*.npy")):
        tokens = torch.from_numpy(np.load(file).astype(np.int64))
        rows += [tokens[i * T : i * T + T + 1] for i in range((len(tokens) - 1) // T)]
    for step in range(steps):
        numbers = range(step * rows_per_step, (step + 1) * rows_per_step)
        batches = torch.stack([rows[n % len(rows)] for n in numbers]).split(B)  # (B, T+1) each
        yield [(batch[:, :-1], batch[:, 1:]) for batch in batches]


def plain_losses(config: TrainConfig, B: int, steps: int, dtype: str, vocab_size: int = 257) -> np.ndarray:
    """The losses of the first steps, with the data, the schedule and the initial weights that `train` takes."""
    sizes = dict(
        block_size=config.block_size, vocab_size=vocab_size, n_layer=config.n_layer, n_head=config.n_head,
        n_embd=config.n_embd,
    )  # fmt: skip
    model = PlainGPT(**sizes)
    torch.manual_seed(config.seed)
    model.copy_weights(GPT(GPTConfig(**sizes)).state_dict())
    optimizer = plain_optimizer(model, config.max_lr)
    amp = torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == "bf16")
    rows = config.total_batch_size // config.block_size
    batches_of_steps = enumerate(plain_batches(Path(config.data), B, config.block_size, rows, steps))
    return np.array([plain_step(model, optimizer, batches, get_lr(s, config), amp) for s, batches in batches_of_steps])
