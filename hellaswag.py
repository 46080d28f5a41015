"""Scores a GPT-2 on HellaSwag: which of four endings of a short text does the model find likeliest?

    python hellaswag.py -m gpt2                          # a model of the Hugging Face hub
    python hellaswag.py -m log/model_19073 -d cuda       # a checkpoint

The context and, encoded apart from it, a space and the ending form a row. `acc` takes the ending of the lowest summed
loss, `acc_norm` that of the lowest mean loss per token. OpenAI's GPT-2 124M has 0.2859 and 0.2955 on the 10,042
validation items. Data: Zellers et al., arXiv:1905.07830.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from support import devices, huggingface
from support.cli import Parser, UserError, add_device_flag, run
from support.download import download as download_file
from support.tokenizer import Tokenizer, get_tokenizer, name_for_vocab_size

URL = "https://raw.githubusercontent.com/rowanz/hellaswag/master/data/hellaswag_val.jsonl"
GIT_BLOB = "0f5ee25d72216f12317d5d8a7b92deafa423d81e"
FOLDER = "hellaswag_data"


@dataclass(frozen=True)
class Item:
    """A context, its four endings, and the index of the right one."""

    ctx: str
    endings: list[str]
    label: int


@dataclass(frozen=True)
class Example:
    """An item in tokens."""

    context: list[int]
    completions: list[list[int]]
    label: int


def download() -> Path:
    """The validation items, fetched once and checked."""
    return download_file(URL, Path(FOLDER) / "hellaswag_val.jsonl", git_blob=GIT_BLOB)


def load(path: str | os.PathLike, limit: int | None = None) -> list[Item]:
    """The first `limit` items, or all, of a .jsonl file.

    Raises:
        UserError: the file cannot be read, has no items, or a line is none; the line is named.
    """
    items = []
    try:
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if limit is not None and len(items) == limit:
                    break
                if line.strip():
                    items.append(_item(line, f"{path}, line {number}"))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"cannot read HellaSwag items from {path} ({getattr(error, 'strerror', None) or error})."
        ) from error
    if not items:
        raise UserError(f"there are no HellaSwag items in {path}.")
    return items


def _item(line: str, place: str) -> Item:
    try:
        record = json.loads(line)
        item = Item(record["ctx"], record["endings"], record["label"])
    except KeyError as error:
        raise UserError(f"{place} is not a HellaSwag item: it lacks {error}. Is this HellaSwag's .jsonl?") from error
    except TypeError as error:
        raise UserError(f"{place} is not a HellaSwag item. Is this HellaSwag's .jsonl?") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{place} is not JSON ({error}). Is this HellaSwag's .jsonl?") from error
    texts = (
        isinstance(item.ctx, str) and isinstance(item.endings, list) and all(isinstance(e, str) for e in item.endings)
    )
    if not texts or len(item.endings) != 4 or type(item.label) is not int or not 0 <= item.label < 4:
        raise UserError(f"{place} is not a HellaSwag item: it needs a text, 4 endings and a label from 0 to 3.")
    return item


def render(item: Item, tokenizer: Tokenizer) -> Example:
    """The tokens of an item. The endings are encoded by themselves, as words after a space."""
    completions = [tokenizer.encode(" " + ending) for ending in item.endings]
    return Example(tokenizer.encode(item.ctx) or [tokenizer.eot], completions, item.label)


def examples(path: str | None, tokenizer: Tokenizer, notice: Callable[[str], None]) -> list[Example]:
    """The items of a file, or of the download, for scoring in training. None, and a notice, if they cannot be had.

    Raises:
        UserError: the file that was asked for is not one of HellaSwag items.
    """
    if tokenizer.name != "gpt2":
        notice(f"HellaSwag is off: its scores are defined on GPT-2 tokens, and these are {tokenizer.name}.")
        return []
    try:
        items = load(path or download())
    except UserError as error:
        if path is not None:
            raise
        notice(f"HellaSwag is off: {error}")
        return []
    return [render(item, tokenizer) for item in items]


def completion_losses(
    logits_of: Callable[[torch.Tensor], torch.Tensor], example: Example, device: torch.device, block_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Summed and mean cross-entropy, in nats, of each of the four completions after the context.

    Args:
        logits_of: (B, T) token ids to next-token logits (B, T, V).
        block_size: the longest T; of longer rows only the end is looked at.

    Returns:
        Two fp32 tensors of shape (4,).
    """
    rows = [(example.context + completion)[-block_size - 1 :] for completion in example.completions]
    length = max(map(len, rows))
    tokens = torch.zeros(len(rows), length, dtype=torch.int64)  # (4, T+1); what is behind a row's end changes nothing
    scored = torch.zeros(len(rows), length)
    for i, (row, completion) in enumerate(zip(rows, example.completions, strict=True)):
        tokens[i, : len(row)] = torch.tensor(row)
        scored[i, max(1, len(row) - len(completion)) : len(row)] = 1
    tokens, scored = tokens.to(device), scored[:, 1:].to(device)  # (4, T) from here: token t+1 is predicted at t
    logits = logits_of(tokens[:, :-1])  # (4, T, V)
    losses = F.cross_entropy(logits.float().transpose(1, 2), tokens[:, 1:], reduction="none") * scored  # (4, T)
    return losses.sum(dim=1), losses.sum(dim=1) / scored.sum(dim=1)


