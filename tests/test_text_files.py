"""Files of every kind: their documents, whatever parts they are read in, and what is wrong with them."""

import gzip
import json
import random
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest
from helpers import needs_gpt2_vocabulary
from shard_helpers import adversarial_texts, documents_of, plain_encoder, valid_unicode

from support.cli import UserError
from support.data import text_files
from support.data.text_files import TextFiles, find_input
from support.files import LOCK

LARGE = 1 << 20


def compress(text, codec):
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, codec) as stream:
        stream.write(text.encode())
    return sink.getvalue().to_pybytes()


def parts_of(monkeypatch, part_bytes, *paths, **options):
    """A corpus, and its parts of about so many bytes."""
    monkeypatch.setattr(text_files, "MIN_PART_BYTES", part_bytes)
    corpus = TextFiles(list(paths), **options)
    return corpus, corpus.parts()


@pytest.mark.parametrize("part_bytes, at_least", [(LARGE, 1), (2000, 5), (300, 40), (20, 150)])
def test_files_of_every_kind_have_their_documents_in_parts_of_any_size(tmp_path, monkeypatch, part_bytes, at_least):
    texts = [text.replace("\r", "") for text in valid_unicode(adversarial_texts(5, 70))]
    lines = ["".join(json.dumps({"text": t}) + "\n" for t in part) for part in (texts[:10], texts[10:20], texts[20:30])]
    (tmp_path / "a.jsonl").write_text("\n \n" + lines[0].rstrip("\n"))
    half = len(lines[1]) // 2  # two gzip members in a file, as appending to one makes them
    members = gzip.compress(lines[1][:half].encode()), gzip.compress(lines[1][half:].encode())
    (tmp_path / "b.jsonl.gz").write_bytes(b"".join(members))
    (tmp_path / "c.jsonl.zst").write_bytes(compress(lines[2], "zstd"))
    pa.parquet.write_table(pa.table({"text": texts[30:40], "n": range(10)}), tmp_path / "d.parquet", row_group_size=2)
    pa.parquet.write_table(pa.table({"n": range(10), "text": texts[40:50]}), tmp_path / "e.parquet")
    (tmp_path / "f.txt").write_bytes(b"\xef\xbb\xbf" + texts[50].encode())
    (tmp_path / "g.txt.gz").write_bytes(gzip.compress("é 日\r\n".encode() * 500))
    (tmp_path / "h.txt").write_text("")
    (tmp_path / "i.txt").write_bytes("é 日\r\n".encode() * 500)
    pa.parquet.write_table(pa.table({"text": pa.array([], pa.string())}), tmp_path / "j.parquet")
    paths = sorted(tmp_path.iterdir())
    corpus, parts = parts_of(monkeypatch, part_bytes, *paths)
    assert documents_of(corpus) == [*texts[:51], "é 日\n" * 500, "é 日\n" * 500]
    assert len(parts) >= at_least and parts == TextFiles(paths).parts()
    assert [part.files.start for part in parts] == sorted(part.files.start for part in parts)


@pytest.mark.parametrize("part_bytes", [1, 13, 14, 15, 28, 30])
def test_a_line_belongs_to_the_part_in_which_it_begins(tmp_path, monkeypatch, part_bytes):
    """Also if that is the first byte of a part: each line has 14."""
    (tmp_path / "a.jsonl").write_text("".join(f'{{"text": "{i}"}}\n' for i in range(9)))
    corpus, _ = parts_of(monkeypatch, part_bytes, tmp_path / "a.jsonl")
    assert documents_of(corpus) == [str(i) for i in range(9)]


def test_small_files_are_one_part(tmp_path, monkeypatch):
    for i in range(30):
        (tmp_path / f"{i:02}.txt").write_text("x" * 10)
    corpus, parts = parts_of(monkeypatch, 100, *sorted(tmp_path.iterdir()))
    assert [list(part.files) for part in parts] == [[*range(10)], [*range(10, 20)], [*range(20, 30)]]
    assert documents_of(corpus) == ["x" * 10] * 30


@pytest.mark.parametrize(
    "files, prefix",
    [
        (["my.notes/a.b.txt"], "a"),
        (["my.notes/a.txt", "my.notes/b.txt"], "my.notes"),
        (["my.notes/a.txt", "my.notes/deep/b.txt"], "my.notes"),
        (["my.notes/deep1/a.txt", "my.notes/deep2/b.txt"], "my.notes"),
    ],
)
def test_shards_have_the_name_of_the_file_or_of_the_folder_of_all_files(tmp_path, monkeypatch, files, prefix):
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    assert TextFiles([tmp_path / file for file in files]).prefix == prefix
    monkeypatch.chdir(tmp_path / "my.notes")
    assert TextFiles([Path(file).relative_to("my.notes") for file in files]).prefix == prefix


