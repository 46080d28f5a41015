"""The README.md of a checkpoint, read by the hub's own library."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import TINY_FLAGS, steps_done, wait_for
from huggingface_hub import ModelCard
from safetensors.torch import load_file
from training import ONE_PROCESS, assert_same_run, configure, resumed, train, trained

from support.checkpoints import manager
from support.checkpoints.directory import find_corruption
from support.checkpoints.model_card import model_card
from support.checkpoints.run_info import RunInfo
from support.checkpoints.start import Start
from support.cli import parse_flags
from support.config import TrainConfig
from support.runtime.schedule import Schedule
from train_gpt2 import GPT, MODELS, RECIPES, new_model, resolve


def card_of(*flags, source="a.txt", tokens=250 * 2**19, val=None, hellaswag=None):
    """The card of step 250 of a run on GPT-2's tokens, of four bytes each; its text and its metadata.

    It validates 700 tokens and scores 12 items.
    """
    data = SimpleNamespace(tokenizer=SimpleNamespace(name="gpt2", vocab_size=50257))
    layers = Start().layers | {"command line": parse_flags(TrainConfig, flags)}
    layers |= {"--model": MODELS["gpt2"], "--recipe": RECIPES["gpt2"]}
    config = resolve(Start(layers))
    with torch.device("meta"):
        model = new_model(config, 50257)
    run = RunInfo(
        config=config, machine=None, start=Start(layers), schedule=Schedule(config), data=data,
        identity={"source": source}, model=model, flops_per_token=model.flops_per_token(), hellaswag_items=12,
    )  # fmt: skip
    run.__dict__.update(bytes_per_token=4.0, validated_tokens=700)
    text = model_card(run, 250, tokens, val or {}, hellaswag or {})
    return text, ModelCard(text).data.to_dict()


def command_of(card: str) -> list[str]:
    """The words of the command with the flags that determine the weights, without the script's name."""
    [command] = re.findall(r"```sh\npython train_gpt2.py (.*?)\n```", card, re.S)
    return shlex.split(command.replace("\\\n", ""))


@pytest.fixture(scope="module")
def run(byte_shards, tmp_path_factory):
    """A run with two checkpoints, of which the first is written when the log is past it."""
    out, write = tmp_path_factory.mktemp("card") / "log", manager.write_checkpoint

    def write_late(directory, write_files, **facts):
        if directory.name == "model_00004":
            assert wait_for(lambda: steps_done(out) >= 7)
        write(directory, write_files, **facts)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manager, "write_checkpoint", write_late)
        trained(out, "--data", byte_shards, "--max-steps", 8, "--checkpoint-every", 4, "--shuffle", "--max-lr", "2e-3")
    return out


def test_a_checkpoint_has_a_card_that_the_hub_reads(run, byte_shards):
    from transformers import GPT2LMHeadModel

    card = ModelCard.load(run / "model_00004" / "README.md")
    assert card.data.to_dict() == {"library_name": "transformers", "pipeline_tag": "text-generation", "tags": ["gpt2"]}
    parameters = GPT2LMHeadModel.from_pretrained(run / "model_00004").num_parameters()
    assert f"**parameters**: {parameters:,}\n" in card.text
    assert "**tokens seen**: 1,024, in 4 steps of 256\n" in card.text
    assert f"**data**: `{json.loads((byte_shards / 'manifest.json').read_text())['source']}`\n" in card.text
    # validated before the steps 0, 5 and 8
    values = dict(re.findall(r"^(\d+) val (.*)$", (run / "log.txt").read_text(), re.M))
    assert "**validation loss**" not in card.text  # at step 0 the weights are random, and step 5 is later
    last = ModelCard.load(run / "model_00008" / "README.md").text
    validated = r"loss\*\*: (\S+) nats per token, (\S+) per byte, over 512 tokens \(step 8\)"
    loss, per_byte = re.search(validated, last).groups()
    assert loss == values["8"] and float(per_byte) == pytest.approx(float(loss), abs=0.05)  # a token is a byte
    assert "HellaSwag" not in last  # which is for GPT-2's tokens


