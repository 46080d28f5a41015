"""Random bad input ends in error lines: benchmarks/bench_bad_input.py, run as a script."""

from __future__ import annotations

import re

import pytest
from helpers import needs_gpt2_vocabulary, run_script

pytestmark = [pytest.mark.slow, needs_gpt2_vocabulary]


def test_bad_input_ends_in_errors(tmp_path):
    done = run_script(
        "benchmarks/bench_bad_input.py", "--inputs", 32, "--seed", 4215, cwd=tmp_path, TMPDIR=str(tmp_path)
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr
    rows = re.findall(r"^\| (.+?) \| (\d+) \| (\d+) \| (\d+) \|$", done.stdout, re.MULTILINE)
    assert len(rows) == 7 and sum(int(good) + int(refused) for _, good, refused, _ in rows) == 32
    assert all(int(good) and not int(other) for _, good, _, other in rows), done.stdout
    assert all(int(refused) for kind, _, refused, _ in rows if kind != "bad log"), done.stdout  # what is bad is dropped
    assert not list(tmp_path.glob("bench_bad_input_*"))
