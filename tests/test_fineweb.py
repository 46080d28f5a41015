"""fineweb.py as a user runs it: its sources, its flags, its errors, and the same command again."""

import errno
import gzip
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from helpers import run_script
from shard_helpers import files_in, flip_bit, plain_bytes, plain_loop, shards_in, tokens_in
from training import trained

import fineweb
from support.cli import UserError, run_cli
from support.data import make_shards, shards, text_files
from support.data.tokenizer import get_tokenizer

# ---- sources


def test_files_of_every_kind_are_one_corpus(tmp_path):
    (tmp_path / "a.txt").write_text("first é", encoding="utf-8")
    (tmp_path / "b.jsonl").write_text('{"body": "second", "n": 1}\n\n{"body": "third"}\n', encoding="utf-8")
    pa.parquet.write_table(pa.table({"body": ["fourth", "fifth"], "n": [1, 2]}), tmp_path / "c.parquet")
    done = run_script(
        "fineweb.py", "--input", "a.txt", "*.jsonl", tmp_path / "c.parquet", "--text-field", "body",
        "--tokenizer", "bytes", "--output", "out", "--shard-size", "8", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    texts = ["first é", "second", "third", "fourth", "fifth"]
    assert tokens_in(tmp_path / "out") == plain_loop(texts, plain_bytes, 256, 8)
    assert done.stdout.splitlines()[-1] == "out: 35 tokens (bytes), documents: 5, shards: 5"
    assert {p.name.removeprefix(tmp_path.name) for p in (tmp_path / "out").glob("*.npy")} == {
        "_val_000000.npy",
        *(f"_train_{i:06d}.npy" for i in range(1, 5)),
    }


def test_shards_are_not_written_among_texts_that_a_second_command_would_skip(tmp_path, monkeypatch):
    """It skips them in any folder of shards below the one that it reads; files that are named are read again."""
    monkeypatch.chdir(tmp_path)
    Path("texts/books").mkdir(parents=True)
    for name in ("texts/b.txt", "texts/books/a.txt"):
        Path(name).write_text(name)
    with pytest.raises(UserError, match="texts/books has texts of --input, such as texts/books/a.txt. Use another"):
        fineweb.main(["--input", "texts", "--output", "texts/books", "--tokenizer", "bytes"])
    assert sorted(os.listdir("texts/books")) == ["a.txt"]
    for source, output in (("texts", "texts/shards"), ("texts/books", "texts/books"), ("texts/b.txt", "texts")):
        for _ in range(2):
            fineweb.main(["--input", source, "--output", output, "--tokenizer", "bytes"])


def test_a_separator_is_named_on_the_command_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("one\ntwo\n\nthree\n\n\n\nfour")
    flags = ["--input", "a.txt", "--output", "out", "--tokenizer", "bytes", "--document-separator", "\\n\r\n"]
    fineweb.main([*flags, "--shard-size", "9"])
    assert tokens_in("out") == plain_loop(["one\ntwo", "three", "four"], plain_bytes, 256, 9)
    with pytest.raises(UserError, match="a different source or setting"):
        fineweb.main([*flags[:-2], "--shard-size", "9"])


@pytest.mark.parametrize(
    "separator, documents", [("\\n---\\n", 2), ("\\r\\n---\\r\\n", 2), ("\\t", 2), ("\t", 2), ("===", 1)]
)
def test_a_separator_has_escapes_and_is_named_if_it_is_nowhere(tmp_path, monkeypatch, capsys, separator, documents):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("one\n---\ntwo\tthree")
    flags = ["--input", "a.txt", "--output", "out", "--tokenizer", "bytes"]
    fineweb.main([*flags, f"--document-separator={separator}"])
    out = capsys.readouterr().out
    assert f"documents: {documents}," in out and ("Check --document-separator" in out) == (documents == 1)


@pytest.mark.slow
def test_the_demo_text(tmp_path):
    done = run_script("fineweb.py", "--demo", "--tokenizer", "bytes", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "demo_data"
    manifest = shards.read_manifest(folder)
    tokens = {split: sum(s["tokens"] for s in manifest["shards"] if s["split"] == split) for split in ("train", "val")}
    assert 6e6 < sum(tokens.values()) < 14e6 and 0.08 < tokens["val"] / sum(tokens.values()) < 0.12
    train = get_tokenizer("bytes").decode(np.load(next(folder.glob("*_train_*.npy"))).tolist())
    assert 1500 < train.count("<|endoftext|>") < 4000
    assert " the " in train and ":class:`torch." in train and "\ufffd" not in train


# ---- the command line


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--input nothing.txt --output out", "no file matches nothing.txt"),
        ("--input empty --output out", "there is no text in empty. Give files or folders of"),
        ("--input book.pdf --output out", "book.pdf is not a file of type .txt, .jsonl, .parquet"),
        (
            "--input latin.txt --output out",
            "latin.txt is not UTF-8 text. If it is CP1252 (Western languages; others are in CP1251, KOI8-R, GB18030, SHIFT_JIS, ...), convert it: iconv -f CP1252 -t UTF-8 latin.txt > NEW",
        ),
        ("--input l&m.jsonl --output out", "l&m.jsonl, line 2 is not UTF-8 text."),
        ("--input l&m.jsonl --output out", "convert it: iconv -f CP1252 -t UTF-8 'l&m.jsonl' > NEW"),
        ("--input utf16.txt --output out", "If it is UTF-16, convert it: iconv -f UTF-16 -t UTF-8 utf16.txt > NEW"),
        (
            "--input utf16le.txt --output out",
            "utf16le.txt is not UTF-8 text. If it is UTF-16LE, convert it: iconv -f UTF-16LE",
        ),
        ("--input russian.txt --output out", "If it is UTF-16LE, convert it"),
        ("--input utf32.txt --output out", "If it is UTF-32, convert it"),
        ("--input utf16be.jsonl --output out", "utf16be.jsonl is not UTF-8 text. If it is UTF-16BE, convert it"),
        (
            "--input list.jsonl --output out",
            "list.jsonl, line 1 is a list, not an object with a text in 'text'. Fix it,",
        ),
        ("--input bad.jsonl --output out", "bad.jsonl, line 2 is not JSON"),
        ("--input deep.jsonl --output out", "deep.jsonl, line 1 is not JSON"),
        ("--input other.jsonl --output out", "other.jsonl, line 1 has no text in 'text', only body (str)"),
        ("--input fake.parquet --output out", "fake.parquet cannot be read"),
        ("--input null.parquet --output out", "null.parquet, row 1 has no text in 'text', only text (NoneType)"),
        ("--input empty.jsonl --output out --tokenizer bpe", "there is no text in empty.jsonl"),
        ("--input a.txt", "no folder for the shards. Pass one with --output."),
        ("--input a.txt --demo", "--input and --demo are mutually exclusive. Choose one."),
        ("--input a.txt --output out --val-fraction 1.5", "--val-fraction must be more than 0 and less than 1"),
        ("--input a.txt --output out --shard-size 0", "--shard-size is 0. It must be 2 or more"),
        ("--input a.txt --output a.txt", "cannot write to a.txt"),
        ("--dataset no/such --output out", "cannot open the data set no/such"),
        ("--input cut.jsonl.gz --output out", "cut.jsonl.gz cannot be read"),
        ("--input null.parquet --text-field body --output out", "no column 'body'. Choose --text-field from text"),
        ("--demo --document-separator x", "--document-separator has no effect with --demo. Leave it out."),
        ("--demo --text-field x", "--text-field has no effect with --demo. Leave it out."),
        ("--input a.txt --output out --split train", "--split has no effect with --input. Leave it out."),
        ("--check out --max-tokens 5", "--max-tokens has no effect with --check. Leave it out."),
        ("--input other.jsonl --output out --document-separator x", "divides .txt files, and there is none. Leave it"),
        (
            "--input twice.parquet --output out",
            "twice.parquet has 2 columns 'text'. Choose --text-field from text, text",
        ),
        ("--input a.txt --output out --shard-size 1e12", "It must be 1000000000 or less"),
        ("--demo --name x", "--name has no effect with --demo"),
        ("--input a.txt --output out --revision x", "--revision has no effect with --input"),
        (
            "--input a.txt --output out --only-parts 3/2",
            "--only-parts is '3/2'. It must be K/N, such as 3/8, with K from 1",
        ),
        ("--input a.txt --output out --only-parts x", "--only-parts is 'x'. It must be K/N"),
        ("--input a.txt --output out --executor ray --only-parts 1/2", "Leave out --only-parts"),
        ("--input a.txt --output out --tasks 3", "--tasks and --executor-options are for --executor"),
        ("--input a.txt --output out --vocab-size 300", "--vocab-size is for --tokenizer bpe."),
        ("--input a.txt --output out --tokenizer-from x --tokenizer bytes", "--tokenizer-from is for --tokenizer bpe."),
        ("--demo --tokenizer bpe --tokenizer-from x --vocab-size 300", "--tokenizer-from brings its own vocabulary"),
        (
            "--demo --tokenizer bpe --tokenizer-from empty --output out",
            "empty is not a checkpoint: it has no config.json.",
        ),
        ("--demo --tokenizer bpe --vocab-size 257", "--vocab-size is 257. It must be 258 or more."),
        ("--dataset a.txt --output out", "a.txt is a path on this machine. Pass it with --input"),
        ("--dataset empty --output out", "empty is a path on this machine. Pass it with --input"),
        ("--input a.txt --output out --max-tokens 1.5", "--max-tokens is '1.5'. It must be a whole number"),
        (
            "--input a.txt link.txt --output out",
            "nowhere.txt, which does not exist. Restore that file, or remove the link.",
        ),
        ("--input a.txt fifo.txt --output out", "fifo.txt is a pipe or a device. Use a file, or leave it out."),
        ("--input broken --output out", "error: broken/deep/b.txt points to /"),
    ],
)
def test_bad_input(tmp_path, monkeypatch, capsys, flags, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("hello " * 100)
    (tmp_path / "book.pdf").write_text("%PDF")
    (tmp_path / "latin.txt").write_bytes("naïve".encode("latin-1"))
    (tmp_path / "l&m.jsonl").write_bytes('{"text": "fine"}\n{"text": "naïve"}\n'.encode("latin-1"))
    (tmp_path / "utf16.txt").write_bytes("naïve".encode("utf-16"))
    (tmp_path / "bad.jsonl").write_text('{"text": "fine"}\n{"text": \n')
    (tmp_path / "utf16le.txt").write_bytes("hello".encode("utf-16-le"))
    (tmp_path / "utf16be.jsonl").write_bytes('{"text": "fine"}\n{"text": "fine"}\n'.encode("utf-16-be"))
    (tmp_path / "russian.txt").write_bytes("привет всем\n".encode("utf-16-le"))  # also valid UTF-8
    (tmp_path / "utf32.txt").write_bytes("hello".encode("utf-32"))
    (tmp_path / "list.jsonl").write_text('["hello"]\n')
    (tmp_path / "other.jsonl").write_text('{"body": "x"}\n')
    (tmp_path / "deep.jsonl").write_text("[" * 100000)
    (tmp_path / "fake.parquet").write_text("PAR1")
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "empty").mkdir()
    (tmp_path / "link.txt").symlink_to("nowhere.txt")
    (tmp_path / "broken" / "deep").mkdir(parents=True)
    (tmp_path / "broken" / "a.txt").write_text("hello " * 100)
    (tmp_path / "broken" / "deep" / "b.txt").symlink_to("nowhere.txt")
    os.mkfifo(tmp_path / "fifo.txt")
    pa.parquet.write_table(pa.table({"text": ["fine", None]}), tmp_path / "null.parquet")
    pa.parquet.write_table(pa.table([["a"], ["b"]], names=["text", "text"]), tmp_path / "twice.parquet")
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(b'{"text": "x"}\n' * 999)[:-20])
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    argv = flags.split() + ([] if "--tokenizer" in flags else ["--tokenizer", "bytes"])
    with pytest.raises(SystemExit) as exit:
        run_cli(lambda: fineweb.main(argv))
    captured = capsys.readouterr()
    assert exit.value.code == 2
    assert captured.err.startswith("error: ") and message in captured.err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("flags", ["--shard-size 1 --workers 0", "--demo --name x --val-fraction 2"])
