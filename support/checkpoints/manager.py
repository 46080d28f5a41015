"""Saves checkpoints while training continues, and decides which ones to keep."""

from __future__ import annotations

import os
import shlex
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

import torch

from support import files
from support.checkpoints import huggingface, lora, state
from support.checkpoints.directory import (
    MODEL_CARD,
    find_corruption,
    list_checkpoints,
    newest_before_cooldown,
    read_facts,
    read_validation_loss,
    step_of,
    write_checkpoint,
)
from support.checkpoints.history import argmin_loss
from support.checkpoints.model_card import model_card
from support.checkpoints.run_info import RunInfo, checkpoint_path
from support.checkpoints.state import TrainState
from support.cli import UserError, describe_error, describe_free_space, print_lines, warn
from support.runtime import devices
from support.runtime.distributed import Distributed
from support.runtime.signals import StopHandler
from support.terminal import GREEN, styled

WAIT_SECONDS = 30.0  # for a save in progress, until the other ranks are told that it is not over
HOW_TO_GO_ON = "Fix this, then rerun with --resume auto."


def launch_command(world_size: int) -> str:
    """Returns the command that starts `world_size` processes, up to the name of the script."""
    if world_size == 1:
        return "python"
    if os.environ.get("LOCAL_WORLD_SIZE") != str(world_size):
        return "torchrun ..."  # several nodes: only the user knows all flags
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
    return f"torchrun --standalone --nproc_per_node={world_size} --max-restarts={restarts}"


