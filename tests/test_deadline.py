"""--minutes: when the cooldown begins, by hand; and what is decided is kept, bit by bit. Longer runs."""

from __future__ import annotations

import os
import shutil
import signal
import time
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
from helpers import TINY_MODEL_FLAGS, finish_run, losses, run_to_the_end, start_run
from training import ONE_PROCESS, assert_same_run, checkpoint_names, configure, run_info, trainer_file

import train_gpt2
from benchmarks.bench_chaos import metrics_without_time
from support.cli import UserError
from support.console import deadline
from support.console.deadline import Deadline
from support.console.record import latest_flags, read_record
from support.data.presets import MAX_STEPS
from train_gpt2 import get_lr, train

TEXT = "".join(f"{a} and {b} are {a + b}.\n" for a in range(40) for b in range(60))
FLAGS = "--device cpu --dtype fp32 --tokenizer bytes --batch-size 4 --total-batch-size 256 --max-lr 3e-3".split()
FLAGS += "--warmup-steps 3 --val-every 7 --val-tokens 512 --sample-every 0 --checkpoint-every 4 --keep 0".split()
STEPS = 24  # for which there is time: the cooldown begins at step 15, as 9 of 24 are at most 0.4, and 10 are not


@pytest.fixture
def text(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    return ["--text", str(tmp_path / "text.txt"), *TINY_MODEL_FLAGS, *FLAGS]


def time_for(steps: int, monkeypatch: pytest.MonkeyPatch | None = None) -> None:
    """Makes the clock say that there is time for this many steps."""

    def cooldown_steps(self, step, config):
        left = max(1, steps - step)
        return left if left <= 0.4 * (step + left) else MAX_STEPS

    (monkeypatch.setattr if monkeypatch else setattr)(Deadline, "cooldown_steps", cooldown_steps)


# ---- the clock


def decisions(
    monkeypatch, *, minutes, step_seconds, evaluation_seconds=0.0, val_every=0, fraction=0.4, other_ranks=lambda n: n
):
    """The step at which the cooldown begins, and the number of steps, of a run whose steps take `step_seconds(step)`."""
    now = [0.0]
    monkeypatch.setattr(deadline, "STARTED", 0.0)
    monkeypatch.setattr(deadline.time, "perf_counter", lambda: now[0])
    run = run_info("--schedule", "wsd", "--val-every", val_every)
    run.config = config = replace(
        run.config,
        minutes=minutes,
        max_steps=50,
        decay_steps=MAX_STEPS,
        demo=True,
        cooldown_fraction=fraction,
        warmup_steps=0,
    )
    dist = SimpleNamespace(rank=0, all_reduce_min=other_ranks)
    reported = []
    clock = Deadline(run, dist, reported.append)
    for step in range(1000):
        config = clock.config_at(step, config)
        assert run.config is config
        if not config.open_ended:
            assert len(reported) == 1 and reported[0]["max_steps"] == config.max_steps
            assert config.cooldown_start == step and config.decay_steps == config.max_steps
            assert get_lr(step - 1, config) == get_lr(step, config) == config.max_lr > get_lr(step + 1, config)
            assert clock.config_at(step, config) is config
            return step, config.max_steps
        assert get_lr(step, config) == config.max_lr
        now[0] += step_seconds(step) + (evaluation_seconds if val_every and step % val_every == 0 else 0.0)
    raise AssertionError


def test_the_cooldown_begins_when_its_share_is_left(monkeypatch):
    """By hand: 120 s less 4 s for the end are 116 steps. At step 70, 46 are left, the first that are at most 0.4 of 116."""
    assert decisions(monkeypatch, minutes=2.0, step_seconds=lambda step: 1.0) == (70, 116)


@pytest.mark.parametrize("slow_from", [10, 50, 60, 63])
def test_a_machine_that_becomes_slower_has_fewer_steps(slow_from, monkeypatch):
    """It ends after 116 s, as one that was slow from the beginning, or at most a step earlier."""
    step, total = decisions(monkeypatch, minutes=2.0, step_seconds=lambda step: 1.0 if step < slow_from else 2.0)
    seconds = slow_from + 2 * (total - slow_from)
    assert step < 80 and 114 <= seconds <= 116


@pytest.mark.parametrize("slow", [0, 1, 20, 40])
def test_a_single_slow_step_decides_nothing(slow, monkeypatch):
    """The first one of a process, which compiles, or one in which it was paused: 19 s more."""
    step, total = decisions(monkeypatch, minutes=2.0, step_seconds=lambda step: 20.0 if step == slow else 1.0)
    assert total == pytest.approx(97, abs=1) and step == pytest.approx(0.6 * 97, abs=2)


@pytest.mark.parametrize("fraction, expected", [(0.0, (115, 116)), (0.01, (115, 116)), (0.2, (93, 116))])
def test_a_short_cooldown_ends_on_time_too(fraction, expected, monkeypatch):
    """By hand: 0.2 of 116 steps are 23. There is a last step in any case."""
    assert decisions(monkeypatch, minutes=2.0, step_seconds=lambda step: 1.0, fraction=fraction) == expected


def test_steps_that_take_longer_than_the_time_are_few(monkeypatch):
    step, total = decisions(monkeypatch, minutes=1.0, step_seconds=lambda step: 30.0)
    assert total <= 3


def test_a_machine_that_becomes_faster_has_more(monkeypatch):
    step, total = decisions(monkeypatch, minutes=2.0, step_seconds=lambda step: 2.0 if step < 20 else 1.0)
    assert 108 <= 40 + (total - 20) <= 116  # slow steps count in the pace for a while
    assert step == pytest.approx(0.6 * total, abs=8)


def test_evaluations_to_come_are_left_time_for(monkeypatch):
    """A validation of 2 s at every 12th step, and after the last."""
    step, total = decisions(
        monkeypatch, minutes=2.0, step_seconds=lambda step: 1.0, evaluation_seconds=2.0, val_every=12
    )
    validations = total // 12 + 1 + (total % 12 > 0)
    assert 114 <= total + 2 * validations <= 116 and step == pytest.approx(0.6 * total, abs=2)


def test_more_steps_than_estimated(monkeypatch):
    """The estimate is 50 steps: at step 50, it becomes 100, and so on."""
    assert decisions(monkeypatch, minutes=4.0, step_seconds=lambda step: 1.0) == (142, 236)


def test_a_rank_whose_clock_is_ahead_does_not_decide_alone(monkeypatch):
    """All ranks take the smallest number; the others' is MAX_STEPS."""
    assert decisions(
        monkeypatch, minutes=2.0, step_seconds=lambda step: 1.0, other_ranks=lambda n: min(n, MAX_STEPS)
    ) == (70, 116)
    monkeypatch.setattr(deadline.time, "perf_counter", lambda: 1e6)
    run = run_info("--schedule", "wsd")
    run.config = replace(run.config, minutes=2.0, decay_steps=MAX_STEPS)
    rank_1 = Deadline(run, SimpleNamespace(rank=1, all_reduce_min=lambda n: n), lambda flags: None)
    assert rank_1.config_at(3, run.config) is run.config  # late by days, but only rank 0's clock counts
    rank_1.dist.all_reduce_min = lambda n: 7
    assert rank_1.config_at(3, run.config).max_steps == 10


# ---- runs


def test_the_run_is_that_of_as_many_steps(tmp_path, text, monkeypatch, capsys):
    time_for(STEPS, monkeypatch)
    train_with(*text, "--minutes", "5", "--out", tmp_path / "minutes")
    assert "step    15 | the cooldown begins: 9 steps, to step 24" in capsys.readouterr().out
    same = ["--max-steps", STEPS, "--cooldown-fraction", 9 / 24, "--out", tmp_path / "steps"]
    train_with(*text, *same)
    assert_same_run(tmp_path / "minutes", tmp_path / "steps")
    for out in ("minutes", "steps"):  # every 4 steps, and before the cooldown
        assert checkpoint_names(tmp_path / out) == [f"model_{step:05d}" for step in (4, 8, 12, 15, 16, 20, 24)]
    flags = latest_flags(read_record(tmp_path / "minutes" / "run.json"))
    assert (flags["max_steps"], flags["decay_steps"], flags["cooldown_fraction"]) == (24, 24, 9 / 24)
    assert "decay-steps" not in (tmp_path / "minutes" / "model_00012" / "README.md").read_text()
    assert "--decay-steps 24" in (tmp_path / "minutes" / "model_00015" / "README.md").read_text()
    before, at = (trainer_file(tmp_path / "minutes" / f"model_{step:05d}")["config"] for step in (12, 15))
    assert before["decay_steps"] == MAX_STEPS and at["decay_steps"] == at["max_steps"] == 24


def train_with(*flags):
    config, checkpoint = configure(list(map(str, flags)))
    train(config, ONE_PROCESS, checkpoint)


def die(step: int, rank: int) -> None:
    """Dies at a step, or if that is 0, when the decision was made and nothing of it is written."""
    time_for(STEPS)
    deadline.STARTED = time.perf_counter()
    real_at, real_decided = Deadline.config_at, deadline.flags_for_length

    def config_at(self, now, config):
        if step and now == step:
            os.kill(os.getpid(), signal.SIGKILL)
        return real_at(self, now, config)

    def flags_for_length(config, steps):
        if not step and steps == STEPS:
            os.kill(os.getpid(), signal.SIGKILL)
        return real_decided(config, steps)

    Deadline.config_at, deadline.flags_for_length = config_at, flags_for_length


def live(rank: int) -> None:
    """Rank 1 starts later than rank 0, and its clock says something else."""
    time_for(STEPS if rank == 0 else 10)
    deadline.STARTED = time.perf_counter() - rank


@pytest.mark.slow
@pytest.mark.parametrize("world_size, parallel", [(1, "ddp"), (2, "fsdp")])
def test_a_killed_run_is_the_one_that_was_not(tmp_path, text, world_size, parallel):
    """Before the decision, in it, and in the cooldown; each is resumed from the last checkpoint."""
    run = [*text, "--minutes", 5, "--parallel", parallel]
    options = dict(cwd=tmp_path, world_size=world_size, tiny=False)
    run_to_the_end(*run, "--out", "straight", sabotage=live, **options)
    for step in (10, 0, 18):
        out = f"killed{step}"
        assert finish_run(start_run(*run, "--out", out, sabotage=partial(die, step), **options)) == [-9] * world_size
        run_to_the_end("--resume", *text, "--out", out, sabotage=live, **options)
        assert_same_run(tmp_path / out, tmp_path / "straight")
    record = read_record(tmp_path / "killed10" / "run.json")
    assert latest_flags(record)["max_steps"] == STEPS


def test_what_was_trained_counts_when_a_run_is_resumed(tmp_path, text, monkeypatch):
    """By hand: 5 minutes, of which the steps before the checkpoint took 8 times 7 s."""
    time_for(STEPS, monkeypatch)
    out = tmp_path / "run"
    train_with(*text, "--minutes", "5", "--out", out)
    for name in checkpoint_names(out)[2:]:
        shutil.rmtree(out / name)
    lines = [line.replace('"seconds": ', '"seconds": 7.0, "was": ') for line in (out / "metrics.jsonl").open()]
    (out / "metrics.jsonl").write_text("".join(lines))
    config, checkpoint = configure(["--resume", "--out", str(out)])
    assert config.open_ended and checkpoint.step == 8
    run = run_info(checkpoint=checkpoint)
    run.config = config
    assert deadline.seconds_for_process(run) == pytest.approx(300 - 56)


# ---- longer


def finished(tmp_path, text, out="run"):
    """A run of 20 steps with a cooldown from step 12 on, and its folder."""
    flags = [*text, "--max-steps", 20, "--cooldown-fraction", 0.4, "--out", tmp_path / out]
    train_with(*flags)
    return tmp_path / out


def test_more_steps_continue_before_the_cooldown(tmp_path, text, capsys):
    """A run of 20 steps that becomes one of 30 is the run of 30 steps."""
    out = finished(tmp_path, text)
    summary = capsys.readouterr().out
    assert f"\nlonger  python train_gpt2.py --resume --out {out} --max-steps 40\n" in summary
    assert f"continues from {out}/model_00012, before the cooldown" in summary
    train_with("--resume", "--out", out, "--max-steps", 30)
    train_with(*text, "--max-steps", 30, "--cooldown-fraction", 0.4, "--out", tmp_path / "straight")
    assert losses(out / "log.txt") == losses(tmp_path / "straight" / "log.txt")
    assert metrics_without_time(out) == metrics_without_time(tmp_path / "straight")
    assert_same_run(out, tmp_path / "straight")


def test_more_minutes_continue_before_the_cooldown(tmp_path, text, monkeypatch):
    out = finished(tmp_path, text)
    time_for(50, monkeypatch)
    config, checkpoint = configure(["--resume", "--out", out, "--minutes", "3"])
    assert checkpoint.step == 12 and config.open_ended and config.minutes == pytest.approx(3, abs=0.1)
    train(config, ONE_PROCESS, checkpoint)
    train_with(*text, "--max-steps", 50, "--cooldown-fraction", 20 / 50, "--out", tmp_path / "straight")
    assert losses(out / "log.txt") == losses(tmp_path / "straight" / "log.txt")
    config, checkpoint = configure(["--resume", "--out", out])  # has finished, and keeps its length
    assert checkpoint.step == config.max_steps == 50
    config, checkpoint = configure(["--resume", "auto", "--out", out, "--minutes", "3"])  # in a loop of restarts
    assert checkpoint.step == config.max_steps == 50


def test_intervals_follow_the_new_length_unless_they_were_chosen(tmp_path, text):
    flags = [*text[: text.index("--checkpoint-every")]]
    out = finished(tmp_path, flags)
    config, checkpoint = configure(["--resume", "--out", out, "--max-steps", "40"])
    assert (config.checkpoint_every, config.val_every, checkpoint.step) == (10, 7, 12)
    config, _ = configure(["--resume", "--out", out, "--max-steps", "40", "--checkpoint-every", "7"])
    assert config.checkpoint_every == 7
    config, checkpoint = configure(["--resume", "--out", out, "--max-steps", "40", "--decay-steps", "20"])
    assert checkpoint.step == 20  # who wants to stay at the lowest learning rate


def test_the_checkpoint_before_the_cooldown_is_kept(tmp_path, text):
    flags = [*text, "--keep", "1", "--val-every", "0"]
    assert checkpoint_names(finished(tmp_path, flags)) == ["model_00012", "model_00020"]


def test_without_that_checkpoint_there_are_no_more_minutes(tmp_path, text):
    out = finished(tmp_path, text)
    for step in (4, 8, 12):
        shutil.rmtree(out / f"model_{step:05d}")
    with pytest.raises(UserError, match=r"has no checkpoint of step 12 or earlier, before the cooldown"):
        configure(["--resume", "--out", out, "--minutes", "3"])
    config, checkpoint = configure(["--resume", "--out", out, "--max-steps", "40"])  # at the lowest rate, as it was
    assert checkpoint.step == 20 and config.decay_steps == 20


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--demo", "--schedule", "cosine"], "--schedule cosine needs --max-steps, instead of --minutes."),
        (["--demo", "--decay-steps", "9"], "--decay-steps needs --max-steps, instead of --minutes."),
    ],
)  # fmt: skip
def test_what_needs_the_number_of_steps_is_refused(flags, message):
    with pytest.raises(UserError) as error:
        configure(flags)
    assert error.value.problems[0].startswith(message)
    configure([*flags, "--max-steps", "20"])


