"""Text corpora, dealt out in batches that a worker process can encode on its own.

A batch begins at a place, a list that JSON can hold, and a corpus can start from any place that one of its batches
had: what comes from there is the same as when it started from the beginning.
"""

from __future__ import annotations

import abc
import codecs
import contextlib
import functools
import hashlib
import io
import itertools
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from support.cli import UserError
from support.lock import LOCK

BATCH_CHARS = 1 << 21  # text that goes to a worker in one message
ROW_GROUP_BYTES = 1 << 25  # parquet: row groups with more text than this are not read as a whole
KINDS = (".txt", ".jsonl", ".parquet")
COMPRESSED = {".gz": "gzip", ".zst": "zstd"}

Place = list[Any]


@dataclass(frozen=True, kw_only=True)
class Batch(abc.ABC):
    """Some documents in a row; each kind knows how to get their texts.

    `share` is the part of the corpus that ends with this batch, None where nobody knows. `continues` says that the
    first text goes on with the last document of the batch before.
    """

    place: Place
    share: float | None = None
    continues: bool = False

    @abc.abstractmethod
    def texts(self) -> list[str]: ...

    @abc.abstractmethod
    def __str__(self) -> str:
        """Where its documents are, for a message."""


class Corpus(abc.ABC):
    """Documents in order.

    `name`, `revision` and `settings` say in the manifest which these are, and `prefix` begins the names of their shards.
    """

    name: str
    revision: str | None = None
    prefix: str
    settings: Mapping[str, Any] = {}

    @abc.abstractmethod
    def batches(self, place: Place | None = None) -> Iterator[Batch]:
        """All documents from a place on, or from the beginning."""

    def done_with(self, place: Place) -> None:  # noqa: B027  most have nothing to do
        """Told that nothing before this place is needed any more, even if the process is killed."""

    def close(self) -> None:  # noqa: B027
        """Told that all shards are there."""

    def changed(self) -> bool:
        """Whether the files are other ones than at the beginning."""
        return False

    def text_bytes(self) -> float | None:
        """About how many bytes of text these are, rather too few than too many; None if nobody knows."""
        return None


def slug(name: str) -> str:
    """A name that is safe in a file name."""
    safe = "".join(c if c.isalnum() or c in "-." else "_" for c in name).strip("._")
    return safe.encode()[:60].decode(errors="ignore") or "text"


def stamp(paths: Iterable[Path]) -> str:
    """Names, sizes and times of files: edited ones are another source."""
    stats = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
    return hashlib.sha256(repr(stats).encode()).hexdigest()[:16]


def text_of(record: Any, field: str, place: str) -> str:
    """The text of one record.

    Raises:
        UserError: it has no such field, or not a text in it.
    """
    text = record.get(field) if isinstance(record, dict) else None
    if isinstance(text, str):
        return text
    if isinstance(record, dict) and field in record:
        has = "null" if text is None else type(text).__name__
    else:
        has = f"the fields {', '.join(record)}" if isinstance(record, dict) and record else "no fields"
    raise UserError(f"{place} has no text in {field!r}, but {has}. Mend it, or choose another --text-field.")


def brief(error: Exception) -> str:
    """An error of a library, on one line."""
    return " ".join(str(getattr(error, "strerror", None) or error).split()).rstrip(".")[:300]


# -----------------------------------------------------------------------------
# Documents that this process reads, and long ones in pieces


_WORD_END = re.compile(r"\S(?=[ \n])")  # Python's \S leaves out all that GPT-2's does, and more


def safe_cut(text: str, start: int, limit: int) -> int:
    """Where to cut `text[start:]`, at `limit` or before, so that the parts have the tokens of the whole; or `start`.

    That is between a word and a blank: GPT-2's pattern joins a blank to what follows it, never to what is before.
    """
    width = 4096
    while True:
        begin = max(start, limit - width)
        ends = [match.end() for match in _WORD_END.finditer(text, begin, limit + 1)]
        if ends or begin == start:
            return ends[-1] if ends else start
        width *= 8


def piece_end(text: str, start: int, limit: int) -> int:
    """Where the piece of a long document ends that begins at `start`: as long as a batch, or up to the first blank
    after that; or `start` if there is none before `limit`."""
    end = safe_cut(text, start, start + BATCH_CHARS)
    if end == start and (ahead := _WORD_END.search(text, start + BATCH_CHARS, limit + 1)):
        return ahead.end()
    return end


def pieces_of(text: str) -> Iterator[tuple[int, str]]:
    """A document in pieces that fit into a batch, each with its offset."""
    start = 0
    while len(text) - start > BATCH_CHARS and (end := piece_end(text, start, len(text))) > start:
        yield start, text[start:end]
        start = end
    yield start, text[start:]


