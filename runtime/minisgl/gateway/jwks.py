"""Public keys of an identity provider (RFC 7517): which of them may sign tokens, and how. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from minisgl.errors import describe

_RSA: Final = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512")
_PERMITTED: Final[Mapping[tuple[str, str], tuple[str, ...]]] = {
    ("RSA", ""): _RSA,
    ("EC", "P-256"): ("ES256",),
    ("EC", "P-384"): ("ES384",),
    ("EC", "P-521"): ("ES512",),
    ("OKP", "Ed25519"): ("EdDSA",),
    ("OKP", "Ed448"): ("EdDSA",),
}
"""Algorithms by type and curve of a key. None of them has a secret that we would share with the provider."""
_RSA_BITS: Final = range(2048, 8193)
"""Shorter keys are not safe, and longer ones take too long."""
_MAX_KEYS: Final = 100
_MAX_ID: Final = 256
"""Characters of a key's identifier."""


class KeySetError(Exception):
    """The document has no key that can be used."""


@dataclass(frozen=True)
class SigningKey:
    """A public key, and the algorithms that may be used with it."""

    public: Any
    """Object of the library `cryptography`."""
    algorithms: tuple[str, ...]


class _KeySet(msgspec.Struct):
    keys: list[msgspec.Raw]


def read_keys(document: bytes) -> dict[str, tuple[SigningKey, ...]]:
    """Return the usable keys of a key set by their identifiers, which may be those of keys of several types. Others are
    left out. Raises KeySetError if there is none."""
    try:
        found = msgspec.json.decode(document, type=_KeySet).keys
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise KeySetError(f"it is no set of keys: {describe(error)}") from None
    keys: dict[str, tuple[SigningKey, ...]] = {}
    for raw in found[:_MAX_KEYS]:
        try:
            fields = msgspec.json.decode(raw, type=dict[str, Any])
        except (msgspec.MsgspecError, RecursionError):
            continue
        identifier, key = fields.get("kid"), _signing_key(fields)
        if key is not None and isinstance(identifier, str) and 0 < len(identifier) <= _MAX_ID:
            keys[identifier] = (*keys.get(identifier, ()), key)
    if not keys:
        raise KeySetError("it has no public key with a `kid` that may sign tokens")
    return keys


def _signing_key(fields: dict[str, Any]) -> SigningKey | None:
    import jwt
    from cryptography.exceptions import UnsupportedAlgorithm

    kind, operations = fields.get("kty"), fields.get("key_ops")
    curve = "" if kind == "RSA" else fields.get("crv")
    is_for_signatures = fields.get("use", "sig") == "sig" and (
        operations is None or (isinstance(operations, list) and "verify" in operations)
    )
    # A key with a secret part is not published, but lost.
    if not isinstance(kind, str) or not isinstance(curve, str) or not is_for_signatures or "d" in fields:
        return None
    named = fields.get("alg")
    algorithms = tuple(each for each in _PERMITTED.get((kind, curve), ()) if named is None or named == each)
    if not algorithms:
        return None
    try:
        public = jwt.PyJWK(fields, algorithm=algorithms[0]).key
    except (jwt.PyJWTError, UnsupportedAlgorithm, ValueError, TypeError, OverflowError):
        # Where only approved algorithms work (FIPS), a library refuses the others.
        return None
    return None if kind == "RSA" and public.key_size not in _RSA_BITS else SigningKey(public, algorithms)
