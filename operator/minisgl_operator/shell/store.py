"""What the watches and our own writes have shown: models, their children and pods, by model.

Only what the core reads of an object is kept: a thousand models have twelve thousand children. What has no version
newer than the stored one is dropped, so that an event that is older than our own write cannot undo it here.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import msgspec

from minisgl_operator.render.names import MODEL_LABEL
from minisgl_operator.shell.client import Object
from minisgl_operator.shell.resources import MODEL, POD, Resource, of_kind


class ModelKey(NamedTuple):
    """Which model; as client-go's keys, it says nothing of what happened to it."""

    namespace: str
    name: str


class Id(NamedTuple):
    """Where an object is."""

    kind: str
    namespace: str
    name: str


@dataclass(frozen=True)
class Stored:
    """An object as it was last seen, of or in the way of the model `owner`. `fingerprint` is that of all that can be
    applied: an object whose status alone changed has the same one."""

    body: Object
    version: int
    fingerprint: bytes
    owner: ModelKey

    @property
    def uid(self) -> str:
        return str(self.body["metadata"]["uid"])


class Store:
    """Lives in one event loop; nothing here waits."""

    def __init__(self) -> None:
        self._objects: dict[Id, Stored] = {}
        self._of_model: defaultdict[ModelKey, set[Id]] = defaultdict(set)
        self._taken: defaultdict[ModelKey, set[Id]] = defaultdict(set)
        self._models: dict[ModelKey, Stored] = {}

    def model(self, key: ModelKey) -> Stored | None:
        return self._models.get(key)

    def models(self) -> list[ModelKey]:
        return list(self._models)

    def get(self, kind: str, namespace: str, name: str) -> Stored | None:
        """A child or a pod."""
        return self._objects.get(Id(kind, namespace, name))

    def of_model(self, key: ModelKey) -> list[Stored]:
        """Its children and pods, and objects of others that hold a child's name."""
        taken = {id for id in self._taken.get(key, ()) if id in self._objects}
        return [self._objects[id] for id in sorted(taken.union(self._of_model.get(key, ())))]

    def mark_taken(self, id: Id, key: ModelKey) -> None:
        """The model wants this name, and an object has it that is kept as another model's."""
        self._taken[key].add(id)

    def pods(self) -> Iterator[tuple[ModelKey, Object]]:
        for key, ids in self._of_model.items():
            for id in ids:
                if id.kind == POD.kind:
                    yield key, self._objects[id].body

    def put(self, body: Object, key: ModelKey | None = None) -> ModelKey | None:
        """Keep an object; return whose it is, or None when that is nobody's, or when nothing new was learnt.

        `key` names the model that it stands in the way of, for objects of others that say nothing of a model.
        """
        id, version = identify(body), _version(body)
        if id.kind == MODEL.kind:
            owner = ModelKey(id.namespace, id.name)
            known = self._models.get(owner)
            if known is not None and version <= known.version:
                return None
            self._models[owner] = Stored(trimmed(body), version, fingerprint(body), owner)
            return owner
        owner_or_none = model_of(body) or key
        known = self._objects.get(id)
        if owner_or_none is None or (known is not None and version <= known.version):
            return None
        owner = owner_or_none
        kept = trimmed(body)
        if known is not None:
            self._forget(id)
        self._objects[id] = Stored(kept, version, fingerprint(body), owner)
        self._of_model[owner].add(id)
        if known is not None and id.kind == POD.kind and _noteworthy(kept) == _noteworthy(known.body):
            return None
        return owner

    def remove(self, body: Object) -> ModelKey | None:
        """The object is gone; return whose it was."""
        id = identify(body)
        if id.kind == MODEL.kind:
            key = ModelKey(id.namespace, id.name)
            known = self._models.get(key)
            if known is not None and known.uid == body["metadata"]["uid"]:
                del self._models[key]
                self._taken.pop(key, None)
            return key
        known = self._objects.get(id)
        if known is None or known.uid != body["metadata"]["uid"] or _version(body) < known.version:
            return None
        return self._forget(id)

    def sweep(self, resource: Resource, present: set[Id], namespace: str | None, version: str) -> None:
        """Drop what a list of that kind and version, of one namespace or of all, did not show.

        What is newer than the list stays: events may have been faster.
        """
        kept: Mapping[Id, Stored] = (
            {Id(MODEL.kind, *key): stored for key, stored in self._models.items()}
            if resource == MODEL
            else self._objects
        )
        gone = [
            stored.body
            for id, stored in kept.items()
            if id.kind == resource.kind
            and id not in present
            and namespace in (None, id.namespace)
            and stored.version <= int(version)
        ]
        for body in gone:
            self.remove(body)

    def _forget(self, id: Id) -> ModelKey:
        owner = self._objects.pop(id).owner
        ids = self._of_model[owner]
        ids.discard(id)
        if not ids:
            del self._of_model[owner]
        return owner


