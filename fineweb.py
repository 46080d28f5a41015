"""Turns text into token shards for train_gpt2.py.

    python fineweb.py                          # FineWeb-Edu, 10 billion tokens
    python fineweb.py --name sample-100BT      # 100 billion
    python fineweb.py --input book.txt 'notes/*.jsonl' --output my_data
    python fineweb.py --dataset roneneldan/TinyStories --output tinystories
    python fineweb.py --demo                   # Python's own documentation
    python fineweb.py --check my_data          # are all shards intact?

If the command is killed, the same command resumes after the last finished shard.

A shard is a one-dimensional uint16 .npy file. Every document is preceded by <|endoftext|>. Shard 0 is for validation
and the others for training, unless --val-fraction or a small text holds out a fraction instead. manifest.json next to
them describes them. The bytes do not depend on the number of workers.
"""

from __future__ import annotations

from support import startup

if __name__ == "__main__":
    startup.prepare()  # comes first: the imports take seconds

import ast
import functools
import glob
import hashlib
import json
import os
import secrets
import sys
import sysconfig
import warnings
from dataclasses import dataclass
from decimal import Decimal, DecimalException
from pathlib import Path
from typing import Any

from support.cli import MAIN_GROUP, UserError, flag, parse_flags, run_cli
from support.data import bpe, cluster, hub
from support.data.corpus import Corpus, Documents, slug
from support.data.encode import ENGINES, default_engine, encode_batches
from support.data.output_folder import new_manifest, open_output_folder
from support.data.presets import DEMO_SOURCE
from support.data.readers import TEXT_TYPES, Files, find_text_files, text_suffix
from support.data.shard_writer import ShardWriter, check_space_for_shards, check_unchanged
from support.data.shards import (
    MANIFEST,
    PARTS,
    Manifest,
    Setting,
    load_manifest,
    open_shards,
    read_manifest,
    read_tokenizer,
)
from support.data.tokenizer import MAX_VOCAB_SIZE, TOKENIZER_JSON, VOCAB_SIZES, find_tokenizer, get_tokenizer
from support.files import sha256_of

FINEWEB_EDU = "HuggingFaceFW/fineweb-edu"
SHARD_SIZE = 10**8  # tokens
MAX_SHARD_SIZE = 10**9  # two shards are in memory at a time

# -----------------------------------------------------------------------------
# Sources


def source_of(args: Arguments, output: Path) -> Corpus:
    """The corpus that the command line names.

    FineWeb's files are downloaded one by one; other data sets are streamed. A folder that an earlier run has started is
    continued with the same revision.

    Raises:
        UserError: there is no such file or data set, or the hub cannot be reached.
    """
    if args.demo:
        python = f"{sys.version_info.major}.{sys.version_info.minor}"
        return Documents(DEMO_SOURCE, python_documentation, revision=python, prefix="pydoc")
    if args.input:
        separator = args.document_separator
        return file_source(args.input, args.text_field, separator and separator.replace("\\n", "\n"))
    name = args.dataset or FINEWEB_EDU
    if os.path.isfile(name):
        raise UserError(f"{name} is a file. Pass it with --input.")
    corpus: Corpus = hub.StreamedDataset(name, args.name, args.split, args.text_field)
    if os.path.isdir(name):
        return corpus
    if name in hub.FINEWEB_PREFIXES and args.split == "train":
        downloads = output / "downloads"
        corpus = hub.HubParquet(name, args.name or "sample-10BT", args.text_field, downloads, args.keep_downloads)
    earlier = load_manifest(output)
    if earlier and earlier["source"] == corpus.name:
        corpus.revision = earlier.get("revision")
    corpus.revision = corpus.revision or hub.current_revision(name)
    return corpus


