"""The model against Hugging Face's GPT-2 with the same random weights, and what must hold of any GPT-2."""

import json
import math

import pytest
import torch
from conftest import TINY
from torch.nn import functional as F

from support import huggingface
from support.cli import UserError
from train_gpt2 import GPT, GPTConfig, next_token_probs


def huggingface_model(seed: int = 0):
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=257, n_positions=16, n_embd=32, n_layer=2, n_head=2, bos_token_id=256, eos_token_id=256
    )
    config.attn_pdrop = config.embd_pdrop = config.resid_pdrop = 0.0
    model = GPT2LMHeadModel(config)
    for parameter in model.parameters():  # its own initialisation leaves biases at zero, where an error in them hides
        torch.nn.init.normal_(parameter, 0.0, 0.2)
    return model


def ours_of(theirs) -> GPT:
    model = GPT(TINY)
    model.load_state_dict(huggingface.to_ours(theirs.state_dict(), model.state_dict(), TINY.vocab_size))
    return model


@pytest.fixture
def tokens():
    return torch.randint(0, 257, (3, 16), generator=torch.Generator().manual_seed(1))


def test_logits_and_gradients_equal_huggingface(tokens):
    theirs = huggingface_model()
    ours = ours_of(theirs)
    torch.testing.assert_close(ours(tokens)[0], theirs(tokens).logits, atol=1e-5, rtol=1e-5)

    x, y = tokens[:, :-1], tokens[:, 1:]
    _, loss = ours(x, y)
    their_loss = F.cross_entropy(theirs(x).logits.flatten(0, 1), y.flatten())
    torch.testing.assert_close(loss, their_loss, atol=1e-5, rtol=1e-5)
    loss.backward()
    their_loss.backward()
    expected = huggingface.to_ours({n: p.grad for n, p in theirs.named_parameters()}, ours.state_dict(), 257)
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], atol=1e-5, rtol=1e-5, msg=name)


def test_a_saved_model_opens_in_huggingface_and_here(tiny_model, tokens, tmp_path):
    from transformers import GPT2LMHeadModel

    tiny_model.save_pretrained(tmp_path)
    theirs, report = GPT2LMHeadModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    assert (
        theirs.config.eos_token_id == 256
        and theirs.config.resid_pdrop == 0
        and theirs.get_input_embeddings().weight.shape == (257, 32)
    )
    logits, _ = tiny_model(tokens)
    torch.testing.assert_close(theirs.eval()(tokens).logits, logits, atol=1e-5, rtol=1e-5)
    assert torch.equal(GPT.from_pretrained(tmp_path)(tokens)[0], logits)


def test_hub_models_and_old_files_load(monkeypatch, tokens, tmp_path):
    """OpenAI's files on the hub are of GPT2Model: no prefix, no head, and the causal mask among the tensors."""
    theirs = huggingface_model()
    theirs.save_pretrained(tmp_path)
    weights = {name.removeprefix("transformer."): tensor.contiguous() for name, tensor in theirs.state_dict().items()}
    del weights["lm_head.weight"]
    weights |= {f"h.{i}.attn.bias": torch.ones(1, 1, 16, 16).tril() for i in range(2)}
    from safetensors.torch import save_file

    save_file(weights, tmp_path / "model.safetensors")
    asked = []
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **_: asked.append(name) or str(tmp_path))
    model = GPT.from_pretrained("gpt2-medium")
    assert asked == ["gpt2-medium"]
    torch.testing.assert_close(model(tokens)[0], theirs.eval()(tokens).logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "field, value",
    [
        ("activation_function", "relu"),
        ("layer_norm_epsilon", 1e-6),
        ("scale_attn_by_inverse_layer_idx", True),
        ("scale_attn_weights", False),
        ("n_inner", 64),
        ("tie_word_embeddings", False),
        ("model_type", "gpt_neo"),
        ("n_head", 2.5),
        ("n_layer", True),
        ("n_embd", "32"),
        ("n_positions", 10**12),
    ],
)
def test_a_configuration_that_is_not_computed_is_refused(tiny_model, tmp_path, field, value):
    tiny_model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {field: value}))
    with pytest.raises(UserError, match=field.replace("n_positions", "block_size")):
        GPT.from_pretrained(tmp_path)


