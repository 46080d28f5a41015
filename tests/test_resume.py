"""Resuming: the resumed run is the uninterrupted one, and what would change it is refused."""

import dataclasses
import json
import os
import shutil
import time

import numpy as np
import pytest
import torch
from helpers import TINY_FLAGS, finish_run, losses, needs_gpt2_vocabulary, run_to_the_end, start_run
from training import ONE_PROCESS, assert_same_run, configure, resumed, trained, trainer_file

import train_gpt2
from support.checkpoints import directory, run_folder
from support.cli import UserError
from support.data import shards
from support.runtime.distributed import Distributed
from support.runtime.options import RunOptions
from train_gpt2 import get_lr, train


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


# ---- the same run


def test_what_the_log_has_is_not_evaluated_again(byte_shards, tmp_path):
    """Killed at step 6, resumed at 4, where it has validated and sampled; then resumed after its end."""
    flags = ["--data", byte_shards, "--max-steps", 11, "--checkpoint-every", 4, "--val-every", 2, "--sample-every", 4]
    start = dict(cwd=tmp_path, world_size=2)
    run_to_the_end(*flags, "--out", "straight", **start)
    assert any(finish_run(start_run(*flags, "--out", "resumed", sabotage=die_at_step_6, **start)))
    run_to_the_end("--resume", *flags, "--out", "resumed", **start)
    assert_same_run(tmp_path / "resumed", tmp_path / "straight")
    printed = (tmp_path / "0.txt").read_text()
    assert "step     4 | val loss" not in printed and "step     4 | sample" not in printed
    assert "step     6 | val loss" in printed and "step     8 | sample 0" in printed
    run_to_the_end("--resume", *flags, "--out", "resumed", **start)
    printed = (tmp_path / "0.txt").read_text()
    assert "this run has finished its 11 steps" in printed and " | " not in printed
    assert_same_run(tmp_path / "resumed", tmp_path / "straight")


@pytest.mark.parametrize(
    "flags, val, sample",
    [((), 0, 0), (("--val-tokens", 128), 1, 1), (("--prompt", "7"), 0, 1), (("--sample-every", 2), 0, 1)],
)
def test_an_evaluation_whose_flags_have_changed_is_repeated(byte_shards, tmp_path, capsys, flags, val, sample):
    trained(tmp_path / "run", "--data", byte_shards, "--max-steps", 4, "--sample-every", 4)
    capsys.readouterr()
    resumed(tmp_path / "run", *flags)
    printed = capsys.readouterr().out
    assert (printed.count("step     4 | val loss"), printed.count("step     4 | sample 0")) == (val, sample)


def test_what_the_log_lacks_is_evaluated(byte_shards, tmp_path, capsys):
    """As after a signal during the validation."""
    flags = ["--data", byte_shards, "--max-steps", 10, "--checkpoint-every", 5, "--sample-every", 5]
    trained(tmp_path / "straight", *flags)
    out = tmp_path / "resumed"
    trained(out, *flags)
    shutil.rmtree(out / "model_00010")
    log = (out / "log.txt").read_text()
    (out / "log.txt").write_text("".join(line for line in log.splitlines(True) if not line.startswith("5 val")))
    capsys.readouterr()
    resumed(out)
    printed = capsys.readouterr().out
    assert "step     5 | val loss" in printed and "step     5 | sample 0" in printed
    assert_same_run(out, tmp_path / "straight")


@pytest.mark.parametrize("flags", [["--shuffle"], ["--dtype", "fp16"]])
def test_a_resumed_run_is_the_uninterrupted_run(byte_shards, tmp_path, flags, monkeypatch):
    flags = ["--data", byte_shards, "--max-steps", 11, "--checkpoint-every", 4, *flags]
    trained(tmp_path / "straight", *flags)
    kill_before_step(monkeypatch, 6)
    out = tmp_path / "resumed"
    with pytest.raises(Killed):
        trained(out, *flags)
    monkeypatch.undo()
    with open(out / "log.txt", "a") as log:
        log.write("6 tra")  # a line that was being written
    assert configure(["--resume", "--out", out])[1].path == out / "model_00004"
    resumed(out)
    assert_same_run(out, tmp_path / "straight")


