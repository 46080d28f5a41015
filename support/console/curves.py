"""The curves of runs, read from their folders and drawn with matplotlib; for the trainer, compare.py and play.ipynb.

A picture is a `matplotlib.figure.Figure` of its own: no pyplot, no display and no state that others could see.
"""

from __future__ import annotations

import logging
import re
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from support.cli import UserError
from support.console.log import read_metrics, read_values
from support.console.record import FILE as RECORD
from support.console.record import latest_flags, read_record
from support.console.terminal import cut
from support.files import atomic_write

if TYPE_CHECKING:  # importing it takes as long as drawing a picture
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Array = np.ndarray
AXES = {"steps": "step", "tokens": "tokens", "hours": "hours of training steps"}
SETTLED = 0.05  # the loss of this first part of a run may be above the picture, so that the rest is not flat,
SHORT = 200  # but not if it has fewer steps
TITLE_WIDTH = 80  # characters
DRAW_SECONDS = 10.0  # at least, between two pictures of a run that is being trained
MAX_DRAW_FRACTION = 0.01  # of a run's time
OPENAI_LOSS = 3.2924  # of OpenAI's GPT-2 124M, on FineWeb-Edu's validation shard
OPENAI_SIZES = {"gpt2": "124M", "gpt2-medium": "350M", "gpt2-large": "774M", "gpt2-xl": "1558M"}
# Of each style of hellaswag.py, (acc, acc_norm) on all validation items; None where no figure was published
OPENAI_HELLASWAG: dict[str, dict[str, tuple[float | None, float]]] = {
    "tokens": {"124M": (0.2859, 0.2955), "350M": (None, 0.3752), "774M": (None, 0.4320), "1558M": (0.3842, 0.4893)},
    "harness": {"124M": (0.2892, 0.3114), "1558M": (0.4004, 0.5089)},
}


@dataclass(frozen=True)
class Run:
    """What the files in a run's folder say. Values are by step; those of step s were measured before it."""

    folder: Path
    train: Mapping[int, float]  # loss in nats per token, as `val`
    val: Mapping[int, float]
    hella: Mapping[int, float]  # acc_norm
    lr: Mapping[int, float]
    seconds: Mapping[int, float]  # of the step alone, without evaluation
    record: Mapping[str, Any] | None  # `run.json`

    @property
    def name(self) -> str:
        return _printable(self.folder.resolve().name)

    @property
    def path(self) -> str:
        return _printable(str(self.folder.resolve()))

    @property
    def steps(self) -> int:
        """Steps that the run has done."""
        return max(self.train, default=-1) + 1

    @property
    def flags(self) -> dict[str, Any]:
        """The flags of the process that last resumed the run; none without a record."""
        return latest_flags(self.record) if self.record else {}

    @property
    def bytes_per_token(self) -> float | None:
        return self.record["bytes_per_token"] if self.record else None

    @property
    def hours(self) -> float | None:
        """The time of all steps; None if that of some is not known."""
        if len(self.seconds) < self.steps or any(step not in self.seconds for step in range(self.steps)):
            return None
        return sum(self.seconds[step] for step in range(self.steps)) / 3600

    def positions(self, steps: Sequence[int], axis: str) -> Array | None:
        """Where steps are on an axis, one of AXES; None if the files do not say it."""
        x = np.array(steps, dtype=np.int64)
        if axis == "tokens":
            return None if self.record is None else x * float(self.record["tokens_per_step"])
        if axis == "hours":
            if self.hours is None:
                return None
            ends = np.cumsum([0.0, *(self.seconds[step] for step in range(self.steps))])
            return ends[np.minimum(x, self.steps)] / 3600
        return x

    @property
    def has_gpt2_tokens(self) -> bool:
        return self.record is not None and self.record["tokenizer"].get("name") == "gpt2"

    @property
    def validates_on_fineweb_edu(self) -> bool:
        data = self.record["data"] if self.record else {}
        return bool(re.search("fineweb-edu|edufineweb", f"{data.get('source')} {data.get('val')}"))


