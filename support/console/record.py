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
# What may be different in a resumed process.
CHANGEABLE = ("versions", "device", "speed", "processes")


def describe_run(run: RunInfo, dist: Distributed) -> dict[str, Any]:
    """What this process has to say about its run, in the layout of `run.json`."""
    import torch

    from support.runtime import devices
    from support.runtime.options import PLAN_FLAGS, describe_speed

    flags = {name: value for name, value in run.config.to_dict().items() if name not in PLAN_FLAGS}
    tokenizer = run.data.tokenizer
    flags["tokenizer"] = tokenizer.name  # the flag is for --text only
    if run.config.open_ended:
        del flags["decay_steps"]  # not known yet
    if run.config.explicit & {"n_layer", "n_head", "n_embd"}:  # set by --demo, --text and --init-from, too
        del flags["model"]  # the model does not have the sizes of that name
    versions = {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__}
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


def latest_flags(record: Mapping[str, Any]) -> dict[str, Any]:
    """The flags of the process that last started or resumed a run."""
    flags = dict(record["flags"])
    for resume in record["resumes"]:
        flags |= resume["flags"]
    return flags


class RunRecord:
    """`run.json` in the folder of a run, written when a process starts or resumes it.

    It is best effort: if it cannot be written, that is a warning.
    """

    def __init__(self, folder: Path, description: Mapping[str, Any], first_step: int):
        self._path = folder / FILE
        earlier = read_record(self._path) if first_step > 0 else None
        self.written_anew = first_step > 0 and earlier is None
        self._record = {"step": first_step, **description, "resumes": []}
        if earlier is not None:
            self._record = {**earlier, "resumes": [*earlier["resumes"], _changes(earlier, description, first_step)]}
        self._write()

    def change_flags(self, flags: Mapping[str, Any]) -> None:
        """Replaces flags that have other values from now on."""
        (self._record["resumes"] or [self._record])[-1]["flags"] |= flags
        self._write()

    def _write(self) -> None:
        try:
            with atomic_write(self._path) as tmp:
                tmp.write_text(json.dumps(self._record, indent=2) + "\n", encoding="utf-8", newline="\n")
        except OSError as error:
            print(f"warning: cannot write {self._path} ({error.strerror}).", file=sys.stderr, flush=True)


def _changes(record: Mapping[str, Any], description: Mapping[str, Any], step: int) -> dict[str, Any]:
    """What a process that resumes the run at `step` adds to its record."""
    flags, latest = latest_flags(record), dict(record)
    for resume in record["resumes"]:
        latest |= resume
    entry = {"step": step, "started": description["started"], "command": description["command"]}
    changed = {
        name: value
        for name, value in description["flags"].items()
        if name != "resume" and (name not in flags or flags[name] != value)
    }
    return {**entry, "flags": changed} | {
        name: description[name] for name in CHANGEABLE if latest.get(name) != description[name]
    }


def _read_commit() -> str | None:
    """The commit that this project has checked out; None without git, or without a repository."""
    if not (ROOT / ".git").exists():  # git would look for one in the folders above
        return None
    try:
        command = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
