"""Events about models, the timeline in `kubectl describe`. Best effort: an event that cannot be written is lost."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final

from minisgl_operator.api.objects import Manifest, micro_time
from minisgl_operator.shell.client import ApiError, Client
from minisgl_operator.shell.resources import EVENT
from minisgl_operator.status.transitions import ModelEvent

_log = logging.getLogger(__name__)

CONTROLLER: Final = "serving.minisgl.io/minisgl-operator"
# As in client-go's recorder: a burst of 25 events for each object, then one every five minutes.
_BURST: Final = 25.0
_REFILL_SECONDS: Final = 300.0
# An equal event within this time is counted in the first one.
_SERIES_SECONDS: Final = 360.0
# For all models together, where thousands change at the same time: reconciles have priority over events.
_ALL_BURST: Final = 100.0
_ALL_PER_SECOND: Final = 10.0
_MAX_PENDING: Final = 1000
_MAX_NOTE_BYTES: Final = 1024


@dataclass(frozen=True)
class _Series:
    name: str
    count: int
    last: float


class Recorder:
    """A bounded queue of events, which `run` sends, so that no reconcile waits for them."""

    def __init__(self, client: Client, instance: str) -> None:
        self._client = client
        self._instance = instance[:128]
        self._pending: asyncio.Queue[tuple[Manifest, ModelEvent]] = asyncio.Queue(_MAX_PENDING)
        self._flushing = asyncio.Event()
        self._unsent = 0
        # By uid of the model, the time at which all its events would have been recorded at the steady rate.
        self._free: dict[str, float] = {}
        # In the order of their last Events.
        self._series: dict[tuple[str, ModelEvent], _Series] = {}

    @property
    def idle(self) -> bool:
        """True if all recorded events have been sent."""
        return self._unsent == 0

    def record(self, model: Manifest, event: ModelEvent) -> None:
        """Queue the event; it is dropped when the model has had too many or the queue is full."""
        if self._pending.full() or not self._take(model["metadata"]["uid"]):
            return
        self._unsent += 1
        self._pending.put_nowait((model, event))

    async def run(self) -> None:
        clock = asyncio.get_running_loop().time
        free = clock() - _ALL_BURST / _ALL_PER_SECOND
        while True:
            model, event = await self._pending.get()
            # `free`: the time at which all events so far would have been sent at the steady rate.
            free = max(free, clock() - _ALL_BURST / _ALL_PER_SECOND) + 1 / _ALL_PER_SECOND
            with suppress(TimeoutError):
                async with asyncio.timeout(free - clock()):
                    await self._flushing.wait()
            try:
                await self._send(model, event)
            except ApiError as error:
                _log.warning("Could not record the event %s: %s", event.reason, error.message)
            finally:
                self._unsent -= 1
                self._pending.task_done()

    async def flush(self, seconds: float) -> None:
        """Send all recorded events without the pause between them, for at most so long. What remains is lost."""
        self._flushing.set()
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._pending.join()

    async def _send(self, model: Manifest, event: ModelEvent) -> None:
        now = asyncio.get_running_loop().time()
        metadata = model["metadata"]
        while (oldest := next(iter(self._series), None)) and now - self._series[oldest].last >= _SERIES_SECONDS:
            del self._series[oldest]
        key = (metadata["uid"], event)
        series = self._series.get(key)
        if series is not None:
            series = replace(series, count=series.count + 1, last=now)
            counted = {"series": {"count": series.count, "lastObservedTime": micro_time()}}
            await self._client.merge(EVENT, metadata["namespace"], series.name, counted)
            del self._series[key]
            self._series[key] = series
            return
        time = micro_time()
        # The name is a hash of content and time, so that a request sent twice creates one event.
        unique = hashlib.sha256(f"{metadata['uid']} {time} {event}".encode()).hexdigest()[:16]
        name = f"{metadata['name']}.{unique}"
        body = {
            "apiVersion": EVENT.api_version,
            "kind": EVENT.kind,
            "metadata": {"name": name, "namespace": metadata["namespace"]},
            "eventTime": time,
            "reportingController": CONTROLLER,
            "reportingInstance": self._instance,
            "type": event.type,
            "reason": event.reason,
            "action": event.action,
            "note": event.note.encode()[:_MAX_NOTE_BYTES].decode(errors="ignore"),
            "regarding": {
                "apiVersion": model["apiVersion"],
                "kind": model["kind"],
                "namespace": metadata["namespace"],
                "name": metadata["name"],
                "uid": metadata["uid"],
                "resourceVersion": metadata["resourceVersion"],
            },
        }
        try:
            await self._client.create(EVENT, metadata["namespace"], body)
        except ApiError as error:
            if error.status != 409:
                raise
        self._series[key] = _Series(name, 1, now)

    def _take(self, uid: str) -> bool:
        """True if the model may have another event now; counts it."""
        earliest = asyncio.get_running_loop().time() - _BURST * _REFILL_SECONDS
        free = max(self._free.get(uid, earliest), earliest)
        if free > earliest + (_BURST - 1) * _REFILL_SECONDS:
            return False
        self._free[uid] = free + _REFILL_SECONDS
        if len(self._free) > _MAX_PENDING:
            self._free = {uid: free for uid, free in self._free.items() if free > earliest}
        return True
