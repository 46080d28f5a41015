"""What only a CUDA GPU can show. Skipped without one.

With GPU_TESTS_DEVICE=cpu, those that can run on a CPU do so with a tiny model: benchmarks/gpu_check.py --device cpu --small
checks in this way that they have no faults of their own.
"""

from __future__ import annotations

import copy
import os
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import losses
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel
from training import NEW_RUN, ONE_PROCESS, TINY, config_of, config_with, train, trainer_file

import fineweb
import train_gpt2
from benchmarks.plain_loop import plain_losses
from support.checkpoints.history import read_starts
from support.checkpoints.start import Start
from support.checkpoints.state import TrainState
from support.config import TrainConfig
from support.data.text_files import Documents
from support.runtime import batch_size, devices
from support.runtime.clock import Clock
from support.runtime.distributed import Distributed, backend
from support.runtime.memory import Layout, Sizes, training_memory
from support.runtime.schedule import Schedule
from support.runtime.signals import StopHandler
from train_gpt2 import GPT, TABLES, GPTConfig, resolve

ON_CPU = os.environ.get("GPU_TESTS_DEVICE") == "cpu"
DEVICE = torch.device("cpu") if ON_CPU else torch.device("cuda", 0)
pytestmark = pytest.mark.skipif(not ON_CPU and not torch.cuda.is_available(), reason="needs a CUDA GPU")
cuda_only = pytest.mark.skipif(ON_CPU, reason="needs a CUDA GPU")
FULL_WIDTH = TINY if ON_CPU else GPTConfig()


@pytest.fixture
def gpu() -> Distributed:
    return Distributed(rank=0, local_rank=0, world_size=1, device=DEVICE)


