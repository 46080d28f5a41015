"""docs/code.md: each of its changes, in a copy of the project, trains, resumes, saves and samples; the model's scores."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import ROOT, TINY_FLAGS, copy_project, losses, needs_gpt2_vocabulary, run_in_copy
from runs import differences
from safetensors.torch import load_file
from training import trained

from support.console.log import read_log

pytestmark = [pytest.mark.slow, needs_gpt2_vocabulary]  # HellaSwag is scored on GPT-2's tokens
DIFFS = re.findall(r"^```diff\n(.*?)^```", (ROOT / "docs" / "code.md").read_text(), re.M | re.S)
MODEL, LOSS, OPTIMIZER, SCHEDULE = DIFFS
FLAGS = {
    "norm": ["--norm", "rmsnorm"],
    "loss": ["--z-loss", "0.01"],
    "lion": ["--optimizer", "lion", "--checkpoint-every", "1"],
    "linear": ["--warmup-steps", "2", "--max-lr", "1e-3", "--schedule", "linear"],
}
USE = """
import json, shutil, sys
import hellaswag, sample, train_gpt2
from support.console.curves import CurvesFile

CurvesFile.draw = lambda self: None  # which takes longer than these runs
for name, flags in json.loads(sys.argv[1]).items():
    train_gpt2.main([*flags, "--out", name])
    shutil.copytree(name, f"{name}_resumed", ignore=shutil.ignore_patterns("model_00005"))
    train_gpt2.main(["--resume", "--out", f"{name}_resumed"])
    train_gpt2.main([*flags, "--dtype", "auto", "--plan"])
    sample.main(["--model", f"{name}/model_00005", "--prompt", "one", "-n", "1", "--max-new-tokens", "20"])
hellaswag.main(["-m", "norm/model_00005", "--data", "items.jsonl", "--device", "cpu"])
"""
RUN = "--total-batch-size 64 --val-tokens 64 --max-steps 5 --checkpoint-every 4".split()


@pytest.fixture(scope="module")
def tree(byte_shards, tmp_path_factory):
    """A copy of the project with all changes, a run of each, and one without them."""
    import fineweb
    from support.data.text_files import Documents

    tree = tmp_path_factory.mktemp("changed") / "tree"
    copy_project(tree)
    for diff in DIFFS:
        apply(diff, tree)
    texts = [" ".join(map(str, numbers)) for numbers in np.random.default_rng(0).integers(0, 50, (60, 60))]
    fineweb.make_shards(Documents("numbers", texts), tree / "gpt2_shards", tokenizer="gpt2")
    item = {"ctx": "one two", "endings": ["three", "four five", "six", "7"], "label": 0}
    (tree / "items.jsonl").write_text(json.dumps(item) + "\n")
    data = {name: str(tree / "gpt2_shards" if name == "norm" else byte_shards) for name in FLAGS}
    runs = {name: [*TINY_FLAGS, *RUN, "--data", data[name], *flags] for name, flags in FLAGS.items()}
    assert re.search(r"model_00005 +[01]\.0000 ± ", run_in_copy(USE, tree, json.dumps(runs)))  # HellaSwag's table
    for name in ("norm", "loss"):
        trained(tree / f"not_{name}", *RUN, "--data", data[name])
    return tree


def apply(diff: str, tree: Path) -> None:
    subprocess.run(["git", "apply", "-"], input=diff, cwd=tree, text=True, check=True)


@pytest.mark.parametrize("diff", DIFFS, ids=FLAGS)
def test_each_change_is_complete_without_the_others(tmp_path, diff):
    """No name is missing, or left over."""
    copy_project(tmp_path / "tree")
    apply(diff, tmp_path / "tree")
    subprocess.run(
        [sys.executable, "-m", "ruff", "check", "--no-cache", "--select", "F", tmp_path / "tree"], check=True
    )


@pytest.mark.parametrize("name", FLAGS)
def test_its_run_is_resumed_exactly(tree, name):
    assert not differences(tree / f"{name}_resumed", tree / name)


def test_the_model(tree):
    from transformers import AutoModelForCausalLM, GPT2LMHeadModel

    out = tree / "norm"
    weights = load_file(out / "model_00005" / "model.safetensors")
    assert not weights["transformer.h.0.ln_1.bias"].any() and weights["transformer.ln_f.bias"].any()
    for model_class in (GPT2LMHeadModel, AutoModelForCausalLM):
        with pytest.raises(KeyError, match=r"only train_gpt2.py can open: {'norm': 'rmsnorm'}"):
            model_class.from_pretrained(out / "model_00005")
    assert losses(out / "log.txt") != losses(tree / "not_norm" / "log.txt")
    assert "\nA GPT-2 with norm rmsnorm, trained from" in (out / "model_00005" / "README.md").read_text()


def test_the_loss(tree):
    with_term, without = (losses(tree / name / "log.txt")[0] for name in ("loss", "not_loss"))
    # at first, all logits are near 0, and the softmax's denominator is near the size of the vocabulary
    assert with_term - without == pytest.approx(0.01 * np.log(257) ** 2, rel=0.01)
    assert losses(tree / "loss" / "log.txt", "val")[0] == losses(tree / "not_loss" / "log.txt", "val")[0]


def test_the_optimizer(tree):
    # gains begin at 1 and are not decayed: the first step moves each by the learning rate of step 0, 3e-3 / 3
    gains = load_file(tree / "lion" / "model_00001" / "model.safetensors")["transformer.ln_f.weight"]
    torch.testing.assert_close((gains - 1).abs(), torch.full_like(gains, 1e-3), rtol=1e-3, atol=0)


def test_the_schedule(tree):
    """By hand: two steps of warm-up to 1e-3, and three from there to 1e-4 at step 5."""
    rates = read_log(tree / "linear" / "log.txt")["lr"].values()
    assert list(rates) == pytest.approx([5e-4, 1e-3, 1e-3, 7e-4, 4e-4])
