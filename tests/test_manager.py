"""Checkpoints that cannot be written, and which ones are kept."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import resource
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from helpers import Rank, finish_run, run_to_the_end, start_run, steps_done, wait_for
from shard_helpers import small_disk
from training import (
    NEW_RUN,
    ONE_PROCESS,
    assert_same_run,
    checkpoint_names,
    config_of,
    resumed,
    run_info,
    train,
    trained,
)

import train_gpt2
from support.checkpoints import manager
from support.checkpoints.directory import find_corruption, list_checkpoints, newest_checkpoint, step_of
from support.checkpoints.manager import CheckpointManager
from support.checkpoints.state import TrainState
from support.cli import UserError
from support.console.log import LogFile
from support.runtime import clock
from support.runtime.clock import Clock
from support.runtime.signals import StopHandler


def write_x(folder):
    (folder / "x").write_text("x")


def save_one(checkpoints, step, **facts):
    """Saves a checkpoint of `step`; returns the steps of all that are there then."""
    checkpoints.start(step, write_x, **facts)
    checkpoints.wait()
    return [step_of(directory) for directory in list_checkpoints(checkpoints.out)]


def manager_of(out, *flags, stop=None, rank=0):
    """The manager of a run in this folder; its values are empty."""
    values = {"val": dict[int, float](), "hella": dict[int, float]()}
    return CheckpointManager(
        run_info("--out", out, *flags), stop or StopHandler(), lambda: None, values, replace(ONE_PROCESS, rank=rank)
    )


def full_disk(monkeypatch, which):
    """Makes some of the saves fail as on a full disk: those whose number is in `which`, from 1."""
    saves, save = [], manager.write_checkpoint

    def save_or_fail(directory, *args, **facts):
        saves.append(directory)
        if len(saves) in which:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(directory))
        save(directory, *args, **facts)

    monkeypatch.setattr(manager, "write_checkpoint", save_or_fail)


def config_for(byte_shards, out, steps):
    return config_of("--data", byte_shards, "--out", out, "--max-steps", steps, "--checkpoint-every", 2)


@pytest.fixture(scope="module")
def straight(byte_shards, tmp_path_factory):
    """A run of 10 steps whose saves succeed."""
    out = tmp_path_factory.mktemp("straight") / "run"
    train(config_for(byte_shards, out, 10), ONE_PROCESS, NEW_RUN)
    return out


def test_a_failed_save_loses_only_itself(byte_shards, straight, tmp_path, monkeypatch, capsys):
    full_disk(monkeypatch, {2, 4})
    train(config_for(byte_shards, tmp_path, 10), ONE_PROCESS, NEW_RUN)
    assert checkpoint_names(tmp_path) == ["model_00002", "model_00006", "model_00010"]
    err = capsys.readouterr().err
    assert err.count("warning: the checkpoint of step 4 could not be saved") == 1 and "No space left" in err
    assert_same_run(tmp_path, straight)


def test_the_second_failed_save_in_a_row_ends_the_run(byte_shards, tmp_path, monkeypatch):
    full_disk(monkeypatch, {2, 3})
    with pytest.raises(UserError, match="step 6 could not be saved in .*No space left.*neither could the one before"):
        train(config_for(byte_shards, tmp_path, 1000), ONE_PROCESS, NEW_RUN)
    assert checkpoint_names(tmp_path) == ["model_00002"] and steps_done(tmp_path) < 1000


def test_a_full_disk_is_named_with_its_free_space(byte_shards, tmp_path, capsys):
    """A checkpoint takes about 0.5 MB: the disk has room for one."""
    with small_disk(tmp_path / "disk", 800_000) as out, pytest.raises(UserError) as error:
        train(config_for(byte_shards, out, 1000), ONE_PROCESS, NEW_RUN)
    failed = rf"the checkpoint of step {{}} could not be saved in {out} \(0\.[23] MB free\): "
    assert re.search(f"warning: {failed.format(4)}.*(No space left|not be written completely)", capsys.readouterr().err)
    assert re.search(failed.format(6), str(error.value))


def test_a_failed_last_checkpoint_is_an_error(byte_shards, tmp_path, monkeypatch):
    full_disk(monkeypatch, {2})
    with pytest.raises(UserError, match="the last checkpoint could not be saved"):
        train(config_for(byte_shards, tmp_path, 4), ONE_PROCESS, NEW_RUN)
    assert checkpoint_names(tmp_path) == ["model_00002"]


@pytest.mark.slow
def test_a_file_that_cannot_grow_ends_the_run_with_the_old_checkpoint_intact(byte_shards, tmp_path):
    """With RLIMIT_FSIZE the writes themselves fail, in each library that writes, and both ranks must end."""
    flags = ["--data", byte_shards, "--max-steps", 100000, "--val-every", 0, "--checkpoint-every", 10]
    ranks, out = start_run(*flags, "--out", "run", cwd=tmp_path, world_size=2), tmp_path / "run"
    assert wait_for(lambda: checkpoint_names(out)[:1] == ["model_00010"] if out.exists() else False)
    resource.prlimit(ranks[0].pid, resource.RLIMIT_FSIZE, (50_000, 50_000))  # weights take 145,000 bytes
    assert finish_run(ranks) == [2, 2]
    output = (tmp_path / "0.txt").read_text()
    assert output.count("warning: the checkpoint of step") == 1
    assert output.count("error: the checkpoint of step") == 1 and "neither could the one before" in output
    assert "error" not in (tmp_path / "1.txt").read_text()
    assert newest_checkpoint(out) is not None and not any(out.glob(".model*"))


def test_no_checkpoint_is_ahead_of_its_log(byte_shards, tmp_path, monkeypatch):
    def full(self):
        raise OSError("the log of the run could not be written")

    monkeypatch.setattr(LogFile, "sync", full)
    with pytest.raises(UserError, match="could not be saved"):
        train(config_for(byte_shards, tmp_path, 20), ONE_PROCESS, NEW_RUN)
    assert checkpoint_names(tmp_path) == []


def test_weights_that_are_not_finite_are_not_saved(byte_shards, tmp_path, monkeypatch, capsys):
    real = train_gpt2.train_step

    def step(model, state, *args):
        result = real(model, state, *args)
        with torch.no_grad():
            state.model.transformer.ln_f.bias[0] = torch.inf
        return result

    monkeypatch.setattr(train_gpt2, "train_step", step)
    flags = ["--data", byte_shards, "--checkpoint-every", 1, "--max-steps", 9, "--val-every", 0]
    with pytest.raises(UserError, match="3 steps in a row had a loss or gradients"):
        trained(tmp_path, *flags)
    assert checkpoint_names(tmp_path) == []
    assert re.search("warning: the checkpoint of step 1 could not .* weights are not finite", capsys.readouterr().err)


def test_a_model_card_that_cannot_be_made_costs_no_checkpoint(byte_shards, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(manager, "model_card", lambda *args: {}["missing"])
    trained(tmp_path, "--data", byte_shards, "--max-steps", 2)
    assert checkpoint_names(tmp_path) == ["model_00002"] and find_corruption(tmp_path / "model_00002") is None
    assert "warning: the model card of step 2 could not be written" in capsys.readouterr().err


def test_training_only_waits_for_a_copy(byte_shards, straight, tmp_path, monkeypatch):
    """What is saved is the state of its step, though it is written while later steps change it."""
    real, done = manager.write_checkpoint, []

    def save_late(directory, *args, **facts):
        if directory.name == "model_00002":
            wait_for(lambda: steps_done(tmp_path) >= 4, timeout=20)
        done.append((directory.name, steps_done(tmp_path)))
        return real(directory, *args, **facts)

    monkeypatch.setattr(manager, "write_checkpoint", save_late)
    train(config_for(byte_shards, tmp_path, 10), ONE_PROCESS, NEW_RUN)
    assert done[0] == ("model_00002", 4)  # and the save of step 4 waited for it
    for directory in list_checkpoints(tmp_path)[1:]:
        shutil.rmtree(directory)
    resumed(tmp_path)
    assert_same_run(tmp_path, straight)


# -----------------------------------------------------------------------------
# Which ones are kept


def test_the_newest_and_the_best_are_kept(tmp_path):
    values = {10: 3.0, 20: 2.0, 30: 2.5, 40: 2.4, 50: 2.6}
    checkpoints, kept = manager_of(tmp_path, "--keep", 2), []
    for step in (10, 20, 25, 30, 40, 50):
        if step in values:
            checkpoints.evaluations["val"][step] = values[step]
        kept.append(save_one(checkpoints, step))
    assert kept == [[10], [10, 20], [20, 25], [20, 25, 30], [20, 30, 40], [20, 40, 50]]
    # a resume with another --val-every drops values from its log
    assert save_one(manager_of(tmp_path, "--keep", 2), 55) == [20, 50, 55]
    assert save_one(manager_of(tmp_path), 60) == [20, 50, 55, 60]
    assert json.loads((tmp_path / "model_00020/checkpoint.json").read_text())["val"] == 2.0


def test_only_losses_over_the_same_tokens_are_compared(tmp_path):
    """The loss of 1.0 is of another validation: --keep 1 has no reason to keep it."""
    other = manager_of(tmp_path, "--total-batch-size", 512)
    other.evaluations["val"][10] = 1.0
    save_one(other, 10)
    checkpoints = manager_of(tmp_path, "--keep", 1)
    for step, loss in ((20, 2.0), (30, 3.0)):
        checkpoints.evaluations["val"][step] = loss
        kept = save_one(checkpoints, step)
    assert kept == [20, 30]


def test_the_loss_of_a_checkpoint_counts_wherever_it_was_measured(tmp_path):
    """A stop in a validation saves a checkpoint without its loss; the resumed run measures it."""
    save_one(manager_of(tmp_path), 10)
    checkpoints = manager_of(tmp_path, "--keep", 1)
    checkpoints.evaluations["val"].update({10: 2.0, 20: 3.0})
    assert save_one(checkpoints, 20) == [10, 20]


def test_a_checkpoint_is_better_only_if_both_losses_are_known(tmp_path):
    checkpoints = manager_of(tmp_path)
    assert checkpoints.better_than(5) is None
    for step in (1, 2, 3):
        save_one(checkpoints, step)
    assert checkpoints.better_than(3) is None
    checkpoints.evaluations["val"].update({1: 2.0, 2: 2.0})
    assert checkpoints.better_than(3) is None
    checkpoints.evaluations["val"].update({3: 3.0, 5: 1.0})
    assert checkpoints.better_than(3) == tmp_path / "model_00002"
    assert checkpoints.better_than(5) is None  # it is not saved, and better than those that are


def test_a_loss_that_is_not_finite_is_the_worst(tmp_path):
    checkpoints = manager_of(tmp_path, "--keep", 1)
    for step, loss in ((10, 5.0), (20, math.nan), (30, math.nan)):
        checkpoints.evaluations["val"][step] = loss
        kept = save_one(checkpoints, step)
    assert kept == [10, 30] and checkpoints.better_than(30) == tmp_path / "model_00010"


def test_a_corrupt_checkpoint_that_a_resume_skips_is_set_aside(byte_shards, tmp_path):
    """The run is cut at step 4; what was saved at step 8 has the lowest loss, and would be kept as the best."""
    trained(tmp_path, "--data", byte_shards, "--max-steps", 12, "--val-every", 4, "--checkpoint-every", 4)
    shutil.rmtree(tmp_path / "model_00012")
    (tmp_path / "model_00008" / "config.json").write_text("{}")
    facts = tmp_path / "model_00008" / "checkpoint.json"
    facts.write_text(json.dumps(json.loads(facts.read_text()) | {"val": 0.1}))
    resumed(tmp_path, "--checkpoint-every", 5, "--val-every", 5, "--keep", 1)
    assert checkpoint_names(tmp_path) == ["model_00008.corrupt", "model_00012"]


def test_what_is_removed_is_said(tmp_path, capsys):
    for step in (1, 2):
        save_one(manager_of(tmp_path), step)
    save_one(manager_of(tmp_path, "--keep", 1), 3)
    assert "step     3 | removed model_00002 (--keep 1), model_00001 (--keep 1)" in capsys.readouterr().out


def always(*args):
    return True


def never(*args):
    return False


def test_a_checkpoint_is_saved_when_the_newest_one_is_old(byte_shards, straight, tmp_path, monkeypatch, capsys):
    """Here, after each step. It is there until the next one, and changes nothing else."""
    monkeypatch.setattr(Clock, "is_overdue", always)
    train(config_for(byte_shards, tmp_path, 10), ONE_PROCESS, NEW_RUN)
    assert checkpoint_names(tmp_path) == [f"model_{step:05d}" for step in (2, 4, 6, 8, 10)]
    assert_same_run(tmp_path, straight)
    said = [line for line in capsys.readouterr().out.splitlines() if "saved" in line or "removed" in line]
    assert said[:3] == [
        f"step     1 | saved {tmp_path / 'model_00001'}, until the next one",
        f"step     2 | saved {tmp_path / 'model_00002'}",
        "step     2 | removed model_00001 (--checkpoint-minutes)",
    ]
    trained(tmp_path / "none", "--data", byte_shards, "--max-steps", 4, "--checkpoint-every", 0)
    assert checkpoint_names(tmp_path / "none") == []


def test_the_age_counts_from_the_newest_checkpoint(byte_shards, tmp_path, monkeypatch, capsys):
    """By hand: steps of a minute; saved at 4, 8 and 10, and three minutes after the start and after 4."""
    now, train_step = [0.0], train_gpt2.train_step

    def step_of_a_minute(*args):
        now[0] += 60.0
        return train_step(*args)

    monkeypatch.setattr(clock, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(train_gpt2, "train_step", step_of_a_minute)
    flags = ["--max-steps", 10, "--checkpoint-every", 4, "--checkpoint-minutes", 3]
    trained(tmp_path, "--data", byte_shards, *flags)
    saved = re.findall(r"step +(\d+) \| saved \S+?(, until the next one)?\n", capsys.readouterr().out)
    assert [(int(step), bool(until)) for step, until in saved] == [
        (3, True),
        (4, False),
        (7, True),
        (8, False),
        (10, False),
    ]


def test_a_killed_run_loses_what_it_did_since_then(byte_shards, tmp_path):
    flags = ["--data", byte_shards, "--max-steps", 10, "--checkpoint-minutes", 1e-6]
    trained(tmp_path / "straight", *flags)
    rank = Rank(before={("train_gpt2.train_step", 7): kill_this_process})
    assert finish_run(start_run(*flags, "--out", "run", cwd=tmp_path, rank=rank)) == [-9]
    whole = [name for name in checkpoint_names(tmp_path / "run") if name.startswith("model")]
    assert len(whole) <= 2 and whole[-1] >= "model_00005"
    resumed(tmp_path / "run")
    assert checkpoint_names(tmp_path / "run") == ["model_00010"]
    assert_same_run(tmp_path / "run", tmp_path / "straight")


def kill_this_process(*args):
    os.kill(os.getpid(), 9)


def test_a_disk_that_is_unmounted_is_not_replaced_by_a_folder(tmp_path, capsys):
    """Which would go with the session."""
    checkpoints = manager_of(tmp_path / "mounted" / "run")
    assert save_one(checkpoints, 1) == [] and not (tmp_path / "mounted").exists()
    assert "the checkpoint of step 1 could not be saved" in capsys.readouterr().err


@pytest.mark.parametrize("old", [0, 1])
def test_the_clock_of_rank_0_decides_for_all(byte_shards, tmp_path, old):
    """By rank `old`'s clock, the newest checkpoint is always old. If ranks disagreed, they would wait for each other."""
    is_overdue = "support.runtime.clock.Clock.is_overdue"
    ranks = {rank: Rank(replaced={is_overdue: always if rank == old else never}) for rank in (0, 1)}
    run_to_the_end("--data", byte_shards, "--max-steps", 3, "--out", "run", cwd=tmp_path, world_size=2, rank=ranks)
    assert (tmp_path / "0.txt").read_text().count("until the next one") == (2 if old == 0 else 0)
    assert checkpoint_names(tmp_path / "run") == ["model_00003"]


