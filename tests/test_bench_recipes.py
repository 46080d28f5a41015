"""benchmarks/bench_recipes.py, run as a script."""

from __future__ import annotations

import pytest
from helpers import losses, run_script


@pytest.mark.slow
def test_it_compares_runs_of_their_own_length_and_repeats_none(byte_shards, tmp_path):
    small = "--n-layer 1 --n-head 1 --n-embd 16 --block-size 16 --batch-size 256 --warmup-steps 2 --val-every 2"
    flags = ["--data", byte_shards, "--out", "runs", "--scale", "medium", "--steps", 8, "--seeds", 1]
    flags += ["--rates", "1e-3", "--fractions", 0.5]
    flags += ["--flags", f"{small} --val-tokens 512 --dtype fp32 --device cpu"]
    done = run_script("benchmarks/bench_recipes.py", *flags, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    logs = {path.parent.name: path for path in tmp_path.glob("runs/*/log.txt")}
    steps = {name: len(losses(log)) for name, log in logs.items()}
    assert steps == {"gpt2-0.001-8-s1": 8, "gpt2-0.0006-8-s1": 8, "fast-4-s1": 4}
    [end] = losses(logs["fast-4-s1"], "val")[-1:]
    assert f"| fast, 0.5 of the tokens | 4 | 0.01M | {end:.3f} (1) | {end:.3f} |" in done.stdout
    assert (tmp_path / "runs" / "medium.svg").exists()
    again = run_script("benchmarks/bench_recipes.py", *flags, cwd=tmp_path)
    assert again.stdout == done.stdout and not again.stderr  # nothing was trained


@pytest.mark.parametrize("target, fraction", [(4.5, 5 / 30), (4.0, 10 / 30), (3.75, 27.5 / 30), (3.4, None)])
def test_it_finds_where_a_curve_reaches_a_loss(tmp_path, target, fraction):
    """By hand, on finished runs: the curve of fast is 5, 4, 4.5 and 3.5 at steps 0, 10, 20 and 30."""
    curves = {"gpt2-0.001-30-s1": {30: target}, "gpt2-0.0006-30-s1": {30: target}}
    curves["fast-30-s1"] = {0: 5.0, 10: 4.0, 20: 4.5, 30: 3.5}
    for name, curve in curves.items():
        (tmp_path / "runs" / name).mkdir(parents=True)
        log = "".join(f"{step} val {loss:.4f}\n" for step, loss in curve.items())
        (tmp_path / "runs" / name / "log.txt").write_text(log)
    flags = "--data . --out runs --scale medium --steps 30 --seeds 1 --rates 1e-3 --fractions 1".split()
    done = run_script("benchmarks/bench_recipes.py", *flags, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    answer = "not reached by 1 of 1" if fraction is None else f"{fraction:.3f} (1)"
    assert f"fast, 1 of the tokens to AdamW, cosine, 0.001 (best of 1), {target:.3f}: {answer}" in done.stdout
