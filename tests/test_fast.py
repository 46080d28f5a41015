"""What is there for speed: that it changes no number, and that it does what it says."""

from __future__ import annotations

import ctypes
import gzip
import importlib.util
import json
import math
import os
import platform
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ONE_PROCESS, ROOT, TINY, TINY_FLAGS, config_of, finish_run, losses, run_script, start_run
from torch.nn import functional as F

import train_gpt2
from support import devices, loss, profiling, report, shards, speed
from support.loss import chunked_cross_entropy
from train_gpt2 import GPT, DataLoaderLite

on_linux = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")


@pytest.fixture(scope="module")
def bench():
    """benchmarks/bench_throughput.py, which has the plain model and loop."""
    spec = importlib.util.spec_from_file_location("bench_throughput", ROOT / "benchmarks" / "bench_throughput.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# The loss


def plain_loss(x, weight, targets, vocab_size):
    return F.cross_entropy(F.linear(x, weight)[:, :vocab_size].float(), targets)


def loss_and_gradients(function, x, weight, targets, vocab_size, factor=1.0, dtype=None):
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
        value = function(x, weight, targets, vocab_size)
    (factor * value).backward()
    return value.detach(), x.grad / factor, weight.grad / factor


@pytest.fixture
def head(monkeypatch):
    """50 rows, 257 ids of 320; chunks of 12 rows, the last one of 2."""
    monkeypatch.setitem(loss.CHUNK, "cpu", 8 * 320)
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(50, 32, generator=generator), torch.randn(320, 32, generator=generator)
    return x, weight, torch.randint(0, 257, (50,), generator=generator), 257


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


@pytest.mark.parametrize("compiled", [False, True])
def test_the_chunked_loss_is_the_cross_entropy(head, compiled):
    function = torch.compile(chunked_cross_entropy, fullgraph=True) if compiled else chunked_cross_entropy
    exact = loss_and_gradients(lambda x, w, y, V: F.cross_entropy((x @ w.T)[:, :V], y), *(
        t.double() if torch.is_tensor(t) and t.is_floating_point() else t for t in head
    ))  # fmt: skip
    ours = loss_and_gradients(function, *head, factor=0.25)
    assert all(relative(a, b) < 1e-6 for a, b in zip(ours, exact, strict=True))
    assert not ours[2][257:].any()  # the padding

    plain = loss_and_gradients(plain_loss, *head, dtype=torch.bfloat16)
    lower = loss_and_gradients(function, *head, dtype=torch.bfloat16)
    for a, b, truth in zip(lower, plain, exact, strict=True):
        assert a.dtype == torch.float32
        assert relative(a, truth) < 1.2 * relative(b, truth) + 1e-6  # sums in fp32 are no worse than bf16 throughout
    with torch.no_grad():
        assert relative(function(*head), exact[0]) < 1e-6


def test_without_gradients_none_are_computed(head, monkeypatch):
    made = []
    mm = torch.mm
    monkeypatch.setattr(torch, "mm", lambda *args, **options: made.append(args) or mm(*args, **options))
    with torch.no_grad():
        chunked_cross_entropy(*head)
    assert not made
    loss_and_gradients(chunked_cross_entropy, *head)
    assert made


def test_in_fp16_gradients_are_scaled_before_they_are_rounded(head):
    """Rows in the thousands divide each gradient, and what a scaler does not lift is zero in fp16."""
    x, weight, targets, vocab_size = (head[0] * 1e-3, *head[1:])
    exact = loss_and_gradients(plain_loss, x, weight, targets, vocab_size)
    scaled = loss_and_gradients(chunked_cross_entropy, x, weight, targets, vocab_size, 2.0**14, torch.float16)
    assert all(relative(a, b) < 0.01 for a, b in zip(scaled, exact, strict=True))


@on_linux
def test_the_logits_never_exist_at_once(tmp_path):
    """8,192 rows of 16,384 logits are 537 MB in fp32."""
    script = """
import torch
from support import loss
def peak(): return int(next(l for l in open("/proc/self/status") if l.startswith("VmHWM")).split()[1]) / 1024
x, w = torch.randn(8192, 8, requires_grad=True), torch.randn(16384, 8, requires_grad=True)
y = torch.randint(0, 16384, (8192,))
loss.CHUNK["cpu"] = 2**20
loss.chunked_cross_entropy(x[:64], w, y[:64], 16384).backward()
before = peak()
loss.chunked_cross_entropy(x, w, y, 16384).backward()
print(peak() - before)
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert float(done.stdout) < 64  # MB


# The whole step


def batches_of(folder: Path, B: int, T: int, per_update: int, updates: int):
    """The micro-batches of each update, cut by hand from one long shard."""
    files = sorted(folder.glob("*_train_*.npy"))
    rows = []
    for file in files:
        tokens = torch.from_numpy(np.load(file).astype(np.int64))
        rows += [tokens[i * T : i * T + T + 1] for i in range((len(tokens) - 1) // T)]
    for update in range(updates):
        chosen = [rows[(update * B * per_update + n) % len(rows)] for n in range(B * per_update)]
        yield [
            (torch.stack(chosen[i : i + B])[:, :-1], torch.stack(chosen[i : i + B])[:, 1:])
            for i in range(0, len(chosen), B)
        ]


def plain_losses(bench, config, B: int, updates: int, dtype=None, features=frozenset()) -> list[float]:
    torch.manual_seed(config.seed)
    ours = GPT(TINY)
    model = bench.plain_gpt(TINY, features).take(ours)
    optimizer = bench.plain_optimizer(model, features, 0.1, 0.0, (0.9, 0.95))
    amp = torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == "bf16")
    found = []
    for step, batches in enumerate(batches_of(Path(config.data), B, 16, 16 // B, updates)):
        found.append(bench.plain_update(model, optimizer, batches, amp, train_gpt2.get_lr(step, config))[0])
    return found


@pytest.mark.parametrize("flags", [(), ("--compile",)])
def test_fifty_updates_follow_the_plain_loop(bench, byte_shards, tmp_path, monkeypatch, flags):
    monkeypatch.setitem(loss.CHUNK, "cpu", 25 * 320)  # several chunks in each micro-batch
    found = {}
    for dtype in ("fp32", "bf16"):
        config = config_of(
            "--data", byte_shards, "--out", tmp_path / dtype, "--max-steps", 50, "--val-every", 0, "--checkpoint-every", 0,
            "--dtype", dtype, *flags,
        )  # fmt: skip
        train_gpt2.train(config, ONE_PROCESS)
        found[dtype] = np.array(losses(tmp_path / dtype / "log.txt"))
    plain = np.array(plain_losses(bench, config, 4, 50))
    assert plain[-1] < plain[0] - 1  # it learns
    assert np.abs(found["fp32"] - plain).max() < 1e-4
    lower, other = (np.array(plain_losses(bench, config, B, 50, "bf16")) for B in (4, 8))
    assert np.abs(found["bf16"] - lower).max() < 1.5 * np.abs(lower - other).max()


def test_one_graph_and_no_recompile_while_evaluations_come_and_go(byte_shards, tmp_path, monkeypatch):
    """PyTorch's own counters, after the first update and the first validation with its ragged last batch."""
    counters = torch._dynamo.utils.counters
    torch.compiler.reset()
    counters.clear()
    update, seen = train_gpt2.train_step, []

    def watched(run, lr):
        answer = update(run, lr)
        seen.append((counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())))
        torch.compiler.set_stance("fail_on_recompile")
        return answer

    monkeypatch.setattr(train_gpt2, "train_step", watched)
    try:
        config = config_of(
            "--data", byte_shards, "--out", tmp_path / "run", "--max-steps", 8, "--val-every", 2, "--val-tokens", 16 * 18,
            "--sample-every", 4, "--compile",
        )  # fmt: skip
        train_gpt2.train(config, ONE_PROCESS)
    finally:
        torch.compiler.set_stance("default")
    # the model: with gradients, and without for 4 rows and for 2; the rows of the loss: the same three
    assert seen == [(6, 0)] * 8
    assert len(losses(tmp_path / "run" / "log.txt", "val")) == 5


