"""The layers of the project: who may import whom, and what an import costs."""

from __future__ import annotations

import ast
import copy
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from helpers import ROOT

SUPPORT = sorted((ROOT / "support").rglob("*.py"))
SCRIPTS = [ROOT / name for name in ("train_gpt2.py", "fineweb.py", "hellaswag.py", "sample.py", "compare.py")]
# What a module of support may import besides its own package: what has a lower level.
LEVELS = {"checkpoints": 5, "console": 4, "runtime": 3, "data": 2, "optim": 2, "files": 1, "cli": 0, "startup": -1}


def module_name(path: Path) -> str:
    """`support.data.hub` for support/data/hub.py, and `support.data` for its `__init__.py`."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


TREES = {module_name(path): ast.parse(path.read_text(encoding="utf-8")) for path in (*SUPPORT, *SCRIPTS)}


def imports_in(tree: ast.AST) -> Iterator[str]:
    """The modules that import statements name, wherever they are; for `from a import b` these are a and a.b."""
    for node in ast.walk(without_types(tree)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, "imports are absolute"
            yield from (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))


class WithoutTypes(ast.NodeTransformer):
    """Leaves out what only mypy imports: types may come from above."""

    def visit_If(self, node: ast.If) -> ast.AST | None:
        return None if ast.unparse(node.test) == "TYPE_CHECKING" else node


def without_types(tree: ast.AST) -> ast.AST:
    return WithoutTypes().visit(copy.deepcopy(tree))


def modules_imported_by(name: str) -> set[str]:
    """The modules of this project that one of them imports, anywhere in its file."""
    return {module for module in imports_in(TREES[name]) if module in TREES and module not in PACKAGES}


PACKAGES = {module_name(path) for path in SUPPORT if path.name == "__init__.py"}


def test_imports_in_support_only_go_down():
    def level(name: str) -> tuple[str, int]:
        layer = name.split(".")[1]
        return layer, LEVELS[layer]

    modules = [name for name in TREES if name.startswith("support.") and name not in PACKAGES]
    assert {name.split(".")[1] for name in modules} == LEVELS.keys()
    for name in modules:
        own_layer, own_level = level(name)
        for other in modules_imported_by(name):
            layer, below = level(other)
            assert layer == own_layer or below < own_level, f"{name} imports {other}"
    for name in PACKAGES:
        assert not list(imports_in(TREES[name])), f"{name} imports something"


def test_no_circles():
    TopologicalSorter({name: modules_imported_by(name) for name in TREES}).prepare()


def test_nothing_but_sample_imports_the_trainer():
    importers = [name for name, tree in TREES.items() if "train_gpt2" in imports_in(tree)]
    assert importers == ["sample"]
    assert not any(script in imports_in(TREES[name]) for name in TREES for script in ("fineweb", "sample"))
    assert [name for name, tree in TREES.items() if "hellaswag" in imports_in(tree)] == ["train_gpt2"]


DATA = [name for name in TREES if name.startswith("support.data.")]
HEAVY = (
    "transformers datasets tiktoken requests pyarrow huggingface_hub matplotlib peft tensorboard wandb tokenizers gigatoken"
).split()


@pytest.mark.parametrize(
    "modules, heavy",
    [
        ("train_gpt2, hellaswag, sample", ["torch._dynamo", "torch._inductor"]),  # which take longer than --help may
        (", ".join(["fineweb", *DATA]), ["torch"]),  # so that fineweb.py starts at once
        ("compare", ["torch"]),
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
