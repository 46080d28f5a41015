"""The memory of training, estimated: against arithmetic, and against what a real forward pass saves."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import TINY_SIZES

from benchmarks.plain_loop import PlainGPT
from support.checkpoints import huggingface, lora
from support.cli import UserError
from support.runtime import memory
from train_gpt2 import GPT, GPTConfig

GPT2_PARAMETERS = 124_475_904  # with the padded vocabulary


@pytest.fixture(scope="module")
def gpt2():
    with torch.device("meta"):
        return GPT(GPTConfig())


def test_persistent_memory_is_four_numbers_per_parameter(gpt2):
    estimate = memory.estimate_memory(gpt2, 1, 1024, torch.bfloat16, 1, 80 * 10**9)
    assert estimate.persistent == 16 * GPT2_PARAMETERS
    several = memory.estimate_memory(gpt2, 1, 1024, torch.bfloat16, 8, 80 * 10**9)
    assert several.persistent == 20 * GPT2_PARAMETERS and several.activations == estimate.activations
    for name, parameter in gpt2.named_parameters():
        parameter.requires_grad_(name.endswith("c_attn.weight"))
    frozen = memory.estimate_memory(gpt2, 1, 1024, torch.bfloat16, 1, 80 * 10**9)
    assert frozen.persistent == 4 * GPT2_PARAMETERS + 12 * 12 * 768 * 3 * 768
    gpt2.requires_grad_(True)


def test_activations_of_a_token_counted_by_hand(gpt2):
    """In units of C = 768: what each layer keeps of a token for its backward pass."""
    C, nh = 768, 12
    layer = (
        4 * C + 2 * C + 6 * C + 2 * C + 4 * C + 2 * C + 8 * C + 8 * C
    )  # bytes: ln_1's input in fp32 and its output in
    # bf16; query, key, value; attention's output; the same for ln_2; GELU's input and output
    layer += 2 * 2 * 4 + 4 * nh  # mean and deviation of two norms; attention's log-sum-exp of each head
    last = (
        4 * C + 2 * 4 + 2 * C + 8
    )  # ln_f's input, mean and deviation; the gradient that the loss saves; the token's id
    per_token = (
        memory.saved_bytes(gpt2, 3, 1024, torch.bfloat16) - memory.saved_bytes(gpt2, 2, 1024, torch.bfloat16)
    ) / 1024
    assert per_token == pytest.approx(12 * layer + last, rel=0.01)


@pytest.mark.parametrize("kind", ["ours", "compiled", "plain"])
def test_what_a_forward_pass_really_saves(tiny_model, kind):
    """Neither device nor data of the model matter. The plain model has buffers."""
    model = PlainGPT(GPTConfig(**TINY_SIZES)) if kind == "plain" else tiny_model
    saved = {}

    def count(tensor):
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    tokens = torch.zeros((4, 16), dtype=torch.int64)
    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        model(tokens, tokens)
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    real = sum(storage.nbytes() for address, storage in saved.items() if address not in own)
    model = torch.compile(model.to("meta")) if kind == "compiled" else model.to("meta")
    assert memory.saved_bytes(model, 4, 16, torch.float32) == real


def test_dropout_and_lora_are_estimated_too(tiny_model):
    """With dropout, attention on a CPU would save what flash attention on a GPU does not."""
    dropout = GPT(replace(tiny_model.config, dropout=0.1))
    plain = memory.saved_bytes(tiny_model, 4, 16, torch.float16)
    assert memory.saved_bytes(dropout, 4, 16, torch.float16) == plain
    assert dropout.training and all(block.training for block in dropout.transformer.h)
    lora.add_adapter(tiny_model, 32, 2, 16.0, 0, None)
    assert memory.saved_bytes(tiny_model, 4, 16, torch.bfloat16) > 0
    assert memory.estimate_memory(tiny_model, 4, 16, torch.bfloat16, 1, 10**10).persistent < 16 * 36224


def test_the_logits_of_a_chunk_are_counted(gpt2, tiny_model):
    """16,384 rows of them on an H200; in fp32, too, where nothing is compiled."""
    saved = memory.saved_bytes(gpt2, 16, 1024, torch.bfloat16)
    for model, logit_bytes in ((gpt2, 10), (torch.compile(gpt2), 2)):
        estimate = memory.estimate_memory(model, 16, 1024, torch.bfloat16, 1, 150 * 10**9)
        assert estimate.activations == saved + 16384 * 50304 * logit_bytes
        assert estimate.minimum < estimate.total
    few = memory.estimate_memory(gpt2, 2, 1024, torch.bfloat16, 1, 150 * 10**9)  # less than a chunk
    assert few.activations == memory.saved_bytes(gpt2, 2, 1024, torch.bfloat16) + 2048 * 50304 * 10
    tiny_model.transformer.h[0].eval()
    tiny = memory.estimate_memory(tiny_model, 4, 16, torch.float32, 1, 10**9)
    assert tiny.activations == memory.saved_bytes(tiny_model, 4, 16, torch.float32) + 64 * 320 * 12
    assert [block.training for block in tiny_model.transformer.h] == [False, True] and tiny_model.training


# ---- before a model exists


@pytest.mark.parametrize("config", [GPTConfig(), GPTConfig(**TINY_SIZES), GPTConfig(7, 257, 3, 2, 8, bias=False)])
def test_parameters_are_counted(config):
    with torch.device("meta"):
        model = GPT(config)
    padding = (config.padded_vocab_size - config.vocab_size) * config.n_embd
    assert memory.count_parameters(vars(config)) == sum(p.numel() for p in model.parameters()) - padding


def flags_of(config, **changes):
    return vars(config) | {"batch_size": 4, "optimizer": "adamw", "lora_rank": None, "recompute": False} | changes


@pytest.mark.parametrize(
    "config, changes, gigabytes, problem",
    [
        (GPTConfig(), {}, 3.3, None),
        (GPTConfig(), {}, 1.9, "training 124,439,808 parameters takes at least 2.0 GB, and 1.9 GB are available."),
        (GPTConfig(), {"optimizer": "muon"}, 1.4, "takes at least 1.5 GB, and 1.4 GB are available."),
        (GPTConfig(), {"lora_rank": 8}, 1.8, None),
        (
            GPTConfig(),
            {},
            0.4,
            "the model has 124,439,808 parameters, which take 498.2 MB, and this machine has 400.0 MB",
        ),
        (
            GPTConfig(),
            {"batch_size": 512},
            80.0,
            "micro-batches of 512 rows of 1024 tokens take at least 158.5 GB, and 80.0 GB",
        ),
        (GPTConfig(n_layer=10_000, n_embd=1), {}, 0.3, "which take 401.2 MB"),
        (GPTConfig(), {"batch_size": 10**9}, None, None),
    ],
)
def test_what_cannot_fit_is_refused(monkeypatch, config, changes, gigabytes, problem):
    monkeypatch.setattr(memory, "available_memory", lambda: gigabytes and round(gigabytes * 1e9))
    flags = flags_of(config, **changes)
    if problem is None:
        memory.check_training_fits(flags, config.vocab_size, torch.device("cpu"))
        return
    with pytest.raises(UserError) as error:
        memory.check_training_fits(flags, config.vocab_size, torch.device("cpu"))
    assert problem in str(error.value)


def test_fsdp_divides_what_must_fit_among_the_gpus(monkeypatch):
    monkeypatch.setattr(memory, "available_memory", lambda: 10**12)
    monkeypatch.setattr(memory.devices, "free_and_total_memory", lambda device: (24 * 10**9, 24 * 10**9))
    flags, gpu = flags_of(GPTConfig(n_layer=48, n_head=25, n_embd=1600)), torch.device("cuda")
    with pytest.raises(
        UserError, match=r"takes at least 24\.9 GB, and 24\.0 GB are .+ several GPUs with --parallel fsdp\.$"
    ):
        memory.check_training_fits(flags, 50257, gpu)
    memory.check_training_fits(flags, 50257, gpu, parts=2)


def test_what_is_refused_is_less_than_training_takes(gpt2):
    """In bf16, which takes least; of four more rows, without what does not depend on them."""
    layers = memory.LAYER_ACTIVATION_BYTES * 4 * 1024 * gpt2.config.n_layer * gpt2.config.n_embd
    less, more = (memory.saved_bytes(gpt2, B, 1024, torch.bfloat16) for B in (2, 6))
    saved = more - less
    assert 0.9 * saved < layers < saved


def test_the_fraction_that_a_compiled_model_saves():
    """By PyTorch's partitioner, as for Inductor; of four more rows, without what does not depend on them."""
    model = GPT(GPTConfig(block_size=128, vocab_size=257, n_layer=2, n_head=2, n_embd=128))

    def saved_by(forward, B):
        tokens, saved = torch.zeros((B, 128), dtype=torch.int64), {}

        def count(tensor):
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        hooks = torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor)
        with hooks, torch.autocast("cpu", torch.bfloat16):
            _, loss = forward(tokens, tokens)  # the result holds what is saved
        return sum(saved.values()), loss

    compiled = torch.compile(model, dynamic=False, backend="aot_eager_decomp_partition")
    eager, partitioned = (saved_by(f, 8)[0] - saved_by(f, 4)[0] for f in (model, compiled))
    fraction = partitioned / eager
    assert memory.COMPILED_FRACTION < fraction < memory.COMPILED_FRACTION + 0.15


def test_a_checkpoint_that_does_not_fit_is_refused_before_it_is_built(tiny_model, tmp_path, monkeypatch):
    tiny_model.save_pretrained(tmp_path)
    monkeypatch.setattr(memory, "available_memory", lambda: 100_000)
    with pytest.raises(UserError, match=r"config.json has 34,\d\d\d parameters, which take 0.2 MB"):
        huggingface.read_config(tmp_path)


def test_available_memory_is_part_of_all():
    available = memory.available_memory()
    assert available is None or 0 < available < 1.01 * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") + swap()


def swap():
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("SwapTotal"))
