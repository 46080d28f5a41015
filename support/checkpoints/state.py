"""The training state, and `trainer.pt`, whose schema only this module knows.

`trainer.pt` is a dict of plain tensors and containers, read with `weights_only=True`, so nothing in it is executed:

    step        the step that comes next
    bad_steps   skipped steps just before it (loss or gradients not finite)
    overflows   steps skipped because of an fp16 overflow, in total (not in the oldest files)
    config      flags of the run, by field of TrainConfig
    data        which shards the run reads, and the SHA-256 of the weights that LoRA leaves unchanged
    optimizer   its state dict
    scaler      that of the gradient scaler; empty unless fp16
"""

from __future__ import annotations

import math
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict, TypeVar

import torch
from torch.utils._pytree import tree_leaves, tree_map

from support.cli import UserError

FILE = "trainer.pt"
REQUIRED = {"step": int, "bad_steps": int, "config": dict, "data": dict, "optimizer": dict, "scaler": dict}
Tree = TypeVar("Tree")


class DataIdentity(TypedDict):
    """Which data a run is trained on: file name, tokens and SHA-256 of each shard, and the frozen weights' SHA-256."""

    train: list[list[str | int | None]]
    val: list[list[str | int | None]]
    base: str | None


@dataclass
class TrainState:
    """Everything that training changes: a checkpoint saves and restores it."""

    model: torch.nn.Module  # neither compiled nor wrapped by DDP
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    step: int = 0  # the step that comes next
    bad_steps: int = 0  # skipped steps just before it
    overflows: int = 0  # steps that the scaler skipped, in total

    def finish_step(self, loss: float, norm: float) -> str | None:
        """Counts a step; returns why it was not applied, or None if it was."""
        self.step += 1
        if math.isfinite(loss) and math.isfinite(norm):
            self.bad_steps = 0
            return None
        # After an fp16 overflow the scaler halves its scale. At a scale of 1, or without a scaler, it is no overflow.
        if math.isfinite(loss) and self.scaler.get_scale() > 1:
            self.bad_steps, self.overflows = 0, self.overflows + 1
            scale = self.scaler.get_scale()
            return f"skipped: fp16 overflow number {self.overflows:,}; the gradient scale is now {scale:g}"
        self.bad_steps += 1
        return "skipped: the loss or the gradient is not finite"

    def check_bad_steps(self, at_most: int) -> None:
        """Raises a UserError after `at_most` steps in a row that were not applied, fp16 overflows not counted."""
        if self.bad_steps >= at_most:
            raise UserError(
                f"{self.bad_steps} steps in a row had a loss or gradients that are not finite, the last one at step "
                f"{self.step - 1}, and none was applied. A resumed run would meet them again: check the data with "
                "fineweb.py --check, or lower --max-lr in a new run."
            )

    def trained_weights(self) -> dict[str, torch.Tensor]:
        """The weights that are trained, by name: all of them, or LoRA's."""
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def restore(self, checkpoint: Checkpoint) -> None:
        """Restores optimizer, scaler and counters; the model has its weights already."""
        self.optimizer.load_state_dict(checkpoint.take_optimizer())
        if checkpoint.scaler:
            self.scaler.load_state_dict(checkpoint.scaler)
        self.step, self.bad_steps, self.overflows = checkpoint.step, checkpoint.bad_steps, checkpoint.overflows

    def trainer_file(self, config: dict[str, Any], data: DataIdentity) -> dict[str, Any]:
        """The content of `trainer.pt`: a copy in host memory, which later steps do not change."""
        return {
            "step": self.step,
            "bad_steps": self.bad_steps,
            "overflows": self.overflows,
            "config": config,
            "data": data,
            "optimizer": copy_to_host(self.optimizer.state_dict()),
            "scaler": self.scaler.state_dict(),
        }


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint directory and the content of its `trainer.pt`; the weights are in other files."""

    path: Path
    step: int
    bad_steps: int
    overflows: int
    config: dict[str, Any]
    data: DataIdentity
    optimizer: dict[str, Any]
    scaler: dict[str, Any]

    @classmethod
    def open(cls, path: Path) -> Checkpoint:
        """Reads `trainer.pt`; its tensors stay on disk until they are used.

        Raises:
            UserError: it is unreadable, or holds anything but plain data.
        """
        try:
            content = torch.load(path / FILE, map_location="cpu", weights_only=True, mmap=True)
        except pickle.UnpicklingError as error:
            raise UserError(
                f"cannot resume from {path}: {FILE} is not readable as plain tensors and containers. "
                "Use another checkpoint."
            ) from error
        except (OSError, RuntimeError, EOFError) as error:
            reason = str(error).split("\n")[0]
            raise UserError(
                f"cannot resume from {path}: {FILE} is not readable ({reason}). Use another checkpoint."
            ) from error
        if not isinstance(content, dict) or any(not isinstance(content.get(k), kind) for k, kind in REQUIRED.items()):
            raise UserError(
                f"cannot resume from {path}: {FILE} was not written by this trainer. Use another checkpoint."
            )
        for group in content["optimizer"].get("param_groups", ()):
            if "parts" in group:  # renamed in November 2026
                group["num_splits"] = group.pop("parts")
        return cls(path, overflows=content.get("overflows", 0), **{name: content[name] for name in REQUIRED})

    def take_optimizer(self) -> dict[str, Any]:
        """The optimizer's state, copied into memory. Unmaps the file: Windows and NFS cannot remove an open one."""
        optimizer = copy_to_host(self.optimizer)
        self.optimizer.clear()
        return optimizer


def copy_to_host(state: Tree) -> Tree:
    """A copy of a state dict with its tensors on the CPU, which training does not change."""
    return tree_map(lambda x: x.detach().to("cpu", copy=True) if isinstance(x, torch.Tensor) else x, state)


def nbytes(state: object) -> int:
    """Bytes of all tensors in a state dict."""
    return sum(x.nbytes for x in tree_leaves(state) if isinstance(x, torch.Tensor))
