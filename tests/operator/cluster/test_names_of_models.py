"""Two models whose names are alike: the endpoint of one has the name that a replica of the other would have."""

from __future__ import annotations

from support.control_plane import LocalControlPlane
from support.operated_cluster import OperatedCluster, pvc_model


def test_a_name_that_another_model_has_is_a_conflict_until_it_is_free(control_plane: LocalControlPlane) -> None:
    with OperatedCluster(control_plane) as cluster, cluster.operator() as operator:
        cluster.apply(pvc_model("deepseek-r1"))
        cluster.apply(pvc_model("deepseek"))
        for name in ("deepseek-r1", "deepseek"):
            cluster.until(lambda name=name: cluster.ready(name), name)  # type: ignore[misc]
        cluster.until_quiet(operator)
        endpoint = cluster.get("Service", "deepseek-r1")
        assert endpoint is not None

        cluster.apply(pvc_model("deepseek", replicas=2))
        cluster.until(lambda: cluster.condition("deepseek", "Accepted").get("reason") == "Conflict", "the conflict")
        said = cluster.condition("deepseek", "Accepted")["message"]
        assert 'Service "deepseek-r1"' in said and "InferenceModel deepseek-r1" in said
        cluster.until_quiet(operator)
        assert cluster.get("Service", "deepseek-r1") == endpoint
        assert cluster.ready("deepseek-r1")

        cluster.delete("InferenceModel", "deepseek-r1")
        cluster.until(lambda: cluster.condition("deepseek", "Accepted").get("status") == "True", "the free name")
        cluster.until(lambda: cluster.status("deepseek").get("readyReplicas") == 2, "both replicas")
