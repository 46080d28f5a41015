"""Fixtures: no network, a small model, small shards."""

from __future__ import annotations

import gc
import multiprocessing
import os
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
from helpers import TINY_SIZES

signal.signal(signal.SIGINT, signal.default_int_handler)  # children inherit that of a shell's background: ignored

# Files of the tests are kept in memory where it is large: thousands of them are synced, which a busy disk does slowly.
MEMORY = Path("/dev/shm")
has_space = os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free > 4 << 30
if has_space and not os.statvfs(MEMORY).f_flag & os.ST_NOEXEC:  # torch.compile's libraries are loaded from there
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))


def pytest_collection_finish():
    """What a test collects is its own garbage: to look at all modules again, each time, takes half a second."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def usual_interrupts():
    """A script that was interrupted in this process ignores further ones, and the children of later tests would, too."""
    yield
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def no_process_is_left():
    """A test that fails before the end of its run does not leave it running for hours."""
    yield
    for process in multiprocessing.active_children():
        process.kill()
        process.join()


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    """A look-up on the hub is an error at once, and not a minute of retries."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch, request):
    """A picture takes longer to draw than most of these runs take to train; `curves` marks tests of it."""
    if "curves" not in request.keywords:
        monkeypatch.setattr("support.console.curves.CurvesFile.draw", lambda self: None)


@pytest.fixture
def graphs_only(monkeypatch):
    """torch.compile finds the graphs, and runs them without Inductor's code for them."""
    import torch
    from training import compile_graphs

    from support.optim import loss

    loss._compiled.cache_clear()
    monkeypatch.setattr(torch, "compile", compile_graphs)
    yield
    loss._compiled.cache_clear()


@pytest.fixture
def tiny_model():
    import torch

    from train_gpt2 import GPT, GPTConfig

    torch.manual_seed(0)
    return GPT(GPTConfig(**TINY_SIZES))


@pytest.fixture(scope="session")
def byte_shards(tmp_path_factory) -> Path:
    """A folder of `bytes` shards of text that a model can learn something from: sums of numbers, in words and digits."""
    import fineweb
    from support.data.text_files import Documents

    folder = tmp_path_factory.mktemp("shards")
    rng = np.random.default_rng(0)
    texts = [" ".join(f"{a} + {b} = {a + b}." for a, b in rng.integers(0, 50, (20, 2))) for _ in range(60)]
    fineweb.make_shards(Documents("sums", texts), folder / "data", tokenizer="bytes", shard_size=4000)
    return folder / "data"
