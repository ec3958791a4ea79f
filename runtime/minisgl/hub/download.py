"""Download of one file: resumed after an interruption, and kept only if it is the listed one."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from minisgl.hub.fetch_error import WrongContent
from minisgl.hub.files import RemoteFile
from minisgl.hub.origin import Origin

_CHUNK_BYTES: Final = 1 << 20


def download(
    origin: Origin, commit: str, file: RemoteFile, path: Path, on_bytes: Callable[[int], None] = lambda number: None
) -> None:
    """Download a file to `path`, resuming the `path` + `.part` of an earlier attempt.

    `on_bytes` is called with the number of bytes added, those of the earlier attempt included, or with a negative
    number when bytes are discarded; an exception from it aborts the download. Raises WrongContent, OSError, and errors
    of `origin`; the `.part` file then stays.
    """
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
        with origin.open(commit, file, received) as content:
            if content.first != received:
                on_bytes(-received)
                received = 0
                digest = file.hasher()
            with part.open("ab" if received else "wb") as out:
                for chunk in content.chunks:
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
    if received > file.size or (file.hashed and digest.hexdigest() != file.digest):
        part.unlink()
        on_bytes(-min(received, file.size))
        raise WrongContent(f"{file.name}: the received content differs from the repository's: its hash is wrong")
    part.rename(path)


def _chunks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            yield chunk
