"""Step 5: GPT-2's block. Several heads, an MLP, layer norms, and a residual stream through all of them."""

import math
from dataclasses import dataclass
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from torch.nn import functional as F

EOT, B, T = 256, 16, 64  # end of text; a batch has B rows of T tokens
MAX_STEPS, LR = 300, 3e-3


@dataclass
class GPTConfig:
    block_size: int = 64  # context length, in tokens
    vocab_size: int = 257
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
        nn.init.zeros_(self.lm_head.weight)  # all tokens equally likely: the first loss is ln(V)

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Returns logits (B, T, V) for token ids (B, T), and their mean cross-entropy if targets (B, T) are given."""
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1)))  # (B, T, C)
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))  # (B, T, V)
        return logits, None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    @torch.no_grad()
    def generate(self, idx: Tensor, max_new_tokens: int) -> Tensor:
        for _ in range(max_new_tokens):
            logits = self(idx[:, -self.wpe.num_embeddings :])[0][:, -1]  # (B, V): the last position predicts
            idx = torch.cat((idx, torch.multinomial(F.softmax(logits, dim=-1), 1)), dim=1)
        return idx


def load_tokens() -> tuple[Tensor, Tensor]:
    """Returns the tokens to train on, and the last tenth, which is held out."""
    tokens = torch.tensor([token for text in topics.values() for token in (EOT, *text.encode())])
    n = len(tokens) * 9 // 10
    return tokens[:n], tokens[n:]


def get_batch(tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (B, T) tokens from random places, and the (B, T) tokens that follow them."""
    rows = torch.stack([tokens[i : i + T + 1] for i in torch.randint(len(tokens) - T, (B,)).tolist()])  # (B, T+1)
    return rows[:, :-1], rows[:, 1:]  # every position has a target


@torch.no_grad()
def validation_loss(model: GPT, tokens: Tensor) -> float:
    """Returns the mean loss in nats per token over the rows at 0, T, 2T, ..."""
    rows = tokens.unfold(0, T + 1, T)  # (N, T+1): the last target of a row is also the first input of the next one
    return model(rows[:, :-1], rows[:, 1:])[1].item()


def main() -> None:
    torch.manual_seed(1337)
    train_tokens, val_tokens = load_tokens()
    model = GPT(GPTConfig())
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    for step in range(MAX_STEPS):
        x, y = get_batch(train_tokens)
        _, loss = model(x, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0 or step == MAX_STEPS - 1:
            print(f"step {step:5d} | loss {loss.item():.4f}")
    print(f"held out: {validation_loss(model, val_tokens):.4f}")
    print(bytes(t for t in model.generate(torch.tensor([[EOT]]), 300)[0].tolist() if t != EOT).decode(errors="replace"))


if __name__ == "__main__":
    main()
