"""What is left of a run after kills, signals, full disks, bad numbers and bad files."""

import errno
import json
import os
import pickle
import random
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import torch
from conftest import (
    ONE_PROCESS,
    ROOT,
    TINY_FLAGS,
    config_of,
    finish_run,
    needs_gpt2_vocabulary,
    run_to_the_end,
    start_run,
)

import fineweb
import hellaswag
import sample
import train_gpt2
from benchmarks.bench_kills import differences, log_changed, steps_done, wait_for, wait_for_the_moment
from support import checkpoint, fit, log, run_folder, shards
from support.cli import UserError
from support.rendezvous import agree_on_attempt
from support.stop import Stop
from train_gpt2 import GPT, configure, train

SMALL = ["--n-layer", 1, "--batch-size", 16, "--shuffle"]  # one micro-batch an update, for one process


def assert_same_run(out, expected):
    """The log, and the weights and optimizer of the last checkpoint, are those of another run, bit by bit."""
    assert differences(out, expected) == []


# ---- kills


@pytest.mark.parametrize("world, kills", [(1, 24), (2, 6)])
def test_a_run_killed_at_random_moments_is_the_run_that_was_not(byte_shards, tmp_path, world, kills):
    flags = [*SMALL, "--data", byte_shards, "--max-steps", 8 * kills, "--val-every", 10, "--checkpoint-every", 4]
    run_to_the_end(*flags, "--out", "straight", cwd=tmp_path, world=world)
    rng, out, halves = random.Random(world), tmp_path / "killed", 0
    for i in range(kills):
        ranks = start_run(*flags, "--out", "killed", "--resume", "auto", cwd=tmp_path, world=world)
        wait_for_the_moment(("step", "save", "start", "save")[i % 4], out, ranks[0].is_alive, rng, start=0.2)
        assert ranks[0].is_alive(), f"ended before kill {i}: {(tmp_path / '0.txt').read_text()[-2000:]}"
        for process in rng.sample(ranks, world):
            process.kill()
        for process in ranks:
            process.join()
        halves += any(out.glob(".model_*.partial"))
    assert halves >= kills // 6  # some were inside the writing of a checkpoint
    run_to_the_end(*flags, "--out", "killed", "--resume", cwd=tmp_path, world=world)
    assert_same_run(out, tmp_path / "straight")
    assert not any(out.glob(".model_*"))


def torchrun(*flags, cwd, restarts=0):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command = [*launcher, f"--max-restarts={restarts}", str(ROOT / "train_gpt2.py"), *TINY_FLAGS, *map(str, flags)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with open(cwd / "torchrun.txt", "w") as output:
        return subprocess.Popen(command, cwd=cwd, env=environment, stdout=output, stderr=subprocess.STDOUT)


def test_torchrun_restarts_and_stops_a_run(byte_shards, tmp_path):
    """A killed worker leads to a restart that goes on; SIGTERM to torchrun then saves the step it came at."""
    flags = ["--data", byte_shards, "--shuffle", "--max-steps", 2000, "--checkpoint-every", 5, "--resume", "auto"]
    process, out = torchrun(*flags, "--out", "run", cwd=tmp_path, restarts=1), tmp_path / "run"
    assert wait_for(lambda: steps_done(out) >= 12, timeout=120)
    [pid] = [word for word in (out / ".lock").read_text().split() if word.isdigit()]
    os.kill(int(pid), signal.SIGKILL)
    time.sleep(1)  # the other rank cannot go on alone
    old = log_changed(out)
    assert wait_for(lambda: log_changed(out) != old, timeout=120)
    goal = steps_done(out) + 8
    assert wait_for(lambda: steps_done(out) >= goal, timeout=60)
    process.send_signal(signal.SIGTERM)
    output = tmp_path / "torchrun.txt"
    assert process.wait(60) == 1, output.read_text()  # torchrun's own
    step = checkpoint.step_of(checkpoint.newest(out))
    assert steps_done(out) == step and f"step {step:5d} | stopped. The newest checkpoint is" in output.read_text()
    # the same steps without a kill or a signal, and none of them twice
    ends = ["--max-steps", step + 5, "--decay-steps", 2000]
    run_to_the_end(*flags, *ends, "--out", "run", cwd=tmp_path, world=2)
    run_to_the_end(*flags, *ends, "--out", "straight", cwd=tmp_path, world=2)
    assert_same_run(out, tmp_path / "straight")


# ---- signals


def slow_micro_steps(rank):
    real = GPT.forward

    def forward(self, *args):
        time.sleep(0.03)
        return real(self, *args)

    GPT.forward = forward


@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)])
def test_one_process_stops_within_an_update(byte_shards, tmp_path, number, code):
    flags = ["--data", byte_shards, "--shuffle", "--max-steps", 8, "--val-every", 4, "--batch-size", 1]
    run_to_the_end(*flags, "--out", "straight", cwd=tmp_path)
    [process] = start_run(*flags, "--out", "run", cwd=tmp_path, sabotage=slow_micro_steps)  # a second an update
    out = tmp_path / "run"
    assert wait_for(lambda: steps_done(out) == 2)
    time.sleep(0.2)
    os.kill(process.pid, number)
    assert finish_run([process]) == [code]
    assert steps_done(out) == 2 and checkpoint.newest(out).name == "model_00002"
    assert f"{signal.Signals(number).name}: stopping" in (tmp_path / "0.txt").read_text()
    run_to_the_end(*flags, "--out", "run", "--resume", cwd=tmp_path)
    assert_same_run(out, tmp_path / "straight")


def test_several_processes_stop_at_the_same_step(byte_shards, tmp_path):
    flags = ["--data", byte_shards, "--shuffle", "--max-steps", 300, "--val-every", 0]
    ranks, out = start_run(*flags, "--out", "run", cwd=tmp_path, world=2), tmp_path / "run"
    assert wait_for(lambda: steps_done(out) >= 3)
    os.kill(ranks[1].pid, signal.SIGTERM)  # the other one hears of it with the next loss
    assert finish_run(ranks) == [143, 143]
    step = checkpoint.step_of(checkpoint.newest(out))
    assert steps_done(out) == step < 300
    flags += ["--max-steps", step + 3, "--decay-steps", 300]
    run_to_the_end(*flags, "--out", "run", "--resume", cwd=tmp_path, world=2)
    run_to_the_end(*flags, "--out", "straight", cwd=tmp_path, world=2)
    assert_same_run(out, tmp_path / "straight")


