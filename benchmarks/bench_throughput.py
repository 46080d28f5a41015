"""Training speed: the plain PyTorch loop against train_gpt2.py, in turn, on the same data and shapes.

    python benchmarks/bench_throughput.py                                  # GPT-2 124M and the demo's model
    python benchmarks/bench_throughput.py --ladder gpt2:4x1024             # add one feature at a time to the plain loop
    python benchmarks/bench_throughput.py --ablate gpt2:4x1024             # remove one feature at a time from train_gpt2.py
    python benchmarks/bench_throughput.py --processes 8 gpt2:64x1024x8     # a node of 8 GPUs, through torchrun

A setting is MODEL:BxT or MODEL:BxTxA: rows B of T tokens, and A micro-steps per step. Each row of the table runs in its own
process. tok/s counts everything that the loop does between two steps (console, log, checks); that loop is the same for all
rows, which differ in model, optimizer and step. "loader" is the fraction of a step that reads its data, "between steps" the
fraction of the time outside of steps. "matmul utilisation" compares the model's arithmetic, by GPT.flops_per_token, with
products of large matrices in the same process. A row that does not fit into a GPU's memory runs with fewer rows, and says so.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

if TYPE_CHECKING:  # torch is imported by the worker processes only
    import torch

    from support.checkpoints.state import TrainState
    from support.runtime.distributed import Distributed
    from train_gpt2 import TrainConfig

MODELS = {"demo": dict(n_layer=3, n_head=4, n_embd=128), "small": dict(n_layer=2, n_head=2, n_embd=32)}
# What makes train_gpt2.py fast, in the order of the ladder. Its own train_step, with all of them, is the last row.
FEATURES = {
    "cuda": ["TF32", "bf16", "compiled", "flash", "padded vocabulary", "fused AdamW", "chunked loss"],
    "cpu": ["bf16", "flash", "padded vocabulary", "fused AdamW", "chunked loss", "kept memory"],
}
OURS = "train_gpt2.py"
RECIPE = "build-nanogpt's recipe"  # TF32, bf16, compiled, flash attention, padded vocabulary, fused AdamW


# -----------------------------------------------------------------------------
# One row of the table, in its own process


def worker(job: dict[str, Any]) -> None:
    """Trains as `job` says and prints what was measured, as JSON."""
    import torch

    import train_gpt2
    from support.optim import loss
    from support.runtime import devices
    from support.runtime.distributed import Distributed

    features, removed = set(job["features"]), set(job["without"])
    off = dict.fromkeys(("val_every", "hellaswag_every", "sample_every", "checkpoint_every"), 0)
    with tempfile.TemporaryDirectory() as out, contextlib.ExitStack() as patches:
        dist = Distributed.from_environment().with_device(job["device"])
        flags = dict(
            data=job["data"], out=out, batch_size=job["B"], block_size=job["T"], **job["sizes"], **off,
            total_batch_size=job["B"] * job["T"] * job["A"] * dist.world_size, compile="compiled" in features,
            dtype="bf16" if "bf16" in features else "fp32", max_steps=job["warm_up"] + job["steps"] + 1, warmup_steps=10,
            **job.get("flags", {}),
        )  # fmt: skip
        config = train_gpt2.resolve(flags, dist.device, dist.world_size)
        # needs no vocabulary file
        tokenizer = SimpleNamespace(name="bytes", vocab_size=job["vocab_size"], eot=0, count_bytes=len)
        train_gpt2.shards.read_tokenizer = lambda data: tokenizer
        chunked, product = [], loss._fp32_product  # not counted by a mock, which would keep the tensors
        loss._fp32_product = lambda *tensors: chunked.append(True) or product(*tensors)
        kept = patches.enter_context(patch.object(devices.ctypes, "CDLL", side_effect=devices.ctypes.CDLL))
        remove_features(removed, patches)
        if job["row"] != OURS and not removed:
            make_plain(features)
        step, loaded, times = train_gpt2.train_step, train_gpt2.DataLoaderLite.batch, []
        loading, rows = [0.0], [0]

        def timed_step(*args: Any) -> tuple[float, float]:
            started, loading[0] = time.perf_counter(), 0.0
            answer = step(*args)
            times.append((started, time.perf_counter(), loading[0], answer[0]))
            rows[0] = args[2].B
            if len(times) == job["warm_up"] and dist.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            return answer

        def timed_batch(loader: Any, rows: Any) -> Any:
            started = time.perf_counter()
            batch = loaded(loader, rows)
            loading[0] += time.perf_counter() - started
            return batch

        train_gpt2.train_step, train_gpt2.DataLoaderLite.batch = timed_step, timed_batch
        with contextlib.redirect_stdout(io.StringIO()) as output:
            state = train_gpt2.train(config, dist)
        if job.get("trace"):
            shutil.copy(Path(out) / "trace.json.gz", job["trace"])
        answer = summarize(job, config, dist, state, times, bool(chunked), kept.call_count > 0)
        answer |= {"B": rows[0], "output": output.getvalue()}
        dist.close()
    if dist.rank == 0:
        print(json.dumps(answer), flush=True)


def summarize(
    job: dict[str, Any], config: TrainConfig, dist: Distributed, state: TrainState, times: list[tuple], chunks: bool,
    kept_memory: bool,
) -> dict[str, Any]:  # fmt: skip
    """What the table shows of a run, and which features it really used. `times`: start, end, loader's part and loss."""
    import torch

    from support.runtime import devices

    on_gpu, model, dtype = dist.device.type == "cuda", state.model, devices.DTYPES[config.dtype]
    peak = torch.cuda.max_memory_allocated() if on_gpu else peak_memory_of_process()  # before matmul_flops adds to it
    flops = config.total_batch_size / dist.world_size * model.flops_per_token()
    measured = times[job["warm_up"] :]
    whole = median(b[0] - a[0] for a, b in pairwise(measured))  # from the start of a step to that of the next
    measured.pop()
    within = median(end - start for start, end, *_ in measured)
    known = devices.peak_flops(dist.device)
    return {
        "tok_s": config.total_batch_size / whole,
        "ms": 1e3 * within,
        "outside": 1 - within / whole,
        "loader": median(loading / (end - start) for start, end, loading, _ in measured),
        "mfu": flops / whole / known if known else None,
        "matmul": flops / whole / matmul_flops(dtype, dist.device, job["row_model"] in MODELS),
        "peak_gb": peak / 1e9,
        "first_s": times[0][1] - times[0][0],
        "losses": [loss for *_, loss in times],
        "used": {
            "model": type(model).__name__,
            "head": len(model.lm_head.weight),
            "chunks": chunks,
            "kept memory": kept_memory,
            "fused": state.optimizer.defaults["fused"] is True,
            "dtype": str(dtype),
        },
        "device": torch.cuda.get_device_name() if on_gpu else f"CPU, {torch.get_num_threads()} threads",
        "torch": torch.__version__,
    }


