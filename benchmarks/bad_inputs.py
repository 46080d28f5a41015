"""The random inputs of bench_bad_input.py: fixtures, mutations of them, and the commands that read them."""

from __future__ import annotations

import contextlib
import copy
import gzip
import hashlib
import io
import json
import math
import os
import pickle
import random
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType

import harness  # noqa: F401  makes the scripts importable
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

import fineweb
import hellaswag
import sample
import train_gpt2
from support.data.tokenizer import get_tokenizer

SCRIPTS: dict[str, ModuleType] = {m.__name__: m for m in (train_gpt2, fineweb, hellaswag, sample)}
CANARY = Path("executed")  # created if a malicious pickle is executed
FIXTURES = Path("../../../fixtures")  # relative to the folder of an input

TINY_FLAGS = (
    "--n-layer 1 --n-head 2 --n-embd 8 --block-size 16 --total-batch-size 64 --batch-size 4 --warmup-steps 1 "
    "--val-every 2 --val-tokens 64 --sample-every 0 --checkpoint-every 2 --device cpu --dtype fp32"
).split()
RESUME_FLAGS = "--resume --device cpu --out".split()
SHARD_FLAGS = "--output shards --tokenizer bytes --shard-size 1000 --input text".split()
BPE_FLAGS = [*SHARD_FLAGS, *"--tokenizer bpe --vocab-size 320".split()]

# -----------------------------------------------------------------------------
# Mutations

NUMBERS = (0, -1, 1, 2, 3, 2**31, 2**63, 10**30, 0.5, -0.0, 1e308, 1e-320, math.nan, math.inf, -math.inf)
STRINGS = (
    *"x data nan %s{} é🙂 ../../x /proc/nope \ud800 \x1b[2J\x00".split(" "), "", "a\nb", "a" * 70_000,
)  # fmt: skip
DEEP, HUGE = "<deep>", "<huge>"  # stand for 100,000 nested lists and a number with 5,000 digits
STRANGE = (None, True, False, *NUMBERS, *STRINGS, [], {}, [[]], [1, "a"], {"": 0}, {"a": [None]}, DEEP, HUGE)


def mutate_bytes(rng: random.Random, content: bytes) -> bytes:
    """Applies some random edits, mostly near the beginning or the end, where a file's structure is."""
    data = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 6))):
        near = rng.choice((100, 1000, len(data) + 1))
        start = min(rng.randrange(near), len(data))
        start = rng.choice((start, len(data) - start))
        end = start + rng.choice((1, 2, 8, 100))
        edit = rng.choice(("flip", "cut", "insert", "delete", "repeat", "fill"))
        if edit == "flip" and start < len(data):
            data[start] ^= 1 << rng.randrange(8)
        elif edit == "cut":
            del data[start:]
        elif edit == "insert":
            data[start:start] = rng.randbytes(end - start)
        elif edit == "delete":
            del data[start:end]
        elif edit == "repeat":
            data[end:end] = data[start:end] * rng.choice((1, 1, 500))
        elif edit == "fill":
            data[start:end] = rng.choice((b"\0", b"\xff", b"9", b"[", b'"')) * (end - start)
    return bytes(data)


def mutate_tree(rng: random.Random, tree: object, values: Sequence[object] = STRANGE) -> object:
    """Returns a copy of nested dicts and lists with one entry replaced, removed, renamed or repeated."""
    root = [copy.deepcopy(tree)]
    container, key = root, 0
    while isinstance(child := container[key], dict | list) and child and rng.random() < 0.85:
        container, key = child, rng.choice(list(child) if isinstance(child, dict) else range(len(child)))
    action = rng.choice(("replace", "replace", "replace", "remove", "rename", "repeat"))
    if action == "replace" or container is root:
        container[key] = rng.choice(values)
    elif action == "remove":
        del container[key]
    elif isinstance(container, list):
        container.insert(0, copy.deepcopy(container[key]))
    else:
        container[rng.choice(("", "x", "0", "__class__", "a" * 9999))] = container.pop(key) if action == "rename" else 0
    return root[0]


