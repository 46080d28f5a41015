"""Before several ranks are connected: whether they agree on what they are about to train."""

from __future__ import annotations

import hashlib
import json
import platform
import socket
from typing import TYPE_CHECKING

import torch

from support.cli import UserError, flag_name
from support.data.shards import DataIdentity
from support.runtime import devices
from support.runtime.distributed import Distributed

if TYPE_CHECKING:
    from support.runtime.machine import Machine
    from train_gpt2 import TrainConfig

HINTS = {
    "the versions": "Install the same on all nodes.",
    "the device": "Use GPUs of one kind.",
    "the checkpoint": "All nodes must see the same folder at --out.",
    "the shards": "Copy those of one node to the others.",
}  # the others are flags
PATHS = {"data", "text", "out", "resume", "fork", "init_from", "hellaswag_data"}  # flags that may differ between nodes


def check_ranks_agree(
    dist: Distributed, config: TrainConfig, machine: Machine, identity: DataIdentity, resumed_step: int
) -> None:
    """Checks before the ranks are connected that they have the same versions, GPUs, flags, shards and checkpoint.

    Args:
        identity: of the shards that this rank reads.
        resumed_step: of the checkpoint that it resumes from, or 0.

    Raises:
        UserError: on all ranks, with one line for each fact that differs. It names the first rank that does, and its
            node.
    """
    store = dist.store
    if store is None:
        return
    flags = {flag_name(name): str(value) for name, value in config.to_dict().items() if name not in PATHS}
    facts = {
        "the versions": f"Python {'.'.join(platform.python_version_tuple()[:2])}, torch {torch.__version__}",
        "the device": f"{devices.describe(dist.device)} in {machine.dtype}",
        "the checkpoint": f"step {resumed_step}" if resumed_step else "none",
        "the shards": hashlib.sha256(json.dumps([identity["train"], identity["val"]]).encode()).hexdigest()[:8],
        **flags,
    }
    store.set(f"facts/{dist.rank}", json.dumps([socket.gethostname(), facts]))
    if problems := json.loads(dist.once("differences", lambda: json.dumps(_find_differences(dist)))):
        store.set(f"informed/{dist.rank}", "")
        if dist.rank == 0:  # rank 0 may host the store, so it leaves last
            store.wait([f"informed/{rank}" for rank in range(dist.world_size)])
        raise UserError(*problems)


def _find_differences(dist: Distributed) -> list[str]:
    """One sentence for each fact in which another rank differs from rank 0."""
    assert dist.store is not None
    own_host, own_facts = json.loads(dist.store.get("facts/0"))
    problems: dict[str, str] = {}
    for rank in range(1, dist.world_size):
        host, facts = json.loads(dist.store.get(f"facts/{rank}"))  # waits for it
        for name in own_facts.keys() | facts.keys():
            own, other = own_facts.get(name, "unknown"), facts.get(name, "unknown")
            if own != other and name not in problems:
                problems[name] = (
                    f"the nodes differ in {name}: {other} on {host} (rank {rank}), {own} on {own_host} (rank 0). "
                    f"{HINTS.get(name, 'Pass the same flags on all nodes.')}"
                )
    return sorted(problems.values())
