"""Compares the training speed of a plain PyTorch loop and of train_gpt2.py, in turn, on the same data and shapes.

    python benchmarks/bench_throughput.py                                  # GPT-2 124M and the demo's model
    python benchmarks/bench_throughput.py --ladder gpt2:4x1024             # add one feature at a time to the plain loop
    python benchmarks/bench_throughput.py --ablate gpt2:4x1024             # leave out one of all features at a time
    python benchmarks/bench_throughput.py --processes 8 gpt2:64x1024x8     # a node of 8 GPUs, through torchrun

A setting is MODEL:BxT or MODEL:BxTxA: micro-batches of B rows of T tokens, and A micro-steps per step. Each row of the
table runs in its own process. tok/s includes everything that the loop does between two steps (console, log, checks).
That loop is the same for all rows of the table, which differ in model, optimizer and step. "loader" is the fraction of
a step spent reading its data, and "between steps" the fraction of the time spent outside steps. "matmul utilization"
is the model's FLOP/s, by GPT.flops_per_token, relative to those of large matrix products in the same process. A
micro-batch that does not fit into a GPU's memory gets fewer rows, and the table says so.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from harness import run_script
from plain_loop import PlainGPT, plain_optimizer, plain_step
from torch.nn import functional as F

import train_gpt2
from support.checkpoints.start import Start
from support.data import shards
from support.optim import loss
from support.runtime import cuda_graphs, devices
from support.runtime.distributed import Distributed

MODELS = {"demo": dict(n_layer=3, n_head=4, n_embd=128), "small": dict(n_layer=2, n_head=2, n_embd=32)}
# What makes train_gpt2.py fast, in the order of --ladder. The last row is its own train_step, which has all of these.
FEATURES = {
    "cuda": ["TF32", "bf16", "compiled", "flash", "padded vocabulary", "fused AdamW", "chunked loss"],
    "cpu": ["bf16", "flash", "padded vocabulary", "fused AdamW", "chunked loss", "kept memory"],
}
OURS = "train_gpt2.py"
RECIPE = "build-nanogpt's recipe"  # TF32, bf16, compiled, flash attention, padded vocabulary, fused AdamW


@dataclass(frozen=True)
class Job:
    """A row of the table: the plain loop with these features, or train_gpt2.py."""

    row: str
    features: list[str]
    device: str
    model: str
    shape: str  # BxT or BxTxA
    data: str
    steps: int
    warm_up: int
    without: str | None = None  # what is switched off in train_gpt2.py, see `switch_off`
    flags: dict[str, object] = field(default_factory=dict)  # more fields of TrainConfig
    trace: str | None = None  # file for the trace of --profile


def vocab_size(model: str) -> int:
    return 257 if model in MODELS else 50257


# -----------------------------------------------------------------------------
# One row of the table, in its own process


def worker(job: Job) -> dict[str, Any]:
    """Trains as `job` says; returns what was measured."""
    B, T, A = parse_shape(job.shape)
    off = dict.fromkeys(("val_every", "hellaswag_every", "sample_every", "checkpoint_every"), 0)
    # notices whether the C library is loaded, as `keep_memory` does
    count_libraries = patch.object(devices.ctypes, "CDLL", side_effect=devices.ctypes.CDLL)
    with tempfile.TemporaryDirectory() as out, count_libraries as libraries:
        dist = Distributed.from_environment(out).with_device(job.device)
        flags = dict(
            data=job.data, out=out, batch_size=B, block_size=T, **MODELS.get(job.model, {"model": job.model}), **off,
            total_batch_size=B * T * A * dist.world_size, compile="compiled" in job.features, warmup_steps=10,
            dtype="bf16" if "bf16" in job.features else "fp32", max_steps=job.warm_up + job.steps + 1, **job.flags,
        )  # fmt: skip
        start = Start.find(flags, train_gpt2.TABLES, dist)
        config = train_gpt2.resolve(start)
        # needs no vocabulary file
        tokenizer = SimpleNamespace(
            name="bytes", is_gpt2=False, vocab_size=vocab_size(job.model), eot=0, count_bytes=len, fingerprint=""
        )
        shards.read_tokenizer = lambda *folders: tokenizer
        switch_off(job.without)
        chunked, add_product = [], loss._add_product_  # not counted by a mock, which would keep the tensors
        loss._add_product_ = lambda *tensors: chunked.append(True) or add_product(*tensors)
        if job.row != OURS:
            make_plain(set(job.features))
        step, loaded, times = train_gpt2.train_step, train_gpt2.DataLoaderLite.batch, []
        loading, rows = [0.0], [0]

        def timed_step(*args: Any) -> Any:
            started, loading[0] = time.perf_counter(), 0.0
            answer = step(*args)
            times.append((started, time.perf_counter(), loading[0], answer[0].loss))
            rows[0] = args[2].B
            if len(times) == job.warm_up and dist.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            return answer

        def timed_batch(loader: train_gpt2.DataLoaderLite, rows: range) -> Any:
            started = time.perf_counter()
            batch = loaded(loader, rows)
            loading[0] += time.perf_counter() - started
            return batch

        train_gpt2.train_step, train_gpt2.DataLoaderLite.batch = timed_step, timed_batch
        with contextlib.redirect_stdout(io.StringIO()) as output:
            state = train_gpt2.train(config, dist, start)
        if job.trace:
            shutil.copy(Path(out) / "trace.json.gz", job.trace)
        used = {
            "model": type(state.model).__name__,
            "head": len(state.model.lm_head.weight),
            "chunks": bool(chunked),
            "kept memory": libraries.called,
            "fused": state.optimizer.defaults["fused"] is True,
            "dtype": config.dtype,
        }
        answer = summarize(job, config, dist, state.model, times)
        dist.close()
        return answer | {"used": used, "B": rows[0], "output": output.getvalue()}


def summarize(
    job: Job, config: train_gpt2.TrainConfig, dist: Distributed, model: train_gpt2.GPT, times: list[tuple[float, ...]]
) -> dict[str, Any]:
    """Returns what the table shows about a run. `times` has the start, end, loading time and loss of each step."""
    on_gpu = dist.device.type == "cuda"
    peak = torch.cuda.max_memory_allocated() if on_gpu else peak_memory_of_process()  # before matmul_flops adds to it
    flops = config.total_batch_size / dist.world_size * model.flops_per_token()
    measured = times[job.warm_up :]
    whole = median(b[0] - a[0] for a, b in pairwise(measured))  # from the start of one step to the start of the next
    measured.pop()
    within = median(end - start for start, end, *_ in measured)
    known = devices.peak_flops(dist.device, config.dtype)
    return {
        "tok_s": config.total_batch_size / whole,
        "ms": 1e3 * within,
        "outside": 1 - within / whole,
        "loader": median(loading / (end - start) for start, end, loading, _ in measured),
        "mfu": flops / whole / known if known else None,
        "matmul": flops / whole / matmul_flops(devices.DTYPES[config.dtype], dist.device, job.model in MODELS),
        "peak_gb": peak / 1e9,
        "losses": [loss for *_, loss in times],
        "device": torch.cuda.get_device_name() if on_gpu else f"CPU, {torch.get_num_threads()} threads",
        "torch": torch.__version__,
    }


def peak_memory_of_process() -> float:
    """Returns this process's peak memory in bytes. Linux's ru_maxrss would include the process that started it."""
    status = Path("/proc/self/status")
    if status.exists():
        return 1024 * float(next(line for line in status.read_text().splitlines() if "VmHWM" in line).split()[1])
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # macOS: in bytes


def make_plain(features: set[str]) -> None:
    """Makes train_gpt2.py train the plain model with the plain step, on the batches of its own loader."""

    def initial_model(*args: Any) -> Any:
        ours = original(*args)
        model = PlainGPT(ours.config, features).copy_weights(ours)
        flops = ours.flops_per_token()  # the number, because the method would keep our model in memory
        model.config, model.flops_per_token, model.logits = ours.config, lambda: flops, None  # nothing is scored
        model.configure_optimizers = lambda *how, **_: plain_optimizer(model, features, *how)
        return model

    def step(setup: Any, state: Any, loader: Any, stop: Any, clock: Any) -> Any:
        batches = [loader.next_batch() for _ in range(loader.grad_accum)]
        loss, norm = plain_step(
            setup.train_model, state.optimizer, batches, setup.amp, state.optimizer.param_groups[0]["lr"]
        )
        zeros = dict.fromkeys(train_gpt2.StepValues._fields, 0.0)
        return train_gpt2.StepValues(**zeros | {"loss": loss, "norm": norm}), 0.0

    original, train_gpt2.initial_model, train_gpt2.train_step = train_gpt2.initial_model, initial_model, step
    cuda_graphs.are_faster = lambda *_: False
    if "kept memory" not in features:
        devices.keep_memory = lambda device: None
    if "TF32" not in features:
        torch.set_float32_matmul_precision = lambda precision: None


def switch_off(part: str | None) -> None:
    """Switches off one of train_gpt2.py's choices on a GPU."""
    if part == "cuDNN":
        torch.backends.cuda.enable_cudnn_sdp(False)
        # PyTorch's cache of compiled graphs ignores this setting, and would return the graph with cuDNN
        torch.compiler.config.cache_key_tag = "without cuDNN"
    elif part in ("bf16 residual stream", "bf16 residual stream, addmm, loss without masks"):
        devices.to_bf16_in_autocast = lambda x: x
        if part != "bf16 residual stream":
            loss._add_product_ = add_product_afterwards_
            loss._fused_logits_to_gradient_ = torch.compile(masked_logits_to_gradient_, dynamic=False)
    elif part == "mix-order reductions":
        from torch._inductor import config

        config.triton.mix_order_reduction = False


