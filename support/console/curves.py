"""The curves of runs, read from their folders and drawn with matplotlib; for the trainer, compare.py and play.ipynb.

Each picture is a separate `matplotlib.figure.Figure`, so neither pyplot nor a display is needed.
"""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from support.checkpoints.history import ROOT, argmin_loss, comparable_values, read_starts, starts_in_log
from support.cli import UserError, describe_error, warn
from support.console import normal
from support.console.log import lost_from, read_log
from support.files import atomic_write
from support.terminal import on_one_line

if TYPE_CHECKING:  # importing matplotlib takes as long as drawing a picture
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

Curve = tuple[np.ndarray, np.ndarray]  # x and y
NO_CURVE: Curve = (np.array([]), np.array([]))
AXES = {"steps": "step", "tokens": "tokens", "hours": "hours of training steps"}
SETTLED = 0.05  # initial fraction of a curve that may lie above the picture, so that the rest is not flat
NOT_COMPARABLE = "0.6"  # grey
DRAW_SECONDS = 60.0  # minimum between two pictures of a run that is training
# By layers and channels, which a run's flags have; a test compares them with the sizes of --model.
OPENAI_SIZES = {(12, 768): "124M", (24, 1024): "350M", (36, 1280): "774M", (48, 1600): "1558M"}
OPENAI_LOSS = 3.2924  # OpenAI's GPT-2 124M on FineWeb-Edu's validation shard
NUM_HELLASWAG_ITEMS = 10_042  # of its validation split
# (acc, acc_norm) on all of these items, by style of hellaswag.py; None where no figure was published
OPENAI_HELLASWAG: dict[str, dict[str, tuple[float | None, float]]] = {
    "tokens": {"124M": (0.2859, 0.2955), "350M": (None, 0.3752), "774M": (None, 0.4320), "1558M": (0.3842, 0.4893)},
    "harness": {"124M": (0.2892, 0.3114), "1558M": (0.4004, 0.5089)},
}


@dataclass(frozen=True)
class Run:
    """A run, as recorded in `log.txt` and `starts.jsonl`. Values are by step; an evaluation comes before its step.

    A fork's log begins with its parent's values. `comparable` leaves out those that cannot be compared with its own.
    """

    folder: Path
    train: Mapping[int, float]  # loss in nats per token, like `val`
    val: Mapping[int, float]
    hella: Mapping[int, float]  # acc_norm
    lr: Mapping[int, float]
    seconds: Mapping[int, float]  # duration of the step alone, without evaluation
    lost_from: int | None  # the step from which on the training loss is not finite
    starts: Sequence[Mapping[str, Any]]  # those whose values are in the log, oldest first

    @property
    def start(self) -> Mapping[str, Any]:
        """The last start."""
        return self.starts[-1]

    @property
    def name(self) -> str:
        return on_one_line(self.folder.resolve().name)

    @property
    def steps(self) -> int:
        """The number of steps that the run has completed."""
        return max(self.seconds, default=-1) + 1

    @property
    def has_all_steps(self) -> bool:
        """Whether no step is missing in the log. The log of a fork begins later if its parent's log was missing."""
        return len(self.seconds) == self.steps

    def comparable(self, name: str) -> dict[int, float]:
        """Returns the values of "train", "val" or "hella" that are comparable with each other, and with later ones."""
        return comparable_values(name, getattr(self, name), self.starts)

    @property
    def flags(self) -> dict[str, Any]:
        return self.start["flags"]

    @property
    def bytes_per_token(self) -> float:
        return self.start["data"]["bytes_per_token"]

    def positions(self, steps: Sequence[int], axis: str) -> np.ndarray:
        """Converts steps to x-coordinates on `axis`, a key of AXES."""
        x = np.array(steps, dtype=np.int64)
        if axis == "tokens":
            names = ("first_step", "first_tokens", "tokens_per_step")
            first_steps, first_tokens, sizes = (np.array([start[name] for start in self.starts]) for name in names)
            i = self._start_at(x)
            return first_tokens[i] + (x - first_steps[i]) * sizes[i].astype(float)
        if axis == "hours":
            ends = np.cumsum([0.0, *(self.seconds[step] for step in sorted(self.seconds))])
            return ends[np.searchsorted(sorted(self.seconds), x)] / 3600
        return x

    def bytes_per_token_at(self, steps: Sequence[int]) -> np.ndarray:
        """Returns the bytes per token of the data that each step's validation was on; the training text may have others."""
        lengths = np.array([start["data"]["bytes_per_token"] for start in self.starts])
        return lengths[self._start_at(np.array(steps, dtype=np.int64))]

    def _start_at(self, steps: np.ndarray) -> np.ndarray:
        first_steps = np.array([start["first_step"] for start in self.starts])
        return np.maximum(np.searchsorted(first_steps, steps, side="right") - 1, 0)