@pytest.mark.parametrize("keep, expected", [(0, [2, 3, 5, 6, 7]), (2, [2, 5, 6, 7])])
def test_a_temporary_checkpoint_that_is_the_best_is_kept(tmp_path, keep, expected):
    """As is the newest one before a cooldown. By hand: 3 and 6 are lasting; of --keep's two, 7 is one, and 6 the other."""
    checkpoints = manager_of(tmp_path, "--keep", keep)
    checkpoints.evaluations["val"].update({1: 2.0, 2: 1.0, 3: 1.5})
    for step in range(1, 8):
        kept = save_one(checkpoints, step, temporary=step not in (3, 6), before_cooldown=step == 5)
    assert kept == expected


def test_corrupt_checkpoints_do_not_count_as_kept(tmp_path):
    for step in (1, 2, 3):
        save_one(manager_of(tmp_path), step)
    (tmp_path / "model_00003" / "x").write_text("y")
    (tmp_path / "model_00001").rename(tmp_path / "elsewhere")
    (tmp_path / "model_00001").symlink_to(tmp_path / "elsewhere")
    assert save_one(manager_of(tmp_path, "--keep", 3), 4) == [1, 2, 4]
    assert save_one(manager_of(tmp_path, "--keep", 2), 5) == [4, 5]  # a link is removed, and not what it points to
    assert (tmp_path / "elsewhere" / "x").exists()