def add_product_afterwards_(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """Does the same as loss._add_product_ on a GPU, in two operations."""
    total += torch.mm(a, b, out_dtype=torch.float32)


def masked_logits_to_gradient_(
    logits: torch.Tensor, targets: torch.Tensor, vocab_size: int, with_gradients: bool
) -> torch.Tensor:
    """Does the same as loss._fused_logits_to_gradient_ in one kernel, with masks for the target and the padding."""
    ids = torch.arange(logits.size(1), device=logits.device)
    is_target = ids == targets[:, None]  # (R, W)
    z = logits.float()
    target_logit = torch.where(is_target, z, 0.0).sum(-1, keepdim=True)  # (R, 1)
    others = torch.where(is_target | (ids >= vocab_size), torch.finfo(torch.float32).min, z)
    largest = others.amax(-1, keepdim=True)  # (R, 1)
    log_sum = (others - largest).exp().sum(-1, keepdim=True).log()
    log_odds = largest + log_sum - target_logit
    if with_gradients:
        softmax = (others - largest - log_sum).exp()
        logits.copy_(log_odds.sigmoid() * torch.where(is_target, -1.0, softmax))
    return F.softplus(log_odds)[:, 0]


def matmul_flops(dtype: torch.dtype, device: torch.device, small: bool) -> float:
    """Returns the FLOP/s of a product of two square matrices, the best of several measurements."""
    n, calls = (8192, 10) if device.type == "cuda" else (1024 if small else 4096, 1)  # a sync costs a GPU 0.1 ms
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * n**3 / min(seconds_per_call(lambda: torch.mm(a, b.T, out=out), device, calls))


def seconds_per_call(function: Callable[[], object], device: torch.device, calls: int) -> list[float]:
    """Returns ten measurements of the seconds per call, each averaged over `calls` calls."""
    measured = []
    for _ in range(10):
        devices.synchronize(device)
        started = time.perf_counter()
        for _ in range(calls):
            function()
        devices.synchronize(device)
        measured.append((time.perf_counter() - started) / calls)
    return measured


# -----------------------------------------------------------------------------
# The table


def rows_of(args: argparse.Namespace, device: str) -> Iterator[tuple[str, list[str]]]:
    """Yields the name of each row and its features."""
    features = [f for f in FEATURES[device] if f != "bf16" or args.dtype == "bf16"]
    if args.compile and "compiled" not in features:
        features = [*features, "compiled"]
    if args.ladder:
        yield "plain", []
        for i, feature in enumerate(features):
            yield f"+ {feature}", features[: i + 1]
    elif args.ablate:
        yield "all features", features
        for feature in features:
            yield f"- {feature}", [f for f in features if f != feature]
    else:
        yield "plain", []
        if args.dtype == "bf16":
            yield "plain, bf16", ["bf16"]
        if device == "cuda":
            yield RECIPE, [f for f in features if f != "chunked loss"]
    yield OURS, features


def measure(job: Job, processes: int = 1) -> dict[str, Any]:
    """Runs a row in a process of its own; returns what was measured."""
    output, _ = run_script("benchmarks/bench_throughput.py", "--worker", json.dumps(asdict(job)), processes=processes)
    return json.loads(output.splitlines()[-1])


def parse_shape(shape: str) -> list[int]:
    """Parses BxT or BxTxA into rows, tokens and micro-steps."""
    return ([int(n) for n in shape.split("x")] + [1])[:3]


def random_shard(folder: str | Path, model: str, tokens: int = 20_000_000) -> str:
    """Writes a shard of random tokens, mostly low ids, and returns its folder. Speed does not depend on the tokens."""
    ids = (vocab_size(model) * np.random.default_rng(1).random(tokens) ** 3).astype(np.uint16)
    np.save(Path(folder) / "random_train_000000.npy", ids)
    return str(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", nargs="*", metavar="MODEL:BxT[xA]", help="gpt2, gpt2-medium, ..., demo or small")
    parser.add_argument("--ladder", action="store_true", help="add one feature at a time to the plain loop")
    parser.add_argument("--ablate", action="store_true", help="leave out one of all features at a time")
    parser.add_argument(
        "--dtype", choices=("auto", "fp32", "bf16"), default="auto", help="precision of all rows but plain"
    )
    parser.add_argument("--compile", action="store_true", help="compile on a CPU, too")
    parser.add_argument("--data", metavar="DIR", help="shards of GPT-2 tokens (default: random tokens)")
    parser.add_argument("--steps", type=int, help="steps measured per process (default: 10 on CUDA; CPU: 3, demo and small 200)")  # fmt: skip
    parser.add_argument("--warm-up", type=int, help="steps before the measured ones (default: 3 on CUDA; CPU: 1, demo and small 20)")  # fmt: skip
    parser.add_argument("--rounds", type=int, default=1, help="passes over all rows; medians are printed (default: 1)")
    parser.add_argument("--processes", type=int, default=1, help="processes, through torchrun if several (default: 1)")
    parser.add_argument("--json", metavar="FILE", help="write all measurements to FILE")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        measured = worker(Job(**json.loads(args.worker)))
        if os.environ.get("RANK", "0") == "0":
            print(json.dumps(measured), flush=True)
        return

    device = devices.pick_device_type("auto")
    on_gpu, results = device == "cuda", []
    if args.dtype == "auto":
        args.dtype = "bf16" if devices.pick_dtype("auto", torch.device(device)) == "bf16" else "fp32"
    with tempfile.TemporaryDirectory() as folder:
        for setting in args.settings or (["gpt2:64x1024x8"] if on_gpu else ["gpt2:4x1024", "demo:16x64"]):
            model, _, shape = setting.partition(":")
            steps = args.steps or (10 if on_gpu else 200 if model in MODELS else 3)
            warm_up = args.warm_up or (3 if on_gpu else 20 if model in MODELS else 1)
            data = args.data or random_shard(folder, model)
            measured: dict[str, list[dict[str, Any]]] = {}
            # in turn, so that changes in load affect all rows
            for name, features in [*rows_of(args, device)] * args.rounds:
                row = measure(Job(name, features, device, model, shape, data, steps, warm_up), args.processes)
                print(f"  {setting} {name}: {row['tok_s']:,.0f} tok/s", file=sys.stderr, flush=True)
                measured.setdefault(name, []).append(row)
            results.append({"setting": setting, "processes": args.processes, "rows": measured})
            report(setting, args, measured)
    if args.json:
        Path(args.json).write_text(json.dumps({"command": sys.argv, "results": results}, indent=1))


def report(setting: str, args: argparse.Namespace, measured: dict[str, list[dict[str, Any]]]) -> None:
    numbers = ("tok_s", "ms", "mfu", "matmul", "peak_gb", "loader", "outside")
    first = next(iter(measured.values()))[0]
    print(f"\n{setting}, {args.processes} x {first['device']}, torch {first['torch']}, {args.dtype} (plain: fp32)\n")
    print("| | tok/s | | ms per step | MFU | matmul utilization | peak memory, GB | | loader | between steps |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    base: dict[str, float] = {}
    for name, rounds in measured.items():
        row = {number: median(each[number] or 0.0 for each in rounds) for number in numbers}
        base = base or row
        if (B := rounds[0]["B"]) != parse_shape(setting.partition(":")[2])[0]:
            name += f" ({B} rows)"
        mfu = f"{row['mfu']:.1%}" if row["mfu"] else "-"
        print(
            f"| {name} | {row['tok_s']:,.0f} | {row['tok_s'] / base['tok_s']:.2f}x | {row['ms']:,.1f} | {mfu} "
            f"| {row['matmul']:.0%} | {row['peak_gb']:.2f} | {row['peak_gb'] / base['peak_gb']:.2f}x "
            f"| {row['loader']:.2%} | {max(0, row['outside']):.2%} |"
        )


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
