"""run.json: what it says about a run, and what survives resumes, kills and damage."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import replace
from datetime import UTC, datetime

import pytest
import torch
from safetensors.torch import load_file
from training import ONE_PROCESS, TINY, configure, resumed, run_info, trained

import train_gpt2
from benchmarks.bench_chaos import metrics_without_time
from support.checkpoints.directory import newest_checkpoint
from support.console import record
from support.console.record import latest, read_record
from train_gpt2 import GPT

FLAGS = ["--max-steps", 6, "--checkpoint-every", 2]


def read(out):
    return json.loads((out / "run.json").read_text())


def test_it_is_there_before_the_first_step_and_says_what_is_trained(byte_shards, tmp_path, monkeypatch):
    seen, train_step = [], train_gpt2.train_step

    def step(*args):
        seen.append(read(tmp_path / "run"))
        return train_step(*args)

    monkeypatch.setattr(train_gpt2, "train_step", step)
    trained(tmp_path / "run", "--data", byte_shards, *FLAGS)
    run = seen[0]
    assert run == read(tmp_path / "run") and run["step"] == 0 and run["resumes"] == []
    assert abs((datetime.now(UTC) - datetime.fromisoformat(run["started"])).total_seconds()) < 60

    weights = load_file(newest_checkpoint(tmp_path / "run") / "model.safetensors")
    padding = (320 - 257) * 32  # rows that files do not have
    assert run["parameters"] == sum(w.numel() for w in weights.values()) + padding
    manifest = json.loads((byte_shards / "manifest.json").read_text())
    for split in ("train", "val"):
        shards = [s for s in manifest["shards"] if s["split"] == split]
        assert run["data"][split] == [[s["file"], s["tokens"], s["sha256"]] for s in shards] and shards
    assert run["data"]["source"] == manifest["source"] == "sums"
    assert run["bytes_per_token"] == 1
    assert run["tokenizer"] == {"name": "bytes", "vocab_size": 257} and run["tokens_per_step"] == 256
    assert (run["device"], run["processes"], run["flags"]["dtype"]) == ("cpu", 1, "fp32")
    assert run["flags"]["max_lr"] == 3e-3 and run["flags"]["n_layer"] == 2 and run["flags"]["decay_steps"] == 6
    assert run["versions"]["torch"] == torch.__version__ and "gpus" not in run["flags"]


def test_a_model_has_its_name_or_sizes_of_its_own(tmp_path):
    GPT(TINY).save_pretrained(tmp_path / "own")
    (tmp_path / "a.txt").write_text("a text")
    named = {(): "gpt2", ("--model", "gpt2-medium", "--block-size", "256"): "gpt2-medium"}
    sized = [("--demo",), ("--text", tmp_path / "a.txt"), ("--init-from", tmp_path / "own"), ("--n-layer", "4")]
    for flags in (*named, *sized, ("--model", "gpt2-medium", "--n-layer", "4")):
        run = replace(run_info(), config=configure(flags)[0])
        found = record.describe_run(run, ONE_PROCESS)["flags"]
        assert found.get("model") == named.get(flags) and found["n_layer"] == run.config.n_layer


def test_each_resume_adds_what_has_changed(byte_shards, tmp_path, monkeypatch):
    out = tmp_path / "run"
    trained(out, "--data", byte_shards, *FLAGS)
    first = read(out)
    resumed(out, "--max-steps", 8, "--keep", 2)
    monkeypatch.setattr(record.platform, "python_version", lambda: "9.9")
    resumed(out, "--max-steps", 8, "--dtype", "bf16")
    resumed(out)
    run = read(out)
    assert {**run, "resumes": []} == first
    one, two, three = run["resumes"]
    assert (one["step"], two["step"], three["step"]) == (6, 8, 8)
    assert one["flags"] == {"max_steps": 8, "keep": 2}
    assert two["flags"] == {"dtype": "bf16"} and two["versions"] == {**first["versions"], "python": "9.9"}
    assert not {"versions", "device", "processes"} & (one.keys() | three.keys())
    assert latest(run)["flags"]["max_steps"] == 8 and latest(run)["flags"]["keep"] == 2


@pytest.mark.parametrize("damage", [None, "[]", '{"flags": {}}', "[" * 100_000])
def test_a_missing_or_damaged_record_is_written_anew(byte_shards, tmp_path, damage):
    out = tmp_path / "run"
    trained(out, "--data", byte_shards, "--max-steps", 2)
    (out / "run.json").unlink()
    if damage is not None:
        (out / "run.json").write_text(damage)
    assert read_record(out / "run.json") is None
    resumed(out, "--max-steps", 3)
    resumed(out, "--max-steps", 4)
    run = read_record(out / "run.json")
    assert (run["step"], run["flags"]["max_steps"], run["parameters"]) == (2, 3, 36224)
    assert [(r["step"], r["flags"]) for r in run["resumes"]] == [(3, {"max_steps": 4})]


def test_a_run_of_an_earlier_version_gets_its_files_when_it_is_resumed(byte_shards, tmp_path, capsys):
    flags = ["--data", byte_shards, "--max-steps", 4, "--checkpoint-every", 2]
    trained(tmp_path / "straight", *flags)
    out = shutil.copytree(tmp_path / "straight", tmp_path / "old")
    shutil.rmtree(out / "model_00004")
    for name in ("run.json", "metrics.jsonl"):
        (out / name).unlink()
    resumed(out)
    assert (out / "log.txt").read_bytes() == (tmp_path / "straight" / "log.txt").read_bytes()
    assert metrics_without_time(out) == metrics_without_time(tmp_path / "straight")[2:]
    assert not capsys.readouterr().err


def test_the_commit_is_that_of_git_in_this_folder_alone(tmp_path, monkeypatch):
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "x"]):
        subprocess.run([*git, *command], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    (tmp_path / "unpacked").mkdir()  # as a download without .git inside a repository
    for folder, versions in ((tmp_path, {"commit": head}), (tmp_path / "unpacked", {})):
        monkeypatch.setattr(record, "ROOT", folder)
        found = record.describe_run(run_info(), ONE_PROCESS)["versions"]
        assert (
            found
            == {name: found[name] for name in ("train_gpt2.py", "python", "torch", "numpy", "platform")} | versions
        )
