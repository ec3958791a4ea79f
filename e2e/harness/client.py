"""OpenAI clients that reach a model's Service from a pod of its namespace, so that network policies apply to them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import httpx
from openai import OpenAI

from cluster.layout import in_url
from harness.namespace import Manifest, Namespace

RESTRICTED: Final = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}


@dataclass(frozen=True)
class ClientPod:
    """An idle pod, from whose network namespace connections are made."""

    namespace: Namespace
    name: str = "client"

    @classmethod
    def create(cls, namespace: Namespace, image: str, name: str = "client", node: str = "") -> ClientPod:
        """Create the pod, on this node if one is named, and wait until it is Ready."""
        namespace.apply(manifest(name, image, node))

        def ready() -> bool:
            found = namespace.get("pods", name) or {}
            conditions = found.get("status", {}).get("conditions", [])
            return any((c["type"], c["status"]) == ("Ready", "True") for c in conditions)

        namespace.wait(f"pod {name}", ready)
        return cls(namespace, name)

    def port_to(self, address: str) -> int:
        """Port of the host's loopback that is forwarded to IP:PORT in the pod's network."""
        return self.namespace.port_from_pod(self.name, address)

    def service_url(self, service: str) -> str:
        """URL on the host that is forwarded to port 80 of a Service's cluster IP."""
        found = self.namespace.get("services", service)
        assert found is not None, f"no Service {service}"
        return f"http://127.0.0.1:{self.port_to(in_url(found['spec']['clusterIP']) + ':80')}"

    def pod_url(self, pod: Manifest) -> str:
        """URL on the host that is forwarded to a frontend pod, past its Service."""
        return f"http://127.0.0.1:{self.port_to(in_url(pod['status']['podIP']) + ':8000')}"

    def openai(self, service: str, api_key: str = "none") -> OpenAI:
        """Client without retries. Waits until the Service answers: nodes learn of its endpoints a moment after the API
        server."""
        url = self.service_url(service)

        def answers() -> bool:
            try:
                httpx.get(f"{url}/health", timeout=10)
            except httpx.HTTPError:
                return False
            return True

        self.namespace.wait(f"an answer of Service {service}", answers)
        return OpenAI(base_url=f"{url}/v1", api_key=api_key, max_retries=0, timeout=120)

    def run(self, *command: str, check: bool = True) -> str:
        """Run a command in the pod, whose image has Python; returns its output."""
        return self.namespace.kubectl("exec", self.name, "--", *command, check=check)


def manifest(name: str, image: str, node: str = "") -> dict[str, Any]:
    # Process 1 does not receive signals without a handler: `sleep` would use the whole grace period.
    wait = "import signal; signal.signal(signal.SIGTERM, lambda *_: exit()); signal.pause()"
    container = {"name": "client", "image": image, "command": ["python3", "-c", wait], "securityContext": RESTRICTED}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {"app": name}},
        "spec": {
            **({"nodeSelector": {"kubernetes.io/hostname": node}} if node else {}),
            "automountServiceAccountToken": False,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": 65532,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [container],
        },
    }
