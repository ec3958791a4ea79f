"""Request headers by which a gateway tells for whom it forwards a request.

They are believed with `--trust-gateway`, and of the addresses that an operator names as its gateway's; see
`known_gateways`. Any client can send them. Elsewhere a gateway is one client, whose requests share what one may have.
"""

from __future__ import annotations

import re
from typing import Final

from starlette.datastructures import Headers

TENANT_HEADER: Final = "x-minisgl-tenant"
"""Whose request it is, for shares and logs."""
PRIORITY_HEADER: Final = "x-minisgl-priority"
"""Priority of the request, which the field `priority` of its body can only lower."""

_TENANT: Final = re.compile(r"[\x20-\x7e]{1,128}")
_PRIORITY: Final = re.compile(r"-?[0-9]{1,10}")


def given_tenant(headers: Headers) -> str:
    """Return the tenant that a gateway names; empty: none."""
    given = headers.get(TENANT_HEADER, "")
    return given if _TENANT.fullmatch(given) else ""


def given_priority(headers: Headers, own: int) -> int:
    """Return the priority of a request whose body has the priority `own`."""
    given = headers.get(PRIORITY_HEADER, "")
    if not _PRIORITY.fullmatch(given):
        return own
    return max(-(2**31), min(int(given) + min(own, 0), 2**31 - 1))
