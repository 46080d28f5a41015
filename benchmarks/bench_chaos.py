"""Tokenises and trains under random faults, and compares the results with those of runs without faults. Linux only.

    python benchmarks/bench_chaos.py --minutes 10                    # all scenarios in turn, at least once each
    python benchmarks/bench_chaos.py --minutes 10 --seed 1           # other faults, at other moments
    python benchmarks/bench_chaos.py --scenarios train --faults 5    # one scenario, once

Each scenario is one command: fineweb.py with two workers, or train_gpt2.py with checkpoints, validation and
TensorBoard, in one process, in two under torchrun, or in two that torchrun restarts, with DDP or FSDP. Whenever it has
exited, it is started again. It suffers one fault after the other: SIGKILL, SIGTERM or SIGSTOP of one of its processes, a
full disk, a folder without permission, a corrupt file, a console that nobody reads, a clock that jumps, a slow disk.
After each one, within a minute and a half, all processes must have exited, with a documented exit code, or make progress
again; there must be no traceback, and nothing incomplete under a final name. At the end, the log, the weights and the
optimizer, or the shards and the manifest, must equal those of a run without faults, bit by bit, and TensorBoard's
curves those of the log.

The seed determines the faults; which step they hit depends on the machine. The first violation ends the benchmark, with
exit code 1, and its files are kept.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
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

from chaos_run import (
    SITECUSTOMIZE,
    SYNC_SECONDS,
    Run,
    Scenario,
    Setting,
    Violation,
    check_results,
    find_processes,
    inode_of,
)

from fineweb import make_shards
from support.checkpoints.directory import find_corruption, list_checkpoints
from support.cli import UserError
from support.data.corpus import Documents
from support.data.tokenizer import get_tokenizer

DISK_BYTES = 64 << 20
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
    kinds = rng.sample(KINDS, len(KINDS))[:number] + ["SIGKILL"] * (number - len(KINDS))
    moments = [("start", "step", "save")[i % 3] for i in range(number)]
    rng.shuffle(kinds)
    rng.shuffle(moments)
    return [
        Fault(kind, moment, rng.random(), rng.random(), rng.uniform(1, 3))
        for kind, moment in zip(kinds, moments, strict=True)
    ]


SCENARIOS = (
    Scenario("tokenise", "fineweb.py, 2 workers"),
    Scenario("train", "1 process"),
    Scenario("torchrun", "torchrun, 2 processes", 2),
    Scenario("restarts", "torchrun --max-restarts", 2, 3),
    Scenario("fsdp", "the same with --parallel fsdp", 2, 3, "fsdp"),
)


# -----------------------------------------------------------------------------
# The faults: each returns when it is over, and says what it hit


def send_signal(run: Run, fault: Fault) -> str:
    """Half of the signals are for the process that was started, the others for one of its children."""
    processes = list(find_processes(run.mark).items())
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
            shards = json.loads((run.out / "manifest.json").read_text())["shards"] if run.progress() else []
            return [*run.partial_files(), *(run.out / shard["file"] for shard in shards[-1:])]
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
    run.altered[owner] = inode_of(owner)
    run.start()
    return f"{owner.name}{'' if owner == file else '/' + file.name} {way}"


def close_console(run: Run, fault: Fault) -> str:
    assert run.reader is not None
    run.reader.kill()
    run.reader.wait()
    return ""


def move_clock(run: Run, fault: Fault) -> str:
    hours = (1 + 8 * fault.choice) * (-1 if fault.choice < 0.5 else 1)
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


def must_exit(scenario: Scenario, fault: Fault, target: str) -> bool:
    """Whether the command must exit after a fault, which hit the process `target`."""
    if fault.kind == "closed console":
        return not scenario.tokenises and not scenario.restarts  # fineweb.py prints only now and then
    survives = target in ("worker", "(it had just exited)") or (scenario.restarts > 0 and target.startswith("rank"))
    return fault.kind in ("SIGKILL", "SIGTERM") and not survives


def inject_and_check(run: Run, fault: Fault) -> str | None:
    """One fault and the checks after it. Returns what happened; None if the command succeeded before.

    Raises:
        Violation: a check failed.
    """
    if not run.reach(fault.moment, fault.delay):
        return None
    run.expected |= EXIT_CODES.get(fault.kind, set())
    if run.scenario.processes > 1 and fault.kind in EXIT_CODES:
        run.expected |= {1}
    target = INJECT.get(fault.kind, send_signal)(run, fault)
    what = f"{fault.kind} {target}".rstrip() + f", in a {fault.moment}"
    try:
        outcome = run.settle(must_exit(run.scenario, fault, target))
        run.check()
    except Violation as violation:
        raise Violation(f"{what}: {violation}") from None
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


def make_inputs(folder: Path, scenarios: Sequence[Scenario]) -> str:
    """Makes the text and the shards that the scenarios read; returns the tokenizer for the text."""
    if any(not scenario.tokenises for scenario in scenarios):
        with contextlib.redirect_stdout(None):
            make_shards(Documents("topics", topics.values), folder / "data", tokenizer="bytes")
    if any(scenario.tokenises for scenario in scenarios):
        (folder / "text").mkdir()
        for i in range(40):
            (folder / "text" / f"{i:02d}.txt").write_text(f"{i}\n" + "\n".join(topics.values()))
        try:
            get_tokenizer("gpt2")
        except UserError:
            print("no GPT-2 vocabulary without a network: fineweb.py makes bytes, without workers")
            return "bytes"
    return "gpt2"


def prepare_disk(disk: Path) -> list[str]:
    """Mounts a small disk. Returns the kinds of faults that are not possible here."""
    skipped = []
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True).returncode:
        skipped.append("full disk")
    probe = disk / "probe"
    probe.mkdir(0o500)
    if os.access(probe, os.W_OK):
        skipped.append("no permission")
    probe.rmdir()
    for kind in skipped:
        print(f"skipped: {kind}, which this machine does not permit")
    return skipped


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
    kind = "tokens" if scenario.tokenises else f"{scenario.parallel}_{scenario.processes}"
    reference = setting.disk / f"reference_{kind}"
    if not reference.exists():
        setting.inject()
        plain = replace(scenario, restarts=0)
        Run(setting, plain, reference).finish()
        report.line(f"{scenario.name}: {scenario.title}, without faults")
    run = Run(setting, scenario, setting.disk / f"{scenario.name}_{number}")
    setting.inject(sync=SYNC_SECONDS)
    try:
        for fault in faults:
            happened = inject_and_check(run, fault)
            if happened is None:  # the command was faster than the faults
                break
            report.line(f"{scenario.name}: {happened}")
            report.faults[fault.kind, scenario.name] += 1
            report.events["half written"] += run.exit_code() is not None and bool(run.partial_files())
            report.events["restarts"] += scenario.restarts > 0 and "rank" in happened and happened.endswith("went on")
        run.finish()
        check_results(run, reference)
    except Violation as violation:
        raise Violation(f"{scenario.name}: {violation}") from None
    finally:
        run.kill()
    report.events["starts"] += run.starts
    report.line(f"{scenario.name}: the same as without faults")
    shutil.rmtree(run.out)


def parse_arguments() -> argparse.Namespace:
    names = [scenario.name for scenario in SCENARIOS]
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    minutes_help = "start no scenario later, after the first of each (default: 0)"
    parser.add_argument("--minutes", type=float, default=0, metavar="N", help=minutes_help)
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the faults (default: 0)")
    parser.add_argument("--scenarios", nargs="+", choices=names, default=names, help="default: all")
    parser.add_argument("--faults", type=int, default=15, metavar="N", help="in each scenario (default: 15)")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    isolate()
    logging.getLogger("tensorboard").setLevel(logging.ERROR)  # it reports each resumed run
    report, folder = Report(), Path(tempfile.mkdtemp(prefix="bench_chaos_"))
    scenarios = [scenario for scenario in SCENARIOS if scenario.name in args.scenarios]
    (folder / "sitecustomize.py").write_text(SITECUSTOMIZE)
    skipped, tokenizer = prepare_disk(folder / "disk"), make_inputs(folder, scenarios)
    setting = Setting(folder, folder / "disk", tokenizer, steps=50 + 20 * args.faults)
    try:
        for number, scenario in ((n, each) for n in count() for each in scenarios):
            if number and time.monotonic() - report.began > 60 * args.minutes:
                break
            faults = draw_faults(args.faults, f"{args.seed} {number} {scenario.name}")
            run_scenario(setting, scenario, [f for f in faults if f.kind not in skipped], number, report)
    except Violation as violation:
        shutil.copytree(setting.disk, folder / "kept")  # the disk is gone when this process ends
        sys.exit(f"\nviolation: {violation}\nEverything is in {folder}; what was in disk/ is now in kept/.")
    print(f"\n{report.table(scenarios)}\n")
    print(
        f"{report.events['half written']} left half a checkpoint or shard; {report.events['starts']} starts, and "
        f"{report.events['restarts']} restarts by torchrun; 0 lost, 0 hangs; {time.monotonic() - report.began:.0f} s"
    )
    subprocess.run(["umount", str(setting.disk)], capture_output=True)
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
