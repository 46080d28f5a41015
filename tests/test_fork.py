"""--fork: a run of its own from a checkpoint of another one, which stays as it is."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import finish_run, losses, run_to_the_end, start_run
from runs import log_without_seconds
from training import ONE_PROCESS, assert_same_run, checkpoint_names, configure, forked, trained, trainer_file

import train_gpt2
from support.checkpoints import start
from support.checkpoints.directory import write_checkpoint
from support.cli import UserError
from support.console.log import read_log
from support.runtime import budget
from train_gpt2 import train

FAST = ["--recipe", "fast", "--shuffle", "--checkpoint-every", 6]


@pytest.fixture(scope="module")
def runs(byte_shards, tmp_path_factory):
    """Runs of 20, 10 and 30 steps with a long constant learning rate, and checkpoints before the cooldown."""
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("support.console.curves.CurvesFile.draw", lambda self: None)
        for steps in (20, 10, 30):
            trained(folder / f"{steps}", "--data", byte_shards, *FAST, "--max-steps", steps)
    return folder


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != ".lock"}


@pytest.mark.parametrize("steps", [10, 30])
def test_a_fork_of_another_length_is_the_run_of_that_length(runs, tmp_path, steps):
    """Bit by bit, its log from the beginning; also a fork of that fork. The first run stays as it is."""
    before = contents(runs / "20")
    forked(tmp_path / "fork", runs / "20/model_00006", "--max-steps", steps)
    assert_same_run(tmp_path / "fork", runs / f"{steps}")
    assert trainer_file(tmp_path / "fork/model_00006")["progress"] == 6 / steps
    forked(tmp_path / "again", tmp_path / "fork/model_00006", "--max-steps", 40 - steps)
    assert_same_run(tmp_path / "again", runs / f"{40 - steps}")
    assert contents(runs / "20") == before
    assert losses(runs / "10/log.txt") != losses(runs / "30/log.txt")[:10]


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_a_fork_on_two_ranks_is_the_run_of_that_length(byte_shards, tmp_path, parallel):
    flags = ["--data", byte_shards, *FAST, "--dropout", 0.2, "--parallel", parallel]
    start = dict(cwd=tmp_path, world_size=2)
    run_to_the_end(*flags, "--max-steps", 8, "--out", "short", **start)
    run_to_the_end(*flags, "--max-steps", 16, "--out", "long", **start)
    more = ["--fork", "short/model_00006", "--out", "fork", "--max-steps", 16]
    run_to_the_end(*more, defaults=(), **start)
    assert_same_run(tmp_path / "fork", tmp_path / "long")


def kill_at_step_7(rank: int) -> None:
    real = train_gpt2.train_step

    def step(model, state, *args):
        if state.step == 7:
            for thread in threading.enumerate():
                if thread.name == "checkpoint 6":
                    thread.join()
            os.kill(os.getpid(), signal.SIGKILL)
        return real(model, state, *args)

    train_gpt2.train_step = step


@pytest.mark.parametrize("saves", [True, False])
def test_a_fork_that_was_killed_is_started_again_or_resumed(runs, tmp_path, saves):
    """It saves at its start if that is due; before its first checkpoint, the same command starts it over."""
    flags = ["--fork", runs / "20/model_00006", "--out", "fork", "--max-steps", 30]
    flags += ["--checkpoint-every", 6 if saves else 10]
    assert finish_run(start_run(*flags, cwd=tmp_path, sabotage=kill_at_step_7, defaults=())) == [-9]
    if saves:
        with pytest.raises(UserError, match="already contains a run. Continue it with --resume"):
            forked(tmp_path / "fork", flags[1], *flags[4:])
        flags = ["--resume", "--out", "fork"]
    run_to_the_end(*flags, cwd=tmp_path, defaults=())
    assert log_without_seconds(tmp_path / "fork") == log_without_seconds(runs / "30")
    for again in (["--resume"], [*flags, "--resume", "auto"]):  # as after a restart of torchrun
        config, checkpoint = configure([*again, "--out", tmp_path / "fork"])
        assert checkpoint.step == 30 and not config.starts_fork


def test_two_forks_of_a_checkpoint_at_once(runs, tmp_path):
    both = [
        start_run("--fork", runs / "20/model_00006", "--out", f"to_{n}", "--max-steps", n, cwd=tmp_path, defaults=())[0]
        for n in (10, 30)
    ]
    assert finish_run(both) == [0, 0]
    for n in (10, 30):
        assert_same_run(tmp_path / f"to_{n}", runs / f"{n}")


def test_a_fork_takes_other_flags_and_says_which(runs, byte_shards, tmp_path, capsys):
    """Another learning rate, batch, optimizer, data: the weights are those of the checkpoint, and the step goes on."""
    data = shutil.copytree(byte_shards, tmp_path / "other")
    flags = ["--max-steps", 9, "--max-lr", 0.0, "--min-lr", 0.0, "--total-batch-size", 512, "--checkpoint-every", 0]
    forked(tmp_path / "fork", runs / "20/model_00006", *flags, "--optimizer", "adamw", "--data", data)
    printed = " ".join(capsys.readouterr().out.split())
    for change in ("--max-lr 0 (was 0.003)", "--total-batch-size 512 (was 256)", "--optimizer adamw (was muon)"):
        assert change in printed
    steps = [int(line.split()[0]) for line in (tmp_path / "fork/log.txt").read_text().splitlines() if "train" in line]
    assert steps == list(range(9))  # those before the fork come from the other run's log
    expected = losses(runs / "20/log.txt")[:6]
    assert losses(tmp_path / "fork/log.txt")[:6] == expected
    forked(tmp_path / "saved", runs / "20/model_00006", "--max-steps", 7, "--max-lr", 0, "--min-lr", 0)
    states = [trainer_file(path) for path in (runs / "20/model_00006", tmp_path / "saved/model_00007")]
    assert [state["step"] for state in states] == [6, 7]
    weights = [
        (path / "model.safetensors").read_bytes() for path in (runs / "20/model_00006", tmp_path / "saved/model_00007")
    ]
    assert weights[0] == weights[1]


def test_the_best_loss_of_a_fork_is_one_of_its_own(runs, tmp_path, capsys):
    """Not of the run that it started from, which may have had other data; also at the step of the fork."""
    parent = shutil.copytree(runs / "20", tmp_path / "parent")
    (parent / "log.txt").write_text("3 val 0.1000\n6 val 0.2000\n" + (parent / "log.txt").read_text())
    forked(tmp_path / "fork", parent / "model_00006", "--val-every", 3, "--max-steps", 9, "--max-lr", 0, "--min-lr", 0)
    log = read_log(tmp_path / "fork/log.txt")["val"]
    assert log[3] == 0.1 and log[6] == log[9] > 1
    last = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("best"))
    assert "at step 6" in last


def test_another_optimizer_starts_anew(runs, tmp_path):
    forked(tmp_path / "fork", runs / "20/model_00006", "--max-steps", 7, "--optimizer", "adamw")
    steps = {
        float(state["step"]) for state in trainer_file(tmp_path / "fork/model_00007")["optimizer"]["state"].values()
    }
    assert steps == {1.0}


@pytest.mark.parametrize(
    "flags, problem",
    [
        (["--n-layer", 3, "--block-size", 8], ["--n-layer is 3, but the model in", "--block-size is 8, but the model"]),
        (["--max-steps", 5], ["model_00006 was trained for 6 steps"]),
        (["--model", "gpt2-xl"], ["--fork brings its own model. Leave out --model."]),
        (["--text", "x.txt", "--tokenizer", "bytes"], ["--fork brings its own model. Leave out --tokenizer."]),
    ],
)
def test_what_a_fork_cannot_be(runs, tmp_path, flags, problem):
    with pytest.raises(UserError) as error:
        configure(["--fork", runs / "20/model_00006", "--out", tmp_path / "fork", *flags])
    assert len(error.value.problems) == len(problem)
    assert all(text in found for text, found in zip(problem, error.value.problems, strict=True))


def test_a_text_of_its_own_is_compared_with_the_shards_that_are_there(runs, tmp_path, monkeypatch):
    """A fork that was killed may have left those of another text. Those of its parent need no text any more."""
    asked = []
    monkeypatch.setattr(start, "make_preset_shards", lambda config, resumed, find: asked.append(resumed))
    (tmp_path / "text.txt").write_text("A text. " * 100)
    fork = ["--fork", runs / "20/model_00006", "--out", tmp_path / "fork", "--max-steps", 30]
    config, checkpoint = configure([*fork, "--text", tmp_path / "text.txt"])
    checkpoint.config["text"] = config.text
    for data in (config.data, str(tmp_path / "run/data")):
        start.check_folder_and_make_shards(replace(config, data=data), checkpoint)
    assert asked == [False, True]


def test_what_follows_from_other_flags_follows_in_a_fork(runs, tmp_path):
    """As in a new run: the recipe's optimizer and rates, and a final rate that fits the highest."""
    fork = ["--fork", runs / "20/model_00006", "--out", tmp_path / "fork"]
    config, _ = configure([*fork, "--recipe", "gpt2"])
    assert (config.optimizer, config.schedule, config.max_lr, config.min_lr) == (
        "adamw",
        "cosine",
        6e-4,
        pytest.approx(6e-5),
    )
    config, _ = configure([*fork, "--max-lr", 1e-4])
    assert (config.optimizer, config.max_lr, config.min_lr) == ("muon", 1e-4, pytest.approx(2e-6))
    config, _ = configure([*fork, "--keep", 3])
    assert (config.max_lr, config.min_lr, config.keep) == (3e-3, pytest.approx(6e-5), 3)


