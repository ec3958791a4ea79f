"""`models fetch`: a checkpoint from a Hugging Face Hub into a directory, whole or not at all.

Files come into a directory beside it, where another try finds them; the last step renames it. Whoever sees the
directory sees a complete checkpoint of one commit, each file checked against the hash that the repository gives.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from minisgl.hub.download import HttpFailure, HubFile, WrongContent, download, retry_after
from minisgl.hub.errors import HubError
from minisgl.hub.resolve import CHECKPOINT_FILES
from minisgl.version import __version__
from minisgl.wire.status import FetchFailureReason, FetchStatus

logger = logging.getLogger(__name__)

RECORD: Final = "minisgl-fetch.json"
"""In the directory: where it is from."""

_PARALLEL: Final = 4
_MOST_TRIES: Final = 6
"""In a row without a byte more."""
_FIRST_PAUSE_SECONDS: Final = 1.0
_LONGEST_PAUSE_SECONDS: Final = 60.0
_RATE_LIMIT_SECONDS: Final = 30.0
"""Before the next try, where the Hub does not say."""
_MOST_WAITING_SECONDS: Final = 900.0
"""For a Hub that limits us, together."""
_PROGRESS_LOG_SECONDS: Final = 10.0

T = TypeVar("T")


class FetchError(HubError):
    """The checkpoint cannot be fetched."""

    code: FetchFailureReason

    def __init__(self, code: FetchFailureReason, message: str) -> None:
        super().__init__(code, message)

    @property
    def can_be_cured_by_another_try(self) -> bool:
        return self.code not in ("AuthRequired", "NotFound")


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """A repository, as one asks for it."""

    repository: str
    revision: str
    endpoint: str | None
    """None: the public Hub, or what HF_ENDPOINT says."""


def fetch(source: Source, directory: Path, publish: Callable[[FetchStatus], None]) -> FetchStatus:
    """`directory` holds the checkpoint afterwards; one that was there before is kept as it is. Raises FetchError,
    HubError `directory_in_use`, OSError."""
    if (directory / "config.json").is_file():
        return _already_there(directory)
    if directory.exists() and any(directory.iterdir()):
        raise HubError("directory_in_use", f"{directory} holds something else than a checkpoint: give another one")
    try:
        return _Fetch(source, directory, publish).run()
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise FetchError("NoSpace", f"no space is left in {directory.parent}: make the volume larger") from error
        raise


def _already_there(directory: Path) -> FetchStatus:
    try:
        commit = msgspec.json.decode((directory / RECORD).read_bytes(), type=FetchRecord).commit
    except (OSError, msgspec.MsgspecError):
        # Somebody put it there by hand.
        commit = ""
    return FetchStatus(phase="Done", percent=100, commit=commit)


class FetchRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Where a fetched checkpoint is from."""

    repository: str
    revision: str
    commit: str


