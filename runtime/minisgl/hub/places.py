"""Where the name of a model leads: to a repository of a Hub, or to a folder of a bucket."""

from __future__ import annotations

import re
from typing import Final

from minisgl.hub.bucket import SCHEME, Bucket
from minisgl.hub.fetch_error import FetchError
from minisgl.hub.origin import Origin
from minisgl.hub.repository import Source

_HUB_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def is_hub_id(model: str) -> bool:
    """Whether a name that is no directory has the form of a Hub id, `owner/name`."""
    return _HUB_ID.fullmatch(model) is not None


def is_in_bucket(model: str) -> bool:
    """Whether a name is meant for an object store, `s3://BUCKET/PREFIX`."""
    return model.startswith(SCHEME)


def origin(model: str, revision: str | None = None, endpoint: str | None = None) -> Origin:
    """Origin of a model. `revision`: None is `main` on a Hub. `endpoint`: URL of the Hub or of the store; None: the
    configured one. Raises FetchError `NotFound` for a name of a bucket that is malformed, or that has a revision."""
    if not is_in_bucket(model):
        return Source(repository=model, revision=revision or "main", endpoint=endpoint)
    if revision is not None:
        raise FetchError("NotFound", f"{model} has no revisions: remove --revision, and write versions in the prefix")
    return Bucket(model, endpoint)
