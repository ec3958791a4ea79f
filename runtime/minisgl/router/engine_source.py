"""Sources of engines and their tokenizer files: this machine, or a DNS name and HTTP in a cluster."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from minisgl.router.config import EngineDiscovery, LocalEngine, TokenizerConfig
from minisgl.router.discovery import Resolve, Sockets, look_up
from minisgl.router.replicas import STALE_SECONDS
from minisgl.router.tokenizer_files import fetch_files, local_files
from minisgl.tokenizer.loaded import LoadedTokenizer, load
from minisgl.tokenizer.trial import try_files

LOCAL_ENGINE: Final = "local engine"
"""Address by which the only replica of a server on one machine is reported."""


class EngineSource(msgspec.Struct, frozen=True, kw_only=True):
    """All that differs between one machine and a cluster."""

    sockets: Sockets = {}
    """Schedulers that are known from the start."""
    find: Callable[[], Sockets] | None = None
    """Look-up of schedulers, which may take seconds. Raises OSError. None: `sockets` never change."""
    files: Callable[[Mapping[str, str], Sequence[str]], Path]
    """Directory with the tokenizer files of these hashes; the addresses are those of replicas that have them.
    May take seconds. Raises TokenizerError, OSError."""
    tokenizer: LoadedTokenizer | None = None
    """Tokenizer that is in use from the start."""
    stale_seconds: float
    """A replica that has sent nothing for this long gets no new requests."""
    stall_seconds: float
    """A replica with requests that has sent nothing for this long counts as lost."""


def engine_source(config: TokenizerConfig, resolve: Resolve) -> EngineSource:
    """Return the source of a configuration; on one machine this loads the tokenizer. Raises TokenizerError."""
    match engines := config.engines:
        case LocalEngine():
            return EngineSource(
                sockets={LOCAL_ENGINE: engines.scheduler_address},
                files=lambda hashes, _: local_files(Path(engines.model), hashes),
                tokenizer=load(engines.model, config.parsers),
                # No other engine could take the requests, and a long step on a CPU is as silent as a hang. The launcher
                # notices a hang and restarts the engine.
                stale_seconds=math.inf,
                stall_seconds=math.inf,
            )
        case EngineDiscovery():
            return EngineSource(
                find=lambda: look_up(engines.host, engines.scheduler_port, resolve),
                files=lambda hashes, hosts: _tried(
                    fetch_files(hashes, hosts, engines.control_port, Path(engines.cache))
                ),
                stale_seconds=STALE_SECONDS,
                stall_seconds=config.stall_seconds,
            )


def _tried(directory: Path) -> Path:
    """Raises TokenizerError for files that may not be loaded."""
    try_files(directory)
    return directory
