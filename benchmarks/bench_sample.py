"""Speed of sample.py compared with `generate` of transformers: milliseconds per token.

    python benchmarks/bench_sample.py                      # a small model and GPT-2 124M, batches of 1 and 8
    python benchmarks/bench_sample.py --tokens 128 -d cuda

Both have the same random weights and sample from the 50 likeliest tokens. sample.py computes bf16 by autocast and its
logits in fp32; the model of transformers has its weights in bf16. In each round one follows the other.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

import sample  # noqa: E402
from support.checkpoints import huggingface  # noqa: E402
from support.cli import Parser, add_device_flag, run_cli  # noqa: E402
from support.runtime import devices  # noqa: E402
from train_gpt2 import GPT, GPTConfig  # noqa: E402

if TYPE_CHECKING:
    from transformers import GPT2LMHeadModel

MODELS = {
    "small": GPTConfig(block_size=256, vocab_size=257, n_layer=4, n_head=4, n_embd=128),
    "124M": GPTConfig(),
}


def load_models(config: GPTConfig, device: torch.device) -> tuple[GPT, GPT2LMHeadModel]:
    """Ours and that of transformers, with the same weights."""
    with tempfile.TemporaryDirectory() as folder:
        model = GPT(config).eval()
        model.save_pretrained(folder)
        return model.to(device), huggingface.load_hf_model(Path(folder)).to(device)


def measure(
    model: GPT, hf_model: GPT2LMHeadModel, idx: torch.Tensor, dtype: torch.dtype, tokens: int, rounds: int
) -> list[tuple[float, float]]:
    """Seconds of ours and of transformers, for each round."""
    synchronize = partial(devices.synchronize, idx.device)
    hf_model.to(dtype)

    def ours() -> None:
        generator = devices.seeded_generator(idx.device, 1337)
        with devices.autocast(idx.device, dtype), devices.attention_without_cudnn(idx.device):
            list(sample.generate(model, idx, tokens, generator, top_k=50))

    def transformers() -> None:
        hf_model.generate(
            idx, attention_mask=torch.ones_like(idx), do_sample=True, top_k=50, max_new_tokens=tokens,
            eos_token_id=None, pad_token_id=0,
        )  # fmt: skip

    def seconds(generate: Callable[[], None]) -> float:
        start = time.perf_counter()
        generate()
        synchronize()
        return time.perf_counter() - start

    seconds(ours), seconds(transformers)  # warm up
    return [(seconds(ours), seconds(transformers)) for _ in range(rounds)]


def main() -> None:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS), help="(default: all)")
    parser.add_argument("--dtypes", nargs="+", default=["fp32", "bf16"], choices=list(devices.DTYPES), help="(default: fp32 bf16)")  # fmt: skip
    parser.add_argument("--tokens", type=int, default=32, metavar="N", help="tokens to generate (default: 32)")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="measurements of each (default: 5)")
    add_device_flag(parser)
    args = parser.parse_args()
    device = torch.device(devices.pick_device_type(args.device))
    torch.manual_seed(1337)
    threads = f", {torch.get_num_threads()} threads" if device.type == "cpu" else ""
    print(
        f"{devices.describe(device)}{threads}, torch {torch.__version__}; a prompt of 16 tokens, {args.tokens} new ones"
    )
    for name in args.models:
        model, hf_model = load_models(MODELS[name], device)
        for dtype in args.dtypes:
            for batch in (1, 8):
                idx = torch.randint(model.config.vocab_size, (batch, 16), device=device)
                rounds = measure(model, hf_model, idx, devices.DTYPES[dtype], args.tokens, args.rounds)
                ours, theirs = (1000 * statistics.median(times) / args.tokens for times in zip(*rounds, strict=True))
                ratios = sorted(theirs / ours for ours, theirs in rounds)
                print(
                    f"{name:5} | {dtype} | batch {batch} | sample.py {ours:7.2f} ms | transformers {theirs:7.2f} ms | "
                    f"{statistics.median(ratios):.2f}x ({ratios[0]:.2f} to {ratios[-1]:.2f})",
                    flush=True,
                )


if __name__ == "__main__":
    run_cli(main)
