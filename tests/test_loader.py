"""DataLoaderLite: shards of consecutive integers, so that the expected batch is arithmetic."""

import numpy as np
import pytest
import torch

from support import shards
from support.cli import UserError
from train_gpt2 import DataLoaderLite

T = 4


def make(folder, lengths, split="train"):
    """Shards whose tokens count on from one to the next: token i of the corpus is i."""
    start = 0
    for index, n in enumerate(lengths):
        shards.write_shard(folder / shards.name("count", split, index), np.arange(start, start + n, dtype=np.uint16))
        start += n
    return shards.open_shards(folder, split)


def loader(files, B=2, **options):
    return DataLoaderLite(files, B, T, vocab_size=60000, **options)


# Shards of 13, 3 and 10 tokens hold 3, 0 and 2 rows of T+1 = 5 tokens; the corpus counts on, so rows start at:
LENGTHS = (13, 3, 10)
STARTS = [0, 4, 8, 16, 20]


def starts(batches):
    return [int(row[0]) for x, _ in batches for row in x]


def test_rows_of_an_epoch_by_hand(tmp_path):
    data = loader(make(tmp_path, LENGTHS), B=5)
    x, y = data.next_batch()
    assert data.rows_per_epoch == 5
    assert x.tolist() == [[s, s + 1, s + 2, s + 3] for s in STARTS]
    assert torch.equal(y, x + 1)
    assert starts([data.next_batch()]) == STARTS  # the next epoch
    assert x.dtype == torch.int64


