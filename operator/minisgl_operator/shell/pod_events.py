"""Why something waits: the Events about pods, claims and controllers that are stuck.

Listed only for what has been stuck for a while, and less often the longer it is: most pods never need it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from datetime import datetime
from typing import Final

from minisgl_operator.facts.observed import Manifest, ObjectEvent, utc
from minisgl_operator.shell.client import Client
from minisgl_operator.shell.resources import CORE_EVENT

_AFTER: Final = 5.0
_LONGEST: Final = 60.0
# A model whose hundred pods wait has one reason, not a hundred.
_MOST: Final = 8
_MAX_EVENTS: Final = 50


class StuckEvents:
    """Keeps what was listed last, by the uid of the object, until it is listed again."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._known: dict[str, tuple[float, tuple[ObjectEvent, ...]]] = {}

    async def about(
        self, objects: Iterable[Manifest], now: datetime
    ) -> tuple[dict[str, tuple[ObjectEvent, ...]], float | None]:
        """Events by uid, oldest first, and in how many seconds it is worth looking again."""
        stuck = [one for one in objects if is_stuck(one)][:_MOST]
        found: dict[str, tuple[ObjectEvent, ...]] = {}
        again: float | None = None
        clock = asyncio.get_running_loop().time()
        self._known = {uid: entry for uid, entry in self._known.items() if clock - entry[0] < 2 * _LONGEST}
        for one in stuck:
            metadata = one["metadata"]
            uid, age = metadata["uid"], (now - utc(metadata["creationTimestamp"])).total_seconds()
            period = min(max(age / 4, _AFTER), _LONGEST)
            listed, events = self._known.get(uid, (None, ()))
            if age >= _AFTER and (listed is None or clock - listed >= period):
                events = await self._list(metadata["namespace"], uid)
                self._known[uid] = (clock, events)
            if events:
                found[uid] = events
            due = _AFTER - age if age < _AFTER else period
            again = due if again is None else min(again, due)
        return found, again

    async def _list(self, namespace: str, uid: str) -> tuple[ObjectEvent, ...]:
        items: list[Manifest] = []
        async for page in self._client.pages(CORE_EVENT, namespace, field_selector=f"involvedObject.uid={uid}"):
            items += page.items
        items.sort(key=_when)
        return tuple(ObjectEvent(item.get("reason") or "", item.get("message") or "") for item in items[-_MAX_EVENTS:])


def is_stuck(one: Manifest) -> bool:
    """Whether a pod, claim, StatefulSet or Job waits for something that only an Event names."""
    status = one.get("status", {})
    if one["metadata"].get("deletionTimestamp"):
        return False
    match one["kind"]:
        case "Pod" | "PersistentVolumeClaim":
            return bool(status.get("phase", "Pending") == "Pending")
        case "StatefulSet":
            return bool(status.get("replicas", 0) < one["spec"]["replicas"])
        case "Job":
            counts = (status.get(name, 0) for name in ("active", "succeeded", "failed"))
            return not any(counts) and not status.get("conditions")
    return False


def _when(event: Manifest) -> str:
    series = event.get("series") or {}
    return str(
        series.get("lastObservedTime")
        or event.get("lastTimestamp")
        or event.get("eventTime")
        or event["metadata"]["creationTimestamp"]
    )
