"""The start of a run: its flags, merged from several places, and checks before anything is written or allocated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.checkpoints import huggingface, run_folder
from support.checkpoints.directory import CONTENTS, newest_checkpoint
from support.checkpoints.resume import find_once_per_node, flags_to_fork, flags_to_resume
from support.checkpoints.state import Checkpoint
from support.cli import Flag, UserError, flag_name, flag_words
from support.config import Options
from support.data.tokenizer import TOKENIZER_JSON, Tokenizer, tokenizer_of_model
from support.files import first_free
from support.runtime.distributed import Distributed
from support.runtime.preflight import check_facts_agree
from support.sizing.presets import DEMO, make_preset_shards, preset_flags


@dataclass(frozen=True)
class Start:
    """How a process starts: a new run, one that is resumed, or one that begins with a checkpoint of another run."""

    flags: dict[str, Any]  # that are set; others keep their defaults
    checkpoint: Checkpoint | None = None  # of the run that is resumed or forked
    forked: bool = False

    @property
    def resumed(self) -> Checkpoint | None:
        """The checkpoint, if it is this run's own."""
        return None if self.forked else self.checkpoint


NEW_RUN = Start({})


def gather_flags(
    known: Mapping[str, Flag], cli_flags: Mapping[str, Any], dist: Distributed, planned: bool = False
) -> Start:
    """Finds out how this process starts, and gathers its flags from the command line, a preset, pretrained weights and a
    checkpoint.

    One rank of each node downloads pretrained weights and compares checkpoints with their checksums.

    Args:
        known: all flags, with the rules that say what may happen to them.
        cli_flags: the flags on the command line.
        planned: --plan needs to know the tokenizer of pretrained weights.

    Raises:
        UserError: flags contradict each other or the checkpoint, one line each; or there is no intact checkpoint.
    """
    resume = cli_flags.get("resume")
    if "fork" in cli_flags and "out" not in cli_flags:
        raise UserError("--fork starts another run. Name its folder with --out.")
    out = str(cli_flags.get("out", DEMO["out"] if cli_flags.get("demo") else "log"))
    if resume:
        newest = dist.once_per_node(lambda: newest_checkpoint(out))
        check_facts_agree(dist, {"the checkpoint": newest.name if newest else "none"})
        if newest:
            resumed = Checkpoint.open(newest)
            return Start(flags_to_resume(known, cli_flags, resumed, dist), resumed)
        if resume == "newest":
            raise UserError(
                f"no checkpoint in {out} to resume from. Pass the run's folder with --out, or start anew with --resume auto."
            )
    if problems := _conflicts(known, cli_flags, out):
        raise UserError(*problems)
    if cli_flags.get("demo") and "out" not in cli_flags and not resume:
        cli_flags = {**cli_flags, "out": dist.once(lambda: first_free(out))}
    if "fork" in cli_flags:
        directory = find_once_per_node(cli_flags["fork"], dist)
        if not (directory / CONTENTS).is_file():
            raise UserError(f"{directory} is not a checkpoint: it has no {CONTENTS}. Use another one, or --init-from.")
        check_facts_agree(dist, {"the checkpoint": directory.name})
        forked = Checkpoint.open(directory)
        start = Start(flags_to_fork(known, cli_flags, forked, dist), forked, forked=True)
    elif "init_from" in cli_flags:
        directory = find_once_per_node(cli_flags["init_from"], dist)
        sizes = huggingface.read_config(directory)
        flags = {name: sizes[name] for name in known.keys() & sizes.keys()}
        if planned or cli_flags.keys() & {"text", "tokenizer"}:
            flags["tokenizer"] = tokenizer_of_model(directory, sizes["vocab_size"], cli_flags.get("tokenizer")).name
        flags |= preset_flags(cli_flags, flags.get("tokenizer"), sizes["n_embd"], sizes["block_size"])
        start = Start(flags | dict(cli_flags))
    else:
        start = Start(preset_flags(cli_flags) | dict(cli_flags))
    if minutes := start.flags.get("minutes"):
        why = f"counts steps. Leave it out, or use --max-steps instead of this run's --minutes {minutes:g}."
        if counted := [flag_name(name) for name in cli_flags if known[name].counts_steps]:
            raise UserError(*(f"{flag} {why}" for flag in counted))
    return start


def _conflicts(known: Mapping[str, Flag], cli_flags: Mapping[str, Any], out: str) -> list[str]:
    """Describes which flags of a new run or a fork conflict with each other, or need another one."""
    problems = []
    if cli_flags.get("demo") and "text" in cli_flags:
        problems.append("--demo brings its own text. Leave out --text, or --demo.")
    if "text" in cli_flags and "data" in cli_flags:
        problems.append("--text makes its own shards, in --out. Leave out --data, or use --data without --text.")
    if "fork" in cli_flags:
        return problems
    if "init_from" in cli_flags:
        brought = [flag_words(name, value) for name, value in cli_flags.items() if known[name].init_from == "brings"]
        if brought:
            problems.append(f"--init-from brings its own model. Leave out {', '.join(brought)}.")
        if Path(cli_flags["init_from"]) == Path(out):
            problems.append(f"--out and --init-from are both {out}. Use another --out.")
    elif "lora_rank" in cli_flags:
        problems.append("--lora-rank needs pretrained weights to adapt. Pass them with --init-from.")
    return problems


def check_folder_and_make_shards(config: Options, start: Start, base: str | None) -> None:
    """Checks the run's folder, then makes the shards of --text and --demo.

    One rank calls it for all ranks, as they share the folder.

    Args:
        base: the pretrained model that training starts from.

    Raises:
        UserError: a check failed, or the shards could not be made.
    """
    checkpoint = start.checkpoint
    run_folder.check_folder(config, start.resumed)
    if config.has_preset:
        in_out = Path(config.data) == Path(config.out) / "data"
        has_own_shards = start.forked and in_out
        keeps_shards = checkpoint is not None and config.text == checkpoint.config["text"] and not has_own_shards
        may_replace = in_out and not run_folder.has_run(Path(config.out))
        model = first_model(checkpoint, base) if config.fork or base else None  # which brings its tokenizer
        make_preset_shards(config, keeps_shards, may_replace, model)


def first_model(checkpoint: Checkpoint | None, base: str | None) -> Path | None:
    """Returns the folder of the checkpoint or the pretrained model that this process starts from; None for a new model."""
    if checkpoint is not None:
        return checkpoint.path
    return None if base is None else huggingface.find_model(base, verify=False)


def check_pretrained(
    source: str | Path, vocab_size: int, context: int, tokenizer: Tokenizer, config: Options, block_size: int
) -> None:
    """Checks that pretrained weights with this vocabulary size and context fit a run and the `tokenizer` of its shards.

    Args:
        block_size: the context of the run.

    Raises:
        UserError: they do not fit.
    """
    directory = huggingface.find_model(source, verify=False)
    stated = None if (directory / TOKENIZER_JSON).exists() else config.tokenizer
    pretrained = tokenizer_of_model(directory, vocab_size, stated)
    if not pretrained.is_same_as(tokenizer):
        raise UserError(
            f"{source} has a different tokenizer from the shards in {config.data}: {vocab_size:,} tokens instead of "
            f"{tokenizer.vocab_size:,} ({tokenizer.name}). Make shards with the model's tokenizer, in another folder: "
            f"fineweb.py --tokenizer {pretrained.name}{f' --tokenizer-from {source}' * (pretrained.name == 'bpe')}."
        )
    if block_size > context:
        raise UserError(f"{source} has a context of {context} tokens. Leave out --block-size, or lower it.")
