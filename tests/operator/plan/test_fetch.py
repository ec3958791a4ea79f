"""The cache in plans: when a model is fetched, what waits for it, and what is never deleted."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from minisgl_operator.api.objects import Ref, ref_of
from minisgl_operator.api.types import InferenceModel
from minisgl_operator.facts.facts import Facts
from minisgl_operator.facts.fetch_status import RETRY_FETCH_AFTER
from minisgl_operator.facts.observed import Observed
from minisgl_operator.plan.plan import Apply, Delete, Step, plan
from minisgl_operator.render import names
from support.cluster.inference_models import DEFAULTS, HUB, inference_model, raw_model
from support.cluster.simulated_cluster import START, SimulatedCluster

OTHER = {"huggingFace": {"repo": "Qwen/Qwen3-14B"}}
THIRD = {"huggingFace": {"repo": "Qwen/Qwen3-32B"}}


def fetch_job(source: dict[str, Any] = HUB) -> Ref:
    repo = source["huggingFace"]["repo"]
    return Ref("Job", names.fetch("qwen", names.cache_key(repo, "main", "https://huggingface.co")))


def applied(steps: tuple[Step, ...]) -> set[Ref]:
    return {ref_of(step.manifest) for step in steps if isinstance(step, Apply)}


def deleted(steps: tuple[Step, ...]) -> set[Ref]:
    return {step.ref for step in steps if isinstance(step, Delete)}


def test_engines_are_created_when_the_fetch_is_complete() -> None:
    cluster = SimulatedCluster(raw_model(), DEFAULTS)
    first = applied(cluster.plan())
    assert fetch_job() in first
    assert not {ref for ref in first if ref.kind == "StatefulSet"}
    cluster.reconcile()
    assert Ref("StatefulSet", "qwen-r0") not in cluster.objects
    cluster.run_controllers()
    cluster.look()
    assert Ref("StatefulSet", "qwen-r0") in applied(cluster.plan())


def test_engines_are_created_at_once_on_a_claim_that_was_filled_beforehand() -> None:
    cache = {"cache": {"claimName": "filled", "accessMode": "ReadOnlyMany"}}
    cluster = SimulatedCluster(raw_model({"model": cache, "replicas": 2}), DEFAULTS)
    cluster.settle()
    assert sorted(cluster.serving()) == ["qwen-r0", "qwen-r1"]
    assert not {ref for ref in cluster.objects if ref.kind in ("Job", "PersistentVolumeClaim")}


def test_a_new_source_is_fetched_while_the_old_one_serves() -> None:
    cluster = SimulatedCluster(raw_model({"replicas": 2}), DEFAULTS)
    cluster.settle()
    before = set(cluster.pods)
    cluster.edit({"model": {"source": OTHER}})
    steps = cluster.plan()
    assert deleted(steps) == {fetch_job()}
    assert not {ref for ref in applied(steps) if ref.kind == "StatefulSet"}
    cluster.reconcile()
    steps = cluster.plan()
    assert fetch_job(OTHER) in applied(steps)
    assert not {ref for ref in applied(steps) if ref.kind == "StatefulSet"}
    cluster.reconcile()
    assert set(cluster.pods) == before
    cluster.settle()
    assert len(cluster.serving()) == 2


def test_a_manually_deleted_fetch_job_does_not_stop_replicas() -> None:
    cluster = SimulatedCluster(raw_model(), DEFAULTS)
    cluster.settle()
    cluster.remove(fetch_job())
    steps = cluster.plan()
    assert {fetch_job(), Ref("StatefulSet", "qwen-r0")} <= applied(steps)
    assert not deleted(steps)


def test_a_recreated_pvc_is_filled_again_before_engines_are_created() -> None:
    cluster = SimulatedCluster(raw_model(), DEFAULTS)
    cluster.settle()
    cluster.now += timedelta(minutes=1)
    cluster.remove(Ref("PersistentVolumeClaim", "qwen-cache"))
    cluster.reconcile()
    steps = cluster.plan()
    assert deleted(steps) == {fetch_job()}
    assert Ref("StatefulSet", "qwen-r0") not in applied(steps)
    cluster.settle()
    assert list(cluster.serving()) == ["qwen-r0"]


def with_job(observed: Observed, status: dict[str, Any], spec: dict[str, Any] | None = None) -> Observed:
    """The observed state with the fetch Job of a model with `spec`, in this status."""
    cluster = SimulatedCluster(raw_model(spec), DEFAULTS)
    cluster.reconcile()
    job = cluster.objects[fetch_job()] | {"status": status}
    return replace(observed, children={fetch_job(): job})


def failed(ago: timedelta) -> dict[str, Any]:
    then = (START - ago).isoformat()
    return {"conditions": [{"type": "Failed", "status": "True", "lastTransitionTime": then}]}


def test_a_failed_fetch_is_retried_after_a_delay() -> None:
    model, observed = inference_model(), Observed(raw_model())
    fresh = with_job(observed, failed(RETRY_FETCH_AFTER - timedelta(seconds=1)))
    assert not deleted(plan(Facts(model, fresh, DEFAULTS, START)))
    old = with_job(observed, failed(RETRY_FETCH_AFTER))
    assert deleted(plan(Facts(model, old, DEFAULTS, START))) == {fetch_job()}


def test_a_changed_fetch_replaces_an_unfinished_one() -> None:
    """A Job is immutable: one without the token is replaced by one with it; a complete one is kept."""
    source = {"huggingFace": HUB["huggingFace"] | {"tokenSecretRef": {"name": "hub"}}}
    model = inference_model(source=source)
    for status, gone in (({}, True), (failed(timedelta(0)), True), (_done(), False)):
        steps = plan(Facts(model, with_job(Observed(raw_model()), status), DEFAULTS, START))
        assert (fetch_job() in deleted(steps)) is gone
        assert fetch_job() not in applied(steps)


def fetch_arguments(steps: tuple[Step, ...], source: dict[str, Any]) -> list[str]:
    """Arguments of the fetch Job that is created."""
    (job,) = [step.manifest for step in steps if isinstance(step, Apply) and step.ref == fetch_job(source)]
    return list(job["spec"]["template"]["spec"]["containers"][0]["args"])


def removable(arguments: list[str]) -> tuple[str, list[str]]:
    """What the fetch pod may remove, and the directories that it must keep."""
    if "--prune" not in arguments:
        return "", []
    kept = arguments[arguments.index("--keep") + 1 :] if "--keep" in arguments else []
    return arguments[arguments.index("--prune") + 1], kept


def key_of(source: dict[str, Any]) -> str:
    return names.cache_key(source["huggingFace"]["repo"], "main", "https://huggingface.co")


def test_a_fetch_keeps_the_directories_that_replicas_use() -> None:
    cluster = SimulatedCluster(raw_model({"replicas": 2}), DEFAULTS)
    cluster.settle()
    cluster.edit({"model": {"source": OTHER}})
    cluster.reconcile()
    arguments = fetch_arguments(cluster.plan(), OTHER)
    assert arguments[arguments.index("--owner") + 1] == "qwen"
    assert removable(arguments) == ("unused", [key_of(HUB)])


def test_the_directories_of_a_rollout_that_stopped_are_kept() -> None:
    """One replica has the revision that does not start, the other one serves with the previous one."""
    in_place = {"strategy": "Recreate", "autoRollback": False}
    cluster = SimulatedCluster(raw_model({"replicas": 2, "rollout": in_place}), DEFAULTS)
    cluster.settle()
    cluster.broken.add("broken:1")
    cluster.edit({"model": {"source": OTHER}, "engine": {"image": "broken:1"}})
    cluster.settle()
    assert len(cluster.serving()) == 1
    cluster.edit({"model": {"source": THIRD}})
    cluster.reconcile()
    assert removable(fetch_arguments(cluster.plan(), THIRD)) == ("unused", sorted([key_of(HUB), key_of(OTHER)]))


def test_a_recorded_revision_that_no_rollback_needs_is_removed() -> None:
    cluster = SimulatedCluster(raw_model(), DEFAULTS)
    cluster.settle()
    cluster.edit({"model": {"source": OTHER}})
    cluster.settle()
    assert len([ref for ref in cluster.objects if ref.kind == "ControllerRevision"]) == 2
    cluster.edit({"model": {"source": THIRD}})
    cluster.reconcile()
    assert removable(fetch_arguments(cluster.plan(), THIRD)) == ("unused", [key_of(OTHER)])


def test_nothing_but_partial_downloads_is_removed_while_no_replica_serves() -> None:
    """The revision that served last may be one that no template names any more, and a rollback needs it."""
    cluster = SimulatedCluster(raw_model({"rollout": {"strategy": "Recreate", "autoRollback": False}}), DEFAULTS)
    cluster.settle()
    cluster.broken.add("broken:1")
    cluster.edit({"model": {"source": OTHER}, "engine": {"image": "broken:1"}})
    cluster.settle()
    assert not cluster.serving()
    cluster.edit({"model": {"source": THIRD}})
    cluster.reconcile()
    assert removable(fetch_arguments(cluster.plan(), THIRD)) == ("partial", sorted([key_of(HUB), key_of(OTHER)]))
    assert removable(fetch_arguments(SimulatedCluster(raw_model(), DEFAULTS).plan(), HUB)) == ("partial", [])


@pytest.mark.parametrize(
    ("read", "prune", "kept"),
    [({"another"}, "unused", ["another"]), ({"--all"}, "unused", []), ({"", "another"}, "partial", ["another"])],
    ids=["a directory", "no directory of a fetch", "the whole claim"],
)
def test_what_other_models_read_from_the_cache_is_kept(read: set[str], prune: str, kept: list[str]) -> None:
    cluster = SimulatedCluster(raw_model(), DEFAULTS)
    cluster.settle()
    cluster.edit({"model": {"source": OTHER}})
    cluster.reconcile()
    observed = replace(cluster.observed(), read_by_others=frozenset(read))
    steps = plan(Facts(cluster.model, observed, DEFAULTS, cluster.now))
    assert removable(fetch_arguments(steps, OTHER)) == (prune, sorted([key_of(HUB), *kept]))


@pytest.mark.parametrize("cache", [{"claimName": "theirs"}, {"retain": True}], ids=str)
def test_nothing_is_removed_from_a_claim_that_outlives_the_model(cache: dict[str, Any]) -> None:
    cluster = SimulatedCluster(raw_model({"model": {"cache": cache}}), DEFAULTS)
    cluster.settle()
    cluster.edit({"model": {"source": OTHER, "cache": cache}})
    cluster.reconcile()
    assert removable(fetch_arguments(cluster.plan(), OTHER)) == ("", [])


def test_an_existing_fetch_stays_as_it_is_when_the_directories_in_use_change() -> None:
    cluster = SimulatedCluster(raw_model(), DEFAULTS)
    cluster.settle()
    cluster.edit({"model": {"source": OTHER}})
    cluster.reconcile()
    cluster.reconcile()
    (made,) = [body for ref, body in cluster.objects.items() if ref == fetch_job(OTHER)]
    cluster.edit({"replicas": 3})
    cluster.pods.clear()
    cluster.look()
    steps = cluster.plan()
    assert fetch_job(OTHER) not in applied(steps) | deleted(steps)
    assert "unused" in made["spec"]["template"]["spec"]["containers"][0]["args"]


def without_room() -> SimulatedCluster:
    """A claim for two checkpoints is full: a new revision serves, and a pod of the previous one does not end. The fetch
    of a third one has failed."""
    cluster = SimulatedCluster(raw_model(), DEFAULTS)
    cluster.room = 2
    cluster.settle()
    cluster.hanging = {pod["metadata"]["uid"] for pod in cluster.pods.values()}
    cluster.edit({"model": {"source": OTHER}})
    cluster.settle()
    assert list(cluster.serving().values()) == [cluster.facts().revision]
    cluster.edit({"model": {"source": THIRD}})
    cluster.settle()
    fetch = cluster.facts().fetch
    assert fetch is not None and fetch.needed_bytes
    return cluster


def uid_of(cluster: SimulatedCluster, ref: Ref) -> str:
    return str(cluster.objects[ref]["metadata"]["uid"])


def end_drained_pods(cluster: SimulatedCluster) -> None:
    cluster.hanging.clear()
    cluster.run_kubelets()
    cluster.look()


def test_a_fetch_without_room_starts_again_when_a_directory_that_it_keeps_is_no_longer_used() -> None:
    cluster = without_room()
    first = cluster.objects[fetch_job(THIRD)]
    arguments = first["spec"]["template"]["spec"]["containers"][0]["args"]
    assert removable(arguments) == ("unused", sorted([key_of(HUB), key_of(OTHER)]))
    assert fetch_job(THIRD) not in deleted(cluster.plan())
    end_drained_pods(cluster)
    (step,) = [step for step in cluster.plan() if isinstance(step, Delete) and step.ref == fetch_job(THIRD)]
    assert (step.uid, step.propagation) == (first["metadata"]["uid"], "Foreground")
    assert fetch_job(THIRD) not in applied(cluster.plan()), "created before the pods of the previous one have ended"
    cluster.reconcile()
    assert removable(fetch_arguments(cluster.plan(), THIRD)) == ("unused", [key_of(OTHER)])
    cluster.settle()
    assert cluster.checkpoints == [key_of(OTHER), key_of(THIRD)]
    assert list(cluster.serving().values()) == [cluster.facts().revision]


def test_a_fetch_is_replaced_once_when_the_room_of_an_unused_directory_is_not_enough() -> None:
    cluster = without_room()
    cluster.room = 1
    first = uid_of(cluster, fetch_job(THIRD))
    end_drained_pods(cluster)
    cluster.settle()
    second = uid_of(cluster, fetch_job(THIRD))
    assert second != first
    cluster.settle()
    assert uid_of(cluster, fetch_job(THIRD)) == second
    cluster.room = 2
    cluster.settle()
    assert cluster.checkpoints == [key_of(OTHER), key_of(THIRD)]


def test_a_fetch_that_has_room_is_not_replaced_when_a_directory_is_no_longer_used() -> None:
    cluster = without_room()
    cluster.objects[fetch_job(THIRD)]["status"] = {"active": 1}
    end_drained_pods(cluster)
    assert fetch_job(THIRD) not in deleted(cluster.plan()) | applied(cluster.plan())


def test_a_fetch_that_must_keep_all_checkpoints_starts_again_when_a_replica_serves() -> None:
    cluster = without_room()
    for pod in cluster.pods.values():
        pod["status"]["conditions"] = [{"type": "Ready", "status": "False"}]
    cluster.remove(fetch_job(THIRD))
    for _ in range(2):
        cluster.reconcile()
        cluster.run_controllers()
        cluster.look()
    arguments = cluster.objects[fetch_job(THIRD)]["spec"]["template"]["spec"]["containers"][0]["args"]
    assert removable(arguments) == ("partial", sorted([key_of(HUB), key_of(OTHER)]))
    assert fetch_job(THIRD) not in deleted(cluster.plan())
    end_drained_pods(cluster)
    assert fetch_job(THIRD) in deleted(cluster.plan())
    cluster.settle()
    assert cluster.checkpoints == [key_of(OTHER), key_of(THIRD)]


@pytest.mark.parametrize("annotations", [{}, {names.PRUNING_ANNOTATION: '["unused"]'}], ids=["removed", "edited"])
def test_a_fetch_whose_arguments_are_not_known_is_left_alone(annotations: dict[str, str]) -> None:
    cluster = without_room()
    cluster.objects[fetch_job(THIRD)]["metadata"]["annotations"] = annotations
    end_drained_pods(cluster)
    assert fetch_job(THIRD) not in deleted(cluster.plan()) | applied(cluster.plan())


def test_a_fetch_is_not_replaced_to_remove_nothing() -> None:
    """The claim is retained from now on."""
    cluster = without_room()
    cluster.edit({"model": {"source": THIRD, "cache": {"retain": True}}})
    end_drained_pods(cluster)
    assert fetch_job(THIRD) not in deleted(cluster.plan())


@pytest.mark.parametrize("complete", [False, True])
def test_fetches_of_a_model_run_one_after_the_other(complete: bool) -> None:
    """A fetch that still runs may remove what the next one finds, and a complete one vouches for its files."""
    cluster = SimulatedCluster(raw_model(), DEFAULTS)
    cluster.reconcile()
    if complete:
        cluster.run_controllers()
        cluster.look()
    cluster.edit({"model": {"source": OTHER}})
    steps = cluster.plan()
    assert fetch_job() in deleted(steps)
    assert fetch_job(OTHER) not in applied(steps)
    cluster.objects[fetch_job()]["metadata"]["deletionTimestamp"] = START.isoformat()
    assert fetch_job(OTHER) not in applied(cluster.plan())
    back = replace(cluster.observed(), model_object=raw_model())
    assert not Facts(inference_model(), back, DEFAULTS, cluster.now).cached
    del cluster.objects[fetch_job()]
    assert fetch_job(OTHER) in applied(cluster.plan())


def _done() -> dict[str, Any]:
    return {"conditions": [{"type": "Complete", "status": "True"}], "completionTime": START.isoformat()}


def test_a_plan_never_deletes_a_pvc() -> None:
    cluster = SimulatedCluster(raw_model(), DEFAULTS)
    cluster.settle()
    cluster.edit({"model": {"source": {"pvc": {"claimName": "models"}}}})
    cluster.settle()
    assert Ref("PersistentVolumeClaim", "qwen-cache") in cluster.objects
    assert not [ref for ref in cluster.objects if ref.kind == "Job"]


def test_a_retained_pvc_has_no_owner_and_is_reused() -> None:
    cluster = SimulatedCluster(raw_model({"model": {"cache": {"retain": True}}}), DEFAULTS)
    cluster.settle()
    claim = cluster.objects[Ref("PersistentVolumeClaim", "qwen-cache")]
    assert "ownerReferences" not in claim["metadata"]
    again = raw_model({"model": {"cache": {"retain": True}}}, uid="00000000-0000-4000-8000-000000000002")
    observed = Observed(again, children={Ref("PersistentVolumeClaim", "qwen-cache"): claim})
    steps = plan(Facts(inference_model({"model": {"cache": {"retain": True}}}), observed, DEFAULTS, START))
    assert Ref("PersistentVolumeClaim", "qwen-cache") in applied(steps)


def test_a_pvc_is_expanded_with_the_spec_and_never_applied_smaller() -> None:
    cluster = SimulatedCluster(raw_model({"model": {"cache": {"size": "1Gi"}}}), DEFAULTS)
    cluster.settle()
    live = cluster.objects[Ref("PersistentVolumeClaim", "qwen-cache")]
    live["status"] = {"phase": "Bound"}
    cluster.look()

    def size(spec: str) -> str:
        cluster.edit({"model": {"source": HUB, "cache": {"size": spec}}})
        (claim,) = (
            step.manifest for step in cluster.plan() if isinstance(step, Apply) and ref_of(step.manifest) == ref
        )
        return str(claim["spec"]["resources"]["requests"]["storage"])

    ref = Ref("PersistentVolumeClaim", "qwen-cache")
    assert size("2Gi") == "2Gi"
    live["spec"]["resources"]["requests"]["storage"] = "3Gi"
    assert size("2Gi") == "3Gi"


def test_a_fetch_pod_on_a_lost_node_is_not_deleted_by_force() -> None:
    """It writes to the PVC, and a second writer could leave a mixture of two models."""
    cluster = SimulatedCluster(raw_model(), DEFAULTS)
    cluster.settle()
    engine = cluster.pods["qwen-r0-0"]
    past = (cluster.now - timedelta(hours=1)).isoformat()
    pods = tuple(
        {**engine, "metadata": engine["metadata"] | {"name": part, "deletionTimestamp": past, "labels": labels}}
        for part in (names.ENGINE, names.FRONTEND, names.FETCH)
        for labels in (names.labels("qwen", part),)
    )
    observed = replace(cluster.observed(), pods=pods, nodes={})
    steps = plan(Facts(cluster.model, observed, DEFAULTS, cluster.now))
    assert [step.ref.name for step in steps if isinstance(step, Delete) and step.lost_node] == ["engine", "frontend"]


def test_a_pvc_named_in_the_spec_is_used_and_not_created() -> None:
    model = inference_model({"model": {"cache": {"claimName": "theirs"}}})
    observed = with_job(Observed(raw_model()), _done(), {"model": {"cache": {"claimName": "theirs"}}})
    steps = plan(Facts(model, observed, DEFAULTS, START))
    assert not [ref for ref in applied(steps) if ref.kind == "PersistentVolumeClaim"]
    assert Ref("StatefulSet", "qwen-r0") in applied(steps)


def test_the_plan_of_a_deleted_model_is_empty() -> None:
    raw = raw_model()
    raw["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert plan(Facts(InferenceModel.parse(raw), Observed(raw), DEFAULTS, START)) == ()


def test_a_child_is_applied_again_only_after_its_deletion_is_complete() -> None:
    cluster = SimulatedCluster(raw_model(), DEFAULTS)
    cluster.reconcile()
    service = cluster.objects[Ref("Service", "qwen")]
    service["metadata"]["deletionTimestamp"] = START.isoformat()
    steps = cluster.plan()
    assert Ref("Service", "qwen") not in applied(steps) | deleted(steps)


@pytest.mark.parametrize(
    "ref", [Ref("PersistentVolumeClaim", "qwen-cache"), Ref("ServiceAccount", "qwen-engine")], ids=str
)
def test_no_pod_uses_objects_of_another_owner(ref: Ref) -> None:
    cluster = SimulatedCluster(raw_model(), DEFAULTS)
    cluster.put_conflicting(ref)
    kinds = {each.kind for each in applied(cluster.plan())}
    assert "Service" in kinds
    assert not kinds & {"Job", "Deployment", "StatefulSet"}
    cluster.remove(ref)
    cluster.settle()
    assert list(cluster.serving()) == ["qwen-r0"]


def test_children_of_a_deleted_model_with_the_same_name_are_not_adopted() -> None:
    cluster = SimulatedCluster(raw_model(), DEFAULTS)
    cluster.settle()
    again = raw_model(uid="00000000-0000-4000-8000-000000000002")
    observed = Observed(again, children=cluster.observed().children, pods=cluster.observed().pods)
    steps = plan(Facts(inference_model(uid="00000000-0000-4000-8000-000000000002"), observed, DEFAULTS, START))
    assert not deleted(steps)
    assert not applied(steps) & set(observed.children)
