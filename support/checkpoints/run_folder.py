"""The folder of a run: who may write into it, and what a new run may replace."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TextIO

from support import files
from support.checkpoints.directory import find_corruption, list_checkpoints, remove_leftovers, step_of
from support.cli import UserError
from support.runtime.options import OverwritePolicy

RUN_FILES = ("run.json", "metrics.jsonl", "curves.png", "log.txt")


def check_folder(out: str, resume_from: Path | None, overwrite_policy: OverwritePolicy) -> None:
    """Checks that a run may write into its folder: it is writable, not in use, and loses nothing. Writes nothing.

    Args:
        resume_from: the checkpoint that the run resumes from; None for a new run.

    Raises:
        UserError: it may not.
    """
    existing = files.nearest_existing(Path(out))
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise UserError(f"cannot write to {out}. Use another --out.")
    if (Path(out) / files.LOCK).is_file():
        files.lock_folder(Path(out), "--out").close()
    _check_contents(Path(out), resume_from, overwrite_policy)


def claim_folder(out: str, resume_from: Path | None, overwrite_policy: OverwritePolicy) -> TextIO:
    """Creates the folder and locks it, until the returned file is closed or the process ends.

    If a new run replaces an earlier one, that one's checkpoints are removed and its RUN_FILES are renamed, for example to
    `log.earlier.txt`. Files that a killed process left half-written are removed, too. The arguments are those of
    `check_folder`.

    Raises:
        UserError: as in `check_folder`; another run may have been faster.
    """
    folder = Path(out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = files.lock_folder(folder, "--out")
        _check_contents(folder, resume_from, overwrite_policy)
        files.write_lock_holder(lock)
        remove_leftovers(folder)
        if resume_from is None:
            for path in (folder / name for name in RUN_FILES):
                with contextlib.suppress(FileNotFoundError):
                    os.replace(path, path.with_name(f"{path.stem}.earlier{path.suffix}"))
            if replaced := list_checkpoints(folder):
                print(f"replacing the earlier run in {out}")
            for directory in replaced:
                files.remove(directory)
    except OSError as error:
        raise UserError(f"cannot write to {out} ({error.strerror}). Use another --out.") from error
    return lock


def _check_contents(out: Path, resume_from: Path | None, overwrite_policy: OverwritePolicy) -> None:
    log, checkpoints = out / "log.txt", list_checkpoints(out)
    if resume_from is not None:
        newer = [path for path in checkpoints if step_of(path) > step_of(resume_from)]
        if any(find_corruption(path) is None for path in newer):
            raise UserError(f"another run saved {newer[-1]} while this one was starting. Start it again.")
    elif overwrite_policy == "log" and checkpoints:
        raise UserError(f"another run saved {checkpoints[-1]} while this one was starting. Start it again.")
    elif overwrite_policy == "nothing" and checkpoints:
        raise UserError(f"{out} already contains a run. Continue it with --resume, or use another --out.")
    elif overwrite_policy == "nothing" and log.is_file() and log.stat().st_size > 0:
        raise UserError(
            f"{out} already contains a run without checkpoints. Replace it with --resume auto, or use another --out."
        )
