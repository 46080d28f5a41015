"""How the processes of a run find each other."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

from support.cli import UserError

CONNECTING = timedelta(minutes=5)  # to torchrun's store; it may be gone, and then we should be
PATIENCE = timedelta(hours=24)  # a node may have gigabytes to download; torchrun ends us if another process fails
SAVING = timedelta(hours=1)  # others wait in a collective while rank 0 writes tens of gigabytes to a slow disk


def prepare_and_connect(prepare: Callable[[], Any], rank: int, local_rank: int, world: int, backend: str) -> Any:
    """Calls `prepare` on every rank and makes them a process group; returns what `prepare` returned here.

    The first rank of each node goes before its others, which find what it downloaded. The group is made when all are
    prepared, so that no collective times out while another node still downloads.
    """
    store, _, _ = next(torch.distributed.rendezvous("env://", rank, world, timeout=CONNECTING))
    store.set_timeout(PATIENCE)
    store = torch.distributed.PrefixStore(agree_on_attempt(store, rank, world), store)
    if local_rank > 0:
        store.wait([f"prepared/{rank - local_rank}"], PATIENCE)
    try:
        result = prepare()
    except UserError as error:
        error.this_rank_only |= local_rank > 0  # the first of this node was not in trouble
        raise
    store.set(f"prepared/{rank}", "")
    store.wait([f"prepared/{other}" for other in range(world)], PATIENCE)
    group_store = torch.distributed.PrefixStore("group", store)
    torch.distributed.init_process_group(backend, store=group_store, rank=rank, world_size=world, timeout=SAVING)
    return result


def agree_on_attempt(store: Any, rank: int, world: int) -> str:
    """A word that these processes share, and no processes before them.

    After a restart torchrun's store still has all that the processes before wrote, addresses of the dead among it, and
    the numbers of restarts that torchrun tells differ between nodes. So each rank writes a word of its own; rank 0
    answers every word it finds with its own, until each rank has confirmed: nobody else can know an answer to a new word.
    """
    own = uuid.uuid4().hex
    if rank > 0:
        store.set(f"word/{rank}", own)
        shared = store.get(f"answer/{own}").decode()  # waits for it
        store.set(f"confirmed/{shared}/{rank}", "")
        return shared
    missing = set(range(1, world))
    while missing:
        for other in missing:
            if store.check([f"word/{other}"]):
                store.set(f"answer/{store.get(f'word/{other}').decode()}", own)
        missing = {other for other in missing if not store.check([f"confirmed/{own}/{other}"])}
        time.sleep(0.05)
    return own


def on_first(action: Callable[[], Any], rank: int, least: Callable[[int], int]) -> Any:
    """What `action` returns on rank 0, None elsewhere. `least` is the minimum over ranks.

    Raises:
        UserError: on all ranks, if it did so on rank 0.
    """
    result = failure = None
    try:
        result = action() if rank == 0 else None
    except UserError as error:
        failure = error
    if not least(failure is None):
        raise failure or UserError("the first process could not go on, see there.")
    return result
