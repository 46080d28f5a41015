"""log.txt: its lines, what is read from them, and what a resumed run keeps of them."""

from __future__ import annotations

import math
import os
import re

import pytest
from helpers import ROOT, TINY_FLAGS, copy_project, losses, run_in_copy
from shard_helpers import file_size_limit

from support.console.log import LogFile, read_log

COMPLETE = """\
0 val 10.8249
0 train 10.824905
0 lr 0.0009
0 norm 0.3
0 seconds 0.065
1 train 9.500000
1 lr 1.25e-05
1 norm 1234.5679
1 seconds 2
2 val 9.0000
2 hella 0.2500
2 train nan
2 lr 0
2 norm inf
2 seconds 0.5
"""


WRITTEN: list[tuple[int, dict[str, float]]] = [
    (0, {"val": 10.82491}),
    (0, {"train": 10.824905395507812, "lr": 9e-4, "norm": 0.1 + 0.2, "seconds": 0.0650000001}),
    (1, {"train": 9.5, "lr": 1.25e-5, "norm": 1234.56789, "seconds": 2.0}),
    (2, {"val": 9.0}),
    (2, {"hella": 0.25}),
    (2, {"train": math.nan, "lr": 0.0, "norm": math.inf, "seconds": 0.5}),
]


def write(log: LogFile, lines: list[tuple[int, dict[str, float]]]) -> None:
    for step, values in lines:
        log.write(step, values)


def test_a_log_has_a_line_for_each_value_and_is_read_by_name_and_step(tmp_path):
    path = tmp_path / "log.txt"
    write(LogFile(path), WRITTEN)
    assert path.read_text() == COMPLETE
    expected = {
        "val": {0: 10.8249, 2: 9.0}, "hella": {2: 0.25}, "train": {0: 10.824905, 1: 9.5},  # those that are finite
        "lr": {0: 9e-4, 1: 1.25e-5, 2: 0.0}, "norm": {0: 0.3, 1: 1234.5679}, "seconds": {0: 0.065, 1: 2.0, 2: 0.5},
    }  # fmt: skip
    assert read_log(path) == expected
    with open(path, "ab") as file:
        file.write(b"\nmine\n\0\0\0\n3 train\n3 train 1.0 \n-3 train 1.0\n3 train 0x1\n\xff\n3 train 1.5")  # cut off
    assert read_log(path) == expected
    assert read_log(tmp_path / "nothing")["val"] == {}


@pytest.mark.parametrize("first_step, written", [(1, 2), (2, 3)])
def test_a_resumed_log_is_that_of_a_run_without_interruption(tmp_path, first_step, written):
    """The step at which it is resumed is evaluated and trained again."""
    path = tmp_path / "log.txt"
    path.write_bytes(
        COMPLETE.encode() + b"7 train 1.000000\n\nmine\n\0\0\0\n\xff\n1"
    )  # the first digit of a 10, cut off
    write(LogFile(path, first_step), WRITTEN[written:])
    assert path.read_text() == COMPLETE
    fork = tmp_path / "fork.txt"
    write(LogFile(fork, 1, source=path), WRITTEN[2:])  # continues the log of another run
    assert fork.read_text() == COMPLETE
    LogFile(fork).close()  # a new run
    assert fork.read_text() == ""
    LogFile(None, 4).write(4, {"train": 1.0})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["fork.txt", "log.txt"]


def test_every_name_is_written_read_and_kept(tmp_path):
    path, values = tmp_path / "log.txt", {name: 12345.6789 for name in ("train", "lr", "weight_norm", "Layer 0/norm-2")}
    write(LogFile(path), [(0, values), (1, values)])
    written = path.read_bytes()
    assert written.startswith(
        b"0 train 12345.678900\n0 lr 12345.679\n0 weight_norm 12345.679\n0 Layer 0/norm-2 12345.679\n1 "
    )
    assert {name: {*by_step} for name, by_step in read_log(path).items()} == dict.fromkeys(values, {0, 1})
    LogFile(path, 2).close()  # resumed
    LogFile(tmp_path / "fork.txt", 2, source=path).close()
    assert path.read_bytes() == (tmp_path / "fork.txt").read_bytes() == written


