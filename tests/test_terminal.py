"""What a terminal shows of a run, read from a pseudo-terminal, against what a file gets."""

from __future__ import annotations

import fcntl
import itertools
import math
import os
import pty
import re
import signal
import struct
import sys
import termios
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers import STEP, Rank, finish_run, start_run
from runs import log_without_seconds
from training import ONE_PROCESS, configure, run_info, trained

from support import terminal
from support.checkpoints.state import TrainState
from support.cli import warn
from support.console import run_logger
from support.console.progress import describe_choices, print_summary
from support.runtime.schedule import Schedule

COLUMNS = 80
ESCAPE = r"\x1b\[[\d;]*[A-Za-z]"


class Terminal:
    """A pseudo-terminal of COLUMNS columns, for a run in `cwd`."""

    def __init__(self, cwd: Path):
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, COLUMNS, 0, 0))
        (cwd / "terminal").write_text(os.ttyname(theirs))
        self._theirs, self._output = theirs, b""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        while True:
            try:
                self._output += os.read(self._ours, 65536)
            except OSError:  # no process has it open any more
                return

    def output(self) -> str:
        """All that was written to it, after the run."""
        os.close(self._theirs)
        self._reader.join()
        os.close(self._ours)
        return self._output.decode()


def screen(output: str) -> list[str]:
    """The lines that remain: \\r goes to the beginning of a line, ESC [K clears from there on, colours change nothing."""
    lines, column = [""], 0
    for token in re.findall(rf"{ESCAPE}|.|\n", output, re.DOTALL):
        line = lines[-1]
        if token == "\r":
            column = 0
        elif token == "\n":
            lines.append("")
        elif token == "\x1b[K":
            lines[-1] = line[:column]
        elif not token.startswith("\x1b"):
            lines[-1], column = line[:column].ljust(column) + token + line[column + 1 :], column + 1
    return [line.rstrip() for line in lines]


def progress_bars(output: str) -> list[str]:
    """Returns all that was drawn in place."""
    return [re.sub(ESCAPE, "", text) for text in re.findall(r"\r([^\r\n]+)(?=\r(?!\n))", output)]


def print_to_the_terminal(*args: object) -> None:
    """Both streams are the terminal; each step is drawn, and each takes a second by the clock of the logger."""
    tty = os.open(Path("terminal").read_text(), os.O_RDWR | os.O_NOCTTY)
    os.dup2(tty, 1)
    os.dup2(tty, 2)
    os.close(tty)
    sys.stdout, sys.stderr = (open(number, "w", closefd=False) for number in (1, 2))  # noqa: SIM115
    os.environ.pop("NO_COLOR", None)
    os.environ.pop("COLUMNS", None)
    run_logger.STARTED, clock = 0, itertools.count()  # whole numbers: fractions would be rounded when added
    run_logger.time = SimpleNamespace(perf_counter=lambda: next(clock))


def on_a_terminal(before: dict[tuple[str, int], Callable[..., object]]) -> Rank:
    """A process on a terminal, from its first call of `main` on, in which something else happens, too."""
    return Rank(env={"TERM": "xterm"}, before={("train_gpt2.main", 0): print_to_the_terminal, **before})


def interrupt(*args: object) -> None:
    signal.raise_signal(signal.SIGINT)


def warn_from_another_thread(*args: object) -> None:
    warn("from another thread, for example")


@pytest.mark.slow
def test_a_terminal_shows_some_steps_and_a_progress_bar_that_goes(byte_shards, tmp_path):
    flags = ["--data", byte_shards, "--max-steps", 150, "--warmup-steps", 150, "--out", "run"]
    flags += [word for what in ("val", "sample", "checkpoint") for word in (f"--{what}-every", 75)]
    shown = Terminal(tmp_path)
    warned = on_a_terminal({(STEP, 8): warn_from_another_thread})
    assert finish_run(start_run(*flags, cwd=tmp_path, rank=warned)) == [0]
    output = shown.output()
    lines = screen(output)
    bars = progress_bars(output)
    assert max(map(len, bars)) <= COLUMNS
    drawn = [
        re.fullmatch(r"step (\d+) \| loss \d\.\d{4} \| [\d,]+ tok/s \|.* (\d+)% \d\d:\d\d<\d\d:\d\d *", text)
        for text in bars
    ]
    shown = {(int(match[1]), int(match[2])) for match in drawn if match}
    assert shown and all(abs(percent - 100 * (step + 1) / 150) <= 0.5 for step, percent in shown)
    assert not any("%" in line for line in lines) and lines[-1] == ""
    assert "warning: from another thread, for example" in lines and lines[-2].startswith("next    python sample.py")
    steps = [int(match[1]) for line in lines if (match := re.match(r"step +(\d+) \| loss: \d\.\d{6} ", line))]
    assert steps == [*range(0, 150, 10), 149]  # a line in ten seconds
    assert all(len(line) <= COLUMNS or str(byte_shards) in line for line in lines)
    assert "\x1b[1mstep    75 | val loss: " in output and "step    75 | saved run/model_00075" in lines


