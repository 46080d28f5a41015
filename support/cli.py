"""Command lines: flags defined by a dataclass, and errors that the user can fix."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import difflib
import errno
import math
import os
import platform
import re
import shutil
import signal
import sys
import textwrap
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata
from typing import TYPE_CHECKING, Any, NoReturn, TextIO, TypeVar

from support import __version__, startup

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


# -----------------------------------------------------------------------------
# Command lines

MAIN_GROUP = "the flags that matter"
MAX_HELP_WIDTH = 100  # columns; longer lines are hard to read
# What train_gpt2.py says about unknown flags with these words in their names.
ADVICE = {
    "epochs": "The length of a run is in steps: --max-steps (the header of a run says how many steps an epoch has).",
    "config": "There is no configuration file: every setting is a flag. See --help.",
}


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


class Parser(argparse.ArgumentParser):
    """argparse, with errors that say what to do, all of them at once, and without abbreviated flags.

    `hints` has, by name of a parsed value, what to say if it is not a choice of its flag.
    `check_values` returns what else is wrong with values, of which those that could not be converted are None.
    """

    def __init__(self, description: str | None = None, **options: Any):
        options = {"usage": "%(prog)s [flags]", **options}
        super().__init__(
            description=description, add_help=False, formatter_class=HelpFormatter, allow_abbrev=False, **options
        )
        self.hints: dict[str, str] = {}
        self.check_values: Callable[[Mapping[str, Any]], Sequence[str]] = lambda values: ()
        self._help_group = self.add_argument_group("help")
        self._help_group.add_argument("-h", "--help", action="help", help="print this help and exit")
        versions = f"%(prog)s {__version__}, Python {platform.python_version()}, torch {metadata.version('torch')}"
        self._help_group.add_argument("--version", action="version", version=versions, help="print versions and exit")

    def format_help(self) -> str:
        self._action_groups.sort(key=lambda group: group is self._help_group)  # which comes last
        return super().format_help()

    def error(self, message: str) -> NoReturn:
        raise UserError(_reword(message))

    def parse_args(self, args: Sequence[str] | None = None) -> argparse.Namespace:  # type: ignore[override]
        """As argparse does, but it ends at the first wrong value, so values are converted and checked afterwards.

        A flag with nothing in it, as of an unset shell variable, is an error.
        """
        args = sys.argv[1:] if args is None else list(args)
        if "--" in args and not self._get_positional_actions():  # argparse would take no word after it as a flag
            self.error("-- is not used here")
        rules = [(action, action.type, action.choices, action.required) for action in self._actions]
        for action, _, choices, _ in rules:
            action.type, action.choices, action.required = None, None, False
            if choices and not action.metavar:
                action.metavar = f"{{{','.join(choices)}}}"  # as argparse shows them in --help
        try:
            parsed, unknown = self.parse_known_args(args)
        finally:
            for action, type_, choices, required in rules:
                action.type, action.choices, action.required = type_, choices, required
        values, problems = vars(parsed), list[str]()
        missing = []
        for action, kind, choices, required in rules:
            given = values.get(action.dest)
            if given is None:
                missing += [_name_of(action)] if required else []
            elif given == "" or isinstance(given, list) and "" in given:
                if action.dest not in MAY_BE_EMPTY:
                    problems.append(f"{_name_of(action)} is empty. Pass a value.")
                    values[action.dest] = None
            elif isinstance(given, str) and given != action.default:
                values[action.dest], problem = self._convert(action, given, kind, choices)
                problems += problem
        problems += self.check_values(values)
        problems += self._unknown_flags(unknown, missing)
        problems += [f"{name} is missing. See --help." for name in missing]
        if problems:
            raise UserError(*problems)
        return parsed

    def _convert(self, action: argparse.Action, text: str, kind: Any, choices: Any) -> tuple[Any, list[str]]:
        """The value that a text stands for, or None and what is wrong."""
        try:
            value = kind(text) if kind else text
        except ValueError:
            wanted = "a number" if kind is float else "a whole number"
            return None, [f"{_name_of(action)} is {text!r}. It must be {wanted}."]
        if choices is None or value in choices:
            return value, []
        *others, last = choices
        advice = f"It must be {', '.join(others)} or {last}."
        if near := difflib.get_close_matches(value, choices, 1):
            advice = f"Did you mean {near[0]}? {advice}"
        elif action.dest in self.hints:
            advice = self.hints[action.dest]
        return None, [f"{_name_of(action)} is {value!r}. {advice}"]

    def _unknown_flags(self, words: Sequence[str], missing: Sequence[str]) -> Iterator[str]:
        """A sentence for each word that is not a flag of this script, nor the value of such a word.

        If a flag is missing, a word may have been meant as its value.
        """
        follows_flag = False
        for word in words:
            name = word.split("=")[0]
            is_flag = name.startswith("-") and not name[1:2].isdigit()
            if self.prog == "train_gpt2.py" and is_flag and (found := ADVICE.keys() & re.split("[-_]", name)):
                yield f"unknown flag {name}. {ADVICE[found.pop()]}"
            elif is_flag or not follows_flag:
                near = self._nearest_flag(name)
                if not is_flag and not near and missing and missing[0].startswith("-"):
                    near = f"{missing[0]} {word}"
                what = f"unknown flag {name}." if is_flag else f"{word!r} is not a flag."
                yield f"{what} Did you mean {near}? See --help." if near else f"{what} See --help."
            follows_flag = "=" not in word if is_flag else follows_flag

    def _nearest_flag(self, name: str) -> str | None:
        """The flag that begins or ends with the words of an unknown one, or else is spelled nearly like it."""
        name = name.lstrip("-").replace("_", "-")
        known = [flag[2:] for action in self._actions for flag in action.option_strings if flag.startswith("--")]
        parts = [flag for flag in known if f"{flag}-".startswith(f"{name}-") or flag.endswith(f"-{name}")]
        near = sorted(parts, key=len) or difflib.get_close_matches(name, known, 1)
        return f"--{near[0]}" if near else None


def _reword(message: str) -> str:
    """An error message of argparse in the words of this project."""
    if match := re.fullmatch(r"argument (?:-\w/)?(\S+): expected (?:one|at least one) argument", message):
        return f"{match[1]} needs a value. See --help."
    if match := re.fullmatch(r"argument (?:-\w/)?(\S+): ignored explicit argument .*", message, re.DOTALL):
        return f"{match[1]} takes no value. Leave out what follows it."
    return f"{message}. See --help."


def _name_of(action: argparse.Action) -> str:
    return action.option_strings[-1] if action.option_strings else str(action.metavar)


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
    hint: str | None = None,
    **argparse_options: Any,
) -> T:
    """A dataclass field that is also a command-line flag.

    Args:
        default_help: the default in words, for --help, where it depends on other flags or on the machine.
        at_least, at_most, below: bounds of the value, see `range_errors`.
        hint: what to do if the value is not one of the choices.
        argparse_options: passed to `add_argument`.
    """
    bounds = {"at_least": at_least, "at_most": at_most, "below": below}
    words = {"help": help, "group": group, "default_help": default_help, "hint": hint}
    return dataclasses.field(default=default, metadata=words | bounds | {"options": argparse_options})


def flag_name(field: str) -> str:
    return "--" + field.replace("_", "-")


def flag_fields(config_class: type[DataclassInstance]) -> list[dataclasses.Field[Any]]:
    """The fields of a dataclass that were made by `flag`."""
    return [field for field in dataclasses.fields(config_class) if "group" in field.metadata]


def parse_flags(
    config_class: type[DataclassInstance],
    argv: Sequence[str] | None,
    description: str | None = None,
    groups: Sequence[str] = (),
) -> dict[str, Any]:
    """Parses a command line with a flag for each field made by `flag`; returns the values of the flags that were given.

    `groups` are those that --help lists first, after MAIN_GROUP.

    Raises:
        UserError: the command line is not valid, or a value is out of its range.
    """
    parser = Parser(description=description)
    add_flags(parser, config_class, groups)
    parser.check_values = lambda values: range_errors(config_class, values)
    return vars(parser.parse_args(argv))


def add_flags(parser: Parser, config_class: type[DataclassInstance], first_groups: Sequence[str] = ()) -> None:
    """Adds a flag for each field made by `flag`, with its default in the help.

    The parsed namespace holds only the flags that were given, so that the others can come from somewhere else.
    """
    hints = typing.get_type_hints(config_class)
    groups = {name: parser.add_argument_group(name) for name in (MAIN_GROUP, *first_groups)}
    for field in flag_fields(config_class):
        meta = field.metadata
        if meta["group"] not in groups:
            groups[meta["group"]] = parser.add_argument_group(meta["group"])
        help = meta["help"]
        if field.default is not False:
            help += f" (default: {meta['default_help'] or _in_words(field.default)})"
        if meta["hint"]:
            parser.hints[field.name] = meta["hint"]
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


def add_device_flag(group: argparse._ArgumentGroup) -> None:
    names, help = ("auto", "cuda", "cpu", "mps"), "device (default: auto, the best available)"
    group.add_argument("-d", "--device", default="auto", choices=names, help=help)


def _in_words(value: object) -> str:
    if value is True:
        return "on"
    return f"{value:,}" if type(value) is int and value >= 10_000 else str(value)


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

    on_close: Callable[[], None] | None = None

    def __init__(self, stream: TextIO, required: bool):
        self._stream, self._required = stream, required

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
                if self.on_close is None:
                    raise BrokenPipeError(errno.EPIPE, "the reader is gone") from error
                self.on_close()
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
            print(f"error: {_on_one_line(problem)}", file=sys.stderr, flush=True)


def _on_one_line(text: str) -> str:
    r"""Shows a line break as \n, and other control characters so, too: names of files can have them."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
