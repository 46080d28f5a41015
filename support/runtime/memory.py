"""Device memory that training takes, computed before anything is allocated."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from support.optim import loss

RESERVED_BYTES = 10**9  # CUDA's own, and fragmentation
COMPILED_FRACTION = 0.5  # torch.compile computes some activations again instead of saving them, but not half of them


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
    model: torch.nn.Module, B: int, T: int, dtype: torch.dtype, world_size: int, device_memory: int
) -> MemoryEstimate:
    """The memory that training on CUDA takes, with AdamW and micro-batches of (B, T) tokens.

    Args:
        model: `model(idx, targets)` returns logits and loss. Compiled or not; its weights are not read.
        dtype: precision of the matrix products.
        device_memory: of the GPU, in bytes. The chunks of the loss depend on it.
    """
    parameters = list(model.parameters())
    weights = 4 * sum(p.numel() for p in parameters)
    trained = 4 * sum(p.numel() for p in parameters if p.requires_grad)
    copies = 3 if world_size == 1 else 4  # gradients, two moments, and the buckets in which DDP sends gradients
    width = len(model.get_parameter("lm_head.weight"))  # the padded vocabulary
    rows = min(loss.chunk_rows(loss.chunk_numel("cuda", device_memory), width), B * T)
    compiled = hasattr(model, "_orig_mod")
    logit_bytes = dtype.itemsize + (0 if compiled else 8)  # eager: logits and log-probabilities in fp32, too
    return MemoryEstimate(weights + copies * trained, saved_bytes(model, B, T, dtype) + logit_bytes * rows * width)


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
