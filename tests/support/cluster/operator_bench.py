"""`python -m support.cluster.operator_bench [options]`: `minisgl-operator bench` on its own etcd and kube-apiserver."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from minisgl_operator.__main__ import main
from support.cluster.control_plane import running_control_plane


def run(arguments: list[str]) -> int:
    with tempfile.TemporaryDirectory() as folder, running_control_plane(Path(folder)) as plane:
        # The benchmark plays the controllers' part.
        plane.stop("kube-controller-manager")
        return main(["bench", f"--kubeconfig={plane.kubeconfig}", *arguments])


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
