"""Startup code that a script runs before it imports PyTorch, which takes seconds."""

from __future__ import annotations

import os
import signal
import sys
import time

STARTED = time.perf_counter()  # when this process started: the scripts import this module first
# A thread that waits for the others at an OpenMP barrier spins for 300,000 rounds by default. If another program has
# taken their core, that takes milliseconds, hundreds of times per step. After 3,000 rounds, the thread sleeps: a small
# model is almost as fast on a free machine, and many times as fast on a busy one (docs/performance.md). OpenMP libraries
# other than GCC's ignore the setting.
SPIN_COUNT = "3000"


def prepare(importing: str = "") -> None:
    """Prepares the process of a script; call it before other imports. `importing` names a slow import for the terminal.

    Sets how long OpenMP's threads spin, unless the user has set this or the number of threads.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends the imports without a traceback
    by_torchrun = "TORCHELASTIC_RUN_ID" in os.environ  # which sets OMP_NUM_THREADS itself
    by_user = {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} | (set() if by_torchrun else {"OMP_NUM_THREADS"})
    if not os.environ.keys() & by_user:
        os.environ["GOMP_SPINCOUNT"] = SPIN_COUNT  # read when PyTorch is loaded
    if importing:
        show(f"importing {importing} ...")


def show(text: str) -> None:
    """Shows on a terminal what is going on, without a line break; call it with "" to erase that before printing."""
    if os.environ.get("RANK", "0") == "0" and sys.stdout is not None and is_terminal():
        sys.stdout.write(f"\r{text}\x1b[K\r")
        sys.stdout.flush()


def is_terminal() -> bool:
    """Returns whether stdout is a terminal that can redraw a line."""
    plain = os.environ.get("TERM") == "dumb" or (os.name == "nt" and "WT_SESSION" not in os.environ)
    return sys.stdout.isatty() and not plain
