"""--minutes: the sizes that suit the time, and the estimated number of steps."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from training import ONE_PROCESS, config_of, config_with, configure

from support.cli import UserError, flag_name, parse_flags
from support.config import TrainConfig
from support.data.bpe import train_bpe
from support.data.make_shards import make_shards
from support.data.shards import read_manifest
from support.data.text_files import Documents
from support.runtime import cuda_graphs, devices, memory
from support.sizing import budget, presets
from train_gpt2 import GPT, RECIPES, GPTConfig, main, new_model


def set_size(monkeypatch, text_bytes):
    """Lets --text name a text of this size, of which nothing else is known."""
    monkeypatch.setattr(presets, "find_input", lambda *args: [])
    monkeypatch.setattr(presets, "estimate_text", lambda *args: (text_bytes, ""))


def flags_for(text_bytes, tokens, monkeypatch, *flags, minutes=3):
    """The flags for a text, when a model can be trained on this many tokens in time, or `tokens(sizes)`."""
    set_size(monkeypatch, text_bytes)
    in_time = tokens if callable(tokens) else lambda *args: tokens
    monkeypatch.setattr(budget, "_tokens_per_second", lambda of_model, *args: in_time(of_model, *args) / (60 * minutes))
    given = ["--text", "a.txt", "--minutes", str(minutes), "--block-size", "64", *flags]
    config, _ = configure(given)
    cli_flags = {name: value for name, value in parse_flags(TrainConfig, given, "").items() if name != "block_size"}
    return flags_for_minutes(config, cli_flags)


def flags_for_minutes(config, cli_flags):
    chosen = budget.flags_for_minutes(config, cli_flags, RECIPES["fast"], ONE_PROCESS, new_model)
    return {name: value for name, value in chosen.items() if name not in cli_flags}  # the command line is stronger


# By hand: 7 bytes, at 3 per token (2 below 402 kB, 2.5 below 804 kB, with a smaller vocabulary), for each weight of the
# blocks, 12 C^2 in each: 331,776 of 3 x 96, 589,824 of 3 x 128, 786,432 of 4 x 128, 2.65M of 6 x 192, 4.7M of 6 x 256, 25M
# of 8 x 512; and not more weights than bytes. The smallest is for bytes, and for texts that are too small for the next one.
# A step is a power of two that leaves 2,000 steps, or 1,000 up to 2,048 where it is the time that ends the run, not the 25
# passes: 2.25 million tokens of 200 kB.
@pytest.mark.parametrize(
    ("text_bytes", "tokens", "sizes", "step"),
    [
        (3e6, 1e5, (3, 128), 1024),
        (3e6, 1.83e6, (3, 128), 1024),
        (3e6, 1.84e6, (4, 128), 1024),
        (3e6, 2.04e6, (4, 128), 1024),
        (3e6, 2.05e6, (4, 128), 2048),
        (2e5, 2.24e6, (3, 96), 2048),
        (2e5, 2.26e6, (3, 96), 1024),
        (5e5, 2.4e7, (3, 96), 2048),  # 4.5 million, of the 133 passes that there is time for
        (3e7, 6.19e6, (4, 128), 2048),
        (3e7, 6.20e6, (6, 192), 2048),
        (3e7, 1.10e7, (6, 192), 4096),
        (3e7, 1.11e7, (6, 256), 4096),
        (3e7, lambda of_model, *_: 2.48e7 / of_model.n_layer, (4, 128), 2048),  # 6.2 million, and 4.1 of the next one
        (2.6e6, 8.67e6, (4, 128), 4096),  # the text is too small for the 2.65 million weights of the next one
        (2.7e6, 8.67e6, (6, 192), 4096),
        (7e5, 2.4e7, (3, 128), 2048),  # the text is too small for more
        (3e8, 7e7, (8, 512), 32768),
    ],
)
def test_the_largest_model_that_sees_enough_tokens(text_bytes, tokens, sizes, step, monkeypatch):
    chosen = flags_for(text_bytes, tokens, monkeypatch)
    assert (chosen["n_layer"], chosen["n_embd"], chosen["total_batch_size"]) == (*sizes, step)
    assert chosen["max_lr"] == pytest.approx(3.6e-3 * min(1, (step / 16384) ** 0.5))


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.setattr(f"{__name__}.ONE_PROCESS", replace(ONE_PROCESS, device=torch.device("cuda")))
    monkeypatch.setattr(budget.Machine, "find", lambda *args: SimpleNamespace(batch_size=16, dtype="bf16"))
    monkeypatch.setattr(devices, "free_memory", lambda device: None)


@pytest.mark.parametrize(("on_gpu", "sizes"), [(False, (4, 128)), (True, (6, 256))])
def test_on_a_gpu_a_larger_model_may_be_faster(on_gpu, sizes, monkeypatch, request):
    """By hand: the model of 6 layers needs 11 million tokens, which only that model has time for."""
    if on_gpu:
        request.getfixturevalue("gpu")
    chosen = flags_for(3e7, lambda of_model, *_: 5e7 if of_model.n_layer == 6 else 4e6, monkeypatch)
    assert (chosen["n_layer"], chosen["n_embd"]) == sizes


def test_on_a_gpu_speed_is_measured_with_the_rows_of_a_step(gpu, monkeypatch):
    """By hand: a GPU that takes as long for one row as for 64, and has time for 20,000 steps. 600 kB have 216,000 tokens to
    train on, which are read 25 times: 5.4 million, in steps of 2,048, which are 32 rows."""
    measured = []

    def in_time(of_model, rows, *args):
        measured.append(rows)
        return 2e4 * 64 * rows

    for text_bytes, step, rows in ((3e9, 32768, [64]), (6e5, 2048, [64, 32])):
        measured.clear()
        chosen = flags_for(text_bytes, in_time, monkeypatch, "--n-layer", "3")
        assert (chosen["total_batch_size"], chosen["batch_size"], measured) == (step, None, rows)
        assert chosen["val_tokens"] == min(10485760, 2e4 * 64 * rows[-1] / 20)
    chosen = flags_for(3e9, in_time, monkeypatch, "--n-layer", "3", "--batch-size", "16")
    assert chosen["total_batch_size"] == 8192 and "batch_size" not in chosen


@pytest.mark.parametrize(("tokens", "n_embd"), [(4.12e6, 96), (4.13e6, 128)])
def test_the_smallest_model_is_for_bytes(tokens, n_embd, monkeypatch):
    chosen = flags_for(3e6, tokens, monkeypatch, "--tokenizer", "bytes")
    assert (chosen["n_layer"], chosen["n_embd"]) == (3, n_embd)


def test_what_is_validated_and_what_is_said_of_few_steps(monkeypatch, capsys):
    """By hand: a validation has a twentieth of the tokens, or 32,768 if that is at most an eighth; 50 steps are few."""
    for tokens, validated in ((2.048e6, 102400), (3e5, 32768), (2e5, 25000), (1e12, 10485760)):
        assert flags_for(3e6, tokens, monkeypatch)["val_tokens"] == validated
    assert "val_tokens" not in flags_for(3e6, 2.048e6, monkeypatch, "--val-tokens", "640")
    assert "time for only" not in capsys.readouterr().out
    chosen = flags_for(3e6, 50 * 1024, monkeypatch)
    assert "there is time for only about 50 steps" in capsys.readouterr().out
    assert not chosen.keys() & {"max_steps", "decay_steps", "warmup_steps", "val_every"}  # steps are not counted


@pytest.mark.parametrize("tokens, step", [(2e6, 8192), (1.6e6, 4096), (5e4, 1024)])
def test_fine_tuning_has_200_steps_if_there_is_time(tokens, step, monkeypatch):
    """By hand: 200 steps of 8,192 tokens are 1.64 million. A step has 1,024 at least."""
    set_size(monkeypatch, 3e6)
    monkeypatch.setattr(budget, "_tokens_per_second", lambda *args: tokens / 60)
    config = replace(config_with(total_batch_size=8192), text="a.txt", init_from="gpt2", minutes=1.0)
    chosen = flags_for_minutes(config, {})
    assert chosen["total_batch_size"] == step
    given = flags_for_minutes(config, {"total_batch_size": 8192})
    assert "total_batch_size" not in given


def test_fine_tuning_ends_after_ten_passes_without_dropout(monkeypatch):
    """As --help says: more would only memorize the text."""
    set_size(monkeypatch, 3e5)
    monkeypatch.setattr(budget, "_tokens_per_second", lambda *args: 1e6)
    for dropout, most in ((0.0, 10), (0.1, 25)):
        config = replace(config_with(), text="a.txt", init_from="gpt2", minutes=1.0, dropout=dropout)
        assert flags_for_minutes(config, {})["max_passes"] == most


def test_the_model_that_is_measured_has_the_vocabulary_and_the_tokens_of_one_that_exists(monkeypatch, tmp_path):
    (tmp_path / "a.txt").write_text("ab" * 50_000)
    known, measured = train_bpe(["ab" * 999], 300), []
    monkeypatch.setattr(budget, "_tokens_per_second", lambda *args: measured.append(args[3]) or 1e3)
    config = replace(config_with(), text=str(tmp_path / "a.txt"), init_from="x", tokenizer="bpe", minutes=3.0)
    run = budget._TimedRun(config, {}, RECIPES["fast"], ONE_PROCESS, new_model, lambda: known)
    run.choose_flags()
    tokens = len(known.encode("ab" * 50_000))
    assert measured == [known.vocab_size] and run.train_tokens == pytest.approx(0.9 * tokens, rel=0.01)
    assert tokens < 20_000  # by the size of the text, they would be 50,000


@pytest.mark.parametrize(
    "passes, flags, noted",
    [(21, {}, True), (19, {}, False), (49, {"dropout": 0.1}, False), (21, {"max_passes": 3.0}, False)],
)
def test_time_for_many_passes_over_shards_is_noted(byte_shards, monkeypatch, capsys, passes, flags, noted):
    tokens = sum(entry["tokens"] for entry in read_manifest(byte_shards)["shards"] if entry["split"] == "train")
    monkeypatch.setattr(budget, "_tokens_per_second", lambda *args: passes * tokens / 60)
    config = config_with(total_batch_size=1024)
    flags_for_minutes(replace(config, data=str(byte_shards), minutes=1.0, **flags), {})
    assert (
        f"there is time to read the data {passes} times, but more than 10 passes" in capsys.readouterr().out
    ) == noted


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_a_run_on_shards_is_measured_with_their_vocabulary(monkeypatch, tmp_path, tokenizer):
    manifest = make_shards(
        Documents("numbers", map(str, range(9000))), tmp_path / "shards", tokenizer=tokenizer, vocab_size=300
    )
    (tmp_path / "shards/tokenizer.json").unlink() if tokenizer == "bytes" else None  # as earlier versions wrote them

    def measure(config, most, dtype, vocab_size, *_):
        raise UserError(f"measured with {vocab_size} tokens.")

    monkeypatch.setattr(budget, "_tokens_per_second", measure)
    with pytest.raises(UserError, match=f"measured with {manifest['vocab_size']} tokens"):
        main(["--data", str(tmp_path / "shards"), "--minutes", "1", "--out", str(tmp_path / "out"), "--device", "cpu"])


@pytest.mark.parametrize("flags", [{"lora_rank": 4}, {"recompute": True}])
def test_the_model_that_is_measured_is_the_one_that_is_trained(monkeypatch, flags):
    """LoRA trains 4 x (32 + 96) + 4 x (32 + 32) weights beside c_attn and c_proj, and 4 x (128 + 32) in the MLP."""
    trained, recomputed, forward = set(), [], GPT.forward

    def spy(model, idx, targets=None):
        trained.add(sum(p.numel() for p in model.parameters() if p.requires_grad))
        return forward(model, idx, targets)

    monkeypatch.setattr(GPT, "forward", spy)
    monkeypatch.setattr(memory, "recompute_activations", recomputed.append)
    monkeypatch.setattr(budget, "MEASURED_SECONDS", 0.0)
    config = replace(config_with(n_layer=1, n_head=1, n_embd=32, block_size=16), **flags)
    budget._tokens_per_second(config, 1, "fp32", 257, ONE_PROCESS, new_model)
    assert len(recomputed) == ("recompute" in flags)
    if "lora_rank" in flags:
        assert trained == {4 * (32 + 96) + 4 * (32 + 32) + 4 * (128 + 32)}


def test_samples_are_left_out_where_they_take_too_long(monkeypatch):
    """By hand: 4 x (10 + 11 + ... + 41) tokens at each of four quarters, at a third of training's time: 35,000 x an eighth."""
    assert 4 * 4 * sum(range(10, 42)) / 3 * 8 == pytest.approx(budget.LEAST_SAMPLED, rel=0.02)
    assert flags_for(3e6, 3.5e4, monkeypatch)["sample_every"] == 0
    assert "sample_every" not in flags_for(3e6, 3.6e4, monkeypatch)
    assert "sample_every" not in flags_for(3e6, 3.5e4, monkeypatch, "--sample-every", "9")


