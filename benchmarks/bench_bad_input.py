"""Runs the four scripts on random bad input: corrupt files, wrong values, pickles, impossible command lines.

    python benchmarks/bench_bad_input.py                          # 10,000 inputs
    python benchmarks/bench_bad_input.py --inputs 300 --seed 7
    python benchmarks/bench_bad_input.py --seed 7 --only 123      # one of them again, with its output

Each run must exit in time, with code 0, or with code 2 and only "error: ..." and "warning: ..." lines on stderr. It
must not execute anything in the input, or change files that it only reads. After exit code 2, all files must be
unchanged, except the log of a resumed run and the manifest of unfinished shards. Each run is a fork of this process,
so a crash of the interpreter is a finding like any other. Exits with 1 if there are findings, and keeps their files.
"""

from __future__ import annotations

import argparse
import importlib.machinery
import io
import multiprocessing
import os
import random
import re
import resource
import shutil
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch
from bad_inputs import CANARY, KINDS, SCRIPTS, Command, make_fixtures

from support.cli import run_cli
from support.data import download
from support.data.tokenizer import get_tokenizer
from support.files import LOCK

FORK = multiprocessing.get_context("fork")
MEMORY = 8 << 30  # bytes of address space that an input may add
IMPORTED_ONCE = "datasets matplotlib.pyplot peft torch._dynamo torch.utils.tensorboard transformers.models.gpt2".split()


@dataclass(frozen=True)
class Outcome:
    """The outcome of running an input. `problem` is None if the run met all requirements."""

    kind: str
    code: int | None  # None: it did not exit in time
    seconds: float
    problem: str | None
    output: str


def make_input(number: int, seed: int, folder: Path) -> tuple[str, Command]:
    """Makes the files of an input in a folder, and changes to it; returns the kind of input and its command."""
    folder.mkdir(parents=True)
    os.chdir(folder)
    rng = random.Random(f"{seed} {number}")
    kind = rng.choice(list(KINDS))
    return kind, KINDS[kind](rng)


def contents(folder: Path) -> dict[str, bytes | None]:
    """Returns the content of each file in a folder, by path; None for anything but a regular file."""
    paths = (path for path in folder.rglob("*") if not path.is_dir() and path.name != LOCK)
    return {str(path): path.read_bytes() if path.is_file() else None for path in paths}


def run_script(command: Command, output: Path) -> None:
    """Runs a script in this process, a fork, with stdout and stderr redirected to files in `output`."""
    address_space = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (address_space + MEMORY,) * 2)
    for stream, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(output / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_TRUNC), stream)
        setattr(sys, name, io.TextIOWrapper(os.fdopen(os.dup(stream), "wb"), line_buffering=True, errors="replace"))
    run_cli(lambda: SCRIPTS[command.script].main(command.argv))


def run_input(number: int, args: argparse.Namespace, place: Path) -> Outcome:
    """Makes and runs an input in a folder that is removed afterwards."""
    kind, command = make_input(number, args.seed, place / "deep" / "down")  # so that ../../x stays in `place`
    before, began = contents(Path()), time.monotonic()
    process = FORK.Process(target=run_script, args=(command, place))
    process.start()
    process.join(args.seconds)
    code, seconds = process.exitcode, time.monotonic() - began
    process.kill()
    process.join()
    output, errors = ((place / name).read_text(errors="replace") for name in ("stdout", "stderr"))
    problem = find_problem(command, code, output, errors, before)
    os.chdir(place.parent)
    shutil.rmtree(place)
    return Outcome(kind, code, seconds, problem, output + errors)


def find_problem(
    command: Command, code: int | None, output: str, errors: str, before: dict[str, bytes | None]
) -> str | None:
    """Describes the first requirement that a run did not meet; None if it met all."""
    lines = [line for line in errors.split("\n") if line]
    if code is None:
        return "it did not end in time"
    if "Traceback" in output + errors:
        return "a traceback"
    if code not in (0, 2):
        return f"it ended with exit code {code}"
    if code == 2 and not any(line.startswith("error: ") for line in lines):
        return "no line with an error"
    if code == 2 and not all(line.startswith(("error: ", "warning: ")) for line in lines):
        return "lines other than errors and warnings"
    if CANARY.exists():
        return "a pickle was executed"
    after = contents(Path())
    lost = [path for path in before if after.get(path) != before[path] and not may_change(path, command, code)]
    logs = (path for path in before if Path(path).name == "log.txt")
    lost += [path for path in logs if not early_lines(before[path]) <= early_lines(after.get(path))]
    return f"changed: {', '.join(lost)}" if lost else None


