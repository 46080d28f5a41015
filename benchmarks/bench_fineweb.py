"""Measures time, memory and disk space of fineweb.py and of a plain loop, in turn, in separate processes, on one text.

    python benchmarks/bench_fineweb.py                                  # 100 MB, the demo's text repeated
    python benchmarks/bench_fineweb.py --input crawl/*.parquet --shard-size 1e7
    python benchmarks/bench_fineweb.py --baseline ../earlier            # a different checkout instead of the plain loop

The plain loop calls tiktoken's `encode_ordinary` on one document at a time, adds an end-of-text token before each, and
writes shards with `np.save`. The shards of both must be identical. Memory is the private memory of all processes, and
disk space is the size of all files in the folder: the peaks of 50 samples per second. Linux only.
"""

from __future__ import annotations

import argparse

import harness  # isort: skip
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from fineweb import parse_count
from support.cli import UserError, run_cli
from support.data.demo_text import python_documentation
from support.data.text_files import TextFiles, find_input

PLAIN_LOOP = "--plain-loop"  # makes this script run the plain loop


def plain_loop(shard_size: int, output: Path, paths: list[str]) -> None:
    """Writes the shards of some files, with shard 0 for validation."""
    import tiktoken

    encoding = tiktoken.get_encoding("gpt2")
    corpus = TextFiles(find_input(paths))
    buffer, filled, index = np.empty(shard_size, np.uint16), 0, 0

    def save() -> None:
        np.save(output / f"{corpus.prefix}_{'train' if index else 'val'}_{index:06d}.npy", buffer[:filled])

    output.mkdir()
    pieces = (piece for part in corpus.parts() for piece in corpus.read(part))
    for text, starts_document in pieces:
        tokens = [encoding.eot_token] * starts_document + encoding.encode_ordinary(text)
        while tokens:
            if filled == shard_size:
                save()
                filled, index = 0, index + 1
            count = min(len(tokens), shard_size - filled)
            buffer[filled : filled + count] = tokens[:count]
            filled, tokens = filled + count, tokens[count:]
    save()


def private_bytes(mark: str) -> int:
    total = 0
    for pid in harness.find_processes(mark):
        try:
            rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
        except OSError:
            continue
        lines = [line.split() for line in rollup.splitlines() if line.startswith("Private_")]
        total += sum(1024 * int(words[1]) for words in lines)
    return total


def disk_bytes(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except OSError:  # it was removed
            continue
    return total


def run(command: list[str], output: Path) -> tuple[float, int, int]:
    """Runs a command; returns the seconds that it took, and its peak memory and disk space in bytes."""
    mark = f"BENCH_FINEWEB={output}"
    started, memory, disk = time.perf_counter(), 0, 0
    process = subprocess.Popen(command, env=os.environ | dict([mark.split("=", 1)]), stdout=subprocess.DEVNULL)
    while process.poll() is None:
        memory, disk = max(memory, private_bytes(mark)), max(disk, disk_bytes(output))
        time.sleep(0.02)
    seconds = time.perf_counter() - started
    if process.returncode:
        sys.exit(f"{' '.join(command)} failed, see above")
    return seconds, memory, disk


def checksums(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.glob("*.npy")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--input", nargs="+", metavar="FILE", help="files as for fineweb.py (default: the demo's text, repeated)"
    )
    parser.add_argument("--shard-size", type=parse_count, default=10**7, help="tokens per shard (default: 1e7)")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each (default: 3)")
    parser.add_argument(
        "--baseline", metavar="DIR", help="checkout whose fineweb.py is the baseline (default: the plain loop)"
    )
    parser.add_argument("--flags", default="", help="more flags for fineweb.py, in quotes")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if not args.input:
            documents = python_documentation()
            copies = -(-(10**8) // sum(len(text.encode()) for text in documents))
            with open(folder / "text.jsonl", "w") as file:
                file.writelines(json.dumps({"text": text}) + "\n" for text in documents * copies)
        inputs = [str(Path(path).absolute()) for path in args.input or [folder / "text.jsonl"]]
        flags = ["--input", *inputs, "--shard-size", str(args.shard_size), *args.flags.split()]
        commands = {"fineweb.py": [sys.executable, str(harness.ROOT / "fineweb.py"), *flags, "--output"]}
        if args.baseline:
            commands["baseline"] = [sys.executable, str(Path(args.baseline) / "fineweb.py"), *flags, "--output"]
        else:
            commands["plain loop"] = [sys.executable, __file__, PLAIN_LOOP, str(args.shard_size), *inputs, "--output"]
        measured: dict[str, list[tuple[float, int, int]]] = {who: [] for who in commands}
        for number in range(args.rounds):
            found = []
            for who, command in commands.items():
                output = folder / f"{who.replace(' ', '_')}_{number}"
                measured[who].append(run([*command, str(output)], output))
                found.append(checksums(output))
                size = disk_bytes(output)
                subprocess.run(["rm", "-r", output], check=True)
            if not found[0] or found[0] != found[1]:
                raise UserError("the shards differ. Use a --shard-size that gives several shards.")
        print(f"| {size / 1e6:.0f} MB of shards | seconds | peak memory | peak disk use / shards |\n|---|---|---|---|")
        for who, rows in measured.items():
            seconds = ", ".join(f"{row[0]:.2f}" for row in rows)
            print(
                f"| {who} | {seconds} | {max(row[1] for row in rows) / 1e6:.0f} MB | {max(row[2] for row in rows) / size:.2f} |"
            )
        ours, other = ([row[0] for row in rows] for rows in measured.values())
        ratios = [b / a for a, b in zip(ours, other, strict=True)]
        print(
            f"ratio of the times in each round: {', '.join(f'{r:.1f}' for r in ratios)}; median {statistics.median(ratios):.1f}"
        )


if __name__ == "__main__":
    if sys.argv[1:2] == [PLAIN_LOOP]:
        plain_loop(int(sys.argv[2]), Path(sys.argv[-1]), sys.argv[3:-2])
    else:
        run_cli(main)
