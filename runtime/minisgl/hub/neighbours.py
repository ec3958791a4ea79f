"""Checkpoints beside a fetched one, from earlier fetches: identical files are linked from them, and those that nobody
needs are removed when the volume is full."""

from __future__ import annotations

import fcntl
import logging
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Literal

import msgspec

from minisgl.hub.files import RemoteFile
from minisgl.json_file import MAX_FILE_BYTES, check_size

logger = logging.getLogger(__name__)

RECORD: Final = "minisgl-fetch.json"
"""Name of the file with the FetchRecord, in the fetched directory."""

Prunable = Literal["", "partial", "unused"]

_PARTIAL: Final = re.compile(r"(?P<target>.+)\.partial-[0-9a-f]{1,12}")
_REMOVED: Final = re.compile(r"\..+\.removed")
_READ_BYTES: Final = 1 << 20


class FetchRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Origin of a fetched checkpoint."""

    repository: str
    revision: str
    commit: str
    owner: str = ""
    """Model that it was fetched for; empty: unknown, or several models use it."""
    files: dict[str, str] = {}
    """Digest of each file by name, as the Hub lists it."""


class Neighbours(msgspec.Struct, frozen=True, kw_only=True):
    """Use of the other directories beside the fetched one."""

    owner: str = ""
    """Model that the checkpoint is fetched for."""
    share_files: bool = False
    """Link large files that another checkpoint has already."""
    prune: Prunable = ""
    """Directories that may be removed when space is missing: partial downloads, or also fetched checkpoints of this
    owner that `keep` does not name."""
    keep: tuple[str, ...] = ()
    """Names of directories that are never removed."""


def read_record(directory: Path) -> FetchRecord | None:
    """The record of a fetched checkpoint; None for a directory that a user filled."""
    file = directory / RECORD
    try:
        check_size(file, MAX_FILE_BYTES)
        return msgspec.json.decode(file.read_bytes(), type=FetchRecord)
    except (OSError, ValueError, RecursionError, msgspec.MsgspecError):
        return None


def write_record(directory: Path, record: FetchRecord) -> None:
    """Write atomically: the file may be read at the same time."""
    temporary = directory / f".{RECORD}"
    temporary.write_bytes(msgspec.json.encode(record))
    temporary.rename(directory / RECORD)


@contextmanager
def try_lock(directory: Path) -> Iterator[bool]:
    """Hold the lock of a directory that a fetch writes; False if another process holds it."""
    lock = os.open(directory.with_name(f".{directory.name}.lock"), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(lock)


def link_files(files: Iterable[RemoteFile], directory: Path, checking: Callable[[], None]) -> int:
    """Link large files of `files` that `directory` lacks from checkpoints beside it; returns their bytes.

    A file counts as identical by the digest of its checkpoint's record. Without one, as in a partial download, a file
    of the same name and size is read and hashed; `checking` is called meanwhile.
    """
    missing = [file for file in files if file.is_large and not (directory / file.name).exists()]
    if not missing:
        return 0
    others = [path for path in _directories(directory.parent) if path != directory]
    records = {path: record.files if (record := read_record(path)) else {} for path in others}
    linked = 0
    for file in missing:
        for candidate in _candidates(file, records):
            if candidate.name not in records[candidate.parent] and not _has_digest(candidate, file, checking):
                continue
            try:
                os.link(candidate, directory / file.name)
            except OSError as error:
                # Some network file systems have no links, and a file of another user may not be linked.
                logger.info("cannot link %s, downloading it instead: %s", candidate, error)
                break
            (directory / f"{file.name}.part").unlink(missing_ok=True)
            linked += file.size
            logger.info("%s is linked from %s", file.name, candidate.parent.name)
            break
    return linked


def _candidates(file: RemoteFile, records: dict[Path, dict[str, str]]) -> Iterator[Path]:
    """Files that may be identical, those with a recorded digest first."""
    for directory, digests in records.items():
        for name, digest in digests.items():
            if digest == file.digest and "/" not in name and _size(directory / name) == file.size:
                yield directory / name
    for directory, digests in records.items():
        if file.name not in digests and _size(directory / file.name) == file.size:
            yield directory / file.name


def _size(path: Path) -> int | None:
    """Size of a regular file; None for anything else. A hard link to a symbolic link would be a symbolic link too, to a
    file that others may remove."""
    try:
        found = path.lstat()
    except OSError:
        return None
    return found.st_size if stat.S_ISREG(found.st_mode) else None


def _has_digest(path: Path, file: RemoteFile, checking: Callable[[], None]) -> bool:
    if not file.hashed:
        return False
    digest = file.hasher()
    try:
        with path.open("rb") as content:
            while chunk := content.read(_READ_BYTES):
                digest.update(chunk)
                checking()
    except OSError as error:
        logger.info("cannot read %s: %s", path, error)
        return False
    return bool(digest.hexdigest() == file.digest)


def make_room(needed: int, directory: Path, settings: Neighbours) -> None:
    """Remove directories beside `directory` that may be removed, the oldest first, until `needed` bytes are free.
    Without enough of them nothing is removed."""
    if settings.prune and needed > shutil.disk_usage(directory).free:
        # A process was killed while it removed them.
        for path in _directories(directory.parent):
            if _REMOVED.fullmatch(path.name):
                shutil.rmtree(path, ignore_errors=True)
    removable = sorted(_removable(directory, settings), key=lambda path: path.stat().st_mtime)
    if needed > shutil.disk_usage(directory).free + reclaimable_bytes(removable):
        return
    for path in removable:
        if needed <= shutil.disk_usage(directory).free:
            return
        with try_lock(path.with_name(_target(path))) as locked:
            # The state may have changed before the lock was taken.
            if locked and path in _removable(directory, settings):
                logger.info("removing %s, which is not in use, for space", path)
                _remove(path)


def _remove(path: Path) -> None:
    """Remove a directory. It is renamed first, so that a crash leaves no incomplete checkpoint under its name."""
    removed = path.with_name(f".{path.name}.removed")
    path.rename(removed)
    shutil.rmtree(removed, ignore_errors=True)


def _removable(directory: Path, settings: Neighbours) -> list[Path]:
    """Directories that `settings` allow to remove; never one with the name of `directory` or a part of its fetch."""
    found = []
    for path in _directories(directory.parent):
        target = _target(path)
        if not settings.prune or target == _target(directory) or _REMOVED.fullmatch(path.name):
            continue
        if target != path.name:
            found.append(path)
        elif settings.prune == "unused" and target not in settings.keep:
            record = read_record(path)
            if record is not None and record.owner and record.owner == settings.owner:
                found.append(path)
    return found


def _target(path: Path) -> str:
    """Name of the checkpoint that a directory is, or is a partial download of."""
    match = _PARTIAL.fullmatch(path.name)
    return path.name if match is None else match["target"]


def _directories(parent: Path) -> list[Path]:
    return sorted(path for path in parent.iterdir() if path.is_dir() and not path.is_symlink())


def reclaimable_bytes(directories: Sequence[Path]) -> int:
    """Bytes that the removal of directories frees: files without a link elsewhere."""
    links: dict[tuple[int, int], tuple[int, int, int]] = {}
    for directory in directories:
        for path in directory.iterdir():
            found = path.lstat()
            key = (found.st_dev, found.st_ino)
            seen = links.get(key, (0, 0, 0))[0]
            links[key] = (seen + 1, found.st_nlink, found.st_blocks * 512)
    return sum(size for seen, count, size in links.values() if seen == count)
