"""benchmarks/bench_recipes.py: which runs it makes, and what it computes from their logs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from helpers import ROOT
from training import configure

sys.path.insert(0, str(ROOT / "benchmarks"))
import bench_recipes


def write_log(run: Path, val: dict[int, float]) -> None:
    run.mkdir(parents=True)
    (run / "log.txt").write_text("".join(f"{step} val {loss:.4f}\n" for step, loss in val.items()))


def run_benchmark(flags: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    flags = f"--data . --out runs --scale medium --seeds 1 2 --rates 1e-3 6e-4 {flags}"
    monkeypatch.setattr(sys, "argv", ["bench_recipes.py", *flags.split()])
    bench_recipes.main()


def test_runs_are_made_once_and_each_has_a_schedule_of_its_own_length(tmp_path, monkeypatch, capsys):
    made = []

    def train(command, **_):
        config, _ = configure([*command[2:], "--device", "cpu", "--dtype", "fp32"])
        made.append((Path(config.out).name, config.recipe, config.decay_steps, config.seed))
        write_log(Path(config.out), {config.max_steps: 5 - 1000 * config.max_lr})
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", train)
    for _ in range(2):
        run_benchmark("--steps 200 --fractions 0.5", monkeypatch, tmp_path)
    assert made == [
        ("gpt2-0.001-200-s1", "gpt2", 200, 1),
        ("gpt2-0.0006-200-s1", "gpt2", 200, 1),
        ("gpt2-0.001-200-s2", "gpt2", 200, 2),  # the better rate
        ("gpt2-0.0006-200-s2", "gpt2", 200, 2),
        ("fast-100-s1", "fast", 100, 1),
        ("fast-100-s2", "fast", 100, 2),
    ]
    assert "| fast, 0.5 of the tokens | 100 | 0.20M | 1.400 ± 0.000 (2) | 1.400, 1.400 |" in capsys.readouterr().out


def test_it_finds_where_a_curve_reaches_a_loss(tmp_path, monkeypatch, capsys):
    curve = {0: 5.0, 10: 4.0, 20: 4.5, 30: 3.5}
    for target, step in ((4.5, 5), (4.0, 10), (3.75, 27.5), (3.4, None)):
        assert bench_recipes.crossing(curve, target) == step
    for seed in (1, 2):
        for name, val in (("gpt2-0.001-30", {30: 4.0}), ("gpt2-0.0006-30", {30: 3.4}), ("fast-30", curve)):
            write_log(tmp_path / "runs" / f"{name}-s{seed}", val)
    run_benchmark("--steps 30 --fractions 1", monkeypatch, tmp_path)
    out = capsys.readouterr().out
    assert "3.400: not reached by 2 of 2" in out and (tmp_path / "runs" / "medium.svg").exists()
