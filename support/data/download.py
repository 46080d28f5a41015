"""Downloads: retries of requests, and single files, which are complete and verified, or absent."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from support import files, startup
from support.cli import DISK_ERRORS, UserError, describe_error, warn

ATTEMPTS = 4  # for seconds only, because a user is waiting
TIMEOUT = (10, 30)  # seconds: to connect, and to wait for the next byte
RETRIED_STATUS = {408, 425, 429}  # and 500 or more
T = TypeVar("T")


def with_retries(request: Callable[[], T], reason: Callable[[Exception], str], attempts: int = ATTEMPTS) -> T:
    """Returns the result of a request. After an error that may be transient, warns with its reason and tries again."""
    for attempt in range(1, attempts):
        try:
            return request()
        except Exception as error:  # each HTTP library defines its own
            if is_refused(error) or getattr(error, "errno", None) in DISK_ERRORS:
                raise
            warn(f"{reason(error)}. Retrying in {2**attempt} s.")
            time.sleep(2**attempt)
    return request()


def is_refused(error: Exception) -> bool:
    """Returns whether a request would fail again, because there is nothing of that name."""
    status = getattr(getattr(error, "response", None), "status_code", 500)
    return isinstance(error, UserError | ValueError) or (status < 500 and status not in RETRIED_STATUS)


def download(url: str, path: Path, git_blob: str) -> Path:
    """Downloads `url` to `path`, unless that file exists already and has the right checksum.

    Args:
        git_blob: the expected hash, as `git hash-object` computes it: SHA-1 of `blob {size}\\0` and the content, in hex.

    Raises:
        UserError: the download failed or has the wrong checksum, or the file cannot be written.
    """
    import requests

    def fetch() -> bytes:
        response = requests.get(url, timeout=TIMEOUT)
        response.raise_for_status()
        return response.content

    try:
        if path.exists():
            if _git_blob(path.read_bytes()) == git_blob:
                return path
            warn(f"{path} is not the expected file (wrong checksum). It is downloaded again.")
        path.parent.mkdir(parents=True, exist_ok=True)
        with files.atomic_write(path, unique=True) as tmp:
            startup.show(f"downloading {Path(url).name} ...")
            try:
                content = with_retries(fetch, _reason)
            finally:
                startup.show("")
            if _git_blob(content) != git_blob:
                problem = f"{url} is not the expected file (wrong checksum). Try again later."
                raise UserError(problem, this_rank_only=True)
            tmp.write_bytes(content)
    except requests.RequestException as error:
        problem = f"cannot download {url} ({_reason(error)}). Check the network and run the same command again."
        raise UserError(problem, this_rank_only=True) from error
    except OSError as error:
        raise UserError(f"cannot write {path}: {describe_error(error, path)}.", this_rank_only=True) from error
    return path


def _reason(error: Exception) -> str:
    answer = getattr(error, "response", None)
    return "no connection to the server" if answer is None else f"status {answer.status_code}"


def _git_blob(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