def has_gpt2_tokens(start: Mapping[str, Any]) -> bool:
    """Returns whether a run's data are in GPT-2's tokens."""
    return start["data"]["tokenizer"] == "gpt2"


def has_fineweb_edu(start: Mapping[str, Any]) -> bool:
    """Returns whether a run's data are FineWeb-Edu in GPT-2's tokens, as far as their names say."""
    named = re.search("fineweb-edu|edufineweb", f"{start['data']['source']} {start['data']['val']}")
    return has_gpt2_tokens(start) and named is not None


def read_run(folder: Path) -> Run:
    """Reads the run in a folder.

    Raises:
        UserError: there is no run, or its log has no loss.
    """
    path, starts = folder / "log.txt", read_starts(folder)
    if not path.is_file() or not starts:
        raise UserError(
            f"{folder} is not a run: log.txt or starts.jsonl is missing or unreadable. Pass a run's --out folder."
        )
    log = read_log(path)
    if not log["train"] and not log["val"]:
        raise UserError(f"{path} has no loss yet. Pass the folder of another run.")
    lost = lost_from(read_log(path, finite=False)["train"])
    return Run(folder, log["train"], log["val"], log["hella"], log["lr"], log["seconds"], lost, starts_in_log(starts))


def smooth(values: np.ndarray) -> np.ndarray:
    """Returns the moving average over 1% of the curve on each side of a value, or less at the ends."""
    n, i = len(values), np.arange(len(values))
    first, end = np.maximum(i - n // 100, 0), np.minimum(i + n // 100 + 1, n)
    sums = np.concatenate([[0.0], np.cumsum(values)])
    return (sums[end] - sums[first]) / (end - first)


def loss_limits(curves: Sequence[Curve]) -> tuple[float, float]:
    """Returns y-axis limits that leave out these curves' beginning and spikes, which would flatten the rest."""
    ends = [np.quantile(y[x >= SETTLED * x.max()], (0.005, 0.995)) for x, y in curves if len(y)]
    low, high = float(np.min(ends)), float(np.max(ends))
    margin = 0.05 * (high - low) or 0.1
    return low - margin, high + margin


# -----------------------------------------------------------------------------
# Pictures


def draw_run(run: Run) -> Figure:
    """Draws one run by steps: loss and, if its log has them, learning rate and HellaSwag."""
    figure = _new_figure(run.name)
    below = [name for name, values in (("lr", run.lr), ("hella", run.hella)) if values]
    rows: list[list[Any]] = [["loss"] * len(below), below] if below else [["loss"]]
    axes = figure.subplot_mosaic(rows, height_ratios=[5, 2][: len(rows)])
    _draw_loss(axes["loss"], run)
    if run.lr:
        axes["lr"].plot(*_curve(run, run.lr), color="C2")
        axes["lr"].set_ylim(bottom=0)
        axes["lr"].set_ylabel("learning rate")
    if run.hella:
        _draw_hellaswag(axes["hella"], run)
    for each in axes.values():
        _style(each, "steps", run.steps)
    return figure


def draw_runs(labels: Sequence[str], runs: Sequence[Run], axis: str = "steps") -> Figure:
    """Draws the losses of several runs in one picture: per token or, if their tokenizers differ, validations per byte.

    Their last third is drawn once more on a scale of its own, since runs often end close to each other.

    Args:
        labels: a different one for each run.
        axis: the x-axis, a key of AXES.
    """
    per_byte, curves, losses = compares_per_byte(runs), list[Curve](), []
    figure = _new_figure("validation" if per_byte else "training (thin, smoothed) and validation (dots)")
    from matplotlib import colormaps

    for run in runs:
        # the bytes per token of the training text are not known
        (x, y), other_train = (NO_CURVE, NO_CURVE) if per_byte else _curves(run, "train", axis)
        val, other_val = _curves(run, "val", axis, per_byte)
        losses.append(((x, smooth(y)), val, other_train, other_val))
        curves += losses[-1][:2]
    # a fork may have no value of its own yet, only its parent's
    others = [curve for *_, train, val in losses for curve in (train, val)]
    end = max([x.max() for x, _ in curves if len(x)] or [x.max() for x, _ in others if len(x)])
    whole, last = figure.subplots(1, 2, width_ratios=[3, 2])
    for axes, start in (whole, 0.0), (last, end * 2 / 3):
        lines = []
        for i, (train, val, other_train, other_val) in enumerate(losses):
            color = f"C{i}" if len(runs) <= 10 else colormaps["turbo"](i / len(runs))
            axes.plot(*_with_gaps(train, other_train), color=color, linewidth=1, alpha=0.5)
            lines.extend(_draw_validation(axes, *_with_gaps(val, other_val), color))
            _draw_others(axes, other_train, other_val)
        _style(axes, axis, end)
        axes.set_xlim(left=start)
        axes.set_ylim(*loss_limits([(x[x >= start], y[x >= start]) for x, y in curves]))
    whole.legend(lines, [label.replace("$", r"\$") for label in labels], loc="upper right")  # $ would begin a formula
    whole.set_ylabel(f"loss, nats per {'byte' if per_byte else 'token'}")
    last.set_title("the last third", fontsize=10)
    return figure


def draw_normal(name: str, log: Mapping[str, Mapping[int, float]]) -> Figure:
    """Draws a log over the band of the public runs: losses, HellaSwag, and training minus validation.

    Args:
        name: the title.
        log: values by name ("train", "val" and "hella") and step; without any, only the band is drawn.
    """
    figure = _new_figure(name)
    points = normal.band_points(log)
    last = max((p[-1].step for p in points.values() if p), default=normal.STEPS)
    for axes, of in zip(figure.subplots(2, 2).flat, (*normal.NAMES, "difference"), strict=True):
        steps, low, median, high = normal.difference_band() if of == "difference" else vars(normal.band(of)).values()
        shown = steps <= max(last, 10)
        axes.fill_between(steps[shown], low[shown], high[shown], color="C2", alpha=0.4, label="ten public runs")
        axes.plot(steps[shown], median[shown], color="C2", linewidth=0.5)
        if of == "difference":
            x, y = normal.differences(points)
            axes.set_ylabel("training minus validation loss")
            axes.set_ylim(min([-0.3, *(y - 0.05)]), max([0.3, *(y + 0.05)]))
        else:
            x, y = np.array([p.step for p in points[of]]), np.array([p.value for p in points[of]])
            axes.set_ylabel(normal.NAMES[of])
        if len(x):
            axes.plot(x, y, "o-", color="C3", markersize=3, linewidth=0.8, label="this run")
        if of in ("train", "val"):
            band = [(steps[shown], low[shown]), (steps[shown], high[shown])]
            axes.set_ylim(*loss_limits([*band, *([(x, y)] if len(x) else [])]))
        axes.legend(loc="best", fontsize=8)
        _style(axes, "steps", last)
    return figure


def compares_per_byte(runs: Sequence[Run]) -> bool:
    """Returns whether the runs have different tokenizers, so that losses per token cannot be compared."""
    data = [run.start["data"] for run in runs]
    if all("tokenizer_sha256" in of_run for of_run in data):
        return len({of_run["tokenizer_sha256"] for of_run in data}) > 1
    # the starts of older versions do not identify a trained tokenizer, but losses per byte are comparable either way
    names, lengths = {of_run["tokenizer"] for of_run in data}, {of_run["bytes_per_token"] for of_run in data}
    return len(names) > 1 or names == {"bpe"} and len(lengths) > 1


def save(figure: Figure, path: Path, unique: bool = False) -> None:
    """Writes a picture as a PNG, atomically. Use `unique` if several processes may write it at once."""
    # warnings about characters that the font lacks
    with atomic_write(path, unique) as tmp, warnings.catch_warnings(action="ignore"):
        figure.savefig(tmp, format="png")


def _new_figure(title: str) -> Figure:
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # its first import logs that it builds a font cache
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 7), dpi=100, layout="constrained")
    figure.suptitle(title, parse_math=False)
    return figure


