"""LoRA (arXiv:2106.09685) through peft: small matrices next to frozen weights; only they are trained and saved."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from support.checkpoints import huggingface

if TYPE_CHECKING:
    from peft import LoraConfig

TARGET_MODULES = ["c_attn", "c_proj"]  # of the attention, and the projection of the MLP


def add_adapter(model: torch.nn.Module, rank: int, alpha: float, seed: int, adapter: Path | None) -> None:
    """Freezes a GPT and adds trainable matrices of this rank to TARGET_MODULES: random ones, or those of a checkpoint."""
    from peft import inject_adapter_in_model

    torch.manual_seed(seed)
    inject_adapter_in_model(_lora_config(rank, alpha), model)
    if adapter is not None:
        saved = huggingface.read_tensors(adapter / huggingface.ADAPTER_WEIGHTS)
        trained = {_peft_name(name): p for name, p in model.named_parameters() if p.requires_grad}
        with torch.no_grad():
            for name, parameter in trained.items():
                parameter.copy_(saved[name])


def frozen_sha256(model: torch.nn.Module) -> str | None:
    """SHA-256 of the frozen weights; None if all weights are trained, or if they are not on this rank (FSDP)."""
    frozen, digest = [p for p in model.parameters() if not (p.requires_grad or p.is_meta)], hashlib.sha256()
    for parameter in frozen:
        digest.update(parameter.cpu().contiguous().numpy().data)
    return digest.hexdigest() if frozen else None


def write_adapter(directory: Path, matrices: Mapping[str, torch.Tensor], base: str, rank: int, alpha: float) -> None:
    """Writes an adapter as peft does: `PeftModel.from_pretrained` opens it on Hugging Face's model of its base."""
    from safetensors.torch import save_file

    config = _lora_config(rank, alpha, task_type="CAUSAL_LM", inference_mode=True)
    config.fan_in_fan_out = True  # Hugging Face's GPT-2 stores these weights transposed
    config.base_model_name_or_path = str(Path(base).resolve()) if Path(base).exists() else base
    config.save_pretrained(str(directory))
    tensors = {_peft_name(name): matrix.contiguous() for name, matrix in matrices.items()}
    save_file(tensors, directory / huggingface.ADAPTER_WEIGHTS)


def _lora_config(rank: int, alpha: float, **options: Any) -> LoraConfig:
    from peft import LoraConfig

    return LoraConfig(**options, r=rank, lora_alpha=alpha, target_modules=TARGET_MODULES)  # type: ignore[arg-type]


def _peft_name(name: str) -> str:
    """peft's name of one of our parameters."""
    return "base_model.model." + name.replace(".default.", ".")
