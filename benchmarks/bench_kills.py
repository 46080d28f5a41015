"""Kills a small run at random moments, resumes it each time, and compares it with the run that was never killed.

    python benchmarks/bench_kills.py               # 200 kills
    python benchmarks/bench_kills.py --kills 20

A third of the kills (SIGKILL) come while the process starts, a third between two steps, a third while a checkpoint is
being written. Exits with 1 if log, weights or optimizer differ in a single bit.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
from torch.utils._pytree import tree_leaves

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from support import checkpoint  # noqa: E402

KINDS = ("start", "step", "save")


def wait_for(condition: Callable[[], bool], alive: Callable[[], bool] = lambda: True, timeout: float = 60) -> bool:
    """Waits until `condition()` holds, the process has ended, or time is over; returns whether it holds."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline and alive():
        if condition():
            return True
        time.sleep(0.0005)
    return bool(condition())


def steps_done(out: Path) -> int:
    log = out / "log.txt"
    return log.read_bytes().count(b" train ") if log.exists() else 0


def log_changed(out: Path) -> int | None:
    """When the log was last written to, in nanoseconds."""
    log = out / "log.txt"
    return log.stat().st_ctime_ns if log.exists() else None


def wait_for_the_moment(kind: str, out: Path, alive: Callable[[], bool], rng: random.Random, start: float) -> None:
    """Returns at a random moment of a process that was just started.

    That is within its first `start` seconds and before its first step, after some steps, or inside a save.
    """
    before = log_changed(out)  # a resumed run puts a new log in the place of the old
    wait_for(lambda: log_changed(out) != before, alive, rng.uniform(0, start) if kind == "start" else 60)
    if kind == "step":
        goal = steps_done(out) + rng.randint(1, 15)
        wait_for(lambda: steps_done(out) >= goal, alive)
        time.sleep(rng.uniform(0, 0.02))
    elif kind == "save":
        wait_for(lambda: any(out.glob(".model_*.partial")), alive)
        time.sleep(rng.uniform(0, 0.01))


def differences(a: Path, b: Path) -> list[str]:
    """What differs between two runs, in any bit of the log or of the last checkpoint."""
    found = [] if (a / "log.txt").read_bytes() == (b / "log.txt").read_bytes() else ["log.txt"]
    last, other = checkpoint.newest(a), checkpoint.newest(b)
    if last.name != other.name:
        return [*found, f"{last.name} and {other.name}"]
    files = [path.name for path in last.iterdir() if path.name not in ("trainer.pt", checkpoint.CONTENTS)]
    found += [name for name in files if (last / name).read_bytes() != (other / name).read_bytes()]
    ours, theirs = checkpoint.read_state(last), checkpoint.read_state(other)
    found += [f"{key} in trainer.pt" for key in ("step", "data", "scaler") if ours[key] != theirs[key]]
    tensors = zip(tree_leaves(ours["optimizer"]), tree_leaves(theirs["optimizer"]), strict=True)
    same = [torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y for x, y in tensors]
    found += [] if all(same) else ["optimizer in trainer.pt"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare a run that is killed again and again with one that is not.")
    parser.add_argument("--kills", type=int, default=200, metavar="N", help="how often (default: 200)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the moments (default: 0)")
    args = parser.parse_args()

    steps = 60 + 8 * args.kills
    folder = Path(tempfile.mkdtemp(prefix="bench_kills_"))
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, ROOT / "fineweb.py", "--demo", "--output", folder / "data"], check=True)
    flags = (
        f"--data {folder / 'data'} --n-layer 2 --n-head 2 --n-embd 32 --block-size 16 --batch-size 4 --warmup-steps 20 "
        f"--total-batch-size 256 --max-steps {steps} --max-lr 3e-3 --shuffle --val-every 10 --val-tokens 512 "
        "--sample-every 0 --hellaswag-every 0 --checkpoint-every 4 --keep 3 --device cpu --dtype fp32"
    ).split()

    def start(out: str, *more: str) -> subprocess.Popen:
        command = [sys.executable, str(ROOT / "train_gpt2.py"), *flags, "--out", str(folder / out), *more]
        return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)

    def finish(process: subprocess.Popen) -> None:
        _, errors = process.communicate()
        if process.returncode:
            sys.exit(f"a run ended with {process.returncode}:\n{errors}")

    began = time.monotonic()
    straight = start("straight")
    wait_for(lambda: steps_done(folder / "straight") > 0, lambda: straight.poll() is None)
    startup = time.monotonic() - began
    finish(straight)
    seconds = time.monotonic() - began
    out, rng, killed, halves = folder / "killed", random.Random(args.seed), Counter(), 0
    while killed.total() < args.kills:
        kind = KINDS[killed.total() % len(KINDS)]
        process = start("killed", "--resume", "auto")
        wait_for_the_moment(kind, out, lambda p=process: p.poll() is None, rng, startup)
        process.kill()
        if process.wait() != -9:
            sys.exit(f"\na run ended before it was killed:\n{process.stderr.read()}")
        killed[kind] += 1
        halves += kind == "save" and any(out.glob(".model_*.partial"))
        print(f"\r{killed.total()} kills, {steps_done(out)} steps logged", end="", flush=True)
    finish(start("killed", "--resume"))
    print(
        f"\n{steps} steps ({seconds:.0f}s without kills), {args.kills} kills: "
        + ", ".join(f"{killed[kind]} in a {kind}" for kind in KINDS)
        + f"; {halves} left half a checkpoint. {time.monotonic() - began:.0f}s in all."
    )
    found = differences(out, folder / "straight")
    if found:
        sys.exit(f"different: {', '.join(found)}. Both runs are in {folder}.")
    shutil.rmtree(folder)
    print("log, weights and optimizer are the same, bit by bit")


if __name__ == "__main__":
    main()
