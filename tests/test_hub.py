"""Data sets of the hub, from a local server that has its ways: stalls, cuts off, 429 and 500."""

import hashlib
import http.server
import json
import subprocess
import sys
import threading
import urllib.parse
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from conftest import ROOT
from test_fineweb import contents, plain_loop, utf8_or_replaced

import fineweb
from support import corpus, download, hub, shards
from support.cli import UserError

EDU = fineweb.FINEWEB_EDU
COMMIT = "87f09149ef4734204d70ed1d046ddc9ca3f2b8f9"


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def reply(self, status, body=b"", headers=()):
        self.send_response(status)
        for name, value in dict(headers, **{"Content-Length": len(body)}).items():
            self.send_header(name, str(value))
        self.end_headers()
        self.wfile.write(body)

    def do_HEAD(self):
        path = urllib.parse.unquote(self.path)
        name, file = path.removeprefix("/datasets/").split(f"/resolve/{COMMIT}/")
        body = self.server.hub.repositories[name].get(file)
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{git_blob(body or b"")}"', "Accept-Ranges": "bytes"}
        self.send_response(200 if body is not None else 404)
        for header, value in (headers | ({} if body is None else {"Content-Length": len(body)})).items():
            self.send_header(header, str(value))
        if body is None:
            self.send_header("X-Error-Code", "EntryNotFound")
        self.end_headers()

    def do_POST(self):
        name = self.path.removeprefix("/api/datasets/").split("/paths-info/")[0]
        asked = self.rfile.read(int(self.headers["Content-Length"])).decode()
        wanted = json.loads(asked)["paths"] if asked.startswith("{") else urllib.parse.parse_qs(asked)["paths"]
        files = self.server.hub.repositories[name]
        self.reply(200, json.dumps([e for e in self.server.hub.tree(files, "") if e["path"] in wanted]).encode())

    def do_GET(self):
        path = urllib.parse.unquote(self.path.split("?")[0])
        for name, files in self.server.hub.repositories.items():
            if path.startswith(f"/api/datasets/{name}/tree/{COMMIT}"):
                folder = path.removeprefix(f"/api/datasets/{name}/tree/{COMMIT}").strip("/")
                return self.reply(
                    200, json.dumps(self.server.hub.tree(files, folder, "recursive=false" not in self.path)).encode()
                )
            if path in (f"/api/datasets/{name}", f"/api/datasets/{name}/revision/{COMMIT}"):
                siblings = [{"rfilename": file} for file in files]
                info = {"id": name, "sha": self.server.hub.commit, "siblings": siblings}
                return self.reply(200, json.dumps(info).encode())
            if path.startswith(f"/datasets/{name}/resolve/{COMMIT}/"):
                return self.file(path.split(COMMIT + "/")[1], files)
        self.reply(404, headers={"X-Error-Code": "RepoNotFound"})

    def file(self, path, files):
        self.server.hub.asked.append((path, self.headers["Range"]))
        body = files[path]
        trouble = self.server.hub.troubles.pop(0) if self.server.hub.troubles else None
        if isinstance(trouble, int):
            return self.reply(trouble, headers={"Retry-After": "7"} if trouble == 429 else {})
        if trouble == "silence":
            threading.Event().wait(0.5)
            self.close_connection = True
            return None
        first, last = (
            (self.headers["Range"] if self.server.hub.ranges and self.headers["Range"] else "bytes=0-")
            .removeprefix("bytes=")
            .split("-")
        )
        start = int(first)
        rest = body[start : int(last) + 1 if last else None]
        self.send_response(206 if self.headers["Range"] and self.server.hub.ranges else 200)
        self.send_header("Content-Length", str(len(rest)))
        self.send_header("Content-Range", f"bytes {start}-{start + len(rest) - 1}/{len(body)}")
        self.end_headers()
        if trouble is None:
            self.wfile.write(rest)
            return None
        self.wfile.write(rest[: len(rest) // 2])
        self.wfile.flush()
        if trouble == "stall":
            threading.Event().wait(1.5)  # time.sleep is stood in for
        self.close_connection = True
        return None

    def log_message(self, *_):
        pass


class Hub:
    """What the hub answers about data sets, in the parts of its interface that are used here."""

    def __init__(self, repositories: dict[str, dict[str, bytes]]):
        self.repositories = repositories
        self.troubles: list = []  # what goes wrong with the next requests for files: a status, "stall", "cut off"
        self.asked: list[tuple[str, str | None]] = []  # paths of files, and the range of bytes
        self.commit, self.ranges = COMMIT, True
        self.httpd = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.httpd.hub = self
        threading.Thread(target=self.httpd.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.httpd.server_port}"

    def tree(self, files, folder, recursive=True):
        listed, folders = [], set()
        for path, body in files.items():
            if not path.startswith(f"{folder}/" if folder else ""):
                continue
            inner = path.removeprefix(f"{folder}/")
            if "/" in inner and not recursive:
                folders.add(path.removesuffix(inner) + inner.split("/")[0])
                continue
            entry = {"type": "file", "path": path, "size": len(body), "oid": git_blob(body)}
            if not path.endswith(".json"):
                entry["lfs"] = {"oid": hashlib.sha256(body).hexdigest(), "size": len(body), "pointerSize": 130}
            listed.append(entry)
        return listed + [{"type": "directory", "path": path, "oid": "0" * 40} for path in sorted(folders)]


def git_blob(body):
    return hashlib.sha1(b"blob %d\0" % len(body) + body).hexdigest()


def parquet(texts):
    sink = pa.BufferOutputStream()
    noise = [np.random.default_rng(i).bytes(2500) for i in range(len(texts))]  # what is cut off is many packets long
    pa.parquet.write_table(pa.table({"noise": noise, "text": texts}), sink, row_group_size=7)
    return sink.getvalue().to_pybytes()


TEXTS = [f"page {i}: " + "words and more of them. " * (i % 9) for i in range(300)]


@pytest.fixture
def server(monkeypatch, tmp_path):
    files = {f"sample/10BT/{i:03d}_00000.parquet": parquet(TEXTS[100 * i : 100 * i + 100]) for i in range(3)}
    files |= {f"sample/350BT/{i:03d}_00000.parquet": parquet(TEXTS[30 * i : 30 * i + 30]) for i in range(8)}
    files |= {"sample/100BT/000_00000.parquet": parquet(TEXTS[:50]), "README.md": b"about"}
    files |= {"data/CC-MAIN-2024-10/train-00000.parquet": parquet(TEXTS[50:80])}
    found = Hub({EDU: files})
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", found.url)
    template = found.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(download, "TIMEOUT", (1, 0.5))
    monkeypatch.setattr(download, "CHUNK", 50)
    found.pauses = []
    monkeypatch.setattr(download.time, "sleep", lambda seconds: found.pauses.append(seconds))
    monkeypatch.setattr(corpus, "BATCH_CHARS", 1000)
    monkeypatch.chdir(tmp_path)
    yield found
    found.httpd.shutdown()
    found.httpd.server_close()


FLAGS = ["--tokenizer", "bytes", "--shard-size", "3000"]


def expected(texts, size=3000):
    return plain_loop(texts, utf8_or_replaced, 256, size)


def tokens_of(folder):
    return [tokens for _, _, tokens in contents(Path(folder))]


def test_without_a_source_it_is_fineweb_edu(server, capsys):
    fineweb.main(FLAGS)
    assert tokens_of("edu_fineweb10B") == expected(TEXTS)
    assert {p.name for p in Path("edu_fineweb10B").iterdir() if p.suffix != ".npy"} == {".lock", "manifest.json"}
    manifest = shards.read_manifest("edu_fineweb10B")
    assert (manifest["source"], manifest["revision"]) == (f"{EDU}/sample-10BT [train]", COMMIT)
    names = [shard["file"] for shard in manifest["shards"]]
    assert names[:2] == ["edufineweb_val_000000.npy", "edufineweb_train_000001.npy"]
    assert not Path("edu_fineweb10B/downloads").exists()
    assert [path for path, _ in server.asked] == [f"sample/10BT/{i:03d}_00000.parquet" for i in range(3)]
    assert capsys.readouterr().out.endswith(f"documents: 300, shards: {len(names)}\n")


@pytest.mark.parametrize(
    "name, folder, texts",
    [("sample-100BT", "edu_fineweb100B", TEXTS[:50]), ("CC-MAIN-2024-10", "edu_finewebCC-MAIN-2024-10", TEXTS[50:80])],
)
def test_other_sizes_by_name(server, name, folder, texts):
    fineweb.main(["--name", name, "--tokenizer", "bytes", "--shard-size", "500"])
    assert tokens_of(folder) == expected(texts, 500)


def test_trouble_of_every_kind_is_overcome(server):
    server.troubles += [500, "cut off", 429, "stall", "cut off", 503]
    fineweb.main(FLAGS)
    assert tokens_of("edu_fineweb10B") == expected(TEXTS)
    first = [found for path, found in server.asked if path.endswith("000_00000.parquet")]
    assert first[:3] == [None, None, first[2]] and first[2] == first[3]  # 500, cut off, 429: the rest, and again
    starts = [int(found.removeprefix("bytes=").rstrip("-")) for found in first[2:]]
    assert starts == sorted(starts) and starts[0] > 0  # what came was kept
    assert 7 in server.pauses  # as the server asked


def test_a_hub_that_stays_away_ends_the_run_and_the_same_command_goes_on(server):
    server.troubles += [None] + ["cut off"] + [500] * 20
    with pytest.raises(
        UserError, match=r"cannot download .*001_00000.parquet \(the server answered 500 .* run the same command again"
    ):
        fineweb.main(FLAGS)
    made = {p: p.stat().st_mtime_ns for p in Path("edu_fineweb10B").glob("*.npy")}
    assert made and len(list(Path("edu_fineweb10B/downloads").glob("*.part"))) == 1
    server.troubles.clear()
    server.asked.clear()
    server.commit = "f" * 40  # the data set has changed meanwhile: not for this folder
    fineweb.main(FLAGS)
    assert tokens_of("edu_fineweb10B") == expected(TEXTS)
    assert all(p.stat().st_mtime_ns == stamp for p, stamp in made.items())
    assert all("001_00000" not in path or found for path, found in server.asked)  # only the rest of it


def test_downloads_are_removed_behind_the_last_shard_or_kept(server, monkeypatch):
    seen = []
    write = shards._write
    monkeypatch.setattr(
        shards, "_write", lambda *p: seen.append(len(list(Path().glob("*/downloads/*.parquet")))) or write(*p)
    )
    fineweb.main(["--name", "sample-350BT", "--tokenizer", "bytes", "--shard-size", "500"])
    # of 8: one being read, one coming, one of which not all is in a shard yet
    assert 1 <= max(seen) <= 3 and not Path("edu_fineweb350B/downloads").exists()
    fineweb.main([*FLAGS, "--output", "other", "--keep-downloads"])
    assert [p.read_bytes() for p in sorted(Path("other/downloads").iterdir())] == [
        body for path, body in sorted(server.repositories[EDU].items()) if "10BT" in path
    ]


def test_the_next_file_comes_while_one_is_read(server, monkeypatch):
    asked = []
    texts = corpus.RowGroups.texts

    def slowly(self):
        threading.Event().wait(0.02)
        asked.append((self.place[0], len(server.asked)))
        return texts(self)

    monkeypatch.setattr(corpus.RowGroups, "texts", slowly)
    fineweb.main(FLAGS)
    assert (0, 2) in asked and (1, 3) in asked


def test_with_enough_tokens_the_file_that_comes_is_given_up(server):
    server.troubles += [None, "stall", "stall"]
    fineweb.main([*FLAGS, "--max-tokens", "5000"])
    assert not Path("edu_fineweb10B/downloads").exists() and shards.complete("edu_fineweb10B")
    assert sum(map(len, tokens_of("edu_fineweb10B"))) == 5000


def test_a_server_that_knows_no_ranges_begins_anew(server):
    server.ranges = False
    server.troubles += ["cut off", None, "cut off"]
    fineweb.main(FLAGS)
    assert tokens_of("edu_fineweb10B") == expected(TEXTS)


def test_a_silent_server_is_left(server, monkeypatch):
    server.troubles += ["stall"] * 2
    begin = len(server.pauses)
    fineweb.main(FLAGS)
    assert server.pauses[begin:][:1] == [2] and tokens_of("edu_fineweb10B") == expected(TEXTS)
    monkeypatch.setattr(download, "TIMEOUT", (1, 0.2))
    server.repositories["a/b"] = {"x_train_000001.npy": npy(range(9999))}
    server.troubles += ["silence"] * 20
    with pytest.raises(UserError, match="the server did not answer in time"):
        fineweb.main(["--shards-from", "a/b", "--output", "out"])


def test_finished_shards_need_no_hub(server):
    fineweb.main(FLAGS)
    server.httpd.shutdown()
    server.asked.clear()
    fineweb.main(FLAGS)
    assert not server.asked


def test_a_download_that_is_not_the_file_is_not_used(server, monkeypatch):
    path = "sample/10BT/000_00000.parquet"
    tree = server.tree(server.repositories[EDU], "")
    server.tree = lambda files, folder, recursive: [e for e in tree if "10BT" in e["path"]]
    server.repositories[EDU][path] = server.repositories[EDU][path][:-9] + b"!" * 9
    with pytest.raises(UserError, match="is not the file we know"):
        fineweb.main(FLAGS)
    assert not list(Path().glob("*/*.npy")) and not list(Path().glob("*/downloads/*0_00000.parquet*"))


def test_no_room_for_a_download(server, monkeypatch):
    import types

    monkeypatch.setattr(hub.shutil, "disk_usage", lambda path: types.SimpleNamespace(free=100))
    with pytest.raises(UserError, match="edu_fineweb10B has 0.0 MB free"):
        fineweb.main(FLAGS)
    assert not server.asked


# ---- ready-made shards


def npy(tokens, dtype=np.uint16):
    import io

    sink = io.BytesIO()
    np.save(sink, np.array(tokens, dtype=dtype))
    return sink.getvalue()


@pytest.fixture
def ready_made(server):
    theirs = {f"edufineweb_train_{i:06d}.npy": npy(range(50256 - i, 50257)) for i in (1, 2, 3)}
    theirs |= {"edufineweb_val_000000.npy": npy([50256, 5, 50256])}
    server.repositories["someone/shards"] = {"README.md": b"", **theirs}
    return theirs


def test_ready_made_shards_are_fetched(server, ready_made):
    server.troubles += ["cut off", 500]
    fineweb.main(["--shards-from", "someone/shards", "--output", "out"])
    assert {p.name: p.read_bytes() for p in Path("out").glob("*.npy")} == ready_made
    manifest = shards.read_manifest("out")
    assert (manifest["tokenizer"], manifest["revision"], manifest["source"]) == (
        "gpt2",
        COMMIT,
        "shards of someone/shards",
    )
    assert [(s["file"][11:-4], s["tokens"], s["documents"]) for s in manifest["shards"]] == [
        ("val_000000", 3, 2), ("train_000001", 2, 1), ("train_000002", 3, 1), ("train_000003", 4, 1),
    ]  # fmt: skip
    assert len(shards.verify("out")) == 4
    server.asked.clear()
    fineweb.main(["--shards-from", "someone/shards", "--output", "out"])
    assert not server.asked


def test_only_as_many_ready_made_shards_as_asked_for(server, ready_made):
    fineweb.main(["--shards-from", "someone/shards", "--output", "out", "--max-tokens", "4"])
    assert [s["file"][11:-4] for s in shards.read_manifest("out")["shards"]] == ["val_000000", "train_000001"]


def test_ready_made_shards_go_on_where_they_broke_off(server, ready_made):
    server.troubles += [None, None, "cut off"] + [404]
    with pytest.raises(UserError, match="answered 404"):
        fineweb.main(["--shards-from", "someone/shards", "--output", "out"])
    server.asked.clear()
    fineweb.main(["--shards-from", "someone/shards", "--output", "out"])
    assert {p.name: p.read_bytes() for p in Path("out").glob("*.npy")} == ready_made
    assert [path for path, _ in server.asked] == ["edufineweb_train_000002.npy", "edufineweb_train_000003.npy"]
    assert server.asked[0][1]  # the rest of it


def test_shards_that_we_published_keep_their_tokenizer(server, tmp_path):
    fineweb.make_shards(corpus.Documents("demo", lambda: TEXTS), "demo", tokenizer="bytes", shard_size=9000)
    server.repositories["someone/demo"] = {
        f"deep/er/{p.name}": p.read_bytes() for p in Path("demo").iterdir() if p.suffix
    }
    fineweb.main(["--shards-from", "someone/demo", "--output", "out"])
    assert contents(Path("out")) == contents(Path("demo")) and shards.read_manifest("out")["tokenizer"] == "bytes"
    with pytest.raises(UserError, match="has bytes tokens, its manifest says"):
        fineweb.main(["--shards-from", "someone/demo", "--output", "again", "--tokenizer", "gpt2"])
    files = server.repositories["someone/demo"]
    half = {path: body for path, body in files.items() if not path.endswith("_000002.npy")}
    other = {path: body[:-1] + b"!" if path.endswith("_000002.npy") else body for path, body in files.items()}
    for name, wrong in (("someone/half", half), ("someone/other", other)):
        server.repositories[name] = wrong
        with pytest.raises(UserError, match=r"has no demo_train_000002\.npy such as its manifest lists"):
            fineweb.main(["--shards-from", name, "--output", "wrong"])
        assert not Path("wrong").exists()


@pytest.mark.parametrize(
    "files, message",
    [
        (
            {"a.bin": b"", "b.txt": b""},
            r"has no shards such as name_train_000001.npy, but files of the kinds .bin, .txt",
        ),
        (
            {"a/x_train_000001.npy": b"", "b/x_train_000001.npy": b""},
            "in several folders. Choose one with --name: a, b",
        ),
        (
            {"x_train_000001.npy": npy([1, 2], np.uint32)},
            "holds 1-dimensional uint32, not .* That is how someone/bad has it",
        ),
        ({"x_train_000001.npy": npy([1, 50257])}, "has the id 50257 at offset 1, beyond the vocabulary .* That is how"),
        ({"x_train_000001.npy": b"text"}, "is not a readable .npy file .* That is how"),
        ({"x_train_000001.npy": npy([1]), "manifest.json": b"[]"}, "is not a manifest of shards"),
    ],
)
def test_bad_ready_made_shards(server, files, message):
    server.repositories["someone/bad"] = files
    with pytest.raises(UserError, match=message):
        fineweb.main(["--shards-from", "someone/bad", "--output", "out"])
    assert not list(Path().glob("out/*.npy"))


# ---- as a user runs it


def run_it(server, tmp_path, *flags, **options):
    environment = {"HF_ENDPOINT": server.url, "HF_HUB_OFFLINE": "0", "PATH": "", "NO_PROXY": "127.0.0.1"}
    environment |= {"HF_HOME": str(tmp_path / "home")}
    return options.pop("by", subprocess.run)(
        [sys.executable, str(ROOT / "fineweb.py"), *flags], env=environment, **options
    )


def test_a_data_set_of_the_hub_is_streamed(server, tmp_path):
    stories = {f"data/train-{i}.jsonl": json.dumps({"story": f"story {i}"}).encode() for i in range(9)}
    server.repositories["someone/stories"] = {"README.md": b"stories", **stories}
    server.troubles += [None, 503]
    flags = ["--dataset", "someone/stories", "--text-field", "story", "--tokenizer", "bytes", "--shard-size", "20"]
    done = run_it(server, tmp_path, *flags, "--output", "out", capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr
    assert tokens_of("out") == expected([f"story {i}" for i in range(9)], 20)
    assert shards.read_manifest("out")["revision"] == COMMIT and 503 not in server.troubles


def test_killed_while_it_downloads_the_same_command_goes_on(server, tmp_path):
    server.troubles += [None, "stall"]
    process = run_it(server, tmp_path, *FLAGS, by=subprocess.Popen, stdout=subprocess.DEVNULL)
    while len(server.asked) < 2 or not any(p.stat().st_size for p in Path().glob("*/downloads/*.part")):
        assert process.poll() is None
        threading.Event().wait(0.01)
    process.kill()
    process.wait()
    server.troubles.clear()
    done = run_it(server, tmp_path, *FLAGS, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert tokens_of("edu_fineweb10B") == expected(TEXTS)
    assert any(found for path, found in server.asked if "001_00000" in path)
