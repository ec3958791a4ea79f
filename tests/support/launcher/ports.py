"""Free ports for programs that get their ports as flags."""

from __future__ import annotations

import os
import random
import socket

# Below the ports of outgoing connections (net.ipv4.ip_local_port_range, from 32768 on), any of which could take a port
# between the check here and a program's bind, or while that program restarts.
_FIRST, _LAST = 10_000, 29_999
_handed_out: set[int] = set()


def _share() -> range:
    """Ports of this worker of a parallel run. A port of another worker looks free while its program starts or
    restarts."""
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    # A worker that replaces a crashed one has a new number.
    number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % workers
    ports = range(_FIRST, _LAST + 1)
    size = len(ports) // workers
    return ports[number * size : (number + 1) * size]


def free_port() -> int:
    return free_ports(1)


def free_ports(count: int) -> int:
    """Return the first of `count` consecutive free ports that this process has not handed out before."""
    # Tests that seed the global generator must not get the same ports.
    choices, share = random.SystemRandom(), _share()
    while True:
        first = choices.randint(share[0], share[-count])
        ports = range(first, first + count)
        if _handed_out.isdisjoint(ports) and all(map(_is_free, ports)):
            _handed_out.update(ports)
            return first


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            # On all addresses, as programs that listen on all of them.
            probe.bind(("", port))
        except OSError:
            return False
        return True
