"""Kills a small run at random moments, resumes it each time, and compares it with the run that was never killed.

    python benchmarks/bench_kills.py               # 200 kills
    python benchmarks/bench_kills.py --kills 20

A third of the kills (SIGKILL) come while the process starts, a third between two steps, a third while a checkpoint is
being written. Exits with 1 if log, weights or optimizer differ in a single bit.
"""

from __future__ import annotations

import argparse
import json
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
MOMENTS = ("start", "step", "save")


def wait_for(condition: Callable[[], object], process: subprocess.Popen[str], timeout: float = 60) -> None:
    """Waits until `condition()` holds, the process has ended, or time is over."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline and process.poll() is None and not condition():
        time.sleep(0.0005)


def steps_done(out: Path) -> int:
    log = out / "log.txt"
    return log.read_bytes().count(b" train ") if log.exists() else 0


def log_changed(out: Path) -> int | None:
    """When the log was last written, in nanoseconds."""
    try:
        return (out / "log.txt").stat().st_ctime_ns
    except FileNotFoundError:
        return None


def wait_for_moment(moment: str, out: Path, process: subprocess.Popen[str], rng: random.Random, startup: float) -> None:
    """Returns at a random moment of a process that was just started.

    That is within its first `startup` seconds and before its first step, after some steps, or inside a save.
    """
    before = log_changed(out)  # a resumed run writes the log anew
    wait_for(lambda: log_changed(out) != before, process, rng.uniform(0, startup) if moment == "start" else 60)
    if moment == "step":
        goal = steps_done(out) + rng.randint(1, 15)
        wait_for(lambda: steps_done(out) >= goal, process)
        time.sleep(rng.uniform(0, 0.02))
    elif moment == "save":
        wait_for(lambda: any(out.glob(".model_*.partial")), process)
        time.sleep(rng.uniform(0, 0.01))


def differences(a: Path, b: Path) -> list[str]:
    """What differs between two runs, in any bit of the log or of the last checkpoint."""
    found = [] if (a / "log.txt").read_bytes() == (b / "log.txt").read_bytes() else ["log.txt"]
    last, other = max(a.glob("model_*")), max(b.glob("model_*"))
    if last.name != other.name:
        return [*found, f"{last.name} and {other.name}"]
    listed = set(json.loads((last / "checkpoint.json").read_text())["files"]) - {"trainer.pt"}
    found += [name for name in listed if (last / name).read_bytes() != (other / name).read_bytes()]
    ours, theirs = (torch.load(each / "trainer.pt", weights_only=True) for each in (last, other))
    found += [f"{key} in trainer.pt" for key in ("step", "data", "scaler") if ours[key] != theirs[key]]
    tensors = zip(tree_leaves(ours["optimizer"]), tree_leaves(theirs["optimizer"]), strict=True)
    same = [torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y for x, y in tensors]
    return found + ([] if all(same) else ["optimizer in trainer.pt"])


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare a run that is killed again and again with one that is not.")
    parser.add_argument("--kills", type=int, default=200, metavar="N", help="number of kills (default: 200)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the random moments (default: 0)")
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

    def start(out: str, *more: str) -> subprocess.Popen[str]:
        command = [sys.executable, str(ROOT / "train_gpt2.py"), *flags, "--out", str(folder / out), *more]
        return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)

    def finish(process: subprocess.Popen[str]) -> None:
        _, errors = process.communicate()
        if process.returncode:
            sys.exit(f"a run ended with {process.returncode}:\n{errors}")

    began = time.monotonic()
    straight = start("straight")
    wait_for(lambda: steps_done(folder / "straight") > 0, straight)
    startup = time.monotonic() - began
    finish(straight)
    seconds = time.monotonic() - began
    out, rng, kills, half_written = folder / "killed", random.Random(args.seed), Counter[str](), 0
    while kills.total() < args.kills:
        moment = MOMENTS[kills.total() % len(MOMENTS)]
        process = start("killed", "--resume", "auto")
        wait_for_moment(moment, out, process, rng, startup)
        process.kill()
        _, errors = process.communicate()
        if process.returncode != -9:
            sys.exit(f"\na run ended before it was killed:\n{errors}")
        kills[moment] += 1
        half_written += moment == "save" and any(out.glob(".model_*.partial"))
        print(f"\r{kills.total()} kills, {steps_done(out)} steps logged", end="", flush=True)
    finish(start("killed", "--resume"))
    print(
        f"\n{steps} steps ({seconds:.0f}s without kills), {args.kills} kills: "
        + ", ".join(f"{kills[moment]} in a {moment}" for moment in MOMENTS)
        + f"; {half_written} left half a checkpoint. {time.monotonic() - began:.0f}s in total."
    )
    found = differences(out, folder / "straight")
    if found:
        sys.exit(f"different: {', '.join(found)}. Both runs are in {folder}.")
    shutil.rmtree(folder)
    print("log, weights and optimizer are the same, bit by bit")


if __name__ == "__main__":
    main()
