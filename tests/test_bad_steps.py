"""Steps that are not finite: skipped on all ranks, counted, and the end of the run when they do not stop."""

from __future__ import annotations

import re
import signal
from unittest import mock

import pytest
import torch
from helpers import STEP, Rank, run_to_the_end
from training import assert_same_run, checkpoint_names, forked, resumed, trained, trainer_file

import train_gpt2
from support.cli import UserError
from train_gpt2 import GPT

HOOKS = []


def make_gradients_nan(model, state, *args):
    first, *_ = (p for p in state.model.parameters() if p.dim() == 1)
    HOOKS.append(first.register_hook(lambda grad: grad * torch.nan))


def make_gradients_finite(*args):
    HOOKS.pop().remove()


def make_loss_infinite(dist, mean):
    mean[0] = torch.inf


ADAMW_STEP, CALLS = torch.optim.AdamW.step, []


def skip_the_fourth(self, *args, **kwargs):
    """The reference: the optimizer is not called at step 3, and nothing is wrong with its gradient."""
    CALLS.append(1)
    return None if len(CALLS) == 4 else ADAMW_STEP(self, *args, **kwargs)


@pytest.mark.slow
def test_one_bad_step_on_one_rank_is_skipped_on_all(byte_shards, tmp_path):
    flags = ["--data", byte_shards, "--max-steps", 8, "--val-every", 0, "--checkpoint-every", 4]
    skipped = Rank(replaced={"torch.optim.AdamW.step": skip_the_fourth})
    run_to_the_end(*flags, "--out", "skipped", cwd=tmp_path, world_size=2, rank=skipped)
    log = (tmp_path / "skipped" / "log.txt").read_text()
    for bad, name, value in (
        ({(STEP, 3): make_gradients_nan, (STEP, 4): make_gradients_finite}, "norm", "nan"),
        ({("train_gpt2.Distributed.all_reduce_mean", 3): make_loss_infinite}, "train", "inf"),
    ):
        out = tmp_path / name
        run_to_the_end(*flags, "--out", out, cwd=tmp_path, world_size=2, rank={1: Rank(before=bad)})
        output = (tmp_path / "0.txt").read_text()
        assert output.count("step     3 | skipped: the loss or the gradient is not finite") == 1
        assert "step     4 | no checkpoint while steps are skipped" in output
        assert checkpoint_names(out) == ["model_00008"]
        bad_log = (out / "log.txt").read_text()
        assert f"\n3 {name} {value}\n" in bad_log
        [line] = re.findall(f"^3 {name} .*\n", log, re.M)  # the one line that cannot be the same
        (out / "log.txt").write_text(bad_log.replace(f"3 {name} {value}\n", line))
        assert_same_run(out, tmp_path / "skipped")


@pytest.mark.parametrize("device, by_itself", [("cuda", True), ("cuda", False), ("mps", True)])
def test_a_fused_optimizer_skips_the_step_without_the_host_except_on_mps(device, by_itself):
    """There PyTorch's fused AdamW ignores `found_inf`. Elsewhere, to look at `finite` would make the host wait."""
    optimizer, finite = mock.Mock(_step_supports_amp_scaling=by_itself), mock.MagicMock()
    applied = by_itself and device != "mps"
    finite.device.type, finite.float.return_value = device, torch.tensor(0.0)
    finite.__bool__.return_value = False
    train_gpt2.step_if_finite(optimizer, finite)
    assert optimizer.step.called == applied and finite.__bool__.called != applied
    assert not applied or optimizer.found_inf == 1
    finite.__bool__.return_value = True
    train_gpt2.step_if_finite(optimizer, finite)
    assert optimizer.step.call_count == applied + 1


def bad_losses(monkeypatch, steps, value=float("nan")):
    """Makes the loss of these steps `value`, in every micro-batch."""
    real, calls = train_gpt2.train_step, []

    def step(*args):
        calls.append(1)
        if len(calls) - 1 not in steps:
            return real(*args)
        forward = GPT.forward
        monkeypatch.setattr(GPT, "forward", lambda *args: (None, forward(*args)[1] * value))
        try:
            return real(*args)
        finally:
            monkeypatch.setattr(GPT, "forward", forward)

    monkeypatch.setattr(train_gpt2, "train_step", step)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_bad_steps_in_a_row_end_the_run(byte_shards, tmp_path, monkeypatch, dtype, value):
    bad_losses(monkeypatch, {2, 3, 5, 6, 7}, value)
    with pytest.raises(UserError, match="3 steps in a row .* not finite, the last one at step 7, and none was applied"):
        trained(tmp_path, "--data", byte_shards, "--max-steps", 20, "--checkpoint-every", 1, "--dtype", dtype)
    assert checkpoint_names(tmp_path) == ["model_00001", "model_00002", "model_00005"]
    logged = (tmp_path / "log.txt").read_text()
    assert re.findall(r"^(\d+) train (?:nan|inf)$", logged, re.M) == list("23567")
    saved = [GPT.from_pretrained(tmp_path / name).state_dict() for name in ("model_00002", "model_00005")]
    assert all(torch.isfinite(tensor).all() for state in saved for tensor in state.values())
    # of the steps between those two, only step 4 was applied
    assert trainer_file(tmp_path / "model_00005")["optimizer"]["state"][0]["step"] == 3


