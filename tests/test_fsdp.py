"""Fully sharded data parallelism: the same run as one process, as DDP, and as itself on another number of ranks."""

from __future__ import annotations

import json
import os
from dataclasses import replace

import pytest
import torch
from helpers import FORKS, finish_run, losses, run_to_the_end, start_run
from torch.nn.parallel import DistributedDataParallel
from training import TINY, assert_same_run, saved_bytes, trained, trainer_file

import train_gpt2
from support.checkpoints import lora
from support.data.tokenizer import BytesTokenizer
from support.runtime import fsdp
from support.runtime.memory import recompute_activations
from train_gpt2 import GPT, GPTConfig

CPU = torch.device("cpu")
UNEVEN = GPTConfig(block_size=16, vocab_size=257, n_layer=3, n_head=2, n_embd=30)  # 4 ranks have unequal parts


def on_ranks(function, world_size, tmp_path, *args):
    """What `function(rank, *args)` returns, by rank, in gloo processes that are connected."""
    results, address = FORKS.Queue(), f"file://{tmp_path}/{function.__name__}{world_size}"
    ranks = [
        FORKS.Process(target=_on_rank, args=(function, rank, world_size, address, results, args))
        for rank in range(world_size)
    ]
    for process in ranks:
        process.start()
    returned = dict(results.get(timeout=100) for _ in ranks)
    assert finish_run(ranks) == [0] * world_size
    return returned


def _on_rank(function, rank, world_size, address, results, args):
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=address, rank=rank, world_size=world_size)
    results.put((rank, function(rank, *args)))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


# ---- gradients


def rows():
    return torch.randint(257, (8, 17), generator=torch.Generator().manual_seed(0))


def make_model(config, lora_rank):
    torch.manual_seed(0)
    model = GPT(config)
    if lora_rank:
        lora.add_adapter(model, config.n_embd, lora_rank, 16.0, 0, None)
    return model


def plain_gradients(config, lora_rank):
    model = make_model(config, lora_rank)
    model(rows()[:, :-1], rows()[:, 1:])[1].backward()
    return {name: p.grad.numpy() for name, p in model.named_parameters() if p.requires_grad}


def gradients_of_two_micro_steps(rank, config, lora_rank):
    """By layout: DDP, and FSDP that gathers the weights in each micro-step, or once."""
    layouts = (("ddp", False), ("fsdp", True), ("fsdp", False))
    return {layout: _gradients(rank, config, lora_rank, *layout) for layout in layouts}


