"""Metadata of every child: name, labels and owner."""

from __future__ import annotations

from typing import Any

from minisgl_operator.api.objects import Manifest
from minisgl_operator.api.types import API_VERSION, KIND, InferenceModel
from minisgl_operator.render import names


def child(
    model: InferenceModel,
    api_version: str,
    kind: str,
    name: str,
    component: str,
    body: dict[str, Any],
    *,
    labels: dict[str, str] | None = None,
    owned: bool = True,
) -> Manifest:
    """A manifest with the fields of `body`. The cluster deletes an owned child with its model."""
    assert len(name) <= 63, name
    own = names.labels(model.name, component) | (labels or {})
    if not owned:
        # Argo CD may track its applications by this label. An object without an owner that has the name of one would
        # count as a part that is no longer wanted, and be pruned.
        del own[names.INSTANCE_LABEL]
    metadata: dict[str, Any] = {
        "name": name,
        "namespace": model.metadata.namespace,
        "labels": own,
    }
    if owned:
        owner = {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "name": model.name,
            "uid": model.metadata.uid,
            "controller": True,
            "blockOwnerDeletion": True,
        }
        metadata["ownerReferences"] = [owner]
    return {"apiVersion": api_version, "kind": kind, "metadata": metadata, **body}
