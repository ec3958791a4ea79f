"""Listening sockets: the API's port, the admin port on the same host, the control port on all addresses."""

from __future__ import annotations

import errno
import socket
from typing import Final

from minisgl.errors import CodedError
from minisgl.frontend.config import FrontendConfig

BACKLOG: Final = 2048


class ServerError(CodedError):
    """The server cannot start. `code` is stable; the message says what to do next."""


def bind(config: FrontendConfig) -> socket.socket:
    """Bind the API's port, or take over the inherited socket. Raises ServerError."""
    if config.socket_fd is not None:
        return socket.socket(fileno=config.socket_fd)
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except socket.gaierror as error:
        raise ServerError("bad_host", f"{config.host!r} is not a local address ({error}); set --host") from error
    except OSError as error:
        remedy = {
            errno.EADDRINUSE: "another process listens there; stop it, or choose another --port",
            errno.EACCES: "ports below 1024 need privileges; choose another --port",
            errno.EADDRNOTAVAIL: "no network interface has this address; set --host 0.0.0.0 or 127.0.0.1",
        }.get(error.errno or 0, f"{error.strerror}; choose another --host or --port")
        raise ServerError("cannot_listen", f"cannot listen on {config.host}:{config.port}: {remedy}") from error
    return listener


def bind_same_host(listener: socket.socket, port: int) -> socket.socket:
    """Bind the admin port on the address of `listener`. Raises ServerError."""
    bound = socket.socket(listener.family, listener.type)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        host, _, *rest = listener.getsockname()
        bound.bind((host, port, *rest))
    except OSError as error:
        bound.close()
        raise _cannot_listen(port, error, "--admin-port") from error
    return bound


def bind_all_addresses(port: int) -> socket.socket:
    """Bind the control port on all addresses. Raises ServerError."""
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    try:
        return socket.create_server(("", port), family=family, dualstack_ipv6=both, backlog=BACKLOG)
    except OSError as error:
        raise _cannot_listen(port, error, "--control-port") from error


def _cannot_listen(port: int, error: OSError, flag: str) -> ServerError:
    return ServerError("cannot_listen", f"cannot listen on port {port}: {error.strerror}; choose another {flag}")
