"""Corpora in memory, and long documents in pieces."""

import json

import pytest
from helpers import needs_gpt2_vocabulary
from shard_helpers import ADVERSARIAL, adversarial_texts, corpus_of, documents_of, plain_encoder, set_batch_chars

from support.data import corpus


@needs_gpt2_vocabulary
@pytest.mark.parametrize("seed", range(2))
def test_a_safe_cut_changes_no_token(seed):
    encode, _ = plain_encoder("gpt2")
    text = "".join(adversarial_texts(seed, 20))
    cuts = {corpus.safe_cut(text, 0, limit) for limit in range(1, len(text), 20)} - {0}
    assert len(cuts) > 30
    tokens = encode(text)
    for cut in cuts:
        assert encode(text[:cut]) + encode(text[cut:]) == tokens, (text[cut - 9 : cut], text[cut : cut + 9])


@pytest.mark.parametrize("batch_chars", [1, 20, 3000])
def test_documents_can_be_read_from_every_cursor(monkeypatch, batch_chars):
    set_batch_chars(monkeypatch, batch_chars)
    texts = [*ADVERSARIAL, "a long one, " * 50, ""]
    source = corpus_of(texts)
    batches = list(source.batches())
    assert documents_of(batches) == texts
    assert any(batch.continues for batch in batches) == (batch_chars < 600)
    for i, batch in enumerate(batches):
        rest = list(source.batches(json.loads(json.dumps(batch.cursor))))
        assert [(b.cursor, b.continues, b.texts()) for b in rest] == [
            (b.cursor, b.continues, b.texts()) for b in batches[i:]
        ]


def test_names_become_safe_in_file_names():
    assert [corpus.slug(name) for name in ("a/b: c", "../x.", "", "日本" * 30)] == ["a_b__c", "x", "text", "日本" * 10]