def test_a_large_corpus_has_larger_parts_not_more(tmp_path, monkeypatch):
    monkeypatch.setattr(text_files, "MAX_PARTS", 10)
    (tmp_path / "a.txt").write_text("some words " * 10_000)
    _, parts = parts_of(monkeypatch, 100, tmp_path / "a.txt")
    assert len(parts) == 10


# ---- where a text is cut


@needs_gpt2_vocabulary
@pytest.mark.parametrize("seed", range(2))
def test_a_safe_cut_changes_no_token(tmp_path, seed):
    """Neither in a text nor in the bytes of a file."""
    encode, _ = plain_encoder("gpt2")
    text = "".join(valid_unicode(adversarial_texts(seed, 20))).replace("\r", "")
    path = tmp_path / "a.txt"
    path.write_bytes(text.encode())
    inside = {text_files.find_safe_cut(path, offset) for offset in range(1, len(text.encode()), 20)} - {0}
    content = text.encode()
    last = {text_files.find_last_safe_cut(content[:end]) for end in range(1, len(content), 20)} - {0}
    assert len(last) > 30 and len(inside) > 30
    tokens = encode(text)
    for cut in {len(content[:cut].decode()) for cut in last | inside}:
        assert encode(text[:cut]) + encode(text[cut:]) == tokens, (text[cut - 9 : cut], text[cut : cut + 9])


def test_a_cut_in_a_file_is_the_first_one_from_an_offset_on(tmp_path, monkeypatch):
    monkeypatch.setattr(text_files, "READ_SIZE", 64 + 4)
    rng = random.Random(0)
    for _ in range(60):
        words = [
            rng.choice(("é", "日本", "x", "yz" * 30, "\u00a0", "\u2003a", "🙂")) + rng.choice((" ", "\n", "\r\n", "-"))
            for _ in range(30)
        ]
        content = "".join(words).encode()
        (tmp_path / "a.txt").write_bytes(content)
        ends = [
            len("".join(content.decode()[: i + 1]).encode())
            for i, (char, following) in enumerate(zip(content.decode(), content.decode()[1:], strict=False))
            if not char.isspace() and following in " \r\n"
        ]
        for offset in range(7, len(content), 7):
            expected = next((end for end in ends if offset <= end <= min(offset + 64, len(content) - 4)), 0)
            assert text_files.find_safe_cut(tmp_path / "a.txt", offset) == expected


SEPARATORS = ["\n\n", "b", "END OF DOC", "\n---\n", "a b", " ", "\n"]


@pytest.mark.parametrize("separator", SEPARATORS)
@pytest.mark.parametrize("part_bytes", [1, 30, 200, LARGE])
@pytest.mark.parametrize("line_end", ["\n", "\r\n", "\r"])
def test_a_text_file_is_cut_at_its_separator(tmp_path, monkeypatch, separator, part_bytes, line_end):
    monkeypatch.setattr(text_files, "READ_SIZE", 64)
    rng = random.Random(f"{separator} {part_bytes} {line_end}")
    pieces = [separator, "one", "two words  ", "\n", " \n ", "\n\n\n", "a long one, " * 20, "END OF", "é日 ", "---"]
    for _ in range(3):
        text = "".join(rng.choices(pieces, [9, *[2] * 9], k=60))
        (tmp_path / "a.txt").write_bytes(text.replace("\n", line_end).encode())
        expected = [document for document in text.split(separator) if document.strip()]
        corpus, parts = parts_of(monkeypatch, part_bytes, tmp_path / "a.txt", separator=separator)
        assert documents_of(corpus) == expected
        assert part_bytes == LARGE or len(parts) > 1


def test_a_separator_may_span_two_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr(text_files, "READ_SIZE", 40)
    for before in range(28, 43):
        (tmp_path / "a.txt").write_text("x" * before + "END OF DOC" + "two\r\n")
        assert documents_of(TextFiles([tmp_path / "a.txt"], separator="END OF DOC")) == ["x" * before, "two\n"]


def test_an_empty_file_is_no_document(tmp_path):
    for name, content in (("a", ""), ("b", "one\n"), ("c", "\ufeff"), ("d", " ")):
        (tmp_path / f"{name}.txt").write_text(content, encoding="utf-8")
    assert documents_of(TextFiles(sorted(tmp_path.iterdir()))) == ["one\n", " "]


# ---- bad files


