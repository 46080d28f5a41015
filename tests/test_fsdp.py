"""Fully sharded data parallelism: the same run as one process, as DDP, and as itself on another number of ranks."""

from __future__ import annotations

import json

import pytest
import torch
from helpers import STEP, Rank, finish_run, losses, on_ranks, run_to_the_end, start_run, stopped_after
from torch.nn.parallel import DistributedDataParallel
from training import TINY, assert_same_run, compile_graphs, trained, trainer_file

import train_gpt2
from support.checkpoints import lora
from support.data.tokenizer import BytesTokenizer
from support.runtime import fsdp
from train_gpt2 import GPT, GPTConfig

CPU = torch.device("cpu")

# ---- one process group of four ranks

UNEVEN = GPTConfig(block_size=16, vocab_size=257, n_layer=3, n_head=2, n_embd=30)  # the ranks have unequal parts
MODELS = {"tiny": (TINY, 0), "uneven": (UNEVEN, 0), "lora": (TINY, 4)}  # and the rank of an adapter
# DDP, and FSDP that gathers the weights in each micro-step, or once.
LAYOUTS = {"ddp": None, "fsdp": True, "fsdp, gathered once": False}


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory):
    """Returns what `computed_on` returns on each rank."""
    return list(on_ranks(computed_on, 4, tmp_path_factory.mktemp("ranks")).values())


def computed_on(rank):
    """Returns the gradients by model and layout, and the bytes of the model state under DDP and FSDP."""
    gradients = {(model, layout): sharded_gradients(rank, model, layout) for model in MODELS for layout in LAYOUTS}
    return gradients, [bytes_of_model_state(rank, layout) for layout in ("ddp", "fsdp")]


def rows():
    return torch.randint(257, (8, 17), generator=torch.Generator().manual_seed(0))


def make_model(name):
    torch.manual_seed(0)
    config, lora_rank = MODELS[name]
    model = GPT(config)
    if lora_rank:
        lora.add_adapter(model, lora_rank, 16.0, 0, None)
    return model


def wrapped_model(rank, name, layout="fsdp"):
    sharded = layout != "ddp"
    with fsdp.weights_on_rank_zero(sharded, rank):
        model = make_model(name)
    if not sharded:
        return DistributedDataParallel(model)
    assert all(p.is_meta for p in model.parameters()) == (rank > 0)
    wrapped = fsdp.ShardedModel(model, CPU, torch.float32, compiled=False)
    wrapped.reshard_after_forward = LAYOUTS[layout]
    model.set_reshard_after_forward(LAYOUTS[layout])
    return wrapped


