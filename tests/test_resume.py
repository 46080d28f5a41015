"""Resuming: the resumed run is the uninterrupted one, and what would change it is refused."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import STEP, TINY_FLAGS, Rank, finish_run, needs_gpt2_vocabulary, run_to_the_end, start_run, wait_for
from runs import log_without_seconds
from shard_helpers import write_shard
from training import NEW_RUN, ONE_PROCESS, assert_same_run, configure, resumed, train, trained, trainer_file

import train_gpt2
from support import files
from support.checkpoints import directory
from support.checkpoints.directory import write_checkpoint
from support.checkpoints.history import read_starts
from support.cli import UserError
from support.console.curves import read_run
from support.console.log import read_log


class Killed(BaseException):
    pass


def kill_before_step(monkeypatch, n):
    """Makes the step after `n` steps raise, as if the process were killed there."""
    real_step, done = train_gpt2.train_step, []

    def step_or_die(*args):
        if len(done) == n:
            raise Killed
        done.append(1)
        return real_step(*args)

    monkeypatch.setattr(train_gpt2, "train_step", step_or_die)


@pytest.fixture(scope="module")
def six_steps(byte_shards, tmp_path_factory):
    """A run of 6 steps with a cosine, which has saved at 3 and at 6 and drawn samples."""
    out = tmp_path_factory.mktemp("six_steps") / "run"
    trained(out, "--data", byte_shards, "--max-steps", 6, "--checkpoint-every", 3, "--sample-every", 6)
    return out


@pytest.fixture
def run(six_steps, tmp_path):
    """A copy of that run."""
    return shutil.copytree(six_steps, tmp_path / "run")


# ---- the same run


@pytest.mark.parametrize(
    "flags",
    [
        ["--shuffle", "--max-steps", 11],
        pytest.param(["--dtype", "fp16", "--max-steps", 40], marks=pytest.mark.slow),
    ],
)
def test_a_resumed_run_is_the_uninterrupted_run(byte_shards, tmp_path, flags, monkeypatch):
    """With fp16 between overflows: its gradients are scaled far too high at first."""
    scaler = torch.amp.GradScaler
    monkeypatch.setattr(torch.amp, "GradScaler", lambda *args, **kwargs: scaler(*args, init_scale=2.0**60, **kwargs))
    flags = ["--data", byte_shards, "--checkpoint-every", 4, *flags]
    out, straight = tmp_path / "resumed", tmp_path / "straight"
    trained(straight, *flags)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        kill_before_step(patch, 6)
        trained(out, *flags)
    with open(out / "log.txt", "a") as log:
        log.write("6 tra")  # a line that was being written
    assert configure(["--resume", "--out", out])[1].resumed.path == out / "model_00004"
    resumed(out)
    assert_same_run(out, straight)
    states = [trainer_file(directory.newest_checkpoint(run)) for run in (out, straight)]
    assert states[0]["scaler"] == states[1]["scaler"]
    assert states[0]["overflows"] == states[1]["overflows"] and (states[0]["overflows"] > 8) == ("fp16" in flags)


@pytest.mark.parametrize("kept", [0, 3, 4])
def test_steps_that_the_log_lacks_are_named(byte_shards, tmp_path, capsys, kept):
    out = tmp_path / "run"
    trained(out, "--data", byte_shards, "--max-steps", 6, "--checkpoint-every", 4)
    files.remove(out / "model_00006")
    lines = (out / "log.txt").read_text().splitlines(keepends=True)
    (out / "log.txt").write_text("".join(line for line in lines if int(line.split()[0]) < kept))
    if not kept:
        os.remove(out / "log.txt")
    capsys.readouterr()
    resumed(out)
    said = " ".join("".join(capsys.readouterr()).split())
    assert re.findall(r"lacks (\d) of the 4 steps before this one", said) == [str(4 - kept)] * (kept < 4)


@pytest.mark.parametrize("removed", [False, True])
def test_a_missing_list_of_starts_is_named(byte_shards, tmp_path, capsys, removed):
    """It says on what the earlier losses were measured; without it, a worse loss may be the best."""
    out = tmp_path / "run"
    trained(out, "--data", byte_shards, "--max-steps", 6, "--checkpoint-every", 4)
    files.remove(out / "model_00006")
    if removed:
        os.remove(out / "starts.jsonl")
    capsys.readouterr()
    resumed(out)
    said = " ".join("".join(capsys.readouterr()).split())
    assert said.count("starts.jsonl lacks the starts of this run before step 4") == removed


def die_once_saved(*args: object) -> None:
    wait_for(lambda: os.path.exists("resumed/model_00004"))
    os._exit(9)


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_a_resumed_run_of_two_ranks_is_the_uninterrupted_run(byte_shards, tmp_path, parallel):
    """Each rank has its own dropout masks, and under FSDP its own part of the weights and of Muon's momenta.

    Both are killed at step 6, and resume at 4, which is evaluated again; then they resume after the end.
    Evaluation under FSDP: test_fsdp.py.
    """
    flags = ["--data", byte_shards, "--parallel", parallel, "--recipe", "fast", "--dropout", 0.3, "--shuffle"]
    flags += ["--max-steps", 11, "--checkpoint-every", 4]
    every = ["2", "--sample-every", "4"] if parallel == "ddp" else ["0"]
    start = dict(cwd=tmp_path, world_size=2, defaults=[*TINY_FLAGS, "--val-every", *every])
    run_to_the_end(*flags, "--out", "straight", **start)
    killed = Rank(before={(STEP, 6): die_once_saved})
    assert any(finish_run(start_run(*flags, "--out", "resumed", rank=killed, **start)))
    run_to_the_end("--resume", "--out", "resumed", **start)  # the flags of the recipe come from the checkpoint
    assert_same_run(tmp_path / "resumed", tmp_path / "straight")
    if parallel == "fsdp":
        return
    printed = (tmp_path / "0.txt").read_text()
    assert all(f"step {step:5d} | val loss" in printed for step in (4, 6, 8, 10))
    assert "step     2 | val loss" not in printed and "step     8 | sample 0" in printed
    run_to_the_end("--resume", "--out", "resumed", **start)
    printed = (tmp_path / "0.txt").read_text()
    assert "this run has finished" in printed and "val loss" not in printed
    assert_same_run(tmp_path / "resumed", tmp_path / "straight")


def test_a_run_keeps_no_file_of_the_checkpoint_it_continues_open(run, tmp_path, monkeypatch):
    """Windows and NFS cannot remove a file that is mapped, and --keep removes old checkpoints."""
    if not os.path.exists("/proc/self/maps"):
        pytest.skip("reads /proc")
    file, mapped, real_step = str(run / "model_00006" / "trainer.pt"), [], train_gpt2.train_step

    def step(*args):
        with open("/proc/self/maps") as maps:
            mapped.append(file in maps.read())
        return real_step(*args)

    config, start = configure(["--fork", run / "model_00006", "--out", tmp_path / "fork", "--max-steps", 7])
    with open("/proc/self/maps") as maps:
        assert file in maps.read()  # until it is restored
    monkeypatch.setattr(train_gpt2, "train_step", step)
    train(config, ONE_PROCESS, start)
    assert mapped == [False]


# ---- what may not change


def refused(*flags):
    """The flags that a resume refuses, and the command that it names."""
    with pytest.raises(UserError) as error:
        configure(["--resume", *flags])
    *problems, advice = error.value.problems
    assert all(problem.endswith("Leave it out.") for problem in problems)
    return {problem.split()[0] for problem in problems}, advice


def test_a_resume_that_would_change_the_run_is_refused_with_the_fork_that_does_it(byte_shards, tmp_path):
    run = tmp_path / "run"
    flags = ["--recipe", "fast", "--no-bias", "--dropout", 0.1, "--max-steps", 13, "--decay-steps", 20]
    trained(run, "--data", byte_shards, *flags, "--checkpoint-every", 6)
    config, start = configure(["--resume", "--out", run])
    assert (config.recipe, config.optimizer, config.schedule, config.max_lr) == ("fast", "muon", "wsd", 3e-3)
    assert (config.bias, config.dropout) == (False, 0.1) and "dropout" in start.resumed.config
    changed = {"--max-lr": "1e-3", "--n-layer": 1, "--seed": 1, "--text": "other.txt", "--dropout": 0.2}
    changed |= {"--recipe": "gpt2", "--optimizer": "adamw", "--schedule": "cosine", "--cooldown-fraction": 0.2}
    changed |= {"--decay-steps": 30, "--max-steps": 30, "--minutes": 3.0}
    more = [*(word for flag in changed.items() for word in flag), "--bias", "--batch-size", 2, "--keep", 3]
    names, advice = refused("--out", run, *more)
    assert names == {*changed, "--bias"}
    for words in (f"--fork {run}/model_00013 --out NEW", "--seed 1", "--text other.txt", "--max-lr 0.001"):
        assert words in advice
    assert "--bias" not in advice  # which a fork cannot change
    assert refused("--out", run, "--keep", 3, "--seed", 2)[1].endswith(
        f"python train_gpt2.py --fork {run}/model_00013 --out NEW --seed 2"
    )


def test_a_resume_chooses_anew_what_depends_on_the_machine(run):
    """But for what was given, in the first command or now."""
    assert configure(["--resume", "--out", run])[0].dtype == "fp32"  # of TINY_FLAGS
    stored = trainer_file(run / "model_00006")["config"]
    assert (stored["dtype"], stored["device"], stored["compile"], stored["hellaswag_every"]) == ("fp32", "cpu", None, 0)
    config, _ = configure(["--resume", "--out", run, "--dtype", "bf16", "--batch-size", "8"])
    assert (config.dtype, config.batch_size) == ("bf16", 8)


@pytest.mark.slow
@pytest.mark.parametrize("has_manifest", [True, pytest.param(False, marks=needs_gpt2_vocabulary)])
def test_a_run_does_not_resume_with_other_data(byte_shards, tmp_path, has_manifest):
    """Not even with shards of the same size, whether or not a manifest describes them."""
    data, out = shutil.copytree(byte_shards, tmp_path / "data"), tmp_path / "run"
    manifest = json.loads((data / "manifest.json").read_text())
    if not has_manifest:
        manifest |= {"tokenizer": "gpt2", "vocab_size": 50257}  # what shards without a manifest are

    def write_manifest():
        path = data / "manifest.json"
        path.write_text(json.dumps(manifest)) if has_manifest else path.unlink(missing_ok=True)
        if not has_manifest:  # as other tools write them
            (data / "tokenizer.json").unlink(missing_ok=True)

    write_manifest()
    trained(out, "--data", data, "--max-steps", 2)
    resumed(out)
    for split in ("val", "train"):  # of both, train is reported
        shard = next(shard for shard in manifest["shards"] if shard["split"] == split)
        shard["sha256"] = write_shard(data / shard["file"], np.load(data / shard["file"])[::-1].copy())
        write_manifest()
        with pytest.raises(UserError, match=f"the {split} shards are not those that .*model_00002 was trained on"):
            resumed(out)


def test_a_run_without_validation_knows_its_validation_data(six_steps, byte_shards, tmp_path):
    """So a resume that validates cannot take another split, and the bytes of a token are those of any other run."""
    trained(tmp_path / "without", "--data", byte_shards, "--max-steps", 2, "--val-every", 0)
    [with_val], [without] = (read_starts(run) for run in (six_steps, tmp_path / "without"))
    assert without["data"] == with_val["data"] and without["data"]["val"]


# ---- --resume, --resume auto, and neither


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_finished_run_is_not_resumed_but_left_as_it_is(byte_shards, tmp_path, capsys):
    """It says so, with the command that makes it longer. Without its last checkpoints, it goes on."""
    out = tmp_path / "run"
    trained(out, "--data", byte_shards, "--max-steps", 6, "--schedule", "wsd", "--checkpoint-every", 3)
    before = contents(out)
    capsys.readouterr()
    for resume in (["--resume"], ["--resume", "auto"]):
        train_gpt2.main([*resume, "--out", str(out)])
        printed = capsys.readouterr().out
        assert f"this run has finished; its last checkpoint is {out}/model_00006" in " ".join(printed.split())
        assert f"--fork {out}/model_00003 --out {out}_longer --max-steps 12" in printed
        assert contents(out) == before
    shutil.rmtree(out / "model_00006")
    train_gpt2.main(["--resume", "--out", str(out)])
    assert (out / "model_00006").is_dir() and [start["first_step"] for start in read_starts(out)] == [0, 3]


def test_a_run_that_was_stopped_in_its_last_validation_does_it_when_it_is_resumed(byte_shards, tmp_path, monkeypatch):
    """All its steps are done and saved, but it has not finished."""
    validate, calls = train_gpt2.validation_loss, []

    def stop_in_the_last(model, loader, tokens, stop, amp):
        calls.append(1)
        if len(calls) == 3:  # before the steps 0, 5 and 6
            os.kill(os.getpid(), signal.SIGTERM)
        return validate(model, loader, tokens, stop, amp)

    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(train_gpt2, "validation_loss", stop_in_the_last)
        trained(tmp_path / "run", "--data", byte_shards, "--max-steps", 6)
    assert directory.newest_checkpoint(tmp_path / "run").name == "model_00006"
    assert read_log(tmp_path / "run/log.txt")["val"].keys() == {0, 5}
    train_gpt2.main(["--resume", "--out", str(tmp_path / "run")])
    assert read_log(tmp_path / "run/log.txt")["val"].keys() == {0, 5, 6}
    assert [start["ended"]["end"] for start in read_starts(tmp_path / "run")] == ["stopped by SIGTERM", "finished"]


def test_only_equal_validations_are_compared(byte_shards, tmp_path, capsys):
    """A resume that validates fewer tokens says so, and its best loss is one of its own."""
    out = tmp_path / "run"
    trained(out, "--data", byte_shards, "--max-steps", 9, "--checkpoint-every", 3, "--val-every", 3)
    shutil.rmtree(out / "model_00009")
    text = (out / "log.txt").read_text()
    (out / "log.txt").write_text(text.replace("3 val ", "3 val 0.1000\n3 norm "))
    capsys.readouterr()
    resumed(out, "--val-tokens", 64)
    printed = " ".join(capsys.readouterr().out.split())
    assert f"resuming from {out}/model_00006: --val-tokens 64 (was 512)" in printed
    run = read_run(out)
    assert run.val[3] == 0.1 and run.comparable("val") == {step: run.val[step] for step in (6, 9)}
    assert re.search("best validation loss .* at step [69]", printed)


def test_shards_that_moved_are_found_or_asked_for(byte_shards, tmp_path, monkeypatch):
    """A relative path is of another folder there."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(byte_shards, "mine")
    trained(tmp_path / "run", "--data", "mine", "--max-steps", 3)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="shards that .*model_00003 was trained on are not in mine. .* with --data."):
        resumed(tmp_path / "run")
    assert resumed(tmp_path / "run", "--data", "../mine").step == 3


