"""--text: flags that fit an amount of text, its shards, and the run."""

from __future__ import annotations

import gzip
import json
import math
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from helpers import finish_run, losses, needs_gpt2_vocabulary, run_to_the_end, start_run
from training import NEW_RUN, ONE_PROCESS, checkpoint_names, config_with, configure, forked, save_small_model, train

import train_gpt2
from support.checkpoints.history import read_starts
from support.cli import UserError
from support.data.bpe import train_bpe
from support.data.make_shards import make_shards
from support.data.shards import read_manifest
from support.data.text_files import TextFiles
from support.data.tokenizer import get_tokenizer
from support.runtime import devices
from support.sizing import presets
from support.sizing.presets import (
    MODELS_FOR_TEXT,
    fast_rates,
    longer_run,
    make_preset_shards,
    measure_text,
    vocab_size_for,
)
from support.terminal import on_one_line
from train_gpt2 import MODELS, RECIPES, TABLES, GPTConfig

TEXT = "".join(f"{a} and {b} are {a + b}.\n" for a in range(40) for b in range(60))
SMALL = "--n-layer 1 --n-head 1 --n-embd 16 --max-steps 4 --val-tokens 512 --device cpu --dtype fp32 --sample-every 0".split()


def file_of_size(folder: Path, size: float) -> Path:
    """A file that takes no room on the disk."""
    path = folder / f"{size}.txt"
    with open(path, "wb") as file:
        file.truncate(int(size))
    return path


# -----------------------------------------------------------------------------
# Flags


