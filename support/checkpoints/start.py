"""How a run starts, new, resumed or forked: where its flags come from, and whether data and weights fit them."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from support.checkpoints import huggingface, lora
from support.checkpoints.directory import CONTENTS, newest_before_cooldown, newest_checkpoint, step_of
from support.checkpoints.state import Checkpoint, OtherVersionError
from support.cli import Tables, UserError, flag_name, flag_words
from support.config import LAYERS, TRAIN_FLAGS, Layers, TrainConfig, changed_flags, merge, source
from support.data import shards
from support.data.shards import DataIdentity
from support.data.tokenizer import Tokenizer, find_tokenizer, tokenizer_of_model
from support.files import first_free
from support.runtime.distributed import Distributed
from support.runtime.preflight import check_facts_agree, check_installed
from support.runtime.schedule import Schedule
from support.sizing import presets

LENGTH_FLAGS = {"max_steps", "minutes"}


@dataclass(frozen=True)
class Start:
    """How a process starts: a new run, one that is resumed, or one that begins with a checkpoint of another run."""

    layers: Layers = field(default_factory=lambda: {name: {} for name in LAYERS})  # values of flags, by source
    checkpoint: Checkpoint | None = None  # of the run that is resumed or forked
    forked: bool = False
    tables: Tables = field(default_factory=dict)  # of models and recipes

    @classmethod
    def find(cls, cli_flags: Mapping[str, Any], tables: Tables, dist: Distributed, planned: bool = False) -> Start:
        """Finds out how this process starts, and gathers its flags from the command line, a preset, pretrained weights and a
        checkpoint.

        One rank of each node downloads pretrained weights and compares checkpoints with their checksums.

        Args:
            cli_flags: the flags on the command line.
            tables: of models and recipes, by the flag that chooses one of them.
            planned: --plan needs to know the tokenizer of pretrained weights.

        Raises:
            UserError: flags contradict each other or the checkpoint, one line each; or there is no intact checkpoint.
        """
        start = replace(_start(dict(cli_flags), tables["recipe"]["fast"], dist, planned), tables=tables)
        for name, table in tables.items():
            start.layers[flag_name(name)] = table[start.merged_flags().get(name, TRAIN_FLAGS[name].default)]
        if minutes := start.merged_flags().get("minutes"):
            instead = "" if start.resumed else ", or use --max-steps instead of --minutes"
            why = f"counts steps, but this run has --minutes {minutes:g}. Leave it out{instead}."
            if counted := [flag_name(name) for name in cli_flags if TRAIN_FLAGS[name].counts_steps]:
                raise UserError(*(f"{flag} {why}" for flag in counted))
        if start.checkpoint and not planned:
            dist.once(lambda: check_installed(start.merged_flags()))  # its flags are known only now
        return start

    def merged_flags(self) -> dict[str, Any]:
        """Returns the value of each flag that a layer has, from the strongest one, as a new dict."""
        return merge(self.layers)

    def with_layer(self, name: str, flags: Mapping[str, Any]) -> Start:
        """Returns the same start with a layer replaced."""
        return replace(self, layers=self.layers | {name: flags})

    @property
    def resumed(self) -> Checkpoint | None:
        """The checkpoint, if it is this run's own."""
        return None if self.forked else self.checkpoint

    def first_model(self, config: TrainConfig) -> Path | None:
        """Returns the folder of the checkpoint or the pretrained model that training starts from; None for a new model."""
        if self.checkpoint is not None:
            return self.checkpoint.path
        return None if config.init_from is None else huggingface.find_model(config.init_from, verify=False)

    def existing_tokenizer(self, config: TrainConfig) -> Tokenizer | None:
        """Returns the tokenizer of the model that training starts from, or of the shards; None if there is none yet."""
        if model := self.first_model(config):
            return find_tokenizer(model)
        has_shards = not config.is_demo_or_text and shards.shard_paths(config.data, "train")
        return shards.read_tokenizer(config.data) if has_shards else None

    def needs_measurement(self, config: TrainConfig) -> bool:
        """Returns whether --minutes is new to the run: a resumed run, or a fork of a timed run, has been measured."""
        return bool(config.minutes) and not (self.checkpoint and self.checkpoint.config["minutes"])

    @property
    def sources(self) -> dict[str, str]:
        """The layer that has each flag's value. A value from a checkpoint keeps the source that it had in its run."""
        sources = {name: source(self.layers, name) for name in TRAIN_FLAGS}
        of_checkpoint = self.checkpoint.sources if self.checkpoint else {}
        if self.resumed:  # a flag that is given again with the same value changes nothing
            given = self.layers["command line"].items()
            sources |= {name: "checkpoint" for name, x in given if self.resumed.config.get(name, MISSING) == x}
        renamed = {"command line": "command line of the fork"} if self.forked else {}
        return {
            name: of_checkpoint.get(name, layer) if layer == "checkpoint" else renamed.get(layer, layer)
            for name, layer in sources.items()
        }

    def identify_data(self, data: shards.TokenData, model: torch.nn.Module) -> DataIdentity:
        """Identifies what a run is trained on: its shards, and with LoRA the frozen weights.

        Raises:
            UserError: the checkpoint was trained with other frozen weights or, if the run resumes from it, on other shards.
        """
        base, checkpoint = lora.frozen_sha256(model), self.checkpoint
        if checkpoint and base is not None and checkpoint.data.get("base") != base:
            raise UserError(
                f"the weights of --init-from are not those that {checkpoint.path} was trained with. "
                "Pass the folder of the original ones with --init-from."
            )
        train, val, source = shards.identify(data)
        if checkpoint and self.resumed:
            saved = checkpoint.data
            for split, before, now in (("train", saved["train"], train), ("val", saved["val"], val)):
                if difference := shards.find_difference(before, now):
                    raise UserError(
                        f"the {split} shards are not those that {checkpoint.path} was trained on ({difference}). "
                        "Pass the folder of the original ones with --data."
                    )
        return {"train": train, "val": val, "base": base, "source": source}


