"""Server-side apply of a model's children, without a request where nothing would change.

An apply that changes nothing may still write a new resourceVersion (kubernetes#131175), which comes back as an event
and would be applied again. So the pair (what is there, what is wanted) is remembered once it was applied.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import msgspec

from minisgl_operator.facts.observed import controller_uid
from minisgl_operator.render.names import MODEL_LABEL
from minisgl_operator.shell.client import REPAIR_MANAGER, STATUS_MANAGER, ApiError, Client, Object
from minisgl_operator.shell.metrics import Metrics
from minisgl_operator.shell.resources import MODEL, Resource, of_object
from minisgl_operator.shell.store import Id, ModelKey, Store, fingerprint, trimmed


class Unseen(Exception):
    """An object with the child's name is there that the plan did not know of. It is now in the store: plan again."""

    code = "unseen"


class Applier:
    """Remembers one pair of short hashes for each child."""

    def __init__(self, client: Client, store: Store, metrics: Metrics, on_news: Callable[[ModelKey], None]) -> None:
        """`on_news` hears whose object turned out to have changed otherwise too when it was written. No event will
        tell: the store has the answer already when the event comes, and takes it for old."""
        self._client = client
        self._store = store
        self._metrics = metrics
        self._on_news = on_news
        self._applied: dict[Id, tuple[bytes, bytes]] = {}
        self._statuses: dict[ModelKey, tuple[bytes, bytes]] = {}

    async def apply(self, key: ModelKey, manifest: Object, model: Object) -> bool:
        """Make the model's child as wanted; False when it was. Raises Unseen and ApiError."""
        resource = of_object(manifest)
        metadata = manifest["metadata"]
        id = Id(resource.kind, metadata["namespace"], metadata["name"])
        intent = _hash(manifest)
        live = self._store.get(*id)
        if live is not None and self._applied.get(id) == (live.fingerprint, intent):
            self._metrics.applies[resource.kind, "skipped"] += 1
            return False
        if live is None:
            # What does not have our labels is in no watch. Applying would take it over, or, if it is ours, would not
            # wait for its turn.
            found = await self._client.get(resource, id.namespace, id.name)
            if found is not None:
                self._store.put(found, key)
                raise Unseen(f"{resource.kind} {id.name} exists")
        elif not belongs(live.body, model):
            self._store.mark_taken(id, key)
            raise Unseen(f"{resource.kind} {id.name} does not belong to this model")
        try:
            answer = await self._send(resource, manifest, repair=live is not None)
        except BaseException:
            self._metrics.applies[resource.kind, "error"] += 1
            raise
        self._metrics.applies[resource.kind, "applied"] += 1
        self._store.put(answer)
        if live is not None and live.body.get("status") != trimmed(answer).get("status"):
            self._on_news(key)
        self._applied[id] = (fingerprint(answer), intent)
        return True

    async def _send(self, resource: Resource, manifest: Object, repair: bool) -> Object:
        """Apply. What others added to a list stays there in an apply, and may make the whole invalid, as two ports of
        one name do; then `repair` replaces the lists first."""
        try:
            return await self._client.apply(resource, manifest)
        except ApiError as error:
            if error.status != 422 or not repair or "spec" not in manifest:
                raise
        namespace, name = manifest["metadata"]["namespace"], manifest["metadata"]["name"]
        await self._client.merge(resource, namespace, name, {"spec": manifest["spec"]}, REPAIR_MANAGER)
        applied = await self._client.apply(resource, manifest)
        # The repair must not stay an owner of these fields: one that is no longer wanted would never go away.
        owners = [one for one in applied["metadata"]["managedFields"] if one["manager"] != REPAIR_MANAGER]
        return await self._client.merge(resource, namespace, name, {"metadata": {"managedFields": owners}})

    async def apply_status(self, key: ModelKey, model: Object, status: Object) -> bool:
        """Write the model's status; False when it said the same already."""
        before = model.get("status", {})
        if before == status:
            return False
        pair = (_hash([model["metadata"]["uid"], before]), _hash(status))
        if self._statuses.get(key) == pair:
            # The server stores it in another form than we write it.
            return False
        manifest = {
            "apiVersion": MODEL.api_version,
            "kind": MODEL.kind,
            # With the uid, a model that was deleted and made again meanwhile gets no status of its predecessor.
            "metadata": {"name": key.name, "namespace": key.namespace, "uid": model["metadata"]["uid"]},
            "status": status,
        }
        try:
            answer = await self._client.apply(MODEL, manifest, "status", STATUS_MANAGER)
        except ApiError as error:
            if error.status in (404, 409):
                # Deleted meanwhile; the watch will say so.
                return False
            raise
        self._store.put(answer)
        if answer["metadata"]["generation"] != model["metadata"]["generation"]:
            self._on_news(key)
        self._statuses[key] = (_hash([model["metadata"]["uid"], answer.get("status", {})]), _hash(status))
        return True

    def forget(self) -> None:
        """Drop what is remembered of objects that are no more."""
        self._applied = {id: pair for id, pair in self._applied.items() if self._store.get(*id) is not None}
        self._statuses = {key: pair for key, pair in self._statuses.items() if self._store.model(key) is not None}


def belongs(child: Object, model: Object) -> bool:
    """Whether the child's controller is the model; without any controller, whether our labels say so."""
    controller = controller_uid(child)
    metadata = model["metadata"]
    if controller is not None:
        return bool(controller == metadata["uid"])
    return bool(child["metadata"].get("labels", {}).get(MODEL_LABEL) == metadata["name"])


def whose(child: Object) -> str:
    """For messages: who controls an object that is not the model's."""
    for owner in child["metadata"].get("ownerReferences") or ():
        if owner.get("controller"):
            return f"{owner['kind']} {owner['name']}"
    return "nobody"


def _hash(value: object) -> bytes:
    return hashlib.blake2b(msgspec.json.encode(value, order="deterministic"), digest_size=16).digest()
