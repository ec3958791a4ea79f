"""Shares of the tenants of a scheduler: who comes next, and who makes room. Pure.

A tenant is an API key, or the address of clients without keys. Tokens that are served to each are counted, those of
prompts as they are computed and one for each row and step (virtual token counters, Sheng and others, OSDI 2024). The
next request is one of the tenant that was served least, so a tenant with a thousand requests does not delay the first
one of another, and tenants that always have requests get equal numbers of tokens. While there is only one tenant,
nothing is counted and its requests are served in the order of their arrival.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from minisgl.scheduler.request import Request

MAX_TENANTS: Final = 1024
"""Tenants whose tokens are remembered while they have no requests."""
EXPECTED_SECONDS: Final = 30.0
"""Time for which rows are kept for further tenants after one has come."""


class Shares:
    """Tokens that were served to each tenant since the scheduler was idle, or since the least served one came."""

    def __init__(self, rows: Mapping[bytes, int]) -> None:
        """`rows`: number of rows of each tenant that has any, which the caller keeps."""
        self._rows = rows
        self._served: dict[bytes, int] = {}
        self._joined_at: float | None = None
        """Time at which a tenant last came while others had requests."""

    def join(self, tenant: bytes, others: Iterable[bytes], now: float) -> None:
        """Begin to count for a tenant without requests at time `now`, beside those that have some: it has saved nothing
        while it had none."""
        present = {other: self._served.get(other, 0) for other in others if other != tenant}
        if not present:
            self._served.clear()
            self._joined_at = None
            return
        least = min(present.values())
        if len(self._served) >= MAX_TENANTS:
            self._forget(present, least)
        self._served[tenant] = max(self._served.get(tenant, 0), least)
        self._joined_at = now

    def _forget(self, present: Mapping[bytes, int], least: int) -> None:
        """Forget tenants without requests: those that would begin with `least` anyway, and of the others those that
        gain least by it."""
        absent = [(tokens, name) for name, tokens in self._served.items() if name not in present and tokens > least]
        kept = {name: tokens for tokens, name in sorted(absent)[-MAX_TENANTS // 2 :]}
        self._served = {name: self._served[name] for name in present if name in self._served} | kept

    def expects_others(self, now: float) -> bool:
        """Whether several tenants have rows, or one came beside others not long ago."""
        return len(self._rows) > 1 or (self._joined_at is not None and now - self._joined_at < EXPECTED_SECONDS)

    def charge(self, tenant: bytes, tokens: int) -> None:
        """Count tokens that are computed for a tenant."""
        self._served[tenant] = self._served.get(tenant, 0) + tokens

    def charge_rows(self) -> None:
        """Count a step, for the rows that take part in it."""
        for tenant, rows in self._rows.items():
            self.charge(tenant, rows)

    def rank(self, tenant: bytes) -> tuple[int, int]:
        """Sort key: tenants with a smaller one come first."""
        return self._served.get(tenant, 0), self._rows.get(tenant, 0)

    def key(self, request: Request) -> tuple[int, bool, int, int, int]:
        """Sort key: requests with a smaller one run first. Those that another engine began go ahead of new ones."""
        return (-request.priority, not request.continues, *self.rank(request.tenant), request.arrival)

    def has_most(self, tenant: bytes) -> bool:
        """Whether no other tenant would have more rows than this one with another one."""
        return max(self._rows.values(), default=0) <= self._rows.get(tenant, 0) + 1


def has_share(own: int, more: int, waiting: int, most: int, tenants: Collection[object]) -> bool:
    """Return whether a tenant may have `more` beside its `own` in a queue of `most` that is full: one that has less
    than its share is not kept out by the others. `tenants`: those with anything in the queue. All together have no more
    than twice `most`."""
    others = len(tenants) - (own > 0)
    return waiting + more <= 2 * most and own + more <= most // (others + 1)
