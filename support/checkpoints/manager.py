"""Saves checkpoints while training continues, and decides which ones to keep."""

from __future__ import annotations

import shlex
import sys
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import NoReturn

import torch

from support import files
from support.checkpoints import huggingface, run_folder, state
from support.checkpoints.directory import (
    MODEL_CARD,
    check_files,
    list_checkpoints,
    list_earlier,
    step_of,
    validation_loss_of,
    write_checkpoint,
)
from support.checkpoints.model_card import Score, model_card
from support.checkpoints.state import TrainState
from support.cli import UserError
from support.console.log import read_values
from support.console.terminal import GREEN, styled
from support.runtime import devices
from support.runtime.distributed import LONG_TIMEOUT, Distributed
from support.runtime.run_info import RunInfo, checkpoint_path
from support.runtime.signals import StopHandler


class CheckpointManager:
    """Saves checkpoints in a thread, one at a time, and removes those that are not to be kept.

    Training waits only for a copy of the state in host memory. A save that fails (a full disk, no permission) is
    reported on stderr and leaves earlier checkpoints as they are; if the next one fails too, the run is asked to stop.
    The newest `keep` checkpoints are kept, the latest included (0: all), the one with the best validation loss in the
    log, and the newest one before a cooldown, from which the run can become longer. Rank 0 writes; the others take part
    in `save`, because under FSDP each has only a part of the state.
    """

    def __init__(self, run: RunInfo, stop: StopHandler, sync_log: Callable[[], None], rank: int = 0):
        """`sync_log` waits until all that was logged is on the disk."""
        self.run, self.stop, self.sync_log, self.rank = run, stop, sync_log, rank
        self.out, self.keep = Path(run.config.out), run.config.keep
        self.newest = run.first_step  # the step of the newest checkpoint, 0 if there is none
        self._failures = 0  # saves in a row
        self._thread: threading.Thread | None = None

    def save(self, train_state: TrainState, final: bool = False) -> None:
        """Starts to save the state, from which `--resume` will continue.

        A state right after skipped steps is saved only if it is the `final` one: its weights are those of an older
        step.
        """
        self.wait()
        step, run = train_state.step, self.run
        # The ranks agree on these two conditions; they must, or the others would wait forever for a rank's parts.
        if step == self.newest:  # saved already, or step 0
            if step == run.config.max_steps and self.rank == 0:
                self._clean_up(step)  # the process that saved it may not have come to that
            return
        if train_state.bad_steps and not final:
            if self.rank == 0:
                print(f"step {step:5d} | no checkpoint while steps are skipped", flush=True)
            return
        weights = state.copy_to_host(train_state.trained_weights(), keep=self.rank == 0)
        trainer_file = train_state.trainer_file(run.config.to_save(), run.identity, keep=self.rank == 0)
        devices.trim_memory(next(train_state.model.parameters()).device)
        if self.rank > 0 or self._failures > 1:  # the run ends because saving fails
            return

        def write_files(directory: Path) -> None:
            if not all(torch.isfinite(tensor).all() for tensor in weights.values()):
                raise ValueError("the weights are not finite")
            _write_weights(directory, weights, run)
            run.data.tokenizer.save_pretrained(directory, model_max_length=run.config.block_size)
            torch.save(trainer_file, directory / state.FILE)
            self.sync_log()  # a checkpoint must never be ahead of its log
            try:
                card = self._model_card(step, sum(tensor.numel() for tensor in weights.values()))
            except Exception as error:  # the weights are worth more
                _warn(f"the checkpoint of step {step} has no model card ({error}).")
            else:
                (directory / MODEL_CARD).write_bytes(card.encode())

        self.start(step, write_files)

    def _model_card(self, step: int, trained: int) -> str:
        """The model card of the checkpoint of `step`, with the newest values in the log up to that step."""
        scores = dict[str, Score | None]()
        for name in ("val", "hella"):
            values = {at: value for at, value in self._logged(name).items() if at <= step}
            scores[name] = Score(max(values), values[max(values)]) if values else None
        # an earlier process of this run may have scored other items
        hella = scores["hella"]
        items = self.run.hellaswag_items if hella and hella.step >= self.run.first_step else None
        return model_card(self.run, step, trained, scores["val"], hella, items)

    def start(self, step: int, write_files: Callable[[Path], None]) -> None:
        """Starts to write the checkpoint of `step`, with the files of `write_files(folder)`."""
        self.wait()
        self._thread = threading.Thread(target=self._write, args=(step, write_files), name=f"checkpoint {step}")
        self._thread.start()

    def wait(self) -> None:
        """Waits for the save that is under way."""
        if self._thread:
            self._thread.join()

    def finish(self) -> None:
        """Waits for the last save; if it failed, the run ends with an error, since no later save makes up for it."""
        self.wait()
        if self._failures and not self.stop.failure:
            self.stop.fail(
                UserError(f"the last checkpoint could not be saved in {self.out}, see above. {self._how_to_go_on()}")
            )

    def _how_to_go_on(self) -> str:
        return f"Fix this, then rerun with --resume{'' if self.newest else ' auto'}."

    def save_and_exit(self, train_state: TrainState, dist: Distributed) -> NoReturn:
        """Saves the last state of a run that is stopped, and ends all ranks with the same exit code.

        Raises:
            SystemExit, or the error of this rank that stopped the run.
        """
        dist.set_timeout(LONG_TIMEOUT)  # the others wait until rank 0 has written
        if self.run.config.checkpoint_every:
            self.save(train_state, final=True)
        self.finish()
        if not self.stop.failure:
            dist.print0(f"step {train_state.step:5d} | stopped. {self.describe_newest()}")
        self.stop.exit_all_ranks(dist.all_reduce_min)

    def describe_newest(self) -> str:
        """Where a resumed run would start, with a line for its command; and the model that it was to replace, if any."""
        kept = ""
        if replaced := run_folder.list_replaced(self.out, self.run.first_step):
            kept = f" The earlier run's model is still {replaced[-1]}."
        elif earlier := list_earlier(self.out):
            kept = f" The earlier run's model is {earlier[-1]} until this run has finished."
        if self.newest == 0:
            return f"There is no checkpoint yet.{kept}"
        launcher = "python" if self.stop.world_size == 1 else "torchrun ..."  # with the flags that it had
        command = f"{launcher} train_gpt2.py --resume --out {shlex.quote(str(self.out))}"
        return f"The newest checkpoint is {checkpoint_path(self.out, self.newest)}.{kept}\nnext    {command}"

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.finish()
        if kind is None and self.stop.failure:
            raise self.stop.failure

    def _write(self, step: int, write_files: Callable[[Path], None]) -> None:
        directory = checkpoint_path(self.out, step)
        try:
            commit = partial(run_folder.commit_replacement, self.out, self.run.first_step)
            write_checkpoint(directory, write_files, self._logged("val").get(step), commit)
        except Exception as error:  # the libraries that write have errors of their own
            self._failures += 1
            reason = getattr(error, "strerror", None) or str(error)
            if isinstance(error, RuntimeError):  # torch.save's message does not say so
                reason = "a file could not be written completely"
            problem = f"the checkpoint of step {step} could not be saved in {self.out}: {reason}"
            if self._failures == 1:
                _warn(f"{problem}. Training continues; if the next save fails too, the run ends.")
            else:
                self.stop.fail(UserError(f"{problem}; neither could the one before. {self._how_to_go_on()}"))
            return
        self._failures, self.newest = 0, step
        line = styled(f"step {step:5d} | saved {directory}", GREEN)
        print(line + "\n", end="", flush=True)  # one write: the loop prints too
        self._clean_up(step)

    def _clean_up(self, step: int) -> None:
        """Removes what the checkpoint of `step`, which is the newest one, replaces."""
        try:
            run_folder.complete_replacement(self.out)
            if step == self.run.config.max_steps and not self.stop.requested:  # before, the new model may be worse
                self._remove_replaced()
            self._remove_old(step)
        except OSError as error:
            _warn(f"cannot remove old checkpoints in {self.out}: {error.strerror}.")

    def _logged(self, name: str) -> dict[int, float]:
        """The values of one name in the log, by step."""
        log = self.out / "log.txt"
        return read_values(log, name) if log.exists() else {}

    def _remove_replaced(self) -> None:
        """Removes checkpoints of an earlier run; if this run has gone back and `keep` is 0, they are its own, and stay."""
        config, resumed_from = self.run.config, self.run.resumed_from
        of_another_run = config.overwrite_policy == "run" and not (resumed_from and resumed_from.replaces_later)
        if self.keep or of_another_run:
            for directory in list_earlier(self.out):
                files.remove(directory)

    def _remove_old(self, step: int) -> None:
        earlier = [directory for directory in list_checkpoints(self.out) if step_of(directory) < step]
        if self.keep == 0 or len(earlier) < self.keep or self.stop.requested:  # a stop should not take longer
            return
        # Older checkpoints do not have their validation loss, and the log of a run that was extended lacks some.
        logged = self._logged("val")
        val = {d: validation_loss_of(d) or logged.get(step_of(d)) for d in [*earlier, checkpoint_path(self.out, step)]}
        best = min((d for d in val if val[d] is not None), key=lambda d: val[d] or 0.0, default=None)
        config = self.run.config
        before_cooldown = [d for d in val if config.schedule == "wsd" and step_of(d) <= config.cooldown_start]
        kept = 1  # the one just saved
        for directory in reversed(earlier):
            if kept < self.keep and check_files(directory) is None:  # an error of the disk proves no corruption
                kept += 1
            elif directory not in (best, *before_cooldown[-1:]):
                files.remove(directory)


def _write_weights(directory: Path, weights: Mapping[str, torch.Tensor], run: RunInfo) -> None:
    config = run.config
    if config.lora_rank is not None and config.init_from is not None:
        huggingface.write_adapter(directory, weights, config.init_from, config.lora_rank, config.lora_alpha)
    else:
        huggingface.write_model(directory, run.sizes, huggingface.to_hf(weights, run.sizes["vocab_size"]))


def _warn(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr, flush=True)
