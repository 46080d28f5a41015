"""What several ranks compare before they are connected."""

from __future__ import annotations

import dataclasses
import re
import threading

import pytest
import torch
from helpers import finish_run, start_run
from torch.distributed import HashStore
from training import config_of

from support.cli import UserError
from support.runtime import preflight
from support.runtime.distributed import Distributed

DATA = {"train": [["a.npy", 100, "1234"]], "val": [], "base": None}
FLAG_HINT = "Pass the same flags on all nodes."


def compare(*facts_by_rank):
    """The error of each rank, or None."""
    store, errors = HashStore(), {}

    def run(rank):
        try:
            dist = Distributed(rank, 0, len(facts_by_rank), torch.device("cpu"), store)
            preflight.compare_facts(dist, facts_by_rank[rank])
            errors[rank] = None
        except UserError as error:
            errors[rank] = error.problems

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(facts_by_rank))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=20)
    return errors


def facts(config, data=DATA, step=0):
    return preflight.collect_facts(Distributed(0, 0, 2), config, data, step)


def test_ranks_that_agree_go_on():
    same = facts(config_of())
    elsewhere = facts(config_of("--data", "/other/disk", "--out", "/other/log"))  # each node may have its own paths
    assert compare(same, elsewhere, same) == {0: None, 1: None, 2: None}


@pytest.mark.parametrize(
    "changed, expected",
    [
        (facts(config_of("--beta2", 0.5)), r"the nodes differ in --beta2: 0\.5 on .+, 0\.95 on .+ " + FLAG_HINT),
        (facts(config_of(), step=7), r"the nodes differ in the checkpoint: step 7 on .+, none on .+"),
        (facts(config_of(), DATA | {"train": [["a.npy", 100, "1235"]]}), "the nodes differ in the train shards: .+ Copy"),
        (facts(config_of()) | {"torch": "2.11.0"}, r"the nodes differ in torch: 2\.11\.0 on .+ Install one version"),
        (facts(config_of()) | {"the device": "NVIDIA L4"}, r"the nodes differ in the device: NVIDIA L4 on .+, cpu on .+"),
        ({k: v for k, v in facts(config_of()).items() if k != "--dropout"}, r"the nodes differ in --dropout: unknown on"),
    ],
)  # fmt: skip
def test_every_difference_is_an_error_on_all_ranks(changed, expected):
    errors = compare(facts(config_of()), facts(config_of()), changed)
    assert errors[0] == errors[1] == errors[2]
    [problem] = errors[0]
    assert re.match(expected, problem) and "(rank 2)" in problem and "(rank 0)" in problem


def test_one_line_for_each_difference():
    errors = compare(facts(config_of()), facts(config_of("--seed", 1, "--beta2", 0.5)), facts(config_of("--seed", 1)))
    assert [problem.split()[4] for problem in errors[0]] == ["--beta2:", "--seed:"]


def another_learning_rate_on_rank_1(rank):
    import train_gpt2

    if rank == 1:
        resolve = train_gpt2.resolve
        train_gpt2.resolve = lambda *args: dataclasses.replace(resolve(*args), max_lr=1.0)


def test_a_run_with_other_flags_on_one_node_does_not_start(byte_shards, tmp_path):
    flags = ["--data", byte_shards, "--max-steps", 4, "--out", "run"]
    ranks = start_run(*flags, cwd=tmp_path, world_size=2, sabotage=another_learning_rate_on_rank_1)
    assert finish_run(ranks) == [2, 2]
    assert re.search(r"error: the nodes differ in --max-lr: 1\.0 on", (tmp_path / "0.txt").read_text())
    assert not (tmp_path / "run").exists()
