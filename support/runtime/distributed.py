"""The processes of a run: torchrun's environment, how they find each other, what they tell each other."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
from torch import distributed

from support import cli, torch_private
from support.cli import UserError, print_lines
from support.runtime import devices

T = TypeVar("T")

CONNECT_TIMEOUT = timedelta(minutes=5)  # to rank 0's store, which may start later than this process
TORCHRUN_TIMEOUT = timedelta(seconds=20)  # to torchrun's store, which started before us, or is dead
START_TIMEOUT = timedelta(minutes=30)  # until all processes have started; a node may have to be replaced first
# How long a collective waits for a rank. The long timeout holds until the first step has ended (a node may download
# gigabytes, and that step compiles) and when the run ends (rank 0 may write gigabytes to a slow disk).
LONG_TIMEOUT = timedelta(hours=2)
STEP_TIMEOUT = timedelta(minutes=10)  # in between: rank 0 may generate samples


@dataclass(frozen=True)
class Distributed:
    """This process, one of the `world_size` that torchrun started: its rank, its rank on its node, and its device.

    All are connected from the start: by NCCL for tensors on CUDA, and by gloo for all other tensors and for objects.
    """

    rank: int
    local_rank: int
    world_size: int
    device: torch.device = torch.device("cpu")

    @classmethod
    def from_environment(cls, out: str) -> Distributed:
        """Reads torchrun's environment variables and connects the processes; without them, this is the only one.

        If a process waits too long under NCCL, PyTorch's flight recorder writes the last collectives to the folder
        `out`; read them with `torchfrtrace`.

        Raises:
            UserError: the variables are incomplete or not valid, or a process did not start.
        """
        if os.environ.get("WORLD_SIZE", "1") == "1":
            return ONE_PROCESS
        values = [os.environ.get(name, "") for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT")]
        if all(value.isdecimal() for value in values) and "MASTER_ADDR" in os.environ:
            rank, local_rank, world_size, _ = map(int, values)
            if local_rank <= rank < world_size:
                connect(rank, world_size, out)
                return cls(rank, local_rank, world_size)
        raise UserError(
            f"WORLD_SIZE is {values[2]!r} in the environment, but RANK, LOCAL_RANK, MASTER_ADDR or MASTER_PORT is missing "
            "or does not fit. Start with torchrun, or unset WORLD_SIZE for a single process.",
            this_rank_only=True,
        )

    def with_device(self, name: str) -> Distributed:
        """Returns this process with a device: its own GPU, or the CPU cores that it may use.

        Args:
            name: "cuda", "mps", "cpu", or "auto" for the first of them that this machine has.

        Raises:
            UserError: this machine has no such device, or too few of them for its processes.
        """
        device_type = devices.pick_device_type(name)
        if device_type == "mps" and self.world_size > 1:
            raise UserError("on an Apple GPU, only one process can train. Run python train_gpt2.py, without torchrun.")
        if device_type != "cuda":
            if self.world_size > 1:
                devices.share_cpu_cores()
            return replace(self, device=torch.device(device_type))
        if self.local_rank >= torch.cuda.device_count():
            raise UserError(
                f"this node has more processes than GPUs ({torch.cuda.device_count()}). Lower --nproc_per_node."
            )
        torch.cuda.set_device(self.local_rank)
        devices.check_kernels()
        return replace(self, device=torch.device("cuda", self.local_rank))

    def print0(self, text: str) -> None:
        """Prints lines on rank 0."""
        if self.rank == 0:
            print_lines(text)

    # All ranks must call the methods below, in the same order

    def all_gather(self, value: T) -> list[T]:
        """Returns the values of all ranks, in the order of the ranks, on every rank."""
        values: list[Any] = [value] * self.world_size
        if self.world_size > 1:
            distributed.all_gather_object(values, value)
        return values

    @contextlib.contextmanager
    def failing_together(self) -> Iterator[None]:
        """Waits until all ranks have left the block.

        Raises:
            UserError: on all ranks, if the block raised an error on any of them. A rank that failed raises its own instead.
        """
        error: Exception | None = None
        try:
            yield
        except Exception as caught:
            error = caught
        failed = self.all_gather(error is not None)
        if error:
            if isinstance(error, UserError):
                error.this_rank_only = not all(failed)  # the first rank of the node may not have the problem
            raise error
        if any(failed):
            time.sleep(cli.PRINT_SECONDS)  # for that rank's own message
            raise UserError(f"rank {failed.index(True)} could not prepare the run. See its message.")

    @contextlib.contextmanager
    def local_rank_zero_first(self) -> Iterator[None]:
        """Runs the block on the first rank of each node before the others, which then find what it downloaded.

        Raises:
            UserError: as in `failing_together`.
        """
        for is_first in (True, False):
            with self.failing_together():
                if is_first == (self.local_rank == 0):
                    yield

    def once(self, function: Callable[[], T], per_node: bool = False) -> T:
        """Calls `function` on rank 0 and returns its result, which must be picklable, on all ranks.

        With `per_node`, it is called on the first rank of each node, for all ranks of that node.

        Raises:
            UserError: as in `failing_together`.
        """
        caller = self.rank - self.local_rank if per_node else 0
        result = None
        with self.failing_together():
            if self.rank == caller:
                result = function()
        return cast(T, self.all_gather(result)[caller])

    def all_reduce_mean(self, tensor: torch.Tensor) -> torch.Tensor:
        """Averages a tensor over the ranks, in place."""
        if self.world_size > 1:
            distributed.all_reduce(tensor)
            tensor /= self.world_size  # gloo has no mean
        return tensor

    def all_reduce_sum(self, *values: float) -> list[float]:
        """Sums each value over the ranks, in float64."""
        tensor = torch.tensor(values, dtype=torch.float64)
        if self.world_size > 1:
            distributed.all_reduce(tensor)
        return tensor.tolist()

    def connect_gpus(self) -> None:
        """Makes NCCL connect, and allocate its buffers, for the collectives of DDP and FSDP.

        If it cannot, it says nothing and waits, so this has the short timeout.
        """
        if self.world_size > 1 and self.device.type == "cuda":
            self.end_long_waits()
            shard = torch.zeros(-(-(1 << 20) // self.world_size), device=self.device)  # 4 MB in all
            full = shard.repeat(self.world_size)
            distributed.all_reduce(full)
            torch_private.reduce_scatter(shard, full)
            torch_private.all_gather(full, shard)
            devices.synchronize(self.device)
            self.allow_long_waits()

    def allow_long_waits(self) -> None:
        """Lets collectives wait for hours for a rank that compiles, downloads or writes."""
        self._set_timeout(LONG_TIMEOUT)

    def end_long_waits(self) -> None:
        """Lets a collective wait for minutes only: if a rank is stopped or cut off, it then ends this process."""
        self._set_timeout(STEP_TIMEOUT)

    def _set_timeout(self, timeout: timedelta) -> None:
        if self.world_size > 1:
            torch_private.set_collective_timeout(timeout)

    def close(self) -> None:
        """Leaves the process group."""
        if self.world_size > 1:
            distributed.destroy_process_group()


ONE_PROCESS = Distributed(rank=0, local_rank=0, world_size=1)


@contextlib.contextmanager
def report_lost_processes(how_to_go_on: Callable[[], str] | None = None) -> Iterator[None]:
    """Turns gloo's and the store's errors about a process that has ended or does not answer into a UserError.

    Args:
        how_to_go_on: returns sentences to append to the error message.

    Raises:
        UserError: in place of such an error.
    """
    try:
        yield
    except RuntimeError as error:
        of_gloo, of_store = "gloo/transport" in str(error), isinstance(error, distributed.DistStoreError)
        if not (of_gloo or of_store or isinstance(error, distributed.DistNetworkError)):
            raise
        problem = "lost the connection to torchrun or to another process of this run"
        if of_store or of_gloo and re.search("timed out|timeout", str(error), re.IGNORECASE):
            problem = "waited too long for another process of this run: it is stopped, cut off, or very slow"
        rank = f"rank {os.environ.get('RANK', 0)} on {socket.gethostname()}"
        lost = UserError(f"{rank} {problem}. See the messages of all processes.", this_rank_only=True)
        raise (lost.with_hint(how_to_go_on()) if how_to_go_on else lost) from error


# -----------------------------------------------------------------------------
# Finding each other


def connect(rank: int, world_size: int, out: str) -> None:
    """Connects this process to the others; PyTorch's flight recorder writes to the folder `out`."""
    launched_by_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    timeout = TORCHRUN_TIMEOUT if launched_by_torchrun else CONNECT_TIMEOUT
    store, _, _ = next(distributed.rendezvous("env://", rank, world_size, timeout=timeout))
    store.set_timeout(START_TIMEOUT)
    attempt = agree_on_attempt(store, rank, world_size)
    if rank == 0:
        forget_timeout(store)
    # The attempt is in the name, so a restart does not overwrite the traces that explain it.
    os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", os.path.join(out, f"nccl_trace_{attempt[:8]}_rank_"))
    store = distributed.PrefixStore(attempt, store)
    distributed.init_process_group(backend(), store=store, rank=rank, world_size=world_size, timeout=LONG_TIMEOUT)


