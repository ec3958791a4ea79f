"""A namespace that is being deleted and does not go, as one with a pod that drains for long, or whose node is lost."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta

from minisgl_operator.shell.resources import WATCHED
from support.cluster.control_plane import LocalControlPlane
from support.cluster.operated_cluster import OperatedCluster, RunningOperator, pvc_model

FINALIZER = "example.com/held"
# One more look at a model after each of these is what an operator does that has nothing to do.
LISTS = 3 * len(WATCHED)
MOST_WRITES = 30
"""What one model may cost on its way out: its pods' end, told in its status, and what is refused once."""


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
        # Another operator, which remembers nothing.
        with cluster.operator(resync_seconds=0.5) as successor:
            cluster.until(successor.started.is_set, "the successor")
            _await_looks(cluster, successor)
            # It has asked for its rights.
            patched = {
                method: n for (method, _), n in successor.counts.requests.items() if method in ("PATCH", "DELETE")
            }
            assert patched == {}

        cluster.merge("Pod", "held-r0-0", {"metadata": {"finalizers": None}})
        assert operator.alive and operator.error is None


def test_a_recreated_namespace_is_used_again_after_a_stale_rejection(control_plane: LocalControlPlane) -> None:
    """An API server that has not seen yet that the old one is gone refuses what is made in the new one."""
    with OperatedCluster(control_plane) as cluster:
        cluster.apply(pvc_model("made-anew"))
        said = {
            "type": "Accepted",
            "status": "False",
            "reason": "NamespaceTerminating",
            "message": "the namespace is being deleted",
            "observedGeneration": 1,
            "lastTransitionTime": f"{datetime.now(UTC) - timedelta(minutes=6):%Y-%m-%dT%H:%M:%SZ}",
        }
        cluster.merge("InferenceModel", "made-anew", {"status": {"conditions": [said]}}, "status")
        with cluster.operator():
            cluster.until(lambda: cluster.ready("made-anew"), "Ready")


def _metadata(cluster: OperatedCluster, kind: str, name: str) -> str:
    live = cluster.get(kind, name)
    return json.dumps(live["metadata"]) if live else ""


def _ending(cluster: OperatedCluster) -> str:
    accepted = cluster.condition("held", "Accepted")
    return str(accepted["message"]) if accepted.get("reason") == "NamespaceTerminating" else ""


def _await_looks(cluster: OperatedCluster, operator: RunningOperator) -> None:
    """Until everything was listed, and each model looked at, some more times."""

    def lists() -> int:
        return operator.counts.requests["GET", 200]

    enough = lists() + LISTS
    cluster.until(lambda: lists() >= enough, "resyncs")
    cluster.until_quiet(operator)