def python_documentation() -> list[str]:
    """The documentation that comes with every CPython, about 2 MB of English: language reference and docstrings."""
    from pydoc_data.topics import topics

    texts = {f"topic {name}": text for name, text in topics.items()}
    library = Path(sysconfig.get_paths()["stdlib"])
    # Tests have no prose, and some CPythons come without the others.
    skipped = set("site-packages dist-packages test tests idlelib lib2to3 distutils turtledemo ensurepip".split())
    for path in library.rglob("*.py"):
        module = path.relative_to(library)
        if not skipped.intersection(module.parts):
            docstrings = _docstrings(path)
            if docstrings:
                texts[f"module {module.as_posix()}"] = "\n\n".join(docstrings)
    # Ordered by a hash, so that the last tenth, for validation, is a fair sample of both kinds.
    return [texts[name] for name in sorted(texts, key=lambda name: hashlib.sha1(name.encode()).digest())]


def _docstrings(path: Path) -> list[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError, OSError):
            return []
    nodes = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = (ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, nodes))
    return [docstring for docstring in docstrings if docstring]


def file_source(patterns: list[str], text_field: str, separator: str | None = None) -> Corpus:
    """Local files in the given order: a .txt file is one document, as are a line of .jsonl and a row of .parquet.

    For a folder: all such files below it, except in folders of runs and of shards.

    Raises:
        UserError: a pattern matches nothing, or a file that is not text.
    """
    unique: dict[str, Path] = {}  # a file that is named twice, or linked, is read once: its copy could validate
    for pattern in patterns:
        if os.path.isdir(pattern):
            paths = find_text_files(pattern)
        else:
            matches = [pattern] if os.path.isfile(pattern) else sorted(glob.glob(pattern, recursive=True))
            paths = [Path(os.path.normpath(match)) for match in matches if not os.path.isdir(match)]
            if not matches:
                raise UserError(f"no file matches {pattern}. Give files or folders of {TEXT_TYPES}.")
        for path in paths:
            unique.setdefault(os.path.realpath(path), path)
    paths = list(unique.values())
    problems = [
        f"{path} is not a file of {TEXT_TYPES}. Convert it, or leave it out."
        for path in paths
        if not path.is_file() or not text_suffix(path)
    ]
    if not paths:
        problems.append(f"there is no text in {' '.join(patterns)}. Give files or folders of {TEXT_TYPES}.")
    if problems:
        raise UserError(*problems)
    name = " ".join(path.name for path in (paths if len(paths) <= 9 else paths[:3]))
    name += f" ... ({len(paths)} files)" if len(paths) > 9 else ""
    return Files(name, paths, text_field, separator=separator)


# -----------------------------------------------------------------------------
# Text to shards