def peak_memory_of_process() -> float:
    """Peak memory of this process, in bytes. Linux's ru_maxrss would include the process that started it."""
    status = Path("/proc/self/status")
    if status.exists():
        return 1024 * float(next(line for line in status.read_text().splitlines() if "VmHWM" in line).split()[1])
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if platform.system() == "Darwin" else 1024)


def make_plain(features: set[str]) -> None:
    """Makes train_gpt2.py train the plain model with the plain step, on the batches of its own loader."""
    import torch
    from plain_loop import PlainGPT, plain_optimizer, plain_step

    import train_gpt2
    from support.runtime import devices

    def initial_model(*args: Any, **options: Any) -> Any:
        ours = original(*args, **options)
        model = PlainGPT(ours.config, features).copy_weights(ours)
        flops = ours.flops_per_token()  # the number, because the method would keep our model in memory
        model.config, model.flops_per_token, model.logits = ours.config, lambda: flops, None  # nothing is scored
        model.configure_optimizers = lambda *how: plain_optimizer(model, features, *how)
        return model

    def step(model: Any, state: Any, loader: Any, config: Any, stop: Any, amp: Any) -> tuple[float, float]:
        batches = [loader.next_batch() for _ in range(loader.grad_accum)]
        return plain_step(model, state.optimizer, batches, amp, state.optimizer.param_groups[0]["lr"])

    original, train_gpt2.initial_model, train_gpt2.train_step = train_gpt2.initial_model, initial_model, step
    if "kept memory" not in features:
        devices.keep_memory = lambda device: None
    if "TF32" not in features:
        torch.set_float32_matmul_precision = lambda precision: None


