"""LoRA (arXiv:2106.09685) through peft: small matrices next to frozen weights; only they are trained and saved."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch

from support.checkpoints import huggingface
from support.cli import UserError


def add_adapter(model: torch.nn.Module, n_embd: int, rank: int, alpha: float, seed: int, adapter: Path | None) -> None:
    """Freezes a GPT and adds trainable matrices of this rank to huggingface.TARGET_MODULES: random ones, or those of a checkpoint.

    Raises:
        UserError: the rank exceeds the width of the model, or the checkpoint has matrices of another rank.
    """
    from peft import LoraConfig, inject_adapter_in_model

    if rank > n_embd:
        raise UserError(f"--lora-rank {rank} is more than the model's {n_embd} channels. Lower it.")
    torch.manual_seed(seed)
    inject_adapter_in_model(LoraConfig(**huggingface.lora_options(rank, alpha)), model)
    if adapter is not None:
        saved = huggingface.read_tensors(adapter / huggingface.ADAPTER_WEIGHTS)
        trained = {huggingface.hf_name(name): p for name, p in model.named_parameters() if p.requires_grad}
        if {name: t.shape for name, t in saved.items()} != {name: p.shape for name, p in trained.items()}:
            raise UserError(f"the matrices in {adapter} do not fit --lora-rank {rank}. Use another checkpoint.")
        with torch.no_grad():
            for name, parameter in trained.items():
                parameter.copy_(saved[name])


def frozen_sha256(model: torch.nn.Module) -> str | None:
    """SHA-256 of the frozen weights; None if all weights are trained, or if they are not on this rank (FSDP)."""
    frozen, digest = [p for p in model.parameters() if not (p.requires_grad or p.is_meta)], hashlib.sha256()
    for parameter in frozen:
        digest.update(parameter.cpu().contiguous().numpy().data)
    return digest.hexdigest() if frozen else None
