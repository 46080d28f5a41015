"""Scores a GPT-2 on HellaSwag: which of four endings of a short text does the model find likeliest?

    python hellaswag.py -m gpt2                          # a model of the Hugging Face hub
    python hellaswag.py -m log/model_19073 -d cuda       # a checkpoint
    python hellaswag.py -m gpt2 --style harness          # the figures of lm-evaluation-harness

Style "tokens": the context and, encoded apart from it, a space and the ending. `acc` takes the ending of the lowest
summed loss, `acc_norm` that of the lowest mean loss per token. Style "harness", EleutherAI's task `hellaswag`, 0-shot:
the texts cleaned, the name of the activity before them, context and ending encoded in one, and `acc_norm` takes the
lowest loss per character of the ending. Data: Zellers et al., arXiv:1905.07830.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from support import devices, huggingface, output
from support.cli import Parser, UserError, add_device_flag, run
from support.download import download as download_file
from support.tokenizer import Tokenizer, get_tokenizer, name_for_vocab_size

URL = "https://raw.githubusercontent.com/rowanz/hellaswag/master/data/hellaswag_{split}.jsonl"
GIT_BLOBS = {
    "val": "0f5ee25d72216f12317d5d8a7b92deafa423d81e",
    "train": "1997e15fe638ef2aeec6993471159295cd75aab7",
    "test": "7a4b590ea240595f468bfbc7f2c744e5eef72da5",
}
FOLDER = "hellaswag_data"
STYLES = {"tokens": ("ctx",), "harness": ("activity_label", "ctx_a", "ctx_b")}  # and what each reads of an item
VAL_ITEMS = 10042
BEGINNING = '{"model": '  # of a file of scores
PUBLISHED = {  # acc and acc_norm on all validation items; None where nobody has told
    "tokens": {
        "OpenAI GPT-2 124M": (0.2859, 0.2955),
        "OpenAI GPT-2 350M": (None, 0.3752),
        "OpenAI GPT-2 774M": (None, 0.4320),
        "OpenAI GPT-2 1558M": (0.3842, 0.4893),
    },
    "harness": {
        "OpenAI GPT-2 124M": (0.2892, 0.3114),
        "OpenAI GPT-2 1558M": (0.4004, 0.5089),
    },
}

# -----------------------------------------------------------------------------
# The items


@dataclass(frozen=True)
class Item:
    """A context, its four endings, and the index of the right one, which test items keep to themselves."""

    endings: list[str]
    label: int | None
    ctx: str = ""
    activity_label: str = ""
    ctx_a: str = ""
    ctx_b: str = ""


@dataclass(frozen=True)
class Example:
    """An item in tokens."""

    context: list[int]
    completions: list[list[int]]
    label: int | None
    lengths: list[int] | None = None  # by which `acc_norm` divides the losses; None: the tokens of each completion


def download(split: str = "val") -> Path:
    """The items of a split, fetched once and checked."""
    path = Path(FOLDER) / f"hellaswag_{split}.jsonl"
    try:
        return download_file(URL.format(split=split), path, git_blob=GIT_BLOBS[split])
    except UserError as error:
        raise UserError(f"{error} Or copy the file from another machine to {path}.", this_rank_only=True) from error


def load(path: str | os.PathLike, limit: int | None = None, style: str = "tokens") -> list[Item]:
    """The first `limit` items, or all, of a .jsonl file. All of them have labels, or none.

    Raises:
        UserError: the file cannot be read, has no items, or a line is none that the style can read; the line is named.
    """
    items: list[Item] = []
    try:
        with open(path, encoding="utf-8-sig") as file:
            for number, line in enumerate(file, start=1):
                if limit is not None and len(items) == limit:
                    break
                if line.strip():
                    items.append(_item(line, f"{path}, line {number}", style))
                    if (items[-1].label is None) != (items[0].label is None):
                        raise UserError(f"{path}: line {number} or those before it lack a label. Give all or none.")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"cannot read HellaSwag items from {path} ({getattr(error, 'strerror', None) or error}). Name another file."
        ) from error
    if not items:
        raise UserError(f"there are no HellaSwag items in {path}. Name another file.")
    return items


def _item(line: str, place: str, style: str) -> Item:
    try:
        record = json.loads(line)
        texts, endings, label = {name: record[name] for name in STYLES[style]}, record["endings"], record.get("label")
    except KeyError as error:
        raise UserError(f"{place} is not a HellaSwag item: it lacks {error}. Is this HellaSwag's .jsonl?") from error
    except TypeError as error:
        raise UserError(f"{place} is not a HellaSwag item. Is this HellaSwag's .jsonl?") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{place} is not JSON ({error}). Is this HellaSwag's .jsonl?") from error
    if isinstance(label, str):  # as the data set of the Hugging Face hub has it
        label = int(label) if label in {"0", "1", "2", "3"} else None if label == "" else -1
    four = isinstance(endings, list) and len(endings) == 4
    all_texts = four and all(isinstance(text, str) for text in (*endings, *texts.values()))
    if not all_texts or (label is not None and (type(label) is not int or not 0 <= label < 4)):
        raise UserError(f"{place} is not a HellaSwag item: it needs texts, 4 endings and a label from 0 to 3.")
    return Item(endings, label, **texts)


def render(item: Item, tokenizer: Tokenizer, style: str = "tokens") -> Example:
    """The tokens of an item, see the top of this file."""
    encode = tokenizer.encode
    if style == "tokens":
        completions = [encode(" " + ending) for ending in item.endings]
        return Example(encode(item.ctx) or [tokenizer.eot], completions, item.label)
    text = _clean(f"{item.activity_label}: {item.ctx_a} {item.ctx_b.capitalize()}")
    endings = [_clean(ending) for ending in item.endings]
    context = encode(text.rstrip())  # blanks at its end go to the endings, where GPT-2's tokens have them
    completions = [encode(f"{text} {ending}")[len(context) :] for ending in endings]
    return Example(context or [tokenizer.eot], completions, item.label, [len(ending) for ending in endings])


def _clean(text: str) -> str:
    """Without the marks of wikiHow, in the harness's order of steps (lm_eval/tasks/hellaswag/utils.py)."""
    return re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". ")).replace("  ", " ")


