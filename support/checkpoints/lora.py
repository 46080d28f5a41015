"""LoRA (arXiv:2106.09685) through peft: small matrices next to frozen weights; only they are trained and saved."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from support.cli import UserError

TARGET_MODULES = ["c_attn", "c_proj"]  # of the attention, and the projection of the MLP
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
BASE_SHA256 = "base_sha256"  # in the metadata of WEIGHTS
HF_PREFIX = "base_model.model."  # of peft's parameter names
# Values of an adapter's configuration for which the adapted weight is W + alpha / rank * B A. Some initializations change
# W. Fields that are in neither of these must be empty: peft adds variants of LoRA.
SUPPORTED_ADAPTER_VALUES: dict[str, tuple[object, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "init_lora_weights": (True, False, "gaussian", "orthogonal"),
}
HARMLESS_ADAPTER_FIELDS = set(
    "auto_mapping base_model_name_or_path exclude_modules fan_in_fan_out inference_mode layers_pattern "
    "layers_to_transform lora_alpha lora_dropout megatron_config megatron_core peft_version qalora_group_size r revision "
    "target_modules task_type".split()
)


def flag_conflicts(cli_flags: Mapping[str, Any]) -> list[str]:
    """One sentence for each flag of the command line that conflicts with LoRA, or needs it."""
    if "lora_rank" not in cli_flags:
        return ["--lora-alpha is for LoRA. Add --lora-rank, or leave it out."] if "lora_alpha" in cli_flags else []
    problems = []
    if "init_from" not in cli_flags:
        problems.append("--lora-rank needs pretrained weights to adapt. Pass them with --init-from.")
    optimizer = cli_flags.get("optimizer", "muon" if cli_flags.get("recipe") == "fast" else "adamw")
    if optimizer == "muon":
        problems.append("Muon does not suit LoRA's small matrices. Use --optimizer adamw, and --recipe gpt2.")
    return problems


def add_adapter(model: torch.nn.Module, n_embd: int, rank: int, alpha: float, seed: int, adapter: Path | None) -> None:
    """Freezes a GPT and adds trainable matrices of this rank to TARGET_MODULES: random ones, or those of a checkpoint.

    Raises:
        UserError: the rank exceeds the width of the model, or the checkpoint has matrices of another rank.
    """
    from peft import LoraConfig, inject_adapter_in_model

    if rank > n_embd:
        raise UserError(f"--lora-rank {rank} is more than the model's {n_embd} channels. Lower it.")
    torch.manual_seed(seed)
    inject_adapter_in_model(LoraConfig(**_options(rank, alpha)), model)
    if adapter is not None:
        saved, _ = _read_matrices(adapter)
        trained = {hf_name(name): p for name, p in model.named_parameters() if p.requires_grad}
        if saved.keys() != trained.keys():
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


def adapted_sha256(model: torch.nn.Module) -> str | None:
    """SHA-256 of the base model's matrices that LoRA adapts, as `merge` computes it; None without LoRA, or elsewhere."""
    names = {name: p for name, p in model.named_parameters() if name.endswith(".base_layer.weight") and not p.is_meta}
    return _sha256({name.replace(".base_layer", ""): p.detach().t() for name, p in names.items()}) if names else None


def _sha256(matrices: Mapping[str, torch.Tensor]) -> str:
    """SHA-256 of matrices in Hugging Face's layout, in order of their names with or without `transformer.`"""
    digest = hashlib.sha256()
    for _, matrix in sorted((name.removeprefix("transformer."), matrix) for name, matrix in matrices.items()):
        digest.update(matrix.float().cpu().contiguous().numpy().data)
    return digest.hexdigest()


