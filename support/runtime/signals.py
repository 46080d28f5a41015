"""Stopping early: signals and failures request a stop, and the training loop saves and exits when all ranks know."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from types import FrameType, TracebackType
from typing import NoReturn, TypeVar

from support import cli
from support.cli import UserError
from support.startup import is_terminal

T = TypeVar("T")

LAUNCHER = os.getppid()  # torchrun, if it started us; when it dies, another process becomes our parent
STOP_SIGNALS = [getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGHUP") if hasattr(signal, name)]
_FAILURE, _CLOSED_PIPE, _NO_REASON = -1, 13, 99  # reasons besides signals; the smallest on any rank wins
ONE_PRESS = 2  # seconds; a notebook's stop button sends SIGINT twice, and `timeout` passes on one that it shares


class StopHandler:
    """Tracks whether the run should stop early.

    `requested` says that this rank got a signal or failed, `agreed` that every rank knows: only then may a rank leave
    the loop, or the others would wait for it forever. With one process both are the same.

    Inside the `with` block, SIGTERM, SIGINT and SIGHUP only set `requested`; a second SIGINT, ONE_PRESS seconds after the
    first or later, exits immediately. A closed pipe at stdout or stderr counts as a signal, and so does the death of
    torchrun: otherwise its ranks would keep the folder locked, and a restarted command could not continue.
    """

    def __init__(self, world_size: int = 1):
        self.world_size = world_size
        self.failure: Exception | None = None  # the error for which this rank requested a stop
        self._reason: int | None = None
        self._agreed = False
        self._interrupted: float | None = None  # when the first SIGINT came
        self._handlers: dict[int, Callable[[int, FrameType | None], object] | int | None] = {}

    @property
    def requested(self) -> bool:
        if self._reason is None and "TORCHELASTIC_RUN_ID" in os.environ and os.getppid() != LAUNCHER:
            self._reason = signal.SIGTERM
            cli.print_lines("torchrun has exited: stopping", sys.stderr)
        return self._reason is not None

    @property
    def agreed(self) -> bool:
        return self._agreed or (self.world_size == 1 and self.requested)

    def agree(self, requests: float) -> bool:
        """Returns whether the run stops, given the sum or mean of `requested` over all ranks."""
        self._agreed |= requests > 0
        return self.agreed

    def fail(self, error: Exception) -> None:
        """Requests a stop because of an error that only this rank has. Any thread may call it."""
        self.failure, self._reason = error, _FAILURE

    @contextlib.contextmanager
    def deferring_errors(self) -> Iterator[None]:
        """Turns a UserError into a request to stop, so that the good state is saved before the run ends."""
        try:
            yield
        except UserError as error:
            self.fail(error)

    def interruptible(self, items: Iterable[T]) -> Iterator[T]:
        """Yields the items until a stop is requested on this rank."""
        for item in items:
            if self.requested:
                return
            yield item

    def exit_all_ranks(self, all_gather: Callable[[int], list[int]]) -> NoReturn:
        """Ends all ranks with the same exit code: 2 after a failure, otherwise 128 plus the signal.

        Raises:
            SystemExit: with the exit code. A rank that failed raises its error instead.
        """
        reason = min(all_gather(self._reason or _NO_REASON))
        if self.failure:
            raise self.failure
        sys.exit(2 if reason == _FAILURE else 128 + reason)

    def __enter__(self) -> StopHandler:
        # An ignored SIGHUP stays ignored: nohup relies on it.
        handled = [n for n in STOP_SIGNALS if n == signal.SIGINT or signal.getsignal(n) != signal.SIG_IGN]
        self._handlers = {number: signal.signal(number, self._handle) for number in handled}
        cli.on_reader_closed = self._reader_closed
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler or signal.SIG_DFL)  # None: a handler that Python did not install
        cli.on_reader_closed = None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # torchrun may send a signal twice, and kills processes that do not end.
        by_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
        exits = False
        if number == signal.SIGINT:
            self._interrupted = self._interrupted or time.monotonic()
            exits = time.monotonic() >= self._interrupted + ONE_PRESS and not by_torchrun
        self._reason = self._reason or number
        hint = " (again to exit immediately)" if number == signal.SIGINT and not by_torchrun else ""
        text = "exiting" if exits else f"{signal.Signals(number).name} received: stopping{hint}"
        # On a terminal, the current line contains ^C, and possibly a progress bar.
        start = "\r\x1b[K" if is_terminal() else "\n"
        with contextlib.suppress(OSError):  # not print: this signal may have interrupted one
            os.write(2, f"{start}{text}\n".encode())
        if exits:
            os._exit(128 + number)

    def _reader_closed(self) -> None:
        self._reason = self._reason or _CLOSED_PIPE
