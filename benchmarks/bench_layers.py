"""Times a forward and backward pass on a CPU with this trainer's attention and dropout, and with PyTorch's.

    python benchmarks/bench_layers.py
    OMP_NUM_THREADS=1 taskset -c 0 python benchmarks/bench_layers.py --dtype fp32

The two take turns, so a busy machine slows both down. The models are those that --text chooses, without --compile.
"""

from __future__ import annotations

import argparse
import statistics
import time
from unittest import mock

import harness  # noqa: F401  comes first: it adds the project to the path
import torch
from torch import nn
from torch.nn import functional as F

import train_gpt2
from support.optim.layers import Dropout
from support.runtime import devices
from support.sizing.presets import MODELS_FOR_TEXT
from train_gpt2 import GPT, GPTConfig

VOCAB_SIZE = 4096
CPU = torch.device("cpu")


def pytorchs_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout: float) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)


def forward_backward_seconds(model: GPT, ids: torch.Tensor, dtype: torch.dtype) -> float:
    started = time.perf_counter()
    with devices.autocast(CPU, dtype):
        _, loss = model(ids[:, :-1], ids[:, 1:])
    loss.backward()
    model.zero_grad()
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16", help="(default: bf16)")
    parser.add_argument("--rounds", type=int, default=20, metavar="N", help="(default: 20)")
    args = parser.parse_args()
    dtype = devices.DTYPES[args.dtype]
    torch.manual_seed(1337)
    print(f"{torch.get_num_threads()} threads, {args.dtype}; milliseconds for 2,048 tokens, medians of {args.rounds}")
    print("| layers x channels, context | dropout | PyTorch's | ours | ratio |\n|---|---|---|---|---|")
    for flags in MODELS_FOR_TEXT[:-1]:
        sizes = {name: value for name, value in flags.items() if name != "batch_size"}
        for dropout in (0.0, 0.1):
            model = GPT(GPTConfig(**sizes, dropout=dropout, vocab_size=VOCAB_SIZE))
            ids = torch.randint(VOCAB_SIZE, (2048 // sizes["block_size"], sizes["block_size"] + 1))
            times: dict[str, list[float]] = {"theirs": [], "ours": []}
            for _ in range(args.rounds + 1):
                with (
                    mock.patch.object(train_gpt2, "causal_attention", pytorchs_attention),
                    mock.patch.object(Dropout, "forward", nn.Dropout.forward),
                ):
                    times["theirs"].append(forward_backward_seconds(model, ids, dtype))
                times["ours"].append(forward_backward_seconds(model, ids, dtype))
            theirs, ours = (1e3 * statistics.median(values[1:]) for values in times.values())  # the first is a warm-up
            print(
                f"| {sizes['n_layer']} x {sizes['n_embd']}, {sizes['block_size']} | {dropout:g} | {theirs:.1f} | "
                f"{ours:.1f} | {theirs / ours:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
