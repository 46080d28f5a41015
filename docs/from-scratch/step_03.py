"""Step 3: the same model by gradient descent, in the form that all later steps have."""

from dataclasses import dataclass
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from torch.nn import functional as F

EOT, B, T = 256, 16, 64  # end of text; a batch has B rows of T tokens
MAX_STEPS, LR = 300, 1e-2


@dataclass
class GPTConfig:
    vocab_size: int = 257
    n_embd: int = 128


class GPT(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)  # token embeddings
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        nn.init.zeros_(self.lm_head.weight)  # all tokens equally likely: the first loss is ln(V)

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Returns logits (B, T, V) for token ids (B, T), and their mean cross-entropy if targets (B, T) are given."""
        x = self.wte(idx)  # (B, T, C)
        logits = self.lm_head(x)  # (B, T, V)
        return logits, None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    @torch.no_grad()
    def generate(self, idx: Tensor, max_new_tokens: int) -> Tensor:
        for _ in range(max_new_tokens):
            logits = self(idx)[0][:, -1]  # (B, V): the last position predicts
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
