from __future__ import annotations

from dataclasses import replace
from typing import Any

from minisgl_operator.api.defaults import ModelDefaults
from minisgl_operator.api.types import InferenceModel
from minisgl_operator.render import storage
from minisgl_operator.render.pruning import Pruning, pruning_of, with_pruning
from minisgl_operator.shell.resources import MODEL, of_kind
from minisgl_operator.shell.store import Id, ModelKey, Store, model_of, object_id, spec_hash
from support.cluster.inference_models import DEFAULTS, HUB, raw_model

KEY = ModelKey("ns", "m")


def body(kind: str = "Service", name: str = "m", version: int = 1, uid: str = "u1", **more: Any) -> dict[str, Any]:
    owner = {
        "apiVersion": "serving.minisgl.io/v1alpha1",
        "kind": "InferenceModel",
        "name": "m",
        "uid": "model-uid",
        "controller": True,
    }
    return {
        "apiVersion": of_kind(kind).api_version,
        "kind": kind,
        "metadata": {
            "name": name,
            "namespace": "ns",
            "uid": uid,
            "resourceVersion": str(version),
            "ownerReferences": [owner],
        },
        **more,
    }


def model(version: int = 1, uid: str = "model-uid") -> dict[str, Any]:
    return {
        "apiVersion": "serving.minisgl.io/v1alpha1",
        "kind": "InferenceModel",
        "metadata": {"name": "m", "namespace": "ns", "uid": uid, "resourceVersion": str(version), "managedFields": [1]},
        "spec": {"replicas": 1},
    }


def test_an_older_event_does_not_replace_a_newer_object() -> None:
    store = Store()
    assert store.put(body(version=7)) == KEY
    assert store.put(body(version=7)) is None
    assert store.put(body(version=6)) is None
    assert store.remove(body(version=6)) is None
    assert store.put(body(version=8)) == KEY
    assert store.remove(body(version=9)) == KEY
    assert store.of_model(KEY) == []


def test_deleting_an_old_object_does_not_remove_the_new_one_of_its_name() -> None:
    store = Store()
    store.put(body(version=9, uid="new"))
    assert store.remove(body(version=8, uid="old")) is None
    assert store.get("Service", "ns", "m") is not None
    store.put(model(version=5, uid="new"))
    store.remove(model(version=4, uid="old"))
    assert store.model(KEY) is not None


def test_a_list_removes_missing_objects_except_newer_ones() -> None:
    store = Store()
    store.put(body(name="old", version=3, uid="a"))
    store.put(body(name="kept", version=4, uid="b"))
    store.put(body(name="just-made", version=12, uid="c"))
    store.put(body("ServiceAccount", "other-kind", 3, "d"))
    store.sweep(of_kind("Service"), {Id("Service", "ns", "kept")}, None, "10")
    assert {one.body["metadata"]["name"] for one in store.of_model(KEY)} == {"kept", "just-made", "other-kind"}
    store.sweep(of_kind("Service"), set(), "another-namespace", "99")
    assert len(store.of_model(KEY)) == 3


def test_a_list_removes_missing_models() -> None:
    store = Store()
    store.put(model(version=3))
    store.sweep(MODEL, {object_id(model())}, None, "10")
    assert store.models() == [KEY]
    store.sweep(MODEL, set(), None, "10")
    assert store.models() == []


def test_models_keep_everything_but_managed_fields() -> None:
    store = Store()
    store.put(model())
    stored = store.model(KEY)
    assert stored is not None
    assert stored.body["spec"] == {"replicas": 1}
    assert "managedFields" not in stored.body["metadata"]


def test_a_status_does_not_change_the_spec_hash() -> None:
    before = body(spec={"ports": [80]}, status={"a": 1})
    assert spec_hash(before) == spec_hash(body(version=2, spec={"ports": [80]}, status={"a": 2}))
    assert spec_hash(before) != spec_hash(body(spec={"ports": [81]}))
    labelled = body(spec={"ports": [80]})
    labelled["metadata"]["labels"] = {"a": "b"}
    assert spec_hash(before) != spec_hash(labelled)
    orphan = body(spec={"ports": [80]})
    orphan["metadata"]["ownerReferences"] = []
    assert spec_hash(before) != spec_hash(orphan)


def test_annotations_of_controllers_are_not_drift_but_others_are() -> None:
    before = spec_hash(body())
    changed = body()
    changed["metadata"]["annotations"] = {"deployment.kubernetes.io/revision": "3"}
    assert spec_hash(changed) == before
    changed["metadata"]["annotations"] = {"example.com/mine": "3"}
    assert spec_hash(changed) != before


