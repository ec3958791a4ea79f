"""Names by which requests may call the served model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from minisgl.frontend.errors import ApiError
from minisgl.frontend.server.json_body import truncate

DEFAULT_MODEL: Final = "default"
"""Name that a client may use without knowing the names of the model."""


def check_model_name(name: str, names: Sequence[str]) -> None:
    """Raises ApiError for a model that is not served. `names`: those of the served model."""
    if name not in (DEFAULT_MODEL, *names):
        message = f"model {truncate(name)!r} does not exist; this server serves {', '.join(map(repr, names))}"
        raise ApiError(404, "model_not_found", message, "model")


def response_model_name(requested: str | None, names: Sequence[str]) -> str:
    """Return the model's name for a response: the client's own, or the first of the served model. `names` of a model
    that is not known yet are empty. Raises ApiError for a model that is not served."""
    if not names:
        # `TokenizerPool.submit` reports why no request can be served.
        return requested or ""
    if requested is None:
        return names[0]
    check_model_name(requested, names)
    return requested
