"""Scores a GPT-2 model on HellaSwag: which of four endings of a short text does the model find most likely?

    python hellaswag.py --model gpt2                  # from the Hugging Face hub
    python hellaswag.py --model log/model_19073       # a checkpoint
    python hellaswag.py --model gpt2 --limit 1000     # only the first 1000 items
    python hellaswag.py --model gpt2 --style harness  # like lm-evaluation-harness

The loss of an ending is the cross-entropy of its tokens, given the context. `acc` predicts the ending with the lowest
summed loss, `acc_norm` the one with the lowest loss after normalising by length. There are two styles:

    tokens   The context is encoded by itself, and so is a space with the ending.
             acc_norm divides by the tokens in the ending.
    harness  Like EleutherAI's task hellaswag, 0-shot: the texts are cleaned, the
             context begins with the activity, and context and ending are encoded
             together. acc_norm divides by the characters in the ending.

Data: Zellers et al., arXiv:1905.07830.
"""

from __future__ import annotations

from support import startup

if __name__ == "__main__":
    startup.prepare(imports_torch=True)  # comes first: the imports take seconds

import contextlib
import hashlib
import json
import math
import os
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain, compress, islice
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch
from torch.nn import functional as F

from support import files
from support.checkpoints import huggingface
from support.cli import UserError, describe_error, flag, parse_flags, run_cli
from support.config import DEVICES, TrainConfig
from support.console.curves import NUM_HELLASWAG_ITEMS, OPENAI_HELLASWAG
from support.console.progress import progress_bar
from support.data.download import download as download_file
from support.data.tokenizer import VOCAB_SIZES, Tokenizer, tokenizer_of_model
from support.runtime import devices
from support.runtime.distributed import Distributed
from support.runtime.signals import StopHandler
from support.terminal import labelled

if TYPE_CHECKING:
    from transformers import GPT2LMHeadModel


URL = "https://raw.githubusercontent.com/rowanz/hellaswag/master/data/hellaswag_{split}.jsonl"
GIT_BLOBS = {  # the SHA-1 by which git names each file's content
    "val": "0f5ee25d72216f12317d5d8a7b92deafa423d81e",
    "train": "1997e15fe638ef2aeec6993471159295cd75aab7",
    "test": "7a4b590ea240595f468bfbc7f2c744e5eef72da5",
}
DATA_FOLDER = "hellaswag_data"
MAX_SUMMARY_BYTES = 2**16  # far more than the first line of a --json file has
STYLE_FIELDS = {"tokens": ("ctx",), "harness": ("activity_label", "ctx_a", "ctx_b")}  # the fields that each style uses

# -----------------------------------------------------------------------------
# Items


@dataclass(frozen=True)
class Item:
    """A context, four endings, and the index of the right one. Items of the test split have no label."""

    endings: list[str]
    label: int | None
    ctx: str = ""
    activity_label: str = ""
    ctx_a: str = ""
    ctx_b: str = ""


def download(split: str = "val") -> Path:
    """Downloads a split unless an intact copy exists, and verifies its checksum.

    Raises:
        UserError: the download failed.
    """
    path = Path(DATA_FOLDER) / f"hellaswag_{split}.jsonl"
    try:
        return download_file(URL.format(split=split), path, git_blob=GIT_BLOBS[split])
    except UserError as error:
        raise UserError(f"{error} Or copy the file from another machine to {path}.", this_rank_only=True) from error


def load(path: str | os.PathLike[str], limit: int | None = None, style: str = "tokens") -> list[Item]:
    """Reads the first `limit` items of a .jsonl file, or all of them. Either all have a label or none has.

    Raises:
        UserError: the file cannot be read, has no items, or has a bad line (the message gives its number).
    """
    items: list[Item] = []
    try:
        with open(path, encoding="utf-8-sig") as file:
            for number, line in enumerate(file, start=1):
                if limit is not None and len(items) == limit:
                    break
                if line.strip():
                    items.append(_parse_item(line, f"{path}, line {number}", style))
                    if (items[-1].label is None) != (items[0].label is None):
                        raise UserError(
                            f"{path}: either line {number} or the lines before it have no label. "
                            "Give all items a label, or none."
                        )
    except (OSError, UnicodeDecodeError) as error:
        reason = describe_error(error)
        raise UserError(f"cannot read HellaSwag items from {path} ({reason}). Use another file.") from error
    if not items:
        raise UserError(f"there are no HellaSwag items in {path}. Use another file.")
    return items


