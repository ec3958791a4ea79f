"""Repositories of a Hugging Face Hub: the commit of a revision, and the files of a checkpoint in it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import msgspec

from minisgl.errors import HubError
from minisgl.hub.fetch_error import FetchError, HttpFailure
from minisgl.hub.fetch_failures import classify_error, rate_limit_seconds, retry_after
from minisgl.hub.files import RemoteFile, is_in_checkpoint, servable_files
from minisgl.hub.origin import Content
from minisgl.version import __version__

_CHUNK_BYTES: Final = 1 << 20
_TIMEOUT_SECONDS: Final = 30.0
"""To connect, and between two chunks."""


def offline() -> bool:
    """Whether HF_HUB_OFFLINE forbids to ask a Hub."""
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """Repository and revision to fetch: an Origin."""

    repository: str
    revision: str
    endpoint: str | None
    """URL of the Hub; None: that of HF_ENDPOINT, or the public Hub."""

    @property
    def server(self) -> str:
        return self.endpoint or "the Hub"

    def listing(self) -> tuple[str, list[RemoteFile]]:
        """Raises HubError `hub_offline` too."""
        from huggingface_hub import HfApi, RepoFile

        if offline():
            raise HubError("hub_offline", f"HF_HUB_OFFLINE is set, so {self.repository} is not fetched; unset it")
        api = HfApi(endpoint=self.endpoint)
        commit = api.model_info(self.repository, revision=self.revision, timeout=_TIMEOUT_SECONDS).sha
        if not commit:
            raise FetchError("NotFound", f"{self.repository} has no commit at revision {self.revision}")
        found = [
            RemoteFile(
                name=entry.path,
                size=entry.size,
                digest=entry.lfs.sha256 if entry.lfs is not None else entry.blob_id,
                is_large=entry.lfs is not None,
            )
            for entry in api.list_repo_tree(self.repository, revision=commit, recursive=True)
            if isinstance(entry, RepoFile) and is_in_checkpoint(entry.path)
        ]
        return commit, servable_files(f"{self.repository} at revision {self.revision}", found)

    @contextmanager
    def open(self, commit: str, file: RemoteFile, first: int = 0, end: int | None = None) -> Iterator[Content]:
        """Raises HttpFailure, and transport errors of the client library."""
        import huggingface_hub

        url = huggingface_hub.hf_hub_url(self.repository, file.name, revision=commit, endpoint=self.endpoint)
        headers = {"accept-encoding": "identity", "user-agent": f"minisgl/{__version__}"}
        if token := huggingface_hub.get_token():
            headers["authorization"] = f"Bearer {token}"
        if first or end is not None:
            headers["range"] = f"bytes={first}-{'' if end is None else end - 1}"
        # Redirects lead to a storage host, to which the client does not send our token.
        session = huggingface_hub.get_session()
        with session.stream("GET", url, headers=headers, timeout=_TIMEOUT_SECONDS, follow_redirects=True) as response:
            if response.status_code not in (200, 206):
                raise HttpFailure(response.status_code, retry_after(response.headers.get("retry-after")))
            # Raw: a range counts the bytes of the file, not those of a compressed response.
            yield Content(first if response.status_code == 206 else 0, response.iter_raw(_CHUNK_BYTES))

    def failure(self, error: Exception) -> FetchError | None:
        return classify_error(error, self.server, self.repository, self.revision)

    def rate_limit_seconds(self, error: Exception) -> float:
        return rate_limit_seconds(error)
