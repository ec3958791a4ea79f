"""Permissions of the operator: those that it uses, those that are shipped, and missing ones."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from minisgl_operator.facts import lost_nodes, peer_secret
from minisgl_operator.shell import client as client_module
from minisgl_operator.shell import controller, nodes
from minisgl_operator.shell.client import Client, Page
from minisgl_operator.shell.lease import Lease
from minisgl_operator.shell.store import ModelKey
from support.cluster.control_plane import LocalControlPlane
from support.cluster.http_routes import http_routes
from support.cluster.operated_cluster import CrashingClient, OperatedCluster, hub_model, pvc_model

ROLES: Final = Path(__file__).parents[3] / "manifests" / "operator" / "rbac.yaml"
Right = tuple[str, str, str]
# Required by an admission plugin of some clusters, not by a request.
NOT_A_REQUEST: Final = ("serving.minisgl.io", "inferencemodels/finalizers", "update")


def shipped_rules() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rules for the models' namespaces, and for the operator's namespace."""
    roles = _roles()
    return roles["minisgl-operator"], roles["minisgl-operator-lease"]


def node_rules() -> list[dict[str, Any]]:
    """The one permission in the whole cluster."""
    return _roles()["minisgl-operator-nodes"]


def _roles() -> dict[str, list[dict[str, Any]]]:
    """Rules by the name of the role."""
    bodies = [body for body in yaml.safe_load_all(ROLES.read_text()) if "rules" in body]
    return {body["metadata"]["name"]: body["rules"] for body in bodies}


def rights(rules: list[dict[str, Any]]) -> set[Right]:
    return {
        (group, resource, verb)
        for rule in rules
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


@contextmanager
def account(cluster: OperatedCluster, rules: list[dict[str, Any]], *, nodes: bool = True) -> Iterator[Path]:
    """A kubeconfig of a user with exactly these permissions in the cluster's namespace, and that to read nodes."""
    grant(cluster, rules)
    bind(cluster, cluster)
    if nodes:
        grant_nodes(cluster)
    yield cluster.control_plane.kubeconfig_for(f"operator-of-{cluster.namespace}")
    revoke_nodes(cluster)


def grant_nodes(cluster: OperatedCluster) -> None:
    role = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRole",
        "metadata": {"name": f"nodes-of-{cluster.namespace}"},
        "rules": node_rules(),
    }
    binding = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRoleBinding",
        "metadata": role["metadata"],
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role["metadata"]["name"]},
        "subjects": [
            {"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": f"operator-of-{cluster.namespace}"}
        ],
    }
    for body in (role, binding):
        cluster.control_plane.kubectl("apply", "-f", "-", stdin=json.dumps(body))


def revoke_nodes(cluster: OperatedCluster) -> None:
    for kind in ("clusterrolebinding", "clusterrole"):
        cluster.control_plane.kubectl("delete", kind, f"nodes-of-{cluster.namespace}", "--ignore-not-found")


def bind(cluster: OperatedCluster, home: OperatedCluster) -> None:
    """Grant the account of `home` its permissions in the cluster's namespace, too."""
    user = f"operator-of-{home.namespace}"
    cluster.control_plane.kubectl(
        "create", "rolebinding", "operator", "-n", cluster.namespace, "--role=operator", f"--user={user}"
    )


def grant(cluster: OperatedCluster, rules: list[dict[str, Any]]) -> None:
    role = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "Role",
        "metadata": {"name": "operator", "namespace": cluster.namespace},
        "rules": rules,
    }
    cluster.control_plane.kubectl("apply", "-f", "-", stdin=json.dumps(role))


def without(rules: list[dict[str, Any]], resource: str, verb: str) -> list[dict[str, Any]]:
    left = []
    for rule in rules:
        others = [one for one in rule["resources"] if one != resource]
        left.append({**rule, "resources": others})
        if resource in rule["resources"]:
            verbs = [one for one in rule["verbs"] if one != verb]
            left.append({**rule, "resources": [resource], "verbs": verbs})
    return [rule for rule in left if rule["resources"] and rule["verbs"]]


