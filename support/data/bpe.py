"""Byte-pair encodings like GPT-2's, trained on a text, with a vocabulary size that suits the text."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from support.data.output_folder import OutputFolder
from support.data.shards import write_manifest
from support.data.text_files import Corpus
from support.data.tokenizer import (
    MAX_VOCAB_SIZE,
    TOKENIZER_JSON,
    BpeTokenizer,
    Tokenizer,
    find_tokenizer,
    get_tokenizer,
    printable_bytes,
    to_utf8,
    tokenizer_json,
    tokens_in_order,
)
from support.files import atomic_write, sha256_of

TRAINING_CHARS = 1 << 25  # the encoding is trained on the beginning of a corpus, up to this many characters
HELD_OUT = 0.1  # at least this fraction, at the end of a corpus, is left out: a small corpus is validated on it
CHARS_PER_TOKEN_OF_VOCABULARY = 500
MAX_TOKEN_BYTES = 64
_LONG_WORD, _PIECE = re.compile(r"\S{257}|\s{257}"), re.compile(r"\s{0,256}\S{1,256}|\s{1,256}")


def fitting_vocab_size(chars: float) -> int:
    """Returns a vocabulary size, a power of two, that suits a text of `chars` characters.

    With a larger vocabulary, rare tokens would hardly be trained (measured, see docs/small-models.md).
    """
    exponent = round(math.log2(max(1.0, chars / CHARS_PER_TOKEN_OF_VOCABULARY)))
    return min(max(2**exponent, 512), MAX_VOCAB_SIZE // 2)


def train_bpe(texts: Iterable[str], vocab_size: int) -> BpeTokenizer:
    """Trains an encoding with at most `vocab_size` tokens, end-of-text included; fewer if the text runs out of pairs.

    The tokenizers library does the training; the same texts give the same tokens.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    texts = (piece for text in texts for piece in _cut_long_words(to_utf8(text).decode()))
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1, min_frequency=2, max_token_length=MAX_TOKEN_BYTES,
        initial_alphabet=printable_bytes(), show_progress=False,
    )  # fmt: skip
    trained.train_from_iterator(texts, trainer)
    model = json.loads(trained.to_str())["model"]
    return BpeTokenizer(tokenizer_json(tokens_in_order(model["vocab"]), model["merges"]))


def _cut_long_words(text: str) -> list[str]:
    """Returns the text, cut into pieces if it has words that would take too long to train on."""
    return _PIECE.findall(text) if _LONG_WORD.search(text) else [text]


def write_tokenizer(folder: OutputFolder, corpus: Corpus, vocab_size: int | None, copy_of: Path | None) -> Tokenizer:
    """Writes the tokenizer that a folder's manifest names to its `tokenizer.json`, and returns it.

    "bpe" is trained on the corpus, and its checksum and vocabulary size are added to the manifest. A file whose checksum
    is there already is kept.

    Args:
        vocab_size: the largest size allowed for "bpe" (default: `fitting_vocab_size`).
        copy_of: a folder with a `tokenizer.json` to use instead.

    Raises:
        UserError: the corpus, or `copy_of`, cannot be read; or GPT-2's vocabulary cannot be downloaded.
    """
    path, name = folder.directory / TOKENIZER_JSON, folder.manifest["tokenizer"]
    is_trained = "tokenizer_sha256" in folder.manifest
    if name == "bpe":
        source = folder.directory if is_trained else copy_of
        tokenizer = find_tokenizer(source) if source else None
    else:
        tokenizer = get_tokenizer(name, folder.directory, *filter(None, [copy_of]))
    if tokenizer is None:
        val_fraction = folder.manifest["settings"].get("val_fraction")
        texts = training_texts(corpus, max(HELD_OUT, float(val_fraction or 0)))
        folder.report(f"training a tokenizer on {sum(map(len, texts)):,} characters ...")
        tokenizer = train_bpe(texts, vocab_size or fitting_vocab_size(sum(map(len, texts))))
    if not path.exists() or path.read_bytes() != tokenizer.json.encode():
        with atomic_write(path, unique=True) as tmp:
            tmp.write_text(tokenizer.json, encoding="utf-8", newline="\n")
    if name == "bpe" and not is_trained:
        folder.manifest |= {"tokenizer_sha256": sha256_of(path), "vocab_size": tokenizer.vocab_size}
        write_manifest(folder.directory, folder.manifest)
    return tokenizer


def training_texts(corpus: Corpus, held_out: float = HELD_OUT) -> list[str]:
    """Returns up to TRAINING_CHARS characters from the beginning of a corpus, never from its last fraction `held_out`."""

    def read_all() -> Iterator[str]:
        for part in corpus.parts():
            corpus.prepare(part)
            yield from (text for text, _ in corpus.read(part))

    texts = _truncate(read_all(), math.ceil(TRAINING_CHARS / (1 - held_out)))
    chars = sum(map(len, texts))
    return _truncate(texts, min(TRAINING_CHARS, chars - int(held_out * chars)))


def _truncate(texts: Iterable[str], chars: int) -> list[str]:
    """Returns the beginning of the texts, at most `chars` characters in total."""
    kept: list[str] = []
    for text in texts:
        kept.append(text[:chars])
        chars -= len(kept[-1])
        if chars == 0:
            break
    return kept