def _gradients(rank, config, lora_rank, parallel, reshard_after_forward):
    with fsdp.weights_on_rank_zero(parallel == "fsdp", rank):
        model = make_model(config, lora_rank)
    if parallel == "fsdp":
        assert all(p.is_meta for p in model.parameters()) == (rank > 0)
        wrapped = fsdp.ShardedModel(model, model.transformer.h, CPU, torch.float32, compiled=False)
        wrapped.reshard_after_forward = reshard_after_forward
        wrapped.module.set_reshard_after_forward(reshard_after_forward)
    else:
        wrapped = DistributedDataParallel(model)
    batches = rows().chunk(2 * torch.distributed.get_world_size())[rank :: torch.distributed.get_world_size()]
    for i, batch in enumerate(batches):
        wrapped.require_backward_grad_sync = i == 1
        (wrapped(batch[:, :-1], batch[:, 1:])[1] / 2).backward()
    return {name: fsdp.full_tensor(p.grad).numpy() for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize(
    "config, lora_rank, world_size",
    [
        (TINY, 0, 2),
        pytest.param(UNEVEN, 0, 4, marks=pytest.mark.slow),
        pytest.param(TINY, 4, 4, marks=pytest.mark.slow),
    ],
    ids=["2", "uneven-4", "lora-4"],
)
def test_raw_gradients_are_those_of_one_process_and_of_ddp(tmp_path, world_size, config, lora_rank):
    """Before clipping and the optimizer, which would hide a sum where a mean belongs."""
    expected = plain_gradients(config, lora_rank)
    for layouts in on_ranks(gradients_of_two_micro_steps, world_size, tmp_path, config, lora_rank).values():
        for layout, gradients in layouts.items():
            assert gradients.keys() == expected.keys()
            for name, gradient in gradients.items():
                assert abs(gradient - expected[name]).max() <= 1e-6 * abs(expected[name]).max(), (layout, name)


def new_groups(rank):
    """How many process groups FSDP makes where CUDA seems to be there."""
    from torch.distributed import distributed_c10d

    torch.cuda.is_available, before = (lambda: True), distributed_c10d.get_pg_count()
    with fsdp.weights_on_rank_zero(True, rank):
        model = make_model(TINY, 0)
    fsdp.ShardedModel(model, model.transformer.h, CPU, torch.float32, compiled=False)
    return distributed_c10d.get_pg_count() - before


def test_fsdp_uses_the_group_that_exists(tmp_path):
    """With gloo, and CUDA at hand, PyTorch's own choice is another group with NCCL."""
    assert on_ranks(new_groups, 2, tmp_path) == {0: 0, 1: 0}


# ---- runs


def assert_close(a, b, tolerance=1e-5):
    pairs = list(zip(a, b, strict=True))
    assert pairs and max(abs(x - y) for x, y in pairs) < tolerance


def bad_loss_at_step_3_on_the_last_rank(rank):
    real_step, real_loss, calls = train_gpt2.train_step, train_gpt2.chunked_cross_entropy, []

    def step(*args):
        calls.append(1)
        bad = len(calls) == 4 and rank == int(os.environ.get("WORLD_SIZE", 1)) - 1
        train_gpt2.chunked_cross_entropy = lambda *inputs: real_loss(*inputs) * (torch.nan if bad else 1)
        return real_step(*args)

    train_gpt2.train_step = step


ADAMW, MUON = ["--shuffle"], ["--optimizer", "muon", "--max-lr", 1e-2]
LORA = ["--init-from", "base", "--lora-rank", 4, "--block-size", 16]


@pytest.mark.parametrize(
    "flags, layouts",
    [
        (ADAMW, [("ddp", 2), ("fsdp", 4)]),
        pytest.param(MUON, [("ddp", 2), ("fsdp", 4)], marks=pytest.mark.slow),
        pytest.param(LORA, [("fsdp", 4)], marks=pytest.mark.slow),
    ],
    ids=["adamw", "muon", "lora"],
)
def test_one_process_ddp_and_fsdp_have_the_same_losses(byte_shards, tiny_model, tmp_path, flags, layouts):
    """Over 20 steps with accumulation and clipping, one of which is skipped because of one rank."""
    tiny_model.save_pretrained(tmp_path / "base")
    BytesTokenizer().save_pretrained(tmp_path / "base", 16)
    logs = []
    for parallel, world_size in (("ddp", 1), *layouts):
        out = tmp_path / f"{parallel}{world_size}"
        run_to_the_end(
            "--data", byte_shards, "--out", out, "--max-steps", 20, "--grad-clip", 0.5, "--batch-size", 2, *flags,
            "--parallel", parallel, cwd=tmp_path, world_size=world_size, tiny=flags != LORA,
            sabotage=bad_loss_at_step_3_on_the_last_rank,
        )  # fmt: skip
        assert "step     3 | skipped" in (tmp_path / "0.txt").read_text()
        logs.append((losses(out / "log.txt"), losses(out / "log.txt", "val")))
    (train, val), *others = logs
    assert str(train.pop(3)) == "nan" and val[-1] < val[0]
    for other_train, other_val in others:
        assert str(other_train.pop(3)) == "nan"
        assert_close(other_train, train)
        assert_close(other_val, val, 1.1e-4)  # the log has four decimals


def test_a_run_that_moves_between_layouts_is_the_one_that_does_not(byte_shards, tmp_path):
    flags = ["--data", byte_shards, "--shuffle", "--batch-size", 2, "--checkpoint-every", 4]
    run_to_the_end(*flags, "--out", "straight", "--max-steps", 20, cwd=tmp_path)
    for i, (world_size, parallel) in enumerate([(1, "ddp"), (4, "fsdp"), (2, "ddp"), (2, "fsdp"), (1, "fsdp")]):
        ends = ["--max-steps", 4 * (i + 1), "--decay-steps", 20, "--resume", "auto"]
        run_to_the_end(*flags, *ends, "--out", "moved", "--parallel", parallel, cwd=tmp_path, world_size=world_size)
    straight, moved = tmp_path / "straight", tmp_path / "moved"
    assert_close(losses(moved / "log.txt"), losses(straight / "log.txt"))
    names = sorted(path.name for path in (straight / "model_00020").iterdir())
    assert sorted(path.name for path in (moved / "model_00020").iterdir()) == names
    a, b = (trainer_file(out / "model_00020")["optimizer"]["state"] for out in (straight, moved))
    for i in a:
        assert a[i].keys() == b[i].keys()
        for name, tensor in a[i].items():
            torch.testing.assert_close(b[i][name], tensor, rtol=1e-3, atol=1e-5)


def test_a_resumed_run_is_the_uninterrupted_one_bit_by_bit(byte_shards, tmp_path):
    """Under FSDP, with dropout and Muon: of its masks, momenta and weights each rank restores its own."""
    flags = ["--data", byte_shards, "--parallel", "fsdp", "--dropout", 0.1, "--recipe", "fast", "--checkpoint-every", 3]
    run_to_the_end(*flags, "--max-steps", 6, "--out", "straight", cwd=tmp_path, world_size=2)
    ends = ["--max-steps", 3, "--decay-steps", 6]
    run_to_the_end(*flags, *ends, "--out", "resumed", cwd=tmp_path, world_size=2)
    run_to_the_end("--max-steps", 6, "--out", "resumed", "--resume", cwd=tmp_path, world_size=2)
    assert_same_run(tmp_path / "resumed", tmp_path / "straight")


def bytes_as_gpt2_tokens(rank):
    """HellaSwag's scores are defined for GPT-2's tokenizer only."""

    class Gpt2Named(BytesTokenizer):
        name, vocab_size = "gpt2", 257

    train_gpt2.shards.read_tokenizer = lambda data: Gpt2Named()


def test_scores_and_samples_are_those_of_one_process(byte_shards, tmp_path):
    """Two ranks score different numbers of items, one of them alone writes samples, and both come before any step."""
    endings = [["5.", "6.", "7.", "8."], ["four", "five", "a sum", "none"], ["+ 1", "= 2", "2", "1 + 1 ="]]
    items = [{"ctx": f"{i} + {i} =", "label": 0, "endings": e} for i, e in enumerate(endings)]
    (tmp_path / "items.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    flags = ["--data", byte_shards, "--max-steps", 4, "--val-every", 0, "--hellaswag-every", 2, "--sample-every", 2]
    flags += ["--hellaswag-data", tmp_path / "items.jsonl", "--prompt", "1 + 1 = "]
    printed = {}
    for parallel, world_size in (("ddp", 1), ("fsdp", 2)):
        run_to_the_end(
            *flags, "--out", f"{world_size}", "--parallel", parallel, cwd=tmp_path, world_size=world_size,
            sabotage=bytes_as_gpt2_tokens,
        )  # fmt: skip
        lines = (tmp_path / "0.txt").read_text().splitlines()
        printed[parallel] = [
            line.split(" items |")[0] for line in lines if "HellaSwag acc" in line or " sample " in line
        ]
    assert len(printed["ddp"]) == 3 + 2 * 4 and printed["fsdp"] == printed["ddp"]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_lower_precision_is_that_of_ddp(byte_shards, tmp_path, dtype):
    """fp16 with a gradient scaler, whose overflows all ranks see."""
    for parallel in ("ddp", "fsdp"):
        flags = ["--data", byte_shards, "--dtype", dtype, "--max-steps", 10, "--out", parallel, "--parallel", parallel]
        start = start_run(*flags, cwd=tmp_path, world_size=2)
        assert finish_run(start) == [0, 0], (tmp_path / "0.txt").read_text()
    ddp, sharded = (losses(tmp_path / name / "log.txt") for name in ("ddp", "fsdp"))
    assert_close(ddp, sharded, 0.01)
    assert ddp[-1] < ddp[0] - 0.5


def nothing_is_compiled_twice(rank):
    torch._dynamo.config.error_on_recompile = True


@pytest.mark.slow
def test_one_compiled_block_serves_all(byte_shards, tmp_path):
    """Its losses are those of DDP that is not compiled, to rounding."""
    flags = ["--data", byte_shards, "--max-steps", 5, "--val-every", 0]
    run_to_the_end(*flags, "--out", "ddp", cwd=tmp_path, world_size=2)
    flags += ["--parallel", "fsdp", "--compile", "--recompute"]
    run_to_the_end(*flags, "--out", "fsdp", cwd=tmp_path, world_size=2, sabotage=nothing_is_compiled_twice)
    assert_close(losses(tmp_path / "fsdp" / "log.txt"), losses(tmp_path / "ddp" / "log.txt"), 1e-4)


# ---- memory


def bytes_of_model_state(rank):
    """Of weights, gradients and moments on this rank after a step, under DDP and FSDP."""
    return [_bytes_of_model_state(rank, parallel) for parallel in ("ddp", "fsdp")]


def _bytes_of_model_state(rank, parallel):
    with fsdp.weights_on_rank_zero(parallel == "fsdp", rank):
        model = GPT(GPTConfig(block_size=16, vocab_size=257, n_layer=2, n_head=2, n_embd=64))
    if parallel == "fsdp":
        wrapped = fsdp.ShardedModel(model, model.transformer.h, CPU, torch.float32, compiled=False)
    else:
        wrapped = DistributedDataParallel(model)
    optimizer = model.configure_optimizers(0.1, 1e-3, (0.9, 0.95))
    wrapped(rows()[:, :-1], rows()[:, 1:])[1].backward()
    optimizer.step()
    tensors = [t for p in model.parameters() for t in (p.detach(), p.grad, *optimizer.state[p].values())]
    storages = (getattr(t, "to_local", lambda t=t: t)().untyped_storage() for t in tensors)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def test_each_rank_has_its_part_of_the_model_state(tmp_path):
    for ddp, sharded in on_ranks(bytes_of_model_state, 4, tmp_path).values():
        assert 0 < sharded <= 0.3 * ddp


def test_recomputed_activations_give_the_same_bits(byte_shards, tmp_path):
    flags = ["--data", byte_shards, "--max-steps", 5, "--dropout", 0.1]
    trained(tmp_path / "saved", *flags)
    trained(tmp_path / "recomputed", *flags, "--recompute")
    assert_same_run(tmp_path / "recomputed", tmp_path / "saved")


def test_a_block_whose_activations_are_recomputed_saves_only_its_input():
    saved = []
    for n_layer in (2, 4):
        model = GPT(replace(TINY, n_layer=n_layer))
        recompute_activations(model.transformer.h)
        saved.append(saved_bytes(model, 8, 16))
    assert saved[1] - saved[0] == 2 * 4 * 8 * 16 * TINY.n_embd
