"""Checks a program that you write along the lesson, and says which fact about it is wrong.

    python docs/from-scratch/check.py my_gpt.py --step 5

The facts of all steps up to that one are checked, as long as they hold: some end when a later step changes something.
"""

import argparse
import contextlib
import dataclasses
import importlib.util
import io
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, TypeVar
from unittest import mock

import numpy as np
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F

T = TypeVar("T")
Fact = Callable[[Any], str | None]  # takes the reader's module; returns what is wrong, or None
FACTS: list[tuple[int, int, str, Fact]] = []  # the first and the last step, the fact in words, and its check
SIZES = {"block_size": 16, "vocab_size": 257, "n_layer": 2, "n_head": 2, "n_embd": 32}


def fact(words: str, first: int, last: int = 10) -> Callable[[Fact], Fact]:
    def add(check: Fact) -> Fact:
        FACTS.append((first, last, words, check))
        return check

    return add


def expect(what: str, found: float, expected: float, tolerance: float = 1e-4, why: str = "") -> str | None:
    if abs(found - expected) <= tolerance:
        return None
    if math.isnan(found):
        return f"{what} is nan. Does the mask hide every token from the first one, itself included?"
    return f"{what} is {found:.6g}; {why or 'it should be'} {expected:.6g}"


def small_gpt(m: Any, **sizes: int) -> Any:
    """A small model of the reader's, with random weights that are large enough to make differences visible."""
    names = {field.name for field in dataclasses.fields(m.GPTConfig)}
    torch.manual_seed(1)
    model = m.GPT(m.GPTConfig(**{name: value for name, value in {**SIZES, **sizes}.items() if name in names}))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.3)
    return model.eval()


def new_gpt(m: Any) -> Any:
    torch.manual_seed(1)
    return m.GPT(m.GPTConfig())


def random_rows(B: int = 4, T: int = 16, V: int = 257) -> tuple[Tensor, Tensor]:
    rows = torch.randint(V, (B, T + 1), generator=torch.Generator().manual_seed(2))
    return rows[:, :-1], rows[:, 1:]


# -----------------------------------------------------------------------------
# Step 1: counts


@fact("the tokens are the bytes of the documents, each after an end-of-text token", 1, 5)
def tokens_are_bytes(m: Any) -> str | None:
    train, val = m.load_tokens()
    expected = b"".join(b"\0" + text.encode() for text in topics.values())
    if len(train) + len(val) != len(expected):
        return f"load_tokens returns {len(train) + len(val):,} tokens; with one for each document there are {len(expected):,}"
    if bytes(t % 256 for t in [*train.tolist(), *val.tolist()]) != expected or train[0] != 256:
        return "load_tokens does not return the bytes of the documents in order, with 256 before each"
    return expect("the held-out part of the tokens", len(val) / len(expected), 0.1)


@fact("a pair's probability is its count + 1, of all pairs that begin with the same byte", 1, 1)
def counts_by_hand(m: Any) -> str | None:
    probs = m.count_pairs(torch.tensor([97, 98, 97, 98, 97, 99]))  # "ababac": a is followed by b, b, c
    found = f"after a, twice followed by b and once by c, the probability of b is {probs[97, 98]:.6f}"
    expected = (2 + 1) / (3 + 257)
    return None if abs(probs[97, 98] - expected) < 1e-6 else f"{found}; (2 + 1) / (3 + 257) is {expected:.6f}"


@fact("the loss is the mean of -ln p of the tokens that follow", 1, 1)
def loss_of_counts(m: Any) -> str | None:
    probs = torch.full((257, 257), 0.5 / 257)
    probs[1, 2] = 0.5
    expected = -(math.log(0.5) + math.log(0.5 / 257)) / 2
    return expect("the loss of two pairs", float(m.validation_loss(probs, torch.tensor([1, 2, 1]))), expected)


@fact("the next token is drawn from the row of the one before", 1, 1)
def samples_follow_the_rows(m: Any) -> str | None:
    found = list(m.generate(torch.eye(257).roll(1, dims=1), 5, 3))  # row i has all its probability at i + 1
    return (
        None if found == [5, 6, 7, 8] else f"where i + 1 always follows i, 5 is continued as {found}, not [5, 6, 7, 8]"
    )


# -----------------------------------------------------------------------------
# Steps 2 to 5: the model


