"""Checks a program that you write along the lesson, and says which fact about it is wrong.

    python docs/from-scratch/check.py my_gpt.py --step 5

The facts of all steps up to that one are checked, as long as they hold: some end when a later step changes something.
"""

import argparse
import contextlib
import dataclasses
import hashlib
import importlib.util
import io
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, TypeVar
from unittest import mock

import numpy as np
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch import Tensor
from torch.nn import functional as F
from torch.optim.optimizer import register_optimizer_step_pre_hook

T = TypeVar("T")
Fact = Callable[[Any], str | None]  # takes the reader's module; returns what is wrong, or None
FACTS: list[tuple[set[int], str, Fact]] = []  # the steps for which a fact holds, the fact in words, and its check
SIZES = {"block_size": 16, "vocab_size": 257, "n_layer": 2, "n_head": 2, "n_embd": 32}
OPTIMIZER = (0.1, 1e-3, (0.9, 0.95))  # weight decay, rate, betas
SEED = 87  # one that no program sets
# a short text, of which only the part that is held out contains qz
SHORT_TEXT = dict([*topics.items()][:5]) | {"qz": "qz " * 150}


def fact(words: str, first: int, last: int = 13, without: int = 0) -> Callable[[Fact], Fact]:
    def add(check: Fact) -> Fact:
        FACTS.append(({*range(first, last + 1)} - {without}, words, check))
        return check

    return add


def expect(what: str, found: float, expected: float, tolerance: float = 1e-4, why: str = "") -> str | None:
    if abs(found - expected) <= tolerance:
        return None
    if math.isnan(found):
        return f"{what} is nan. Does the mask hide every token from the first one, itself included?"
    return f"{what} is {found:.6g}; {why or 'it should be'} {expected:.6g}"


def explain_difference(
    what: str, found: Tensor, right: Tensor, mistakes: dict[str, Callable[[], Tensor]], tolerance: float = 1e-4
) -> str | None:
    """Returns None if `found` is right; otherwise the mistake that would give it, or how far it is off."""
    if found.shape != right.shape:
        return f"{what} has the shape {tuple(found.shape)}, not {tuple(right.shape)}"
    if (found - right).abs().max() <= tolerance:
        return None
    for words, result in mistakes.items():
        with contextlib.suppress(RuntimeError):  # shapes that do not fit
            other = result()
            if other.shape == found.shape and torch.allclose(found, other, rtol=0, atol=tolerance, equal_nan=True):
                return f"{what} is wrong: {words}"
    if found.isnan().any():
        return f"{what} is nan. Does the mask hide every token from the first one, itself included?"
    return f"{what} is wrong, by up to {(found - right).abs().max():.4g}, and like no mistake that this check knows"


def small_gpt(m: Any, **sizes: int) -> Any:
    """A small model of the reader's, with random weights that are large enough to make differences visible."""
    names = {field.name for field in dataclasses.fields(m.GPTConfig)}
    torch.manual_seed(1)
    model = m.GPT(m.GPTConfig(**{name: value for name, value in {**SIZES, **sizes}.items() if name in names}))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.3)
    return model.eval()


def number(loss: Any) -> float:
    return float(loss.item() if isinstance(loss, Tensor) else loss)


def new_gpt(m: Any) -> Any:
    torch.manual_seed(1)
    return m.GPT(m.GPTConfig())


def random_rows(B: int = 4, T: int = 16, V: int = 257, seed: int = 2) -> tuple[Tensor, Tensor]:
    rows = torch.randint(V, (B, T + 1), generator=torch.Generator().manual_seed(seed))
    return rows[:, :-1], rows[:, 1:]


# -----------------------------------------------------------------------------
# Step 1: counts


@fact("the tokens are the bytes of the documents, each after an end-of-text token", 1, 7)
def tokens_are_bytes(m: Any) -> str | None:
    train, val = m.load_tokens()
    expected = b"".join(b"\0" + text.encode() for text in topics.values())
    if len(val) and is_inside(val, train):
        return "load_tokens returns a held-out part that is also in the text to train on: tokens[:n] and tokens[n:]"
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
    sums = probs.sum(dim=1)
    if probs.shape == (257, 257) and (sums - 1).abs().max() > 1e-4:
        return f"the probabilities after byte {int((sums - 1).abs().argmax())} add up to {sums[(sums - 1).abs().argmax()]:.4g}. Does each row add up to 1? The sum of each row keeps its dimension with keepdim=True"
    return None if abs(probs[97, 98] - expected) < 1e-6 else f"{found}; (2 + 1) / (3 + 257) is {expected:.6f}"


@fact("the loss is the mean of -ln p of the tokens that follow", 1, 1)
def loss_of_counts(m: Any) -> str | None:
    probs = torch.full((257, 257), 0.5 / 257)
    probs[1, 2] = 0.5
    expected = -(math.log(0.5) + math.log(0.5 / 257)) / 2
    found = float(m.validation_loss(probs, torch.tensor([1, 2, 1])))
    of_mean = abs(found + math.log((0.5 + 0.5 / 257) / 2)) < 1e-4
    hint = ". It is the logarithm of the mean; take the mean of the logarithms" if of_mean else ""
    wrong = expect("the loss of two pairs", found, expected)
    return wrong and f"{wrong}{hint}"


@fact("the next token is drawn from the row of the one before", 1, 1)
def samples_follow_the_rows(m: Any) -> str | None:
    found = list(m.generate(torch.eye(257).roll(1, dims=1), 5, 3))  # row i has all its probability at i + 1
    if found != [5, 6, 7, 8]:
        return f"where i + 1 always follows i, 5 is continued as {found}, not [5, 6, 7, 8]"
    torch.manual_seed(1)
    probs = torch.zeros(257, 257)
    probs[:, 1], probs[:, 2] = 0.75, 0.25
    new = torch.tensor(list(m.generate(probs, 1, 1000))[1:])
    return explain_frequencies({1: 0.75, 2: 0.25}, new)


def explain_frequencies(probs: dict[int, float], new: Tensor) -> str | None:
    """Returns what is wrong with how often tokens were drawn."""
    if len(probs) > 1 and len(set(new.tolist())) == 1:
        likeliest = " the likeliest" if int(new[0]) == max(probs, key=probs.__getitem__) else ""
        return f"all {len(new)} new tokens are {int(new[0])},{likeliest}: draw from the probabilities, with torch.multinomial"
    for token, p in probs.items():
        if wrong := expect(
            f"the frequency of a token of probability {p:.2f}", (new == token).float().mean().item(), p, 0.05
        ):
            return wrong
    return None


# -----------------------------------------------------------------------------
# Step 2: by hand


def small_matrices() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    E, W = (torch.randn(257, 8, generator=generator) for _ in range(2))
    x = torch.tensor([1, 2, 1, 3, 1, 2])  # a token more than once
    return E, W, x, torch.tensor([2, 1, 3, 1, 2, 2])


@fact("the loss is the mean of -ln softmax(E[x] @ W.T) of the tokens that follow", 2, 2)
def loss_by_hand(m: Any) -> str | None:
    E, W, x, y = small_matrices()
    each = [-math.log(torch.softmax(E[i] @ W.T, 0)[j]) for i, j in zip(x.tolist(), y.tolist(), strict=True)]
    found = m.mean_loss(E, W, x, y)
    if found.shape:
        return f"mean_loss returns {tuple(found.shape)} numbers; a loss is one: take the mean"
    return expect("the loss of six pairs", found.item(), sum(each) / 6, 1e-3)


@fact("the gradients by hand are those of autograd", 2, 2)
def gradients_by_hand(m: Any) -> str | None:
    E, W, x, y = small_matrices()
    E.requires_grad_(), W.requires_grad_()
    loss = F.cross_entropy(E[x] @ W.T, y)
    right = torch.autograd.grad(loss, (E, W))
    with torch.no_grad():
        found = m.gradients(E, W, x, y)
        d = (E[x] @ W.T).softmax(dim=1)
    one_hot = F.one_hot(y, 257)
    once = torch.zeros(257, 8)
    once[x] = right_d = ((d - one_hot) / 6) @ W.detach()
    total = torch.zeros(257, 8).index_add_(0, x, right_d)
    mistakes = {
        "it is that of the sum: divide by the number of pairs": lambda: 6 * total,
        "a token that occurs several times keeps only one of its gradients: add them, with index_add_": lambda: once,
        "its sign: the gradient is p - [i = y]": lambda: -total,
        "the 1 of the token that came is not subtracted": lambda: torch.zeros(257, 8).index_add_(
            0, x, d @ W.detach() / 6
        ),
    }
    return explain_difference("the gradient for E", found[0], right[0], mistakes, 1e-5) or explain_difference(
        "the gradient for W",
        found[1],
        right[1],
        {
            "it is that of the sum: divide by the number of pairs": lambda: 6 * right[1],
            "the 1 of the token that came is not subtracted": lambda: d.T @ E[x].detach() / 6,
        },
        1e-5,
    )


@fact("five lines are Adam", 2, 2)
def adam_by_hand(m: Any) -> str | None:
    ours = torch.tensor([1.0, -2.0, 0.5, 0.0])
    theirs = ours.clone().requires_grad_()
    mean, square = torch.zeros(4), torch.zeros(4)
    adam = torch.optim.Adam([theirs], lr=0.1)
    # the last element shows where the 1e-8 is
    gradients = [[1.0, 2.0, -3.0, 1e-4], [0.5, -2.0, 1.0, 1e-4], [4.0, 0.1, 0.0, 1e-4]]
    for step, gradient in enumerate(torch.tensor(gradients)):
        theirs.grad = gradient.clone()
        adam.step()
        m.adam_step(ours, gradient, mean, square, step, 0.1)
        state = adam.state[theirs]
        for what, found, right in (
            ("m, the mean of the gradient,", mean, state["exp_avg"]),
            ("v, the mean of its square,", square, state["exp_avg_sq"]),
            ("p", ours, theirs.detach()),
        ):
            if not (found - right).abs().max() <= 1e-5:  # nan is no difference, but wrong
                hint = (
                    ". Are m and v divided by 1 - beta ** (step + 1)?"
                    if what == "p"
                    else ". Is it changed in place, and by no other line?"
                )
                if what == "p" and (found - right)[:3].abs().max() <= 1e-5:
                    hint = ". Is 1e-8 added to the root, and not under it?"
                return f"after step {step}, {what} is {found.tolist()}; torch.optim.Adam has {right.tolist()}{hint}"
    return None


@fact("each backward begins without the gradients of the step before, and Adam keeps its averages", 2, 2)
def no_gradient_is_left(m: Any) -> str | None:
    m = shortened(m, MAX_STEPS=3)
    backward, left = Tensor.backward, []
    adam_step, averages = m.adam_step, []

    def watched(p: Tensor, gradient: Tensor, m: Tensor, v: Tensor, step: int, lr: float) -> None:
        averages.append((step, m, v, bool(v.any())))
        adam_step(p, gradient, m, v, step, lr)

    m.adam_step = watched

    def recorded(loss: Tensor, *args: Any, **kwargs: Any) -> None:
        left.append(any(leaf.grad is not None and leaf.grad.any() for leaf in leaves(loss)))
        backward(loss, *args, **kwargs)

    text = torch.randint(257, (2000,), generator=torch.Generator().manual_seed(5))
    with mock.patch.object(Tensor, "backward", recorded):
        E, W = m.train(text, 1e-2, True)
    if any(left):
        return (
            f"backward {left.index(True)} adds to the gradients of the one before: set p.grad to None after each update"
        )
    if any(step > 1 and not filled for step, *_, filled in averages):  # W is zero, so E's first gradient is, too
        return "m and v are zero again in a later step: make them once, before the loop"
    if averages and len({average.data_ptr() for _, m, v, _ in averages for average in (m, v)}) < 4:
        return "m and v share memory: E and W need two tensors each"
    return None if W.any() else "after three steps W is still zero: is it updated?"


