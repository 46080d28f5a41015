"""Finds, reads and writes GPT-2 models in Hugging Face's format: `config.json` and `model.safetensors`.

The files have the format of transformers' GPT2LMHeadModel; only `load_hf_model` imports transformers itself.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from support.checkpoints.directory import CONTENTS, find_corruption, newest_checkpoint
from support.cli import UserError
from support.config import TrainConfig
from support.data.hub import hub_error_reason
from support.data.shards import has_intact_tokenizer, load_manifest
from support.data.tokenizer import (
    MALFORMED,
    TOKENIZER_FILES,
    TOKENIZER_JSON,
    Tokenizer,
    find_tokenizer,
    tokenizer_of_model,
)
from support.runtime.memory import check_model_fits

if TYPE_CHECKING:
    from transformers import GPT2LMHeadModel

GPT2_FIELDS = {"block_size", "vocab_size", "n_layer", "n_head", "n_embd", "bias", "dropout"}  # fields of GPTConfig
HF_NAMES = {  # field of config.json: field of GPTConfig
    "n_positions": "block_size",
    **{name: name for name in ("vocab_size", "n_layer", "n_head", "n_embd")},
}
CONFIG, WEIGHTS, ADAPTER_CONFIG = "config.json", "model.safetensors", "adapter_config.json"
FILES = [CONFIG, WEIGHTS, ADAPTER_CONFIG, *TOKENIZER_FILES]  # to download from the hub
OTHER_WEIGHTS = ("model.safetensors.index.json", "pytorch_model*.bin")
MAX_SIZE = 2**20  # far beyond any real model, so that a corrupt file gives a message and not a traceback
# The values that our model implements. The first is the default for a missing field.
SUPPORTED_MODEL_VALUES: dict[str, tuple[object, ...]] = {
    "model_type": ("gpt2",),
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "layer_norm_epsilon": (1e-5,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
    "tie_word_embeddings": (True,),
}
# Commands for weights in other files, with a source and a folder to write to. Part sizes: GPT-2 XL is more than 5 GB.
CONVERT_COMMAND = (
    'python -c "from transformers import GPT2LMHeadModel; '
    "GPT2LMHeadModel.from_pretrained({source!r}).save_pretrained({folder!r}, max_shard_size='50GB')\""
)
MERGE_COMMAND = (
    'python -c "from peft import AutoPeftModelForCausalLM; from transformers import AutoTokenizer; '
    "model = AutoPeftModelForCausalLM.from_pretrained({source!r}); "
    "model.merge_and_unload().save_pretrained({folder!r}, max_shard_size='50GB'); "
    "AutoTokenizer.from_pretrained(model.peft_config['default'].base_model_name_or_path).save_pretrained({folder!r})\""
)
# OpenAI's TensorFlow code and Hugging Face's Conv1D store these as (in, out), nn.Linear as (out, in).
TRANSPOSED = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")


def find_model(name_or_dir: str | os.PathLike[str], verify: bool = True) -> Path:
    """Returns the folder of a complete model, given its directory or its name on the hub. Downloads FILES only once.

    With `verify`, checks that there are weights, and compares the files of a checkpoint directory with their checksums.

    Raises:
        UserError: the directory is not an intact checkpoint, or the hub has no such model or cannot be reached.
    """
    directory = Path(name_or_dir)
    if not directory.exists():
        if directory.is_absolute() or (len(directory.parts) > 1 and directory.parent.is_dir()):
            raise UserError(f"{directory} does not exist. Check the path.")
        directory = _download(str(name_or_dir))
    if verify and not (directory / WEIGHTS).is_file():
        _check_other_weights(str(name_or_dir), directory)
    if not (directory / CONFIG).is_file():
        inside = newest_checkpoint(directory) if directory.is_dir() else None
        hint = f"Did you mean {inside}?" if inside else "Use a checkpoint directory, or a model on the hub."
        raise UserError(f"{name_or_dir} is not a checkpoint: it has no {CONFIG}. {hint}")
    corruption = find_corruption(directory) if verify and (directory / CONTENTS).exists() else None
    if corruption:
        raise UserError(f"{directory} is corrupt: {corruption}. Use another checkpoint.")
    return directory


def check_fits(source: str | Path, vocab_size: int, context: int, tokenizer: Tokenizer, config: TrainConfig) -> None:
    """Checks that pretrained weights with this vocabulary size and context fit a run and the `tokenizer` of its shards.

    Raises:
        UserError: they do not fit.
    """
    directory = find_model(source, verify=False)
    stated = None if (directory / TOKENIZER_JSON).exists() else config.tokenizer
    pretrained = tokenizer_of_model(directory, vocab_size, stated)
    if pretrained.fingerprint != tokenizer.fingerprint:
        raise UserError(
            f"{source} has a different tokenizer from the shards in {config.data}: {vocab_size:,} tokens instead of "
            f"{tokenizer.vocab_size:,} ({tokenizer.name}). Make shards with the model's tokenizer, in another folder: "
            f"fineweb.py --tokenizer {pretrained.name}{f' --tokenizer-from {source}' * (pretrained.name == 'bpe')}."
        )
    if config.block_size > context:
        raise UserError(f"{source} has a context of {context} tokens. Leave out --block-size, or lower it.")


def _check_other_weights(name: str, directory: Path) -> None:
    """Raises a UserError with the command that makes a model of a folder's weights, if they are in another kind of file."""
    if (directory / ADAPTER_CONFIG).is_file():
        if (directory.parent / WEIGHTS).is_file():
            raise UserError(f"{name} is a LoRA adapter. Use the merged model in {directory.parent}.")
        command = MERGE_COMMAND.format(source=name, folder=f"{Path(name).name}_merged")
        raise UserError(f"{name} is a peft adapter, not a complete model. Merge it with its base model: {command}")
    others = [path.name for pattern in OTHER_WEIGHTS for path in directory.glob(pattern)]
    if others:
        command = CONVERT_COMMAND.format(source=name, folder=name)
        raise UserError(f"{name} has its weights in {others[0]}, not in {WEIGHTS}. Convert them: {command}")
    if directory != Path(name) and (directory / CONFIG).is_file():
        folder = Path(name).name
        command = CONVERT_COMMAND.format(source=folder, folder=folder)
        raise UserError(
            f"{name} has no {WEIGHTS} on the hub. Download and convert it: hf download {name} --local-dir {folder} && {command}"
        )


