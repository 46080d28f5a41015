"""Checks everything that only a GPU can show, in four stages of at most eight minutes each. Needs no network.

    python benchmarks/gpu_check.py                            # all four, on a CUDA GPU
    python benchmarks/gpu_check.py --stage b                  # only this one
    python benchmarks/gpu_check.py --device cpu --small       # the script itself, with a tiny model

| stage | content | expected seconds on a GPU, with nothing compiled yet |
|---|---|---|
| a | correctness, and where a step spends its time | 240: 140 for the tests, 28 to compile 12 layers |
| b | speed, in pairwise comparisons | 220 to compile the variants, then 150 a round |
| c | whole runs | 140 for two ranks, 120 to resume, 30 to score, 60 for small models, 45 for each of four variants, if there is time |
| d | larger sizes, the loss alone | 200 for gpt2-xl, 173 of them to compile 48 layers; 90 for the loss; 60 for smaller cards; 45 to 120 for each larger size, if there is time |

Each check runs in its own process. It prints its figures as they come, and ends with a line that says ok, FAILED or
skipped, and why. At the end, a table has the figures for docs/measurements/performance.md. The exit code is 1 if a check failed.
--keep DIR keeps the checks' output and the figures. Stage a needs pytest.
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
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from pydoc_data.topics import topics
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from bench_throughput import (
    FEATURES,
    OURS,
    RECIPE,
    Job,
    add_product_afterwards_,
    masked_logits_to_gradient_,
    measure,
    random_shard,
    seconds_per_call,
)
from harness import ROOT, kill_processes, script_command
from plain_loop import plain_completion_losses
from torch import Tensor
from torch.nn import functional as F

import hellaswag
import train_gpt2
from fineweb import make_shards
from support.cli import UserError, run_cli
from support.console.log import read_log
from support.data import shards
from support.data.text_files import Documents
from support.data.tokenizer import get_tokenizer
from support.optim import loss
from support.runtime import batch_size, devices, distributed
from support.runtime.distributed import Distributed
from train_gpt2 import GPT, GPTConfig

STAGE_SECONDS = 480
LEAST_SECONDS = 60  # with less time left, nothing is started that may take a minute
PROCESSES = multiprocessing.get_context("forkserver")  # the checks fork from a process that has imported torch


@dataclass
class Context:
    """The device, size, folder and deadline of a check, and a pipe for what it reports as it goes."""

    device: str
    small: bool
    folder: Path
    deadline: float  # the time.monotonic() at which the check is killed
    reports: Connection
    verdicts: list[str] = field(default_factory=list)  # of the check's parts

    def figure(self, name: str, value: object) -> None:
        self.reports.send(("figure", name, str(value)))

    def part(self, name: str, verdict: str) -> None:
        self.verdicts.append(verdict)
        self.reports.send(("part", name, verdict))

    def has_time(self, seconds: float = LEAST_SECONDS) -> bool:
        return time.monotonic() + seconds < self.deadline

    def lines_of(self, command: Sequence[str], codes: tuple[int, ...] = (0,), **environment: str) -> Iterator[str]:
        """Runs a command as a user would; yields its lines. Raises a RuntimeError for an exit code not in `codes`."""
        print(f"$ {shlex.join(command)}", flush=True)
        env = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"} | environment
        line = "no output"
        pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        with subprocess.Popen(command, cwd=self.folder, env=env, **pipes) as process:
            for line in process.stdout:
                print(line, end="", flush=True)
                yield line
        if process.returncode not in codes:
            raise RuntimeError(f"{shlex.join(command[1:3])} ended with exit code {process.returncode}: {line.strip()}")

    def run(self, script: str, *args: object, processes: int = 1) -> str:
        """Runs a script of this project; returns its output."""
        return "".join(self.lines_of(script_command(script, *args, processes=processes)))


def expect(condition: object, problem: str) -> None:
    if not condition:
        raise RuntimeError(problem)


# -----------------------------------------------------------------------------
# a: correctness, and the time of a step


def environment(context: Context) -> None:
    """The machine, and PyTorch's choices on it"""
    device = torch.device(context.device)
    if device.type == "cuda":
        context.figure("memory, GiB", f"{devices.free_and_total_memory(device)[1] / 2**30:.1f}")
        context.figure("cuDNN", torch.backends.cudnn.version())
        peak = devices.peak_flops(device, "bf16")
        context.figure("bf16 peak in our table, TFLOP/s", f"{peak / 1e12:.0f}" if peak else "unknown: no MFU is shown")
    context.figure("attention in training", devices.describe_attention(device, torch.bfloat16, 12, 768, 1024))
    source = torch.zeros(2**20 if context.small else 2**30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    ms = milliseconds_per_call(lambda: target.copy_(source), device, calls=10)
    context.figure("copy bandwidth, GB/s", f"{2 * source.nbytes / ms / 1e6:.0f}")
    reason = devices.why_not_compile(device)
    expect(reason is None, f"not compiled: {reason}")


def tests(context: Context) -> None:
    """tests/test_gpu.py"""
    command = f"-m pytest -n0 -v -p no:cacheprovider --rootdir={ROOT} -c {ROOT}/pyproject.toml {ROOT}/tests/test_gpu.py"
    environment = {"GPU_TESTS_DEVICE": context.device, "COLUMNS": "200"}  # with fewer, pytest would cut off the reasons
    if context.small:
        command += " -k 'AdamW or resumed'"
    for line in context.lines_of([sys.executable, *shlex.split(command)], codes=(0, 1, 4), **environment):
        if found := re.search(r"::test_(\S+) (PASSED|FAILED|ERROR|SKIPPED)(?: \(([^)]*))?", line):
            verdict = {"PASSED": "ok", "SKIPPED": f"skipped: {found[3]}"}.get(found[2], "FAILED: see its output")
            context.part(found[1].replace("_", " "), verdict)
    expect(context.verdicts, 'pytest ran no test. Run "pip install -r tests/requirements.txt"')


def throughput(
    context: Context, setting: str, steps: int, row: str = OURS, warm_up: int = 2, **more: Any
) -> dict[str, Any]:
    """Measures a row of bench_throughput.py; `more` are fields of its Job."""
    model, shape = setting.split(":")
    features = [name for name in FEATURES[context.device] if row != RECIPE or name != "chunked loss"]
    data = random_shard(context.folder, model, 2**22)
    return measure(Job(row, features, context.device, model, shape, data, steps, warm_up, **more))


def report(context: Context, name: str, row: dict[str, Any]) -> None:
    mfu = f", {row['mfu']:.1%} MFU" if row["mfu"] else ""
    first_step = re.search(r"the first step ended ([\d.]+)s after the start", row["output"])
    context.figure(
        name,
        f"{row['tok_s']:,.0f} tok/s{mfu}, {row['matmul']:.0%} of a large matmul, {row['B']} rows, "
        f"{row['peak_gb']:.1f} GB, the first step ended after {first_step[1] if first_step else '?'} s",
    )


def training(context: Context) -> None:
    """A step of training: speed, the time of its kernels by kind, the GPU's clocks and power"""
    setting, steps = ("small:4x64x2", 3) if context.small else ("gpt2:64x1024x8", 8)
    trace, profiled = context.folder / "trace.json.gz", 2 if context.small else 5
    with gpu_readings(context):
        # the profiled steps are not measured
        flags = {"profile": profiled}
        ours = throughput(context, setting, steps, warm_up=5 + profiled, flags=flags, trace=str(trace))
    print(ours["output"], flush=True)
    report(context, "train_gpt2.py", ours)
    with gzip.open(trace, "rt", encoding="utf-8") as file:
        classes, kernels = classify_kernels(json.load(file)["traceEvents"])
    total = sum(classes.values())
    expect(total > 0 or context.device == "cpu", "the profile has no kernels")
    for name, us in classes.items() if total else ():
        context.figure(f"{name}, ms per step", f"{us / 1e3 / profiled:.1f} ({us / total:.1%})")
    for name, us in kernels[:15]:
        context.figure(f"kernel {name[:100]}, ms per step", f"{us / 1e3 / profiled:.2f}")


KERNEL_CLASSES = (  # kind, and a regex searched for in the kernel's name; the first match wins
    ("pointwise", "triton_poi"),  # Inductor's kernels are named after all operations that they fuse
    ("reductions", "triton_red|triton_per|triton_mix"),
    ("copies", "memcpy|memset|CatArray|copy_kernel"),
    ("attention", "fmha|flash|sdpa|attention"),
    ("GEMM", "gemm|nvjet|cutlass|xmma|cublas|splitK"),
    ("reductions", "reduce|norm|softmax"),
    ("pointwise", ""),  # the rest: elementwise kernels, AdamW
)


def classify_kernels(events: Sequence[dict[str, Any]]) -> tuple[dict[str, float], list[tuple[str, float]]]:
    """Returns the microseconds in a PyTorch trace by kind of kernel, "idle" included, and by kernel, longest first."""
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
    """Reports the median clocks, power and temperature of the first GPU while it is busy in the block."""
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
            lines = process.communicate()[0].splitlines()
    busy = [map(float, line.split(", ")) for line in lines if re.fullmatch(r"([\d.]+, ){4}100", line)]
    names = "SM clock, MHz", "memory clock, MHz", "power, W", "temperature, C"
    for name, values in zip(names, zip(*busy, strict=True), strict=False):
        context.figure(name, f"{statistics.median(values):.0f} (from {min(values):.0f} to {max(values):.0f})")


# -----------------------------------------------------------------------------
# b: speed, in pairwise comparisons


def milliseconds_per_call(function: Callable[[], object], device: torch.device, calls: int) -> float:
    """Returns the milliseconds per call, the median of several measurements."""
    for _ in range(3):
        function()
    return 1e3 * statistics.median(seconds_per_call(function, device, calls))


PAIRS = {  # name of the comparison: fields of bench_throughput.py's Job
    "residual stream in fp32": {"without": "bf16 residual stream"},
    "also no addmm, and masks in the loss": {"without": "bf16 residual stream, addmm, loss without masks"},
    "build-nanogpt's recipe": {"row": RECIPE},
    "flash attention instead of cuDNN's": {"without": "cuDNN"},
    "mix-order reductions off": {"without": "mix-order reductions"},
}


def pairs(context: Context) -> None:
    """train_gpt2.py against itself with one thing changed, and against build-nanogpt's recipe, in up to three rounds"""
    setting, steps, rounds = ("small:4x64x2", 3, 1) if context.small else ("gpt2:64x1024x8", 6, 3)
    names = list(PAIRS)[:1] if context.small else list(PAIRS)
    if not context.small:
        for changes in ({}, *PAIRS.values()):  # compiles all variants, which takes longer than all rounds
            throughput(context, setting, 1, warm_up=1, **changes)
    ratios = defaultdict[str, list[float]](list)
    slowest = 0.0
    for i in range(rounds):
        if not context.has_time(1.1 * slowest):
            context.part(f"round {i + 1}", "skipped: out of time")
            break
        started = time.monotonic()
        ours = throughput(context, setting, steps)
        report(context, f"train_gpt2.py, round {i + 1}", ours)
        for name in names:
            other = throughput(context, setting, steps, **PAIRS[name])
            ratios[name].append(other["tok_s"] / ours["tok_s"])
            context.figure(f"{name}, round {i + 1}: tok/s relative to train_gpt2.py", f"{ratios[name][-1]:.3f}")
            difference = max(abs(a / b - 1) for a, b in zip(ours["losses"], other["losses"], strict=False))
            expect(difference < 2**-7, f"{name}: the losses differ by {difference:.1e}")
        slowest = max(slowest, time.monotonic() - started)
    for name, values in ratios.items():
        context.figure(f"{name}: median", f"{statistics.median(values):.3f} of {len(values)}")


# -----------------------------------------------------------------------------
# c: whole runs, on Python's documentation


def run_flags(context: Context, out: object, steps: int) -> list[str]:
    """Returns the flags of a run with 12 layers and 768 channels, or of a tiny one, on shards that are made once."""
    data = context.folder.parent / "data"
    make_shards(Documents("topics", topics.values()), data, tokenizer="bytes")
    sizes = "--n-layer 1 --n-head 2 --n-embd 32 --block-size 64 --batch-size 4 --total-batch-size 512"
    full = "--block-size 256 --batch-size 16 --total-batch-size 8192"
    common = f"--data {data} --out {out} --device {context.device} --max-steps {steps} --warmup-steps 5"
    return shlex.split(f"{common} --sample-every 0 --hellaswag-every 0 {sizes if context.small else full}")


def losses(out: Path) -> list[float]:
    return list(read_log(out / "log.txt")["train"].values())


def two_ranks(context: Context) -> None:
    """Two processes on one device through gloo, compiled: the trial of the micro-batch, reset, DDP"""
    flags = run_flags(context, "one", 8) + "--dtype fp32 --no-tf32 --val-tokens 2048 --val-every".split()
    flags += ["0", "--no-compile"] if context.small else ["4", "--compile"]
    context.run("train_gpt2.py", *flags, "--no-compile")
    # No FSDP: gloo's all-gather of several CUDA tensors crashes (pytorch#152645).
    context.run("benchmarks/gpu_check.py", "--rank-with", *flags, "--out", "two", processes=2)
    pairs = zip(losses(context.folder / "two"), losses(context.folder / "one"), strict=True)
    difference = max(abs(a - b) for a, b in pairs)
    context.figure("two processes compared with one: largest difference in loss", f"{difference:.1e}")
    expect(difference < 1e-3, f"the losses differ by {difference:.1e}")


def train_on_a_shared_device(flags: list[str]) -> None:
    """Runs train_gpt2.py as one of several ranks on the same device, which NCCL does not allow."""
    distributed.backend = lambda: "gloo"
    with_device = Distributed.with_device
    Distributed.with_device = lambda dist, name: replace(
        dist, device=with_device(replace(dist, local_rank=0), name).device
    )
    if not torch.cuda.is_available():
        batch_size.TRIED, devices.free_and_total_memory = ("cpu",), lambda device: (10**10, 10**10)
    run_cli(lambda: train_gpt2.main(flags))


def variants(context: Context) -> None:
    """Not compiled, Muon, fp16, dropout: 20 steps each"""
    choices, steps = ["--recipe fast --max-lr 2e-3"], 20
    if not context.small:
        choices = ["--no-compile", *choices, "--dtype fp16", "--dropout 0.1"]
    for i, flags in enumerate(choices):
        if not context.has_time():
            context.part(flags, "skipped: out of time")
            continue
        more = ["--checkpoint-every", 0, "--val-every", 0, *flags.split()]
        output = context.run("train_gpt2.py", *run_flags(context, f"log{i}", steps), *more)
        values = losses(context.folder / f"log{i}")
        ms = statistics.median(map(float, re.findall(r"dt: ([\d.]+)ms", output)[5:]))
        context.figure(f"{flags}: ms per step", f"{ms:.1f}")
        good = len(values) == steps and all(map(math.isfinite, values)) and values[-1] < values[0]
        context.part(flags, "ok" if good else f"FAILED: losses {values}")


SMALL_MODELS = (
    "--n-layer 3 --n-head 2 --n-embd 128 --block-size 64 --total-batch-size 2048",
    "--n-layer 4 --n-head 2 --n-embd 128 --block-size 64 --total-batch-size 2048 --dropout 0.1",
    "--n-layer 6 --n-head 3 --n-embd 192 --block-size 128 --total-batch-size 4096",
    "--n-layer 8 --n-head 8 --n-embd 512 --block-size 512 --total-batch-size 32768",
)


def small_models(context: Context) -> None:
    """The models of --text: steps as CUDA graphs, and kernel by kernel"""
    text, steps = context.folder / "text.txt", 8 if context.small else 200
    text.write_text("\n\n".join(topics.values()), encoding="utf-8")
    for i, sizes in enumerate(SMALL_MODELS[:1] if context.small else SMALL_MODELS):
        ms, ends = [], []
        for name, graphs in (("graphs", "--cuda-graphs"), ("launches", "--no-cuda-graphs")):
            flags = f"--text {text} --device {context.device} --max-steps {steps} --val-every 0 --sample-every 0"
            flags += f" --no-compile --dtype bf16 --checkpoint-every 0 --out {name}{i} {graphs} {sizes}"
            output = context.run("train_gpt2.py", *flags.split())
            expect(
                context.device == "cpu" or ("CUDA graphs" in output) == (name == "graphs"),
                "graphs are not used as asked",
            )
            ms.append(statistics.median(map(float, re.findall(r"dt: ([\d.]+)ms", output)[steps // 2 :])))
            ends.append(losses(context.folder / f"{name}{i}")[-1])
        context.figure(f"{sizes}: ms per step, as graphs and kernel by kernel", f"{ms[0]:.2f} and {ms[1]:.2f}")
        context.figure(f"{sizes}: loss of the last step", f"{ends[0]:.4f} and {ends[1]:.4f}")
        expect(abs(ends[0] - ends[1]) < 0.05, "the losses differ")


def cards(context: Context) -> None:
    """Cards with less memory: the micro-batch that is found trains 20 steps of 124M, with validations"""
    gpt2 = "--total-batch-size 65536 --val-every 10 --val-tokens 262144 --sample-every 0 --max-steps 20"
    data = random_shard(context.folder, "gpt2", 2**22)
    shutil.copy(context.folder / "random_train_000000.npy", context.folder / "random_val_000000.npy")
    for gb in () if context.small else (24, 16, 8):
        flags = f"--card {gb} --data {data} --out card{gb} --hellaswag-every 0 --checkpoint-every 0 --no-compile {gpt2}"
        output = context.run("benchmarks/gpu_check.py", *flags.split())
        context.figure(f"a card of {gb} GB", output.splitlines()[-1])


def train_on_a_card(gb: float, flags: list[str]) -> None:
    """Runs train_gpt2.py as if the GPU had so many GiB; prints what it allocated."""
    size_of_gpt2 = SimpleNamespace(
        name="bytes", is_gpt2=False, vocab_size=50257, eot=0, count_bytes=len, fingerprint=""
    )
    total, context = torch.cuda.get_device_properties(0).total_memory, 0.6  # CUDA's own memory, in GiB
    torch.cuda.set_per_process_memory_fraction((gb - context) * 2**30 / total, 0)
    rows, machine = loss.chunk_rows, devices.free_and_total_memory
    devices.free_and_total_memory = lambda device: (
        ((gb - context) * 2**30, gb * 2**30) if device.type == "cuda" else machine(device)
    )
    loss.chunk_rows = lambda kind, width, memory=0: rows(kind, width, min(memory, gb * 2**30))
    shards.read_tokenizer = lambda *folders: size_of_gpt2  # needs no vocabulary file
    run_cli(lambda: train_gpt2.main(flags))
    most = [memory() / 2**30 for memory in (torch.cuda.max_memory_allocated, torch.cuda.max_memory_reserved)]
    expect(not torch.cuda.memory_stats()["num_alloc_retries"], "the allocator had to free memory and try again")
    print("{:.2f} GiB allocated and {:.2f} reserved at most".format(*most))


def scoring(context: Context) -> None:
    """HellaSwag scores of training and of hellaswag.py, compared with those of one item at a time"""
    device, n = torch.device(context.device), 8 if context.small else 300 if context.device == "cuda" else 100
    words = (ROOT / "README.md").read_text(encoding="utf-8").split()
    examples = []
    for i in range(n):
        start, length = i + 10 + 7 * i % 40, 3 + 5 * i % 20  # words of each context and ending
        endings = [" ".join(words[j : j + length]) for j in range(start, start + 4)]
        item = hellaswag.Item(endings, i % 4, ctx=" ".join(words[i:start]))
        examples.append(hellaswag.render(item, get_tokenizer("bytes")))
    torch.manual_seed(0)
    sizes = dict(n_layer=2, n_head=2, n_embd=32) if context.small else {}
    model = GPT(GPTConfig(vocab_size=257, **sizes)).to(device)
    model.save_pretrained(context.folder)
    hf_model = open_in_transformers(context.folder, device)
    in_training = hellaswag.ScoringModel(model.transformer, model.logits, model.config.block_size, device)
    devices.configure_backends(device, tf32=False)

    def items_per_second(compute: Callable[[], object]) -> tuple[np.ndarray, str]:
        started = time.perf_counter()
        losses = np.array(compute())
        return losses, f"{n / (time.perf_counter() - started):.1f} items/s"

    for attempt in ("first", "second"):
        with devices.autocast(device, torch.bfloat16):
            _, speed = items_per_second(lambda: hellaswag.completion_losses(in_training, examples))
        context.figure(f"HellaSwag in training, bf16, {attempt} time", speed)
    for name, compute_logits, scoring_model in (
        ("in training", lambda ids: model(ids)[0], in_training),
        ("in hellaswag.py", lambda ids: hf_model(ids).logits, hellaswag.from_huggingface(hf_model)),
    ):
        ours, speed = items_per_second(partial(hellaswag.completion_losses, scoring_model, examples))
        plain, plain_speed = items_per_second(partial(plain_completion_losses, compute_logits, examples, device))
        largest = abs(plain - ours).max()
        context.figure(f"HellaSwag {name}, fp32", f"{speed}, one item at a time {plain_speed}")
        context.figure(f"HellaSwag {name}: largest difference in loss, nats", f"{largest:.1e}")
        expect(largest < 1e-2, f"losses {name} differ by {largest:.1e}")
        expect((plain.argmin(2) == ours.argmin(2)).all(), f"predictions {name} differ")


def open_in_transformers(checkpoint: Path, device: torch.device) -> torch.nn.Module:
    from transformers import GPT2LMHeadModel

    return GPT2LMHeadModel.from_pretrained(checkpoint).to(device).eval()


def resume(context: Context) -> None:
    """A run that gets SIGTERM and is resumed; its checkpoint in transformers and sample.py"""
    steps, straight, out = 20 if context.small else 60, context.folder / "straight", context.folder / "stopped"
    context.run("train_gpt2.py", *run_flags(context, straight, steps))
    command = script_command("train_gpt2.py", *run_flags(context, out, steps))
    process, log = subprocess.Popen(command), out / "log.txt"
    while process.poll() is None and not (log.exists() and log.read_text().count("train") >= 3):
        time.sleep(0.002)
    process.send_signal(signal.SIGTERM)
    expect(process.wait() == 143, f"after SIGTERM the exit code is {process.returncode}")
    stopped_at = len(losses(out))
    expect(stopped_at < steps, "the run ended before SIGTERM")
    context.run("train_gpt2.py", "--resume", "--out", out, "--device", context.device)
    # A GPU's attention sums in no fixed order, and later steps amplify the differences.
    differences = [abs(a - b) for a, b in zip(losses(straight), losses(out), strict=True)][stopped_at:]
    soon, late = max(differences[:5]), max(differences[5:], default=0)
    context.figure(f"resumed at step {stopped_at}: largest difference in the next 5 losses", f"{soon:.1e}")
    context.figure("largest difference in the losses after those", f"{late:.1e}")
    expect(soon < 1e-3, f"the losses differ by {soon:.1e}")
    checkpoint, device = out / f"model_{steps:05d}", torch.device(context.device)
    torch.set_float32_matmul_precision("highest")
    tokens = torch.arange(96, device=device)[None, -64:]
    with torch.no_grad():
        ours = GPT.from_pretrained(checkpoint).to(device)(tokens)[0]
        theirs = open_in_transformers(checkpoint, device)(tokens).logits
    expect(torch.allclose(ours, theirs, atol=1e-3), "transformers computes different logits")
    for attempt in ("first",) if context.small else ("first", "second"):
        started = time.perf_counter()
        context.run("sample.py", "--model", checkpoint, "--prompt", "The ", "--device", context.device)
        context.figure(f"sample.py, {attempt} time, s", f"{time.perf_counter() - started:.1f}")


# -----------------------------------------------------------------------------
# d: other sizes, and the loss alone


def large_model(context: Context) -> None:
    """GPT-2 XL with a micro-batch that surely fits"""
    setting = "gpt2-xl:16x1024x1"
    if context.small:
        return context.part(setting, "skipped: the same as training, with --small")
    report(context, f"train_gpt2.py, {setting}", throughput(context, setting, 3))


def plain_loss(x: Tensor, weight: Tensor, targets: Tensor, V: int) -> Tensor:
    return F.cross_entropy(F.linear(x, weight)[:, :V].float(), targets)


def loss_alone(context: Context) -> None:
    """The loss and its gradients alone"""
    N, C, V, W = (512, 32, 257, 320) if context.small else (65536, 768, 50257, 50304)
    device, on_gpu = torch.device(context.device), context.device == "cuda"
    torch.manual_seed(0)
    x = torch.randn(N, C, device=device, dtype=torch.bfloat16).requires_grad_()
    weight = (0.02 * torch.randn(W, C, device=device)).requires_grad_()
    targets = torch.randint(0, V, (N,), device=device)
    found: dict[str, float] = {}
    masked = torch.compile(masked_logits_to_gradient_, dynamic=False)
    with_masks, added = {"_fused_logits_to_gradient_": masked}, {"_add_product_": add_product_afterwards_}

    def measure_loss(name: str, function: Callable[..., Tensor]) -> None:
        def step() -> None:
            x.grad = weight.grad = None
            with devices.autocast(device, torch.bfloat16):
                value = function(x, weight, targets, V)
            value.backward()
            found[name] = value.item()

        devices.free_memory(device)
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        figure = f"loss of {N:,} tokens, {name}, "
        try:
            context.figure(figure + "ms", f"{milliseconds_per_call(step, device, calls=1):.1f}")
        except torch.OutOfMemoryError:
            return context.figure(figure + "ms", "out of memory")
        if on_gpu:
            context.figure(figure + "GB", f"{torch.cuda.max_memory_allocated() / 1e9:.1f}")

    if not context.small:
        compiled = partial(torch.compile, dynamic=False)
        measure_loss("as in training", compiled(loss.chunked_cross_entropy))
        for name, changes in (("masks in the kernel", with_masks), ("no addmm", added), ("both", with_masks | added)):
            torch.compiler.reset()
            with patch.multiple(loss, **changes):
                measure_loss(name, compiled(loss.chunked_cross_entropy))
        for rows in (1024, 4096, 8192, 16384):
            torch.compiler.reset()
            with patch.object(loss, "chunk_rows", return_value=rows):
                measure_loss(f"chunks of {rows:,} rows", compiled(loss.chunked_cross_entropy))
        measure_loss("plain, compiled", compiled(plain_loss))
    measure_loss("not compiled", loss.chunked_cross_entropy)
    measure_loss("plain", plain_loss)
    if on_gpu and find_spec("liger_kernel"):
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        measure_loss("Liger-Kernel", lambda x, w, y, V: LigerFusedLinearCrossEntropyLoss()(w[:V].to(x.dtype), x, y))
    expected = found.get("plain", found["not compiled"])  # the plain one may not have fitted into memory
    for name, value in found.items():
        expect(abs(value / expected - 1) < 2**-9, f"{name}: loss {value}, expected {expected}")


def larger(context: Context) -> None:
    """A larger micro-batch, and larger models with the largest micro-batch that fits"""
    settings = ["gpt2:128x1024x4", "gpt2-medium:64x1024x2", "gpt2-large:64x1024x2", "gpt2-xl:64x1024x1"]
    slowest = 60.0
    for setting in [] if context.small else settings:
        if not context.has_time(1.7 * slowest):  # each is larger than the one before
            context.part(setting, "skipped: out of time")
            continue
        started = time.monotonic()
        report(context, f"train_gpt2.py, {setting}", throughput(context, setting, 3))
        context.part(setting, "ok")
        slowest = max(slowest, time.monotonic() - started)


# -----------------------------------------------------------------------------
# Running the checks

CHECKS: dict[str, list[Callable[[Context], None]]] = {  # by stage; a docstring's first line says what is checked
    "a": [environment, tests, training],
    "b": [pairs],
    "c": [two_ranks, resume, scoring, small_models, variants],
    "d": [large_model, loss_alone, cards, larger],
}


def run_check(function: Callable[[Context], None], context: Context) -> None:
    """Runs one check, in its own process, with its output in a file next to its folder."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # after Ctrl-C, our parent kills us and our children
    os.environ["GPU_CHECK"] = str(context.folder)  # by which our parent finds our children
    log = os.open(context.folder.with_suffix(".txt"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.chdir(context.folder)
    try:
        function(context)
        failed, skipped = (sum(part.startswith(word) for part in context.verdicts) for word in ("FAILED", "skipped"))
        some_skipped = f", {skipped} of {len(context.verdicts)} skipped" if skipped else ""
        verdict = "FAILED: see above" if failed else "ok" + some_skipped
    except BaseException as error:
        traceback.print_exc()
        verdict = "FAILED: " + (str(error) or type(error).__name__).split("\n")[0]
    context.reports.send(("verdict", "", verdict))


def reports_of(
    function: Callable[[Context], None], args: argparse.Namespace, folder: Path, deadline: float
) -> Iterator[tuple[str, str, str]]:
    """Runs a check and yields what it reports as it comes: figures, verdicts of its parts, its own verdict."""
    receiver, sender = PROCESSES.Pipe(duplex=False)
    context = Context(args.device, args.small, folder, deadline, sender)
    process = PROCESSES.Process(target=run_check, args=(function, context))
    started = time.monotonic()
    process.start()
    sender.close()
    try:
        while receiver.poll(max(0.0, deadline - time.monotonic())):
            yield receiver.recv()
        yield "verdict", "", f"FAILED: not finished after {deadline - started:.0f} s"
    except EOFError:  # it has ended
        process.join()
        if process.exitcode:
            yield "verdict", "", f"FAILED: its process ended with exit code {process.exitcode}"
    finally:  # it is late, or we were interrupted
        process.kill()
        kill_processes(f"GPU_CHECK={folder}")
        process.join()


def run_stage(stage: str, args: argparse.Namespace, folder: Path) -> list[str]:
    """Runs the checks of a stage; prints what they report and writes figures to a table. Returns the verdicts."""
    deadline, verdicts = time.monotonic() + STAGE_SECONDS, []
    for function in CHECKS[stage]:
        name = function.__name__
        if args.only and name not in args.only:
            continue
        (own := folder / name).mkdir()
        print(f"[{stage}] {name}: {str(function.__doc__).splitlines()[0]} ...", flush=True)
        started, verdict = time.monotonic(), "skipped: out of time"
        if started + LEAST_SECONDS <= deadline:
            reports = reports_of(function, args, own, deadline)
            with contextlib.closing(reports), open(folder / "figures.md", "a", encoding="utf-8") as table:
                for kind, what, value in reports:
                    if kind == "verdict":
                        verdict = value
                    else:
                        print(f"    {name + ', ' if kind == 'part' else ''}{what}: {value}", flush=True)
                    if kind == "figure":
                        print(f"| {stage} | {what} | {value} |", file=table, flush=True)
        print(f"[{stage}] {name}, {time.monotonic() - started:.0f} s: {verdict}", flush=True)
        if verdict.startswith("FAILED") and (output := folder / f"{name}.txt").exists():
            print("".join(f"    | {line}\n" for line in output.read_text().splitlines()[-40:]), end="")
        verdicts.append(verdict)
        shutil.rmtree(own)  # runs are large
    return verdicts


def describe_machine(device: str) -> str:
    versions = f"torch {torch.__version__}, CUDA {torch.version.cuda}, Python {platform.python_version()}"
    if device == "cpu":
        return f"CPU, {os.cpu_count()} cores, {versions}"
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader", "--id=0"]
    found = subprocess.run(query, capture_output=True, text=True).stdout if shutil.which(query[0]) else ""
    return f"{found.strip().replace(', ', ', driver ') or torch.cuda.get_device_name()}, {versions}"


def main() -> None:
    names = [function.__name__ for functions in CHECKS.values() for function in functions]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", choices=tuple(CHECKS), help="only this stage (default: all)")
    parser.add_argument("--only", nargs="+", choices=names, metavar="CHECK", help=f"only these: {', '.join(names)}")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="(default: cuda)")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="new folder for the figures and all output")
    parser.add_argument("--small", action="store_true", help="a tiny model, to check the script itself")
    args = parser.parse_args()
    if args.keep and args.keep.exists():
        raise UserError(f"{args.keep} exists. Use a new folder for --keep.")
    if args.device == "cuda" and not torch.cuda.is_available():
        raise UserError("no CUDA GPU on this machine. To try the script itself, use --device cpu --small.")
    if args.small:  # a tiny model gains nothing from threads, and loses much where cores are shared
        os.environ["OMP_NUM_THREADS"] = "1"
    machine = describe_machine(args.device)
    print(machine, flush=True)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # ends the checks, removes the folder
    PROCESSES.set_forkserver_preload(["torch._dynamo", "train_gpt2"])
    with tempfile.TemporaryDirectory(prefix="gpu_check", ignore_cleanup_errors=True) as temporary:
        folder = args.keep.absolute() if args.keep else Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "figures.md").touch()
        verdicts = [verdict for stage in args.stage or CHECKS for verdict in run_stage(stage, args, folder)]
        shutil.rmtree(folder / "data", ignore_errors=True)
        figures = (folder / "figures.md").read_text(encoding="utf-8")
    if args.small:
        print("\nWith --small, these figures are meaningless:")
    print(f"\n{machine}; `python {shlex.join(sys.argv)}`\n\n| stage | figure | value |\n|---|---|---|\n{figures}")
    failed = sum(verdict.startswith("FAILED") for verdict in verdicts)
    skipped = sum(verdict.startswith("skipped") for verdict in verdicts)
    print(f"{len(verdicts) - failed - skipped} ok, {failed} failed, {skipped} skipped")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank-with"]:
        train_on_a_shared_device(sys.argv[2:])
    elif sys.argv[1:2] == ["--card"]:
        train_on_a_card(float(sys.argv[2]), sys.argv[3:])
    else:
        run_cli(main)
