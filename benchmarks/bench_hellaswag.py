"""Speed and accuracy of hellaswag.py, compared with a plain loop: items per second, and how much the results differ.

    python benchmarks/bench_hellaswag.py                                     # GPT-2 124M with random weights
    python benchmarks/bench_hellaswag.py --model gpt2 -d cuda --limit 10042  # OpenAI's weights, all items, on a GPU

The plain loop is the usual one: one item at a time, four rows padded to the longest, logits for all tokens. Both score
two models with the same weights: Hugging Face's, as `python hellaswag.py` does, and that of train_gpt2.py, as training
does. For each dtype and model, the plain loop and hellaswag.py take turns; the medians of their speeds are printed.
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
from support.checkpoints import huggingface  # noqa: E402
from support.cli import run_cli  # noqa: E402
from support.data.tokenizer import Tokenizer  # noqa: E402
from support.runtime import devices  # noqa: E402
from train_gpt2 import GPT, GPTConfig  # noqa: E402

Logits = Callable[[torch.Tensor], torch.Tensor]  # token ids (B, T) -> logits (B, T, V)


@torch.no_grad()
def plain_losses(compute_logits: Logits, examples: list[hellaswag.Example], device: torch.device) -> np.ndarray:
    """Summed and mean losses of each ending, (2, items, 4)."""
    losses = []
    for example in examples:
        rows = [example.context + completion for completion in example.completions]
        tokens = torch.zeros(4, max(map(len, rows)), dtype=torch.int64)
        mask = torch.zeros(tokens.shape)  # 1 for the tokens of the ending
        for i, row in enumerate(rows):
            tokens[i, : len(row)] = torch.tensor(row)
            mask[i, len(example.context) : len(row)] = 1
        tokens, mask = tokens.to(device), mask.to(device)
        logits = compute_logits(tokens)[:, :-1].float()
        token_losses = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none").view(4, -1)
        sums = (token_losses * mask[:, 1:]).sum(1)
        losses.append(torch.stack((sums, sums / mask[:, 1:].sum(1))).tolist())
    return np.array(losses).swapaxes(0, 1)


def timed(compute: Callable[[], np.ndarray | tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, float]:
    """What `compute` returns, as one array, and the seconds it took."""
    start = time.perf_counter()
    result = np.asarray(compute())
    return result, time.perf_counter() - start


def count_differences(a: np.ndarray, b: np.ndarray) -> str:
    """How many predictions differ between two arrays of losses (2, items, 4)."""
    acc, acc_norm = (np.count_nonzero(x.argmin(1) != y.argmin(1)) for x, y in zip(a, b, strict=True))
    return f"{acc} (acc), {acc_norm} (acc_norm)"


def load_models(
    name: str | None, device: torch.device
) -> tuple[dict[str, tuple[Logits, hellaswag.ScoringModel]], Tokenizer]:
    """Both models, each as the plain loop and as hellaswag.py takes it, and the tokenizer."""
    with tempfile.TemporaryDirectory() as folder:
        if name is None:
            GPT(GPTConfig()).save_pretrained(folder)
        directory = huggingface.find_model(name or folder)
        hf_model, tokenizer = hellaswag.load_model(directory, device)
        gpt = GPT.from_pretrained(directory).to(device).eval()
    scoring_model = hellaswag.ScoringModel(gpt.transformer, gpt.logits, gpt.config.block_size, device)
    models = {
        "hellaswag.py": (lambda ids: hf_model(ids).logits, hellaswag.from_huggingface(hf_model)),
        "in training": (lambda ids: gpt(ids)[0], scoring_model),
    }
    return models, tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("-m", "--model", help="hub name or checkpoint directory (default: random weights, 124M)")
    parser.add_argument("--data", metavar="FILE", help="a HellaSwag .jsonl file (default: downloaded once)")
    parser.add_argument("--limit", type=int, default=200, metavar="N", help="only the first N items (default: 200)")
    parser.add_argument("-d", "--device", default="auto", help="device (default: the best available)")
    parser.add_argument("--dtypes", nargs="+", default=["fp32", "bf16"], metavar="TYPE", help="(default: fp32 bf16)")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="measurements of each (default: 3)")
    args = parser.parse_args()

    device = torch.device(devices.pick_device_type(args.device))
    torch.manual_seed(1337)
    models, tokenizer = load_models(args.model, device)
    start = time.perf_counter()
    items = hellaswag.load(args.data or hellaswag.download(), args.limit)
    examples = [hellaswag.render(item, tokenizer) for item in items]
    seconds = time.perf_counter() - start
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    print(f"{name}, torch {torch.__version__}; {len(examples)} items, loaded and tokenised in {seconds:.2f} s")

    reference = None  # the plain loop's losses in the first dtype
    for dtype_name in args.dtypes:
        dtype = devices.DTYPES[dtype_name]
        for model_name, (compute_logits, scoring_model) in models.items():
            with devices.autocast(device, dtype):
                hellaswag.completion_losses(scoring_model, examples[:8])  # warm up
                plain_losses(compute_logits, examples[:8], device)
                speeds = []
                for _ in range(args.rounds):
                    plain, plain_time = timed(lambda f=compute_logits: plain_losses(f, examples, device))
                    ours, our_time = timed(lambda m=scoring_model: hellaswag.completion_losses(m, examples))
                    speeds.append((len(examples) / plain_time, len(examples) / our_time, plain_time / our_time))
            slow, fast, ratio = (statistics.median(values) for values in zip(*speeds, strict=True))
            print(
                f"{dtype_name} | {model_name:12} | plain {slow:8.2f} items/s | fast {fast:8.2f} items/s | {ratio:6.2f}x"
            )
            largest = np.abs(plain - ours).max()
            print(
                f"       different predictions: {count_differences(plain, ours)}; largest loss difference {largest:.1e}"
            )
            reference = plain if reference is None else reference
            if dtype != torch.float32:
                versus = f"plain {count_differences(plain, reference)}, fast {count_differences(ours, reference)}"
                print(f"       different from {args.dtypes[0]}: {versus}")


if __name__ == "__main__":
    run_cli(main)
