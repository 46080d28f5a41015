"""Muon: momentum, made orthogonal, for the matrices of the blocks; AdamW for all else.

Keller Jordan, https://kellerjordan.github.io/posts/muon. `torch.optim.Muon` does the same to one matrix, with another scale.
This one also takes Q, K and V apart, computes matrices of one shape together, shares them among the ranks, and leaves out
an update that is not finite without asking the host.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import distributed

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # Jordan's: steep at 0, so that few steps lift small singular values
STEPS = 5
SCALE = 11.0  # so that one rate serves AdamW and Muon; measured, see docs/recipes.md
AT_ONCE = 2**26  # elements that a rank makes orthogonal together; it bounds what that takes of memory


def orthogonalize(matrices: torch.Tensor) -> torch.Tensor:
    """About U V^T for each U S V^T of (K, n, m) `matrices`, n <= m, by Newton-Schulz steps: products only, no SVD.

    Singular values from 0.002 of the Frobenius norm upwards come out between 0.68 and 1.21, smaller ones lower.
    """
    a, b, c = COEFFICIENTS
    x = matrices / matrices.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)  # no singular value is above 1
    for _ in range(STEPS):  # x <- a x + b (x x^T) x + c (x x^T)^2 x
        gram = x @ x.mT  # (K, n, n)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


class Muon(torch.optim.AdamW):
    """Muon for groups with `parts`, fused AdamW for the others.

    `parts` says of each parameter of its group how many matrices it holds, below each other. For each of them, W of n x m
    with gradient G and momentum M, mu being `momentum`: M <- mu M + (1 - mu) G, and then
    W <- W - lr (weight_decay W + SCALE sqrt(larger side / smaller side) orthogonalize(mu M + (1 - mu) G)).
    So what an update changes in the outputs does not depend on the width (as in arXiv:2310.17813, which has rows / columns
    under the root), and one rate serves AdamW and Muon. `dtype` is that of the products.

    Under torch.distributed all ranks must have the same gradients, already unscaled, and come out with the same weights.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], *, dtype: torch.dtype, momentum: float = 0.95, **adamw: Any):
        super().__init__(groups, fused=True, **adamw)
        self.dtype, self.momentum = dtype, momentum

    def __setstate__(self, state: dict[str, Any]) -> None:
        torch.optim.Optimizer.__setstate__(self, state)  # AdamW's would ask all states for a count of steps

    @torch.no_grad()
    def step(self) -> None:
        groups = self.param_groups
        for group in groups:
            if "parts" in group:
                self._step(group)
        self.param_groups = [group for group in groups if "parts" not in group]
        try:
            super().step()
        finally:
            self.param_groups = groups

    def _step(self, group: dict[str, Any]) -> None:
        of_shape: dict[tuple[int, int], list[tuple[torch.Tensor, ...]]] = {}
        for parameter, parts in zip(group["params"], group["parts"], strict=True):
            state = self.state[parameter]
            if not state:
                state["momentum_buffer"] = torch.zeros_like(parameter)
            tensors = (parameter, parameter.grad, state["momentum_buffer"])
            for matrix in zip(*(tensor.chunk(parts) for tensor in tensors), strict=True):
                n, m = sorted(matrix[0].shape)
                of_shape.setdefault((n, m), []).append(matrix)
        connected = distributed.is_available() and distributed.is_initialized()
        rank, world = (distributed.get_rank(), distributed.get_world_size()) if connected else (0, 1)
        for (n, m), matrices in of_shape.items():
            at_once = max(1, AT_ONCE // (n * m)) * world
            for first in range(0, len(matrices), at_once):
                self._update(group, matrices[first : first + at_once], rank, world)

    def _update(self, group: dict[str, Any], matrices: list[tuple[torch.Tensor, ...]], rank: int, world: int) -> None:
        """Updates matrices of one shape, each given with its gradient and its momentum."""
        mu, skip = self.momentum, getattr(self, "found_inf", None)  # as for fused AdamW: 1 leaves everything as it is
        made = 1.0 if skip is None else 1.0 - skip
        share = -(-len(matrices) // world)  # of each rank; zeros fill up the last ones'
        mine = torch.zeros(share, *sorted(matrices[0][0].shape), dtype=self.dtype, device=matrices[0][0].device)
        for i, (_, gradient, momentum) in enumerate(matrices):
            if skip is not None:
                gradient = torch.where(skip > 0, 0.0, gradient)  # what is not finite would stay so times 0
            momentum.lerp_(gradient, (1.0 - mu) * made)
            if i // share == rank:
                direction = gradient.lerp(momentum, mu)
                mine[i % share] = direction if len(direction) <= direction.size(1) else direction.mT
        directions, scale = orthogonalize(mine), SCALE * math.sqrt(mine.size(2) / mine.size(1))
        if world > 1:
            directions, own = directions.new_empty(share * world, *directions.shape[1:]), directions
            # of one name before torch 2.13, of another since
            gather = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor
            gather(directions, own)
        for (weight, _, _), direction in zip(matrices, directions, strict=False):
            direction = direction if direction.shape == weight.shape else direction.mT
            weight.mul_(1.0 - group["lr"] * group["weight_decay"] * made)
            weight.sub_(direction.float() * (scale * group["lr"] * made))
