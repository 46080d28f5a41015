"""Tokenizers: against tiktoken, against Hugging Face, and without a network."""

import hashlib
import json
import os
import subprocess
import sys

import pytest
from helpers import GPT2_VOCABULARY, ROOT, needs_gpt2_vocabulary

from support.cli import UserError
from support.data.tokenizer import get_tokenizer, name_for_vocab_size, tokenizer_of_model

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
    for text in TEXTS:
        assert tokenizer.encode(text) == list(text.encode()) and tokenizer.decode(tokenizer.encode(text)) == text
        assert tokenizer.encode_array(text).tolist() == list(text.encode())
    assert (tokenizer.vocab_size, tokenizer.eot) == (257, 256)
    assert tokenizer.decode([72, 256, 105]) == "H<|endoftext|>i"


@needs_gpt2_vocabulary
def test_gpt2_equals_tiktoken():
    import tiktoken

    tokenizer, reference = get_tokenizer("gpt2"), tiktoken.get_encoding("gpt2")
    assert tokenizer.encode("Hello, I'm a language model,") == [15496, 11, 314, 1101, 257, 3303, 2746, 11]
    for text in TEXTS:
        assert tokenizer.encode_array(text).tolist() == reference.encode_ordinary(text)
        assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("name", ["bytes", pytest.param("gpt2", marks=needs_gpt2_vocabulary)])
def test_hugging_face_opens_the_saved_tokenizer(name, tmp_path):
    from transformers import AutoTokenizer

    tokenizer = get_tokenizer(name)
    tokenizer.save_pretrained(tmp_path, model_max_length=64)
    opened = AutoTokenizer.from_pretrained(tmp_path)
    assert len(opened) == tokenizer.vocab_size and opened.model_max_length == 64
    assert opened.eos_token_id == opened.bos_token_id == tokenizer.eot
    for text in [t.replace("<|endoftext|>", "") for t in TEXTS]:
        assert opened(text)["input_ids"] == tokenizer.encode(text)
        assert opened.decode(tokenizer.encode(text)) == text
    assert opened("a<|endoftext|>")["input_ids"] == [*tokenizer.encode("a"), tokenizer.eot]


@needs_gpt2_vocabulary
def test_the_recovered_merges_are_the_published_ones():
    """vocab.bpe has a version line, then one merge per line."""
    url = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/vocab.bpe"
    file = GPT2_VOCABULARY.parent / hashlib.sha1(url.encode()).hexdigest()
    published = file.read_text(encoding="utf-8").splitlines()[1:]
    recovered = json.loads(get_tokenizer("gpt2").huggingface_json)["model"]["merges"]
    assert [" ".join(pair) for pair in recovered] == published


def test_a_tokenizer_is_known_by_its_vocabulary_size(tmp_path):
    assert [name_for_vocab_size(n) for n in (50257, 257, 32000)] == ["gpt2", "bytes", "bpe"]
    with pytest.raises(UserError, match="vocabulary of 32,000 tokens. .* one of these: gpt2: 50,257, bytes: 257"):
        tokenizer_of_model(tmp_path, 32000)


def test_without_the_vocabulary_the_error_says_how_to_get_it(tmp_path):
    code = """
import support.data.download
from support.cli import run_cli
from support.data.tokenizer import get_tokenizer
support.data.download.DEFAULT_ATTEMPTS = 1
run_cli(lambda: get_tokenizer('gpt2'))
"""
    proxy = "http://127.0.0.1:9"  # nobody listens
    environment = os.environ | {"TIKTOKEN_CACHE_DIR": str(tmp_path), "HTTPS_PROXY": proxy, "https_proxy": proxy}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    expected = f"error: the GPT-2 vocabulary is not in {tmp_path}: cannot download"
    assert done.returncode == 2 and done.stderr.startswith(expected)
    assert "TIKTOKEN_CACHE_DIR" in done.stderr and done.stderr.count("\n") == 1
    assert not os.listdir(tmp_path)
