"""The part of a repository that says whether it can be served: small files, and the headers of its weights."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from minisgl.hub.download import HttpFailure, download
from minisgl.hub.fetch_failures import classify_error
from minisgl.hub.repository import HubFile, Source, list_checkpoint
from minisgl.models.checkpoint import MAX_HEADER_BYTES

_PARALLEL_DOWNLOADS: Final = 8
_FIRST_BYTES: Final = 1 << 20
"""Read at once: nearly all headers are shorter."""
_CHUNK_BYTES: Final = 1 << 16
_TIMEOUT_SECONDS: Final = 30.0


def fetch_headers(source: Source, directory: Path) -> None:
    """Write the files of a checkpoint into `directory`, without the tensors: weight files have their header, their
    size, and a hole. Raises FetchError."""
    try:
        commit, files = list_checkpoint(source)
        with ThreadPoolExecutor(_PARALLEL_DOWNLOADS, "download") as pool:
            list(pool.map(lambda file: _fetch(source, commit, file, directory), files))
    except Exception as error:
        failure = classify_error(error, source)
        if failure is None:
            raise
        raise failure from error


def _fetch(source: Source, commit: str, file: HubFile, directory: Path) -> None:
    path = directory / file.name
    path.parent.mkdir(parents=True, exist_ok=True)
    url = source.url_of(file.name, commit)
    if not file.name.endswith(".safetensors"):
        download(file, url, source.request_headers(), path, on_bytes=lambda number: None)
        return
    headers = source.request_headers()
    content = _read(url, headers, 0, _FIRST_BYTES)
    end = 8 + int.from_bytes(content[:8], "little")
    if len(content) < end <= min(file.size, MAX_HEADER_BYTES):
        content += _read(url, headers, len(content), end)
    with path.open("wb") as out:
        out.write(content[:end])
        out.truncate(file.size)


def _read(url: str, headers: dict[str, str], first: int, end: int) -> bytes:
    """Bytes `first` to `end` of a file, without the last one. Raises HttpFailure, and transport errors of the client
    library."""
    import huggingface_hub

    received = bytearray()
    session = huggingface_hub.get_session()
    with session.stream(
        "GET",
        url,
        headers={**headers, "range": f"bytes={first}-{end - 1}"},
        timeout=_TIMEOUT_SECONDS,
        follow_redirects=True,
    ) as response:
        if response.status_code not in (200, 206):
            raise HttpFailure(response.status_code, None)
        # A server that knows no ranges sends the file from its beginning.
        skipped = first if response.status_code == 200 else 0
        for chunk in response.iter_raw(_CHUNK_BYTES):
            received += chunk
            if len(received) >= skipped + end - first:
                break
    return bytes(received[skipped : skipped + end - first])
