"""Fully sharded data parallelism, PyTorch's FSDP2 (arXiv:2304.11277): models larger than the memory of one GPU.

Each rank keeps an equal shard of every weight, gradient and optimizer tensor, a DTensor sharded along dimension 0. The
weights of a block are gathered for its forward and its backward pass, and freed afterwards; gradients are averaged
into the shards. Most functions here also accept ordinary tensors and models, and then do nothing.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import distributed, nn

from support import torch_private
from support.runtime import devices

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

Model = TypeVar("Model", bound=nn.Module)
GATHERED_FRACTION = 1 / 8  # fraction of a GPU's memory up to which gathered weights are kept during a step


class ShardedModel(nn.Module):
    """A model whose weights are sharded over the ranks; it is called like DistributedDataParallel.

    Each block is gathered as a whole when its turn comes. The rest of the model stays gathered during a micro-step.

    Args:
        model: a GPT. It has its weights on rank 0; the other ranks have it on the meta device (`weights_on_rank_zero`), and
            receive the weights one block at a time. It is changed in place: its parameters become DTensors.
        dtype: precision of the matrix products. On CUDA, the blocks' weights are gathered in this precision; gradients
            are averaged in fp32.
        compiled: compile each block and the loss separately, as communication cannot be compiled.
        alone: allocate what training allocates, but send nothing and wait for no rank. All weights are 0.

    Weights are gathered once per step where memory allows, otherwise (`reshard_after_forward`) twice in each
    micro-step.
    """

    def __init__(self, model: Any, device: torch.device, dtype: torch.dtype, compiled: bool, alone: bool = False):
        from torch.distributed import fsdp
        from torch.distributed.device_mesh import DeviceMesh

        super().__init__()
        # the existing group: init_device_mesh may add one with NCCL, which refuses two ranks on one GPU
        mesh = DeviceMesh.from_group(cast(distributed.ProcessGroup, distributed.group.WORLD), device.type)
        device_memory = devices.free_and_total_memory(device)[1] if device.type == "cuda" else None
        parameters = sum(p.numel() for p in model.parameters())
        self.reshard_after_forward = reshard_after_forward(parameters, dtype, device_memory)
        self.require_backward_grad_sync = True  # as in DistributedDataParallel: false in all but the last micro-step
        # Between matrix products, activations stay in fp32, as under autocast.
        policy = fsdp.MixedPrecisionPolicy(
            dtype if device.type == "cuda" else None, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
        for block in model.transformer.h:
            _receive_weights(block, device, alone)
            if compiled:
                block.forward = torch.compile(block.forward, dynamic=False)
            fsdp.fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=self.reshard_after_forward)
        _receive_weights(model, device, alone)
        if compiled:  # in effect only the loss: the loop over the blocks cannot be compiled
            model.forward = torch.compile(model.forward, dynamic=False)
        fsdp.fully_shard(model, mesh=mesh, reshard_after_forward=False)
        for module in (*model.transformer.h, model) if alone else ():
            module.set_custom_all_gather(_NothingSent())
            module.set_custom_reduce_scatter(_NothingSent())
        self.module: nn.Module = model
        devices.trim_memory(device)  # rank 0 had all weights

    def forward(self, idx: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        sharded, last = cast("FSDPModule", self.module), self.require_backward_grad_sync
        sharded.set_requires_gradient_sync(last)
        sharded.set_reshard_after_backward(last or self.reshard_after_forward)
        return self.module(idx, targets)


def reshard_after_forward(parameters: int, dtype: torch.dtype, device_memory: float | None) -> bool:
    """Returns whether a rank frees the gathered weights after each pass, because they are too large to keep during a step."""
    return device_memory is not None and dtype.itemsize * parameters > GATHERED_FRACTION * device_memory


def weights_on_rank_zero(sharded: bool, rank: int) -> contextlib.AbstractContextManager[object]:
    """Returns a context in which a sharded model gets memory on rank 0 only; elsewhere it is on the meta device."""
    return torch.device("meta") if sharded and rank > 0 else contextlib.nullcontext()


class _NothingSent:
    """Replaces FSDP's all-gather and reduce-scatter; it only allocates what they write to."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.zeros(*size, dtype=dtype, device=device)

    def __call__(self, *args: object, **options: object) -> None:
        pass


def _receive_weights(module: nn.Module, device: torch.device, alone: bool) -> None:
    """Replaces the parameters with rank 0's, on `device`. Tied parameters stay tied; sharded ones are skipped."""
    received: dict[nn.Parameter, nn.Parameter] = {}
    for submodule in module.modules():
        for name, parameter in submodule.named_parameters(recurse=False):
            if hasattr(parameter, "full_tensor"):
                continue
            if parameter not in received:
                has_weights = not parameter.is_meta
                tensor = parameter.detach().to(device) if has_weights else torch.zeros_like(parameter, device=device)
                if not alone:
                    distributed.broadcast(tensor, src=0)
                received[parameter] = nn.Parameter(tensor, parameter.requires_grad)
            setattr(submodule, name, received[parameter])


# -----------------------------------------------------------------------------
# Evaluation. Ranks score different numbers of batches, and one rank alone generates text, so they cannot gather weights
# in each forward pass.


def without_weights(model: Model) -> Model:
    """Returns a copy of the model on the meta device, for `full_weights` to fill."""
    on_meta = {id(p): nn.Parameter(p.to("meta"), p.requires_grad) for p in model.parameters()}
    return copy.deepcopy(model, on_meta)


@contextlib.contextmanager
def full_weights(eval_model: nn.Module, model: nn.Module) -> Iterator[None]:
    """Gives `eval_model` the weights of the sharded `model`, on every rank, within the block. All ranks must enter it.

    Without FSDP both are the same model, compiled or not, and nothing happens.
    """
    eval_model = torch_private.uncompiled(eval_model)
    if eval_model is model:
        yield
        return
    _gather_weights(eval_model, model)
    yield
    eval_model.to("meta")  # frees the weights


@torch.no_grad()
def _gather_weights(eval_model: nn.Module, model: nn.Module) -> None:
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # after a forward pass without gradients, some weights are still gathered, and not DTensors
    full = {parameter: full_tensor(parameter) for parameter in model.parameters()}  # a tied parameter once
    weights = {name: full[parameter] for name, parameter in model.state_dict(keep_vars=True).items()}
    eval_model.load_state_dict(weights, assign=True)


# -----------------------------------------------------------------------------
# Tensors


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the full tensor of a DTensor, and any other tensor unchanged. All ranks must call it."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def shard_like(tensor: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Shards a tensor, which every rank holds in full, in the same way as `other`.

    Returns the tensor unchanged if `other` is not a DTensor, or has a different shape (like AdamW's `step`).
    """
    if not hasattr(other, "full_tensor") or tensor.shape != other.shape:
        return tensor
    from torch.distributed.tensor import DTensor, distribute_tensor

    other = cast(DTensor, other)
    return distribute_tensor(tensor, other.device_mesh, other.placements, src_data_rank=None)
