"""sample.py: text from a checkpoint, and what it says about bad input."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from helpers import run_script
from training import trained

import sample
from support.cli import UserError


@pytest.fixture(scope="module")
def run(byte_shards, tmp_path_factory) -> Path:
    """The folder of a run with one checkpoint, model_00003."""
    out = tmp_path_factory.mktemp("sample") / "log"
    trained(out, "--data", byte_shards, "--max-steps", 3, "--val-every", 0)
    return out


def texts_of(run: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> list[str]:
    sample.main(["--model", str(run / "model_00003"), "--prompt", "The ", "-n", "2", "-d", "cpu", *flags])
    return capsys.readouterr().out.split("\n---\n")


def test_texts_continue_the_prompt_and_depend_on_the_seed(run, capsys):
    texts = texts_of(run, capsys)
    assert [text[:4] for text in texts] == ["The ", "The "] and texts[0] != texts[1]
    assert texts_of(run, capsys) == texts != texts_of(run, capsys, "--seed", "2")


def test_any_number_of_texts_takes_the_memory_of_a_few(run, capsys, monkeypatch):
    monkeypatch.setattr(sample, "MAX_BATCH", 2)
    texts = texts_of(run, capsys, "-n", "5")
    assert len(texts) == len(set(texts)) == 5 and {text[:4] for text in texts} == {"The "}
    assert "\n---\n".join(texts[:2]) + "\n" == "\n---\n".join(texts_of(run, capsys)) and texts[4].endswith("\n")


def test_temperature_0_takes_the_likeliest_token(run, capsys):
    texts = texts_of(run, capsys, "--temperature", "0")
    assert texts == texts_of(run, capsys, "--top-k", "1", "--seed", "2")


@pytest.mark.slow
def test_sample_runs_as_a_script(run):
    flags = ["--model", "log/model_00003", "--prompt", "The ", "-n", 2, "-d", "cpu"]
    done = run_script("sample.py", *flags, cwd=run.parent)
    assert done.returncode == 0, done.stderr
    assert [text[:4] for text in done.stdout.split("\n---\n")] == ["The ", "The "]
    failed = run_script("sample.py", "--model", "log", cwd=run.parent)
    assert failed.returncode == 2 and failed.stderr.count("\n") == 1
    assert failed.stderr.startswith("error: log is not a checkpoint")


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--model", "log"], r"log is not a checkpoint: it has no config.json. Did you mean log/model_00003\?"),
        (["--model", "nowhere"], "no model 'nowhere'"),
        (
            ["--model", "log/model_00003", "--prompt", "x" * 17],
            "the prompt has 17 tokens, and the context of log/model_00003 is 16. Shorten it.",
        ),
        (["--model", "log/model_00003", "-n", "0"], "-n must be 1 or more"),
        (["--model", "log/model_00003", "--temperature", "nan"], "--temperature must be 0 or more"),
    ],
)
def test_bad_input_is_named(run, monkeypatch, flags, message):
    monkeypatch.chdir(run.parent)
    with pytest.raises(UserError) as error:
        sample.main(flags)
    [problem] = error.value.problems
    assert re.match(message, problem), problem
