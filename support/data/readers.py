"""Corpora in files: .txt, .jsonl and .parquet; .txt and .jsonl also compressed."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import itertools
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, BinaryIO, cast

from support.cli import UserError
from support.data import corpus
from support.data.corpus import Batch, Corpus, Cursor, Piece, pack_pieces, piece_end, slug, split_long_document
from support.files import LOCK

if TYPE_CHECKING:
    import pyarrow.parquet

TEXT_TYPES = ".txt, .jsonl, .parquet (.txt and .jsonl also with .gz or .zst)"
TEXT_SUFFIX = re.compile(r"(\.txt|\.jsonl)(?:\.gz|\.zst)?\Z|(\.parquet)\Z", re.IGNORECASE)
COMPRESSION_CODECS = {".gz": "gzip", ".zst": "zstd"}
COMPRESSION_RATIO = 3  # typical: bytes of text per byte of .gz or .zst
READ_SIZE = 1 << 20  # bytes or characters
MAX_ROW_GROUP_BYTES = 1 << 25  # of text; larger row groups of a .parquet file are read in parts
MIN_PART_BYTES, MAX_PARTS = 1 << 24, 1024  # of a corpus that is read in parts
MAX_TOGETHER_BYTES = 1 << 28  # a larger file is not read together with others


def text_suffix(path: Path) -> str | None:
    """.txt, .jsonl or .parquet, for a compressed file the suffix before .gz or .zst; None for any other file."""
    match = TEXT_SUFFIX.search(path.name)
    return (match[1] or match[2]).lower() if match else None


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
    fields = record if isinstance(record, dict) else {}
    if isinstance(text := fields.get(field), str):
        return text
    found = ", ".join(f"{name} ({type(value).__name__})" for name, value in fields.items()) or "nothing"
    raise UserError(f"{where} has no text in {field!r}, only {found}. Fix it, or choose another --text-field.")


def estimate_text_bytes(path: Path, text_field: str) -> int:
    """About how many bytes of text a file has, without reading it. Those of a .jsonl file have its other fields, too."""
    if text_suffix(path) == ".parquet":
        with _reading(str(path)):
            return sum(_row_group_text_bytes(_parquet_metadata(path), text_field))
    return path.stat().st_size * (COMPRESSION_RATIO if path.suffix.lower() in COMPRESSION_CODECS else 1)


# -----------------------------------------------------------------------------
# Files in order


@dataclass(frozen=True)
class Part:
    """Some files of a corpus, by their indices, or some rows of a single one; None is the end of the file."""

    indices: range
    first_row: int = 0
    stop_row: int | None = None


class FileCorpus(Corpus):
    """Files in order. A .txt file is one document, as are a line of a .jsonl file and a row of a .parquet file.

    With `separator`, a .txt file is the documents between the separators. A cursor is a file's index, then that of its
    reader: `read_txt`, `read_jsonl` or `read_parquet`.
    """

    text_field: str
    separator: str | None = None

    def files(self) -> list[tuple[Path, int]]:
        """The path and the size in bytes of each file."""
        raise NotImplementedError

    def wait_for(self, index: int) -> None:
        """Returns when a file can be read."""

    def batches(self, cursor: Cursor | None = None) -> Iterator[Batch]:
        first, *start = cast(Sequence[int], cursor or [0])
        for group in self.file_groups():
            if first < group.stop:
                yield from self.read_files(range(max(first, group.start), group.stop), *start)
                start = []  # only the first file starts inside

    def file_groups(self) -> Iterator[range]:
        """The files, by their indices: each large one alone, and small ones together. No batch is of two groups."""
        most, first, total = min(self._part_bytes, MAX_TOGETHER_BYTES), 0, 0
        for index, (_, size) in enumerate(self.files()):
            if index > first and total + size > most:
                yield range(first, index)
                first, total = index, 0
            total += size
        yield range(first, len(self.files()))

    def read_files(self, indices: range, *start: int, stop_row: int | None = None) -> Iterator[Batch]:
        """Batches of some files. `start` is what follows the first one's index in a cursor, nothing at its beginning.

        A .parquet file ends before `stop_row`, the first row of a row group.
        """
        return pack_pieces(self._read_pieces(indices, start, stop_row), self.name)

    def _read_pieces(self, indices: range, start: Sequence[int], stop_row: int | None) -> Iterator[Piece | Batch]:
        files = self.files()
        before, total = sum(size for _, size in files[: indices.start]), max(1, sum(size for _, size in files))
        for index in indices:
            path, size = files[index]
            self.wait_for(index)
            with _reading(str(path)):
                for part in self._read_file(path, start, stop_row):
                    fraction_read = (before + size * (part.fraction_read or 0)) / total
                    yield replace(part, cursor=[index, *part.cursor], fraction_read=fraction_read)
            before, start = before + size, ()

    def _read_file(self, path: Path, start: Sequence[int], stop_row: int | None) -> Iterator[Piece | Batch]:
        suffix = text_suffix(path)
        if suffix == ".txt":
            return read_txt(path, self.separator, *start)
        if suffix == ".jsonl":
            return read_jsonl(path, self.text_field, *start)
        row, char = start or (0, 0)
        return read_parquet(path, self.text_field, row, char, stop_row)

    def parts(self) -> list[Part]:
        """All of it, in parts that can be read apart, and are the same whoever reads them."""
        parts = []
        for indices in self.file_groups():
            rows = self._row_ranges(indices[0]) if len(indices) == 1 else [(0, None)]
            parts += [Part(indices, first, stop) for first, stop in rows]
        return parts

    def read_part(self, part: Part) -> Iterator[Batch]:
        start = [part.first_row, 0] if part.first_row else []
        return self.read_files(part.indices, *start, stop_row=part.stop_row)

    def _row_ranges(self, index: int) -> list[tuple[int, int | None]]:
        """Ranges of a file's rows that can be read apart; None is its end."""
        path = self.files()[index][0]
        if text_suffix(path) != ".parquet":
            return [(0, None)]
        return row_ranges(path, self.text_field, self._part_bytes)

    @property
    def _part_bytes(self) -> int:
        """Larger for a large corpus, so that there are not too many parts."""
        return max(MIN_PART_BYTES, sum(size for _, size in self.files()) // MAX_PARTS)

    def for_task(self, folder: Path) -> FileCorpus:
        """The same corpus for a task that reads some of its files and may write into a folder of its own."""
        return self


class Files(FileCorpus):
    """Local files."""

    def __init__(self, name: str, paths: list[Path], text_field: str, *, separator: str | None = None):
        self.name, self.revision, self.prefix = name, fingerprint(paths), slug(paths[0].name.split(".")[0])
        self.text_field, self.separator = text_field, separator
        self.settings = {"text_field": text_field, "document_separator": separator}
        self._files = [(path, path.stat().st_size) for path in paths]

    def files(self) -> list[tuple[Path, int]]:
        return self._files

    def estimate_text_bytes(self) -> float:
        return sum(estimate_text_bytes(path, self.text_field) for path, _ in self._files)

    def has_changed(self) -> bool:
        try:
            return fingerprint(path for path, _ in self._files) != self.revision
        except OSError:  # a file was removed
            return True


@contextlib.contextmanager
def _reading(where: str) -> Iterator[None]:
    """Turns errors of the disk, of decoding and of pyarrow into a UserError."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise UserError(f"{where} is not UTF-8 text. Convert it first.") from error
    except Exception as error:
        is_pyarrows = type(error).__module__.startswith("pyarrow")  # which has many classes
        if not is_pyarrows and not isinstance(error, OSError | EOFError | ValueError):
            raise
        reason = " ".join(str(getattr(error, "strerror", None) or error).split()).rstrip(".")[:300]
        raise UserError(f"{where} cannot be read ({reason}). Check the file, or get it again.") from error


@contextlib.contextmanager
def _open_text(path: Path) -> Iterator[tuple[BinaryIO, Callable[[], float]]]:
    """The decompressed bytes of a file, and a function that returns which fraction of them was read."""
    with open(path, "rb") as raw:
        size = max(1, os.fstat(raw.fileno()).st_size)
        stream: BinaryIO = raw
        if codec := COMPRESSION_CODECS.get(path.suffix.lower()):
            import pyarrow

            decompressed = pyarrow.CompressedInputStream(pyarrow.PythonFile(raw), codec)
            stream = io.BufferedReader(decompressed, READ_SIZE)
        yield stream, lambda: min(1.0, raw.tell() / size)


def _skip(stream: IO[str] | IO[bytes], count: int) -> None:
    """Reads and drops `count` characters or bytes."""
    while count and (skipped := stream.read(min(count, READ_SIZE))):
        count -= len(skipped)


# -----------------------------------------------------------------------------
# .txt


def read_txt(path: Path, separator: str | None, start: int = 0, start_inside: int = 0) -> Iterator[Piece]:
    """Pieces of a text file, which is one document, or of those between separators; blank ones are left out.

    Line ends become \\n. A cursor is an offset in characters after that, and whether it is inside a document.
    """
    offset, inside, text = start, bool(start_inside), ""
    cut_above = 2 * corpus.BATCH_CHARS  # characters
    with _open_text(path) as (stream, fraction_read), io.TextIOWrapper(stream, encoding="utf-8-sig") as decoded:
        _skip(decoded, start)
        while block := decoded.read(READ_SIZE):
            text += block
            if separator:
                *documents, text = text.split(separator)
                for document in documents:
                    if document.strip() or inside:
                        yield Piece([offset, inside], document, inside, fraction_read())
                    offset, inside = offset + len(document) + len(separator), False
                    cut_above = 2 * corpus.BATCH_CHARS
            while len(text) > cut_above:
                end = piece_end(text, 0, len(text) - len(separator or ""))  # a separator may end in the next block
                if end == 0:
                    cut_above = 2 * len(text)  # no space so far
                    break
                yield Piece([offset, inside], text[:end], inside, fraction_read())
                offset, text, inside = offset + end, text[end:], True
                cut_above = 2 * corpus.BATCH_CHARS
    if text.strip() or inside or not separator:
        yield Piece([offset, inside], text, inside, 1.0)


# -----------------------------------------------------------------------------
# .jsonl


def read_jsonl(path: Path, text_field: str, offset: int = 0, line: int = 0) -> Iterator[Batch]:
    """A document per line. A cursor is an offset in decompressed bytes, and the number of lines before it."""
    with _open_text(path) as (stream, fraction_read):
        if stream.seekable():
            stream.seek(offset)
        else:
            _skip(stream, offset)
        while lines := stream.readlines(corpus.BATCH_CHARS):
            yield Batch(
                texts=functools.partial(_parse_lines, b"".join(lines), text_field, path, line + 1),
                cursor=[offset, line],
                where=f"{path}, from line {line + 1}",
                fraction_read=fraction_read(),
            )
            offset, line = offset + sum(map(len, lines)), line + len(lines)


def _parse_lines(content: bytes, text_field: str, path: Path, first_line: int) -> list[str]:
    """The texts in lines of a .jsonl file, which are numbered from 1; a worker calls it."""
    texts = []
    for number, line in enumerate(content.split(b"\n"), start=first_line):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{where} is not JSON ({error}). Fix or remove the line.") from error
        texts.append(record_text(record, text_field, where))
    return texts


# -----------------------------------------------------------------------------
# .parquet


def read_parquet(
    path: Path, text_field: str, row: int = 0, char: int = 0, stop_row: int | None = None
) -> Iterator[Piece | Batch]:
    """A document per row. A cursor is the number of rows before it, and an offset in characters within a long document.

    Small row groups are read by the workers; large ones here, in parts.
    """
    metadata = _parquet_metadata(path)
    columns = metadata.schema.to_arrow_schema().names
    if text_field not in columns:
        raise UserError(f"{path} has no column {text_field!r}. Choose with --text-field from {', '.join(columns)}.")
    end = 0
    for group, text_bytes in enumerate(_row_group_text_bytes(metadata, text_field)):
        num_rows = metadata.row_group(group).num_rows
        first_row, end = end, end + num_rows
        fraction_read = end / max(1, metadata.num_rows)
        if stop_row is not None and first_row >= stop_row:
            return
        if num_rows == 0 or (row, char) >= (end, 0):
            continue
        if text_bytes <= MAX_ROW_GROUP_BYTES and (row, char) <= (first_row, 0):
            yield Batch(
                texts=functools.partial(_read_row_group, path, text_field, group, first_row, num_rows),
                cursor=[first_row, 0],
                where=f"{path}, from row {first_row}",
                fraction_read=fraction_read,
            )
            continue
        rows_at_once = max(1, corpus.BATCH_CHARS * num_rows // max(1, text_bytes))
        for number, text in enumerate(_read_rows(path, text_field, group, first_row, rows_at_once), start=first_row):
            for offset, part in split_long_document(text):
                if (number, offset) >= (row, char):
                    yield Piece([number, offset], part, continues=offset > 0, fraction_read=fraction_read)


def row_ranges(path: Path, text_field: str, text_bytes: int) -> list[tuple[int, int | None]]:
    """Ranges of the rows of a .parquet file with at most so much text, which no batch goes beyond; None is the end."""
    with _reading(str(path)):
        metadata = _parquet_metadata(path)
    ranges: list[tuple[int, int | None]] = []
    start = row = total = 0
    sizes = _row_group_text_bytes(metadata, text_field)
    for group, size in enumerate(sizes):
        # a batch may be of two row groups only if both are read in pieces
        if row > start and total + size > text_bytes and size <= MAX_ROW_GROUP_BYTES:
            ranges.append((start, row))
            start, total = row, 0
        total, row = total + size, row + metadata.row_group(group).num_rows
    return [*ranges, (start, None)]


def _read_rows(path: Path, text_field: str, group: int, first_row: int, rows_at_once: int) -> Iterator[str]:
    """The text in each row of a row group, of which `first_row` is the first."""
    import pyarrow.parquet

    # Pages are read as they are needed, not the whole group.
    options = {"buffer_size": READ_SIZE, "pre_buffer": False}
    with (
        _reading(f"{path}, from row {first_row},"),
        pyarrow.parquet.ParquetFile(path, metadata=_parquet_metadata(path), **options) as file,
    ):
        batches = file.iter_batches(rows_at_once, row_groups=[group], columns=[text_field], use_threads=False)
        texts = itertools.chain.from_iterable(batch.column(0).to_pylist() for batch in batches)
        for row, text in enumerate(texts, start=first_row):
            yield text if isinstance(text, str) else record_text({text_field: text}, text_field, f"{path}, row {row}")


def _read_row_group(path: Path, text_field: str, group: int, first_row: int, num_rows: int) -> list[str]:
    """The texts in a row group; a worker calls it."""
    return list(_read_rows(path, text_field, group, first_row, num_rows))


def _parquet_metadata(path: Path) -> pyarrow.parquet.FileMetaData:
    """The metadata of a .parquet file, cached: every batch needs it, and it describes all row groups."""
    return _read_parquet_metadata(path, path.stat().st_mtime_ns)


@functools.lru_cache(maxsize=1)
def _read_parquet_metadata(path: Path, mtime_ns: int) -> pyarrow.parquet.FileMetaData:
    import pyarrow.parquet

    return pyarrow.parquet.read_metadata(path)


def _row_group_text_bytes(metadata: pyarrow.parquet.FileMetaData, text_field: str) -> list[int]:
    """Uncompressed bytes of a column in each row group."""
    sizes = []
    for group in map(metadata.row_group, range(metadata.num_row_groups)):
        columns = map(group.column, range(group.num_columns))
        sizes.append(sum(c.total_uncompressed_size for c in columns if c.path_in_schema == text_field))
    return sizes