def test_the_shipped_rules_are_exactly_those_that_the_operator_uses(
    control_plane: LocalControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules, lease_rules = shipped_rules()
    with OperatedCluster(control_plane) as cluster, account(cluster, rules + lease_rules) as kubeconfig:
        monkeypatch.setattr(lost_nodes, "FORCE_DELETE_AFTER", timedelta(seconds=1))
        # Tokens are replaced as soon as pods know the last ones.
        monkeypatch.setattr(peer_secret, "_ROTATION", timedelta(seconds=1))
        with http_routes(control_plane), cluster.operator(kubeconfig=kubeconfig, gateway="prod"):
            _everything_it_can_do(cluster)
            _everything_about_gateways(cluster)
        cluster.run(_hold_a_lease(cluster, kubeconfig))
        used, denied = set[Right](), []
        for event in control_plane.audit():
            if event["user"]["username"] != f"operator-of-{cluster.namespace}" or "objectRef" not in event:
                continue
            where = event["objectRef"]
            resource = "/".join(part for part in (where["resource"], where.get("subresource")) if part)
            if resource == "selfsubjectaccessreviews":
                continue
            used.add((where.get("apiGroup", ""), resource, event["verb"]))
            code = event.get("responseStatus", {}).get("code")
            if event["verb"] == "patch" and code == 201:
                # An apply that creates the object needs both permissions.
                used.add((where.get("apiGroup", ""), resource, "create"))
            if code == 403:
                denied.append(event["requestURI"])
    assert denied == []
    shipped = rights(rules + lease_rules + node_rules()) - {NOT_A_REQUEST}
    assert used - shipped == set()
    assert shipped - used == set(), "rights that are never used"


def _records(cluster: OperatedCluster) -> list[int]:
    """Settings of the recorded templates."""
    found = [body for (kind, _), body in cluster.children("recorded").items() if kind == "ControllerRevision"]
    variables = [one for body in found for one in body["data"]["template"]["spec"]["containers"][0]["env"]]
    return [int(one["value"]) for one in variables if one["name"] == "SETTING"]


def _everything_it_can_do(cluster: OperatedCluster) -> None:
    cluster.apply(pvc_model("lost"))
    cluster.until(lambda: cluster.ready("lost"), "the replica that will lose its node")
    lost = cluster.get("Pod", "lost-r0-0")
    assert lost is not None
    cluster.lose_node_of("lost-r0-0")
    for number in range(4):
        value = str(number)
        cluster.apply(pvc_model("recorded", replicas=0, engine={"env": [{"name": "SETTING", "value": value}]}))
        cluster.until(lambda: int(value) in _records(cluster), "a record")  # noqa: B023
    cluster.until(lambda: len(_records(cluster)) == 3, "the end of the first record")
    cluster.hold = lambda name: name.startswith("waiting")
    cluster.apply(pvc_model("waiting"))
    cluster.apply(pvc_model("asleep"))
    cluster.until(lambda: cluster.get("PodDisruptionBudget", "asleep-engine"), "a budget")
    cluster.apply(pvc_model("asleep", suspend=True))
    cluster.until(lambda: cluster.get("PodDisruptionBudget", "asleep-engine") is None, "the budget's end")
    cluster.apply(pvc_model("full", replicas=2))
    cluster.until(lambda: cluster.status("full").get("readyReplicas") == 2, "two replicas")
    in_place = {"rollout": {"strategy": "Recreate"}, "engine": {"env": [{"name": "SETTING", "value": "b"}]}}
    cluster.apply(pvc_model("full", replicas=2, **in_place))
    cluster.until(lambda: cluster.status("full").get("updatedReplicas") == 2, "a rollout in place")
    cluster.until(lambda: cluster.status("full").get("readyReplicas") == 2, "two replicas")
    cluster.apply(pvc_model("full", replicas=1, networkPolicy={"enabled": False}, **in_place))
    cluster.until(lambda: cluster.get("StatefulSet", "full-r1") is None, "the second replica's end")
    cluster.until(lambda: cluster.get("Service", "full-r1") is None, "its Service's end")
    cluster.until(lambda: cluster.get("NetworkPolicy", "full-engine") is None, "the policy's end")
    cluster.apply(hub_model("fetched"))
    (job,) = cluster.until(lambda: [key for key in cluster.children("fetched") if key[0] == "Job"], "a fetch Job")
    cluster.apply(hub_model("fetched", "owner/other"))
    cluster.until(lambda: cluster.get(*job) is None, "the end of the fetch that nobody wants")
    # A repeated event is counted in one series.
    for ready in (False, True) * 3:
        pod = cluster.get("Pod", "full-r0-0")
        assert pod is not None
        conditions = [{**one, "status": str(ready)} for one in pod["status"]["conditions"]]
        cluster.statuses["full-r0-0"] = {"conditions": conditions}
        cluster.until(lambda ready=ready: cluster.ready("full") == ready, f"Ready={ready}")  # type: ignore[misc]

    def asked() -> bool:
        user = f"operator-of-{cluster.namespace}"
        uris = {
            (event["verb"], event["objectRef"].get("apiGroup"))
            for event in cluster.control_plane.audit()
            if event["user"]["username"] == user and event.get("objectRef", {}).get("resource") == "events"
        }
        return {("list", None), ("create", "events.k8s.io"), ("patch", "events.k8s.io")} <= uris

    cluster.until(asked, "the operator's interest in events")
    user = f"operator-of-{cluster.namespace}"
    cluster.until(
        lambda: any(
            event["verb"] == "update" and event.get("objectRef", {}).get("resource") == "secrets"
            for event in cluster.control_plane.audit()
            if event["user"]["username"] == user
        ),
        "the replacement of a token",
    )

    def made_again() -> bool:
        pod = cluster.get("Pod", "lost-r0-0")
        return pod is not None and pod["metadata"]["uid"] != lost["metadata"]["uid"]

    cluster.until(made_again, "another pod in place of the lost one")


def _everything_about_gateways(cluster: OperatedCluster) -> None:
    cluster.start_gateway("gateway-0", "prod", "10.9.8.7")
    scaling = {"minReplicas": 0, "maxReplicas": 1, "target": {"runningPerReplica": 4}, "idleSecondsToZero": 30}
    without = {"autoscaling": scaling, "frontend": {"minReplicas": 0}}
    route = {"parentRefs": [{"name": "public"}]}
    cluster.apply(pvc_model("idle", route=route, **without))
    cluster.until(lambda: cluster.get("EndpointSlice", "idle-gateway"), "the gateway as endpoint")
    cluster.until(lambda: cluster.get("HTTPRoute", "idle"), "a route")
    cluster.apply(pvc_model("idle", route=route | {"enabled": False}, **without))
    cluster.until(lambda: cluster.get("HTTPRoute", "idle") is None, "the route's end")
    cluster.gateways["gateway-0"] = {"models": {f"{cluster.namespace}/idle": {"held": 1}}}
    cluster.until(lambda: cluster.get("EndpointSlice", "idle-gateway") is None, "a frontend as endpoint")


async def _hold_a_lease(cluster: OperatedCluster, kubeconfig: Path) -> None:
    from minisgl_operator.shell.client import Client, connection

    async with Client(await connection(kubeconfig)) as client:
        lease = Lease(client, cluster.namespace, "somebody", "minisgl-operator")
        await lease.acquire()
        await lease.release()


def test_without_the_permission_to_read_nodes_nothing_is_forced(
    control_plane: LocalControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is tried again while the operator runs, and may come and go."""
    monkeypatch.setattr(lost_nodes, "FORCE_DELETE_AFTER", timedelta(seconds=1))
    monkeypatch.setattr(nodes, "_RETRY_SECONDS", 0.5)
    monkeypatch.setattr(client_module, "_WATCH_SECONDS", 1)
    rules, _ = shipped_rules()

    def lost(cluster: OperatedCluster, name: str) -> str:
        cluster.apply(pvc_model(name))
        cluster.until(lambda: cluster.ready(name), "Ready")
        pod = cluster.get("Pod", f"{name}-r0-0")
        assert pod is not None
        cluster.lose_node_of(f"{name}-r0-0")
        return str(pod["metadata"]["uid"])

    def replaced(cluster: OperatedCluster, name: str, uid: str) -> bool:
        pod = cluster.get("Pod", f"{name}-r0-0")
        return pod is not None and pod["metadata"]["uid"] != uid

    def says_so(cluster: OperatedCluster, name: str) -> bool:
        found = cluster.condition(name, "EngineReady")
        return found.get("reason") == "PodNotTerminating" and "cannot read nodes" in found["message"]

    with (
        OperatedCluster(control_plane) as cluster,
        account(cluster, rules, nodes=False) as kubeconfig,
        cluster.operator(kubeconfig=kubeconfig) as operator,
    ):
        uid = lost(cluster, "first")
        cluster.until(lambda: says_so(cluster, "first"), "the condition")
        cluster.until_quiet(operator)
        assert not replaced(cluster, "first", uid)
        grant_nodes(cluster)
        cluster.until(lambda: replaced(cluster, "first", uid), "another pod")
        revoke_nodes(cluster)
        # The API server ends a watch with its time limit.
        cluster.until(lambda: operator.call(lambda running: running.nodes is None), "the loss")
        uid = lost(cluster, "second")
        cluster.until(lambda: says_so(cluster, "second"), "the condition")
        assert operator.alive and not replaced(cluster, "second", uid)


def test_without_the_permission_to_create_pods_a_rollout_is_not_checked_and_says_so(
    control_plane: LocalControlPlane,
) -> None:
    in_place = {"rollout": {"strategy": "Recreate"}, "replicas": 2}
    rules, _ = shipped_rules()
    missing = without(rules, "pods", "create")
    with (
        OperatedCluster(control_plane) as cluster,
        account(cluster, missing) as kubeconfig,
        cluster.operator(kubeconfig=kubeconfig),
    ):
        cluster.apply(pvc_model("unchecked", **in_place))
        cluster.until(lambda: cluster.ready("unchecked"), "Ready")
        before = cluster.status("unchecked")["revision"]
        # The rollout waits for the first replica before it replaces the other one.
        cluster.hold = lambda name: True
        cluster.apply(pvc_model("unchecked", engine={"env": [{"name": "SETTING", "value": "b"}]}, **in_place))

        def says_so() -> bool:
            found = cluster.status("unchecked").get("rollout", {}).get("admission", {})
            return "the operator may not create pods" in found.get("message", "")

        cluster.until(says_so, "the status")
        cluster.hold = lambda name: False
        cluster.until(lambda: cluster.status("unchecked")["revision"] != before, "the new revision")
        cluster.until(lambda: cluster.ready("unchecked"), "Ready again")


def test_a_missing_permission_to_watch_is_reported_and_waited_for(
    control_plane: LocalControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(controller, "_PERMISSIONS_SECONDS", 0.5)
    rules, _ = shipped_rules()
    missing = without(rules, "statefulsets", "watch")
    with OperatedCluster(control_plane) as cluster, account(cluster, missing) as kubeconfig:
        cluster.apply(pvc_model("waits"))
        with cluster.operator(kubeconfig=kubeconfig) as operator:
            cluster.until(lambda: _lacks(cluster, "waits", "statefulsets"), "the missing right")
            cluster.apply(pvc_model("later"))
            cluster.until(lambda: _lacks(cluster, "later", "statefulsets"), "the same of a model that came later")
            assert cluster.children("waits") == {}
            assert operator.alive and not operator.started.is_set()
            grant(cluster, rules)
            cluster.until(lambda: cluster.ready("waits"), "Ready once the right is there")


def test_nothing_is_changed_before_the_first_full_list(
    control_plane: LocalControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reconcile before the first full list would see only a part of the model, and could delete running replicas."""
    monkeypatch.setattr(controller, "_PERMISSIONS_SECONDS", 0.5)
    may_list = threading.Event()

    async def pages(client: CrashingClient, *args: Any, **more: Any) -> AsyncIterator[Page]:
        while operator.controller is not None and operator.controller.namespaces and not may_list.is_set():
            await asyncio.sleep(0.01)
        async for page in Client.pages(client, *args, **more):
            yield page

    monkeypatch.setattr(CrashingClient, "pages", pages)
    rules, _ = shipped_rules()
    with OperatedCluster(control_plane) as cluster, account(cluster, without(rules, "jobs", "watch")) as kubeconfig:
        cluster.apply(pvc_model("due"))
        with cluster.operator(kubeconfig=kubeconfig) as operator:
            cluster.until(lambda: _lacks(cluster, "due", "jobs"), "the missing right")
            grant(cluster, rules)
            cluster.until(lambda: operator.call(lambda running: running.namespaces), "the end of the wait")
            operator.call(lambda running: running.queue.add(ModelKey(cluster.namespace, "due")))
            cluster.until_quiet(operator)
            assert cluster.children("due") == {}
            may_list.set()
            cluster.until(lambda: cluster.ready("due"), "Ready")


def test_a_permission_missing_in_one_namespace_is_reported_there_only(
    control_plane: LocalControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after an upgrade with custom roles: the status stays current, and edits are not applied."""
    monkeypatch.setattr(controller, "_PERMISSIONS_SECONDS", 0.5)
    rules, _ = shipped_rules()
    with (
        OperatedCluster(control_plane) as whole,
        OperatedCluster(control_plane) as cluster,
        account(cluster, rules) as kubeconfig,
    ):
        grant(whole, rules)
        bind(whole, cluster)
        cluster.apply(pvc_model("runs"))
        with cluster.operator(kubeconfig=kubeconfig, also=(whole.namespace,)):
            cluster.until(lambda: cluster.ready("runs"), "Ready before the upgrade")
        before = cluster.children("runs").keys()

        grant(cluster, without(rules, "jobs", "watch"))
        cluster.apply(pvc_model("runs", replicas=2))
        whole.apply(pvc_model("served"))
        with cluster.operator(kubeconfig=kubeconfig, also=(whole.namespace,)) as operator:
            whole.until(lambda: whole.get("StatefulSet", "served-r0"), "the complete namespace's turn")
            cluster.until(lambda: _lacks(cluster, "runs", "watch on jobs"), "the missing right")
            cluster.until(lambda: cluster.ready("runs"), "that it serves all the same")
            cluster.apply(pvc_model("later"))
            cluster.until(lambda: _lacks(cluster, "later", "watch on jobs"), "the same of a model that came later")
            cluster.until_quiet(operator)
            assert operator.call(lambda running: running.namespaces) == (whole.namespace,)
            assert cluster.children("runs").keys() == before
            assert cluster.children("later") == {}

            grant(cluster, without(rules, "jobs", "list"))
            cluster.until(lambda: _lacks(cluster, "runs", "list on jobs"), "the right that is missing now")
            grant(cluster, rules)
            cluster.until(lambda: not operator.alive, "its end")
        with cluster.operator(kubeconfig=kubeconfig, also=(whole.namespace,)):
            cluster.until(lambda: cluster.ready("later"), "Ready once the right is there")
            cluster.until(lambda: cluster.status("runs").get("readyReplicas") == 2, "both replicas")


def _lacks(cluster: OperatedCluster, name: str, right: str) -> bool:
    accepted = cluster.condition(name, "Accepted")
    return accepted.get("reason") == "Forbidden" and right in accepted["message"]


def test_a_deleted_namespace_does_not_stop_the_others(
    control_plane: LocalControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The Role was deleted with its namespace. Once both exist again, the process exits for a restart and watches it,
    too."""
    monkeypatch.setattr(controller, "_PERMISSIONS_SECONDS", 0.5)
    rules, _ = shipped_rules()
    with (
        OperatedCluster(control_plane) as other,
        OperatedCluster(control_plane) as cluster,
        account(cluster, rules) as kubeconfig,
    ):
        cluster.apply(pvc_model("served"))
        with cluster.operator(kubeconfig=kubeconfig, also=(other.namespace,)) as operator:
            cluster.until(lambda: cluster.ready("served"), "Ready")
            assert operator.call(lambda running: running.namespaces) == (cluster.namespace,)
            grant(other, rules)
            bind(other, cluster)
            cluster.until(lambda: not operator.alive, "its end")
        other.apply(pvc_model("later"))
        with cluster.operator(kubeconfig=kubeconfig, also=(other.namespace,)) as operator:
            cluster.until(operator.started.is_set, "the start")
            assert operator.call(lambda running: running.namespaces) == (other.namespace, cluster.namespace)
            cluster.until(lambda: other.children("later"), "the other namespace's turn")


def test_a_missing_permission_to_create_is_reported_and_does_not_block_other_children(
    control_plane: LocalControlPlane,
) -> None:
    rules, _ = shipped_rules()
    missing = without(rules, "poddisruptionbudgets", "create")
    with OperatedCluster(control_plane) as cluster, account(cluster, missing) as kubeconfig:
        cluster.apply(pvc_model("partly"))
        with cluster.operator(kubeconfig=kubeconfig) as operator:
            cluster.until(lambda: "poddisruptionbudgets" in json.dumps(cluster.status("partly")), "the missing right")
            cluster.until(lambda: cluster.get("StatefulSet", "partly-r0"), "the other children")
            assert operator.alive and operator.error is None
            grant(cluster, rules)
            cluster.until(lambda: cluster.get("PodDisruptionBudget", "partly-frontend"), "the budget")
            cluster.until(lambda: cluster.ready("partly"), "Ready")


def test_a_permission_missing_at_the_start_is_reported_and_does_not_end_the_process(
    control_plane: LocalControlPlane,
) -> None:
    """kopf ends the process without a watch, which would then restart endlessly."""
    rules, _ = shipped_rules()
    with OperatedCluster(control_plane) as cluster, account(cluster, without(rules, "jobs", "list")) as kubeconfig:
        cluster.apply(pvc_model("later"))
        with cluster.operator(kubeconfig=kubeconfig) as operator:
            cluster.until(lambda: "jobs.batch" in json.dumps(cluster.status("later")), "the missing right")
            assert operator.alive