def _parse_item(line: str, location: str, style: str) -> Item:
    advice = "Is this HellaSwag's .jsonl file?"
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{location} is not JSON ({error}). {advice}") from error
    if not isinstance(record, dict):
        raise UserError(f"{location} is not a HellaSwag item. {advice}")
    for field in (*STYLE_FIELDS[style], "endings"):
        if field not in record:
            raise UserError(f"{location} is not a HellaSwag item: {field!r} is missing. {advice}")
    texts = {field: record[field] for field in STYLE_FIELDS[style]}
    endings, label = record["endings"], record.get("label")
    if label == "":  # on the Hugging Face hub, labels are strings, and empty in the test split
        label = None
    elif label in ("0", "1", "2", "3"):
        label = int(label)
    valid = isinstance(endings, list) and len(endings) == 4
    valid = valid and all(isinstance(text, str) for text in (*endings, *texts.values()))
    valid = valid and (label is None or (type(label) is int and 0 <= label < 4))  # isinstance would accept True
    if not valid:
        raise UserError(
            f"{location} is not a HellaSwag item: it needs texts, 4 endings and a label from 0 to 3. {advice}"
        )
    return Item(endings, label, **texts)


# -----------------------------------------------------------------------------
# Tokens


@dataclass(frozen=True)
class Example:
    """An item as tokens: one context and four completions, which are the endings."""

    context: list[int]
    completions: list[list[int]]
    label: int | None
    char_lengths: list[int] | None = None  # characters per ending, for `acc_norm`; None: divide by tokens

    def row_lengths(self) -> list[int]:
        """Returns how many tokens the model is fed to score each completion, whose last token is only predicted."""
        return [len(self.context) + len(completion) - 1 for completion in self.completions]


def sha256_of(examples: Sequence[Example]) -> str:
    """Identifies the items, for scores that are to be compared; empty without any."""
    return hashlib.sha256(repr(examples).encode()).hexdigest()[:16] if examples else ""


def render(item: Item, tokenizer: Tokenizer, style: str = "tokens") -> Example:
    """Encodes an item in one of the styles that are described at the top of this file."""
    encode = tokenizer.encode
    if style == "tokens":
        completions = [encode(" " + ending) for ending in item.endings]
        return Example(encode(item.ctx) or [tokenizer.eot], completions, item.label)
    text = _clean(f"{item.activity_label}: {item.ctx_a} {item.ctx_b.capitalize()}")
    endings = [_clean(ending) for ending in item.endings]
    context = encode(text.rstrip())  # trailing spaces go to the completions: GPT-2's tokens begin with a space
    completions = [encode(f"{text} {ending}")[len(context) :] for ending in endings]
    return Example(context or [tokenizer.eot], completions, item.label, [len(ending) for ending in endings])


def _clean(text: str) -> str:
    """Removes wikiHow's markup as the harness does, in the same order (lm_eval/tasks/hellaswag/utils.py)."""
    return re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". ")).replace("  ", " ")


def load_examples(
    config: TrainConfig, every: int | None, tokenizer: Tokenizer, block_size: int, notice: Callable[[str], None]
) -> list[Example]:
    """Returns the examples that a training run scores, from --hellaswag-data or the downloaded validation split.

    Returns an empty list, and calls `notice` with the reason, if the tokenizer is not GPT-2's or the download failed,
    and no flag asks for scores. It also calls `notice` if endings are longer than the model's context.

    Raises:
        UserError: the file does not have HellaSwag items with labels, or a flag asks for scores but there can be none.
    """
    path, limit = config.hellaswag_data, config.hellaswag_limit
    asked = path is not None or limit is not None or config.hellaswag_every is not None
    if every == 0:
        return []
    try:
        if not tokenizer.is_gpt2:
            problem = f"HellaSwag is defined on GPT-2 tokens, but {config.data} has {tokenizer.name} tokens"
            raise UserError(f"{problem}. Train with --tokenizer gpt2, or with --hellaswag-every 0.")
        items = load(download() if path is None else path, limit)
    except UserError as error:
        if asked:
            raise
        notice(labelled("note", f"no scores: {error}"))
        return []
    if items[0].label is None:
        raise UserError(f"the items in {path} have no labels, so there is nothing to score. Use another file.")
    examples = [render(item, tokenizer) for item in items]
    if truncated := count_truncated(examples, block_size):
        problem = (
            f"{truncated:,} endings with their contexts are longer than {block_size} tokens; the beginning is cut off"
        )
        notice(labelled("note", f"HellaSwag: {problem}. Do not compare with published scores"))
    return examples


