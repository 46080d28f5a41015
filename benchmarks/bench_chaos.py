"""Tokenises and trains under random faults, and compares the results with those of runs without faults. Linux only.

    python benchmarks/bench_chaos.py --minutes 10                    # all scenarios in turn, at least once each
    python benchmarks/bench_chaos.py --minutes 10 --seed 1           # other faults, at other moments
    python benchmarks/bench_chaos.py --scenarios train --faults 5    # one scenario, once

Each scenario runs one command, and starts it again whenever it has exited. The command is fineweb.py, or
train_gpt2.py with checkpoints and validation: in one process, in two under torchrun, in two that torchrun restarts
(with DDP or FSDP), or as a fork of a shorter run, also on different data in steps of a different size. It suffers one fault after another: SIGKILL, SIGTERM or SIGSTOP sent
to one of its processes, a full disk, a folder without write permission, a corrupt file, or a console that nobody reads.

Within a minute and a half of each fault, all processes must either exit with a documented exit code or make progress
again. There must be no traceback, and nothing incomplete under a final name. At the end, the log, weights and optimizer
state, or the shards and the manifest, must be bit-identical to those of a run without faults.

The seed determines the faults, but the step that each one hits depends on the machine. The first violation ends the
benchmark with exit code 1 and keeps the files.
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
from support.checkpoints.history import read_starts
from support.cli import UserError
from support.data.text_files import Documents
from support.data.tokenizer import get_tokenizer
from support.files import LOCK, sha256_of

DISK_BYTES = 128 << 20  # enough for two sets of byte shards
# Seconds until all processes have exited or make progress; torchrun alone waits 30 for a process to stop.
TIMEOUT_SECONDS = 90
STEPS_OF_PROGRESS = 3  # changes of the log, or of the manifest, that count as progress
MAX_STEPS_AFTER_SIGNAL = 25  # after this many changes, the command has ignored a signal
SYNC_SECONDS = 0.02  # added to each fsync, so that a kill can hit a save
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
    """A broken guarantee. Any check below may raise it."""


@dataclass(frozen=True)
class Scenario:
    name: str
    processes: int = 1
    restarts: int = 0  # by torchrun
    parallel: str = "ddp"
    forks: bool = False  # whether it forks a shorter run
    other: bool = False  # whether the fork has different data, and steps of a different size

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
    Scenario("fork_other", 2, 3, forks=True, other=True),
)
SHORTER, BEFORE_COOLDOWN = 40, 24  # steps of the run that is forked, and the step of the fork


# -----------------------------------------------------------------------------
# A command and its processes


@dataclass
class Setting:
    """Folders and settings that all scenarios share."""

    folder: Path
    disk: Path  # a small disk that the runs write to
    tokenizer: str
    steps: int


class Run:
    """A scenario's command, which is started repeatedly, and all its processes."""

    def __init__(self, setting: Setting, scenario: Scenario, out: Path):
        self.setting, self.scenario, self.out = setting, scenario, out
        self.starts, self.expected = 0, {0}  # exit codes to expect, given the faults since the last start
        self.altered: set[tuple[Path, int | None]] = set()  # what we corrupted, with its inode
        self.startup = 3.0  # seconds from a start to the first progress
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
            shorter = f"shorter_{self.scenario.parallel}"
            args += ["--fork", self.setting.disk / shorter / f"model_{BEFORE_COOLDOWN:05d}"]
        if self.scenario.other:
            args += ["--data", folder / "other", "--total-batch-size", "512"]
        return script_command("train_gpt2.py", *args, processes=self.scenario.processes)

    def start(self) -> None:
        """Kills what is still running, and starts the command."""
        self.kill()
        self.starts, self.expected = self.starts + 1, {0}
        self.output = self.setting.folder / f"{self.out.name}_{self.starts}.txt"
        environment = os.environ | {"OMP_NUM_THREADS": "1", "BENCH_CHAOS_OUT": str(self.out)}
        environment["PYTHONPATH"] = str(self.setting.folder)  # has sitecustomize.py
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
        """Returns the names of the command's processes, by id, oldest first."""
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
        """Returns the exit code as a shell shows it; None while the command runs."""
        code = self.process.poll() if self.process else None
        return code if code is None or code >= 0 else 128 - code

    def progress(self) -> tuple[int, ...]:
        """Returns a value that changes whenever the log or the manifest does."""
        with contextlib.suppress(OSError):
            stat = (self.out / ("manifest.json" if self.scenario.tokenises else "log.txt")).stat()
            return stat.st_ino, stat.st_size, stat.st_mtime_ns
        return ()

    def partial_files(self) -> list[Path]:
        """Returns the temporary files of a checkpoint or a shard that is being written."""
        return list(self.out.glob(".*.npy.partial" if self.scenario.tokenises else ".model_*.partial"))

    def wait_for(self, condition: Callable[[], object], seconds: float = TIMEOUT_SECONDS) -> None:
        """Waits until the condition holds, the command has exited, or the time is up."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and self.exit_code() is None and not condition():
            time.sleep(0.002)

    def wait_for_progress(self, seconds: float = TIMEOUT_SECONDS) -> bool:
        before = self.progress()
        self.wait_for(lambda: self.progress() != before, seconds)
        return self.progress() != before

    def reach(self, moment: str, delay: float) -> bool:
        """Waits for a moment of the command, starting it if necessary; returns False if the command succeeds first.

        Only earlier faults may make it fail first.
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
        """Checks for tracebacks, and for incomplete files under a final name. The command may still be running."""
        output = self.output.read_text(errors="replace")
        # torchrun reports each failure with a traceback of its own, which contains none of our files
        if ("Traceback" if self.scenario.processes == 1 else f'File "{ROOT}') in output:
            raise Violation(f"a traceback, in {self.output}")
        for path, problem in (find_corrupt_shards if self.scenario.tokenises else find_corrupt_checkpoints)(self.out):
            if (path, inode_of(path)) not in self.altered:
                raise Violation(f"{path} is corrupt: {problem}")

    def finish(self) -> None:
        """Runs the command until it exits; fineweb.py twice, since it checks all shards only once they are finished."""
        for _ in range(2 if self.scenario.tokenises else 1):
            self.start()
            while self.settle(must_exit=False) == "it went on":
                pass
            self.check()
        self.altered.clear()
        self.check()


