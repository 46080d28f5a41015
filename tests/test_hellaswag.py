"""HellaSwag scores: against a plain loop over tokens, by hand, and through the command line."""

import dataclasses
import errno
import json
import math
import os
import re
import shutil
import signal
import statistics
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import needs_gpt2_vocabulary
from torch.nn import functional as F
from training import ONE_PROCESS, config_of, trained, trainer_file

import hellaswag
from hellaswag import Example
from support.checkpoints.directory import write_checkpoint
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
    """The loss of token k is k + z nats in any context."""
    logits = -torch.arange(10.0)
    z = math.log(logits.exp().sum())
    model = hellaswag.ScoringModel(lambda idx: idx[..., None], lambda hidden: logits.expand(len(hidden), 10), 64, CPU)
    # per character: an ending of no characters is no division by zero, and is never predicted
    example = Example([1, 2], [[2, 2, 2], [4], [2, 3], [8]], 3, [12, 2, 0, 100])
    sums, per_character = hellaswag.completion_losses(model, [example])
    np.testing.assert_allclose(sums, [[6 + 3 * z, 4 + z, 5 + 2 * z, 8 + z]], rtol=1e-6)
    np.testing.assert_allclose(per_character, [[(6 + 3 * z) / 12, (4 + z) / 2, np.inf, (8 + z) / 100]], rtol=1e-6)
    assert (hellaswag.count_correct(sums, [example]), hellaswag.count_correct(per_character, [example])) == (0, 1)
    # an example with a NaN is not correct, whatever its label
    with_nan = np.array([[math.nan] * 4, [3, 1, math.nan, 2], [3, 1, 4, 2]])
    assert hellaswag.count_correct(with_nan, [Example([1], [[1]] * 4, label) for label in (0, 1, 1)]) == 1


@pytest.mark.slow
def test_a_batch_that_does_not_fit_is_halved(models):
    model, examples, sizes = models["hugging face"], random_examples(), []

    def with_memory_for(max_tokens, message="CUDA out of memory. Tried"):
        def hidden(ids, *position_ids_and_mask):
            sizes.append(ids.numel())
            if ids.numel() > max_tokens:
                raise RuntimeError(message)
            return model.hidden(ids, *position_ids_and_mask)

        return dataclasses.replace(model, hidden=hidden)

    halved = hellaswag.completion_losses(with_memory_for(100), examples, 800)
    np.testing.assert_allclose(halved, hellaswag.completion_losses(model, examples), atol=1e-4)
    assert sum(size > 100 for size in sizes) == 3  # 800, 400, 200 tokens: later batches are small at once
    with pytest.raises(UserError, match="a row of 16 tokens does not fit into the memory of cpu"):
        hellaswag.completion_losses(with_memory_for(15), examples)
    with pytest.raises(RuntimeError, match="something else"):
        hellaswag.completion_losses(with_memory_for(100, "something else"), examples)


def score_of(model, examples, stop=None, amp=FP32):
    """Scores examples as a training run does."""
    scoring_model = hellaswag.ScoringModel(model.transformer, model.logits, model.config.block_size, ONE_PROCESS.device)
    return hellaswag.score_with_ranks(scoring_model, examples, ONE_PROCESS, stop or StopHandler(), amp)


@pytest.mark.parametrize("world_size", [2, 3, 50])
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


@pytest.mark.parametrize("enabled", [True, False])
def test_scoring_in_training_is_in_its_precision_and_stops_after_a_signal(sharp_model, monkeypatch, enabled):
    forward, batches = sharp_model.transformer.forward, []

    def interrupted_forward(ids):
        batches.append((len(ids), torch.is_autocast_enabled("cpu")))
        signal.raise_signal(signal.SIGTERM)
        return forward(ids)

    monkeypatch.setattr(sharp_model.transformer, "forward", interrupted_forward)
    with StopHandler() as stop:
        amp = torch.autocast("cpu", torch.bfloat16, enabled=enabled)
        assert score_of(sharp_model, random_examples(400), stop, amp) is None
    assert batches == [(48, enabled)]  # rows of 16 tokens in the first batch; there are some 1,600 rows


