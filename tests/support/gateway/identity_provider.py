"""An identity provider on a port of the loopback, whose keys and documents a test changes."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import AsyncIterator
from typing import Any, Final

import jwt
from cryptography.hazmat.primitives.asymmetric import ec

from support.gateway.stub_frontend import Received, StubFrontend

AUDIENCE: Final = "minisgl"


def published(key: Any, kid: str, **fields: Any) -> dict[str, Any]:
    """Return the public part of a private key, as a provider lists it."""
    for algorithm in jwt.algorithms.get_default_algorithms().values():
        with contextlib.suppress(Exception):
            return {**algorithm.to_jwk(key.public_key(), as_dict=True), "kid": kid, **fields}
    raise AssertionError("no algorithm takes this key")


class IdentityProvider:
    """`stub` is its server. `keys` are what it publishes."""

    def __init__(self) -> None:
        self.stub = StubFrontend(handler=self._answer)
        self.key = ec.generate_private_key(ec.SECP256R1())
        """Key `one`, which signs tokens."""
        self.keys: Any = [published(self.key, "one")]
        self.discovery: dict[str, Any] = {}
        """Other fields of the document that names the keys' URL."""
        self.status = 200

    @property
    def issuer(self) -> str:
        return self.stub.url

    @property
    def fetches(self) -> int:
        """How often the keys were fetched."""
        return sum(request.path == "/keys" for request in self.stub.received)

    def token(self, *, key: Any = None, alg: str = "ES256", kid: str | None = "one", **claims: Any) -> str:
        """Return a token, valid unless `claims` say otherwise; None leaves one out."""
        given = {"iss": self.issuer, "aud": AUDIENCE, "exp": int(time.time()) + 600, "sub": "search", **claims}
        payload = {name: value for name, value in given.items() if value is not None}
        return jwt.encode(payload, key or self.key, alg, headers={} if kid is None else {"kid": kid})

    async def _answer(self, request: Received) -> None:
        if request.path == "/keys":
            body = self.keys if isinstance(self.keys, bytes) else json.dumps({"keys": self.keys}).encode()
            await request.answer(self.status, body)
        else:
            assert request.path == "/.well-known/openid-configuration"
            found = {"issuer": self.issuer, "jwks_uri": f"{self.issuer}/keys"} | self.discovery
            await request.answer(self.status, found)


@contextlib.asynccontextmanager
async def identity_provider() -> AsyncIterator[IdentityProvider]:
    provider = IdentityProvider()
    await provider.stub.start()
    try:
        yield provider
    finally:
        await provider.stub.stop()


def bearer(token: str) -> str:
    """Return the header with a token."""
    return f"authorization: Bearer {token}\r\n"
