"""fineweb.py against the plain loop: tokens per second, start-up time, peak memory, and the same bytes.

    python benchmarks/bench_fineweb.py                             # 200 MB of the text files of this Python
    python benchmarks/bench_fineweb.py --input 'texts/*.parquet'   # of other text

The plain loop is what scripts of this kind do: a pool with one worker per two cores, each of which receives one document
per message ("plain16": 16), tiktoken's `encode_ordinary`, a shard that is filled in memory, `np.save`. All variants read
the same .parquet file, one after the other, each in its own process. This is repeated, and the median is printed. Start-up
is the time from the start of the process to its first tokens; the rate counts all later tokens.
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
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from support.data.corpus import Batch
    from support.data.encode import EncodedBatch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
DOCUMENT_CHARS = 4500  # about the mean of FineWeb-Edu
ROW_GROUP_ROWS = 1000  # as in FineWeb's files


def documents(patterns: list[str] | None) -> Iterator[str]:
    """The texts of files (default: those that come with this Python and its packages) in pieces of DOCUMENT_CHARS."""
    from fineweb import file_source

    if patterns:
        texts = (text for batch in file_source(patterns, "text").batches() for text in batch.texts())
    else:
        folders = dict.fromkeys((sysconfig.get_paths()["stdlib"], *sysconfig.get_paths().values()))
        suffixes = (".txt", ".md", ".rst", ".py", ".pyi", ".h")
        names = {n for f in folders for n in glob.glob(f"{f}/**/*", recursive=True) if n.endswith(suffixes)}
        paths = sorted(map(Path, names), key=lambda path: hashlib.sha1(str(path).encode()).digest())
        texts = (path.read_text(encoding="utf-8", errors="replace") for path in paths if path.is_file())
    for text in texts:
        yield from (text[start : start + DOCUMENT_CHARS] for start in range(0, len(text), DOCUMENT_CHARS))


def make_corpus(path: Path, megabytes: int, patterns: list[str] | None) -> tuple[int, int]:
    """Writes a .parquet file of that much text, or less if there is less; returns its bytes and documents."""
    import pyarrow
    import pyarrow.parquet

    chosen, size = [], 0
    for text in documents(patterns):
        if size >= megabytes * 10**6:
            break
        chosen.append(text)
        size += len(text.encode())
    pyarrow.parquet.write_table(pyarrow.table({"text": chosen}), path, row_group_size=ROW_GROUP_ROWS)
    return size, len(chosen)


# -----------------------------------------------------------------------------
# The variants. Each sets `first` to the time of its first tokens and their number.


def plain_tokens(text: str) -> np.ndarray:
    import tiktoken

    encoding = tiktoken.get_encoding("gpt2")
    return np.array([encoding.eot_token, *encoding.encode_ordinary(text)], dtype=np.uint16)


def plain(corpus: Path, out: Path, shard_size: int, per_message: int, first: list[float]) -> None:
    """The plain loop, with `per_message` documents in a message to a worker."""
    import pyarrow.parquet

    out.mkdir()
    batches = pyarrow.parquet.ParquetFile(corpus).iter_batches(columns=["text"])
    texts = (text for batch in batches for text in batch.column(0).to_pylist())
    buffer, filled, shard = np.empty(shard_size, dtype=np.uint16), 0, 0

    def save(tokens: np.ndarray) -> None:
        np.save(out / f"corpus_{'train' if shard else 'val'}_{shard:06d}.npy", tokens)

    with multiprocessing.Pool(max(1, (os.cpu_count() or 1) // 2)) as pool:
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

    encode_batches = fineweb.encode_batches

    def record_first(batches: Iterable[Batch], tokenizer: str, engine: str, workers: int) -> Iterator[EncodedBatch]:
        for batch, tokens in encode_batches(batches, tokenizer, engine, workers):
            if not first:
                first.extend((time.time(), len(tokens)))
            yield batch, tokens

    fineweb.encode_batches = record_first
    flags = ["--input", corpus, "--output", out, "--shard-size", shard_size, "--engine", engine]
    fineweb.main([str(flag) for flag in flags])


def measure(variant: str, corpus: Path, out: Path, shard_size: int) -> dict[str, float]:
    """Runs a variant in its own process: start-up in seconds, tokens per second, tokens, and peak memory in MB."""
    command = [sys.executable, __file__, "--variant", variant, str(corpus), str(out), str(shard_size)]
    begin = time.time()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    peak, ended = [0], threading.Event()

    def sample_memory() -> None:
        while not ended.wait(0.1):
            peak[0] = max(peak[0], memory_of_tree(process.pid))

    sampler = threading.Thread(target=sample_memory)
    sampler.start()
    output, errors = process.communicate()
    ended.set()
    sampler.join()
    if process.returncode:
        raise SystemExit(f"{variant} failed:\n{errors.decode()}")
    first, tokens, end = json.loads(output.splitlines()[-1])
    total = sum(len(np.load(path, mmap_mode="r")) for path in out.glob("*.npy"))
    return {"start": first - begin, "rate": (total - tokens) / (end - first), "tokens": total, "peak": peak[0] / 1e6}


def memory_of_tree(root: int) -> int:
    """Private memory of a process and its descendants in bytes, on Linux; elsewhere 0."""
    parents, private = {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
            parents[int(folder.name)] = int(status["PPid"])
            private[int(folder.name)] = 1024 * int(status.get("RssAnon", "0").split()[0])
        except (OSError, ValueError, KeyError):
            continue  # the process has ended
    tree, children = {root}, {root}
    while children:
        children = {child for child, parent in parents.items() if parent in tree} - tree
        tree |= children
    return sum(private.get(member, 0) for member in tree)


def hashes(folder: Path) -> list[str]:
    return [hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.glob("*.npy"))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--input", nargs="+", metavar="FILE", help="text files (default: those of this Python)")
    parser.add_argument("--megabytes", type=int, default=200, metavar="N", help="text to encode (default: 200)")
    parser.add_argument(
        "--shard-size", type=int, default=5 * 10**6, metavar="N", help="tokens per shard (default: 5 million)"
    )
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="runs of each variant (default: 3)")
    parser.add_argument("--skip-plain", action="store_true", help="measure only fineweb.py")
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
        variants = ("plain", "plain16", "tiktoken", "gigatoken")[2 * args.skip_plain :]
        results: dict[str, list[dict[str, float]]] = {variant: [] for variant in variants}
        for round in range(args.rounds):
            hashes_of: dict[str, list[str]] = {}
            for variant in variants:
                out = Path(folder, f"{variant}{round}")
                results[variant].append(measure(variant, corpus, out, args.shard_size))
                hashes_of[variant] = hashes(out)
                shutil.rmtree(out)
            if any(other != hashes_of["tiktoken"] for other in hashes_of.values()):
                raise SystemExit("the shards differ")
        print("the shards are byte-identical")
        median = {v: {k: statistics.median(r[k] for r in rs) for k in rs[0]} for v, rs in results.items()}
        for variant, m in median.items():
            ratios = [r["rate"] / p["rate"] for r, p in zip(results[variant], results.get("plain", []), strict=False)]
            ratio = f" | {statistics.median(ratios):5.2f}x" if ratios else ""
            print(
                f"{variant:9} | {m['rate'] / 1e6:6.2f}M tokens/s{ratio} | start-up {m['start']:.2f} s"
                f" | peak {m['peak']:,.0f} MB",
                flush=True,
            )


if __name__ == "__main__":
    main()
