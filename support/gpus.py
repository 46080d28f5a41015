"""The peaks and the memory of GPUs, from their data sheets."""

from __future__ import annotations

from typing import NamedTuple


class Gpu(NamedTuple):
    peak_flops: float  # dense FLOP/s in `dtype`, with fp32 accumulation
    flag: str | None = None  # its name for --gpu
    gib: float = 0.0  # memory that a program can use
    dtype: str = "bf16"  # the precision in which a run uses it: fp16 where bf16 is not native


# Keyed by CUDA's name. The peaks are from the NVIDIA documents named on the right, halved where those count sparsity.
# Only full names: cards with the same chip differ (an H100 PCIe is slower than an SXM module), and a wrong peak is worse
# than none.
GPUS = {
    "NVIDIA B200": Gpu(2250e12, "B200", 178.3),  # DGX B200 data sheet: 36 PFLOP/s sparse for 8
    "NVIDIA H200": Gpu(989e12, "H200", 139.8),  # H200 data sheet: SXM 1,979 sparse
    "NVIDIA H100 80GB HBM3": Gpu(989e12, "H100", 79.1),  # H100 data sheet: SXM 1,979 sparse
    "NVIDIA H100 PCIe": Gpu(756e12),  # first H100 data sheet: 1,513 sparse
    "NVIDIA H100 NVL": Gpu(835e12),  # H100 data sheet: 1,671 sparse
    "NVIDIA A100-SXM4-80GB": Gpu(312e12, "A100", 79.1),  # A100 data sheet
    "NVIDIA A100-SXM4-40GB": Gpu(312e12, "A100-40GB", 39.4),
    "NVIDIA A100-PCIE-40GB": Gpu(312e12),
    "NVIDIA A100 80GB PCIe": Gpu(312e12),
    "NVIDIA L40S": Gpu(362e12, "L40S", 44.4),  # L40S data sheet
    "NVIDIA L4": Gpu(121e12, "L4", 22.0),  # L4 data sheet: 242 sparse
    "NVIDIA A10": Gpu(125e12, "A10", 22.0),  # A10 data sheet
    "NVIDIA A30": Gpu(165e12),  # A30 data sheet
    "NVIDIA A40": Gpu(149.7e12),  # A40 data sheet
    "NVIDIA RTX A6000": Gpu(154.8e12, "A6000", 47.4),  # RTX A6000 data sheet: 309.7 sparse
    "NVIDIA RTX 6000 Ada Generation": Gpu(364.2e12),  # Ada white paper for professional cards
    "NVIDIA RTX PRO 6000 Blackwell Workstation Edition": Gpu(503.8e12, "RTXPRO6000", 94.9),  # its white paper
    "NVIDIA GeForce RTX 3060": Gpu(25.5e12, "RTX3060", 11.6),  # 28 SMs at 1.78 GHz, as in the GA102 white paper
    "NVIDIA GeForce RTX 3090": Gpu(71e12, "RTX3090", 23.6),  # GA102 white paper
    "NVIDIA GeForce RTX 4060": Gpu(30.2e12, "RTX4060", 7.6),  # NVIDIA's 242 TOPS, sparse in fp8
    "NVIDIA GeForce RTX 4070": Gpu(58.3e12, "RTX4070", 11.6),  # Ada white paper
    "NVIDIA GeForce RTX 4080": Gpu(97.5e12, "RTX4080", 15.6),  # Ada white paper
    "NVIDIA GeForce RTX 4090": Gpu(165.2e12, "RTX4090", 23.5),  # Ada white paper
    "NVIDIA GeForce RTX 5090": Gpu(209.5e12, "RTX5090", 31.3),  # RTX Blackwell white paper
    "Tesla T4": Gpu(65e12, "T4", 14.6, "fp16"),  # T4 data sheet
    "NVIDIA GeForce RTX 2080 Ti": Gpu(53.8e12, "RTX2080Ti", 10.7, "fp16"),  # Turing white paper
    "Tesla V100-SXM2-16GB": Gpu(125e12, "V100", 15.8, "fp16"),  # V100 data sheet
    "Tesla V100-SXM2-32GB": Gpu(125e12, None, 0.0, "fp16"),
}
GPU_FLAGS = {gpu.flag: name for name, gpu in GPUS.items() if gpu.flag}
