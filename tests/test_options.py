"""Options of the model that GPT-2's own recipe does not need: dropout, and no biases."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from conftest import ONE_PROCESS, TINY, config_of, losses, run_to_the_end
from torch.nn import functional as F

from support import checkpoint
from support.cli import UserError
from train_gpt2 import GPT, GPTConfig, configure, train

SIZES = dict(block_size=16, vocab_size=257, n_layer=2, n_head=2, n_embd=32)


def trained(out, *flags):
    train(config_of("--out", out, *flags), ONE_PROCESS)
    return (out / "log.txt").read_text()


# ---- dropout


def test_dropout_is_where_gpt2_has_it(monkeypatch):
    """After the embeddings, in the attention, and behind both projections of each block; as Hugging Face's model has it."""
    torch.manual_seed(0)
    model, tokens = GPT(GPTConfig(**SIZES, dropout=0.25)), torch.randint(257, (8, 16))
    attended, dropped = [], []
    attention, drop = F.scaled_dot_product_attention, F.dropout
    monkeypatch.setattr(
        F, "scaled_dot_product_attention", lambda *a, **k: attended.append(k["dropout_p"]) or attention(*a, **k)
    )
    monkeypatch.setattr(
        F, "dropout", lambda x, p, training, inplace: dropped.append((p, training)) or drop(x, p, training)
    )
    results = []
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.register_forward_hook(lambda _m, given, out: results.append((given[0], out)))
    model(tokens, tokens)
    assert attended == [0.25] * 2 and dropped == [(0.25, True)] * 5
    for given, out in results:
        kept = out != 0
        assert kept.float().mean() == pytest.approx(0.75, abs=0.03)
        torch.testing.assert_close(out[kept], given[kept] / 0.75)  # so that the mean stays
    attended.clear(), dropped.clear()
    model.eval()(tokens, tokens)
    assert attended == [0.0] * 2 and dropped == [(0.25, False)] * 5


def test_without_dropout_training_computes_what_scoring_does(tiny_model):
    tokens = torch.randint(257, (4, 16))
    assert torch.equal(tiny_model.train()(tokens)[0], tiny_model.eval()(tokens)[0])


def test_scores_and_samples_are_without_dropout(byte_shards, tmp_path, capsys):
    from transformers import GPT2LMHeadModel

    flags = ["--data", byte_shards, "--max-steps", 5, "--dropout", 0.5]
    trained(tmp_path / "run", *flags, "--checkpoint-every", 5)
    [val] = byte_shards.glob("*_val_*.npy")
    rows = torch.from_numpy(np.load(val)[: 32 * 16 + 1].astype(np.int64))  # 512 tokens, as TINY_FLAGS has it
    x, y = rows[:-1].view(32, 16), rows[1:].view(32, 16)
    theirs = GPT2LMHeadModel.from_pretrained(tmp_path / "run" / "model_00005")
    assert theirs.config.attn_pdrop == theirs.config.resid_pdrop == theirs.config.embd_pdrop == 0.0
    with torch.no_grad():
        expected = F.cross_entropy(theirs(x).logits.flatten(0, 1), y.flatten()).item()
    assert losses(tmp_path / "run" / "log.txt", "val")[-1] == pytest.approx(expected, abs=1e-4)


def test_dropout_changes_what_is_trained_and_after_an_evaluation_too(byte_shards, tmp_path):
    flags = ["--data", byte_shards, "--max-steps", 7, "--checkpoint-every", 0]
    without, much = (trained(tmp_path / f"{p}", *flags, "--dropout", p) for p in (0.0, 0.5))
    never_evaluated = trained(tmp_path / "never", *flags, "--dropout", 0.5, "--val-every", 0)
    train_lines = [[line for line in log.splitlines() if "train" in line] for log in (without, much, never_evaluated)]
    assert train_lines[0][0] != train_lines[1][0] and train_lines[1] == train_lines[2]