def slow_validation(rank):
    real = GPT.forward

    def forward(self, *args):
        if not torch.is_grad_enabled():
            time.sleep(0.1)
        return real(self, *args)

    GPT.forward = forward


@pytest.mark.parametrize("world", [1, 2])
def test_a_validation_is_left_when_a_signal_comes(byte_shards, tmp_path, world):
    flags = ["--data", byte_shards, "--max-steps", 4, "--val-every", 2, "--batch-size", 1, "--val-tokens", 10**6]
    ranks, out = (
        start_run(*flags, "--out", "run", cwd=tmp_path, world=world, sabotage=slow_validation),
        tmp_path / "run",
    )
    output = tmp_path / "0.txt"
    assert wait_for(lambda: output.exists() and "data    " in output.read_text())
    time.sleep(0.3)  # into the first validation, of 80 rows
    for process in ranks:
        os.kill(process.pid, signal.SIGTERM)
    assert finish_run(ranks, timeout=20) == [143] * world
    assert (out / "log.txt").read_text() == "" and not list(out.glob("model_*"))
    assert "There is no checkpoint yet" in output.read_text()


def slow_save(rank):
    checkpoint.save = lambda *args: time.sleep(60)


@pytest.mark.parametrize("first", [[signal.SIGINT], [signal.SIGTERM, signal.SIGINT]])
def test_a_second_interrupt_stops_at_once(byte_shards, tmp_path, first):
    flags = ["--data", byte_shards, "--max-steps", 100000, "--val-every", 0]
    [process] = start_run(*flags, "--out", "run", cwd=tmp_path, sabotage=slow_save)
    out = tmp_path / "run"
    assert wait_for(lambda: steps_done(out) >= 2)
    for number in first:
        os.kill(process.pid, number)
        time.sleep(0.3)
    assert process.is_alive()  # it saves
    os.kill(process.pid, signal.SIGINT)
    assert finish_run([process], timeout=10) == [130]


def reader_leaves_after_step_3(rank):
    read, write = os.pipe()
    real = train_gpt2.count_bad_steps

    def count(run, step, *figures):
        if step == 1:
            os.dup2(write, 1)
        if step == 3:
            os.close(read)
        real(run, step, *figures)

    train_gpt2.count_bad_steps = count


@pytest.mark.parametrize("world", [1, 2])
def test_the_state_is_saved_when_nobody_reads_the_output_any_more(byte_shards, tmp_path, world):
    """As with "| tee" and Ctrl-C, which ends tee first."""
    flags = ["--data", byte_shards, "--max-steps", 8]
    run_to_the_end(*flags, "--out", "straight", cwd=tmp_path, world=world)
    ranks = start_run(*flags, "--out", "run", cwd=tmp_path, world=world, sabotage=reader_leaves_after_step_3)
    assert finish_run(ranks) == [141] * world
    assert checkpoint.step_of(checkpoint.newest(tmp_path / "run")) == 5
    run_to_the_end(*flags, "--out", "run", "--resume", cwd=tmp_path, world=world)
    assert_same_run(tmp_path / "run", tmp_path / "straight")


def console_on_a_full_disk(rank):
    real = train_gpt2.evaluate

    def evaluate(run, step):
        if step == 1:
            os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
        real(run, step)

    train_gpt2.evaluate = evaluate


def test_a_console_that_cannot_be_written_ends_nothing(byte_shards, tmp_path):
    flags = ["--data", byte_shards, "--max-steps", 4, "--out", "run"]
    run_to_the_end(*flags, cwd=tmp_path, sabotage=console_on_a_full_disk)
    assert steps_done(tmp_path / "run") == 4 and checkpoints(tmp_path / "run") == ["model_00004"]


def signalled_with_torchrun(rank):
    os.environ["TORCHELASTIC_RUN_ID"] = "x"
    real = checkpoint.save

    def save(*args):
        time.sleep(1)
        return real(*args)

    checkpoint.save = save


def test_the_copy_that_torchrun_forwards_is_no_second_interrupt(byte_shards, tmp_path):
    flags = ["--data", byte_shards, "--max-steps", 100000, "--val-every", 0]
    [process] = start_run(*flags, "--out", "run", cwd=tmp_path, sabotage=signalled_with_torchrun)
    assert wait_for(lambda: steps_done(tmp_path / "run") >= 2)
    for _ in range(2):
        os.kill(process.pid, signal.SIGINT)
        time.sleep(0.1)
    assert finish_run([process]) == [130]
    assert checkpoint.step_of(checkpoint.newest(tmp_path / "run")) == steps_done(tmp_path / "run")


# ---- checkpoints that cannot be written, and those that are kept


def full_disk(monkeypatch, which):
    """Makes some of the saves fail as on a full disk: those whose number is in `which`, from 1."""
    saves, save, sync = [], checkpoint.save, checkpoint._sync

    def counted(*args):
        saves.append(1)
        return save(*args)

    def failing(path):
        if len(saves) in which and path.suffix == ".safetensors":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        sync(path)

    monkeypatch.setattr(checkpoint, "save", counted)
    monkeypatch.setattr(checkpoint, "_sync", failing)


def checkpoints(out):
    return sorted(path.name for path in out.iterdir() if "model" in path.name)


def flags_for(byte_shards, out, steps):
    return config_of("--data", byte_shards, "--out", out, "--max-steps", steps, "--checkpoint-every", 2)


def test_a_save_that_fails_costs_itself_only(byte_shards, tmp_path, monkeypatch, capsys):
    full_disk(monkeypatch, {2, 4})
    train(flags_for(byte_shards, tmp_path / "full", 10), ONE_PROCESS)
    monkeypatch.undo()
    assert checkpoints(tmp_path / "full") == ["model_00002", "model_00006", "model_00010"]
    err = capsys.readouterr().err
    assert err.count("warning: the checkpoint of step 4 could not be saved") == 1 and "No space left" in err
    train(flags_for(byte_shards, tmp_path / "straight", 10), ONE_PROCESS)
    assert_same_run(tmp_path / "full", tmp_path / "straight")


