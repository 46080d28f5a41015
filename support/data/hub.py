"""Data sets of the Hugging Face hub, as two corpora: FineWeb's .parquet files, and any data set as a stream."""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast

from support.cli import DISK_ERRORS, UserError, warn
from support.data.corpus import Batch, Corpus, Cursor, Piece, pack_pieces, slug, split_long_document
from support.data.download import RETRIED_STATUS
from support.data.readers import FileCorpus, fingerprint, record_text
from support.files import check_free_space, sha256_of

if TYPE_CHECKING:
    from huggingface_hub.hf_api import RepoFile

CONNECT_ATTEMPTS = 4  # before the first byte: seconds, because a user is waiting
DOWNLOAD_ATTEMPTS = 7  # once a run has made shards: minutes. Within each, the hub's library retries too
T = TypeVar("T")


# -----------------------------------------------------------------------------
# Requests


def current_revision(repository: str) -> str | None:
    """The newest commit of a data set.

    Raises:
        UserError: there is no such data set, or the hub cannot be reached.
    """
    from huggingface_hub import HfApi

    failure = f"cannot open the data set {repository}"
    return _request(lambda: HfApi().dataset_info(repository).sha, failure, CONNECT_ATTEMPTS)


def _request(request: Callable[[], T], failure: str, attempts: int) -> T:
    """The result of a request, which is repeated after transient errors: the hub's library does not repeat all of them.

    Raises:
        UserError: it failed for good. The message starts with `failure`.
        OSError: the disk is full, or cannot be written.
    """
    from huggingface_hub.errors import OfflineModeIsEnabled

    attempt = 0
    while True:
        attempt += 1
        try:
            return request()
        except Exception as error:  # the classes of the hub's and of the HTTP library
            if isinstance(error, UserError) or (isinstance(error, OSError) and error.errno in DISK_ERRORS):
                raise
            if _is_refused(error) or isinstance(error, OfflineModeIsEnabled) or attempt == attempts:
                raise _user_error(failure, error) from error
            delay = 2**attempt  # seconds
            warn(f"{hub_error_reason(error)}. Retrying in {delay} s.")
            time.sleep(delay)


def _user_error(failure: str, error: Exception) -> UserError:
    advice = "Check the network and run the same command again, or name files of your own with --input"
    if _is_refused(error):
        advice = "Check its name, --name and --split"
    return UserError(f"{failure}: {hub_error_reason(error)}. {advice}.")


