"""Data sets of the Hugging Face hub: lists of files, downloads, and two corpora, of .parquet files and of a stream."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from support.cli import UserError
from support.data.corpus import Batch, Corpus, Cursor, Piece, cursor_numbers, pack_pieces, slug, split_long_document
from support.data.download import RETRIED_STATUS, download
from support.data.readers import FileCorpus, fingerprint, record_text
from support.files import check_free_space

if TYPE_CHECKING:
    from huggingface_hub.hf_api import RepoFile

CONNECT_ATTEMPTS = 4  # before the first byte: seconds, because a user is waiting
READ_ATTEMPTS = 7  # without progress in between, once a run has made shards: minutes
MAX_HUB_DELAY = 60  # seconds between two attempts
T = TypeVar("T")


# -----------------------------------------------------------------------------
# Requests and downloads


@dataclass(frozen=True)
class HubFile:
    """A file of a data set. One of its checksums is known."""

    path: str
    size: int
    sha256: str | None
    git_blob: str | None


def current_revision(repository: str) -> str | None:
    """The newest commit of a data set.

    Raises:
        UserError: there is no such data set, or the hub cannot be reached.
    """
    from huggingface_hub import HfApi

    return _request_with_retries(lambda: HfApi().dataset_info(repository).sha, f"cannot open the data set {repository}")


def list_files(repository: str, revision: str | None, folder: str | None = None) -> list[HubFile]:
    """The files of a data set, or of a folder in it, in order of their paths.

    Raises:
        UserError: there is no such folder, or the hub cannot be reached.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import RepoFile

    def request() -> list[RepoFile]:
        tree = HfApi().list_repo_tree(repository, folder, recursive=True, revision=revision, repo_type="dataset")
        return [entry for entry in tree if isinstance(entry, RepoFile)]

    where = f"{repository}/{folder}" if folder else repository
    files = [
        HubFile(file.path, file.size, file.lfs.sha256 if file.lfs else None, None if file.lfs else file.blob_id)
        for file in _request_with_retries(request, f"cannot list the files of {where}")
    ]
    return sorted(files, key=lambda file: file.path)


def fetch_file(
    repository: str, revision: str | None, file: HubFile, path: Path, stop: threading.Event | None = None
) -> Path:
    """Downloads one file of a data set, or the rest of it. Fails when `stop` is set.

    Raises:
        UserError: the download failed or cannot be written.
    """
    from huggingface_hub import hf_hub_url
    from huggingface_hub.utils import build_hf_headers

    check_free_space(path.parent, file.size, f"download {file.path}")
    return download(
        hf_hub_url(repository, file.path, repo_type="dataset", revision=revision),
        path,
        sha256=file.sha256,
        git_blob=file.git_blob,
        headers=build_hf_headers(),
        resume=True,
        attempts=READ_ATTEMPTS,
        stop=stop,
    )


def _request_with_retries(request: Callable[[], T], failure: str) -> T:
    """The result of a request, which is repeated after transient errors."""
    for attempt in itertools.count(1):
        try:
            return request()
        except Exception as error:  # the classes of the hub's and of the HTTP library
            _wait_or_give_up(error, attempt, CONNECT_ATTEMPTS, failure)
    raise AssertionError("unreachable")


def _wait_or_give_up(error: Exception, attempt: int, max_attempts: int, failure: str) -> None:
    """Waits before the next attempt.

    Raises:
        UserError: another attempt would not help. The message starts with `failure`.
    """
    from huggingface_hub import errors

    status = getattr(getattr(error, "response", None), "status_code", None)
    refused = status is not None and 400 <= status < 500 and status not in RETRIED_STATUS
    wrong_name = refused or isinstance(error, (errors.HFValidationError, errors.EntryNotFoundError, ValueError))
    if wrong_name or isinstance(error, errors.OfflineModeIsEnabled) or attempt >= max_attempts:
        if wrong_name:
            advice = "Check its name, --name and --split"
        else:
            advice = "Check the network and run the same command again, or name files of your own with --input"
        raise UserError(f"{failure}: {hub_error_reason(error)}. {advice}.") from error
    delay = min(2.0**attempt, MAX_HUB_DELAY)
    print(f"warning: {hub_error_reason(error)}. Retrying in {delay:.0f} s.", file=sys.stderr, flush=True)
    time.sleep(delay)


def hub_error_reason(error: Exception) -> str:
    """A short description of an error of the Hugging Face hub, or of a library that uses it."""
    from huggingface_hub import errors

    if isinstance(error, errors.RepositoryNotFoundError):
        return "the Hugging Face hub has no public repository of that name"
    if isinstance(error, errors.HFValidationError):
        return "that is not a valid name on the Hugging Face hub"
    unreachable = (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled, ConnectionError)
    if isinstance(error, unreachable) or type(error).__module__.startswith("httpx"):
        return "the Hugging Face hub cannot be reached"
    return (str(error).strip() or repr(error)).split("\n")[0][:200].rstrip(".")


# -----------------------------------------------------------------------------
# .parquet files, of which only a few are on the disk at any time

FINEWEB_PREFIXES = {"HuggingFaceFW/fineweb-edu": "edufineweb", "HuggingFaceFW/fineweb": "fineweb"}  # of shard names


def fineweb_folder(config: str) -> str:
    """The folder of a FineWeb configuration, such as `sample-10BT`, `CC-MAIN-2024-10` (one crawl) or `default`."""
    if config.startswith("sample-"):
        return f"sample/{config.removeprefix('sample-')}"
    return "data" if config == "default" else f"data/{config}"


