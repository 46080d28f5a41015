"""DataLoaderLite: shards of consecutive integers, so that the expected batch is arithmetic."""

import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
import training  # noqa: F401  one thread
from helpers import ROOT
from shard_helpers import write_shard

from support.cli import UserError
from support.data import shards
from support.runtime.distributed import Distributed
from train_gpt2 import DataLoaderLite

T = 4


def consecutive_shards(folder, lengths, split="train"):
    """Shards whose tokens continue from one to the next: token i of the corpus is i."""
    start = 0
    for index, n in enumerate(lengths):
        path = folder / shards.shard_name("count", split, index)
        write_shard(path, np.arange(start, start + n, dtype=np.uint16))
        start += n
    return shards.open_shards(folder, split)


def loader(files, B=2, **options):
    return DataLoaderLite(files, B, T, vocab_size=60000, **options)


# Shards of 13, 3 and 10 tokens hold 3, 0 and 2 rows of T+1 = 5 tokens; so rows start at:
LENGTHS = (13, 3, 10)
STARTS = [0, 4, 8, 16, 20]


def starts(batches):
    return [int(row[0]) for x, _ in batches for row in x]


def test_rows_of_an_epoch_by_hand(tmp_path):
    data = loader(consecutive_shards(tmp_path, LENGTHS), B=5)
    x, y = data.next_batch()
    assert data.rows_per_epoch == 5
    assert x.tolist() == [[s, s + 1, s + 2, s + 3] for s in STARTS]
    assert torch.equal(y, x + 1)
    assert starts([data.next_batch()]) == STARTS  # the next epoch
    assert x.dtype == torch.int64


