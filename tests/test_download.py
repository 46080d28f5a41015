"""Downloads, from a server that fails in the ways it is told to."""

import hashlib
import http.server
import os
import subprocess
import threading

import pytest

from support.cli import UserError
from support.data import download as download_module
from support.data.download import download


@pytest.fixture
def server(monkeypatch):
    """URL and content of a file, what goes wrong with the next requests, and the list of requests and pauses."""
    failures, events = [], []
    body = bytes(range(256)) * 1000

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            events.append(self.path)
            failure = failures.pop(0) if failures else 200
            self.send_response(failure if isinstance(failure, int) else 200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body[:1000] if failure == "cut off" else body)

        def log_message(self, *_):
            pass

    httpd = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=lambda: httpd.serve_forever(poll_interval=0.01), daemon=True).start()
    monkeypatch.setattr(download_module.time, "sleep", lambda seconds: events.append(seconds))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    yield f"http://127.0.0.1:{httpd.server_port}/file.bin", body, failures, events
    httpd.shutdown()
    httpd.server_close()


def test_a_download_survives_transient_errors(server, tmp_path):
    url, body, failures, events = server
    failures += [500, "cut off", 429]
    sha256 = hashlib.sha256(body).hexdigest()
    path = download(url, tmp_path / "deep" / "file", sha256=sha256)
    assert path.read_bytes() == body and os.listdir(path.parent) == ["file"]
    assert events == ["/file.bin", 2, "/file.bin", 4, "/file.bin", 8, "/file.bin"]
    download(url, path, sha256=sha256)
    assert len(events) == 7  # no request: the file exists


@pytest.mark.parametrize(
    "failure, requests, message",
    [(404, 1, "answered 404 Not Found"), (503, 4, "answered 503"), ("cut off", 4, "the connection broke off")],
)
def test_a_failed_download_leaves_nothing(server, tmp_path, failure, requests, message):
    url, _, failures, events = server
    failures += [failure] * 9
    for path in (tmp_path / "file", tmp_path / "new" / "file"):
        events.clear()
        with pytest.raises(UserError, match=message):
            download(url, path)
        assert events.count("/file.bin") == requests and not os.listdir(tmp_path)
        failures[:] = [failure] * 9


def test_a_corrupt_file_is_downloaded_again(server, tmp_path):
    url, body, _, events = server
    (tmp_path / "file").write_bytes(b"half")
    assert download(url, tmp_path / "file", sha256=hashlib.sha256(body).hexdigest()).read_bytes() == body
    assert events == ["/file.bin"]


def test_a_file_with_a_wrong_checksum_is_not_kept(server, tmp_path):
    url, body, _, _ = server
    for resume in (False, True):
        with pytest.raises(UserError, match="wrong checksum"):
            download(url, tmp_path / "file", sha256="0" * 64, resume=resume)
        assert not os.listdir(tmp_path)
    (tmp_path / "same").write_bytes(body)
    command = ["git", "hash-object", tmp_path / "same"]
    blob = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    assert download(url, tmp_path / "file", git_blob=blob).read_bytes() == body


def test_a_server_without_ranges_replaces_the_part_of_an_earlier_run(server, tmp_path):
    url, body, _, events = server
    (tmp_path / "file.part").write_bytes(b"?" * (len(body) + 1))  # the server does not support ranges
    sha256 = hashlib.sha256(body).hexdigest()
    assert download(url, tmp_path / "file", sha256=sha256, resume=True).read_bytes() == body
    assert os.listdir(tmp_path) == ["file"] and events == ["/file.bin"]