def _download(name: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=FILES))
    except Exception as error:  # the hub's own errors and the HTTP library's have no base class in common
        raise UserError(
            f"no model {name!r}: it is not a directory, and {hub_error_reason(error)}. Check the name and the network.",
            this_rank_only=True,
        ) from error


def find_tokenizer_folder(name_or_dir: str, kind: str) -> Path:
    """Returns the folder of a model or of shards, whose `tokenizer.json` has a tokenizer of this kind, such as "bpe".

    Raises:
        UserError: the folder has no tokenizer, or one of a different kind.
    """
    directory = Path(name_or_dir)
    if manifest := load_manifest(directory):
        path = directory / TOKENIZER_JSON
        if path.exists() and not has_intact_tokenizer(directory, manifest):
            raise UserError(f"{path} was altered. Use another --tokenizer-from.")
    else:
        directory = find_model(name_or_dir, verify=(directory / CONTENTS).exists())
    tokenizer = find_tokenizer(directory)
    if tokenizer is None:
        raise UserError(f"{directory} has no {TOKENIZER_JSON}. Use another --tokenizer-from.")
    if (name := tokenizer.name) != kind:
        without = ", without --tokenizer-from" if name == "bytes" else ""
        raise UserError(f"{name_or_dir} has the tokenizer {name}. Use --tokenizer {name}{without}.")
    return directory


def read_model_config(directory: Path, known: Collection[str]) -> dict[str, Any]:
    """Returns the content of `config.json` as `read_config` does, for a model that knows these fields.

    Raises:
        UserError: as in `read_config`, or the model has another option.
    """
    config = read_config(directory)
    if unknown := sorted(config.keys() - known):
        raise UserError(f"the model in {directory} has an option {unknown[0]}. Use the train_gpt2.py that made it.")
    return config


