"""Startup code that a script runs before it imports PyTorch, which takes seconds."""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
import time
from typing import NoReturn

STARTED = time.perf_counter()  # when this process started: the scripts import this module first
# A thread that waits for the others at an OpenMP barrier spins for 300,000 rounds by default. If another program has
# taken their core, that takes milliseconds, hundreds of times per step. After 3,000 rounds, the thread sleeps: a small
# model is almost as fast on a free machine, and many times as fast on a busy one (docs/measurements/performance.md). OpenMP libraries
# other than GCC's ignore the setting.
SPIN_COUNT = "3000"
OLDEST_TORCH = (2, 11)


def prepare(imports_torch: bool = False) -> None:
    """Prepares the process of a script; call it before other imports.

    Sets how long OpenMP's threads spin, unless the user has set this or the number of threads. If the requirements are not
    installed, or PyTorch is too old, prints a line and exits.

    Args:
        imports_torch: the script is about to import PyTorch.
    """
    if importlib.util.find_spec("tqdm") is None:  # which all scripts import
        _exit(
            "the packages of requirements.txt are not installed for this Python. Activate their environment, or run pip "
            "install -r requirements.txt."
        )
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends the imports without a traceback
    by_torchrun = "TORCHELASTIC_RUN_ID" in os.environ  # which sets OMP_NUM_THREADS itself
    by_user = {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} | (set() if by_torchrun else {"OMP_NUM_THREADS"})
    if not os.environ.keys() & by_user:
        os.environ["GOMP_SPINCOUNT"] = SPIN_COUNT  # read when PyTorch is loaded
    if imports_torch:
        _check_torch()
        show("importing PyTorch ...")


def _check_torch() -> None:
    from importlib import metadata  # which takes a while, too

    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        return  # the import says so
    if tuple(map(int, version.split(".")[:2])) < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        _exit(f"PyTorch {version} is too old. Install {oldest} or newer, or pip install -r requirements.txt.")


def _exit(problem: str) -> NoReturn:
    print(f"error: {problem}", file=sys.stderr, flush=True)
    raise SystemExit(2)


def show(text: str) -> None:
    """Shows on a terminal what is going on, without a line break; call it with "" to erase that before printing."""
    if os.environ.get("RANK", "0") == "0" and sys.stdout is not None and is_terminal():
        sys.stdout.write(f"\r{text}\x1b[K\r")
        sys.stdout.flush()


def is_terminal() -> bool:
    """Returns whether stdout is a terminal that can redraw a line."""
    plain = os.environ.get("TERM") == "dumb" or (os.name == "nt" and "WT_SESSION" not in os.environ)
    return sys.stdout.isatty() and not plain
