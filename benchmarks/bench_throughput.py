"""How fast training is: the plain PyTorch loop against train_gpt2.py, in turn, on the same data and shapes.

    python benchmarks/bench_throughput.py                                  # GPT-2 124M and the demo's model
    python benchmarks/bench_throughput.py --ladder gpt2:4x1024             # from the plain loop, one thing added at a time
    python benchmarks/bench_throughput.py --ablate gpt2:4x1024             # from train_gpt2.py, one thing taken away
    python benchmarks/bench_throughput.py --processes 8 gpt2:64x1024       # a node of 8 GPUs, through torchrun

A setting is MODEL:BxT or MODEL:BxTxA, with rows B of T tokens and A micro-steps to an update. Every row of the table is a
process of its own. tok/s counts all that the loop does between two updates (console, log, checks), which is the same loop
for all rows: they differ in model, optimizer and update. "loader" is the share of an update that reads its data, "between
updates" the share of the time outside of them; "share of a matmul" is the arithmetic of the model, by GPT.flops_per_token,
against a product of two 4096 x 4096 matrices in that process (1024 x 1024 for demo and small).
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

DEMO = dict(n_layer=3, n_head=4, n_embd=128)
SMALL = dict(n_layer=2, n_head=2, n_embd=32)
# What makes train_gpt2.py fast, in the order of the ladder. The last rung is its own train_step, with all of them.
FEATURES = {
    "cuda": ["TF32", "bf16", "compiled", "flash", "padded vocabulary", "fused AdamW", "chunked loss"],
    "cpu": ["bf16", "flash", "padded vocabulary", "fused AdamW", "chunked loss", "kept memory"],
}
OURS = "train_gpt2.py"


# -----------------------------------------------------------------------------
# The plain loop


def plain_gpt(sizes: Any, features: set[str]) -> Any:
    """GPT-2 as everybody writes it first, with the parameters' names of train_gpt2.GPT. `sizes` is a GPTConfig."""
    import torch
    from torch import nn
    from torch.nn import functional as F

    from support.loss import chunked_cross_entropy

    C, T, nh = sizes.n_embd, sizes.block_size, sizes.n_head
    vocab_size = sizes.padded_vocab_size if "padded vocabulary" in features else sizes.vocab_size

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.c_attn, self.c_proj = nn.Linear(C, 3 * C), nn.Linear(C, C)
            self.register_buffer("mask", torch.ones(T, T, dtype=torch.bool).tril(), persistent=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            B, T, _ = x.shape
            q, k, v = (t.view(B, T, nh, C // nh).transpose(1, 2) for t in self.c_attn(x).split(C, dim=2))
            if "flash" in features:
                y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            else:
                scores = q @ k.transpose(-2, -1) / math.sqrt(C // nh)
                y = F.softmax(scores.masked_fill(~self.mask[:T, :T], -math.inf), dim=-1) @ v
            return self.c_proj(y.transpose(1, 2).reshape(B, T, C))

    class MLP(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.c_fc, self.c_proj = nn.Linear(C, 4 * C), nn.Linear(4 * C, C)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ln_1, self.attn, self.ln_2, self.mlp = nn.LayerNorm(C), Attention(), nn.LayerNorm(C), MLP()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x + self.attn(self.ln_1(x))
            return x + self.mlp(self.ln_2(x))

    class PlainGPT(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            blocks = nn.ModuleList(Block() for _ in range(sizes.n_layer))
            wte, wpe = nn.Embedding(vocab_size, C), nn.Embedding(T, C)
            self.transformer = nn.ModuleDict(dict(wte=wte, wpe=wpe, h=blocks, ln_f=nn.LayerNorm(C)))
            self.lm_head = nn.Linear(C, vocab_size, bias=False)
            self.lm_head.weight = wte.weight

        def forward(self, idx: torch.Tensor, targets: torch.Tensor) -> tuple[None, torch.Tensor]:
            t = self.transformer
            x = t.wte(idx) + t.wpe(torch.arange(idx.size(1), device=idx.device))
            for block in t.h:
                x = block(x)
            x = t.ln_f(x)
            if "chunked loss" in features:
                x = x.flatten(0, 1)
                return None, chunked_cross_entropy(x, self.lm_head.weight, targets.flatten(), sizes.vocab_size)
            logits = self.lm_head(x)[..., : sizes.vocab_size]  # all of them
            return None, F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

        def take(self, model: nn.Module) -> PlainGPT:
            """The weights of a train_gpt2.GPT."""
            theirs = model.state_dict()
            self.load_state_dict({name: theirs[name][: len(own)] for name, own in self.state_dict().items()})
            return self

    return PlainGPT()


def plain_optimizer(
    model: Any, features: set[str], weight_decay: float, lr: float, betas: tuple[float, float], *_: Any
) -> Any:
    import torch

    decayed, others = [p for p in model.parameters() if p.dim() >= 2], [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=1e-8, fused=True if "fused AdamW" in features else None)


def plain_update(model: Any, optimizer: Any, batches: list, amp: Any, lr: float) -> tuple[float, float]:
    """One update from these micro-batches; its mean loss and its gradient norm."""
    import torch

    optimizer.zero_grad()
    for group in optimizer.param_groups:
        group["lr"] = lr
    mean = 0.0
    for i, (x, y) in enumerate(batches):
        if hasattr(model, "require_backward_grad_sync"):
            model.require_backward_grad_sync = i == len(batches) - 1
        with amp:
            _, loss = model(x, y)
        loss = loss / len(batches)
        mean += loss.item()
        loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return mean, norm.item()


# -----------------------------------------------------------------------------
# One row of the table, in a process of its own


def worker(job: dict) -> None:
    """Trains as `job` says and prints what was measured, as JSON."""
    import torch

    import train_gpt2
    from support import devices, loss, speed

    features, taken_away = set(job["features"]), set(job["without"])
    dtype = "bf16" if "bf16" in features else "fp32"
    every = dict.fromkeys(("val_every", "hellaswag_every", "sample_every", "checkpoint_every"), 0)
    with tempfile.TemporaryDirectory() as out, contextlib.ExitStack() as patches:
        dist = train_gpt2.Distributed.from_environment(job["device"])
        config = train_gpt2.TrainConfig(
            data=job["data"], out=out, batch_size=job["B"], block_size=job["T"], **job["sizes"], **every,
            total_batch_size=job["B"] * job["T"] * job["A"] * dist.world, dtype=dtype, compile="compiled" in features,
            max_steps=job["warm_up"] + job["updates"] + 1, warmup_steps=10,
        )  # fmt: skip
        words = SimpleNamespace(name="bytes", vocab_size=job["vocab_size"], eot=0)  # no vocabulary is needed
        train_gpt2.get_tokenizer = lambda name: words
        chunks = patches.enter_context(patch.object(loss, "rows_of_chunk", side_effect=loss.rows_of_chunk))
        kept = patches.enter_context(patch.object(speed.ctypes, "CDLL", side_effect=speed.ctypes.CDLL))
        without(taken_away, patches)
        if job["row"] != OURS and not taken_away:
            make_plain(features)
        update, loaded, times = train_gpt2.train_step, train_gpt2.DataLoaderLite.batch, []
        loading = [0.0]

        def timed_update(run: Any, lr: float) -> tuple[float, float]:
            started, loading[0] = time.perf_counter(), 0.0
            answer = update(run, lr)
            times.append((started, time.perf_counter(), loading[0], answer[0]))
            if len(times) == job["warm_up"] and dist.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            return answer

        def timed_batch(loader: Any, rows: Any) -> Any:
            started = time.perf_counter()
            batch = loaded(loader, rows)
            loading[0] += time.perf_counter() - started
            return batch

        train_gpt2.train_step, train_gpt2.DataLoaderLite.batch = timed_update, timed_batch
        with contextlib.redirect_stdout(io.StringIO()):
            run = train_gpt2.train(config, dist)
        on_gpu = dist.device.type == "cuda"
        peak = torch.cuda.max_memory_allocated() if on_gpu else peak_of_process()
        flops = config.total_batch_size / dist.world * run.raw_model.flops_per_token()
        measured = times[job["warm_up"] :]  # and of the last one only when it begins
        whole = median(b[0] - a[0] for a, b in pairwise(measured))
        measured.pop()
        answer = {
            "tok_s": config.total_batch_size / whole,
            "ms": 1e3 * median(b - a for a, b, *_ in measured),
            "outside": 1 - median(b - a for a, b, *_ in measured) / whole,
            "loader": median(t[2] / (t[1] - t[0]) for t in measured),
            "mfu": flops / whole / known if (known := devices.peak_flops(dist.device)) else None,
            "matmul": flops / whole / matmul(run.dtype, dist.device, 4096 if config.n_layer is None else 1024),
            "peak_gb": peak / 1e9,
            "first_s": times[0][1] - times[0][0],
            "losses": [t[3] for t in times],
            "used": {
                "model": type(run.raw_model).__name__,
                "head": len(run.raw_model.lm_head.weight),
                "chunks": chunks.call_count > 0,
                "kept memory": kept.call_count > 0,
                "fused": run.optimizer.defaults["fused"] is True,
                "dtype": str(run.dtype),
            },
            "device": torch.cuda.get_device_name() if on_gpu else f"CPU, {torch.get_num_threads()} threads",
            "torch": torch.__version__,
        }
        dist.close()
    if dist.rank == 0:
        print(json.dumps(answer), flush=True)


def peak_of_process() -> float:
    """Bytes that this process had at most. Linux's ru_maxrss would count the process that started it."""
    status = Path("/proc/self/status")
    if status.exists():
        return 1024 * float(next(line for line in status.read_text().splitlines() if "VmHWM" in line).split()[1])
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if platform.system() == "Darwin" else 1024)


def make_plain(features: set[str]) -> None:
    """Has train_gpt2.py's run trained by the plain loop, on the batches of its loader."""
    import torch

    import train_gpt2
    from support import speed

    def first_model(*args: Any) -> Any:
        ours = first(*args)
        model = plain_gpt(ours.config, features).take(ours)
        flops = ours.flops_per_token()  # not the method, with which our model would stay in memory
        model.config, model.flops_per_token = ours.config, lambda: flops
        model.configure_optimizers = lambda *how: plain_optimizer(model, features, *how)
        return model

    def update(run: Any, lr: float) -> tuple[float, float]:
        batches = [run.loader.next_batch() for _ in range(run.loader.grad_accum)]
        return plain_update(run.ddp_model, run.optimizer, batches, run.amp, lr)

    first, train_gpt2.first_model, train_gpt2.train_step = train_gpt2.first_model, first_model, update
    speed.choose_attention = lambda *_: None
    if "kept memory" not in features:
        speed.keep_memory = lambda device: None
    if "TF32" not in features:
        torch.set_float32_matmul_precision = lambda precision: None


def without(taken_away: set[str], patches: contextlib.ExitStack) -> None:
    """Switches these features of train_gpt2.py off."""
    import torch
    from torch.nn import functional as F

    import train_gpt2
    from support import devices, speed

    if "TF32" in taken_away:
        torch.set_float32_matmul_precision = lambda precision: None
    if "flash" in taken_away:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        patches.enter_context(sdpa_kernel(SDPBackend.MATH))
        speed.choose_attention = lambda *_: None
    if "padded vocabulary" in taken_away:
        train_gpt2.GPTConfig.padded_vocab_size = property(lambda config: config.vocab_size)
    if "fused AdamW" in taken_away:
        train_gpt2.GPT.configure_optimizers = lambda model, *how: plain_optimizer(model, set(), *how)
        devices.step_if = lambda optimizer, wanted: optimizer.step()
    if "chunked loss" in taken_away:
        train_gpt2.chunked_cross_entropy = lambda x, w, y, V: F.cross_entropy(F.linear(x, w)[:, :V].float(), y)
    if "kept memory" in taken_away:
        speed.keep_memory = lambda device: None
    if "measured attention" in taken_away:
        speed.choose_attention = lambda *_: None


def matmul(dtype: Any, device: Any, n: int) -> float:
    """FLOP/s of a product of two n x n matrices, the best of ten."""
    import torch

    from support import devices

    synchronize = devices.synchronizer(device)
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    out, best = torch.empty_like(a), math.inf
    for _ in range(10):
        synchronize()
        started = time.perf_counter()
        torch.mm(a, b.T, out=out)
        synchronize()
        best = min(best, time.perf_counter() - started)
    return 2 * n**3 / best


# -----------------------------------------------------------------------------
# The table


def rows_of(args: argparse.Namespace, device: str) -> Iterator[tuple[str, list[str], list[str]]]:
    """The name of each row, the features it has, and those that were taken away."""
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
    yield OURS, features, []
    if args.ablate:
        for feature in features + ["measured attention"] * (device == "cuda"):
            yield f"- {feature}", [f for f in features if f != feature], [feature]


def measure(job: dict, processes: int) -> dict:
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"] * (processes > 1)
    command = [sys.executable, *torchrun, __file__, "--worker", json.dumps(job)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"the process of {job['row']} failed")
    return json.loads(done.stdout.splitlines()[-1])


def shards(folder: str, vocab_size: int, tokens: int = 20_000_000) -> str:
    """A folder with a shard of random tokens, the more frequent the lower: what they are does not matter for speed."""
    ids = (vocab_size * np.random.default_rng(1).random(tokens) ** 3).astype(np.uint16)
    np.save(Path(folder) / "random_train_000000.npy", ids)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", nargs="*", metavar="MODEL:BxT[xA]", help="gpt2, gpt2-medium, ..., demo or small")
    parser.add_argument("--ladder", action="store_true", help="add one thing at a time to the plain loop")
    parser.add_argument("--ablate", action="store_true", help="take one thing at a time away from train_gpt2.py")
    parser.add_argument("--dtype", choices=("auto", "fp32", "bf16"), default="auto", help="of the fast rows")
    parser.add_argument("--compile", action="store_true", help="compile on a CPU, too")
    parser.add_argument("--data", metavar="DIR", help="shards of GPT-2 tokens (default: random ones)")
    parser.add_argument(
        "--updates", type=int, help="measured in each process (default: 20 on CUDA, 3 on a CPU; of demo and small 200)"
    )
    parser.add_argument(
        "--warm-up", type=int, help="before them (default: 5 on CUDA, 1 on a CPU; of demo and small 20)"
    )
    parser.add_argument("--rounds", type=int, default=1, help="of all rows in turn; their medians count (default: 1)")
    parser.add_argument("--processes", type=int, default=1, help="on this node, through torchrun (default: 1)")
    parser.add_argument("--json", metavar="FILE", help="write all that was measured")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return worker(json.loads(args.worker))

    probe = "import torch; from support import devices as d; t = d.pick_device_type('auto'); print(t, d.pick_dtype('auto', torch.device(t)))"
    answer = subprocess.run([sys.executable, "-c", probe], stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT)
    device, dtype = answer.stdout.split()  # found by another process, for torch would count as memory of the workers
    if args.dtype == "auto":
        args.dtype = "bf16" if dtype == "torch.bfloat16" else "fp32"
    on_gpu, results = device == "cuda", []
    with tempfile.TemporaryDirectory() as folder:
        for setting in args.settings or (["gpt2:64x1024"] if on_gpu else ["gpt2:4x1024", "demo:16x64"]):
            model, _, sizes = setting.partition(":")
            B, T, A = ([int(n) for n in sizes.split("x")] + [1])[:3]
            small = {"demo": DEMO, "small": SMALL}.get(model)
            vocab_size = 257 if small else 50257
            job = {
                "B": B,
                "T": T,
                "A": A,
                "sizes": small or {"model": model},
                "device": device,
                "vocab_size": vocab_size,
            }
            job["data"] = args.data or shards(folder, vocab_size)
            job["updates"] = args.updates or (20 if on_gpu else 3 if small is None else 200)
            job["warm_up"] = args.warm_up or (5 if on_gpu else 1 if small is None else 20)
            rows = list(rows_of(args, device))
            measured: dict[str, list[dict]] = {name: [] for name, *_ in rows}
            for _ in range(args.rounds):
                for name, features, taken_away in rows:
                    measured[name].append(
                        measure(job | {"row": name, "features": features, "without": taken_away}, args.processes)
                    )
                    print(f"  {setting} {name}: {measured[name][-1]['tok_s']:,.0f} tok/s", file=sys.stderr, flush=True)
            results.append({"setting": setting, "processes": args.processes, "rows": measured})
            report(setting, args, measured)
    if args.json:
        Path(args.json).write_text(json.dumps({"command": sys.argv, "results": results}, indent=1))


def report(setting: str, args: argparse.Namespace, measured: dict[str, list[dict]]) -> None:
    first = next(iter(measured.values()))[0]
    print(f"\n{setting}, {args.processes} x {first['device']}, torch {first['torch']}, {args.dtype} where not plain\n")
    print("| | tok/s | | ms per update | MFU | share of a matmul | peak memory, GB | | loader | between updates |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    base = None
    for name, rounds in measured.items():
        row = {key: median(r[key] for r in rounds) for key in ("tok_s", "ms", "matmul", "peak_gb", "loader", "outside")}
        base = base or row
        mfu = f"{median(r['mfu'] for r in rounds):.1%}" if rounds[0]["mfu"] else "-"
        print(
            f"| {name} | {row['tok_s']:,.0f} | {row['tok_s'] / base['tok_s']:.2f}x | {row['ms']:,.1f} | {mfu} | {row['matmul']:.0%} "
            f"| {row['peak_gb']:.2f} | {row['peak_gb'] / base['peak_gb']:.2f}x | {row['loader']:.2%} | {max(0, row['outside']):.2%} |"
        )


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
