"""The loop against the same training written out plainly, and against itself done another way."""

import dataclasses
import json
import math
import os
import re
import shutil

import numpy as np
import pytest
import torch
from conftest import ONE_PROCESS, TINY, TINY_FLAGS, config_of, losses, run_script, run_to_the_end
from torch.nn import functional as F

import train_gpt2
from support import checkpoint, shards
from support.cli import UserError
from train_gpt2 import GPT, DataLoaderLite, TrainConfig, configure, get_lr, train, validation_loss


def losses_of(log, name):
    """The values of one kind in a log, by step."""
    return {int(s): float(v) for s, kind, v in (line.split() for line in log.splitlines()) if kind == name}


def checkpoints_of(out):
    return [checkpoint.step_of(directory) for directory in checkpoint.by_step(out)]


def trained(folder, *flags, resume_from=None):
    """A run in this process; its log as text."""
    train(config_of("--out", folder, *flags), ONE_PROCESS, resume_from)
    return (folder / "log.txt").read_text()


# ---- the schedule


def test_learning_rates_by_hand():
    config = TrainConfig(max_lr=1.0, min_lr=0.1, warmup_steps=10, decay_steps=110, max_steps=1000)
    quarter = 0.1 + 0.9 * (1 + math.sqrt(0.5)) / 2
    expected = {0: 0.1, 4: 0.5, 9: 1.0, 10: 1.0, 35: quarter, 60: 0.55, 85: 1.1 - quarter, 110: 0.1, 999: 0.1}
    for step, lr in expected.items():
        assert get_lr(step, config) == pytest.approx(lr), step


def test_the_recipe():
    config = TrainConfig()
    assert (config.max_lr, config.min_lr, config.warmup_steps, config.decay_steps) == (
        6e-4,
        pytest.approx(6e-5),
        715,
        19073,
    )
    assert get_lr(0, config) == pytest.approx(6e-4 / 715) and get_lr(19073, config) == config.min_lr
    assert config.total_batch_size == 2**19 and (config.beta1, config.beta2, config.weight_decay) == (0.9, 0.95, 0.1)


# ---- the step


