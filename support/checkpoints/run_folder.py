"""The folder of a run: who may write into it, and how a run replaces an earlier one.

A run replaces an earlier one when it saves its first checkpoint, not before. Until then `log.replaced.txt` exists: the
checkpoints have their names, but belong to that log, and everything can be put back. Its removal is the commit.
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
from support.checkpoints.directory import find_corruption, list_checkpoints, remove_leftovers, step_of
from support.cli import UserError
from support.runtime.distributed import Distributed
from support.runtime.options import OverwritePolicy, RunOptions
from support.runtime.run_info import ResumedCheckpoint, RunInfo

RUN_FILES = ("run.json", "metrics.jsonl", "curves.png", "wandb_id.txt", "log.txt")  # in the order of setting them aside
REPLACED_LOG = "log.replaced.txt"
_REPLACED = ".model_*.earlier"  # checkpoints that are being renamed


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

    The files of a run that this one is to replace are set aside; they are put back if the context is left with an error
    before the first checkpoint, or by the next process. What a killed process left half-written is removed.

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
            files.write_lock_holder(lock)
            remove_leftovers(folder)
            if checkpoint is None or checkpoint.replaces_later:
                _set_aside(folder, is_new=checkpoint is None)
        except OSError as error:
            raise UserError(f"cannot write to {folder} ({error.strerror}). Use another --out.") from error
        if replaced := list_replaced(folder, run.first_step):
            print(f"replacing {replaced[-1]} when this run has saved a model")
        return _locked(folder, lock)

    return dist.on_rank_zero(lock_and_replace) or nullcontext()


def list_replaced(folder: Path, first_step: int) -> list[Path]:
    """The checkpoints that a run from `first_step` on will replace; none if it does not, or has done so."""
    pending = (folder / REPLACED_LOG).exists()
    return [path for path in list_checkpoints(folder) if pending and step_of(path) > first_step]


def commit_replacement(folder: Path, first_step: int) -> None:
    """Replaces the earlier run, if there is one. The new checkpoint is on the disk, and gets its name next."""
    for path in list_replaced(folder, first_step):
        path.rename(files.tmp_path(path, "earlier"))  # model_*.earlier may be of another run, and must not be put back
    (folder / REPLACED_LOG).unlink(missing_ok=True)


def complete_replacement(folder: Path) -> None:
    """Does what is left after the commit: `model_00005` becomes `model_00005.earlier`, and other files are removed."""
    replaced = list(folder.glob(_REPLACED))
    if replaced:
        for path in folder.glob(".model_*.partial"):  # killed before the new checkpoint had its name
            if find_corruption(path) is None:
                files.replace(path, folder / path.name[1:].removesuffix(".partial"))
    for path in replaced:
        if (folder / path.name[1:]).exists():  # of the run before: that one has finished, or this is no better
            files.remove(path)
        else:
            path.rename(folder / path.name[1:])
    for name in RUN_FILES:
        _renamed(folder / name, "replaced").unlink(missing_ok=True)


def find_replaced_models(folder: Path) -> bool:
    """Whether a killed process left models without their names; they have them again afterwards.

    Raises:
        UserError: the folder is in use.
    """
    if not any(folder.glob(_REPLACED)):
        return False
    with files.lock_folder(folder, "--out"):
        _recover(folder)
    return True


def _recover(folder: Path) -> None:
    """Puts everything back after a run that ended before the commit; completes a replacement after it."""
    if (folder / REPLACED_LOG).exists():
        for path in folder.glob(_REPLACED):
            path.rename(folder / path.name[1:].removesuffix(".earlier"))
        for name in RUN_FILES[:-1]:  # copied, so that after a kill here it can be done again
            _copy(_renamed(folder / name, "replaced"), folder / name)
        os.replace(folder / REPLACED_LOG, folder / "log.txt")
    complete_replacement(folder)


def _set_aside(folder: Path, is_new: bool) -> None:
    """Copies the files of the earlier run, if there is one; a new run begins without any, another continues them."""
    if not is_new or list_checkpoints(folder) or _has_log(folder):
        for name in RUN_FILES:
            _copy(folder / name, _renamed(folder / name, "replaced"))
        (folder / REPLACED_LOG).touch()  # for checkpoints without a log
    if is_new:
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
        if (folder / REPLACED_LOG).exists():  # finished without a checkpoint: the next start puts the earlier run back
            for name in RUN_FILES:
                _copy(folder / name, _renamed(folder / name, "unsaved"))


def _renamed(path: Path, kind: str) -> Path:
    """`log.replaced.txt` for `log.txt`."""
    return path.with_name(f"{path.stem}.{kind}{path.suffix}")


def _copy(source: Path, target: Path) -> None:
    """Copies a file atomically; without a source, there is no target either."""
    if source.exists():
        with files.atomic_write(target) as tmp:
            shutil.copyfile(source, tmp)
    else:
        target.unlink(missing_ok=True)


def _has_log(folder: Path) -> bool:
    log = folder / "log.txt"
    return log.is_file() and log.stat().st_size > 0


def _check_contents(folder: Path, checkpoint: ResumedCheckpoint | None, overwrite_policy: OverwritePolicy) -> None:
    checkpoints = list_checkpoints(folder)
    if checkpoint is not None:
        newer = [path for path in checkpoints if step_of(path) > checkpoint.step and not checkpoint.replaces_later]
        if any(find_corruption(path) is None for path in newer):
            raise UserError(f"another run saved {newer[-1]} while this one was starting. Start it again.")
    elif overwrite_policy == "log" and checkpoints:
        raise UserError(f"another run saved {checkpoints[-1]} while this one was starting. Start it again.")
    elif overwrite_policy == "nothing" and checkpoints:
        raise UserError(f"{folder} already contains a run. Continue it with --resume, or use another --out.")
    elif overwrite_policy == "nothing" and _has_log(folder):
        raise UserError(
            f"{folder} already contains a run without checkpoints. Replace it with --resume auto, or use another --out."
        )
