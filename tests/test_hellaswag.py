"""HellaSwag's scores against the plain definition, with models whose losses are known."""

import errno
import hashlib
import json
import math
import re
import shutil
import statistics
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ONE_PROCESS, losses, needs_gpt2_vocabulary, run_to_the_end
from torch.nn import functional as F

import hellaswag
from hellaswag import Example
from support.cli import UserError, run
from support.stop import Stopped
from train_gpt2 import GPT, Distributed, GPTConfig, hellaswag_score

CPU = torch.device("cpu")


def made_up_examples(n=40, seed=0):
    """Endings of one token up to more than the context, contexts longer than the model's 16 tokens, equal endings."""
    rng = torch.Generator().manual_seed(seed)

    def ids(low, high):
        return torch.randint(0, 257, (int(torch.randint(low, high, (1,), generator=rng)),), generator=rng).tolist()

    examples = [
        Example(ids(1, 30 if i % 3 else 5), [ids(1, 25 if i % 5 == 0 else 4) for _ in range(4)], i % 4)
        for i in range(n)
    ]
    twins = Example(examples[1].context, [examples[1].completions[k] for k in (0, 1, 1, 0)], 2)
    return [*examples, twins, Example([7], [[1], [2], [3], [4]], 0)]


@torch.no_grad()
def plain_losses(model, example):
    """Row by row and token by token: the loss of each ending's tokens, each after the 16 that come before it."""
    sums, means = [], []
    for completion in example.completions:
        row = (example.context + completion)[-17:]
        first = max(1, len(row) - len(completion))
        terms = []
        for t in range(first, len(row)):
            logits = model(torch.tensor([row[:t]]))[0][0, -1].double()
            terms.append((logits.exp().sum().log() - logits[row[t]]).item())
        sums.append(sum(terms))
        means.append(sum(terms) / len(terms))
    return sums, means


@pytest.fixture
def sharp_model(tiny_model):
    """Far from uniform, so that endings differ."""
    with torch.no_grad():
        for parameter in tiny_model.parameters():
            parameter.mul_(4)
    return tiny_model


@pytest.fixture
def models(sharp_model, tmp_path):
    """The same weights as the trainer's model, and as Hugging Face's, which reads the context once."""
    from transformers import GPT2LMHeadModel

    sharp_model.save_pretrained(tmp_path / "sharp")
    theirs = hellaswag.from_huggingface(GPT2LMHeadModel.from_pretrained(tmp_path / "sharp").eval())
    ours = hellaswag.Model(sharp_model.hidden, sharp_model.logits, 16, CPU)
    return {"trainer": ours, "hub": theirs}


@pytest.mark.parametrize("kind", ["trainer", "hub"])
def test_losses_and_predictions_equal_the_plain_loop(models, sharp_model, kind):
    examples = made_up_examples()
    expected_sums, expected_means = np.array([plain_losses(sharp_model, e) for e in examples]).swapaxes(0, 1)
    read = []
    hidden = models[kind].hidden
    model = hellaswag.Model(lambda ids, *more: read.append(ids.shape) or hidden(ids, *more), models[kind].head, 16, CPU, models[kind].masked)  # fmt: skip
    for budget in (1, 17, 33, 64, 100_000, None):
        read.clear()
        sums, means = hellaswag.completion_losses(model, examples, budget)
        np.testing.assert_allclose(sums, expected_sums, atol=1e-4, rtol=0)
        np.testing.assert_allclose(means, expected_means, atol=1e-4, rtol=0)
        assert (sums.argmin(1) == expected_sums.argmin(1)).all() and (means.argmin(1) == expected_means.argmin(1)).all()
        rows = sum(shape[0] for shape in read)
        assert all(shape.numel() <= max(budget or 768, 16) or shape[0] == 1 for shape in read)
        if budget in (1, 100_000):
            assert len(read) == (rows if budget == 1 else 1)
    right = [int(row.argmin()) == e.label for row, e in zip(expected_means, examples, strict=True)]
    assert hellaswag.correct(means, examples) == sum(right) != hellaswag.correct(sums, examples)
    # what fits into the context of 16 is one row for the hub's model; equal endings are read once
    fits = [e for e in examples if len(e.context) + sum(len(c) - 1 for c in set(map(tuple, e.completions))) <= 16]
    distinct = [len(set(map(tuple, e.completions))) for e in examples]
    saved = sum(n - 1 for n, e in zip(distinct, examples, strict=True) if e in fits)
    assert len(fits) > 10 and rows == sum(distinct) - (saved if kind == "hub" else 0)


