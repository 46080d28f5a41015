"""--recipe fast against GPT-2's recipe: the loss for equal tokens, and the tokens for an equal loss.

    python benchmarks/bench_recipes.py --data SHARDS --out runs                   # small: 4 layers, 256 channels
    python benchmarks/bench_recipes.py --data SHARDS --out runs --scale medium    # 8 layers, 512 channels
    python benchmarks/bench_recipes.py --data SHARDS --out runs --variants        # change one thing in fast at a time
    python benchmarks/bench_recipes.py --overhead                                 # what a step of Muon costs at 124M

First the learning rate of the baseline (AdamW, cosine) is tuned with the first seed, with a complete run for each rate. Then
its best rate, the recipe's own rate and `--recipe fast`, limited to fractions of the tokens, run with all seeds; every run
has a schedule of its own length. A run is a process of train_gpt2.py and a folder in --out. Finished runs are not repeated,
so the command can be interrupted, and repeated with more seeds, rates or fractions.
"""

from __future__ import annotations

import argparse
import os
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from support.cli import UserError, run_cli  # noqa: E402

# Flags of train_gpt2.py, tokens per step, and steps of the baseline.
SCALES = {
    "small": dict(
        flags="--n-layer 4 --n-head 4 --n-embd 256 --block-size 256 --batch-size 4 --warmup-steps 25 "
        "--val-every 50 --val-tokens 131072",
        tokens=16384,
        steps=500,
    ),
    "medium": dict(
        flags="--n-layer 8 --n-head 8 --n-embd 512 --block-size 256 --batch-size 4 --warmup-steps 15 "
        "--val-every 50 --val-tokens 16384",
        tokens=2048,
        steps=300,
    ),
    "124M": dict(flags="", tokens=524288, steps=19073),
}
# Changes to `fast`, one at a time: flags, or a function below that patches the process.
VARIANTS = {
    "unchanged": "",
    "half the rate": "--max-lr 1.8e-3",
    "twice the rate": "--max-lr 7.2e-3",
    "no weight decay": "--weight-decay 0",
    "cosine": "--schedule cosine",
    "AdamW": "--optimizer adamw --max-lr 1.8e-3",
    "query, key and value together": "one_qkv_matrix",
    "Newton-Schulz in fp32": "fp32_newton_schulz",
    "momentum from 0.85": "momentum_warm_up",
    "half the batch in the first half": "batch_ramp",
}
ALWAYS = "--shuffle --sample-every 0 --hellaswag-every 0 --checkpoint-every 0"


@dataclass(frozen=True)
class Trial:
    """A run: recipe, peak learning rate (None: the recipe's own), number of steps, seed, and one of `VARIANTS`."""

    recipe: str
    rate: float | None
    steps: int
    seed: int
    variant: str = "unchanged"

    @property
    def name(self) -> str:
        variant = "" if self.variant == "unchanged" else "-" + self.variant.replace(" ", "_").replace(",", "")
        rate = "" if self.rate is None else f"-{self.rate:g}"
        return f"{self.recipe}{rate}-{self.steps}{variant}-s{self.seed}"


def values(log: Path, kind: str) -> dict[int, float]:
    """The values of one name in a log.txt, by step."""
    lines = (line.split() for line in log.read_text().splitlines()) if log.exists() else ()
    return {int(step): float(value) for step, what, value in lines if what == kind}