def _draw_loss(axes: Axes, run: Run) -> None:
    ((x, y), other_train), (val, other_val) = _curves(run, "train"), _curves(run, "val")
    curves, losses = [(x, y), val], run.comparable("val")
    axes.plot(*_with_gaps((x, y), other_train), color="C0", linewidth=0.7, alpha=0.3, label="train")
    axes.plot(*_with_gaps((x, smooth(y)), other_train), color="C0", label="train, smoothed")
    if (best := argmin_loss(losses)) is not None:
        _draw_validation(
            axes, *_with_gaps(val, other_val), "C1", f"validation: best {losses[best]:.4f}, at step {best:,}"
        )
    _draw_others(axes, other_train, other_val, "before: on other data, or in steps of another size")
    if has_fineweb_edu(run.start) and run.flags.get("block_size", 0) >= 1024:  # a shorter context has a higher loss
        axes.axhline(OPENAI_LOSS, color="k", ls="--", lw=1, label=f"OpenAI's GPT-2 124M: {OPENAI_LOSS}")
        curves.append((np.array([0]), np.array([OPENAI_LOSS])))
    axes.set_ylim(*loss_limits(curves))
    axes.set_ylabel("loss, nats per token")
    axes.set_title(_key_flags(run), fontsize=9, parse_math=False)
    axes.legend(loc="upper right")


