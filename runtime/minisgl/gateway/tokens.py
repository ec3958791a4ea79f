"""Access tokens of an identity provider (RFC 7519, RFC 9068): who a token names, and why one is refused. Pure, but for
the time of day, which its library reads.

What a token says is believed only after its signature. Errors contain nothing of a token that is not signed.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterable
from typing import Any, Final, NamedTuple

import msgspec

from minisgl.frontend.errors import ApiError
from minisgl.gateway.jwks import SigningKey

MAX_TOKEN: Final = 16 << 10
"""Characters of a token."""
LEEWAY_SECONDS: Final = 30.0
"""By how much our clock may differ from the provider's."""
_FORM: Final = re.compile(r"e[wy][A-Za-z0-9_-]*\.[A-Za-z0-9_-]*\.[A-Za-z0-9_-]*")
"""Three parts of base64, the first of which begins as a JSON object does."""
_MAX_NAME: Final = 128


class TokenRules(NamedTuple):
    """What a token must contain."""

    issuer: str
    audiences: tuple[str, ...]
    """One of them."""
    tenant_claim: str


class Header(msgspec.Struct):
    """The unsigned head of a token."""

    alg: str
    kid: str
    crit: Any = None
    """Extensions that must be understood. There is none that we know."""


class Verified(NamedTuple):
    """What a valid token says."""

    tenant: str
    expires_at: float
    """Unix time."""


def is_token(text: str) -> bool:
    """Return whether a key of a request has the form of a token."""
    return _FORM.fullmatch(text) is not None


def read_header(token: str) -> Header:
    """Return the head of a token. Raises ApiError."""
    if len(token) > MAX_TOKEN:
        raise refused(f"it has more than {MAX_TOKEN} characters")
    encoded = token.partition(".")[0]
    try:
        decoded = base64.urlsafe_b64decode(encoded + "=" * (-len(encoded) % 4))
        header = msgspec.json.decode(decoded, type=Header)
    except (binascii.Error, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise refused("its header is not that of a signed token with `alg` and `kid`") from None
    if header.crit is not None:
        raise refused("it needs extensions that are not known here")
    return header


def verified(token: str, header: Header, keys: Iterable[SigningKey], rules: TokenRules) -> Verified:
    """Return what a token says. `keys`: those with the identifier in its header. Raises ApiError."""
    import jwt

    key = next((each for each in keys if header.alg in each.algorithms), None)
    if key is None:
        # Such as `none`, or `HS256` with the public key as a secret.
        raise refused("its key is not used with its algorithm")
    try:
        claims = jwt.decode(
            token,
            key.public,
            algorithms=[header.alg],
            audience=rules.audiences,
            issuer=rules.issuer,
            leeway=LEEWAY_SECONDS,
            options={"require": ["exp", "iss", "aud"]},
        )
        expires_at = float(int(claims["exp"]))
    except jwt.ExpiredSignatureError:
        raise refused("it has expired; get a new one", "expired_token") from None
    except jwt.ImmatureSignatureError:
        raise refused("it is not valid yet") from None
    except jwt.InvalidAudienceError:
        raise refused("it is for another audience") from None
    except jwt.InvalidIssuerError:
        raise refused("it is from another issuer") from None
    except jwt.InvalidSignatureError:
        raise refused("its signature is not that of the provider's key") from None
    except jwt.MissingRequiredClaimError as error:
        raise refused(f"it has no claim `{error.claim}`") from None
    except (jwt.PyJWTError, ValueError, TypeError, OverflowError, RecursionError):
        raise refused("it cannot be read") from None
    tenant = claims.get(rules.tenant_claim)
    if not isinstance(tenant, str) or not tenant:
        raise refused("it has no text in the claim that names the tenant")
    return Verified(tenant, expires_at)


def refused(reason: str, code: str = "invalid_access_token") -> ApiError:
    """Make the error for a token that is not accepted. `reason`: about the token."""
    challenge = f'Bearer error="invalid_token", error_description="{reason}"'
    # The body is not read, so the connection cannot be used again.
    headers = {"www-authenticate": challenge, "connection": "close"}
    return ApiError(401, code, f"the access token is not accepted: {reason}", headers=headers)


def unknown_tenant(name: str, claim: str) -> ApiError:
    """Make the error for a valid token of a tenant that is not defined."""
    shown = name if len(name) <= _MAX_NAME else f"{name[:_MAX_NAME]}…"
    message = f"the access token's claim {claim!r} names the tenant {shown!r}, which this gateway does not know; add it"
    return ApiError(403, "unknown_tenant", f"{message} to the tenants of the gateway", headers={"connection": "close"})
