"""Tokenizers: against tiktoken, against Hugging Face, and without a network."""

import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import GPT2_VOCABULARY, ROOT, TINY_TRAINING_FLAGS, needs_gpt2_vocabulary
from runs import log_without_seconds
from shard_helpers import adversarial_texts, corpus_of, write_shard
from training import NEW_RUN, ONE_PROCESS, config_of, configure, resumed, train, trained

import fineweb
import hellaswag
import sample
from support.checkpoints import huggingface
from support.checkpoints.huggingface import find_tokenizer_folder
from support.cli import UserError
from support.data import bpe, shards
from support.data import tokenizer as tokenizer_module
from support.data.make_shards import make_shards
from support.data.tokenizer import (
    BpeTokenizer,
    Tokenizer,
    find_tokenizer,
    get_tokenizer,
    printable_bytes,
    tokenizer_json,
    tokenizer_of_model,
)
from train_gpt2 import GPT, GPTConfig

NOWHERE = "http://127.0.0.1:9"  # nobody listens
TEXTS = [
    "Hello, I'm a language model,",
    "",
    " \n\n\t x",
    "naïve 日本語 🙂 \u0001\u00a0",
    "we've 123 it's<|endoftext|>a",
    "  def f(x):\n      return x",
]


def test_bytes_are_utf8_and_an_end_of_text():
    tokenizer = get_tokenizer("bytes")
    assert [tokenizer.encode(text) for text in TEXTS] == [list(text.encode()) for text in TEXTS]
    assert (tokenizer.vocab_size, tokenizer.eot) == (257, 256)
    assert tokenizer.decode([72, 256, 105]) == "H<|endoftext|>i"


@needs_gpt2_vocabulary
def test_gpt2_equals_tiktoken():
    import tiktoken

    tokenizer, reference = get_tokenizer("gpt2"), tiktoken.get_encoding("gpt2")
    assert tokenizer.encode("Hello, I'm a language model,") == [15496, 11, 314, 1101, 257, 3303, 2746, 11]
    assert [tokenizer.encode(text) for text in TEXTS] == [reference.encode_ordinary(text) for text in TEXTS]


@pytest.mark.parametrize("name", ["bytes", "bpe", pytest.param("gpt2", marks=needs_gpt2_vocabulary)])
def test_hugging_face_opens_the_saved_tokenizer(name, tmp_path):
    from transformers import AutoTokenizer, GPT2TokenizerFast

    tokenizer = bpe.train_bpe(TEXTS * 9, 300) if name == "bpe" else get_tokenizer(name)
    tokenizer.save_pretrained(tmp_path, model_max_length=64)
    opened, loaded = AutoTokenizer.from_pretrained(tmp_path), find_tokenizer(tmp_path)
    assert (
        loaded.name == name
        and len(opened) == tokenizer.vocab_size == loaded.vocab_size
        and opened.model_max_length == 64
    )
    assert opened.eos_token_id == opened.bos_token_id == tokenizer.eot == tokenizer.vocab_size - 1
    options = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert options["model_input_names"] == GPT2TokenizerFast.model_input_names  # transformers 4 has another default
    for text in [t.replace("<|endoftext|>", "") for t in TEXTS]:
        ids = tokenizer.encode(text)
        assert opened(text)["input_ids"] == ids == loaded.encode(text) == tokenizer.encode_array(text).tolist()
        assert opened.decode(ids) == text == tokenizer.decode(ids)
        assert tokenizer.count_bytes(np.array(ids, int)) == len(text.encode())
    assert opened("a<|endoftext|>")["input_ids"] == [*tokenizer.encode("a"), tokenizer.eot]
    assert tokenizer.decode(tokenizer.encode("a<|endoftext|>")) == "a<|endoftext|>"
    assert tokenizer.eot not in tokenizer.encode("a<|endoftext|>")


# -----------------------------------------------------------------------------
# The tokenizer of a model: what its files say, not what its size suggests


def pairs_of_bytes(vocab_size: int, reverse: bool = False) -> BpeTokenizer:
    """A trained tokenizer of any size: all bytes, then pairs of them."""
    pairs = [(a, b) for a in range(256) for b in range(256)]
    pairs = (pairs[::-1] if reverse else pairs)[: vocab_size - 257]
    printable = printable_bytes()
    merges = [(printable[a], printable[b]) for a, b in pairs]
    return BpeTokenizer(tokenizer_json([*(bytes([a]) for a in range(256)), *map(bytes, pairs)], merges))


