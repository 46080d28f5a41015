"""The memory that a model takes, computed before anything is allocated."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from support.cli import UserError, format_bytes
from support.config import TrainConfig
from support.optim import layers, loss
from support.runtime import devices, fsdp

CUDA_BYTES = 10**9  # CUDA's context, and fragmentation
PROGRAM_BYTES = 2.5e8  # on a CPU: Python and PyTorch


def recompute_activations(blocks: Iterable[nn.Module]) -> None:
    """Makes each block save only its input, and recompute its activations in the backward pass.

    This is activation checkpointing (arXiv:1604.06174): a third more arithmetic in the blocks, and the same results.
    """
    for block in blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)


# -----------------------------------------------------------------------------
# The memory that training takes. N parameters, V x C of them in the padded embedding; L layers, C channels, T tokens of
# context, B rows of a micro-batch.


def block_weights(n_layer: int, n_embd: int) -> int:
    """Returns the number of weights in the blocks' matrices: each block has 4 C^2 for attention and 8 C^2 for the MLP."""
    return 12 * n_layer * n_embd**2


def count_published(model: nn.Module) -> int:
    """Counts the parameters of a GPT as its files have them: without LoRA's, and without the rows that pad the vocabulary."""
    config: Any = model.config
    numels = [p.numel() for name, p in model.named_parameters() if ".lora_" not in name]
    return sum(numels) - (config.padded_vocab_size - config.vocab_size) * config.n_embd


class Sizes(NamedTuple):
    """The sizes of a model."""

    n_layer: int
    n_head: int
    n_embd: int
    block_size: int
    vocab_size: int  # padded
    parameters: int  # with the padded vocabulary, as they are in memory
    trained: int  # trainable parameters; with LoRA, only a few
    dropout: float = 0.0

    @classmethod
    def of(cls, model: nn.Module) -> Sizes:
        config: Any = model.config
        numels = [(p.numel(), p.requires_grad) for p in model.parameters()]
        trained = sum(numel for numel, requires_grad in numels if requires_grad)
        vocab_size, parameters = len(model.get_parameter("lm_head.weight")), sum(numel for numel, _ in numels)
        shape = (config.n_layer, config.n_head, config.n_embd, config.block_size)
        return cls(*shape, vocab_size, parameters, trained, config.dropout)

    @property
    def block_parameters(self) -> int:
        return block_weights(self.n_layer, self.n_embd)


@dataclass(frozen=True)
class Layout:
    """What decides, besides the sizes of the model and of a micro-batch, how much memory training takes."""

    step_tokens: int  # over all devices
    dtype: torch.dtype  # of matrix products
    world_size: int = 1
    sharded: bool = False  # by FSDP
    recompute: bool = False
    compiled: bool = False
    optimizer: str = "adamw"
    saves: bool = True  # checkpoints

    @classmethod
    def of(cls, config: TrainConfig, dtype: torch.dtype, world_size: int, compiled: bool) -> Layout:
        """Returns the layout of a run on so many devices."""
        return cls(
            config.total_batch_size, dtype, world_size, config.shards_weights(world_size), config.recompute, compiled,
            config.optimizer, saves=config.checkpoint_every != 0,
        )  # fmt: skip


