"""Encodings that are trained on a text: against the method written out, against Hugging Face, and as shards."""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from helpers import TINY_MODEL_FLAGS
from hub_server import running_hub
from shard_helpers import files_in
from training import NEW_RUN, ONE_PROCESS, configure, train

import fineweb
import hellaswag
import sample
from support.cli import UserError
from support.data import bpe, shards
from support.data.text_files import Documents
from support.data.tokenizer import find_tokenizer
from train_gpt2 import GPT, GPTConfig

RHYME = "one two three four five, once I caught a fish alive; six seven eight nine ten, then I let it go again. "
TEXT = "".join(RHYME + f"{n} and {n + 1} are {2 * n + 1}.\n" for n in range(300))
SMALL = [*TINY_MODEL_FLAGS, *"--max-steps 4 --val-tokens 512 --device cpu --dtype fp32 --sample-every 0".split()]


def pairs_by_count(text, merges):
    """The frequencies of neighbouring tokens in the words of a text after some merges."""
    counts = Counter()
    for word, times in Counter(re.findall(r" ?[a-z]+| ?[^\sa-z]+|\s+", text)).items():
        parts = [bytes([b]) for b in word.encode()]
        for a, b in merges:
            i = 0
            while i < len(parts) - 1:
                if (parts[i], parts[i + 1]) == (a, b):
                    parts[i : i + 2] = [a + b]
                i += 1
        for pair in pairwise(parts):
            counts[pair] += times
    return counts


def test_each_merge_is_the_most_frequent_pair():
    """As in Sennrich et al. (arXiv:1508.07909): all pairs are counted again after every merge."""
    text = "low lower lowest slow slower slowest new newer newest wide wider widest " * 3 + "blow low low"
    tokens = bpe.train_bpe([text], 257 + 12).token_bytes()
    assert sorted(tokens[:256]) == [bytes([i]) for i in range(256)] and len(tokens) == 268
    merges = []
    for token in tokens[256:]:
        counts = pairs_by_count(text, merges)
        made_by = [pair for pair in counts if b"".join(pair) == token]
        assert max(counts[pair] for pair in made_by) == max(counts.values()), token
        merges.append(max(made_by, key=counts.get))


def test_a_text_with_few_pairs_has_few_tokens():
    assert bpe.train_bpe(["ab ab"], 1000).token_bytes()[256:] == [b"ab"]


def test_words_without_an_end_take_no_time_without_an_end():
    """Tokens stay short, and lone surrogates become U+FFFD, as with GPT-2's encoding."""
    letters = "".join(np.random.default_rng(0).choice(list("ACGT"), 100_000))
    for text in ("x" * 30_000, letters, " " * 30_000 + "a", "hi \ud800 there " * 3):
        tokenizer = bpe.train_bpe([text], 512)
        assert max(map(len, tokenizer.token_bytes())) <= 64 and json.loads(tokenizer.json)
        assert tokenizer.decode(tokenizer.encode(text[:1000])) == text[:1000].replace("\ud800", "\ufffd")


def test_the_vocabulary_fits_the_text():
    sizes = {0: 512, 1e6: 2048, 2e6: 4096, 1e9: 32768}
    assert {chars: bpe.fitting_vocab_size(chars) for chars in sizes} == sizes


def test_the_held_out_text_is_not_trained_on():
    corpus = Documents("d", ["x" * 60, "y" * 30, "z" * 10])
    assert "".join(bpe.training_texts(corpus)) == "x" * 60 + "y" * 30
    assert "".join(bpe.training_texts(Documents("d", ["0123456789" * 10]))) == "0123456789" * 9
    assert bpe.training_texts(Documents("d", [])) == []


def test_nor_is_that_of_a_text_that_is_just_longer_than_what_is_trained_on(monkeypatch):
    monkeypatch.setattr(bpe, "TRAINING_CHARS", 100)
    assert "".join(bpe.training_texts(Documents("d", ["x" * 95 + "y" * 10]))) == "x" * 95


def test_nor_is_what_comes_after_max_tokens():
    assert (
        "".join(bpe.training_texts(Documents("d", ["0123456789" * 10]), max_tokens=20)) == "0123456789" * 3 + "012345"
    )
    assert len("".join(bpe.training_texts(Documents("d", ["\u4e2d" * 100]), max_tokens=30))) == 18  # of 60 bytes


def test_nor_is_a_larger_fraction(tmp_path, monkeypatch):
    trained_on, train_bpe = [], bpe.train_bpe
    monkeypatch.setattr(bpe, "train_bpe", lambda texts, size: trained_on.extend(texts) or train_bpe(texts, size))
    fineweb.make_shards(Documents("d", ["x" * 600, "y" * 400]), tmp_path, tokenizer="bpe", val_fraction=0.4)
    assert trained_on == ["x" * 600]


