"""Which replicas stay and which ones start, on a real API server and its controllers."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from minisgl_operator.api.objects import Manifest
from minisgl_operator.render import names
from support.cluster.control_plane import LocalControlPlane
from support.cluster.operated_cluster import OperatedCluster, pvc_model


def stateful_sets(cluster: OperatedCluster) -> dict[str, int]:
    """Number of pods that each StatefulSet asks for."""
    return {each["metadata"]["name"]: each["spec"]["replicas"] for each in cluster.list("StatefulSet")}


def scheduled(fits: bool, since: datetime) -> Manifest:
    """Status of a pod that the scheduler has, or has not, placed on a node."""
    condition: dict[str, Any] = {
        "type": "PodScheduled",
        "status": "True" if fits else "False",
        "lastTransitionTime": since.strftime("%Y-%m-%dT%H:%M:%SZ"),
    }
    if not fits:
        condition |= {"reason": "Unschedulable", "message": "0/1 nodes are available: 1 Insufficient nvidia.com/gpu."}
    return {"phase": "Pending", "conditions": [condition]}


def test_a_scale_down_keeps_the_replica_that_serves_and_its_revision(control_plane: LocalControlPlane) -> None:
    # The broken revision stays, in the place of a replica that served.
    rollout = {"strategy": "Recreate", "autoRollback": False}
    with OperatedCluster(control_plane) as cluster, cluster.operator() as operator:
        cluster.apply(pvc_model("kept", rollout=rollout, replicas=2))
        cluster.until(lambda: cluster.status("kept").get("readyReplicas") == 2, "two replicas")
        served = cluster.get("Pod", "kept-r1-0")
        assert served is not None
        waiting = {"name": "engine", "image": "broken", "imageID": "", "ready": False, "restartCount": 0}
        waiting["state"] = {"waiting": {"reason": "ImagePullBackOff", "message": "not found"}}
        cluster.statuses["kept-r0-0"] = {"phase": "Pending", "conditions": [], "containerStatuses": [waiting]}
        cluster.apply(pvc_model("kept", rollout=rollout, replicas=2, engine={"image": "registry.example.com/broken:1"}))
        cluster.until(lambda: cluster.status("kept").get("failedRevision"), "the failed revision")

        cluster.apply(pvc_model("kept", rollout=rollout, replicas=1, engine={"image": "registry.example.com/broken:1"}))
        cluster.until(lambda: stateful_sets(cluster) == {"kept-r1": 1}, "the removal of the broken replica")
        cluster.until_quiet(operator)
        live = cluster.get("Pod", "kept-r1-0")
        assert live is not None and live["metadata"]["uid"] == served["metadata"]["uid"]
        assert "deletionTimestamp" not in live["metadata"]
        assert cluster.status("kept")["readyReplicas"] == 1
        assert "Correct the spec" in cluster.condition("kept", "Progressing")["message"]

        cluster.apply(pvc_model("kept", rollout=rollout, replicas=1, engine={"image": "registry.example.com/good:1"}))
        current = live["metadata"]["labels"][names.REVISION_LABEL]
        cluster.until(lambda: cluster.status("kept").get("revision") != current, "the new revision")
        cluster.until(lambda: cluster.status("kept").get("updatedReplicas") == 1, "the rollout")
        cluster.until(lambda: cluster.ready("kept"), "Ready")


def test_a_partly_placed_replica_returns_its_gpus_and_starts_again_after_a_pause(
    control_plane: LocalControlPlane,
) -> None:
    with OperatedCluster(control_plane) as cluster, cluster.operator():
        earlier = datetime.now(UTC) - timedelta(minutes=2)
        cluster.statuses = {"gang-r0-0": scheduled(True, earlier), "gang-r0-1": scheduled(False, earlier)}
        cluster.apply(pvc_model("gang", replicas=2, parallelism={"tensor": 2, "gpusPerPod": 1}))
        cluster.until(lambda: cluster.condition("gang", "Scheduled").get("reason") == "PartlyScheduled", "the pause")
        assert stateful_sets(cluster) == {"gang-r0": 0, "gang-r1": 0}
        live = cluster.get("StatefulSet", "gang-r0")
        assert live is not None and live["metadata"]["annotations"][names.PARTIAL_STARTS_ANNOTATION] == "1"

        cluster.statuses = {}
        over = {names.PAUSED_UNTIL_ANNOTATION: earlier.strftime("%Y-%m-%dT%H:%M:%SZ")}
        cluster.merge("StatefulSet", "gang-r0", {"metadata": {"annotations": over}})
        cluster.until(lambda: cluster.status("gang").get("readyReplicas") == 2, "both replicas")
        live = cluster.get("StatefulSet", "gang-r0")
        assert live is not None and names.PARTIAL_STARTS_ANNOTATION not in live["metadata"].get("annotations", {})
