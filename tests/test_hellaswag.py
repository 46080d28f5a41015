"""HellaSwag's scores against the plain definition, with a model whose losses are known."""

import json
import math

import pytest
import torch
from conftest import ONE_PROCESS, needs_gpt2_vocabulary
from torch.nn import functional as F

import hellaswag
from hellaswag import Example
from support.cli import UserError, run
from train_gpt2 import GPT, hellaswag_score

CPU = torch.device("cpu")


def made_up_examples(n=40, seed=0):
    """Endings of one token up to more than the context, and contexts longer than the model's 16 tokens."""
    rng = torch.Generator().manual_seed(seed)

    def ids(low, high):
        return torch.randint(0, 257, (int(torch.randint(low, high, (1,), generator=rng)),), generator=rng).tolist()

    return [Example(ids(1, 30), [ids(1, 25 if i % 5 == 0 else 6) for _ in range(4)], i % 4) for i in range(n)]


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


@torch.no_grad()
def test_losses_and_scores_equal_the_plain_loop(tiny_model):
    for parameter in tiny_model.parameters():
        parameter.mul_(4)  # far from uniform, so that endings differ
    examples = made_up_examples()
    correct = correct_norm = 0
    for example in examples:
        sums, means = hellaswag.completion_losses(lambda idx: tiny_model(idx)[0], example, CPU, 16)
        expected_sums, expected_means = plain_losses(tiny_model, example)
        torch.testing.assert_close(sums, torch.tensor(expected_sums), atol=1e-4, rtol=1e-5)
        torch.testing.assert_close(means, torch.tensor(expected_means), atol=1e-4, rtol=1e-5)
        correct += expected_sums.index(min(expected_sums)) == example.label
        correct_norm += expected_means.index(min(expected_means)) == example.label
    assert hellaswag.score(lambda idx: tiny_model(idx)[0], examples, CPU, 16) == (40, correct, correct_norm)
    assert correct != correct_norm


def test_scores_by_hand():
    """A model to which token k costs k+1 nats more than token 0, wherever it stands: sums and means are arithmetic."""
    logits = -torch.arange(10.0)
    z = math.log(logits.exp().sum())

    def logits_of(idx):
        return logits.expand(*idx.shape, 10)

    #                       sums less z per token: 6, 4, 5, 8      means less z: 2, 4, 2.5, 8
    example = Example([1, 2], [[2, 2, 2], [4], [2, 3], [8]], 1)
    sums, means = hellaswag.completion_losses(logits_of, example, CPU, 64)
    torch.testing.assert_close(sums, torch.tensor([6 + 3 * z, 4 + z, 5 + 2 * z, 8 + z]))
    torch.testing.assert_close(means, torch.tensor([2 + z, 4 + z, 2.5 + z, 8 + z]))
    assert hellaswag.score(logits_of, [example], CPU, 64) == (1, 1, 0)


def test_the_trainers_score_is_the_same(tiny_model):
    examples = made_up_examples(21)
    n, _, correct_norm = hellaswag.score(lambda idx: tiny_model(idx)[0], examples, CPU, 16)
    amp = torch.autocast("cpu", enabled=False)
    assert hellaswag_score(tiny_model, examples, ONE_PROCESS, amp) == correct_norm / n
    # dealt to three ranks, every example is scored once
    dealt = [hellaswag.score(lambda idx: tiny_model(idx)[0], examples[r::3], CPU, 16) for r in range(3)]
    assert [sum(column) for column in zip(*dealt, strict=True)][::2] == [21, correct_norm]


def write_items(path, n=3, **change):
    item = {
        "ctx": "A man sits on a roof. he",
        "endings": ["falls.", "rips up tiles.", "sings a song.", "sleeps."],
        "label": 1,
    }
    path.write_text("".join(json.dumps(item | change) + "\n" for _ in range(n)))
    return path


@pytest.mark.parametrize(
    "line, message",
    [
        ("{", "line 4 is not JSON"),
        ("[]", "line 4 is not a HellaSwag item"),
        ('{"ctx": "a", "label": 0}', "line 4 is not a HellaSwag item: it lacks 'endings'"),
        ('{"ctx": "a", "endings": ["b"], "label": 0}', "line 4 is not a HellaSwag item: it needs a text, 4 endings"),
        ('{"ctx": "a", "endings": ["b", "c", "d", "e"], "label": 4}', "a label from 0 to 3"),
        ('{"ctx": 1, "endings": ["b", "c", "d", "e"], "label": 1}', "it needs a text"),
    ],
)
def test_a_line_that_is_no_item_is_named(tmp_path, line, message):
    path = write_items(tmp_path / "items.jsonl")
    with open(path, "a") as file:
        file.write(line + "\n")
    with pytest.raises(UserError, match=message):
        hellaswag.load(path)
    assert len(hellaswag.load(path, limit=3)) == 3


@needs_gpt2_vocabulary
def test_the_command_line_scores_a_checkpoint(tmp_path, monkeypatch, capsys):
    from train_gpt2 import GPTConfig

    torch.manual_seed(0)
    model = GPT(GPTConfig(block_size=64, n_layer=1, n_head=2, n_embd=16))
    with torch.no_grad():
        model.lm_head.weight.mul_(20)
    model.save_pretrained(tmp_path / "model")
    items = write_items(tmp_path / "items.jsonl", 1)
    with open(items, "a") as file:
        file.write(write_items(tmp_path / "more.jsonl", 2, label=3).read_text())
    hellaswag.main(["-m", str(tmp_path / "model"), "--data", str(items), "-d", "cpu"])
    printed = capsys.readouterr().out.splitlines()[-1]

    import tiktoken

    encoding = tiktoken.get_encoding("gpt2")
    context = encoding.encode("A man sits on a roof. he")
    means = []
    for ending in (" falls.", " rips up tiles.", " sings a song.", " sleeps."):
        row = torch.tensor([context + encoding.encode(ending)])
        per_token = F.cross_entropy(model(row[:, :-1])[0][0], row[0, 1:], reduction="none")
        means.append(per_token[len(context) - 1 :].mean().item())
    right = [means.index(min(means)) == label for label in (1, 3, 3)]
    assert printed.startswith("    3/3 acc ") and printed.endswith(f"acc_norm {sum(right) / 3:.4f}")


@needs_gpt2_vocabulary
@pytest.mark.parametrize("harm", ["a tensor is missing", "flipped", "cut short", "no weights"])
def test_damaged_weights_are_not_scored(tmp_path, capsys, harm):
    from safetensors.torch import load_file, save_file

    from support import checkpoint
    from train_gpt2 import GPTConfig

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
        with pytest.raises(UserError, match="copy|the weights lack"):
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
        ("-m tiny --data empty.jsonl", "there are no HellaSwag items in empty.jsonl"),
    ],
)
def test_bad_input(tiny_model, tmp_path, monkeypatch, capsys, flags, message):
    monkeypatch.chdir(tmp_path)
    write_items(tmp_path / "items.jsonl")
    (tmp_path / "empty.jsonl").touch()
    tiny_model.save_pretrained(tmp_path / "tiny")
    with pytest.raises(SystemExit) as exit:
        run(lambda: hellaswag.main(flags.split()))
    assert exit.value.code == 2 and f"error: {message}" in capsys.readouterr().err
