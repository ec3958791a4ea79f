"""Models, their children and pods, from the watches and from responses to our own writes.

Only the fields that the operator reads are kept: a thousand models have twelve thousand children. An object whose
version is not newer than the stored one is dropped, so that an event from before our own write cannot undo it here. A
list that is older than an object known before the list was requested shows that the API server's database was
restored; the stored versions then mean nothing any more.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import msgspec

from minisgl_operator.api.objects import Manifest, controller_of
from minisgl_operator.facts.route import group_of
from minisgl_operator.facts.wanted import owners_of_count
from minisgl_operator.render.names import (
    CACHE_KEY_ANNOTATION,
    MODEL_LABEL,
    PAUSE_ANNOTATIONS,
    PEERS_VOLUME,
    PRUNING_ANNOTATION,
)
from minisgl_operator.shell.resources import MODEL, POD, Resource, of_kind


class ModelKey(NamedTuple):
    """Identity of a model; like client-go's keys it does not tell what happened to the model."""

    namespace: str
    name: str


class Id(NamedTuple):
    """Identity of an object."""

    kind: str
    namespace: str
    name: str


@dataclass(frozen=True)
class Stored:
    """An object as it was last seen, which belongs to the model `owner` or conflicts with it. `spec_hash` covers
    everything that can be applied, not the status."""

    body: Manifest
    version: int
    spec_hash: bytes
    owner: ModelKey

    @property
    def uid(self) -> str:
        return str(self.body["metadata"]["uid"])


class Store:
    """Used from one event loop; no method blocks. A model is stored as an object that belongs to itself."""

    def __init__(self) -> None:
        self._objects: dict[Id, Stored] = {}
        self._of_model: defaultdict[ModelKey, set[Id]] = defaultdict(set)
        self._conflicts: defaultdict[ModelKey, set[Id]] = defaultdict(set)
        self._reads: defaultdict[tuple[str, str], dict[Id, str]] = defaultdict(dict)

    def model(self, key: ModelKey) -> Stored | None:
        return self._objects.get(Id(MODEL.kind, *key))

    def models(self) -> list[ModelKey]:
        return [key for key in self._of_model if self.model(key) is not None]

    def get(self, kind: str, namespace: str, name: str) -> Stored | None:
        return self._objects.get(Id(kind, namespace, name))

    def of_model(self, key: ModelKey) -> list[Stored]:
        """The model's children and pods, and other owners' objects that have a child's name."""
        ids = self._conflicts.get(key, set()) | self._of_model.get(key, set())
        return [self._objects[id] for id in sorted(ids) if id.kind != MODEL.kind and id in self._objects]

    def mark_name_conflict(self, id: Id, key: ModelKey) -> None:
        """Record that another model's object has a name that this model wants."""
        self._conflicts[key].add(id)

    def directories_read(self, namespace: str, claim: str) -> frozenset[str]:
        """Directories at the top of the claim that models name in `source.pvc`; "" for the whole claim."""
        return frozenset(self._reads.get((namespace, claim), {}).values())

    def group(self, namespace: str, group: str | None) -> list[Manifest]:
        """Models with this group of routes; none without a group."""
        if group is None:
            return []
        found = (self.model(key) for key in self.models() if key.namespace == namespace)
        return [each.body for each in found if each is not None and group_of(each.body) == group]

    def pods(self) -> Iterator[tuple[ModelKey, Manifest]]:
        for key, ids in self._of_model.items():
            for id in ids:
                if id.kind == POD.kind:
                    yield key, self._objects[id].body

    def put(self, body: Manifest, key: ModelKey | None = None) -> ModelKey | None:
        """Store an object; return its model, or None for an object without one and without significant changes.

        `key` is the model that it conflicts with, for objects that name no model themselves.
        """
        id, version = object_id(body), _version(body)
        owner = model_of(body) or key
        known = self._objects.get(id)
        if owner is None or (known is not None and version <= known.version):
            return None
        kept = trim(body)
        if known is not None:
            self._forget(id)
        self._objects[id] = Stored(kept, version, spec_hash(body), owner)
        self._of_model[owner].add(id)
        if id.kind == MODEL.kind and (read := _directory_read(body)) is not None:
            claim, directory = read
            self._reads[id.namespace, claim][id] = directory
        if known is not None and id.kind == POD.kind and _significant(kept) == _significant(known.body):
            return None
        return owner

    def remove(self, body: Manifest) -> ModelKey | None:
        """Drop a deleted object; return its model."""
        id = object_id(body)
        known = self._objects.get(id)
        current = known is not None and known.uid == body["metadata"]["uid"]
        if id.kind == MODEL.kind:
            key = ModelKey(id.namespace, id.name)
            if current:
                self._forget(id)
                self._conflicts.pop(key, None)
            return key
        if known is None or not current or _version(body) < known.version:
            return None
        return self._forget(id)

    def sweep(self, resource: Resource, present: set[Id], namespace: str | None, version: str) -> frozenset[ModelKey]:
        """Drop the objects that are missing in a list of this kind and version, of one namespace or of all.

        Return their models. Objects that are newer than the list stay: their events were faster.
        """
        gone = [
            stored.body
            for id, stored in self._objects.items()
            if id.kind == resource.kind
            and id not in present
            and namespace in (None, id.namespace)
            and stored.version <= int(version)
        ]
        return frozenset(key for body in gone if (key := self.remove(body)) is not None)

    def newest(self, resource: Resource) -> int:
        """The highest version of the stored objects of a kind; 0 without any."""
        return max((stored.version for id, stored in self._objects.items() if id.kind == resource.kind), default=0)

    def forget_versions(self, resource: Resource) -> None:
        """Accept any version of the stored objects of a kind from now on."""
        for id, stored in self._objects.items():
            if id.kind == resource.kind:
                self._objects[id] = replace(stored, version=0)

    def _forget(self, id: Id) -> ModelKey:
        stored = self._objects.pop(id)
        if id.kind == MODEL.kind and (read := _directory_read(stored.body)) is not None:
            del self._reads[id.namespace, read[0]][id]
        owner = stored.owner
        ids = self._of_model[owner]
        ids.discard(id)
        if not ids:
            del self._of_model[owner]
        return owner


