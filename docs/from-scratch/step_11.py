"""Step 11: fast. Attention in one kernel, the loss in chunks, bf16, and compiled code; what does each bring here?"""

import math
import shutil
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

DATA = Path("from_scratch_data")
B, T = 2, 256  # longer rows than before: attention matters more
MAX_STEPS, WARMUP_STEPS, MAX_LR, MIN_LR = 4, 2, 3e-3, 3e-4
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FP32, BF16 = (torch.autocast(DEVICE, torch.bfloat16, enabled=enabled) for enabled in (False, True))


@dataclass
class GPTConfig:
    block_size: int = T  # context length, in tokens
    vocab_size: int = 1024  # 256 bytes, 767 merges, end of text
    n_layer: int = 3
    n_head: int = 4
    n_embd: int = 128
    flash: bool = True  # attention in one kernel
    chunk_rows: int = 128  # of the logits; 0: all at once


class CausalSelfAttention(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.n_head, self.flash = config.n_head, config.flash
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)  # query, key and value of all heads
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)  # mixes what the heads have found

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
        q, k, v = (t.view(B, T, self.n_head, -1).transpose(1, 2) for t in self.c_attn(x).split(C, dim=2))
        if self.flash:  # the same, but the (T, T) matrix is never stored
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # (B, nh, T, hs)
        else:
            scores = q @ k.mT / math.sqrt(C // self.n_head)  # (B, nh, T, T)
            future = torch.ones(T, T, dtype=torch.bool, device=x.device).triu(1)
            y = F.softmax(scores.masked_fill(future, -math.inf), dim=-1) @ v  # (B, nh, T, hs)
        return self.c_proj(y.transpose(1, 2).reshape(B, T, C))  # concatenate the heads


class MLP(nn.Sequential):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd)  # each token by itself
        self.gelu = nn.GELU(approximate="tanh")  # as in GPT-2
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd)


class Block(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(config.n_embd), CausalSelfAttention(config)
        self.ln_2, self.mlp = nn.LayerNorm(config.n_embd), MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))  # the only place where tokens exchange information
        return x + self.mlp(self.ln_2(x))  # only the branch is normalized: x itself goes on as it is


class GPT(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.chunk_rows = config.chunk_rows
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)  # token embeddings
        self.wpe = nn.Embedding(config.block_size, config.n_embd)  # position embeddings: attention sees no order
        self.h = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.ln_f = nn.LayerNorm(config.n_embd)  # the residual stream has grown with each block
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.lm_head.weight = self.wte.weight  # tied: one matrix embeds tokens and predicts them
        for name, parameter in self.named_parameters():  # the tied matrix comes once, as wte
            if name.endswith(".bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() >= 2:  # gains of the layer norms stay 1
                # 2 per layer add to the residual stream: scaled, so that its variance does not grow with depth
                scale = math.sqrt(2 * config.n_layer) if name.endswith("c_proj.weight") else 1
                nn.init.normal_(parameter, 0.0, 0.02 / scale)  # logits near 0: the first loss is near ln(V)

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor | None, Tensor | None]:
        """Returns logits (B, T, V) for token ids (B, T); or, given targets (B, T), only their mean cross-entropy."""
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1), device=idx.device))  # (B, T, C)
        for block in self.h:
            x = block(x)
        x = self.ln_f(x)  # (B, T, C)
        if targets is None:
            return self.lm_head(x), None  # (B, T, V)
        x, targets = x.flatten(0, 1), targets.flatten()  # (B*T, C), (B*T)
        if not self.chunk_rows:
            return None, self.summed_loss(x, targets) / len(targets)
        # the logits of all rows may take more memory than all blocks: a chunk's are dropped, and computed again
        # for its gradient
        chunks = zip(x.split(self.chunk_rows), targets.split(self.chunk_rows), strict=True)
        losses = [checkpoint(self.summed_loss, *chunk, use_reentrant=False) for chunk in chunks]
        return None, torch.stack(losses).sum() / len(targets)

    def summed_loss(self, x: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.lm_head(x).float(), targets, reduction="sum")

    def configure_optimizers(self, weight_decay: float, lr: float, betas: tuple[float, float]) -> torch.optim.AdamW:
        decayed = {"params": [p for p in self.parameters() if p.dim() >= 2], "weight_decay": weight_decay}  # matrices
        others = {"params": [p for p in self.parameters() if p.dim() < 2], "weight_decay": 0.0}  # biases, norms
        return torch.optim.AdamW([decayed, others], lr=lr, betas=betas, eps=1e-8, fused=True)


