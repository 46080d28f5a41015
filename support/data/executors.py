"""Shards made by the tasks of a cluster, through datatrove: N tasks encode the parts, and one more cuts the shards."""

from __future__ import annotations

import importlib.util
import os
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from support.cli import UserError
from support.data.output_folder import PARTS
from support.data.shards import Manifest, is_complete, load_manifest
from support.files import read_json, write_json

if TYPE_CHECKING:
    from datatrove.executor.base import PipelineExecutor

EXECUTORS = ("slurm", "ray")
SUBMITTED = "submitted.json"  # the numbers of Slurm's jobs


@dataclass(frozen=True)
class Task:
    """Calls `make_shards` from the working directory of the command, as a pipeline of datatrove.

    Attributes:
        make: `make_shards` with all arguments but `only_parts`.
        only_parts: whether it encodes parts; otherwise it writes the shards.
    """

    make: Callable[..., Manifest] = field(repr=False)  # datatrove logs the task
    only_parts: bool
    working_directory: Path = field(default_factory=Path.cwd)

    def __call__(self, _data: object, rank: int = 0, world_size: int = 1) -> None:
        os.chdir(self.working_directory)
        self.make(only_parts=(rank + 1, world_size) if self.only_parts else None)


@dataclass(frozen=True)
class Executor:
    """An executor of datatrove, with its options.

    Raises:
        UserError: it is not installed, or an option is not its own.
    """

    kind: str
    tasks: int
    options: Mapping[str, Any]

    def __post_init__(self) -> None:
        for package in ("datatrove", "ray")[: 1 + (self.kind == "ray")]:
            if importlib.util.find_spec(package) is None:
                raise UserError(f"--executor {self.kind} needs {package}. Install it: pip install {package}")
        try:
            self._datatrove(None, Path(), 1)
        except (TypeError, ValueError) as error:
            reason = str(error).rpartition("() ")[2]  # without the name of the function that got the arguments
            raise UserError(f"--executor {self.kind}: {reason}. Correct --executor-options.") from error

    def run(self, make: Callable[..., Manifest], output: Path) -> Manifest:
        """Runs all tasks, or submits them to Slurm; returns the manifest.

        Args:
            make: `make_shards` with all arguments but `only_parts`; `output` is its folder.

        Raises:
            UserError: `make` failed, or sbatch did.
        """
        if is_complete(output):
            return make()
        if running := running_jobs(output):
            return running
        manifest = make(only_parts=(0, 1))  # the folder, and a trained tokenizer
        search_path = filter(None, [str(Path(__file__).parents[2]), os.getenv("PYTHONPATH")])  # of other machines
        os.environ["PYTHONPATH"] = os.pathsep.join(search_path)
        encode = self._datatrove(Task(make, only_parts=True), output / "logs" / "encode", self.tasks)
        if self.kind == "ray":
            encode.run()
            return make()
        cut = self._datatrove(Task(make, only_parts=False), output / "logs" / "cut", 1, depends=encode)
        try:
            cut.launch_job()
        except (OSError, subprocess.CalledProcessError) as error:
            raise UserError("sbatch is missing or failed, see above. Correct that, and run this again.") from error
        finally:
            if jobs := [str(stage.job_id) for stage in (encode, cut) if stage.job_id]:
                [parts] = output.glob(f"{PARTS}*")
                write_json(parts / SUBMITTED, ",".join(jobs))
        print("submitted. The same command says later how far it is, or that the shards are complete.")
        return manifest

    def _datatrove(self, task: Task | None, logs: Path, tasks: int, **more: Any) -> PipelineExecutor:
        from datatrove import executor

        options = dict(self.options)
        if self.kind == "slurm":  # shards are cut even if a task failed: what is missing is encoded then
            more |= {"run_on_dependency_fail": True, "job_name": f"shards_{logs.name}"}
            # srun does not take over that of sbatch; datatrove would ask for a QOS that a cluster may not have
            options = {"srun_args": {"cpus-per-task": options.get("cpus_per_task", 1)}, "qos": None} | options
        more |= {
            "pipeline": [task] if task else [],
            "tasks": tasks,
            "skip_completed": False,
            "logging_dir": str(logs.absolute()),
        }
        return getattr(executor, f"{self.kind.title()}PipelineExecutor")(**more, **options)  # an error if they overlap


def running_jobs(output: Path) -> Manifest | None:
    """The manifest of a folder whose jobs are in Slurm's queue, after a line about them. A UserError if Slurm fails."""
    submitted = [*output.glob(f"{PARTS}*/{SUBMITTED}")]
    jobs = read_json(submitted[0]) if submitted else None
    if not jobs:
        return None
    # env: that there is no squeue is an error of the command, too
    squeue = subprocess.run(["env", "squeue", "--noheader", f"--jobs={jobs}"], capture_output=True, text=True)
    if squeue.returncode and "Invalid job id" not in squeue.stderr:  # as for jobs that ended long ago
        raise UserError(f"squeue failed ({squeue.stderr.strip()}). Run this later, or where Slurm's commands are.")
    running, encoded = bool(squeue.stdout.strip()), len([*output.glob(f"{PARTS}*/part_*.json")])
    print(f"jobs {jobs} {'are queued or running' if running else 'have ended'}, parts that are encoded: {encoded}")
    return load_manifest(output) if running else None