def test_logits_are_fp32_under_autocast_and_few_at_a_time(models, monkeypatch):
    examples = made_up_examples()
    exact, _ = hellaswag.completion_losses(models["hub"], examples)
    monkeypatch.setattr(hellaswag, "LOGIT_ROWS", 50)
    dtypes, sizes = [], []
    head = models["hub"].head

    def spy(hidden):
        dtypes.extend((hidden.dtype, head(hidden).dtype))
        sizes.append(len(hidden))
        return head(hidden)

    model = hellaswag.Model(models["hub"].hidden, spy, 16, CPU, masked=True)
    with torch.autocast("cpu", torch.bfloat16):
        rounded, _ = hellaswag.completion_losses(model, examples)
    assert set(dtypes) == {torch.float32} and max(sizes) == 50
    assert 0 < np.abs(rounded - exact).max() < 2


def test_scores_by_hand():
    """A model to which token k costs k+1 nats more than token 0, wherever it stands: sums and means are arithmetic."""
    logits = -torch.arange(10.0)
    z = math.log(logits.exp().sum())
    model = hellaswag.Model(lambda idx: idx[..., None], lambda hidden: logits.expand(len(hidden), 10), 64, CPU)
    #                       sums less z per token: 6, 4, 5, 8      means less z: 2, 4, 2.5, 8
    example = Example([1, 2], [[2, 2, 2], [4], [2, 3], [8]], 1)
    sums, means = hellaswag.completion_losses(model, [example])
    np.testing.assert_allclose(sums, [[6 + 3 * z, 4 + z, 5 + 2 * z, 8 + z]], rtol=1e-6)
    np.testing.assert_allclose(means, [[2 + z, 4 + z, 2.5 + z, 8 + z]], rtol=1e-6)
    assert (hellaswag.correct(sums, [example]), hellaswag.correct(means, [example])) == (1, 0)
    # per character: a length of nothing is no division by zero, and never wins
    _, per_character = hellaswag.completion_losses(
        model, [Example(example.context, example.completions, 3, [12, 2, 0, 100])]
    )
    np.testing.assert_allclose(per_character, [[(6 + 3 * z) / 12, (4 + z) / 2, np.inf, (8 + z) / 100]], rtol=1e-6)
    sure = hellaswag.Model(model.hidden, lambda hidden: torch.tensor([0.0, -1e4]).expand(len(hidden), 2), 64, CPU)
    _, per_character = hellaswag.completion_losses(sure, [Example([1], [[1], [0], [1], [1]], 0, [1, 0, 1, 1])])
    assert per_character.tolist() == [[1e4, np.inf, 1e4, 1e4]]  # also where the loss is nothing
    # losses that are not numbers are no answer, whatever the label
    broken = np.array([[math.nan] * 4, [3, 1, math.nan, 2], [3, 1, 4, 2]])
    assert hellaswag.correct(broken, [Example([1], [[1]] * 4, label) for label in (0, 1, 1)]) == 1


def test_a_batch_that_does_not_fit_is_halved(models):
    examples = made_up_examples()
    expected = hellaswag.completion_losses(models["hub"], examples)
    sizes = []

    def little_memory(most, message="CUDA out of memory. Tried"):
        def hidden(ids, *more):
            sizes.append(ids.numel())
            if ids.numel() > most:
                raise RuntimeError(message)
            return models["hub"].hidden(ids, *more)

        return hellaswag.Model(hidden, models["hub"].head, 16, CPU, masked=True)

    sums, means = hellaswag.completion_losses(little_memory(100), examples, 800)
    np.testing.assert_allclose((sums, means), expected, atol=1e-4)
    assert sum(size > 100 for size in sizes) == 3  # 800, 400, 200 tokens: the lesson is remembered
    with pytest.raises(UserError, match="not even one row of 16 tokens fits into the memory of cpu"):
        hellaswag.completion_losses(little_memory(15), examples)
    with pytest.raises(RuntimeError, match="something else"):
        hellaswag.completion_losses(little_memory(100, "something else"), examples)


