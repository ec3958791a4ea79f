"""The part of a remote checkpoint that says whether it can be served: small files, and the headers of its weights."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from minisgl.hub.download import download
from minisgl.hub.fetch_error import ContentChanged, FetchError
from minisgl.hub.files import RemoteFile
from minisgl.hub.origin import Origin
from minisgl.models.checkpoint import MAX_HEADER_BYTES

_PARALLEL_DOWNLOADS: Final = 8
_FIRST_BYTES: Final = 1 << 20
"""Read at once: nearly all headers are shorter."""


def fetch_headers(origin: Origin, directory: Path) -> None:
    """Write the files of a checkpoint into `directory`, without the tensors: weight files have their header, their
    size, and a hole. Raises FetchError."""
    try:
        commit, files = origin.listing()
        with ThreadPoolExecutor(_PARALLEL_DOWNLOADS, "download") as pool:
            list(pool.map(lambda file: _fetch(origin, commit, file, directory), files))
    except ContentChanged as error:
        raise FetchError("Unreachable", f"{error} while it was read: check it again") from error
    except Exception as error:
        failure = origin.failure(error)
        if failure is None:
            raise
        raise failure from error


def _fetch(origin: Origin, commit: str, file: RemoteFile, directory: Path) -> None:
    path = directory / file.name
    path.parent.mkdir(parents=True, exist_ok=True)
    if not file.name.endswith(".safetensors"):
        download(origin, commit, file, path)
        return
    content = _read(origin, commit, file, 0, _FIRST_BYTES)
    end = 8 + int.from_bytes(content[:8], "little")
    if len(content) < end <= min(file.size, MAX_HEADER_BYTES):
        content += _read(origin, commit, file, len(content), end)
    with path.open("wb") as out:
        out.write(content[:end])
        out.truncate(file.size)


def _read(origin: Origin, commit: str, file: RemoteFile, first: int, end: int) -> bytes:
    """Bytes `first` to `end` of a file, without the last one."""
    if not file.size:
        # No range is within an empty file.
        return b""
    received = bytearray()
    with origin.open(commit, file, first, end) as content:
        skipped = first - content.first
        for chunk in content.chunks:
            received += chunk
            if len(received) >= skipped + end - first:
                break
    return bytes(received[skipped : skipped + end - first])
