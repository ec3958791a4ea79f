"""A namespace of one test: apply, look, wait for conditions, and say what was there when a test failed."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from cluster.control_plane import kubectl
from cluster.places import CommandFailed

Manifest = Mapping[str, Any]
T = TypeVar("T")
PSA: Final = "pod-security.kubernetes.io/enforce"
PATIENCE: Final = 600.0
"""Seconds before what is waited for counts as never coming: far beyond what it takes, however busy the machine is."""


@dataclass(frozen=True)
class Namespace:
    name: str

    @classmethod
    def create(cls, name: str) -> Namespace:
        """One that enforces the restricted Pod Security Standard."""
        labels = {PSA: "restricted", f"{PSA}-version": "latest"}
        manifest = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}}
        kubectl("apply", "-f", "-", stdin=json.dumps(manifest))
        namespace = cls(name)
        # Pods are refused until it is there.
        namespace.wait("the default service account", lambda: namespace.get("serviceaccount", "default"))
        return namespace

    def delete(self, *, wait: bool = True) -> None:
        options = ("--ignore-not-found", f"--wait={str(wait).lower()}", f"--timeout={PATIENCE:.0f}s")
        kubectl("delete", "namespace", self.name, *options)
        # Its volumes have no namespace.
        kubectl("delete", "persistentvolume", "-l", f"e2e={self.name}", *options)

    def kubectl(self, *args: str, check: bool = True, stdin: str | None = None) -> str:
        return kubectl("-n", self.name, *args, check=check, stdin=stdin)

    def apply(self, *objects: Manifest) -> None:
        self.kubectl("apply", "-f", "-", stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": objects}))

    def refusal(self, manifest: Manifest) -> str:
        """What the API server says against it. Fails when it has nothing against it."""
        try:
            self.apply(manifest)
        except CommandFailed as error:
            return str(error)
        raise AssertionError(f"the API server accepted {json.dumps(manifest)}")

    def get(self, kind: str, name: str) -> dict[str, Any] | None:
        text = self.kubectl("get", kind, name, "-o", "json", "--ignore-not-found")
        return json.loads(text) if text.strip() else None

    def objects(self, kind: str, selector: str = "") -> list[dict[str, Any]]:
        options = [f"--selector={selector}"] if selector else []
        items: list[dict[str, Any]] = json.loads(self.kubectl("get", kind, *options, "-o", "json"))["items"]
        return items

    def patch(self, kind: str, name: str, change: Manifest) -> None:
        """Apply a merge patch (RFC 7386)."""
        self.kubectl("patch", kind, name, "--type=merge", "-p", json.dumps(change))

    def wait(self, what: str, probe: Callable[[], T], seconds: float = PATIENCE) -> T:
        """Until probe returns something true; returns that. Raises TimeoutError."""
        end = time.monotonic() + seconds
        while True:
            value = probe()
            if value:
                return value
            if time.monotonic() > end:
                raise TimeoutError(f"waited {seconds:.0f} s for {what}")
            time.sleep(0.5)

    def status(self, model: str) -> dict[str, Any]:
        """The status of an InferenceModel; {} when it has none yet."""
        found = self.get("inferencemodel", model) or {}
        status: dict[str, Any] = found.get("status", {})
        return status

    def condition(self, model: str, kind: str) -> dict[str, str]:
        """A condition of an InferenceModel; {} when it has none of this type."""
        conditions = self.status(model).get("conditions", [])
        return next((c for c in conditions if c["type"] == kind), {})

    def wait_for_condition(
        self, model: str, kind: str, status: str = "True", *, reason: str | None = None
    ) -> dict[str, str]:
        """Until the condition says so of the present generation; returns it."""

        def met() -> dict[str, str]:
            found = self.get("inferencemodel", model) or {"metadata": {}}
            generation = found["metadata"].get("generation")
            for condition in found.get("status", {}).get("conditions", []):
                current = condition.get("observedGeneration") == generation and condition["status"] == status
                if condition["type"] == kind and current and reason in (None, condition["reason"]):
                    said: dict[str, str] = condition
                    return said
            return {}

        return self.wait(f"{kind}={status} ({reason or 'any reason'}) of {model}", met)

    def pods(self, model: str, component: str) -> list[dict[str, Any]]:
        """Pods of a model that are not on their way out: component is engine, frontend or fetch."""
        found = self.objects("pods", f"app.kubernetes.io/instance={model},app.kubernetes.io/component={component}")
        return [pod for pod in found if "deletionTimestamp" not in pod["metadata"]]

    def mount_directory(self, claim: str, directory: Path, *, writable: bool = False) -> None:
        """A claim for a directory of the host, which every node sees."""
        volume = f"{self.name}-{claim}"
        size, modes = "1Gi", ["ReadWriteMany" if writable else "ReadOnlyMany"]
        self.apply(
            {
                "apiVersion": "v1",
                "kind": "PersistentVolume",
                "metadata": {"name": volume, "labels": {"e2e": self.name}},
                "spec": {
                    "capacity": {"storage": size},
                    "accessModes": modes,
                    "storageClassName": "",
                    "persistentVolumeReclaimPolicy": "Retain",
                    "hostPath": {"path": str(directory), "type": "Directory"},
                    "claimRef": {"namespace": self.name, "name": claim},
                },
            },
            {
                "apiVersion": "v1",
                "kind": "PersistentVolumeClaim",
                "metadata": {"name": claim},
                "spec": {
                    "accessModes": modes,
                    "storageClassName": "",
                    "volumeName": volume,
                    "resources": {"requests": {"storage": size}},
                },
            },
        )

    def report(self) -> str:
        """Everything that helps to understand a failure: objects, status, events, and the ends of all logs."""
        parts = [
            self.kubectl("get", "imodel,sts,deploy,job,pods,svc,pvc,netpol,pdb", "-o", "wide", check=False),
            self.kubectl("get", "imodel", "-o", "yaml", check=False),
            self.kubectl("get", "events", "--sort-by=.lastTimestamp", check=False),
        ]
        for pod in self.objects("pods"):
            name = pod["metadata"]["name"]
            parts.append(f"--- status of {name}\n{json.dumps(pod['status'].get('containerStatuses', []), indent=1)}")
            for which in ("", "--previous"):
                said = self.kubectl("logs", name, "--all-containers", "--tail=60", *which.split(), check=False)
                parts += [f"--- log of {name} {which}\n{said}"] if said else []
        return "\n".join(parts)
