"""--plan: its formulas against published runs, arithmetic, and PyTorch's own counts."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace

import pytest
import torch
from helpers import TINY_MODEL_FLAGS
from safetensors.torch import load_file
from training import config_with, save_small_model, trained

from support.cli import UserError
from support.config import PlanOptions
from support.data.bpe import train_bpe
from support.data.make_shards import make_shards
from support.data.shards import open_shards
from support.data.text_files import TextFiles
from support.data.tokenizer import get_tokenizer
from support.runtime.memory import Layout, training_memory
from support.sizing import plan
from train_gpt2 import main, new_model


def plan_for(*flags: object) -> plan.Plan:
    """The plan that the report of --plan is made from."""
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "report", lambda planned: found.append(planned) or [])
        main(["--plan", *map(str, flags)])
    return found[0]


@pytest.mark.parametrize(
    "name, gpus, gpu, flags, tokens_per_second, hours",
    [
        ("gpt2", 8, "A100", "--mfu 0.60", (218_000, 218_000), 1.6),  # llm.c's, of 10 and 32 billion tokens
        ("gpt2-xl", 8, "H100", "--mfu 0.49 --max-steps 61035", (46_800, 46_800), 24.0),
        ("gpt2", 1, "A100", "", (182_000, 209_000), None),  # PyTorch's
        ("gpt2", 8, "A100", "", (109_000, 209_000), None),
        ("gpt2", 1, "H100", "", (466_000, 482_000), None),
        ("gpt2", 8, "H100", "", (381_000, 482_000), None),
        ("gpt2", 1, "H200", "", (498_000, 549_000), None),
        ("gpt2-xl", 8, "H100", "", (0.8 * 40_000, 40_000), None),
        ("gpt2", 1, "RTX4090", "", (0.8 * 106_000, 106_000), None),
        ("gpt2", 1, "B200", "", (0.8 * 793_891, 793_891), None),
        ("gpt2", 1, "L40S", "", (0.8 * 142_641, 142_641), None),
        ("gpt2", 1, "L4", "", (0.8 * 40_423, 40_423), None),
        ("gpt2", 1, "A6000", "", (0.8 * 92_444, 92_444), None),
        ("gpt2", 1, "RTXPRO6000", "", (0.8 * 287_774, 287_774), None),
        ("gpt2", 1, "RTX5090", "", (0.8 * 196_551, 196_551), None),
    ],
)
def test_the_range_is_of_what_was_published_or_measured_here(capsys, name, gpus, gpu, flags, tokens_per_second, hours):
    """Their sources are in docs/normal.md; a single one may be a fifth too high."""
    main(f"--plan --gpus {gpus} --model {name} --gpu {gpu} {flags}".split())
    out = printed(capsys)
    found = [speed / gpus for speed in numbers(r"(\S+?)(?: to (\S+))? tokens/s", out)]
    assert found == pytest.approx(tokens_per_second, rel=0.05)
    if hours:
        assert numbers(r": (\S+?)(?: to (\S+))? hours; ", out)[0] == pytest.approx(hours, rel=0.05)


def numbers(pattern: str, out: str) -> list[float]:
    """The two ends of a range that is printed; one figure is both."""
    [(low, high)] = re.findall(pattern, out)
    return [float(end.replace(",", "")) for end in (low, high or low)]


def test_a_gpu_without_bf16_is_planned_in_fp16(capsys):
    assert (
        plan_for("--gpu", "T4").layout.dtype == plan_for("--gpu", "T4", "--dtype", "fp16").layout.dtype == torch.float16
    )
    main("--plan --gpu T4 --mfu 0.25".split())
    out = printed(capsys)
    assert "65 TFLOP/s in fp16" in out
    flops = 19073 * 2**19 * (6 * (124_475_904 - 1024 * 768) + 12 * 12 * 768 * 1024)
    assert numbers(r": (\S+?)(?: to (\S+))? hours; ", out)[0] == pytest.approx(flops / (0.25 * 65e12) / 3600, rel=1e-3)
    with pytest.raises(UserError, match="only in fp16. Leave out --dtype bf16"):
        main("--plan --gpu T4 --dtype bf16".split())
    with pytest.raises(UserError, match="only in bf16"):
        main("--plan --gpu A100 --dtype fp16".split())


def test_whose_measurement_it_is(capsys):
    main("--plan --gpus 8 --gpu H100 --model gpt2-medium".split())  # 355M: nearer to 124M than to 1,558M
    words = "MFU (measured with 124M parameters: 33% on 8 H100 by gollem, 42% on an H100 by this trainer)"
    assert words in printed(capsys)
    main("--plan --gpus 8 --gpu H100 --model gpt2-large".split())
    assert "MFU (measured with 1558M parameters: 42% on 8 H100 by gollem; or a fifth less)" in printed(capsys)
    main("--plan --gpu T4".split())
    assert "at 22.9% to 57.0% MFU (assumed, as nothing is published for this GPU" in printed(capsys)


def test_without_a_name_it_is_this_machines_gpu(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name, flag in (("Tesla T4", "T4"), ("NVIDIA H100 PCIe", "A100"), ("Tesla K80", "A100")):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda name=name: name)
        assert plan_for().options.gpu == flag
        assert plan_for("--gpu", "L4").options.gpu == "L4"


def test_another_gpu_is_planned_by_its_peak(capsys):
    """By hand: 855 million FLOPs per token; the memory is that of --gpu."""
    main("--plan --gpu H200 --peak 2250 --mfu 0.4".split())
    out = printed(capsys)
    assert "1 x GPU of --peak (memory: H200), 2250 TFLOP/s in bf16 each" in out and "which has 150.1" in out
    assert numbers(r"(\S+?)(?: to (\S+))? tokens/s", out)[0] == pytest.approx(0.4 * 2250e12 / 855e6, rel=1e-3)
    main("--plan --gpu H200 --peak 2250".split())
    assert "at 22.9% to 57.0% MFU (assumed" in printed(capsys)


def test_what_comes_before_the_first_step(capsys, byte_shards, monkeypatch, tmp_path):
    """By hand: 28.5 GB at an eighth of a GB per second are 228 s; 10 + 12 x 1.5 s."""
    monkeypatch.chdir(tmp_path)
    main("--plan".split())
    out = printed(capsys)
    assert "start    28 s to compile" in out
    assert (
        "data     none in edu_fineweb10B yet. For FineWeb-Edu, fineweb.py downloads 28.5 GB, 4 minutes at 1 Gbit/s"
        in out
    )
    on_shards = ["--data", str(byte_shards), *TINY_MODEL_FLAGS, "--total-batch-size", "256"]
    for given in (["--demo"], [*on_shards, "--no-compile"]):  # a run of two minutes is not compiled
        main(["--plan", *given])
        out = printed(capsys)
        assert "to compile" not in out and "downloads" not in out


def test_evaluations_cost_a_third_of_the_training_of_their_tokens(capsys):
    main("--plan --max-steps 19073 --gpu A100 --price 1".split())
    out = printed(capsys)
    hours = numbers(r"time .*? (\S+) to (\S+) hours; ", out)
    per_second = numbers(r"(\S+) to (\S+) tokens/s", out)[::-1]  # the slowest takes longest
    # before the steps 0, 250, ..., 19000 and after the last one
    more = numbers(r"another (\S+) to (\S+) hours for 78 validations and 78 HellaSwag scores", out)
    tokens = 78 * (10_485_760 + 10_042 * 331)
    assert more == pytest.approx([tokens / 3 / speed / 3600 for speed in per_second], abs=0.006)
    cost = numbers(r"GPU-hours, (\S+) to (\S+) at 1 per GPU-hour", out)
    assert cost == pytest.approx([sum(both) for both in zip(hours, more, strict=True)], abs=0.02)
    main("--plan --max-steps 500 --val-every 0 --hellaswag-every 200".split())
    assert "0 validations and 4 HellaSwag scores" in printed(capsys)
    main("--plan --minutes 200".split())
    assert "for 5 validations and 5 HellaSwag scores" in printed(capsys)
    main("--plan --demo".split())
    assert " 0 HellaSwag scores" in printed(capsys)


def test_evaluations_read_what_is_there(byte_shards, tmp_path):
    """By hand: the rows of 16 tokens that are held out, and 331 tokens for each of three items."""
    of_run = "--total-batch-size 256 --max-steps 250 --val-every 125".split()
    shards = ["--data", byte_shards, *TINY_MODEL_FLAGS, *of_run]
    held_out = sum((len(shard) - 1) // 16 * 16 for shard in open_shards(byte_shards, "val"))
    assert plan.evaluations(plan_for(*shards)) == (3, 0, 3 * held_out)
    assert plan.evaluations(plan_for(*shards, "--val-tokens", 100)) == (3, 0, 3 * 96)
    (tmp_path / "items.jsonl").write_text(3 * '{"ctx": "a", "endings": ["b", "c", "d", "e"], "label": 0}\n')
    scored = ["--max-steps", 500, "--val-every", 0, "--hellaswag-data", tmp_path / "items.jsonl"]
    assert plan.evaluations(plan_for(*scored)) == (0, 3, 3 * 3 * 331)
    assert plan.evaluations(plan_for(*scored, "--hellaswag-limit", 2)) == (0, 3, 3 * 2 * 331)
    assert plan.evaluations(plan_for(*scored[:-2], "--hellaswag-limit", 20_000)) == (0, 3, 3 * 10_042 * 331)


def test_data_that_a_run_refuses_has_no_plan(byte_shards):
    of_shards = ["--plan", "--data", str(byte_shards), *TINY_MODEL_FLAGS]
    with pytest.raises(UserError, match=r"rows of 16 tokens to train on, and one step takes 32768\."):
        main(of_shards)
    with pytest.raises(UserError, match="no row of 16 tokens to validate on"):
        main([*of_shards, *"--total-batch-size 256 --val-tokens 8".split()])


def test_a_resumed_run_and_a_fork_are_planned_from_their_checkpoint(byte_shards, tmp_path, capsys):
    """By hand: of 9 steps, 4 are done; validations before steps 4, 6 and 8 and after the last, or of 6 steps before 4 and after 6."""
    trained(tmp_path / "run", "--data", byte_shards, "--max-steps", 9, "--checkpoint-every", 4, "--val-every", 2)
    capsys.readouterr()
    shutil.rmtree(tmp_path / "run" / "model_00009"), shutil.rmtree(tmp_path / "run" / "model_00008")
    main(["--plan", "--resume", "--out", str(tmp_path / "run"), "--dtype", "auto"])
    assert "5 steps from step 4 on of 256 tokens, 1,280 in total" in printed(capsys)
    assert plan.evaluations(plan_for("--resume", "--out", tmp_path / "run", "--dtype", "auto"))[0] == 4
    fork = ["--fork", tmp_path / "run" / "model_00004", "--out", tmp_path / "fork", "--max-steps", 6]
    fork += ["--dtype", "auto"]
    assert plan.evaluations(plan_for(*fork))[0] == 2
    main(["--plan", *map(str, fork)])
    assert "2 steps from step 4 on of 256 tokens, 512 in total" in printed(capsys)
    trained(tmp_path / "short", "--data", byte_shards, "--max-steps", 4)
    with pytest.raises(UserError, match="a run of 4 steps has ended at step 4.*Use --max-steps"):
        longer = [*map(str, ("--fork", tmp_path / "short/model_00004", "--out", tmp_path / "longer")), "--minutes", "1"]
        main(["--plan", *longer, "--dtype", "auto"])


def test_a_text_without_shards_yet_is_planned_by_its_size(tmp_path):
    """Of 100,000 bytes, a tenth is held out."""
    text = tmp_path / "text.txt"
    text.write_bytes(b"x" * 100_000)
    flags = ["--text", text, "--tokenizer", "bytes", "--out", tmp_path / "out"]
    assert plan.evaluations(plan_for(*flags, "--val-every", 0, "--total-batch-size", 65536))[2] == 0
    validations, _, evaluated = plan.evaluations(plan_for(*flags))
    assert evaluated == validations * 10_000 > 0
    with pytest.raises(UserError, match=r"text\.txt has about 90,000 tokens to train on, and one step takes 131,072\."):
        plan_for(*flags, "--total-batch-size", 131072)


def test_the_tokens_of_a_text_are_those_of_the_model_that_is_trained_on(tmp_path):
    """A tenth of them is validated on."""
    text = "".join(f"число {number}, " for number in range(9_000))
    (tmp_path / "text.txt").write_text(text)
    known = train_bpe([text], 400)
    save_small_model(tmp_path / "model", known)
    planned = plan_for("--text", tmp_path / "text.txt", "--init-from", tmp_path / "model", "--out", tmp_path / "out")
    assert planned.validated_tokens == pytest.approx(len(known.encode(text)) / 10, rel=0.02)


def test_recomputing_repeats_the_forward_pass_of_the_blocks():
    """124M parameters have 85M in the blocks, used twice, and attention's products. The FLOP/s stay the same."""
    flops, repeated = 855e6, 2 * 84_934_656 + 4 * 12 * 768 * 1024
    of_run = plan_for("--gpu", "A100", "--recompute")
    assert of_run.flops_per_token == pytest.approx(flops, rel=1e-3)
    *left, _ = plan.mfu(replace(of_run, flops_per_token=855_000_000))
    assert [mfu * (flops + repeated) for mfu in left] == pytest.approx([0.5 * flops, 0.57 * flops])


