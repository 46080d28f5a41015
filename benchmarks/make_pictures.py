"""Makes the pictures of the README from a demo: docs/run.png, its curves, and docs/terminal.svg, its terminal.

    python benchmarks/make_pictures.py

It runs `python train_gpt2.py --demo` in a terminal of 88 columns, in a temporary folder, for about two minutes.
"""

from __future__ import annotations

import fcntl
import html
import os
import pty
import re
import shutil
import struct
import sys
import tempfile
import termios
from pathlib import Path

from harness import ROOT, script_command

COLUMNS, ROWS = 88, 50
COMMAND = "python train_gpt2.py --demo"
COLORS = {"1": "#ffffff", "32": "#8ccf7e", "33": "#e5c76b", "36": "#6cbfbf"}
FONT_SIZE, LINE_HEIGHT, MARGIN = 13, 18, 14
STYLED = re.compile(r"\x1b\[([0-9;]*)m")


def run_in_terminal(folder: Path) -> str:
    """Runs the demo in a terminal, and returns what it wrote to that."""
    process, terminal = pty.fork()
    if process == 0:
        os.chdir(folder)
        fcntl.ioctl(1, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        os.execve(sys.executable, script_command("train_gpt2.py", "--demo"), os.environ | {"TERM": "xterm"})
    written = bytearray()
    while True:
        try:
            written += os.read(terminal, 65536)
        except OSError:  # its end
            break
    if os.waitpid(process, 0)[1]:
        sys.exit("the demo failed:\n" + written.decode(errors="replace"))
    return written.decode(errors="replace")


def lines_on_screen(written: str) -> list[str]:
    """The lines that stay, colors included: of what was redrawn, the last version."""
    lines = [line.split("\x1b[K")[-1].rpartition("\r")[2] for line in written.replace("\r\n", "\n").split("\n")]
    return [f"$ {COMMAND}", *lines]


def shorten(lines: list[str]) -> list[str]:
    """The first and the last lines, with "..." for those between them."""
    first, last = 22, 20
    return lines if len(lines) <= first + last else [*lines[:first], "...", *lines[-last:]]


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
    (ROOT / "docs" / "terminal.svg").write_text(draw(shorten(lines_on_screen(written))))
    print("made docs/run.png and docs/terminal.svg")


if __name__ == "__main__":
    main()
