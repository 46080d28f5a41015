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
        flags = f"--data . --out runs --scale small --seeds 1 2 --rates 1e-3 6e-4 {flags}"
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
        assert config.decay_steps == config.max_steps
        made.append((Path(config.out).name, config.recipe, config.warmup_steps, config.max_lr, config.seed))
        write_log(Path(config.out), {config.max_steps: 5 - 1000 * config.max_lr})
        return "", 1.0

    monkeypatch.setattr(bench_recipes, "run_script", train)
    for _ in range(2):
        run_benchmark("--steps 400 --fractions 0.5")
    assert made == [
        ("small-gpt2-0.001-400--schedule_wsd-s1", "gpt2", 40, 1e-3, 1),
        ("small-gpt2-0.0006-400--schedule_wsd-s1", "gpt2", 40, 6e-4, 1),
        ("small-gpt2-0.001-400--schedule_wsd-s2", "gpt2", 40, 1e-3, 2),  # the better rate
        ("small-fast-200-s1", "fast", 6, 1.8e-3, 1),
        ("small-fast-200-s2", "fast", 6, 1.8e-3, 2),
    ]
    assert "| fast | 200 | 0.82M | 3.200 ± 0.000 (2) | 3.200, 3.200 |" in capsys.readouterr().out


def test_it_finds_the_length_of_an_equal_loss(run_benchmark, tmp_path, capsys):
    for target, steps in ((5.0, 10), (4.5, 20), (4.0, 40), (3.75, 80), (3.5, 160), (3.4, None), (5.1, None)):
        length = bench_recipes.steps_to(target, {160: 3.5, 10: 5.0, 40: 4.0})  # in any order; halves in the logarithm
        assert length == (steps and pytest.approx(steps))
    for seed, losses in ((1, {10: 5.0, 40: 4.0}), (2, {10: 4.0, 40: 3.0})):
        for rate, loss in (("0.001", 4.5), ("0.0006", 4.6)):
            write_log(tmp_path / "runs" / f"small-gpt2-{rate}-40--schedule_wsd-s{seed}", {40: loss})
        for steps, loss in losses.items():
            write_log(tmp_path / "runs" / f"small-fast-{steps}-s{seed}", {steps: loss})
    run_benchmark("--steps 40 --fractions 0.25 1 --figure recipes.png")
    assert (
        "4.500 with this fraction of the tokens: 0.500 (1)\nnot between these lengths: 1 of 2 seeds"
        in capsys.readouterr().out
    )
    assert (tmp_path / "recipes.png").read_bytes().startswith(b"\x89PNG")
