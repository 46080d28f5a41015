"""A local server with the parts of the Hugging Face hub's interface that are used here. It can fail in several ways."""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import io
import json
import subprocess
import sys
import threading
import urllib.parse
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from helpers import ROOT
from shard_helpers import plain_bytes, plain_loop, set_batch_chars

COMMIT = "87f09149ef4734204d70ed1d046ddc9ca3f2b8f9"
TEXTS = [f"page {i}: " + "words and more of them. " * (i % 9) for i in range(300)]


README = b"""---
configs:
- {config_name: default, data_files: [{split: train, path: data/*/*}]}
- {config_name: sample-10BT, data_files: [{split: train, path: sample/10BT/*}]}
- {config_name: sample-100BT, data_files: [{split: train, path: sample/100BT/*}]}
- {config_name: sample-350BT, data_files: [{split: train, path: sample/350BT/*}]}
- {config_name: CC-MAIN-2024-10, data_files: [{split: train, path: data/CC-MAIN-2024-10/*}]}
---
about"""


class Hub:
    """A server of data sets and models, which are files by path.

    Attributes:
        failures: what goes wrong with the next requests for files: a status, "stall", "cut off", or None.
        requests: path and range of the requests for files, but for README.md.
    """

    def __init__(self, repositories: dict[str, dict[str, bytes]]):
        self.repositories = repositories
        self.failures: list[int | str | None] = []
        self.requests: list[tuple[str, str | None]] = []
        self.stalled = threading.Event()  # set: the connections that stall are closed
        self.commit = COMMIT
        self.httpd = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
        self.httpd.hub = self
        threading.Thread(target=lambda: self.httpd.serve_forever(poll_interval=0.01), daemon=True).start()
        self.url = f"http://127.0.0.1:{self.httpd.server_port}"

    def close(self) -> None:
        self.stalled.set()
        self.httpd.shutdown()
        self.httpd.server_close()

    def tree(self, files: dict[str, bytes], folder: str, recursive: bool = True) -> list[dict]:
        """What the hub lists of a folder."""
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


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    @property
    def hub(self) -> Hub:
        return self.server.hub

    def reply(self, status, body=b"", headers=()):
        self.send_response(status)
        for name, value in dict(headers, **{"Content-Length": len(body)}).items():
            self.send_header(name, str(value))
        self.end_headers()
        self.wfile.write(body)

    def dataset_path(self) -> str:
        """The path of a request; that of a model in the form of a data set's."""
        path = urllib.parse.unquote(self.path.split("?")[0]).replace("/api/models/", "/api/datasets/")
        path = path.replace("/revision/main", f"/revision/{COMMIT}").replace("/resolve/main/", f"/resolve/{COMMIT}/")
        return path if path.startswith(("/api/", "/datasets/")) else f"/datasets{path}"

    def do_HEAD(self):
        path = self.dataset_path()
        name, file = path.removeprefix("/datasets/").split(f"/resolve/{COMMIT}/")
        body = self.hub.repositories[name].get(file)
        if body is None:
            return self.reply(404, headers={"X-Error-Code": "EntryNotFound"})
        self.send_response(200)
        for header, value in {"X-Repo-Commit": COMMIT, "ETag": git_blob(body), "Content-Length": len(body)}.items():
            self.send_header(header, str(value))
        self.end_headers()

    def do_POST(self):
        name = self.path.removeprefix("/api/datasets/").split("/paths-info/")[0]
        paths = urllib.parse.parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())["paths"]
        files = self.hub.repositories[name]
        self.reply(200, json.dumps([e for e in self.hub.tree(files, "") if e["path"] in paths]).encode())

    def do_GET(self):
        path = self.dataset_path()
        for name, files in self.hub.repositories.items():
            if path.startswith(f"/api/datasets/{name}/tree/{COMMIT}"):
                folder = path.removeprefix(f"/api/datasets/{name}/tree/{COMMIT}").strip("/")
                tree = self.hub.tree(files, folder, "recursive=false" not in self.path)
                return self.reply(200, json.dumps(tree).encode())
            if path in (f"/api/datasets/{name}", f"/api/datasets/{name}/revision/{COMMIT}"):
                siblings = [{"rfilename": file} for file in files]
                info = {"id": name, "sha": self.hub.commit, "siblings": siblings}
                return self.reply(200, json.dumps(info).encode())
            if path.startswith(f"/datasets/{name}/resolve/{COMMIT}/"):
                return self.file(path.split(COMMIT + "/")[1], files)
        return self.reply(404, headers={"X-Error-Code": "RepoNotFound"})

    def file(self, path, files):
        body = files[path]
        if path == "README.md":
            return self.reply(200, body)
        self.hub.requests.append((path, self.headers["Range"]))
        failure = self.hub.failures.pop(0) if self.hub.failures else None
        if isinstance(failure, int):
            return self.reply(failure, headers={"Retry-After": "7"} if failure == 429 else {})
        first, last = (self.headers["Range"] or "bytes=0-").removeprefix("bytes=").split("-")
        start = int(first)
        rest = body[start : int(last) + 1 if last else None]
        self.send_response(206 if self.headers["Range"] else 200)
        self.send_header("Content-Length", str(len(rest)))
        self.send_header("Content-Range", f"bytes {start}-{start + len(rest) - 1}/{len(body)}")
        self.end_headers()
        if failure is None:
            self.wfile.write(rest)
            return None
        self.wfile.write(rest[: len(rest) // 2])
        self.wfile.flush()
        if failure == "stall":
            self.hub.stalled.wait(30)
        self.close_connection = True
        return None

    def log_message(self, *_):
        pass


def git_blob(body: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(body) + body).hexdigest()


def parquet(texts: list[str]) -> bytes:
    """A .parquet file, with noise in it so that half of it is many packets."""
    sink = pa.BufferOutputStream()
    noise = [np.random.default_rng(i).bytes(2500) for i in range(len(texts))]
    pa.parquet.write_table(pa.table({"noise": noise, "text": texts}), sink, row_group_size=7)
    return sink.getvalue().to_pybytes()


def npy(tokens, dtype=np.uint16) -> bytes:
    sink = io.BytesIO()
    np.save(sink, np.array(tokens, dtype=dtype))
    return sink.getvalue()


def fineweb_files() -> dict[str, bytes]:
    """FineWeb-Edu in small. sample-10BT has TEXTS."""
    files = {f"sample/10BT/{i:03d}_00000.parquet": parquet(TEXTS[100 * i : 100 * i + 100]) for i in range(3)}
    files |= {f"sample/350BT/{i:03d}_00000.parquet": parquet(TEXTS[30 * i : 30 * i + 30]) for i in range(8)}
    files |= {"sample/100BT/000_00000.parquet": parquet(TEXTS[:50]), "README.md": README}
    return files | {"data/CC-MAIN-2024-10/train-00000.parquet": parquet(TEXTS[50:80])}


@contextlib.contextmanager
def running_hub(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Iterator[Hub]:
    """A hub with FineWeb-Edu that the client uses, without delays and with short time-outs, from `folder`."""
    hub = Hub({"HuggingFaceFW/fineweb-edu": fineweb_files()})
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.url)
    template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("datasets.config.HF_ENDPOINT", hub.url)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", False)
    for cache in ("datasets.config.HF_DATASETS_CACHE", "huggingface_hub.constants.HF_HUB_CACHE"):
        monkeypatch.setattr(cache, str(folder / "hub cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DOWNLOAD_TIMEOUT", 0.5)
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 50)
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    set_batch_chars(monkeypatch, 1000)
    monkeypatch.chdir(folder)
    try:
        yield hub
    finally:
        hub.close()


def start_fineweb(hub: Hub, home: Path, *flags: str, **options: object) -> subprocess.Popen[str]:
    """Starts fineweb.py as a user does, with this hub."""
    command = [sys.executable, str(ROOT / "fineweb.py"), *flags]
    return subprocess.Popen(command, env=environment_of(hub, home), text=True, **options)


def environment_of(hub: Hub, home: Path) -> dict[str, str]:
    """The variables of a process that takes this hub for Hugging Face's."""
    environment = {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "PATH": "", "NO_PROXY": "127.0.0.1"}
    return environment | {"HF_HOME": str(home)}


def expected_shards(texts: list[str], size: int = 3000) -> list[list[int]]:
    """The tokens of `bytes` shards."""
    return plain_loop(texts, plain_bytes, 256, size)
