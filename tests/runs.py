"""Whether two runs are the same, in every bit that training has decided; the benchmark of chaos asks that, too."""

from __future__ import annotations

import json
import re
from pathlib import Path

import torch
from torch.utils._pytree import tree_leaves

from support.checkpoints.directory import newest_checkpoint


def log_without_seconds(out: Path) -> str:
    """Returns the log of a run without the lines about time."""
    return "".join(line for line in (out / "log.txt").read_text().splitlines(True) if " seconds " not in line)


def same_content(file: Path, other: Path) -> bool:
    """Whether two files have the same bytes. The card of a fork names its parent, and no step size that might have been another."""
    contents = [file.read_bytes(), other.read_bytes()]
    if file.name == "README.md" and any(b"**started from**" in content for content in contents):
        of_fork = rb"- \*\*started from\*\*.*\n|(?<= steps) of [\d,]+(?=\n)|\npython train_gpt2.py(.|\n)*"
        contents = [re.sub(of_fork, b"", content) for content in contents]
    return contents[0] == contents[1]


def differences(a: Path, b: Path) -> list[str]:
    """Names what differs between two runs, in any bit of the log or the last checkpoint; the time of steps may."""
    found = [] if log_without_seconds(a) == log_without_seconds(b) else ["log.txt"]
    last, other = newest_checkpoint(a), newest_checkpoint(b)
    if last is None or other is None or last.name != other.name:
        return [*found, f"{last} and {other}"]
    listed = {*json.loads((last / "checkpoint.json").read_text())["files"], "README.md"} - {"trainer.pt"}
    found += [name for name in sorted(listed) if not same_content(last / name, other / name)]
    ours, theirs = (torch.load(each / "trainer.pt", weights_only=True) for each in (last, other))
    found += [f"{key} in trainer.pt" for key in ("step", "row", "tokens", "data", "scaler") if ours[key] != theirs[key]]
    tensors = zip(tree_leaves(ours["optimizer"]), tree_leaves(theirs["optimizer"]), strict=True)
    same = [torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y for x, y in tensors]
    return found + ([] if all(same) else ["optimizer in trainer.pt"])
