"""Several nodes: here, torchrun's agents with working directories of their own and one shared folder."""

from __future__ import annotations

import os
import re
import subprocess
import time
from functools import partial

import pytest
from helpers import ROOT, TINY_FLAGS, finish_run, free_port, run_to_the_end, start_torchrun, steps_done, wait_for
from torch.distributed import TCPStore

from support.checkpoints.directory import newest_checkpoint, step_of


def start_node(n, folder, port, flags):
    """One of two nodes, as docs/many-gpus.md says; it works in the folder `n`, and prints there."""
    (folder / str(n)).mkdir(exist_ok=True)
    options = (
        f"--nnodes=2 --nproc-per-node=1 --node-rank={n} --master-addr=localhost --master-port={port} --max-restarts=2"
    )
    cwd = folder / str(n)
    return start_torchrun(options, *TINY_FLAGS, *flags, cwd=cwd, output=cwd / "output.txt")


@pytest.mark.slow
def test_a_node_whose_agent_is_killed_can_be_started_again(byte_shards, tmp_path):
    """The other node saves, restarts its process and waits."""
    flags = ["--data", byte_shards, "--shuffle", "--decay-steps", 10000]
    log = tmp_path / "log"
    until_stopped = [*flags, "--out", log, "--resume", "auto", "--max-steps", 10000]
    start = partial(start_node, folder=tmp_path, port=(port := free_port()), flags=until_stopped)
    first, second = start(0), start(1)
    assert wait_for(lambda: steps_done(log) >= 20, timeout=120)
    store = TCPStore("localhost", port, is_master=False)
    store.set("exception_dump", "1")  # as NCCL does after a timeout; it would abort the next processes 8 minutes later
    second.kill()
    second.join()
    done = steps_done(log)
    second = start(1)
    output = tmp_path / "0" / "output.txt"
    assert wait_for(lambda: steps_done(log) >= done + 20, timeout=120), output.read_text()
    assert not store.check(["exception_dump"])
    first.terminate()
    assert finish_run([first]) == [1]
    second.kill()
    second.join()
    [resumed_at, stopped_at] = re.findall(r"step +(\d+) \| stopped", output.read_text())
    assert done <= int(resumed_at) <= done + 2  # the step that it was killed in was finished
    assert int(stopped_at) == steps_done(log) == step_of(newest_checkpoint(log))
    run_to_the_end(*flags, "--max-steps", stopped_at, "--out", "straight", cwd=tmp_path, world_size=2)
    resumed, straight = ((out / "log.txt").read_text().splitlines() for out in (log, tmp_path / "straight"))
    assert [line for line in resumed if " train " in line] == [line for line in straight if " train " in line]


@pytest.mark.parametrize("stopped, seconds_left, queued", [(True, 9999, True), (False, 60, True), (False, 9999, False)])
def test_the_slurm_script_queues_a_run_again_that_was_stopped_and_no_other(tmp_path, stopped, seconds_left, queued):
    """The script in docs/many-gpus.md; its programs append their arguments to `calls.txt`, and do what they are told to."""
    page = (ROOT / "docs" / "many-gpus.md").read_text().split("### Slurm\n")[1]
    (tmp_path / "train.sbatch").write_text(re.search(r"```sh\n(#!.*?)```", page, re.DOTALL)[1])
    line = "step   120 | stopped. The newest checkpoint is log/model_00120" if stopped else "error: no shards."
    (tmp_path / "train.out").write_text("step   100 | stopped. The newest checkpoint belongs to an earlier start\n")
    torchrun = f"echo '{line}' >> {tmp_path}/train.out; exit 1"
    programs = {"srun": 'shift; "$@"', "torchrun": torchrun, "scontrol": "echo node-a; echo node-b"}
    (tmp_path / "bin").mkdir()
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "activate").touch()
    for program, body in programs.items():
        (tmp_path / "bin" / program).write_text(f'#!/bin/bash\necho {program} "$@" >> {tmp_path}/calls.txt\n{body}\n')
        (tmp_path / "bin" / program).chmod(0o755)
    slurm = dict(JOB_ID="7", JOB_NODELIST="node-[a-b]", NNODES="2", NODEID="1", GPUS_ON_NODE="8")
    slurm["JOB_END_TIME"] = str(int(time.time()) + seconds_left)
    environment = os.environ | {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}
    environment |= {f"SLURM_{name}": value for name, value in slurm.items()}
    command = ["bash", "train.sbatch", "--model", "gpt2-xl"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=30)
    calls = (tmp_path / "calls.txt").read_text().splitlines()
    assert [call for call in calls if call.startswith("torchrun")] == [
        "torchrun --nnodes=2 --node_rank=1 --master_addr=node-a --master_port=29500 --nproc_per_node=8 --max-restarts=3 "
        "train_gpt2.py --resume auto --model gpt2-xl"
    ]
    assert (done.returncode, done.stderr) == (1, "") and ("scontrol requeue 7" in calls) == queued