def write_adapter(
    directory: Path, matrices: Mapping[str, torch.Tensor], base: str, rank: int, alpha: float, base_sha256: str | None
) -> None:
    """Writes an adapter as peft does: `PeftModel.from_pretrained` opens it on Hugging Face's model of its base.

    Args:
        base_sha256: `adapted_sha256` of the base model. It is stored, for `merge` to compare.
    """
    from peft import LoraConfig
    from safetensors.torch import save_file

    options = _options(rank, alpha) | dict(task_type="CAUSAL_LM", inference_mode=True)
    config = LoraConfig(**options, fan_in_fan_out=True)  # Hugging Face's GPT-2 stores these weights transposed
    config.base_model_name_or_path = str(Path(base).resolve()) if Path(base).exists() else base
    config.save_pretrained(str(directory))
    matrices = {hf_name(name): matrix.contiguous() for name, matrix in matrices.items()}
    # a single entry: safetensors writes several in a random order, and files of one run would differ
    save_file(matrices, directory / WEIGHTS, {BASE_SHA256: base_sha256} if base_sha256 else None)


def is_adapter(directory: Path) -> bool:
    return (directory / CONFIG).is_file()


def base_model_of(directory: Path) -> str:
    """The name or folder of the model that an adapter belongs to."""
    base = _read_config(directory)["base_model_name_or_path"]
    if Path(base).resolve() == directory.resolve():
        raise UserError(f"{directory} names itself as its base model. Use another adapter.")
    return base


def merge(weights: Mapping[str, torch.Tensor], directory: Path) -> dict[str, torch.Tensor]:
    """The base model's weights, under Hugging Face's names, with an adapter merged in: W + alpha / rank * B A.

    Raises:
        UserError: the adapter is unreadable, or was trained on other weights.
    """
    config, (matrices, base_sha256), merged = _read_config(directory), _read_matrices(directory), dict(weights)
    adapted = {}
    for name in (name for name in matrices if ".lora_A." in name):
        a, b = matrices[name], matrices[name.replace(".lora_A.", ".lora_B.")]  # (rank, in), (out, rank)
        key = name.split(".lora_A.")[0].removeprefix(HF_PREFIX) + ".weight"
        key = key if key in merged else key.removeprefix("transformer.")
        if key not in merged or merged[key].shape != (a.size(1), len(b)):
            raise _other_base(directory, f"{key} does not fit")
        adapted[key] = merged[key]
        merged[key] = merged[key] + (b @ a).t() * (config["lora_alpha"] / config["r"])
    if base_sha256 not in (None, _sha256(adapted)):
        raise _other_base(directory, "its weights differ")
    return merged


def _other_base(directory: Path, difference: str) -> UserError:
    return UserError(
        f"{directory} was trained on another model than {base_model_of(directory)}: {difference}. "
        "Put its own base model into adapter_config.json."
    )


def hf_name(name: str) -> str:
    """peft's name of one of our parameters."""
    return HF_PREFIX + name.replace(".default.", ".")


def _options(rank: int, alpha: float) -> dict[str, Any]:
    return dict(r=rank, lora_alpha=alpha, target_modules=TARGET_MODULES)


def _read_config(directory: Path) -> dict[str, Any]:
    path = directory / CONFIG
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        _ = Path(config["base_model_name_or_path"]), config["lora_alpha"] / config["r"]
    except (OSError, ValueError, KeyError, TypeError, ZeroDivisionError, RecursionError) as error:
        raise UserError(f"{path} is not an adapter's configuration ({error!r}). Use another adapter.") from error
    for field in sorted(config.keys() - HARMLESS_ADAPTER_FIELDS):
        supported = SUPPORTED_ADAPTER_VALUES.get(field)
        if config[field] not in supported if supported else config[field]:
            only = f"only {supported[0]!r} is" if supported else "this is not"
            raise UserError(f"{path}: {field} is {config[field]!r}, and {only} supported. Use another adapter.")
    return config


def _read_matrices(directory: Path) -> tuple[dict[str, torch.Tensor], str | None]:
    """The matrices of an adapter, and the SHA-256 of its base model if it is known."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(directory / WEIGHTS, framework="pt") as file:
            matrices = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  it is no mapping
            base_sha256 = (file.metadata() or {}).get(BASE_SHA256)
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot read {directory / WEIGHTS}: {error}. Use another adapter.") from error
    for name in matrices:
        other = name.replace(".lora_A.", ".lora_B.") if ".lora_A." in name else name.replace(".lora_B.", ".lora_A.")
        if other == name or other not in matrices:
            raise UserError(f"{directory / WEIGHTS}: {name} lacks its other LoRA matrix. Use another adapter.")
    return matrices, base_sha256
