"""The schemas of Kubernetes, by which manifests are validated without an API server."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, Final
from unittest.mock import patch

import kubernetes_validate
from kubernetes_validate import utils

VERSION: Final = "1.36"

# The validator would read its files, one of which has megabytes, for each manifest.
_contents = cache(utils.schema_contents)
_versions = cache(utils.all_versions)


def validate(manifest: Mapping[str, Any]) -> None:
    """Raise an error unless every field of the manifest is one of Kubernetes with a valid value."""
    with patch.object(utils, "schema_contents", _contents), patch.object(utils, "all_versions", _versions):
        kubernetes_validate.validate(dict(manifest), VERSION, strict=True)