def read_run(folder: Path) -> Run:
    """The run in a folder; of runs of earlier versions, which have only `log.txt`, what that says.

    Raises:
        UserError: there is no run, or its log has no loss.
    """
    log, metrics = folder / "log.txt", folder / "metrics.jsonl"
    if not log.is_file():
        problem = "has no log.txt" if folder.is_dir() else "is not a folder"
        raise UserError(f"{folder} {problem}. Pass the folder of a run, its --out.")
    values = {name: read_values(log, name) for name in ("train", "val", "hella")}
    if not values["train"] and not values["val"]:
        raise UserError(f"{log} has no loss yet. Pass the folder of another run.")
    numbers = read_metrics(metrics) if metrics.is_file() else {}
    return Run(
        folder, **values, lr=numbers.get("lr", {}), seconds=numbers.get("seconds", {}),
        record=read_record(folder / RECORD),
    )  # fmt: skip


# -----------------------------------------------------------------------------
# Values to points


def smooth(values: Array) -> Array:
    """The mean around each value: of itself and a hundredth of all values on each side, fewer at the ends."""
    n, i = len(values), np.arange(len(values))
    first, end = np.maximum(i - n // 100, 0), np.minimum(i + n // 100 + 1, n)
    sums = np.concatenate([[0.0], np.cumsum(values)])
    return (sums[end] - sums[first]) / (end - first)


def settled(run: Run, x: Array, y: Array) -> Array:
    """The values of a curve (x, y) of a run without the first ones, which would flatten all others; of a short run, all."""
    return y if run.steps < SHORT or not len(x) else y[x >= SETTLED * x.max()]


def loss_limits(curves: Sequence[Array]) -> tuple[float, float]:
    """Limits of the axis of a loss that shows these values."""
    low, high = min(y.min() for y in curves if len(y)), max(y.max() for y in curves if len(y))
    margin = 0.05 * (high - low) or 0.1
    return low - margin, high + margin


# -----------------------------------------------------------------------------
# Pictures


def draw_run(run: Run) -> Figure:
    """One run by steps: loss, learning rate and HellaSwag, as far as its files have them."""
    figure = _new_figure()
    from matplotlib.ticker import MaxNLocator

    below = [draw for draw, values in ((_draw_lr, run.lr), (_draw_hellaswag, run.hella)) if values]
    ratios = [5, 2] if below else [1]
    margins = dict(left=0.075, right=0.975, bottom=0.075, top=0.9, hspace=0.25, wspace=0.2)
    grid = figure.add_gridspec(len(ratios), max(1, len(below)), height_ratios=ratios, **margins)
    _draw_loss(figure.add_subplot(grid[0, :]), run)
    for i, draw in enumerate(below):
        axes = figure.add_subplot(grid[1, i])
        draw(axes, run)
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    for axes in figure.axes:
        _style(axes, "steps", run.steps)
    _title(figure, run.name, _key_flags(run))
    return figure


def draw_runs(labels: Sequence[str], runs: Sequence[Run], axis: str = "steps") -> Figure:
    """The losses of several runs in one picture: per byte if their tokens differ in length, otherwise per token.

    Args:
        labels: a different one for each run.
        axis: a key of AXES, on which all runs have positions.
    """
    figure = _new_figure()
    from matplotlib import colormaps
    from matplotlib.lines import Line2D

    axes = figure.add_axes((0.075, 0.085, 0.9, 0.82))
    per_byte, curves, handles, end = compares_per_byte(runs), list[Array](), [], 0.0
    for i, run in enumerate(runs):
        scale = 1 / (run.bytes_per_token or 1) if per_byte else 1.0
        color = f"C{i}" if len(runs) <= 10 else colormaps["turbo"](i / len(runs))
        (x, y), (val_x, val_y) = (_points(run, values, axis, scale) for values in (run.train, run.val))
        axes.plot(x, smooth(y), color=color, linewidth=1, alpha=0.5)
        _draw_validation(axes, val_x, val_y, color=color)
        curves += [settled(run, x, smooth(y)), settled(run, val_x, val_y)]
        end = max([end, *x, *val_x])
        handles.append(Line2D([], [], color=color, linewidth=3))
    for label, options in (
        ("train, smoothed", dict(linewidth=1, alpha=0.5)),
        ("validation", dict(marker="o", markersize=3)),
    ):
        handles.append(Line2D([], [], color="black", label=label, **options))
    _legend(axes, handles, [*labels, "train, smoothed", "validation"])
    axes.set_ylim(*loss_limits(curves))
    axes.set_ylabel(f"loss, nats per {'byte' if per_byte else 'token'}")
    _style(axes, axis, end)
    _title(figure, cut(", ".join(labels), TITLE_WIDTH), _key_flags(runs[0]) if len(runs) == 1 else "")
    return figure


def compares_per_byte(runs: Sequence[Run]) -> bool:
    """Whether the tokens of runs differ in length, so that losses per token cannot be compared."""
    lengths = [run.bytes_per_token for run in runs]
    return None not in lengths and len(set(lengths)) > 1


def save(figure: Figure, path: Path) -> None:
    """Writes a picture as a PNG, atomically."""
    # the warnings are of characters that the font lacks
    with atomic_write(path) as tmp, warnings.catch_warnings(action="ignore"):
        figure.savefig(tmp, format="png")


def _new_figure() -> Figure:
    """An empty picture. The first import may build a cache of fonts, about which matplotlib logs what nobody needs."""
    logger = logging.getLogger("matplotlib")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        from matplotlib.figure import Figure
    finally:
        logger.setLevel(level)
    return Figure(figsize=(10, 7), dpi=100)


def _draw_loss(axes: Axes, run: Run) -> None:
    (x, y), (val_x, val_y) = (_points(run, values) for values in (run.train, run.val))
    curves = [settled(run, x, smooth(y)), settled(run, val_x, val_y)]
    if len(y):
        if len(y) >= 100:
            axes.plot(x, y, color="C0", linewidth=0.7, alpha=0.3, label="train")
        axes.plot(x, smooth(y), color="C0", label="train, smoothed" if len(y) >= 100 else "train")
        curves.append(y if run.steps < SHORT else np.quantile(settled(run, x, y), (0.005, 0.995)))
    if len(val_y):
        best = int(val_x[val_y.argmin()])
        label = f"validation: best {val_y.min():.4f}, at step {best:,}"
        _draw_validation(axes, val_x, val_y, color="C1", label=label)
    if run.has_gpt2_tokens and run.validates_on_fineweb_edu:
        label = f"OpenAI's GPT-2 124M, validation: {OPENAI_LOSS}"
        axes.axhline(OPENAI_LOSS, color="black", linestyle="--", linewidth=1, label=label)
        curves.append(np.array([OPENAI_LOSS]))
    axes.set_ylim(*loss_limits(curves))
    axes.set_ylabel("loss, nats per token")
    _legend(axes, *axes.get_legend_handles_labels())


def _draw_validation(axes: Axes, x: Array, y: Array, color: Any, label: str | None = None) -> None:
    """A line with markers; from the value of step 0 there is none, because it would pass far above the training loss."""
    first = int(len(x) > 1 and x[0] == 0)
    axes.plot(x[first:], y[first:], color=color, marker=_marker(x), markersize=3, label=label)
    axes.plot(x[:first], y[:first], color=color, marker="o", markersize=3)


def _draw_lr(axes: Axes, run: Run) -> None:
    axes.plot(*_points(run, run.lr), color="C2")
    axes.set_ylim(bottom=0)
    axes.ticklabel_format(axis="y", scilimits=(0, 0))
    axes.set_ylabel("learning rate")


def _draw_hellaswag(axes: Axes, run: Run) -> None:
    x, y = _points(run, run.hella)
    axes.plot(x, y, color="C3", marker=_marker(x), markersize=3, label=f"acc_norm, now {y[-1]:.4f}")
    comparable = run.has_gpt2_tokens and run.flags.get("block_size", 0) >= 1024  # a shorter context may be cut off
    for model in dict.fromkeys(("gpt2", run.flags.get("model"))) if comparable else ():
        if model in OPENAI_SIZES:
            size = OPENAI_SIZES[model]
            _, score = OPENAI_HELLASWAG["tokens"][size]
            axes.axhline(score, color="black", linestyle="--", linewidth=1, label=f"OpenAI's GPT-2 {size}: {score:.4f}")
    axes.set_ylabel("HellaSwag")
    axes.legend(loc="lower right", fontsize=8)


def _points(run: Run, values: Mapping[int, float], axis: str = "steps", scale: float = 1.0) -> tuple[Array, Array]:
    steps = sorted(values)
    x = run.positions(steps, axis)
    assert x is not None
    return x, scale * np.array([values[step] for step in steps])


def _marker(x: Array) -> str:
    return "o" if len(x) <= 100 else ""


def _legend(axes: Axes, handles: Sequence[Any], labels: Sequence[str]) -> None:
    legend = axes.legend(handles, [""] * len(labels), loc="upper right", fontsize=9)
    for text, label in zip(legend.get_texts(), labels, strict=True):  # a label such as _a$b has no meaning of its own
        text.set_parse_math(False)
        text.set_text(label)


def _style(axes: Axes, axis: str, end: float) -> None:
    axes.grid(alpha=0.3)
    axes.set_xlim(0, 1.01 * end or 1)
    axes.set_xlabel(AXES[axis])
    format_x: Callable[[float, Any], str] = {
        "steps": lambda x, _: f"{x:,.10g}",
        "tokens": lambda x, _: short_count(x),
        "hours": lambda x, _: f"{x:g}",
    }[axis]
    axes.xaxis.set_major_formatter(format_x)


def _title(figure: Figure, name: str, line: str) -> None:
    for y, text, size in ((0.965, name, 14), (0.93, line, 10)):
        figure.text(0.075, y, text, fontsize=size, parse_math=False, verticalalignment="center")


def _key_flags(run: Run) -> str:
    """One line about a run: size, recipe, data."""
    if not run.record:
        return ""
    flags = run.flags
    schedule = f"{flags.get('optimizer')}, {flags.get('schedule')}, learning rate {flags.get('max_lr')}"
    sizes = f"{short_count(run.record['parameters'])} parameters, {run.record['tokens_per_step']:,} tokens per step"
    return _printable(f"{sizes}; {schedule}; data {Path(str(flags.get('text') or flags.get('data'))).name}")


def short_count(n: float) -> str:
    """A number with three digits, such as 124M."""
    for unit, name in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if n >= unit:
            return f"{n / unit:.3g}{name}"
    return f"{n:g}"


def _printable(text: str) -> str:
    """Without what a font has no character for: line breaks, and bytes of a file name that are not valid."""
    return "".join(char if char.isprintable() else "?" for char in text)


# -----------------------------------------------------------------------------
# curves.png


class CurvesFile:
    """`curves.png` in the folder of a run, drawn while it trains; without a folder, nothing is.

    Drawing takes at most MAX_DRAW_FRACTION of the time. It is best effort: a failure is one warning.
    """

    def __init__(self, folder: Path | None):
        self._folder, self._warned = folder, False
        self._not_before = time.monotonic() + DRAW_SECONDS
        self.outdated = False  # whether there is a new evaluation

    def update(self) -> None:
        """Draws the curves again if there is a new evaluation, unless that was done a short while ago."""
        if self.outdated and time.monotonic() >= self._not_before:
            self.draw()

    def draw(self) -> None:
        if self._folder is None:
            return
        started = time.monotonic()
        try:
            save(draw_run(read_run(self._folder)), self._folder / "curves.png")
        except Exception as error:  # matplotlib has many
            if not self._warned:
                print(f"warning: cannot draw {self._folder / 'curves.png'} ({error}).", file=sys.stderr, flush=True)
            self._warned = True
        self.outdated, now = False, time.monotonic()
        self._not_before = now + max(DRAW_SECONDS, (now - started) / MAX_DRAW_FRACTION)
