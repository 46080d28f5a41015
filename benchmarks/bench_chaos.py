"""Tokenises and trains under random faults, and compares the results with those of runs without faults. Linux only.

    python benchmarks/bench_chaos.py --minutes 10                    # all scenarios in turn, at least once each
    python benchmarks/bench_chaos.py --minutes 10 --seed 1           # other faults, at other moments
    python benchmarks/bench_chaos.py --scenarios train --faults 5    # one scenario, once

Each scenario is one command: fineweb.py, or train_gpt2.py with checkpoints and validation, in one
process, in two under torchrun, or in two that torchrun restarts, with DDP or FSDP, or as a fork of a shorter run. Whenever it
has exited, it is started again. It suffers one fault after the other: SIGKILL, SIGTERM or SIGSTOP of one of its processes, a full disk, a folder
without permission, a corrupt file, a console that nobody reads.
After each one, within a minute and a half, all processes must have exited, with a documented exit code, or make progress
again; there must be no traceback, and nothing incomplete under a final name. At the end, the log, the weights and the
optimizer, or the shards and the manifest, must equal those of a run without faults, bit by bit.

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
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from pydoc_data.topics import topics

from harness import ROOT, find_processes, kill_processes, script_command
from runs import differences

from fineweb import make_shards
from support.checkpoints.directory import find_corruption, list_checkpoints
from support.cli import UserError
from support.console.starts import read_starts
from support.data.text_files import Documents
from support.data.tokenizer import get_tokenizer
from support.files import LOCK, sha256_of

DISK_BYTES = 128 << 20  # enough for two sets of shards of bytes
# Seconds until all processes have exited or make progress; torchrun alone waits 30 for a process to stop.
TIMEOUT_SECONDS = 90
STEPS_OF_PROGRESS = 3  # new values in the log, or shards, that show it
MAX_STEPS_AFTER_SIGNAL = 25  # that show that it ignores a signal
SYNC_SECONDS = 0.02  # that each fsync takes, so that a kill can hit a save
# Runs in each Python process.
SITECUSTOMIZE = f"""
import os, time
real_fsync = os.fsync

def fsync(descriptor):
    time.sleep({SYNC_SECONDS})
    real_fsync(descriptor)

