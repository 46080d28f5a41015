"""Byte-pair encodings like GPT-2's, trained on a text, with a vocabulary size that suits the text."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator

from support.data.text_files import Corpus
from support.data.tokenizer import (
    MAX_VOCAB_SIZE,
    BpeTokenizer,
    printable_bytes,
    to_utf8,
    tokenizer_json,
    tokens_in_order,
)

TRAINING_CHARS = 1 << 25  # the encoding is trained on the beginning of a corpus, up to this many characters
HELD_OUT = 0.1  # at least this fraction, at the end of a corpus, is left out: a small corpus is validated on it
CHARS_PER_TOKEN_OF_VOCABULARY = 500
MIN_BYTES_PER_TOKEN = 2  # of a trained encoding; in most scripts, tokens are longer
MAX_TOKEN_BYTES = 64
_LONG_WORD, _PIECE = re.compile(r"\S{257}|\s{257}"), re.compile(r"\s{0,256}\S{1,256}|\s{1,256}")


def fitting_vocab_size(chars: float) -> int:
    """Returns a vocabulary size, a power of two, that suits a text of `chars` characters.

    With a larger vocabulary, rare tokens would hardly be trained (measured, see docs/measurements/small-models.md).
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


def training_texts(corpus: Corpus, held_out: float = HELD_OUT, max_tokens: int | None = None) -> list[str]:
    """Returns up to TRAINING_CHARS characters from the beginning of a corpus, never from its last fraction `held_out`.

    Args:
        max_tokens: the corpus ends there, whatever follows.
    """

    def read_all() -> Iterator[str]:
        for part in corpus.parts():
            corpus.prepare(part)
            yield from (text for text, _ in corpus.read(part))

    texts = _truncate(read_all(), math.ceil(TRAINING_CHARS / (1 - held_out)))
    chars = sum(map(len, texts))
    if max_tokens and chars:
        bytes_per_char = sum(len(to_utf8(text)) for text in texts) / chars
        chars = min(chars, int(MIN_BYTES_PER_TOKEN * max_tokens / bytes_per_char))
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
