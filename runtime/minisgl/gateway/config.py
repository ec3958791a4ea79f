"""Options of a gateway."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from minisgl.frontend.config import TraceOptions, WebAccess
from minisgl.logging import LogOptions
from minisgl.options import Count, Port, Seconds, option
from minisgl.wire.gateway import GATEWAY_CONTROL_PORT
from minisgl.wire.status import HTTP_PORT

MAX_BODY_BYTES: Final = 8 << 20
"""As in frontends."""
LEAVE_SECONDS: Final = 15.0
"""Time after SIGTERM in which a gateway in a cluster is not ready but accepts requests, so that it is noticed."""


class GatewayLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits on requests in progress, and on their times."""

    waiting: Annotated[
        Count, option("maximum number of requests that wait for a frontend; more are rejected with 429")
    ] = msgspec.field(default=1024, name="max_waiting")
    held_bytes: Annotated[Count, option("maximum size of the bodies of these requests", default="{} bytes")] = (
        msgspec.field(default=64 << 20, name="max_held_bytes")
    )
    queue_seconds: Annotated[
        Seconds, option("maximum time that a request waits for a frontend", default="{:g} seconds")
    ] = msgspec.field(default=600.0, name="queue_timeout")
    request_seconds: Annotated[
        Seconds, option("maximum time from the first byte of a request to its end", default="{:g} seconds")
    ] = msgspec.field(default=2400.0, name="request_timeout")


class OidcOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of an identity provider (OpenID Connect), whose tokens are accepted beside keys."""

    issuer: Annotated[
        str,
        option(
            "accept access tokens of this identity provider beside keys; as it writes itself in the claim `iss`",
            default="none",
            metavar="URL",
        ),
    ] = msgspec.field(default="", name="oidc_issuer")
    audiences: Annotated[
        tuple[str, ...],
        option(
            "names of this API at the provider, one of which a token must have in its claim `aud`",
            default="none; required with --oidc-issuer",
            metavar="LIST",
        ),
    ] = msgspec.field(default=(), name="oidc_audience")
    tenant_claim: Annotated[str, option("claim of a token that names its tenant")] = msgspec.field(
        default="sub", name="oidc_tenant_claim"
    )
    jwks_url: Annotated[
        str | None,
        option(
            "URL of the provider's keys",
            default="the one that ISSUER/.well-known/openid-configuration names",
            metavar="URL",
        ),
    ] = msgspec.field(default=None, name="oidc_jwks_url")


class RedisOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of the Redis in which several gateways count together."""

    url: Annotated[
        str,
        option(
            "count requests and tokens per minute in this Redis, together with all gateways that have the same; "
            "redis://[USER@]HOST[:PORT][/DATABASE], or rediss:// for TLS",
            default="none, each gateway counts for itself",
            metavar="URL",
        ),
    ] = msgspec.field(default="", name="redis")
    password_file: Annotated[
        str | None, option("file with the password of Redis", default="no password", metavar="FILE")
    ] = msgspec.field(default=None, name="redis_password_file")


class GatewayOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of `minisgl gateway`."""

    host: Annotated[str, option("address to listen on; :: for all IPv6 and IPv4 ones", metavar="ADDR")] = "127.0.0.1"
    port: Annotated[Port, option("TCP port of the API, 0 for a free one")] = HTTP_PORT
    control_port: Annotated[Port, option("TCP port of /live, /ready and /gateway/status, 0 for a free one")] = (
        GATEWAY_CONTROL_PORT
    )
    backends: tuple[str, ...] = ()
    """URLs of servers; empty: the models of a cluster."""
    namespaces: tuple[str, ...] = ()
    """Namespaces of the cluster; empty: all."""
    keys: Annotated[
        str | None,
        option(
            "YAML file with API keys, and what their tenants may use",
            default="no keys, every client may use the API",
            metavar="FILE",
        ),
    ] = None
    key_secrets: Annotated[
        bool,
        option(
            "require an API key of a Secret in the gateway's namespace with the label "
            "serving.minisgl.io/gateway-key=true",
            default="{}, every client may use the API",
        ),
    ] = False
    endpoint_picker_port: Annotated[
        Port | None,
        option(
            "TCP port at which Gateways ask for endpoints by the Endpoint Picker Protocol, 0 for a free one",
            default="off",
        ),
    ] = None
    endpoint_picker_plaintext: Annotated[
        bool, option("serve this port without TLS; otherwise its certificate is self-signed")
    ] = False
    endpoint_picker_single: Annotated[
        bool, option("name one endpoint for a request, for Gateways that cannot read a list; otherwise up to three")
    ] = False
    drain_timeout: Annotated[
        Seconds,
        option("time for running requests to finish after SIGTERM; a second signal stops them", default="{:g} seconds"),
    ] = 300.0
    oidc: OidcOptions = OidcOptions()
    redis: RedisOptions = RedisOptions()
    limits: GatewayLimits = GatewayLimits()
    access: WebAccess = WebAccess()
    traces: TraceOptions = TraceOptions()
    log: LogOptions = LogOptions()