def test_compiled_under_ddp_each_bucket_has_its_graph(byte_shards, tmp_path):
    """4.2 million parameters are 17 MB: DDP's first bucket of 1 MB and one more."""
    flags = "--n-layer 4 --n-embd 256 --max-steps 4 --val-every 2 --checkpoint-every 0".split()
    ranks = start_run(
        "--data", byte_shards, "--out", "run", *flags, "--compile", cwd=tmp_path, world=2, sabotage=count_graphs
    )
    assert finish_run(ranks) == [0, 0], (tmp_path / "0.txt").read_text()
    run_to_compare = start_run("--data", byte_shards, "--out", "eager", *flags, cwd=tmp_path)
    assert finish_run(run_to_compare) == [0]
    for rank in (0, 1):
        said = [json.loads(line) for line in (tmp_path / f"graphs{rank}.txt").read_text().splitlines()]
        assert said == [said[0]] * 4, "compiled again after the first update"
        assert said[0]["breaks"] == 0 and said[0]["buckets"] == 2
    compiled, eager = (np.array(losses(tmp_path / name / "log.txt")) for name in ("run", "eager"))
    assert np.abs(compiled - eager).max() < 1e-4


def count_graphs(rank: int) -> None:
    """Notes after each update how many graphs there were, and of how many buckets DDP's backend has cut one."""
    from torch._dynamo.backends.distributed import DDPOptimizer

    counters, update, compile_fn = torch._dynamo.utils.counters, train_gpt2.train_step, DDPOptimizer.compile_fn
    buckets = []

    def watched_compile(self, *args):
        answer = compile_fn(self, *args)
        buckets.append(len(self.buckets))
        return answer

    def watched(run, lr):
        answer = update(run, lr)
        breaks = sum(counters["graph_break"].values())
        line = {"graphs": counters["stats"]["unique_graphs"], "breaks": breaks, "buckets": max(buckets)}
        with open(f"graphs{rank}.txt", "a") as file:
            file.write(json.dumps(line) + "\n")
        return answer

    DDPOptimizer.compile_fn, train_gpt2.train_step = watched_compile, watched


