"""What several ranks compare before they train."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
from training import ONE_PROCESS, config_of

from support.cli import UserError
from support.config import TRAIN_FLAGS
from support.runtime import devices, preflight
from support.runtime.machine import Machine

DATA = {"train": [["a.npy", 100, "1234"]], "val": [], "base": None, "source": None}
SAME = (config_of(), DATA)
MACHINE = Machine.find(SAME[0], ONE_PROCESS.device, 1)


def compare(check, *ranks):
    """The problems of three ranks, or None. `check(dist, *arguments)` is called with the arguments of each."""
    values: list = []

    def problems(arguments, all_gather):
        try:
            check(SimpleNamespace(device=ONE_PROCESS.device, all_gather=all_gather), *arguments)
        except UserError as error:
            return error.problems

    for arguments in ranks:  # what each tells the others
        problems(arguments, lambda value: values.append(value) or [value])
    return problems(ranks[0], lambda value: values)


def compare_runs(*ranks):
    return compare(lambda dist, config, data: preflight.check_runs_agree(dist, config, MACHINE, data), *ranks)


def test_ranks_that_agree_go_on():
    elsewhere = config_of("--data", "/other/disk", "--out", "/other/log")  # each node may have its own paths
    assert compare_runs(SAME, (elsewhere, DATA), SAME) is None
    paths = [{"out": "/a"}, {"out": "/b", "data": "/c"}, {"out": "/a"}]
    assert compare(preflight.check_starts_agree, *([flags, TRAIN_FLAGS] for flags in paths)) is None


@pytest.mark.parametrize(
    "other, expected",
    [
        ((config_of("--beta2", 0.5), DATA), r"--beta2: 0\.5 on \S+ \(rank 2\), 0\.95 on \S+ \(rank 0\)"),
        ((config_of(), DATA | {"train": [["a.npy", 100, "1235"]]}), "the shards: "),
        ((config_of(), DATA | {"val": [["a.npy", 100, "1234"]]}), "the shards: "),
    ],
)
def test_runs_that_differ(other, expected):
    [problem] = compare_runs(SAME, SAME, other)
    assert re.match("the nodes differ in " + expected, problem)


def test_command_lines_that_differ():
    """In a value, or in what is given: the ranks would not do the same before there is a configuration."""
    first, second = {"beta2": 0.5, "minutes": 2}, {"minutes": 3, "init_from": "/a", "beta2": 0.5}
    problems = compare(preflight.check_starts_agree, *([flags, TRAIN_FLAGS] for flags in (first, first, second)))
    assert [problem.split(" on ")[0] for problem in problems] == [
        "the nodes differ in --init-from: given",
        "the nodes differ in --minutes: 3",
    ]
    assert "not given on" in problems[0]


def test_versions_and_gpus_are_compared(monkeypatch):
    def different_on_one_rank():
        values = iter(["same", "same", "other", "same"])
        return lambda *_: next(values)

    monkeypatch.setattr(preflight.platform, "python_version_tuple", different_on_one_rank())
    monkeypatch.setattr(preflight, "torch", type("Torch", (), {"__version__": property(different_on_one_rank())})())
    monkeypatch.setattr(devices, "describe", different_on_one_rank())
    [problem] = compare(preflight.check_starts_agree, *[[{}, TRAIN_FLAGS]] * 3)
    assert re.search(r"the versions: Python (o\.t|s\.a), torch (other|same) on", problem)
    [problem] = compare_runs(SAME, SAME, SAME)
    assert re.match(r"the nodes differ in the device: other in \w+ on \S+ \(rank 2\), same", problem)


def test_whether_a_rank_compiles_is_compared():
    """The others would wait in each step for one that does not, and only rank 0 prints a reason."""
    compiled, missing = replace(MACHINE, compiled=True), replace(MACHINE, why_not_compiled="no C++ compiler")
    ranks = [(SAME[0], machine, DATA) for machine in (compiled, missing, MACHINE)]
    [problem] = compare(preflight.check_runs_agree, *ranks)
    differ = r"whether they compile: no on \S+ \(rank 1\), yes on \S+ \(rank 0\)\. Install a C\+\+ compiler"
    assert re.match(f"the nodes differ in {differ}", problem)
    assert compare(preflight.check_runs_agree, *ranks[1:]) is None


def test_one_line_for_each_difference():
    two = (config_of("--seed", 1, "--beta2", 0.5), DATA)
    problems = compare_runs(SAME, two, (config_of("--seed", 1), DATA))
    assert [problem.split()[4] for problem in problems] == ["--beta2:", "--seed:"]