def _start(cli_flags: dict[str, Any], recipe: Mapping[str, Any], dist: Distributed, planned: bool) -> Start:
    """Does the work of `Start.find`, but for the tables; `recipe` has the numbers of --recipe fast."""
    resume = cli_flags.get("resume")
    if "fork" in cli_flags and "out" not in cli_flags:
        raise UserError("--fork starts another run. Name its folder with --out.")
    out = str(cli_flags.get("out", presets.DEMO["out"] if cli_flags.get("demo") else TrainConfig.out))
    if resume:
        newest = dist.once(lambda: newest_checkpoint(out), per_node=True)
        check_facts_agree(dist, {"the checkpoint": newest.name if newest else "none"})
        if newest:
            return _resume(cli_flags, Checkpoint.open(newest), dist)
        if resume == "newest":
            raise UserError(
                f"no checkpoint in {out} to resume from. Pass the run's folder with --out, or start a new run with --resume auto."
            )
    if problems := list(_conflicts(cli_flags, out)):
        raise UserError(*problems)
    if "fork" in cli_flags:
        if not dist.once(lambda: Path(cli_flags["fork"]).exists(), per_node=True):  # no model of the hub
            raise UserError(f"{cli_flags['fork']} does not exist. Check the path.")
        directory = find_once_per_node(cli_flags["fork"], dist)
        if not (directory / CONTENTS).is_file():
            raise UserError(f"{directory} is not a checkpoint: it has no {CONTENTS}. Use another one, or --init-from.")
        check_facts_agree(dist, {"the checkpoint": directory.name})
        return _fork(cli_flags, Checkpoint.open(directory), dist)
    start, existing_tokenizer = Start(), None
    layers = start.layers
    layers["command line"] = cli_flags
    if "init_from" in cli_flags:
        directory = find_once_per_node(cli_flags["init_from"], dist)
        sizes = huggingface.read_config(directory)
        brought = {name: sizes[name] for name in TRAIN_FLAGS.keys() & sizes.keys()}
        if planned or cli_flags.keys() & {"text", "tokenizer"}:
            existing_tokenizer = tokenizer_of_model(directory, sizes["vocab_size"], cli_flags.get("tokenizer"))
            brought["tokenizer"] = existing_tokenizer.name
        layers["--init-from"] = brought
    if "text" in cli_flags:
        layers["--text"] = dist.once(lambda: presets.text_flags(merge(layers), recipe, existing_tokenizer))
    elif cli_flags.get("demo"):
        layers["--demo"] = presets.demo_flags(merge(layers), recipe)
        if not resume:
            layers["--demo"] = {**layers["--demo"], "out": dist.once(lambda: first_free(out))}
    return start


