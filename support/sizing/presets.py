"""The flags that --demo and --text set, and their shards."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from support import startup
from support.cli import Tables, UserError, print_lines
from support.config import TrainConfig
from support.data import shards
from support.data.bpe import HELD_OUT, fitting_vocab_size, train_bpe
from support.data.demo_text import DEMO_VOCAB_SIZE, demo_corpus
from support.data.encode import usable_cores
from support.data.make_shards import SHARD_SIZE, VAL_FRACTION, make_shards
from support.data.output_folder import OtherShardsError, remove_shards
from support.data.text_files import TextFiles, estimate_text, find_input
from support.data.tokenizer import VOCAB_SIZES, Tokenizer, get_tokenizer, to_utf8
from support.runtime.memory import block_weights

SHORT_COOLDOWN = 0.7  # --cooldown-fraction of --text and --demo: a short run gains from a long cooldown
DEMO_TEXT_BYTES, DEMO_MINUTES = 1e7, 2.0
DEMO_STEPS, DEMO_STEP_SIZE = 1200, 2048  # nearly a pass over the text
DEMO: dict[str, Any] = dict(
    data="demo_data", out="log_demo", n_layer=3, n_head=2, n_embd=128, block_size=64, batch_size=32,
    recipe="fast", total_batch_size=DEMO_STEP_SIZE, max_steps=DEMO_STEPS, cooldown_fraction=SHORT_COOLDOWN, shuffle=True,
    val_tokens=131072, hellaswag_every=0, sample_every=0,
)  # fmt: skip
MODEL_FLAGS = {"n_layer", "n_head", "n_embd", "block_size"}
MODELS_FOR_TEXT: tuple[dict[str, int], ...] = (
    dict(n_layer=3, n_head=2, n_embd=96, block_size=64, batch_size=32),
    dict(n_layer=3, n_head=2, n_embd=128, block_size=64, batch_size=32),
    dict(n_layer=4, n_head=2, n_embd=128, block_size=64, batch_size=32),
    dict(n_layer=6, n_head=3, n_embd=192, block_size=128, batch_size=16),
    dict(n_layer=6, n_head=4, n_embd=256, block_size=256),
    dict(n_layer=8, n_head=8, n_embd=512, block_size=512),
    dict(n_layer=12, n_head=12, n_embd=768, block_size=1024),  # gpt2
)
# A model reads at least this many bytes of text, repetitions included, per weight of its blocks (measured, see
# docs/measurements/small-models.md). It never has more such weights than the text has bytes, or it would memorize the text.
BYTES_PER_WEIGHT = 7
BYTES_PER_TOKEN = {"gpt2": 4.0, "bytes": 1.0, "bpe": 3.0}  # of English
BYTES_PER_TOKEN_OF_SMALL_BPE = {512: 2.0, 1024: 2.5}  # by the size of the vocabulary
MIN_TOKENS = {"gpt2": 1.65e6, "bytes": 2.4e6, "bpe": 1.65e6}  # a text with fewer tokens is read several times
# A text is read at most MAX_PASSES times without dropout, and MAX_PASSES_WITH_DROPOUT times with it: more would only memorize it.
MAX_PASSES, MAX_PASSES_WITH_DROPOUT, MOST_DROPOUT = 10, 25, 0.1
TINY_TEXT = 1e5  # bytes; a run on less says what little can be learned from it
MAX_BPE_TEXT = 4e8  # bytes; a larger text gets GPT-2's tokens
LARGE_TEXT = 4e9  # bytes, of which a shard is about a tenth
ENCODED_CHARS = 2**17  # of a text are encoded to see how long its tokens are


@dataclass(frozen=True)
class TextSize:
    """Estimates of a text whose shards are not made yet."""

    bytes: float
    characters: float
    tokenizer: str  # gpt2, bytes or bpe
    bytes_per_token: float

    @property
    def train_tokens(self) -> float:
        """The tokens that are trained on: the last tenth is held out."""
        return 0.9 * self.bytes / self.bytes_per_token

    @property
    def vocab_size(self) -> int:
        """The size of the vocabulary of an encoding that is trained on the text, if the model is large enough for it."""
        return fitting_vocab_size((1 - HELD_OUT) * self.characters)


def measure_text(
    text: str | None, field: str = "text", tokenizer: str | None = None, existing_tokenizer: Tokenizer | None = None
) -> TextSize:
    """Returns estimates of the text that --text names, or of the demo's text if `text` is None.

    Args:
        tokenizer: gpt2, bytes or bpe (default: bpe, or gpt2 for a large text).
        existing_tokenizer: the tokenizer, if it exists already; it encodes the beginning of the text.

    Raises:
        UserError: there is no text, or it cannot be read.
    """
    if text is None:
        return TextSize(DEMO_TEXT_BYTES, DEMO_TEXT_BYTES, "bpe", BYTES_PER_TOKEN["bpe"])
    size, beginning = estimate_text(find_input([text]), field)
    if not size:
        raise UserError(f"there is no text in {text}. Use another file or folder.")
    bytes_per_character = len(to_utf8(beginning)) / max(1, len(beginning)) or 1.0
    name = tokenizer or ("bpe" if size <= MAX_BPE_TEXT else "gpt2")
    if existing_tokenizer:
        name = existing_tokenizer.name
    estimated, encoder = TextSize(size, size / bytes_per_character, name, BYTES_PER_TOKEN[name]), existing_tokenizer
    if encoder is None and name == "bpe":
        if bytes_per_character < 1.1:
            return replace(
                estimated,
                bytes_per_token=BYTES_PER_TOKEN_OF_SMALL_BPE.get(estimated.vocab_size, estimated.bytes_per_token),
            )
        encoder = train_bpe([beginning], estimated.vocab_size)
    if encoder is None and name == "gpt2":
        with contextlib.suppress(UserError):  # it cannot be downloaded
            encoder = get_tokenizer("gpt2")
    if encoder and (encoded := beginning[:ENCODED_CHARS]):
        return replace(estimated, bytes_per_token=len(to_utf8(encoded)) / len(encoder.encode_array(encoded)))
    return estimated


def text_flags(
    above: Mapping[str, Any], recipe: Mapping[str, Any], existing_tokenizer: Tokenizer | None = None
) -> dict[str, Any]:
    """Returns the flags that --text sets, unless a stronger layer does.

    Args:
        above: the values of the stronger layers: of the command line, and of pretrained weights.
        recipe: the numbers of --recipe fast.
        existing_tokenizer: the tokenizer of pretrained weights.

    Raises:
        UserError: --text names no text.
    """
    fine_tuned = "init_from" in above
    text = measure_text(above["text"], above.get("text_field", "text"), above.get("tokenizer"), existing_tokenizer)
    size, tokenizer, tokens = text.bytes, text.tokenizer, text.train_tokens
    flags: dict[str, Any]
    if fine_tuned:  # few epochs, at a low learning rate
        total_tokens, steps = tokens * (3 if size < 4e7 else 1), 200
        # These learning rates suit GPT-2; the best rate for AdamW grows as models get narrower (arXiv:2203.03466).
        flags = dict(max_lr=(1e-3 if "lora_rank" in above else 1e-4) * max(1.0, 768 / above["n_embd"]))
        if above["block_size"] <= MODELS_FOR_TEXT[0]["block_size"]:
            flags["batch_size"] = MODELS_FOR_TEXT[0]["batch_size"]  # takes as long as 4 rows
    else:  # several epochs of a small text, but too few to memorize it
        most = most_passes(above.get("dropout", MOST_DROPOUT))
        total_tokens, steps = max(tokens, min(MIN_TOKENS[tokenizer], most * tokens)), 2000
        flags = dict(recipe="fast")
        if "model" not in above:
            flags |= models_for_text(size, total_tokens * text.bytes_per_token)[-1]
    tokens_per_step = above.get("total_batch_size", step_size(total_tokens, steps))
    steps = above.get("max_steps", max(1, round(total_tokens / max(1, tokens_per_step))))
    passes = steps * tokens_per_step / max(1, tokens)
    if not fine_tuned and above.get("recipe", "fast") == "fast":
        flags |= dict(cooldown_fraction=SHORT_COOLDOWN) | fast_rates(recipe, tokens_per_step, above, passes)
    if not fine_tuned:
        flags["dropout"] = dropout_for(passes)
    length = flags_for_steps(steps, False, fine_tuned)
    if "minutes" in above:
        length |= _intervals(None, False)
    return flags | length | dict(
        data=str(Path(above.get("out", TrainConfig.out)) / "data"), tokenizer=tokenizer, shuffle=True,
        total_batch_size=tokens_per_step, keep=1,
    )  # fmt: skip


def demo_flags(above: Mapping[str, Any], recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the flags that --demo sets, unless a stronger layer does; the arguments are as in `text_flags`."""
    passes = 1.0
    if "max_steps" in above:
        length = flags_for_steps(above["max_steps"], demo=True)
        step = above.get("total_batch_size", DEMO_STEP_SIZE)
        passes = above["max_steps"] * step / measure_text(None).train_tokens
        if "init_from" not in above:
            length["dropout"] = dropout_for(passes)
    else:
        length = {"minutes": DEMO_MINUTES, "checkpoint_every": 5000}  # a run saves before its cooldown and at its end
    flags = DEMO | fast_rates(recipe, DEMO_STEP_SIZE, above, passes) | length
    return {name: value for name, value in flags.items() if not ("model" in above and name in MODEL_FLAGS)}