@fact("a batch has a target for each token: the next one", 2, 5)
def targets_follow(m: Any) -> str | None:
    x, y = m.get_batch(torch.arange(1000))
    if x.shape != (m.B, m.T) or y.shape != (m.B, m.T):
        return f"a batch has tokens {tuple(x.shape)} and targets {tuple(y.shape)}; both should be {(m.B, m.T)}"
    if not torch.equal(y, x + 1):
        return f"in the text 0, 1, 2, ... the target of {x[0, 0]} is {y[0, 0]}; it should be {x[0, 0] + 1}"
    return "all rows of a batch begin at the same place" if len(set(x[:, 0].tolist())) == 1 else None


@fact("at the beginning all tokens are equally likely", 2, 4)
def first_loss(m: Any) -> str | None:
    with torch.no_grad():
        loss = new_gpt(m)(*random_rows())[1].item()
    return expect("the first loss", loss, math.log(257), 1e-4, "with lm_head at zero it is ln 257 =")


@fact("the loss is the mean cross-entropy of the logits", 2)
def loss_of_logits(m: Any) -> str | None:
    model, (x, y) = small_gpt(m), random_rows()
    with torch.no_grad():
        logits, loss = model(x)[0], model(x, y)[1].item()
    if logits.shape != (4, 16, 257):
        return f"the logits of 4 rows of 16 tokens have the shape {tuple(logits.shape)}, not (4, 16, 257)"
    each = [-math.log(torch.softmax(logits[b, t], 0)[y[b, t]]) for b in range(4) for t in range(16)]
    return expect(
        "the loss of a batch", loss, sum(each) / len(each), 1e-3, "the mean of -ln softmax(logits)[target] is"
    )


@fact("the validation loss is the mean over rows of T + 1 tokens", 2, 5)
def validation_of_rows(m: Any) -> str | None:
    model, tokens = small_gpt(m, block_size=m.T), random_rows(1, 10 * m.T)[0][0]
    with torch.no_grad():
        rows = [tokens[i : i + m.T + 1] for i in range(0, len(tokens) - m.T, m.T)]
        expected = sum(model(row[None, :-1], row[None, 1:])[1].item() for row in rows) / len(rows)
    return expect("the validation loss", m.validation_loss(model, tokens), expected, 1e-3, "one row at a time it is")


@fact("the model continues a text by sampling from its last logits", 2, 5)
def samples(m: Any) -> str | None:
    model, idx = small_gpt(m), random_rows(T=30)[0]
    with torch.no_grad():
        model.lm_head.weight *= 1000  # so that one token has all the probability
        new = model.generate(idx, 1)[:, -1]
        expected = model(idx[:, -16:])[0][:, -1].argmax(-1)
    return (
        None
        if torch.equal(new, expected)
        else f"the likeliest tokens are {expected.tolist()}, the new ones {new.tolist()}"
    )


@fact("changing the future leaves the past unchanged", 3)
def causal(m: Any) -> str | None:
    model, x = small_gpt(m), random_rows(1)[0]
    changed = x.clone()
    changed[0, 8] += 1 if x[0, 8] < 256 else -1
    with torch.no_grad():
        before, after = model(x)[0], model(changed)[0]
    if before.isnan().any():
        return "logits are nan: in some row the mask hides every token. Look at the diagonal"
    moved = (before - after).abs().amax(dim=(0, 2)) > 1e-5
    if moved[:8].any():
        return f"when token 8 changes, the logits at {int(moved.nonzero()[0])} change: they see the future. Look at the mask and the softmax"
    if not moved[8]:
        return "when token 8 changes, the logits at 8 do not: the mask hides a token from itself"
    return None if moved[9:].all() else "when token 8 changes, the logits after it do not: there is no attention"


@fact("the order of the tokens matters", 3)
def positions(m: Any) -> str | None:
    model, x = small_gpt(m), torch.arange(16)[None]
    swapped = torch.cat((x[:, [1, 0]], x[:, 2:]), dim=1)
    with torch.no_grad():
        same = torch.allclose(model(x)[0][0, -1], model(swapped)[0][0, -1], atol=1e-5)
    return (
        "when two early tokens are swapped, the last logits stay the same: position embeddings are missing"
        if same
        else None
    )