def open_shards(split: str) -> list[np.ndarray]:
    """Opens the shards of a split, "train" or "val": memory-mapped, so that only what is used is read."""
    if not DATA.exists():
        raise SystemExit(f"error: there is no {DATA}. Run step_09.py first.")
    return [np.load(path, mmap_mode="r") for path in sorted(DATA.glob(f"*_{split}_*.npy"))]


class DataLoaderLite:
    """Deals the rows of T+1 tokens at 0, T, 2T, ... of each shard in order, B at a time."""

    def __init__(self, shards: Sequence[np.ndarray], B: int, T: int):
        self.rows = [shard[i : i + T + 1] for shard in shards for i in range(0, len(shard) - T, T)]
        self.B, self.position = B, 0

    def next_batch(self) -> tuple[Tensor, Tensor]:
        """Returns the next batch: (B, T) tokens, and the (B, T) tokens that follow them."""
        first = self.position * self.B
        rows = [self.rows[n % len(self.rows)] for n in range(first, first + self.B)]  # after the last row, the first
        self.position += 1
        tokens = torch.from_numpy(np.stack(rows).astype(np.int64))  # (B, T+1)
        return tokens[:, :-1], tokens[:, 1:]  # every position has a target


def get_lr(step: int) -> float:
    """Returns the learning rate of a step: linear warm-up, then a cosine from MAX_LR to MIN_LR."""
    if step < WARMUP_STEPS:
        return MAX_LR * (step + 1) / WARMUP_STEPS  # never 0: the first step would be wasted
    decayed = (step - WARMUP_STEPS) / (MAX_STEPS - WARMUP_STEPS)  # from 0 to 1
    return MIN_LR + 0.5 * (1.0 + math.cos(math.pi * decayed)) * (MAX_LR - MIN_LR)


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor, lr: float, amp: torch.autocast = FP32
) -> float:
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.zero_grad()
    with amp:  # matrix products in bf16; weights, norms and sums in fp32
        _, loss = model(x, y)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # one batch with huge gradients must not undo the steps before it
    optimizer.step()
    return loss.item()


def main() -> None:
    plain, flash, chunks = GPTConfig(flash=False, chunk_rows=0), GPTConfig(chunk_rows=0), GPTConfig()
    rows = [("plain", plain, FP32), ("+ flash attention", flash, FP32), ("+ loss in chunks", chunks, FP32)]
    rows += [("+ torch.compile", chunks, FP32), ("+ bf16", chunks, BF16)]
    print(f"{'':20}{'ms per step':>12}{'last loss':>12}")
    for name, config, amp in rows:
        torch.manual_seed(1337)
        model = GPT(config).to(DEVICE)
        optimizer = model.configure_optimizers(weight_decay=0.1, lr=MAX_LR, betas=(0.9, 0.95))
        loader = DataLoaderLite(open_shards("train"), B, T)
        if name in ("+ torch.compile", "+ bf16") and shutil.which("c++"):  # it compiles C++
            model.compile()
        times = []
        for step in range(MAX_STEPS):
            x, y = (t.to(DEVICE) for t in loader.next_batch())
            started = time.perf_counter()
            loss = train_step(model, optimizer, x, y, get_lr(step), amp)  # its last line waits for the device
            times.append(1000 * (time.perf_counter() - started))
        print(f"{name:20}{statistics.median(times):12.0f}{loss:12.4f}", flush=True)


if __name__ == "__main__":
    main()