def save_model(folder: Path, vocab_size: int, tokenizer: Tokenizer | None = None) -> Path:
    GPT(GPTConfig(block_size=16, vocab_size=vocab_size, n_layer=1, n_head=1, n_embd=4)).save_pretrained(folder)
    if tokenizer:
        tokenizer.save_pretrained(folder, 16)
    return folder


@pytest.mark.slow
@needs_gpt2_vocabulary
def test_gpt2s_tokenizer_is_known_by_its_content(tmp_path):
    """As Hugging Face writes it in any version, and as we do; the older vocab.json and merges.txt are to be converted."""
    hub, ours = tmp_path / "hub", tmp_path / "ours"
    for folder in (hub, ours):
        folder.mkdir()
    for name, url in (("merges.txt", "vocab.bpe"), ("vocab.json", "encoder.json")):
        url = f"https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/{url}"
        shutil.copy(GPT2_VOCABULARY.parent / hashlib.sha1(url.encode()).hexdigest(), hub / name)
    (hub / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(
        UserError, match=r"has its tokenizer in vocab\.json and merges\.txt\. Make a tokenizer\.json"
    ) as error:
        find_tokenizer(hub)
    _, option, code = shlex.split(str(error.value).partition("from them: ")[2])
    assert option == "-c"
    exec(code)
    get_tokenizer("gpt2").save_pretrained(ours, 1024)
    assert [find_tokenizer(folder).name for folder in (hub, ours)] == ["gpt2"] * 2
    content = json.loads((hub / "tokenizer.json").read_text())
    assert content["model"]["merges"] == json.loads((ours / "tokenizer.json").read_text())["model"]["merges"]
    content["model"]["merges"] = [" ".join(pair) for pair in content["model"]["merges"]]
    del content["pre_tokenizer"]["use_regex"]  # older versions of the library have written it so
    (hub / "tokenizer.json").write_text(json.dumps(content))
    assert find_tokenizer(hub).name == "gpt2"
    merges = content["model"]["merges"]
    merges[7], merges[8] = merges[8], merges[7]
    (hub / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match="not a byte-level BPE like"):  # its ids are not in the order of its merges
        find_tokenizer(hub)


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content["pre_tokenizer"].update(use_regex=False),
        lambda content: content.update(normalizer={"type": "Lowercase"}),
        lambda content: content["added_tokens"].append({"content": "<pad>", "id": 5}),
        lambda content: content["model"]["merges"].pop(),
        lambda content: content["model"].update(dropout=0.5),
        lambda content: content["model"].update(type="WordPiece"),
        lambda content: content["model"].update(end_of_word_suffix="</w>"),
        lambda content: content.update(decoder=None),
        lambda content: content["model"]["vocab"].update({"<|endoftext|>": 0, "!": 299}),
        lambda content: content.pop("model"),
    ],
)
def test_a_tokenizer_that_gives_other_ids_is_refused(tmp_path, change):
    content = json.loads(pairs_of_bytes(300).json)
    change(content)
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match="is not a byte-level BPE"):
        find_tokenizer(tmp_path)


@pytest.mark.parametrize("change", ["cuts", "adds"])
def test_a_tokenizer_that_changes_each_text_does_not_here(tmp_path, change):
    """As one with truncation, or with end-of-text after each text; Hugging Face's ids without either are the reference."""
    from tokenizers import Tokenizer
    from tokenizers.processors import TemplateProcessing

    whole, text = Tokenizer.from_str(pairs_of_bytes(300).json), "a text of more than three tokens"
    changing = Tokenizer.from_str(whole.to_str())
    if change == "cuts":
        changing.enable_truncation(3)
    else:
        end = "<|endoftext|>"
        changing.post_processor = TemplateProcessing(single=f"$A {end}", special_tokens=[(end, whole.token_to_id(end))])
    changing.save(str(tmp_path / "tokenizer.json"))
    found = find_tokenizer(tmp_path)
    assert changing.encode(text).ids != found.encode(text) == whole.encode(text).ids
    assert Tokenizer.from_str(found.json).encode(text).ids == whole.encode(text).ids