def remove_features(removed: set[str], patches: contextlib.ExitStack) -> None:
    """Switches these features of train_gpt2.py off."""
    import torch
    from plain_loop import plain_optimizer
    from torch.nn import functional as F

    import train_gpt2
    from support.runtime import devices

    if "TF32" in removed:
        torch.set_float32_matmul_precision = lambda precision: None
    if "flash" in removed:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        patches.enter_context(sdpa_kernel(SDPBackend.MATH))
    if "padded vocabulary" in removed:
        train_gpt2.GPTConfig.padded_vocab_size = property(lambda config: config.vocab_size)
    if "fused AdamW" in removed:
        train_gpt2.GPT.configure_optimizers = lambda model, *how: plain_optimizer(model, set(), *how)
    if "chunked loss" in removed:
        train_gpt2.chunked_cross_entropy = lambda x, w, y, V: F.cross_entropy(F.linear(x, w)[:, :V].float(), y)
    if "kept memory" in removed:
        devices.keep_memory = lambda device: None
    if "cuDNN" in removed:
        torch.backends.cuda.enable_cudnn_sdp(False)
    if "mix-order reductions" in removed:
        from torch._inductor import config

        config.triton.mix_order_reduction = False
    if "untuned loss" in removed:
        from support.optim import loss

        tuned = {"coordinate_descent_tuning": True}
        loss._compiled = cache(lambda function: torch.compile(function, dynamic=False, options=tuned))


def matmul_flops(dtype: torch.dtype, device: torch.device, small: bool) -> float:
    """FLOP/s of a product of two square matrices, the best of several measurements."""
    import torch

    from support.runtime import devices

    n, repeats = (8192, 10) if device.type == "cuda" else (1024 if small else 4096, 1)  # a sync costs a GPU 0.1 ms
    synchronize = partial(devices.synchronize, device)
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    out, best = torch.empty_like(a), math.inf
    for _ in range(10):
        synchronize()
        started = time.perf_counter()
        for _ in range(repeats):
            torch.mm(a, b.T, out=out)
        synchronize()
        best = min(best, (time.perf_counter() - started) / repeats)
    return 2 * n**3 / best


# -----------------------------------------------------------------------------
# The table


def rows_of(args: argparse.Namespace, device: str) -> Iterator[tuple[str, list[str], list[str]]]:
    """The name of each row, the features that it has, and those that were removed."""
    features = [f for f in FEATURES[device] if f != "bf16" or args.dtype == "bf16"]
    if args.compile and "compiled" not in features:
        features = [*features, "compiled"]
    if args.ladder:
        yield "plain", [], []
        for i, feature in enumerate(features):
            yield f"+ {feature}", features[: i + 1], []
    elif not args.ablate:
        yield "plain", [], []
        if args.dtype == "bf16":
            yield "plain, bf16", ["bf16"], []
        if device == "cuda":
            yield RECIPE, [f for f in features if f != "chunked loss"], []
    yield OURS, features, []
    if args.ablate:
        for feature in features:
            yield f"- {feature}", [f for f in features if f != feature], [feature]


def measure(job: dict[str, Any], processes: int) -> dict[str, Any]:
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"] * (processes > 1)
    command = [sys.executable, *torchrun, __file__, "--worker", json.dumps(job)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"the process of {job['row']} failed")
    return json.loads(done.stdout.splitlines()[-1])


def random_shard(folder: str, vocab_size: int, tokens: int = 20_000_000) -> str:
    """A folder with a shard of random tokens, low ids more often; which tokens they are does not matter for speed."""
    ids = (vocab_size * np.random.default_rng(1).random(tokens) ** 3).astype(np.uint16)
    np.save(Path(folder) / "random_train_000000.npy", ids)
    return folder