@fact("train takes each step on new pairs from all of the text, and Adam's steps are counted from 0", 2, 2)
def pairs_of_train(m: Any) -> str | None:
    m = shortened(m, MAX_STEPS=3)
    mean_loss, adam_step, calls, steps = m.mean_loss, m.adam_step, [], []

    def watched_loss(E: Tensor, W: Tensor, x: Tensor, y: Tensor) -> Tensor:
        calls.append((x.clone(), y.clone(), bool(W.any())))
        return mean_loss(E, W, x, y)

    def watched_step(p: Tensor, gradient: Tensor, m: Tensor, v: Tensor, step: int, lr: float) -> None:
        steps.append(step)
        adam_step(p, gradient, m, v, step, lr)

    m.mean_loss, m.adam_step = watched_loss, watched_step
    text = torch.cat([torch.arange(128).repeat(100), 128 + torch.arange(128).repeat(100)])  # i + 1 follows i
    m.train(text, 1e-2, True)
    if steps != [0, 0, 1, 1, 2, 2]:
        hint = ". Are E and W both updated, and is it called if adam is true?" if len(steps) != 6 else ""
        return f"in three steps adam_step is called with the steps {steps}, not [0, 0, 1, 1, 2, 2]{hint}"
    m.train(text, 1e-2, False)
    if len(steps) > 6:
        return "train calls adam_step although adam is false"
    for i, (x, y, is_set) in enumerate(calls[:3]):
        if not torch.equal(y % 128, (x + 1) % 128):
            return f"in the text 0, 1, 2, ... token {y[0]} is to be predicted from {x[0]}; it should be the one that follows"
        if x.max() < 128:
            return "all pairs are from the beginning of the text: draw their places from all of it"
        if i and torch.equal(x, calls[i - 1][0]):
            return f"steps {i - 1} and {i} train on the same pairs: draw new ones in each step"
        if i == 0 and is_set:
            return "W does not begin at zero, so the first loss is not ln 257"
    return None


def leaves(loss: Tensor) -> set[Tensor]:
    found, nodes = set(), [loss.grad_fn]
    while nodes:
        node = nodes.pop()
        if hasattr(node, "variable"):
            found.add(node.variable)
        nodes += [after for after, _ in node.next_functions if after] if node else []
    return found


# -----------------------------------------------------------------------------
# What the reader's training loop does, step by step


@dataclasses.dataclass
class Step:
    """What an optimizer step found."""

    model: Any
    optimizer: torch.optim.Optimizer
    groups: list[dict[str, Any]]  # the optimizer's, as they were
    averages: bool  # whether the optimizer has any
    batches: list[tuple[Tensor, Tensor]]  # since the step before
    loss: float  # of these batches, their mean
    expected: Tensor  # the gradient of that loss, all parameters in a row
    clipped_each: Tensor  # the same, if the sum so far is clipped at a norm of 1 after each batch
    found: Tensor  # the gradient that is there

    @property
    def rates(self) -> set[float]:
        return {float(group["lr"]) for group in self.groups}


class Watch:
    """Records the batches that models of the reader's class get, and the gradients that optimizers then find."""

    def __init__(self, m: Any):
        self.gpt, self.model = m.GPT, None
        self.batches: list[tuple[Tensor, Tensor]] = []
        self.steps: list[Step] = []
        self.recording = True

    def __enter__(self) -> "Watch":
        forward = self.gpt.forward

        def recorded(model: Any, idx: Tensor, targets: Tensor | None = None) -> Any:
            if self.recording and targets is not None and torch.is_grad_enabled():
                self.model = model
                self.batches.append((idx.clone(), targets.clone()))
            return forward(model, idx, targets)

        self.patch = mock.patch.object(self.gpt, "forward", recorded)
        self.patch.start()
        self.hook = register_optimizer_step_pre_hook(self.before_step)
        return self

    def __exit__(self, *exception: Any) -> None:
        self.patch.stop()
        self.hook.remove()

    def before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self.model is None:
            return
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        zero = torch.cat([torch.zeros(p.numel()) for p in parameters])
        found = torch.cat([torch.zeros(p.numel()) if p.grad is None else p.grad.flatten() for p in parameters])
        expected, clipped_each, losses, self.recording = zero, zero, [], False
        for x, y in self.batches:
            with torch.enable_grad():
                loss = self.model(x, y)[1] / len(self.batches)
                grads = torch.autograd.grad(loss, parameters, allow_unused=True)
            pairs = zip(grads, parameters, strict=True)
            grad = torch.cat([torch.zeros(p.numel()) if g is None else g.flatten() for g, p in pairs])
            expected, clipped_each = expected + grad, clipped_each + grad
            clipped_each = clipped_each / max(1.0, clipped_each.norm().item())
            losses.append(loss.item())
        groups = [dict(group) for group in optimizer.param_groups]
        mean = sum(losses) if losses else math.nan
        gradients = expected, clipped_each, found.clone()
        self.steps.append(Step(self.model, optimizer, groups, bool(optimizer.state), self.batches, mean, *gradients))
        self.batches, self.recording = [], True


def explain_steps(steps: list[Step], expected_steps: int, clips: bool, said: str = "") -> str | None:
    """Returns what is wrong with the gradients that the optimizer's steps found."""
    for i, step in enumerate(steps):
        if not step.batches:
            return "optimizer.step() is called twice for the same batch: once is enough"
        if i and step.model is not steps[i - 1].model:
            return "a new model is made in each step, so nothing is learned: make it once, before the loop"
        if i and (step.optimizer is not steps[i - 1].optimizer or not step.averages):
            return "a new optimizer is made in each step, so its averages are lost: make it once, before the loop"
        if frozen := [name for name, p in step.model.named_parameters() if not p.requires_grad]:
            return f"{frozen[0]} gets no gradient, since its requires_grad is False: it would never change"
        if left_out := parameters_without(step.optimizer, step.model):
            if len(left_out) == len([*step.model.parameters()]):
                return "the optimizer has the weights of another model: make it after the model, from its parameters"
            return f"the optimizer does not have {left_out[0]}: it would never change"
        if not step.found.any():
            return f"optimizer.step() finds no gradient in step {i}: does backward() come before it, from the loss that forward returns, and zero_grad() not between them?"
        before = steps[i - 1].found if i else torch.zeros_like(step.found)
        if unlike(step.found, step.expected):
            if i and not unlike(step.found, step.expected + before):
                return f"the gradient of step {i} is its own plus that of step {i - 1}: optimizer.zero_grad() is missing before backward()"
            if clips and not unlike(step.found, step.expected.clamp(-1, 1)):
                return f"in step {i} each element of the gradients is clipped, which changes their direction: clip their norm, with nn.utils.clip_grad_norm_"
            if clips and not unlike(step.found, step.clipped_each):
                return f"in step {i} gradients are clipped after each micro-batch: clip them once, after the last one"
            if clips and (wrong := explain_scales(step)):
                return f"in step {i} {wrong}"
            return f"the gradient that optimizer.step() finds in step {i} is not that of its batch: does zero_grad() come before backward(), and is backward() called once for each loss?"
        size, right = step.found.norm().item(), step.expected.norm().item()
        if clips and right > 1 and size < 1 - 1e-2:
            return f"when optimizer.step() is called, the norm of the gradients is {size:.4g}, not 1: are they clipped at another norm, or is the mean loss divided once more?"
        if clips and right > 1 and size > 1 + 1e-2:
            return f"when optimizer.step() is called, the norm of the gradients is {size:.4g}: clip them to 1 between backward() and step()"
        if (not clips or right < 1) and abs(size - right) > 1e-2 * right:
            return f"the gradient of step {i} is {size / right:.3g} times as large as that of the mean loss"
    if len(steps) != expected_steps:
        return f"{expected_steps} training steps call optimizer.step() {len(steps)} times{said}"
    return None


def parameters_without(optimizer: torch.optim.Optimizer, model: Any) -> list[str]:
    """Returns the names of the model's parameters that the optimizer does not have."""
    has = {id(p) for group in optimizer.param_groups for p in group["params"]}
    return [name for name, p in model.named_parameters() if id(p) not in has]


def explain_scales(step: Step) -> str | None:
    """Returns what is wrong if each parameter's gradient has the right direction, but not all have the same factor."""
    names, sizes = zip(*((name, p.numel()) for name, p in step.model.named_parameters()), strict=True)
    factors = {}
    for name, found, expected in zip(names, step.found.split(sizes), step.expected.split(sizes), strict=True):
        if expected.norm() < 1e-6:
            continue
        if found.any() and unlike(found, expected):
            return None
        factors[name] = (found.norm() / expected.norm()).item()
    if not factors:
        return None
    least, most = (choose(factors, key=factors.__getitem__) for choose in (min, max))
    return f"the gradients of {least} are multiplied by {factors[least]:.3g}, those of {most} by {factors[most]:.3g}: clip all by the same factor, in one call of nn.utils.clip_grad_norm_(model.parameters(), 1.0)"


def unlike(a: Tensor, b: Tensor) -> bool:
    """Returns whether two gradients have different directions."""
    return not F.cosine_similarity(a.double(), b.double(), dim=0).item() >= 1 - 1e-4  # nan is unlike everything


def is_inside(row: Tensor, tokens: Any) -> bool:
    return row.numpy().astype(np.uint16).tobytes() in np.asarray(tokens).astype(np.uint16).tobytes()


def explain_repeats(steps: list[Step]) -> str | None:
    """Returns which batches are the same although each should be a new one."""
    before: list[Tensor] = []
    for i, step in enumerate(steps):
        now = [x for x, _ in step.batches]
        for a, b in zip(now, now[1:], strict=False):
            if torch.equal(a, b):
                return f"two micro-batches of step {i} are the same: draw a new one for each"
        if any(torch.equal(a, b) for a, b in zip(before, now, strict=False)):
            return f"steps {i - 1} and {i} train on the same batch: draw a new one in each step (is a seed set again, the loader made again, or the batch drawn before the loop?)"
        before = now
    return None


def explain_batches(steps: list[Step], train: Any, val: Any) -> str | None:
    if wrong := explain_repeats(steps):
        return wrong
    for i, step in enumerate(steps):
        for x, y in step.batches:
            for row in torch.cat((x, y[:, -1:]), dim=1):
                if not is_inside(row, train):
                    if is_inside(row[:-1], train) and not is_inside(row, val):
                        return f"step {i} trains on a row whose targets are not the tokens that follow it"
                    where = "the held-out text" if is_inside(row, val) else "neither part of the text"
                    return f"step {i} trains on a row that is from {where}"
    return None


