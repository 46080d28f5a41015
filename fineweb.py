"""Turns text into token shards for train_gpt2.py.

    python fineweb.py                          # FineWeb-Edu, 10 billion tokens
    python fineweb.py --name sample-100BT      # 100 billion
    python fineweb.py --input book.txt 'notes/*.jsonl' --output my_data
    python fineweb.py --dataset roneneldan/TinyStories --output tinystories
    python fineweb.py --demo                   # documentation of this Python
    python fineweb.py --check my_data          # are all shards intact?

If the command is killed, run it again to continue; finished work is kept.

A shard is a one-dimensional uint16 .npy file. Every document is preceded by <|endoftext|>. Shard 0 is for validation
and the others for training, unless --val-fraction or a small text holds out a fraction instead. manifest.json, next to
the shards, describes them. Their bytes do not depend on the number of threads or processes.
"""

from __future__ import annotations

from support import startup

if __name__ == "__main__":
    startup.prepare()  # comes first: the imports take seconds

import functools
import itertools
import json
import os
from collections.abc import Collection
from dataclasses import dataclass
from decimal import Decimal, DecimalException
from pathlib import Path
from typing import Any

from support.cli import UserError, flag, flag_name, parse_flags, print_lines, run_cli
from support.data import hub
from support.data.demo_text import demo_corpus
from support.data.encode import ENGINES, default_engine, usable_cores
from support.data.executors import EXECUTORS, Executor
from support.data.make_shards import SHARD_SIZE, make_shards
from support.data.shards import load_manifest, read_manifest, read_shards, read_tokenizer, shard_paths
from support.data.text_files import TEXT_TYPES, Corpus, TextFiles, check_separator, find_input, slug, text_suffix
from support.data.tokenizer import MAX_VOCAB_SIZE, TOKENIZER_JSON, VOCAB_SIZES, get_tokenizer
from support.files import LOCK, lock_folder
from support.terminal import pluralize

FINEWEB_EDU = "HuggingFaceFW/fineweb-edu"
MAX_SHARD_SIZE = 10**9

# -----------------------------------------------------------------------------
# The command line


def parse_count(text: str) -> int:
    """Parses an integer, which may be written as 1e9 or 10_000_000."""
    try:
        number = Decimal(text)
        if abs(number) < 10**30 and number == int(number):
            return int(number)
    except (DecimalException, OverflowError):
        pass
    raise ValueError(text)


def parse_option(text: str) -> tuple[str, Any]:
    """Parses NAME=VALUE; VALUE is JSON or, failing that, a string."""
    name, equals, value = text.partition("=")
    if not name.isidentifier() or not equals:
        raise ValueError(text)
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def parse_share(text: str) -> tuple[int, int]:
    """Parses K/N into (K, N)."""
    number, of = map(int, text.split("/"))
    if not 1 <= number <= of:
        raise ValueError(text)
    return number, of


PERFORMANCE = "performance (does not change the shards)"  # a group of flags
# By flag that says where the text comes from, or the shards to check: the flags that say more about it.
FLAGS_OF_SOURCE = {
    "dataset": {"dataset", "name", "split", "revision", "text_field", "document_separator"},
    "input": {"input", "text_field", "document_separator"},
    "demo": {"demo"},
    "check": {"check"},
}
SOURCE_FLAGS = set.union(*FLAGS_OF_SOURCE.values())


