"""Command lines that are made from a dataclass, the console, and exit codes."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass

import pytest
from helpers import ROOT

import fineweb
import hellaswag
import sample
import train_gpt2
from support.cli import (
    Parser,
    UserError,
    add_flags,
    flag,
    flag_fields,
    flag_name,
    parse_flags,
    run_cli,
    type_errors,
)


@dataclass
class Config:
    rate: float = flag(0.5, "how fast", "speed", at_least=0)
    size: int | None = flag(None, "how big", "shape", default_help="as it fits", at_least=1, below=10)
    fast: bool = flag(False, "hurry", "speed")
    check: bool = flag(True, "look", "shape", default_help="sometimes")
    part: float = flag(0.5, "how much", "shape", at_most=1)
    not_a_flag: int = 3


def test_flags_are_the_fields():
    parser = Parser(prog="x")
    add_flags(parser, Config)
    assert vars(parser.parse_args([])) == {}
    given = vars(parser.parse_args("--rate 2 --size 3 --fast --no-check".split()))
    assert given == {"rate": 2.0, "size": 3, "fast": True, "check": False} and type(given["rate"]) is float
    help = parser.format_help()
    assert "how fast (default: 0.5)" in help and "how big (default: as it fits)" in help and "\nspeed:" in help
    assert "not-a-flag" not in help
    with pytest.raises(UserError, match="unrecognized arguments: --siz 3"):
        parser.parse_args(["--siz", "3"])


def test_values_out_of_range_are_reported_together():
    assert parse_flags(Config, "--rate 0 --size 9".split(), "") == {"rate": 0.0, "size": 9}
    with pytest.raises(UserError) as error:
        parse_flags(Config, "--rate nan --size 10 --part 2".split(), "")
    assert error.value.problems == (
        "--rate is nan. It must be a finite number.",
        "--size is 10. It must be less than 10.",
        "--part is 2.0. It must be 1 or less.",
    )


def test_help_lists_every_flag_with_its_default(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as exit:
        train_gpt2.main(["--help"])
    help = capsys.readouterr().out
    assert exit.value.code == 0 and not list(tmp_path.iterdir())
    for field in flag_fields(train_gpt2.TrainConfig):
        assert flag_name(field.name) in help
    for text in (
        "(default: 524288)",
        "(default: 19073)",
        "(default: 6e-4; 3.6e-3 with --recipe fast)",
        "(default: 64 on CUDA, otherwise 4)",
        "schedule:",
    ):
        assert text in " ".join(help.split())


STRINGS = [field for field in flag_fields(train_gpt2.TrainConfig) if field.type in ("str", "str | None")]
EMPTY_FLAGS = {
    train_gpt2: {flag_name(field.name) for field in STRINGS if "choices" not in field.metadata["options"]}
    - {"--prompt"},
    fineweb: {"--input", "--dataset", "--name", "--shards-from", "--check", "--output", "--document-separator"},
    hellaswag: {"--model", "--data", "--json"},
    sample: {"--model"},
}


@pytest.mark.parametrize("script", EMPTY_FLAGS, ids=lambda script: script.__name__)
def test_a_flag_with_nothing_in_it_is_an_error(tmp_path, monkeypatch, script):
    """As of an unset shell variable: --out "$OUT"."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as error:
        script.main([f"{name}=" for name in EMPTY_FLAGS[script]])
    assert set(error.value.problems) == {f"{name} is empty. Pass a value." for name in EMPTY_FLAGS[script]}
    assert not list(tmp_path.iterdir())


def test_the_prompt_may_be_empty():
    assert parse_flags(train_gpt2.TrainConfig, ["--prompt", ""], "") == {"prompt": ""}


def run_main(body: str, stdout: str | int = subprocess.PIPE, stderr: str | int = subprocess.PIPE, **env: str):
    """Runs `run_cli(main)` in a process, with this body of `main`; "full" is a disk without space."""
    code = f"import sys\nfrom support.cli import UserError, run_cli\ndef main():\n    {body}\n"
    with open("/dev/full", "w") as full:
        streams = {"stdout": full if stdout == "full" else stdout, "stderr": full if stderr == "full" else stderr}
        command = [sys.executable, "-c", f"{code}run_cli(main, prints_result={stdout == 'full' and 'result' in body})"]
        return subprocess.run(command, cwd=ROOT, env=os.environ | env, timeout=60, **streams)


def test_a_console_without_space_is_no_error():
    run = run_main("[print('line', file=f) for f in (sys.stdout, sys.stderr) for _ in range(9999)]", "full", "full")
    assert run.returncode == 0
    assert run_main("raise UserError('wrong.')", stderr="full").returncode == 2


@pytest.mark.parametrize("size", [1, 10**5])
def test_a_result_that_cannot_be_printed_is_an_error(size):
    run = run_main(f"print('result' * {size})", stdout="full")
    assert run.returncode == 2
    assert run.stderr == b"error: cannot print the result (No space left on device). Redirect it to another file.\n"


def test_no_file_gets_the_number_of_a_closed_stream(tmp_path):
    """Or what C++ prints to stderr would be written into it."""
    main = f"print(open({str(tmp_path / 'file')!r}, 'w').fileno(), file=open({str(tmp_path / 'number')!r}, 'w'))"
    code = f"from support.cli import run_cli; run_cli(lambda: {main})"
    subprocess.run(
        ["sh", "-c", '"$@" <&- >&- 2>&-', "sh", sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60
    )
    assert int((tmp_path / "number").read_text()) > 2


def test_the_bytes_of_a_file_name_are_printed_as_they_are():
    """In the C locale, Python decodes them as lone surrogates. Other characters that ASCII lacks are escaped."""
    ascii = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    run = run_main(r"raise UserError('no ' + b'caf\xc3\xa9'.decode('ascii', 'surrogateescape') + '\u20ac.')", **ascii)
    assert run.stderr == rb"error: no caf" + b"\xc3\xa9" + rb"\u20ac." + b"\n" and run.returncode == 2


def test_two_dashes_are_no_value():
    """In Python 3.11, argparse makes an empty list of them, whatever the type of the flag."""
    with pytest.raises(UserError, match="argument --size: expected one argument"):
        parse_flags(Config, ["--size=--"], "")


def test_values_of_other_types_are_named():
    assert type_errors(Config, {"rate": 1, "size": None, "fast": True, "other": "x"}) == []
    assert type_errors(Config, {"rate": "1", "size": True, "fast": 0, "check": []}) == [
        "--rate is of the type str, not float.",
        "--size is of the type bool, not int.",
        "--fast is of the type int, not bool.",
        "--check is of the type list, not bool.",
    ]
    [problem] = type_errors(train_gpt2.TrainConfig, {"optimizer": "sgd"})
    assert problem == "--optimizer is 'sgd', none of adamw, muon."


def fail(error):
    raise error


@pytest.mark.parametrize(
    "error", [UserError("no a\nb\x1b[2J \udcff é.", "2"), IsADirectoryError(21, "no", "a\nb\x1b[2J")]
)
def test_an_error_is_one_line_whatever_a_file_is_called(capsysbinary, error):
    with pytest.raises(SystemExit) as exit:
        run_cli(lambda: fail(error))
    lines = capsysbinary.readouterr().err.splitlines()
    assert exit.value.code == 2
    if isinstance(error, UserError):
        assert lines == [rb"error: no a\nb\x1b[2J " + "\udcff é.".encode(errors="surrogateescape"), b"error: 2"]
    else:
        assert lines == [rb"error: no: a\nb\x1b[2J. Check the disk and its permissions."]
