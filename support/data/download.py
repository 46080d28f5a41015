"""Downloads that end with the complete, verified file or leave nothing behind."""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from support import files
from support.cli import UserError

if TYPE_CHECKING:
    import requests

DEFAULT_ATTEMPTS = 4
TIMEOUT = (10, 30)  # seconds: to connect, and without receiving a byte
CHUNK_BYTES = 1 << 16  # written at a time; no more than this is lost when a connection breaks
MAX_RETRY_DELAY = 60  # seconds
RETRIED_STATUS = {408, 425, 429, 500, 502, 503, 504}


def download(
    url: str,
    path: str | os.PathLike[str],
    *,
    sha256: str | None = None,
    git_blob: str | None = None,
    headers: Mapping[str, str] | None = None,
    resume: bool = False,
    attempts: int | None = None,
    stop: threading.Event | None = None,
) -> Path:
    """Downloads `url` to `path`, unless that file exists already and has the right checksum.

    Args:
        sha256: expected SHA-256, in hexadecimal.
        git_blob: expected SHA-1 of a git blob, that is of `blob {size}\\0` and the content, in hexadecimal.
        resume: keep a partial download as `{path}.part` and request only the rest, now and in later runs. For URLs
            whose content never changes.
        attempts: attempts in a row that may receive nothing (default: DEFAULT_ATTEMPTS).
        stop: when another thread sets it, the download fails.

    Raises:
        UserError: the download failed, has a wrong checksum, or cannot be written.
    """
    path, headers, stop = Path(path), headers or {}, stop or threading.Event()
    attempts = attempts or DEFAULT_ATTEMPTS
    folder_is_new = not path.parent.exists()
    try:
        if path.exists() and _checksum_matches(path, sha256, git_blob):
            return path
        path.parent.mkdir(parents=True, exist_ok=True)
        if resume:
            part = path.with_name(f"{path.name}.part")
            part_existed = part.exists()
            _fetch_with_retries(url, part, headers, attempts, stop)
            if part_existed and not _checksum_matches(part, sha256, git_blob):
                part.unlink()  # its first bytes were wrong: start over
                _fetch_with_retries(url, part, headers, attempts, stop)
            _check_download(url, part, sha256, git_blob)
            files.sync(part)
            files.replace(part, path)
        else:
            with files.atomic_write(path, unique=True) as tmp:
                _fetch_with_retries(url, tmp, headers, attempts, stop)
                _check_download(url, tmp, sha256, git_blob)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}.", this_rank_only=True) from error
    finally:
        if folder_is_new:
            with contextlib.suppress(OSError):
                path.parent.rmdir()  # succeeds only if it is empty, as after a failure
    return path


def _check_download(url: str, path: Path, sha256: str | None, git_blob: str | None) -> None:
    """Removes a file with a wrong checksum and raises a UserError."""
    if not _checksum_matches(path, sha256, git_blob):
        path.unlink()
        raise UserError(f"{url} is not the expected file (wrong checksum). Try again later.", this_rank_only=True)


def _checksum_matches(path: Path, sha256: str | None, git_blob: str | None) -> bool:
    """Whether a file has the expected checksum, if one is known."""
    if sha256 is not None:
        return files.sha256_of(path) == sha256
    if git_blob is not None:
        content = path.read_bytes()
        return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest() == git_blob
    return True


def _fetch_with_retries(url: str, part: Path, headers: Mapping[str, str], attempts: int, stop: threading.Event) -> None:
    import requests

    failures = 0
    while True:
        size_before = _size_of(part)
        response: requests.Response | None = None
        try:
            _fetch(url, part, headers, stop)
            return
        except (requests.RequestException, ValueError) as error:  # ValueError: an invalid header
            reason, cause = _failure_reason(error), error
            if isinstance(error, requests.RequestException):
                response = error.response
        failures = 1 if _size_of(part) > size_before else failures + 1
        refused = response is not None and response.status_code not in RETRIED_STATUS
        if refused or failures >= attempts or stop.is_set():
            advice = "the name and your access to it" if refused else "the network and run the same command again"
            raise UserError(f"cannot download {url} ({reason}). Check {advice}.", this_rank_only=True) from cause
        time.sleep(_retry_delay(failures, response))


def _size_of(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _retry_delay(failures: int, response: requests.Response | None) -> float:
    """Seconds until the next attempt: doubled each time, or what a busy server asks for."""
    requested = "" if response is None else response.headers.get("Retry-After", "")
    return min(float(requested) if requested.isdecimal() else 2.0**failures, MAX_RETRY_DELAY)


def _failure_reason(error: Exception) -> str:
    """A short description of an error of requests, whose own messages are long."""
    import requests

    if not isinstance(error, requests.RequestException):
        return f"invalid request or response: {error}"
    if error.response is not None:
        return f"the server answered {error.response.status_code} {error.response.reason}"
    if isinstance(error, requests.Timeout):
        return "the server did not answer in time"
    if isinstance(error, requests.exceptions.ChunkedEncodingError):
        return "the connection broke off"
    return "no connection to the server"


def _fetch(url: str, part: Path, headers: Mapping[str, str], stop: threading.Event) -> None:
    """Fetches the rest of the file `part`, or all of it if the server does not support ranges."""
    import requests
    from tqdm import tqdm

    offset = _size_of(part)
    request = {**headers, "Accept-Encoding": "identity"} | ({"Range": f"bytes={offset}-"} if offset else {})
    with requests.get(url, stream=True, timeout=TIMEOUT, headers=request) as response:
        content_range = response.headers.get("Content-Range", "")
        if offset and response.status_code == 416:  # range not satisfiable
            if content_range.endswith(f"/{offset}"):
                return  # the file is complete
            part.unlink()  # longer than the file, so not a part of it
            return _fetch(url, part, headers, stop)
        response.raise_for_status()
        if response.status_code != 206 or not content_range.startswith(f"bytes {offset}-"):
            offset = 0
        total = offset + int(response.headers.get("Content-Length") or 0)  # requests raises if the body is shorter
        with (
            open(part, "ab" if offset else "wb") as file,
            tqdm(
                total=total or None,
                initial=offset,
                desc=Path(url).name,
                unit="B",
                unit_scale=True,
                leave=False,
                delay=1,
                disable=None,
            ) as bar,
        ):
            for chunk in response.iter_content(CHUNK_BYTES):
                if stop.is_set():
                    raise UserError(f"the download of {url} was stopped.")
                file.write(chunk)
                bar.update(len(chunk))
