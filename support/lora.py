"""LoRA (arXiv:2106.09685) by peft: small matrices beside frozen ones, which alone are trained and saved."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from support.cli import UserError

TARGETS = ["c_attn", "c_proj"]  # of the attention, and the projection of the MLP
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."  # of peft's names
# An adapter that says otherwise adds something else than alpha / rank times B A to a weight.
PLAIN = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "use_rslora": (False,),
    "use_dora": (False,),
    "modules_to_save": (None, []),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
}


def is_adapter(directory: Path) -> bool:
    return (directory / CONFIG).is_file()


def add(model: torch.nn.Module, rank: int, alpha: float, seed: int, adapter: Path | None) -> None:
    """Freezes a GPT and puts matrices of this rank beside those of `TARGETS`: new ones, or those of a checkpoint."""
    from peft import LoraConfig, inject_adapter_in_model

    if rank > model.config.n_embd:
        raise UserError(f"--lora-rank {rank} is more than the model's {model.config.n_embd} channels. Lower it.")
    torch.manual_seed(seed)
    inject_adapter_in_model(LoraConfig(**_options(rank, alpha)), model)
    if adapter is not None:
        saved, trained = _read(adapter), _trained(model)
        if saved.keys() != trained.keys():
            raise UserError(f"the matrices in {adapter} are not those of --lora-rank {rank}. Use another checkpoint.")
        with torch.no_grad():
            for name, parameter in trained.items():
                parameter.copy_(saved[name])


def identity(model: torch.nn.Module) -> str | None:
    """SHA-256 of the weights that stay, for an adapter is of no use beside others; None if all are trained."""
    frozen, digest = [p for p in model.parameters() if not p.requires_grad], hashlib.sha256()
    for parameter in frozen:
        digest.update(parameter.cpu().contiguous().numpy())
    return digest.hexdigest() if frozen else None


def problems(config: Any) -> list[str]:
    """What keeps the flags of a run from going together."""
    if config.lora_rank is None:
        without = ["--merge"] * config.merge + ["--lora-alpha"] * (config.lora_alpha != 16.0)
        return [f"{flag} is for LoRA. Give --lora-rank as well, or leave it out." for flag in without]
    found = []
    if config.init_from is None:
        found.append("--lora-rank has no weights to stand beside. Name some with --init-from.")
    if config.optimizer == "muon" or (config.optimizer is None and config.recipe == "fast"):
        found.append("Muon is not for the small matrices of LoRA. Use --optimizer adamw, and --recipe gpt2.")
    return found


def write(directory: Path, weights: Mapping[str, torch.Tensor], config: Any) -> None:
    """Writes an adapter as `peft` does: `PeftModel.from_pretrained` opens it on Hugging Face's model of its base."""
    from peft import LoraConfig
    from safetensors.torch import save_file

    base = str(Path(config.init_from).resolve()) if Path(config.init_from).exists() else config.init_from
    options = _options(config.lora_rank, config.lora_alpha) | dict(task_type="CAUSAL_LM", inference_mode=True)
    theirs = LoraConfig(**options, fan_in_fan_out=True)  # Hugging Face holds these matrices the other way round
    theirs.base_model_name_or_path = base
    directory.mkdir(parents=True, exist_ok=True)
    theirs.save_pretrained(str(directory))
    save_file({_theirs(name): weight.contiguous() for name, weight in weights.items()}, directory / WEIGHTS)


@torch.no_grad()
def whole(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The weights of a GPT to which `add` gave matrices, with what these add."""
    from peft.tuners.lora import LoraLayer

    weights = {name.replace(".base_layer", ""): w for name, w in model.state_dict().items() if ".lora_" not in name}
    for name, module in model.named_modules():
        if isinstance(module, LoraLayer):
            weights[f"{name}.weight"] = weights[f"{name}.weight"] + module.get_delta_weight("default")
    return weights


def base_of(directory: Path) -> str:
    """The name or folder of the model that an adapter belongs to."""
    base = _config(directory)["base_model_name_or_path"]
    if Path(base).resolve() == directory.resolve():
        raise UserError(f"{directory} names itself as the model that it belongs to. Use another adapter.")
    return base


def merged(weights: Mapping[str, torch.Tensor], directory: Path) -> dict[str, torch.Tensor]:
    """Weights of the base under Hugging Face's names, with an adapter's product added to each that it is beside."""
    config, matrices, result = _config(directory), _read(directory), dict(weights)
    for name in (name for name in matrices if ".lora_A." in name):
        a, b = matrices[name], matrices[name.replace(".lora_A.", ".lora_B.")]  # (rank, in), (out, rank)
        key = name.split(".lora_A.")[0].removeprefix(PREFIX) + ".weight"
        key = key if key in result else key.removeprefix("transformer.")
        if key not in result or result[key].shape != (a.size(1), len(b)):
            raise UserError(f"{directory} is for another model than {base_of(directory)}: {key} does not fit.")
        result[key] = result[key] + (b @ a).t() * (config["lora_alpha"] / config["r"])
    return result


def _options(rank: int, alpha: float) -> dict[str, Any]:
    return dict(r=rank, lora_alpha=alpha, target_modules=TARGETS)


def _trained(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    return {_theirs(name): p for name, p in model.named_parameters() if p.requires_grad}


def _theirs(name: str) -> str:
    return PREFIX + name.replace(".default.", ".")


def _config(directory: Path) -> dict[str, Any]:
    path = directory / CONFIG
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        _ = Path(config["base_model_name_or_path"]), config["lora_alpha"] / config["r"]
    except (OSError, ValueError, KeyError, TypeError, ZeroDivisionError) as error:
        raise UserError(f"{path} is not the configuration of an adapter ({error!r}). Use another one.") from error
    for field, accepted in PLAIN.items():
        if config.get(field, accepted[0]) not in accepted:
            raise UserError(f"{path}: {field} is {config[field]!r}; only {accepted[0]!r} is read here.")
    return config


def _read(directory: Path) -> dict[str, torch.Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        matrices = load_file(directory / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot read {directory / WEIGHTS}: {error}. Use another adapter.") from error
    for name in matrices:
        other = name.replace(".lora_A.", ".lora_B.") if ".lora_A." in name else name.replace(".lora_B.", ".lora_A.")
        if other == name or other not in matrices:
            raise UserError(f"{directory / WEIGHTS}: {name} is no half of a LoRA product. Use another adapter.")
    return matrices
