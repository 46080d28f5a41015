"""Encoding: the same tokens for any engine, number of threads and batches; and what cannot be encoded."""

import itertools
import json

import numpy as np
import pytest
from helpers import needs_gpt2_vocabulary, run_script
from shard_helpers import (
    ENGINES,
    adversarial_texts,
    corpus_of,
    plain_encoder,
    plain_loop,
    set_batch_chars,
    tokens_in,
    valid_unicode,
)

import fineweb
from support.cli import UserError
from support.data import encode, shards
from support.data.make_shards import make_shards
from support.data.text_files import TextFiles
from support.data.tokenizer import get_tokenizer


@pytest.mark.parametrize("tokenizer, engine", ENGINES)
@pytest.mark.parametrize("batch_chars", [1, 50, 3000])
def test_adversarial_documents_equal_the_plain_loop(tmp_path, monkeypatch, tokenizer, engine, batch_chars):
    set_batch_chars(monkeypatch, batch_chars)
    for seed, (shard_size, n) in enumerate(((2, 9), (1000, 40))):
        texts = [*(t for t in adversarial_texts(seed, n) if len(t) < 20 * shard_size), "not too short"]
        out = tmp_path / str(seed)
        make_shards(corpus_of(texts), out, tokenizer=tokenizer, engine=engine, shard_size=shard_size)
        expected = plain_loop(texts, *plain_encoder(tokenizer), shard_size)
        assert tokens_in(out) == expected
        manifest = shards.read_manifest(out)
        eot = manifest["vocab_size"] - 1
        assert [shard["documents"] for shard in manifest["shards"]] == [part.count(eot) for part in expected]


@pytest.mark.parametrize("tokenizer, engine", ENGINES)
def test_the_number_of_threads_changes_nothing(tmp_path, monkeypatch, tokenizer, engine):
    """gigatoken starts its threads once: it has processes of its own."""
    monkeypatch.chdir(tmp_path)
    texts = [text.replace("\r", "") for text in valid_unicode(adversarial_texts(3, 90))]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    flags = ["--input", "a.jsonl", "--tokenizer", tokenizer, "--engine", engine, "--shard-size", "1500"]
    expected = plain_loop(texts, *plain_encoder(tokenizer), 1500)
    for workers in (1, 2, 8):
        of_run = [*flags, "--output", str(workers), "--workers", str(workers)]
        if engine == "gigatoken":
            done = run_script("fineweb.py", *of_run, cwd=tmp_path)
            assert done.returncode == 0, done.stderr
        else:
            fineweb.main(of_run)
        assert tokens_in(tmp_path / str(workers)) == expected


def test_no_more_is_read_than_a_batch():
    """So memory does not grow with the corpus."""
    taken = []
    texts = ["x" * 1_000_000] * 100
    batches = encode.batches_of((taken.append(text) or text, True) for text in texts)
    for number, batch in enumerate(batches, start=1):
        assert sum(len(text) for text, _ in batch) == 5_000_000 and len(taken) == 5 * number
    assert number == 20


# ---- gigatoken


@needs_gpt2_vocabulary
@pytest.mark.parametrize(
    "wrong", [lambda ids, offsets: (ids[::-1], offsets), lambda ids, offsets: (ids, np.maximum(offsets - 1, 0))]
)
def test_a_difference_between_the_engines_stops_the_run(tmp_path, monkeypatch, wrong):
    compare = encode.GigatokenEncoder._compare_sample
    monkeypatch.setattr(
        encode.GigatokenEncoder, "_compare_sample", lambda self, texts, *encoded: compare(self, texts, *wrong(*encoded))
    )
    with pytest.raises(UserError, match="gigatoken and tiktoken disagree .* with --engine tiktoken"):
        make_shards(corpus_of(["some words", "and more of them"] * 9), tmp_path, engine="gigatoken")
    assert not list(tmp_path.glob("*.npy"))


@needs_gpt2_vocabulary
def test_every_batch_is_compared(monkeypatch):
    compared = []
    reference = get_tokenizer("gpt2")
    gigatoken = encode.GigatokenEncoder(reference)
    monkeypatch.setattr(
        reference, "encode_array", lambda text: compared.append(text) or type(reference).encode_array(reference, text)
    )
    batches = [["a b c"], [], ["one", "two", "three"], ["long words " * 9999] * 30]
    for texts in batches:
        gigatoken(texts)
    gigatoken(["日" * 99_999])  # without a space
    assert compared.pop() == "日" * 99_999
    assert [len(set(batch).intersection(compared)) for batch in batches[:3]] == [1, 0, 2]
    assert sum(map(len, compared[3:])) >= 30 * 9999 * 11 * encode.COMPARED_FRACTION


@needs_gpt2_vocabulary
@pytest.mark.parametrize("limit, value", [("MAX_CACHE_BYTES", 10 << 20), ("MAX_CACHED_CHARS", 7 * 10**5)])
def test_gigatoken_is_loaded_again_before_its_cache_is_large(monkeypatch, limit, value):
    loads, memory = [], itertools.count(0, 3 << 20)
    load = encode.GigatokenEncoder._load
    monkeypatch.setattr(encode.GigatokenEncoder, "_load", lambda self: loads.append(1) or load(self))
    monkeypatch.setattr(encode, "_private_memory", lambda: next(memory))  # 3 MB more at every call
    monkeypatch.setattr(encode, limit, value)
    gigatoken = encode.GigatokenEncoder(get_tokenizer("gpt2"))
    for i in range(13):
        gigatoken([f"{i} words " * 25_000])
    assert len(loads) == 1 + 12 // 4  # after 12 MB, or 800,000 characters


# ---- failures


@needs_gpt2_vocabulary
def test_what_tiktoken_cannot_encode_is_named(tmp_path):
    texts = ["fine " * 10**6, " " * 2_000_000 + "a"]
    (tmp_path / "spaces.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    source = TextFiles([tmp_path / "spaces.jsonl"])
    with pytest.raises(UserError, match=r"a document of .*spaces\.jsonl cannot be encoded: .*stack.* million spaces"):
        make_shards(source, tmp_path / "out", engine="tiktoken", threads=2)
