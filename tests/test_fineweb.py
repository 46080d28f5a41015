"""fineweb.py: the same bytes as the plain loop, whatever the documents and the workers."""

import contextlib
import gzip
import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from conftest import FORKS, ROOT, needs_gpt2_vocabulary, run_script

import fineweb
from support import corpus, encode, hub, shards, speed
from support.cli import UserError
from support.corpus import Documents, Files
from support.lock import lock, sign
from support.tokenizer import get_tokenizer

# empty, longer than several shards, the text of a special token, a lone surrogate, many scripts
ADVERSARIAL = [
    "",
    "a",
    "x" * 700,
    "",
    "one <|endoftext|> two",
    "half \ud83d of a pair",
    "naïve 日本語 🙂",
    "tail\n\n",
    "",
]


def plain_loop(texts, encode, eot, shard_size):
    """Tokens of all documents, each after an end-of-text, cut every `shard_size`."""
    stream = []
    for text in texts:
        stream += [eot, *encode(text)]
    return [stream[i : i + shard_size] for i in range(0, len(stream), shard_size)]


def utf8_or_replaced(text):
    """Surrogates: a pair is the character that it stands for, a lone one is U+FFFD."""
    joined = lambda m: chr(0x10000 + (ord(m[0][0]) - 0xD800) * 0x400 + ord(m[0][1]) - 0xDC00)  # noqa: E731
    text = re.sub("[\ud800-\udbff][\udc00-\udfff]", joined, text)
    return list("".join("\ufffd" if 0xD800 <= ord(c) < 0xE000 else c for c in text).encode())


def contents(folder):
    """Split, index and tokens of the shards in a folder."""
    return [
        (p.name.split("_")[-2], int(p.stem.split("_")[-1]), np.load(p).tolist())
        for p in sorted(folder.glob("*.npy"), key=lambda p: p.name.split("_")[-1])
    ]


def source_of(texts):
    return Documents("texts", lambda: texts)


@pytest.mark.parametrize("shard_size", [2, 3, 100, 255, 256, 700])
def test_shards_equal_the_plain_loop(tmp_path, shard_size):
    fineweb.make_shards(source_of(ADVERSARIAL), tmp_path, tokenizer="bytes", shard_size=shard_size)
    expected = plain_loop(ADVERSARIAL, utf8_or_replaced, 256, shard_size)
    assert contents(tmp_path) == [("train" if i else "val", i, tokens) for i, tokens in enumerate(expected)]
    assert all(np.load(p).dtype == np.uint16 for p in tmp_path.glob("*.npy"))


def test_the_manifest_says_what_the_shards_are(tmp_path):
    fineweb.make_shards(
        Documents("some texts", lambda: ADVERSARIAL, "abc123", "texts"),
        tmp_path,
        tokenizer="bytes",
        shard_size=256,
    )
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert {k: manifest[k] for k in ("tokenizer", "vocab_size", "source", "revision", "complete")} == {
        "tokenizer": "bytes", "vocab_size": 257, "source": "some texts", "revision": "abc123", "complete": True,
    }  # fmt: skip
    import hashlib

    for shard in manifest["shards"]:
        file = tmp_path / shard["file"]
        assert shard["sha256"] == hashlib.sha256(file.read_bytes()).hexdigest()
        assert shard["tokens"] == len(np.load(file)) and shard["split"] in shard["file"]
        assert shard["documents"] == np.count_nonzero(np.load(file) == 256)
    assert sum(shard["documents"] for shard in manifest["shards"]) == len(ADVERSARIAL)


def test_a_small_corpus_holds_out_its_last_documents(tmp_path):
    texts = ["a" * 9] * 20  # 200 tokens in documents of 10
    fineweb.make_shards(source_of(texts), tmp_path / "tenth", tokenizer="bytes")
    assert [(s, i, len(t)) for s, i, t in contents(tmp_path / "tenth")] == [("val", 0, 20), ("train", 1, 180)]
    fineweb.make_shards(
        source_of(texts), tmp_path / "third", tokenizer="bytes", val_fraction=1 / 3
    )  # 66.7: 7 documents
    assert [(s, i, len(t)) for s, i, t in contents(tmp_path / "third")] == [("val", 0, 70), ("train", 1, 130)]
    fineweb.make_shards(source_of(texts), tmp_path / "many", tokenizer="bytes", val_fraction=0.3, shard_size=50)
    assert [(s, i, len(t)) for s, i, t in contents(tmp_path / "many")] == [
        ("val", 0, 50), ("val", 1, 10), ("train", 2, 50), ("train", 3, 50), ("train", 4, 40),
    ]  # fmt: skip
    fineweb.make_shards(source_of(["b" * 999]), tmp_path / "one", tokenizer="bytes")
    [(_, _, val), (_, _, train)] = contents(tmp_path / "one")
    assert val == [98] * 100 and train == [256] + [98] * 899  # cut inside the text


def test_max_tokens_cuts_the_corpus(tmp_path):
    texts = ["a" * 9] * 20
    fineweb.make_shards(source_of(texts), tmp_path, tokenizer="bytes", max_tokens=47, shard_size=20)
    assert [t for _, _, t in contents(tmp_path)] == plain_loop(texts[:5], utf8_or_replaced, 256, 20)[:2] + [
        [256, *[97] * 6]
    ]


