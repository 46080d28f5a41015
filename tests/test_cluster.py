"""Shards that many tasks make: the bytes of one process, whatever is killed, corrupt or repeated; Slurm, by a stand-in."""

import gzip
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest
from helpers import FORKS, ROOT, run_script
from shard_helpers import ADVERSARIAL, LONG, corpus_of, file_size_limit, files_in, set_batch_chars, valid_unicode

import fineweb
from support import files
from support.cli import UserError, run_cli
from support.data import cluster, corpus, encode, readers, shard_writer

BATCH_CHARS = 700
STAGES = ("encode", "plan", "cut")


class InThisProcess(cluster.Executor):
    """One task after the other."""

    def _run_stage(self, job, stage):
        for rank in range(self.tasks):
            getattr(job, stage)(None, rank, self.tasks)


@pytest.fixture
def texts(tmp_path, monkeypatch):
    """Files of every kind in `texts/`: an empty one, one without a line, long documents, many row groups. Small parts and batches."""
    folder = tmp_path / "texts"
    folder.mkdir()
    documents = valid_unicode(ADVERSARIAL)
    (folder / "a.txt").write_text("one document " * 300)
    (folder / "b.txt").write_text("")
    pa.parquet.write_table(pa.table({"text": [*LONG, *documents] * 2}), folder / "c.parquet", row_group_size=9)
    (folder / "d.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in [*documents, *LONG]))
    (folder / "e.jsonl").write_text("")
    (folder / "f.txt.gz").write_bytes(gzip.compress(b"compressed " * 99))
    pa.parquet.write_table(pa.table({"text": pa.array([], pa.string())}), folder / "g.parquet")
    (folder / "h.parquet").write_bytes((folder / "c.parquet").read_bytes())
    (folder / "i.txt").write_text("the end")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(readers, "MIN_PART_BYTES", 1500)
    set_batch_chars(monkeypatch, BATCH_CHARS)
    return folder


def make(out, paths=("texts",), executor=None, **options):
    options = {"tokenizer": "bytes", "shard_size": 2000, **options}
    return fineweb.make_shards(fineweb.file_source(list(paths), "text"), out, executor=executor, **options)


def in_tasks(number):
    return InThisProcess("local", number)


def shards_of(folder):
    """All files of the folder, except the logs of Slurm's jobs."""
    if (logs := Path(folder) / "logs").exists():
        logs.rename(f"logs of {folder}")
    return files_in(Path(folder))


# ---- the same bytes


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"shard_size": 10**6},  # a single shard, which is split
        {"val_fraction": 0.3},
        {"val_fraction": 0.02, "split_documents": True},
        {"max_tokens": 9_001},
        {"max_tokens": 9_001, "val_fraction": 0.1},
        {"tokenizer": "bpe", "vocab_size": 300},
        {"tokenizer": "bpe", "val_fraction": 0.5},
        {"shard_size": 37, "max_tokens": 2_000},
    ],
    ids=str,
)
def test_tasks_make_the_bytes_of_one_process(texts, options):
    make("one", **options)
    for number in (1, 2, 5):
        make(f"tasks_{number}", executor=in_tasks(number), **options)
        assert shards_of(f"tasks_{number}") == files_in(Path("one"))
    _, parts = cluster.divide(fineweb.file_source(["texts"], "text"))
    assert len(parts) > 9


@pytest.mark.parametrize("content", ["", "a", "two\nthree"])
def test_a_corpus_of_no_document_or_one(texts, content):
    Path("a.txt").write_text(content)
    outcomes = []
    for out, executor in (("one", None), ("tasks", in_tasks(2))):
        try:
            make(out, ["a.txt"], executor)
            outcomes.append({path.name: path.read_bytes() for path in Path(out).glob("*.*")})
        except UserError as error:
            outcomes.append(error.problems)
    assert outcomes[0] == outcomes[1]


def test_parts_after_max_tokens_are_not_encoded(texts, capsys):
    make("out", executor=in_tasks(1), max_tokens=1000)
    assert capsys.readouterr().out.count("part ") == 1
    _, parts = cluster.divide(fineweb.file_source(["texts"], "text"))
    make("all", executor=in_tasks(1))
    assert capsys.readouterr().out.count("part ") == len(parts)


# ---- what goes wrong


def a_job(out, **options):
    """The tasks of a command, which has been killed before the first one."""
    jobs = []

    class Killed(cluster.Executor):
        def _run_stage(self, job, stage):
            jobs.append(job)
            (job.folder / "begun").touch()  # a killed command removes nothing
            raise UserError("killed")

    with pytest.raises(UserError, match="killed"):
        make(out, executor=Killed("local", 1), **options)
    return jobs[0]