class HubParquet(FileCorpus):
    """The .parquet files of a FineWeb configuration. Each is downloaded while the one before is read, then removed."""

    def __init__(self, repository: str, config: str, text_field: str, download_folder: Path, keep: bool):
        self.name = f"{repository}/{config} [train]"
        self.prefix = FINEWEB_PREFIXES[repository]
        self.text_field, self.settings = text_field, {"text_field": text_field}
        self._repository, self._hub_folder = repository, fineweb_folder(config)
        self._download_folder, self._keep = download_folder, keep
        self._downloads: dict[int, Future[Path]] = {}
        self._closed = threading.Event()

    @functools.cached_property
    def _files(self) -> list[HubFile]:
        files = list_files(self._repository, self.revision, self._hub_folder)
        files = [file for file in files if file.path.endswith(".parquet")]
        if not files:
            raise UserError(f"{self._repository} has no .parquet files in {self._hub_folder}. Choose another --name.")
        return files

    def sizes(self) -> list[int]:
        return [file.size for file in self._files]

    def suffix(self, index: int) -> str | None:
        return ".parquet"

    def local_path(self, index: int) -> Path:
        path = self._start_download(index).result()
        if index + 1 < len(self._files):
            self._start_download(index + 1)
        return path

    def estimate_text_bytes(self) -> float | None:
        return 1.5 * sum(self.sizes())  # they are compressed

    def _download_path(self, index: int) -> Path:
        return self._download_folder / self._files[index].path.replace("/", "_")

    def _start_download(self, index: int) -> Future[Path]:
        if index not in self._downloads:
            future = self._downloads[index] = Future[Path]()

            def run() -> None:
                try:
                    file, path = self._files[index], self._download_path(index)
                    future.set_result(fetch_file(self._repository, self.revision, file, path, self._closed))
                except BaseException as error:
                    future.set_exception(error)

            # A daemon thread: Ctrl-C does not wait for two gigabytes. What was received is kept.
            threading.Thread(target=run, daemon=True).start()
        return self._downloads[index]

    def release(self, cursor: Cursor) -> None:
        if self._keep:
            return
        for index in range(cursor_numbers(cursor)[0]):
            with contextlib.suppress(OSError):
                self._download_path(index).unlink(missing_ok=True)

    def close(self) -> None:
        self._closed.set()  # with --max-tokens, a download that nobody needs may be in progress
        for future in self._downloads.values():
            with contextlib.suppress(UserError, TimeoutError):
                future.result(timeout=5)
        if self._keep:
            return
        with contextlib.suppress(OSError):
            for path in self._download_folder.glob(f"{self._hub_folder.replace('/', '_')}_*.parquet*"):
                path.unlink()
            self._download_folder.rmdir()  # succeeds only if it is empty


# -----------------------------------------------------------------------------
# Streamed data sets


class StreamedDataset(Corpus):
    """A text data set that the `datasets` library streams, from the hub or from a local folder of files.

    A cursor is a number of examples, the library's state after them, and an offset in characters in a long document.
    """

    def __init__(self, repository: str, config: str | None, split: str, text_field: str):
        full_name = repository if config is None else f"{repository}/{config}"
        self.name, self.prefix, self.settings = f"{full_name} [{split}]", slug(repository), {"text_field": text_field}
        self._repository, self._config, self._split, self._text_field = repository, config, split, text_field
        self._is_local = os.path.isdir(repository)
        if self._is_local:
            self.revision = self._fingerprint()

    def _fingerprint(self) -> str:
        return fingerprint(path for path in sorted(Path(self._repository).rglob("*")) if path.is_file())

    def has_changed(self) -> bool:
        return self._is_local and self._fingerprint() != self.revision

    def batches(self, cursor: Cursor | None = None) -> Iterator[Batch]:
        number, state, char = cursor or (0, None, 0)
        if not isinstance(number, int) or isinstance(state, int) or not isinstance(char, int):
            raise ValueError(f"not a cursor of a streamed data set: {cursor}")
        return pack_pieces(self._pieces(number, state, char), self.name)

    def _pieces(self, number: int, state: Mapping[str, object] | None, first_char: int) -> Iterator[Piece]:
        import datasets

        failures = 0
        while True:
            try:
                stream = datasets.load_dataset(
                    self._repository,
                    self._config,
                    split=self._split,
                    streaming=True,
                    revision=None if self._is_local else self.revision,
                )
                split_info = (getattr(stream.info, "splits", None) or {}).get(self._split)
                total = getattr(split_info, "num_examples", None)
                if state is not None:
                    stream.load_state_dict(state)
                for example in stream:
                    failures = 0
                    text = record_text(example, self._text_field, f"{self._repository}, example {number}")
                    fraction = (number + 1) / total if total else None
                    for char, part in split_long_document(text):
                        if char >= first_char:
                            yield Piece([number, state, char], part, continues=char > 0, fraction_read=fraction)
                    number, state, first_char = number + 1, stream.state_dict(), 0
                return
            except UserError:
                raise
            except Exception as error:  # the classes of the hub, of the HTTP library and of the data set's own code
                failures += 1
                if number:
                    failure = f"the stream of {self._repository} broke off after {number} examples"
                else:
                    failure = f"cannot open the data set {self._repository}"
                # datasets raises DatasetNotFoundError when the network fails; FileNotFoundError is about missing files.
                files_missing = isinstance(error, FileNotFoundError) and not isinstance(
                    error, datasets.exceptions.DatasetNotFoundError
                )
                max_attempts = READ_ATTEMPTS if number else CONNECT_ATTEMPTS
                if files_missing or self._is_local:
                    max_attempts = 1
                _wait_or_give_up(error, failures, max_attempts, failure)
