"""Checkpoints that were written at commit ce63d66 resume: fixtures/ce63d66 has three, with the logs of uninterrupted runs.

Each run has six steps, and its checkpoint belongs to step 3: AdamW with dropout and shuffling, Muon in fp16, and LoRA on
AdamW's checkpoint.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from torch.utils._pytree import tree_leaves
from training import resumed, trainer_file

from support.checkpoints.state import TrainState, copy_to_host

FIXTURES = Path(__file__).parent / "fixtures" / "ce63d66"


@pytest.fixture
def runs(tmp_path) -> Path:
    """A copy of the runs and their data."""
    return shutil.copytree(FIXTURES, tmp_path / "runs")


def flags_of(name: str, runs: Path) -> list[object]:
    """The flags of a resume: where data and base model are here."""
    base = ["--init-from", runs / "adamw" / "model_00003"] if name == "lora" else []
    return ["--data", runs / "data", *base]


@pytest.mark.parametrize("name", ["adamw", "muon", "lora"])
def test_a_resumed_run_is_the_uninterrupted_run(runs, name, monkeypatch):
    """And its optimizer continues with the stored state."""
    restored = []
    restore = TrainState.restore

    def watched_restore(state, checkpoint):
        restore(state, checkpoint)
        restored.append((copy_to_host(state.optimizer.state_dict()), state.scaler.state_dict(), state.step))

    monkeypatch.setattr(TrainState, "restore", watched_restore)
    expected = (runs / name / "log.txt").read_text().splitlines()
    state = resumed(runs / name, *flags_of(name, runs))
    lines = [line for line in (runs / name / "log.txt").read_text().splitlines() if line.split()[1] in ("train", "val")]
    assert state.step == 6 and len(lines) == len(expected) == 9
    for line, stored_line in zip(lines, expected, strict=True):
        *step_and_name, value = line.split()
        *stored_step_and_name, stored_value = stored_line.split()
        assert step_and_name == stored_step_and_name
        # Identical on the machine that wrote them; other processors round differently. `val` has four decimals.
        tolerance = 1e-5 if step_and_name[1] == "train" else 1.1e-4
        assert float(value) == pytest.approx(float(stored_value), abs=tolerance)
    stored = trainer_file(runs / name / "model_00003")
    [(optimizer, scaler, step)] = restored
    assert (step, scaler) == (stored["step"], stored["scaler"])
    for group in (*optimizer["param_groups"], *stored["optimizer"]["param_groups"]):
        del group["lr"]  # each step sets it
        if "parts" in group:  # its name then
            group["num_splits"] = group.pop("parts")
    assert any("num_splits" in group for group in optimizer["param_groups"]) == (name == "muon")
    assert optimizer["param_groups"] == stored["optimizer"]["param_groups"]
    torch.testing.assert_close(optimizer["state"], stored["optimizer"]["state"], rtol=0, atol=0)
    assert any(tensor.any() for tensor in tree_leaves(optimizer["state"]))
