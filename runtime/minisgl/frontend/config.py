"""Configuration of a frontend: plain data, cheap to import for launchers."""

from __future__ import annotations

from typing import Annotated

import msgspec

from minisgl.options import Count, Port, Seconds, Share, option
from minisgl.router.config import TokenizerConfig
from minisgl.wire.status import HTTP_PORT


class RequestLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits on requests in progress, and on their times; times in seconds."""

    waiting: Annotated[
        Count, option("maximum number of requests without a token, counting each choice; more are rejected with 429")
    ] = msgspec.field(default=1024, name="max_waiting")
    waiting_tokens: Annotated[Count, option("maximum number of prompt tokens of these requests")] = msgspec.field(
        default=2 << 20, name="max_waiting_tokens"
    )
    held_bytes: Annotated[
        Count,
        option("maximum size of all request bodies that wait because no engine is connected", default="{} bytes"),
    ] = msgspec.field(default=64 << 20, name="max_held_bytes")
    in_flight: int = 8192
    """Most HTTP requests whose response is not complete."""
    reading_bytes: int = 128 << 20
    """Most bytes of bodies that have arrived in part."""
    asked_bytes: int = 8 << 20
    """Most bytes of the questions to tokenizer workers that are not answered: texts whose tokens are asked for."""
    checking: int = 64
    """Most requests whose constraints wait for a check, which takes up to a second on one of two threads."""
    in_flight_per_key: Annotated[
        Count | None, option("maximum number of choices in flight per API key", default="no limit per key")
    ] = msgspec.field(default=None, name="max_in_flight_per_key")
    queue_seconds: Annotated[Seconds, option("maximum time of a request in the queue", default="{:g} seconds")] = (
        msgspec.field(default=60.0, name="queue_timeout")
    )
    request_seconds: Annotated[
        Seconds, option("maximum time from the first byte of a request to its end", default="{:g} seconds")
    ] = msgspec.field(default=1800.0, name="request_timeout")
    stall_seconds: Annotated[
        Seconds,
        option(
            "maximum time of a step; together with --queue-timeout, that of a running request without progress",
            default="{:g} seconds",
        ),
    ] = msgspec.field(default=60.0, name="stall_timeout")
    continues: Annotated[
        bool,
        option("continue an answer with output when its engine is lost", default="off, answers are continued"),
    ] = msgspec.field(default=True, name="continue")
    body_seconds: float = 30.0
    """Longest time from the headers of a request to the end of its body."""
    send_seconds: float = 30.0
    """Longest time that a client may read nothing of what waits for it."""
    unsent_bytes: int = 1 << 20
    """Most text that may wait for such a client."""


class WebAccess(msgspec.Struct, frozen=True, kw_only=True):
    """Access to the API by web pages."""

    cors_origins: Annotated[
        tuple[str, ...],
        option(
            "origins whose web pages may use the API from a browser, such as https://a.example,https://b.example, or *",
            default="none",
            metavar="LIST",
        ),
    ] = ()
    allowed_origins: Annotated[
        tuple[str, ...],
        option(
            "origins whose web pages may send requests, beside the server's own and those of --cors-origins, or *",
            default="none",
            metavar="LIST",
        ),
    ] = ()
    allowed_hosts: Annotated[
        tuple[str, ...],
        option(
            "names in the header Host, beside localhost and IP addresses, or *",
            default="none if --host is a loopback address, otherwise all",
            metavar="LIST",
        ),
    ] = ()


class Access(WebAccess, frozen=True, kw_only=True):
    """Access to the API and to the admin API."""

    api_keys: Annotated[
        str | None,
        option(
            "file with one API key per line, optionally followed by a name",
            default="no keys, every client may use the API",
            metavar="FILE",
        ),
    ] = None
    trust_gateway: Annotated[
        bool,
        option(
            "believe what a gateway says about the tenant and priority of a request; set it only where clients cannot "
            "connect to this server themselves"
        ),
    ] = False
    admin_port: Annotated[
        Port | None, option("TCP port of the admin API: /abort, /flush_cache, /state", default="no admin API")
    ] = None
    admin_keys: Annotated[
        str | None,
        option("file with keys for the admin API, required with --admin-port", default="none", metavar="FILE"),
    ] = None


class TraceOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Traces of requests. The rest is set by the environment variables of OpenTelemetry."""

    endpoint: Annotated[
        str | None,
        option(
            "collector that gets traces by OTLP over HTTP, such as http://localhost:4318",
            default="OTEL_EXPORTER_OTLP_ENDPOINT; no traces without either",
            metavar="URL",
        ),
    ] = msgspec.field(default=None, name="otlp_traces_endpoint")
    sampling: Annotated[
        Share | None,
        option(
            "share of the traces that begin here which are recorded, from 0 to 1",
            default="that of OTEL_TRACES_SAMPLER, or 0.1",
        ),
    ] = msgspec.field(default=None, name="trace_sampling")


class FrontendConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One HTTP server and its tokenizer workers. Times in seconds."""

    host: str = "127.0.0.1"
    port: int = HTTP_PORT
    """0: any free port."""
    socket_fd: int | None = None
    """Inherited, bound socket to listen on instead of host and port."""
    peer_secret: str = ""
    """Directory with the tokens of the model's pods, of which /status of the control port reports fingerprints."""
    lost_lines_fd: int | None = None
    """Inherited descriptor from which `LostLines` of the launcher are read; None: no launcher writes our lines."""
    tokenizer_addresses: tuple[str, ...]
    """One `ipc://` address for each worker. The frontend binds them, the workers connect."""
    tokenizer: TokenizerConfig | None = None
    """Worker to run in a thread of the frontend instead of a process of its own."""
    leave_seconds: float = 0.0
    """Time after SIGTERM during which new requests are still served while readiness probes fail: a cluster takes a
    moment to send them elsewhere."""
    drain_seconds: float = 25.0
    """Time after that for running requests to finish; then they end in an error."""
    accept_seconds: float = 60.0
    """Longest time that the engine may take to queue a request, and a tokenizer worker to check its constraints."""
    stale_seconds: float = 5.0
    """Age of the engine's last status from which the frontend is not ready; it is sent several times a second."""
    ready_before_engine: bool = False
    """Report ready before an engine has been connected for the first time: in a cluster, a held request may be what
    starts one."""
    names: tuple[str, ...] = ()
    """Names of the model, which a request is checked against before an engine is connected; empty: unknown until
    then."""
    header_seconds: float = 15.0
    """Longest time from the start of a request to the headers of a stream, even if no engine has queued it."""
    ping_seconds: float = 15.0
    """Interval of comments in a silent stream, so that proxies keep it open."""
    max_body_bytes: int = 8 << 20
    limits: RequestLimits = RequestLimits()
    access: Access = Access()
    traces: TraceOptions = TraceOptions()
    control_port: int | None = None
    """Port for probes, status and drain, on all addresses; None: none."""
