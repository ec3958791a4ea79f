"""Configuration of a frontend: plain data, cheap to import for whoever starts one."""

from __future__ import annotations

import msgspec

from minisgl.router.config import TokenizerConfig
from minisgl.wire.status import HTTP_PORT


class RequestLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What clients may ask of the server at a time, and for how long anything may take; times in seconds."""

    waiting: int = 1024
    """Choices without a token yet; one more is rejected."""
    waiting_tokens: int = 2 << 20
    """Tokens of their prompts together."""
    in_flight: int = 8192
    """HTTP requests whose answer is not complete, whatever state they are in."""
    in_flight_per_key: int | None = None
    """The same of one API key; None: no limit of its own."""
    queue_seconds: float = 60.0
    """How long a request may wait for a place in the batch."""
    request_seconds: float = 1800.0
    """Longest time from the first byte of a request to the last of its answer."""
    stall_seconds: float = 60.0
    """Longest time that the engine may do nothing for a request that has a place."""
    body_seconds: float = 30.0
    """From the headers of a request to the end of its body."""
    send_seconds: float = 30.0
    """How long a client may read nothing of what waits for it."""
    unsent_bytes: int = 1 << 20
    """Text that may wait for such a client."""


class FrontendConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One HTTP server and the tokenizer workers behind it."""

    host: str = "127.0.0.1"
    port: int = HTTP_PORT
    """0: any free one."""
    socket_fd: int | None = None
    """An inherited, bound socket to listen on instead of host and port."""
    tokenizer_addresses: tuple[str, ...]
    """One `ipc://` address for each worker. The frontend binds them, the workers connect."""
    tokenizer: TokenizerConfig | None = None
    """Run this worker in a thread of the frontend instead of a process of its own."""
    leave_seconds: float = 0.0
    """After SIGTERM, how long new requests are still served while those who send them learn that this one is not ready
    any more. A cluster takes a moment for that."""
    drain_seconds: float = 25.0
    """After SIGTERM, how long answers may go on before they are broken off."""
    accept_seconds: float = 60.0
    """How long the engine may take to queue a request."""
    stale_seconds: float = 5.0
    """Not ready when the engine has said nothing for so long; it speaks several times a second."""
    ping_seconds: float = 15.0
    """A silent stream carries a comment this often, so that proxies keep it open."""
    max_body_bytes: int = 8 << 20
    limits: RequestLimits = RequestLimits()
    api_keys: str | None = None
    """File with the keys of those who may use the API; None: everybody may."""
    cors_origins: tuple[str, ...] = ()
    """Web pages of these origins may use the API from a browser; `*`: of all."""
    control_port: int | None = None
    """Port for whoever runs this server in a cluster, on all addresses: health, state, drain. None: there is none."""
    admin_port: int | None = None
    """Port of the administration on the same host; None: there is none. 0: any free one."""
    admin_keys: str | None = None
    """File with the keys of administrators; must be given with `admin_port`."""
