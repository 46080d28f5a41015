"""fineweb.py against the plain loop: tokens per second, start-up, peak memory, and the same bytes.

    python benchmarks/bench_fineweb.py                             # 200 MB of the text files of this Python
    python benchmarks/bench_fineweb.py --input 'texts/*.parquet'   # of other text

The plain loop is what scripts of this kind do: a pool of half as many workers as cores, to which documents travel one
to a message ("plain16": 16 to a message), `encode_ordinary` of tiktoken, a shard filled in memory, `np.save`. All variants read the same
.parquet file, each in a process of its own, in turn, and the rounds are repeated; the median is printed. Start-up
lasts from the start of the process until its first tokens arrive; the rate is that of all tokens after those.
"""

from __future__ import annotations

import argparse
import glob
import hashlib
import json
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
DOCUMENT = 4500  # characters, about as many as one of FineWeb-Edu has
ROWS = 1000  # of a row group, as FineWeb's files have them


def documents(patterns: list[str] | None) -> Iterator[str]:
    """Texts of the files given, or those that come with this Python and its packages, in pieces of DOCUMENT."""
    from fineweb import file_source

    if patterns:
        texts = (text for batch in file_source(patterns, "text").batches() for text in batch.texts())
    else:
        folders = dict.fromkeys((sysconfig.get_paths()["stdlib"], *sysconfig.get_paths().values()))
        kinds = (".txt", ".md", ".rst", ".py", ".pyi", ".h")
        names = {n for f in folders for n in glob.glob(f"{f}/**/*", recursive=True) if n.endswith(kinds)}
        paths = sorted(map(Path, names), key=lambda path: hashlib.sha1(str(path).encode()).digest())
        texts = (path.read_text(encoding="utf-8", errors="replace") for path in paths if path.is_file())
    for text in texts:
        yield from (text[at : at + DOCUMENT] for at in range(0, len(text), DOCUMENT))


def make_corpus(path: Path, megabytes: int, patterns: list[str] | None) -> tuple[int, int]:
    """Writes a .parquet file of that much text, or of all there is; returns the bytes and the documents."""
    import pyarrow
    import pyarrow.parquet

    chosen, size = [], 0
    for text in documents(patterns):
        if size >= megabytes * 10**6:
            break
        chosen.append(text)
        size += len(text.encode())
    pyarrow.parquet.write_table(pyarrow.table({"text": chosen}), path, row_group_size=ROWS)
    return size, len(chosen)


# -----------------------------------------------------------------------------
# The variants. Each appends to `first` the time of its first tokens, and their number.


def plain_tokens(text: str) -> np.ndarray:
    import tiktoken

    encoding = tiktoken.get_encoding("gpt2")
    return np.array([encoding.eot_token, *encoding.encode_ordinary(text)], dtype=np.uint16)


