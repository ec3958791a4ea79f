"""Polls of the cluster's gateway: one of each of its pods answers for all models.

The pods are listed all the time, because they have no label that the watches select, and may be in a namespace that is
not watched.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

import aiohttp
import msgspec

from minisgl.wire.gateway import GATEWAY_CONTROL_PORT, GATEWAY_STATUS_PATH, GatewayStatus
from minisgl.wire.status import WAIT_PARAMETER
from minisgl_operator.api.objects import Manifest, has_condition, is_deleting
from minisgl_operator.facts.gateway import addresses
from minisgl_operator.facts.observed import GatewayPod
from minisgl_operator.facts.pods import containers_started
from minisgl_operator.render import names
from minisgl_operator.shell.client import ApiError, Client
from minisgl_operator.shell.resources import POD
from minisgl_operator.shell.store import ModelKey

_log = logging.getLogger(__name__)

_POLL_SECONDS: Final = 1.0
_WAIT: Final = {WAIT_PARAMETER: f"{_POLL_SECONDS:g}"}
"""A gateway without held requests answers when one comes, or after this time."""
_TIMEOUT: Final = aiohttp.ClientTimeout(total=3.0)
_MAX_BODY: Final = 2**23
# One failed poll of a busy node does not change the state yet.
_FAILURES: Final = 2
_CURRENT_FOR: Final = timedelta(seconds=30)
"""Age up to which a list tells whose addresses are the gateway's: another pod may get that of one that is gone."""
_MOST_SOURCES: Final = 256
"""Frontends refuse probes whose headers are larger than 32 KiB, and would seem lost."""


def gateway_address(pod: Manifest) -> str:
    """URL of the control port of a pod with an address."""
    ip = pod["status"]["podIP"]
    return f"http://[{ip}]:{GATEWAY_CONTROL_PORT}" if ":" in ip else f"http://{ip}:{GATEWAY_CONTROL_PORT}"


@dataclass
class _Poll:
    """Answers of one pod. `silent_since`: time of the first poll without one, or of the first list with the pod."""

    task: asyncio.Task[None]
    silent_since: datetime
    status: GatewayStatus | None = None
    failures: int = 0
    asked: bool = False

    def received(self, status: GatewayStatus | None, now: datetime) -> None:
        self.asked = True
        self.failures = 0 if status is not None else self.failures + 1
        if status is not None:
            self.status = status
        elif self.status is not None and self.failures >= _FAILURES:
            self.status, self.silent_since = None, now

    def pod(self, listed: Manifest) -> GatewayPod:
        """What is known of the pod."""
        ready = has_condition(listed, "Ready") and not is_deleting(listed)
        since = None if self.status is not None else self.silent_since
        name, address = str(listed["metadata"]["name"]), str(listed["status"]["podIP"])
        return GatewayPod(name, address, ready, self.status, since)


