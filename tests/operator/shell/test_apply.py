"""Other changes that the response to a write shows. No event reports them, as the store has the response already."""

from __future__ import annotations

from typing import Any

import pytest

from minisgl_operator.api.objects import Manifest
from minisgl_operator.shell.apply import Applier, ConflictDetected
from minisgl_operator.shell.client import ApiError
from minisgl_operator.shell.metrics import Metrics
from minisgl_operator.shell.store import ModelKey, Store

KEY = ModelKey("team-a", "m")


def model(version: int, generation: int, **status: Any) -> Manifest:
    metadata = {"name": "m", "namespace": "team-a", "uid": "u", "resourceVersion": str(version)}
    return {
        "apiVersion": "serving.minisgl.io/v1alpha1",
        "kind": "InferenceModel",
        "metadata": metadata | {"generation": generation},
        "spec": {"replicas": generation},
        "status": status,
    }


def stateful_set(version: int, replicas: int, there: int) -> Manifest:
    owner = {
        "apiVersion": "serving.minisgl.io/v1alpha1",
        "kind": "InferenceModel",
        "name": "m",
        "uid": "u",
        "controller": True,
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": {
            "name": "m-r0",
            "namespace": "team-a",
            "uid": "s",
            "resourceVersion": str(version),
            "ownerReferences": [owner],
        },
        "spec": {"replicas": replicas, "template": {}},
        "status": {"replicas": there},
    }


class Server:
    """Replaces the client; returns this response."""

    def __init__(self, answer: Manifest) -> None:
        self.answer = answer

    async def apply(self, *_: Any) -> Manifest:
        return self.answer


@pytest.mark.parametrize("generation", [1, 2], ids=["as it was", "edited meanwhile"])
async def test_an_edit_just_before_a_status_write_is_not_lost(generation: int) -> None:
    store, woken = Store(), list[ModelKey]()
    known = model(version=1, generation=1)
    store.put(known)
    server: Any = Server(model(version=3, generation=generation, phase="Ready"))
    applier = Applier(server, store, Metrics(), woken.append)
    assert await applier.apply_status(KEY, known, {"phase": "Ready"})
    # The late event of the edit, and that of the status.
    assert store.put(model(version=2, generation=generation)) is None
    assert store.put(server.answer) is None
    assert woken == ([KEY] if generation == 2 else [])


class OldDefinition:
    """Replaces the client of a server whose definition has no `rollout` and no `dataTypes`; keeps what it accepts."""

    def __init__(self) -> None:
        self.accepted: list[Manifest] = []
        self.refused = 0

    async def apply(self, _: Any, manifest: Manifest, *__: Any) -> Manifest:
        status = manifest["status"]
        unknown = [".status.rollout"] * ("rollout" in status)
        with_types = [replica["name"] for replica in status["replicaStatuses"] if "dataTypes" in replica]
        unknown += [f'.status.replicaStatuses[name="{name}"].dataTypes' for name in with_types]
        if unknown:
            self.refused += 1
            listed = "".join(f"\n  {path}: field not declared in schema" for path in unknown)
            message = "failed to create typed patch object (team-a/m; serving.minisgl.io/v1alpha1, Kind=InferenceModel)"
            raise ApiError(500, "InternalError", f"{message}: errors:{listed}")
        self.accepted.append(status)
        return model(version=1 + len(self.accepted), generation=1, **status)


async def test_an_older_definition_gets_the_status_that_it_has_fields_for() -> None:
    store = Store()
    known = model(version=1, generation=1)
    store.put(known)
    server: Any = OldDefinition()
    applier = Applier(server, store, Metrics(), lambda _: None)
    replicas = [{"name": name, "phase": "Ready", "dataTypes": {"weights": "fp8"}} for name in ("m-r0", "m-r1")]
    status: Manifest = {"phase": "Ready", "rollout": {"waiting": True}, "replicaStatuses": replicas}
    assert await applier.apply_status(KEY, known, status)
    assert server.accepted == [
        {"phase": "Ready", "replicaStatuses": [{"name": name, "phase": "Ready"} for name in ("m-r0", "m-r1")]}
    ]
    stored = store.model(KEY)
    assert stored is not None
    assert not await applier.apply_status(KEY, stored.body, status), "it would be written for ever"
    assert server.refused == 1


async def test_other_errors_of_a_status_are_raised() -> None:
    class Failing:
        async def apply(self, *_: Any) -> Manifest:
            raise ApiError(500, "InternalError", "etcdserver: request timed out")

    store, server = Store(), Failing()
    known = model(version=1, generation=1)
    store.put(known)
    client: Any = server
    with pytest.raises(ApiError, match="timed out"):
        await Applier(client, store, Metrics(), lambda _: None).apply_status(KEY, known, {"phase": "Ready"})


@pytest.mark.parametrize("there", [2, 0], ids=["as it was", "emptied meanwhile"])
async def test_a_change_by_a_controller_just_before_an_apply_is_not_lost(there: int) -> None:
    store, woken = Store(), list[ModelKey]()
    store.put(stateful_set(version=1, replicas=2, there=2))
    server: Any = Server(stateful_set(version=3, replicas=0, there=there))
    applier = Applier(server, store, Metrics(), woken.append)
    assert await applier.apply(KEY, stateful_set(version=1, replicas=0, there=2), model(1, 1))
    assert store.put(server.answer) is None
    assert woken == ([KEY] if there == 0 else [])


async def test_a_name_taken_by_another_models_child_is_recorded() -> None:
    store = Store()
    theirs = stateful_set(version=1, replicas=1, there=1)
    theirs["metadata"]["ownerReferences"][0] |= {"name": "other", "uid": "o"}
    store.put(theirs)
    ours = model(version=2, generation=1)
    store.put(ours)
    server: Any = Server(theirs)
    with pytest.raises(ConflictDetected):
        await Applier(server, store, Metrics(), lambda key: None).apply(KEY, stateful_set(1, 2, 0), ours)
    assert [one.owner.name for one in store.of_model(KEY)] == ["other"]
    assert [one.owner.name for one in store.of_model(ModelKey("team-a", "other"))] == ["other"]
    store.remove(theirs)
    assert store.of_model(KEY) == []