def test_a_failed_save_removes_nothing(tmp_path):
    checkpoints = manager_of(tmp_path, "--keep", 1)
    save_one(checkpoints, 1)
    checkpoints.start(2, lambda folder: (folder / "missing" / "x").write_text("x"))
    checkpoints.wait()
    assert checkpoint_names(tmp_path) == ["model_00001"]


def test_what_a_longer_run_starts_from_is_kept(byte_shards, tmp_path):
    """By hand: the cooldown of 10 steps begins at step 6; saved at 4, 6, 8 and 10, with the best at the end."""
    flags = ["--data", byte_shards, "--max-steps", 10, "--keep", 1, "--val-every", 5]
    flags += ["--schedule", "wsd", "--cooldown-fraction", 0.4]
    trained(tmp_path / "run", *flags, "--checkpoint-every", 4)
    assert checkpoint_names(tmp_path / "run") == ["model_00006", "model_00010"]
    trained(tmp_path / "none", *flags, "--checkpoint-every", 0)
    assert checkpoint_names(tmp_path / "none") == []


@pytest.mark.parametrize("rank", [0, 1])
def test_all_ranks_agree_that_a_step_is_saved(tmp_path, monkeypatch, rank):
    """Copying the weights is an all-gather under FSDP: each rank that does it waits for the others."""
    copied = []
    monkeypatch.setattr(manager.state, "copy_to_host", lambda parameters, keep: copied.append(keep) or {})
    write = manager.write_checkpoint
    monkeypatch.setattr(manager, "write_checkpoint", lambda folder, _, **facts: write(folder, write_x, **facts))
    checkpoints = manager_of(tmp_path, rank=rank)
    model = torch.nn.Linear(1, 1)
    state = TrainState(model, torch.optim.SGD(model.parameters()), torch.amp.GradScaler("cpu", enabled=False), step=3)
    monkeypatch.setattr(state, "trainer_file", lambda *args, **facts: {})
    for final in (False, True):
        checkpoints.save(state, final=final)
        checkpoints.wait()
    assert copied == [rank == 0]


def test_a_run_that_is_stopped_removes_no_model(tmp_path):
    """As that would take time."""
    save_one(manager_of(tmp_path), 3)
    stop = SimpleNamespace(requested=True)
    checkpoints = manager_of(tmp_path, "--keep", 1, "--max-steps", 5, stop=stop)
    assert save_one(checkpoints, 5) == [3, 5]
    stop.requested = False
    assert save_one(checkpoints, 5) == [5]


def test_a_run_that_was_stopped_at_its_end_removes_them_when_it_is_resumed(byte_shards, tmp_path):
    trained(tmp_path, "--data", byte_shards, "--max-steps", 6, "--val-every", 0, "--checkpoint-every", 2)
    assert checkpoint_names(tmp_path) == ["model_00002", "model_00004", "model_00006"]
    resumed(tmp_path, "--keep", 1)
    assert checkpoint_names(tmp_path) == ["model_00006"]
