"""Command lines: flags defined by a dataclass, and errors that the user can fix."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import functools
import importlib.util
import json
import math
import os
import platform
import re
import shlex
import shutil
import signal
import sys
import textwrap
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from errno import EACCES, EDQUOT, EFBIG, EIO, EISDIR, ENAMETOOLONG, ENOSPC, ENOTDIR, EPERM, EPIPE, EROFS, ESTALE
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TextIO, TypeVar, get_args, get_type_hints

from support import __version__, startup

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T")
Tables = Mapping[str, Mapping[str, Mapping[str, Any]]]

DISK_ERRORS = (EISDIR, ENOTDIR, ENOSPC, EDQUOT, EFBIG, EROFS, EACCES, EPERM, ENAMETOOLONG, EIO, ESTALE)


class UserError(Exception):
    """An error that the user can fix, with one or more messages of the form "what is wrong. What to do.".

    With `this_rank_only`, other ranks may not have the problem (a bad batch, a download that failed on this node): the
    rank that raised the error prints it. Otherwise the first rank of each node does.
    """

    def __init__(self, *problems: str, this_rank_only: bool = False):
        super().__init__("\n".join(problems))
        self.problems = problems
        self.this_rank_only = this_rank_only

    def with_hint(self, hint: str) -> UserError:
        """Returns an error with the same problems and the hint appended to the last one."""
        *others, last = self.problems
        return UserError(*others, f"{last} {hint}", this_rank_only=self.this_rank_only)


# -----------------------------------------------------------------------------
# Command lines: a dataclass for each script, whose fields are its flags

MAIN_GROUP = "the flags that matter"
MAX_HELP_WIDTH = 100  # columns; longer lines are hard to read
# For unknown flags, such as other trainers have: with this in their names, and with these names.
ADVICE = {
    "epochs": "Give the length of a run in steps: --max-steps (the run's header says how many make a pass over the data).",
    "config": "Every setting is a flag; @FILE stands for the flags in a file. See --help.",
    "accum": "A step accumulates micro-batches of --batch-size rows until it has --total-batch-size tokens.",
}
OTHER_NAMES = {
    "max-lr": "lr learning-rate peak-lr peak-learning-rate",
    "max-steps": "steps iters iterations max-iters num-iterations train-steps training-steps total-steps",
    "warmup-steps": "warmup-ratio warmup-fraction",
    "batch-size": "batch micro-batch-size per-device-train-batch-size device-batch-size",
    "data": "dataset dataset-dir data-path train-data input-bin",
    "out": "output output-dir save-dir log-dir checkpoint-dir",
    "output": "out out-dir output-dir",
    "block-size": "context context-length n-ctx seq-len seq-length sequence-length max-length max-seq-len max-seq-length",
    "n-layer": "layers num-layers n-layers depth num-hidden-layers",
    "n-head": "heads num-heads n-heads num-attention-heads",
    "n-embd": "n-embed embed-dim hidden-size hidden-dim d-model dim width",
    "grad-clip": "clip clip-grad max-grad-norm gradient-clip-val",
    "dtype": "precision mixed-precision bf16 fp16 fp32 amp",
    "recompute": "gradient-checkpointing activation-checkpointing grad-checkpointing",
    "val-every": "eval-every eval-interval eval-steps val-interval val-loss-every",
    "val-tokens": "eval-iters val-max-steps",
    "checkpoint-every": "save-every save-interval save-steps",
    "log-every": "log-interval logging-steps",
    "resume": "resume-from resume-from-checkpoint",
    "max-new-tokens": "max-length max-tokens num-tokens length",
    "temperature": "temp",
}


@dataclass(frozen=True)
class Flag:
    """How a field of a dataclass appears on the command line."""

    default: Any
    help: str
    group: str
    default_help: str | None = None  # the default in words, where it depends on other flags or on the machine
    at_least: float = -math.inf
    at_most: float = math.inf
    below: float = math.inf
    choices: Sequence[str] = ()
    parse: Callable[[str], Any] | None = None  # converts the text, or raises a ValueError; None: use the field's type
    hint: str | None = None  # what to do if the text is not among the choices, or cannot be converted
    may_be_empty: bool = False
    required: bool = False
    short: str | None = None  # another name, such as "-m"
    negatable: bool = False  # has a --no- form, like a flag that is on by default
    positional: bool = False  # an argument without a flag name
    metavar: str | None = None  # this and the next fields are as in argparse
    nargs: str | None = None
    const: str | None = None
    # What may happen to a flag of train_gpt2.py; docs/training.md has the table.
    resume: Literal["keeps", "changes"] = "keeps"  # in a resumed run, a different value is an error, or is taken
    # in a fork, a different value is taken; is an error; or giving the flag at all is one, because the checkpoint decides
    fork: Literal["changes", "keeps", "brings"] = "changes"
    init_from: Literal["changes", "brings"] = "changes"  # likewise, with pretrained weights
    per_node: bool = False  # a path, which may differ between the nodes of a run
    stored: bool = True  # in checkpoints; otherwise it is of one start only
    counts_steps: bool = False  # so a run of --minutes has no use for it
    # Other flags, divided by spaces. Those that may set this one; and those that its default depends on: a fork that is
    # given one of them does not take this one from the checkpoint.
    set_by: str = ""
    follows: str = ""


def flag(default: T, help: str, group: str = MAIN_GROUP, **options: Any) -> T:
    """Returns a dataclass field that is also a flag; `options` are other fields of `Flag`."""
    return field(default=default, metadata={"flag": Flag(default, help, group, **options)})


def flag_name(field: str) -> str:
    return "--" + field.replace("_", "-")


def flag_words(field: str, value: object) -> str:
    """Formats a flag and its value as words of a command line."""
    if isinstance(value, bool):
        return flag_name(field) if value else f"--no-{flag_name(field)[2:]}"
    return f"{flag_name(field)} {shlex.quote(str(value))}"


def flags_of(arguments: type[DataclassInstance]) -> dict[str, Flag]:
    """Returns the flags of a dataclass, by field name."""
    return {field.name: field.metadata["flag"] for field in fields(arguments) if "flag" in field.metadata}


def parse_flags(
    arguments: type[DataclassInstance],
    argv: Sequence[str] | None,
    description: str | None = None,
    tables: Tables | None = None,
) -> dict[str, Any]:
    """Parses a command line; returns the values of only the flags that were given: others may come from elsewhere.

    A word @FILE stands for the flags in a file. Flags on the command line itself win, wherever they are.

    Args:
        tables: by flag, its choices, and the defaults of other flags that each of them sets.

    Raises:
        UserError: the command line is not valid, or a value is out of range, one line for each problem; or a file of flags
            cannot be read.
    """
    flags, types = flags_of(arguments), {name: _value_type(t) for name, t in get_type_hints(arguments).items()}
    for name, table in (tables or {}).items():
        flags[name] = replace(flags[name], choices=tuple(table))
    problems = list[str]()

    def convert(name: str, text: str) -> Any:
        try:
            return _convert(text, flags[name], types[name])
        except ValueError as error:  # argparse would stop at the first one
            problems.append(f"{flags[name].metavar if flags[name].positional else flag_name(name)} {error}")

    parser = _make_parser(flags, types, convert, description, tables or {})
    arguments_given = sys.argv[1:] if argv is None else argv
    words, given = words_of(arguments_given), argparse.Namespace()
    try:
        if "--" in words:  # argparse would not treat anything after it as a flag
            parser.error("-- is not used here")
        _, unknown = parser.parse_known_args(words, given)
        problems += _describe_unknown(unknown, [flag_name(name)[2:] for name in flags])
    except UserError as error:
        problems += error.problems
    typed = [word for word in arguments_given if not word.startswith("@")]
    for name in (flag_name(name) for name, flag in flags.items() if flag.nargs == "+"):
        for words_at_once in (typed, words[: len(words) - len(typed)]):  # argparse would take the last values of each
            if sum(word.partition("=")[0] == name for word in words_at_once) > 1:
                problems.append(f"{name} is given twice. Give all its values after one {name}.")
    required = [name for name, flag in flags.items() if flag.required and name not in given]
    problems += [f"{flag_name(name)} is missing. See --help." for name in required]
    if problems:
        raise UserError(*problems)
    return vars(given)


def check_command_line(arguments: type[DataclassInstance], description: str | None, tables: Tables) -> None:
    """Parses a script's command line as `parse_flags` does; prints --help and mistakes, and then exits."""
    _make_streams_usable()
    if code := _exit_code(lambda: parse_flags(arguments, None, description, tables)):
        sys.exit(code)