def backend() -> str:
    has_nccl = torch.cuda.is_available() and distributed.is_nccl_available()
    return "cpu:gloo,cuda:nccl" if has_nccl else "gloo"


def agree_on_attempt(store: distributed.Store, rank: int, world_size: int) -> str:
    """Returns a random name that these processes share, and that no earlier process has used.

    After a restart, torchrun's store still holds what the earlier processes wrote, including the addresses of dead ones, and
    the restart counts that torchrun reports differ between nodes. So each rank writes a new nonce. Rank 0 replies to
    every nonce it finds with its own nonce, until every rank has confirmed receiving that one. An earlier process cannot
    confirm it, because it never learns it.

    Raises:
        UserError: a rank did not start in time.
    """
    own, deadline = uuid.uuid4().hex, time.monotonic() + START_TIMEOUT.total_seconds()
    if rank > 0:
        store.set(f"nonce/{rank}", own)
        shared = store.get(f"answer/{own}").decode()  # waits until it is there
        store.set(f"confirmed/{shared}/{rank}", "")
        return shared
    missing = set(range(1, world_size))
    while missing:
        if time.monotonic() > deadline:
            raise UserError(f"rank {min(missing)} did not start in time. See the messages of all nodes.")
        for other in missing:
            if store.check([f"nonce/{other}"]):
                store.set(f"answer/{store.get(f'nonce/{other}').decode()}", own)
        missing = {other for other in missing if not store.check([f"confirmed/{own}/{other}"])}
        time.sleep(0.05)
    return own


def forget_timeout(store: distributed.Store) -> None:
    """Deletes the key that an earlier attempt's process group left in torchrun's store after a timeout under NCCL.

    NCCL's monitor writes that key without any prefix. The restarted processes' monitors would find it, and abort them 8
    minutes later (pytorch#196968). Once the ranks have agreed on an attempt, no earlier process is left to write it.
    """
    while isinstance(store, distributed.PrefixStore):
        store = store.underlying_store
    store.delete_key("exception_dump")
