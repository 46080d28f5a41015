"""Text in .txt, .jsonl and .parquet files, and the parts in which it is read.

The parts depend only on the files, so they are the same in every process.
"""

from __future__ import annotations

import codecs
import contextlib
import glob
import hashlib
import io
import itertools
import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeAlias

from support.cli import UserError, describe_error
from support.files import LOCK

if TYPE_CHECKING:
    import pyarrow.parquet

Setting: TypeAlias = str | int | float | bool | None  # a value in a manifest's settings
Piece: TypeAlias = tuple[str, bool]  # a document or a piece of a long one, and whether a document starts with it

TEXT_TYPES = ".txt, .jsonl, .parquet (.txt and .jsonl also with .gz or .zst)"
TEXT_SUFFIX = re.compile(r"(\.txt|\.jsonl)(?:\.gz|\.zst)?\Z|(\.parquet)\Z", re.IGNORECASE)
COMPRESSION_CODECS = {".gz": "gzip", ".zst": "zstd"}
COMPRESSION_RATIO = 3  # typical bytes of text per byte of .gz or .zst
READ_SIZE = 1 << 20  # bytes
MIN_PART_BYTES, MAX_PARTS = 1 << 24, 1024  # a larger corpus has larger parts, not more


def text_suffix(path: Path) -> str | None:
    """Returns ".txt", ".jsonl" or ".parquet", without .gz or .zst after it; None for any other file."""
    match = TEXT_SUFFIX.search(path.name)
    return (match[1] or match[2]).lower() if match else None


def compression(path: Path) -> str | None:
    """Returns pyarrow's name for the codec of a compressed file, None for others."""
    return COMPRESSION_CODECS.get(path.suffix.lower())


def find_text_files(folder: str | os.PathLike[str]) -> tuple[list[Path], list[Path], list[Path]]:
    """Returns the paths with a `text_suffix` below a folder, except folders, those that are skipped, and all other files.

    Skips names that begin with a dot, of files and of folders: editors and file systems keep copies there. Also skips
    folders of runs and shards, which have a lock file.
    """
    paths: list[Path] = []
    skipped: list[Path] = []
    visited = set()
    for parent, folders, names in os.walk(folder, followlinks=True, onerror=_raise):
        if os.path.realpath(parent) in visited:  # through a link
            folders.clear()
            continue
        visited.add(os.path.realpath(parent))
        hidden = {name for name in (*folders, *names) if name.startswith(".")}
        hidden |= {name for name in folders if os.path.exists(os.path.join(parent, name, LOCK))}
        skipped += [Path(parent, name) for name in sorted(hidden)]
        # in an order that does not depend on the disk; links last, so that a folder has its own name
        visible = [name for name in folders if name not in hidden]
        folders[:] = sorted(visible, key=lambda name: (os.path.islink(os.path.join(parent, name)), name))
        paths += [Path(parent, name) for name in names if name not in hidden]
    in_skipped = (file for path in skipped for file in (path, *sorted(path.rglob("*"))))
    others = sorted(itertools.filterfalse(text_suffix, paths))
    return sorted(filter(text_suffix, paths)), list(filter(_is_text_file, in_skipped)), others


def _is_of_run_or_model(path: Path) -> bool:
    """Returns whether a file is the log of a run, the list of its starts, or the merges of a model's tokenizer.

    A copy of a run may lack the hidden lock file.
    """
    beside = {"log.txt": ("starts.jsonl", LOCK), "starts.jsonl": ("log.txt", LOCK), "merges.txt": ("vocab.json",)}
    return any((path.parent / name).exists() for name in beside.get(path.name, ()))


def has_text_files(folder: Path) -> bool:
    """Returns whether there is text in a folder or one level below; a run's folder has none."""
    visible = (path for pattern in ("[!.]*", "[!.]*/[!.]*") for path in folder.glob(pattern))
    return not (folder / LOCK).exists() and any(map(_is_text_file, visible))


def _is_text_file(path: Path) -> bool:
    return text_suffix(path) is not None and path.is_file()


def _raise(error: OSError) -> None:
    raise error


