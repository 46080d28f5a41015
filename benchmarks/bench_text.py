"""Measures the time and loss of `--text` on one text, and of `--demo` on its own: from random weights, and fine-tuned.

    python benchmarks/bench_text.py tinyshakespeare.txt
    python benchmarks/bench_text.py tinyshakespeare.txt --seeds 1 2 3 --only recipe bytes bpe demo
    python benchmarks/bench_text.py tinyshakespeare.txt --only --try "--n-layer 4 --n-embd 128 --max-steps 1600"
    python benchmarks/bench_text.py tinyshakespeare.txt --only demo --seeds 1 2 3 4 5 --busy 2 --busy-after 60

`recipe` is nanoGPT's recipe for a small character model on a CPU, with bytes: 4 layers, 4 heads, 128 channels, context
64, 12 rows per step, 2,000 steps of AdamW. `bytes` and `bpe` are `--text` with its own defaults and these tokenizers;
`demo` is `--demo`. `short`, `tuned` and `lora` train for 200 steps of 1,024 tokens: `short` a model of the demo's size
from random weights, `tuned` all weights of the demo's own model, and `lora` the demo's own model with LoRA. `--try`
adds rows: `bytes` with other flags. Each run holds out the last tenth of the text, is validated on all of it, and is
timed from start to end, including the making of shards. `--busy N` runs N other programs, each of which keeps a core
busy from `--busy-after` seconds after the start of a run.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from harness import run_script

from support.checkpoints.directory import newest_checkpoint
from support.checkpoints.history import read_starts
from support.console.log import read_log

RECIPE = (
    "--tokenizer bytes --recipe gpt2 --n-layer 4 --n-head 4 --n-embd 128 --block-size 64 --batch-size 12 "
    "--total-batch-size 768 --max-steps 2000 --warmup-steps 100 --max-lr 1e-3 --beta2 0.99 "
    "--val-every 2000 --sample-every 0 --checkpoint-every 0"
)
SHORT = "--batch-size 16 --total-batch-size 1024 --max-steps 200"
# rows by name: flags besides --text or --demo; {demo} is the checkpoint of the demo
ROWS = {
    "recipe": RECIPE,
    "bytes": "--tokenizer bytes",
    "bpe": "--tokenizer bpe",
    "demo": "",
    "short": f"--tokenizer bpe --n-layer 3 --n-head 4 --n-embd 128 --block-size 64 {SHORT}",
    "tuned": f"--init-from {{demo}} {SHORT}",
    "lora": f"--init-from {{demo}} --lora-rank 8 {SHORT}",
}


def train(args: argparse.Namespace, *flags: object) -> float:
    """Trains, and returns the seconds from start to end."""
    loop = f"import time; time.sleep({args.busy_after})\nwhile True: pass"
    others = [subprocess.Popen([sys.executable, "-c", loop]) for _ in range(args.busy)]
    try:
        return run_script("train_gpt2.py", *flags)[1]
    finally:
        for process in others:
            process.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", metavar="FILE")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1337], metavar="N", help="(default: 1337)")
    parser.add_argument("--only", nargs="*", choices=ROWS, default=list(ROWS), help="rows (default: all)")
    parser.add_argument("--try", nargs="+", default=[], dest="tried", metavar="FLAGS", help="add rows with these flags")
    parser.add_argument("--busy", type=int, default=0, metavar="N", help="other programs beside each run (default: 0)")
    parser.add_argument(
        "--busy-after", type=float, default=0, metavar="S", help="seconds until they start (default: 0)"
    )
    args = parser.parse_args()
    rows = {name: ROWS[name] for name in ROWS if name in args.only}
    rows |= {flags: f"{ROWS['bytes']} {flags}" for flags in args.tried}
    if {"tuned", "lora"} & set(args.only) and "demo" not in args.only:
        parser.error("tuned and lora need demo")
    print("| | seed | steps | seconds | nats per token | nats per byte |\n|---|---|---|---|---|---|")
    for seed in args.seeds:
        with tempfile.TemporaryDirectory() as folder:
            demo = None
            for number, (name, flags) in enumerate(rows.items()):
                out = Path(folder) / str(number)
                source = ["--demo", "--data", out / "data"] if name == "demo" else ["--text", args.text]
                seconds = train(args, "--seed", seed, "--out", out, *source, *flags.format(demo=demo).split())
                step, loss = max(read_log(out / "log.txt")["val"].items())
                per_byte = loss / read_starts(out)[-1]["data"]["bytes_per_token"]
                print(f"| {name} | {seed} | {step:,} | {seconds:.0f} | {loss:.4f} | {per_byte:.4f} |", flush=True)
                demo = newest_checkpoint(out) if name == "demo" else demo


if __name__ == "__main__":
    main()