def find_corrupt_checkpoints(out: Path) -> list[tuple[Path, str]]:
    problems = [(path, find_corruption(path)) for path in list_checkpoints(out)]
    return [(path, problem) for path, problem in problems if problem and path.exists()]  # or it was removed


def find_corrupt_shards(out: Path) -> list[tuple[Path, str]]:
    """Returns the shards in the manifest that are missing or do not match it."""
    paths = [(out / shard["file"], shard["sha256"]) for shard in listed_shards(out)]
    return [(path, "not as listed") for path, sha256 in paths if not path.exists() or sha256_of(path) != sha256]


def listed_shards(out: Path) -> list[dict[str, str]]:
    manifest = out / "manifest.json"
    return json.loads(manifest.read_text())["shards"] if manifest.exists() else []


def inode_of(path: Path) -> int | None:
    return path.stat().st_ino if path.exists() else None


# -----------------------------------------------------------------------------
# Comparing the results


def different_files(a: Path, b: Path) -> list[str]:
    """Returns the names of files, except the lock, that differ or that only one of two folders has."""
    contents = [{path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()} for folder in (a, b)]
    return sorted({name for name, _ in contents[0].items() ^ contents[1].items()} - {LOCK})


def check_results(run: Run, reference: Path) -> None:
    """Checks that the results of a finished run match those of the run without faults."""
    found = (different_files if run.scenario.tokenises else differences)(run.out, reference)
    if not run.scenario.tokenises and not read_starts(run.out):
        found.append("starts.jsonl")
    if found:
        raise Violation(f"the results differ from {reference}: {', '.join(found[:9])}")