def make_shards(
    corpus: Corpus,
    output: str | os.PathLike[str],
    *,
    tokenizer: str = "gpt2",
    vocab_size: int | None = None,
    tokenizer_file: Path | None = None,
    engine: str | None = None,
    shard_size: int = SHARD_SIZE,
    max_tokens: int | None = None,
    val_fraction: float | None = None,
    split_documents: bool = False,
    workers: int = 1,
    executor: cluster.Executor | None = None,
) -> Manifest:
    """Writes the shards of a corpus and their manifest into the folder `output`; returns the manifest.

    Shards that an earlier call with the same arguments has finished are kept.

    Args:
        tokenizer: "gpt2", "bytes", or "bpe", which is trained on the corpus.
        vocab_size: the largest number of tokens of "bpe" (default: one that fits the amount of text).
        tokenizer_file: the `tokenizer.json` of an earlier "bpe", to use that one.
        engine: "gigatoken" or "tiktoken" (default: gigatoken if it is installed). The bytes do not depend on it.
        shard_size, max_tokens: numbers of tokens.
        val_fraction: fraction of the corpus, at its end, for validation (default: shard 0, or a tenth of a corpus
            that fits into one shard).
        split_documents: start the validation split inside a document if none starts near it.
        workers: number of processes that encode. The bytes do not depend on it.
        executor: what runs the tasks that make the shards (default: this process). The bytes do not depend on it.

    Raises:
        UserError: the folder has other shards, is in use or cannot be written, the disk is too small, or the corpus
            cannot be read, changed meanwhile, or has too little text to be split.
    """
    settings: dict[str, Setting] = {
        "shard_size": shard_size,
        "max_tokens": max_tokens,
        "val_fraction": val_fraction,
        "split_documents": split_documents or None,
        "vocab_size": vocab_size,
        "tokenizer_from": sha256_of(tokenizer_file) if tokenizer_file else None,
        **corpus.settings,
    }
    manifest = new_manifest(corpus.name, corpus.revision, tokenizer, settings)
    divided = cluster.divide(corpus) if executor else None
    if divided:
        manifest["in_parts"] = PARTS + secrets.token_hex(4)
        if running := cluster.running_jobs(Path(output)):
            return running
    with open_output_folder(Path(output), manifest, corpus.prefix) as folder:
        if not folder.is_finished:
            in_one_go = val_fraction is None and not executor
            check_space_for_shards(folder, corpus, max_tokens, copies=1 if in_one_go else 2)
            name_or_path = (
                bpe.write_tokenizer(folder, corpus, vocab_size, tokenizer_file) if tokenizer == "bpe" else tokenizer
            )
            engine = engine or default_engine()
            encode = functools.partial(encode_batches, tokenizer=name_or_path, engine=engine, workers=workers)
            sizes = shard_size, max_tokens
            if executor and divided and "in_parts" in folder.manifest:
                job = cluster.Job(*divided, encode, Path(output).absolute(), folder.manifest, *sizes, val_fraction)
                folder.manifest = executor.run(job)
            else:
                ShardWriter(folder, corpus, lambda cursor: encode(corpus.batches(cursor)), *sizes).write(val_fraction)
                check_unchanged(corpus, folder.directory)
                folder.finish()
        corpus.close()
        return folder.manifest


# -----------------------------------------------------------------------------
# The command line


def parse_count(text: str) -> int:
    """An integer, also written as 1e9 or 10_000_000."""
    try:
        number = Decimal(text)
        if abs(number) < 10**30 and number == int(number):
            return int(number)
    except (DecimalException, OverflowError):
        pass
    raise ValueError(text)


def parse_option(text: str) -> tuple[str, Any]:
    """NAME=VALUE, with a value in JSON, or else a text."""
    name, equals, value = text.partition("=")
    if not name.isidentifier() or not equals:
        raise ValueError(text)
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


PERFORMANCE = "performance (does not change the shards)"  # a group of flags


