"""--minutes: the arithmetic, and that measuring leaves no trace."""

from __future__ import annotations

import math
import time
from types import SimpleNamespace

import pytest
import torch
from helpers import TINY_MODEL_FLAGS, finish_run, start_run
from training import ONE_PROCESS, assert_same_run, config_of, configure, trainer_file

from support.checkpoints.directory import newest_checkpoint
from support.cli import UserError, parse_flags, range_errors
from support.data import presets
from support.runtime import budget
from train_gpt2 import GPT, GPTConfig, TrainConfig, train

TEXT = "".join(f"{a} and {b} are {a + b}.\n" for a in range(40) for b in range(60))
SMALL = [*TINY_MODEL_FLAGS, *"--val-tokens 512 --device cpu --dtype fp32 --tokenizer bytes".split()]


@pytest.fixture
def text(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    return ["--text", str(tmp_path / "text.txt"), *SMALL]


def hurry(monkeypatch):
    """Calls that take 0.2 s, and a start that a busy machine will not miss: 200 steps, nearly."""
    real = budget._seconds
    monkeypatch.setattr(budget, "_seconds", lambda work, **options: 0 * real(work, **{**options, "limit": 0.0}) + 0.2)
    monkeypatch.setattr(budget, "STARTED", time.perf_counter() + 60)


def measured_run(folder, text, *more):
    """Trains for a few seconds; returns its flags."""
    config, _ = configure([*text, "--minutes", "0.1", "--out", str(folder), *more])
    train(config, ONE_PROCESS)
    return trainer_file(newest_checkpoint(folder))["config"]


def test_the_run_is_that_of_as_many_steps(tmp_path, text, monkeypatch):
    hurry(monkeypatch)
    flags = measured_run(tmp_path / "measured", text)
    steps = flags["max_steps"]
    assert steps > 3 and flags["decay_steps"] == steps and flags["warmup_steps"] == steps // 30
    same = [*text, "--max-steps", str(steps), "--out", str(tmp_path / "given")]
    train(configure(same)[0], ONE_PROCESS)
    assert_same_run(tmp_path / "measured", tmp_path / "given")
    config, checkpoint = configure(["--resume", "--out", str(tmp_path / "measured")])
    assert config.max_steps == steps and config.minutes == 0.1
    log = (tmp_path / "measured" / "log.txt").read_bytes()
    train(config, ONE_PROCESS, checkpoint)
    assert (tmp_path / "measured" / "log.txt").read_bytes() == log
    with pytest.raises(UserError, match=r"--minutes is 3\.0, but the run in .* has 0\.1\. Leave it out"):
        configure(["--resume", "--out", str(tmp_path / "measured"), "--minutes", "3"])


def test_given_flags_stay(tmp_path, text, monkeypatch):
    hurry(monkeypatch)
    flags = measured_run(tmp_path / "run", text, "--warmup-steps", "2", "--val-every", "0")
    assert (flags["warmup_steps"], flags["val_every"]) == (2, 0)
    assert flags["val_tokens"] == 512  # without validations, there are none to shorten
    assert flags["checkpoint_every"] == math.ceil(flags["max_steps"] / 4)


def test_the_number_of_steps(monkeypatch):
    """By hand: 3 minutes less 3 s for imports, 10 s so far, 5 s for the end, and five validations of 4 s."""
    seconds = iter([0.3, 0.01])  # of a step of four micro-batches, and of one without gradients
    monkeypatch.setattr(budget, "_seconds", lambda work, **options: next(seconds))
    monkeypatch.setattr(time, "perf_counter", lambda: 110.0)
    options = config_of("--val-tokens", 100_000)
    options = options.__class__(**{**options.to_dict(), "minutes": 3.0})
    loader = SimpleNamespace(B=8, T=16, grad_accum=4, rows_per_epoch=9999, vocab_size=257)
    val_loader = SimpleNamespace(B=8, T=16, grad_accum=1, rows_per_epoch=3200, vocab_size=257)
    model = GPT(GPTConfig(16, 257, 1, 1, 8))
    optimizer = model.configure_optimizers(0.1, 1e-3, (0.9, 0.95))
    monkeypatch.setattr(budget, "STARTED", 100.0)
    chosen = budget.set_steps_for_minutes(options, model, optimizer, loader, val_loader, ONE_PROCESS)
    assert chosen.max_steps == 459  # (180 - 3 - 10 - 5 - 5 * 0.01 * 3200 / 8) / (1.03 * 0.3)


def sizes_for(text_bytes, tokens, monkeypatch, *flags, world_size=1):
    """The sizes for a text, of which any model can be trained on so many tokens in time."""
    monkeypatch.setattr(presets, "text_bytes", lambda *args: text_bytes)
    monkeypatch.setattr(budget, "_tokens_in_time", lambda *args: tokens)
    config, _ = configure(["--text", "a.txt", "--minutes", "3", *flags])
    given = parse_flags(TrainConfig, flags, "")
    return budget.sizes_for_minutes(config, given, ONE_PROCESS, GPT)


# By hand: 7 bytes, at 3 per token, for each weight of the blocks, 12 C^2 in each: 331,776 of 3 x 96, 589,824 of 3 x 128,
# 786,432 of 4 x 128, 4.7M of 6 x 256, 25M of 8 x 512; and not more weights than bytes.
@pytest.mark.parametrize(
    ("text_bytes", "tokens", "sizes", "step"),
    [
        (3e6, 1e5, (3, 96), 1024),
        (3e6, 1.37e6, (3, 96), 1024),
        (3e6, 1.38e6, (3, 128), 1024),
        (3e6, 1.84e6, (4, 128), 1024),
        (3e7, 1.10e7, (4, 128), 4096),
        (3e7, 1.11e7, (6, 256), 4096),
        (7e5, 2.4e7, (3, 128), 8192),  # the text is too small for more
        (3e8, 7e7, (8, 512), 32768),
    ],
)
def test_the_largest_model_that_sees_enough_tokens(text_bytes, tokens, sizes, step, monkeypatch):
    chosen = sizes_for(text_bytes, tokens, monkeypatch)
    assert (chosen["n_layer"], chosen["n_embd"], chosen["total_batch_size"]) == (*sizes, step)
    assert chosen["max_lr"] == pytest.approx(3.6e-3 * min(1, (step / 16384) ** 0.5))


def config_for(minutes, step_seconds, monkeypatch, val_seconds=0.0):
    """What `set_steps_for_minutes` chooses if steps and validations take so long."""
    seconds = iter([step_seconds, val_seconds])
    monkeypatch.setattr(budget, "_seconds", lambda work, **options: next(seconds))
    options = config_of().__class__(**{**config_of("--val-tokens", 16).to_dict(), "minutes": minutes})
    loader = SimpleNamespace(B=1, T=16, grad_accum=1, rows_per_epoch=9999, vocab_size=257)
    model = GPT(GPTConfig(16, 257, 1, 1, 8))
    optimizer = model.configure_optimizers(0.1, 1e-3, (0.9, 0.95))
    monkeypatch.setattr(budget, "STARTED", time.perf_counter())
    return budget.set_steps_for_minutes(options, model, optimizer, loader, loader, ONE_PROCESS)


def test_the_chosen_steps_are_steps_that_a_resumed_run_accepts(monkeypatch):
    chosen = config_for(999_999.0, 1e-6, monkeypatch)
    assert chosen.max_steps == 2**31 - 1 and not range_errors(TrainConfig, chosen.to_dict())


def test_slow_validations_are_shortened_before_steps_are(monkeypatch):
    """By hand: a twentieth of 2 minutes is 6 s, or 300 rows of 20 ms, and the row that that ends in."""
    config = config_of("--demo", "--val-tokens", 65536)
    options = config.__class__(**{**config.to_dict(), "minutes": 2.0})
    seconds = iter([1.0, 0.02])
    monkeypatch.setattr(budget, "_seconds", lambda work, **options: next(seconds))
    loader = SimpleNamespace(B=1, T=16, grad_accum=1, rows_per_epoch=9999, vocab_size=257)
    model = GPT(GPTConfig(16, 257, 1, 1, 8))
    optimizer = model.configure_optimizers(0.1, 1e-3, (0.9, 0.95))
    monkeypatch.setattr(budget, "STARTED", time.perf_counter())
    chosen = budget.set_steps_for_minutes(options, model, optimizer, loader, loader, ONE_PROCESS)
    assert chosen.val_tokens == 16 * 301
    assert chosen.max_steps == int((120 - 3 - 5 - 5 * 301 * 0.02) / 1.03)


def test_a_time_without_a_single_step_is_refused(monkeypatch):
    """By hand: 3 s for imports, 5 s for the end, 5 validations of 2 s, and a step of 1.03 * 81 s are 1.7 minutes."""
    expected = (
        r"--minutes 1\.6 is too short: a step takes 83\.4 s here, and everything else 18 s\. Use --minutes 1\.7 or"
    )
    with pytest.raises(UserError, match=expected):
        config_for(1.6, 81.0, monkeypatch, 2.0)
    assert config_for(1.7, 81.0, monkeypatch, 2.0).max_steps == 1


def test_a_model_that_is_far_too_slow_is_refused_at_once(monkeypatch):
    """By hand: 0.7 of 3 minutes is enough for 1,000 of its 4,096 tokens, so those take 516 s."""
    with pytest.raises(UserError, match="too short: on this machine, 4,096 tokens take this model 516 s"):
        sizes_for(3e6, 1000, monkeypatch, "--model", "gpt2", "--batch-size", "4", "--total-batch-size", "4096")


def test_given_sizes_stay(monkeypatch):
    given = "--n-layer 2 --total-batch-size 4096 --max-lr 1e-3".split()
    assert sizes_for(3e6, 2.4e7, monkeypatch, *given).keys() == {"n_head", "n_embd", "block_size"}


def test_pretrained_weights_keep_their_sizes():
    config = config_of()
    options = config.__class__(**{**config.to_dict(), "minutes": 3.0, "init_from": "gpt2"})
    assert budget.sizes_for_minutes(options, {}, ONE_PROCESS, GPT) == {}


def test_a_model_that_does_not_fit_is_not_chosen(monkeypatch):
    def too_large(work, *args, **options):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(budget, "_seconds", too_large)
    sizes = dict(n_layer=1, n_head=1, n_embd=16, block_size=64)
    options = config_of().__class__(**{**config_of().to_dict(), "minutes": 3.0})
    assert budget._tokens_in_time(options, sizes, 257, ONE_PROCESS, lambda **sizes: GPT(GPTConfig(**sizes))) == 0.0


def test_the_tokens_of_a_model_in_time(monkeypatch):
    """By hand: 0.7 of 3 minutes, 8 rows of 64 tokens in 0.01 s, on two ranks."""
    monkeypatch.setattr(budget, "_seconds", lambda work, *args, **options: work() or 0.01)
    config = config_of("--batch-size", 8)
    options = config.__class__(**{**config.to_dict(), "minutes": 3.0})
    two_ranks = SimpleNamespace(device=torch.device("cpu"), world_size=2)
    sizes = dict(n_layer=1, n_head=1, n_embd=16, block_size=64)
    tokens = budget._tokens_in_time(options, sizes, 257, two_ranks, lambda **sizes: GPT(GPTConfig(**sizes)))
    assert tokens == pytest.approx(0.7 * 180 / 0.01 * 8 * 64 * 2)


def measure_by_rank(rank):
    """Rank 1 is half as fast as rank 0, and takes longer than it to start."""
    real = budget._seconds
    budget._seconds = lambda *args, **options: 0 * real(*args, **{**options, "limit": 0.0}) + 0.5 * (1 + rank)
    budget.STARTED = time.perf_counter() + 60 - rank


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_ranks_agree(tmp_path, text, parallel):
    """Under FSDP, the weights are gathered for validation after forward passes that were only timed."""
    flags = [*text, "--minutes", 0.1, "--out", "run", "--parallel", parallel]
    process = start_run(*flags, cwd=tmp_path, world_size=2, tiny=False, sabotage=measure_by_rank)
    assert finish_run(process) == [0, 0], (tmp_path / "0.txt").read_text()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--minutes", "5"], "--minutes is for --text and --demo. Use --max-steps."),
        (["--demo", "--minutes", "5", "--max-steps", "5"], "--minutes chooses the number of steps. Leave out --max-steps"),
        (["--demo", "--minutes", "0"], "--minutes is 0.0. It must be 0.1 or more."),
    ],
)  # fmt: skip
def test_wrong_flags_are_errors(flags, message):
    with pytest.raises(UserError) as error:
        configure(flags)
    assert error.value.problems[0].startswith(message)


def test_the_demo_takes_two_minutes_unless_told_otherwise():
    minutes = [configure(["--demo", *more])[0].minutes for more in ([], ["--minutes", "7"], ["--max-steps", "9"])]
    assert minutes == [2.0, 7.0, None]
