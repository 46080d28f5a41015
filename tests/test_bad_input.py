"""Random bad input ends in error lines: benchmarks/bench_bad_input.py."""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path

import pytest
from helpers import FORKS, finish_run, needs_gpt2_vocabulary, print_to

pytestmark = [pytest.mark.slow, needs_gpt2_vocabulary]


def bench(folder: Path) -> None:
    import bench_bad_input

    print_to(folder / "output.txt")
    sys.argv[1:] = ["--inputs", "32", "--seed", "4215"]
    tempfile.tempdir = str(folder)
    bench_bad_input.main()


def test_bad_input_ends_in_errors(tmp_path):
    process = FORKS.Process(target=bench, args=(tmp_path,))
    process.start()
    codes, printed = finish_run([process]), (tmp_path / "output.txt").read_text()
    assert codes == [0], printed[-5000:]
    rows = re.findall(r"^\| (.+?) \| (\d+) \| (\d+) \| (\d+) \|$", printed, re.MULTILINE)
    assert len(rows) == 7 and sum(int(good) + int(refused) for _, good, refused, _ in rows) == 32
    assert all(int(good) and not int(other) for _, good, _, other in rows), printed
    assert all(int(refused) for kind, _, refused, _ in rows if kind != "bad log"), printed  # what is bad is dropped
    assert not list(tmp_path.glob("bench_bad_input_*"))
