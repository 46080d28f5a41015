"""A run's configuration, data and model, for all code that describes the run."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import uuid
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from support.data.shards import DataIdentity, TokenData
from support.runtime.options import DEFAULT_PROMPT

if TYPE_CHECKING:
    from support.checkpoints.state import Checkpoint
    from support.runtime.machine import Machine
    from train_gpt2 import GPT, GPTConfig, TrainConfig


GPT2_FIELDS = {"block_size", "vocab_size", "n_layer", "n_head", "n_embd", "bias", "dropout"}  # fields of GPTConfig


def options_of(config: GPTConfig) -> dict[str, Any]:
    """Returns the fields that make a model differ from GPT-2: added fields that do not have their default."""
    added = [field for field in fields(config) if field.name not in GPT2_FIELDS]
    return {field.name: value for field in added if (value := getattr(config, field.name)) != field.default}


def checkpoint_path(out: str | os.PathLike[str], step: int) -> Path:
    """Returns the directory of a step's checkpoint in the run's folder `out`."""
    return Path(out) / f"model_{step:05d}"


@dataclass(frozen=True)
class RunInfo:
    """Everything that a run's header, log, checkpoints and summary are written from."""

    config: TrainConfig
    machine: Machine
    data: TokenData
    identity: DataIdentity
    model: GPT
    checkpoint: Checkpoint | None = None  # the checkpoint that the run resumes from or forks
    hellaswag_items: int = 0  # items that all ranks score, in total
    hellaswag_sha256: str = ""  # of these items

    @functools.cached_property
    def id(self) -> str:
        """Identifies the run in its checkpoints and in `starts.jsonl`; a resumed run keeps it, a fork has its own."""
        if self.checkpoint and not self.config.starts_fork:
            return self.checkpoint.run
        return uuid.uuid4().hex[:12]

    @property
    def first_step(self) -> int:
        """The first step of this process."""
        return self.checkpoint.step if self.checkpoint else 0

    @functools.cached_property
    def validated_tokens(self) -> int:
        """The number of tokens in a validation."""
        return sum(map(len, self.data.targets(self.config.block_size, self.config.val_tokens)))

    @functools.cached_property
    def bytes_per_token(self) -> float:
        """Average bytes of text per validated token, to convert nats per token to nats per byte."""
        targets = self.data.targets(self.config.block_size, self.config.val_tokens)
        return sum(map(self.data.tokenizer.count_bytes, targets)) / self.validated_tokens

    @functools.cached_property
    def comparable(self) -> dict[str, str]:
        """A key for each of "train", "val" and "hella" that is measured: values of two starts are comparable if it is equal.

        Values at a step are compared, so the tokens of a step count, besides the data that they are measured on.
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
