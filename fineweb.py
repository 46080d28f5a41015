"""Turns text into token shards for train_gpt2.py.

    python fineweb.py                                            # FineWeb-Edu, 10 billion tokens, into edu_fineweb10B/
    python fineweb.py --input book.txt 'notes/*.jsonl' --output my_data
    python fineweb.py --dataset roneneldan/TinyStories --output tinystories
    python fineweb.py --demo                                     # Python's own documentation, into demo_data/

A shard is a one-dimensional uint16 .npy file. Every document is preceded by <|endoftext|>; shard 0 is for
validation, the others for training. `manifest.json` beside them says what they are.
"""

from __future__ import annotations

import ast
import errno
import glob
import hashlib
import itertools
import json
import os
import sys
import sysconfig
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import Any

import numpy as np

from support import shards
from support.cli import Parser, UserError, run
from support.download import hub_trouble
from support.tokenizer import VOCAB_SIZES, get_tokenizer

FINEWEB_EDU = "HuggingFaceFW/fineweb-edu"
SHARD_SIZE = 10**8  # tokens
BATCH_CHARS = 1 << 20  # text that goes to a worker in one message
VAL_FRACTION = 0.1  # of a corpus that is smaller than a shard

# -----------------------------------------------------------------------------
# Where documents come from


@dataclass(frozen=True)
class Source:
    """A text corpus that can be read from its start any number of times."""

    name: str  # what the manifest says of it
    revision: str | None
    prefix: str  # of the shards' names
    documents: Callable[[], Iterator[str]]
    text_field: str | None = None


