"""`starts.jsonl`: each process that starts or resumes a run appends a line about its flags, machine and versions.

The tools that read a run take its flags and data from the last line.
"""

from __future__ import annotations

import contextlib
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
from support.cli import describe_disk_error, warn

if TYPE_CHECKING:  # reading a file must not take as long as importing torch
    from support.runtime.distributed import Distributed
    from support.runtime.run_info import RunInfo

FILE = "starts.jsonl"
# The fields that readers of a line rely on.
REQUIRED = {"first_step": int, "flags": dict, "data": dict, "parameters": int, "tokens_per_step": int}
ROOT = Path(__file__).resolve().parents[2]


def describe_start(run: RunInfo, dist: Distributed) -> dict[str, Any]:
    """Describes this process and its run, in the layout of a line of `starts.jsonl`."""
    import torch

    from support.runtime import devices

    flags, tokenizer, machine = run.config.used_flags(), run.data.tokenizer, run.machine
    del flags["model"]  # its sizes are flags, too
    flags["tokenizer"] = tokenizer.name  # the flag's own value counts only with --text
    versions = {"train_gpt2.py": __version__, "python": platform.python_version(), "torch": torch.__version__}
    versions |= {"numpy": np.__version__, "platform": platform.platform()}
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "first_step": run.first_step,
        "command": sys.argv,
        "flags": flags,
        "versions": versions | ({"commit": commit} if (commit := _read_commit()) else {}),
        "machine": {
            "device": devices.describe(dist.device),
            "processes": dist.world_size,
            "dtype": machine.dtype,
            "compiled": machine.compiled,
            "why_not_compiled": machine.why_not_compiled,
            "attention": machine.attention,
            "batch_size": machine.batch_size,
        },
        "data": {
            **run.identity,
            "tokenizer": tokenizer.name,
            "vocab_size": tokenizer.vocab_size,
            "bytes_per_token": run.bytes_per_token,
        },
        "parameters": sum(p.numel() for p in run.model.parameters()),
        "tokens_per_step": run.config.total_batch_size,
    }


def append_start(folder: Path, start: Mapping[str, Any]) -> None:
    """Appends a line to `starts.jsonl`. Best effort: a failure only gives a warning."""
    path = folder / FILE
    try:
        is_torn = path.exists() and not path.read_bytes().endswith(b"\n")  # cut off by a kill or a full disk
        with open(path, "ab") as file:
            file.write(b"\n" * is_torn + json.dumps(start).encode() + b"\n")
    except OSError as error:
        warn(f"cannot write {path} ({describe_disk_error(error, path)}).")


def read_starts(folder: Path) -> list[dict[str, Any]]:
    """Reads the starts of the run in a folder, oldest first; lines that are cut off or damaged are left out."""
    path, starts = folder / FILE, []
    for line in path.read_bytes().splitlines() if path.is_file() else ():
        with contextlib.suppress(ValueError, RecursionError):
            start = json.loads(line)
            if isinstance(start, dict) and all(type(start.get(name)) is kind for name, kind in REQUIRED.items()):
                starts.append(start)
    return starts


def _read_commit() -> str | None:
    """Returns the checked-out commit of this project; None without git or a repository."""
    command = ["git", f"--git-dir={ROOT / '.git'}", "rev-parse", "HEAD"]  # not a repository in a folder above
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