def test_all_bad_flags_are_reported(flags):
    with pytest.raises(UserError) as error:
        fineweb.parse_arguments(flags.split())
    assert len(error.value.problems) == 2


def test_numbers_as_people_write_them():
    for text, number in (("1e9", 10**9), ("10_000_000", 10**7), ("12", 12), ("2.5e3", 2500)):
        assert fineweb.parse_arguments(["--max-tokens", text]).max_tokens == number


# ---- the same command again


def test_an_edited_file_is_another_source_and_a_failure_leaves_the_folder_free(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    flags = ["--tokenizer", "bytes", "--output", "out", "--input"]
    (tmp_path / "bad.jsonl").write_text('{"text": 1}')
    (tmp_path / "a.jsonl").write_text('{"text": "long enough", "title": "short"}\n')
    with pytest.raises(UserError, match=r"bad\.jsonl, line 1 has no text in 'text', only text \(int\)"):
        fineweb.main([*flags, "a.jsonl", "bad.jsonl"])
    fineweb.main([*flags, "a.jsonl"])
    fineweb.main([*flags, "a.jsonl"])
    assert "nothing to do: these shards exist already" in capsys.readouterr().out
    before = shards_in(tmp_path / "out")
    with pytest.raises(UserError, match="has shards from a different source or setting"):
        fineweb.main([*flags, "a.jsonl", "--text-field", "title"])
    stat = (tmp_path / "a.jsonl").stat()
    (tmp_path / "a.jsonl").write_text('{"text": "LONG ENOUGH", "title": "short"}\n')  # of the same size
    assert stat.st_size == (tmp_path / "a.jsonl").stat().st_size
    with pytest.raises(UserError, match="has shards from a different source or setting"):
        fineweb.main([*flags, "a.jsonl"])
    assert shards_in(tmp_path / "out") == before


def test_several_commands_share_the_parts(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(text_files, "MIN_PART_BYTES", 100)
    (tmp_path / "a.txt").write_text("some words " * 100)
    flags = "--input a.txt --tokenizer bytes --shard-size 300 --output".split()
    fineweb.main([*flags, "one"])
    for share in ("2/2", "1/2"):
        fineweb.main([*flags, "out", "--only-parts", share])
    assert capsys.readouterr().out.count("part ") == 11
    monkeypatch.setattr(make_shards, "encode_pieces", None)  # nothing is left to encode
    fineweb.main([*flags, "out"])
    assert files_in(tmp_path / "out") == files_in(tmp_path / "one")


def test_after_ctrl_c_the_same_command_resumes(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("some words " * 100)
    write, flags = make_shards.write_tokens, "--input a.txt --output out --tokenizer bytes --shard-size 100".split()

    def interrupt_third(path, *args, **more):
        if path.name.endswith("_000002.npy"):
            raise KeyboardInterrupt
        return write(path, *args, **more)

    with monkeypatch.context() as patch, pytest.raises(SystemExit) as exit:
        patch.setattr(make_shards, "write_tokens", interrupt_third)
        run_cli(lambda: fineweb.main(flags))
    assert exit.value.code == 130 and capsys.readouterr().err == "\ninterrupted\n"
    fineweb.main(flags)
    assert "resuming after 2 finished shards, 200 tokens" in capsys.readouterr().out
    assert tokens_in("out") == plain_loop(["some words " * 100], plain_bytes, 256, 100)


def test_a_closed_reader_is_no_error_of_the_disk(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("some words " * 100)

    def write(*args, **options):
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    monkeypatch.setattr("tqdm.tqdm.write", write)
    with pytest.raises(SystemExit) as exit:
        run_cli(lambda: fineweb.main("--input a.txt --output out --tokenizer bytes --shard-size 100".split()))
    assert exit.value.code == 1 and not capsys.readouterr().err


# ---- --check


def test_check_reads_all_shards(byte_shards, tmp_path, capsys):
    folder = tmp_path / "data"
    shutil.copytree(byte_shards, folder)
    shard, val = sorted(folder.glob("*_train_*.npy"))[0], next(folder.glob("*_val_*.npy"))
    fineweb.main(["--check", str(folder)])
    tokens = sum(len(np.load(path)) for path in folder.glob("*.npy"))
    assert f"{tokens:,} tokens (bytes), all match the manifest" in capsys.readouterr().out
    flip_bit(shard)
    val.write_bytes(val.read_bytes()[:-2])
    with pytest.raises(UserError) as error:
        fineweb.main(["--check", str(folder)])
    assert len(error.value.problems) == 2
    assert f"{shard} was altered (wrong checksum)" in "\n".join(error.value.problems)
    assert f"{val} is not a readable .npy file" in "\n".join(error.value.problems)
    with pytest.raises(UserError, match="there is no folder"):
        fineweb.main(["--check", str(folder / "nowhere")])


def test_check_does_not_say_more_than_it_has_compared(byte_shards, tmp_path, capsys):
    folder = tmp_path / "data"
    shutil.copytree(byte_shards, folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["shards"][1]["sha256"]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    fineweb.main(["--check", str(folder)])
    assert "as long as the manifest says; it has no checksums of some" in capsys.readouterr().out
    with open(folder / manifest["shards"][1]["file"], "ab") as file:
        file.write(b"more")
    with pytest.raises(UserError, match="is longer than the .* tokens that its header says"):
        fineweb.main(["--check", str(folder)])


@pytest.mark.parametrize("kind", ["shards", "checkpoint"])
def test_an_altered_tokenizer_is_not_taken_from_another_folder(tmp_path, kind, byte_shards):
    text, source = tmp_path / "a.txt", tmp_path / "shards"
    text.write_text("some words, and some more words. " * 400)
    flags = ["--input", str(text), "--tokenizer", "bpe", "--vocab-size", "300"]
    fineweb.main([*flags, "--output", str(source)])
    if kind == "checkpoint":
        trained(tmp_path / "run", "--data", source, "--max-steps", 1, "--total-batch-size", 64, "--val-every", 0)
        source = tmp_path / "run" / "model_00001"
    again = [*flags[:4], "--output", str(tmp_path / "again"), "--tokenizer-from", str(source)]
    fineweb.main(again)
    content = json.loads((source / "tokenizer.json").read_text())
    merges = content["model"]["merges"]
    merges[-1], merges[-2] = merges[-2], merges[-1]
    (source / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"tokenizer\.json was altered"):
        fineweb.main([*again[:5], str(tmp_path / "third"), *again[6:]])


def test_bytes_are_not_taken_from_another_folder(byte_shards, tmp_path):
    (tmp_path / "a.txt").write_text("some words")
    flags = ["--input", str(tmp_path / "a.txt"), "--output", str(tmp_path / "out"), "--tokenizer", "bpe"]
    with pytest.raises(UserError, match="Use --tokenizer bytes, without --tokenizer-from"):
        fineweb.main([*flags, "--tokenizer-from", str(byte_shards)])
