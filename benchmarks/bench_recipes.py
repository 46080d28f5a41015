"""--recipe fast against GPT-2's recipe: the loss for equal tokens, and the tokens for an equal loss.

    python benchmarks/bench_recipes.py --data SHARDS --out runs                   # small: 4 layers, 256 channels
    python benchmarks/bench_recipes.py --data SHARDS --out runs --scale medium    # 8 layers, 512 channels
    python benchmarks/bench_recipes.py --data SHARDS --out runs --try "--weight-decay 0" "--max-lr 1.8e-3"
    python benchmarks/bench_recipes.py --data SHARDS --out runs --scale tiny --flags "--max-lr 9e-4" --try "--adamw-lr 3.6e-3"

First the learning rate of the baseline (AdamW, cosine) is tuned with the first seed, with a complete run for each rate. Then
its best rate, the recipe's own rate and `--recipe fast`, limited to fractions of the tokens, run with all seeds; every run
has a schedule of its own length. A run is a process of train_gpt2.py and a folder in --out. Finished runs are not repeated,
so the command can be interrupted, and repeated with more seeds, rates or fractions. `--try` compares `fast`, on a fifth of
the baseline's tokens, with the same and one set of flags more.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from harness import run_script

from support.console.log import read_values

SHAPE = "--block-size 256 --batch-size 4 --val-every 50"
TINY = "--n-layer 3 --n-head 2 --n-embd 128 --warmup-steps 60 --val-tokens 131072 --block-size 64 --batch-size 16 --val-every 500"
SCALES = {  # flags of train_gpt2.py, tokens per step, and steps of the baseline
    "tiny": (TINY, 1024, 10000),  # as --text and --demo
    "small": (f"--n-layer 4 --n-head 4 --n-embd 256 --warmup-steps 25 --val-tokens 131072 {SHAPE}", 16384, 500),
    "medium": (f"--n-layer 8 --n-head 8 --n-embd 512 --warmup-steps 15 --val-tokens 16384 {SHAPE}", 2048, 300),
    "124M": ("", 524288, 19073),
}
ALWAYS = "--shuffle --sample-every 0 --hellaswag-every 0 --checkpoint-every 0"


@dataclass(frozen=True)
class Trial:
    """A run: recipe, peak learning rate (None: the recipe's own), number of steps, seed, and more flags."""

    recipe: str
    rate: float | None
    steps: int
    seed: int
    flags: str = ""

    @property
    def name(self) -> str:
        more = "".join(c if c.isalnum() or c in "-." else "_" for c in self.flags)
        rate = "" if self.rate is None else f"-{self.rate:g}"
        return f"{self.recipe}{rate}-{self.steps}{more}-s{self.seed}"


def train(trials: list[Trial], args: argparse.Namespace) -> None:
    """Makes the runs that do not exist yet, `--jobs` at a time."""
    of_scale, tokens, _ = SCALES[args.scale]
    flags = shlex.split(f"{of_scale} {ALWAYS} {args.flags} --total-batch-size {tokens}")

    def one(trial: Trial) -> None:
        if trial.steps in val_curve(trial, args):
            return
        options = ["--data", args.data, "--out", args.out / trial.name, "--resume", "auto", *flags]
        options += ["--recipe", trial.recipe, "--max-steps", trial.steps, "--seed", trial.seed]
        options += [*(["--max-lr", trial.rate] if trial.rate else []), *shlex.split(trial.flags)]
        threads = {"OMP_NUM_THREADS": "1"} if args.jobs > 1 else {}
        _, seconds = run_script("train_gpt2.py", *options, **threads)
        print(f"  {trial.name}: {final(trial, args):.4f}, {seconds:,.0f}s", file=sys.stderr, flush=True)

    with ThreadPoolExecutor(args.jobs) as pool:
        list(pool.map(one, trials))


def val_curve(trial: Trial, args: argparse.Namespace) -> dict[int, float]:
    """The validation losses of a run, by step."""
    log = args.out / trial.name / "log.txt"
    return read_values(log, "val") if log.exists() else {}


def final(trial: Trial, args: argparse.Namespace) -> float:
    return val_curve(trial, args)[trial.steps]


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
    flags, tokens, steps = SCALES[args.scale]
    steps = args.steps or steps
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

    print(f"\n{args.scale}: {flags}")
    print(f"\n| rate of AdamW, cosine | loss after {steps:,} steps |\n|---|---|")
    for trial in tuning:
        print(f"| {trial.rate:g} | {final(trial, args):.3f} |")
    print("\n| | steps | tokens | validation loss, mean ± deviation (seeds) | each |\n|---|---|---|---|---|")
    for name, of_row in trials.items():
        ends = [final(trial, args) for trial in of_row]
        made, each = of_row[0].steps, ", ".join(f"{end:.3f}" for end in ends)
        print(f"| {name} | {made:,} | {made * tokens / 1e6:,.2f}M | {spread(ends)} | {each} |")

    print("\nTokens of fast's runs when they reach the mean loss of a baseline, as a fraction of its tokens:")
    for name in list(trials)[: -len(args.fractions)]:
        target = statistics.mean(final(trial, args) for trial in trials[name])
        for fast in list(trials)[-len(args.fractions) :]:
            reached = [crossing(val_curve(trial, args), target) for trial in trials[fast]]
            missed = f"not reached by {reached.count(None)} of {len(reached)}"
            result = spread([m / steps for m in reached if m]) if all(reached) else missed
            print(f"  {fast} to {name}, {target:.3f}: {result}")


def try_flags(args: argparse.Namespace) -> None:
    """Compares `fast` on a fifth of the baseline's tokens with the same and each of the sets of flags of --try."""
    _, tokens, steps = SCALES[args.scale]
    steps = (args.steps or steps) // 5
    trials = {flags: [Trial("fast", None, steps, seed, flags) for seed in args.seeds] for flags in ("", *args.try_)}
    train([trial for of_flags in trials.values() for trial in of_flags], args)
    print(f"\n{args.scale}, {steps * tokens / 1e6:,.2f}M tokens")
    print("\n| fast | validation loss |\n|---|---|")
    for flags, of_flags in trials.items():
        print(f"| {flags or 'as it is'} | {spread([final(trial, args) for trial in of_flags])} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--data", required=True, metavar="DIR", help="shards, of bytes for tiny and small, else of GPT-2's tokens"
    )
    parser.add_argument("--out", type=Path, default=Path("runs"), metavar="DIR", help="(default: runs)")
    parser.add_argument("--scale", choices=tuple(SCALES), default="small", help="(default: small)")
    parser.add_argument("--steps", type=int, metavar="N", help="of the baseline (default: that of the scale)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], metavar="N", help="(default: 1 2 3)")
    numbers = dict(type=float, nargs="+", metavar="X")
    rates_help = "learning rates of the baseline to choose from (default: 6e-4 1.2e-3 2.4e-3 4.8e-3)"
    parser.add_argument("--rates", **numbers, default=[6e-4, 1.2e-3, 2.4e-3, 4.8e-3], help=rates_help)
    fractions_help = "of the baseline's steps, for fast (default: 0.3 0.4 1)"
    parser.add_argument("--fractions", **numbers, default=[0.3, 0.4, 1.0], help=fractions_help)
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="runs at a time, a thread each (default: 1)")
    parser.add_argument("--flags", default="", help='more flags for all runs, as in --flags "--dtype bf16"')
    parser.add_argument(
        "--try", dest="try_", nargs="+", metavar="FLAGS", help="changes of fast's flags, each in quotes"
    )
    args = parser.parse_args()
    try_flags(args) if args.try_ else compare(args)


if __name__ == "__main__":
    main()