def examples(
    path: str | None, tokenizer: Tokenizer, notice: Callable[[str], None], limit: int | None = None
) -> list[Example]:
    """The items of a file, or of the download, for scoring in training. None, and a notice, if they cannot be had.

    Raises:
        UserError: the file that was asked for is not one of HellaSwag items with labels.
    """
    if tokenizer.name != "gpt2":
        notice(f"HellaSwag is off: its scores are defined on GPT-2 tokens, and these are {tokenizer.name}.")
        return []
    try:
        items = load(download() if path is None else path, limit)
    except UserError as error:
        if path is not None:
            raise
        notice(f"HellaSwag is off: {error}")
        return []
    if items[0].label is None:
        raise UserError(f"the items in {path} have no labels, so there is nothing to score. Name others.")
    return [render(item, tokenizer) for item in items]


# -----------------------------------------------------------------------------
# Scoring


@dataclass(frozen=True)
class Model:
    """What scoring asks of a model. B is rows, T tokens, C channels, V the vocabulary."""

    hidden: Callable[..., torch.Tensor]  # (B, T) token ids to (B, T, C); if `masked`, see there
    head: Callable[[torch.Tensor], torch.Tensor]  # (N, C) to next-token logits (N, V)
    block_size: int
    device: torch.device
    masked: bool = False  # hidden takes positions (B, T) and a mask (B, 1, T, T) of who looks at whom, too


@dataclass(frozen=True)
class Row:
    """A context, and one or more completions that are scored after it. None of these sees another."""

    context: list[int]
    completions: list[Sequence[int]]
    places: list[list[int]]  # where the losses of each go: 4 * example + ending, more than one for equal endings

    @property
    def length(self) -> int:
        """Tokens that the model reads: all but the last of each completion, after which nothing comes."""
        return len(self.context) + sum(len(completion) - 1 for completion in self.completions)


BATCH_TOKENS = {"cuda": 32768, "mps": 8192, "cpu": 768}  # a GPU has enough to do, a CPU keeps it in its caches
LOGIT_ROWS = 768  # that exist at a time: 154 MB in fp32


def rows_of(example: Example, n: int, block_size: int, shared: bool) -> list[Row]:
    """Example number n as one row, if the context is to be `shared` and all fits into a block, else as four.

    A row that is too long loses its beginning, so that block_size tokens are read and the last one is only predicted.
    """
    places = defaultdict(list)  # equal endings are computed once: a tie, and the first of them wins
    for i, completion in enumerate(example.completions):
        places[tuple(completion)].append(4 * n + i)
    whole = Row(example.context, list(places), list(places.values()))
    if shared and whole.length <= block_size:
        return [whole]
    rows = []
    for completion, at in places.items():
        tokens = [*example.context, *completion][-block_size - 1 :]
        cut = max(1, len(tokens) - len(completion))
        rows.append(Row(tokens[:cut], [tokens[cut:]], [at]))
    return rows