def to_json(tree: object) -> bytes:
    text = json.dumps(tree).replace(f'"{DEEP}"', "[" * 100_000 + "]" * 100_000).replace(f'"{HUGE}"', "9" * 5_000)
    return text.encode()


def mutate_file(rng: random.Random, path: Path) -> None:
    """Changes some bytes or, in JSON, a value. Sometimes replaces the file with a pickle, or removes it."""
    content = path.read_bytes()
    way = rng.random()
    if path.suffix in (".json", ".jsonl") and way < 0.6:
        lines = content.splitlines() if path.suffix == ".jsonl" else [content]
        number = rng.randrange(len(lines))
        lines[number] = to_json(mutate_tree(rng, json.loads(lines[number])))
        path.write_bytes(b"\n".join(lines))
    elif path.suffix == ".safetensors" and way < 0.5:
        size = 8 + int.from_bytes(content[:8], "little")
        header = to_json(mutate_tree(rng, json.loads(content[8:size])))
        path.write_bytes(len(header).to_bytes(8, "little") + header + content[size:])
    elif way < 0.95:
        path.write_bytes(mutate_bytes(rng, content))
    elif way < 0.98:
        path.write_bytes(pickle.dumps(MaliciousPickle(rng)))
    else:
        path.unlink()


class MaliciousPickle:
    """Creates the canary when it is unpickled."""

    def __init__(self, rng: random.Random):
        touch = f"open({str(CANARY)!r}, 'w')"
        self.call = rng.choice(((open, (str(CANARY), "w")), (exec, (touch,)), (os.mkdir, (str(CANARY),))))

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return self.call


def files_of(checkpoint: Path) -> list[Path]:
    """Returns the files of a checkpoint, including its adapter's."""
    return sorted(path for path in checkpoint.rglob("*") if path.is_file())


def update_checksums(checkpoint: Path) -> None:
    """Makes a mutated checkpoint look intact."""
    paths = [path for path in files_of(checkpoint) if path.name != "checkpoint.json"]
    listed = {
        p.relative_to(checkpoint).as_posix(): {
            "bytes": p.stat().st_size,
            "sha256": hashlib.sha256(p.read_bytes()).hexdigest(),
        }
        for p in paths
    }
    (checkpoint / "checkpoint.json").write_text(json.dumps({"files": listed}))


# -----------------------------------------------------------------------------
# The kinds of input. Each function mutates files in the current folder and returns a command line.


@dataclass(frozen=True)
class Command:
    """A script, its arguments, and a regular expression for the paths that it may change if it exits with 0."""

    script: str
    argv: list[str]
    may_change: str = "nothing"


def bad_command_line(rng: random.Random) -> Command:
    """Makes a command line with too few or too many flags, mostly with unsuitable values."""
    copy_fixtures("data", "run", "lora", "gpt2", "text", "items.jsonl")
    shutil.copytree("data", "demo_data")
    script = rng.choice(list(SCRIPTS))
    argv = {
        "train_gpt2": [*TINY_FLAGS, "--data", "data", "--out", "new", "--max-steps", "2"],
        "fineweb": SHARD_FLAGS,
        "hellaswag": "-m gpt2 --data items.jsonl -d cpu".split(),
        "sample": "--model run/model_00004 -d cpu --max-new-tokens 4".split(),
    }[script]
    argv = list(argv) if script == "train_gpt2" or rng.random() < 0.8 else []
    for _ in range(rng.choice((1, 1, 1, 2, 2, 6))):
        name = rng.choice(flags_of(SCRIPTS[script]))
        value = rng.choice(POOLS.get(name) or rng.choice((SMALL, SMALL, WORDS, TEXTS, PATHS)))
        words = rng.choice(([name, value], [name, value], [name, value], [name], [f"{name}={value}"], [value]))
        place = rng.choice((0, len(argv), rng.randrange(len(argv) + 1)))
        argv[place:place] = words
    return Command(script, argv, r"(run|log_demo|demo_data|new|shards|data|text)/.*|results\.json")


