"""LoRA: trained alone, saved as peft saves it, opened by peft and here, and merged."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import ROOT, TINY_FLAGS, TINY_TRAINING_FLAGS, losses, run_to_the_end
from safetensors.torch import load_file
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
def adapter(base, byte_shards, tmp_path_factory) -> tuple[Path, torch.Tensor]:
    """The last checkpoint of a run with LoRA, and the logits of the trained model."""
    out = tmp_path_factory.mktemp("tuned")
    state = train(config_with_lora(byte_shards, base, out, "--max-lr", 0.03), ONE_PROCESS)
    with torch.no_grad():
        return out / "model_00012", state.model.eval()(TOKENS)[0]


def config_with_lora(data: Path, base: Path, out: Path, *more: object) -> TrainConfig:
    flags = ["--data", data, "--out", out, "--init-from", base, "--lora-rank", 4, "--lora-alpha", 8, "--max-steps", 12]
    return configure([*TINY_TRAINING_FLAGS, *map(str, [*flags, "--checkpoint-every", 5, *more])])[0]


# -----------------------------------------------------------------------------
# The files


def test_the_adapter_is_small_and_names_its_base_model(adapter, base):
    directory, _ = adapter
    names = {path.name for path in directory.iterdir()}
    assert len({path.stat().st_mode for path in directory.iterdir()}) == 1  # who may read one may read all
    assert {"adapter_config.json", "adapter_model.safetensors", "trainer.pt", "checkpoint.json"} < names
    assert "model.safetensors" not in names and "config.json" not in names
    config = json.loads((directory / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(base) and (config["r"], config["lora_alpha"]) == (4, 8)
    matrices = load_file(directory / "adapter_model.safetensors")
    assert len(matrices) == 2 * 3 * 2  # A and B, for three matrices in each of two blocks
    assert all(tensor.any() for tensor in matrices.values())
    # c_attn 32 -> 96, c_proj 32 -> 32, the MLP's 128 -> 32: in + out, times the rank
    assert sum(tensor.numel() for tensor in matrices.values()) == 2 * 4 * ((32 + 96) + (32 + 32) + (128 + 32))


def test_peft_computes_the_same_on_huggingfaces_model(adapter, base):
    from peft import PeftModel
    from transformers import AutoTokenizer, GPT2LMHeadModel

    directory, logits = adapter
    reference = PeftModel.from_pretrained(GPT2LMHeadModel.from_pretrained(base), directory).eval()
    torch.testing.assert_close(reference(TOKENS).logits, logits, rtol=1e-4, atol=1e-4)
    before = GPT2LMHeadModel.from_pretrained(base)(TOKENS).logits
    assert (before - logits).abs().max() > 0.02  # something was learnt
    AutoTokenizer.from_pretrained(directory)


def test_the_adapter_opens_here(adapter):
    directory, logits = adapter
    opened = GPT.from_pretrained(directory)
    scored = huggingface.load_hf_model(huggingface.find_model(directory))  # as hellaswag.py does
    with torch.no_grad():
        for result in (opened(TOKENS)[0], scored(TOKENS).logits):
            torch.testing.assert_close(result, logits, rtol=1e-4, atol=1e-4)


def test_an_adapter_without_its_base_model_is_named(base, adapter, tmp_path):
    config = json.loads((adapter[0] / "adapter_config.json").read_text())
    for file in adapter[0].glob("adapter_*"):
        shutil.copy(file, tmp_path)
    config["base_model_name_or_path"] = str(tmp_path / "gone")
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    message = f"{tmp_path / 'gone'} does not exist. Check the path. It is the base model of {tmp_path}, as"
    with pytest.raises(UserError, match=re.escape(message)):
        GPT.from_pretrained(tmp_path)


def test_an_adapter_of_an_adapter_is_refused(adapter, byte_shards, tmp_path):
    """peft would open it on the base of its base."""
    with pytest.raises(UserError, match="is an adapter, and another one needs a complete model. Merge it"):
        config_with_lora(byte_shards, adapter[0], tmp_path)


@pytest.mark.slow
def test_the_lines_in_the_docs_merge_an_adapter(adapter, base, tmp_path):
    """The result is a plain checkpoint with the logits of peft's merge_and_unload, and with its tokenizer."""
    from peft import PeftModel
    from transformers import AutoTokenizer, GPT2LMHeadModel

    directory, logits = adapter
    page = (ROOT / "docs" / "training.md").read_text()
    lines = re.findall(r"^(?:python -c .*save_pretrained|cp .*tokenizer).*$", page, re.M)
    assert len(lines) == 2 and all("mine/model_00732" in line for line in lines)
    (tmp_path / "mine").mkdir()
    shutil.copytree(directory, tmp_path / "mine" / "model_00732")
    python = Path(sys.executable).parent
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PATH": f"{python}{os.pathsep}{os.environ['PATH']}"}
    subprocess.run(["bash", "-ec", "\n".join(lines)], cwd=tmp_path, env=environment, check=True)
    merged = GPT2LMHeadModel.from_pretrained(tmp_path / "merged")
    reference = PeftModel.from_pretrained(GPT2LMHeadModel.from_pretrained(base), directory).merge_and_unload().eval()
    with torch.no_grad():
        torch.testing.assert_close(merged(TOKENS).logits, logits, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(merged(TOKENS).logits, reference(TOKENS).logits, rtol=1e-4, atol=1e-4)
    assert AutoTokenizer.from_pretrained(tmp_path / "merged").decode([72, 105]) == "Hi"


def test_an_adapter_trained_with_a_shorter_context_is_merged_with_it(base, byte_shards, tmp_path):
    state = train(config_with_lora(byte_shards, base, tmp_path, "--block-size", 8, "--max-steps", 2), ONE_PROCESS)
    model = GPT.from_pretrained(tmp_path / "model_00002")
    model.crop(8)
    model.save_pretrained(tmp_path / "merged")
    merged = GPT.from_pretrained(tmp_path / "merged")
    assert merged.config.block_size == 8
    with torch.no_grad():
        x = TOKENS[:, :8]
        torch.testing.assert_close(merged(x)[0], state.model.eval()(x)[0], rtol=1e-4, atol=1e-4)


# -----------------------------------------------------------------------------
# Training


def test_the_base_model_is_not_trained(base, byte_shards, tmp_path, capsys):
    state = train(config_with_lora(byte_shards, base, tmp_path / "run"), ONE_PROCESS)
    before = GPT.from_pretrained(base).state_dict()
    after = {name.replace(".base_layer", ""): p for name, p in state.model.state_dict().items() if ".lora_" not in name}
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    trained = sum(p.numel() for p in state.model.parameters() if p.requires_grad)
    assert f"parameters ({trained:,} trained): 2 layers" in capsys.readouterr().out
    assert sum(p.numel() for group in state.optimizer.param_groups for p in group["params"]) == trained == 2816
    values = losses(tmp_path / "run" / "log.txt", "val")
    assert values[-1] < values[0]


def test_training_starts_at_the_base_model(base, byte_shards, tmp_path):
    """B is zero at first."""
    train(config_with_lora(byte_shards, base, tmp_path / "lora", "--max-steps", 1), ONE_PROCESS)
    flags = ["--data", byte_shards, "--out", tmp_path / "all", "--init-from", base, "--max-steps", 1]
    train(configure([*TINY_TRAINING_FLAGS, *flags])[0], ONE_PROCESS)
    assert losses(tmp_path / "lora" / "log.txt")[0] == losses(tmp_path / "all" / "log.txt")[0]


@pytest.mark.slow
def test_a_resumed_run_is_the_uninterrupted_run(base, byte_shards, tmp_path):
    flags = ["--data", byte_shards, "--init-from", base, "--lora-rank", 4, "--decay-steps", 9, "--checkpoint-every", 4]
    options = dict(cwd=tmp_path, world_size=2, tiny=False)
    run_to_the_end(*flags, "--max-steps", 9, "--out", "straight", **options)
    run_to_the_end(*flags, "--max-steps", 4, "--out", "resumed", **options)
    run_to_the_end("--resume", "--max-steps", 9, "--out", "resumed", **options)
    runs = [tmp_path / name for name in ("straight", "resumed")]
    assert losses(runs[0] / "log.txt") == losses(runs[1] / "log.txt")
    weights = [(run / "model_00009" / "adapter_model.safetensors").read_bytes() for run in runs]
    assert weights[0] == weights[1]


def test_what_a_resumed_run_may_change(base, byte_shards, tmp_path):
    """Where its base model is, but neither the base model nor the context."""
    data, first, run = ("--data", str(byte_shards)), tmp_path / "first", tmp_path / "run"
    shutil.copytree(base, first)
    train(config_with_lora(byte_shards, first, run, "--max-steps", 4), ONE_PROCESS)
    resume = ["--resume", "--out", str(run), *data]
    assert configure([*resume, "--lora-rank", "4", "--lora-alpha", "8"])[0].lora_rank == 4
    for change in (["--lora-rank", "5"], ["--block-size", "8"]):
        with pytest.raises(UserError, match=f"^{change[0]} is {change[1]}, but the run in .* has .*. Leave it out.$"):
            configure([*resume, *change])
    moved = first.rename(tmp_path / "moved")
    with pytest.raises(UserError, match="first does not exist"):
        configure(resume)
    train(configure([*TINY_FLAGS, *data, "--out", str(tmp_path / "new"), "--max-steps", "1"])[0], ONE_PROCESS)
    (tmp_path / "new" / "model_00001").rename(tmp_path / "other")
    config, checkpoint = configure([*resume, "--init-from", str(tmp_path / "other"), "--max-steps", "6"])
    with pytest.raises(UserError, match="the weights of --init-from are not those"):
        train(config, ONE_PROCESS, checkpoint)
    state = resumed(run, *data, "--init-from", moved, "--max-steps", 6)
    assert state.step == 6
    with torch.no_grad():
        torch.testing.assert_close(
            GPT.from_pretrained(run / "model_00006")(TOKENS)[0], state.model.eval()(TOKENS)[0], rtol=1e-4, atol=1e-4
        )


# -----------------------------------------------------------------------------
# Errors


def test_a_rank_above_the_width_of_the_model_is_rejected(base, byte_shards, tmp_path):
    with pytest.raises(UserError, match="--lora-rank 33 is more than the model's 32 channels. Lower it."):
        train(config_with_lora(byte_shards, base, tmp_path, "--lora-rank", 33), ONE_PROCESS)


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


@pytest.mark.parametrize(
    "change, message",
    [
        ({"base_model_name_or_path": "no-such-model"}, "no model 'no-such-model'"),
        ({"base_model_name_or_path": None}, "is not an adapter's configuration"),
        ({"base_model_name_or_path": "adapter"}, "adapter is an adapter, too"),
        ({"r": 3}, "cannot open the adapter"),
    ],
)
def test_a_bad_adapter_is_named(adapter, tmp_path, monkeypatch, change, message):
    directory = tmp_path / "adapter"
    shutil.copytree(adapter[0], directory)
    (directory / "checkpoint.json").unlink()
    monkeypatch.chdir(tmp_path)
    config = json.loads((directory / "adapter_config.json").read_text()) | change
    (directory / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=message):
        GPT.from_pretrained(directory)


def test_variants_of_lora_are_merged_as_peft_does(adapter, base, tmp_path):
    """An adapter that others trained: scaled by the root of its rank."""
    from peft import PeftModel
    from transformers import GPT2LMHeadModel

    directory = Path(shutil.copytree(adapter[0], tmp_path / "adapter"))
    (directory / "checkpoint.json").unlink()
    config = json.loads((directory / "adapter_config.json").read_text())
    (directory / "adapter_config.json").write_text(json.dumps(config | {"use_rslora": True}))
    reference = PeftModel.from_pretrained(GPT2LMHeadModel.from_pretrained(base), directory).eval()
    with torch.no_grad():
        logits = GPT.from_pretrained(directory)(TOKENS)[0]
        torch.testing.assert_close(logits, reference(TOKENS).logits, rtol=1e-4, atol=1e-4)
    assert (logits - adapter[1]).abs().max() > 1e-3


def test_each_problem_of_a_base_model_is_an_error_of_its_own(adapter, base, tmp_path, monkeypatch):
    shutil.copytree(base, tmp_path / "base")
    shutil.copytree(adapter[0], tmp_path / "run" / "model_00012")
    config = json.loads((base / "config.json").read_text()) | {"n_layer": 0, "vocab_size": 0}
    (tmp_path / "base" / "config.json").write_text(json.dumps(config))
    (tmp_path / "base" / "checkpoint.json").unlink()
    with pytest.raises(UserError) as error:
        configure(["--resume", "--out", tmp_path / "run", "--init-from", tmp_path / "base"])
    first, second = error.value.problems
    assert "vocab_size is 0" in first and "n_layer is 0" in second and second.endswith("use --init-from.")
