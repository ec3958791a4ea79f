"""Tokenizer files with the hashes that an engine names: the checkpoint's own, or fetched from an engine over HTTP.

A frontend pod has no model volume. The hashes in a welcome name the files of an engine, and downloaded files are used
only if they have these hashes.
"""

from __future__ import annotations

import hashlib
import http.client
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from minisgl.errors import TokenizerError
from minisgl.tokenizer.file_hashes import TOKENIZER_FILES, differing_files, hash_tokenizer_files

logger = logging.getLogger(__name__)

MAX_FILE_BYTES: Final = 128 << 20
"""Largest file that is accepted; the largest tokenizers of today have a fourth of it."""
CACHED_FILE_SETS: Final = 4
"""Sets of files in the cache; a rollout needs two at a time."""

_TIMEOUT_SECONDS: Final = 10.0
_CHUNK_BYTES: Final = 1 << 20
_SHA256: Final = re.compile(r"[0-9a-f]{64}")


def local_files(directory: Path, hashes: Mapping[str, str]) -> Path:
    """Return the checkpoint's `directory` if its tokenizer files have these hashes. Raises TokenizerError."""
    local = hash_tokenizer_files(directory)
    if differing := differing_files(local, hashes):
        raise TokenizerError(
            "tokenizer_unavailable",
            f"the engine's tokenizer files differ from those of the checkpoint ({', '.join(differing)}): "
            "restart the server",
        )
    return directory


def fetch_files(hashes: Mapping[str, str], hosts: Sequence[str], port: int, cache: Path) -> Path:
    """Return the directory below `cache` with exactly the files of these hashes (name → sha256). Missing ones are
    fetched from the first of the hosts that has them. Several processes may do this at the same time.
    Raises TokenizerError."""
    _check(hashes)
    directory = cache / _key(hashes)
    if directory.is_dir():
        if hash_tokenizer_files(directory) == dict(hashes):
            # `_trim` removes the set that was used longest ago.
            os.utime(directory)
            return directory
        logger.warning("%s is damaged; fetching it again", directory)
        shutil.rmtree(directory)
    problems = []
    for host in hosts:
        try:
            return _download(hashes, host, port, directory)
        except (OSError, http.client.HTTPException, _BadResponse) as error:
            problems.append(f"{host}: {error or type(error).__name__}")
    raise TokenizerError("tokenizer_unavailable", f"no engine served the tokenizer files: {'; '.join(problems)}")


class _BadResponse(Exception):
    """A response that is not the file that was asked for."""


def _check(hashes: Mapping[str, str]) -> None:
    """Refuse names and hashes that must not become paths: they come from another process. Raises TokenizerError."""
    bad = sorted(name for name, value in hashes.items() if name not in TOKENIZER_FILES or not _SHA256.fullmatch(value))
    if bad:
        raise TokenizerError(
            "tokenizer_unavailable",
            f"the engine names tokenizer files that cannot be fetched ({', '.join(bad)}): "
            "run engines and frontends of the same version",
        )


def _key(hashes: Mapping[str, str]) -> str:
    text = "".join(f"{name} {value}\n" for name, value in sorted(hashes.items()))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _download(hashes: Mapping[str, str], host: str, port: int, directory: Path) -> Path:
    directory.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix="partial-", dir=directory.parent))
    try:
        connection = http.client.HTTPConnection(host, port, timeout=_TIMEOUT_SECONDS)
        try:
            for name, expected in hashes.items():
                _download_file(connection, name, expected, partial / name)
        finally:
            connection.close()
        try:
            partial.rename(directory)
        except OSError:
            # Another process was faster. It has checked the files in the same way.
            if not directory.is_dir():
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    _trim(directory)
    return directory


def _download_file(connection: http.client.HTTPConnection, name: str, expected: str, path: Path) -> None:
    connection.request("GET", f"/files/{name}")
    response = connection.getresponse()
    if response.status != 200:
        raise _BadResponse(f"{name}: HTTP status {response.status}")
    digest = hashlib.sha256()
    size = 0
    path.parent.mkdir(exist_ok=True)
    with path.open("xb") as file:
        while chunk := response.read(_CHUNK_BYTES):
            size += len(chunk)
            if size > MAX_FILE_BYTES:
                raise _BadResponse(f"{name} is larger than {MAX_FILE_BYTES >> 20} MiB")
            digest.update(chunk)
            file.write(chunk)
    if digest.hexdigest() != expected:
        raise _BadResponse(f"{name} does not have the hash that the engine names")


def _trim(keep: Path) -> None:
    """Remove the sets that were used longest ago."""
    sets = [path for path in keep.parent.iterdir() if path.is_dir() and not path.name.startswith("partial-")]
    by_age = sorted((path for path in sets if path != keep), key=_modified, reverse=True)
    for path in by_age[CACHED_FILE_SETS - 1 :]:
        shutil.rmtree(path, ignore_errors=True)


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        # Another process has just removed the directory.
        return 0.0