def test_a_time_without_a_single_step_is_refused(monkeypatch):
    """By hand: 0.7 of 3 minutes is enough for 1,000 of its 4,096 tokens, so those take 516 s."""
    with pytest.raises(UserError, match="too short: on this machine, the 4,096 tokens of a step take this model 516 s"):
        flags_for(3e6, 1000, monkeypatch, "--model", "gpt2", "--batch-size", "4", "--total-batch-size", "4096")


def test_given_sizes_stay(monkeypatch):
    chosen = flags_for(3e6, 2.4e7, monkeypatch, *"--n-layer 2 --total-batch-size 4096 --max-lr 1e-3".split())
    assert not chosen.keys() & {"n_layer", "n_head", "n_embd", "total_batch_size", "max_lr"}
    chosen = flags_for(3e6, 2.4e7, monkeypatch)
    assert flags_for(3e6, 2.4e7, monkeypatch, "--max-lr", "1e-3") == {x: chosen[x] for x in chosen if x != "max_lr"}
    monkeypatch.setattr(budget, "_tokens_per_second", lambda *args: 1000.0)
    fork = {"init_from": "gpt2", "text": "a.txt", "recipe": "gpt2", "fork": "x"}
    for others, limits in ((fork, {"max_passes"}), ({}, set())):  # a fork, shards
        config = replace(config_of(), minutes=3.0, val_tokens=2**20, **others)
        chosen = flags_for_minutes(config, {})
        assert chosen.keys() == {"val_tokens"} | limits
        # 3 minutes for 180,000 tokens: five validations of an eighth, three times as fast as training, are a fifth of it
        assert 5 / 3 * chosen["val_tokens"] / 180_000 == pytest.approx(0.208, abs=0.001)


