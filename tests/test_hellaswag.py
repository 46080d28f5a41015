"""HellaSwag scores: against a plain loop over tokens, by hand, and through the command line."""

import dataclasses
import json
import math
import re
import shutil
import signal
import statistics
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import losses, needs_gpt2_vocabulary, run_to_the_end
from torch.nn import functional as F
from training import ONE_PROCESS, config_of

import hellaswag
from hellaswag import Example
from support.cli import UserError, run_cli
from support.data.tokenizer import get_tokenizer
from support.runtime.signals import StopHandler
from train_gpt2 import GPT, GPTConfig

CPU = torch.device("cpu")
FP32 = torch.autocast("cpu", enabled=False)


def random_examples(n=40, seed=0):
    """Examples for a model of 16 tokens: some contexts and endings are longer than that, and some endings are equal."""
    rng = torch.Generator().manual_seed(seed)

    def ids(low, high):
        return torch.randint(0, 257, (int(torch.randint(low, high, (1,), generator=rng)),), generator=rng).tolist()

    examples = [
        Example(ids(1, 30 if i % 3 else 5), [ids(1, 25 if i % 5 == 0 else 4) for _ in range(4)], i % 4)
        for i in range(n)
    ]
    equal_endings = Example(examples[1].context, [examples[1].completions[k] for k in (0, 1, 1, 0)], 2)
    return [*examples, equal_endings, Example([7], [[1], [2], [3], [4]], 0)]


@torch.no_grad()
def plain_losses(model, example):
    """Summed and mean losses of the endings, one token at a time, each predicted from the 16 tokens before it."""
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
    """A model with large weights: its predictions are far from uniform, so that the losses of endings differ."""
    with torch.no_grad():
        for parameter in tiny_model.parameters():
            parameter.mul_(4)
    return tiny_model


@pytest.fixture
def models(sharp_model, tmp_path):
    """The same weights in the trainer's model and in Hugging Face's, which shares the context between endings."""
    from transformers import GPT2LMHeadModel

    sharp_model.save_pretrained(tmp_path / "sharp")
    return {
        "trainer": hellaswag.ScoringModel(sharp_model.transformer, sharp_model.logits, 16, CPU),
        "hugging face": hellaswag.from_huggingface(GPT2LMHeadModel.from_pretrained(tmp_path / "sharp").eval()),
    }


@pytest.mark.parametrize("kind", ["trainer", "hugging face"])
def test_losses_and_predictions_equal_the_plain_loop(models, sharp_model, kind):
    examples = random_examples()
    expected_sums, expected_means = np.array([plain_losses(sharp_model, e) for e in examples]).swapaxes(0, 1)
    batch_shapes = []

    def hidden(ids, *position_ids_and_mask):
        batch_shapes.append(ids.shape)
        return models[kind].hidden(ids, *position_ids_and_mask)

    model = dataclasses.replace(models[kind], hidden=hidden)
    for token_budget in (1, 17, 33, 64, 100_000, None):
        batch_shapes.clear()
        sums, means = hellaswag.completion_losses(model, examples, token_budget)
        np.testing.assert_allclose(sums, expected_sums, atol=1e-4, rtol=0)
        np.testing.assert_allclose(means, expected_means, atol=1e-4, rtol=0)
        assert (sums.argmin(1) == expected_sums.argmin(1)).all() and (means.argmin(1) == expected_means.argmin(1)).all()
        num_rows = sum(shape[0] for shape in batch_shapes)
        assert all(shape.numel() <= max(token_budget or 768, 16) or shape[0] == 1 for shape in batch_shapes)
        if token_budget in (1, 100_000):
            assert len(batch_shapes) == (num_rows if token_budget == 1 else 1)
    num_correct = sum(int(row.argmin()) == e.label for row, e in zip(expected_means, examples, strict=True))
    assert hellaswag.count_correct(means, examples) == num_correct != hellaswag.count_correct(sums, examples)
    # Hugging Face's model reads one row where all endings fit into 16 tokens; both read equal endings once
    distinct = [set(map(tuple, e.completions)) for e in examples]
    fits = [len(e.context) + sum(len(c) - 1 for c in d) <= 16 for e, d in zip(examples, distinct, strict=True)]
    saved = sum(len(d) - 1 for d, fit in zip(distinct, fits, strict=True) if fit)
    assert sum(fits) > 10 and num_rows == sum(map(len, distinct)) - (saved if kind == "hugging face" else 0)