def _directory_read(model: Manifest) -> tuple[str, str] | None:
    """Claim in `source.pvc` of a model, and the first directory of its path; None for another source."""
    pvc = model.get("spec", {}).get("model", {}).get("source", {}).get("pvc")
    return None if pvc is None else (str(pvc["claimName"]), str(pvc.get("path") or "").strip("/").partition("/")[0])


def model_of(body: Manifest) -> ModelKey | None:
    """The model itself; the model that controls the object; else, as for pods, the one in the object's labels."""
    metadata = body["metadata"]
    if body["kind"] == MODEL.kind:
        return ModelKey(metadata["namespace"], metadata["name"])
    owner = controller_of(body)
    if owner is not None and owner["kind"] == MODEL.kind and owner["apiVersion"].startswith(MODEL.group + "/"):
        return ModelKey(metadata["namespace"], owner["name"])
    name = metadata.get("labels", {}).get(MODEL_LABEL)
    return None if name is None else ModelKey(metadata["namespace"], name)


def spec_hash(body: Manifest) -> bytes:
    """Hash that ignores the status and the fields that servers and controllers keep for themselves."""
    metadata = body["metadata"]
    annotations = {
        name: value for name, value in metadata.get("annotations", {}).items() if "kubernetes.io/" not in name
    }
    content = {name: value for name, value in body.items() if name not in ("metadata", "status")}
    return content_hash(
        [metadata["uid"], metadata.get("labels"), annotations, metadata.get("ownerReferences"), content]
    )


def content_hash(value: object) -> bytes:
    """Equal for equal JSON values, whatever the order of their keys."""
    return hashlib.blake2b(msgspec.json.encode(value, order="deterministic"), digest_size=16).digest()


