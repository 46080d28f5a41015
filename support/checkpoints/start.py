"""The start of a run: its flags, merged from several places, and checks before anything is written or allocated."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from support.checkpoints import huggingface, run_folder
from support.checkpoints.directory import CONTENTS, newest_checkpoint
from support.checkpoints.resume import find_once_per_node, flags_to_fork, flags_to_resume
from support.checkpoints.state import Checkpoint
from support.cli import UserError, flag_name, flag_words
from support.console.trackers import check_installed
from support.data.presets import DEMO, make_preset_shards, preset_flags
from support.data.shards import TokenData
from support.data.tokenizer import TOKENIZER_JSON, Tokenizer, tokenizer_of_model
from support.files import first_free
from support.runtime.distributed import Distributed
from support.runtime.memory import check_training_fits
from support.runtime.options import PLAN_FLAGS
from support.runtime.preflight import check_facts_agree

if TYPE_CHECKING:
    from train_gpt2 import TrainConfig


def gather_flags(
    config_class: type[TrainConfig], cli_flags: Mapping[str, Any], dist: Distributed
) -> tuple[dict[str, Any], Checkpoint | None]:
    """Returns the flags that a run sets (others keep their defaults), and the checkpoint that it resumes from or forks.

    The flags come from the command line, a preset, pretrained weights and a checkpoint. One rank of each node downloads
    pretrained weights and compares checkpoints with their checksums.

    Args:
        cli_flags: the flags on the command line.

    Raises:
        UserError: flags contradict each other or the checkpoint, one line each; or there is no intact checkpoint.
    """
    if not cli_flags.get("plan") and (unused := sorted(PLAN_FLAGS & cli_flags.keys() - {"plan"})):
        raise UserError(f"{' and '.join(map(flag_name, unused))}: only for --plan. Add --plan, or leave it out.")
    if not cli_flags.get("plan"):
        dist.on_rank_zero(lambda: check_installed(cli_flags))  # before anything is downloaded or made
    resume = cli_flags.get("resume")
    if "fork" in cli_flags and "out" not in cli_flags:
        raise UserError("--fork starts another run. Name its folder with --out.")
    out = str(cli_flags.get("out", DEMO["out"] if cli_flags.get("demo") else "log"))
    if resume:
        newest = dist.once_per_node(lambda: newest_checkpoint(out))
        check_facts_agree(dist, {"the checkpoint": newest.name if newest else "none"})
        if newest:
            resumed = Checkpoint.open(newest)
            dist.on_rank_zero(lambda: check_installed(resumed.config))
            return flags_to_resume(config_class, cli_flags, resumed, dist), resumed
        if resume == "newest":
            raise UserError(
                f"no checkpoint in {out} to resume from. Pass the run's folder with --out, or start anew with --resume auto."
            )
    if problems := _conflicts(config_class, cli_flags, out):
        raise UserError(*problems)
    if cli_flags.get("demo") and "out" not in cli_flags and not resume:
        cli_flags = {**cli_flags, "out": dist.once(lambda: first_free(out))}
    checkpoint: Checkpoint | None = None
    if "fork" in cli_flags:
        directory = find_once_per_node(cli_flags["fork"], dist)
        if not (directory / CONTENTS).is_file():
            raise UserError(f"{directory} is not a checkpoint: it has no {CONTENTS}. Use another one, or --init-from.")
        check_facts_agree(dist, {"the checkpoint": directory.name})
        checkpoint = Checkpoint.open(directory)
        dist.on_rank_zero(lambda: check_installed(checkpoint.config))
        flags = flags_to_fork(config_class, cli_flags, checkpoint, dist)
    elif "init_from" in cli_flags:
        directory = find_once_per_node(cli_flags["init_from"], dist)
        sizes = huggingface.read_config(directory)
        flags = {name: sizes[name] for name in config_class.SHAPE_FLAGS & sizes.keys()}
        if cli_flags.keys() & {"plan", "text", "tokenizer"}:
            flags["tokenizer"] = tokenizer_of_model(directory, sizes["vocab_size"], cli_flags.get("tokenizer")).name
        flags |= preset_flags(cli_flags, flags.get("tokenizer"), sizes["n_embd"], sizes["block_size"])
        flags |= cli_flags
    else:
        flags = preset_flags(cli_flags) | dict(cli_flags)
    _check_length(flags, cli_flags)
    return flags, checkpoint


def _check_length(flags: Mapping[str, Any], cli_flags: Mapping[str, Any]) -> None:
    """Raises a UserError, with a line for each flag that counts steps in a run with --minutes."""
    if flags.get("minutes"):
        counted = [flag_name(name) for name in ("max_steps", "decay_steps", "warmup_steps") if name in cli_flags]
        why = f"counts steps. Leave it out, or use --max-steps instead of this run's --minutes {flags['minutes']:g}."
        if counted:
            raise UserError(*(f"{flag} {why}" for flag in counted))


def _conflicts(config_class: type[TrainConfig], cli_flags: Mapping[str, Any], out: str) -> list[str]:
    """Describes which flags of a new run or a fork conflict with each other, or need another one."""
    problems = []
    if cli_flags.get("demo") and "text" in cli_flags:
        problems.append("--demo brings its own text. Leave out --text, or --demo.")
    if "text" in cli_flags and "data" in cli_flags:
        problems.append("--text makes its own shards, in --out. Leave out --data, or use --data without --text.")
    if "fork" in cli_flags:
        return problems
    if "init_from" in cli_flags:
        shape = {"model", *config_class.SHAPE_FLAGS} - {"block_size"}  # a shorter context is possible
        if given := [flag_words(name, value) for name, value in cli_flags.items() if name in shape]:
            problems.append(f"--init-from brings its own model. Leave out {', '.join(given)}.")
        if Path(cli_flags["init_from"]) == Path(out):
            problems.append(f"--out and --init-from are both {out}. Use another --out.")
    elif "lora_rank" in cli_flags:
        problems.append("--lora-rank needs pretrained weights to adapt. Pass them with --init-from.")
    return problems


def check_folder_and_make_shards(config: TrainConfig, checkpoint: Checkpoint | None) -> None:
    """Checks the run's folder, then makes the shards of --text and --demo.

    One rank calls it for all ranks, as they share the folder.

    Raises:
        UserError: a check failed, or the shards could not be made.
    """
    run_folder.check_folder(config, None if config.starts_fork else checkpoint)
    if config.demo or config.text is not None:
        in_out = Path(config.data) == Path(config.out) / "data"
        has_own_shards = config.starts_fork and in_out
        keeps_shards = checkpoint is not None and config.text == checkpoint.config["text"] and not has_own_shards
        may_replace = in_out and not run_folder.has_run(Path(config.out))
        model = _first_model(config, checkpoint) if config.fork or config.init_from else None
        make_preset_shards(config, keeps_shards, may_replace, model)


def _first_model(config: TrainConfig, checkpoint: Checkpoint | None) -> Path | None:
    """Returns the folder of the checkpoint or the pretrained model that this process starts from; None for a new model."""
    if checkpoint is not None:
        return checkpoint.path
    return None if config.init_from is None else huggingface.find_model(config.init_from, verify=False)


def open_data(config: TrainConfig, checkpoint: Checkpoint | None, dist: Distributed) -> TokenData:
    """Opens the shards of a run. Checks that they have enough tokens, and that training fits into memory.

    Raises:
        UserError: a check failed.
    """
    data = TokenData.open(config.data, config.val_every != 0, _first_model(config, checkpoint))
    T = config.block_size
    val_tokens = None if config.val_every == 0 else config.val_tokens
    data.check_rows(T, config.total_batch_size // T, val_tokens, config.shuffle)
    check_training_fits(config, data.tokenizer.vocab_size, dist)
    return data


def check_pretrained(
    source: str | Path, vocab_size: int, context: int, tokenizer: Tokenizer, config: TrainConfig
) -> None:
    """Checks that pretrained weights with this vocabulary size and context fit a run and the `tokenizer` of its shards.

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
    if config.block_size > context:
        raise UserError(f"{source} has a context of {context} tokens. Leave out --block-size, or lower it.")