def test_files_of_every_kind_are_one_corpus(tmp_path):
    (tmp_path / "a.txt").write_text("first é", encoding="utf-8")
    (tmp_path / "b.jsonl").write_text('{"body": "second", "n": 1}\n\n{"body": "third"}\n', encoding="utf-8")
    pa.parquet.write_table(pa.table({"body": ["fourth", "fifth"], "n": [1, 2]}), tmp_path / "c.parquet")
    done = run_script(
        "fineweb.py", "--input", "a.txt", "*.jsonl", tmp_path / "c.parquet", "--text-field", "body", "--tokenizer", "bytes",
        "--output", "out", "--shard-size", "8", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    texts = ["first é", "second", "third", "fourth", "fifth"]
    assert [t for _, _, t in contents(tmp_path / "out")] == plain_loop(texts, utf8_or_replaced, 256, 8)
    assert done.stdout.splitlines()[-1] == "out: 35 tokens (bytes), documents: 5, shards: 5"
    assert {p.name for p in (tmp_path / "out").glob("*.npy")} == {
        "a_val_000000.npy",
        *(f"a_train_{i:06d}.npy" for i in range(1, 5)),
    }


def test_a_data_set_is_streamed(tmp_path):
    """A folder of files goes through the same library as a data set of the hub."""
    (tmp_path / "set").mkdir()
    with gzip.open(tmp_path / "set" / "train.jsonl.gz", "wt") as file:
        file.write("".join(json.dumps({"story": f"story {i}"}) + "\n" for i in range(30)))
    done = run_script(
        "fineweb.py", "--dataset", "./set", "--text-field", "story", "--tokenizer", "bytes", "--output", "out", "--shard-size", "100",
        cwd=tmp_path, HF_HOME=str(tmp_path / "cache"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    expected = plain_loop([f"story {i}" for i in range(30)], utf8_or_replaced, 256, 100)
    assert [t for _, _, t in contents(tmp_path / "out")] == expected


def test_the_same_command_again_goes_on_or_is_done(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "BATCH_CHARS", 50)

    class Died(Exception):
        pass

    def dying():
        yield from ["a" * 250] * 5
        raise Died

    with pytest.raises(Died):
        fineweb.make_shards(Documents("texts", dying), tmp_path, tokenizer="bytes", shard_size=100)
    with pytest.raises(UserError, match="are not complete .* Run the same fineweb.py command again"):
        shards.open_shards(tmp_path, "train")
    texts = [*["a" * 250] * 5, "b" * 30]
    fineweb.make_shards(source_of(texts), tmp_path, tokenizer="bytes", shard_size=100)
    assert [t for _, _, t in contents(tmp_path)] == plain_loop(texts, utf8_or_replaced, 256, 100)
    stamps = {p: p.stat().st_mtime_ns for p in tmp_path.iterdir()}
    fineweb.make_shards(source_of(texts), tmp_path, tokenizer="bytes", shard_size=100)
    assert stamps == {p: p.stat().st_mtime_ns for p in tmp_path.iterdir()}


def test_a_bad_line_is_named_in_any_batch(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "BATCH_CHARS", 40)
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n' * 30 + "{bad\n" + '{"text": "fine"}\n' * 9)
    with pytest.raises(UserError, match=r"a\.jsonl, line 31 is not JSON"):
        fineweb.make_shards(
            Files("a", [tmp_path / "a.jsonl"], "text"), tmp_path / "out", tokenizer="bytes", shard_size=50
        )


def test_an_edited_file_is_another_source_and_a_failure_leaves_the_folder_free(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    flags = ["--tokenizer", "bytes", "--output", "out", "--input"]
    (tmp_path / "bad.jsonl").write_text('{"text": 1}')
    (tmp_path / "a.jsonl").write_text('{"text": "long enough", "title": "short"}\n')
    with pytest.raises(UserError, match=r"bad\.jsonl, line 1 has no text"):
        fineweb.main([*flags, "a.jsonl", "bad.jsonl"])
    fineweb.main([*flags, "a.jsonl"])
    fineweb.main([*flags, "a.jsonl"])
    assert "nothing to do: these shards were made before" in capsys.readouterr().out
    before = contents(tmp_path / "out")
    with pytest.raises(UserError, match="holds shards of another source or setting"):
        fineweb.main([*flags, "a.jsonl", "--text-field", "title"])
    stat = (tmp_path / "a.jsonl").stat()
    (tmp_path / "a.jsonl").write_text('{"text": "LONG ENOUGH", "title": "short"}\n')  # of the same size
    assert stat.st_size == (tmp_path / "a.jsonl").stat().st_size
    with pytest.raises(UserError, match="holds shards of another source or setting"):
        fineweb.main([*flags, "a.jsonl"])
    assert contents(tmp_path / "out") == before


@pytest.mark.parametrize("harm", [lambda p: p.unlink(), lambda p: p.write_bytes(p.read_bytes()[:-50])])
def test_lost_shards_are_made_again(tmp_path, harm):
    make = lambda: fineweb.make_shards(source_of(["a" * 250]), tmp_path, tokenizer="bytes", shard_size=100)  # noqa: E731
    make()
    before = contents(tmp_path)
    harm(tmp_path / "texts_train_000001.npy")
    with pytest.raises(UserError, match=r"texts_train_000001\.npy .* Run the command that made these shards again"):
        shards.open_shards(tmp_path, "train")
    make()
    assert contents(tmp_path) == before and len(shards.open_shards(tmp_path, "train")) == 2


@needs_gpt2_vocabulary
@pytest.mark.parametrize("signal_name", ["SIGKILL", "SIGTERM"])
def test_killed_workers_do_not_stay(tmp_path, signal_name):
    (tmp_path / "big.jsonl").write_text('{"text": "%s"}\n' % ("some words " * 1000) * 4000)
    command = [
        sys.executable,
        str(ROOT / "fineweb.py"),
        "--input",
        "big.jsonl",
        "--output",
        "out",
        "--workers",
        "2",
        "--shard-size",
        "1000",
    ]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("out/*.npy")) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert list(tmp_path.glob("out/*.npy")) and process.poll() is None  # the workers are at work
    process.send_signal(getattr(signal, signal_name))
    process.communicate(timeout=30)  # the output ends when the last process that could write to it has


def test_other_shards_are_never_mixed_or_lost(tmp_path):
    fineweb.make_shards(source_of(["a" * 250]), tmp_path / "ours", tokenizer="bytes", shard_size=100)
    before = contents(tmp_path / "ours")
    for settings in ({"shard_size": 50}, {"shard_size": 100, "max_tokens": 60}):
        with pytest.raises(UserError, match="holds shards of another source or setting"):
            fineweb.make_shards(source_of(["b" * 250]), tmp_path / "ours", tokenizer="bytes", **settings)
    assert contents(tmp_path / "ours") == before
    np.save(tmp_path / "ours" / "foreign_train_000007.npy", np.zeros(9, dtype=np.uint16))
    (tmp_path / "ours" / "manifest.json").write_text(
        (tmp_path / "ours" / "manifest.json").read_text().replace('"complete": true', '"complete": false')
    )
    with pytest.raises(UserError, match=r"such as foreign_train_000007\.npy\. Move them away"):
        fineweb.make_shards(source_of(["a" * 250]), tmp_path / "ours", tokenizer="bytes", shard_size=100)
    assert (tmp_path / "ours" / "foreign_train_000007.npy").exists()
    (tmp_path / "theirs").mkdir()
    np.save(tmp_path / "theirs" / "x_train_000001.npy", np.zeros(9, dtype=np.uint16))
    with pytest.raises(UserError, match=r"shards of another tool, such as x_train_000001\.npy"):
        fineweb.make_shards(source_of(["b" * 250]), tmp_path / "theirs", tokenizer="bytes")


def test_the_demo_text(tmp_path):
    done = run_script("fineweb.py", "--demo", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    manifest = shards.read_manifest(tmp_path / "demo_data")
    tokens = {split: sum(s["tokens"] for s in manifest["shards"] if s["split"] == split) for split in ("train", "val")}
    assert 1.5e6 < sum(tokens.values()) < 4e6 and 0.08 < tokens["val"] / sum(tokens.values()) < 0.12
    text = get_tokenizer("bytes").decode(np.load(next((tmp_path / "demo_data").glob("*_train_*.npy"))).tolist())
    assert 400 < text.count("<|endoftext|>") < 900
    assert "The following are" in text and " the " in text and "\ufffd" not in text
    corpus = text + get_tokenizer("bytes").decode(np.load(next((tmp_path / "demo_data").glob("*_val_*.npy"))).tolist())
    import json as some_module
    import textwrap
    from pydoc_data.topics import topics

    for known in (topics["assert"], some_module.__doc__.strip(), textwrap.dedent.__doc__.splitlines()[0]):
        assert known in corpus


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--input nothing.txt --output out", "no file matches nothing.txt"),
        ("--input empty --output out", "there is no text in empty. Name files or folders of"),
        ("--input book.pdf --output out", "book.pdf is none of .txt, .jsonl, .parquet"),
        ("--input latin.txt --output out", "latin.txt is not UTF-8 text"),
        ("--input bad.jsonl --output out", "bad.jsonl, line 2 is not JSON"),
        ("--input list.jsonl --output out", "list.jsonl, line 1 has no text in 'text', but no fields"),
        (
            "--input other.jsonl --output out",
            "other.jsonl, line 1 has no text in 'text', but the fields body. Mend it, or choose another --text-field",
        ),
        ("--input fake.parquet --output out", "fake.parquet is not a parquet file"),
        ("--input bytes.jsonl --output out", "bytes.jsonl, line 1 is not JSON"),
        ("--input deep.jsonl --output out", "deep.jsonl, line 1 is not JSON"),
        ("--input null.parquet --output out", "null.parquet, row 1 has no text in 'text', but null"),
        ("--input empty.jsonl --output out", "there is no text in empty.jsonl"),
        ("--input a.txt", "name a folder for the shards with --output"),
        ("--input a.txt --demo", "exclude each other. Choose one"),
        ("--input a.txt --output out --val-fraction 1.5", "--val-fraction must be more than 0 and less than 1"),
        ("--input a.txt --output out --shard-size 0", "--shard-size must be 2 or more"),
        ("--input a.txt --output a.txt", "cannot write to a.txt"),
        ("--input a.txt --output out --tokenizer gpt5", "invalid choice: 'gpt5'"),
        ("--dataset no/such --output out", "cannot open the data set no/such"),
        ("--shards-from no/such --output out", "cannot open the data set no/such"),
        ("--input cut.jsonl.gz --output out", "cut.jsonl.gz cannot be read"),
        ("--input fake.txt.zst --output out", "fake.txt.zst cannot be read"),
        ("--input null.parquet --text-field body --output out", "no column 'body'. Choose with --text-field from text"),
        (
            "--input a.txt --document-separator= --output out",
            "--document-separator must not be empty",
        ),
        ("--demo --document-separator x", "--document-separator is for --input"),
        ("--input a.txt --output=", "--output must not be empty"),
        ("--input a.txt --output out --shard-size 1e12", "--shard-size must be 1,000,000,000 or less"),
        ("--demo --name x", "--name is for data sets"),
        ("--shards-from a/b --output out --engine tiktoken", "leave out --shard-size, --val-fraction and --engine"),
        ("--dataset a.txt --output out", "a.txt is a file. Name it with --input"),
        ("--input a.txt --output out --max-tokens 1.5", "argument --max-tokens: invalid count value: '1.5'"),
        ("--shards-from a/b", "name a folder for the shards with --output"),
        ("--dataset missing_folder/x --output out --name y", "cannot open the data set missing_folder/x"),
    ],
)
def test_bad_input(tmp_path, monkeypatch, capsys, flags, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("hello " * 100)
    (tmp_path / "book.pdf").write_text("%PDF")
    (tmp_path / "latin.txt").write_bytes("naïve".encode("latin-1"))
    (tmp_path / "bad.jsonl").write_text('{"text": "fine"}\n{"text": \n')
    (tmp_path / "list.jsonl").write_text("[1]\n")
    (tmp_path / "other.jsonl").write_text('{"body": "x"}\n')
    (tmp_path / "fake.parquet").write_text("PAR1")
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "bytes.jsonl").write_bytes(b'{"text": "\xff"}\n')
    (tmp_path / "empty").mkdir()
    (tmp_path / "deep.jsonl").write_text("[" * 100000)
    pa.parquet.write_table(pa.table({"text": ["fine", None]}), tmp_path / "null.parquet")
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(b'{"text": "x"}\n' * 999)[:-20])
    (tmp_path / "fake.txt.zst").write_bytes(b"no such thing")
    monkeypatch.setattr(hub.time, "sleep", lambda seconds: None)
    from support.cli import run

    with pytest.raises(SystemExit) as exit:
        run(lambda: fineweb.main(flags.split() + ([] if "--tokenizer" in flags else ["--tokenizer", "bytes"])))
    captured = capsys.readouterr()
    assert exit.value.code == 2
    assert captured.err.startswith("error: ") and message in captured.err
    assert not (tmp_path / "out").exists()


# ---- the same bytes, whatever the workers, the engine and the batches

WORDS = [
    "",
    "a",
    "it's",
    "naïve",
    "日本語",
    "🙂",
    "\ud83d",
    "\udc4d\ud83d",
    "<|endoftext|>",
    "x" * 90,
    "1234",
    "!?",
    "\u00a0",
    "\x1c",
]
BLANKS = [" ", "  ", "\n", "\n\n ", "\t", "\r\n", "\u2003", " " * 70, ""]


def adversarial_texts(seed, n=40):
    """Random documents of the worst words and blanks: empty ones, long ones, ones without blanks."""
    rng = random.Random(seed)
    one = lambda: "".join(rng.choice(WORDS) + rng.choice(BLANKS) for _ in range(rng.choice((0, 1, 3, 30, 200))))  # noqa: E731
    return [one() for _ in range(n)]


def encode_with(tokenizer):
    if tokenizer == "bytes":
        return utf8_or_replaced, 256
    import tiktoken

    encoding = tiktoken.get_encoding("gpt2")
    return encoding.encode_ordinary, encoding.eot_token


ENGINES = [
    ("bytes", "tiktoken"),
    pytest.param("gpt2", "tiktoken", marks=needs_gpt2_vocabulary),
    pytest.param("gpt2", "gigatoken", marks=needs_gpt2_vocabulary),
]


@pytest.mark.parametrize("tokenizer, engine", ENGINES)
@pytest.mark.parametrize("batch_chars", [1, 50, 3000])
def test_adversarial_documents_equal_the_plain_loop(tmp_path, monkeypatch, tokenizer, engine, batch_chars):
    monkeypatch.setattr(corpus, "BATCH_CHARS", batch_chars)  # long documents are cut at blanks
    for seed, (shard_size, n) in enumerate(((2, 9), (77, 9), (1000, 40), (4000, 60))):
        texts = [*(t for t in adversarial_texts(seed, n) if len(t) < 20 * shard_size), "not too short"]
        out = tmp_path / str(seed)
        fineweb.make_shards(
            Documents("texts", lambda texts=texts: texts),
            out,
            tokenizer=tokenizer,
            engine=engine,
            shard_size=shard_size,
        )
        expected = plain_loop(texts, *encode_with(tokenizer), shard_size)
        assert [tokens for _, _, tokens in contents(out)] == expected
        assert [s["documents"] for s in shards.read_manifest(out)["shards"]] == [
            part.count(shards.read_manifest(out)["vocab_size"] - 1) for part in expected
        ]


@needs_gpt2_vocabulary
@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("engine", encode.ENGINES)
def test_workers_change_nothing(tmp_path, monkeypatch, workers, engine):
    """Processes that read their own row groups, parse their own lines, or are sent texts."""
    monkeypatch.setattr(corpus, "BATCH_CHARS", 2000)
    monkeypatch.setattr(corpus, "ROW_GROUP_BYTES", 4000)
    texts = [t.encode("utf-8", "replace").decode() for t in adversarial_texts(workers, 90)]
    pa.parquet.write_table(pa.table({"text": texts[:20]}), tmp_path / "small.parquet", row_group_size=3)
    pa.parquet.write_table(pa.table({"text": texts[20:40]}), tmp_path / "large.parquet")
    (tmp_path / "lines.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts[40:80]))
    paths = [tmp_path / name for name in ("small.parquet", "large.parquet", "lines.jsonl")]
    for i, text in enumerate(texts[80:]):
        paths.append(tmp_path / f"{i}.txt")
        paths[-1].write_text(text, encoding="utf-8", newline="")
    out = tmp_path / "out"
    fineweb.make_shards(Files("files", paths, "text"), out, engine=engine, shard_size=1500, workers=workers)
    documents = texts[:80] + [t.replace("\r\n", "\n").replace("\r", "\n") for t in texts[80:]]
    assert [tokens for _, _, tokens in contents(out)] == plain_loop(documents, *encode_with("gpt2"), 1500)


@needs_gpt2_vocabulary
@pytest.mark.parametrize("seed", range(4))
def test_a_cut_between_a_word_and_a_blank_changes_no_token(seed):
    encode_whole, _ = encode_with("gpt2")
    text = "".join(adversarial_texts(seed, 20))
    cuts = {corpus.safe_cut(text, 0, limit) for limit in range(1, len(text), 20)} - {0}
    assert len(cuts) > 30
    for cut in cuts:
        assert encode_whole(text[:cut]) + encode_whole(text[cut:]) == encode_whole(text), (
            text[cut - 9 : cut],
            text[cut : cut + 9],
        )


@needs_gpt2_vocabulary
@pytest.mark.parametrize("wrong", [lambda ids: ids[::-1], lambda ids: ids[:-1], lambda ids: [*ids, 5]])
def test_a_difference_between_the_engines_stops_the_run(tmp_path, monkeypatch, wrong):
    right = encode.Gigatoken._encode
    monkeypatch.setattr(encode.Gigatoken, "_encode", lambda self, texts: [wrong(ids) for ids in right(self, texts)])
    monkeypatch.setattr(encode, "_encoder", encode._encoder.__wrapped__)  # none from another test
    with pytest.raises(UserError, match="gigatoken and tiktoken disagree .* with --engine tiktoken"):
        fineweb.make_shards(source_of(["some words", "and more of them"] * 9), tmp_path, engine="gigatoken")
    assert not list(tmp_path.glob("*.npy"))


@needs_gpt2_vocabulary
def test_every_batch_is_compared(monkeypatch):
    compared = []
    reference = get_tokenizer("gpt2")
    gigatoken = encode.Gigatoken(reference)
    monkeypatch.setattr(
        reference, "encode_array", lambda text: compared.append(text) or type(reference).encode_array(reference, text)
    )
    batches = [["a b c"], [], ["one", "two", "three"], ["long words " * 9999] * 30]
    for texts in batches:
        gigatoken(texts)
    gigatoken(["日" * 99_999])  # without a blank
    assert compared.pop() == "日" * 99_999
    assert [len(set(batch).intersection(compared)) for batch in batches[:3]] == [1, 0, 2]
    assert sum(map(len, compared[3:])) >= 30 * 9999 * 11 / encode.CHECKED_SHARE


@needs_gpt2_vocabulary
@pytest.mark.parametrize("limit", [{"CACHE_BYTES": 10 << 20}, {"CACHE_CHARS": 7 * 10**5}])
def test_gigatoken_starts_anew_before_its_memory_of_words_is_large(monkeypatch, limit):
    loads, memory = [], itertools.count(0, 3 << 20)
    load = encode.Gigatoken._load
    monkeypatch.setattr(encode.Gigatoken, "_load", lambda self: loads.append(1) or load(self))
    monkeypatch.setattr(encode, "_resident_memory", lambda: next(memory))  # 3 MB more at every look
    for name, value in limit.items():
        monkeypatch.setattr(encode, name, value)
    gigatoken = encode.Gigatoken(get_tokenizer("gpt2"))
    for i in range(12):
        gigatoken([f"{i} words " * 25_000])
    assert len(loads) == 1 + 12 // 4  # after 12 MB, or 800,000 characters


def test_the_memory_of_this_process_is_known():
    speed.trim_memory(torch.device("cpu"))  # runs of other tests have left the process memory that it would use again
    before = encode._resident_memory()
    block = np.ones(200 << 20, dtype=np.uint8)
    assert not before or len(block) * 0.8 < encode._resident_memory() - before < len(block) * 1.5


@needs_gpt2_vocabulary
@pytest.mark.parametrize("workers", [1, 2])
def test_what_tiktoken_cannot_encode_is_named(tmp_path, workers):
    (tmp_path / "blanks.jsonl").write_text(
        "".join(json.dumps({"text": t}) + "\n" for t in ["fine " * 10**6, " " * 2_000_000 + "a"])
    )
    source = fineweb.file_source([str(tmp_path / "blanks.jsonl")], "text")
    with pytest.raises(UserError, match=r"tiktoken cannot encode a document of .*blanks\.jsonl, from line 2: .*stack"):
        fineweb.make_shards(source, tmp_path / "out", engine="tiktoken", workers=workers)


# ---- files


def packed_bytes(text, codec):
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, codec) as stream:
        stream.write(text.encode())
    return sink.getvalue().to_pybytes()


@pytest.fixture
def files_of_every_kind(tmp_path, monkeypatch):
    """Files, small batches, and the documents that are in them."""
    monkeypatch.setattr(corpus, "BATCH_CHARS", 300)
    monkeypatch.setattr(corpus, "ROW_GROUP_BYTES", 1000)
    texts = [t.encode("utf-8", "replace").decode().replace("\r", "") for t in adversarial_texts(5, 70)]
    lines = ["".join(json.dumps({"text": t}) + "\n" for t in part) for part in (texts[:10], texts[10:20], texts[20:30])]
    (tmp_path / "a.jsonl").write_text(lines[0])
    half = len(lines[1]) // 2  # two members in a file, as appending to one makes them
    (tmp_path / "b.jsonl.gz").write_bytes(
        gzip.compress(lines[1][:half].encode()) + gzip.compress(lines[1][half:].encode())
    )
    (tmp_path / "c.jsonl.zst").write_bytes(packed_bytes(lines[2], "zstd"))
    pa.parquet.write_table(pa.table({"text": texts[30:40], "n": range(10)}), tmp_path / "d.parquet", row_group_size=2)
    pa.parquet.write_table(pa.table({"n": range(10), "text": texts[40:50]}), tmp_path / "e.parquet")
    (tmp_path / "f.txt").write_bytes(b"\xef\xbb\xbf" + texts[50].encode())
    (tmp_path / "g.txt.gz").write_bytes(gzip.compress("é 日\r\n".encode() * 500))
    (tmp_path / "h.txt").write_text("")
    return sorted(tmp_path.iterdir()), [*texts[:51], "é 日\n" * 500, ""]


def documents_of(batches):
    """The documents of batches, pieces joined; the first is None if it continues one before."""
    found = []
    for batch in batches:
        texts = batch.texts()
        if batch.continues:
            found[-1:] = [(found[-1] if found else "") + texts[0]]
            texts = texts[1:]
        found += texts
    return found


def test_every_kind_of_file_can_be_read_from_every_place(files_of_every_kind):
    paths, documents = files_of_every_kind
    files = Files("files", paths, "text")
    batches = list(files.batches())
    assert documents_of(batches) == documents
    assert len(batches) > 40 and any(batch.continues for batch in batches)
    assert [b.share for b in batches] == sorted(b.share for b in batches) and batches[-1].share == pytest.approx(1)
    for i, batch in enumerate(batches):
        again = list(files.batches(json.loads(json.dumps(batch.place))))
        assert [(b.place, b.continues, b.texts()) for b in again] == [
            (b.place, b.continues, b.texts()) for b in batches[i:]
        ]


@pytest.mark.parametrize("separator", ["<|endoftext|>", "\n\n", "\n---\n", "b", "END OF DOC", "x\ny"])
@pytest.mark.parametrize("batch_chars", [2, 30, 10**6])
def test_a_text_file_is_cut_at_its_separator(tmp_path, monkeypatch, separator, batch_chars):
    monkeypatch.setattr(corpus, "BATCH_CHARS", batch_chars)
    text = (
        f"one{separator}two words  \n{separator}{separator} \n {separator}" + "a long one, " * 20 + f"{separator}end\n"
    )
    (tmp_path / "a.txt").write_text(text)
    expected = [part for part in text.split(separator) if part.strip()]
    assert documents_of(Files("a", [tmp_path / "a.txt"], "text", separator=separator).batches()) == expected


@pytest.mark.parametrize("before", range((1 << 20) - 12, (1 << 20) + 3))
def test_a_separator_may_lie_across_two_blocks(tmp_path, monkeypatch, before):
    monkeypatch.setattr(corpus, "BATCH_CHARS", 1 << 18)
    (tmp_path / "a.txt").write_text("x" * before + "END OF DOC" + "two\r\n")
    found = documents_of(Files("a", [tmp_path / "a.txt"], "text", separator="END OF DOC").batches())
    assert found == ["x" * before, "two\n"]


def test_a_separator_is_named_on_the_command_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("one\ntwo\n\nthree\n\n\n\nfour")
    flags = ["--input", "a.txt", "--output", "out", "--tokenizer", "bytes", "--document-separator", r"\n\n"]
    fineweb.main([*flags, "--shard-size", "9"])
    expected = plain_loop(["one\ntwo", "three", "four"], utf8_or_replaced, 256, 9)
    assert [tokens for _, _, tokens in contents(tmp_path / "out")] == expected
    with pytest.raises(UserError, match="another source or setting"):
        fineweb.main([*flags[:-2], "--shard-size", "9"])


def test_a_streamed_data_set_goes_on_where_it_broke_off(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "BATCH_CHARS", 100)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    texts = ["".join(t.split("\r")).encode("utf-8", "replace").decode() for t in adversarial_texts(3, 60)]
    (tmp_path / "set").mkdir()
    for i in range(3):
        lines = (json.dumps({"text": t}) + "\n" for t in texts[20 * i : 20 * i + 20])
        (tmp_path / "set" / f"train-{i}.jsonl").write_text("".join(lines))
    stream = hub.Stream(str(tmp_path / "set"), None, "train", "text")
    batches = list(stream.batches())
    assert documents_of(batches) == texts
    for i in range(0, len(batches), 7):
        again = list(stream.batches(json.loads(json.dumps(batches[i].place))))
        assert [b.texts() for b in again] == [b.texts() for b in batches[i:]]


# ---- killed, full, in use


def tokenise(texts, out, options):
    fineweb.make_shards(Documents("texts", lambda: texts), out, **options)


@pytest.mark.parametrize("options", [{}, {"val_fraction": 0.3}, {"max_tokens": 30_000}])
def test_killed_at_any_moment_the_same_command_ends_with_the_same_bytes(tmp_path, monkeypatch, options):
    monkeypatch.setattr(corpus, "BATCH_CHARS", 500)
    rng = random.Random(0)
    texts = [" ".join(str(rng.random()) for _ in range(rng.randrange(60))) for _ in range(80)]
    options = options | {"tokenizer": "bytes", "shard_size": 700}
    tokenise(texts, tmp_path / "whole", options)
    stamps, kills = {}, 0
    while True:
        process = FORKS.Process(target=tokenise_slowly, args=(texts, tmp_path / "out", options))
        process.start()
        known = len(list(tmp_path.glob("out/*.npy")))
        deadline = time.monotonic() + 60
        while len(list(tmp_path.glob("out/*.npy"))) < known + rng.randrange(1, 9) and process.is_alive():
            assert time.monotonic() < deadline
            time.sleep(0.001)
        time.sleep(rng.random() * 0.01)
        if kills < 12:
            process.kill()
            kills += process.is_alive()
        process.join(60)
        for path, stamp in stamps.items():
            assert not path.exists() or path.stat().st_mtime_ns == stamp, f"{path.name} was written again"
        manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
        listed = [tmp_path / "out" / s["file"] for s in (*manifest["shards"], *manifest.get("counted", []))]
        stamps = {path: path.stat().st_mtime_ns for path in listed}
        if process.exitcode == 0:
            break
    assert kills >= 3
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert {p.name for p in (tmp_path / "out").iterdir()} == {p.name for p in (tmp_path / "whole").iterdir()}
    whole, out = (json.loads((tmp_path / name / "manifest.json").read_text()) for name in ("whole", "out"))
    assert whole == out


def tokenise_slowly(texts, out, options):
    """So that a kill can meet every part of it."""
    corpus.BATCH_CHARS = 500
    write = shards._write
    shards._write = lambda *parts: (time.sleep(0.003), write(*parts))[1]
    tokenise(texts, out, options)


@needs_gpt2_vocabulary
def test_killed_with_its_workers_the_same_command_ends_with_the_same_bytes(tmp_path):
    texts = [" ".join(adversarial_texts(i)) for i in range(400)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    flags = ["--input", "a.jsonl", "--shard-size", "50000"]
    run = lambda *more: run_script("fineweb.py", *flags, *more, cwd=tmp_path)  # noqa: E731
    assert run("--output", "whole", "--workers", "1", "--engine", "tiktoken").returncode == 0
    command = [sys.executable, str(ROOT / "fineweb.py"), *flags, "--output", "out", "--workers", "2"]
    for shards_before_the_kill in (3, 9):
        process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while len(list(tmp_path.glob("out/*.npy"))) < shards_before_the_kill and process.poll() is None:
            time.sleep(0.001)
        process.kill()
        process.wait()
        with pytest.raises(UserError, match="are not complete"):
            shards.open_shards(tmp_path / "out", "train")
    assert run("--output", "out", "--workers", "3").returncode == 0
    assert contents(tmp_path / "out") == contents(tmp_path / "whole") and len(contents(tmp_path / "out")) > 12


@pytest.mark.parametrize("options", [{}, {"val_fraction": 0.2}])
def test_only_what_is_lost_is_made_again(tmp_path, options):
    texts = [f"{i} " * 50 for i in range(40)]
    make = lambda: fineweb.make_shards(source_of(texts), tmp_path, tokenizer="bytes", shard_size=500, **options)  # noqa: E731
    make()
    before, paths = contents(tmp_path), sorted(tmp_path.glob("*_train_*.npy"))
    stamps = [path.stat().st_mtime_ns for path in paths]
    content = bytearray(paths[5].read_bytes())
    content[-1] ^= 1  # a single bit
    paths[5].write_bytes(content)
    make()
    assert contents(tmp_path) == before
    assert [path.stat().st_mtime_ns for path in paths[:5]] == stamps[:5]


def interrupted(texts, out, monkeypatch, after, **options):
    """Ends a run while it writes shard number `after`."""
    write, written = shards._write, []

    def broken(path, *parts):
        written.extend([path] if path.suffix == ".npy" else [])
        if len(written) > after:
            raise OSError(5, "broken")
        return write(path, *parts)

    with monkeypatch.context() as patch:
        patch.setattr(shards, "_write", broken)
        with pytest.raises(UserError, match="broken"):
            fineweb.make_shards(source_of(texts), out, tokenizer="bytes", **options)


LONG = [f"text {i} " * 9 for i in range(60)]


def test_a_run_goes_on_whatever_the_batches_were(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "BATCH_CHARS", 3000)
    interrupted(LONG, tmp_path, monkeypatch, 4, shard_size=500)
    monkeypatch.setattr(corpus, "BATCH_CHARS", 70)
    fineweb.make_shards(source_of(LONG), tmp_path, tokenizer="bytes", shard_size=500)
    assert [tokens for _, _, tokens in contents(tmp_path)] == plain_loop(LONG, utf8_or_replaced, 256, 500)


@pytest.mark.parametrize("harm", [lambda p: p.unlink(), lambda p: p.write_bytes(p.read_bytes()[:-50])])
@pytest.mark.parametrize("options, after", [({}, 5), ({"val_fraction": 0.3}, 5), ({"val_fraction": 0.3}, 14)])
def test_what_was_lost_of_an_unfinished_run_is_made_again(tmp_path, monkeypatch, options, after, harm):
    fineweb.make_shards(source_of(LONG), tmp_path / "whole", tokenizer="bytes", shard_size=500, **options)
    interrupted(LONG, tmp_path / "out", monkeypatch, after, shard_size=500, **options)
    harm(sorted((tmp_path / "out").glob("*00002.npy"))[0])
    fineweb.make_shards(source_of(LONG), tmp_path / "out", tokenizer="bytes", shard_size=500, **options)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert {p.name for p in (tmp_path / "out").iterdir()} == {p.name for p in (tmp_path / "whole").iterdir()}


def test_half_held_out_and_killed_it_goes_on(tmp_path, monkeypatch):
    interrupted(["a" * 9] * 20, tmp_path, monkeypatch, 1)
    fineweb.make_shards(source_of(["a" * 9] * 20), tmp_path, tokenizer="bytes")
    assert [(s, i, len(t)) for s, i, t in contents(tmp_path)] == [("val", 0, 20), ("train", 1, 180)]


def test_parts_that_a_killed_run_left_behind_are_removed(tmp_path):
    make = lambda: fineweb.make_shards(source_of(LONG), tmp_path, tokenizer="bytes", shard_size=500, val_fraction=0.3)  # noqa: E731
    make()
    before = {path.name for path in tmp_path.iterdir()}
    for name in ("texts_counted_000003.npy", "texts_train_000003.npy.partial", "notes.txt", "other_counted_000001.npy"):
        (tmp_path / name).write_bytes(b"x")
    make()
    assert {path.name for path in tmp_path.iterdir()} == before | {"notes.txt", "other_counted_000001.npy"}


@pytest.mark.parametrize(
    "max_tokens, expected", [(500, [("val", 50), ("train", 450)]), (501, [("val", 500), ("train", 1)])]
)
def test_no_more_than_a_shard_is_held_out_from(tmp_path, max_tokens, expected):
    texts = ["a" * 9] * 99
    fineweb.make_shards(source_of(texts), tmp_path, tokenizer="bytes", shard_size=500, max_tokens=max_tokens)
    assert [(s, len(t)) for s, _, t in contents(tmp_path)] == expected


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda m: m["shards"][1].update(end="[[0, 0], -5]"), "is not a manifest of shards"),
        (lambda m: m["shards"][1].update(end="x"), "is not a manifest of shards"),
        (lambda m: m["shards"][1].pop("tokens"), "is not a manifest of shards"),
        (lambda m: m.pop("settings"), "is not a manifest of shards"),
        (lambda m: m.update(shards=5), "is not a manifest of shards"),
        (lambda m: m["shards"][1].update(file="../precious.npy", tokens=9), None),
        (lambda m: m["counted"].append({"file": "../precious.npy", "split": "counted", "tokens": 9}), None),
    ],
)
def test_a_manifest_edited_by_hand_loses_nothing(tmp_path, monkeypatch, change, message):
    np.save(tmp_path / "precious.npy", np.zeros(9, dtype=np.uint16))
    out = tmp_path / "out"
    interrupted(LONG, out, monkeypatch, 5, shard_size=500)
    manifest = json.loads((out / "manifest.json").read_text())
    change(manifest)
    (out / "manifest.json").write_text(json.dumps(manifest))
    if message:
        with pytest.raises(UserError, match=message):
            fineweb.make_shards(source_of(LONG), out, tokenizer="bytes", shard_size=500)
    else:
        fineweb.make_shards(source_of(LONG), out, tokenizer="bytes", shard_size=500)
        assert [tokens for _, _, tokens in contents(out)] == plain_loop(LONG, utf8_or_replaced, 256, 500)
    assert (tmp_path / "precious.npy").exists()


