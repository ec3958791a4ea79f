"""Listening sockets: the API's port, other ports on the same host, control ports of pods on all addresses."""

from __future__ import annotations

import errno
import socket
from typing import Final

from minisgl.errors import CodedError
from minisgl.frontend.config import FrontendConfig
from minisgl.wire.listener import ALL_ADDRESSES, bind_tcp

BACKLOG: Final = 2048


class ServerError(CodedError):
    """The server cannot start. `code` is stable; the message says what to do next."""


def bind(config: FrontendConfig) -> socket.socket:
    """Bind the API's port, or take over the inherited socket. Raises ServerError."""
    if config.socket_fd is not None:
        return socket.socket(fileno=config.socket_fd)
    return bind_address(config.host, config.port)


def bind_address(host: str, port: int) -> socket.socket:
    """Bind a port of the address of `--host`. Raises ServerError."""
    try:
        return bind_tcp(host, port)
    except socket.gaierror as error:
        raise ServerError("bad_host", f"{host!r} is not a local address ({error}); set --host") from error
    except OSError as error:
        remedy = {
            errno.EADDRINUSE: "another process listens there; stop it, or choose another --port",
            errno.EACCES: "ports below 1024 need privileges; choose another --port",
            errno.EADDRNOTAVAIL: "no network interface has this address; set --host :: or 127.0.0.1",
        }.get(error.errno or 0, f"{error.strerror}; choose another --host or --port")
        raise ServerError("cannot_listen", f"cannot listen on {host}:{port}: {remedy}") from error


def bind_same_host(listener: socket.socket, port: int, flag: str) -> socket.socket:
    """Bind a port, which `flag` sets, on the address of `listener`. Raises ServerError."""
    try:
        return bind_tcp(listener.getsockname()[0], port)
    except OSError as error:
        raise _cannot_listen(port, error, flag) from error


def bind_all_addresses(port: int) -> socket.socket:
    """Bind the control port on all addresses. Raises ServerError."""
    try:
        listener = bind_tcp(ALL_ADDRESSES, port)
        listener.listen(BACKLOG)
    except OSError as error:
        raise _cannot_listen(port, error, "--control-port") from error
    return listener


def _cannot_listen(port: int, error: OSError, flag: str) -> ServerError:
    return ServerError("cannot_listen", f"cannot listen on port {port}: {error.strerror}; choose another {flag}")