def device_and_dtype() -> tuple[str, str]:
    """What train_gpt2.py would choose; asked of another process, because torch would count as memory of the workers."""
    probe = (
        "import torch; from support.runtime import devices as d; t = d.pick_device_type('auto'); "
        "print(t, d.pick_dtype('auto', torch.device(t)))"
    )
    answer = subprocess.run([sys.executable, "-c", probe], stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT)
    device, dtype = answer.stdout.split()
    return device, dtype


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", nargs="*", metavar="MODEL:BxT[xA]", help="gpt2, gpt2-medium, ..., demo or small")
    parser.add_argument("--ladder", action="store_true", help="add one feature at a time to the plain loop")
    parser.add_argument("--ablate", action="store_true", help="remove one feature at a time from train_gpt2.py")
    parser.add_argument("--dtype", choices=("auto", "fp32", "bf16"), default="auto", help="of the fast rows")
    parser.add_argument("--compile", action="store_true", help="compile on a CPU, too")
    parser.add_argument("--data", metavar="DIR", help="shards of GPT-2 tokens (default: random ones)")
    parser.add_argument("--steps", type=int, help="measured per process (default: 10 on CUDA, 3 on a CPU; demo and small 200)")  # fmt: skip
    parser.add_argument("--warm-up", type=int, help="steps before them (default: 3 on CUDA, 1 on a CPU; demo and small 20)")  # fmt: skip
    parser.add_argument("--rounds", type=int, default=1, help="of all rows in turn; medians are printed (default: 1)")
    parser.add_argument("--processes", type=int, default=1, help="on this node, through torchrun (default: 1)")
    parser.add_argument("--json", metavar="FILE", help="write everything that was measured")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return worker(json.loads(args.worker))

    device, dtype = device_and_dtype()
    if args.dtype == "auto":
        args.dtype = "bf16" if dtype == "bf16" else "fp32"
    on_gpu, results = device == "cuda", []
    with tempfile.TemporaryDirectory() as folder:
        for setting in args.settings or (["gpt2:64x1024x8"] if on_gpu else ["gpt2:4x1024", "demo:16x64"]):
            model, _, shape = setting.partition(":")
            B, T, A = ([int(n) for n in shape.split("x")] + [1])[:3]
            vocab_size = 257 if model in MODELS else 50257
            job: dict[str, Any] = {
                "B": B,
                "T": T,
                "A": A,
                "device": device,
                "vocab_size": vocab_size,
                "row_model": model,
            }
            job["sizes"] = MODELS.get(model) or {"model": model}
            job["data"] = args.data or random_shard(folder, vocab_size)
            job["steps"] = args.steps or (10 if on_gpu else 200 if model in MODELS else 3)
            job["warm_up"] = args.warm_up or (3 if on_gpu else 20 if model in MODELS else 1)
            rows = list(rows_of(args, device))
            measured: dict[str, list[dict[str, Any]]] = {name: [] for name, *_ in rows}
            for _ in range(args.rounds):
                for name, features, removed in rows:
                    row = job | {"row": name, "features": features, "without": removed}
                    measured[name].append(measure(row, args.processes))
                    print(f"  {setting} {name}: {measured[name][-1]['tok_s']:,.0f} tok/s", file=sys.stderr, flush=True)
            results.append({"setting": setting, "processes": args.processes, "rows": measured})
            report(setting, args, measured)
    if args.json:
        Path(args.json).write_text(json.dumps({"command": sys.argv, "results": results}, indent=1))


def report(setting: str, args: argparse.Namespace, measured: dict[str, list[dict[str, Any]]]) -> None:
    first = next(iter(measured.values()))[0]
    print(f"\n{setting}, {args.processes} x {first['device']}, torch {first['torch']}, {args.dtype} where not plain\n")
    print("| | tok/s | | ms per step | MFU | matmul utilisation | peak memory, GB | | loader | between steps |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    base: dict[str, float] = {}
    for name, rounds in measured.items():
        row = {key: median(r[key] for r in rounds) for key in ("tok_s", "ms", "matmul", "peak_gb", "loader", "outside")}
        base = base or row
        if (B := rounds[0]["B"]) != int(setting.partition(":")[2].split("x")[0]):
            name += f" ({B} rows)"
        mfu = f"{median(r['mfu'] for r in rounds):.1%}" if rounds[0]["mfu"] else "-"
        print(
            f"| {name} | {row['tok_s']:,.0f} | {row['tok_s'] / base['tok_s']:.2f}x | {row['ms']:,.1f} | {mfu} "
            f"| {row['matmul']:.0%} | {row['peak_gb']:.2f} | {row['peak_gb'] / base['peak_gb']:.2f}x "
            f"| {row['loader']:.2%} | {max(0, row['outside']):.2%} |"
        )


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