@pytest.mark.parametrize("world", [1, 2, 3, 50])
def test_ranks_share_the_examples_by_cost(models, sharp_model, world):
    examples = made_up_examples()
    shares = [hellaswag.share(examples, rank, world, 16) for rank in range(world)]
    assert sorted(id(e) for share in shares for e in share) == sorted(map(id, examples))

    def cost(share):
        return sum(min(16, len(e.context) + len(c) - 1) for e in share for c in e.completions)

    assert max(map(cost, shares)) - min(map(cost, shares)) <= max(cost([e]) for e in examples)
    counts = [hellaswag.correct(hellaswag.completion_losses(models["trainer"], share)[1], share) for share in shares]
    whole = hellaswag.correct(hellaswag.completion_losses(models["trainer"], examples)[1], examples)
    amp = torch.autocast("cpu", enabled=False)
    assert sum(counts) == whole and hellaswag_score(sharp_model, examples, ONE_PROCESS, amp)[0] == whole / len(examples)


def test_scoring_ends_when_the_run_is_told_to_stop(sharp_model, monkeypatch):
    dist = Distributed(rank=0, local_rank=0, world=1, device=CPU)
    hidden, calls = sharp_model.hidden, []

    def stopping(ids):
        calls.append(len(ids))
        dist.stop.told = 15
        return hidden(ids)

    monkeypatch.setattr(sharp_model, "hidden", stopping)
    with pytest.raises(Stopped):
        hellaswag_score(sharp_model, made_up_examples(400), dist, torch.autocast("cpu", enabled=False))
    assert calls == [48]  # rows of 16 tokens, the first batch; there are some 1,600


def test_the_standard_error_is_that_of_a_mean():
    samples = [1] * 7 + [0] * 13
    share, error = hellaswag.accuracy(7, 20)
    assert share == statistics.mean(samples)
    assert error == pytest.approx(statistics.stdev(samples) / math.sqrt(20))
    assert hellaswag.accuracy(1, 1) == (1.0, pytest.approx(math.nan, nan_ok=True))


# ---- items


def item(**change):
    return {
        "activity_label": "Roofing",
        "ctx_a": "A man sits on a roof.",
        "ctx_b": "he",
        "ctx": "A man sits on a roof. he",
        "endings": ["falls.", "rips up tiles.", "sings a song.", "is ripping level tiles off it"],
        "label": 1,
    } | change


def write_items(path, n=3, **change):
    path.write_text("".join(json.dumps(item(**change)) + "\n" for _ in range(n)))
    return path


@pytest.mark.parametrize(
    "line, message",
    [
        ("{", "line 4 is not JSON"),
        ("[]", "line 4 is not a HellaSwag item"),
        ("7", "line 4 is not a HellaSwag item"),
        ('{"ctx": "a", "label": 0}', "line 4 is not a HellaSwag item: it lacks 'endings'"),
        ('{"ctx": "a", "endings": ["b"], "label": 0}', "line 4 is not a HellaSwag item: it needs texts, 4 endings"),
        ('{"ctx": "a", "endings": ["b", "c", "d", "e"], "label": 4}', "a label from 0 to 3"),
        ('{"ctx": "a", "endings": ["b", "c", "d", "e"], "label": "4"}', "a label from 0 to 3"),
        ('{"ctx": "a", "endings": ["b", "c", "d", "e"], "label": true}', "a label from 0 to 3"),
        ('{"ctx": 1, "endings": ["b", "c", "d", "e"], "label": 1}', "it needs texts"),
        ('{"ctx": "a", "endings": ["b", "c", "d", "e"]}', "line 4 or those before it lack a label"),
    ],
)
def test_a_line_that_is_no_item_is_named(tmp_path, line, message):
    path = write_items(tmp_path / "items.jsonl")
    with open(path, "a") as file:
        file.write(line + "\n")
    with pytest.raises(UserError, match=message):
        hellaswag.load(path)
    assert len(hellaswag.load(path, limit=3)) == 3


def test_a_byte_order_mark_is_no_text(tmp_path):
    (tmp_path / "items.jsonl").write_text(json.dumps(item()), encoding="utf-8-sig")
    assert hellaswag.load(tmp_path / "items.jsonl")[0].ctx == item()["ctx"]


def test_labels_are_numbers_or_digits_or_missing(tmp_path):
    for given, expected in ((2, 2), ("2", 2), ("", None), (None, None)):
        [loaded] = hellaswag.load(write_items(tmp_path / "items.jsonl", 1, label=given))
        assert loaded.label == expected
    with pytest.raises(UserError, match="lacks 'ctx_b'"):
        (tmp_path / "items.jsonl").write_text('{"activity_label": "a", "ctx_a": "b", "ctx": "c", "endings": []}\n')
        hellaswag.load(tmp_path / "items.jsonl", style="harness")