def test_a_note_says_that_the_tokenizer_was_trained_on_validated_text(tmp_path, capsys):
    """Whose first shard is held out, which was not known when the training began."""
    make(tmp_path / "large")
    assert "note: the tokenizer was trained on the beginning of the text" in capsys.readouterr().out
    make(tmp_path / "small", RHYME * 9)
    fineweb.make_shards(Documents("d", [TEXT]), tmp_path / "bytes", tokenizer="bytes", shard_size=3000)
    fineweb.make_shards(
        Documents("d", [TEXT]), tmp_path / "given", tokenizer="bpe", tokenizer_from=tmp_path / "large", shard_size=3000
    )
    assert "note: the tokenizer" not in capsys.readouterr().out


def make(folder, text=TEXT, **options):
    return fineweb.make_shards(
        Documents("rhymes", [text, text[:999]]), folder, tokenizer="bpe", shard_size=3000, **options
    )


def test_shards_have_the_text_and_do_not_depend_on_threads_and_interruptions(tmp_path, monkeypatch):
    make(tmp_path / "a")
    tokenizer = shards.read_tokenizer(tmp_path / "a")
    tokens = np.concatenate(
        [np.load(path) for path in sorted((tmp_path / "a").glob("*.npy"), key=lambda p: p.name[-10:])]
    )
    assert tokenizer.decode(tokens.tolist()) == f"<|endoftext|>{TEXT}<|endoftext|>{TEXT[:999]}"
    make(tmp_path / "b", threads=2)
    assert files_in(tmp_path / "b") == files_in(tmp_path / "a")
    # as after a kill: shards are missing, and the manifest does not list them
    listed = json.loads((tmp_path / "b" / "manifest.json").read_text())
    for shard in listed["shards"][1:]:
        (tmp_path / "b" / shard["file"]).unlink()
    listed |= {"complete": False, "parts": [], "shards": listed["shards"][:1]}
    (tmp_path / "b" / "manifest.json").write_text(json.dumps(listed))
    monkeypatch.setattr(bpe, "train_bpe", lambda *args: pytest.fail("trained again"))
    make(tmp_path / "b")
    assert files_in(tmp_path / "b") == files_in(tmp_path / "a")


def test_a_text_that_is_longer_than_what_is_trained_on(monkeypatch):
    monkeypatch.setattr(bpe, "TRAINING_CHARS", 100)
    assert "".join(bpe.training_texts(Documents("d", ["x" * 60, "y" * 60, "z"]))) == "x" * 60 + "y" * 40


def test_an_altered_tokenizer_is_noticed(tmp_path):
    make(tmp_path / "data")
    path = tmp_path / "data" / "tokenizer.json"
    altered = json.loads(path.read_text())
    altered["model"]["merges"].reverse()
    path.write_text(json.dumps(altered))
    for read in (shards.read_tokenizer, fineweb.check_shards):
        with pytest.raises(UserError, match=r"tokenizer\.json is missing, or was altered"):
            read(tmp_path / "data")
    with pytest.raises(UserError, match="is not a byte-level BPE like fineweb.py's"):
        find_tokenizer(path.parent)
    make(tmp_path / "again")
    make(tmp_path / "data")  # trains again
    assert files_in(tmp_path / "data") == files_in(tmp_path / "again")


