"""The peaks and the memory of GPUs, from their data sheets."""

from __future__ import annotations

from typing import NamedTuple


class Gpu(NamedTuple):
    peak_flops: float  # dense FLOP/s in bf16, with fp32 accumulation
    flag: str | None = None  # its name for --gpu
    gib: float = 0.0  # memory that a program can use


# Keyed by CUDA's name. The peaks are from the NVIDIA documents named on the right, halved where those count sparsity.
# Only full names: cards with the same chip differ (an H100 PCIe is slower than an SXM module), and a wrong peak is worse
# than none.
GPUS = {
    "NVIDIA A100-SXM4-80GB": Gpu(312e12, "A100", 79.1),  # A100 data sheet
    "NVIDIA A100-SXM4-40GB": Gpu(312e12, "A100-40GB", 39.4),
    "NVIDIA A100-PCIE-40GB": Gpu(312e12),
    "NVIDIA A100 80GB PCIe": Gpu(312e12),
    "NVIDIA H100 80GB HBM3": Gpu(989e12, "H100", 79.1),  # H100 data sheet: SXM 1,979 sparse
    "NVIDIA H100 PCIe": Gpu(756e12),  # first H100 data sheet: 1,513 sparse
    "NVIDIA H100 NVL": Gpu(835e12),  # H100 data sheet: 1,671 sparse
    "NVIDIA H200": Gpu(989e12, "H200", 139.8),  # H200 data sheet: SXM 1,979 sparse
    "NVIDIA L4": Gpu(121e12, "L4", 22.0),  # L4 data sheet: 242 sparse
    "NVIDIA L40S": Gpu(362e12, "L40S", 44.4),  # L40S data sheet
    "NVIDIA A10": Gpu(125e12, "A10", 22.0),  # A10 data sheet
    "NVIDIA A30": Gpu(165e12),  # A30 data sheet
    "NVIDIA A40": Gpu(149.7e12),  # A40 data sheet
    "NVIDIA GeForce RTX 3090": Gpu(71e12, "RTX3090", 23.6),  # GA102 white paper
    "NVIDIA GeForce RTX 4090": Gpu(165.2e12, "RTX4090", 23.5),  # Ada white paper
    "NVIDIA RTX 6000 Ada Generation": Gpu(364.2e12),  # Ada white paper for professional cards
}
GPU_FLAGS = {gpu.flag: name for name, gpu in GPUS.items() if gpu.flag}
