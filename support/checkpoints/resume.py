"""The flags of a resumed run, and the changes that it refuses."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from support.checkpoints import lora
from support.checkpoints.huggingface import ModelSizes
from support.checkpoints.state import Checkpoint
from support.cli import UserError, flag_fields, flag_name
from support.data import shards
from support.data.shards import DataIdentity
from support.runtime.options import MACHINE_FLAGS, SOURCE_FLAGS, RunOptions

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def stored_flags(config_class: type[DataclassInstance], checkpoint: Checkpoint, sizes: ModelSizes) -> dict[str, Any]:
    """The flags of the run that wrote a checkpoint. `sizes` are those of its model."""
    names = {field.name for field in flag_fields(config_class)}
    flags: dict[str, Any] = {name: size for name, size in sizes.items() if name in names}
    # None, and "auto" for the device and the dtype, stood for a default that was found later.
    flags |= {
        name: value
        for name, value in checkpoint.config.items()
        if name in names and value is not None and not (name in MACHINE_FLAGS and value == "auto")
    }
    return flags


def resumed_flags(
    config_class: type[DataclassInstance],
    stored: Mapping[str, Any],
    cli_flags: Mapping[str, Any],
    checkpoint: Checkpoint,
    changeable: Collection[str],
) -> dict[str, Any]:
    """The flags of a resumed run: the stored ones, replaced by those given now where they may differ.

    Args:
        changeable: fields that may differ, besides max_steps and those of RunOptions except SOURCE_FLAGS.

    Raises:
        UserError: flags would change the recipe, or ask for fewer steps than the run has; one line each.
    """
    out, problems = checkpoint.path.parent, []
    may_differ = {"max_steps", *RunOptions.__dataclass_fields__, *changeable} - SOURCE_FLAGS
    if stored.get("lora_rank"):
        may_differ.add("init_from")  # the base model may have moved; check_same_data compares its weights
    for field in flag_fields(config_class):
        name, before = field.name, stored.get(field.name, field.default)
        if name not in may_differ and cli_flags.get(name, before) != before:
            had = "none" if before is None else before
            problems.append(f"{flag_name(name)} is {cli_flags[name]}, but the run in {out} has {had}. Leave it out.")
    if problems:
        raise UserError(*problems)
    flags = {**stored, "out": str(out), "resume": "newest", "profile": 0, **cli_flags}
    if checkpoint.step > flags["max_steps"]:
        raise UserError(
            f"{checkpoint.path} is past --max-steps {flags['max_steps']}. Use {checkpoint.step} or more, or leave it out."
        )
    if "data" in stored and "data" not in cli_flags:
        flags["data"] = _find_data(flags, checkpoint.path)
    return flags


def _find_data(flags: Mapping[str, Any], checkpoint: Path) -> str:
    """The folder of a resumed run's shards: where they were, or next to the checkpoint if --text made them there.

    Raises:
        UserError: they are in neither, and cannot be made again.
    """
    text, folders = flags.get("text"), [flags["data"]]
    if text is not None:
        folders.insert(0, str(checkpoint.parent / "data"))  # the folder of the run may have moved
    for folder in folders:
        if shards.shard_paths(folder, "train"):
            return folder
    if not flags.get("demo") and (text is None or not Path(text).exists()):
        raise UserError(
            f"the shards that {checkpoint} was trained on are not in {flags['data']}. Pass their folder with --data."
        )
    return folders[0]  # --demo and --text make them again


def identify_data(data: shards.TokenData, model: torch.nn.Module, checkpoint: Checkpoint | None) -> DataIdentity:
    """Identifies what a run is trained on: its shards, and with LoRA the frozen weights.

    Raises:
        UserError: a run that resumes from `checkpoint` was trained on others.
    """
    base = lora.frozen_sha256(model)
    if checkpoint and base is not None and checkpoint.data.get("base") != base:
        raise UserError(
            f"the weights of --init-from are not those that {checkpoint.path} was trained with. "
            "Pass the folder of the original ones with --init-from."
        )
    train, val, source = shards.identify(data)
    if checkpoint:
        saved = checkpoint.data
        for split, before, now in (("train", saved["train"], train), ("val", saved["val"], val)):
            if difference := shards.find_difference(before, now, data.folder):
                raise UserError(
                    f"the {split} shards are not those that {checkpoint.path} was trained on ({difference}). "
                    "Pass the folder of the original ones with --data."
                )
    return {"train": train, "val": val, "base": base, "source": source}
