"""Everything that only a GPU can show, in three stages of at most eight minutes each, without a network.

    python benchmarks/gpu_check.py                            # all three, on a CUDA GPU
    python benchmarks/gpu_check.py --stage b                  # a: is it right, and where is the time?  b: in pairs  c: whole runs
    python benchmarks/gpu_check.py --device cpu --small       # the script itself, with a tiny model

Each check runs in its own process. Its figures are printed as they come, and it ends with a line: ok, FAILED and what, or skipped
and why. At the end there is a table of figures for docs/performance.md. Exit code 1 if a check failed. --keep DIR keeps what the
checks printed, and the figures. Stage a needs pytest.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import json
import math
import multiprocessing
import os
import platform
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from support.cli import UserError, run_cli  # noqa: E402

STAGE_SECONDS = 480
LEAST_SECONDS = 60  # with less time left, nothing is started that may take a minute
PROCESSES = multiprocessing.get_context("forkserver")  # the checks fork from a process that has imported torch


class Failed(Exception):
    pass


class Skipped(Exception):
    pass


@dataclass
class Context:
    """What a check gets: where to run, how large and until when, and a folder, to which it reports as it goes."""

    device: str
    small: bool
    folder: Path
    deadline: float  # by time.monotonic(): then it is killed
    figures: list[tuple[str, str]] = field(default_factory=list)
    parts: list[tuple[str, str]] = field(default_factory=list)  # verdicts of its own, by name

    def figure(self, name: str, value: object) -> None:
        self.figures.append((name, str(value)))
        self.save()

    def part(self, name: str, verdict: str) -> None:
        self.parts.append((name, verdict))
        self.save()

    def save(self, verdict: str = "FAILED: not finished") -> None:
        answer = {"verdict": verdict, "figures": self.figures, "parts": self.parts}
        (self.folder / "new.json").write_text(json.dumps(answer))
        (self.folder / "new.json").rename(self.folder / "answer.json")

    def has_time(self, seconds: float = LEAST_SECONDS) -> bool:
        return time.monotonic() + seconds < self.deadline

    def script(self, *command: object, codes: tuple[int, ...] = (0,), **environment: str) -> Iterator[str]:
        """Runs a script of this project as a user would; yields its lines. A `Failed` for any other exit code."""
        words = [sys.executable, *map(str, command)]
        print(f"$ {shlex.join(words)}", flush=True)
        env = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"} | environment
        line = "no output"
        pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        with subprocess.Popen(words, cwd=self.folder, env=env, **pipes) as process:
            for line in process.stdout:
                print(line, end="", flush=True)
                yield line
        if process.returncode not in codes:
            raise Failed(f"{Path(words[1]).name} ended with exit code {process.returncode}: {line.strip()}")

    def run(self, *command: object) -> str:
        """Runs a script to its end; returns its output."""
        return "".join(self.script(*command))


CHECKS: dict[str, list[Callable[[Context], None]]] = {"a": [], "b": [], "c": []}


def check(stage: str) -> Callable[[Callable[[Context], None]], Callable[[Context], None]]:
    """Adds a function to a stage. Its docstring's first line says what is checked."""

    def register(function: Callable[[Context], None]) -> Callable[[Context], None]:
        CHECKS[stage].append(function)
        return function

    return register


def expect(condition: object, *problem: str) -> None:
    if not condition:
        raise Failed(*problem)


# -----------------------------------------------------------------------------
# a: is it right?