@dataclass(frozen=True)
class Arguments:
    """The command line."""

    # fmt: off
    input: list[str] | None = flag(None, f"files, folders or patterns such as 'texts/*.txt': {TEXT_TYPES}",
        default_help="a data set", nargs="+", metavar="FILE")
    dataset: str | None = flag(None, "data set on the Hugging Face hub", default_help=FINEWEB_EDU)
    name: str | None = flag(None, "configuration of the data set", default_help="sample-10BT for FineWeb",
        metavar="CONFIG")
    split: str = flag("train", "split of the data set", "source")
    revision: str | None = flag(None, "branch, tag or commit of the data set", "source", default_help="the newest",
        metavar="REVISION")
    text_field: str = flag("text", "field or column with the text", "source", metavar="FIELD")
    document_separator: str | None = flag(None,
        r"string between the documents of a .txt file; \n stands for a newline, \t for a tab", "source",
        default_help="a file is one document", metavar="TEXT")
    demo: bool = flag(False, "use the documentation of Python, PyTorch and other installed packages as text; needs no network")
    check: str | None = flag(None, "read the shards in DIR, compare them with their manifest, and exit",
        default_help="make shards", metavar="DIR")
    output: str | None = flag(None, "folder for the shards",
        default_help="edu_fineweb10B or similar for FineWeb, demo_data with --demo", metavar="DIR")
    tokenizer: str | None = flag(None, "GPT-2's tokens, bytes, or bpe, which is trained on the text",
        default_help="gpt2; bpe with --demo", choices=(*VOCAB_SIZES, "bpe"))
    vocab_size: int | None = flag(None, "largest vocabulary for --tokenizer bpe", "shards",
        default_help="set by the amount of text", at_least=258, at_most=MAX_VOCAB_SIZE, parse=parse_count)
    tokenizer_from: str | None = flag(None, "use the tokenizer of this model, or of these shards", "shards",
        default_help="train a new one", metavar="NAME_OR_DIR")
    shard_size: int = flag(SHARD_SIZE, "tokens per shard", "shards", at_least=2, at_most=MAX_SHARD_SIZE,
        parse=parse_count)
    max_tokens: int | None = flag(None, "stop after this many tokens, such as 1e9", default_help="all", at_least=2,
        parse=parse_count)
    val_fraction: float | None = flag(None, "hold out this fraction for validation", "shards",
        default_help="shard 0; a tenth of a text that fits into one shard", metavar="F")
    split_documents: bool = flag(False, "let the validation split start inside a document if none starts nearby",
        "shards")
    workers: int | None = flag(None, "number of encoder threads", PERFORMANCE, default_help="one per core", at_least=1,
        at_most=1024)
    engine: str | None = flag(None, "encoder for gpt2 tokens", PERFORMANCE,
        default_help="gigatoken, checked against tiktoken on samples", choices=ENGINES)
    only_parts: tuple[int, int] | None = flag(None,
        "encode only parts K, K+N, K+2N, ... of the text and write no shards: run 1/N to N/N on N machines, then once "
        "without this flag", PERFORMANCE, default_help="all parts and the shards", parse=parse_share,
        hint="It must be K/N, such as 3/8, with K from 1 to N.", metavar="K/N")
    executor: str | None = flag(None, "where datatrove runs the encoding tasks", PERFORMANCE,
        default_help="this process", choices=EXECUTORS)
    tasks: int | None = flag(None, "number of tasks for --executor", PERFORMANCE, default_help="one per core of this machine",
        at_least=1, at_most=10**6)
    executor_options: list[tuple[str, Any]] | None = flag(None,
        "options for datatrove's executor, such as time=4:00:00", PERFORMANCE, default_help="datatrove's",
        parse=parse_option, hint="It must be NAME=VALUE.", nargs="+", metavar="NAME=VALUE")
    # fmt: on

    @property
    def tokenizer_name(self) -> str:
        return self.tokenizer or ("bpe" if self.demo else "gpt2")


def parse_arguments(argv: list[str] | None) -> Arguments:
    """Parses the command line.

    Raises:
        UserError: it is not valid; one line for each problem.
    """
    given = parse_flags(Arguments, argv, __doc__)
    args = Arguments(**given)
    if problems := _invalid_arguments(args, given):
        raise UserError(*problems)
    return args


def _invalid_arguments(args: Arguments, given: Collection[str]) -> list[str]:
    problems = []
    if args.val_fraction is not None and not 0 < args.val_fraction < 1:
        problems.append("--val-fraction must be more than 0 and less than 1.")
    sources = [name for name in FLAGS_OF_SOURCE if name in given]
    if len(sources) > 1:
        problems.append(f"{' and '.join(map(flag_name, sources))} are mutually exclusive. Choose one.")
    elif sources:
        useful = FLAGS_OF_SOURCE[sources[0]]
        useless = [name for name in given if name not in useful and (name in SOURCE_FLAGS or "check" in given)]
        problems += [f"{flag_name(name)} has no effect with {flag_name(sources[0])}. Leave it out." for name in useless]
    has_default_output = args.dataset in (None, *hub.FINEWEB_PREFIXES)
    if (args.input or not has_default_output) and args.output is None:
        problems.append("no folder for the shards. Pass one with --output.")
    if args.tokenizer_name != "bpe":
        copied = args.tokenizer_from if args.tokenizer_name == "bytes" else None  # GPT-2's can be read from a folder
        for_bpe = {"--vocab-size": args.vocab_size, "--tokenizer-from": copied}
        problems += [
            f"{name} is for --tokenizer bpe. Add --tokenizer bpe, or leave out {name}."
            for name, value in for_bpe.items()
            if value is not None
        ]
    elif args.vocab_size is not None and args.tokenizer_from is not None:
        problems.append("--tokenizer-from brings its own vocabulary. Leave out --vocab-size.")
    if args.executor is None and (args.tasks or args.executor_options):
        problems.append("--tasks and --executor-options are for --executor. Add --executor, or leave them out.")
    if args.executor and args.only_parts:
        problems.append("--executor divides the parts among its tasks. Leave out --only-parts.")
    return problems


def default_output(args: Arguments) -> str:
    if args.demo:
        return "demo_data"
    size = (args.name or "sample-10BT").removeprefix("sample-").removesuffix("T")
    return ("fineweb" if args.dataset == "HuggingFaceFW/fineweb" else "edu_fineweb") + slug(size)


