"""Checks who sends a request, and what the tenant may still use."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final, Protocol

from starlette.datastructures import Headers

from minisgl.frontend.errors import ApiError
from minisgl.frontend.server.auth import check_key
from minisgl.gateway.identities import Identities
from minisgl.gateway.keys import KeyTable, Tenant
from minisgl.gateway.limits import Bucket, duration
from minisgl.gateway.shared_limits import Counted, SharedLimits
from minisgl.gateway.tokens import is_token, unknown_tenant

_LEAST_SECONDS: Final = 0.001
"""Of a rejection by shared counts, whose room may come between two roundings."""


class Keys(Protocol):
    """Where keys come from. They change while the gateway runs."""

    def table(self) -> KeyTable: ...


class Account:
    """What one tenant uses. `shared`: counts that other gateways add to; None: there are none."""

    def __init__(self, tenant: Tenant, now: float, shared: SharedLimits | None = None) -> None:
        self.tenant = tenant
        self.running = 0
        self._shared = shared
        self._requests = _bucket(None, tenant.requests_per_minute, now)
        self._tokens = _bucket(None, tenant.tokens_per_minute, now)
        """With shared counts both are what was last heard of them, and what was used since then."""

    def change(self, tenant: Tenant, now: float) -> None:
        """Take other limits of the same tenant."""
        self._requests = _bucket(self._requests, tenant.requests_per_minute, now)
        self._tokens = _bucket(self._tokens, tenant.tokens_per_minute, now)
        self.tenant = tenant

    async def admit(self, clock: Callable[[], float]) -> None:
        """Count a request, in the shared counts if they answer, otherwise as `begin` does. Raises ApiError."""
        shared, tenant = self._shared, self.tenant
        if shared is None or (self._requests is None and self._tokens is None):
            self.begin(clock())
            return
        self._check_running(clock())
        # Others of this tenant may come while we wait.
        self.running += 1
        try:
            counted = await shared.begin(tenant)
            if counted is None:
                self._take(clock())
            else:
                self._hear(counted, clock())
        except BaseException:
            self.running -= 1
            raise

    def begin(self, now: float) -> None:
        """Count a request by what this gateway knows. Raises ApiError when a limit is reached."""
        self._check_running(now)
        self._take(now)
        self.running += 1

    def end(self, tokens: int, now: float) -> None:
        """A request that was counted has ended, and used `tokens`."""
        self.running -= 1
        if self._tokens is not None:
            self._tokens.take(tokens, now)
            if self._shared is not None and tokens:
                self._shared.use(self.tenant, tokens)

    def headers(self, now: float) -> dict[str, str]:
        """Return the response headers that tell a client its limits, as OpenAI's API has them."""
        found = {}
        for bucket, unit in self._buckets():
            found[f"x-ratelimit-limit-{unit}"] = str(bucket.per_minute)
            found[f"x-ratelimit-remaining-{unit}"] = str(bucket.remaining(now))
            found[f"x-ratelimit-reset-{unit}"] = duration(bucket.seconds_until_full(now))
        return found

    def _check_running(self, now: float) -> None:
        most = self.tenant.max_concurrent
        if most is not None and self.running >= most:
            raise self._rejected(f"{self.running} requests of this key's tenant are in progress", 1.0, now)

    def _take(self, now: float) -> None:
        """Raises ApiError."""
        for bucket, unit in self._buckets():
            if bucket.seconds_until(1, now) > 0:
                raise self._used_up(bucket, unit, now)
        if self._requests is not None:
            self._requests.take(1, now)

    def _hear(self, counted: Counted, now: float) -> None:
        """Take over the shared counts. Raises ApiError if the request was not admitted."""
        for bucket, missing in (
            (self._requests, counted.missing_requests),
            (self._tokens, counted.missing_tokens),
        ):
            if bucket is not None:
                bucket.set_missing(missing, now)
        if not counted.admitted and (buckets := self._buckets()):
            raise self._used_up(*max(buckets, key=lambda found: found[0].seconds_until(1, now)), now)

    def _buckets(self) -> list[tuple[Bucket, str]]:
        """Return those that there are, and their units."""
        found = (self._requests, "requests"), (self._tokens, "tokens")
        return [(bucket, unit) for bucket, unit in found if bucket is not None]

    def _used_up(self, bucket: Bucket, unit: str, now: float) -> ApiError:
        message = f"this key's tenant has used its {bucket.per_minute} {unit} per minute"
        return self._rejected(message, max(bucket.seconds_until(1, now), _LEAST_SECONDS), now)

    def _rejected(self, message: str, seconds: float, now: float) -> ApiError:
        waits = {"retry-after": str(math.ceil(seconds)), "retry-after-ms": str(math.ceil(seconds * 1000))}
        headers = self.headers(now) | waits
        return ApiError(429, "rate_limit_exceeded", f"{message}; retry in {seconds:.3g} s", headers=headers)


class Tenancy:
    """All methods belong to the event loop."""

    def __init__(
        self,
        keys: Keys | None,
        clock: Callable[[], float],
        identities: Identities | None = None,
        shared: SharedLimits | None = None,
    ) -> None:
        """`keys`: None, every client may use everything. `identities`: of access tokens; None: only keys count.
        `shared`: counts of several gateways; None: this one counts for itself."""
        self._keys = keys
        self.identities = identities
        self.shared = shared
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
            account = self._accounts[tenant.name] = Account(tenant, self._clock(), self.shared)
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
