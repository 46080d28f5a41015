"""Corpora in files: .txt, .jsonl and .parquet; .txt and .jsonl also compressed."""

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
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from support.cli import UserError
from support.data.corpus import (
    BATCH_CHARS,
    Batch,
    Corpus,
    Cursor,
    Piece,
    cursor_numbers,
    pack_pieces,
    piece_end,
    slug,
    split_long_document,
)
from support.files import LOCK

if TYPE_CHECKING:
    import pyarrow.parquet

TEXT_SUFFIXES = (".txt", ".jsonl", ".parquet")
COMPRESSIBLE_SUFFIXES = (".txt", ".jsonl")
COMPRESSION_CODECS = {".gz": "gzip", ".zst": "zstd"}
TEXT_TYPES = (
    f"{', '.join(TEXT_SUFFIXES)} ({' and '.join(COMPRESSIBLE_SUFFIXES)} also with {' or '.join(COMPRESSION_CODECS)})"
)
LOW_COMPRESSION_RATIO, TYPICAL_COMPRESSION_RATIO = 2, 3  # bytes of text per byte of .gz or .zst
READ_BYTES = 1 << 20
MAX_ROW_GROUP_BYTES = 1 << 25  # of text; larger row groups of a .parquet file are read in parts


def text_suffix(path: Path) -> str | None:
    """One of TEXT_SUFFIXES, for a compressed file the suffix before .gz or .zst; None for any other file."""
    name = path.name.lower()
    suffixes: tuple[str, ...] = TEXT_SUFFIXES
    for compressed in COMPRESSION_CODECS:
        if name.endswith(compressed):
            name, suffixes = name.removesuffix(compressed), COMPRESSIBLE_SUFFIXES
    return next((suffix for suffix in suffixes if name.endswith(suffix)), None)


def find_text_files(folder: str | os.PathLike[str]) -> list[Path]:
    """All files below a folder with a `text_suffix`, except in folders with a lock: those of runs and of shards."""
    paths: list[Path] = []
    visited = set()
    for parent, folders, names in os.walk(folder, followlinks=True):
        folders[:] = [f for f in folders if not os.path.exists(os.path.join(parent, f, LOCK))]
        if os.path.realpath(parent) in visited:  # a link to a folder that was searched already
            folders.clear()
            continue
        visited.add(os.path.realpath(parent))
        paths += [path for path in (Path(parent, name) for name in names) if text_suffix(path) and path.is_file()]
    return sorted(paths)


def fingerprint(paths: Iterable[Path]) -> str:
    """A hash of the names, sizes and modification times of files."""
    stats = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
    return hashlib.sha256(repr(stats).encode()).hexdigest()[:16]


def record_text(record: object, field: str, where: str) -> str:
    """The text in a field of a record.

    Raises:
        UserError: the record, which is at `where`, has no such field or no text in it.
    """
    if not isinstance(record, dict) or not record:
        problem = "has no fields"
    elif field not in record:
        problem = f"has no field {field!r}, only {', '.join(record)}"
    elif isinstance(record[field], str):
        return record[field]
    else:
        problem = f"has {'null' if record[field] is None else type(record[field]).__name__} in {field!r}, not text"
    raise UserError(f"{where} {problem}. Fix it, or choose another --text-field.")


# -----------------------------------------------------------------------------
# Files in order


