"""Makes docs/run.png and docs/terminal.svg from a run of ten minutes on a text, docs/from-scratch/losses.png from the
lesson, and docs/normal.png from the public runs.

    python benchmarks/make_pictures.py tinyshakespeare.txt

It trains on the text in a terminal of 88 columns, and runs the first nine programs of docs/from-scratch, which take about
ten minutes, too, in a temporary folder.
"""

from __future__ import annotations

import argparse
import html
import math
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
from harness import ROOT, script_command
from PIL import Image

from support.console.curves import draw_normal, save

COLUMNS, ROWS = 88, 50
FLAGS = ["--text", "tinyshakespeare.txt", "--out", "shakespeare", "--minutes", "10"]
COLORS = {"1": "#ffffff", "32": "#8ccf7e", "33": "#e5c76b", "36": "#6cbfbf"}
LESSON_STEPS = (
    "counts of pairs", "Adam by hand", "the same in PyTorch", "one head of attention", "GPT-2's block", "the start",
    "the recipe", "pieces of words", "shards in order",
)  # fmt: skip
FONT_SIZE, LINE_HEIGHT, MARGIN = 13, 18, 14
STYLED = re.compile(r"\x1b\[([0-9;]*)m")


def run_in_terminal(folder: Path) -> str:
    """Trains on the text in a terminal, and returns its output."""
    run = shlex.join(script_command("train_gpt2.py", *FLAGS))
    command = ["script", "-qec", f"stty rows {ROWS} cols {COLUMNS}; exec {run}", "/dev/null"]
    environment = os.environ | {"TERM": "xterm"}
    return subprocess.run(command, cwd=folder, env=environment, stdout=subprocess.PIPE, check=True).stdout.decode()


def lines_on_screen(written: str) -> list[str]:
    """Returns the first and last lines that remain on the screen, with colors; redrawn lines as drawn last."""
    lines, row, at_start = [""], 0, True
    for piece in re.split(r"(\r?\n|\r|\x1b\[[AK])", written):
        if piece in ("\r", "\n", "\r\n"):
            row, at_start = row + piece.endswith("\n"), True
            lines += [""] * (row == len(lines))
        elif piece == "\x1b[A":
            row -= 1
        elif piece == "\x1b[K":
            lines[row] = "" if at_start else lines[row]
        elif piece:
            lines[row], at_start = piece if at_start else lines[row] + piece, False
    lines = [line.rstrip() for line in lines]
    if len(lines) > 41:
        lines[21:-20] = ["..."]
    return [f"$ python train_gpt2.py {shlex.join(FLAGS)}", *lines]


def draw(lines: list[str]) -> str:
    width, height = COLUMNS * FONT_SIZE * 0.605 + 2 * MARGIN, len(lines) * LINE_HEIGHT + 2 * MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height}" '
        f'font-family="ui-monospace, Menlo, Consolas, monospace" font-size="{FONT_SIZE}">',
        '<rect width="100%" height="100%" rx="8" fill="#16181d"/>',
    ]
    for number, line in enumerate(lines):
        style, spans = "", []
        for i, piece in enumerate(STYLED.split(line)):
            if i % 2:
                style = piece if piece in COLORS else ""
            elif piece:
                bold = ' font-weight="bold"' if style == "1" else ""
                spans.append(f'<tspan fill="{COLORS.get(style, "#c5c8c6")}"{bold}>{html.escape(piece)}</tspan>')
        y = MARGIN + (number + 0.75) * LINE_HEIGHT
        parts.append(f'<text x="{MARGIN}" y="{y:.0f}" xml:space="preserve">{"".join(spans)}</text>')
    return "\n".join([*parts, "</svg>", ""])


def draw_lesson(folder: Path) -> None:
    """Plots the held-out loss of the lesson's first nine programs, in nats per byte."""
    losses = {"0. nothing": math.log(257)}
    for number, name in enumerate(LESSON_STEPS, start=1):
        command = script_command(f"docs/from-scratch/step_{number:02d}.py")
        printed = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, text=True, check=True).stdout
        # the last number: from step 8 on, the loss per token comes before the one per byte
        losses[f"{number}. {name}"] = float(re.findall(r"\d+\.\d+", re.findall(r"held out:? .*", printed)[-1])[-1])
    figure, axes = plt.subplots(figsize=(7, 2.6), layout="constrained")
    bars = axes.barh(list(losses), list(losses.values()), color="#4c72b0")
    axes.bar_label(bars, fmt="%.2f", padding=3)
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    axes.set(xlabel="held-out loss, nats per byte", xlim=(0, 6))
    figure.savefig(ROOT / "docs" / "from-scratch" / "losses.png", dpi=150)


def draw_public_runs() -> None:
    figure = draw_normal("ten public runs of GPT-2 124M on FineWeb-Edu: lowest, median and highest value", {})
    path = ROOT / "docs" / "normal.png"
    save(figure, path)
    Image.open(path).quantize(64).save(path, optimize=True)  # a fifth of the size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", help="tinyshakespeare.txt")
    text = Path(parser.parse_args().text)
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(text, Path(folder, FLAGS[1]))
        written = run_in_terminal(Path(folder))
        shutil.copy(Path(folder, "shakespeare", "curves.png"), ROOT / "docs" / "run.png")
        (ROOT / "docs" / "terminal.svg").write_text(draw(lines_on_screen(written)))
        draw_lesson(Path(folder))
    draw_public_runs()
    print("made docs/run.png, docs/terminal.svg, docs/from-scratch/losses.png and docs/normal.png")


if __name__ == "__main__":
    main()
