"""One file from a Hugging Face Hub to a path: resumed where an earlier try ended, and only kept if it is the file that
the repository names."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import msgspec

_CHUNK_BYTES: Final = 1 << 20
_TIMEOUT_SECONDS: Final = 30.0
"""To connect, and between two pieces."""


class HubFile(msgspec.Struct, frozen=True, kw_only=True):
    """What the repository says of a file."""

    name: str
    size: int
    digest: str
    """sha256 of a large file, git's blob id (sha1) of any other."""
    is_large: bool

    def hasher(self) -> Any:
        if self.is_large:
            return hashlib.sha256()
        return hashlib.sha1(b"blob %d\0" % self.size, usedforsecurity=False)


class WrongContent(Exception):
    """What was sent is not the file."""


class HttpFailure(Exception):
    """The answer is an error."""

    def __init__(self, status: int, retry_after: float | None) -> None:
        super().__init__(f"HTTP status {status}")
        self.status = status
        self.retry_after = retry_after


def download(file: HubFile, url: str, headers: dict[str, str], path: Path, on_bytes: Callable[[int], None]) -> None:
    """`path` holds the file afterwards. `on_bytes` is told how many bytes more are there, what was there before
    included, and a negative number when some are thrown away; it may raise to end the download.

    Raises HttpFailure, WrongContent, OSError, and the client library's errors of transport. What has come until then
    stays in `path` + `.part`.
    """
    import huggingface_hub

    part = path.with_name(f"{path.name}.part")
    have = part.stat().st_size if part.exists() else 0
    if have > file.size:
        part.unlink()
        have = 0
    digest = file.hasher()
    for piece in _pieces(part) if have else ():
        digest.update(piece)
        on_bytes(len(piece))
    if have < file.size or not have:
        wanted = {**headers, "range": f"bytes={have}-"} if have else headers
        # Redirects lead to a storage host, to which the client does not pass on who we are.
        session = huggingface_hub.get_session()
        with session.stream("GET", url, headers=wanted, timeout=_TIMEOUT_SECONDS, follow_redirects=True) as answer:
            if answer.status_code not in (200, 206):
                raise HttpFailure(answer.status_code, retry_after(answer.headers.get("retry-after")))
            resumed = answer.status_code == 206
            if have and not resumed:
                on_bytes(-have)
                have = 0
                digest = file.hasher()
            with part.open("ab" if resumed else "wb") as out:
                # As they are sent: a compressed answer would not be the bytes that a range counts.
                for piece in answer.iter_raw(_CHUNK_BYTES):
                    have += len(piece)
                    if have > file.size:
                        break
                    out.write(piece)
                    digest.update(piece)
                    on_bytes(len(piece))
                out.flush()
                os.fsync(out.fileno())
    if have < file.size:
        raise ConnectionError(f"{file.name}: the connection ended after {have} of {file.size} bytes")
    if have > file.size or digest.hexdigest() != file.digest:
        part.unlink()
        on_bytes(-min(have, file.size))
        raise WrongContent(f"{file.name}: what was sent is not what the repository names: its hash differs")
    part.rename(path)


def retry_after(header: str | None) -> float | None:
    """Seconds; None where the server does not say."""
    try:
        return max(0.0, float(header)) if header is not None else None
    except ValueError:
        # The other form that the header may have is a date; nobody sends it with a 429.
        return None


def _pieces(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while piece := file.read(_CHUNK_BYTES):
            yield piece
