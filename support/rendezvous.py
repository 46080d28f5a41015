"""How the processes of a run find each other."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

PATIENCE = timedelta(hours=24)  # a node may have gigabytes to download; torchrun ends us if another process fails


def prepare_and_connect(prepare: Callable[[], Any], rank: int, local_rank: int, world: int, backend: str) -> Any:
    """Calls `prepare` on every rank and makes them a process group; returns what `prepare` returned here.

    The first rank of each node goes before its others, which find what it downloaded. The group is made when all are
    prepared, so that no collective times out while another node still downloads.
    """
    store, _, _ = next(torch.distributed.rendezvous("env://", rank, world, timeout=PATIENCE))
    # After a restart torchrun's store still has what the processes before wrote, addresses of the dead among it.
    store = torch.distributed.PrefixStore(f"attempt/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
    if local_rank > 0:
        store.wait([f"prepared/{rank - local_rank}"], PATIENCE)
    result = prepare()
    store.set(f"prepared/{rank}", "")
    store.wait([f"prepared/{other}" for other in range(world)], PATIENCE)
    group_store = torch.distributed.PrefixStore("group", store)
    torch.distributed.init_process_group(backend, store=group_store, rank=rank, world_size=world)
    return result