def find_input(patterns: Iterable[str], report: Callable[[str], None] | None = None) -> list[Path]:
    """Returns the text files that the given files, folders and patterns name, in that order and without duplicates.

    Args:
        report: is told which files in folders were skipped, see `find_text_files`.

    Raises:
        UserError: a pattern matches nothing, or a file that is not text.
    """
    unique: dict[str, Path] = {}  # a second copy of a file could become the validation split
    skipped: dict[Path, None] = {}  # in order
    others: dict[Path, None] = {}
    for pattern in patterns:
        matches = [pattern] if os.path.lexists(pattern) else sorted(glob.glob(pattern, recursive=True))
        if not matches:
            raise UserError(f"no file matches {pattern}. Give files or folders of {TEXT_TYPES}.")
        for match in matches:
            found = find_text_files(match) if os.path.isdir(match) else ([Path(os.path.normpath(match))], [], [])
            skipped.update(dict.fromkeys(found[1]))
            others.update(dict.fromkeys(found[2]))
            for path in found[0]:
                unique.setdefault(os.path.realpath(path), path)
    of_programs = {real: path for real, path in unique.items() if _is_of_run_or_model(path)}
    if len(of_programs) < len(unique):  # otherwise, they are named
        skipped.update(dict.fromkeys(of_programs.values()))
        unique = {real: path for real, path in unique.items() if real not in of_programs}
    texts: dict[str, Path] = {}  # by the path without .gz or .zst
    for path in sorted(unique.values(), key=lambda path: compression(path) is not None):
        texts.setdefault(os.path.abspath(path.with_suffix("") if compression(path) else path), path)
    copies = set(unique.values()).difference(texts.values())
    unique = {real: path for real, path in unique.items() if path not in copies}
    problems = list(filter(None, map(_problem_of, unique.values())))
    notes = []
    if copies:
        notes.append(f"skipped {_count(sorted(copies))} (compressed copies of other files)")
    if skipped:
        notes.append(f"skipped {_count(skipped)} (names that begin with a dot, and files of runs, shards and models)")
    if others:
        notes.append(f"skipped {_count(others)} (not .txt, .jsonl or .parquet)")
    if not unique:
        where = ": ".join([" ".join(patterns), *notes])
        problems.append(f"there is no text in {where}. Give files or folders of {TEXT_TYPES}.")
    if problems:
        raise UserError(*problems)
    if report:
        for note in notes:
            report(note)
    return list(unique.values())


def check_separator(separator: str | None, paths: Iterable[Path]) -> None:
    """Raises a UserError if a separator has nothing to divide."""
    if separator and not any(text_suffix(path) == ".txt" for path in paths):
        raise UserError("--document-separator divides .txt files, and there is none. Leave it out.")


def _count(paths: Iterable[Path]) -> str:
    first, *more = paths
    return f"{1 + len(more):,} files, such as {first}" if more else str(first)


def _problem_of(path: Path) -> str | None:
    """Says why a path is not a file of text; None if it is one."""
    if not path.exists():
        return (
            f"{path} points to {os.path.realpath(path)}, which does not exist. Restore that file, or remove the link."
        )
    if not path.is_file():
        return f"{path} is a pipe or a device. Use a file, or leave it out."
    return None if text_suffix(path) else f"{path} is not a file of type {TEXT_TYPES}. Convert it, or leave it out."


def slug(name: str) -> str:
    """Makes a name safe for use in a file name."""
    safe = "".join(c if c.isalnum() or c in "-." else "_" for c in name).strip("._")
    return safe.encode()[:60].decode(errors="ignore") or "text"


def _common_folder(paths: Sequence[Path]) -> Path:
    """Returns the innermost folder that has all files; an empty path if they are on different drives."""
    first, *others = (Path(os.path.abspath(path)) for path in paths)
    return next((folder for folder in first.parents if all(other.is_relative_to(folder) for other in others)), Path())


def estimate_text_bytes(path: Path, text_field: str) -> int:
    """Estimates the bytes of text in a file, without reading it; other fields of a .jsonl file count, too."""
    with _reading(str(path)):
        if text_suffix(path) == ".parquet":
            with _open_parquet(path) as file:
                return sum(row_group_text_bytes(file, text_field))
        return path.stat().st_size * (COMPRESSION_RATIO if compression(path) else 1)


