"""The folder of a run: who may write into it, and how a run replaces an earlier one.

A run replaces an earlier one when it saves its first checkpoint, not before. It begins by setting that run aside, in
`replaced_run/`: the checkpoints that it will replace, and copies of the other files. An error puts all of it back, and
after a kill, the next start does. The first checkpoint of the new run is the commit: once it has its name, those of the
earlier one become `model_*.earlier`, and `replaced_run/` is removed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, TextIO

from support import files
from support.checkpoints.directory import REPLACED_RUN, find_corruption, list_checkpoints, remove_leftovers, step_of
from support.cli import UserError
from support.console.terminal import labelled
from support.runtime.distributed import Distributed
from support.runtime.options import OverwritePolicy, RunOptions
from support.runtime.run_info import ResumedCheckpoint, RunInfo

RUN_FILES = ("log.txt", "starts.jsonl", "curves.png", "wandb_id.txt")
_FIRST_STEP = "first_step.txt"  # in it, once all is set aside: the step that the new run starts at


def check_folder(config: RunOptions, checkpoint: ResumedCheckpoint | None) -> None:
    """Checks that a run may write into its folder: it is writable, not in use, and loses nothing. Writes nothing.

    Args:
        checkpoint: the one that the run resumes from; None for a new run.

    Raises:
        UserError: it may not.
    """
    folder = Path(config.out)
    existing = files.nearest_existing(folder)
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise UserError(f"cannot write to {folder}. Use another --out.")
    if (folder / files.LOCK).is_file():
        files.lock_folder(folder, "--out").close()
    _check_contents(folder, checkpoint, config.overwrite_policy)


def lock_and_replace_folder(run: RunInfo, dist: Distributed) -> AbstractContextManager[Any]:
    """Creates the folder and locks it on rank 0, until the returned context is left or the process ends.

    A run that this one is to replace is set aside. It is put back if the context is left with an error before the first
    checkpoint, or by the next process. What a killed process left half-written is removed.

    Raises:
        UserError: on all ranks, as in `check_folder`; another run may have been faster.
    """
    folder, checkpoint = Path(run.config.out), run.resumed_from

    def lock_and_replace() -> AbstractContextManager[Any]:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = files.lock_folder(folder, "--out")
            _recover(folder)
            _check_contents(folder, checkpoint, run.config.overwrite_policy)
            remove_leftovers(folder)
            if checkpoint is None or checkpoint.replaces_later:
                _set_aside(folder, run.first_step)
        except OSError as error:
            raise UserError(f"cannot write to {folder} ({error.strerror}). Use another --out.") from error
        if replaced := list_checkpoints(folder / REPLACED_RUN):
            name = folder / replaced[-1].name
            note = f"replacing {name} when this run has saved a model; until then it is in {replaced[-1].parent}"
            print(labelled("note", note))
        return _locked(folder, lock)

    return dist.on_rank_zero(lock_and_replace) or nullcontext()


def list_earlier(folder: Path) -> list[Path]:
    """The checkpoints that the run in `folder` has replaced; they stay until it has finished."""
    return sorted(path for path in folder.glob("model_*.earlier") if step_of(path.with_suffix("")) >= 0)


def complete_replacement(folder: Path) -> None:
    """Does what is left after the commit: `model_00005` becomes `model_00005.earlier`, and `replaced_run/` is removed."""
    for path in list_checkpoints(folder / REPLACED_RUN):
        earlier = folder / f"{path.name}.earlier"
        if not earlier.exists():  # otherwise, it is of a run before: that one has finished, or this is no better
            path.rename(earlier)
    files.remove(folder / REPLACED_RUN)


def put_back(folder: Path) -> bool:
    """Puts back what a killed process has set aside, so that its checkpoints are found. Returns whether there was any.

    Raises:
        UserError: the folder is in use.
    """
    if not (folder / REPLACED_RUN).exists():
        return False
    with files.lock_folder(folder, "--out"):
        _recover(folder)
    return True


def _recover(folder: Path) -> None:
    """Puts everything back after a run that ended before the commit; completes a replacement after it."""
    replaced = folder / REPLACED_RUN
    if _is_committed(folder):
        complete_replacement(folder)
    elif replaced.exists():
        (replaced / _FIRST_STEP).unlink(missing_ok=True)  # so that after a kill here, it is done again
        for path in list_checkpoints(replaced):
            path.rename(folder / path.name)
        _copy_run_files(replaced, folder)
        files.remove(replaced)


def _is_committed(folder: Path) -> bool:
    """Whether the run that has set an earlier one aside has saved a checkpoint."""
    first_step = folder / REPLACED_RUN / _FIRST_STEP
    return first_step.exists() and any(step_of(path) > int(first_step.read_text()) for path in list_checkpoints(folder))


def _set_aside(folder: Path, first_step: int) -> None:
    """Sets an earlier run aside, if there is one. A new run begins without its files; one that goes back continues them."""
    replaced = folder / REPLACED_RUN
    if list_checkpoints(folder) or _has_log(folder):
        with files.atomic_write(replaced) as tmp:
            tmp.mkdir()
            _copy_run_files(folder, tmp)
            files.tmp_path(tmp / _FIRST_STEP).write_text(str(first_step))
        for path in list_checkpoints(folder):
            if step_of(path) > first_step:
                path.rename(replaced / path.name)
        files.tmp_path(replaced / _FIRST_STEP).rename(replaced / _FIRST_STEP)
    if first_step == 0:
        for name in RUN_FILES:
            (folder / name).unlink(missing_ok=True)


@contextlib.contextmanager
def _locked(folder: Path, lock: TextIO) -> Iterator[None]:
    """The rest of a run."""
    with lock:
        try:
            yield
        except BaseException:
            with contextlib.suppress(OSError):  # the next start tries it again
                _recover(folder)
            raise
        # A run that has finished without a checkpoint replaces a log, too.
        if not list_checkpoints(folder / REPLACED_RUN):
            complete_replacement(folder)


def _copy_run_files(source: Path, target: Path) -> None:
    """Copies the files of a run; those that it does not have are removed from the target."""
    for name in RUN_FILES:
        if (source / name).exists():
            with files.atomic_write(target / name) as tmp:
                shutil.copyfile(source / name, tmp)
        else:
            (target / name).unlink(missing_ok=True)


def _has_log(folder: Path) -> bool:
    log = folder / "log.txt"
    return log.is_file() and log.stat().st_size > 0


def _check_contents(folder: Path, checkpoint: ResumedCheckpoint | None, overwrite_policy: OverwritePolicy) -> None:
    checkpoints = list_checkpoints(folder)
    if checkpoint is not None:
        newer = [path for path in checkpoints if step_of(path) > checkpoint.step and not checkpoint.replaces_later]
        if any(find_corruption(path) is None for path in newer):
            raise UserError(f"another run saved {newer[-1]} while this one was starting. Start it again.")
    elif overwrite_policy != "run" and checkpoints:
        raise UserError(f"{folder} already contains a run. Continue it with --resume, or use another --out.")
    elif overwrite_policy == "nothing" and _has_log(folder):
        raise UserError(
            f"{folder} already contains a run without checkpoints. Replace it with --resume auto, or use another --out."
        )
