"""The flags and the data of a run that starts from a checkpoint: a resumed run, or a fork."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from support.checkpoints import huggingface, lora
from support.checkpoints.directory import newest_before_cooldown
from support.checkpoints.state import Checkpoint, OtherVersionError
from support.cli import Flag, UserError, flag_name, flag_words
from support.config import changed_flags
from support.data import shards
from support.data.shards import DataIdentity
from support.data.tokenizer import tokenizer_of_model
from support.runtime.distributed import Distributed
from support.sizing import presets

LENGTH_FLAGS = {"max_steps", "minutes"}


def flags_to_resume(
    known: Mapping[str, Flag], cli_flags: Mapping[str, Any], checkpoint: Checkpoint, dist: Distributed
) -> dict[str, Any]:
    """Returns the flags of a run that resumes from `checkpoint`: those stored in it, overridden on the command line.

    Args:
        known: all flags, with the rules that say what may happen to them.

    Raises:
        UserError: flags would change the run. The message has a line for each, and a command for a fork with them.
    """
    stored = _stored_flags(known, checkpoint, cli_flags, dist)
    if (fork := cli_flags.get("fork")) and (
        not stored["fork"] or Path(fork).resolve() != Path(stored["fork"]).resolve()
    ):
        raise UserError(
            f"{checkpoint.path.parent} already has a run that is not a fork of {cli_flags['fork']}. Use another --out."
        )
    moved = _flags_that_may_move(stored)
    changes = [
        change
        for change in changed_flags(known, stored, cli_flags)
        if known[change[0]].resume == "keeps" and change[0] not in moved
    ]
    if changes:
        out = checkpoint.path.parent
        problems = [
            f"{flag_name(name)} is {new}, but the run in {out} has {had}. Leave it out." for name, had, new in changes
        ]
        # another field of the text would need another --text, too
        of_fork = [change for change in changes if known[change[0]].fork == "changes" and change[0] != "text_field"]
        if words := [flag_words(name, new) for name, _, new in of_fork]:
            is_over, gets_longer = checkpoint.progress >= 1, bool(cli_flags.keys() & LENGTH_FLAGS)
            earlier = newest_before_cooldown(out) if is_over or gets_longer else None
            command = f"python train_gpt2.py --fork {shlex.quote(str(earlier or checkpoint.path))} --out NEW {' '.join(words)}"
            if earlier or gets_longer or not is_over:  # at the end, nothing is left to train
                problems.append(f"A fork can have other flags: {command}")
        raise UserError(*problems)
    flags = {**stored, **cli_flags, "out": str(checkpoint.path.parent), "resume": "newest", "fork": stored.get("fork")}
    return flags | {"data": _find_data(flags, stored, checkpoint.path)}


def flags_to_fork(
    known: Mapping[str, Flag], cli_flags: Mapping[str, Any], checkpoint: Checkpoint, dist: Distributed
) -> dict[str, Any]:
    """Returns the flags of a new run that starts from `checkpoint`: those stored in it, overridden on the command line.

    Args:
        known: as in `flags_to_resume`.

    Raises:
        UserError: the model would have another shape, or there is nothing left to train; one line each.
    """
    stored = _stored_flags(known, checkpoint, cli_flags, dist)
    problems = [
        f"{flag_name(name)} is {new}, but the model in {checkpoint.path} has {had}. A fork keeps its shape. Leave it out."
        for name, had, new in changed_flags(known, stored, cli_flags)
        if known[name].fork == "keeps"
    ]
    brought = [name for name in cli_flags if known[name].fork == "brings" and name not in _flags_that_may_move(stored)]
    problems += [f"--fork brings its own model. Leave out {flag_name(name)}." for name in brought]
    if problems:
        raise UserError(*problems)
    flags = {name: value for name, value in stored.items() if name not in _derived_flags(cli_flags)}
    if cli_flags.keys() & LENGTH_FLAGS:
        flags |= presets.flags_for_length(stored, cli_flags.get("max_steps"))
    flags |= cli_flags
    steps, minutes = checkpoint.step, checkpoint.seconds / 60
    is_over = minutes >= flags["minutes"] if flags.get("minutes") else steps >= flags["max_steps"]
    has_same_end = flags.get("minutes") and all(
        flags.get(name) == stored.get(name) for name in ("minutes", "max_passes")
    )
    if is_over or checkpoint.progress >= 1 and has_same_end:
        raise UserError(
            f"{checkpoint.path} was trained for {steps:,} steps and {minutes:.1f} minutes. For a longer run, use a higher "
            "--max-steps or --minutes; or fork an earlier checkpoint."
        )
    if "data" in cli_flags:
        return flags | {"text": None, "demo": False}
    if "text" in cli_flags:
        tokenizer = tokenizer_of_model(checkpoint.path, huggingface.read_config(checkpoint.path)["vocab_size"])
        return flags | {"data": str(Path(flags["out"]) / "data"), "tokenizer": tokenizer.name, "demo": False}
    return flags | {"data": _find_data(flags, stored, checkpoint.path)}


def _flags_that_may_move(stored: Mapping[str, Any]) -> set[str]:
    """Returns the flag that names the base model of LoRA, which may have moved; `identify_data` compares its weights."""
    return {"init_from"} if stored.get("lora_rank") else set()


def _derived_flags(cli_flags: Mapping[str, Any]) -> set[str]:
    """Returns the flags that a fork, like a new run, derives from others on its command line."""
    derived = set()
    if "recipe" in cli_flags:
        derived |= {"optimizer", "schedule", "max_lr"}
    if cli_flags.keys() & {"recipe", "optimizer", "schedule", "max_lr"}:
        derived |= {"min_lr", "adamw_lr"}
    return derived


def find_once_per_node(name_or_dir: str, dist: Distributed) -> Path:
    """Calls `huggingface.find_model` on one rank of each node."""
    return dist.once_per_node(lambda: huggingface.find_model(name_or_dir))


def _stored_flags(
    known: Mapping[str, Flag], checkpoint: Checkpoint, cli_flags: Mapping[str, Any], dist: Distributed
) -> dict[str, Any]:
    """Returns the flags of the run that wrote a checkpoint. With LoRA, it first checks that the base model can be found."""
    if checkpoint.config.get("lora_rank"):
        try:
            find_once_per_node(cli_flags.get("init_from", checkpoint.config["init_from"]), dist)
        except UserError as error:
            raise error.with_hint(f"If the base model of {checkpoint.path} has moved, use --init-from.") from error
    if unknown := sorted(checkpoint.config.keys() - known.keys()):  # it would be dropped without a word
        raise OtherVersionError(
            f"{checkpoint.path} was written by another version of the trainer, with {flag_name(unknown[0])}. Continue with "
            "that version, or start from its weights with --init-from, in another --out."
        )
    return {name: value for name, value in checkpoint.config.items() if known[name].stored}


# -----------------------------------------------------------------------------
# Data


def _find_data(flags: Mapping[str, Any], stored: Mapping[str, Any], checkpoint: Path) -> str:
    """Returns the folder of a run's shards: the one in `flags`, or one beside the checkpoint if --text made them.

    Raises:
        UserError: the shards are in neither, and cannot be made again.
    """
    text, folders = stored.get("text"), [flags["data"]]
    if flags["data"] == stored["data"] and text is not None:
        folders.insert(0, str(checkpoint.parent / "data"))  # the folder of the run may have moved
    for folder in folders:
        if shards.shard_paths(folder, "train"):
            return folder
    has_text = stored.get("demo") or (text is not None and Path(text).exists())  # the shards can be made again
    if flags["data"] != stored["data"] or not has_text:
        raise UserError(
            f"the shards that {checkpoint} was trained on are not in {flags['data']}. Pass their folder with --data."
        )
    return folders[0] if stored.get("demo") else str(Path(flags["out"]) / "data")


def identify_data(
    data: shards.TokenData, model: torch.nn.Module, checkpoint: Checkpoint | None, forked: bool
) -> DataIdentity:
    """Identifies what a run is trained on: its shards, and with LoRA the frozen weights.

    Raises:
        UserError: `checkpoint` was trained with other frozen weights or, if the run resumes from it, on other shards.
    """
    base = lora.frozen_sha256(model)
    if checkpoint and base is not None and checkpoint.data.get("base") != base:
        raise UserError(
            f"the weights of --init-from are not those that {checkpoint.path} was trained with. "
            "Pass the folder of the original ones with --init-from."
        )
    train, val, source = shards.identify(data)
    if checkpoint and not forked:
        saved = checkpoint.data
        for split, before, now in (("train", saved["train"], train), ("val", saved["val"], val)):
            if difference := shards.find_difference(before, now):
                raise UserError(
                    f"the {split} shards are not those that {checkpoint.path} was trained on ({difference}). "
                    "Pass the folder of the original ones with --data."
                )
    return {"train": train, "val": val, "base": base, "source": source}
