"""Training on several ranks, measured: time, memory per rank and bytes sent, next to what --plan computes.

    python benchmarks/bench_parallel.py                     # 1, 2 and 4 ranks of this machine's CPU, DDP and FSDP

Each row is a run of train_gpt2.py on random tokens in processes of its own. Memory is the largest private memory of a rank; bytes
sent are those that went over the loopback device, less what the same run sends with no step, divided among ranks and steps.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from support.runtime import memory  # noqa: E402
from support.runtime.plan import Sizes, bytes_sent, plan_memory  # noqa: E402

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


def run(world_size: int, flags: list[str], cwd: Path) -> tuple[list[float], list[int], int]:
    """Seconds of each step, the largest private memory of each rank, and all bytes sent."""
    launcher = (
        ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={world_size}"] if world_size > 1 else []
    )
    before, peaks = loopback_bytes(), dict[int, int]()
    with open(cwd / "output.txt", "w") as output:
        command = [sys.executable, *launcher, str(ROOT / "train_gpt2.py"), *flags]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(command, cwd=cwd, env=environment, stdout=output, stderr=subprocess.STDOUT)
        while process.poll() is None:
            for pid in ranks_below(process.pid):
                peaks[pid] = max(peaks.get(pid, 0), private_bytes(pid))
            time.sleep(0.02)
    text = (cwd / "output.txt").read_text()
    if process.returncode:
        raise SystemExit(text)
    seconds = [float(ms) / 1000 for ms in re.findall(r"\| dt: ([\d.]+)ms", text)]
    largest = sorted(peaks.values())[-world_size:]
    return seconds, largest, loopback_bytes() - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="6x8x512x256", metavar="LxHxCxT", help="layers, heads, channels, context")
    parser.add_argument("--batch-size", type=int, default=4, metavar="N", help="rows of a micro-batch (default: 4)")
    parser.add_argument("--micro-steps", type=int, default=2, metavar="N", help="of each rank in a step (default: 2)")
    parser.add_argument("--steps", type=int, default=3, metavar="N", help="default: 3")
    parser.add_argument("--dtype", default="fp32", choices=("fp32", "bf16"))
    parser.add_argument("--vocabulary", default="gpt2", choices=("gpt2", "bytes"))
    args = parser.parse_args()
    L, H, C, T = map(int, args.sizes.split("x"))
    vocab_size = {"gpt2": 50257, "bytes": 257}[args.vocabulary]
    padded = -(-vocab_size // 64) * 64
    parameters = memory.count_parameters(dict(n_layer=L, n_embd=C, block_size=T, vocab_size=padded, bias=True))
    sizes = Sizes(L, H, C, T, padded, parameters)
    print(f"{parameters:,} parameters, {args.batch_size} x {T} tokens x {args.micro_steps} micro-steps, {args.dtype}\n")
    titles = ["ranks", "", "s per step", "GB per rank", "planned", "", "MB sent per rank and step", "planned"]
    print("| " + " | ".join(titles) + " |\n|" + "---|" * len(titles))
    with tempfile.TemporaryDirectory() as folder:
        cwd = Path(folder)
        rng = np.random.default_rng(0)
        needed = 2 * (args.steps + 1) * 4 * args.batch_size * args.micro_steps * (T + 1)
        for split in ("val_000000", "train_000001"):
            np.save(cwd / f"random_{split}", rng.integers(0, vocab_size - 1, needed, dtype=np.uint16))
        if args.vocabulary == "bytes":
            (cwd / "manifest.json").write_text('{"tokenizer": "bytes", "vocab_size": 257, "shards": []}')
        for world_size, parallel in LAYOUTS:
            for recompute in (False, True):
                step_tokens = args.batch_size * T * args.micro_steps * world_size
                flags = (
                    f"--data . --n-layer {L} --n-head {H} --n-embd {C} --block-size {T} --batch-size {args.batch_size} "
                    f"--total-batch-size {step_tokens} --warmup-steps 1 --val-every 0 --sample-every 0 --hellaswag-every 0 "
                    f"--checkpoint-every 0 --device cpu --dtype {args.dtype} --parallel {parallel} --resume auto"
                ).split() + ["--recompute"] * recompute
                _, _, start_bytes = run(world_size, [*flags, "--max-steps", "1"], cwd)
                seconds, peaks, all_bytes = run(world_size, [*flags, "--max-steps", str(1 + args.steps)], cwd)
                planned = plan_memory(
                    sizes, args.batch_size, world_size=world_size, parallel=parallel, recompute=recompute,
                    micro_steps=args.micro_steps, itemsize={"fp32": 4, "bf16": 2}[args.dtype],
                ).total  # fmt: skip
                sent = (all_bytes - start_bytes) / args.steps / world_size
                sent_planned = bytes_sent(sizes, world_size, parallel, args.micro_steps, True, itemsize=4)
                cells = [
                    world_size, ("" if world_size == 1 else parallel) + (" --recompute" if recompute else ""),
                    f"{statistics.median(seconds[1:]):.2f}", f"{max(peaks) / 1e9:.2f}", f"{planned / 1e9:.2f}",
                    f"{planned / max(peaks) - 1:+.0%}", f"{sent / 1e6:,.0f}", f"{sent_planned / 1e6:,.0f}",
                ]  # fmt: skip
                print("| " + " | ".join(map(str, cells)) + " |", flush=True)


if __name__ == "__main__":
    main()