def test_the_second_save_in_a_row_that_fails_ends_the_run(byte_shards, tmp_path, monkeypatch):
    full_disk(monkeypatch, {2, 3})
    with pytest.raises(UserError, match="step 6 could not be saved in .*No space left.*nor could the one before"):
        train(flags_for(byte_shards, tmp_path / "run", 1000), ONE_PROCESS)
    assert checkpoints(tmp_path / "run") == ["model_00002"]
    assert steps_done(tmp_path / "run") < 1000


def test_a_last_checkpoint_that_fails_is_an_error(byte_shards, tmp_path, monkeypatch):
    full_disk(monkeypatch, {2})
    with pytest.raises(UserError, match="the last checkpoint could not be saved"):
        train(flags_for(byte_shards, tmp_path / "run", 4), ONE_PROCESS)
    assert checkpoints(tmp_path / "run") == ["model_00002"]


def test_free_space_is_looked_at_first(byte_shards, tmp_path, monkeypatch, capsys):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(UserError, match="could not be saved"):
        train(flags_for(byte_shards, tmp_path / "run", 1000), ONE_PROCESS)
    captured = capsys.readouterr()
    assert "MB, and 0.0 MB are free" in captured.err and checkpoints(tmp_path / "run") == []
    assert "note    a checkpoint takes" in captured.out


def test_a_file_that_cannot_grow_ends_the_run_with_the_old_checkpoint_whole(byte_shards, tmp_path):
    """With RLIMIT_FSIZE the writes themselves fail, in each library that writes, and on two ranks all must end."""
    flags = ["--data", byte_shards, "--max-steps", 100000, "--val-every", 0, "--checkpoint-every", 10]
    ranks, out = start_run(*flags, "--out", "run", cwd=tmp_path, world=2), tmp_path / "run"
    assert wait_for(lambda: checkpoints(out)[:1] == ["model_00010"] if out.exists() else False)
    resource.prlimit(ranks[0].pid, resource.RLIMIT_FSIZE, (50_000, 50_000))  # weights take 145,000 bytes
    assert finish_run(ranks) == [2, 2]
    output = (tmp_path / "0.txt").read_text()
    assert output.count("warning: the checkpoint of step") == 1
    assert output.count("error: the checkpoint of step") == 1 and "nor could the one before" in output
    assert "error" not in (tmp_path / "1.txt").read_text()
    assert checkpoint.newest(out) is not None and not any(out.glob(".model*"))


def test_no_checkpoint_is_ahead_of_its_log(byte_shards, tmp_path, monkeypatch):
    def lost(self):
        raise OSError("the log of the run could not be written")

    monkeypatch.setattr(log.RunLog, "sync", lost)
    with pytest.raises(UserError, match="could not be saved"):
        train(flags_for(byte_shards, tmp_path / "run", 20), ONE_PROCESS)
    assert checkpoints(tmp_path / "run") == []


def test_lines_wait_while_the_log_cannot_be_written(tmp_path, capsys):
    run_log, expected = log.RunLog(tmp_path / "log.txt", 0), log.RunLog(tmp_path / "expected.txt", 0)
    real = run_log._file

    class Full:
        name, room = real.name, 20

        def write(self, data):
            if self.room == 0:
                raise OSError(errno.ENOSPC, "No space left on device")
            n = real.write(data[: self.room])
            self.room -= n
            return n

    run_log._file = full = Full()
    for step in range(6):
        for each in (run_log, expected):
            each.write(step, "train", step / 7)
        if step == 3:
            with pytest.raises(OSError, match="No space left"):
                run_log.sync()
            full.room = 10**6
    assert (tmp_path / "log.txt").read_bytes() == (tmp_path / "expected.txt").read_bytes()
    assert capsys.readouterr().err.count("warning: cannot write to") == 1


def test_the_loop_may_write_to_the_log_while_a_checkpoint_syncs_it(tmp_path):
    run_log, failures = log.RunLog(tmp_path / "log.txt", 0), []
    real = run_log._file

    class Slow:
        name, fileno = real.name, real.fileno

        def write(self, data):
            time.sleep(0.001)
            return real.write(data)

    run_log._file = Slow()

    def sync():
        try:
            for _ in range(50):
                run_log.sync()
        except OSError as error:
            failures.append(error)

    thread = threading.Thread(target=sync)
    thread.start()
    for step in range(200):
        run_log.write(step, "train", 1.0)
    thread.join()
    assert not failures and (tmp_path / "log.txt").read_text().count("\n") == 200


def test_the_newest_and_the_best_are_kept(tmp_path, capsys):
    values = {10: 3.0, 20: 2.0, 30: 2.5, 40: 2.4, 50: 2.6}
    run_log, saver = log.RunLog(tmp_path / "log.txt", 0), checkpoint.Saver(tmp_path, 2, Stop())
    kept = []
    for step in (10, 20, 25, 30, 40, 50):
        if step in values:
            run_log.write(step, "val", values[step])
        saver.start(step, lambda folder: (folder / "x").write_text("x"), 1)
        saver.wait()
        kept.append([checkpoint.step_of(directory) for directory in checkpoint.by_step(tmp_path)])
    assert kept == [[10], [10, 20], [20, 25], [20, 25, 30], [20, 30, 40], [20, 40, 50]]
    everything = checkpoint.Saver(tmp_path, 0, Stop())
    everything.start(60, lambda folder: (folder / "x").write_text("x"), 1)
    everything.finish()
    assert len(checkpoint.by_step(tmp_path)) == 4


def test_damaged_checkpoints_are_not_among_those_that_are_kept(tmp_path, capsys):
    def save_one(step, keep):
        saver = checkpoint.Saver(tmp_path, keep, Stop())
        saver.start(step, lambda folder: (folder / "x").write_text("x"), 1)
        saver.wait()
        return checkpoints(tmp_path)

    (tmp_path / "log.txt").touch()
    for step in (1, 2, 3):
        save_one(step, 0)
    (tmp_path / "model_00003" / "x").write_text("y")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "model_00001").rename(tmp_path / "elsewhere" / "1")
    (tmp_path / "model_00001").symlink_to(tmp_path / "elsewhere" / "1")
    assert save_one(4, 3) == ["model_00001", "model_00002", "model_00004"]
    assert save_one(5, 2) == ["model_00004", "model_00005"]  # a link is removed, and not what it leads to
    assert (tmp_path / "elsewhere" / "1" / "x").exists()