# In a file of flags: what is quoted, or a comment, which begins at the beginning of a word.
QUOTED_OR_COMMENT = re.compile(r"""("(?:\\.|[^"\\])*"|'[^']*'|\\.)|(?<!\S)#[^\n]*""", re.DOTALL)


def words_of(arguments: Sequence[str]) -> list[str]:
    """Returns the words of the files that @FILE names, divided and quoted as in a shell, and then the other arguments.

    Raises:
        UserError: a file cannot be read.
    """
    from_files = []
    for path in (Path(word[1:]) for word in arguments if word.startswith("@")):
        try:
            text = QUOTED_OR_COMMENT.sub(lambda match: match[1] or "", path.read_text(encoding="utf-8-sig"))
            words = shlex.split(text)
            if inner := next((word for word in words if word.startswith("@")), None):
                raise ValueError(f"it names another file, {inner}")
            from_files += words
        except (OSError, ValueError) as error:
            reason = "it is not UTF-8 text" if isinstance(error, UnicodeError) else describe_error(error)
            advice = (
                f"@{path} stands for the flags in that file; a value that begins with @ needs the form --flag=@value"
            )
            raise UserError(f"cannot read {path} ({reason}). {advice}.") from error
    return [*from_files, *(word for word in arguments if not word.startswith("@"))]