@pytest.mark.parametrize("world_size, B", [(1, 1), (1, 8), (2, 2), (4, 1), (8, 1), (2, 4)])
def test_a_step_has_the_same_rows_for_any_ranks_and_micro_batch(tmp_path, world_size, B):
    files, R = consecutive_shards(tmp_path, LENGTHS), 8
    ranks = [
        loader(files, B, dist=Distributed(r, 0, world_size), grad_accum=R // (B * world_size))
        for r in range(world_size)
    ]
    for step in range(4):
        # micro-step by micro-step, rank by rank, is the order of the rows
        dealt = [rank.next_batch() for _ in range(R // (B * world_size)) for rank in ranks]
        assert starts(dealt) == [STARTS[n % 5] for n in range(step * R, (step + 1) * R)]


def test_seek_finds_the_data_of_a_step(tmp_path):
    files = consecutive_shards(tmp_path, (1000,))
    for shuffle in (False, True):
        straight = loader(files, grad_accum=3, shuffle=shuffle)
        batches = [straight.next_batch() for _ in range(3 * 200)]  # 1,200 rows: nearly five epochs
        for step in (199, 0, 41, 83):
            straight.seek(step * 6)  # of three micro-batches of two rows
            for i in range(3):
                assert torch.equal(straight.next_batch()[0], batches[step * 3 + i][0])


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_shuffled_rows_are_all_rows_cut_at_a_place_of_each_epoch(tmp_path, world_size):
    files = consecutive_shards(tmp_path, (401, 201, 2, 301, 9))  # 99, 49, 0, 74 and 1 rows, one fewer than in order
    ends = [401, 602, 604, 905, 914]
    reference = loader(files, B=223, shuffle=True, seed=7)
    ranks = [loader(files, B=1, dist=Distributed(r, 0, world_size), shuffle=True, seed=7) for r in range(world_size)]
    rows = [start for _ in range(3 * 223 // world_size) for start in starts([rank.next_batch() for rank in ranks])]
    epochs = [rows[:223], rows[223:446], rows[446:]]
    offsets, orders = [], set()
    for epoch in epochs:
        assert epoch == starts([reference.next_batch()])[: len(epoch)]
    for epoch in epochs[:2]:
        shard_of = np.searchsorted(ends, epoch, side="right")
        order = list(dict.fromkeys(shard_of.tolist()))  # a shard at a time, so that one is in memory
        assert sorted(order) == [0, 1, 3, 4] and np.count_nonzero(np.diff(shard_of)) == 3
        orders.add(tuple(order))
        for shard, first, n in ((0, 0, 99), (1, 401, 49), (3, 604, 74), (4, 905, 1)):
            found = [start - first for start, s in zip(epoch, shard_of, strict=True) if s == shard]
            offset = min(found)
            assert sorted(found) == list(range(offset, offset + n * T, T)) and 0 <= offset < T
            assert n == 1 or found != sorted(found)
            offsets.append(offset)
    assert offsets[:4] != offsets[4:] and len(orders) == 2
    assert starts([loader(files, B=223, shuffle=True, seed=8).next_batch()]) != epochs[0]


def test_shuffled_rows_start_anywhere(tmp_path):
    """Every offset is as likely; the last token of a shard is read with the last of them."""
    data = loader(consecutive_shards(tmp_path, (13,)), B=2, shuffle=True)  # two of three rows
    epochs = [starts([data.next_batch()]) for _ in range(400)]
    offsets = Counter(min(epoch) for epoch in epochs)
    assert sorted(offsets) == [0, 1, 2, 3] and max(offsets.values()) < 150  # 100 each, within five deviations


def test_an_id_beyond_the_vocabulary_is_named_with_its_shard_and_offset(tmp_path):
    tokens = np.zeros(100, dtype=np.uint16)
    tokens[50] = 257
    write_shard(tmp_path / "x_train_000001.npy", tokens)
    data = DataLoaderLite(shards.open_shards(tmp_path, "train"), 4, T, vocab_size=257)
    for _ in range(3):  # rows 0 to 11 end at token 48
        data.next_batch()
    with pytest.raises(UserError, match=r"x_train_000001\.npy has the id 257 at offset 50.*vocabulary of 257"):
        data.next_batch()


def test_prefetched_batches_are_the_next_ones(byte_shards, monkeypatch):
    """No row is read twice, and what was prefetched is dropped by a seek."""
    opened, read = shards.open_shards(byte_shards, "train"), Counter()
    loader = DataLoaderLite(opened, 4, 16, vocab_size=257, grad_accum=3)
    row = loader._row
    monkeypatch.setattr(loader, "_row", lambda n: read.update([n]) or row(n))
    plain = DataLoaderLite(opened, 4, 16, vocab_size=257, grad_accum=3)
    for _ in range(4):
        for _ in range(3):
            assert torch.equal(loader.next_batch()[0], plain.next_batch()[0])
        loader.prefetch(3)
    assert read == Counter(range(4 * 12 + 12))
    loader.seek(84)
    plain.seek(84)
    assert torch.equal(loader.next_batch()[1], plain.next_batch()[1])


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_private_memory_does_not_grow_with_the_data(tmp_path):
    """Fifty shards of 100 million tokens: 10 GB of zeros, of which the disk holds the headers."""
    header = np.lib.format.header_data_from_array_1_0(np.zeros(0, np.uint16)) | {"shape": (100_000_000,)}
    for i in range(51):
        with open(tmp_path / f"zeros_{'train' if i else 'val'}_{i:06d}.npy", "wb") as file:
            np.lib.format.write_array_header_1_0(file, header)
            file.truncate(file.tell() + 200_000_000)
    script = """
import sys
from support.data import shards
from train_gpt2 import DataLoaderLite
def private_mb(): return int(next(l for l in open("/proc/self/status") if l.startswith("RssAnon")).split()[1]) / 1024
opened = shards.open_shards(sys.argv[1], "train")
loaders = [DataLoaderLite(opened[:n], 4, 1024, vocab_size=257, shuffle=True) for n in (1, 50)]
loaders[0].next_batch()
before = private_mb()
rows = loaders[1].rows_per_epoch
for first in range(0, rows, rows // 60):
    loaders[1].batch(range(first, first + 4))
print(private_mb() - before, rows)
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    grown, rows = map(float, done.stdout.split())
    assert rows == 50 * (99_999_999 // 1024 - 1)
    assert grown < 16  # MB, of 10,000
