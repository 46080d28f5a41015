"""What a checkpoint holds: files that open in Hugging Face, and a trainer.pt of plain data."""

from __future__ import annotations

import json
import os

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F
from training import trained, trainer_file

from support.checkpoints.state import Checkpoint, TrainState
from train_gpt2 import GPT


def test_a_checkpoint_opens_in_huggingface(byte_shards, tmp_path):
    from transformers import AutoTokenizer, GPT2LMHeadModel, pipeline

    trained(tmp_path / "run", "--data", byte_shards, "--max-steps", 3)
    directory = tmp_path / "run" / "model_00003"
    idx = torch.tensor([list(b"3 + 4 = ")])
    ours = GPT.from_pretrained(directory)(idx)[0]
    torch.testing.assert_close(GPT2LMHeadModel.from_pretrained(directory)(idx).logits, ours, atol=1e-5, rtol=1e-5)
    text = "3 + 4 = é<|endoftext|>\n"
    assert AutoTokenizer.from_pretrained(directory)(text)["input_ids"] == [*"3 + 4 = é".encode(), 256, 10]
    [answer] = pipeline("text-generation", model=str(directory))("3 + 4", max_new_tokens=5, do_sample=False)
    assert answer["generated_text"].startswith("3 + 4") and len(answer["generated_text"]) > 5


def test_a_checkpoint_of_the_fast_recipe_opens_in_huggingface(byte_shards, tmp_path):
    from transformers import AutoTokenizer, GPT2LMHeadModel

    trained(tmp_path / "run", "--data", byte_shards, "--recipe", "fast", "--max-steps", 5)
    directory = tmp_path / "run" / "model_00005"
    theirs, ours = GPT2LMHeadModel.from_pretrained(directory), GPT.from_pretrained(directory)
    tokens = torch.tensor([AutoTokenizer.from_pretrained(directory)("12 + 3 = 15.")["input_ids"]])
    torch.testing.assert_close(theirs(tokens).logits, ours(tokens)[0], rtol=1e-4, atol=1e-4)
    expected = F.cross_entropy(theirs(tokens).logits[0, :-1], tokens[0, 1:])
    torch.testing.assert_close(ours(tokens[:, :-1], tokens[:, 1:])[1], expected, rtol=1e-4, atol=1e-4)


def test_checkpoints_hold_plain_data_and_their_own_checksums(byte_shards, tmp_path):
    trained(tmp_path / "run", "--data", byte_shards, "--max-steps", 3)
    directory = tmp_path / "run" / "model_00003"
    state = trainer_file(directory)
    assert (state["step"], state["config"]["n_embd"]) == (3, 32)
    assert state.keys() == {"step", "bad_steps", "overflows", "config", "data", "optimizer", "scaler"}
    listed = json.loads((directory / "checkpoint.json").read_text())["files"]
    assert sorted([*listed, "checkpoint.json"]) == sorted(os.listdir(directory))
    assert {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "trainer.pt",
    } == listed.keys()
    weights = load_file(directory / "model.safetensors")
    assert weights["transformer.wte.weight"].shape == (257, 32) and "lm_head.weight" not in weights
    assert all(tensor.dtype == torch.float32 for tensor in weights.values())


def new_state(scale: float | None = None) -> TrainState:
    model = torch.nn.Linear(2, 2)
    scaler = torch.amp.GradScaler("cpu", enabled=scale is not None, init_scale=scale or 1.0)
    return TrainState(model, torch.optim.AdamW(model.parameters()), scaler)


@pytest.mark.parametrize(
    "scale, loss, norm, bad_steps, overflows, message",
    [
        (None, 1.0, 1.0, 0, 0, None),
        (None, float("nan"), 1.0, 2, 0, "not finite"),
        (None, 1.0, float("inf"), 2, 0, "not finite"),
        (4.0, 1.0, float("inf"), 0, 1, "fp16 overflow number 1; the gradient scale is now 4"),
        (4.0, float("inf"), float("inf"), 2, 0, "not finite"),  # an overflow leaves the loss finite
        (1.0, 1.0, float("inf"), 2, 0, "not finite"),  # no scale is left to lower
    ],
)
def test_skipped_steps_are_counted(scale, loss, norm, bad_steps, overflows, message):
    state = new_state(scale)
    state.bad_steps = 1
    answer = state.finish_step(loss, norm)
    assert (state.step, state.bad_steps, state.overflows) == (1, bad_steps, overflows)
    assert (answer is None) if message is None else message in answer


def test_a_saved_state_is_restored(tmp_path):
    """And a copy in memory does not follow the training."""
    state = new_state(scale=8.0)
    state.model(torch.ones(1, 2)).sum().backward()
    state.optimizer.step()
    state.finish_step(1.0, float("inf"))
    content = state.trainer_file({"seed": 1}, {"train": [["a", 1, None]], "val": [], "base": None})
    state.optimizer.step()
    torch.save(content, tmp_path / "trainer.pt")
    restored, checkpoint = new_state(scale=2.0), Checkpoint.open(tmp_path)
    restored.restore(checkpoint)
    assert (restored.step, restored.bad_steps, restored.overflows) == (1, 0, 1)
    assert restored.scaler.get_scale() == 8.0 and checkpoint.config == {"seed": 1}
    moments = [s["exp_avg"] for s in restored.optimizer.state.values()]
    saved = [s["exp_avg"] for s in content["optimizer"]["state"].values()]
    assert len(moments) == 2 and all(torch.equal(a, b) for a, b in zip(moments, saved, strict=True))
    assert next(iter(restored.optimizer.state.values()))["step"] == 1  # not 2
