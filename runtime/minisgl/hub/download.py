"""Download of one file from a Hub: resumed after an interruption, and kept only if its hash is that of the
repository."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from minisgl.hub.repository import HubFile

_CHUNK_BYTES: Final = 1 << 20
_TIMEOUT_SECONDS: Final = 30.0
"""To connect, and between two chunks."""


class WrongContent(Exception):
    """The received content is not that of the file."""


class HttpFailure(Exception):
    """The Hub answered with an error."""

    def __init__(self, status: int, retry_after: float | None) -> None:
        super().__init__(f"HTTP status {status}")
        self.status = status
        self.retry_after = retry_after
        """Seconds of the Retry-After header."""


def download(file: HubFile, url: str, headers: dict[str, str], path: Path, on_bytes: Callable[[int], None]) -> None:
    """Download a file to `path`, resuming the `path` + `.part` of an earlier attempt.

    `on_bytes` is called with the number of bytes added, those of the earlier attempt included, or with a negative
    number when bytes are discarded; an exception from it aborts the download. Raises HttpFailure, WrongContent,
    OSError, and transport errors of the client library; the `.part` file then stays.
    """
    import huggingface_hub

    part = path.with_name(f"{path.name}.part")
    received = part.stat().st_size if part.exists() else 0
    if received > file.size:
        part.unlink()
        received = 0
    digest = file.hasher()
    for chunk in _chunks(part) if received else ():
        digest.update(chunk)
        on_bytes(len(chunk))
    if received < file.size or not received:
        sent_headers = {**headers, "range": f"bytes={received}-"} if received else headers
        # Redirects lead to a storage host, to which the client does not send our token.
        session = huggingface_hub.get_session()
        with session.stream(
            "GET", url, headers=sent_headers, timeout=_TIMEOUT_SECONDS, follow_redirects=True
        ) as response:
            if response.status_code not in (200, 206):
                raise HttpFailure(response.status_code, retry_after(response.headers.get("retry-after")))
            resumed = response.status_code == 206
            if received and not resumed:
                on_bytes(-received)
                received = 0
                digest = file.hasher()
            with part.open("ab" if resumed else "wb") as out:
                # Raw: a range counts the bytes of the file, not those of a compressed response.
                for chunk in response.iter_raw(_CHUNK_BYTES):
                    received += len(chunk)
                    if received > file.size:
                        break
                    out.write(chunk)
                    digest.update(chunk)
                    on_bytes(len(chunk))
                out.flush()
                os.fsync(out.fileno())
    if received < file.size:
        raise ConnectionError(f"{file.name}: the connection closed after {received} of {file.size} bytes")
    if received > file.size or digest.hexdigest() != file.digest:
        part.unlink()
        on_bytes(-min(received, file.size))
        raise WrongContent(f"{file.name}: the received content differs from the repository's: its hash is wrong")
    part.rename(path)


def retry_after(header: str | None) -> float | None:
    """Seconds of a Retry-After header; None if it is absent or a date, which is not used with status 429."""
    try:
        return max(0.0, float(header)) if header is not None else None
    except ValueError:
        return None


def _chunks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            yield chunk
