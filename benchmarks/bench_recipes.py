"""Compares --recipe fast with AdamW: the loss at equal tokens, and the tokens to equal loss.

    python benchmarks/bench_recipes.py --data SHARDS --figure recipes.svg    # two scales, two lengths each
    python benchmarks/bench_recipes.py --data SHARDS --scale tiny --steps 2000
    python benchmarks/bench_recipes.py --data SHARDS --scale small --try "--weight-decay 0.4" "--cooldown-fraction 0.7"

First, AdamW gets a complete run with the schedule of `fast` and the first seed for each learning rate. Then AdamW
with the best rate, and `--recipe fast` with fractions of AdamW's steps, run with all seeds. Each run has a schedule of
its own length. A run is a process of train_gpt2.py with a folder in --out. Finished runs are not repeated, so the
command can be interrupted, or repeated with more seeds, rates, fractions or steps. `--try` compares `fast`, on a
quarter of AdamW's tokens, with `fast` plus each set of flags.
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

from support.console.log import read_log
from support.sizing.presets import fast_rates
from train_gpt2 import RECIPES

SHAPE = "--batch-size 16 --val-tokens 131072"
ALWAYS = "--shuffle --sample-every 0 --hellaswag-every 0 --checkpoint-every 0"


@dataclass(frozen=True)
class Scale:
    """A model size and the sizes of its steps."""

    flags: str  # of train_gpt2.py
    tokens: int  # per step
    steps: tuple[int, ...]  # of AdamW
    adamw_warmup: float  # as a fraction of AdamW's steps; 0.03 for `fast`


SCALES = {
    "tiny": Scale(f"--n-layer 3 --n-head 2 --n-embd 128 --block-size 64 {SHAPE}", 1024, (2000, 8000), 0.03),
    "small": Scale(f"--n-layer 4 --n-head 4 --n-embd 256 --block-size 256 {SHAPE}", 4096, (1000, 4000), 0.1),
    "124M": Scale("", 524288, (19073,), 0.0375),
}


@dataclass(frozen=True)
class Trial:
    """A run: scale, recipe, peak learning rate (None: as with --text), number of steps, seed, and more flags."""

    scale: str
    recipe: str
    rate: float | None
    steps: int
    seed: int
    flags: str = ""

    @property
    def name(self) -> str:
        more = "".join(c if c.isalnum() or c in "-." else "_" for c in self.flags)
        rate = "" if self.rate is None else f"-{self.rate:g}"
        return f"{self.scale}-{self.recipe}{rate}-{self.steps}{more}-s{self.seed}"


def train(trials: list[Trial], args: argparse.Namespace) -> None:
    """Trains the runs that are not finished yet, `--jobs` at a time."""

    def one(trial: Trial) -> None:
        if trial.steps in val_curve(trial, args):
            return
        scale = SCALES[trial.scale]
        warmup_steps = round(trial.steps * (scale.adamw_warmup if trial.recipe == "gpt2" else 0.03))
        # docs/measurements/recipes.md was measured with this weight decay
        rates = (
            {"max_lr": trial.rate}
            if trial.rate
            else fast_rates(RECIPES["fast"], scale.tokens, {}) | {"weight_decay": 0.1}
        )
        options = ["--data", args.data, "--out", args.out / trial.name, "--resume", "auto", "--recipe", trial.recipe]
        options += ["--max-steps", trial.steps, "--warmup-steps", warmup_steps, "--val-every", trial.steps // 4]
        options += ["--total-batch-size", scale.tokens, "--seed", trial.seed, *shlex.split(f"{scale.flags} {ALWAYS}")]
        options += [word for name, rate in rates.items() for word in (f"--{name.replace('_', '-')}", rate)]
        options += shlex.split(f"{args.flags} {trial.flags}")
        threads = {"OMP_NUM_THREADS": "1"} if args.jobs > 1 else {}
        _, seconds = run_script("train_gpt2.py", *options, **threads)
        print(f"  {trial.name}: {final(trial, args):.4f}, {seconds:,.0f}s", file=sys.stderr, flush=True)

    with ThreadPoolExecutor(args.jobs) as pool:
        list(pool.map(one, trials))


def val_curve(trial: Trial, args: argparse.Namespace) -> dict[int, float]:
    """Returns the validation losses of a run, by step."""
    log = args.out / trial.name / "log.txt"
    return read_log(log)["val"]


def final(trial: Trial, args: argparse.Namespace) -> float:
    return val_curve(trial, args)[trial.steps]


def million_tokens(trial: Trial) -> float:
    return trial.steps * SCALES[trial.scale].tokens / 1e6


def steps_to(loss: float, ends: dict[int, float]) -> float | None:
    """Estimates the length of a run that ends with `loss`, given the final losses of runs, `ends`, by length.

    Interpolates linearly in the logarithm of the length; returns None if `loss` is not between two final losses.
    """
    points = sorted(ends.items())
    for (a, high), (b, low) in zip(points, points[1:], strict=False):
        if low <= loss <= high:
            return a * (b / a) ** ((high - loss) / (high - low))
    return None


def spread(numbers: list[float]) -> str:
    """Formats the mean, standard deviation and count."""
    deviation = f" ± {statistics.stdev(numbers):.3f}" if len(numbers) > 1 else ""
    return f"{statistics.mean(numbers):.3f}{deviation} ({len(numbers)})" if numbers else "none"


def compare(scale: str, steps: int, args: argparse.Namespace) -> list[Trial]:
    """Compares `fast` with `steps` steps of AdamW; returns the runs of AdamW's best rate and of `fast`."""
    tuning = [Trial(scale, "gpt2", rate, steps, args.seeds[0], args.adamw) for rate in args.rates]
    train(tuning, args)
    best = min(tuning, key=lambda trial: final(trial, args)).rate
    adamw = [Trial(scale, "gpt2", best, steps, seed, args.adamw) for seed in args.seeds]
    lengths = [round(fraction * steps) for fraction in args.fractions]
    fast = {length: [Trial(scale, "fast", None, length, seed) for seed in args.seeds] for length in lengths}
    trials = [*adamw, *(trial for of_length in fast.values() for trial in of_length)]
    train(trials, args)

    print(f"\n{scale}: {SCALES[scale].flags}")
    print(f"\n| AdamW's learning rate, {args.adamw} | loss after {steps:,} steps |\n|---|---|")
    for trial in tuning:
        print(f"| {trial.rate:g} | {final(trial, args):.3f} |")
    print("\n| | steps | tokens | validation loss, mean ± std (seeds) | by seed |\n|---|---|---|---|---|")
    for name, of_row in ((f"AdamW, {best:g}", adamw), *(("fast", of_row) for of_row in fast.values())):
        made, ends = of_row[0].steps, [final(trial, args) for trial in of_row]
        each = ", ".join(f"{end:.3f}" for end in ends)
        print(f"| {name} | {made:,} | {million_tokens(of_row[0]):,.2f}M | {spread(ends)} | {each} |")

    target = statistics.mean(final(trial, args) for trial in adamw)
    reached = [steps_to(target, {n: final(fast[n][i], args) for n in lengths}) for i in range(len(args.seeds))]
    found = [length / steps for length in reached if length]
    print(f"\nfast reaches {target:.3f} with this fraction of the tokens: {spread(found)}", flush=True)
    if missed := len(reached) - len(found):
        print(f"not between these lengths: {missed} of {len(reached)} seeds; try other --fractions")
    return trials


