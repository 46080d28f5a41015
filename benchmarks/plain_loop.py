"""The plain PyTorch loop that bench_throughput.py compares with: GPT-2 as everybody writes it first.

Features of train_gpt2.py can be added one at a time; their names are in `bench_throughput.FEATURES`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from support.optim.loss import chunked_cross_entropy
from train_gpt2 import GPTConfig


class Attention(nn.Module):
    def __init__(self, config: GPTConfig, flash: bool):
        super().__init__()
        C, T = config.n_embd, config.block_size
        self.n_head, self.flash = config.n_head, flash
        self.c_attn, self.c_proj = nn.Linear(C, 3 * C), nn.Linear(C, C)
        self.register_buffer("mask", torch.ones(T, T, dtype=torch.bool).tril(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
        heads = (t.view(B, T, self.n_head, C // self.n_head) for t in self.c_attn(x).split(C, dim=2))
        q, k, v = (t.transpose(1, 2) for t in heads)
        if self.flash:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = q @ k.transpose(-2, -1) / math.sqrt(C // self.n_head)
            y = F.softmax(scores.masked_fill(~self.mask[:T, :T], -math.inf), dim=-1) @ v
        return self.c_proj(y.transpose(1, 2).reshape(B, T, C))


class MLP(nn.Module):
    def __init__(self, C: int):
        super().__init__()
        self.c_fc, self.c_proj = nn.Linear(C, 4 * C), nn.Linear(4 * C, C)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))


class Block(nn.Module):
    def __init__(self, config: GPTConfig, flash: bool):
        super().__init__()
        C = config.n_embd
        self.ln_1, self.attn, self.ln_2, self.mlp = nn.LayerNorm(C), Attention(config, flash), nn.LayerNorm(C), MLP(C)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class PlainGPT(nn.Module):
    """With the parameter names of train_gpt2.GPT."""

    def __init__(self, config: GPTConfig, features: set[str]):
        super().__init__()
        self.vocab_size, self.chunks = config.vocab_size, "chunked loss" in features
        rows = config.padded_vocab_size if "padded vocabulary" in features else config.vocab_size
        blocks = nn.ModuleList(Block(config, "flash" in features) for _ in range(config.n_layer))
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
        logits = self.lm_head(x)[..., : self.vocab_size]  # all of them at once
        return None, F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    def copy_weights(self, model: nn.Module) -> PlainGPT:
        """The weights of a train_gpt2.GPT."""
        weights = model.state_dict()
        self.load_state_dict({name: weights[name][: len(own)] for name, own in self.state_dict().items()})
        return self


class PlainAdamW(torch.optim.AdamW):
    def step(self) -> None:
        if not self.defaults["fused"]:
            self.grad_scale = self.found_inf = None  # that train_gpt2.py sets; only fused AdamW reads them
        super().step()


def plain_optimizer(
    model: nn.Module, features: set[str], weight_decay: float, lr: float, betas: tuple[float, float], *_: object
) -> torch.optim.Optimizer:
    decayed, others = [p for p in model.parameters() if p.dim() >= 2], [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    return PlainAdamW(groups, lr=lr, betas=betas, eps=1e-8, fused=True if "fused AdamW" in features else None)


def plain_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Any], amp: torch.autocast, lr: float
) -> tuple[float, float]:
    """One step on these micro-batches; its mean loss and its gradient norm."""
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
