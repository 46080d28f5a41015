"""Shards by tasks on many machines, or many on one: the bytes that one process makes, for any number and order of tasks.

Processes of this machine, or datatrove's executors, run three stages of tasks. A task depends on nothing but files, so it
can be killed, repeated or run twice. It skips what is finished, which checksums tell. Parts and shards are in a folder whose name
is new each time that shards are begun, so tasks that were left behind cannot write into others'.

    encode  some files, or rows of one -> a part: their tokens, and the cursor, length and checksum of each batch
    plan    all parts -> which tokens each shard has
    cut     tokens of parts -> a shard, and its entry in the manifest, which the last task writes
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import importlib.util
import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from support import files
from support.cli import UserError
from support.data import encode, shard_writer
from support.data.corpus import Batch, Corpus
from support.data.output_folder import OutputFolder
from support.data.readers import FileCorpus, Part
from support.data.shard_writer import report_disk_errors
from support.data.shards import PARTS, Manifest, ShardEntry, load_manifest, load_shard, read_manifest, write_manifest
from support.files import read_json, write_json

if TYPE_CHECKING:
    from datatrove.executor.base import PipelineExecutor

EXECUTORS = ("local", "slurm", "ray")
SUBMITTED = "submitted.json"  # the numbers of Slurm's jobs
AGAIN = "Run the same command again; if the input had to be changed, with another --output."


@dataclass(frozen=True)
class Job:
    """What all tasks know.

    Attributes:
        encode_batches: that of `encode`, for a tokenizer.
        directory: of the shards, an absolute path.
        manifest: without shards.
        working_directory: of other paths.
    """

    corpus: FileCorpus = field(repr=False)  # datatrove logs the job
    parts: Sequence[Part] = field(repr=False)
    encode_batches: Callable[[Iterable[Batch]], Iterator[encode.EncodedBatch]]
    directory: Path
    manifest: Manifest
    shard_size: int
    max_tokens: int | None
    val_fraction: float | None
    working_directory: Path = field(default_factory=Path.cwd)

    def run(self, stage: Callable[[int], object], numbers: Sequence[int]) -> None:
        """Calls `stage` for each number, whatever becomes of the others; raises a UserError with all their problems."""
        problems: list[str] = []
        os.chdir(self.working_directory)
        for number in numbers:
            if self._is_over():
                return
            try:
                with report_disk_errors(self.folder):
                    stage(number)
            except UserError as error:
                problems += error.problems
        if problems and not self._is_over():  # otherwise a twin of this task has finished, and tidied up
            raise UserError(*problems)

    def _is_over(self) -> bool:
        """Whether the shards are complete, or others are made in their folder."""
        manifest = load_manifest(self.directory)
        return manifest is None or manifest.get("in_parts") != self.manifest["in_parts"]

    @property
    def folder(self) -> Path:
        return self.directory / str(self.manifest["in_parts"])

    def encode(self, _data: object, rank: int, world_size: int) -> None:
        self.run(self._encode_part, range(rank, len(self.parts), world_size))

    def _encode_part(self, number: int) -> None:
        path = self._part_path(number)
        if self._has_enough_before(number) or encode.is_intact(path):
            return
        corpus = self.corpus.for_task(path.with_suffix(".files"))
        encode.write_batches(path, self.encode_batches(corpus.read_part(self.parts[number])))
        corpus.close()
        print(f"part {number + 1} of {len(self.parts)}: {encode.num_tokens(path):,} tokens", flush=True)

    def _has_enough_before(self, number: int) -> bool:
        """Whether the finished parts before one have `max_tokens` already."""
        totals = itertools.accumulate(encode.num_tokens(self._part_path(i)) or 0 for i in range(number))
        return self.max_tokens is not None and any(total >= self.max_tokens for total in totals)

    def _part_path(self, number: int) -> Path:
        return self.folder / f"part_{number:06d}.bin"

    def plan(self, _data: object = None, rank: int = 0, world_size: int = 1) -> None:
        self.run(self._plan, [0])

    def _plan(self, _number: int) -> None:
        counts: list[int] = []  # tokens of the parts that are needed
        problems: list[str] = []
        total, most, size = 0, self.max_tokens or sys.maxsize, self.shard_size
        for number in range(len(self.parts)):
            if total < most:
                count = encode.num_tokens(self._part_path(number))
                if count is None:
                    path, _ = self.corpus.files()[self.parts[number].indices[0]]
                    problems.append(f"part {number + 1}, {path}, was not encoded; see {self.directory}/logs. {AGAIN}")
                counts.append(min(count or 0, most - total))
                total += counts[-1]
        if problems:
            more = [f"{len(problems) - 9} more parts were not encoded. {AGAIN}"] if len(problems) > 9 else []
            raise UserError(*problems[:9], *more)
        in_order = self.val_fraction is None and total > size
        if in_order:
            shards = [("train" if n else "val", n // size, n, min(n + size, total)) for n in range(0, total, size)]
        else:
            paths = ((self._part_path(i), count) for i, count in enumerate(counts) if count)
            tokens = [np.memmap(path, encode.TOKEN, "r")[:count] for path, count in paths]
            shards = shard_writer.split_corpus(
                tokens, size, self.val_fraction or shard_writer.VAL_FRACTION, self.manifest
            )
        if not shards:
            shutil.rmtree(self.folder)  # with parts, other files would be refused
            raise shard_writer.no_text(self.corpus)
        write_json(self.folder / "plan.json", {"counts": counts, "in_order": in_order, "shards": shards})

    def cut(self, _data: object, rank: int, world_size: int) -> None:
        if plan := read_json(self.folder / "plan.json"):  # if there is none, the reason is in its log
            offsets = [0, *itertools.accumulate(plan["counts"])]
            self.run(functools.partial(self._cut_shard, plan, offsets), range(rank, len(plan["shards"]), world_size))
            self.run(self._finish, [len(plan["shards"])])

    def _cut_shard(self, plan: dict[str, Any], offsets: list[int], number: int) -> None:
        path = self.folder / f"shard_{number:06d}.json"
        if path.exists() or self._verify_earlier(path):
            return
        split, index, start, stop = plan["shards"][number]
        part = bisect.bisect_right(offsets, start) - 1
        first, skip = encode.find_token(self._part_path(part), start - offsets[part])
        paths = map(self._part_path, range(part, len(offsets) - 1))
        batches = (encode.read_batches(path, 0 if i else first) for i, path in enumerate(paths))
        stream = itertools.chain.from_iterable(batches)
        chunk = next(shard_writer.cut_into_chunks(stream, stop - start, skip, limit=stop - start))
        shard = shard_writer.NewShard(split, index, chunk.tokens, chunk.end if plan["in_order"] else None)
        eot = self.manifest["vocab_size"] - 1
        entry = shard_writer.write_new_shard(shard, self.folder, self.corpus.prefix, eot, unique=True)
        write_json(path, entry)
        print(f"{entry['file']}: {entry['tokens']:,} tokens", flush=True)

    def _shard_path(self, entry: ShardEntry) -> Path:
        """Next to the parts, and at the end in the folder of the shards."""
        path = self.folder / entry["file"]
        return path if path.exists() else self.directory / entry["file"]

    def _verify_earlier(self, path: Path) -> bool:
        """Adopts the entry of a shard that tasks of an earlier command have made, if it is intact."""
        with contextlib.suppress(UserError, OSError):
            if entry := read_json(path.with_suffix(".earlier")):
                load_shard(self._shard_path(entry), entry, verify=True)
                path.with_suffix(".earlier").replace(path)
                return True
        return False

    def _finish(self, num_shards: int) -> None:
        """If all shards are there, writes the manifest and removes the parts."""
        paths = sorted(self.folder.glob("shard_*.json"))
        entries = [entry for path in paths if len(paths) == num_shards and (entry := read_json(path))]
        if len(entries) < num_shards:
            return
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(files.lock_folder(self.folder, "--output"))
            except UserError:
                return  # another task does this
            shard_writer.check_unchanged(self.corpus, self.directory)
            for entry in entries:
                files.replace(self._shard_path(entry), self.directory / entry["file"])
            manifest: Manifest = {**self.manifest, "shards": entries}
            del manifest["in_parts"]
            OutputFolder(self.directory, manifest).finish()
        shutil.rmtree(self.folder, ignore_errors=True)


def divide(corpus: Corpus) -> tuple[FileCorpus, list[Part]]:
    """A corpus, and its parts. A UserError if it is not of files, or one cannot be read."""
    if not isinstance(corpus, FileCorpus):
        raise UserError(f"{corpus.name} is not a list of files, which can be divided. Use --input (and hf download).")
    return corpus, corpus.parts()


def running_jobs(directory: Path) -> Manifest | None:
    """The manifest of a folder whose jobs are in Slurm's queue, after a line about them. A UserError if Slurm fails."""
    manifest = load_manifest(directory)
    if manifest is None or not (jobs := read_json(directory / manifest.get("in_parts", ".") / SUBMITTED)):
        return None
    # env: that there is no squeue is an error of the command, too
    squeue = subprocess.run(["env", "squeue", "--noheader", f"--jobs={jobs}"], capture_output=True, text=True)
    if squeue.returncode and "Invalid job id" not in squeue.stderr:  # as for jobs that ended long ago
        raise UserError(f"squeue failed ({squeue.stderr.strip()}). Run this later, or where Slurm's commands are.")
    running, encoded = bool(squeue.stdout.strip()), len(list(directory.glob(f"{PARTS}*/part_*.json")))
    print(f"jobs {jobs} {'are queued or running' if running else 'have ended'}, parts that are encoded: {encoded}")
    return manifest if running else None


