"""Data sets of the hub, from a local server that fails in many ways."""

import json
import os
import re
import shutil
import subprocess
import sys
import threading
import types
from pathlib import Path

import numpy as np
import pytest
from helpers import ROOT, wait_for
from hub_server import COMMIT, TEXTS, environment_of, expected_shards, npy, running_hub, start_fineweb
from shard_helpers import adversarial_texts, documents_of, files_in, set_batch_chars, tokens_in, valid_unicode

import fineweb
from support.cli import UserError
from support.data import cluster, hub, readers, shards

EDU = fineweb.FINEWEB_EDU
FLAGS = ["--tokenizer", "bytes", "--shard-size", "3000"]
PIPES = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}


@pytest.fixture
def server(monkeypatch, tmp_path):
    with running_hub(monkeypatch, tmp_path) as server:
        yield server


def test_without_a_source_it_is_fineweb_edu_and_finished_shards_need_no_hub(server, capsys):
    fineweb.main(FLAGS)
    assert tokens_in("edu_fineweb10B") == expected_shards(TEXTS)
    assert {p.name for p in Path("edu_fineweb10B").iterdir() if p.suffix != ".npy"} == {".lock", "manifest.json"}
    manifest = shards.read_manifest("edu_fineweb10B")
    assert (manifest["source"], manifest["revision"]) == (f"{EDU}/sample-10BT [train]", COMMIT)
    names = [shard["file"] for shard in manifest["shards"]]
    assert names[:2] == ["edufineweb_val_000000.npy", "edufineweb_train_000001.npy"]
    assert [path for path, _ in server.requests] == [f"sample/10BT/{i:03d}_00000.parquet" for i in range(3)]
    assert capsys.readouterr().out.endswith(f"documents: 300, shards: {len(names)}\n")
    server.httpd.shutdown()
    fineweb.main(FLAGS)
    assert len(server.requests) == 3


def test_other_configurations_by_name(server):
    for name, texts in (("sample-100BT", TEXTS[:50]), ("CC-MAIN-2024-10", TEXTS[50:80])):
        fineweb.main(["--name", name, *FLAGS])
        assert tokens_in(f"edu_fineweb{name.removeprefix('sample-').removesuffix('T')}") == expected_shards(texts)


# ---- failures


def test_transient_errors_of_every_kind_are_survived(server):
    server.failures += [500, "cut off", 429, "stall", "cut off", 503]
    fineweb.main(FLAGS)
    assert tokens_in("edu_fineweb10B") == expected_shards(TEXTS)
    ranges = [requested for path, requested in server.requests if path.endswith("000_00000.parquet")]
    assert any(ranges)  # what was received is kept


def test_after_a_failure_that_lasts_the_same_command_resumes(server):
    server.failures += [None] + [500] * 20
    with pytest.raises(UserError, match=r"cannot download .*001_00000.parquet.* run the same command again"):
        fineweb.main(FLAGS)
    finished = {path: path.stat().st_mtime_ns for path in Path("edu_fineweb10B").glob("*.npy")}
    assert finished
    server.failures.clear()
    server.commit = "f" * 40  # the data set has a new revision meanwhile, which is not for this folder
    fineweb.main(FLAGS)
    assert tokens_in("edu_fineweb10B") == expected_shards(TEXTS)
    assert all(path.stat().st_mtime_ns == stamp for path, stamp in finished.items())


def test_a_download_with_a_wrong_checksum_is_not_used(server):
    path = "sample/10BT/000_00000.parquet"
    tree = server.tree(server.repositories[EDU], "")
    server.tree = lambda files, folder, recursive: [e for e in tree if "10BT" in e["path"]]
    server.repositories[EDU][path] = server.repositories[EDU][path][:-9] + b"!" * 9
    with pytest.raises(UserError, match="wrong checksum"):
        fineweb.main(FLAGS)
    assert not list(Path().glob("*/*.npy")) and not list(Path().glob("*/downloads/**/000_00000.parquet"))


def test_a_disk_that_is_too_small_for_a_download(server, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: types.SimpleNamespace(free=100))
    for flags, folder in ((FLAGS, "edu_fineweb10B"), ([*FLAGS, "--max-tokens", "10"], "downloads")):
        with pytest.raises(UserError, match=f"{folder} has 0.0 MB free"):
            fineweb.main(flags)
    assert not server.requests


# ---- files come one ahead of the reader, and do not stay


def test_downloads_are_removed_after_their_last_shard_or_kept(server, monkeypatch):
    counts, atomic_write = [], shards.files.atomic_write

    def count_downloads(path, *options):
        counts.append(len(list(Path().glob("*/downloads/**/*.parquet"))))
        return atomic_write(path, *options)

    monkeypatch.setattr(shards.files, "atomic_write", count_downloads)
    fineweb.main(["--name", "sample-350BT", "--tokenizer", "bytes", "--shard-size", "500"])
    # of 8: one that is read, the next, and one of which not all tokens are in a shard yet
    assert 1 <= max(counts) <= 3 and not Path("edu_fineweb350B/downloads").exists()
    fineweb.main([*FLAGS, "--output", "other", "--keep-downloads"])
    kept = {str(path.relative_to("other/downloads")): path.read_bytes() for path in Path("other").rglob("*.parquet")}
    assert kept == {path: body for path, body in server.repositories[EDU].items() if "10BT" in path}


def test_the_next_file_is_downloaded_while_one_is_read(server, monkeypatch):
    read_row_group = readers._read_row_group

    def wait_for_the_next(path, *args):
        number = int(path.name[:3])
        assert wait_for(lambda: len(server.requests) >= min(3, number + 2))
        return read_row_group(path, *args)

    monkeypatch.setattr(readers, "_read_row_group", wait_for_the_next)
    monkeypatch.setattr("helpers.time.sleep", threading.Event().wait)
    fineweb.main(FLAGS)
    assert tokens_in("edu_fineweb10B") == expected_shards(TEXTS)


