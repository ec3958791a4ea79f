"""Checkpoints of buckets in the cache of this machine: `minisgl-s3` in HF_HOME, with one directory for each folder of a
bucket, and in it one for each content that it has had."""

from __future__ import annotations

import hashlib
import logging
import os
import re
from pathlib import Path
from typing import Final

from minisgl.hub.bucket import Bucket
from minisgl.hub.fetch import fetch_snapshot
from minisgl.hub.neighbours import RECORD

logger = logging.getLogger(__name__)

_FOLDER: Final = "minisgl-s3"
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")
_MOST_OF_NAME: Final = 80
"""Characters of a directory's name that say which checkpoint it is for."""


def snapshot(uri: str, *, with_weights: bool = True) -> Path:
    """Directory with the current checkpoint of `uri`, s3://BUCKET/PREFIX, which is downloaded unless the cache has it;
    while the store cannot be reached, with the one that was used last. `with_weights`: False leaves out the weights.
    Raises FetchError, and HubError `directory_unusable`."""
    bucket = Bucket(uri, with_weights=with_weights)
    latest = None
    try:
        parent = _cache() / _directory_name(bucket, with_weights)
        latest = _latest(parent)
        if latest is not None:
            bucket.listing()
    except Exception as error:
        failure = bucket.failure(error)
        if failure is None:
            raise
        if failure.code != "Unreachable" or latest is None:
            raise failure from error
        logger.warning("%s; using the copy of %s in %s", failure, bucket.repository, latest)
        return latest
    found = fetch_snapshot(bucket, parent, publish=lambda status: None)
    os.utime(found)
    return found


def _cache() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HOME) / _FOLDER


def _directory_name(bucket: Bucket, with_weights: bool) -> str:
    """Two stores may have buckets of one name."""
    readable = re.sub(r"[^A-Za-z0-9.]+", "-", bucket.repository)[:_MOST_OF_NAME]
    digest = hashlib.sha256(bucket.address.encode()).hexdigest()[:16]
    return f"{readable}-{digest}{'' if with_weights else '-config'}"


def _latest(parent: Path) -> Path | None:
    """The checkpoint that was used last; None without any."""
    if not parent.is_dir():
        return None
    found = [path for path in parent.iterdir() if _COMMIT.fullmatch(path.name) and (path / RECORD).is_file()]
    return max(found, key=lambda path: path.stat().st_mtime, default=None)