def draw(by_scale: dict[str, list[Trial]], args: argparse.Namespace) -> None:
    """Plots the final loss of each run against its tokens, with a panel per scale and lines through the means."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.2 * len(by_scale), 3.6), layout="constrained")
    panels = figure.subplots(1, len(by_scale), squeeze=False)[0]
    for axes, (scale, trials) in zip(panels, by_scale.items(), strict=True):
        for recipe, label in (("gpt2", "AdamW, tuned"), ("fast", "--recipe fast")):
            ends: dict[float, list[float]] = {}
            for trial in sorted({t for t in trials if t.recipe == recipe}, key=lambda t: t.steps):
                ends.setdefault(million_tokens(trial), []).append(final(trial, args))
            (line,) = axes.plot(ends.keys(), [statistics.mean(losses) for losses in ends.values()], label=label)
            for tokens, losses in ends.items():
                axes.plot([tokens] * len(losses), losses, "o", markersize=4, color=line.get_color())
        axes.set(title=scale, xscale="log", xlabel="million tokens", ylabel="validation loss at the end of a run")
        ticks = sorted({million_tokens(trial) for trial in trials})
        axes.set_xticks(ticks, [f"{tokens:.2g}" for tokens in ticks])
        axes.minorticks_off()
        axes.legend()
    figure.savefig(args.figure, metadata={"Date": None})


def try_flags(scale: str, steps: int, args: argparse.Namespace) -> None:
    """Compares `fast`, on a quarter of AdamW's tokens, with `fast` plus each set of flags in --try."""
    steps //= 4
    trials = {flags: [Trial(scale, "fast", None, steps, s, flags) for s in args.seeds] for flags in ("", *args.try_)}
    train([trial for of_flags in trials.values() for trial in of_flags], args)
    print(f"\n{scale}, {steps * SCALES[scale].tokens / 1e6:,.2f}M tokens")
    print("\n| fast | validation loss |\n|---|---|")
    for flags, of_flags in trials.items():
        print(f"| {flags or 'as it is'} | {spread([final(trial, args) for trial in of_flags])} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--data", required=True, metavar="DIR", help="folder of token shards; tiny and small need byte tokens"
    )
    parser.add_argument("--out", type=Path, default=Path("runs"), metavar="DIR", help="(default: runs)")
    scale_help = "(default: tiny small)"
    parser.add_argument("--scale", choices=tuple(SCALES), nargs="+", default=["tiny", "small"], help=scale_help)
    parser.add_argument("--steps", type=int, nargs="+", metavar="N", help="steps of AdamW (default: set by --scale)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], metavar="N", help="(default: 1 2 3)")
    numbers = dict(type=float, nargs="+", metavar="X")
    rates_help = "learning rates of AdamW to choose from (default: 1.2e-3 2.4e-3 4.8e-3)"
    parser.add_argument("--rates", **numbers, default=[1.2e-3, 2.4e-3, 4.8e-3], help=rates_help)
    fractions_help = "fractions of AdamW's steps for fast to train (default: 0.25 0.4 0.5)"
    parser.add_argument("--fractions", **numbers, default=[0.25, 0.4, 0.5], help=fractions_help)
    parser.add_argument(
        "--jobs", type=int, default=1, metavar="N", help="runs at a time; if several, with one thread each (default: 1)"
    )
    parser.add_argument("--flags", default="", help='more flags for all runs, such as --flags "--dtype bf16"')
    adamw_help = "more flags for AdamW (default: --schedule wsd)"
    parser.add_argument("--adamw", default="--schedule wsd", metavar="FLAGS", help=adamw_help)
    parser.add_argument("--figure", type=Path, metavar="FILE", help="plot all runs in FILE, .svg or .png")
    try_help = "sets of flags to add to fast, each in quotes"
    parser.add_argument("--try", dest="try_", nargs="+", metavar="FLAGS", help=try_help)
    args = parser.parse_args()
    by_scale: dict[str, list[Trial]] = {scale: [] for scale in args.scale}
    for scale, trials in by_scale.items():
        for steps in args.steps or SCALES[scale].steps:
            if args.try_:
                try_flags(scale, steps, args)
            else:
                trials += compare(scale, steps, args)
    if args.figure and not args.try_:
        draw(by_scale, args)


if __name__ == "__main__":
    main()
