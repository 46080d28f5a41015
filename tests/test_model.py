"""The model against Hugging Face's GPT-2 with the same random weights, and what must hold for any GPT-2."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from helpers import TINY_SIZES, losses
from hf_models import copy_of, hf_model
from torch.nn import functional as F
from training import TINY, trained

import train_gpt2
from support.checkpoints import huggingface
from support.optim.layers import causal_attention
from train_gpt2 import GPT, GPTConfig, next_token_probs


@pytest.fixture
def tokens():
    return torch.randint(0, 257, (3, 16), generator=torch.Generator().manual_seed(1))


def test_logits_and_gradients_equal_huggingface(tokens):
    reference = hf_model()
    model = copy_of(reference)
    torch.testing.assert_close(model(tokens)[0], reference(tokens).logits, atol=1e-5, rtol=1e-5)

    x, y = tokens[:, :-1], tokens[:, 1:]
    _, loss = model(x, y)
    reference_loss = F.cross_entropy(reference(x).logits.flatten(0, 1), y.flatten())
    torch.testing.assert_close(loss, reference_loss, atol=1e-5, rtol=1e-5)
    loss.backward()
    reference_loss.backward()
    expected = huggingface.from_hf(
        {n: p.grad for n, p in reference.named_parameters()}, model.state_dict(keep_vars=True), 257
    )
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], atol=1e-5, rtol=1e-5, msg=name)


def test_a_cropped_model_is_the_model_on_short_rows(tiny_model, tokens):
    expected = tiny_model(tokens[:, :5])[0]
    tiny_model.crop(5)
    assert torch.equal(tiny_model(tokens[:, :5])[0], expected) and tiny_model.config.block_size == 5
    with pytest.raises(ValueError, match="a sequence of 6 tokens is longer than the context of 5"):
        tiny_model(tokens[:, :6])


def test_padding_takes_no_part(tiny_model, tokens):
    assert TINY.padded_vocab_size == 320 and GPTConfig().padded_vocab_size == 50304
    logits, _ = tiny_model(tokens)
    _, loss = tiny_model(tokens, tokens)
    assert logits.shape == (3, 16, 257)
    assert not tiny_model.lm_head.weight[257:].any()
    # a softmax over 257 logits, by the definition
    expected = (logits.exp().sum(-1).log() - logits.gather(2, tokens[..., None]).squeeze(2)).mean()
    torch.testing.assert_close(loss, expected)
    with torch.no_grad():
        tiny_model.lm_head.weight[257:] = 9.0
    assert torch.equal(tiny_model(tokens)[0], logits) and torch.equal(tiny_model(tokens, tokens)[1], loss)
    tiny_model(tokens, tokens)[1].backward()
    assert tiny_model.lm_head.weight.grad[:257].any() and not tiny_model.lm_head.weight.grad[257:].any()


def test_no_token_sees_the_future(tiny_model, tokens):
    embedded = []
    tiny_model.transformer.wte.register_forward_hook(lambda _m, _i, out: embedded.append(out.requires_grad_()) or out)
    logits, _ = tiny_model(tokens[:1])
    for t in (0, 7, 15):
        [gradient] = torch.autograd.grad(logits[0, t].sum(), embedded[0], retain_graph=True)
        seen = gradient[0].abs().sum(dim=1) > 0
        assert seen.tolist() == [i <= t for i in range(16)]


def test_parameters_of_gpt2_and_their_weight_decay():
    with torch.device("meta"):
        model = GPT(GPTConfig())
    decayed, others = model.configure_optimizers(0.1, 1e-3, (0.9, 0.95)).param_groups
    assert (len(decayed["params"]), sum(p.numel() for p in decayed["params"])) == (50, 124_354_560)
    assert (len(others["params"]), sum(p.numel() for p in others["params"])) == (98, 121_344)
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    assert model.flops_per_token() == pytest.approx(855e6, rel=1e-3)


def test_initial_weights():
    model = GPT(GPTConfig(block_size=64, vocab_size=257, n_layer=8, n_head=4, n_embd=128))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert not parameter.any(), name
        elif ".ln_" in name:
            assert (parameter == 1).all(), name
        else:
            expected = 0.02 / 4 if name.endswith("c_proj.weight") else 0.02  # sqrt(2 * 8 layers) = 4
            assert parameter[:257].std().item() == pytest.approx(expected, rel=0.05), name


def test_logits_and_loss_are_fp32_under_autocast(tiny_model, tokens):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits, _ = tiny_model(tokens)
        _, loss = tiny_model(tokens, tokens)
    assert logits.dtype == loss.dtype == torch.float32
    assert not torch.equal(logits, logits.bfloat16().float())


@pytest.mark.parametrize("dtype, within", [(torch.float64, 1e-12), (torch.bfloat16, 2**-6), (torch.float16, 2**-9)])
def test_a_model_in_another_precision(tokens, dtype, within):
    """As people load one to sample on a small GPU: logits, loss and gradients, against Hugging Face's model in fp64."""
    reference, targets = hf_model(), tokens.roll(-1, 1)
    model, reference = copy_of(reference).to(dtype), reference.double()
    expected = reference(tokens).logits
    expected_loss = F.cross_entropy(expected.flatten(0, 1), targets.flatten())
    logits, _ = model(tokens)
    _, loss = model(tokens, targets)
    loss.backward()
    expected_loss.backward()
    assert logits.dtype == loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert (logits - expected).abs().max() < within * expected.abs().max()
    assert loss.item() == pytest.approx(expected_loss.item(), rel=within)
    for ours, theirs in ((model.lm_head, reference.lm_head), (model.transformer.ln_f, reference.transformer.ln_f)):
        difference = ours.weight.grad[: len(theirs.weight)].double() - theirs.weight.grad
        assert difference.norm() < 4 * within * theirs.weight.grad.norm()
    assert len(list(model.generate(tokens[:, :4], 3))) == 3