# The data


@on_linux
def test_private_memory_does_not_grow_with_the_data(tmp_path):
    """Fifty shards of 100 million tokens: 10 GB of zeros, of which the disk holds the headers."""
    header = np.lib.format.header_data_from_array_1_0(np.zeros(0, np.uint16)) | {"shape": (100_000_000,)}
    for i in range(51):
        with open(tmp_path / f"zeros_{'train' if i else 'val'}_{i:06d}.npy", "wb") as file:
            np.lib.format.write_array_header_1_0(file, header)
            file.truncate(file.tell() + 200_000_000)
    script = """
import sys
from support import shards
from train_gpt2 import DataLoaderLite
def private(): return int(next(l for l in open("/proc/self/status") if l.startswith("RssAnon")).split()[1]) / 1024
opened = shards.open_shards(sys.argv[1], "train")
loaders = [DataLoaderLite(opened[:n], 64, 1024, vocab_size=257, shuffle=True) for n in (1, 50)]
loaders[0].next_batch()
before = private()
rows = loaders[1].rows_per_epoch
for first in range(0, rows, rows // 200):
    loaders[1].batch(range(first, first + 64))
print(private() - before, rows)
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    grown, rows = map(float, done.stdout.split())
    assert rows == 50 * (99_999_999 // 1024)
    assert grown < 16  # MB, of 10,000


def test_the_next_update_is_read_while_this_one_computes(byte_shards, monkeypatch):
    """And no row twice: what was read ahead is what comes next, also after a jump."""
    opened, read = shards.open_shards(byte_shards, "train"), Counter()
    loader = DataLoaderLite(opened, 4, 16, vocab_size=257, grad_accum=3)
    row = loader._row
    monkeypatch.setattr(loader, "_row", lambda n: read.update([n]) or row(n))
    plain = DataLoaderLite(opened, 4, 16, vocab_size=257, grad_accum=3)
    for _ in range(4):
        for _ in range(3):
            assert torch.equal(loader.next_batch()[0], plain.next_batch()[0])
        loader.read_ahead(3)
    assert read == Counter(range(4 * 12 + 12))
    loader.reset(7)
    plain.reset(7)
    assert torch.equal(loader.next_batch()[1], plain.next_batch()[1])
    loader.read_ahead(2)
    loader.resize(2)
    assert loader.next_batch()[0].shape == (2, 16)


# The machine


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
@pytest.mark.parametrize("kept", [False, True])
def test_kept_memory_is_not_given_back_to_the_system_until_it_is_trimmed(kept):
    """Page faults of five blocks of 36 MB that are freed and allocated again and again."""
    script = f"""
