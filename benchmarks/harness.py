"""Helpers for the benchmarks, to run scripts in processes of their own, and to find processes by their environment."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]  # a benchmark imports this module before those of the project


def script_command(script: str | Path, *args: object, processes: int = 1) -> list[str]:
    """Returns the command that runs a script of this project, through torchrun if there are several processes."""
    torchrun = f"-m torch.distributed.run --standalone --nproc_per_node={processes}".split()
    return [sys.executable, *(torchrun if processes > 1 else []), str(ROOT / script), *map(str, args)]


def run_script(script: str | Path, *args: object, processes: int = 1, **environment: str) -> tuple[str, float]:
    """Runs a script; returns its output, and the seconds that it took. A failure ends this program."""
    command, started = script_command(script, *args, processes=processes), time.perf_counter()
    done = subprocess.run(command, env=os.environ | environment, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command[1:])} failed with exit code {done.returncode}, see above")
    return done.stdout, time.perf_counter() - started


def find_processes(mark: str) -> dict[int, list[str]]:
    """Returns the environments, by id, of processes that have `mark`, a NAME=value; oldest first. Linux only."""
    found = {}
    for pid in sorted(int(path.name) for path in Path("/proc").glob("[0-9]*")):
        with contextlib.suppress(OSError):
            environment = Path(f"/proc/{pid}/environ").read_text(errors="replace").split("\0")  # a zombie has none
            if mark in environment:
                found[pid] = environment
    return found


def kill_processes(mark: str) -> None:
    """Kills all processes with `mark` in their environment, including those that they start meanwhile."""
    while pids := find_processes(mark):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