def test_resume_auto_without_a_folder_does_not_touch_the_run_that_is_forked(runs, monkeypatch):
    monkeypatch.chdir(runs)
    with pytest.raises(UserError, match="Name its folder with --out"):
        configure(["--fork", "20/model_00006", "--resume", "auto"])


def test_the_command_of_a_refusal_is_one_that_works(runs):
    """It leaves out what a fork cannot change, and starts before the cooldown if the run is over, or is to be longer."""
    with pytest.raises(UserError) as error:
        configure(["--resume", "--out", runs / "20", "--max-steps", 30, "--n-layer", 3])
    assert error.value.problems[-1].endswith(f"--fork {runs}/20/model_00012 --out NEW --max-steps 30")
    with pytest.raises(UserError) as error:
        configure(["--resume", "--out", runs / "20", "--max-lr", 3e-4])
    assert error.value.problems[-1].endswith(f"--fork {runs}/20/model_00012 --out NEW --max-lr 0.0003")
    with pytest.raises(UserError) as error:
        configure(["--resume", "--out", runs / "20", "--n-layer", 3])
    assert len(error.value.problems) == 1


def test_a_fork_needs_a_folder_and_an_intact_checkpoint(runs, tmp_path):
    with pytest.raises(UserError, match="--fork starts another run. Name its folder with --out."):
        configure(["--fork", runs / "20/model_00006"])
    copy = shutil.copytree(runs / "20/model_00006", tmp_path / "model_00006")
    (copy / "model.safetensors").write_bytes(b"")
    with pytest.raises(UserError, match="is corrupt"):
        configure(["--fork", copy, "--out", tmp_path / "fork"])
    (copy / "checkpoint.json").unlink()  # it was copied in part, or comes from a hub
    with pytest.raises(UserError, match="is not a checkpoint: it has no checkpoint.json"):
        configure(["--fork", copy, "--out", tmp_path / "fork"])
    with pytest.raises(UserError, match="already contains a run"):
        forked(runs / "10", runs / "20/model_00006", "--max-steps", 30)
    assert torch.load(runs / "10/model_00010/trainer.pt", weights_only=True)["step"] == 10


