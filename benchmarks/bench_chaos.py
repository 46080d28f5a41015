"""Tokenises and trains under random faults, and compares the results with those of runs without faults. Linux only.

    python benchmarks/bench_chaos.py --minutes 10                    # all scenarios in turn, at least once each
    python benchmarks/bench_chaos.py --minutes 10 --seed 1           # other faults, at other moments
    python benchmarks/bench_chaos.py --scenarios train --faults 5    # one scenario, once

Each scenario is one command: fineweb.py with two workers, or train_gpt2.py with checkpoints, validation and TensorBoard, in
one process, in two under torchrun, or in two that torchrun restarts. Whenever it has exited, it is started again. It suffers
one fault after the other: SIGKILL, SIGTERM or SIGSTOP of one of its processes, a full disk, a folder without permission, a
corrupt file, a console that nobody reads, a clock that jumps, a slow disk. After each one, within a minute and a half, all
processes must have exited, with a documented exit code, or make progress again; there must be no traceback, and nothing
incomplete under a final name. At the end, the log, the weights and the optimizer, or the shards and the manifest, must be
those of a run without faults, bit by bit, and TensorBoard's curves those of the log.

The seed determines the faults; which step they hit depends on the machine. The first violation ends the benchmark, with
exit code 1, and its files are kept.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import torch
from torch.utils._pytree import tree_leaves

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from support.checkpoints.directory import find_corruption, list_checkpoints, newest_checkpoint  # noqa: E402
from support.cli import UserError  # noqa: E402
from support.console.log import read_values  # noqa: E402
from support.console.trackers import CURVES  # noqa: E402
from support.data.tokenizer import get_tokenizer  # noqa: E402
from support.files import LOCK, sha256_of  # noqa: E402

PATIENCE = 90  # seconds until all processes have exited or make progress; torchrun alone waits 30 for a process to stop
PROGRESS = 3  # new values in the log, or shards, that show it
DISK_BYTES = 64 << 20
SYNC_SECONDS = 0.02  # that each fsync takes, so that a kill can hit a save
KINDS = (
    "SIGKILL", "SIGTERM", "SIGSTOP", "full disk", "no permission", "corrupt file", "closed console", "clock", "slow disk",
)  # fmt: skip
# Besides 0. Under torchrun, 1 and what torchrun itself is killed with.
EXIT_CODES = {
    "SIGKILL": {137, 2},  # 2: a worker of fineweb.py was killed
    "SIGTERM": {143, 2},
    "full disk": {2},
    "no permission": {2},
    "closed console": {141, 1},  # 1: before the first step, or in fineweb.py
}
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
class Fault:
    kind: str
    moment: str  # "start", "step" or "save"
    choice: float  # from 0 to 1: which process or which file, and how it is corrupted
    seconds: float  # how long it lasts, if it does


def draw_faults(number: int, seed: str) -> list[Fault]:
    """Each kind of fault once, the rest SIGKILL; in random order."""
    rng = random.Random(seed)
    kinds = rng.sample(KINDS, len(KINDS))[:number] + ["SIGKILL"] * (number - len(KINDS))
    moments = [("start", "step", "save")[i % 3] for i in range(number)]
    rng.shuffle(kinds)
    rng.shuffle(moments)
    return [Fault(kind, moment, rng.random(), rng.uniform(1, 3)) for kind, moment in zip(kinds, moments, strict=True)]


@dataclass(frozen=True)
class Scenario:
    name: str
    title: str
    processes: int = 1
    restarts: int = 0  # by torchrun

    @property
    def tokenises(self) -> bool:
        return self.name == "tokenise"


SCENARIOS = (
    Scenario("tokenise", "fineweb.py, 2 workers"),
    Scenario("train", "1 process"),
    Scenario("torchrun", "torchrun, 2 processes", 2),
    Scenario("restarts", "torchrun --max-restarts", 2, 3),
)


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
        flags = ["--data", str(self.folder / "data"), "--out", str(out), "--max-steps", str(self.steps)]
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
        self.altered: dict[Path, int] = {}  # what we corrupted, with its inode
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

    def wait_for(self, condition: Callable[[], object], seconds: float = PATIENCE) -> None:
        """Waits until the condition holds, the command has exited, or time is over."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and self.exit_code() is None and not condition():
            time.sleep(0.002)

    def wait_for_moment(self, fault: Fault) -> None:
        """Starts the command if necessary, and returns at the moment of the fault."""
        fresh = fault.moment == "start" or self.exit_code() is not None or self.process is None
        if fresh:
            began, before = time.monotonic(), self.progress()
            self.start()
            self.wait_for(
                lambda: self.progress() != before, self.startup * fault.choice if fault.moment == "start" else PATIENCE
            )
            if fault.moment != "start":
                self.startup = time.monotonic() - began
        if fault.moment == "step":
            for _ in range(1 + int(10 * fault.choice)):
                before = self.progress()
                self.wait_for(lambda before=before: self.progress() != before)
        elif fault.moment == "save":
            self.wait_for(self.partial_files)
            time.sleep(2 * SYNC_SECONDS * fault.choice)

    def settle(self, must_exit: bool) -> str:
        """Waits until all processes have exited, or make progress; says which.

        Raises:
            Violation: neither happened in time, or the exit code is not a documented one.
        """
        seen, steps, deadline = self.progress(), 0, time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            processes = find_processes(self.mark)
            if not processes and (code := self.exit_code()) is not None:
                if code not in self.expected:
                    raise Violation(f"exit code {code}, expected {sorted(self.expected)}")
                return f"exit code {code}"
            if self.progress() != seen:
                seen, steps = self.progress(), steps + 1
            if steps >= PROGRESS and not must_exit:
                return "it went on"
            time.sleep(0.05)
        problem = "did not exit" if must_exit else "neither exited nor made progress"
        raise Violation(f"{', '.join(processes.values())} {problem} within {PATIENCE} s")

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
            if path.exists() and path.stat().st_ino != self.altered.get(path):  # training removes old checkpoints
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
    return [(path, problem) for path, problem in problems if problem]


