"""Configuration of a tokenizer worker: plain data, cheap to import for whoever starts one."""

from __future__ import annotations

import msgspec


class TokenizerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One worker, between one frontend and one scheduler."""

    model: str
    """Directory with the checkpoint's tokenizer files."""
    scheduler_address: str
    """The scheduler's ROUTER, `ipc://` or `tcp://`."""
    frontend_address: str
    """Bound by the frontend for this worker alone."""
    name: str = "tokenizer0"
    """What the scheduler calls this client in its log."""
