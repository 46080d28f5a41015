"""Ends a run in which ranks wait for another one that does not arrive, and names that one."""

from __future__ import annotations

import contextlib
import json
import math
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType

import torch

from support.runtime.distributed import COLLECTIVE_TIMEOUT, Distributed

# A step may take so many seconds, plus so many times the longest step before it.
STEP_SECONDS, STEP_FACTOR = 60.0, 10.0
LONGEST_LIMIT = COLLECTIVE_TIMEOUT.total_seconds() / 2
OTHER_SECONDS = 60.0  # between two questions whether all ranks are alive, in everything that is not a step
ANSWER_SECONDS = 30.0  # that a rank has to answer
POLL_SECONDS, TICK_SECONDS = 1.0, 0.25
STORE_SECONDS = 30.0  # that the store may take to answer
EXIT_SECONDS = 3.0  # between the error and the end: the end of rank 0 may be that of the store, which others still read
LOOK = (
    "Look there for a process that is stopped or waits for a disk, and for a broken GPU or network (dmesg). Then rerun with "
    "--resume."
)
ROOT = Path(__file__).resolve().parents[2]


class Watchdog:
    """Watches what this rank does together with the others. With one process, it does nothing.

    When a rank has been busy with one task for long, a thread asks all ranks, through torchrun's store, what they are
    doing, and their threads answer. A rank that does not answer is stopped, dead or cut off: the run ends, with exit
    code 2 and an error that names it. It also ends if all ranks have been in the same step for too long. What NCCL's
    flight recorder has is then written to `nccl_trace_rank_*` in `out`, for `torchfrtrace`. If a rank is alive but busy
    with something else, as rank 0 with a checkpoint, the others wait, at most until the collectives' own timeout.

    Time is counted in ticks of a thread, so that in which the process is stopped does not count.
    """

    def __init__(self, dist: Distributed, out: str):
        self.dist, self.out = dist, Path(out)
        self._task, self._seconds = "the start", 0.0  # what this rank does, and for how long
        self._ask_after, self._end_after = math.inf, math.inf
        self._longest_step: float | None = None
        self._silence = 0.0  # seconds since the store has answered
        self._answered = 0  # number of the last question that this rank has answered
        self._main_thread = threading.current_thread()
        if dist.store is not None:
            # a connection of its own: the main thread may be waiting on the other
            self._store = dist.store.clone()  # type: ignore[attr-defined]
            self._store.set(f"host/{dist.rank}", socket.gethostname())
            for target in (self._count, self._listen):
                threading.Thread(target=target, name="watchdog", daemon=True).start()

    def start(self, task: str, ask_after: float | None = None, end_after: float = math.inf) -> None:
        """Says what this rank does from now on, and after how many seconds the others are asked, or the run ends."""
        self._task, self._seconds = task, 0.0
        self._ask_after, self._end_after = OTHER_SECONDS if ask_after is None else ask_after, end_after

    @contextlib.contextmanager
    def step(self, step: int) -> Iterator[None]:
        """A training step. The first step of a process may compile, so it may take any time."""
        if self._longest_step is None:
            self.start(f"step {step}")
        else:
            limit = min(STEP_SECONDS + STEP_FACTOR * self._longest_step, LONGEST_LIMIT)
            self.start(f"step {step}", limit, limit)
        yield
        self._longest_step = max(self._longest_step or 0.0, self._seconds)
        self.start(f"what follows step {step}")

    def __enter__(self) -> Watchdog:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.start("the end", math.inf)

    # The threads

    def _count(self) -> None:
        while True:
            time.sleep(TICK_SECONDS)
            self._seconds += TICK_SECONDS
            self._silence += TICK_SECONDS
            if self._seconds > self._ask_after and self._silence > STORE_SECONDS:
                self._end(
                    f"{self._task} takes {self._seconds:.0f} s, and the node of rank 0 does not answer. Look there."
                )

    def _listen(self) -> None:
        attempts = 0
        while True:
            time.sleep(POLL_SECONDS)
            try:
                self._answer()
                if self._seconds > min(self._ask_after, self._end_after):
                    attempts += 1
                    asker, rank = self._store.compare_set("asker", "", str(self.dist.rank)), self.dist.rank
                    if (
                        asker == str(rank).encode() or attempts * POLL_SECONDS > 3 * ANSWER_SECONDS
                    ):  # one rank is enough
                        self._ask()
                        self._store.set("asker", "")
                        attempts = 0
            except RuntimeError:  # the connection is lost, which _count notices
                continue

    def _answer(self) -> None:
        """Answers the newest question, if there is one, and ends the process if the run has ended."""
        self._silence = 0.0
        if self._store.check(["end"]):
            self._write_flight_record()
            os._exit(2)
        question = self._store.add("questions", 0)
        if question > self._answered:
            self._answered = question
            self._store.set(
                f"answer/{question}/{self.dist.rank}", json.dumps([self._task, current_line(self._main_thread)])
            )

    def _ask(self) -> None:
        """Asks all ranks what they are doing, and ends the run if one does not answer, or if it is too late."""
        question, task = self._store.add("questions", 1), self._task
        keys = {rank: f"answer/{question}/{rank}" for rank in range(self.dist.world_size)}
        waited = 0.0
        while waited < ANSWER_SECONDS:
            self._answer()
            if self._task != task:  # it goes on
                return
            missing = [rank for rank, key in keys.items() if not self._store.check([key])]
            if not missing:
                break
            time.sleep(POLL_SECONDS)
            waited += POLL_SECONDS
        if missing:
            self._end(
                f"{self._name(missing)} did not arrive in {task} within {self._seconds:.0f} s and gives no sign of life. {LOOK}"
            )
        elif self._seconds > self._end_after:
            answers = {rank: json.loads(self._store.get(key)) for rank, key in keys.items()}
            if error := self._find_late_ranks(task, answers):
                self._end(error)
        self._ask_after = self._seconds + OTHER_SECONDS

    def _find_late_ranks(self, task: str, answers: Mapping[int, tuple[str, str]]) -> str | None:
        """The error if ranks are late without a reason; None if one is still busy with something before this step."""
        elsewhere = [rank for rank, (its_task, _) in answers.items() if its_task != task]
        if elsewhere and task.startswith("step"):
            return None
        lines: dict[str, list[int]] = {}
        for rank, (_, line) in answers.items():
            lines.setdefault(line, []).append(rank)
        (line, late), *others = sorted(lines.items(), key=lambda ranks: len(ranks[1]))
        if not others:
            return (
                f"{task} has not ended in {self._seconds:.0f} s, though all ranks arrived at {line}. Check the network between "
                "the nodes (NCCL_DEBUG=INFO shows what NCCL uses, NCCL_SOCKET_IFNAME chooses it). Then rerun with --resume."
            )
        most = others[-1][0]
        return f"{self._name(late)} did not arrive in {task} within {self._seconds:.0f} s: at {line}, others at {most}. {LOOK}"

    def _name(self, ranks: Sequence[int]) -> str:
        hosts = {
            rank: self._store.get(f"host/{rank}").decode() if self._store.check([f"host/{rank}"]) else "unknown node"
            for rank in ranks[:8]
        }
        more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
        return ", ".join(f"rank {rank} ({host})" for rank, host in hosts.items()) + more

    def _end(self, error: str) -> None:
        """Ends the run although the main thread is inside a collective, which nothing else ends."""
        threading.Timer(EXIT_SECONDS, os._exit, (2,)).start()  # whatever blocks below
        with contextlib.suppress(OSError, ValueError):
            print(f"error: {error}", file=sys.stderr, flush=True)
        with contextlib.suppress(RuntimeError):
            self._store.set("end", "")
        self._write_flight_record()
        time.sleep(2 * EXIT_SECONDS)

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
