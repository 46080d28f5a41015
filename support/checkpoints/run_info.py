"""A run's configuration, data and model, for all code that describes the run."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import nn

from support.checkpoints.start import Start
from support.checkpoints.state import Checkpoint
from support.config import DEFAULT_PROMPT, TrainConfig
from support.data.shards import DataIdentity, TokenData
from support.runtime.machine import Machine
from support.runtime.memory import count_published
from support.runtime.schedule import Schedule


def checkpoint_path(out: str | os.PathLike[str], step: int) -> Path:
    """Returns the directory of a step's checkpoint in the run's folder `out`."""
    return Path(out) / f"model_{step:05d}"


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """Everything that a run's header, log, checkpoints and summary are written from."""

    config: TrainConfig
    machine: Machine
    start: Start
    schedule: Schedule
    data: TokenData
    identity: DataIdentity
    model: nn.Module  # a GPT
    flops_per_token: int
    hellaswag_items: int = 0  # items that all ranks score, in total
    hellaswag_sha256: str = ""  # of these items

    @property
    def checkpoint(self) -> Checkpoint | None:
        """The checkpoint that the run resumes from or forks."""
        return self.start.checkpoint

    @property
    def forked(self) -> bool:
        """Whether this process starts the run from another run's checkpoint."""
        return self.start.forked

    @functools.cached_property
    def id(self) -> str:
        """Identifies the run in its checkpoints and in `starts.jsonl`; a resumed run keeps it, a fork has its own."""
        return self.checkpoint.run if self.checkpoint and not self.forked else uuid.uuid4().hex[:12]

    @property
    def model_config(self) -> Any:
        """The model's GPTConfig."""
        return self.model.config

    @functools.cached_property
    def parameters(self) -> int:
        """The number of the model's parameters."""
        return count_published(self.model)

    @property
    def first_step(self) -> int:
        """The first step of this process."""
        return self.checkpoint.step if self.checkpoint else 0

    @functools.cached_property
    def validated_tokens(self) -> int:
        """The number of tokens in a validation."""
        return sum(map(len, self._targets))

    @functools.cached_property
    def bytes_per_token(self) -> float:
        """Average bytes of text per validated token, to convert nats per token to nats per byte."""
        return sum(map(self.data.tokenizer.count_bytes, self._targets)) / self.validated_tokens

    @property
    def _targets(self) -> list[npt.NDArray[np.uint16]]:
        return self.data.targets(self.model_config.block_size, self.config.val_tokens)

    @functools.cached_property
    def comparable(self) -> dict[str, str]:
        """A key for each of "train", "val" and "hella" that is measured: values of two starts are comparable if it is equal.

        The key covers the tokens of a step besides the data, because values at a step are compared.
        """
        measured_on = {
            "train": self.identity["train"],
            "val": [self.identity["val"], self.validated_tokens],
            "hella": self.hellaswag_sha256,
        }
        keys = {name: json.dumps([self.config.total_batch_size, on]) for name, on in measured_on.items() if on}
        return {name: hashlib.sha256(key.encode()).hexdigest()[:16] for name, key in keys.items()}

    @property
    def prompt(self) -> str:
        """The text that samples continue: --prompt, or its default."""
        if self.config.prompt is not None:
            return self.config.prompt
        if self.config.text is not None:
            return self.data.beginning
        return "The" if self.config.demo else DEFAULT_PROMPT