@pytest.fixture
def exact_products() -> Iterator[None]:
    """No TF32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


def config_on_gpu(data: Path, out: Path, *flags: object) -> TrainConfig:
    return config_of("--data", data, "--out", out, *flags, "--device", DEVICE.type)


def resume(out: Path, gpu: Distributed) -> TrainState:
    start = Start.find({"resume": "newest", "out": str(out), "device": DEVICE.type}, TABLES, gpu)
    return train(resolve(start), gpu, start)


def random_tokens(rows: int, config: GPTConfig) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, config.vocab_size, (rows, config.block_size + 1), generator=generator).to(DEVICE)
    return tokens[:, :-1], tokens[:, 1:]


def gradients(model: torch.nn.Module, rows: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    model.zero_grad()
    with devices.autocast(DEVICE, dtype):
        _, loss = model(*random_tokens(rows, FULL_WIDTH))
    loss.backward()
    return {name.removeprefix("_orig_mod."): p.grad.double().cpu() for name, p in model.named_parameters()}


# -----------------------------------------------------------------------------
# Gradients and losses


def relative_errors(found: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]) -> dict[str, float]:
    return {name: ((found[name] - exact[name]).norm() / exact[name].norm()).item() for name in exact}


def test_compiled_gradients_at_full_width(exact_products):
    """Every parameter's: no further from fp32 than those of eager bf16, and the same without Inductor's mixed reductions.

    16 rows of 1,024 tokens: Inductor fuses the reductions of a layer norm's backward pass from 4,096 rows on.
    """
    torch.manual_seed(0)
    model, rows = GPT(FULL_WIDTH).to(DEVICE), 4 if ON_CPU else 16
    exact = gradients(model, rows, torch.float32)
    eager_errors = relative_errors(gradients(model, rows, torch.bfloat16), exact)
    compiled = {}
    for mix_order in (True,) if ON_CPU else (True, False):
        torch.compiler.reset()
        options = {"triton.mix_order_reduction": mix_order}
        found = gradients(torch.compile(model, dynamic=False, options=options), rows, torch.bfloat16)
        assert not found["transformer.wte.weight"][FULL_WIDTH.vocab_size :].any()  # the padding
        for name, error in relative_errors(found, exact).items():
            assert error < 1.5 * eager_errors[name] + 1e-3, f"{name}, mix_order_reduction {mix_order}"
        compiled[mix_order] = found
    for name, error in relative_errors(compiled[True], found).items():
        assert error < 1e-2, f"{name}: with and without mix_order_reduction"  # sums in another order


@pytest.mark.parametrize("rows", [64, 128])
def test_attention_at_the_micro_batch_of_training(rows):
    """The kernel that PyTorch chooses (on Hopper, cuDNN's), and its gradients, against fp32 without a fused kernel.

    cuDNN's backward pass gave NaN at such sizes, with a mask (pytorch#196678, cudnn-frontend#628).
    """
    rows, T, heads, size = (2, 32, 2, 16) if ON_CPU else (rows, 1024, 12, 64)
    torch.manual_seed(0)
    qkv = torch.randn(rows, T, 3 * heads * size, device=DEVICE, dtype=torch.bfloat16)  # strides as in the model
    upstream = torch.randn(rows, heads, T, size, device=DEVICE, dtype=torch.bfloat16)

    def output_and_gradient(dtype: torch.dtype, some: slice) -> tuple[torch.Tensor, torch.Tensor]:
        leaf = qkv[some].to(dtype).requires_grad_()
        q, k, v = (t.unflatten(2, (heads, size)).transpose(1, 2) for t in leaf.split(heads * size, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y.backward(upstream[some].to(dtype))
        return y.detach().float(), leaf.grad.float()

    found = output_and_gradient(torch.bfloat16, slice(None))
    for first in range(0, rows, 8):
        some = slice(first, first + 8)
        with sdpa_kernel(SDPBackend.MATH):
            exact = output_and_gradient(torch.float32, some)
        for ours, expected in zip(found, exact, strict=True):
            assert (ours[some] - expected).norm() < 1e-2 * expected.norm()  # bf16 rounds by up to 2^-8


def test_compiled_bf16_follows_fp32_and_compiles_nothing_twice(byte_shards, tmp_path, gpu, monkeypatch):
    """Fifty steps against the plain loop on the CPU, with validations and samples between them."""
    train_step = train_gpt2.train_step

    def watched_step(*args):
        result = train_step(*args)
        torch.compiler.set_stance("fail_on_recompile")  # after the first validation and the first step
        return result

    monkeypatch.setattr(train_gpt2, "train_step", watched_step)
    torch.compiler.reset()
    flags = "--max-steps 50 --checkpoint-every 0 --val-every 10 --sample-every 20 --dtype bf16 --compile".split()
    config = config_on_gpu(byte_shards, tmp_path / "run", *flags)
    exact = plain_losses(config, 4, 50)
    try:
        train(config, gpu, NEW_RUN)
    finally:
        torch.compiler.set_stance("default")
    error = np.abs(np.array(losses(tmp_path / "run" / "log.txt")) / exact - 1)
    assert 0 < error.max() < 2**-9  # bf16 rounds by up to 2^-8 of a value; most of it cancels in the mean of 256 tokens


@cuda_only
def test_fp32_losses_are_those_of_the_cpu(byte_shards, tmp_path, gpu):
    flags = ["--max-steps", 20, "--checkpoint-every", 0, "--dtype", "fp32"]
    cpu = tmp_path / "cpu"
    train(config_of("--data", byte_shards, "--out", cpu, *flags), ONE_PROCESS, NEW_RUN)
    reference = np.array(losses(cpu / "log.txt"))
    for tf32, bound in (("--no-tf32", 1e-4), ("--tf32", 2e-2)):
        for compiled in ("--compile", "--no-compile"):
            out = tmp_path / (compiled + tf32)
            train(config_on_gpu(byte_shards, out, *flags, tf32, compiled), gpu, NEW_RUN)
            assert np.abs(np.array(losses(out / "log.txt")) - reference).max() < bound


# -----------------------------------------------------------------------------
# Steps


@pytest.mark.parametrize("muon", [False, True], ids=["AdamW", "Muon"])
def test_a_step_with_an_infinite_gradient_changes_nothing(byte_shards, tmp_path, gpu, muon):
    """Weights, moments and step counts, bit for bit; the step before it was a good one."""
    torch.manual_seed(0)
    model = GPT(TINY).to(DEVICE)
    optimizer = model.configure_optimizers(0.1, 1e-3, (0.9, 0.95), "muon" if muon else "adamw", dtype=torch.bfloat16)
    state = TrainState(model, optimizer, torch.amp.GradScaler(DEVICE.type, enabled=False))
    config, amp = config_on_gpu(byte_shards, tmp_path, "--max-steps", 3), devices.autocast(DEVICE, torch.bfloat16)
    run = SimpleNamespace(config=config, schedule=Schedule(config))
    setup = SimpleNamespace(run=run, dist=gpu, model=model, train_model=model, graphs=None, amp=amp)
    loader = train_gpt2.DataLoaderLite([np.arange(4096, dtype=np.uint16) % 257], 4, 16, 257, gpu, grad_accum=2)

    def step():
        return train_gpt2.train_step(setup, state, loader, StopHandler(), Clock(None))[0]

    assert np.isfinite(step()).all()
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    hook = model.transformer.ln_f.weight.register_hook(lambda gradient: gradient * torch.inf)
    loss, norm, *_ = step()
    assert np.isfinite(loss) and not np.isfinite(norm)
    weights, moments = model.state_dict(), optimizer.state_dict()
    assert all(torch.equal(weights[name], p) for name, p in before[0].items())
    for index, tensors in before[1]["state"].items():
        assert all(torch.equal(moments["state"][index][name], tensor) for name, tensor in tensors.items())
    hook.remove()
    step()
    assert not torch.equal(model.transformer.wpe.weight, before[0]["transformer.wpe.weight"])


def test_a_resumed_run_has_the_losses_of_the_uninterrupted_one(byte_shards, tmp_path, gpu):
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    flags = ["--max-steps", 12, "--checkpoint-every", 7, "--dtype", "bf16", "--no-compile"]
    train(config_on_gpu(byte_shards, straight, *flags), gpu, NEW_RUN)
    shutil.copytree(straight, resumed)
    shutil.rmtree(resumed / "model_00012")
    resume(resumed, gpu)
    assert [start["first_step"] for start in read_starts(resumed)] == [0, 7]
    differences = np.array(losses(resumed / "log.txt")) - losses(straight / "log.txt")
    assert len(differences) == 12 and np.abs(differences).max() < 1e-3
    assert trainer_file(resumed / "model_00012")["step"] == 12


@cuda_only
@pytest.mark.parametrize(
    "flags, compared, atol",
    [("--dropout 0.1", 10, 1e-4), ("--compile", 10, 1e-4), ("--recipe fast", 2, 2e-3)],  # Muon's small numbers grow
)
def test_a_step_as_cuda_graphs_is_the_same(byte_shards, tmp_path, gpu, monkeypatch, flags, compared, atol):
    """Losses and dropout's masks; an optimizer whose state a checkpoint has restored is captured, too."""
    monkeypatch.chdir(tmp_path)
    common = "--total-batch-size 128 --checkpoint-every 5 --sample-every 4 --val-every 4 --dtype bf16 --no-compile"
    found = {}
    for out in ("graphs", "launches"):
        how = "--cuda-graphs" if out == "graphs" else "--no-cuda-graphs"
        torch.compiler.reset()
        train(config_on_gpu(byte_shards, out, "--max-steps", 10, how, *common.split(), *flags.split()), gpu, NEW_RUN)
        shutil.rmtree(f"{out}/model_00010")
        resume(Path(out), gpu)
        assert [start["machine"]["cuda_graphs"] for start in read_starts(Path(out))] == [out == "graphs"] * 2
        found[out] = losses(Path(out, "log.txt"))
    assert len(found["graphs"]) == 10
    # the rate is rounded to fp32
    np.testing.assert_allclose(found["graphs"][:compared], found["launches"][:compared], atol=atol)


@cuda_only
def test_the_host_waits_for_the_device_once_in_a_step(byte_shards, tmp_path, gpu, monkeypatch):
    """For the loss that is logged; PyTorch warns of each wait."""
    train_step, waits = train_gpt2.train_step, []

    def watched_step(*args):
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("warn")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            result = train_step(*args)
        torch.cuda.set_sync_debug_mode("default")
        waits.append(sum("synchroniz" in str(w.message) for w in caught))
        return result

    monkeypatch.setattr(train_gpt2, "train_step", watched_step)
    flags = ["--max-steps", 6, "--val-every", 0, "--checkpoint-every", 0, "--dtype", "bf16"]
    train(config_on_gpu(byte_shards, tmp_path / "run", *flags), gpu, NEW_RUN)
    assert waits[2:] == [1] * 4


def test_a_process_group_of_one_rank(gpu, exact_products, tmp_path):
    """NCCL on CUDA: the collectives that a run uses, and DDP around a compiled model, synchronized or not."""
    distributed = torch.distributed
    store = distributed.FileStore(str(tmp_path / "store"), 1)
    distributed.init_process_group(backend(), store=store, rank=0, world_size=1)
    try:
        for dtype in (torch.float32, torch.float64, torch.int64, torch.bfloat16):
            tensor = torch.tensor([3, 5], dtype=dtype, device=DEVICE)
            distributed.all_reduce(tensor)
            distributed.all_reduce(tensor, distributed.ReduceOp.MIN)
            assert tensor.tolist() == [3, 5]
        check_ddp()  # gone when the group is destroyed: gloo's threads and ours would deadlock otherwise
    finally:
        distributed.destroy_process_group()


def check_ddp() -> None:
    torch.manual_seed(0)
    model = GPT(TINY).to(DEVICE)
    x, y = random_tokens(4, TINY)
    model(x, y)[1].backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    torch.compiler.reset()
    ddp = DistributedDataParallel(torch.compile(model, dynamic=False), gradient_as_bucket_view=True)
    for sync in (False, True):
        ddp.require_backward_grad_sync = sync
        (ddp(x, y)[1] / 2).backward()
    for name, p in model.named_parameters():
        assert torch.allclose(p.grad, expected[name], rtol=1e-3, atol=1e-6), name


# -----------------------------------------------------------------------------
# Memory


@cuda_only
def test_a_micro_batch_that_does_not_fit_is_made_smaller(tmp_path, gpu, capsys):
    """2,048 rows of 64 tokens save 4.8 GB, and the process may have two."""
    texts = ["some text, again and again. " * 40] * 400
    fineweb.make_shards(Documents("text", texts), tmp_path / "data", tokenizer="bytes")
    devices.free_memory(DEVICE)
    torch.cuda.set_per_process_memory_fraction(2e9 / devices.free_and_total_memory(DEVICE)[1])
    flags = "--n-embd 512 --block-size 64 --batch-size 2048 --total-batch-size 131072 --max-steps 2 --val-tokens 4096"
    flags += " --dtype bf16 --no-compile --checkpoint-every 0"
    try:
        train(config_on_gpu(tmp_path / "data", tmp_path / "run", *flags.split()), gpu, NEW_RUN)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    output = capsys.readouterr().out
    assert "a micro-batch of 2048 rows does not fit into memory; using " in output
    assert np.isfinite(losses(tmp_path / "run" / "log.txt")).all()


@cuda_only
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_the_estimate_of_memory_holds(gpu, compiled):
    """For 16 rows of GPT-2 124M: what is allocated is not more, and not much less."""
    layout = Layout(2**19, torch.bfloat16, compiled=compiled)
    devices.free_memory(DEVICE)
    before = torch.cuda.memory_allocated()
    model = GPT(GPTConfig()).to(DEVICE)
    torch.compiler.reset()
    model_or_compiled = torch.compile(model, dynamic=False) if compiled else model
    sizes, total = Sizes.of(model), devices.free_and_total_memory(DEVICE)[1]
    estimate = training_memory(sizes, layout, 16, total)
    torch.cuda.reset_peak_memory_stats()
    amp = devices.autocast(DEVICE, torch.bfloat16)
    batch_size.try_batch_sizes(config_with(batch_size=16), 16, sizes, layout, gpu, amp, lambda: model_or_compiled)
    taken = torch.cuda.max_memory_allocated() - before
    state = estimate.weights + estimate.gradients + estimate.optimizer
    assert state + 0.9 * estimate.activations < taken < estimate.total