def _draw_validation(
    axes: Axes, x: np.ndarray, y: np.ndarray, color: Any, label: str | None = None, zorder: int = 2
) -> list[Line2D]:
    """Draws dots, and a line without the one of step 0, which is far above the training loss."""
    axes.plot(x[x != 0], y[x != 0], color=color, zorder=zorder)
    return axes.plot(x, y, "o", color=color, markersize=3, label=label, zorder=zorder)


def _draw_others(axes: Axes, train: Curve, val: Curve, label: str | None = None) -> None:
    """Draws losses that are not comparable with the run's own, in grey, if there are any."""
    if len(train[0]) or len(val[0]):
        # below the curves of other runs
        axes.plot(train[0], smooth(train[1]), color=NOT_COMPARABLE, label=label, zorder=1)
        _draw_validation(axes, *val, NOT_COMPARABLE, zorder=1)


def _draw_hellaswag(axes: Axes, run: Run) -> None:
    (x, y), others = _curves(run, "hella")
    if len(others[0]):
        axes.plot(*others, "o-", color=NOT_COMPARABLE, markersize=3)
    if len(y):
        axes.plot(x, y, "o-", color="C3", markersize=3, label=f"acc_norm: {y[-1]:.4f}, at step {x[-1]:,}")
    # a shorter context may cut off texts
    comparable = has_gpt2_tokens(run.start) and run.flags.get("block_size", 0) >= 1024
    own = OPENAI_SIZES.get((run.flags.get("n_layer", 0), run.flags.get("n_embd", 0)), "124M")
    limited = run.start.get("hellaswag_items") != NUM_HELLASWAG_ITEMS
    for size in dict.fromkeys(("124M", own)) if comparable else ():
        _, score = OPENAI_HELLASWAG["tokens"][size]
        label = f"OpenAI's GPT-2 {size}: {score:.4f}" + limited * f" on all {NUM_HELLASWAG_ITEMS:,} items"
        axes.axhline(score, color="k", ls="--", lw=1, label=label)
    axes.set_ylabel("HellaSwag")
    axes.legend(loc="lower right", fontsize=8)