CLEANED = [  # what lm-evaluation-harness makes of an item, by hand: the context, and what each ending adds to it
    (
        item(),
        "Roofing: A man sits on a roof. He",
        [" falls.", " rips up tiles.", " sings a song.", " is ripping level tiles off it"],
    ),
    (
        item(
            activity_label="Home and Garden",
            ctx_a="How to paint a wall [title] Buy  paint. [step] Go to   the shop.",
            ctx_b="",
            endings=["[substeps] Take the bus. [title] Pay.", " walk ", "[a] [b]", "it's 3  km"],
        ),
        "Home and Garden: How to paint a wall. Buy paint. Go to  the shop.",
        ["  Take the bus.. Pay.", " walk", "  ", " it's 3 km"],
    ),
    (
        item(activity_label="x", ctx_a="Do this. [step]", ctx_b="WE all DO", endings=["go.", "é!", "1", ""]),
        "x: Do this. We all do",
        [" go.", " é!", " 1", " "],
    ),
    (
        item(activity_label="x", ctx_a="Wait. [step]", ctx_b="", endings=["go.", " [title] Pay.", "1", ""]),
        "x: Wait.",
        ["  go.", "   Pay.", "  1", "  "],
    ),
]


@needs_gpt2_vocabulary
@pytest.mark.parametrize("record, context, continuations", CLEANED)
def test_the_harness_style_by_hand(tmp_path, record, context, continuations):
    import tiktoken

    encode = tiktoken.get_encoding("gpt2").encode
    (tmp_path / "items.jsonl").write_text(json.dumps(record))
    [loaded] = hellaswag.load(tmp_path / "items.jsonl", style="harness")
    example = hellaswag.render(loaded, hellaswag.get_tokenizer("gpt2"), "harness")
    assert example.context == encode(context)
    assert [example.context + c for c in example.completions] == [encode(context + c) for c in continuations]
    blanks = 2 if context == "x: Wait." else 1  # one is the blank between them; the other was the context's
    assert example.lengths == [len(c) - blanks for c in continuations] and example.label == record["label"]


@needs_gpt2_vocabulary
def test_a_context_without_text_is_an_end_of_text():
    """The harness gives up on these; here they are scored as the beginning of a document."""
    bare = hellaswag.Item(["a"] * 4, 0, activity_label="[", ctx_a="]")
    for style, expected in (("harness", [50256]), ("tokens", [50256])):
        example = hellaswag.render(bare, hellaswag.get_tokenizer("gpt2"), style)
        assert example.context == expected and example.completions == [[257]] * 4  # " a"


@needs_gpt2_vocabulary
def test_the_tokens_style_by_hand():
    import tiktoken

    encode = tiktoken.get_encoding("gpt2").encode
    loaded = hellaswag.Item(["a b", "", " c", "it's"], 3, ctx="Wait. [step] he")
    example = hellaswag.render(loaded, hellaswag.get_tokenizer("gpt2"))
    assert example == Example(encode("Wait. [step] he"), [encode(c) for c in (" a b", " ", "  c", " it's")], 3)


def test_each_split_is_a_known_file(tmp_path, monkeypatch):
    contents = {split: f"{split}\n".encode() for split in ("val", "train", "test")}
    blobs = {s: hashlib.sha1(b"blob %d\0" % len(c) + c).hexdigest() for s, c in contents.items()}
    asked = []
    monkeypatch.chdir(tmp_path)
    assert hellaswag.GIT_BLOBS == {
        "val": "0f5ee25d72216f12317d5d8a7b92deafa423d81e",
        "train": "1997e15fe638ef2aeec6993471159295cd75aab7",
        "test": "7a4b590ea240595f468bfbc7f2c744e5eef72da5",
    }
    monkeypatch.setattr(hellaswag, "GIT_BLOBS", blobs)
    monkeypatch.setattr("support.download._fetch", lambda url, part, *_: asked.append(url) or part.write_bytes(contents[url[:-6].rsplit("_")[-1]]))  # fmt: skip
    for split in contents:
        for _ in range(2):  # the second time nothing is fetched
            assert hellaswag.download(split).read_bytes() == contents[split]
    base = "https://raw.githubusercontent.com/rowanz/hellaswag/master/data/hellaswag_"
    assert asked == [f"{base}{split}.jsonl" for split in contents]


# ---- the command line


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    torch.manual_seed(0)
    model = GPT(GPTConfig(block_size=64, n_layer=1, n_head=2, n_embd=16))
    with torch.no_grad():  # far from uniform, and no part of it small
        for name, parameter in model.named_parameters():
            parameter.mul_(20 if name == "transformer.wte.weight" else 8)
    model.save_pretrained(tmp_path_factory.mktemp("checkpoint") / "model")
    return model, tmp_path_factory.getbasetemp() / "checkpoint0" / "model"


