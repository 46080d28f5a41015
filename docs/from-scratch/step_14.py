"""Step 14: text from a trained model. Reads a checkpoint of step 13, of train_gpt2.py, or OpenAI's GPT-2 from the hub.

python docs/from-scratch/step_14.py FOLDER_OR_NAME [PROMPT]
"""

import json
import math
import sys
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional as F


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

    @classmethod
    def from_pretrained(cls, folder: Path) -> "GPT":
        """Returns the model in a folder in Hugging Face's format."""
        config = json.loads((folder / "config.json").read_text())
        config["block_size"] = config["n_positions"]
        model = cls(GPTConfig(**{field.name: config[field.name] for field in fields(GPTConfig)}))
        weights = load_file(folder / "model.safetensors")
        weights = {name.removeprefix("transformer."): p for name, p in weights.items()}  # OpenAI's have no prefix
        for name, p in model.named_parameters():  # in theirs, attn.bias is a mask: nobody asks for it
            p.data.copy_(transpose(name, weights[name]))
        return model

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


def transpose(name: str, p: Tensor) -> Tensor:
    """Converts a parameter to transformers' layout or back: its Conv1D stores (in, out), nn.Linear (out, in)."""
    return p.T if name.startswith("h.") and p.dim() == 2 else p


def main() -> None:
    name, prompt, *_ = [*sys.argv[1:], "The"]
    folder = Path(name)
    if not folder.exists():
        from huggingface_hub import snapshot_download  # here, since only hub models need it

        files = ["config.json", "model.safetensors", "tokenizer.json"]
        folder = Path(snapshot_download(name, allow_patterns=files))
    model = GPT.from_pretrained(folder)
    bpe = Tokenizer.from_file(str(folder / "tokenizer.json"))
    torch.manual_seed(1337)
    ids = model.generate(torch.tensor([bpe.encode(prompt).ids]), 100, temperature=0.8, top_k=50)[0]
    print(bpe.decode(ids.tolist()))


if __name__ == "__main__":
    main()