# -----------------------------------------------------------------------------
# What runs the tasks


@dataclass(frozen=True)
class Executor:
    """Processes of this machine, `processes` at once, or with `options` datatrove's executor of another kind.

    Raises:
        UserError: that is not installed, or an option is not its own.
    """

    kind: str
    tasks: int
    processes: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.kind == "local":
            return
        for package in ("datatrove", "ray")[: 1 + (self.kind == "ray")]:
            if importlib.util.find_spec(package) is None:
                raise UserError(f"--executor {self.kind} needs {package}. Install it: pip install {package}")
        try:
            self._datatrove(None, "", 1)
        except (TypeError, ValueError) as error:
            reason = str(error).rpartition("() ")[2]  # without the name of the function that got the arguments
            raise UserError(f"--executor {self.kind}: {reason}. Correct --executor-options.") from error

    def run(self, job: Job) -> Manifest:
        """Runs all tasks, or submits them to Slurm; returns the manifest. A UserError if some failed, or sbatch did."""
        with report_disk_errors(job.directory):
            job.folder.mkdir(exist_ok=True)
            for others in set(job.directory.glob(f"{PARTS}*")) - {job.folder}:  # of shards that were begun before
                shutil.rmtree(others)
            for path in job.folder.glob("shard_*.json"):  # to be verified before the shards count as finished
                path.replace(path.with_suffix(".earlier"))
            write_manifest(job.directory, job.manifest)  # a trained tokenizer is in it now
        search_path = filter(None, [str(Path(__file__).parents[2]), os.getenv("PYTHONPATH")])  # of other machines
        os.environ["PYTHONPATH"] = os.pathsep.join(search_path)
        if self.kind == "slurm":
            encode = self._datatrove(job, "encode", self.tasks)
            plan = self._datatrove(job, "plan", 1, depends=encode)
            cut = self._datatrove(job, "cut", self.tasks, depends=plan)
            try:
                cut.launch_job()
            except (OSError, subprocess.CalledProcessError) as error:
                raise UserError("sbatch is missing or failed, see above. Correct that, and run this again.") from error
            finally:
                if jobs := [str(stage.job_id) for stage in (encode, plan, cut) if stage.job_id]:
                    write_json(job.folder / SUBMITTED, ",".join(jobs))
            print("submitted. The same command says later how far it is, or that the shards are complete.")
            return job.manifest
        self._run_stage(job, "encode")
        job.plan()
        self._run_stage(job, "cut")
        return read_manifest(job.directory)

    def _datatrove(self, job: Job | None, stage: str, tasks: int, **more: Any) -> PipelineExecutor:
        from datatrove import executor

        options = dict(self.options)
        if self.kind == "slurm":  # a stage starts when the one before has ended, and says what is missing
            more |= {"run_on_dependency_fail": True, "job_name": f"shards_{stage}"}
            # srun does not take over that of sbatch; datatrove would ask for a QOS that a cluster may not have
            options = {"srun_args": {"cpus-per-task": options.get("cpus_per_task", 1)}, "qos": None} | options
        more["logging_dir"] = str(job.directory / "logs" / stage) if job else ""
        more |= {"pipeline": [getattr(job, stage)] if job else [], "tasks": tasks, "skip_completed": False}
        return getattr(executor, f"{self.kind.title()}PipelineExecutor")(**more, **options)  # an error if they overlap

    def _run_stage(self, job: Job, stage: str) -> None:
        if self.kind == "ray":
            return self._datatrove(job, stage, self.tasks).run()
        task = functools.partial(getattr(job, stage), None, world_size=self.tasks)
        codes = encode.run_processes(task, range(self.tasks), self.processes)
        if any(codes):
            how = "killed, perhaps for lack of memory" if min(codes) < 0 else "failed"
            raise UserError(f"of {self.tasks} tasks, {sum(code != 0 for code in codes)} {how}. {AGAIN}")
