"""`starts.jsonl`: each process that starts or resumes a run appends a line about its flags, machine and versions.

A second line says how the process ended, unless it was killed. A list of shards has a line of its own, which all starts
with these shards refer to. A fork begins with the lines of its parent, whose log it continues. The tools that read a run
take its flags and data from the last start.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from support import __version__
from support.cli import words_of
from support.files import check_lock

if TYPE_CHECKING:  # reading a file must not take as long as importing torch
    from support.checkpoints.run_info import RunInfo
    from support.checkpoints.state import Checkpoint
    from support.runtime.distributed import Distributed

T = TypeVar("T")

FILE = "starts.jsonl"
FINISHED = "finished"  # how a process ended that did the last step of its run
# The fields that readers of a line rely on.
REQUIRED = {
    "run": str, "first_step": int, "first_tokens": int, "tokens_per_step": int, "flags": dict, "data": dict,
    "comparable": dict, "parameters": int,
}  # fmt: skip
REQUIRED_DATA = {"source", "val", "tokenizer", "bytes_per_token"}
SPLITS = ("train", "val")  # fields of a start's data: lists of shards
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
        "time": _now(),
        "run": run.id,
        "first_step": run.first_step,
        "first_tokens": run.checkpoint.tokens if run.checkpoint else 0,
        "command": sys.argv,
        "arguments": words_of(sys.argv[1:]),
        "flags": flags,
        "sources": {name: layer for name, layer in run.start.sources.items() if name in flags},
        "versions": versions | ({"commit": commit} if (commit := _read_commit()) else {}),
        "machine": {
            "device": devices.describe(dist.device),
            "processes": dist.world_size,
            "threads": torch.get_num_threads(),  # of rank 0; on a CPU, gradients depend on their number from the sixth digit on
            "dtype": machine.dtype,
            "compiled": machine.compiled,
            "why_not_compiled": machine.why_not_compiled,
            "cuda_graphs": machine.cuda_graphs,
            "attention": machine.attention,
            "batch_size": machine.batch_size,
        },
        "data": {
            **run.identity,
            "tokenizer": tokenizer.name,
            "tokenizer_sha256": tokenizer.fingerprint,
            "vocab_size": tokenizer.vocab_size,
            "bytes_per_token": run.bytes_per_token,
        },
        "parameters": run.parameters,
        "tokens_per_step": run.config.total_batch_size,
        "validation_tokens": run.validated_tokens,
        "hellaswag_items": run.hellaswag_items,
        "hellaswag_sha256": run.hellaswag_sha256,
        "comparable": run.comparable,
    }


def describe_end(step: int, error: BaseException | None) -> dict[str, Any]:
    """Describes how a process ended, in the layout of its second line, from the error that ended it; None if it finished."""
    end = FINISHED if error is None else f"error: {str(error) or type(error).__name__}"
    if isinstance(error, SystemExit):
        signals = {128 + number: f"stopped by {number.name}" for number in signal.Signals}
        end = signals.get(int(error.code or 0), "error: see the messages of the other processes")
    return {"time": _now(), "end": end, "step": step}


def append_lines(folder: Path, *lines: Mapping[str, Any]) -> None:
    """Appends lines to `starts.jsonl`, but starts only if it lacks them, and waits until they are on the disk.

    A list of shards, which may be long, gets a line of its own before the first start with it.

    Raises:
        OSError: they could not be written.
    """
    check_lock(folder)
    path = folder / FILE
    before = path.read_bytes() if path.exists() else b""
    added = b"" if before.endswith(b"\n") or not before else b"\n"  # cut off by a kill or a full disk
    present = {json.dumps(_without_end(start)) for start in read_starts(folder)}
    for line in lines:
        if json.dumps(_without_end(line)) in present:
            continue
        for part in _divide(line):
            text = json.dumps(part).encode() + b"\n"
            if "shards" not in part or text not in before + added:
                added += text
    with open(path, "ab") as file:
        file.write(added)
        file.flush()
        os.fsync(file.fileno())


def read_starts(folder: Path) -> list[dict[str, Any]]:
    """Reads the starts of the run in a folder, oldest first; lines that are cut off or damaged are left out.

    How a start ended is in its field "ended"; it is missing while the process runs, or if it was killed.
    """
    path, starts, shards = folder / FILE, list[dict[str, Any]](), dict[str, list[Any]]()
    for line in path.read_bytes().splitlines() if path.is_file() else ():
        with contextlib.suppress(ValueError, RecursionError):
            content = json.loads(line)
            if not isinstance(content, dict):
                continue
            has_all = all(type(content.get(name)) is kind for name, kind in REQUIRED.items())
            if has_all and content["data"].keys() >= REQUIRED_DATA:
                data = content["data"]
                for split in SPLITS:  # earlier versions had the list itself
                    if type(key := data.get(split)) is str:
                        data[split] = shards.get(key, key)
                starts.append(content)
            elif type(content.get("shards")) is list:
                shards[_key_of(content["shards"])] = content["shards"]
            elif type(content.get("end")) is str and starts:
                starts[-1]["ended"] = content
    return starts


def _divide(line: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yields a line for each list of shards in a line, the line with their keys in place of them, and how it ended."""
    lists = {split: shards for split in SPLITS if type(shards := line.get("data", {}).get(split)) is list}
    for shards in lists.values():
        yield {"shards": shards}
    keys = {split: _key_of(shards) for split, shards in lists.items()}
    own = _without_end(line)
    yield {**own, "data": line["data"] | keys} if keys else own
    if "ended" in line:
        yield line["ended"]


