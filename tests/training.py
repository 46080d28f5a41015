"""Shared helpers of the tests of training: a tiny model, its flags, and runs in this process."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from helpers import TINY_FLAGS, TINY_SIZES
from runs import differences, log_without_seconds
from torch import nn

import train_gpt2
from support.checkpoints import run_folder
from support.checkpoints.run_info import RunInfo
from support.checkpoints.start import Start
from support.checkpoints.state import Checkpoint, TrainState
from support.cli import parse_flags
from support.config import TrainConfig
from support.data.shards import DataIdentity, TokenData
from support.data.tokenizer import BytesTokenizer, Tokenizer
from support.runtime import devices
from support.runtime.distributed import ONE_PROCESS, Distributed
from support.runtime.machine import Machine
from support.runtime.schedule import Schedule
from train_gpt2 import GPT, TABLES, GPTConfig, cooldown_start, resolve

torch.set_num_threads(1)  # models this small gain nothing from a second thread, and lose much where cores are shared
TINY = GPTConfig(**TINY_SIZES)
FP32 = torch.autocast("cpu", enabled=False)
NEW_RUN = Start(tables=TABLES)  # where it does not matter which flags were given
compile_graphs = partial(torch.compile, backend="aot_eager")  # torch.compile's graphs, without Inductor's code for them


def configure(flags: list[str] | tuple[str, ...]) -> tuple[TrainConfig, Start]:
    """The configuration that `main` makes of a command line, and how the process starts."""
    given = parse_flags(TrainConfig, [str(flag) for flag in flags], "")
    start = Start.find(given, TABLES, ONE_PROCESS)
    return resolve(start), start


def config_with(**flags: object) -> TrainConfig:
    """The configuration of these flags and the defaults."""
    return resolve(Start.find(flags, TABLES, ONE_PROCESS))


def config_of(*flags: object) -> TrainConfig:
    """The configuration of TINY_FLAGS and these."""
    return configure([*TINY_FLAGS, *map(str, flags)])[0]


def schedule_of(config: TrainConfig) -> Schedule:
    return Schedule(config, cooldown_start=cooldown_start(config) if config.has_cooldown else None)


def run_info(*flags: object, checkpoint: Checkpoint | None = None, hellaswag_items: int = 0) -> RunInfo:
    """What is constant in a run of TINY_FLAGS and these: on bytes, without shards."""
    data = TokenData("data", [], [], BytesTokenizer())
    identity: DataIdentity = {"train": [], "val": [], "base": None, "source": None}
    config, start = configure([*TINY_FLAGS, *map(str, flags)])
    start = replace(start, checkpoint=checkpoint, forked=config.fork is not None)
    model = GPT(replace(TINY, dropout=config.dropout))
    run = RunInfo(
        config=config, machine=Machine.find(config, ONE_PROCESS.device, 1), start=start, schedule=schedule_of(config),
        data=data, identity=identity, model=model, flops_per_token=model.flops_per_token(), hellaswag_items=hellaswag_items,
    )  # fmt: skip
    run.__dict__["bytes_per_token"] = 1.0  # it would be counted in the shards
    return run


def train(config: TrainConfig, dist: Distributed, start: Start) -> TrainState:
    """Trains with the run's folder locked, as main() does; returns the final state."""
    with run_folder.locked(config, start, dist):
        return train_gpt2.train(config, dist, start)


def trained(out: Path, *flags: object) -> str:
    """Trains in this process with TINY_FLAGS and these; returns the log, without the seconds of the steps."""
    config, start = configure([*TINY_FLAGS, "--out", str(out), *map(str, flags)])
    train(config, ONE_PROCESS, start)
    return log_without_seconds(out)


def resumed(out: Path, *flags: object) -> TrainState:
    """The final state of a run that is resumed in this process."""
    config, start = configure(["--resume", "--out", str(out), *map(str, flags)])
    assert start.resumed is not None
    return train(config, ONE_PROCESS, start)


def forked(out: Path, checkpoint: Path, *flags: object) -> TrainState:
    """The final state of a fork of a checkpoint, in this process."""
    config, start = configure(["--fork", str(checkpoint), "--out", str(out), *map(str, flags)])
    return train(config, ONE_PROCESS, start)


def saved_bytes(model: nn.Module, B: int, T: int, dtype: torch.dtype = torch.float32) -> int:
    """Bytes that autograd saves in a forward pass of (B, T) tokens, besides the weights: counted in a real one."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved: dict[int, int] = {}

    def count(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    tokens = torch.zeros((B, T), dtype=torch.int64)
    hooks = torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor)
    with hooks, devices.autocast(torch.device("cpu"), dtype):
        loss = model(tokens, tokens)  # holds what is saved, so that no address is used twice
    del loss
    return sum(nbytes for address, nbytes in saved.items() if address not in weights)


def save_small_model(folder: Path, tokenizer: Tokenizer, block_size: int = 8, n_embd: int = 32) -> None:
    """Saves a model of one layer, with random weights and this tokenizer."""
    sizes = dict(block_size=block_size, n_layer=1, n_head=1, n_embd=n_embd)
    GPT(GPTConfig(vocab_size=tokenizer.vocab_size, **sizes)).save_pretrained(folder)
    tokenizer.save_pretrained(folder, block_size)


def trainer_file(checkpoint: Path) -> dict:
    """The content of `trainer.pt`."""
    return torch.load(checkpoint / "trainer.pt", weights_only=True)


def checkpoint_names(out: Path) -> list[str]:
    """The names of all checkpoints in a run's folder, of partly written ones too."""
    return sorted(path.name for path in out.iterdir() if "model" in path.name)


def assert_same_run(out: Path, expected: Path) -> None:
    """The log, and weights and optimizer of the last checkpoint, are those of another run, bit for bit."""
    found = differences(out, expected)
    assert not found, found
