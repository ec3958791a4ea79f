"""Namespace of one test: apply and inspect objects, wait for conditions, and report its state after a failure."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from cluster.control_plane import kubectl
from cluster.relay import expose_from_pod
from harness.objects import read, read_all

Manifest = Mapping[str, Any]
T = TypeVar("T")
PSA: Final = "pod-security.kubernetes.io/enforce"
_VOLUME_SIZE: Final = "1Gi"
PATIENCE: Final = 600.0
"""Timeout of waits in seconds, far longer than they take even on a busy machine."""


@dataclass(frozen=True)
class Namespace:
    name: str

    @classmethod
    def create(cls, name: str) -> Namespace:
        """Create a namespace that enforces the restricted Pod Security Standard."""
        labels = {PSA: "restricted", f"{PSA}-version": "latest"}
        manifest = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}}
        kubectl("apply", "-f", "-", stdin=json.dumps(manifest))
        namespace = cls(name)
        # Pods are rejected until it exists.
        namespace.wait("the default service account", lambda: namespace.get("serviceaccounts", "default"))
        return namespace

    def delete(self, *, wait: bool = True) -> None:
        options = ("--ignore-not-found", f"--wait={str(wait).lower()}", f"--timeout={PATIENCE:.0f}s")
        kubectl("delete", "namespace", self.name, *options)
        # PersistentVolumes are not namespaced.
        kubectl("delete", "persistentvolume", "-l", f"e2e={self.name}", *options)

    def kubectl(self, *args: str, check: bool = True, stdin: str | None = None) -> str:
        return kubectl("-n", self.name, *args, check=check, stdin=stdin)

    def apply(self, *objects: Manifest) -> None:
        self.kubectl("apply", "-f", "-", stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": objects}))

    def get(self, resource: str, name: str) -> dict[str, Any] | None:
        """One object; None if it does not exist. `resource` is a plural, such as pods."""
        return read(self.name, resource, name)

    def objects(self, resource: str, selector: str = "") -> list[dict[str, Any]]:
        return read_all(self.name, resource, selector)

    def patch(self, kind: str, name: str, change: Manifest) -> None:
        """Apply a merge patch (RFC 7386)."""
        self.kubectl("patch", kind, name, "--type=merge", "-p", json.dumps(change))

    def wait(self, what: str, probe: Callable[[], T], seconds: float = PATIENCE) -> T:
        """Wait until the probe returns a true value; returns it. Raises TimeoutError."""
        end = time.monotonic() + seconds
        while True:
            value = probe()
            if value:
                return value
            if time.monotonic() > end:
                raise TimeoutError(f"waited {seconds:.0f} s for {what}")
            time.sleep(0.5)

    def status(self, model: str) -> dict[str, Any]:
        """Status of an InferenceModel; {} if it has none yet."""
        found = self.get("inferencemodels", model) or {}
        status: dict[str, Any] = found.get("status", {})
        return status

    def condition(self, model: str, kind: str) -> dict[str, str]:
        """Condition of an InferenceModel by type; {} if it does not exist."""
        conditions = self.status(model).get("conditions", [])
        return next((c for c in conditions if c["type"] == kind), {})

    def wait_for_condition(
        self, model: str, kind: str, status: str = "True", *, reason: str | None = None
    ) -> dict[str, str]:
        """Wait until the condition has this status (and reason) for the current generation; returns it."""

        def met() -> dict[str, str]:
            found = self.get("inferencemodels", model) or {"metadata": {}}
            generation = found["metadata"].get("generation")
            for condition in found.get("status", {}).get("conditions", []):
                current = condition.get("observedGeneration") == generation and condition["status"] == status
                if condition["type"] == kind and current and reason in (None, condition["reason"]):
                    current_condition: dict[str, str] = condition
                    return current_condition
            return {}

        return self.wait(f"{kind}={status} ({reason or 'any reason'}) of {model}", met)

    def pods(self, model: str, component: str) -> list[dict[str, Any]]:
        """Pods of a model that are not terminating; `component` is engine, frontend or fetch."""
        found = self.objects("pods", f"app.kubernetes.io/instance={model},app.kubernetes.io/component={component}")
        return [pod for pod in found if "deletionTimestamp" not in pod["metadata"]]

    def port_from_pod(self, pod: str, address: str) -> int:
        """Port of the host's loopback that is forwarded to IP:PORT in a pod's network while its container runs."""
        found = self.get("pods", pod)
        assert found is not None, f"no pod {pod}"
        container = found["status"]["containerStatuses"][0]["containerID"].removeprefix("containerd://")
        return expose_from_pod(found["spec"]["nodeName"], container, address)

    def mount_directory(self, claim: str, directory: Path, *, writable: bool = False) -> None:
        """Create a claim for a directory of the host, which all nodes mount."""
        mode = "ReadWriteMany" if writable else "ReadOnlyMany"
        spec = {
            "accessModes": [mode],
            "storageClassName": "",
            "volumeName": f"{self.name}-{claim}",
            "resources": {"requests": {"storage": _VOLUME_SIZE}},
        }
        claimed = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": claim}, "spec": spec}
        self.apply(self._volume(claim, directory, mode), claimed)

    def provide_volume(self, claim: str, directory: Path, mode: str) -> None:
        """Create a volume for a claim of this name, from a directory of the nodes."""
        self.apply(self._volume(claim, directory, mode))

    def _volume(self, claim: str, directory: Path, mode: str) -> Manifest:
        spec = {
            "capacity": {"storage": _VOLUME_SIZE},
            "accessModes": [mode],
            "storageClassName": "",
            "persistentVolumeReclaimPolicy": "Retain",
            "hostPath": {"path": str(directory), "type": "Directory"},
            "claimRef": {"namespace": self.name, "name": claim},
        }
        metadata = {"name": f"{self.name}-{claim}", "labels": {"e2e": self.name}}
        return {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": metadata, "spec": spec}

    def report(self) -> str:
        """Objects, status, events and the last lines of all logs, to understand a failure."""
        parts = [
            self.kubectl("get", "imodel,sts,deploy,job,pods,svc,pvc,netpol,pdb", "-o", "wide", check=False),
            self.kubectl("get", "imodel", "-o", "yaml", check=False),
            self.kubectl("get", "events", "--sort-by=.lastTimestamp", check=False),
        ]
        for pod in self.objects("pods"):
            name = pod["metadata"]["name"]
            parts.append(f"--- status of {name}\n{json.dumps(pod['status'].get('containerStatuses', []), indent=1)}")
            for which in ("", "--previous"):
                log = self.kubectl("logs", name, "--all-containers", "--tail=60", *which.split(), check=False)
                parts += [f"--- log of {name} {which}\n{log}"] if log else []
        return "\n".join(parts)