def may_change(path: str, command: Command, code: int) -> bool:
    progress = r"(run|lora|bpe)/(log\.txt|starts\.jsonl|curves\.png)|partial/manifest\.json"
    patterns = [progress, command.may_change] if code == 0 else [progress]
    return any(re.fullmatch(pattern, path, re.DOTALL) for pattern in patterns)


def early_lines(log: bytes | None) -> set[bytes]:
    """Returns the log lines of the steps before the first checkpoint, which no resumed run repeats."""
    return set(re.findall(rb"^[01] (?:train|val) \d+\.\d+\n", log or b"", re.MULTILINE))


def run_all(numbers: range | list[int], args: argparse.Namespace, folder: Path) -> int:
    """Runs inputs and prints the findings and a table; returns the number of findings."""
    codes, slowest, findings, began = Counter[tuple[str, int | None]](), 0.0, 0, time.monotonic()
    for done, number in enumerate(numbers, start=1):
        outcome = run_input(number, args, folder / "work")
        codes[outcome.kind, outcome.code] += 1
        slowest = max(slowest, outcome.seconds)
        if outcome.problem or args.only is not None:
            findings += outcome.problem is not None
            kept = folder / "findings" / f"seed_{args.seed}" / str(number)
            _, command = make_input(number, args.seed, kept)  # made again, for inspection
            print(f"\r{outcome.kind}, --seed {args.seed} --only {number}: {outcome.problem or outcome.code}")
            print(f"    in {kept}: python {command.script}.py {' '.join(map(ascii, command.argv)):.1000}")
            print("    " + "\n    ".join(outcome.output[-2000:].splitlines()[-12:]))
        elif done % 50 == 0:
            print(f"\r{done} inputs, {findings} findings", end="", flush=True)
    print(f"\n{len(numbers)} inputs in {time.monotonic() - began:.0f} s, the slowest {slowest:.1f} s\n")
    print("| kind | exit code 0 | exit code 2 | others |\n|---|---|---|---|")
    for kind in KINDS:
        total = sum(count for (name, _), count in codes.items() if name == kind)
        good, refused = codes[kind, 0], codes[kind, 2]
        print(f"| {kind} | {good:,} | {refused:,} | {total - good - refused} |")
    if not findings:
        print("\n0 tracebacks, nothing executed, nothing lost")
    return findings


def main() -> None:
    parser = argparse.ArgumentParser(description="Run the scripts on random bad input, and check how they end.")
    parser.add_argument("--inputs", type=int, default=10_000, metavar="N", help="number of inputs (default: 10000)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the mutations (default: 0)")
    parser.add_argument("--only", type=int, metavar="NUMBER", help="run only this input")
    parser.add_argument("--seconds", type=float, default=30, metavar="X", help="time limit of an input (default: 30)")
    args = parser.parse_args()

    os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    for name in IMPORTED_ONCE:  # before the forks
        importlib.import_module(name)
    get_tokenizer("gpt2").encode("")
    torch.set_num_threads(1)
    sys.modules["wandb"] = mock.MagicMock(__spec__=importlib.machinery.ModuleSpec("wandb", None))
    download.ATTEMPTS = 1  # without a network, an input that needs the GPT-2 vocabulary should fail at once
    folder = Path(tempfile.mkdtemp(prefix="bench_bad_input_"))
    os.environ["HF_HOME"] = str(folder / "cache")
    fixtures = FORK.Process(target=make_fixtures, args=(folder / "fixtures",))
    fixtures.start()
    fixtures.join()
    if fixtures.exitcode:
        sys.exit("the fixtures could not be made")
    if findings := run_all(range(args.inputs) if args.only is None else [args.only], args, folder):
        sys.exit(f"\n{findings} findings; their files are in {folder / 'findings'}")
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
