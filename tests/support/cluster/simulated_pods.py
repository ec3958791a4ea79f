"""Pods without nodes behind them, for the benchmark and for tests on an API server: the status that a kubelet would
write, and the bodies of /status of launchers, frontends and fetch pods."""

from __future__ import annotations

from typing import Any

from minisgl_operator.api.objects import Manifest
from minisgl_operator.render import names
from minisgl_operator.render.names import COMPONENT_LABEL, MODEL_LABEL, REPLICA_LABEL, REVISION_LABEL

_SINCE = "2026-01-01T00:00:00Z"


def running_status(pod: Manifest, ready: bool = True) -> dict[str, Any]:
    """Status of a pod on 127.0.0.1 whose containers all run."""
    containers = [container["name"] for container in pod["spec"]["containers"]]
    return {
        "phase": "Running",
        "podIP": "127.0.0.1",
        "podIPs": [{"ip": "127.0.0.1"}],
        "startTime": _SINCE,
        "conditions": [
            {"type": kind, "status": "True" if ready else "False", "lastTransitionTime": _SINCE}
            for kind in ("PodScheduled", "Initialized", "ContainersReady", "Ready")
        ],
        "containerStatuses": [
            {
                "name": name,
                "ready": ready,
                "restartCount": 0,
                "started": True,
                "image": "simulated",
                "imageID": "",
                "state": {"running": {"startedAt": _SINCE}},
            }
            for name in containers
        ],
    }


def report(pod: Manifest, pods: list[Manifest]) -> dict[str, Any] | None:
    """Body of /status of a pod that serves; `pods` are those of its namespace. None for pods that are not probed."""
    labels = pod["metadata"]["labels"]
    match labels.get(COMPONENT_LABEL):
        case names.ENGINE:
            replica = labels[REPLICA_LABEL]
            ranks = [
                {"rank": rank, "pod": one["metadata"]["name"], "node": "node", "phase": "Ready", "progress": ""}
                for rank, one in enumerate(
                    one for one in pods if one["metadata"]["labels"].get(REPLICA_LABEL) == replica
                )
            ]
            return {
                "kind": "engine",
                "model": labels[MODEL_LABEL],
                "replica": replica,
                "pod": pod["metadata"]["name"],
                "pod_index": 0,
                "revision": labels.get(REVISION_LABEL, ""),
                "epoch": [1_767_225_600_000, 1],
                "phase": "Ready",
                "progress": "",
                "ready": True,
                "ranks": ranks,
                "ready_ranks": len(ranks),
                "tensor": len(ranks),
                "transport": "gloo" if len(ranks) > 1 else "",
                "timings": {"rendezvous": 0.1, "load": 0.5, "total": 0.6},
                "restarts": 0,
                "max_restarts": 5,
                "last_failure": None,
                "card": {"name": "simulated", "architecture": "Simulated", "max_model_len": 4096, "vocab_size": 1000},
            }
        case names.FRONTEND:
            return {
                "kind": "frontend",
                "pod": pod["metadata"]["name"],
                "ready": True,
                "draining": False,
                "replicas": [_routed(one) for one in pods if _serves(one, labels[MODEL_LABEL])],
                "held": 0,
                "running": 0,
                "idle_seconds": 0.0,
            }
        case names.FETCH:
            return {
                "kind": "fetch",
                "phase": "Downloading",
                "percent": 42,
                "commit": "0" * 40,
                "reason": "",
                "message": "",
            }
    return None


def _serves(pod: Manifest, model: str) -> bool:
    labels = pod["metadata"]["labels"]
    ready = any(c["type"] == "Ready" and c["status"] == "True" for c in pod.get("status", {}).get("conditions", ()))
    leads = pod["metadata"]["name"] == f"{labels.get(REPLICA_LABEL)}-0"
    return bool(ready and leads and labels.get(MODEL_LABEL) == model)


def _routed(pod: Manifest) -> dict[str, Any]:
    labels = pod["metadata"]["labels"]
    return {
        "replica": labels[REPLICA_LABEL],
        "revision": labels.get(REVISION_LABEL, ""),
        "epoch": [1_767_225_600_000, 1],
        "address": "127.0.0.1",
        "routable": True,
        "reason": "",
        "waits_for_files": False,
        "running": 0,
        "waiting": 0,
    }