def test_logits_are_fp32_under_autocast_and_few_at_a_time(models, monkeypatch):
    examples = random_examples()
    exact, _ = hellaswag.completion_losses(models["hugging face"], examples)
    monkeypatch.setattr(hellaswag, "MAX_LOGIT_ROWS", 50)
    dtypes, sizes = [], []

    def head(hidden):
        logits = models["hugging face"].head(hidden)
        dtypes.extend((hidden.dtype, logits.dtype))
        sizes.append(len(hidden))
        return logits

    with torch.autocast("cpu", torch.bfloat16):
        rounded, _ = hellaswag.completion_losses(dataclasses.replace(models["hugging face"], head=head), examples)
    assert set(dtypes) == {torch.float32} and max(sizes) == 50
    assert 0 < np.abs(rounded - exact).max() < 2


def test_scores_by_hand():
    """With a model whose loss of token k is k + z nats in any context, sums and means are arithmetic."""
    logits = -torch.arange(10.0)
    z = math.log(logits.exp().sum())
    model = hellaswag.ScoringModel(lambda idx: idx[..., None], lambda hidden: logits.expand(len(hidden), 10), 64, CPU)
    # sums without z: 6, 4, 5, 8; means without z: 2, 4, 2.5, 8
    example = Example([1, 2], [[2, 2, 2], [4], [2, 3], [8]], 1)
    sums, means = hellaswag.completion_losses(model, [example])
    np.testing.assert_allclose(sums, [[6 + 3 * z, 4 + z, 5 + 2 * z, 8 + z]], rtol=1e-6)
    np.testing.assert_allclose(means, [[2 + z, 4 + z, 2.5 + z, 8 + z]], rtol=1e-6)
    assert (hellaswag.count_correct(sums, [example]), hellaswag.count_correct(means, [example])) == (1, 0)
    # per character: an ending of no characters is no division by zero, and is never predicted
    _, per_character = hellaswag.completion_losses(
        model, [Example(example.context, example.completions, 3, [12, 2, 0, 100])]
    )
    np.testing.assert_allclose(per_character, [[(6 + 3 * z) / 12, (4 + z) / 2, np.inf, (8 + z) / 100]], rtol=1e-6)
    # nor if its loss is 0
    certain = dataclasses.replace(model, head=lambda hidden: torch.tensor([0.0, -1e4]).expand(len(hidden), 2))
    _, per_character = hellaswag.completion_losses(certain, [Example([1], [[1], [0], [1], [1]], 0, [1, 0, 1, 1])])
    assert per_character.tolist() == [[1e4, np.inf, 1e4, 1e4]]
    # an example with a NaN is not correct, whatever its label
    with_nan = np.array([[math.nan] * 4, [3, 1, math.nan, 2], [3, 1, 4, 2]])
    assert hellaswag.count_correct(with_nan, [Example([1], [[1]] * 4, label) for label in (0, 1, 1)]) == 1


@pytest.mark.slow
def test_a_batch_that_does_not_fit_is_halved(models):
    examples = random_examples()
    expected = hellaswag.completion_losses(models["hugging face"], examples)
    sizes = []

    def with_memory_for(max_tokens, message="CUDA out of memory. Tried"):
        def hidden(ids, *position_ids_and_mask):
            sizes.append(ids.numel())
            if ids.numel() > max_tokens:
                raise RuntimeError(message)
            return models["hugging face"].hidden(ids, *position_ids_and_mask)

        return dataclasses.replace(models["hugging face"], hidden=hidden)

    sums, means = hellaswag.completion_losses(with_memory_for(100), examples, 800)
    np.testing.assert_allclose((sums, means), expected, atol=1e-4)
    assert sum(size > 100 for size in sizes) == 3  # 800, 400, 200 tokens: later batches are small at once
    with pytest.raises(UserError, match="a row of 16 tokens does not fit into the memory of cpu"):
        hellaswag.completion_losses(with_memory_for(15), examples)
    with pytest.raises(RuntimeError, match="something else"):
        hellaswag.completion_losses(with_memory_for(100, "something else"), examples)


