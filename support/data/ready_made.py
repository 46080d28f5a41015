"""Ready-made shards: `.npy` files of tokens, published as a data set on the Hugging Face hub."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path, PurePosixPath

import numpy as np

from support import files
from support.cli import UserError
from support.data.hub import HubFile, current_revision, fetch_file, list_files
from support.data.output_folder import OutputFolder, new_manifest, open_output_folder, read_partial_manifest
from support.data.shards import (
    MANIFEST,
    Manifest,
    ShardEntry,
    ShardName,
    check_ids,
    load_shard,
    parse_shard_name,
    read_manifest,
)
from support.data.tokenizer import VOCAB_SIZES
from support.files import temporary_folder

NPY_HEADER_BYTES = 128


def download_shards(
    repository: str, folder: str | None, output: Path, tokenizer: str | None, max_tokens: int | None
) -> Manifest:
    """Downloads and checks the shards of a data set; returns their manifest.

    Args:
        folder: the one in the data set that has the shards, needed if there are several.
        tokenizer: that of shards without a manifest (default: gpt2).
        max_tokens: download only the first shards that have this many tokens together.

    Raises:
        UserError: the data set has no shards or bad ones, or they cannot be downloaded or written.
    """
    source = f"shards of {repository}" + (f"/{folder}" if folder else "")
    earlier = read_partial_manifest(output, source)
    revision = (earlier and earlier.get("revision")) or current_revision(repository)
    available: list[HubFile] | None = None
    if earlier:
        tokenizer = tokenizer or earlier.get("tokenizer")
    else:
        available, manifest_file = list_ready_made_shards(repository, revision, folder)
        if manifest_file:
            published = download_manifest(repository, revision, manifest_file)
            tokenizer = tokenizer or published["tokenizer"]
            _check_against_manifest(repository, published, available, tokenizer)
    tokenizer = tokenizer or "gpt2"
    if tokenizer not in VOCAB_SIZES:
        raise UserError(f"{output / MANIFEST} names an unknown tokenizer, {tokenizer!r}. Remove {output}.")
    manifest = new_manifest(source, revision, tokenizer, {"max_tokens": max_tokens})
    with open_output_folder(output, manifest, prefix=None) as out:
        if not out.is_finished:
            available = available or list_ready_made_shards(repository, revision, folder)[0]
            _download_missing(repository, revision, _enough_shards(available, max_tokens), out)
            out.finish()
        return out.manifest


def list_ready_made_shards(
    repository: str, revision: str | None, folder: str | None
) -> tuple[list[HubFile], HubFile | None]:
    """The shards of a data set, in order of their indices, and the manifest next to them, if there is one.

    Raises:
        UserError: there are no shards, or some in several folders; or the hub cannot be reached.
    """
    listed = list_files(repository, revision, folder)
    shards = [(name, file) for file in listed if (name := _shard_name_of(file))]
    folders = sorted({str(PurePosixPath(file.path).parent) for _, file in shards})
    if not shards:
        suffixes = sorted({PurePosixPath(file.path).suffix for file in listed if "." in file.path})
        content = f"but files of the types {', '.join(suffixes)}" if suffixes else "and nothing else"
        raise UserError(
            f"{repository} has no shards such as name_train_000001.npy, {content}. Use another data set, or make "
            "shards from its text with --dataset."
        )
    if len(folders) > 1:
        raise UserError(f"{repository} has shards in several folders. Choose one with --name: {', '.join(folders)}.")
    manifest_path = f"{folders[0]}/{MANIFEST}".removeprefix("./")
    shards.sort(key=lambda pair: (pair[0].index, pair[1].path))
    return [file for _, file in shards], next((file for file in listed if file.path == manifest_path), None)


def download_manifest(repository: str, revision: str | None, file: HubFile) -> Manifest:
    """The manifest that a data set has next to its shards.

    Raises:
        UserError: it is not the manifest of complete shards, or cannot be downloaded.
    """
    with temporary_folder() as folder:
        return read_manifest(fetch_file(repository, revision, file, folder / MANIFEST).parent)


def _shard_name_of(file: HubFile) -> ShardName | None:
    return parse_shard_name(PurePosixPath(file.path).name)


def _check_against_manifest(repository: str, manifest: Manifest, shards: Sequence[HubFile], tokenizer: str) -> None:
    """Raises a UserError if a data set does not have the shards that its manifest lists, or another tokenizer."""
    if manifest["tokenizer"] != tokenizer:
        raise UserError(f"the manifest of {repository} says {manifest['tokenizer']} tokens. Leave out --tokenizer.")
    sha256_of = {PurePosixPath(file.path).name: file.sha256 for file in shards}
    for entry in manifest["shards"]:
        if sha256_of.get(entry["file"], "missing") not in (None, entry.get("sha256")):
            raise UserError(
                f"{repository} does not have {entry['file']} as its manifest lists it: the upload is not complete. "
                "Use another data set."
            )


def _enough_shards(shards: Sequence[HubFile], max_tokens: int | None) -> list[HubFile]:
    """The first shards that have `max_tokens` together, or all."""
    enough, tokens = [], 0
    for file in shards:
        if max_tokens is None or tokens < max_tokens:
            enough.append(file)
            tokens += (file.size - NPY_HEADER_BYTES) // 2
    return enough


def _download_missing(repository: str, revision: str | None, shards: Sequence[HubFile], out: OutputFolder) -> None:
    finished = {entry["file"] for entry in out.manifest["shards"]}
    missing = [file for file in shards if PurePosixPath(file.path).name not in finished]
    files.check_free_space(out.directory, sum(file.size for file in missing), "download the shards")
    for file in missing:
        path = fetch_file(repository, revision, file, out.directory / PurePosixPath(file.path).name)
        try:
            entry = _checked_entry(path, out.manifest["vocab_size"])
        except UserError as error:
            path.unlink()
            problem = error.problems[0].rsplit(". ", 1)[0]
            raise UserError(f"{problem}. {repository} publishes it like this. Use another data set.") from error
        out.add(entry)


def _checked_entry(path: Path, vocab_size: int) -> ShardEntry:
    """What the manifest will say about a shard.

    Raises:
        UserError: it is not a shard of tokens of this vocabulary.
    """
    name = parse_shard_name(path.name)
    assert name is not None
    tokens = load_shard(path)
    check_ids(tokens, vocab_size)
    return {
        "file": path.name,
        "split": name.split,
        "tokens": len(tokens),
        "documents": int(np.count_nonzero(tokens == vocab_size - 1)),
        "sha256": files.sha256_of(path),
    }