def die_at_step_6(rank):
    real, calls = train_gpt2.train_step, []

    def step(*args):
        calls.append(1)
        if len(calls) == 7:
            while not os.path.exists("resumed/model_00004"):
                time.sleep(0.05)
            os._exit(9)
        return real(*args)

    train_gpt2.train_step = step


@pytest.mark.slow
def test_a_resumed_fast_run_is_the_uninterrupted_run(byte_shards, tmp_path):
    flags = ["--data", byte_shards, "--recipe", "fast", "--shuffle", "--checkpoint-every", 4, "--max-steps", 11]
    run_to_the_end(*flags, "--out", "straight", cwd=tmp_path, world_size=2)
    ranks = start_run(*flags, "--out", "resumed", cwd=tmp_path, world_size=2, sabotage=die_at_step_6)
    assert any(finish_run(ranks))
    # the flags of the recipe come from the checkpoint
    run_to_the_end("--resume", "--out", "resumed", cwd=tmp_path, world_size=2)
    assert_same_run(tmp_path / "resumed", tmp_path / "straight")


@pytest.mark.slow
def test_a_resumed_run_draws_the_same_dropout_masks(byte_shards, tmp_path):
    flags = ["--data", byte_shards, "--dropout", 0.3, "--shuffle", "--checkpoint-every", 3, "--decay-steps", 8]
    run_to_the_end(*flags, "--max-steps", 8, "--out", "straight", cwd=tmp_path, world_size=2)
    run_to_the_end(*flags, "--max-steps", 3, "--out", "resumed", cwd=tmp_path, world_size=2)
    run_to_the_end("--resume", "--max-steps", 8, "--out", "resumed", cwd=tmp_path, world_size=2)
    runs = [tmp_path / name for name in ("straight", "resumed")]
    assert losses(runs[0] / "log.txt") == losses(runs[1] / "log.txt")
    assert len({(run / "model_00008" / "model.safetensors").read_bytes() for run in runs}) == 1


def a_scale_far_too_high(rank):
    real = torch.amp.GradScaler
    torch.amp.GradScaler = lambda *args, **kwargs: real(*args, init_scale=2.0**60, **kwargs)


@pytest.mark.slow
def test_a_run_resumed_between_overflows_is_the_uninterrupted_run(byte_shards, tmp_path):
    flags = ["--dtype", "fp16", "--val-every", 0, "--data", byte_shards, "--decay-steps", 40]
    start = dict(cwd=tmp_path, world_size=2, sabotage=a_scale_far_too_high)
    run_to_the_end(*flags, "--max-steps", 40, "--out", "straight", **start)
    run_to_the_end(*flags, "--max-steps", 7, "--out", "resumed", **start)
    # given again, because TINY_FLAGS has other values of these
    run_to_the_end("--resume", *flags[:4], "--max-steps", 40, "--out", "resumed", **start)
    assert " | skipped: fp16 overflow number 8;" in (tmp_path / "0.txt").read_text()  # the count continues
    assert_same_run(tmp_path / "straight", tmp_path / "resumed")
    states = [trainer_file(tmp_path / run / "model_00040") for run in ("straight", "resumed")]
    assert states[0]["overflows"] == states[1]["overflows"] > 8 and states[0]["scaler"] == states[1]["scaler"]


def test_more_steps_keep_the_schedule(byte_shards, tmp_path, capsys):
    out = tmp_path / "run"
    trained(out, "--data", byte_shards, "--max-steps", 6, "--checkpoint-every", 3)
    config, checkpoint = configure(["--resume", "--out", out, "--max-steps", "9"])
    assert (config.max_steps, config.decay_steps, get_lr(8, config)) == (9, 6, config.min_lr)
    written = (checkpoint.path / "checkpoint.json").stat().st_mtime_ns
    train(config, ONE_PROCESS, checkpoint)
    output = capsys.readouterr().out.replace("\n        ", " ")  # a long note continues below its label
    [note] = [line for line in output.splitlines() if "--decay-steps" in line]
    assert note.startswith("note    from step 6 on, the learning rate stays at its lowest, 0.0003;")
    assert (checkpoint.path / "checkpoint.json").stat().st_mtime_ns == written  # not saved again
    trained(tmp_path / "straight", "--data", byte_shards, "--max-steps", 9, "--decay-steps", 6)
    assert (out / "log.txt").read_text() == (tmp_path / "straight" / "log.txt").read_text()


