"""Gives the four scripts random bad input: corrupt files, wrong values, pickles, impossible command lines.

    python benchmarks/bench_bad_input.py                          # 10,000 inputs
    python benchmarks/bench_bad_input.py --inputs 300 --seed 7
    python benchmarks/bench_bad_input.py --seed 7 --only 123      # one of them again, with its output

Each must end in time with exit code 0, or with 2 and only lines "error: ..." and "warning: ..." on stderr. It must
execute nothing and change nothing that it only reads. After exit code 2 all files are as before, but for the log of a
resumed run and the manifest of unfinished shards. The scripts are called in forks of this process, so a crash of the
interpreter is a finding like any other. Exits with 1 if there are findings; the files of each are kept.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import multiprocessing
import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType, ModuleType
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}

import datasets  # noqa: E402, F401  imported once, before the forks
import peft  # noqa: E402, F401
import torch  # noqa: E402
from bad_inputs import CANARY, EXCLUDED_FLAGS, FLAGS, KINDS, SCRIPTS, Command, make_fixtures  # noqa: E402
from torch.utils import tensorboard  # noqa: E402, F401
from transformers import GPT2LMHeadModel  # noqa: E402, F401

from support.cli import run_cli  # noqa: E402
from support.data import download  # noqa: E402

FORK = multiprocessing.get_context("fork")
INPUTS_PER_FORK = 50
MEMORY = 8 << 30  # bytes of address space that an input may add


@dataclass(frozen=True)
class Outcome:
    """How an input ended. `problem` is None if it kept the promise."""

    number: int
    kind: str
    code: int | str  # the exit code, or what else ended it
    seconds: float
    problem: str | None
    output: str = ""


def flags_of(script: ModuleType) -> list[str]:
    with contextlib.redirect_stdout(io.StringIO()) as text, contextlib.suppress(SystemExit):
        script.main(["--help"])
    return sorted(set(re.findall(r"(?<![\w-])--?[a-z][a-z0-9-]*(?=[ ,\n])", text.getvalue())) - EXCLUDED_FLAGS)


def random_kind(number: int, seed: int) -> tuple[str, random.Random]:
    """The kind of an input, and the generator that makes the rest of it."""
    rng = random.Random(f"{seed} {number}")
    return rng.choice(list(KINDS)), rng


class TooLong(BaseException):
    """Raised by the alarm."""


def contents(folder: Path) -> dict[str, bytes | None]:
    """The bytes of all files; None for links and other things."""
    paths = (path for path in folder.rglob("*") if not path.is_dir() and path.name != ".lock")
    return {str(path): path.read_bytes() if path.is_file() else None for path in paths}


def run_input(number: int, seed: int, seconds: float) -> Outcome:
    """Runs an input in the current folder, which is empty, with stdout and stderr in files next to it."""
    kind, rng = random_kind(number, seed)
    command = KINDS[kind](rng)
    before = contents(Path())
    for stream in (1, 2):
        os.ftruncate(stream, 0)
    code: int | str = "no exit"
    began = time.monotonic()
    signal.setitimer(signal.ITIMER_REAL, seconds)
    warnings.simplefilter("ignore", ResourceWarning)  # of the input before, in another process in reality
    try:
        run_cli(lambda: SCRIPTS[command.script].main(command.argv))
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else str(end.code)
    except TooLong:
        code = "too long"
    except BaseException as error:  # a traceback for the user, whatever it is
        code = type(error).__name__
        traceback.print_exc()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    took = time.monotonic() - began
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    output, errors = (os.pread(stream, 1 << 20, 0).decode(errors="replace") for stream in (1, 2))
    problem = find_problem(command, code, output, errors, before)
    return Outcome(number, kind, code, took, problem, output + errors)


def find_problem(
    command: Command, code: int | str, output: str, errors: str, before: dict[str, bytes | None]
) -> str | None:
    """What breaks the promise, or None."""
    lines = [line for line in errors.split("\n") if line]
    if code not in (0, 2):
        return f"it ended with: {code}"
    if "Traceback" in output + errors:
        return "a traceback"
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


def may_change(path: str, command: Command, code: int | str) -> bool:
    progress = r"(run|lora|muon|bpe)/(log\.txt|metrics\.jsonl|run\.json|curves\.png)|partial/manifest\.json"
    return re.fullmatch(progress, path) is not None or (
        code == 0 and re.fullmatch(command.may_change, path, re.DOTALL) is not None
    )


def early_lines(log: bytes | None) -> set[bytes]:
    """Lines of the steps before the first checkpoint, which no resumed run repeats."""
    return set(re.findall(rb"^[01] (?:train|val) \d+\.\d+\n", log or b"", re.MULTILINE))


def run_inputs(numbers: Sequence[int], seed: int, seconds: float, place: Path, sender: Connection) -> None:
    """Runs inputs in this process, a fork, up to the first finding; sends the outcome of each."""
    inside = place / "deep" / "down"  # so that ../../x stays in `place`
    resource.setrlimit(resource.RLIMIT_AS, (address_space() + MEMORY,) * 2)
    torch.set_num_threads(1)
    signal.signal(signal.SIGALRM, too_long)
    sys.modules["wandb"] = mock.MagicMock()
    for stream, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(place.with_name(name), os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_TRUNC), stream)
        setattr(sys, name, io.TextIOWrapper(os.fdopen(os.dup(stream), "wb"), line_buffering=True, errors="replace"))
    for number in numbers:
        os.chdir(place.parent)
        shutil.rmtree(place, ignore_errors=True)
        inside.mkdir(parents=True)
        os.chdir(inside)
        outcome = run_input(number, seed, seconds)
        sender.send(outcome)
        if outcome.problem:
            break
    sender.close()
    os._exit(0)  # threads that an input may have left are no matter


def too_long(number: int, frame: FrameType | None) -> None:
    raise TooLong


def address_space() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def outcomes(numbers: Sequence[int], seed: int, seconds: float, place: Path) -> Iterator[Outcome]:
    """The outcome of each input. A fork runs INPUTS_PER_FORK of them, or fewer if one breaks its promise."""
    left = list(numbers)
    while left:
        receiver, sender = FORK.Pipe(duplex=False)
        child = FORK.Process(target=run_inputs, args=(left[:INPUTS_PER_FORK], seed, seconds, place, sender))
        child.start()
        sender.close()
        with contextlib.suppress(EOFError):
            for number in left[:INPUTS_PER_FORK]:
                if not receiver.poll(seconds + 10):  # stuck where no signal handler runs
                    child.kill()
                    break
                yield (outcome := receiver.recv())
                left.remove(number)
                if outcome.problem:
                    break
        child.join()
        if child.exitcode:
            kind, _ = random_kind(left[0], seed)
            yield Outcome(left.pop(0), kind, f"exit code {child.exitcode}", 0.0, "the interpreter ended")


def save_input(number: int, seed: int, folder: Path) -> Command:
    """Makes the files of an input once more, in a folder next to that of the fixtures, so that they can be looked at."""
    inside = folder / "findings" / f"seed_{seed}" / str(number)
    inside.mkdir(parents=True)
    os.chdir(inside)
    kind, rng = random_kind(number, seed)
    return KINDS[kind](rng)


def run_all(numbers: Sequence[int], args: argparse.Namespace, folder: Path) -> int:
    """Runs inputs and prints the findings and a table; returns the number of findings."""
    codes, slowest, findings, began = Counter[tuple[str, int | str]](), 0.0, 0, time.monotonic()
    for done, outcome in enumerate(outcomes(numbers, args.seed, args.seconds, folder / "work"), start=1):
        codes[outcome.kind, outcome.code] += 1
        slowest = max(slowest, outcome.seconds)
        if outcome.problem or args.only is not None:
            findings += outcome.problem is not None
            command = save_input(outcome.number, args.seed, folder)
            print(f"\r{outcome.kind}, --seed {args.seed} --only {outcome.number}: {outcome.problem or outcome.code}")
            print(f"    in {Path.cwd()}: python {command.script}.py {' '.join(map(ascii, command.argv)):.1000}")
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
    parser = argparse.ArgumentParser(description="Give the scripts random bad input, and check how they end.")
    parser.add_argument("--inputs", type=int, default=10_000, metavar="N", help="number of inputs (default: 10000)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the mutations (default: 0)")
    parser.add_argument("--only", type=int, metavar="NUMBER", help="run only this input")
    parser.add_argument("--seconds", type=float, default=30, metavar="X", help="time limit of an input (default: 30)")
    args = parser.parse_args()

    torch.set_num_threads(1)
    download.DEFAULT_ATTEMPTS = 1  # without a network, an input that needs the GPT-2 vocabulary should fail at once
    FLAGS.update({name: flags_of(script) for name, script in SCRIPTS.items()})
    folder = Path(tempfile.mkdtemp(prefix="bench_bad_input_"))
    os.environ["HF_HOME"] = str(folder / "cache")
    fixtures = FORK.Process(target=make_fixtures, args=(folder / "fixtures",))
    fixtures.start()
    fixtures.join()
    if fixtures.exitcode:
        sys.exit("the fixtures could not be made")
    numbers = range(args.inputs) if args.only is None else [args.only]
    if findings := run_all(numbers, args, folder):
        sys.exit(f"\n{findings} findings; their files are in {folder / 'findings'}")
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
