"""Upgrades in waves on a real API server with simulated pods."""

from __future__ import annotations

from minisgl_operator.api.defaults import ModelDefaults
from minisgl_operator.api.objects import Manifest
from support.cluster.control_plane import LocalControlPlane
from support.cluster.fleet import WAVES
from support.cluster.operated_cluster import OperatedCluster, pvc_model

MODELS = ("canary", "other")
IN_WAVES = ModelDefaults.model_validate({"rollout": {"waves": WAVES}})


def labelled(name: str) -> Manifest:
    model = pvc_model(name)
    return {**model, "metadata": {**model["metadata"], "labels": {"stage": name}}}


def images(cluster: OperatedCluster, name: str) -> set[str]:
    """Images of the model's templates."""
    children = [body for (kind, _), body in cluster.children(name).items() if kind in ("Deployment", "StatefulSet")]
    return {body["spec"]["template"]["spec"]["containers"][0]["image"] for body in children}


def versions(cluster: OperatedCluster) -> list[str]:
    """Resource versions of the models and their children."""
    models = [cluster.get("InferenceModel", name) or {} for name in MODELS]
    children = [body for name in MODELS for body in cluster.children(name).values()]
    return [body["metadata"]["resourceVersion"] for body in [*models, *children]]


def test_a_new_operator_upgrades_the_canary_before_the_other_model(control_plane: LocalControlPlane) -> None:
    new = {"example.com/engine:2", "example.com/frontend:2"}
    with OperatedCluster(control_plane) as cluster:
        with cluster.operator():
            for name in MODELS:
                cluster.apply(labelled(name))
            cluster.until(lambda: all(map(cluster.ready, MODELS)), "both models")
        old = images(cluster, "other")
        cluster.hold = lambda pod: pod.startswith("canary-r")
        with cluster.operator(version=2, models=IN_WAVES) as operator:
            cluster.until(lambda: new <= images(cluster, "canary"), "the engines of the canary")
            waiting = cluster.until(lambda: _upgrade_waiting(cluster, "other"), "the condition of the other model")
            assert "wave others begins when all models of wave canary serve" in waiting["message"]
            cluster.until_quiet(operator)
            assert images(cluster, "other") == old
            assert cluster.status("canary")["rollout"]["upgrade"]["state"] == "Upgrading"
        # It goes on where the last operator stopped.
        with cluster.operator(version=2, models=IN_WAVES) as operator:
            cluster.until_quiet(operator)
            assert images(cluster, "other") == old
            cluster.hold = lambda pod: False
            cluster.until(lambda: all(images(cluster, name) == new for name in MODELS), "the new version everywhere")
            cluster.until(lambda: all(map(cluster.ready, MODELS)), "both models")
            cluster.until_quiet(operator)
            states = [cluster.status(name)["rollout"]["upgrade"]["state"] for name in MODELS]
            assert states == ["Upgraded", "Upgraded"]
            before = versions(cluster)
        with cluster.operator(version=2, models=IN_WAVES) as operator:
            cluster.until_quiet(operator)
            assert versions(cluster) == before, "a restart after the upgrade changes nothing"


def _upgrade_waiting(cluster: OperatedCluster, name: str) -> Manifest:
    found = cluster.condition(name, "Progressing")
    return found if found.get("reason") == "UpgradeWaiting" else {}
