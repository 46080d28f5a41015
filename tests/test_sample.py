"""sample.py: the cache, the choice of tokens, texts on a terminal and in a pipe, and what it says about bad input."""

from __future__ import annotations

import copy
import os
import re
import sys
from pathlib import Path

import numpy as np
import pexpect
import pytest
import torch
from helpers import ROOT, wait_for
from hf_models import copy_of, hf_model
from training import TINY, trained

import sample
from support.cli import UserError
from support.data.tokenizer import BytesTokenizer, tokenizer_of_model
from support.runtime.devices import autocast, seeded_generator
from support.runtime.kv_cache import KVCache
from train_gpt2 import GPT, next_token_probs
from train_gpt2 import sample as trainers_sample

# -----------------------------------------------------------------------------
# The cache, with GPT.generate without one as the reference


@pytest.fixture(scope="module")
def model() -> GPT:
    """A model of TINY's sizes with large random weights, whose likeliest token depends on the tokens before."""
    model = copy_of(hf_model()).eval()
    with torch.no_grad():
        for block in model.transformer.h:
            for linear in (block.attn.c_attn, block.attn.c_proj, block.mlp.c_proj):
                linear.weight *= 3
                linear.bias *= 0.3
        model.transformer.ln_f.bias *= 0.1  # else the likeliest token is always the same
    return model


def prompts(length: int, rows: int = 3) -> torch.Tensor:
    return torch.randint(0, TINY.vocab_size, (rows, length), generator=torch.Generator().manual_seed(length))


@pytest.mark.parametrize("length", [1, 5, TINY.block_size - 1, TINY.block_size, TINY.block_size + 3])
@pytest.mark.parametrize("temperature, top_k", [(0.0, None), (1.0, None), (1.3, 20)])
def test_the_cache_gives_the_tokens_of_generate_past_the_context_too(model, length, temperature, top_k):
    idx, num_new = prompts(length), TINY.block_size + 10
    generators = [torch.Generator().manual_seed(7) for _ in range(2)]
    options = {"temperature": temperature, "top_k": top_k}
    expected = torch.cat(list(model.generate(idx, num_new, **options, generator=generators[0])), dim=1)
    tokens = torch.cat(list(sample.generate(model, idx, num_new, **options, generator=generators[1])), dim=1)
    assert torch.equal(tokens, expected) and tokens.unique().numel() > 5
    assert torch.equal(generators[0].get_state(), generators[1].get_state())


def test_each_token_is_read_once_until_the_context_is_full(model):
    read: list[int] = []
    hook = model.transformer.wte.register_forward_hook(lambda module, inputs, output: read.append(inputs[0].size(1)))
    list(sample.generate(model, prompts(6), 13))
    hook.remove()
    assert read == [6] + 10 * [1] + 2 * [TINY.block_size]  # after 6 + 10 tokens the context of 16 is full


def test_in_bf16_the_cache_is_as_exact_as_the_model_without_it(model):
    idx = prompts(TINY.block_size, rows=8)
    with torch.no_grad():
        exact = model(idx)[0]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            uncached = model(idx)[0]
            cache = KVCache(TINY.block_size)
            pieces = [idx[:, :4], *idx[:, 4:].split(1, dim=1)]
            cached_logits = torch.cat([model.logits(model.transformer(piece, cache)) for piece in pieces], dim=1)
    error, uncached_error = ((logits - exact).abs().max() for logits in (cached_logits, uncached))
    assert 0 < error < 2 * uncached_error < exact.std()
    assert {tensor.dtype for tensor in cache._tensors.values()} == {torch.bfloat16}


def test_several_tokens_after_others_are_refused():
    """Without a mask, they would attend to tokens that follow them."""
    model, cache = GPT(TINY), KVCache(TINY.block_size)
    model.transformer(prompts(4), cache)
    with pytest.raises(ValueError, match="2 tokens after 4 others"):
        model.transformer(prompts(2), cache)


