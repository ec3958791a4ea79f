"""Tokenizer files from an engine, over HTTP, into a directory that is named after what is in it.

A frontend has no model volume: which files its engines use it learns from their hashes, and what arrives is used only
if it has these.
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

from minisgl.tokenizer.errors import TokenizerError
from minisgl.tokenizer.model_files import TOKENIZER_FILES, hash_tokenizer_files

logger = logging.getLogger(__name__)

MAX_FILE_BYTES: Final = 128 << 20
"""The largest tokenizers of today have a fourth of it."""
KEPT_SETS: Final = 4
"""Of files; a rollout needs two at a time."""

_TIMEOUT_SECONDS: Final = 10.0
_CHUNK_BYTES: Final = 1 << 20
_SHA256: Final = re.compile(r"[0-9a-f]{64}")


def obtain(hashes: Mapping[str, str], sources: Sequence[tuple[str, int]], cache: Path) -> Path:
    """The directory below `cache` with exactly the files of these hashes (name → sha256), from the first of the
    sources (host and port) that has them. Other processes may do the same at the same time. Raises TokenizerError."""
    _check(hashes)
    directory = cache / _key(hashes)
    if directory.is_dir():
        if hash_tokenizer_files(directory) == dict(hashes):
            # The latest use: `_trim` removes what was used longest ago.
            os.utime(directory)
            return directory
        logger.warning("%s is damaged and is fetched again", directory)
        shutil.rmtree(directory)
    problems = []
    for host, port in sources:
        try:
            return _download(hashes, host, port, directory)
        except (OSError, http.client.HTTPException, _WrongAnswer) as error:
            problems.append(f"{host}: {error or type(error).__name__}")
    raise TokenizerError("tokenizer_unavailable", f"no engine gave the tokenizer files: {'; '.join(problems)}")


class _WrongAnswer(Exception):
    """What was sent is not the file."""


def _check(hashes: Mapping[str, str]) -> None:
    """They come from another process."""
    unknown = sorted(name for name in hashes if name not in TOKENIZER_FILES)
    broken = sorted(name for name, value in hashes.items() if not _SHA256.fullmatch(value))
    if unknown or broken:
        raise TokenizerError(
            "tokenizer_unavailable",
            f"the engine names tokenizer files that cannot be fetched ({', '.join(unknown + broken)}): "
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
            # Another process was first. What it has put there was checked like ours.
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
        raise _WrongAnswer(f"{name}: HTTP status {response.status}")
    digest = hashlib.sha256()
    size = 0
    with path.open("xb") as file:
        while chunk := response.read(_CHUNK_BYTES):
            size += len(chunk)
            if size > MAX_FILE_BYTES:
                raise _WrongAnswer(f"{name} is larger than {MAX_FILE_BYTES >> 20} MiB")
            digest.update(chunk)
            file.write(chunk)
    if digest.hexdigest() != expected:
        raise _WrongAnswer(f"{name} has another hash than the engine says")


def _trim(keep: Path) -> None:
    """Remove what was used longest ago."""
    sets = [path for path in keep.parent.iterdir() if path.is_dir() and not path.name.startswith("partial-")]
    by_age = sorted((path for path in sets if path != keep), key=_modified, reverse=True)
    for path in by_age[KEPT_SETS - 1 :]:
        shutil.rmtree(path, ignore_errors=True)


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        # Another process has just removed it.
        return 0.0
