"""What a resumed run takes from its checkpoint, and what it refuses."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from support import checkpoint
from support.cli import UserError, flag_name

RECIPE = ("model", "schedule", "optimizer", "randomness")  # groups of flags that make the losses what they are
Config = TypeVar("Config")


def configuration(config_class: type[Config], given: dict[str, Any], out: str, directory: Path) -> Config:
    """The configuration of the run whose checkpoint is `directory`, with the flags given now where they may differ.

    The end of a wsd schedule may be moved while the rate is constant: what was trained so far is the same for any end.

    Raises:
        UserError: they would change the recipe, or ask for fewer steps than were made; one line for each.
    """
    saved = checkpoint.read_state(directory, mmap=True)["config"]
    try:
        stored = {field.name: saved[field.name] for field in fields(config_class) if field.name in saved}
        earlier, problems = config_class(**stored), []
    except (TypeError, UserError) as error:
        raise UserError(
            f"cannot resume from {directory}: the configuration in trainer.pt is not valid ({error})."
        ) from error
    end = {name: given[name] for name in ("decay_steps", "cooldown_fraction") if name in given}
    step, schedules = checkpoint.step_of(directory), (earlier, replace(earlier, **end))
    movable = earlier.schedule == "wsd" and all(step <= each.decay_steps - each.cooldown for each in schedules)
    for field in fields(config_class):
        name, before = field.name, getattr(earlier, field.name)
        if before is None and earlier.init_from is None:
            before = earlier.architecture.get(name)  # that of --model
        if name == "init_from" and earlier.lora_rank:
            continue  # the weights themselves are compared, wherever they are now
        if name == "block_size" and before is None and not earlier.lora_rank:
            continue  # compared with the weights themselves
        if name in end and movable:
            continue
        recipe = field.metadata["group"] in RECIPE or name == "total_batch_size"
        if recipe and name not in ("max_steps", "merge") and given.get(name, before) != before:
            had = "none" if before is None else before
            problems.append(f"{flag_name(name)} is {given[name]}, but the run in {out} has {had}. Leave it out.")
    if problems:
        raise UserError(*problems)
    config = config_class(**(stored | {"out": out, "resume": "newest", "profile": 0} | given))
    if step > config.max_steps:
        raise UserError(f"{directory} is past --max-steps {config.max_steps}. Raise it, or leave it out.")
    return config


def check_data(directory: Path, data: dict[str, Any]) -> None:
    """Refuses other shards, or weights beside LoRA's, than those of the checkpoint's run.

    `data` is `shards.identity` of each split now, and, as "base", `lora.identity`.

    Raises:
        UserError: a split has other files, or files with other content; or the weights differ.
    """
    saved = checkpoint.read_state(directory, mmap=True)["data"]
    if saved.get("base") != data.get("base"):
        raise UserError(
            f"the weights of --init-from are not those that {directory} was trained beside. Name their folder with --init-from."
        )
    for split in ("train", "val"):
        then, now = saved[split], data[split]
        differ = [b[0] for a, b in zip(then, now, strict=False) if a[:2] != b[:2] or (a[2] and b[2] and a[2] != b[2])]
        if then and now and (len(then) != len(now) or differ):
            what = f"{differ[0]} differs" if differ else f"there are {len(now)}, and were {len(then)}"
            raise UserError(
                f"the {split} shards are not those that {directory} was trained with ({what}). Name their folder with --data."
            )


def restore(directory: Path, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler) -> tuple[int, int, int]:
    """Loads the optimizer's state of a checkpoint.

    Returns its step, how many updates just before it were skipped, and how many overflowed in fp16 since the start.
    """
    state = checkpoint.read_state(directory)
    optimizer.load_state_dict(state["optimizer"])
    if state["scaler"]:
        scaler.load_state_dict(state["scaler"])
    return state["step"], state["bad_steps"], state.get("overflows", 0)
