"""Process of a relay: run as `python -m cluster.relay_process DESCRIPTOR TARGET`. Scenarios start several each, so it
imports hardly anything."""

from __future__ import annotations

import contextlib
import socket
import sys
import threading

REFUSED = "connection refused at the target"
"""What a client of a relay receives when the target refuses the connection, as a Service without endpoints does. HTTP
clients report it as an answer that is malformed."""


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


if __name__ == "__main__":
    relay(int(sys.argv[1]), sys.argv[2])
