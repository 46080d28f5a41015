"""Downloads single files: the file is complete and verified, or nothing is left behind."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path

from support import files, startup
from support.cli import UserError, describe_error

ATTEMPTS = 4
TIMEOUT = (10, 30)  # seconds: to connect, and to wait for the next byte
RETRIED_STATUS = {408, 425, 429, 500, 502, 503, 504}


def download(url: str, path: Path, git_blob: str) -> Path:
    """Downloads `url` to `path`, unless that file exists already and has the right checksum.

    Args:
        git_blob: the expected hash, as `git hash-object` computes it: SHA-1 of `blob {size}\\0` and the content, in hex.

    Raises:
        UserError: the download failed or has the wrong checksum, or the file cannot be written.
    """
    try:
        if path.exists() and _git_blob(path) == git_blob:
            return path
        path.parent.mkdir(parents=True, exist_ok=True)
        with files.atomic_write(path, unique=True) as tmp:
            startup.show(f"downloading {Path(url).name} ...")
            try:
                _fetch_with_retries(url, tmp)
            finally:
                startup.show("")
            if _git_blob(tmp) != git_blob:
                problem = f"{url} is not the expected file (wrong checksum). Try again later."
                raise UserError(problem, this_rank_only=True)
    except OSError as error:
        raise UserError(f"cannot write {path}: {describe_error(error, path)}.", this_rank_only=True) from error
    return path


def _git_blob(path: Path) -> str:
    content = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def _fetch_with_retries(url: str, path: Path) -> None:
    import requests

    for attempt in range(1, ATTEMPTS + 1):
        try:
            response = requests.get(url, timeout=TIMEOUT)
            response.raise_for_status()
            path.write_bytes(response.content)
            return
        except requests.RequestException as error:
            answer = error.response
            refused = answer is not None and answer.status_code not in RETRIED_STATUS
            if refused or attempt == ATTEMPTS:
                reason = "no connection to the server" if answer is None else f"status {answer.status_code}"
                problem = f"cannot download {url} ({reason}). Check the network and run the same command again."
                raise UserError(problem, this_rank_only=True) from error
            time.sleep(2**attempt)