@dataclass(frozen=True)
class Arguments:
    """The command line."""

    input: list[str] | None = flag(
        None,
        f"files, folders or patterns such as 'texts/*.txt': {TEXT_TYPES}",
        MAIN_GROUP,
        default_help="a data set",
        type=str,
        nargs="+",
        metavar="FILE",
    )
    dataset: str | None = flag(
        None, "Hugging Face data set, or a local folder of its files", MAIN_GROUP, default_help=FINEWEB_EDU
    )
    name: str | None = flag(
        None, "configuration of the data set", MAIN_GROUP, default_help="sample-10BT for FineWeb", metavar="CONFIG"
    )
    split: str = flag("train", "split of the data set", "source")
    text_field: str = flag("text", "field or column with the text", "source", metavar="FIELD")
    document_separator: str | None = flag(
        None,
        r"string between the documents of a .txt file; \n stands for a newline",
        "source",
        default_help="a file is one document",
        metavar="TEXT",
    )
    demo: bool = flag(False, "the documentation of this Python; needs no network", MAIN_GROUP)
    check: str | None = flag(
        None,
        "read the shards in DIR, compare them with their manifest, and exit",
        MAIN_GROUP,
        default_help="make shards",
        metavar="DIR",
    )
    output: str | None = flag(
        None,
        "folder for the shards",
        MAIN_GROUP,
        default_help="edu_fineweb10B or similar for FineWeb, demo_data with --demo",
        metavar="DIR",
    )
    tokenizer: str | None = flag(
        None,
        "GPT-2's tokens, bytes, or bpe, which is trained on the text",
        MAIN_GROUP,
        default_help="gpt2; with --demo bpe",
        choices=(*VOCAB_SIZES, "bpe"),
    )
    vocab_size: int | None = flag(
        None,
        "tokens in the vocabulary of --tokenizer bpe",
        "shards",
        default_help="what suits the amount of text",
        at_least=258,
        at_most=MAX_VOCAB_SIZE,
        type=parse_count,
    )
    tokenizer_from: str | None = flag(
        None,
        "use the trained tokenizer of this model, or of these shards",
        "shards",
        default_help="train a new one",
        metavar="NAME_OR_DIR",
    )
    shard_size: int = flag(
        SHARD_SIZE, "tokens of a shard", "shards", at_least=2, at_most=MAX_SHARD_SIZE, type=parse_count
    )
    max_tokens: int | None = flag(
        None, "stop after this many tokens, such as 1e9", MAIN_GROUP, default_help="all", at_least=2, type=parse_count
    )
    val_fraction: float | None = flag(
        None,
        "hold out this fraction for validation",
        "shards",
        default_help="shard 0; a tenth of a text that fits into one shard",
        metavar="F",
    )
    split_documents: bool = flag(
        False, "let the validation split start inside a document if none starts nearby", "shards"
    )
    workers: int | None = flag(
        None, "processes that encode", PERFORMANCE, default_help="one per core", at_least=1, at_most=1024
    )
    engine: str | None = flag(
        None,
        "encoder of gpt2 tokens",
        PERFORMANCE,
        default_help="gigatoken, compared with tiktoken on samples",
        choices=ENGINES,
    )
    keep_downloads: bool = flag(False, "keep FineWeb's files after they are encoded", PERFORMANCE)
    executor: str | None = flag(
        None,
        "what runs the tasks that make the shards: processes of this machine; Slurm or Ray, with datatrove",
        PERFORMANCE,
        default_help="this process",
        choices=cluster.EXECUTORS,
    )
    tasks: int | None = flag(
        None, "tasks of --executor", PERFORMANCE, default_help="one per core of this machine", at_least=1, at_most=10**6
    )
    executor_options: list[tuple[str, Any]] | None = flag(
        None,
        "options of datatrove's executor for Slurm or Ray, such as time=4:00:00",
        PERFORMANCE,
        default_help="datatrove's",
        type=parse_option,
        hint="It must be NAME=VALUE.",
        nargs="+",
        metavar="NAME=VALUE",
    )

    @property
    def tokenizer_name(self) -> str:
        return self.tokenizer or ("bpe" if self.demo else "gpt2")


def parse_arguments(argv: list[str] | None) -> Arguments:
    """Parses the command line.

    Raises:
        UserError: it is not valid; one line for each problem.
    """
    args = Arguments(**parse_flags(Arguments, argv, __doc__))
    if problems := _invalid_arguments(args):
        raise UserError(*problems)
    return args


def _invalid_arguments(args: Arguments) -> list[str]:
    problems = []
    if args.val_fraction is not None and not 0 < args.val_fraction < 1:
        problems.append("--val-fraction must be more than 0 and less than 1.")
    sources = {"--input": args.input, "--dataset": args.dataset, "--demo": args.demo or None, "--check": args.check}
    if sum(value is not None for value in sources.values()) > 1:
        problems.append(f"{', '.join(sources)} exclude each other. Choose one.")
    has_default_output = args.dataset in (None, *hub.FINEWEB_PREFIXES)
    if (args.input or not has_default_output) and args.output is None:
        problems.append("no folder for the shards. Pass one with --output.")
    if args.document_separator is not None and not args.input:
        problems.append("--document-separator is for --input.")
    if args.tokenizer_name != "bpe":
        given = {"--vocab-size": args.vocab_size, "--tokenizer-from": args.tokenizer_from}
        problems += [
            f"{name} is for --tokenizer bpe. Add that, or leave {name} out."
            for name, value in given.items()
            if value is not None
        ]
    elif args.vocab_size is not None and args.tokenizer_from is not None:
        problems.append("--tokenizer-from brings its own vocabulary. Leave out --vocab-size.")
    if args.name is not None and (args.input or args.demo):
        problems.append("--name is for data sets.")
    if args.executor is None:
        if args.tasks or args.executor_options:
            problems.append("--tasks and --executor-options are for --executor.")
    elif args.executor == "local" and args.executor_options:
        problems.append("--executor-options are for slurm and ray. Use --workers for the number of tasks at once.")
    if args.executor and args.keep_downloads:
        problems.append("with --executor, files are not kept. Leave out --keep-downloads.")
    return problems