def dropout_for(passes: float) -> float:
    """Returns the dropout that suits so many passes over a text; measured, see docs/measurements/small-models.md."""
    return round(float(np.interp(passes, (MAX_PASSES, 20), (0, MOST_DROPOUT))), 2)


def weight_decay_factor(passes: float) -> float:
    """Returns how many times as high the weight decay is as for one pass over a text; measured, see docs/measurements/small-models.md.

    More of it keeps a model from memorizing the text, until dropout does.
    """
    return float(np.interp(passes, (5, 7.5, MAX_PASSES, 20), (1, 6, 6, 3)))


def most_passes(dropout: float) -> int:
    """Returns how many passes over a text lower the validation loss; measured, see docs/measurements/small-models.md."""
    return MAX_PASSES_WITH_DROPOUT if dropout else MAX_PASSES


def longer_run(config: TrainConfig, sources: Mapping[str, str], passes: float, tables: Tables) -> dict[str, Any]:
    """Returns the flags of a fork that makes a finished run at most twice as long; none if that gains nothing.

    If it reads its text too often for the run's dropout and weight decay, it gets those of a new run of that length. A
    weight decay stays if the user chose it for the run, or no preset did. One on the command line of a fork is probably of
    this function.

    Args:
        sources: the layer that each value came from.
        passes: over its data.
        tables: of models and recipes.
    """
    times, chosen = 2.0, dict[str, Any]()
    if not config.is_demo_or_text or config.init_from is not None:
        if 0 < config.max_passes <= passes:
            return {}
    else:
        times = min(2.0, MAX_PASSES_WITH_DROPOUT / max(passes, 1e-9))
        if times < 1.25:  # for so little, nobody trains again
            return {}
        more = times * passes
        if dropout_for(more) > config.dropout:
            chosen["dropout"] = dropout_for(more)
        of_run = {"recipe": config.recipe, "optimizer": config.optimizer}
        recipe = tables["recipe"]["fast"]
        fitting = fast_rates(recipe, config.total_batch_size, of_run, more).get("weight_decay", config.weight_decay)
        by_preset = sources["weight_decay"] in ("--minutes", "--text", "--demo", "command line of the fork")
        if by_preset and not math.isclose(fitting, config.weight_decay, rel_tol=0.01):
            chosen["weight_decay"] = float(f"{fitting:.3g}")
        if 0 < config.max_passes < more:
            chosen["max_passes"] = math.ceil(more)
    if config.minutes:
        return {"minutes": f"{round(times * config.minutes, 1):g}"} | chosen
    # a decay that ends before the run would not move
    return {"max_steps": round(times * config.max_steps)} | chosen if config.decay_steps == config.max_steps else {}