def count_items(config: TrainConfig) -> int:
    """Returns how many items a training run scores each time, without downloading them.

    Raises:
        UserError: the file of --hellaswag-data does not have HellaSwag items.
    """
    if config.hellaswag_every == 0:
        return 0
    if config.hellaswag_data is None:
        return min(config.hellaswag_limit or NUM_HELLASWAG_ITEMS, NUM_HELLASWAG_ITEMS)
    return len(load(config.hellaswag_data, config.hellaswag_limit))


def count_truncated(examples: Sequence[Example], block_size: int) -> int:
    """Counts the endings that, with their contexts, are longer than a model's context."""
    return sum(length > block_size for example in examples for length in example.row_lengths())


def score_with_ranks(
    model: ScoringModel, examples: Sequence[Example], dist: Distributed, stop: StopHandler, amp: torch.autocast
) -> tuple[float, float, float] | None:
    """Returns acc_norm over all ranks' examples, its standard error and the seconds taken; None if the run should stop."""
    rank_examples = examples_for_rank(examples, dist.rank, dist.world_size, model.block_size)

    def interruptible(rows: list[Row], losses_so_far: Callable[[], Losses]) -> Iterator[Row]:
        return stop.interruptible(progress_bar(rows, "HellaSwag, texts", dist.rank))

    started, correct = time.perf_counter(), 0
    with stop.deferring_errors(), amp:  # a row that does not fit ends the run, but only after a checkpoint
        _, losses = completion_losses(model, rank_examples, progress=interruptible)
        correct = count_correct(losses, rank_examples)
    right, total, stop_requests = dist.all_reduce_sum(correct, len(rank_examples), stop.requested)
    return None if stop.agree(stop_requests) else (*accuracy(right, total), time.perf_counter() - started)


def examples_for_rank(examples: Sequence[Example], rank: int, world_size: int, block_size: int) -> list[Example]:
    """Returns the examples that this rank scores: every world_size-th in order of cost, so that all ranks do similar work."""

    def cost(example: Example) -> int:
        return sum(min(block_size, length) for length in example.row_lengths())

    return sorted(examples, key=cost, reverse=True)[rank::world_size]


# -----------------------------------------------------------------------------
# Scoring
#
# In shapes, B is rows, T tokens per row, C channels, V the vocabulary size, N completion tokens in a batch.

TOKENS_PER_BATCH = {"cuda": 32768, "mps": 8192, "cpu": 768}  # enough to fill a GPU; few enough for a CPU's caches
MAX_LOGIT_ROWS = 768  # rows of logits in memory at a time: 768 * 50,257 * 4 bytes = 154 MB
NOT_SCORED = -math.inf  # no cross-entropy is negative
Losses: TypeAlias = tuple[np.ndarray, np.ndarray]  # of the endings, (examples, 4): summed and normalised, in nats


@dataclass(frozen=True)
class ScoringModel:
    """The parts of a model that scoring needs."""

    hidden: Callable[..., torch.Tensor]  # token ids (B, T) -> hidden states after the last LayerNorm (B, T, C)
    head: Callable[[torch.Tensor], torch.Tensor]  # hidden states (N, C) -> next-token logits (N, V)
    block_size: int
    device: torch.device
    masked: bool = False  # `hidden` also accepts position ids (B, T) and a boolean attention mask (B, 1, T, T)


@dataclass(frozen=True)
class Row:
    """A context and one or more completions, which do not attend to each other."""

    context: list[int]
    completions: list[Sequence[int]]
    # For each completion, where its loss goes in the flattened (examples, 4) losses: several places for equal endings.
    loss_indices: list[list[int]]

    @property
    def num_tokens(self) -> int:
        """The number of tokens that the model is fed: all except the last one of each completion."""
        return len(self.context) + sum(len(completion) - 1 for completion in self.completions)


