"""The keys of an identity provider, which are fetched over HTTPS and kept while it does not answer."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import random
import ssl
from typing import Final, NamedTuple
from urllib.parse import urlsplit

import msgspec

from minisgl.errors import CodedError, describe
from minisgl.frontend.errors import ApiError
from minisgl.gateway.config import OidcOptions
from minisgl.gateway.jwks import SigningKey, read_keys
from minisgl.gateway.models import Address
from minisgl.gateway.tokens import refused
from minisgl.gateway.upstream import Client

logger = logging.getLogger(__name__)

_DISCOVERY: Final = "/.well-known/openid-configuration"
_CONNECT_SECONDS: Final = 5.0
_FETCH_SECONDS: Final = 10.0
_MAX_DOCUMENT: Final = 512 << 10
"""Bytes of a document of the provider."""
_MAX_SHOWN: Final = 200
"""Characters of what it says that are logged."""
_REFRESH_SECONDS: Final = 600.0
_LEAST_SECONDS: Final = 10.0
"""Between two fetches for tokens with unknown keys: anybody can send such tokens."""
_FIRST_PAUSE: Final = 1.0
_LAST_PAUSE: Final = 60.0
"""Between two attempts while the provider does not answer."""


class ProviderError(CodedError):
    """The options of the identity provider cannot be used."""

    def __init__(self, message: str) -> None:
        super().__init__("invalid_identity_provider", message)


class _FetchError(Exception):
    """The provider does not answer, or not with what it should."""


class _Url(NamedTuple):
    address: Address
    path: str
    is_secure: bool


class _Discovery(msgspec.Struct):
    issuer: str
    jwks_uri: str


class Provider:
    """Source of the keys. All methods belong to the event loop."""

    def __init__(self, options: OidcOptions) -> None:
        """Raises ProviderError."""
        # Here, before there are requests: it takes a while.
        import jwt.algorithms  # noqa: F401

        self._issuer = options.issuer
        self._discovery = _parsed(options.issuer.rstrip("/") + _DISCOVERY, "--oidc-issuer")
        self._keys_url = None if options.jwks_url is None else _parsed(options.jwks_url, "--oidc-jwks-url")
        self._plain = Client(_CONNECT_SECONDS)
        self._secure = Client(_CONNECT_SECONDS, ssl.create_default_context())
        self._document = b""
        self._keys: dict[str, tuple[SigningKey, ...]] = {}
        self._problem = ""
        self._fetching: asyncio.Task[None] | None = None
        self._tried_at: float | None = None
        self.version = 0
        """Number of the set of keys: what an older one has verified may no longer be valid."""
        self.failures = 0
        """Fetches that failed."""

    @property
    def key_count(self) -> int:
        return sum(map(len, self._keys.values()))

    async def run(self) -> None:
        """Keep the keys up to date until cancelled."""
        pause = _FIRST_PAUSE
        try:
            while True:
                await self._fetch()
                seconds, pause = (pause, min(2 * pause, _LAST_PAUSE)) if self._problem else (_REFRESH_SECONDS, 1.0)
                await asyncio.sleep(seconds * random.uniform(0.8, 1.2))
        finally:
            if self._fetching is not None:
                self._fetching.cancel()
            self._plain.close()
            self._secure.close()

    async def find(self, identifier: str) -> tuple[SigningKey, ...]:
        """Return the keys with an identifier. Keys are fetched for one that is not known. Raises ApiError if there is
        none, with 503 where the provider may have one by now."""
        if not (found := self._keys.get(identifier)):
            now = asyncio.get_running_loop().time()
            if self._fetching is not None or self._tried_at is None or now >= self._tried_at + _LEAST_SECONDS:
                await self._fetch()
            found = self._keys.get(identifier)
        if found:
            return found
        if self._problem:
            raise ApiError(503, "provider_unavailable", "the identity provider does not give its keys; retry")
        raise refused("the identity provider has no key with its `kid`")

    async def _fetch(self) -> None:
        """Fetch the keys once, together with all who wait for them."""
        if self._fetching is None:
            self._tried_at = asyncio.get_running_loop().time()
            self._fetching = asyncio.create_task(self._renew())
        await asyncio.shield(self._fetching)

    async def _renew(self) -> None:
        """Replace the keys. Those that there are stay if the provider has no others."""
        try:
            async with asyncio.timeout(_FETCH_SECONDS):
                document = await self._read(self._keys_url or await self._discovered())
            if document != self._document:
                self._keys = read_keys(document)
                self._document = document
                self.version += 1
                logger.info("read %d keys of the identity provider %s", self.key_count, self._issuer)
            self._problem = ""
        except Exception as error:
            # Whatever the provider sends, models must not be lost with it.
            reason = f"no answer within {_FETCH_SECONDS:g} s" if isinstance(error, TimeoutError) else describe(error)
            self.failures += 1
            if reason != self._problem:
                kept = f"keeping its {self.key_count} keys" if self._keys else "its tokens are not accepted"
                logger.warning("cannot read the keys of the identity provider: %s; %s", reason, kept)
            self._problem = reason
        finally:
            self._fetching = None

    async def _discovered(self) -> _Url:
        """Return where the provider says that its keys are."""
        try:
            found = msgspec.json.decode(await self._read(self._discovery), type=_Discovery)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            raise _FetchError(f"{self._issuer}{_DISCOVERY} has no `issuer` and `jwks_uri`") from None
        if found.issuer != self._issuer:
            # OpenID Connect Discovery, section 4.3.
            raise _FetchError(f"the provider calls itself {found.issuer[:_MAX_SHOWN]!r}; write --oidc-issuer so")
        try:
            return _parsed(found.jwks_uri, "jwks_uri")
        except ProviderError as error:
            raise _FetchError(error.message) from None

    async def _read(self, url: _Url) -> bytes:
        """Return a document. Redirects are not followed."""
        client, body = self._secure if url.is_secure else self._plain, b""
        async with client.reading(url.address, url.path, {}) as exchange:
            if exchange.status != 200:
                raise _FetchError(f"status {exchange.status} for GET {url.path}")
            async for piece in exchange.pieces():
                body += piece
                if len(body) > _MAX_DOCUMENT:
                    raise _FetchError(f"GET {url.path} has more than {_MAX_DOCUMENT} bytes")
        return body


def _parsed(url: str, name: str) -> _Url:
    """Return the parts of a URL. Raises ProviderError."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
    except ValueError:
        parts, host, port = urlsplit(""), "", None
    is_secure = parts.scheme == "https"
    is_open = parts.scheme == "http" and _is_this_machine(host)
    is_plain = url.isascii() and url.isprintable() and " " not in url
    if not host or not is_plain or not (is_secure or is_open) or parts.username is not None or parts.fragment:
        message = f"{name} {url} cannot be used; write https://HOST/PATH (http only for a server on this machine)"
        raise ProviderError(message)
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return _Url(Address(host, port or (443 if is_secure else 80)), path, is_secure)


def _is_this_machine(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