def test_an_error_in_training_ends_the_run_only_after_a_checkpoint(byte_shards, tmp_path, monkeypatch):
    """A row that does not fit, in the second score: the six steps since the first are not lost."""
    scores = []

    def losses_or_error(model, batch):
        if scores:
            raise torch.OutOfMemoryError("CUDA out of memory")
        scores.append(batch)
        return torch.zeros(sum(len(completion) for row in batch for completion in row.completions))

    monkeypatch.setattr(hellaswag, "_batch_losses", losses_or_error)
    monkeypatch.setattr(hellaswag, "load_examples", lambda *args: random_examples(2))
    with pytest.raises(UserError, match="does not fit into the memory of cpu"):
        trained(tmp_path, "--data", byte_shards, "--max-steps", 12, "--hellaswag-every", 6)
    assert trainer_file(tmp_path / "model_00006")["step"] == 6


# ---- items


def item(**change):
    return {
        "activity_label": "Roofing",
        "ctx_a": "A man sits on a roof.",
        "ctx_b": "he",
        "ctx": "A man sits on a [step] roof. he",
        "endings": ["falls.", "rips up tiles.", "sings a song.", "is ripping level tiles off it"],
        "label": 1,
    } | change


def write_items(path, *labels, **change):
    """An item for each label, or three."""
    path.write_text("".join(json.dumps(item(label=label, **change)) + "\n" for label in labels or (1, 1, 1)))
    return path


BAD_LINES = {
    "{": "line 4 is not JSON",
    "[]": "line 4 is not a HellaSwag item",
    '{"ctx": "a", "endings": ["b"], "label": 0}': "line 4 is not a HellaSwag item: it needs texts, 4 endings",
    '{"ctx": "a", "endings": ["b", "c", "d", "e"], "label": 4}': "a label from 0 to 3",
    '{"ctx": "a", "endings": ["b", "c", "d", "e"]}': "either line 4 or the lines before it have no label",
    '{"endings": ["b", "c", "d", "e"], "label": 1}': "line 4 is not a HellaSwag item: 'ctx' is missing",
}


@pytest.mark.parametrize("line", BAD_LINES)
def test_a_bad_line_is_reported_with_its_number(tmp_path, line):
    path = write_items(tmp_path / "items.jsonl")
    path.write_text(f"{path.read_text()}{line}\n")
    with pytest.raises(UserError, match=BAD_LINES[line]):
        hellaswag.load(path)
    assert len(hellaswag.load(path, limit=3)) == 3


@pytest.mark.parametrize("label, expected", [(2, 2), ("2", 2), ("", None), (None, None)])
def test_labels_are_numbers_or_digits_or_missing(tmp_path, label, expected):
    assert hellaswag.load(write_items(tmp_path / "items.jsonl", label))[0].label == expected


HOUSE = "How to paint a wall [title] Buy  paint. [step] Go to   the shop. [step]"
MARKED_UP = ["[substeps] Take the bus. [title] Pay.", " walk ", "[a] [b]", "it's 3  km"]
# Changes of an item; by hand, the context and what follows it for each ending, and how many of its spaces do not belong
# to the ending: one separates them, and a second one is the context's last.
HARNESS_CASES = [
    (
        dict(activity_label="Home and Garden", ctx_a=HOUSE, ctx_b="", endings=MARKED_UP),
        "Home and Garden: How to paint a wall. Buy paint. Go to  the shop.",
        ["   Take the bus.. Pay.", "  walk", "   ", "  it's 3 km"],
        2,
    ),
    (
        dict(activity_label="x", ctx_a="Do this. [step]", ctx_b="WE all DO", endings=["go.", "é!", "1", ""]),
        "x: Do this. We all do",
        [" go.", " é!", " 1", " "],
        1,
    ),
]


@needs_gpt2_vocabulary
@pytest.mark.parametrize("change, context, continuations, spaces", HARNESS_CASES)
def test_the_harness_style_by_hand(tmp_path, change, context, continuations, spaces):
    [loaded] = hellaswag.load(write_items(tmp_path / "items.jsonl", 1, **change), style="harness")
    example, encode = hellaswag.render(loaded, get_tokenizer("gpt2"), "harness"), get_tokenizer("gpt2").encode
    assert example.context == encode(context) and example.label == 1
    assert [example.context + c for c in example.completions] == [encode(context + c) for c in continuations]
    assert example.char_lengths == [len(c) - spaces for c in continuations]