def model_of(body: Object) -> ModelKey | None:
    """The model that controls the object; for pods, and for objects that nothing controls, the one they name."""
    metadata = body["metadata"]
    for owner in metadata.get("ownerReferences", ()):
        if (
            owner["kind"] == MODEL.kind
            and owner["apiVersion"].startswith(MODEL.group + "/")
            and owner.get("controller")
        ):
            return ModelKey(metadata["namespace"], owner["name"])
    name = metadata.get("labels", {}).get(MODEL_LABEL)
    return None if name is None else ModelKey(metadata["namespace"], name)


def fingerprint(body: Object) -> bytes:
    """Equal for objects that differ only in their status and in what servers and controllers keep for themselves."""
    metadata = body["metadata"]
    annotations = {
        name: value for name, value in metadata.get("annotations", {}).items() if "kubernetes.io/" not in name
    }
    content = {name: value for name, value in body.items() if name not in ("metadata", "status")}
    facts = [metadata["uid"], metadata.get("labels"), annotations, metadata.get("ownerReferences"), content]
    return hashlib.blake2b(msgspec.json.encode(facts, order="deterministic"), digest_size=16).digest()


_METADATA: Final = (
    "name",
    "namespace",
    "uid",
    "resourceVersion",
    "generation",
    "creationTimestamp",
    "deletionTimestamp",
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


def trimmed(body: Object) -> Object:
    """The part of an object that is kept: all of a model; of others identity, owner, status and what sizes them."""
    metadata = body["metadata"]
    if body["kind"] == MODEL.kind:
        kept = {name: value for name, value in metadata.items() if name != "managedFields"}
        return body | {"metadata": kept}
    kept_metadata = {name: metadata[name] for name in _METADATA if name in metadata}
    small: Object = {"apiVersion": body["apiVersion"], "kind": body["kind"], "metadata": kept_metadata}
    status = body.get("status", {})
    match body["kind"]:
        case "Pod":
            small["spec"] = {"nodeName": body["spec"].get("nodeName")}
            small["status"] = {name: status[name] for name in _POD_STATUS if name in status}
        case "StatefulSet" | "Deployment":
            spec = body["spec"]
            of_pods = spec["template"].get("metadata", {})
            template = {"metadata": {name: of_pods[name] for name in ("labels", "annotations") if name in of_pods}}
            small["spec"] = {"replicas": spec.get("replicas", 1), "template": template}
            small["status"] = status
        case "PersistentVolumeClaim":
            small["spec"] = {"resources": body["spec"]["resources"]}
            small["status"] = status
        case "Job":
            small["status"] = status
    return small


def _noteworthy(pod: Object) -> object:
    """A pod's changes that can change what is to be done or said; kubelets write more often than that."""
    status = pod["status"]
    return (
        pod["metadata"]["uid"],
        pod["metadata"].get("deletionTimestamp"),
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


def identify(body: Object) -> Id:
    metadata: dict[str, Any] = body["metadata"]
    return Id(of_kind(body["kind"]).kind, metadata["namespace"], metadata["name"])


def _version(body: Object) -> int:
    """Versions of one kind are ordered integers, as the API promises since 1.35 and etcd has always given."""
    return int(body["metadata"]["resourceVersion"])
