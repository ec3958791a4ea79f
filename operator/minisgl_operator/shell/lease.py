"""One operator at a time, by a Lease in the operator's own namespace.

A Lease only keeps two operators from doing the same work. It is no fence: a holder that was frozen may still send one
more request after its Lease was taken over. Correctness rests on each step being right whoever takes it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Final

from minisgl_operator.shell.client import ApiError, Client, Object
from minisgl_operator.shell.resources import LEASE

_log = logging.getLogger(__name__)

# The figures of Kubernetes' own controllers.
DURATION: Final = 15.0
RENEW_DEADLINE: Final = 10.0
PERIOD: Final = 2.0


class Lease:
    """Operators that share `namespace` and `name` stand by for each other. `identity` is unique to the process, so that
    a restarted pod does not take itself for its predecessor."""

    def __init__(self, client: Client, namespace: str, identity: str, name: str) -> None:
        self._client = client
        self._namespace = namespace
        self._name = name
        self._identity = identity
        self._seen: tuple[object, float] = (None, 0.0)
        self.held = False

    async def acquire(self) -> None:
        """Return once the Lease is ours."""
        said = ""
        while True:
            try:
                holder = await self._try()
                waits_for = f"the Lease is held by {holder}"
            except ApiError as error:
                waits_for = f"the Lease cannot be had: {error.message}"
            if self.held:
                _log.info("Holds the Lease %s/%s", self._namespace, self._name)
                return
            if waits_for != said:
                _log.warning("Stands by: %s", waits_for)
                said = waits_for
            await asyncio.sleep(PERIOD)

    async def keep(self, on_loss: Callable[[], None]) -> None:
        """Renew until cancelled. Calls `on_loss` and returns once somebody else holds the Lease, or when it could not
        be renewed for `RENEW_DEADLINE` seconds: the process must then end, before another one acquires it."""
        clock = asyncio.get_running_loop().time
        renewed = clock()
        while True:
            await asyncio.sleep(PERIOD)
            # For the others the Lease is new from when the server has it, which may be long before we hear so.
            asked = clock()
            try:
                async with asyncio.timeout(max(renewed + RENEW_DEADLINE - clock(), 0.1)):
                    holder = await self._try()
            except Exception as error:
                # Whoever cannot renew, for whatever reason, must not go on as the holder.
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
        """Let a standby take over at once. Best effort: without it the standby waits `DURATION` seconds."""
        if not self.held:
            return
        self.held = False
        try:
            live = await self._client.get(LEASE, self._namespace, self._name)
            if live is not None and live["spec"].get("holderIdentity") == self._identity:
                live["spec"] |= {"holderIdentity": "", "leaseDurationSeconds": 1, "renewTime": _timestamp()}
                await self._client.replace(LEASE, self._namespace, self._name, live)
        except ApiError as error:
            _log.warning("Could not release the Lease: %s", error.message)

    async def _try(self) -> str:
        """Take or renew the Lease if that may be done; return the holder."""
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
                # Somebody was quicker, or our own request had arrived although its answer was lost.
                continue
            self.held = True
            return self._identity

    def _body(self, live: Object) -> Object:
        spec = live.get("spec") or {}
        mine = spec.get("holderIdentity") == self._identity
        return {
            "apiVersion": LEASE.api_version,
            "kind": LEASE.kind,
            "metadata": live.get("metadata") or {"name": self._name, "namespace": self._namespace},
            "spec": {
                "holderIdentity": self._identity,
                "leaseDurationSeconds": int(DURATION),
                "acquireTime": (mine and spec.get("acquireTime")) or _timestamp(),
                "renewTime": _timestamp(),
                "leaseTransitions": spec.get("leaseTransitions", 0) + (0 if mine else 1),
            },
        }

    def _expired(self, live: Object) -> bool:
        """Judged by our clock since we saw the Lease change, never by the times in it: clocks of nodes differ."""
        now = asyncio.get_running_loop().time()
        version = live["metadata"]["resourceVersion"]
        if self._seen[0] != version:
            self._seen = (version, now)
        return now - self._seen[1] > float(live["spec"].get("leaseDurationSeconds") or DURATION)


def _timestamp() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
