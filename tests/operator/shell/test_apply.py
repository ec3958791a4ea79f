"""Other changes that the response to a write shows. No event reports them, as the store has the response already."""

from __future__ import annotations

from typing import Any

import pytest

from minisgl_operator.api.objects import Manifest
from minisgl_operator.shell.apply import Applier, ConflictDetected
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