def test_long_texts_are_generated_fewer_at_a_time(monkeypatch):
    assert sample.rows_in_memory(TINY, 10, 100) == sample.MAX_BATCH
    cache = KVCache(sample.cache_capacity(TINY, 10, 4))
    GPT(TINY).transformer(prompts(10, rows=1), cache)
    row_bytes = sum(tensor.nbytes for tensor in cache._tensors.values())
    monkeypatch.setattr(sample, "MAX_CACHE_BYTES", 5 * row_bytes)
    assert sample.rows_in_memory(TINY, 10, 4) == 5
    assert sample.rows_in_memory(TINY, 10, 10**9) == 4  # 16 instead of 13 tokens per row
    monkeypatch.setattr(sample, "MAX_CACHE_BYTES", 1)
    assert sample.rows_in_memory(TINY, 10, 4) == 1


# -----------------------------------------------------------------------------
# Which tokens may be drawn


@pytest.mark.parametrize(
    "temperature, top_k, top_p", [(1.0, None, 0.9), (0.7, 20, 0.5), (1.5, 100, 0.99), (1.0, 5, 1e-6)]
)
def test_top_p_is_that_of_transformers_after_temperature_and_top_k(temperature, top_k, top_p):
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    logits = 3 * torch.randn(50, 300, generator=torch.Generator().manual_seed(0))
    expected = TemperatureLogitsWarper(temperature)(None, logits)
    if top_k is not None:
        expected = TopKLogitsWarper(top_k)(None, expected)
    expected = TopPLogitsWarper(top_p)(None, expected).softmax(-1)
    probs, ids = next_token_probs(logits, temperature, top_k, top_p)
    probs = torch.zeros_like(logits).scatter(1, ids, probs)
    torch.testing.assert_close(probs, expected, rtol=1e-5, atol=0)
    assert ((probs > 0).sum(-1) < (top_k or 300)).any()


def test_a_character_appears_with_the_last_of_its_tokens():
    text = "naïve 你好 😀 "
    ids = [*text.encode(), 256, 0xE4, 0xBD, ord("x"), 0xF0, 0x9F]  # end-of-text, and characters that are cut off
    pieces = list(sample.decode_pieces(ids, BytesTokenizer()))
    assert "".join(pieces) == BytesTokenizer().decode(ids) == text + "<|endoftext|>\ufffdx\ufffd"
    assert pieces[2:4] == ["", "ï"] and pieces.index("😀") == len("naïve 你好 😀".encode()) - 1
    noise = np.random.default_rng(0).integers(0, 257, 5000).tolist()
    assert "".join(sample.decode_pieces(noise, BytesTokenizer())) == BytesTokenizer().decode(noise)


@pytest.mark.parametrize("single_row", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_prepared_weights_give_the_same_logits(model, dtype, single_row):
    """Bit by bit, but for a single row in fp32, which is multiplied in another order."""
    prepared, idx = copy.deepcopy(model), prompts(9, rows=1 if single_row else 3)
    sample.prepare_weights(prepared, dtype, single_row)
    with torch.no_grad(), autocast(torch.device("cpu"), dtype):
        expected, logits = model(idx)[0], prepared(idx)[0]
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5 * single_row)
    assert prepared.lm_head.weight is prepared.transformer.wte.weight


# -----------------------------------------------------------------------------
# Texts


@pytest.fixture(scope="module")
def run(byte_shards, tmp_path_factory) -> Path:
    """The folder of a run with one checkpoint, model_00003."""
    out = tmp_path_factory.mktemp("sample") / "log"
    trained(out, "--data", byte_shards, "--max-steps", 3, "--val-every", 0)
    return out


