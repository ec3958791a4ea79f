"""InferenceModels for tests, as a user would apply them."""

from __future__ import annotations

from typing import Any

from minisgl_operator.api.defaults import Defaults
from minisgl_operator.api.types import API_VERSION, KIND, InferenceModel

DEFAULTS = Defaults(
    operator_namespace="minisgl-system",
    engine_image="registry.example.com/minisgl/engine:1.0.0",
    frontend_image="registry.example.com/minisgl/frontend:1.0.0",
)

HUB = {"huggingFace": {"repo": "Qwen/Qwen3-8B"}}
CLAIM = {"pvc": {"claimName": "models", "path": "qwen3-8b"}}


def raw_model(
    spec: dict[str, Any] | None = None,
    *,
    source: dict[str, Any] | None = None,
    name: str = "qwen",
    uid: str = "00000000-0000-4000-8000-000000000001",
    generation: int = 1,
) -> dict[str, Any]:
    """A model with `spec` merged into the smallest one, as the API server returns it."""
    body = dict(spec or {})
    body["model"] = {"source": source or HUB} | body.get("model", {})
    metadata = {"name": name, "namespace": "team-a", "uid": uid, "generation": generation, "resourceVersion": "1"}
    return {"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata, "spec": body}


def inference_model(
    spec: dict[str, Any] | None = None,
    *,
    source: dict[str, Any] | None = None,
    name: str = "qwen",
    uid: str = "00000000-0000-4000-8000-000000000001",
    generation: int = 1,
) -> InferenceModel:
    return InferenceModel.parse(raw_model(spec, source=source, name=name, uid=uid, generation=generation))