_METADATA: Final = (
    "name",
    "namespace",
    "uid",
    "resourceVersion",
    "generation",
    "creationTimestamp",
    "deletionTimestamp",
    "deletionGracePeriodSeconds",
    "finalizers",
    "labels",
    "ownerReferences",
)
_POD_STATUS: Final = (
    "phase",
    "reason",
    "message",
    "podIP",
    "conditions",
    "containerStatuses",
    "initContainerStatuses",
    "startTime",
)


def trim(body: Manifest) -> Manifest:
    """The stored part of an object: a model as a whole; of other objects identity, owner, status and sizes."""
    metadata = body["metadata"]
    if body["kind"] == MODEL.kind:
        kept = {name: value for name, value in metadata.items() if name != "managedFields"}
        return body | {"metadata": kept}
    kept_metadata = {name: metadata[name] for name in _METADATA if name in metadata}
    small: Manifest = {"apiVersion": body["apiVersion"], "kind": body["kind"], "metadata": kept_metadata}
    status = body.get("status", {})
    match body["kind"]:
        case "Pod":
            small["spec"] = {name: body["spec"].get(name) for name in ("nodeName", "schedulingGates")}
            small["spec"]["volumes"] = [
                {"name": PEERS_VOLUME} for volume in body["spec"].get("volumes") or () if volume["name"] == PEERS_VOLUME
            ]
            kept_metadata["annotations"] = _annotations(metadata, CACHE_KEY_ANNOTATION)
            small["status"] = {name: status[name] for name in _POD_STATUS if name in status}
        case "StatefulSet" | "Deployment":
            kept_metadata["annotations"] = _annotations(metadata, *PAUSE_ANNOTATIONS)
            if body["kind"] == "Deployment":
                kept_metadata["managedFields"] = owners_of_count(metadata.get("managedFields") or ())
            spec = body["spec"]
            metadata = spec["template"].get("metadata", {})
            template = {"metadata": {name: metadata[name] for name in ("labels", "annotations") if name in metadata}}
            small["spec"] = {"replicas": spec.get("replicas", 1), "template": template}
            small["status"] = status
        case "PersistentVolumeClaim":
            claimed = ("resources", "storageClassName", "volumeName")
            small["spec"] = {name: body["spec"][name] for name in claimed if name in body["spec"]}
            small["status"] = status
        case "PodDisruptionBudget" | "HTTPRoute":
            small["status"] = status
        case "Job":
            kept_metadata["annotations"] = _annotations(metadata, PRUNING_ANNOTATION)
            small["status"] = status
        case "ControllerRevision":
            # Encoded, a template takes a tenth of the memory.
            small |= {"data": msgspec.json.encode(body.get("data")), "revision": body["revision"]}
    return small


def _annotations(metadata: Manifest, *kept: str) -> dict[str, str]:
    annotations = metadata.get("annotations") or {}
    return {name: annotations[name] for name in kept if name in annotations}


def _significant(pod: Manifest) -> object:
    """The fields of a pod that can change the plan or the status; kubelets also write others, and more often."""
    status = pod["status"]
    return (
        pod["metadata"]["uid"],
        pod["metadata"].get("deletionTimestamp"),
        pod["metadata"].get("finalizers"),
        pod["metadata"].get("labels"),
        pod["spec"],
        status.get("phase"),
        status.get("reason"),
        status.get("podIP"),
        [(c["type"], c["status"], c.get("reason"), c.get("message")) for c in status.get("conditions", ())],
        [
            (c["name"], c.get("ready"), c.get("restartCount"), c.get("state"))
            for c in (*status.get("initContainerStatuses", ()), *status.get("containerStatuses", ()))
        ],
    )


def object_id(body: Manifest) -> Id:
    metadata: dict[str, Any] = body["metadata"]
    return Id(of_kind(body["kind"]).kind, metadata["namespace"], metadata["name"])


def _version(body: Manifest) -> int:
    """Versions of one kind are ordered integers: guaranteed by the API since 1.35, and by etcd before."""
    return int(body["metadata"]["resourceVersion"])
