"""What a checkpoint holds: files that open in Hugging Face, and a trainer.pt of plain data."""

from __future__ import annotations

import json
import math
import os

import pytest
import torch
from safetensors.torch import load_file
from training import trained, trainer_file

from support import __version__
from support.checkpoints.state import Checkpoint, TrainState
from support.cli import UserError
from train_gpt2 import GPT


@pytest.fixture(scope="module")
def directory(byte_shards, tmp_path_factory):
    """The checkpoint of a run of the fast recipe."""
    out = tmp_path_factory.mktemp("run")
    trained(out, "--data", byte_shards, "--recipe", "fast", "--max-steps", 3)
    return out / "model_00003"


def test_a_checkpoint_opens_in_huggingface(directory):
    from transformers import AutoTokenizer, GPT2LMHeadModel, pipeline

    text = "3 + 4 = é<|endoftext|>\n"
    idx = AutoTokenizer.from_pretrained(directory)(text, return_tensors="pt")["input_ids"]
    assert idx.tolist() == [[*"3 + 4 = é".encode(), 256, 10]]
    theirs, ours = GPT2LMHeadModel.from_pretrained(directory), GPT.from_pretrained(directory)
    torch.testing.assert_close(theirs(idx).logits, ours(idx)[0], atol=1e-5, rtol=1e-5)
    loss = ours(idx[:, :-1], idx[:, 1:])[1]
    torch.testing.assert_close(theirs(idx, labels=idx).loss, loss, atol=1e-5, rtol=1e-5)
    [answer] = pipeline("text-generation", model=str(directory))("3 + 4", max_new_tokens=5, do_sample=False)
    assert answer["generated_text"].startswith("3 + 4") and len(answer["generated_text"]) > 5


def test_checkpoints_hold_plain_data_and_their_own_checksums(directory):
    state = trainer_file(directory)
    assert (state["step"], state["config"]["n_embd"]) == (3, 32)
    assert {*state} == {
        *"version run step row tokens progress last_progress seconds bad_steps overflows".split(),
        *"config sources data parameters optimizer scaler".split(),
    }
    assert (state["row"], state["tokens"]) == (3 * 256 // 16, 3 * 256)
    assert state["progress"] == 1.0 and state["seconds"] > 0
    listed = json.loads((directory / "checkpoint.json").read_text())["files"]
    assert sorted([*listed, "checkpoint.json", "README.md"]) == sorted(os.listdir(directory))
    names = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "trainer.pt"}
    assert listed.keys() == names
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
    answer = state.skip_reason(loss, norm)
    assert (state.bad_steps, state.overflows) == (bad_steps, overflows)
    assert (answer is None) if message is None else message in answer


DATA = {"train": [["a", 1, "1234"]], "val": [], "base": None, "source": None}


def test_a_checkpoint_that_is_overdue_waits_for_a_good_step():
    state = new_state()
    found = []
    for loss in (1.0, math.nan, 1.0):
        state.skip_reason(loss, 1.0)
        state.advance(0.0, 1.0, 64, 1, overdue=True)
        found.append(state.overdue)
    assert found == [True, False, True]


@pytest.fixture
def content():
    """That of a trainer.pt after a step that overflowed, and a step after that, which is not in it."""
    state = new_state(scale=8.0)
    state.model(torch.ones(1, 2)).sum().backward()
    state.optimizer.step()
    state.skip_reason(1.0, float("inf"))
    state.advance(0.25, 8.0, 640, 10)
    content = state.trainer_file("a", {"seed": 1, "optimizer": "adamw"}, {"seed": "default"}, DATA)
    state.optimizer.step()
    return content


def restored(content, folder) -> TrainState:
    """Another state after it was restored from this content."""
    folder.mkdir(exist_ok=True)
    torch.save(content, folder / "trainer.pt")
    state = new_state(scale=2.0)
    state.restore(Checkpoint.open(folder), DATA, "adamw", forked=False)
    return state


def test_a_saved_state_is_restored(content, tmp_path):
    """The groups of the optimizer, and the rest of the scaler, follow from the flags."""
    content["optimizer"]["param_groups"] = "not read"
    content["scaler"]["growth_factor"] = "not read"
    state, expected = restored(content, tmp_path), new_state(scale=8.0)
    assert (state.step, state.row, state.tokens, state.bad_steps, state.overflows) == (1, 10, 640, 0, 1)
    assert (state.progress, state.last_progress, state.seconds) == (0.25, 0.0, 8.0)  # what was due then still is
    assert state.scaler.state_dict() == expected.scaler.state_dict()
    assert state.optimizer.param_groups[0]["betas"] == expected.optimizer.param_groups[0]["betas"]
    saved = content["optimizer"]["state"]
    torch.testing.assert_close(state.optimizer.state_dict()["state"], saved, rtol=0, atol=0)
    assert len(saved) == 2 and all(tensors["step"] == 1 for tensors in saved.values())


@pytest.mark.parametrize(
    "version, missing",
    [
        ("1", {"version", "run", "row", "tokens", "last_progress"}),
        ("2.0", {"version", "run", "row"}),
        (__version__, {"overflows"}),  # while that version was made
    ],
)
def test_a_checkpoint_of_another_version_says_so(content, tmp_path, version, missing):
    for name in missing:
        del content[name]
    message = rf"was written by another version of the trainer \({version}\), .* Start from its weights.*--init-from"
    with pytest.raises(UserError, match=message):
        restored(content, tmp_path)


def test_a_file_of_another_program_is_refused(content, tmp_path):
    del content["optimizer"]
    with pytest.raises(UserError, match="trainer.pt is corrupt, or was not written by this trainer"):
        restored(content, tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content["optimizer"]["state"].pop(0),
        lambda content: content["optimizer"]["state"][0].update(exp_avg=torch.zeros(2)),
        lambda content: content["parameters"].reverse(),  # tensors of one shape would silently change places
        lambda content: content["parameters"].append("more"),
        lambda content: content["parameters"].clear(),
    ],
)
def test_a_state_of_other_parameters_is_refused(content, tmp_path, change):
    change(content)
    with pytest.raises(UserError, match="trainer.pt belongs to a model whose parameters differ"):
        restored(content, tmp_path)