def corpus_of(args: Arguments, output: Path) -> Corpus:
    """Returns the corpus that the command line names, at the revision with which an earlier run started the folder, if any.

    Raises:
        UserError: there is no such file or data set, or the hub cannot be reached.
    """
    separator = args.document_separator
    if separator:  # line endings in files become \n, too
        for written, meant in {"\\r": "\r", "\\n": "\n", "\\t": "\t", "\r\n": "\n", "\r": "\n"}.items():
            separator = separator.replace(written, meant)
    if args.demo:
        return demo_corpus()
    if args.input:
        paths = find_input(args.input, lambda note: print_lines(f"note: {note}"))
        check_separator(separator, paths)
        folder = output.resolve()
        is_below = any(Path(given).is_dir() and Path(given).resolve() in folder.parents for given in args.input)
        inside = [path for path in paths if is_below and path.resolve().parent.is_relative_to(folder)]
        if inside:  # once the folder has shards, its texts would be skipped
            raise UserError(f"{output} has texts of --input, such as {inside[0]}. Use another --output.")
        return TextFiles(paths, args.text_field, separator)
    name = args.dataset or FINEWEB_EDU
    if os.path.exists(name):
        raise UserError(f"{name} is a path on this machine. Pass it with --input.")
    config = args.name or ("sample-10BT" if name in hub.FINEWEB_PREFIXES else None)
    corpus = hub.HubFiles(name, config, args.split, args.text_field, separator, output / ".downloads")
    earlier = load_manifest(output)
    is_continued = args.revision is None and earlier is not None and earlier["source"] == corpus.name
    corpus.revision = earlier.get("revision") if earlier and is_continued else hub.find_revision(name, args.revision)
    return corpus


def check_shards(directory: str) -> None:
    """Reads all shards of a folder and reports that they are intact.

    Raises:
        UserError: some shards are not intact; one line for each.
    """
    manifest = read_manifest(directory)
    if manifest["tokenizer"] == "bpe" or (Path(directory) / TOKENIZER_JSON).exists():
        read_tokenizer(directory)
    tokens = read_shards(directory)
    verdict = "well-formed; there is no manifest to compare with"
    paths = (*shard_paths(directory, "train"), *shard_paths(directory, "val"))
    numbers = sorted(int(path.stem.rpartition("_")[2]) for path in paths)
    if missing := [number + 1 for number, later in itertools.pairwise(numbers) if later > number + 1]:
        verdict = f"well-formed, but number {missing[0]:06d} is missing; there is no manifest to compare with"
    if entries := manifest["shards"]:
        has_all = all("sha256" in entry for entry in entries)
        verdict = "all match the manifest" if has_all else "as long as the manifest says; it has no checksums of some"
    print(
        f"{directory}: {pluralize(len(tokens), 'shard')}, {sum(tokens):,} tokens ({manifest['tokenizer']}), {verdict}",
        flush=True,
    )


def main(argv: list[str] | None = None) -> None:
    args = parse_arguments(argv)
    if args.check is not None:
        check_shards(args.check)
        return
    output = Path(args.output or default_output(args))
    if (output.parent / LOCK).exists():  # a run's folder: it may be training on these shards
        lock_folder(output.parent, "--output", shared=True).close()
    tokenizer, tokenizer_from = args.tokenizer_name, None
    if tokenizer == "gpt2" and args.engine is None and default_engine() == "tiktoken":
        print_lines('gigatoken is not installed, so tiktoken encodes, several times slower ("pip install gigatoken")')
    options = dict(args.executor_options or [])
    executor = Executor(args.executor, args.tasks or usable_cores(), options) if args.executor else None
    if args.tokenizer_from:
        from support.checkpoints.huggingface import find_tokenizer_folder  # imports torch

        tokenizer_from = find_tokenizer_folder(args.tokenizer_from, tokenizer)
    if tokenizer != "bpe":
        get_tokenizer(tokenizer, output, *filter(None, [tokenizer_from]))  # downloads it first
    corpus = corpus_of(args, output)
    make = functools.partial(
        make_shards,
        corpus,
        output,
        tokenizer=tokenizer,
        vocab_size=args.vocab_size,
        tokenizer_from=tokenizer_from,
        engine=args.engine,
        shard_size=args.shard_size,
        max_tokens=args.max_tokens,
        val_fraction=args.val_fraction,
        split_documents=args.split_documents,
        threads=args.workers or (options.get("cpus_per_task", 1) if executor else usable_cores()),
    )
    manifest = executor.run(make, output) if executor else make(only_parts=args.only_parts)
    if not manifest["complete"]:  # only some parts so far, or Slurm's jobs are still running
        return
    shards = manifest["shards"]
    tokens, documents = sum(s["tokens"] for s in shards), sum(s.get("documents", 0) for s in shards)
    files = corpus.paths if isinstance(corpus, TextFiles) else []
    if args.document_separator and all(text_suffix(path) == ".txt" for path in files) and documents <= len(files):
        print_lines("note: there are no more documents than files. Check --document-separator.")
    print_lines(
        f"{output}: {tokens:,} tokens ({manifest['tokenizer']}), documents: {documents:,}, shards: {len(shards)}"
    )


if __name__ == "__main__":
    run_cli(main)