def sharded_gradients(rank, name, layout):
    """Returns the gradients of two micro-steps."""
    wrapped = wrapped_model(rank, name, layout)
    for i, batch in enumerate(rows().chunk(8)[rank::4]):
        wrapped.require_backward_grad_sync = i == 1
        (wrapped(batch[:, :-1], batch[:, 1:])[1] / 2).backward()
    trained = {name: p for name, p in wrapped.module.named_parameters() if p.requires_grad}
    return {name: fsdp.full_tensor(p.grad).numpy() for name, p in trained.items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_raw_gradients_are_those_of_one_process(four_ranks, name):
    """Before clipping and the optimizer, which would hide a sum where a mean belongs."""
    model = make_model(name)
    model(rows()[:, :-1], rows()[:, 1:])[1].backward()
    expected = {name: p.grad.numpy() for name, p in model.named_parameters() if p.requires_grad}
    for found, _ in four_ranks:
        for layout in LAYOUTS:
            gradients = found[name, layout]
            assert gradients.keys() == expected.keys()
            for parameter, gradient in gradients.items():
                error = abs(gradient - expected[parameter]).max()
                assert error <= 1e-6 * abs(expected[parameter]).max(), (layout, parameter)


def bytes_of_model_state(rank, layout):
    """Counts the bytes of weights, gradients and moments on this rank after a step."""
    wrapped = wrapped_model(rank, "tiny", layout)
    optimizer = wrapped.module.configure_optimizers(0.1, 1e-3, (0.9, 0.95))
    wrapped(rows()[:, :-1], rows()[:, 1:])[1].backward()
    optimizer.step()
    tensors = [t for p in wrapped.module.parameters() for t in (p.detach(), p.grad, *optimizer.state[p].values())]
    storages = (getattr(t, "to_local", lambda t=t: t)().untyped_storage() for t in tensors)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@pytest.mark.slow
def test_each_rank_has_its_part_of_the_model_state(four_ranks):
    for _, (ddp, sharded) in four_ranks:
        assert 0 < sharded <= 0.3 * ddp


# ---- runs


def assert_close(a, b, tolerance=1e-5):
    pairs = list(zip(a, b, strict=True))
    assert pairs and max(abs(x - y) for x, y in pairs) < tolerance


CHUNKED_CROSS_ENTROPY = train_gpt2.chunked_cross_entropy


def make_losses_nan(*args):
    train_gpt2.chunked_cross_entropy = lambda *inputs: CHUNKED_CROSS_ENTROPY(*inputs) * torch.nan


def make_losses_finite(*args):
    train_gpt2.chunked_cross_entropy = CHUNKED_CROSS_ENTROPY


def bad_step(number):
    """Makes the loss NaN in one step."""
    return Rank(before={(STEP, number): make_losses_nan, (STEP, number + 1): make_losses_finite})


@pytest.mark.slow
def test_a_run_that_moves_between_layouts_is_that_of_one_process(byte_shards, tmp_path):
    """Both optimizers take part (Muon leaves the embeddings to AdamW), accumulation, clipping, and a skipped step."""
    flags = ["--data", byte_shards, "--shuffle", "--checkpoint-every", 4, "--val-every", 4]
    flags += ["--optimizer", "muon", "--max-lr", 1e-2, "--grad-clip", 0.5]
    flags += ["--max-steps", 20]
    run_to_the_end(*flags, "--out", "straight", cwd=tmp_path, rank=bad_step(6))
    layouts = [(1, "ddp", 4), (4, "fsdp", 2), (2, "ddp", 1), (2, "fsdp", 4), (1, "fsdp", 2)]
    for i, (world_size, parallel, B) in enumerate(layouts):
        again = [*flags, "--out", "moved", "--resume", "auto", "--parallel", parallel, "--batch-size", B]
        special = {0: stopped_after(4, world_size)} if i < 4 else {}  # of its own steps
        special |= {world_size - 1: bad_step(6 - 4)} if i == 1 else {}
        codes = finish_run(start_run(*again, cwd=tmp_path, world_size=world_size, rank=special))
        assert codes == [143 if i < 4 else 0] * world_size
    straight, moved = tmp_path / "straight", tmp_path / "moved"
    order = [[line.split()[:2] for line in (out / "log.txt").read_text().splitlines()] for out in (moved, straight)]
    assert order[0] == order[1]  # each value once, by rank 0 alone
    found, expected = (losses(out / "log.txt") for out in (moved, straight))
    assert str(found.pop(6)) == str(expected.pop(6)) == "nan"
    assert_close(found, expected)
    found, expected = (losses(out / "log.txt", "val") for out in (moved, straight))
    assert_close(found, expected, 1.1e-4)  # the log has four decimals
    assert expected[-1] < expected[0]
    names = sorted(path.name for path in (straight / "model_00020").iterdir())
    assert sorted(path.name for path in (moved / "model_00020").iterdir()) == names
    a, b = (trainer_file(out / "model_00020")["optimizer"]["state"] for out in (straight, moved))
    for i in a:
        assert a[i].keys() == b[i].keys()
        for name, tensor in a[i].items():
            torch.testing.assert_close(b[i][name], tensor, rtol=1e-3, atol=1e-5)


class BytesNamedGpt2(BytesTokenizer):
    """HellaSwag's scores are defined for GPT-2's tokenizer only."""

    name, vocab_size = "gpt2", 257


def bytes_named_gpt2(*folders):
    return BytesNamedGpt2()


SCORED = {"support.data.shards.read_tokenizer": bytes_named_gpt2}


@pytest.fixture(scope="module")
def scored_run(byte_shards, tmp_path_factory):
    """Runs with HellaSwag's scores and samples, in `folder/out`."""
    folder = tmp_path_factory.mktemp("scored")
    endings = [["5.", "6.", "7.", "8."], ["four", "five", "a sum", "none"], ["+ 1", "= 2", "2", "1 + 1 ="]]
    items = [{"ctx": f"{i} + {i} =", "label": 0, "endings": e} for i, e in enumerate(endings)]
    (folder / "items.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    flags = ["--data", byte_shards, "--max-steps", 4, "--val-every", 0, "--hellaswag-every", 2, "--sample-every", 2]
    flags += ["--hellaswag-data", folder / "items.jsonl", "--prompt", "1 + 1 = "]

    def run(out, *more, rank=Rank(replaced=SCORED), **options):  # noqa: B008
        """The losses, and the lines of scores and samples."""
        run_to_the_end(*flags, "--out", out, *more, cwd=folder, rank=rank, **options)
        lines = (folder / "0.txt").read_text().splitlines()
        evaluated = [line.split(" items |")[0] for line in lines if "HellaSwag acc" in line or " sample " in line]
        return losses(folder / out / "log.txt"), evaluated

    return run


@pytest.fixture(scope="module")
def of_one_process(scored_run):
    return scored_run("one")


def test_scores_and_samples_are_those_of_one_process(scored_run, of_one_process):
    """Two ranks score different numbers of items, one of them alone writes samples, and both come before any step."""
    found, evaluated = scored_run("fsdp", "--parallel", "fsdp", world_size=2)
    assert_close(found, of_one_process[0])
    assert len(evaluated) == 3 + 2 * 4 and evaluated == of_one_process[1]


def no_items(*args):
    return []


def test_no_rank_scores_if_one_has_no_items(scored_run, of_one_process):
    """As after a download that failed on one node: the others would wait for its scores."""
    ranks = {0: Rank(replaced=SCORED), 1: Rank(replaced=SCORED | {"train_gpt2.hellaswag.load_examples": no_items})}
    found, evaluated = scored_run("without", world_size=2, rank=ranks)
    assert_close(found, of_one_process[0])
    assert len(evaluated) == 2 * 4


@pytest.mark.slow
def test_one_compiled_block_serves_all(scored_run, of_one_process):
    """The trial of the micro-batch compiles nothing more, though its model is a different one."""
    no_second = {"torch._dynamo.config.error_on_recompile": True, "torch.compile": compile_graphs}
    rank = Rank(replaced=SCORED | no_second | {"support.runtime.batch_size.TRIED": ("cpu",)})
    compiled = ["--parallel", "fsdp", "--compile", "--recompute"]
    found, _ = scored_run("compiled", *compiled, world_size=2, rank=rank)
    assert_close(found, of_one_process[0], 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_lower_precision_is_that_of_ddp(byte_shards, tmp_path, dtype):
    """fp16 with a gradient scaler, whose overflows all ranks see."""
    for parallel in ("ddp", "fsdp"):
        flags = ["--data", byte_shards, "--dtype", dtype, "--max-steps", 10, "--out", parallel, "--parallel", parallel]
        run_to_the_end(*flags, cwd=tmp_path, world_size=2)
    ddp, sharded = (losses(tmp_path / name / "log.txt") for name in ("ddp", "fsdp"))
    assert_close(ddp, sharded, 0.01)
    assert ddp[-1] < ddp[0] - 0.5


# ---- recomputation


def test_recomputed_activations_give_the_same_bits(byte_shards, tmp_path):
    flags = ["--data", byte_shards, "--max-steps", 5, "--dropout", 0.1]
    trained(tmp_path / "saved", *flags)
    trained(tmp_path / "recomputed", *flags, "--recompute")
    assert_same_run(tmp_path / "recomputed", tmp_path / "saved")