class FileCorpus(Corpus):
    """Files in order. A .txt file is one document, as are a line of a .jsonl file and a row of a .parquet file.

    With `separator`, a .txt file is the documents between the separators. A cursor is a file's index, then that of its
    reader: `txt_pieces`, `read_jsonl` or `read_parquet`.
    """

    text_field: str
    separator: str | None = None

    @abc.abstractmethod
    def sizes(self) -> list[int]:
        """Bytes of each file."""

    @abc.abstractmethod
    def suffix(self, index: int) -> str | None:
        """The `text_suffix` of a file."""

    @abc.abstractmethod
    def local_path(self, index: int) -> Path:
        """The path of a file; waits until it is downloaded."""

    def batches(self, cursor: Cursor | None = None) -> Iterator[Batch]:
        first, *start = cursor_numbers(cursor or [0])
        for suffix, group in itertools.groupby(range(first, len(self.sizes())), self.suffix):
            indices = list(group)
            if suffix == ".txt":  # a batch may have many small files
                yield from pack_pieces(self._txt_pieces(indices, start), self.name)
            else:
                yield from self._record_batches(indices, start)
            start = []  # only the first file starts inside

    def _txt_pieces(self, indices: list[int], start: list[int]) -> Iterator[Piece]:
        for index in indices:
            path = self.local_path(index)
            with _reading(path), _open_text(path) as (stream, fraction_read):
                for piece in txt_pieces(path, stream, self.separator, *start):
                    fraction = self._fraction_read(index, fraction_read())
                    yield piece._replace(cursor=[index, *piece.cursor], fraction_read=fraction)
            start = []

    def _record_batches(self, indices: list[int], start: list[int]) -> Iterator[Batch]:
        for index in indices:
            path, read = self.local_path(index), RECORD_READERS[str(self.suffix(index))]
            with _reading(path):
                for batch in read(path, self.text_field, *start):
                    fraction = self._fraction_read(index, batch.fraction_read or 0)
                    yield replace(batch, cursor=[index, *batch.cursor], fraction_read=fraction)
            start = []

    @functools.cached_property
    def _offsets(self) -> list[int]:
        """Bytes of the files before each, then of all."""
        return list(itertools.accumulate(self.sizes(), initial=0))

    def _fraction_read(self, index: int, of_file: float) -> float:
        start, end = self._offsets[index : index + 2]
        return (start + of_file * (end - start)) / max(1, self._offsets[-1])


class Files(FileCorpus):
    """Local files."""

    def __init__(self, name: str, paths: list[Path], text_field: str, *, separator: str | None = None):
        self.name, self.revision, self.prefix = name, fingerprint(paths), slug(paths[0].name.split(".")[0])
        self.text_field, self.separator = text_field, separator
        self.settings = {"text_field": text_field, "document_separator": separator}
        self._paths, self._sizes = paths, [path.stat().st_size for path in paths]

    def sizes(self) -> list[int]:
        return self._sizes

    def suffix(self, index: int) -> str | None:
        return text_suffix(self._paths[index])

    def local_path(self, index: int) -> Path:
        return self._paths[index]

    def has_changed(self) -> bool:
        try:
            return fingerprint(self._paths) != self.revision
        except OSError:  # a file was removed
            return True

    def estimate_text_bytes(self) -> float | None:
        total = 0
        for index, (path, size) in enumerate(zip(self._paths, self._sizes, strict=True)):
            if self.suffix(index) == ".jsonl":
                return None  # the other fields of a line have an unknown size
            if self.suffix(index) == ".parquet":
                total += parquet_text_bytes(path, self.text_field)
            else:
                total += size * (LOW_COMPRESSION_RATIO if path.suffix.lower() in COMPRESSION_CODECS else 1)
        return total


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turns errors of the disk, of decompression and of pyarrow into a UserError."""
    try:
        yield
    except (OSError, EOFError, ValueError, NotImplementedError) as error:
        raise UserError(f"{path} cannot be read ({_one_line(error)}). Check the file, or get it again.") from error


def _one_line(error: Exception) -> str:
    """The message of a library's error, without line breaks."""
    return " ".join(str(getattr(error, "strerror", None) or error).split()).rstrip(".")[:300]


@contextlib.contextmanager
def _open_text(path: Path) -> Iterator[tuple[BinaryIO, Callable[[], float]]]:
    """The decompressed bytes of a file, and a function that returns which fraction of them was read."""
    with open(path, "rb") as raw:
        size = max(1, os.fstat(raw.fileno()).st_size)
        stream: BinaryIO = raw
        if codec := COMPRESSION_CODECS.get(path.suffix.lower()):
            import pyarrow

            decompressed = pyarrow.CompressedInputStream(pyarrow.PythonFile(raw), codec)
            stream = io.BufferedReader(decompressed, READ_BYTES)
        yield stream, lambda: min(1.0, raw.tell() / size)


# -----------------------------------------------------------------------------
# .txt


