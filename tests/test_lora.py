"""LoRA: trained alone, saved as peft saves it, opened by peft and here, and merged."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import ROOT, TINY_TRAINING_FLAGS, losses
from safetensors.torch import load_file, save_file
from training import ONE_PROCESS, configure, resumed, trained

from support.checkpoints import huggingface
from support.cli import UserError
from train_gpt2 import GPT, TrainConfig, train

TOKENS = torch.randint(257, (3, 16), generator=torch.Generator().manual_seed(5))


@pytest.fixture(scope="module")
def base(byte_shards, tmp_path_factory) -> Path:
    """A checkpoint of a few steps."""
    out = tmp_path_factory.mktemp("base")
    trained(out, "--data", byte_shards, "--max-steps", 20)
    return out / "model_00020"


@pytest.fixture(scope="module")
def tuned(base, byte_shards, tmp_path_factory) -> SimpleNamespace:
    """A run with LoRA: its last checkpoint, its state, and the logits of the trained model."""
    out = tmp_path_factory.mktemp("tuned")
    state = train(config_with_lora(byte_shards, base, out, "--max-lr", 0.01), ONE_PROCESS)
    with torch.no_grad():
        return SimpleNamespace(adapter=out / "model_00012", state=state, logits=state.model.eval()(TOKENS)[0])


def config_with_lora(data: Path, base: Path, out: Path, *more: object) -> TrainConfig:
    flags = ["--data", data, "--out", out, "--init-from", base, "--lora-rank", 4, "--lora-alpha", 8, "--max-steps", 12]
    return configure([*TINY_TRAINING_FLAGS, *map(str, [*flags, "--checkpoint-every", 5, *more])])[0]


def assert_same_logits(model, logits):
    with torch.no_grad():
        result = model.eval()(TOKENS)
    torch.testing.assert_close(result[0] if isinstance(result, tuple) else result.logits, logits, rtol=1e-4, atol=1e-4)


def with_peft(base, adapter):
    """The adapter on Hugging Face's model of its base, as peft opens it."""
    from peft import PeftModel
    from transformers import GPT2LMHeadModel

    return PeftModel.from_pretrained(GPT2LMHeadModel.from_pretrained(base), adapter)


# -----------------------------------------------------------------------------
# The files