# By hand: nine tenths of the bytes are tokens; up to 2.4 million tokens, 25 passes, otherwise one; 2,000
# steps or more. Above ten passes, the dropout grows by 0.01 with each, up to 0.1, and the weight decay falls
# from six times, by 0.3 with each, to three times.
# A seventh of those bytes: 130,000, 340,000, 510,000, 1.3M, 13M, 130M and 1.3G weights; those of the blocks are 12 L C^2.
@pytest.mark.parametrize(
    "size, n_layer, context, tokens_per_step, steps, dropout",
    [
        (5e4, 3, 64, 1024, 1099, 0.1),  # 45,000 tokens 25 times
        (1e5, 3, 64, 1024, 2197, 0.1),  # 90,000 tokens 25 times
        (1.7e5, 3, 64, 1024, 2344, 0.06),  # 153,000 tokens 16 times: 2.4 million
        (1e6, 3, 64, 1024, 2344, 0.0),
        (4e6, 3, 64, 1024, 3516, 0.0),
        (1e7, 4, 64, 4096, 2197, 0.0),
        (1e8, 6, 256, 32768, 2747, 0.0),
        (1e9, 12, 1024, 262144, 3433, 0.0),
        (1e10, 12, 1024, 524288, 17166, 0.0),
    ],
)
def test_flags_fit_the_amount_of_text(tmp_path, size, n_layer, context, tokens_per_step, steps, dropout):
    config, _ = configure(["--text", str(file_of_size(tmp_path, size)), "--tokenizer", "bytes", "--out", "mine"])
    assert (config.n_layer, config.block_size, config.dropout) == (n_layer, context, dropout)
    assert (config.total_batch_size, config.max_steps) == (tokens_per_step, steps)
    assert (config.recipe, config.data, config.shuffle, config.keep) == ("fast", "mine/data", True, 1)
    quarter = math.ceil(steps / 4)  # so that the last evaluation does not come right after another one
    assert (config.warmup_steps, config.val_every, config.checkpoint_every) == (steps // 30, quarter, quarter)
    assert (config.optimizer, config.schedule, config.decay_steps) == ("muon", "wsd", steps)
    rates = {1024: 0.9e-3, 4096: 1.8e-3, 32768: 3.6e-3, 262144: 3.6e-3, 524288: 3.6e-3}  # with the square root
    assert config.max_lr == pytest.approx(rates[tokens_per_step], rel=0.01) and config.adamw_lr == 3.6e-3
    passes = steps * tokens_per_step / (0.9 * size)
    times = max(3, 6 - 0.3 * (passes - 10)) if dropout else 1
    assert config.max_lr * config.weight_decay == pytest.approx(times * 3.6e-4)


@pytest.mark.parametrize(
    "passes, flags, times, expected",
    [  # by hand, for steps of 1,024 tokens: 0.4 up to five passes, 2.4 at 7.5 to ten, 1.2 from 20 on; 1.536 at 17.2
        (2.5, {}, 2, {}),
        (4.0, {}, 2, {"weight_decay": 2.4}),
        (4.9, {"weight_decay": 2.4}, 2, {}),  # it was to read more
        (8.6, {"weight_decay": 2.4}, 2, {"dropout": 0.07, "weight_decay": 1.54, "max_passes": 18}),
        (8.6, {"weight_decay": 2.4, "max_passes": 0.0}, 2, {"dropout": 0.07, "weight_decay": 1.54}),
        # six times 0.28284, rounded up in the command that the parent printed; 3.84 times
        (
            8.6,
            {"total_batch_size": 2048, "weight_decay": 1.7, "max_passes": 25},
            2,
            {"dropout": 0.07, "weight_decay": 1.09},
        ),
        (8.6, {"optimizer": "adamw", "weight_decay": 0.1}, 2, {"dropout": 0.07, "max_passes": 18}),
        (8.6, {"dropout": 0.2, "weight_decay": 2.4, "max_passes": 25}, 2, {"weight_decay": 1.54}),
        (
            8.6,
            {"total_batch_size": 4096, "weight_decay": 1.2},
            2,
            {"dropout": 0.07, "weight_decay": 0.768, "max_passes": 18},
        ),
        (
            16.0,
            {"dropout": 0.06, "weight_decay": 1.68, "max_passes": 25},
            25 / 16,
            {"dropout": 0.1, "weight_decay": 1.2},
        ),
        (21.0, {"dropout": 0.1, "max_passes": 25}, None, {}),
        (41.0, {}, None, {}),
        (4.0, {"init_from": "gpt2"}, 2, {}),
        (4.0, {"text": None}, 2, {}),
        (10.0, {"text": None}, None, {}),
    ],
)
def test_a_run_that_is_made_longer_gets_the_flags_for_its_passes(passes, flags, times, expected):
    of_run = dict(text="a", weight_decay=0.4, minutes=4.0, max_passes=10.0)
    config = replace(config_with(recipe="fast", total_batch_size=1024), **of_run | flags)
    expected = {} if times is None else {"minutes": f"{4 * times:.1f}".removesuffix(".0"), **expected}
    assert longer_run(config, {"weight_decay": "--text"}, passes, TABLES) == expected


@pytest.mark.parametrize(
    "source, expected",
    [("--text", 0.5), ("command line", None), ("command line of the fork", 0.5), ("--demo", 0.5), ("--recipe", None)],
)
def test_a_run_that_is_made_longer_keeps_the_weight_decay_that_its_user_chose(source, expected):
    """By hand: with steps of 16,384 tokens, a new run has weight decay 0.1 up to five passes, 0.3 at six and 0.5 at seven."""
    config = replace(config_with(recipe="fast", total_batch_size=16384), text="a", weight_decay=0.3)
    longer = longer_run(config, {"weight_decay": source}, 3.5, TABLES)
    assert longer == {"max_steps": 2 * 19073} | ({"weight_decay": expected} if expected else {})


def test_a_number_of_steps_that_reads_a_text_often_gets_weight_decay_and_dropout(tmp_path):
    """By hand: 1 MB has 300,000 tokens to train on: 1,465 steps of 1,024 are five passes, 1,758 are six, 2,929
    are ten, and 4,102 are 14. Without dropout, a small text is not read more often: 10 passes over 45,000 tokens, of
    two bytes, are 439 steps."""
    text = ["--text", str(file_of_size(tmp_path, 1e6))]
    for steps, given, weight_decay in (
        (1464, [], 0.4),
        (1758, [], 1.2),
        (2929, [], 2.4),
        (2929, ["--weight-decay", 0.3], 0.3),
    ):
        assert configure([*text, "--max-steps", steps, *given])[0].weight_decay == pytest.approx(weight_decay, rel=1e-3)
    for steps, given, dropout in (
        (2929, [], 0.0),
        (4102, [], 0.04),
        (9000, ["--dropout", 0.2], 0.2),
        (2929, ["--dropout", 0], 0),
    ):
        assert configure([*text, "--max-steps", steps, *given])[0].dropout == dropout
    config, _ = configure(["--text", str(file_of_size(tmp_path, 1e5)), "--dropout", 0])
    assert (config.dropout, config.max_steps) == (0.0, 439)


@pytest.mark.parametrize(
    "steps, dropout, times",
    [(1200, 0, 1), (7320, 0, 1), (14648, 0, 6), (20507, 0.04, 4.8), (29297, 0.1, 3)],  # 0.8, 5, 10, 14 and 20 passes
)
def test_and_so_does_a_long_demo(steps, dropout, times):
    """By hand: its 10 MB have three million tokens to train on, 1,465 steps of 2,048."""
    config, _ = configure(["--demo", "--max-steps", steps])
    assert config.dropout == dropout
    assert config.weight_decay == pytest.approx(times * 0.1 * 8**0.5, rel=1e-3)


def test_the_tokenizer_suits_the_amount_of_text(tmp_path, monkeypatch):
    def no_network(name):
        raise UserError(f"{name} cannot be downloaded.")

    monkeypatch.setattr(presets, "get_tokenizer", no_network)
    sizes = {1e4: "bpe", 4e8: "bpe", 4.1e8: "gpt2"}
    assert {size: configure(["--text", str(file_of_size(tmp_path, size))])[0].tokenizer for size in sizes} == sizes
    config, _ = configure(["--text", str(file_of_size(tmp_path, 2e7)), "--tokenizer", "gpt2"])  # of four bytes
    assert config.total_batch_size * config.max_steps == pytest.approx(2e7 * 0.9 / 4, rel=0.01)


# By hand: a 500th of the characters, but at most 12 L C^2 weights of C channels each.
@pytest.mark.parametrize(
    "size, sizes, expected",
    [
        (2e6, (3, 128), 4096),
        (3e7, (3, 96), 2048),  # 3,456
        (3e7, (3, 128), 4096),  # 4,608
        (3e7, (6, 192), 8192),  # 13,824
        (3e7, (12, 768), 32768),
        (3e7, (1, 16), 512),
    ],
)
def test_the_vocabulary_suits_the_text_and_the_model(tmp_path, size, sizes, expected):
    model = dict(zip(("n_layer", "n_embd"), sizes, strict=True))
    config, _ = configure(["--text", str(file_of_size(tmp_path, size))])
    assert vocab_size_for(replace(config, **model), measure_text(config.text)) == expected


@pytest.mark.parametrize(("n_layer", "vocab_size"), [(2, 512), (3, 1024)])
def test_the_shards_of_a_smaller_model_have_a_smaller_vocabulary(tmp_path, n_layer, vocab_size):
    """600 kB are enough for 1,024 tokens, which are more than the 12 * 2 * 32 of two layers."""
    numbers = np.random.default_rng(0).integers(10**6, size=90_000)
    (tmp_path / "text.txt").write_text(" ".join(map(str, numbers)))
    sizes = ["--n-layer", n_layer, "--n-head", 1, "--n-embd", 32]
    config, _ = configure(["--text", tmp_path / "text.txt", "--out", tmp_path / "run", *sizes])
    make_preset_shards(config, keep_existing=False, may_replace=False, model=None)
    assert read_manifest(tmp_path / "run" / "data")["vocab_size"] == vocab_size


def test_a_given_flag_replaces_the_presets(tmp_path):
    given = (
        "--recipe gpt2 --n-layer 2 --block-size 32 --total-batch-size 4096 --max-steps 7 --max-lr 1e-3 --keep 0".split()
    )
    config, _ = configure(["--text", str(file_of_size(tmp_path, 1e6)), *given])
    assert (config.recipe, config.n_layer, config.n_head, config.block_size) == ("gpt2", 2, 2, 32)
    assert (config.total_batch_size, config.max_steps, config.val_every) == (4096, 7, 2)
    assert (config.max_lr, config.keep) == (1e-3, 0)
    config, _ = configure(["--text", str(file_of_size(tmp_path, 1e6)), "--model", "gpt2-medium"])
    assert dict(n_layer=config.n_layer, n_head=config.n_head, n_embd=config.n_embd) == MODELS["gpt2-medium"]
    assert config.block_size == 1024


def test_the_largest_model_for_a_text_is_gpt2():
    assert MODELS_FOR_TEXT[-1] == MODELS["gpt2"] | {"block_size": GPTConfig().block_size}


def test_adamw_has_a_rate_of_its_own_and_weight_decay_is_higher_only_beside_muon(tmp_path):
    for source in (["--text", str(file_of_size(tmp_path, 1e6))], ["--demo"]):
        preset, _ = configure(source)
        assert preset.adamw_lr == 3.6e-3 and preset.weight_decay > 0.2
        for given in (["--optimizer", "adamw"], ["--recipe", "gpt2"]):
            config, _ = configure([*source, *given])
            assert (config.adamw_lr, config.weight_decay) == (None, 0.1)
        for rate in (preset.max_lr, 1e-3):  # changes nothing else
            config, _ = configure([*source, "--max-lr", rate])
            assert config == replace(preset, max_lr=rate, min_lr=pytest.approx(rate / 50))
    assert fast_rates(RECIPES["fast"], 1024, {"init_from": "gpt2"}).keys() == {"max_lr"}


def test_fine_tuning_takes_few_epochs_at_a_low_rate(tmp_path):
    for n_embd, factor in ((64, 12), (768, 1), (1536, 1)):  # a higher rate for a narrower model
        save_small_model(tmp_path / "model", get_tokenizer("bytes"), n_embd=n_embd)
        flags = ["--text", str(file_of_size(tmp_path, 1e6)), "--init-from", str(tmp_path / "model")]
        config, _ = configure(flags)
        assert (config.recipe, config.optimizer, config.n_embd, config.tokenizer) == ("gpt2", "adamw", n_embd, "bytes")
        assert config.adamw_lr is None
        assert config.max_lr == pytest.approx(factor * 1e-4)
        assert config.total_batch_size * config.max_steps == pytest.approx(3 * 1e6 * 0.9, rel=0.01)
        config, _ = configure([*flags, "--lora-rank", "8"])
        assert config.optimizer == "adamw" and config.max_lr == pytest.approx(factor * 1e-3)


@pytest.mark.parametrize("context, flags, rows", [(64, [], 32), (128, [], None), (128, ["--block-size", "64"], 32)])
def test_fine_tuning_a_small_model_takes_the_micro_batch_of_small_models(tmp_path, context, flags, rows):
    save_small_model(tmp_path / "model", get_tokenizer("bytes"), block_size=context)
    text = ["--text", str(file_of_size(tmp_path, 1e6))]
    assert configure([*text, "--init-from", str(tmp_path / "model"), *flags])[0].batch_size == rows
    assert configure(text)[0].batch_size == 32  # of random weights and a context of 64


def test_compressed_text_counts_uncompressed(tmp_path):
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.table({"story": ["the same again, " * 100_000], "other": ["x" * 100_000]})  # 1.6 MB
    path = tmp_path / "text.parquet"
    pyarrow.parquet.write_table(table, path, compression="zstd", use_dictionary=False)
    assert path.stat().st_size < 1e5
    assert measure_text(str(path), "story").bytes == pytest.approx(1.6e6, rel=0.01)
    (tmp_path / "texts").mkdir()
    numbers = " ".join(map(str, np.random.default_rng(0).integers(10**6, size=10**6)))  # 7 MB
    with gzip.open(tmp_path / "texts/a.txt.gz", "wt") as file:
        file.write(numbers)
    text = "Война и мир, том первый. " * 4000
    lines = [json.dumps({"id": "x" * 50, "text": text[start : start + 25]}) for start in range(0, len(text), 25)]
    (tmp_path / "texts/b.jsonl").write_text("\n".join(lines))  # 12 bytes of 20 are Cyrillic letters
    for name, size in (("a.txt.gz", len(numbers)), ("b.jsonl", len(text.encode()))):
        assert measure_text(str(tmp_path / "texts" / name)).bytes == pytest.approx(size, rel=0.01)
    assert measure_text(str(tmp_path / "texts")).bytes == pytest.approx(len(numbers) + len(text.encode()), rel=0.01)


@pytest.mark.parametrize("flags", [[], ["--minutes", "1"], ["--plan"]])
def test_an_empty_text_is_an_error(tmp_path, flags):
    (tmp_path / "a.txt").touch()
    with pytest.raises(UserError, match=r"there is no text in .*a\.txt\. Use another file"):
        train_gpt2.main(["--text", str(tmp_path / "a.txt"), "--out", str(tmp_path / "out"), *flags])


def test_a_text_whose_first_document_is_longer_than_what_is_read_of_it_counts_by_its_size(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "a word " * 200_000}) + "\n" + json.dumps({"text": "b"}))
    assert measure_text(str(tmp_path / "a.jsonl")).bytes == pytest.approx(1.4e6, rel=0.01)
    assert (
        measure_text(str(tmp_path / "a.jsonl"), "story").bytes > 0
    )  # who reads the file says that there is no such field


