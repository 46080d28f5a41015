"""The folder of a run: one process at a time, and nothing is lost by accident."""

from __future__ import annotations

import itertools
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers import TINY_FLAGS, start_run, wait_for
from training import checkpoint_names, config_of, lock_and_replace, run_info

import train_gpt2
from support import files
from support.checkpoints import run_folder
from support.checkpoints.directory import newest_checkpoint, write_checkpoint
from support.checkpoints.manager import CheckpointManager
from support.checkpoints.run_folder import RUN_FILES
from support.checkpoints.state import Checkpoint
from support.cli import UserError
from support.runtime.signals import StopHandler


@pytest.mark.slow
def test_a_second_run_in_the_same_folder_is_refused(byte_shards, tmp_path):
    flags = ["--data", byte_shards, "--max-steps", 100000, "--val-every", 0, "--checkpoint-every", 20]
    [first] = start_run(*flags, "--out", "run", cwd=tmp_path)
    out = tmp_path / "run"
    assert wait_for(lambda: out.exists() and checkpoint_names(out)[:1] == ["model_00020"])
    for again in (["--resume"], ["--resume", "auto"], [], ["--demo", "--data", byte_shards]):
        with pytest.raises(UserError, match=rf"run is in use by process {first.pid} on .*another --out"):
            train_gpt2.main([*TINY_FLAGS, "--data", str(byte_shards), "--out", str(out), *map(str, again)])
    assert first.is_alive()
    first.kill()
    first.join()
    run_folder.check_folder(config_of("--out", out), Checkpoint.open(newest_checkpoint(out)))
    with pytest.raises(UserError, match="already contains a run. Continue it with --resume"):
        run_folder.check_folder(config_of("--out", out), None)


def test_what_a_new_run_may_replace(tmp_path):
    for name in ("model_00001", "model_of_mine", ".model_00002.partial", ".model_00001.removed"):
        (tmp_path / name).mkdir()
    for name in (*RUN_FILES, "notes.md"):
        (tmp_path / name).write_text("x")
    for policy in ("nothing", "log"):
        with pytest.raises(UserError, match="already contains a run"):
            lock_and_replace(tmp_path, policy)
    assert len(os.listdir(tmp_path)) == 10
    lock_and_replace(tmp_path, "nothing", tmp_path / "model_00001")
    assert sorted(os.listdir(tmp_path)) == sorted([".lock", *RUN_FILES, "model_00001", "model_of_mine", "notes.md"])
    write_checkpoint(tmp_path / "model_00004", lambda folder: (folder / "x").write_text("x"))
    with pytest.raises(UserError, match="another run saved .*model_00004"):
        lock_and_replace(tmp_path, "nothing", tmp_path / "model_00001")
    (tmp_path / "model_00004" / "x").unlink()  # a corrupt checkpoint counts as none
    lock_and_replace(tmp_path, "nothing", tmp_path / "model_00001")


# -----------------------------------------------------------------------------
# Replacing an earlier run


class Killed(BaseException):
    pass