def explain_training(m: Any, watch: Watch, train: Any, val: Any, said: str) -> str | None:
    """Returns what is wrong with a run of four steps; `said` is what the check has set for it."""
    recipe = hasattr(m, "get_lr")
    rates = {"MAX_LR": 3e-3, "MIN_LR": 3e-4} if recipe else {"LR": 3e-3 if hasattr(m.GPTConfig, "block_size") else 1e-2}
    for name, rate in rates.items():
        if not math.isclose(found := getattr(m, name), rate):
            return f"{name} is {found:g}; the lesson has {rate:g}"
    for i, step in enumerate(watch.steps):
        if not isinstance(step.optimizer, torch.optim.AdamW):
            return f"the optimizer is {type(step.optimizer).__name__}; it should be AdamW"
        for group in step.groups if recipe else []:
            if (betas := tuple(group["betas"])) != (0.9, 0.95):
                return f"the optimizer of step {i} has the betas {betas}; the lesson has (0.9, 0.95)"
            if any(p.dim() > 1 for p in group["params"]) and group["weight_decay"] != 0.1:
                return f"the optimizer of step {i} has a weight decay of {group['weight_decay']:g}; the lesson has 0.1"
    if wrong := explain_steps(watch.steps, 4, recipe, said) or explain_batches(watch.steps, train, val):
        return wrong
    for i, step in enumerate(watch.steps):
        rate, after = (m.get_lr(i), m.get_lr(i + 1)) if recipe else (m.LR, m.LR)
        if max(abs(lr - rate) for lr in step.rates) > rate / 1000:
            hint = ". It is that of the step after: steps count from 0" if step.rates == {after} else ""
            if recipe and all(other.rates == step.rates for other in watch.steps):
                hint = ". It is the same in all steps: each has its own, get_lr(step)"
            return f"step {i} has the learning rate {max(step.rates):.6g}, not {rate:.6g}{hint}{said}"
    return None


# -----------------------------------------------------------------------------
# Steps 3 to 6: the model


@fact("a batch has a target for each token: the next one", 3, 8)
def targets_follow(m: Any) -> str | None:
    text = torch.arange(4 * m.B * m.T)
    x, y = m.get_batch(text)
    if x.shape != (m.B, m.T) or y.shape != (m.B, m.T):
        return f"a batch has tokens {tuple(x.shape)} and targets {tuple(y.shape)}; both should be {(m.B, m.T)}"
    for token, target in zip(x.flatten().tolist(), y.flatten().tolist(), strict=True):
        if target != token + 1:
            return f"in the text 0, 1, 2, ... the target of {token} is {target}; it should be {token + 1}"
    if len(set(x[:, 0].tolist())) == 1:
        return "all rows of a batch begin at the same place"
    if torch.equal(x, m.get_batch(text)[0]):
        return "get_batch returns the same batch in each call: draw new places each time, and set no seed there"
    if not (x[:, 0] % m.T).any():
        return f"all rows begin at multiples of T = {m.T}: a row may begin at any place"
    starts = torch.cat([m.get_batch(torch.arange(m.T + 3))[0][:, 0] for _ in range(20)])
    if starts.max() < 2:
        return f"in a text of {m.T + 3} tokens a row can begin at 0, 1 and 2; none of {len(starts)} begins at 2"
    return None


@fact("the parameters have the names and sizes of GPT-2's", 3)
def parameters(m: Any) -> str | None:
    model = small_gpt(m)
    found = {name: tuple(p.shape) for name, p in model.named_parameters(remove_duplicate=False)}
    names: dict[int, str] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        if (first := names.setdefault(id(p), name)) != name and {first, name} != {"wte.weight", "lm_head.weight"}:
            return f"{first} and {name} are one parameter, since one module is used twice: each place needs its own"
    C, V, right = 32, 257, {"wte.weight": (257, 32), "lm_head.weight": (257, 32)}
    linear = {"attn.c_attn": (3 * C, C), "attn.c_proj": (C, C), "mlp.c_fc": (4 * C, C), "mlp.c_proj": (C, 4 * C)}
    if hasattr(model, "wpe"):
        right["wpe.weight"] = (16, C)
    if hasattr(model, "h"):
        for layer in range(len(model.h)):
            named = {**linear, "ln_1": (C,), "ln_2": (C,)}
            right |= {f"h.{layer}.{name}.weight": shape for name, shape in named.items()}
            right |= {f"h.{layer}.{name}.bias": shape[:1] for name, shape in named.items()}
        if len(model.h) != 2:
            return f"with n_layer=2 there are {len(model.h)} blocks"
        right |= {"ln_f.weight": (C,), "ln_f.bias": (C,)}
    elif hasattr(model, "attn"):
        right |= {"attn.c_attn.weight": (3 * C, C), "attn.c_attn.bias": (3 * C,)}
    if hasattr(model, "h") and not isinstance(model.h, torch.nn.Module):
        return f"h is a {type(model.h).__name__}, whose parameters PyTorch does not find: nn.ModuleList([...])"
    for name in right.keys() - found.keys():
        return (
            f"there is no {min(right.keys() - found.keys())} among the parameters: GPT-2 has one; use its names"
            if name
            else None
        )
    if more := sorted(found.keys() - right.keys()):
        bias = ": nn.Linear(..., bias=False)" if more[0] == "lm_head.bias" else ""
        return f"GPT-2 has no {more[0]}{bias or ': use its names, and nothing else'}"
    for name, shape in right.items():
        if found[name] != shape:
            return f"{name} is {found[name]}; with {C} channels and {V} tokens it should be {shape}"
    return None


@fact("a row may be shorter than block_size, and gives the same logits each time", 3)
def rows_of_any_length(m: Any) -> str | None:
    for T in (16, 10):
        x = random_rows(3, T)[0]
        if wrong := explain_constants(m, x):
            return wrong
        model = small_gpt(m)
        with torch.no_grad():
            for words in ("also after model.eval()", "in training"):
                if not torch.allclose(model(x)[0], model(x)[0], equal_nan=True):
                    return f"two calls with the same rows have different logits, {words}: there is dropout or another random number in forward. The lesson's GPT has none: leave it out"
                model.train()
    return None


def explain_constants(m: Any, x: Tensor) -> str | None:
    """Returns what is wrong if forward fails, but not if the module's constants T or B are the sizes of this batch."""
    B, T = x.shape
    try:
        small_gpt(m)(x)
        return None
    except (RuntimeError, IndexError) as error:
        is_index = isinstance(error, IndexError)
        sizes = {name: size for name, size in {"T": T, "B": B}.items() if getattr(m, name, size) != size}
        for names in (["T"], ["B"], ["T", "B"]):
            if sizes.keys() >= {*names}:
                with contextlib.suppress(RuntimeError, IndexError):
                    with mock.patch.multiple(m, **{name: sizes[name] for name in names}):
                        small_gpt(m)(x)
                    meant = {"T": f"T is the row's length, {T}", "B": f"B is the number of rows, {B}"}
                    constants = " and ".join(str(getattr(m, name)) for name in names)
                    return f"in forward, {' and '.join(meant[name] for name in names)}; here it is the module's constant, {constants}: take both from a tensor's shape"
        if T < 16:
            return f"forward fails with rows of {T} tokens, but not with 16, which is block_size: use the row's own length ({str(error).splitlines()[0]})"
        if is_index and hasattr(m.GPTConfig, "block_size"):
            return "an embedding gets a number for which it has no row: wte gets the tokens, and wpe the positions, torch.arange(T)"
        raise


@fact("changing the future leaves the past unchanged", 4)
def causal(m: Any) -> str | None:
    model, x = small_gpt(m), random_rows(1)[0]
    changed = x.clone()
    changed[0, 8] += 1 if x[0, 8] < 256 else -1
    with torch.no_grad():
        before, after = model(x)[0], model(changed)[0]
    if before.isnan().any():
        return f"logits are nan: {explain_attention_of(m, model) or 'is there a division by 0?'}"
    moved = (before - after).abs().amax(dim=(0, 2)) > 1e-5
    if moved[:8].any():
        if cause := explain_attention_of(m, model):
            return f"when token 8 changes, the logits at {int(moved.nonzero()[0])} change: they see the future. {cause}"
        return f"when token 8 changes, the logits at {int(moved.nonzero()[0])} change: they see the future. Look at the mask and the softmax"
    if not moved[8]:
        return "when token 8 changes, the logits at 8 do not: the mask hides a token from itself"
    return None if moved[9:].all() else "when token 8 changes, the logits after it do not: there is no attention"


@fact("the order of the tokens matters", 4)
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


@fact("at the beginning all tokens are equally likely", 3, 5)
def first_loss(m: Any) -> str | None:
    with torch.no_grad():
        loss = new_gpt(m)(*random_rows())[1].item()
    return expect("the first loss", loss, math.log(257), 1e-4, "with lm_head at zero it is ln 257 =")


@fact("the loss is the mean cross-entropy of the logits", 3)
def loss_of_logits(m: Any) -> str | None:
    model, (x, y) = small_gpt(m), random_rows()
    with torch.no_grad():
        logits, loss = model(x)[0], number(model(x, y)[1])
    if logits.shape != (4, 16, 257):
        return f"the logits of 4 rows of 16 tokens have the shape {tuple(logits.shape)}, not (4, 16, 257)"
    each = F.cross_entropy(logits.mT, y, reduction="none")
    wrong = expect("the loss of a batch", loss, each.mean().item(), 1e-3, "the mean of -ln softmax(logits)[target] is")
    mistakes = {
        "it is the sum: take the mean": each.sum(),
        "it is the sum over the positions: take the mean": each.sum(dim=1).mean(),
        "the targets are shifted a second time: they are the next tokens already": F.cross_entropy(
            logits[:, :-1].mT, y[:, 1:]
        ),
        "only the last position counts: take the mean over all of them": each[:, -1].mean(),
        "the softmax is applied twice: cross_entropy has one": F.cross_entropy(logits.softmax(dim=-1).mT, y),
        "the targets are the inputs": F.cross_entropy(logits.mT, x),
        "the targets are in another order than the logits": F.cross_entropy(logits.flatten(0, 1), y.T.flatten()),
    }
    hint = next((words for words, other in mistakes.items() if abs(loss - other.item()) < 1e-3), "")
    return f"{wrong}. {hint[:1].upper()}{hint[1:]}" if wrong and hint else wrong


@fact("the validation loss is the mean over the rows of T + 1 tokens at 0, T, 2T, ...", 3, 8)
def validation_of_rows(m: Any) -> str | None:
    count = 41  # the last batch of 16 or 32 rows is not full
    tokens = torch.arange(count * m.T + 1)
    model = small_gpt(m, block_size=m.T, vocab_size=len(tokens))
    seen, expected = [], []
    forward = m.GPT.forward

    def recorded(model: Any, idx: Tensor, targets: Tensor | None = None) -> Any:
        if idx.size(1) != m.T:
            raise ValueError(
                f"a row has {idx.size(1)} tokens and their targets, not T = {m.T}: is T + 1 more than are left at the end?"
            )
        seen.append(idx.clone())
        return forward(model, idx, targets)

    with mock.patch.object(m.GPT, "forward", recorded):
        found = m.validation_loss(model, tokens)
    starts = torch.cat(seen)[:, 0].tolist() if seen else []
    right = [*range(0, count * m.T, m.T)]
    for i, (start, expected_start) in enumerate(zip(starts, right, strict=False)):
        if start != expected_start:
            return f"of {len(tokens)} tokens row {i} begins at {start}; with T = {m.T} it begins at {expected_start}"
    if len(starts) != count:
        return f"of {len(tokens)} tokens {len(starts)} rows are measured; with T = {m.T} there are {count}, all of which count, whatever the size of a batch"
    with torch.no_grad():
        rows = [tokens[i : i + m.T + 1] for i in right]
        expected = sum(model(row[None, :-1], row[None, 1:])[1].item() for row in rows) / len(rows)
    wrong = expect("the validation loss", found, expected, 1e-3, "one row at a time it is")
    others = {
        "That is the sum: take the mean": expected * count,
        "That is in bits: a loss is in nats": expected / math.log(2),
    }
    hint = next((f". {words}" for words, other in others.items() if abs(found - other) < 1e-3), "")
    return f"{wrong}{hint}" if wrong else None