def txt_pieces(
    path: Path, stream: BinaryIO, separator: str | None, start: int = 0, start_inside: int = 0
) -> Iterator[Piece]:
    """Pieces of a text file, which is one document, or of those between separators; blank ones are left out.

    A cursor is an offset in characters, where a line end counts as one, and whether that is inside a document.
    """
    offset, inside, text = start, bool(start_inside), ""
    cut_above = 2 * BATCH_CHARS  # characters
    for block in _decode_blocks(path, stream, start):
        text += block
        if separator:
            *documents, text = text.split(separator)
            for document in documents:
                if document.strip() or inside:
                    yield Piece([offset, inside], document, inside)
                offset, inside, cut_above = offset + len(document) + len(separator), False, 2 * BATCH_CHARS
        while len(text) > cut_above:
            end = piece_end(text, 0, len(text) - len(separator or ""))  # a separator may end in the next block
            if end == 0:
                cut_above = 2 * len(text)  # no space so far
                break
            yield Piece([offset, inside], text[:end], inside)
            offset, text, inside, cut_above = offset + end, text[end:], True, 2 * BATCH_CHARS
    if text.strip() or inside or not separator:
        yield Piece([offset, inside], text, inside)


def _decode_blocks(path: Path, stream: BinaryIO, start: int) -> Iterator[str]:
    """The text of a UTF-8 file from a character on, without byte-order mark and with \\n for every line end."""
    decoder = io.IncrementalNewlineDecoder(codecs.getincrementaldecoder("utf-8-sig")(), translate=True)
    offset, last = 0, False
    while not last:
        block = stream.read(READ_BYTES)
        last = not block
        try:
            text = decoder.decode(block, final=last)
        except UnicodeDecodeError as error:
            raise UserError(
                f"{path} is not UTF-8 text ({error.reason} near byte {offset + error.start}). Convert it first."
            ) from error
        offset += len(block)
        if start < len(text):
            yield text[start:]
        start = max(0, start - len(text))


# -----------------------------------------------------------------------------
# .jsonl


@dataclass(frozen=True, kw_only=True)
class Lines(Batch):
    """Lines of a .jsonl file, parsed by the worker that encodes them."""

    path: Path
    first_line: int  # from 1
    text_field: str
    content: bytes

    def texts(self) -> list[str]:
        texts = []
        for number, line in enumerate(self.content.split(b"\n"), start=self.first_line):
            if not line.strip():
                continue
            where = f"{self.path}, line {number}"
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise UserError(f"{where} is not JSON ({error}). Fix or remove the line.") from error
            texts.append(record_text(record, self.text_field, where))
        return texts

    def __str__(self) -> str:
        return f"{self.path}, from line {self.first_line}"


def read_jsonl(path: Path, text_field: str, offset: int = 0, line: int = 0) -> Iterator[Lines]:
    """A document per line. A cursor is an offset in decompressed bytes, and the number of lines before it."""
    with _open_text(path) as (stream, fraction_read):
        if path.suffix.lower() in COMPRESSION_CODECS:
            to_skip = offset
            while to_skip and (skipped := stream.read(min(to_skip, READ_BYTES))):
                to_skip -= len(skipped)
        else:
            stream.seek(offset)
        while lines := stream.readlines(BATCH_CHARS):
            yield Lines(
                cursor=[offset, line],
                fraction_read=fraction_read(),
                path=path,
                first_line=line + 1,
                text_field=text_field,
                content=b"".join(lines),
            )
            offset, line = offset + sum(map(len, lines)), line + len(lines)


# -----------------------------------------------------------------------------
# .parquet


@dataclass(frozen=True, kw_only=True)
class RowGroups(Batch):
    """Row groups of a .parquet file, read by the worker that encodes them."""

    path: Path
    first_row: int
    text_field: str
    groups: tuple[int, ...]

    def texts(self) -> list[str]:
        import pyarrow.parquet

        try:
            with pyarrow.parquet.ParquetFile(self.path, metadata=_parquet_metadata(self.path)) as file:
                table = file.read_row_groups(self.groups, columns=[self.text_field], use_threads=False)
            texts = table.column(0).to_pylist()
        except (pyarrow.ArrowException, OSError, ValueError) as error:
            raise _corrupt_parquet(self.path, self.first_row, error) from error
        return _check_rows(texts, self.text_field, self.path, self.first_row)

    def __str__(self) -> str:
        return f"{self.path}, from row {self.first_row}"


def _corrupt_parquet(path: Path, row: int, error: Exception) -> UserError:
    return UserError(f"{path} is corrupt near row {row} ({_one_line(error)}). Check the file, or get it again.")


def _check_rows(texts: list[str | None], text_field: str, path: Path, first_row: int) -> list[str]:
    return [
        text if isinstance(text, str) else record_text({text_field: text}, text_field, f"{path}, row {row}")
        for row, text in enumerate(texts, start=first_row)
    ]