def attention_with(attention: Any, n_head: int, project: Fact) -> str | None:
    x = torch.randn(1, 16, 32, generator=torch.Generator().manual_seed(3))
    right, words = math.sqrt(32 // n_head), "sqrt(C)" if n_head == 1 else "sqrt(C // n_head)"
    differences = {}
    for divisor in (right, 1.0, math.sqrt(32)):
        with torch.no_grad():
            q, k, v = (t.view(1, 16, n_head, -1).transpose(1, 2) for t in attention.c_attn(x).split(32, dim=2))
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1 / divisor)
            differences[divisor] = (attention(x) - project(y.transpose(1, 2).reshape(1, 16, 32))).abs().max().item()
    if differences[right] > 1e-4 and min(differences.values()) < 1e-4:
        found = min(differences, key=differences.__getitem__)
        how = "are not divided" if found == 1 else f"are divided by sqrt(C) = {found:.3g}"
        return f"the scores {how}; they should be divided by {words} = {right:.3g}"
    return expect("the largest difference from PyTorch's attention", differences[right], 0, 1e-4)


@fact("attention is softmax(q k^T / sqrt(C)) v", 3, 3)
def one_head(m: Any) -> str | None:
    return attention_with(small_gpt(m).attn, 1, lambda y: y)


@fact("the attention of a head is softmax(q k^T / sqrt(C // n_head)) v", 4)
def two_heads(m: Any) -> str | None:
    attention = small_gpt(m).h[0].attn
    return attention_with(attention, 2, attention.c_proj)


@fact("with the same weights, the logits are those of transformers' GPT-2", 4)
def logits_of_huggingface(m: Any) -> str | None:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_positions=16, vocab_size=257, n_layer=2, n_head=2, n_embd=32, bos_token_id=None, eos_token_id=None
    )
    reference = GPT2LMHeadModel(config).eval()
    model, x = small_gpt(m), random_rows()[0]
    theirs = {name.removeprefix("transformer."): weight for name, weight in reference.state_dict().items()}
    ours = model.state_dict()
    if differing := sorted(theirs.keys() ^ ours.keys()):
        verb = "has" if differing[0] in theirs else "does not have"
        return f"transformers' GPT-2 {verb} a {differing[0]}: use its names"
    with torch.no_grad():
        model.lm_head.weight.copy_(model.wte.weight)
        for name, weight in theirs.items():  # its Conv1D stores these as (in, out)
            is_conv1d = name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight"))
            weight.copy_(ours[name].T if is_conv1d else ours[name])
        found, expected = model(x)[0], reference(x).logits
    if len({p.data_ptr() for p in model.h.parameters()}) < len(list(reference.transformer.h.parameters())):
        return "blocks share their parameters: each needs its own"
    return expect("the largest difference from transformers' logits", (found - expected).abs().max().item(), 0, 1e-4)


# -----------------------------------------------------------------------------
# Step 5: the recipe


@fact("embedding and output layer are one matrix", 5)
def tied(m: Any) -> str | None:
    model = new_gpt(m)
    return None if model.lm_head.weight is model.wte.weight else "lm_head.weight is not wte.weight: tie them"


@fact("the first loss is near that of a uniform guess", 5)
def initial_loss(m: Any) -> str | None:
    model = new_gpt(m)
    V = len(model.wte.weight)
    with torch.no_grad():
        loss = model(*random_rows(16, 64, V))[1].item()
    why = f"with N(0, 0.02) and tied weights it is near ln {V} ="
    return expect("the loss of a batch at initialisation", loss, math.log(V), 0.1, why)


@fact("weights begin as N(0, 0.02), and biases at zero", 5)
def initial_weights(m: Any) -> str | None:
    for name, p in new_gpt(m).named_parameters():
        if p.dim() < 2:
            value = 1.0 if name.endswith("weight") else 0.0  # the gain of a layer norm, or a bias
            wrong = expect(f"the first element of {name}", p[0].item(), value)
        elif name.endswith("c_proj.weight"):
            why = "0.02 / sqrt(2 * n_layer) is"
            wrong = expect(f"the standard deviation of {name}", p.std().item(), 0.02 / math.sqrt(6), 5e-4, why)
        else:
            wrong = expect(f"the standard deviation of {name}", p.std().item(), 0.02, 1e-3)
        if wrong:
            return wrong
    return None