@fact("the model continues a text by sampling from its last logits", 3, 10)
def samples(m: Any) -> str | None:
    model, idx = small_gpt(m), random_rows(T=30)[0]
    options = (1.0, None) if hasattr(m, "next_token_probs") else ()
    with torch.no_grad():
        model.wte.weight *= 10  # so that the likeliest token depends on the tokens more than on their places
        model.lm_head.weight *= 1000  # so that it has all the probability
        new = model.generate(idx, 1, *options)
        logits = model(idx[:, -16:])[0]
        expected = logits[:, -1].argmax(-1)
        if new.shape != (4, 31) or not torch.equal(new[:, :-1], idx):
            return f"generate continues rows of 30 tokens by one and returns {tuple(new.shape)}: it should return them with the new one at the end"
        if torch.equal(new[:, -1], expected[:1].expand(4)) and not torch.equal(new[:, -1], expected):
            return f"the likeliest tokens of four rows are {expected.tolist()}, but all get that of the first: does each row draw from its own logits?"
        mistakes = {
            "the context is cut to its first tokens: the last block_size of them are idx[:, -block_size:]": model(
                idx[:, :16]
            )[0][:, -1],
            "they come from the logits of the first position: the last one is logits[:, -1]": logits[:, 0],
            "they come from the logits of the last position but one": logits[:, -2],
            "they are the least likely: is there a minus, or an argmin?": -logits[:, -1],
        }
        for words, other in mistakes.items():
            if not torch.equal(new[:, -1], expected) and torch.equal(new[:, -1], other.argmax(-1)):
                return f"the new tokens are not those that have nearly all the probability: {words}"
        if not torch.equal(new[:, -1], expected):
            return f"the likeliest tokens are {expected.tolist()}, the new ones {new[:, -1].tolist()}: do they come from the logits of the last position, and does the softmax add up to 1 for each row (dim=-1)?"
        model = small_gpt(m)
        model.lm_head.weight /= 10
        logits = model(idx[:1, -16:])[0][0, -1]
        probs = torch.softmax(logits, dim=-1).topk(2)
        new = model.generate(idx[:1].expand(2000, -1), 1, *options)[:, -1]
    return explain_frequencies(dict(zip(probs.indices.tolist(), probs.values.tolist(), strict=True)), new)


# -----------------------------------------------------------------------------
# The model, tensor by tensor and block by block. Each part gets the reader's own modules, so only its own mistake shows.


def attend(q: Tensor, k: Tensor, v: Tensor, divisor: float, mask: str, dim: int) -> Tensor:
    scores = q @ k.mT / divisor
    T = scores.size(-1)
    hidden = {
        "causal": torch.ones(T, T).triu(1),
        "none": torch.zeros(T, T),
        "past": torch.ones(T, T).tril(-1),
        "late": torch.ones(T, T).triu(2),
        "itself": torch.ones(T, T).triu(),
    }.get(mask, torch.ones(T, T).triu(1))
    if mask == "after":
        return F.softmax(scores, dim).masked_fill(hidden.bool(), 0.0) @ v
    return F.softmax(scores.masked_fill(hidden.bool(), 0.0 if mask == "zero" else -math.inf), dim) @ v


def explain_attention(attention: Any, n_head: int) -> str | None:
    """Compares attention with the formula, and names the place where it differs."""
    B, T, C = 2, 12, 32
    x = torch.randn(B, T, C, generator=torch.Generator().manual_seed(3))
    hs, has_proj = C // n_head, hasattr(attention, "c_proj")
    words = "sqrt(C)" if n_head == 1 else "sqrt(C // n_head)"
    right_divisor = math.sqrt(hs)
    splits: dict[str, Callable[[Tensor], Tensor]] = {
        "": lambda t: t.view(B, T, n_head, hs).transpose(1, 2),
        "heads are cut from the wrong dimension: view(B, T, n_head, hs), then transpose(1, 2)": lambda t: t.reshape(
            B, n_head, T, hs
        ),
        "a head takes every n_head-th channel instead of neighbouring ones: view(B, T, n_head, hs)": lambda t: t.view(
            B, T, hs, n_head
        ).permute(0, 3, 1, 2),
    }
    joins: dict[str, Callable[[Tensor], Tensor]] = {
        "": lambda y: y.transpose(1, 2).reshape(B, T, C),
        "heads are joined without the transpose: y.transpose(1, 2) comes before reshape(B, T, C)": lambda y: y.reshape(
            B, T, C
        ),
        "channels of the heads are mixed when they are joined: transpose(1, 2), then reshape(B, T, C)": lambda y: (
            y.permute(0, 2, 3, 1).reshape(B, T, C)
        ),
    }
    orders = {
        "": (0, 1, 2),
        "q and k are swapped: c_attn gives q, k and v in this order, and the row of the scores is q's": (1, 0, 2),
        "k and v are swapped: c_attn gives q, k and v in this order": (0, 2, 1),
        "q and v are swapped: c_attn gives q, k and v in this order": (2, 1, 0),
        "q, k and v are in the wrong order: c_attn gives q, then k, then v": (1, 2, 0),
        "q, k and v are in the wrong order: c_attn gives q, then k, and then v": (2, 0, 1),
    }
    divisors = {
        "": right_divisor,
        f"the scores are divided by sqrt(T); they should be divided by {words} = {right_divisor:.3g}": math.sqrt(T),
        f"the scores are not divided; they should be divided by {words} = {right_divisor:.3g}": 1.0,
        f"the scores are divided by sqrt(C) = {math.sqrt(C):.3g}; they should be divided by {words} = {right_divisor:.3g}": math.sqrt(
            C
        ),
        f"the scores are divided by {hs}, without the root; they should be divided by {words} = {right_divisor:.3g}": float(
            hs
        ),
        f"the scores are multiplied by {words} instead of divided": 1 / right_divisor,
        f"the scores are divided by sqrt(n_head); they should be divided by {words} = {right_divisor:.3g}": math.sqrt(
            n_head
        ),
    }
    masks = {
        "": "causal",
        "nothing is masked": "none",
        "the mask hides the past instead of the future: triu, not tril": "past",
        "the mask begins one column too late: triu(1)": "late",
        "the mask hides each token from itself, and the first one has no other: triu(1)": "itself",
        "masked scores are 0 before the softmax, and e^0 is 1; they should be -inf": "zero",
        "the mask comes after the softmax, so the weights do not add up to 1; it comes before, with -inf": "after",
    }
    dims = {
        "": -1,
        "the softmax is over the rows of the scores: dim=-1": -2,
        "the softmax is over the heads: dim=-1": 1,
        "the softmax is over the rows of the batch: dim=-1": 0,
    }
    projects: dict[str, bool] = {"": True} | ({"c_proj is not applied": False} if has_proj else {})

    with torch.no_grad():
        found, parts = attention(x), attention.c_attn(x).split(C, dim=2)

        def heads(split: str, order: str, divisor: str, mask: str, dim: str) -> Tensor:
            q, k, v = (splits[split](parts[i]) for i in orders[order])
            return attend(q, k, v, divisors[divisor], masks[mask], dims[dim])

        def compute(split: str, join: str, order: str, divisor: str, mask: str, dim: str, project: str) -> Tensor:
            y = joins[join](heads(split, order, divisor, mask, dim))
            return attention.c_proj(y) if has_proj and projects[project] else y

        def only_in(head: int, order: str, divisor: str, mask: str, dim: str) -> Tensor:
            y = heads("", "", "", "", "")
            y[:, head] = heads("", order, divisor, mask, dim)[:, head]
            return attention.c_proj(joins[""](y)) if has_proj else joins[""](y)

        # combinations with the fewest mistakes come first
        options = [splits, joins, orders, divisors, masks, dims, projects]
        combinations = sorted(product(*options), key=lambda choice: sum(map(bool, choice)))
        mistakes = {
            "; ".join(filter(None, choice)): lambda choice=choice: compute(*choice)
            for choice in combinations
            if 0 < sum(map(bool, choice)) <= 2
        }
        for head, options in product(range(n_head) if n_head > 1 else (), (orders, divisors, masks, dims)):
            for words in filter(None, options):
                choice = [words if other is options else "" for other in (orders, divisors, masks, dims)]
                mistakes[f"in head {head} only, {words}"] = lambda head=head, choice=choice: only_in(head, *choice)
        return explain_difference("attention", found, compute("", "", "", "", "", "", ""), mistakes)


def explain_attention_of(m: Any, model: Any) -> str | None:
    return explain_attention(model.h[0].attn, 2) if hasattr(model, "h") else explain_attention(model.attn, 1)


@fact("attention is softmax(q k^T / sqrt(C)) v", 4, 4)
def one_head(m: Any) -> str | None:
    return explain_attention(small_gpt(m).attn, 1)


@fact("the attention of a head is softmax(q k^T / sqrt(C // n_head)) v", 5)
def two_heads(m: Any) -> str | None:
    return explain_attention(small_gpt(m).h[0].attn, 2)


@fact("a norm subtracts the mean and divides by sqrt(variance + 1e-5), before its gain and bias", 5)
def norms(m: Any) -> str | None:
    model = small_gpt(m)
    x = 0.01 * torch.randn(2, 16, 32, generator=torch.Generator().manual_seed(3))  # small, so that eps is visible
    for name, norm in (("ln_1", model.h[0].ln_1), ("ln_2", model.h[0].ln_2), ("ln_f", model.ln_f)):

        def compute(eps: float = 1e-5, norm: Any = norm) -> Tensor:
            return F.layer_norm(x, (32,), norm.weight, norm.bias, eps)

        with torch.no_grad():
            mistakes = {
                f"its eps is {eps:g}; GPT-2's is 1e-5, which nn.LayerNorm(C) has by itself": lambda eps=eps: compute(
                    eps
                )
                for eps in (getattr(norm, "eps", 1e-3), 1e-3, 1e-4, 1e-6, 1e-8)
            }
            mistakes["the mean is not subtracted"] = lambda norm=norm: (
                F.rms_norm(x, (32,), norm.weight, 1e-5) + norm.bias
            )
            mistakes["the variance is divided by C - 1; it should be by C"] = lambda norm=norm: (
                (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True) + 1e-5).sqrt() * norm.weight + norm.bias
            )
            if wrong := explain_difference(name, norm(x), compute(), mistakes, 1e-3):
                return wrong
    return None


