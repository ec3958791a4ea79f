"""Body of `GET /gateway/status` on the control port of a gateway, which the operator reads.

Gateways and operators of different versions run side by side: encoded names stay, and a new field has a default.
"""

from __future__ import annotations

from typing import Final

import msgspec

GATEWAY_CONTROL_PORT: Final = 8001
"""Probes and `/gateway/status` of a gateway."""
GATEWAY_STATUS_PATH: Final = "/gateway/status"


class ModelDemand(msgspec.Struct, frozen=True, kw_only=True):
    """Demand for one model, as one gateway sees it."""

    held: int = 0
    """Valid requests that wait because no frontend of the model answers."""
    idle_seconds: float | None = None
    """Seconds since the last valid request ended; 0 while one is in progress. None: there was none."""


class GatewayStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Demand for the models that requests came for since the gateway started."""

    models: dict[str, ModelDemand] = {}
    """By `NAMESPACE/NAME` of the InferenceModel."""
