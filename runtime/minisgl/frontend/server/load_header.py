"""The response header `endpoint-load-metrics`, from which load balancers learn the load of an endpoint (ORCA: Open
Request Cost Aggregation). It has the metrics that vLLM puts there, summed over all engines."""

from __future__ import annotations

from typing import Final

import msgspec
from starlette.datastructures import Headers

from minisgl.wire.messages import Status

_FORMAT: Final = "endpoint-load-metrics-format"
_NAME: Final = "endpoint-load-metrics"


def load_header(headers: Headers, status: Status | None) -> dict[str, str]:
    """Return the header in the format that the request's `headers` ask for, `TEXT` or `JSON`; none if they ask for no
    known format, or while no engine has reported its status."""
    if status is None:
        return {}
    metrics = {
        "kv_cache_usage_perc": status.used_pages / max(status.num_pages, 1),
        "num_requests_waiting": float(status.waiting),
    }
    match headers.get(_FORMAT, "").strip().upper():
        case "TEXT":
            return {_NAME: "TEXT " + ", ".join(f"named_metrics.{name}={value}" for name, value in metrics.items())}
        case "JSON":
            return {_NAME: "JSON " + msgspec.json.encode({"named_metrics": metrics}).decode()}
    return {}
