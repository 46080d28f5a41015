"""Encoding: the same tokens for any engine, workers and batches; and what happens when one of them fails."""

import functools
import itertools
import json
import os
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from helpers import ROOT, needs_gpt2_vocabulary, wait_for
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
from support.data import encode, readers, shards
from support.data.corpus import Batch
from support.data.tokenizer import get_tokenizer


@pytest.mark.parametrize("tokenizer, engine", ENGINES)
@pytest.mark.parametrize("batch_chars", [1, 50, 3000])
def test_adversarial_documents_equal_the_plain_loop(tmp_path, monkeypatch, tokenizer, engine, batch_chars):
    set_batch_chars(monkeypatch, batch_chars)  # long documents are cut at spaces
    for seed, (shard_size, n) in enumerate(((2, 9), (1000, 40))):
        texts = [*(t for t in adversarial_texts(seed, n) if len(t) < 20 * shard_size), "not too short"]
        out = tmp_path / str(seed)
        fineweb.make_shards(corpus_of(texts), out, tokenizer=tokenizer, engine=engine, shard_size=shard_size)
        expected = plain_loop(texts, *plain_encoder(tokenizer), shard_size)
        assert tokens_in(out) == expected
        manifest = shards.read_manifest(out)
        eot = manifest["vocab_size"] - 1
        assert [shard["documents"] for shard in manifest["shards"]] == [part.count(eot) for part in expected]