@cache
def flags_of(script: ModuleType) -> list[str]:
    with contextlib.redirect_stdout(io.StringIO()) as text:
        call(script, ["--help"])
    return sorted(set(re.findall(r"(?<![\w-])--?[a-z][a-z0-9-]*(?=[ ,\n])", text.getvalue())) - EXCLUDED_FLAGS)


def bad_shards(rng: random.Random) -> Command:
    """Mutates a manifest or a shard; the command trains on the shards, checks them, or continues making them."""
    copy_fixtures("data", "run", "text", "finished", "partial", "bpe_data", "bpe")
    folder = rng.choice(("data", "data", "finished", "partial", "bpe_data"))
    path = rng.choice(sorted(Path(folder).glob("*.npy")) + sorted(Path(folder).glob("*.json")) * 3)
    mutate_file(rng, path)
    if path.suffix == ".npy" and path.is_file() and rng.random() < 0.2:
        with open(path, "wb") as file:
            np.save(file, np.array([MaliciousPickle(rng)], dtype=object), allow_pickle=True)
    if folder in ("finished", "partial") and rng.random() < 0.8:
        return Command("fineweb", [*SHARD_FLAGS, "--output", folder], f"{folder}/.*")
    if folder == "bpe_data" and rng.random() < 0.3:
        return Command("fineweb", [*BPE_FLAGS, "--output", folder], f"{folder}/.*")
    run, data = ("bpe", "bpe_data") if folder == "bpe_data" else ("run", "data")
    check = ("fineweb", ["--check", folder])
    new = ("train_gpt2", [*TINY_FLAGS, "--data", data, "--out", "new", "--max-steps", "2"])
    script, argv = rng.choice((check, new, ("train_gpt2", [*RESUME_FLAGS, run])))
    return Command(script, argv, rf"{run}/log\.txt")


def bad_checkpoint(rng: random.Random) -> Command:
    """Mutates any file of a checkpoint, and usually updates the checksums to match."""
    copy_fixtures("data", "run", "lora", "gpt2", "items.jsonl", "bpe_data", "bpe")
    run = rng.choice(("run", "run", "lora", "bpe"))
    checkpoint = Path(run, "model_00004")
    mutate_file(rng, rng.choice(files_of(checkpoint)))
    if rng.random() < 0.8 and not (checkpoint / "checkpoint.json").is_dir():
        update_checksums(checkpoint)
    return use_checkpoint(rng, run)


def pickles(rng: random.Random) -> Command:
    """Puts a pickle that would create the canary into a checkpoint: a plain one, or in a format of torch.save."""
    copy_fixtures("data", "run", "lora", "gpt2", "items.jsonl")
    run = rng.choice(("run", "lora"))
    checkpoint = Path(run, "model_00004")
    names = [path.relative_to(checkpoint).as_posix() for path in files_of(checkpoint)]
    name = rng.choice(names + ["trainer.pt", "pytorch_model.bin"] * 3)
    alone, in_config, in_state = (MaliciousPickle(rng) for _ in range(3))
    evil = rng.choice((alone, {"config": in_config}, {"step": 4, "optimizer": {"state": {0: in_state}}}))
    torch.save(evil, checkpoint / name, _use_new_zipfile_serialization=rng.random() < 0.5)
    if rng.random() < 0.3:
        (checkpoint / name).write_bytes(pickle.dumps(evil, protocol=rng.randrange(6)))
    if name == "pytorch_model.bin":
        (checkpoint / "model.safetensors").unlink(missing_ok=True)
    if name != "checkpoint.json":
        update_checksums(checkpoint)
    return use_checkpoint(rng, run)