def test_a_finished_model_stays_until_a_longer_run_has_finished(tmp_path, text):
    """Also if two longer runs are interrupted, one after the other; a process that finds the run finished cleans up."""
    out = finished(tmp_path, [*text, "--keep", "1"])
    weights = (out / "model_00020" / "model.safetensors").read_bytes()
    for steps in (30, 40):
        config, checkpoint = configure(["--resume", "--out", out, "--max-steps", steps, "--checkpoint-every", "5"])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(train_gpt2, "train_step", stops_at(22))
            with pytest.raises(SystemExit):
                train(config, ONE_PROCESS, checkpoint)
        assert (out / "model_00020.earlier" / "model.safetensors").read_bytes() == weights
    train_with("--resume", "--out", out)
    assert not list(out.glob("*.earlier")) and not list(out.glob("*.replaced.*"))
    (out / "model_00020.earlier").mkdir()  # as if it had been killed right after the last save
    train_with("--resume", "--out", out)
    assert not list(out.glob("*.earlier")) and (out / "model_00040").is_dir()


def stops_at(step):
    """A `train_step` in which a signal comes at this step."""
    real = train_gpt2.train_step

    def train_step(model, state, loader, config, stop, amp):
        if state.step == step:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(model, state, loader, config, stop, amp)

    return train_step


