"""ControllerRevisions of a model: the engine's pod templates that it has had."""

from __future__ import annotations

from typing import Any

import msgspec

from minisgl_operator.api.objects import Manifest
from minisgl_operator.api.types import InferenceModel
from minisgl_operator.render import names
from minisgl_operator.render.child import child
from minisgl_operator.render.engine_template import EngineTemplate


def controller_revision(model: InferenceModel, template: EngineTemplate, number: int) -> Manifest:
    """The record of a template. Its data is immutable, and determined by the revision; a higher `number` is newer."""
    body = {"data": {"template": template.body}, "revision": number}
    name = names.engine_revision(model.name, template.revision)
    labels = {names.REVISION_LABEL: template.revision}
    return child(model, "apps/v1", "ControllerRevision", name, names.REVISION, body, labels=labels)


def recorded_template(record: Manifest) -> EngineTemplate | None:
    """The template in a ControllerRevision; None for one that was edited. The store keeps its data encoded."""
    data: Any = record.get("data")
    revision = (record["metadata"].get("labels") or {}).get(names.REVISION_LABEL)
    if isinstance(data, bytes):
        data = msgspec.json.decode(data)
    body = data.get("template") if isinstance(data, dict) else None
    if not isinstance(body, dict) or revision is None:
        return None
    template = EngineTemplate(str(revision), body)
    return template if names.revision(body) == template.revision else None
