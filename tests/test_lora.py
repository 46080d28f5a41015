"""LoRA: trained alone, saved as peft saves it, and merged as peft merges it: a checkpoint is a complete model."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import TINY_TRAINING_FLAGS, finish_run, losses, run_to_the_end, start_run, stopped_after
from safetensors.torch import load_file, save_file
from training import NEW_RUN, ONE_PROCESS, configure, resumed, train, trained

from support.checkpoints import lora
from support.checkpoints.directory import find_corruption
from support.cli import UserError
from support.config import TrainConfig
from train_gpt2 import GPT

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
    state = train(config_with_lora(byte_shards, base, out, "--max-lr", 0.01), ONE_PROCESS, NEW_RUN)
    with torch.no_grad():
        return SimpleNamespace(checkpoint=out / "model_00012", state=state, logits=state.model.eval()(TOKENS)[0])


def flags_with_lora(data: Path, base: Path, out: Path, *more: object) -> list[str]:
    flags = ["--data", data, "--out", out, "--init-from", base, "--lora-rank", 4, "--lora-alpha", 8, "--max-steps", 12]
    return [str(flag) for flag in (*flags, "--checkpoint-every", 5, *more)]


def config_with_lora(*args: object) -> TrainConfig:
    return configure([*TINY_TRAINING_FLAGS, *flags_with_lora(*args)])[0]


def assert_same_logits(model, logits):
    with torch.no_grad():
        result = model.eval()(TOKENS)
    torch.testing.assert_close(result[0] if isinstance(result, tuple) else result.logits, logits, rtol=1e-4, atol=1e-4)


def with_peft(checkpoint):
    """The adapter of a checkpoint on the base model that it names, as peft opens it."""
    from peft import AutoPeftModelForCausalLM

    return AutoPeftModelForCausalLM.from_pretrained(checkpoint / "adapter")


def assert_merged_as_peft_does(checkpoint):
    merged = with_peft(checkpoint).merge_and_unload().state_dict()
    weights = load_file(checkpoint / "model.safetensors")
    assert merged.keys() - weights.keys() == {"lm_head.weight"}  # tied
    assert all(torch.equal(merged[name], weight) for name, weight in weights.items())


# -----------------------------------------------------------------------------
# The files


@pytest.mark.slow
def test_a_checkpoint_is_a_complete_model(tuned, base):
    from transformers import GPT2LMHeadModel, pipeline

    assert_same_logits(GPT.from_pretrained(tuned.checkpoint), tuned.logits)
    assert_same_logits(GPT2LMHeadModel.from_pretrained(tuned.checkpoint), tuned.logits)
    generate = pipeline("text-generation", model=str(tuned.checkpoint))
    assert_same_logits(generate.model, tuned.logits)
    assert generate("The", max_new_tokens=9)[0]["generated_text"].startswith("The")
    before = GPT.from_pretrained(base)(TOKENS)[0]
    assert (before - tuned.logits).abs().max() > 0.005  # something was learnt


def test_it_has_the_bits_of_peft(tuned, tmp_path):
    assert_merged_as_peft_does(tuned.checkpoint)
    with_peft(tuned.checkpoint).save_pretrained(tmp_path)
    for path in (tuned.checkpoint / "adapter").iterdir():
        assert path.read_bytes() == (tmp_path / path.name).read_bytes()
    matrices = load_file(tmp_path / "adapter_model.safetensors")
    # two blocks; c_attn 32 -> 96, c_proj 32 -> 32, the MLP's 128 -> 32: in + out, times the rank
    assert sum(tensor.numel() for tensor in matrices.values()) == 2 * 4 * ((32 + 96) + (32 + 32) + (128 + 32))
    assert all(tensor.any() for tensor in matrices.values())


@pytest.mark.slow
def test_it_has_them_under_fsdp(base, byte_shards, tmp_path):
    flags = flags_with_lora(byte_shards, base, tmp_path / "run", "--parallel", "fsdp")
    run_to_the_end(*flags, cwd=tmp_path, world_size=2, defaults=TINY_TRAINING_FLAGS)
    assert_merged_as_peft_does(tmp_path / "run" / "model_00012")


# -----------------------------------------------------------------------------
# Training


def test_the_base_model_is_not_trained(tuned, base):
    before, model = GPT.from_pretrained(base).state_dict(), tuned.state.model
    after = {name.replace(".base_layer", ""): p for name, p in model.state_dict().items() if ".lora_" not in name}
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    parameters = sum(p.numel() for p in model.parameters() if p.requires_grad)
    optimized = sum(p.numel() for group in tuned.state.optimizer.param_groups for p in group["params"])
    assert optimized == parameters == 2816
    values = losses(tuned.checkpoint.parent / "log.txt", "val")
    assert values[-1] < values[0]


@pytest.mark.slow
def test_a_resumed_run_is_the_uninterrupted_run_wherever_its_base_model_is(tuned, base, byte_shards, tmp_path):
    """But neither the base model nor its context may change."""
    first, run = Path(shutil.copytree(base, tmp_path / "first")), tmp_path / "run"
    flags = flags_with_lora(byte_shards, first, run, "--max-lr", 0.01)
    assert finish_run(start_run(*flags, cwd=tmp_path, rank=stopped_after(4), defaults=TINY_TRAINING_FLAGS)) == [143]
    resume = ["--resume", "--out", str(run)]
    assert configure([*resume, "--lora-rank", "4", "--lora-alpha", "8"])[0].lora_rank == 4
    for change in (["--lora-rank", "5"], ["--lora-alpha", "9.0"], ["--block-size", "8"]):
        with pytest.raises(UserError, match=f"^{change[0]} is {change[1]}, but the model in .* has .*. A fork keeps"):
            configure(["--fork", str(run / "model_00004"), "--out", str(tmp_path / "fork"), *change])
        with pytest.raises(UserError, match=f"^{change[0]} is {change[1]}, but the run in .* has .*. Leave it out."):
            configure([*resume, *change])
    moved = first.rename(tmp_path / "moved")
    with pytest.raises(UserError, match="first does not exist.* use --init-from."):
        configure(resume)
    # not even the merged weights of the run itself
    config, start = configure([*resume, "--init-from", str(run / "model_00004")])
    with pytest.raises(UserError, match="the weights of --init-from are not those"):
        train(config, ONE_PROCESS, start)
    resumed(run, "--init-from", moved)
    assert losses(run / "log.txt") == losses(tuned.checkpoint.parent / "log.txt")
    for name in ("model.safetensors", "adapter/adapter_model.safetensors"):
        assert (run / "model_00012" / name).read_bytes() == (tuned.checkpoint / name).read_bytes()


def test_a_corrupt_adapter_is_a_corrupt_checkpoint(tuned, tmp_path):
    out = Path(shutil.copytree(tuned.checkpoint.parent, tmp_path / "run"))
    file = out / "model_00012" / "adapter" / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    assert find_corruption(out / "model_00012") == "adapter/adapter_model.safetensors was altered (wrong checksum)"
    assert configure(["--resume", "--out", str(out)])[1].resumed.path.name == "model_00010"


@pytest.mark.parametrize("change", [lambda found: found.popitem(), lambda found: found.update(more=torch.zeros(2))])
def test_an_adapter_that_does_not_fit_is_named(tuned, base, tmp_path, change):
    shutil.copytree(tuned.checkpoint / "adapter", tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    change(matrices := load_file(file))
    save_file(matrices, file)
    with pytest.raises(UserError, match="adapter_model.safetensors does not fit the base model and --lora-rank 4"):
        lora.add_adapter(GPT.from_pretrained(base), 4, 8.0, 0, tmp_path)


@pytest.mark.parametrize("more", [[], ["--lora-rank", "2"]], ids=["all weights", "LoRA"])
def test_training_goes_on_from_the_merged_weights(tuned, byte_shards, tmp_path, more):
    flags = ["--data", byte_shards, "--out", tmp_path, "--init-from", tuned.checkpoint, "--max-steps", 2, *more]
    train(configure([*TINY_TRAINING_FLAGS, *map(str, flags)])[0], ONE_PROCESS, NEW_RUN)
    before, now = (losses(out / "log.txt", "val") for out in (tuned.checkpoint.parent, tmp_path))
    assert now[0] == pytest.approx(before[-1], abs=1.01e-4)
    if more:
        assert_merged_as_peft_does(tmp_path / "model_00002")


# -----------------------------------------------------------------------------
# Errors


def test_a_rank_above_the_width_of_the_model_is_rejected(base, byte_shards, tmp_path):
    with pytest.raises(UserError, match="--lora-rank 33 is more than the model's 32 channels. Lower it."):
        config_with_lora(byte_shards, base, tmp_path, "--lora-rank", 33)


@pytest.mark.parametrize(
    "flags, problem",
    [
        (["--lora-rank", "8"], "--lora-rank needs pretrained weights to adapt. Pass them with --init-from."),
        (["--lora-alpha", "32"], "--lora-alpha is for LoRA. Add --lora-rank, or leave out --lora-alpha."),
        (["--init-from", "gpt2", "--out", "gpt2"], "--out and --init-from are both gpt2. Use another --out."),
        (["--init-from", "gpt2", "--lora-rank", "0"], "--lora-rank is 0. It must be 1 or more."),
    ],
)  # fmt: skip
def test_bad_flags(flags, problem):
    with pytest.raises(UserError) as error:
        configure(flags)
    assert problem in error.value.problems


def test_muon_is_refused_in_a_fork_too(tuned, base, tmp_path):
    new, fork = (
        ["--init-from", base, "--lora-rank", 8, "--recipe", "fast"],
        ["--fork", tuned.checkpoint, "--max-steps", 30],
    )
    for flags in (new, [*fork, "--optimizer", "muon", "--out", tmp_path / "fork"]):
        with pytest.raises(UserError, match="Muon does not suit LoRA's small matrices. Use --optimizer adamw"):
            configure(flags)