@pytest.mark.parametrize(
    ("text_bytes", "passes", "flags", "dropout", "most"),
    [
        (1e6, 4.9, "", 0.0, 10),
        (1e6, 6, "", 0.0, 10),
        (1e6, 9.9, "", 0.0, 10),
        (1e6, 10.1, "", 0.0, 10),
        (1e6, 14, "", 0.04, 25),
        (1e6, 60, "", 0.1, 25),
        (2e4, 60, "", 0.1, 25),
        (1e6, 30, "--dropout 0", 0.0, 10),
        (1e6, 5, "--dropout 0.05", 0.05, 25),
        (1e6, 29, "--max-passes 20 --recipe gpt2", 0.1, 20),
        (1e6, 29, "--max-passes 0", 0.1, 0),
    ],
)
def test_a_text_that_is_read_often_gets_weight_decay_dropout_and_an_end(
    text_bytes, passes, flags, dropout, most, monkeypatch, capsys
):
    """By hand: the last tenth is held out; a token has 3 bytes, or 2 of a small text. Up to 7.5 passes, weight decay grows
    from once to six times; from ten to 20 it falls to three times, and the dropout grows to 0.1."""
    tokens = 0.9 * text_bytes / (2 if text_bytes < 3e5 else 3)
    chosen = flags_for(text_bytes, passes * tokens, monkeypatch, *flags.split())
    expected = dict(dropout=dropout, max_passes=most)
    expected = {
        name: value for name, value in expected.items() if flag_name(name) not in flags
    }  # those that are chosen
    assert {name: value for name, value in chosen.items() if name in ("dropout", "max_passes")} == expected
    if "--recipe" not in flags:
        times = {4.9: 1, 5: 1, 6: 3, 14: 4.8}.get(passes, 6 if most == 10 else 3)
        assert chosen["max_lr"] * chosen["weight_decay"] == pytest.approx(times * 3.6e-4)
    printed = " ".join(capsys.readouterr().out.split())
    why = "that is --max-passes" if "--max-passes" in flags else "more would only memorize it"
    assert (f"The run ends after {most}: {why}" in printed) == (0 < most < passes)