def read_config(directory: Path) -> dict[str, Any]:
    """Returns the content of `config.json` as a dict keyed by GPTConfig's fields: sizes, `bias`, and options, if any.

    Hugging Face's model always has biases. For a model of ours without biases, the weights file has zeros in
    their place, and `config.json` says `"bias": false`.

    Raises:
        UserError: the file is unreadable, our code does not implement its model, or the model does not fit into memory.
    """
    path = directory / CONFIG
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        sizes: dict[str, Any] = {ours: config[hf] for hf, ours in HF_NAMES.items()}
        if not all(type(size) is int for size in sizes.values()):
            raise ValueError(f"sizes must be integers, not {sizes}")
        options = dict(config.get("options", {}))
    except MALFORMED as error:
        raise UserError(f"{path} is not a GPT-2 configuration ({error!r}). Use another checkpoint.") from error
    if options:  # see `write_model`
        config["activation_function"] = "gelu_new"
    problems = [
        f"{path}: {field} is {config[field]!r}, but only {supported[0]!r} is supported. Use another model."
        for field, supported in (SUPPORTED_MODEL_VALUES | {"n_inner": (None, 4 * sizes["n_embd"])}).items()
        if config.get(field, supported[0]) not in supported
    ]
    problems += [
        f"{path}: {name} is {size}. It must be from 1 to {MAX_SIZE:,}."
        for name, size in sizes.items()
        if not 1 <= size <= MAX_SIZE
    ]
    if not problems and sizes["n_embd"] % sizes["n_head"]:
        problems.append(f"{path}: n_embd {sizes['n_embd']} is not a multiple of n_head {sizes['n_head']}.")
    if problems:
        raise UserError(*problems)
    sizes["bias"] = config.get("bias") is not False
    check_model_fits(sizes)
    return sizes | options


