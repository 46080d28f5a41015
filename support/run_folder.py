"""The folder of a run: who may write into it."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from pathlib import Path
from typing import TextIO

from support import checkpoint
from support.cli import UserError

LOCK = ".lock"  # in the folder; the system lets go of it when the process ends, however it ends


def check(out: str | os.PathLike, resume_from: Path | None, replaces: str | None) -> None:
    """Refuses a folder that cannot be written, that a live run is in, or in which this run would remove another one.

    Nothing is written.

    Args:
        resume_from: the checkpoint that the run goes on from; None for a new one.
        replaces: what a new run may remove: None, "log" for a log without checkpoints, or "all".

    Raises:
        UserError: it is refused.
    """
    out = Path(out)
    there = next(path for path in (out.absolute(), *out.absolute().parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise UserError(f"cannot write to {out}. Name another --out.")
    if (out / LOCK).is_file():
        _lock(out).close()
    _check_contents(out, resume_from, replaces)


def claim(out: str | os.PathLike, resume_from: Path | None, replaces: str | None) -> TextIO:
    """Makes the folder and locks it; the lock lasts until the returned file is closed or the process ends.

    Of an earlier run that a new one replaces, the checkpoints are removed and the log is renamed to `log.earlier.txt`.
    What a killed process has left half-written is removed too. The arguments are those of `check`.

    Raises:
        UserError: it is refused, as in `check`: another run may have been faster.
    """
    try:
        Path(out).mkdir(parents=True, exist_ok=True)
        lock = _lock(Path(out))
        _check_contents(Path(out), resume_from, replaces)
        lock.truncate(0)
        lock.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        lock.flush()
        checkpoint.remove_leftovers(out)
        if resume_from is None:
            with contextlib.suppress(FileNotFoundError):
                os.replace(Path(out) / "log.txt", Path(out) / "log.earlier.txt")
            for directory in checkpoint.by_step(out):
                checkpoint.remove(directory)
    except OSError as error:
        raise UserError(f"cannot write to {out} ({error.strerror}). Name another --out.") from error
    return lock


def _check_contents(out: Path, resume_from: Path | None, replaces: str | None) -> None:
    log, checkpoints = out / "log.txt", checkpoint.by_step(out)
    if resume_from is not None:
        newer = [path for path in checkpoints if checkpoint.step_of(path) > checkpoint.step_of(resume_from)]
        if any(checkpoint.damage(path) is None for path in newer):
            raise UserError(f"another run has saved {newer[-1]} while this one was starting. Start it again.")
    elif replaces == "log" and checkpoints:
        raise UserError(f"another run has saved {checkpoints[-1]} while this one was starting. Start it again.")
    elif replaces is None and not checkpoints and log.is_file() and log.stat().st_size > 0:
        raise UserError(
            f"{out} already holds a run that saved no checkpoint. Start anew there with --resume auto, or name another --out."
        )
    elif replaces is None and checkpoints:
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
