"""Data sets of the hub, from a local server that fails in many ways."""

import json
import re
import shutil
import subprocess
import sys
import threading
import types
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest
from helpers import ROOT, wait_for
from hub_server import COMMIT, TEXTS, environment_of, expected_shards, npy, parquet, running_hub, start_fineweb
from shard_helpers import files_in, tokens_in

import fineweb
from support.cli import UserError
from support.data import hub, shards, text_files

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
    assert {p.name for p in Path("edu_fineweb10B").iterdir() if p.suffix != ".npy"} == {
        ".gpt2.lock",
        "manifest.json",
        "tokenizer.json",
    }
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
    tree, listed = server.tree, dict(server.repositories[EDU])
    server.tree = lambda files, folder, recursive=True: tree(listed, folder, recursive)
    server.repositories[EDU][path] = server.repositories[EDU][path][:-9] + b"!" * 9
    with pytest.raises(UserError, match="wrong checksum"):
        fineweb.main(FLAGS)
    assert not list(Path().glob("*/*.npy")) and not list(Path().glob("*/.downloads/**/000_00000.parquet"))


def test_a_disk_that_is_too_small_for_a_download(server, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: types.SimpleNamespace(free=100))
    for flags, folder in ((FLAGS, "edu_fineweb10B"), ([*FLAGS, "--max-tokens", "10"], ".downloads")):
        with pytest.raises(UserError, match=f"{folder} has 0.0 MB free"):
            fineweb.main(flags)
    assert not server.requests


# ---- files come one ahead of the reader, and do not stay


def test_downloads_are_removed_when_they_are_encoded(server, monkeypatch):
    counts, atomic_write = [], shards.files.atomic_write

    def count_downloads(path, **options):
        counts.append(len(list(Path().glob("*/.downloads/**/*.parquet"))))
        return atomic_write(path, **options)

    monkeypatch.setattr(shards.files, "atomic_write", count_downloads)
    fineweb.main(["--name", "sample-350BT", "--tokenizer", "bytes", "--shard-size", "500"])
    # of 8: one that is read, and the next
    assert 1 <= max(counts) <= 2 and not Path("edu_fineweb350B/.downloads").exists()


def test_the_next_file_is_downloaded_while_one_is_read(server, monkeypatch):
    read_parquet = text_files.read_parquet

    def wait_for_the_next(path, *args):
        assert wait_for(lambda: len(server.requests) >= min(3, int(path.name[:3]) + 2))
        return read_parquet(path, *args)

    monkeypatch.setattr(text_files, "read_parquet", wait_for_the_next)
    monkeypatch.setattr("helpers.time.sleep", threading.Event().wait)
    fineweb.main(FLAGS)
    assert tokens_in("edu_fineweb10B") == expected_shards(TEXTS)


def test_no_file_is_downloaded_in_advance_that_the_limit_leaves_out(server):
    tokens_in_the_first = sum(len(text.encode()) + 1 for text in TEXTS[:100])
    fineweb.main([*FLAGS, "--max-tokens", str(tokens_in_the_first + 10)])
    assert [path for path, _ in server.requests] == [f"sample/10BT/{i:03d}_00000.parquet" for i in range(2)]


def test_with_enough_tokens_nobody_waits_for_a_download(server, monkeypatch):
    monkeypatch.setattr(hub, "TEXT_BYTES", 0)  # as for other data sets, of whose text no size is known
    server.failures += [None, "stall", "stall"]
    fineweb.main([*FLAGS, "--max-tokens", "5000"])
    assert not Path("edu_fineweb10B/.downloads").exists() and shards.is_complete("edu_fineweb10B")
    assert sum(map(len, tokens_in("edu_fineweb10B"))) == 5000


def test_several_commands_download_their_files_themselves(server, monkeypatch):
    """Each into a folder of its own: the library removes what it takes for leftovers."""
    fineweb.main(FLAGS)
    server.requests.clear()
    download, folders = huggingface_hub.hf_hub_download, []
    monkeypatch.setattr(
        huggingface_hub,
        "hf_hub_download",
        lambda *args, **more: folders.append(more["local_dir"]) or download(*args, **more),
    )
    for share in ("2/2", "1/2"):
        fineweb.main([*FLAGS, "--output", "shared", "--only-parts", share])
    assert sorted(path for path, _ in server.requests) == [f"sample/10BT/{i:03d}_00000.parquet" for i in range(3)]
    fineweb.main([*FLAGS, "--output", "shared"])
    assert len(server.requests) == 3 and len(set(folders)) == 2
    assert files_in(Path("shared")) == files_in(Path("edu_fineweb10B"))