def score_of(model, examples, stop=None, amp=FP32):
    """What a run scores."""
    scoring_model = hellaswag.ScoringModel(model.transformer, model.logits, model.config.block_size, ONE_PROCESS.device)
    return hellaswag.score_with_ranks(scoring_model, examples, ONE_PROCESS, stop or StopHandler(), amp)


@pytest.mark.parametrize("world_size", [1, 2, 3, 50])
def test_ranks_share_the_examples_by_cost(models, sharp_model, world_size):
    examples = random_examples()
    parts = [hellaswag.examples_for_rank(examples, rank, world_size, 16) for rank in range(world_size)]
    assert sorted(id(e) for part in parts for e in part) == sorted(map(id, examples))

    def cost(part):
        return sum(min(16, len(e.context) + len(c) - 1) for e in part for c in e.completions)

    def correct(part):
        return hellaswag.count_correct(hellaswag.completion_losses(models["trainer"], part)[1], part)

    assert max(map(cost, parts)) - min(map(cost, parts)) <= max(cost([e]) for e in examples)
    total = correct(examples)
    assert sum(map(correct, parts)) == total
    assert score_of(sharp_model, examples)[0] == total / len(examples)


def test_scoring_in_training_stops_after_a_signal(sharp_model, monkeypatch):
    forward, batch_sizes = sharp_model.transformer.forward, []

    def interrupted_forward(ids):
        batch_sizes.append(len(ids))
        signal.raise_signal(signal.SIGTERM)
        return forward(ids)

    monkeypatch.setattr(sharp_model.transformer, "forward", interrupted_forward)
    with StopHandler() as stop:
        assert score_of(sharp_model, random_examples(400), stop) is None
    assert batch_sizes == [48]  # rows of 16 tokens in the first batch; there are some 1,600 rows


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
        ('{"ctx": "a", "endings": ["b"], "label": 0}', "line 4 is not a HellaSwag item: it needs texts, 4 endings"),
        ('{"ctx": "a", "endings": ["b", "c", "d", "e"], "label": 4}', "a label from 0 to 3"),
        ('{"ctx": "a", "endings": ["b", "c", "d", "e"]}', "either line 4 or the lines before it have no label"),
    ],
)
def test_a_bad_line_is_reported_with_its_number(tmp_path, line, message):
    path = write_items(tmp_path / "items.jsonl")
    with open(path, "a") as file:
        file.write(line + "\n")
    with pytest.raises(UserError, match=message):
        hellaswag.load(path)
    assert len(hellaswag.load(path, limit=3)) == 3


def test_labels_are_numbers_or_digits_or_missing(tmp_path):
    for label, expected in ((2, 2), ("2", 2), ("", None), (None, None)):
        [loaded] = hellaswag.load(write_items(tmp_path / "items.jsonl", 1, label=label))
        assert loaded.label == expected
    with pytest.raises(UserError, match="'ctx_b' is missing"):
        (tmp_path / "items.jsonl").write_text('{"activity_label": "a", "ctx_a": "b", "ctx": "c", "endings": []}\n')
        hellaswag.load(tmp_path / "items.jsonl", style="harness")