os.fsync = fsync
"""
TRAINING_FLAGS = (
    "--n-layer 2 --n-head 2 --n-embd 32 --block-size 16 --batch-size 4 --warmup-steps 20 --total-batch-size 256 "
    "--max-lr 3e-3 --shuffle --val-every 10 --val-tokens 512 --sample-every 0 --hellaswag-every 0 --checkpoint-every 4 "
    "--keep 3 --schedule wsd --device cpu --dtype fp32 --resume auto"
).split()


class Violation(Exception):
    """A promise that was broken; any check below may raise it."""


@dataclass(frozen=True)
class Scenario:
    name: str
    processes: int = 1
    restarts: int = 0  # by torchrun
    parallel: str = "ddp"
    forks: bool = False  # a shorter run

    @property
    def tokenises(self) -> bool:
        return self.name == "tokenise"


SCENARIOS = (
    Scenario("tokenise"),
    Scenario("train"),
    Scenario("torchrun", 2),
    Scenario("restarts", 2, 3),
    Scenario("fsdp", 2, 3, "fsdp"),
    Scenario("fork", 2, 3, "fsdp", forks=True),
)
SHORTER, BEFORE_COOLDOWN = 40, 24  # steps of the run that is forked, and where


# -----------------------------------------------------------------------------
# A command and its processes


@dataclass
class Setting:
    """The folders that all scenarios use."""

    folder: Path
    disk: Path  # small, where the runs write
    tokenizer: str
    steps: int


class Run:
    """A scenario's command, which is started again and again, with all its processes."""

    def __init__(self, setting: Setting, scenario: Scenario, out: Path):
        self.setting, self.scenario, self.out = setting, scenario, out
        self.starts, self.expected = 0, {0}  # exit codes, after the faults since the last start
        self.altered: set[tuple[Path, int | None]] = set()  # what we corrupted, with its inode
        self.startup = 3.0  # seconds until it makes progress
        self.process: subprocess.Popen[bytes] | None = None
        self.reader: subprocess.Popen[bytes] | None = None

    def command(self) -> list[str]:
        folder = self.setting.folder
        if self.scenario.tokenises:
            flags = f"--input {folder}/text --tokenizer {self.setting.tokenizer} --shard-size 50000"
            return script_command("fineweb.py", *flags.split(), "--output", self.out)
        flags = f"--data {folder}/data --max-steps {self.setting.steps} --parallel {self.scenario.parallel}"
        args = [*TRAINING_FLAGS, *flags.split(), "--out", self.out]
        if self.scenario.forks:
            args += ["--fork", self.setting.disk / "shorter" / f"model_{BEFORE_COOLDOWN:05d}"]
        return script_command("train_gpt2.py", *args, processes=self.scenario.processes)

    def start(self) -> None:
        """Kills what still runs, and starts the command."""
        self.kill()
        self.starts, self.expected = self.starts + 1, {0}
        self.output = self.setting.folder / f"{self.out.name}_{self.starts}.txt"
        environment = os.environ | {"OMP_NUM_THREADS": "1", "BENCH_CHAOS_OUT": str(self.out)}
        environment["PYTHONPATH"] = str(self.setting.folder)  # of SITECUSTOMIZE
        environment["PET_MAX_RESTARTS"] = str(self.scenario.restarts)  # a flag of torchrun
        with open(self.output, "wb") as file:
            self.reader = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=file, start_new_session=True)
        with self.reader.stdin as console:
            streams = dict(stdin=subprocess.DEVNULL, stdout=console, stderr=console)
            self.process = subprocess.Popen(self.command(), **streams, env=environment, start_new_session=True)

    def kill(self) -> None:
        """Kills all processes."""
        kill_processes(f"BENCH_CHAOS_OUT={self.out}")
        for process in filter(None, (self.process, self.reader)):
            process.wait()

    def processes(self) -> dict[int, str]:
        """Its processes, the oldest first, and what they are."""
        names = ("torch.distributed.run", "torchrun"), ("fineweb.py", "fineweb.py")
        found = {}
        for pid, environment in find_processes(f"BENCH_CHAOS_OUT={self.out}").items():
            with contextlib.suppress(OSError):  # it has just exited
                line = Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
                rank = next((word.replace("RANK=", "rank ") for word in environment if word.startswith("RANK=")), None)
                if "resource_tracker" not in line:
                    found[pid] = rank or next((name for part, name in names if part in line), "train_gpt2.py")
        return found

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

    def wait_for_progress(self, seconds: float = TIMEOUT_SECONDS) -> bool:
        before = self.progress()
        self.wait_for(lambda: self.progress() != before, seconds)
        return self.progress() != before

    def reach(self, moment: str, delay: float) -> bool:
        """Waits for a moment of the command, which is started if necessary; returns False if it succeeds before.

        It may fail before only because of earlier faults.
        """
        while self.exit_code() != 0:
            if moment == "start" or self.exit_code() is not None or self.process is None:
                self.start()
                began = time.monotonic()
                if self.wait_for_progress(self.startup * delay if moment == "start" else TIMEOUT_SECONDS):
                    self.startup = time.monotonic() - began
            if moment == "step":
                for _ in range(1 + int(10 * delay)):
                    self.wait_for_progress()
            elif moment == "save":
                self.wait_for(self.partial_files)
                time.sleep(2 * SYNC_SECONDS * delay)
            if self.exit_code() is None:
                return True
            self.settle(must_exit=True)
            self.check()
        return False

    def settle(self, must_exit: bool) -> str:
        """Waits until all processes have exited, with a documented exit code, or make progress; says which."""
        seen, steps, deadline = self.progress(), 0, time.monotonic() + TIMEOUT_SECONDS
        while time.monotonic() < deadline:
            processes = self.processes()
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
        """No traceback, and nothing incomplete under a final name, also while the command runs."""
        output = self.output.read_text(errors="replace")
        # torchrun reports each failure with a traceback of its own, in which no file is ours
        if ("Traceback" if self.scenario.processes == 1 else f'File "{ROOT}') in output:
            raise Violation(f"a traceback, in {self.output}")
        for path, problem in (find_corrupt_shards if self.scenario.tokenises else find_corrupt_checkpoints)(self.out):
            if (path, inode_of(path)) not in self.altered:
                raise Violation(f"{path} is corrupt: {problem}")

    def finish(self) -> None:
        """Runs the command to its end; fineweb.py twice, since it checks all shards only after its end."""
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
    paths = [(out / shard["file"], shard["sha256"]) for shard in listed_shards(out)]
    return [(path, "not as listed") for path, sha256 in paths if not path.exists() or sha256_of(path) != sha256]


def listed_shards(out: Path) -> list[dict[str, str]]:
    manifest = out / "manifest.json"
    return json.loads(manifest.read_text())["shards"] if manifest.exists() else []


def inode_of(path: Path) -> int | None:
    return path.stat().st_ino if path.exists() else None


# -----------------------------------------------------------------------------
# What must be the same


