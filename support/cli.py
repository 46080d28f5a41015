"""Command lines: flags defined by a dataclass, and errors that the user can fix."""

from __future__ import annotations

import argparse
import codecs
import contextlib
import dataclasses
import errno
import math
import os
import signal
import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TextIO, TypeVar

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
    errno.EIO,
    errno.ESTALE,
)
MAY_BE_EMPTY = {"prompt"}  # flags whose value may be the empty string


class UserError(Exception):
    """Something that the user can fix: one or more sentences, "what is wrong. What to do.".

    With `this_rank_only`, other ranks may not have the problem (a bad batch, a download that failed on this node): the
    rank that raised it prints it. Otherwise the first rank of each node does.
    """

    def __init__(self, *problems: str, this_rank_only: bool = False):
        super().__init__("\n".join(problems))
        self.problems = problems
        self.this_rank_only = this_rank_only

    def with_hint(self, hint: str) -> UserError:
        """The same problems, with another sentence after the last one."""
        *others, last = self.problems
        return UserError(*others, f"{last} {hint}", this_rank_only=self.this_rank_only)


class Parser(argparse.ArgumentParser):
    """argparse, raising `UserError` for a bad command line, and without abbreviated flags."""

    def __init__(self, **options: Any):
        options.setdefault("allow_abbrev", False)
        super().__init__(**options)

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}. See --help for the flags.")

    def parse_args(self, args: Sequence[str] | None = None) -> argparse.Namespace:  # type: ignore[override]
        """As argparse does, but a flag with nothing in it, as of an unset shell variable, is an error."""
        for arg in sys.argv[1:] if args is None else args:
            if arg.startswith("-") and arg.endswith("=--"):  # an empty list for argparse of Python 3.11, of any type
                self.error(f"argument {arg.removesuffix('=--')}: expected one argument")
        parsed = super().parse_args(args)
        empty = [name for name, value in vars(parsed).items() if value == "" or isinstance(value, list) and "" in value]
        if problems := [f"{flag_name(name)} is empty. Pass a value." for name in empty if name not in MAY_BE_EMPTY]:
            raise UserError(*problems)
        return parsed


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


def type_errors(config_class: type[DataclassInstance], values: Mapping[str, Any]) -> list[str]:
    """One sentence for each value, not from a command line, that its flag could not have."""
    hints = typing.get_type_hints(config_class)
    problems = []
    for field in flag_fields(config_class):
        value = values.get(field.name)
        if value is None:
            continue
        kind, choices = _plain_type(hints[field.name]), field.metadata["options"].get("choices")
        if type(value) is not kind and not (kind is float and type(value) is int):
            problems.append(f"{flag_name(field.name)} is of the type {type(value).__name__}, not {kind.__name__}.")
        elif choices and value not in choices:
            problems.append(f"{flag_name(field.name)} is {value!r}, none of {', '.join(choices)}.")
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
# The console

READER_CLOSED = (errno.EPIPE, errno.EIO)  # of a pipe, of a terminal


class GuardedStream:
    """stdout or stderr, on which training must not depend: what cannot be written is dropped.

    If the reader has closed it, `on_close` is called; without `on_close`, the error is raised. A `required` stream, to
    which a script prints its result, raises a `UserError` instead of dropping anything.
    """

    def __init__(self, stream: TextIO, on_close: Callable[[], None] | None = None, required: bool = False):
        self._stream, self._on_close, self._required = stream, on_close, required

    def write(self, text: str) -> int:
        self._try(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._try(self._stream.flush)

    def unguard(self) -> TextIO:
        """The stream itself, with nothing left in its buffer that could fail later."""
        try:
            self._stream.flush()
        except OSError:
            self._discard()
        return self._stream

    def _try(self, write: Callable[[], object]) -> None:
        try:
            write()
        except OSError as error:
            if error.errno in READER_CLOSED:
                if self._on_close is None:
                    raise BrokenPipeError(errno.EPIPE, "the reader is gone") from error
                self._on_close()
                self._discard()
            elif self._required:
                raise UserError(f"cannot print the result ({error.strerror}). Redirect it to another file.") from error

    def _discard(self) -> None:
        """Redirects the stream to the null device: what is buffered would fail again when the process ends."""
        with contextlib.suppress(OSError, ValueError), open(os.devnull, "w") as null:
            os.dup2(null.fileno(), self._stream.fileno())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def guarded_console(prints_result: bool) -> Iterator[None]:
    """Guards stdout and stderr, and makes them print anything: what their encoding lacks is escaped."""
    codecs.register_error("console", _encode_for_console)
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass  # if the parent process has closed 0, 1 or 2, no other file must get that number
    os.close(descriptor)
    guarded = []
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the parent process; tqdm and print need something to write to
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
        stream = getattr(sys, name)
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="console")
        guarded.append(GuardedStream(stream, required=prints_result and name == "stdout"))
        setattr(sys, name, guarded[-1])
    try:
        yield
    finally:
        sys.stdout, sys.stderr = (stream.unguard() for stream in guarded)


def _encode_for_console(error: UnicodeError) -> tuple[str | bytes, int]:
    """An error handler for `codecs`: the bytes of a file name as they are, any other character as an escape."""
    assert isinstance(error, UnicodeEncodeError)
    char = error.object[error.start]
    if _is_byte(char):
        return bytes([ord(char) - 0xDC00]), error.start + 1
    return char.encode("ascii", "backslashreplace").decode(), error.start + 1


def _is_byte(char: str) -> bool:
    """Whether it is Python's stand-in for a byte that it could not decode."""
    return "\udc80" <= char <= "\udcff"


# -----------------------------------------------------------------------------
# Exit codes


def run_cli(main: Callable[[], None], prints_result: bool = False) -> NoReturn:
    """Calls `main` and exits.

    Exit codes: 0 when it returns; 2 after a `UserError` or an error of the disk, with one line per problem; 130 on
    Ctrl-C; 1 if the reader of stdout has closed it. A console that cannot be written is no error, unless the script
    `prints_result` to stdout.
    """
    with guarded_console(prints_result):
        sys.exit(_exit_code(main))


def _exit_code(main: Callable[[], None]) -> int:
    try:
        main()
        sys.stdout.flush()
        return 0
    except UserError as error:
        if error.this_rank_only or os.environ.get("LOCAL_RANK", "0") == "0":
            _print_errors(*error.problems)
        return 2
    except BrokenPipeError:  # the reader of our output has closed it, as "| head" does
        return 1
    except OSError as error:
        if error.errno not in DISK_ERRORS:
            raise
        where = f": {error.filename}" if error.filename else ""
        _print_errors(f"{error.strerror}{where}. Check the disk and its permissions.")
        return 2
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second one would be a traceback of the interpreter's own exit
        with contextlib.suppress(BrokenPipeError):
            print("\ninterrupted", file=sys.stderr, flush=True)
        return 130


def _print_errors(*problems: str) -> None:
    with contextlib.suppress(BrokenPipeError):
        for problem in problems:
            print(f"error: {_on_one_line(problem)}", file=sys.stderr, flush=True)


def _on_one_line(text: str) -> str:
    r"""Shows a line break as \n, and other control characters so, too: names of files can have them."""
    return "".join(c if c.isprintable() or _is_byte(c) else c.encode("unicode_escape").decode() for c in text)