def score(capsys, *flags):
    hellaswag.main([*map(str, flags), "-d", "cpu"])
    return capsys.readouterr().out


@needs_gpt2_vocabulary
@pytest.mark.parametrize("style", ["tokens", "harness"])
def test_the_command_line_scores_a_checkpoint(checkpoint, tmp_path, capsys, style):
    model, directory = checkpoint
    items = write_items(tmp_path / "items.jsonl", 1)
    with open(items, "a") as file:
        file.write(write_items(tmp_path / "more.jsonl", 2, label=3).read_text())
    out = score(capsys, "-m", directory, "--data", items, "--style", style, "--json", tmp_path / "scores.json")

    import tiktoken

    encode = tiktoken.get_encoding("gpt2").encode
    context = encode("A man sits on a roof. he" if style == "tokens" else "Roofing: A man sits on a roof. He")
    sums, norms = [], []
    for ending in item()["endings"]:
        row = torch.tensor([context + encode(" " + ending)])
        per_token = F.cross_entropy(model(row[:, :-1])[0][0], row[0, 1:], reduction="none")[len(context) - 1 :]
        sums.append(per_token.sum().item())
        norms.append(per_token.mean().item() if style == "tokens" else sums[-1] / len(ending))
    results = json.loads((tmp_path / "scores.json").read_text())
    for result, label in zip(results["results"], (1, 3, 3), strict=True):
        np.testing.assert_allclose((result["losses"], result["losses_norm"]), (sums, norms), atol=1e-4)
        predicted = sums.index(min(sums)), norms.index(min(norms))
        assert predicted[0] != predicted[1]
        assert (result["prediction"], result["prediction_norm"]) == predicted and result["label"] == label
    for name, losses_ in (("acc", sums), ("acc_norm", norms)):
        right = [losses_.index(min(losses_)) == label for label in (1, 3, 3)]
        figures = sum(right) / 3, statistics.stdev(map(float, right)) / math.sqrt(3)
        assert (results[name], results[name + "_stderr"]) == pytest.approx(figures)
        assert "{:.4f} ± {:.4f}".format(*figures) in out
    known = "OpenAI GPT-2 124M +" + ("0.2859 +0.2955" if style == "tokens" else "0.2892 +0.3114")
    assert len(re.findall(known, out)) == 1 and "3 items, style " + style in out
    assert "Published scores are those of all 10,042 validation items." in out and not list(tmp_path.glob("*.partial"))
    assert {k: results[k] for k in ("style", "dtype", "items")} == {"style": style, "dtype": "float32", "items": 3}


@needs_gpt2_vocabulary
def test_lower_precision_changes_the_losses_a_little(checkpoint, tmp_path, capsys):
    _, directory = checkpoint
    found = {}
    for dtype in ("fp32", "bf16"):
        flags = ["--data", write_items(tmp_path / "items.jsonl"), "--dtype", dtype, "--json", tmp_path / dtype]
        assert {"fp32": "float32 on cpu", "bf16": "bfloat16 on cpu"}[dtype] in score(capsys, "-m", directory, *flags)
        found[dtype] = np.array([r["losses"] for r in json.loads((tmp_path / dtype).read_text())["results"]])
    assert 1e-3 < np.abs(found["bf16"] - found["fp32"]).max() < 0.05 * found["fp32"].max()


def test_training_scores_in_its_own_precision(sharp_model, monkeypatch):
    hidden, seen = sharp_model.hidden, []
    monkeypatch.setattr(sharp_model, "hidden", lambda ids: seen.append(torch.is_autocast_enabled("cpu")) or hidden(ids))
    for on in (True, False):
        seen.clear()
        hellaswag_score(sharp_model, made_up_examples(), ONE_PROCESS, torch.autocast("cpu", torch.bfloat16, enabled=on))
        assert set(seen) == {on}