def run_until_killed(job, tasks, name):
    """All tasks, the last ones first. The process is killed while it writes a certain file."""
    corpus.BATCH_CHARS = BATCH_CHARS
    atomic_write = files.atomic_write

    def killing_write(path, unique=False):
        if path.name.endswith(name):
            files.tmp_path(path).write_bytes(b"half")
            os.kill(os.getpid(), signal.SIGKILL)
        return atomic_write(path, unique)

    files.atomic_write = killing_write
    for stage in STAGES:
        for rank in reversed(range(tasks if stage != "plan" else 1)):
            getattr(job, stage)(None, rank, tasks)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"val_fraction": 0.3}])
def test_killed_in_any_stage_the_same_command_makes_the_same_bytes(texts, options):
    make("one", **options)
    moments = "part_000009.bin part_000012.json plan.json _000007.npy shard_000009.json manifest.json never".split()
    for name in moments:
        process = FORKS.Process(target=run_until_killed, args=(a_job("out", **options), 3, name))
        process.start()
        process.join(60)
        assert process.exitcode == (0 if name == "never" else -signal.SIGKILL)
    assert files_in(Path("out")) == files_in(Path("one"))


def test_tasks_may_run_twice_and_early(texts):
    make("one")
    job = a_job("out")
    job.cut(None, 0, 1)  # there is no plan: nothing to do
    with pytest.raises(UserError, match=r"part 1, texts/a\.txt, was not encoded") as raised:
        job.plan()
    assert len(raised.value.problems) == 10 and "more parts were not encoded" in raised.value.problems[-1]
    for stage in STAGES:
        for rank in (1, 0, 1):
            getattr(job, stage)(None, rank, 2)
    job.cut(None, 0, 2)  # after the end
    job.encode(None, 0, 2)
    assert files_in(Path("out")) == files_in(Path("one"))


def flip_byte(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    "name, message",
    [
        ("part_000003.bin", r"part_000003\.bin is missing or corrupt\. Run the same command again"),
        ("part_000003.json", r"part_000003\.bin is missing or corrupt"),
        ("plan.json", None),
        ("texts_val_000000.npy", None),
        ("shard_000002.json", None),
    ],
)
def test_a_corrupt_file_is_found_and_made_again(texts, name, message):
    make("one")
    job = a_job("out")
    job.encode(None, 0, 1)
    job.plan()
    if not message:
        job.cut(None, 0, 2)  # every other shard
    path = job.folder / name.replace("texts_val", f"{job.corpus.prefix}_val")
    flip_byte(path)
    if message:
        with pytest.raises(UserError, match=message):
            job.cut(None, 0, 1)
    make("out", executor=in_tasks(3))
    assert shards_of("out") == files_in(Path("one"))


def test_after_a_full_disk_the_same_command_resumes(texts):
    make("one")
    for size in (3000, 3500):  # parts are larger; shards are
        job = a_job("out")
        with pytest.raises(UserError, match=r"cannot write to .*parts_\w+ \(File too large\)"), file_size_limit(size):
            for stage in STAGES:
                getattr(job, stage)(None, 0, 1)
    make("out", executor=in_tasks(2))
    assert shards_of("out") == files_in(Path("one"))


def test_a_file_that_fails_is_named_and_the_others_go_on(texts, capfd):
    good = (texts / "d.jsonl").read_text()
    (texts / "d.jsonl").write_text("not JSON\n" + good)
    with pytest.raises(UserError, match=r"^of 2 tasks, 1 failed\. Run the same command again; if the input "):
        make("out", executor=cluster.Executor("local", 2))
    assert capfd.readouterr().err.count("error: texts/d.jsonl, line 1 is not JSON") == 1
    _, parts = cluster.divide(fineweb.file_source(["texts"], "text"))
    assert len(list(Path("out").glob("parts_*/part_*.json"))) == len(parts) - 1


def kill_me(batches):
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_task_is_reported(texts):
    job = a_job("out")
    object.__setattr__(job, "encode_batches", kill_me)
    with pytest.raises(UserError, match="of 2 tasks, 2 killed, perhaps for lack of memory"):
        cluster.Executor("local", 2, processes=2).run(job)


def note_and_wait(number):
    Path("task").write_text(str(os.getpid()))
    time.sleep(300)


def start_a_task():
    encode.run_processes(note_and_wait, [0], 1)


