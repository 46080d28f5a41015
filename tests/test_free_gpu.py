"""docs/free_gpu.ipynb on a CPU, cell by cell: a session that dies, and another one that goes on in the same folder."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import nbformat
import psutil
import pytest
from helpers import ROOT, losses, needs_gpt2_vocabulary, wait_for
from hub_server import Hub, environment_of, parquet

from support import __version__
from support.checkpoints.directory import find_corruption
from support.checkpoints.history import read_starts

README = b"""---
configs:
- {config_name: sample-10BT, data_files: [{split: train, path: sample/10BT/*}]}
---
"""
NOTEBOOK = ROOT / "docs" / "free_gpu.ipynb"


def code_cells(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def printed(notebook: nbformat.NotebookNode) -> str:
    return "".join(output.get("text", "") for cell in code_cells(notebook) for output in cell.outputs)


def test_the_notebook_is_saved_with_the_outputs_of_this_version():
    """If it fails, make them again: `python tests/test_free_gpu.py FOLDER` runs it in an empty folder."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    assert f"train_gpt2.py {__version__}, " in printed(notebook)
    assert [cell.execution_count for cell in code_cells(notebook)] == list(range(1, len(code_cells(notebook)) + 1))
    assert not any(output.output_type == "error" for cell in code_cells(notebook) for output in cell.outputs)


def prepare(folder: Path) -> tuple[Hub, dict[str, str]]:
    """A clone of this tree to clone from, a hub whose FineWeb-Edu are this tree's texts, and a session's variables."""
    origin = folder / "origin"
    ignored = shutil.ignore_patterns(".*", "__pycache__", "*.png", "*.svg", "play.ipynb", "tests", "benchmarks")
    shutil.copytree(ROOT, origin, ignore=ignored)
    git = ["git", "-C", str(origin), "-c", "user.name=x", "-c", "user.email=x@x"]
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "all"]):
        subprocess.run([*git, *command], check=True)
    texts = [
        path.read_text(encoding="utf-8") for path in sorted(ROOT.rglob("*.py")) if "site-packages" not in path.parts
    ]
    hub = Hub({"HuggingFaceFW/fineweb-edu": {"README.md": README, "sample/10BT/000_00000.parquet": parquet(texts)}})
    environment = environment_of(hub, folder / "cache") | {
        "HOME": str(folder), "REPOSITORY": str(origin), "OMP_NUM_THREADS": "1",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }  # fmt: skip
    return hub, environment


def run_session(folder: Path) -> nbformat.NotebookNode:
    """Runs all cells in a new kernel, in an empty folder; returns the notebook with its outputs."""
    from nbclient import NotebookClient

    notebook = nbformat.read(NOTEBOOK, as_version=4)
    folder.mkdir()
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(folder)}}).execute()
    return notebook


def kill_kernels() -> None:
    """Kills the kernels that this process has started, and all that they have, without a warning."""
    for kernel in psutil.Process().children():
        if "ipykernel" in " ".join(kernel.cmdline()):
            for process in [*kernel.children(recursive=True), kernel]:
                process.kill()


@pytest.mark.slow
@needs_gpt2_vocabulary
def test_a_session_that_dies_is_continued_by_another(tmp_path, monkeypatch):
    hub, environment = prepare(tmp_path)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    out, died = tmp_path / "gpt2", []

    def first_session():
        try:
            run_session(tmp_path / "session1")
        except Exception as error:
            died.append(type(error).__name__)

    thread = threading.Thread(target=first_session)
    thread.start()
    try:
        assert wait_for(lambda: (out / "model_00020").is_dir() and len(losses(out / "log.txt")) > 22, 200)
        kill_kernels()
        thread.join()
        assert died == ["DeadKernelError"]
        shutil.rmtree(tmp_path / "gpt2_code")  # with its shards
        second = run_session(tmp_path / "session2")
    finally:
        kill_kernels()
        hub.close()
    first, second_start = read_starts(out)
    assert 20 <= second_start["first_step"] < 60 and first["first_step"] == 0
    assert len(losses(out / "log.txt")) == 60 and find_corruption(out / "model_00060") is None
    assert "The model" in printed(second) and "model.tar.gz" in printed(second)
    images = [output for cell in code_cells(second) for output in cell.outputs if "image/png" in output.get("data", {})]
    assert len(images) == 1
    with subprocess.Popen(
        ["tar", "-tzf", tmp_path / "gpt2_code/model.tar.gz"], stdout=subprocess.PIPE, text=True
    ) as tar:
        packed = set(tar.stdout.read().split())
    assert {"model_00060/model.safetensors", "model_00060/config.json", "model_00060/tokenizer.json"} <= packed


if __name__ == "__main__":
    work = Path(sys.argv[1])
    server, variables = prepare(work)
    os.environ.update(variables)
    executed = run_session(work / "session")
    for cell in code_cells(executed):
        for output in cell.outputs:
            if "text" in output:  # as a terminal shows it: what follows the last carriage return of a line
                output.text = re.sub(r"[^\n]*\r(?!\n)|tokenising: .*?tokens/s\]", "", output.text.replace("\r\n", "\n"))
    text = re.sub(r"(\\u001b\[K)", "", nbformat.writes(executed)).replace(str(work), "/home/you")
    NOTEBOOK.write_text(text + "\n", encoding="utf-8")
    server.close()
