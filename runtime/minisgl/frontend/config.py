"""Configuration of a frontend: plain data, cheap to import for whoever starts one."""

from __future__ import annotations

import msgspec

from minisgl.tokenizer.config import TokenizerConfig


class FrontendConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One HTTP server and the tokenizer workers behind it."""

    host: str = "127.0.0.1"
    port: int = 8000
    """0: any free one."""
    socket_fd: int | None = None
    """An inherited, bound socket to listen on instead of host and port."""
    tokenizer_addresses: tuple[str, ...]
    """One `ipc://` address for each worker. The frontend binds them, the workers connect."""
    tokenizer: TokenizerConfig | None = None
    """Run this worker in a thread of the frontend instead of a process of its own."""
    drain_seconds: float = 25.0
    """After SIGTERM, how long answers may go on before they are broken off."""
    accept_seconds: float = 60.0
    """How long the engine may take to queue a request."""
    stale_seconds: float = 5.0
    """Not ready when the engine has said nothing for so long; it speaks several times a second."""
    ping_seconds: float = 15.0
    """A silent stream carries a comment this often, so that proxies keep it open."""
    max_body_bytes: int = 8 << 20