def test_parts_by_a_lost_tokenizer_are_not_used(tmp_path, monkeypatch):
    """It is trained again, maybe by a different version of the library."""
    make(tmp_path / "data", only_parts=(1, 1))
    (tmp_path / "data" / "tokenizer.json").unlink()
    train_bpe = bpe.train_bpe
    monkeypatch.setattr(bpe, "train_bpe", lambda texts, size: train_bpe([TEXT[::-1]], size))
    make(tmp_path / "data")
    make(tmp_path / "expected")
    assert files_in(tmp_path / "data") == files_in(tmp_path / "expected")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a run on a text, with a checkpoint model_00004."""
    folder = tmp_path_factory.mktemp("bpe")
    (folder / "text.txt").write_text(TEXT)
    flags = ["--text", str(folder / "text.txt"), "--out", str(folder / "run"), *SMALL]
    train(configure(flags)[0], ONE_PROCESS, NEW_RUN)
    return folder / "run"


def test_a_run_on_a_text_uses_it_unless_told_otherwise(run, capsys):
    tokenizer = find_tokenizer(run / "model_00004")
    assert (run / "model_00004" / "tokenizer.json").read_text() == (run / "data" / "tokenizer.json").read_text()
    assert tokenizer.vocab_size == GPT.from_pretrained(run / "model_00004").config.vocab_size == 512
    sample.main(["--model", str(run / "model_00004"), "--prompt", "once I ", "-n", "1", "-d", "cpu"])
    assert capsys.readouterr().out.startswith("once I ")


def test_fine_tuning_keeps_the_tokenizer_of_the_base(run, tmp_path):
    (tmp_path / "other.txt").write_text("nine or ten fish, " * 500)
    flags = ["--text", str(tmp_path / "other.txt"), "--init-from", str(run / "model_00004"), *SMALL[8:]]
    train(configure([*flags, "--out", str(tmp_path / "tuned")])[0], ONE_PROCESS, NEW_RUN)
    assert (tmp_path / "tuned/data/tokenizer.json").read_text() == (run / "data/tokenizer.json").read_text()


def test_a_resumed_run_does_not_look_for_its_base(run, tmp_path):
    """Its shards are there, and the model may be gone."""
    base = shutil.copytree(run / "model_00004", tmp_path / "base")
    (tmp_path / "other.txt").write_text("nine or ten fish, " * 500)
    flags = ["--text", str(tmp_path / "other.txt"), "--init-from", str(base), *SMALL[8:]]
    train(configure([*flags, "--out", str(tmp_path / "tuned")])[0], ONE_PROCESS, NEW_RUN)
    shutil.rmtree(base)
    config, start = configure(["--resume", "--out", str(tmp_path / "tuned")])
    train(config, ONE_PROCESS, start)


def test_a_checkpoint_whose_tokenizer_has_another_size_is_refused(tmp_path):
    GPT(GPTConfig(block_size=8, vocab_size=300, n_layer=1, n_head=1, n_embd=4)).save_pretrained(tmp_path)
    bpe.train_bpe([TEXT], 299).save_pretrained(tmp_path, 8)
    with pytest.raises(UserError, match=r"has 300 tokens, but its tokenizer \(bpe\) has 299"):
        sample.main(["--model", str(tmp_path), "-d", "cpu"])


@pytest.mark.slow
def test_an_uploaded_checkpoint_is_used_from_the_hub(run, tmp_path, monkeypatch, capsys):
    """What `hf upload NAME model --exclude trainer.pt --exclude checkpoint.json` puts there is enough."""
    files = {path.name: path.read_bytes() for path in (run / "model_00004").iterdir()}
    del files["trainer.pt"], files["checkpoint.json"]
    (tmp_path / "other.txt").write_text("nine or ten fish, " * 500)
    flags = ["--text", "other.txt", "--out", "tuned", *SMALL[8:]]
    with running_hub(monkeypatch, tmp_path) as hub:
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
        hub.repositories["me/own"] = files
        sample.main(["--model", "me/own", "--prompt", "once I ", "-n", "1", "--temperature", "0", "-d", "cpu"])
        from_hub = capsys.readouterr()
        with pytest.raises(
            UserError, match="was trained on bpe tokens, but HellaSwag's scores are defined on GPT-2 tokens"
        ):
            hellaswag.main(["--model", "me/own", "-d", "cpu"])
        train(configure([*flags, "--init-from", "me/own", "--lora-rank", "2"])[0], ONE_PROCESS, NEW_RUN)
        tuned = Path("tuned/model_00004")
        paths = [path.relative_to(tuned).as_posix() for path in tuned.rglob("*") if path.is_file()]
        hub.repositories["me/tuned"] = {path: (tuned / path).read_bytes() for path in paths}
        sample.main(["--model", "me/tuned", "--prompt", "once I ", "-n", "1", "-d", "cpu"])
        fineweb.main(["--input", "other.txt", "--output", "more", "--tokenizer", "bpe", "--tokenizer-from", "me/own", "--split-documents"])  # fmt: skip
        other = {**files, "tokenizer.json": bpe.train_bpe([TEXT[::-1]], 512).json.encode()}
        hub.repositories["me/other"] = other
        with pytest.raises(UserError, match="me/other has a different tokenizer from the shards in more"):
            train(configure(["--data", "more", "--init-from", "me/other", "--total-batch-size", "256", "--out", "x", *SMALL[8:]])[0], ONE_PROCESS, NEW_RUN)  # fmt: skip
    assert (tmp_path / "tuned/data/tokenizer.json").read_text() == (run / "data/tokenizer.json").read_text()
    assert (tmp_path / "more/tokenizer.json").read_text() == (run / "data/tokenizer.json").read_text()
    capsys.readouterr()
    sample.main(
        ["--model", str(run / "model_00004"), "--prompt", "once I ", "-n", "1", "--temperature", "0", "-d", "cpu"]
    )
    assert from_hub.out == capsys.readouterr().out and not from_hub.err.startswith("warning")
