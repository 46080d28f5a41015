"""The curves of a run, for TensorBoard and for Weights & Biases; neither is loaded unless it is asked for."""

from __future__ import annotations

import importlib
import sys
import uuid
from dataclasses import asdict
from pathlib import Path
from typing import Any

from support import devices
from support.cli import UserError

NAMES = {"train": "loss/train", "val": "loss/val", "hella": "hellaswag/acc_norm"}  # in the log, and of the curves


class Tracker:
    """Tells each of `boards` what a run measures, until the end of a `with` statement. One that fails is left out."""

    def __init__(self, run: Any, boards: list[Any]):
        self._boards, self._config, self._last = boards, run.config, {}
        self._peak = (devices.peak_flops(run.dist.device) or 0) * run.dist.world
        self._flops = run.raw_model.flops_per_token()

    def add(self, step: int, name: str, value: float) -> None:
        """A value of the log."""
        self._last[NAMES[name]] = value
        self._tell("add", step, {NAMES[name]: value})

    def update(self, step: int, lr: float, norm: float, dt: float) -> None:
        """What there is to know of the update of `step`, beside its loss; it took `dt` seconds."""
        speed = self._config.total_batch_size / dt
        mfu = {"speed/mfu": speed * self._flops / self._peak} if self._peak else {}
        self._tell("add", step, {"update/lr": lr, "update/norm": norm, "speed/tokens_per_second": speed} | mfu)

    def samples(self, step: int, texts: list[str]) -> None:
        self._tell("samples", step, texts)

    def flush(self) -> None:
        """Writes what waits: a checkpoint must not outlive the curves that led to it."""
        self._tell("flush")

    def __enter__(self) -> Tracker:
        return self

    def __exit__(self, kind: type | None, *_: Any) -> None:
        finals = {f"final/{name}": value for name, value in self._last.items()} if kind is None else {}
        self._tell("close", finals)
        self._boards = []

    def _tell(self, method: str, *what: Any) -> None:
        for board in tuple(self._boards):
            try:
                getattr(board, method)(*what)
            except Exception as error:  # of a full disk or of the network: not worth a run
                self._boards.remove(board)
                print(f"warning: {board.name} ends here ({error}). Training goes on.", file=sys.stderr, flush=True)


def check_boards(config: Any) -> None:
    """Refuses what is not installed, before an earlier run is replaced.

    Raises:
        UserError: a package is missing.
    """
    for wanted, name, module in (
        (config.tensorboard, "tensorboard", "torch.utils.tensorboard"),
        (config.wandb, "wandb", "wandb"),
    ):
        try:
            _ = wanted and importlib.import_module(module)
        except ImportError as error:
            raise UserError(f"--{name} needs its package. Run pip install {name}.") from error


def boards(config: Any, first_step: int) -> list[Any]:
    """What `--tensorboard` and `--wandb` ask for, going on with the curves of an earlier run from `first_step`.

    Raises:
        UserError: one of them cannot begin.
    """
    made: list[Any] = [TensorBoard(config, first_step)] if config.tensorboard else []
    return made + ([WandB(config, first_step)] if config.wandb else [])


class TensorBoard:
    name = "--tensorboard"

    def __init__(self, config: Any, first_step: int):
        from torch.utils.tensorboard import SummaryWriter

        self._config, folder = config, Path(config.out) / "tensorboard"
        if first_step == 0:
            for events in folder.glob("events.out.tfevents.*"):  # of a run that this one replaces
                events.unlink()
        # what a run that was killed had later than its checkpoint is hidden
        self._writer = SummaryWriter(str(folder), purge_step=first_step or None)

    def add(self, step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def samples(self, step: int, texts: list[str]) -> None:
        for i, text in enumerate(texts):
            self._writer.add_text(f"sample/{i}", text, step)

    def flush(self) -> None:
        self._writer.flush()

    def close(self, finals: dict[str, float]) -> None:
        if finals:
            flags = {name: value for name, value in asdict(self._config).items() if value is not None}
            self._writer.add_hparams(flags, finals, run_name=".", global_step=self._config.max_steps)
        self._writer.close()


class WandB:
    name = "--wandb"

    def __init__(self, config: Any, first_step: int):
        import wandb

        file = Path(config.out) / "wandb_id.txt"
        known = file.read_text().strip() if first_step and file.exists() else uuid.uuid4().hex[:12]
        file.write_text(known + "\n")
        options = dict(project=config.wandb, id=known, resume="allow", dir=config.out)
        try:
            self._run = wandb.init(config=asdict(config), allow_val_change=True, **options)
        except Exception as error:  # its own errors, and those of the network
            reason = str(error).rstrip(". ")
            raise UserError(f"--wandb cannot begin: {reason}. Run wandb login, or set WANDB_MODE=offline.") from error
        self._table = wandb.Table
        self._run.define_metric("*", step_metric="step")  # ours: a resumed run may make steps again

    def add(self, step: int, values: dict[str, float]) -> None:
        self._run.log(values | {"step": step})

    def samples(self, step: int, texts: list[str]) -> None:
        self._run.log({"samples": self._table(["step", "text"], [[step, text] for text in texts]), "step": step})

    def flush(self) -> None:
        pass  # its own process has everything already

    def close(self, finals: dict[str, float]) -> None:
        self._run.summary.update(finals)
        self._run.finish(exit_code=0 if finals else 1)