def different_files(a: Path, b: Path) -> list[str]:
    """The names of files, other than the lock, that two folders do not have in common with the same content."""
    contents = [{path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()} for folder in (a, b)]
    return sorted({name for name, _ in contents[0].items() ^ contents[1].items()} - {LOCK})


def check_results(run: Run, reference: Path) -> None:
    """A finished run must be the same as the one without faults."""
    found = (different_files if run.scenario.tokenises else differences)(run.out, reference)
    if not run.scenario.tokenises and not read_starts(run.out):
        found.append("starts.jsonl")
    if found:
        raise Violation(f"not those of {reference}: {', '.join(found[:9])}")


# -----------------------------------------------------------------------------
# The faults: each function returns when its fault is over, and says what it hit


@dataclass(frozen=True)
class Fault:
    kind: str
    moment: str  # "start", "step" or "save"
    delay: float  # 0 to 1: how far into the start or the save, or after how many steps
    choice: float  # 0 to 1: which process or which file, and how it is corrupted
    seconds: float  # how long it lasts, if it does


def draw_faults(number: int, seed: str) -> list[Fault]:
    """Each kind of fault once, the rest SIGKILL; in random order."""
    rng = random.Random(seed)
    kinds = rng.sample(list(FAULTS), len(FAULTS))[:number] + ["SIGKILL"] * (number - len(FAULTS))
    moments = [("start", "step", "save")[i % 3] for i in range(number)]
    rng.shuffle(kinds)
    rng.shuffle(moments)
    return [
        Fault(kind, moment, rng.random(), rng.random(), rng.uniform(1, 3))
        for kind, moment in zip(kinds, moments, strict=True)
    ]


def send_signal(run: Run, fault: Fault) -> str:
    """Half of the signals are for the process that was started, the others for one of its children."""
    processes = list(run.processes().items())
    if not processes:
        return "(it had just exited)"
    pid, name = processes[0 if fault.choice < 0.5 else int((2 * fault.choice - 1) * len(processes))]
    with contextlib.suppress(ProcessLookupError):
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
            return [*run.partial_files(), *(run.out / shard["file"] for shard in listed_shards(run.out)[-1:])]
        intact = [path for path in list_checkpoints(run.out) if find_corruption(path) is None]
        return sorted(intact[-1].iterdir()) if len(intact) > 1 else []

    run.wait_for(candidates)
    run.kill()
    files = candidates()
    if not files:
        return "(there was none to spare)"
    file = files[int(fault.choice * len(files))]
    data = bytearray(file.read_bytes())
    way = ("removed", "truncated", "a bit flipped")[int(1000 * fault.choice) % 3]
    owner = file if run.scenario.tokenises else file.parent
    if way == "removed" or not data:
        file.unlink()
    elif way == "truncated":
        os.truncate(file, int(len(data) * fault.choice))
    else:
        data[int(len(data) * fault.choice)] ^= 1
        file.write_bytes(data)
    run.altered.add((owner, inode_of(owner)))
    run.start()
    return f"{file.relative_to(run.out)} {way}"


def close_console(run: Run, fault: Fault) -> str:
    run.reader.kill()
    run.reader.wait()
    return ""


# What each kind does, and the exit codes after it besides 0; under torchrun also 1, and what torchrun is killed with.
FAULTS: dict[str, tuple[Callable[[Run, Fault], str], set[int]]] = {
    "SIGKILL": (send_signal, {137}),
    "SIGTERM": (send_signal, {143}),
    "SIGSTOP": (send_signal, set()),
    "full disk": (fill_disk, {2}),
    "no permission": (forbid_writing, {2}),
    "corrupt file": (corrupt_file, set()),
    "closed console": (close_console, {141, 1}),  # 1: before the first step, or in fineweb.py
}


def must_exit(scenario: Scenario, fault: Fault, target: str) -> bool:
    """Whether the command must exit after a fault, which hit the process `target`."""
    if fault.kind == "closed console":
        return not scenario.tokenises and not scenario.restarts  # fineweb.py prints only now and then
    survives = target == "(it had just exited)" or (scenario.restarts > 0 and target.startswith("rank"))
    return fault.kind in ("SIGKILL", "SIGTERM") and not survives


def inject_and_check(run: Run, fault: Fault) -> str | None:
    """One fault and the checks after it. Prints and returns what happened; None if the command succeeded before."""
    if not run.reach(fault.moment, fault.delay):
        return None
    inject, codes = FAULTS[fault.kind]
    run.expected |= codes | ({1} if codes and run.scenario.processes > 1 else set())
    target = inject(run, fault)
    what = f"{fault.kind} {target}".rstrip() + f", in a {fault.moment}"
    print(f"{run.scenario.name}: {what}: ", end="", flush=True)
    outcome = run.settle(must_exit(run.scenario, fault, target))
    run.check()
    print(outcome, flush=True)
    return f"{what}: {outcome}"


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


