"""What `--text` makes of one text, as bytes: from random weights, against nanoGPT's small recipe, and fine-tuned.

    python benchmarks/bench_text.py tinyshakespeare.txt

The small recipe: 4 layers, 4 heads, 128 channels, context 64, 12 rows a step, 2,000 steps of AdamW. `--text` uses its own
defaults. Then the model of `--demo`, which was trained on Python's documentation, is fine-tuned for 200 steps of 1,024
tokens, completely and by LoRA, and a model of its size is trained on the text alone for as long. All hold out the last
tenth of the text, are validated on all of that, and are timed from start to end.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
SMALL = (
    "--recipe gpt2 --n-layer 4 --n-head 4 --n-embd 128 --block-size 64 --batch-size 12 --total-batch-size 768 "
    "--max-steps 2000 --warmup-steps 100 --max-lr 1e-3 --beta2 0.99"
)
SHORT = "--batch-size 16 --total-batch-size 1024 --max-steps 200"


def train(out: Path, *flags: object) -> None:
    command = [sys.executable, ROOT / "train_gpt2.py", "--out", out, *flags]
    if subprocess.run(list(map(str, command)), stdout=subprocess.DEVNULL).returncode:
        sys.exit("a run failed, see above")


def print_row(name: str, text: str, flags: str) -> None:
    """Trains on the text with these flags, and prints steps, seconds and the last validation loss."""
    with tempfile.TemporaryDirectory() as out:
        started = time.perf_counter()
        train(Path(out), "--text", text, "--tokenizer", "bytes", *flags.split())
        seconds = time.perf_counter() - started
        values = [line.split() for line in (Path(out) / "log.txt").read_text().splitlines()]
    step, _, loss = [value for value in values if value[1] == "val"][-1]
    print(f"| {name} | {step} | {seconds:.0f} | {loss} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", metavar="FILE")
    text = parser.parse_args().text
    print("| | steps | seconds | validation loss |\n|---|---|---|---|")
    print_row("small recipe", text, f"{SMALL} --val-every 2000 --sample-every 0 --checkpoint-every 0")
    print_row("--text", text, "")
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder) / "log"
        train(base, "--demo", "--data", Path(folder) / "data")
        [weights] = base.glob("model_*")
        print_row("short: random weights", text, f"{SHORT} --n-layer 3 --n-head 4 --n-embd 128 --block-size 64")
        print_row("short: --init-from the demo's", text, f"{SHORT} --init-from {weights}")
        print_row("short: --init-from the demo's --lora-rank 8", text, f"{SHORT} --init-from {weights} --lora-rank 8")


if __name__ == "__main__":
    main()
