"""Server-side apply on a real API server: requests that are sent, skipped, or left to other field managers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from minisgl_operator.api.objects import Manifest
from minisgl_operator.render import storage
from minisgl_operator.render.pruning import Pruning, pruning_of, with_pruning
from minisgl_operator.shell.apply import Applier, ConflictDetected
from minisgl_operator.shell.client import ApiError, Client, connection
from minisgl_operator.shell.metrics import Metrics
from minisgl_operator.shell.resources import of_kind
from minisgl_operator.shell.store import ModelKey, Store, trim
from support.cluster.control_plane import LocalControlPlane
from support.cluster.inference_models import DEFAULTS, inference_model

KEY = ModelKey("default", "m")
MODEL: Manifest = {"kind": "InferenceModel", "metadata": {"name": "m", "namespace": "default", "uid": "u-1"}}
SERVICE = of_kind("Service")


def service(name: str, port: int = 80, **metadata: Any) -> Manifest:
    owner = {
        # A version that no server has. With an existing one, if another test installed the CRD, the garbage collector
        # would not find the owner, and would delete the service.
        "apiVersion": "serving.minisgl.io/v0",
        "kind": "InferenceModel",
        "name": "m",
        "uid": "u-1",
        "controller": True,
        "blockOwnerDeletion": True,
    }
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name, "namespace": "default", "ownerReferences": [owner], **metadata},
        "spec": {"selector": {"app": "x"}, "ports": [{"name": "http", "port": port, "targetPort": 8000}]},
    }


@pytest.fixture
async def client(control_plane: LocalControlPlane) -> AsyncIterator[Client]:
    async with Client(await connection(control_plane.kubeconfig)) as client:
        yield client


@pytest.fixture
def applier(client: Client) -> Applier:
    return Applier(client, Store(), Metrics(), lambda key: None)


async def live(client: Client, name: str) -> Manifest:
    found = await client.get(SERVICE, "default", name)
    assert found is not None
    return found


async def test_an_unchanged_child_is_not_applied_again(client: Client, applier: Applier) -> None:
    assert await applier.apply(KEY, service("once"), MODEL)
    version = (await live(client, "once"))["metadata"]["resourceVersion"]
    assert not await applier.apply(KEY, service("once"), MODEL)
    assert await applier.apply(KEY, service("once", 81), MODEL)
    changed = await live(client, "once")
    assert [port["port"] for port in changed["spec"]["ports"]] == [81]
    assert changed["metadata"]["resourceVersion"] != version


async def test_a_new_process_applies_once_and_the_server_changes_nothing(client: Client, applier: Applier) -> None:
    await applier.apply(KEY, service("again"), MODEL)
    version = (await live(client, "again"))["metadata"]["resourceVersion"]
    store = Store()
    store.put(await live(client, "again"))
    fresh = Applier(client, store, Metrics(), lambda key: None)
    assert await fresh.apply(KEY, service("again"), MODEL)
    assert (await live(client, "again"))["metadata"]["resourceVersion"] == version


async def test_an_object_of_the_same_name_without_owner_is_not_changed(client: Client, applier: Applier) -> None:
    mine = service("foreign")
    del mine["metadata"]["ownerReferences"]
    made = await client.create(SERVICE, "default", mine)
    for _ in range(2):
        with pytest.raises(ConflictDetected):
            await applier.apply(KEY, service("foreign", 81), MODEL)
    assert (await live(client, "foreign"))["metadata"]["resourceVersion"] == made["metadata"]["resourceVersion"]


async def test_a_child_without_owner_reference_is_owned_by_its_label(client: Client, applier: Applier) -> None:
    orphan = service("orphan", labels={"serving.minisgl.io/model": "m"})
    del orphan["metadata"]["ownerReferences"]
    await client.create(SERVICE, "default", orphan)
    # The object was unknown: the plan must see it first.
    with pytest.raises(ConflictDetected):
        await applier.apply(KEY, service("orphan"), MODEL)
    assert await applier.apply(KEY, service("orphan"), MODEL)
    assert (await live(client, "orphan"))["metadata"]["ownerReferences"][0]["uid"] == "u-1"


async def test_an_item_that_makes_a_list_invalid_is_removed_without_a_second_field_owner(client: Client) -> None:
    store = Store()
    applier = Applier(client, store, Metrics(), lambda key: None)
    await applier.apply(KEY, service("ports"), MODEL)
    # Another manager replaces the port; an apply alone would leave two ports with one name.
    other = {"spec": {"ports": [{"name": "http", "port": 99, "targetPort": 1}]}}
    edited = await client.merge(SERVICE, "default", "ports", other, "somebody")
    store.put(edited)
    assert await applier.apply(KEY, service("ports"), MODEL)
    repaired = await live(client, "ports")
    assert [port["port"] for port in repaired["spec"]["ports"]] == [80]
    assert "minisgl-operator-repair" not in {one["manager"] for one in repaired["metadata"]["managedFields"]}
    # A port that is no longer wanted is removed, as no other manager owns it.
    assert await applier.apply(KEY, service("ports", 82), MODEL)
    assert [port["port"] for port in (await live(client, "ports"))["spec"]["ports"]] == [82]


async def test_a_field_unknown_to_the_server_is_an_error(client: Client, applier: Applier) -> None:
    body = service("typo")
    body["spec"]["prots"] = []
    with pytest.raises(ApiError) as refused:
        await applier.apply(KEY, body, MODEL)
    assert refused.value.status in (400, 422, 500) and "prots" in refused.value.message


async def test_what_a_fetch_job_may_remove_never_differs_from_its_arguments(client: Client, applier: Applier) -> None:
    """Two operators may create it at the same time. The second apply is rejected as a whole, as arguments of a Job are
    immutable."""
    rendered = storage.fetch_job(inference_model(), DEFAULTS)
    rendered["metadata"] |= {"namespace": "default", "ownerReferences": service("x")["metadata"]["ownerReferences"]}
    before, after = (with_pruning(rendered, Pruning("unused", keep)) for keep in (("a", "b"), ("b",)))
    assert before["metadata"]["labels"] == after["metadata"]["labels"], "it would be replaced"
    await applier.apply(KEY, before, MODEL)
    with pytest.raises(ApiError, match="immutable"):
        await applier.apply(KEY, after, MODEL)
    live = await client.get(of_kind("Job"), "default", before["metadata"]["name"])
    assert live is not None
    assert live["spec"]["template"]["spec"]["containers"][0]["args"][-2:] == ["a", "b"]
    assert pruning_of(live) == pruning_of(trim(live)) == Pruning("unused", ("a", "b"))


async def test_a_delete_requires_the_same_uid(client: Client) -> None:
    made = await client.apply(SERVICE, service("victim"))
    assert await client.delete(SERVICE, "default", "victim", "another-uid") is None
    assert await client.get(SERVICE, "default", "victim") is not None
    await client.delete(SERVICE, "default", "victim", made["metadata"]["uid"])
    assert await client.get(SERVICE, "default", "victim") is None
    assert await client.delete(SERVICE, "default", "victim", made["metadata"]["uid"]) is None