@pytest.mark.slow
def test_a_constant_rate_can_end_earlier_or_later(byte_shards, tmp_path):
    """A run of 20 steps, interrupted at 6, is cut to 10 and extended to 30: each is the run of that length, bit by bit."""
    flags = ["--data", byte_shards, "--recipe", "fast", "--shuffle", "--checkpoint-every", 6]
    trained(tmp_path / "20", *flags, "--max-steps", 20)
    for steps in (10, 30):
        trained(tmp_path / f"{steps}", *flags, "--max-steps", steps)
        out = tmp_path / f"to_{steps}"
        shutil.copytree(tmp_path / "20" / "model_00006", out / "model_00006")
        for name in ("log.txt", "metrics.jsonl"):
            shutil.copy(tmp_path / "20" / name, out)
        run_to_the_end("--resume", "--out", out, "--max-steps", steps, "--decay-steps", steps, cwd=tmp_path)
        assert_same_run(out, tmp_path / f"{steps}")
    assert losses(tmp_path / "10" / "log.txt") != losses(tmp_path / "30" / "log.txt")[:10]


def test_a_new_run_that_dies_early_leaves_the_earlier_one_which_resumes(byte_shards, tmp_path, monkeypatch):
    """As a second demo does: one that fails, one that is killed, and then --resume."""
    out, flags = tmp_path / "run", ["--data", byte_shards, "--checkpoint-every", 4]
    trained(out, *flags, "--max-steps", 4)
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file() and path.name != ".lock"}
    monkeypatch.setattr(RunOptions, "overwrite_policy", "run")
    for cleans_up in (True, False):
        with monkeypatch.context() as patch, pytest.raises(Killed):
            if not cleans_up:
                patch.setattr(run_folder, "_recover", lambda folder: None)
            kill_before_step(patch, 2)
            trained(out, *flags, "--max-steps", 4, "--seed", 7)
        left = {path: path.read_bytes() for path in out.rglob("*") if path.is_file() and path.name != ".lock"}
        assert (left == before) == cleans_up and (out / "model_00004").is_dir()
    resumed(out, "--max-steps", 6)
    trained(tmp_path / "straight", *flags, "--max-steps", 6, "--decay-steps", 4)
    assert_same_run(out, tmp_path / "straight")


def test_a_run_that_goes_back_replaces_what_came_later(byte_shards, tmp_path, monkeypatch):
    """It is the uninterrupted run; one that ends before its first checkpoint, or is killed there, changes nothing."""
    flags = ["--data", byte_shards, "--max-steps", 6, "--checkpoint-every", 2]
    out, aside = tmp_path / "run", tmp_path / "aside"
    trained(out, *flags)
    before = trainer_file(out / "model_00006"), (out / "log.txt").read_bytes(), (out / "run.json").read_bytes()

    def go_back(steps):
        for step in (4, 6):
            (out / f"model_0000{step}").rename(aside.with_suffix(f".{step}"))
        config, checkpoint = configure(["--resume", "--out", out, "--max-steps", steps])
        for step in (4, 6):
            aside.with_suffix(f".{step}").rename(out / f"model_0000{step}")
        train(config, ONE_PROCESS, dataclasses.replace(checkpoint, replaces_later=True))

    with monkeypatch.context() as patch, pytest.raises(Killed):
        kill_before_step(patch, 1)
        go_back(6)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(run_folder, "_recover", lambda folder: None)
        kill_before_step(patch, 1)
        go_back(6)
    assert (out / "log.txt").read_bytes() != before[1]
    resumed(out)  # continues from model_00006, and has nothing to do
    assert (out / "log.txt").read_bytes() == before[1] and (out / "model_00006").is_dir()
    resumes = json.loads((out / "run.json").read_text()).pop("resumes")
    assert [resume["step"] for resume in resumes] == [6] and not json.loads(before[2])["resumes"]
    go_back(5)
    assert sorted(path.name for path in out.glob("model_*")) == ["model_00002", "model_00004", "model_00004.earlier",
        "model_00005", "model_00006.earlier"]  # fmt: skip
    trained(tmp_path / "straight", "--data", byte_shards, "--max-steps", 5, "--decay-steps", 6, "--checkpoint-every", 2)
    assert_same_run(out, tmp_path / "straight")


