"""Fetch a checkpoint from a Hugging Face Hub or a bucket into a directory, atomically.

Files are downloaded into a directory beside the target, where a later attempt finds them; the last step renames it. The
target is thus always a complete checkpoint of one commit, with the hash of every file checked where the server lists
hashes.
"""

from __future__ import annotations

import errno
import logging
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from minisgl.errors import HubError
from minisgl.hub.download import download
from minisgl.hub.fetch_error import ContentChanged, FetchError
from minisgl.hub.fetch_progress import LOG_SECONDS, FetchProgress, format_bytes
from minisgl.hub.files import RemoteFile
from minisgl.hub.neighbours import (
    FetchRecord,
    Neighbours,
    link_files,
    make_room,
    read_record,
    try_lock,
    write_record,
)
from minisgl.hub.origin import Origin
from minisgl.wire.status import FetchStatus

logger = logging.getLogger(__name__)

_PARALLEL_DOWNLOADS: Final = 4
_MAX_ATTEMPTS: Final = 6
"""Consecutive attempts without progress."""
_FIRST_WAIT_SECONDS: Final = 1.0
_MAX_WAIT_SECONDS: Final = 60.0
_SILENCE_SECONDS: Final = 4.0
"""Time without an answer of the server after which it is reported. Time limits of names and connections are longer."""
_MAX_RATE_LIMIT_SECONDS: Final = 900.0
"""Total wait for a server that limits our requests."""
_MAX_LISTINGS: Final = 3
"""How often files are listed that change during their download."""

T = TypeVar("T")


def fetch(
    origin: Origin,
    directory: Path,
    publish: Callable[[FetchStatus], None],
    neighbours: Neighbours | None = None,
) -> FetchStatus:
    """Fetch a checkpoint into `directory`, unless it holds one already; returns the final status.

    `neighbours`: use of the other checkpoints in the parent directory; None: they are not touched. `publish` is called
    with each change of the status, from any thread. Raises FetchError, HubError `directory_in_use` and
    `directory_unusable`.
    """
    neighbours = neighbours or Neighbours()
    with _disk_errors(directory):
        if (directory / "config.json").is_file():
            return _share(directory, neighbours, publish)
        if directory.exists() and any(directory.iterdir()):
            raise HubError("directory_in_use", f"{directory} is neither empty nor a checkpoint; use another directory")
        return _Fetch(origin, lambda commit: directory, publish, neighbours).run()


def fetch_snapshot(origin: Origin, parent: Path, publish: Callable[[FetchStatus], None]) -> Path:
    """Fetch the current checkpoint into a directory of `parent` that is called after its commit, unless it is there;
    returns the directory. Files that have not changed since an earlier one are linked from it.

    Raises FetchError, and HubError `directory_unusable`.
    """
    with _disk_errors(parent):
        neighbours = Neighbours(share_files=True, prune="partial")
        done = _Fetch(origin, lambda commit: parent / commit, publish, neighbours).run()
    return parent / done.commit