def _convert(text: str, flag: Flag, value_type: type) -> Any:
    """Returns the value of a flag, or raises a ValueError that says what is wrong with the text, and what to do."""
    if not text and not flag.may_be_empty:  # such as from an unset shell variable
        raise ValueError("is empty. Pass a value.")
    try:
        value = (flag.parse or value_type)(text)
    except ValueError:
        wanted = "a number" if value_type is float else "a whole number"
        raise ValueError(f"is {text!r}. {flag.hint or f'It must be {wanted}.'}") from None
    if flag.choices and value not in flag.choices:
        *others, last = flag.choices
        raise ValueError(f"is {value!r}. " + (flag.hint or f"It must be {', '.join(others)} or {last}."))
    if isinstance(value, int | float):
        rules = {
            "a finite number": abs(value) < math.inf,
            f"{flag.at_least} or more": value >= flag.at_least,
            f"{flag.at_most} or less": value <= flag.at_most,
            f"less than {flag.below}": value < flag.below,
        }
        for rule, is_kept in rules.items():
            if not is_kept:
                raise ValueError(f"is {value}. It must be {rule}.")
    return value


def _value_type(hint: Any) -> Any:
    """Returns int for `int`, `int | None` and `list[int]`."""
    inner = [t for t in get_args(hint) if t is not type(None)]
    return _value_type(inner[0]) if inner else hint


def _describe_unknown(words: Sequence[str], known: Sequence[str]) -> list[str]:
    """Returns a line for each unknown flag or word, suggesting the flag that was probably meant."""
    names = {other: flag for flag in known for other in (flag, *OTHER_NAMES.get(flag, "").split())}
    problems, follows_flag = [], False
    for word in words:
        is_flag = word.startswith("-")
        if is_flag or not follows_flag:  # not the value of an unknown flag
            name = word.split("=")[0]
            plain = name.lstrip("-").replace("_", "-")
            parts = [flag for flag in known if f"{flag}-".startswith(f"{plain}-") or flag.endswith(f"-{plain}")]
            alike = [names[other] for other in difflib.get_close_matches(plain, names, 1)]
            near = [names[plain]] if plain in names else sorted(parts, key=len) or alike
            advice = [text for part, text in ADVICE.items() if is_flag and part in plain]
            advice += [f"Did you mean --{near[0]}? See --help." if near else "See --help."]
            problems.append((f"unknown flag {name}. " if is_flag else f"{word!r} is not a flag. ") + advice[0])
        follows_flag = "=" not in word if is_flag else follows_flag
    return problems


