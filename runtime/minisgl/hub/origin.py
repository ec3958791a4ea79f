"""What a checkpoint is fetched from: a repository of a Hub, or a folder of a bucket."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

from minisgl.hub.fetch_error import FetchError
from minisgl.hub.files import RemoteFile


class Content(NamedTuple):
    """Content of a file that is being received."""

    first: int
    """Place of the first byte: 0 from a server that knows no ranges."""
    chunks: Iterator[bytes]


class Origin(Protocol):
    """Lists and opens the files of a checkpoint. Used by several threads."""

    @property
    def repository(self) -> str:
        """Its name, in messages and in the record of a fetch."""

    @property
    def revision(self) -> str:
        """Branch, tag or commit; empty for a bucket."""

    @property
    def server(self) -> str:
        """Name of the server in messages."""

    def listing(self) -> tuple[str, list[RemoteFile]]:
        """Commit, which is another one for other content, and the files that a server reads. Raises FetchError, and
        errors that `failure` knows."""

    def open(
        self, commit: str, file: RemoteFile, first: int = 0, end: int | None = None
    ) -> AbstractContextManager[Content]:
        """Receive a file from byte `first` to byte `end`, without that one. Raises ContentChanged, and errors that
        `failure` knows."""

    def failure(self, error: Exception) -> FetchError | None:
        """FetchError for an error of the server or of the connection to it; None for any other error, such as one of
        the disk."""

    def rate_limit_seconds(self, error: Exception) -> float:
        """Seconds to wait after an error whose failure is `RateLimited`."""