def contents(folder):
    """The bytes of all files but the lock, by path."""
    paths = (path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def save(folder, step, text, first_step=0, *flags, replaces_later=False):
    """Saves the checkpoint of a step, in a run that was resumed at `first_step`."""
    checkpoint = SimpleNamespace(step=first_step, replaces_later=replaces_later) if first_step else None
    run = run_info("--out", folder, *flags, checkpoint=checkpoint)
    checkpoints = CheckpointManager(run, StopHandler(), lambda: None)
    checkpoints.start(step, lambda to: (to / "x").write_text(text))
    checkpoints.finish()


def write_run_files(folder, text):
    for name in RUN_FILES:
        (folder / name).write_text(f"{text} {name}")


def earlier_run(folder):
    """Makes a folder with three checkpoints, and with two that a run before it had replaced. Returns its contents."""
    for name in ("model_00002", "model_00004", "model_00006"):
        write_checkpoint(folder / name, lambda to: (to / "x").write_text("first"))
    for name in ("model_00004.earlier", "model_00090.earlier"):
        (folder / name).mkdir()
        (folder / name / "x").write_text("before")
    write_run_files(folder, "first")
    return contents(folder)


def start_second(folder, goes_back=False):
    return lock_and_replace(folder, "run", folder / "model_00002" if goes_back else None, replaces_later=goes_back)


def fail_before_the_first_save(folder):
    with pytest.raises(ZeroDivisionError), start_second(folder):
        write_run_files(folder, "failed")
        raise ZeroDivisionError


@pytest.mark.parametrize("goes_back", [False, True])
def test_the_first_save_replaces_the_earlier_run(tmp_path, goes_back):
    earlier_run(tmp_path)  # which has not finished: of those before it, models are still there
    with start_second(tmp_path, goes_back):
        write_run_files(tmp_path, "second")
        save(tmp_path, 4, "second", 2 * goes_back)
    found = contents(tmp_path)
    models = {name.removesuffix("/x"): text for name, text in found.items() if name.endswith("/x")}
    assert models == {"model_00004": b"second", "model_00004.earlier": b"before", "model_00006.earlier": b"first",
                      "model_00090.earlier": b"before"} | {"model_00002" + ".earlier" * (not goes_back): b"first"}  # fmt: skip
    assert {name: text.split()[0] for name, text in found.items() if "/" not in name} == dict.fromkeys(
        RUN_FILES, b"second"
    )


@pytest.mark.slow
@pytest.mark.parametrize("goes_back", [False, True])
def test_a_kill_at_any_point_leaves_the_one_run_or_the_other(tmp_path, goes_back, monkeypatch):
    """Changes of the folder fail from the n-th on, as if the run were killed there; then, so do those of the next start."""
    monkeypatch.setattr(files, "sync", lambda path: None)  # which takes most of the time
    earlier, killed, start = tmp_path / "earlier", tmp_path / "killed", tmp_path / "start"
    first = earlier_run(earlier)

    def replace(folder):
        start_second(folder, goes_back)
        write_run_files(folder, "second")
        save(folder, 4, "second", 2 * goes_back)

    def call_until(n, function, folder):
        """Calls the function; returns whether it came to its end."""
        calls = []

        def counted(call):
            def call_or_die(*args, **kwargs):
                calls.append(1)
                if len(calls) >= n:
                    raise Killed
                return call(*args, **kwargs)

            return call_or_die

        with monkeypatch.context() as patch:
            patch.setattr(CheckpointManager, "start", CheckpointManager._write)  # in this thread
            for name in ("rename", "replace", "unlink", "rmdir", "mkdir"):
                patch.setattr(os, name, counted(getattr(os, name)))
            try:
                function(folder)
            except Killed:
                return False
        return True

    shutil.copytree(earlier, killed)
    replace(killed)
    second, outcomes = contents(killed), []
    for n in itertools.count(1):
        shutil.rmtree(killed)
        shutil.copytree(earlier, killed)
        if call_until(n, replace, killed):
            break
        for m in itertools.count(1):
            shutil.copytree(killed, start)
            recovered = call_until(m, start_second, start)
            fail_before_the_first_save(start)
            found = contents(start)
            shutil.rmtree(start)
            assert found in (first, second), (n, m)
            if recovered:
                break
        outcomes.append(found == second)
    assert outcomes == sorted(outcomes) and len(set(outcomes)) == 2  # all that it replaces, from one point on


def test_checkpoints_without_a_log_are_put_back_too(tmp_path):
    earlier_run(tmp_path)
    for name in RUN_FILES:
        (tmp_path / name).unlink()
    before = contents(tmp_path)
    fail_before_the_first_save(tmp_path)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("saves", [True, False])
def test_a_log_without_checkpoints_is_replaced_when_a_run_saves_or_finishes(tmp_path, saves):
    write_run_files(tmp_path, "first")
    with pytest.raises(ZeroDivisionError), lock_and_replace(tmp_path, "log"):
        write_run_files(tmp_path, "failed")
        raise ZeroDivisionError
    assert (tmp_path / "log.txt").read_text() == "first log.txt"
    with lock_and_replace(tmp_path, "log"):
        assert not (tmp_path / "log.txt").exists()
        write_run_files(tmp_path, "second")
        if saves:
            save(tmp_path, 2, "second")
    assert sorted(os.listdir(tmp_path)) == sorted([".lock", *["model_00002"] * saves, *RUN_FILES])
    assert (tmp_path / "log.txt").read_text() == "second log.txt"


def test_a_demo_that_saves_nothing_replaces_no_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = earlier_run(Path("log_demo"))
    with pytest.raises(UserError, match="log_demo already contains a run"):
        train_gpt2.main(["--demo", "--max-steps", "2", "--checkpoint-every", "0", "--device", "cpu"])
    assert contents(Path("log_demo")) == before and not Path("demo_data").exists()


@pytest.mark.parametrize(
    "flags, replaces_later, removed",
    [(["--keep", 1], True, True), (["--keep", 0], False, False), (["--demo"], False, True), (["--demo"], True, False)],
)
def test_replaced_checkpoints_stay_until_the_run_has_finished(tmp_path, monkeypatch, flags, replaces_later, removed):
    """With --keep 0, those of the run itself stay then, too: outside of a demo, there are no others."""
    monkeypatch.chdir(tmp_path)
    folder = Path("log_demo")
    earlier_run(folder)
    start_second(folder, goes_back=True)
    write_run_files(folder, "second")
    for step in (4, 5):
        save(folder, step, "second", 2, *flags, "--max-steps", 5, replaces_later=replaces_later)
        assert (folder / "model_00006.earlier").is_dir() == (step < 5 or not removed)
    lock_and_replace(folder, "nothing", folder / "model_00005")
    assert bool(list(folder.glob("*.earlier"))) == (not removed)
