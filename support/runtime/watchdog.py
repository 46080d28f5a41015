"""Ends a run in which ranks wait for another one that is stopped, dead or cut off, and names that one."""

from __future__ import annotations

import contextlib
import json
import math
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import FrameType, TracebackType

import torch

from support.cli import UserError
from support.runtime.distributed import Distributed

WAIT_SECONDS = 60.0  # that anything may take before this rank looks for lost ones
SILENCE_SECONDS = 30.0  # without a sign of life, after that: a rank is lost; in a step, the store, too
LONG_SILENCE_SECONDS = 300.0  # the store outside a step
FIRST_SIGN_SECONDS = 1800.0  # without a first sign of life: a rank that may be downloading a model
# A step is reported if it takes longer than STEP_SECONDS plus STEP_FACTOR times the longest step before it.
STEP_SECONDS, STEP_FACTOR, LONGEST_LIMIT = 60.0, 10.0, 1800.0
ALIVE_SECONDS, CONNECT_SECONDS = 20, 50  # in which ranks connect: after them, lost ones are looked for, the run ends
BEAT_SECONDS = 2.0  # between two signs of life
EXIT_SECONDS = 3.0  # between the error and the end: the end of rank 0 may be that of the store, which others still read
ROOT = Path(__file__).resolve().parents[2]
LOOK = "Look there for a stopped process, a broken GPU, or a lost network (dmesg). Then rerun with --resume."


