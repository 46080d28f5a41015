"""The curves of a run in TensorBoard and in Weights & Biases; neither is imported unless it is asked for."""

from __future__ import annotations

import contextlib
import json
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from support.cli import UserError, warn
from support.config import TrainConfig
from support.files import atomic_write

CURVES = {"train": "loss/train", "val": "loss/val", "hella": "hellaswag/acc_norm"}  # by name in the log
HPARAMS = ".hparams"  # ends the name of the event file with the flags


class TensorBoard:
    name = "--tensorboard"

    def __init__(self, config: TrainConfig, first_step: int):
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams

        folder, flags = Path(config.out) / "tensorboard", config.used_flags()
        # The flags for the HPARAMS page have a file of their own, which replaces that of an earlier process: of several,
        # TensorBoard would show the first. SummaryWriter.add_hparams would also write which columns the page has, and
        # TensorBoard would take them from one run for all. Without that, it finds the flags and curves of all runs.
        for file in folder.glob(f"*{HPARAMS}"):
            file.unlink()
        shown = {name: str(value) if isinstance(value, bool) else value for name, value in flags.items()}
        _, session_start, _ = hparams(shown, {})
        with SummaryWriter(str(folder), filename_suffix=HPARAMS) as writer:
            writer.file_writer.add_summary(session_start, first_step)
        # This file comes after that one: TensorBoard's reader in Python goes on to the last, and does not come back.
        # purge_step hides what an earlier process wrote from this step on.
        self._writer = SummaryWriter(str(folder), purge_step=first_step, flush_secs=10)
        self._add_text("flags", json.dumps(flags, indent=4), first_step)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def log_samples(self, step: int, texts: Sequence[str]) -> None:
        for i, text in enumerate(texts):
            self._add_text(f"sample/{i}", text, step)

    def flush(self) -> None:
        self._writer.flush()

    def close(self, succeeded: bool) -> None:
        self._writer.close()

    def _add_text(self, name: str, text: str, step: int) -> None:
        # TensorBoard shows Markdown: indented lines are code, and stay as they are
        self._writer.add_text(name, "    " + text.replace("\n", "\n    "), step)


class WeightsAndBiases:
    """Sends curves to Weights & Biases, with the same methods as `TensorBoard`.

    Raises:
        UserError: it cannot start.
    """

    name = "--wandb"

    def __init__(self, config: TrainConfig, first_step: int):
        file = Path(config.out) / "wandb_id.txt"
        run_id = uuid.uuid4().hex[:12]
        if first_step and file.exists():
            run_id = file.read_text(encoding="utf-8", errors="replace").strip()
        with atomic_write(file) as tmp:
            tmp.write_text(run_id + "\n")
        options: dict[str, Any] = dict(project=config.wandb, id=run_id, resume="allow", dir=config.out)
        try:
            import wandb

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
        pass  # W&B's own process has the values already

    def close(self, succeeded: bool) -> None:
        self._run.finish(exit_code=0 if succeeded else 1)


Tracker = TensorBoard | WeightsAndBiases


def start_trackers(config: TrainConfig, first_step: int) -> list[Tracker]:
    """Starts the trackers that were asked for; a `first_step` above 0 continues their curves at that step."""
    trackers: list[Tracker] = [TensorBoard(config, first_step)] if config.tensorboard else []
    return [*trackers, WeightsAndBiases(config, first_step)] if config.wandb else trackers


class Trackers:
    """Sends what a run measures to each of its trackers. One that fails is dropped."""

    def __init__(self, trackers: Sequence[Tracker]):
        self._trackers = list(trackers)

    def log_value(self, step: int, name: str, value: float) -> None:
        """Sends a value; `name` is its name in the log."""
        self.log(step, {CURVES[name]: value})

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._for_each(lambda tracker: tracker.log(step, values))

    def log_samples(self, step: int, texts: Sequence[str]) -> None:
        self._for_each(lambda tracker: tracker.log_samples(step, texts))

    def flush(self) -> None:
        """Waits until the trackers have written what they were sent; another thread may call it."""
        self._for_each(lambda tracker: tracker.flush())

    def close(self, succeeded: bool) -> None:
        self._for_each(lambda tracker: tracker.close(succeeded))

    def _for_each(self, call: Callable[[Tracker], None]) -> None:
        for tracker in tuple(self._trackers):
            try:
                call(tracker)
            except Exception as error:  # a full disk or the network: tracking is best effort
                with contextlib.suppress(ValueError):  # another thread has removed it already
                    self._trackers.remove(tracker)
                    warn(f"{tracker.name} stopped ({error}). Training continues without it.")
