"""Training in one process: what is evaluated and when, starting points, and bad input. test_plain_loop.py has the losses."""

import json
import math
import os
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import (
    TINY_FLAGS,
    TINY_TRAINING_FLAGS,
    finish_run,
    losses,
    start_torchrun,
)
from torch.nn import functional as F
from training import FP32, NEW_RUN, ONE_PROCESS, TINY, config_of, configure, forked, train, trained

import train_gpt2
from support.checkpoints.history import read_starts
from support.cli import UserError, run_cli
from support.console.log import read_log
from support.data import shards
from support.data.make_shards import make_shards
from support.data.text_files import Documents
from support.runtime.machine import Machine
from support.runtime.signals import StopHandler
from train_gpt2 import GPT, DataLoaderLite, validation_loss

# ---- evaluation


@pytest.mark.parametrize("tokens, rows", [(10**9, None), (16 * 7 + 5, 7), (16, 1)])
@pytest.mark.parametrize("B", [1, 4, 5])
def test_validation_is_the_mean_over_its_rows(byte_shards, tiny_model, tokens, rows, B):
    [val] = [np.load(p).astype(int) for p in byte_shards.glob("*_val_*.npy")]
    all_rows = torch.tensor(np.array([val[i : i + 17] for i in range(0, len(val) - 16, 16)]))[:rows]
    logits = tiny_model(all_rows[:, :-1])[0]
    expected = F.cross_entropy(logits.flatten(0, 1), all_rows[:, 1:].flatten()).item()
    loader = DataLoaderLite(shards.open_shards(byte_shards, "val"), B, 16, vocab_size=257)
    measured = validation_loss(tiny_model, loader, tokens, StopHandler(), FP32)
    assert measured == pytest.approx(expected, abs=1e-5)


def test_when_things_are_evaluated(byte_shards, tmp_path, capsys):
    flags = ["--prompt", "30 + 12 =", *"--max-steps 7 --val-every 3 --sample-every 3 --checkpoint-every 4".split()]
    log = trained(tmp_path / "run", "--data", byte_shards, *flags)
    assert [line.split()[0] for line in log.splitlines() if " val " in line] == ["0", "3", "6", "7"]
    assert [line.split()[:2] for line in log.splitlines()][:3] == [["0", "val"], ["0", "train"], ["0", "lr"]]
    out = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in out if "| sample 0: 30 + 12 =" in line] == ["3", "6", "7"]
    assert sum(": 30 + 12 =" in line for line in out) == 3 * 4
    assert sorted(p.name for p in (tmp_path / "run").glob("model_*")) == ["model_00004", "model_00007"]
    off = trained(tmp_path / "off", "--data", byte_shards, "--max-steps", 2, "--val-every", 0, "--checkpoint-every", 0)
    assert "val" not in off and not list((tmp_path / "off").glob("model_*"))


def test_losses_per_byte_are_of_the_validated_tokens(tmp_path, capsys):
    """Their bytes are counted in the decoded text: its tokens are long at first, then short, as in the train split."""
    letters = "".join(np.random.default_rng(0).choice([*"abcdefghijklmnopqrstuvwxyz"], 9000))
    texts = Documents("two languages", [letters[:5000], "the same few words again and again " * 400 + letters[5000:]])
    make_shards(texts, tmp_path / "data", tokenizer="bpe", vocab_size=300, shard_size=1500, val_fraction=0.5)
    trained(tmp_path / "run", "--data", tmp_path / "data", "--max-steps", 2, "--val-tokens", 2000 + 5)
    split = [np.load(path) for path in sorted((tmp_path / "data").glob("*_val_*.npy"))]
    targets = np.concatenate([split[0][1 : 93 * 16 + 1], split[1][1 : 32 * 16 + 1]])  # of 125 rows of 16 tokens
    per_token = len(shards.read_tokenizer(tmp_path / "data").decode(targets).encode()) / 2000
    assert read_starts(tmp_path / "run")[0]["data"]["bytes_per_token"] == pytest.approx(per_token)
    loss = losses(tmp_path / "run" / "log.txt", "val")[-1]
    card, output = (tmp_path / "run" / "model_00002" / "README.md").read_text(), capsys.readouterr().out
    assert f"vocabulary 300; validation on 2,000 tokens of {per_token:.2f} bytes\n" in output  # not the train split's
    trained(tmp_path / "off", "--data", tmp_path / "data", "--max-steps", 1, "--val-every", 0)
    assert "vocabulary 300\n" in capsys.readouterr().out
    assert f"| val loss: {loss:.4f} over 2,000 tokens\n" in output
    for text in (card, output):
        assert f"{loss:.4f} nats per token, {loss / per_token:.4f} per byte" in text
    assert "per byte, over 2,000 tokens (step 2)" in card


