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


class Shares:
    """Tokens that were served to each tenant since the scheduler was idle, or since the least served one came."""

    def __init__(self, rows: Mapping[bytes, int]) -> None:
        """`rows`: number of rows of each tenant that has any, which the caller keeps."""
        self._rows = rows
        self._served: dict[bytes, int] = {}

    def join(self, tenant: bytes, others: Iterable[bytes]) -> None:
        """Begin to count for a tenant without requests, beside those that have some: it has saved nothing while it had
        none."""
        present = [self._served.get(other, 0) for other in others if other != tenant]
        if not present:
            self._served.clear()
            return
        if len(self._served) >= MAX_TENANTS:
            # Those that were served most have most to lose by being forgotten.
            kept = sorted(self._served.items(), key=lambda item: item[1])[-MAX_TENANTS // 2 :]
            self._served = dict(kept)
        self._served[tenant] = max(self._served.get(tenant, 0), min(present))

    def knows_others(self, tenant: bytes) -> bool:
        """Whether another tenant has been here since the scheduler was idle."""
        return len(self._served) > (tenant in self._served)

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

    def must_yield(self, tenant: bytes) -> bytes | None:
        """Return the tenant that gives up a row for one that waits: that with most rows, if it keeps as many as the
        other one gets; None if there is none."""
        if not self._rows:
            return None
        most = max(self._rows, key=self._rows.__getitem__)
        return most if self._rows[most] > self._rows.get(tenant, 0) + 1 else None


def has_share(own: int, more: int, waiting: int, most: int, tenants: Collection[object]) -> bool:
    """Return whether a tenant may have `more` beside its `own` in a queue of `most` that is full: one that has less
    than its share is not kept out by the others. `tenants`: those with anything in the queue. All together have no more
    than twice `most`."""
    others = len(tenants) - (own > 0)
    return waiting + more <= 2 * most and own + more <= most // (others + 1)
