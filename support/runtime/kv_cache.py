"""Keys and values of the tokens that a model was fed, so that generation feeds each token only once."""

from __future__ import annotations

from torch import Tensor, nn


class KVCache:
    """Keys and values of each attention layer; pass it to `Transformer.forward` with the next tokens.

    The first call may have any number of tokens, every later one a single token.

    Args:
        capacity: number of tokens per row that the cache can hold, at most the model's context.
    """

    def __init__(self, capacity: int):
        self.capacity = capacity
        self._tensors: dict[nn.Module, Tensor] = {}  # (2, B, nh, capacity, hs): keys and values
        self._lengths: dict[nn.Module, int] = {}  # tokens stored

    @property
    def length(self) -> int:
        """The number of tokens fed so far."""
        return max(self._lengths.values(), default=0)

    def append(self, layer: nn.Module, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Stores a layer's keys and values (B, nh, T, hs) of the next T tokens; returns those of all tokens so far."""
        B, nh, T, hs = k.shape
        if layer not in self._tensors:
            self._tensors[layer] = k.new_empty(2, B, nh, self.capacity, hs)
        first = self._lengths.get(layer, 0)
        if first and T > 1:
            raise ValueError(f"{T} tokens after {first} others: attention would need a mask. Feed one at a time")
        self._lengths[layer] = first + T
        cached = self._tensors[layer][:, :, :, : first + T]
        cached[0, :, :, first:], cached[1, :, :, first:] = k, v
        return cached[0], cached[1]