@pytest.mark.parametrize("world, B", [(1, 1), (1, 8), (2, 2), (4, 1), (8, 1), (2, 4)])
def test_a_step_has_the_same_rows_for_any_ranks_and_micro_batch(tmp_path, world, B):
    files, R = make(tmp_path, LENGTHS), 8
    ranks = [loader(files, B, rank=r, world=world, grad_accum=R // (B * world)) for r in range(world)]
    for step in range(4):
        # micro-step by micro-step, rank by rank, is the order of the rows
        dealt = [rank.next_batch() for _ in range(R // (B * world)) for rank in ranks]
        assert starts(dealt) == [STARTS[n % 5] for n in range(step * R, (step + 1) * R)]


def test_a_step_is_found_again_by_its_number(tmp_path):
    files = make(tmp_path, (1000,))
    for shuffle in (False, True):
        straight = loader(files, grad_accum=3, shuffle=shuffle)
        batches = [straight.next_batch() for _ in range(3 * 200)]  # 1,200 rows: nearly five epochs
        for step in (199, 0, 41, 83):
            straight.reset(step)
            for i in range(3):
                assert torch.equal(straight.next_batch()[0], batches[step * 3 + i][0])


def test_shuffling_permutes_each_epoch_anew_and_alike_on_all_ranks(tmp_path):
    files = make(tmp_path, (401, 201, 2, 301))  # 100, 50, 0 and 75 rows
    in_order = starts([loader(files, B=225).next_batch()])
    ranks = [loader(files, B=1, rank=r, world=3, shuffle=True, seed=7) for r in range(3)]
    epochs = [starts([rank.next_batch() for _ in range(75) for rank in ranks]) for _ in range(3)]
    for epoch in epochs:
        assert sorted(epoch) == in_order and epoch != in_order
    assert epochs[0] != epochs[1] != epochs[2]
    within = [[start for start in epoch if start < 400] for epoch in epochs]  # the first shard's rows
    assert within[0] != within[1] != within[2]
    assert starts([loader(files, B=225, shuffle=True, seed=8).next_batch()]) != epochs[0]
    # rows of a shard stay together, so that one shard is in memory at a time
    shard_of = np.searchsorted([401, 602, 604], epochs[0], side="right")
    assert sorted(np.unique(shard_of).tolist()) == [0, 1, 3] and np.count_nonzero(np.diff(shard_of)) == 2


def test_an_id_beyond_the_vocabulary_is_named_with_its_place(tmp_path):
    tokens = np.zeros(100, dtype=np.uint16)
    tokens[50] = 257
    shards.write_shard(tmp_path / "x_train_000001.npy", tokens)
    data = DataLoaderLite(shards.open_shards(tmp_path, "train"), 4, T, vocab_size=257)
    for _ in range(3):  # rows 0 to 11 end at token 48
        data.next_batch()
    with pytest.raises(UserError, match=r"x_train_000001\.npy has the id 257 at offset 50.*vocabulary of 257"):
        data.next_batch()


def test_which_files_are_shards_of_a_split(tmp_path):
    for name in (
        "a_train_000002.npy",
        "a_val_000000.npy",
        "train_b_val_000001.npy",
        "a_train_000001.npy",
        "train.npy",
        "a_train_1.npy",
    ):
        (tmp_path / name).touch()
    assert [p.name for p in shards.paths(tmp_path, "train")] == ["a_train_000001.npy", "a_train_000002.npy"]
    assert [p.name for p in shards.paths(tmp_path, "val")] == ["a_val_000000.npy", "train_b_val_000001.npy"]


def broken(path, kind):
    good = np.arange(100, dtype=np.uint16)
    if kind == "cut short":
        np.save(path, good)
        path.write_bytes(path.read_bytes()[:-20])
    elif kind == "text":
        path.write_text("hello")
    elif kind == "empty":
        path.touch()
    elif kind == "several arrays":
        with open(path, "wb") as file:
            np.savez(file, a=good, b=good)
    elif kind == "a header of another kind":
        np.save(path, good)
        path.write_bytes(path.read_bytes().replace(b"(100,)", b"(((((("))
    elif kind == "no tokens":
        np.save(path, good[:0])
    elif kind == "pickle":
        np.save(path, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    else:
        np.save(path, {"int64": good.astype(np.int64), "2-dimensional": good.reshape(10, 10)}[kind])


@pytest.mark.parametrize(
    "kind",
    [
        "cut short",
        "text",
        "empty",
        "pickle",
        "int64",
        "2-dimensional",
        "several arrays",
        "a header of another kind",
        "no tokens",
    ],
)
def test_a_broken_shard_is_named_among_good_ones(tmp_path, kind):
    make(tmp_path, (100, 100))
    broken(tmp_path / "count_train_000002.npy", kind)
    with pytest.raises(UserError) as error:
        shards.open_shards(tmp_path, "train")
    [problem] = error.value.problems
    assert "count_train_000002.npy" in problem and problem.endswith(".")


@pytest.mark.parametrize(
    "change",
    [
        {"tokenizer": ["bytes"]},
        {"tokenizer": "gpt5"},
        {"vocab_size": 5},
        {"shards": None},
        {"shards": [{"file": "../x_train_000001.npy", "split": "train", "tokens": 9}]},
        {"shards": [{"file": "x_train_000001.npy", "split": "train", "tokens": "9"}]},
        {"shards": [{"file": "x_train_000001.npy", "tokens": 9}]},
        {"shards": [{"file": None, "split": "train", "tokens": 9}]},
        {"complete": "no"},
    ],
)
def test_a_broken_manifest_is_named(tmp_path, change):
    make(tmp_path, (100,))
    shard = {"file": "count_train_000000.npy", "split": "train", "tokens": 100}
    good = {"tokenizer": "bytes", "vocab_size": 257, "complete": True, "shards": [shard]}
    shards.write_manifest(tmp_path, good)
    assert len(shards.open_shards(tmp_path, "train")) == 1
    shards.write_manifest(tmp_path, good | change)
    with pytest.raises(UserError, match="manifest|not complete"):
        shards.open_shards(tmp_path, "train")


def test_missing_shards_name_both_ways_on(tmp_path):
    with pytest.raises(UserError, match=r'no train shards in .*"python fineweb\.py".*"--demo"'):
        shards.open_shards(tmp_path / "nowhere", "train")
