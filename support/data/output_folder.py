"""A folder that shards are being written to. Its manifest lists the finished ones, so that a later run can resume."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from support import files
from support.cli import UserError, flag_name
from support.data.shards import (
    MANIFEST,
    Manifest,
    Setting,
    ShardEntry,
    load_shard,
    parse_shard_name,
    shard_paths,
    verify_shards,
    write_manifest,
)
from support.data.tokenizer import TOKENIZER_JSON, VOCAB_SIZES


class OutputFolder:
    """A locked folder and its manifest. A shard that the manifest lists is complete and never written again."""

    def __init__(self, directory: Path, manifest: Manifest, is_finished: bool = False):
        self.directory, self.manifest, self.is_finished = directory, manifest, is_finished

    @property
    def finished_shards(self) -> list[ShardEntry]:
        """Those of both splits, and the parts of a corpus that is not split yet."""
        return [*self.manifest.get("unsplit", []), *self.manifest["shards"]]

    def add(self, entry: ShardEntry) -> None:
        """Lists a shard that was written."""
        self.manifest["unsplit" if entry["split"] == "unsplit" else "shards"].append(entry)
        write_manifest(self.directory, self.manifest)

    def mark_unsplit_complete(self) -> None:
        """Notes that the parts of a corpus that is not split yet are all there."""
        self.manifest["unsplit_complete"] = bool(self.manifest["unsplit"])

    def finish(self) -> None:
        """Marks the shards as complete, and removes the parts of a corpus that is now split."""
        parts = self.manifest.pop("unsplit")
        self.manifest.pop("unsplit_complete")
        self.manifest["complete"] = True
        write_manifest(self.directory, self.manifest)
        for part in parts:
            (self.directory / part["file"]).unlink(missing_ok=True)


def new_manifest(source: str, revision: str | None, tokenizer: str, settings: Mapping[str, Setting]) -> Manifest:
    """The manifest of a folder without shards. Settings that are None are left out."""
    return {
        "tokenizer": tokenizer,
        "vocab_size": VOCAB_SIZES.get(tokenizer, 0),  # 0 until it is trained
        "source": source,
        "revision": revision,
        "settings": {key: value for key, value in settings.items() if value is not None},
        "complete": False,
        "shards": [],
        "unsplit": [],
        "unsplit_complete": False,
    }


def read_partial_manifest(directory: Path, source: str) -> Manifest | None:
    """The manifest of a folder, finished or not, if its shards are made from `source`."""
    try:
        manifest = _load_manifest(directory)
        return manifest if manifest["source"] == source else None
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return None


@contextlib.contextmanager
def open_output_folder(directory: Path, manifest: Manifest, prefix: str) -> Iterator[OutputFolder]:
    """Opens a folder for the shards that a new manifest describes, and adopts what an earlier run has finished.

    If all shards are finished, the folder is only read. Otherwise it is created and locked, and shards that are not
    listed or not intact must be made again, as those after them. Leftover files with `prefix`, that of the shards, are
    removed.

    Raises:
        UserError: the folder has shards of another source or with other settings, is in use, or cannot be written.
    """
    with contextlib.ExitStack() as stack:
        try:
            earlier = _read_matching_manifest(directory, manifest, prefix)
            if earlier and _is_intact(directory, earlier):
                folder = OutputFolder(directory, earlier, is_finished=True)
            else:
                directory.mkdir(parents=True, exist_ok=True)
                if not os.access(directory, os.W_OK):
                    raise PermissionError(errno.EACCES, "no permission")
                files.write_lock_holder(stack.enter_context(files.lock_folder(directory, "--output")))
                earlier = _read_matching_manifest(directory, manifest, prefix)  # another run may have changed it
                folder = OutputFolder(directory, manifest)
                if earlier:
                    adopt_finished_shards(folder, earlier)
                stack.callback(remove_if_empty, folder)
                write_manifest(directory, manifest)
            if earlier:
                _remove_leftovers(folder, prefix)
        except OSError as error:
            raise UserError(f"cannot write to {directory} ({error.strerror}). Use another --output.") from error
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise UserError(
                f"{directory / MANIFEST} is not a manifest of shards ({error!r}). Remove it, or use another --output."
            ) from error
        yield folder


def _read_matching_manifest(directory: Path, manifest: Manifest, prefix: str) -> Manifest | None:
    """The manifest of an earlier run with the same source and settings, if there is one.

    Raises:
        UserError: the folder has other shards.
    """
    earlier = _load_manifest(directory) if (directory / MANIFEST).exists() else None
    differences = [] if earlier is None else _differences(manifest, earlier)
    if earlier is not None and differences and (earlier["shards"] or earlier.get("unsplit")):
        raise UserError(
            f"{directory} has shards of another source or setting: {'; '.join(differences)}. Use another --output, or "
            f"remove {directory}."
        )
    for shard in itertools.chain(shard_paths(directory, "train"), shard_paths(directory, "val")):
        name = parse_shard_name(shard.name)
        if earlier is None or differences or (name and name.prefix != prefix):
            raise UserError(
                f"{directory} has shards of another tool, such as {shard.name}. "
                "Move them away, or use another --output."
            )
    return None if differences else earlier


def _load_manifest(directory: Path) -> Manifest:
    return _rename_old_keys(json.loads((directory / MANIFEST).read_text(encoding="utf-8")))


def _rename_old_keys(manifest: dict[str, Any]) -> Manifest:
    """A manifest with the keys of this version: earlier ones called the parts of a corpus before its split `counted`."""
    for old, new in (("counted", "unsplit"), ("all_counted", "unsplit_complete")):
        if old in manifest:
            manifest[new] = manifest[old]
            del manifest[old]
    if "unsplit" in manifest:
        manifest["unsplit"] = [entry | {"split": "unsplit"} for entry in manifest["unsplit"]]
    return cast(Manifest, manifest)


def _differences(manifest: Manifest, earlier: Manifest) -> list[str]:
    """What the shards of two manifests differ in; empty if one can be continued with the other."""
    there, here = _identity(earlier), _identity(manifest)
    keys = [key for key in {**there, **here} if there.get(key) != here.get(key)]
    return [f"{key} was {there.get(key)!r} and is now {here.get(key)!r}" for key in keys]


def _identity(manifest: Manifest) -> dict[str, Setting]:
    """What decides which shards a folder has, as flags where it is set by flags."""
    identity: dict[str, Setting] = {flag_name(key): value for key, value in manifest["settings"].items()}
    source, revision = manifest.get("source"), manifest.get("revision")
    return identity | {"source": source, "revision": revision, "--tokenizer": manifest["tokenizer"]}


def _is_intact(directory: Path, manifest: Manifest) -> bool:
    """Whether all shards of a manifest were made and none is corrupt."""
    if not manifest["complete"]:
        return False
    try:
        verify_shards(directory)
    except UserError as error:
        print(f"making shards again: {error.problems[0].rsplit('. ', 1)[0]}")
        return False
    print("nothing to do: these shards exist already and are intact")
    return True


def adopt_finished_shards(folder: OutputFolder, earlier: Manifest) -> None:
    """Adds the intact shards of an earlier manifest, up to a lost one, to that of the folder."""
    sha256 = earlier.get("tokenizer_sha256")
    tokenizer = folder.directory / TOKENIZER_JSON
    if sha256 and not (tokenizer.is_file() and files.sha256_of(tokenizer) == sha256):
        return  # its tokens mean nothing without it
    read_all = earlier["complete"]  # all were made, and one is corrupt

    def intact(entries: list[ShardEntry]) -> list[ShardEntry]:
        return list(itertools.takewhile(lambda entry: _shard_is_intact(folder.directory, entry, read_all), entries))

    manifest, unsplit = folder.manifest, earlier.get("unsplit", [])
    manifest["shards"], manifest["unsplit"] = intact(earlier["shards"]), intact(unsplit)
    manifest["unsplit_complete"] = bool(earlier.get("unsplit_complete")) and len(manifest["unsplit"]) == len(unsplit)
    if folder.finished_shards and sha256:
        manifest["tokenizer_sha256"] = sha256
    for entry in folder.finished_shards:
        cursor, tokens = json.loads(entry.get("end", "[null, 0]"))
        if not isinstance(cursor, list | None) or type(tokens) is not int or tokens < 0:
            raise ValueError(f"end of {entry['file']}: {entry['end']}")


def _shard_is_intact(directory: Path, entry: ShardEntry, read_all: bool) -> bool:
    path = directory / Path(entry["file"]).name
    try:
        if path.name != entry["file"] or len(load_shard(path)) != entry["tokens"]:
            return False
    except UserError:
        return False
    return not read_all or files.sha256_of(path) == entry["sha256"]


def remove_if_empty(folder: OutputFolder) -> None:
    """After an error, removes the manifest and the lock of a folder without shards, then the folder if it is empty."""
    if not folder.finished_shards:
        with contextlib.suppress(OSError):
            (folder.directory / MANIFEST).unlink()
            (folder.directory / TOKENIZER_JSON).unlink(missing_ok=True)
            (folder.directory / files.LOCK).unlink()
            folder.directory.rmdir()


def _remove_leftovers(folder: OutputFolder, prefix: str) -> None:
    """Removes shards with this prefix that the manifest does not list, and what a killed process wrote of a shard.

    Such a file is called `.name.npy.partial`, or `name.npy.partial` if an earlier version of this program wrote it.
    """
    listed = {entry["file"] for entry in folder.finished_shards}
    for path in folder.directory.iterdir():
        final_name = path.name
        if final_name.endswith(".partial"):
            final_name = final_name.removesuffix(".partial").removeprefix(".")
        shard = parse_shard_name(re.sub("_(unsplit|counted)_", "_train_", final_name))
        if shard and shard.prefix == prefix and path.name not in listed:
            path.unlink()