def find_corrupt_shards(out: Path) -> list[tuple[Path, str]]:
    """The shards in the manifest that differ from it."""
    if not (out / "manifest.json").exists():
        return []
    shards = json.loads((out / "manifest.json").read_text())["shards"]
    paths = [(out / shard["file"], shard["sha256"]) for shard in shards]
    return [(path, "other content") for path, sha256 in paths if path.exists() and sha256_of(path) != sha256]


# -----------------------------------------------------------------------------
# The faults: each returns when it is over, and says what it hit


def send_signal(run: Run, fault: Fault) -> str:
    """Half of the signals are for the process that was started, the others for one of its children."""
    processes = list(find_processes(run.mark).items()) or [(0, "nothing")]
    index = 0 if fault.choice < 0.5 else int((2 * fault.choice - 1) * len(processes))
    pid, name = processes[index]
    with contextlib.suppress(ProcessLookupError):
        if pid:
            os.kill(pid, signal.Signals[fault.kind])
            if fault.kind == "SIGSTOP":
                time.sleep(fault.seconds)
                os.kill(pid, signal.SIGCONT)
    return name


def fill_disk(run: Run, fault: Fault) -> str:
    ballast = run.setting.disk / "ballast"
    with open(ballast, "wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(1 << 16))
    time.sleep(fault.seconds)
    ballast.unlink()
    return f"for {fault.seconds:.1f} s"


def forbid_writing(run: Run, fault: Fault) -> str:
    folder = run.out if run.out.exists() else run.out.parent
    folder.chmod(0o500)
    time.sleep(fault.seconds)
    folder.chmod(0o755)
    return f"for {fault.seconds:.1f} s"


def corrupt_file(run: Run, fault: Fault) -> str:
    """Kills the command and corrupts its newest checkpoint, if there is an older one, or shard; then starts it again."""

    def candidates() -> list[Path]:
        if run.scenario.tokenises:
            shards = json.loads((run.out / "manifest.json").read_text())["shards"] if run.progress() else []
            return [*run.partial_files(), *(run.out / shard["file"] for shard in shards[-1:])]
        intact = [path for path in list_checkpoints(run.out) if find_corruption(path) is None]
        return sorted(intact[-1].iterdir()) if len(intact) > 1 else []

    run.wait_for(candidates)
    run.kill()
    files = candidates()
    if not files:
        return "(there was none to spare)"
    file, data = files[int(fault.choice * len(files))], None
    way = ("removed", "truncated", "a bit flipped")[int(1000 * fault.choice) % 3]
    owner = file if run.scenario.tokenises else file.parent
    run.altered[owner] = owner.stat().st_ino
    data = bytearray(file.read_bytes())
    if way == "removed" or not data:
        file.unlink()
    elif way == "truncated":
        os.truncate(file, int(len(data) * fault.choice))
    else:
        data[int(len(data) * fault.choice)] ^= 1
        file.write_bytes(data)
    run.start()
    return f"{owner.name}{'' if owner == file else '/' + file.name} {way}"


def close_console(run: Run, fault: Fault) -> str:
    assert run.reader is not None
    run.reader.kill()
    run.reader.wait()
    return ""


def move_clock(run: Run, fault: Fault) -> str:
    hours = 10 * fault.choice - 5
    run.curves_complete &= fault.moment != "start"  # TensorBoard reads its files in the order of their times
    run.setting.inject(clock=3600 * hours, sync=SYNC_SECONDS)
    time.sleep(fault.seconds)
    run.setting.inject(sync=SYNC_SECONDS)
    return f"by {hours:+.1f} h and back"


def slow_down_disk(run: Run, fault: Fault) -> str:
    run.setting.inject(sync=fault.seconds)
    time.sleep(2 * fault.seconds)
    run.setting.inject(sync=SYNC_SECONDS)
    return f"by {fault.seconds:.1f} s per fsync"


INJECT: dict[str, Callable[[Run, Fault], str]] = {
    "full disk": fill_disk,
    "no permission": forbid_writing,
    "corrupt file": corrupt_file,
    "closed console": close_console,
    "clock": move_clock,
    "slow disk": slow_down_disk,
}


def suffer(run: Run, fault: Fault) -> str:
    """One fault and the checks after it. Returns what happened.

    Raises:
        Violation: a check failed.
    """
    run.wait_for_moment(fault)
    if run.exit_code() is None:
        run.expected |= EXIT_CODES.get(fault.kind, set())
        if run.scenario.processes > 1 and fault.kind in EXIT_CODES:
            run.expected |= {1}
    what = INJECT.get(fault.kind, send_signal)(run, fault)
    child = what == "worker" or (run.scenario.restarts > 0 and what.startswith("rank"))
    ends = fault.kind in ("SIGKILL", "SIGTERM") and not child and what != "nothing"
    try:
        outcome = run.settle(ends)
        run.check()
    except Violation as violation:
        raise Violation(f"{run.scenario.name}: {fault.kind} {what} (in a {fault.moment}): {violation}") from None
    return f"{fault.kind} {what} (in a {fault.moment}): {outcome}"


# -----------------------------------------------------------------------------
# What must be the same


def differences(a: Path, b: Path) -> list[str]:
    """What differs between two runs, in any bit of the log or of the last checkpoint."""
    found = [] if (a / "log.txt").read_bytes() == (b / "log.txt").read_bytes() else ["log.txt"]
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
    if found:
        raise Violation(f"{run.scenario.name}: {', '.join(found[:9])} are not those of {reference}")


# -----------------------------------------------------------------------------
# The benchmark


def isolate() -> None:
    """Starts this program again with a mount namespace of its own, and without root's right to ignore permissions."""
    if "BENCH_CHAOS" in os.environ:
        return
    os.environ["BENCH_CHAOS"] = "1"
    prefix: list[str] = []
    unshare = ["unshare", "--mount", *([] if os.geteuid() == 0 else ["--map-root-user"])]
    for wrapper in (unshare, ["setpriv", "--bounding-set", "-dac_override,-dac_read_search"]):
        if shutil.which(wrapper[0]) and not subprocess.run([*prefix, *wrapper, "true"], capture_output=True).returncode:
            prefix += wrapper
    command = [*prefix, sys.executable, *sys.argv]
    os.execvp(command[0], command)


def prepare(folder: Path, faults: int) -> tuple[Setting, list[str]]:
    """Makes data, text and the small disk. Returns them, and the kinds of faults that are not possible here."""
    tokenizer, skipped, disk = "gpt2", [], folder / "disk"
    try:
        get_tokenizer("gpt2")
    except UserError:
        tokenizer = "bytes"
        print("no GPT-2 vocabulary without a network: fineweb.py makes bytes, without workers")
    for part in (disk, folder / "text", folder / "reference"):
        part.mkdir()
    (folder / "sitecustomize.py").write_text(SITECUSTOMIZE)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True).returncode:
        skipped.append("full disk")
    (disk / "probe").mkdir(0o500)
    if os.access(disk / "probe", os.W_OK):
        skipped.append("no permission")
    (disk / "probe").rmdir()
    from pydoc_data.topics import topics

    for i in range(40):
        (folder / "text" / f"{i:02d}.txt").write_text(f"{i}\n" + "\n".join(topics.values()))
    make_data = [sys.executable, ROOT / "fineweb.py", "--demo", "--output", folder / "data"]
    subprocess.run(make_data, check=True, stdout=subprocess.DEVNULL)
    for kind in skipped:
        print(f"skipped: {kind}, which this machine does not permit")
    return Setting(folder, disk, tokenizer, steps=50 + 20 * faults), skipped