def train(trials: list[Trial], args: argparse.Namespace) -> None:
    """Makes the runs that do not exist yet, `--jobs` at a time."""
    scale = SCALES[args.scale]
    flags = shlex.split(f"{scale['flags']} {ALWAYS} {args.flags} --total-batch-size {scale['tokens']}")

    def one(trial: Trial) -> None:
        out, started = args.out / trial.name, time.perf_counter()
        if trial.steps in values(out / "log.txt", "val"):
            return
        command = [sys.executable, __file__, "--worker", trial.variant, "--data", args.data, "--out", out]
        command += ["--resume", "auto", *flags, "--recipe", trial.recipe, "--max-steps", trial.steps]
        command += ["--seed", trial.seed, *(["--max-lr", trial.rate] if trial.rate else [])]
        environment = os.environ | ({"OMP_NUM_THREADS": "1"} if args.jobs > 1 else {})
        done = subprocess.run(list(map(str, command)), env=environment, stdout=subprocess.DEVNULL, cwd=ROOT)
        if done.returncode:
            raise UserError(f"the run {trial.name} failed, with exit code {done.returncode}. See above.")
        seconds = time.perf_counter() - started
        print(f"  {trial.name}: {final(trial, args):.4f}, {seconds:,.0f}s", file=sys.stderr, flush=True)

    with ThreadPoolExecutor(args.jobs) as pool:
        list(pool.map(one, trials))


def worker(variant: str, flags: list[str]) -> None:
    """train_gpt2.py with these flags and a variant's, or its patch."""
    import train_gpt2

    change = VARIANTS[variant]
    if change in globals():
        globals()[change](int(flags[flags.index("--max-steps") + 1]))
        change = ""
    train_gpt2.main(flags + shlex.split(change))


def one_qkv_matrix(steps: int) -> None:
    from support.optim.muon import Muon

    step = Muon._muon_step
    Muon._muon_step = lambda self, group: step(self, group | {"num_splits": [1] * len(group["num_splits"])})


def fp32_newton_schulz(steps: int) -> None:
    import torch

    from support.optim import muon

    approximate = muon.orthogonalize
    muon.orthogonalize = lambda matrices: approximate(matrices.to(torch.float32)).to(matrices.dtype)


def momentum_warm_up(steps: int) -> None:
    from support.optim.muon import Muon

    step, done = Muon.step, [0]

    def warmed(self: Muon) -> None:
        self.momentum = 0.85 + 0.10 * min(1.0, done[0] / (0.3 * steps))
        done[0] += 1
        step(self)

    Muon.step = warmed


def batch_ramp(steps: int) -> None:
    """The first half of the tokens in steps of half the size, so there are more steps for the same tokens."""
    import train_gpt2

    step, done = train_gpt2.train_step, [0]

    def ramped(model: Any, state: Any, loader: Any, *args: Any) -> tuple[float, float]:
        full = loader.full_grad_accum = getattr(loader, "full_grad_accum", loader.grad_accum)
        loader.grad_accum = full // 2 if done[0] < steps * 2 // 3 else full
        done[0] += 1
        return step(model, state, loader, *args)

    train_gpt2.train_step = ramped


def final(trial: Trial, args: argparse.Namespace) -> float:
    return values(args.out / trial.name / "log.txt", "val")[trial.steps]


def crossing(curve: dict[int, float], loss: float) -> float | None:
    """The step at which a curve first falls to `loss`, interpolated linearly; None if it does not."""
    points = sorted(curve.items())
    for (a, high), (b, low) in zip(points, points[1:], strict=False):
        if low <= loss < high:
            return a + (b - a) * (high - loss) / (high - low)
    return None


def spread(numbers: list[float]) -> str:
    """Mean, standard deviation and count."""
    deviation = f" ± {statistics.stdev(numbers):.3f}" if len(numbers) > 1 else ""
    return f"{statistics.mean(numbers):.3f}{deviation} ({len(numbers)})"


