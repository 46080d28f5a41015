"""fineweb.py: the same bytes as the plain loop, whatever the documents and the workers."""

import gzip
import json
import signal
import subprocess
import sys
import time

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from conftest import ROOT, needs_gpt2_vocabulary, run_script

import fineweb
from support import shards
from support.cli import UserError
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
    return list("".join("\ufffd" if 0xD800 <= ord(c) < 0xE000 else c for c in text).encode())


def contents(folder):
    """Split, index and tokens of the shards in a folder."""
    return [
        (p.name.split("_")[-2], int(p.stem.split("_")[-1]), np.load(p).tolist())
        for p in sorted(folder.glob("*.npy"), key=lambda p: p.name.split("_")[-1])
    ]


def source_of(texts):
    return fineweb.Source("texts", None, "texts", lambda: iter(texts))


@pytest.mark.parametrize("shard_size", [2, 3, 100, 255, 256, 700])
def test_shards_equal_the_plain_loop(tmp_path, shard_size):
    fineweb.make_shards(source_of(ADVERSARIAL), tmp_path, tokenizer="bytes", shard_size=shard_size)
    expected = plain_loop(ADVERSARIAL, utf8_or_replaced, 256, shard_size)
    assert contents(tmp_path) == [("train" if i else "val", i, tokens) for i, tokens in enumerate(expected)]
    assert all(np.load(p).dtype == np.uint16 for p in tmp_path.glob("*.npy"))


@needs_gpt2_vocabulary
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_workers_change_nothing(tmp_path, monkeypatch, workers):
    import tiktoken

    encoding = tiktoken.get_encoding("gpt2")
    monkeypatch.setattr(fineweb, "BATCH_CHARS", 50)  # so that these few documents are many messages
    texts = ADVERSARIAL * 5
    fineweb.make_shards(source_of(texts), tmp_path, tokenizer="gpt2", shard_size=300, workers=workers)
    expected = plain_loop(texts, encoding.encode_ordinary, 50256, 300)
    assert [tokens for _, _, tokens in contents(tmp_path)] == expected


def test_the_manifest_says_what_the_shards_are(tmp_path):
    fineweb.make_shards(
        fineweb.Source("some texts", "abc123", "texts", lambda: iter(ADVERSARIAL)),
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


def test_without_arguments_it_is_fineweb_edu(tmp_path, monkeypatch):
    """The hub is stood in for; what it is asked, and what comes of the answer, is ours."""
    import types

    asked = {}

    def load_dataset(name, config, **options):
        asked.update(options, name=name, config=config)
        return [{"text": f"page {i}", "id": i} for i in range(9)]

    class HfApi:
        def dataset_info(self, name):
            return types.SimpleNamespace(sha="87f0914")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    monkeypatch.setattr("huggingface_hub.HfApi", HfApi)
    monkeypatch.setattr(fineweb, "get_tokenizer", lambda name: None)
    monkeypatch.setattr(
        fineweb, "encoded", lambda documents, name, workers: (np.arange(len(t), dtype=np.uint16) for t in documents)
    )
    fineweb.main(["--shard-size", "20"])
    assert asked == {
        "name": "HuggingFaceFW/fineweb-edu", "config": "sample-10BT", "split": "train", "streaming": True, "revision": "87f0914",
    }  # fmt: skip
    manifest = shards.read_manifest(tmp_path / "edu_fineweb10B")
    assert (manifest["tokenizer"], manifest["revision"]) == ("gpt2", "87f0914")
    assert manifest["source"] == "HuggingFaceFW/fineweb-edu/sample-10BT [train]"
    files = [shard["file"] for shard in manifest["shards"]]
    assert files == ["edufineweb_val_000000.npy", "edufineweb_train_000001.npy", "edufineweb_train_000002.npy"]


def test_the_same_command_again_goes_on_or_is_done(tmp_path):
    class Died(Exception):
        pass

    def dying():
        yield "a" * 250
        raise Died

    with pytest.raises(Died):
        fineweb.make_shards(fineweb.Source("texts", None, "texts", dying), tmp_path, tokenizer="bytes", shard_size=100)
    with pytest.raises(UserError, match='are not complete .* Run the same "python fineweb.py" again'):
        shards.open_shards(tmp_path, "train")
    texts = ["a" * 250, "b" * 30]
    fineweb.make_shards(source_of(texts), tmp_path, tokenizer="bytes", shard_size=100)
    assert [t for _, _, t in contents(tmp_path)] == plain_loop(texts, utf8_or_replaced, 256, 100)
    stamps = {p: p.stat().st_mtime_ns for p in tmp_path.iterdir()}
    fineweb.make_shards(source_of(texts), tmp_path, tokenizer="bytes", shard_size=100)
    assert stamps == {p: p.stat().st_mtime_ns for p in tmp_path.iterdir()}


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
    (tmp_path / "a.jsonl").write_text('{"text": "another one"}\n')
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
        ("--input . --output out", ". names no files, only folders"),
        ("--input book.pdf --output out", "book.pdf is neither .txt, .jsonl nor .parquet"),
        ("--input latin.txt --output out", "latin.txt is not UTF-8 text"),
        ("--input bad.jsonl --output out", "bad.jsonl, line 2 is not JSON"),
        ("--input list.jsonl --output out", "list.jsonl, line 1 has no text in 'text', but no fields"),
        (
            "--input other.jsonl --output out",
            "other.jsonl, line 1 has no text in 'text', but the fields body. Choose one with --text-field",
        ),
        ("--input fake.parquet --output out", "fake.parquet is not a parquet file"),
        ("--input bytes.jsonl --output out", "bytes.jsonl, line 1 is not JSON"),
        ("--input deep.jsonl --output out", "deep.jsonl, line 1 is not JSON"),
        ("--input null.parquet --output out", "null.parquet, row 1 has no text in 'text'"),
        ("--input empty.jsonl --output out", "there is no text in empty.jsonl"),
        ("--input a.txt", "name a folder for the shards with --output"),
        ("--input a.txt --demo", "exclude each other. Choose one"),
        ("--input a.txt --output out --val-fraction 1.5", "--val-fraction must be more than 0 and less than 1"),
        ("--input a.txt --output out --shard-size 0", "--shard-size must be 2 or more"),
        ("--input a.txt --output a.txt", "cannot write to a.txt"),
        ("--input a.txt --output out --tokenizer gpt5", "invalid choice: 'gpt5'"),
        ("--dataset no/such --output out", "cannot open the data set no/such"),
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
    (tmp_path / "deep.jsonl").write_text("[" * 100000)
    pa.parquet.write_table(pa.table({"text": ["fine", None]}), tmp_path / "null.parquet")
    from support.cli import run

    with pytest.raises(SystemExit) as exit:
        run(lambda: fineweb.main(flags.split() + ([] if "--tokenizer" in flags else ["--tokenizer", "bytes"])))
    captured = capsys.readouterr()
    assert exit.value.code == 2
    assert captured.err.startswith("error: ") and message in captured.err
    assert not list(tmp_path.glob("out/*.npy"))
