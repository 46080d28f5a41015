"""The files of a data set on the Hugging Face hub, each downloaded when it is needed and removed once it is encoded."""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from support.cli import DISK_ERRORS, UserError
from support.data.download import ATTEMPTS, is_refused, with_retries
from support.data.text_files import (
    TEXT_TYPES,
    Corpus,
    Part,
    Piece,
    TextFiles,
    check_separator,
    group_by_size,
    slug,
    text_suffix,
)
from support.files import check_free_space, sha256_of

if TYPE_CHECKING:
    from huggingface_hub.hf_api import RepoFile

DOWNLOAD_ATTEMPTS = 7  # for minutes: nobody waits; the hub's library also retries within each attempt
T = TypeVar("T")


# -----------------------------------------------------------------------------
# Requests


def _request(request: Callable[[], T], failure: str, attempts: int = ATTEMPTS) -> T:
    """Returns the result of a request. Retries after every transient error; the hub's library retries only after some.

    Raises:
        UserError: it failed for good. The message starts with `failure`.
        OSError: the disk is full, or cannot be written to.
    """
    from huggingface_hub import is_offline_mode

    try:
        return with_retries(request, hub_error_reason, 1 if is_offline_mode() else attempts)
    except Exception as error:  # the hub's library and the HTTP library define their own exceptions
        if isinstance(error, UserError) or getattr(error, "errno", None) in DISK_ERRORS:
            raise
        advice = "Check the network and run the same command again, or name files of your own with --input"
        if is_refused(error):
            advice = "Check the data set's name, --name, --split and --revision"
        raise UserError(f"{failure}: {hub_error_reason(error)}. {advice}.") from error


def hub_error_reason(error: Exception) -> str:
    """Describes an error from the Hugging Face hub, or from a library that uses it."""
    from huggingface_hub import errors

    if isinstance(error, errors.RepositoryNotFoundError):
        return "the Hugging Face hub has no public repository of that name"
    if isinstance(error, errors.HFValidationError):
        return "that is not a valid name on the Hugging Face hub"
    unreachable = (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled, ConnectionError)
    if isinstance(error, unreachable) or type(error).__module__.startswith("httpx"):
        return "the Hugging Face hub cannot be reached"
    return " ".join((str(error).strip() or repr(error)).split("\n")[:2])[:200].rstrip(".")


# -----------------------------------------------------------------------------
# The files of a data set

# FineWeb's data sets, and the prefixes of their shards' names
FINEWEB_PREFIXES = {"HuggingFaceFW/fineweb-edu": "edufineweb", "HuggingFaceFW/fineweb": "fineweb"}
TEXT_BYTES = 1.5  # bytes of text per byte of FineWeb's files; other data sets may have large columns besides the text


