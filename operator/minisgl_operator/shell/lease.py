"""Leader election with a Lease in the operator's own namespace.

The Lease only keeps two operators from doing the same work. It is not a fence: a holder that was frozen may send one
more request after its Lease was taken over. So every step must be correct whichever operator sends it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from minisgl_operator.api.objects import Manifest, micro_time
from minisgl_operator.shell.client import ApiError, Client
from minisgl_operator.shell.resources import LEASE

_log = logging.getLogger(__name__)

# The values of Kubernetes' own controllers, in seconds.
DURATION: Final = 15.0
RENEW_DEADLINE: Final = 10.0
PERIOD: Final = 2.0
ATTEMPT: Final = RENEW_DEADLINE / 2
"""Timeout of a renewal: a connection whose packets are lost must leave time for another one."""


class Lease:
    """Operators with the same `namespace` and `name` form one election. `identity` is unique to the process, so that a
    restarted pod is not mistaken for its predecessor."""

    def __init__(self, client: Client, namespace: str, identity: str, name: str) -> None:
        self._client = client
        self._namespace = namespace
        self._name = name
        self._identity = identity
        self._seen: tuple[object, float] = (None, 0.0)
        self.held = False

    async def acquire(self) -> None:
        """Return once this process holds the Lease."""
        logged = ""
        while True:
            try:
                holder = await self._acquire_or_renew()
                waits_for = f"it is held by {holder}"
            except ApiError as error:
                waits_for = error.message
            if self.held:
                _log.info("Acquired the Lease %s/%s", self._namespace, self._name)
                return
            if waits_for != logged:
                _log.warning("Waiting for the Lease %s/%s: %s", self._namespace, self._name, waits_for)
                logged = waits_for
            await asyncio.sleep(PERIOD)

    async def keep(self, on_loss: Callable[[], None]) -> None:
        """Renew until cancelled. Calls `on_loss` and returns when another process holds the Lease, or when it could not
        be renewed for `RENEW_DEADLINE` seconds: the process must then exit, before another one acquires it."""
        clock = asyncio.get_running_loop().time
        renewed = clock()
        while True:
            await asyncio.sleep(PERIOD)
            # For the others the Lease is renewed when the server has the request, long before our response perhaps.
            asked = clock()
            try:
                async with asyncio.timeout(min(max(renewed + RENEW_DEADLINE - clock(), 0.1), ATTEMPT)):
                    holder = await self._acquire_or_renew()
            except Exception as error:
                # A process that cannot renew, for whatever reason, must not continue as the holder.
                if clock() - renewed < RENEW_DEADLINE:
                    continue
                _log.error("Lost the Lease: not renewed for %.0f s: %r", RENEW_DEADLINE, error)
            else:
                if self.held:
                    renewed = asked
                    continue
                _log.error("Lost the Lease to %s", holder)
            self.held = False
            on_loss()
            return

    async def release(self) -> None:
        """Let another process take over immediately. Best effort: without it that process waits `DURATION` seconds."""
        if not self.held:
            return
        self.held = False
        try:
            live = await self._client.get(LEASE, self._namespace, self._name)
            if live is not None and live["spec"].get("holderIdentity") == self._identity:
                live["spec"] |= {"holderIdentity": "", "leaseDurationSeconds": 1, "renewTime": micro_time()}
                await self._client.replace(LEASE, self._namespace, self._name, live)
        except ApiError as error:
            _log.warning("Could not release the Lease: %s", error.message)

    async def _acquire_or_renew(self) -> str:
        """Acquire or renew the Lease unless another process holds it; return the holder."""
        while True:
            live = await self._client.get(LEASE, self._namespace, self._name)
            holder = "" if live is None else (live.get("spec") or {}).get("holderIdentity") or ""
            if live is not None and holder not in ("", self._identity) and not self._expired(live):
                self.held = False
                return str(holder)
            try:
                if live is None:
                    await self._client.create(LEASE, self._namespace, self._body({}))
                else:
                    await self._client.replace(LEASE, self._namespace, self._name, self._body(live))
            except ApiError as error:
                if error.status != 409:
                    raise
                # Another process was faster, or our own request arrived although its response was lost.
                continue
            self.held = True
            return self._identity

    def _body(self, live: Manifest) -> Manifest:
        spec = live.get("spec") or {}
        mine = spec.get("holderIdentity") == self._identity
        return {
            "apiVersion": LEASE.api_version,
            "kind": LEASE.kind,
            "metadata": live.get("metadata") or {"name": self._name, "namespace": self._namespace},
            "spec": {
                "holderIdentity": self._identity,
                "leaseDurationSeconds": int(DURATION),
                "acquireTime": (mine and spec.get("acquireTime")) or micro_time(),
                "renewTime": micro_time(),
                "leaseTransitions": spec.get("leaseTransitions", 0) + (0 if mine else 1),
            },
        }

    def _expired(self, live: Manifest) -> bool:
        """Measured by the local clock since the Lease last changed, not by its times: clocks of nodes differ."""
        now = asyncio.get_running_loop().time()
        version = live["metadata"]["resourceVersion"]
        if self._seen[0] != version:
            self._seen = (version, now)
        return now - self._seen[1] > float(live["spec"].get("leaseDurationSeconds") or DURATION)
