"""Command lines: flags defined by a dataclass, and errors that the user can fix."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import difflib
import importlib.util
import math
import os
import platform
import re
import shlex
import shutil
import signal
import sys
import textwrap
import threading
import types
import typing
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from errno import EACCES, EDQUOT, EFBIG, EIO, EISDIR, ENAMETOOLONG, ENOSPC, ENOTDIR, EPERM, EPIPE, EROFS, ESTALE
from importlib import metadata
from typing import TYPE_CHECKING, Any, NoReturn, TextIO, TypeVar

from support import __version__, startup

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T")

DISK_ERRORS = (EISDIR, ENOTDIR, ENOSPC, EDQUOT, EFBIG, EROFS, EACCES, EPERM, ENAMETOOLONG, EIO, ESTALE)


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


def warn(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr, flush=True)


# -----------------------------------------------------------------------------
# Command lines

MAIN_GROUP = "the flags that matter"
MAX_HELP_WIDTH = 100  # columns; longer lines are hard to read
ADVICE = {  # on unknown flags with these words in their names, which other trainers have
    "epochs": "The length of a run is in steps: --max-steps (the header of a run says how many steps an epoch has).",
    "config": "There is no configuration file: every setting is a flag. See --help.",
}
MAY_BE_EMPTY = {"prompt"}  # flags whose value may be the empty string


class HelpFormatter(argparse.HelpFormatter):
    """Help that wraps paragraphs, keeps indented examples as they are, and never divides the name of a flag."""

    def __init__(self, prog: str):
        width = min(shutil.get_terminal_size().columns, MAX_HELP_WIDTH) - 2
        super().__init__(prog, max_help_position=26, width=width)

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(text, width, break_on_hyphens=False, break_long_words=False)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        paragraphs = text.strip().split("\n\n")
        return "\n\n".join(
            textwrap.indent(textwrap.dedent(paragraph), "  ")
            if paragraph.startswith(" ")
            else "\n".join(self._split_lines(paragraph, width))
            for paragraph in paragraphs
        )


class StoreChecked(argparse.Action):
    """argparse's "store", except that a wrong value is added to the `problems` of the parser, and does not end it.

    Args:
        type: converts the text of a value, or raises a ValueError.
        choices: what a text may be, and `hint` what to do if it is something else.
        at_least, at_most, below: bounds of a number.
        required: whether a value must be given.
    """

    def __init__(
        self,
        *,
        type: Callable[[str], Any] = str,
        choices: Sequence[str] = (),
        hint: str | None = None,
        at_least: float = -math.inf,
        at_most: float = math.inf,
        below: float = math.inf,
        required: bool = False,
        **options: Any,
    ):
        super().__init__(**options)  # without the above: argparse would end at the first problem
        if choices and self.metavar is None:
            self.metavar = f"{{{','.join(choices)}}}"
        self.convert, self.allowed, self.hint, self.must_be_given = type, choices, hint, required
        self.at_least, self.at_most, self.below = at_least, at_most, below
        self.name = self.option_strings[-1] if self.option_strings else str(self.metavar)

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        assert isinstance(parser, Parser) and values is not None
        setattr(namespace, self.dest, values)
        try:
            value = self._value_of(values) if isinstance(values, str) else [self._value_of(text) for text in values]
            setattr(namespace, self.dest, value)
        except ValueError as error:
            parser.problems.append(f"{self.name} {error}")

    def _value_of(self, text: str) -> object:
        if not text and self.dest not in MAY_BE_EMPTY:  # as of an unset shell variable
            raise ValueError("is empty. Pass a value.")
        try:
            value = self.convert(text)
        except ValueError:
            wanted = "a number" if self.convert is float else "a whole number"
            raise ValueError(f"is {text!r}. " + (self.hint or f"It must be {wanted}.")) from None
        if self.allowed and value not in self.allowed:
            *others, last = self.allowed
            raise ValueError(f"is {value!r}. " + (self.hint or f"It must be {', '.join(others)} or {last}."))
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"is {value}. It must be a finite number.")
        if isinstance(value, int | float):
            if value < self.at_least:
                raise ValueError(f"is {value}. It must be {self.at_least} or more.")
            if value > self.at_most:
                raise ValueError(f"is {value}. It must be {self.at_most} or less.")
            if value >= self.below:
                raise ValueError(f"is {value}. It must be less than {self.below}.")
        return value


class Parser(argparse.ArgumentParser):
    """argparse, with errors that say what to do, all of them at once, and without abbreviated flags.

    `add_argument` takes the arguments of `StoreChecked`, too.
    """

    def __init__(self, description: str | None = None, **options: Any):
        options = {"usage": "%(prog)s [flags]", **options}
        super().__init__(
            description=description, add_help=False, formatter_class=HelpFormatter, allow_abbrev=False, **options
        )
        self.register("action", None, StoreChecked)  # what `add_argument` uses unless it is told
        self.problems: list[str] = []

    def error(self, message: str) -> NoReturn:
        raise UserError(*self.problems, f"{message}. See --help.")

    def parse_args(self, args: Sequence[str] | None = None) -> argparse.Namespace:  # type: ignore[override]
        """As argparse does, but with all problems.

        Raises:
            UserError: the command line is not valid.
        """
        group = self.add_argument_group("help")  # the last one
        group.add_argument("-h", "--help", action="help", help="print this help and exit")
        # fineweb.py needs no torch
        torch = f", torch {metadata.version('torch')}" if importlib.util.find_spec("torch") else ""
        versions = f"%(prog)s {__version__}, Python {platform.python_version()}{torch}"
        versions += f", {platform.system()} {platform.machine()}"
        group.add_argument("--version", action="version", version=versions, help="print versions and exit")
        args = sys.argv[1:] if args is None else list(args)
        if "--" in args:  # argparse would take no word after it as a flag
            self.error("-- is not used here")
        parsed, unknown = self.parse_known_args(args)
        follows_flag = False
        for word in unknown:
            is_flag = word.startswith("-")
            if is_flag or not follows_flag:  # not the value of an unknown flag
                name = word.split("=")[0]
                near = self._nearest_flag(name)
                what = f"unknown flag {name}." if is_flag else f"{word!r} is not a flag."
                advice = next((ADVICE[part] for part in re.split("[-_]", name) if is_flag and part in ADVICE), None)
                advice = advice or (f"Did you mean {near}? See --help." if near else "See --help.")
                self.problems.append(f"{what} {advice}")
            follows_flag = "=" not in word if is_flag else follows_flag
        for action in self._actions:
            if isinstance(action, StoreChecked) and action.must_be_given and getattr(parsed, action.dest) is None:
                self.problems.append(f"{action.name} is missing. See --help.")
        if self.problems:
            raise UserError(*self.problems)
        return parsed

    def _nearest_flag(self, name: str) -> str | None:
        """The flag that begins or ends with the words of an unknown one, or else is spelled nearly like it."""
        name = name.lstrip("-").replace("_", "-")
        known = [flag[2:] for action in self._actions for flag in action.option_strings if flag.startswith("--")]
        parts = [flag for flag in known if f"{flag}-".startswith(f"{name}-") or flag.endswith(f"-{name}")]
        near = sorted(parts, key=len) or difflib.get_close_matches(name, known, 1)
        return f"--{near[0]}" if near else None


# -----------------------------------------------------------------------------
# Flags from the fields of a dataclass


def flag(default: T, help: str, group: str, *, default_help: str | None = None, **options: Any) -> T:
    """A dataclass field that is also a command-line flag.

    Args:
        default_help: the default in words, for --help, where it depends on other flags or on the machine.
        options: arguments of `add_argument`, and so of `StoreChecked`.
    """
    words = {"help": help, "group": group, "default_help": default_help}
    return dataclasses.field(default=default, metadata={**words, "options": options})


def flag_name(field: str) -> str:
    return "--" + field.replace("_", "-")


def flag_words(field: str, value: object) -> str:
    """A flag and its value as words of a command line."""
    if isinstance(value, bool):
        return flag_name(field) if value else f"--no-{flag_name(field)[2:]}"
    return f"{flag_name(field)} {shlex.quote(str(value))}"


def flag_fields(config_class: type[DataclassInstance]) -> list[dataclasses.Field[Any]]:
    """The fields of a dataclass that were made by `flag`."""
    return [field for field in dataclasses.fields(config_class) if "group" in field.metadata]


def parse_flags(
    config_class: type[DataclassInstance],
    argv: Sequence[str] | None,
    description: str | None = None,
    first_groups: Sequence[str] = (),
) -> dict[str, Any]:
    """Parses a command line with a flag for each field made by `flag`; returns the values of the flags that were given.

    The others can come from somewhere else. `first_groups` are those that --help lists first, after MAIN_GROUP.

    Raises:
        UserError: the command line is not valid, or a value is out of its range.
    """
    parser, hints = Parser(description), typing.get_type_hints(config_class)
    groups = {name: parser.add_argument_group(name) for name in (MAIN_GROUP, *first_groups)}
    for field in flag_fields(config_class):
        meta = field.metadata
        if meta["group"] not in groups:
            groups[meta["group"]] = parser.add_argument_group(meta["group"])
        help = meta["help"]
        if field.default is not False:
            help += f" (default: {meta['default_help'] or _in_words(field.default)})"
        options: dict[str, Any] = {"default": argparse.SUPPRESS, "help": help.replace("%", "%%")}
        hint = hints[field.name]
        kind = next((t for t in typing.get_args(hint) if t is not types.NoneType), hint)  # int for `int | None`
        if kind is bool:
            options["action"] = "store_true" if field.default is False else argparse.BooleanOptionalAction
        else:
            options["type"] = kind
            if "choices" not in meta["options"]:
                options["metavar"] = {int: "N", float: "X"}.get(kind, "NAME")
        groups[meta["group"]].add_argument(flag_name(field.name), **(options | meta["options"]))
    return vars(parser.parse_args(argv))


def add_device_flag(group: argparse._ArgumentGroup) -> None:
    names, help = ("auto", "cuda", "cpu", "mps"), "device (default: auto, the best available)"
    group.add_argument("-d", "--device", default="auto", choices=names, help=help)


def _in_words(value: object) -> str:
    if value is True:
        return "on"
    return f"{value:,}" if type(value) is int and value >= 10_000 else str(value)


# -----------------------------------------------------------------------------
# The console

READER_CLOSED = (EPIPE, EIO)  # of a pipe, of a terminal


class GuardedStream:
    """stdout or stderr, on which training must not depend: what cannot be written is dropped.

    If the reader has closed it, `on_close` is called; without `on_close`, the error is raised. A `required` stream, to
    which a script prints its result, raises a `UserError` instead of dropping anything. A line is written when it is
    complete or flushed, in `around_write()`: a status line makes room for it.
    """

    def __init__(self, stream: TextIO, required: bool):
        self.stream, self._required = stream, required
        self.on_close: Callable[[], None] | None = None
        self.around_write: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
        self._begun = ""  # a line that is not complete
        self._lock = threading.RLock()  # the thread that saves checkpoints prints, too

    def write(self, text: str) -> int:
        with self._lock:
            self._begun += text
            if text.endswith(("\n", "\r")):  # \r: of a progress bar
                self.flush()
        return len(text)

    def flush(self) -> None:
        with self._lock:
            text, self._begun = self._begun, ""
            if text:
                self._write_now(text)

    def _write_now(self, text: str) -> None:
        try:
            with self.around_write():
                self.stream.write(text)
                self.stream.flush()
        except OSError as error:
            if error.errno in READER_CLOSED:
                if self.on_close is None:
                    raise BrokenPipeError(EPIPE, "the reader is gone") from error
                self.on_close()
                self._discard()
            elif self._required:
                raise UserError(f"cannot print the result ({error.strerror}). Redirect it to another file.") from error

    def unguard(self) -> TextIO:
        """The stream itself, with nothing left in its buffer that could fail later."""
        try:
            self.stream.write(self._begun)
            self.stream.flush()
        except OSError:
            self._discard()
        return self.stream

    def _discard(self) -> None:
        """Redirects the stream to the null device: what is buffered would fail again when the process ends."""
        with contextlib.suppress(OSError, ValueError), open(os.devnull, "w") as null:
            os.dup2(null.fileno(), self.stream.fileno())

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def guarded_streams() -> list[GuardedStream]:
    """stdout and stderr, in a script that is run with `run_cli`."""
    return [stream for stream in (sys.stdout, sys.stderr) if isinstance(stream, GuardedStream)]


@contextlib.contextmanager
def guarded_console(prints_result: bool) -> Iterator[None]:
    """Guards stdout and stderr, and makes them print anything: what their encoding lacks is escaped."""
    guarded = []
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the parent process; tqdm and print need something to write to
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
        stream = getattr(sys, name)
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
        guarded.append(GuardedStream(stream, required=prints_result and name == "stdout"))
        setattr(sys, name, guarded[-1])
    try:
        yield
    finally:
        sys.stdout, sys.stderr = (stream.unguard() for stream in guarded)


# -----------------------------------------------------------------------------
# Exit codes


def run_cli(main: Callable[[], None], prints_result: bool = False) -> NoReturn:
    """Calls `main` and exits.

    Exit codes: 0 when it returns; 2 after a `UserError` or an error of the disk, with one line per problem; 130 on
    Ctrl-C; 1 if the reader of stdout has closed it. A console that cannot be written is no error, unless the script
    `prints_result` to stdout.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # as the scripts set it for their imports
        signal.signal(signal.SIGINT, signal.default_int_handler)
    startup.show("")
    with guarded_console(prints_result):
        try:
            code: int | str | None = _exit_code(main)
        except SystemExit as stopped:
            code = stopped.code
    if os.environ.get("WORLD_SIZE", "1") != "1":
        # gloo's threads outlive its process group if there was DDP. One that frees a tensor while Python is ending aborts
        # the process, and torchrun reports a finished run as failed.
        os._exit(code if isinstance(code, int) else int(code is not None))
    sys.exit(code)


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
            # a line break as \n, and other control characters so, too: names of files can have them
            escaped = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in problem)
            print(f"error: {escaped}", file=sys.stderr, flush=True)