@fact("the MLP is c_proj(gelu(c_fc(x))), with the tanh form of the GELU", 5)
def mlp_of_gpt2(m: Any) -> str | None:
    mlp = small_gpt(m).h[0].mlp
    x = torch.randn(2, 16, 32, generator=torch.Generator().manual_seed(3))

    def compute(activation: Callable[[Tensor], Tensor]) -> Tensor:
        return mlp.c_proj(activation(mlp.c_fc(x)))

    with torch.no_grad():
        mistakes = {
            'the GELU is exact; GPT-2 has nn.GELU(approximate="tanh")': lambda: compute(F.gelu),
            'it has a ReLU; GPT-2 has nn.GELU(approximate="tanh")': lambda: compute(F.relu),
            'it has a SiLU; GPT-2 has nn.GELU(approximate="tanh")': lambda: compute(F.silu),
            'it has a tanh; GPT-2 has nn.GELU(approximate="tanh")': lambda: compute(torch.tanh),
            "nothing is between c_fc and c_proj: two matrices in a row are one; the GELU is missing": lambda: compute(
                lambda h: h
            ),
            "the GELU comes after c_proj; it belongs before": lambda: F.gelu(compute(lambda h: h), approximate="tanh"),
        }
        # tighter than elsewhere: the two forms of the GELU differ by little
        right = compute(lambda h: F.gelu(h, approximate="tanh"))
        return explain_difference("the MLP", mlp(x), right, mistakes, 1e-5)


@fact("a block adds attn(ln_1(x)) to the stream, and then mlp(ln_2(x))", 5)
def block_of_gpt2(m: Any) -> str | None:
    block = small_gpt(m).h[0]
    x = torch.randn(2, 16, 32, generator=torch.Generator().manual_seed(3))
    halves = {"": lambda f, n, other, x: x + f(n(x))}
    halves |= {
        "the residual around {f} is missing: x + {f}({n}(x))": lambda f, n, other, x: f(n(x)),
        "{f} gets x without {n}: x + {f}({n}(x))": lambda f, n, other, x: x + f(x),
        "{n} comes after the sum (post-norm); GPT-2 has it before {f}: x + {f}({n}(x))": lambda f, n, other, x: n(
            x + f(x)
        ),
        "{n} comes after {f}; GPT-2 has it before: x + {f}({n}(x))": lambda f, n, other, x: x + n(f(x)),
        "{f} is added to {n}(x); it should be added to x itself: x + {f}({n}(x))": lambda f, n, other, x: (
            n(x) + f(n(x))
        ),
        "{f} has the other norm; it should have {n}": lambda f, n, other, x: x + f(other(x)),
        "{f} is missing: x + {f}({n}(x))": lambda f, n, other, x: x,
        "{f} gets x without {n}, and the residual is missing: x + {f}({n}(x))": lambda f, n, other, x: f(x),
        "{n} comes after {f}, and the residual is missing: x + {f}({n}(x))": lambda f, n, other, x: n(f(x)),
        "x is added twice": lambda f, n, other, x: 2 * x + f(n(x)),
    }
    attn, mlp, ln_1, ln_2 = block.attn, block.mlp, block.ln_1, block.ln_2

    def compute(first: str, second: str) -> Tensor:
        return halves[second](mlp, ln_2, ln_1, halves[first](attn, ln_1, ln_2, x))

    def words(first: str, second: str) -> str:
        return "; ".join(filter(None, (first.format(f="attn", n="ln_1"), second.format(f="mlp", n="ln_2"))))

    with torch.no_grad():
        pairs = sorted(product(halves, halves), key=lambda pair: sum(map(bool, pair)))
        mistakes = {words(*pair): lambda pair=pair: compute(*pair) for pair in pairs if any(pair)}
        mistakes["attn and mlp read the same x; mlp should read what attn has been added to"] = lambda: (
            x + attn(ln_1(x)) + mlp(ln_2(x))
        )
        mistakes["mlp comes before attn"] = lambda: halves[""](attn, ln_1, ln_2, halves[""](mlp, ln_2, ln_1, x))
        return explain_difference("a block's result", block(x), compute("", ""), mistakes, 1e-3)


@fact("the logits are lm_head(ln_f(blocks(wte + wpe)))", 5)
def model_of_gpt2(m: Any) -> str | None:
    return explain_model(small_gpt(m))


@fact("the logits are those of lm_head, of what attention has found", 4, 4)
def model_with_one_head(m: Any) -> str | None:
    return explain_model(small_gpt(m))


@fact("the logits are lm_head(wte)", 3, 3)
def model_of_pairs(m: Any) -> str | None:
    return explain_model(small_gpt(m))


def explain_model(model: Any) -> str | None:
    """Compares the logits with those of the model's own parts, and names what is missing or too much."""
    with torch.no_grad():
        return explain_rows(model, 16, "the result of forward") or explain_rows(
            model, 10, "the result of forward for rows of 10 tokens, with a block_size of 16,"
        )


def explain_rows(model: Any, T: int, what: str) -> str | None:
    idx, at = random_rows(T=T)[0], torch.arange(T)
    found, head, tokens = model(idx)[0], model.lm_head, model.wte(idx)
    body: Callable[[Tensor], Tensor] = getattr(model, "attn", lambda x: x)
    if hasattr(model, "h"):
        ln_f, h = model.ln_f, model.h

        def body(x: Tensor) -> Tensor:
            return ln_f(through(h, x))

    embeddings, right = {}, tokens
    if hasattr(model, "wpe"):
        wpe = model.wpe
        right = tokens + wpe(at)
        embeddings = {
            "the position embeddings are missing": tokens,
            "the token embeddings are missing": wpe(at).expand_as(tokens),
            "the position embeddings are added twice": right + wpe(at),
            "the token embeddings are added twice": right + tokens,
            "positions begin at 1; the first token is at 0": tokens + wpe((at + 1) % 16),
            "positions count backwards": tokens + wpe(at.flip(0)),
            "positions are aligned to the right; the first token is at 0, however short the row": tokens
            + wpe(at + 16 - T),
            "the embeddings are multiplied by sqrt(C)": tokens * math.sqrt(32) + wpe(at),
        }
    mistakes = {words: lambda x=x: head(body(x)) for words, x in embeddings.items()}
    mistakes["forward applies the softmax: logits come before it"] = lambda: head(body(right)).softmax(dim=-1)
    if hasattr(model, "h"):
        mistakes |= {
            "ln_f is missing: after the last block comes ln_f, and then lm_head": lambda: head(through(h, right)),
            "ln_f comes before the blocks; it belongs after the last one": lambda: head(through(h, ln_f(right))),
            "ln_f comes in each block": lambda: head(ln_f(h[1](ln_f(h[0](right))))),
            "only the first block is applied": lambda: head(ln_f(h[0](right))),
            "only the last block is applied": lambda: head(ln_f(h[-1](right))),
            "no block is applied": lambda: head(ln_f(right)),
            "blocks are applied in reverse": lambda: head(ln_f(through(reversed(h), right))),
            "the first block is applied again and again": lambda: head(ln_f(through([h[0], h[0]], right))),
            "there is a residual around each block, x + block(x); it is inside already": lambda: head(
                ln_f(through([lambda x: x + h[0](x), lambda x: x + h[1](x)], right))
            ),
            "the embedding is added again after the blocks": lambda: head(ln_f(right + through(h, right))),
        }
    else:
        mistakes |= {
            "there is a residual around attention; it comes in step 5, and is measured there": lambda: head(
                right + body(right)
            ),
            "attention is not applied": lambda: head(right),
        }
    return explain_difference(what, found, head(body(right)), mistakes, 1e-3)


def through(blocks: Any, x: Tensor) -> Tensor:
    for block in blocks:
        x = block(x)
    return x


@fact("with the same weights, the logits are those of transformers' GPT-2", 5, 5)
def logits_of_huggingface(m: Any) -> str | None:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_positions=16, vocab_size=257, n_layer=2, n_head=2, n_embd=32, bos_token_id=None, eos_token_id=None
    )
    reference = GPT2LMHeadModel(config).eval()
    model, x = small_gpt(m), random_rows()[0]
    ours = dict(model.named_parameters(remove_duplicate=False))
    with torch.no_grad():
        model.lm_head.weight.copy_(model.wte.weight)
        for name, weight in reference.named_parameters():  # its Conv1D stores matrices as (in, out)
            mine = ours[name.removeprefix("transformer.")]
            weight.copy_(mine.T if ".h." in name and weight.dim() == 2 else mine)
        found, expected = model(x)[0], reference(x).logits
    return expect("the largest difference from transformers' logits", (found - expected).abs().max().item(), 0, 1e-3)


# -----------------------------------------------------------------------------
# Steps 6 and 7: the start and the recipe


@fact("embedding and output layer are one matrix", 6)
def tied(m: Any) -> str | None:
    model = new_gpt(m)
    return None if model.lm_head.weight is model.wte.weight else "lm_head.weight is not wte.weight: tie them"


@fact("the first loss is near that of a uniform guess", 6)
def initial_loss(m: Any) -> str | None:
    model = new_gpt(m)
    V = len(model.wte.weight)
    with torch.no_grad():
        loss = model(*random_rows(16, 64, V))[1].item()
    why = f"with N(0, 0.02) and tied weights it is near ln {V} ="
    return expect("the loss of a batch at initialisation", loss, math.log(V), 0.1, why)


@fact("weights begin as N(0, 0.02), and biases at zero", 6)
def initial_weights(m: Any) -> str | None:
    for name, p in new_gpt(m).named_parameters():
        if p.dim() < 2:
            value = 1.0 if name.endswith("weight") else 0.0  # the gain of a layer norm, or a bias
            wrong = expect(f"an element of {name}", p[(p - value).abs().argmax()].item(), value)
        elif name.endswith("c_proj.weight"):
            why = "0.02 / sqrt(2 * n_layer) is"
            wrong = expect(f"the standard deviation of {name}", p.std().item(), 0.02 / math.sqrt(6), 5e-4, why)
        else:
            wrong = expect(f"the standard deviation of {name}", p.std().item(), 0.02, 1e-3)
        if p.dim() >= 2 and not wrong:
            wrong = expect(f"the mean of {name}", p.mean().item(), 0, 1e-3)
            if not wrong and p.abs().max() < 3 * p.std():
                wrong = f"{name} has no element beyond three standard deviations, where one of 370 should be: is it uniform, or truncated?"
        if wrong:
            return wrong
    return None


@fact("weight decay is on matrices and embeddings only", 7, without=10)
def decay_groups(m: Any) -> str | None:
    model = small_gpt(m)
    optimizer = model.configure_optimizers(*OPTIMIZER)
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    for name, p in model.named_parameters():
        if id(p) not in decay:
            return f"the optimizer does not have {name}: it would never change"
        if wrong := expect(f"the weight decay of {name}", decay[id(p)], 0.1 if p.dim() >= 2 else 0.0):
            return wrong
    if not isinstance(optimizer, torch.optim.AdamW):
        return f"the optimizer is {type(optimizer).__name__}; with weight decay it should be AdamW, which does not mix it into the gradients"
    found = tuple(optimizer.param_groups[0]["betas"])
    return None if found == (0.9, 0.95) else f"AdamW's betas are {found}, not the (0.9, 0.95) that it was given"


@fact("the learning rate rises linearly and falls as a cosine", 7, without=10)
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


@fact("gradients are clipped at a norm of 1", 7, 11, without=10)
def clipping(m: Any) -> str | None:
    model = small_gpt(m)
    for p in model.parameters():
        p.data *= 3
    with Watch(m) as watch:
        m.train_step(model, model.configure_optimizers(*OPTIMIZER), *random_rows(), 1e-3)
    return explain_steps(watch.steps, 1, True)


