"""A namespace that stays terminating, such as one with a pod that drains for long or whose node is lost."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta

from minisgl_operator.shell.resources import WATCHED
from support.cluster.control_plane import LocalControlPlane
from support.cluster.operated_cluster import OperatedCluster, RunningOperator, pvc_model

FINALIZER = "example.com/held"
# An idle operator reconciles the model once after each of these.
LISTS = 3 * len(WATCHED)
MOST_WRITES = 30
"""Maximum number of writes for one model: status updates about its pods, and one round of rejected requests."""


def test_an_operator_stops_writing_to_a_terminating_namespace(control_plane: LocalControlPlane) -> None:
    with OperatedCluster(control_plane) as cluster, cluster.operator(resync_seconds=0.5) as operator:
        cluster.apply(pvc_model("held"))
        cluster.until(lambda: cluster.ready("held"), "Ready")
        cluster.until_quiet(operator)
        cluster.merge("Pod", "held-r0-0", {"metadata": {"finalizers": [FINALIZER]}})
        before = operator.writes()
        control_plane.kubectl("delete", "namespace", cluster.namespace, "--wait=false")
        cluster.until(lambda: "deletionTimestamp" in _metadata(cluster, "Pod", "held-r0-0"), "the end of pods")
        for name in ("held", "held-leaders", "held-r0"):
            cluster.delete("Service", name)
        said = cluster.until(lambda: _ending(cluster), "the reason")
        assert "being deleted" in said
        cluster.until_quiet(operator)
        written = operator.writes()
        assert written - before <= MOST_WRITES

        for name in ("held-engine", "held-frontend"):
            cluster.delete("ServiceAccount", name)
        cluster.delete("StatefulSet", "held-r0")
        _await_looks(cluster, operator)
        assert operator.writes() == written, operator.counts.requests
        # Another operator, without memory of earlier writes.
        with cluster.operator(resync_seconds=0.5) as successor:
            cluster.until(successor.started.is_set, "the successor")
            _await_looks(cluster, successor)
            # It has checked its permissions.
            patched = {
                method: n for (method, _), n in successor.counts.requests.items() if method in ("PATCH", "DELETE")
            }
            assert patched == {}

        cluster.merge("Pod", "held-r0-0", {"metadata": {"finalizers": None}})
        assert operator.alive and operator.error is None


def test_a_recreated_namespace_is_used_again_after_a_stale_rejection(control_plane: LocalControlPlane) -> None:
    """An API server that has not noticed the deletion yet rejects objects in the new namespace."""
    with OperatedCluster(control_plane) as cluster:
        cluster.apply(pvc_model("recreated"))
        said = {
            "type": "Accepted",
            "status": "False",
            "reason": "NamespaceTerminating",
            "message": "the namespace is being deleted",
            "observedGeneration": 1,
            "lastTransitionTime": f"{datetime.now(UTC) - timedelta(minutes=6):%Y-%m-%dT%H:%M:%SZ}",
        }
        cluster.merge("InferenceModel", "recreated", {"status": {"conditions": [said]}}, "status")
        with cluster.operator():
            cluster.until(lambda: cluster.ready("recreated"), "Ready")


def _metadata(cluster: OperatedCluster, kind: str, name: str) -> str:
    live = cluster.get(kind, name)
    return json.dumps(live["metadata"]) if live else ""


def _ending(cluster: OperatedCluster) -> str:
    accepted = cluster.condition("held", "Accepted")
    return str(accepted["message"]) if accepted.get("reason") == "NamespaceTerminating" else ""


def _await_looks(cluster: OperatedCluster, operator: RunningOperator) -> None:
    """Wait until everything was listed and each model reconciled several times."""

    def lists() -> int:
        return operator.counts.requests["GET", 200]

    enough = lists() + LISTS
    cluster.until(lambda: lists() >= enough, "resyncs")
    cluster.until_quiet(operator)
