"""Files of a repository or of a bucket, and those of them that a server reads."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatch
from typing import Any, Final

import msgspec

from minisgl.hub.fetch_error import FetchError
from minisgl.models.checkpoint import served_weights

CONFIG_FILES: Final = ("*.json", "*.jinja")
"""Patterns of the small files that a server reads."""
WEIGHT_FILES: Final = "*.safetensors"
_MODULE: Final = r"\d+_[A-Za-z]+/(config\.json|model\.safetensors)"
"""Paths of the files of a module of sentence-transformers."""
_IN_FOLDERS: Final = re.compile(rf"additional_chat_templates/[^/]+\.jinja|{_MODULE}")
"""Paths of the only files of subfolders. A path with `..` would lead out of the checkpoint."""
_PART: Final = re.compile(r"model-[0-9]{5}-of-(?P<count>[0-9]{5})\.safetensors")
_PICKLED: Final = (".bin", ".pt", ".pth", ".ckpt")


class RemoteFile(msgspec.Struct, frozen=True, kw_only=True):
    """File of a checkpoint, as a Hub or an object store lists it."""

    name: str
    size: int
    """Bytes."""
    digest: str
    """On a Hub: sha256 of a large file, Git's blob id (sha1) of any other. In a bucket: the ETag."""
    is_large: bool
    """Whether it is linked from another checkpoint that has it."""
    hashed: bool = True
    """Whether the digest can be computed from the content, which is not so for an ETag."""

    def hasher(self) -> Any:
        """New hash object for the content of this file."""
        if self.is_large:
            return hashlib.sha256()
        return hashlib.sha1(b"blob %d\0" % self.size, usedforsecurity=False)


def is_in_checkpoint(path: str) -> bool:
    """Whether a path can be that of a file of a checkpoint: one without folders, or in a folder that servers read."""
    return "/" not in path or _IN_FOLDERS.fullmatch(path) is not None


def files_to_download(files: Sequence[RemoteFile]) -> list[RemoteFile]:
    """Select the files that a server reads."""
    weights = served_weights(file.name for file in files if fnmatch(file.name, WEIGHT_FILES) and "/" not in file.name)
    return [
        file
        for file in files
        if file.name in weights
        or _IN_FOLDERS.fullmatch(file.name)
        or any(fnmatch(file.name, name) for name in CONFIG_FILES)
    ]


def missing_parts(names: Iterable[str]) -> list[str]:
    """Names of weight files that are not among `names`, but that those count: `model-00001-of-00002.safetensors`."""
    known = set(names)
    wanted = set()
    for match in filter(None, map(_PART.fullmatch, known)):
        count = int(match["count"])
        wanted |= {f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)}
    return sorted(wanted - known)


def servable_files(name: str, found: Sequence[RemoteFile]) -> list[RemoteFile]:
    """The files of `found` that a server reads; `name`: where they were found, for messages. Raises FetchError
    `NotFound` if they are no checkpoint that can be served."""
    files = files_to_download(found)
    has_config = any(file.name == "config.json" for file in files)
    has_weights = any(file.name.endswith(".safetensors") and "/" not in file.name for file in files)
    if has_config and has_weights:
        return files
    causes = []
    if not has_weights and any(file.name.endswith(".gguf") for file in found):
        causes.append("has GGUF, which is not supported")
    if not has_weights and (pickled := [file.name for file in found if file.name.endswith(_PICKLED)]):
        causes.append(f"has only pickled weights ({min(pickled)}), which are never loaded: convert them to safetensors")
    if has_weights:
        causes.append("has no config.json")
    raise FetchError(
        "NotFound",
        f"{name} is not a servable checkpoint: it needs config.json and *.safetensors"
        f"{''.join(f', and {cause}' for cause in causes)}",
    )
