"""The folder of a run: who may write into it, and what a new run may replace."""

from __future__ import annotations

import contextlib
import os
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from support import files
from support.checkpoints.directory import find_corruption, list_checkpoints, list_earlier, remove_leftovers, step_of
from support.cli import UserError
from support.runtime.distributed import Distributed
from support.runtime.options import OverwritePolicy, RunOptions
from support.runtime.run_info import RunInfo

RUN_FILES = ("run.json", "metrics.jsonl", "curves.png", "log.txt")


def check_folder(config: RunOptions, resume_from: Path | None) -> None:
    """Checks that a run may write into its folder: it is writable, not in use, and loses nothing. Writes nothing.

    Args:
        resume_from: the checkpoint that the run resumes from; None for a new run.

    Raises:
        UserError: it may not.
    """
    folder = Path(config.out)
    existing = files.nearest_existing(folder)
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise UserError(f"cannot write to {folder}. Use another --out.")
    if (folder / files.LOCK).is_file():
        files.lock_folder(folder, "--out").close()
    _check_contents(folder, resume_from, config.overwrite_policy)


def lock_and_replace_folder(run: RunInfo, dist: Distributed) -> AbstractContextManager[Any]:
    """Creates the folder and locks it on rank 0, until the returned file is closed or the process ends.

    If a new run replaces an earlier one, that one's files are renamed: `model_00005.earlier`, `log.earlier.txt`. Files
    that a killed process left half-written are removed.

    Raises:
        UserError: on all ranks, as in `check_folder`; another run may have been faster.
    """
    folder, resume_from = Path(run.config.out), run.resumed_from.path if run.resumed_from else None

    def lock_and_replace() -> AbstractContextManager[Any]:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = files.lock_folder(folder, "--out")
            _check_contents(folder, resume_from, run.config.overwrite_policy)
            files.write_lock_holder(lock)
            remove_leftovers(folder)
            if resume_from is None:
                _set_aside_earlier_run(folder)
        except OSError as error:
            raise UserError(f"cannot write to {folder} ({error.strerror}). Use another --out.") from error
        return lock

    return dist.on_rank_zero(lock_and_replace) or nullcontext()


def _set_aside_earlier_run(folder: Path) -> None:
    """Renames the files of the run in `folder`; if that has saved nothing, those of the run before it stay instead."""
    checkpoints, before = list_checkpoints(folder), list_earlier(folder)
    for path in (folder / name for name in RUN_FILES):  # before the checkpoints: a kill in between loses no log
        with contextlib.suppress(FileNotFoundError):
            if before and not checkpoints:
                path.unlink()
            else:
                os.replace(path, path.with_name(f"{path.stem}.earlier{path.suffix}"))
    if checkpoints:
        for directory in before:
            files.remove(directory)
        for directory in checkpoints:
            directory.rename(directory.with_name(f"{directory.name}.earlier"))
    if kept := list_earlier(folder):
        print(f"replacing the earlier run: {kept[-1]} is removed when this one has saved its first checkpoint")


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