def estimate_text(paths: Sequence[Path], text_field: str) -> tuple[float, str]:
    """Estimates the bytes of text in files better than `estimate_text_bytes`; returns them and the beginning of the text.

    Of the largest file of each type, it reads the beginning, to see how far a megabyte of it is text. (Parts are cut by the
    other estimate, which needs only sizes.)
    """
    sizes = {path: estimate_text_bytes(path, text_field) for path in paths}
    of_type: dict[tuple[str | None, str | None], list[Path]] = {}
    for path in paths:
        of_type.setdefault((text_suffix(path), compression(path)), []).append(path)
    found = list[tuple[float, str]]()
    for files in of_type.values():
        text, correction = _read_beginning(max(files, key=lambda path: sizes[path]), text_field)
        found.append((correction * sum(sizes[path] for path in files), text))
    return sum(size for size, _ in found), max(found)[1]


def _read_beginning(path: Path, text_field: str) -> tuple[str, float]:
    """Returns the text at the beginning of a file, and how many times as long it is as `estimate_text_bytes` would say."""
    if text_suffix(path) == ".parquet":
        characters = itertools.chain.from_iterable(text for text, _ in read_parquet(path, text_field, 0, None))
        return "".join(itertools.islice(characters, READ_SIZE)), 1.0
    with _reading(str(path)), open(path, "rb") as file:
        stream, ratio = file, 1.0
        if codec := compression(path):
            import pyarrow

            stream = pyarrow.CompressedInputStream(pyarrow.PythonFile(file), codec)
        content = stream.read(16 * READ_SIZE if codec else READ_SIZE)
        if codec:  # its library reads compressed blocks ahead
            ratio = len(content) / max(1, file.tell()) / COMPRESSION_RATIO
            content = content[:READ_SIZE]
    if text_suffix(path) == ".txt":
        return content.decode(errors="ignore"), ratio
    lines, texts = content[: content.rfind(b"\n") + 1] or content, list[Any]()  # the last line may be cut off
    for line in lines.split(b"\n"):
        with contextlib.suppress(ValueError, RecursionError):  # who reads the whole file names what is wrong
            record = json.loads(line)
            texts.append(record.get(text_field) if isinstance(record, dict) else None)
    text = "".join(filter(lambda text: isinstance(text, str), texts))
    if not text:  # in a first line that is longer, or in another field
        return "", ratio
    return text, ratio * len(text.encode(errors="replace")) / max(1, len(lines))


# -----------------------------------------------------------------------------
# A corpus and its parts


@dataclass(frozen=True)
class Part:
    """Some files of a corpus, by their indices, or a range of a single file.

    Attributes:
        start, stop: offsets in bytes, or in row groups of a .parquet file; None is the end of the file.
        text_bytes: estimated bytes of text.
    """

    files: range
    start: int = 0
    stop: int | None = None
    text_bytes: float = 0


class Corpus:
    """Documents in a fixed order, read in parts.

    Attributes:
        name, revision, settings: identify the corpus in a manifest.
        prefix: beginning of the file names of its shards.
        vocab_size: of an encoding that is trained on it; None: one that fits its length.
    """

    name: str
    revision: str | None
    prefix: str
    settings: Mapping[str, Setting] = {}
    vocab_size: int | None = None

    def parts(self) -> list[Part]:
        raise NotImplementedError

    def read(self, part: Part) -> Iterator[Piece]:
        """Yields the documents of a part. Its first piece may continue the last document of the previous part.

        Raises:
            UserError: a file cannot be read, or changed while it was read.
        """
        raise NotImplementedError

    def describe(self, part: Part) -> str:
        """Says where the text of a part is, for a message."""
        return self.name

    def prepare(self, part: Part) -> None:
        """Starts to fetch a part that will be read soon."""

    def release(self, part: Part) -> None:
        """Removes what was fetched for a part that will not be read again."""

    def for_process(self, number: int) -> Corpus:
        """Returns the same corpus for one of several processes that read it."""
        return self

    def close(self) -> None:
        """Removes everything that was fetched."""


class Documents(Corpus):
    """Documents in memory, as one part."""

    def __init__(self, name: str, documents: Iterable[str], revision: str | None = None, prefix: str | None = None):
        self.name, self.revision, self.prefix = name, revision, prefix or slug(name)
        self._documents = list(documents)

    def parts(self) -> list[Part]:
        return [Part(range(1), text_bytes=sum(map(len, self._documents)))]

    def read(self, part: Part) -> Iterator[Piece]:
        return ((document, True) for document in self._documents)


