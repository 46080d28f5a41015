"""Muon for the weight matrices of the blocks, AdamW for everything else.

Muon (Keller Jordan, https://kellerjordan.github.io/posts/muon) replaces the momentum of a matrix with the nearest
orthogonal matrix, so that a step moves the matrix equally far in all directions. `torch.optim.Muon` does the same with
a different scale, one matrix at a time. This version also treats Q, K and V as separate matrices, batches matrices of the
same shape, divides the work among the ranks, and skips a non-finite step without a host sync.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import distributed

from support import torch_private

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # Jordan's: steep at 0, so that a few steps raise small singular values
NEWTON_SCHULZ_STEPS = 5
MOMENTUM = 0.95
SCALE = 11.0  # lets AdamW and Muon share one learning rate (measured, see docs/measurements/recipes.md)
MAX_BATCH_NUMEL = 2**26  # elements that a rank orthogonalizes at once, to limit memory


def orthogonalize(matrices: torch.Tensor) -> torch.Tensor:
    """Returns approximately U V^T for each U S V^T of (K, n, m) `matrices`, n <= m, by Newton-Schulz iteration.

    Singular values of at least 0.002 times the Frobenius norm come out between 0.68 and 1.21, smaller ones lower.
    """
    a, b, c = COEFFICIENTS
    x = matrices / matrices.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)  # now no singular value is above 1
    for _ in range(NEWTON_SCHULZ_STEPS):  # x <- a x + b (x x^T) x + c (x x^T)^2 x
        gram = x @ x.mT  # (K, n, n)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


class Muon(torch.optim.AdamW):
    """Muon for parameter groups with `num_splits`, fused AdamW for the others.

    `num_splits` lists how many matrices each parameter of the group holds, stacked along dimension 0. Each n x m matrix
    W, with gradient G and momentum M, is updated as follows, where mu = MOMENTUM:

        M <- mu M + (1 - mu) G
        W <- W - lr (weight_decay W + SCALE sqrt(max(n, m) / min(n, m)) orthogonalize(mu M + (1 - mu) G))

    So how much a step changes the outputs does not depend on the width (as in arXiv:2310.17813, which has n / m under
    the root). The matrix products are in `dtype`, but in fp32 for fp16. As in fused AdamW, a `found_inf` of 1 skips the
    step. With `adamw_lr`, AdamW's learning rate is the group's times `adamw_lr` / `lr`.

    Under torch.distributed, all ranks must have the same gradients, already unscaled; they end up with the same
    weights. Under FSDP, each rank has a part of the gradients and of the weights.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        *,
        dtype: torch.dtype,
        lr: float,
        adamw_lr: float | None = None,
        **adamw_options: Any,
    ):
        super().__init__(groups, lr=lr, fused=True, **adamw_options)
        self.adamw_scale = 1.0 if adamw_lr is None else adamw_lr / lr
        self.dtype = torch.float32 if dtype == torch.float16 else dtype  # fp16's range is too small for the products

    def __setstate__(self, state: dict[str, Any]) -> None:
        torch.optim.Optimizer.__setstate__(self, state)  # AdamW's version expects a step count in every state

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]  # without a closure
        groups, found_inf = self.param_groups, getattr(self, "found_inf", None)
        self._applied = 1.0 if found_inf is None else 1.0 - found_inf  # 0 leaves weights and momenta unchanged
        for group in groups:
            if "num_splits" in group:
                self._muon_step(group)
        by_adamw = [group for group in groups if "num_splits" not in group]
        self.param_groups = [{**group, "lr": group["lr"] * self.adamw_scale} for group in by_adamw]
        try:
            super().step()
        finally:
            self.param_groups = groups

    def _muon_step(self, group: dict[str, Any]) -> None:
        connected = distributed.is_available() and distributed.is_initialized()
        rank, world_size = (distributed.get_rank(), distributed.get_world_size()) if connected else (0, 1)
        by_shape: dict[tuple[int, ...], list[tuple[torch.Tensor, ...]]] = {}
        for parameter, num_splits in zip(group["params"], group["num_splits"], strict=True):
            state = self.state[parameter]
            if not state:
                state["momentum_buffer"] = torch.zeros_like(parameter)
            tensors = (parameter, parameter.grad, state["momentum_buffer"])
            if hasattr(parameter, "to_local"):  # a DTensor: FSDP has sharded it
                by_shape.setdefault((*parameter.shape, num_splits), []).append(tensors)
                continue
            for matrix in zip(*(tensor.chunk(num_splits) for tensor in tensors), strict=True):
                n, m = sorted(matrix[0].shape)
                by_shape.setdefault((n, m), []).append(matrix)
        for (n, m, *splits), matrices in by_shape.items():
            size = max(1, MAX_BATCH_NUMEL // (n * m)) * world_size
            for batch in (matrices[first : first + size] for first in range(0, len(matrices), size)):
                if splits:
                    self._update_sharded(group, cast("list[tuple[DTensor, ...]]", batch), splits[0])
                else:
                    self._update(group, batch, rank, world_size)

    def _update(
        self, group: dict[str, Any], matrices: list[tuple[torch.Tensor, ...]], rank: int, world_size: int
    ) -> None:
        """Updates matrices of one shape, each given as (weight, gradient, momentum)."""
        per_rank = -(-len(matrices) // world_size)  # the last ranks may have fewer; zeros fill the gap
        own = torch.zeros(per_rank, *sorted(matrices[0][0].shape), dtype=self.dtype, device=matrices[0][0].device)
        for i, (_, gradient, momentum) in enumerate(matrices):
            gradient = self._update_momentum(gradient, momentum)
            if i // per_rank == rank:
                direction = gradient.lerp(momentum, MOMENTUM)
                own[i % per_rank] = direction if len(direction) <= direction.size(1) else direction.mT
        directions = orthogonalize(own)
        if world_size > 1:
            directions, own = directions.new_empty(per_rank * world_size, *directions.shape[1:]), directions
            torch_private.all_gather(directions, own)
        n, m = directions.shape[1:]
        rate, kept = self._rates(group, math.sqrt(m / n))
        for (weight, _, _), direction in zip(matrices, directions, strict=False):
            direction = direction if direction.shape == weight.shape else direction.mT
            weight.mul_(kept).sub_(direction.float() * rate)

    def _update_sharded(self, group: dict[str, Any], parameters: list[tuple[DTensor, ...]], num_splits: int) -> None:
        """Updates parameters of one shape that FSDP has sharded, each given as (weight, gradient, momentum).

        Each rank exchanges its parts of all parameters for some complete ones, orthogonalizes these, and sends them back.
        """
        from torch.distributed.tensor import DTensor, Shard

        directions = []
        for _, gradient, momentum in parameters:
            local_momentum = momentum.to_local()
            local_gradient = self._update_momentum(gradient.to_local(), local_momentum)
            directions.append(local_gradient.lerp(local_momentum, MOMENTUM))
        weight = parameters[0][0]
        mesh, shape = weight.device_mesh, torch.Size([len(parameters), *weight.shape])
        stride = (weight.numel(), weight.size(1), 1)
        local = torch.stack(directions).to(self.dtype)
        parts = DTensor.from_local(local, mesh, [Shard(1)], shape=shape, stride=stride)
        own = parts.redistribute(placements=[Shard(0)]).to_local()  # (K, n, m): the complete parameters of this rank
        matrices = own.reshape(len(own) * num_splits, shape[1] // num_splits, shape[2])
        tall = matrices.size(1) > matrices.size(2)
        matrices = orthogonalize(matrices.mT).mT if tall else orthogonalize(matrices)
        complete = DTensor.from_local(matrices.reshape(own.shape), mesh, [Shard(0)], shape=shape, stride=stride)
        n, m = sorted(matrices.shape[1:])
        parts = complete.redistribute(placements=[Shard(1)])
        rate, kept = self._rates(group, math.sqrt(m / n))
        for (weight, _, _), direction in zip(parameters, parts.to_local(), strict=True):
            weight.to_local().mul_(kept).sub_(direction.float() * rate)

    def _update_momentum(self, gradient: torch.Tensor, momentum: torch.Tensor) -> torch.Tensor:
        """Updates the momentum in place; returns the gradient, or zeros in a step that is skipped."""
        if isinstance(self._applied, torch.Tensor):
            gradient = torch.where(self._applied > 0, gradient, 0.0)  # inf * 0 would be NaN
        momentum.lerp_(gradient, (1.0 - MOMENTUM) * self._applied)
        return gradient

    def _rates(self, group: dict[str, Any], side_ratio: float) -> tuple[Any, Any]:
        """Returns how far a step moves weights along an orthogonal matrix, and the fraction that weight decay leaves."""
        rate = SCALE * side_ratio * group["lr"] * self._applied
        return rate, 1.0 - group["lr"] * group["weight_decay"] * self._applied