class Report:
    """What happened so far."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.faults: Counter[tuple[str, str]] = Counter()
        self.events: Counter[str] = Counter()

    def line(self, text: str) -> None:
        print(f"{time.monotonic() - self.began:5.0f}s  {text}", flush=True)

    def table(self, scenarios: Sequence[Scenario]) -> str:
        header = f"{'':15}" + "".join(f"{scenario.name:>10}" for scenario in scenarios) + f"{'all':>10}"
        lines = [header]
        for kind in KINDS:
            counts = [self.faults[kind, scenario.name] for scenario in scenarios]
            lines.append(f"{kind:15}" + "".join(f"{number:10}" for number in [*counts, sum(counts)]))
        totals = [sum(self.faults[kind, scenario.name] for kind in KINDS) for scenario in scenarios]
        lines.append(f"{'all':15}" + "".join(f"{number:10}" for number in [*totals, sum(totals)]))
        return "\n".join(lines)


def run_scenario(setting: Setting, scenario: Scenario, faults: Sequence[Fault], number: int, report: Report) -> None:
    """Runs a scenario under these faults; the one without, too, if it has not run yet.

    Raises:
        Violation: a check failed.
    """
    reference = setting.folder / "reference" / (scenario.name if scenario.tokenises else f"train_{scenario.processes}")
    if not reference.exists():
        setting.inject()
        plain = Scenario(scenario.name, scenario.title, scenario.processes)
        Run(setting, plain, reference).finish()
        report.line(f"{scenario.name}: {scenario.title}, without faults")
    run = Run(setting, scenario, setting.disk / f"{scenario.name}_{number}")
    setting.inject(sync=SYNC_SECONDS)
    try:
        for fault in faults:
            report.line(f"{scenario.name}: {suffer(run, fault)}")
            report.faults[fault.kind, scenario.name] += 1
            report.events["half written"] += run.exit_code() is not None and bool(run.partial_files())
            if run.exit_code() == 0:
                break
        run.finish()
        check_results(run, reference)
    finally:
        run.kill()
    report.events["starts"] += run.starts
    report.line(f"{scenario.name}: the same as without faults")
    shutil.rmtree(run.out)


def main() -> None:
    names = [scenario.name for scenario in SCENARIOS]
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--minutes", type=float, default=0, metavar="N", help="start no scenario later (default: 0, each once)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the faults (default: 0)")
    parser.add_argument("--scenarios", nargs="+", choices=names, default=names, help="default: all")
    parser.add_argument("--faults", type=int, default=15, metavar="N", help="in each scenario (default: 15)")
    args = parser.parse_args()
    isolate()

    report, folder = Report(), Path(tempfile.mkdtemp(prefix="bench_chaos_"))
    setting, skipped = prepare(folder, args.faults)
    scenarios = [scenario for scenario in SCENARIOS if scenario.name in args.scenarios]
    try:
        for number in count():
            for scenario in scenarios:
                if number and time.monotonic() - report.began > 60 * args.minutes:
                    break
                faults = draw_faults(args.faults, f"{args.seed} {number} {scenario.name}")
                faults = [fault for fault in faults if fault.kind not in skipped]
                run_scenario(setting, scenario, faults, number, report)
            if time.monotonic() - report.began > 60 * args.minutes:
                break
    except Violation as violation:
        shutil.copytree(setting.disk, folder / "kept")  # the disk is gone when this process ends
        sys.exit(f"\nviolation: {violation}\nEverything is in {folder}; what was in disk/ is now in kept/.")
    print(f"\n{report.table(scenarios)}\n")
    print(
        f"{report.events['half written']} left half a checkpoint or shard; the commands were started "
        f"{report.events['starts']} times; 0 lost, 0 hangs; {time.monotonic() - report.began:.0f} s"
    )
    subprocess.run(["umount", str(setting.disk)], capture_output=True)
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
