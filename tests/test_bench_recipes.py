"""benchmarks/bench_recipes.py: which runs it makes, and what it computes from their logs."""

from __future__ import annotations

import sys
from pathlib import Path

import bench_recipes
import pytest
from training import configure


@pytest.fixture
def run_benchmark(tmp_path, monkeypatch):
    """Runs the benchmark with these flags on a folder `runs`."""

    def run(flags: str) -> None:
        monkeypatch.chdir(tmp_path)
        flags = f"--data . --out runs --scale medium --seeds 1 2 --rates 1e-3 6e-4 {flags}"
        monkeypatch.setattr(sys, "argv", ["bench_recipes.py", *flags.split()])
        bench_recipes.main()

    return run


def write_log(run: Path, val: dict[int, float]) -> None:
    run.mkdir(parents=True)
    (run / "log.txt").write_text("".join(f"{step} val {loss:.4f}\n" for step, loss in val.items()))


def test_runs_are_made_once_and_each_has_a_schedule_of_its_own_length(run_benchmark, monkeypatch, capsys):
    made = []

    def train(script, *flags, **_):
        config, _ = configure([*flags, "--device", "cpu", "--dtype", "fp32"])
        made.append((Path(config.out).name, config.recipe, config.decay_steps, config.seed))
        write_log(Path(config.out), {config.max_steps: 5 - 1000 * config.max_lr})
        return "", 1.0

    monkeypatch.setattr(bench_recipes, "run_script", train)
    for _ in range(2):
        run_benchmark("--steps 200 --fractions 0.5")
    assert made == [
        ("gpt2-0.001-200-s1", "gpt2", 200, 1),
        ("gpt2-0.0006-200-s1", "gpt2", 200, 1),
        ("gpt2-0.001-200-s2", "gpt2", 200, 2),  # the better rate
        ("gpt2-0.0006-200-s2", "gpt2", 200, 2),
        ("fast-100-s1", "fast", 100, 1),
        ("fast-100-s2", "fast", 100, 2),
    ]
    assert "| fast, 0.5 of the tokens | 100 | 0.20M | 1.400 ± 0.000 (2) | 1.400, 1.400 |" in capsys.readouterr().out


def test_it_finds_where_a_curve_reaches_a_loss(run_benchmark, tmp_path, capsys):
    curve = {0: 5.0, 10: 4.0, 20: 4.5, 30: 3.5}
    for target, step in ((4.5, 5), (4.0, 10), (3.75, 27.5), (3.4, None)):
        assert bench_recipes.crossing(curve, target) == step
    for seed in (1, 2):
        for name, val in (("gpt2-0.001-30", {30: 4.0}), ("gpt2-0.0006-30", {30: 3.4}), ("fast-30", curve)):
            write_log(tmp_path / "runs" / f"{name}-s{seed}", val)
    run_benchmark("--steps 30 --fractions 1")
    assert "3.400: not reached by 2 of 2" in capsys.readouterr().out