def test_weights_that_are_not_finite_are_not_saved(byte_shards, tmp_path, monkeypatch, capsys):
    real = train_gpt2.train_step

    def step(run, lr):
        figures = real(run, lr)
        with torch.no_grad():
            run.raw_model.transformer.ln_f.bias[0] = torch.inf
        return figures

    monkeypatch.setattr(train_gpt2, "train_step", step)
    with pytest.raises(UserError, match="3 updates in a row were not finite"):
        train(config_of("--data", byte_shards, "--out", tmp_path / "run", "--checkpoint-every", 1, "--max-steps", 9, "--val-every", 0), ONE_PROCESS)  # fmt: skip
    assert checkpoints(tmp_path / "run") == []
    assert "warning: the checkpoint of step 1 could not be saved" in (err := capsys.readouterr().err)
    assert "the weights are not finite" in err


def test_a_gap_in_the_log_is_told(tmp_path, capsys):
    (tmp_path / "log.txt").write_text("0 train 1.000000\n1 train 1.000000\n5 val abc\n")
    log.RunLog(tmp_path / "log.txt", 2)
    assert capsys.readouterr().err == "" and log.read(tmp_path / "log.txt", "val") == {}
    log.RunLog(tmp_path / "log.txt", 4)
    assert "log.txt lacks lines of the steps before 4" in capsys.readouterr().err


@pytest.mark.parametrize("state", [[1], {"step": 1}, "config"])
def test_a_state_of_another_trainer_is_refused(byte_shards, tmp_path, state):
    train(config_of("--data", byte_shards, "--out", tmp_path / "run", "--max-steps", 1), ONE_PROCESS)
    directory = tmp_path / "run" / "model_00001"
    good = checkpoint.read_state(directory)
    if state == "config":
        state = good | {"config": good["config"] | {"max_steps": "many"}}
    files = {path.name: path.read_bytes() for path in directory.iterdir() if path.name != "checkpoint.json"}

    def write(folder):
        for name, content in files.items():
            (folder / name).write_bytes(content)
        torch.save(state, folder / "trainer.pt")

    checkpoint.save(directory, write)
    with pytest.raises(UserError, match="cannot resume from .*trainer.pt"):
        configure(["--resume", "--out", str(tmp_path / "run")])


def test_a_save_that_fails_removes_nothing(tmp_path, capsys):
    saver = checkpoint.Saver(tmp_path, 1, Stop())
    saver.start(1, lambda folder: (folder / "x").write_text("x"), 1)
    saver.start(2, lambda folder: (folder / "missing" / "x").write_text("x"), 1)
    saver.wait()
    assert checkpoints(tmp_path) == ["model_00001"]


def test_training_waits_for_a_copy_only(byte_shards, tmp_path, monkeypatch):
    """What is saved is the state of its step, though it is written while later steps change it."""
    real, done = checkpoint.save, []

    def save_late(directory, write):
        if directory.name == "model_00002":
            wait_for(lambda: steps_done(tmp_path / "run") >= 4, timeout=20)
        done.append((directory.name, steps_done(tmp_path / "run")))
        return real(directory, write)

    monkeypatch.setattr(checkpoint, "save", save_late)
    train(flags_for(byte_shards, tmp_path / "run", 5), ONE_PROCESS)
    assert done[0] == ("model_00002", 4)  # and step 4's save waited for it
    monkeypatch.undo()
    train(flags_for(byte_shards, tmp_path / "straight", 5), ONE_PROCESS)
    shutil.rmtree(tmp_path / "run" / "model_00005")
    shutil.rmtree(tmp_path / "run" / "model_00004")
    config, directory = configure(["--resume", "--out", str(tmp_path / "run")])
    assert directory.name == "model_00002"
    train(config, ONE_PROCESS, directory)
    assert_same_run(tmp_path / "run", tmp_path / "straight")


# ---- numbers


def nan_at_step_3_on_rank_1(rank):
    real, calls = train_gpt2.train_step, []

    def step(run, lr):
        calls.append(1)
        if len(calls) == 4 and rank == 1:
            first, *_ = (p for p in run.raw_model.parameters() if p.dim() == 1)
            hook = first.register_hook(lambda grad: grad * torch.nan)
            try:
                return real(run, lr)
            finally:
                hook.remove()
        return real(run, lr)

    train_gpt2.train_step = step


def infinite_loss_at_step_3_on_rank_1(rank):
    real, calls = train_gpt2.Distributed.mean, []

    def mean(self, tensor):
        calls.append(1)
        if len(calls) == 4 and rank == 1:
            tensor[0] = torch.inf
        return real(self, tensor)

    train_gpt2.Distributed.mean = mean


def skip_step_3(rank):
    """The reference: the optimizer is not called at step 3, and nothing is wrong with its gradient."""
    real, calls = torch.optim.AdamW.step, []

    def step(self, *args, **kwargs):
        calls.append(1)
        return None if len(calls) == 4 else real(self, *args, **kwargs)

    torch.optim.AdamW.step = step


@pytest.mark.parametrize("bad", [nan_at_step_3_on_rank_1, infinite_loss_at_step_3_on_rank_1])
def test_one_bad_update_on_one_rank_is_skipped_on_all(byte_shards, tmp_path, bad):
    flags = ["--data", byte_shards, "--max-steps", 8, "--val-every", 0, "--checkpoint-every", 4]
    run_to_the_end(*flags, "--out", "bad", cwd=tmp_path, world=2, sabotage=bad)
    output = (tmp_path / "0.txt").read_text()
    run_to_the_end(*flags, "--out", "skipped", cwd=tmp_path, world=2, sabotage=skip_step_3)
    assert output.count("step     3 | skipped: the loss or the gradient is not finite") == 1
    assert "step     4 | no checkpoint while updates are skipped" in output
    assert checkpoints(tmp_path / "bad") == ["model_00008"]
    log_lines = (tmp_path / "bad" / "log.txt").read_text()
    if bad is infinite_loss_at_step_3_on_rank_1:  # the one line that cannot be the same
        assert "3 train inf\n" in log_lines
        line = (tmp_path / "skipped" / "log.txt").read_text().splitlines()[3]
        (tmp_path / "bad" / "log.txt").write_text(log_lines.replace("3 train inf", line))
    assert_same_run(tmp_path / "bad", tmp_path / "skipped")


