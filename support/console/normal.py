"""Is a run of the default recipe normal? Its log against ten public runs of that recipe, in `public_runs.json`.

The band of a step is what these runs had there: their lowest, median and highest value. It is narrow, and differences are
given in its widths. Values a little outside are not wrong yet: a run is not normal when neighbouring values together are
further outside than the runs' spread and the log's own noise explain. SIGNATURES then says what usually causes it.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from support.console.log import lost_from

FILE = Path(__file__).with_name("public_runs.json")
PAGE = "docs/normal.md"
STEPS = 19073  # of the recipe
NAMES = {"train": "training loss", "val": "validation loss", "hella": "HellaSwag"}

# How far outside the band the mean of two neighbouring values may be, in widths of the band. The widths of ten runs are
# about 3.1 of their standard deviations (2.7 of seven runs), so two widths outside are 7 from their middle.
# The training loss may also differ by the noise of the log, so there it is one width.
ALLOWED_WIDTHS = {"train": 1.0, "val": 2.0, "hella": 2.0}
ALLOWED_STDERRS = 4.0  # ... and how many standard errors more
# Nearly all of the ten runs have the same seed. With a different seed, the first losses differ by more than the band's width.
ALLOWED_EARLY = 0.06
# Validations over fewer tokens, the first of the same shard, are lower: 0.018 over 20 x 32 x 1,024, 0.037 over half of these.
FEWER_TOKENS = 0.037
SINGLE_STEP = 250  # below it, the band is of single steps' losses; from it on, of means of 50
LARGEST_NOISE = 0.09  # standard deviation of a single step's loss in the public runs: 0.04 to 0.09
BLOCK = 50  # steps
HALF_IS_WITHIN = 0.6745  # standard deviations, of a normal distribution

# A jump of the training loss: the median of 25 steps against that of the 50 before.
JUMP, JUMP_STDERRS, AFTER, BEFORE, GONE_WITHIN = 0.12, 5.0, 25, 50, 1000


@dataclass(frozen=True)
class Signature:
    """What a fault's log shows: ranges of the quantities that `measure` returns.

    Attributes:
        shows: all are in the log, and within their ranges.
        unless: one of these is in the log, and out of its range.
        step: at which the fault shows in the public logs.
    """

    cause: str
    step: int
    shows: dict[str, tuple[float, float]]
    unless: dict[str, tuple[float, float]] = field(default_factory=dict)

    def fits(self, measured: Mapping[str, float]) -> bool:
        """Returns whether a log shows the fault."""
        return self.shows.keys() <= measured.keys() and self.may_fit(measured)

    def may_fit(self, measured: Mapping[str, float]) -> bool:
        """Returns whether a log shows a part of it, and nothing that contradicts it."""
        known = {name: r for name, r in (self.shows | self.unless).items() if name in measured}
        return all(low < measured[name] < high for name, (low, high) in known.items()) and bool(
            known.keys() & self.shows
        )


INF = math.inf
# The figures in the comments are from public runs that have the fault, as differences from the band's median.
SIGNATURES = (
    # 20 times the mean
    Signature("a validation loss that is the sum over its batches instead of their mean", 0,
              {"val / median": (3, INF)}),
    # a jump of 0.2 to 0.9, which is gone after some hundred steps
    Signature("a resume without the optimizer's state", 0, {"jump that is gone": (JUMP, 1.2)}),
    # +0.38 at step 10, +0.13 at 1,000, +0.01 at the end
    Signature("residual projections that are not scaled by 1/sqrt(2 n_layer) at the start", 10,
              {"train 10": (0.25, 1), "loss 1000": (0.05, 0.24)}, {"train 50 - 10": (-1, 0.12)}),
    # +0.60 at step 10, +0.36 at 1,000, +0.14 at the end; the norm of step 0 is 4.7, not 15.3
    Signature("residual projections with too large a standard deviation at the start, such as 0.2", 10,
              {"train 10": (0.25, 1), "loss 1000": (0.24, 0.6)}, {"train 50 - 10": (-1, 0.12), "norm 0": (0, 8)}),
    # the same two before step 1,000
    Signature("residual projections that are not scaled at the start, or have too large a standard deviation", 10,
              {"train 10": (0.25, 1), "last step": (0, 999)}, {"train 50 - 10": (-1, 0.12)}),
    # -0.1 and -0.2 at 1,000; -0.027 and -0.075 at the end
    Signature("a higher learning rate, such as 2 or 3 times the recipe's", 1000,
              {"train 1000": (-0.35, -0.05), "val 1000": (-0.4, -0.05), "train - val 1000": (-0.06, 0.06)},
              {"loss end / 1000": (0.1, 0.6)}),
    # +0.05 at step 50; +0.35 and +0.73 at 1,000; +0.29 and +0.50 at 5,000
    Signature("gradients that are synchronised one micro-step too late, because the flag is set after the forward pass", 5000,
              {"loss 1000": (0.25, 0.55), "loss 5000 / 1000": (0.6, 0.95)},
              {"train 10": (-0.15, 0.2), "train 50": (-0.1, 0.25), "loss end / 1000": (0.2, 0.95)}),
    # ... where only the end tells it from a run without a warm-up
    Signature("gradients that are synchronised one micro-step too late, because the flag is set after the forward pass", 15000,
              {"loss 1000": (0.5, 0.9), "loss 5000 / 1000": (0.6, 0.95), "loss end / 1000": (0.35, 0.95)},
              {"train 10": (-0.15, 0.2), "train 50": (-0.1, 0.25)}),
    # ... and from the first step on, updates of full size: the first losses are far below the band (our measurement)
    Signature("no warm-up", 1000, {"train 10": (-4, -0.5), "loss 1000": (0.3, 0.9)}),
    # +0.71 at 1,000, +0.10 at the end
    Signature("no warm-up", 15000,
              {"loss 1000": (0.5, 0.9), "loss 5000 / 1000": (0.0, 0.6), "loss end / 1000": (0.05, 0.3)}),
    # +0.16 at 1,000, +0.12 at the end
    Signature("gradients without any synchronisation between the ranks", 15000,
              {"loss 1000": (0.10, 0.22), "loss end / 1000": (0.6, 0.95)}, {"train 10": (-0.15, 0.2)}),
    # training -0.38, validation +0.022, at the end
    Signature("one of several ranks that reads the same batch for ever", 5000,
              {"train now": (-2, -0.25), "val now": (-0.06, 0.10)}),
    # training -0.23 at the end; validation +0.61 at 10,500, and rising
    Signature("a loader that never leaves its first shard, or reads few data again and again", 5000,
              {"train now": (-2, -0.10), "val now": (0.20, 3)}),
)  # fmt: skip


# -----------------------------------------------------------------------------
# The band


@dataclass(frozen=True)
class Band:
    """The lowest, median and highest value by step, each an array of the same length."""

    steps: np.ndarray
    low: np.ndarray
    median: np.ndarray
    high: np.ndarray

    def curve(self, steps: np.ndarray) -> np.ndarray:
        """Returns the median at any steps: between those of the band, a straight line over the logarithm of the step."""
        return np.interp(np.log1p(steps), np.log1p(self.steps), self.median)


@functools.cache
def load() -> dict[str, Any]:
    """Returns the content of `public_runs.json`."""
    content: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return content


@functools.cache
def band(name: str) -> Band:
    """Returns the band of "train", "val" or "hella"."""
    rows = {int(step): row[name] for step, row in load()["steps"].items() if name in row}
    return Band(np.array(list(rows)), *np.array(list(rows.values())).T)


def other_flags(flags: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """Returns the name, value and recipe's value of each flag with which a run is not comparable with the band."""
    recipe = load()["recipe"].items()
    return [(name, flags.get(name), value) for name, value in recipe if not _same(flags.get(name), value)]


