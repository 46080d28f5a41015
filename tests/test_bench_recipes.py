"""benchmarks/bench_recipes.py: what it computes from the logs of its runs."""

from __future__ import annotations

import sys
from pathlib import Path

import bench_recipes
import pytest


def write_log(run: Path, val: dict[int, float]) -> None:
    run.mkdir(parents=True)
    (run / "log.txt").write_text("".join(f"{step} val {loss:.4f}\n" for step, loss in val.items()))


def test_it_finds_the_length_of_an_equal_loss(tmp_path, monkeypatch, capsys):
    for target, steps in ((5.0, 10), (4.5, 20), (4.0, 40), (3.75, 80), (3.5, 160), (3.4, None), (5.1, None)):
        length = bench_recipes.steps_to(target, {160: 3.5, 10: 5.0, 40: 4.0})  # in any order; halves in the logarithm
        assert length == (steps and pytest.approx(steps))
    for seed, losses in ((1, {10: 5.0, 40: 4.0}), (2, {10: 4.0, 40: 3.0})):
        for rate, loss in (("0.001", 4.5), ("0.0006", 4.6)):
            write_log(tmp_path / "runs" / f"small-gpt2-{rate}-40--schedule_wsd-s{seed}", {40: loss})
        for steps, loss in losses.items():
            write_log(tmp_path / "runs" / f"small-fast-{steps}-s{seed}", {steps: loss})
    monkeypatch.chdir(tmp_path)
    flags = (
        "--data . --out runs --scale small --seeds 1 2 --rates 1e-3 6e-4 --steps 40 --fractions 0.25 1 --figure a.png"
    )
    monkeypatch.setattr(sys, "argv", ["bench_recipes.py", *flags.split()])
    bench_recipes.main()  # all runs are there
    printed = capsys.readouterr().out
    assert "4.500 with this fraction of the tokens: 0.500 (1)\nnot between these lengths: 1 of 2 seeds" in printed
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
