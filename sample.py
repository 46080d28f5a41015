"""Writes text with a checkpoint or a model of the Hugging Face hub.

python sample.py --model log/model_19073 --prompt "Hello, I'm a language model,"
"""

from __future__ import annotations

import torch

from support import devices
from support.cli import Parser, UserError, add_device_flag, run
from support.tokenizer import get_tokenizer, name_for_vocab_size
from train_gpt2 import GPT, sample


def main(argv: list[str] | None = None) -> None:
    parser = Parser(description="Write text with a GPT-2: a checkpoint directory or a model of the Hugging Face hub.")
    parser.add_argument(
        "--model", required=True, metavar="NAME_OR_DIR", help="hub name, such as gpt2, or checkpoint directory"
    )
    parser.add_argument(
        "--prompt", default="Hello, I'm a language model,", help="text to go on from (default: %(default)s)"
    )
    parser.add_argument("-n", type=int, default=4, metavar="N", help="how many texts (default: 4)")
    parser.add_argument("--max-new-tokens", type=int, default=32, metavar="N", help="tokens to add (default: 32)")
    parser.add_argument(
        "--temperature",
        type=float,
        default=1.0,
        metavar="X",
        help="below 1 for safer words, 0 for the likeliest (default: 1.0)",
    )
    parser.add_argument(
        "--top-k", type=int, default=50, metavar="K", help="choose among the K likeliest tokens; 0 is all (default: 50)"
    )
    parser.add_argument("--seed", type=int, default=1337, metavar="N", help="of the random choices (default: 1337)")
    add_device_flag(parser)
    args = parser.parse_args(argv)
    least = {"n": 1, "max_new_tokens": 1, "temperature": 0, "top_k": 0, "seed": 0}
    problems = [
        f"{'-' if k == 'n' else '--'}{k.replace('_', '-')} must be {v} or more."
        for k, v in least.items()
        if not getattr(args, k) >= v
    ]
    if problems:
        raise UserError(*problems)

    device = torch.device(devices.pick_device_type(args.device))
    model = GPT.from_pretrained(args.model).to(device)
    tokenizer = get_tokenizer(name_for_vocab_size(model.config.vocab_size))
    length = len(tokenizer.encode(args.prompt))
    if length > model.config.block_size:
        raise UserError(
            f"the prompt has {length} tokens, and the context of {args.model} is {model.config.block_size}. Shorten it."
        )
    texts = sample(
        model,
        tokenizer,
        args.prompt,
        args.n,
        args.max_new_tokens,
        devices.seeded_generator(device, args.seed),
        temperature=args.temperature,
        top_k=args.top_k or None,
    )
    print("\n---\n".join(texts))


if __name__ == "__main__":
    run(main)
