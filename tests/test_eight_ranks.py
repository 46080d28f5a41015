"""Eight ranks on PyTorch's fake process group: what a rank of them keeps and sends, against arithmetic."""

from __future__ import annotations

import multiprocessing

import pytest
import torch
from helpers import FORKS
from torch import distributed
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from support.runtime import devices, fsdp
from train_gpt2 import GPT, GPTConfig

RANKS = 8
MICRO_STEPS = 3  # what is sent in each, and what once per step?
SMALL = GPTConfig(block_size=64, n_layer=3, n_head=2, n_embd=128)
IDX = torch.zeros((1, 8), dtype=torch.int64)  # what is sent does not depend on the tokens


class SentBytes(TorchDispatchMode):
    """Counts what a ring sends for the collectives in it: (W - 1) / W of a tensor to gather or to reduce-scatter it."""

    total = 0.0

    def count(self, tensor: torch.Tensor, times: int = 1) -> None:
        self.total += times * (RANKS - 1) / RANKS * tensor.numel() * tensor.element_size()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function._schema.name
        if name == "c10d::_allgather_base_":
            self.count(args[0])  # its output
        elif name == "c10d::_reduce_scatter_base_":
            self.count(args[1])  # its input
        elif name.startswith("c10d::"):
            assert sum(tensor.numel() for tensor in args[0]) <= 1000, name  # DDP agrees on its buckets
        return function(*args, **(kwargs or {}))


def sharded(model: GPT, reshard: bool) -> torch.nn.Module:
    """As on CUDA: blocks are sent in bf16. Checks that each rank has an eighth of the weights."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    distributed.fsdp.MixedPrecisionPolicy = lambda dtype, **options: MixedPrecisionPolicy(torch.bfloat16, **options)
    fsdp.reshard_after_forward = lambda *args: reshard
    parameters = sum(p.numel() for p in model.parameters())
    wrapped = fsdp.ShardedModel(model, torch.device("cpu"), torch.bfloat16, compiled=False)
    assert sum(p.to_local().numel() for p in model.parameters()) == pytest.approx(parameters / RANKS, rel=0.01)
    return wrapped


def ring_bytes(layout: str, model: GPT) -> float:
    """Returns the bytes that each rank has to send in a step (Patarasu and Yuan, doi:10.1016/j.jpdc.2008.09.002).

    Gradients are fp32, and sent once per step; gathered blocks are bf16, embeddings fp32. The embeddings stay gathered
    during a micro-step.
    """
    parameters = sum(p.numel() for p in model.parameters())
    blocks = sum(p.numel() for p in model.transformer.h.parameters())
    if layout == "ddp":
        return (RANKS - 1) / RANKS * 2 * 4 * parameters
    gathers, roots = (2 * MICRO_STEPS, MICRO_STEPS) if layout == "fsdp, resharding" else (1, 1)
    return (RANKS - 1) / RANKS * (4 * parameters + gathers * 2 * blocks + roots * 4 * (parameters - blocks))


def sent_in_a_step(layout: str, config: GPTConfig, queue: multiprocessing.Queue) -> None:
    """Puts the bytes that the first of eight ranks sends in a step, and how many the ring needs."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.set_num_threads(1)
    norm = torch.nn.functional.layer_norm  # autocast on CUDA computes it in fp32, and accepts weights in bf16
    torch.nn.functional.layer_norm = lambda x, size, weight, bias, eps: norm(
        x.float(), size, weight.float(), bias.float(), eps
    )
    distributed.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    model, reshard = GPT(config), layout == "fsdp, resharding"
    needed, sent = ring_bytes(layout, model), SentBytes()
    if layout == "ddp":
        wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)

        def count_bucket(_, bucket):  # in place of its all-reduce, which sends both ways
            sent.count(bucket.buffer(), times=2)
            done = torch.futures.Future()
            done.set_result(bucket.buffer())
            return done

        wrapped.register_comm_hook(None, count_bucket)
    else:
        wrapped = sharded(model, reshard)
    with sent:
        for micro_step in range(MICRO_STEPS):
            wrapped.require_backward_grad_sync = micro_step == MICRO_STEPS - 1
            with devices.autocast(torch.device("cpu"), torch.bfloat16):
                _, loss = wrapped(IDX, IDX)
            loss.backward()
    queue.put((sent.total, needed))


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout, config",
    [("ddp", SMALL), ("fsdp, gathered", SMALL), ("fsdp, resharding", GPTConfig())],
    ids=["ddp", "fsdp, gathered", "fsdp, resharding, full size"],
)
def test_a_step_sends_what_a_ring_needs(layout, config):
    queue = FORKS.Queue()
    process = FORKS.Process(target=sent_in_a_step, args=(layout, config, queue))
    process.start()
    sent, needed = queue.get(timeout=200)
    process.join()
    assert sent > 0 and sent == pytest.approx(needed, rel=0.01)
