"""Mutates the code at random, one operator or constant at a time, and counts the mutations that a test catches.

    pip install cosmic-ray
    python benchmarks/mutate.py --seed 55                # 60 mutations, which takes hours
    python benchmarks/mutate.py --seed 55 --only 3 7     # some of them again
    python benchmarks/mutate.py --mutations 6 --seed 7

Cosmic Ray knows what can be mutated: operators, constants, conditions, loops, decorators, exceptions. At each place in
a random sample, one of its mutations is made in a copy of the tracked files. Annotations and f-strings (most are
messages) are left out, and so are mutations that do not compile or that only exchange == and `is`. The module's own
tests run first, and the slow ones last. A test catches a mutation if it fails, also by itself, and passes without the
mutation. A mutation that survives is printed: it needs a test, or changes nothing that a CPU can show.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names
from harness import ROOT, kill_processes

FILES = ("train_gpt2.py", "hellaswag.py", "support/data/shards.py", "support/checkpoints/*.py", "support/optim/*.py")
# names of test files, where they are not test_<module>.py
OWN_TESTS = {"train_gpt2": "model loader recipe train", "start": "fork distributed", "resume": "resume fork"}
OWN_TESTS |= {"run_info": "history model_card run_folder"}
IDENTITY = re.compile("(Eq_Is|Is_Eq|NotEq_IsNot|IsNot_NotEq)$")
CRASH = "a crash of Python"
MARK = ("MUTATE_PY", str(os.getpid()))  # in the environment of all processes of the tests

Place = tuple[Path, tuple[int, int], tuple[int, int]]  # a file, and line and column of both ends


def left_out(source: str) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Returns where annotations, f-strings and the imports for annotations begin and end."""
    nodes: list[ast.AST | None] = []
    for node in ast.walk(ast.parse(source)):
        nodes += [getattr(node, "annotation", None), getattr(node, "returns", None)]
        is_for_types = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        nodes += [node] if is_for_types or isinstance(node, ast.JoinedStr) else []
    return [((node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)) for node in nodes if node]


def find_places() -> dict[Place, list[tuple[str, int]]]:
    """Returns Cosmic Ray's operators by place, each with the number of its occurrence in the file."""
    places: dict[Place, list[tuple[str, int]]] = defaultdict(list)
    operators = {name: get_operator(name) for name in operator_names() if not IDENTITY.search(name)}
    for path in (path for pattern in FILES for path in sorted(ROOT.glob(pattern))):
        source = path.read_text(encoding="utf-8")
        nodes, spans = list(ast_nodes(get_ast(source))), left_out(source)
        for name, operator in operators.items():
            if not operator.arguments():  # otherwise names of variables
                positions = (position for node in nodes for position in operator().mutation_positions(node))
                for occurrence, (start, end) in enumerate(positions):
                    if not any(first <= start and end <= last for first, last in spans):
                        places[path, start, end].append((name, occurrence))
    return places


def mutate(source: str, options: list[tuple[str, int]], rng: random.Random) -> tuple[str, str] | None:
    """Picks a random mutation that compiles; returns its operator and the mutated source. None: no mutation compiles."""
    for name, occurrence in rng.sample(options, len(options)):
        mutated = mutate_code(source, get_operator(name)(), occurrence)
        try:
            compile(mutated, name, "exec")
        except SyntaxError:
            continue
        return name.removeprefix("core/"), mutated
    return None  # `not` before a name that is assigned with :=


def copy_tree(folder: Path) -> None:
    """Copies the tracked files, without bytecode: Python would not notice a mutation within the same second."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout
    for name in listed.rstrip("\0").split("\0"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)


def failing_test(folder: Path, seconds: float, *arguments: str) -> str | None:
    """Returns the first test that fails in a copy of the tree; None if all pass."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *arguments]
    environment = os.environ | dict([MARK])
    with tempfile.TemporaryFile() as output:
        try:
            code = subprocess.run(
                command, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT, timeout=seconds
            ).returncode
        finally:
            kill_processes("=".join(MARK))
        output.seek(0)
        text = output.read().decode(errors="replace")
    if code in (0, 5):  # 5: no test is selected
        return None
    if code < 0:
        return CRASH
    failed = re.search(r"^(?:FAILED|ERROR) (tests/\w+\.py(?:::\w+(?:\[.*?\])?)?)(?= - |$)", text, re.MULTILINE)
    return failed[1] if failed else sys.exit(f"pytest ended with exit code {code}:\n{text[-2000:]}")


def find_test(folder: Path, unchanged: Path, path: Path) -> str | None:
    """Returns the test that catches the mutation of a module in a copy of the tree; None if the mutation survives."""
    own = [f"tests/test_{name}.py" for name in OWN_TESTS.get(path.stem, path.stem).split()]
    others = [f"--ignore={name}" for name in own]
    for seconds, tests in (900, ["not slow", *own]), (2400, ["not slow", *others]), (3600, ["slow"]):
        while test := failing_test(folder, seconds, "-m", *tests):
            alone = (seconds, "-n", "0", test)
            if test == CRASH or failing_test(folder, *alone) and not failing_test(unchanged, *alone):
                return test
            tests += ["--deselect", test]  # it fails sometimes, on a busy machine
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mutations", type=int, default=60, metavar="N", help="size of the sample (default: 60)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the sample (default: 0)")
    parser.add_argument("--only", type=int, nargs="+", metavar="NUMBER", help="run only these mutations of the sample")
    args = parser.parse_args()
    places, rng, outcomes = find_places(), random.Random(args.seed), list[str | None]()
    print(f"--mutations {args.mutations} --seed {args.seed}, of {len(places):,} places", flush=True)
    for number, place in enumerate(rng.sample(sorted(places), args.mutations), start=1):
        path, (line, _), _ = place
        source, began = path.read_text(encoding="utf-8"), time.monotonic()
        mutation = mutate(source, places[place], rng)
        if mutation is None or args.only and number not in args.only:
            continue
        operator, mutated = mutation
        with tempfile.TemporaryDirectory() as unchanged, tempfile.TemporaryDirectory() as folder:
            for copy in (unchanged, folder):
                copy_tree(Path(copy))
            Path(folder, path.relative_to(ROOT)).write_text(mutated, encoding="utf-8")
            try:
                outcomes.append(find_test(Path(folder), Path(unchanged), path))
            except subprocess.TimeoutExpired as error:
                outcomes.append(f"tests that do not end in {error.timeout} s")
        found = f"caught by {outcomes[-1]}" if outcomes[-1] else "SURVIVED"
        seconds = time.monotonic() - began
        print(f"{number} {path.relative_to(ROOT)}:{line} {operator}: {found} ({seconds:.0f} s)", flush=True)
        if not outcomes[-1]:
            diff = difflib.unified_diff(source.splitlines(), mutated.splitlines(), n=1, lineterm="")
            print(*(f"    {text}" for text in list(diff)[2:]), sep="\n", flush=True)
    print(f"{len(outcomes) - outcomes.count(None)} of {len(outcomes)} caught")


if __name__ == "__main__":
    main()