@fact("a step computes a fresh gradient, updates once, and returns the loss before the update", 7, 11, without=10)
def steps_are_fresh(m: Any) -> str | None:
    model = small_gpt(m)
    for p in model.parameters():
        p.data *= 0.1  # gradients that are not clipped
    optimizer = model.configure_optimizers(*OPTIMIZER)
    with Watch(m) as watch:
        returned = [number(m.train_step(model, optimizer, *random_rows(seed=seed), 1e-2)) for seed in (2, 3)]
    first, before = returned[0], watch.steps[0].loss if watch.steps else math.nan
    wrong = (
        expect("the loss that train_step returns", first, before, 1e-4, "before the update it is")
        if watch.steps
        else None
    )
    return wrong or explain_steps(watch.steps, 2, True)


@fact("a step uses the learning rate that it is given, for all weights", 7, 11, without=10)
def rate_is_used(m: Any) -> str | None:
    model = small_gpt(m)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    m.train_step(model, model.configure_optimizers(*OPTIMIZER), *random_rows(), 0.0)
    for name, p in model.named_parameters():
        if wrong := expect(
            f"with a learning rate of 0, the largest change of {name}", (p - before[name]).abs().max().item(), 0, 1e-6
        ):
            return f'{wrong}. Does each group of optimizer.param_groups get group["lr"] = lr?'
    return None


@fact("one batch is learned by heart", 7, 11, without=10)
def overfits(m: Any) -> str | None:
    torch.manual_seed(1)
    model = m.GPT(m.GPTConfig(**SIZES))
    optimizer = model.configure_optimizers(0.1, 1e-2, (0.9, 0.95))
    losses = [number(m.train_step(model, optimizer, *random_rows(), 1e-2)) for _ in range(60)]
    return (
        None if losses[-1] < 0.5 else f"after 60 steps on one batch its loss is {losses[-1]:.4f}; it should be near 0"
    )


# -----------------------------------------------------------------------------
# Step 8: tokens


def merges_of_the_library(text: str) -> list[tuple[str, str]]:
    reference = Tokenizer(models.BPE())
    reference.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    reference.train_from_iterator(
        [text], trainers.BpeTrainer(vocab_size=256 + 10, initial_alphabet=alphabet, show_progress=False)
    )
    return [tuple(pair) for pair in json.loads(reference.to_str())["model"]["merges"]]


@fact("the most frequent pair is merged first, and words stay apart", 8, 9)
def merges_by_hand(m: Any) -> str | None:
    text = " low" * 5 + " lower" * 2 + " newest" * 6 + " widest" * 3
    right = merges_of_the_library(text)
    found = [tuple(pair) for pair in m.learn_merges(text, 10)]
    if crossing := next((a + b for a, b in found if "Ġ" in (a + b)[1:]), None):
        return f"{crossing} goes across the end of a word: split the text into words first"
    # pairs that are equally frequent may come in any order, so the words that result are compared
    if {a + b for a, b in found[:3]} != {a + b for a, b in right[:3]}:
        once = found[:3] == merges_of_the_library(" low lower newest widest")[:3]
        hint = ". A pair counts each time that its word occurs" if once else ""
        return f"of low, lower, newest and widest, five, two, six and three times, the first merges are {found[:3]}; those of the library tokenizers are {right[:3]}{hint}"
    return None if len(found) == 10 else f"learn_merges(text, 10) returns {len(found)} merges"


@fact("the encoding is learned without the text that is held out, and loses nothing", 8, 9)
def encoding(m: Any) -> str | None:
    with mock.patch.dict(topics, SHORT_TEXT, clear=True):
        bpe = shortened(m).make_tokenizer()
    vocabulary = bpe.get_vocab()
    if "qz" in vocabulary or "Ġq" in vocabulary:
        return "a merge is of letters that only the held-out text has: learn the encoding from the first nine tenths"
    text = "def f(x):  # größer\n\treturn x" + "".join(map(chr, range(32, 127)))
    if (decoded := bpe.decode(bpe.encode(text).ids)) == " " + text:
        return "the tokenizer puts a space before each text: ByteLevel(add_prefix_space=False)"
    if decoded != text:
        return f"{text[:29]!r} ... is decoded as {decoded[:29]!r} ...: are all 256 bytes in the vocabulary?"
    if len(vocabulary) != m.EOT + 1 or bpe.token_to_id("<|endoftext|>") != m.EOT:
        return f"the vocabulary has {len(vocabulary)} tokens, and <|endoftext|> is {bpe.token_to_id('<|endoftext|>')}; there should be {m.EOT + 1}, the last one is {m.EOT}"
    return None


@fact("the tokens are those of the documents, each after an end-of-text token", 8, 8)
def tokens_are_pieces(m: Any) -> str | None:
    with mock.patch.dict(topics, SHORT_TEXT, clear=True):
        m = shortened(m)
        bpe = m.make_tokenizer()
        train, val = m.load_tokens(bpe)
    tokens = [*train.tolist(), *val.tolist()]
    if tokens.count(m.EOT) != len(SHORT_TEXT) or tokens[0] != m.EOT:
        return f"of {len(SHORT_TEXT)} documents there are {tokens.count(m.EOT)} end-of-text tokens, and the first token is {tokens[0]}; each document begins with {m.EOT}"
    if bpe.decode(tokens) != "".join(SHORT_TEXT.values()):
        hint = ". Is <|endoftext|> among the special tokens?" if "<|endoftext|>" in bpe.decode(tokens) else ""
        return f"the tokens, decoded, are not the documents{hint}"
    return expect("the held-out part of the tokens", len(val) / len(tokens), 0.1, 1e-3)


# -----------------------------------------------------------------------------
# Step 9: the data


@fact("the shards hold the tokens of all documents, and the manifest describes them", 9, 9)
def shards_hold_the_text(m: Any) -> str | None:
    with mock.patch.dict(topics, SHORT_TEXT, clear=True):
        shortened(m).make_shards()
    manifest = json.loads((m.DATA / "manifest.json").read_text())
    val, *train = [np.load(m.DATA / entry["file"]) for entry in manifest["shards"]]
    if wrong := next(
        (f"a shard has {shard.dtype} tokens, not uint16" for shard in (val, *train) if shard.dtype != np.uint16), None
    ):
        return wrong
    if [entry["tokens"] for entry in manifest["shards"]] != [len(shard) for shard in (val, *train)]:
        return "the tokens in manifest.json are not the lengths of the files"
    checksum = hashlib.sha256((m.DATA / "tokenizer.json").read_bytes()).hexdigest()
    if manifest["tokenizer_sha256"] != checksum:
        return f"in manifest.json, tokenizer_sha256 is {manifest['tokenizer_sha256']!r}; that of tokenizer.json is {checksum}"
    if (splits := [entry["split"] for entry in manifest["shards"]]) != ["val"] + ["train"] * len(train):
        return f"the splits in manifest.json are {splits}; val comes first"
    found = Tokenizer.from_file(str(m.DATA / "tokenizer.json")).decode(np.concatenate([*train, val]).tolist(), False)
    if found != (right := "".join("<|endoftext|>" + text for text in SHORT_TEXT.values())):
        decode = Tokenizer.from_file(str(m.DATA / "tokenizer.json")).decode
        is_first = right.startswith(decode(val.tolist(), False))
        hint = ". The val shard is the beginning of the text; it should be the end" if is_first else ""
        return (
            f"the train shards and then the val shard, decoded, are not the documents, each after <|endoftext|>{hint}"
        )
    return expect("the part of val in all tokens", len(val) / sum(map(len, (val, *train))), 0.1, 0.001)


@fact("a split has its own shards, in order", 9, without=10)
def splits(m: Any) -> str | None:
    for split in ("train", "val"):
        files = [np.load(path) for path in sorted(m.DATA.glob(f"*_{split}_*.npy"))]
        found = m.open_shards(split)
        if [len(shard) for shard in found] != [len(shard) for shard in files]:
            return f"open_shards({split!r}) has {[*map(len, found)]} tokens; the files have {[*map(len, files)]}"
    return None


@fact("the loader deals the rows at 0, T, 2T, ... of each shard in order, then again", 9, without=10)
def rows_in_order(m: Any) -> str | None:
    if hasattr(m, "TOTAL_BATCH_SIZE"):
        m = shortened(m, TOTAL_BATCH_SIZE=5 * 8)
    shards = [np.arange(0, 100, dtype=np.uint16), np.arange(500, 597, dtype=np.uint16)]  # 12 rows of 8 + 1 tokens each
    loader = m.DataLoaderLite(shards, 5, 8)
    starts = [*range(0, 96, 8), *range(500, 596, 8)]
    for batch in range(5):
        x, y = loader.next_batch()
        expected = [starts[n % 24] for n in range(5 * batch, 5 * batch + 5)]
        if (found := x[:, 0].tolist()) != expected or x.shape != (5, 8):
            mistakes = {
                "The batch before began there, too: the position has to move on": [
                    starts[n % 24] for n in range(5 * batch - 5, 5 * batch)
                ],
                "The rows that are left at the end are left out: the last row is followed by the first": starts[:5],
            }
            hint = next((f". {words}" for words, other in mistakes.items() if batch and found == other), "")
            return f"in shards 0..99 and 500..596, with B = 5 and T = 8, batch {batch} begins at {found}, not {expected}{hint}"
        if not torch.equal(y, x + 1):
            return f"the target of token {x[0, 0]} is {y[0, 0]}; it should be {x[0, 0] + 1}"
    return None


@fact("the validation loss is the mean over all rows, whatever B is", 9, 9)
def validation_of_loader(m: Any) -> str | None:
    model, tokens = small_gpt(m), random_rows(1, 16 * 7)[0][0].numpy().astype(np.uint16)
    with torch.no_grad():
        rows = [torch.from_numpy(tokens[i : i + 17].astype(np.int64))[None] for i in range(0, 96, 16)]
        expected = sum(model(row[:, :-1], row[:, 1:])[1].item() for row in rows) / 6
    found = m.validation_loss(model, m.DataLoaderLite([tokens], 4, 16))
    return expect("the validation loss of 6 rows with B = 4", found, expected, 1e-3, "one row at a time it is")


@fact("main trains on the training text, one step for each fresh gradient, and measures the rest", 3, 9)
def main_trains(m: Any) -> str | None:
    constants = {"MAX_STEPS": 4} | ({"WARMUP_STEPS": 2} if hasattr(m, "WARMUP_STEPS") else {})
    torch.manual_seed(SEED)
    with mock.patch.dict(topics, SHORT_TEXT, clear=True):
        m = shortened(m, **constants)
        generate = m.GPT.generate
        m.GPT.generate = lambda model, idx, max_new_tokens, *rest: generate(model, idx, min(max_new_tokens, 3), *rest)
        with Watch(m) as watch, contextlib.redirect_stdout(io.StringIO()) as printed:
            m.main()
        if watch.model is None:
            return "main() trains no GPT"
        if torch.initial_seed() == SEED:
            return "main() sets no seed, so no two runs are the same: it begins with torch.manual_seed(1337)"
        if hasattr(m, "open_shards"):
            train, val = (np.concatenate(m.open_shards(split)) for split in ("train", "val"))
        else:
            train, val = m.load_tokens(m.make_tokenizer()) if hasattr(m, "make_tokenizer") else m.load_tokens()
        held_out = m.DataLoaderLite([val], m.B, m.T) if hasattr(m, "DataLoaderLite") else val
        expected = m.validation_loss(watch.model.eval(), held_out)
    if wrong := explain_training(m, watch, train, val, words_for(constants)):
        return f"in main(), {wrong}"
    numbers = [float(number) for number in re.findall(r"\d+\.\d{3,}", printed.getvalue())]
    if not any(abs(number - expected) < 2e-3 for number in numbers):
        trained_on = m.DataLoaderLite([train], m.B, m.T) if hasattr(m, "DataLoaderLite") else train
        other = m.validation_loss(watch.model.eval(), trained_on)
        hint = f"; {other:.4f} is that on the text to train on" if any(abs(x - other) < 2e-3 for x in numbers) else ""
        return f"main() does not print {expected:.4f}, the loss of its model on the held-out text after the last step{hint}"
    return None


