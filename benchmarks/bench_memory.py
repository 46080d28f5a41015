"""GPU memory that training takes, computed without a GPU: by model and micro-batch, and what fits on which GPU.

    python benchmarks/bench_memory.py

The estimate that train_gpt2.py prints at its start (support/runtime/memory.py): weights, gradients and AdamW's two moments in
fp32, everything that autograd saves in a forward pass under bf16 autocast (according to PyTorch, on tensors without data),
the logits of one chunk of the loss, and a gigabyte for CUDA and fragmentation. The loss is compiled; the rest, compiled, saves
less than this. Several GPUs need 4 more bytes per parameter, for the buckets in which gradients are sent.
"""

from __future__ import annotations

import argparse
import functools
import sys
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.runtime import memory  # noqa: E402
from train_gpt2 import GPT, MODELS, GPTConfig  # noqa: E402

GPUS = {
    "8 GB": 7.8,
    "16 GB": 15.8,
    "24 GB": 23.5,
    "40 GB": 39.4,
    "80 GB": 79.1,
    "141 GB": 139.8,
}  # in GiB, less a few MB
SIZES = (1, 2, 4, 8, 16, 32, 64, 128)


def gib(model: torch.nn.Module, B: int, gpu: str) -> float:
    """What micro-batches of B rows of 1024 tokens take on a GPU of this size."""
    return memory.estimate_memory(model, B, 1024, torch.bfloat16, 1, int(GPUS[gpu] * 2**30)).total / 2**30


def print_row(*cells: object) -> None:
    print(f"| {' | '.join(map(str, cells))} |")


def main() -> None:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()  # no flags but --help
    memory.saved_bytes = functools.cache(memory.saved_bytes)  # the same on every GPU
    with FakeTensorMode():
        models = {name: torch.compile(GPT(GPTConfig(**sizes))) for name, sizes in MODELS.items()}  # never run
    print_row("GiB on a GPU of 80 GB, rows of 1024 tokens:", *SIZES)
    print_row(*["---"] * (len(SIZES) + 1))
    for name, model in models.items():
        print_row(name, *(f"{gib(model, B, '80 GB'):.1f}" for B in SIZES))
    print()
    print_row("largest `--batch-size`", *GPUS)
    print_row(*["---"] * (len(GPUS) + 1))
    for name, model in models.items():
        fits = {gpu: [B for B in SIZES if gib(model, B, gpu) <= size] for gpu, size in GPUS.items()}
        print_row(name, *(max(sizes, default="-") for sizes in fits.values()))


if __name__ == "__main__":
    main()