# ---- what may not change


def test_a_resume_that_would_change_the_run_is_refused(byte_shards, tmp_path):
    out = tmp_path / "run"
    trained(out, "--data", byte_shards, "--max-steps", 3)
    with pytest.raises(UserError) as error:
        configure(["--resume", "--out", out, "--max-lr", "1e-3", "--n-layer", 2, "--seed", 1, "--batch-size", 2,
                   "--text", "other.txt"])  # fmt: skip
    assert {p.split()[0] for p in error.value.problems} == {"--max-lr", "--seed", "--text"}
    assert "--max-lr is 0.001, but the run in" in "".join(error.value.problems)
    with pytest.raises(UserError, match="past --max-steps 2"):
        configure(["--resume", "--out", out, "--max-steps", "2"])
    other = tmp_path / "other"
    shutil.copytree(byte_shards, other)
    manifest = json.loads((other / "manifest.json").read_text())
    lost = next(s for s in manifest["shards"] if s["split"] == "train")
    manifest["shards"].remove(lost)
    (other / lost["file"]).unlink()
    (other / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match="the train shards are not those"):
        resumed(out, "--max-steps", "5", "--data", other)


def test_a_resume_keeps_its_recipe(byte_shards, tmp_path):
    out = tmp_path / "run"
    trained(out, "--data", byte_shards, "--recipe", "fast", "--max-steps", 6)
    config, _ = configure(["--resume", "--out", out])
    assert (config.recipe, config.optimizer, config.schedule, config.max_lr) == ("fast", "muon", "wsd", 3e-3)
    with pytest.raises(UserError) as error:
        changed = "--recipe gpt2 --optimizer adamw --schedule cosine --cooldown-fraction 0.2".split()
        configure(["--resume", "--out", out, *changed])
    refused = {problem.split()[0] for problem in error.value.problems}
    assert refused == {"--recipe", "--optimizer", "--schedule", "--cooldown-fraction"}


def test_a_resume_keeps_bias_and_dropout(byte_shards, tmp_path):
    out = tmp_path / "run"
    trained(out, "--data", byte_shards, "--max-steps", 2, "--no-bias", "--dropout", 0.1)
    config, checkpoint = configure(["--resume", "--out", out])
    assert (config.bias, config.dropout) == (False, 0.1) and "dropout" in checkpoint.config
    with pytest.raises(UserError) as error:
        configure(["--resume", "--out", out, "--bias", "--dropout", "0.2"])
    assert {p.split()[0] for p in error.value.problems} == {"--bias", "--dropout"}


def test_a_resume_chooses_anew_what_depends_on_the_machine(byte_shards, tmp_path):
    """But for what was given, in the first command or now."""
    flags = ["--data", byte_shards, "--max-steps", 2, "--checkpoint-every", 2]
    trained(tmp_path / "run", *flags)
    assert configure(["--resume", "--out", tmp_path / "run"])[0].dtype == "fp32"  # of TINY_FLAGS
    stored = trainer_file(tmp_path / "run" / "model_00002")["config"]
    assert stored["dtype"] == "fp32" and stored["device"] == "cpu" and "compile" not in stored
    config, _ = configure(["--resume", "--out", tmp_path / "run", "--dtype", "bf16", "--batch-size", "8"])
    assert (config.dtype, config.batch_size) == ("bf16", 8)


