"""Sockets on which the launcher listens, or which it holds so that they outlive a frontend process."""

from __future__ import annotations

import os
import socket
from typing import Final

from minisgl.errors import LauncherError
from minisgl.wire.listener import ALL_ADDRESSES, bind_tcp

_BACKLOG: Final = 64


def bind(host: str, port: int) -> socket.socket:
    """Bind a socket without listening, before minutes of loading, so that a port in use is reported early. Raises
    LauncherError `address_unavailable`."""
    try:
        return bind_tcp(host, port)
    except OSError as error:
        reason = error.strerror or os.strerror(error.errno or 0)
        raise LauncherError(
            "address_unavailable",
            f"cannot listen on {host} port {port}: {reason}. Choose another with --host or --port (0: any free port)",
        ) from error


def listen_on_all(name: str, port: int) -> socket.socket:
    """Listen on all IPv6 and IPv4 addresses of this machine, on the port that `--NAME-port` sets. Raises LauncherError
    `address_unavailable`."""
    try:
        listener = bind_tcp(ALL_ADDRESSES, port)
        listener.listen(_BACKLOG)
    except OSError as error:
        raise LauncherError(
            "address_unavailable",
            f"cannot listen on {name} port {port}: {error.strerror}. Choose another port with --{name}-port",
        ) from error
    return listener