def plain(corpus: Path, out: Path, shard_size: int, per_message: int, first: list[float]) -> None:
    import pyarrow.parquet

    out.mkdir()
    batches = pyarrow.parquet.ParquetFile(corpus).iter_batches(columns=["text"])
    texts = (text for batch in batches for text in batch.column(0).to_pylist())
    buffer, filled, shard = np.empty(shard_size, dtype=np.uint16), 0, 0

    def save(tokens: np.ndarray) -> None:
        np.save(out / f"corpus_{'train' if shard else 'val'}_{shard:06d}.npy", tokens)

    with multiprocessing.Pool(max(1, os.cpu_count() // 2)) as pool:
        for tokens in pool.imap(plain_tokens, texts, chunksize=per_message):
            if not first:
                first.extend((time.time(), len(tokens)))
            while len(tokens) > shard_size - filled:
                part = shard_size - filled
                buffer[filled:] = tokens[:part]
                save(buffer)
                shard, filled, tokens = shard + 1, 0, tokens[part:]
            buffer[filled : filled + len(tokens)] = tokens
            filled += len(tokens)
        save(buffer[:filled])


def ours(corpus: Path, out: Path, shard_size: int, engine: str, first: list[float]) -> None:
    import fineweb

    encoded = fineweb.encoded

    def watched(*arguments):
        for batch, tokens in encoded(*arguments):
            if not first:
                first.extend((time.time(), len(tokens)))
            yield batch, tokens

    fineweb.encoded = watched
    flags = ["--input", corpus, "--output", out, "--shard-size", shard_size, "--engine", engine]
    fineweb.main([str(flag) for flag in flags])


def measured(variant: str, corpus: Path, out: Path, shard_size: int) -> dict[str, float]:
    """Runs a variant in a process of its own: its start-up in s, tokens per second, and peak memory in MB."""
    command = [sys.executable, __file__, "--variant", variant, str(corpus), str(out), str(shard_size)]
    begin = time.time()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    peak, over = [0], threading.Event()

    def watch() -> None:
        while not over.wait(0.1):
            peak[0] = max(peak[0], memory_of_tree(process.pid))

    watcher = threading.Thread(target=watch)
    watcher.start()
    output, errors = process.communicate()
    over.set()
    watcher.join()
    if process.returncode:
        raise SystemExit(f"{variant} failed:\n{errors.decode()}")
    first, tokens, end = json.loads(output.splitlines()[-1])
    total = sum(len(np.load(path, mmap_mode="r")) for path in out.glob("*.npy"))
    return {"start": first - begin, "rate": (total - tokens) / (end - first), "tokens": total, "peak": peak[0] / 1e6}


def memory_of_tree(root: int) -> int:
    """Private bytes of a process and all below it, on Linux; elsewhere 0."""
    parents, private = {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
            parents[int(folder.name)] = int(status["PPid"])
            private[int(folder.name)] = 1024 * int(status.get("RssAnon", "0").split()[0])
        except (OSError, ValueError, KeyError):
            continue  # it has ended
    family, grown = {root}, True
    while grown:
        grown = {child for child, parent in parents.items() if parent in family} - family
        family |= grown
    return sum(private.get(member, 0) for member in family)


def sums(folder: Path) -> list[str]:
    return [hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.glob("*.npy"))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--input", nargs="+", metavar="FILE", help="text files (default: those of this Python)")
    parser.add_argument("--megabytes", type=int, default=200, metavar="N", help="text to tokenise (default: 200)")
    parser.add_argument("--shard-size", type=int, default=5 * 10**6, metavar="N", help="tokens (default: 5 million)")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="each variant in turn (default: 3 times)")
    parser.add_argument("--skip-plain", action="store_true", help="measure fineweb.py alone")
    parser.add_argument("--variant", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.variant:
        name, corpus, out, shard_size = args.variant
        first: list[float] = []
        if name.startswith("plain"):
            plain(Path(corpus), Path(out), int(shard_size), int(name.removeprefix("plain") or 1), first)
        else:
            ours(Path(corpus), Path(out), int(shard_size), name, first)
        print(json.dumps([*first, time.time()]))
        return

    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder, "corpus.parquet")
        size, count = make_corpus(corpus, args.megabytes, args.input)
        print(f"{size / 1e6:.0f} MB of text in {count:,} documents, {os.cpu_count()} cores", flush=True)
        found: dict[str, list[dict]] = {
            v: [] for v in ("plain", "plain16", "tiktoken", "gigatoken")[2 * args.skip_plain :]
        }
        for round in range(args.rounds):
            bytes_of = {}
            for variant, results in found.items():
                out = Path(folder, f"{variant}{round}")
                results.append(measured(variant, corpus, out, args.shard_size))
                bytes_of[variant] = sums(out)
                shutil.rmtree(out)
            if any(other != bytes_of["tiktoken"] for other in bytes_of.values()):
                raise SystemExit("the shards differ")
        print("the shards are the same, byte by byte")
        median = {v: {k: statistics.median(r[k] for r in rs) for k in rs[0]} for v, rs in found.items()}
        for variant, m in median.items():
            ratios = [r["rate"] / p["rate"] for r, p in zip(found[variant], found.get("plain", []), strict=False)]
            ratio = f" | {statistics.median(ratios):5.2f}x" if ratios else ""
            print(
                f"{variant:9} | {m['rate'] / 1e6:6.2f}M tokens/s{ratio} | start-up {m['start']:.2f} s"
                f" | peak {m['peak']:,.0f} MB",
                flush=True,
            )


if __name__ == "__main__":
    main()
