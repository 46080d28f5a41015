"""Before several ranks are connected: whether they agree on what they are about to train."""

from __future__ import annotations

import hashlib
import json
import platform
import socket
from collections.abc import Mapping

import torch
from torch import distributed

from support.cli import UserError, flag_name
from support.data.shards import DataIdentity
from support.runtime import devices
from support.runtime.distributed import STEP_TIMEOUT, Distributed
from support.runtime.options import RunOptions

HINTS = {
    "Python": "Install one version on all nodes.",
    "torch": "Install one version on all nodes.",
    "the device": "Use GPUs of one kind.",
    "the checkpoint": "All nodes must see the same folder at --out.",
    "the train shards": "Copy those of one node to the others.",
    "the val shards": "Copy those of one node to the others.",
}  # the others are flags
PATHS = {"data", "text", "out", "resume", "init_from", "hellaswag_data"}  # flags that may differ between nodes


def check_ranks_agree(dist: Distributed, config: RunOptions, identity: DataIdentity, resumed_step: int) -> None:
    """Checks before the ranks are connected that they have the same versions, GPUs, flags, shards and checkpoint.

    Args:
        identity: of the shards that this rank reads.
        resumed_step: of the checkpoint that it resumes from, or 0.

    Raises:
        UserError: on all ranks, with one line for each fact that differs. It names the first rank that does, and its
            node.
    """
    if dist.world_size > 1:
        compare_facts(dist, collect_facts(dist, config, identity, resumed_step))


def collect_facts(dist: Distributed, config: RunOptions, identity: DataIdentity, step: int) -> dict[str, str]:
    """What must be the same on all ranks, by the name that an error message gives it."""
    flags = {flag_name(name): str(value) for name, value in config.to_dict().items() if name not in PATHS}
    return {
        "Python": ".".join(platform.python_version_tuple()[:2]),
        "torch": torch.__version__,
        "the device": devices.describe(dist.device),
        "the checkpoint": f"step {step}" if step else "none",
        "the train shards": _digest(identity["train"]),
        "the val shards": _digest(identity["val"]),
        **flags,
    }


def compare_facts(dist: Distributed, facts: Mapping[str, str]) -> None:
    """Compares the facts of all ranks through torchrun's store.

    Raises:
        UserError: as in `check_ranks_agree`.
    """
    store = dist.store
    assert store is not None
    store.set_timeout(STEP_TIMEOUT)  # from here on, all ranks do the same
    store.set(f"facts/{dist.rank}", json.dumps([socket.gethostname(), facts]))
    if dist.rank == 0:
        problems: dict[str, str] = {}
        for other in range(1, dist.world_size):
            host, theirs = json.loads(_wait_for(store, f"facts/{other}"))
            for name in facts.keys() | theirs.keys():
                a, b = facts.get(name, "unknown"), theirs.get(name, "unknown")
                if a != b and name not in problems:
                    problems[name] = (
                        f"the nodes differ in {name}: {b} on {host} (rank {other}), {a} on {socket.gethostname()} "
                        f"(rank 0). {HINTS.get(name, 'Pass the same flags on all nodes.')}"
                    )
        store.set("disagreements", json.dumps(sorted(problems.values())))
    if disagreements := json.loads(_wait_for(store, "disagreements")):
        store.set(f"informed/{dist.rank}", "")
        for other in range(dist.world_size if dist.rank == 0 else 0):  # its end may be that of the store
            _wait_for(store, f"informed/{other}")
        raise UserError(*disagreements)


def _wait_for(store: distributed.Store, key: str) -> str:
    """A value of the store, once it is there."""
    return store.get(key).decode()


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:8]