import resource, torch
from support import speed
cpu = torch.device("cpu")
if {kept}: speed.keep_memory(cpu)
def use(): blocks = [torch.ones(9_000_000) for _ in range(5)]
def faults(): return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def held(): return int(next(l for l in open("/proc/self/status") if l.startswith("RssAnon")).split()[1]) / 1024
for _ in range(10): use()
before = faults()
for _ in range(5): use()
print(faults() - before)
before = held()
speed.trim_memory(cpu)
print(before - held())
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    faults, trimmed = map(float, done.stdout.split())
    assert (faults < 50_000) == kept  # 5 times 44,000 pages of 4 KB
    assert trimmed > 60 or not kept  # MB


def test_memory_is_left_alone_on_a_gpu(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: pytest.fail("mallopt was asked for"))
    speed.keep_memory(torch.device("cuda"))


@pytest.mark.parametrize("theirs, expected", [(None, 4), ("1", None), ("3", None)])
def test_processes_share_the_cores_unless_told_otherwise(monkeypatch, theirs, expected):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(speed, "_cores", lambda: 9)
    monkeypatch.setattr(speed, "_threads_were_set", lambda: theirs is not None)
    told = []
    monkeypatch.setattr(torch, "set_num_threads", told.append)
    speed.share_cores()
    assert told == ([expected] if expected else [])


