"""Output for a terminal rather than a file: colours, and lines cut to the width."""

from __future__ import annotations

import os
import shutil
import textwrap

from support.startup import is_terminal

WIDTH = 80  # columns of the header and of notes, on a terminal and in a file
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