def test_a_resume_runs_on_the_device_that_was_given_first(byte_shards, tmp_path, monkeypatch):
    trained(tmp_path / "run", "--data", byte_shards, "--max-steps", 2)
    asked = []
    monkeypatch.setattr(Distributed, "with_device", lambda self, name: asked.append(name) or self)
    for flags in ([], ["--device", "auto"]):
        with pytest.raises(SystemExit):
            train_gpt2.main(["--resume", "--out", str(tmp_path / "run"), "--sample-every", "0", *flags])
    assert asked == ["cpu", "auto"]


def test_a_resumed_run_keeps_no_file_of_its_checkpoint_open(byte_shards, tmp_path, monkeypatch):
    """Windows and NFS cannot remove a file that is mapped, and --keep removes old checkpoints."""
    if not os.path.exists("/proc/self/maps"):
        pytest.skip("reads /proc")
    trained(tmp_path / "run", "--data", byte_shards, "--max-steps", 2)
    file, mapped, real_step = str(tmp_path / "run" / "model_00002" / "trainer.pt"), [], train_gpt2.train_step

    def step(*args):
        with open("/proc/self/maps") as maps:
            mapped.append(file in maps.read())
        return real_step(*args)

    config, checkpoint = configure(["--resume", "--out", tmp_path / "run", "--max-steps", 3])
    with open("/proc/self/maps") as maps:
        assert file in maps.read()  # until it is restored
    monkeypatch.setattr(train_gpt2, "train_step", step)
    train(config, ONE_PROCESS, checkpoint)
    assert mapped == [False]


@pytest.mark.parametrize(
    "checkpoint_at, flags",
    [
        (13, ["--decay-steps", "30"]),  # the cooldown starts at 12
        (6, ["--decay-steps", "9"]),  # it would start at 5.4
        (6, ["--cooldown-fraction", "0.8"]),
        (6, ["--schedule", "cosine"]),
    ],
)
def test_a_cooldown_that_has_started_is_kept(byte_shards, tmp_path, checkpoint_at, flags):
    trained(
        tmp_path / "run", "--data", byte_shards, "--recipe", "fast", "--max-steps", checkpoint_at, "--decay-steps", 20
    )
    with pytest.raises(UserError, match=f"^{flags[0]} is {flags[1]}, but the run in .* Leave it out.$"):
        configure(["--resume", "--out", tmp_path / "run", "--max-steps", "30", *flags])


def test_the_end_of_a_cosine_is_kept(byte_shards, tmp_path):
    trained(tmp_path / "run", "--data", byte_shards, "--max-steps", 6, "--decay-steps", 20)
    with pytest.raises(UserError, match=r"^--decay-steps is 30, but the run in .* has 20. Leave it out.$"):
        configure(["--resume", "--out", tmp_path / "run", "--max-steps", "30", "--decay-steps", "30"])


