"""Makes shards on a cluster, through datatrove: N tasks encode the parts, and one more cuts the shards."""

from __future__ import annotations

import importlib.util
import os
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from support.cli import UserError, print_lines
from support.data.shards import Manifest, is_complete

if TYPE_CHECKING:
    from datatrove.executor.base import PipelineExecutor

EXECUTORS = ("slurm", "ray")


@dataclass(frozen=True)
class Task:
    """A step of a datatrove pipeline that calls `make_shards` in the working directory of the command.

    Attributes:
        make: `make_shards` with all arguments but `only_parts`.
        only_parts: whether the task encodes parts; otherwise it writes the shards.
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
        UserError: a package is missing, or the executor does not accept an option.
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
        """Runs all tasks, or submits them to Slurm. Returns the manifest, which is not complete if they were submitted.

        Args:
            make: `make_shards` with all arguments but `only_parts`; it writes to `output`.

        Raises:
            UserError: `make` failed, or sbatch did.
        """
        if is_complete(output):
            return make()
        manifest = make(only_parts=(0, 1))  # makes the folder and, for bpe, the tokenizer
        # other machines must be able to import this project
        search_path = filter(None, [str(Path(__file__).parents[2]), os.getenv("PYTHONPATH")])
        os.environ["PYTHONPATH"] = os.pathsep.join(search_path)
        encode = self._datatrove(Task(make, only_parts=True), output / "logs" / "encode", self.tasks)
        if self.kind == "ray":
            encode.run()
            return make()
        cut = self._datatrove(Task(make, only_parts=False), output / "logs" / "cut", 1, depends=encode)
        try:
            cut.launch_job()
        except (OSError, subprocess.CalledProcessError) as error:
            raise UserError("sbatch is not on the PATH, or failed. Fix it, then rerun this command.") from error
        print_lines(
            f"submitted jobs {encode.job_id} and {cut.job_id}. When they have ended, run the same command again: it "
            "reports success, or submits what is missing."
        )
        return manifest

    def _datatrove(self, task: Task | None, logs: Path, tasks: int, **more: Any) -> PipelineExecutor:
        from datatrove import executor

        options = dict(self.options)
        if self.kind == "slurm":  # if a task fails, the last job still runs, and encodes what is missing
            more |= {"run_on_dependency_fail": True, "job_name": f"shards_{logs.name}"}
            # srun does not inherit --cpus-per-task from sbatch; datatrove's default QOS may not exist on a cluster
            options = {"srun_args": {"cpus-per-task": options.get("cpus_per_task", 1)}, "qos": None} | options
        more |= {
            "pipeline": [task] if task else [],
            "tasks": tasks,
            "skip_completed": False,
            "logging_dir": str(logs.absolute()),
        }
        return getattr(executor, f"{self.kind.title()}PipelineExecutor")(**more, **options)  # TypeError if they overlap