class TrainingMemory(NamedTuple):
    """Bytes on each rank at the peak of a step, by purpose."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    buffers: float
    program: float

    @property
    def total(self) -> float:
        return sum(self)


def optimizer_bytes(sizes: Sizes, optimizer: str) -> int:
    """Returns the bytes of optimizer state.

    AdamW keeps two fp32 moments per trained weight. Muon keeps one for the blocks' matrices, and leaves the rest to AdamW.
    """
    return 8 * sizes.trained - (4 * sizes.block_parameters if optimizer == "muon" else 0)


def checkpoint_bytes(sizes: Sizes, optimizer: str) -> int:
    """Returns the bytes of a checkpoint: all weights, and the optimizer state of the trained ones."""
    return 4 * sizes.parameters + optimizer_bytes(sizes, optimizer)


def saving_bytes(sizes: Sizes, optimizer: str) -> int:
    """Returns the bytes of host memory that rank 0 takes to save a checkpoint.

    They are a copy of the state, which is written while training continues, and the blocks' matrices once more, transposed
    for Hugging Face.
    """
    return checkpoint_bytes(sizes, optimizer) + 4 * sizes.block_parameters


def training_memory(sizes: Sizes, layout: Layout, B: int, device_memory: float | None) -> TrainingMemory:
    """Returns the bytes on each device at the peak of a step, with micro-batches of B rows.

    FSDP is ZeRO (arXiv:1910.02054), stage 3 or, where the weights stay gathered, stage 2.

    Args:
        device_memory: the GPU's memory in bytes; None for a CPU.
    """
    L, nh, C, T, V, N, trained, dropout = sizes
    dtype, world_size, sharded = layout.dtype, layout.world_size, layout.sharded
    on_gpu, itemsize, blocks = device_memory is not None, dtype.itemsize, sizes.block_parameters
    tokens, embedding, accumulates = B * T, V * C, layout.step_tokens > world_size * B * T
    parts = world_size if sharded else 1
    # What a layer saves per token in bf16, by its inputs: ln_1 2C, c_attn 2C, attention 6C + 2C and a number per head,
    # c_proj (shared with attention), ln_2 2C, c_fc 2C, GELU 8C, c_proj 8C. In fp32, every value takes 4 bytes. Attention
    # that is not fused saves T weights per head instead of a number, and with dropout its mask and what it leaves. The
    # norms' inputs are fp32 in fp16, and on a GPU also in bf16, where autocast casts them, unless the model is compiled.
    # With LoRA, it is about the same: LoRA's matrices need the inputs that the frozen matrices do not.
    stream = 2 if dtype == torch.bfloat16 else 4  # bytes per value of the residual stream
    norm = 4 if on_gpu and not layout.compiled else stream
    fused = layers.is_fused("cuda" if on_gpu else "cpu", dtype, T, dropout)
    attention = 4 * nh if fused else itemsize * nh * T * (3 if dropout else 1)
    mask = (1 if on_gpu else itemsize) * C if dropout else 0  # what a dropout outside the attention saves
    layer = tokens * ((28 + 2 * norm if itemsize == 2 else 64) * C + attention + 2 * mask + 16)
    saved: float = L * tokens * stream * C + layer if layout.recompute else L * layer  # checkpointing: arXiv:1604.06174
    saved += tokens * ((4 + itemsize) * C + 16)  # ln_f's input, the gradient that the loss saves, ids
    if itemsize == 2 and not (sharded and on_gpu):
        saved += itemsize * blocks  # autocast's copies, which the backward pass needs; FSDP gathers weights in bf16
    rows = min(loss.chunk_rows("cuda" if on_gpu else "cpu", V, device_memory or 0), tokens)
    # Eager mode adds logits and log-probabilities in fp32; a CPU adds about as much again for copies in matrix products.
    logits = rows * V * (itemsize + (16 if not on_gpu else 0 if layout.compiled else 8))
    # without LoRA: the gradient of the embedding in fp32, and of one chunk, which a GPU in bf16 or fp16 adds in place
    if trained == N:
        logits += (4 if on_gpu and itemsize == 2 else 4 + 4) * embedding
    logits += itemsize * embedding if itemsize == 2 else 0  # the embedding in bf16
    # The largest tensor that is sent: the gradient of the embeddings, or of a block. gloo copies it.
    largest = min(4 * trained, 4 * max(N - blocks, blocks / L))
    if sharded:
        width = itemsize if on_gpu else 4
        reshards = fsdp.reshard_after_forward(N, dtype, device_memory)
        gathered = 2 * width * blocks / L if reshards else width * blocks  # two blocks: this one and the next
        buffers = gathered + 4 * (N - blocks) + (largest if on_gpu else 3 * largest)
        # full-size until the last micro-step reduces them
        gradients = 4 * trained / parts + (4.0 * trained if accumulates else 0.0)
        # evaluations have all weights in fp32, but neither gradients nor activations
        buffers += max(0.0, 4 * N - (gradients + saved + buffers))
    else:
        gradients = 4.0 * trained
        buffers = 4.0 * trained + (0.0 if on_gpu else largest) if world_size > 1 else 0.0  # DDP's buckets
    if not on_gpu and layout.saves:
        buffers += saving_bytes(sizes, layout.optimizer) / world_size  # rank 0's alone, in the memory that all share
    moments, program = optimizer_bytes(sizes, layout.optimizer) / parts, CUDA_BYTES if on_gpu else PROGRAM_BYTES
    return TrainingMemory(4 * N / parts, gradients, moments, saved, logits, buffers, program)


def bytes_needed(sizes: Sizes, layout: Layout, device: torch.device, B: int) -> float:
    """Returns the bytes that a step's tensors take on this rank's device, with micro-batches of B rows."""
    total = devices.free_and_total_memory(device)[1] if device.type == "cuda" else None
    taken = training_memory(sizes, layout, B, total)
    return taken.total - taken.program  # the program is running already


def largest_micro_batch(rows: int, most: int, needed: Callable[[int], float], available: float) -> int:
    """Returns the largest divisor of `rows` up to `most` that needs at most `available` bytes as a micro-batch; 0 if none."""
    divisors = (B for B in range(min(rows, most), 0, -1) if rows % B == 0)
    return next((B for B in divisors if needed(B) <= available), 0)


# -----------------------------------------------------------------------------
# Before a model exists


def count_parameters(sizes: Mapping[str, Any]) -> int:
    """Counts the parameters of a GPT-2 of these sizes, a dict with GPTConfig's fields as keys. The vocabulary is not padded."""
    L, C, bias = sizes["n_layer"], sizes["n_embd"], sizes["bias"]
    norms_and_biases = L * (13 if bias else 2) * C + (2 if bias else 1) * C
    return (sizes["vocab_size"] + sizes["block_size"]) * C + block_weights(L, C) + norms_and_biases