@dataclass(frozen=True, kw_only=True)
class Texts(Batch):
    """Documents that were read already."""

    content: list[str]
    source: str

    def texts(self) -> list[str]:
        return self.content

    def __str__(self) -> str:
        return f"{self.source}, from {self.place}"


def packed(
    pieces: Iterable[tuple[Place, bool, str]], source: str, share: Callable[[], float | None]
) -> Iterator[Texts]:
    """Pieces of documents (their places, whether they continue the one before, their texts) in batches."""
    content: list[str] = []
    begin: tuple[Place, bool] = [], False
    chars = 0
    for place, continues, text in pieces:
        if content and (continues or chars >= BATCH_CHARS):
            yield Texts(place=begin[0], share=share(), continues=begin[1], content=content, source=source)
            content, chars = [], 0
        if not content:
            begin = place, continues
        content.append(text)
        chars += len(text)
    if content:
        yield Texts(place=begin[0], share=share(), continues=begin[1], content=content, source=source)


class Documents(Corpus):
    """Documents that a function gives, the same ones at every call."""

    def __init__(
        self, name: str, documents: Callable[[], Iterable[str]], revision: str | None = None, prefix: str | None = None
    ):
        self.name, self.revision, self.prefix = name, revision, prefix or slug(name)
        self._documents = documents

    def batches(self, place: Place | None = None) -> Iterator[Batch]:
        first = tuple(place or (0, 0))
        pieces = (
            ([number, at], at > 0, text)
            for number, document in enumerate(self._documents())
            for at, text in pieces_of(document)
            if (number, at) >= first
        )
        return packed(pieces, self.name, lambda: None)


# -----------------------------------------------------------------------------
# Files


