"""Server-side apply of a model's children, without requests that would change nothing.

An apply that changes nothing may still write a new resourceVersion (kubernetes#131175); its event would cause the next
apply. So the pair (live object, wanted object) is remembered once it was applied.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from minisgl_operator.api.objects import Manifest, controller_of
from minisgl_operator.api.undeclared import undeclared_fields, without_fields
from minisgl_operator.render.names import MODEL_LABEL
from minisgl_operator.shell.client import REPLACE_LISTS_MANAGER, STATUS_MANAGER, ApiError, Client
from minisgl_operator.shell.metrics import Metrics
from minisgl_operator.shell.resources import MODEL, Resource, of_kind
from minisgl_operator.shell.store import Id, ModelKey, Store, content_hash, spec_hash, trim

_log = logging.getLogger(__name__)


class ConflictDetected(Exception):
    """An object with the child's name exists that the plan did not know of. The store has it now: plan again."""

    code = "unseen"


class Applier:
    """Remembers one pair of short hashes for each child."""

    def __init__(self, client: Client, store: Store, metrics: Metrics, on_change: Callable[[ModelKey], None]) -> None:
        """`on_change` is called when the response to a write shows another change of the object as well. The store
        has the response already when that change's event arrives, and drops the event as outdated."""
        self._client = client
        self._store = store
        self._metrics = metrics
        self._on_change = on_change
        self._applied: dict[Id, tuple[bytes, bytes]] = {}
        self._statuses: dict[ModelKey, tuple[bytes, bytes]] = {}
        self._is_old_definition = False
        """It was logged that the cluster's definition does not have all fields of the status."""

    async def apply(self, key: ModelKey, manifest: Manifest, model: Manifest) -> bool:
        """Apply a child of `model`; return False when the last apply still holds.

        Raises:
            ConflictDetected: another owner's object has the child's name.
            ApiError: the API server rejected the apply, or did not answer.
        """
        resource = of_kind(manifest["kind"])
        metadata = manifest["metadata"]
        id = Id(resource.kind, metadata["namespace"], metadata["name"])
        intent = content_hash(manifest)
        live = self._store.get(*id)
        if live is not None and self._applied.get(id) == (live.spec_hash, intent):
            self._metrics.applies[resource.kind, "skipped"] += 1
            return False
        if live is None:
            # Objects without our labels are in no watch. An apply would take over an object of another owner, and
            # would skip the order of steps for our own.
            found = await self._client.get(resource, id.namespace, id.name)
            if found is not None:
                self._store.put(found, key)
                raise ConflictDetected(f"{resource.kind} {id.name} exists")
        elif not is_owned_by(live.body, model):
            self._store.mark_name_conflict(id, key)
            raise ConflictDetected(f"{resource.kind} {id.name} is not owned by this model")
        try:
            response = await self._send(resource, manifest, exists=live is not None)
        except BaseException:
            self._metrics.applies[resource.kind, "error"] += 1
            raise
        self._metrics.applies[resource.kind, "applied"] += 1
        self._store.put(response)
        if live is not None and live.body.get("status") != trim(response).get("status"):
            self._on_change(key)
        self._applied[id] = (spec_hash(response), intent)
        return True

    async def _send(self, resource: Resource, manifest: Manifest, exists: bool) -> Manifest:
        """Apply. List items that other managers added stay in an apply and can make the object invalid, such as two
        ports with one name; the lists of an existing object are replaced first then."""
        try:
            return await self._client.apply(resource, manifest)
        except ApiError as error:
            if error.status != 422 or not exists or "spec" not in manifest:
                raise
        namespace, name = manifest["metadata"]["namespace"], manifest["metadata"]["name"]
        await self._client.merge(resource, namespace, name, {"spec": manifest["spec"]}, REPLACE_LISTS_MANAGER)
        applied = await self._client.apply(resource, manifest)
        # A second owner of these fields would keep those that are no longer wanted.
        owners = [one for one in applied["metadata"]["managedFields"] if one["manager"] != REPLACE_LISTS_MANAGER]
        return await self._client.merge(resource, namespace, name, {"metadata": {"managedFields": owners}})

    async def apply_status(self, key: ModelKey, model: Manifest, status: Manifest) -> bool:
        """Write the model's status; return False without a change."""
        before = model.get("status", {})
        if before == status:
            return False
        uid = model["metadata"]["uid"]
        pair = (content_hash([uid, before]), content_hash(status))
        if self._statuses.get(key) == pair:
            # The API server stores the status in another form than the one that was written.
            return False
        manifest = {
            "apiVersion": MODEL.api_version,
            "kind": MODEL.kind,
            # The uid keeps a model that was deleted and created again from getting the old model's status.
            "metadata": {"name": key.name, "namespace": key.namespace, "uid": uid},
            "status": status,
        }
        try:
            response = await self._send_status(manifest)
        except ApiError as error:
            if error.status in (404, 409):
                # The model was deleted; the watch reports it.
                return False
            raise
        self._store.put(response)
        if response["metadata"]["generation"] != model["metadata"]["generation"]:
            self._on_change(key)
        self._statuses[key] = (content_hash([uid, response.get("status", {})]), content_hash(status))
        return True

    async def _send_status(self, manifest: Manifest) -> Manifest:
        """Apply a status; a definition that is older than this operator gets what it has fields for."""
        try:
            return await self._client.apply(MODEL, manifest, "status", STATUS_MANAGER)
        except ApiError as error:
            fields = undeclared_fields(error.message)
            if not fields:
                raise
        response = await self._client.apply(MODEL, without_fields(manifest, fields), "status", STATUS_MANAGER)
        if not self._is_old_definition:
            self._is_old_definition = True
            _log.warning(
                "The definition of InferenceModel in the cluster is older than this operator: it does not have %s. "
                "Apply the CRD of this version.",
                ", ".join(fields),
            )
        return response

    def forget(self) -> None:
        """Drop the hashes of deleted objects."""
        self._applied = {id: pair for id, pair in self._applied.items() if self._store.get(*id) is not None}
        self._statuses = {key: pair for key, pair in self._statuses.items() if self._store.model(key) is not None}


def is_owned_by(child: Manifest, model: Manifest) -> bool:
    """True if the model is the child's controller; for a child without a controller, whether it has our labels."""
    controller = controller_of(child)
    metadata = model["metadata"]
    if controller is not None:
        return bool(controller["uid"] == metadata["uid"])
    return bool(child["metadata"].get("labels", {}).get(MODEL_LABEL) == metadata["name"])


def owner_name(child: Manifest) -> str:
    """The controller of an object, for messages."""
    owner = controller_of(child)
    return "no owner" if owner is None else f"{owner['kind']} {owner['name']}"