def check_model_fits(sizes: Mapping[str, Any]) -> None:
    """Checks that the weights of a GPT of these sizes fit into the memory of this machine.

    Raises:
        UserError: they do not.
    """
    parameters, available = count_parameters(sizes), devices.free_and_total_memory(torch.device("cpu"))[0]
    if 4 * parameters > available:
        raise UserError(
            f"the model has {parameters:,} parameters, which take {format_bytes(4 * parameters)}, but this machine "
            f"has {format_bytes(available)} of memory available. Use a smaller model."
        )


def check_training_fits(config: TrainConfig, vocab_size: int, world_size: int, device: torch.device) -> None:
    """Checks that the weights, gradients and optimizer state of a GPT fit into memory, and what saving them takes.

    Micro-batches are fitted later.

    Raises:
        UserError: they do not.
    """
    sizes, parts = config.to_dict() | {"vocab_size": vocab_size}, world_size if config.parallel == "fsdp" else 1
    check_model_fits(sizes)
    parameters, total = count_parameters(sizes), devices.free_and_total_memory(device)[1]
    of_model = {name: sizes[name] for name in ("n_layer", "n_head", "n_embd", "block_size", "vocab_size")}
    trained = 0 if config.lora_rank else parameters  # LoRA's own parameters are few
    of_run = Sizes(**of_model, parameters=parameters, trained=trained)
    needed = (4 * parameters + 4 * trained + optimizer_bytes(of_run, config.optimizer)) / parts
    saving = saving_bytes(of_run, config.optimizer) if config.checkpoint_every != 0 else 0
    if device.type == "cpu":
        needed += saving / world_size
    if needed > total:
        raise UserError(
            f"training {parameters:,} parameters takes at least {format_bytes(needed)}, but only {format_bytes(total)} are "
            "available. Use a smaller --model, or smaller --n-layer and --n-embd, or more GPUs with --parallel fsdp."
        )
    if device.type != "cpu" and saving > (host := devices.host_memory()):
        raise UserError(
            f"writing a checkpoint takes {format_bytes(saving)} of this machine's memory, of which {format_bytes(host)} are "
            "available. Use a smaller model, or a machine with more memory."
        )