HARNESS_CASES = [  # an item; its context in lm-evaluation-harness, by hand; what follows it there for each ending
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
@pytest.mark.parametrize("record, context, continuations", HARNESS_CASES)
def test_the_harness_style_by_hand(tmp_path, record, context, continuations):
    import tiktoken

    encode = tiktoken.get_encoding("gpt2").encode
    (tmp_path / "items.jsonl").write_text(json.dumps(record))
    [loaded] = hellaswag.load(tmp_path / "items.jsonl", style="harness")
    example = hellaswag.render(loaded, get_tokenizer("gpt2"), "harness")
    assert example.context == encode(context)
    assert [example.context + c for c in example.completions] == [encode(context + c) for c in continuations]
    spaces = 2 if context == "x: Wait." else 1  # one separates context and ending; a second one was the context's last
    assert example.char_lengths == [len(c) - spaces for c in continuations] and example.label == record["label"]


@needs_gpt2_vocabulary
def test_the_tokens_style_by_hand():
    import tiktoken

    encode = tiktoken.get_encoding("gpt2").encode
    loaded = hellaswag.Item(["a b", "", " c", "it's"], 3, ctx="Wait. [step] he")
    example = hellaswag.render(loaded, get_tokenizer("gpt2"))
    assert example == Example(encode("Wait. [step] he"), [encode(c) for c in (" a b", " ", "  c", " it's")], 3)


def test_a_split_is_downloaded_with_its_checksum(monkeypatch):
    monkeypatch.setattr(hellaswag, "download_file", lambda url, path, git_blob: (url, path, git_blob))
    downloads = [hellaswag.download(split) for split in ("val", "train", "test")]
    base = "https://raw.githubusercontent.com/rowanz/hellaswag/master/data/hellaswag_"
    assert [url for url, _, _ in downloads] == [f"{base}{split}.jsonl" for split in ("val", "train", "test")]
    assert len({blob for _, _, blob in downloads}) == 3 and all(path.parent.name for _, path, _ in downloads)


# ---- command line


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    torch.manual_seed(0)
    model = GPT(GPTConfig(block_size=64, n_layer=1, n_head=2, n_embd=16))
    with torch.no_grad():  # large weights: predictions are far from uniform
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
    sums, normalised = [], []
    for ending in item()["endings"]:
        row = torch.tensor([context + encode(" " + ending)])
        per_token = F.cross_entropy(model(row[:, :-1])[0][0], row[0, 1:], reduction="none")[len(context) - 1 :]
        sums.append(per_token.sum().item())
        normalised.append(per_token.mean().item() if style == "tokens" else sums[-1] / len(ending))
    results = json.loads((tmp_path / "scores.json").read_text())
    for result, label in zip(results["results"], (1, 3, 3), strict=True):
        np.testing.assert_allclose((result["losses"], result["losses_norm"]), (sums, normalised), atol=1e-4)
        predicted = sums.index(min(sums)), normalised.index(min(normalised))
        assert predicted[0] != predicted[1]
        assert (result["prediction"], result["prediction_norm"]) == predicted and result["label"] == label
    for name, values in (("acc", sums), ("acc_norm", normalised)):
        correct = [values.index(min(values)) == label for label in (1, 3, 3)]
        scores = sum(correct) / 3, statistics.stdev(map(float, correct)) / math.sqrt(3)
        assert (results[name], results[name + "_stderr"]) == pytest.approx(scores)
        assert "{:.4f} ± {:.4f}".format(*scores) in out
    published = "OpenAI GPT-2 124M +" + ("0.2859 +0.2955" if style == "tokens" else "0.2892 +0.3114")
    assert len(re.findall(published, out)) == 1 and "3 items, style " + style in out
    assert "Published scores are for all 10,042 validation items." in out and not list(tmp_path.glob("*.partial"))
    assert {k: results[k] for k in ("style", "dtype", "items")} == {"style": style, "dtype": "float32", "items": 3}


def test_training_scores_in_its_own_precision(sharp_model, monkeypatch):
    forward, autocast_states = sharp_model.transformer.forward, []

    def spy(ids):
        autocast_states.append(torch.is_autocast_enabled("cpu"))
        return forward(ids)

    monkeypatch.setattr(sharp_model.transformer, "forward", spy)
    for enabled in (True, False):
        autocast_states.clear()
        amp = torch.autocast("cpu", torch.bfloat16, enabled=enabled)
        score_of(sharp_model, random_examples(), amp=amp)
        assert set(autocast_states) == {enabled}


def test_json_has_neither_nan_nor_infinity(tmp_path):
    sums, normalised = np.array([[1.5, 2, 3, 4]]), np.array([[4, 3, np.inf, 1]])
    summary = {"model": "m", "data": "val", "items": 1, "style": "tokens", "dtype": "float32", "device": "cpu"}
    summary |= {"seconds": 1.25, "truncated": 3, "acc": 0.5, "acc_stderr": math.nan, "acc_norm": 0.25}
    results = hellaswag.Results(**summary, acc_norm_stderr=math.inf)
    hellaswag.write_json(tmp_path / "scores.json", results, sums, normalised, [hellaswag.Item(["a"] * 4, None)])
    result = {"losses": [1.5, 2, 3, 4], "losses_norm": [4, 3, None, 1]}
    assert json.loads((tmp_path / "scores.json").read_text(), parse_constant=pytest.fail) == summary | {
        "acc_stderr": None,
        "acc_norm_stderr": None,
        "results": [result | {"prediction": 0, "prediction_norm": 3, "label": None}],
    }


@needs_gpt2_vocabulary
def test_items_without_labels_give_only_losses(checkpoint, tmp_path, capsys, monkeypatch):
    _, directory = checkpoint
    labelled, unlabelled = write_items(tmp_path / "a.jsonl"), write_items(tmp_path / "b.jsonl", label=None)
    monkeypatch.setattr(hellaswag, "download", lambda split: {"test": unlabelled, "val": labelled}[split])
    with pytest.raises(UserError, match="no labels, so there are no scores. Give a file for the losses with --json"):
        score(capsys, "-m", directory, "--data", unlabelled)
    monkeypatch.setattr(hellaswag, "NUM_VAL_ITEMS", 3)
    out = score(capsys, "-m", directory, "--json", tmp_path / "with.json")
    assert "OpenAI" in out and "Published scores" not in out  # these are all validation items
    out = score(capsys, "-m", directory, "--split", "test", "--json", tmp_path / "without.json")
    a, b = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("with", "without"))
    assert (b["acc"], b["acc_norm"], b["results"][0]["label"], b["data"]) == (None, None, None, "test")
    assert [r["losses"] for r in a["results"]] == [r["losses"] for r in b["results"]]
    assert (
        out.endswith(f"no labels, so no scores; the losses go to {tmp_path / 'without.json'}\n") and "OpenAI" not in out
    )
    tokenizer, scored = get_tokenizer("gpt2"), ["--hellaswag-every", 1]
    with pytest.raises(UserError, match="no labels, so there is nothing to score"):
        hellaswag.load_examples(config_of(*scored, "--hellaswag-data", unlabelled), tokenizer, print)
    limited = config_of(*scored, "--hellaswag-data", labelled, "--hellaswag-limit", 2, "--block-size", 4)
    notices = []
    assert len(hellaswag.load_examples(limited, tokenizer, notices.append)) == 2
    assert "8 endings with their contexts are longer than 4 tokens" in " ".join(notices[0].split())