@check("a")
def environment(context: Context) -> None:
    """The machine, and PyTorch's choices on it"""
    import torch

    from support.runtime import devices

    device = torch.device(context.device)
    if device.type == "cuda":
        context.figure("memory, GiB", f"{devices.free_and_total_memory(device)[1] / 2**30:.1f}")
        context.figure("cuDNN", torch.backends.cudnn.version())
        peak = devices.peak_flops(device)
        context.figure(
            "bf16 peak in our table, TFLOP/s", f"{peak / 1e12:.0f}" if peak else "unknown, so no MFU is shown"
        )
    context.figure("attention in training", devices.describe_attention(device, torch.bfloat16, 12, 768, 1024))
    source = torch.zeros(2**20 if context.small else 2**30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    ms = milliseconds(lambda: target.copy_(source), context.device, calls=10)
    context.figure("copy bandwidth, GB/s", f"{2 * source.nbytes / ms / 1e6:.0f}")
    reason = devices.why_not_compile(device)
    expect(reason is None, f"not compiled: {reason}")


@check("a")
def tests(context: Context) -> None:
    """tests/test_gpu.py"""
    if not module_exists("pytest", "xdist"):
        raise Failed('pytest or pytest-xdist is missing. Run "pip install -r tests/requirements.txt"')
    command = f"-m pytest -n0 -v -p no:cacheprovider --rootdir={ROOT} -c {ROOT}/pyproject.toml {ROOT}/tests/test_gpu.py"
    environment = {"GPU_TESTS_DEVICE": context.device, "COLUMNS": "200"}  # narrower, reasons are cut
    if context.small:  # the test suite runs the others, too
        command += " -k hellaswag_equals"
    words = {
        "PASSED": "ok",
        "FAILED": "FAILED: see its output",
        "ERROR": "FAILED: see its output",
        "SKIPPED": "skipped",
    }
    for line in context.script(*command.split(), codes=(0, 1), **environment):
        if found := re.search(r"::test_(\S+) (PASSED|FAILED|ERROR|SKIPPED)(?: \(([^)]*))?", line):
            reason = f": {found[3]}" if found[2] == "SKIPPED" else ""
            context.part(found[1].replace("_", " "), words[found[2]] + reason)
    expect(context.parts, "pytest ran no test")


def module_exists(*names: str) -> bool:
    import importlib.util

    return all(importlib.util.find_spec(name) for name in names)


def throughput(
    context: Context, setting: str, row: str, steps: int, warm_up: int = 2, without: Sequence[str] = (),
    trace: Path | None = None, **flags: object,
) -> dict[str, Any]:  # fmt: skip
    """A row of bench_throughput.py (see there), with more flags of train_gpt2.py."""
    import bench_throughput

    model, shape = setting.split(":")
    B, T, A = map(int, shape.split("x"))
    features = bench_throughput.FEATURES[context.device]
    if row == bench_throughput.RECIPE:
        features = [name for name in features if name != "chunked loss"]
    job = dict(
        B=B, T=T, A=A, device=context.device, row=row, features=features, without=list(without), warm_up=warm_up, steps=steps, flags=flags,
        vocab_size=257 if context.small else 50257, row_model=model, trace=str(trace) if trace else None, sizes=bench_throughput.MODELS.get(model, {"model": model}),
    )  # fmt: skip
    job["data"] = bench_throughput.random_shard(str(context.folder), job["vocab_size"], 2**22)
    try:
        return bench_throughput.measure(job, 1)
    except SystemExit as error:
        raise Failed(str(error.code)) from error


def report(context: Context, name: str, row: dict[str, Any]) -> None:
    mfu = f", {row['mfu']:.1%} MFU" if row["mfu"] else ""
    first_step = re.search(r"the first step ended ([\d.]+)s after the start", row["output"])
    context.figure(
        name,
        f"{row['tok_s']:,.0f} tok/s{mfu}, {row['matmul']:.0%} of a large matmul, {row['B']} rows, "
        f"{row['peak_gb']:.1f} GB, the first step ended after {first_step[1] if first_step else '?'} s",
    )


@check("a")
def training(context: Context) -> None:
    """A step of training: speed, the time of its kernels by kind, the GPU's clocks and power"""
    import bench_throughput

    setting, steps = ("small:4x64x2", 3) if context.small else ("gpt2:64x1024x8", 8)
    trace, profiled = context.folder / "trace.json.gz", 2 if context.small else 5
    with gpu_readings(context):
        # the profiled steps are not measured
        ours = throughput(
            context, setting, bench_throughput.OURS, steps, warm_up=5 + profiled, trace=trace, profile=profiled
        )
    print(ours["output"], flush=True)
    report(context, "train_gpt2.py", ours)
    with gzip.open(trace, "rt", encoding="utf-8") as file:
        events = json.load(file)["traceEvents"]
    classes, kernels = classify_kernels(events)
    total = sum(classes.values())
    expect(total > 0 or context.device == "cpu", "the profile has no kernels")
    for name, us in classes.items():
        if total:
            context.figure(f"{name}, ms per step", f"{us / 1e3 / profiled:.1f} ({us / total:.1%})")
    for name, us in kernels[:LONGEST_KERNELS]:
        context.figure(f"kernel {name[:100]}, ms per step", f"{us / 1e3 / profiled:.2f}")


LONGEST_KERNELS = 15
KERNEL_CLASSES = (  # by a part of a kernel's name; the first that fits
    ("pointwise", "triton_poi"),  # the names of Inductor's kernels also have those of what was fused
    ("reductions", "triton_red|triton_per|triton_mix"),
    ("copies", "memcpy|memset|CatArray|copy_kernel"),
    ("attention", "fmha|flash|sdpa|attention"),
    ("GEMM", "gemm|nvjet|cutlass|xmma|cublas|splitK"),
    ("reductions", "reduce|norm|softmax"),
    ("pointwise", ""),  # the rest: elementwise kernels, AdamW
)


def classify_kernels(events: Sequence[dict[str, Any]]) -> tuple[dict[str, float], list[tuple[str, float]]]:
    """Microseconds by kind of kernel, "idle" included, and by kernel, the longest first, of a trace of PyTorch's profiler."""
    on_gpu = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    classes = dict.fromkeys(("GEMM", "attention", "reductions", "pointwise", "copies", "idle"), 0.0)
    by_kernel: dict[str, float] = {}
    end = min((event["ts"] for event in on_gpu), default=0.0)
    for event in sorted(on_gpu, key=lambda event: event["ts"]):
        name, duration = event["name"], event["dur"]
        kind = next(kind for kind, pattern in KERNEL_CLASSES if re.search(pattern, name, re.IGNORECASE))
        classes[kind] += duration
        by_kernel[name] = by_kernel.get(name, 0.0) + duration
        classes["idle"] += max(0.0, event["ts"] - end)  # until this one starts, if none is running
        end = max(end, event["ts"] + duration)
    return classes, sorted(by_kernel.items(), key=lambda item: -item[1])


@contextlib.contextmanager
def gpu_readings(context: Context) -> Iterator[None]:
    """Reports clocks, power and temperature of the first GPU at their medians, over what is busy of the block."""
    if context.device == "cpu" or not shutil.which("nvidia-smi"):
        yield
        return
    query = ["nvidia-smi", "--query-gpu=clocks.sm,clocks.mem,power.draw,temperature.gpu,utilization.gpu"]
    query += ["--format=csv,noheader,nounits", "--id=0", "-lms", "500"]
    with subprocess.Popen(query, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield
        finally:
            process.terminate()
            lines = [line.split(", ") for line in process.communicate()[0].splitlines()]
    busy = [
        list(map(float, values))
        for *values, utilization in lines
        if utilization.strip() == "100" and all(re.fullmatch(r"[\d.]+", value) for value in values)
    ]
    for i, name in enumerate(("SM clock, MHz", "memory clock, MHz", "power, W", "temperature, C") if busy else ()):
        values = [line[i] for line in busy]
        context.figure(name, f"{statistics.median(values):.0f} (from {min(values):.0f} to {max(values):.0f})")


@check("a")
def large_model(context: Context) -> None:
    """GPT-2 XL with a micro-batch that surely fits"""
    import bench_throughput

    if context.small:
        raise Skipped("as training, with --small")
    setting = "gpt2-xl:16x1024x1"
    report(context, f"train_gpt2.py, {setting}", throughput(context, setting, bench_throughput.OURS, 3))


# -----------------------------------------------------------------------------
# b: how fast is it, in pairs?


def milliseconds(function: Callable[[], object], device: str, calls: int) -> float:
    """The time of a call, the median of 10 measurements of several calls, on the device's own clock where it has one."""
    import torch

    times = []
    for i in range(13):
        started = time.perf_counter()
        if device == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
        for _ in range(calls):
            function()
        elapsed = 1e3 * (time.perf_counter() - started)
        if device == "cuda":
            end.record()
            torch.cuda.synchronize()
            elapsed = start.elapsed_time(end)
        if i >= 3:  # warm
            times.append(elapsed / calls)
    return statistics.median(times)


PAIRS = {  # by what is compared: the row of bench_throughput.py, or what is taken from train_gpt2.py
    "mix-order reductions off": (False, ["mix-order reductions"]),
    "build-nanogpt's recipe": (True, []),
    "flash attention instead of cuDNN's": (False, ["cuDNN"]),
    "the loss kernel tuned": (False, ["untuned loss"]),
}


@check("b")
def pairs(context: Context) -> None:
    """train_gpt2.py against itself with one thing changed, and against build-nanogpt's recipe, in three rounds"""
    import bench_throughput

    setting, steps, rounds = ("small:4x64x2", 3, 1) if context.small else ("gpt2:64x1024x8", 6, 3)
    compared = {name: PAIRS[name] for name in list(PAIRS)[:1]} if context.small else PAIRS
    ratios: dict[str, list[float]] = {name: [] for name in compared}
    slowest = 2.0 * LEAST_SECONDS
    for i in range(rounds):
        if not context.has_time(1.1 * slowest + 2 * LEAST_SECONDS):  # the next checks want some, too
            context.part(f"round {i + 1}", "skipped: out of time")
            break
        started = time.monotonic()
        ours = throughput(context, setting, bench_throughput.OURS, steps)
        report(context, f"train_gpt2.py, round {i + 1}", ours)
        for name, (is_recipe, without) in compared.items():
            row = bench_throughput.RECIPE if is_recipe else bench_throughput.OURS
            other = throughput(context, setting, row, steps, without=without)
            ratios[name].append(other["tok_s"] / ours["tok_s"])
            context.figure(f"{name}, round {i + 1}: tok/s to train_gpt2.py's", f"{ratios[name][-1]:.3f}")
            difference = max(abs(a / b - 1) for a, b in zip(ours["losses"], other["losses"], strict=False))
            expect(difference < 2**-7, f"{name}: the losses differ by {difference:.1e}")
        slowest = time.monotonic() - started
    for name, values in ratios.items():
        if values:
            context.figure(f"{name}: median", f"{statistics.median(values):.3f} of {len(values)}")


@check("b")
def loss_alone(context: Context) -> None:
    """The loss and its gradients alone"""
    import torch
    from torch.nn import functional as F

    from support.optim import loss
    from support.runtime import devices

    N, C, V, W = (512, 32, 257, 320) if context.small else (65536, 768, 50257, 50304)
    device = torch.device(context.device)
    torch.manual_seed(0)
    x = torch.randn(N, C, device=device, dtype=torch.bfloat16).requires_grad_()
    weight = (0.02 * torch.randn(W, C, device=device)).requires_grad_()
    targets = torch.randint(0, V, (N,), device=device)
    found: dict[str, float] = {}

    def measure(name: str, function: Callable[..., Any]) -> None:
        def step() -> None:
            x.grad = weight.grad = None
            with devices.autocast(device, torch.bfloat16):
                value = function(x, weight, targets, V)
            value.backward()
            found[name] = value.item()

        devices.free_memory(device)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        try:
            context.figure(f"loss of {N:,} tokens, {name}, ms", f"{milliseconds(step, context.device, calls=1):.1f}")
        except torch.OutOfMemoryError:
            return context.figure(f"loss of {N:,} tokens, {name}, ms", "out of memory")
        if device.type == "cuda":
            context.figure(f"loss of {N:,} tokens, {name}, GB", f"{torch.cuda.max_memory_allocated() / 1e9:.1f}")

    def plain(x: Any, weight: Any, targets: Any, V: int) -> Any:
        return F.cross_entropy(F.linear(x, weight)[:, :V].float(), targets)

    if not context.small:
        measure("as in training", torch.compile(loss.chunked_cross_entropy, dynamic=False))
        numel = loss.chunk_numel
        for bits in (26, 28, 29, 30):
            loss.chunk_numel = lambda *_, bits=bits: 2**bits
            torch.compiler.reset()
            measure(f"chunks of 2^{bits}", torch.compile(loss.chunked_cross_entropy, dynamic=False))
        loss.chunk_numel = numel
        measure("plain, compiled", torch.compile(plain, dynamic=False))
    measure("not compiled", loss.chunked_cross_entropy)
    measure("plain", plain)
    if context.device == "cuda" and module_exists("liger_kernel"):
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        measure("Liger-Kernel", lambda x, w, y, V: LigerFusedLinearCrossEntropyLoss()(w[:V].to(x.dtype), x, y))
    expected = found.get("plain", found["not compiled"])  # the plain one may not have fitted into memory
    for name, value in found.items():
        expect(abs(value / expected - 1) < 2**-9, f"{name}: loss {value}, expected {expected}")


@check("b")
def attention_backends(context: Context) -> None:
    """Attention by backend, forward and backward of all layers"""
    import torch
    from torch.nn import functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel

    nh, T, hs, tokens = (2, 64, 16, 1024) if context.small else (12, 1024, 64, 65536)
    names = ["default", "CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION"]
    for B in (2,) if context.small else (8, 64):
        # (B, nh, T, hs), in memory as the model's linear layer and its gradient leave them
        qkv = torch.randn((B, T, 3, nh, hs), device=context.device, dtype=torch.bfloat16)
        q, k, v = (t.detach().requires_grad_() for t in qkv.permute(2, 0, 3, 1, 4))
        gradient = torch.randn((B, T, nh, hs), device=context.device, dtype=torch.bfloat16).transpose(1, 2)

        def run(q: Any = q, k: Any = k, v: Any = v, gradient: Any = gradient) -> None:
            torch.autograd.grad(F.scaled_dot_product_attention(q, k, v, is_causal=True), (q, k, v), gradient)

        for name in names if context.device == "cuda" else ["default", "FLASH_ATTENTION"]:
            backend = contextlib.nullcontext() if name == "default" else sdpa_kernel(getattr(SDPBackend, name))
            try:
                with backend:
                    ms = 12 * tokens / (B * T) * milliseconds(run, context.device, calls=1 if context.small else 20)
            except RuntimeError as error:  # a backend may not exist on this GPU
                context.figure(
                    f"attention of {tokens:,} tokens, {B} rows at a time, {name}, ms", str(error).split("\n")[0][:60]
                )
                continue
            context.figure(f"attention of {tokens:,} tokens, {B} rows at a time, {name}, ms", f"{ms:.1f}")


@check("b")
def larger(context: Context) -> None:
    """A larger micro-batch, and larger models with the largest micro-batch that fits"""
    import bench_throughput

    settings = ["gpt2:128x1024x4", "gpt2-medium:64x1024x2", "gpt2-large:64x1024x2", "gpt2-xl:64x1024x1"]
    slowest = 60.0
    for setting in [] if context.small else settings:
        if not context.has_time(1.7 * slowest):  # each is larger than the one before
            context.part(setting, "skipped: out of time")
            continue
        started = time.monotonic()
        report(context, f"train_gpt2.py, {setting}", throughput(context, setting, bench_throughput.OURS, 3))
        context.part(setting, "ok")
        slowest = max(slowest, time.monotonic() - started)


# -----------------------------------------------------------------------------
# c: whole runs, on the text of this repository


def text_shards(context: Context) -> Path:
    """Shards of this repository, made by the first check that needs them."""
    folder = context.folder.parent / "text"
    if (folder / "data" / "manifest.json").exists():
        return folder / "data"
    folder.mkdir(exist_ok=True)
    files = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "support").rglob("*.py"))]
    text = "\n".join(file.read_text(encoding="utf-8") for file in files)
    (folder / "text.txt").write_text(text, encoding="utf-8")
    flags = ["--input", folder / "text.txt", "--tokenizer", "bytes", "--output", folder / "data"]
    context.run(ROOT / "fineweb.py", *flags)
    return folder / "data"