def demo_source() -> Source:
    """The documentation that every CPython carries, about 2 MB of English: the language reference and the docstrings."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    return Source("documentation of CPython", version, "pydoc", lambda: iter(_python_documentation()))


def _python_documentation() -> list[str]:
    from pydoc_data.topics import topics

    named = {f"topic {name}": text for name, text in topics.items()}
    library = Path(sysconfig.get_paths()["stdlib"])
    # Tests hold no prose, and the others are not in every CPython.
    skipped = set("site-packages dist-packages test tests idlelib lib2to3 distutils turtledemo ensurepip".split())
    for path in library.rglob("*.py"):
        place = path.relative_to(library)
        if not skipped.intersection(place.parts):
            docstrings = _docstrings(path)
            if docstrings:
                named[f"module {place.as_posix()}"] = "\n\n".join(docstrings)
    # In the order of a hash: then the last tenth, which is held out, is a fair sample of both kinds.
    return [named[name] for name in sorted(named, key=lambda name: hashlib.sha1(name.encode()).digest())]


def _docstrings(path: Path) -> list[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError, OSError):
            return []
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = (ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, kinds))
    return [docstring for docstring in found if docstring]


def file_source(patterns: list[str], text_field: str) -> Source:
    """Local files in the order given: a .txt is one document, a line of .jsonl or a row of .parquet is one each."""
    paths = []
    for pattern in patterns:
        matches = [pattern] if os.path.isfile(pattern) else sorted(glob.glob(pattern, recursive=True))
        paths += [Path(match) for match in map(os.path.normpath, matches) if os.path.isfile(match)]
        if not matches:
            raise UserError(f"no file matches {pattern}. Name .txt, .jsonl or .parquet files.")
    paths = list(dict.fromkeys(paths))  # a file that two patterns match is one document
    readers = {".txt": _read_txt, ".jsonl": _read_jsonl, ".parquet": _read_parquet}
    problems = [
        f"{path} is neither .txt, .jsonl nor .parquet. Convert it, or leave it out."
        for path in paths
        if path.suffix not in readers
    ]
    if problems or not paths:
        raise UserError(
            *problems or [f"{' '.join(patterns)} names no files, only folders. Use a pattern such as 'folder/*.txt'."]
        )

    def documents() -> Iterator[str]:
        for path in paths:
            yield from readers[path.suffix](path, text_field)

    stamps = [(path.stat().st_size, path.stat().st_mtime_ns) for path in paths]  # an edited file is another source
    revision = hashlib.sha256(repr(stamps).encode()).hexdigest()[:16]
    return Source(" ".join(map(str, paths)), revision, _slug(paths[0].stem), documents, text_field)


def _read_txt(path: Path, text_field: str) -> Iterator[str]:
    try:
        yield path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path} is not UTF-8 text ({error.reason} at byte {error.start}). Convert it first."
        ) from error


def _read_jsonl(path: Path, text_field: str) -> Iterator[str]:
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise UserError(f"{path}, line {number} is not JSON ({error}). Mend or remove the line.") from error
            yield _text_of(record, text_field, f"{path}, line {number}")


def _read_parquet(path: Path, text_field: str) -> Iterator[str]:
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is not a parquet file ({error}).") from error
    with file:
        if text_field not in file.schema_arrow.names:
            raise UserError(
                f"{path} has no column {text_field!r}. Choose with --text-field from {', '.join(file.schema_arrow.names)}."
            )
        row = -1
        try:
            for batch in file.iter_batches(256, columns=[text_field]):
                for text in batch.column(0).to_pylist():
                    row += 1
                    yield _text_of({text_field: text}, text_field, f"{path}, row {row}")
        except (pyarrow.ArrowException, OSError, ValueError) as error:
            raise UserError(f"{path} is damaged after row {row} ({error}). Get the file again.") from error


def dataset_source(name: str, config: str | None, split: str, text_field: str) -> Source:
    """A text data set of the Hugging Face hub, streamed; or a local folder of its files."""
    import datasets

    try:
        revision = None
        if not os.path.isdir(name):
            from huggingface_hub import HfApi

            revision = HfApi().dataset_info(name).sha
        stream = datasets.load_dataset(name, config, split=split, streaming=True, revision=revision)
    except Exception as error:  # the hub's, the HTTP library's and the data set's own kinds
        raise UserError(
            f"cannot open the data set {name}: {hub_trouble(error)}. Check its name, --name and --split."
        ) from error

    def documents() -> Iterator[str]:
        number = -1
        try:
            for number, example in enumerate(stream):
                yield _text_of(example, text_field, f"{name}, example {number}")
        except UserError:
            raise
        except Exception as error:  # as above
            raise UserError(
                f"{name} broke off after {number + 1} examples ({error}). Run the same command again."
            ) from error

    spelled = name if config is None else f"{name}/{config}"
    prefix = "edufineweb" if name == FINEWEB_EDU else _slug(name)
    return Source(f"{spelled} [{split}]", revision, prefix, documents, text_field)


def _text_of(example: Any, text_field: str, place: str) -> str:
    """The text of one record.

    Raises:
        UserError: it has no such field, or not a text in it.
    """
    text = example.get(text_field) if isinstance(example, dict) else None
    if not isinstance(text, str):
        has = f"the fields {', '.join(example)}" if isinstance(example, dict) else "no fields"
        raise UserError(f"{place} has no text in {text_field!r}, but {has}. Choose one with --text-field.")
    return text


def _slug(name: str) -> str:
    """A name that is safe in a file name."""
    return "".join(c if c.isalnum() or c in "-." else "_" for c in name).strip("._")[:60] or "text"


# -----------------------------------------------------------------------------
# Text to tokens


def _encode_batch(tokenizer: str, texts: list[str]) -> list[np.ndarray]:
    return [get_tokenizer(tokenizer).encode_document(text) for text in texts]


def _end_with_parent() -> None:
    """Makes this worker end when the process that started it is gone, even if that was killed."""

    def watch() -> None:
        parent_process().join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def encoded(documents: Iterable[str], tokenizer: str, workers: int) -> Iterator[np.ndarray]:
    """The tokens of each document, in order, as uint16 arrays that begin with the end-of-text token.

    More than one worker means that many processes. Only a few batches are under way at any time, so memory does not
    grow with the corpus.
    """
    if workers == 1:
        for text in documents:
            yield get_tokenizer(tokenizer).encode_document(text)
        return
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=_end_with_parent) as pool:
        under_way: deque = deque()
        try:
            for batch in _batches(documents):
                under_way.append(pool.submit(_encode_batch, tokenizer, batch))
                if len(under_way) > 2 * workers:
                    yield from under_way.popleft().result()
            while under_way:
                yield from under_way.popleft().result()
        except BrokenProcessPool as error:
            raise UserError(
                "a worker was killed, for its memory perhaps. Run it again with fewer --workers."
            ) from error
        finally:
            for future in under_way:
                future.cancel()


def _batches(documents: Iterable[str]) -> Iterator[list[str]]:
    batch, chars = [], 0
    for text in documents:
        batch.append(text)
        chars += len(text)
        if chars >= BATCH_CHARS:
            yield batch
            batch, chars = [], 0
    if batch:
        yield batch


def first_tokens(encoded_documents: Iterable[np.ndarray], max_tokens: int | None) -> Iterator[np.ndarray]:
    """The documents up to `max_tokens` tokens, the last one cut there."""
    left = max_tokens
    for tokens in encoded_documents:
        yield tokens if left is None else tokens[:left]
        if left is not None:
            left -= len(tokens)
            if left <= 0:
                return


# -----------------------------------------------------------------------------
# Tokens to shards. A place is a number of tokens from the start of the corpus.


@dataclass(frozen=True)
class Slot:
    """One shard to be: tokens [start, end) of the corpus."""

    split: str
    index: int
    start: int
    end: int


def slots_in_order(shard_size: int) -> Iterator[Slot]:
    """Shard 0 for validation, all that follow for training."""
    for index in itertools.count():
        yield Slot("train" if index else "val", index, index * shard_size, (index + 1) * shard_size)


def slots_held_out(cut: int, total: int, shard_size: int) -> Iterator[Slot]:
    """Training before the place `cut`, validation from there; numbered from 0, validation first."""
    for index, start in enumerate(range(0, cut, shard_size), start=-(-(total - cut) // shard_size)):
        yield Slot("train", index, start, min(start + shard_size, cut))
    for index, start in enumerate(range(cut, total, shard_size)):
        yield Slot("val", index, start, min(start + shard_size, total))


def held_out_from(starts: np.ndarray, total: int, fraction: float) -> int:
    """The place from which the last `fraction` of a corpus is held out: where a document starts, nearest to it.

    A corpus of one document is cut inside its text.
    """
    ideal = total - max(1, round(fraction * total))
    inner = starts[starts > 0]
    return int(inner[np.abs(inner - ideal).argmin()]) if len(inner) else max(1, ideal)


def write_shards(
    directory: Path, prefix: str, tokens_of: Iterable[np.ndarray], slots: Iterator[Slot], record: Callable[[dict], None]
) -> None:
    """Cuts the stream of documents at the slots and writes each as a shard; `record` hears of every one written."""
    from tqdm import tqdm

    slot = next(slots, None)
    buffer, filled, documents = np.empty(0, dtype=np.uint16), 0, 0

    def flush() -> None:
        path = directory / shards.name(prefix, slot.split, slot.index)
        sha256 = shards.write_shard(path, buffer[:filled])
        record({"file": path.name, "split": slot.split, "tokens": filled, "documents": documents, "sha256": sha256})

    with tqdm(unit=" tokens", unit_scale=True, desc="tokenising", disable=None) as bar:
        for tokens in tokens_of:
            bar.update(len(tokens))
            documents += 1  # counted in the shard where it starts
            while len(tokens):
                if len(buffer) != slot.end - slot.start:
                    buffer = np.empty(slot.end - slot.start, dtype=np.uint16)
                part = tokens[: len(buffer) - filled]
                buffer[filled : filled + len(part)] = part
                filled += len(part)
                tokens = tokens[len(part) :]
                if filled == len(buffer):
                    flush()
                    slot, filled, documents = next(slots, None), 0, 0
        if filled:
            flush()


def make_shards(
    source: Source,
    output: str | os.PathLike,
    *,
    tokenizer: str = "gpt2",
    shard_size: int = SHARD_SIZE,
    max_tokens: int | None = None,
    val_fraction: float | None = None,
    workers: int = 1,
) -> dict[str, Any]:
    """Writes the shards of a corpus and their manifest into the folder `output`; returns the manifest.

    Shard 0 is validation; with `val_fraction`, or where the corpus is smaller than one shard, the last documents are.

    Raises:
        UserError: the folder holds other shards, cannot be written, or the corpus has too little text to be split.
    """
    directory = Path(output)
    asked = {"text_field": source.text_field, "shard_size": shard_size, "max_tokens": max_tokens}
    asked |= {"val_fraction": val_fraction}
    manifest = {"tokenizer": tokenizer, "vocab_size": VOCAB_SIZES[tokenizer], "source": source.name}
    manifest |= {"revision": source.revision, "settings": asked, "complete": False, "shards": []}
    finished = claim_output(directory, manifest)
    if finished:
        return finished

    def stream() -> Iterator[np.ndarray]:
        return first_tokens(encoded(source.documents(), tokenizer, workers), max_tokens)

    documents, slots = plan(stream, source.name, shard_size, val_fraction)

    def record(shard: dict) -> None:
        manifest["shards"].append(shard)
        shards.write_manifest(directory, manifest)

    for split in ("train", "val"):
        for path in shards.paths(directory, split):
            path.unlink()  # of an earlier run of this command that did not finish
    shards.write_manifest(directory, manifest)
    write_shards(directory, source.prefix, documents, slots, record)
    manifest["complete"] = True
    shards.write_manifest(directory, manifest)
    return manifest


def plan(
    stream: Callable[[], Iterator[np.ndarray]], name: str, shard_size: int, val_fraction: float | None
) -> tuple[Iterable[np.ndarray], Iterator[Slot]]:
    """The encoded documents of a corpus and the shards to cut them into; `stream` starts the corpus anew."""
    documents = stream()
    if val_fraction is None:
        # Whether the corpus is more than one shard shows when it ends; that much fits into memory.
        head = list(until_total(documents, shard_size + 1))
        documents = itertools.chain(head, documents)
        lengths = np.array([len(tokens) for tokens in head], dtype=np.int64)
        if lengths.sum() > shard_size:
            return documents, slots_in_order(shard_size)
    else:
        lengths = np.fromiter((len(tokens) for tokens in documents), dtype=np.int64)
        documents = stream()
    total = int(lengths.sum())
    if total < 2:
        raise UserError(f"there is no text in {name}. Name other files, or another data set.")
    cut = held_out_from(np.cumsum(lengths) - lengths, total, val_fraction or VAL_FRACTION)
    print(f"the last {(total - cut) / total:.1%} of the text is held out for validation")
    return documents, slots_held_out(cut, total, shard_size)


def until_total(encoded_documents: Iterator[np.ndarray], total: int) -> Iterator[np.ndarray]:
    """Takes documents until they have `total` tokens together."""
    while total > 0 and (tokens := next(encoded_documents, None)) is not None:
        total -= len(tokens)
        yield tokens


def claim_output(directory: Path, manifest: dict[str, Any]) -> dict[str, Any] | None:
    """Makes the folder; returns the manifest there if an earlier run of the same command finished.

    Raises:
        UserError: shards of another source or setting are there, or the folder cannot be written.
    """
    path = directory / shards.MANIFEST
    try:
        if path.exists():
            earlier = json.loads(path.read_text(encoding="utf-8"))
            same = all(earlier.get(key) == manifest[key] for key in manifest if key not in ("complete", "shards"))
            if earlier["shards"] and not same:
                raise UserError(
                    f"{directory} holds shards of another source or setting. Remove it, or name another --output."
                )
            if same and earlier["complete"]:
                try:
                    shards.verify(directory)
                    print("nothing to do: these shards were made before, and are whole")
                    return earlier
                except UserError as error:
                    print(f"making the shards again: {error.problems[0].rsplit('. ', 1)[0]}")
        elif strangers := [p.name for split in ("train", "val") for p in shards.paths(directory, split)]:
            raise UserError(f"{directory} holds shards of another tool, such as {strangers[0]}. Name another --output.")
        directory.mkdir(parents=True, exist_ok=True)
        if not os.access(directory, os.W_OK):
            raise PermissionError(errno.EACCES, "no permission")
    except OSError as error:
        raise UserError(f"cannot write to {directory} ({error.strerror}). Name another --output.") from error
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise UserError(
            f"{path} is not a manifest of shards ({error!r}). Remove it, or name another --output."
        ) from error
    return None


# -----------------------------------------------------------------------------
# The command line


def arguments(argv: list[str] | None) -> Any:
    """The command line, parsed and checked."""
    parser = Parser(
        description="Turn text into token shards for train_gpt2.py. Without flags: FineWeb-Edu, 10 billion tokens."
    )
    source = parser.add_argument_group("source")
    source.add_argument(
        "--input", nargs="+", metavar="FILE", help=".txt, .jsonl or .parquet files, or patterns such as 'texts/*.txt'"
    )
    source.add_argument("--dataset", metavar="NAME", help=f"a Hugging Face data set (default: {FINEWEB_EDU})")
    source.add_argument(
        "--name", metavar="CONFIG", help="configuration of the data set (default for FineWeb-Edu: sample-10BT)"
    )
    source.add_argument("--split", default="train", help="split of the data set (default: train)")
    source.add_argument(
        "--text-field", default="text", metavar="FIELD", help="field or column that has the text (default: text)"
    )
    source.add_argument(
        "--demo", action="store_true", help="the documentation in this Python, as bytes; needs no network"
    )
    source.add_argument(
        "--check", metavar="DIR", help="make nothing: read the shards in DIR and compare them with their manifest"
    )
    shape = parser.add_argument_group("shards")
    shape.add_argument(
        "--output", metavar="DIR", help="folder for the shards (default: edu_fineweb10B; with --demo demo_data)"
    )
    shape.add_argument("--tokenizer", choices=tuple(VOCAB_SIZES), help="encoding (default: gpt2; with --demo bytes)")
    shape.add_argument(
        "--shard-size", type=int, default=SHARD_SIZE, metavar="N", help=f"tokens of a shard (default: {SHARD_SIZE})"
    )
    shape.add_argument("--max-tokens", type=int, metavar="N", help="stop after this many tokens (default: all)")
    shape.add_argument("--val-fraction", type=float, metavar="F", help="hold out this share for validation (default: shard 0; a tenth of less than a shard)")  # fmt: skip
    shape.add_argument(
        "--workers",
        type=int,
        default=os.cpu_count(),
        metavar="N",
        help="processes that tokenise (default: one per core)",
    )
    args = parser.parse_args(argv)

    problems = [
        f"--{name} must be {least} or more."
        for name, least in (("shard-size", 2), ("max-tokens", 2), ("workers", 1))
        if (value := getattr(args, name.replace("-", "_"))) is not None and value < least
    ]
    if args.val_fraction is not None and not 0 < args.val_fraction < 1:
        problems.append("--val-fraction must be more than 0 and less than 1.")
    if sum((bool(args.input), args.dataset is not None, args.demo, args.check is not None)) > 1:
        problems.append("--input, --dataset, --demo and --check exclude each other. Choose one.")
    if (args.input or args.dataset not in (None, FINEWEB_EDU)) and args.output is None:
        problems.append("name a folder for the shards with --output.")
    if problems:
        raise UserError(*problems)
    return args


def check(directory: str) -> None:
    """Reads all shards of a folder and says that they are whole.

    Raises:
        UserError: some are not; one line for each.
    """
    found, manifest = shards.verify(directory), shards.read_manifest(directory)
    against = (
        "are as in the manifest" if manifest["shards"] else "are well-formed; there is no manifest to compare with"
    )
    print(f"{directory}: {len(found)} shards, {sum(map(len, found)):,} tokens ({manifest['tokenizer']}), {against}")


def main(argv: list[str] | None = None) -> None:
    args = arguments(argv)
    if args.check is not None:
        check(args.check)
        return
    tokenizer = args.tokenizer or ("bytes" if args.demo else "gpt2")
    output = args.output or ("demo_data" if args.demo else "edu_fineweb10B")
    if args.demo:
        corpus = demo_source()
    elif args.input:
        corpus = file_source(args.input, args.text_field)
    else:
        dataset = args.dataset or FINEWEB_EDU
        corpus = dataset_source(
            dataset, args.name or ("sample-10BT" if dataset == FINEWEB_EDU else None), args.split, args.text_field
        )
    get_tokenizer(tokenizer)  # fetched here, once, and not by every worker
    manifest = make_shards(
        corpus,
        output,
        tokenizer=tokenizer,
        shard_size=args.shard_size,
        max_tokens=args.max_tokens,
        val_fraction=args.val_fraction,
        workers=1 if tokenizer == "bytes" else args.workers,  # bytes need no work
    )
    made = manifest["shards"]
    tokens, documents = (sum(shard[key] for shard in made) for key in ("tokens", "documents"))
    print(f"{output}: {tokens:,} tokens ({tokenizer}), documents: {documents:,}, shards: {len(made)}")


if __name__ == "__main__":
    run(main)
