"""API keys from a file, and the middleware that requires one."""

from __future__ import annotations

import hmac
import logging
import os
import time
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Final, TypeVar

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from minisgl.errors import CodedError
from minisgl.frontend.errors import ApiError
from minisgl.frontend.server.request_record import find_record

logger = logging.getLogger(__name__)

T = TypeVar("T")

RELOAD_SECONDS: Final = 1.0
"""Least time between two checks whether the file has changed."""


class KeyFileError(CodedError):
    """The key file cannot be used. `code` is stable; the message says what to do next."""

    def __init__(self, message: str) -> None:
        super().__init__("invalid_key_file", message)


class KeyFile:
    """One key per line, optionally followed by a space and a name, which logs and limits use. Lines that begin with `#`
    are comments. A changed file is read again; if it cannot be used, the keys stay as they were."""

    def __init__(self, path: Path) -> None:
        """Raises KeyFileError."""
        self._path = path
        self._names = _read(path)
        self._stamp = file_stamp(path)
        self._checked_at = time.monotonic()
        self._reported: object = None

    def key_name(self, key: str) -> str | None:
        """Return the name of a valid key, None for any other."""
        self._reload()
        given = key_digest(key)
        found = None
        # All of them are compared, each in constant time: the time taken reveals nothing about any key.
        for digest, name in self._names.items():
            if hmac.compare_digest(digest, given):
                found = name
        return found

    def _reload(self) -> None:
        now = time.monotonic()
        if now < self._checked_at + RELOAD_SECONDS:
            return
        self._checked_at = now
        stamp = file_stamp(self._path)
        if stamp == self._stamp:
            return
        try:
            self._names = _read(self._path)
        except KeyFileError as error:
            if stamp != self._reported:
                self._reported = stamp
                logger.error("%s; keeping the previous keys", error)
            return
        self._stamp = stamp
        logger.info("read %d keys from %s", len(self._names), self._path)


def _read(path: Path) -> dict[bytes, str]:
    """Return the name of each key by the key's SHA-256."""
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise KeyFileError(f"cannot read the keys in {path}: {reason}") from error
    names = {}
    for number, line in enumerate(lines, 1):
        words = line.split(maxsplit=1)
        if words and not words[0].startswith("#"):
            name = words[1].strip() if len(words) > 1 else f"line {number}"
            names[key_digest(words[0])] = name
    if not names:
        raise KeyFileError(f"no key in {path}; write one per line")
    return names


def file_stamp(path: Path) -> tuple[int, int, int] | None:
    """Return what changes with the content of a file; None: it cannot be read."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    # With the inode: a mounted Secret is replaced as a whole.
    return status.st_mtime_ns, status.st_size, status.st_ino


class ApiKeyMiddleware:
    """Rejects requests without a valid key, except those to `open_paths`."""

    def __init__(self, app: ASGIApp, keys: KeyFile, open_paths: frozenset[str] = frozenset()) -> None:
        self._app = app
        self._keys = keys
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises ApiError."""
        if scope["path"] not in self._open_paths:
            name = check_key(Headers(scope=scope), self._keys.key_name)
            if (record := find_record(scope)) is not None:
                record.key_name = name
        await self._app(scope, receive, send)


def check_key(headers: Headers, find: Callable[[str], T | None]) -> T:
    """Return what `find` returns for a request's key; clients of Anthropic's API may send it in a header of its own.
    Raises ApiError if there is no key, or `find` returns None for it."""
    bearer, key = headers.get("authorization"), headers.get("x-api-key")
    if bearer is None and key is None:
        raise _unauthorized("missing_api_key", "missing API key; send `Authorization: Bearer KEY`")
    if bearer is not None:
        scheme, _, token = bearer.partition(" ")
        if scheme.lower() == "bearer" and (found := find(token.strip())) is not None:
            return found
    if key is not None and (found := find(key.strip())) is not None:
        return found
    raise _unauthorized("invalid_api_key", "invalid API key")


def key_digest(key: str) -> bytes:
    """Return the hash by which keys are kept and compared."""
    return sha256(key.encode("utf-8", "surrogateescape")).digest()


def _unauthorized(code: str, message: str) -> ApiError:
    # The body is not read, so the connection cannot be used again.
    return ApiError(401, code, message, headers={"www-authenticate": "Bearer", "connection": "close"})