class Files(Corpus):
    """Files in the order given: a .txt is one document, a line of .jsonl or a row of .parquet is one each."""

    def __init__(
        self,
        name: str,
        paths: list[Path],
        text_field: str,
        *,
        separator: str | None = None,
    ):
        self.name, self.revision, self.prefix = name, stamp(paths), slug(paths[0].name.split(".")[0])
        self.paths, self.text_field, self.separator = paths, text_field, separator
        self.settings = {"text_field": text_field, "document_separator": separator}
        self._sizes = [path.stat().st_size for path in paths]

    def changed(self) -> bool:
        try:
            return stamp(self.paths) != self.revision
        except OSError:  # one is gone
            return True

    def kind(self, index: int) -> str | None:
        return kind_of(self.paths[index])

    def sizes(self) -> list[int]:
        """Bytes of each file."""
        return self._sizes

    def open(self, index: int) -> Path:
        """The file, there to be read."""
        return self.paths[index]

    def batches(self, place: Place | None = None) -> Iterator[Batch]:
        first, *within = place or [0]
        ends = list(itertools.accumulate(self.sizes(), initial=0))

        def share_of(index: int, share: float | None) -> float:
            return (ends[index] + (share or 0) * (ends[index + 1] - ends[index])) / max(1, ends[-1])

        for kind, run in itertools.groupby(range(first, len(ends) - 1), self.kind):
            if kind == ".txt":  # many small ones in a batch
                yield from self._texts(run, within, share_of)
            else:
                read = read_parquet if kind == ".parquet" else read_jsonl
                for index in run:
                    path = self.open(index)
                    with _readable(path):
                        for batch in read(path, self.text_field, *within):
                            share = share_of(index, batch.share)
                            yield replace(batch, place=[index, *batch.place], share=share)
                    within = []
            within = []

    def _texts(self, run: Iterable[int], within: Place, share_of: Callable[[int, float], float]) -> Iterator[Batch]:
        share = 0.0

        def pieces() -> Iterator[tuple[Place, bool, str]]:
            nonlocal share, within
            for index in run:
                path = self.open(index)
                with _readable(path), _open_text(path) as (stream, part):
                    for place, continues, text in txt_pieces(path, stream, self.separator, *within):
                        yield [index, *place], continues, text
                        share = share_of(index, part())
                within = []

        return packed(pieces(), self.name, lambda: share)

    def text_bytes(self) -> float | None:
        if any(self.kind(index) == ".jsonl" for index in range(len(self.paths))):
            return None  # what else is in a line, nobody knows
        return sum(
            parquet_text_bytes(path, self.text_field)
            if kind_of(path) == ".parquet"
            else size * (2 if path.suffix.lower() in COMPRESSED else 1)
            for size, path in zip(self.sizes(), self.paths, strict=True)
        )


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Turns the errors of the disk and of the decompressors into one for the user."""
    try:
        yield
    except (OSError, EOFError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({brief(error)}). Check it, or get it again.") from error


def kind_of(path: Path) -> str | None:
    """One of KINDS, without the suffix of a compressed file; None if it is no text that we read."""
    *_, inner, suffix = "", *path.name.lower().rsplit(".", 2)
    if f".{suffix}" in COMPRESSED:
        return f".{inner}" if inner in ("txt", "jsonl") else None
    return f".{suffix}" if f".{suffix}" in KINDS else None


def texts_in(folder: str | os.PathLike) -> list[Path]:
    """The files in a folder that `kind_of` knows, anywhere in it, but for folders of runs and of shards, with their logs."""
    found, seen = [], set()
    for where, folders, names in os.walk(folder, followlinks=True):
        folders[:] = [f for f in folders if not os.path.exists(os.path.join(where, f, LOCK))]
        if os.path.realpath(where) in seen:  # a link into what is above or beside it
            folders.clear()
            continue
        seen.add(os.path.realpath(where))
        found += [path for path in (Path(where, name) for name in names) if kind_of(path) and path.is_file()]
    return sorted(found)


@contextlib.contextmanager
def _open_text(path: Path) -> Iterator[tuple[BinaryIO, Callable[[], float]]]:
    """The bytes of a file, decompressed; and a function that tells which share of them was read."""
    with open(path, "rb") as raw:
        size = max(1, os.fstat(raw.fileno()).st_size)
        if codec := COMPRESSED.get(path.suffix.lower()):
            import pyarrow

            unpacked = pyarrow.CompressedInputStream(pyarrow.PythonFile(raw), codec)
            yield io.BufferedReader(unpacked, 1 << 20), lambda: min(1.0, raw.tell() / size)
        else:
            yield raw, lambda: raw.tell() / size


def txt_pieces(
    path: Path, stream: BinaryIO, separator: str | None, start: int = 0, continues: bool = False
) -> Iterator[tuple[Place, bool, str]]:
    """A text file: one document, or those between the separators (blank ones left out), in pieces.

    A place is a number of characters, line ends being one each, and whether a document goes on there.
    """
    at, held, wanted = start, "", 2 * BATCH_CHARS
    for block in _characters(path, stream, start):
        held += block
        if separator:
            *documents, held = held.split(separator)
            for text in documents:
                if text.strip() or continues:
                    yield [at, continues], continues, text
                at, continues, wanted = at + len(text) + len(separator), False, 2 * BATCH_CHARS
        while len(held) > wanted:
            end = piece_end(held, 0, len(held) - len(separator or ""))  # a separator may end in the next block
            if end == 0:
                wanted = 2 * len(held)  # no blank so far
                break
            yield [at, continues], continues, held[:end]
            at, held, continues, wanted = at + end, held[end:], True, 2 * BATCH_CHARS
    if held.strip() or continues or not separator:
        yield [at, continues], continues, held


def _characters(path: Path, stream: BinaryIO, skipped: int) -> Iterator[str]:
    """The text of a UTF-8 file in blocks, without byte-order mark and with \\n for every line end, from a place on."""
    decoder = io.IncrementalNewlineDecoder(codecs.getincrementaldecoder("utf-8-sig")(), translate=True)
    offset, last = 0, False
    while not last:
        block = stream.read(1 << 20)
        last = not block
        try:
            text = decoder.decode(block, final=last)
        except UnicodeDecodeError as error:
            raise UserError(
                f"{path} is not UTF-8 text ({error.reason} near byte {offset + error.start}). Convert it first."
            ) from error
        offset += len(block)
        if skipped < len(text):
            yield text[skipped:]
        skipped = max(0, skipped - len(text))


@dataclass(frozen=True, kw_only=True)
class Lines(Batch):
    """Lines of a .jsonl file, not yet parsed."""

    path: Path
    text_field: str
    content: bytes

    def texts(self) -> list[str]:
        found = []
        for number, line in enumerate(self.content.split(b"\n"), start=self.place[-1] + 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise UserError(
                    f"{self.path}, line {number} is not JSON ({error}). Mend or remove the line."
                ) from error
            found.append(text_of(record, self.text_field, f"{self.path}, line {number}"))
        return found

    def __str__(self) -> str:
        return f"{self.path}, from line {self.place[-1] + 1}"


def read_jsonl(path: Path, text_field: str, offset: int = 0, line: int = 0) -> Iterator[Lines]:
    """A document per line. A place is an offset in bytes (decompressed) and the number of lines before it."""
    with _open_text(path) as (stream, share):
        if path.suffix.lower() in COMPRESSED:
            left = offset
            while left and (skipped := stream.read(min(left, 1 << 20))):
                left -= len(skipped)
        else:
            stream.seek(offset)
        while lines := stream.readlines(BATCH_CHARS):
            content = b"".join(lines)
            yield Lines(place=[offset, line], share=share(), path=path, text_field=text_field, content=content)
            offset, line = offset + len(content), line + len(lines)


@dataclass(frozen=True, kw_only=True)
class RowGroups(Batch):
    """Some row groups of a .parquet file, which whoever encodes them reads."""

    path: Path
    text_field: str
    groups: tuple[int, ...]

    def texts(self) -> list[str]:
        import pyarrow.parquet

        row = self.place[-2]
        try:
            with pyarrow.parquet.ParquetFile(self.path, metadata=_metadata(self.path)) as file:
                table = file.read_row_groups(self.groups, columns=[self.text_field], use_threads=False)
            texts = table.column(0).to_pylist()
        except (pyarrow.ArrowException, OSError, ValueError) as error:
            raise UserError(
                f"{self.path} is damaged near row {row} ({brief(error)}). Check it, or get it again."
            ) from error
        return _rows(texts, self.text_field, self.path, row)

    def __str__(self) -> str:
        return f"{self.path}, from row {self.place[-2]}"


def _metadata(path: Path) -> Any:
    """Of a .parquet file: its row groups are many, and every batch would read of all of them."""
    return _metadata_of(path, path.stat().st_mtime_ns, path.stat().st_size)


@functools.lru_cache(maxsize=1)
def _metadata_of(path: Path, *stamp: int) -> Any:
    import pyarrow.parquet

    try:
        return pyarrow.parquet.read_metadata(path)
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is not a parquet file ({brief(error)}). Check it, or get it again.") from error


def parquet_text_bytes(path: Path, text_field: str) -> int:
    """Bytes of text in a .parquet file, from its metadata."""
    return sum(_text_sizes(_metadata(path), text_field))


def _text_sizes(metadata: Any, text_field: str) -> list[int]:
    """Bytes of a column in each row group, not compressed."""
    sizes = []
    for group in map(metadata.row_group, range(metadata.num_row_groups)):
        columns = map(group.column, range(group.num_columns))
        sizes.append(sum(c.total_uncompressed_size for c in columns if c.path_in_schema == text_field))
    return sizes


def _rows(texts: list[Any], text_field: str, path: Path, row: int) -> list[str]:
    for number, text in enumerate(texts, start=row):
        if not isinstance(text, str):
            text_of({text_field: text}, text_field, f"{path}, row {number}")
    return texts


def read_parquet(path: Path, text_field: str, row: int = 0, at: int = 0) -> Iterator[Batch]:
    """A document per row. A place is the number of rows before it, and a number of characters within a long one."""

    metadata = _metadata(path)
    names = metadata.schema.to_arrow_schema().names
    if text_field not in names:
        raise UserError(f"{path} has no column {text_field!r}. Choose with --text-field from {', '.join(names)}.")
    groups = [metadata.row_group(g) for g in range(metadata.num_row_groups)]
    ends, total = [], 0
    for group in groups:
        ends.append(total := total + group.num_rows)
    sizes = _text_sizes(metadata, text_field)
    large = [size > ROW_GROUP_BYTES for size in sizes] + [True]
    wanted: list[int] = []
    for g, group in enumerate(groups):
        start = ends[g] - group.num_rows
        if ends[g] <= row:
            continue
        if large[g] or row > start:
            rows = max(1, BATCH_CHARS * group.num_rows // max(1, sizes[g]))
            yield from _streamed(path, text_field, g, start, rows, (row, at), total)
            continue
        wanted.append(g)
        if large[g + 1] or sum(sizes[w] for w in wanted) >= BATCH_CHARS:
            begin = ends[wanted[0]] - groups[wanted[0]].num_rows
            share = ends[g] / total
            yield RowGroups(place=[begin, 0], share=share, path=path, text_field=text_field, groups=tuple(wanted))
            wanted = []


def _streamed(
    path: Path, text_field: str, group: int, start: int, rows: int, first: tuple[int, int], total: int
) -> Iterator[Texts]:
    """One large row group, read some rows at a time."""
    import pyarrow.parquet

    row = start

    def pieces() -> Iterator[tuple[Place, bool, str]]:
        nonlocal row
        try:
            with pyarrow.parquet.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False) as file:
                for batch in file.iter_batches(rows, row_groups=[group], columns=[text_field], use_threads=False):
                    texts = batch.column(0).to_pylist()
                    for number, text in enumerate(_rows(texts, text_field, path, row), start=row):
                        yield from (([number, at], at > 0, p) for at, p in pieces_of(text) if (number, at) >= first)
                    row += len(texts)
        except (pyarrow.ArrowException, OSError, ValueError) as error:
            raise UserError(f"{path} is damaged near row {row} ({brief(error)}). Check it, or get it again.") from error

    return packed(pieces(), str(path), lambda: row / total)
