"""Measures what more time does for a text: `--text` with several `--minutes`, and a picture with a line for each text.

    python benchmarks/bench_minutes.py diary.txt tinyshakespeare.txt --minutes 1 2 5 10 --figure minutes.svg
    python benchmarks/bench_minutes.py tinyshakespeare.txt --minutes 10 --seeds 1337 1 2

Runs are kept in --out, and those that have finished are not repeated: the tables and the picture can be made in parts.
A text's last validation loss should never rise.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import NamedTuple

from harness import run_script

from support.checkpoints.directory import newest_checkpoint
from support.checkpoints.history import read_starts
from support.checkpoints.run_folder import has_finished
from support.checkpoints.state import Checkpoint
from support.console.log import read_log


class Result(NamedTuple):
    """A run that has finished; losses in nats per byte."""

    run: Checkpoint
    best: float
    last: float


def finished(out: Path) -> Result | None:
    """Returns the result of a run; None if it has not finished."""
    path = newest_checkpoint(out)
    if path is None or not has_finished(str(out), Checkpoint.open(path).step):
        return None
    losses, bytes_per_token = read_log(out / "log.txt")["val"], read_starts(out)[-1]["data"]["bytes_per_token"]
    return Result(Checkpoint.open(path), min(losses.values()) / bytes_per_token, losses[max(losses)] / bytes_per_token)


def draw(losses: dict[str, dict[float, list[float]]], path: Path) -> None:
    """Plots the last loss over the minutes: a point for each run, and a line through the means of each text."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 3.8), layout="constrained")
    axes = figure.subplots()
    for text, by_minutes in losses.items():
        times = sorted(by_minutes)
        (line,) = axes.plot(times, [statistics.mean(by_minutes[time]) for time in times], label=text)
        for time in times:
            axes.plot([time] * len(by_minutes[time]), by_minutes[time], "o", markersize=4, color=line.get_color())
    ticks = sorted({time for by_minutes in losses.values() for time in by_minutes})
    axes.set(xscale="log", xlabel="--minutes", ylabel="last validation loss, nats per byte")
    axes.set_xticks(ticks, [f"{time:g}" for time in ticks])
    axes.minorticks_off()
    axes.legend()
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", type=Path, nargs="+", metavar="TEXT")
    parser.add_argument(
        "--minutes", type=float, nargs="+", default=[1, 2, 5, 10], metavar="M", help="(default: 1 2 5 10)"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[1337], metavar="N", help="(default: 1337)")
    parser.add_argument("--out", type=Path, default=Path("runs"), metavar="DIR", help="(default: runs)")
    parser.add_argument("--flags", default="", help="more flags for all runs")
    parser.add_argument("--figure", type=Path, metavar="FILE", help="plot all runs in FILE, .svg or .png")
    args = parser.parse_args()
    losses: dict[str, dict[float, list[float]]] = {}
    print(
        "| text | minutes | seed | model | dropout | steps | passes | best | last |\n|---|---|---|---|---|---|---|---|---|"
    )
    for text in args.texts:
        for minutes in args.minutes:
            for seed in args.seeds:
                out = args.out / f"{text.stem}_{minutes:g}_{seed}"
                if finished(out) is None:
                    flags = ["--text", text, "--minutes", minutes, "--seed", seed, "--out", out, *args.flags.split()]
                    run_script("train_gpt2.py", *flags, "--sample-every", 0)
                result = finished(out)
                assert result is not None
                run, config = result.run, result.run.config
                sizes = f"{config['n_layer']} x {config['n_embd']}, {config['block_size']}"
                print(
                    f"| {text.stem} | {minutes:g} | {seed} | {sizes} | {config['dropout']:g} | {run.step:,} | "
                    f"{run.passes:.1f} | {result.best:.4f} | {result.last:.4f} |",
                    flush=True,
                )
                losses.setdefault(text.stem, {}).setdefault(minutes, []).append(result.last)
    if args.figure:
        draw(losses, args.figure)


if __name__ == "__main__":
    main()