def test_json_has_what_is_told_and_no_infinity(tmp_path):
    sums, normalised = np.array([[1.5, 2, 3, 4], [4, 3, 2, 1]]), np.array([[4, 3, np.inf, 1], [4, 3, 1, 2.0]])
    items = [hellaswag.Item(["a"] * 4, 2), hellaswag.Item(["a"] * 4, None)]
    about = {"model": "m", "acc": 0.5, "acc_stderr": math.nan}
    hellaswag.write_json(tmp_path / "scores.json", about, sums, normalised, items)
    assert json.loads((tmp_path / "scores.json").read_text(), parse_constant=pytest.fail) == {
        "model": "m",
        "acc": 0.5,
        "acc_stderr": None,
        "results": [
            {
                "losses": [1.5, 2, 3, 4],
                "losses_norm": [4, 3, None, 1],
                "prediction": 0,
                "prediction_norm": 3,
                "label": 2,
            },
            {"losses": [4, 3, 2, 1], "losses_norm": [4, 3, 1, 2], "prediction": 3, "prediction_norm": 2, "label": None},
        ],
    }


@needs_gpt2_vocabulary
def test_items_without_labels_give_losses_alone(checkpoint, tmp_path, capsys, monkeypatch):
    _, directory = checkpoint
    labelled, bare = write_items(tmp_path / "a.jsonl"), write_items(tmp_path / "b.jsonl", label=None)
    monkeypatch.setattr(hellaswag, "download", lambda split: {"test": bare, "val": labelled}[split])
    with pytest.raises(UserError, match="no labels, so they give no score. Name a file for the losses with --json"):
        score(capsys, "-m", directory, "--data", bare)
    monkeypatch.setattr(hellaswag, "VAL_ITEMS", 3)
    out = score(capsys, "-m", directory, "--json", tmp_path / "with.json")
    assert "OpenAI" in out and "Published scores" not in out  # these are all validation items
    out = score(capsys, "-m", directory, "--split", "test", "--json", tmp_path / "without.json")
    a, b = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("with", "without"))
    assert (b["acc"], b["acc_norm"], b["results"][0]["label"], b["data"]) == (None, None, None, "test")
    assert [r["losses"] for r in a["results"]] == [r["losses"] for r in b["results"]]
    assert (
        out.endswith(f"no labels, so no score; the losses go to {tmp_path / 'without.json'}\n") and "OpenAI" not in out
    )
    tokenizer = hellaswag.get_tokenizer("gpt2")
    with pytest.raises(UserError, match="no labels, so there is nothing to score"):
        hellaswag.examples(str(bare), tokenizer, print)
    assert len(hellaswag.examples(str(labelled), tokenizer, print, limit=2)) == 2


@needs_gpt2_vocabulary
def test_only_scores_are_replaced_and_links_stay(checkpoint, tmp_path, capsys):
    _, directory = checkpoint
    link, scores = tmp_path / "link.json", tmp_path / "scores.json"
    link.symlink_to(scores)
    for limit in (3, 1, 2):  # into nothing, into longer scores, into shorter ones
        score(
            capsys, "-m", directory, "--data", write_items(tmp_path / "items.jsonl"), "--limit", limit, "--json", link
        )
        assert len(json.loads(scores.read_text())["results"]) == limit and link.is_symlink()
    score(capsys, "-m", directory, "--data", tmp_path / "items.jsonl", "--limit", 1, "--json", "/dev/null")
    assert Path("/dev/null").is_char_device()
    scores.chmod(0o640)
    score(capsys, "-m", directory, "--data", tmp_path / "items.jsonl", "--limit", 1, "--json", link)
    assert scores.stat().st_mode & 0o777 == 0o640
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(UserError, match="cannot write .*loop"):
        score(capsys, "-m", directory, "--data", tmp_path / "items.jsonl", "--json", tmp_path / "loop")


@needs_gpt2_vocabulary
def test_scores_are_written_whole_or_not_at_all(checkpoint, tmp_path, capsys, monkeypatch):
    _, directory = checkpoint
    items, scores = write_items(tmp_path / "items.jsonl"), tmp_path / "scores.json"
    flags = ["-m", directory, "--data", items, "--json", scores]
    score(capsys, *flags)
    before = scores.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", lambda _: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left on device")))
        with pytest.raises(UserError, match=r"cannot write .*scores.json \(No space left on device\). Free the disk"):
            score(capsys, *flags)
        assert "± 0." in capsys.readouterr().out  # what was computed is told all the same
    assert scores.read_bytes() == before and sorted(tmp_path.iterdir()) == [items, scores]
    scores.unlink()
    with monkeypatch.context() as patch:  # the reader of the output is gone, as after "| true"
        patch.setattr("sys.stdout", open("/dev/full", "w"))  # noqa: SIM115
        with pytest.raises(OSError):
            hellaswag.main([*map(str, flags), "-d", "cpu"])
            sys.stdout.flush()
    assert json.loads(scores.read_text())["items"] == 3


