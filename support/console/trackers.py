"""The curves of a run in TensorBoard and in Weights & Biases; neither is imported unless it is asked for."""

from __future__ import annotations

import contextlib
import importlib
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from support.cli import UserError, warn
from support.files import atomic_write

if TYPE_CHECKING:
    from train_gpt2 import TrainConfig

CURVES = {"train": "loss/train", "val": "loss/val", "hella": "hellaswag/acc_norm"}  # by name in the log


def check_installed(config: TrainConfig) -> None:
    """Checks that the packages of --tensorboard and --wandb are installed, before anything is written.

    Raises:
        UserError: one is missing.
    """
    for module, requested in {"torch.utils.tensorboard": config.tensorboard, "wandb": config.wandb}.items():
        try:
            _ = requested and importlib.import_module(module)
        except ImportError as error:
            name = module.split(".")[-1]
            raise UserError(f"--{name} needs its package. Run pip install {name}.") from error


class TensorBoard:
    name = "--tensorboard"

    def __init__(self, config: TrainConfig, first_step: int):
        from torch.utils.tensorboard import SummaryWriter

        self._last_step = first_step
        self._flags = {name: value for name, value in config.used_flags().items() if value is not None}
        folder = Path(config.out) / "tensorboard"
        if first_step == 0:
            for events in folder.glob("events.out.tfevents.*"):  # left by an earlier start of a run that starts over
                events.unlink()
        # hides what a killed run wrote after its last checkpoint
        self._writer = SummaryWriter(str(folder), purge_step=first_step or None)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._last_step = step
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def log_samples(self, step: int, texts: Sequence[str]) -> None:
        for i, text in enumerate(texts):
            self._writer.add_text(f"sample/{i}", text, step)

    def flush(self) -> None:
        self._writer.flush()

    def close(self, final_values: Mapping[str, float]) -> None:
        """Finishes the run; `final_values` is empty if it failed or was stopped."""
        if final_values:
            self._writer.add_hparams(self._flags, dict(final_values), run_name=".", global_step=self._last_step)
        self._writer.close()


class WeightsAndBiases:
    """Sends curves to Weights & Biases, with the same methods as `TensorBoard`.

    Raises:
        UserError: it cannot start.
    """

    name = "--wandb"

    def __init__(self, config: TrainConfig, first_step: int):
        import wandb

        file = Path(config.out) / "wandb_id.txt"
        run_id = uuid.uuid4().hex[:12]
        if first_step and file.exists():
            run_id = file.read_text(encoding="utf-8", errors="replace").strip()
        with atomic_write(file) as tmp:
            tmp.write_text(run_id + "\n")
        options: dict[str, Any] = dict(project=config.wandb, id=run_id, resume="allow", dir=config.out)
        try:
            self._run = wandb.init(config=config.used_flags(), allow_val_change=True, **options)
        except Exception as error:  # wandb raises errors of its own, and the network's
            reason = str(error).rstrip(". ")
            raise UserError(f"--wandb cannot start: {reason}. Run wandb login, or set WANDB_MODE=offline.") from error
        self._table = wandb.Table
        self._run.define_metric("*", step_metric="step")  # W&B's own step must grow, but a resumed run repeats steps

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({**values, "step": step})

    def log_samples(self, step: int, texts: Sequence[str]) -> None:
        self._run.log({"samples": self._table(["step", "text"], [[step, text] for text in texts]), "step": step})

    def flush(self) -> None:
        pass  # wandb's own process has the values already

    def close(self, final_values: Mapping[str, float]) -> None:
        self._run.summary.update(dict(final_values))
        self._run.finish(exit_code=0 if final_values else 1)


Tracker = TensorBoard | WeightsAndBiases


def start_trackers(config: TrainConfig, first_step: int) -> list[Tracker]:
    """Starts the trackers that were asked for; a `first_step` above 0 continues their curves at that step."""
    trackers: list[Tracker] = [TensorBoard(config, first_step)] if config.tensorboard else []
    return [*trackers, WeightsAndBiases(config, first_step)] if config.wandb else trackers


class Trackers:
    """Sends what a run measures to each of its trackers. One that fails is dropped."""

    def __init__(self, trackers: Sequence[Tracker]):
        self._trackers = list(trackers)
        self._final_values: dict[str, float] = {}

    def log_value(self, step: int, name: str, value: float) -> None:
        """Sends a value; `name` is its name in the log."""
        self._final_values[f"final/{CURVES[name]}"] = value
        if name == "train":
            self._final_values["final/steps"] = step + 1
        self.log(step, {CURVES[name]: value})

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._for_each(lambda tracker: tracker.log(step, values))

    def log_samples(self, step: int, texts: Sequence[str]) -> None:
        self._for_each(lambda tracker: tracker.log_samples(step, texts))

    def flush(self) -> None:
        """Writes what is buffered: a checkpoint must never be ahead of its run's curves."""
        self._for_each(lambda tracker: tracker.flush())

    def close(self, succeeded: bool) -> None:
        """Finishes the curves; a run that succeeded gets its final values."""
        self._for_each(lambda tracker: tracker.close(self._final_values if succeeded else {}))

    def _for_each(self, call: Callable[[Tracker], None]) -> None:
        for tracker in tuple(self._trackers):
            try:
                call(tracker)
            except Exception as error:  # a full disk or the network: tracking is best effort
                with contextlib.suppress(ValueError):  # the thread that saves may have removed it already
                    self._trackers.remove(tracker)
                warn(f"{tracker.name} stopped ({error}). Training continues without it.")