@fact("weight decay is on matrices and embeddings only", 5)
def decay_groups(m: Any) -> str | None:
    model = small_gpt(m)
    optimizer = model.configure_optimizers(0.1, 1e-3, (0.9, 0.95))
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    for name, p in model.named_parameters():
        if wrong := expect(f"the weight decay of {name}", decay.get(id(p), math.nan), 0.1 if p.dim() >= 2 else 0.0):
            return wrong
    found = tuple(optimizer.defaults["betas"])
    return None if found == (0.9, 0.95) else f"AdamW's betas are {found}, not the (0.9, 0.95) that it was given"


@fact("the learning rate rises linearly and falls as a cosine", 5)
def learning_rates(m: Any) -> str | None:
    top, low, warmup, end = m.MAX_LR, m.MIN_LR, m.WARMUP_STEPS, m.MAX_STEPS
    middle = (warmup + end) / 2
    for step, expected in {0: top / warmup, warmup - 1: top, warmup: top, middle: (top + low) / 2, end: low}.items():
        if wrong := expect(f"the learning rate of step {step:g}", m.get_lr(step), expected, top / 1000):
            return wrong
    quarter = low + (top - low) * (1 + math.sqrt(0.5)) / 2
    return expect(
        "a quarter into the decay, the rate", m.get_lr(warmup + (end - warmup) / 4), quarter, top / 1000, "a cosine has"
    )


@fact("gradients are clipped at a norm of 1", 5, 8)
def clipping(m: Any) -> str | None:
    model = small_gpt(m)
    for p in model.parameters():
        p.data *= 3
    m.train_step(model, model.configure_optimizers(0.1, 1e-3, (0.9, 0.95)), *random_rows(), 1e-3)
    return expect("the norm of large gradients after a step", gradient_norm(model), 1, 1e-3)


def gradient_norm(model: torch.nn.Module) -> float:
    return math.sqrt(sum(p.grad.square().sum().item() for p in model.parameters() if p.grad is not None))


@fact("a step uses the learning rate that it is given", 5, 8)
def rate_is_used(m: Any) -> str | None:
    model = small_gpt(m)
    before = model.wte.weight.detach().clone()
    m.train_step(model, model.configure_optimizers(0.1, 1e-3, (0.9, 0.95)), *random_rows(), 0.0)
    moved = (model.wte.weight - before).abs().max().item()
    return expect("with a learning rate of 0, the largest change of a weight", moved, 0)


@fact("one batch is learned by heart", 5, 8)
def overfits(m: Any) -> str | None:
    torch.manual_seed(1)
    model = m.GPT(m.GPTConfig(**SIZES))
    optimizer = model.configure_optimizers(0.1, 1e-2, (0.9, 0.95))
    losses = [float(m.train_step(model, optimizer, *random_rows(), 1e-2)) for _ in range(60)]
    return (
        None if losses[-1] < 0.5 else f"after 60 steps on one batch its loss is {losses[-1]:.4f}; it should be near 0"
    )


# -----------------------------------------------------------------------------
# Step 6: the data


@fact("the shards hold the tokens of all documents, and the manifest describes them", 6, 6)
def shards_hold_the_text(m: Any) -> str | None:
    m.make_shards()
    manifest = json.loads((m.DATA / "manifest.json").read_text())
    val, *train = [np.load(m.DATA / entry["file"]) for entry in manifest["shards"]]
    if wrong := next(
        (f"a shard has {shard.dtype} tokens, not uint16" for shard in (val, *train) if shard.dtype != np.uint16), None
    ):
        return wrong
    if [entry["tokens"] for entry in manifest["shards"]] != [len(shard) for shard in (val, *train)]:
        return "the tokens in manifest.json are not the lengths of the files"
    found = Tokenizer.from_file(str(m.DATA / "tokenizer.json")).decode(np.concatenate([*train, val]).tolist(), False)
    if found != "".join("<|endoftext|>" + text for text in topics.values()):
        return "the train shards and then the val shard, decoded, are not the documents, each after <|endoftext|>"
    return expect("the part of val in all tokens", len(val) / sum(map(len, (val, *train))), 0.1, 0.001)


@fact("a split has its own shards, in order", 6)
def splits(m: Any) -> str | None:
    for split in ("train", "val"):
        files = [np.load(path) for path in sorted(m.DATA.glob(f"*_{split}_*.npy"))]
        found = m.open_shards(split)
        if [len(shard) for shard in found] != [len(shard) for shard in files]:
            return f"open_shards({split!r}) has {[*map(len, found)]} tokens; the files have {[*map(len, files)]}"
    return None


