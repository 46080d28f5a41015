"""Continues texts with a GPT-2 model: a checkpoint, or one from the Hugging Face hub.

    python sample.py --model log/model_19073     # on a terminal: type a prompt
    python sample.py --model gpt2 --prompt "Once upon a time" -n 4
    python sample.py --model gpt2 --prompt "The cat" -n 1 --temperature 0
    python sample.py --model gpt2 --prompt "The cat" --top-k 0 --top-p 0.9

Several texts are separated by lines of three dashes. Without --prompt, the script continues the text piped into it.
"""

from __future__ import annotations

from support import startup

if __name__ == "__main__":
    startup.prepare(imports_torch=True)  # comes first: the imports take seconds

import codecs
import os
import stat
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from support.checkpoints.huggingface import find_model, read_config
from support.cli import UserError, flag, parse_flags, print_lines, run_cli
from support.config import DEFAULT_PROMPT, DEVICES
from support.data.tokenizer import END_OF_TEXT, VOCAB_SIZES, Tokenizer, tokenizer_of_model
from support.runtime import devices
from support.runtime.kv_cache import KVCache
from train_gpt2 import GPT, GPTConfig

DEFAULT_NUM_TEXTS = 4
MAX_BATCH = 64  # texts generated at a time
MAX_CACHE_BYTES = 2 << 30  # limit of the KV cache; beyond it, fewer texts are generated at a time
WAIT_SECONDS = 2.0  # for text on stdin, before a line says so
MAX_PROMPT_CHARS = 1 << 20  # far more than a context holds; a pipe may never end
# a model could generate any terminal control sequence
CONTROL_CHARACTERS = {c: f"\\x{c:02x}" for c in (*range(32), *range(127, 160)) if chr(c) not in "\t\n"}

# -----------------------------------------------------------------------------
# Generation. B is batch, T is time, C is channels, nh is heads, hs is head size, V is vocabulary, as in train_gpt2.py.


def prepare_weights(model: GPT, dtype: torch.dtype, single_row: bool) -> None:
    """Stores the weights for fast generation: the blocks' matrices in `dtype`, to which autocast would cast them.

    On a CPU in fp32, multiplying a single row by a matrix is faster if the matrix is stored in column-major order. With
    several rows, it is slower.
    """
    for module in model.transformer.h.modules():
        if isinstance(module, nn.Linear):
            module.to(dtype)
    for parameter in model.parameters():
        if single_row and parameter.dim() == 2 and parameter.dtype == torch.float32 and parameter.device.type == "cpu":
            parameter.data = parameter.data.T.contiguous().T


def cache_capacity(config: GPTConfig, prompt_length: int, max_new_tokens: int) -> int:
    """Returns the capacity of the KV cache, in tokens per row.

    The last new token is never fed back. Once the context is full, it is recomputed without the cache.
    """
    return min(prompt_length + max_new_tokens - 1, config.block_size)