def bad_losses(monkeypatch, steps, value=float("nan")):
    """Makes the loss of these updates `value`, from the first micro-batch on."""
    real, calls = train_gpt2.train_step, []

    def step(run, lr):
        calls.append(1)
        if len(calls) - 1 not in steps:
            return real(run, lr)
        forward = GPT.forward
        monkeypatch.setattr(GPT, "forward", lambda *args: (None, forward(*args)[1] * value))
        try:
            return real(run, lr)
        finally:
            monkeypatch.setattr(GPT, "forward", forward)

    monkeypatch.setattr(train_gpt2, "train_step", step)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_bad_updates_in_a_row_end_the_run(byte_shards, tmp_path, monkeypatch, capsys, dtype, value):
    bad_losses(monkeypatch, {2, 3, 5, 6, 7}, value)
    config = config_of("--data", byte_shards, "--out", tmp_path / "run", "--max-steps", 20, "--checkpoint-every", 1,
                       "--dtype", dtype)  # fmt: skip
    with pytest.raises(
        UserError, match="3 updates in a row were not finite, the last one at step 7, and none was applied"
    ):
        train(config, ONE_PROCESS)
    assert checkpoints(tmp_path / "run") == ["model_00001", "model_00002", "model_00005"]
    logged = (tmp_path / "run" / "log.txt").read_text()
    assert [line.split()[0] for line in logged.splitlines() if line.endswith((" nan", " inf"))] == list("23567")
    saved = [GPT.from_pretrained(tmp_path / "run" / name).state_dict() for name in ("model_00002", "model_00005")]
    assert all(torch.isfinite(tensor).all() for state in saved for tensor in state.values())
    # of the updates between those two, only that of step 4 was made
    step = checkpoint.read_state(tmp_path / "run" / "model_00005")["optimizer"]["state"][0]["step"]
    assert step == 3


def test_a_bad_last_update_does_not_cost_the_others(byte_shards, tmp_path, monkeypatch):
    bad_losses(monkeypatch, {4, 5})
    train(config_of("--data", byte_shards, "--out", tmp_path / "run", "--max-steps", 6), ONE_PROCESS)
    state = checkpoint.read_state(tmp_path / "run" / "model_00006")
    assert state["bad_steps"] == 2 and state["optimizer"]["state"][0]["step"] == 4
    monkeypatch.undo()
    bad_losses(monkeypatch, {0})
    flags = ["--resume", "--out", str(tmp_path / "run"), "--max-steps", "9", "--max-bad-steps", "2"]
    config, directory = configure(flags)
    with pytest.raises(UserError, match="3 updates in a row were not finite, the last one at step 6"):
        train(config, ONE_PROCESS, directory)


def test_bad_gradients_are_no_overflows_for_ever(byte_shards, tmp_path, monkeypatch):
    real = torch.nn.utils.clip_grad_norm_

    def poisoned(parameters, limit):
        parameters = list(parameters)
        parameters[0].grad[0, 0] = torch.nan
        return real(parameters, limit)

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", poisoned)
    unscale = torch.amp.GradScaler.unscale_

    def unscale_poisoned(self, optimizer):
        optimizer.param_groups[0]["params"][0].grad[0, 0] = torch.nan
        unscale(self, optimizer)

    monkeypatch.setattr(torch.amp.GradScaler, "unscale_", unscale_poisoned)
    config = config_of("--data", byte_shards, "--out", tmp_path / "run", "--max-steps", 60, "--dtype", "fp16")
    with pytest.raises(UserError, match="3 updates in a row were not finite, the last one at step 17"):
        train(config, ONE_PROCESS)  # 65,536 is halved 16 times until it is 1


def test_overflows_of_fp16_are_the_scalers_business(byte_shards, tmp_path, monkeypatch, capsys):
    real = torch.amp.GradScaler
    monkeypatch.setattr(torch.amp, "GradScaler", lambda *args, **kwargs: real(*args, init_scale=2.0**60, **kwargs))
    config = config_of("--data", byte_shards, "--out", tmp_path / "run", "--max-steps", 60, "--dtype", "fp16")
    train(config, ONE_PROCESS)
    state = checkpoint.read_state(tmp_path / "run" / "model_00060")
    skipped = 60 - int(state["optimizer"]["state"][0]["step"])
    assert skipped > 3 and state["scaler"]["scale"] == 2.0 ** (60 - skipped) and state["overflows"] == skipped
    printed = capsys.readouterr().out
    assert "skipped" not in printed and printed.count(" of fp16: no update;") == skipped
    assert (
        f"overflow {skipped} of fp16: no update; gradients are scaled by {2.0 ** (60 - skipped):g} from now on"
        in printed
    )


def a_scale_far_too_high(rank):
    real = torch.amp.GradScaler
    torch.amp.GradScaler = lambda *args, **kwargs: real(*args, init_scale=2.0**60, **kwargs)


@pytest.mark.parametrize("world", [1, 2])
def test_a_run_resumed_between_overflows_is_the_uninterrupted_run(byte_shards, tmp_path, world):
    fp16 = ["--dtype", "fp16", "--val-every", 0]  # on a command line again, for those of TINY_FLAGS are, too
    flags = [*fp16, "--data", byte_shards, "--decay-steps", 40]
    start = dict(cwd=tmp_path, world=world, sabotage=a_scale_far_too_high)
    run_to_the_end(*flags, "--max-steps", 40, "--out", "straight", **start)
    run_to_the_end(*flags, "--max-steps", 7, "--out", "resumed", **start)
    run_to_the_end("--resume", *fp16, "--max-steps", 40, "--out", "resumed", **start)
    assert " | overflow 8 of fp16" in (tmp_path / "0.txt").read_text()  # the count went on, and all ranks with it
    assert_same_run(tmp_path / "straight", tmp_path / "resumed")
    states = [checkpoint.read_state(tmp_path / run / "model_00040") for run in ("straight", "resumed")]
    assert states[0]["overflows"] == states[1]["overflows"] > 8 and states[0]["scaler"] == states[1]["scaler"]