@fact("the loader deals the rows at 0, T, 2T, ... of each shard in order, then again", 6)
def rows_in_order(m: Any) -> str | None:
    shards = [np.arange(0, 100, dtype=np.uint16), np.arange(500, 597, dtype=np.uint16)]  # 12 rows of 8 + 1 tokens each
    loader = m.DataLoaderLite(shards, 5, 8)
    starts = [*range(0, 96, 8), *range(500, 596, 8)]
    for batch in range(5):
        x, y = loader.next_batch()
        expected = [starts[n % 24] for n in range(5 * batch, 5 * batch + 5)]
        if x[:, 0].tolist() != expected or x.shape != (5, 8):
            return f"in shards 0..99 and 500..596, with B = 5 and T = 8, batch {batch} begins at {x[:, 0].tolist()}, not {expected}"
        if not torch.equal(y, x + 1):
            return f"the target of token {x[0, 0]} is {y[0, 0]}; it should be {x[0, 0] + 1}"
    return None


@fact("the validation loss is the mean over all rows, whatever B is", 6, 6)
def validation_of_loader(m: Any) -> str | None:
    model, tokens = small_gpt(m), random_rows(1, 16 * 7)[0][0].numpy().astype(np.uint16)
    with torch.no_grad():
        rows = [torch.from_numpy(tokens[i : i + 17].astype(np.int64))[None] for i in range(0, 96, 16)]
        expected = sum(model(row[:, :-1], row[:, 1:])[1].item() for row in rows) / 6
    found = m.validation_loss(model, m.DataLoaderLite([tokens], 4, 16))
    return expect("the validation loss of 6 rows with B = 4", found, expected, 1e-3, "one row at a time it is")


# -----------------------------------------------------------------------------
# Step 7: sampling and multiple choice


@fact("temperature divides the logits, and top-k keeps the likeliest", 7, 7)
def probabilities(m: Any) -> str | None:
    logits = torch.tensor([[1.0, 4.0, 2.0, 3.0]])
    for temperature, top_k, powers in (
        (1.0, None, (1, 4, 2, 3)),
        (0.5, None, (2, 8, 4, 6)),
        (2.0, 2, (-99, 2, -99, 1.5)),
    ):
        probs, ids = m.next_token_probs(logits, temperature, top_k)
        found = torch.zeros(4).scatter(0, ids[0], probs[0]).tolist()
        expected = [math.exp(power) / sum(map(math.exp, powers)) for power in powers]
        if max(abs(a - b) for a, b in zip(found, expected, strict=True)) > 1e-4:
            words = ["[" + ", ".join(f"{p:.3f}" for p in probs) + "]" for probs in (found, expected)]
            return (
                f"logits [1, 4, 2, 3], temperature {temperature} and top_k {top_k} give {words[0]}; by hand {words[1]}"
            )
    return None


@fact("tokens are drawn with these probabilities", 7, 7)
def frequencies(m: Any) -> str | None:
    model, idx = small_gpt(m), random_rows(1)[0]
    with torch.no_grad():
        probs = torch.softmax(model(idx)[0][0, -1].topk(3).values / 9, dim=-1)
        ids = model(idx)[0][0, -1].topk(3).indices
    new = model.generate(idx.expand(3000, -1), 1, 9.0, 3)[:, -1]
    for token, p in zip(ids, probs, strict=True):
        if wrong := expect(
            "the frequency of a token of the top 3", (new == token).float().mean().item(), p.item(), 0.04
        ):
            return wrong
    return None


@fact("of four completions, the true one follows the context", 7, 7)
def items_are_right(m: Any) -> str | None:
    items = m.make_items([*range(5000)], 40)
    for context, completions, label in items:
        follows = [completion[0] == context[-1] + 1 for completion in completions]
        if follows != [i == label for i in range(4)]:
            return f"completion {label} should be the one that follows the context, but {follows} do"
    return "all items have the same label" if len({label for *_, label in items}) == 1 else None


@fact("a completion's loss is the mean over its own tokens, one at a time as well", 7, 7)
def losses_of_completions(m: Any) -> str | None:
    model, context, completions = small_gpt(m), [1, 2, 3, 4], [[5, 6], [7, 8, 9, 10], [11], [12, 13, 14]]
    for found, completion in zip(m.completion_losses(model, context, completions), completions, strict=True):
        with torch.no_grad():
            logs = torch.log_softmax(model(torch.tensor([context + completion]))[0][0], dim=-1)
        expected = -sum(logs[3 + i, token].item() for i, token in enumerate(completion)) / len(completion)
        if wrong := expect(f"the loss of {completion} after {context}", found, expected, 1e-3, "by itself it is"):
            return wrong
    return None