def texts_of(run: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> list[str]:
    sample.main(["--model", str(run / "model_00003"), "--prompt", "The ", "-n", "2", "-d", "cpu", *flags])
    return capsys.readouterr().out.split("\n---\n")


def test_texts_are_those_of_the_trainer_without_a_cache(run, capsys, monkeypatch):
    """An empty prompt is an end-of-text token, which is not printed; any number of texts takes the memory of a few."""
    checkpoint, tokenizer = GPT.from_pretrained(run / "model_00003"), BytesTokenizer()
    for flags in ([], ["--prompt", ""], ["--seed", "2"]):
        prompt, seed = "" if "--prompt" in flags else "The ", 2 if "--seed" in flags else 1337
        generator = seeded_generator(torch.device("cpu"), seed)
        expected = trainers_sample(checkpoint, tokenizer, prompt, 8, generator, n=2)
        expected = [text.removeprefix("<|endoftext|>" if not prompt else "") for text in expected]
        assert texts_of(run, capsys, *flags) == [expected[0], expected[1] + "\n"]
    monkeypatch.setattr(sample, "MAX_BATCH", 2)
    texts = texts_of(run, capsys, "-n", "5")
    assert len(set(texts)) == 5 and texts[:2] == [text.rstrip("\n") for text in texts_of(run, capsys)]


def test_what_is_piped_in_is_the_prompt(run, tmp_path, capsys, monkeypatch):
    def texts_for(piped: bytes, *flags: str) -> list[str]:
        (tmp_path / "piped").write_bytes(piped)
        return texts_from(tmp_path / "piped", *flags)

    def texts_from(stdin: Path | str, *flags: str) -> list[str]:
        with open(stdin) as file, monkeypatch.context() as patch:
            patch.setattr(sys, "stdin", file)
            sample.main(["--model", str(run / "model_00003"), "-n", "2", "-d", "cpu", *flags])
        return capsys.readouterr().out.split("\n---\n")

    monkeypatch.setattr(sample, "DEFAULT_PROMPT", "Or")
    assert texts_for(b"The \n") == texts_for(b"no", "--prompt", "The ") == texts_of(run, capsys)
    assert texts_for(b"\xef\xbb\xbfa\r\nb\r\n") == texts_of(run, capsys, "--prompt", "a\nb")  # as in a .txt file
    assert texts_from(os.devnull) == texts_of(run, capsys, "--prompt", "Or")  # as of a job without a terminal
    monkeypatch.setattr(sample, "DEFAULT_PROMPT", "Or one that is longer than the context of a model")
    assert texts_from(os.devnull) == texts_of(run, capsys, "--prompt", "Or one that is l")
    for nothing in (b"", b"\n"):
        with pytest.raises(UserError, match="the text on stdin is empty. Pipe in a text, or"):
            texts_for(nothing)
    with pytest.raises(UserError, match="not valid UTF-8"):
        texts_for(b"caf\xe9")


def test_an_end_of_text_in_a_prompt_is_the_token(run):
    """As in nanoGPT, and as Hugging Face's tokenizer of the same checkpoint reads it."""
    from transformers import AutoTokenizer

    tokenizer, theirs = tokenizer_of_model(run / "model_00003", 257), AutoTokenizer.from_pretrained(run / "model_00003")
    for prompt in ("<|endoftext|>Once", "a<|endoftext|><|endoftext|>b", "Once"):
        assert sample.encode_prompt(prompt, tokenizer, 99, "x") == theirs(prompt)["input_ids"]
    assert (
        sample.encode_prompt("<|endoftext|>", tokenizer, 99, "x")
        == sample.encode_prompt("", tokenizer, 99, "x")
        == [256]
    )


def test_a_pipe_that_stays_open_is_named(capsys, monkeypatch):
    """Some terminals and remote shells have one, and nobody knows what the program waits for."""
    reader, writer = os.pipe()
    with open(reader) as stdin, open(writer, "w") as pipe, monkeypatch.context() as patch:
        patch.setattr(sys, "stdin", stdin)
        patch.setattr(sample, "WAIT_SECONDS", 0.01)
        patch.setattr(sample, "print_lines", lambda text, file: (print(text, file=file), pipe.write("A"), pipe.close()))
        assert sample.piped_prompt() == "A"
    assert capsys.readouterr().err == "waiting for the text to continue on stdin (or pass it with --prompt) ...\n"


def test_top_p_and_dtype_are_used(run, capsys, monkeypatch):
    likeliest = texts_of(run, capsys, "--temperature", "0")
    assert likeliest == texts_of(run, capsys, "--top-p", "1e-6") == texts_of(run, capsys, "--top-k", "1", "--seed", "2")
    precisions: list[torch.dtype] = []
    monkeypatch.setattr(sample, "generate", lambda model, idx, **options: precisions.append(model.transformer.h[0].mlp.c_fc(torch.ones(1, 32)).dtype) or iter(idx.split(1, dim=1)))  # fmt: skip
    for name in ("fp32", "bf16", "fp16"):
        texts_of(run, capsys, "--dtype", name)
    assert precisions == [torch.float32, torch.bfloat16, torch.float16]


# -----------------------------------------------------------------------------
# On a terminal


def as_on_terminal(text: str) -> str:
    """A text as it is streamed: control characters are spelled out."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", lambda match: f"\\x{ord(match[0]):02x}", text)


def on_terminal(run: Path, *flags: object) -> pexpect.spawn:
    """sample.py in a process of its own, on a terminal, when it waits for a prompt."""
    command = [ROOT / "sample.py", "--model", run / "model_00003", "-d", "cpu", *flags]
    environment = os.environ | {"TERM": "dumb", "OMP_NUM_THREADS": "1"}
    terminal = pexpect.spawn(
        sys.executable,
        list(map(str, command)),
        env=environment,
        encoding="utf-8",
        codec_errors="surrogateescape",
        timeout=60,
    )
    terminal.delaybeforesend = None
    terminal.expect_exact("Ctrl-C stops a text, Ctrl-D exits.\r\n> ")
    return terminal


def interrupt(terminal: pexpect.spawn) -> None:
    """Python's readline misses a Ctrl-C right before it waits for a key, until the next key."""
    state = Path(f"/proc/{terminal.pid}/stat")
    assert wait_for(lambda: state.read_text().rpartition(")")[2].split()[0] == "S")  # it sleeps
    terminal.sendintr()


@pytest.mark.slow
def test_a_session_continues_what_is_typed(run, capsys):
    [text] = texts_of(run, capsys, "-n", "1", "--prompt", "Thé")
    terminal, shown = on_terminal(run), []
    for prompt in ("Thé", "Thé", "x" * 17, "\udcff"):
        terminal.sendline(prompt)
        terminal.expect_exact("\r\n> ")
        shown.append(terminal.before.replace("\r\n", "\n"))
    first, second, too_long, not_utf8 = shown
    assert first == f"Thé\n{as_on_terminal(text)}" and as_on_terminal(text) not in second
    assert too_long.endswith(
        f"the prompt has 17 tokens, but the context of {run / 'model_00003'} is 16. Shorten the prompt."
    )
    assert "error: the prompt is not valid UTF-8." in not_utf8
    terminal.sendeof()
    assert terminal.wait() == 0


@pytest.mark.slow
def test_ctrl_c_stops_a_text_and_then_the_session(run):
    terminal = on_terminal(run, "--max-new-tokens", 10**6)
    terminal.sendline("The")
    terminal.expect_exact("The\r\nThe")
    terminal.sendintr()
    terminal.expect_exact("^C\r\n\r\n> ")
    terminal.send("half a li")
    terminal.expect_exact("half a li")
    interrupt(terminal)
    terminal.expect_exact("> ")
    interrupt(terminal)
    assert terminal.wait() == 0


# -----------------------------------------------------------------------------
# Bad input


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--model", "log"], r"log is not a checkpoint: it has no config.json. Did you mean log/model_00003\?"),
        (
            ["--model", "log/model_00003", "--prompt", "x" * 17],
            "the prompt has 17 tokens, but the context of log/model_00003 is 16. Shorten the prompt.",
        ),
        (
            ["--model", "log/model_00003", "--prompt", "caf\udce9"],
            "the prompt is not valid UTF-8. Convert it to UTF-8.",
        ),
        (["--model", "log/model_00003", "--top-p", "0"], "--top-p must be more than 0"),
        (["--model", "log/model_00003", "--temperature", "-0.1"], "--temperature is -0.1"),
    ],
)
def test_bad_input_is_named(run, monkeypatch, flags, message):
    monkeypatch.chdir(run.parent)
    with pytest.raises(UserError) as error:
        sample.main(flags)
    [problem] = error.value.problems
    assert re.match(message, problem), problem


def test_a_broken_weight_is_named(tiny_model):
    tiny_model.transformer.ln_f.bias.data[0] = torch.inf
    with pytest.raises(UserError, match="the logits are not finite numbers. Use another model"):
        list(sample.generate(tiny_model, prompts(3), 2))
