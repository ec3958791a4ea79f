"""Access to the API server from a pod: its address, and the files of the pod's service account."""

from __future__ import annotations

import os
import ssl
from pathlib import Path
from typing import Final

import msgspec

from minisgl.errors import CodedError
from minisgl.gateway.models import Address
from minisgl.version import __version__

_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")


class ClusterError(CodedError):
    """There is no cluster that the gateway can ask for models."""


class ClusterAccess(msgspec.Struct, frozen=True):
    """Address of the API server and the files with credentials."""

    address: Address
    ca_file: Path
    token_file: Path
    namespace: str
    """Namespace of the gateway."""

    @classmethod
    def from_pod(cls) -> ClusterAccess:
        """Return the access that every pod has. Raises ClusterError outside of a cluster."""
        host, port = os.environ.get("KUBERNETES_SERVICE_HOST", ""), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
        try:
            namespace = (_ACCOUNT / "namespace").read_text().strip()
        except OSError:
            namespace = ""
        if not host or not namespace:
            message = "this is no pod with a service account; give the servers of this machine with --backend URL"
            raise ClusterError("no_cluster", message)
        return cls(Address(host, int(port)), _ACCOUNT / "ca.crt", _ACCOUNT / "token", namespace)

    def headers(self) -> dict[str, str]:
        """Return the headers that authenticate a request, and name its sender in audit logs. The token is read each
        time: the kubelet replaces it."""
        token = self.token_file.read_text().strip()
        return {"authorization": f"Bearer {token}", "user-agent": f"minisgl-gateway/{__version__}"}

    def tls(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=str(self.ca_file))
