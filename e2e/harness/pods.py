"""Requests for pods over one connection, for tests that measure pauses: each start of kubectl takes CPU time from the
pods."""

from __future__ import annotations

from functools import cache

from kubernetes.client import CoreV1Api
from kubernetes.config import new_client_from_config

from cluster.relay import host_kubeconfig


def ready_pods(namespace: str, model: str, component: str) -> dict[str, str]:
    """UID of each pod of a model that is ready and not terminating, by name; `component` is engine, frontend or
    fetch."""
    selector = f"app.kubernetes.io/instance={model},app.kubernetes.io/component={component}"
    pods = _api().list_namespaced_pod(namespace, label_selector=selector).items
    return {
        pod.metadata.name: pod.metadata.uid
        for pod in pods
        if not pod.metadata.deletion_timestamp
        and ("Ready", "True") in [(each.type, each.status) for each in pod.status.conditions or ()]
    }


def delete_by_force(namespace: str, name: str) -> None:
    """Make the API server forget a pod at once, like `kubectl delete --force --grace-period=0`."""
    _api().delete_namespaced_pod(name, namespace, grace_period_seconds=0)


@cache
def _api() -> CoreV1Api:
    return CoreV1Api(new_client_from_config(host_kubeconfig()))
