"""Checks who sends a request, and what the tenant may still use."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

from starlette.datastructures import Headers

from minisgl.frontend.errors import ApiError
from minisgl.frontend.server.auth import check_key
from minisgl.gateway.identities import Identities
from minisgl.gateway.keys import KeyTable, Tenant
from minisgl.gateway.limits import Bucket, duration
from minisgl.gateway.tokens import is_token, unknown_tenant


class Keys(Protocol):
    """Where keys come from. They change while the gateway runs."""

    def table(self) -> KeyTable: ...


class Account:
    """What one tenant uses."""

    def __init__(self, tenant: Tenant, now: float) -> None:
        self.tenant = tenant
        self.running = 0
        self._requests = _bucket(None, tenant.requests_per_minute, now)
        self._tokens = _bucket(None, tenant.tokens_per_minute, now)

    def change(self, tenant: Tenant, now: float) -> None:
        """Take other limits of the same tenant."""
        self._requests = _bucket(self._requests, tenant.requests_per_minute, now)
        self._tokens = _bucket(self._tokens, tenant.tokens_per_minute, now)
        self.tenant = tenant

    def begin(self, now: float) -> None:
        """Count a request. Raises ApiError when a limit is reached."""
        tenant = self.tenant
        if tenant.max_concurrent is not None and self.running >= tenant.max_concurrent:
            raise self._rejected(f"{self.running} requests of this key's tenant are in progress", 1.0, now)
        for bucket, unit in ((self._requests, "requests"), (self._tokens, "tokens")):
            if bucket is not None and (seconds := bucket.seconds_until(1, now)) > 0:
                message = f"this key's tenant has used its {bucket.per_minute} {unit} per minute"
                raise self._rejected(message, seconds, now)
        self.running += 1
        if self._requests is not None:
            self._requests.take(1, now)

    def end(self, tokens: int, now: float) -> None:
        """A request that was counted has ended, and used `tokens`."""
        self.running -= 1
        if self._tokens is not None:
            self._tokens.take(tokens, now)

    def headers(self, now: float) -> dict[str, str]:
        """Return the response headers that tell a client its limits, as OpenAI's API has them."""
        found = {}
        for bucket, unit in ((self._requests, "requests"), (self._tokens, "tokens")):
            if bucket is not None:
                found[f"x-ratelimit-limit-{unit}"] = str(bucket.per_minute)
                found[f"x-ratelimit-remaining-{unit}"] = str(bucket.remaining(now))
                found[f"x-ratelimit-reset-{unit}"] = duration(bucket.seconds_until_full(now))
        return found

    def _rejected(self, message: str, seconds: float, now: float) -> ApiError:
        waits = {"retry-after": str(math.ceil(seconds)), "retry-after-ms": str(math.ceil(seconds * 1000))}
        headers = self.headers(now) | waits
        return ApiError(429, "rate_limit_exceeded", f"{message}; retry in {seconds:.3g} s", headers=headers)


class Tenancy:
    """All methods belong to the event loop."""

    def __init__(self, keys: Keys | None, clock: Callable[[], float], identities: Identities | None = None) -> None:
        """`keys`: None, every client may use everything. `identities`: of access tokens; None: only keys count."""
        self._keys = keys
        self.identities = identities
        self._clock = clock
        self._accounts: dict[str, Account] = {}

    @property
    def needs_keys(self) -> bool:
        return self._keys is not None

    async def account(self, headers: Headers) -> Account | None:
        """Return the account of the key or the access token in a request's headers; None: none is needed. Raises
        ApiError."""
        if self._keys is None:
            return None
        tenant = await self._tenant(headers, self._keys)
        account = self._accounts.get(tenant.name)
        if account is None:
            account = self._accounts[tenant.name] = Account(tenant, self._clock())
        elif account.tenant is not tenant and account.tenant != tenant:
            account.change(tenant, self._clock())
        return account

    async def _tenant(self, headers: Headers, keys: Keys) -> Tenant:
        """Raises ApiError."""
        scheme, _, given = headers.get("authorization", "").partition(" ")
        token = given.strip()
        table, identities = keys.table(), self.identities
        if identities is None or scheme.lower() != "bearer" or not is_token(token):
            return check_key(headers, table.tenant)
        if (tenant := table.tenant(token)) is not None:
            return tenant
        name = await identities.tenant_name(token)
        if (tenant := keys.table().named(name)) is None:
            raise unknown_tenant(name, identities.rules.tenant_claim)
        return tenant


def _bucket(last: Bucket | None, per_minute: int | None, now: float) -> Bucket | None:
    if per_minute is None:
        return None
    return Bucket(per_minute, now) if last is None else last.with_rate(per_minute, now)
