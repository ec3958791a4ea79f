"""Configuration of a tokenizer worker: plain data, cheap to import for the process that starts one."""

from __future__ import annotations

import msgspec

from minisgl.parsing.names import Parsers
from minisgl.wire.status import CONTROL_PORT, SCHEDULER_PORT


class LocalEngine(msgspec.Struct, frozen=True, kw_only=True, tag="local"):
    """The one engine of a server on this machine. Its address never changes, and the checkpoint is on the disk."""

    scheduler_address: str
    """`ipc://` or `tcp://` address of the scheduler's ROUTER socket."""
    model: str
    """Directory with the checkpoint's tokenizer files."""


class EngineDiscovery(msgspec.Struct, frozen=True, kw_only=True, tag="dns"):
    """Engines of a cluster. They are found by a DNS name, come and go, and serve their tokenizer files by HTTP."""

    host: str
    """Name that resolves to the addresses of all replicas' rank 0."""
    scheduler_port: int = SCHEDULER_PORT
    control_port: int = CONTROL_PORT
    """Port from which an engine serves its tokenizer files."""
    cache: str
    """Directory for these files, which other workers may use at the same time."""


class TokenizerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One tokenizer worker of one frontend. Times in seconds."""

    engines: LocalEngine | EngineDiscovery
    names: tuple[str, ...] = ()
    """Names of the model that requests may use; empty: the engines' name for it."""
    parsers: Parsers = Parsers()
    queue_seconds: float = 60.0
    """Longest time that a request waits for an engine that can take it."""
    stall_seconds: float = 60.0
    """An engine with requests that sends nothing for this long counts as lost."""
    continues: bool = True
    """Answers go on when their engine is lost; False: those with output end in an error."""
    drain_seconds: float = 0.0
    """Longest drain of an engine; 0: unknown. Requests of one that ends earlier may wait for the rest of it."""
    frontend_address: str
    """Bound by the frontend for this worker alone."""
    peer_secret: str = ""
    """Directory with the tokens of the model's pods, see PeerSecret; empty: none."""
    name: str = "tokenizer0"
    """Name of this client in the scheduler's log."""