def test_the_logged_norm_is_that_before_clipping(byte_shards, tmp_path):
    """The norm of the gradient of the 16 rows of a step, in one batch."""
    trained(tmp_path / "run", "--data", byte_shards, "--max-steps", 1, "--grad-clip", 0.01)
    torch.manual_seed(1337)
    model, tokens = GPT(TINY), torch.from_numpy(np.load(sorted(byte_shards.glob("*_train_*.npy"))[0]).astype(np.int64))
    model(tokens[:256].view(16, 16), tokens[1:257].view(16, 16))[1].backward()
    expected = math.sqrt(sum(parameter.grad.square().sum().item() for parameter in model.parameters()))
    assert expected > 0.1 and losses(tmp_path / "run" / "log.txt", "norm") == [pytest.approx(expected, rel=1e-4)]


def test_evaluations_find_no_gradients(byte_shards, tmp_path, monkeypatch):
    """With FSDP, they gather all weights in the memory that gradients had: the first must not fit where the next does not."""
    real, found = train_gpt2.evaluate, []

    def evaluate(setup, *args):
        found.append([parameter.grad for parameter in setup.model.parameters()])
        return real(setup, *args)

    monkeypatch.setattr(train_gpt2, "evaluate", evaluate)
    trained(tmp_path, "--data", byte_shards, "--max-steps", 2, "--val-every", 1)
    assert len(found) == 3 and not any(gradient is not None for gradients in found for gradient in gradients)


def test_a_clip_of_zero_clips_nothing(byte_shards, tmp_path):
    """As one above any norm."""
    flags = ["--data", byte_shards, "--max-steps", 3, "--grad-clip"]
    none, huge, small = (trained(tmp_path / str(clip), *flags, clip) for clip in (0, 1e9, 1e-3))
    assert none == huge != small


def test_the_betas_are_how_much_adamw_remembers(byte_shards, tmp_path):
    """Its averages take 1 - beta1 of the first gradient, and 1 - beta2 of its square. Adam corrects for that, and moves the same."""
    flags = ["--data", byte_shards, "--max-steps", 1]
    usual = train(
        config_of("--out", tmp_path / "usual", *flags), ONE_PROCESS, NEW_RUN
    )  # 0.9 and 0.95: a tenth, and a twentieth
    other = train(config_of("--out", tmp_path / "other", *flags, "--beta1", 0.5, "--beta2", 0), ONE_PROCESS, NEW_RUN)
    for a, b in zip(usual.model.parameters(), other.model.parameters(), strict=True):
        had, has = usual.optimizer.state[a], other.optimizer.state[b]
        torch.testing.assert_close(has["exp_avg"], 5 * had["exp_avg"], rtol=1e-5, atol=0)
        torch.testing.assert_close(has["exp_avg_sq"], 20 * had["exp_avg_sq"], rtol=1e-5, atol=0)
        torch.testing.assert_close(b, a, rtol=0, atol=1e-6)  # of a step of 1e-3


# ---- shards of other tools, HellaSwag, other starting points