@contextmanager
def _disk_errors(directory: Path) -> Iterator[None]:
    """Raise FetchError or HubError for errors of the disk."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise FetchError("NoSpace", f"no space is left in {directory.parent}: make the volume larger") from error
        raise HubError("directory_unusable", f"{directory}: {error}") from error


def _share(directory: Path, neighbours: Neighbours, publish: Callable[[FetchStatus], None]) -> FetchStatus:
    """Use an existing checkpoint."""
    if (record := _foreign_record(directory, neighbours)) is not None:
        with _locked(directory, waiting=lambda: publish(FetchStatus())):
            # The owner may have removed it in the meantime; the next attempt then fetches it.
            _end_ownership(directory, record)
    return _existing_status(directory)


def _foreign_record(directory: Path, neighbours: Neighbours) -> FetchRecord | None:
    """The record of a checkpoint with another owner; None for any other checkpoint."""
    record = read_record(directory)
    return None if record is None or record.owner in ("", neighbours.owner) else record


def _end_ownership(directory: Path, record: FetchRecord) -> None:
    """Let a checkpoint have no owner, because several models use it from now on. Its lock must be held."""
    write_record(directory, msgspec.structs.replace(record, owner=""))


def _existing_status(directory: Path) -> FetchStatus:
    record = read_record(directory)
    # Without a record, a user copied the checkpoint there.
    return FetchStatus(phase="Done", percent=100, commit="" if record is None else record.commit)


class _Fetch:
    """One fetch, with its download threads."""

    def __init__(
        self,
        origin: Origin,
        place: Callable[[str], Path],
        publish: Callable[[FetchStatus], None],
        neighbours: Neighbours,
    ) -> None:
        """`place`: the directory for a commit."""
        self._origin = origin
        self._place = place
        self._neighbours = neighbours
        self._progress = FetchProgress(origin.repository, publish)
        self._rate_limit_seconds = 0.0
        self._stop = threading.Event()

    def run(self) -> FetchStatus:
        for _ in range(_MAX_LISTINGS):
            self._progress.update(phase="Resolving")
            self._stop.clear()
            commit, files = self._with_retries(self._list)
            self._progress.update(phase="Downloading", commit=commit)
            try:
                return self._fetch(commit, files, self._place(commit))
            except ContentChanged as error:
                logger.warning("%s during the download; listing the files again", error)
        raise FetchError(
            "Unreachable",
            f"files of {self._origin.repository} changed during each of {_MAX_LISTINGS} downloads: wait until their "
            "upload has ended",
        )

    def _fetch(self, commit: str, files: Sequence[RemoteFile], directory: Path) -> FetchStatus:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with _locked(directory, waiting=self._progress.repeat):
            if (directory / "config.json").is_file():
                # Another model may have fetched it in the meantime.
                if (record := _foreign_record(directory, self._neighbours)) is not None:
                    _end_ownership(directory, record)
                return _existing_status(directory)
            partial = directory.with_name(f"{directory.name}.partial-{commit[:12]}")
            partial.mkdir(exist_ok=True)
            if self._neighbours.share_files:
                link_files(files, partial, checking=self._progress.repeat)
            _remove_other_commits(directory, partial)
            self._check_space(files, partial)
            self._download_all(commit, files, partial)
            record = FetchRecord(
                repository=self._origin.repository,
                revision=self._origin.revision,
                commit=commit,
                owner=self._neighbours.owner,
                files={file.name: file.digest for file in files},
            )
            write_record(partial, record)
            partial.rename(directory)
        return self._progress.update(phase="Done", percent=100, reason="", message="")

    def _list(self) -> tuple[str, list[RemoteFile]]:
        """List the checkpoint, and say so if the server keeps silent."""
        message = f"{self._origin.server} has not answered for {_SILENCE_SECONDS:.0f} s: check the network"

        def complain() -> None:
            logger.warning(message)
            self._progress.update(reason="Unreachable", message=message)

        timer = threading.Timer(_SILENCE_SECONDS, complain)
        timer.daemon = True
        timer.start()
        try:
            return self._origin.listing()
        finally:
            timer.cancel()

    def _check_space(self, files: Sequence[RemoteFile], partial: Path) -> None:
        existing = sum(path.stat().st_size for path in partial.iterdir())
        needed = sum(file.size for file in files) - existing
        make_room(needed, partial, self._neighbours)
        free = shutil.disk_usage(partial).free
        if needed > free:
            self._progress.update(needed_bytes=needed, free_bytes=free)
            raise FetchError(
                "NoSpace",
                f"{self._origin.repository} needs {format_bytes(needed)} more, and {partial.parent} has "
                f"{format_bytes(free)} free: make the volume larger",
            )

    def _download_all(self, commit: str, files: Sequence[RemoteFile], partial: Path) -> None:
        self._progress.start_download(sum(file.size for file in files))
        with ThreadPoolExecutor(_PARALLEL_DOWNLOADS, "download") as pool:
            # Largest first, so that no large file is left alone at the end.
            ordered = sorted(files, key=lambda file: file.size, reverse=True)
            running = [pool.submit(self._download, commit, file, partial) for file in ordered]
            finished, _ = wait(running, return_when=FIRST_EXCEPTION)
            self._stop.set()
            errors = [error for future in finished if (error := future.exception()) is not None]
            for future in running:
                future.cancel()
        if errors:
            raise errors[0]

    def _download(self, commit: str, file: RemoteFile, partial: Path) -> None:
        path = partial / file.name
        path.parent.mkdir(exist_ok=True)
        if path.is_file() and path.stat().st_size == file.size:
            # Its hash was checked before it was renamed to this name.
            self._add_bytes(file.size)
            return
        counted = 0

        def on_bytes(number: int) -> None:
            nonlocal counted
            counted += number
            self._add_bytes(number)

        def attempt() -> None:
            nonlocal counted
            self._add_bytes(-counted)
            counted = 0
            download(self._origin, commit, file, path, on_bytes)

        self._with_retries(attempt, lambda: counted)

    def _add_bytes(self, number: int) -> None:
        if self._stop.is_set():
            # Another file failed permanently.
            raise FetchError("Unreachable", "the download was aborted")
        self._progress.add_bytes(number)

    def _with_retries(self, act: Callable[[], T], received: Callable[[], int] = lambda: 0) -> T:
        """Call `act` until it succeeds; attempts that make `received` grow do not count. Raises FetchError when the
        error is permanent or the attempts are used up."""
        attempts, most_received = 0, 0
        while True:
            try:
                result = act()
            except Exception as error:
                failure = self._origin.failure(error)
                if failure is None:
                    raise
                if not failure.is_retryable:
                    raise failure from error
                if received() > most_received:
                    attempts, most_received = 0, received()
                attempts += 1
                if failure.code == "RateLimited":
                    seconds = self._origin.rate_limit_seconds(error)
                    if self._rate_limit_seconds + seconds > _MAX_RATE_LIMIT_SECONDS:
                        raise failure from error
                    self._rate_limit_seconds += seconds
                elif attempts >= _MAX_ATTEMPTS:
                    raise failure from error
                else:
                    seconds = min(_FIRST_WAIT_SECONDS * 2 ** (attempts - 1), _MAX_WAIT_SECONDS)
                logger.warning("%s; retrying in %.0f s", failure, seconds)
                self._wait_before_retry(seconds, failure)
            else:
                self._progress.clear_failure()
                return result

    def _wait_before_retry(self, seconds: float, failure: FetchError) -> None:
        self._progress.update(reason=failure.code, message=f"{failure}; retrying")
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            self._progress.repeat()
            if self._stop.wait(min(left, LOG_SECONDS)):
                raise failure


def _remove_other_commits(directory: Path, keep: Path) -> None:
    """Remove the partial downloads of other commits."""
    for other in directory.parent.glob(f"{directory.name}.partial-*"):
        if other != keep:
            shutil.rmtree(other, ignore_errors=True)


@contextmanager
def _locked(directory: Path, waiting: Callable[[], None]) -> Iterator[None]:
    """Hold the lock of a directory: two pods of a Job can run at the same time while one of them shuts down. `waiting`
    is called every second until the lock is free."""
    while True:
        with try_lock(directory) as locked:
            if locked:
                yield
                return
        logger.info("another process is fetching %s; waiting", directory)
        waiting()
        time.sleep(1.0)
