"""Addresses of the gateway's pods, as the operator of a cluster names them with its probes.

Requests from these addresses come from the gateway, so what they say about tenant and priority is believed. Of all
others it is not, so that a client which connects to the frontend itself cannot call itself any tenant.
"""

from __future__ import annotations

from ipaddress import IPv6Address, ip_address
from typing import Final

_SECONDS: Final = 45.0
"""Time for which what was named counts. Another pod may get the address of a gateway that is gone."""


class KnownGateways:
    """`now` is the time of the event loop, in seconds."""

    def __init__(self) -> None:
        self._addresses: frozenset[str] = frozenset()
        self._until = 0.0

    def name(self, addresses: str, now: float) -> None:
        """Know these addresses from now on, separated by commas, and no others. Texts that are none have no effect."""
        found = (_canonical(each.strip()) for each in addresses.split(","))
        self._addresses, self._until = frozenset(filter(None, found)), now + _SECONDS

    def include(self, address: str, now: float) -> bool:
        """Return whether a connection from this address is one of a gateway."""
        return bool(self._addresses) and now < self._until and _canonical(address) in self._addresses


def _canonical(address: str) -> str:
    """One spelling of an IP address; empty for any other text. A socket for both families has IPv4 within IPv6."""
    try:
        found = ip_address(address)
    except ValueError:
        return ""
    mapped = found.ipv4_mapped if isinstance(found, IPv6Address) else None
    return str(mapped or found)