@needs_gpt2_vocabulary
@pytest.mark.parametrize(
    "change", [{"attn_implementation": "eager"}, {"return_dict": False}, {"n_ctx": 8}, {"use_cache": True}, {"attn_pdrop": 0.9}]
)  # fmt: skip
def test_no_other_field_of_the_configuration_changes_the_losses(checkpoint, tmp_path, capsys, change):
    _, directory = checkpoint
    copy = Path(shutil.copytree(directory, tmp_path / "copy"))
    items = write_items(tmp_path / "items.jsonl")
    score(capsys, "-m", directory, "--data", items, "--json", tmp_path / "a.json")
    (copy / "config.json").write_text(json.dumps(json.loads((copy / "config.json").read_text()) | change))
    score(capsys, "-m", copy, "--data", items, "--json", tmp_path / "b.json")
    a, b = (json.loads((tmp_path / f"{name}.json").read_text())["results"] for name in "ab")
    assert a == b


@needs_gpt2_vocabulary
def test_files_of_older_tools_are_scored(checkpoint, tmp_path, capsys):
    """fp16, without the prefix of the names, with the causal masks: as OpenAI's weights lie on the hub, and smaller."""
    from safetensors.torch import load_file, save_file

    _, directory = checkpoint
    weights = {name: tensor.half() for name, tensor in load_file(directory / "model.safetensors").items()}
    older = {name.removeprefix("transformer."): tensor for name, tensor in weights.items()}
    older["h.0.attn.bias"] = torch.ones(1, 1, 64, 64).tril()
    files = {"a": older, "b": {name: tensor.float() for name, tensor in weights.items()}}
    items = write_items(tmp_path / "items.jsonl")
    for name, tensors in files.items():
        shutil.copytree(directory, tmp_path / name)
        save_file(tensors, tmp_path / name / "model.safetensors")
        score(capsys, "-m", tmp_path / name, "--data", items, "--json", tmp_path / f"{name}.json")
    a, b = (json.loads((tmp_path / f"{name}.json").read_text())["results"] for name in files)
    assert a == b


@needs_gpt2_vocabulary
def test_what_is_cut_is_told(checkpoint, tmp_path, capsys):
    _, directory = checkpoint
    items = write_items(tmp_path / "items.jsonl", 2, ctx="a" + " a" * 63)  # 64 tokens
    out = score(capsys, "-m", directory, "--data", items, "--json", tmp_path / "x.json")
    assert "of 8 endings with their contexts only the last tokens were read: the model takes 64" in out
    assert json.loads((tmp_path / "x.json").read_text())["truncated"] == 8


@needs_gpt2_vocabulary
def test_broken_weights_give_no_score(checkpoint, tmp_path, capsys):
    model, _ = checkpoint
    broken = GPT(model.config)
    with torch.no_grad():
        broken.transformer.ln_f.bias[3] = math.nan
    broken.save_pretrained(tmp_path / "broken")
    items, json_file = write_items(tmp_path / "items.jsonl"), tmp_path / "scores.json"
    with pytest.raises(UserError, match=r"12 of 12 losses of .*broken are not finite\. Use another checkpoint"):
        score(capsys, "-m", tmp_path / "broken", "--data", items, "--json", json_file)
    with pytest.raises(UserError, match=r"are not finite\. Try --dtype fp32"):
        score(capsys, "-m", tmp_path / "broken", "--data", items, "--dtype", "bf16")
    assert not json_file.exists() and "acc" not in capsys.readouterr().out


@needs_gpt2_vocabulary
def test_one_rank_two_ranks_and_the_command_line_agree(tmp_path, capsys):
    rng = np.random.default_rng(0)
    data = tmp_path / "shards"
    data.mkdir()
    for name in ("x_val_000000", "x_train_000001"):
        np.save(data / name, rng.integers(0, 50257, 3000, dtype=np.uint16))
    words = "man roof tile sings red walks the a of cat jumps into water then".split()

    def text(low, high):
        return " ".join(rng.choice(words, rng.integers(low, high)))

    items = tmp_path / "items.jsonl"
    lines = [
        item(ctx=text(1, 12), endings=[text(1, 9) for _ in range(4)], label=int(rng.integers(4))) for _ in range(41)
    ]
    items.write_text("".join(json.dumps(line) + "\n" for line in lines))
    flags = ["--data", data, "--max-steps", 2, "--val-every", 0, "--hellaswag-every", 1, "--hellaswag-data", items]
    for out, world, limit in (("one", 1, 40), ("two", 2, 40), ("few", 2, 7)):
        run_to_the_end(*flags, "--hellaswag-limit", limit, "--out", out, cwd=tmp_path, world=world)
    hella = {out: losses(tmp_path / out / "log.txt", "hella") for out in ("one", "two", "few")}
    assert hella["one"] == hella["two"] and len(hella["one"]) == 3
    for out, limit in (("two", 40), ("few", 7)):
        score(capsys, "-m", tmp_path / out / "model_00002", "--data", items, "--limit", limit, "--json", tmp_path / "x")
        assert hella[out][-1] == round(json.loads((tmp_path / "x").read_text())["acc_norm"], 4)