@needs_gpt2_vocabulary
def test_weights_and_configurations_of_other_tools_give_the_same_losses(checkpoint, tmp_path, capsys):
    """Without the prefix `transformer.` and with causal masks, as OpenAI's weights are on the hub; in fp16; other fields."""
    from safetensors.torch import load_file, save_file

    change = {"attn_implementation": "eager", "return_dict": False, "n_ctx": 8, "use_cache": True, "attn_pdrop": 0.9}
    _, directory = checkpoint
    weights = {name: tensor.half() for name, tensor in load_file(directory / "model.safetensors").items()}
    older = {name.removeprefix("transformer."): tensor for name, tensor in weights.items()}
    older["h.0.attn.bias"] = torch.ones(1, 1, 64, 64).tril()
    versions = {"a": (older, change), "b": ({name: tensor.float() for name, tensor in weights.items()}, {})}
    items = write_items(tmp_path / "items.jsonl")
    for name, (tensors, fields) in versions.items():
        copy = Path(shutil.copytree(directory, tmp_path / name))
        save_file(tensors, copy / "model.safetensors")
        (copy / "config.json").write_text(json.dumps(json.loads((copy / "config.json").read_text()) | fields))
        score(capsys, "-m", copy, "--data", items, "--json", tmp_path / f"{name}.json")
    a, b = (json.loads((tmp_path / f"{name}.json").read_text())["results"] for name in versions)
    assert a == b


@needs_gpt2_vocabulary
def test_truncated_endings_are_counted_and_reported(checkpoint, tmp_path, capsys):
    _, directory = checkpoint
    items = write_items(tmp_path / "items.jsonl", 2, ctx="a" + " a" * 63)  # 64 tokens
    out = score(capsys, "-m", directory, "--data", items, "--json", tmp_path / "x.json")
    assert "8 endings with their contexts are longer than the model's 64 tokens; the beginning was cut off" in out
    assert "OpenAI" not in out and "there is no comparison" in out
    assert json.loads((tmp_path / "x.json").read_text())["truncated"] == 8


