"""Compares runs: plots their losses in one figure, and prints the flags that differ and a table.

    python compare.py log log_fast               # against steps, in compare.png
    python compare.py log log_fast --x tokens    # for steps of different sizes
    python compare.py log -o log.png             # one run alone
    python compare.py log --normal               # against ten public runs

DIR is a folder that a run of train_gpt2.py has written. With --normal, it may also be a log.txt, and one that another
trainer has written in the same form, as build-nanogpt does.
"""

from __future__ import annotations

from support import startup

if __name__ == "__main__":
    startup.prepare()  # comes first: the imports take seconds

import itertools
import textwrap
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from support.checkpoints.history import argmin_loss, comparable_values, read_starts, starts_in_log
from support.cli import UserError, flag, flag_name, flag_words, parse_flags, run_cli
from support.config import TRAIN_FLAGS
from support.console import normal
from support.console.curves import (
    AXES,
    NUM_HELLASWAG_ITEMS,
    Run,
    compares_per_byte,
    draw_normal,
    draw_runs,
    has_fineweb_edu,
    read_run,
    save,
    short_count,
)
from support.console.log import read_log
from support.files import check_output_file
from support.terminal import WIDTH, on_one_line

if TYPE_CHECKING:
    from matplotlib.figure import Figure

IGNORED_FLAGS = {"out", "resume", "fork", "profile"}
OPTIONS = IGNORED_FLAGS | {name for name, flag in TRAIN_FLAGS.items() if flag.resume == "changes"}
UNKNOWN, GAP = "-", "  "


@dataclass(frozen=True)
class Arguments:
    """The command line."""

    # fmt: off
    runs: Sequence[str] = flag((), "folders of runs", positional=True, nargs="+", metavar="DIR")
    x: str = flag("steps", "x-axis; hours count only the time spent in training steps",
        choices=tuple(AXES))
    normal: bool = flag(False, "say whether one run of the default recipe is normal, and draw it over ten public runs")
    output: str | None = flag(None, "picture to write", short="-o", metavar="FILE", default_help="compare.png")
    # fmt: on


def parse_arguments(argv: Sequence[str] | None) -> Arguments:
    """Parses the command line.

    Raises:
        UserError: it is not valid; one line for each problem.
    """
    args = Arguments(**parse_flags(Arguments, argv, __doc__))
    if args.output and Path(args.output).suffix.lower() != ".png":
        raise UserError(f"-o {args.output} is not a .png file. Use another name.")
    if args.normal and (len(args.runs) > 1 or args.x != "steps"):
        raise UserError("--normal is for one run, by steps. Name one, without --x.")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_arguments(argv)
    picture = Path(args.output or "compare.png")
    check_output_file(picture, "-o")
    if args.normal:
        return answer_normal(Path(args.runs[0]), picture, asked_to_draw=args.output is not None)
    runs = read_runs(args.runs)
    if args.x == "hours" and (lacking := [run.folder for run in runs if not run.has_all_steps]):
        raise UserError(
            *(f"{folder}/log.txt lacks steps, so its hours are unknown. Use --x steps." for folder in lacking)
        )
    if compares_per_byte(runs) and (lacking := [run.folder for run in runs if not run.val]):
        raise UserError(
            *(
                f"{folder} has no validation loss. If the tokenizers differ, only validation losses can be compared."
                for folder in lacking
            )
        )
    labels = label_runs(runs)
    lines = describe(labels, runs)
    if max(map(len, lines)) > WIDTH:  # long names are listed first, and the tables use their numbers
        names = [textwrap.fill(f"{n}  {name}", WIDTH, subsequent_indent="   ") for n, name in enumerate(labels, 1)]
        lines = [*names, "", *describe([str(n) for n in range(1, len(runs) + 1)], runs)]
    try:  # drawn first: printing fails if the reader of stdout has closed it, as head does
        draw(lambda: draw_runs(labels, runs, args.x), picture)
    finally:
        print("\n".join(lines))
    print(f"\nsaved {picture}", flush=True)


