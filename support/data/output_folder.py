"""The folder that shards are written to. Its manifest lists the finished shards, so that a later run can resume."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from support import files
from support.cli import UserError, flag_name
from support.data.shards import (
    MANIFEST,
    TOKEN,
    Manifest,
    ShardEntry,
    TokenFile,
    has_intact_tokenizer,
    load_manifest,
    load_shard,
    shard_paths,
)
from support.data.text_files import Part, Setting
from support.data.tokenizer import TOKENIZER_JSON, VOCAB_SIZES

PARTS = "parts_"  # followed by 16 hexadecimal digits, the name of a folder of encoded parts
ALL_PARTS = PARTS + 16 * "[0-9a-f]"


class OtherShardsError(UserError):
    """A folder has shards that were made from a different source or with different settings."""


@dataclass
class OutputFolder:
    """A folder of shards and its manifest. A shard that the manifest lists is complete and never written again.

    Attributes:
        flag: the flag that names the folder, for messages.
        report: is told what was done, line by line.
    """

    directory: Path
    manifest: Manifest
    flag: str
    report: Callable[[str], None]

    @property
    def is_complete(self) -> bool:
        return bool(self.manifest["complete"])

    @property
    def parts(self) -> Path:
        """The folder of the encoded parts of this source, with these settings, this tokenizer and these cuts."""
        keys = ("source", "revision", "settings", "tokenizer", "tokenizer_sha256", "cuts")
        identity = [self.manifest.get(key) for key in keys]
        return self.directory / (PARTS + hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16])

    def begin_parts(self, parts: Sequence[Part]) -> None:
        """Creates the folder of the encoded parts. Forgets the lengths of parts that a different version has cut elsewhere."""
        bounds = [(part.files.start, part.files.stop, part.start, part.stop) for part in parts]
        cuts = hashlib.sha256(json.dumps(bounds).encode()).hexdigest()
        if self.manifest.get("cuts") != cuts:
            self.manifest |= {"cuts": cuts, "parts": []}
            write_manifest(self.directory, self.manifest)
        self.parts.mkdir(exist_ok=True)

    def finish(self) -> None:
        """Marks the folder as complete, and removes the parts.

        Raises:
            UserError: a shard or the tokenizer was removed or changed meanwhile.
        """
        if not has_intact_tokenizer(self.directory, self.manifest):
            path = self.directory / TOKENIZER_JSON
            raise UserError(f"{path} was removed or changed. Rerun the command that made these shards.")
        for entry in self.manifest["shards"]:
            load_shard(self.directory / entry["file"], entry)
        self.manifest["complete"] = True
        write_manifest(self.directory, self.manifest)
        for parts in self.directory.glob(ALL_PARTS):
            shutil.rmtree(parts, ignore_errors=True)


def new_manifest(source: str, revision: str | None, tokenizer: str, settings: Mapping[str, Setting]) -> Manifest:
    """Returns the manifest of a folder without shards. Settings that are None are left out."""
    return {
        "tokenizer": tokenizer,
        "vocab_size": VOCAB_SIZES.get(tokenizer, 0),  # 0 until the tokenizer is trained
        "source": source,
        "revision": revision,
        "settings": {key: value for key, value in settings.items() if value is not None},
        "complete": False,
        "parts": [],
        "shards": [],
    }


@contextlib.contextmanager
def open_output_folder(
    directory: Path, manifest: Manifest, prefix: str, only_parts: bool, flag: str, report: Callable[[str], None]
) -> Iterator[OutputFolder]:
    """Opens the folder for the shards that a new manifest describes, and adopts what an earlier run has finished.

    If the folder is complete, it is only read. Otherwise, it is created and locked, and the caller must make the shards
    that are missing or corrupt.

    Args:
        prefix: beginning of the file names of the shards.
        only_parts: the folder is opened to add parts; several processes may do that at once.
        flag, report: see `OutputFolder`.

    Raises:
        OtherShardsError: the folder has shards from a different source or with different settings.
        UserError: it has shards from another tool, or is in use.
    """
    try:
        adopted = _adopt_finished_shards(directory, manifest, prefix, only_parts, flag)
    except OtherShardsError:  # which advises to remove them
        if (directory / files.LOCK).exists():
            files.lock_folder(directory, flag, shared=True).close()
        raise
    folder = OutputFolder(directory, adopted, flag, report)
    if folder.is_complete:
        report("nothing to do: these shards exist already and are intact")
        yield folder
        return
    directory.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        stack.enter_context(files.lock_folder(directory, flag, shared=only_parts))
        # again, under the lock: another run may have written shards meanwhile
        folder.manifest = _adopt_finished_shards(
            directory, manifest, prefix, only_parts, flag, verify=not only_parts, report=report
        )
        if not only_parts:
            stack.callback(_remove_if_empty, folder)
            # a killed run leaves these behind
            for leftover in (*directory.glob(".*.partial"), *directory.glob(f"{ALL_PARTS}/.*.partial")):
                leftover.unlink(missing_ok=True)
        write_manifest(directory, folder.manifest)
        yield folder


def _adopt_finished_shards(
    directory: Path,
    manifest: Manifest,
    prefix: str,
    only_parts: bool,
    flag: str,
    verify: bool = False,
    report: Callable[[str], None] | None = None,
) -> Manifest:
    """Returns the manifest with the shards that an earlier run with the same source and settings finished.

    Args:
        verify: compare their checksums; those of a complete folder are always compared.
        report: is told if there are parts, which may have taken many machines hours, that have to be encoded again.

    Raises:
        UserError: the folder has other shards.
    """
    earlier = described = load_manifest(directory)
    if earlier and (differences := _differences(manifest, earlier)):
        has_parts = any(OutputFolder(directory, earlier, flag, print).parts.glob("*.json"))
        if earlier["shards"] or (only_parts and has_parts):  # another machine may be encoding these parts
            raise OtherShardsError(
                f"{directory} has shards from a different source or setting: {'; '.join(differences)}. Use another "
                f"{flag}, or remove {directory}."
            )
        if has_parts and report:
            report(f"note: parts in {directory} are not used, and removed at the end: {'; '.join(differences)}")
        earlier = None
    for path in (*shard_paths(directory, "train"), *shard_paths(directory, "val")):
        has_other_name = path.name.rsplit("_", 2)[0] != prefix
        if earlier and has_other_name and path.name in {entry["file"] for entry in earlier["shards"]}:
            raise OtherShardsError(
                f"{directory} has shards of this text under another name, such as {path.name}: the folder of the text was "
                f"renamed. Rename it back, use another {flag}, or remove {directory}."
            )
        if earlier is None or has_other_name:
            raise UserError(
                f"{directory} has shards from another tool, such as {path.name}. Move them away, or use another {flag}."
            )
        if earlier["complete"] and path.name not in {entry["file"] for entry in earlier["shards"]}:
            raise UserError(f"{path} is not in the manifest. Move it out of the folder.")
    if described is None and (directory / TOKENIZER_JSON).exists():
        raise UserError(f"{directory} has a {TOKENIZER_JSON} but no {MANIFEST}, like a checkpoint. Use another {flag}.")
    if earlier is None:
        return manifest
    if not has_intact_tokenizer(directory, earlier):
        return manifest  # without it, the tokens mean nothing
    shards = _intact_shards(directory, earlier, verify or earlier["complete"])
    is_complete = earlier["complete"] and len(shards) == len(earlier["shards"]) > 0
    return {**earlier, "shards": shards, "complete": is_complete}


def _differences(manifest: Manifest, earlier: Manifest) -> list[str]:
    """Describes how a manifest differs from an earlier one. If it does not, the earlier shards can be continued."""
    here, there = (
        {flag_name(key): value for key, value in m["settings"].items()}
        | {"source": m["source"], "revision": m.get("revision"), "--tokenizer": m["tokenizer"]}
        for m in (manifest, earlier)
    )
    keys = [key for key in {**there, **here} if there.get(key) != here.get(key)]
    changed = "the text was changed or copied (file sizes or times, or the revision of a data set)"
    return [
        changed if key == "revision" else f"{key} was {there.get(key)!r} and is now {here.get(key)!r}" for key in keys
    ]


def _intact_shards(directory: Path, manifest: Manifest, verify: bool) -> list[ShardEntry]:
    """Returns the listed shards that still have their lengths and, with `verify`, their checksums."""
    from tqdm import tqdm

    intact = []
    for entry in tqdm(manifest["shards"], "checking shards", unit=" shards", leave=False, delay=1, disable=None):
        with contextlib.suppress(UserError):
            load_shard(directory / entry["file"], entry, verify=verify)
            intact.append(entry)
    return intact


def remove_shards(directory: Path, flag: str) -> None:
    """Removes the shards that a folder's manifest lists, and their tokenizer; other files stay. `flag` names the folder, for the message.

    Raises:
        UserError: the folder is in use.
    """
    with files.lock_folder(directory, flag):
        if manifest := load_manifest(directory):
            for entry in manifest["shards"]:
                (directory / entry["file"]).unlink(missing_ok=True)
            (directory / TOKENIZER_JSON).unlink(missing_ok=True)
            write_manifest(directory, {**manifest, "shards": [], "complete": False})


def _remove_if_empty(folder: OutputFolder) -> None:
    """Removes the folder if a failed run left no shards or parts in it, and it has no other files."""
    if folder.manifest["shards"]:
        return
    with contextlib.suppress(OSError):  # a folder that is not empty cannot be removed
        for parts in folder.directory.glob(ALL_PARTS):
            parts.rmdir()
        for name in (TOKENIZER_JSON, MANIFEST):
            (folder.directory / name).unlink(missing_ok=True)
        if os.listdir(folder.directory) == [files.LOCK]:  # in a run's folder, the lock is the run's
            (folder.directory / files.LOCK).unlink()
            folder.directory.rmdir()


# -----------------------------------------------------------------------------
# Writing


def write_manifest(directory: Path, manifest: Manifest) -> None:
    with files.atomic_write(directory / MANIFEST, unique=True) as tmp:
        tmp.write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8", newline="\n")


def write_tokens(
    path: Path, batches: Iterable[npt.NDArray[np.unsignedinteger]], eot: int, shard_size: int | None = None
) -> TokenFile:
    """Writes batches of tokens to a file; returns the numbers of tokens and documents, and the file's checksum.

    Args:
        eot: the end-of-text token, which starts a document.
        shard_size: the total number of tokens, to write a shard. Without it, the file is a part of a corpus: it has no
            header, and need not survive a power failure, because its checksum is verified before it is used.
    """
    tokens, documents, sha256 = 0, 0, hashlib.sha256()
    is_shard = shard_size is not None
    with files.atomic_write(path, unique=not is_shard, durable=is_shard) as tmp, open(tmp, "wb") as file:
        header = io.BytesIO()
        if is_shard:
            np.lib.format.write_array_header_1_0(
                header, {"descr": TOKEN.str, "fortran_order": False, "shape": (shard_size,)}
            )
        file.write(header.getvalue())
        sha256.update(header.getvalue())
        for batch in batches:
            content = batch.astype(TOKEN, copy=False).tobytes()
            file.write(content)  # np.save would not report a full disk
            sha256.update(content)
            tokens, documents = tokens + len(batch), documents + int(np.count_nonzero(batch == eot))
    return {"tokens": tokens, "documents": documents, "sha256": sha256.hexdigest()}