def test_with_enough_tokens_nobody_waits_for_a_download(server):
    server.failures += [None, "stall", "stall"]
    fineweb.main([*FLAGS, "--max-tokens", "5000"])
    assert not Path("edu_fineweb10B/downloads").exists() and shards.is_complete("edu_fineweb10B")
    assert sum(map(len, tokens_in("edu_fineweb10B"))) == 5000


def test_tasks_of_a_cluster_download_their_files_themselves(server, monkeypatch):
    def run_in_this_process(self, job, stage):
        self._datatrove(job, stage, self.tasks, workers=1).run()

    monkeypatch.setattr(cluster.Executor, "_run_stage", run_in_this_process)
    fineweb.main(FLAGS)
    server.requests.clear()
    fineweb.main([*FLAGS, "--output", "tasks", "--executor", "local", "--tasks", "2"])
    assert sorted(path for path, _ in server.requests) == [f"sample/10BT/{i:03d}_00000.parquet" for i in range(3)]
    assert [path for path in Path("tasks").iterdir() if path.is_dir()] == [Path("tasks/logs")]
    shutil.rmtree("tasks/logs")
    assert files_in(Path("tasks")) == files_in(Path("edu_fineweb10B"))


# ---- streams


@pytest.mark.slow
def test_a_stream_can_be_read_from_every_cursor(tmp_path, monkeypatch):
    set_batch_chars(monkeypatch, 100)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    texts = [text.replace("\r", "") for text in valid_unicode(adversarial_texts(3, 60))]
    (tmp_path / "set").mkdir()
    for i in range(3):
        lines = (json.dumps({"text": text}) + "\n" for text in texts[20 * i : 20 * i + 20])
        (tmp_path / "set" / f"train-{i}.jsonl").write_text("".join(lines))
    stream = hub.StreamedDataset(str(tmp_path / "set"), None, "train", "text")
    batches = list(stream.batches())
    assert documents_of(batches) == texts
    for i in range(0, len(batches), 7):
        rest = list(stream.batches(json.loads(json.dumps(batches[i].cursor))))
        assert [batch.texts() for batch in rest] == [batch.texts() for batch in batches[i:]]


def test_a_folder_that_is_a_data_set_is_streamed_and_is_another_source_when_edited(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "train.jsonl").write_text("".join(f'{{"story": "story {i}"}}\n' for i in range(30)))
    flags = "--dataset ./set --text-field story --tokenizer bytes --output out --shard-size 100".split()
    fineweb.main(flags)
    assert tokens_in("out") == expected_shards([f"story {i}" for i in range(30)], 100)
    os.utime("set/train.jsonl", (0, 0))
    with pytest.raises(UserError, match="another source or setting"):
        fineweb.main(flags)


# ---- in a process


@pytest.mark.slow
def test_a_data_set_of_the_hub_is_streamed(server, tmp_path):
    stories = {f"data/train-{i}.jsonl": json.dumps({"story": f"story {i}"}).encode() for i in range(9)}
    server.repositories["someone/stories"] = {"README.md": b"stories", **stories}
    server.failures += [None, 503]
    flags = ["--dataset", "someone/stories", "--text-field", "story", "--tokenizer", "bytes", "--shard-size", "20"]
    process = start_fineweb(server, tmp_path / "home", *flags, "--output", "out", **PIPES)
    _, errors = process.communicate(timeout=90)
    assert process.returncode == 0, errors
    assert tokens_in("out") == expected_shards([f"story {i}" for i in range(9)], 20)
    assert shards.read_manifest("out")["revision"] == COMMIT and 503 not in server.failures


def test_killed_while_it_downloads_the_same_command_resumes(server, tmp_path):
    server.failures += [None, "stall"]
    process = start_fineweb(server, tmp_path / "home", *FLAGS, stdout=subprocess.DEVNULL)
    while len(server.requests) < 2:
        assert process.poll() is None
        threading.Event().wait(0.01)
    process.kill()
    process.wait()
    server.failures.clear()
    process = start_fineweb(server, tmp_path / "home", *FLAGS, "--keep-downloads", **PIPES)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert tokens_in("edu_fineweb10B") == expected_shards(TEXTS)
    assert not list(Path("edu_fineweb10B/downloads").rglob("*.incomplete"))  # of the killed process


def test_ready_made_shards_are_downloaded_and_checked_as_the_docs_say(server, tmp_path, capsys):
    server.repositories["someone/shards"] = {
        "README.md": b"",
        "edufineweb_val_000000.npy": npy([50256, 5, 50256]),
        "edufineweb_train_000001.npy": npy(range(50000, 50257)),
    }
    for page in ("README.md", "docs/data.md"):
        text = (ROOT / page).read_text()
        download, check = re.search(r"^(hf download .*)\n(python fineweb\.py --check .*)$", text, re.M).groups()
        words = download.split("  ")[0].replace("NAME", "someone/shards").split()
        environment = environment_of(server, tmp_path / "home")
        subprocess.run([Path(sys.executable).with_name("hf"), *words[1:]], env=environment, check=True)
        folder = check.split()[3]
        fineweb.main(["--check", folder])
        assert "2 shards, 260 tokens (gpt2), well-formed; there is no manifest to compare" in capsys.readouterr().out
        train = Path(folder, "edufineweb_train_000001.npy")
        np.save(train, np.array([50257], np.uint16))
        with pytest.raises(UserError, match="has the id 50257"):
            fineweb.main(["--check", folder])
        shutil.rmtree(folder)
