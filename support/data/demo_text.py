"""The text of --demo: the documentation of this Python and of packages in requirements.txt, read from their files."""

from __future__ import annotations

import hashlib
import inspect
import platform
import re
import sysconfig
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from support.data.text_files import Documents

DEMO_VOCAB_SIZE = 4096  # of an encoding trained on it: docs/measurements/small-models.md, "The demo's text"
PACKAGES = ("datasets", "matplotlib", "numpy", "peft", "tensorboard", "torch")
# Tests have no prose, and not every Python has the others.
SKIPPED = set("_vendor distutils ensurepip idlelib lib2to3 test testing tests turtledemo".split())
SKIPPED |= {"site-packages", "dist-packages"}


def demo_corpus() -> Documents:
    """Returns about 10 MB of English: Python's language reference, and docstrings."""
    packages = (f"{package.name} {package.version}" for package in _installed())
    revision = ", ".join([f"Python {platform.python_version()}", *packages])
    documents = Documents("documentation of Python and PyTorch", python_documentation(), revision, prefix="pydoc")
    documents.vocab_size = DEMO_VOCAB_SIZE
    return documents


def python_documentation() -> list[str]:
    """Returns the documents, each paragraph once, in an order that mixes topics and packages."""
    from pydoc_data.topics import topics

    texts = {f"topic {name}": text for name, text in topics.items()}
    library = Path(sysconfig.get_paths()["stdlib"])
    modules = {f"module {path.relative_to(library).as_posix()}": path for path in library.rglob("*.py")}
    for package in _installed():
        modules |= {f"module {file}": Path(file.locate()) for file in package.files or [] if file.suffix == ".py"}
    for name, path in modules.items():
        parts = name.removeprefix("module ").split("/")
        if not SKIPPED.intersection(parts) and not any(part.startswith(".") for part in parts):
            texts[name] = "\n\n".join(_docstrings(path.read_text("utf-8", errors="replace")))
    seen = set[str]()  # filled in the order of the names: in the order below, only validation would be without copies
    texts = {name: "\n\n".join(_new_paragraphs(texts[name], seen)) for name in sorted(texts)}
    # A hash orders them, so that the last tenth, for validation, is a fair sample of all.
    names = sorted(texts, key=lambda name: hashlib.sha1(name.encode()).digest())
    return [texts[name] for name in names if texts[name]]


def _installed() -> list[metadata.Distribution]:
    return [package for name in PACKAGES for package in [*metadata.distributions(name=name)][:1]]


def _docstrings(source: str) -> list[str]:
    """Returns the strings in triple quotes that begin a line. Parsing the source instead would take ten times as long."""
    pieces = source.split('"""')
    if len(pieces) % 2 == 0:  # which pieces are strings is unknown
        return []
    strings = zip(pieces[::2], pieces[1::2], strict=False)
    return [inspect.cleandoc(text) for code, text in strings if not code.rpartition("\n")[2].strip(" rR")]


def _new_paragraphs(text: str, seen: set[str]) -> Iterator[str]:
    """Yields the paragraphs, but not those of which more than half stands in `seen`: in lines that came before.

    Docstrings are often copied from class to class with small changes. A copy must not be in both splits. Numbers and
    punctuation do not count, and a paragraph that has little else is no prose.
    """
    for paragraph in re.split(r"\n\s*\n", text):
        lines = [re.sub(r"[\W\d_]+", " ", line.lower()).strip() for line in paragraph.splitlines()]
        letters, old = sum(map(len, lines)), sum(len(line) for line in lines if line in seen)
        if letters > len(paragraph) / 2 and old <= letters / 2:
            yield paragraph.rstrip()
        seen.update(lines)