def make_inputs(folder: Path) -> str:
    """Makes the text and the shards that the scenarios read; returns the tokenizer for the text."""
    with contextlib.redirect_stdout(None):
        make_shards(Documents("topics", topics.values()), folder / "data", tokenizer="bytes")
    (folder / "text").mkdir()
    for i in range(40):
        (folder / "text" / f"{i:02d}.txt").write_text(f"{i}\n" + "\n".join(topics.values()))
    try:
        return get_tokenizer("gpt2").name
    except UserError:
        print("no GPT-2 vocabulary without a network: fineweb.py makes bytes")
        return "bytes"


def prepare_disk(disk: Path) -> list[str]:
    """Mounts a small disk. Returns the kinds of faults that are not possible here."""
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(disk)]
    skipped = ["full disk"] if subprocess.run(mount, capture_output=True).returncode else []
    probe = disk / "probe"
    probe.mkdir(0o500)
    skipped += ["no permission"] if os.access(probe, os.W_OK) else []
    probe.rmdir()
    for kind in skipped:
        print(f"skipped: {kind}, which this machine does not permit")
    return skipped


def run_scenario(
    setting: Setting, scenario: Scenario, faults: Sequence[Fault], number: int, counts: Counter[str]
) -> None:
    """Runs a scenario under these faults; the one without, too, if it has not run yet."""
    kind = "tokens" if scenario.tokenises else f"{scenario.parallel}_{scenario.processes}"
    reference = setting.disk / f"reference_{kind}"
    undisturbed = replace(scenario, restarts=0, forks=False)
    if not reference.exists():
        Run(setting, undisturbed, reference).finish()
        print(f"{scenario.name}, without faults", flush=True)
    if scenario.forks and not (setting.disk / "shorter").exists():
        Run(replace(setting, steps=SHORTER), undisturbed, setting.disk / "shorter").finish()
    run = Run(setting, scenario, setting.disk / f"{scenario.name}_{number}")
    try:
        for fault in faults:
            happened = inject_and_check(run, fault)
            if happened is None:  # the command was faster than the faults
                break
            counts[fault.kind] += 1
            counts["half written"] += run.exit_code() is not None and bool(run.partial_files())
            counts["restarts by torchrun"] += scenario.restarts > 0 and "rank" in happened and "went on" in happened
        run.finish()
        check_results(run, reference)
    finally:
        run.kill()
    counts["starts"] += run.starts
    print(f"{scenario.name}: the same as without faults", flush=True)
    shutil.rmtree(run.out)


def main() -> None:
    names = [scenario.name for scenario in SCENARIOS]
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    minutes_help = "start no scenario later, after the first of each (default: 0)"
    parser.add_argument("--minutes", type=float, default=0, metavar="N", help=minutes_help)
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the faults (default: 0)")
    parser.add_argument("--scenarios", nargs="+", choices=names, default=names, help="default: all")
    parser.add_argument("--faults", type=int, default=15, metavar="N", help="in each scenario (default: 15)")
    args = parser.parse_args()
    isolate()
    began, counts, folder = time.monotonic(), Counter[str](), Path(tempfile.mkdtemp(prefix="bench_chaos_"))
    scenarios = [scenario for scenario in SCENARIOS if scenario.name in args.scenarios]
    (folder / "sitecustomize.py").write_text(SITECUSTOMIZE)
    skipped, tokenizer = prepare_disk(folder / "disk"), make_inputs(folder)
    setting = Setting(folder, folder / "disk", tokenizer, steps=50 + 20 * args.faults)
    try:
        for number, scenario in ((n, each) for n in count() for each in scenarios):
            if number and time.monotonic() - began > 60 * args.minutes:
                break
            faults = draw_faults(args.faults, f"{args.seed} {number} {scenario.name}")
            run_scenario(setting, scenario, [f for f in faults if f.kind not in skipped], number, counts)
    except Violation as violation:
        shutil.copytree(setting.disk, folder / "kept")  # the disk is gone when this process ends
        sys.exit(f"\nviolation: {violation}\nEverything is in {folder}; what was in disk/ is now in kept/.")
    print(f"\n{', '.join(f'{kind}: {n}' for kind, n in counts.items())}")
    print(f"0 lost, 0 hangs; {time.monotonic() - began:.0f} s")
    subprocess.run(["umount", str(setting.disk)], capture_output=True)
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
