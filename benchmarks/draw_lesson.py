"""Draws the pictures that explain a step of docs/from-scratch, as SVG files beside its page.

python benchmarks/draw_lesson.py
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import matplotlib.pyplot as plt
from harness import ROOT
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

LESSON = ROOT / "docs" / "from-scratch"
BLUE, ORANGE, GREEN, RED, GREY = "#9ec5e8", "#f7c59f", "#a8d5a2", "#e8a0a0", "#e6e6e6"
STYLE = {"svg.fonttype": "none", "svg.hashsalt": "lesson", "font.size": 10, "font.family": "sans-serif"}


def new_figure(width: float, height: float, xlim: float, ylim: float) -> tuple[Figure, Axes]:
    """Returns a figure without axes, whose y grows downwards, in units of a cell."""
    figure, axes = plt.subplots(figsize=(width, height), layout="constrained")
    axes.set(xlim=(0, xlim), ylim=(ylim, 0), aspect="equal")
    axes.axis("off")
    return figure, axes


def draw_cells(axes: Axes, x: float, y: float, texts: Sequence[str], colors: Sequence[str]) -> None:
    """Draws a row of cells of size 1, the first one at (x, y)."""
    for i, (text, color) in enumerate(zip(texts, colors, strict=True)):
        axes.add_patch(Rectangle((x + i, y), 1, 1, facecolor=color, edgecolor="black", linewidth=0.8))
        axes.text(x + i + 0.5, y + 0.5, text, ha="center", va="center")


def draw_rows() -> Figure:
    """A row of T + 1 tokens, and the inputs and targets that are cut from it, for T = 6."""
    figure, axes = new_figure(6, 2.1, 14, 4.6)
    letters = list("The cat")
    shown = ["␣" if letter == " " else letter for letter in letters]
    draw_cells(axes, 5, 0, shown, [GREY] * 7)
    draw_cells(axes, 5, 1.6, shown[:-1], [BLUE] * 6)
    draw_cells(axes, 5, 3.4, shown[1:], [ORANGE] * 6)
    for i in range(6):
        axes.annotate("", (5.5 + i, 3.4), (5.5 + i, 2.6), arrowprops={"arrowstyle": "->", "lw": 0.8})
    for y, text in ((0.5, "a row: T + 1 tokens"), (2.1, "inputs x: the first T"), (3.9, "targets y: the last T")):
        axes.text(4.7, y, text, ha="right", va="center")
    return figure


def draw_mask() -> Figure:
    """The scores of five tokens: which are -inf before the softmax."""
    figure, axes = new_figure(4.2, 3, 10.5, 6.4)
    letters = list("Hello")
    for t in range(5):
        hidden = ["−∞" if column > t else "" for column in range(5)]
        draw_cells(axes, 4, 1.2 + t, hidden, [GREY if text else BLUE for text in hidden])
        axes.text(3.7, 1.7 + t, f"{letters[t]} looks at", ha="right", va="center")
        axes.text(4.5 + t, 0.8, letters[t], ha="center", va="center")
    axes.text(9.3, 3.7, "the\nfuture", ha="left", va="center", color="#666666")
    return figure


def draw_heads() -> Figure:
    """(T, C) to heads and back, for T = 3, C = 8 and four heads."""
    figure, axes = new_figure(8, 3.2, 30.2, 10.4)
    heads = [BLUE, ORANGE, GREEN, RED]
    columns = [color for color in heads for _ in range(2)]
    for t in range(3):
        draw_cells(axes, 0, 4 + t, [""] * 8, columns)
        draw_cells(axes, 22, 4 + t, [""] * 8, columns)
        for head, color in enumerate(heads):
            x, y = (11.2, 1 + t) if head == 0 else (15, 1 + t) if head == 1 else (11.2 if head == 2 else 15, 7 + t)
            draw_cells(axes, x, y, [""] * 2, [color] * 2)
    for x, text in ((4, "(T, C)"), (26, "(T, C)")):
        axes.text(x, 3.4, text, ha="center", va="center")
    axes.text(14.1, 0.4, "(nh, T, hs)", ha="center", va="center")
    axes.text(14.1, 5.5, "each head attends\nby itself", ha="center", va="center")
    for start, end, text in ((8.3, 10.8, "view,\ntranspose"), (19.2, 21.7, "transpose,\nreshape")):
        axes.annotate("", (end, 5.5), (start, 5.5), arrowprops={"arrowstyle": "->", "lw": 1})
        axes.text((start + end) / 2, 7.2, text, ha="center", va="center", fontsize=9)
    return figure


def draw_rate() -> Figure:
    """Step 7's learning rate."""
    top, low, warmup, end = 3e-3, 3e-4, 20, 300

    def rate(step: int) -> float:
        if step < warmup:
            return top * (step + 1) / warmup
        return low + 0.5 * (1 + math.cos(math.pi * (step - warmup) / (end - warmup))) * (top - low)

    figure, axes = plt.subplots(figsize=(5, 2.2), layout="constrained")
    axes.plot([rate(step) for step in range(end)], color="#2f6da8")
    axes.axvline(warmup, color="#999999", linewidth=0.8, linestyle="--")
    axes.text(warmup + 4, low, "after the warm-up: a cosine", va="bottom", color="#666666")
    axes.spines[["top", "right"]].set_visible(False)
    axes.set(
        xlabel="step",
        ylabel="learning rate",
        xlim=(0, end),
        ylim=(0, 1.03 * top),
        yticks=[low, top],
        yticklabels=["3e-4", "3e-3"],
    )
    return figure


def main() -> None:
    with plt.rc_context(STYLE):
        for draw in (draw_rows, draw_mask, draw_heads, draw_rate):
            path = LESSON / f"{draw.__name__.removeprefix('draw_')}.svg"
            draw().savefig(path, metadata={"Date": None}, facecolor="white")
            print(f"made {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
