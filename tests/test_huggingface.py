"""Weights and configurations in Hugging Face's files: what is read, what is written, and what is rejected."""

from __future__ import annotations

import dataclasses
import json
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from hf_models import hf_model
from training import TINY

from support.checkpoints import huggingface
from support.checkpoints.directory import write_checkpoint
from support.cli import UserError
from support.data.tokenizer import find_tokenizer, get_tokenizer
from train_gpt2 import GPT, GPTConfig

TOKENS = torch.randint(0, 257, (3, 16), generator=torch.Generator().manual_seed(1))


def test_a_saved_model_opens_in_huggingface_and_here(tiny_model, tmp_path):
    from transformers import GPT2LMHeadModel

    tiny_model.save_pretrained(tmp_path)
    reference, report = GPT2LMHeadModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    assert reference.config.eos_token_id == 256 and reference.config.resid_pdrop == 0
    assert reference.config.n_ctx == reference.config.n_positions == 16  # n_ctx is what llama.cpp reads
    assert reference.get_input_embeddings().weight.shape == (257, 32)
    logits, _ = tiny_model(TOKENS)
    torch.testing.assert_close(reference.eval()(TOKENS).logits, logits, atol=1e-5, rtol=1e-5)
    assert torch.equal(GPT.from_pretrained(tmp_path)(TOKENS)[0], logits)


def test_hub_models_and_old_files_load(monkeypatch, tmp_path):
    """OpenAI's files on the hub are of GPT2Model: no prefix, no head, and the causal mask among the tensors."""
    from safetensors.torch import save_file

    reference = hf_model()
    reference.save_pretrained(tmp_path)
    weights = {
        name.removeprefix("transformer."): tensor.contiguous() for name, tensor in reference.state_dict().items()
    }
    del weights["lm_head.weight"]
    weights |= {f"h.{i}.attn.bias": torch.ones(1, 1, 16, 16).tril() for i in range(2)}
    save_file(weights, tmp_path / "model.safetensors")
    asked = []
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **_: asked.append(name) or str(tmp_path))
    model = GPT.from_pretrained("gpt2-medium")
    assert asked == ["gpt2-medium"]
    torch.testing.assert_close(model(TOKENS)[0], reference.eval()(TOKENS).logits, atol=1e-5, rtol=1e-5)


def run_command_of(error: pytest.ExceptionInfo[UserError]) -> None:
    """Runs the Python code of the command that an error ends with."""
    python, option, code = shlex.split(str(error.value).partition(": ")[2])
    assert (python, option) == ("python", "-c")
    exec(code, {})


@pytest.mark.parametrize("kind", ["model.safetensors.index.json", "pytorch_model.bin"])
def test_weights_in_other_files_are_converted_by_the_command_in_the_error(kind, tmp_path):
    reference, folder = hf_model(), tmp_path / "model"
    reference.save_pretrained(folder, max_shard_size="20KB" if kind.endswith("json") else "1GB")
    if kind.endswith("bin"):
        torch.save(reference.state_dict(), folder / kind)
        (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match=rf"has its weights in {kind}, not in model\.safetensors\. Convert") as error:
        GPT.from_pretrained(folder)
    run_command_of(error)
    logits = reference.eval()(TOKENS).logits
    torch.testing.assert_close(GPT.from_pretrained(folder)(TOKENS)[0], logits, atol=1e-5, rtol=1e-5)


def test_weights_in_other_files_on_the_hub_are_to_be_downloaded_first(monkeypatch, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **_: str(tmp_path))
    with pytest.raises(UserError, match="on the hub.*hf download me/model --local-dir model && python -c"):
        huggingface.find_model("me/model")
    assert huggingface.find_model(tmp_path) == tmp_path  # there is nothing to download


def test_an_adapter_of_peft_is_merged_by_the_command_in_the_error(tmp_path, monkeypatch):
    from peft import LoraConfig, get_peft_model
    from transformers import GPT2LMHeadModel

    monkeypatch.chdir(tmp_path)
    hf_model().save_pretrained("base")
    get_tokenizer("bytes").save_pretrained("base", 16)
    base = GPT2LMHeadModel.from_pretrained("base")
    config = LoraConfig(task_type="CAUSAL_LM", target_modules=["c_attn"], init_lora_weights=False, fan_in_fan_out=True)
    adapted = get_peft_model(base, config)
    adapted.save_pretrained("mine")
    with pytest.raises(UserError, match="mine is a peft adapter, not a complete model. Merge it") as error:
        huggingface.find_model("mine")
    run_command_of(error)
    logits = adapted.eval()(TOKENS).logits
    torch.testing.assert_close(GPT.from_pretrained("mine_merged")(TOKENS)[0], logits, atol=1e-4, rtol=1e-4)
    assert find_tokenizer(Path("mine_merged")).name == "bytes"
    Path("base/adapter").mkdir()
    shutil.copy("mine/adapter_config.json", "base/adapter")  # as in a checkpoint of --lora-rank
    with pytest.raises(UserError, match="base/adapter is a LoRA adapter. Use the merged model in base."):
        huggingface.find_model("base/adapter")


