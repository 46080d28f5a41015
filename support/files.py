"""Atomic writes, folder locks and free disk space."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import shutil
import socket
import sys
from collections.abc import Iterator
from errno import ESTALE
from itertools import count
from pathlib import Path
from typing import Any, TextIO

from support.cli import UserError, describe_error, describe_free_space, format_bytes, nearest_existing, warn

LOCK = ".gpt2.lock"  # in a locked folder; the operating system releases the lock when the process ends, however it ends
HOSTNAME = socket.gethostname()  # once: a laptop may change it with its network


# -----------------------------------------------------------------------------
# Atomic writes


def tmp_path(path: Path, kind: str = "partial") -> Path:
    """Returns the hidden temporary path next to a path."""
    return path.with_name(f".{path.name}.{kind}")


@contextlib.contextmanager
def atomic_write(path: Path, unique: bool = False, durable: bool = True) -> Iterator[Path]:
    """Yields a temporary path; the file or folder that the block makes there replaces `path` at the end.

    A reader sees the complete old content or the complete new content, even after a power failure. (While a folder is
    replaced, there is a moment without either.) If the block fails, `path` is unchanged and nothing else remains. A
    killed process leaves the temporary path behind, and the next write to `path` removes it. Use `unique` for
    files that no lock protects: the temporary name is then never used twice. Without `durable`, a power failure may
    leave wrong content: only for files whose checksum is verified when they are read.
    """
    tmp = tmp_path(path, f"{secrets.token_hex(8)}.partial" if unique else "partial")
    remove(tmp)
    try:
        yield tmp
        for file in [*sorted(tmp.rglob("*")), tmp] if durable else []:
            sync(file)
    except BaseException as error:
        with contextlib.suppress(OSError):
            remove(tmp)
        if isinstance(error, OSError) and error.errno and error.filename is None:  # for example, if the disk is full
            error.filename = str(path)
        raise
    if tmp.is_dir():
        remove(path)  # a corrupt one: a folder cannot be renamed onto one that is not empty
    os.replace(tmp, path)
    with contextlib.suppress(OSError):  # it is in place, whatever else fails
        sync(path.parent)


def remove(path: Path) -> None:
    """Removes a file, a link or a folder, if it exists. A reader sees the complete folder or no folder."""
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
        return
    if not path.name.startswith("."):
        hidden = tmp_path(path, "removed")
        remove(hidden)
        path = path.rename(hidden)
    shutil.rmtree(path)


def sync(path: Path) -> None:
    """Waits until a file's content, or a folder's list of names, is on the disk."""
    if path.is_dir() and os.name == "nt":
        return  # Windows cannot open folders
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256_of(path: Path) -> str:
    """Returns the SHA-256 of a file, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_json(path: Path, value: object) -> None:
    """Writes a value and its SHA-256, for `read_json`. Several processes may write the same file at once."""
    content = json.dumps(value)
    checksum = hashlib.sha256(content.encode()).hexdigest()
    with atomic_write(path, unique=True) as tmp:
        tmp.write_text(f"{checksum}\n{content}\n", encoding="utf-8", newline="\n")


def read_json(path: Path) -> Any:
    """Returns the value that `write_json` wrote; None if there is no such file, or if it was altered."""
    with contextlib.suppress(OSError, ValueError):
        checksum, content, _ = path.read_bytes().split(b"\n")
        if hashlib.sha256(content).hexdigest().encode() == checksum:
            return json.loads(content)
    return None


# -----------------------------------------------------------------------------
# Output files that the user names


def check_output_file(path: Path, flag: str) -> None:
    """Raises a UserError if the file that a flag names cannot be written."""
    if path.is_dir() or not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise UserError(f"cannot write {path}. Use another file with {flag}.")


# -----------------------------------------------------------------------------
# Folders and disks


def lock_folder(folder: Path, flag: str, shared: bool = False) -> TextIO:
    """Locks a folder until the returned file is closed or the process ends. The file says which process holds the lock.

    Args:
        flag: the flag that names the folder, for the message.
        shared: other processes may hold a shared lock at the same time (not on Windows).

    Raises:
        UserError: another process holds the lock.
    """
    file = open(folder / LOCK, "a+", encoding="utf-8")  # noqa: SIM115  stays open as long as the lock is held
    try:
        _lock_file(file, shared)
    except (BlockingIOError, PermissionError):
        file.seek(0)
        holder = file.read().strip() or "another process"
        file.close()
        raise UserError(f"{folder} is in use by {holder}. Wait until it ends, or use another {flag}.") from None
    except OSError as error:  # some network file systems have no locks
        warn(f"cannot lock {folder} ({describe_error(error)}). Do not start a second run in it.")
    file.truncate(0)
    file.write(_own_name())
    file.flush()
    return file


def _own_name() -> str:
    return f"process {os.getpid()} on {HOSTNAME}\n"


def check_lock(folder: Path) -> None:
    """Checks that no other process has locked the folder that this one has locked.

    That happens if somebody moves or removes the folder while this process writes it, and another one makes it again.

    Raises:
        OSError: another process has.
    """
    holder = ""
    with contextlib.suppress(OSError):  # a mounted disk may be slow to show it
        holder = (folder / LOCK).read_text(encoding="utf-8")
    if holder and holder != _own_name():
        raise OSError(ESTALE, f"it was moved or removed, and now belongs to {holder.strip()}", str(folder))


def _lock_file(file: TextIO, shared: bool) -> None:
    if sys.platform == "win32":
        import msvcrt

        file.seek(1 << 20)  # a byte beyond the text, so that others can still read the text
        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
    else:
        import fcntl

        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)


def first_free(name: str, suffix: str = "") -> str:
    """Returns the first of `name`, `name_2`, `name_3`, ..., each with the suffix, that does not exist."""
    names = (f"{name}{suffix}" if n == 1 else f"{name}_{n}{suffix}" for n in count(1))
    return next(name for name in names if not os.path.lexists(name))


def check_free_space(folder: Path, needed: float, purpose: str) -> None:
    """Checks that the disk of a folder, which need not exist yet, has `needed` bytes free.

    Raises:
        UserError: the disk has less.
    """
    free = shutil.disk_usage(nearest_existing(folder)).free
    if needed > free:
        raise UserError(
            f"{folder} has {describe_free_space(folder)}, but about {format_bytes(needed)} are needed to {purpose}. "
            "Free some disk space, or use a folder on a larger disk."
        )
