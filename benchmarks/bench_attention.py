"""PyTorch's fused attention on a CPU against its plain one: forward and backward, by length of the rows and precision.

    python benchmarks/bench_attention.py

On short rows in bf16 the plain one is faster, see `LONGEST_UNFUSED_CONTEXT` in support/runtime/devices.py.
"""

from __future__ import annotations

import time

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

TOKENS, HEADS, HEAD_SIZE, ROUNDS = 1024, 2, 64, 20


def seconds(backend: SDPBackend, T: int, dtype: torch.dtype) -> float:
    """The shortest of some calls."""
    qkv = torch.randn(TOKENS // T, T, 3, HEADS, HEAD_SIZE, dtype=dtype)
    q, k, v = (t.detach().requires_grad_() for t in qkv.permute(2, 0, 3, 1, 4))
    times = []
    with sdpa_kernel(backend):
        for _ in range(ROUNDS):
            started = time.perf_counter()
            F.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()
            times.append(time.perf_counter() - started)
    return min(times)


def main() -> None:
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads; {TOKENS:,} tokens, {HEADS} heads")
    print("\n| | context | fused, ms | plain, ms | |\n|---|---|---|---|---|")
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        for T in (32, 64, 128, 256, 512, 1024):
            fused, plain = (seconds(b, T, dtype) for b in (SDPBackend.FLASH_ATTENTION, SDPBackend.MATH))
            print(f"| {name} | {T} | {1e3 * fused:.2f} | {1e3 * plain:.2f} | {plain / fused:.2f}x |")


if __name__ == "__main__":
    main()
