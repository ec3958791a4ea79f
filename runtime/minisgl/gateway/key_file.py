"""API keys of a file, which is read again when it changes."""

from __future__ import annotations

import logging
import time
from pathlib import Path

from minisgl.frontend.server.auth import RELOAD_SECONDS, KeyFileError, file_stamp
from minisgl.gateway.keys import KeyTable, read_file

logger = logging.getLogger(__name__)


class FileKeys:
    """Keys of a file. While a changed one cannot be used, the keys stay as they were."""

    def __init__(self, path: Path, *, by_tokens: bool = False) -> None:
        """`by_tokens`: tenants may also come with access tokens. Raises KeyFileError."""
        self._path = path
        self._by_tokens = by_tokens
        self._stamp = file_stamp(path)
        self._table = self._read()
        self._checked_at = time.monotonic()

    def table(self) -> KeyTable:
        now = time.monotonic()
        if now >= self._checked_at + RELOAD_SECONDS:
            self._checked_at = now
            stamp = file_stamp(self._path)
            if stamp != self._stamp:
                self._stamp = stamp
                self._reload()
        return self._table

    def _reload(self) -> None:
        try:
            self._table = self._read()
        except KeyFileError as error:
            logger.error("%s; keeping the previous keys", error)
        else:
            logger.info("read %d keys from %s", len(self._table), self._path)

    def _read(self) -> KeyTable:
        try:
            text = self._path.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
            raise KeyFileError(f"cannot read the keys in {self._path}: {reason}") from error
        return read_file(text, str(self._path), by_tokens=self._by_tokens)