USE = """
import sys, train_gpt2
from support.console.curves import CurvesFile

CurvesFile.draw = lambda self: None  # which takes longer than these runs
train_gpt2.main([*sys.argv[1:], "--out", "run"])
train_gpt2.main(["--fork", "run/model_00002", "--out", "fork", "--max-steps", "5"])
train_gpt2.main(["--resume", "--out", "fork"])
"""


@pytest.mark.slow
def test_a_value_is_added_as_the_page_says(byte_shards, tmp_path):
    """Both examples of docs/code.md, in a copy of the project."""
    page = (ROOT / "docs" / "code.md").read_text()
    scale = re.search(r"gradient scale, for example, is\s+`(.+?)`", page)[1]
    field, value, norm = re.search(
        r"add\s+the\s+field\s+`(.+?)`.+?`(embedding_norm=.+?)`.+?the\s+entry\s+`(.+?)`", page, re.S
    ).groups()
    tree = tmp_path / "tree"
    copy_project(tree)
    trainer = (tree / "train_gpt2.py").read_text()
    trainer = re.sub(r"(    time_used: Any.*\n)", rf"\1    {field}\n", trainer)
    trainer = re.sub(r"( own = StepValues\()", rf"\1{value}, ", trainer)
    trainer = re.sub(r"( logged = \{.*)\}", rf"\1, {scale}, {norm}}}", trainer)
    (tree / "train_gpt2.py").write_text(trainer)
    flags = [*TINY_FLAGS, "--data", byte_shards, "--max-steps", 4, "--checkpoint-every", 2]
    run_in_copy(USE, tree, *map(str, flags))
    for out, steps in (("run", 4), ("fork", 5)):
        assert losses(tree / out / "log.txt", "grad_scale") == [1.0] * steps  # in fp32
        norms = losses(tree / out / "log.txt", "embedding_norm")
        assert len(set(norms)) == steps and norms[0] == pytest.approx(0.02 * (257 * 32) ** 0.5, rel=0.02)  # at first
        assert len(losses(tree / out / "log.txt")) == steps


@pytest.mark.parametrize(
    "harm",
    [lambda p: p.unlink(), lambda p: p.with_name("x").write_text("0 train 9\n"), lambda p: p.write_text("0 train 9\n")],
)
def test_a_log_that_another_program_replaces_or_removes_is_written_again(tmp_path, capsys, harm):
    """An editor writes another file and renames it."""
    log = LogFile(tmp_path / "log.txt")
    write(log, WRITTEN[:2])
    harm(tmp_path / "log.txt")
    if (tmp_path / "x").exists():
        (tmp_path / "x").rename(tmp_path / "log.txt")
    write(log, WRITTEN[2:3])
    log.sync()
    write(log, WRITTEN[3:])
    log.close()
    assert (tmp_path / "log.txt").read_text() == COMPLETE
    assert capsys.readouterr().err.count("another program has changed, replaced or removed") == 1


def test_lines_wait_in_memory_while_the_disk_is_full(tmp_path, capsys):
    log = LogFile(tmp_path / "log.txt")
    with file_size_limit(50):
        write(log, WRITTEN[:4])
        with pytest.raises(OSError):
            log.sync()
    assert (tmp_path / "log.txt").read_text() == COMPLETE[:50]  # a part of a line, too
    write(log, WRITTEN[4:])
    log.close()
    assert (tmp_path / "log.txt").read_text() == COMPLETE
    assert capsys.readouterr().err.count("Its lines are kept in memory") == 1


def test_sync_waits_for_the_disk(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.fstat(fd).st_ino))
    log = LogFile(tmp_path / "log.txt")
    synced.clear()  # what was written at the start
    log.write(0, {"train": 1.0})
    assert synced == []  # no step waits
    log.sync()
    assert synced == [(tmp_path / "log.txt").stat().st_ino]
    log.close()