def _make_parser(
    flags: Mapping[str, Flag],
    types: Mapping[str, Any],
    convert: Callable[[str, str], Any],
    description: str | None,
    tables: Tables,
) -> argparse.ArgumentParser:
    """Returns a parser that sets what is given, and nothing else; `convert` gets the name and the text of a flag."""
    positional = "".join(f"{flag.metavar} [{flag.metavar} ...] " for flag in flags.values() if flag.positional)
    parser = _Parser(
        usage=f"%(prog)s {positional}[flags]", description=description, add_help=False, allow_abbrev=False,
        formatter_class=_HelpFormatter, epilog="@FILE stands for the flags in a file, with # for comments.",
        argument_default=argparse.SUPPRESS,
    )  # fmt: skip
    titles = dict.fromkeys((MAIN_GROUP, *(flag.group for flag in flags.values())))
    groups = {title: parser.add_argument_group(title if len(titles) > 1 else "flags") for title in titles}
    for name, flag in flags.items():
        default = f" (default: {_describe_default(name, flag, flags, tables)})"
        is_off = flag.default is False and not flag.set_by
        help = flag.help + (" (required)" if flag.required else "" if is_off else default)
        options: dict[str, Any] = {"help": argparse.SUPPRESS if flag.positional else help.replace("%", "%%")}
        if types[name] is bool:
            is_simple = flag.default is False and not flag.negatable
            options["action"] = "store_true" if is_simple else argparse.BooleanOptionalAction
        else:
            usual = f"{{{','.join(flag.choices)}}}" if flag.choices else {int: "N", float: "X"}.get(types[name], "NAME")
            options |= {"metavar": flag.metavar or usual, "nargs": flag.nargs, "const": flag.const}
            options["type"] = functools.partial(convert, name)
        names = [name] if flag.positional else filter(None, [flag.short, flag_name(name)])
        groups[flag.group].add_argument(*names, **options)
    group = parser.add_argument_group("help")  # comes last
    group.add_argument("-h", "--help", action="help", help="print this help and exit")
    torch = f", torch {metadata.version('torch')}" if importlib.util.find_spec("torch") else ""  # fineweb.py needs none
    system = f"{platform.system()} {platform.machine()}"
    versions = f"%(prog)s {__version__}, Python {platform.python_version()}{torch}, {system}"
    group.add_argument("--version", action="version", version=versions, help="print versions and exit")
    return parser


def _describe_default(name: str, flag: Flag, flags: Mapping[str, Flag], tables: Tables) -> str:
    """Says what the default is, with other choices of the flags that have tables, and which flags set another value."""
    default, words = flag.default_help or flag.default, list[str]()
    for key, table in tables.items():
        by_choice = {choice: values[name] for choice, values in table.items() if name in values}
        default = by_choice.get(flags[key].default, default)
        if key not in flag.set_by.split():
            words += [f"{_in_words(v)} with {flag_words(key, c)}" for c, v in by_choice.items() if v != default]
    if flag.set_by:
        words.append("set by " + ", ".join(map(flag_name, flag.set_by.split())))
    return "; ".join([_in_words(default), *words])


def _in_words(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:,}" if type(value) is int and value >= 10_000 else str(value)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        is_missing = re.search(r"expected (at least )?one argument", message)  # argparse takes the next word for a flag
        advice = "A value that begins with - needs the form --flag=VALUE. " if is_missing else ""
        raise UserError(f"{message}. {advice}See --help.")


class _HelpFormatter(argparse.HelpFormatter):
    """Help that wraps paragraphs, keeps indented examples as they are, and never breaks a flag's name across lines."""

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


# -----------------------------------------------------------------------------
# Disks, in words


def format_bytes(size: float) -> str:
    return f"{size / 1e9:,.1f} GB" if size >= 1e9 else f"{size / 1e6:,.1f} MB"


def nearest_existing(path: Path) -> Path:
    """Returns the path itself, or its nearest parent that exists."""
    return next(parent for parent in (path.absolute(), *path.absolute().parents) if parent.exists())


def describe_free_space(path: str | Path) -> str:
    """Says how much space is free on the disk of a path, which need not exist yet: `0.3 GB free`."""
    return f"{format_bytes(shutil.disk_usage(nearest_existing(Path(path))).free)} free"


def describe_error(error: Exception, path: str | Path | None = None) -> str:
    """Returns the reason of an error in words; if the disk of `path` is full, with the space that is free there."""
    reason = getattr(error, "strerror", None) or str(error)
    is_full = isinstance(error, OSError) and error.errno == ENOSPC
    return f"{reason}, {describe_free_space(path)}" if path and is_full else reason


# -----------------------------------------------------------------------------
# The console, and exit codes

# Time for other ranks to print their errors: as soon as one rank has exited, torchrun stops the others.
PRINT_SECONDS = 1.0
READER_CLOSED = (EPIPE, EIO)  # the errors of a pipe and of a terminal whose reader is gone
on_reader_closed: Callable[[], None] | None = None  # called instead of ending the script with a BrokenPipeError