def test_the_largest_file_tells_how_long_the_tokens_are(tmp_path):
    (tmp_path / "a.txt").write_text("xyz " * 2000)
    (tmp_path / "b.txt").write_text("ab" * 20_000)
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "xyz " * 3000}))
    known = train_bpe(["ab" * 999], 300)
    tokens = len(known.encode("ab" * 20_000))
    assert measure_text(str(tmp_path), existing_tokenizer=known).bytes_per_token == pytest.approx(
        40_000 / tokens, rel=0.01
    )


@needs_gpt2_vocabulary
def test_gpt2s_tokens_of_a_text_are_counted(tmp_path):
    text = "Ein längerer Satz auf Deutsch, mit Übermut geschrieben. " * 300
    (tmp_path / "a.txt").write_text(text)
    tokens = len(get_tokenizer("gpt2").encode(text))
    estimate = measure_text(str(tmp_path / "a.txt"), tokenizer="gpt2")
    assert estimate.bytes_per_token == pytest.approx(len(text.encode()) / tokens, rel=0.01)


def test_fine_tuning_makes_three_passes_in_any_language(tmp_path):
    """With the tokens of the model, not of English."""
    text = "".join(f"число {number}, " for number in range(30_000))
    (tmp_path / "text.txt").write_text(text)
    known = train_bpe([text], 400)
    save_small_model(tmp_path / "model", known)
    config, _ = configure(["--text", str(tmp_path / "text.txt"), "--init-from", str(tmp_path / "model")])
    expected = 3 * 0.9 * len(known.encode(text))
    assert config.total_batch_size * config.max_steps == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("tokenizer", ["bpe", "bytes", "known"])