def test_the_largest_micro_batch_fits_and_the_next_does_not():
    of_run, device_memory = plan_for("--gpu", "RTX4090", "--batch-size", 128), int(23.5 * 2**30)
    B, layout = of_run.largest_micro_batch(), Layout(2**19, torch.bfloat16, compiled=True)
    totals = [training_memory(of_run.sizes, layout, b, device_memory).total for b in (B, 2 * B)]
    assert 1 <= B < 128 and totals[0] <= device_memory < totals[1]
    assert plan_for("--model", "gpt2-xl", "--gpu", "RTX4090").largest_micro_batch() == 0
    sharded = plan_for(*"--model gpt2-xl --gpu RTX4090 --gpus 8 --parallel fsdp --recompute".split())
    assert sharded.largest_micro_batch() > 0


def test_without_compilation_a_chunk_of_the_loss_takes_more():
    """By hand: with 80 GB, a chunk has 8,192 rows of 50,304 logits; eager PyTorch keeps two fp32 copies of them."""
    plans = [plan_for("--gpu", "H100", *flags) for flags in (["--no-compile"], [])]
    logits = [of_run.memory_per_gpu(64).logits for of_run in plans]
    assert logits[0] - logits[1] == 8192 * 50304 * 8


def printed(capsys) -> str:
    """The plan, without the breaks of its lines, none of which is too long."""
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    return re.sub(r"\n {9}(?=\S)", " ", out)