def test_losses_equal_a_plain_loop_with_huggingfaces_model(byte_shards, tmp_path):
    """20 updates of 4 micro-batches, written out with another model, one big batch, and the rows cut by hand."""
    from transformers import GPT2LMHeadModel

    flags = ["--data", byte_shards, "--max-steps", 20, "--beta2", 0.99, "--weight-decay", 0.2]
    trained(tmp_path / "run", *flags)
    config = config_of(*flags)
    torch.manual_seed(config.seed)
    start = GPT(TINY)
    start.save_pretrained(tmp_path / "start")
    model = GPT2LMHeadModel.from_pretrained(tmp_path / "start")
    decay = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": decay, "weight_decay": 0.2}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.99), eps=1e-8)

    parts = [np.load(p) for p in sorted(byte_shards.glob("*_train_*.npy"))]
    rows = [p[i : i + 17] for p in parts for i in range(0, len(p) - 16, 16)]
    expected = []
    for step in range(20):
        batch = torch.tensor(np.array([rows[i % len(rows)] for i in range(step * 16, step * 16 + 16)]).astype(int))
        loss = F.cross_entropy(model(batch[:, :-1]).logits.flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = get_lr(step, config)
        optimizer.step()
        expected.append(loss.item())
    measured = losses(tmp_path / "run" / "log.txt")
    np.testing.assert_allclose(measured, expected, atol=2e-5)
    assert measured[-1] < measured[0] - 1


@pytest.mark.parametrize("batch_size", [1, 2, 8, 16, 64])
def test_the_micro_batch_changes_nothing(byte_shards, tmp_path, batch_size):
    flags = ("--data", byte_shards, "--max-steps", 10, "--shuffle")
    trained(tmp_path / "a", *flags)
    trained(tmp_path / "b", *flags, "--batch-size", batch_size)
    for name in ("train", "val"):
        a, b = (losses(tmp_path / run / "log.txt", name) for run in "ab")
        np.testing.assert_allclose(a, b, atol=1.01e-4 if name == "val" else 1e-5)


def test_losses_do_not_depend_on_processes_and_micro_batch(byte_shards, tmp_path):
    """20 updates on 1, 2 and 4 processes, in micro-batches of 1, 2 and 4 rows, and resumed from one to the other."""
    flags = ["--data", byte_shards, "--shuffle", "--max-steps", 20, "--decay-steps", 20]
    layouts = [(1, 4), (1, 1), (1, 2), (2, 1), (2, 2), (2, 4), (4, 1), (4, 2), (4, 4)]
    logs = []
    for world, B in layouts:
        out = f"{world}x{B}"
        run_to_the_end(*flags, "--out", out, "--batch-size", B, "--checkpoint-every", 0, cwd=tmp_path, world=world)
        logs.append(tmp_path / out / "log.txt")
    for stop, (world, B) in zip((5, 10, 15, 20), [(4, 1), (1, 4), (2, 2), (4, 4)], strict=True):
        again = ["--resume", "auto", "--out", "moved", "--max-steps", stop, "--batch-size", B]
        run_to_the_end(*flags, *again, cwd=tmp_path, world=world)
    logs.append(tmp_path / "moved" / "log.txt")
    assert checkpoints_of(tmp_path / "moved") == [5, 10, 15, 20]
    order = [line.split()[:2] for line in logs[0].read_text().splitlines()]
    assert len(order) == 25  # 20 updates, 5 validations
    for path in logs:
        assert [line.split()[:2] for line in path.read_text().splitlines()] == order  # each once, by rank 0 alone
        np.testing.assert_allclose(losses(path), losses(logs[0]), rtol=0, atol=1e-5)
        np.testing.assert_allclose(losses(path, "val"), losses(logs[0], "val"), rtol=0, atol=1.01e-4)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_lower_precision_follows_fp32(byte_shards, tmp_path, dtype):
    flags = ("--data", byte_shards, "--max-steps", 12, "--checkpoint-every", 6)
    trained(tmp_path / "fp32", *flags)
    trained(tmp_path / dtype, *flags, "--dtype", dtype)
    a, b = losses(tmp_path / "fp32" / "log.txt"), losses(tmp_path / dtype / "log.txt")
    assert a != b
    np.testing.assert_allclose(a, b, atol=0.03)
    scaler = checkpoint.read_state(tmp_path / dtype / "model_00012")["scaler"]
    assert bool(scaler) == (dtype == "fp16")


def test_the_compiled_run_gives_the_same_losses_and_all_evaluations(byte_shards, tmp_path):
    flags = ("--data", byte_shards, "--max-steps", 6, "--sample-every", 3, "--n-layer", 1)
    trained(tmp_path / "eager", *flags)
    trained(tmp_path / "compiled", *flags, "--compile")
    a, b = (tmp_path / run / "log.txt" for run in ("eager", "compiled"))
    np.testing.assert_allclose(losses(a), losses(b), atol=1e-5)
    np.testing.assert_allclose(losses(a, "val"), losses(b, "val"), atol=1.01e-4)
    saved = GPT.from_pretrained(tmp_path / "compiled" / "model_00006")  # no prefix of the compiler in the names
    assert torch.isfinite(saved(torch.zeros(1, 4, dtype=torch.long))[0]).all()


def test_no_compiler_is_a_notice(byte_shards, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", "")
    trained(tmp_path / "run", "--data", byte_shards, "--max-steps", 2, "--compile")
    assert "running eagerly: torch.compile needs a C++ compiler" in capsys.readouterr().out


# ---- evaluation


@pytest.mark.parametrize("tokens, rows", [(10**9, None), (16 * 7 + 5, 7), (16, 1)])
@pytest.mark.parametrize("B", [1, 4, 5])
def test_validation_is_the_mean_over_its_rows(byte_shards, tiny_model, tokens, rows, B):
    [val] = [np.load(p).astype(int) for p in byte_shards.glob("*_val_*.npy")]
    all_rows = torch.tensor(np.array([val[i : i + 17] for i in range(0, len(val) - 16, 16)]))[:rows]
    logits = tiny_model(all_rows[:, :-1])[0]
    expected = F.cross_entropy(logits.flatten(0, 1), all_rows[:, 1:].flatten()).item()
    loader = DataLoaderLite(shards.open_shards(byte_shards, "val"), B, 16, vocab_size=257)
    amp = torch.autocast("cpu", enabled=False)
    assert validation_loss(tiny_model, loader, tokens, ONE_PROCESS, amp) == pytest.approx(expected, abs=1e-5)


def test_when_things_are_evaluated(byte_shards, tmp_path, capsys):
    log = trained(
        tmp_path / "run",
        "--data",
        byte_shards,
        "--max-steps",
        7,
        "--val-every",
        3,
        "--sample-every",
        3,
        "--checkpoint-every",
        4,
    )
    assert [line.split()[0] for line in log.splitlines() if " val " in line] == ["0", "3", "6", "7"]
    assert [line.split()[:2] for line in log.splitlines()][:3] == [["0", "val"], ["0", "train"], ["1", "train"]]
    out = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in out if "| sample 0:" in line] == ["3", "6", "7"]
    assert sorted(p.name for p in (tmp_path / "run").glob("model_*")) == ["model_00004", "model_00007"]
    off = trained(tmp_path / "off", "--data", byte_shards, "--max-steps", 2, "--val-every", 0, "--checkpoint-every", 0)
    assert "val" not in off and not list((tmp_path / "off").glob("model_*"))


def test_the_last_validation_and_checkpoint_are_of_the_last_update(byte_shards, tmp_path):
    trained(tmp_path / "run", "--data", byte_shards, "--max-steps", 7)
    saved = GPT.from_pretrained(tmp_path / "run" / "model_00007")
    loader = DataLoaderLite(shards.open_shards(byte_shards, "val"), 4, 16, vocab_size=257)
    measured = validation_loss(saved, loader, 512, ONE_PROCESS, torch.autocast("cpu", enabled=False))
    assert losses(tmp_path / "run" / "log.txt", "val")[-1] == pytest.approx(measured, abs=6e-5)


# ---- resuming


def weights_of(directory):
    return {name: (directory / name).read_bytes() for name in ("model.safetensors", "config.json", "tokenizer.json")}


@pytest.mark.parametrize("flags", [["--shuffle"], ["--dtype", "fp16"]])
def test_a_resumed_run_is_the_uninterrupted_run(byte_shards, tmp_path, flags, monkeypatch):
    flags = ["--data", byte_shards, "--max-steps", 11, "--checkpoint-every", 4, *flags]
    straight = trained(tmp_path / "straight", *flags)

    class Killed(BaseException):
        pass

    real_step, done = train_gpt2.train_step, []

    def step_or_die(*args):
        if len(done) == 6:
            raise Killed
        done.append(1)
        return real_step(*args)

    out = tmp_path / "resumed"
    monkeypatch.setattr(train_gpt2, "train_step", step_or_die)
    with pytest.raises(Killed):
        trained(out, *flags)
    monkeypatch.undo()
    with open(out / "log.txt", "a") as log:
        log.write("6 tra")  # a line that was being written
    config, directory = configure(["--resume", "--out", str(out)])
    assert directory.name == "model_00004"
    train(config, ONE_PROCESS, directory)
    assert (out / "log.txt").read_text() == straight
    last, expected = out / "model_00011", tmp_path / "straight" / "model_00011"
    assert weights_of(last) == weights_of(expected)
    assert checkpoint.read_state(last)["scaler"] == checkpoint.read_state(expected)["scaler"]


def test_more_steps_keep_the_schedule(byte_shards, tmp_path):
    out = tmp_path / "run"
    trained(out, "--data", byte_shards, "--max-steps", 6, "--checkpoint-every", 3)
    config, directory = configure(["--resume", "--out", str(out), "--max-steps", "9"])
    assert (config.max_steps, config.decay_steps, get_lr(8, config)) == (9, 6, config.min_lr)
    stamp = (directory / "checkpoint.json").stat().st_mtime_ns
    train(config, ONE_PROCESS, directory)
    assert (directory / "checkpoint.json").stat().st_mtime_ns == stamp  # its own step is not saved again
    trained(tmp_path / "straight", "--data", byte_shards, "--max-steps", 9, "--decay-steps", 6)
    assert (out / "log.txt").read_text() == (tmp_path / "straight" / "log.txt").read_text()


def test_a_resume_that_would_change_the_run_is_refused(byte_shards, tmp_path):
    out = tmp_path / "run"
    trained(out, "--data", byte_shards, "--max-steps", 3)
    with pytest.raises(UserError) as error:
        configure(
            ["--resume", "--out", str(out), "--max-lr", "1e-3", "--n-layer", "2", "--seed", "1", "--batch-size", "2"]
        )
    assert [p.split()[0] for p in error.value.problems] == ["--max-lr", "--seed"]
    assert "is 0.001, but the run in" in error.value.problems[0]
    with pytest.raises(UserError, match="past --max-steps 2"):
        configure(["--resume", "--out", str(out), "--max-steps", "2"])
    other = tmp_path / "other"
    shutil.copytree(byte_shards, other)
    manifest = json.loads((other / "manifest.json").read_text())
    lost = next(s for s in manifest["shards"] if s["split"] == "train")
    manifest["shards"].remove(lost)
    (other / lost["file"]).unlink()
    (other / "manifest.json").write_text(json.dumps(manifest))
    config, directory = configure(["--resume", "--out", str(out), "--max-steps", "5", "--data", str(other)])
    with pytest.raises(UserError, match="the train shards are not those"):
        train(config, ONE_PROCESS, directory)


def test_resume_auto_starts_anew_after_a_run_that_saved_nothing(byte_shards, tmp_path):
    flags = ("--data", byte_shards, "--max-steps", 3, "--checkpoint-every", 0)
    expected = trained(tmp_path / "run", *flags)
    with pytest.raises(UserError, match="already holds a run"):
        trained(tmp_path / "run", *flags)
    assert trained(tmp_path / "run", *flags, "--resume", "auto") == expected


def test_resume_auto_starts_anew_or_goes_on(byte_shards, tmp_path):
    flags = [*TINY_FLAGS, "--data", str(byte_shards), "--out", str(tmp_path / "run"), "--max-steps", "4", "--resume"]
    with pytest.raises(UserError, match="no checkpoint in .* to resume from"):
        configure(flags)
    config, directory = configure([*flags, "auto"])
    assert directory is None
    train(config, ONE_PROCESS)
    assert configure([*flags, "auto"])[1].name == "model_00004"


# ---- checkpoints in other hands


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


def test_checkpoints_hold_plain_data_and_their_own_checksums(byte_shards, tmp_path):
    trained(tmp_path / "run", "--data", byte_shards, "--max-steps", 3)
    directory = tmp_path / "run" / "model_00003"
    state = torch.load(directory / "trainer.pt", weights_only=True)
    assert (state["step"], state["config"]["n_embd"]) == (3, 32)
    listed = json.loads((directory / "checkpoint.json").read_text())["files"]
    assert sorted([*listed, "checkpoint.json"]) == sorted(os.listdir(directory))
    assert {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "trainer.pt",
    } == listed.keys()
    from safetensors.torch import load_file

    weights = load_file(directory / "model.safetensors")
    assert weights["transformer.wte.weight"].shape == (257, 32) and "lm_head.weight" not in weights
    assert all(tensor.dtype == torch.float32 for tensor in weights.values())


# ---- shards of other tools, HellaSwag, other starting points


@pytest.fixture
def gpt2_shards(tmp_path, monkeypatch):
    """A folder in build-nanogpt's layout. The vocabulary is stood in for by bytes with GPT-2's size and end-of-text."""
    from support.tokenizer import BytesTokenizer

    class Gpt2Sized(BytesTokenizer):
        name = "gpt2"

        def decode(self, ids):
            return f"{len(ids)} tokens"

    monkeypatch.setattr(train_gpt2, "get_tokenizer", lambda name: {"gpt2": Gpt2Sized()}[name])
    data = tmp_path / "edu_fineweb10B"
    data.mkdir()
    rng = np.random.default_rng(0)
    for name in ("edufineweb_val_000000", "edufineweb_train_000001", "edufineweb_train_000002"):
        np.save(data / name, rng.integers(0, 50257, 3000, dtype=np.uint16))
    return data


def test_shards_without_a_manifest_train_as_gpt2_tokens(gpt2_shards, tmp_path):
    log = trained(tmp_path / "run", "--data", gpt2_shards, "--max-steps", 2, "--sample-every", 1)
    assert float(log.split()[2]) == pytest.approx(math.log(50257), abs=0.1)


def test_hellaswag_is_scored_in_training(gpt2_shards, tmp_path, capsys):
    items = tmp_path / "items.jsonl"
    texts = [("A man sits on a roof.", i, ["falls", "sleeps", "sings a song", "rips up tiles"]) for i in range(4)]
    items.write_text("".join(json.dumps({"ctx": c, "label": i, "endings": e}) + "\n" for c, i, e in texts))
    flags = ["--data", gpt2_shards, "--max-steps", 4, "--hellaswag-every", 2, "--hellaswag-data", items]
    # the same endings with each label once: whatever the model prefers, it is right for one of the four
    assert losses_of(trained(tmp_path / "run", *flags), "hella") == {0: 0.25, 2: 0.25, 4: 0.25}
    out = capsys.readouterr().out
    assert re.search(r"step     2 \| HellaSwag acc_norm: 0\.2500 ± 0\.2500 of 4 items \| \d+\.\ds\n", out)
    # naming items asks for them on a CPU, too; without any, there it would take an hour
    for flag, expected in (("hellaswag_data", {0: 0.25, 1: 0.25}), ("out", {})):
        config = config_of("--data", gpt2_shards, "--max-steps", 1)
        given = {
            "hellaswag_every": None,
            "out": str(tmp_path / flag),
            flag: str(items if expected else tmp_path / flag),
        }
        train(dataclasses.replace(config, **given), ONE_PROCESS)
        assert losses_of((tmp_path / flag / "log.txt").read_text(), "hella") == expected
    items.write_text("not an item\n")
    with pytest.raises(UserError, match=r"items\.jsonl, line 1 is not JSON"):
        trained(tmp_path / "bad", *flags)


def test_training_goes_on_without_hellaswag(gpt2_shards, byte_shards, tmp_path, monkeypatch, capsys):
    def unreachable():
        raise UserError("cannot download it.")

    monkeypatch.setattr("hellaswag.download", unreachable)
    log = trained(tmp_path / "run", "--data", gpt2_shards, "--max-steps", 2, "--hellaswag-every", 1)
    out = capsys.readouterr().out
    assert "hella" not in log and losses_of(log, "train").keys() == {0, 1}
    assert out.index("HellaSwag is off: cannot download it.") < out.index("step     0")
    monkeypatch.undo()
    trained(tmp_path / "bytes", "--data", byte_shards, "--max-steps", 1, "--hellaswag-every", 1)
    assert "HellaSwag is off: its scores are defined on GPT-2 tokens" in capsys.readouterr().out


def test_training_goes_on_from_pretrained_weights(byte_shards, tmp_path):
    trained(tmp_path / "first", "--data", byte_shards, "--max-steps", 8)
    plain = [f for f in TINY_FLAGS if f not in ("--n-layer", "2", "--n-head", "--n-embd", "32", "--block-size", "16")]
    directory = tmp_path / "first" / "model_00008"
    flags = [
        "--data",
        str(byte_shards),
        "--max-steps",
        "1",
        "--init-from",
        str(directory),
        "--out",
        str(tmp_path / "second"),
    ]
    train(configure([*plain, *flags])[0], ONE_PROCESS)
    before, after = (losses(tmp_path / run / "log.txt", "val") for run in ("first", "second"))
    assert after[0] == before[-1]
    with pytest.raises(UserError, match="context of 16 tokens. Leave out --block-size, or lower it."):
        train(configure([*plain, *flags[:-1], str(tmp_path / "third"), "--block-size", "32"])[0], ONE_PROCESS)


def test_pretrained_weights_train_with_a_shorter_context(byte_shards, tmp_path):
    """The first positions are those that the weights had: the loss before training is Hugging Face's on shorter rows."""
    from transformers import GPT2LMHeadModel

    trained(tmp_path / "first", "--data", byte_shards, "--max-steps", 8)
    directory, out = tmp_path / "first" / "model_00008", tmp_path / "second"
    sizes = ("--n-layer", "2", "--n-head", "--n-embd", "32", "--block-size", "16")
    flags = [*(f for f in TINY_FLAGS if f not in sizes), "--data", str(byte_shards), "--out", str(out)]
    train(configure([*flags, "--init-from", str(directory), "--block-size", "8", "--max-steps", "2"])[0], ONE_PROCESS)
    [val] = byte_shards.glob("*_val_*.npy")
    rows = np.load(val)[: 64 * 8 + 1].astype(np.int64)  # 512 tokens, as TINY_FLAGS has it
    x, y = torch.from_numpy(rows[:-1]).view(64, 8), torch.from_numpy(rows[1:]).view(64, 8)
    with torch.no_grad():
        expected = F.cross_entropy(GPT2LMHeadModel.from_pretrained(directory)(x).logits.flatten(0, 1), y.flatten())
    assert losses(out / "log.txt", "val")[0] == pytest.approx(expected.item(), abs=1e-4)
    assert GPT2LMHeadModel.from_pretrained(out / "model_00002").config.n_positions == 8
    train(*[*configure(["--resume", "--out", str(out), "--max-steps", "3"])[:1], ONE_PROCESS, out / "model_00002"])
    assert len(losses(out / "log.txt")) == 3
    with pytest.raises(UserError, match="--block-size is 4, but the run in .* has 8. Leave it out."):
        configure(["--resume", "--out", str(out), "--block-size", "4"])


def test_samples_go_on_from_the_prompt(byte_shards, tmp_path, capsys):
    flags = ["--data", byte_shards, "--max-steps", 2, "--sample-every", 2, "--prompt", "30 + 12 ="]
    trained(tmp_path / "run", *flags)
    samples = [line for line in capsys.readouterr().out.splitlines() if "| sample " in line]
    assert len(samples) == 4 and all(": 30 + 12 =" in line for line in samples)


# ---- bad input: one line per problem, exit code 2, nothing written


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--data nowhere", 'no train shards in nowhere. Make them with "python fineweb.py", or try it all with "--demo".'),
        ("--total-batch-size 1000", "--total-batch-size 1000 is not a multiple of 16, the context of 16 times 1 processes. Use 992 or 1008."),
        ("--batch-size 3", "--batch-size 3 does not divide the 16 rows that each process has of an update. Use one of 1, 2, 4, 8, 16."),
        ("--total-batch-size 16000000", "and one update takes 1000000. Take more text, or lower --total-batch-size or --block-size."),
        ("--val-tokens 15", "no row of 16 tokens to validate on"),
        ("--model gpt3", "argument --model: invalid choice: 'gpt3'"),
        ("--max-step 3", "unrecognized arguments: --max-step 3"),
        ("--n-head 5", "--n-embd 32 is not a multiple of --n-head 5"),
        ("--init-from .", "--init-from brings its own sizes. Leave out --n-layer, --n-head, --n-embd."),
        ("--max-lr nan", "--max-lr is nan. It must be 0 or more."),
        ("--out /proc/nowhere", "cannot write to /proc/nowhere"),
        ("--resume", "no checkpoint in log to resume from"),
        ("--device mps", "no mps device on this machine"),
        ("--seed 99999999999999999999", "--seed is 99999999999999999999. It must be less than 4294967296."),
        ("--total-batch-size 1600000000000", "and one update takes 100000000000"),
        ("--init-from nowhere --model gpt2-xl", "--init-from brings its own sizes."),
    ],
)  # fmt: skip
def test_bad_flags(byte_shards, tmp_path, monkeypatch, capsys, flags, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as exit:
        from support.cli import run

        run(lambda: train_gpt2.main([*TINY_FLAGS, "--data", str(byte_shards), *flags.split()]))
    captured = capsys.readouterr()
    assert exit.value.code == 2
    assert message in captured.err and captured.err.startswith("error: ") and captured.err.count("\n") == 1
    assert not list(tmp_path.iterdir())  # the mended command finds nothing in its way


def test_all_problems_are_reported_together(capsys):
    with pytest.raises(UserError) as error:
        configure(["--max-lr", "-1", "--max-steps", "0", "--beta2", "1.5"])
    assert [p.split()[0] for p in error.value.problems] == ["--max-steps", "--max-lr", "--beta2"]


def test_errors_end_all_ranks_with_one_message(tmp_path):
    done = run_script("train_gpt2.py", "--data", "nowhere", "--device", "cpu", cwd=tmp_path, torchrun=2)
    assert done.returncode == 1  # torchrun's own
    assert done.stderr.count("error: no train shards in nowhere.") == 1 and 'train_gpt2.py", line' not in done.stderr


def test_the_demo_takes_another_model(byte_shards, monkeypatch):
    config, _ = configure(["--demo"])
    assert (config.architecture, config.block_size) == (dict(n_layer=3, n_head=4, n_embd=128), 64)
    config, _ = configure(["--demo", "--model", "gpt2-medium"])
    assert (config.architecture, config.block_size) == (train_gpt2.MODELS["gpt2-medium"], None)


def test_a_sample_that_the_terminal_cannot_show_does_not_end_the_run(byte_shards, tmp_path):
    flags = [*TINY_FLAGS, "--data", byte_shards, "--max-steps", 2, "--sample-every", 1, "--out", "run"]
    done = run_script("train_gpt2.py", *flags, cwd=tmp_path, PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    assert "\\u" in done.stdout and (tmp_path / "run" / "model_00002").is_dir()


def test_a_run_is_never_written_over(byte_shards, tmp_path):
    before = trained(tmp_path / "run", "--data", byte_shards, "--max-steps", 2)
    with pytest.raises(UserError, match="already holds a run. Go on with it with --resume, or name another --out"):
        trained(tmp_path / "run", "--data", byte_shards, "--max-steps", 2)
    with pytest.raises(UserError, match="already holds a run"):
        trained(tmp_path / "run", "--data", byte_shards, "--max-steps", 2, "--demo")
    assert (tmp_path / "run" / "log.txt").read_text() == before and (tmp_path / "run" / "model_00002").is_dir()


def test_a_damaged_checkpoint_is_named_and_passed_over(byte_shards, tmp_path, capsys):
    out = tmp_path / "run"
    trained(out, "--data", byte_shards, "--max-steps", 6, "--checkpoint-every", 2)
    flipped = bytearray((out / "model_00006" / "model.safetensors").read_bytes())
    flipped[-1] ^= 1
    (out / "model_00006" / "model.safetensors").write_bytes(flipped)
    (out / "model_00004" / "trainer.pt").write_bytes(b"")
    assert checkpoint.newest(out).name == "model_00002"
    warnings = capsys.readouterr().err
    assert "model_00006 is damaged: model.safetensors was altered" in warnings
    assert "model_00004 is damaged: trainer.pt has 0 bytes" in warnings
    (out / "model_00002" / "config.json").unlink()
    with pytest.raises(UserError, match="no checkpoint in .* is whole"):
        configure(["--resume", "--out", str(out)])