@torch.no_grad()
def score(
    logits_of: Callable[[torch.Tensor], torch.Tensor],
    examples: Iterable[Example],
    device: torch.device,
    block_size: int,
    report: Callable[[int, int, int], Any] = lambda n, correct, correct_norm: None,
) -> tuple[int, int, int]:
    """How many examples there are, and how many of them are right by summed loss (acc) and by mean loss (acc_norm).

    `report` is called with the three counts after each example.
    """
    n = correct = correct_norm = 0
    for example in examples:
        sums, means = completion_losses(logits_of, example, device, block_size)
        n += 1
        correct += int(sums.argmin()) == example.label
        correct_norm += int(means.argmin()) == example.label
        report(n, correct, correct_norm)
    return n, correct, correct_norm


def main(argv: list[str] | None = None) -> None:
    parser = Parser(description="Score a GPT-2 on the validation items of HellaSwag.")
    parser.add_argument("-m", "--model", default="gpt2", help="hub name or checkpoint directory (default: gpt2)")
    add_device_flag(parser)
    parser.add_argument("--data", metavar="FILE", help="a HellaSwag .jsonl file (default: downloaded once)")
    parser.add_argument("--limit", type=int, metavar="N", help="score only the first N items (default: all)")
    args = parser.parse_args(argv)
    if args.limit is not None and args.limit < 1:
        raise UserError("--limit must be 1 or more.")

    device = torch.device(devices.pick_device_type(args.device))
    directory = huggingface.find(args.model)
    items = load(args.data or download(), args.limit)
    model, tokenizer = load_model(directory, device)
    examples = [render(item, tokenizer) for item in items]

    from tqdm import tqdm

    bar = tqdm(examples, unit=" items", disable=None)

    def report(n: int, correct: int, correct_norm: int) -> None:
        figures = f"acc {correct / n:.4f} acc_norm {correct_norm / n:.4f}"
        bar.set_postfix_str(figures, refresh=False)
        if n % 500 == 0 or n == len(examples):
            bar.write(f"{n:5d}/{len(examples)} {figures}")

    score(lambda idx: model(idx).logits, bar, device, model.config.n_positions, report)


def load_model(directory: Path, device: torch.device) -> tuple[Any, Tokenizer]:
    """Hugging Face's own GPT-2 with the weights of a checkpoint in fp32, and its tokenizer.

    Raises:
        UserError: its vocabulary is not GPT-2's, on which HellaSwag's figures are defined.
    """
    vocab_size = huggingface.read_config(directory)["vocab_size"]
    tokenizer = get_tokenizer(name_for_vocab_size(vocab_size))
    if tokenizer.name != "gpt2":
        raise UserError(
            f"{directory} was trained on {tokenizer.name}, and HellaSwag's scores are defined on GPT-2 tokens."
        )
    from transformers import GPT2LMHeadModel
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()

    try:
        model, report = GPT2LMHeadModel.from_pretrained(
            directory, dtype=torch.float32, use_safetensors=True, output_loading_info=True
        )
    except Exception as error:  # a missing or damaged file, in the words of two libraries
        raise UserError(f"cannot read the weights in {directory} ({error}). Get them again.") from error
    wrong = sorted(str(key) for kind in ("missing_keys", "mismatched_keys") for key in report[kind])
    if wrong:
        raise UserError(f"the weights in {directory} do not fit: {', '.join(wrong[:3])}. Get them again.")
    return model.to(device).eval(), tokenizer


if __name__ == "__main__":
    run(main)