@pytest.mark.parametrize(
    "file, change",
    [
        ("tokenizer.json", lambda content: content["pre_tokenizer"].update(add_prefix_space=True)),
        (
            "tokenizer_config.json",
            lambda content: content.update(add_prefix_space=True, tokenizer_class="GPT2Tokenizer"),
        ),
    ],
)
def test_a_tokenizer_that_puts_a_space_before_each_text_is_refused(tmp_path, file, change):
    """Hugging Face's library obeys one file or the other; either way, its ids are not ours."""
    from transformers import AutoTokenizer

    own = bpe.train_bpe(TEXTS * 9, 300)
    own.save_pretrained(tmp_path, 16)
    content = json.loads((tmp_path / file).read_text())
    change(content)
    (tmp_path / file).write_text(json.dumps(content))
    assert AutoTokenizer.from_pretrained(tmp_path)("model")["input_ids"] == own.encode(" model") != own.encode("model")
    with pytest.raises(UserError, match=r"puts a space before each text \(add_prefix_space\)"):
        find_tokenizer(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("vocab_size", [257, 258, 50257])
def test_a_trained_tokenizer_of_any_size_is_not_taken_for_another(vocab_size, tmp_path, capsys):
    tokenizer = pairs_of_bytes(vocab_size) if vocab_size > 257 else get_tokenizer("bytes")
    model = save_model(tmp_path, vocab_size, tokenizer)
    found = tokenizer_of_model(model, vocab_size)
    assert found.fingerprint == tokenizer.fingerprint and found.encode("a text") == tokenizer.encode("a text")
    sample.main(["--model", str(model), "--prompt", "A \x00\x01 text", "-n", "1", "-d", "cpu"])
    assert capsys.readouterr().out.startswith("A \x00\x01 text")
    with pytest.raises(UserError, match="defined on GPT-2 tokens"):
        hellaswag.main(["--model", str(model), "-d", "cpu"])


class UnreadGpt2(Tokenizer):
    """GPT-2's tokenizer where its vocabulary is not at hand."""

    name, vocab_size, fingerprint = "gpt2", 50257, "of GPT-2"


@pytest.mark.slow
def test_shards_with_another_tokenizer_than_the_models_are_refused(tmp_path):
    run = config_of("--data", tmp_path)
    own, other, same = pairs_of_bytes(300), pairs_of_bytes(300, reverse=True), pairs_of_bytes(300)
    model = save_model(tmp_path / "model", 300, own)
    huggingface.check_fits(model, 300, 16, same, run)
    with pytest.raises(UserError, match=f"a different tokenizer from the shards .* bpe --tokenizer-from {model}"):
        huggingface.check_fits(model, 300, 16, other, run)
    model = save_model(tmp_path / "large", 50257, pairs_of_bytes(50257))
    with pytest.raises(UserError, match="a different tokenizer from the shards"):  # which have GPT-2's tokens
        huggingface.check_fits(model, 50257, 16, UnreadGpt2(), run)
    with pytest.raises(
        UserError, match=r"model has its own tokenizer \(bpe\), not gpt2, in tokenizer\.json\. Leave out --tokenizer\."
    ):
        configure(["--text", "a.txt", "--init-from", tmp_path / "model", "--tokenizer", "gpt2"])


@pytest.mark.parametrize("vocab_size", [300, 50257])
def test_a_model_without_a_tokenizer_is_refused(tmp_path, vocab_size):
    """Also with as many tokens as GPT-2 has: a size does not say which they are."""
    model, run = save_model(tmp_path / "model", vocab_size), config_of("--data", tmp_path)
    with pytest.raises(UserError, match=rf"no tokenizer\.json for its {vocab_size:,} tokens.* --tokenizer gpt2"):
        sample.main(["--model", str(model), "-d", "cpu"])
    with pytest.raises(UserError, match=rf"has no tokenizer\.json for its {vocab_size:,} tokens"):
        huggingface.check_fits(model, vocab_size, 16, pairs_of_bytes(300), run)


@pytest.mark.slow
def test_padding_in_an_embedding_is_removed_by_the_command_in_the_message(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    save_model(Path("models/padded"), 320, pairs_of_bytes(300))
    with pytest.raises(UserError, match=r"has 320 tokens, but its tokenizer \(bpe\) has 300\. .* was padded") as error:
        sample.main(["--model", "models/padded", "-d", "cpu"])
    with pytest.raises(UserError, match=r"into that folder\.$"):  # another tokenizer's tokens are no padding
        tokenizer_of_model(Path("models/padded"), 50257)
    _, option, code = shlex.split(str(error.value).partition("remove the padding: ")[2])
    assert option == "-c"
    exec(code)
    sample.main(["--model", "padded_resized", "--prompt", "a", "-n", "1", "-d", "cpu"])
    assert capsys.readouterr().out.startswith("a")
    before, after = (
        GPT.from_pretrained(folder).transformer.wte.weight for folder in ("models/padded", "padded_resized")
    )
    assert torch.equal(before[:300], after[:300])


@pytest.mark.slow
@needs_gpt2_vocabulary
def test_a_flag_says_which_tokens_a_model_without_a_tokenizer_has(tmp_path, capsys):
    model, gpt2 = save_model(tmp_path / "model", 50257), get_tokenizer("gpt2")
    flags = ["--model", str(model), "-d", "cpu", "--tokenizer"]
    sample.main([*flags, "gpt2", "--prompt", "Hello, I'm", "-n", "1"])
    assert capsys.readouterr().out.startswith("Hello, I'm")
    (tmp_path / "items.jsonl").write_text(json.dumps({"ctx": "a", "endings": ["b", "c", "d", "e"], "label": 0}) + "\n")
    hellaswag.main([*flags, "gpt2", "--data", str(tmp_path / "items.jsonl")])
    assert "acc_norm" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"has 50,257 tokens, but its tokenizer \(bytes\) has 257"):
        sample.main([*flags, "bytes"])
    run = configure(["--init-from", str(model), "--tokenizer", "gpt2", "--data", str(tmp_path)])[0]
    huggingface.check_fits(model, 50257, 16, gpt2, run)
    with pytest.raises(UserError, match="a different tokenizer from the shards"):
        huggingface.check_fits(model, 50257, 16, pairs_of_bytes(50257), run)
    with pytest.raises(UserError, match=r"has no tokenizer\.json .* --tokenizer gpt2"):
        run = configure(["--init-from", str(model), "--data", str(tmp_path)])[0]
        huggingface.check_fits(model, 50257, 16, gpt2, run)


@needs_gpt2_vocabulary
def test_shards_without_a_manifest_have_gpt2s_tokens_unless_a_tokenizer_says_otherwise(tmp_path):
    write_shard(tmp_path / "a_train_000000.npy", np.arange(100, dtype=np.uint16))
    assert shards.read_tokenizer(tmp_path).name == "gpt2"
    get_tokenizer("gpt2").save_pretrained(tmp_path, 16)
    assert shards.read_tokenizer(tmp_path).name == "gpt2"
    pairs_of_bytes(300).save_pretrained(tmp_path, 16)
    with pytest.raises(UserError, match="has a tokenizer of its own, but no manifest.json to say so"):
        shards.read_tokenizer(tmp_path)


def test_a_tokenizer_with_a_name_is_not_copied_as_a_trained_one(tmp_path):
    save_model(tmp_path, 257, get_tokenizer("bytes"))
    with pytest.raises(UserError, match="has the tokenizer bytes. Use --tokenizer bytes"):
        find_tokenizer_folder(str(tmp_path), "bpe")


# -----------------------------------------------------------------------------
# GPT-2's vocabulary, and a machine without a network


@needs_gpt2_vocabulary
def test_gpt2s_tokenizer_json_gives_tiktokens_ids(tmp_path):
    import tiktoken

    get_tokenizer("gpt2").save_pretrained(tmp_path, 16)
    tokenizer, reference = find_tokenizer(tmp_path), tiktoken.get_encoding("gpt2")
    assert (tokenizer.name, tokenizer.vocab_size, tokenizer.eot) == ("gpt2", reference.n_vocab, reference.eot_token)
    assert tokenizer.token_bytes() == [reference.decode_single_token_bytes(i) for i in range(50256)]
    for text in [*TEXTS, *adversarial_texts(0), *(page.read_text() for page in (ROOT / "docs").glob("*.md"))]:
        assert tokenizer.encode(text) == reference.encode_ordinary(text)


def take_vocabulary_away(monkeypatch, tmp_path):
    """As on a node without tiktoken's cache and without a network."""
    (tmp_path / "empty").mkdir()
    for name, value in (
        ("TIKTOKEN_CACHE_DIR", str(tmp_path / "empty")),
        ("HTTPS_PROXY", NOWHERE),
        ("https_proxy", NOWHERE),
    ):
        monkeypatch.setenv(name, value)
    tokenizer_module._download_gpt2.cache_clear()
    with pytest.raises(UserError, match="vocabulary is not on this machine"):
        get_tokenizer("gpt2")


@pytest.mark.slow
@needs_gpt2_vocabulary
def test_a_run_on_gpt2s_tokens_needs_only_its_own_files(tmp_path, monkeypatch, capsys):
    """It is trained, resumed, sampled, scored and fine-tuned where GPT-2's vocabulary cannot be had."""
    texts = ["The first text is about a fish. " * 90, "The second is about two. " * 20]
    make_shards(corpus_of(texts), tmp_path / "data", tokenizer="gpt2", shard_size=400)
    take_vocabulary_away(monkeypatch, tmp_path)
    fineweb.check_shards(tmp_path / "data")
    make_shards(corpus_of(texts), tmp_path / "data", tokenizer="gpt2", shard_size=400)  # nothing to do
    small = ["--total-batch-size", 64, "--val-tokens", 64]
    flags = ["--data", tmp_path / "data", "--max-steps", 2, "--checkpoint-every", 1, *small]
    log = trained(tmp_path / "run", *flags)
    last = tmp_path / "run" / "model_00002"
    (tmp_path / "data" / "tokenizer.json").unlink()  # as in shards that version 2.0 made
    shutil.rmtree(last)
    resumed(tmp_path / "run")
    assert log_without_seconds(tmp_path / "run") == log
    sample.main(["--model", str(last), "--prompt", "The fish", "-n", "1", "-d", "cpu"])
    assert capsys.readouterr().out.splitlines()[-1].startswith("The fish")
    (tmp_path / "items.jsonl").write_text(json.dumps({"ctx": "a", "endings": ["b", "c", "d", "e"], "label": 0}) + "\n")
    hellaswag.main(["--model", str(last), "--data", str(tmp_path / "items.jsonl"), "-d", "cpu"])
    assert "acc_norm" in capsys.readouterr().out
    tuned = [*TINY_TRAINING_FLAGS, "--init-from", last, "--max-steps", 1, *small]
    train(configure([*tuned, "--data", tmp_path / "data", "--out", tmp_path / "tuned"])[0], ONE_PROCESS, NEW_RUN)
    (tmp_path / "text.txt").write_text("\n".join(texts))
    train(configure([*tuned, "--text", tmp_path / "text.txt", "--out", tmp_path / "on_text"])[0], ONE_PROCESS, NEW_RUN)
    assert find_tokenizer(tmp_path / "on_text" / "data").name == "gpt2"
    with pytest.raises(UserError, match=r"Copy the tokenizer\.json of GPT-2 .*TIKTOKEN_CACHE_DIR"):
        trained(tmp_path / "new", *flags)
    text = ["--input", str(tmp_path / "text.txt"), "--output", str(tmp_path / "from_model")]
    fineweb.main([*text, "--tokenizer-from", str(last)])
    assert shards.read_tokenizer(tmp_path / "from_model").name == "gpt2"
    shutil.copy(last / "tokenizer.json", tmp_path / "data")
    assert shards.read_tokenizer(tmp_path / "data").name == "gpt2"


def test_without_the_vocabulary_the_error_says_how_to_get_it(tmp_path):
    code = """
from support.cli import run_cli
from support.data.tokenizer import get_tokenizer
run_cli(lambda: get_tokenizer('gpt2'))
"""
    environment = os.environ | {"TIKTOKEN_CACHE_DIR": str(tmp_path), "HTTPS_PROXY": NOWHERE, "https_proxy": NOWHERE}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    expected = "error: GPT-2's vocabulary is not on this machine, and cannot be downloaded (no connection"
    assert done.returncode == 2 and done.stderr.startswith(expected)
    assert "TIKTOKEN_CACHE_DIR" in done.stderr and done.stderr.count("\n") == 1
    assert not os.listdir(tmp_path)