def test_huggingfaces_own_model_loads_for_scoring(tiny_model, tmp_path):
    """As hellaswag.py uses it."""
    tiny_model.save_pretrained(tmp_path)
    reference = huggingface.load_hf_model(tmp_path)
    assert not reference.training
    torch.testing.assert_close(reference(TOKENS).logits, tiny_model(TOKENS)[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "field, value",
    [
        ("activation_function", "relu"),
        ("layer_norm_epsilon", 1e-6),
        ("scale_attn_by_inverse_layer_idx", True),
        ("scale_attn_weights", False),
        ("n_inner", 64),
        ("tie_word_embeddings", False),
        ("model_type", "gpt_neo"),
        ("n_head", 2.5),
        ("n_layer", True),
        ("n_embd", "32"),
        ("n_positions", 10**12),
    ],
)
def test_an_unsupported_configuration_is_rejected(tiny_model, tmp_path, field, value):
    tiny_model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {field: value}))
    with pytest.raises(UserError, match=field.replace("n_positions", "block_size")):
        GPT.from_pretrained(tmp_path)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConfigWithOption(GPTConfig):
    window: int = 0


def test_an_option_that_gpt2_lacks_is_in_the_file_and_must_be_known(tiny_model, tmp_path):
    """What the model computes is not GPT-2's: docs/code.md has an example, and its test the refusals."""
    sizes = dataclasses.asdict(tiny_model.config)
    for window in (0, 8):
        tiny_model.config = ConfigWithOption(**sizes, window=window)
        tiny_model.save_pretrained(tmp_path / str(window))
        known = {field.name for field in dataclasses.fields(ConfigWithOption)}
        read = huggingface.read_model_config(tmp_path / str(window), known)
        assert ConfigWithOption(**read) == tiny_model.config
    assert GPT.from_pretrained(tmp_path / "0").config == GPTConfig(**sizes)  # a GPT-2, with its default
    with pytest.raises(UserError, match="option window"):
        GPT.from_pretrained(tmp_path / "8")


class UntiedGPT(GPT):
    def __init__(self, config):
        super().__init__(config)
        self.lm_head = torch.nn.Linear(config.n_embd, config.padded_vocab_size, bias=False)


def test_a_head_that_is_not_the_embedding_is_kept(tmp_path):
    torch.manual_seed(0)
    model = UntiedGPT(TINY)
    model.save_pretrained(tmp_path)
    assert torch.equal(UntiedGPT.from_pretrained(tmp_path)(TOKENS)[0], model(TOKENS)[0])
    with pytest.raises(UserError, match="lm_head.weight differs"):
        GPT.from_pretrained(tmp_path)


def test_weights_that_do_not_fit_are_named(tiny_model):
    expected = tiny_model.state_dict(keep_vars=True)
    good = huggingface.to_hf(dict(tiny_model.named_parameters()), 257)
    name = "transformer.h.1.mlp.c_fc.weight"
    for bad, problem in (
        *(({k: v for k, v in good.items() if k != key}, f"lack {key}") for key in (name, "transformer.wte.weight")),
        (good | {"transformer.h.2.ln_1.bias": torch.zeros(32)}, "h.2.ln_1.bias"),
        (good | {name: good[name].t()}, f"{name} is .* does not fit"),
        (good | {name: good[name].int()}, f"{name} is torch.int32"),
        (good | {"lm_head.weight": torch.zeros(257, 32)}, "lm_head.weight differs"),
    ):
        with pytest.raises(UserError, match=problem):
            huggingface.from_hf(bad, expected, 257)


def test_biases_that_a_model_does_not_have_are_zeros_in_its_file(tiny_model):
    without = GPT(dataclasses.replace(tiny_model.config, bias=False))
    saved, expected = (huggingface.to_hf(dict(m.named_parameters()), 257) for m in (without, tiny_model))
    assert {name: tensor.shape for name, tensor in saved.items()} == {name: t.shape for name, t in expected.items()}
    assert not any(tensor.any() for name, tensor in saved.items() if name.endswith(".bias"))


def test_a_bias_that_is_not_zero_is_not_dropped(tiny_model, tmp_path):
    torch.nn.init.ones_(tiny_model.transformer.h[0].mlp.c_fc.bias)
    tiny_model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"bias": False}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        UserError, match="transformer.h.0.mlp.c_fc.bias, which a GPT-2 with this config.json does not have"
    ):
        GPT.from_pretrained(tmp_path)


@pytest.mark.parametrize("name", ["no-such-model", "owner/no-such-model", "not a name!"])
def test_an_unknown_model_is_one_sentence(name, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"it is not a directory, and .*Hugging Face hub") as error:
        GPT.from_pretrained(name)
    assert len(error.value.problems) == 1


def test_a_folder_that_is_not_a_checkpoint_is_named(tiny_model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "log").mkdir()
    write_checkpoint(tmp_path / "log" / "model_00001", tiny_model.save_pretrained)
    with pytest.raises(UserError, match=r"log is not a checkpoint: .* Did you mean log/model_00001\?"):
        GPT.from_pretrained("log")
    with pytest.raises(UserError, match=r"log/model_00100 does not exist\. Check the path"):
        GPT.from_pretrained("log/model_00100")