class _Fetch:
    def __init__(self, source: Source, directory: Path, publish: Callable[[FetchStatus], None]) -> None:
        import huggingface_hub

        self._source = source
        self._directory = directory
        self._publish = publish
        self._api = huggingface_hub.HfApi(endpoint=source.endpoint)
        self._status = FetchStatus()
        self._lock = threading.Lock()
        self._total = 0
        self._have = 0
        self._furthest = 0
        self._waited = 0.0
        self._logged_at = 0.0
        self._stop = threading.Event()

    def run(self) -> FetchStatus:
        self._say(FetchStatus())
        commit, files = self._patiently(self._resolve)
        self._say(FetchStatus(phase="Downloading", commit=commit))
        self._directory.parent.mkdir(parents=True, exist_ok=True)
        with _only_one(self._directory, waiting=lambda: self._say(self._status)):
            if (self._directory / "config.json").is_file():
                return _already_there(self._directory)
            partial = self._directory.with_name(f"{self._directory.name}.partial-{commit[:12]}")
            self._clean(partial)
            partial.mkdir(exist_ok=True)
            self._check_space(files, partial)
            self._download_all(commit, files, partial)
            record = FetchRecord(repository=self._source.repository, revision=self._source.revision, commit=commit)
            (partial / RECORD).write_bytes(msgspec.json.encode(record))
            partial.rename(self._directory)
        done = FetchStatus(phase="Done", percent=100, commit=commit)
        self._say(done)
        return done

    def _resolve(self) -> tuple[str, list[HubFile]]:
        from huggingface_hub import RepoFile

        repository = self._source.repository
        commit = self._api.model_info(repository, revision=self._source.revision, timeout=30.0).sha
        if not commit:
            raise FetchError("NotFound", f"{repository} has no commit at revision {self._source.revision}")
        entries = self._api.list_repo_tree(repository, revision=commit)
        files = [
            HubFile(
                name=entry.path,
                size=entry.size,
                digest=entry.lfs.sha256 if entry.lfs is not None else entry.blob_id,
                is_large=entry.lfs is not None,
            )
            for entry in entries
            if isinstance(entry, RepoFile) and "/" not in entry.path
        ]
        wanted = wanted_files(files)
        names = {file.name for file in wanted}
        if "config.json" not in names or not any(name.endswith(".safetensors") for name in names):
            raise FetchError(
                "NotFound",
                f"{repository} at {self._source.revision} is no checkpoint that can be served: it needs config.json "
                "and *.safetensors",
            )
        return commit, wanted

    def _clean(self, keep: Path) -> None:
        """Remove what tries for other commits have left."""
        for other in self._directory.parent.glob(f"{self._directory.name}.partial-*"):
            if other != keep:
                shutil.rmtree(other, ignore_errors=True)

    def _check_space(self, files: Sequence[HubFile], partial: Path) -> None:
        have = sum(path.stat().st_size for path in partial.iterdir())
        needed = sum(file.size for file in files) - have
        free = shutil.disk_usage(partial).free
        if needed > free:
            raise FetchError(
                "NoSpace",
                f"{self._source.repository} needs {_gib(needed)} more, and {partial.parent} has {_gib(free)} free: "
                "make the volume larger",
            )

    def _download_all(self, commit: str, files: Sequence[HubFile], partial: Path) -> None:
        self._total = sum(file.size for file in files) or 1
        with ThreadPoolExecutor(_PARALLEL, "download") as pool:
            # The largest first: none of them is then left alone at the end.
            ordered = sorted(files, key=lambda file: file.size, reverse=True)
            running = [pool.submit(self._download, commit, file, partial) for file in ordered]
            finished, _ = wait(running, return_when=FIRST_EXCEPTION)
            self._stop.set()
            errors = [error for future in finished if (error := future.exception()) is not None]
            for future in running:
                future.cancel()
        if errors:
            raise errors[0]

    def _download(self, commit: str, file: HubFile, partial: Path) -> None:
        import huggingface_hub

        path = partial / file.name
        if path.is_file() and path.stat().st_size == file.size:
            # Checked before it got this name.
            self._on_bytes(file.size)
            return
        url = huggingface_hub.hf_hub_url(
            self._source.repository, file.name, revision=commit, endpoint=self._source.endpoint
        )
        headers = {"accept-encoding": "identity", "user-agent": f"minisgl/{__version__}"}
        if token := huggingface_hub.get_token():
            headers["authorization"] = f"Bearer {token}"
        counted = 0

        def on_bytes(number: int) -> None:
            nonlocal counted
            counted += number
            self._on_bytes(number)

        def once() -> None:
            nonlocal counted
            self._on_bytes(-counted)
            counted = 0
            download(file, url, headers, path, on_bytes)

        self._patiently(once, lambda: counted)

    def _patiently(self, act: Callable[[], T], progress: Callable[[], int] = lambda: 0) -> T:
        """Try until it works. Raises FetchError when another try would not help, or when there were enough."""
        tries, furthest = 0, 0
        while True:
            try:
                found = act()
            except Exception as error:
                failure = _understood(error, self._source)
                if failure is None:
                    raise
                if not failure.can_be_cured_by_another_try:
                    raise failure from error
                if progress() > furthest:
                    tries, furthest = 0, progress()
                tries += 1
                if failure.code == "RateLimited":
                    pause = _asked_pause(error)
                    if self._waited + pause > _MOST_WAITING_SECONDS:
                        raise failure from error
                    self._waited += pause
                elif tries >= _MOST_TRIES:
                    raise failure from error
                else:
                    pause = min(_FIRST_PAUSE_SECONDS * 2 ** (tries - 1), _LONGEST_PAUSE_SECONDS)
                logger.warning("%s; next try in %.0f s", failure, pause)
                self._pause(pause, failure)
            else:
                with self._lock:
                    self._say_progress()
                return found

    def _pause(self, seconds: float, failure: FetchError) -> None:
        with self._lock:
            self._say(msgspec.structs.replace(self._status, reason=failure.code, message=f"{failure}; trying again"))
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            # Whoever watches must see that we are not stuck.
            self._publish(self._status)
            if self._stop.wait(min(left, _PROGRESS_LOG_SECONDS)):
                raise failure

    def _say_progress(self, **changes: int) -> None:
        """Only now is the trouble over: a try that may end as the last one did says nothing new."""
        status = msgspec.structs.replace(self._status, reason="", message="", **changes)
        if status != self._status:
            self._say(status)

    def _on_bytes(self, number: int) -> None:
        if self._stop.is_set():
            # Another file has failed for good.
            raise FetchError("Unreachable", "the download was given up")
        with self._lock:
            self._have += number
            percent = min(99, self._have * 100 // self._total)
            if self._have > self._furthest:
                self._furthest = self._have
                self._say_progress(percent=percent)
            now = time.monotonic()
            if now >= self._logged_at + _PROGRESS_LOG_SECONDS:
                self._logged_at = now
                logger.info("%s: %d %% of %s", self._source.repository, percent, _gib(self._total))

    def _say(self, status: FetchStatus) -> None:
        self._status = status
        self._publish(status)


def wanted_files(files: Sequence[HubFile]) -> list[HubFile]:
    """Those that a server reads. Some repositories have their weights a second time, in their maker's format."""
    wanted = [file for file in files if any(fnmatch(file.name, pattern) for pattern in CHECKPOINT_FILES)]
    weights = [file for file in wanted if file.name.endswith(".safetensors")]
    ours = [file for file in weights if file.name.startswith("model")]
    return [file for file in wanted if file not in weights or file in (ours or weights)]


@contextmanager
def _only_one(directory: Path, waiting: Callable[[], None]) -> Iterator[None]:
    """Two pods of a Job may run at the same time, when one of them is slow to end."""
    lock = os.open(directory.with_name(f".{directory.name}.lock"), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
    try:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                logger.info("somebody else fetches %s: waiting", directory)
                waiting()
                time.sleep(1.0)
        yield
    finally:
        os.close(lock)


def _understood(error: Exception, source: Source) -> FetchError | None:
    """What an error means for the whole; None: a fault of ours, or one of the disk."""
    import httpx2
    from huggingface_hub import errors

    if isinstance(error, FetchError):
        return error
    if isinstance(error, errors.HfHubHTTPError):
        status: int = error.response.status_code if error.response is not None else 0
    elif isinstance(error, HttpFailure):
        status = error.status
    elif isinstance(error, WrongContent | ConnectionError | httpx2.TransportError):
        return FetchError("Unreachable", f"{_where(source)}: {error or type(error).__name__}")
    elif isinstance(error, errors.HFValidationError):
        return FetchError("NotFound", f"{source.repository!r} is no name of a repository: it has the form owner/name")
    else:
        return None
    name = f"{source.repository} at revision {source.revision}"
    if status in (401, 403):
        return FetchError(
            "AuthRequired",
            f"{_where(source)} does not give {name} to us (HTTP status {status}): it is private or gated, or there is "
            "no such repository. Check its name; give a token that may read it, after accepting its terms",
        )
    if status == 404:
        return FetchError("NotFound", f"{_where(source)} has no {name}: check its name and revision")
    if status == 429:
        return FetchError("RateLimited", f"{_where(source)} limits our requests: a token raises the limit")
    return FetchError("Unreachable", f"{_where(source)} does not give {name}: HTTP status {status}")


def _asked_pause(error: Exception) -> float:
    from huggingface_hub import errors

    seconds = None
    if isinstance(error, HttpFailure):
        seconds = error.retry_after
    elif isinstance(error, errors.HfHubHTTPError) and error.response is not None:
        seconds = retry_after(error.response.headers.get("retry-after"))
    return _RATE_LIMIT_SECONDS if seconds is None else seconds


def _where(source: Source) -> str:
    return source.endpoint or "the Hub"


def _gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**29 else f"{size / 2**20:.1f} MiB"
