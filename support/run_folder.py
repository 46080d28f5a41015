"""The folder of a run: who may write into it."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from typing import TextIO

from support import checkpoint
from support.cli import UserError

LOCK = ".lock"  # in the folder; the system lets go of it when the process ends, however it ends


def check(out: str | os.PathLike, new: bool, may_start_anew: bool) -> None:
    """Refuses a folder that cannot be written, that a live run is in, or where a `new` run would remove an earlier one.

    Nothing is written.

    Raises:
        UserError: it is refused.
    """
    out = Path(out)
    there = next(path for path in (out.absolute(), *out.absolute().parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise UserError(f"cannot write to {out}. Name another --out.")
    if (out / LOCK).is_file():
        _lock(out).close()
    _check_free(out, new, may_start_anew)


def claim(out: str | os.PathLike, new: bool, may_start_anew: bool) -> TextIO:
    """Makes the folder and locks it; the lock lasts until the returned file is closed or the process ends.

    Of an earlier run that a `new` one replaces, log and checkpoints are removed, and nothing else. What a killed
    process has left half-written is removed too.

    Raises:
        UserError: it is refused, as in `check`: another run may have been faster.
    """
    try:
        Path(out).mkdir(parents=True, exist_ok=True)
        lock = _lock(Path(out))
        lock.truncate(0)
        lock.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        lock.flush()
        _check_free(Path(out), new, may_start_anew)
        checkpoint.remove_leftovers(out)
        if new:
            (Path(out) / "log.txt").unlink(missing_ok=True)
            for directory in checkpoint.by_step(out):
                checkpoint.remove(directory)
    except OSError as error:
        raise UserError(f"cannot write to {out} ({error.strerror}). Name another --out.") from error
    return lock


def _check_free(out: Path, new: bool, may_start_anew: bool) -> None:
    log = out / "log.txt"
    holds_a_run = (log.is_file() and log.stat().st_size > 0) or bool(checkpoint.by_step(out))
    if new and holds_a_run and not may_start_anew:
        raise UserError(f"{out} already holds a run. Go on with it with --resume, or name another --out.")


def _lock(out: Path) -> TextIO:
    file = open(out / LOCK, "a+", encoding="utf-8")  # noqa: SIM115  open as long as the run
    try:
        _lock_file(file)
    except (BlockingIOError, PermissionError):
        file.seek(0)
        holder = file.read().strip()
        file.close()
        raise UserError(f"{out} is in use by a live run ({holder}). Wait for its end, or name another --out.") from None
    except OSError as error:  # some network file systems have no locks
        print(f"warning: cannot lock {out} ({error.strerror}). Start no second run in it.", file=sys.stderr, flush=True)
    return file


def _lock_file(file: TextIO) -> None:
    if os.name == "nt":
        import msvcrt

        file.seek(1 << 20)  # a byte beyond the text, which others may then still read
        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
    else:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