def usable_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def default_output(args: Arguments) -> str:
    if args.demo:
        return "demo_data"
    size = (args.name or "sample-10BT").removeprefix("sample-").removesuffix("T")
    return ("fineweb" if args.dataset == "HuggingFaceFW/fineweb" else "edu_fineweb") + slug(size)


def find_trained_tokenizer(name_or_dir: str) -> Path:
    """The `tokenizer.json` of a model, or of a folder of shards.

    Raises:
        UserError: there is none, or it is not a trained one.
    """
    directory = Path(name_or_dir)
    if not (directory / MANIFEST).exists():
        from support.checkpoints import huggingface  # imports torch

        directory = huggingface.find_model(name_or_dir, verify=False)
    name = find_tokenizer(directory)
    if name is None:
        raise UserError(f"{directory} has no {TOKENIZER_JSON}. Use another --tokenizer-from.")
    if name in VOCAB_SIZES:
        raise UserError(f"{name_or_dir} has the tokenizer {name}. Use --tokenizer {name}, without --tokenizer-from.")
    return Path(name)


def check_shards(directory: str) -> None:
    """Reads all shards of a folder and reports that they are intact.

    Raises:
        UserError: some are not; one line for each.
    """
    manifest = read_manifest(directory)
    if manifest["tokenizer"] == "bpe":
        read_tokenizer(directory)
    shards = open_shards(directory, "train", "val", read_all=True)
    verdict = "all as in the manifest" if manifest["shards"] else "well-formed; there is no manifest to compare with"
    print(
        f"{directory}: {len(shards)} shard{'s' if len(shards) > 1 else ''}, {sum(map(len, shards)):,} tokens ({manifest['tokenizer']}), {verdict}"
    )


def main(argv: list[str] | None = None) -> None:
    args = parse_arguments(argv)
    if args.check is not None:
        check_shards(args.check)
        return
    output = Path(args.output or default_output(args))
    tokenizer = args.tokenizer_name
    if tokenizer == "gpt2" and args.engine is None and default_engine() == "tiktoken":
        print('gigatoken is not installed: tiktoken encodes, several times slower ("pip install gigatoken")')
    executor, workers = None, args.workers or usable_cores()
    if args.executor:
        options = dict(args.executor_options or [])
        executor = cluster.Executor(args.executor, args.tasks or usable_cores(), workers, options)
        workers = 1 if args.executor == "local" else args.workers or options.get("cpus_per_task", 1)
    if tokenizer != "bpe":
        get_tokenizer(tokenizer)  # downloaded here, once, and not by every worker
    manifest = make_shards(
        source_of(args, output),
        output,
        tokenizer=tokenizer,
        vocab_size=args.vocab_size,
        tokenizer_file=find_trained_tokenizer(args.tokenizer_from) if args.tokenizer_from else None,
        engine=args.engine,
        shard_size=args.shard_size,
        max_tokens=args.max_tokens,
        val_fraction=args.val_fraction,
        split_documents=args.split_documents,
        workers=1 if tokenizer == "bytes" else workers,  # bytes need no encoding
        executor=executor,
    )
    if not manifest["complete"]:  # Slurm's jobs are not at their end
        return
    shards = manifest["shards"]
    tokens, documents = sum(s["tokens"] for s in shards), sum(s.get("documents", 0) for s in shards)
    print(f"{output}: {tokens:,} tokens ({manifest['tokenizer']}), documents: {documents:,}, shards: {len(shards)}")


if __name__ == "__main__":
    run_cli(main)