def _without_end(start: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in start.items() if name != "ended"}


def _key_of(shards: list[Any]) -> str:
    """Returns what stands for a list of shards in a start: a part of its SHA-256."""
    return hashlib.sha256(json.dumps(shards).encode()).hexdigest()[:16]


def starts_in_log(starts: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Returns the starts whose values are in the log, oldest first: each start cuts the log at its first step."""
    kept = list[Mapping[str, Any]]()
    for start in starts:
        kept = [earlier for earlier in kept if earlier["first_step"] < start["first_step"]] + [start]
    return kept


def comparable_values(name: str, values: Mapping[int, T], starts: Sequence[Mapping[str, Any]]) -> dict[int, T]:
    """Returns the values in a log that are comparable with those of the last start that measures such values, by step.

    Others were measured on other data, or are from a parent whose steps had another size (see `RunInfo.comparable`), even if
    the fork measures no such values.

    Args:
        name: "train", "val" or "hella".
    """
    in_log = starts_in_log(starts)
    last_steps = [start["first_step"] - 1 for start in in_log[1:]] + [math.inf]
    last_key = next((key for start in reversed(in_log) if (key := start["comparable"].get(name))), None)
    kept = dict[int, T]()
    for start, last_step in zip(in_log, last_steps, strict=True):
        if (start["comparable"].get(name), start["tokens_per_step"]) == (last_key, in_log[-1]["tokens_per_step"]):
            kept |= {step: value for step, value in values.items() if start["first_step"] <= step <= last_step}
    return kept


def argmin_loss(losses: Mapping[T, float]) -> T | None:
    """Returns the key of the lowest loss, such as a step, or None if no loss is finite; of equal losses, the first's."""
    finite = {key: loss for key, loss in losses.items() if math.isfinite(loss)}
    return min(finite, key=lambda key: finite[key], default=None)


def starts_of_parent(checkpoint: Checkpoint) -> list[dict[str, Any]]:
    """Returns the starts of the run that saved a checkpoint, up to its step; none if the folder is another run's."""
    starts = read_starts(checkpoint.path.parent)
    if not any(start["run"] == checkpoint.run for start in starts):
        return []
    return [start for start in starts if start["first_step"] < checkpoint.step]


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _read_commit() -> str | None:
    """Returns the checked-out commit of this project; None without git or a repository."""
    command = ["git", f"--git-dir={ROOT / '.git'}", "rev-parse", "HEAD"]  # not a repository in a folder above
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
