"""The text of --demo: the documentation that comes with every CPython."""

from __future__ import annotations

import ast
import hashlib
import sys
import sysconfig
import warnings
from pathlib import Path

from support.data.text_files import Documents


def demo_corpus() -> Documents:
    """Returns about 2 MB of English: the language reference and docstrings."""
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    return Documents("documentation of CPython", python_documentation(), revision=python, prefix="pydoc")


def python_documentation() -> list[str]:
    """Returns the documents, in an order that mixes topics and docstrings."""
    from pydoc_data.topics import topics

    texts = {f"topic {name}": text for name, text in topics.items()}
    library = Path(sysconfig.get_paths()["stdlib"])
    # Tests have no prose, and the other packages do not come with every CPython.
    skipped = set("site-packages dist-packages test tests idlelib lib2to3 distutils turtledemo ensurepip".split())
    for path in library.rglob("*.py"):
        module = path.relative_to(library)
        if not skipped.intersection(module.parts):
            docstrings = _docstrings(path)
            if docstrings:
                texts[f"module {module.as_posix()}"] = "\n\n".join(docstrings)
    # A hash orders them, so that the last tenth, for validation, is a fair sample of both kinds.
    return [texts[name] for name in sorted(texts, key=lambda name: hashlib.sha1(name.encode()).digest())]


def _docstrings(path: Path) -> list[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError, OSError):
            return []
    nodes = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = (ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, nodes))
    return [docstring for docstring in docstrings if docstring]
