"""API keys from a file, and the gate that asks for one."""

from __future__ import annotations

import hmac
import logging
import os
import time
from hashlib import sha256
from pathlib import Path
from typing import Final

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from minisgl.errors import CodedError
from minisgl.frontend.errors import ApiError
from minisgl.frontend.server.traffic import current

logger = logging.getLogger(__name__)

RELOAD_SECONDS: Final = 1.0
"""The file is looked at no more often than this."""


class KeyFileError(CodedError):
    """The file cannot be used. `code` is stable; the message says what to do next."""

    def __init__(self, message: str) -> None:
        super().__init__("invalid_key_file", message)


class KeyFile:
    """One key a line, then optionally a space and a name, by which logs and limits know its holder. Lines that begin
    with `#` are comments. A changed file is read again; one that cannot be used leaves the keys as they were."""

    def __init__(self, path: Path) -> None:
        """Raises KeyFileError."""
        self._path = path
        self._names = _read(path)
        self._stamp = _stamp(path)
        self._checked = time.monotonic()
        self._reported: object = None

    def holder(self, key: str) -> str | None:
        """The name of who has this key; None: nobody has."""
        self._reload()
        given = sha256(key.encode("utf-8", "surrogateescape")).digest()
        found = None
        # All of them are compared, each in constant time: the time taken tells nothing of any key.
        for digest, name in self._names.items():
            if hmac.compare_digest(digest, given):
                found = name
        return found

    def _reload(self) -> None:
        now = time.monotonic()
        if now < self._checked + RELOAD_SECONDS:
            return
        self._checked = now
        stamp = _stamp(self._path)
        if stamp == self._stamp:
            return
        try:
            self._names = _read(self._path)
        except KeyFileError as error:
            if stamp != self._reported:
                self._reported = stamp
                logger.error("%s; the keys stay as they were", error)
            return
        self._stamp = stamp
        logger.info("read %d keys from %s", len(self._names), self._path)


def _read(path: Path) -> dict[bytes, str]:
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise KeyFileError(f"cannot read the keys in {path}: {reason}") from error
    names = {}
    for number, line in enumerate(lines, 1):
        words = line.split(maxsplit=1)
        if words and not words[0].startswith("#"):
            name = words[1].strip() if len(words) > 1 else f"line {number}"
            names[sha256(words[0].encode()).digest()] = name
    if not names:
        raise KeyFileError(f"there is no key in {path}: write one a line")
    return names


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    # With the inode: a mounted Secret is replaced as a whole.
    return status.st_mtime_ns, status.st_size, status.st_ino


class KeyGate:
    """Lets through whoever shows a key, and anybody to the `open_paths`."""

    def __init__(self, app: ASGIApp, keys: KeyFile, open_paths: frozenset[str] = frozenset()) -> None:
        self._app = app
        self._keys = keys
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises ApiError."""
        if scope["path"] not in self._open_paths:
            holder = self._check(Headers(scope=scope).get("authorization"))
            if (record := current.get()) is not None:
                record.key = holder
        await self._app(scope, receive, send)

    def _check(self, header: str | None) -> str:
        if header is None:
            raise _unauthorized("missing_api_key", "no API key was given: send `Authorization: Bearer KEY`")
        scheme, _, key = header.partition(" ")
        name = self._keys.holder(key.strip()) if scheme.lower() == "bearer" else None
        if name is None:
            raise _unauthorized("invalid_api_key", "the API key is not one of this server's")
        return name


def _unauthorized(code: str, message: str) -> ApiError:
    # What the client sends as a body is not read, so the connection cannot be used again.
    return ApiError(401, code, message, headers={"www-authenticate": "Bearer", "connection": "close"})
