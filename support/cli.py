"""Command lines: flags made from a dataclass, and errors that a user can act on."""

from __future__ import annotations

import argparse
import dataclasses
import errno
import math
import os
import sys
import types
import typing
from collections.abc import Callable
from typing import Any, NoReturn

DISK_TROUBLE = (
    errno.EISDIR,
    errno.ENOTDIR,
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EROFS,
    errno.EACCES,
    errno.EPERM,
    errno.ENAMETOOLONG,
)


class UserError(Exception):
    """Something the user can mend: one or more sentences, "what is wrong. What to do.".

    `this_rank_only` marks trouble that other ranks may not have seen (a bad batch, a failed download of this node):
    such an error is printed by the rank that met it, any other by the first rank of each node.
    """

    def __init__(self, *problems: str, this_rank_only: bool = False):
        super().__init__("\n".join(problems))
        self.problems = problems
        self.this_rank_only = this_rank_only


class Parser(argparse.ArgumentParser):
    """argparse, with its complaints turned into `UserError` and no guessing of abbreviated flags."""

    def __init__(self, **options: Any):
        options.setdefault("allow_abbrev", False)
        super().__init__(**options)

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}. See --help for the flags.")


def flag(
    default: Any,
    help: str,
    group: str,
    *,
    auto: str | None = None,
    least: float | None = None,
    most: float | None = None,
    below: float | None = None,
    **argparse_options: Any,
) -> Any:
    """A dataclass field that is also a command-line flag.

    `auto` says in words what a default of None stands for, `least`, `most` and `below` bound the value (see
    `out_of_range`), and `argparse_options` go to `add_argument` as they are.
    """
    bounds = {"least": least, "most": most, "below": below}
    metadata = {"help": help, "group": group, "auto": auto, "options": argparse_options} | bounds
    return dataclasses.field(default=default, metadata=metadata)


def flag_name(field: str) -> str:
    return "--" + field.replace("_", "-")


def out_of_range(config: Any) -> list[str]:
    """A sentence for each field of a dataclass of flags that is outside its bounds, or not a number."""
    problems = []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        least, most, below = (field.metadata[bound] for bound in ("least", "most", "below"))
        if value is None or least is None:
            continue
        if not value >= least or (isinstance(value, float) and math.isinf(value)):
            problems.append(f"{flag_name(field.name)} is {value}. It must be {least} or more.")
        elif most is not None and value > most:
            problems.append(f"{flag_name(field.name)} is {value}. It must be {most} or less.")
        elif below is not None and value >= below:
            problems.append(f"{flag_name(field.name)} is {value}. It must be less than {below}.")
    return problems


def add_flags(parser: argparse.ArgumentParser, config_class: type) -> None:
    """Adds one flag for each field of a dataclass, grouped and with its default in the help.

    The parsed namespace holds the flags that were given and nothing else, so that a preset or a resumed run can fill
    in the others.
    """
    hints = typing.get_type_hints(config_class)
    groups: dict[str, Any] = {}
    for field in dataclasses.fields(config_class):
        meta = field.metadata
        if meta["group"] not in groups:
            groups[meta["group"]] = parser.add_argument_group(meta["group"])
        default = meta["auto"] if field.default is None else field.default
        help = meta["help"] if field.default is False else f"{meta['help']} (default: {default})"
        options: dict[str, Any] = {"default": argparse.SUPPRESS, "help": help.replace("%", "%%")}
        kind = _plain_type(hints[field.name])
        if kind is bool:
            options["action"] = "store_true" if field.default is False else argparse.BooleanOptionalAction
        else:
            options["type"] = kind
            if "choices" not in meta["options"]:
                options["metavar"] = {int: "N", float: "X"}.get(kind, "NAME")
        groups[meta["group"]].add_argument(flag_name(field.name), **(options | meta["options"]))


def add_device_flag(parser: argparse.ArgumentParser) -> None:
    names, help = ("auto", "cuda", "cpu", "mps"), "device (default: the best one there is)"
    parser.add_argument("-d", "--device", default="auto", choices=names, help=help)


def _plain_type(hint: Any) -> type:
    """int for `int | None`, and so on."""
    if isinstance(hint, types.UnionType):
        return next(t for t in typing.get_args(hint) if t is not type(None))
    return hint


def run(main: Callable[[], None]) -> NoReturn:
    """Calls `main` and exits: 0 when it returns, 2 with a line per problem on a `UserError`, 130 on Ctrl-C."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by whoever started this; tqdm and print need something to write to
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
    for stream in (s for s in (sys.stdout, sys.stderr) if hasattr(s, "reconfigure")):
        stream.reconfigure(errors="backslashreplace")  # a sample that this terminal cannot show must not end a run
    try:
        main()
        sys.exit(0)
    except UserError as error:
        if error.this_rank_only or os.environ.get("LOCAL_RANK", "0") == "0":
            for problem in error.problems:
                print(f"error: {problem}", file=sys.stderr, flush=True)
        sys.exit(2)
    except BrokenPipeError:  # whoever read our output has gone, as after "| head"
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:
        if error.errno not in DISK_TROUBLE:
            raise
        where = f": {error.filename}" if error.filename else ""
        print(f"error: {error.strerror}{where}. Check the disk and its permissions.", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        sys.exit(130)
