"""Compares milliseconds per token of sample.py and of transformers' `generate`, in turn, on the same random weights.

    python benchmarks/bench_sample.py                           # GPT-2 124M in fp32 and bf16, one text and eight
    python benchmarks/bench_sample.py --tokens 128 --device cuda

Both sample from the 50 likeliest tokens, after a prompt of 16 tokens. In bf16, transformers stores all its weights
and computes its logits in bf16, whereas sample.py computes its logits in fp32.
"""

from __future__ import annotations

import argparse

import harness  # noqa: F401  finds the project; isort: skip
from support import startup

if __name__ == "__main__":
    startup.prepare()  # as in sample.py, before torch is imported

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

import sample
from support.checkpoints import huggingface
from support.cli import run_cli
from support.config import DEVICES
from support.runtime import devices
from train_gpt2 import GPT, GPTConfig


def milliseconds_per_token(generate: Callable[[], object], tokens: int, device: torch.device) -> float:
    started = time.perf_counter()
    generate()
    devices.synchronize(device)
    return 1000 * (time.perf_counter() - started) / tokens


def measure(dtype: torch.dtype, rows: int, tokens: int, rounds: int, device: torch.device) -> list[tuple[float, float]]:
    """Returns the milliseconds per token of sample.py and of transformers, in each round."""
    torch.manual_seed(1337)
    model = GPT(GPTConfig()).eval()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        hf_model = huggingface.load_hf_model(Path(folder)).to(device, dtype)
    sample.prepare_weights(model.to(device), dtype, single_row=rows == 1)
    idx = torch.randint(model.config.vocab_size, (rows, 16), device=device)

    def ours() -> None:
        generator = devices.seeded_generator(device, 1337)
        with devices.autocast(device, dtype):
            list(sample.generate(model, idx, tokens, generator=generator, top_k=50))

    def theirs() -> None:
        options = {"do_sample": True, "top_k": 50, "max_new_tokens": tokens, "eos_token_id": None, "pad_token_id": 0}
        hf_model.generate(idx, attention_mask=torch.ones_like(idx), **options)

    ours(), theirs()  # warm up
    return [
        (milliseconds_per_token(ours, tokens, device), milliseconds_per_token(theirs, tokens, device))
        for _ in range(rounds)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=32, help="tokens to generate (default: 32)")
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each (default: 5)")
    parser.add_argument("-d", "--device", default="auto", choices=DEVICES)
    args = parser.parse_args()
    device = devices.pick_device(args.device)
    print("| | texts | sample.py | transformers | |\n|---|---|---|---|---|")
    for name in ("fp32", "bf16"):
        for rows in (1, 8):
            rounds = measure(devices.DTYPES[name], rows, args.tokens, args.rounds, device)
            ours, theirs = (statistics.median(column) for column in zip(*rounds, strict=True))
            ratios = sorted(b / a for a, b in rounds)
            spread = f"{statistics.median(ratios):.2f}x ({ratios[0]:.2f} to {ratios[-1]:.2f})"
            print(f"| {name} | {rows} | {ours:.1f} | {theirs:.1f} | {spread} |", flush=True)


if __name__ == "__main__":
    run_cli(main)