@pytest.mark.parametrize("split", ["train", "val"])
@pytest.mark.parametrize("has_manifest", [True, pytest.param(False, marks=needs_gpt2_vocabulary)])
def test_a_run_does_not_resume_with_other_data_of_the_same_size(byte_shards, tmp_path, split, has_manifest):
    folder, out = tmp_path / "data", tmp_path / "run"
    shutil.copytree(byte_shards, folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    if not has_manifest:
        (folder / "manifest.json").unlink()
    trained(out, "--data", folder, "--max-steps", 2)
    resumed(out, "--max-steps", "2")
    changed = next(shard for shard in manifest["shards"] if shard["split"] == split)
    tokens = np.load(folder / changed["file"])[::-1].copy()
    changed["sha256"] = shards.write_shard(folder / changed["file"], tokens)
    if has_manifest:
        (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match=f"the {split} shards are not those that .*model_00002 was trained on"):
        resumed(out, "--max-steps", "3")


@needs_gpt2_vocabulary
@pytest.mark.parametrize("had_manifest", [True, False])
def test_data_is_compared_if_only_one_of_two_folders_has_a_manifest(byte_shards, tmp_path, had_manifest):
    folder, out = tmp_path / "data", tmp_path / "run"
    shutil.copytree(byte_shards, folder)
    manifest = json.loads((folder / "manifest.json").read_text()) | {"tokenizer": "gpt2", "vocab_size": 50257}
    texts = {True: json.dumps(manifest), False: None}

    def set_manifest(text):
        (folder / "manifest.json").write_text(text) if text else (folder / "manifest.json").unlink(missing_ok=True)

    set_manifest(texts[had_manifest])
    trained(out, "--data", folder, "--max-steps", 2)
    set_manifest(texts[not had_manifest])
    resumed(out, "--max-steps", "3")
    changed = next(shard for shard in manifest["shards"] if shard["split"] == "train")
    changed["sha256"] = shards.write_shard(folder / changed["file"], np.load(folder / changed["file"])[::-1].copy())
    set_manifest(None if had_manifest else json.dumps(manifest))
    shutil.rmtree(out / "model_00003")
    with pytest.raises(UserError, match="the train shards are not those"):
        resumed(out, "--max-steps", "3")


def test_a_run_without_validation_knows_its_validation_data(byte_shards, tmp_path):
    """So a resume that validates cannot take another split, and the bytes of a token are those of any other run."""
    trained(tmp_path / "with", "--data", byte_shards, "--max-steps", 2)
    trained(tmp_path / "without", "--data", byte_shards, "--max-steps", 2, "--val-every", 0)
    with_val, without = (json.loads((tmp_path / name / "run.json").read_text()) for name in ("with", "without"))
    assert without["data"] == with_val["data"] and without["data"]["val"]
    assert without["bytes_per_token"] == with_val["bytes_per_token"]


# ---- --resume, --resume auto, and neither


def test_shards_that_moved_are_found_or_asked_for(byte_shards, tmp_path, monkeypatch):
    """A relative path is of another folder there."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(byte_shards, "mine")
    trained(tmp_path / "run", "--data", "mine", "--max-steps", 3)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    with pytest.raises(UserError) as error:
        resumed(tmp_path / "run")
    checkpoint = tmp_path / "run" / "model_00003"
    assert (
        str(error.value)
        == f"the shards that {checkpoint} was trained on are not in mine. Pass their folder with --data."
    )
    assert resumed(tmp_path / "run", "--data", "../mine", "--max-steps", 4).step == 4
    assert resumed(tmp_path / "run", "--data", tmp_path / "mine").step == 4


def test_a_run_on_a_text_may_move_with_its_shards(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "book.txt").write_text("It was the best of times, it was the worst of times. " * 400)
    flags = ["--text", "book.txt", "--tokenizer", "bytes", "--device", "cpu", "--dtype", "fp32", "--max-steps", 2]
    train(configure([*flags, "--out", "run"])[0], ONE_PROCESS)
    (tmp_path / "elsewhere").mkdir()
    os.rename("run", "elsewhere/moved")
    monkeypatch.chdir("elsewhere")
    assert resumed(tmp_path / "elsewhere" / "moved", "--max-steps", 3).step == 3
    shutil.rmtree("moved/data")
    with pytest.raises(UserError, match="the shards that .*model_00001 was trained on are not in run/data. Pass their"):
        resumed(tmp_path / "elsewhere" / "moved", "--max-steps", 4)
    shutil.copy(tmp_path / "book.txt", "book.txt")  # they are made again, in the folder of the run
    assert resumed(tmp_path / "elsewhere" / "moved", "--max-steps", 4).step == 4
    assert sorted(os.listdir()) == ["book.txt", "moved"]


def test_resume_auto_replaces_a_run_that_saved_nothing(byte_shards, tmp_path):
    flags = ("--data", byte_shards, "--max-steps", 3, "--checkpoint-every", 0)
    expected = trained(tmp_path / "run", *flags)
    with pytest.raises(UserError, match="already contains a run"):
        trained(tmp_path / "run", *flags)
    assert trained(tmp_path / "run", *flags, "--resume", "auto") == expected


def test_resume_auto_starts_or_resumes(byte_shards, tmp_path):
    flags = [*TINY_FLAGS, "--data", byte_shards, "--out", tmp_path / "run", "--max-steps", "4", "--resume"]
    with pytest.raises(UserError, match="no checkpoint in .* to resume from"):
        configure(flags)
    config, checkpoint = configure([*flags, "auto"])
    assert checkpoint is None
    train(config, ONE_PROCESS)
    assert configure([*flags, "auto"])[1].path.name == "model_00004"


def test_a_run_is_never_overwritten(byte_shards, tmp_path):
    before = trained(tmp_path / "run", "--data", byte_shards, "--max-steps", 2)
    with pytest.raises(UserError, match="already contains a run. Continue it with --resume, or use another --out"):
        trained(tmp_path / "run", "--data", byte_shards, "--max-steps", 2)
    with pytest.raises(UserError, match="already contains a run"):
        trained(tmp_path / "run", "--data", byte_shards, "--max-steps", 2, "--demo")
    assert (tmp_path / "run" / "log.txt").read_text() == before and (tmp_path / "run" / "model_00002").is_dir()


def test_a_corrupt_checkpoint_is_reported_and_skipped(byte_shards, tmp_path, capsys):
    out = tmp_path / "run"
    trained(out, "--data", byte_shards, "--max-steps", 6, "--checkpoint-every", 2)
    flipped = bytearray((out / "model_00006" / "model.safetensors").read_bytes())
    flipped[-1] ^= 1
    (out / "model_00006" / "model.safetensors").write_bytes(flipped)
    (out / "model_00004" / "trainer.pt").write_bytes(b"")
    assert directory.newest_checkpoint(out) == out / "model_00002"
    warnings = capsys.readouterr().err
    assert "model_00006 is corrupt: model.safetensors was altered" in warnings
    assert "model_00004 is corrupt: trainer.pt has 0 bytes" in warnings
    (out / "model_00002" / "config.json").unlink()
    with pytest.raises(UserError, match="all checkpoints in .* are corrupt"):
        configure(["--resume", "--out", out])


def test_a_checkpoint_from_before_there_were_recipes_resumes(byte_shards, tmp_path):
    flags = ["--data", byte_shards, "--max-steps", 6, "--checkpoint-every", 3]
    straight = trained(tmp_path / "straight", *flags)
    state = trainer_file(tmp_path / "straight" / "model_00003")
    for name in ("recipe", "optimizer", "schedule", "cooldown_fraction"):
        del state["config"][name]
    out = tmp_path / "run"
    copy_with_state(tmp_path / "straight" / "model_00003", out / "model_00003", state)
    (out / "log.txt").write_text(straight)
    shutil.copy(tmp_path / "straight" / "metrics.jsonl", out)
    config, _ = configure(["--resume", "--out", out])
    assert (config.recipe, config.optimizer, config.schedule) == ("gpt2", "adamw", "cosine")
    resumed(out)
    assert_same_run(out, tmp_path / "straight")


@pytest.mark.parametrize("state", [{"step": 1}, "lora"])
def test_a_state_of_another_trainer_is_refused(byte_shards, tmp_path, state):
    trained(tmp_path / "run", "--data", byte_shards, "--max-steps", 1)
    path = tmp_path / "run" / "model_00001"
    good = trainer_file(path)
    if state == "lora":
        state = good | {"config": good["config"] | {"lora_rank": 2}}  # and no base model
    shutil.move(path, tmp_path / "good")
    copy_with_state(tmp_path / "good", path, state)
    with pytest.raises(UserError, match="cannot resume from .*trainer.pt"):
        configure(["--resume", "--out", tmp_path / "run"])


def copy_with_state(source, target, state):
    """A copy of a checkpoint with another trainer.pt, and the right checksums."""

    def write_files(folder):
        for path in source.iterdir():
            if path.name not in ("trainer.pt", "checkpoint.json"):
                shutil.copy(path, folder)
        torch.save(state, folder / "trainer.pt")

    directory.write_checkpoint(target, write_files)