def models_for_text(size: float, bytes_read: float = math.inf) -> list[dict[str, int]]:
    """Returns the flags of the models that suit a text, the smallest first.

    Args:
        size: bytes of the text.
        bytes_read: how much of the text is read, repetitions included.
    """
    smallest, *others = MODELS_FOR_TEXT
    most = min(size, bytes_read / BYTES_PER_WEIGHT)
    return [smallest, *(model for model in others if block_weights(model["n_layer"], model["n_embd"]) <= most)]


def step_size(total_tokens: float, steps: int = 2000) -> int:
    """Returns the tokens per step: the largest power of two from 1,024 to 2**19 that leaves at least `steps` steps."""
    return min(2**19, max(1024, 2 ** int(math.log2(max(1.0, total_tokens / steps)))))


def timed_step_size(total_tokens: float) -> int:
    """Returns the tokens per step of a run that ends with its time: as `step_size`, but 2,048 if that leaves 1,000 steps.

    32 rows are faster per token than 16, so the run trains on more tokens (measured, see docs/measurements/small-models.md).
    """
    return max(step_size(total_tokens), min(2048, step_size(total_tokens, 1000)))


def fast_rates(
    recipe: Mapping[str, Any], tokens_per_step: int, above: Mapping[str, Any], passes: float = 1.0
) -> dict[str, float]:
    """Returns the peak learning rates and the weight decay of --recipe fast.

    Below 16,384 tokens per step, Muon's rate grows with the square root of the step size. A step shrinks the weights by
    the product of this rate and the weight decay, which stays the same, but is higher for a text that is read many times.
    docs/measurements/small-models.md has the measurements. For pretrained weights, AdamW uses Muon's rate.

    Args:
        recipe, above: as in `text_flags`.
        passes: over the text.
    """
    fraction = math.sqrt(min(1.0, tokens_per_step / 16384))
    rates = {"max_lr": recipe["max_lr"] * fraction}
    by_muon = above.get("recipe", "fast") == "fast" and above.get("optimizer", "muon") == "muon"
    if by_muon and "init_from" not in above:
        weight_decay = recipe["weight_decay"] * weight_decay_factor(passes) / fraction
        rates |= {"adamw_lr": recipe["max_lr"], "weight_decay": weight_decay}
    return rates