def run_flags(context: Context, data: object, out: object, steps: int) -> list[str]:
    """Flags of a run of 12 layers with 768 channels, or of a tiny one."""
    sizes = "--n-layer 1 --n-head 2 --n-embd 32 --block-size 64 --batch-size 4 --total-batch-size 512"
    full = "--block-size 256 --batch-size 16 --total-batch-size 8192"
    common = f"--data {data} --out {out} --device {context.device} --max-steps {steps} --warmup-steps 5 --sample-every 0 --hellaswag-every 0"
    return shlex.split(f"{common} {sizes if context.small else full}")


def losses(out: Path) -> list[float]:
    lines = (line.split() for line in (out / "log.txt").read_text().splitlines())
    return [float(value) for _, name, value in lines if name == "train"]


def largest_difference(a: Path, b: Path) -> float:
    """Between the losses of two runs of the same length."""
    return max(abs(x - y) for x, y in zip(losses(a), losses(b), strict=True))


@check("c")
def two_ranks(context: Context) -> None:
    """Two processes on one device through gloo, compiled: the trial of the micro-batch, reset, DDP; FSDP"""
    data = text_shards(context)
    flags = run_flags(context, data, "ddp", 8)
    flags += "--dtype fp32 --no-tf32 --val-tokens 2048 --val-every".split() + [0 if context.small else 4]
    flags += ["--no-compile" if context.small else "--compile"]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    layouts = ["fsdp"] if context.small else ["ddp", "fsdp"]
    if "ddp" in layouts:
        context.run(*torchrun, __file__, "--rank-with", *flags)
    sharded = ["--parallel", "fsdp", "--out", "fsdp", *([] if context.small else ["--recompute"])]
    context.run(*torchrun, __file__, "--rank-with", *flags, *sharded)
    context.run(ROOT / "train_gpt2.py", *flags, "--no-compile", "--out", "one")
    for parallel in layouts:
        difference = largest_difference(context.folder / parallel, context.folder / "one")
        context.figure(f"two processes ({parallel}) against one: largest difference of a loss", f"{difference:.1e}")
        expect(difference < 1e-3, f"the losses of {parallel} differ by {difference:.1e}")


