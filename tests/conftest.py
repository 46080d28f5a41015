"""What the tests share: small models, small shards, and the scripts run as a user runs them."""

from __future__ import annotations

import multiprocessing
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import fineweb
from support.corpus import Documents
from train_gpt2 import GPT, Distributed, GPTConfig, TrainConfig

os.environ["HF_HUB_OFFLINE"] = "1"  # the hub's library reads it once, when a test file first imports it
ROOT = Path(__file__).parents[1]
GPT2_VOCABULARY = Path(os.environ.get("TIKTOKEN_CACHE_DIR", "/nowhere"), "6c7ea1a7e38e3a7f062df639a5b80947f075ffe6")

needs_gpt2_vocabulary = pytest.mark.skipif(
    not GPT2_VOCABULARY.exists(), reason="the GPT-2 vocabulary is not in TIKTOKEN_CACHE_DIR"
)

TINY = GPTConfig(block_size=16, vocab_size=257, n_layer=2, n_head=2, n_embd=32)
TINY_FLAGS = (
    "--n-layer 2 --n-head 2 --n-embd 32 --block-size 16 --total-batch-size 256 --batch-size 4 --warmup-steps 3 "
    "--max-lr 3e-3 --val-every 5 --val-tokens 512 --sample-every 0 --hellaswag-every 0 --device cpu --dtype fp32"
).split()
torch.set_num_threads(1)  # models this small gain nothing from a second one, and lose much where the cores are shared
ONE_PROCESS = Distributed(rank=0, local_rank=0, world=1, device=torch.device("cpu"))


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    """Whatever is not made here is an error at once, and not a minute of tries."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture
def tiny_model() -> GPT:
    torch.manual_seed(0)
    return GPT(TINY)


@pytest.fixture(scope="session")
def byte_shards(tmp_path_factory) -> Path:
    """A folder of `bytes` shards of text that a model can learn something of: sums of numbers, in words and digits."""
    folder = tmp_path_factory.mktemp("shards")
    rng = np.random.default_rng(0)
    texts = [" ".join(f"{a} + {b} = {a + b}." for a, b in rng.integers(0, 50, (20, 2))) for _ in range(60)]
    fineweb.make_shards(Documents("sums", lambda: texts), folder / "data", tokenizer="bytes", shard_size=4000)
    return folder / "data"


def run_script(*args: str | Path, cwd: Path, torchrun: int = 0, **env: str) -> subprocess.CompletedProcess:
    """A script of this project in a process of its own, with its output as text; `torchrun` is a number of ranks."""
    launcher = [
        sys.executable,
        *(["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={torchrun}"] if torchrun else []),
    ]
    command = [*launcher, str(ROOT / str(args[0])), *map(str, args[1:])]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"} | env
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300)


# Processes that begin with torch already imported: a hundred of them take seconds, and a kill is as real as any.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["train_gpt2", "torch._dynamo", "fineweb"])


def start_run(
    *flags: str | Path, cwd: Path, world: int = 1, sabotage: Callable | None = None
) -> list[multiprocessing.Process]:
    """`train_gpt2.py` with TINY_FLAGS and these, in `world` processes of their own; what rank r prints is in `cwd/r.txt`.

    `sabotage(rank)` is called first in each: a function of a module, to break something there.
    """
    with socket.socket() as free:
        free.bind(("localhost", 0))
        place = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": str(world)}
    ranks = []
    for rank in range(world):
        environment = place | {"RANK": str(rank), "LOCAL_RANK": str(rank), "HF_HUB_OFFLINE": "1"} if world > 1 else {}
        arguments = ([*TINY_FLAGS, *map(str, flags)], cwd, cwd / f"{rank}.txt", environment, sabotage, rank)
        ranks.append(FORKS.Process(target=_run_rank, args=arguments))
        ranks[-1].start()
    return ranks


def _run_rank(
    flags: list[str], cwd: Path, output: Path, environment: dict[str, str], sabotage: Callable | None, rank: int
) -> None:
    import train_gpt2
    from support.cli import run

    os.chdir(cwd)
    os.environ.update(environment)
    sink = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(sink, 1)
    os.dup2(sink, 2)
    torch.set_num_threads(1)
    if sabotage:
        sabotage(rank)
    run(lambda: train_gpt2.main(flags))


def finish_run(ranks: list[multiprocessing.Process], timeout: float = 120) -> list[int]:
    """Waits for the processes and returns their exit codes; one that does not end in time is killed, and an error."""
    for process in ranks:
        process.join(timeout)
    late = [process for process in ranks if process.exitcode is None]
    for process in late:
        process.kill()
    assert not late, "a process hangs"
    return [process.exitcode for process in ranks]


def run_to_the_end(*flags, cwd, **options):
    """`start_run`, waited for; it ends well."""
    codes = finish_run(start_run(*flags, cwd=cwd, **options))
    assert not any(codes), (cwd / "0.txt").read_text()


def config_of(*flags: str) -> TrainConfig:
    from train_gpt2 import configure

    return configure([*TINY_FLAGS, *map(str, flags)])[0]


def losses(log: Path, name: str = "train") -> list[float]:
    return [float(line.split()[2]) for line in log.read_text().splitlines() if line.split()[1] == name]