def flags_for_steps(steps: int, demo: bool, fine_tuned: bool = False) -> dict[str, Any]:
    """Returns the flags that follow from the number of steps."""
    warmup_steps = steps // (12 if fine_tuned else 30)
    return dict(max_steps=steps, decay_steps=steps, warmup_steps=warmup_steps) | _intervals(steps, demo)


def _intervals(steps: int | None, demo: bool) -> dict[str, int | None]:
    """Returns the flags for four validations, samples and checkpoints with --text, or two validations with --demo.

    In a run of --minutes, for which `steps` is None, they are None.
    """
    names = ("val_every",) if demo else ("val_every", "sample_every", "checkpoint_every")
    return dict.fromkeys(names, None if steps is None else -(-steps // (2 if demo else 4)))


def flags_for_length(before: Mapping[str, Any], max_steps: int | None) -> dict[str, Any]:
    """Returns the flags that change with the new length of a fork. Intervals that the user chose are kept.

    Args:
        before: the flags of the run that is forked.
        max_steps: the new length; None if it is given in --minutes.
    """
    flags, timed, demo = dict[str, Any](), before.get("minutes") is not None, before.get("demo", False)
    if max_steps is not None and (timed or before["decay_steps"] == before["max_steps"]):
        flags |= dict(minutes=None, max_passes=0.0, decay_steps=max_steps)
    if max_steps is not None and timed:
        flags["warmup_steps"] = max_steps // 30  # as with --text; the warm-up of a run of --minutes is over
    if demo or before.get("text") is not None:
        old, new = _intervals(None if timed else before["max_steps"], demo), _intervals(max_steps, demo)
        flags |= {name: new[name] for name, every in old.items() if before[name] == every}
    return flags


def tokenizer_name(config: TrainConfig) -> str:
    """Returns the tokenizer of a run's shards: gpt2, bytes or bpe."""
    return "bpe" if config.demo else config.tokenizer or "gpt2"


def vocab_size_for(config: TrainConfig, text: TextSize, existing_tokenizer: Tokenizer | None = None) -> int:
    """Returns the vocabulary size of a run whose shards are not made yet."""
    tokenizer = tokenizer_name(config)
    if existing_tokenizer:
        return existing_tokenizer.vocab_size
    if tokenizer != "bpe":
        return VOCAB_SIZES[tokenizer]
    return DEMO_VOCAB_SIZE if config.text is None else min(text.vocab_size, largest_vocab_size(config))


def largest_vocab_size(config: TrainConfig) -> int:
    """Returns the largest vocabulary for a model: a power of two with which its embedding is no larger than its blocks.

    With a larger one, a step spends most of its time on the logits (measured, see docs/measurements/small-models.md).
    """
    return max(512, 2 ** int(math.log2(block_weights(config.n_layer, config.n_embd) / config.n_embd)))


# -----------------------------------------------------------------------------
# Shards


def print_note(line: str) -> None:
    """Prints what `make_shards` reports if it is a note: a run shows the rest as its progress, on stderr."""
    if line.startswith("note: "):
        print_lines(f"note    {line.removeprefix('note: ')}")


def make_preset_shards(config: TrainConfig, keep_existing: bool, may_replace: bool, model: Path | None) -> None:
    """Makes the shards of --text or --demo, unless they exist.

    Args:
        keep_existing: use existing shards without comparing them with the text of --text.
        may_replace: no run has used the shards in --out yet: if they are of another text, make them again.
        model: the folder of the model that is trained on; it brings its tokenizer. None: a new model.

    Raises:
        UserError: no shards can be made, or the text of those that are lost has changed.
    """
    if shards.is_complete(config.data) and (config.text is None or keep_existing):
        return

    if config.text is None:
        make = partial(make_shards, demo_corpus(), config.data, tokenizer="bpe", flag="--data")
    else:
        paths = find_input([config.text], lambda note: print_lines(f"note    {note}"))
        size, _ = estimate_text(paths, config.text_field)
        make = partial(
            make_shards, TextFiles(paths, config.text_field), config.data, tokenizer=tokenizer_name(config),
            largest_vocab_size=None if model else largest_vocab_size(config), tokenizer_from=model,
            # a whole shard would be most of a text that is hardly longer
            val_fraction=VAL_FRACTION if SHARD_SIZE < size < LARGE_TEXT else None,
            split_documents=True, threads=usable_cores(), flag="--out",
        )  # fmt: skip
    make = partial(make, report=print_note)
    startup.show("making token shards ...")
    try:
        make()
    except OtherShardsError as error:
        if keep_existing:
            raise UserError(
                f"{config.data} lacks a shard, and {config.text} is not the text that it was made from. Put that text back."
            ) from error
        if not may_replace:
            raise
        print_lines(f"note    the shards in {config.data} are of another text. They are replaced.")
        remove_shards(Path(config.data), "--out")
        make()
    finally:
        startup.show("")
