"""What a terminal can do and a file cannot: colours, lines cut to the width, a status line below all others."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
import threading
import time
from typing import Any, TextIO

from support.startup import is_terminal

WIDTH = 80  # of the header and of notes, on a terminal and in a file
REDRAW_SECONDS = 0.2
BOLD, GREEN, YELLOW, CYAN = "1", "32", "33", "36"
_ERASE = "\r\x1b[K"  # to the beginning of the line, and clear it


def styled(text: str, style: str) -> str:
    """The text in bold or in a colour on a terminal, unless NO_COLOR is set (no-color.org)."""
    return f"\x1b[{style}m{text}\x1b[0m" if is_terminal() and not os.environ.get("NO_COLOR") else text


def pluralize(n: int, noun: str) -> str:
    """`1 process`, `8 processes`."""
    plural = "" if n == 1 else "es" if noun.endswith("s") else "s"
    return f"{n:,} {noun}{plural}"


def labelled(label: str, text: str) -> str:
    """A label and its text, in lines of at most WIDTH columns; longer words are not broken."""
    indent = " " * 8
    words = textwrap.TextWrapper(
        WIDTH, initial_indent=f"{label:8}", subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
    return words.fill(text)


def cut(text: str, columns: int) -> str:
    """The text, or if it is longer than `columns`, its beginning and "..."."""
    return text if len(text) <= columns else text[: columns - 3] + "..."


def on_one_line(text: str) -> str:
    """A generated text: line breaks become spaces, and so do control characters, which would act on the terminal."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def fit_lines(text: str, lines: int) -> str:
    """The text, on a terminal in at most `lines` lines, indented as those of `labelled`."""
    if not is_terminal():
        return text
    columns = shutil.get_terminal_size().columns
    return "\n".join(textwrap.wrap(text, columns, max_lines=lines, placeholder="...", subsequent_indent=" " * 8))


def fit_fields(line: str) -> str:
    """Fields separated by " | ", on a terminal without the last ones if it is too narrow."""
    while is_terminal() and len(line) > shutil.get_terminal_size().columns and " | " in line:
        line = line.rpartition(" | ")[0]
    return line


class StatusLine:
    """The last line of a terminal, redrawn in place; what is printed meanwhile goes above it.

    Between `open` and `close`, stdout and stderr (if that is a terminal, too) erase it before they write, and draw it
    again after a complete line. The cursor stays at its beginning: what libraries write past these streams, or the
    shell after a kill, overwrites it. If it is not `enabled`, nothing happens.
    """

    def __init__(self, enabled: bool):
        self.enabled = enabled
        self._text = self._activity = ""
        self._drawn_at, self._drawn, self._in_line = 0.0, False, False
        self._lock = threading.RLock()  # the thread that saves checkpoints prints, too
        self._streams: tuple[TextIO, TextIO] | None = None

    def open(self) -> None:
        if self.enabled:
            self._streams = sys.stdout, sys.stderr
            sys.stdout = _StreamAbove(sys.stdout, self)
            if sys.stderr.isatty():
                sys.stderr = _StreamAbove(sys.stderr, self)

    def close(self) -> None:
        if self._streams:
            with self._lock:
                self._erase()
                sys.stdout, sys.stderr = self._streams
                self._streams = None

    def show(self, text: str) -> None:
        """Replaces the text."""
        self._text = text
        self._draw_if_due()

    def show_activity(self, text: str) -> None:
        """Shows the first field of the text and what is going on now; "" ends that."""
        self._activity = text
        self._draw_if_due()

    def write_above(self, stream: TextIO, text: str) -> None:
        with self._lock:
            self._erase()
            stream.write(text)
            stream.flush()
            self._in_line = not text.endswith("\n")
            self._draw()

    def _draw_if_due(self) -> None:
        with self._lock:
            if time.monotonic() - self._drawn_at >= REDRAW_SECONDS:
                self._draw()

    def _draw(self) -> None:
        text = f"{self._text.partition(' | ')[0]} | {self._activity}" if self._activity else self._text
        if self._streams and text and not self._in_line:
            stdout = self._streams[0]
            stdout.write(f"\r{cut(text, shutil.get_terminal_size().columns - 1)}\x1b[K\r")
            stdout.flush()
            self._drawn_at, self._drawn = time.monotonic(), True

    def _erase(self) -> None:
        if self._streams and self._drawn:
            self._streams[0].write(_ERASE)
            self._streams[0].flush()
            self._drawn = False


class _StreamAbove:
    """stdout or stderr, above a status line."""

    def __init__(self, stream: TextIO, status_line: StatusLine):
        self._stream, self.status_line = stream, status_line

    def write(self, text: str) -> int:
        if text:
            self.status_line.write_above(self._stream, text)
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
