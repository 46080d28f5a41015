"""What a run prints about itself."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import Any

import torch

from support import checkpoint, devices, presets, stop

LOADED = time.perf_counter()
EVERY, WINDOW = 50, 250  # updates between two notes of the time to come, and those whose pace it is told by


def header(run: Any) -> Iterator[str]:
    """The lines before the first step: the figures that people compare and ask each other for."""
    config, world, model, loader = run.config, run.dist.world, run.raw_model, run.loader
    c, device, rows = model.config, loader.device, config.total_batch_size // loader.T
    parameters = sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    of_them = f", {trained:,} of them trained" if trained < parameters else ""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    yield f"device  {world} x {name}, {str(run.dtype).removeprefix('torch.')}, torch {torch.__version__}"
    yield (
        f"model   {parameters:,} parameters{of_them}: {c.n_layer} layers, {c.n_head} heads, "
        f"{c.n_embd} channels, context {c.block_size}, vocabulary {c.vocab_size} padded to {c.padded_vocab_size}"
    )
    yield (
        f"update  {config.total_batch_size:,} tokens = {loader.B} (rows) x {loader.T} (tokens) x {world} (processes) "
        f"x {loader.grad_accum} (micro-steps)"
    )
    epochs = config.max_steps * rows / loader.rows_per_epoch
    yield (
        f"data    {config.data}: {loader.rows_per_epoch * loader.T:,} tokens, {loader.rows_per_epoch / rows:,.1f} updates "
        f"an epoch; {config.max_steps:,} updates are {epochs:.2f} epochs{', so the text repeats' if epochs > 1 else ''}"
    )
    fall = "a cosine" if config.schedule == "cosine" else f"constant until a cooldown of {config.cooldown:,}"
    yield (
        f"recipe  {config.optimizer}, {config.schedule}: {config.warmup_steps:,} updates up to {config.max_lr:.3g}, then {fall} "
        f"down to {config.min_lr:.3g} at update {config.decay_steps:,}"
    )
    if config.text:
        yield f"text    {config.text}: --shuffle {' '.join(presets.chosen_for_text(config))}"
    if run.first_step:
        yield f"note    resumed from {checkpoint.path_of(config.out, run.first_step)}"
    if config.warmup_steps >= config.max_steps:
        yield f"note    all updates are in the warm-up, which takes {config.warmup_steps:,}; see --warmup-steps"
    if os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0" and config.resume != "auto":
        yield "note    torchrun will restart a run that fails; only with --resume auto does that go on from a checkpoint"
    size, folder = 3 * sum(p.nbytes for p in model.parameters()), config.out  # AdamW has two moments, Muon one
    if run.dist.rank == 0 and config.checkpoint_every and (free := shutil.disk_usage(folder).free) < size:
        yield f"note    a checkpoint takes {size / 1e6:,.1f} MB, and {folder} has {free / 1e6:,.1f} MB free"
    if run.first_step == config.max_steps:
        yield f"note    this run has made its {config.max_steps:,} updates; more with a larger --max-steps"


class Pace:
    """The console's lines of the updates, and what becomes of the time: how much is gone, and how much to come."""

    def __init__(self, run: Any):
        self.run = run
        self.peak = devices.peak_flops(run.dist.device)
        self.flops = run.raw_model.flops_per_token()
        self.marks: deque[tuple[int, float]] = deque(maxlen=WINDOW // EVERY)  # updates, and when they ended

    def lines(self, step: int, loss: float, lr: float, norm: float, dt: float) -> str:
        """The line of an update that took `dt` seconds, and, now and then, a note below it.

        MFU is the share of the GPU's peak, where that is known. The time to come is told every 50 updates, at the pace
        of the last 250 with all evaluations and checkpoints; the first update is no measure of it.
        """
        config, world, now = self.run.config, self.run.dist.world, time.perf_counter()
        speed = config.total_batch_size / dt
        mfu = f" | mfu: {speed * self.flops / (self.peak * world):.1%}" if self.peak else ""
        lines = f"step {step:5d} | loss: {loss:.6f} | lr {lr:.4e} | norm: {norm:.4f} | dt: {dt * 1000:.2f}ms | tok/sec: {speed:.2f}{mfu}"
        if not self.marks:
            lines += f"\nnote    {now - LOADED:.1f}s from the start to the end of the first update"
            self.marks.append((step, now))
        elif step % EVERY == 0 or step == config.max_steps - 1:
            before, then = self.marks[0]
            self.marks.append((step, now))
            to_come = (now - then) / (step - before) * (config.max_steps - step - 1)
            tokens, in_all = ((n * config.total_batch_size) for n in (step + 1, config.max_steps))
            gone = f"{_duration(now - LOADED)} {'since it was resumed' if self.run.first_step else 'gone'}"
            lines += f"\nnote    {tokens:,} of {in_all:,} tokens; {gone}, about {_duration(to_come)} to come"
        if step == self.run.first_step + 1 and world > 1 and dt > stop.PATIENCE:  # the first one may have compiled
            lines += (
                f"\nnote    an update takes {dt:.0f}s, and torchrun kills its processes {stop.PATIENCE}s after a signal: "
                "a run that is stopped will go on from its last checkpoint"
            )
        return lines


def _duration(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))


def result(run: Any, text: str) -> None:
    """Ends the demo with what it made: a text, a score, and where the model lies."""
    print(f"\n{text}\n")
    if run.config.val_every:
        print(f"validation loss {run.last_val:.4f} nats per token")
    if run.config.checkpoint_every:
        directory = checkpoint.path_of(run.config.out, run.config.max_steps)
        print(f'checkpoint in {directory}; more text: python sample.py --model {directory} --prompt "The "')


def progress(items: Iterable, what: str, rank: int) -> Iterable:
    """The items, with a bar that is gone when they are; on rank 0 and a terminal only."""
    from tqdm import tqdm

    return tqdm(items, desc=what, leave=False, disable=True if rank or sys.stderr is None else None)
