"""Ends a run in which ranks wait for another one that does not arrive, and names that one."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, TracebackType

import torch

from support.runtime.distributed import COLLECTIVE_TIMEOUT, Distributed

# A step may take so many seconds, plus so many times the longest step before it.
STEP_SECONDS, STEP_FACTOR = 60.0, 10.0
# Evaluations, checkpoints, and the first step of a process, which compiles: less than the collectives' own timeout.
LONG_SECONDS = 0.9 * COLLECTIVE_TIMEOUT.total_seconds()
REPORT_SECONDS = 5.0  # that a rank waits for the reports of the others
STORE_SECONDS = 10.0  # that the store may take to answer
EXIT_SECONDS = 2.0  # between the error and the end: the end of rank 0 may be that of the store, which others still read
TICK_SECONDS = 0.25
ROOT = Path(__file__).resolve().parents[2]


class Watchdog:
    """Watches what this rank does together with the others. With one process, it does nothing.

    When a time limit is over, each rank reports in torchrun's store which line it is at. Those that do not are dead,
    stopped or cut off; otherwise, those at another line than most are late. The run ends with exit code 2 and an error
    that names them, and what NCCL's flight recorder has is written to
    `nccl_trace_rank_*` in `out`, for `torchfrtrace`.

    Time is counted in ticks of a thread, so a process that was stopped and continues does not blame the others.
    """

    def __init__(self, dist: Distributed, out: str):
        self.dist, self.out = dist, Path(out)
        self._task, self._ticks_left = "", -1  # -1: no limit
        self._longest_step: float | None = None
        self._main_thread = threading.current_thread()
        if dist.store is not None:
            # a connection of its own: the main thread may be waiting on the other
            self._store = dist.store.clone()  # type: ignore[attr-defined]
            self._store.set(f"host/{dist.rank}", socket.gethostname())
            threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def limit(self, task: str, seconds: float) -> None:
        """From now on, `task` must end in time: in other words, this must be called again."""
        self._task, self._ticks_left = task, round(seconds / TICK_SECONDS)

    def no_limit(self) -> None:
        self._ticks_left = -1

    @contextlib.contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Limits the time of a training step, and then of what follows it."""
        longest = self._longest_step
        self.limit(f"step {step}", LONG_SECONDS if longest is None else STEP_SECONDS + STEP_FACTOR * longest)
        started = time.monotonic()
        yield
        self._longest_step = max(longest or 0.0, time.monotonic() - started)
        self.limit(f"what follows step {step}", LONG_SECONDS)

    def __enter__(self) -> Watchdog:
        self.limit("what precedes the first step", LONG_SECONDS)
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.no_limit()

    def _watch(self) -> None:
        waited = 0.0  # for the current task, about
        task = ""
        while self._ticks_left != 0:
            time.sleep(TICK_SECONDS)
            waited = waited + TICK_SECONDS if task == self._task else 0.0
            task = self._task
            if self._ticks_left > 0:
                self._ticks_left -= 1
        no_answer = f"{task} has not ended in {waited:.0f} s, and the node of rank 0 does not answer. Look there."
        timer = threading.Timer(REPORT_SECONDS + STORE_SECONDS, lambda: _end_process(no_answer))
        timer.start()
        try:
            error = self._find_late_ranks(task, waited)
        except RuntimeError:  # the connection is lost
            error = no_answer
        timer.cancel()
        _end_process(error)

    def _find_late_ranks(self, task: str, seconds: float) -> str | None:
        """The error for this rank to print: only the first of those that can do so does."""
        rank, world_size = self.dist.rank, self.dist.world_size
        self._store.set(f"late/{rank}", current_line(self._main_thread))
        self._write_flight_record()
        time.sleep(REPORT_SECONDS)
        lines = {other: self._line_of(other) for other in range(world_size)}
        if rank != min(other for other, line in lines.items() if line is not None):
            return None
        groups: dict[str | None, list[int]] = {}
        for other, line in lines.items():
            groups.setdefault(line, []).append(other)
        if None in groups:
            late, at = groups[None], ""
        else:
            (at_line, late), *others = sorted(groups.items(), key=lambda group: len(group[1]))
            if not others:
                return (
                    f"{task} has not ended in {seconds:.0f} s, though all ranks arrived at {at_line}. Check the network "
                    "between the nodes (NCCL_DEBUG=INFO shows what NCCL uses, NCCL_SOCKET_IFNAME chooses it). Then rerun "
                    "with --resume."
                )
            at = f": at {at_line}, while {'most are' if len(others[-1][1]) > len(late) else 'another is'} at {others[-1][0]}"
        named = ", ".join(f"rank {other} ({self._host_of(other)})" for other in late[:8])
        more = f" and {len(late) - 8} more" if len(late) > 8 else ""
        return (
            f"{named}{more} did not arrive in {task} within {seconds:.0f} s{at}. Look there for a process that is "
            "stopped or waits for a disk, and for a broken GPU or network (dmesg). Then rerun with --resume."
        )

    def _line_of(self, rank: int) -> str | None:
        return self._store.get(f"late/{rank}").decode() if self._store.check([f"late/{rank}"]) else None

    def _host_of(self, rank: int) -> str:
        return self._store.get(f"host/{rank}").decode() if self._store.check([f"host/{rank}"]) else "unknown node"

    def _write_flight_record(self) -> None:
        """What NCCL has done last: the function is PyTorch's, but not documented."""
        dump = getattr(torch._C._distributed_c10d, "_dump_fr_trace", None)
        if dump is not None and self.dist.device.type == "cuda":
            with contextlib.suppress(OSError, RuntimeError):
                (self.out / f"nccl_trace_rank_{self.dist.rank}").write_bytes(dump())


def current_line(thread: threading.Thread) -> str:
    """The line of this project that a thread is at."""
    frame = sys._current_frames().get(thread.ident or 0)
    lines = [(Path(f.f_code.co_filename), f.f_lineno) for f in _callers(frame)]
    own = [f"{path.relative_to(ROOT)}:{number}" for path, number in lines if path.is_relative_to(ROOT)]
    return own[0] if own else "an unknown line"


def _callers(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _end_process(error: str | None) -> None:
    """Exits although the main thread is inside a collective, which nothing else ends."""
    if error:
        with contextlib.suppress(OSError, ValueError):
            print(f"error: {error}", file=sys.stderr, flush=True)
        time.sleep(EXIT_SECONDS)
    os._exit(2)
