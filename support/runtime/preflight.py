"""Checks that all ranks are about to do the same: otherwise they would wait for each other or train on different data."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import platform
import socket
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from support.cli import UserError, flag_name
from support.config import TRAIN_FLAGS, TrainConfig
from support.data.shards import DataIdentity
from support.runtime import devices
from support.runtime.distributed import Distributed

if TYPE_CHECKING:
    from support.runtime.machine import Machine

HINTS = {
    "the versions": "Install the same ones on all nodes.",
    "the device": "Use GPUs of one kind.",
    "the checkpoint": "All nodes must see the same folder at --out.",
    "whether they compile": "Install a C++ compiler and Python's headers on all nodes, or pass --no-compile on all.",
    "the shards": "Copy one node's shards to the others.",
    "the HellaSwag items": "Copy one node's file to the others.",
}  # all other facts are flags


def check_installed(flags: Mapping[str, Any]) -> None:
    """Checks that the packages of the trackers that these flags ask for are installed, without importing them.

    Raises:
        UserError: some are missing; one line for each.
    """
    missing = [name for name in ("tensorboard", "wandb") if flags.get(name) and not importlib.util.find_spec(name)]
    if missing:
        raise UserError(
            *(f"--{name} needs a package that is not installed. Run pip install {name}." for name in missing)
        )


def check_starts_agree(dist: Distributed, cli_flags: Mapping[str, Any], planned: bool) -> None:
    """Checks that all ranks have the same versions and command line; call it before anything else that they do together.

    Then, unless the run is only `planned`, it checks that what its trackers need is installed.
    """
    given = {flag_name(n): "given" if TRAIN_FLAGS[n].per_node else str(value) for n, value in cli_flags.items()}
    given.pop("--data", None)  # one node may need it, and another may have its shards in the default folder
    versions = f"Python {'.'.join(platform.python_version_tuple()[:2])}, torch {torch.__version__}"
    check_facts_agree(dist, given | {"the versions": versions})
    if not planned:
        dist.once(lambda: check_installed(cli_flags))  # before anything is downloaded or made


def check_runs_agree(dist: Distributed, config: TrainConfig, machine: Machine, identity: DataIdentity) -> None:
    """Checks that all ranks have the same GPUs, shards and configuration, and that all compile or none."""
    facts = {flag_name(name): str(x) for name, x in config.to_dict().items() if not TRAIN_FLAGS[name].per_node}
    facts["the device"] = f"{devices.describe(dist.device)} in {machine.dtype}"
    facts["whether they compile"] = "yes" if machine.compiled else "no"
    splits = json.dumps([identity["train"], identity["val"]])
    facts["the shards"] = hashlib.sha256(splits.encode()).hexdigest()[:8]
    check_facts_agree(dist, facts)


def check_facts_agree(dist: Distributed, facts: dict[str, str]) -> None:
    """Checks that all ranks have the same facts, by name.

    Raises:
        UserError: on all ranks, with one line for each fact that differs. The line names the first rank whose fact
            differs from rank 0's, and its node.
    """
    (own_host, own_facts), *others = dist.all_gather((socket.gethostname(), facts))
    problems: dict[str, str] = {}
    for rank, (host, other_facts) in enumerate(others, 1):
        for name in own_facts.keys() | other_facts.keys():
            own, other = own_facts.get(name, "not given"), other_facts.get(name, "not given")
            if own != other and name not in problems:
                problems[name] = (
                    f"the nodes differ in {name}: {other} on {host} (rank {rank}), {own} on {own_host} (rank 0). "
                    f"{HINTS.get(name, 'Pass the same flags on all nodes.')}"
                )
    if problems:
        raise UserError(*sorted(problems.values()))