# -----------------------------------------------------------------------------
# Step 10: sampling and multiple choice


@fact("temperature divides the logits, and top-k keeps the likeliest", 10, 10)
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


@fact("tokens are drawn with these probabilities", 10, 10)
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


@fact("of four completions, the true one follows the context", 10, 10)
def items_are_right(m: Any) -> str | None:
    items = m.make_items([*range(5000)], 40)
    for context, completions, label in items:
        follows = [completion[0] == context[-1] + 1 for completion in completions]
        if follows != [i == label for i in range(4)]:
            return f"completion {label} should be the one that follows the context, but {follows} do"
    if len({label for *_, label in items}) == 1:
        return "all items have the same label"
    starts = {completion[0] for _, completions, _ in items for completion in completions}
    return None if len(starts) > 100 else "the wrong completions are always the same: take them from random places"


@fact("a completion's loss is the mean over its own tokens, one at a time as well", 10, 10)
def losses_of_completions(m: Any) -> str | None:
    model = small_gpt(m, vocab_size=m.GPTConfig().vocab_size)  # a row may be padded with any token
    context, completions = [1, 2, 3, 4], [[5, 6], [7, 8, 9, 10], [11], [12, 13, 14]]
    for found, completion in zip(m.completion_losses(model, context, completions), completions, strict=True):
        with torch.no_grad():
            logs = torch.log_softmax(model(torch.tensor([context + completion]))[0][0], dim=-1)
        expected = -sum(logs[3 + i, token].item() for i, token in enumerate(completion)) / len(completion)
        if wrong := expect(f"the loss of {completion} after {context}", found, expected, 1e-3, "by itself it is"):
            return wrong
    return None


# -----------------------------------------------------------------------------
# Step 11: fast


def kept_for_backward(model: torch.nn.Module, x: Tensor, y: Tensor, amp: Any = None) -> int:
    """Returns the bytes that a forward pass keeps for the backward pass."""
    sizes = {}

    def keep(tensor: Tensor) -> Tensor:
        sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), amp or contextlib.nullcontext():
        _, loss = model(x, y)  # until here, loss holds what is kept
    return sum(sizes.values())


@fact("faster ways give the same losses, and keep less memory", 11, 11)
def fast_is_the_same(m: Any) -> str | None:
    x, y = random_rows(8, 16)
    plain = small_gpt(m, flash=False, chunk_rows=0)
    expected, kept = plain(x, y)[1].item(), kept_for_backward(plain, x, y)
    for name, options in (
        ("flash attention", {"chunk_rows": 0}),
        ("a loss in chunks of 16 rows", {"flash": False, "chunk_rows": 16}),
        ("a loss in chunks of 48 rows, of which the last has 32,", {"flash": False, "chunk_rows": 48}),
    ):
        model = small_gpt(m, **options)
        found = model(x, y)[1].item()
        if wrong := expect(f"with {name} the loss", found, expected, 1e-3, "without it is"):
            if "32" not in name:
                return wrong
            first = plain(x[:6], y[:6])[1].item()  # 96 of 128 rows
            if min(abs(found - first), abs(found - first * 96 / 128)) < 1e-3:
                return f"{wrong}. The last chunk is left out"
            return f"{wrong}. A mean of the chunks' means counts a smaller chunk too much: add sums, and divide once"
        if kept_for_backward(model, x, y) >= kept:
            return f"with {name} as much is kept for the backward pass as without, {kept:,} bytes"
    return None


@fact("with chunks, the gradients are the same", 11, 11)
def fast_gradients(m: Any) -> str | None:
    x, y = random_rows(8, 16)
    grads = []
    for chunk_rows in (0, 48):
        model = small_gpt(m, chunk_rows=chunk_rows)
        model(x, y)[1].backward()
        grads.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    if grads[0].shape != grads[1].shape:
        return "with a loss in chunks, some parameters have no gradient"
    largest = ((grads[0] - grads[1]).abs().max() / grads[0].abs().max()).item()
    return expect("with a loss in chunks, the largest relative error of a gradient", largest, 0, 1e-3)


@fact("bf16 changes the loss, but little", 11, 11)
def bf16_is_close(m: Any) -> str | None:
    losses = []
    for amp in (m.FP32, m.BF16):
        model = new_gpt(m)
        optimizer = model.configure_optimizers(*OPTIMIZER)
        losses.append(number(m.train_step(model, optimizer, *random_rows(4, 16, len(model.wte.weight)), 1e-3, amp)))
    if losses[0] == losses[1]:
        return "with BF16 the loss is the same in all digits: train_step does not use amp"
    return expect("with BF16 the loss", losses[1], losses[0], 0.05, "in fp32 it is")


# -----------------------------------------------------------------------------
# Step 12: accumulation and several processes


@fact("gradients are those of the full batch, clipped at a norm of 1, however many micro-batches it has", 12)
def accumulation(m: Any) -> str | None:
    m = shortened(m, TOTAL_BATCH_SIZE=64)
    shard = random_rows(1, 200)[0][0].numpy().astype(np.uint16)
    for scale in (0.03, 3.0):  # small gradients, which are not clipped, and large ones
        for B in (4, 2, 1):
            model = small_gpt(m)
            for p in model.parameters():
                p.data *= scale
            optimizer, loader = model.configure_optimizers(*OPTIMIZER), m.DataLoaderLite([shard], B, 16)
            if (count := loader.grad_accum) != 4 // B:
                return f"with 64 tokens per step, B = {B} and T = 16, grad_accum is {count}, not {4 // B}"
            with Watch(m) as watch:
                returned = [number(m.train_step(model, optimizer, loader, 0.01)) for _ in range(2)]
            case = f"in a step of {4 // B} micro-batch{'' if B == 4 else 'es'}"
            if watch.model is None:
                return f"{case}, train_step does not call the model: is each of them used?"
            if B < 4 and len(watch.steps) == 2 * loader.grad_accum:
                return f"{case}, optimizer.step() is called for each of them: once, after the last one"
            if wrong := explain_steps(watch.steps, 2, True) or explain_repeats(watch.steps):
                hint = " Or is it called for each micro-batch?" if "does zero_grad()" in wrong and B < 4 else ""
                return f"{case}, {wrong}{hint}"
            for i, step in enumerate(watch.steps):
                if len(step.batches) != 4 // B:
                    return f"{case}, there are {len(step.batches)} forward passes"
                first = torch.cat([x for x, _ in step.batches])[:, 0].tolist()
                if first != (right := shard[(torch.arange(4 * i, 4 * i + 4) * 16).numpy()].tolist()):
                    return f"{case}, step {i} has rows that begin with {first}, not {right}"
                if wrong := expect(
                    f"{case}, the loss that train_step returns",
                    returned[i],
                    step.loss,
                    1e-3,
                    f"the mean of {4 // B} losses before the update is",
                ):
                    return wrong
    return None


@fact("a step uses the learning rate that it is given, for all weights", 12)
def rate_of_accumulation(m: Any) -> str | None:
    m, model = shortened(m, TOTAL_BATCH_SIZE=64), small_gpt(m)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    shard = random_rows(1, 100)[0][0].numpy().astype(np.uint16)
    m.train_step(model, model.configure_optimizers(*OPTIMIZER), m.DataLoaderLite([shard], 2, 16), 0.0)
    for name, p in model.named_parameters():
        moved = (p - before[name]).abs().max().item()
        if wrong := expect(f"with a learning rate of 0, the largest change of {name}", moved, 0, 1e-6):
            return wrong
    return None


@fact("train() trains on the training text, one step for each fresh gradient, at the rate of its step", 12)
def train_trains(m: Any) -> str | None:
    constants = {"MAX_STEPS": 4, "WARMUP_STEPS": 2}
    m = shortened(m, **constants, **({"OUT": m.OUT / "watched"} if hasattr(m, "OUT") else {}))
    with Watch(m) as watch:
        losses = m.train()
    train, val = (np.concatenate(m.open_shards(split)) for split in ("train", "val"))
    if wrong := explain_training(m, watch, train, val, words_for(constants)):
        return f"in train(), {wrong}"
    for step, found in enumerate(watch.steps):
        if wrong := expect(f"the loss of step {step} that train() returns", losses[step], found.loss, 1e-3):
            return wrong
    return None


@fact("ranks synchronize in the last micro-step only", 12)
def one_sync(m: Any) -> str | None:
    syncs = []

    class Recorder(torch.nn.parallel.DistributedDataParallel):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            syncs.append(self.require_backward_grad_sync)
            return super().forward(*args, **kwargs)

    m, model = shortened(m, TOTAL_BATCH_SIZE=64), small_gpt(m)
    optimizer, shard = model.configure_optimizers(*OPTIMIZER), random_rows(1, 100)[0][0].numpy().astype(np.uint16)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        m.train_step(Recorder(model), optimizer, m.DataLoaderLite([shard], 1, 16), 0.0)
    finally:
        torch.distributed.destroy_process_group()
    if syncs == [False, False, False, True]:
        return None
    return f"in 4 micro-steps require_backward_grad_sync is {syncs}, not [False, False, False, True]"