def test_a_split_is_downloaded_with_its_checksum(monkeypatch):
    monkeypatch.setattr(hellaswag, "download_file", lambda url, path, git_blob: (url, path.name, git_blob))
    urls, names, blobs = zip(*map(hellaswag.download, ("val", "train", "test")), strict=True)
    assert [url.rpartition("/rowanz/hellaswag/master/data/")[2] for url in urls] == list(names)
    assert len(set(urls)) == len(set(blobs)) == 3


# ---- command line


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A model of GPT-2's vocabulary, and its folder."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(block_size=64, n_layer=1, n_head=2, n_embd=16))
    with torch.no_grad():  # large weights: predictions are far from uniform
        for name, parameter in model.named_parameters():
            parameter.mul_(20 if name == "transformer.wte.weight" else 8)
    directory = tmp_path_factory.mktemp("checkpoint")
    model.save_pretrained(directory)
    get_tokenizer("gpt2").save_pretrained(directory, 64)
    return model, directory


def score(capsys, *flags):
    hellaswag.main([*map(str, flags), "-d", "cpu"])
    return capsys.readouterr().out


@needs_gpt2_vocabulary
@pytest.mark.parametrize("style", ["tokens", "harness"])
def test_the_command_line_scores_a_checkpoint(checkpoint, tmp_path, capsys, style):
    """Against PyTorch's cross-entropy of whole rows; only the style of the harness cleans the texts."""
    model, directory = checkpoint
    items, encode = write_items(tmp_path / "items.jsonl", 1, 3, 3), get_tokenizer("gpt2").encode
    out = score(capsys, "-m", directory, "--data", items, "--style", style, "--json", tmp_path / "scores.json")

    context = encode("A man sits on a [step] roof. he" if style == "tokens" else "Roofing: A man sits on a roof. He")
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
    assert "Published scores are for all 10,042 validation items." in out and results["dtype"] == "float32"


@needs_gpt2_vocabulary
def test_items_without_labels_give_only_losses(checkpoint, tmp_path, capsys, monkeypatch):
    """Their scores, and the loss per character of an ending without any, are null: JSON has no NaN and no infinity."""
    flags, endings = ["-m", checkpoint[1], "--style", "harness", "--json"], [*item()["endings"][:3], ""]
    labelled = write_items(tmp_path / "a.jsonl", endings=endings)
    unlabelled = write_items(tmp_path / "b.jsonl", None, None, None, endings=endings)
    monkeypatch.setattr(hellaswag, "download", lambda split: {"test": unlabelled, "val": labelled}[split])
    monkeypatch.setattr(hellaswag, "NUM_HELLASWAG_ITEMS", 3)
    with pytest.raises(UserError, match="no labels, so there are no scores. Write the losses to a file with --json"):
        score(capsys, *flags[:-1], "--data", unlabelled)
    out = score(capsys, *flags, tmp_path / "with.json")
    assert "OpenAI" in out and "Published scores" not in out  # these are all validation items
    out = score(capsys, *flags, tmp_path / "without.json", "--split", "test")
    assert "no labels, so no scores" in out and "OpenAI" not in out
    files = (tmp_path / f"{name}.json" for name in ("with", "without"))
    a, b = (json.loads(file.read_text(), parse_constant=pytest.fail) for file in files)
    assert (b["acc"], b["acc_norm"], b["results"][0]["label"], b["data"]) == (None, None, None, "test")
    assert [r["losses"] for r in a["results"]] == [r["losses"] for r in b["results"]]
    assert [loss is None for loss in a["results"][0]["losses_norm"]] == [False, False, False, True]


@pytest.fixture
def six_items(checkpoint, tmp_path, capsys, monkeypatch):
    """Flags that score items of falling length, one at a time; and what a full run finds for each of them."""
    labels = (1, 3, 0, 2, 3, 1)
    lines = [json.dumps(item(ctx="a roof, " * (7 - i), label=label)) for i, label in enumerate(labels)]
    (tmp_path / "items.jsonl").write_text("\n".join(lines))
    monkeypatch.setitem(hellaswag.TOKENS_PER_BATCH, "cpu", 1)
    flags = ["-m", checkpoint[1], "--data", tmp_path / "items.jsonl"]
    score(capsys, *flags, "--json", tmp_path / "all.json")
    return flags, json.loads((tmp_path / "all.json").read_text())["results"]


def scores_by_hand(results):
    """acc and acc_norm of some items of a --json file."""
    return [statistics.mean(r[key] == r["label"] for r in results) for key in ("prediction", "prediction_norm")]


