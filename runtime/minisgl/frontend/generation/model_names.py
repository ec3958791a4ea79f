"""Names by which requests may call the served model."""

from __future__ import annotations

from typing import Final

from minisgl.frontend.errors import ApiError
from minisgl.frontend.server.json_body import truncate
from minisgl.wire.text import ServedModel

DEFAULT_MODEL: Final = "default"
"""Name that a client may use without knowing the names of the model."""


def check_model_name(name: str, model: ServedModel) -> None:
    """Raises ApiError for a model that is not served."""
    if name not in (DEFAULT_MODEL, *model.all_names):
        names = ", ".join(map(repr, model.all_names))
        message = f"model {truncate(name)!r} does not exist; this server serves {names}"
        raise ApiError(404, "model_not_found", message, "model")


def response_model_name(requested: str | None, model: ServedModel | None) -> str:
    """Return the model's name for a response: the client's own, or the model's. Raises ApiError for a model that is not
    served."""
    if model is None:
        # No model is known yet; `TokenizerPool.submit` reports why no request can be served.
        return requested or ""
    if requested is None:
        return model.card.name
    check_model_name(requested, model)
    return requested
