"""What the flags are that were not given, where the recipe's own defaults do not fit: for the demo, and for one's own text."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

from support import huggingface, shards
from support.cli import UserError, flag_name

# What --demo sets: about two minutes on two CPU cores.
DEMO = dict(
    data="demo_data", out="log_demo", n_layer=3, n_head=4, n_embd=128, block_size=64, batch_size=16,
    total_batch_size=1024, max_steps=1500, warmup_steps=40, max_lr=4e-3, shuffle=True,
    val_every=200, val_tokens=65536, hellaswag_every=0, sample_every=0,
)  # fmt: skip
SIZES = {"n_layer", "n_head", "n_embd", "block_size"}
# Models for so many bytes of text at most. Small text wants a small model: a large one learns it by heart.
MODELS = {
    4e6: dict(n_layer=4, n_head=4, n_embd=128, block_size=64, batch_size=32),
    4e7: dict(n_layer=6, n_head=4, n_embd=256, block_size=256),
    4e8: dict(n_layer=8, n_head=8, n_embd=512, block_size=512),
    math.inf: {},  # gpt2
}
UNPACKED = {".gz": 3, ".zst": 3}  # bytes of text in one of the file, about
BYTES_PER_TOKEN = {"gpt2": 4, "bytes": 1}
CHOSEN = (
    "tokenizer", "recipe", "max_lr", "total_batch_size", "max_steps", "warmup_steps", "val_every", "sample_every",
    "checkpoint_every", "keep",
)  # fmt: skip
UPDATES = 1000  # or more; of 2,048 tokens at least, and those of GPT-2 at most


def preset(given: dict[str, Any]) -> dict[str, Any]:
    """Values for flags that are not `given`: of --demo, of --text, or none.

    Raises:
        UserError: there is no text in what --text names.
    """
    if "text" in given:
        if given.get("demo"):
            raise UserError("--demo brings its own text. Leave out --text, or --demo.")
        return _for_text(given)
    values = DEMO if given.get("demo") else {}
    # those two bring other sizes than the demo's
    return {k: v for k, v in values.items() if k not in SIZES or not given.keys() & {"model", "init_from"}}


def _for_text(given: dict[str, Any]) -> dict[str, Any]:
    if "data" in given:
        raise UserError("--text makes its shards in --out. Leave out --data; or leave out --text, to train on shards.")
    amount, base = sum(map(_bytes_of_text, texts(given["text"]))), _base(given.get("init_from", ""))
    tokenizer = given.get("tokenizer", "bytes" if base.get("vocab_size") == 257 else "gpt2")
    tokens = 0.9 * amount / BYTES_PER_TOKEN[tokenizer]  # the last tenth is held out
    if "init_from" in given:  # a few epochs, and gently
        to_train, updates, least = tokens * (3 if amount < 4e7 else 1), 200, 1024
        # Rates for GPT-2; those of AdamW are the higher, the narrower a model is (arXiv:2203.03466).
        narrower = max(1.0, 768 / base.get("n_embd", 768))
        values: dict[str, Any] = dict(max_lr=(1e-3 if "lora_rank" in given else 1e-4) * narrower)
    else:  # a small text more than once, but not so often that it is learnt by heart
        to_train, updates, least = max(tokens, min(1.5e6, 10 * tokens)), UPDATES, 2048
        values = dict(recipe="fast") | (
            {} if "model" in given else next(m for most, m in MODELS.items() if amount <= most)
        )
    size = min(2**19, max(least, 2 ** int(math.log2(max(1.0, to_train / updates)))))
    size = given.get("total_batch_size", size)
    steps = given.get("max_steps", max(1, round(to_train / max(1, size))))
    often = max(1, steps // 4)
    return values | dict(
        data=str(Path(given.get("out", "log")) / "data"), tokenizer=tokenizer, shuffle=True, total_batch_size=size, max_steps=steps,
        warmup_steps=steps // 12, val_every=often, sample_every=often, checkpoint_every=often, keep=1,
    )  # fmt: skip


def _base(init_from: str) -> dict[str, Any]:
    """The sizes of the model in a folder; none of a name of the hub, which is looked up later."""
    return huggingface.read_config(huggingface.find(init_from)) if init_from and Path(init_from).is_dir() else {}


def _bytes_of_text(path: Path) -> float:
    if path.suffix.lower() == ".parquet":
        from support.corpus import parquet_text_bytes

        return parquet_text_bytes(path, "text")
    return path.stat().st_size * UNPACKED.get(path.suffix.lower(), 1)


def texts(name: str) -> list[Path]:
    """The files of text that --text names: itself, or those anywhere in a folder."""
    from support.corpus import COMPRESSED, KINDS, kind_of, texts_in

    path = Path(name)
    if not name or not path.exists():
        raise UserError(f"there is no {name!r}. Name a file of text, or a folder of them, with --text.")
    files = texts_in(path) if path.is_dir() else [path] if kind_of(path) else []
    if not files:
        kinds = f"{', '.join(KINDS)}, and the first two also with {' or '.join(COMPRESSED)}"
        raise UserError(f"no text in {name}: it is read from {kinds}. Name others with --text.")
    return files


def chosen_for_text(config: Any) -> list[str]:
    """The flags that --text is short for, but the sizes of the model."""
    values = {flag_name(name): getattr(config, name) for name in CHOSEN}
    return [f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}" for name, value in values.items()]


def make_shards(config: Any, rank: int, resumed: bool) -> None:
    """Makes the shards of the demo or of one's own text with fineweb.py on rank 0, where they are not there yet.

    In a new run it looks whether those that are there are of this text.

    Raises:
        UserError: it failed, and has said why.
    """
    if not config.demo and config.text is None:
        return
    while rank > 0 and not shards.complete(config.data):  # the folder is one that all nodes see, as that of the run
        time.sleep(1)
    if rank > 0 or (shards.complete(config.data) and (config.demo or resumed)):
        return
    if config.init_from:  # before an hour of tokenising, not after it
        huggingface.find(config.init_from)
    text = ["--tokenizer", config.tokenizer, "--split-documents", "--input", os.path.join(".", config.text or "")]
    fineweb = Path(__file__).parents[1] / "fineweb.py"
    command = [sys.executable, fineweb, "--output", config.data, *(["--demo"] if config.demo else text)]
    if _returncode(command):
        raise UserError(
            f"no shards could be made in {config.data}, see above. For another text or tokenizer name another --out.",
            this_rank_only=True,
        )


def _returncode(command: list[str | Path]) -> int:
    """That of a program, which SIGTERM ends together with this one."""

    def end(number: int, _: Any) -> NoReturn:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        return subprocess.run(command).returncode
    finally:
        signal.signal(signal.SIGTERM, before)
