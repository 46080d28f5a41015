"""The flags and the data of a resumed run, and the changes that it refuses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from support.checkpoints import huggingface, lora
from support.checkpoints.directory import newest_checkpoint
from support.checkpoints.state import Checkpoint
from support.cli import UserError, flag_fields, flag_name
from support.console.log import seconds_trained
from support.data import presets, shards
from support.data.shards import DataIdentity
from support.runtime.distributed import Distributed
from support.runtime.options import SOURCE_FLAGS, RunOptions


def flags_to_resume(
    config_class: type[RunOptions], cli_flags: Mapping[str, Any], checkpoint: Checkpoint, dist: Distributed
) -> tuple[dict[str, Any], Checkpoint]:
    """The flags of a run that continues from `checkpoint`: the stored ones, and those on the command line.

    A run that gets another length continues from the newest checkpoint before its cooldown, which is returned, too.

    Raises:
        UserError: flags would change the recipe, or the length cannot be changed; one line each.
    """
    if "minutes" in cli_flags and cli_flags["resume"] == "auto":  # the command that started the run
        cli_flags = {name: value for name, value in cli_flags.items() if name != "minutes"}
        dist.print0("note    --resume auto does not make a run longer, --resume does: this one keeps its length")
    stored = _stored_flags(config_class, checkpoint, cli_flags, dist)
    if start := _start_of_other_length(cli_flags, config_class(**stored), checkpoint, dist):
        checkpoint = replace(start, replaces_later=True)
        stored = _stored_flags(config_class, checkpoint, cli_flags, dist)
        stored |= _length_flags(cli_flags, config_class(**stored), checkpoint, dist)
        cli_flags = {name: value for name, value in cli_flags.items() if name != "minutes"}  # the sum is in `stored`
    _check_unchanged(config_class, cli_flags, stored, checkpoint)
    flags = {**stored, "out": str(checkpoint.path.parent), "resume": "newest", "profile": 0, **cli_flags}
    if checkpoint.step > flags["max_steps"]:
        raise UserError(
            f"{checkpoint.path} is past --max-steps {flags['max_steps']}. Use {checkpoint.step} or more, or leave it out."
        )
    if "data" in stored and "data" not in cli_flags:
        flags["data"] = _find_data(flags, checkpoint.path)
    elif flags["data"] != stored.get("data") and not shards.shard_paths(flags["data"], "train"):
        raise UserError(f"no train shards in {flags['data']}. Pass the folder of the run's shards with --data.")
    return flags, checkpoint


def _check_unchanged(
    config_class: type[RunOptions], cli_flags: Mapping[str, Any], stored: Mapping[str, Any], checkpoint: Checkpoint
) -> None:
    """Checks that flags leave the recipe of a run as it is stored.

    Raises:
        UserError: they do not, one line each.
    """
    may_differ = {"max_steps", *RunOptions.__dataclass_fields__} - SOURCE_FLAGS
    # The end of a wsd schedule may move as long as neither the old cooldown nor the new one has begun.
    schedule_end = {name: cli_flags[name] for name in ("decay_steps", "cooldown_fraction") if name in cli_flags}
    ends = config_class(**stored), config_class(**{**stored, **schedule_end})
    if all(config.schedule == "wsd" and checkpoint.step <= config.cooldown_start for config in ends):
        may_differ |= schedule_end.keys()
    if stored.get("lora_rank"):
        may_differ.add("init_from")  # the base model may have moved; identify_data compares its weights
    problems = []
    for field in flag_fields(config_class):
        name, had = field.name, stored.get(field.name, field.default)
        if name not in may_differ and cli_flags.get(name, had) != had:
            run = f"the run in {checkpoint.path.parent} has {'none' if had is None else had}"
            problems.append(f"{flag_name(name)} is {cli_flags[name]}, but {run}. Leave it out.")
    if problems:
        raise UserError(*problems)


def find_once_per_node(name_or_dir: str, dist: Distributed) -> Path:
    """`huggingface.find_model`, called by one rank of each node."""
    return Path(dist.once_per_node("init_from", lambda: str(huggingface.find_model(name_or_dir))))


def _stored_flags(
    config_class: type[RunOptions], checkpoint: Checkpoint, cli_flags: Mapping[str, Any], dist: Distributed
) -> dict[str, Any]:
    """Returns the flags of the run that wrote a checkpoint; with LoRA, finds the base model that it continues on."""
    if checkpoint.config.get("lora_rank"):
        try:
            find_once_per_node(cli_flags.get("init_from", checkpoint.config["init_from"]), dist)
        except UserError as error:
            raise error.with_hint(f"If the base model of {checkpoint.path} has moved, use --init-from.") from error
    names = {field.name for field in flag_fields(config_class)}
    stored = checkpoint.config.items()
    return {name: value for name, value in stored if name in names and value is not None}  # None: a default found later


# -----------------------------------------------------------------------------
# Longer runs


def _start_of_other_length(
    cli_flags: Mapping[str, Any], before: RunOptions, checkpoint: Checkpoint, dist: Distributed
) -> Checkpoint | None:
    """The checkpoint before the cooldown, from which a run continues whose flags give it another length.

    None if they do not, or if there is no such checkpoint: more steps then have the lowest learning rate.

    Raises:
        UserError: the flags are for a run of another kind; more minutes would have that rate; or nothing would be saved.
    """
    if "minutes" in cli_flags:
        if before.schedule != "wsd" or (before.text is None and not before.demo):
            raise UserError("--minutes is for --text and --demo with --schedule wsd. Use --max-steps.")
        if "max_steps" in cli_flags or "decay_steps" in cli_flags:
            raise UserError("--minutes chooses the number of steps. Leave out --max-steps and --decay-steps.")
    elif before.open_ended:
        if "decay_steps" in cli_flags and "max_steps" not in cli_flags:
            raise UserError("--decay-steps needs --max-steps, instead of --minutes.")
        if "max_steps" not in cli_flags:
            return None
    else:
        ends_together = before.decay_steps == before.max_steps and "decay_steps" not in cli_flags
        if before.schedule != "wsd" or not ends_together or cli_flags.get("max_steps", 0) <= before.max_steps:
            return None
    if cli_flags.get("checkpoint_every") == 0:
        raise UserError("--checkpoint-every 0 would lose the longer run. Leave it out.")
    if checkpoint.step <= before.cooldown_start:
        return checkpoint
    out, start = checkpoint.path.parent, before.cooldown_start
    path = dist.once_per_node("longer", lambda: str(newest_checkpoint(out, start) or ""))
    if not path and "minutes" in cli_flags:
        raise UserError(
            f"{out} has no checkpoint of step {start} or earlier, before the cooldown, to continue from for more minutes. "
            "Use --max-steps, or a new run with another --out."
        )
    return Checkpoint.open(Path(path)) if path else None


def _length_flags(
    cli_flags: Mapping[str, Any], before: RunOptions, checkpoint: Checkpoint, dist: Distributed
) -> dict[str, Any]:
    """The flags of the new length of a run that is resumed from `checkpoint`, at a constant learning rate."""
    if "minutes" in cli_flags:
        trained = dist.once("seconds", lambda: str(seconds_trained(checkpoint.path.parent, checkpoint.step)))
        return presets.flags_for_open_end(cli_flags["minutes"] + float(trained) / 60)
    steps = cli_flags["max_steps"]
    # after --minutes, the stored fraction is what there was time for
    fraction = before.cooldown_fraction if before.minutes is None else presets.TIMED_COOLDOWN_FRACTION
    cooldown_fraction = min(fraction, max(0, steps - checkpoint.step) / steps)
    return {**presets.flags_for_length(before, steps), "minutes": None, "cooldown_fraction": cooldown_fraction}


# -----------------------------------------------------------------------------
# Data


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