@pytest.mark.parametrize("change", [lambda path: os.utime(path, (0, 0)), lambda path: path.unlink(missing_ok=True)])
def test_a_file_changed_while_it_is_read_is_noticed(tmp_path, monkeypatch, change):
    monkeypatch.setattr(corpus, "BATCH_CHARS", 50)
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "fine"}\n' * 99)
    write = shards._write
    monkeypatch.setattr(
        shards, "_write", lambda to, *parts: (to.suffix == ".npy" and change(path), write(to, *parts))[1]
    )
    with pytest.raises(UserError, match=r"a\.jsonl was changed while it was read\. Remove .*out and run it again"):
        fineweb.make_shards(Files("a.jsonl", [path], "text"), tmp_path / "out", tokenizer="bytes", shard_size=50)
    assert not shards.complete(tmp_path / "out")


def test_a_file_that_is_gone_before_it_is_read_is_named(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    source = fineweb.file_source([str(tmp_path / "a.txt")], "text")
    (tmp_path / "a.txt").unlink()
    with pytest.raises(UserError, match=r"a\.txt cannot be read \(No such file or directory\)"):
        fineweb.make_shards(source, tmp_path / "out", tokenizer="bytes")


def test_upper_case_names_and_long_ones(tmp_path):
    (tmp_path / ("\U00020000" * 60 + ".TXT")).write_text("x" * 99)
    source = fineweb.file_source([str(next(tmp_path.iterdir()))], "text")
    fineweb.make_shards(source, tmp_path / "out", tokenizer="bytes", shard_size=50)
    assert [t for _, _, t in contents(tmp_path / "out")] == plain_loop(["x" * 99], utf8_or_replaced, 256, 50)


def test_another_run_may_have_been_faster(tmp_path, monkeypatch):
    """Between the look at the folder and its lock."""
    from support import lock as lock_module

    def slow_lock(*arguments):
        monkeypatch.undo()
        fineweb.make_shards(source_of(["b" * 250]), tmp_path, tokenizer="bytes", shard_size=50)
        return lock_module.lock(*arguments)

    monkeypatch.setattr(fineweb, "lock", slow_lock)
    with pytest.raises(UserError, match="another source or setting .shard_size: 50, not 100"):
        fineweb.make_shards(source_of(["a" * 250]), tmp_path, tokenizer="bytes", shard_size=100)
    assert contents(tmp_path)[0] == ("val", 0, [256] + [98] * 49) and shards.complete(tmp_path)


def test_a_folder_that_is_a_data_set_is_another_source_when_edited(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "train.jsonl").write_text('{"text": "long enough"}\n')
    flags = ["--dataset", "./set", "--output", "out", "--tokenizer", "bytes"]
    fineweb.main(flags)
    os.utime("set/train.jsonl", (0, 0))
    with pytest.raises(UserError, match=r"another source or setting \(revision: "):
        fineweb.main(flags)


@pytest.mark.parametrize("text, number", [("1e9", 10**9), ("10_000_000", 10**7), ("12", 12), ("2.5e3", 2500)])
def test_numbers_as_people_write_them(text, number):
    assert fineweb.arguments(["--max-tokens", text]).max_tokens == number


@needs_gpt2_vocabulary
def test_a_killed_worker_is_named(tmp_path, monkeypatch):
    batches = [Dying(place=[i], content=["x"], source="dying") for i in range(3)]
    with pytest.raises(UserError, match="a worker was killed.* fewer --workers"):
        list(encode.encoded(batches, "gpt2", "tiktoken", 2))


class Dying(corpus.Texts):
    def texts(self):
        os._exit(9)


def test_the_room_that_was_used_already_is_not_asked_for_again(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("text " * 4000)
    source = fineweb.file_source([str(tmp_path / "a.txt")], "text")
    monkeypatch.setattr(corpus, "BATCH_CHARS", 300)
    write = shards._write
    for most, error in ((30, "broken"), (70, "broken"), (999, None)):  # while it is counted, and while it is cut in two
        written = []

        def broken(path, *parts, written=written, most=most):
            written.extend([path] if path.suffix == ".npy" else [])
            if len(written) > most:
                raise OSError(5, "broken")
            return write(path, *parts)

        used = sum(2 * len(np.load(path)) for path in (tmp_path / "out").glob("*.npy"))
        monkeypatch.setattr(hub.shutil, "disk_usage", lambda path, used=used: types.SimpleNamespace(free=80_100 - used))
        monkeypatch.setattr(shards, "_write", broken)
        with pytest.raises(UserError, match=error) if error else contextlib.nullcontext():
            fineweb.make_shards(source, tmp_path / "out", tokenizer="bytes", shard_size=400, val_fraction=0.5)
    monkeypatch.setattr(hub.shutil, "disk_usage", lambda path: types.SimpleNamespace(free=79_000))
    with pytest.raises(UserError, match="are needed"):
        fineweb.make_shards(source, tmp_path / "other", tokenizer="bytes", shard_size=400, val_fraction=0.5)
    fineweb.make_shards(source, tmp_path / "other", tokenizer="bytes", shard_size=400)


def test_two_runs_do_not_share_a_folder(tmp_path):
    (tmp_path / "out").mkdir()
    with lock(tmp_path / "out", "--output") as held:
        sign(held)
        with pytest.raises(UserError, match=r"out is in use by a live run \(process \d+ .*another --output"):
            fineweb.make_shards(source_of(["x" * 99]), tmp_path / "out", tokenizer="bytes")
    fineweb.make_shards(source_of(["x" * 99]), tmp_path / "out", tokenizer="bytes")


def test_a_disk_that_is_too_small_is_refused_before_anything_is_made(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("text " * 1000)
    monkeypatch.setattr(hub.shutil, "disk_usage", lambda path: types.SimpleNamespace(free=5000))
    source = fineweb.file_source([str(tmp_path / "a.txt")], "text")
    with pytest.raises(UserError, match=r"out has 0\.0 MB free, and about 0\.0 MB are needed to make the shards"):
        fineweb.make_shards(source, tmp_path / "out", tokenizer="bytes")
    fineweb.make_shards(source, tmp_path / "out", tokenizer="bytes", max_tokens=2000)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("number", [3, 9])  # the last one
def test_a_full_disk_ends_the_run_and_the_same_command_goes_on(tmp_path, monkeypatch, number):
    texts, write = ["word " * 100] * 9, shards._write

    def full(path, *parts):
        if f"_{number:06d}" in path.name:
            with open("/dev/full", "wb", 0) as disk:
                disk.write(b"x")
        return write(path, *parts)

    monkeypatch.setattr(shards, "_write", full)
    with pytest.raises(UserError, match=rf"cannot write to .* \(No space left on device\)\. {number} shards are whole"):
        fineweb.make_shards(source_of(texts), tmp_path, tokenizer="bytes", shard_size=500)
    assert not shards.complete(tmp_path)
    monkeypatch.setattr(shards, "_write", write)
    fineweb.make_shards(source_of(texts), tmp_path, tokenizer="bytes", shard_size=500)
    assert [tokens for _, _, tokens in contents(tmp_path)] == plain_loop(texts, utf8_or_replaced, 256, 500)


def test_documents_are_cut_where_that_is_asked_for(tmp_path, capsys):
    """Of 10, 30 and 60 tokens a cut between documents holds out 60."""
    texts = ["a" * 9, "b" * 29, "c" * 59]
    fineweb.make_shards(source_of(texts), tmp_path / "whole", tokenizer="bytes")
    assert [(s, len(t)) for s, _, t in contents(tmp_path / "whole")] == [("val", 60), ("train", 40)]
    assert "note: that is more than 10%" in capsys.readouterr().out
    fineweb.make_shards(source_of(texts), tmp_path / "cut", tokenizer="bytes", split_documents=True)
    assert [(s, len(t)) for s, _, t in contents(tmp_path / "cut")] == [("val", 10), ("train", 90)]
    assert "note" not in capsys.readouterr().out
    texts = ["a" * 59, "b" * 29, "c" * 10]  # but not for one token in ten
    fineweb.make_shards(source_of(texts), tmp_path / "near", tokenizer="bytes", split_documents=True)
    assert [(s, len(t)) for s, _, t in contents(tmp_path / "near")] == [("val", 11), ("train", 90)]
