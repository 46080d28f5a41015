"""The file that a user names for results: checked before the work, written as a whole after it."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from support.cli import UserError


def check(path: Path, flag: str, beginning: str) -> None:
    """Refuses what could not be written in the end, and a file that holds something else. Changes nothing.

    Args:
        flag: that named the file, for the messages.
        beginning: how files of this kind begin; an empty one is as good.

    Raises:
        UserError: it is refused.
    """
    try:
        loop = os.path.islink(os.path.realpath(path))
        if path.is_dir() or loop or (path.exists() and not os.access(path, os.W_OK)):
            raise UserError(f"cannot write {path}. Name another file with {flag}.")
        if path.is_file() and path.stat().st_size:
            with open(path, encoding="utf-8", errors="replace") as file:
                if file.read(len(beginning)) != beginning:
                    raise UserError(f"{path} is there and holds something else. Name another file with {flag}.")
        if path.is_file() or not path.exists():
            with _beside(path) as beside:
                beside.touch()
    except OSError as error:
        raise UserError(f"cannot write {path} ({error.strerror}). Name another file with {flag}.") from error


def write(path: Path, text: str) -> None:
    """Writes a file that appears at once. A link stays one, a pipe or a device is written to.

    Raises:
        UserError: it cannot be written; an earlier file stays as it was.
    """
    try:
        if path.exists() and not path.is_file():
            path.write_text(text, encoding="utf-8")
            return
        with _beside(path) as beside:
            with open(beside, "x", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            if path.exists():
                shutil.copymode(path, beside)
            os.replace(beside, os.path.realpath(path))
    except OSError as error:
        raise UserError(f"cannot write {path} ({error.strerror}). Free the disk or name another file.") from error


@contextlib.contextmanager
def _beside(path: Path) -> Iterator[Path]:
    """A name in the folder of the file, or of what it links to, that nobody else has; it is gone in the end."""
    beside = Path(os.path.realpath(path)).with_name(f".{secrets.token_hex(8)}.partial")
    try:
        yield beside
    finally:
        beside.unlink(missing_ok=True)