@on_linux
@pytest.mark.parametrize("theirs", [None, "1"])
def test_torchruns_own_setting_of_threads_is_told_from_the_users(theirs, tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"} | {"PYTHONPATH": str(ROOT)}
    environment |= {"OMP_NUM_THREADS": theirs} if theirs else {}
    script = tmp_path / "told.py"
    script.write_text(
        "import os; from support import speed; "
        "os.write(1, f'{speed._threads_were_set()} {os.environ[\"OMP_NUM_THREADS\"]}\\n'.encode())"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(script)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [f"{theirs is not None} 1"] * 2


def test_kernels_of_attention_are_measured_and_those_that_cannot_are_left_out():
    kernels = {
        "flash": speed.SDPBackend.FLASH_ATTENTION,
        "math": speed.SDPBackend.MATH,
        "cuDNN": speed.SDPBackend.CUDNN_ATTENTION,  # not on a CPU
    }
    times = speed.time_attention(torch.device("cpu"), torch.float32, 2, 16, 32, kernels)
    assert list(times) == [speed.USUAL, "flash", "math"] and all(0 < s < math.inf for s in times.values())


@pytest.mark.parametrize(
    "times, first",
    [
        ({"flash": 1.0, "cuDNN": 0.8}, "cuDNN"),
        ({"flash": 0.8, "cuDNN": 1.0}, "flash"),
        ({"memory-efficient": 0.5}, "memory-efficient"),
        ({"flash": 0.98, "cuDNN": 1.1}, None),  # within the noise
        ({}, None),
    ],
)
def test_the_fastest_attention_is_taken_if_it_is_clearly_so(monkeypatch, times, first):
    monkeypatch.setattr(speed, "time_attention", lambda *shape: {speed.USUAL: 1.0} | times)
    said, usual = [], torch._C._get_sdp_priority_order()
    with speed._chosen:
        speed.choose_attention(torch.device("cuda"), torch.bfloat16, 12, 1024, 768, said.append)
        if first:
            kernel, enabled = speed.KERNELS[first], torch.backends.cuda
            assert torch._C._get_sdp_priority_order()[0] == int(kernel)
            assert (enabled.flash_sdp_enabled(), enabled.cudnn_sdp_enabled()) == (first == "flash", first == "cuDNN")
            assert enabled.mem_efficient_sdp_enabled() and enabled.math_sdp_enabled()  # for what it cannot do
            assert said[0].startswith(f"attention by {first}")
        else:
            assert torch._C._get_sdp_priority_order() == usual and not said
    assert torch._C._get_sdp_priority_order() == usual


def test_a_run_uses_what_is_there_for_speed(byte_shards, tmp_path, monkeypatch):
    called, read = [], []
    for name in ("keep_memory", "trim_memory"):
        monkeypatch.setattr(speed, name, lambda device, name=name: called.append(name))
    batch, mean = DataLoaderLite.batch, train_gpt2.Distributed.mean
    monkeypatch.setattr(DataLoaderLite, "batch", lambda loader, rows: read.append(rows) or batch(loader, rows))
    at_the_wait = []
    monkeypatch.setattr(train_gpt2.Distributed, "mean", lambda *args: at_the_wait.append(len(read)) or mean(*args))
    flags = "--max-steps 3 --val-every 0 --sample-every 2 --checkpoint-every 0".split()
    train_gpt2.train(config_of("--data", byte_shards, "--out", tmp_path / "run", *flags), ONE_PROCESS)
    assert called == ["keep_memory", "trim_memory", "trim_memory", "trim_memory"]  # at 0, 2 and the end
    assert at_the_wait == [4 + 4, 8 + 4, 12]  # the next update is read before the host waits for this one
    monkeypatch.setattr(speed, "time_attention", lambda *shape: called.append(shape[1:]) or {speed.USUAL: 1.0})
    for tf32, precision in ((True, "high"), (False, "highest")):
        speed.prepare(torch.device("cuda"), torch.bfloat16, tf32, TINY, print)
        assert torch.get_float32_matmul_precision() == precision
    assert called[4:] == [(torch.bfloat16, 2, 16, 32), "keep_memory"] * 2


def test_trainer_and_scripts_start_without_the_compiler():
    """Importing torch._dynamo takes longer than --help may."""
    script = "import sys, train_gpt2, hellaswag; print([n for n in ('torch._dynamo', 'torch._inductor') if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_second_run_finds_what_the_first_compiled(byte_shards, tmp_path):
    script = f"""
import torch, train_gpt2
from torch._dynamo.utils import counters
config = train_gpt2.configure({[*TINY_FLAGS, "--data", str(byte_shards), "--out", "run", "--max-steps", "1", "--val-every", "0", "--n-layer", "1", "--compile"]!r} + ["--resume", "auto"])[0]
train_gpt2.train(config, train_gpt2.Distributed.from_environment("cpu"))
print(counters["inductor"]["fxgraph_cache_miss"], counters["inductor"]["fxgraph_cache_hit"])
"""
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": str(ROOT)}
    environment |= {"OMP_NUM_THREADS": "1"}
    said = []
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        done = subprocess.run(
            [sys.executable, "-c", script], cwd=tmp_path / folder, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        said.append(list(map(int, done.stdout.splitlines()[-1].split())))
    assert said[0][0] > 0 and said[1][0] == 0 and said[1][1] > 0


# What a run tells of its time


def test_profile_records_the_updates_it_says(byte_shards, tmp_path):
    flags = [*TINY_FLAGS, "--data", byte_shards, "--out", "run", "--max-steps", 9, "--profile", 4]
    done = run_script("train_gpt2.py", *flags, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    events = json.loads(gzip.decompress((tmp_path / "run" / "trace.json.gz").read_bytes()))["traceEvents"]
    steps = {e["name"] for e in events if e.get("name", "").startswith("ProfilerStep#") and e.get("ph") == "X"}
    assert len(steps) == 4
    assert sum(e.get("name") == "aten::_fused_adamw_" and e.get("ph") == "X" for e in events) == 4 * 2  # two groups
    summary, kinds = [line for line in done.stdout.splitlines() if line.startswith("profile")][:2]
    assert summary.startswith("profile 4 updates, ") and "CPU at work" in summary
    shares = [float(word.rstrip("%,")) for word in kinds.split() if word.rstrip(",").endswith("%")]
    assert abs(sum(shares) - 100) < 0.5
    lines = done.stdout.splitlines()
    assert lines.index(summary) > next(i for i, line in enumerate(lines) if line.startswith("step     6"))
    plain = config_of("--data", byte_shards, "--out", tmp_path / "plain", "--max-steps", 9)
    train_gpt2.train(plain, ONE_PROCESS)
    assert (tmp_path / "plain" / "log.txt").read_bytes() == (tmp_path / "run" / "log.txt").read_bytes()
    assert not (tmp_path / "plain" / "trace.json.gz").exists()


def test_profile_says_if_the_run_is_too_short(byte_shards, tmp_path, capsys):
    for steps, expected in ((3, "profile nothing was recorded"), (5, "profile 2 updates")):
        flags = ("--data", byte_shards, "--out", tmp_path / str(steps), "--max-steps", steps, "--profile", 9)
        train_gpt2.train(config_of(*flags), ONE_PROCESS)
        assert expected in capsys.readouterr().out
        assert (tmp_path / str(steps) / "trace.json.gz").exists() == (steps == 5)


@pytest.mark.parametrize(
    "name, kind",
    [
        ("aten::addmm", "matrix products"),
        ("nvjet_tst_192x192_64x4_2x1_v_bz_coopA_TNN", "matrix products"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm>", "matrix products"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu_backward", "attention"),
        ("void pytorch_flash::flash_bwd_kernel", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma", "attention"),
        ("fmha_cutlassF_bf16_aligned_64x64_rf_sm80", "attention"),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL", "communication"),
        ("aten::_fused_adamw_", "optimizer"),
        ("triton_per_fused_native_layer_norm_1", profiling.REST),
        ("Memcpy HtoD (Pinned -> Device)", "copies"),
    ],
)
def test_kernels_are_sorted_by_what_they_are_for(name, kind):
    assert profiling.kind_of(name) == kind


def test_time_to_come_is_told_every_fifty_updates(byte_shards, tmp_path, monkeypatch):
    """By hand: the first update ends at 30 s, the next 50 take 2 s each with all that is between them, the others 1 s."""
    clock = iter([30.0] + [30.0 + 2 * n for n in range(1, 51)] + [130.0 + n for n in range(1, 351)])
    monkeypatch.setattr(report, "LOADED", 10.0)
    monkeypatch.setattr(report.time, "perf_counter", lambda: next(clock))
    config = config_of("--data", byte_shards, "--out", tmp_path / "run", "--max-steps", 401)
    run = train_gpt2.build(config, ONE_PROCESS)
    pace = report.Pace(run)
    said = {step: pace.lines(step, 1.0, 1e-3, 1.0, 0.5).splitlines()[1:] for step in range(401)}
    run.lock.__exit__(None, None, None)
    notes = {step: lines[0] for step, lines in said.items() if lines}
    assert list(notes) == [0, 50, 100, 150, 200, 250, 300, 350, 400]
    assert notes[0] == "note    20.0s from the start to the end of the first update"
    assert notes[50] == "note    13,056 of 102,656 tokens; 0:02:00 gone, about 0:11:40 to come"  # 350 at 2 s
    assert notes[100] == "note    25,856 of 102,656 tokens; 0:02:50 gone, about 0:07:30 to come"  # 300 at 1.5 s
    assert notes[300] == "note    77,056 of 102,656 tokens; 0:06:10 gone, about 0:01:40 to come"  # 100 at 1 s
    assert notes[400] == "note    102,656 of 102,656 tokens; 0:07:50 gone, about 0:00:00 to come"


def test_mfu_is_of_all_gpus_and_time_of_this_process(byte_shards, tmp_path, monkeypatch):
    """By hand: 256 tokens in 0.5 s on two GPUs of 10^9 FLOP/s each."""
    config = config_of("--data", byte_shards, "--out", tmp_path / "run", "--max-steps", 300)
    run = train_gpt2.build(config, ONE_PROCESS)
    run.lock.__exit__(None, None, None)
    monkeypatch.setattr(devices, "peak_flops", lambda device: 1e9)
    run.dist, run.first_step = SimpleNamespace(world=2, device=torch.device("cpu")), 100
    clock = iter([20.0, 30.0])
    monkeypatch.setattr(report, "LOADED", 0.0)
    monkeypatch.setattr(report.time, "perf_counter", lambda: next(clock))
    pace = report.Pace(run)
    flops = 6 * (257 * 32 + 63 * 32 + 2 * (12 * 32 * 32 + 13 * 32) + 2 * 32) + 12 * 2 * 32 * 16
    line = pace.lines(100, 1.0, 1e-3, 1.0, 0.5).splitlines()[0]
    assert line.endswith(f"| mfu: {256 / 0.5 * flops / 2e9:.1%}")
    note = pace.lines(150, 1.0, 1e-3, 1.0, 0.5).splitlines()[1]
    assert (
        note == "note    38,656 of 76,800 tokens; 0:00:30 since it was resumed, about 0:00:30 to come"
    )  # 149 at 0.2 s


def test_time_on_a_gpu_is_that_of_its_kernels():
    def event(key, device, us, annotation=False):
        return SimpleNamespace(key=key, device_type=device, self_device_time_total=us, is_user_annotation=annotation)

    kind = torch.autograd.DeviceType
    events = [
        event("aten::mm", kind.CPU, 70.0),  # launched the next one
        event("nvjet_tst", kind.CUDA, 70.0),
        event("Optimizer.step#AdamW.step", kind.CUDA, 30.0, annotation=True),
        event("multi_tensor_apply_kernel", kind.CUDA, 30.0),
    ]
    assert profiling.time_on_gpu(events) == {"nvjet_tst": 70.0, "multi_tensor_apply_kernel": 30.0}


def test_every_rung_of_the_ladder_trains_alike(bench, byte_shards):
    config = config_of("--data", byte_shards)
    plain = plain_losses(bench, config, 4, 5)
    features = [name for name in bench.FEATURES["cpu"] if name != "bf16"]
    for i in range(len(features)):
        assert np.abs(np.array(plain_losses(bench, config, 4, 5, features=set(features[: i + 1]))) - plain).max() < 1e-5


def test_the_benchmark_measures_plain_and_ours_on_the_same_data(tmp_path):
    flags = "small:4x64x2 --updates 2 --warm-up 1 --dtype fp32 --json out.json".split()
    done = run_script("benchmarks/bench_throughput.py", *flags, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    [result] = json.loads((tmp_path / "out.json").read_text())["results"]
    rows = {name: rounds[0] for name, rounds in result["rows"].items()}
    assert list(rows) == ["plain", "train_gpt2.py"]
    assert np.abs(np.array(rows["train_gpt2.py"]["losses"]) - rows["plain"]["losses"]).max() < 1e-5
    everything = {
        "model": "GPT",
        "head": 320,
        "chunks": True,
        "kept memory": True,
        "fused": True,
        "dtype": "torch.float32",
    }
    nothing = {"model": "PlainGPT", "head": 257, "chunks": False, "kept memory": False, "fused": False}
    assert rows["train_gpt2.py"]["used"] == everything and rows["plain"]["used"] == everything | nothing
    for name, row in rows.items():
        assert row["tok_s"] > 0 and row["peak_gb"] > 0.1 and row["mfu"] is None
        assert row["tok_s"] * row["ms"] / 1e3 <= 4 * 64 * 2, "the loop takes no less time than its updates"
        assert done.stdout.count(f"| {name} |") == 1