def test_the_command_of_the_card_repeats_the_run(run, byte_shards, tmp_path):
    others = (
        "--data --out --batch-size --val-every --val-tokens --sample-every --hellaswag-every --device --dtype".split()
    )
    kept = [word for i, word in enumerate(TINY_FLAGS) if word in others or TINY_FLAGS[i - 1] in others]
    flags = command_of((run / "model_00008" / "README.md").read_text())
    config, start = configure([*flags, *kept, "--data", str(byte_shards), "--out", str(tmp_path / "again")])
    train(config, ONE_PROCESS, start)
    assert_same_run(tmp_path / "again", run)


def test_an_edited_or_removed_card_is_no_corruption(run, tmp_path):
    out = shutil.copytree(run, tmp_path / "log")
    shutil.rmtree(out / "model_00008")
    card = out / "model_00004" / "README.md"
    card.write_text(card.read_text().replace("# license: mit", "license: mit"))
    assert ModelCard.load(card).data.license == "mit" and find_corruption(card.parent) is None
    card.unlink()
    assert find_corruption(card.parent) is None and GPT.from_pretrained(card.parent)
    resumed(out)
    assert_same_run(out, run)  # the card of step 8, too


def test_the_card_does_not_depend_on_where_a_run_is(run, byte_shards):
    card = (run / "model_00008" / "README.md").read_text()
    assert str(run.parent) not in card and str(byte_shards) not in card
    flags = ["--keep", "1", "--tensorboard", "--device", "cpu", "--out", "/x/z", "--prompt", "x"]
    assert card_of(*flags) == card_of()
    assert "/x" not in card_of("--init-from", "/x/mine", source="/x/texts [train]")[0]


def test_what_is_known_about_the_data_is_named():
    assert card_of(source="HuggingFaceFW/fineweb-edu/sample-10BT [train]")[1]["datasets"] == [
        "HuggingFaceFW/fineweb-edu"
    ]
    for source in ("book.txt", "someone/stories [train]", None):  # shards of other tools have none
        assert "datasets" not in card_of(source=source)[1]
    assert "**data**: token shards without a description\n" in card_of(source=None)[0]


