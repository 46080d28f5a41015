"""Step 10: use it. Sampling with a temperature and top-k, and multiple choice by loss."""

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional as F

DATA = Path("from_scratch_data")
ITEMS = 200


@dataclass
class GPTConfig:
    block_size: int = 64  # context length, in tokens
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
        scores = q @ k.mT / math.sqrt(C // self.n_head)  # (B, nh, T, T)
        future = torch.ones(T, T, dtype=torch.bool).triu(1)  # above the diagonal: columns that come after the row
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

    @torch.no_grad()
    def generate(self, idx: Tensor, max_new_tokens: int, temperature: float = 1.0, top_k: int | None = None) -> Tensor:
        for _ in range(max_new_tokens):
            logits = self(idx[:, -self.wpe.num_embeddings :])[0][:, -1]  # (B, V): the last position predicts
            probs, ids = next_token_probs(logits, temperature, top_k)  # (B, K) each
            idx = torch.cat((idx, ids.gather(1, torch.multinomial(probs, 1))), dim=1)
        return idx


def next_token_probs(logits: Tensor, temperature: float = 1.0, top_k: int | None = None) -> tuple[Tensor, Tensor]:
    """Returns probabilities (B, K) and ids (B, K) of the `top_k` likeliest tokens, or of all, given logits (B, V)."""
    logits, ids = torch.topk(logits, top_k or logits.size(-1))
    return F.softmax(logits / max(temperature, 1e-10), dim=-1), ids  # below 1, likely tokens become likelier


def make_items(tokens: list[int], n: int) -> list[tuple[list[int], list[list[int]], int]]:
    """Returns n items: a context, four completions and the number of the true one; the others are from elsewhere."""
    items, generator = [], np.random.default_rng(1337)
    for label in generator.integers(4, size=n).tolist():
        starts = generator.integers(32, len(tokens) - 16, 4).tolist()
        items.append((tokens[starts[label] - 32 : starts[label]], [tokens[i : i + 16] for i in starts], label))
    return items


@torch.no_grad()
def completion_losses(model: GPT, context: list[int], completions: list[list[int]]) -> list[float]:
    """Returns the mean loss of each completion's tokens, given the context and the tokens before them."""
    rows = [torch.tensor(context + completion) for completion in completions]
    tokens = nn.utils.rnn.pad_sequence(rows, batch_first=True)  # what follows a row cannot change its logits
    logits, _ = model(tokens[:, :-1])
    losses = F.cross_entropy(logits.mT, tokens[:, 1:], reduction="none")  # (4, T)
    return [loss[len(context) - 1 : len(row) - 1].mean().item() for loss, row in zip(losses, rows, strict=True)]


def main() -> None:
    torch.manual_seed(1337)
    if not (DATA / "model.pt").exists():
        raise SystemExit(f"error: there is no {DATA / 'model.pt'}. Run step_09.py first.")
    model = GPT(GPTConfig())
    model.load_state_dict(torch.load(DATA / "model.pt"))
    val_tokens = np.load(DATA / "topics_val_000000.npy").tolist()
    items = make_items(val_tokens, ITEMS)
    right = [int(np.argmin(completion_losses(model, *item[:2]))) == item[2] for item in items]
    print(f"multiple choice: {np.mean(right):.1%} of {ITEMS} items, by chance 25%")
    bpe = Tokenizer.from_file(str(DATA / "tokenizer.json"))
    for temperature, top_k in ((1.0, None), (1.0, 20), (0.7, 20), (0.0, None)):
        ids = model.generate(torch.tensor([bpe.encode("The").ids]), 60, temperature, top_k)[0]
        print(f"--- temperature {temperature}, top_k {top_k}: {bpe.decode(ids.tolist())}")


if __name__ == "__main__":
    main()
