"""--fork: a run of its own from a checkpoint of another one, which stays as it is."""

from __future__ import annotations

import os
import re
import shutil
import signal
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import STEP, TINY_MODEL_FLAGS, Rank, finish_run, losses, run_to_the_end, start_run
from runs import log_without_seconds
from test_curves import labels_of
from training import (
    NEW_RUN,
    ONE_PROCESS,
    assert_same_run,
    checkpoint_names,
    configure,
    forked,
    resumed,
    train,
    trained,
    trainer_file,
)

import compare
import train_gpt2
from support.checkpoints import run_folder
from support.checkpoints.directory import write_checkpoint
from support.cli import UserError
from support.console.curves import draw_run, read_run
from support.console.log import read_log
from support.data.make_shards import make_shards
from support.data.text_files import Documents
from support.sizing import budget
from train_gpt2 import DataLoaderLite

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
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != ".gpt2.lock"}


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
def test_a_fork_on_two_ranks_is_the_run_of_that_length(byte_shards, tmp_path):
    """Under FSDP, the state is restored as in a resumed run: test_resume.py."""
    flags = ["--data", byte_shards, *FAST, "--dropout", 0.2]
    start = dict(cwd=tmp_path, world_size=2)
    run_to_the_end(*flags, "--max-steps", 8, "--out", "short", **start)
    run_to_the_end(*flags, "--max-steps", 16, "--out", "long", **start)
    more = ["--fork", "short/model_00006", "--out", "fork", "--max-steps", 16]
    run_to_the_end(*more, defaults=(), **start)
    assert_same_run(tmp_path / "fork", tmp_path / "long")


def die_once_saved(*args: object) -> None:
    for thread in threading.enumerate():
        if thread.name == "checkpoint 6":
            thread.join()
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("saves", [True, False])
def test_a_fork_that_was_killed_is_started_again_or_resumed(runs, tmp_path, saves):
    """It saves at its start if that is due; before its first checkpoint, the same command starts it over."""
    flags = ["--fork", runs / "20/model_00006", "--out", "fork", "--max-steps", 30]
    flags += ["--checkpoint-every", 6 if saves else 10]
    second_step = Rank(before={(STEP, 1): die_once_saved})
    assert finish_run(start_run(*flags, cwd=tmp_path, rank=second_step, defaults=())) == [-9]
    if saves:
        with pytest.raises(UserError, match="already contains a run. Continue it with --resume"):
            forked(tmp_path / "fork", flags[1], *flags[4:])
        flags = ["--resume", "--out", "fork"]
    run_to_the_end(*flags, cwd=tmp_path, defaults=())
    assert log_without_seconds(tmp_path / "fork") == log_without_seconds(runs / "30")
    for again in (["--resume"], [*flags, "--resume", "auto"]):  # as after a restart of torchrun
        _, start_again = configure([*again, "--out", tmp_path / "fork"])
        assert start_again.resumed.step == 30 and not start_again.forked


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


NOTHING_LEARNED = ["--max-lr", 0, "--min-lr", 0, "--val-every", 3, "--max-steps", 9]


@pytest.mark.parametrize(
    "other",
    [[], ["--val-tokens", 256], ["--total-batch-size", 512], ["--data", "other"]],
    ids=lambda flags: str(flags[:1]),
)
def test_values_of_the_parent_count_if_they_are_comparable(runs, byte_shards, tmp_path, capsys, monkeypatch, other):
    """A loss of 0.1 at step 3 of the parent is the best only if the fork validates on the same tokens, in equal steps."""
    monkeypatch.chdir(tmp_path)
    parent = shutil.copytree(runs / "20", tmp_path / "parent")
    (parent / "log.txt").write_text("3 val 0.1000\n6 val 0.2000\n" + (parent / "log.txt").read_text())
    make_shards(Documents("x", [f"{i} + {i} = {2 * i}\n" for i in range(4000)]), "other", tokenizer="bytes")
    forked(tmp_path / "fork", parent / "model_00006", *NOTHING_LEARNED, *other)
    log, last = read_log(tmp_path / "fork/log.txt")["val"], tmp_path / "fork/model_00009"
    assert log[3] == 0.1 and log[6] == log[9] > 1
    [shown] = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("best", "last"))][-1:]
    run = read_run(tmp_path / "fork")
    assert ("at step 3" in shown) == (not other) and run.val[3] == 0.1
    expected = {6: log[6], 9: log[9]} | ({0: log[0], 3: 0.1, 5: log[5]} if not other else {})
    assert run.comparable("val") == expected
    assert f"loss**: {log[9]:.4f} nats" in (last / "README.md").read_text()
    [label] = [text for text in labels_of(draw_run(run)) if text.startswith("validation")]
    assert f"best {min(expected.values()):.4f}" in label
    [(_, *best)] = [column for column in compare.results([run]) if column[0] == "best"]
    assert best == [f"{min(expected.values()):.4f}"]
    assert len(draw_run(run).axes[0].get_lines()) == (4 if not other else 7)  # the parent's curves are grey


