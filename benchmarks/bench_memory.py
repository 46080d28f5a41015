"""What training takes of a GPU's memory, computed without one: by model and micro-batch, and what fits where.

    python benchmarks/bench_memory.py

Counted are weights, gradients and AdamW's two moments in fp32, all that autograd keeps of a forward pass under bf16
autocast (from PyTorch's own bookkeeping, on tensors without data), the working space of one chunk of the loss, and a
gigabyte for CUDA and fragmentation. Eager PyTorch is counted; compiled, less is kept. Several GPUs need 4 bytes per
parameter more, for the buckets in which gradients are sent.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

sys.path.insert(0, str(Path(__file__).parents[1]))

from support import loss  # noqa: E402
from train_gpt2 import GPT, MODELS, GPTConfig  # noqa: E402

GPUS = (8, 16, 24, 40, 80, 141)  # GB
RESERVE = 1e9


def parameters_and_kept(model: str, B: int) -> tuple[int, int]:
    """The parameters of a model, and the bytes that autograd keeps for the backward pass of B rows of 1024 tokens."""
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    with FakeTensorMode():
        gpt = GPT(GPTConfig(**MODELS[model]))
        tokens = torch.zeros((B, 1024), dtype=torch.int64)
        hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
        with hooks, torch.autocast("cpu", dtype=torch.bfloat16):
            gpt(tokens, tokens)
        own = {p.untyped_storage()._cdata for p in gpt.parameters()}
        n = sum(p.numel() for p in gpt.parameters())
    return n, sum(storage.nbytes() for key, storage in kept.items() if key not in own)


def total(model: str, B: int) -> float:
    """Bytes that training takes with micro-batches of B rows."""
    n, kept = parameters_and_kept(model, B)
    rows = min(loss.rows_of_chunk("cuda", 50304), B * 1024)
    chunk = rows * 50304 * (2 + 4 + 4)  # logits in bf16, the same in fp32, log-probabilities
    return 16 * n + kept + chunk + RESERVE


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
