"""Files of every kind: what is read from them, from which cursor on, and what is wrong with them."""

import gzip
import json

import pyarrow as pa
import pyarrow.parquet
import pytest
from shard_helpers import adversarial_texts, documents_of, set_batch_chars, valid_unicode

from support.cli import UserError
from support.data import readers
from support.data.readers import Files


def compress(text, codec):
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, codec) as stream:
        stream.write(text.encode())
    return sink.getvalue().to_pybytes()


@pytest.fixture
def files_of_every_kind(tmp_path, monkeypatch):
    """The paths of files, and the documents in them; batches are small."""
    set_batch_chars(monkeypatch, 300)
    monkeypatch.setattr(readers, "MAX_ROW_GROUP_BYTES", 1000)
    texts = [text.replace("\r", "") for text in valid_unicode(adversarial_texts(5, 70))]
    lines = ["".join(json.dumps({"text": t}) + "\n" for t in part) for part in (texts[:10], texts[10:20], texts[20:30])]
    (tmp_path / "a.jsonl").write_text(lines[0])
    half = len(lines[1]) // 2  # two gzip members in a file, as appending to one makes them
    members = gzip.compress(lines[1][:half].encode()), gzip.compress(lines[1][half:].encode())
    (tmp_path / "b.jsonl.gz").write_bytes(b"".join(members))
    (tmp_path / "c.jsonl.zst").write_bytes(compress(lines[2], "zstd"))
    pa.parquet.write_table(pa.table({"text": texts[30:40], "n": range(10)}), tmp_path / "d.parquet", row_group_size=2)
    pa.parquet.write_table(pa.table({"n": range(10), "text": texts[40:50]}), tmp_path / "e.parquet")
    (tmp_path / "f.txt").write_bytes(b"\xef\xbb\xbf" + texts[50].encode())
    (tmp_path / "g.txt.gz").write_bytes(gzip.compress("é 日\r\n".encode() * 500))
    (tmp_path / "h.txt").write_text("")
    return sorted(tmp_path.iterdir()), [*texts[:51], "é 日\n" * 500, ""]


def test_every_kind_of_file_can_be_read_from_every_cursor(files_of_every_kind, monkeypatch):
    paths, documents = files_of_every_kind
    files = Files("files", paths, "text")
    batches = list(files.batches())
    assert documents_of(batches) == documents
    assert len(batches) > 40 and any(batch.continues for batch in batches)
    fractions = [batch.fraction_read for batch in batches]
    assert fractions == sorted(fractions) and fractions[-1] == pytest.approx(1)
    for i, batch in enumerate(batches):
        rest = list(files.batches(json.loads(json.dumps(batch.cursor))))
        assert [(b.cursor, b.continues, b.texts()) for b in rest] == [
            (b.cursor, b.continues, b.texts()) for b in batches[i:]
        ]
    monkeypatch.setattr(readers, "MAX_ROW_GROUP_BYTES", 1 << 30)  # as a later version may have it
    for i, batch in enumerate(batches):
        assert documents_of(files.batches(batch.cursor)) == documents_of(batches[i:])


@pytest.mark.parametrize("separator", ["\n\n", "b", "END OF DOC"])
@pytest.mark.parametrize("batch_chars", [2, 30, 10**6])
def test_a_text_file_is_cut_at_its_separator(tmp_path, monkeypatch, separator, batch_chars):
    set_batch_chars(monkeypatch, batch_chars)
    long_document = "a long one, " * 20
    text = f"one{separator}two words  \n{separator}{separator} \n {separator}{long_document}{separator}end\n"
    (tmp_path / "a.txt").write_text(text)
    expected = [part for part in text.split(separator) if part.strip()]
    assert documents_of(Files("a", [tmp_path / "a.txt"], "text", separator=separator).batches()) == expected


def test_a_separator_may_span_two_blocks(tmp_path, monkeypatch):
    set_batch_chars(monkeypatch, 10)
    monkeypatch.setattr(readers, "READ_SIZE", 40)
    for before in range(28, 43):
        (tmp_path / "a.txt").write_text("x" * before + "END OF DOC" + "two\r\n")
        batches = Files("a", [tmp_path / "a.txt"], "text", separator="END OF DOC").batches()
        assert documents_of(batches) == ["x" * before, "two\n"]


def test_a_bad_line_is_named_in_any_batch(tmp_path, monkeypatch):
    set_batch_chars(monkeypatch, 40)
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n' * 30 + "{bad\n" + '{"text": "fine"}\n' * 9)
    with pytest.raises(UserError, match=r"a\.jsonl, line 31 is not JSON"):
        documents_of(Files("a", [tmp_path / "a.jsonl"], "text").batches())


@pytest.mark.parametrize("max_row_group_bytes", [100, 1 << 30])  # read here in parts, or by workers
def test_a_corrupt_parquet_file_is_named_with_its_row(tmp_path, monkeypatch, max_row_group_bytes):
    monkeypatch.setattr(readers, "MAX_ROW_GROUP_BYTES", max_row_group_bytes)
    texts = [f"{i} " * 500 for i in range(40)]
    path = tmp_path / "a.parquet"
    pa.parquet.write_table(pa.table({"text": texts}), path, row_group_size=10, compression="none", use_dictionary=False)
    content = bytearray(path.read_bytes())
    text_start = content.find(b"20 20 20")
    content[text_start - 40 : text_start] = b"\xff" * 40  # the page header of the third row group
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"a\.parquet, from row 20, cannot be read"):
        documents_of(Files("a", [path], "text").batches())


def test_which_files_of_a_folder_are_text(tmp_path):
    for folder in ("deep/er", "run", "linked"):
        (tmp_path / folder).mkdir(parents=True)
    names = "a.txt b.JSONL c.parquet deep/d.txt.gz deep/er/e.jsonl.zst".split()
    for name in (*names, *"x.csv x.parquet.gz x.gz deep/noext run/.lock run/log.txt".split()):
        (tmp_path / name).touch()
    (tmp_path / "linked" / "loop").symlink_to(tmp_path)
    found = readers.find_text_files(tmp_path)
    assert [str(path.relative_to(tmp_path)) for path in found] == names
    assert [readers.text_suffix(path) for path in found] == [".txt", ".jsonl", ".parquet", ".txt", ".jsonl"]
