"""Memory that a model takes, computed before anything is allocated."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from support.cli import UserError
from support.files import format_bytes
from support.optim import loss
from support.runtime import devices, fsdp

RESERVED_BYTES = 10**9  # CUDA's own, and fragmentation
COMPILED_FRACTION = 0.9  # of the activations are saved by torch.compile, at least: 0.999 was measured
LAYER_BYTES = 40_000  # of the Python objects of a block, about
# Bytes that a layer saves of a token, per channel, in bf16: see test_activations_of_a_token_counted_by_hand.
LAYER_ACTIVATION_BYTES = 36


@contextlib.contextmanager
def report_out_of_memory() -> Iterator[None]:
    """Turns torch.OutOfMemoryError into a UserError that says what to do."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        reason = str(error).split(". ")[0]
        message = f"{reason}. Lower --batch-size (a step keeps its number of tokens), or use --recompute."
        raise UserError(message, this_rank_only=True) from error


def recompute_activations(blocks: Iterable[torch.nn.Module]) -> None:
    """Makes each block save only its input, and compute its activations again in the backward pass.

    This is activation checkpointing (arXiv:1604.06174): a third more arithmetic in the blocks, and the same results.
    """
    for block in blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)


# -----------------------------------------------------------------------------
# Before a model exists


def count_parameters(sizes: Mapping[str, int]) -> int:
    """Parameters of a GPT of these sizes, by field of GPTConfig. The vocabulary is not padded."""
    L, C, bias = sizes["n_layer"], sizes["n_embd"], sizes["bias"]
    block = 12 * C * C + (13 if bias else 2) * C  # attention 4 C^2, MLP 8 C^2; norms and biases
    return (sizes["vocab_size"] + sizes["block_size"]) * C + L * block + (2 if bias else 1) * C


def check_model_fits(sizes: Mapping[str, int], source: str) -> None:
    """Checks that the weights of a GPT of these sizes fit into the memory of this machine; `source` names them.

    Raises:
        UserError: they do not.
    """
    needed, available = 4 * count_parameters(sizes) + LAYER_BYTES * sizes["n_layer"], available_memory()
    if available is not None and needed > available:
        raise UserError(
            f"{source} has {count_parameters(sizes):,} parameters, which take {format_bytes(needed)}, and this machine "
            f"has {format_bytes(available)} of memory available. Use a smaller model."
        )


def check_training_fits(flags: Mapping[str, Any], vocab_size: int, device: torch.device, parts: int = 1) -> None:
    """Checks that training a GPT can fit into memory: weights, gradients, optimizer, and most of the activations.

    Args:
        flags: the sizes of the model, batch_size (on CUDA, a smaller one may be found later), optimizer, lora_rank and
            recompute.
        parts: ranks among which FSDP divides the state.

    Raises:
        UserError: it cannot, compiled or not; the flags to change are named.
    """
    sizes = {**flags, "vocab_size": vocab_size}
    check_model_fits(sizes, "the model")
    on_cuda = device.type == "cuda"
    total = devices.free_and_total_memory(device)[1] if on_cuda else available_memory()
    if total is None:
        return
    parameters, available = count_parameters(sizes), f"and {format_bytes(total)} are available"
    copies = 4 if flags["optimizer"] == "adamw" else 3  # weights, gradients, two moments (Muon: mostly one)
    persistent = 4 * parameters * (copies if flags["lora_rank"] is None else 1)
    persistent //= parts if on_cuda else 1  # ranks on a CPU share its memory
    if persistent > total:
        raise UserError(
            f"training {parameters:,} parameters takes at least {format_bytes(persistent)}, {available}. "
            "Use a smaller --model, or smaller --n-layer, --n-embd or --block-size"
            f"{', or several GPUs with --parallel fsdp' if on_cuda and parts == 1 else ''}."
        )
    B, T = flags["batch_size"], flags["block_size"]
    saved = 4 if flags["recompute"] else COMPILED_FRACTION * LAYER_ACTIVATION_BYTES  # bytes per layer and channel
    activations = saved * B * T * flags["n_layer"] * flags["n_embd"]
    if persistent + activations > total and not on_cuda:
        raise UserError(
            f"micro-batches of {B} row{'s' if B > 1 else ''} of {T} tokens take at least {format_bytes(persistent + activations)}, "
            f"{available}. "
            "Lower --batch-size (a step keeps its number of tokens) or --block-size, or use --recompute."
        )