def _parquet_metadata(path: Path) -> pyarrow.parquet.FileMetaData:
    """The metadata of a .parquet file, cached: every batch needs it, and it describes all row groups."""
    return _read_parquet_metadata(path, path.stat().st_mtime_ns, path.stat().st_size)


@functools.lru_cache(maxsize=1)
def _read_parquet_metadata(path: Path, *version: int) -> pyarrow.parquet.FileMetaData:
    import pyarrow.parquet

    try:
        return pyarrow.parquet.read_metadata(path)
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise UserError(
            f"{path} is not a parquet file ({_one_line(error)}). Check the file, or get it again."
        ) from error


def parquet_text_bytes(path: Path, text_field: str) -> int:
    """Bytes of text in a .parquet file, from its metadata."""
    return sum(_row_group_text_bytes(_parquet_metadata(path), text_field))


def _row_group_text_bytes(metadata: pyarrow.parquet.FileMetaData, text_field: str) -> list[int]:
    """Uncompressed bytes of a column in each row group."""
    sizes = []
    for group in map(metadata.row_group, range(metadata.num_row_groups)):
        columns = map(group.column, range(group.num_columns))
        sizes.append(sum(c.total_uncompressed_size for c in columns if c.path_in_schema == text_field))
    return sizes


def read_parquet(path: Path, text_field: str, row: int = 0, char: int = 0) -> Iterator[Batch]:
    """A document per row. A cursor is the number of rows before it, and an offset in characters within a long document.

    Small row groups are read by the workers; large ones here, in parts.
    """
    metadata = _parquet_metadata(path)
    columns = metadata.schema.to_arrow_schema().names
    if text_field not in columns:
        raise UserError(f"{path} has no column {text_field!r}. Choose with --text-field from {', '.join(columns)}.")
    group_rows = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
    starts = list(itertools.accumulate(group_rows, initial=0))
    total_rows = starts[-1]
    sizes = _row_group_text_bytes(metadata, text_field)
    is_large = [size > MAX_ROW_GROUP_BYTES for size in sizes] + [True]  # the last one ends the last batch
    pending: list[int] = []  # row groups of the next batch
    for group, size in enumerate(sizes):
        if starts[group + 1] <= row:
            continue
        if is_large[group] or row > starts[group]:
            rows_at_once = max(1, BATCH_CHARS * group_rows[group] // max(1, size))
            pieces = _row_group_pieces(path, text_field, group, starts[group], rows_at_once, total_rows)
            yield from pack_pieces((p for p in pieces if cursor_numbers(p.cursor) >= [row, char]), str(path))
            continue
        pending.append(group)
        if is_large[group + 1] or sum(sizes[g] for g in pending) >= BATCH_CHARS:
            first_row = starts[pending[0]]
            yield RowGroups(
                cursor=[first_row, 0],
                fraction_read=starts[group + 1] / total_rows,
                path=path,
                first_row=first_row,
                text_field=text_field,
                groups=tuple(pending),
            )
            pending = []


def _row_group_pieces(
    path: Path, text_field: str, group: int, first_row: int, rows_at_once: int, total_rows: int
) -> Iterator[Piece]:
    """Pieces of the documents of one row group."""
    import pyarrow.parquet

    row = first_row
    try:
        with pyarrow.parquet.ParquetFile(path, buffer_size=READ_BYTES, pre_buffer=False) as file:
            for batch in file.iter_batches(rows_at_once, row_groups=[group], columns=[text_field], use_threads=False):
                for text in _check_rows(batch.column(0).to_pylist(), text_field, path, row):
                    for char, part in split_long_document(text):
                        yield Piece([row, char], part, continues=char > 0, fraction_read=(row + 1) / total_rows)
                    row += 1
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise _corrupt_parquet(path, row, error) from error


# read(path, text_field, *start) yields the batches of one file. `start` is what follows the file's index in a cursor,
# and nothing at its beginning; from there on the batches are the same as in a read from the beginning. A batch should
# be read or parsed by the worker that encodes it (`Lines`, `RowGroups`): `Texts` is sent to it.
RECORD_READERS: dict[str, Callable[..., Iterator[Batch]]] = {".jsonl": read_jsonl, ".parquet": read_parquet}
