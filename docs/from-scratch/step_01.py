"""Step 1: a language model of counts. How often does each byte follow each other byte?"""

import math
from pydoc_data.topics import topics

import torch
from torch import Tensor

EOT, VOCAB_SIZE = 256, 257  # the 256 values of a byte, and an end-of-text token before each document


def load_tokens() -> tuple[Tensor, Tensor]:
    """Returns the tokens to train on, and the last tenth, which is held out: a model could know the rest by heart."""
    tokens = torch.tensor([token for text in topics.values() for token in (EOT, *text.encode())])
    n = len(tokens) * 9 // 10
    return tokens[:n], tokens[n:]


def count_pairs(tokens: Tensor) -> Tensor:
    """Returns probabilities (V, V): row i is how likely each token is after token i."""
    pairs = tokens[:-1] * VOCAB_SIZE + tokens[1:]  # one number for each pair
    counts = torch.bincount(pairs, minlength=VOCAB_SIZE**2).view(VOCAB_SIZE, VOCAB_SIZE)
    counts += 1  # or a pair that was never seen would have probability 0, and an infinite loss
    return counts / counts.sum(dim=1, keepdim=True)


def validation_loss(probs: Tensor, tokens: Tensor) -> float:
    """Returns the mean loss in nats per token: -ln of the probability that the token which follows had."""
    return -probs[tokens[:-1], tokens[1:]].log().mean().item()


def generate(probs: Tensor, token: int, max_new_tokens: int) -> list[int]:
    """Continues a token by sampling."""
    tokens = [token]
    for _ in range(max_new_tokens):
        tokens.append(int(torch.multinomial(probs[tokens[-1]], 1)))
    return tokens


def main() -> None:
    torch.manual_seed(1337)
    train_tokens, val_tokens = load_tokens()
    probs = count_pairs(train_tokens)
    print(f"{len(train_tokens):,} tokens to train on, {len(val_tokens):,} held out")
    print(f"a uniform guess: {math.log(VOCAB_SIZE):.4f} nats")
    print(f"counts: {validation_loss(probs, train_tokens):.4f}, held out {validation_loss(probs, val_tokens):.4f}")
    print(bytes(t for t in generate(probs, EOT, 300) if t != EOT).decode(errors="replace"))


if __name__ == "__main__":
    main()
