"""Repositories of a Hugging Face Hub: the commit of a revision, the files of a checkpoint in it, and the error of a
failed fetch."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from fnmatch import fnmatch
from typing import Any, Final

import msgspec

from minisgl.errors import HubError
from minisgl.models.checkpoint import served_weights
from minisgl.version import __version__
from minisgl.wire.status import FetchFailureReason

CONFIG_FILES: Final = ("*.json", "*.jinja")
"""Patterns of the small files that a server reads."""
_MODULE: Final = r"\d+_[A-Za-z]+/(config\.json|model\.safetensors)"
"""Paths of the files of a module of sentence-transformers."""
_IN_FOLDERS: Final = re.compile(rf"additional_chat_templates/[^/]+\.jinja|{_MODULE}")
"""Paths of the only files of subfolders. A path with `..` would lead out of the checkpoint."""
WEIGHT_FILES: Final = "*.safetensors"

_TIMEOUT_SECONDS: Final = 30.0


class FetchError(HubError):
    """A checkpoint cannot be fetched from a Hub."""

    code: FetchFailureReason

    def __init__(self, code: FetchFailureReason, message: str) -> None:
        super().__init__(code, message)

    @property
    def is_retryable(self) -> bool:
        return self.code not in ("AuthRequired", "NotFound")

    @property
    def exit_code(self) -> int:
        return 1 if self.is_retryable else 2


def offline() -> bool:
    """Whether HF_HUB_OFFLINE forbids to ask a Hub."""
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """Repository and revision to fetch."""

    repository: str
    revision: str
    endpoint: str | None
    """URL of the Hub; None: that of HF_ENDPOINT, or the public Hub."""

    @property
    def hub(self) -> str:
        """Name of the Hub in messages."""
        return self.endpoint or "the Hub"

    def url_of(self, name: str, commit: str) -> str:
        """URL of a file."""
        import huggingface_hub

        return huggingface_hub.hf_hub_url(self.repository, name, revision=commit, endpoint=self.endpoint)

    @staticmethod
    def request_headers() -> dict[str, str]:
        """Headers of requests for files, with the token if there is one."""
        import huggingface_hub

        headers = {"accept-encoding": "identity", "user-agent": f"minisgl/{__version__}"}
        if token := huggingface_hub.get_token():
            headers["authorization"] = f"Bearer {token}"
        return headers


class HubFile(msgspec.Struct, frozen=True, kw_only=True):
    """File of a repository, as the Hub lists it."""

    name: str
    size: int
    """Bytes."""
    digest: str
    """sha256 of a large file, Git's blob id (sha1) of any other."""
    is_large: bool

    def hasher(self) -> Any:
        """New hash object for the content of this file."""
        if self.is_large:
            return hashlib.sha256()
        return hashlib.sha1(b"blob %d\0" % self.size, usedforsecurity=False)


def list_checkpoint(source: Source) -> tuple[str, list[HubFile]]:
    """Commit of the revision, and the files to download. Raises FetchError `NotFound`, and the errors of the client
    library."""
    from huggingface_hub import HfApi, RepoFile

    api = HfApi(endpoint=source.endpoint)
    commit = api.model_info(source.repository, revision=source.revision, timeout=_TIMEOUT_SECONDS).sha
    if not commit:
        raise FetchError("NotFound", f"{source.repository} has no commit at revision {source.revision}")
    found = [
        HubFile(
            name=entry.path,
            size=entry.size,
            digest=entry.lfs.sha256 if entry.lfs is not None else entry.blob_id,
            is_large=entry.lfs is not None,
        )
        for entry in api.list_repo_tree(source.repository, revision=commit, recursive=True)
        if isinstance(entry, RepoFile) and ("/" not in entry.path or _IN_FOLDERS.fullmatch(entry.path))
    ]
    files = files_to_download(found)
    names = {file.name for file in files}
    if "config.json" not in names or not any(name.endswith(".safetensors") and "/" not in name for name in names):
        gguf = any(file.name.endswith(".gguf") for file in found)
        raise FetchError(
            "NotFound",
            f"{source.repository} at revision {source.revision} is not a servable checkpoint: it needs config.json and "
            f"*.safetensors{', and has GGUF, which is not supported' if gguf else ''}",
        )
    return commit, files


def files_to_download(files: Sequence[HubFile]) -> list[HubFile]:
    """Select the files that a server reads."""
    weights = served_weights(file.name for file in files if fnmatch(file.name, WEIGHT_FILES) and "/" not in file.name)
    return [
        file
        for file in files
        if file.name in weights
        or _IN_FOLDERS.fullmatch(file.name)
        or any(fnmatch(file.name, name) for name in CONFIG_FILES)
    ]