def print_lines(text: str, file: TextIO | None = None) -> None:
    """Prints lines, above a progress bar if there is one.

    No run fails because of its console: lines that do not fit on a full disk are dropped. If the reader has closed the
    stream, the script ends, or `on_reader_closed` is called.
    """
    from tqdm import tqdm  # here: startup.prepare, which says that it is missing, comes after this module

    stream = sys.stdout if file is None else file
    if stream is None:  # closed by the parent process: print nothing, like print()
        return
    try:
        tqdm.write(text, file=stream)
        stream.flush()
    except OSError as error:
        if error.errno in READER_CLOSED:
            if on_reader_closed is None:
                raise BrokenPipeError(EPIPE, "the reader is gone") from error
            on_reader_closed()
            _discard(stream)


def warn(text: str) -> None:
    print_lines(f"warning: {text}", sys.stderr)


def _discard(stream: TextIO) -> None:
    """Redirects the stream to the null device: writing its buffer would fail again when the process ends."""
    with contextlib.suppress(OSError, ValueError), open(os.devnull, "w") as null:
        os.dup2(null.fileno(), stream.fileno())


def run_cli(main: Callable[[], None]) -> NoReturn:
    """Calls `main` and exits.

    Exit codes: 0 when it returns; 2 after a `UserError` or a disk error, with one line per problem; 130 on
    Ctrl-C; 1 if the reader of stdout has closed it, or after any other error, with its traceback.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # as the scripts set it for their imports
        signal.signal(signal.SIGINT, signal.default_int_handler)
    startup.show("")
    _make_streams_usable()
    one_of_several = os.environ.get("WORLD_SIZE", "1") != "1"
    try:
        code: int | str | None = _exit_code(main)
    except SystemExit as stopped:
        code = stopped.code
    except Exception:
        if not one_of_several:
            raise
        traceback.print_exc()
        with contextlib.suppress(OSError):
            _tell_torchrun(traceback.format_exc())
        code = 1
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            _discard(stream)
    if one_of_several:
        # With DDP, gloo's threads outlive the process group. If one of them frees a tensor while Python shuts down, the
        # process aborts, and torchrun reports a finished run as failed. NCCL waits for the other ranks meanwhile, and
        # torchrun, which would stop them, does not see that this one has failed.
        os._exit(code if isinstance(code, int) else int(code is not None))
    sys.exit(code)


def _make_streams_usable() -> None:
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the parent process; tqdm and print need something to write to
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
        if hasattr(getattr(sys, name), "reconfigure"):
            getattr(sys, name).reconfigure(errors="backslashreplace")  # any character can be printed


def _exit_code(main: Callable[[], object]) -> int:
    try:
        main()
        return 0
    except UserError as error:
        if error.this_rank_only or os.environ.get("LOCAL_RANK", "0") == "0":
            _print_errors(*error.problems)
        else:
            time.sleep(PRINT_SECONDS)
        return 2
    except BrokenPipeError:  # the reader of our output has closed it, as "| head" does
        return 1
    except OSError as error:
        if error.errno not in DISK_ERRORS:
            raise
        where = f": {error.filename}" if error.filename else ""
        _print_errors(f"{describe_error(error, error.filename)}{where}. Check the disk and its permissions.")
        return 2
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C would print a traceback at exit
        with contextlib.suppress(OSError):
            print("\ninterrupted", file=sys.stderr, flush=True)
        return 130


def _print_errors(*problems: str) -> None:
    # escapes line breaks and other control characters, which file names can contain
    lines = ["".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text) for text in problems]
    with contextlib.suppress(OSError):
        for line in lines:
            print(f"error: {line}", file=sys.stderr, flush=True)
    with contextlib.suppress(OSError):
        _tell_torchrun("\n".join(lines))


def _tell_torchrun(text: str) -> None:
    """If torchrun started us, has it repeat the text at the end of its report, which fills a screen."""
    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        extra = {"py_callstack": text, "timestamp": str(int(time.time()))}
        path = Path(os.environ["TORCHELASTIC_ERROR_FILE"])
        partial = path.with_suffix(".partial")  # a full disk may truncate it, and torchrun could not parse that
        partial.write_text(json.dumps({"message": {"message": text, "extraInfo": extra}}))
        partial.replace(path)