def train_on_a_shared_device(flags: list[str]) -> None:
    """train_gpt2.py as one of several ranks on the same device, which NCCL does not allow."""
    import torch

    import train_gpt2
    from support.cli import run_cli
    from support.runtime import batch_size, devices
    from support.runtime.distributed import Distributed

    Distributed.backend = property(lambda dist: "gloo")
    with_device = Distributed.with_device
    Distributed.with_device = lambda dist, name: replace(
        dist, device=with_device(replace(dist, local_rank=0), name).device
    )
    if not torch.cuda.is_available():
        batch_size.PROBED, devices.free_and_total_memory = ("cpu",), lambda device: (10**10, 10**10)
    run_cli(lambda: train_gpt2.main(flags))


@check("c")
def variants(context: Context) -> None:
    """Not compiled, Muon, fp16, dropout: 20 steps each"""
    data, steps = text_shards(context), 20
    choices = ["--recipe fast --max-lr 2e-3"]
    if not context.small:
        choices = ["--no-compile", *choices, "--dtype fp16", "--dropout 0.1"]
    for i, flags in enumerate(choices):
        if not context.has_time():
            context.part(flags, "skipped: out of time")
            continue
        more = ["--checkpoint-every", 0, "--val-every", 0, *flags.split()]
        output = context.run(ROOT / "train_gpt2.py", *run_flags(context, data, f"log{i}", steps), *more)
        values = losses(context.folder / f"log{i}")
        ms = statistics.median(map(float, re.findall(r"dt: ([\d.]+)ms", output)[5:]))
        context.figure(f"{flags}: ms per step", f"{ms:.1f}")
        good = len(values) == steps and all(map(math.isfinite, values)) and values[-1] < values[0]
        context.part(flags, "ok" if good else f"FAILED: losses {values}")