def test_a_fork_that_counts_minutes_reads_its_text_as_often_as_its_dropout_allows(monkeypatch):
    set_size(monkeypatch, 3e6)
    monkeypatch.setattr(budget, "_tokens_per_second", lambda *args: 1e6)
    for dropout, most in ((0.0, 10), (0.2, 25)):
        config = replace(config_of(), minutes=3.0, fork="x", text="a.txt", dropout=dropout)
        chosen = flags_for_minutes(config, {})
        assert chosen["max_passes"] == most and "dropout" not in chosen


@pytest.mark.parametrize("fitting", [8, 4, 0])
def test_the_tokens_of_a_model_in_time(fitting, monkeypatch):
    """By hand: 0.7 of 8 rows of 64 tokens in 0.01 s, on two ranks; of fewer rows if 8 do not fit into the memory."""
    rows = []

    class Watched(GPT):
        def forward(self, idx, targets=None):
            rows.append(len(idx))
            return super().forward(idx, targets)

    config = config_with(n_layer=1, n_head=1, n_embd=16, block_size=64)
    model, two = (
        Watched(GPTConfig(block_size=64, vocab_size=257, n_layer=1, n_head=1, n_embd=16)),
        replace(ONE_PROCESS, world_size=2),
    )
    layout = memory.Layout(config.total_batch_size, torch.float32)
    needed = memory.bytes_needed(memory.Sizes.of(model), layout, two.device, fitting) if fitting else 1
    monkeypatch.setattr(devices, "free_and_total_memory", lambda device: (needed, 1e12))
    monkeypatch.setattr(budget, "_seconds_per_call", lambda work, device: work() or 0.01)
    found = budget._tokens_per_second(config, 8, "fp32", 257, two, lambda *_: model)
    assert found == pytest.approx(0.7 / 0.01 * fitting * 64 * 2) and rows == [fitting] * bool(fitting)


