"""What the tests start: a script as a user starts it, ranks of the trainer, functions on ranks. They need no model.

    run_script("sample.py", "--help", cwd=tmp_path)               a script in a process of its own
    run_to_the_end("--data", data, cwd=tmp_path, world_size=2)    the trainer on ranks that have imported torch
    on_ranks(function, 4, tmp_path)                               a function on ranks that gloo has connected

In this process: `trained` in training.py.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import pkgutil
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from multiprocessing.queues import Queue
from pathlib import Path
from typing import TypeVar

import pytest

T = TypeVar("T")
os.environ["HF_HUB_OFFLINE"] = "1"  # the hub's library reads it once, when a test file first imports it
ROOT = Path(__file__).parents[1]
GPT2_VOCABULARY = Path(os.environ.get("TIKTOKEN_CACHE_DIR", "/nowhere"), "6c7ea1a7e38e3a7f062df639a5b80947f075ffe6")

needs_gpt2_vocabulary = pytest.mark.skipif(
    not GPT2_VOCABULARY.exists(), reason="the GPT-2 vocabulary is not in TIKTOKEN_CACHE_DIR"
)

TINY_SIZES = dict(block_size=16, vocab_size=257, n_layer=2, n_head=2, n_embd=32)
TINY_MODEL_FLAGS = "--n-layer 2 --n-head 2 --n-embd 32 --block-size 16".split()
TINY_TRAINING_FLAGS = (
    "--total-batch-size 256 --batch-size 4 --warmup-steps 3 --max-lr 3e-3 --val-every 5 --val-tokens 512 "
    "--sample-every 0 --hellaswag-every 0 --device cpu --dtype fp32"
).split()
TINY_FLAGS = [*TINY_MODEL_FLAGS, *TINY_TRAINING_FLAGS]


def run_script(*args: object, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs a script of this project in its own process."""
    command = [sys.executable, str(ROOT / str(args[0])), *map(str, args[1:])]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"} | env
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300)


def copy_project(tree: Path) -> None:
    """Copies the scripts and `support/` into a new folder, to change them there."""
    shutil.copytree(ROOT / "support", tree / "support", ignore=shutil.ignore_patterns("__pycache__"))
    for script in ROOT.glob("*.py"):
        shutil.copy(script, tree)


# Processes that start with torch already imported: a hundred of them take seconds, and a kill is as real as any.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["train_gpt2", "torch._dynamo", "fineweb"])


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


@dataclass(frozen=True)
class Rank:
    """What a rank of `start_run` has that a user's does not. Its process imports the functions, so they are those of a module.

    Attributes:
        flags: more flags.
        env: environment variables.
        replaced: what stands in for something, by its dotted name.
        before: what to call before a call of a function, with its arguments; by its dotted name and the call's number, from 0.
    """

    flags: Sequence[object] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    replaced: Mapping[str, object] = field(default_factory=dict)
    before: Mapping[tuple[str, int], Callable[..., object]] = field(default_factory=dict)

    def prepare(self) -> None:
        """Prepares the process, which has imported the trainer."""
        os.environ.update(self.env)
        for name, substitute in self.replaced.items():
            owner, _, attribute = name.rpartition(".")
            setattr(pkgutil.resolve_name(owner), attribute, substitute)
        for name in {name for name, _ in self.before}:
            owner, _, attribute = name.rpartition(".")
            interruptions = {number: call for (of, number), call in self.before.items() if of == name}
            setattr(pkgutil.resolve_name(owner), attribute, interrupted(pkgutil.resolve_name(name), interruptions))


def interrupted(function: Callable[..., T], interruptions: Mapping[int, Callable[..., object]]) -> Callable[..., T]:
    """The function, before some calls of which others are called."""
    numbers = itertools.count()

    def interrupted_function(*args: object, **kwargs: object) -> T:
        if interruption := interruptions.get(next(numbers)):
            interruption(*args, **kwargs)
        return function(*args, **kwargs)

    return interrupted_function


STEP = "train_gpt2.train_step"  # the steps of a run are the calls of this function


def terminate(*args: object) -> None:
    """What torchrun does to a run that should end."""
    signal.raise_signal(signal.SIGTERM)


def stopped_after(steps: int, world_size: int = 1) -> Rank:
    """Ranks of a run that saves and ends after so many steps: one process at once, several at the end of the step."""
    return Rank(before={(STEP, steps - (world_size > 1)): terminate})


def print_to(output: Path) -> None:
    """Sends what this process prints to a file."""
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)


def start_run(
    *flags: object, cwd: Path, world_size: int = 1, rank: Rank | Mapping[int, Rank] = Rank(),
    defaults: Sequence[str] = TINY_FLAGS,
) -> list[BaseProcess]:  # fmt: skip
    """Starts `train_gpt2.py` with the `defaults` and these flags, one process per rank; rank r prints to `cwd/r.txt`.

    `rank` is what is special about all ranks, or about some.
    """
    address = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(world_size)}
    ranks: list[BaseProcess] = []
    for number in range(world_size):
        special = rank if isinstance(rank, Rank) else rank.get(number, Rank())
        environment = address | {"RANK": str(number), "LOCAL_RANK": str(number)} if world_size > 1 else {}
        all_flags = [*defaults, *map(str, (*flags, *special.flags))]
        output = cwd / f"{number}.txt"
        ranks.append(FORKS.Process(target=_run_rank, args=(all_flags, cwd, output, environment, special)))
        ranks[-1].start()
    return ranks