@pytest.mark.slow
def test_tasks_end_with_the_command(tmp_path, monkeypatch):
    """A task that goes on could write into the folder of a later command."""
    monkeypatch.chdir(tmp_path)
    command = FORKS.Process(target=start_a_task)
    command.start()
    wait_until(lambda: Path("task").exists() and Path("task").read_text())
    task = int(Path("task").read_text())
    command.kill()
    command.join()
    wait_until(lambda: not is_alive(task))


def wait_until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def is_alive(process):
    """Whether it runs: it is not gone, and no zombie that nobody has waited for."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_tasks_that_were_left_behind_do_not_write_into_other_shards(texts):
    """As Slurm's, if the folder was removed, or only its manifest, and the command repeated with other files."""
    first = a_job("out")
    for stage in STAGES[:2]:
        getattr(first, stage)(None, 0, 1)
    first.cut(None, 0, 2)
    first_parts = {path: path.read_bytes() for path in first.folder.iterdir() if path.is_file()}
    (Path("out") / "manifest.json").unlink()
    others = ["texts/a.txt", "texts/d.jsonl"]
    make("one", others)
    second = a_job("out", paths=others)
    first.folder.mkdir()  # a download brings it back
    for path, content in first_parts.items():
        path.write_bytes(content)
    for stage in STAGES:
        getattr(first, stage)(None, 0, 1)
        getattr(second, stage)(None, 0, 1)
    shutil.rmtree(first.folder)
    assert files_in(Path("out")) == files_in(Path("one"))


def test_what_one_process_began_no_executor_continues(texts, monkeypatch):
    a_job("tasks")
    with pytest.raises(UserError, match="tasks was begun with --executor. Continue it so, or use another --output"):
        make("tasks")
    with pytest.raises(UserError, match="--shard-size was 2000 and is now 9"):
        make("tasks", executor=in_tasks(1), shard_size=9)
    real, numbers = shard_writer.write_new_shard, []

    def fails_at_last(*args, **options):
        numbers.append(args)
        if len(numbers) > 2:
            raise UserError("broken")
        return real(*args, **options)

    monkeypatch.setattr(shard_writer, "write_new_shard", fails_at_last)
    with pytest.raises(UserError, match="broken"):
        make("one")
    with pytest.raises(UserError, match="one was begun without --executor. Continue it so, or use another --output"):
        make("one", executor=in_tasks(1))


@pytest.mark.parametrize("lost", ["_val_000000.npy", "_train_000002.npy"])
def test_a_lost_shard_is_made_again_by_either(texts, lost):
    make("one")
    for executor in (None, in_tasks(2)):
        make("out", executor=in_tasks(1))
        next(Path("out").glob(f"*{lost}")).unlink()
        make("out", executor=executor)
        assert files_in(Path("out")) == files_in(Path("one"))


def test_nothing_is_left_of_a_corpus_without_text(texts):
    with pytest.raises(UserError, match="there is no text"):
        make("out", ["texts/b.txt"], in_tasks(1))
    assert not Path("out").exists()


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--tasks 3", "--tasks and --executor-options are for --executor"),
        ("--executor local --keep-downloads", "Leave out --keep-downloads"),
        ("--executor slurm --executor-options time", "--executor-options is 'time'. It must be NAME=VALUE."),
        ("--executor local --executor-options workers=2", "Use --workers for the number of tasks at once"),
        (
            "--executor slurm --executor-options time=1 partition=a speed=9",
            "unexpected keyword argument 'speed'. Correct",
        ),
        ("--executor slurm --executor-options time=1 tasks=9", "multiple values for keyword argument 'tasks'. Correct"),
        ("--executor slurm", "missing 2 required positional arguments: 'time' and 'partition'"),
    ],
)
def test_flags_that_do_not_fit(texts, capsys, flags, message):
    with pytest.raises(SystemExit):
        run_cli(lambda: fineweb.main(["--input", "texts", "--output", "out", *flags.split()]))
    assert message in capsys.readouterr().err and not Path("out").exists()