def test_texts_in_other_languages_have_other_tokens(tmp_path, tokenizer):
    """The tokens of the shards are the reference. English has 2 bytes per token of such a small vocabulary."""
    words = ["".join(chr(0x430 + i) for i in word) for word in np.random.default_rng(0).integers(32, size=(300, 6))]
    text = " ".join(np.random.default_rng(1).choice(words, size=90_000))  # 630,000 letters: 1,024 tokens, not 2,048
    (tmp_path / "text.txt").write_text(text)
    known = train_bpe([text[:9000]], 400) if tokenizer == "known" else None
    if known:
        known.save_pretrained(tmp_path, 64)
    estimate = measure_text(str(tmp_path / "text.txt"), "text", None if known else tokenizer, known)
    manifest = make_shards(
        TextFiles([tmp_path / "text.txt"]), tmp_path / "out", tokenizer=known.name if known else tokenizer,
        tokenizer_from=tmp_path if known else None, split_documents=True,
    )  # fmt: skip
    of_train = sum(shard["tokens"] for shard in manifest["shards"] if shard["split"] == "train")
    assert estimate.train_tokens == pytest.approx(of_train, rel=0.02) and estimate.tokenizer == manifest["tokenizer"]
    if tokenizer == "bpe":
        assert estimate.vocab_size == manifest["vocab_size"]


