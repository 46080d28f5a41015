"""docs/change-it.md: each of its changes, in a copy of the project, trains, resumes, saves, samples and scores."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from helpers import ROOT, TINY_FLAGS, copy_project, losses, needs_gpt2_vocabulary
from runs import differences
from safetensors.torch import load_file
from training import trained

from support.console.log import read_log

pytestmark = [pytest.mark.slow, needs_gpt2_vocabulary]  # HellaSwag is scored on GPT-2's tokens
DIFFS = re.findall(r"^```diff\n(.*?)^```", (ROOT / "docs" / "change-it.md").read_text(), re.M | re.S)
MODEL, LOSS, OPTIMIZER, SCHEDULE = DIFFS
USE = """
import shutil, sys
import hellaswag, sample, train_gpt2

flags = sys.argv[1:]
train_gpt2.main([*flags, "--out", "whole"])
shutil.copytree("whole", "resumed")
shutil.rmtree("resumed/model_00005")
train_gpt2.main(["--resume", "--out", "resumed"])
train_gpt2.main([*flags, "--dtype", "auto", "--plan"])
sample.main(["--model", "whole/model_00005", "--prompt", "one", "-n", "1", "--max-new-tokens", "20"])
hellaswag.main(["-m", "whole/model_00005", "--data", "items.jsonl", "--device", "cpu"])
"""
RUN = ["--max-steps", "5", "--checkpoint-every", "1", "--data", "shards"]


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """Shards of GPT-2's tokens, few of which occur."""
    import fineweb
    from support.data.text_files import Documents

    folder = tmp_path_factory.mktemp("gpt2") / "shards"
    texts = [" ".join(map(str, numbers)) for numbers in np.random.default_rng(0).integers(0, 50, (60, 60))]
    fineweb.make_shards(Documents("numbers", texts), folder, tokenizer="gpt2")
    return folder


def use(diff: str, shards, tmp_path, *flags: str):
    """Applies a diff to a copy of the project, and uses the result; returns the run's folder and what was printed."""
    tree = tmp_path / "tree"
    copy_project(tree)
    subprocess.run(["git", "apply", "-"], input=diff, cwd=tree, text=True, check=True)
    shutil.copytree(shards, tree / "shards")
    item = {"ctx": "one two", "endings": ["three", "four five", "six", "7"], "label": 0}
    (tree / "items.jsonl").write_text(json.dumps(item) + "\n")
    command = [sys.executable, "-c", USE, *TINY_FLAGS, *RUN, *flags]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(tree)}
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not differences(tree / "resumed", tree / "whole")
    assert re.search(r"model_00005 +[01]\.0000 ± ", done.stdout)  # HellaSwag's table
    return tree / "whole"


def test_the_model(shards, tmp_path):
    from transformers import AutoModelForCausalLM, GPT2LMHeadModel

    out = use(MODEL, shards, tmp_path, "--norm", "rmsnorm")
    weights = load_file(out / "model_00005" / "model.safetensors")
    assert not weights["transformer.h.0.ln_1.bias"].any() and weights["transformer.ln_f.bias"].any()
    for model_class in (GPT2LMHeadModel, AutoModelForCausalLM):
        with pytest.raises(KeyError, match=r"only train_gpt2.py can open: {'norm': 'rmsnorm'}"):
            model_class.from_pretrained(out / "model_00005")
    trained(tmp_path / "gpt2", *RUN[:-1], shards)
    assert losses(out / "log.txt") != losses(tmp_path / "gpt2" / "log.txt")
    assert "\nA GPT-2 with norm rmsnorm, trained from" in (out / "model_00005" / "README.md").read_text()


def test_the_loss(shards, tmp_path):
    out = use(LOSS, shards, tmp_path, "--z-loss", "0.01")
    trained(tmp_path / "without", *RUN[:-1], shards)
    with_term, without = (losses(run / "log.txt")[0] for run in (out, tmp_path / "without"))
    # at first, all logits are near 0, and the softmax's denominator is near the size of the vocabulary
    assert with_term - without == pytest.approx(0.01 * np.log(50257) ** 2, rel=0.01)
    assert losses(out / "log.txt", "val")[0] == losses(tmp_path / "without" / "log.txt", "val")[0]


def test_the_optimizer(shards, tmp_path):
    out = use(OPTIMIZER, shards, tmp_path, "--optimizer", "lion")
    # gains begin at 1 and are not decayed: the first step moves each by the learning rate of step 0, 3e-3 / 3
    gains = load_file(out / "model_00001" / "model.safetensors")["transformer.ln_f.weight"]
    torch.testing.assert_close((gains - 1).abs(), torch.full_like(gains, 1e-3), rtol=1e-3, atol=0)


def test_the_schedule(shards, tmp_path):
    """By hand: two steps of warm-up to 1e-3, and three from there to 1e-4 at step 5."""
    flags = ["--warmup-steps", "2", "--max-lr", "1e-3"]
    out = use(SCHEDULE, shards, tmp_path, *flags, "--schedule", "linear")
    assert list(read_log(out / "log.txt")["lr"].values()) == pytest.approx([5e-4, 1e-3, 1e-3, 7e-4, 4e-4])
