"""Configuration of a frontend: plain data, cheap to import for launchers."""

from __future__ import annotations

import msgspec

from minisgl.router.config import TokenizerConfig
from minisgl.wire.status import HTTP_PORT


class RequestLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits on requests in progress, and on their times; times in seconds."""

    waiting: int = 1024
    """Most choices without a token yet; further requests are rejected."""
    waiting_tokens: int = 2 << 20
    """Most tokens of their prompts."""
    in_flight: int = 8192
    """Most HTTP requests whose response is not complete."""
    in_flight_per_key: int | None = None
    """Most of them with one API key; None: no separate limit."""
    queue_seconds: float = 60.0
    """Longest time that a request may wait for a place in the batch."""
    request_seconds: float = 1800.0
    """Longest time from the first byte of a request to the last byte of its response."""
    stall_seconds: float = 60.0
    """Longest time without progress of the engine on a running request."""
    body_seconds: float = 30.0
    """Longest time from the headers of a request to the end of its body."""
    send_seconds: float = 30.0
    """Longest time that a client may read nothing of what waits for it."""
    unsent_bytes: int = 1 << 20
    """Most text that may wait for such a client."""


class FrontendConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One HTTP server and its tokenizer workers. Times in seconds."""

    host: str = "127.0.0.1"
    port: int = HTTP_PORT
    """0: any free port."""
    socket_fd: int | None = None
    """Inherited, bound socket to listen on instead of host and port."""
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
    """Longest time that the engine may take to queue a request."""
    stale_seconds: float = 5.0
    """Age of the engine's last status from which the frontend is not ready; it is sent several times a second."""
    ping_seconds: float = 15.0
    """Interval of comments in a silent stream, so that proxies keep it open."""
    max_body_bytes: int = 8 << 20
    limits: RequestLimits = RequestLimits()
    api_keys: str | None = None
    """File with API keys; None: no key is required."""
    cors_origins: tuple[str, ...] = ()
    """Origins of web pages that may use the API from a browser; `*`: all."""
    control_port: int | None = None
    """Port for probes, status and drain, on all addresses; None: none."""
    admin_port: int | None = None
    """Port of the admin API on the same host; None: none. 0: any free port."""
    admin_keys: str | None = None
    """File with the keys of administrators; required with `admin_port`."""
