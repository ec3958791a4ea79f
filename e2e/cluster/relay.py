"""Ports of the host's loopback that are forwarded to an address inside a place."""

from __future__ import annotations

import contextlib
import socket
import sys
import threading

from cluster.certificates import write_if_changed
from cluster.containers import ctr
from cluster.control_plane import PLANE
from cluster.layout import API, HOST_KUBECONFIG, STATE
from cluster.places import CONTROL, pid_of, start

REFUSED = "connection refused at the target"
"""What a client of a relay receives when the target refuses the connection, as a Service without endpoints does. HTTP
clients report it as an answer that is malformed."""


def expose(place: str, target: str) -> int:
    """Forward a port on 127.0.0.1 to `target` ("10.96.1.2:80" or "[fd00::2]:80") in the network of the place; returns
    the port, which is the same for the same arguments."""
    name, note = f"relay-{target}", STATE / place / f"relay-{target}.port"
    if not pid_of(name, place):
        # The socket is created on the host and accepts there; the process that connects runs in the place.
        with socket.create_server(("127.0.0.1", 0)) as server:
            descriptor = server.fileno()
            command = [sys.executable, "-m", "cluster", "relay", str(descriptor), target]
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
            command += [sys.executable, "-m", "cluster", "relay", str(descriptor), target]
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


def relay(descriptor: int, target: str) -> None:
    """Accept connections from an inherited socket forever, and copy data in both directions."""
    ip, port = target.rsplit(":", 1)
    ip = ip.strip("[]")
    listener = socket.socket(fileno=descriptor)
    while True:
        client = listener.accept()[0]
        try:
            server = socket.create_connection((ip, int(port)), timeout=5)
        except ConnectionRefusedError:
            threading.Thread(target=_tell_refused, args=(client,), daemon=True).start()
            continue
        except OSError:
            client.close()
            continue
        server.settimeout(None)
        for pair in ((client, server), (server, client)):
            threading.Thread(target=_copy, args=pair, daemon=True).start()


def _tell_refused(client: socket.socket) -> None:
    with client, contextlib.suppress(OSError):
        client.settimeout(5)
        client.sendall(f"{REFUSED}\r\n\r\n".encode())
        client.shutdown(socket.SHUT_WR)
        # To close a connection with unread data would reset it, and the client might lose what was sent.
        while client.recv(65536):
            pass


def _copy(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            sink.sendall(data)
    with contextlib.suppress(OSError):
        sink.shutdown(socket.SHUT_WR)
