"""LoRA: trained alone, saved as peft saves it, opened by peft, here, and merged."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch
from conftest import ONE_PROCESS, TINY_FLAGS, losses, run_script, run_to_the_end
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, GPT2LMHeadModel

from support import huggingface
from support.cli import UserError
from train_gpt2 import GPT, configure, train

SIZES = ("--n-layer", "2", "--n-head", "--n-embd", "32", "--block-size", "16")
PLAIN = [flag for flag in TINY_FLAGS if flag not in SIZES]
TOKENS = torch.randint(257, (3, 16), generator=torch.Generator().manual_seed(5))


@pytest.fixture(scope="module")
def base(byte_shards, tmp_path_factory):
    """A checkpoint of a few updates."""
    out = tmp_path_factory.mktemp("base")
    train(configure([*TINY_FLAGS, "--data", str(byte_shards), "--out", str(out), "--max-steps", "20"])[0], ONE_PROCESS)
    return out / "model_00020"


@pytest.fixture(scope="module")
def tuned(base, byte_shards, tmp_path_factory):
    """The folder of a run with LoRA, its base, and what the trained model computes."""
    out = tmp_path_factory.mktemp("tuned")
    run = train(flags_for(byte_shards, base, out, "--merge", "--max-lr", 0.03), ONE_PROCESS)
    with torch.no_grad():
        return out, run.raw_model.eval()(TOKENS)[0]


def flags_for(data, base, out, *more):
    flags = ["--data", data, "--out", out, "--init-from", base, "--lora-rank", 4, "--lora-alpha", 8, "--max-steps", 12]
    return configure([*PLAIN, *map(str, [*flags, "--checkpoint-every", 5, *more])])[0]


def test_the_adapter_is_small_and_names_its_base(tuned, base):
    out, _ = tuned
    directory = out / "model_00012"
    names = {path.name for path in directory.iterdir()}
    assert len({path.stat().st_mode for path in directory.iterdir()}) == 1  # who may read one may read all
    assert {"adapter_config.json", "adapter_model.safetensors", "trainer.pt", "checkpoint.json"} < names
    assert "model.safetensors" not in names and "config.json" not in names
    config = json.loads((directory / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(base) and (config["r"], config["lora_alpha"]) == (4, 8)
    matrices = load_file(directory / "adapter_model.safetensors")
    assert len(matrices) == 2 * 3 * 2  # A and B, beside three matrices of each of two blocks
    assert all(tensor.any() for tensor in matrices.values())
    # c_attn 32 -> 96, c_proj 32 -> 32, the MLP's 128 -> 32, each in + out times the rank
    assert sum(tensor.numel() for tensor in matrices.values()) == 2 * 4 * ((32 + 96) + (32 + 32) + (128 + 32))


def test_peft_computes_the_same_on_huggingfaces_model(tuned, base):
    out, logits = tuned
    theirs = PeftModel.from_pretrained(GPT2LMHeadModel.from_pretrained(base), out / "model_00012").eval()
    torch.testing.assert_close(theirs(TOKENS).logits, logits, rtol=1e-4, atol=1e-4)
    before = GPT2LMHeadModel.from_pretrained(base)(TOKENS).logits
    assert (before - logits).abs().max() > 0.02  # and something was learnt
    AutoTokenizer.from_pretrained(out / "model_00012")


def test_the_adapter_opens_here_and_merged_as_a_plain_model(tuned):
    out, logits = tuned
    directory = out / "model_00012"
    opened, scored = (
        GPT.from_pretrained(directory),
        huggingface.load_theirs(huggingface.find(directory)),
    )  # hellaswag.py's
    with torch.no_grad():
        for result in (
            opened(TOKENS)[0],
            scored(TOKENS).logits,
            GPT2LMHeadModel.from_pretrained(out / "merged")(TOKENS).logits,
        ):
            torch.testing.assert_close(result, logits, rtol=1e-4, atol=1e-4)
    assert AutoTokenizer.from_pretrained(out / "merged").decode([72, 105]) == "Hi"


def test_sample_writes_with_an_adapter(tuned, tmp_path):
    done = run_script(
        "sample.py", "--model", tuned[0] / "model_00012", "--prompt", "12 + 3", "-n", 1, "-d", "cpu", cwd=tmp_path
    )
    assert done.returncode == 0 and done.stdout.startswith("12 + 3"), done.stderr


def test_the_base_stays_bit_by_bit(base, byte_shards, tmp_path, capsys):
    run = train(flags_for(byte_shards, base, tmp_path / "run"), ONE_PROCESS)
    before = GPT.from_pretrained(base).state_dict()
    after = {
        name.replace(".base_layer", ""): p for name, p in run.raw_model.state_dict().items() if ".lora_" not in name
    }
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    trained = sum(p.numel() for p in run.raw_model.parameters() if p.requires_grad)
    assert f"parameters, {trained:,} of them trained: 2 layers" in capsys.readouterr().out
    assert sum(p.numel() for group in run.optimizer.param_groups for p in group["params"]) == trained == 2816
    values = losses(tmp_path / "run" / "log.txt", "val")
    assert values[-1] < values[0]


def test_training_begins_at_the_base(base, byte_shards, tmp_path):
    """B is zero at first."""
    train(flags_for(byte_shards, base, tmp_path / "lora", "--max-steps", 1), ONE_PROCESS)
    flags = ["--data", byte_shards, "--out", tmp_path / "whole", "--init-from", base, "--max-steps", 1]
    train(configure([*PLAIN, *map(str, flags)])[0], ONE_PROCESS)
    assert losses(tmp_path / "lora" / "log.txt")[0] == losses(tmp_path / "whole" / "log.txt")[0]


@pytest.mark.parametrize("world", [1, 2])
def test_a_resumed_run_is_the_uninterrupted_run(base, byte_shards, tmp_path, world, monkeypatch):
    monkeypatch.setattr("conftest.TINY_FLAGS", PLAIN)
    flags = ["--data", byte_shards, "--init-from", base, "--lora-rank", 4, "--decay-steps", 9, "--checkpoint-every", 4]
    run_to_the_end(*flags, "--max-steps", 9, "--out", "straight", cwd=tmp_path, world=world)
    run_to_the_end(*flags, "--max-steps", 4, "--out", "resumed", cwd=tmp_path, world=world)
    run_to_the_end("--resume", "--max-steps", 9, "--out", "resumed", cwd=tmp_path, world=world)
    runs = [tmp_path / name for name in ("straight", "resumed")]
    np.testing.assert_array_equal(*(losses(run / "log.txt") for run in runs))
    weights = [(run / "model_00009" / "adapter_model.safetensors").read_bytes() for run in runs]
    assert weights[0] == weights[1]


def test_what_a_resumed_run_may_change(base, byte_shards, tmp_path):
    """The place of its base, and --merge, but neither the base nor the context."""
    data, first, run = ("--data", str(byte_shards)), tmp_path / "first", tmp_path / "run"
    shutil.copytree(base, first)
    train(flags_for(byte_shards, first, run, "--max-steps", 4), ONE_PROCESS)
    resume = ["--resume", "--out", str(run), *data]
    assert configure([*resume, "--lora-rank", "4", "--lora-alpha", "8"])[0].lora_rank == 4
    for change in (["--lora-rank", "5"], ["--block-size", "8"]):
        with pytest.raises(UserError, match=f"^{change[0]} is {change[1]}, but the run in .* has .*. Leave it out.$"):
            configure([*resume, *change])
    moved = first.rename(tmp_path / "moved")
    other = [*resume, "--init-from", str(tmp_path / "other"), "--max-steps", "6"]
    train(configure([*TINY_FLAGS, *data, "--out", str(tmp_path / "new"), "--max-steps", "1"])[0], ONE_PROCESS)
    (tmp_path / "new" / "model_00001").rename(tmp_path / "other")
    config, at = configure(other)
    with pytest.raises(UserError, match="the weights of --init-from are not those"):
        train(config, ONE_PROCESS, at)
    config, at = configure([*resume, "--init-from", str(moved), "--merge"])
    trained = train(config, ONE_PROCESS, at).raw_model.eval()
    with torch.no_grad():
        torch.testing.assert_close(
            GPT.from_pretrained(run / "merged")(TOKENS)[0], trained(TOKENS)[0], rtol=1e-4, atol=1e-4
        )


def test_a_merged_model_has_the_context_that_was_trained(base, byte_shards, tmp_path):
    train(flags_for(byte_shards, base, tmp_path, "--block-size", 8, "--merge", "--max-steps", 2), ONE_PROCESS)
    assert GPT.from_pretrained(tmp_path / "merged").config.block_size == 8


def test_a_rank_beyond_the_model_is_refused(base, byte_shards, tmp_path):
    with pytest.raises(UserError, match="--lora-rank 33 is more than the model's 32 channels. Lower it."):
        train(flags_for(byte_shards, base, tmp_path, "--lora-rank", 33), ONE_PROCESS)


@pytest.mark.parametrize(
    "flags, problem",
    [
        (["--lora-rank", "8"], "--lora-rank has no weights to stand beside. Name some with --init-from."),
        (["--merge"], "--merge is for LoRA. Give --lora-rank as well, or leave it out."),
        (["--lora-alpha", "32"], "--lora-alpha is for LoRA. Give --lora-rank as well, or leave it out."),
        (["--init-from", "gpt2", "--out", "gpt2"], "--out is gpt2, as --init-from. Name another --out."),
        (["--init-from", "gpt2", "--lora-rank", "0"], "--lora-rank is 0. It must be 1 or more."),
        (["--init-from", "gpt2", "--lora-rank", "8", "--recipe", "fast"],
         "Muon is not for the small matrices of LoRA. Use --optimizer adamw, and --recipe gpt2."),
    ],
)  # fmt: skip
def test_bad_flags(flags, problem):
    with pytest.raises(UserError) as error:
        configure(flags)
    assert problem in error.value.problems


def test_half_a_product_is_no_adapter(tuned, tmp_path):
    directory = tmp_path / "adapter"
    shutil.copytree(tuned[0] / "model_00012", directory)
    (directory / "checkpoint.json").unlink()
    matrices = load_file(directory / "adapter_model.safetensors")
    for extra in ({}, {"base_model.model.transformer.wte.lora_embedding_A": torch.zeros(4, 257)}):
        changed = dict(list(matrices.items())[not extra :]) | extra
        save_file(changed, directory / "adapter_model.safetensors")
        with pytest.raises(UserError, match="is no half of a LoRA product"):
            GPT.from_pretrained(directory)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"use_rslora": True}, "use_rslora is True; only False is read here."),
        ({"base_model_name_or_path": "no-such-model"}, "no model 'no-such-model'"),
        ({"r": 0}, "is not the configuration of an adapter"),
        ({"base_model_name_or_path": None}, "is not the configuration of an adapter"),
        ({"base_model_name_or_path": "adapter"}, "names itself as the model that it belongs to"),
        ({"r": None}, "is not the configuration of an adapter"),
    ],
)
def test_an_adapter_that_is_not_read_is_named(tuned, tmp_path, monkeypatch, change, message):
    directory = tmp_path / "adapter"
    shutil.copytree(tuned[0] / "model_00012", directory)
    (directory / "checkpoint.json").unlink()
    monkeypatch.chdir(tmp_path)
    config = json.loads((directory / "adapter_config.json").read_text()) | change
    (directory / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=message):
        GPT.from_pretrained(directory)
