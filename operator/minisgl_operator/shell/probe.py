"""Status probes: GET /status of leaders, frontends and running fetch pods.

The last report of each pod is kept. Only a changed report queues the model; fields that change all the time (running
requests, seconds of silence) do not count. Each request tells a frontend whether its model takes requests, and
which addresses are the gateway's, and an engine whether it shall refuse whoever cannot prove to be a pod of its model.

A frontend of a model that the next request starts answers later: when a request comes, or after `_WAIT_SECONDS`. These
long polls have their own connections, as there may be many, and each lasts.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

import aiohttp
import msgspec

from minisgl.wire.status import CONTROL_PORT, GATEWAYS_HEADER, SECRET_HEADER, SERVING_HEADER, WAIT_PARAMETER
from minisgl_operator.api.objects import Manifest
from minisgl_operator.facts.observed import Report, Unreachable
from minisgl_operator.facts.pods import component, containers_started, serves_status
from minisgl_operator.facts.wanted import is_at_zero, takes_requests
from minisgl_operator.render import names
from minisgl_operator.shell.metrics import Metrics
from minisgl_operator.shell.store import ModelKey, Store

Target = tuple[ModelKey, Manifest]

_log = logging.getLogger(__name__)

_TIMEOUT: Final = aiohttp.ClientTimeout(total=3.0)
# A frontend reports up to a thousand replicas, each with the reason why it is not routable.
_MAX_BODY: Final = 2**20
_CONCURRENT: Final = 32
# Probes per second, so that thousands of pods cost little CPU time; rounds then take longer than configured.
_RATE: Final = 200.0
# Pods of a model that starts do not wait for their turn in a round of thousands: a user may be waiting.
_LOOK_SECONDS: Final = 0.5
# A look at all models takes at most two percent of the time.
_PAUSE_PER_LOOK: Final = 50
_WAIT_SECONDS: Final = 20
"""Frontends that have heard nothing from the operator for 30 s hold requests of a suspended model too."""
_WAIT_TIMEOUT: Final = aiohttp.ClientTimeout(total=_WAIT_SECONDS + 5.0)
_SETTLED: Final = ("Ready", "Idle", "Suspended")
_IGNORED_FIELDS: Final = frozenset({"running", "waiting", "reason", "queue_ms", "kv_usage"})
_IGNORED_OF_FRONTENDS: Final = frozenset({"running", "idle_seconds", "held", "replicas"})
# One failed probe of a busy node does not change the state yet.
_FAILURES: Final = 2


def pod_address(pod: Manifest) -> str | None:
    """URL of the pod's control port; None while the pod has no address."""
    ip = pod["status"].get("podIP")
    if not ip:
        return None
    return f"http://[{ip}]:{CONTROL_PORT}" if ":" in ip else f"http://{ip}:{CONTROL_PORT}"


