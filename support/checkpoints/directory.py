"""Checkpoint directories on disk: written atomically, verified by checksum, listed by step.

A run's folder has a directory `model_{step:05d}/` for each checkpoint. The `checkpoint.json` in each is written last, and
lists the size and SHA-256 of every other file except the model card.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support import files
from support.cli import UserError, describe_error, warn
from support.data.tokenizer import MALFORMED

CONTENTS = "checkpoint.json"
MODEL_CARD = "README.md"  # not in CONTENTS, since its owner may edit it, to add a license
_NAME = re.compile(r"model_(\d{5,})")


def step_of(directory: Path) -> int:
    """Returns the step in the name of a checkpoint directory; -1 for any other name."""
    match = _NAME.fullmatch(directory.name)
    return int(match[1]) if match else -1


def list_checkpoints(out: str | os.PathLike[str]) -> list[Path]:
    """Returns the checkpoint directories in `out`, lowest step first."""
    out = Path(out)
    found = [path for path in out.iterdir() if step_of(path) >= 0 and path.is_dir()] if out.is_dir() else []
    return sorted(found, key=step_of)


def write_checkpoint(directory: Path, write_files: Callable[[Path], None], **facts: float | bool | str) -> None:
    """Writes a checkpoint: `write_files(folder)` fills a temporary folder, which then becomes `directory`.

    An earlier checkpoint of that name is replaced once the new one is on the disk. If the write fails, nothing changes.

    Args:
        facts: more values for `checkpoint.json`: `before_cooldown`; `temporary`, if the next checkpoint replaces it (only the
            clock asked for it); if the validation loss is known, `val`, and the key
            `comparable` of what it was measured on (see `RunInfo.comparable`).
    """
    files.check_lock(directory.parent)
    with files.atomic_write(directory) as tmp:  # not into a new folder: a disk that was unmounted must not go unnoticed
        tmp.mkdir()
        write_files(tmp)
        written = [path for path in sorted(tmp.rglob("*")) if path.is_file()]
        listed = {
            path.relative_to(tmp).as_posix(): _size_and_sha256(path) for path in written if path != tmp / MODEL_CARD
        }
        (tmp / CONTENTS).write_text(json.dumps({"files": listed} | facts, indent=2) + "\n", encoding="utf-8")
        for path in written:
            path.chmod((tmp / CONTENTS).stat().st_mode)  # safetensors creates files that only their owner can read


def read_facts(directory: Path) -> dict[str, Any]:
    """Returns what `checkpoint.json` says of a checkpoint (see `write_checkpoint`); {} if it is missing or malformed."""
    try:
        return dict(json.loads((directory / CONTENTS).read_text(encoding="utf-8")))
    except MALFORMED:
        return {}


def read_validation_loss(directory: Path, comparable: str) -> float | None:
    """Returns the validation loss in `checkpoint.json`; None without one that has this key (see `RunInfo.comparable`)."""
    facts = read_facts(directory)
    loss = facts.get("val")
    return loss if isinstance(loss, float) and facts.get("comparable") == comparable else None


def newest_before_cooldown(out: str | os.PathLike[str]) -> Path | None:
    """Returns the newest checkpoint before a cooldown, from which a longer run can start."""
    return next((path for path in reversed(list_checkpoints(out)) if read_facts(path).get("before_cooldown")), None)


def remove_leftovers(out: str | os.PathLike[str]) -> None:
    """Removes what a killed process left half-written or half-removed in a run's folder."""
    for kind in ("partial", "removed"):
        for path in Path(out).glob(f".model_*.{kind}"):
            files.remove(path)


def find_corruption(directory: Path) -> str | None:
    """Describes the first missing or altered file of a checkpoint; None if it is intact.

    Raises:
        OSError: a file cannot be read, which does not prove that it is corrupt.
    """
    try:
        listed = json.loads((directory / CONTENTS).read_text(encoding="utf-8"))["files"]
        for name, expected in listed.items():
            if not (directory / name).is_file():
                return f"{name} is missing"
            if _size_and_sha256(directory / name) != expected:
                return f"{name} was altered (wrong checksum)"
    except FileNotFoundError:
        return f"{CONTENTS} is missing"
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return f"{CONTENTS} is malformed"
    return None


def newest_checkpoint(out: str | os.PathLike[str]) -> Path | None:
    """Returns the intact checkpoint with the highest step in `out`. Warns about each unusable one that it skips.

    Returns None if there are no checkpoints.

    Raises:
        UserError: there are checkpoints, but none is usable.
    """
    checkpoints = list_checkpoints(out)
    for directory in reversed(checkpoints):
        try:
            problem = find_corruption(directory)
        except OSError as error:
            problem = f"it is not readable ({describe_error(error)})"
        if problem is None:
            return directory
        if os.environ.get("RANK", "0") == "0":
            warn(f"cannot use {directory}: {problem}. Skipping it.")
    if checkpoints:
        raise UserError(f"no checkpoint in {out} is usable. Restore one, or start a new run with another --out.")
    return None


def _size_and_sha256(path: Path) -> dict[str, int | str]:
    return {"bytes": path.stat().st_size, "sha256": files.sha256_of(path)}
