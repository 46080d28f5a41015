"""One process at a time in a folder."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from typing import TextIO

from support.cli import UserError

LOCK = ".lock"  # in the folder; the system lets go of it when the process ends, however it ends


def lock(folder: Path, flag: str) -> TextIO:
    """Locks a folder until the returned file is closed or the process ends.

    `flag` is the one that names the folder, for the message.

    Raises:
        UserError: another process has it.
    """
    file = open(folder / LOCK, "a+", encoding="utf-8")  # noqa: SIM115  open as long as the lock
    try:
        _lock_file(file)
    except (BlockingIOError, PermissionError):
        file.seek(0)
        holder = file.read().strip()
        file.close()
        raise UserError(
            f"{folder} is in use by a live run ({holder}). Wait for its end, or name another {flag}."
        ) from None
    except OSError as error:  # some network file systems have no locks
        print(f"warning: cannot lock {folder} ({error.strerror}). Start no second run in it.", file=sys.stderr)
    return file


def sign(file: TextIO) -> None:
    """Writes into a lock who holds it."""
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    file.flush()


def _lock_file(file: TextIO) -> None:
    if os.name == "nt":
        import msvcrt

        file.seek(1 << 20)  # a byte beyond the text, which others may then still read
        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
    else:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
