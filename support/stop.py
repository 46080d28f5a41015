"""Ending a run from outside: a signal is kept until the loop has a whole state to save."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

PATIENCE = 30  # seconds that torchrun gives its processes to end before it kills them
_FAILURE, _NOTHING = 1, 99  # told, where it is no signal: less than any signal we take, and more


class Stopped(Exception):
    """The run ends early, on all ranks; the process exits with `exit_code`."""

    def __init__(self, exit_code: int = 0):
        super().__init__(exit_code)
        self.exit_code = exit_code


class Stop:
    """Whether the run is to end early. One rank is told, by a signal or a failure, and then all must agree on a place.

    Within `with`, SIGTERM and SIGINT are noted and end nothing by themselves, but a second SIGINT ends the process at
    once. Elsewhere they act as always.
    """

    def __init__(self, alone: bool = True):
        self.alone = alone  # with no other rank to agree with
        self._start()

    def _start(self) -> None:
        self.agreed = False
        self.told: int | None = None  # the signal that came to this rank
        self.failure: Exception | None = None

    def __enter__(self) -> Stop:
        self._start()
        self._before = {}
        if threading.current_thread() is threading.main_thread():  # Python takes signals in no other
            self._before = {number: signal.signal(number, self._note) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *_: Any) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

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
        """Ends all ranks alike, with 130, 143, or 2 after a failure. `least` is the minimum over ranks, and waits for them.

        Raises:
            Stopped: with the exit code. The rank that failed raises its error instead.
        """
        reason = least(self.told or _NOTHING)
        if self.failure:
            raise self.failure
        raise Stopped(2 if reason == _FAILURE else 128 + reason)

    def _note(self, number: int, frame: Any) -> None:
        if self.told == number == signal.SIGINT:
            os._exit(128 + number)
        self.told = self.told or number
        # not print, which may be in the middle of a line of its own
        os.write(2, f"\n{signal.Signals(number).name}: stopping; the state is saved first\n".encode())
