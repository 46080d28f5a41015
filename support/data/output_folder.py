"""A folder that shards are being written to. Its manifest lists the finished ones, so that a later run can resume."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from support import files
from support.cli import UserError, flag_name
from support.data.shards import (
    MANIFEST,
    PARTS,
    Manifest,
    Setting,
    ShardEntry,
    is_complete,
    load_manifest,
    load_shard,
    shard_paths,
    write_manifest,
)
from support.data.tokenizer import TOKENIZER_JSON, VOCAB_SIZES

# A shard, a part of a corpus before its split, or what a killed run wrote of it.
_LEFTOVER = re.compile(r"\.?(?P<prefix>.+)_(train|val|unsplit)_[0-9]{6,12}\.npy(\.partial)?")


@dataclass
class OutputFolder:
    """A locked folder and its manifest. A shard that the manifest lists is complete and never written again."""

    directory: Path
    manifest: Manifest
    is_finished: bool = False

    @property
    def finished_shards(self) -> list[ShardEntry]:
        """Those of both splits, and the parts of a corpus that is not split yet."""
        return [*self.manifest.get("unsplit", []), *self.manifest["shards"]]

    def add(self, entry: ShardEntry) -> None:
        """Lists a shard that was written."""
        self.manifest["unsplit" if entry["split"] == "unsplit" else "shards"].append(entry)
        write_manifest(self.directory, self.manifest)

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
            folder = _adopt_finished_shards(directory, manifest, prefix)
            if folder.is_finished:
                print("nothing to do: these shards exist already and are intact")
            else:
                directory.mkdir(parents=True, exist_ok=True)
                stack.enter_context(files.lock_folder(directory, "--output"))
                folder = _adopt_finished_shards(directory, manifest, prefix)  # another run may have written some
                stack.callback(_remove_if_empty, folder)
                write_manifest(directory, folder.manifest)
            _remove_leftovers(folder, prefix)
        except OSError as error:
            raise UserError(f"cannot write to {directory} ({error.strerror}). Use another --output.") from error
        yield folder


def _adopt_finished_shards(directory: Path, manifest: Manifest, prefix: str) -> OutputFolder:
    """The folder with the shards that an earlier run with the same source and settings has finished, up to a lost one.

    Raises:
        UserError: the folder has other shards.
    """
    earlier = load_manifest(directory)
    if earlier is None and (directory / TOKENIZER_JSON).exists():  # as in a checkpoint
        raise UserError(f"{directory} has the {TOKENIZER_JSON} of something else. Use another --output.")
    was_begun = earlier is not None and bool(earlier["shards"] or earlier["unsplit"] or earlier.get("in_parts"))
    if earlier and was_begun and not earlier["complete"] and ("in_parts" in earlier) != ("in_parts" in manifest):
        raise UserError(
            f"{directory} was begun {'with' if 'in_parts' in earlier else 'without'} --executor. Continue it so, or "
            "use another --output."
        )
    if earlier and (differences := _differences(manifest, earlier)):
        if was_begun:
            raise UserError(
                f"{directory} has shards of another source or setting: {'; '.join(differences)}. Use another "
                f"--output, or remove {directory}."
            )
        earlier = None
    for path in (*shard_paths(directory, "train"), *shard_paths(directory, "val")):
        if earlier is None or path.name.rsplit("_", 2)[0] != prefix:
            raise UserError(
                f"{directory} has shards of another tool, such as {path.name}. Move them away, or use another --output."
            )
    if earlier is None:
        return OutputFolder(directory, manifest)
    tokenizer, sha256 = directory / TOKENIZER_JSON, earlier.get("tokenizer_sha256")
    if sha256 and not (tokenizer.is_file() and files.sha256_of(tokenizer) == sha256):
        return OutputFolder(directory, manifest)  # the tokens mean nothing without it
    shards, unsplit = (
        _intact_shards(directory, earlier, entries) for entries in (earlier["shards"], earlier["unsplit"])
    )
    if earlier["complete"] and len(shards) == len(earlier["shards"]) > 0:
        return OutputFolder(directory, earlier, is_finished=True)
    unsplit_complete = bool(earlier["unsplit_complete"]) and len(unsplit) == len(earlier["unsplit"])
    adopted: Manifest = {**manifest, "shards": shards, "unsplit": unsplit, "unsplit_complete": unsplit_complete}
    if "in_parts" in earlier:
        adopted["in_parts"] = earlier["in_parts"]
    elif shards:  # they were complete: one process makes those from a lost one on
        adopted.pop("in_parts", None)
    if sha256 and (shards or unsplit or "in_parts" in earlier):
        adopted["tokenizer_sha256"] = sha256
    return OutputFolder(directory, adopted)


def _differences(manifest: Manifest, earlier: Manifest) -> list[str]:
    """What the shards of two manifests differ in; empty if one can be continued with the other."""
    here, there = (
        {flag_name(key): value for key, value in m["settings"].items()}
        | {"source": m["source"], "revision": m.get("revision"), "--tokenizer": m["tokenizer"]}
        for m in (manifest, earlier)
    )
    keys = [key for key in {**there, **here} if there.get(key) != here.get(key)]
    return [f"{key} was {there.get(key)!r} and is now {here.get(key)!r}" for key in keys]


def _intact_shards(directory: Path, manifest: Manifest, entries: list[ShardEntry]) -> list[ShardEntry]:
    """The shards up to one that is lost; only of a complete manifest are they read for that."""
    from tqdm import tqdm

    intact = []
    for entry in tqdm(entries, "checking shards", unit=" shards", leave=False, delay=1, disable=None):
        try:
            load_shard(directory / entry["file"], entry, verify=manifest["complete"])
        except UserError:
            break
        intact.append(entry)
    return intact


def _remove_if_empty(folder: OutputFolder) -> None:
    """After an error, removes what is in a folder without shards, then the folder unless something else is in it."""
    if is_complete(folder.directory):  # tasks have finished it
        return
    with contextlib.suppress(OSError):  # of a folder that is not empty
        for parts in folder.directory.glob(f"{PARTS}*"):
            parts.rmdir()
        if not folder.finished_shards:
            for name in (MANIFEST, TOKENIZER_JSON, files.LOCK):
                (folder.directory / name).unlink(missing_ok=True)
            folder.directory.rmdir()


def _remove_leftovers(folder: OutputFolder, prefix: str) -> None:
    """Removes shards with this prefix that the manifest does not list, and what a killed run wrote of one."""
    listed = {entry["file"] for entry in folder.finished_shards}
    for path in folder.directory.iterdir():
        leftover = _LEFTOVER.fullmatch(path.name)
        if leftover and leftover["prefix"] == prefix and path.name not in listed:
            path.unlink()