# -----------------------------------------------------------------------------
# Step 8: fast


@fact("faster ways give the same losses, and keep less memory", 8, 8)
def fast_is_the_same(m: Any) -> str | None:
    x, y = random_rows(8, 16)
    plain = small_gpt(m, flash=False, chunk_rows=0)
    expected, kept = plain(x, y)[1].item(), m.kept_for_backward(plain, x, y, m.FP32)
    for name, options in (
        ("flash attention", {"chunk_rows": 0}),
        ("a loss in chunks", {"flash": False, "chunk_rows": 16}),
    ):
        model = small_gpt(m, **options)
        if wrong := expect(f"with {name} the loss", model(x, y)[1].item(), expected, 1e-3, "without it is"):
            return wrong
        if m.kept_for_backward(model, x, y, m.FP32) >= kept:
            return f"with {name} as much is kept for the backward pass as without, {kept:,} bytes"
    return None


@fact("bf16 changes the loss, but little", 8, 8)
def bf16_is_close(m: Any) -> str | None:
    losses = []
    for amp in (m.FP32, m.BF16):
        model = new_gpt(m)
        optimizer = model.configure_optimizers(0.1, 1e-3, (0.9, 0.95))
        losses.append(float(m.train_step(model, optimizer, *random_rows(4, 16, len(model.wte.weight)), 1e-3, amp)))
    if losses[0] == losses[1]:
        return "with BF16 the loss is the same in all digits: train_step does not use amp"
    return expect("with BF16 the loss", losses[1], losses[0], 0.05, "in fp32 it is")


# -----------------------------------------------------------------------------
# Step 9: accumulation and several processes


@fact("gradients are those of the full batch, clipped at a norm of 1, however many micro-batches it has", 9)
def accumulation(m: Any) -> str | None:
    m = shortened(m, TOTAL_BATCH_SIZE=64)
    tokens = random_rows(1, 64)[0][0]
    rows = torch.cat((tokens, tokens[:1])).unfold(0, 17, 16)  # (4, 17)
    shard = torch.cat((tokens, tokens[:1])).numpy().astype(np.uint16)
    for scale in (0.03, 3.0):  # small gradients, which are not clipped, and large ones
        for B in (4, 2, 1):
            reference, model = small_gpt(m), small_gpt(m)
            for p in (*reference.parameters(), *model.parameters()):
                p.data *= scale
            loss = reference(rows[:, :-1], rows[:, 1:])[1]
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
            optimizer = model.configure_optimizers(0.1, 1e-3, (0.9, 0.95))
            found = float(m.train_step(model, optimizer, m.DataLoaderLite([shard], B, 16), 0.0))
            case = f"of a step of {4 // B} micro-batch{'' if B == 4 else 'es'}"
            pairs = zip(model.parameters(), reference.parameters(), strict=True)
            largest = max((p.grad - q.grad).abs().max().item() for p, q in pairs)
            why = f"of the full batch it is {norm:.4g}, and clipped" if norm > 1 else "of the full batch it is"
            if wrong := (
                expect(f"the loss {case}", found, loss.item(), 1e-3, "that of the full batch is")
                or expect(f"the norm of the gradients {case}", gradient_norm(model), min(norm.item(), 1), 1e-3, why)
                or expect(f"the largest error of a gradient {case}", largest, 0, 1e-3)
            ):
                return wrong
    return None


@fact("ranks synchronize in the last micro-step only", 9)
def one_sync(m: Any) -> str | None:
    class Recorder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.syncs = small_gpt(m), []  # type: ignore[var-annotated]

        def forward(self, x: Tensor, y: Tensor) -> Any:
            self.syncs.append(getattr(self, "require_backward_grad_sync", None))
            return self.model(x, y)

    m = shortened(m, TOTAL_BATCH_SIZE=64)
    recorder, shard = Recorder(), random_rows(1, 100)[0][0].numpy().astype(np.uint16)
    optimizer = recorder.model.configure_optimizers(0.1, 1e-3, (0.9, 0.95))
    m.train_step(recorder, optimizer, m.DataLoaderLite([shard], 1, 16), 0.0)
    if recorder.syncs == [False, False, False, True]:
        return None
    return f"in 4 micro-steps require_backward_grad_sync is {recorder.syncs}, not [False, False, False, True]"


