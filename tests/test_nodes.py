"""Several nodes: here, torchrun's agents with working directories of their own and one shared folder."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time

import pytest
from helpers import ROOT, TINY_FLAGS, free_port, run_to_the_end, steps_done, wait_for
from training import assert_same_run

pytestmark = pytest.mark.slow


class Nodes:
    """Starts nodes as docs/cluster.md says; node n works and prints in the folder `n`."""

    def __init__(self, folder, *flags, restarts=0):
        self.folder, self.flags, self.restarts, self.port = folder, flags, restarts, free_port()

    def start(self, n, *more):
        cwd = self.folder / str(n)
        cwd.mkdir(exist_ok=True)
        launcher = f"-m torch.distributed.run --nnodes=2 --nproc-per-node=1 --node-rank={n} --master-addr=localhost"
        launcher += f" --master-port={self.port} --max-restarts={self.restarts}"
        flags = [*TINY_FLAGS, *map(str, (*self.flags, *more))]
        with open(cwd / "output.txt", "a") as output:
            return subprocess.Popen(
                [sys.executable, *launcher.split(), str(ROOT / "train_gpt2.py"), *flags],
                cwd=cwd, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=output, stderr=subprocess.STDOUT,
            )  # fmt: skip

    def output(self, n):
        return (self.folder / str(n) / "output.txt").read_text()


def test_two_nodes_of_which_one_starts_late_train_as_one(byte_shards, tmp_path):
    flags = ["--data", byte_shards, "--max-steps", 10, "--parallel", "fsdp"]
    nodes = Nodes(tmp_path, *flags, "--out", tmp_path / "shared" / "log")
    first = nodes.start(0)
    time.sleep(5)
    second = nodes.start(1)
    assert [first.wait(120), second.wait(120)] == [0, 0], nodes.output(0)
    run_to_the_end(*flags, "--out", "one_node", cwd=tmp_path, world_size=2)
    assert_same_run(tmp_path / "shared" / "log", tmp_path / "one_node")


def test_a_node_whose_agent_is_killed_can_be_started_again(byte_shards, tmp_path):
    """The other node saves, restarts its process and waits."""
    flags = ["--data", byte_shards, "--shuffle", "--decay-steps", 10000]
    nodes = Nodes(tmp_path, *flags, "--out", tmp_path / "log", "--resume", "auto", "--max-steps", 10000, restarts=2)
    first, second = nodes.start(0), nodes.start(1)
    assert wait_for(lambda: steps_done(tmp_path / "log") >= 20, timeout=120)
    second.kill()
    second.wait()
    done = steps_done(tmp_path / "log")
    second = nodes.start(1)
    assert wait_for(lambda: steps_done(tmp_path / "log") >= done + 20, timeout=120), nodes.output(0)
    first.terminate()
    assert first.wait(60) == 1
    second.kill()
    second.wait()
    [resumed_at, stopped_at] = re.findall(r"step +(\d+) \| stopped", nodes.output(0))
    assert done <= int(resumed_at) <= done + 2  # the step that it was killed in was finished
    run_to_the_end(*flags, "--max-steps", stopped_at, "--out", "straight", cwd=tmp_path, world_size=2)
    train = [
        [line for line in (out / "log.txt").read_text().splitlines() if " train " in line]
        for out in (tmp_path / "log", tmp_path / "straight")
    ]
    assert train[0] == train[1]


def test_a_node_with_other_flags_is_named(byte_shards, tmp_path):
    nodes = Nodes(tmp_path, "--data", byte_shards, "--max-steps", 4, "--out", tmp_path / "log")
    first, second = nodes.start(0), nodes.start(1, "--seed", 7)
    assert [first.wait(120), second.wait(120)] == [1, 1]  # torchrun's own
    expected = r"error: the nodes differ in --seed: 7 on \S+ \(rank 1\), 1337 on \S+ \(rank 0\)\. Pass the same flags"
    assert re.search(expected, nodes.output(0)) and re.search(expected, nodes.output(1))
    assert not (tmp_path / "log").exists()