@pytest.fixture
def gpt2_shards(tmp_path, monkeypatch):
    """A folder in build-nanogpt's layout. The vocabulary is stood in for by bytes with GPT-2's size and end-of-text."""
    from support.data.tokenizer import BytesTokenizer

    class Gpt2Sized(BytesTokenizer):
        name, vocab_size = "gpt2", 50257

        def decode(self, ids):
            return f"{len(ids)} tokens"

    monkeypatch.setattr(shards, "read_tokenizer", lambda *folders: Gpt2Sized())
    data = tmp_path / "edu_fineweb10B"
    data.mkdir()
    rng = np.random.default_rng(0)
    for name in ("edufineweb_val_000000", "edufineweb_train_000001", "edufineweb_train_000002"):
        np.save(data / name, rng.integers(0, 50257, 3000, dtype=np.uint16))
    return data


def test_shards_without_a_manifest_train_as_gpt2_tokens_with_hellaswags_scores(gpt2_shards, tmp_path, capsys):
    items = tmp_path / "items.jsonl"
    texts = [("A man sits on a roof.", i, ["falls", "sleeps", "sings a song", "rips up tiles"]) for i in range(4)]
    items.write_text("".join(json.dumps({"ctx": c, "label": i, "endings": e}) + "\n" for c, i, e in texts))
    flags = ["--data", gpt2_shards, "--max-steps", 4, "--hellaswag-every", 2, "--hellaswag-data", items]
    # The same endings with each label once: whatever the model prefers, it is right for one of the four.
    trained(tmp_path / "run", *flags)
    log = read_log(tmp_path / "run" / "log.txt")
    assert log["hella"] == {0: 0.25, 2: 0.25, 4: 0.25} and log["val"][0] == pytest.approx(math.log(50257), abs=0.1)
    card = (tmp_path / "run" / "model_00004" / "README.md").read_text()
    assert "**HellaSwag**: acc_norm 0.2500 on 4 items, in contexts of 16 tokens (step 4)\n" in card
    out = capsys.readouterr().out
    assert re.search(r"step     2 \| HellaSwag acc_norm: 0\.2500 ± 0\.2500 on 4 items \| \d+\.\ds\n", out)


def on_a_gpu(monkeypatch):
    """HellaSwag is scored though no flag asks for it."""
    find = Machine.find
    monkeypatch.setattr(Machine, "find", lambda *args: replace(find(*args), hellaswag_every=1))


def unreachable():
    raise UserError("cannot download it.")