@needs_gpt2_vocabulary
def test_weights_with_nan_give_no_score(checkpoint, tmp_path, capsys):
    model, _ = checkpoint
    with_nan = GPT(model.config)
    with torch.no_grad():
        with_nan.transformer.ln_f.bias[3] = math.nan
    with_nan.save_pretrained(tmp_path / "with_nan")
    items, json_file = write_items(tmp_path / "items.jsonl"), tmp_path / "scores.json"
    with pytest.raises(UserError, match=r"12 of 12 losses of .*with_nan are not finite\. Use another checkpoint"):
        score(capsys, "-m", tmp_path / "with_nan", "--data", items, "--json", json_file)
    with pytest.raises(UserError, match=r"are not finite\. Try --dtype fp32"):
        score(capsys, "-m", tmp_path / "with_nan", "--data", items, "--dtype", "bf16")
    assert not json_file.exists() and "acc" not in capsys.readouterr().out


@pytest.mark.slow
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
    for out, world_size in (("one", 1), ("two", 2)):
        run_to_the_end(*flags, "--hellaswag-limit", 40, "--out", out, cwd=tmp_path, world_size=world_size)
    one, two = (losses(tmp_path / out / "log.txt", "hella") for out in ("one", "two"))
    assert one == two and len(one) == 3
    score(capsys, "-m", tmp_path / "two" / "model_00002", "--data", items, "--limit", 40, "--json", tmp_path / "x")
    assert two[-1] == round(json.loads((tmp_path / "x").read_text())["acc_norm"], 4)


@needs_gpt2_vocabulary
def test_corrupt_weights_are_not_scored(tmp_path, capsys):
    from safetensors.torch import load_file, save_file

    from support.checkpoints.directory import write_checkpoint

    model = GPT(GPTConfig(block_size=64, n_layer=1, n_head=2, n_embd=16))
    write_checkpoint(tmp_path / "model_00001", model.save_pretrained)
    directory = (tmp_path / "model_00001").rename(tmp_path / "copy")
    file, flags = directory / "model.safetensors", ["--data", write_items(tmp_path / "items.jsonl")]
    weights, intact = load_file(file), file.read_bytes()
    file.write_bytes(intact[:-1] + b"?")
    with pytest.raises(UserError, match=r"copy is corrupt: model\.safetensors"):
        score(capsys, "-m", directory, *flags)
    (directory / "checkpoint.json").unlink()  # without checksums, it is found by reading the weights
    save_file(weights | {"lm_head.weight": torch.zeros(50257, 16)}, file, metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"lm_head\.weight differs"):
        score(capsys, "-m", directory, *flags)
    del weights["transformer.h.0.attn.c_attn.weight"]
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"the weights lack transformer\.h\.0\.attn\.c_attn\.weight"):
        score(capsys, "-m", directory, *flags)
    assert "acc" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "flags, message",
    [
        ("-m nowhere/model --data items.jsonl", "no model 'nowhere/model'"),
        (
            "-m tiny --data items.jsonl",
            "tiny was trained on bytes, and HellaSwag's scores are defined on GPT-2 tokens.",
        ),
        ("-m gpt2 --limit 0", "--limit is 0. It must be 1 or more"),
        ("-m gpt2 --split val --data items.jsonl", "--split names a download, and --data a file"),
        ("-m gpt2 --json tiny", "cannot write tiny"),
        ("-m tiny --data items.jsonl --json ./items.jsonl", "items.jsonl exists and has other content"),
        ("-m tiny --split test", "the test split has no labels, so there are no scores"),
        ("-m tiny --data empty.jsonl", "there are no HellaSwag items in empty.jsonl"),
    ],
)
def test_bad_flags_and_files_are_user_errors(tiny_model, tmp_path, monkeypatch, capsys, flags, message):
    monkeypatch.chdir(tmp_path)
    write_items(tmp_path / "items.jsonl")
    (tmp_path / "empty.jsonl").touch()
    tiny_model.save_pretrained(tmp_path / "tiny")
    get_tokenizer("bytes").save_pretrained(tmp_path / "tiny", 16)
    with pytest.raises(SystemExit) as exit:
        run_cli(lambda: hellaswag.main(flags.split()))
    assert exit.value.code == 2 and f"error: {message}" in capsys.readouterr().err