def available_memory() -> int | None:
    """Bytes of this machine's memory that are free or can be freed, swap included, and at most a container's limit.

    None where that is not known: it is on Linux.
    """
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        kilobytes = {name: int(rest.split()[0]) for name, rest in (line.split(":") for line in lines)}
        available = 1024 * (kilobytes["MemAvailable"] + kilobytes["SwapFree"])
    except (OSError, ValueError, LookupError):
        return None
    try:
        return min(available, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    except (OSError, ValueError):  # no container, or "max"
        return available


# -----------------------------------------------------------------------------
# Training on CUDA


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of weights, gradients and optimizer, and bytes that grow with the micro-batch if nothing is compiled."""

    persistent: int
    activations: int

    @property
    def total(self) -> int:
        return self.persistent + self.activations + RESERVED_BYTES

    @property
    def minimum(self) -> float:
        """What training certainly takes, compiled or not."""
        return self.persistent + COMPILED_FRACTION * self.activations


def estimate_memory(
    model: torch.nn.Module, B: int, T: int, dtype: torch.dtype, world_size: int, device_memory: int, sharded: bool = False
) -> MemoryEstimate:  # fmt: skip
    """The memory that training on CUDA takes, with AdamW and micro-batches of (B, T) tokens.

    Args:
        model: `model(idx, targets)` returns logits and loss. Compiled or not; its weights are not read.
        dtype: precision of the matrix products.
        device_memory: of the GPU, in bytes. The chunks of the loss depend on it.
        sharded: by FSDP.
    """
    parameters = list(model.parameters())
    weights = 4 * sum(p.numel() for p in parameters)
    trained = 4 * sum(p.numel() for p in parameters if p.requires_grad)
    if sharded:  # a part of the weights, gradients and two moments; gradients until they are sent; gathered weights
        persistent = (weights + 3 * trained) // world_size + trained
        if fsdp.keeps_gathered(weights // 4, dtype, device_memory):
            persistent += dtype.itemsize * weights // 4
    else:
        copies = 3 if world_size == 1 else 4  # gradients, two moments, and the buckets in which DDP sends gradients
        persistent = weights + copies * trained
    width = len(model.get_parameter("lm_head.weight"))  # the padded vocabulary
    rows = min(loss.chunk_rows(loss.chunk_numel("cuda", device_memory), width), B * T)
    compiled = hasattr(model, "_orig_mod")
    logit_bytes = dtype.itemsize + (0 if compiled else 8)  # eager: logits and log-probabilities in fp32, too
    return MemoryEstimate(persistent, saved_bytes(model, B, T, dtype) + logit_bytes * rows * width)


def saved_bytes(model: torch.nn.Module, B: int, T: int, dtype: torch.dtype) -> int:
    """Bytes that autograd saves in the forward pass of (B, T) tokens, not compiled; counted on tensors without data."""
    from torch._subclasses.fake_tensor import FakeTensorMode  # loads the compiler

    saved: dict[int, torch.UntypedStorage] = {}

    def count(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    # Without dropout: its masks are small, but with it attention on a CPU, which this imitates, saves (T, T) matrices.
    in_training = [module for module in model.modules() if module.training]
    model.eval()
    with FakeTensorMode(), torch.compiler.set_stance("force_eager"):
        tensors = {
            name: torch.empty(t.shape, dtype=t.dtype, requires_grad=t.requires_grad)
            for name, t in (*model.named_parameters(), *model.named_buffers())
        }
        tokens = torch.zeros((B, T), dtype=torch.int64)
        hooks = torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor)
        with hooks, torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
            torch.func.functional_call(model, tensors, (tokens, tokens))
        weights = {t.untyped_storage()._cdata for t in tensors.values()}
    for module in in_training:
        module.training = True
    return sum(storage.nbytes() for address, storage in saved.items() if address not in weights)