@pytest.mark.parametrize("line", [1, 2, 31, 40])
@pytest.mark.parametrize("part_bytes", [1, 50, LARGE])
def test_a_bad_line_is_named_in_any_part(tmp_path, monkeypatch, line, part_bytes):
    lines = ['{"text": "fine"}'] * 40
    for bad, message in (
        ("{bad", f"line {line} is not JSON"),
        ('{"n": 1}', rf"line {line} has no text in 'text', only n"),
    ):
        lines[line - 1] = bad
        (tmp_path / "a.jsonl").write_text("\n".join(lines))
        corpus, _ = parts_of(monkeypatch, part_bytes, tmp_path / "a.jsonl")
        with pytest.raises(UserError, match=rf"a\.jsonl, {message}"):
            documents_of(corpus)


@pytest.mark.parametrize("name", ["a.txt.gz", "a.jsonl.zst"])
def test_a_compressed_file_without_a_byte_is_an_error(tmp_path, name):
    """As a failed download leaves it; a compressed empty file has 20 bytes."""
    (tmp_path / name).touch()
    corpus = TextFiles([tmp_path / name])
    with pytest.raises(UserError, match=f"{name} is empty, which no compressed file is. Get it again."):
        list(corpus.read(corpus.parts()[0]))


def test_a_corrupt_parquet_file_is_named_with_its_row(tmp_path, monkeypatch):
    texts = [f"{i} " * 500 for i in range(40)]
    path = tmp_path / "a.parquet"
    pa.parquet.write_table(pa.table({"text": texts}), path, row_group_size=10, compression="none", use_dictionary=False)
    content = bytearray(path.read_bytes())
    text_start = content.find(b"20 20 20")
    content[text_start - 40 : text_start] = b"\xff" * 40  # the page header of the third row group
    path.write_bytes(content)
    corpus, parts = parts_of(monkeypatch, 1, path)
    assert len(parts) == 4 and len(list(corpus.read(parts[1]))) == 10
    with pytest.raises(UserError, match=r"a\.parquet, from row 20, cannot be read"):
        list(corpus.read(parts[2]))


@pytest.mark.parametrize("harm", [lambda p: p.write_text("other"), lambda p: p.touch(), lambda p: p.unlink()])
def test_a_file_that_changes_while_it_is_read_is_noticed(tmp_path, harm):
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n' * 9)
    corpus = TextFiles([tmp_path / "a.jsonl"])
    pieces = corpus.read(corpus.parts()[0])
    next(pieces)
    harm(tmp_path / "a.jsonl")
    with pytest.raises(UserError, match=r"a\.jsonl (changed while it was read|cannot be read)"):
        list(pieces)


def test_a_file_that_vanishes_is_named(tmp_path):
    with pytest.raises(UserError, match=r"a\.txt cannot be read \(No such file or directory\)"):
        TextFiles([tmp_path / "a.txt"])


# ---- which files


def test_which_files_of_a_folder_are_text(tmp_path):
    for folder in ("deep/er", "run", "linked", "other"):
        (tmp_path / folder).mkdir(parents=True)
    names = "a.txt b.JSONL c.parquet deep/d.txt.gz deep/er/e.jsonl.zst other/f.txt".split()
    others = f"x.csv x.parquet.gz x.gz deep/noext run/{LOCK} run/log.txt run/model_1/x.txt other/.lock".split()
    for name in (*names, *others):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "linked" / "loop").symlink_to(tmp_path)
    found, skipped, other = text_files.find_text_files(tmp_path)
    assert skipped == [tmp_path / "run/log.txt", tmp_path / "run/model_1/x.txt"]
    assert [str(path.relative_to(tmp_path)) for path in found] == names
    assert [str(path.relative_to(tmp_path)) for path in other] == ["deep/noext", "x.csv", "x.gz", "x.parquet.gz"]
    assert [text_files.text_suffix(path) for path in found] == [".txt", ".jsonl", ".parquet", ".txt", ".jsonl", ".txt"]


