"""Rollouts to pods that admission refuses, on a real API server with simulated pods."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from minisgl_operator.facts.rollout import admission, surge
from support.cluster.control_plane import LocalControlPlane
from support.cluster.operated_cluster import OperatedCluster, pvc_model

IN_PLACE = {"rollout": {"strategy": "Recreate"}}


def setting(value: str) -> dict[str, Any]:
    """Engine fields of another revision."""
    return {"env": [{"name": "SOME_SETTING", "value": value}]}


@contextmanager
def policy(cluster: OperatedCluster, name: str, expression: str) -> Iterator[None]:
    """A ValidatingAdmissionPolicy for pods of the namespace."""
    name = f"{name}-{cluster.namespace}"
    rule = {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}
    where = {"matchLabels": {"kubernetes.io/metadata.name": cluster.namespace}}
    api = {"apiVersion": "admissionregistration.k8s.io/v1", "metadata": {"name": name}}
    kinds = ("ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding")
    spec = {
        "matchConstraints": {"resourceRules": [rule]},
        "validations": [{"expression": expression, "message": "this setting is not allowed"}],
    }
    binding = {"policyName": name, "validationActions": ["Deny"], "matchResources": {"namespaceSelector": where}}
    cluster.control_plane.apply({**api, "kind": kinds[0], "spec": spec}, {**api, "kind": kinds[1], "spec": binding})
    try:
        yield
    finally:
        for kind in reversed(kinds):
            cluster.control_plane.kubectl("delete", kind, name)


@contextmanager
def injection(cluster: OperatedCluster) -> Iterator[None]:
    """A MutatingAdmissionPolicy that gives pods with a label the host's processes, as an agent for tracing needs them.
    The operator's own pods meet every level of Pod Security."""
    name = f"inject-{cluster.namespace}"
    rule = {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}
    where = {"matchLabels": {"kubernetes.io/metadata.name": cluster.namespace}}
    api = {"apiVersion": "admissionregistration.k8s.io/v1", "metadata": {"name": name}}
    patch = '[JSONPatch{op: "add", path: "/spec/hostPID", value: true}]'
    spec = {
        "matchConstraints": {
            "resourceRules": [rule],
            "objectSelector": {"matchLabels": {"inject": "host"}},
        },
        "failurePolicy": "Fail",
        "reinvocationPolicy": "Never",
        "mutations": [{"patchType": "JSONPatch", "jsonPatch": {"expression": patch}}],
    }
    binding = {"policyName": name, "matchResources": {"namespaceSelector": where}}
    kinds = ("MutatingAdmissionPolicy", "MutatingAdmissionPolicyBinding")
    cluster.control_plane.apply({**api, "kind": kinds[0], "spec": spec}, {**api, "kind": kinds[1], "spec": binding})
    try:
        yield
    finally:
        for kind in reversed(kinds):
            cluster.control_plane.kubectl("delete", kind, name)


def pod(name: str, **container: Any) -> dict[str, Any]:
    containers = [{"name": "one", "image": "example.com/one:1", **container}]
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": {"containers": containers}}


def refuses(cluster: OperatedCluster, body: dict[str, Any]) -> bool:
    """True if admission refuses the pod; a new policy takes effect after a moment."""
    command = ("create", "-n", cluster.namespace, "--dry-run=server", "-f", "-")
    return cluster.control_plane.kubectl(*command, stdin=json.dumps(body), check=False).returncode != 0


def refused(cluster: OperatedCluster, name: str) -> str:
    """The message of a refused rollout; "" without one."""
    found = cluster.condition(name, "Progressing")
    return str(found["message"]) if found.get("reason") == "PodRefused" else ""


def uid(cluster: OperatedCluster, name: str) -> str:
    live = cluster.get("Pod", name)
    assert live is not None and "deletionTimestamp" not in live["metadata"]
    return str(live["metadata"]["uid"])


@pytest.fixture
def cluster(control_plane: LocalControlPlane) -> Iterator[OperatedCluster]:
    with OperatedCluster(control_plane) as cluster:
        yield cluster


FORBIDDEN = "!object.spec.containers.exists(c, has(c.env) && c.env.exists(e, has(e.value) && e.value == 'forbidden'))"


