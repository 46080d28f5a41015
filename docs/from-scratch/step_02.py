"""Step 2: PyTorch in thirty lines. Two matrices learn the counts, with gradients and Adam by hand and by PyTorch."""

from pydoc_data.topics import topics

import torch
from torch import Tensor

EOT, VOCAB_SIZE, C, BATCH = 256, 257, 128, 1024  # C numbers for each token; BATCH pairs of tokens in a step
MAX_STEPS = 300


def load_tokens() -> tuple[Tensor, Tensor]:
    """Returns the tokens to train on, and the last tenth, which is held out."""
    tokens = torch.tensor([token for text in topics.values() for token in (EOT, *text.encode())])
    n = len(tokens) * 9 // 10
    return tokens[:n], tokens[n:]


def mean_loss(E: Tensor, W: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Returns the mean loss of tokens y (n) that follow tokens x (n). E and W are (V, C)."""
    logits = E[x] @ W.T  # (n, V)
    return -logits.log_softmax(dim=1)[torch.arange(len(y)), y].mean()


def gradients(E: Tensor, W: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the gradients of the mean loss for E and W, by hand."""
    h = E[x]  # (n, C)
    d = (h @ W.T).softmax(dim=1)  # (n, V): p
    d[torch.arange(len(y)), y] -= 1  # p - [i = y]: the gradient for each logit
    d /= len(y)  # the loss is a mean
    return torch.zeros_like(E).index_add_(0, x, d @ W), d.T @ h  # a token that occurs twice gets both gradients


def adam_step(p: Tensor, gradient: Tensor, m: Tensor, v: Tensor, step: int, lr: float) -> None:
    """Changes p, and its averages m and v, in place; `step` counts from 0."""
    m += 0.1 * (gradient - m)  # the recent mean of the gradient
    v += 0.001 * (gradient**2 - v)  # that of its square
    m_hat = m / (1 - 0.9 ** (step + 1))  # both began at zero: divided by the weight that they have so far
    v_hat = v / (1 - 0.999 ** (step + 1))
    p -= lr * m_hat / (v_hat.sqrt() + 1e-8)


def train(tokens: Tensor, lr: float, adam: bool) -> tuple[Tensor, Tensor]:
    """Returns E and W after MAX_STEPS steps of gradient descent, or of Adam."""
    torch.manual_seed(1337)
    E = torch.randn(VOCAB_SIZE, C, requires_grad=True)  # PyTorch records what is computed from it
    W = torch.zeros(VOCAB_SIZE, C, requires_grad=True)
    averages = [(torch.zeros_like(p), torch.zeros_like(p)) for p in (E, W)]
    for step in range(MAX_STEPS):
        i = torch.randint(len(tokens) - 1, (BATCH,))
        loss = mean_loss(E, W, tokens[i], tokens[i + 1])
        loss.backward()  # adds its gradients to E.grad and W.grad
        with torch.no_grad():  # an update is not part of the model: do not record it
            for p, (m, v) in zip((E, W), averages, strict=True):
                if adam:
                    adam_step(p, p.grad, m, v, step, lr)
                else:
                    p -= lr * p.grad
                p.grad = None  # or the next backward would add to it
    return E.detach(), W.detach()


def main() -> None:
    train_tokens, val_tokens = load_tokens()
    for name, lr, adam in (
        ("gradient descent", 1e-2, False),
        ("gradient descent", 1.0, False),
        ("gradient descent", 10.0, False),
        ("Adam", 1e-2, True),
    ):
        E, W = train(train_tokens, lr, adam)
        print(f"{name}, rate {lr:g}: held out {mean_loss(E, W, val_tokens[:-1], val_tokens[1:]):.4f}")
    x, y = val_tokens[:100], val_tokens[1:101]
    by_hand = gradients(E, W, x, y)
    by_torch = torch.autograd.grad(mean_loss(E.requires_grad_(), W.requires_grad_(), x, y), (E, W))
    largest = max((a - b).abs().max().item() for a, b in zip(by_hand, by_torch, strict=True))
    print(f"the largest difference between the gradients by hand and by PyTorch: {largest:.0e}")


if __name__ == "__main__":
    main()
