"""etcd, kube-apiserver and kube-controller-manager as plain processes on free ports of the loopback.

No root, no namespaces, no nodes: objects are stored, validated, defaulted, owned and collected as on any cluster, but
no pod ever runs. A test that needs a running pod writes its status itself. The first start on a machine builds
Kubernetes, which takes some minutes and prints its progress; the result is cached.
"""

from __future__ import annotations

import contextlib
import json
import os
import ssl
import subprocess
import time
import urllib.request
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypedDict

import msgspec
import pytest

from cluster import tools
from cluster.components import ControlPlane
from cluster.layout import GO
from support.launcher.ports import free_port

READY_SECONDS: Final = 180.0
DEFINITION_SECONDS: Final = 90.0
SERVICE_CIDR: Final = "10.96.0.0/16"


class AuditEvent(TypedDict, total=False):
    """The parts of an audit.k8s.io/v1 event that tests read."""

    verb: str
    requestURI: str
    userAgent: str
    user: dict[str, Any]
    objectRef: dict[str, str]
    responseStatus: dict[str, Any]


_AUDIT: Final = msgspec.json.Decoder(AuditEvent)


@dataclass
class LocalControlPlane:
    """A running control plane. `kubeconfig` is its administrator's. `definitions`: the CustomResourceDefinitions that
    are installed, and that no test changes."""

    plane: ControlPlane
    controllers_port: int
    definitions: set[str] = field(default_factory=set)
    _processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    _audit: list[AuditEvent] = field(default_factory=list)
    _audit_read: int = 0

    @property
    def url(self) -> str:
        return self.plane.url

    @property
    def kubeconfig(self) -> Path:
        return self.plane.kubeconfig("admin")

    def kubeconfig_for(self, user: str, group: str | None = None) -> Path:
        """A kubeconfig of a user whose permissions come only from RBAC."""
        name = "user-" + user.replace(":", "-")
        path = self.plane.kubeconfig(name)
        self.plane.prepare().kubeconfig(path, self.url, name, user, group)
        return path

    def kubectl(self, *args: str, check: bool = True, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
        """Run kubectl as the administrator. With `check`, an error raises an AssertionError with its output."""
        command = [str(tools.program("kubectl")), f"--kubeconfig={self.kubeconfig}", *args]
        done = subprocess.run(command, check=False, text=True, capture_output=True, input=stdin)
        assert not check or done.returncode == 0, f"kubectl {' '.join(args)}: {done.stderr}"
        return done

    def apply(self, *objects: Mapping[str, Any]) -> None:
        self.kubectl("apply", "-f", "-", stdin=_list(objects))

    def try_out(self, objects: Iterable[Mapping[str, Any]], *args: str) -> subprocess.CompletedProcess[str]:
        """Create the objects in a dry run of the API server, which must accept every one with all its fields."""
        return self.kubectl("create", "--dry-run=server", "--validate=strict", *args, "-f", "-", stdin=_list(objects))

    def wait_for_definition(self, name: str) -> None:
        """Wait until objects of a CustomResourceDefinition can be created. `kubectl wait` fails while it has no
        conditions yet."""
        path = '-o=jsonpath={.status.conditions[?(@.type=="Established")].status}'
        deadline = time.monotonic() + DEFINITION_SECONDS
        while self.kubectl("get", f"crd/{name}", path, check=False).stdout != "True":
            assert time.monotonic() < deadline, f"{name} is not established after {DEFINITION_SECONDS} s"
            time.sleep(0.05)

    def audit(self) -> list[AuditEvent]:
        """All requests so far, oldest first, as audit.k8s.io/v1 events at level Metadata."""
        with self.plane.audit_log.open("rb") as log:
            log.seek(self._audit_read)
            # The text after the last line break is incomplete.
            new = log.read().rpartition(b"\n")[0]
        if new:
            self._audit += map(_AUDIT.decode, new.split(b"\n"))
            self._audit_read += len(new) + 1
        return self._audit[:]

    def stop(self, component: str) -> None:
        """Stop a process, as in an outage, until `start`."""
        process = self._processes.pop(component)
        process.terminate()
        try:
            # The API server would wait a minute for its watchers.
            process.wait(2)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def start(self, component: str) -> None:
        """Start etcd, kube-apiserver or kube-controller-manager."""
        command = {
            "etcd": self.plane.etcd(),
            "kube-apiserver": self.plane.apiserver(),
            "kube-controller-manager": self.plane.controller_manager(self.controllers_port),
        }[component]
        with (self.plane.directory / f"{component}.log").open("ab") as log:
            self._processes[component] = subprocess.Popen(
                [str(tools.program(component)), *command[1:]],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.plane.directory,
                env={"PATH": os.environ["PATH"], "HOME": str(self.plane.directory), **GO},
            )

    def wait_until_ready(self) -> None:
        """Wait until the API server is ready and service accounts are created."""
        self._wait("/readyz")
        self._wait("/api/v1/namespaces/default/serviceaccounts/default")

    def _wait(self, path: str) -> None:
        pki = self.plane.pki
        end, problem = time.monotonic() + READY_SECONDS, ""
        while time.monotonic() < end:
            for name, process in self._processes.items():
                if process.poll() is not None:
                    words = (self.plane.directory / f"{name}.log").read_text(errors="replace")[-2000:]
                    raise RuntimeError(f"{name} ended with exit code {process.returncode}:\n{words}")
            try:
                context = ssl.create_default_context(cafile=pki / "ca.crt")
                context.load_cert_chain(pki / "admin.crt", pki / "admin.key")
                handlers = (urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context))
                with urllib.request.build_opener(*handlers).open(self.url + path, timeout=2):
                    return
            except OSError as error:
                problem = str(error)
            time.sleep(0.05)
        raise TimeoutError(f"{path} was not answered in {READY_SECONDS:.0f} s: {problem}")


def _list(objects: Iterable[Mapping[str, Any]]) -> str:
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": list(objects)})


@contextmanager
def running_control_plane(directory: Path) -> Iterator[LocalControlPlane]:
    """Start a control plane with its files in an empty directory, and stop it at the end. Raises
    tools.ToolchainMissing."""
    tools.directory(tools.KUBERNETES)
    plane = ControlPlane(
        directory=directory,
        ip="127.0.0.1",
        port=free_port(),
        etcd_port=free_port(),
        etcd_peer_port=free_port(),
        service_cidr=SERVICE_CIDR,
        service_api_ip="10.96.0.1",
        pod_cidr="10.244.0.0/16",
        has_nodes=False,
    )
    plane.prepare()
    running = LocalControlPlane(plane, free_port())
    with ExitStack() as stack:
        stack.callback(_end, running)
        for component in ("etcd", "kube-apiserver"):
            running.start(component)
        running._wait("/readyz")
        running.start("kube-controller-manager")
        running.wait_until_ready()
        yield running


def control_plane_or_skip(directory: Path) -> contextlib.AbstractContextManager[LocalControlPlane]:
    """Like running_control_plane, but skips the test where Go is not available; with CI=true that is a failure."""
    try:
        tools.directory(tools.KUBERNETES)
    except tools.ToolchainMissing as error:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(str(error))
    return running_control_plane(directory)


def _end(running: LocalControlPlane) -> None:
    """Kill the processes: their data is not kept, and the API server would wait for its watchers."""
    for process in running._processes.values():
        process.kill()
    for process in running._processes.values():
        process.wait()
