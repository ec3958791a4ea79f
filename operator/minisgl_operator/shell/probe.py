"""Asks the pods themselves: GET /status of rank-0 launchers, frontends and running fetch pods.

What was answered last is kept by pod. Only a changed answer wakes the model, and what never stands still (requests in
flight, seconds of silence) does not count as a change.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import aiohttp
import msgspec

from minisgl_operator.facts.observed import Manifest, Unreachable
from minisgl_operator.facts.replicas import is_asked
from minisgl_operator.render.names import CONTROL_PORT
from minisgl_operator.shell.metrics import Metrics
from minisgl_operator.shell.store import ModelKey, Store

Report = Mapping[str, Any] | Unreachable
Target = tuple[ModelKey, Manifest]

_log = logging.getLogger(__name__)

_TIMEOUT: Final = aiohttp.ClientTimeout(total=3.0)
# A frontend names each replica, of which there may be a thousand, and says why it does not route there.
_MAX_BODY: Final = 2**20
_CONCURRENT: Final = 32
# The operator's share of one core stays small with thousands of pods; rounds then take longer than asked for.
_RATE: Final = 200.0
# Somebody may be waiting for a model that starts: its pods do not wait for their turn in a round of thousands.
_LOOK_SECONDS: Final = 0.5
_SETTLED: Final = ("Ready", "Suspended")
_NO_NEWS: Final = ("running", "waiting", "reason")
# One lost answer of a busy node is not yet news.
_FAILURES: Final = 2


def pod_address(pod: Manifest) -> str | None:
    """Where a pod's launcher answers; None while the pod has no address."""
    ip = pod["status"].get("podIP")
    if not ip:
        return None
    return f"http://[{ip}]:{CONTROL_PORT}" if ":" in ip else f"http://{ip}:{CONTROL_PORT}"


class Prober:
    """`on_change` hears whose pod answered something new. `address` is replaced where pods are only simulated."""

    def __init__(
        self,
        store: Store,
        on_change: Callable[[ModelKey], None],
        metrics: Metrics,
        seconds: float,
        address: Callable[[Manifest], str | None] = pod_address,
    ) -> None:
        self.reports: dict[str, Report] = {}
        self._store = store
        self._on_change = on_change
        self._metrics = metrics
        self._seconds = seconds
        self._address = address
        self._failures: dict[str, int] = {}
        self._asked: dict[str, float] = {}
        self._slots = asyncio.Semaphore(_CONCURRENT)

    async def run(self) -> None:
        """Ask every pod about every `seconds`, spread over that time, until cancelled."""
        # No proxy from the environment: pods are asked directly.
        connector = aiohttp.TCPConnector(limit=_CONCURRENT, keepalive_timeout=4 * self._seconds)
        async with (
            aiohttp.ClientSession(timeout=_TIMEOUT, connector=connector) as session,
            asyncio.TaskGroup() as tasks,
        ):
            clock = asyncio.get_running_loop().time
            while True:
                targets = self._targets()
                self._forget({_uid(pod) for _, pod in targets})
                step = max(self._seconds / max(len(targets), 1), 1 / _RATE)
                if not targets:
                    await asyncio.sleep(min(step, _LOOK_SECONDS))
                random.shuffle(targets)
                for key, pod in self._urgent_first(targets):
                    await self._slots.acquire()
                    self._asked[_uid(pod)] = clock()
                    tasks.create_task(self._ask(session, key, pod))
                    await asyncio.sleep(step * random.uniform(0.8, 1.2))

    def _targets(self) -> list[Target]:
        return [(key, pod) for key, pod in self._store.pods() if is_asked(pod)]

    def _urgent_first(self, targets: Sequence[Target]) -> Iterator[Target]:
        """All of them, and in between, for half of the time at most, the pods that are urgent by then."""
        clock = asyncio.get_running_loop().time
        began, look_at = clock(), clock()
        for target in targets:
            if clock() >= look_at:
                looked = clock()
                yield from [each for each in self._targets() if self._is_urgent(each, looked)]
                look_at = clock() + max(_LOOK_SECONDS, clock() - looked)
            if self._asked.get(_uid(target[1]), began - 1) < began:
                yield target

    def _is_urgent(self, target: Target, now: float) -> bool:
        """Never asked, or not for a while and of a model that is on its way."""
        key, pod = target
        asked = self._asked.get(_uid(pod))
        if asked is None:
            return True
        model = self._store.model(key)
        phase = None if model is None else model.body.get("status", {}).get("phase")
        return now - asked >= self._seconds and phase not in _SETTLED

    async def _ask(self, session: aiohttp.ClientSession, key: ModelKey, pod: Manifest) -> None:
        try:
            uid = _uid(pod)
            report = await self._fetch(session, pod)
            if isinstance(report, Unreachable):
                self._metrics.probes["unreachable"] += 1
                self._failures[uid] = self._failures.get(uid, 0) + 1
                if uid in self.reports and self._failures[uid] < _FAILURES:
                    return
            else:
                self._metrics.probes["answered"] += 1
                self._failures.pop(uid, None)
            before = self.reports.get(uid)
            self.reports[uid] = report
            if before is None or news(before) != news(report):
                self._on_change(key)
        finally:
            self._slots.release()

    async def _fetch(self, session: aiohttp.ClientSession, pod: Manifest) -> Report:
        address = self._address(pod)
        if address is None:
            return Unreachable("the pod has no address")
        try:
            async with session.get(f"{address}/status", allow_redirects=False) as response:
                body = await response.content.read(_MAX_BODY + 1)
                while len(body) <= _MAX_BODY and (part := await response.content.read(_MAX_BODY + 1)):
                    body += part
                if response.status != 200:
                    return Unreachable(f"/status answered {response.status}")
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            return Unreachable(str(error) or type(error).__name__)
        if len(body) > _MAX_BODY:
            return Unreachable(f"/status is larger than {_MAX_BODY} bytes")
        try:
            report = msgspec.json.decode(body)
        except (msgspec.DecodeError, RecursionError):
            return Unreachable("/status is no JSON")
        return report if isinstance(report, dict) else Unreachable("/status is no JSON object")

    def _forget(self, present: set[str]) -> None:
        for uid in self.reports.keys() - present:
            del self.reports[uid]
        for uid in self._failures.keys() - present:
            del self._failures[uid]
        for uid in self._asked.keys() - present:
            del self._asked[uid]


def _uid(pod: Manifest) -> str:
    return str(pod["metadata"]["uid"])


def news(report: Report) -> object:
    """The report without what never stands still and nobody here reads."""
    if isinstance(report, Unreachable):
        return None
    replicas = report.get("replicas")
    if not isinstance(replicas, list):
        return report
    return {
        **report,
        "replicas": [
            {name: value for name, value in entry.items() if name not in _NO_NEWS} if isinstance(entry, dict) else entry
            for entry in replicas
        ],
    }
