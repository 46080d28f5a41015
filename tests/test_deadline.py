"""--minutes: when the cooldown begins, by hand; and what is decided is kept, bit by bit. Longer runs."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
from helpers import TINY_MODEL_FLAGS, finish_run, run_to_the_end, start_run
from training import ONE_PROCESS, assert_same_run, checkpoint_names, configure, resumed, run_info, trainer_file

import train_gpt2
from support.cli import UserError
from support.console import deadline
from support.console.deadline import Deadline
from support.data.presets import MAX_STEPS
from train_gpt2 import get_lr, train

TEXT = "".join(f"{a} and {b} are {a + b}.\n" for a in range(40) for b in range(60))
FLAGS = "--device cpu --dtype fp32 --tokenizer bytes --batch-size 4 --total-batch-size 256 --max-lr 3e-3".split()
FLAGS += "--warmup-steps 3 --val-every 7 --val-tokens 512 --sample-every 0 --keep 0".split()
STEPS = 24  # for which there is time: the cooldown begins at step 15, as 9 of 24 are at most 0.4, and 10 are not


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(TEXT)
    return ["--text", path, *TINY_MODEL_FLAGS, *FLAGS]


def time_for(steps: int, patch: pytest.MonkeyPatch | None = None) -> None:
    """Makes the clock say that there is time for this many steps."""

    def cooldown_steps(self, step, config):
        left = max(1, steps - step)
        return left if left <= 0.4 * (step + left) else MAX_STEPS

    (patch.setattr if patch else setattr)(Deadline, "cooldown_steps", cooldown_steps)


def train_with(*flags):
    config, checkpoint = configure(flags)
    train(config, ONE_PROCESS, checkpoint)


# ---- the clock


def decisions(
    monkeypatch, step_seconds, *, minutes=2.0, evaluation_seconds=0.0, val_every=0, fraction=0.4, other_ranks=int
):
    """The step at which the cooldown begins, and the number of steps, of a run whose steps take `step_seconds(step)`."""
    now = [0.0]
    monkeypatch.setattr(deadline, "STARTED", 0.0)
    monkeypatch.setattr(deadline.time, "perf_counter", lambda: now[0])
    run = run_info("--schedule", "wsd", "--val-every", val_every)
    length = dict(max_steps=50, decay_steps=MAX_STEPS, cooldown_fraction=fraction, warmup_steps=0)
    run.config = config = replace(run.config, minutes=minutes, demo=True, **length)
    clock = Deadline(run, SimpleNamespace(rank=0, all_reduce_min=other_ranks))
    for step in range(1000):
        config = clock.config_at(step, config)
        assert run.config is config
        if not config.open_ended:
            assert config.cooldown_start == step and config.decay_steps == config.max_steps
            assert get_lr(step - 1, config) == get_lr(step, config) == config.max_lr > get_lr(step + 1, config)
            assert clock.config_at(step, config) is config
            return step, config.max_steps
        assert get_lr(step, config) == config.max_lr
        now[0] += step_seconds(step) + (evaluation_seconds if val_every and step % val_every == 0 else 0.0)
    raise AssertionError


@pytest.mark.parametrize("fraction, expected", [(0.4, (70, 116)), (0.2, (93, 116)), (0.0, (115, 116))])
def test_the_cooldown_begins_when_its_share_is_left(fraction, expected, monkeypatch):
    """By hand: 120 s less 4 s for the end are 116 steps. At step 70, 46 are left, the first that are at most 0.4 of 116;
    0.2 are 23. There is a last step in any case."""
    assert decisions(monkeypatch, lambda step: 1.0, fraction=fraction) == expected


@pytest.mark.parametrize("before, after, changes_at, earliest", [(1, 2, 10, 114), (1, 2, 63, 114), (2, 1, 20, 108)])
def test_a_machine_that_becomes_slower_or_faster_ends_on_time(before, after, changes_at, earliest, monkeypatch):
    """After 116 s, or at most a slow step earlier; slow steps of before count in the pace for a while."""
    step, total = decisions(monkeypatch, lambda step: before if step < changes_at else after)
    assert earliest <= before * changes_at + after * (total - changes_at) <= 116
    assert step < 80


@pytest.mark.parametrize("slow", [0, 1, 40])
def test_a_single_slow_step_decides_nothing(slow, monkeypatch):
    """The first one of a process, which compiles, or one in which it was paused: 19 s more."""
    step, total = decisions(monkeypatch, lambda step: 20.0 if step == slow else 1.0)
    assert total == pytest.approx(97, abs=1) and step == pytest.approx(0.6 * 97, abs=2)


def test_evaluations_to_come_are_left_time_for(monkeypatch):
    """A validation of 2 s at every 12th step, and after the last."""
    step, total = decisions(monkeypatch, lambda step: 1.0, evaluation_seconds=2.0, val_every=12)
    validations = total // 12 + 1 + (total % 12 > 0)
    assert 114 <= total + 2 * validations <= 116 and step == pytest.approx(0.6 * total, abs=2)


def test_more_and_fewer_steps_than_estimated(monkeypatch):
    """The estimate is 50 steps: at step 50, it becomes 100, and so on. Two steps take as long as there is time."""
    assert decisions(monkeypatch, lambda step: 1.0, minutes=4.0) == (142, 236)
    assert decisions(monkeypatch, lambda step: 30.0, minutes=1.0)[1] <= 3


def test_a_rank_whose_clock_is_ahead_does_not_decide_alone(monkeypatch):
    """All ranks take the smallest number; the others' is MAX_STEPS."""
    assert decisions(monkeypatch, lambda step: 1.0, other_ranks=lambda n: min(n, MAX_STEPS)) == (70, 116)
    monkeypatch.setattr(deadline.time, "perf_counter", lambda: 1e6)
    run = run_info("--schedule", "wsd")
    run.config = replace(run.config, minutes=2.0, decay_steps=MAX_STEPS)
    rank_1 = Deadline(run, SimpleNamespace(rank=1, all_reduce_min=lambda n: n))
    assert rank_1.config_at(3, run.config) is run.config  # late by days, but only rank 0's clock counts
    rank_1.dist.all_reduce_min = lambda n: 7
    assert rank_1.config_at(3, run.config).max_steps == 10