def test_ctrl_c_leaves_no_progress_bar(byte_shards, tmp_path):
    flags = ["--data", byte_shards, "--max-steps", 9, "--val-every", 0, "--out", "run"]
    shown = Terminal(tmp_path)
    interrupted = on_a_terminal({("train_gpt2.GPT.forward", 3 * 4 + 1): interrupt})  # of 4 micro-steps each
    assert finish_run(start_run(*flags, cwd=tmp_path, rank=interrupted)) == [130]
    output = shown.output()
    lines = screen(output)
    assert "step 2 | loss" in output and not any("step 2 | loss" in line for line in lines)
    assert "SIGINT received: stopping (again to exit immediately)" in lines
    stopped = lines.index("step     3 | stopped. The newest checkpoint is run/model_00003.")
    assert lines[stopped + 1] == "next    python train_gpt2.py --resume auto --out run"
    assert not any(line.startswith("done") for line in lines)


def test_a_file_gets_every_step_and_no_escape_codes(byte_shards, tmp_path, capsys):
    flags = ["--data", byte_shards, "--max-steps", 12, "--val-every", 6, "--sample-every", 6]
    trained(tmp_path / "run", *flags)
    out = capsys.readouterr().out
    assert re.findall(r"^step +(\d+) \| loss: ", out, re.M) == [str(step) for step in range(12)]
    assert "\x1b" not in out and "\r" not in out
    samples = re.findall(r"^step +6 \| sample \d: Hello, I'm a language model,.{100,}$", out, re.M)
    assert len(samples) == 4
    trained(tmp_path / "thinned", *flags, "--log-every", 5)
    out = capsys.readouterr().out
    assert re.findall(r"^step +(\d+) \| loss: ", out, re.M) == ["0", "5", "10", "11"]
    assert log_without_seconds(tmp_path / "thinned") == log_without_seconds(tmp_path / "run")


def save_before_cooldown(checkpoint):
    checkpoint.mkdir(parents=True)
    (checkpoint / "checkpoint.json").write_text('{"before_cooldown": true}')


def test_the_summary_names_the_last_and_the_best_loss(tmp_path, capsys):
    out = tmp_path / "my run"
    (out / "model_00006").mkdir(parents=True)
    val = {0: math.nan, 3: 3.0, 6: 4.0}  # NaN is never the best
    run = run_info("--out", out, "--max-steps", 6, "--prompt", "a b")
    run.__dict__["bytes_per_token"] = 2.0
    state = TrainState(None, None, None, step=6, tokens=1536)
    print_summary(run, ONE_PROCESS, state, 1.0, val, None, ["a\nb\x1b[2Jc", "another"])
    lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"done    6 steps, 1,536 tokens; \d+:\d\d:\d\d elapsed", lines[1])
    assert lines[2:] == [
        "last    validation loss 4.0000 nats per token, 2.0000 per byte, at step 6",
        "best    validation loss 3.0000 nats per token, 1.5000 per byte, at step 3",
        "sample  a b [2Jc",
        f"saved   {out}/model_00006",
        f"next    python sample.py --model '{out}/model_00006' --prompt 'a b'",
    ]
    resumed = replace(
        run, start=replace(run.start, checkpoint=SimpleNamespace(step=2, seconds=60.0, sources={}, config={}))
    )
    resumed.__dict__["bytes_per_token"] = 2.0
    save_before_cooldown(out / "model_00004")
    print_summary(resumed, ONE_PROCESS, state, 1.0, val, None, [])
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].endswith(" elapsed since step 2")
    fork = f"python train_gpt2.py --fork '{out}/model_00004' --out '{out}_longer' --max-steps 12"
    assert lines[-1] == f"longer  {fork}"


