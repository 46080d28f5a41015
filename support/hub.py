"""Data sets of the Hugging Face hub: files fetched one ahead of the reader, streamed ones, ready-made shards."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from support import shards
from support.cli import UserError
from support.corpus import Batch, Corpus, Files, Place, packed, pieces_of, slug, stamp, text_of
from support.download import RETRIED_STATUS, download, hub_trouble

FIRST_ATTEMPTS = 4  # to reach the hub at all: seconds, since somebody is waiting
ATTEMPTS = 7  # without progress in between, before a run that has begun gives up: minutes
T = TypeVar("T")


@dataclass(frozen=True)
class HubFile:
    """A file of a data set; one of its checksums is known."""

    path: str
    size: int
    sha256: str | None
    git_blob: str | None


def revision_of(repository: str) -> str:
    """The commit that a data set is at now.

    Raises:
        UserError: there is none of that name, or the hub cannot be reached.
    """
    from huggingface_hub import HfApi

    return _asked(lambda: HfApi().dataset_info(repository).sha, f"cannot open the data set {repository}")


def list_files(repository: str, revision: str, folder: str | None = None) -> list[HubFile]:
    """The files of a data set, or of a folder of it, in order of their names.

    Raises:
        UserError: there are none, or the hub cannot be reached.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import RepoFile

    def ask() -> list[Any]:
        tree = HfApi().list_repo_tree(repository, folder, recursive=True, revision=revision, repo_type="dataset")
        return [entry for entry in tree if isinstance(entry, RepoFile)]

    where = f"{repository}/{folder}" if folder else repository
    found = _asked(ask, f"cannot list the files of {where}")
    files = [HubFile(f.path, f.size, f.lfs and f.lfs.sha256, None if f.lfs else f.blob_id) for f in found]
    return sorted(files, key=lambda file: file.path)


def fetch(repository: str, revision: str, file: HubFile, path: Path, stop: threading.Event | None = None) -> Path:
    """Downloads one file of a data set, or what is missing of it; until `stop` is set.

    Raises:
        UserError: it cannot be had or written.
    """
    from huggingface_hub import hf_hub_url
    from huggingface_hub.utils import build_hf_headers

    url = hf_hub_url(repository, file.path, repo_type="dataset", revision=revision)
    check_room(path.parent, file.size, f"download {file.path}")
    return download(
        url,
        path,
        sha256=file.sha256,
        git_blob=file.git_blob,
        headers=build_hf_headers(),
        resume=True,
        attempts=ATTEMPTS,
        stop=stop,
    )


def check_room(folder: Path, needed: float, purpose: str) -> None:
    """Looks whether a disk has room.

    Raises:
        UserError: the disk of the folder has less than `needed` bytes free.
    """
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(there).free
    if needed > free:
        raise UserError(
            f"{folder} has {_readable(free)} free, and about {_readable(needed)} are needed to {purpose}. "
            "Free some, or name a folder on a larger disk."
        )


def _readable(size: float) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"


def _asked(question: Callable[[], T], failure: str) -> T:
    """What the hub answers; asked again after passing trouble."""
    for attempt in itertools.count(1):
        try:
            return question()
        except Exception as error:  # the hub's and the HTTP library's own kinds
            _pause(error, attempt, failure)


def _pause(error: Exception, attempt: int, failure: str, attempts: int = FIRST_ATTEMPTS) -> None:
    """Waits before the next attempt.

    Raises:
        UserError: another one would be in vain.
    """
    from huggingface_hub import errors

    status = getattr(getattr(error, "response", None), "status_code", None)
    refused = status is not None and 400 <= status < 500 and status not in RETRIED_STATUS
    wrong = refused or isinstance(error, (errors.HFValidationError, errors.EntryNotFoundError, ValueError))
    if wrong or isinstance(error, errors.OfflineModeIsEnabled) or attempt >= attempts:
        advice = "Check the network and run the same command again, or name files of your own with --input"
        advice = "Check its name, --name and --split" if wrong else advice
        raise UserError(f"{failure}: {hub_trouble(error)}. {advice}.") from error
    pause = min(2.0**attempt, 60)
    print(f"warning: {hub_trouble(error)}. Trying again in {pause:.0f} s.", file=sys.stderr, flush=True)
    time.sleep(pause)


