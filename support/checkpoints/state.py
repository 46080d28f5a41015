"""The training state, and `trainer.pt`, whose schema only this module knows.

`trainer.pt` is a dict of plain tensors and containers, read with `weights_only=True`, so nothing in it is executed:

    version     of the trainer that wrote the file
    run         identifies the run that wrote it, see RunInfo.id
    step to overflows    the counters of TrainState
    config      flags of the run, keyed by the fields of config.TrainConfig
    sources     where each flag's value came from, see config.LAYERS
    data        what the run is trained on, see DataIdentity
    parameters  names of the optimizer's parameters, in its order
    optimizer   the optimizer's state dict. Only its tensors are read: the rest follows from the flags
    scaler      the gradient scaler's state dict, empty unless fp16. Only its scale and its count of good steps are read
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import torch

from support import __version__, torch_private
from support.checkpoints.directory import read_validation_loss
from support.cli import UserError
from support.data.shards import DataIdentity, find_difference, rows_in_shard
from support.runtime import fsdp
from support.runtime.schedule import Position
from support.terminal import pluralize

FILE = "trainer.pt"
SCALER_STATE = ("scale", "_growth_tracker")
Tree = TypeVar("Tree")


@dataclass
class TrainState(Position):
    """Everything that training changes: a checkpoint saves and restores it."""

    model: torch.nn.Module  # neither compiled nor wrapped by DDP
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    row: int = 0  # the row of the training data that comes next, counted across epochs
    tokens: int = 0  # tokens trained on so far, by the run that was forked, too
    seconds: float = 0.0  # training time so far, including evaluations and checkpoints
    bad_steps: int = 0  # steps skipped just before `step`, because loss or gradients were not finite
    overflows: int = 0  # steps that the scaler skipped because of an fp16 overflow, in total

    def advance(self, progress: float, seconds: float, tokens: int, row: int, overdue: bool = False) -> None:
        """Moves on to the next step, which begins at `row`; this one had `tokens` tokens."""
        self.overdue = overdue and not self.bad_steps  # after skipped steps, nothing is saved
        self.step, self.seconds, self.tokens, self.row = self.step + 1, seconds, self.tokens + tokens, row
        self.last_progress, self.progress = self.progress, progress

    def skip_reason(self, loss: float, norm: float) -> str | None:
        """Counts skipped steps; returns why this step was not applied, or None if it was."""
        if math.isfinite(loss) and math.isfinite(norm):
            self.bad_steps = 0
            return None
        # After an fp16 overflow, the scale is halved. At a scale of 1 or without a scaler, the cause is different.
        if math.isfinite(loss) and self.scaler.get_scale() > 1:
            self.bad_steps, self.overflows = 0, self.overflows + 1
            scale = self.scaler.get_scale()
            return f"skipped: fp16 overflow number {self.overflows:,}; the gradient scale is now {scale:g}"
        self.bad_steps += 1
        return "skipped: the loss or the gradient is not finite"

    def check_bad_steps(self, at_most: int) -> None:
        """Raises a UserError after `at_most` skipped steps in a row, without counting fp16 overflows."""
        if self.bad_steps >= at_most:
            raise UserError(
                f"{pluralize(self.bad_steps, 'step')} in a row had a loss or gradients that are not finite, the last one "
                f"at step {self.step - 1}, and none was applied. A resumed run would hit them again: check the data with "
                "fineweb.py --check, or lower --max-lr in a new run."
            )

    def trainer_file(
        self, run: str, config: Mapping[str, Any], sources: Mapping[str, str], data: DataIdentity, keep: bool = True
    ) -> dict[str, Any]:
        """Returns the content of `trainer.pt`, with tensors from `copy_to_host`; `run` identifies the run."""
        return {
            "version": __version__,
            "run": run,
            "step": self.step,
            "row": self.row,
            "tokens": self.tokens,
            "progress": self.progress,
            "last_progress": self.last_progress,
            "seconds": self.seconds,
            "bad_steps": self.bad_steps,
            "overflows": self.overflows,
            "config": dict(config),
            "sources": dict(sources),
            "data": data,
            "parameters": list(self._optimizer_parameters()),
            "optimizer": copy_to_host(self.optimizer.state_dict(), keep),
            "scaler": self.scaler.state_dict(),
        }

    def restore(self, checkpoint: Checkpoint, data: DataIdentity, optimizer: str, forked: bool) -> None:
        """Restores optimizer, scaler and counters; the model has its weights already. Unmaps `trainer.pt`.

        An optimizer of a different kind starts without state. Training data that differs from the checkpoint's is read
        from its beginning. A fork has its own schedule, so the progress is not restored.

        Args:
            optimizer: its kind.

        Raises:
            UserError: the optimizer's state does not fit the model.
        """
        self.step, self.seconds, self.overflows = checkpoint.step, checkpoint.seconds, checkpoint.overflows
        has_same_data = find_difference(checkpoint.data["train"], data["train"]) is None
        self.tokens, self.row = checkpoint.tokens, checkpoint.row if has_same_data else 0
        if not forked:
            self.bad_steps = checkpoint.bad_steps
            self.progress, self.last_progress = checkpoint.progress, checkpoint.last_progress
        if checkpoint.config["optimizer"] != optimizer:
            checkpoint.optimizer.clear()
            return
        saved, by_name = checkpoint.optimizer["state"], self._optimizer_parameters()
        names, parameters = list(by_name), list(by_name.values())
        fits = checkpoint.parameters == names and set(saved) in (set(), set(range(len(names))))
        for i, parameter in enumerate(parameters):  # torch does not compare shapes
            shapes = {tensor.shape for name, tensor in saved.get(i, {}).items() if name != "step"}
            fits = fits and shapes <= {parameter.shape}
        if not fits:
            raise _unusable(checkpoint.path, "belongs to a model whose parameters differ, or are in another order")
        state = {  # under FSDP, only this rank's shards of the tensors
            i: {name: fsdp.shard_like(tensor, parameters[i]).clone() for name, tensor in tensors.items()}
            for i, tensors in saved.items()
        }
        param_groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": state, "param_groups": param_groups})
        checkpoint.optimizer.clear()  # unmaps the file: Windows and NFS cannot remove an open one
        if checkpoint.scaler:
            scaler = {name: checkpoint.scaler[name] for name in SCALER_STATE}
            self.scaler.load_state_dict(self.scaler.state_dict() | scaler)

    def _optimizer_parameters(self) -> dict[str, torch.nn.Parameter]:
        """Returns the optimizer's parameters by name, in its order. Its state dict has only their indices."""
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        return {names[parameter]: parameter for group in self.optimizer.param_groups for parameter in group["params"]}


