"""The training state, and `trainer.pt`, whose schema only this module knows.

`trainer.pt` is a dict of plain tensors and containers, read with `weights_only=True`, so nothing in it is executed:

    step        the step that comes next
    bad_steps   skipped steps just before it (loss or gradients not finite)
    overflows   steps skipped because of an fp16 overflow, in total (not in the oldest files)
    config      flags of the run, by field of TrainConfig
    data        which shards the run reads, and the SHA-256 of the weights that LoRA leaves unchanged
    parameters  names of the optimizer's parameters, in its order (not in older files)
    optimizer   its state dict, of which only the tensors are read: the rest follows from the flags
    scaler      that of the gradient scaler; empty unless fp16. Only its scale and its count of good steps are read
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.utils._pytree import tree_map

from support.checkpoints.directory import step_of
from support.cli import UserError
from support.console.terminal import pluralize
from support.data.shards import DataIdentity
from support.runtime import fsdp

FILE = "trainer.pt"
REQUIRED = ("step", "bad_steps", "config", "data", "optimizer", "scaler")
SCALER_STATE = ("scale", "_growth_tracker")
Tree = TypeVar("Tree")


@dataclass
class TrainState:
    """Everything that training changes: a checkpoint saves and restores it."""

    model: torch.nn.Module  # neither compiled nor wrapped by DDP
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    step: int = 0  # the step that comes next
    bad_steps: int = 0  # skipped steps just before it
    overflows: int = 0  # steps that the scaler skipped, in total

    def record(self, loss: float, norm: float) -> str | None:
        """Counts skipped steps; returns why this step was not applied, or None if it was."""
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
                f"{pluralize(self.bad_steps, 'step')} in a row had a loss or gradients that are not finite, the last one at step "
                f"{self.step - 1}, and none was applied. A resumed run would meet them again: check the data with "
                "fineweb.py --check, or lower --max-lr in a new run."
            )

    def trained_weights(self) -> dict[str, torch.Tensor]:
        """The weights that are trained, by name: all of them, or LoRA's."""
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def parameter_names(self) -> list[str]:
        """The names of the optimizer's parameters: its state has only their numbers."""
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        return [names[parameter] for group in self.optimizer.param_groups for parameter in group["params"]]

    def restore(self, checkpoint: Checkpoint) -> None:
        """Restores optimizer, scaler and counters; the model has its weights already.

        Raises:
            UserError: the optimizer's tensors do not fit the model.
        """
        mismatch = _find_mismatch(checkpoint.optimizer["state"], self.optimizer)
        if not mismatch and checkpoint.parameters not in (None, self.parameter_names()):
            mismatch = "its parameters have other names, or another order"
        if mismatch:
            raise _unusable(checkpoint.path, f"does not fit the run ({mismatch})")
        param_groups = self.optimizer.state_dict()["param_groups"]
        optimizer_state = checkpoint.take_optimizer_state(self.optimizer)
        self.optimizer.load_state_dict({"state": optimizer_state, "param_groups": param_groups})
        if checkpoint.scaler:
            saved = {name: checkpoint.scaler[name] for name in SCALER_STATE}
            self.scaler.load_state_dict(self.scaler.state_dict() | saved)
        self.step, self.bad_steps, self.overflows = checkpoint.step, checkpoint.bad_steps, checkpoint.overflows

    def trainer_file(self, config: dict[str, Any], data: DataIdentity, keep: bool = True) -> dict[str, Any]:
        """The content of `trainer.pt`: a copy in host memory, as by `copy_to_host`."""
        return {
            "step": self.step,
            "bad_steps": self.bad_steps,
            "overflows": self.overflows,
            "config": config,
            "data": data,
            "parameters": self.parameter_names(),
            "optimizer": copy_to_host(self.optimizer.state_dict(), keep),
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
    parameters: list[str] | None
    optimizer: dict[str, Any]
    scaler: dict[str, Any]
    replaces_later: bool = False  # the run gets another length: checkpoints after this one belong to the old one

    @classmethod
    def open(cls, path: Path) -> Checkpoint:
        """Reads `trainer.pt`; its tensors stay on disk until they are used.

        Raises:
            UserError: it is unreadable, or holds anything but plain data.
        """
        try:
            content = torch.load(path / FILE, map_location="cpu", weights_only=True, mmap=True)
        except pickle.UnpicklingError as error:
            raise _unusable(path, "is not readable as plain tensors and containers") from error
        except Exception as error:  # a corrupt zip file or pickle raises many kinds
            raise _unusable(path, f"is truncated or corrupt ({type(error).__name__})") from error
        if missing := [name for name in REQUIRED if name not in content]:
            raise _unusable(path, f"was not written by this trainer (it has no {', '.join(missing)})")
        if step_of(path) not in (-1, content["step"]):
            raise _unusable(path, f"belongs to step {content['step']}")
        required = {name: content[name] for name in REQUIRED}
        return cls(path, overflows=content.get("overflows", 0), parameters=content.get("parameters"), **required)

    def take_optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[int, dict[str, torch.Tensor]]:
        """The tensors for `optimizer`, copied into memory; under FSDP, only this rank's parts of them.

        Unmaps the file: Windows and NFS cannot remove an open one.
        """
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        copies = {
            i: {name: fsdp.shard_like(tensor, parameters[i]).clone() for name, tensor in tensors.items()}
            for i, tensors in self.optimizer["state"].items()
        }
        self.optimizer.clear()
        return copies


def _unusable(path: Path, problem: str) -> UserError:
    return UserError(f"cannot resume from {path}: {FILE} {problem}. Use another checkpoint.")


def _find_mismatch(saved: Mapping[int, Mapping[str, torch.Tensor]], optimizer: torch.optim.Optimizer) -> str | None:
    """Which part of an optimizer's saved state does not fit its parameters; None if all does, or nothing was saved."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if saved and saved.keys() != set(range(len(parameters))):
        return f"the optimizer has {len(parameters)} parameters, and the state belongs to {len(saved)}"
    for i, tensors in saved.items():
        for name, tensor in tensors.items():
            if name != "step" and tensor.shape != parameters[i].shape:
                return f"{name} of the optimizer's parameter {i} has another shape"
    return None


def copy_to_host(state: Tree, keep: bool = True) -> Tree:
    """A copy of a state dict with its tensors on the CPU, which training does not change.

    Tensors that FSDP has sharded are gathered one after the other, by all ranks. Ranks that do not `keep` the copy have
    None instead of each tensor.
    """

    def copy(x: object) -> object:
        if not isinstance(x, torch.Tensor):
            return x
        full = fsdp.full_tensor(x.detach())
        return full.to("cpu", copy=True) if keep else None

    return tree_map(copy, state)