@pytest.mark.parametrize(
    "limit, dropout, passes, note, longer",
    [  # by hand, for steps of 1,024 tokens: at 18 passes, dropout is 0.08, and weight decay 3.6 times 0.4
        (10, 0, 2, None, ""),
        (10, 0, 9, None, " --dropout 0.08 --weight-decay 1.44 --max-passes 18"),
        (10, 0, 10, "10 times, and without dropout, more", " --dropout 0.1 --weight-decay 1.2 --max-passes 20"),
        (4, 0, 4, "4 times, which is the limit of --max-passes", " --weight-decay 2.4 --max-passes 8"),
        (25, 0.1, 25, "25 times, and more would only memorize it. A larger", None),
    ],
)
def test_the_command_for_a_longer_run_on_a_text_has_the_flags_for_its_passes(
    tmp_path, capsys, limit, dropout, passes, note, longer
):
    out = tmp_path / "run"
    (out / "model_00006").mkdir(parents=True)
    save_before_cooldown(out / "model_00004")
    (tmp_path / "text.txt").write_text("Some text.")
    of_text = ["--text", tmp_path / "text.txt", "--recipe", "fast", "--total-batch-size", 1024]
    run = run_info("--out", out, *of_text, "--dropout", dropout)
    config = replace(run.config, minutes=5.0, max_passes=limit, weight_decay=0.4)
    start = run.start.with_layer(
        "--text", {"weight_decay": 0.4}
    )  # unlike in a run of a --max-lr, as that of TINY_FLAGS
    run = replace(run, config=config, start=start, schedule=Schedule(config))
    run.__dict__["bytes_per_token"] = 1.0
    state = TrainState(None, None, None, step=6, tokens=1536)
    print_summary(run, ONE_PROCESS, state, passes, {6: 4.0}, None, [])
    lines = capsys.readouterr().out.splitlines()
    printed = " ".join(" ".join(lines).split())
    assert ("the data has been read" in printed) == (note is not None) and (note or "") in printed
    command = f"longer  python train_gpt2.py --fork {out}/model_00004 --out {out}_longer --minutes 10"
    assert lines[-1] == (f"next    python sample.py --model {out}/model_00006" if longer is None else command + longer)


@pytest.mark.parametrize(
    "flags, expected",
    [
        (["--weight-decay", 0.3], "cooldown fraction 0.7, shuffle: --text"),  # not what was typed
        # nor what has no effect
        (["--schedule", "cosine", "--no-shuffle", "--max-lr", 1e-3], "weight decay 0.4: --text"),
        (["--recipe", "gpt2"], "shuffle: --text"),
    ],
)
def test_the_header_says_what_was_chosen_and_by_which_flag(tmp_path, flags, expected):
    (tmp_path / "text.txt").write_text("Some text. " * 1000)
    config, start = configure(["--text", tmp_path / "text.txt", "--max-steps", 9, *flags])
    assert describe_choices(replace(run_info(), config=config, start=start)) == expected


@pytest.mark.parametrize("passes, dropout", [(3.0, 0.0), (38.0, 0.0), (38.0, 0.2)])
def test_what_is_named_next_is_the_best_model(tmp_path, capsys, passes, dropout):
    out = tmp_path / "run"
    for step in (3, 6):
        (out / f"model_0000{step}").mkdir(parents=True)
    run = run_info("--out", out, "--max-steps", 6, "--dropout", dropout)
    state = TrainState(None, None, None, step=6, tokens=1536)
    print_summary(run, ONE_PROCESS, state, passes, {0: 5.0, 3: 3.0, 6: 4.0}, out / "model_00003", [])
    printed = capsys.readouterr().out
    assert f"next    python sample.py --model {out}/model_00003\n" in printed and "longer" not in printed
    words = " ".join(printed.split())
    assert f"the last model is worse than {out}/model_00003" in words
    assert ("it has read its data 38 times, and memorizes it" in words) == (passes > 10)
    assert ("Use --dropout 0.2, or more text." in words) == (passes > 10 and not dropout)


@pytest.mark.parametrize("term, no_color, is_styled", [("xterm", "", True), ("xterm", "1", False), ("dumb", "", False)])
def test_colours_only_where_they_are_wanted(monkeypatch, term, no_color, is_styled):
    monkeypatch.setenv("TERM", term)
    monkeypatch.setenv("NO_COLOR", no_color)
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(isatty=lambda: True))
    assert terminal.styled("text", terminal.BOLD) == ("\x1b[1mtext\x1b[0m" if is_styled else "text")


def test_samples_are_broken_at_spaces_on_a_terminal_only(monkeypatch):
    text = "twenty columns, and the rest of it"
    monkeypatch.setenv("COLUMNS", "20")
    assert terminal.fit_lines(text, 2) == text
    monkeypatch.setattr(terminal, "is_terminal", lambda: True)
    assert terminal.fit_lines(text, 2) == "twenty columns, and\n        the rest..."


def test_labels_are_aligned_and_long_words_are_not_broken():
    lines = terminal.labelled("note", " ".join(["word"] * 30)).splitlines()
    assert all(len(line) <= 80 and line.startswith(("note    word", " " * 8 + "word")) for line in lines)
    path = "x" * 90 + "/--max-steps"
    assert terminal.labelled("data", f"{path}: 5 tokens") == f"data    {path}:\n        5 tokens"