@pytest.mark.parametrize("world", [1, 2])
def test_a_resumed_run_has_the_same_masks(byte_shards, tmp_path, world):
    flags = ["--data", byte_shards, "--dropout", 0.3, "--shuffle", "--checkpoint-every", 3, "--decay-steps", 8]
    run_to_the_end(*flags, "--max-steps", 8, "--out", "straight", cwd=tmp_path, world=world)
    run_to_the_end(*flags, "--max-steps", 3, "--out", "resumed", cwd=tmp_path, world=world)
    run_to_the_end("--resume", "--max-steps", 8, "--out", "resumed", cwd=tmp_path, world=world)
    runs = [tmp_path / name for name in ("straight", "resumed")]
    assert losses(runs[0] / "log.txt") == losses(runs[1] / "log.txt")
    assert len({(run / "model_00008" / "model.safetensors").read_bytes() for run in runs}) == 1


def test_each_step_and_rank_has_other_masks():
    from support import devices

    seeds = {devices.seed(1337, step, rank) for step in range(20) for rank in range(4)}
    assert len(seeds) == 80


# ---- biases


def test_a_model_without_biases_opens_in_huggingface(byte_shards, tmp_path):
    from transformers import GPT2LMHeadModel

    trained(tmp_path / "run", "--data", byte_shards, "--max-steps", 6, "--no-bias", "--checkpoint-every", 3)
    directory = tmp_path / "run" / "model_00006"
    ours, theirs = GPT.from_pretrained(directory), GPT2LMHeadModel.from_pretrained(directory)
    names = [name for name, _ in ours.named_parameters()]
    assert not any(name.endswith("bias") for name in names) and not ours.config.bias
    biases = [tensor for name, tensor in theirs.state_dict().items() if name.endswith(".bias")]
    assert len(biases) == 2 * 6 + 1 and not any(tensor.any() for tensor in biases)
    tokens = torch.randint(257, (2, 16), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(theirs(tokens).logits, ours(tokens)[0], rtol=1e-4, atol=1e-4)
    # and goes on as it was
    state = (tmp_path / "run" / "log.txt").read_text()
    resumed = tmp_path / "resumed"
    resumed.mkdir()
    (tmp_path / "run" / "model_00003").rename(resumed / "model_00003")
    (resumed / "log.txt").write_text(state)
    config, found = configure(["--resume", "--out", str(resumed)])
    train(config, ONE_PROCESS, found)
    assert (resumed / "log.txt").read_text() == state
    assert (resumed / "model_00006" / "model.safetensors").read_bytes() == (
        directory / "model.safetensors"
    ).read_bytes()


def test_biases_are_the_only_difference():
    with_them, without = GPT(TINY), GPT(GPTConfig(**SIZES, bias=False))
    names = [{name for name, _ in model.named_parameters()} for model in (with_them, without)]
    assert names[1] < names[0] and all(name.endswith(".bias") for name in names[0] - names[1])
    without.load_state_dict(
        {name: tensor for name, tensor in with_them.state_dict().items() if name in without.state_dict()}
    )
    tokens = torch.randint(257, (2, 16))
    assert torch.equal(with_them(tokens)[0], without(tokens)[0])  # all biases of a new model are zero


def test_a_bias_that_is_not_zero_is_not_dropped(tiny_model, tmp_path):
    import json

    torch.nn.init.ones_(tiny_model.transformer.h[0].mlp.c_fc.bias)
    tiny_model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"bias": False}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="transformer.h.0.mlp.c_fc.bias, which GPT-2 does not"):
        GPT.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    "flags, problem",
    [
        (["--dropout", "1"], "--dropout is 1.0. It must be less than 1."),
        (["--dropout", "-0.1"], "--dropout is -0.1. It must be 0 or more."),
        (["--init-from", "gpt2", "--no-bias"], "--init-from brings its own sizes. Leave out --no-bias."),
    ],
)
def test_bad_options(flags, problem):
    with pytest.raises(UserError) as error:
        configure(flags)
    assert error.value.problems == (problem,)


def test_a_resume_keeps_both(byte_shards, tmp_path):
    out = tmp_path / "run"
    trained(out, "--data", byte_shards, "--max-steps", 2, "--no-bias", "--dropout", 0.1)
    config, found = configure(["--resume", "--out", str(out)])
    assert (config.bias, config.dropout) == (False, 0.1) and "dropout" in checkpoint.read_state(found)["config"]
    with pytest.raises(UserError) as error:
        configure(["--resume", "--out", str(out), "--bias", "--dropout", "0.2"])
    assert [p.split()[0] for p in error.value.problems] == ["--bias", "--dropout"]
