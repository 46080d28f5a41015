"""The start of a run: merges the flags of the command line, a preset, pretrained weights and the resumed checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from support.checkpoints import huggingface, lora
from support.checkpoints.directory import newest_checkpoint
from support.checkpoints.huggingface import ModelSizes
from support.checkpoints.resume import resumed_flags, stored_flags
from support.checkpoints.run_folder import check_folder, find_replaced_models
from support.checkpoints.state import Checkpoint
from support.cli import UserError, flag_name
from support.console.log import seconds_trained
from support.console.trackers import check_installed
from support.data import presets
from support.data.presets import DEMO, make_preset_shards, preset_flags
from support.data.shards import TokenData
from support.data.tokenizer import VOCAB_SIZES, Tokenizer, get_tokenizer, tokenizer_name
from support.runtime.distributed import Distributed
from support.runtime.memory import check_training_fits
from support.runtime.options import PLAN_FLAGS, RunOptions

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    Config = TypeVar("Config", bound=DataclassInstance)


def gather_flags(
    config_class: type[Config], cli_flags: Mapping[str, Any], dist: Distributed
) -> tuple[dict[str, Any], Checkpoint | None]:
    """All flags that a run has a value for, and the checkpoint that it resumes from, if any.

    Pretrained weights and checkpoints are downloaded and compared with their checksums here, by one rank of each node.

    Args:
        cli_flags: the flags on the command line.

    Raises:
        UserError: flags contradict each other or the checkpoint, one line each; or there is no intact checkpoint.
    """
    if not cli_flags.get("plan") and (unused := sorted(PLAN_FLAGS & cli_flags.keys() - {"plan"})):
        raise UserError(f"{' and '.join(map(flag_name, unused))}: only for --plan. Add --plan, or leave it out.")
    out = str(cli_flags.get("out", DEMO["out"] if cli_flags.get("demo") else "log"))
    if "resume" in cli_flags:
        newest = dist.once_per_node("checkpoint", lambda: str(_newest_checkpoint(out) or ""))
        if newest:
            return _flags_to_resume(config_class, cli_flags, Checkpoint.open(Path(newest)), dist)
        if cli_flags["resume"] == "newest":
            raise UserError(
                f"no checkpoint in {out} to resume from. Pass its folder with --out, or leave out --resume."
            )
    if problems := lora.flag_conflicts(cli_flags) + _init_from_conflicts(cli_flags, out):
        raise UserError(*problems)
    if "init_from" not in cli_flags:
        return preset_flags(cli_flags) | dict(cli_flags), None
    directory = _find_once_per_node(cli_flags["init_from"], dist)
    if "lora_rank" in cli_flags and huggingface.is_adapter(directory):
        raise UserError(
            f"{cli_flags['init_from']} is an adapter, and another one needs a complete model. Merge it into its base model "
            "first, as docs/training.md shows."
        )
    sizes = huggingface.read_config(directory)
    flags: dict[str, Any] = {name: sizes[name] for name in ("n_layer", "n_head", "n_embd", "block_size", "bias")}
    if cli_flags.get("plan") or "text" in cli_flags:
        name = tokenizer_name(huggingface.tokenizer_folder(directory), sizes["vocab_size"])
        flags["tokenizer"] = name if name in VOCAB_SIZES else "bpe"
    return flags | preset_flags(cli_flags, flags.get("tokenizer"), sizes["n_embd"]) | dict(cli_flags), None


def _newest_checkpoint(out: str) -> Path | None:
    newest = newest_checkpoint(out)
    return newest_checkpoint(out) if newest is None and find_replaced_models(Path(out)) else newest


def check_and_open_data(config: RunOptions, dist: Distributed, checkpoint: Checkpoint | None) -> TokenData:
    """Checks what a run needs before anything is written or allocated, and opens its shards.

    On rank 0: that it may write into its folder, and that its trackers are installed. Then the shards, of which those of
    --text and --demo are made first unless they exist, and that the model fits into memory.

    Raises:
        UserError: a check failed, or the shards could not be made.
    """
    if dist.rank == 0:
        check_folder(config, checkpoint)
        check_installed(config)
    if config.demo or config.text is not None:
        make_preset_shards(config, dist.rank, resumed=checkpoint is not None)
    data = TokenData.open(config.data, needs_val=config.val_every > 0)
    T = config.block_size
    data.check_rows(T, config.total_batch_size // T, config.val_tokens if config.val_every else None)
    check_training_fits(config, data.tokenizer.vocab_size, dist)
    return data


def _flags_to_resume(
    config_class: type[Config], cli_flags: Mapping[str, Any], checkpoint: Checkpoint, dist: Distributed
) -> tuple[dict[str, Any], Checkpoint]:
    """The flags of a run that is resumed from `checkpoint`, or if it becomes longer, from the one before its cooldown.

    Raises:
        UserError: as `gather_flags`.
    """

    def read(checkpoint: Checkpoint) -> tuple[dict[str, Any], RunOptions]:
        stored = stored_flags(config_class, checkpoint, _sizes_of(checkpoint, cli_flags, dist))
        return stored, cast("RunOptions", config_class(**stored))

    stored, before = read(checkpoint)
    out, length = checkpoint.path.parent, dict[str, Any]()
    if "minutes" in cli_flags and cli_flags["resume"] == "auto":  # the command that started the run
        cli_flags = {name: value for name, value in cli_flags.items() if name != "minutes"}
        dist.print0("note    --resume auto does not make a run longer, --resume does: this one keeps its length")
    if _is_longer(cli_flags, before):
        if cli_flags.get("checkpoint_every") == 0:
            raise UserError("--checkpoint-every 0 would lose the longer run. Leave it out.")
        if checkpoint.step > before.cooldown_start:
            path = dist.once_per_node("longer", lambda: str(newest_checkpoint(out, before.cooldown_start) or ""))
            if path:
                checkpoint = Checkpoint.open(Path(path))
                stored, before = read(checkpoint)
            elif "minutes" in cli_flags:
                raise UserError(
                    f"{out} has no checkpoint of step {before.cooldown_start} or earlier, before the cooldown, to continue "
                    "from for more minutes. Use --max-steps, or a new run with another --out."
                )
        if checkpoint.step <= before.cooldown_start:
            length = _new_length(cli_flags, before, checkpoint, dist)
            checkpoint = replace(checkpoint, replaces_later=True)
    schedule_end = {name: cli_flags[name] for name in ("decay_steps", "cooldown_fraction") if name in cli_flags}
    ends = before, cast("RunOptions", replace(cast("DataclassInstance", before), **length | schedule_end))
    movable = all(config.schedule == "wsd" and checkpoint.step <= config.cooldown_start for config in ends)
    flags = resumed_flags(config_class, stored, cli_flags, checkpoint, schedule_end if movable else ())
    return flags | {name: v for name, v in length.items() if name == "minutes" or name not in cli_flags}, checkpoint


def _is_longer(cli_flags: Mapping[str, Any], before: RunOptions) -> bool:
    """Whether the flags make a run longer, or its length another one, by moving its cooldown.

    Raises:
        UserError: they are for a run of another kind.
    """
    if "minutes" not in cli_flags:
        if before.open_ended:
            if "decay_steps" in cli_flags and "max_steps" not in cli_flags:
                raise UserError("--decay-steps needs --max-steps, instead of --minutes.")
            return "max_steps" in cli_flags
        ends_together = before.decay_steps == before.max_steps and "decay_steps" not in cli_flags
        return before.schedule == "wsd" and ends_together and cli_flags.get("max_steps", 0) > before.max_steps
    if before.text is None and not before.demo:
        raise UserError("--minutes is for --text and --demo. Use --max-steps.")
    if before.schedule != "wsd":
        raise UserError("--minutes needs --schedule wsd, and this run has a cosine. Use --max-steps.")
    if conflicts := [flag_name(name) for name in ("max_steps", "decay_steps") if name in cli_flags]:
        raise UserError(f"--minutes chooses the number of steps. Leave out {' and '.join(conflicts)}, or --minutes.")
    return True


def _new_length(
    cli_flags: Mapping[str, Any], before: RunOptions, checkpoint: Checkpoint, dist: Distributed
) -> dict[str, Any]:
    """The flags of the new length of a run that is resumed from `checkpoint`, at a constant learning rate."""
    if "minutes" not in cli_flags:
        steps = cli_flags["max_steps"]
        # after --minutes, the fraction is what there was time for
        fraction = before.cooldown_fraction if before.minutes is None else presets.TIMED_COOLDOWN_FRACTION
        cooldown_fraction = min(fraction, max(0, steps - checkpoint.step) / steps)
        length = presets.flags_for_length(before, steps)
        return {**length, "minutes": None, "cooldown_fraction": cooldown_fraction}
    trained = dist.once("seconds", lambda: str(seconds_trained(checkpoint.path.parent, checkpoint.step)))
    return presets.flags_for_open_end(cli_flags["minutes"] + float(trained) / 60)


def _sizes_of(checkpoint: Checkpoint, cli_flags: Mapping[str, Any], dist: Distributed) -> ModelSizes:
    """The sizes of the model in a checkpoint. For an adapter, those of its base model, which may have moved."""
    if checkpoint.config.get("lora_rank"):
        base = cli_flags.get("init_from", checkpoint.config.get("init_from"))
        if not isinstance(base, str):
            raise UserError(
                f"cannot resume from {checkpoint.path}: trainer.pt does not name the base model. Pass it with --init-from."
            )
        try:
            return huggingface.read_config(_find_once_per_node(base, dist))
        except UserError as error:
            raise error.with_hint(f"If the base model of {checkpoint.path} has moved, use --init-from.") from error
    return huggingface.read_config(checkpoint.path)


def _find_once_per_node(name_or_dir: str, dist: Distributed) -> Path:
    return Path(dist.once_per_node("init_from", lambda: str(huggingface.find_model(name_or_dir))))


def _init_from_conflicts(cli_flags: Mapping[str, Any], out: str) -> list[str]:
    """A sentence for each of the given flags that --init-from rules out."""
    if "init_from" not in cli_flags:
        return []
    problems, defaults = [], {"n_layer": None, "n_head": None, "n_embd": None, "model": "gpt2", "bias": True}
    sized = [name for name, default in defaults.items() if cli_flags.get(name, default) != default]
    if sized:
        named = ", ".join("--no-bias" if name == "bias" else flag_name(name) for name in sized)
        problems.append(f"--init-from brings its own sizes. Leave out {named}.")
    if Path(cli_flags["init_from"]) == Path(out):
        problems.append(f"--out is {out}, as --init-from. Use another --out.")
    return problems


def check_pretrained(
    source: str | Path, vocab_size: int, context: int, tokenizer: Tokenizer, config: RunOptions
) -> None:
    """Checks that pretrained weights of a vocabulary and a context fit the shards of a run and its context.

    Args:
        tokenizer: of the shards.

    Raises:
        UserError: they do not.
    """
    if vocab_size != tokenizer.vocab_size:
        raise UserError(
            f"{source} has a vocabulary of {vocab_size:,} tokens, and the shards in {config.data} one of "
            f"{tokenizer.vocab_size:,} ({tokenizer.name}). Use --data with shards made with its tokenizer; "
            "with --text, its --tokenizer and another --out."
        )
    folder = huggingface.tokenizer_folder(huggingface.find_model(source, verify=False))
    name = tokenizer_name(folder, vocab_size)
    if name != tokenizer.name and not get_tokenizer(name).is_same_as(tokenizer):
        raise UserError(
            f"{source} has another tokenizer than the shards in {config.data}. Make shards with its tokenizer: --tokenizer "
            f"{name if name in VOCAB_SIZES else f'bpe --tokenizer-from {source}'}."
        )
    if config.block_size > context:
        raise UserError(f"{source} has a context of {context} tokens. Leave out --block-size, or lower it.")
