"""The folder of a run: one run creates it, and no other run may replace it."""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from support import files
from support.checkpoints.directory import CONTENTS, find_corruption, list_checkpoints, remove_leftovers, step_of
from support.checkpoints.history import FILE, FINISHED, read_starts
from support.checkpoints.start import Start
from support.checkpoints.state import Checkpoint, OtherVersionError
from support.cli import UserError, describe_error, nearest_existing, words_of
from support.config import TrainConfig
from support.runtime.distributed import Distributed
from support.sizing.presets import make_preset_shards


@contextlib.contextmanager
def locked(config: TrainConfig, start: Start, dist: Distributed) -> Iterator[None]:
    """Creates the folder and keeps other processes out of it until the block ends. Rank 0 does it for all ranks.

    Removes what a killed process left half-written. If no run begins in the block, the lock file is removed, and so is
    the folder if it was created and is empty.

    Raises:
        UserError: on all ranks: the folder is not writable, is in use, or has another run.
    """
    with contextlib.ExitStack() as stack:
        with dist.failing_together():
            if dist.rank == 0:
                _lock(Path(config.out), config, start.resumed, stack)
        yield


def _lock(folder: Path, config: TrainConfig, checkpoint: Checkpoint | None, stack: contextlib.ExitStack) -> None:
    """Does the work of `locked`; `stack` undoes it. `checkpoint`: the one that the run resumes from."""
    if inside := [path for path in (folder.absolute(), *folder.absolute().parents) if (path / CONTENTS).is_file()]:
        raise UserError(f"--out is inside the checkpoint {inside[-1]}. Use another --out.")
    existing = nearest_existing(folder)
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise UserError(f"cannot write to {folder}. Use another --out.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        stack.enter_context(files.lock_folder(folder, "--out"))
        stack.callback(_remove_unused, folder, existing)
        _check_contents(config, checkpoint)
        remove_leftovers(folder)
        last_step = checkpoint.step if checkpoint else 0
        for corrupt in (path for path in list_checkpoints(folder) if step_of(path) > last_step):
            aside = corrupt.with_name(f"{corrupt.name}.corrupt")  # or it would count among this run's checkpoints
            files.remove(aside)
            corrupt.rename(aside)
    except OSError as error:
        reason = describe_error(error, folder)
        raise UserError(f"cannot write to {folder} ({reason}). Use another --out.") from error


def _remove_unused(folder: Path, existing: Path) -> None:
    """Removes the lock, and the folders below `existing`, if no run has begun and they are empty."""
    if has_run(folder) and (read_starts(folder) or list_checkpoints(folder)):  # otherwise, log.txt is another program's
        return
    with contextlib.suppress(OSError):  # a folder that is not empty cannot be removed
        (folder / files.LOCK).unlink()
        for new in itertools.takewhile(lambda path: path != existing, (folder.absolute(), *folder.absolute().parents)):
            new.rmdir()


def make_own_shards(config: TrainConfig, start: Start) -> None:
    """Makes the shards of --text and --demo. One rank calls it for all ranks, as they share the folder.

    Raises:
        UserError: the shards could not be made.
    """
    if not config.is_demo_or_text:
        return
    checkpoint, in_out = start.checkpoint, Path(config.data) == Path(config.out) / "data"
    has_own_shards = start.forked and in_out
    keeps_shards = checkpoint is not None and config.text == checkpoint.config["text"] and not has_own_shards
    may_replace = in_out and not has_run(Path(config.out))
    model = start.first_model(config) if config.fork or config.init_from else None  # which brings its tokenizer
    make_preset_shards(config, keeps_shards, may_replace, model)


def has_run(folder: Path) -> bool:
    """Returns whether a run has begun in a folder: it has checkpoints or a log."""
    log = folder / "log.txt"
    return bool(list_checkpoints(folder)) or log.is_file() and log.stat().st_size > 0


def has_finished(out: str, step: int | None = None) -> bool:
    """Returns whether a folder has a run that has finished, with its last evaluation and save.

    Args:
        step: of the newest checkpoint. If the later ones were removed, there is something to resume.
    """
    starts = read_starts(Path(out))
    ended = starts[-1].get("ended") if starts else None
    return isinstance(ended, dict) and ended.get("end") == FINISHED and step in (None, ended.get("step"))


def _check_contents(config: TrainConfig, checkpoint: Checkpoint | None) -> None:
    folder = Path(config.out)
    checkpoints, starts, log = list_checkpoints(folder), read_starts(folder), folder / "log.txt"
    if _is_output(log):
        raise UserError(f"the output of this command goes to {log}, which the run writes itself. Use another file.")
    if log.is_file() and log.stat().st_size == 0 and (checkpoint is not None or not starts):
        raise UserError(
            f"{log} is empty. If the output of this command goes there, use another file; if not, remove it."
        )
    if checkpoint is not None:
        newer = [path for path in checkpoints if step_of(path) > checkpoint.step]
        if any(find_corruption(path) is None for path in newer):
            raise UserError(f"another run saved {newer[-1]} while this one was starting. Start this one again.")
        if starts and not any(start["run"] == checkpoint.run for start in starts):
            raise UserError(
                f"{checkpoint.path} does not belong to the run in {folder / FILE}. Move it into its own folder, and resume it there."
            )
    elif checkpoints:
        try:
            Checkpoint.open(checkpoints[-1])
        except OtherVersionError:  # it cannot be resumed
            raise
        except UserError:
            pass
        raise UserError(f"{folder} already contains a run. Continue it with --resume, or use another --out.")
    elif has_run(folder):
        if not starts:  # a run writes them first
            raise UserError(f"{log} is not the log of a run of this project: there is no {FILE}. Use another --out.")
        if has_finished(config.out):
            raise UserError(f"{folder} already contains a run, which has finished. Use another --out.")
        # the same command starts over
        if config.resume != "auto" and starts[-1].get("arguments") != words_of(sys.argv[1:]):
            raise UserError(
                f"{folder} has a log without checkpoints. Start that run over with --resume auto, or use another --out."
            )


def _is_output(path: Path) -> bool:
    """Returns whether stdout or stderr of this process is redirected to a file."""
    with contextlib.suppress(OSError):
        return any(os.path.samestat(os.fstat(descriptor), path.stat()) for descriptor in (1, 2))
    return False