def compare(args: argparse.Namespace) -> None:
    steps = args.steps or SCALES[args.scale]["steps"]
    tuning = [Trial("gpt2", rate, steps, args.seeds[0]) for rate in args.rates]
    train(tuning, args)
    best = min(tuning, key=lambda trial: final(trial, args)).rate
    rows = {f"AdamW, cosine, {best:g} (best of {len(args.rates)})": ("gpt2", best, steps)}
    if best != 6e-4:
        rows["AdamW, cosine, 0.0006 (GPT-2's)"] = ("gpt2", 6e-4, steps)
    for fraction in args.fractions:
        rows[f"fast, {fraction:g} of the tokens"] = ("fast", None, round(fraction * steps))
    trials = {name: [Trial(*row, seed) for seed in args.seeds] for name, row in rows.items()}
    train([trial for of_row in trials.values() for trial in of_row], args)

    scale = SCALES[args.scale]
    print(f"\n{args.scale}: {scale['flags']}")
    print(f"\n| rate of AdamW, cosine | loss after {steps:,} steps |\n|---|---|")
    for trial in tuning:
        print(f"| {trial.rate:g} | {final(trial, args):.3f} |")
    print("\n| | steps | tokens | validation loss, mean ± deviation (seeds) | each |\n|---|---|---|---|---|")
    for name, of_row in trials.items():
        ends = [final(trial, args) for trial in of_row]
        made, each = of_row[0].steps, ", ".join(f"{end:.3f}" for end in ends)
        print(f"| {name} | {made:,} | {made * scale['tokens'] / 1e6:,.2f}M | {spread(ends)} | {each} |")

    print("\nTokens of fast's runs when they reach the mean loss of a baseline, as a fraction of its tokens:")
    for name in list(trials)[: -len(args.fractions)]:
        target = statistics.mean(final(trial, args) for trial in trials[name])
        for fast in list(trials)[-len(args.fractions) :]:
            reached = [crossing(values(args.out / trial.name / "log.txt", "val"), target) for trial in trials[fast]]
            result = (
                spread([m / steps for m in reached if m])
                if all(reached)
                else f"not reached by {reached.count(None)} of {len(reached)}"
            )
            print(f"  {fast} to {name}, {target:.3f}: {result}")
    draw(trials, args)


def variants(args: argparse.Namespace) -> None:
    """Runs on 0.2 of the baseline's tokens, each with one thing changed."""
    base = (args.steps or SCALES[args.scale]["steps"]) // 5
    trials = {}
    for name in VARIANTS:
        # a ramp makes 2/3 of its steps with half the tokens: 1.5 times the steps have the same tokens
        steps = base * 3 // 2 if VARIANTS[name] == "batch_ramp" else base
        trials[name] = [Trial("fast", None, steps, seed, name) for seed in args.seeds]
    train([trial for of_name in trials.values() for trial in of_name], args)
    print(f"\n{args.scale}, {base * SCALES[args.scale]['tokens'] / 1e6:,.2f}M tokens")
    print("\n| fast, changed | validation loss |\n|---|---|")
    for name, of_name in trials.items():
        print(f"| {name} | {spread([final(trial, args) for trial in of_name])} |")


def draw(trials: dict[str, list[Trial]], args: argparse.Namespace) -> None:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    for i, (name, of_row) in enumerate(trials.items()):
        for trial in of_row:
            curve = values(args.out / trial.name / "log.txt", "val")
            tokens = [step * SCALES[args.scale]["tokens"] / 1e6 for step in curve]
            axes.plot(tokens[1:], list(curve.values())[1:], f"C{i}", lw=1, label=name if trial is of_row[0] else None)
    axes.set(xlabel="million tokens", ylabel="validation loss", title=f"{args.scale}, seeds {args.seeds}")
    axes.legend()
    figure.savefig(args.out / f"{args.scale}.svg", bbox_inches="tight")
    print(f"\ncurves in {args.out / f'{args.scale}.svg'}")


