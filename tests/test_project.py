"""What a newcomer meets: the demo, the notebook, the requirements, and a trainer that can be read."""

from __future__ import annotations

import email
import html
import re
import shlex
import shutil
from types import SimpleNamespace

import nbformat
import numpy as np
import pytest
import torch
from helpers import ROOT, Rank, losses, run_to_the_end

import sample
import train_gpt2
from support import __version__
from support.cli import UserError

DEMO = "--demo --device cpu".split()


def email_package() -> dict[str, str]:
    return {"stdlib": email.__path__[0]}


LITTLE_TEXT = {
    "support.data.demo_text.PACKAGES": ("peft",),
    "support.data.demo_text.sysconfig": SimpleNamespace(get_paths=email_package),
}
IN_THIS_PROCESS = """
import contextlib, io
from types import SimpleNamespace

def run(command, cwd, **_):
    with contextlib.chdir(cwd), contextlib.redirect_stdout(io.StringIO()):
        train_gpt2.main(command[2:])
    return SimpleNamespace(returncode=0)

subprocess = SimpleNamespace(run=run)
"""


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """The folder and the output of a short demo."""
    folder = tmp_path_factory.mktemp("demo")
    flags = [*DEMO, *"--n-layer 2 --n-head 2 --n-embd 64 --max-steps 15 --val-every 15 --val-tokens 1024".split()]
    run_to_the_end(*flags, cwd=folder, defaults=(), rank=Rank(replaced=LITTLE_TEXT))
    return folder, (folder / "0.txt").read_text()


@pytest.mark.slow
def test_the_demo_ends_with_a_score_a_text_and_a_checkpoint(demo, monkeypatch, capsys):
    folder, output = demo
    assert re.search(r"\nbest    validation loss \d\.\d{4} nats per token, \d\.\d{4} per byte, at step 15\n", output)
    assert "\nsample  The" in output and "\nsaved   log_demo/model_00015\n" in output
    assert (folder / "log_demo" / "model_00015" / "model.safetensors").is_file()
    val = losses(folder / "log_demo" / "log.txt", "val")
    assert val[0] == pytest.approx(np.log(4096), abs=0.1) and val[-1] < 7.5
    [command] = re.findall(r"\nnext    python sample.py (.*)", output)
    monkeypatch.chdir(folder)
    sample.main([*shlex.split(command), "-d", "cpu"])
    assert capsys.readouterr().out.startswith("The")


@pytest.mark.slow
def test_a_second_demo_has_a_folder_of_its_own(demo, monkeypatch):
    folder, _ = demo

    def contents():
        return {path: path.read_bytes() for name in ("log_demo", "demo_data") for path in (folder / name).rglob("*.*")}

    before = contents()
    run_to_the_end(*DEMO, "--max-steps", 2, "--val-every", 0, cwd=folder, defaults=())
    names = ".gpt2.lock log.txt model_00001 model_00002 starts.jsonl".split()  # model_00001: before the cooldown
    assert sorted(p.name for p in (folder / "log_demo_2").iterdir()) == names
    assert contents() == before
    monkeypatch.chdir(folder)
    with pytest.raises(UserError, match="--total-batch-size 3"):
        train_gpt2.main([*DEMO, "--total-batch-size", "3"])
    assert not (folder / "log_demo_3").exists()  # a failed start leaves nothing
    shutil.rmtree(folder / "log_demo_2")


def notebook_and_code() -> tuple[nbformat.NotebookNode, dict[str, nbformat.NotebookNode]]:
    """The notebook, and its code cells by their ids."""
    notebook = nbformat.read(ROOT / "play.ipynb", as_version=4)
    return notebook, {cell.id: cell for cell in notebook.cells if cell.cell_type == "code"}


def printed(cell: nbformat.NotebookNode) -> str:
    return "".join(output.get("text", "") for output in cell.outputs)


def test_the_notebook_is_saved_with_the_outputs_of_this_version():
    """If it fails, make them again.

    python train_gpt2.py --demo --max-steps 1200
    HF_HUB_OFFLINE=1 jupyter execute --inplace play.ipynb
    """
    _, code = notebook_and_code()
    assert printed(code["cell-01"]).startswith(f"version {__version__}, ")
    assert [cell.execution_count for cell in code.values()] == list(range(1, len(code) + 1))
    assert not any(output.output_type == "error" for cell in code.values() for output in cell.outputs)
    assert (ROOT / "play.ipynb").stat().st_size < 500_000


@pytest.mark.slow
def test_the_notebook_runs_and_shows_what_is_saved(demo, monkeypatch):
    from nbclient import NotebookClient
    from transformers import AutoTokenizer, GPT2LMHeadModel

    folder, _ = demo
    notebook, code = notebook_and_code()

    def kinds() -> list[set[str]]:
        return [{kind for output in cell.outputs for kind in output.get("data", ["text"])} for cell in code.values()]

    def outputs_for_any_run() -> list[str]:
        flags_that_differ, _, _ = printed(code["cell-34"]).partition("\n\n")
        return [*(printed(code[name]) for name in ("cell-27", "cell-28", "cell-30")), flags_that_differ]

    saved = kinds(), outputs_for_any_run()
    monkeypatch.setenv("RUN", str(folder / "log_demo"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    # its two demos take the shards of this one, and three steps of a small model
    small = f"--data {folder}/demo_data --n-embd 64 --val-tokens 128 --demo "
    source = code["cell-34"].source.replace("--demo ", small).replace("{min(run.steps, 300)}", "3")
    assert small in source and "--max-steps 3" in source
    code["cell-34"].source = IN_THIS_PROCESS + source
    # Its cells compare attention, the last row of the lens and the loss of each token with the model's own.
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(folder)}}).execute()
    assert (kinds(), outputs_for_any_run()) == saved
    text = "".join(map(printed, code.values()))
    assert "the same: True" in text and "4 micro-batches, divided    : 1.0000" in text
    assert "4 micro-batches, not divided: 4.0000" in text and "the hub cannot be reached" in text.lower()
    flags_that_differ = [line.split() for line in outputs_for_any_run()[-1].splitlines()]
    assert flags_that_differ == [
        ["flag", "muon", "adamw"],
        ["--adamw-lr", "0.0018", "-"],
        ["--optimizer", "muon", "adamw"],
    ]
    [page] = [output.data["text/html"] for output in code["cell-25"].outputs if "data" in output]
    spans = re.findall(r'title="([\d.]+) nats, [^>]*>([^<]*)<', page)
    [_, model_dir] = sorted((folder / "log_demo").glob("model_*"))  # before the cooldown, and the last
    ids = AutoTokenizer.from_pretrained(model_dir)("<|endoftext|>" + html.unescape("".join(text for _, text in spans)))
    ids = torch.tensor([ids["input_ids"]])
    with torch.no_grad():
        loss = GPT2LMHeadModel.from_pretrained(model_dir)(ids, labels=ids).loss.item()
    assert len(spans) == ids.size(1) - 1
    assert np.mean([float(nats) for nats, _ in spans]) == pytest.approx(loss, abs=0.005)
    assert float(re.findall(r"([\d.]+) per token, ", text)[0]) == pytest.approx(loss, abs=1e-3)


def test_requirements_are_pinned():
    for path in (ROOT / "requirements.txt", ROOT / "tests" / "requirements.txt"):
        lines = [line.split("#")[0].strip() for line in path.read_text().splitlines()]
        assert all(re.fullmatch(r"[\w-]+==[\w.]+", line) for line in lines if line and line != "-r ../requirements.txt")
