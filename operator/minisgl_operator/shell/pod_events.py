"""Events about pods, PVCs and controllers that wait, which explain why.

They are listed only for objects that have waited for a while, and less often the longer they wait: most pods never need
it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from datetime import datetime
from typing import Final

from minisgl_operator.api.objects import Manifest, is_deleting, parse_time
from minisgl_operator.facts.observed import ObjectEvent
from minisgl_operator.shell.client import Client
from minisgl_operator.shell.resources import CORE_EVENT, POD

_MIN_PERIOD: Final = 5.0
_MAX_PERIOD: Final = 60.0
# A hundred waiting pods of a model have one cause, not a hundred.
_MAX_PODS: Final = 8
_MAX_OTHERS: Final = 32
_MAX_EVENTS: Final = 50


class PodEvents:
    """Keeps the last list by the object's uid."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._known: dict[str, tuple[float, tuple[ObjectEvent, ...]]] = {}

    async def events_for(
        self, objects: Iterable[Manifest], now: datetime
    ) -> tuple[dict[str, tuple[ObjectEvent, ...]], float | None]:
        """Events by uid, oldest first, and the seconds until another list is due; None without waiting objects."""
        waiting = [one for one in objects if waits_for_event(one)]
        pods = [one for one in waiting if one["kind"] == POD.kind]
        # Only Events of their controllers and claims tell why other pods cannot be created.
        others = [one for one in waiting if one["kind"] != POD.kind]
        found: dict[str, tuple[ObjectEvent, ...]] = {}
        due: list[float] = []
        clock = asyncio.get_running_loop().time()
        self._known = {uid: entry for uid, entry in self._known.items() if clock - entry[0] < 2 * _MAX_PERIOD}
        for one in (*others[:_MAX_OTHERS], *pods[:_MAX_PODS]):
            metadata = one["metadata"]
            uid, age = metadata["uid"], (now - parse_time(metadata["creationTimestamp"])).total_seconds()
            period = min(max(age / 4, _MIN_PERIOD), _MAX_PERIOD)
            listed, events = self._known.get(uid, (None, ()))
            if age >= _MIN_PERIOD and (listed is None or clock - listed >= period):
                events = await self._list(metadata["namespace"], uid)
                self._known[uid] = (clock, events)
            if events:
                found[uid] = events
            due.append(_MIN_PERIOD - age if age < _MIN_PERIOD else period)
        return found, min(due, default=None)

    async def _list(self, namespace: str, uid: str) -> tuple[ObjectEvent, ...]:
        items: list[Manifest] = []
        async for page in self._client.pages(CORE_EVENT, namespace, field_selector=f"involvedObject.uid={uid}"):
            items += page.items
        items.sort(key=_last_time)
        return tuple(ObjectEvent(item.get("reason") or "", item.get("message") or "") for item in items[-_MAX_EVENTS:])


def waits_for_event(one: Manifest) -> bool:
    """True if a pod, PVC, StatefulSet or Job waits for something that only an Event explains."""
    status = one.get("status", {})
    if is_deleting(one):
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


def _last_time(event: Manifest) -> str:
    series = event.get("series") or {}
    return str(
        series.get("lastObservedTime")
        or event.get("lastTimestamp")
        or event.get("eventTime")
        or event["metadata"]["creationTimestamp"]
    )