# -----------------------------------------------------------------------------
# The faults. Each function returns what the fault hit, once the fault is over.


@dataclass(frozen=True)
class Fault:
    kind: str
    moment: str  # "start", "step" or "save"
    delay: float  # 0 to 1: how far into the start or the save, or after how many steps
    choice: float  # 0 to 1: which process or which file, and how it is corrupted
    seconds: float  # duration of a fault that lasts


def draw_faults(number: int, seed: str) -> list[Fault]:
    """Returns `number` faults in random order: one of each kind, and SIGKILL for the rest."""
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
    """Sends the signal to the process that was started or, half of the time, to a random one of all."""
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
    """Kills the command, corrupts its newest shard, or checkpoint if there is an older one, and starts it again."""

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


# The function of each kind, and the exit codes that it may cause besides 0. Under torchrun, 1 is allowed, too.
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
    """Returns whether the command must exit after a fault that hit the process `target`."""
    if fault.kind == "closed console":
        return not scenario.tokenises and not scenario.restarts  # fineweb.py prints only now and then
    survives = target == "(it had just exited)" or (scenario.restarts > 0 and target.startswith("rank"))
    return fault.kind in ("SIGKILL", "SIGTERM") and not survives


def inject_and_check(run: Run, fault: Fault) -> str | None:
    """Injects a fault and checks what follows. Prints and returns the outcome; None if the command succeeded first."""
    if not run.reach(fault.moment, fault.delay):
        return None
    inject, codes = FAULTS[fault.kind]
    run.expected |= codes | ({1} if codes and run.scenario.processes > 1 else set())
    target = inject(run, fault)
    what = f"{fault.kind} {target}".rstrip() + f", during a {fault.moment}"
    print(f"{run.scenario.name}: {what}: ", end="", flush=True)
    outcome = run.settle(must_exit(run.scenario, fault, target))
    run.check()
    print(outcome, flush=True)
    return f"{what}: {outcome}"


# -----------------------------------------------------------------------------
# The benchmark


def isolate() -> None:
    """Restarts this program in a mount namespace of its own, without root's power to bypass permissions."""
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
        make_shards(Documents("reversed", reversed(topics.values())), folder / "other", tokenizer="bytes")
    (folder / "text").mkdir()
    for i in range(40):
        (folder / "text" / f"{i:02d}.txt").write_text(f"{i}\n" + "\n".join(topics.values()))
    try:
        return get_tokenizer("gpt2").name
    except UserError:
        print("no GPT-2 vocabulary without a network: fineweb.py uses the byte tokenizer")
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
    """Runs a scenario under these faults, and first without faults if there is no such run yet."""
    kind = "tokens" if scenario.tokenises else f"{scenario.parallel}_{scenario.processes}{'_other' * scenario.other}"
    reference, shorter = setting.disk / f"reference_{kind}", setting.disk / f"shorter_{scenario.parallel}"
    if scenario.forks and not shorter.exists():
        plain = replace(scenario, restarts=0, forks=False, other=False)
        Run(replace(setting, steps=SHORTER), plain, shorter).finish()
    if not reference.exists():  # a fork that differs only in its length equals a run of that length
        Run(setting, replace(scenario, restarts=0, forks=scenario.other), reference).finish()
        print(f"{scenario.name}, without faults", flush=True)
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
    print(f"{scenario.name}: same results as without faults", flush=True)
    shutil.rmtree(run.out)


def main() -> None:
    names = [scenario.name for scenario in SCENARIOS]
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    minutes_help = "start no more scenarios after N minutes; each runs at least once (default: 0)"
    parser.add_argument("--minutes", type=float, default=0, metavar="N", help=minutes_help)
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the faults (default: 0)")
    parser.add_argument("--scenarios", nargs="+", choices=names, default=names, help="(default: all)")
    parser.add_argument("--faults", type=int, default=15, metavar="N", help="faults per scenario (default: 15)")
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
