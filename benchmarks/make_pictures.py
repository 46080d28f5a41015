"""Makes the pictures of the README from a demo: docs/run.png, its curves, and docs/terminal.svg, its terminal.

    python benchmarks/make_pictures.py

It runs `python train_gpt2.py --demo` in a terminal of 88 columns, in a temporary folder, for about two minutes.
"""

from __future__ import annotations

import html
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

from harness import ROOT, script_command

COLUMNS, ROWS = 88, 50
COMMAND = "python train_gpt2.py --demo"
COLORS = {"1": "#ffffff", "32": "#8ccf7e", "33": "#e5c76b", "36": "#6cbfbf"}
FONT_SIZE, LINE_HEIGHT, MARGIN = 13, 18, 14
STYLED = re.compile(r"\x1b\[([0-9;]*)m")


def run_in_terminal(folder: Path) -> str:
    """Runs the demo in a terminal, and returns what it wrote to that."""
    demo = shlex.join(script_command("train_gpt2.py", "--demo"))
    command = ["script", "-qec", f"stty rows {ROWS} cols {COLUMNS}; exec {demo}", "/dev/null"]
    environment = os.environ | {"TERM": "xterm"}
    return subprocess.run(command, cwd=folder, env=environment, stdout=subprocess.PIPE, check=True).stdout.decode()


def lines_on_screen(written: str) -> list[str]:
    """The first and the last lines that stay, colors included: of what was redrawn, the last version."""
    lines = [line.split("\x1b[K")[-1].rpartition("\r")[2] for line in written.replace("\r\n", "\n").split("\n")]
    if len(lines) > 41:
        lines[21:-20] = ["..."]
    return [f"$ {COMMAND}", *lines]


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


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        written = run_in_terminal(Path(folder))
        shutil.copy(Path(folder, "log_demo", "curves.png"), ROOT / "docs" / "run.png")
    (ROOT / "docs" / "terminal.svg").write_text(draw(lines_on_screen(written)))
    print("made docs/run.png and docs/terminal.svg")


if __name__ == "__main__":
    main()
