"""Requests that are forwarded: from the body to the frontend of the model that it names."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import count
from typing import Final

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from minisgl.frontend.errors import ApiError
from minisgl.frontend.server.gateway_headers import PRIORITY_HEADER, TENANT_HEADER
from minisgl.frontend.server.json_body import read_json_body
from minisgl.frontend.server.request_record import TRACE_FIELD, record_of
from minisgl.frontend.server.request_tracker import RequestTracker
from minisgl.frontend.server.usage_report import REQUEST_HEADER
from minisgl.frontend.tracing.tracer import unrecorded_headers
from minisgl.gateway.bodies import KeptBodies, requested_model, with_model
from minisgl.gateway.config import MAX_BODY_BYTES
from minisgl.gateway.directory import Directory
from minisgl.gateway.forwarding import Forwarding, Outgoing, UntilDisconnect
from minisgl.gateway.headers import HOPS_HEADER, MAX_HOPS, hops, passed_request_headers
from minisgl.gateway.holding import Holding, check_serves
from minisgl.gateway.metrics import UseTotals
from minisgl.gateway.models import Model
from minisgl.gateway.paths import GENERATION_PATHS, USE_PATHS
from minisgl.gateway.routing import Target, everything, served_name
from minisgl.gateway.tenancy import Account, Tenancy
from minisgl.gateway.upstream import Client
from minisgl.gateway.usage import usage_attributes

TARGET: Final = "minisgl.target"
ACCOUNT: Final = "minisgl.account"
"""Keys in the ASGI scope."""


class Gateway:
    """What all requests share. All methods belong to the event loop."""

    def __init__(
        self, client: Client, directory: Directory, holding: Holding, tenancy: Tenancy, requests: RequestTracker
    ) -> None:
        self.client = client
        self.directory = directory
        self.holding = holding
        self.tenancy = tenancy
        self.requests = requests
        self.totals = UseTotals()
        self.bodies = KeptBodies()
        self._turns = count()

    async def post(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward a request with a body. Raises ApiError and ClientDisconnected."""
        record = record_of(scope)
        body = await read_json_body(scope, receive, MAX_BODY_BYTES)
        name = requested_model(body)
        model = self.model(scope, name)
        record.model = str(model.key)
        check_serves(model)
        if (known := served_name(model, name)) is not None:
            body = with_model(body, known)
        with self.bodies.keep(len(body), record.tenant):
            await self._forward(scope, receive, send, model, body, holds=scope["path"] in GENERATION_PATHS)

    async def get(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward a request for information about a model. Raises ApiError and ClientDisconnected."""
        model = self.model(scope, None)
        record_of(scope).model = str(model.key)
        check_serves(model)
        await self._forward(scope, receive, send, model, b"", holds=False)

    def model(self, scope: Scope, name: str | None, among: Callable[[Model], bool] = everything) -> Model:
        """Return the model that a request is for, which is `among` some. Raises ApiError."""
        if self.directory.problem:
            raise ApiError(503, "not_ready", f"{self.directory.problem}; retry")
        allowed = self.allowed(scope)
        return self.directory.table.find(name, self.target(scope), lambda each: allowed(each) and among(each))

    def target(self, scope: Scope) -> Target | None:
        """Return the model that the path or the header Host of a request names."""
        found: Target | None = scope.get(TARGET)
        return found or self.directory.table.target_of_host(Headers(scope=scope).get("host", ""))

    def allowed(self, scope: Scope) -> Callable[[Model], bool]:
        """Return a function that tells whether the tenant of a request may use a model."""
        account = account_of(scope)
        return everything if account is None else account.tenant.allows

    async def _forward(
        self, scope: Scope, receive: Receive, send: Send, model: Model, body: bytes, *, holds: bool
    ) -> None:
        record, account = record_of(scope), account_of(scope)
        passed_gateways = checked_hops(scope)
        clock, limits = asyncio.get_running_loop().time, self.requests.limits
        if account is not None:
            await account.admit(clock)
        if holds:
            # Not before: a request that is refused does not use the model, and must not start it.
            self.holding.begin(model.key)
        headers = self._headers(scope, passed_gateways)
        forwarding = Forwarding(
            self.client,
            self.holding,
            record,
            model,
            next(self._turns),
            Outgoing("POST" if body else "GET", scope["path"], scope["query_string"], headers, body),
            lambda: {} if account is None else account.headers(clock()),
        )
        try:
            async with UntilDisconnect(receive, record):
                await forwarding.answer(
                    send,
                    holds_until=record.started_at + limits.queue_seconds if holds else None,
                    until=record.started_at + limits.request_seconds,
                )
        finally:
            if holds:
                # First, so that no fault of what follows keeps the model awake.
                self.holding.end(model.key)
            if record.trace is not None and holds:
                record.trace.attributes.update(usage_attributes(forwarding.usage))
            if account is not None:
                account.end(forwarding.usage.total, clock())
            if scope["path"] in USE_PATHS:
                self.totals.add(record.key_name, model.key, forwarding.usage)

    def _headers(self, scope: Scope, passed_gateways: int) -> list[tuple[bytes, bytes]]:
        """Return the headers of a request for a frontend."""
        own = self.own_headers(scope, passed_gateways)
        own |= {"x-forwarded-for": record_of(scope).address, REQUEST_HEADER: "1"}
        passed = passed_request_headers(
            scope["headers"], with_keys=not self.tenancy.needs_keys, with_trace=self.requests.tracer is None
        )
        return passed + [(name.encode(), value.encode()) for name, value in own.items()]

    def own_headers(self, scope: Scope, passed_gateways: int) -> dict[str, str]:
        """Return the headers that tell a frontend of a request whose it is, and how many gateways it has passed before
        this one. A request that is recorded gets those of its trace elsewhere."""
        record, account = record_of(scope), account_of(scope)
        own = {
            "x-request-id": record.request_id,
            TENANT_HEADER: record.tenant,
            HOPS_HEADER: str(passed_gateways + 1),
        }
        if account is not None:
            own[PRIORITY_HEADER] = str(account.tenant.priority)
        if self.requests.tracer is not None and record.trace is None:
            # Otherwise the frontend would decide anew.
            own |= unrecorded_headers(record.headers.get(TRACE_FIELD, ""), scope)
        return own


def checked_hops(scope: Scope) -> int:
    """Return the number of gateways that a request has passed. Raises ApiError for one that goes round."""
    passed = hops(scope["headers"])
    if passed >= MAX_HOPS:
        message = f"the request has passed {MAX_HOPS} gateways, which lead to each other; check their --backend"
        raise ApiError(508, "loop_detected", message)
    return passed


def account_of(scope: Scope) -> Account | None:
    """Return the account of a request's key; None: no key is needed."""
    account: Account | None = scope.get(ACCOUNT)
    return account