# ---- memory


def two_rows_fit_on_rank_1(rank):
    out_of_memory_beyond(4 if rank == 0 else 2)


def out_of_memory_beyond(rows):
    real, fit.PROBED = GPT.forward, ("cpu",)

    def forward(self, idx, *args):
        if len(idx) > rows:
            raise torch.OutOfMemoryError("out of memory. Tried to allocate much.")
        return real(self, idx, *args)

    GPT.forward = forward


@pytest.fixture
def little_memory(monkeypatch):
    monkeypatch.setattr(GPT, "forward", GPT.forward)
    monkeypatch.setattr(fit, "PROBED", fit.PROBED)
    return out_of_memory_beyond


def test_the_largest_micro_batch_that_fits_is_found(byte_shards, tmp_path, little_memory, capsys):
    flags = ["--data", byte_shards, "--max-steps", 4]
    train(config_of(*flags, "--out", tmp_path / "four", "--batch-size", 4), ONE_PROCESS)
    little_memory(5)
    train(config_of(*flags, "--out", tmp_path / "sixteen", "--batch-size", 16), ONE_PROCESS)
    out = capsys.readouterr().out
    assert "a micro-batch of 16 rows does not fit into memory; 4 do" in out
    assert out.count("256 tokens = 4 (rows) x 16 (tokens) x 1 (processes) x 4 (micro-steps)") == 2
    assert_same_run(tmp_path / "sixteen", tmp_path / "four")  # the trial has left no trace
    little_memory(0)
    with pytest.raises(UserError, match="not even one row of 16 tokens fits into the memory of cpu"):
        train(config_of(*flags, "--out", tmp_path / "none"), ONE_PROCESS)
    assert not (tmp_path / "none").exists()


def test_the_trial_includes_the_optimizer_and_validation(tiny_model, monkeypatch):
    """The sizes that are tried, and what is tried with each, by the tensors that are alive."""
    monkeypatch.setattr(fit, "PROBED", ("cpu",))
    seen, allocated, real = [], [], torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda p: allocated.append(p.numel()) or real(p))
    before = {name: p.clone() for name, p in tiny_model.named_parameters()}
    forward = tiny_model.forward

    def spy(idx, targets=None):
        gradients = all(p.grad is not None for p in tiny_model.parameters())
        seen.append((len(idx), torch.is_grad_enabled(), gradients))
        if len(idx) > 2 and len(seen) % 2 == 0:  # the second pass, with gradients there, is too much
            raise torch.OutOfMemoryError
        return forward(idx, targets)

    monkeypatch.setattr(tiny_model, "forward", spy)
    amp = torch.autocast("cpu", enabled=False)
    assert fit.largest_micro_batch([8, 2, 1], 16, tiny_model, tiny_model, amp, 1, print) == 2
    assert seen == [(8, True, False), (8, True, True), (2, True, False), (2, True, True), (2, False, True)]
    assert sum(allocated) == 2 * 2 * sum(p.numel() for p in tiny_model.parameters())  # two moments, two trials
    allocated.clear()
    fit.largest_micro_batch([1], 16, tiny_model, tiny_model, amp, 2, print)  # DDP's buckets are one more
    assert sum(allocated) == 3 * sum(p.numel() for p in tiny_model.parameters())
    assert all(p.grad is None and torch.equal(p, before[name]) for name, p in tiny_model.named_parameters())


def test_ranks_take_the_smallest_micro_batch(byte_shards, tmp_path):
    flags = ["--data", byte_shards, "--max-steps", 3, "--val-every", 0]
    run_to_the_end(*flags, "--out", "run", "--batch-size", 8, cwd=tmp_path, world=2, sabotage=two_rows_fit_on_rank_1)
    assert "= 2 (rows) x 16 (tokens) x 2 (processes) x 4 (micro-steps)" in (tmp_path / "0.txt").read_text()


# ---- nodes


def no_memory_on_rank_1(rank):
    out_of_memory_beyond(100 if rank == 0 else 0)


def test_a_failure_of_one_rank_before_the_first_step_is_told(byte_shards, tmp_path):
    flags = ["--data", byte_shards, "--out", "run"]
    ranks = start_run(*flags, cwd=tmp_path, world=2, sabotage=no_memory_on_rank_1)
    assert wait_for(lambda: not ranks[1].is_alive())
    ranks[0].terminate()  # as torchrun does then
    assert finish_run(ranks, timeout=20) == [-signal.SIGTERM, 2]
    assert (tmp_path / "1.txt").read_text().startswith("error: not even one row of 16 tokens fits into the memory")
    assert (tmp_path / "0.txt").read_text() == "" and not (tmp_path / "run").exists()


def test_ranks_agree_on_an_attempt_whatever_earlier_ones_left():
    store, found = torch.distributed.HashStore(), {}
    for attempt in range(3):  # the second and third find the words and answers of those before
        ranks = [2, 0, 1] if attempt % 2 else [0, 1, 2]
        threads = [
            threading.Thread(target=lambda r=r, a=attempt: found.__setitem__((a, r), agree_on_attempt(store, r, 3)))
            for r in ranks
        ]
        for thread in threads:
            thread.start()
            time.sleep(0.1)
        for thread in threads:
            thread.join(timeout=20)
    words = [{found[attempt, rank] for rank in range(3)} for attempt in range(3)]
    assert [len(word) for word in words] == [1, 1, 1] and len(set.union(*words)) == 3


def other_checkpoint_on_rank_1(rank):
    if rank == 1:
        real = train_gpt2.configure
        train_gpt2.configure = lambda argv: (real(argv)[0], None)


def test_nodes_that_see_different_checkpoints_do_not_train(byte_shards, tmp_path):
    flags = ["--data", byte_shards, "--max-steps", 4, "--out", "run", "--resume", "auto"]
    run_to_the_end(*flags, cwd=tmp_path)
    codes = finish_run(start_run(*flags[:2], "--max-steps", 6, *flags[4:], cwd=tmp_path, world=2, sabotage=other_checkpoint_on_rank_1))  # fmt: skip
    assert codes == [2, 2]
    assert "error: the nodes found different checkpoints in run." in (tmp_path / "0.txt").read_text()
    assert (tmp_path / "1.txt").read_text() == ""


