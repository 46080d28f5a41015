"""GPU memory that training takes, computed without a GPU: by model and micro-batch, and what fits on which GPU.

    python benchmarks/bench_memory.py

Counted are weights, gradients and AdamW's two moments in fp32, everything that autograd saves in a forward pass under bf16
autocast (according to PyTorch, on tensors without data), the working memory of one chunk of the loss, and a gigabyte for
CUDA and fragmentation. This is eager PyTorch; compiled, less is saved. Several GPUs need 4 more bytes per parameter, for
the buckets in which gradients are sent.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.optim import loss  # noqa: E402
from train_gpt2 import GPT, MODELS, GPTConfig  # noqa: E402

GPUS = (8, 16, 24, 40, 80, 141)  # GB
RESERVE = 1e9


def parameters_and_saved(model: str, B: int) -> tuple[int, int]:
    """The parameters of a model, and the bytes that autograd saves for the backward pass of B rows of 1024 tokens."""
    saved: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    with FakeTensorMode():
        gpt = GPT(GPTConfig(**MODELS[model]))
        tokens = torch.zeros((B, 1024), dtype=torch.int64)
        hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
        with hooks, torch.autocast("cpu", dtype=torch.bfloat16):
            gpt(tokens, tokens)
        own = {p.untyped_storage()._cdata for p in gpt.parameters()}
        n = sum(p.numel() for p in gpt.parameters())
    return n, sum(storage.nbytes() for key, storage in saved.items() if key not in own)


def total(model: str, B: int) -> float:
    """Bytes that training takes with micro-batches of B rows."""
    n, saved = parameters_and_saved(model, B)
    rows = min(loss.chunk_rows("cuda", 50304), B * 1024)
    chunk = rows * 50304 * (2 + 4 + 4)  # logits in bf16, the same in fp32, log-probabilities
    return 16 * n + saved + chunk + RESERVE


def main() -> None:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()  # no flags but --help
    sizes = (1, 2, 4, 8, 16, 32, 64, 128)
    table = {model: [total(model, B) / 1e9 for B in sizes] for model in MODELS}
    print("| GB, rows of 1024 tokens: | " + " | ".join(map(str, sizes)) + " |\n" + "|---" * (len(sizes) + 1) + "|")
    for model, row in table.items():
        print(f"| {model} | " + " | ".join(f"{gb:.1f}" for gb in row) + " |")
    print(
        "\n| largest `--batch-size` | "
        + " | ".join(f"{gpu} GB" for gpu in GPUS)
        + " |\n"
        + "|---" * (len(GPUS) + 1)
        + "|"
    )
    for model, row in table.items():
        fits = [max((B for B, gb in zip(sizes, row, strict=True) if gb <= gpu), default="-") for gpu in GPUS]
        print(f"| {model} | " + " | ".join(map(str, fits)) + " |")


if __name__ == "__main__":
    main()