def test_training_continues_without_hellaswag_unless_a_flag_asks_for_it(gpt2_shards, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("hellaswag.download", unreachable)
    flags = ["--data", gpt2_shards, "--max-steps", 2]
    for asked in ("--hellaswag-every", "--hellaswag-limit"):
        with pytest.raises(UserError, match="cannot download it"):
            trained(tmp_path / "asked", *flags, "--hellaswag-every", 1, asked, 1)
    assert not (tmp_path / "asked").exists()
    on_a_gpu(monkeypatch)
    train(replace(config_of(*flags, "--out", tmp_path / "run"), hellaswag_every=None), ONE_PROCESS, NEW_RUN)
    out, log = capsys.readouterr().out, read_log(tmp_path / "run" / "log.txt")
    assert "hella" not in log and losses(tmp_path / "run" / "log.txt")[1:]
    assert -1 < out.find("note    no scores: cannot download it.") < out.index("step     0")


def test_hellaswag_on_other_tokens_is_an_error_if_a_flag_asks_for_it(byte_shards, tmp_path, capsys, monkeypatch):
    flags = ["--data", byte_shards, "--max-steps", 1]
    problem = "on GPT-2 tokens, but .* has bytes tokens. Train with --tokenizer gpt2, or "
    for name, value in (("every", 1), ("data", "items.jsonl"), ("limit", 5)):
        with pytest.raises(UserError, match=problem):
            trained(tmp_path / name, *flags, "--hellaswag-every", 1, f"--hellaswag-{name}", value)
    on_a_gpu(monkeypatch)
    train(replace(config_of(*flags, "--out", tmp_path / "run"), hellaswag_every=None), ONE_PROCESS, NEW_RUN)
    out = capsys.readouterr().out.replace("\n        ", " ")
    assert "note    no scores: HellaSwag is defined on GPT-2 tokens, but " in out


def test_pretrained_weights_train_with_a_shorter_context(byte_shards, tmp_path):
    """The first positions are those of the weights: the loss before training is Hugging Face's on shorter rows."""
    from transformers import GPT2LMHeadModel

    trained(tmp_path / "first", "--data", byte_shards, "--max-steps", 8)
    directory, out = tmp_path / "first" / "model_00008", tmp_path / "second"
    flags = [*TINY_TRAINING_FLAGS, "--data", byte_shards, "--init-from", directory, "--max-steps", 2]
    train(configure([*flags, "--out", out, "--block-size", 8])[0], ONE_PROCESS, NEW_RUN)
    [val] = byte_shards.glob("*_val_*.npy")
    rows = np.load(val)[: 64 * 8 + 1].astype(np.int64)  # 512 tokens, as in TINY_FLAGS
    x, y = torch.from_numpy(rows[:-1]).view(64, 8), torch.from_numpy(rows[1:]).view(64, 8)
    with torch.no_grad():
        expected = F.cross_entropy(GPT2LMHeadModel.from_pretrained(directory)(x).logits.flatten(0, 1), y.flatten())
    assert losses(out / "log.txt", "val")[0] == pytest.approx(expected.item(), abs=1e-4)
    assert GPT2LMHeadModel.from_pretrained(out / "model_00002").config.n_positions == 8
    assert forked(tmp_path / "longer", out / "model_00002", "--max-steps", 3).model.config.block_size == 8
    with pytest.raises(UserError, match="context of 16 tokens. Leave out --block-size, or lower it."):
        train(configure([*flags, "--out", tmp_path / "third", "--block-size", 32])[0], ONE_PROCESS, NEW_RUN)
    with pytest.raises(UserError, match="--block-size is 4, but the run in .* has 8. Leave it out."):
        configure(["--resume", "--out", out, "--block-size", 4])


# ---- bad input: one line per problem, exit code 2, nothing written


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--data nowhere", 'there is no folder nowhere. Name one with shards, make them with "python fineweb.py", or try it all with "--demo".'),
        ("--data book.txt", "book.txt is a file, not a folder of shards. To train on a text, pass it with --text."),
        ("--total-batch-size 1000", "--total-batch-size 1000 is not a multiple of 16, the context of 16 tokens times 1 processes. Use 992 or 1008."),
        ("--val-tokens 15", "no row of 16 tokens to validate on"),
        ("--adamw-lr 1e-3", "--adamw-lr 0.001 needs --optimizer muon and a --max-lr above 0. Change these, or leave it out."),
        ("--min-lr 1", "--min-lr 1 is above --max-lr 0.003. Lower it."),
        ("--n-embd 1000000", "the model has 24,000,301,000,000 parameters, which take 96,001.2 GB"),
        ("--out /proc/nowhere", "cannot write to /proc/nowhere"),
        ("--resume", "no checkpoint in log to resume from"),
    ],
)  # fmt: skip
def test_bad_flags(byte_shards, tmp_path, monkeypatch, capsys, flags, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "book.txt").touch()
    with pytest.raises(SystemExit) as exit:
        run_cli(lambda: train_gpt2.main([*TINY_FLAGS, "--data", str(byte_shards), *flags.split()]))
    captured = capsys.readouterr()
    assert exit.value.code == 2
    assert message in captured.err and captured.err.startswith("error: ") and captured.err.count("\n") == 1
    assert os.listdir(tmp_path) == ["book.txt"]  # nothing that would be in the way of the corrected command


@pytest.mark.slow
def test_errors_end_all_ranks_with_one_message(tmp_path):
    flags, output = ["--data", "nowhere", "--device", "cpu"], tmp_path / "output.txt"
    torchrun = start_torchrun("--standalone --nproc_per_node=2", *flags, cwd=tmp_path, output=output)
    assert finish_run([torchrun]) == [1]  # torchrun's own
    printed = output.read_text()
    assert printed.count("error: there is no folder nowhere.") == 1 and 'train_gpt2.py", line' not in printed
    assert any("there is no folder nowhere." in line for line in printed.splitlines()[-3:])  # of torchrun's report
