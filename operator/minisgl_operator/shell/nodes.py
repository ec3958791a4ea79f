"""A watch of nodes, which says which pods may be deleted by force, and which nodes are drained.

Reading nodes is an optional permission: without it no pod is deleted by force. It is tried again all the time, so a
permission that comes or goes needs no restart. kopf cannot do that, and would hold whole objects: of a node, with its
list of images, a few bytes are kept.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

import msgspec

from minisgl_operator.api.objects import Manifest, parse_time
from minisgl_operator.facts.observed import Nodes, NodeState
from minisgl_operator.shell.client import ApiError, Client
from minisgl_operator.shell.resources import NODE

_log = logging.getLogger(__name__)

_OUT_OF_SERVICE: Final = "node.kubernetes.io/out-of-service"
# Taints of the node autoscalers Karpenter, with its former name, and cluster-autoscaler.
_EMPTIED: Final = frozenset({"karpenter.sh/disrupted", "karpenter.sh/disruption", "ToBeDeletedByClusterAutoscaler"})
_RETRY_SECONDS: Final = 10.0
_RELIST_SECONDS: Final = 1.0
# Some nodes have 30 kB: a page is decoded as a whole.
_PAGE: Final = 50
_GONE: Final = 410


class _Metadata(msgspec.Struct):
    name: str = ""
    resourceVersion: str = ""


class _Taint(msgspec.Struct):
    key: str


class _Spec(msgspec.Struct):
    taints: list[_Taint] | None = None
    unschedulable: bool = False


class _Condition(msgspec.Struct):
    type: str
    status: str
    lastTransitionTime: str | None = None


class _Status(msgspec.Struct):
    conditions: list[_Condition] | None = None


class _Node(msgspec.Struct):
    """The fields of a Node that are read; all others are skipped."""

    metadata: _Metadata = msgspec.field(default_factory=_Metadata)
    spec: _Spec = msgspec.field(default_factory=_Spec)
    status: _Status = msgspec.field(default_factory=_Status)


class _EventType(msgspec.Struct):
    type: str
    object: msgspec.Raw


class _Error(msgspec.Struct):
    code: int = 0
    reason: str = ""
    message: str = ""


class NodeWatch:
    """Keeps the state of all nodes. `on_change` is called with the names of nodes whose state has changed; None: all of
    them may have."""

    def __init__(self, client: Client, on_change: Callable[[frozenset[str] | None], None]) -> None:
        self._client = client
        self._on_change = on_change
        self._nodes: dict[str, NodeState] | None = None
        self._logged = ""
        self.attempted = asyncio.Event()
        """Set when it is known whether nodes can be read."""

    @property
    def nodes(self) -> Nodes | None:
        """All nodes; None if they cannot be read."""
        return None if self._nodes is None else MappingProxyType(self._nodes)

    async def run(self) -> None:
        while True:
            try:
                version = await self._list()
                while True:
                    version = await self._watch(version)
                    # A server that stops ends watches immediately.
                    await asyncio.sleep(_RELIST_SECONDS)
            except ApiError as error:
                if error.status == _GONE:
                    # The version has expired: another list has a new one.
                    await asyncio.sleep(_RELIST_SECONDS)
                    continue
                self._on_error(error)
            self.attempted.set()
            await asyncio.sleep(_RETRY_SECONDS)

    async def read(self, name: str) -> NodeState | None:
        """The state of one node from the API server, not from the watch; None if it does not exist. Raises ApiError."""
        found = await self._client.get(NODE, None, name)
        state = None if found is None else node_state(found)
        if self._nodes is not None:
            self._put(name, state)
        return state

    async def _list(self) -> str:
        found: dict[str, NodeState] = {}
        version = "0"
        async for page in self._client.pages(NODE, None, limit=_PAGE):
            version = page.resource_version
            found |= {item["metadata"]["name"]: node_state(item) for item in page.items}
        before, self._nodes = self._nodes, found
        if self._logged:
            _log.info("Nodes can be read again")
        self._logged = ""
        self.attempted.set()
        if before != found:
            self._on_change(None)
        return version

    async def _watch(self, version: str) -> str:
        """Follow the changes since `version` until the API server ends the watch; return the last version."""
        async for line in self._client.watch(NODE, version):
            event = msgspec.json.decode(line, type=_EventType)
            if event.type == "ERROR":
                error = msgspec.json.decode(event.object, type=_Error)
                raise ApiError(error.code, error.reason, error.message)
            node = msgspec.json.decode(event.object, type=_Node)
            version = node.metadata.resourceVersion or version
            if event.type in ("ADDED", "MODIFIED"):
                self._put(node.metadata.name, _state(node))
            elif event.type == "DELETED":
                self._put(node.metadata.name, None)
        return version

    def _put(self, name: str, state: NodeState | None) -> None:
        assert self._nodes is not None
        if self._nodes.get(name) == state:
            return
        if state is None:
            del self._nodes[name]
        else:
            self._nodes[name] = state
        self._on_change(frozenset({name}))

    def _on_error(self, error: ApiError) -> None:
        refused = error.status in (401, 403)
        if refused and self._nodes is not None:
            self._nodes = None
            self._on_change(None)
        if error.message != self._logged:
            effect = "no pod is deleted by force" if refused else "trying again"
            _log.warning("Cannot read nodes; %s: %s", effect, error.message)
            self._logged = error.message


def node_state(body: Manifest) -> NodeState:
    return _state(msgspec.convert(body, _Node))


def _state(node: _Node) -> NodeState:
    ready: Mapping[str, _Condition] = {each.type: each for each in node.status.conditions or ()}
    found = ready.get("Ready")
    taints = {taint.key for taint in node.spec.taints or ()}
    out_of_service = _OUT_OF_SERVICE in taints
    emptied = node.spec.unschedulable or not taints.isdisjoint(_EMPTIED)
    if found is None or found.status == "True":
        return NodeState(out_of_service=out_of_service, emptied=emptied)
    since = None if found.lastTransitionTime is None else parse_time(found.lastTransitionTime)
    return NodeState("Unknown" if found.status == "Unknown" else "False", since, out_of_service, emptied)
