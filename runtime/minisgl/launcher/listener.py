"""The listening socket for clients, held by the launcher so that it outlives a frontend process."""

from __future__ import annotations

import os
import socket

from minisgl.launcher.errors import LauncherError


def bind(host: str, port: int) -> socket.socket:
    """Bind a socket without listening, before minutes of loading, so that a port in use is reported early. Raises
    LauncherError `address_unavailable`."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        reason = error.strerror or os.strerror(error.errno or 0)
        raise LauncherError(
            "address_unavailable",
            f"cannot listen on {host} port {port}: {reason}. Choose another with --host or --port (0: any free port)",
        ) from error
    return listener


def url_host(listener: socket.socket) -> str:
    """Address of the socket as a URL contains it."""
    host: str = listener.getsockname()[0]
    return f"[{host}]" if listener.family == socket.AF_INET6 else host