# ---- runs


def test_the_run_is_that_of_as_many_steps(tmp_path, text, monkeypatch, capsys):
    time_for(STEPS, monkeypatch)
    text = [*text, "--checkpoint-every", 4]
    out = tmp_path / "minutes"
    train_with(*text, "--minutes", 5, "--out", out)
    assert "step    15 | the cooldown begins: 9 steps, to step 24" in capsys.readouterr().out
    train_with(*text, "--max-steps", STEPS, "--cooldown-fraction", 9 / 24, "--out", tmp_path / "steps")
    assert_same_run(out, tmp_path / "steps")
    for folder in (out, tmp_path / "steps"):  # every 4 steps, and before the cooldown
        assert checkpoint_names(folder) == [f"model_{step:05d}" for step in (4, 8, 12, 15, 16, 20, 24)]
    assert "decay-steps" not in (out / "model_00012" / "README.md").read_text()
    assert "--decay-steps 24" in (out / "model_00015" / "README.md").read_text()
    before, at = (trainer_file(out / f"model_{step:05d}")["config"] for step in (12, 15))
    assert before["decay_steps"] == MAX_STEPS and at["decay_steps"] == at["max_steps"] == 24

    # What was trained counts when it is resumed. By hand: 5 minutes, of which 8 steps took 7 s each.
    for name in checkpoint_names(out)[2:]:
        shutil.rmtree(out / name)
    (out / "log.txt").write_text("".join(f"{step} seconds 7\n" for step in range(24)))
    config, checkpoint = configure(["--resume", "--out", out])
    assert config.open_ended and checkpoint.step == 8
    assert deadline.seconds_for_process(replace(run_info(checkpoint=checkpoint), config=config)) == pytest.approx(244)


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
def test_a_killed_run_is_the_one_that_was_not(tmp_path, text):
    """Before the decision, in it, and in the cooldown; each is resumed from the last checkpoint."""
    run = [*text, "--checkpoint-every", 4, "--minutes", 5, "--parallel", "fsdp"]
    options = dict(cwd=tmp_path, world_size=2, tiny=False)
    run_to_the_end(*run, "--out", "straight", sabotage=live, **options)
    for step in (10, 0, 18):
        out = f"killed{step}"
        assert finish_run(start_run(*run, "--out", out, sabotage=partial(die, step), **options)) == [-9, -9]
        run_to_the_end("--resume", *text, "--out", out, sabotage=live, **options)
        assert_same_run(tmp_path / out, tmp_path / "straight")


# ---- longer


@pytest.fixture(scope="module")
def runs(tmp_path_factory, text):
    """A run of 20 steps with a cooldown from step 12 on, and one of 30 steps; with checkpoints before the cooldown."""
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("support.console.curves.CurvesFile.draw", lambda self: None)
        for steps in (20, 30):
            train_with(*text, "--max-steps", steps, "--cooldown-fraction", 0.4, "--out", folder / str(steps))
    assert checkpoint_names(folder / "20") == [f"model_{step:05d}" for step in (5, 10, 12, 15, 20)]
    return folder


@pytest.fixture
def out(runs, tmp_path):
    """A copy of the run of 20 steps."""
    return shutil.copytree(runs / "20", tmp_path / "run")