def _curves(run: Run, name: str, axis: str = "steps", per_byte: bool = False) -> tuple[Curve, Curve]:
    """Returns the curve of the comparable values of "train", "val" or "hella", and the curve of the others."""
    own = run.comparable(name)
    others = {step: value for step, value in getattr(run, name).items() if step not in own}
    return _curve(run, own, axis, per_byte), _curve(run, others, axis, per_byte)


def _with_gaps(curve: Curve, others: Curve) -> Curve:
    """Returns a curve that is interrupted where there are values that are not comparable with its own."""
    x, y = curve
    gaps = np.unique(np.searchsorted(x, others[0]))
    gaps = gaps[(gaps > 0) & (gaps < len(x))]
    return np.insert(x.astype(float), gaps, np.nan), np.insert(y, gaps, np.nan)


def _curve(run: Run, values: Mapping[int, float], axis: str = "steps", per_byte: bool = False) -> Curve:
    steps = sorted(values)
    y = np.array([values[step] for step in steps], dtype=float)
    return run.positions(steps, axis), y / run.bytes_per_token_at(steps) if per_byte else y


def _style(axes: Axes, axis: str, end: float) -> None:
    axes.grid(alpha=0.3)
    axes.set_xlim(0, 1.01 * end or 1)
    axes.set_xlabel(AXES[axis])
    axes.xaxis.set_major_formatter(lambda x, _: short_count(x))


def _key_flags(run: Run) -> str:
    """Describes a run in one line: size, recipe, data."""
    flags = run.flags
    schedule = f"{flags.get('optimizer')}, {flags.get('schedule')}, learning rate {flags.get('max_lr', 0):.3g}"
    sizes = f"{short_count(run.start['parameters'])} parameters, {run.start['tokens_per_step']:,} tokens per step"
    data = run.start["data"]["source"] or Path(str(flags.get("data"))).name
    return on_one_line(f"{sizes}; {schedule}; on {data:.50}")


def short_count(n: float) -> str:
    """Formats a number with three significant digits, such as 124M."""
    n = float(f"{n:.3g}")  # 999,999 is 1M
    for unit, name in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if n >= unit:
            return f"{n / unit:.3g}{name}"
    return f"{n:g}"


# -----------------------------------------------------------------------------
# curves.png


class CurvesFile:
    """`curves.png` in a run's folder, drawn from the folder by a process of its own; without a folder, nothing is drawn.

    So training waits for no picture, and what matplotlib keeps of one is gone with the process. Best effort: only the
    first failure warns.
    """

    def __init__(self, folder: Path | None):
        self._folder, self._warned = folder, False
        self._process: subprocess.Popen[str] | None = None
        self._not_before = time.monotonic() + DRAW_SECONDS

    def update(self) -> None:
        """Begins to draw the curves, unless they were drawn recently or the last picture is not finished."""
        if time.monotonic() >= self._not_before and (self._process is None or self._process.poll() is not None):
            self.draw()

    def draw(self) -> None:
        """Begins to draw the curves, once the last picture is finished."""
        self.wait()
        if self._folder is None:
            return
        command = [sys.executable, "-m", "support.console.curves", str(self._folder.resolve())]
        try:
            self._process = subprocess.Popen(
                command, cwd=ROOT, stderr=subprocess.PIPE, text=True, errors="replace",
                start_new_session=True,  # Ctrl-C is for the run
            )  # fmt: skip
        except OSError as error:
            self._warn(describe_error(error))
        self._not_before = time.monotonic() + DRAW_SECONDS

    def wait(self) -> None:
        """Waits until the last picture is finished."""
        if self._process:
            _, errors = self._process.communicate()
            if self._process.returncode:
                self._warn([f"exit code {self._process.returncode}", *errors.splitlines()][-1])
        self._process = None

    def _warn(self, reason: str) -> None:
        if self._folder and not self._warned:
            warn(f"cannot draw {self._folder / 'curves.png'} ({reason}).")
        self._warned = True


def main(argv: Sequence[str]) -> None:
    """Draws `curves.png` in a folder, the only argument, with low priority."""
    if hasattr(os, "nice"):  # not on Windows
        os.nice(10)
    folder = Path(argv[0])
    save(draw_run(read_run(folder)), folder / "curves.png")


if __name__ == "__main__":
    main(sys.argv[1:])
