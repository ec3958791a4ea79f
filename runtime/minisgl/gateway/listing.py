"""Bodies of GET /v1/models: as those of frontends, with the state of each model. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from minisgl.gateway.models import Model
from minisgl.gateway.routing import Table


def listed_models(table: Table, allowed: Callable[[Model], bool]) -> dict[str, Any]:
    """Return the list of models that a client may use, one entry for each of their names."""
    models = sorted((model for model in table if allowed(model)), key=lambda model: model.key)
    names = [
        (model, dict.fromkeys(table.listed_name(model, name, allowed) for name in model.names)) for model in models
    ]
    return {"object": "list", "data": [model_entry(model, name) for model, found in names for name in found]}


def model_entry(model: Model, name: str) -> dict[str, Any]:
    """Return the entry of a model under one of its names."""
    return {
        "id": name,
        "object": "model",
        "created": model.created,
        "owned_by": "minisgl",
        "root": model.names[0],
        "parent": None,
        "max_model_len": model.max_model_len,
        "task": model.task,
        "capabilities": model.capabilities,
        "qualified_name": str(model.key),
        "state": model.state,
        "state_reason": model.reason or None,
    }
