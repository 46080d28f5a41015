"""Text corpora, read in batches that a worker process can encode on its own.

A batch starts at a cursor, which is JSON-serializable. From the cursor of any batch on, a corpus gives the same
documents as when it is read from the beginning, so a cursor in a manifest is enough to resume.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, cast

from support.data.shards import Setting

BATCH_CHARS = 1 << 21  # characters of a batch, or bytes where they are not decoded yet: one message to a worker

# Numbers, such as file and offset. A streamed data set also has the state of its library in it.
Cursor: TypeAlias = Sequence[int | Mapping[str, object] | None]


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Consecutive documents, possibly not read yet.

    Attributes:
        texts: returns them. It can be pickled: the worker that encodes the batch calls it.
        cursor: where they start.
        where: the same in words, for an error message.
        fraction_read: the fraction of the corpus up to the end of the batch, None if unknown.
        continues: the first text continues the last document of the batch before.
    """

    texts: Callable[[], list[str]]
    cursor: Cursor
    where: str
    fraction_read: float | None = None
    continues: bool = False


class Corpus:
    """Documents in a fixed order.

    Attributes:
        name, revision, settings: identify the corpus in a manifest.
        prefix: start of the file names of its shards.
    """

    name: str
    revision: str | None = None
    prefix: str
    settings: Mapping[str, Setting] = {}

    def batches(self, cursor: Cursor | None = None) -> Iterator[Batch]:
        """All documents from a cursor on, or from the beginning."""
        raise NotImplementedError

    def release(self, cursor: Cursor) -> None:
        """Called when nothing before this cursor is needed again, not even after a crash."""

    def close(self) -> None:
        """Called when all shards are written."""

    def has_changed(self) -> bool:
        """Whether its files changed since it was opened."""
        return False

    def estimate_text_bytes(self) -> float:
        """A low estimate of the bytes of text, 0 if unknown."""
        return 0


def slug(name: str) -> str:
    """A name made safe for use in a file name."""
    safe = "".join(c if c.isalnum() or c in "-." else "_" for c in name).strip("._")
    return safe.encode()[:60].decode(errors="ignore") or "text"


# -----------------------------------------------------------------------------
# Long documents, cut into pieces

_WORD_END = re.compile(r"\S(?=[ \n])")  # Python's \S excludes all that GPT-2's \s matches, and more


def safe_cut(text: str, start: int, limit: int) -> int:
    """Where to cut `text[start:]` so that both sides, encoded separately, give the same tokens as the uncut text.

    That is between a word and a space: GPT-2's pattern joins a space to the word after it, never to the one before.
    Returns the last such offset up to `limit`, or `start` if there is none.
    """
    window = 4096
    while True:
        begin = max(start, limit - window)
        ends = [match.end() for match in _WORD_END.finditer(text, begin, limit + 1)]
        if ends or begin == start:
            return ends[-1] if ends else start
        window *= 8


def piece_end(text: str, start: int, limit: int) -> int:
    """Where the piece that starts at `start` ends: after BATCH_CHARS at most, or at the first space after that.

    Returns `start` if there is no space up to `limit`.
    """
    end = safe_cut(text, start, start + BATCH_CHARS)
    if end == start and (match := _WORD_END.search(text, start + BATCH_CHARS, limit + 1)):
        return match.end()
    return end


def split_long_document(text: str) -> Iterator[tuple[int, str]]:
    """Pieces of a document that fit into a batch, each with its offset in characters."""
    start = 0
    while len(text) - start > BATCH_CHARS and (end := piece_end(text, start, len(text))) > start:
        yield start, text[start:end]
        start = end
    yield start, text[start:]


# -----------------------------------------------------------------------------
# Documents that are in memory


@dataclass(frozen=True)
class Piece:
    """A document, or a part of a long one."""

    cursor: Cursor
    text: str
    continues: bool  # the document of the piece before
    fraction_read: float | None = None


def pack_pieces(parts: Iterable[Piece | Batch], source: str) -> Iterator[Batch]:
    """Batches of pieces, between those that are batches already. A piece that continues a document starts a batch."""
    packed: list[Piece] = []
    chars = 0
    for part in itertools.chain(parts, [None]):  # None is the end
        if packed and (not isinstance(part, Piece) or part.continues or chars >= BATCH_CHARS):
            yield Batch(
                texts=functools.partial(list, [piece.text for piece in packed]),
                cursor=packed[0].cursor,
                where=f"{source}, from {packed[0].cursor}",
                fraction_read=packed[-1].fraction_read,
                continues=packed[0].continues,
            )
            packed, chars = [], 0
        if isinstance(part, Piece):
            packed.append(part)
            chars += len(part.text)
        elif part is not None:
            yield part


class Documents(Corpus):
    """Documents that a function returns, the same ones at every call."""

    def __init__(
        self, name: str, documents: Callable[[], Iterable[str]], revision: str | None = None, prefix: str | None = None
    ):
        self.name, self.revision, self.prefix = name, revision, prefix or slug(name)
        self._documents = documents

    def batches(self, cursor: Cursor | None = None) -> Iterator[Batch]:
        start = cast(list[int], cursor or [0, 0])
        pieces = (
            Piece([number, offset], text, continues=offset > 0)
            for number, document in enumerate(self._documents())
            for offset, text in split_long_document(document)
            if [number, offset] >= start
        )
        return pack_pieces(pieces, self.name)
