"""Measures what more time does for a text: `--text` with several `--minutes`, and a picture with a line for each text.

    python benchmarks/bench_minutes.py diary.txt tinyshakespeare.txt --minutes 1 2 5 10 --figure minutes.svg
    python benchmarks/bench_minutes.py tinyshakespeare.txt --minutes 10 --seeds 1337 1 2

Runs are kept in --out, and those that have finished are not repeated: the tables and the picture can be made in parts.
A run validates on less text the shorter it is. Therefore the last model's loss is measured again, over all of the text
that is held out. It should never rise.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

import numpy as np
import torch
from harness import run_script

from support.checkpoints.directory import newest_checkpoint
from support.checkpoints.run_folder import has_finished
from support.checkpoints.state import Checkpoint
from support.data.shards import TokenData, rows_in_shard
from support.runtime import devices
from train_gpt2 import GPT


def last_checkpoint(out: Path) -> Checkpoint | None:
    """Returns the last checkpoint of a run that has finished; None if it has not."""
    path = newest_checkpoint(out)
    return Checkpoint.open(path) if path and has_finished(str(out), Checkpoint.open(path).step) else None


@torch.no_grad()
def held_out_loss(out: Path, run: Checkpoint) -> float:
    """Returns the loss of a checkpoint, in nats per byte, over the complete validation split of its run."""
    data, model, dtype = TokenData.open(str(out / "data")), GPT.from_pretrained(run.path).eval(), run.config["dtype"]
    T, nats, num_bytes = model.config.block_size, 0.0, 0
    for shard in data.val:
        rows = torch.from_numpy(shard[: rows_in_shard(len(shard), T) * T + 1].astype(np.int64))
        x, y = rows[:-1].view(-1, T), rows[1:].view(-1, T)
        for inputs, targets in zip(x.split(32), y.split(32), strict=True):
            with devices.autocast(torch.device("cpu"), devices.DTYPES[devices.pick_dtype(dtype, torch.device("cpu"))]):
                nats += model(inputs, targets)[1].item() * targets.numel()
        num_bytes += data.tokenizer.count_bytes(rows[1:].numpy())
    return nats / num_bytes


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
    axes.set(xscale="log", xlabel="--minutes", ylabel="nats per byte of held-out text")
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
        "| text | minutes | seed | model | dropout | steps | passes | nats per byte |\n|---|---|---|---|---|---|---|---|"
    )
    for text in args.texts:
        for minutes in args.minutes:
            for seed in args.seeds:
                out = args.out / f"{text.stem}_{minutes:g}_{seed}"
                if last_checkpoint(out) is None:
                    flags = ["--text", text, "--minutes", minutes, "--seed", seed, "--out", out, *args.flags.split()]
                    run_script("train_gpt2.py", *flags, "--sample-every", 0)
                run = last_checkpoint(out)
                assert run is not None
                config, loss = run.config, held_out_loss(out, run)
                print(
                    f"| {text.stem} | {minutes:g} | {seed} | {config['n_layer']} x {config['n_embd']}, {config['block_size']} | "
                    f"{config['dropout']:g} | {run.step:,} of {config['total_batch_size']:,} | {run.passes:.1f} | {loss:.3f} |",
                    flush=True,
                )
                losses.setdefault(text.stem, {}).setdefault(minutes, []).append(loss)
    if args.figure:
        draw(losses, args.figure)


if __name__ == "__main__":
    main()
