"""Tenants by access tokens. A token is verified once, and remembered until it expires."""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import Final, NamedTuple

from minisgl.frontend.server.auth import key_digest
from minisgl.gateway.provider import Provider
from minisgl.gateway.tokens import TokenRules, read_header, verified

_MAX_REMEMBERED: Final = 8192
"""Tokens."""


class _Remembered(NamedTuple):
    tenant: str
    expires_at: float
    """Unix time."""
    version: int
    """Of the provider's keys."""


class Identities:
    """All methods belong to the event loop. A signature takes a tenth of a millisecond there, once for each token;
    the token itself is not kept."""

    def __init__(self, provider: Provider, rules: TokenRules) -> None:
        self.provider = provider
        self.rules = rules
        self._remembered: OrderedDict[bytes, _Remembered] = OrderedDict()
        """By the hash of the token; the one that was used last is the last."""

    async def tenant_name(self, token: str) -> str:
        """Return the name of the tenant of a token. Raises ApiError."""
        digest = key_digest(token)
        known = self._remembered.get(digest)
        if known is not None and known.version == self.provider.version and time.time() < known.expires_at:
            self._remembered.move_to_end(digest)
            return known.tenant
        self._remembered.pop(digest, None)
        header = read_header(token)
        keys = await self.provider.find(header.kid)
        found = verified(token, header, keys, self.rules)
        self._remembered[digest] = _Remembered(found.tenant, found.expires_at, self.provider.version)
        if len(self._remembered) > _MAX_REMEMBERED:
            self._remembered.popitem(last=False)
        return found.tenant
