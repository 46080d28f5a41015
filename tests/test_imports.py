"""The layers of the project: who may import whom, and what an import costs."""

from __future__ import annotations

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from helpers import ROOT

SUPPORT = sorted((ROOT / "support").rglob("*.py"))
SCRIPTS = [ROOT / name for name in ("train_gpt2.py", "fineweb.py", "hellaswag.py", "sample.py", "compare.py")]
# What a module of support may import besides its own package: what has a lower level.
LEVELS = {"console": 6, "checkpoints": 5, "sizing": 4, "runtime": 3, "data": 2, "optim": 2}
LEVELS |= {"files": 1, "terminal": 1, "config": 1, "torch_private": 0, "gpus": 0, "cli": 0, "startup": -1}


def module_name(path: Path) -> str:
    """`support.data.hub` for support/data/hub.py, and `support.data` for its `__init__.py`."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


TREES = {module_name(path): ast.parse(path.read_text(encoding="utf-8")) for path in (*SUPPORT, *SCRIPTS)}


PACKAGES = {module_name(path) for path in SUPPORT if path.name == "__init__.py"}


def imports_of(name: str) -> set[str]:
    """The modules of this project that one of them imports, anywhere in its file; for types, too."""
    return imports_in(TREES[name])


def imports_in(tree: ast.AST) -> set[str]:
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, "imports are absolute"
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found & TREES.keys() - PACKAGES


def test_imports_only_go_down():
    # a model that Hugging Face's GPT-2 does not know is scored by ours: hellaswag.py imports the trainer only then
    graph = {name: imports_of(name) - ({"train_gpt2"} if name == "hellaswag" else set()) for name in TREES}
    TopologicalSorter(graph).prepare()  # raises if there are circles
    for name in TREES:
        importable = {"train_gpt2": {"hellaswag"}, "sample": {"train_gpt2"}}.get(name, set())
        for other in graph[name]:
            if other.startswith("support."):
                layer = name.split(".")[1] if name.startswith("support.") else None
                below = other.split(".")[1]
                assert layer in (None, below) or LEVELS[below] < LEVELS[layer], f"{name} imports {other}"
            else:
                assert other in importable, f"{name} imports {other}"


def imported_before_torch(script: str) -> set[str]:
    """The modules of this project that a script imports before it imports torch, which takes seconds."""
    body = TREES[script].body
    torch = next(i for i, node in enumerate(body) if isinstance(node, ast.Import) and node.names[0].name == "torch")
    return imports_in(ast.Module(body[:torch], type_ignores=[]))


DATA = [name for name in TREES if name.startswith("support.data.")]
HEAVY = (
    "transformers datasets tiktoken requests pyarrow huggingface_hub matplotlib peft tensorboard wandb tokenizers gigatoken"
).split()


@pytest.mark.parametrize(
    "modules, heavy",
    [
        pytest.param(  # which take longer than --help may
            "train_gpt2, hellaswag, sample", ["torch._dynamo", "torch._inductor"], marks=pytest.mark.slow
        ),
        (", ".join(["fineweb", *DATA]), ["torch"]),  # so that fineweb.py starts at once
        ("compare", ["torch"]),
        ("support.config", ["torch"]),
        (", ".join(sorted(imported_before_torch("train_gpt2"))), ["torch"]),  # so that --help and a mistake need none
    ],
)
def test_an_import_does_nothing_and_loads_nothing_heavy(modules, heavy, tmp_path):
    code = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
import {modules}
print([name for name in {[*HEAVY, *heavy]!r} if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("[]\n", "") and not list(tmp_path.iterdir())