# -----------------------------------------------------------------------------
# Parquet files, of which only a few are on the disk at any time

# Both FineWeb data sets have their samples under sample/, and one folder for each crawl under data/.
FINEWEBS = {"HuggingFaceFW/fineweb-edu": "edufineweb", "HuggingFaceFW/fineweb": "fineweb"}


def fineweb_folder(config: str) -> str:
    """Where the files of a FineWeb configuration are in its repository: `sample-10BT`, `CC-MAIN-2024-10`, `default`."""
    if config.startswith("sample-"):
        return f"sample/{config.removeprefix('sample-')}"
    return "data" if config == "default" else f"data/{config}"


class HubParquet(Files):
    """The .parquet files of a folder of a data set, each fetched while the one before is read, and then removed."""

    def __init__(self, repository: str, config: str, text_field: str, folder: Path, keep: bool):
        self.name = f"{repository}/{config} [train]"
        self.prefix = FINEWEBS.get(repository) or slug(repository)
        self.text_field, self.separator, self.settings = text_field, None, {"text_field": text_field}
        self._repository, self._source, self._folder, self._keep = repository, fineweb_folder(config), folder, keep
        self._coming: dict[int, Future[Path]] = {}
        self._closed = threading.Event()

    @functools.cached_property
    def _files(self) -> list[HubFile]:
        found = list_files(self._repository, self.revision, self._source)
        files = [file for file in found if file.path.endswith(".parquet")]
        if not files:
            raise UserError(f"{self._repository} has no .parquet files in {self._source}. Choose another --name.")
        return files

    def changed(self) -> bool:
        return False  # a revision never does

    def kind(self, index: int) -> str | None:
        return ".parquet"

    def sizes(self) -> list[int]:
        return [file.size for file in self._files]

    def text_bytes(self) -> float | None:
        return 1.5 * sum(self.sizes())

    def _path(self, index: int) -> Path:
        return self._folder / self._files[index].path.replace("/", "_")

    def open(self, index: int) -> Path:
        path = self._fetched(index).result()
        if index + 1 < len(self._files):
            self._fetched(index + 1)
        return path

    def _fetched(self, index: int) -> Future[Path]:
        if index not in self._coming:
            future = self._coming[index] = Future()

            def work() -> None:
                try:
                    file = self._files[index]
                    future.set_result(fetch(self._repository, self.revision, file, self._path(index), self._closed))
                except BaseException as error:
                    future.set_exception(error)

            # A daemon: whoever presses Ctrl-C does not wait for two gigabytes, and the part that came is kept.
            threading.Thread(target=work, daemon=True).start()
        return self._coming[index]

    def done_with(self, place: Place) -> None:
        if self._keep:
            return
        for index in range(place[0]):
            with contextlib.suppress(OSError):
                self._path(index).unlink(missing_ok=True)

    def close(self) -> None:
        self._closed.set()  # --max-tokens: the file that comes is not needed
        for future in self._coming.values():
            with contextlib.suppress(UserError, TimeoutError):
                future.result(timeout=5)
        if self._keep:
            return
        with contextlib.suppress(OSError):
            for path in self._folder.glob(f"{self._source.replace('/', '_')}_*.parquet*"):
                path.unlink()
            self._folder.rmdir()  # only if nothing else is in it


# -----------------------------------------------------------------------------
# Streamed data sets