def test_a_tenth_of_a_text_that_is_longer_than_a_shard_is_held_out(tmp_path, monkeypatch):
    """A whole shard would be most of it."""
    monkeypatch.setattr(presets, "SHARD_SIZE", 1000)
    monkeypatch.setattr(presets, "make_shards", partial(make_shards, shard_size=1000))
    for text_bytes, held_out in ((900, 90), (1200, 120), (9000, 900), (45_000, 1000)):
        monkeypatch.setattr(presets, "LARGE_TEXT", 40_000)
        path = tmp_path / f"{text_bytes}.txt"
        path.write_text("ab" * (text_bytes // 2))
        config, _ = configure(["--text", path, "--tokenizer", "bytes", "--out", tmp_path / str(text_bytes)])
        make_preset_shards(config, keep_existing=False, may_replace=False, model=None)
        shards = read_manifest(config.data)["shards"]
        assert sum(shard["tokens"] for shard in shards if shard["split"] == "val") == pytest.approx(held_out, abs=1)


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--text", ""], "--text is empty. Pass a value."),
        (["--text-field", "story"], "--text-field is for --text. Add --text, or leave out --text-field."),
        (["--tokenizer", "bytes"], "--tokenizer is for --text. Add --text, or leave out --tokenizer."),
        (["--text", "text.txt", "--data", "d"], "--text makes its own shards, in --out. Leave out --data"),
        (["--text", "text.txt", "--total-batch-size", "0"], "--total-batch-size is 0. It must be 1 or more."),
        (["--text", "nowhere"], "no file matches nowhere. Give files or folders of .txt, .jsonl, .parquet"),
        (
            ["--text", "empty"],
            "there is no text in empty. Give files or folders of .txt, .jsonl, .parquet",
        ),
        (["--text", ".", "--demo"], "--demo brings its own text. Leave out --text, or --demo."),
        (["--text", ".", "--tokenizer", "words"], "--tokenizer is 'words'. It must be gpt2, bytes or bpe"),
    ],
)
def test_bad_text_is_rejected(tmp_path, monkeypatch, flags, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.txt").write_text(TEXT)
    with pytest.raises(UserError) as error:
        configure(flags)
    assert error.value.problems[0].startswith(message)


# -----------------------------------------------------------------------------
# Runs


def samples_of(output: str) -> list[str]:
    return re.findall(r"^step +\d+ \| sample \d: (.*)$", output, re.M)


@pytest.mark.parametrize("prompt", [(), ("--prompt", "The end")])
def test_samples_continue_the_held_out_text_unless_there_is_a_prompt_and_the_header_is_short(
    tmp_path, capfd, monkeypatch, prompt
):
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("".join(f"The number that follows upon {n} is {n + 1}.\n" for n in range(300)))
    flags = ["--text", "text.txt", "--tokenizer", "bytes", "--out", "run", *SMALL, "--sample-every", 4]
    train(configure([*flags, *prompt])[0], ONE_PROCESS, NEW_RUN)
    printed = capfd.readouterr().out
    assert ".npy" not in printed  # the lines of fineweb.py
    forked(Path("longer"), Path("run/model_00004"), "--max-steps", 5)
    before, after = samples_of(printed), samples_of(capfd.readouterr().out)
    [val] = Path("run", "data").glob("*_val_*.npy")  # it begins inside a line
    number = int(re.search(r"\n.* (\d+) is", bytes(np.load(val).astype(np.uint8)).decode())[1])
    expected = prompt[1] if prompt else f"The number that follows upon {number} is"
    assert number >= 269 and len(before) == 4 and len(after) == 8  # of steps 4 and 5
    assert all(text.startswith(expected) for text in before + after)
    summary = " ".join(printed.partition("\ndone ")[2].split())  # whose next command continues the same words
    assert f" sample {expected}" in summary
    assert f" next python sample.py --model run/model_00004 --prompt '{expected}" in summary
    header = printed.partition("device ")[2].partition("\nstep     0 |")[0].splitlines()
    assert 6 <= len(header) <= 10 and all(len(line) <= 80 for line in header)  # two of them say that the text is tiny
    recorded = read_starts(Path("run"))[0]["flags"]  # which has what was chosen
    chosen = {"tokenizer": "bytes", "recipe": "fast", "max_lr": 0.0009, "max_steps": 4, "keep": 1, "shuffle": True}
    assert chosen.items() <= recorded.items()


def test_the_text_at_the_end_is_the_best_models(tmp_path, capfd, monkeypatch):
    """By the losses that it is told, the model is best after a quarter: that one writes, and is kept and named."""
    losses_told = iter([9.0, 1.0, 2.0, 3.0, 4.0])
    monkeypatch.setattr(train_gpt2, "validation_loss", lambda *args: next(losses_told))
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text(TEXT)
    flags = [*SMALL, "--checkpoint-every", 1, "--val-every", 1, "--prompt", "1 and"]
    train(configure(["--text", "text.txt", "--tokenizer", "bytes", "--out", "run", *flags])[0], ONE_PROCESS, NEW_RUN)
    printed = capfd.readouterr().out
    assert checkpoint_names(Path("run")) == [
        "model_00001",
        "model_00002",
        "model_00004",
    ]  # the second: before the cooldown
    assert "next    python sample.py --model run/model_00001 --prompt '1 and'" in printed
    model, tokenizer = train_gpt2.GPT.from_pretrained("run/model_00001").eval(), get_tokenizer("bytes")
    generator = devices.seeded_generator(ONE_PROCESS.device, 1337)
    [expected] = train_gpt2.sample(model, tokenizer, "1 and", 150, generator, 0.8, n=1)
    sample = " ".join(printed.partition("\nsample  ")[2].partition("\nsaved ")[0].split())
    assert sample == " ".join(on_one_line(expected).split())


def test_one_command_trains_on_a_text_and_resumes(tmp_path):
    (tmp_path / "text.jsonl").write_text("\n".join(json.dumps({"id": n, "story": f"{n}. {TEXT}"}) for n in range(3)))
    flags = ["--text", "text.jsonl", "--tokenizer", "bytes", "--out", "mine", *SMALL]
    assert finish_run(start_run(*flags, cwd=tmp_path, defaults=())) == [2]
    error = (tmp_path / "0.txt").read_text()
    assert "has no text in 'text', only id (int), story (str)" in error
    assert "--out" not in error  # another folder would not help
    run_to_the_end(*flags, "--text-field", "story", cwd=tmp_path, defaults=())
    [val], [train_shard] = ((tmp_path / "mine" / "data").glob(f"*_{split}_*.npy") for split in ("val", "train"))
    assert bytes(np.load(val).astype(np.uint8)).decode() in TEXT  # the last tenth, unchanged
    assert len(np.load(val)) == pytest.approx(3 * len(TEXT) / 10, abs=5)
    assert len(np.load(val)) + len(np.load(train_shard)) == 3 * (len(TEXT) + 4)
    (tmp_path / "text.jsonl").unlink()  # the shards are enough
    with pytest.raises(UserError) as error:
        configure(["--resume", "--out", tmp_path / "mine", "--text-field", "id", "--tokenizer", "gpt2", "--text", "x"])
    assert [problem.split()[0] for problem in error.value.problems[:3]] == ["--text", "--text-field", "--tokenizer"]
    run_to_the_end("--fork", "mine/model_00004", "--out", "longer", "--max-steps", 6, cwd=tmp_path, defaults=())
    assert len(losses(tmp_path / "longer" / "log.txt")) == 6


def test_a_folder_means_all_text_in_it_and_changed_text_is_rejected(tmp_path, capfd):
    folder = tmp_path / "texts [1]"  # which would be a pattern for glob
    (folder / "deep").mkdir(parents=True)
    (folder / "a.txt").write_text(TEXT)
    (folder / "deep" / "b.jsonl").write_text(json.dumps({"text": TEXT}) + "\n")
    (folder / "picture.png").write_bytes(b"no text")
    (folder / "deep" / "._b.jsonl").write_text("a copy")
    (folder / "again").symlink_to(folder)
    flags = ["--text", str(folder), "--tokenizer", "bytes", *SMALL, "--checkpoint-every", "0", "--val-every", "0"]
    for out in ("log", "log2"):  # the log of the first run is no text
        train(configure([*flags, "--out", folder / out])[0], ONE_PROCESS, NEW_RUN)
        manifest = json.loads((folder / out / "data" / "manifest.json").read_text())
        sizes = {shard["split"]: shard["tokens"] for shard in manifest["shards"]}
        assert sum(sizes.values()) == 2 * (len(TEXT) + 1) and sizes["val"] == round(0.2 * (len(TEXT) + 1))
        said = capfd.readouterr().out
        assert said.count("note    skipped ") == 2 and f"note    skipped {folder}/picture.png (not .txt, " in said
    (folder / "a.txt").write_text(TEXT + "One more.")
    starts = (folder / "log" / "starts.jsonl").read_text().splitlines(True)
    (folder / "log" / "starts.jsonl").write_text("".join(starts[:-1]))  # as if the run had been killed
    with pytest.raises(
        UserError, match=r"log/data has shards from a different source or setting.* Use another --out, or"
    ):
        train(configure([*flags, "--out", folder / "log", "--resume", "auto"])[0], ONE_PROCESS, NEW_RUN)


def test_after_a_text_that_was_too_small_the_same_command_trains_on_a_larger_one(tmp_path, monkeypatch, capsys):
    """Its shards are made again, as no run has used them; a folder that others have filled is left alone."""
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("A few words.")
    config, _ = configure(["--text", "text.txt", "--tokenizer", "bytes", "--out", "run", *SMALL])
    with pytest.raises(UserError, match="Use more text"):
        train(config, ONE_PROCESS, NEW_RUN)
    Path("run/data/notes.md").write_text("mine")
    Path("text.txt").write_text(TEXT)
    capsys.readouterr()
    train(config, ONE_PROCESS, NEW_RUN)
    assert "note    the shards in run/data are of another text. They are replaced." in capsys.readouterr().out
    manifest = json.loads(Path("run/data/manifest.json").read_text())
    assert sum(shard["tokens"] for shard in manifest["shards"]) == len(TEXT) + 1
    assert {path.name for path in Path("run/data").glob("*.npy")} == {shard["file"] for shard in manifest["shards"]}
    assert Path("run/data/notes.md").exists() and Path("run/model_00004").is_dir()
    Path("other/data").mkdir(parents=True)
    Path("other/data/foreign_train_000000.npy").touch()
    config, _ = configure(["--text", "text.txt", "--tokenizer", "bytes", "--out", "other", *SMALL])
    with pytest.raises(UserError, match=r"from another tool, such as .* Move them away, or use another --out\.$"):
        train(config, ONE_PROCESS, NEW_RUN)