@pytest.mark.slow
def test_the_adapter_is_small_and_names_its_base_model(tuned, base):
    names = {path.name for path in tuned.adapter.iterdir()}
    assert len({path.stat().st_mode for path in tuned.adapter.iterdir()}) == 1  # who may read one may read all
    assert {"adapter_config.json", "adapter_model.safetensors", "trainer.pt", "checkpoint.json"} < names
    assert "model.safetensors" not in names and "config.json" not in names
    config = json.loads((tuned.adapter / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(base) and (config["r"], config["lora_alpha"]) == (4, 8)
    matrices = load_file(tuned.adapter / "adapter_model.safetensors")
    assert all(tensor.any() for tensor in matrices.values())
    # two blocks; c_attn 32 -> 96, c_proj 32 -> 32, the MLP's 128 -> 32: in + out, times the rank
    assert sum(tensor.numel() for tensor in matrices.values()) == 2 * 4 * ((32 + 96) + (32 + 32) + (128 + 32))


def test_the_adapter_opens_with_peft_and_here(tuned, base):
    """And with the lines of its model card."""
    from transformers import GPT2LMHeadModel, pipeline

    assert_same_logits(with_peft(base, tuned.adapter), tuned.logits)
    assert_same_logits(GPT2LMHeadModel.from_pretrained(tuned.adapter), tuned.logits)
    generator = pipeline("text-generation", model=str(tuned.adapter))
    assert_same_logits(generator.model, tuned.logits)
    assert generator("The", max_new_tokens=9)[0]["generated_text"].startswith("The")
    assert_same_logits(GPT.from_pretrained(tuned.adapter), tuned.logits)
    assert_same_logits(huggingface.load_hf_model(huggingface.find_model(tuned.adapter)), tuned.logits)
    before = GPT.from_pretrained(base)(TOKENS)[0]
    assert (before - tuned.logits).abs().max() > 0.005  # something was learnt


@pytest.mark.slow
def test_the_lines_in_the_docs_merge_an_adapter(tuned, base, tmp_path):
    """The result is a plain checkpoint with the logits of peft's merge_and_unload, and with its tokenizer."""
    from transformers import AutoTokenizer, GPT2LMHeadModel

    page = (ROOT / "docs" / "training.md").read_text()
    lines = re.findall(r"^(?:python -c .*save_pretrained|cp .*tokenizer).*$", page, re.M)
    assert len(lines) == 2 and all("mine/model_00732" in line for line in lines)
    shutil.copytree(tuned.adapter, tmp_path / "mine" / "model_00732")
    python = Path(sys.executable).parent
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PATH": f"{python}{os.pathsep}{os.environ['PATH']}"}
    subprocess.run(["bash", "-ec", "\n".join(lines)], cwd=tmp_path, env=environment, check=True)
    merged = GPT2LMHeadModel.from_pretrained(tmp_path / "merged")
    assert_same_logits(merged, tuned.logits)
    with torch.no_grad():
        assert_same_logits(with_peft(base, tuned.adapter).merge_and_unload(), merged(TOKENS).logits)
    assert AutoTokenizer.from_pretrained(tmp_path / "merged").decode([72, 105]) == "Hi"


# -----------------------------------------------------------------------------
# Training


def test_the_base_model_is_not_trained(tuned, base):
    before, model = GPT.from_pretrained(base).state_dict(), tuned.state.model
    after = {name.replace(".base_layer", ""): p for name, p in model.state_dict().items() if ".lora_" not in name}
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    parameters = sum(p.numel() for p in model.parameters() if p.requires_grad)
    optimized = sum(p.numel() for group in tuned.state.optimizer.param_groups for p in group["params"])
    assert optimized == parameters == 2816
    values = losses(tuned.adapter.parent / "log.txt", "val")
    assert values[-1] < values[0]


def test_a_resumed_run_is_the_uninterrupted_run_wherever_its_base_model_is(tuned, base, byte_shards, tmp_path):
    """But neither the base model nor its context may change."""
    first, run = Path(shutil.copytree(base, tmp_path / "first")), tmp_path / "run"
    flags = ["--max-lr", 0.01, "--max-steps", 4, "--decay-steps", 12]
    train(config_with_lora(byte_shards, first, run, *flags), ONE_PROCESS)
    resume = ["--resume", "--out", str(run), "--max-steps", "12"]
    assert configure([*resume, "--lora-rank", "4", "--lora-alpha", "8"])[0].lora_rank == 4
    for change in (["--lora-rank", "5"], ["--block-size", "8"]):
        with pytest.raises(UserError, match=f"^{change[0]} is {change[1]}, but the run in .* has .*. Leave it out.$"):
            configure([*resume, *change])
    moved = first.rename(tmp_path / "moved")
    with pytest.raises(UserError, match="first does not exist.* use --init-from."):
        configure(resume)
    other = GPT.from_pretrained(base)
    torch.nn.init.ones_(other.transformer.ln_f.weight)
    shutil.copytree(base, tmp_path / "other", ignore=shutil.ignore_patterns("checkpoint.json"))
    other.save_pretrained(tmp_path / "other")
    config, checkpoint = configure([*resume, "--init-from", str(tmp_path / "other")])
    with pytest.raises(UserError, match="the weights of --init-from are not those"):
        train(config, ONE_PROCESS, checkpoint)
    resumed(run, "--init-from", moved, "--max-steps", 12)
    assert losses(run / "log.txt") == losses(tuned.adapter.parent / "log.txt")
    weights = [(path / "adapter_model.safetensors").read_bytes() for path in (run / "model_00012", tuned.adapter)]
    assert weights[0] == weights[1]


# -----------------------------------------------------------------------------
# Errors


def test_a_rank_above_the_width_of_the_model_is_rejected(base, byte_shards, tmp_path):
    with pytest.raises(UserError, match="--lora-rank 33 is more than the model's 32 channels. Lower it."):
        config_with_lora(byte_shards, base, tmp_path, "--lora-rank", 33)


def test_an_adapter_of_an_adapter_is_refused(tuned, byte_shards, tmp_path):
    """peft would open it on the base of its base."""
    with pytest.raises(UserError, match="is an adapter, and another one needs a complete model. Merge it"):
        config_with_lora(byte_shards, tuned.adapter, tmp_path)


@pytest.mark.parametrize(
    "flags, problem",
    [
        (["--lora-rank", "8"], "--lora-rank needs pretrained weights to adapt. Pass them with --init-from."),
        (["--lora-alpha", "32"], "--lora-alpha is for LoRA. Add --lora-rank, or leave it out."),
        (["--init-from", "gpt2", "--out", "gpt2"], "--out is gpt2, as --init-from. Use another --out."),
        (["--init-from", "gpt2", "--lora-rank", "0"], "--lora-rank is 0. It must be 1 or more."),
        (["--init-from", "gpt2", "--lora-rank", "8", "--recipe", "fast"],
         "Muon does not suit LoRA's small matrices. Use --optimizer adamw, and --recipe gpt2."),
    ],
)  # fmt: skip
def test_bad_flags(flags, problem):
    with pytest.raises(UserError) as error:
        configure(flags)
    assert problem in error.value.problems


def change_config(path, change):
    path.write_text(json.dumps(json.loads(path.read_text()) | change))


@pytest.fixture
def copied(tuned, tmp_path) -> Path:
    """A copy of the adapter that a test may change."""
    return Path(shutil.copytree(tuned.adapter, tmp_path / "adapter", ignore=shutil.ignore_patterns("checkpoint.json")))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"base_model_name_or_path": "no-such-model"}, "no model 'no-such-model'"),
        (
            {"base_model_name_or_path": "/no/model"},
            "/no/model does not exist. .* It is the base model of .*adapter, as",
        ),
        ({"base_model_name_or_path": None}, "is not an adapter's configuration"),
        ({"base_model_name_or_path": "adapter"}, "adapter is an adapter, too"),
        ({"r": 3}, "cannot open the adapter"),
    ],
)
def test_a_bad_adapter_is_named(copied, monkeypatch, change, message):
    monkeypatch.chdir(copied.parent)
    change_config(copied / "adapter_config.json", change)
    with pytest.raises(UserError, match=message):
        GPT.from_pretrained(copied)


def test_an_adapter_without_some_of_its_matrices_is_not_its_base_model(copied):
    file = copied / "adapter_model.safetensors"
    matrices = load_file(file)
    name, _ = matrices.popitem()
    save_file(matrices, file)
    with pytest.raises(UserError, match=f"adapter_model.safetensors lacks {name}"):
        GPT.from_pretrained(copied)


def test_variants_of_lora_are_merged_as_peft_does(tuned, copied, base):
    """An adapter that others trained: scaled by the root of its rank."""
    change_config(copied / "adapter_config.json", {"use_rslora": True})
    with torch.no_grad():
        logits = GPT.from_pretrained(copied)(TOKENS)[0]
    assert_same_logits(with_peft(base, copied), logits)
    assert (logits - tuned.logits).abs().max() > 1e-3