class Stream(Corpus):
    """A text data set that the `datasets` library streams: of the hub, or a local folder of its files.

    A place is a number of examples, the library's own state there, and a number of characters within a long document.
    """

    def __init__(self, repository: str, config: str | None, split: str, text_field: str):
        spelled = repository if config is None else f"{repository}/{config}"
        self.name, self.prefix, self.settings = f"{spelled} [{split}]", slug(repository), {"text_field": text_field}
        self._request = {"path": repository, "name": config, "split": split, "streaming": True}
        self._text_field = text_field
        self._read, self._total = 0, None
        if os.path.isdir(repository):
            self.revision = self._stamp()

    def _stamp(self) -> str:
        return stamp(path for path in sorted(Path(self._request["path"]).rglob("*")) if path.is_file())

    def changed(self) -> bool:
        return os.path.isdir(self._request["path"]) and self._stamp() != self.revision

    def batches(self, place: Place | None = None) -> Iterator[Batch]:
        share = lambda: self._read / self._total if self._total else None  # noqa: E731
        return packed(self._pieces(*(place or [0, None, 0])), self.name, share)

    def _pieces(self, number: int, state: dict | None, first: int) -> Iterator[tuple[Place, bool, str]]:
        import datasets

        attempt, where = 0, self._request["path"]
        while True:
            try:
                revision = None if os.path.isdir(where) else self.revision
                stream = datasets.load_dataset(**self._request, revision=revision)
                splits = getattr(stream.info, "splits", None) or {}
                self._total = getattr(splits.get(self._request["split"]), "num_examples", None)
                if state is not None:
                    stream.load_state_dict(state)
                for example in stream:
                    attempt = 0
                    text = text_of(example, self._text_field, f"{where}, example {number}")
                    yield from (([number, state, at], at > 0, p) for at, p in pieces_of(text) if at >= first)
                    number, state, first = number + 1, stream.state_dict(), 0
                    self._read = number
                return
            except UserError:
                raise
            except Exception as error:  # the hub's, the HTTP library's and the data set's own kinds
                attempt += 1
                failure = (
                    f"{where} broke off after {number} examples" if number else f"cannot open the data set {where}"
                )
                # "Not found" of the data set is what the library makes of a network that fails; of its files, it is true.
                no_files = isinstance(error, FileNotFoundError) and not isinstance(
                    error, datasets.exceptions.DatasetNotFoundError
                )
                last = no_files or os.path.isdir(where)
                _pause(error, ATTEMPTS if last else attempt, failure, ATTEMPTS if number else FIRST_ATTEMPTS)


# -----------------------------------------------------------------------------
# Ready-made shards


def list_shards(repository: str, revision: str, folder: str | None) -> tuple[list[HubFile], HubFile | None]:
    """The token shards that a data set has in one folder, and the manifest beside them, if there is one.

    Raises:
        UserError: there are none, or those of several folders; or the hub cannot be reached.
    """
    files = list_files(repository, revision, folder)
    found = [file for file in files if shards.parse(PurePosixPath(file.path).name)]
    folders = sorted({str(PurePosixPath(file.path).parent) for file in found})
    if not found:
        kinds = sorted({PurePosixPath(file.path).suffix for file in files if "." in file.path})
        has = f"but files of the kinds {', '.join(kinds)}" if kinds else "and nothing else"
        raise UserError(
            f"{repository} has no shards such as name_train_000001.npy, {has}. Name another data set, or make them "
            "from its text with --dataset."
        )
    if len(folders) > 1:
        raise UserError(f"{repository} has shards in several folders. Choose one with --name: {', '.join(folders)}.")
    beside = f"{folders[0]}/{shards.MANIFEST}".removeprefix("./")
    found.sort(key=lambda file: (int(shards.parse(PurePosixPath(file.path).name)["index"]), file.path))
    return found, next((file for file in files if file.path == beside), None)


def manifest_of_shards(repository: str, revision: str, file: HubFile) -> dict[str, Any]:
    """The manifest that a data set has beside its shards.

    Raises:
        UserError: it is none, or not that of finished shards; or it cannot be had.
    """
    with tempfile.TemporaryDirectory() as place:
        return shards.read_manifest(fetch(repository, revision, file, Path(place, shards.MANIFEST)).parent)