class Watchdog:
    """Watches what this rank does together with the others. With one process, it does nothing.

    A thread of each rank writes a sign of life to torchrun's store every other second, with what the rank is doing. When
    a rank has been busy with one thing for long, it looks for those of the others. If one gives none for another while,
    the run ends, with exit code 2 and an error that names it. What NCCL's flight recorder has is then written to
    `nccl_trace_rank_*` in `out`, for `torchfrtrace`.

    As long as all are alive, they wait for each other (at most until the collectives' own timeout): rank 0 may be
    writing a checkpoint. If a step takes long, a warning says where they are. Another thread counts the time, in beats,
    so that in which this process is stopped does not count.
    """

    def __init__(self, dist: Distributed, out: str):
        self.dist, self.out = dist, Path(out)
        self.start("the preparation")
        self._first_step = True
        self._longest_step: float | None = None
        self._store_answered = threading.Event()
        self._main_thread, self._closed = threading.current_thread(), threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        if dist.store is not None:
            self._connect()
            self._store.set(self._key(dist.rank), self._sign_of_life(0))  # before anything can stop this rank
            self._thread.start()

    def start(self, task: str, limit: float | None = None, timeout: float = math.inf) -> None:
        """Says what this rank does from now on.

        Args:
            limit: seconds after which it looks for lost ranks.
            timeout: seconds after which the run ends if some are alive, but at another line than most.
        """
        self._task, self._seconds, self._in_step, self._warned = task, 0.0, False, False
        self._limit, self._timeout = WAIT_SECONDS if limit is None else limit, timeout
        self._warn_after = math.inf

    @contextlib.contextmanager
    def step(self, step: int) -> Iterator[None]:
        """A training step. The first one of a process may compile, so it is no measure of the next."""
        longest = self._longest_step
        limit = LONGEST_LIMIT if longest is None else min(STEP_SECONDS + STEP_FACTOR * longest, LONGEST_LIMIT)
        self.start(f"step {step}")
        self._in_step, self._warn_after = True, limit + SILENCE_SECONDS  # by then it has looked for lost ranks
        yield
        if not self._first_step:
            self._longest_step = max(longest or 0.0, self._seconds)
        self._first_step = False
        self.start(f"what follows step {step}")

    @contextlib.contextmanager
    def connecting(self) -> Iterator[None]:
        """The first meeting of all ranks, which takes seconds."""
        self.start("the connection of all ranks", ALIVE_SECONDS, CONNECT_SECONDS)
        try:
            yield
        except UserError:
            self.close()
            raise
        self.start("preparing the model")

    def close(self, left: bool = True) -> None:
        """Stops watching. A rank that has `left` is not missed by the others."""
        self._left = left
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join(timeout=5)

    def __enter__(self) -> Watchdog:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.close(left=kind is None or issubclass(kind, SystemExit))

    # The threads

    def _connect(self) -> None:
        """A connection of its own: the main thread may be waiting on the other."""
        self._store = self.dist.store.clone()  # type: ignore[union-attr]
        self._store.set_timeout(timedelta(seconds=SILENCE_SECONDS))

    def _watch(self) -> None:
        beat, seen = 0, dict[int, tuple[bytes, float]]()
        threading.Thread(target=self._count_time, name="watchdog's clock", daemon=True).start()
        while not self._closed.wait(BEAT_SECONDS):
            beat += 1
            try:
                self._store.set(self._key(self.dist.rank), self._sign_of_life(beat))
                if self._store.check(["end"]):
                    os._exit(2)  # another rank has found somebody lost, and says so
                self._store_answered.set()
                if self._seconds > self._limit:
                    self._look_for_lost_ranks(seen)
                else:
                    seen.clear()
            except Exception:  # whatever it is: a thread that ended would look like a lost rank
                with contextlib.suppress(RuntimeError):
                    self._connect()
        if self._left:
            with contextlib.suppress(RuntimeError):
                self._store.set(self._key(self.dist.rank), "left")

    def _count_time(self) -> None:
        """Ends this process, too, if what it does takes long while the store does not answer the other thread."""
        silence = 0.0
        while not self._closed.wait(BEAT_SECONDS):
            self._seconds += BEAT_SECONDS
            silence = 0.0 if self._store_answered.is_set() else silence + BEAT_SECONDS
            self._store_answered.clear()
            patience = SILENCE_SECONDS + 2 * BEAT_SECONDS if self._in_step else LONG_SILENCE_SECONDS
            if self._seconds > self._limit and silence > patience:
                self._end(f"{self._task} does not end, and the node of rank 0 does not answer. {LOOK}", tell=False)

    def _sign_of_life(self, beat: int) -> str:
        return json.dumps([beat, socket.gethostname(), self._task, current_line(self._main_thread)])

    @staticmethod
    def _key(rank: int) -> str:
        return f"alive/{rank}"

    def _look_for_lost_ranks(self, seen: dict[int, tuple[bytes, float]]) -> None:
        """Compares the signs of life with those in `seen`, and since when each is there."""
        waited, task = self._seconds, self._task
        keys = [self._key(rank) for rank in range(self.dist.world_size)]
        if self._store.check(keys):
            values = self._store.multi_get(keys)
        else:  # some have not even started
            values = [self._store.get(key) if self._store.check([key]) else b"" for key in keys]
        for rank, value in enumerate(values):
            if rank not in seen or seen[rank][0] != value:
                seen[rank] = (value, waited)
        others = {rank: value for rank, (value, _) in seen.items() if value != b"left"}
        silence = {rank: waited - seen[rank][1] for rank in others}
        lost = [rank for rank in others if silence[rank] >= (SILENCE_SECONDS if others[rank] else FIRST_SIGN_SECONDS)]
        if self._task != task:  # it has ended meanwhile
            return
        if lost:
            self._end(f"{_name(lost, others)} did not arrive in {task} and gives no sign of life. {LOOK}")
        if waited > min(self._warn_after, self._timeout):
            late, where = _find_late(others)
            if late and waited > self._timeout:
                self._end(f"{_name(late, others)} did not arrive in {task} within {waited:.0f} s. {where}. {LOOK}")
            if waited > self._warn_after and not self._warned:
                self._warned = True
                text = f"warning: {task} takes longer than {waited:.0f} s. {where}. All ranks are alive: waiting."
                if self._is_first(f"warned/{task}"):
                    print(text, file=sys.stderr, flush=True)

    def _end(self, error: str, tell: bool = True) -> None:
        """Ends the run although the main thread is inside a collective, which nothing else ends."""
        threading.Timer(EXIT_SECONDS, os._exit, (2,)).start()  # whatever blocks below
        if tell and not self._is_first("end"):
            os._exit(2)
        with contextlib.suppress(OSError, ValueError):
            print(f"error: {error}", file=sys.stderr, flush=True)
        self._write_flight_record()
        time.sleep(2 * EXIT_SECONDS)

    def _is_first(self, key: str) -> bool:
        """Whether this rank is the first to ask for this key."""
        own = str(self.dist.rank)
        return self._store.compare_set(key, "", own) == own.encode()

    def _write_flight_record(self) -> None:
        """What NCCL has done last: the function is PyTorch's, but not documented."""
        dump = getattr(torch._C._distributed_c10d, "_dump_fr_trace", None)
        if dump is not None and self.dist.device.type == "cuda":
            with contextlib.suppress(OSError, RuntimeError):
                (self.out / f"nccl_trace_rank_{self.dist.rank}").write_bytes(dump())


def _find_late(signs: dict[int, bytes]) -> tuple[list[int], str]:
    """The ranks at another line than most, if any, and a sentence on where the ranks are."""
    lines: dict[str, list[int]] = {}
    for rank, sign in signs.items():
        lines.setdefault(json.loads(sign)[3] if sign else "an unknown line", []).append(rank)
    (line, late), *others = sorted(lines.items(), key=lambda ranks: len(ranks[1]))
    if not others:
        return [], f"All ranks are at {line}"
    return late, f"{_name(late, signs)} at {line}, most others at {others[-1][0]}"


def _name(ranks: list[int], signs: dict[int, bytes]) -> str:
    hosts = {rank: json.loads(signs[rank])[1] if signs[rank] else "unknown node" for rank in ranks[:8]}
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return ", ".join(f"rank {rank} ({host})" for rank, host in hosts.items()) + more


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
