"""Ending a run early: what asks for it from outside is kept until the loop has a whole state to save; bad updates are counted."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

from support.cli import UserError

PATIENCE = 30  # seconds that torchrun gives its processes to end before it kills them
SIGNALS = [getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGHUP") if hasattr(signal, name)]
READER_GONE = (errno.EPIPE, errno.EIO)  # of a pipe, of a terminal
_FAILURE, _PIPE, _NOTHING = -1, 13, 99  # told, where it is none of them; the least of all ranks counts


class Stopped(Exception):
    """The run ends early, on all ranks; the process exits with `exit_code`."""

    def __init__(self, exit_code: int = 0):
        super().__init__(exit_code)
        self.exit_code = exit_code


class Stop:
    """Whether the run is to end early. One rank is told, by a signal or a failure, and then all must agree on a place.

    Within `with`, SIGTERM, SIGINT and SIGHUP are noted and end nothing by themselves, but a second SIGINT ends the
    process at once. It is the same when whoever reads our output is gone. Elsewhere all this acts as always.
    """

    def __init__(self, alone: bool = True):
        self.alone = alone  # with no other rank to agree with
        self._start()

    def _start(self) -> None:
        self.agreed = False
        self.told: int | None = None  # the signal that came to this rank
        self.failure: Exception | None = None
        self._interrupted: float | None = None

    def __enter__(self) -> Stop:
        self._start()
        self._streams, self._handlers = (sys.stdout, sys.stderr), {}
        sys.stdout, sys.stderr = (stream and _Watched(stream, self._lost) for stream in self._streams)
        if threading.current_thread() is threading.main_thread():  # Python takes signals in no other
            taken = [n for n in SIGNALS if n == signal.SIGINT or signal.getsignal(n) != signal.SIG_IGN]  # nohup stays
            self._handlers = {number: signal.signal(number, self._note) for number in taken}
        return self

    def __exit__(self, *_: Any) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler or signal.SIG_DFL)  # None: not from Python
        for stream in filter(None, (sys.stdout, sys.stderr)):
            try:
                stream._stream.flush()
            except OSError:
                stream.discard()
        sys.stdout, sys.stderr = self._streams

    def fail(self, error: Exception) -> None:
        """Asks for the end because of an error that only this rank has met. May be called in another thread."""
        self.failure, self.told = error, _FAILURE

    def check(self) -> None:
        """Raises Stopped if the run is to end and every rank knows it."""
        if self.agreed or (self.alone and self.told):
            raise Stopped

    def until(self, items: Iterable) -> Iterator:
        """The items, for as long as this rank is not told to stop."""
        for item in items:
            if self.told:
                return
            yield item

    def conclude(self, least: Callable[[int], int]) -> NoReturn:
        """Ends all ranks alike: 128 and the signal, or 2 after a failure. `least` is the minimum over ranks, and waits.

        Raises:
            Stopped: with the exit code. The rank that failed raises its error instead.
        """
        reason = least(self.told or _NOTHING)
        if self.failure:
            raise self.failure
        raise Stopped(2 if reason == _FAILURE else 128 + reason)

    def _note(self, number: int, frame: Any) -> None:
        if number == signal.SIGINT:
            now = time.monotonic()
            # who signals torchrun and its processes at once signals these twice, for torchrun passes it on
            if self._interrupted and (now - self._interrupted > 1 or "TORCHELASTIC_RUN_ID" not in os.environ):
                os._exit(128 + number)
            self._interrupted = self._interrupted or now
        self.told = self.told or number
        again = " (once more: at once)" if number == signal.SIGINT else ""
        with contextlib.suppress(OSError):  # not print, which may be in the middle of a line of its own
            os.write(2, f"\n{signal.Signals(number).name}: stopping{again}\n".encode())

    def _lost(self) -> None:
        self.told = self.told or _PIPE


def count_bad_steps(run: Any, step: int, loss: float, norm: float) -> None:
    """Keeps count of the updates in a row that were skipped, the last one that of `step`; of overflows apart.

    Raises:
        UserError: they are too many.
    """
    if math.isfinite(loss) and math.isfinite(norm):
        run.bad_steps = 0
        return
    # An overflow in fp16 mends itself, for it halves the scale; at 1 it is none. Without a scaler, the scale reads 1.
    if math.isfinite(loss) and run.scaler.get_scale() > 1:
        run.bad_steps, run.overflows = 0, run.overflows + 1
        scale = f"gradients are scaled by {run.scaler.get_scale():g} from now on"
        run.dist.print0(f"step {step:5d} | overflow {run.overflows:,} of fp16: no update; {scale}")
        return
    run.bad_steps += 1
    run.dist.print0(f"step {step:5d} | skipped: the loss or the gradient is not finite")
    if run.bad_steps >= run.config.max_bad_steps:
        raise UserError(
            f"{run.bad_steps} updates in a row were not finite, the last one at step {step}, and none was applied. "
            "A resumed run would meet them again: check the data with --verify-data, or lower --max-lr in a new run."
        )


class _Watched:
    """A stream that is printed to. What cannot be written is dropped; if its reader is gone, `lost()` is called."""

    def __init__(self, stream: Any, lost: Callable[[], None]):
        self._stream, self._lost = stream, lost

    def write(self, text: str) -> int:
        return self._try(self._stream.write, text) or len(text)

    def flush(self) -> None:
        self._try(self._stream.flush)

    def _try(self, method: Callable, *args: str) -> Any:
        try:
            return method(*args)
        except OSError as error:
            if error.errno in READER_GONE:
                self._lost()
                self.discard()

    def discard(self) -> None:
        """Sends what is buffered, and all that follows, nowhere; it would be an error again at the end of the process."""
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