def _same(value: object, other: object) -> bool:
    if isinstance(value, float) and isinstance(other, float):
        return math.isclose(value, other)
    return value == other


# -----------------------------------------------------------------------------
# A run's values at the steps of the band


@dataclass(frozen=True)
class Point:
    """A value of a run at a step of the band.

    Attributes:
        value: what the band is of: the loss of the step, or the mean of the 50 steps around.
        around: the same with less noise; a loss below step 250 is estimated from those of some steps around.
        allowed: how far `around` may be outside the band.
        stderr: the standard error of `around` that comes from the noise of the log.
    """

    name: str
    step: int
    value: float
    around: float
    low: float
    median: float
    high: float
    allowed: float
    stderr: float

    @property
    def widths(self) -> float:
        """How far the value is above (+) or below (-) the band, in its widths."""
        return _distance(self.value, self.low, self.high) / (self.high - self.low)

    @property
    def distance(self) -> float:
        """How far `around` is above (+) or below (-) the band; validations over fewer tokens may be lower."""
        return _distance(self.around, self.low - FEWER_TOKENS * (self.name == "val"), self.high)


def _distance(value: float, low: float, high: float) -> float:
    return max(value - high, 0.0) + min(value - low, 0.0)


@dataclass(frozen=True)
class Noise:
    """Noise of the training loss: the standard deviation of a step, and the correlation of a step with the next."""

    deviation: float
    correlation: float

    @classmethod
    def of(cls, values: Mapping[int, float]) -> Noise:
        """Measures it in blocks of 50 losses from step 20 on, without their trend, which a parabola describes."""
        y = np.array([values[step] for step in sorted(values) if 20 <= step < STEPS])
        if len(y) < BLOCK:
            return cls(LARGEST_NOISE, 0.0)
        blocks, x = y[: len(y) // BLOCK * BLOCK].reshape(-1, BLOCK).T, np.arange(BLOCK)
        residuals = blocks - np.vander(x, 3) @ np.polyfit(x, blocks, 2)
        squares = (residuals**2).sum(0)
        correlation = float(np.median((residuals[1:] * residuals[:-1]).sum(0) / np.maximum(squares, 1e-12)))
        correlation += (3 + 6 * max(correlation, 0.0)) / BLOCK  # the parabola has taken so much
        return cls(float(np.median(squares / (BLOCK - 3)) ** 0.5), min(max(correlation, 0.0), 0.95))

    def stderr(self, n: Any) -> Any:
        """Returns the standard error of the mean of n neighbouring losses."""
        return self.deviation * np.sqrt(
            np.minimum(1, (1 + self.correlation) / (1 - self.correlation) / np.maximum(n, 1))
        )


def band_points(log: Mapping[str, Mapping[int, float]]) -> dict[str, list[Point]]:
    """Returns the points of "train", "val" and "hella" for the finite values of a log."""
    evaluations = {name: evaluation_points(name, _finite(log.get(name, {}))) for name in ("val", "hella")}
    return {"train": training_points(_finite(log.get("train", {})))} | evaluations


def _finite(values: Mapping[int, float]) -> dict[int, float]:
    return {step: value for step, value in values.items() if math.isfinite(value)}


def training_points(values: Mapping[int, float]) -> list[Point]:
    """Returns the training loss at the steps of the band that the log has reached."""
    steps, noise = np.array(sorted(values)), Noise.of(values)
    y, points, of = np.array([values[step] for step in steps.tolist()]), list[Point](), band("train")
    typical = float(np.median(of.high - of.low))
    for i, step in enumerate(of.steps.tolist()):
        if not len(steps) or step > steps[-1] + 1:
            break
        is_mean = step >= SINGLE_STEP
        reach = 25 if is_mean else max(step // 10, 2) if step else 0
        first, end = np.searchsorted(steps, [step - reach, step + reach + (not is_mean)])
        if first == end:
            continue
        measured = np.arange(step - 25, min(step + 25, STEPS)) if is_mean else np.array([step])
        around = (y[first:end] - of.curve(steps[first:end])).mean() + of.curve(measured).mean()
        value = around if is_mean else values.get(step, around)
        low, median, high = (float(edge[i]) for edge in (of.low, of.median, of.high))
        allowed = ALLOWED_WIDTHS["train"] * max(high - low, typical)
        allowed = allowed if is_mean else max(allowed, ALLOWED_EARLY)
        stderr = float(noise.stderr(end - first))
        points.append(Point("train", step, float(value), float(around), low, median, high, allowed, stderr))
    means = [point for point in points if point.step >= SINGLE_STEP]
    return [p for p in points if p.step < SINGLE_STEP] + _with_stderrs(means)


def evaluation_points(name: str, values: Mapping[int, float]) -> list[Point]:
    """Returns the validation losses ("val") or scores ("hella") at the steps of the band."""
    of, points = band(name), list[Point]()
    typical = float(np.median(of.high - of.low))
    for step, *edges in zip(of.steps.tolist(), of.low.tolist(), of.median.tolist(), of.high.tolist(), strict=True):
        after_last = values.get(STEPS) if step == STEPS - 1 else None  # when this trainer validates
        value = values.get(step, after_last)
        if value is not None:
            allowed = ALLOWED_WIDTHS[name] * max(edges[-1] - edges[0], typical)
            low, median, high = edges
            points.append(Point(name, step, value, value, low, median, high, allowed, 0.0))
    return _with_stderrs(points)


def _with_stderrs(points: Sequence[Point]) -> list[Point]:
    """Estimates the standard errors from how much the points' differences from the median change, if there are enough points."""
    changes = np.diff([point.around - point.median for point in points])
    if len(changes) < 8:
        return list(points)
    stderr = float(np.median(np.abs(changes))) / HALF_IS_WITHIN / math.sqrt(2)  # a change has the errors of two points
    return [replace(point, stderr=stderr) for point in points]


def differences(points: Mapping[str, Sequence[Point]]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the steps that have a training and a validation loss, and the differences."""
    train, val = ({point.step: point.value for point in points[name]} for name in ("train", "val"))
    steps = [step for step in val if step in train]
    return np.array(steps), np.array([train[step] - val[step] for step in steps])


def difference_band() -> tuple[np.ndarray, ...]:
    """Returns the steps of the validation, and the lowest, median and highest difference that the two bands allow."""
    val, train = band("val"), band("train")
    i = np.searchsorted(train.steps, val.steps)
    return val.steps, train.low[i] - val.high, train.median[i] - val.median, train.high[i] - val.low


# -----------------------------------------------------------------------------
# The verdict


@dataclass(frozen=True)
class Jump:
    """A sudden rise of the training loss at a step; `gone` is the step at which the loss is back to normal, or None."""

    step: int
    size: float
    gone: int | None


@dataclass(frozen=True)
class Verdict:
    """What a log says about its run.

    Attributes:
        points: by name, at the steps of the band.
        outside: those that are further outside the band than noise explains.
        lost_from: by name, the step from which on a value is not finite.
        cause: what usually causes it; None if the run is normal, or if not exactly one signature fits.
        possible: without a cause, what a longer log may show to be it.
    """

    points: Mapping[str, Sequence[Point]]
    outside: Sequence[Point]
    jump: Jump | None
    lost_from: Mapping[str, int]
    cause: str | None
    possible: Sequence[str]

    @property
    def is_normal(self) -> bool:
        return not self.outside and self.jump is None and not self.lost_from

    @property
    def last_step(self) -> int:
        """The last step of the band that the log has a value for."""
        return max((points[-1].step for points in self.points.values() if points), default=0)

    @property
    def too_early_for(self) -> list[Signature]:
        """The faults that a longer log would show."""
        return [signature for signature in SIGNATURES if signature.step > self.last_step]

    def __str__(self) -> str:
        """One line that begins with "normal" or "not normal"."""
        if self.is_normal:
            until = f" up to step {self.last_step:,}" if self.last_step < STEPS - 1 else ", to the end"
            missing = "; ".join(self._missing())
            return f"normal{until}" + (f", as far as it can be compared ({missing})" if missing else "")
        cause = f"probably {self.cause}" if self.cause else "cause unknown"
        return f"not normal, {cause} ({'; '.join(self._findings())}). See {PAGE}#what-a-fault-looks-like"

    def _missing(self) -> Iterable[str]:
        """Names the losses that the log lacks at steps of the band; the newest may still be computed."""
        for name, label in (("train", "training"), ("val", "validation")):
            expected, have = int((band(name).steps <= self.last_step).sum()), len(self.points[name])
            if have < expected - 1:
                yield f"{label} loss at {have} of {expected} steps"

    def _findings(self) -> Iterable[str]:
        for name, step in self.lost_from.items():
            yield f"{NAMES[name]} is not finite from step {step:,} on"
        for name, points in itertools.groupby(self.outside, key=lambda point: point.name):
            both_sides = list(points)
            worst = max(both_sides, key=lambda point: abs(point.widths))
            out = [point for point in both_sides if point.widths * worst.widths > 0]
            side, is_last = "above" if worst.widths > 0 else "below", out[-1] == self.points[name][-1]
            when = f"since step {out[0].step:,}" if is_last else f"from step {out[0].step:,} to {out[-1].step:,}"
            when = "" if len(out) == 1 else f" {when},"
            yield f"{NAMES[name]} {side} the band{when} by {abs(worst.widths):.0f} widths at step {worst.step:,}"
        if self.jump:
            gone = "not gone yet" if self.jump.gone is None else f"gone at step {self.jump.gone:,}"
            yield f"training loss jumps by {self.jump.size:.2f} at step {self.jump.step:,}, {gone}"


def judge(log: Mapping[str, Mapping[int, float]]) -> Verdict | None:
    """Compares a log with the band; None if it has no value at a step of the band.

    Args:
        log: values by name ("train", "val", "hella", "norm"; all may be missing) and step; they need not be finite.
    """
    points = band_points(log)
    losses = _finite(log.get("train", {}))
    jump, outside = find_jump(losses), [p for name in NAMES for p in find_outside(points[name])]
    lost = {name: step for name in NAMES if (step := lost_from(log.get(name, {}))) is not None}
    if not any(points.values()) and not lost:
        return None
    if lost or not (jump or outside):
        return Verdict(points, outside, jump, lost, None, [])
    measured = measure(points, log.get("norm", {}), jump)
    [cause, *others] = dict.fromkeys(s.cause for s in SIGNATURES if s.fits(measured)) or [None]
    possible = list(dict.fromkeys(s.cause for s in SIGNATURES if s.may_fit(measured))) if others or not cause else []
    return Verdict(points, outside, jump, {}, None if others else cause, possible)


def find_outside(points: Sequence[Point]) -> list[Point]:
    """Returns the points that are outside the band together with a neighbour, by more than is allowed and noise."""
    found = dict[int, Point]()
    pairs: list[tuple[Point, ...]] = [*itertools.pairwise(points)]
    for pair in pairs or [(point,) for point in points]:
        distance, n = sum(point.distance for point in pair) / len(pair), len(pair)
        stderr = math.sqrt(sum(point.stderr**2 for point in pair)) / n
        if abs(distance) > sum(point.allowed for point in pair) / n + ALLOWED_STDERRS * stderr:
            found |= {point.step: point for point in pair if point.distance / distance > 0.5}
    return list(found.values())


def find_jump(values: Mapping[int, float]) -> Jump | None:
    """Returns the largest sudden rise of the training loss, if it is larger than noise."""
    steps = np.array(sorted(step for step in values if SINGLE_STEP <= step < STEPS))
    if len(steps) < BEFORE + AFTER:
        return None
    y = np.array([values[step] for step in steps.tolist()]) - band("train").curve(steps)
    windows = np.lib.stride_tricks.sliding_window_view
    before = np.median(windows(y, BEFORE)[:-AFTER], axis=1)  # [i] is of the steps before i + BEFORE, like `after`
    after = np.median(windows(y, AFTER)[BEFORE:], axis=1)
    spans = steps[BEFORE + AFTER - 1 :] - steps[: 1 - BEFORE - AFTER]
    rises = np.where(spans < 2 * (BEFORE + AFTER), after - before, 0.0)  # not across a hole
    i = int(np.argmax(rises))
    stderr = float(np.median(np.abs(rises))) / HALF_IS_WITHIN  # of a rise in this log, whatever its noise is like
    if rises[i] < max(JUMP, JUMP_STDERRS * stderr):
        return None
    is_gone = after[i:] < before[i] + max(0.3 * rises[i], 2 * stderr)
    later = steps[BEFORE + i : BEFORE + i + len(is_gone)]
    gone = later[is_gone & (later <= later[0] + GONE_WITHIN)]
    return Jump(int(later[0]), float(rises[i]), int(gone[0]) if len(gone) else None)


def measure(points: Mapping[str, Sequence[Point]], norms: Mapping[int, float], jump: Jump | None) -> dict[str, float]:
    """Returns the quantities of SIGNATURES, as far as the log has them: mostly differences from the band's median.

    "loss" is the larger difference of training and validation; "now" is the mean of the last four values after step
    1,000, and "end" that of the values from step 15,000 on.
    """
    off = {name: {p.step: p.around - p.median for p in points[name]} for name in ("train", "val")}
    measured = {f"{name} {step}": value for name in off for step, value in off[name].items()}
    for step in (1000, 5000):
        if both := [off[name][step] for name in off if step in off[name]]:
            measured[f"loss {step}"] = max(both, key=abs)
    if {"train 10", "train 50"} <= measured.keys():
        measured["train 50 - 10"] = measured["train 50"] - measured["train 10"]
    if {"train 1000", "val 1000"} <= measured.keys():
        measured["train - val 1000"] = measured["train 1000"] - measured["val 1000"]
    for name, values in off.items():
        if len(last := [value for step, value in values.items() if step > 1000][-4:]) == 4:
            measured[f"{name} now"] = float(np.mean(last))
    ends = [np.mean(end) for values in off.values() if (end := [x for step, x in values.items() if step >= 15000])]
    if "loss 1000" in measured:
        if "loss 5000" in measured:
            measured["loss 5000 / 1000"] = measured["loss 5000"] / measured["loss 1000"]
        if ends:
            measured["loss end / 1000"] = float(max(ends, key=abs)) / measured["loss 1000"]
    if points["val"]:
        measured["val / median"] = float(np.median([point.value / point.median for point in points["val"]]))
    if jump and jump.gone is not None and jump.gone - jump.step > 50:  # a shorter one is another fault
        measured["jump that is gone"] = jump.size
    if 0 in norms:
        measured["norm 0"] = norms[0]
    return measured | {"last step": max(p[-1].step for p in points.values() if p)}