@pytest.mark.slow
def test_a_run_on_a_text_may_move_with_its_shards(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "book.txt").write_text("It was the best of times, it was the worst of times. " * 400)
    flags = ["--text", "book.txt", "--tokenizer", "bytes", "--max-steps", 2]
    train(configure([*TINY_FLAGS, *flags, "--out", "run"])[0], ONE_PROCESS, NEW_RUN)
    (tmp_path / "elsewhere").mkdir()
    os.rename("run", "elsewhere/moved")
    monkeypatch.chdir("elsewhere")
    assert resumed(tmp_path / "elsewhere" / "moved").step == 2
    with pytest.raises(UserError, match="are not in mistyped. Pass their folder with --data."):
        resumed(tmp_path / "elsewhere" / "moved", "--data", "mistyped")
    assert not os.path.exists("mistyped")  # the shards are not made there
    shutil.rmtree("moved/data")
    with pytest.raises(UserError, match="the shards that .*model_00002 was trained on are not in run/data. Pass their"):
        resumed(tmp_path / "elsewhere" / "moved")
    shutil.copy(tmp_path / "book.txt", "book.txt")
    with pytest.raises(UserError, match="are not in typo. Pass their folder with --data."):
        resumed(tmp_path / "elsewhere" / "moved", "--data", "typo")
    # without --data they are made again, in the folder of the run
    assert resumed(tmp_path / "elsewhere" / "moved").step == 2
    [shard] = Path("moved/data").glob("*_train_*.npy")  # likewise, if one is lost
    before = shard.read_bytes()
    shard.unlink()
    assert resumed(tmp_path / "elsewhere" / "moved").step == 2 and shard.read_bytes() == before
    shard.unlink()
    Path("book.txt").write_text("Another text. " * 999)
    with pytest.raises(UserError, match="data lacks a shard, and book.txt is not the text that it was made from. Put"):
        resumed(tmp_path / "elsewhere" / "moved")
    assert sorted(os.listdir()) == ["book.txt", "moved"]


