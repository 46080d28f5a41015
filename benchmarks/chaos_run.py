"""The commands of bench_chaos.py: their processes, the checks after each fault, and the comparison at the end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.utils._pytree import tree_leaves

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from support.checkpoints.directory import find_corruption, list_checkpoints, newest_checkpoint  # noqa: E402
from support.console.log import read_values  # noqa: E402
from support.console.record import read_record  # noqa: E402
from support.console.trackers import CURVES  # noqa: E402
from support.files import LOCK, sha256_of  # noqa: E402

TIMEOUT_SECONDS = (
    90  # seconds until all processes have exited or make progress; torchrun alone waits 30 for a process to stop
)
STEPS_OF_PROGRESS = 3  # new values in the log, or shards, that show it
MAX_STEPS_AFTER_SIGNAL = 25  # that show that it ignores a signal
SYNC_SECONDS = 0.02  # that each fsync takes, so that a kill can hit a save
# Runs in each Python process: `time.time` and `os.fsync` add what the benchmark writes into the control file.
SITECUSTOMIZE = """
import mmap, os, struct, time
real_time, real_fsync = time.time, os.fsync
with open(os.environ["BENCH_CHAOS_CONTROL"], "r+b") as file:
    control = mmap.mmap(file.fileno(), 16)

def fsync(descriptor):
    time.sleep(struct.unpack("dd", control[:16])[1])
    real_fsync(descriptor)