@pytest.mark.parametrize("flops, measured", [(1e12, 8), (2e7, 5), (1e3, 1)])
def test_a_large_model_is_measured_in_two_calls_of_few_rows(flops, measured, monkeypatch):
    """By hand: 0.7 of the tokens in the 20 s of the second call; the first one warms up, and takes twice as long. A row of
    64 tokens is 3.6 million FLOPs: six for each of 320 x 16 + 64 x 16 + 12 x 16^2 + 13 x 16 + 2 x 16 weights."""
    now, rows = [0.0], []

    def forward(self, idx, targets=None):
        rows.append(len(idx))
        now[0] += 20 if len(rows) > 1 else 40
        return real(self, idx, targets)

    real = GPT.forward
    monkeypatch.setattr(GPT, "forward", forward)
    monkeypatch.setattr(budget, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(budget, "MEASURED_FLOPS", flops)
    config = config_with(n_layer=1, n_head=1, n_embd=16, block_size=64)
    found = budget._tokens_per_second(config, 8, "fp32", 257, ONE_PROCESS, new_model)
    assert found == pytest.approx(0.7 * measured * 64 / 20) and rows == [measured] * 2


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--demo", "--minutes", "5", "--max-steps", "5"],
            "--max-steps counts steps, but this run has --minutes 5. Leave it out, or use --max-steps instead of --minutes.",
        ),
        (["--minutes", "5", "--decay-steps", "5"], "--decay-steps counts steps, but"),
        (["--demo", "--warmup-steps", "5"], "--warmup-steps counts steps, but"),
        (["--demo", "--minutes", "0"], "--minutes is 0.0. It must be 0.1 or more."),
    ],
)
def test_wrong_flags_are_errors(flags, message):
    with pytest.raises(UserError) as error:
        configure(flags)
    assert error.value.problems[0].startswith(message)
    minutes = [configure(["--demo", *more])[0].minutes for more in ([], ["--minutes", "7"], ["--max-steps", "9"])]
    assert minutes == [2.0, 7.0, None]


def test_too_little_memory_for_graphs_does_not_end_the_measurement(monkeypatch):
    """The kernels are launched one by one then, as in training."""

    def fail(function, *arguments):
        function(*arguments)
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(cuda_graphs, "are_faster", lambda *args: True)
    monkeypatch.setattr(cuda_graphs, "Graph", fail)
    monkeypatch.setattr(budget, "MEASURED_SECONDS", 0.01)
    assert budget._tokens_per_second(config_of(), 2, "fp32", 257, ONE_PROCESS, new_model) > 0
