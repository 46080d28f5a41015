"""Checks that all ranks are about to do the same: otherwise they would wait for each other or train on different data."""

from __future__ import annotations

import hashlib
import json
import platform
import socket
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from support.cli import Flag, UserError, flag_name, flags_of
from support.config import Options
from support.data.shards import DataIdentity
from support.runtime import devices
from support.runtime.distributed import Distributed

if TYPE_CHECKING:
    from support.runtime.machine import Machine

HINTS = {
    "the versions": "Install the same ones on all nodes.",
    "the device": "Use GPUs of one kind.",
    "the checkpoint": "All nodes must see the same folder at --out.",
    "the shards": "Copy one node's shards to the others.",
}  # all other facts are flags


def check_starts_agree(dist: Distributed, cli_flags: Mapping[str, Any], flags: Mapping[str, Flag]) -> None:
    """Checks that all ranks have the same versions and command line; call it before anything else that they do together."""
    given = {flag_name(name): "given" if flags[name].per_node else str(value) for name, value in cli_flags.items()}
    given.pop("--data", None)  # one node may need it, and another may have its shards in the default folder
    versions = f"Python {'.'.join(platform.python_version_tuple()[:2])}, torch {torch.__version__}"
    check_facts_agree(dist, given | {"the versions": versions})


def check_runs_agree(dist: Distributed, config: Options, machine: Machine, identity: DataIdentity) -> None:
    """Checks that all ranks have the same GPUs, shards and configuration."""
    flags = flags_of(type(config))
    facts = {flag_name(name): str(value) for name, value in config.to_dict().items() if not flags[name].per_node}
    facts["the device"] = f"{devices.describe(dist.device)} in {machine.dtype}"
    splits = json.dumps([identity["train"], identity["val"]])
    facts["the shards"] = hashlib.sha256(splits.encode()).hexdigest()[:8]
    check_facts_agree(dist, facts)


def check_facts_agree(dist: Distributed, facts: dict[str, str]) -> None:
    """Checks that all ranks have the same facts, by name.

    Raises:
        UserError: on all ranks, with one line for each fact that differs. The line names the first rank whose fact
            differs from rank 0's, and its node.
    """
    (own_host, own_facts), *others = dist.gather((socket.gethostname(), facts))
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