def test_weights_are_imported_under_guard(tiny_model):
    ours = tiny_model.state_dict()
    good = huggingface.to_theirs(ours, 257)
    name = "transformer.h.1.mlp.c_fc.weight"
    for bad, complaint in (
        ({k: v for k, v in good.items() if k != name}, f"lack {name}"),
        (good | {"transformer.h.2.ln_1.bias": torch.zeros(32)}, "h.2.ln_1.bias"),
        (good | {name: good[name].t()}, f"{name} has the shape"),
        (good | {"lm_head.weight": torch.zeros(257, 32)}, "lm_head.weight differs"),
        (good | {name.removeprefix("transformer."): good[name]}, f"have {name} twice"),
    ):
        with pytest.raises(UserError, match=complaint):
            huggingface.to_ours(bad, ours, 257)


@pytest.mark.parametrize("name", ["no-such-model", "owner/no-such-model", "not a name!"])
def test_an_unknown_model_is_one_sentence(name, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="there is no such directory, and the Hugging Face hub"):
        GPT.from_pretrained(name)


def test_a_folder_that_is_no_checkpoint_is_named(tmp_path, monkeypatch):
    with pytest.raises(UserError, match=r"is not a checkpoint: there is no config\.json"):
        GPT.from_pretrained(tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "log").mkdir()
    with pytest.raises(UserError, match=r"there is no log/model_00100\. Check the path"):
        GPT.from_pretrained("log/model_00100")


def test_the_padding_takes_no_part(tiny_model, tokens):
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


def test_the_padding_stays_zero_in_training(tiny_model, tokens):
    optimizer = tiny_model.configure_optimizers(0.1, 1e-2, (0.9, 0.95))
    before = tiny_model.lm_head.weight.detach().clone()
    for _ in range(3):
        optimizer.zero_grad()
        tiny_model(tokens, tokens)[1].backward()
        optimizer.step()
    assert not tiny_model.lm_head.weight[257:].any()
    assert not torch.equal(tiny_model.lm_head.weight[:257], before[:257])


def test_no_token_sees_the_future(tiny_model, tokens):
    embedded = []
    tiny_model.transformer.wte.register_forward_hook(lambda _m, _i, out: embedded.append(out.requires_grad_()) or out)
    logits, _ = tiny_model(tokens[:1])
    for t in (0, 7, 15):
        [gradient] = torch.autograd.grad(logits[0, t].sum(), embedded[0], retain_graph=True)
        reached = gradient[0].abs().sum(dim=1) > 0
        assert reached.tolist() == [i <= t for i in range(16)]


def test_parameters_of_gpt2_and_their_decay():
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


def test_generate_takes_the_likeliest_and_crops_the_context(tokens):
    theirs = huggingface_model()
    ours = ours_of(theirs)
    expected = theirs.generate(tokens[:, :4], max_new_tokens=12, do_sample=False, pad_token_id=0, eos_token_id=None)
    assert ours.generate(tokens[:, :4], 12, temperature=0.0).tolist() == expected.tolist()
    assert ours.generate(tokens[:, :4], 12, top_k=1).tolist() == expected.tolist()

    looked_at = []
    ours.transformer.wte.register_forward_pre_hook(lambda _, args: looked_at.append(args[0]))
    longer = ours.generate(tokens, 3, temperature=0.0)  # from a full context: each token follows the last 16
    assert [idx.tolist() for idx in looked_at] == [longer[:, end - 16 : end].tolist() for end in (16, 17, 18)]
    with pytest.raises(ValueError, match="longer than the block of 16"):
        ours(longer)


def test_samples_follow_their_generator(tiny_model, tokens):
    first, again, other = (
        tiny_model.generate(tokens, 20, generator=torch.Generator().manual_seed(s)) for s in (1, 1, 2)
    )
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert first.max() < 257


def test_probabilities_by_hand():
    logits = torch.tensor([[0.0, math.log(2), math.log(4), math.log(1)]])
    torch.testing.assert_close(next_token_probs(logits), torch.tensor([[1, 2, 4, 1]]) / 8)
    torch.testing.assert_close(next_token_probs(logits, top_k=2), torch.tensor([[0, 2, 4, 0]]) / 6)
    torch.testing.assert_close(next_token_probs(logits, temperature=0.5), torch.tensor([[1, 4, 16, 1]]) / 22)
    torch.testing.assert_close(next_token_probs(logits, top_k=99), torch.tensor([[1, 2, 4, 1]]) / 8)


def test_scores_are_fp32_under_autocast(tiny_model, tokens):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits, _ = tiny_model(tokens)
        _, loss = tiny_model(tokens, tokens)
    assert logits.dtype == loss.dtype == torch.float32
    assert not torch.equal(logits, logits.bfloat16().float())