class CheckpointManager:
    """Saves checkpoints in a thread, one at a time, and removes old ones beyond `keep`.

    Training waits only until the state is copied to host memory. A save that fails (a full disk, no permission) is
    reported on stderr and leaves earlier checkpoints as they are; if the next one fails, too, the run is asked to stop.
    Rank 0 writes; the others take part in `save`, because under FSDP each has only a part of the state.
    """

    def __init__(
        self, run: RunInfo, stop: StopHandler, sync_log: Callable[[], None],
        evaluations: Mapping[str, Mapping[int, float]], dist: Distributed,
    ):  # fmt: skip
        """Saves nothing yet.

        Args:
            sync_log: waits until everything logged so far is on the disk.
            evaluations: comparable validation losses ("val") and HellaSwag scores ("hella") by step, of earlier processes, too.
        """
        self.run, self.stop, self.sync_log, self.evaluations, self.dist = run, stop, sync_log, evaluations, dist
        self.out = Path(run.config.out)
        # the last step that `save` was asked to save, 0 if there is none; the same on all ranks
        self.last_step = 0 if run.forked else run.first_step
        self._failures = 0  # failed saves in a row
        self._thread: threading.Thread | None = None

    def save(self, train_state: TrainState, final: bool = False) -> bool:
        """Starts saving the state, from which `--resume` will continue; returns whether it does, the same on all ranks.

        Right after skipped steps, it saves only a `final` state: skipped steps leave the weights unchanged.
        """
        self._wait_on_all_ranks()
        step, run, rank = train_state.step, self.run, self.dist.rank
        # both conditions must be the same on all ranks: otherwise some would wait forever for another rank's shards
        if step == self.last_step:  # it is saved already, could not be saved, or is step 0
            if final and rank == 0 and not self._failures:
                self._clean_up(step)  # the process that saved it may have ended before cleaning up
            return False
        if train_state.bad_steps and not final:
            if rank == 0:
                print_lines(f"step {step:5d} | no checkpoint while steps are skipped")
            return False
        facts = {
            "before_cooldown": run.schedule.is_before_cooldown(train_state),  # a longer run can start from it
            "temporary": not (final or run.schedule.is_lasting(train_state, self.last_step)),
        }
        self.last_step = step
        parameters: dict[str, torch.Tensor] = dict(train_state.model.named_parameters())
        weights = state.copy_to_host(parameters, keep=rank == 0)
        trainer_file = train_state.trainer_file(
            run.id, run.config.to_dict(), run.start.sources, run.identity, keep=rank == 0
        )
        card_of = run, step, train_state.tokens, dict(self.evaluations["val"]), dict(self.evaluations["hella"])
        devices.trim_memory(next(train_state.model.parameters()).device)
        if rank > 0 or self._failures > 1:  # the run ends because saving fails
            return True

        def write_files(directory: Path) -> None:
            if not all(torch.isfinite(tensor).all() for tensor in weights.values()):
                raise ValueError("the weights are not finite")
            complete, model_config, config = weights, run.model_config, run.config
            if config.lora_rank and config.init_from is not None:
                of_lora = config.lora_rank, config.lora_alpha
                lora.write_adapter(directory / lora.ADAPTER, weights, config.init_from, *of_lora)
                complete = lora.merge(weights, *of_lora)
            huggingface.write_model(directory, model_config, huggingface.to_hf(complete, model_config.vocab_size))
            run.data.tokenizer.save_pretrained(directory, model_max_length=model_config.block_size)
            torch.save(trainer_file, directory / state.FILE)
            self.sync_log()  # a checkpoint must never be ahead of its log
            try:
                (directory / MODEL_CARD).write_text(model_card(*card_of), encoding="utf-8", newline="\n")
            except Exception as error:  # a checkpoint without a card is still complete
                warn(f"the model card of step {step} could not be written ({error}).")

        self.start(step, write_files, **facts)
        return True

    def start(self, step: int, write_files: Callable[[Path], None], **facts: Any) -> None:
        """Starts writing the checkpoint of `step`; `write_files(folder)` writes its files. See `write_checkpoint`."""
        args = step, write_files, facts
        self._thread = threading.Thread(target=self._write, args=args, name=f"checkpoint {step}")
        self._thread.start()

    def wait(self, timeout: float | None = None) -> bool:
        """Waits for the save in progress, at most `timeout` seconds; returns whether it has ended."""
        if self._thread:
            self._thread.join(timeout)
        return not (self._thread and self._thread.is_alive())

    def _wait_on_all_ranks(self) -> None:
        """Waits for rank 0's save in progress, which may take longer on a slow disk than a collective waits for a rank."""
        while not all(self.dist.all_gather(self.wait(WAIT_SECONDS))):
            pass

    def finish(self) -> None:
        """Waits for the last save. If it failed, the run ends with an error, because no later save replaces it."""
        self.wait()
        if self._failures and not self.stop.failure:
            self.stop.fail(
                UserError(f"the last checkpoint could not be saved in {self.out}, see above. {HOW_TO_GO_ON}")
            )

    def save_and_exit(self, train_state: TrainState) -> NoReturn:
        """Saves the final state of a run that is being stopped, as `save` does, and ends all ranks with the same exit code.

        Raises:
            SystemExit: with the exit code. A rank that failed raises its error instead.
        """
        self.dist.allow_long_waits()  # the others wait until rank 0 has written
        if self.run.config.checkpoint_every != 0:
            self.save(train_state, final=True)
        self.finish()
        if not self.stop.failure:
            self.dist.print0(f"step {train_state.step:5d} | stopped. {self.describe_newest()}")
        self.stop.exit_all_ranks(self.dist.all_gather)

    def describe_newest(self, then: str = "\nnext    {}") -> str:
        """Names the checkpoint from which a resumed run would start, followed by `then` with the command filled in."""
        self.wait()
        checkpoints = list_checkpoints(self.out)  # only rank 0 knows what it has saved
        if not checkpoints:
            return "There is no checkpoint yet: the same command starts the run over."
        command = (
            f"{launch_command(self.stop.world_size)} train_gpt2.py --resume auto --out {shlex.quote(str(self.out))}"
        )
        return f"The newest checkpoint is {checkpoints[-1]}.{then.format(command)}"

    def how_to_go_on(self) -> str:
        """Says in one line how to continue the run, or that torchrun will restart it."""
        restarts, most = (int(os.environ.get(f"TORCHELASTIC_{name}", 0)) for name in ("RESTART_COUNT", "MAX_RESTARTS"))
        return "torchrun restarts the run." if restarts < most else self.describe_newest(' Continue with "{}".')

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.finish()
        if kind is None and self.stop.failure:
            raise self.stop.failure

    def _write(self, step: int, write_files: Callable[[Path], None], facts: dict[str, Any]) -> None:
        directory = checkpoint_path(self.out, step)
        try:
            if step in self.evaluations["val"]:
                facts |= {"val": self.evaluations["val"][step], "comparable": self.run.comparable["val"]}
            write_checkpoint(directory, write_files, **facts)
        except Exception as error:  # the libraries that write have errors of their own
            self._failures += 1
            reason = describe_error(error)
            if isinstance(error, RuntimeError):  # from torch.save, whose message does not explain it
                reason = "a file could not be written completely"
            where = f"{self.out} ({describe_free_space(self.out)})"
            problem = f"the checkpoint of step {step} could not be saved in {where}: {reason}"
            if self._failures == 1:
                warn(f"{problem}. Training continues; if the next save fails too, the run ends.")
            else:
                self.stop.fail(UserError(f"{problem}; neither could the one before. {HOW_TO_GO_ON}"))
            return
        self._failures = 0
        until = ", until the next one" if facts.get("temporary") else ""
        print_lines(styled(f"step {step:5d} | saved {directory}{until}", GREEN))
        self._clean_up(step)

    def _clean_up(self, step: int) -> None:
        """Removes the checkpoints that are not to be kept when `step` is the newest one."""
        removed: list[str] = []
        try:
            if not self.stop.requested:  # a stopped run should end soon
                for directory, reason in self._not_kept(step):
                    try:
                        files.remove(directory)
                        removed.append(f"{directory.name} ({reason})")
                    except OSError as error:  # a mounted cloud disk may not have written it yet
                        warn(f"cannot remove {directory}: {describe_error(error)}. The next save tries again.")
            if removed:
                print_lines(f"step {step:5d} | removed {', '.join(removed)}")
        except OSError as error:
            warn(f"cannot read the old checkpoints in {self.out}: {describe_error(error)}.")

    def _not_kept(self, step: int) -> Iterator[tuple[Path, str]]:
        """Yields the checkpoints to remove, and why.

        All others are kept: the newest `keep` intact ones, including `step` (0 keeps all) and, without it, no temporary
        ones; the one with the best validation loss; and the newest one before a cooldown, from which a longer run can start.
        """
        keep, lasting = self.run.config.keep, (self._best(), newest_before_cooldown(self.out))
        *earlier, _newest = [path for path in list_checkpoints(self.out) if step_of(path) <= step]
        kept = 1
        for directory in reversed(earlier):
            temporary = read_facts(directory).get("temporary")
            fits = keep == 0 or len(earlier) < keep or kept < keep and find_corruption(directory) is None
            if fits and not temporary:
                kept += 1
            elif directory not in lasting:
                yield directory, "--checkpoint-minutes" if temporary else f"--keep {keep}"

    def better_than(self, step: int) -> Path | None:
        """Returns the best checkpoint in --out, if it is known to be better than the model of a step; None if not."""
        loss, best = self.evaluations["val"].get(step), self._best()
        best_loss = self._validation_loss(best) if best else None
        if loss is None or best_loss is None:
            return None
        return best if argmin_loss({"last": loss, "best": best_loss}) == "best" else None

    def _best(self) -> Path | None:
        """Returns the checkpoint with the best comparable validation loss, or the newest one if none is known."""
        losses = {path: self._validation_loss(path) for path in reversed(list_checkpoints(self.out))}  # newest first
        known = {path: loss for path, loss in losses.items() if loss is not None}
        return argmin_loss(known) or next(iter(losses), None)

    def _validation_loss(self, checkpoint: Path) -> float | None:
        """Returns the validation loss of a checkpoint; None if none is known that is comparable with this process'.

        If a run stops during a validation, its checkpoint has no loss, and the resumed run measures it. What the log has
        lost, `checkpoint.json` still has.
        """
        loss = self.evaluations["val"].get(step_of(checkpoint))
        if loss is None:
            loss = read_validation_loss(checkpoint, self.run.comparable["val"])
        return loss