def overhead() -> None:
    """A step of 524,288 tokens at 124M: what Muon adds to AdamW, in FLOPs and in time."""
    import torch

    from support.optim.muon import NEWTON_SCHULZ_STEPS
    from support.runtime import devices
    from train_gpt2 import GPT, GPTConfig, TrainConfig

    device = torch.device(devices.pick_device_type("auto"))
    dtype = devices.DTYPES[devices.pick_dtype("auto", device)]
    muon_dtype = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
    devices.keep_memory(device)
    synchronize, B, T = partial(devices.synchronize, device), 64 if device.type == "cuda" else 4, 1024
    model = GPT(GPTConfig()).to(device)
    tokens = torch.randint(50257, (B, T + 1), device=device)

    def micro_step() -> None:
        with devices.autocast(device, dtype):
            model(tokens[:, :-1], tokens[:, 1:])[1].backward()

    def seconds(work: Callable[[], None], rounds: int = 3) -> float:
        times = []
        for _ in range(rounds + 1):  # the first one also allocates its memory
            synchronize()
            started = time.perf_counter()
            work()
            synchronize()
            times.append(time.perf_counter() - started)
        return statistics.median(times[1:])

    forward_backward = seconds(micro_step) * TrainConfig().total_batch_size / (B * T)
    adamw, muon = (model.configure_optimizers(0.1, 0.0, (0.9, 0.95), how) for how in (None, muon_dtype))
    optimizer = {"adamw": seconds(adamw.step), "muon": seconds(muon.step)}
    flops = 0
    for weight, n_splits in zip(muon.param_groups[0]["params"], muon.param_groups[0]["num_splits"], strict=True):
        n, m = sorted((len(weight) // n_splits, weight.size(1)))
        flops += (
            n_splits * NEWTON_SCHULZ_STEPS * (2 * n * n * m + 2 * n**3 + 2 * n * n * m)
        )  # x x^T, its square, the product with x
    whole = model.flops_per_token() * TrainConfig().total_batch_size
    print(f"{device.type}, torch {torch.__version__}, {str(muon_dtype).removeprefix('torch.')}, micro-batch {B}")
    print(f"FLOPs: {flops / 1e12:.2f}T of {whole / 1e12:.0f}T of a step, {flops / whole:.2%}")
    more = (optimizer["muon"] - optimizer["adamw"]) / (forward_backward + optimizer["adamw"])
    print(
        f"time: forward and backward {forward_backward:,.1f}s, AdamW {optimizer['adamw']:.3f}s, Muon {optimizer['muon']:.3f}s"
    )
    print(f"Muon adds {more:.2%} on one process, and less on more")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", metavar="DIR", help="token shards: bytes for small, GPT-2's for the others")
    parser.add_argument("--out", type=Path, default=Path("runs"), metavar="DIR", help="(default: runs)")
    parser.add_argument("--scale", choices=tuple(SCALES), default="small", help="(default: small)")
    parser.add_argument("--steps", type=int, metavar="N", help="of the baseline (default: 500 small, 300 medium)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], metavar="N", help="(default: 1 2 3)")
    parser.add_argument(
        "--rates", type=float, nargs="+", default=[6e-4, 1.2e-3, 2.4e-3, 4.8e-3], metavar="X",
        help="learning rates of the baseline to choose from (default: 6e-4 1.2e-3 2.4e-3 4.8e-3)",
    )  # fmt: skip
    parser.add_argument(
        "--fractions", type=float, nargs="+", default=[0.3, 0.4, 1.0], metavar="X",
        help="of the baseline's steps, for fast (default: 0.3 0.4 1)",
    )  # fmt: skip
    parser.add_argument(
        "--jobs", type=int, default=1, metavar="N", help="runs at a time, each on a thread (default: 1)"
    )
    parser.add_argument("--flags", default="", help='more flags for all runs, as in --flags "--dtype bf16"')
    parser.add_argument(
        "--variants", action="store_true", help="change one thing in fast at a time, on a fifth of the tokens"
    )
    parser.add_argument("--overhead", action="store_true", help="only measure what a step of Muon costs")
    if sys.argv[1:2] == ["--worker"]:
        return worker(sys.argv[2], sys.argv[3:])
    args = parser.parse_args()
    if args.overhead:
        return overhead()
    if args.data is None:
        raise UserError("no data. Use a folder of shards with --data; python fineweb.py makes them.")
    args.data = Path(args.data).resolve()
    args.out = args.out.resolve()
    variants(args) if args.variants else compare(args)


if __name__ == "__main__":
    run_cli(main)
