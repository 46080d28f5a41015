"""Training on several ranks, measured: time, memory per rank and bytes sent, next to what --plan computes.

    python benchmarks/bench_parallel.py                     # 1, 2 and 4 ranks of this machine's CPU, DDP and FSDP

Each row is a run of train_gpt2.py on random tokens in processes of its own. Memory is the largest private memory
of a rank; bytes sent are those that went over the loopback device after the first step, divided among ranks and steps.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from fineweb import make_shards  # noqa: E402
from support.data.corpus import Documents  # noqa: E402
from support.data.tokenizer import VOCAB_SIZES  # noqa: E402
from support.runtime.memory import Sizes, training_memory  # noqa: E402
from support.runtime.plan import bytes_sent  # noqa: E402
from train_gpt2 import TrainConfig, new_model  # noqa: E402

LAYOUTS = [(1, "ddp"), (2, "ddp"), (2, "fsdp"), (4, "ddp"), (4, "fsdp")]


def private_bytes(pid: int) -> int:
    """The private memory of a process now; 0 if it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    found = re.search(r"RssAnon:\s+(\d+)", status)
    return 1024 * int(found[1]) if found else 0


def ranks_below(pid: int) -> list[int]:
    """The processes of ranks: of torchrun's children, or the process itself."""
    children = Path(f"/proc/{pid}/task/{pid}/children")
    try:
        found = [int(child) for child in children.read_text().split()]
        return [c for c in found if "train_gpt2.py" in Path(f"/proc/{c}/cmdline").read_text()] or [pid]
    except OSError:
        return [pid]


def loopback_bytes() -> int:
    lines = Path("/proc/net/dev").read_text().splitlines()
    return next(int(line.split()[9]) for line in lines if line.strip().startswith("lo:"))


def run(world_size: int, flags: list[str], cwd: Path) -> tuple[list[float], int, int]:
    """Seconds of each step, the largest private memory of a rank, and the bytes sent after the first step."""
    launcher = (
        ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={world_size}"] if world_size > 1 else []
    )
    command = [sys.executable, *launcher, str(ROOT / "train_gpt2.py"), *flags]
    peak, after_first_step, output = 0, None, cwd / "output.txt"
    with open(output, "w") as file:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(command, cwd=cwd, env=environment, stdout=file, stderr=subprocess.STDOUT)
        while process.poll() is None:
            peak = max(peak, *map(private_bytes, ranks_below(process.pid)))
            if after_first_step is None and "| dt: " in output.read_text():
                after_first_step = loopback_bytes()
            time.sleep(0.02)
    sent, text = loopback_bytes() - (after_first_step or 0), output.read_text()
    if process.returncode:
        raise SystemExit(text)
    return [float(ms) / 1000 for ms in re.findall(r"\| dt: ([\d.]+)ms", text)], peak, sent


def make_data(folder: Path, tokenizer: str, tokens: int) -> None:
    """Random letters, at least `tokens` tokens."""
    letters = np.random.default_rng(0).integers(97, 123, 10 * tokens, dtype=np.uint8)
    documents = Documents("random letters", lambda: [letters.tobytes().decode()])
    make_shards(documents, folder, tokenizer=tokenizer, split_documents=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--ranks", type=int, nargs="+", default=[1, 2, 4], metavar="N", help="numbers of ranks (default: 1 2 4)")
    add("--sizes", default="6x8x512x256", metavar="LxHxCxT", help="layers, heads, channels, context")
    add("--batch-size", type=int, default=4, metavar="N", help="rows of a micro-batch (default: 4)")
    add("--micro-steps", type=int, default=2, metavar="N", help="of each rank in a step (default: 2)")
    add("--steps", type=int, default=3, metavar="N", help="that are measured, after a first one (default: 3)")
    add("--dtype", default="fp32", choices=("fp32", "bf16"))
    add("--tokenizer", default="gpt2", choices=("gpt2", "bytes"), help="which gives the vocabulary")
    args = parser.parse_args()
    L, H, C, T = map(int, args.sizes.split("x"))
    config = TrainConfig(n_layer=L, n_head=H, n_embd=C, block_size=T, dtype=args.dtype)
    with torch.device("meta"):
        sizes = Sizes.of(new_model(config, VOCAB_SIZES[args.tokenizer]))
    B, micro_steps = args.batch_size, args.micro_steps
    print(f"{sizes.parameters:,} parameters, {B} x {T} tokens x {micro_steps} micro-steps on each rank, {args.dtype}\n")
    titles = ["ranks", "", "s per step", "GB per rank", "planned", "", "MB sent per rank and step", "planned"]
    print("| " + " | ".join(titles) + " |\n|" + "---|" * len(titles))
    with tempfile.TemporaryDirectory() as folder:
        cwd = Path(folder)
        make_data(cwd / "data", args.tokenizer, 2 * max(args.ranks) * B * T * micro_steps)
        layouts = [layout for layout in LAYOUTS if layout[0] in args.ranks]
        for number, ((ranks, parallel), recompute) in enumerate(itertools.product(layouts, (False, True))):
            flags = (
                f"--data data --n-layer {L} --n-head {H} --n-embd {C} --block-size {T} --batch-size {B} "
                f"--out log{number} --total-batch-size {ranks * B * T * micro_steps} --max-steps {1 + args.steps} "
                "--warmup-steps 1 --val-every 0 --sample-every 0 --hellaswag-every 0 --checkpoint-every 0 --device cpu "
                f"--dtype {args.dtype} --parallel {parallel}"
            ).split() + ["--recompute"] * recompute
            seconds, peak, sent = run(ranks, flags, cwd)
            step = ranks * B * T * micro_steps
            layout = replace(config, parallel=parallel, recompute=recompute, total_batch_size=step)
            planned = training_memory(layout, sizes, B, ranks, device_memory=None).total
            sent_planned = bytes_sent(
                layout, sizes.parameters, ranks, micro_steps, reshard_after_forward=False, itemsize=4
            )
            cells = [
                ranks, ("" if ranks == 1 else parallel) + (" --recompute" if recompute else ""),
                f"{statistics.median(seconds[1:]):.3g}", f"{peak / 1e9:.2f}", f"{planned / 1e9:.2f}",
                f"{planned / peak - 1:+.0%}", f"{sent / args.steps / ranks / 1e6:,.1f}", f"{sent_planned / 1e6:,.1f}",
            ]  # fmt: skip
            print("| " + " | ".join(map(str, cells)) + " |", flush=True)


if __name__ == "__main__":
    main()