def _is_refused(error: Exception) -> bool:
    """Whether another attempt would fail, too: there is no such data set, file or split."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    return isinstance(error, ValueError) or (
        status is not None and 400 <= status < 500 and status not in RETRIED_STATUS
    )


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
        self._downloaded: set[str] = set()
        self._early_download: threading.Thread | None = None  # of the next file
        self._reads_all = True

    @functools.cached_property
    def _hub_files(self) -> list[RepoFile]:
        from huggingface_hub import HfApi
        from huggingface_hub.hf_api import RepoFile

        name, folder = self._repository, self._hub_folder
        entries = _request(
            lambda: list(
                HfApi().list_repo_tree(name, folder, recursive=True, revision=self.revision, repo_type="dataset")
            ),
            f"cannot list the files of {name}/{folder}",
            attempts=1,  # the library repeats this one
        )
        found = [entry for entry in entries if isinstance(entry, RepoFile) and entry.path.endswith(".parquet")]
        if not found:
            raise UserError(f"{name} has no .parquet files in {folder}. Choose another --name.")
        return sorted(found, key=lambda file: file.path)

    def files(self) -> list[tuple[Path, int]]:
        return [(self._download_folder / file.path, file.size) for file in self._hub_files]

    def wait_for(self, index: int) -> None:
        if self._early_download:
            self._early_download.join()
        else:  # the library starts a file again of which a killed process had a part
            for part in self._download_folder.glob(".cache/**/*.incomplete"):
                part.unlink()
        file = self._hub_files[index]
        _request(lambda: self._download(file), f"cannot download {file.path}", DOWNLOAD_ATTEMPTS)
        if self._reads_all and index + 1 < len(
            self._hub_files
        ):  # a daemon thread: Ctrl-C does not wait for two gigabytes
            next_file = self._hub_files[index + 1]
            self._early_download = threading.Thread(target=self._try_download, args=(next_file,), daemon=True)
            self._early_download.start()

    def _try_download(self, file: RepoFile) -> None:
        with contextlib.suppress(Exception):  # `wait_for` repeats it, and reports what is wrong
            self._download(file)

    def _download(self, file: RepoFile) -> None:
        """Downloads a file, unless that was done. The library resumes after a broken connection."""
        from huggingface_hub import hf_hub_download

        if file.path in self._downloaded:
            return
        name, folder = self._repository, self._download_folder
        check_free_space(folder, file.size, f"download {file.path}")
        path = hf_hub_download(name, file.path, repo_type="dataset", revision=self.revision, local_dir=folder)
        if file.lfs and sha256_of(Path(path)) != file.lfs.sha256:
            os.unlink(path)
            raise OSError("it is not the expected file (wrong checksum)")
        self._downloaded.add(file.path)

    def _row_ranges(self, index: int) -> list[tuple[int, int | None]]:
        return [(0, None)]  # it is not here

    def for_task(self, folder: Path) -> FileCorpus:
        corpus = copy.copy(self)
        corpus._download_folder, corpus._downloaded, corpus._reads_all = folder / "downloads", set(), False
        return corpus

    def estimate_text_bytes(self) -> float:
        return 1.5 * sum(size for _, size in self.files())  # they are compressed

    def release(self, cursor: Cursor) -> None:
        index = cast(Sequence[int], cursor)[0]
        for path, _ in self.files()[: 0 if self._keep else index]:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)

    def close(self) -> None:
        if not self._keep:
            shutil.rmtree(self._download_folder, ignore_errors=True)


# -----------------------------------------------------------------------------
# Streamed data sets


class StreamedDataset(Corpus):
    """A text data set that the `datasets` library streams, from the hub or from a local folder of files.

    The library repeats requests that fail. A cursor is a number of examples, the library's state after them, and an
    offset in characters in a long document.
    """

    def __init__(self, repository: str, config: str | None, split: str, text_field: str):
        full_name = repository if config is None else f"{repository}/{config}"
        self.name, self.prefix, self.settings = f"{full_name} [{split}]", slug(repository), {"text_field": text_field}
        self._repository, self._config, self._split, self._text_field = repository, config, split, text_field
        if os.path.isdir(repository):
            self.revision = fingerprint(path for path in sorted(Path(repository).rglob("*")) if path.is_file())

    def batches(self, cursor: Cursor | None = None) -> Iterator[Batch]:
        number, state, char = cast(tuple[int, Mapping[str, object] | None, int], cursor or (0, None, 0))
        return pack_pieces(self._pieces(number, state, char), self.name)

    def _pieces(self, number: int, state: Mapping[str, object] | None, first_char: int) -> Iterator[Piece]:
        import datasets

        try:
            stream = datasets.load_dataset(
                self._repository, self._config, split=self._split, streaming=True, revision=self.revision
            )
            split_info = (getattr(stream.info, "splits", None) or {}).get(self._split)
            total = getattr(split_info, "num_examples", None)
            if state is not None:
                stream.load_state_dict(state)
            for example in stream:
                text = record_text(example, self._text_field, f"{self._repository}, example {number}")
                fraction = (number + 1) / total if total else None
                for char, part in split_long_document(text):
                    if char >= first_char:
                        yield Piece([number, state, char], part, continues=char > 0, fraction_read=fraction)
                number, state, first_char = number + 1, stream.state_dict(), 0
        except UserError:
            raise
        except Exception as error:  # the classes of the hub, of the HTTP library and of the data set's own code
            failure = f"cannot open the data set {self._repository}"
            if number:
                failure = f"the stream of {self._repository} broke off after {number} examples"
            raise _user_error(failure, error) from error
