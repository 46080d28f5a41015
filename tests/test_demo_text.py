"""The text of --demo: the same for the same packages, each paragraph once, and a held-out tenth that is not in the rest."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers import ROOT

from support.data import demo_text
from support.data.demo_text import demo_corpus, python_documentation

ONE = "Returns the largest of all numbers that are in a list."
TWO = "Raises an error if the list is empty, or has a word in it."
FILES = {
    "__init__.py": f'"""{ONE}"""\nx = """not at the beginning of a line, so no docstring at all"""\n',
    "a/more.py": f"def f():\n    r'''single'''\n    \"\"\"{TWO}\n\n    The second one:\n      an indented line.\n    \"\"\"\n",
    "a/copy.py": f'class C:\n    """\n    {ONE}\n\n    Only this paragraph of the class is one that no other has.\n    """\n',
    "a/numbers.py": '"""\nThe table of the numbers is below.\n\nzzyzx 0.123 4.567 | 8.901 2.345\n"""\n',
    "a/odd.py": 'x = \'"""\'\ny = """\nThree times.\n"""\n\nThis is code, and no docstring.\n',
    "tests/test_a.py": '"""Checks that the function works, which is no documentation."""',
    ".hidden/b.py": '"""Stands in a folder whose name begins with a dot."""',
    "a/.ipynb_checkpoints/c.py": '"""Stands in a folder of checkpoints of a notebook."""',
    "data.txt": '"""Stands in a file that is no module."""',
}
NOT_INSTALLED_BY_IT = {"added.py": '"""Was put there by somebody else, and is not in the list of files."""'}


def install(folder: Path, name: str, order: int = 1) -> None:
    for path, content in (FILES | NOT_INSTALLED_BY_IT).items():
        (folder / name / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / name / path).write_text(content)
    record = [f"{name}/{path},," for path in FILES][::order]
    (folder / f"{name}-1.2.3.dist-info").mkdir()
    (folder / f"{name}-1.2.3.dist-info" / "RECORD").write_text("\n".join(record))
    (folder / f"{name}-1.2.3.dist-info" / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2.3\n"
    )


@pytest.fixture(scope="module")
def documents() -> list[str]:
    return python_documentation()


@pytest.mark.parametrize("order", [1, -1])
def test_docstrings_of_a_package_each_paragraph_once(tmp_path, monkeypatch, order):
    install(tmp_path, "tiny_package", order)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(demo_text, "sysconfig", SimpleNamespace(get_paths=lambda: {"stdlib": json.__path__[0]}))
    monkeypatch.setattr(demo_text, "PACKAGES", ())
    without = python_documentation()
    monkeypatch.setattr(demo_text, "PACKAGES", ("no_such_package", "tiny_package"))
    assert demo_corpus().revision == f"Python {sys.version.split()[0]}, tiny_package 1.2.3"
    text = python_documentation()
    assert [document for document in text if document in set(without)] == without
    assert sorted(set(text) - set(without)) == [
        "Only this paragraph of the class is one that no other has.",
        f"{TWO}\n\nThe second one:\n  an indented line.",
        ONE,
        "The table of the numbers is below.",
    ]
    assert "tiny_package" not in sys.modules


def test_a_copy_with_small_changes_is_left_out():
    text = "Applies a convolution of one dimension.\nThe input has channels.\nThe kernel is square."
    other = "Applies a convolution of 2 dimensions.\n  The input has channels!\nThe kernel is square."
    new = "Applies a convolution of one dimension.\nThe output has fewer of them, and is smaller, too."
    seen = set()
    kept = [
        *demo_text._new_paragraphs(f"{text}\n\n{other}", seen),
        *demo_text._new_paragraphs(f"{new}\n\n{text}", seen),
    ]
    assert kept == [text, new]


SAME = """
import hashlib, json, sys
from types import SimpleNamespace
from support.data import demo_text
demo_text.PACKAGES = ("numpy", "peft")
demo_text.sysconfig = SimpleNamespace(get_paths=lambda: {"stdlib": json.__path__[0]})
print(hashlib.sha256(repr(demo_text.python_documentation()).encode()).hexdigest(), {"numpy", "peft"} & {*sys.modules})
"""


def test_the_same_packages_give_the_same_text():
    """Also with another order of sets, and although nothing is imported."""
    found = set()
    for seed in "78":
        environment = {"PYTHONHASHSEED": seed, "PYTHONIOENCODING": "utf-8"}
        found.add(subprocess.check_output([sys.executable, "-c", SAME], cwd=ROOT, env=environment, text=True))
    assert len(found) == 1 and found.pop().endswith(" set()\n")


@pytest.mark.slow
def test_the_text_is_documentation_and_no_paragraph_stands_in_it_twice(documents):
    assert 6e6 < sum(len(text.encode()) for text in documents) < 14e6 and 1500 < len(documents) < 4000
    assert all(text.strip() for text in documents)
    paragraphs = [paragraph for text in documents for paragraph in re.split(r"\n[ \t]*\n", text)]
    words = Counter(tuple(re.findall(r"[^\W\d_]+|\n", paragraph.lower())) for paragraph in paragraphs)
    assert max(words.values()) == 1
    assert sum(map(str.isalpha, "".join(documents))) > 0.6 * sum(map(len, documents))


@pytest.mark.slow
def test_little_of_the_held_out_tenth_stands_in_the_rest(documents):
    """Counts its sequences of 13 words, as GPT-3's authors compared texts; the CPython-only text of version 2.0 had 11%."""
    sizes = [*map(len, documents)]
    first = next(n for n in range(len(sizes), 0, -1) if sum(sizes[n:]) >= sum(sizes) / 10)

    def sequences(texts: list[str]) -> list[tuple[str, ...]]:
        words = [re.findall(r"\w+", text.lower()) for text in texts]
        return [tuple(text[n : n + 13]) for text in words for n in range(len(text) - 12)]

    rest, held_out = set(sequences(documents[:first])), sequences(documents[first:])
    assert sum(map(rest.__contains__, held_out)) / len(held_out) < 0.035