@pytest.mark.parametrize("flags", [["--max-steps", 30], ["--minutes", 3]])
def test_a_longer_run_continues_before_the_cooldown(runs, out, monkeypatch, capsys, flags):
    """A run of 20 steps that becomes one of 30 is the run of 30 steps."""
    time_for(30, monkeypatch)
    config, checkpoint = configure(["--resume", "--out", out, *flags])
    assert checkpoint.step == 12 and config.open_ended == ("--minutes" in flags)
    assert not config.open_ended or config.minutes == pytest.approx(3, abs=0.1)
    train(config, ONE_PROCESS, checkpoint)
    assert f"continues from {out}/model_00018, before the cooldown" in capsys.readouterr().out
    assert_same_run(out, runs / "30")
    for again in (["--resume"], ["--resume", "auto", "--minutes", "3"]):  # which has finished, in a loop of restarts
        config, checkpoint = configure([*again, "--out", out])
        assert checkpoint.step == config.max_steps == 30


def test_intervals_follow_the_new_length_unless_they_were_chosen(out):
    longer = ["--resume", "--out", out, "--max-steps", 40]
    config, checkpoint = configure(longer)
    assert (config.checkpoint_every, config.val_every, checkpoint.step) == (10, 7, 12)
    assert configure([*longer, "--checkpoint-every", 7])[0].checkpoint_every == 7
    assert configure([*longer, "--decay-steps", 20])[1].step == 20  # who wants to stay at the lowest learning rate


def test_what_a_longer_run_cannot_use(out):
    with pytest.raises(UserError, match="--checkpoint-every 0 would lose the longer run"):
        configure(["--resume", "--out", out, "--max-steps", "30", "--checkpoint-every", "0"])
    (out / "model_00012" / "model.safetensors").write_bytes(b"")
    assert configure(["--resume", "--out", out, "--max-steps", "30"])[1].step == 10
    for step in (5, 10, 12):
        shutil.rmtree(out / f"model_{step:05d}")
    with pytest.raises(UserError, match=r"has no checkpoint of step 12 or earlier, before the cooldown"):
        configure(["--resume", "--out", out, "--minutes", "3"])
    config, checkpoint = configure(["--resume", "--out", out, "--max-steps", "40"])  # at the lowest rate, as it was
    assert checkpoint.step == config.decay_steps == 20


@pytest.mark.parametrize("val", [9.0, 0.001])
def test_a_finished_model_stays_until_a_longer_run_has_finished(out, monkeypatch, capsys, val):
    """Also if two longer runs are interrupted, one after the other; a process that finds the run finished cleans up.

    A model that is better than all of the longer run stays.
    """
    contents = json.loads((out / "model_00020" / "checkpoint.json").read_text())
    (out / "model_00020" / "checkpoint.json").write_text(json.dumps(contents | {"val": val}))
    weights, train_step = (out / "model_00020" / "model.safetensors").read_bytes(), train_gpt2.train_step

    def interrupted(model, state, *args):
        if state.step == 22:
            os.kill(os.getpid(), signal.SIGTERM)
        return train_step(model, state, *args)

    for steps in (30, 40):
        with monkeypatch.context() as patch, pytest.raises(SystemExit):
            patch.setattr(train_gpt2, "train_step", interrupted)
            resumed(out, "--max-steps", steps, "--checkpoint-every", "5", "--keep", "1")
        assert (out / "model_00020.earlier" / "model.safetensors").read_bytes() == weights
    train_with("--resume", "--out", out)
    better = [out / "model_00020.earlier"] if val < 1 else []
    assert list(out.glob("*.earlier")) == better and not (out / "replaced_run").exists()
    summary = (
        f"best    validation loss {val:.4f} nats per token, {val:.4f} per byte, at step 20: {out}/model_00020.earlier"
    )
    assert (" ".join(summary.split()) in " ".join(capsys.readouterr().out.split())) == (val < 1)
    # the one before the cooldown, the last, and perhaps the best one are kept
    assert {"model_00024", "model_00040"} <= {*checkpoint_names(out)} and len(checkpoint_names(out)) <= 3
    (out / "model_00021.earlier").mkdir()  # as if it had been killed right after the last save
    train_with("--resume", "--out", out)
    assert list(out.glob("*.earlier")) == better and (out / "model_00040").is_dir()


def test_a_longer_run_does_not_inherit_what_there_was_time_for(tmp_path, text, monkeypatch):
    """A cooldown of one step; and a warm-up that was too long for the time ends where the cooldown begins."""
    monkeypatch.setattr(Deadline, "cooldown_steps", lambda self, step, config: 1 if step == 12 else MAX_STEPS)
    train_with(*text, "--minutes", "5", "--warmup-steps", "50", "--checkpoint-every", 4, "--out", tmp_path / "run")
    config, checkpoint = configure(["--resume", "--out", tmp_path / "run"])
    assert (config.cooldown_start, config.max_steps, config.warmup_steps) == (12, 13, 12)
    config, checkpoint = configure(["--resume", "--out", tmp_path / "run", "--max-steps", "100"])
    assert checkpoint.step == 12 and config.cooldown_steps == 40