class OtherVersionError(UserError):
    """A checkpoint was written by a version of the trainer whose `trainer.pt` has other fields."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint directory and the content of its `trainer.pt`; the weights are in another file."""

    path: Path
    run: str
    step: int
    row: int
    tokens: int
    progress: float
    last_progress: float | None
    seconds: float
    bad_steps: int
    overflows: int
    config: dict[str, Any]
    sources: dict[str, str]
    data: DataIdentity
    parameters: list[str]
    optimizer: dict[str, Any]
    scaler: dict[str, Any]

    @classmethod
    def open(cls, path: Path) -> Checkpoint:
        """Reads `trainer.pt`; its tensors stay on disk until they are used.

        Raises:
            UserError: the file is unreadable, or has anything but plain data.
            OtherVersionError: another version wrote it.
        """
        try:
            content = dict(torch.load(path / FILE, map_location="cpu", weights_only=True, mmap=True))
            if version := _version_of_another_format(content):
                raise OtherVersionError(
                    f"{path} was written by another version of the trainer ({version}), and cannot be continued. Start from its "
                    "weights with --init-from, in another --out."
                )
            return cls(path, **{name: value for name, value in content.items() if name != "version"})
        except OtherVersionError:
            raise
        except Exception as error:  # e.g. a bad pickle, a corrupt zip file or another program's file
            raise _unusable(path, f"is corrupt, or was not written by this trainer ({type(error).__name__})") from error

    @property
    def passes(self) -> float:
        """How often the run has read its training data."""
        T, shuffle = self.config["block_size"], self.config["shuffle"]
        return self.row / sum(rows_in_shard(int(tokens), T, shuffle) for _, tokens, _ in self.data["train"])

    def validation_loss(self, comparable: str) -> float | None:
        """Returns its loss as in `read_validation_loss`."""
        return read_validation_loss(self.path, comparable)


def _version_of_another_format(content: Mapping[str, Any]) -> str | None:
    """Returns the version of the trainer that wrote a `trainer.pt` without some fields; None if it has all, or is another program's."""
    version = content.get("version", "2.0" if "last_progress" in content else "1")
    required = {field.name for field in fields(Checkpoint) if field.default is MISSING} - {"path"}
    return None if required <= content.keys() or "optimizer" not in content else str(version)


def _unusable(path: Path, problem: str) -> UserError:
    return UserError(f"cannot resume from {path}: {FILE} {problem}. Use another checkpoint.")


def copy_to_host(state: Tree, keep: bool = True) -> Tree:
    """Copies a state dict, with all tensors on the CPU, so that training does not change the copy.

    All ranks gather the tensors that FSDP has sharded, one after the other. A rank that does not `keep` the copy gets
    None for each tensor.
    """

    def copy(x: object) -> object:
        if not isinstance(x, torch.Tensor):
            return x
        full = fsdp.full_tensor(x.detach())
        return full.to("cpu", copy=True) if keep else None

    return torch_private.tree_map(copy, state)
