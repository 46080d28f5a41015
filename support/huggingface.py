"""GPT-2 weights in Hugging Face's files (`config.json`, `model.safetensors`): found, read and written.

`transformers` itself is not needed for that. The formats are those of its GPT2LMHeadModel.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from support import checkpoint, lora
from support.cli import UserError
from support.download import hub_trouble

# Hugging Face's names of the sizes, and ours.
SIZES = {
    "n_positions": "block_size",
    "vocab_size": "vocab_size",
    "n_layer": "n_layer",
    "n_head": "n_head",
    "n_embd": "n_embd",
}
LARGEST = 2**20  # of any size: far beyond what there is, and what a broken file has instead makes no traceback
# What our model computes; a file that says otherwise is another model. A missing field has its default, the first value.
FIXED: dict[str, tuple] = {
    "model_type": ("gpt2",),
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "layer_norm_epsilon": (1e-5,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
    "tie_word_embeddings": (True,),
}
# OpenAI's TensorFlow code kept these as (in, out), and so does Hugging Face's Conv1D; nn.Linear holds (out, in).
TRANSPOSED = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")


def find(name_or_dir: str | os.PathLike) -> Path:
    """The folder of `config.json` and `model.safetensors`: a directory as it is, a hub name (`gpt2`) downloaded once.

    Raises:
        UserError: the directory is no checkpoint, or the hub has no such model or cannot be reached.
    """
    directory = Path(name_or_dir)
    if directory.exists():
        if not (directory / "config.json").is_file() and not lora.is_adapter(directory):
            inside = checkpoint.newest(directory) if directory.is_dir() else None
            hint = f"Did you mean {inside}?" if inside else "Name a directory that has one, or a model of the hub."
            raise UserError(f"{directory} is not a checkpoint: there is no config.json in it. {hint}")
        harm = checkpoint.damage(directory) if (directory / checkpoint.CONTENTS).exists() else None
        if harm:
            raise UserError(f"{directory} is damaged: {harm}. Use another checkpoint.")
        return directory
    if directory.is_absolute() or (len(directory.parts) > 1 and directory.parent.is_dir()):
        raise UserError(f"there is no {directory}. Check the path.")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(str(name_or_dir), allow_patterns=["config.json", "model.safetensors"]))
    except Exception as error:  # the hub's own errors and the HTTP library's have no base in common
        raise UserError(
            f"no model {str(name_or_dir)!r}: there is no such directory, and {hub_trouble(error)}. Check the name and the network.",
            this_rank_only=True,
        ) from error


def read_config(directory: Path) -> dict[str, Any]:
    """The sizes in `config.json` under our names, and whether there are biases.

    Hugging Face's model has biases always. Where ours has none, its file has zeros and says `"bias": false`.

    Raises:
        UserError: it is unreadable, or describes a model that ours does not compute; the field is named.
    """
    if lora.is_adapter(directory):
        return read_config(find(lora.base_of(directory)))
    path = directory / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        sizes = {ours: config[theirs] for theirs, ours in SIZES.items()}
        if not all(type(size) is int for size in sizes.values()):
            raise ValueError(f"sizes are whole numbers, not {sizes}")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f"{path} is not a GPT-2 configuration ({error!r}). Use another checkpoint.") from error
    fixed = FIXED | {"n_inner": (None, 4 * sizes["n_embd"])}
    problems = [
        f"{path}: {field} is {config[field]!r}; this model has {accepted[0]!r}."
        for field, accepted in fixed.items()
        if config.get(field, accepted[0]) not in accepted
    ]
    problems += [
        f"{path}: {name} is {size}. It must be from 1 to {LARGEST:,}."
        for name, size in sizes.items()
        if not 1 <= size <= LARGEST
    ]
    if not problems and sizes["n_embd"] % sizes["n_head"]:
        problems.append(f"{path}: n_embd {sizes['n_embd']} is not a multiple of n_head {sizes['n_head']}.")
    if problems:
        raise UserError(*problems)
    return sizes | {"bias": config.get("bias") is not False}


def read_weights(directory: Path) -> dict[str, torch.Tensor]:
    """The tensors of `model.safetensors`, under Hugging Face's names; of an adapter its base's, with it added."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if lora.is_adapter(directory):
        return lora.merged(read_weights(find(lora.base_of(directory))), directory)
    path = directory / "model.safetensors"
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot read {path}: {error}. Get it again, or use another checkpoint.") from error


def to_ours(
    theirs: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], vocab_size: int
) -> dict[str, torch.Tensor]:
    """A state dict of GPT2Model or GPT2LMHeadModel, as one of ours.

    Args:
        theirs: with or without the prefix `transformer.`, the masks of old files and the tied `lm_head.weight`.
        expected: our model's state dict, for names and shapes.
        vocab_size: rows of the embedding in the file; ours has more, the padding, which becomes zero.

    Raises:
        UserError: a tensor is missing, unknown, or of another shape; each is named.
    """
    ours = {}
    for key, tensor in _checked(theirs, expected, vocab_size).items():
        ours[key] = torch.zeros(expected[key].shape)
        ours[key][: len(tensor)] = tensor
    return ours