class Prober:
    """`on_change` is called with the model of a pod whose report has changed, and `on_request` with a model without
    replicas for which a request waits. `address` differs for simulated pods. `gateways`: addresses from which the
    gateway connects; None: unknown, or there is no gateway."""

    def __init__(
        self,
        store: Store,
        on_change: Callable[[ModelKey], None],
        metrics: Metrics,
        seconds: float,
        address: Callable[[Manifest], str | None] = pod_address,
        on_request: Callable[[ModelKey], None] | None = None,
        gateways: Callable[[], Sequence[str] | None] = lambda: None,
    ) -> None:
        self.reports: dict[str, Report | Unreachable] = {}
        self._secret_required: set[ModelKey] = set()
        self._store = store
        self._on_change = on_change
        self._on_request = on_request or on_change
        self._metrics = metrics
        self._seconds = seconds
        self._address = address
        self._gateways = gateways
        self._failures: dict[str, int] = {}
        self._probed_at: dict[str, float] = {}
        self._slots = asyncio.Semaphore(_CONCURRENT)
        self._long_polls: dict[str, asyncio.Task[None]] = {}

    def require_secret(self, key: ModelKey, required: bool) -> None:
        """Tell the model's engines from now on whether all of its pods know a common token."""
        if required:
            self._secret_required.add(key)
        else:
            self._secret_required.discard(key)

    async def run(self) -> None:
        """Probe every pod every `seconds`, spread over that time, until cancelled."""
        # Pods are reached directly, without a proxy from the environment.
        connector = aiohttp.TCPConnector(limit=_CONCURRENT, keepalive_timeout=4 * self._seconds)
        async with (
            aiohttp.ClientSession(timeout=_TIMEOUT, connector=connector) as session,
            asyncio.TaskGroup() as tasks,
        ):
            clock = asyncio.get_running_loop().time
            tasks.create_task(self._run_long_polls())
            while True:
                targets = self._targets()
                self._forget({_uid(pod) for _, pod in targets} | self._long_polls.keys())
                step = max(self._seconds / max(len(targets), 1), 1 / _RATE)
                if not targets:
                    await asyncio.sleep(min(step, _LOOK_SECONDS))
                random.shuffle(targets)
                for key, pod in self._urgent_first(targets):
                    await self._slots.acquire()
                    self._probed_at[_uid(pod)] = clock()
                    tasks.create_task(self._probe(session, key, pod))
                    await asyncio.sleep(step * random.uniform(0.8, 1.2))

    def _targets(self) -> list[Target]:
        return [
            (key, pod) for key, pod in self._store.pods() if serves_status(pod) and _uid(pod) not in self._long_polls
        ]

    async def _run_long_polls(self) -> None:
        """Keep one long poll for each frontend of the models that the next request starts."""
        async with (
            aiohttp.ClientSession(timeout=_WAIT_TIMEOUT, connector=aiohttp.TCPConnector(limit=0)) as session,
            asyncio.TaskGroup() as tasks,
        ):
            clock = asyncio.get_running_loop().time
            while True:
                looked = clock()
                wanted = self._frontends_at_zero()
                pause = max(_LOOK_SECONDS, _PAUSE_PER_LOOK * (clock() - looked))
                for uid in self._long_polls.keys() - wanted.keys():
                    self._long_polls.pop(uid).cancel()
                for uid in wanted.keys() - self._long_polls.keys():
                    self._long_polls[uid] = tasks.create_task(self._long_poll(session, *wanted[uid]))
                    await asyncio.sleep(1 / _RATE)
                await asyncio.sleep(pause)

    def _frontends_at_zero(self) -> dict[str, Target]:
        """Frontends of models that the next request starts, by uid. An unknown one is probed first: a long poll says
        nothing for a while."""
        found: dict[str, Target] = {}
        for key in self._store.models():
            model = self._store.model(key)
            if model is None or not is_at_zero(model.body):
                continue
            pods = (each.body for each in self._store.of_model(key) if each.body["kind"] == "Pod")
            for pod in pods:
                if component(pod) == names.FRONTEND and serves_status(pod) and _uid(pod) in self.reports:
                    found[_uid(pod)] = key, pod
        return found

    async def _long_poll(self, session: aiohttp.ClientSession, key: ModelKey, pod: Manifest) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            began = clock()
            self._received(key, pod, await self._request(session, key, pod, wait=True))
            # Frontends that hold a request answer at once until the model is started.
            await asyncio.sleep(max(0.0, began + self._seconds - clock()))

    def _urgent_first(self, targets: Sequence[Target]) -> Iterator[Target]:
        """All targets; in between, for at most half of the time, pods that have become urgent."""
        clock = asyncio.get_running_loop().time
        began, look_at = clock(), clock()
        for target in targets:
            if clock() >= look_at:
                looked = clock()
                yield from [each for each in self._targets() if self._is_urgent(each, looked)]
                look_at = clock() + max(_LOOK_SECONDS, clock() - looked)
            if self._probed_at.get(_uid(target[1]), began - 1) < began:
                yield target

    def _is_urgent(self, target: Target, now: float) -> bool:
        """True if the pod was never probed, or is due again and belongs to a model that is not settled."""
        key, pod = target
        probed_at = self._probed_at.get(_uid(pod))
        if probed_at is None:
            return True
        model = self._store.model(key)
        phase = None if model is None else model.body.get("status", {}).get("phase")
        return now - probed_at >= self._seconds and phase not in _SETTLED

    async def _probe(self, session: aiohttp.ClientSession, key: ModelKey, pod: Manifest) -> None:
        try:
            self._received(key, pod, await self._request(session, key, pod))
        finally:
            self._slots.release()

    def _received(self, key: ModelKey, pod: Manifest, report: Report | Unreachable) -> None:
        uid = _uid(pod)
        before = self.reports.get(uid)
        if isinstance(report, Unreachable):
            self._metrics.probes["unreachable"] += 1
            report = replace(report, while_starting=not containers_started(pod))
            if report.while_starting and (before is None or isinstance(before, Unreachable)):
                # Only what fails after the start counts.
                self._failures[uid] = 0
            else:
                self._failures[uid] = self._failures.get(uid, 0) + 1
                if before is not None and self._failures[uid] < _FAILURES:
                    return
        else:
            self._metrics.probes["answered"] += 1
            self._failures.pop(uid, None)
        self.reports[uid] = report
        if before is None or _significant_fields(before) != _significant_fields(report):
            waits = not isinstance(report, Unreachable) and bool(report.get("held"))
            (self._on_request if waits else self._on_change)(key)

    async def _request(
        self, session: aiohttp.ClientSession, key: ModelKey, pod: Manifest, wait: bool = False
    ) -> Report | Unreachable:
        address = self._address(pod)
        if address is None:
            return Unreachable("the pod has no address")
        headers, parameters = {}, {WAIT_PARAMETER: str(_WAIT_SECONDS)} if wait else {}
        model = self._store.model(key)
        if model is not None and component(pod) == names.FRONTEND:
            headers[SERVING_HEADER] = "true" if takes_requests(model.body) else "false"
            if (gateways := self._gateways()) is not None:
                headers[GATEWAYS_HEADER] = ",".join(gateways)
        if key in self._secret_required and component(pod) == names.ENGINE:
            headers[SECRET_HEADER] = "required"
        try:
            async with session.get(
                f"{address}/status", params=parameters, headers=headers, allow_redirects=False
            ) as response:
                body = await response.content.read(_MAX_BODY + 1)
                while len(body) <= _MAX_BODY and (part := await response.content.read(_MAX_BODY + 1)):
                    body += part
                if response.status != 200:
                    return Unreachable(f"status {response.status} of /status")
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            return Unreachable(str(error) or type(error).__name__)
        if len(body) > _MAX_BODY:
            return Unreachable(f"the body of /status is larger than {_MAX_BODY} bytes")
        try:
            report = msgspec.json.decode(body)
        except (msgspec.DecodeError, RecursionError):
            return Unreachable("the body of /status is not JSON")
        return report if isinstance(report, dict) else Unreachable("the body of /status is not a JSON object")

    def _forget(self, present: set[str]) -> None:
        by_uid: tuple[dict[str, Any], ...] = (self.reports, self._failures, self._probed_at)
        for known in by_uid:
            for uid in known.keys() - present:
                del known[uid]


def _uid(pod: Manifest) -> str:
    return str(pod["metadata"]["uid"])


def _significant_fields(report: Report | Unreachable) -> object:
    """The report without the fields that change all the time: what they mean for the number of replicas is looked at
    from time to time. The first held request counts, as it may start the model."""
    if isinstance(report, Unreachable):
        return report.while_starting
    replicas = report.get("replicas")
    if not isinstance(replicas, list):
        return report
    return {
        **{name: value for name, value in report.items() if name not in _IGNORED_OF_FRONTENDS},
        "held": bool(report.get("held")),
        "replicas": [
            {name: value for name, value in entry.items() if name not in _IGNORED_FIELDS}
            if isinstance(entry, dict)
            else entry
            for entry in replicas
        ],
    }