@torch.no_grad()
def completion_losses(
    model: ScoringModel,
    examples: Sequence[Example],
    token_budget: int | None = None,
    progress: Callable[[list[Row], Callable[[], Losses]], Iterable[Row]] = lambda rows, losses_so_far: rows,
) -> Losses:
    """Returns the cross-entropy of each completion given its context, in nats.

    Rows of similar length are batched. A batch that does not fit into memory is halved.

    Args:
        token_budget: maximum tokens in a batch, including padding; a batch of one row may have more. None: a default
            for the device.
        progress: gets the rows, longest first, and a function that returns the losses so far. It yields the rows: for a
            progress bar, or to stop early. The losses of rows that were not scored are NOT_SCORED.

    Returns:
        Two float64 arrays (examples, 4): summed losses, which `acc` compares, and normalised ones, for `acc_norm`.

    Raises:
        UserError: a single row does not fit into memory.
    """
    rows = [row for i, example in enumerate(examples) for row in make_rows(example, i, model.block_size, model.masked)]
    rows.sort(key=lambda row: -row.num_tokens)
    token_budget = token_budget or TOKENS_PER_BATCH[model.device.type]
    scored: list[tuple[list[Row], torch.Tensor]] = []  # on the device until the end: copying would make the host wait

    remaining, num_done = iter(progress(rows, lambda: _sum_and_normalise(scored, examples))), 0
    while num_done < len(rows):
        batch = list(islice(remaining, max(1, token_budget // rows[num_done].num_tokens)))
        if not batch:  # `progress` stopped early
            break
        losses = _batch_losses_or_none(model, batch)
        if losses is not None:
            scored.append((batch, losses))
            num_done += len(batch)
            continue
        if len(batch) == 1:
            problem = f"a row of {batch[0].num_tokens} tokens does not fit into the memory of {model.device}."
            raise UserError(f"{problem} Free some memory, or use another --device.", this_rank_only=True)
        devices.free_memory(model.device)
        token_budget = len(batch) // 2 * batch[0].num_tokens
        remaining = chain(batch, remaining)
    return _sum_and_normalise(scored, examples)


def make_rows(example: Example, index: int, block_size: int, share_context: bool) -> list[Row]:
    """Makes one row for all completions, if `share_context` and they fit into a block; else one row per completion.

    A row that is too long loses the beginning of its context.

    Args:
        index: the example's index in the losses.
    """
    # Equal endings are scored once, so that rounding cannot make their losses differ: they tie, and the first one wins.
    loss_indices: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for i, completion in enumerate(example.completions):
        loss_indices[tuple(completion)].append(4 * index + i)
    shared = Row(example.context, list(loss_indices), list(loss_indices.values()))
    if share_context and shared.num_tokens <= block_size:
        return [shared]
    rows = []
    for unique_completion, indices in loss_indices.items():
        tokens = [*example.context, *unique_completion][-block_size - 1 :]  # the last token is only predicted
        split = max(1, len(tokens) - len(unique_completion))  # at least one token of context
        rows.append(Row(tokens[:split], [tokens[split:]], [indices]))
    return rows


def _batch_losses_or_none(model: ScoringModel, batch: list[Row]) -> torch.Tensor | None:
    """Returns `_batch_losses`, or None if memory ran out.

    After it returns, no traceback refers to the tensors, so their memory can be freed.
    """
    try:
        with devices.attention_without_cudnn(model.device):  # batches have about a hundred shapes
            return _batch_losses(model, batch)
    except RuntimeError as error:
        if not devices.is_out_of_memory(error):
            raise
        return None


def _batch_losses(model: ScoringModel, batch: list[Row]) -> torch.Tensor:
    """Returns the cross-entropy (N,) of all completion tokens of a batch, row by row and completion by completion."""

    def send(values: np.ndarray | list[int]) -> torch.Tensor:
        return devices.to_device(torch.as_tensor(values), model.device)

    packed = pack(batch)
    if any(len(row.completions) > 1 for row in batch):
        mask = shared_context_mask(send(packed.segment_ids))
        hidden = model.hidden(send(packed.ids), send(packed.position_ids), mask)  # (B, T, C)
    else:  # plain causal attention; padding is at the end, where no token attends to it
        hidden = model.hidden(send(packed.ids))
    return _token_losses(model, hidden.flatten(0, 1)[send(packed.predictors)], send(packed.targets))


@dataclass(frozen=True)
class PackedBatch:
    """A batch of rows as input for the model, padded at the end; see `pack`."""

    ids: np.ndarray  # (B, T)
    position_ids: np.ndarray  # (B, T)
    segment_ids: np.ndarray  # (B, T): 0 for the context, 1, 2, ... for the completions, -1 for padding
    predictors: list[int]  # (N,) indices into the flattened (B * T) hidden states that predict a completion token
    targets: list[int]  # (N,) completion tokens that they predict


def pack(batch: list[Row]) -> PackedBatch:
    """Puts the completions of a row side by side after their context.

    The context "The cat" with the completions "sat down" and "ran up here" becomes

        ids           The   cat        sat    ran   up
        position_ids   0     1          2      2     3     each completion continues at the context's end
        segment_ids    0     0          1      2     2
        targets             sat, ran   down   up    here   the tokens that each one predicts
    """
    B, T = len(batch), max(row.num_tokens for row in batch)
    ids, position_ids = np.zeros((B, T), dtype=np.int64), np.zeros((B, T), dtype=np.int64)
    segment_ids = np.full((B, T), -1)
    predictors: list[int] = []
    for b, row in enumerate(batch):
        context_length = start = len(row.context)
        ids[b, :start], position_ids[b, :start], segment_ids[b, :start] = row.context, np.arange(start), 0
        for segment, completion in enumerate(row.completions, start=1):
            end = start + len(completion) - 1
            ids[b, start:end] = completion[:-1]
            position_ids[b, start:end] = np.arange(context_length, context_length + end - start)
            segment_ids[b, start:end] = segment
            predictors += [b * T + context_length - 1, *range(b * T + start, b * T + end)]
            start = end
    targets = [token for row in batch for completion in row.completions for token in completion]
    return PackedBatch(ids, position_ids, segment_ids, predictors, targets)


def shared_context_mask(segment_ids: torch.Tensor) -> torch.Tensor:
    """Returns the attention mask (B, 1, T, T): a token attends to the context and to its own completion, up to itself.

    For the row in `pack`, with a line for each query and a column for each key:

              The  cat  sat  ran  up
        The    x
        cat    x    x
        sat    x    x    x
        ran    x    x         x
        up     x    x         x    x

    Args:
        segment_ids: (B, T), as in `PackedBatch`.
    """
    T = segment_ids.shape[1]
    queries, keys = segment_ids[:, :, None], segment_ids[:, None, :]
    causal = torch.ones(T, T, dtype=torch.bool, device=segment_ids.device).tril()
    mask = ((keys == queries) | (keys == 0)) & causal  # (B, T, T)
    return mask[:, None]


def _token_losses(model: ScoringModel, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Returns the cross-entropy (N,) of target ids (N,), predicted from hidden states (N, C)."""
    # fp32 even under autocast: near -35, where many logits are, neighbouring bf16 numbers are 0.25 apart
    with torch.autocast(model.device.type, enabled=False):
        chunks = zip(hidden.float().split(MAX_LOGIT_ROWS), targets.split(MAX_LOGIT_ROWS), strict=True)
        return torch.cat([F.cross_entropy(model.head(h).float(), t, reduction="none") for h, t in chunks])


def _sum_and_normalise(scored: list[tuple[list[Row], torch.Tensor]], examples: Sequence[Example]) -> Losses:
    """Returns summed and normalised losses (examples, 4) from batches of rows and their token losses (N,)."""
    sums, lengths = np.full(4 * len(examples), NOT_SCORED), np.ones(4 * len(examples))
    for batch, token_losses in scored:
        completions = [pair for row in batch for pair in zip(row.completions, row.loss_indices, strict=True)]
        starts = np.cumsum([0, *(len(completion) for completion, _ in completions[:-1])])
        completion_sums = np.add.reduceat(token_losses.cpu().numpy().astype(np.float64), starts)
        for loss, (completion, indices) in zip(completion_sums, completions, strict=True):
            sums[indices], lengths[indices] = loss, len(completion)
    for i, example in enumerate(examples):
        if example.char_lengths is not None:
            lengths[4 * i : 4 * i + 4] = example.char_lengths
    # an ending without characters gets an infinite loss, so that it is never predicted
    normalised = np.divide(sums, lengths, out=np.full_like(sums, np.inf), where=lengths > 0)
    return sums.reshape(-1, 4), normalised.reshape(-1, 4)


def count_correct(losses: np.ndarray, examples: Sequence[Example]) -> int:
    """Counts the examples for which the label has the lowest loss. `losses` is (examples, 4); NaN counts as wrong."""
    predictions = np.where(np.isnan(losses).any(axis=1), -1, losses.argmin(axis=1))
    return sum(int(prediction) == e.label for prediction, e in zip(predictions, examples, strict=True))


def accuracy(correct: float, total: float) -> tuple[float, float]:
    """Returns the fraction of samples that are correct, and its standard error, which is NaN for one sample."""
    p = correct / total
    return p, math.sqrt(p * (1 - p) / (total - 1)) if total > 1 else math.nan


# -----------------------------------------------------------------------------
# Command line


@dataclass(frozen=True)
class Results:
    """The scores of a model, and how they were computed. The fields are keys of the --json file."""

    model: str
    data: str  # file or split
    items: int
    style: str
    dtype: str
    device: str
    seconds: float
    truncated: int  # endings that, with their context, are longer than the block size
    acc: float  # the scores are NaN if the items have no labels
    acc_stderr: float
    acc_norm: float
    acc_norm_stderr: float


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_arguments(argv)
    device = devices.pick_device(args.device)
    dtype = devices.DTYPES[devices.pick_dtype(args.dtype, device)]
    directory = huggingface.find_model(args.model)
    # refuses a model before the items are downloaded
    tokenizer = tokenizer_of_model(directory, huggingface.read_config(directory)["vocab_size"], args.tokenizer)
    if not tokenizer.is_gpt2:
        raise UserError(
            f"{directory} was trained on {tokenizer.name} tokens, but HellaSwag's scores are defined on GPT-2 tokens. "
            "Train with --tokenizer gpt2."
        )
    items = load(args.data or download(args.split or "val"), args.limit, args.style)
    if items[0].label is None and not args.json:
        raise UserError("the items have no labels, so there are no scores. Write the losses to a file with --json.")
    model = load_model(directory, device)
    examples = [render(item, tokenizer, args.style) for item in items]
    start = time.perf_counter()
    with StopHandler() as stop, devices.autocast(device, dtype):
        losses = completion_losses(model, examples, progress=partial(show_progress, examples=examples, stop=stop))
    seconds = time.perf_counter() - start
    sums, normalised, examples = scored_only(losses, examples)
    check_finite(sums, directory, dtype)
    acc, acc_stderr = score(sums, examples)
    acc_norm, acc_norm_stderr = score(normalised, examples)
    results = Results(
        model=args.model,
        data=args.data or args.split or "val",
        items=len(examples),
        style=args.style,
        dtype=str(dtype).removeprefix("torch."),
        device=device.type,
        seconds=round(seconds, 3),
        truncated=count_truncated(examples, model.block_size),
        acc=acc,
        acc_stderr=acc_stderr,
        acc_norm=acc_norm,
        acc_norm_stderr=acc_norm_stderr,
    )
    if len(examples) < len(items):  # only a stop leaves some out
        note = f"stopped after {len(examples):,} of {len(items):,} items, which begin with the longest"
        note += f"; {args.json} is not written" if args.json else ""
        print(f"{report(results, model.block_size, None)}\n\n{note}", flush=True)
        stop.exit_all_ranks(lambda reason: [reason])
    try:
        if args.json:  # before printing, which fails if the reader of stdout has closed it (`| head`)
            write_json(Path(args.json), results, sums, normalised, items)
    finally:  # the scores are printed even if the file cannot be written
        print(report(results, model.block_size, args.json), flush=True)


@dataclass(frozen=True)
class Arguments:
    """The command line."""

    # fmt: off
    model: str = flag("gpt2", "hub name, such as gpt2, or checkpoint directory", short="-m", metavar="NAME_OR_DIR")
    style: str = flag("tokens", "how texts are encoded and losses normalised", choices=tuple(STYLE_FIELDS))
    device: str = flag("auto", "where to score", default_help="auto, the best available", short="-d",
        choices=DEVICES)
    dtype: str = flag("fp32", "precision of matrix products; logits and losses are always fp32",
        choices=("auto", *devices.DTYPES))
    split: str | None = flag(None, "split to score, downloaded once; test has no labels", default_help="val",
        choices=tuple(GIT_BLOBS))
    data: str | None = flag(None, "a HellaSwag .jsonl file", default_help="download it", metavar="FILE")
    limit: int | None = flag(None, "score only the first N items", default_help="all", at_least=1)
    tokenizer: str | None = flag(None, "the tokens of a model without tokenizer.json", default_help="the model's",
        choices=tuple(VOCAB_SIZES))
    json: str | None = flag(None, "write the scores, and each item's losses, predictions and label, to a file",
        default_help="none", metavar="FILE")
    # fmt: on


def parse_arguments(argv: Sequence[str] | None) -> Arguments:
    """Parses the command line.

    Raises:
        UserError: it is not valid, or --json cannot be written or has something else; one line for each problem.
    """
    args = Arguments(**parse_flags(Arguments, argv, __doc__))
    problems = []
    if args.data and args.split:
        problems.append("--split names a download, and --data a file. Leave out one of them.")
    if args.split == "test" and not args.json:
        problems.append("the test split has no labels, so there are no scores. Write the losses to a file with --json.")
    if args.json and args.data and Path(args.json).resolve() == Path(args.data).resolve():
        problems.append("--json and --data name the same file. Use another file with --json.")
    if problems:
        raise UserError(*problems)
    if args.json:
        path = Path(args.json)
        files.check_output_file(path, "--json")
        if path.is_file() and path.stat().st_size and not is_result(path):
            raise UserError(f"{path} exists, and is not a result of hellaswag.py. Use another file with --json.")
    return args


def load_model(directory: Path, device: torch.device) -> ScoringModel:
    """Loads a checkpoint in fp32: into Hugging Face's own GPT-2 or, if it has options that GPT-2 lacks, into ours.

    Raises:
        UserError: the files are corrupt.
    """
    if huggingface.read_config(directory).keys() - huggingface.GPT2_FIELDS:
        from train_gpt2 import GPT  # here, because train_gpt2 imports this module

        model = GPT.from_pretrained(directory, verify=False).to(device).eval()
        return ScoringModel(model.transformer, model.logits, model.config.block_size, device)
    hf_model = huggingface.load_hf_model(directory)
    hf_model.to(device)  # type: ignore[arg-type]  # transformers decorates `to` in a way that mypy misreads
    return from_huggingface(hf_model)


def from_huggingface(model: GPT2LMHeadModel) -> ScoringModel:
    """Wraps Hugging Face's model for scoring; the completions of an item share its context."""

    def hidden(
        ids: torch.Tensor, position_ids: torch.Tensor | None = None, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        output = model.transformer(ids, position_ids=position_ids, attention_mask=mask, use_cache=False)
        return output.last_hidden_state

    return ScoringModel(hidden, model.lm_head, model.config.n_positions, model.device, masked=True)


def show_progress(
    rows: list[Row], losses_so_far: Callable[[], Losses], examples: Sequence[Example], stop: StopHandler
) -> Iterator[Row]:
    """Yields the rows until a stop is requested.

    Where stdout is no terminal, a line each minute has the scores so far, of the longest items.
    """

    def describe() -> str:
        sums, normalised, scored = scored_only(losses_so_far(), examples)
        (acc, _), (acc_norm, _) = score(sums, scored), score(normalised, scored)
        scores = "" if math.isnan(acc) else f" | acc {acc:.4f} | acc_norm {acc_norm:.4f}"
        return f" | {len(scored):,} of {len(examples):,} items{scores}"

    return stop.interruptible(progress_bar(rows, "HellaSwag, texts", 0, describe))


def scored_only(losses: Losses, examples: Sequence[Example]) -> tuple[np.ndarray, np.ndarray, list[Example]]:
    """Returns the losses of the examples whose four endings were scored, and these examples."""
    sums, normalised = losses
    scored = (sums != NOT_SCORED).all(axis=1)
    return sums[scored], normalised[scored], list(compress(examples, scored))


def check_finite(losses: np.ndarray, directory: Path, dtype: torch.dtype) -> None:
    """Raises a `UserError` if a loss is infinite or not a number."""
    if num_bad := np.count_nonzero(~np.isfinite(losses)):
        advice = "Use another checkpoint." if dtype == torch.float32 else "Try --dtype fp32."
        raise UserError(f"{num_bad:,} of {losses.size:,} losses of {directory} are not finite. {advice}")


def score(losses: np.ndarray, examples: Sequence[Example]) -> tuple[float, float]:
    """Returns the accuracy and its standard error, from losses (examples, 4); NaN without examples or without labels."""
    if not examples or examples[0].label is None:
        return math.nan, math.nan
    return accuracy(count_correct(losses, examples), len(examples))


def report(results: Results, block_size: int, json_file: str | None) -> str:
    """Returns what is printed: how the scores were computed, and the table."""
    r = results
    paragraphs = [f"HellaSwag {r.data}, {r.items:,} items, style {r.style}; {r.dtype} on {r.device}, {r.seconds:.1f} s"]
    if r.truncated:
        paragraphs.append(
            f"{r.truncated:,} endings with their contexts are longer than the model's {block_size} tokens: the beginning of the "
            "context was cut off and, if the ending alone is longer, that of the ending"
        )
    if math.isnan(r.acc):
        return "\n\n".join(
            [*paragraphs, f"no labels, so no scores; the losses go to {json_file}"] if json_file else paragraphs
        )
    paragraphs.append(table(results))
    if r.truncated:
        paragraphs.append("Published scores are for models that saw the complete contexts, so they are not comparable.")
    elif r.data != "val" or r.items != NUM_HELLASWAG_ITEMS:
        paragraphs.append(f"Published scores are for all {NUM_HELLASWAG_ITEMS:,} validation items.")
    return "\n\n".join(paragraphs)


def table(results: Results) -> str:
    """Returns the model's scores with standard errors, above the published ones in the same style if those are comparable."""
    acc = f"{results.acc:.4f} ± {results.acc_stderr:.4f}"
    acc_norm = f"{results.acc_norm:.4f} ± {results.acc_norm_stderr:.4f}"
    lines = [("", "acc", "acc_norm"), (results.model, acc, acc_norm)]
    for size, published in OPENAI_HELLASWAG[results.style].items() if not results.truncated else ():
        acc, acc_norm = ("-" if value is None else f"{value:.4f}" for value in published)
        lines.append((f"OpenAI GPT-2 {size}", acc, acc_norm))
    width = max(len(name) for name, _, _ in lines)
    return "\n".join(f"{name:{width}}   {acc:15}   {acc_norm}" for name, acc, acc_norm in lines)


def write_json(path: Path, results: Results, sums: np.ndarray, normalised: np.ndarray, items: list[Item]) -> None:
    """Writes the results and, under "results", each item's losses (nats), predictions and label, one item per line."""

    def finite_or_none(values: Iterable[float]) -> list[float | None]:
        return [value if math.isfinite(value) else None for value in values]  # JSON has neither NaN nor infinity

    lines = [
        json.dumps(
            {
                "losses": item_sums.tolist(),
                "losses_norm": finite_or_none(item_normalised.tolist()),
                "prediction": int(item_sums.argmin()),
                "prediction_norm": int(item_normalised.argmin()),
                "label": item.label,
            }
        )
        for item_sums, item_normalised, item in zip(sums, normalised, items, strict=True)
    ]
    summary = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in asdict(results).items()}
    text = json.dumps(summary).removesuffix("}") + ', "results": [\n' + ",\n".join(lines) + "\n]}\n"
    if path.exists() and not path.is_file():  # a pipe or a device
        path.write_text(text, encoding="utf-8")
        return
    path = path.resolve()  # a link stays
    path.parent.mkdir(parents=True, exist_ok=True)  # it existed when scoring began
    with files.atomic_write(path, unique=True) as tmp:
        tmp.write_text(text, encoding="utf-8")


def is_result(path: Path) -> bool:
    """Returns whether a file is one that `write_json` wrote, or one of an older version, of which a kill left a part."""
    with open(path, "rb") as file:
        summary = file.readline(MAX_SUMMARY_BYTES)
    with contextlib.suppress(ValueError, RecursionError):
        content = json.loads(summary + b"]}")
        return isinstance(content, dict) and content.keys() >= {"model", "acc_norm", "results"}
    return False


if __name__ == "__main__":
    run_cli(main)