def test_a_folder_has_the_fork_that_is_asked_for(runs, tmp_path):
    forked(tmp_path / "fork", runs / "20/model_00006", "--max-steps", 7)
    for out, fork in ((tmp_path / "fork", runs / "20/model_00012"), (runs / "10", runs / "20/model_00006")):
        for resume in (["--resume"], ["--resume", "auto"]):
            with pytest.raises(UserError, match="already has a run that is not a fork of .*Use another --out"):
                configure(["--fork", fork, "--out", out, *resume])


@pytest.mark.parametrize("minutes", [None, 0.5])
def test_what_a_timed_run_validates_is_chosen_once(runs, tmp_path, monkeypatch, minutes):
    """By hand: an eighth of 40,000 tokens is 5,000, fewer than the 32,768 that are enough."""

    def write_files(folder):
        shutil.copytree(
            runs / "20/model_00006", folder, ignore=shutil.ignore_patterns("checkpoint.json"), dirs_exist_ok=True
        )
        content = torch.load(folder / "trainer.pt", weights_only=True)
        content["config"] |= {"val_tokens": 100_000, "minutes": minutes}
        torch.save(content, folder / "trainer.pt")

    write_checkpoint(tmp_path / "run/model_00006", write_files)
    found = []
    monkeypatch.setattr(train_gpt2, "train", lambda config, *args: found.append(config))
    monkeypatch.setattr(budget, "_tokens_per_second", lambda *args: 40_000 / 60)
    train_gpt2.main(["--fork", str(tmp_path / "run/model_00006"), "--out", str(tmp_path / "fork"), "--minutes", "1"])
    assert found[0].val_tokens == (100_000 if minutes else 5_000)


@pytest.mark.slow
def test_intervals_follow_the_new_length_unless_they_were_chosen(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("It was the best of times, it was the worst of times. " * 400)
    text = ["--text", "text.txt", "--tokenizer", "bytes", "--device", "cpu", "--dtype", "fp32", "--max-steps", 8]
    train(configure([*text, "--val-every", 3, "--out", "run"])[0], ONE_PROCESS)
    assert checkpoint_names(Path("run"))[0] == "model_00002"
    config, _ = configure(["--fork", "run/model_00002", "--out", "fork", "--max-steps", 40])
    assert (config.checkpoint_every, config.val_every, config.decay_steps) == (10, 3, 40)
    config, _ = configure(["--fork", "run/model_00002", "--out", "fork", "--minutes", 5])
    assert (config.checkpoint_every, config.val_every, config.minutes) == (None, 3, 5.0)
    assert config.data == "run/data"  # the shards stay where they are