def _conflicts(cli_flags: Mapping[str, Any], out: str) -> Iterator[str]:
    """Describes which flags of a new run or a fork conflict with each other, or need another one."""
    if cli_flags.get("demo") and "text" in cli_flags:
        yield "--demo brings its own text. Leave out --text, or --demo."
    if "text" in cli_flags and "data" in cli_flags:
        yield "--text makes its own shards, in --out. Leave out --data, or use --data without --text."
    if "fork" in cli_flags:
        return
    if "init_from" in cli_flags:
        brought = [flag_words(name, x) for name, x in cli_flags.items() if TRAIN_FLAGS[name].init_from == "brings"]
        if brought:
            yield f"--init-from brings its own model. Leave out {', '.join(brought)}."
        if Path(cli_flags["init_from"]) == Path(out):
            yield f"--out and --init-from are both {out}. Use another --out."
    elif "lora_rank" in cli_flags:
        yield "--lora-rank needs pretrained weights to adapt. Pass them with --init-from."
    if "text" not in cli_flags:
        of_text = {"text_field"} if "init_from" in cli_flags else {"text_field", "tokenizer"}
        for name in map(flag_name, sorted(of_text & cli_flags.keys())):
            yield f"{name} is for --text. Add --text, or leave out {name}."


# -----------------------------------------------------------------------------
# A run that starts from a checkpoint


def _resume(cli_flags: dict[str, Any], checkpoint: Checkpoint, dist: Distributed) -> Start:
    """Returns the start of a run that resumes from `checkpoint`, with the flags stored in it.

    Raises:
        UserError: flags would change the run. The message has a line for each, and a command for a fork with them.
    """
    stored, out = _stored_flags(checkpoint, cli_flags, dist), checkpoint.path.parent
    if (fork := cli_flags.pop("fork", None)) and (
        not stored["fork"] or Path(fork).resolve() != Path(stored["fork"]).resolve()
    ):
        raise UserError(f"{out} already has a run that is not a fork of {fork}. Use another --out.")
    changes = [
        change
        for change in changed_flags(TRAIN_FLAGS, stored, cli_flags)
        if TRAIN_FLAGS[change[0]].resume == "keeps" and change[0] not in _flags_that_may_move(stored)
    ]
    if changes:
        problems = [
            f"{flag_name(name)} is {new}, but the run in {out} has {'none' if had is None else had}. Leave it out."
            for name, had, new in changes
        ]
        # another field of the text would need another --text, too
        of_fork = [
            change for change in changes if TRAIN_FLAGS[change[0]].fork == "changes" and change[0] != "text_field"
        ]
        if words := [flag_words(name, new) for name, _, new in of_fork]:
            is_over = Schedule(TrainConfig(**stored)).is_over(checkpoint.step, checkpoint.progress)
            changes_length = bool(cli_flags.keys() & LENGTH_FLAGS)
            earlier = newest_before_cooldown(out) if is_over or changes_length else None
            parent = earlier or checkpoint.path
            command = f"python train_gpt2.py --fork {shlex.quote(str(parent))} --out NEW {' '.join(words)}"
            has_steps = cli_flags.get("max_steps", sys.maxsize) > step_of(parent)
            if has_steps and (earlier or changes_length or not is_over):  # at the end, nothing is left to train
                problems.append(f"A fork can have other flags: {command}")
        raise UserError(*problems)
    start = Start(checkpoint=checkpoint)
    cli_flags |= {"out": str(out), "resume": "newest"}
    data = _find_data(stored | cli_flags, stored, checkpoint.path)
    start.layers.update({"command line": cli_flags, "checkpoint": stored | {"data": data}})
    return start


