"""CUDA graphs, for models whose kernels take less time than the host needs to launch them one by one.

A step of a small model is hundreds of such kernels. Recorded as a graph, they are launched all at once, and the step
computes the same in a fraction of the time (docs/measurements/performance.md). What Python decides in a step is decided once, when the
step is recorded: a step that must decide again each time needs --no-cuda-graphs.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from support.cli import UserError, print_lines
from support.runtime import devices
from support.runtime.memory import Layout, Sizes, bytes_needed

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
        gc.collect()
        self.graph = torch.cuda.CUDAGraph()
        # On PyTorch's own stream for this, all graphs would share a workspace of cuBLAS, which goes with the first one
        # that is destroyed (torch 2.12 and newer, pytorch#193402).
        with torch.cuda.graph(self.graph, stream=stream):
            self.result = function(*arguments)

    def __call__(self, *values: torch.Tensor) -> Any:
        for argument, value in zip(self.arguments, values, strict=True):
            argument.copy_(value)
        self.graph.replay()
        return self.result


def record(function: Callable[..., Any], *arguments: torch.Tensor) -> Graph | None:
    """Records a function of these tensors; returns None if there is too little memory.

    Raises:
        UserError: the function does something that cannot be recorded, such as reading a tensor's value.
    """
    try:
        return Graph(function, *arguments)
    except torch.OutOfMemoryError:
        return None
    except RuntimeError as error:  # the error of the capture hides that of the step. CUDA is unusable afterwards
        reason = str(error.__context__ or error).splitlines()[0].rstrip(".")
        raise UserError(f"a step cannot be recorded as a CUDA graph ({reason}). Use --no-cuda-graphs.") from error


def are_faster(sizes: Sizes, layout: Layout, B: int, device: torch.device) -> bool:
    """Returns whether micro-steps of B rows should be recorded: on one GPU, only where they are short.

    What a graph holds is missing in evaluations, so there must be memory for twice what a step takes.
    """
    can = device.type == "cuda" and layout.world_size == 1 and not layout.recompute and layout.dtype != torch.float16
    if not can or B * sizes.block_size * sizes.n_embd > MOST_VALUES or sizes.parameters > MOST_PARAMETERS:
        return False
    return 2 * bytes_needed(sizes, layout, device, B) <= devices.free_and_total_memory(device)[0]


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
    for group, lr in zip(optimizer.param_groups, rates, strict=True):
        group |= {"lr": torch.tensor(lr, device=device), "capturable": True}
    # sliced as the loader does: other strides would cause a recompilation
    forward_backward = record(micro_step, x[:, :-1], y[:, 1:])
    step_if_finite = record(update, skipped) if forward_backward else None
    if not (forward_backward and step_if_finite):
        for group, lr in zip(optimizer.param_groups, rates, strict=True):
            group |= {"lr": lr, "capturable": False}
        print_lines("note    too little memory for CUDA graphs, so a step takes longer")
        optimizer.zero_grad()
        return None
    optimizer.zero_grad(set_to_none=False)
    return StepGraphs(forward_backward, step_if_finite)