@torch.no_grad()
def completion_losses(
    model: Model,
    examples: Sequence[Example],
    budget: int | None = None,
    watch: Callable[[Iterable[Row]], Iterable[Row]] = iter,
) -> tuple[np.ndarray, np.ndarray]:
    """Cross-entropy of each completion after its context, in nats: summed, and as `acc_norm` compares it.

    The rows go through the model in batches of similar lengths. A batch that does not fit into memory is halved.

    Args:
        budget: tokens of a batch, padding included; a single row may have more. None: what suits the device.
        watch: gets the rows, longest first, and hands them on: a place for a progress bar, or for an early end.

    Returns:
        Two float64 arrays (examples, 4).
    """
    rows = [row for n, example in enumerate(examples) for row in rows_of(example, n, model.block_size, model.masked)]
    rows.sort(key=lambda row: -row.length)
    budget = budget or BATCH_TOKENS[model.device.type]
    found: list[tuple[list[Row], torch.Tensor]] = []  # batches and their losses, which are waited for at the end

    stream, done = iter(watch(rows)), 0
    while done < len(rows):
        batch = list(islice(stream, max(1, budget // rows[done].length)))
        if not batch:  # an early end
            break
        try:
            found.append((batch, _batch_losses(model, batch)))
            done += len(batch)
            continue
        except RuntimeError as error:
            if not devices.is_out_of_memory(error):
                raise
        if len(batch) == 1:
            place = f"the memory of {model.device}"
            problem = f"not even one row of {batch[0].length} tokens fits into {place}."
            raise UserError(f"{problem} Free some of it, or use another --device.", this_rank_only=True)
        devices.free_memory(model.device)  # here, where no traceback holds the tensors any more
        budget = len(batch) // 2 * batch[0].length
        stream = chain(batch, stream)
    return _by_example(found, examples)


def _by_example(
    found: list[tuple[list[Row], torch.Tensor]], examples: Sequence[Example]
) -> tuple[np.ndarray, np.ndarray]:
    sums, divisors = np.zeros(4 * len(examples)), np.ones(4 * len(examples))
    for batch, per_token in found:
        completions = [(c, places) for row in batch for c, places in zip(row.completions, row.places, strict=True)]
        starts = np.cumsum([0, *(len(completion) for completion, _ in completions[:-1])])
        totals = np.add.reduceat(per_token.cpu().numpy().astype(np.float64), starts)
        for total, (completion, places) in zip(totals, completions, strict=True):
            sums[places], divisors[places] = total, len(completion)
    for n, example in enumerate(examples):
        if example.lengths is not None:
            divisors[4 * n : 4 * n + 4] = example.lengths
    normalised = np.divide(sums, divisors, out=np.full_like(sums, np.inf), where=divisors > 0)
    return sums.reshape(-1, 4), normalised.reshape(-1, 4)  # an ending without characters is never the likeliest


def _batch_losses(model: Model, batch: list[Row]) -> torch.Tensor:
    """Cross-entropy of all tokens of all completions in the batch, one after the other.

    Of the completions "falls" and "looks up" of "He", a row holds all tokens but the last ones:

        ids         He  looks
        positions    0    1
        parts        0    2
        predicting  "falls" and "looks" at He, "up" at looks
    """
    B, T = len(batch), max(row.length for row in batch)
    ids, positions = np.zeros((B, T), dtype=np.int64), np.zeros((B, T), dtype=np.int64)
    parts = np.full((B, T), -1)  # 0 is the context, 1, 2, ... are the completions, -1 is padding
    predicting: list[int] = []  # where in (B * T) the next token is one of a completion
    for b, row in enumerate(batch):
        at = c = len(row.context)
        ids[b, :c], positions[b, :c], parts[b, :c] = row.context, np.arange(c), 0
        for k, completion in enumerate(row.completions, start=1):
            end = at + len(completion) - 1
            ids[b, at:end], positions[b, at:end], parts[b, at:end] = completion[:-1], np.arange(c, c + end - at), k
            predicting += [b * T + c - 1, *range(b * T + at, b * T + end)]
            at = end
    targets = [token for row in batch for completion in row.completions for token in completion]

    def sent(values: Any) -> torch.Tensor:
        return devices.send(torch.as_tensor(values), model.device)

    if any(len(row.completions) > 1 for row in batch):
        part, order = sent(parts), sent(np.arange(T))
        seen = (part[:, :, None] == part[:, None, :]) | (part[:, None, :] == 0)  # (B, T, T): one's own, and the context
        seen &= order[:, None] >= order  # of these, what came before
        hidden = model.hidden(sent(ids), sent(positions), seen[:, None])  # (B, T, C)
    else:
        hidden = model.hidden(sent(ids))
    return _token_losses(model, hidden.flatten(0, 1)[sent(predicting)], sent(targets))


def _token_losses(model: Model, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Cross-entropy (N,) of target ids (N,) after hidden states (N, C)."""
    with torch.autocast(model.device.type, enabled=False):  # bf16 logits near -35 are 0.25 apart
        chunks = zip(hidden.float().split(LOGIT_ROWS), targets.split(LOGIT_ROWS), strict=True)
        return torch.cat([F.cross_entropy(model.head(h).float(), t, reduction="none") for h, t in chunks])


def correct(losses: np.ndarray, examples: Sequence[Example]) -> int:
    """How many examples have their lowest loss (examples, 4) at the right ending. With a NaN among them, none has."""
    predictions = np.where(np.isnan(losses).any(axis=1), -1, losses.argmin(axis=1))
    return sum(int(prediction) == e.label for prediction, e in zip(predictions, examples, strict=True))


def share(examples: Sequence[Example], rank: int, world: int, block_size: int) -> list[Example]:
    """What this rank scores: every world-th example in order of cost, so that all ranks have about as much to do."""

    def cost(example: Example) -> int:
        return sum(min(block_size, len(example.context) + len(c) - 1) for c in example.completions)

    return sorted(examples, key=cost, reverse=True)[rank::world]


# -----------------------------------------------------------------------------
# The command line


def configure(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(description="Score a GPT-2 on HellaSwag.")
    add = parser.add_argument
    add("-m", "--model", default="gpt2", help="hub name or checkpoint directory (default: gpt2)")
    add("--style", default="tokens", choices=tuple(STYLES), help="how texts are put and losses compared; harness is as in lm-evaluation-harness (default: tokens)")  # fmt: skip
    add_device_flag(parser)
    add("--dtype", default="fp32", choices=("auto", *devices.DTYPES), help="precision of the matrix products; logits and losses are fp32 in any case (default: fp32)")  # fmt: skip
    add("--split", choices=tuple(GIT_BLOBS), help="items that are downloaded once; test has no labels (default: val)")
    add("--data", metavar="FILE", help="a HellaSwag .jsonl file instead of the download")
    add("--limit", type=int, metavar="N", help="score only the first N items (default: all)")
    add("--json", metavar="FILE", help="write the scores, and losses, predictions and label of each item, to a file")
    args = parser.parse_args(argv)
    problems = []
    if args.limit is not None and args.limit < 1:
        problems.append("--limit must be 1 or more.")
    if args.data and args.split:
        problems.append("--split names a download, and --data a file. Leave out one of them.")
    if args.split == "test" and not args.json:
        problems.append("test has no labels, so it gives no score. Name a file for the losses with --json.")
    problems += [f"--{name} needs the name of a file." for name in ("data", "json") if getattr(args, name) == ""]
    if problems:
        raise UserError(*problems)
    if args.json:
        output.check(Path(args.json), "--json", BEGINNING)
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = configure(argv)
    device = torch.device(devices.pick_device_type(args.device))
    dtype = devices.pick_dtype(args.dtype, device)
    directory = huggingface.find(args.model)
    items = load(args.data or download(args.split or "val"), args.limit, args.style)
    labelled = items[0].label is not None
    if not labelled and not args.json:
        raise UserError("the items have no labels, so they give no score. Name a file for the losses with --json.")
    model, tokenizer = load_model(directory, device)
    examples = [render(item, tokenizer, args.style) for item in items]
    longest = model.config.n_positions
    cut = sum(len(e.context) + len(completion) - 1 > longest for e in examples for completion in e.completions)

    from tqdm import tqdm

    bar = partial(tqdm, desc="HellaSwag", unit=" rows", leave=False, disable=None)
    started = time.perf_counter()
    with devices.autocast(device, dtype):
        sums, normalised = completion_losses(from_huggingface(model), examples, watch=bar)
    seconds = time.perf_counter() - started
    if bad := np.count_nonzero(~np.isfinite(sums)):
        advice = "Use another checkpoint." if dtype == torch.float32 else "Try --dtype fp32."
        raise UserError(f"{bad:,} of {sums.size:,} losses of {directory} are not finite. {advice}")
    about = {"model": args.model, "data": args.data or args.split or "val", "items": len(items), "style": args.style}
    about |= {"dtype": str(dtype).removeprefix("torch."), "device": device.type, "seconds": round(seconds, 3)}
    about["truncated"] = cut
    for name, each in (("acc", sums), ("acc_norm", normalised)):
        scores = accuracy(correct(each, examples), len(items)) if labelled else (math.nan, math.nan)
        about |= dict(zip((name, f"{name}_stderr"), scores, strict=True))
    trouble = None
    if args.json:  # before anything is printed, for whoever reads that may be gone; and the disk may be full
        try:
            write_json(Path(args.json), about, sums, normalised, items)
        except UserError as error:
            trouble = error
    print("HellaSwag {data}, {items:,} items, style {style}; {dtype} on {device}, {seconds:.1f} s\n".format(**about))
    if cut:
        print(f"of {cut:,} endings with their contexts only the last tokens were read: the model takes {longest}\n")
    print(table(about) if labelled else f"no labels, so no score; the losses go to {args.json}")
    if labelled and (about["data"] != "val" or len(items) != VAL_ITEMS):
        print(f"\nPublished scores are those of all {VAL_ITEMS:,} validation items.")
    if trouble:
        raise trouble


def accuracy(right: float, n: float) -> tuple[float, float]:
    """The share that is right, and its standard error: that of a mean of n samples, not a number for one."""
    p = right / n
    return p, math.sqrt(p * (1 - p) / (n - 1)) if n > 1 else math.nan


def table(about: dict[str, Any]) -> str:
    """This model's scores, with their standard errors, above the published ones of the style."""
    lines = {"": ("acc", "acc_norm")}
    lines[about["model"]] = tuple(f"{about[name]:.4f} ± {about[f'{name}_stderr']:.4f}" for name in ("acc", "acc_norm"))
    for name, scores in PUBLISHED[about["style"]].items():
        lines[name] = tuple("-" if score is None else f"{score:.4f}" for score in scores)
    width = max(map(len, lines))
    return "\n".join(f"{name:{width}}   {acc:15}   {acc_norm}" for name, (acc, acc_norm) in lines.items())


def write_json(path: Path, about: dict[str, Any], sums: np.ndarray, normalised: np.ndarray, items: list[Item]) -> None:
    """Writes `about` and, under "results", losses (nats), predictions and label of each item, in their order."""

    def finite(values: Iterable[float]) -> list[float | None]:
        return [value if math.isfinite(value) else None for value in values]  # JSON knows nothing else

    lines = [
        json.dumps(
            {
                "losses": summed.tolist(),
                "losses_norm": finite(each.tolist()),
                "prediction": int(summed.argmin()),
                "prediction_norm": int(each.argmin()),
                "label": item.label,
            }
        )
        for summed, each, item in zip(sums, normalised, items, strict=True)
    ]
    about = {key: finite([value])[0] if isinstance(value, float) else value for key, value in about.items()}
    text = json.dumps(about).removesuffix("}") + ', "results": [\n' + ",\n".join(lines) + "\n]}\n"
    output.write(path, text)


def load_model(directory: Path, device: torch.device) -> tuple[Any, Tokenizer]:
    """Hugging Face's own GPT-2 with the weights of a checkpoint in fp32, and its tokenizer.

    Raises:
        UserError: the checkpoint is damaged, or its vocabulary is not GPT-2's, on which HellaSwag's figures are defined.
    """
    tokenizer = get_tokenizer(name_for_vocab_size(huggingface.read_config(directory)["vocab_size"]))
    if tokenizer.name != "gpt2":
        raise UserError(
            f"{directory} was trained on {tokenizer.name}, and HellaSwag's scores are defined on GPT-2 tokens."
        )
    return huggingface.load_theirs(directory).to(device), tokenizer


def from_huggingface(model: Any) -> Model:
    """Hugging Face's GPT2LMHeadModel as a model that takes positions and a mask."""

    def hidden(ids: torch.Tensor, positions: torch.Tensor | None = None, mask: torch.Tensor | None = None):
        options = {"position_ids": positions, "attention_mask": mask, "use_cache": False}
        return model.transformer(ids, **options).last_hidden_state

    return Model(hidden, model.lm_head, model.config.n_positions, model.device, masked=True)


if __name__ == "__main__":
    run(main)