def read_runs(folders: Sequence[str]) -> list[Run]:
    """Reads the runs in these folders.

    Raises:
        UserError: some are not runs, or are named twice; one line for each.
    """
    runs, problems = list[Run](), list[str]()
    for folder in map(Path, folders):
        try:
            runs.append(read_run(folder))
        except UserError as error:
            problems += error.problems
    count = Counter(run.folder.resolve() for run in runs)
    problems += [f"{folder} is named twice. Name each run once." for folder, n in count.items() if n > 1]
    if problems:
        raise UserError(*problems)
    return runs


def label_runs(runs: Sequence[Run]) -> list[str]:
    """Returns the name of each run's folder, or its full path if several have the same name."""
    count = Counter(run.name for run in runs)
    return [run.name if count[run.name] == 1 else on_one_line(str(run.folder.resolve())) for run in runs]


def draw(make: Callable[[], Figure], path: Path) -> None:
    """Makes and writes the picture.

    Raises:
        UserError: it cannot be drawn or written.
    """
    try:
        save(make(), path, unique=True)
    except Exception as error:  # matplotlib raises many kinds
        raise UserError(f"cannot draw {path} ({error}). Check the disk, and matplotlib's settings.") from error


def describe(labels: Sequence[str], runs: Sequence[Run]) -> list[str]:
    """Returns the lines that compare the runs: the flags that differ, and the table of results."""
    table = format_columns([("run", *labels), *results(runs)])
    return [*differences(labels, runs), "", *table] if len(runs) > 1 else table