def _run_rank(flags: list[str], cwd: Path, output: Path, environment: dict[str, str], special: Rank) -> None:
    import torch

    import train_gpt2
    from support.cli import run_cli
    from support.console.curves import CurvesFile
    from support.runtime import clock

    clock.STARTED = time.perf_counter()  # the modules were imported when the suite began
    os.chdir(cwd)
    os.environ.update(environment | {"HF_HUB_OFFLINE": "1"})
    print_to(output)
    torch.set_num_threads(1)
    CurvesFile.draw = lambda self: None  # which takes longer than most of these runs
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
    special.prepare()
    run_cli(lambda: train_gpt2.main(flags))


def finish_run(ranks: list[BaseProcess], timeout: float = 120) -> list[int | None]:
    """Waits for the processes and returns their exit codes; one that does not end in time is killed, and an error."""
    for process in ranks:
        process.join(timeout)
    late = [process for process in ranks if process.exitcode is None]
    for process in late:
        process.kill()
    assert not late, "a process hangs"
    return [process.exitcode for process in ranks]


def run_to_the_end(*flags: object, cwd: Path, **options: object) -> None:
    """`start_run` and `finish_run`, successfully."""
    codes = finish_run(start_run(*flags, cwd=cwd, **options))
    assert not any(codes), (cwd / "0.txt").read_text()


def start_torchrun(options: str, *flags: object, cwd: Path, output: Path) -> BaseProcess:
    """Starts torchrun in a process that has imported torch, and through it `train_gpt2.py`, in processes that have not."""
    command = [*options.split(), str(ROOT / "train_gpt2.py"), *map(str, flags)]
    process = FORKS.Process(target=_run_torchrun, args=(command, cwd, output))
    process.start()
    return process


def _run_torchrun(command: list[str], cwd: Path, output: Path) -> None:
    from torch.distributed.run import main

    print_to(output)
    os.chdir(cwd)
    os.environ.update({"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"})
    main(command)


def run_in_copy(code: str, tree: Path, *arguments: str) -> str:
    """Runs code in a copy of the project, with these arguments; returns its output."""
    process = FORKS.Process(target=_run_in_copy, args=(code, tree, arguments))
    process.start()
    codes, output = finish_run([process]), (tree / "output.txt").read_text()
    assert codes == [0], output
    return output


def _run_in_copy(code: str, tree: Path, arguments: Sequence[str]) -> None:
    import torch

    project = {"support", *(path.stem for path in ROOT.glob("*.py"))}
    for name in [name for name in sys.modules if name.partition(".")[0] in project]:
        del sys.modules[name]  # it is imported from the copy
    torch.set_num_threads(1)
    print_to(tree / "output.txt")
    os.chdir(tree)
    sys.path.insert(0, str(tree))
    sys.argv[1:] = arguments
    exec(code, {})


def on_ranks(function: Callable[[int], T], world_size: int, folder: Path) -> dict[int, T]:
    """What `function(rank)` returns, by rank, in processes that gloo has connected."""
    results = FORKS.Queue()
    ranks = [
        FORKS.Process(target=_on_rank, args=(function, rank, world_size, folder, results)) for rank in range(world_size)
    ]
    for process in ranks:
        process.start()
    returned = dict(results.get(timeout=100) for _ in ranks)
    assert finish_run(ranks) == [0] * world_size
    return returned


def _on_rank(function: Callable[[int], object], rank: int, world_size: int, folder: Path, results: Queue) -> None:
    import torch

    torch.set_num_threads(1)
    address = f"file://{folder}/connect"
    torch.distributed.init_process_group("gloo", init_method=address, rank=rank, world_size=world_size)
    results.put((rank, function(rank)))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def in_threads(ranks: Iterable[int], function: Callable[[int], object]) -> dict[int, object]:
    """What `function(rank)` returns or raises, by rank, if all of them run at once."""
    calls = {rank: Future[object]() for rank in ranks}

    def call(rank: int) -> None:
        try:
            calls[rank].set_result(function(rank))
        except Exception as error:
            calls[rank].set_result(error)

    for rank in ranks:
        threading.Thread(target=call, args=(rank,), daemon=True).start()
    assert not wait(calls.values(), timeout=20).not_done, "a rank waits forever"
    return {rank: call.result() for rank, call in calls.items()}


def losses(log: Path, name: str = "train") -> list[float]:
    """The values of one name in a log, in order."""
    return [float(line.split()[2]) for line in log.read_text().splitlines() if line.split()[1] == name]


def steps_done(out: Path) -> int:
    """Steps in the log of a run, which may not exist, or be replaced just now."""
    try:
        return (out / "log.txt").read_bytes().count(b" train ")
    except FileNotFoundError:
        return 0


def wait_for(condition: Callable[[], object], timeout: float = 60, every: float = 0.02) -> bool:
    """Waits until `condition()` holds or time is over, asking again after so many seconds; returns whether it holds."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(every)
    return bool(condition())