@check("c")
def scoring(context: Context) -> None:
    """HellaSwag as in training, twice, and as in hellaswag.py, against one item at a time"""
    import bench_hellaswag
    import torch

    import hellaswag
    from support.data.tokenizer import get_tokenizer
    from support.runtime import devices
    from train_gpt2 import GPT, GPTConfig

    device, tokenizer, n = torch.device(context.device), get_tokenizer("bytes"), 8 if context.small else 300
    words = (ROOT / "README.md").read_text(encoding="utf-8").split()
    lengths = [(10 + 7 * i % 40, 3 + 5 * i % 20) for i in range(n)]  # words of each context and ending
    items = [
        {
            "ctx": " ".join(words[i : i + context]), "ctx_a": "", "ctx_b": "", "activity_label": "", "label": i % 4,
            "endings": [" ".join(words[j : j + ending]) for j in range(i + context, i + context + 4)], "ind": i,
        }
        for i, (context, ending) in enumerate(lengths)
    ]  # fmt: skip
    (context.folder / "items.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    torch.manual_seed(0)
    sizes = dict(n_layer=2, n_head=2, n_embd=32) if context.small else {}
    model = GPT(GPTConfig(vocab_size=257, **sizes)).to(device)
    examples = [hellaswag.render(item, tokenizer) for item in hellaswag.load(context.folder / "items.jsonl", None)]
    scoring_model = hellaswag.ScoringModel(model.transformer, model.logits, model.config.block_size, device)
    devices.configure_backends(device, tf32=False)
    for attempt in ("first", "second"):
        with devices.autocast(device, torch.bfloat16):
            _, seconds = bench_hellaswag.timed(lambda: hellaswag.completion_losses(scoring_model, examples))
        context.figure(f"HellaSwag in training, bf16, {attempt} time, items/s", f"{n / seconds:.1f}")
    ours, seconds = bench_hellaswag.timed(lambda: hellaswag.completion_losses(scoring_model, examples))
    context.figure("HellaSwag in training, fp32, items/s", f"{n / seconds:.1f}")
    plain, seconds = bench_hellaswag.timed(
        lambda: bench_hellaswag.plain_losses(lambda ids: model(ids)[0], examples, device)
    )
    context.figure("HellaSwag one item at a time, fp32, items/s", f"{n / seconds:.1f}")
    largest = abs(plain - ours).max()
    context.figure("HellaSwag in training against one at a time: largest difference of a loss, nats", f"{largest:.1e}")
    expect(largest < 1e-2, f"losses differ by {largest:.1e}")
    expect(bench_hellaswag.count_differences(plain, ours) == "0 (acc), 0 (acc_norm)", "predictions differ")
    if not module_exists("transformers"):
        context.part("with shared contexts", "skipped: transformers is not installed")
    else:
        from transformers import GPT2LMHeadModel

        model.save_pretrained(context.folder)
        hf_model = GPT2LMHeadModel.from_pretrained(context.folder).to(device).eval()
        shared_contexts, _ = hellaswag.completion_losses(hellaswag.from_huggingface(hf_model), examples)
        largest = abs(plain[0] - shared_contexts).max()
        expect(largest < 1e-2, f"with shared contexts, losses differ by {largest:.1e}")


@check("c")
def resume(context: Context) -> None:
    """A run that gets SIGTERM and is resumed; its checkpoint in transformers and sample.py"""
    data, steps = text_shards(context), 20 if context.small else 60
    straight, out = (context.folder / name for name in ("straight", "stopped"))
    context.run(ROOT / "train_gpt2.py", *run_flags(context, data, straight, steps))
    command = [sys.executable, str(ROOT / "train_gpt2.py"), *run_flags(context, data, out, steps)]
    with open(context.folder / "stopped.txt", "w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        log = out / "log.txt"
        while process.poll() is None and not (log.exists() and log.read_text().count("train") >= 3):
            time.sleep(0.002)
        process.send_signal(signal.SIGTERM)
        code = process.wait()
    expect(code == 143, f"after SIGTERM the exit code is {code}: {(context.folder / 'stopped.txt').read_text()[-300:]}")
    stopped_at = len(losses(out))
    expect(stopped_at < steps, "the run ended before SIGTERM")
    context.run(ROOT / "train_gpt2.py", "--resume", "--out", out, "--device", context.device)
    # A GPU's attention sums in any order, and later steps enlarge that.
    differences = [abs(a - b) for a, b in zip(losses(straight), losses(out), strict=True)][stopped_at:]
    context.figure(
        f"resumed at step {stopped_at}: largest difference of the next 5 losses", f"{max(differences[:5]):.1e}"
    )
    context.figure("of all others", f"{max(differences[5:], default=0):.1e}")
    expect(max(differences[:5]) < 1e-3, f"the losses differ by {max(differences[:5]):.1e}")
    checkpoint = out / f"model_{steps:05d}"
    open_in_transformers(context, checkpoint)
    for attempt in ("first",) if context.small else ("first", "second"):
        started = time.perf_counter()
        context.run(ROOT / "sample.py", "--model", checkpoint, "--prompt", "The ", "--device", context.device)
        context.figure(f"sample.py, {attempt} time, s", f"{time.perf_counter() - started:.1f}")


def open_in_transformers(context: Context, checkpoint: Path) -> None:
    import torch

    from train_gpt2 import GPT

    if not module_exists("transformers"):
        return context.part("in transformers", "skipped: transformers is not installed")
    from transformers import GPT2LMHeadModel

    torch.set_float32_matmul_precision("highest")
    tokens = torch.arange(96, device=context.device)[None, -64:]
    with torch.no_grad():
        ours = GPT.from_pretrained(checkpoint).to(context.device)(tokens)[0]
        theirs = GPT2LMHeadModel.from_pretrained(checkpoint).to(context.device).eval()(tokens).logits
    expect(torch.allclose(ours, theirs, atol=1e-3), "transformers computes other logits")


NAMES = [function.__name__ for functions in CHECKS.values() for function in functions]

# -----------------------------------------------------------------------------
# Running them


def run_check(function_name: str, context: Context) -> None:
    """One check, in its own process: writes its verdict, figures and parts next to its output."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # after Ctrl-C our parent kills us, with all that we have started
    log = os.open(context.folder / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.chdir(context.folder)
    try:
        globals()[function_name](context)
        failed, skipped = (sum(part.startswith(word) for _, part in context.parts) for word in ("FAILED", "skipped"))
        some_skipped = f", {skipped} of {len(context.parts)} skipped" if skipped else ""
        context.save("FAILED: see above" if failed else "ok" + some_skipped)
    except Skipped as reason:
        context.save(f"skipped: {reason}")
    except BaseException as error:
        traceback.print_exc()
        context.save("FAILED: " + (str(error) or type(error).__name__).split("\n")[0])


def kill_with_descendants(pid: int) -> None:
    """Also those in sessions of their own, as torchrun's workers are."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            children.setdefault(int(stat.read_text().rpartition(")")[2].split()[1]), []).append(int(stat.parent.name))
    pids = [pid]
    for parent in pids:
        pids += children.get(parent, [])
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def run_stage(stage: str, args: argparse.Namespace, folder: Path) -> tuple[list[str], list[tuple[str, str, str]]]:
    """Runs the checks of a stage, and prints and writes what they find as it comes; returns verdicts and figures."""
    deadline, verdicts, figures = time.monotonic() + STAGE_SECONDS, [], []
    for function in CHECKS[stage]:
        name = function.__name__
        if args.only and name not in args.only:
            continue
        (own := folder / name).mkdir()
        print(f"[{stage}] {name}: {str(function.__doc__).splitlines()[0]} ...", flush=True)
        started, verdict, answer = time.monotonic(), "skipped: out of time", Answer(folder, stage, own)
        if started + LEAST_SECONDS <= deadline:
            process = PROCESSES.Process(target=run_check, args=(name, Context(args.device, args.small, own, deadline)))
            process.start()
            try:
                while process.is_alive() and time.monotonic() < deadline:
                    process.join(min(1.0, max(0.0, deadline - time.monotonic())))
                    answer.show_news()
            finally:  # it is late, or we were interrupted
                if late := process.is_alive():
                    kill_with_descendants(process.pid)
                    process.join()
            verdict = answer.show_news()
            if late:
                verdict = f"FAILED: not finished after {deadline - started:.0f} s"
            elif process.exitcode:
                verdict = f"FAILED: its process ended with exit code {process.exitcode}"
        print(f"[{stage}] {name}, {time.monotonic() - started:.0f} s: {verdict}", flush=True)
        if verdict.startswith("FAILED") and (own / "output.txt").exists():
            print("".join(f"    | {line}\n" for line in (own / "output.txt").read_text().splitlines()[-40:]), end="")
        verdicts.append(verdict)
        figures += [(stage, *figure) for figure in answer.figures]
        for path in own.iterdir():  # runs are large
            if path.name not in ("answer.json", "output.txt"):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
    return verdicts, figures


class Answer:
    """What a check has reported so far; what is new is printed, and its figures are written to figures.md."""

    def __init__(self, folder: Path, stage: str, own: Path):
        self.table, self.stage, self.file = folder / "figures.md", stage, own / "answer.json"
        self.figures: list[tuple[str, str]] = []
        self.num_parts = 0

    def show_news(self) -> str:
        """Prints what is new; returns the verdict."""
        if not self.file.exists():
            return "FAILED: no answer"
        answer = json.loads(self.file.read_text())
        for name, value in answer["figures"][len(self.figures) :]:
            print(f"    {name}: {value}", flush=True)
            with open(self.table, "a", encoding="utf-8") as table:
                table.write(f"| {self.stage} | {name} | {value} |\n")
        for part, verdict in answer["parts"][self.num_parts :]:
            print(f"    {self.file.parent.name}, {part}: {verdict}", flush=True)
        self.figures, self.num_parts = [(name, value) for name, value in answer["figures"]], len(answer["parts"])
        return answer["verdict"]


def describe_machine(device: str) -> str:
    import torch

    if device == "cpu":
        return f"CPU, {os.cpu_count()} cores, torch {torch.__version__}, Python {platform.python_version()}"
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader", "--id=0"]
    found = subprocess.run(query, capture_output=True, text=True).stdout.strip() if shutil.which(query[0]) else ""
    gpu, _, driver = found.partition(", ")
    gpu, driver = gpu or "CUDA GPU", driver or "unknown"
    return f"{gpu}, driver {driver}, torch {torch.__version__}, CUDA {torch.version.cuda}, Python {platform.python_version()}"


def torch_has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", choices=tuple(CHECKS), help="only this stage (default: all three)")
    parser.add_argument("--only", nargs="+", metavar="CHECK", help=f"only these checks: {', '.join(NAMES)}")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="(default: cuda)")
    parser.add_argument(
        "--keep",
        type=Path,
        metavar="DIR",
        help="keep the figures, and output.txt and answer.json of each check, in this new folder",
    )
    parser.add_argument(
        "--small", action="store_true", help="a tiny model, to check the script itself; its figures mean nothing"
    )
    args = parser.parse_args()
    if unknown := set(args.only or []) - set(NAMES):
        raise UserError(f"no check {' or '.join(sorted(unknown))}. There are {', '.join(NAMES)}.")
    if args.only and args.stage and not set(args.only) & {function.__name__ for function in CHECKS[args.stage]}:
        raise UserError(f"stage {args.stage} has no check {' or '.join(args.only)}. Leave out --stage.")
    if args.keep and args.keep.exists():
        raise UserError(f"{args.keep} exists. Use a new folder for --keep.")
    if args.device == "cuda" and not torch_has_cuda():
        raise UserError("no CUDA GPU on this machine. To try the script itself, use --device cpu --small.")
    if args.small:  # a tiny model gains nothing from threads, and loses much where cores are shared
        os.environ["OMP_NUM_THREADS"] = "1"
    machine = describe_machine(args.device)
    print(machine, flush=True)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that checks and folder go, too
    PROCESSES.set_forkserver_preload(["torch", "torch._dynamo", "train_gpt2"])
    verdicts, figures = [], []
    with tempfile.TemporaryDirectory(prefix="gpu_check", ignore_cleanup_errors=True) as temporary:
        folder = args.keep.absolute() if args.keep else Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for stage in args.stage or CHECKS:
            found = run_stage(stage, args, folder)
            verdicts, figures = verdicts + found[0], figures + found[1]
        shutil.rmtree(folder / "text", ignore_errors=True)
    if args.small:
        print("\nWith --small, these figures mean nothing:")
    print(f"\n{machine}; `python {shlex.join(sys.argv)}`\n\n| stage | figure | value |\n|---|---|---|")
    for stage, name, value in figures:
        print(f"| {stage} | {name} | {value} |")
    failed = sum(verdict.startswith("FAILED") for verdict in verdicts)
    skipped = sum(verdict.startswith("skipped") for verdict in verdicts)
    print(f"\n{len(verdicts) - failed - skipped} ok, {failed} failed, {skipped} skipped")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank-with"]:
        train_on_a_shared_device(sys.argv[2:])
    else:
        run_cli(main)