def test_names_that_begin_with_a_dot_are_no_text_unless_they_are_named(tmp_path, monkeypatch):
    """Editors and file systems keep copies of a text under such names: one could become the validation split."""
    monkeypatch.chdir(tmp_path)
    hidden = "t/.ipynb_checkpoints/a-checkpoint.txt t/._b.txt t/.cache/deep/c.jsonl t/d/.e.parquet".split()
    for name in ("t/a.txt", "t/d/b.txt", *hidden, "t/.cache/x.csv", "t/.lock"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(name)
    Path("t/linked").symlink_to(".cache")  # a name without a dot, for a folder with one
    visible = [Path("t/a.txt"), Path("t/d/b.txt"), Path("t/linked/deep/c.jsonl")]
    said = list[str]()
    assert find_input(["t", "t/d"], said.append) == find_input(["t/**/*.*[!v]"]) == visible
    why = "(names that begin with a dot, and files of runs, shards and models)"
    assert said == [
        f"skipped 4 files, such as t/._b.txt {why}",
        "skipped t/linked/x.csv (not .txt, .jsonl or .parquet)",
    ]
    assert find_input([*hidden, "t/.cache"], said.append) == [Path(name) for name in hidden]
    assert said[2:] == ["skipped t/.cache/x.csv (not .txt, .jsonl or .parquet)"]
    Path("only").mkdir()
    Path("only/.a.txt").write_text("a")
    with pytest.raises(UserError, match=rf"no text in only: skipped only/.a.txt {re.escape(why)}\. Give"):
        find_input(["only"])


def test_the_log_of_a_run_is_no_text_unless_it_is_named(tmp_path, monkeypatch):
    """With --out ., the run's files are beside the text."""
    monkeypatch.chdir(tmp_path)
    text = [Path("a.txt"), Path("log.txt"), Path("starts.jsonl")]
    for path in text[:2]:
        path.write_text("A text.")
    assert find_input(["."]) == find_input(["*.*"]) == text[:2]  # there is no run: these are texts with such names
    text[2].write_text("{}")  # a copy of a run has no lock file, which is hidden
    said = list[str]()
    named = [path.name for path in text]  # by the shell, from a pattern
    assert all(find_input(words, said.append) == text[:1] for words in (["."], ["*.*"], named))
    note = "skipped 2 files, such as log.txt (names that begin with a dot, and files of runs, shards and models)"
    assert said == [note] * 3
    assert find_input(["log.txt"]) == text[1:2]


def test_the_merges_of_a_model_are_no_text(tmp_path):
    """Of a model that was downloaded beside the text."""
    (tmp_path / "model").mkdir()
    for name in ("a.txt", "merges.txt", "model/merges.txt", "model/vocab.json"):
        (tmp_path / name).write_text(name)
    assert find_input([str(tmp_path)]) == [tmp_path / "a.txt", tmp_path / "merges.txt"]


def test_a_compressed_copy_of_a_file_is_skipped(tmp_path, monkeypatch):
    """As gzip -k and zstd leave them; the copy would be the validation split."""
    monkeypatch.chdir(tmp_path)
    for name in ("a.txt", "a.txt.gz", "a.txt.zst", "b.txt.gz", "b.txt.zst", "c.gz"):
        Path(name).write_text(name)
    said = list[str]()
    assert (
        find_input(["."], said.append) == find_input(["b.txt.gz", "a.txt"])[::-1] == [Path("a.txt"), Path("b.txt.gz")]
    )
    assert find_input([str(tmp_path / "a.txt.gz"), "a.txt"]) == [Path("a.txt")]  # one by an absolute path
    assert said[0] == "skipped 3 files, such as a.txt.gz (compressed copies of other files)"


def test_compressed_files_are_told_apart_by_the_names_of_their_links(tmp_path):
    (tmp_path / "in").mkdir()
    for number, name in enumerate("bc"):
        (tmp_path / f"part.{number}").write_bytes(gzip.compress(name.encode()))
        (tmp_path / "in" / f"{name}.txt.gz").symlink_to(tmp_path / f"part.{number}")
    assert [path.name for path in find_input([str(tmp_path / "in")])] == ["b.txt.gz", "c.txt.gz"]


def test_a_folder_that_is_reached_twice_has_its_own_name(tmp_path):
    """Whatever the order in which the disk lists them, or two disks would give a text in two orders."""
    for year in ("2023", "2024", "2025"):
        (tmp_path / "t" / year).mkdir(parents=True)
        (tmp_path / "t" / year / "f.txt").write_text(year)
    (tmp_path / "t" / "0_latest").symlink_to("2024")
    assert [path.parent.name for path in find_input([str(tmp_path / "t")])] == ["2023", "2024", "2025"]


def test_a_file_that_is_named_twice_is_read_once(tmp_path, monkeypatch):
    """Otherwise its copy would be the validation split."""
    (tmp_path / "notes").mkdir()
    for name in ("a.txt", "b.txt"):
        (tmp_path / "notes" / name).write_text(name)
    (tmp_path / "link.txt").symlink_to("notes/a.txt")
    monkeypatch.chdir(tmp_path)
    found = find_input(["notes/b.txt", "notes/../notes", "link.txt", "notes/*.txt"])
    assert found == [Path("notes/b.txt"), Path("notes/../notes/a.txt")]


def test_names_become_safe_in_file_names():
    names = ("a/b: c", "../x.", "", "日本" * 30)
    assert [text_files.slug(name) for name in names] == ["a_b__c", "x", "text", "日本" * 10]
