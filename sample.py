"""Generates text with a checkpoint or a model of the Hugging Face hub.

    python sample.py --model log/model_19073 --prompt "Hello, I'm a"
    python sample.py --model gpt2 -n 1 --max-new-tokens 99  # one longer text
    python sample.py --model gpt2 --temperature 0           # the likeliest tokens

Several texts are separated by lines of three dashes.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch

from support.checkpoints.huggingface import find_model
from support.cli import Parser, UserError, add_device_flag, run_cli
from support.data.tokenizer import tokenizer_of_model
from support.runtime import devices
from train_gpt2 import GPT, sample

MAX_BATCH = 64  # texts generated at a time


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(__doc__)
    group = parser.add_argument_group("flags")
    add = group.add_argument
    add(
        "--model",
        required=True,
        metavar="NAME_OR_DIR",
        help="hub name, such as gpt2, or checkpoint directory (required)",
    )
    add(
        "--prompt",
        default="Hello, I'm a language model,",
        metavar="TEXT",
        help="text to continue (default: %(default)s)",
    )
    add("-n", type=int, default=4, metavar="N", help="number of texts (default: 4)")
    add("--max-new-tokens", type=int, default=32, metavar="N", help="tokens to add to the prompt (default: 32)")
    add("--temperature", type=float, default=1.0, metavar="X", help="less than 1 for likelier tokens, 0 for the likeliest (default: 1.0)")  # fmt: skip
    add(
        "--top-k",
        type=int,
        default=50,
        metavar="K",
        help="sample from the K likeliest tokens; 0: from all (default: 50)",
    )
    add("--seed", type=int, default=1337, metavar="N", help="random seed (default: 1337)")
    add_device_flag(group)
    args = parser.parse_args(argv)
    lowest = {"n": 1, "max_new_tokens": 1, "temperature": 0, "top_k": 0, "seed": 0}
    problems = [
        f"{'-' if name == 'n' else '--'}{name.replace('_', '-')} must be {bound} or more."
        for name, bound in lowest.items()
        if not getattr(args, name) >= bound
    ]
    if problems:
        raise UserError(*problems)
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_arguments(argv)
    device = torch.device(devices.pick_device_type(args.device))
    directory = find_model(args.model)
    model = GPT.from_pretrained(directory, verify=False).to(device)
    tokenizer = tokenizer_of_model(directory, model.config.vocab_size)
    length = len(tokenizer.encode(args.prompt))
    if length > model.config.block_size:
        raise UserError(
            f"the prompt has {length} tokens, and the context of {args.model} is {model.config.block_size}. Shorten it."
        )
    generator = devices.seeded_generator(device, args.seed)
    options = (args.max_new_tokens, generator, args.temperature, args.top_k or None)
    for first in range(0, args.n, MAX_BATCH):
        texts = sample(model, tokenizer, args.prompt, min(MAX_BATCH, args.n - first), *options)
        if first:
            print("---")
        print("\n---\n".join(texts), flush=True)


if __name__ == "__main__":
    run_cli(main, prints_result=True)