class TextFiles(Corpus):
    """Files in order. A .txt file, a line of a .jsonl file and a row of a .parquet file are one document each.

    A `separator` divides .txt files into documents, and blank documents are dropped.
    """

    def __init__(self, paths: list[Path], text_field: str = "text", separator: str | None = None):
        self.paths, self.text_field, self.separator = paths, text_field, separator
        self.settings = {"text_field": text_field, "document_separator": separator}
        self.prefix = slug(paths[0].name.split(".")[0] if len(paths) == 1 else _common_folder(paths).name)
        self.name = " ".join(path.name for path in (paths if len(paths) <= 9 else paths[:3]))
        self.name += f" ... ({len(paths)} files)" if len(paths) > 9 else ""
        self._stamps = list(map(self._stamp, paths))
        self.revision = hashlib.sha256(repr(self._stamps).encode()).hexdigest()[:16]

    @staticmethod
    def _stamp(path: Path) -> tuple[str, int, int]:
        with _reading(str(path)):
            return path.name, path.stat().st_size, path.stat().st_mtime_ns

    def parts(self) -> list[Part]:
        """Divides large files into several parts, and combines consecutive small files."""
        sizes = [estimate_text_bytes(path, self.text_field) for path in self.paths]
        part_bytes, parts = max(MIN_PART_BYTES, sum(sizes) // MAX_PARTS), list[Part]()
        for files in group_by_size(sizes, part_bytes):
            size = sum(sizes[files.start : files.stop])
            ends = self._ends(self.paths[files.start], part_bytes) if size > part_bytes else [None]
            for start, stop in itertools.pairwise([0, *ends]):
                parts.append(Part(files, start or 0, stop, size / len(ends)))
        return parts

    def _ends(self, path: Path, part_bytes: int) -> list[int | None]:
        """Returns where the parts of a file end, in bytes or row groups; None is the file's end."""
        with _reading(str(path)):
            if text_suffix(path) == ".parquet":
                with _open_parquet(path) as table:
                    sizes = row_group_text_bytes(table, self.text_field)
                return [*(groups.stop for groups in group_by_size(sizes, part_bytes) if groups.stop < len(sizes)), None]
            if compression(path):
                return [None]
            inner = range(part_bytes, path.stat().st_size, part_bytes)
            if text_suffix(path) == ".jsonl":
                return [*inner, None]
            cuts = {find_safe_cut(path, offset, (self.separator or "").encode()) for offset in inner}
            return [*sorted(cuts - {0}), None]

    def read(self, part: Part) -> Iterator[Piece]:
        for index in part.files:
            path = self.paths[index]
            with _reading(str(path)):
                yield from self._read_file(path, part.start, part.stop)
                if self._stamp(path) != self._stamps[index]:
                    raise UserError(
                        f"{path} changed while it was read. Run the command again when it no longer changes."
                    )

    def _read_file(self, path: Path, start: int, stop: int | None) -> Iterator[Piece]:
        suffix = text_suffix(path)
        if suffix == ".txt":
            return read_txt(path, self.separator, start, stop)
        if suffix == ".jsonl":
            return read_jsonl(path, self.text_field, start, stop)
        return read_parquet(path, self.text_field, start, stop)

    def describe(self, part: Part) -> str:
        return " to ".join(str(self.paths[index]) for index in sorted({part.files[0], part.files[-1]}))


def group_by_size(sizes: list[int], part_bytes: int) -> Iterator[range]:
    """Groups the indices of files: a large file is a group of its own, and consecutive small files share one."""
    first, total = 0, 0
    for index, size in enumerate(sizes):
        if index > first and total + size > part_bytes:
            yield range(first, index)
            first, total = index, 0
        total += size
    yield range(first, len(sizes))


@contextlib.contextmanager
def _reading(where: str) -> Iterator[None]:
    """Turns disk errors, decoding errors and pyarrow's errors into a UserError."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise _not_utf8(Path(where), error.object) from error
    except Exception as error:
        by_pyarrow = type(error).__module__.startswith("pyarrow")
        if not by_pyarrow and not isinstance(error, OSError | EOFError | ValueError):
            raise
        reason = " ".join(describe_error(error).split()).rstrip(".")[:300]
        raise UserError(f"{where} cannot be read ({reason}). Check the file, or get it again.") from error


def _not_utf8(path: Path, content: bytes, where: str | None = None) -> UserError:
    """Returns the error for a file whose `content` cannot be decoded; `where` is the place in the file, if known."""
    encoding, note = _wide_encoding(content), ""
    if encoding is None:
        encoding, note = "CP1252", " (Western languages; others are in CP1251, KOI8-R, GB18030, SHIFT_JIS, ...)"
    advice = f"If it is {encoding}{note}, convert it: iconv -f {encoding} -t UTF-8 {shlex.quote(str(path))} > NEW"
    is_plain = text_suffix(path) in (".txt", ".jsonl") and not compression(path)
    return UserError(f"{where or path} is not UTF-8 text. {advice if is_plain else 'Convert it first.'}")


def _wide_encoding(beginning: bytes) -> str | None:
    """Returns which UTF-16 or UTF-32 a file is in, judging by its first bytes; None for other encodings."""
    if beginning.startswith((codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)):
        return "UTF-32"
    if beginning.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "UTF-16"
    at_even, at_odd = (beginning[offset::2].count(0) for offset in (0, 1))
    if (at_even + at_odd) * 50 > len(beginning):  # the upper halves of ASCII characters, at least of the spaces
        return "UTF-16BE" if at_even > at_odd else "UTF-16LE"
    return None


@contextlib.contextmanager
def _open_text(path: Path, start: int = 0) -> Iterator[BinaryIO]:
    """Opens a file at byte `start`; a compressed file is decompressed from its beginning."""
    with open(path, "rb") as file:
        if codec := compression(path):
            import pyarrow

            if not file.read(1):  # pyarrow reads no text from it
                raise UserError(f"{path} is empty, which no compressed file is. Get it again.")
            file.seek(0)
            stream = pyarrow.CompressedInputStream(pyarrow.PythonFile(file), codec)
            reader = io.BufferedReader(stream, READ_SIZE)
        else:
            file.seek(start)
            reader = file
        beginning = b"" if start else reader.peek(4)
        if _wide_encoding(beginning):  # without a byte order mark, UTF-16 can also be UTF-8 with control characters
            raise _not_utf8(path, beginning)
        yield reader


# -----------------------------------------------------------------------------
# Where a text can be cut

# GPT-2's pattern joins a space to the word after it, never to the one before. So a text that is cut between a word and a
# space has the same tokens if both sides are encoded separately.
_WORD_END = re.compile(
    rb"(?:[!-~]|[\xc2-\xf4][\x80-\xbf]+)(?=[ \n\r])"
)  # the last character may still be a Unicode space


def safe_cuts(content: bytes, separator: bytes) -> Iterator[int]:
    """Yields offsets in UTF-8 between a word and a space, never inside a separator or directly after one."""
    size = len(separator)
    for match in _WORD_END.finditer(content):
        cut = match.end()
        if match[0] > b"~" and match[0].decode(errors="replace").isspace():
            continue
        if separator:
            sides = content[max(0, cut - 2 * size) : cut], content[cut : cut + 2 * size]
            before, after = (re.sub(rb"\r\n?", b"\n", side) for side in sides)
            if separator in before[-size:] + after[: size - 1]:
                continue
        yield cut


def find_safe_cut(path: Path, offset: int, separator: bytes = b"") -> int:
    """Returns the first of a file's `safe_cuts` in the READ_SIZE bytes that follow an offset; 0 if there is none."""
    margin = 4 + 2 * len(separator)  # bytes on both sides that decide whether a cut is safe
    begin = max(0, offset - margin)
    with open(path, "rb") as file:
        file.seek(begin)
        window = file.read(margin + READ_SIZE)
    cuts = (begin + cut for cut in safe_cuts(window, separator) if cut <= len(window) - margin)
    return next((cut for cut in cuts if cut >= offset), 0)


def find_last_safe_cut(content: bytes, separator: bytes = b"") -> int:
    """Returns the last of `content`'s `safe_cuts`, as more text may follow; 0 if there is none."""
    margin = 4 + 2 * len(separator)
    for size in (128, 4096, len(content)):
        begin = max(0, len(content) - size)
        cuts = [cut for cut in safe_cuts(content[begin:], separator) if begin + cut <= len(content) - margin]
        if cuts and (begin == 0 or cuts[-1] >= margin):
            return begin + cuts[-1]
    return 0


# -----------------------------------------------------------------------------
# .txt, .jsonl and .parquet


def read_txt(path: Path, separator: str | None, start: int, stop: int | None) -> Iterator[Piece]:
    """Yields a .txt file in pieces, as one document or divided at `separator`. Line endings become \\n."""
    inside, left, rest = start > 0, (stop or sys.maxsize) - start, b""
    bom = b"" if inside else codecs.BOM_UTF8
    with _open_text(path, start) as file:
        while True:
            block = file.read(min(left, max(READ_SIZE, len(rest))))
            left -= len(block)
            content, bom = (rest + block).removeprefix(bom), b""
            cut = find_last_safe_cut(content, (separator or "").encode()) if block else len(content)
            rest = content[cut:]
            if cut or not block:
                text = content[:cut].decode().replace("\r\n", "\n").replace("\r", "\n")
                for number, document in enumerate(text.split(separator) if separator else [text]):
                    inside = inside and number == 0
                    if inside or (document.strip() if separator else document):  # an empty file is no document
                        yield document, not inside
                        inside = True
            if not block:
                return


def read_jsonl(path: Path, text_field: str, start: int, stop: int | None) -> Iterator[Piece]:
    """Yields the document in each line that starts in a range of bytes."""
    with _open_text(path, max(0, start - 1)) as lines:
        offset = start - 1 + len(lines.readline()) if start else 0
        for number, line in enumerate(lines):
            if stop is not None and offset >= stop:
                return
            if line.strip():
                try:
                    record = json.loads(line.rstrip())
                except UnicodeDecodeError as error:
                    raise _not_utf8(path, line, _line_in_file(path, start, number)) from error
                except (ValueError, RecursionError) as error:
                    where = _line_in_file(path, start, number)
                    raise UserError(f"{where} is not JSON ({error}). Fix or remove the line.") from error
                text = record.get(text_field) if isinstance(record, dict) else None
                if not isinstance(text, str):
                    raise _no_text(record, text_field, _line_in_file(path, start, number))
                yield text, True
            offset += len(line)


def _line_in_file(path: Path, start: int, number: int) -> str:
    """Names a line for a message: line `number`, counted from 0, of the lines that start at byte `start` or later."""
    with open(path, "rb") as lines:
        offsets = itertools.accumulate(map(len, lines), initial=0)
        lines_before = sum(1 for _ in itertools.takewhile(lambda offset: offset < start, offsets))
    return f"{path}, line {lines_before + number + 1}"


def _no_text(record: object, field: str, where: str) -> UserError:
    if isinstance(record, dict):
        found = ", ".join(f"{name} ({type(value).__name__})" for name, value in record.items())
        what = f"has no text in {field!r}, only {found or 'nothing'}"
    else:
        what = f"is a {type(record).__name__}, not an object with a text in {field!r}"
    return UserError(f"{where} {what}. Fix it, or choose another --text-field.")


def read_parquet(path: Path, text_field: str, start: int, stop: int | None) -> Iterator[Piece]:
    """Yields the document in each row of some row groups."""
    with _open_parquet(path) as file:
        columns = file.schema_arrow.names
        if (count := columns.count(text_field)) != 1:
            found = f"{count or 'no'} column{'s' * (count > 1)} {text_field!r}"
            raise UserError(f"{path} has {found}. Choose --text-field from {', '.join(columns)}.")
        rows = [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]
        text_bytes = sum(row_group_text_bytes(file, text_field)[start:stop])
        first_row, rows_at_once = sum(rows[:start]), max(1, READ_SIZE * sum(rows[start:stop]) // max(1, text_bytes))
        groups = [*range(len(rows))][start:stop]
        with _reading(f"{path}, from row {first_row},"):
            batches = file.iter_batches(rows_at_once, row_groups=groups, columns=[text_field], use_threads=False)
            texts = itertools.chain.from_iterable(batch.column(0).to_pylist() for batch in batches)
            for row, text in enumerate(texts, start=first_row):
                if not isinstance(text, str):
                    raise _no_text({text_field: text}, text_field, f"{path}, row {row}")
                yield text, True


def _open_parquet(path: Path) -> pyarrow.parquet.ParquetFile:
    """Opens a .parquet file so that pages are read as they are needed, rather than whole row groups."""
    import pyarrow.parquet

    return pyarrow.parquet.ParquetFile(path, buffer_size=READ_SIZE, pre_buffer=False)


def row_group_text_bytes(file: pyarrow.parquet.ParquetFile, text_field: str) -> list[int]:
    """Returns the uncompressed bytes of a column in each row group."""
    sizes = []
    for group in map(file.metadata.row_group, range(file.num_row_groups)):
        columns = map(group.column, range(group.num_columns))
        sizes.append(sum(c.total_uncompressed_size for c in columns if c.path_in_schema == text_field))
    return sizes
