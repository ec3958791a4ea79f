"""GET /metrics of a gateway, from what is in memory."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from minisgl.frontend.metrics.counters import FrontendMetrics
from minisgl.frontend.metrics.page import CONTENT_TYPE, Page
from minisgl.frontend.metrics.process import read_process_use
from minisgl.frontend.server.usage_report import Usage
from minisgl.gateway.models import Key
from minisgl.gateway.provider import Provider
from minisgl.gateway.routing import Table
from minisgl.gateway.shared_limits import SharedLimits

_MAX_SERIES: Final = 2000
"""Pairs of tenant and model that are told apart; the rest is counted for OTHER."""
OTHER: Final = "other"
ANYONE: Final = "anyone"
"""Tenant of requests without a key."""


class UseTotals:
    """Use by tenant and model."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, str]] = Counter()
        self.prompt_tokens: Counter[tuple[str, str]] = Counter()
        self.completion_tokens: Counter[tuple[str, str]] = Counter()

    def add(self, tenant: str, key: Key, usage: Usage) -> None:
        """Count a request that was forwarded."""
        pair = tenant or ANYONE, str(key)
        if pair not in self.requests and len(self.requests) >= _MAX_SERIES:
            pair = OTHER, OTHER
        self.requests[pair] += 1
        self.prompt_tokens[pair] += usage.prompt_tokens
        self.completion_tokens[pair] += usage.completion_tokens


class GatewayMetricsPage:
    """Endpoint."""

    def __init__(
        self,
        table: Table,
        totals: UseTotals,
        metrics: FrontendMetrics,
        held: Callable[[], int],
        in_flight: Callable[[], int],
        provider: Provider | None,
        shared: SharedLimits | None,
    ) -> None:
        """`provider`: of identities; `shared`: counts of several gateways; None: there is none."""
        self._table = table
        self._totals = totals
        self._metrics = metrics
        self._held = held
        self._in_flight = in_flight
        self._provider = provider
        self._shared = shared
        self._started_at = time.time()

    async def __call__(self, _: Request) -> Response:
        page, metrics, totals = Page('component="gateway"'), self._metrics, self._totals
        states = Counter(str(model.state) for model in self._table)
        page.labelled("minisgl:gateway_models", "gauge", "Models by state.", "state", states)
        page.gauge("minisgl:gateway_held", "Requests that wait for a frontend.", self._held())
        page.gauge("minisgl:gateway_inflight", "HTTP requests in progress.", self._in_flight())
        if (provider := self._provider) is not None:
            page.gauge("minisgl:gateway_identity_keys", "Keys of the identity provider.", provider.key_count)
            text = "Fetches of these keys that failed."
            page.counter("minisgl:gateway_identity_fetch_failures_total", text, provider.failures)
        if (shared := self._shared) is not None:
            page.gauge("minisgl:gateway_shared_limits_up", "Whether Redis counts limits.", int(shared.is_up))
            text = "Requests with limits that this gateway counted alone."
            page.counter("minisgl:gateway_shared_limits_missed_total", text, shared.missed)
        for name, text, values in (
            ("requests", "Requests that were forwarded.", totals.requests),
            ("prompt_tokens", "Tokens of their prompts.", totals.prompt_tokens),
            ("completion_tokens", "Tokens of their answers.", totals.completion_tokens),
        ):
            samples = [({"tenant": tenant, "model": model}, count) for (tenant, model), count in values.items()]
            page.samples(f"minisgl:gateway_{name}_total", "counter", text, samples)
        for labelled in (metrics.failed, metrics.rejections, metrics.disconnects):
            page.labelled(labelled.names[0], "counter", labelled.text, labelled.label, labelled)
        for total in (metrics.slow_clients, metrics.spans_dropped):
            page.counter(total.name, total.text, total.value)
        lag = metrics.loop_lag
        page.histograms("minisgl:gateway_event_loop_lag_seconds", lag.text, {"": lag})
        page.http(metrics.http)
        if (use := read_process_use(self._started_at)) is not None:
            page.process(use)
        return Response(page.text(), media_type=CONTENT_TYPE)
