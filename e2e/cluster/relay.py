"""Ports of the host's loopback that are forwarded to an address inside a place."""

from __future__ import annotations

import socket
import sys

from cluster.certificates import write_if_changed
from cluster.containers import ctr
from cluster.control_plane import PLANE
from cluster.layout import API, HOST_KUBECONFIG, STATE
from cluster.places import CONTROL, pid_of, start


def expose(place: str, target: str) -> int:
    """Forward a port on 127.0.0.1 to `target` ("10.96.1.2:80" or "[fd00::2]:80") in the network of the place; returns
    the port, which is the same for the same arguments."""
    name, note = f"relay-{target}", STATE / place / f"relay-{target}.port"
    if not pid_of(name, place):
        # The socket is created on the host and accepts there; the process that connects runs in the place.
        with socket.create_server(("127.0.0.1", 0)) as server:
            descriptor = server.fileno()
            command = [sys.executable, "-m", "cluster.relay_process", str(descriptor), target]
            start(place, name, *command, keep=[descriptor])
            note.write_text(str(server.getsockname()[1]))
    return int(note.read_text())


def expose_from_pod(node: str, container: str, target: str) -> int:
    """Forward a port to `target` from the network of a pod, so that network policies apply.

    `container` is the ID of a running container of the pod, without "containerd://".
    """
    name, note = f"relay-{container[:12]}-{target}", STATE / node / f"relay-{container[:12]}-{target}.port"
    if not pid_of(name, node):
        tasks = {fields[0]: fields[1] for fields in map(str.split, ctr(node, "task", "ls").splitlines())}
        with socket.create_server(("127.0.0.1", 0)) as server:
            descriptor = server.fileno()
            command = ["nsenter", f"--net=/proc/{tasks[container]}/ns/net"]
            command += [sys.executable, "-m", "cluster.relay_process", str(descriptor), target]
            start(node, name, *command, keep=[descriptor])
            note.write_text(str(server.getsockname()[1]))
    return int(note.read_text())


def host_kubeconfig() -> str:
    """Write a kubeconfig for programs on the host; returns its path."""
    port = expose(CONTROL, API.removeprefix("https://"))
    text = PLANE.kubeconfig("admin").read_text().replace(API, f"https://127.0.0.1:{port}")
    write_if_changed(HOST_KUBECONFIG, text)
    HOST_KUBECONFIG.chmod(0o600)
    return str(HOST_KUBECONFIG)