class Gateways:
    """The gateway's pods, of which `pods` is None until they were listed once. `attempted` is set after the first list
    and one poll of each pod."""

    def __init__(
        self,
        client: Client,
        namespace: str,
        instance: str,
        seconds: float,
        on_change: Callable[[ModelKey | None], None],
        on_request: Callable[[ModelKey], None],
        address: Callable[[Manifest], str] = gateway_address,
    ) -> None:
        """`seconds` is the time between lists of the pods. `on_change` is called with a model of which no more requests
        wait, and with None when something about all models has changed; `on_request` with one for which a request
        waits. `address` differs for simulated pods."""
        self.pods: tuple[GatewayPod, ...] | None = None
        self.attempted = asyncio.Event()
        self._client = client
        self._namespace = namespace
        self._selector = f"{names.NAME_LABEL}={names.GATEWAY_APPLICATION},{names.INSTANCE_LABEL}={instance}"
        self._seconds = seconds
        self._on_change = on_change
        self._on_request = on_request
        self._address = address
        self._listed: dict[str, Manifest] | None = None
        self._listed_at: datetime | None = None
        self._polls: dict[str, _Poll] = {}

    def sources(self) -> list[str] | None:
        """Addresses from which the pods connect to frontends, ready or not; None: they were not listed lately."""
        if self._listed is None or self._listed_at is None or self._client.now() - self._listed_at > _CURRENT_FOR:
            return None
        return sorted(each for pod in self._listed.values() for each in _sources(pod))[:_MOST_SOURCES]

    async def run(self) -> None:
        """Follow the pods until cancelled. One that does not answer delays no other."""
        async with aiohttp.ClientSession(timeout=_TIMEOUT) as session, asyncio.TaskGroup() as tasks:
            while True:
                await self._list()
                listed = self._listed or {}
                for name in self._polls.keys() - listed.keys():
                    self._polls.pop(name).task.cancel()
                for name in listed.keys() - self._polls.keys():
                    self._polls[name] = _Poll(tasks.create_task(self._follow(session, name)), self._client.now())
                self._publish()
                await asyncio.sleep(self._seconds)

    async def _list(self) -> None:
        try:
            pages = self._client.pages(POD, self._namespace, self._selector)
            found = [pod async for page in pages for pod in page.items if _is_running(pod)]
        except ApiError as error:
            _log.warning("Could not list the pods of the gateway: %s", error.message)
        else:
            self._listed = {str(pod["metadata"]["name"]): pod for pod in found}
            self._listed_at = self._client.now()

    async def _follow(self, session: aiohttp.ClientSession, name: str) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            began = clock()
            assert self._listed is not None
            self._polls[name].received(await self._request(session, self._listed[name]), self._client.now())
            self._publish()
            # A pod that holds a request answers at once.
            await asyncio.sleep(max(0.0, began + min(_POLL_SECONDS, self._seconds) - clock()))

    def _publish(self) -> None:
        """Make `pods` what is known now, and tell the models that it matters to. At first all pods are asked once."""
        if not all(poll.asked for poll in self._polls.values()) and not self.attempted.is_set():
            return
        self.attempted.set()
        if self._listed is None:
            return
        found = tuple(self._polls[name].pod(listed) for name, listed in sorted(self._listed.items()))
        last, self.pods = self.pods, found
        if last is None or _common(last) != _common(found):
            self._on_change(None)
        held_before, held = _held(last or ()), _held(found)
        for name in held - held_before:
            self._on_request(_key(name))
        for name in held_before - held:
            self._on_change(_key(name))

    async def _request(self, session: aiohttp.ClientSession, pod: Manifest) -> GatewayStatus | None:
        """The answer of a pod; None without a usable one."""
        name = pod["metadata"]["name"]
        try:
            url = f"{self._address(pod)}{GATEWAY_STATUS_PATH}"
            async with session.get(url, params=_WAIT, allow_redirects=False) as response:
                body = bytearray()
                async for part in response.content.iter_any():
                    body += part
                    if len(body) > _MAX_BODY:
                        _log.warning("The answer of gateway %s is larger than %d bytes", name, _MAX_BODY)
                        response.close()
                        return None
                if response.status == 200:
                    return msgspec.json.decode(bytes(body), type=GatewayStatus)
        except (aiohttp.ClientError, TimeoutError, OSError, msgspec.DecodeError) as error:
            _log.debug("Gateway %s does not answer: %s", name, error)
        return None


def _is_running(pod: Manifest) -> bool:
    """True if it may have requests, as one that stops may."""
    status = pod.get("status") or {}
    return status.get("phase") == "Running" and bool(status.get("podIP")) and containers_started(pod)


def _sources(pod: Manifest) -> list[str]:
    """Addresses of both families that are the pod's alone. Those of its node are also those of other pods, and of
    connections from outside that the node passes on."""
    if (pod.get("spec") or {}).get("hostNetwork"):
        return []
    status = pod["status"]
    return [str(each["ip"]) for each in status.get("podIPs") or [{"ip": status["podIP"]}]]


def _common(pods: Iterable[GatewayPod]) -> object:
    """What matters to every model."""
    pods = tuple(pods)
    return addresses(pods), sorted(pod.name for pod in pods if pod.status is None)


def _held(pods: Iterable[GatewayPod]) -> set[str]:
    """Models for which requests wait."""
    found = (pod.status.models for pod in pods if pod.status is not None)
    return {name for models in found for name, model in models.items() if model.held > 0}


def _key(name: str) -> ModelKey:
    namespace, _, model = name.partition("/")
    return ModelKey(namespace, model)