@fact("rank r's micro-batch m begins at row (m * world_size + r) * B", 9)
def rows_of_ranks(m: Any) -> str | None:
    for rank in (0, 1):
        loader = m.DataLoaderLite([np.arange(2000, dtype=np.uint16)], 3, 8, rank, 2)
        found = [loader.next_batch()[0][0, 0].item() // 8 for _ in range(3)]
        if found != (expected := [(2 * batch + rank) * 3 for batch in range(3)]):
            return f"with B = 3, the micro-batches of rank {rank} of 2 begin at rows {found}, not {expected}"
    return None


# -----------------------------------------------------------------------------
# Step 10: checkpoints


@fact("a checkpoint opens in transformers, with the same logits", 10)
def opens_in_huggingface(m: Any) -> str | None:
    from transformers import GPT2LMHeadModel
    from transformers.utils.logging import disable_progress_bar, set_verbosity_error

    model = small_gpt(m)
    m.save_checkpoint(model, model.configure_optimizers(0.1, 1e-3, (0.9, 0.95)), 7)
    stored = load_file(m.OUT / "model_00007" / "model.safetensors")["transformer.h.0.attn.c_attn.weight"]
    if stored.shape != (32, 96):
        return f"c_attn.weight is stored as {tuple(stored.shape)}; transformers' Conv1D has (in, out) = (32, 96)"
    disable_progress_bar()
    set_verbosity_error()  # it complains about a config.json without bos_token_id and eos_token_id
    reference = GPT2LMHeadModel.from_pretrained(m.OUT / "model_00007").eval()
    x = random_rows()[0]
    with torch.no_grad():
        largest = (model(x)[0] - reference(x).logits).abs().max().item()
    return expect("the largest difference from transformers' logits", largest, 0, 1e-3)


@fact("a checkpoint gets its name when all its files are on the disk", 10)
def atomic(m: Any) -> str | None:
    model = small_gpt(m)
    optimizer = model.configure_optimizers(0.1, 1e-3, (0.9, 0.95))
    with mock.patch("os.fsync", side_effect=KeyboardInterrupt) as fsync, contextlib.suppress(KeyboardInterrupt):
        m.save_checkpoint(model, optimizer, 8)
    if not fsync.called:
        return (
            "save_checkpoint does not call os.fsync: after a power failure, files may be empty under their final name"
        )
    if (m.OUT / "model_00008").exists():
        return "a save that is killed leaves model_00008, which is not complete: write under another name, then rename"
    return None


@fact("a resumed run has the losses of one that was never interrupted", 10)
def resumes(m: Any) -> str | None:
    m = shortened(m, MAX_STEPS=6, WARMUP_STEPS=2, CHECKPOINT_EVERY=3, OUT=m.OUT / "run")
    whole = m.train()
    shutil.rmtree(m.OUT / "model_00006")
    resumed = m.train(resume=True)
    if len(resumed) != 3:
        return f"resumed after step 3 of 6, the run has {len(resumed)} more losses, not 3"
    for step, (found, expected) in enumerate(zip(resumed, whole[3:], strict=True), start=3):
        if wrong := expect(f"resumed at step 3, the loss of step {step}", found, expected, 0, "uninterrupted it is"):
            restored = "the weights, and is loader.position set" if step == 3 else "the optimizer's state"
            return f"{wrong}. Does load_checkpoint restore {restored}?"
    return None


@fact("two processes have the losses of one", 9)
def two_processes(m: Any) -> str | None:
    folder = m.DATA.parent
    torch.multiprocessing.spawn(train_rank, (m.__file__, str(folder)), nprocs=2)
    alone = shortened(m, MAX_STEPS=3, WARMUP_STEPS=1)
    alone.OUT = folder / "alone"  # step 10 writes a checkpoint
    losses = alone.train()
    for rank in (0, 1):
        for step, (found, expected) in enumerate(zip(np.load(folder / f"{rank}.npy"), losses, strict=True)):
            if wrong := expect(f"rank {rank}'s loss of step {step}", found, expected, 1e-4, "one process has"):
                return wrong
    return None


def train_rank(rank: int, path: str, folder: str) -> None:
    torch.distributed.init_process_group("gloo", f"file://{folder}/connect", rank=rank, world_size=2)
    m = load(Path(path), Path(folder))
    m.MAX_STEPS, m.WARMUP_STEPS = 3, 1
    with contextlib.redirect_stdout(io.StringIO()):
        np.save(Path(folder, f"{rank}.npy"), m.train(rank, 2))
    torch.distributed.destroy_process_group()


@fact("twenty losses equal those of train_gpt2.py", 10)
def equals_the_trainer(m: Any) -> str | None:
    trainer = Path(__file__).parents[2] / "train_gpt2.py"
    m = shortened(m, MAX_STEPS=20, WARMUP_STEPS=5, OUT=m.OUT / "ours")
    c, log = m.GPTConfig(), m.OUT.with_name("trainer")
    flags = f"--n-layer {c.n_layer} --n-head {c.n_head} --n-embd {c.n_embd} --block-size {m.T} --batch-size {m.B} "
    flags += f"--total-batch-size {m.TOTAL_BATCH_SIZE} --max-steps 20 --warmup-steps 5 --max-lr {m.MAX_LR} "
    flags += f"--min-lr {m.MIN_LR} --val-every 0 --sample-every 0 --checkpoint-every 0 --device cpu --dtype fp32"
    command = [sys.executable, trainer, "--data", m.DATA, "--out", log, *flags.split()]
    # sums of several threads are in another order, and Adam makes such differences grow
    subprocess.run(command, check=True, capture_output=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    lines = [line.split() for line in (log / "log.txt").read_text().splitlines()]
    theirs = [float(value) for _, name, value in lines if name == "train"]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    ours = m.train()
    torch.set_num_threads(threads)
    for step, (found, expected) in enumerate(zip(ours, theirs, strict=True)):
        if wrong := expect(f"the loss of step {step}", found, expected, 1e-4, "train_gpt2.py has"):
            return wrong
    return None


# -----------------------------------------------------------------------------
# The reader's file


def shortened(m: Any, **constants: Any) -> Any:
    """The reader's module, loaded again, with other constants."""
    again = load(Path(m.__file__), m.DATA.parent)
    for name, value in constants.items():
        getattr(m, name)  # an error if there is none
        setattr(again, name, value)
    return again


def load(path: Path, folder: Path) -> Any:
    """Imports a file as a module whose shards are in `folder`."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    module.DATA, module.OUT = folder / "data", folder / "log"  # type: ignore[attr-defined]
    return module


def explain(error: BaseException, path: Path) -> str:
    """One line for an error in the reader's file, or about what it lacks."""
    if isinstance(error, AttributeError) and getattr(error.obj, "__file__", None) == str(path):
        name = error.name or ""
        classes = ("GPT", "GPTConfig", "DataLoaderLite")
        kind = "class" if name in classes else "constant" if name.isupper() else "function"
        return f"{path.name} has no {kind} {name}"
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    if isinstance(error, SyntaxError) and error.filename == str(path):
        lines = [error.lineno]
    where = f"{path.name}, line {lines[-1]}" if lines else path.name
    return f"{where}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def call(function: Callable[..., T], path: Path, *args: Any) -> tuple[T | None, str | None]:
    """Returns the function's result, or what went wrong in it; the reader's file may print."""
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            return function(*args), None
    except (Exception, SystemExit) as error:
        return None, explain(error, path)


def check(path: Path, step: int) -> Iterator[tuple[bool, str]]:
    """Yields for each fact whether it holds, and its words or what is wrong."""
    path = path.resolve()
    with tempfile.TemporaryDirectory() as folder:
        module, wrong = call(load, path, path, Path(folder))
        if wrong:
            yield False, wrong
            return
        if step > 6:
            load(Path(__file__).with_name("step_06.py"), Path(folder)).make_shards()
        for first, last, words, holds in FACTS:
            if first <= step <= last:
                found, wrong = call(holds, path, module)
                yield (False, found or wrong or "") if found or wrong else (True, words)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--step", type=int, required=True, choices=range(1, 11))
    args = parser.parse_args()
    if not args.file.is_file():
        parser.error(f"there is no file {args.file}")
    results = []
    for holds, words in check(args.file, args.step):
        print("ok    " if holds else "wrong ", words, flush=True)
        results.append(holds)
    raise SystemExit(not all(results))


if __name__ == "__main__":
    main()
