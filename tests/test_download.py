"""Downloads of single files, from a server that fails in the ways it is told to."""

import http.server
import os
import subprocess
import threading

import pytest
from hub_server import git_blob

from support.cli import UserError
from support.data.download import download


@pytest.fixture
def server(monkeypatch):
    """URL and content of a file, what goes wrong with the next requests, and the number of requests so far."""
    failures, requests = [], []
    body = bytes(range(256)) * 1000

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            requests.append(self.path)
            failure = failures.pop(0) if failures else 200
            self.send_response(failure if isinstance(failure, int) else 200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body[:1000] if failure == "cut off" else body)

        def log_message(self, *_):
            pass

    httpd = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=lambda: httpd.serve_forever(poll_interval=0.01), daemon=True).start()
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    yield f"http://127.0.0.1:{httpd.server_port}/file.bin", body, failures, requests
    httpd.shutdown()
    httpd.server_close()


def test_a_download_survives_transient_errors_and_replaces_a_corrupt_file(server, tmp_path, capsys):
    url, body, failures, requests = server
    failures += [500, "cut off", 429]
    blob = git_blob(body)
    (tmp_path / "file").write_bytes(b"half")
    for path in (tmp_path / "file", tmp_path / "new" / "file"):
        assert download(url, path, blob).read_bytes() == body
    assert len(requests) == 5 and os.listdir(tmp_path / "new") == ["file"]
    first, *warnings = capsys.readouterr().err.splitlines()
    assert first.endswith("/file is not the expected file (wrong checksum). It is downloaded again.")
    assert warnings[0] == "warning: status 500. Retrying in 2 s."
    assert warnings[1].startswith("warning: no connection to the server.")
    download(url, path, blob)
    assert len(requests) == 5  # the file exists


@pytest.mark.parametrize(
    "failure, requests_made, message",
    [(404, 1, "status 404"), (503, 4, "status 503"), ("cut off", 4, "no connection")],
)
def test_a_failed_download_leaves_nothing(server, tmp_path, failure, requests_made, message):
    url, _, failures, requests = server
    failures += [failure] * 9
    with pytest.raises(UserError, match=message):
        download(url, tmp_path / "file", "0" * 40)
    assert len(requests) == requests_made and not os.listdir(tmp_path)


def test_a_file_with_a_wrong_checksum_is_not_kept(server, tmp_path):
    url, body, _, _ = server
    with pytest.raises(UserError, match="wrong checksum"):
        download(url, tmp_path / "file", "0" * 40)
    assert not os.listdir(tmp_path)
    (tmp_path / "same").write_bytes(body)
    command = ["git", "hash-object", tmp_path / "same"]
    blob = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    assert download(url, tmp_path / "file", blob).read_bytes() == body
