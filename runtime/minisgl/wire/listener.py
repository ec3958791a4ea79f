"""TCP sockets to listen on, over IPv4 and IPv6."""

from __future__ import annotations

import errno
import socket
from typing import Final

ALL_ADDRESSES: Final = "::"
"""Host that stands for all IPv6 and IPv4 addresses of this machine."""

# A kernel without IPv6, and one on which it is turned off.
_NO_IPV6: Final = (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL)


def bind_tcp(host: str, port: int) -> socket.socket:
    """Bind a socket without listening. ALL_ADDRESSES takes IPv6 and IPv4, or IPv4 alone where the kernel has no IPv6.
    Raises OSError."""
    if host == ALL_ADDRESSES:
        try:
            return _bound(socket.AF_INET6, (host, port, 0, 0), dual_stack=True)
        except OSError as error:
            if error.errno not in _NO_IPV6:
                raise
            return _bound(socket.AF_INET, ("0.0.0.0", port))
    family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    return _bound(family, address)


def _bound(family: int, address: tuple[object, ...], *, dual_stack: bool = False) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if dual_stack:
            # The system's default is a setting of the kernel.
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.bind(address)
    except OSError:
        listener.close()
        raise
    return listener