def _checked(
    theirs: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], vocab_size: int
) -> dict[str, torch.Tensor]:
    """The same tensors under our names and as we hold them, but for the padding; see `to_ours`."""
    named = {}
    for key, tensor in theirs.items():
        key = key if key.startswith(("transformer.", "lm_head.")) else f"transformer.{key}"
        of_nothing = key.endswith(".bias") and key not in expected and key[:-4] + "weight" in expected
        if of_nothing and not tensor.any():
            continue  # of a model without biases
        if key in named:
            raise UserError(f"the weights have {key} twice, once without its prefix. Get them again.")
        if not key.endswith((".attn.bias", ".attn.masked_bias")):  # the causal mask, not a parameter
            named[key] = tensor.t() if key.endswith(TRANSPOSED) and tensor.dim() == 2 else tensor
    wte = named.get("transformer.wte.weight")
    head = named.setdefault("lm_head.weight", wte)
    problems = [f"the weights lack {key}." for key in expected if named.get(key) is None]
    problems += [f"the weights have {key}, which GPT-2 does not." for key in named if key not in expected]
    if not problems and head is not wte and not torch.equal(head, wte):
        problems.append("lm_head.weight differs from transformer.wte.weight; in this model they are one.")
    for key, tensor in named.items() if not problems else ():
        shape = tuple(expected[key].shape)
        padded = key in ("transformer.wte.weight", "lm_head.weight")
        if tuple(tensor.shape) != ((vocab_size, *shape[1:]) if padded else shape):
            problems.append(f"{key} has the shape {tuple(tensor.shape)}, which does not fit config.json.")
        elif not tensor.is_floating_point():
            problems.append(f"{key} has the type {tensor.dtype}, which is none of weights.")
    if problems:
        raise UserError(*problems)
    return named


def load_theirs(directory: Path) -> Any:
    """Hugging Face's own GPT2LMHeadModel in fp32, with the weights in a directory, for inference.

    Of the configuration only what `read_config` returns is used: nothing else in the file can change what is computed.

    Raises:
        UserError: the configuration or the weights are not those of a GPT-2; what is wrong is named.
    """
    from transformers import GPT2Config, GPT2LMHeadModel
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    sizes = read_config(directory)
    config = GPT2Config(
        **{theirs: sizes[ours] for theirs, ours in SIZES.items()},
        activation_function="gelu_pytorch_tanh",  # gelu_new, in one kernel
        attn_implementation="sdpa",
    )
    with torch.device("meta"):
        shapes = GPT2LMHeadModel(config).state_dict()
    expected = {name: tensor.t() if name.endswith(TRANSPOSED) else tensor for name, tensor in shapes.items()}
    weights = _checked(read_weights(directory), expected, sizes["vocab_size"])
    weights = {name: (w.t() if name.endswith(TRANSPOSED) else w).float() for name, w in weights.items()}
    del weights["lm_head.weight"]  # the model ties it to the embedding
    return GPT2LMHeadModel.from_pretrained(None, config=config, state_dict=weights, dtype=torch.float32).eval()


def to_theirs(ours: Mapping[str, torch.Tensor], vocab_size: int) -> dict[str, torch.Tensor]:
    """Our state dict as GPT2LMHeadModel's: fp32, contiguous, without the padding rows, the tied weight once.

    It has zeros where a model without biases has none.
    """
    theirs = {}
    weights = (
        key for key in ours if key.endswith(".weight") and not key.endswith(("wte.weight", "wpe.weight", "head.weight"))
    )
    biases = {key.removesuffix("weight") + "bias": torch.zeros(len(ours[key])) for key in weights}
    for key, tensor in (biases | dict(ours)).items():
        if key == "lm_head.weight":
            continue
        tensor = tensor.detach().to("cpu", torch.float32)
        tensor = tensor[:vocab_size] if key == "transformer.wte.weight" else tensor
        theirs[key] = (tensor.t() if key.endswith(TRANSPOSED) else tensor).contiguous()
    return theirs


def save_merged(model: Any, tokenizer: Any, directory: Path) -> None:
    """Makes a plain checkpoint of a GPT with LoRA: what its matrices add is added to the weights."""

    def write_files(folder: Path) -> None:
        write(folder, asdict(model.config), to_theirs(lora.whole(model), model.config.vocab_size))
        tokenizer.save_pretrained(folder, model_max_length=model.config.block_size)

    print(f"merged into {checkpoint.save(directory, write_files)}", flush=True)


def write(directory: Path, sizes: Mapping[str, int], weights: dict[str, torch.Tensor]) -> None:
    """Writes `config.json` and `model.safetensors`. `sizes` are under our names, `weights` under Hugging Face's."""
    from safetensors.torch import save_file

    end_of_text = sizes["vocab_size"] - 1  # true of both our encodings
    config: dict[str, Any] = {"architectures": ["GPT2LMHeadModel"]}
    config |= {field: accepted[0] for field, accepted in FIXED.items()} | {"n_inner": None}
    config |= {theirs: sizes[ours] for theirs, ours in SIZES.items()}
    config |= {} if sizes["bias"] else {"bias": False}
    config |= dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
    config |= {"initializer_range": 0.02, "bos_token_id": end_of_text, "eos_token_id": end_of_text, "dtype": "float32"}
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