time.time, os.fsync = lambda: real_time() + struct.unpack("dd", control[:16])[0], fsync
"""
TRAINING_FLAGS = (
    "--n-layer 2 --n-head 2 --n-embd 32 --block-size 16 --batch-size 4 --warmup-steps 20 --total-batch-size 256 "
    "--max-lr 3e-3 --shuffle --val-every 10 --val-tokens 512 --sample-every 0 --hellaswag-every 0 --checkpoint-every 4 "
    "--keep 3 --tensorboard --device cpu --dtype fp32 --resume auto"
).split()


class Violation(Exception):
    """A promise that was broken."""


@dataclass(frozen=True)
class Scenario:
    name: str
    title: str
    processes: int = 1
    restarts: int = 0  # by torchrun
    parallel: str = "ddp"

    @property
    def tokenises(self) -> bool:
        return self.name == "tokenise"


# -----------------------------------------------------------------------------
# A command and its processes


@dataclass
class Setting:
    """The folders that all scenarios use."""

    folder: Path
    disk: Path  # small, where the runs write
    tokenizer: str
    steps: int

    def inject(self, clock: float = 0.0, sync: float = 0.0) -> None:
        """Sets seconds that are added to the clock and to each fsync."""
        with open(self.folder / "control", "r+b" if (self.folder / "control").exists() else "wb") as file:
            file.write(struct.pack("dd", clock, sync))

    def command(self, scenario: Scenario, out: Path) -> list[str]:
        if scenario.tokenises:
            flags = (
                f"--input {self.folder}/text --output {out} --tokenizer {self.tokenizer} --workers 2 --shard-size 50000"
            )
            return [sys.executable, str(ROOT / "fineweb.py"), *flags.split()]
        torchrun = (
            f"-m torch.distributed.run --standalone --nproc_per_node=2 --max-restarts={scenario.restarts}".split()
        )
        script = [*(torchrun if scenario.processes > 1 else []), str(ROOT / "train_gpt2.py")]
        flags = f"--data {self.folder}/data --out {out} --max-steps {self.steps} --parallel {scenario.parallel}".split()
        return [sys.executable, *script, *TRAINING_FLAGS, *flags]


def find_processes(mark: str) -> dict[int, str]:
    """The processes with `mark` in their environment, the oldest first, and what they are."""
    found = {}
    for pid in sorted(int(path.name) for path in Path("/proc").glob("[0-9]*")):
        with contextlib.suppress(OSError):
            environment = Path(f"/proc/{pid}/environ").read_text(errors="replace").split("\0")  # a zombie has none
            line = Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
            rank = next((word.replace("RANK=", "rank ") for word in environment if word.startswith("RANK=")), None)
            if mark in environment and "resource_tracker" not in line:
                names = ("torch.distributed.run", "torchrun"), ("spawn_main", "worker"), ("fineweb.py", "fineweb.py")
                found[pid] = rank or next((name for part, name in names if part in line), "train_gpt2.py")
    return found


class Run:
    """A scenario's command, which is started again and again, with all its processes."""

    def __init__(self, setting: Setting, scenario: Scenario, out: Path):
        self.setting, self.scenario, self.out = setting, scenario, out
        self.mark = f"BENCH_CHAOS_OUT={out}"
        self.starts, self.expected = 0, {0}  # exit codes, after the faults since the last start
        self.altered: dict[Path, int | None] = {}  # what we corrupted, with its inode
        self.startup, self.curves_complete = 3.0, True
        self.process: subprocess.Popen[bytes] | None = None
        self.reader: subprocess.Popen[bytes] | None = None

    @property
    def output(self) -> Path:
        return self.setting.folder / f"{self.out.name}_{self.starts}.txt"

    def start(self) -> None:
        """Kills what still runs, and starts the command."""
        self.kill()
        self.starts, self.expected = self.starts + 1, {0}
        injected = {"PYTHONPATH": str(self.setting.folder), "BENCH_CHAOS_CONTROL": str(self.setting.folder / "control")}
        environment = os.environ | {"OMP_NUM_THREADS": "1", "BENCH_CHAOS_OUT": str(self.out)} | injected
        with open(self.output, "wb") as file:
            self.reader = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=file, start_new_session=True)
        console = self.reader.stdin
        assert console is not None
        command = self.setting.command(self.scenario, self.out)
        self.process = subprocess.Popen(
            command, stdout=console, stderr=console, stdin=subprocess.DEVNULL, env=environment, start_new_session=True
        )
        console.close()

    def kill(self) -> None:
        """Kills all processes."""
        while pids := find_processes(self.mark):
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)
        for process in filter(None, (self.process, self.reader)):
            process.wait()

    def exit_code(self) -> int | None:
        """As a shell shows it; None while the command runs."""
        code = self.process.poll() if self.process else None
        return code if code is None or code >= 0 else 128 - code

    def progress(self) -> tuple[int, ...]:
        """Changes with each value in the log, or shard in the manifest."""
        with contextlib.suppress(OSError):
            stat = (self.out / ("manifest.json" if self.scenario.tokenises else "log.txt")).stat()
            return stat.st_ino, stat.st_size, stat.st_mtime_ns
        return ()

    def partial_files(self) -> list[Path]:
        """What a save, or a shard, is being written to."""
        return list(self.out.glob(".*.npy.partial" if self.scenario.tokenises else ".model_*.partial"))

    def wait_for(self, condition: Callable[[], object], seconds: float = TIMEOUT_SECONDS) -> None:
        """Waits until the condition holds, the command has exited, or time is over."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and self.exit_code() is None and not condition():
            time.sleep(0.002)

    def reach(self, moment: str, delay: float) -> bool:
        """Waits for a moment of the command, which is started if necessary; returns False if it succeeds before.

        Raises:
            Violation: it fails before, and not because of earlier faults.
        """
        while True:
            if self.exit_code() == 0:
                return False
            if moment == "start" or self.exit_code() is not None or self.process is None:
                self._start_and_wait(self.startup * delay if moment == "start" else TIMEOUT_SECONDS)
            if moment == "step":
                for _ in range(1 + int(10 * delay)):
                    self.wait_for_change(self.progress())
            elif moment == "save":
                self.wait_for(self.partial_files)
                time.sleep(2 * SYNC_SECONDS * delay)
            if self.exit_code() is None:
                return True
            self.settle(must_exit=True)
            self.check()

    def _start_and_wait(self, seconds: float) -> None:
        """Starts the command and waits for its first progress, but no longer than this."""
        began, before = time.monotonic(), self.progress()
        self.start()
        self.wait_for_change(before, seconds)
        if self.progress() != before:
            self.startup = time.monotonic() - began

    def wait_for_change(self, before: tuple[int, ...], seconds: float = TIMEOUT_SECONDS) -> None:
        self.wait_for(lambda: self.progress() != before, seconds)

    def settle(self, must_exit: bool) -> str:
        """Waits until all processes have exited, or make progress; says which.

        Raises:
            Violation: neither happened in time, or the exit code is not a documented one.
        """
        seen, steps, deadline = self.progress(), 0, time.monotonic() + TIMEOUT_SECONDS
        while time.monotonic() < deadline:
            processes = find_processes(self.mark)
            if not processes and (code := self.exit_code()) is not None:
                if code not in self.expected:
                    raise Violation(f"exit code {code}, expected {sorted(self.expected)}")
                return f"exit code {code}"
            if self.progress() != seen:
                seen, steps = self.progress(), steps + 1
            if steps >= STEPS_OF_PROGRESS and not must_exit:
                return "it went on"
            if steps >= MAX_STEPS_AFTER_SIGNAL:
                raise Violation(f"{', '.join(processes.values())} did not stop")
            time.sleep(0.05)
        problem = "did not exit" if must_exit else "neither exited nor made progress"
        raise Violation(f"{', '.join(processes.values())} {problem} within {TIMEOUT_SECONDS} s")

    def check(self) -> None:
        """Checks output and files, also while the command runs.

        Raises:
            Violation: there is a traceback, or something incomplete under a final name.
        """
        output = self.output.read_text(errors="replace")
        # torchrun reports each failure with a traceback of its own, in which no file is ours
        if ("Traceback" if self.scenario.processes == 1 else f'File "{ROOT}') in output:
            raise Violation(f"a traceback, in {self.output}")
        self.curves_complete &= "--tensorboard stopped" not in output
        for path, problem in (
            find_corrupt_shards(self.out) if self.scenario.tokenises else find_corrupt_checkpoints(self.out)
        ):
            if path not in self.altered or self.altered[path] != inode_of(path):
                raise Violation(f"{path} is corrupt: {problem}")

    def finish(self) -> None:
        """Runs the command to its end; fineweb.py twice, since it checks all shards only after its end.

        Raises:
            Violation: it does not succeed.
        """
        for _ in range(2 if self.scenario.tokenises else 1):
            self.start()
            while self.settle(must_exit=False) == "it went on":
                pass
            self.check()
        self.altered.clear()
        self.check()


def find_corrupt_checkpoints(out: Path) -> list[tuple[Path, str]]:
    problems = [(path, find_corruption(path)) for path in list_checkpoints(out)]
    return [(path, problem) for path, problem in problems if problem and path.exists()]  # old ones are removed


def find_corrupt_shards(out: Path) -> list[tuple[Path, str]]:
    """The shards that the manifest lists, if they are missing or differ from it."""
    if not (out / "manifest.json").exists():
        return []
    shards = json.loads((out / "manifest.json").read_text())["shards"]
    paths = [(out / shard["file"], shard["sha256"]) for shard in shards]
    return [(path, "not as listed") for path, sha256 in paths if not path.exists() or sha256_of(path) != sha256]


def inode_of(path: Path) -> int | None:
    return path.stat().st_ino if path.exists() else None


# -----------------------------------------------------------------------------
# What must be the same


def metrics_without_time(out: Path) -> list[dict[str, object]]:
    """The lines of metrics.jsonl, without the seconds of each step."""
    lines = (out / "metrics.jsonl").read_text().splitlines()
    return [{name: value for name, value in json.loads(line).items() if name != "seconds"} for line in lines]


def differences(a: Path, b: Path) -> list[str]:
    """What differs between two runs, in any bit of the log, the metrics or the last checkpoint."""
    found = [] if (a / "log.txt").read_bytes() == (b / "log.txt").read_bytes() else ["log.txt"]
    if metrics_without_time(a) != metrics_without_time(b):
        found.append("metrics.jsonl")
    last, other = newest_checkpoint(a), newest_checkpoint(b)
    if last is None or other is None or last.name != other.name:
        return [*found, f"{last} and {other}"]
    listed = set(json.loads((last / "checkpoint.json").read_text())["files"]) - {"trainer.pt"}
    found += [name for name in listed if (last / name).read_bytes() != (other / name).read_bytes()]
    ours, theirs = (torch.load(each / "trainer.pt", weights_only=True) for each in (last, other))
    found += [f"{key} in trainer.pt" for key in ("step", "data", "scaler") if ours[key] != theirs[key]]
    tensors = zip(tree_leaves(ours["optimizer"]), tree_leaves(theirs["optimizer"]), strict=True)
    same = [torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y for x, y in tensors]
    return found + ([] if all(same) else ["optimizer in trainer.pt"])


def different_files(a: Path, b: Path) -> list[str]:
    """The names of files, other than the lock, that two folders do not have in common with the same content."""
    names = {path.name for folder in (a, b) for path in folder.iterdir()} - {LOCK}
    both = [name for name in names if (a / name).is_file() and (b / name).is_file()]
    return sorted(names - {name for name in both if (a / name).read_bytes() == (b / name).read_bytes()})


def wrong_curves(out: Path, complete: bool) -> list[str]:
    """The curves in TensorBoard that do not show the values of the log; all of them, if they are `complete`."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events, wrong = EventAccumulator(str(out / "tensorboard"), size_guidance={"scalars": 0}).Reload(), []
    for name in ("train", "val"):
        logged = read_values(out / "log.txt", name)
        shown = {event.step: event.value for event in events.Scalars(CURVES[name])}
        same = all(abs(value - logged.get(step, float("inf"))) < 6e-5 for step, value in shown.items())  # 4 digits
        if not same or (complete and shown.keys() != logged.keys()):
            wrong.append(f"TensorBoard's {CURVES[name]}")
    return wrong


def check_results(run: Run, reference: Path) -> None:
    """Compares a finished run with the one without faults.

    Raises:
        Violation: they differ.
    """
    if run.scenario.tokenises:
        found = different_files(run.out, reference)
    else:
        found = differences(run.out, reference) + wrong_curves(run.out, run.curves_complete)
        found += [] if read_record(run.out / "run.json") else ["run.json"]
    if found:
        raise Violation(f"not those of {reference}: {', '.join(found[:9])}")
