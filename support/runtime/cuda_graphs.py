"""CUDA graphs, for models whose kernels take less time than the host needs to launch them one by one.

A step of a small model is hundreds of such kernels. Recorded as a graph, they are launched all at once, and the step
computes the same in a fraction of the time (docs/performance.md). What Python decides in a step is decided once, when the
step is recorded: a step that must decide again each time needs --no-cuda-graphs.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from support.cli import UserError, print_lines
from support.runtime.memory import Layout, Sizes

# B x T x C of a micro-step, and parameters: with more, computing takes longer than launching, and the memory of the graph
# would be missing in evaluations.
MOST_VALUES, MOST_PARAMETERS = 2**23, 2**27
WARM_UP_CALLS = 3  # before a function is recorded, libraries choose their kernels


class Graph:
    """A function of tensors, recorded as a CUDA graph. It returns the same tensors in each call, with new values."""

    def __init__(self, function: Callable[..., Any], *arguments: torch.Tensor):
        """Calls `function` a few times, and records what it does with `arguments`, which every call of the graph overwrites."""
        self.arguments = arguments
        warnings.filterwarnings(
            "ignore", ".*capturable=True.*"
        )  # an optimizer says so in the calls before the recording
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP_CALLS):
                function(*arguments)
        torch.cuda.current_stream().wait_stream(stream)
        gc.collect()  # what is left of these calls belongs to another stream
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.result = function(*arguments)

    def __call__(self, *values: torch.Tensor) -> Any:
        for argument, value in zip(self.arguments, values, strict=True):
            argument.copy_(value)
        self.graph.replay()
        return self.result


def are_faster(sizes: Sizes, layout: Layout, B: int, device: torch.device) -> bool:
    """Returns whether micro-steps of B rows are faster as graphs: on one GPU, and only where they are short."""
    can = device.type == "cuda" and layout.world_size == 1 and not layout.recompute and layout.dtype != torch.float16
    return can and B * sizes.block_size * sizes.n_embd <= MOST_VALUES and sizes.parameters <= MOST_PARAMETERS


class StepGraphs(NamedTuple):
    """The two parts of a training step, as graphs."""

    forward_backward: Graph  # (B, T) tokens and the tokens that follow -> loss
    step_if_finite: Graph  # whether the gradients are applied -> None


def record_step(
    micro_step: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    update: Callable[[torch.Tensor], None],
    optimizer: torch.optim.Optimizer,
    B: int,
    T: int,
    device: torch.device,
) -> StepGraphs | None:
    """Records a micro-step on (B, T) tokens and the tokens that follow them, and an update; no weight changes meanwhile.

    From then on, gradients have to stay where they are, and learning rates are tensors, which the graph reads.

    Args:
        update: takes a tensor that says whether the gradients are applied.

    Returns:
        The two graphs, or None if there is too little memory for them. A line says so.

    Raises:
        UserError: a step does something that cannot be recorded, such as reading a tensor's value.
    """
    rates = [group["lr"] for group in optimizer.param_groups]
    x, y = (torch.zeros((B, T + 1), dtype=torch.int64, device=device) for _ in range(2))
    skipped = torch.zeros((), dtype=torch.bool, device=device)
    try:
        for group, lr in zip(optimizer.param_groups, rates, strict=True):
            group |= {"lr": torch.tensor(lr, device=device), "capturable": True}
        # sliced as the loader does: other strides would cause a recompilation
        forward_backward = Graph(micro_step, x[:, :-1], y[:, 1:])
        graphs: StepGraphs | None = StepGraphs(forward_backward, Graph(update, skipped))
    except torch.OutOfMemoryError:
        for group, lr in zip(optimizer.param_groups, rates, strict=True):
            group |= {"lr": lr, "capturable": False}
        print_lines("note    too little memory for CUDA graphs, so a step takes longer")
        graphs = None
    except RuntimeError as error:  # the error of the capture hides that of the step. CUDA is unusable afterwards
        reason = str(error.__context__ or error).splitlines()[0].rstrip(".")
        raise UserError(f"a step cannot be recorded as a CUDA graph ({reason}). Use --no-cuda-graphs.") from error
    optimizer.zero_grad(set_to_none=graphs is None)
    return graphs
