"""Command lines that are made from a dataclass, the console, and exit codes."""

from __future__ import annotations

import errno
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import ROOT, wait_for

import compare
import fineweb
import hellaswag
import sample
import train_gpt2
from support import __version__
from support.cli import UserError, flag, flag_name, flags_of, parse_flags, print_lines, run_cli
from support.config import CommandLine


@dataclass
class Config:
    rate: float = flag(0.5, "how fast", "speed", at_least=0)
    size: int | None = flag(None, "how big", "shape", default_help="as it fits", at_least=1, below=10)
    fast: bool = flag(False, "hurry", "speed")
    check: bool = flag(True, "look", "shape", default_help="sometimes")
    part: float = flag(0.5, "how much", "shape", at_most=1)
    not_a_flag: int = 3


def test_flags_are_the_fields(capsys):
    assert parse_flags(Config, []) == {}
    given = parse_flags(Config, "--rate 2 --size 3 --fast --no-check".split())
    assert given == {"rate": 2.0, "size": 3, "fast": True, "check": False} and type(given["rate"]) is float
    assert parse_flags(Config, "--rate 0 --size 9 --part 1".split()) == {"rate": 0.0, "size": 9, "part": 1.0}
    with pytest.raises(SystemExit):
        parse_flags(Config, ["--help"])
    help = capsys.readouterr().out
    assert "how fast (default: 0.5)" in help and "how big (default: as it fits)" in help and "\nspeed:" in help
    assert "not-a-flag" not in help


SCRIPTS = {script.__name__: script for script in (train_gpt2, fineweb, hellaswag, sample, compare)}


def output_of(script, flag, capsys):
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as exit:
        patch.setattr(sys, "argv", [f"{script.__name__}.py"])
        script.main([flag])
    assert not exit.value.code
    return capsys.readouterr().out


def flags_in(help):
    """The flags that have an entry of their own, in order."""
    return [flag for entry in re.findall(r"^  (-.*?)(?:  |$)", help, re.M) for flag in re.findall(r"--[\w-]+", entry)]


