"""Ports for programs that are told where to listen."""

from __future__ import annotations

import os
import random
import socket

# Below what Linux gives to outgoing connections (net.ipv4.ip_local_port_range, from 32768), any of which could take a
# port between our look at it and a program's bind, or while that program is started again.
_FIRST, _LAST = 10_000, 29_999
_handed_out: set[int] = set()


def _share() -> range:
    """The ports of this worker of a parallel run. What another worker was given looks free while nobody listens there:
    before its program does, and while that is started again."""
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    # A worker that takes the place of one that crashed has a number of its own.
    number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % workers
    ports = range(_FIRST, _LAST + 1)
    size = len(ports) // workers
    return ports[number * size : (number + 1) * size]


def free_port() -> int:
    return free_ports(1)


def free_ports(count: int) -> int:
    """The first of `count` consecutive ports that nobody listens on, and that this process was not given before."""
    # Tests that seed the common generator must not meet on the same ports.
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
            # On every address, as the programs that listen on all of them.
            probe.bind(("", port))
        except OSError:
            return False
        return True
