"""What the scripts do before they import PyTorch."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from helpers import ROOT
from test_terminal import Terminal, screen


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        ({}, "3000"),
        ({"GOMP_SPINCOUNT": "5"}, "5"),
        ({"OMP_NUM_THREADS": "2"}, "None"),
        ({"OMP_WAIT_POLICY": "active"}, "None"),
        ({"OMP_PROC_BIND": "true"}, "3000"),
    ],
)
def test_threads_sleep_soon_unless_the_user_has_chosen(chosen, expected):
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    code = "import os; from support import startup; startup.prepare(); print(os.environ.get('GOMP_SPINCOUNT'))"
    command = [sys.executable, "-c", code]
    assert subprocess.check_output(command, cwd=ROOT, env=environment | chosen, text=True).strip() == expected


@pytest.mark.parametrize("script", ["train_gpt2.py", "fineweb.py", "hellaswag.py", "sample.py", "compare.py"])
def test_without_the_requirements_a_script_says_so(script):
    """-S: no packages but Python's own."""
    command = [sys.executable, "-S", ROOT / script]
    done = subprocess.run(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("error: the packages of requirements.txt are not installed for this Python.")


@pytest.mark.parametrize(
    ("version", "message"),
    [
        ("2.9.1+cu128", "error: PyTorch 2.9.1+cu128 is too old. Install 2.11 or newer, or "),
        ("2.11.0a0+git", None),
        ("3.0.0", None),
    ],
)
@pytest.mark.parametrize("script", ["train_gpt2.py", "sample.py", "hellaswag.py"])
def test_an_old_pytorch_is_a_line_before_anything_fails(tmp_path, script, version, message):
    """The module that would be imported is one that fails."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise AttributeError('as in an old torch')")
    (tmp_path / "torch-1.dist-info").mkdir()
    (tmp_path / "torch-1.dist-info" / "METADATA").write_text(f"Name: torch\nVersion: {version}\n")
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, ROOT / script], capture_output=True, text=True, env=environment, cwd=tmp_path
    )
    if message:
        assert done.returncode == 2 and done.stderr.startswith(message) and "Traceback" not in done.stderr
    else:
        assert "as in an old torch" in done.stderr


@pytest.mark.parametrize(
    ("flags", "code", "printed"),
    [
        (["--help"], 0, "usage: train_gpt2.py [flags]"),
        (["--version"], 0, "train_gpt2.py "),
        (["--max-step", "3", "--seed", "x"], 2, "error: unknown flag --max-step. Did you mean --max-steps?"),
    ],
)
def test_help_and_mistakes_do_not_wait_for_pytorch(flags, code, printed, tmp_path):
    command = [sys.executable, "-X", "importtime", ROOT / "train_gpt2.py", *flags]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == code and printed in (done.stderr if code else done.stdout)
    imported = {line.split("|")[-1].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert "support.config" in imported and not {name for name in imported if name.split(".")[0] == "torch"}


@pytest.mark.slow
def test_a_terminal_shows_something_at_once_that_goes(tmp_path):
    shown = Terminal(tmp_path)
    with open((tmp_path / "terminal").read_text(), "r+b", buffering=0) as tty:
        environment = os.environ | {"TERM": "xterm"}
        subprocess.run(
            [sys.executable, ROOT / "sample.py", "--model", "nothing"], stdout=tty, stderr=tty, env=environment
        )
    output = shown.output()
    assert output.startswith("\rimporting PyTorch ...") and len(screen(output)) > 1
    assert not any("importing" in line for line in screen(output))