def test_an_overflow_in_fp16_is_skipped_on_mps_too(byte_shards, tmp_path, monkeypatch):
    """As if this were an Apple GPU: its fused AdamW ignores `found_inf`, so the first overflow would make the weights NaN."""
    step_if_finite, adamw_step = train_gpt2.step_if_finite, torch.optim.AdamW.step

    def as_on_mps(optimizer, finite):
        on_mps = mock.MagicMock()
        on_mps.device.type, on_mps.__bool__.return_value = "mps", bool(finite)
        step_if_finite(optimizer, on_mps)

    def step(self):
        self.found_inf = None
        adamw_step(self)

    monkeypatch.setattr(train_gpt2, "step_if_finite", as_on_mps)
    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    bad_losses(monkeypatch, {2}, float("inf"))
    trained(tmp_path, "--data", byte_shards, "--max-steps", 5, "--dtype", "fp16")
    logged = (tmp_path / "log.txt").read_text()
    assert re.findall(r"^(\d+) train (?:nan|inf)$", logged, re.M) == ["2"]
    trainer = trainer_file(tmp_path / "model_00005")
    assert trainer["optimizer"]["state"][0]["step"] == 4 and trainer["scaler"]["scale"] == 2**15  # halved once


def test_a_bad_last_step_does_not_cost_the_others(byte_shards, tmp_path, monkeypatch):
    bad_losses(monkeypatch, {4, 5})
    trained(tmp_path, "--data", byte_shards, "--max-steps", 6)
    state = trainer_file(tmp_path / "model_00006")
    assert state["bad_steps"] == 2 and state["optimizer"]["state"][0]["step"] == 4
    monkeypatch.undo()
    bad_losses(monkeypatch, {0})  # a fork has none yet
    assert forked(tmp_path / "fork", tmp_path / "model_00006", "--max-steps", 8, "--max-bad-steps", 2).step == 8


def test_bad_steps_are_counted_over_a_resume(byte_shards, tmp_path, monkeypatch):
    bad_losses(monkeypatch, {4, 5})
    real = train_gpt2.train_step

    def stopped_step(model, state, *args):
        result = real(model, state, *args)
        if state.step == 5:
            signal.raise_signal(signal.SIGTERM)
        return result

    monkeypatch.setattr(train_gpt2, "train_step", stopped_step)
    with pytest.raises(SystemExit):
        trained(tmp_path, "--data", byte_shards, "--max-steps", 9)
    monkeypatch.undo()
    bad_losses(monkeypatch, {0})
    with pytest.raises(UserError, match="3 steps in a row .* not finite, the last one at step 6"):
        resumed(tmp_path)


def test_bad_gradients_do_not_pass_for_overflows_forever(byte_shards, tmp_path, monkeypatch):
    unscale = torch.amp.GradScaler.unscale_

    def unscale_poisoned(self, optimizer):
        optimizer.param_groups[0]["params"][0].grad[0, 0] = torch.nan
        unscale(self, optimizer)

    monkeypatch.setattr(torch.amp.GradScaler, "unscale_", unscale_poisoned)
    with pytest.raises(UserError, match="3 steps in a row .* not finite, the last one at step 17"):
        # 65,536 is halved 16 times until it is 1
        trained(tmp_path, "--data", byte_shards, "--max-steps", 60, "--dtype", "fp16")


def test_overflows_of_fp16_are_handled_by_the_scaler(byte_shards, tmp_path, monkeypatch, capsys):
    real = torch.amp.GradScaler
    monkeypatch.setattr(torch.amp, "GradScaler", lambda *args, **kwargs: real(*args, init_scale=2.0**60, **kwargs))
    trained(tmp_path, "--data", byte_shards, "--max-steps", 60, "--dtype", "fp16")
    state = trainer_file(tmp_path / "model_00060")
    skipped = 60 - int(state["optimizer"]["state"][0]["step"])
    assert skipped > 3 and state["scaler"]["scale"] == 2.0 ** (60 - skipped) and state["overflows"] == skipped
    printed = capsys.readouterr().out
    assert "not finite" not in printed and printed.count("skipped: fp16 overflow number") == skipped
    last = f"skipped: fp16 overflow number {skipped}; the gradient scale is now {2.0 ** (60 - skipped):g}"
    assert last in printed