def test_the_command_prints_it_and_trains_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    main("--plan --model gpt2-xl --gpus 64 --gpu H100 --price 2.5 --max-steps 61035 --mfu 0.49".split())
    out = printed(capsys)
    assert "1,557,611,200 parameters" in out and "61,035 steps of 524,288 tokens, 31,999,918,080 in total" in out
    [hours] = re.findall(r"time +ddp: (\S+) hours; .* at 49\.0% MFU \(--mfu\)", out)
    assert float(hours) == pytest.approx(24 / 8, rel=0.05)
    [gpu_hours, cost] = re.findall(r"cost +(\S+) GPU-hours, (\S+) at 2.5 per GPU-hour", out)[0]
    assert float(cost) == pytest.approx(2.5 * float(gpu_hours), abs=0.2)
    table = out.split("memory ")[1].split("\n\n")[0].splitlines()[2:]
    assert table[0].split() == ["weights", "6.23", "6.23", "0.10", "0.10"]  # 4 bytes each, and a 64th of them
    for *parts, total, B in zip(*(map(float, line.split()[-4:]) for line in table), strict=True):  # DDP, FSDP
        assert total == pytest.approx(sum(parts), abs=0.04) and total < 84.9 and 8 % B == 0
    # 12 bytes for each parameter, and 4 for each of 12 x 1,600^2 in 48 blocks
    assert "18.7 GB per checkpoint; writing one takes 24.6 GB of the host's memory" in out
    assert list(tmp_path.iterdir()) == []


