"""hellaswag.py against the plain loop: items per second, predictions that differ, and by how much the losses do.

    python benchmarks/bench_hellaswag.py                                # GPT-2 124M with random weights
    python benchmarks/bench_hellaswag.py -m gpt2 -d cuda --limit 10042  # OpenAI's, all items, on a GPU

The plain loop is what scripts of this kind do: an item at a time, four rows padded to the longest, logits of all tokens.
Two models have the same weights: Hugging Face's, which `python hellaswag.py` scores, and the one of train_gpt2.py, scored
in training. For each precision, plain and fast scoring of the same model take turns, and the median is printed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parents[1]))

import hellaswag  # noqa: E402
from support import devices, huggingface  # noqa: E402
from support.cli import run  # noqa: E402
from train_gpt2 import GPT, GPTConfig  # noqa: E402


@torch.no_grad()
def plain(logits_of: Callable[[torch.Tensor], torch.Tensor], examples: list, device: torch.device) -> np.ndarray:
    """Summed losses (items, 4) and mean ones, together (2, items, 4)."""
    found = []
    for example in examples:
        rows = [example.context + completion for completion in example.completions]
        tokens = torch.zeros(4, max(map(len, rows)), dtype=torch.int64)
        scored = torch.zeros(tokens.shape)
        for i, row in enumerate(rows):
            tokens[i, : len(row)] = torch.tensor(row)
            scored[i, len(example.context) : len(row)] = 1
        tokens, scored = tokens.to(device), scored.to(device)
        logits = logits_of(tokens)[:, :-1].float()
        losses = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none").view(4, -1)
        losses = losses * scored[:, 1:]
        found.append(torch.stack((losses.sum(1), losses.sum(1) / scored[:, 1:].sum(1))).tolist())
    return np.array(found).swapaxes(0, 1)


def timed(score: Callable[[], np.ndarray]) -> tuple[np.ndarray, float]:
    started = time.perf_counter()
    found = np.asarray(score())
    return found, time.perf_counter() - started


def differing(a: np.ndarray, b: np.ndarray) -> str:
    acc, acc_norm = (np.count_nonzero(x.argmin(1) != y.argmin(1)) for x, y in zip(a, b, strict=True))
    return f"{acc} (acc), {acc_norm} (acc_norm)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("-m", "--model", help="hub name or checkpoint directory (default: random weights, 124M)")
    parser.add_argument("--data", metavar="FILE", help="a HellaSwag .jsonl file (default: downloaded once)")
    parser.add_argument("--limit", type=int, default=200, metavar="N", help="the first N items (default: 200)")
    parser.add_argument("-d", "--device", default="auto", help="device (default: the best one there is)")
    parser.add_argument("--dtypes", nargs="+", default=["fp32", "bf16"], metavar="TYPE", help="(default: fp32 bf16)")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="of each, in turn (default: 3)")
    args = parser.parse_args()

    device = torch.device(devices.pick_device_type(args.device))
    torch.manual_seed(1337)
    with tempfile.TemporaryDirectory() as folder:
        if args.model is None:
            GPT(GPTConfig()).save_pretrained(folder)
        directory = huggingface.find(args.model or folder)
        hub_model, tokenizer = hellaswag.load_model(directory, device)
        own_model = GPT.from_pretrained(directory).to(device).eval()
    own = hellaswag.Model(own_model.hidden, own_model.logits, own_model.config.block_size, device)
    models = {
        "hellaswag.py": (lambda ids: hub_model(ids).logits, hellaswag.from_huggingface(hub_model)),
        "in training": (lambda ids: own_model(ids)[0], own),
    }
    started = time.perf_counter()
    examples = [hellaswag.render(item, tokenizer) for item in hellaswag.load(args.data or hellaswag.download(), args.limit)]  # fmt: skip
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    print(
        f"{name}, torch {torch.__version__}; {len(examples)} items, tokens made in {time.perf_counter() - started:.2f} s"
    )

    reference = None
    for dtype in args.dtypes:
        kind = devices.DTYPES[dtype]
        with devices.autocast(device, kind):
            for which, (logits_of, model) in models.items():
                hellaswag.completion_losses(model, examples[:8]), plain(logits_of, examples[:8], device)  # warm up
                rates = []
                for _ in range(args.rounds):
                    one, slow = timed(lambda f=logits_of: plain(f, examples, device))
                    many, fast = timed(lambda m=model: hellaswag.completion_losses(m, examples))
                    rates.append((len(examples) / slow, len(examples) / fast, slow / fast))
                slow, fast, ratio = (statistics.median(values) for values in zip(*rates, strict=True))
                print(f"{dtype} | {which:12} | plain {slow:8.2f} items/s | fast {fast:8.2f} items/s | {ratio:6.2f}x")
                print(f"       predictions that differ: {differing(one, many)}; losses by {abs(one - many).max():.1e}")
                reference = one if reference is None else reference
                if kind != torch.float32:
                    print(f"       from {args.dtypes[0]}: plain {differing(one, reference)}, fast {differing(many, reference)}")  # fmt: skip


if __name__ == "__main__":
    run(main)
