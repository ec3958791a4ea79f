"""Requests of web pages, which control ports refuse, and names in the header `Host`.

Control ports need no keys, because probes have none. A browser sends requests of any page to any address, also to a
control port of the machine that it runs on. Probes, the operator and frontends are no browsers, and use addresses.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Sequence
from typing import Final

from minisgl.errors import CodedError

_TYPED_ADDRESS: Final = "none"
"""Value of `Sec-Fetch-Site` for an address that the user has typed."""


class WebPageError(CodedError):
    """A control port refuses a request, with HTTP status 403. `code` is stable; the message says what to do next."""


def check_control_request(values_of: Callable[[str], Sequence[str]], address: str) -> None:
    """Refuse requests of web pages to a control port. `values_of` returns all values of a header; `address` is the
    local address of the connection. Raises WebPageError."""
    # Pages send GET requests without an Origin. Browsers then name the page's relation to a loopback address.
    if values_of("origin") or any(value != _TYPED_ADDRESS for value in values_of("sec-fetch-site")):
        message = (
            "the control port serves no web pages; send the request from a program, without the headers Origin and "
            "Sec-Fetch-Site"
        )
        raise WebPageError("origin_not_allowed", message)
    # A page can make its own name resolve to a loopback address, and is then a page of this server for the browser.
    if is_loopback(address) and not all(means_this_machine(host_name(host)) for host in values_of("host")):
        message = "the header Host has a name that is not this server's; connect to localhost or to an address"
        raise WebPageError("host_not_allowed", message)


def host_name(host: str) -> str:
    """Return the name or address of `NAME`, `NAME:PORT`, `[ADDRESS]` or `[ADDRESS]:PORT`, in lower case."""
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    return name.lower().removesuffix(".")


def means_this_machine(name: str) -> bool:
    """Return whether a name that a client has connected to can only mean this machine: `localhost`, or an address,
    which nobody can make point elsewhere."""
    if name == "localhost":
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def is_loopback(address: str) -> bool:
    """Return whether only this machine can connect to an IP address."""
    parsed = ipaddress.ip_address(address)
    mapped = parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else None
    return (mapped or parsed).is_loopback