@pytest.mark.slow
@needs_gpt2_vocabulary
def test_workers_change_nothing(tmp_path, monkeypatch):
    """Processes that read their own row groups, parse their own lines, or are sent texts."""
    set_batch_chars(monkeypatch, 2000)
    monkeypatch.setattr(readers, "MAX_ROW_GROUP_BYTES", 4000)
    texts = [text.replace("\r", "") for text in valid_unicode(adversarial_texts(3, 90))]
    pa.parquet.write_table(pa.table({"text": texts[:20]}), tmp_path / "a_small.parquet", row_group_size=3)
    pa.parquet.write_table(pa.table({"text": texts[20:40]}), tmp_path / "b_large.parquet")
    (tmp_path / "c_lines.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts[40:80]))
    for i, text in enumerate(texts[80:]):
        (tmp_path / f"d_{i}.txt").write_text(text, encoding="utf-8")
    corpus = fineweb.file_source([str(tmp_path)], "text")
    fineweb.make_shards(corpus, tmp_path / "out", shard_size=1500, workers=3)
    assert tokens_in(tmp_path / "out") == plain_loop(texts, *plain_encoder("gpt2"), 1500)


# ---- gigatoken


@needs_gpt2_vocabulary
@pytest.mark.parametrize("wrong", [lambda ids: ids[::-1], lambda ids: [*ids, 5]])
def test_a_difference_between_the_engines_stops_the_run(tmp_path, monkeypatch, wrong):
    right = encode.GigatokenEncoder._encode
    monkeypatch.setattr(encode.GigatokenEncoder, "_encode", lambda self, texts: [wrong(x) for x in right(self, texts)])
    monkeypatch.setattr(encode, "_load_encoder", encode._load_encoder.__wrapped__)  # not one that another test loaded
    with pytest.raises(UserError, match="gigatoken and tiktoken disagree .* with --engine tiktoken"):
        fineweb.make_shards(corpus_of(["some words", "and more of them"] * 9), tmp_path, engine="gigatoken")
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
    monkeypatch.setattr(encode, "_resident_memory", lambda: next(memory))  # 3 MB more at every call
    monkeypatch.setattr(encode, limit, value)
    gigatoken = encode.GigatokenEncoder(get_tokenizer("gpt2"))
    for i in range(12):
        gigatoken([f"{i} words " * 25_000])
    assert len(loads) == 1 + 12 // 4  # after 12 MB, or 800,000 characters


# ---- failures


@needs_gpt2_vocabulary
@pytest.mark.parametrize("workers", [1, 2])
def test_what_tiktoken_cannot_encode_is_named(tmp_path, workers):
    texts = ["fine " * 10**6, " " * 2_000_000 + "a"]
    (tmp_path / "spaces.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    source = fineweb.file_source([str(tmp_path / "spaces.jsonl")], "text")
    with pytest.raises(UserError, match=r"tiktoken cannot encode a document of .*spaces\.jsonl, from line 2: .*stack"):
        fineweb.make_shards(source, tmp_path / "out", engine="tiktoken", workers=workers)


WORKERS = """
import contextlib, functools, multiprocessing, os, signal, sys, threading
from support.cli import run_cli
from support.data import encode
from support.data.corpus import Batch

encoded = threading.Event()

def send_workers(number):
    while not encoded.is_set():
        for worker in multiprocessing.active_children():
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker.pid, number)

def main():
    case = sys.argv[1]
    signals = {"killed at start": signal.SIGKILL, "interrupted at start": signal.SIGINT}
    if case in signals:
        threading.Thread(target=send_workers, args=[signals[case]], daemon=True).start()
    if case == "not started":
        multiprocessing.set_executable("/nowhere")
    text = functools.partial(list, ["word " * 500_000])
    if case == "killed with a batch":
        text = functools.partial(os._exit, 9)
    batches = (Batch(texts=text, cursor=[i], where="here") for i in range(10**6))
    for _ in encode.encode_batches(batches, "bytes", "tiktoken", 2):
        encoded.set()
        if case == "interrupted when one is stopped":
            os.kill(multiprocessing.active_children()[0].pid, signal.SIGSTOP)
        os.killpg(0, signal.SIGINT)

if __name__ == "__main__":
    run_cli(main)
"""


@pytest.mark.parametrize(
    "case, code, message",
    [
        ("killed at start", 2, "error: a worker"),
        ("killed with a batch", 2, "error: a worker"),
        ("not started", 2, "error: a worker"),
        ("interrupted at start", 130, "\ninterrupted\n"),
        ("interrupted when one is stopped", 130, "\ninterrupted\n"),
    ],
)
def test_lost_workers_are_reported_and_ctrl_c_ends_all_of_them_without_a_word(tmp_path, case, code, message):
    """Ctrl-C reaches all processes of a terminal. concurrent.futures.ProcessPoolExecutor waits forever in some cases."""
    (tmp_path / "workers.py").write_text(WORKERS)
    command = [sys.executable, tmp_path / "workers.py", case]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    options = dict(env=environment, capture_output=True, text=True, start_new_session=True, timeout=60)
    run = subprocess.run(command, **options)
    assert run.returncode == code and run.stderr.startswith(message), run.stderr
    assert run.stderr.count("\n") == message.count("\n") + (code == 2)


def test_batches_are_encoded_a_few_at_a_time(monkeypatch):
    """So memory does not grow with the corpus."""
    taken = []
    one = functools.partial(list, ["x"])
    batches = (taken.append(i) or Batch(texts=one, cursor=[i], where="here") for i in range(50))
    for number, (batch, tokens) in enumerate(encode.encode_batches(batches, "bytes", "tiktoken", 2)):
        assert batch.cursor == [number] and tokens.tolist() == [256, 120] and tokens.dtype == np.uint16
        assert len(taken) <= number + 6


@pytest.mark.slow
@needs_gpt2_vocabulary
def test_workers_exit_when_the_command_is_killed(tmp_path):
    (tmp_path / "big.jsonl").write_text('{"text": "%s"}\n' % ("some words " * 1000) * 4000)
    flags = "--input big.jsonl --output out --workers 2 --shard-size 1000".split()
    command = [sys.executable, str(ROOT / "fineweb.py"), *flags]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert wait_for(lambda: list(tmp_path.glob("out/*.npy"))) and process.poll() is None  # the workers are encoding
    process.kill()
    process.communicate(timeout=30)  # returns when the last process that could write to the pipe has exited
