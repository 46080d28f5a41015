"""Downloads that either end as a whole, checked file or leave nothing behind."""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
import time
from pathlib import Path
from typing import Any

from support.cli import UserError

ATTEMPTS = 4
TIMEOUT = (10, 30)  # seconds: to connect, and without a byte
CHUNK = 1 << 16  # bytes that are written at a time, and lost at most when a connection breaks off
LONGEST_PAUSE = 60  # seconds between two attempts
RETRIED_STATUS = {408, 425, 429, 500, 502, 503, 504}


def download(
    url: str,
    path: str | os.PathLike,
    *,
    sha256: str | None = None,
    git_blob: str | None = None,
    headers: dict[str, str] | None = None,
    resume: bool = False,
    attempts: int | None = None,
    stop: threading.Event | None = None,
) -> Path:
    """Fetches `url` into the file `path`, unless it is there already and right.

    The status is checked, silence times out, passing trouble is tried again with growing pauses, and the file gets
    its name only when it is whole and its checksum is right: `sha256` in hexadecimal, or `git_blob`, the SHA-1 that
    git gives a file (of `blob {size}\\0` and the content). With `resume`, which is for content that never changes at
    that address, a part that came is kept as `{path}.part` and only the rest is asked for, now and in later runs. It
    ends as a failure when another thread sets `stop`.

    Raises:
        UserError: the file cannot be had, is not the expected one, or cannot be written.
    """
    path = Path(path)
    part = path.with_name(f"{path.name}.part" if resume else f"{path.name}.{os.getpid()}.part")
    new_folder = not path.parent.exists()
    try:
        if path.exists() and _right(path, sha256, git_blob):
            return path
        path.parent.mkdir(parents=True, exist_ok=True)
        while True:
            new = not part.exists()
            _fetch_with_retries(url, part, headers or {}, attempts or ATTEMPTS, stop or threading.Event())
            if _right(part, sha256, git_blob):
                break
            part.unlink()
            if new:  # else it was an earlier run's part that was not right
                raise UserError(
                    f"{url} is not the file we know (wrong checksum). Try again later.", this_rank_only=True
                )
        os.replace(part, path)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}.", this_rank_only=True) from error
    finally:
        with contextlib.suppress(OSError):
            if not resume:
                part.unlink(missing_ok=True)
            if new_folder:
                path.parent.rmdir()  # only if it is empty, as after a failure
    return path


def _fetch_with_retries(url: str, part: Path, headers: dict[str, str], attempts: int, stop: threading.Event) -> None:
    import requests  # here and not above: most runs download nothing

    failures = 0
    while True:
        had = part.stat().st_size if part.exists() else 0
        try:
            _fetch(url, part, headers, stop)
            return
        except (requests.RequestException, ValueError) as error:  # the latter of an address or a header
            trouble = error
        response = getattr(trouble, "response", None)
        failures = 1 if part.exists() and part.stat().st_size > had else failures + 1
        final = response is not None and response.status_code not in RETRIED_STATUS
        if final or failures >= attempts or stop.is_set():
            advice = "the name and your access to it" if final else "the network and run the same command again"
            raise UserError(
                f"cannot download {url} ({_reason(trouble)}). Check {advice}.", this_rank_only=True
            ) from trouble
        time.sleep(_pause(failures, response))


def _pause(failures: int, response: Any) -> float:
    """Seconds before the next attempt: doubled every time, or what a busy server asks for."""
    asked = "" if response is None else response.headers.get("Retry-After", "")
    return min(float(asked) if asked.isdecimal() else 2.0**failures, LONGEST_PAUSE)


def _reason(trouble: Exception) -> str:
    """One of requests' errors in few words; its own are long and name what nobody asked for."""
    import requests

    response = getattr(trouble, "response", None)
    if response is not None:
        return f"the server answered {response.status_code} {response.reason}"
    if isinstance(trouble, requests.Timeout):
        return "the server did not answer in time"
    if isinstance(trouble, requests.exceptions.ChunkedEncodingError):
        return "the connection broke off"
    if not isinstance(trouble, requests.RequestException):
        return f"the server answered nonsense: {trouble}"
    return "no connection to the server"


def _fetch(url: str, part: Path, headers: dict[str, str], stop: threading.Event) -> None:
    """Fetches what is missing of the file `part`; if the server begins at the beginning, so does the file."""
    import requests
    from tqdm import tqdm

    had = part.stat().st_size if part.exists() else 0
    asked = headers | {"Accept-Encoding": "identity"} | ({"Range": f"bytes={had}-"} if had else {})
    with requests.get(url, stream=True, timeout=TIMEOUT, headers=asked) as response:
        if had and response.status_code == 416:  # there is no rest
            if response.headers.get("Content-Range", "").endswith(f"/{had}"):
                return
            part.unlink()  # longer than the file: not a part of it
            return _fetch(url, part, headers, stop)
        response.raise_for_status()
        if response.status_code != 206 or not response.headers.get("Content-Range", "").startswith(f"bytes {had}-"):
            had = 0
        length = int(response.headers.get("Content-Length") or 0)  # a body shorter than that is an error of requests
        options = {"unit": "B", "unit_scale": True, "desc": Path(url).name, "disable": None, "leave": False}
        with open(part, "ab" if had else "wb") as file, tqdm(total=length + had or None, initial=had, **options) as bar:
            for chunk in response.iter_content(CHUNK):
                if stop.is_set():
                    raise UserError(f"the download of {url} was stopped.")
                file.write(chunk)
                bar.update(len(chunk))
            file.flush()
            os.fsync(file.fileno())


def _right(path: Path, sha256: str | None, git_blob: str | None) -> bool:
    """Whether a file has the checksum that is known of it, if one is."""
    if sha256 is not None:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == sha256
    if git_blob is not None:
        digest = hashlib.sha1(b"blob %d\0" % path.stat().st_size)
        digest.update(path.read_bytes())
        return digest.hexdigest() == git_blob
    return True


def hub_trouble(error: Exception) -> str:
    """Why the Hugging Face hub, or a library on top of it, did not give something; in words for a user."""
    from huggingface_hub import errors

    if isinstance(error, errors.RepositoryNotFoundError):
        return "the Hugging Face hub has none of that name that is public"
    if isinstance(error, errors.HFValidationError):
        return "the Hugging Face hub has no such names"
    unreachable = (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled, ConnectionError)
    if isinstance(error, unreachable) or type(error).__module__.startswith("httpx"):
        return "the Hugging Face hub cannot be reached"
    return (str(error).strip() or repr(error)).split("\n")[0][:200].rstrip(".")
