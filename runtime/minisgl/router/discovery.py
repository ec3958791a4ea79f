"""Addresses of engines: one that never changes, or those behind a DNS name, looked up again and again."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Mapping
from typing import Final, TypeAlias

from minisgl.wire.sockets import url_host

logger = logging.getLogger(__name__)

LOOKUP_SECONDS: Final = 2.0
SOON_SECONDS: Final = 0.2
"""Between two look-ups while requests wait for a replica: it may have an address that is not known yet."""
MAX_ADDRESSES: Final = 1024
_HAS_NO_ADDRESSES: Final = (socket.EAI_NONAME, socket.EAI_NODATA)
"""Errors of a look-up that name servers answered: a headless Service without endpoints has no record."""

Resolve: TypeAlias = "Callable[[str], frozenset[str]]"
"""Numeric addresses of a host name. Raises OSError."""

Sockets: TypeAlias = "Mapping[str, str]"
"""Address of each scheduler's socket, by the address of its replica."""


class NoEngines(OSError):
    """The name of the engines has no addresses, as of a model at zero. No other failure of a look-up says so."""


def resolve_host(host: str) -> frozenset[str]:
    """Return the numeric IPv4 and IPv6 addresses of a host name. Raises OSError."""
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return frozenset(str(address[0]) for *_, address in found)


def look_up(host: str, port: int, resolve: Resolve) -> Sockets:
    """Return the schedulers behind a name. Raises OSError with a message that names it, NoEngines if it has none."""
    try:
        found = sorted(resolve(host))
    except (OSError, UnicodeError) as error:
        has_none = isinstance(error, socket.gaierror) and error.errno in _HAS_NO_ADDRESSES
        raise (NoEngines if has_none else OSError)(f"the name {host} cannot be resolved: {error}") from error
    if not found:
        raise NoEngines(f"the name {host} has no addresses")
    if len(found) > MAX_ADDRESSES:
        logger.error("%s has %d addresses; only %d of them are used", host, len(found), MAX_ADDRESSES)
    return {address: f"tcp://{url_host(address)}:{port}" for address in found[:MAX_ADDRESSES]}


class Discovery:
    """Looks up addresses in a thread of its own, because the system's resolver may take seconds. After each look-up
    `changed` is called in that thread, whether or not anything has changed."""

    def __init__(self, sockets: Sockets, find: Callable[[], Sockets] | None, changed: Callable[[], None]) -> None:
        """`sockets` are known from the start. `find` may raise OSError, whose text is the reason why no engine is
        known; None: the addresses never change."""
        self.sockets = sockets
        """Result of the last look-up; empty when it failed."""
        self.problem = "the engines' addresses have not been looked up yet"
        """Reason why there is no address."""
        self.found_none = False
        """The last look-up has found that there is no engine."""
        self._find = find
        self._changed = changed
        self._stop = threading.Event()
        self._soon = threading.Event()
        self._calling = threading.Lock()
        """Held while `changed` runs."""
        self._thread = threading.Thread(target=self._run, name="discovery", daemon=True)

    def start(self) -> None:
        if self._find is not None:
            self._thread.start()

    def look_up_soon(self) -> None:
        """Begin the next look-up SOON_SECONDS after the last one."""
        self._soon.set()

    def stop(self) -> None:
        """End the look-ups. `changed` is not called afterwards; a look-up in progress is not waited for."""
        with self._calling:
            self._stop.set()
        self._soon.set()

    def _run(self) -> None:
        assert self._find is not None
        while not self._stop.is_set():
            found: Sockets = {}
            problem, found_none = "", False
            try:
                found = self._find()
            except OSError as error:
                problem, found_none = str(error), isinstance(error, NoEngines)
            with self._calling:
                if self._stop.is_set():
                    return
                if found != self.sockets:
                    logger.info("engines at %s", ", ".join(found) or f"no address: {problem}")
                self.sockets, self.problem, self.found_none = found, problem, found_none
                self._soon.clear()
                self._changed()
            if not self._stop.wait(SOON_SECONDS):
                self._soon.wait(LOOKUP_SECONDS - SOON_SECONDS)