@fact("rank r's micro-batch m begins at row (m * world_size + r) * B", 12)
def rows_of_ranks(m: Any) -> str | None:
    m = shortened(m, TOTAL_BATCH_SIZE=3 * 3 * 8 * 2)
    for rank in (0, 1):
        loader = m.DataLoaderLite([np.arange(2000, dtype=np.uint16)], 3, 8, rank, 2)
        if (count := loader.grad_accum) != (right := m.TOTAL_BATCH_SIZE // (3 * 8 * 2)):
            return f"with B = 3, T = 8 and two ranks, grad_accum is {count}; {m.TOTAL_BATCH_SIZE} // (3 * 8 * 2) is {right}"
        found = [loader.next_batch()[0][0, 0].item() // 8 for _ in range(3)]
        if found != (expected := [(2 * batch + rank) * 3 for batch in range(3)]):
            return f"with B = 3, the micro-batches of rank {rank} of 2 begin at rows {found}, not {expected}"
    return None


# -----------------------------------------------------------------------------
# Step 13: checkpoints


def optimizer_after_a_step(model: Any) -> torch.optim.Optimizer:
    optimizer = model.configure_optimizers(*OPTIMIZER)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    return optimizer


@fact("a checkpoint opens in transformers, with the same logits", 13)
def opens_in_huggingface(m: Any) -> str | None:
    from transformers import GPT2LMHeadModel
    from transformers.utils.logging import disable_progress_bar, set_verbosity_error

    model = small_gpt(m)
    m.save_checkpoint(model, optimizer_after_a_step(model), 7)
    config = json.loads((m.OUT / "model_00007" / "config.json").read_text())
    right = {"model_type": "gpt2", "activation_function": "gelu_new", "n_positions": 16, "n_layer": 2, "n_head": 2}
    for name, value in right.items():
        if config.get(name) != value:
            return f"in config.json, {name} is {json.dumps(config.get(name))}; it should be {json.dumps(value)}"
    stored = load_file(m.OUT / "model_00007" / "model.safetensors")
    for name, p in model.h[0].named_parameters(prefix="h.0"):
        found = stored.get(f"transformer.{name}")
        if found is None:
            return f"model.safetensors has no transformer.{name}"
        if found.shape != p.shape[::-1]:
            return (
                f"{name} is stored as {tuple(found.shape)}; transformers' Conv1D has (in, out) = {tuple(p.shape[::-1])}"
            )
        if p.dim() == 2 and torch.equal(found, p):
            return f"{name} is square, but has to be transposed, too: transformers' Conv1D has (in, out)"
    disable_progress_bar()
    set_verbosity_error()  # it complains about a config.json without bos_token_id and eos_token_id
    reference = GPT2LMHeadModel.from_pretrained(m.OUT / "model_00007").eval()
    x = random_rows()[0]
    with torch.no_grad():
        largest = (model(x)[0] - reference(x).logits).abs().max().item()
    return expect("the largest difference from transformers' logits", largest, 0, 1e-3)


@fact("a checkpoint gets its name when all its files are on the disk", 13)
def atomic(m: Any) -> str | None:
    model = small_gpt(m)
    optimizer = optimizer_after_a_step(model)
    with mock.patch("os.fsync", side_effect=KeyboardInterrupt) as fsync, contextlib.suppress(KeyboardInterrupt):
        m.save_checkpoint(model, optimizer, 8)
    if not fsync.called:
        return (
            "save_checkpoint does not call os.fsync: after a power failure, files may be empty under their final name"
        )
    if (m.OUT / "model_00008").exists():
        return "a save that is killed leaves model_00008, which is not complete: write under another name, then rename"
    synced, fsync = set(), os.fsync

    def recorded(file: Any) -> None:
        synced.add(os.fstat(file if isinstance(file, int) else file.fileno()).st_ino)
        fsync(file)

    with mock.patch("os.fsync", recorded):
        m.save_checkpoint(model, optimizer, 9)
    for path in sorted((m.OUT / "model_00009").iterdir()):
        if path.stat().st_ino not in synced:
            return f"save_checkpoint does not call os.fsync for {path.name}: syncing the folder writes names, not what is in the files"
    return None


@fact("the newest checkpoint is loaded", 13)
def newest(m: Any) -> str | None:
    m = shortened(m, OUT=m.OUT / "several")
    model = small_gpt(m)
    optimizer = optimizer_after_a_step(model)
    for step in (5, 10, 100):
        with torch.no_grad():
            model.wte.weight.fill_(step)
        m.save_checkpoint(model, optimizer, step)
    other = small_gpt(m)
    step = m.load_checkpoint(other, other.configure_optimizers(*OPTIMIZER))
    found = int(other.wte.weight[0, 0])
    if (step, found) == (100, 100):
        return None
    return f"of the checkpoints of steps 5, 10 and 100, load_checkpoint returns step {step}, and loads the weights of step {found}"


@fact("a resumed run has the losses of one that was never interrupted", 13)
def resumes(m: Any) -> str | None:
    m = shortened(m, MAX_STEPS=6, WARMUP_STEPS=2, CHECKPOINT_EVERY=3, OUT=m.OUT / "run")
    whole = m.train()
    if (folders := sorted(path.name for path in m.OUT.iterdir())) != ["model_00003", "model_00006"]:
        return f"6 steps with CHECKPOINT_EVERY = 3 leave {folders}; model_00003 and model_00006 have done 3 and 6 steps"
    shutil.rmtree(m.OUT / "model_00006")
    with Watch(m) as watch:
        resumed = m.train(resume=True)
    if len(resumed) != 3:
        return f"resumed after step 3 of 6, the run has {len(resumed)} more losses, not 3"
    for step, done in enumerate(watch.steps, start=3):
        if abs(max(done.rates) - m.get_lr(step)) > 1e-9:
            return (
                f"resumed at step 3, step {step} has the learning rate {max(done.rates):.6g}, not {m.get_lr(step):.6g}"
            )
    for step, (found, expected) in enumerate(zip(resumed, whole[3:], strict=True), start=3):
        if wrong := expect(f"resumed at step 3, the loss of step {step}", found, expected, 0, "uninterrupted it is"):
            if step == 3:
                return f"{wrong}. Does load_checkpoint restore the weights, and is loader.position set? It counts batches, grad_accum in each step"
            return f"{wrong}. Does load_checkpoint restore the optimizer's state?"
    return None


@fact("two processes have the losses of one, resumed ones too", 12)
def two_processes(m: Any) -> str | None:
    folder, resumes = m.DATA.parent, hasattr(m, "CHECKPOINT_EVERY")
    constants = {"MAX_STEPS": 4, "WARMUP_STEPS": 1}
    constants |= {"CHECKPOINT_EVERY": 2, "OUT": folder / "alone"} if resumes else {}
    alone = shortened(m, **constants).train()
    try:
        torch.multiprocessing.spawn(train_rank, (m.__file__, str(folder), constants, resumes), nprocs=2)
    except torch.multiprocessing.ProcessRaisedException as error:
        hint = " Do all ranks load the checkpoint, and take the same steps?" if resumes else ""
        return f"one of two processes failed: {str(error).strip().splitlines()[-1]}{hint}"
    for rank in (0, 1):
        found = np.load(folder / f"{rank}.npy")
        for i, (loss, expected) in enumerate(zip(found, [*alone, *alone[2:]], strict=False)):
            step, start = (i, "") if i < 4 else (i - 2, ", resumed at step 2,")
            hint = ". Do all ranks load the checkpoint?" if start else ""
            if wrong := expect(f"rank {rank}'s loss{start} of step {step}", loss, expected, 1e-3, "one process has"):
                is_sum = abs(loss - 2 * expected) < 0.1
                return wrong + (". Is the sum over ranks divided by their number?" if is_sum else hint)
    return None


def train_rank(rank: int, path: str, folder: str, constants: dict[str, Any], resumes: bool) -> None:
    torch.distributed.init_process_group("gloo", f"file://{folder}/connect", rank=rank, world_size=2)
    m = load(Path(path), Path(folder))
    vars(m).update(constants | ({"OUT": Path(folder, "two")} if resumes else {}))
    with contextlib.redirect_stdout(io.StringIO()):
        losses = m.train(rank, 2)
        if resumes:
            torch.distributed.barrier()  # rank 0 has saved
            if rank == 0:
                shutil.rmtree(m.OUT / "model_00004")
            torch.distributed.barrier()
            losses = [*losses, *m.train(rank, 2, resume=True)]
    np.save(Path(folder, f"{rank}.npy"), losses)
    torch.distributed.destroy_process_group()


@fact("twenty losses equal those of train_gpt2.py", 13)
def equals_the_trainer(m: Any) -> str | None:
    m = shortened(m, MAX_STEPS=20, WARMUP_STEPS=5, OUT=m.OUT / "ours")
    c = m.GPTConfig()
    flags = f"--n-layer {c.n_layer} --n-head {c.n_head} --n-embd {c.n_embd} --block-size {m.T} --batch-size {m.B} "
    flags += f"--total-batch-size {m.TOTAL_BATCH_SIZE} --max-steps 20 --warmup-steps 5 --max-lr {m.MAX_LR} "
    flags += f"--min-lr {m.MIN_LR} --val-every 0 --sample-every 0 --checkpoint-every 0 --device cpu --dtype fp32"
    theirs = losses_of_the_trainer(m.DATA, flags)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    ours = m.train()
    torch.set_num_threads(threads)
    for step, (found, expected) in enumerate(zip(ours, theirs, strict=True)):
        if wrong := expect(f"the loss of step {step}", found, expected, 1e-4, "train_gpt2.py has"):
            hint = ". Is the seed 1337, and does each matrix get its random numbers once, in the order of named_parameters(), as in step 6?"
            return wrong + (hint if step == 0 else "")
    return None


def losses_of_the_trainer(data: Path, flags: str) -> list[float]:
    log = data.with_name("trainer")
    command = [
        sys.executable,
        Path(__file__).parents[2] / "train_gpt2.py",
        "--data",
        data,
        "--out",
        log,
        *flags.split(),
    ]
    # sums of several threads are in a different order, and Adam makes such differences grow
    subprocess.run(command, check=True, capture_output=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    lines = [line.split() for line in (log / "log.txt").read_text().splitlines()]
    return [float(value) for _, name, value in lines if name == "train"]


# -----------------------------------------------------------------------------
# The reader's file


def shortened(m: Any, **constants: Any) -> Any:
    """The reader's module, loaded again, with other constants."""
    again = load(Path(m.__file__), m.DATA.parent)
    for name, value in constants.items():
        getattr(m, name)  # an error if there is none
        setattr(again, name, value)
    return again


def words_for(constants: dict[str, int]) -> str:
    return f" (the check has set {' and '.join(f'{name} = {value}' for name, value in constants.items())})"


def load(path: Path, folder: Path) -> Any:
    """Imports a file as a module whose shards are in `folder`."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    if (beside := str(path.parent.absolute())) not in sys.path:
        sys.path.insert(0, beside)  # a file may import those beside it, as when it is run
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
    said = str(error).splitlines()[0] if str(error) else ""
    hint = next((hint for words, hint in HINTS.items() if words in said), "")
    return f"{where}: {type(error).__name__}: {said}{hint}"


# what PyTorch says, and what it does not say
HINTS = {
    "index out of range in self": ". An embedding has no such row. Is the context cut to its last block_size tokens, and is vocab_size that of the tokens?",
    "stack expects each tensor to be equal size": ". Does a row begin so near the end that it is short? The last place is len(tokens) - T - 1",
    "random_ expects 'from' to be less than 'to'": ". In a text of T + 1 tokens or a few more, a row begins at 0 or a little later",
    "does not require grad and does not have a grad_fn": ". Is the forward pass of a step under torch.no_grad()?",
    "view size is not compatible": " That would hide a wrong order of dimensions: heads are view(B, T, n_head, -1).transpose(1, 2)",
}


def call(function: Callable[..., T], path: Path, *args: Any) -> tuple[T | None, str | None]:
    """Returns the function's result, or what went wrong in it; the reader's file may print."""
    try:
        # its main() may read the command line
        with contextlib.redirect_stdout(io.StringIO()), mock.patch.object(sys, "argv", [str(path)]):
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
        if step > 10:
            load(Path(__file__).with_name("step_09.py"), Path(folder)).make_shards()
        for steps, words, holds in FACTS:
            if step in steps:
                found, wrong = call(holds, path, module)
                yield (False, found or wrong or "") if found or wrong else (True, words)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--step", type=int, required=True, choices=range(1, 14))
    args = parser.parse_args()
    if not args.file.is_file():
        parser.error(f"there is no file {args.file}")
    if args.step > 10 and not (shards := Path(__file__).with_name("step_09.py")).is_file():
        parser.error(f"there is no {shards}, which makes the shards for this check")
    results, said = [], set()
    for holds, words in check(args.file, args.step):
        if words not in said:  # one mistake may be in the way of several facts
            print("ok    " if holds else "wrong ", words, flush=True)
        said.add(words)
        results.append(holds)
    raise SystemExit(not all(results))


if __name__ == "__main__":
    main()
