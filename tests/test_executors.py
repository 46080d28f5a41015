"""Shards by the tasks of datatrove's executors: the bytes of one process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import ROOT, run_script
from shard_helpers import files_in

import fineweb
from support.cli import UserError, run_cli
from support.data import executors, text_files
from support.data.executors import Executor
from support.data.make_shards import make_shards
from support.data.text_files import TextFiles


@pytest.fixture
def text(tmp_path, monkeypatch):
    """A text of several parts."""
    (tmp_path / "a.txt").write_text("some words " * 9_000_000)
    monkeypatch.chdir(tmp_path)
    return ["--input", "a.txt", "--tokenizer", "bytes", "--shard-size", "3e7"]


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--tasks 3", "--tasks and --executor-options are for --executor"),
        ("--executor slurm --executor-options time", "--executor-options is 'time'. It must be NAME=VALUE."),
        (
            "--executor slurm --executor-options time=1 partition=a speed=9",
            "unexpected keyword argument 'speed'. Correct",
        ),
        ("--executor slurm --executor-options time=1 tasks=9", "multiple values for keyword argument 'tasks'. Correct"),
        ("--executor slurm", "missing 2 required positional arguments: 'time' and 'partition'"),
    ],
)
def test_flags_that_do_not_fit(tmp_path, monkeypatch, capsys, flags, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("some words")
    with pytest.raises(SystemExit):
        run_cli(lambda: fineweb.main(["--input", "a.txt", "--output", "out", "--tokenizer", "bytes", *flags.split()]))
    assert message in capsys.readouterr().err and not Path("out").exists()


def test_what_is_not_installed_is_named(monkeypatch):
    monkeypatch.setattr(executors.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install datatrove"):
        Executor("ray", 1, {})


def test_ray_runs_the_parts_and_the_command_cuts(tmp_path, monkeypatch, capsys):
    """In this process, one task after the other: Ray itself is not installed for the tests."""

    class InThisProcess(Executor):
        def _datatrove(self, task, logs, tasks, **more):
            self_tasks = [lambda rank=rank: task(None, rank, tasks) for rank in reversed(range(tasks))]
            return type("Pipeline", (), {"run": lambda _: [run() for run in self_tasks]})()

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(executors.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(text_files, "MIN_PART_BYTES", 1000)
    Path("a.txt").write_text("some words " * 3000)

    def make(output, **options):
        return make_shards(TextFiles([Path("a.txt")]), output, tokenizer="bpe", shard_size=2000, **options)

    make("one")
    capsys.readouterr()
    for options in ("first", "nothing to do"):
        manifest = InThisProcess("ray", 5, {}).run(lambda **only: make("out", **only), Path("out"))
        assert manifest["complete"] and files_in(Path("out")) == files_in(Path("one")), options
    assert capsys.readouterr().out.count("part ") == 33


# ---- Slurm

SBATCH = """#!/bin/bash
# writes down the job, and prints its number as Slurm does
n=$(ls queue | wc -l); cp "${@: -1}" "queue/$n"; echo "$@" > "queue/$n.args"; echo "Submitted batch job $n"
"""
SRUN = '#!/bin/bash\nwhile [[ $1 == -* ]]; do [[ $1 == -n ]] && shift; shift; done\nexec "$@"\n'
SCONTROL = "#!/bin/bash\necho node1\n"
STAGES = ["encode", "cut"]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="Slurm has no Windows")
def test_slurm(text, tmp_path, monkeypatch, capsys):
    """Jobs are submitted with their dependency; what a task did not encode, the last job encodes."""
    fineweb.main([*map(str, text), "--output", "one"])
    (tmp_path / "bin").mkdir()
    for name, script in (("sbatch", SBATCH), ("srun", SRUN), ("scontrol", SCONTROL)):
        (tmp_path / "bin" / name).write_text(script)
        (tmp_path / "bin" / name).chmod(0o755)
    path = os.pathsep.join([str(tmp_path / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]])
    monkeypatch.setenv("PATH", path)

    flags = [*text, "--output", "out", "--executor", "slurm", "--tasks", "2", "--executor-options"]
    flags += ["partition=cpu", "time=4:00:00", "cpus_per_task=1"]
    Path("queue").mkdir()
    done = run_script("fineweb.py", *flags, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    jobs = {}
    for job in sorted(Path("queue").glob("?")):
        script = job.read_text()
        assert "#SBATCH --partition=cpu" in script and "#SBATCH --time=4:00:00" in script
        if "merge_stats" not in script:
            jobs[next(stage for stage in STAGES if f"--job-name=shards_{stage}" in script)] = job
    encode, cut = jobs.values()
    assert list(jobs) == STAGES and "--dependency" not in encode.with_suffix(".args").read_text()
    assert f"--dependency=afterany:{encode.name} " in cut.with_suffix(".args").read_text()
    assert "--array=0-1" in encode.read_text() and "--array=0-0" in cut.read_text()
    assert done.stdout.splitlines()[-1].startswith(
        f"submitted jobs {encode.name} and {cut.name}. When they have ended, run"
    )
    for job, rank in ((encode, 1), (cut, 0)):  # the other task of the array is lost
        variables = {"SLURM_ARRAY_TASK_ID": str(rank), "SLURM_NODELIST": "node1", "RUN_OFFSET": "0"}
        variables["PYTHONPATH"] = str(ROOT)  # what sbatch --export=ALL hands on
        done = subprocess.run(["bash", job], env=os.environ | variables, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        assert len(list(Path("out").glob("parts_*/*.bin"))) == (3 if job is encode else 0)
    Path("out/logs").rename("logs")
    assert files_in(Path("out")) == files_in(Path("one"))
    capsys.readouterr()
    fineweb.main([*map(str, flags)])
    assert capsys.readouterr().out.startswith("nothing to do: these shards exist already and are intact")