@pytest.mark.parametrize("name", ["someone/gpt2", "gpt2-xl", "gone", "log/model_00004", "/x/mine", "../mine", "mine"])
def test_a_base_model_is_named_and_linked_if_it_is_on_the_hub(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    text, data = card_of("--init-from", name)
    on_hub = name in ("someone/gpt2", "gpt2-xl")
    assert data.get("base_model") == (name if on_hub else None)
    assert f"fine-tuned from `{name if on_hub else name.split('/')[-1]}`" in text


def test_names_of_files_cannot_break_the_card():
    name = "a`b\n---\nlicense: x\udcff$HOME '.txt"
    text, data = card_of("--init-from", name, source=name)
    printed = "a?b?---?license: x?$HOME '.txt"
    assert "license" not in data and f"**data**: `{printed}`\n" in text and f"from `{printed}` with" in text
    [command] = re.findall(r"```sh\n(python train_gpt2.py .*?)\n```", text, re.S)
    assert shlex.split(command.replace("\\\n", "")) == ["python", "train_gpt2.py", "--init-from", printed]
    assert text.encode()


def test_the_command_has_the_data():
    """Without their folders; the shards that --text and --demo make need no name."""
    commands = {
        ("--data", "/x/y"): "--data y",
        ("--text", "/x/book.txt", "--tokenizer", "bytes"): "--text book.txt --tokenizer bytes",
        ("--demo",): "--demo",
        ("--fork", "/x/log/model_00006"): "--fork model_00006",
    }
    for flags, expected in commands.items():
        command = command_of(card_of(*flags)[0])
        assert shlex.join(command).startswith(expected)


def test_tokens_are_counted():
    assert "**tokens seen**: 131,072,000, in 250 steps of 524,288\n" in card_of()[0]
    assert (
        "**tokens seen**: 61,440, in 250 steps\n" in card_of("--fork", "x", tokens=61440)[0]
    )  # whose steps may have had another size


def test_scores_are_the_newest():
    values = dict(val={0: 9.0, 250: 3.2}, hellaswag={0: 0.25, 200: 0.31})
    text, _ = card_of(**values)
    assert "**validation loss**: 3.2000 nats per token, 0.8000 per byte, over 700 tokens (step 250)\n" in text
    assert "**HellaSwag**: acc_norm 0.3100 on 12 items (step 200)\n" in text
    assert "on 12 items, in contexts of 64 tokens (step" in card_of("--block-size", "64", **values)[0]
    assert "validation" not in card_of(val={0: 9.0})[0] and "best" not in text
    text, _ = card_of(val={100: 3.0, 250: 3.2})
    assert "(step 250)\n- **best validation loss of this run**: 3.0000 nats per token (step 100)\n" in text
    assert "```sh\npython train_gpt2.py\n```" in text  # with the default flags
    assert "```sh\npython train_gpt2.py \\\n  --no-bias \\\n  --shuffle\n```" in card_of("--no-bias", "--shuffle")[0]


OPTIONS = "--val-every 0 --sample-every 0 --hellaswag-every 0 --device cpu --batch-size 4".split()
SIZES = "--n-layer 1 --n-head 2 --n-embd 16 --block-size 16 --total-batch-size 128".split()


def weights_of(out, *flags):
    """The weights after six steps of a run with these flags, and the command on its card."""
    config, start = configure([*map(str, flags), *OPTIONS, "--max-steps", "6", "--out", str(out)])
    train(config, ONE_PROCESS, start)
    return load_file(out / "model_00006" / "model.safetensors"), command_of(
        (out / "model_00006" / "README.md").read_text()
    )


@pytest.mark.parametrize("kind", ["recipe", "text", "fork", "fork of a text", "init-from"])
def test_the_command_repeats_the_weights_where_others_choose_defaults(kind, byte_shards, tmp_path, monkeypatch):
    """A flag may have its usual default where a recipe, a text or the parent of a fork would set something else."""
    monkeypatch.chdir(tmp_path)
    Path("book.txt").write_text("".join(f"{n} times {n} is {n * n}.\n" for n in range(900)))
    data = ["--data", byte_shards]
    if kind == "recipe":
        flags = [*data, *SIZES, "--recipe", "fast", "--optimizer", "adamw", "--warmup-steps", 2]
    elif kind == "text":
        flags = ["--text", "book.txt", *SIZES, "--recipe", "gpt2", "--warmup-steps", 2]
    elif kind == "init-from":
        trained(Path("parent"), *data, *SIZES, "--max-steps", 3)
        flags = [*data, "--init-from", "parent/model_00003", "--total-batch-size", 128]
    else:
        of_text = ["--text", "book.txt"] if "text" in kind else data
        before = ["--dropout", 0.2, "--seed", 5, "--shuffle", "--checkpoint-every", 3]
        weights_of(tmp_path / "parent", *of_text, *SIZES, *before)
        flags = ["--fork", "parent/model_00003", "--dropout", 0, "--seed", 1337, "--no-shuffle", "--max-lr", 1e-3]
    expected, command = weights_of(tmp_path / "first", *flags, "--dtype", "fp32")  # without it, bf16 on many machines
    full = {"model_00003": "parent/model_00003", byte_shards.name: str(byte_shards)}
    command = [full.get(word, word) for word in command]
    weights, _ = weights_of(tmp_path / "again", *command)
    assert weights.keys() == expected.keys() and all(torch.equal(weights[name], expected[name]) for name in weights)
