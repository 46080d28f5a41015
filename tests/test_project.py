"""What a newcomer meets: the README's commands, the notebook, the demo."""

import re

import nbformat
import numpy as np
import pytest
from conftest import ROOT, losses, run_script

import train_gpt2
from support.cli import flag_name


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """The demo, made short."""
    folder = tmp_path_factory.mktemp("demo")
    done = run_script("train_gpt2.py", "--demo", "--max-steps", 60, "--val-every", 30, "--device", "cpu", cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder, done


def test_the_demo_ends_with_a_score_a_text_and_a_checkpoint(demo):
    folder, done = demo
    assert re.search(
        r"validation loss \d\.\d{4} nats per token\ncheckpoint in log_demo/model_00060; more text: python", done.stdout
    )
    assert "\nThe " in done.stdout and (folder / "log_demo" / "model_00060" / "model.safetensors").is_file()
    val = losses(folder / "log_demo" / "log.txt", "val")
    assert val[0] == pytest.approx(np.log(257), abs=0.1) and val[-1] < 3.5
    sample = run_script(
        "sample.py", "--model", "log_demo/model_00060", "--prompt", "The ", "-n", 2, "-d", "cpu", cwd=folder
    )
    assert sample.returncode == 0, sample.stderr
    assert [text[:4] for text in sample.stdout.split("\n---\n")] == ["The ", "The "]
    again = run_script(
        "sample.py", "--model", "log_demo/model_00060", "--prompt", "The ", "-n", 2, "-d", "cpu", cwd=folder
    )
    other = run_script(
        "sample.py",
        "--model",
        "log_demo/model_00060",
        "--prompt",
        "The ",
        "-n",
        2,
        "-d",
        "cpu",
        "--seed",
        2,
        cwd=folder,
    )
    assert again.stdout == sample.stdout != other.stdout


def test_the_demo_again_replaces_its_own_run_alone(demo):
    folder, _ = demo
    (folder / "log_demo" / "notes.txt").write_text("mine")
    shards = {p: p.stat().st_mtime_ns for p in (folder / "demo_data").iterdir()}
    done = run_script("train_gpt2.py", "--demo", "--max-steps", 2, "--val-every", 0, "--device", "cpu", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert sorted(p.name for p in (folder / "log_demo").iterdir()) == [
        ".lock",
        "log.earlier.txt",
        "log.txt",
        "model_00002",
        "notes.txt",
    ]
    assert shards == {p: p.stat().st_mtime_ns for p in (folder / "demo_data").iterdir()}
    bad = run_script("train_gpt2.py", "--demo", "--batch-size", 3, "--device", "cpu", cwd=folder)
    assert bad.returncode == 2 and (folder / "log_demo" / "model_00002").is_dir()  # a failed start costs nothing


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--model", "log_demo"], r"log_demo is not a checkpoint: .* Did you mean log_demo/model_\d+\?"),
        (["--model", "nowhere"], "no model 'nowhere'"),
        (
            ["--model", "log_demo/model_{step}", "--prompt", "x" * 65],
            "the prompt has 65 tokens, and the context of .* is 64",
        ),
        (["--model", "log_demo/model_{step}", "-n", "0"], "-n must be 1 or more"),
        (["--model", "log_demo/model_{step}", "--temperature", "nan"], "--temperature must be 0 or more"),
    ],
)
def test_bad_input_to_sample(demo, flags, message):
    folder, _ = demo
    step = max(p.name.removeprefix("model_") for p in (folder / "log_demo").glob("model_*"))
    done = run_script("sample.py", *(f.format(step=step) for f in flags), cwd=folder)
    assert done.returncode == 2 and re.match(f"error: {message}", done.stderr), done.stderr


def test_the_notebook_runs_and_is_saved_with_its_outputs(demo, monkeypatch):
    from nbclient import NotebookClient

    folder, _ = demo
    notebook = nbformat.read(ROOT / "play.ipynb", as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.outputs for cell in code if "print(" in cell.source or "plt" in cell.source)
    monkeypatch.setenv("RUN", str(folder / "log_demo"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(folder)}}).execute()
    printed = "".join(output.get("text", "") for cell in code for output in cell.outputs)
    assert "the same: True" in printed and "4 parts, divided    : 1.0000" in printed
    assert "4 parts, not divided: 4.0000" in printed and "the hub cannot be reached" in printed.lower()
    assert sum("image/png" in output.get("data", {}) for cell in code for output in cell.outputs) == 2


def test_the_readme_is_true():
    readme = (ROOT / "README.md").read_text()
    [test_command] = re.findall(r"^(pip install -r tests/requirements\.txt && python -m pytest)\s+#", readme, re.M)
    assert test_command in (ROOT / ".ci" / "run").read_text().replace("-q ", "")
    known = {flag_name(name) for name in train_gpt2.TrainConfig.__dataclass_fields__}
    known |= {"--no-compile", "--no-tf32", "--no-bias", "--help"}
    for script in [*ROOT.glob("*.py"), *(ROOT / "benchmarks").glob("*.py")]:
        known |= set(re.findall(r"""add(?:_argument)?\(\s*(?:"-\w", )?"(--[a-z-]+)""", script.read_text()))
    known |= {"--nnodes", "--nproc_per_node", "--standalone", "--rdzv-backend", "--rdzv-endpoint", "--max-restarts"}
    known |= {"--logdir"}  # TensorBoard's
    assert set(re.findall(r"--[a-z][a-z0-9_-]+", readme)) <= known
    for file in re.findall(r"^\| `([\w./]+)`", readme, re.M):
        if "." in file or file.endswith("/"):
            assert (ROOT / file).exists(), file


def test_requirements_are_pinned():
    for path in (ROOT / "requirements.txt", ROOT / "tests" / "requirements.txt"):
        lines = [line.split("#")[0].strip() for line in path.read_text().splitlines()]
        assert all(re.fullmatch(r"[\w-]+==[\w.]+", line) for line in lines if line)
