"""Step 8: tokens. Pieces of words instead of bytes, by a byte-pair encoding."""

import math
from collections import Counter
from dataclasses import dataclass
from pydoc_data.topics import topics

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn
from torch.nn import functional as F

EOT, B, T = 1023, 16, 64  # end of text is the last id; a batch has B rows of T tokens
MAX_STEPS, WARMUP_STEPS, MAX_LR, MIN_LR = 300, 20, 3e-3, 3e-4


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

    def configure_optimizers(self, weight_decay: float, lr: float, betas: tuple[float, float]) -> torch.optim.AdamW:
        decayed = {"params": [p for p in self.parameters() if p.dim() >= 2], "weight_decay": weight_decay}  # matrices
        others = {"params": [p for p in self.parameters() if p.dim() < 2], "weight_decay": 0.0}  # biases, norms
        return torch.optim.AdamW([decayed, others], lr=lr, betas=betas, eps=1e-8, fused=True)

    @torch.no_grad()
    def generate(self, idx: Tensor, max_new_tokens: int) -> Tensor:
        for _ in range(max_new_tokens):
            logits = self(idx[:, -self.wpe.num_embeddings :])[0][:, -1]  # (B, V): the last position predicts
            idx = torch.cat((idx, torch.multinomial(F.softmax(logits, dim=-1), 1)), dim=1)
        return idx


ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())  # a visible letter for each byte; a space is written Ġ
SPLIT = pre_tokenizers.ByteLevel(add_prefix_space=False)  # into GPT-2's words


def learn_merges(text: str, n: int) -> list[tuple[str, str]]:
    """Returns the n pairs of tokens that are merged, in order. Words are counted once, and no pair crosses their ends."""
    words = {word: ([*word], count) for word, count in Counter(w for w, _ in SPLIT.pre_tokenize_str(text)).items()}
    pairs = Counter[tuple[str, str]]()
    for parts, count in words.values():
        for pair in zip(parts, parts[1:], strict=False):
            pairs[pair] += count
    merges, ids = [], {token: id for id, token in enumerate(ALPHABET)}
    while len(merges) < n:
        # the most frequent pair; of equals, that of the oldest tokens
        first, second = best = min(pairs, key=lambda pair: (-pairs[pair], ids[pair[0]], ids[pair[1]]))
        merges.append(best)
        ids[first + second] = len(ids)
        for word, (parts, count) in words.items():
            if first + second not in word:
                continue
            for pair in zip(parts, parts[1:], strict=False):
                pairs[pair] -= count
            merged = [parts[0]]
            for part in parts[1:]:
                if (merged[-1], part) == best:
                    merged[-1] += part
                else:
                    merged.append(part)
            for pair in zip(merged, merged[1:], strict=False):
                pairs[pair] += count
            words[word] = merged, count
    return merges


def make_tokenizer() -> Tokenizer:
    """Returns the encoding: ids 0 to 255 are the bytes, then come the merges, then end of text."""
    text = "".join(topics.values())
    merges = learn_merges(text[: len(text) * 9 // 10], EOT - 256)  # not from what is held out
    tokens = [*ALPHABET, *(a + b for a, b in merges), "<|endoftext|>"]
    bpe = Tokenizer(models.BPE({token: id for id, token in enumerate(tokens)}, merges))
    bpe.pre_tokenizer, bpe.decoder = SPLIT, decoders.ByteLevel()
    bpe.add_special_tokens(["<|endoftext|>"])
    return bpe


def load_tokens(bpe: Tokenizer) -> tuple[Tensor, Tensor]:
    """Returns the tokens to train on, and the last tenth, which is held out."""
    tokens = torch.tensor([token for text in topics.values() for token in (EOT, *bpe.encode(text).ids)])
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


def get_lr(step: int) -> float:
    """Returns the learning rate of a step: linear warm-up, then a cosine from MAX_LR to MIN_LR."""
    if step < WARMUP_STEPS:
        return MAX_LR * (step + 1) / WARMUP_STEPS  # never 0: the first step would be wasted
    decayed = (step - WARMUP_STEPS) / (MAX_STEPS - WARMUP_STEPS)  # from 0 to 1
    return MIN_LR + 0.5 * (1.0 + math.cos(math.pi * decayed)) * (MAX_LR - MIN_LR)


def train_step(model: GPT, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor, lr: float) -> float:
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.zero_grad()
    _, loss = model(x, y)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # one batch with huge gradients must not undo the steps before it
    optimizer.step()
    return loss.item()


def main() -> None:
    torch.manual_seed(1337)
    bpe = make_tokenizer()
    train_tokens, val_tokens = load_tokens(bpe)
    bytes_per_token = len(bpe.decode(val_tokens.tolist()).encode()) / len(val_tokens)
    print(
        f"{len(train_tokens):,} tokens to train on, {len(val_tokens):,} held out, of {bytes_per_token:.3f} bytes each"
    )
    model = GPT(GPTConfig())
    optimizer = model.configure_optimizers(weight_decay=0.1, lr=MAX_LR, betas=(0.9, 0.95))
    for step in range(MAX_STEPS):
        loss = train_step(model, optimizer, *get_batch(train_tokens), get_lr(step))
        if step % 50 == 0 or step == MAX_STEPS - 1:
            print(f"step {step:5d} | loss {loss:.4f}")
    val_loss = validation_loss(model, val_tokens)
    print(f"held out: {val_loss:.4f} nats per token, {val_loss / bytes_per_token:.4f} per byte")
    print(bpe.decode(model.generate(torch.tensor([[EOT]]), 100)[0].tolist()))


if __name__ == "__main__":
    main()