# ---- the folder of a run


def test_a_second_run_in_the_same_folder_is_refused(byte_shards, tmp_path):
    flags = ["--data", byte_shards, "--max-steps", 100000, "--val-every", 0, "--checkpoint-every", 20]
    [first] = start_run(*flags, "--out", "run", cwd=tmp_path)
    out = tmp_path / "run"
    assert wait_for(lambda: out.exists() and checkpoints(out)[:1] == ["model_00020"])
    for again in (["--resume"], ["--resume", "auto"], [], ["--demo", "--data", byte_shards]):
        with pytest.raises(UserError, match=rf"run is in use by a live run \(process {first.pid} on .*another --out"):
            train_gpt2.main([*TINY_FLAGS, "--data", str(byte_shards), "--out", str(out), *map(str, again)])
    assert first.is_alive()
    first.kill()
    first.join()
    run_folder.check(out, checkpoint.newest(out), None)
    with pytest.raises(UserError, match="already holds a run. Go on with it with --resume"):
        run_folder.check(out, None, None)


def test_a_new_run_clears_a_run_and_nothing_else(tmp_path):
    for name in ("model_00001", "model_of_mine", ".model_00002.partial", ".model_00001.removed"):
        (tmp_path / name).mkdir()
    for name in ("log.txt", "notes.md"):
        (tmp_path / name).write_text("x")
    with pytest.raises(UserError, match="already holds a run"):
        run_folder.claim(tmp_path, None, None).close()
    with pytest.raises(UserError, match="another run has saved .*model_00001 while this one was starting"):
        run_folder.claim(tmp_path, None, "log").close()
    assert len(os.listdir(tmp_path)) == 7
    run_folder.claim(tmp_path, None, "all").close()
    assert sorted(os.listdir(tmp_path)) == [".lock", "log.earlier.txt", "model_of_mine", "notes.md"]
    (tmp_path / ".model_00002.partial").mkdir()
    (tmp_path / "model_00003").mkdir()
    run_folder.claim(tmp_path, tmp_path / "model_00003", None).close()
    assert sorted(os.listdir(tmp_path)) == [".lock", "log.earlier.txt", "model_00003", "model_of_mine", "notes.md"]
    checkpoint.save(tmp_path / "model_00004", lambda folder: (folder / "x").write_text("x"))
    with pytest.raises(UserError, match="another run has saved .*model_00004"):
        run_folder.claim(tmp_path, tmp_path / "model_00003", None).close()
    (tmp_path / "model_00004" / "x").unlink()  # damaged, it is no other run's
    run_folder.claim(tmp_path, tmp_path / "model_00003", None).close()


# ---- data


@pytest.fixture
def data(byte_shards, tmp_path):
    """A copy of the shards that may be harmed, and the first of its train shards."""
    shutil.copytree(byte_shards, tmp_path / "data")
    return tmp_path / "data", sorted((tmp_path / "data").glob("*_train_*.npy"))[0]


def flip(path, offset=-1):
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)


def test_shards_are_checked_whole(data, capsys):
    folder, shard = data
    fineweb.main(["--check", str(folder)])
    tokens = sum(len(np.load(path)) for path in folder.glob("*.npy"))
    assert f"{tokens:,} tokens (bytes), are as in the manifest" in capsys.readouterr().out
    flip(shard, -2)
    val = next(folder.glob("*_val_*.npy"))
    val.write_bytes(val.read_bytes()[:-2])
    with pytest.raises(UserError) as error:
        fineweb.main(["--check", str(folder)])
    assert len(error.value.problems) == 2
    assert f"{shard} was altered (wrong checksum)" in "\n".join(error.value.problems)
    assert f"{val} is not a readable .npy file" in "\n".join(error.value.problems)
    with pytest.raises(UserError, match="no train shards in"):
        fineweb.main(["--check", str(folder / "nowhere")])


def test_ids_are_checked_where_there_is_no_manifest(tmp_path, capsys):
    tokens = np.zeros(100, dtype=np.uint16)
    np.save(tmp_path / "x_train_000001.npy", tokens)
    fineweb.main(["--check", str(tmp_path)])
    assert "there is no manifest to compare with" in capsys.readouterr().out
    tokens[70] = 50257
    np.save(tmp_path / "x_train_000001.npy", tokens)
    with pytest.raises(
        UserError, match=r"x_train_000001\.npy has the id 50257 at offset 70, beyond the vocabulary of 50,257"
    ):
        fineweb.main(["--check", str(tmp_path)])


def test_altered_shards_are_found_when_asked_for(data, tmp_path):
    folder, shard = data
    flip(shard, -2)  # another valid token
    flags = ["--data", str(folder), "--max-steps", 1]
    train(config_of(*flags, "--out", tmp_path / "trusting"), ONE_PROCESS)
    with pytest.raises(UserError, match=r"was altered \(wrong checksum\)"):
        train(config_of(*flags, "--out", tmp_path / "run", "--verify-data"), ONE_PROCESS)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("split", ["train", "val"])
def test_a_run_does_not_go_on_with_other_data_of_the_same_size(data, tmp_path, split):
    folder, _ = data
    out = tmp_path / "run"
    train(config_of("--data", folder, "--out", out, "--max-steps", 2), ONE_PROCESS)
    manifest = json.loads((folder / "manifest.json").read_text())
    changed = next(shard for shard in manifest["shards"] if shard["split"] == split)
    tokens = np.load(folder / changed["file"])[::-1].copy()
    changed["sha256"] = shards.write_shard(folder / changed["file"], tokens)
    (folder / "manifest.json").write_text(json.dumps(manifest))
    config, directory = configure(["--resume", "--out", str(out), "--max-steps", "3"])
    with pytest.raises(UserError, match=f"the {split} shards are not those that .*model_00002 was trained with"):
        train(config, ONE_PROCESS, directory)