# ---- any data set


STORIES = [f"story {i}" for i in range(9)]


@pytest.fixture
def stories(server):
    """Data sets in files of several kinds."""
    lines = [json.dumps({"story": story}) + "\n" for story in STORIES]
    server.repositories["someone/lines"] = {f"data/train-{i}.jsonl": line.encode() for i, line in enumerate(lines)}
    server.repositories["someone/texts"] = {"train.txt": "##".join(STORIES).encode(), "test.txt": b"the test"}
    server.repositories["someone/tables"] = {"train.csv": b"text\n" + "\n".join(STORIES).encode()}
    configs = b"---\nconfigs:\n- {config_name: a, data_files: 'x/*'}\n- {config_name: b, data_files: 'y/*'}\n---\n"
    server.repositories["someone/two"] = {
        "README.md": configs,
        "x/0.parquet": parquet(TEXTS),
        "y/0.parquet": parquet(STORIES),
    }
    return server


def test_any_data_set_of_text_files(stories):
    flags = ["--tokenizer", "bytes", "--shard-size", "20", "--output"]
    fineweb.main(["--dataset", "someone/lines", "--text-field", "story", *flags, "lines"])
    assert tokens_in("lines") == expected_shards(STORIES, 20)
    fineweb.main(["--dataset", "someone/texts", "--document-separator", "##", *flags, "texts"])
    assert tokens_in("texts") == expected_shards(STORIES, 20)
    fineweb.main(["--dataset", "someone/texts", "--split", "test", *flags, "test"])
    assert tokens_in("test") == [list(b"t"), [256, *b"the tes"]]  # the last tenth is held out
    fineweb.main(["--dataset", "someone/two", "--name", "b", *flags, "two"])
    assert tokens_in("two") == expected_shards(STORIES, 20)
    manifest = shards.read_manifest("two")
    assert (manifest["source"], manifest["revision"]) == ("someone/two/b [train]", COMMIT)


@pytest.mark.parametrize(
    "flags, message",
    [
        (
            "someone/tables",
            r"has \.csv files, not \.txt, .*load_dataset\('someone/tables', split='train', revision='\w+'\)",
        ),
        ("someone/two --name b --document-separator ##", "divides .txt files, and there is none. Leave it out"),
        ("someone/texts --split validation", "no split 'validation'. Choose --split from train, test"),
        ("someone/two", "cannot open the data set someone/two: .*a.*b.* --name"),
        ("someone/two --name c", "cannot open the data set someone/two: .*'c'"),
        ("someone/none", "the Hugging Face hub has no public repository of that name"),
        ("someone/texts --revision old", "cannot open the data set someone/texts"),
    ],
)
def test_a_data_set_that_cannot_be_read(stories, flags, message):
    with pytest.raises(UserError, match=message):
        fineweb.main(["--dataset", *flags.split(), "--tokenizer", "bytes", "--output", "out"])
    assert not Path("out").exists()


# ---- in a process


@pytest.mark.slow
def test_killed_while_it_downloads_the_same_command_resumes(server, tmp_path):
    server.failures += [None, "stall"]
    process = start_fineweb(server, tmp_path / "home", *FLAGS, stdout=subprocess.DEVNULL)
    while len(server.requests) < 2:
        assert process.poll() is None
        threading.Event().wait(0.01)
    process.kill()
    process.wait()
    server.failures.clear()
    process = start_fineweb(server, tmp_path / "home", *FLAGS, **PIPES)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert tokens_in("edu_fineweb10B") == expected_shards(TEXTS)
    assert not Path("edu_fineweb10B/.downloads").exists()  # with what the killed process left


def test_ready_made_shards_are_downloaded_and_checked_as_the_docs_say(server, tmp_path, capsys):
    server.repositories["someone/shards"] = {
        "README.md": b"",
        "edufineweb_val_000000.npy": npy([50256, 5, 50256]),
        "edufineweb_train_000001.npy": npy(range(50000, 50257)),
    }
    text = (ROOT / "docs" / "data.md").read_text()
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
