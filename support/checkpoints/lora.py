"""LoRA (arXiv:2106.09685) with peft: small matrices next to frozen weights.

A checkpoint has both the adapter and the merged model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from support.checkpoints import huggingface
from support.cli import UserError

if TYPE_CHECKING:
    from peft import LoraConfig

ADAPTER, WEIGHTS = "adapter", "adapter_model.safetensors"  # a folder in a checkpoint, and a file in it
TARGET_MODULES = ["c_attn", "c_proj"]  # both matrices of the attention, and the second one of the MLP


def add_adapter(model: torch.nn.Module, rank: int, alpha: float, seed: int, checkpoint: Path | None = None) -> None:
    """Freezes a GPT and adds trainable matrices of this rank to TARGET_MODULES: random ones, or a checkpoint's.

    Raises:
        UserError: the checkpoint's matrices cannot be read, or do not fit.
    """
    from peft import inject_adapter_in_model

    torch.manual_seed(seed)
    inject_adapter_in_model(_lora_config(rank, alpha), model)
    if checkpoint is not None:
        path = checkpoint / ADAPTER / WEIGHTS
        saved = huggingface.read_weights(path)
        trained = {_peft_name(name): p for name, p in model.named_parameters() if p.requires_grad}
        if {name: tensor.shape for name, tensor in saved.items()} != {name: p.shape for name, p in trained.items()}:
            raise UserError(f"{path} does not fit the base model and --lora-rank {rank}. Use another checkpoint.")
        with torch.no_grad():
            for name, parameter in trained.items():
                parameter.copy_(saved[name])


def frozen_sha256(model: torch.nn.Module) -> str | None:
    """Returns the SHA-256 of the frozen weights; None if all are trained, or if they are not on this rank (FSDP)."""
    frozen, digest = [p for p in model.parameters() if not (p.requires_grad or p.is_meta)], hashlib.sha256()
    for parameter in frozen:
        digest.update(parameter.cpu().contiguous().numpy().data)
    return digest.hexdigest() if frozen else None


def merge(weights: Mapping[str, torch.Tensor], rank: int, alpha: float) -> dict[str, torch.Tensor]:
    """Returns the weights of the complete model, W + (alpha / rank) * B @ A for each adapted W, as peft merges them."""
    merged = {name.replace(".base_layer", ""): weight for name, weight in weights.items() if ".lora_" not in name}
    for name, A in weights.items():
        if ".lora_A." in name:
            layer, B = name.partition(".lora_A.")[0], weights[name.replace(".lora_A.", ".lora_B.")]
            merged[f"{layer}.weight"] = merged[f"{layer}.weight"] + B @ A * (alpha / rank)
    return merged


def write_adapter(directory: Path, weights: Mapping[str, torch.Tensor], base: str, rank: int, alpha: float) -> None:
    """Writes the adapter in peft's format, so that `PeftModel.from_pretrained` can add it to the base model."""
    from safetensors.torch import save_file

    config = _lora_config(rank, alpha, task_type="CAUSAL_LM", inference_mode=True, base_model_name_or_path=base)
    config.fan_in_fan_out = True  # Hugging Face's GPT-2 stores these weights transposed
    config.save_pretrained(str(directory))
    matrices = {_peft_name(name): weight.contiguous() for name, weight in weights.items() if ".lora_" in name}
    save_file(matrices, directory / WEIGHTS, metadata={"format": "pt"})


def _lora_config(rank: int, alpha: float, **options: Any) -> LoraConfig:
    from peft import LoraConfig

    return LoraConfig(**options, r=rank, lora_alpha=alpha, target_modules=TARGET_MODULES)  # type: ignore[arg-type]


def _peft_name(name: str) -> str:
    """Returns peft's name for one of our parameters."""
    return "base_model.model." + name.replace(".default.", ".")