@pytest.mark.parametrize("name", SCRIPTS)
def test_help_has_valid_examples_first_and_fits_any_width(name, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for columns in (50, 80, 200):
        monkeypatch.setenv("COLUMNS", str(columns))
        help = output_of(SCRIPTS[name], "--help", capsys)
        usage, _, examples, *_ = help.split("\n\n")
        assert usage == f"usage: {name}.py {'DIR [DIR ...] ' * (name == 'compare')}[flags]"
        flags = flags_in(help)
        assert len(set(flags)) == len(flags) and flags[-2:] == ["--help", "--version"]
        words = {word.strip("(),.;:") for word in re.split(r"[\s/]+", help) if word.startswith("--")}
        assert {word for word in words if not word.startswith("--nproc")} <= {*flags, "--standalone"}  # none is divided
        assert max(map(len, help.splitlines())) <= min(max(columns, 80), 100)  # examples are not wrapped
    for example in examples.splitlines():
        example_flags = shlex.split(example.partition(f"{name}.py")[2], comments=True)
        if name == "train_gpt2":
            parse_flags(CommandLine, example_flags)
        else:
            SCRIPTS[name].parse_arguments(example_flags)
    if name == "train_gpt2":
        assert set(map(flag_name, flags_of(CommandLine))) < set(flags)
        for default in ("524,288", "19,073", "0.0006; 0.0036 with --recipe fast", "64 on CUDA, otherwise 4"):
            assert f"(default: {default}" in " ".join(help.split())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", SCRIPTS)
def test_versions_are_printed(name, capsys):
    printed = output_of(SCRIPTS[name], "--version", capsys)
    versions, found, torch_and_system = printed.partition(", torch ")
    assert versions == f"{name}.py {__version__}, Python {platform.python_version()}" and found
    assert torch.__version__.startswith(torch_and_system.split(",")[0])  # +cu130, for example, may be left out


# Command lines of train_gpt2.py, and of each of their problems, in order, what it names and what to do.
PROBLEMS = {
    "--max-step 3 --seed x --recipe fats": [
        ("--seed is 'x'", "a whole number"), ("--recipe is 'fats'", "gpt2 or fast"), ("--max-step.", "--max-steps?"),
    ],
    "--lr=1e-3 --batch_size 8 --val 3 -x": [
        ("--lr.", "--max-lr?"), ("--batch_size.", "--batch-size?"), ("--val.", "--val-every?"), ("-x", "--help"),
    ],
    "resume -1 --seed 1": [("'resume'", "--resume?"), ("-1", "--help")],
    "--resume runs/a": [("--resume is 'runs/a'", "--out DIR")],
    "--max-steps 10k --max-lr high --out=": [
        ("--max-steps is '10k'", "a whole number"), ("--max-lr is 'high'", "a number"), ("--out is empty", "a value"),
    ],
    "--max-lr nan --dropout 1 --cooldown-fraction 2 --n-layer 0 --out": [
        ("--max-lr", "finite"), ("--dropout", "less than 1"), ("--cooldown-fraction", "1 or less"),
        ("--n-layer", "1 or more"), ("--out", "one argument"),
    ],
    "--num_train_epochs=3 --config small.yaml": [("--num_train_epochs.", "--max-steps"), ("--config.", "is a flag")],
    "--learning-rate 1e-3 --batch 8 --gradient-accumulation-steps=4 --steps 9 --max_iters 9 --dataset d": [
        ("--learning-rate.", "--max-lr?"), ("--batch.", "--batch-size?"),
        ("--gradient-accumulation-steps.", "--total-batch-size"), ("--steps.", "--max-steps?"),
        ("--max_iters.", "--max-steps?"), ("--dataset.", "--data?"),
    ],
    "--lerning-rate 1e-3 --warmpu-steps 3": [("--lerning-rate.", "--max-lr?"), ("--warmpu-steps.", "--warmup-steps?")],
    "--output-dir o --seq-len 9 --num_layers 2 --hidden-size 8 --bf16 --eval-interval 9 --warmup-ratio .1": [
        ("--output-dir.", "--out?"), ("--seq-len.", "--block-size?"), ("--num_layers.", "--n-layer?"),
        ("--hidden-size.", "--n-embd?"), ("--bf16.", "--dtype?"), ("--eval-interval.", "--val-every?"),
        ("--warmup-ratio.", "--warmup-steps?"),
    ],
    "--prompt --help": [("--prompt", "begins with - needs the form --flag=VALUE")],
    "-- --max-steps 3": [("--", "not used")],
    "--demo=yes": [("--demo", "--help")],
}  # fmt: skip


@pytest.mark.parametrize("flags", PROBLEMS)
def test_each_problem_of_a_command_line_says_what_to_do(flags):
    with pytest.raises(UserError) as error:
        train_gpt2.main(flags.split())
    assert len(error.value.problems) == len(PROBLEMS[flags])
    for problem, (name, advice) in zip(error.value.problems, PROBLEMS[flags], strict=True):
        assert name in problem and advice in problem, problem


@pytest.mark.parametrize("flags", ["--modl x", "log/model_00004 --top-k 3", "--top-k=x"])
def test_a_missing_flag_is_named_with_the_other_problems(flags):
    with pytest.raises(UserError) as error:
        sample.main(flags.split())
    other, missing = error.value.problems
    assert flags.split()[0].split("=")[0] in other and missing == "--model is missing. See --help."


def test_missing_words_are_one_problem():
    with pytest.raises(UserError) as error:
        compare.main([])
    assert error.value.problems == ("the following arguments are required: DIR. See --help.",)


def test_names_of_other_trainers_are_only_suggested_where_the_flag_exists():
    with pytest.raises(UserError) as error:
        fineweb.parse_arguments(["--learning-rate", "1", "--output-dir", "d", "--workrs", "2"])
    assert [problem.split(". ", 1)[1] for problem in error.value.problems] == [
        "See --help.", "Did you mean --output? See --help.", "Did you mean --workers? See --help.",
    ]  # fmt: skip


def test_flags_come_from_a_file_and_the_command_line_wins(tmp_path, monkeypatch, capsys):
    """Quotes and comments are as in a shell."""
    monkeypatch.chdir(tmp_path)
    Path("small.txt").write_text(
        '# it\'s small\n--n-layer 4\n--max-lr=1e-3  # found by "search"\n\n'
        "--prompt 'The \"end\" # of'\n--out run#1 --shuffle\n--seed 1\n--keep\n2\n"
    )
    Path("other.txt").write_text("\ufeff--seed 2 --val-every 0\r\n", encoding="utf-8")  # as Windows' editors save it
    expected = dict(n_layer=4, max_lr=1e-3, prompt='The "end" # of', out="run#1", shuffle=True, seed=1, keep=2)
    assert parse_flags(CommandLine, ["@small.txt"]) == expected
    for words in (["--n-layer", "7", "@small.txt"], ["@small.txt", "--n-layer=7"]):
        assert parse_flags(CommandLine, words) == expected | {"n_layer": 7}
    both = parse_flags(CommandLine, ["@small.txt", "@other.txt"])
    assert both == expected | {"seed": 2, "val_every": 0}
    monkeypatch.setattr(sys, "argv", ["fineweb.py", "@f"])
    Path("f").write_text("--input a b\n--output 'my data'")
    args = fineweb.parse_arguments(None)
    assert (args.input, args.output, sys.argv) == (["a", "b"], "my data", ["fineweb.py", "@f"])
    advice = "@bad stands for the flags in that file; a value that begins with @ needs the form --flag=@value."
    for content, problem in {
        None: f"cannot read bad (No such file or directory). {advice}",
        b"--prompt 'x\n": f"cannot read bad (No closing quotation). {advice}",
        b"--seed \xff": f"cannot read bad (it is not UTF-8 text). {advice}",
        b"--seed 1 @other.txt": f"cannot read bad (it names another file, @other.txt). {advice}",
        b"--sed 1": "unknown flag --sed. Did you mean --seed? See --help.",
    }.items():
        if content is not None:
            Path("bad").write_bytes(content)
        with pytest.raises(UserError) as error:
            train_gpt2.main(["@bad"])
        assert error.value.problems == (problem,)


STRINGS = [field.name for field in fields(CommandLine) if field.type in ("str", "str | None")]


def test_a_flag_of_several_values_is_given_once(tmp_path):
    """Other programs want it several times; the first ones would be lost without a word."""
    with pytest.raises(UserError, match="--input is given twice. Give all its values after one --input."):
        fineweb.parse_arguments("--input a.txt b.txt --output x --input=c.txt".split())
    (tmp_path / "flags.txt").write_text("--output x --input a.txt b.txt")
    assert fineweb.parse_arguments([f"@{tmp_path / 'flags.txt'}", "--input", "c.txt"]).input == ["c.txt"]
    (tmp_path / "flags.txt").write_text("--output x\n--input a.txt\n--input b.txt")
    with pytest.raises(UserError, match="--input is given twice"):
        fineweb.parse_arguments([f"@{tmp_path / 'flags.txt'}"])


def test_a_flag_with_nothing_in_it_is_an_error(tmp_path, monkeypatch):
    """A shell variable may be unset: --out "$OUT". But the prompt may be empty."""
    monkeypatch.chdir(tmp_path)
    flags = flags_of(CommandLine)
    names = [flag_name(name) for name in STRINGS if not flags[name].choices]
    with pytest.raises(UserError) as error:
        train_gpt2.main([f"{name}=" for name in names])
    assert [problem.split()[0] for problem in error.value.problems] == [name for name in names if name != "--prompt"]
    assert all(problem.endswith(" is empty. Pass a value.") for problem in error.value.problems)
    assert parse_flags(CommandLine, ["--prompt", ""]) == {"prompt": ""}
    assert not list(tmp_path.iterdir())


def run_main(body: str, stdout: str | int = subprocess.PIPE, stderr: str | int = subprocess.PIPE, **env: str):
    """Runs `run_cli(main)` in a process, with this body of `main`; "full" is a disk without space."""
    code = f"import sys\nfrom support.cli import UserError, print_lines, run_cli\ndef main():\n    {body}\n"
    with open("/dev/full", "w") as full:
        streams = {"stdout": full if stdout == "full" else stdout, "stderr": full if stderr == "full" else stderr}
        command = [sys.executable, "-c", f"{code}run_cli(main)"]
        return subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONUNBUFFERED": ""} | env, timeout=60, **streams)


def test_a_console_that_is_closed_is_no_error(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    print_lines("nobody reads this")


def test_a_console_without_space_is_no_error():
    lines = "[print_lines('line', file) for file in (sys.stdout, sys.stderr) for _ in range(9999)]"
    assert run_main(lines, "full", "full").returncode == 0
    assert run_main("raise UserError('wrong.')", stderr="full").returncode == 2


@pytest.mark.parametrize("size", [1, 10**5])
def test_a_result_that_cannot_be_printed_is_an_error(size):
    run = run_main(f"print('result' * {size}, flush=True)", stdout="full")
    assert run.returncode == 2
    assert run.stderr == b"error: No space left on device. Check the disk and its permissions.\n"


def test_the_console_prints_any_character_in_any_encoding():
    run = run_main(r"print('\u4f60 \udcff')", PYTHONIOENCODING="ascii")
    assert (run.returncode, run.stdout, run.stderr) == (0, rb"\u4f60 \udcff" + b"\n", b"")


def test_a_script_ends_with_the_reader_of_its_output():
    """The reader may be "| head"."""
    read, write = os.pipe()
    os.close(read)
    for printing in ("print_lines('line')", "print('line', flush=True)"):
        run = run_main(f"[{printing} for _ in range(9999)]; raise UserError('not reached')", stdout=write)
        assert (run.returncode, run.stderr) == (1, b"")
    os.close(write)


def fail(error):
    raise error


@pytest.mark.parametrize("error", [UserError("no a\nb\x1b[2J é.", "2"), IsADirectoryError(21, "no", "a\nb\x1b[2J")])
def test_an_error_is_one_line_whatever_a_file_is_called(capsysbinary, error):
    with pytest.raises(SystemExit) as exit:
        run_cli(lambda: fail(error))
    lines = capsysbinary.readouterr().err.splitlines()
    assert exit.value.code == 2
    if isinstance(error, UserError):
        assert lines == [rb"error: no a\nb\x1b[2J " + "é.".encode(), b"error: 2"]
    else:
        assert lines == [rb"error: no: a\nb\x1b[2J. Check the disk and its permissions."]


def test_a_full_disk_is_named_with_its_free_space(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1_234_567) if path == tmp_path else None)
    with pytest.raises(SystemExit):
        run_cli(lambda: fail(OSError(errno.ENOSPC, "No space left on device", f"{tmp_path}/run/log.txt")))
    line = f"error: No space left on device, 1.2 MB free: {tmp_path}/run/log.txt. Check the disk and its permissions.\n"
    assert capsys.readouterr().err == line


# What the scripts import first, in its place: it takes until there is a file "go".
SLOW_IMPORT = """import pathlib, sys, time
pathlib.Path("importing").touch()
while not pathlib.Path("go").exists():
    time.sleep(0.01)
sys.exit(7)
"""


@pytest.mark.parametrize(
    "script, ignored", [*((name, False) for name in SCRIPTS), ("compare", True)]
)  # in the background
def test_ctrl_c_during_the_imports_is_no_traceback(script, ignored, tmp_path):
    for name in ("torch", "numpy"):
        (tmp_path / f"{name}.py").write_text(SLOW_IMPORT)
    process = subprocess.Popen(
        [sys.executable, ROOT / f"{script}.py"], cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(tmp_path)},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        preexec_fn=(lambda: signal.signal(signal.SIGINT, signal.SIG_IGN)) if ignored else None,
    )  # fmt: skip
    assert wait_for((tmp_path / "importing").exists)
    process.send_signal(signal.SIGINT)
    if ignored:
        (tmp_path / "go").touch()
    printed = process.communicate(timeout=30)
    assert (process.returncode, *printed) == (7 if ignored else -signal.SIGINT, b"", b"")  # -2 is 130 to a shell


@pytest.mark.parametrize("main, code", [("lambda: print('done')", 0), ("lambda: exit(143)", 143), ("fail", 2)])
def test_the_end_of_python_does_not_change_the_exit_code_of_a_rank(main, code):
    """gloo's threads may abort the process there."""
    script = f"""
import atexit, os
from support.cli import UserError, run_cli
atexit.register(os.abort)
def fail(): raise UserError("done")
run_cli({main})
"""
    environment = os.environ | {"WORLD_SIZE": "2", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert done.returncode == code and (code == 143 or "done\n" in done.stdout + done.stderr)