@needs_gpt2_vocabulary
@pytest.mark.parametrize(
    "harm", ["a tensor is missing", "one too many", "untied", "flipped", "cut short", "no weights"]
)
def test_damaged_weights_are_not_scored(tmp_path, capsys, harm):
    from safetensors.torch import load_file, save_file

    from support import checkpoint

    model = GPT(GPTConfig(block_size=64, n_layer=1, n_head=2, n_embd=16))
    checkpoint.save(tmp_path / "model_00001", model.save_pretrained)
    directory = (tmp_path / "model_00001").rename(tmp_path / "copy")
    file = directory / "model.safetensors"
    if harm != "flipped":  # also where nothing tells what the file should be
        (directory / "checkpoint.json").unlink()
    if harm == "a tensor is missing":
        weights = load_file(file)
        del weights["transformer.h.0.attn.c_attn.weight"]
        save_file(weights, file, metadata={"format": "pt"})
    elif harm in ("one too many", "untied"):
        weights = load_file(file)
        name = "lm_head.weight" if harm == "untied" else "transformer.h.1.ln_1.weight"
        weights[name] = torch.zeros(50257, 16) if harm == "untied" else torch.zeros(16)
        save_file(weights, file, metadata={"format": "pt"})
    elif harm == "flipped":
        file.write_bytes(file.read_bytes()[:-1] + b"?")
    elif harm == "cut short":
        file.write_bytes(file.read_bytes()[:-100])
    else:
        file.unlink()
    items = write_items(tmp_path / "items.jsonl")
    for score in (
        lambda: hellaswag.main(["-m", str(directory), "--data", str(items), "-d", "cpu"]),
        lambda: GPT.from_pretrained(directory),
    ):
        with pytest.raises(UserError, match="copy|the weights (lack|have)|lm_head.weight differs"):
            score()
    assert "acc" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "flags, message",
    [
        ("-m nowhere/model --data items.jsonl", "no model 'nowhere/model'"),
        ("-m . --data items.jsonl", ". is not a checkpoint"),
        ("-m tiny --data none.jsonl", "cannot read HellaSwag items from none.jsonl"),
        ("-m tiny --data items.jsonl", "tiny was trained on bytes"),
        ("-m gpt2 --limit 0", "--limit must be 1 or more"),
        ("-m gpt2 --split val --data items.jsonl", "--split names a download, and --data a file"),
        ("-m gpt2 --json no/where.json", "cannot write no/where.json"),
        ("-m gpt2 --json tiny", "cannot write tiny"),
        ("-m tiny --data items.jsonl --json ./items.jsonl", "items.jsonl is there and holds something else"),
        ("-m tiny --json tiny/config.json", "tiny/config.json is there and holds something else"),
        ("-m tiny --data bare.jsonl", "the items have no labels"),
        ("-m tiny --data= --json=", "--data needs the name of a file"),
        ("-m tiny --json items.jsonl/scores", "cannot write items.jsonl/scores (Not a directory)"),
        (f"-m tiny --json {'x' * 300}", "cannot write xxx"),
        ("-m tiny --split test", "test has no labels, so it gives no score"),
        ("-m tiny --data empty.jsonl", "there are no HellaSwag items in empty.jsonl"),
    ],
)
def test_bad_input(tiny_model, tmp_path, monkeypatch, capsys, flags, message):
    monkeypatch.chdir(tmp_path)
    write_items(tmp_path / "items.jsonl")
    write_items(tmp_path / "bare.jsonl", label=None)
    (tmp_path / "empty.jsonl").touch()
    tiny_model.save_pretrained(tmp_path / "tiny")
    with pytest.raises(SystemExit) as exit:
        run(lambda: hellaswag.main(flags.split()))
    assert exit.value.code == 2 and f"error: {message}" in capsys.readouterr().err
