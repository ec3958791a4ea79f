"""Body of `GET /gateway/status` on the control port of a gateway: the models for which its requests wait.

The gateway writes it; the operator reads it. As in `wire.status`, encoded names stay, and a new field has a default.
"""

from __future__ import annotations

import msgspec


class GatewayModelStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Requests of one model in this gateway."""

    held: int = 0
    """Requests that wait because no frontend of the model takes them."""
    idle_seconds: float | None = None
    """Seconds since the last request of the model ended; 0 while one is in progress. None: none since the start."""


class GatewayStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Body of a gateway pod."""

    models: dict[str, GatewayModelStatus] = {}
    """By `NAMESPACE/NAME` of the InferenceModel. A model that is missing has had no request since the start."""
