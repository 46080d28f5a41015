"""Step 13: checkpoints. A run survives kill -9 and goes on with --resume, and its model opens in transformers."""

import json
import math
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

DATA, OUT, CHECKPOINT_EVERY = Path("from_scratch_data"), Path("from_scratch_log"), 100
B, T, TOTAL_BATCH_SIZE = 4, 64, 1024  # rows and tokens of a micro-batch, and tokens of a step
MAX_STEPS, WARMUP_STEPS, MAX_LR, MIN_LR = 300, 20, 3e-3, 3e-4


@dataclass
class GPTConfig:
    block_size: int = T  # context length, in tokens
    vocab_size: int = 1024  # 256 bytes, 767 merges, end of text
    n_layer: int = 3
    n_head: int = 4
    n_embd: int = 128


class CausalSelfAttention(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.n_head = config.n_head
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)  # query, key and value of all heads
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)  # mixes what the heads have found

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
        q, k, v = (t.view(B, T, self.n_head, -1).transpose(1, 2) for t in self.c_attn(x).split(C, dim=2))
        # softmax(q @ k.mT / sqrt(hs) with the future masked) @ v, in one kernel that never stores the (T, T) matrix
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # (B, nh, T, hs)
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
        self.config = config
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

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Returns logits (B, T, V) for token ids (B, T), and their mean cross-entropy if targets (B, T) are given."""
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1)))  # (B, T, C)
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))  # (B, T, V)
        return logits, None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())

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
    """Deals the rows of T+1 tokens at 0, T, 2T, ... of each shard in order, B at a time to rank 0, 1, ... in turn."""

    def __init__(self, shards: Sequence[np.ndarray], B: int, T: int, rank: int = 0, world_size: int = 1):
        self.rows = [shard[i : i + T + 1] for shard in shards for i in range(0, len(shard) - T, T)]
        self.B, self.rank, self.world_size, self.position = B, rank, world_size, 0
        self.grad_accum = TOTAL_BATCH_SIZE // (B * T * world_size)  # micro-batches of a step

    def next_batch(self) -> tuple[Tensor, Tensor]:
        """Returns this rank's next micro-batch: (B, T) tokens, and the (B, T) tokens that follow them."""
        first = (self.position * self.world_size + self.rank) * self.B
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


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoaderLite, lr: float) -> float:
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.zero_grad()
    loss_accum = torch.zeros(())
    for micro_step in range(loader.grad_accum):
        x, y = loader.next_batch()
        # DDP averages gradients over the ranks during backward. Once per step is enough: in the last micro-step.
        model.require_backward_grad_sync = micro_step == loader.grad_accum - 1  # type: ignore[assignment]
        _, loss = model(x, y)
        loss = loss / loader.grad_accum  # backward adds to the gradients, and each loss is a mean over its micro-batch
        loss_accum += loss.detach()
        loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # one batch with huge gradients must not undo the steps before it
    optimizer.step()
    if loader.world_size > 1:  # each rank has the loss of its own rows
        dist.all_reduce(loss_accum)
    return loss_accum.item() / loader.world_size


def transpose(name: str, p: Tensor) -> Tensor:
    """Converts a parameter to transformers' layout or back: its Conv1D stores (in, out), nn.Linear (out, in)."""
    return p.T if name.startswith("h.") and p.dim() == 2 else p


def save_checkpoint(model: GPT, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Writes a folder that is complete as soon as it has its name: a reader never sees a part of it."""
    tmp = OUT / f".model_{step:05d}.partial"
    tmp.mkdir(parents=True, exist_ok=True)
    parameters = model.named_parameters()  # the tied matrix comes once, as wte
    weights = {f"transformer.{name}": transpose(name, p.detach()).contiguous() for name, p in parameters}
    save_file(weights, tmp / "model.safetensors", metadata={"format": "pt"})
    config = {"n_positions" if name == "block_size" else name: size for name, size in asdict(model.config).items()}
    config |= {"model_type": "gpt2", "activation_function": "gelu_new", "bos_token_id": None, "eos_token_id": None}
    (tmp / "config.json").write_text(json.dumps(config, indent=2))
    shutil.copy(DATA / "tokenizer.json", tmp)
    torch.save({"step": step, "optimizer": optimizer.state_dict()}, tmp / "trainer.pt")
    for path in (*tmp.iterdir(), tmp):  # onto the disk, before the name says that they are there
        file = os.open(path, os.O_RDONLY)
        os.fsync(file)
        os.close(file)
    os.replace(tmp, OUT / f"model_{step:05d}")


def load_checkpoint(model: GPT, optimizer: torch.optim.Optimizer) -> int:
    """Restores weights and optimizer from the newest checkpoint; returns the number of steps that it has done."""
    newest = max(OUT.glob("model_*"))
    weights = load_file(newest / "model.safetensors")
    for name, p in model.named_parameters():
        p.data.copy_(transpose(name, weights[f"transformer.{name}"]))
    trainer = torch.load(newest / "trainer.pt")
    optimizer.load_state_dict(trainer["optimizer"])
    return trainer["step"]


def train(rank: int = 0, world_size: int = 1, resume: bool = False) -> list[float]:
    """Trains up to MAX_STEPS, from the beginning or the newest checkpoint; returns the losses, the same on all ranks."""
    torch.manual_seed(1337)
    model = GPT(GPTConfig())
    train_model = DistributedDataParallel(model) if world_size > 1 else model
    optimizer = model.configure_optimizers(weight_decay=0.1, lr=MAX_LR, betas=(0.9, 0.95))
    loader = DataLoaderLite(open_shards("train"), B, T, rank, world_size)
    first_step = load_checkpoint(model, optimizer) if resume else 0
    loader.position = first_step * loader.grad_accum
    losses = []
    for step in range(first_step, MAX_STEPS):
        losses.append(train_step(train_model, optimizer, loader, get_lr(step)))
        if rank == 0 and (step % 50 == 0 or step == MAX_STEPS - 1):
            print(f"step {step:5d} | loss {losses[-1]:.6f}", flush=True)
        if rank == 0 and ((step + 1) % CHECKPOINT_EVERY == 0 or step == MAX_STEPS - 1):
            save_checkpoint(model, optimizer, step + 1)
    return losses


def main() -> None:
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))  # torchrun sets both
    if world_size > 1:
        dist.init_process_group("gloo")
    resume = "--resume" in sys.argv
    if OUT.exists() and not resume:
        raise SystemExit(f"error: there is a run in {OUT}. Continue it with --resume, or remove the folder.")
    train(rank, world_size, resume)
    if world_size > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