def use_checkpoint(rng: random.Random, run: str) -> Command:
    """Returns a command that opens the last checkpoint of a run."""
    checkpoint = f"{run}/model_00004"
    data = "bpe_data" if run == "bpe" else "data"
    start = [*TINY_FLAGS[8:], "--data", data, "--out", "new", "--max-steps", "2", "--init-from", checkpoint]
    commands = [
        ("train_gpt2", [*RESUME_FLAGS, run]),
        ("train_gpt2", ["--fork", checkpoint, *"--out new --max-steps 8 --device cpu".split()]),
        ("train_gpt2", start),
        ("sample", f"--model {checkpoint} -d cpu --max-new-tokens 4".split()),
        ("hellaswag", f"-m {checkpoint} --data items.jsonl -d cpu".split()),
    ]
    script, argv = rng.choice(commands[:1] if rng.random() < 0.4 else commands)
    return Command(script, argv, rf"{run}/(log\.txt|model_00004/.*)")


def bad_hellaswag(rng: random.Random) -> Command:
    """Mutates HellaSwag items, or the model that is scored on them."""
    copy_fixtures("gpt2", "items.jsonl")
    mutate_file(rng, Path(rng.choice(("items.jsonl", "items.jsonl", "gpt2/config.json", "gpt2/model.safetensors"))))
    argv = f"-m gpt2 --data items.jsonl -d cpu --json results.json --style {rng.choice(('tokens', 'harness'))}".split()
    return Command("hellaswag", argv, r"results\.json")


def bad_text(rng: random.Random) -> Command:
    """Mutates a text for fineweb.py: .txt, .jsonl or .parquet, possibly compressed."""
    copy_fixtures("text")
    mutate_file(rng, rng.choice(sorted(Path("text").iterdir())))
    more = rng.choice(([], ["--tokenizer", "gpt2"], ["--document-separator", "7"], ["--val-fraction", "0.1"]))
    return Command("fineweb", [*SHARD_FLAGS, *more])


def bad_log(rng: random.Random) -> Command:
    """Mutates log.txt or starts.jsonl before a run is resumed."""
    copy_fixtures("data", "run")
    path = Path("run", rng.choice(("log.txt", "starts.jsonl")))
    mutate_file(rng, path)
    keep = ["--keep", "1"] if rng.random() < 0.5 else []
    argv = [*RESUME_FLAGS, "run", *keep]
    return Command("train_gpt2", argv, r"run/log\.txt" + r"|run/model_.*" * bool(keep))


KINDS = {kind.__name__.replace("_", " "): kind for kind in (
    bad_command_line, bad_shards, bad_checkpoint, pickles, bad_hellaswag, bad_text, bad_log,
)}  # fmt: skip

# Values for flags. The numbers are small, since large ones are valid and would take long.
SMALL = (*"0 -1 1 2 3 7 16 1.5 1e-3 nan -inf 1e400 x 0x10 1_0 \u0663".split(), " 2", "9" * 5000)
WORDS = "gpt2 bytes auto cpu mps fp16 bf16 fast muon adamw wsd cosine harness tokens val test tiktoken newest".split()
TEXTS = ("1e9", "9" * 30, "a" * 70_000, "é🙂", "\udcff", "a\nb", "\x1b[2J", "%s{}", "-", "--", "=", "--out", "\\n")
PATHS = (*"run run/model_00004 lora/model_00004 data data/manifest.json text text/a.txt text/b.jsonl text/*.parquet".split(),
         *"items.jsonl nothing new/er ../../x . /proc/nope /dev/null /dev/null/x gpt2 nobody/nothing http://x".split(),
         *"~ * [ a\\b -x \udcff".split(), "", "é 🙂", "a\nb", "a" * 300)  # fmt: skip
PATH_FLAGS = "--data --out --init-from --hellaswag-data --input --dataset --check --output --model --json -m".split()
SIZE_FLAGS = ("--n-layer --n-head --n-embd --block-size --total-batch-size --batch-size --max-steps --lora-rank "
              "--max-new-tokens -n --profile").split()  # fmt: skip
