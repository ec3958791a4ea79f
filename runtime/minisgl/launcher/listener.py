"""Sockets on which the launcher listens, or which it holds so that they outlive a frontend process."""

from __future__ import annotations

import os
import socket
from typing import Final

from minisgl.launcher.errors import LauncherError

_BACKLOG: Final = 64


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


def listen_on_all(name: str, port: int) -> socket.socket:
    """Listen on all IPv6 and IPv4 addresses of this machine, on the port that `--NAME-port` sets. Raises LauncherError
    `address_unavailable`."""
    dual_stack = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual_stack else socket.AF_INET
    try:
        return socket.create_server(("", port), family=family, backlog=_BACKLOG, dualstack_ipv6=dual_stack)
    except OSError as error:
        raise LauncherError(
            "address_unavailable",
            f"cannot listen on {name} port {port}: {error.strerror}. Choose another port with --{name}-port",
        ) from error