@needs_gpt2_vocabulary
def test_a_stop_reports_the_scores_so_far(six_items, tmp_path, capsys, monkeypatch):
    (flags, results), batch_losses, batches = six_items, hellaswag._batch_losses, []

    def interrupted(model, batch):
        batches.append(batch)
        if len(batches) == 4:
            signal.raise_signal(signal.SIGTERM)
        return batch_losses(model, batch)

    monkeypatch.setattr(hellaswag, "_batch_losses", interrupted)
    with pytest.raises(SystemExit) as exit:
        score(capsys, *flags, "--json", tmp_path / "stopped.json")
    out, (acc, acc_norm) = capsys.readouterr().out, scores_by_hand(results[:4])
    assert exit.value.code == 128 + signal.SIGTERM and not (tmp_path / "stopped.json").exists()
    assert re.search(rf"\n{flags[1]} +{acc:.4f} ± 0\.\d+ +{acc_norm:.4f} ± 0\.\d+\n", out)
    unwritten = f"{tmp_path / 'stopped.json'} is not written"
    assert out.endswith(f"\nstopped after 4 of 6 items, which begin with the longest; {unwritten}\n")


@needs_gpt2_vocabulary
def test_without_a_terminal_a_line_now_and_then_has_the_scores_so_far(six_items, capsys, monkeypatch):
    flags, results = six_items
    assert " of 6 items |" not in score(capsys, *flags)  # which takes less than a minute
    monkeypatch.setattr("support.console.progress.PROGRESS_SECONDS", 0)
    lines = [
        line.split(" | ", 2)[2].rpartition(" | ")[0]
        for line in score(capsys, *flags).splitlines()
        if " of 6 items" in line
    ]
    scores = [scores_by_hand(results[:n]) for n in range(1, 6)]
    expected = [f"{n} of 6 items | acc {a:.4f} | acc_norm {b:.4f}" for n, (a, b) in enumerate(scores, start=1)]
    assert lines == ["0 of 6 items", *expected]


