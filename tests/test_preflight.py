"""What several ranks compare before they are connected."""

from __future__ import annotations

import re

import pytest
import torch
from helpers import in_threads
from torch.distributed import HashStore
from training import config_of

from support.runtime import devices, preflight
from support.runtime.distributed import Distributed
from support.runtime.machine import Machine

DATA = {"train": [["a.npy", 100, "1234"]], "val": [], "base": None, "source": None}
SAME = (config_of(), DATA, 0)


def compare(*ranks):
    """The problems of three ranks, each given by its configuration, data and step; None where there is none."""
    store = HashStore()

    def check(rank):
        config, *others = ranks[rank]
        dist = Distributed(rank, 0, 3, torch.device("cpu"), store)
        preflight.check_ranks_agree(dist, config, Machine.find(config, dist.device, 1), *others)

    return [error and error.problems for error in in_threads(range(3), check).values()]


def test_ranks_that_agree_go_on():
    elsewhere = config_of("--data", "/other/disk", "--out", "/other/log")  # each node may have its own paths
    assert compare(SAME, (elsewhere, DATA, 0), SAME) == [None, None, None]


@pytest.mark.parametrize(
    "other, expected",
    [
        ((config_of("--beta2", 0.5), DATA, 0), r"--beta2: 0\.5 on \S+ \(rank 2\), 0\.95 on \S+ \(rank 0\)"),
        ((config_of(), DATA, 7), r"the checkpoint: step 7 on \S+ \(rank 2\), none on \S+ \(rank 0\)"),
        ((config_of(), DATA | {"train": [["a.npy", 100, "1235"]]}, 0), "the shards: "),
        ((config_of(), DATA | {"val": [["a.npy", 100, "1234"]]}, 0), "the shards: "),
    ],
)
def test_a_difference_is_an_error_on_all_ranks(other, expected):
    first, *others = compare(SAME, SAME, other)
    assert others == [first, first] and len(first) == 1
    assert re.match("the nodes differ in " + expected, first[0])


def test_versions_and_gpus_are_compared(monkeypatch):
    def different_on_one_rank():
        values = iter(["same", "same", "other"])
        return lambda *_: next(values)

    monkeypatch.setattr(preflight.platform, "python_version_tuple", different_on_one_rank())
    monkeypatch.setattr(preflight, "torch", type("Torch", (), {"__version__": property(different_on_one_rank())})())
    monkeypatch.setattr(devices, "describe", different_on_one_rank())
    for problems in compare(SAME, SAME, SAME):
        assert [re.split(" in |: ", problem)[1] for problem in problems] == ["the device", "the versions"]
        assert re.search(r": Python (o\.t|s\.a), torch (other|same) on", problems[1])


def test_one_line_for_each_difference():
    two = (config_of("--seed", 1, "--beta2", 0.5), DATA, 0)
    for problems in compare(SAME, two, (config_of("--seed", 1), DATA, 0)):
        assert [problem.split()[4] for problem in problems] == ["--beta2:", "--seed:"]