def test_tokens_are_counted_and_the_data_goes_on_where_it_stopped(runs, byte_shards, tmp_path, monkeypatch, capsys):
    """By hand: 6 steps of 256 tokens are 96 rows of 16. Then 3 steps of 512 tokens read the next 96 rows, and with
    resumes, too. Other data begin at their first row."""
    read, row = [], DataLoaderLite._row
    monkeypatch.setattr(DataLoaderLite, "_row", lambda self, n: read.append(n) or row(self, n))
    flags = ["--val-every", 0, "--checkpoint-every", 1, "--total-batch-size", 512]
    copy = shutil.copytree(byte_shards, tmp_path / "copy")
    forked(tmp_path / "fork", runs / "20/model_00006", *flags, "--max-steps", 9, "--data", copy)
    assert read == [*range(96, 96 + 96)]
    stored = trainer_file(tmp_path / "fork/model_00009")
    assert (stored["step"], stored["row"], stored["tokens"]) == (9, 192, 6 * 256 + 3 * 512)
    assert "**tokens seen**: 3,072, in 9 steps\n" in (tmp_path / "fork/model_00009/README.md").read_text()
    run = read_run(tmp_path / "fork")
    assert run.positions([0, 6, 7, 9], "tokens").tolist() == [0, 1536, 2048, 3072]
    read.clear()
    shutil.rmtree(tmp_path / "fork/model_00009")
    resumed(tmp_path / "fork")
    assert read == [*range(160, 192)]
    make_shards(Documents("x", [f"{i}\n" for i in range(4000)]), tmp_path / "other", tokenizer="bytes")
    read.clear()
    capsys.readouterr()
    forked(tmp_path / "new", runs / "20/model_00006", *flags, "--max-steps", 7, "--data", tmp_path / "other")
    assert read == [*range(32)]
    printed = " ".join(capsys.readouterr().out.split())
    assert "different train shards" in printed and "read from the first row on, different val shards" in printed


