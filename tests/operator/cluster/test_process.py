"""The operator as a process: its signals and its Lease."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from http.client import HTTPConnection
from pathlib import Path

from support.cluster.control_plane import LocalControlPlane
from support.cluster.operated_cluster import OperatedCluster, pvc_model
from support.launcher.ports import free_port

ROOT = Path(__file__).parents[3]


def test_a_signal_ends_the_process_which_releases_its_lease(control_plane: LocalControlPlane, tmp_path: Path) -> None:
    """A kubelet's or Prometheus' open connection does not delay that."""
    port = free_port()
    with OperatedCluster(control_plane) as cluster:
        command = [
            *(sys.executable, "-m", "minisgl_operator", "run", f"--kubeconfig={control_plane.kubeconfig}"),
            *(f"--namespace={cluster.namespace}", f"--watch-namespace={cluster.namespace}", f"--metrics-port={port}"),
            *("--engine-image=e:1", "--frontend-image=f:1"),
        ]
        path = os.pathsep.join(str(ROOT / folder) for folder in ("runtime", "operator"))
        log = tmp_path / "log"
        with log.open("w") as output:
            process = subprocess.Popen(command, stdout=output, stderr=output, env={**os.environ, "PYTHONPATH": path})
        try:
            cluster.apply(pvc_model("watched"))
            cluster.until(lambda: cluster.get("StatefulSet", "watched-r0"), "a reconcile")
            cluster.delete("StatefulSet", "watched-r0")
            cluster.until(lambda: cluster.list("StatefulSet"), "another one, which a watch triggers")
            connection = HTTPConnection("127.0.0.1", port, timeout=30)
            connection.request("GET", "/healthz")
            assert connection.getresponse().read() == b"ok\n"
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0, log.read_text()
        finally:
            process.kill()
            process.wait()
        lease = ("get", "lease", "minisgl-operator", "-n", cluster.namespace, "-o", "jsonpath={.spec.holderIdentity}")
        assert control_plane.kubectl(*lease).stdout == ""
        assert "Traceback" not in log.read_text()