@pytest.mark.slow
@needs_gpt2_vocabulary
def test_the_json_file_is_written_whole_or_not_at_all_and_over_nothing_else(six_items, tmp_path, capsys, monkeypatch):
    (flags, results), notes, path = six_items, tmp_path / "notes.txt", tmp_path / "scores.json"
    for text in ("my notes", '{"model": "mine"}', '["a", "b"]\n'):
        notes.write_text(text)
        with pytest.raises(
            UserError, match=r"notes\.txt exists, and is not a result of hellaswag\.py\. Use another file"
        ):
            score(capsys, *flags, "--json", notes)
        assert notes.read_text() == text
    path.touch()  # as mktemp makes it
    (tmp_path / "link.json").symlink_to(path)
    score(capsys, *flags, "--json", tmp_path / "link.json")
    assert (tmp_path / "link.json").is_symlink() and json.loads(path.read_text())["results"] == results
    write_text = Path.write_text

    def fill_the_disk(self, text, **options):
        write_text(self, text[: len(text) // 2], **options)
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left"):
        patch.setattr(Path, "write_text", fill_the_disk)
        score(capsys, *flags, "--json", path, "--limit", 2)
    assert json.loads(path.read_text())["results"] == results and "acc_norm" in capsys.readouterr().out
    assert not list(tmp_path.glob(".*"))
    score(capsys, *flags, "--json", path, "--limit", 2)
    assert json.loads(path.read_text())["results"] == results[:2]
    (tmp_path / "gone").mkdir()
    check_finite = hellaswag.check_finite

    def remove_the_folder(*args):
        (tmp_path / "gone").rmdir()
        check_finite(*args)

    with monkeypatch.context() as patch:
        patch.setattr(hellaswag, "check_finite", remove_the_folder)  # which is called when all are scored
        score(capsys, *flags, "--json", tmp_path / "gone" / "scores.json")
    assert json.loads((tmp_path / "gone" / "scores.json").read_text())["results"] == results
    os.mkfifo(tmp_path / "pipe")
    with ThreadPoolExecutor(1) as reader:
        piped = reader.submit((tmp_path / "pipe").read_text)
        score(capsys, *flags, "--json", tmp_path / "pipe")
        assert json.loads(piped.result(timeout=60))["results"] == results


@needs_gpt2_vocabulary
def test_training_scores_items_with_labels_and_notes_which_are_cut(tmp_path):
    labelled, unlabelled = write_items(tmp_path / "a.jsonl"), write_items(tmp_path / "b.jsonl", None)
    tokenizer, flags, notices = get_tokenizer("gpt2"), ["--hellaswag-every", 1, "--hellaswag-data"], []
    with pytest.raises(UserError, match="no labels, so there is nothing to score"):
        hellaswag.load_examples(config_of(*flags, unlabelled), 1, tokenizer, 16, print)
    limited = config_of(*flags, labelled, "--hellaswag-limit", 2)
    assert len(hellaswag.load_examples(limited, 1, tokenizer, 4, notices.append)) == 2
    assert "8 endings with their contexts are longer than 4 tokens" in " ".join(notices[0].split())


@needs_gpt2_vocabulary
def test_truncated_endings_are_counted_and_reported(checkpoint, tmp_path, capsys):
    items = write_items(tmp_path / "items.jsonl", 1, 1, ctx="a" + " a" * 63)  # 64 tokens
    out = score(capsys, "-m", checkpoint[1], "--data", items, "--json", tmp_path / "x.json")
    assert "8 endings with their contexts are longer than the model's 64 tokens: the beginning of the" in out
    assert "OpenAI" not in out and json.loads((tmp_path / "x.json").read_text())["truncated"] == 8


@needs_gpt2_vocabulary
def test_weights_that_are_corrupt_or_nan_give_no_score(checkpoint, tmp_path, capsys):
    model = GPT(checkpoint[0].config)
    with torch.no_grad():
        model.transformer.ln_f.bias[3] = math.nan
    write_checkpoint(tmp_path / "model_00001", model.save_pretrained)
    shutil.copy(checkpoint[1] / "tokenizer.json", tmp_path / "model_00001")
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(UserError, match="there are no HellaSwag items in"):
        score(capsys, "-m", checkpoint[1], "--data", tmp_path / "empty.jsonl")
    json_file = tmp_path / "scores.json"
    flags = ["-m", tmp_path / "model_00001", "--data", write_items(tmp_path / "items.jsonl"), "--json", json_file]
    with pytest.raises(UserError, match=r"12 of 12 losses of .*model_00001 are not finite\. Use another checkpoint"):
        score(capsys, *flags)
    with pytest.raises(UserError, match=r"are not finite\. Try --dtype fp32"):
        score(capsys, *flags, "--dtype", "bf16")
    with open(tmp_path / "model_00001" / "model.safetensors", "ab") as file:
        file.write(b"?")
    with pytest.raises(UserError, match=r"model_00001 is corrupt: model\.safetensors"):
        score(capsys, *flags)
    assert not json_file.exists() and "acc" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "flags, message",
    [
        ("-m nowhere/model --data items.jsonl", "no model 'nowhere/model'"),
        (
            "-m tiny --data items.jsonl",
            "tiny was trained on bytes tokens, but HellaSwag's scores are defined on GPT-2 tokens",
        ),
        ("-m gpt2 --limit 0", "--limit is 0. It must be 1 or more"),
        ("-m gpt2 --split val --data items.jsonl", "--split names a download, and --data a file"),
        ("-m gpt2 --json tiny", "cannot write tiny"),
        ("-m tiny --data items.jsonl --json ./items.jsonl", "--json and --data name the same file"),
        ("-m tiny --split test", "the test split has no labels, so there are no scores"),
        ("-m tiny", "tiny was trained on bytes tokens"),  # before the items are downloaded
        ("-m sized --data items.jsonl", "sized has no tokenizer.json for its 50,257 tokens"),
    ],
)
def test_bad_flags_and_files_are_user_errors(tiny_model, tmp_path, monkeypatch, capsys, flags, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hellaswag, "download", lambda split: pytest.fail("downloads"))
    write_items(tmp_path / "items.jsonl")
    tiny_model.save_pretrained(tmp_path / "tiny")
    get_tokenizer("bytes").save_pretrained(tmp_path / "tiny", 16)
    GPT(GPTConfig(block_size=8, n_layer=1, n_head=1, n_embd=4)).save_pretrained(tmp_path / "sized")
    with pytest.raises(SystemExit) as exit:
        run_cli(lambda: hellaswag.main(flags.split()))
    assert exit.value.code == 2 and f"error: {message}" in capsys.readouterr().err