def read_weights(path: Path) -> dict[str, torch.Tensor]:
    """Returns the tensors of a safetensors file.

    Raises:
        UserError: it cannot be read.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot read {path}: {error}. Download it again, or use another checkpoint.") from error


def from_hf(
    hf_weights: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], vocab_size: int
) -> dict[str, torch.Tensor]:
    """Converts a state dict of GPT2Model or GPT2LMHeadModel to one of ours.

    Args:
        hf_weights: may lack the prefix `transformer.` and the tied `lm_head.weight`, and may have old files' masks.
        expected: our model's `state_dict(keep_vars=True)`, for names, shapes, and whether the head is tied.
        vocab_size: rows of the embedding in the file; ours is padded with rows of zeros.

    Raises:
        UserError: tensors are missing or unknown, or have a wrong shape or dtype; the message names each.
    """
    weights = {}
    for key, tensor in _check_weights(hf_weights, expected, vocab_size).items():
        weights[key] = torch.zeros(expected[key].shape)
        weights[key][: len(tensor)] = tensor
    return weights


def _check_weights(
    hf_weights: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], vocab_size: int
) -> dict[str, torch.Tensor]:
    """Returns the tensors with our names and layout, without padding; see `from_hf`."""
    named: dict[str, torch.Tensor] = {}
    for key, tensor in hf_weights.items():
        key = key if key.startswith(("transformer.", "lm_head.")) else f"transformer.{key}"
        is_mask = key.endswith((".attn.bias", ".attn.masked_bias"))  # the causal mask is not a parameter
        is_added = key.endswith(".bias") and key not in expected and f"{key[:-4]}weight" in expected
        if not is_mask and not (is_added and not tensor.any()):  # a model without biases has zeros in the file
            named[key] = tensor.t() if key.endswith(TRANSPOSED) and tensor.dim() == 2 else tensor
    head, embedding = "lm_head.weight", "transformer.wte.weight"
    ties = expected[head] is expected[embedding]
    if ties and embedding in named:
        named.setdefault(head, named[embedding])
    problems = [
        f"the weights contain {key}, which a GPT-2 with this {CONFIG} does not have."
        for key in named
        if key not in expected
    ]
    for key, parameter in expected.items():
        shape = (vocab_size, *parameter.shape[1:]) if key in (head, embedding) else tuple(parameter.shape)
        if key not in named:
            problems.append(f"the weights lack {key}.")
        elif tuple(named[key].shape) != shape or not named[key].is_floating_point():
            found = f"{key} is {named[key].dtype} of shape {tuple(named[key].shape)}"
            problems.append(f"{found}, which does not fit config.json.")
    if not problems and ties and not torch.equal(named[head], named[embedding]):
        problems.append(f"{head} differs from {embedding}, but this model ties them.")
    if problems:
        raise UserError(*problems).with_hint("Use another checkpoint.")
    return named


def load_hf_model(directory: Path) -> GPT2LMHeadModel:
    """Returns Hugging Face's own GPT2LMHeadModel with the weights in a directory, in fp32, for inference.

    It is built only from what `read_config` returns, so no other field of `config.json` can change the results.

    Raises:
        UserError: the configuration or the weights do not belong to a GPT-2; the message says why.
    """
    from transformers import GPT2Config, GPT2LMHeadModel
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    sizes = read_config(directory)
    config = GPT2Config(
        **{hf: sizes[ours] for hf, ours in HF_NAMES.items()},
        bos_token_id=None,
        eos_token_id=None,
        activation_function="gelu_pytorch_tanh",  # gelu_new, in one kernel
        attn_implementation="sdpa",  # type: ignore[call-arg]  # an argument of the base class
    )
    with torch.device("meta"):
        shapes = GPT2LMHeadModel(config).state_dict(keep_vars=True)
    expected = {name: tensor.t() if name.endswith(TRANSPOSED) else tensor for name, tensor in shapes.items()}
    weights = _check_weights(read_weights(directory / WEIGHTS), expected, sizes["vocab_size"])
    # a copy: the file is mapped into memory, and somebody may write it again meanwhile
    weights = {
        name: (w.t() if name.endswith(TRANSPOSED) else w).to(torch.float32, copy=True) for name, w in weights.items()
    }
    del weights["lm_head.weight"]  # the model ties it to the embedding
    return GPT2LMHeadModel.from_pretrained(None, config=config, state_dict=weights, dtype=torch.float32).eval()


def to_hf(weights: Mapping[str, torch.Tensor], vocab_size: int) -> dict[str, torch.Tensor]:
    """Converts our parameters, by name, to GPT2LMHeadModel's: fp32, contiguous, without padding rows.

    Biases that our model does not have become zeros.
    """
    hf_weights: dict[str, torch.Tensor] = {}
    for key, tensor in weights.items():
        if key.endswith(".weight") and not key.endswith(("wte.weight", "wpe.weight", "lm_head.weight")):
            hf_weights.setdefault(key.removesuffix("weight") + "bias", torch.zeros(len(tensor)))
        tensor = tensor.detach().to("cpu", torch.float32)
        tensor = tensor[:vocab_size] if key in ("transformer.wte.weight", "lm_head.weight") else tensor
        hf_weights[key] = (tensor.t() if key.endswith(TRANSPOSED) else tensor).contiguous()
    return hf_weights


def options_of(config: Any) -> dict[str, Any]:
    """Returns the fields that make a model differ from GPT-2: fields added to GPTConfig that do not have their default."""
    added = [field for field in fields(config) if field.name not in GPT2_FIELDS]
    return {field.name: value for field in added if (value := getattr(config, field.name)) != field.default}


def write_model(directory: Path, config: Any, hf_weights: dict[str, torch.Tensor]) -> None:
    """Writes `config.json`, for a GPTConfig, and `model.safetensors`, with weights from `to_hf`.

    A model with options is not a GPT-2: Hugging Face and llama.cpp would compute something else, so they must refuse it.
    """
    from safetensors.torch import save_file

    end_of_text = config.vocab_size - 1  # the last id in all our tokenizers
    values: dict[str, Any] = {"architectures": ["GPT2LMHeadModel"]}
    values |= {field: supported[0] for field, supported in SUPPORTED_MODEL_VALUES.items()} | {"n_inner": None}
    values |= {hf: getattr(config, ours) for hf, ours in HF_NAMES.items()} | ({} if config.bias else {"bias": False})
    values["n_ctx"] = config.block_size  # the older name of n_positions, which llama.cpp reads
    values |= dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
    values |= {"initializer_range": 0.02, "bos_token_id": end_of_text, "eos_token_id": end_of_text, "dtype": "float32"}
    if options := options_of(config):
        # llama.cpp rejects an unknown architecture; Hugging Face rejects an unknown activation, and prints its name
        values |= {"options": options, "architectures": ["GPT"]}
        values["activation_function"] = f"gelu_new, in a model that only train_gpt2.py can open: {options}"
    directory.mkdir(parents=True, exist_ok=True)
    (directory / CONFIG).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    save_file(hf_weights, directory / WEIGHTS, metadata={"format": "pt"})
