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
from support.cli import UserError
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
    assert state.keys() == {"step", "bad_steps", "overflows", "config", "data", "parameters", "optimizer", "scaler"}
    listed = json.loads((directory / "checkpoint.json").read_text())["files"]
    assert sorted([*listed, "checkpoint.json", "README.md"]) == sorted(os.listdir(directory))
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
    answer = state.record(loss, norm)
    assert (state.bad_steps, state.overflows) == (bad_steps, overflows)
    assert (answer is None) if message is None else message in answer


def test_a_saved_state_is_restored(tmp_path):
    """And a copy in memory does not follow the training."""
    state = new_state(scale=8.0)
    state.model(torch.ones(1, 2)).sum().backward()
    state.optimizer.step()
    state.record(1.0, float("inf"))
    state.step += 1
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


def saved_state() -> dict:
    """The content of a valid trainer.pt after a step."""
    state = new_state(scale=8.0)
    state.model(torch.ones(1, 2)).sum().backward()
    state.optimizer.step()
    state.record(1.0, 1.0)
    state.step += 1
    return state.trainer_file({"seed": 1}, {"train": [["a", 1, None]], "val": [], "base": None})


@pytest.mark.parametrize("name", ["step", "config", "optimizer"])
def test_a_file_of_another_program_is_refused(tmp_path, name):
    content = saved_state()
    del content[name]
    torch.save(content, tmp_path / "trainer.pt")
    with pytest.raises(UserError, match=f"trainer.pt was not written by this trainer \\(it has no {name}\\)"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda state: state.pop(0), "has 2 parameters, and the state belongs to 1"),
        (lambda state: state[0].update(exp_avg=torch.zeros(2)), "exp_avg of the optimizer's parameter 0"),
    ],
)
def test_tensors_that_do_not_fit_the_optimizer_are_named(tmp_path, change, message):
    content = saved_state()
    change(content["optimizer"]["state"])
    torch.save(content, tmp_path / "trainer.pt")
    with pytest.raises(UserError, match=f"trainer.pt does not fit the run .*{message}"):
        new_state(scale=8.0).restore(Checkpoint.open(tmp_path))


@pytest.mark.parametrize("change", [list.reverse, lambda names: names.append("more"), lambda names: names.clear()])
def test_parameters_in_another_order_are_refused(tmp_path, change):
    """Their state is stored by number: tensors of one shape would silently change places."""
    content = saved_state()
    content["parameters"] = new_state(scale=8.0).parameter_names()
    torch.save(content, tmp_path / "trainer.pt")
    new_state(scale=8.0).restore(Checkpoint.open(tmp_path))
    change(content["parameters"])
    torch.save(content, tmp_path / "trainer.pt")
    with pytest.raises(UserError, match="its parameters have other names, or another order"):
        new_state(scale=8.0).restore(Checkpoint.open(tmp_path))


def test_the_rest_of_the_optimizer_follows_from_the_flags(tmp_path):
    content = saved_state()
    content["optimizer"]["param_groups"] = "not read"
    content["scaler"]["growth_factor"] = "not read"
    torch.save(content, tmp_path / "trainer.pt")
    state, expected = new_state(scale=2.0), new_state(scale=2.0)
    state.restore(Checkpoint.open(tmp_path))
    assert state.optimizer.param_groups[0]["betas"] == expected.optimizer.param_groups[0]["betas"]
    assert state.scaler.state_dict() == expected.scaler.state_dict() | {"scale": 8.0}


def test_the_step_is_that_of_the_folder(tmp_path):
    (tmp_path / "model_00002").mkdir()
    torch.save(saved_state(), tmp_path / "model_00002" / "trainer.pt")
    with pytest.raises(UserError, match="trainer.pt belongs to step 1"):
        Checkpoint.open(tmp_path / "model_00002")


def test_a_pickle_that_ends_early_is_not_readable(tmp_path):
    """torch.load raises a UnicodeDecodeError for this one."""
    import zipfile

    torch.save(saved_state(), tmp_path / "good.pt")
    with zipfile.ZipFile(tmp_path / "good.pt") as good, zipfile.ZipFile(tmp_path / "trainer.pt", "w") as bad:
        for name in good.namelist():
            bad.writestr(name, good.read(name).replace(b"bad_steps", b"bad\xffsteps"))
    with pytest.raises(UserError, match="trainer.pt is truncated or corrupt"):
        Checkpoint.open(tmp_path)