def rows_in_memory(config: GPTConfig, prompt_length: int, max_new_tokens: int) -> int:
    """Returns how many texts to generate at a time, within MAX_BATCH and MAX_CACHE_BYTES.

    Assumes a cache in fp32, so that the number does not depend on --dtype.
    """
    row_bytes = 2 * 4 * config.n_layer * config.n_embd * cache_capacity(config, prompt_length, max_new_tokens)
    return min(MAX_BATCH, max(1, MAX_CACHE_BYTES // row_bytes))


def generate(model: GPT, idx: Tensor, max_new_tokens: int, **options: Any) -> Iterator[Tensor]:
    """Continues (B, T) ids as `GPT.generate` does, with a KV cache; yields the new tokens, (B, 1) at a time."""
    cache = KVCache(cache_capacity(model.config, idx.size(1), max_new_tokens))
    return model.generate(idx, max_new_tokens, cache=cache, **options)


# -----------------------------------------------------------------------------
# Texts

Continue = Callable[..., Iterator[Tensor]]  # `generate` with its options; called with (B, T) ids and a generator


def encode_prompt(prompt: str, tokenizer: Tokenizer, block_size: int, model_name: str) -> list[int]:
    """Returns the tokens of a prompt, with an end-of-text token for each <|endoftext|> in it, and one if it is empty.

    Raises:
        UserError: it is not valid UTF-8, or is longer than the context.
    """
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise UserError("the prompt is not valid UTF-8. Convert it to UTF-8.") from error
    first, *others = map(tokenizer.encode, prompt.split(END_OF_TEXT))
    ids = [*first, *(id for piece in others for id in (tokenizer.eot, *piece))]
    if len(ids) > block_size:
        raise UserError(
            f"the prompt has {len(ids)} tokens, but the context of {model_name} is {block_size}. Shorten the prompt."
        )
    return ids or [tokenizer.eot]


def piped_prompt() -> str | None:
    """Returns the text piped into stdin, decoded like a .txt file, without its final line break; None if nothing is piped.

    Raises:
        UserError: the text is empty.
    """
    if sys.stdin is None or sys.stdin.isatty():
        return None
    options = {"encoding": "utf-8-sig", "errors": "surrogateescape", "newline": None}  # `encode_prompt` reports errors
    # some terminals and remote shells leave a pipe open, though nobody writes to it
    waiting = threading.Timer(
        WAIT_SECONDS,
        print_lines,
        ("waiting for the text to continue on stdin (or pass it with --prompt) ...", sys.stderr),
    )
    waiting.daemon = True
    try:
        if stat.S_ISCHR(os.fstat(sys.stdin.fileno()).st_mode):  # /dev/null
            return None
        sys.stdin.reconfigure(**options)  # type: ignore[union-attr]
        waiting.start()
        text = sys.stdin.read(MAX_PROMPT_CHARS).removesuffix("\n")
    except OSError:  # nohup makes stdin write-only
        return None
    finally:
        waiting.cancel()
    if not text:
        raise UserError("the text on stdin is empty. Pipe in a text, or pass one with --prompt.")
    return text


def shown_ids(ids: list[int], tokenizer: Tokenizer) -> list[int]:
    """Returns the prompt tokens to print: not the end-of-text token that stands for an empty prompt."""
    return [] if ids == [tokenizer.eot] else ids


def print_texts(
    continue_ids: Continue, tokenizer: Tokenizer, ids: list[int], n: int, batch: int, generator: torch.Generator
) -> None:
    """Prints `n` continuations of a prompt, generated `batch` at a time and separated by lines of three dashes."""
    for first in range(0, n, batch):
        idx = torch.tensor([ids], device=generator.device).repeat(min(batch, n - first), 1)  # (B, T)
        new = torch.cat(list(continue_ids(idx, generator=generator)), dim=1)  # (B, max_new_tokens)
        texts = [tokenizer.decode(shown_ids(ids, tokenizer) + tokens) for tokens in new.tolist()]
        if sys.stdout.isatty():
            texts = [text.translate(CONTROL_CHARACTERS) for text in texts]
        if first:
            print("---", flush=True)
        print("\n---\n".join(texts), flush=True)


def decode_pieces(tokens: Iterable[int], tokenizer: Tokenizer) -> Iterator[str]:
    """Yields the text of the tokens, piece by piece: a character appears with the last of its tokens."""
    token_bytes = [*tokenizer.token_bytes(), END_OF_TEXT.encode()]
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    for token in tokens:
        yield decoder.decode(token_bytes[token])
    yield decoder.decode(b"", final=True)


def stream_text(continue_ids: Continue, tokenizer: Tokenizer, ids: list[int], generator: torch.Generator) -> None:
    """Prints a prompt and its continuation on a terminal, as the continuation is generated."""
    new = continue_ids(torch.tensor([ids], device=generator.device), generator=generator)
    for piece in decode_pieces(chain(shown_ids(ids, tokenizer), (int(token) for token in new)), tokenizer):
        print(piece.translate(CONTROL_CHARACTERS), end="", flush=True)
    print(flush=True)


def converse(
    encode: Callable[[str], list[int]], stream: Callable[[list[int], torch.Generator], None], seed: int,
    device: torch.device,
) -> None:  # fmt: skip
    """Streams a continuation of each prompt that is typed, until Ctrl-D, or Ctrl-C on an empty line.

    The first text is sampled with --seed; the seed of a later one depends on --seed and the number of texts before it.
    """
    try:  # only here: in a pipe, importing it may print a control sequence
        import readline  # with it, `input` has line editing and a history
    except ImportError:  # on Windows
        readline = None  # type: ignore[assignment]
    sys.stdin.reconfigure(errors="surrogateescape")  # type: ignore[union-attr]  # `encode_prompt` reports errors
    num_texts = 0
    while True:
        try:
            prompt = input("> ")
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()
            if readline and readline.get_line_buffer():
                continue
            return
        if not prompt:
            continue
        try:
            ids = encode(prompt)
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)
            continue
        generator = devices.seeded_generator(device, *((seed, num_texts) if num_texts else (seed,)))
        num_texts += 1
        try:
            stream(ids, generator)
        except KeyboardInterrupt:
            print()
        print()


# -----------------------------------------------------------------------------
# Command line


@dataclass(frozen=True)
class Arguments:
    """The command line."""

    # fmt: off
    model: str = flag("", "hub name, such as gpt2, or checkpoint directory", short="-m", required=True,
        metavar="NAME_OR_DIR")
    prompt: str | None = flag(None,
        "text to continue; without it, the piped text or, on a terminal without -n, what you type",
        default_help=DEFAULT_PROMPT, may_be_empty=True, metavar="TEXT")
    number: int | None = flag(None, "number of texts", default_help=str(DEFAULT_NUM_TEXTS), short="-n", at_least=1)
    max_new_tokens: int = flag(32, "tokens to add to the prompt", at_least=1, at_most=1_000_000)
    temperature: float = flag(1.0, "below 1 favours likely tokens; 0 always takes the likeliest", at_least=0)
    top_k: int = flag(50, "sample from the K likeliest tokens; 0: from all", at_least=0, metavar="K")
    top_p: float = flag(1.0,
        "nucleus sampling: after --top-k, keep only the fewest tokens whose probabilities add up to at least P; 1: keep all",
        at_most=1, metavar="P")
    seed: int = flag(1337, "random seed", at_least=0)
    dtype: str = flag("fp32", "precision of matrix products; auto is the fastest native one",
        choices=("auto", *devices.DTYPES))
    device: str = flag("auto", "where to generate", default_help="auto, the best available", short="-d",
        choices=DEVICES)
    tokenizer: str | None = flag(None, "the tokens of a model without tokenizer.json", default_help="the model's",
        choices=tuple(VOCAB_SIZES))
    # fmt: on


def parse_arguments(argv: Sequence[str] | None) -> Arguments:
    """Parses the command line.

    Raises:
        UserError: it is not valid; one line for each problem.
    """
    args = Arguments(**parse_flags(Arguments, argv, __doc__))
    if args.top_p <= 0:
        raise UserError("--top-p must be more than 0. For the likeliest token, use --temperature 0.")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_arguments(argv)
    device = devices.pick_device(args.device)
    dtype = devices.DTYPES[devices.pick_dtype(args.dtype, device)]
    directory = find_model(args.model)
    sizes = read_config(directory)
    tokenizer = tokenizer_of_model(directory, sizes["vocab_size"], args.tokenizer)
    encode = partial(encode_prompt, tokenizer=tokenizer, block_size=sizes["block_size"], model_name=args.model)
    prompt = piped_prompt() if args.prompt is None else args.prompt
    on_terminal = sys.stdout.isatty()
    interactive = (
        prompt is None and args.number is None and on_terminal and sys.stdin is not None and sys.stdin.isatty()
    )
    # report an error in the prompt before loading the weights, which takes longer
    if prompt is None:  # the default, as much of it as the context holds
        ids = [] if interactive else tokenizer.encode(DEFAULT_PROMPT)[: sizes["block_size"]]
    else:
        ids = encode(prompt)
    model = GPT.from_pretrained(directory, verify=False).to(device).eval()

    prepare_weights(model, dtype, single_row=interactive or args.number == 1)
    continue_ids = partial(
        generate, model, max_new_tokens=args.max_new_tokens, temperature=args.temperature, top_k=args.top_k or None,
        top_p=args.top_p,
    )  # fmt: skip
    generator = devices.seeded_generator(device, args.seed)
    with devices.autocast(device, dtype):
        if interactive:
            print(f"{args.model} continues what you type.\nCtrl-C stops a text, Ctrl-D exits.")
            converse(encode, partial(stream_text, continue_ids, tokenizer), args.seed, device)
        elif args.number == 1 and on_terminal:
            stream_text(continue_ids, tokenizer, ids, generator)
        else:
            batch = rows_in_memory(model.config, len(ids), args.max_new_tokens)
            print_texts(continue_ids, tokenizer, ids, args.number or DEFAULT_NUM_TEXTS, batch, generator)


if __name__ == "__main__":
    run_cli(main)
