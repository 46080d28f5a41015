"""Output for a terminal rather than a file: colours, lines cut to the width, and a status line below all others."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sized
from typing import ClassVar, TypeVar

from tqdm import tqdm

from support.startup import is_terminal

T = TypeVar("T")

WIDTH = 80  # columns of the header and of notes, on a terminal and in a file
REDRAW_SECONDS = 0.2
BOLD, GREEN, YELLOW, CYAN = "1", "32", "33", "36"


def styled(text: str, style: str) -> str:
    """Returns the text in bold or in a colour on a terminal, unless NO_COLOR is set (no-color.org)."""
    return f"\x1b[{style}m{text}\x1b[0m" if is_terminal() and not os.environ.get("NO_COLOR") else text


def pluralize(n: int, noun: str) -> str:
    """Formats a count: `1 process`, `8 processes`."""
    plural = "" if n == 1 else "es" if noun.endswith("s") else "s"
    return f"{n:,} {noun}{plural}"


def labelled(label: str, text: str) -> str:
    """Formats a label and its text, in lines of at most WIDTH columns; longer words are not broken."""
    first, others = f"{label:8}", " " * 8
    return textwrap.fill(
        text, WIDTH, initial_indent=first, subsequent_indent=others, break_long_words=False, break_on_hyphens=False
    )


def on_one_line(text: str) -> str:
    """Replaces line breaks and control characters, which would act on the terminal, with spaces."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def fit_lines(text: str, lines: int) -> str:
    """On a terminal, wraps the text into at most `lines` lines, indented as in `labelled`."""
    if not is_terminal():
        return text
    columns = shutil.get_terminal_size().columns
    return "\n".join(textwrap.wrap(text, columns, max_lines=lines, placeholder="...", subsequent_indent=" " * 8))


def fit_fields(line: str) -> str:
    """On a terminal, drops the last fields, separated by " | ", until the line fits."""
    while is_terminal() and len(line) > shutil.get_terminal_size().columns and " | " in line:
        line = line.rpartition(" | ")[0]
    return line


class StatusLine:
    """The last line of a terminal, drawn by tqdm until it is closed; `print_lines` prints above it."""

    current: ClassVar[StatusLine | None] = None  # the one that is open, if any

    def __init__(self, enabled: bool):
        self.enabled, self._text = enabled, ""
        # There is no total, so {bar} is blank, and as wide as the terminal. The cursor goes back to the beginning: what
        # libraries print, or the shell after a kill, overwrites the line.
        self._bar = tqdm(
            file=sys.stdout, disable=not enabled, bar_format="{desc}{bar}\r", dynamic_ncols=True, leave=False, position=0,
            miniters=1, mininterval=REDRAW_SECONDS,
        )  # fmt: skip
        StatusLine.current = self

    def close(self) -> None:
        StatusLine.current = None
        self._bar.close()

    def show(self, text: str) -> None:
        """Replaces the text."""
        self._text = text
        self._draw(text)

    def counting(self, items: Iterable[T], name: str) -> Iterator[T]:
        """Yields the items; meanwhile the line shows the text's first field and a count, such as `validation 3/20`."""
        total = f"/{len(items):,}" if isinstance(items, Sized) else ""
        for n, item in enumerate(items):
            self._draw(f"{self._text.partition(' | ')[0]} | {name} {n:,}{total}")
            yield item
        self._draw(self._text)

    def _draw(self, text: str) -> None:
        self._bar.set_description_str(text, refresh=False)
        self._bar.update()  # draws if REDRAW_SECONDS have passed