def test_resume_auto_starts_anew_or_resumes(byte_shards, tmp_path, monkeypatch):
    out, flags = tmp_path / "run", ["--data", byte_shards, "--max-steps", 3]
    monkeypatch.chdir(tmp_path)
    for more, folder in ([], "log"), (["--demo"], "log_demo"):
        with pytest.raises(UserError, match=f"no checkpoint in {folder} to resume from"):
            configure(["--resume", *more])
    with pytest.raises(UserError, match="no checkpoint in .* to resume from"):
        configure(["--resume", "--out", out])
    log = trained(out, *flags, "--resume", "auto")
    assert configure([*TINY_FLAGS, *flags, "--out", out, "--resume", "auto"])[1].resumed.path.name == "model_00003"
    with pytest.raises(UserError, match="already contains a run. Continue it with --resume, or use another --out"):
        trained(out, *flags)
    assert log_without_seconds(out) == log and (out / "model_00003").is_dir()


def test_a_finished_run_names_no_fork_that_would_be_refused(byte_shards, tmp_path):
    """Nothing is left to train with another rate, unless the fork is longer or starts before a cooldown."""
    trained(tmp_path / "cosine", "--data", byte_shards, "--max-steps", 4)
    trained(tmp_path / "wsd", "--data", byte_shards, "--max-steps", 8, "--schedule", "wsd", "--warmup-steps", 1)
    for out, more, forks in (("cosine", [], 0), ("cosine", ["--max-steps", "9"], 1), ("wsd", [], 1)):
        with pytest.raises(UserError) as refused:
            configure(["--resume", "--out", str(tmp_path / out), "--max-lr", "1e-3", *more])
        commands = [line.partition("python train_gpt2.py ")[2] for line in refused.value.problems if "--fork" in line]
        assert len(commands) == forks
        for command in commands:
            configure(shlex.split(command.replace("NEW", str(tmp_path / "new"))))


def test_a_flag_that_this_version_lacks_is_not_dropped(byte_shards, tmp_path):
    trained(tmp_path, "--data", byte_shards, "--max-steps", 4, "--checkpoint-every", 2)
    shutil.rmtree(tmp_path / "model_00004")

    def write_files(folder):
        shutil.copytree(tmp_path / "model_00002", folder, dirs_exist_ok=True, ignore=lambda *args: ["checkpoint.json"])
        content = torch.load(folder / "trainer.pt", weights_only=True)
        content["config"]["clip"] = content["config"].pop("grad_clip")
        torch.save(content, folder / "trainer.pt")

    write_checkpoint(tmp_path / "model_00003", write_files)
    for flags in (["--resume", "--out", tmp_path], ["--fork", tmp_path / "model_00003", "--out", tmp_path / "new"]):
        with pytest.raises(UserError, match="another version of the trainer, with --clip"):
            configure(flags)