def differences(labels: Sequence[str], runs: Sequence[Run]) -> list[str]:
    """Describes the flags that are not the same in all runs, first those that a run was given on its command line.

    Notes say where a run changed on the way, and whether the data differ, too.
    """
    names = dict.fromkeys(name for run in runs for name in run.flags if name not in IGNORED_FLAGS)
    values = {name: [run.flags.get(name) for run in runs] for name in names}
    different = [name for name in names if any(value != values[name][0] for value in values[name])]
    different.sort(key=lambda name: not any(is_typed(run, name) for run in runs))
    lines = ["The runs have the same flags."]
    if different:
        width = max(8, (WIDTH - max(map(len, map(flag_name, different)))) // len(runs) - len(GAP))
        rows = [(flag_name(name), *(_show(value, width) for value in values[name])) for name in different]
        lines = format_columns(list(zip(*[("flag", *labels), *rows], strict=True)))
    for label, run in zip(labels, runs, strict=True):
        for start, later in itertools.pairwise(run.starts):
            before, after = start["flags"], later["flags"]
            had = {name: value for name, value in before.items() if name not in OPTIONS and value != after.get(name)}
            had = {name: float(f"{value:g}") if type(value) is float else value for name, value in had.items()}
            words = ", ".join(
                f"no {flag_name(name)}" if value is None else flag_words(name, value) for name, value in had.items()
            )
            clauses = [f"had {words}"] if had else []
            if (ran_on := describe_machine(start)) != describe_machine(later):
                clauses.append(f"ran on {ran_on}")
            if clauses:
                note = f"note: before step {later['first_step']:,}, {label} {' and '.join(clauses)}."
                lines += textwrap.wrap(on_one_line(note), WIDTH)
    if any(run.start["data"].get("train") != runs[0].start["data"].get("train") for run in runs):
        lines.append("note: the runs have different training data.")
    validated = [(run.start["data"]["val"], run.start.get("validation_tokens")) for run in runs]
    if any(on != validated[0] for on in validated):
        lines.append("note: the runs have different validation data.")
    # the starts that measured the last scores; older versions say only how many items there were
    scored: list[Mapping[str, Any]] = [
        next((s for s in reversed(run.starts) if s.get("hellaswag_items")), {}) for run in runs if run.hella
    ]
    key = "hellaswag_sha256" if all("hellaswag_sha256" in start for start in scored) else "hellaswag_items"
    if len({start.get(key) for start in scored}) > 1:
        lines.append("note: the runs have different HellaSwag items.")
    return lines


def describe_machine(start: Mapping[str, Any]) -> str:
    """Describes what a process ran on: `8 x NVIDIA A100-SXM4-80GB, bf16`."""
    machine = start.get("machine", {})
    return f"{machine.get('processes')} x {machine.get('device')}, {machine.get('dtype')}"


def is_typed(run: Run, name: str) -> bool:
    """Returns whether a flag's value is from the command line, rather than a default or chosen by another flag.

    The starts of older versions do not say so.
    """
    sources = run.start.get("sources")
    return isinstance(sources, dict) and str(sources.get(name)).startswith("command line")


def results(runs: Sequence[Run]) -> list[tuple[str, ...]]:
    """Returns the columns of the table, each with its title; columns that no run has measured are left out.

    Losses are per byte if the tokenizers differ. With names of up to ten characters, a line has at most 80 columns, unless
    a run diverged.
    """
    per_byte, rows = compares_per_byte(runs), list[dict[str, str]]()
    for run in runs:
        ([hours], [tokens]) = (run.positions([run.steps], axis) for axis in ("hours", "tokens"))
        row = {"params": short_count(run.start["parameters"]), "steps": f"{run.steps:,}"}
        row |= {"tokens": short_count(tokens), "hours": f"{hours:.3f}" if run.has_all_steps else UNKNOWN}
        val = run.comparable("val")
        if (best := argmin_loss(val)) is not None:
            last = max(val)
            scale, title = (1 / run.bytes_per_token, "val/byte") if per_byte else (1.0, "val loss")
            at_last = "" if last == run.steps else f" (step {last:,})"
            row |= {
                title: f"{scale * val[last]:.4f}{at_last}",
                "best": f"{scale * val[best]:.4f}",
                "at step": f"{best:,}",
            }
        if hella := run.comparable("hella"):
            at_last = "" if max(hella) == run.steps else f" (step {max(hella):,})"
            row["HellaSwag"] = f"{hella[max(hella)]:.4f}{at_last}"
        if run.lost_from is not None:
            row["nan from"] = f"{run.lost_from:,}"
        rows.append(row)
    titles = dict.fromkeys(title for row in rows for title in row)
    return [(title, *(row.get(title, UNKNOWN) for row in rows)) for title in titles]


def format_columns(columns: Sequence[Sequence[str]]) -> list[str]:
    """Returns the lines of a table: the first column flush left, the others right. Text may come from a stranger's files."""
    columns = [[on_one_line(cell) for cell in column] for column in columns]
    widths, lines = [max(map(len, column)) for column in columns], []
    for first, *others in zip(*columns, strict=True):
        cells = [f"{first:{widths[0]}}", *(f"{cell:>{width}}" for cell, width in zip(others, widths[1:], strict=True))]
        lines.append(GAP.join(cells).rstrip())
    return lines


# -----------------------------------------------------------------------------
# --normal

LEAST_VALIDATED = 327_680  # tokens; see `normal.FEWER_TOKENS`
SHOWN_STEPS = {10, 50, 100, 250, 1000, 5000, 10000, 15000}  # besides the last one


def answer_normal(path: Path, picture: Path, asked_to_draw: bool) -> None:
    """Prints a log's values beside the band, and whether the run is normal, and draws them.

    A run with a different recipe or different data gets no verdict, and is drawn only if that was asked for.

    Args:
        path: a run's folder, or a log.

    Raises:
        UserError: there is no log, or it has no value to compare.
    """
    file = path / "log.txt" if path.is_dir() else path
    if not file.is_file():
        raise UserError(f"there is no log at {file}. Pass a run's --out folder, or a log.txt.")
    log, starts = read_log(file, finite=False), read_starts(file.parent) if file.name == "log.txt" else []
    for name in normal.NAMES if starts else ():
        log[name] = comparable_values(name, log[name], starts)
    newest_first = starts_in_log(starts)[::-1]
    validated, items = (
        next((start[key] for start in newest_first if start.get(key)), None)
        for key in ("validation_tokens", "hellaswag_items")
    )
    if log["val"] and validated and validated < LEAST_VALIDATED:
        print(
            f"note: losses over {validated:,} tokens are left out; the public runs validate on {LEAST_VALIDATED:,} or more."
        )
        log["val"] = {}
    if log["hella"] and items not in (None, NUM_HELLASWAG_ITEMS):
        print(
            f"note: HellaSwag scores on {items:,} items are left out; the public runs have all {NUM_HELLASWAG_ITEMS:,}."
        )
        log["hella"] = {}
    if not starts:
        print("note: there is no starts.jsonl beside this log, so its flags and data are not compared.")
    verdict = normal.judge(log)
    if verdict is None:
        raise UserError(
            f'{path} has no value to compare, as in the line "10 train 9.8757": the first ones are of steps 0, 10 and 20. '
            "Pass a run's --out folder, or a log.txt."
        )
    # of any start whose losses are in the log: a fork may have changed the recipe
    differs = next(filter(None, map(describe_other_recipe, reversed(starts_in_log(starts)))), list[str]())
    draws = asked_to_draw or not differs
    try:  # drawn first, as above
        if draws:
            draw(lambda: draw_normal(on_one_line(str(path)), log), picture)
    finally:
        print("\n".join(differs or describe_values(verdict)), end="\n\n")
    print(f"saved {picture}" if draws else "With -o FILE, the run is drawn over the public ones all the same.")
    print(
        "no verdict: the flags above make this a different run from the public ones." if differs else verdict,
        flush=True,
    )


def describe_other_recipe(start: Mapping[str, Any]) -> list[str]:
    """Returns a table of the flags that make a run incomparable with the public runs; no line if there are none."""
    rows = [
        (flag_name(name), _show(value, 40), _show(recipe, 40))
        for name, value, recipe in normal.other_flags(start["flags"])
    ]
    if not has_fineweb_edu(start):
        rows.append(("--data", _show(start["data"].get("source"), 40), "FineWeb-Edu"))
    return format_columns(list(zip(("flag", "this run", "public runs"), *rows, strict=True))) if rows else []


def describe_values(verdict: normal.Verdict) -> list[str]:
    """Returns the lines before the verdict: values and band at some steps, and what the log is too short for."""
    points = {name: {point.step: point for point in verdict.points[name]} for name in normal.NAMES}
    shown = SHOWN_STEPS | {step for at in points.values() for step in list(at)[-1:]}
    shown |= {point.step for point in verdict.outside[:1]}
    steps = sorted(step for step in shown if step in points["train"] or step in points["val"])
    columns = [["step", *(f"{step:,}" for step in steps)]]
    for name, title in (("train", "training"), ("val", "validation")):
        at = [points[name].get(step) for step in steps]
        columns += [
            [title, *(f"{point.value:.4f}" if point else "" for point in at)],
            ["band", *(f"{point.low:.3f} to {point.high:.3f}" if point else "" for point in at)],
            ["widths", *(_widths(point) if point else "" for point in at)],
        ]
    lines = format_columns(columns)
    lines += [
        "",
        "widths: how far a value is above (+) or below (-) the band, in its widths; noise explains some",
    ]
    for point in verdict.points["hella"][-1:]:
        band = f"{point.low:.4f} to {point.high:.4f}"
        lines.append(f"HellaSwag at step {point.step:,}: {point.value:.4f}; band: {band}; widths: {_widths(point)}")
    if later := sorted({signature.step for signature in verdict.too_early_for}):
        more = " or ".join(f"{step:,}" for step in later)
        lines.append(f"step {verdict.last_step:,} of {normal.STEPS:,}: some faults show only at step {more}")
    if verdict.possible:
        lines.append(f"possible, as far as the log tells: {'; '.join(verdict.possible)}")
    return lines


def _widths(point: normal.Point) -> str:
    return f"{point.widths:+.1f}" if abs(point.widths) >= 0.05 else "in"


def _show(value: Any, width: int) -> str:
    """Formats the value of a flag. A text longer than `width` loses its middle."""
    text = UNKNOWN if value is None else f"{value:g}" if type(value) is float else str(value)
    return text if len(text) <= width else f"{text[: width // 2 - 1]}..{text[-((width - 1) // 2) :]}"


if __name__ == "__main__":
    run_cli(main)