def _fork(cli_flags: dict[str, Any], checkpoint: Checkpoint, dist: Distributed) -> Start:
    """Returns the start of a new run from `checkpoint`, with the flags stored in it.

    Raises:
        UserError: the model would have another shape, or there is nothing left to train; one line each.
    """
    stored, path = _stored_flags(checkpoint, cli_flags, dist), checkpoint.path
    changes = changed_flags(TRAIN_FLAGS, stored, cli_flags)
    problems = [
        f"{flag_name(name)} is {new}, but the model in {path} has {had}. A fork keeps its shape. Leave it out."
        for name, had, new in changes
        if TRAIN_FLAGS[name].fork == "keeps"
    ]
    brought = [x for x in cli_flags if TRAIN_FLAGS[x].fork == "brings" and x not in _flags_that_may_move(stored)]
    problems += [f"--fork brings its own model. Leave out {flag_name(name)}." for name in brought]
    if problems:
        raise UserError(*problems)
    changed = {name for name, _, _ in changes}
    kept = {name: value for name, value in stored.items() if not changed & {*TRAIN_FLAGS[name].follows.split()}}
    if cli_flags.keys() & LENGTH_FLAGS:
        kept |= presets.flags_for_length(stored, cli_flags.get("max_steps"))
    config = TrainConfig(**stored | kept | cli_flags)
    schedule, steps, seconds = Schedule(config), checkpoint.step, checkpoint.seconds
    passes = 0.0 if cli_flags.keys() & {"data", "text"} else checkpoint.passes  # other data begin at their first row
    # the seconds of a run that has used up its time are a little less, without its start
    had_this_end = checkpoint.progress >= 1 and (config.minutes, config.max_passes) == (
        stored["minutes"],
        stored["max_passes"],
    )
    is_over = schedule.is_over(steps, schedule.progress(steps, schedule.time_used(seconds), passes))
    if is_over or config.minutes and had_this_end:
        raise UserError(
            f"{path} was trained for {steps:,} steps and {seconds / 60:.1f} minutes. For a longer run, use a higher "
            "--max-steps or --minutes; or fork an earlier checkpoint."
        )
    if "data" in cli_flags:
        kept |= {"text": None, "demo": False}
    elif "text" in cli_flags:
        tokenizer = tokenizer_of_model(path, huggingface.read_config(path)["vocab_size"])
        kept |= {"data": str(Path(cli_flags["out"]) / "data"), "tokenizer": tokenizer.name, "demo": False}
    else:
        kept["data"] = _find_data(kept | cli_flags, stored, path)
    start = Start(checkpoint=checkpoint, forked=True)
    start.layers.update({"command line": cli_flags, "checkpoint": kept})
    return start


def _flags_that_may_move(stored: Mapping[str, Any]) -> set[str]:
    """Returns the flag that names the base model of LoRA, which may have moved; `identify_data` compares its weights."""
    return {"init_from"} if stored.get("lora_rank") else set()


def find_once_per_node(name_or_dir: str, dist: Distributed) -> Path:
    """Calls `huggingface.find_model` on one rank of each node."""
    return dist.once(lambda: huggingface.find_model(name_or_dir), per_node=True)


def _stored_flags(checkpoint: Checkpoint, cli_flags: Mapping[str, Any], dist: Distributed) -> dict[str, Any]:
    """Returns the flags of the run that wrote a checkpoint. With LoRA, it first checks that the base model can be found."""
    if checkpoint.config.get("lora_rank"):
        try:
            find_once_per_node(cli_flags.get("init_from", checkpoint.config["init_from"]), dist)
        except UserError as error:
            raise error.with_hint(f"If the base model of {checkpoint.path} has moved, use --init-from.") from error
    if unknown := sorted(checkpoint.config.keys() - TRAIN_FLAGS.keys()):  # it would be dropped without a word
        raise OtherVersionError(
            f"{checkpoint.path} was written by another version of the trainer, with {flag_name(unknown[0])}. Continue with "
            "that version, or start from its weights with --init-from, in another --out."
        )
    return {name: value for name, value in checkpoint.config.items() if TRAIN_FLAGS[name].stored}


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