@pytest.mark.parametrize("world", [1, 2])
def test_an_unknown_id_costs_no_update_that_was_made(data, tmp_path, world):
    folder, _ = data
    shard = sorted(folder.glob("*_train_*.npy"))[1]
    tokens, before = np.load(shard), len(np.load(sorted(folder.glob("*_train_*.npy"))[0]))
    tokens[16 * 40] = 999
    np.save(shard, tokens)
    row = (before - 1) // 16 + 39  # the last token of this row, and the first of the next
    flags = ["--data", folder, "--out", "run", "--max-steps", 1000, "--val-every", 0]
    assert finish_run(start_run(*flags, cwd=tmp_path, world=world)) == [2] * world
    outputs = "".join((tmp_path / f"{rank}.txt").read_text() for rank in range(world))
    assert outputs.count(f"error: {shard} has the id 999 at offset 640, beyond the vocabulary of 257.") == 1
    assert checkpoints(tmp_path / "run") == [f"model_{row // 16:05d}"] and steps_done(tmp_path / "run") == row // 16


def test_the_last_update_does_not_look_ahead(data, tmp_path):
    folder, _ = data
    tokens = np.load(shard := sorted(folder.glob("*_train_*.npy"))[0])
    tokens[16 * 16 * 3 + 8] = 999  # in the fourth update
    np.save(shard, tokens)
    train(config_of("--data", folder, "--out", tmp_path / "run", "--max-steps", 3), ONE_PROCESS)
    assert checkpoints(tmp_path / "run") == ["model_00003"]


def test_a_broken_shard_ends_the_run_before_it_begins(data, tmp_path):
    folder, shard = data
    np.save(shard, np.load(shard).astype(np.int32))
    assert finish_run(start_run("--data", folder, "--out", "run", cwd=tmp_path)) == [2]
    output = (tmp_path / "0.txt").read_text()
    assert output.startswith(f"error: {shard} holds 1-dimensional int32, not 1-dimensional uint16 tokens.")
    assert output.count("\n") == 1 and not (tmp_path / "run").exists()


# ---- nothing in a file is executed


class Evil:
    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def poisoned(place, data, run, evil):
    """Puts a pickle where a file is expected, and returns what then reads that file."""
    folder, shard = data
    resume = ["--resume", "--out", str(run), "--max-steps", "3", "--data", str(folder)]
    last = run / "model_00002"

    def rewritten(name, content):
        checkpoint.save(last, lambda new: [shutil.copy(f, new) for f in before.iterdir()] and (new / name).write_bytes(content))  # fmt: skip

    before = run.with_name("before")
    shutil.copytree(last, before, ignore=shutil.ignore_patterns("checkpoint.json"))
    if place == "trainer.pt":
        torch.save({"config": evil}, before / "trainer.pt")
        rewritten("trainer.pt", (before / "trainer.pt").read_bytes())
        return lambda: train_gpt2.main(resume)
    if place in ("trainer.pt, bare", "model.safetensors", "config.json", "checkpoint.json"):
        name = place.split(",")[0]
        if name == "checkpoint.json":
            (last / name).write_bytes(pickle.dumps(evil))
        else:
            rewritten(name, pickle.dumps(evil))
        return lambda: train_gpt2.main(resume)
    if place == "pytorch_model.bin":
        (before / "model.safetensors").unlink()
        torch.save({"transformer.wte.weight": evil}, before / "pytorch_model.bin")
        flags = [flag for flag in TINY_FLAGS if flag not in ("--n-layer", "2", "--n-head", "--n-embd", "32")]
        return lambda: train_gpt2.main([*flags, "--data", str(folder), "--out", str(run / "new"), "--init-from", str(before)])  # fmt: skip
    if place == "pytorch_model.bin, scored":
        GPT(train_gpt2.GPTConfig(16, 50257, 1, 2, 8)).save_pretrained(before)
        (before / "model.safetensors").unlink()
        torch.save({"transformer.wte.weight": evil}, before / "pytorch_model.bin")
        items = run / "items.jsonl"
        items.write_text(json.dumps({"ctx": "a", "label": 0, "endings": ["b"] * 4}) + "\n")
        return lambda: hellaswag.load_model(before, torch.device("cpu"))
    if place == "pytorch_model.bin, sampled":
        (before / "model.safetensors").unlink()
        torch.save({"transformer.wte.weight": evil}, before / "pytorch_model.bin")
        return lambda: sample.main(["--model", str(before), "--prompt", "x"])
    if place == "shard":
        np.save(shard, np.array([evil], dtype=object), allow_pickle=True)
    elif place == "shard, bare":
        shard.write_bytes(pickle.dumps(evil))
    elif place == "manifest":
        (folder / "manifest.json").write_bytes(pickle.dumps(evil))
    elif place == "items":
        shard.with_name("items.jsonl").write_bytes(pickle.dumps(evil))
        return lambda: hellaswag.load(shard.with_name("items.jsonl"))
    return lambda: train_gpt2.main([*TINY_FLAGS, "--data", str(folder), "--out", str(run / "new")])


@pytest.mark.parametrize(
    "place, message",
    [
        ("trainer.pt", "trainer.pt is not readable"),
        ("trainer.pt, bare", "trainer.pt is not readable"),
        ("model.safetensors", "cannot read .*model.safetensors"),
        ("config.json", "config.json is not a GPT-2 configuration"),
        ("checkpoint.json", "no checkpoint in .* is whole"),
        ("pytorch_model.bin", "model.safetensors"),
        pytest.param("pytorch_model.bin, scored", "cannot read .*model.safetensors", marks=needs_gpt2_vocabulary),
        ("pytorch_model.bin, sampled", "model.safetensors"),
        ("shard", "is not a readable .npy file"),
        ("shard, bare", "is not a readable .npy file"),
        ("manifest", "is not a manifest of shards"),
        ("items", "cannot read HellaSwag items|is not JSON"),
    ],
)  # fmt: skip
def test_no_pickle_is_executed(data, tmp_path, place, message, capsys):
    run, executed = tmp_path / "run", tmp_path / "executed"
    train(config_of("--data", data[0], "--out", run, "--max-steps", 2), ONE_PROCESS)
    read = poisoned(place, data, run, Evil(executed))
    with pytest.raises(UserError, match=message):
        read()
    assert not executed.exists()
    pickle.loads(pickle.dumps(Evil(executed)))
    assert executed.exists()  # it would have been seen