def test_a_longer_run_does_not_inherit_what_there_was_time_for(tmp_path, text, monkeypatch):
    """A cooldown of one step; and a warm-up that was too long for the time ends where the cooldown begins."""
    monkeypatch.setattr(Deadline, "cooldown_steps", lambda self, step, config: 1 if step == 12 else MAX_STEPS)
    train_with(*text, "--minutes", "5", "--warmup-steps", "50", "--out", tmp_path / "run")
    config, checkpoint = configure(["--resume", "--out", tmp_path / "run"])
    assert (config.cooldown_start, config.max_steps, config.warmup_steps) == (12, 13, 12)
    config, checkpoint = configure(["--resume", "--out", tmp_path / "run", "--max-steps", "100"])
    assert checkpoint.step == 12 and config.cooldown_steps == 40


def test_what_a_longer_run_cannot_use(tmp_path, text, capsys):
    out = finished(tmp_path, text)
    with pytest.raises(UserError, match="--checkpoint-every 0 would lose the longer run"):
        configure(["--resume", "--out", out, "--max-steps", "30", "--checkpoint-every", "0"])
    (out / "model_00012" / "model.safetensors").write_bytes(b"")
    assert configure(["--resume", "--out", out, "--max-steps", "30"])[1].step == 8
    assert "model_00012 is corrupt" in capsys.readouterr().err