def test_if_the_layout_does_not_fit_another_one_is_planned(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    main("--plan --model gpt2-xl --gpus 8 --gpu RTX4090".split())
    out = printed(capsys)
    assert "note     ddp: not even one row fits. The rest of the plan is for fsdp.\ntime     fsdp: " in out
    assert re.search(r"^batch size +none +none +4 +64$", out, re.M)
    main("--plan --model gpt2-xl --gpu RTX4090".split())
    assert "Use more or larger GPUs, or a smaller model." in printed(capsys)


def test_the_vocabulary_is_that_of_shards_or_pretrained_weights(byte_shards, tiny_model, tmp_path, capsys):
    main(["--plan", "--data", str(byte_shards), *TINY_MODEL_FLAGS, "--total-batch-size", "256"])
    assert "model    34,208 parameters" in printed(capsys)
    main(["--plan", "--demo"])
    assert "model    1,127,552 parameters" in printed(capsys)
    tiny_model.save_pretrained(tmp_path / "base")
    get_tokenizer("bytes").save_pretrained(tmp_path / "base", 16)
    main(["--plan", "--init-from", str(tmp_path / "base"), "--block-size", "16", "--dtype", "auto"])
    assert "model    34,208 parameters" in printed(capsys)


@pytest.mark.parametrize("flags", [["--text", "{folder}/text.txt"], ["--data", "{folder}/none"]])
@pytest.mark.parametrize("start", ["--init-from", "--fork"])
def test_a_model_that_exists_is_planned_with_its_vocabulary(tmp_path, byte_shards, capsys, start, flags):
    text = " ".join(map(str, range(9000)))
    (tmp_path / "text.txt").write_text(text)
    make_shards(
        TextFiles([tmp_path / "text.txt"]), tmp_path / "shards", tokenizer="bpe", vocab_size=700, split_documents=True
    )
    trained(tmp_path / "run", "--data", tmp_path / "shards", "--max-steps", 2)
    parameters = sum(weights.numel() for weights in load_file(tmp_path / "run/model_00002/model.safetensors").values())
    main(
        ["--plan", start, str(tmp_path / "run/model_00002"), "--out", str(tmp_path / "out"), "--max-steps", "4",
         "--total-batch-size", "256", "--dtype", "auto", *(flag.format(folder=tmp_path) for flag in flags)]
    )  # fmt: skip
    assert f"model    {parameters:,} parameters" in capsys.readouterr().out


def test_parameters_are_those_of_the_published_models(capsys):
    """The vocabulary is padded in memory, but not in files."""
    main(["--plan"])
    assert "model    124,439,808 parameters" in printed(capsys)


def test_flags_of_the_plan_are_checked(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="is not a multiple of"):
        main("--plan --gpus 1000".split())
    with pytest.raises(UserError, match="--gpu is 'H99'. It must be .* A100, "):
        main("--plan --gpu H99".split())
    lora = replace(config_with(dtype="bf16"), init_from="x", lora_rank=4)
    with pytest.raises(UserError, match="Leave out --lora-rank"):
        plan.print_report(PlanOptions(), lora, new_model)
    with pytest.raises(UserError, match="^--gpus and --price: only for --plan. Add --plan"):
        main("--gpus 8 --price 3".split())
    with pytest.raises(UserError, match="--plan knows the peak of such a GPU only in bf16. Leave out --dtype fp32."):
        main("--plan --dtype fp32".split())
    main("--plan --gpu L4 --mfu 0.5 --recompute --batch-size 8".split())
    out = printed(capsys)
    assert "at 50.0% MFU (--mfu)" in out and "time     1 GPU+recompute: " in out
    assert re.search(r"^batch size +8 +8$", out, re.M)