def test_only_files_can_be_divided(texts, monkeypatch):
    with pytest.raises(UserError, match=r"texts is not a list of files, which can be divided\. Use --input"):
        fineweb.make_shards(corpus_of(["a"]), "out", tokenizer="bytes", executor=in_tasks(1))
    monkeypatch.setattr(cluster.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install datatrove"):
        cluster.Executor("ray", 1)
    assert not Path("out").exists()


# ---- Slurm

SBATCH = """#!/bin/bash
# writes down the job, and prints its number as Slurm does
n=$(ls queue | wc -l); cp "${@: -1}" "queue/$n"; echo "$@" > "queue/$n.args"; echo "Submitted batch job $n"
"""
SRUN = '#!/bin/bash\nwhile [[ $1 == -* ]]; do [[ $1 == -n ]] && shift; shift; done\nexec "$@"\n'
SCONTROL = "#!/bin/bash\necho node1\n"
SQUEUE = """#!/bin/bash
[[ -f down ]] && echo "Unable to contact slurm controller" >&2 && exit 1
[[ -f running ]] && echo "$@" && exit 0
echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="Slurm has no Windows")
def test_slurm(texts, tmp_path, monkeypatch):
    """Jobs are submitted with their dependencies; in a wrong order they lose nothing, and in the right one make the same bytes."""
    for number in range(3):  # each larger than a part
        (texts / f"large_{number}.txt").write_text(f"{number}{number} " * 6_000_000)
    flags = ["--input", "texts", "--tokenizer", "bytes", "--shard-size", "2e7"]
    assert run_script("fineweb.py", *flags, "--output", "one", cwd=tmp_path).returncode == 0
    local = ["--output", "local", "--executor", "local", "--tasks", "3"]
    assert run_script("fineweb.py", *flags, *local, cwd=tmp_path).returncode == 0
    assert files_in(tmp_path / "local") == files_in(tmp_path / "one")
    (tmp_path / "bin").mkdir()
    for name, script in (("sbatch", SBATCH), ("srun", SRUN), ("scontrol", SCONTROL), ("squeue", SQUEUE)):
        (tmp_path / "bin" / name).write_text(script)
        (tmp_path / "bin" / name).chmod(0o755)
    path = os.pathsep.join([str(tmp_path / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]])
    monkeypatch.setenv("PATH", path)

    def command():
        done = run_script(
            "fineweb.py", *flags, "--output", "out", "--executor", "slurm", "--tasks", "2", "--executor-options",
            "partition=cpu", "time=4:00:00", "cpus_per_task=1", cwd=tmp_path,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    def submit():
        Path("queue").mkdir()
        *_, progress, last = ["", *command()]
        assert last == "submitted. The same command says later how far it is, or that the shards are complete."
        jobs = {}
        for job in sorted(Path("queue").glob("?")):
            script = job.read_text()
            assert "#SBATCH --partition=cpu" in script and "#SBATCH --time=4:00:00" in script
            if "merge_stats" not in script:
                jobs[next(stage for stage in STAGES if f"--job-name=shards_{stage}" in script)] = job
        arguments = {stage: job.with_suffix(".args").read_text() for stage, job in jobs.items()}
        assert list(jobs) == list(STAGES) and "--dependency" not in arguments["encode"]
        for before, stage in (("encode", "plan"), ("plan", "cut")):
            assert f"--dependency=afterany:{jobs[before].name} " in arguments[stage]
        assert "--array=0-1" in jobs["encode"].read_text() and "--array=0-0" in jobs["plan"].read_text()
        return jobs, progress

    def run(job, rank):
        variables = {"SLURM_ARRAY_TASK_ID": str(rank), "SLURM_NODELIST": "node1", "RUN_OFFSET": "0"}
        variables["PYTHONPATH"] = str(ROOT)  # what sbatch --export=ALL hands on
        done = subprocess.run(["bash", job], env=os.environ | variables, capture_output=True, text=True)
        return done.returncode, done.stdout + done.stderr

    def all_files():
        return {path: path.read_bytes() for path in Path("out").rglob("*") if path.is_file()}

    jobs, _ = submit()
    assert run(jobs["cut"], 0)[0] == 0
    code, output = run(jobs["plan"], 0)
    assert code != 0 and "was not encoded" in output
    assert run(jobs["encode"], 1)[0] == 0
    ids = ",".join(job.name for job in jobs.values())
    before = all_files()
    Path("running").touch()
    assert command()[-1] == f"jobs {ids} are queued or running, parts that are encoded: 2"
    Path("running").unlink()
    Path("down").touch()
    with pytest.raises(
        AssertionError, match=r"error: squeue failed \(Unable to contact slurm controller\)\. Run this later"
    ):
        command()
    Path("down").unlink()
    assert all_files() == before
    Path("queue").rename("first queue")
    jobs, progress = submit()
    assert progress == f"jobs {ids} have ended, parts that are encoded: 2"
    for stage, rank in (("encode", 1), ("encode", 0), ("plan", 0), ("cut", 1), ("cut", 0)):
        code, output = run(jobs[stage], rank)
        assert code == 0, output
    assert shards_of("out") == files_in(Path("one"))
