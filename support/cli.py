"""Command lines: flags defined by a dataclass, and errors that the user can fix."""

from __future__ import annotations

import argparse
import dataclasses
import errno
import math
import os
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T")

DISK_ERRORS = (
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
    """Something that the user can fix: one or more sentences, "what is wrong. What to do.".

    With `this_rank_only`, other ranks may not have the problem (a bad batch, a download that failed on this node): the
    rank that raised it prints it. Otherwise the first rank of each node does.
    """

    def __init__(self, *problems: str, this_rank_only: bool = False):
        super().__init__("\n".join(problems))
        self.problems = problems
        self.this_rank_only = this_rank_only


class Parser(argparse.ArgumentParser):
    """argparse, raising `UserError` for a bad command line, and without abbreviated flags."""

    def __init__(self, **options: Any):
        options.setdefault("allow_abbrev", False)
        super().__init__(**options)

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}. See --help for the flags.")


# -----------------------------------------------------------------------------
# Flags from the fields of a dataclass


def flag(
    default: T,
    help: str,
    group: str,
    *,
    default_help: str | None = None,
    at_least: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
    **argparse_options: Any,
) -> T:
    """A dataclass field that is also a command-line flag.

    Args:
        default_help: the default in words, for --help, where it depends on other flags or on the machine.
        at_least, at_most, below: bounds of the value, see `range_errors`.
        argparse_options: passed to `add_argument`.
    """
    bounds = {"at_least": at_least, "at_most": at_most, "below": below}
    metadata = {"help": help, "group": group, "default_help": default_help, "options": argparse_options} | bounds
    return dataclasses.field(default=default, metadata=metadata)


def flag_name(field: str) -> str:
    return "--" + field.replace("_", "-")


def flag_fields(config_class: type[DataclassInstance]) -> list[dataclasses.Field[Any]]:
    """The fields of a dataclass that were made by `flag`."""
    return [field for field in dataclasses.fields(config_class) if "group" in field.metadata]


def parse_flags(
    config_class: type[DataclassInstance], argv: Sequence[str] | None, description: str, groups: Sequence[str] = ()
) -> dict[str, Any]:
    """Parses a command line with a flag for each field made by `flag`; returns the values of the flags that were given.

    `groups` are those that --help lists first.

    Raises:
        UserError: the command line is not valid, or a value is out of its range.
    """
    parser = Parser(description=description)
    add_flags(parser, config_class, groups)
    given = vars(parser.parse_args(argv))
    if problems := range_errors(config_class, given):
        raise UserError(*problems)
    return given


def add_flags(
    parser: argparse.ArgumentParser, config_class: type[DataclassInstance], first_groups: Sequence[str] = ()
) -> None:
    """Adds a flag for each field made by `flag`, with its default in the help.

    The parsed namespace holds only the flags that were given, so that the others can come from somewhere else.
    """
    hints = typing.get_type_hints(config_class)
    groups = {name: parser.add_argument_group(name) for name in first_groups}
    for field in flag_fields(config_class):
        meta = field.metadata
        if meta["group"] not in groups:
            groups[meta["group"]] = parser.add_argument_group(meta["group"])
        help = meta["help"]
        if field.default is not False:
            help += f" (default: {meta['default_help'] or field.default})"
        options: dict[str, Any] = {"default": argparse.SUPPRESS, "help": help.replace("%", "%%")}
        kind = _plain_type(hints[field.name])
        if kind is bool:
            options["action"] = "store_true" if field.default is False else argparse.BooleanOptionalAction
        else:
            options["type"] = kind
            if "choices" not in meta["options"]:
                options["metavar"] = {int: "N", float: "X"}.get(kind, "NAME")
        groups[meta["group"]].add_argument(flag_name(field.name), **(options | meta["options"]))


def range_errors(config_class: type[DataclassInstance], values: Mapping[str, Any]) -> list[str]:
    """One sentence for each value that is outside the bounds of its flag, or not a finite number."""
    problems = []
    for field in flag_fields(config_class):
        value = values.get(field.name)
        at_least, at_most, below = (field.metadata[bound] for bound in ("at_least", "at_most", "below"))
        if value is None:
            continue
        if isinstance(value, float) and not math.isfinite(value):
            problems.append(f"{flag_name(field.name)} is {value}. It must be a finite number.")
        elif at_least is not None and value < at_least:
            problems.append(f"{flag_name(field.name)} is {value}. It must be {at_least} or more.")
        elif at_most is not None and value > at_most:
            problems.append(f"{flag_name(field.name)} is {value}. It must be {at_most} or less.")
        elif below is not None and value >= below:
            problems.append(f"{flag_name(field.name)} is {value}. It must be less than {below}.")
    return problems


def add_device_flag(parser: argparse.ArgumentParser) -> None:
    names, help = ("auto", "cuda", "cpu", "mps"), "device (default: the best available)"
    parser.add_argument("-d", "--device", default="auto", choices=names, help=help)


def _plain_type(hint: Any) -> type:
    """int for `int | None`, and so on."""
    if isinstance(hint, types.UnionType):
        return next(t for t in typing.get_args(hint) if t is not type(None))
    return hint


# -----------------------------------------------------------------------------
# Exit codes


def run_cli(main: Callable[[], None]) -> NoReturn:
    """Calls `main` and exits.

    Exit codes: 0 when it returns; 2 after a `UserError` or an error of the disk, with one line per problem; 130 on
    Ctrl-C; 1 if the reader of stdout has closed it.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the parent process; tqdm and print need something to write to
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # a sample that the terminal cannot show must not end a run
    try:
        main()
        sys.exit(0)
    except UserError as error:
        if error.this_rank_only or os.environ.get("LOCAL_RANK", "0") == "0":
            for problem in error.problems:
                print(f"error: {problem}", file=sys.stderr, flush=True)
        sys.exit(2)
    except BrokenPipeError:  # the reader of our output has closed it, as "| head" does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:
        if error.errno not in DISK_ERRORS:
            raise
        where = f": {error.filename}" if error.filename else ""
        print(f"error: {error.strerror}{where}. Check the disk and its permissions.", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        sys.exit(130)
