"""--minutes: progress and learning rates by hand, with a clock that the test moves; runs that end on time, whatever happens."""

from __future__ import annotations

import json
import math
import re
import signal
import time
from dataclasses import replace

import numpy as np
import pytest
from helpers import finish_run, losses, start_run, stopped_after
from training import ONE_PROCESS, assert_same_run, checkpoint_names, config_of, configure, train, trainer_file

import train_gpt2
from support.checkpoints.directory import CONTENTS, newest_before_cooldown, newest_checkpoint, step_of
from support.cli import UserError
from support.runtime import clock
from support.runtime.clock import Clock
from support.runtime.schedule import Schedule
from support.sizing import presets
from train_gpt2 import cooldown_start, get_lr

TEXT = "".join(f"{a} and {b} are {a + b}.\n" for a in range(40) for b in range(60))
FLAGS = "--n-layer 1 --n-head 1 --n-embd 16 --block-size 16 --device cpu --dtype fp32 --tokenizer bytes --batch-size 16 --total-batch-size 256 --max-lr 3e-3".split()
FLAGS += "--val-tokens 512 --sample-every 0 --keep 0".split()


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(TEXT)
    return ["--text", str(path), *FLAGS]


class Time:
    """Takes the place of the time module in the clock."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def fake_time(monkeypatch):
    """A clock that stands at 0, which is when the process has started."""
    fake = Time()
    monkeypatch.setattr(clock, "time", fake)
    monkeypatch.setattr(clock, "STARTED", 0.0)
    return fake


# ---- by hand


def test_progress_is_the_fraction_of_the_time_for_training(fake_time):
    """By hand: of 2 minutes, 10 s go before the first step and 4 at the end; half of 106 s is over 53 s later."""
    fake_time.now = 10.0
    of_run = Clock(2.0)
    assert of_run.time_used() == 0.0
    fake_time.now = 63.0
    assert of_run.time_used() == 0.5 and of_run.seconds() == 53.0
    fake_time.now = 116.0
    assert of_run.time_used() == 1.0
    assert Clock(None).time_used() == 0.0
    timed = replace(config_of(), minutes=2.0)
    assert [Schedule(timed).time_used(seconds) for seconds in (58.0, 300.0)] == [0.5, 1.0]
    assert Schedule(config_of()).time_used(58.0) == 0.0


def test_time_for_a_last_evaluation_is_kept_and_progress_never_falls(fake_time):
    """By hand: 116 s for training; an evaluation of 6 s leaves 110, one of 50 s, which compiles, 104, as it counts 12."""
    of_run = Clock(2.0)
    for seconds, left in ((6.0, 110.0), (50.0, 104.0)):
        with of_run.evaluating():
            fake_time.now += seconds
        of_run.time_used()
        assert of_run.time_used() == pytest.approx(fake_time.now / left)
    before = of_run.time_used()
    with of_run.evaluating():  # a short one does not count
        pass
    assert before == of_run.time_used()
    fake_time.now = 0.0
    resumed = Clock(2.0, 30.0, 0.4)
    assert resumed.time_used() == 0.4  # it was further when it was saved


def test_the_age_of_the_newest_checkpoint(fake_time):
    """By hand: 30 minutes are 1,800 s, after the start of the process or the last checkpoint."""
    of_run = Clock(None)
    found = []
    for now in (1799.0, 1800.0, 3000.0):
        fake_time.now = now
        found.append(of_run.is_overdue(30.0))
    of_run.saved()
    for now in (4799.0, 4800.0):
        fake_time.now = now
        found.append(of_run.is_overdue(30.0))
    assert found == [False, True, True, False, True] and not of_run.is_overdue(0.0)


def test_half_a_step_is_kept(fake_time):
    """By hand: of 116 s, steps of 10 s leave 111; an evaluation between two of them is no step."""
    of_run, found = Clock(2.0), []
    for seconds in (10.0, 10.0, 50.0, 10.0):
        fake_time.now += seconds
        found.append(of_run.time_used())
    assert found == pytest.approx([10 / 116, 20 / 111, 70 / 111, 80 / 111])


def test_the_text_at_the_end_takes_two_seconds_at_most(fake_time):
    """By hand: where 100 tokens are trained on in a second, the 600 of two seconds forward are 1 + 2 + ... + 35 = 630."""
    of_run = Clock(2.0)
    assert of_run.tokens_of_last_text(150, 1000) == 150  # there was no step
    for _ in range(3):
        fake_time.now += 10.0
        of_run.time_used()
        assert of_run.tokens_of_last_text(150, 1000) == 35
    assert of_run.tokens_of_last_text(150, 10**6) == Clock(None).tokens_of_last_text(150, 1000) == 150


def test_the_learning_rate_follows_the_time():
    """By hand: up to 1 in a thirtieth of the time, from a tenth on; then the cooldown or the cosine, to 0.1."""
    config = replace(config_of("--schedule", "wsd", "--cooldown-fraction", 0.4), minutes=2.0, max_lr=1.0, min_lr=0.1)
    expected = {0.0: 0.1, 1 / 60: 0.5, 1 / 30: 1.0, 0.6: 1.0, 0.8: 0.55, 1.0: 0.1}
    assert {p: get_lr(7, config, p) for p in expected} == pytest.approx(expected)
    all_cooldown = replace(config, cooldown_fraction=1.0)
    assert cooldown_start(all_cooldown) == pytest.approx(1 / 30) and get_lr(7, all_cooldown, 1 / 30) == pytest.approx(1)
    cosine = replace(config, schedule="cosine")
    assert get_lr(7, cosine, 1 / 30 + 29 / 60) == pytest.approx(0.55)


# ---- runs


def train_with(*flags):
    config, start = configure(flags)
    return train(config, ONE_PROCESS, start)


def steps_take(patch, fake, seconds_of_step, interrupt=lambda when: None):
    """Moves the clock by `seconds_of_step(step)` in each step, and by 2 s in each validation."""
    real_step, real_validation = train_gpt2.train_step, train_gpt2.validation_loss

    def step(model, state, *args):
        fake.now += seconds_of_step(state.step)
        result = real_step(model, state, *args)
        interrupt("step")
        return result

    def validation_loss(*args):
        fake.now += 2.0
        interrupt("validation")
        return real_validation(*args)

    patch.setattr(train_gpt2, "train_step", step)
    patch.setattr(train_gpt2, "validation_loss", validation_loss)


@pytest.mark.parametrize(
    "seconds_of_step, steps",
    [
        (lambda step: 1.0, 106),  # 116 s, less five validations of 2 s
        (lambda step: 1.0 if step < 53 else 2.0, 80),  # twice as slow from half-way on: 53 + 27
        (lambda step: 30.0 if step == 20 else 1.0, 77),
    ],
)
def test_a_run_ends_on_time(text, tmp_path, fake_time, monkeypatch, seconds_of_step, steps):
    """It validates and saves at its quarters, saves before the cooldown, and ends at the lowest learning rate."""
    out = tmp_path / "run"
    steps_take(monkeypatch, fake_time, seconds_of_step)
    state = train_with(*text, "--minutes", 2, "--cooldown-fraction", 0.4, "--out", out)
    assert abs(state.step - steps) <= 1 and 114 <= fake_time.now <= 118
    log = [line.split() for line in (out / "log.txt").read_text().splitlines()]
    assert sum(name == "val" for _, name, _ in log) == 5
    rates = losses(out / "log.txt", "lr")
    assert max(rates) == pytest.approx(3e-3) and rates[-1] < 0.1 * 3e-3
    saved = [out / name for name in checkpoint_names(out)]
    before = [path for path in saved if json.loads((path / CONTENTS).read_text()).get("before_cooldown")]
    assert len(saved) == 5 and len(before) == 3  # at 1/4, 2/4, and 0.6
    stored = trainer_file(saved[-1])
    assert stored["progress"] == 1.0 and stored["seconds"] == pytest.approx(fake_time.now)
    assert "decay-steps" not in (saved[-1] / "README.md").read_text()


def test_the_cooldown_after_a_quarter_is_not_saved_again(text, tmp_path, fake_time, monkeypatch):
    """By hand: of 116 s, the first quarter ends after 29; with its validation of 2 s, the cooldown begins a step later."""
    out = tmp_path / "run"
    steps_take(monkeypatch, fake_time, lambda step: 1.0)
    train_with(*text, "--minutes", 2, "--cooldown-fraction", 0.74, "--out", out)
    saved = [step_of(out / name) for name in checkpoint_names(out)]
    assert len(saved) == 4 and newest_before_cooldown(out) == out / checkpoint_names(out)[0]
    rates = losses(out / "log.txt", "lr")
    assert rates[saved[0]] == max(rates) > rates[saved[0] + 2]


@pytest.mark.slow
def test_a_killed_run_continues_with_the_time_that_is_left(text, tmp_path, fake_time, monkeypatch):
    def die_at_70(step):
        if step == 70:
            raise Killed
        return 1.0

    out = tmp_path / "run"
    with monkeypatch.context() as patch, pytest.raises(Killed):
        steps_take(patch, fake_time, die_at_70)
        train_with(*text, "--minutes", 2, "--out", out)
    trained = trainer_file(out / checkpoint_names(out)[-1])["seconds"]
    fake_time.now = 3.0  # of the new process
    steps_take(monkeypatch, fake_time, lambda step: 1.0)
    train_with("--resume", "--out", out)
    assert trained + fake_time.now == pytest.approx(116, abs=2)
    lines = (out / "log.txt").read_text().splitlines()
    steps = [int(line.split()[0]) for line in lines if " train " in line]
    assert steps == list(range(len(steps)))
    finished = checkpoint_names(out)
    train_with("--resume", "--out", out)  # there is no time left
    assert checkpoint_names(out) == finished and (out / "log.txt").read_text().splitlines() == lines


class Killed(BaseException):
    pass


@pytest.mark.slow
def test_a_run_ends_when_it_has_read_its_text_often_enough(text, tmp_path, fake_time, monkeypatch, capsys):
    """Its end depends on rows, not on time: after a kill, at another speed, it is the same run. A fork may read more.

    By hand: a quarter of the rows in steps of 16 rows."""
    out, killed = tmp_path / "run", tmp_path / "killed"
    limited = [*text, "--minutes", 20, "--max-passes", 0.25, "--dropout", 0.1]
    monkeypatch.setattr(presets, "MAX_PASSES_WITH_DROPOUT", 0.25)
    steps_take(monkeypatch, fake_time, lambda step: 1.0)
    state = train_with(*limited, "--out", out)
    [shard] = (out / "data").glob("*_train_*.npy")
    rows = (len(np.load(shard)) - 1) // 16 - 1
    assert state.step == math.ceil(0.25 * rows / 16) and fake_time.now < 70
    rates = losses(out / "log.txt", "lr")
    assert max(rates) == pytest.approx(3e-3) and rates[-1] < 0.1 * 3e-3  # the cooldown is over
    assert len(losses(out / "log.txt", "val")) == 5
    printed = " ".join(capsys.readouterr().out.split())
    assert "20 minutes, but at most 0.25 passes" in printed and "falling to 6e-05 at its end" in printed
    assert "the data has been read 0.25 times, and more would only memorize it." in printed
    assert "longer python" not in printed and "note so little text teaches spelling" in printed
    fake_time.now = 0.0

    def die_at_20(step):
        if step == 20:
            raise Killed
        return 0.5

    with monkeypatch.context() as patch, pytest.raises(Killed):
        steps_take(patch, fake_time, die_at_20)
        train_with(*limited, "--out", killed)
    with pytest.raises(UserError, match="--max-passes is 1.0, but the run in .* has 0.25. Leave it out."):
        train_with("--resume", "--out", killed, "--max-passes", 1)
    fake_time.now = 3.0  # of the new process
    train_with("--resume", "--out", killed)
    assert_same_run(killed, out)
    capsys.readouterr()
    train_with("--resume", "--out", killed)
    assert "longer" not in capsys.readouterr().out
    fake_time.now = 0.0
    more = train_with("--fork", newest_before_cooldown(out), "--out", tmp_path / "more", "--max-passes", 0.5)
    assert more.step == math.ceil(0.5 * rows / 16)
    first = int(newest_before_cooldown(out).name[6:])
    assert losses(tmp_path / "more/log.txt", "lr")[first] == pytest.approx(3e-3)  # no second warm-up
    config, _ = configure(["--fork", newest_before_cooldown(out), "--out", tmp_path / "steps", "--max-steps", 80])
    assert (config.minutes, config.max_passes, config.dropout) == (None, 0.0, 0.1)
    with pytest.raises(UserError, match="--max-passes is for runs of --minutes"):
        configure([*text, "--max-passes", 3, "--out", tmp_path / "none"])


@pytest.mark.parametrize("when", ["step", "validation"])
def test_a_signal_saves_and_what_it_interrupted_is_made_up_for(text, tmp_path, fake_time, monkeypatch, when):
    """The signal comes at the first quarter: in the step that passes it, or in the validation that is due then."""
    out = tmp_path / "run"

    def interrupt(where):
        if where == when and fake_time.now > 120 / 4:
            signal.raise_signal(signal.SIGTERM)

    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        steps_take(patch, fake_time, lambda step: 20.0, interrupt)
        train_with(*text, "--minutes", 2, "--out", out)
    [saved] = checkpoint_names(out)
    at = int(saved[6:])
    assert not re.search(rf"^{at} val", (out / "log.txt").read_text(), re.MULTILINE)
    steps_take(monkeypatch, fake_time, lambda step: 20.0)
    train_with("--resume", "--out", out)
    assert re.search(rf"^{at} val", (out / "log.txt").read_text(), re.MULTILINE)


@pytest.mark.slow
def test_rank_zeros_clock_decides(text, tmp_path):
    flags = [*text, "--minutes", 30, "--parallel", "fsdp", "--val-every", 0, "--out", "run"]
    stopped = stopped_after(12, world_size=2)
    an_hour_late = replace(stopped, replaced={"support.runtime.clock.STARTED": time.perf_counter() - 3600})
    ranks = start_run(*flags, cwd=tmp_path, world_size=2, defaults=(), rank={0: stopped, 1: an_hour_late})
    assert finish_run(ranks) == [143, 143]
    rates = losses(tmp_path / "run/log.txt", "lr")
    assert (
        rates == sorted(rates) and rates[-1] < 3e-3
    )  # a warm-up of a minute; on rank 1's clock, the run would be over


@pytest.mark.slow
def test_a_fork_makes_a_timed_run_longer_or_counts_steps(text, tmp_path, fake_time, monkeypatch, capsys):
    """The fork starts before the cooldown, and what was trained counts. The first run stays as it is."""
    steps_take(monkeypatch, fake_time, lambda step: 1.0)
    out = tmp_path / "run"
    train_with(*text, "--minutes", 2, "--out", out)
    printed = " ".join(capsys.readouterr().out.split())
    start = newest_before_cooldown(out)
    assert f"longer python train_gpt2.py --fork {start} --out {out}_longer --minutes 4" in printed
    seconds, before = trainer_file(start)["seconds"], {path: path.read_bytes() for path in out.glob("*.*")}
    fake_time.now = 0.0
    train_with("--fork", start, "--out", tmp_path / "longer", "--minutes", 4)
    assert "--minutes 4 (was 2)" in " ".join(capsys.readouterr().out.split())
    assert seconds + fake_time.now == pytest.approx(240 - 4, abs=2)
    assert len(losses(tmp_path / "longer/log.txt", "val")) >= 5
    config, _ = configure(["--fork", start, "--out", tmp_path / "steps", "--max-steps", 80])
    assert (config.minutes, config.max_steps, config.decay_steps, config.val_every) == (None, 80, 80, 20)
    assert config.warmup_steps == 2
    config, _ = configure(["--fork", start, "--out", tmp_path / "rate", "--max-lr", 1e-3])
    assert config.minutes == 2  # there is time left from here, but none at the end
    with pytest.raises(UserError, match="was trained for .* and 1.9 minutes. For a longer run, use a higher"):
        configure(["--fork", newest_checkpoint(out), "--out", tmp_path / "rate", "--max-lr", 1e-3])
    assert {path: path.read_bytes() for path in out.glob("*.*")} == before
