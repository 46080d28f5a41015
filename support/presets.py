"""What the flags are that were not given, where the recipe's own defaults do not fit: for the demo, and for one's own text."""

from __future__ import annotations

import glob
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

from support import shards
from support.cli import UserError

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
TEXT = {".txt": 1.0, ".jsonl": 1.0, ".parquet": 2.0, ".gz": 3.0, ".zst": 3.0}  # bytes of text in one of the file, about
BYTES_PER_TOKEN = {"gpt2": 4, "bytes": 1}
UPDATES = 1000  # or more; of 2,048 tokens at least, and those of GPT-2 at most


def preset(given: dict[str, Any]) -> dict[str, Any]:
    """Values for flags that are not `given`: of --demo, of --text, or none.

    Raises:
        UserError: there is no text in what --text names.
    """
    if given.get("text"):
        if given.get("demo"):
            raise UserError("--demo brings its own text. Leave out --text, or --demo.")
        return _for_text(given)
    values = DEMO if given.get("demo") else {}
    # those two bring other sizes than the demo's
    return {k: v for k, v in values.items() if k not in SIZES or not given.keys() & {"model", "init_from"}}


def _for_text(given: dict[str, Any]) -> dict[str, Any]:
    amount = sum(path.stat().st_size * TEXT[path.suffix.lower()] for path in texts(given["text"]))
    tokens = 0.9 * amount / BYTES_PER_TOKEN[given.get("tokenizer", "gpt2")]  # the last tenth is held out
    if "init_from" in given:  # a few epochs, and gently
        to_train, updates, least = tokens * (3 if amount < 4e7 else 1), 200, 1024
        values: dict[str, Any] = dict(max_lr=1e-3 if "lora_rank" in given else 1e-4)
    else:  # a small text more than once, but not so often that it is learnt by heart
        to_train, updates, least = max(tokens, min(1.5e6, 10 * tokens)), UPDATES, 2048
        values = dict(recipe="fast") | (
            {} if "model" in given else next(m for most, m in MODELS.items() if amount <= most)
        )
    size = min(2**19, max(least, 2 ** int(math.log2(max(1.0, to_train / updates)))))
    size = given.get("total_batch_size", size)
    steps = given.get("max_steps", max(1, round(to_train / size)))
    often = max(1, steps // 4)
    return values | dict(
        data=str(Path(given.get("out", "log")) / "data"), shuffle=True, total_batch_size=size, max_steps=steps,
        warmup_steps=steps // 12, val_every=often, sample_every=often, checkpoint_every=often, keep=1,
    )  # fmt: skip


def texts(name: str) -> list[Path]:
    """The files of text that --text names: itself, or those anywhere in a folder."""
    path = Path(name)
    if not path.exists():
        raise UserError(f"there is no {name}. Name a file of text, or a folder of them, with --text.")
    files = (
        [path] if path.is_file() else [Path(p) for p in sorted(glob.glob(f"{glob.escape(name)}/**/*", recursive=True))]
    )
    files = [file for file in files if file.suffix.lower() in TEXT and file.is_file()]
    if not files:
        raise UserError(f"no text in {name}: it is read from {', '.join(TEXT)}. Name others with --text.")
    return files


def make_shards(config: Any, first: bool, resumed: bool) -> None:
    """Makes the shards of the demo or of one's own text with fineweb.py, where they are not there yet.

    A new run of the `first` process of a node has fineweb.py look whether those that are there are of this text.

    Raises:
        UserError: it failed, and has said why.
    """
    if not config.demo and config.text is None:
        return
    if shards.complete(config.data) and (config.demo or resumed or not first):
        return
    source = ["--demo"] if config.demo else ["--tokenizer", config.tokenizer, "--input", *_patterns(config.text)]
    fineweb = Path(__file__).parents[1] / "fineweb.py"
    if subprocess.run([sys.executable, fineweb, *source, "--output", config.data]).returncode:
        raise UserError("no shards could be made of the text, see above.", this_rank_only=True)


def _patterns(name: str) -> list[str]:
    """What `--input` of fineweb.py is for `texts`: there may be too many of them for a command line."""
    if Path(name).is_file():
        return [name]
    return sorted({f"{glob.escape(name)}/**/*{file.suffix}" for file in texts(name)})