def test_a_policy_that_refuses_pods_stops_a_rollout_before_a_replica_is_drained(
    cluster: OperatedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "_LONGEST_PAUSE", admission._FIRST_PAUSE / 10)
    with cluster.operator(), policy(cluster, "settings", FORBIDDEN):
        cluster.apply(pvc_model("guarded", **IN_PLACE))
        cluster.until(lambda: cluster.ready("guarded"), "Ready")
        env = [{"name": "SOME_SETTING", "value": "forbidden"}]
        cluster.until(lambda: refuses(cluster, pod("probe", env=env)), "the policy")
        before = uid(cluster, "guarded-r0-0")
        cluster.apply(pvc_model("guarded", engine=setting("forbidden"), **IN_PLACE))
        message = cluster.until(lambda: refused(cluster, "guarded"), "the refusal")
        assert f'ValidatingAdmissionPolicy "settings-{cluster.namespace}" refuses pods' in message
        assert "this setting is not allowed" in message and "Change the spec" in message
        assert cluster.ready("guarded")
        assert uid(cluster, "guarded-r0-0") == before
        assert cluster.status("guarded")["rollout"]["admission"]["result"] == "Refused"
        described = cluster.control_plane.kubectl("describe", "imodel", "guarded", "-n", cluster.namespace).stdout
        assert "PodRefused" in described.split("Events:")[1], described
        cluster.apply(pvc_model("guarded", engine=setting("allowed"), **IN_PLACE))

        def rolled() -> bool:
            live = cluster.get("Pod", "guarded-r0-0")
            return live is not None and live["metadata"]["uid"] != before and cluster.ready("guarded")

        cluster.until(rolled, "the allowed revision")
        cluster.until(lambda: cluster.status("guarded")["updatedReplicas"] == 1, "the end of the rollout")
        cluster.until(lambda: "admission" not in cluster.status("guarded")["rollout"], "the end of the rollout")


def test_a_rollout_goes_on_when_pod_security_allows_its_pods_again(
    cluster: OperatedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "_LONGEST_PAUSE", admission._FIRST_PAUSE / 10)
    label = "pod-security.kubernetes.io/enforce"

    def enforce(level: str) -> None:
        cluster.control_plane.kubectl("label", "--overwrite", "namespace", cluster.namespace, f"{label}={level}")

    with cluster.operator(), injection(cluster):
        enforce("privileged")
        cluster.apply(pvc_model("secured", **IN_PLACE))
        cluster.until(lambda: cluster.ready("secured"), "Ready")
        before = uid(cluster, "secured-r0-0")
        enforce("restricted")
        cluster.until(lambda: refuses(cluster, pod("probe")), "Pod Security")
        template = {"podTemplate": {"labels": {"inject": "host"}}}
        cluster.apply(pvc_model("secured", engine=template, **IN_PLACE))
        message = cluster.until(lambda: refused(cluster, "secured"), "the refusal")
        assert message.count("Pod Security of the namespace") == 1
        assert "host namespaces (hostPID=true)" in message
        assert uid(cluster, "secured-r0-0") == before and cluster.ready("secured")
        enforce("privileged")

        def rolled() -> bool:
            live = cluster.get("Pod", "secured-r0-0")
            return live is not None and live["metadata"]["uid"] != before and cluster.ready("secured")

        cluster.until(rolled, "the new revision")


def test_auto_keeps_the_serving_replica_when_the_pods_of_an_additional_one_are_refused(
    cluster: OperatedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the Events come late: the strategy changes only after a dry run."""
    monkeypatch.setattr(surge, "SURGE_TIMEOUT", surge.SURGE_TIMEOUT / 60)
    with cluster.operator() as operator, policy(cluster, "settings", FORBIDDEN):
        cluster.apply(pvc_model("added"))
        cluster.until(lambda: cluster.ready("added"), "Ready")
        env = [{"name": "SOME_SETTING", "value": "forbidden"}]
        cluster.until(lambda: refuses(cluster, pod("probe", env=env)), "the policy")
        before = uid(cluster, "added-r0-0")
        cluster.apply(pvc_model("added", engine=setting("forbidden")))
        cluster.until(lambda: cluster.get("StatefulSet", "added-r1"), "an additional replica")
        cluster.until(lambda: refused(cluster, "added"), "the refusal")
        cluster.until(lambda: cluster.status("added").get("failedRevision"), "the Events of the additional replica")
        cluster.until(lambda: cluster.condition("added", "Scheduled").get("reason") == "PodRefused", "the reason")
        assert uid(cluster, "added-r0-0") == before
        assert cluster.status("added")["rollout"]["strategy"] == "Surge"
        assert operator.alive
