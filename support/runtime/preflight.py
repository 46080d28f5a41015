"""Before the first step of several ranks: whether they agree, and how fast the network between them is."""

from __future__ import annotations

import hashlib
import json
import platform
import socket
import time
from collections.abc import Mapping

import torch
from torch import distributed, nn

from support.cli import UserError, flag_name
from support.files import format_bytes
from support.runtime import devices
from support.runtime.distributed import Distributed
from support.runtime.options import RunOptions
from support.runtime.watchdog import Watchdog

HINTS = {
    "Python": "Install one version on all nodes.",
    "torch": "Install one version on all nodes.",
    "the device": "Use GPUs of one kind.",
    "the checkpoint": "All nodes must see the same folder at --out.",
    "the train shards": "Copy those of one node to the others.",
    "the val shards": "Copy those of one node to the others.",
}  # the others are flags
PATHS = {"data", "text", "out", "resume", "init_from", "hellaswag_data"}  # flags that may differ between nodes
ALIVE_SECONDS, CONNECT_SECONDS = 20, 50  # after which ranks are looked for, and the run ends
BUFFER_BYTES = 2**28  # that are sent; more gradients take proportionally longer


def connect(
    dist: Distributed, watchdog: Watchdog, options: RunOptions, data: Mapping[str, object], step: int, model: nn.Module
) -> float:  # fmt: skip
    """Checks that all ranks agree, connects them, and measures how long an all-reduce of the gradients takes.

    Args:
        data: identifies the shards, see `data_identity`.
        step: of the checkpoint that this rank has found to resume from, or 0.

    Returns:
        The time of the all-reduce in seconds, 0 with one process. It is most of what DDP sends in a step.

    Raises:
        UserError: ranks differ in versions, GPUs, flags, shards or checkpoints; one line each.
    """
    if dist.world_size == 1:
        return 0.0
    watchdog.start("the comparison of versions and flags", ALIVE_SECONDS, CONNECT_SECONDS)
    try:
        check_ranks_agree(dist, collect_facts(dist, options, data, step))
    except UserError:
        watchdog.close()
        raise
    watchdog.start("the first all-reduce", ALIVE_SECONDS, CONNECT_SECONDS)
    dist.init_process_group()
    gradient_bytes = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    buffer = torch.zeros(min(gradient_bytes, BUFFER_BYTES) // 4, device=dist.device)
    synchronize = devices.synchronizer(dist.device)
    distributed.all_reduce(buffer[:1])  # connects
    synchronize()
    watchdog.start("measuring the network")
    distributed.all_reduce(buffer)
    synchronize()
    started = time.perf_counter()
    distributed.all_reduce(buffer)
    synchronize()
    seconds = (time.perf_counter() - started) * gradient_bytes / buffer.nbytes
    watchdog.start("preparing the model")
    dist.print0(
        f"network an all-reduce of {format_bytes(gradient_bytes)}, as of the gradients, takes {seconds:.3g}s: "
        f"{gradient_bytes / seconds / 1e9:.3g} GB/s"
    )
    return seconds


def collect_facts(dist: Distributed, options: RunOptions, data: Mapping[str, object], step: int) -> dict[str, str]:
    """What must be the same on all ranks, by the name that an error message gives it."""
    flags = {flag_name(name): str(value) for name, value in options.to_dict().items() if name not in PATHS}
    splits = {f"the {split} shards": _digest(data[split]) for split in ("train", "val")}
    return {
        "Python": ".".join(platform.python_version_tuple()[:2]),
        "torch": torch.__version__,
        "the device": devices.describe(dist.device),
        "the checkpoint": f"step {step}" if step else "none",
        **splits,
        **flags,
    }


def check_ranks_agree(dist: Distributed, facts: Mapping[str, str]) -> None:
    """Checks through torchrun's store, before the ranks are connected, that they have the same facts.

    Raises:
        UserError: on all ranks, with one line for each fact that differs. It names the first rank that does, and its
            node.
    """
    store = dist.store
    assert store is not None
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
    """A value of the store, once it is there. All ranks wait at this line: the watchdog names those that do not."""
    return store.get(key).decode()


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:8]
