"""Configuration of a tokenizer worker: plain data, cheap to import for whoever starts one."""

from __future__ import annotations

import msgspec

from minisgl.wire.status import CONTROL_PORT, SCHEDULER_PORT


class EngineDiscovery(msgspec.Struct, frozen=True, kw_only=True):
    """Engines that are found by a name, come and go, and have the tokenizer files. Times in seconds."""

    host: str
    """Its addresses are those of all replicas' rank 0."""
    scheduler_port: int = SCHEDULER_PORT
    control_port: int = CONTROL_PORT
    """Where an engine gives out its tokenizer files by HTTP."""
    cache: str
    """Directory for these files, which other workers may use at the same time."""
    retry_seconds: float = 60.0
    """How long a request that no engine can take may wait for one, once it was taken in."""
    stall_seconds: float = 60.0
    """An engine that has said nothing for so long counts as lost."""
    names: tuple[str, ...] = ()
    """By which requests may call the model; empty: by the engines' name for it."""


class TokenizerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One worker of one frontend. Its engine is either one scheduler at an address, with the checkpoint's files at
    hand, or whatever `engines` finds."""

    model: str = ""
    """Directory with the checkpoint's tokenizer files."""
    scheduler_address: str = ""
    """The scheduler's ROUTER, `ipc://` or `tcp://`."""
    names: tuple[str, ...] = ()
    """Of the model, for requests; empty: the scheduler's name for it. With `engines` theirs count."""
    engines: EngineDiscovery | None = None
    frontend_address: str
    """Bound by the frontend for this worker alone."""
    name: str = "tokenizer0"
    """What the scheduler calls this client in its log."""