def test_only_significant_changes_of_a_pod_queue_its_model() -> None:
    store = Store()
    status: dict[str, Any] = {"phase": "Pending", "conditions": [{"type": "Ready", "status": "False"}]}
    assert store.put(body("Pod", "p", 1, spec={}, status=status)) == KEY
    heartbeat = {**status, "conditions": [{"type": "Ready", "status": "False", "lastProbeTime": "later"}]}
    assert store.put(body("Pod", "p", 2, spec={}, status=heartbeat)) is None
    assert store.put(body("Pod", "p", 3, spec={}, status={**status, "phase": "Running"})) == KEY
    (kept,) = store.pods()
    assert kept[0] == KEY and kept[1]["status"]["phase"] == "Running"


def test_the_owner_of_an_object() -> None:
    assert model_of(body()) == KEY
    free = body()
    del free["metadata"]["ownerReferences"]
    assert model_of(free) is None
    free["metadata"]["labels"] = {"serving.minisgl.io/model": "m"}
    assert model_of(free) == KEY
    store = Store()
    del free["metadata"]["labels"]
    assert store.put(free) is None
    assert store.put(free, KEY) == KEY
    assert [one.owner for one in store.of_model(KEY)] == [KEY]


def test_directories_of_a_claim_that_models_read_are_known_until_the_models_change() -> None:
    def reader(name: str, version: int, **source: Any) -> dict[str, Any]:
        metadata = {"name": name, "namespace": "ns", "uid": name, "resourceVersion": str(version)}
        return model() | {"metadata": metadata, "spec": {"model": {"source": source}}}

    store = Store()
    store.put(reader("a", 1, pvc={"claimName": "m-cache", "path": "one/model"}))
    store.put(reader("b", 2, pvc={"claimName": "m-cache"}))
    store.put(reader("c", 3, pvc={"claimName": "other", "path": "two"}))
    assert store.directories_read("ns", "m-cache") == {"one", ""}
    assert store.directories_read("elsewhere", "m-cache") == frozenset()
    store.put(reader("a", 4, huggingFace={"repo": "a/b"}))
    store.remove(reader("b", 5))
    assert store.directories_read("ns", "m-cache") == frozenset()


def test_after_a_restore_of_the_database_lower_versions_are_accepted() -> None:
    store = Store()
    services, pods = of_kind("Service"), of_kind("Pod")
    store.put(body(version=900))
    assert (store.newest(services), store.newest(pods)) == (900, 0)
    assert store.put(body(version=50)) is None
    store.forget_versions(services)
    assert store.put(body(version=50)) == KEY
    assert store.put(body(version=49)) is None
    assert store.remove(body(version=51)) == KEY


def test_objects_that_a_restored_database_does_not_have_are_removed_by_a_list() -> None:
    store = Store()
    services = of_kind("Service")
    store.put(body(version=900))
    store.sweep(services, set(), "ns", "50")
    assert store.of_model(KEY)
    store.forget_versions(services)
    store.sweep(services, set(), "ns", "50")
    assert store.of_model(KEY) == []


def test_the_class_of_a_claim_is_known_when_a_new_default_is_rendered() -> None:
    """The class is immutable, so an apply must repeat that of the live claim, which the store has."""
    live = {"resources": {"requests": {"storage": "100Gi"}}, "storageClassName": "slow", "accessModes": ["X"]}
    store = Store()
    store.put(body("PersistentVolumeClaim", "m-cache", spec=live))
    stored = store.get("PersistentVolumeClaim", "ns", "m-cache")
    assert stored is not None
    model = InferenceModel.parse(raw_model({}, source=HUB))
    wanted = storage.claim(model, replace(DEFAULTS, models=ModelDefaults(storage_class_name="fast")))
    assert storage.adjusted(model, wanted, stored.body)["spec"]["storageClassName"] == "slow"


def test_what_a_fetch_may_remove_is_known_without_its_arguments() -> None:
    model = InferenceModel.parse(raw_model({}, source=HUB))
    allowed = Pruning("unused", ("another", "one"))
    job = with_pruning(storage.fetch_job(model, DEFAULTS), allowed)
    job["metadata"] |= {"uid": "u1", "resourceVersion": "1"}
    store = Store()
    store.put(job)
    stored = store.get("Job", job["metadata"]["namespace"], job["metadata"]["name"])
    assert stored is not None and "spec" not in stored.body
    assert pruning_of(stored.body) == allowed
    job["metadata"] |= {"resourceVersion": "2", "annotations": {"example.com/mine": "3"}}
    store.put(job)
    stored = store.get("Job", job["metadata"]["namespace"], job["metadata"]["name"])
    assert stored is not None and pruning_of(stored.body) is None