def test_the_passes_of_a_fork_are_those_that_its_data_will_have_had(runs, byte_shards, tmp_path, capsys):
    """By hand: 6 steps of 16 rows and 3 of 32 are 192 of 766 rows, as each of the shards has one less with --shuffle."""
    rows = sum((len(np.load(path, mmap_mode="r")) - 1) // 16 - 1 for path in byte_shards.glob("*_train_*.npy"))
    flags = ["--total-batch-size", 512, "--checkpoint-every", 0, "--val-every", 0]
    forked(tmp_path / "fork", runs / "20/model_00006", *flags, "--max-steps", 9)
    assert f"9 steps: {192 / rows:.2f} passes over the data" in " ".join(capsys.readouterr().out.split())


def test_the_loss_of_the_step_of_the_fork_is_known(runs, byte_shards, tmp_path):
    """The parent has measured it; a fork that does not validate there takes it, and its checkpoints have it."""
    trained(tmp_path / "run", "--data", byte_shards, "--max-steps", 9, "--val-every", 3, "--checkpoint-every", 3)
    known = read_log(tmp_path / "run/log.txt")["val"][6]
    forked(tmp_path / "fork", tmp_path / "run/model_00006", "--val-every", 5, "--max-steps", 8)
    assert read_log(tmp_path / "fork/log.txt")["val"][6] == known
    forked(tmp_path / "other", tmp_path / "run/model_00006", "--val-every", 5, "--max-steps", 8, "--val-tokens", 64)
    assert 6 not in read_log(tmp_path / "other/log.txt")["val"]  # over other tokens


def test_compare_tells_what_a_fork_had_before(runs, byte_shards, tmp_path):
    forked(tmp_path / "fork", runs / "20/model_00006", "--max-lr", 1e-3, "--max-steps", 8)
    text = " ".join(compare.differences(["fork"], [read_run(tmp_path / "fork")]))
    note = text.partition("note: before step 6, fork had ")[2].partition(".  ")[0]
    assert "--max-lr 0.003" in note and "--max-steps 20" in note and "-every" not in note


def test_a_fork_after_the_beginning_of_its_cooldown(runs, byte_shards, tmp_path, capsys):
    """By hand: the last two fifths are 5 of 12 steps, 4 of 10 and 3 of 8. The fork starts at step 6."""
    for steps, expected in ((12, [7]), (10, [6]), (8, [])):
        forked(
            tmp_path / str(steps), runs / "20/model_00006", "--schedule", "wsd", "--max-steps", steps, "--max-lr", 1e-3
        )
        assert re.findall(r"step +(\d+) \| the cooldown begins", capsys.readouterr().out) == [str(n) for n in expected]


def test_a_checkpoint_that_left_its_run_has_no_log_of_another(runs, tmp_path, capsys):
    """Beside it there is no log, or that of another run; the fork's own begins at its step, and its hours are not known."""
    shutil.copytree(runs / "20/model_00006", tmp_path / "alone/model_00006")
    shutil.copytree(runs / "10", tmp_path / "foreign", ignore=shutil.ignore_patterns("model_*"))
    shutil.copytree(runs / "20/model_00006", tmp_path / "foreign/model_00006")
    for name in ("alone", "foreign"):
        forked(tmp_path / f"of_{name}", tmp_path / name / "model_00006", "--max-steps", 8)
        assert "is missing, so this log begins at step 6" in " ".join(capsys.readouterr().out.split())
        assert {int(line.split()[0]) for line in (tmp_path / f"of_{name}/log.txt").read_text().splitlines()} == {
            6,
            7,
            8,
        }
        columns = {title: cell for title, cell in compare.results([read_run(tmp_path / f"of_{name}")])}
        assert (columns["hours"], columns["tokens"]) == ("-", "2.05k")
    with pytest.raises(UserError, match="model_00006 does not belong to the run in .*starts.jsonl"):
        resumed(tmp_path / "foreign")


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
        (["--max-steps", 6], ["model_00006 was trained for 6 steps"]),
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
    monkeypatch.setattr(run_folder, "make_preset_shards", lambda config, keep, *_: asked.append(keep))
    (tmp_path / "text.txt").write_text("A text. " * 100)
    fork = ["--fork", runs / "20/model_00006", "--out", tmp_path / "fork", "--max-steps", 30]
    config, of_fork = configure([*fork, "--text", tmp_path / "text.txt"])
    of_fork.checkpoint.config["text"] = config.text
    for data in (config.data, str(tmp_path / "run/data")):
        run_folder.make_own_shards(replace(config, data=data), of_fork)
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


def test_a_fork_with_another_rate_for_muon_keeps_adamws(byte_shards, tmp_path):
    flags = ["--data", byte_shards, "--recipe", "fast", "--adamw-lr", 2e-3, "--max-steps", 4, "--checkpoint-every", 2]
    trained(tmp_path / "run", *flags)
    fork = ["--fork", tmp_path / "run/model_00002", "--out", tmp_path / "fork"]
    for given in (["--max-lr", 1e-4], ["--schedule", "cosine"]):
        assert configure([*fork, *given])[0].adamw_lr == 2e-3
    for given in (["--optimizer", "adamw"], ["--recipe", "gpt2"]):
        assert configure([*fork, *given])[0].adamw_lr is None


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
    for without_fork in (["--n-layer", 3], ["--max-steps", 12]):  # the run is at step 20, and its cooldown began at 12
        with pytest.raises(UserError) as error:
            configure(["--resume", "--out", runs / "20", *without_fork])
        assert len(error.value.problems) == 1


def test_a_fork_needs_a_folder_and_an_intact_checkpoint(runs, tmp_path):
    with pytest.raises(UserError, match="--fork starts another run. Name its folder with --out."):
        configure(["--fork", runs / "20/model_00006"])
    copy = shutil.copytree(runs / "20/model_00006", tmp_path / "model_00006")
    (copy / "model.safetensors").write_bytes(b"")
    with pytest.raises(UserError, match="is corrupt"):
        configure(["--fork", copy, "--out", tmp_path / "fork"])
    (copy / "checkpoint.json").unlink()  # it was copied in part, or comes from a hub
    with pytest.raises(UserError, match=r"^log/model_00003 does not exist\. Check the path\.$"):  # no name on the hub
        configure(["--fork", "log/model_00003", "--out", tmp_path / "fork"])
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
    same = runs / "20" / ".." / "20" / "model_00006"
    assert configure(["--fork", str(same), "--out", str(tmp_path / "fork"), "--resume"])[1].resumed


def test_a_resumed_fork_has_the_sources_of_its_first_start(runs, tmp_path):
    """Also if the same command resumes it."""
    command = ["--fork", runs / "20/model_00006", "--max-lr", 1e-3, "--keep", 2, "--out", tmp_path / "fork"]
    trained_fork = [*command, "--max-steps", 30, "--resume", "auto"]
    config, first = configure(trained_fork)
    train(config, ONE_PROCESS, first)
    resumed_again = configure([*trained_fork, "--keep", 3])[1].sources
    assert resumed_again.pop("keep") == "command line"
    for name in ("max_lr", "max_steps", "optimizer", "seed"):
        assert resumed_again[name] == first.sources[name]
    assert first.sources["max_lr"] == "command line of the fork"


def test_what_is_left_for_a_fork_of_a_timed_run(runs, tmp_path):
    """Of one that has used up its minute or its passes: nothing, unless it gets more time, or another text to read."""

    def write_files(folder):
        ignored = shutil.ignore_patterns("checkpoint.json")
        shutil.copytree(runs / "20/model_00006", folder, ignore=ignored, dirs_exist_ok=True)
        content = torch.load(folder / "trainer.pt", weights_only=True)
        content["config"] |= {"minutes": 1.0, "max_passes": 0.01}
        torch.save(content | {"progress": 1.0, "seconds": 50.0}, folder / "trainer.pt")

    (tmp_path / "run").mkdir()
    write_checkpoint(tmp_path / "run/model_00006", write_files)
    (tmp_path / "text.txt").write_text("A text. " * 100)
    fork = ["--fork", tmp_path / "run/model_00006", "--out", tmp_path / "fork"]
    for flags in ([], ["--max-lr", 1e-3], ["--minutes", 2]):
        with pytest.raises(UserError, match="was trained for 6 steps and 0.8 minutes"):
            configure([*fork, *flags])
    configure([*fork, "--max-passes", 0])  # seconds of its minute are left
    configure([*fork, "--minutes", 2, "--text", tmp_path / "text.txt"])
    for name in ("--max-steps", "--warmup-steps", "--decay-steps"):  # not ignored by a resume either
        with pytest.raises(UserError, match=f"{name} counts steps, but this run has --minutes 1. Leave it out.$"):
            configure(["--resume", "--out", tmp_path / "run", name, 9])


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

    (tmp_path / "run").mkdir()
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
    text += [*TINY_MODEL_FLAGS, "--total-batch-size", 256, "--val-tokens", 512, "--sample-every", 0]
    train(configure([*text, "--val-every", 3, "--out", "run"])[0], ONE_PROCESS, NEW_RUN)
    assert checkpoint_names(Path("run"))[0] == "model_00002"
    config, _ = configure(["--fork", "run/model_00002", "--out", "fork", "--max-steps", 40])
    assert (config.checkpoint_every, config.val_every, config.decay_steps) == (10, 3, 40)
    config, _ = configure(["--fork", "run/model_00002", "--out", "fork", "--minutes", 5])
    assert (config.checkpoint_every, config.val_every, config.minutes) == (None, 3, 5.0)
    assert config.data == "run/data"  # the shards stay where they are
