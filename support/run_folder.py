"""The folder of a run: who may write into it."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TextIO

from support import checkpoint
from support.cli import UserError
from support.lock import LOCK, lock, sign


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
        lock(out, "--out").close()
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
        held = lock(Path(out), "--out")
        _check_contents(Path(out), resume_from, replaces)
        sign(held)
        checkpoint.remove_leftovers(out)
        if resume_from is None:
            with contextlib.suppress(FileNotFoundError):
                os.replace(Path(out) / "log.txt", Path(out) / "log.earlier.txt")
            for directory in checkpoint.by_step(out):
                checkpoint.remove(directory)
    except OSError as error:
        raise UserError(f"cannot write to {out} ({error.strerror}). Name another --out.") from error
    return held


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
