"""`run.json`, the record of a run: command, flags, versions, device, data and sizes, for people and for curves.py.

It describes the process that wrote it first. Each process that resumed the run adds what was different to `resumes`.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from support import __version__
from support.cli import warn
from support.files import atomic_write

if TYPE_CHECKING:  # reading a record must not take as long as importing torch
    from support.runtime.distributed import Distributed
    from support.runtime.run_info import RunInfo

FILE = "run.json"
ROOT = Path(__file__).resolve().parents[2]
# What a record must have to be used, by the types that its readers rely on.
REQUIRED = {
    "flags": dict, "versions": dict, "data": dict, "tokenizer": dict, "parameters": int, "tokens_per_step": int,
    "bytes_per_token": float, "resumes": list,
}  # fmt: skip
# What may be different in a resumed process, besides flags.
CHANGEABLE = ("versions", "device", "speed", "processes")


def describe_run(run: RunInfo, dist: Distributed) -> dict[str, Any]:
    """What this process has to say about its run, in the layout of `run.json`."""
    import torch

    from support.runtime import devices
    from support.runtime.options import PLAN_FLAGS, describe_speed

    flags = {name: value for name, value in run.config.to_dict().items() if name not in PLAN_FLAGS}
    tokenizer = run.data.tokenizer
    flags["tokenizer"] = tokenizer.name  # the flag is for --text only
    if run.config.minutes:
        del flags["max_steps"], flags["decay_steps"], flags["warmup_steps"]
    if run.config.explicit & {"n_layer", "n_head", "n_embd"}:  # set by --demo, --text and --init-from, too
        del flags["model"]  # the model does not have the sizes of that name
    versions = {"train_gpt2.py": __version__, "python": platform.python_version(), "torch": torch.__version__}
    versions |= {"numpy": np.__version__, "platform": platform.platform()}
    return {
        "command": sys.argv,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "flags": flags,
        "versions": versions | ({"commit": commit} if (commit := _read_commit()) else {}),
        "device": devices.describe(dist.device),
        "speed": describe_speed(run.config, dist.device),
        "processes": dist.world_size,
        "data": dict(run.identity),
        "tokenizer": {"name": tokenizer.name, "vocab_size": tokenizer.vocab_size},
        "bytes_per_token": run.data.bytes_per_token,
        "parameters": sum(p.numel() for p in run.model.parameters()),
        "tokens_per_step": run.config.total_batch_size,
    }


def read_record(path: Path) -> dict[str, Any] | None:
    """The content of a `run.json`; None if it is missing or damaged."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        valid = all(type(record[name]) is kind for name, kind in REQUIRED.items())
        return record if valid and all(type(resume["flags"]) is dict for resume in record["resumes"]) else None
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return None


def latest(record: Mapping[str, Any]) -> dict[str, Any]:
    """A record with what the process that last resumed its run says in place of what the first one said."""
    latest = dict(record)
    for resume in record["resumes"]:
        latest |= {**resume, "flags": latest["flags"] | resume["flags"]}
    return latest


def write_record(folder: Path, description: Mapping[str, Any], first_step: int) -> None:
    """Writes `run.json` for a process that starts a run, or adds what is different in one that resumes it.

    It is best effort: if it cannot be written, that is a warning.
    """
    record: dict[str, Any] = {"step": first_step, **description, "resumes": []}
    earlier = read_record(folder / FILE) if first_step > 0 else None
    if earlier is not None:
        before = latest(earlier)
        new_flags = {**description["flags"], "resume": before["flags"].get("resume")}  # which says nothing
        flags = {name: value for name, value in new_flags.items() if before["flags"].get(name) != value}
        changed = {name: description[name] for name in CHANGEABLE if before.get(name) != description[name]}
        entry = {name: record[name] for name in ("step", "started", "command")}
        record = {**earlier, "resumes": [*earlier["resumes"], {**entry, "flags": flags, **changed}]}
    _write(folder, record)


def change_flags(folder: Path, flags: Mapping[str, Any]) -> None:
    """Replaces flags that have other values from now on in `run.json`."""
    if record := read_record(folder / FILE):
        (record["resumes"] or [record])[-1]["flags"] |= flags
        _write(folder, record)


def _write(folder: Path, record: Mapping[str, Any]) -> None:
    try:
        with atomic_write(folder / FILE) as tmp:
            tmp.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8", newline="\n")
    except OSError as error:
        warn(f"cannot write {folder / FILE} ({error.strerror}).")


def _read_commit() -> str | None:
    """The commit that this project has checked out; None without git, or without a repository."""
    command = ["git", f"--git-dir={ROOT / '.git'}", "rev-parse", "HEAD"]  # not one in the folders above
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