# -----------------------------------------------------------------------------
# Sampling


def generated(model: GPT, idx: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
    """The ids, and the tokens that the model adds to them."""
    return torch.cat((idx, *model.generate(idx, *args, **options)), dim=1)


def test_generate_takes_the_likeliest_token_and_crops_the_context(tokens):
    reference = hf_model()
    model = copy_of(reference)
    expected = reference.generate(tokens[:, :4], max_new_tokens=12, do_sample=False, pad_token_id=0, eos_token_id=None)
    assert generated(model, tokens[:, :4], 12, temperature=0.0).tolist() == expected.tolist()
    assert generated(model, tokens[:, :4], 12, top_k=1).tolist() == expected.tolist()

    contexts = []
    model.transformer.wte.register_forward_pre_hook(lambda _, args: contexts.append(args[0]))
    longer = generated(model, tokens, 3, temperature=0.0)  # from a full context: each token follows the last 16
    assert [idx.tolist() for idx in contexts] == [longer[:, end - 16 : end].tolist() for end in (16, 17, 18)]
    with pytest.raises(ValueError, match="a sequence of 19 tokens is longer than the context of 16"):
        model(longer)


def test_samples_depend_on_their_generator_alone_and_have_the_models_probabilities(tiny_model, tokens):
    generators = (torch.Generator().manual_seed(seed) for seed in (1, 1, 2))
    first, again, other = (generated(tiny_model, tokens, 20, generator=generator) for generator in generators)
    assert torch.equal(first, again) and not torch.equal(first, other) and first.max() < 257
    with torch.no_grad():
        likeliest = tiny_model(tokens[:1, :4])[0][0, -1].softmax(-1).topk(3)
    idx = tokens[:1, :4].repeat(3000, 1)
    drawn = generated(tiny_model, idx, 1, top_k=3, generator=torch.Generator().manual_seed(0))[:, -1]
    shares = [(drawn == token).float().mean().item() for token in likeliest.indices]
    expected = (likeliest.values / likeliest.values.sum()).tolist()
    assert sum(shares) == pytest.approx(1) and shares == pytest.approx(expected, abs=0.03)  # three standard deviations


def test_probabilities_by_hand():
    logits = torch.tensor([[0.0, math.log(2), math.log(4), math.log(1)]])
    for options, expected in (
        ({}, {0: 1 / 8, 1: 2 / 8, 2: 4 / 8, 3: 1 / 8}),
        ({"top_k": 2}, {1: 2 / 6, 2: 4 / 6}),
        ({"temperature": 0.5}, {0: 1 / 22, 1: 4 / 22, 2: 16 / 22, 3: 1 / 22}),
        ({"temperature": 0.5, "top_k": 2}, {1: 4 / 20, 2: 16 / 20}),
        ({"top_k": 99}, {0: 1 / 8, 1: 2 / 8, 2: 4 / 8, 3: 1 / 8}),
    ):
        probs, ids = next_token_probs(logits, **options)
        assert dict(zip(ids[0].tolist(), probs[0].tolist(), strict=True)) == pytest.approx(expected)


# -----------------------------------------------------------------------------
# Dropout


def test_dropout_is_where_gpt2_has_it(monkeypatch):
    """Hugging Face's model has it after the embeddings, in the attention, and after both projections of each block."""
    torch.manual_seed(0)
    model, tokens = GPT(GPTConfig(**TINY_SIZES, dropout=0.25)), torch.randint(257, (8, 16))
    in_attention, elsewhere = [], []

    def spy(q, k, v, dropout):
        in_attention.append(dropout)
        return causal_attention(q, k, v, dropout)

    monkeypatch.setattr(train_gpt2, "causal_attention", spy)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.register_forward_hook(lambda _m, inputs, out: elsewhere.append((inputs[0], out)))
    model(tokens, tokens)
    assert in_attention == [0.25] * 2 and len(elsewhere) == 5
    for x, out in elsewhere:
        kept = out != 0
        assert kept.float().mean() == pytest.approx(0.75, abs=0.03)
        torch.testing.assert_close(out[kept], x[kept] / 0.75)  # so that the mean stays the same
    in_attention.clear(), elsewhere.clear()
    model.eval()(tokens, tokens)
    assert in_attention == [0.0] * 2 and all(torch.equal(x, out) for x, out in elsewhere)


def test_validation_is_without_dropout_and_training_is_not(byte_shards, tmp_path):
    from transformers import GPT2LMHeadModel

    flags = ["--data", byte_shards, "--max-steps", 7]
    for name, *more in (("without", 0.0), ("much", 0.5), ("never_evaluated", 0.5, "--val-every", 0)):
        trained(tmp_path / name, *flags, "--dropout", *more)
    without, much, never = (losses(tmp_path / name / "log.txt") for name in ("without", "much", "never_evaluated"))
    assert without[0] != much[0] and much == never
    [val] = byte_shards.glob("*_val_*.npy")
    rows = torch.from_numpy(np.load(val)[: 32 * 16 + 1].astype(np.int64))  # 512 tokens, as in TINY_FLAGS
    x, y = rows[:-1].view(32, 16), rows[1:].view(32, 16)
    reference = GPT2LMHeadModel.from_pretrained(tmp_path / "much" / "model_00007")
    assert reference.config.attn_pdrop == reference.config.resid_pdrop == reference.config.embd_pdrop == 0.0
    with torch.no_grad():
        expected = F.cross_entropy(reference(x).logits.flatten(0, 1), y.flatten()).item()
    assert losses(tmp_path / "much" / "log.txt", "val")[-1] == pytest.approx(expected, abs=1e-4)


def test_a_model_without_biases_opens_here_and_in_huggingface(tokens, tmp_path):
    from transformers import GPT2LMHeadModel

    model = GPT(GPTConfig(**TINY_SIZES, bias=False))
    assert not any(name.endswith("bias") for name, _ in model.named_parameters())
    model.save_pretrained(tmp_path)
    assert GPT.from_pretrained(tmp_path).config == model.config
    reference = GPT2LMHeadModel.from_pretrained(tmp_path)
    torch.testing.assert_close(reference(tokens).logits, model(tokens)[0], rtol=1e-4, atol=1e-4)