class HubFiles(Corpus):
    """The .parquet, .jsonl or .txt files of a split, in the order of the `datasets` library.

    Set `revision` to a commit before reading the files.

    Args:
        config: configuration of the data set; None is its default.
        downloads: folder for the files while they are needed.

    Raises:
        UserError: there is no such data set or revision, or the hub cannot be reached.
    """

    def __init__(
        self,
        repository: str,
        config: str | None,
        split: str,
        text_field: str,
        separator: str | None,
        downloads: Path,
    ):
        self.name = f"{repository}/{config} [{split}]" if config else f"{repository} [{split}]"
        self.prefix = FINEWEB_PREFIXES.get(repository) or slug(repository)
        self.settings = {"text_field": text_field, "document_separator": separator}
        self._repository, self._config, self._split, self._downloads = repository, config, split, downloads
        self._text_field, self._separator = text_field, separator
        self._downloading: dict[str, threading.Thread] = {}
        self._finished: set[str] = set()
        self.revision = None

    @functools.cached_property
    def files(self) -> list[RepoFile]:
        """All files of the split, downloaded or not.

        Raises:
            UserError: there is no such configuration or split, or not all of its files are text.
        """
        from huggingface_hub import HfApi
        from huggingface_hub.hf_api import RepoFile

        failure = f"cannot open the data set {self._repository}"
        paths = _request(self._find_paths, failure)
        if others := sorted({"".join(Path(path).suffixes) for path in paths if not text_suffix(Path(path))}):
            names = ", ".join(f"'{name}'" for name in (self._repository, self._config) if name)
            which = f"{names}, split='{self._split}', revision='{self.revision}'"
            raise UserError(
                f'{self._repository} has {", ".join(others)} files, not {TEXT_TYPES}. Convert it: python -c "import datasets; '
                f"datasets.load_dataset({which}).to_parquet('text.parquet')\", and use --input text.parquet."
            )
        check_separator(self._separator, map(Path, paths))
        entries = _request(
            lambda: [
                entry
                for first in range(0, len(paths), 500)
                for entry in HfApi().get_paths_info(
                    self._repository, paths[first : first + 500], revision=self.revision, repo_type="dataset"
                )
            ],
            failure,
        )
        by_path = {entry.path: entry for entry in entries if isinstance(entry, RepoFile)}
        return [by_path[path] for path in paths]

    def _find_paths(self) -> list[str]:
        import datasets

        datasets.disable_progress_bars()
        builder = datasets.load_dataset_builder(self._repository, self._config, revision=self.revision)
        splits = builder.config.data_files or {}
        if self._split not in splits:
            raise UserError(
                f"{self._repository} has no split {self._split!r}. Choose --split from {', '.join(map(str, splits))}."
            )
        # hf://datasets/OWNER/NAME@REVISION/PATH
        return [url.partition("@")[2].removeprefix(f"{self.revision}/") for url in splits[self._split]]

    def parts(self) -> list[Part]:
        """Returns a part per file or group of small files. No file is divided: its row groups are not known yet."""
        groups = group_by_size([file.size for file in self.files], max((file.size for file in self.files), default=0))
        ratio = TEXT_BYTES if self._repository in FINEWEB_PREFIXES else 0
        return [Part(files, text_bytes=ratio * sum(self.files[index].size for index in files)) for files in groups]

    def read(self, part: Part) -> Iterator[Piece]:
        for index in part.files:
            path = self._download(self.files[index])
            yield from TextFiles([path], self._text_field, self._separator).read(Part(range(1)))

    def describe(self, part: Part) -> str:
        return f"{self._repository}, {self.files[part.files.start].path}"

    def prepare(self, part: Part) -> None:
        """Queues the files of a part for download in the background, one at a time. Ctrl-C does not wait for them."""
        if not self._downloading:  # after a kill, the library starts over, and leaves the incomplete file behind
            for leftover in self._downloads.glob(".cache/**/*.incomplete"):
                leftover.unlink()
        for index in part.files:
            file = self.files[index]
            if file.path not in self._downloading:
                previous = next(reversed(self._downloading.values()), None)
                thread = threading.Thread(target=self._try_download, args=(file, previous), daemon=True)
                self._downloading[file.path] = thread
                thread.start()

    def release(self, part: Part) -> None:
        for index in part.files:
            (self._downloads / self.files[index].path).unlink(missing_ok=True)
            self._finished.discard(self.files[index].path)
            self._downloading.pop(self.files[index].path, None)

    def for_process(self, number: int) -> HubFiles:
        corpus = copy.copy(self)
        corpus._downloads, corpus._downloading, corpus._finished = self._downloads / str(number), {}, set()
        return corpus

    def close(self) -> None:
        shutil.rmtree(self._downloads, ignore_errors=True)

    def _try_download(self, file: RepoFile, previous: threading.Thread | None) -> None:
        if previous:
            previous.join()
        with contextlib.suppress(Exception):  # `_download` tries again, and reports what is wrong
            self._fetch(file)

    def _download(self, file: RepoFile) -> Path:
        """Waits until a file is downloaded, and returns its path."""
        if thread := self._downloading.get(file.path):
            thread.join()
        _request(lambda: self._fetch(file), f"cannot download {file.path}", DOWNLOAD_ATTEMPTS)
        return self._downloads / file.path

    def _fetch(self, file: RepoFile) -> None:
        """Downloads a file, unless this process already has. The library resumes after a broken connection."""
        from huggingface_hub import hf_hub_download

        if file.path in self._finished:
            return
        check_free_space(self._downloads, file.size, f"download {file.path}")
        path = hf_hub_download(
            self._repository, file.path, repo_type="dataset", revision=self.revision, local_dir=self._downloads
        )
        if file.lfs and sha256_of(Path(path)) != file.lfs.sha256:
            os.unlink(path)
            raise OSError("it is not the expected file (wrong checksum)")
        self._finished.add(file.path)


def find_revision(repository: str, revision: str | None) -> str | None:
    """Returns the commit that `revision`, a branch or tag of a data set, points to; by default, the newest commit.

    Raises:
        UserError: there is no such data set or revision, or the hub cannot be reached.
    """
    from huggingface_hub import HfApi

    failure = f"cannot open the data set {repository}"
    return _request(lambda: HfApi().dataset_info(repository, revision=revision).sha, failure)