POOLS = dict.fromkeys(PATH_FLAGS, PATHS) | dict.fromkeys(SIZE_FLAGS, SMALL)
POOLS |= {"--text": TEXTS, "--shard-size": ("100", "1e3", "-1", "1.5", "nan", *TEXTS)}  # smaller shards are slow
POOLS |= dict.fromkeys(("--n-layer", "--n-embd", "--block-size", "--batch-size"), (*SMALL, "1000000", "100000000"))
# --compile would take minutes.
EXCLUDED_FLAGS = {"--compile", "--help"}

# -----------------------------------------------------------------------------
# Fixtures


def make_fixtures(folder: Path) -> None:
    """Creates the files that valid inputs are built from. They are small, and the same in every run."""
    folder.mkdir()
    os.chdir(folder)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    rng = random.Random(0)
    texts = [" ".join(f"{rng.randrange(50)} and {rng.randrange(50)}." for _ in range(40)) for _ in range(12)]
    records = "".join(json.dumps({"text": text, "id": i}) + "\n" for i, text in enumerate(texts))
    Path("text").mkdir()
    Path("text/a.txt").write_text("\n\n".join(texts))
    Path("text/b.jsonl").write_text(records)
    Path("text/c.jsonl.gz").write_bytes(gzip.compress(records.encode(), mtime=0))
    Path("text/d.txt.zst").write_bytes(pa.compress("\n".join(texts).encode(), codec="zstd", asbytes=True))
    pq.write_table(pa.table({"text": texts, "id": list(range(12))}), "text/e.parquet", row_group_size=5)
    for path in Path("text").iterdir():
        os.utime(path, (1e9, 1e9))  # fixed, because a manifest contains a hash of it
    item = {"ctx": "A cat", "activity_label": "Pets", "ctx_a": "A cat", "ctx_b": "it", "label": 1, "ind": 4}
    item |= {"endings": [f"sits on {n} mats." for n in "abcd"]}
    Path("items.jsonl").write_text("".join(json.dumps(item | {"label": i}) + "\n" for i in range(4)))
    for folder in ("data", "finished"):
        fineweb.main([*SHARD_FLAGS, "--output", folder])
    fineweb.main([*BPE_FLAGS, "--output", "bpe_data"])
    shutil.copytree("finished", "partial")
    manifest = json.loads(Path("partial/manifest.json").read_text())
    manifest |= {"complete": False, "shards": manifest["shards"][:-3], "unsplit": [], "unsplit_complete": False}
    Path("partial/manifest.json").write_text(json.dumps(manifest))
    train = [*TINY_FLAGS, "--data", "data", "--max-steps", "6"]
    call(train_gpt2, [*train, "--out", "run"])
    call(train_gpt2, [*train, "--out", "bpe", "--data", "bpe_data"])
    shutil.copytree("run/model_00004", "base")
    call(train_gpt2, [*train[8:], "--out", "lora", "--init-from", "base", "--lora-rank", "2"])
    for run in ("run", "bpe", "lora"):
        shutil.rmtree(f"{run}/model_00006")  # as if the run had been killed before saving it
    sizes = train_gpt2.GPTConfig(block_size=16, vocab_size=50257, n_layer=1, n_head=2, n_embd=8)
    train_gpt2.GPT(sizes).save_pretrained("gpt2")
    get_tokenizer("gpt2").save_pretrained("gpt2", 16)


def copy_fixtures(*names: str) -> None:
    """Copies fixtures into the current folder."""
    for name in ("base", *names):
        source = FIXTURES / name
        (shutil.copytree if source.is_dir() else shutil.copy2)(source, name)


def call(script: ModuleType, argv: list[str]) -> None:
    with contextlib.suppress(SystemExit):  # train_gpt2.py ends with one
        script.main(argv)
